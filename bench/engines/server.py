"""One process of a real vLLM: asks come as lines of JSON, answers go as lines of JSON.

    python -m bench.engines.server '{"model": ..., "dtype": ..., "tier": {...} | null}'

`{"ask": [[first token, tokens, new tokens], ...]}` answers each prompt alone; `{"steps": N}` steps
rows that decode beside one that comes, N times; `{"report": 1}` says what the tier counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pydoc_data.topics import topics
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")


def transfer(tier: dict[str, Any] | None, cpu_mib: int) -> Any:
    """How vLLM is told to offload; None for not at all."""
    from vllm.config import KVTransferConfig

    if tier is None:
        return None
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "bench.engines.host",
            "cpu_bytes_to_use": cpu_mib << 20,
            "secondary_tiers": [tier],
        },
    )


class Server:
    """vLLM, and English to ask about."""

    def __init__(self, of: dict[str, Any]) -> None:
        from vllm import LLM

        begun_s = time.perf_counter()
        self.llm = LLM(
            model=of["model"],
            dtype=of["dtype"],
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=4,
            max_num_batched_tokens=of.get("batch", 4096),
            prefix_caching_hash_algo="sha256_cbor",
            seed=0,
            kv_transfer_config=transfer(of["tier"], of.get("cpu_mib", 256)),
            disable_log_stats=False,
        )
        text = "\n".join(topics[name] for name in sorted(topics))
        self.ids = self.llm.get_tokenizer()(text)["input_ids"]
        self.ask(len(self.ids) - 2100, 2100, 4)  # warms up, with words that nobody asks about
        self.start_s = time.perf_counter() - begun_s

    def params(self, new: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)

    def ask(self, first: int, n: int, new: int) -> dict[str, Any]:
        prompt = {"prompt_token_ids": self.ids[first : first + n]}
        out = self.llm.generate([prompt], self.params(new), use_tqdm=False)[0]
        return {
            "ttft_s": out.metrics.first_token_latency,
            "cached": out.num_cached_tokens,
            "tokens": list(out.outputs[0].token_ids),
        }

    def steps(self, comes: tuple[int, int], n_steps: int) -> dict[str, Any]:
        """What steps of two rows take, beside one that comes after a while."""
        engine, times, first_s = self.llm.llm_engine, list[float](), None
        for row in range(2):
            prompt = {"prompt_token_ids": self.ids[90_000 + 300 * row :][:200]}
            engine.add_request(f"row {time.monotonic()} {row}", prompt, self.params(n_steps))
        begun_s, tokens = 0.0, list[int]()
        name = f"comes {time.monotonic()}"
        for step in range(n_steps):
            if step == 20:
                prompt = {"prompt_token_ids": self.ids[comes[0] : comes[0] + comes[1]]}
                begun_s = time.perf_counter()
                engine.add_request(name, prompt, self.params(8))
            at_s = time.perf_counter()
            for out in engine.step():
                if out.request_id.startswith("comes") and out.outputs[0].token_ids:
                    tokens = list(out.outputs[0].token_ids)
                    first_s = first_s or time.perf_counter() - begun_s
            times.append(time.perf_counter() - at_s)
        while engine.has_unfinished_requests():
            for out in engine.step():
                if out.request_id.startswith("comes"):
                    tokens = list(out.outputs[0].token_ids)
                    first_s = first_s or time.perf_counter() - begun_s
        return {"steps_s": times[5:], "ttft_s": first_s, "tokens": tokens}

    def report(self) -> dict[str, Any]:
        """What FlowKV's tier counted, if it has one."""
        from bench.engines.tier import KEEPERS

        return KEEPERS[0].report() if KEEPERS else {}


def main() -> None:
    """Serves until the input ends."""
    server = Server(json.loads(sys.argv[1]))
    tell({"start_s": server.start_s, "tokens": len(server.ids)})
    for line in sys.stdin:
        wish = json.loads(line)
        if "ask" in wish:
            tell([server.ask(*one) for one in wish["ask"]])
        elif "steps" in wish:
            tell(server.steps(tuple(wish["comes"]), wish["steps"]))
        else:
            tell(server.report())


def tell(what: Any) -> None:
    print("SAYS " + json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # nothing under way is waited for: what was confirmed is there
