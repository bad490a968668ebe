"""The first restart after an installation beside later ones: what compiling costs.

    python -m bench.bench_compiling              # a table
    python -m bench.bench_compiling --json       # one JSON object

One process fills a directory. Then every round has a cache of compiled code of its own, empty at
first: a first process restores with it, which compiles, and a second one, which does not. Both must
reuse the same tokens; the ratio of their times is what the compiler takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPTS, TOKENS, PAGE = 3, 1024, 64


def serve(directory: str) -> dict[str, Any]:
    """Restores what is known of some prompts, and computes the rest, in this process."""
    import numpy as np
    import torch

    from flowkv import KV, Geometry, attention
    from flowkv.core import compiling

    shape = Geometry.uniform(layers=4, kv_heads=2, head_dim=64, page_size=PAGE)
    compiling.watch()
    begun_s, spent_ns, reused = time.perf_counter(), compiling.spent_ns(), []
    with KV(
        shape, namespace="bench", tiers=["gpu:256MiB", f"disk:{directory}:1GiB"], load_deadline_s=2
    ) as kv:
        for number in range(PROMPTS):
            rng = np.random.default_rng(number)
            with kv.open(rng.integers(0, 1000, TOKENS + 5).tolist()) as seq:
                reused.append(seq.reused)
                for step in kv.prefill([seq], chunk=256):
                    assert step.tokens is not None
                    for layer in range(4):
                        noise = torch.randn(1, 2, step.tokens.numel(), 64)
                        attention(noise, noise, noise, layer=layer)
        seconds = time.perf_counter() - begun_s
        rates = [rates.bytes_per_s for rates in kv.gate.rates.values() if rates.samples]
        assert kv.flush(600)
    compiled_s = (compiling.spent_ns() - spent_ns) / 1e9
    return {"reused": reused, "seconds": seconds, "compiled_s": compiled_s, "bytes_per_s": rates}


def process(directory: Path, cache: Path) -> dict[str, Any]:
    """The same in another process, with a cache of compiled code."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "bench.bench_compiling", "--serve", str(directory)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Fills a directory, and restores from it with an empty and with a full cache, in turn."""
    with tempfile.TemporaryDirectory() as home:
        directory, times = Path(home) / "kv", []
        stored = process(directory, Path(home) / "cache")
        assert stored["reused"] == [0] * PROMPTS
        for number in range(rounds):
            cache = Path(home) / f"cache{number}"
            first, later = process(directory, cache), process(directory, cache)
            for found in (first, later):
                assert found["reused"] == [TOKENS] * PROMPTS, f"not all was reused: {found}"
            times.append((first, later))
    ratios = [first["seconds"] / later["seconds"] for first, later in times]
    ours = [(f["seconds"] - f["compiled_s"]) / (s["seconds"] - s["compiled_s"]) for f, s in times]
    return {
        "label": "measured",
        "rounds": rounds,
        "reused_first": 1.0,
        "first_over_later": statistics.median(ratios),
        "the_same_without_compiling": statistics.median(ours),
    }


def main() -> None:
    """Reads the options, measures, and prints."""
    parser = argparse.ArgumentParser(description="The first restart after an installation.")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--serve", metavar="DIR", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        print(json.dumps(serve(given.serve)))
        return
    found = measure(given.rounds)
    if given.json:
        print(json.dumps(found))
        return
    print(f"tokens reused by the first restart        {found['reused_first']:.0%}")
    print(f"first restart over a later one            {found['first_over_later']:.1f}x")
    print(f"the same without the compiler's time      {found['the_same_without_compiling']:.1f}x")


if __name__ == "__main__":
    main()
