"""Cost of naming a model, and of noticing that nothing changed: `python -m bench.bench_identity`.

A random decoder of 30 layers and 538 MB of fp32 weights. Everything is measured in one run, medians
with the least and the most, beside what it is a share of: reading the weights once (`torch.sum`),
and a plain `generate` of 256 + 32 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from flowkv.naming.identity import CALLS, Identity, drawn

PAGE_TOKENS = 64


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return sorted(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    served = model()
    ids = torch.randint(5, 1000, (1, 256), generator=torch.manual_seed(1))

    def answer() -> None:
        served.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False)

    identity = Identity(served)
    rows = {
        "weights_bytes": [float(identity.n_bytes)],
        "name_the_model_s": timed(lambda: Identity(served), chosen.repeats),
        "sum_the_weights_s": timed(
            lambda: [p.detach().sum() for p in served.parameters()], chosen.repeats
        ),
        "nothing_changed_s": timed(lambda: identity.same(served), chosen.repeats),
        f"read_1_of_{CALLS}_s": timed(lambda: identity.roll(0.0), chosen.repeats),
        "generators_s": timed(drawn, chosen.repeats),
        "generate_256_32_s": timed(answer, max(1, chosen.repeats // 3)),
    }
    if chosen.json:
        print(json.dumps(rows))
        return
    for name, found in rows.items():
        print(f"{name:<24} {statistics.median(found):12.6g}  ({found[0]:.4g} to {found[-1]:.4g})")
    middle = {name: statistics.median(found) for name, found in rows.items()}
    # A call asks twice (before its first forward, behind it) and once for each page that fills.
    call = 3 * middle["nothing_changed_s"] + middle[f"read_1_of_{CALLS}_s"]
    print(f"{'share of a call':<24} {call / middle['generate_256_32_s']:12.4%}")
    # Only models that may draw random numbers are asked what they drew.
    step = middle["nothing_changed_s"] / PAGE_TOKENS
    step += 2 * middle["generators_s"] * identity.draws
    print(f"{'a decode step, us':<24} {1e6 * step:12.4g}")


if __name__ == "__main__":
    main()
