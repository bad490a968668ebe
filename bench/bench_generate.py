"""TTFT and TPOT of plain `generate` with and without FlowKV, on the trained fixture, on the CPU.

    python -m bench.bench_generate [--rounds 7] [--json FILE]

Calls are interleaved A B A B on one thread, tokens are compared before times, and a ratio is the
median of the ratios of neighbouring calls, since machines are shared and noisy. The overhead is
measured in CPU time of the calling thread, which a busy neighbour changes least.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import flowkv
from flowkv.demo.timing import Timing, timed_generate
from tests.fixture_model import load_tiny, stdlib_text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options.rounds)
    rows = [bench.ttft(n) for n in (1024, 3072)]
    rows += [bench.tpot(n) for n in (256, 1024, 3072)]
    rows += [bench.overhead(n) for n in (300, 1024, 3072)]
    for row in rows:
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  ".join(shown))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["identical"] for row in rows) else 1


def text(n_bytes: int, skip: int = 0) -> list[int]:
    """Real source text as token ids; zero bytes are the model's padding."""
    return list(stdlib_text(skip + n_bytes)[skip:].replace(b"\0", b"\n"))


def timed(model: torch.nn.Module, prompt: list[int], new_tokens: int) -> Timing:
    return timed_generate(model, [prompt], max_new_tokens=new_tokens)


class Bench:
    """The fixture twice: `alone` as it is, `served` with FlowKV attached."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.alone, self.served = rounds, _model(), _model()
        self.kv = flowkv.attach(self.served, gpu="128MiB")
        for model in (self.alone, self.served):  # compile and allocate before anything is timed
            timed(model, text(2048, 400_000), 40)
            timed(model, text(2048, 400_000), 40)
        # Once round the pool: a page written for the first time costs what the machine's memory
        # costs (up to 5 ms for 2 MiB in a virtual machine), which is not FlowKV's doing.
        for i in range(13):
            timed(self.served, text(3072, 300_000 + 3072 * i), 1)

    def ttft(self, n_bytes: int) -> dict[str, object]:
        """Time to the first token of a prompt seen before, against the model alone."""
        prompt = text(n_bytes) + list(b"\n# question: ")
        timed(self.served, prompt, 2)
        return self.compare("ttft: cold / reuse", lambda _: prompt, 8, "ttft_s")

    def tpot(self, n_bytes: int) -> dict[str, object]:
        """Time per further token read from pages, against transformers' DynamicCache."""
        prompt = text(n_bytes)
        return self.compare("tpot: DynamicCache / pages", lambda _: prompt, 48, "tpot_s")

    def overhead(self, n_bytes: int) -> dict[str, object]:
        """Prefill of prompts never seen: what FlowKV costs when it cannot help."""
        fresh = [text(n_bytes, 10_000 + 4096 * i) for i in range(self.rounds)]
        return self.compare("prefill, unseen: alone / served", fresh.__getitem__, 1, "ttft_cpu_s")

    def compare(
        self, name: str, prompt_of: Callable[[int], list[int]], new_tokens: int, figure: str
    ) -> dict[str, object]:
        """Interleaved calls; ratios are alone / served of neighbouring calls."""
        pairs = []
        for i in range(self.rounds):
            prompt = prompt_of(i)
            pairs.append([timed(m, prompt, new_tokens) for m in (self.alone, self.served)])
        ratios = sorted(getattr(a, figure) / getattr(b, figure) for a, b in pairs)
        return {
            "bench": name,
            "prompt": pairs[0][0].prompt_tokens,
            "identical": all(a.answers == b.answers for a, b in pairs),
            "alone_ms": 1e3 * median(getattr(a, figure) for a, _ in pairs),
            "served_ms": 1e3 * median(getattr(b, figure) for _, b in pairs),
            "ratio": median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
        }


def _model() -> torch.nn.Module:
    model = load_tiny().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


if __name__ == "__main__":
    sys.exit(main())
