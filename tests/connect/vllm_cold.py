"""One process of a real vLLM on a CPU, with rows in the form that they have beside a GPU.

    python -m tests.connect.vllm_cold '{"model": ..., "heads": 2, "tier": {}, "prompts": [[]]}'

It answers each prompt alone, and writes one line of JSON. Options: dtype, and blocks_per_chunk, of
64 tokens each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from bench.engines.host import HostOffloadingSpec, HostOffloadingWorker

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
BLOCK, NEW = 64, 16


class Blocks:
    """One layer's blocks: keys `[heads, dim, tokens]` before values, as kernels for CPUs want them.

    Args:
        blocks: The blocks, i8 `[blocks, bytes]`.
        dtype: dtype of an element.
        heads: Heads.
    """

    def __init__(self, blocks: torch.Tensor, dtype: torch.dtype, heads: int) -> None:
        self.shape, whole = blocks.shape, blocks.view(dtype)
        dim = whole.shape[1] // (2 * heads * BLOCK)
        halves = whole.view(-1, heads, 2, dim * BLOCK).unbind(2)
        self._keys = halves[0].view(-1, heads, dim, BLOCK).transpose(2, 3)
        self._values = halves[1].view(-1, heads, BLOCK, dim)

    def __getitem__(self, which: torch.Tensor) -> torch.Tensor:
        """Blocks as a GPU has them: `[heads, tokens, 2, dim]`."""
        both = torch.stack([self._keys[which], self._values[which]], 3)
        return both.flatten(1).view(torch.int8)

    def __setitem__(self, which: torch.Tensor, rows: torch.Tensor) -> None:
        heads, tokens, dim = self._values.shape[1:]
        both = rows.contiguous().view(self._values.dtype).view(-1, heads, tokens, 2, dim)
        self._keys[which], self._values[which] = both[:, :, :, 0], both[:, :, :, 1]


class ColdSpec(HostOffloadingSpec):
    """vLLM's spec with copies that change the form."""

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            worker: HostOffloadingWorker = super().get_worker(kv_caches)
            how = getattr(torch, self.config.model.dtype), self.extra_config["heads"]
            worker._memory = [(Blocks(cache, *how), host) for cache, host in worker._memory]
        return self._worker


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    of = json.loads(sys.argv[1])
    extra = {
        "spec_name": "ColdSpec",
        "spec_module_path": "tests.connect.vllm_cold",
        "cpu_bytes_to_use": 256 << 20,
        "heads": of["heads"],
        "blocks_per_chunk": of.get("blocks_per_chunk", 1),
        "secondary_tiers": [of["tier"]],
    }
    llm = LLM(
        model=of["model"],
        dtype=of.get("dtype", "float32"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=4096,
        max_num_seqs=2,
        max_num_batched_tokens=4096,
        prefix_caching_hash_algo="sha256_cbor",
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
        disable_log_stats=False,
    )
    params = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=1, detokenize=False
    )
    answers = []
    for ids in of["prompts"]:
        begun_s = time.perf_counter()
        (out,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        tokens, said = list(out.outputs[0].token_ids), out.outputs[0].logprobs
        logs = [one[token].logprob for one, token in zip(said, tokens, strict=True)]
        seconds = time.perf_counter() - begun_s
        cached = out.num_cached_tokens
        answers.append({"tokens": tokens, "logs": logs, "cached": cached, "seconds": seconds})
    from bench.engines.tier import KEEPERS

    tier, before = KEEPERS[0].levels[0].tier, -1
    while before != (now := len(list(tier.scan()))):  # until nothing is stored any more
        before = now
        llm.generate([{"prompt_token_ids": [now, 1, 2]}], params, use_tqdm=False)
        time.sleep(1.0)
    frames = [entry.n_bytes for entry in tier.scan() if entry.info.kind == "page"]
    coded = tier.bases.measured() if hasattr(tier, "bases") else {}
    print("SAYS " + json.dumps({"answers": answers, "frames": frames, "coded": coded}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
