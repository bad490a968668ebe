"""Inside vLLM: a restarted server finds the prompts of the one before, on disk.

python examples/inside_vllm.py  # twice; in vLLM's environment, with FlowKV's wheel

vLLM copies keys and values to host memory only from devices that it can offload, such as GPUs;
on others it says so and stops.
"""

import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from flowkv.data import tiny_path  # a trained model that comes with FlowKV; its tokens are bytes


def main() -> None:
    """One server's life: asks one long prompt."""
    llm = LLM(
        str(tiny_path()),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        prefix_caching_hash_algo="sha256_cbor",  # the same names in every process
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": 256 << 20,
                "eviction_policy": "flowkv_auto",
                "cache_policy_module_path": "flowkv.connect.vllm",
                "secondary_tiers": [
                    {
                        "type": "FlowKVTier",
                        "module_path": "flowkv.connect.vllm",
                        "places": ["disk:./kv-vllm:1GiB"],
                    }
                ],
            },
        ),
    )
    prompt = list(b"import os\nimport sys\n\n\nclass Stack:\n    def push(self, item):\n" * 24)
    params = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
    begun_s = time.perf_counter()
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    took_s = time.perf_counter() - begun_s
    print(bytes(answer.outputs[0].token_ids))
    print(f"{answer.num_cached_tokens} of {len(prompt)} tokens were known, {took_s:.2f} s")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
