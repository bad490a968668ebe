"""The first restart after an installation beside later ones: what compiling costs.

    python -m bench.bench_compiling              # a table
    python -m bench.bench_compiling --json       # one JSON object
    python -m bench.bench_compiling --fill       # a pool that fills for the first time

With `--fill`, one process with an empty cache of compiled code asks a real model for the first
tokens of prompts, with room for all of them and with a pool that the third one fills, in turn.

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

from bench.figures import answer

PROMPTS, TOKENS, PAGE = 3, 1024, 64


def serve(directory: str) -> dict[str, Any]:
    """Restores what is known of some prompts, and computes the rest, in this process."""
    import numpy as np
    import torch

    from flowkv import KV, Geometry, attention
    from flowkv.compiled import compiling

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


FILL_PROMPTS, FILL_TOKENS, FILL_POOL = 8, 400, "64MiB"


def fill(model_name: str) -> dict[str, Any]:
    """Seconds, by the wall and of the processor, to the first token of each prompt."""
    import numpy as np
    import torch

    import flowkv
    from flowkv.compiled import compiling

    def moment() -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), compiling.spent_ns() / 1e9

    compiling.watch()
    model = flowkv.load(model_name, dtype="float32", device="cpu").model
    rng, times = np.random.default_rng(0), {}
    prompts = rng.integers(1000, 20000, (1 + 2 * FILL_PROMPTS, 1, FILL_TOKENS))
    with flowkv.attach(model, gpu="1GiB", revision="bench"):  # compiles what every prompt needs
        model.generate(torch.tensor(prompts[0]), max_new_tokens=1, do_sample=False)
    for pool in ("1GiB", FILL_POOL):
        times[pool] = []
        with flowkv.attach(model, gpu=pool, revision="bench") as kv:
            for prompt in prompts[1:] if pool == FILL_POOL else prompts[: 1 + FILL_PROMPTS]:
                begun = moment()
                model.generate(torch.tensor(prompt), max_new_tokens=1, do_sample=False)
                times[pool].append([b - a for a, b in zip(begun, moment(), strict=True)])
            chosen = [one.get("chosen") for one in kv.stats()["policies"].values()]
    room = [statistics.median(column) for column in zip(*times["1GiB"][1:], strict=True)]
    full = times[FILL_POOL][1:]
    return {
        "label": "measured",
        "room_s": room[0],
        "room_cpu_s": room[1],
        "median_over_room": statistics.median(one[0] for one in full) / room[0],
        "worst_over_room": max(one[0] for one in full) / room[0],
        "median_cpu_over_room": statistics.median(one[1] for one in full) / room[1],
        "worst_cpu_over_room": max(one[1] for one in full) / room[1],
        "compiled_s": sum(one[2] for one in full),
        "decides": chosen,
        "prompts": {
            pool: [[round(x, 3) for x in one] for one in found] for pool, found in times.items()
        },
    }


def process(directory: Path, cache: Path) -> dict[str, Any]:
    """The same in another process, with a cache of compiled code."""
    command = [sys.executable, "-m", "bench.bench_compiling", "--serve", str(directory)]
    found: dict[str, Any] = answer(command, NUMBA_CACHE_DIR=str(cache))
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
    parser.add_argument("--fill", action="store_true", help="a pool that fills for the first time")
    parser.add_argument("--model", default="smollm2", help="for --fill: folder, or smollm2")
    parser.add_argument("--filled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", metavar="DIR", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        print(json.dumps(serve(given.serve)))
        return
    if given.filled:
        print(json.dumps(fill(given.model)))
        return
    if given.fill:
        with tempfile.TemporaryDirectory() as cache:
            env = os.environ | {"NUMBA_CACHE_DIR": cache}
            command = [sys.executable, "-m", "bench.bench_compiling", "--filled"]
            subprocess.run([*command, "--model", given.model], env=env, check=True)
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
