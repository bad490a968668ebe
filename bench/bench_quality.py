"""Cost of codecs in bits per byte, on the trained fixture, on the CPU.

    python -m bench.bench_quality [--windows 400] [--part codecs|auto] [--json FILE]

Codecs are measured through an attached cache whose every full page is encoded before the next one
is read (`bench.quality`); all windows are read with raw pages too, and deltas are paired.
Three windows in all: plain text, a text and its copy, and what a lost page would cost. Parts that
are already in FILE are kept, so that they can be measured one by one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.figures import save
from bench.quality import Scores, Task, continuation, delta, lost_page, measure, second_copy
from tests.fixture_model import corpus, load_tiny

PERIOD = 128
TARGETS = {
    "continuation": {"kv8": 0.0005, "kv4c": 0.015},
    f"second copy after {PERIOD}": {"kv8": 0.002, "kv4c": 0.03},
    "second copy after 512": {"auto": 0.02},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--part", choices=("codecs", "auto"), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, text = load_tiny(), corpus("validation")
    parts = {"codecs": codecs, "auto": auto}
    report: dict[str, Any] = {}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
    report |= {
        "device": f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name in options.part or parts:
        rows = []
        for row in parts[name](model, text, options.windows):
            print("  ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{v}" for k, v in row))
            rows.append(dict(row))
        report[name] = {"date": f"{datetime.date.today()}", "rows": rows}
        save(options.json, report)
    met = [row.get("met", True) for name in parts for row in report.get(name, {}).get("rows", ())]
    return 0 if all(met) else 1


Row = list[tuple[str, Any]]


def codecs(model: torch.nn.Module, text: bytes, count: int) -> Iterator[Row]:
    """Every codec, on every page that is full."""
    for size in (64, 128):
        for task in (continuation(text, count), second_copy(text, count, period=PERIOD)):
            fields = {"page_size": size, "gpu": "512MiB", "recent_tokens": 0}
            raw = measure(model, task, codec="raw", **fields)
            for codec in ("kv8", "k8v4", "kv4c", "kv4h"):
                started = time.perf_counter()
                coded = measure(model, task, codec=codec, **fields)
                yield compared(task, size, codec, raw, coded, started)
            started = time.perf_counter()
            lost = measure(model, task, codec="kv8", visit=lost_page(0, PERIOD), **fields)
            yield compared(task, size, "kv8, page 0 lost", raw, lost, started)


def auto(model: torch.nn.Module, text: bytes, count: int) -> Iterator[Row]:
    """Codec "auto" as it is by default, at the end of 4096 tokens."""
    for period in (512, 1024):
        task = second_copy(text, count, period=period, before=4096 - 2 * period)
        raw = measure(model, task, batch=8, page_size=128, gpu="512MiB")
        for label, fields in (("auto", {}), ("auto, nothing at 8 bits", {"warm_tokens": 0})):
            started = time.perf_counter()
            coded = measure(model, task, batch=8, codec="auto", gpu="512MiB", **fields)
            yield compared(task, 128, label, raw, coded, started)


def compared(task: Task, size: int, codec: str, raw: Scores, coded: Scores, started: float) -> Row:
    """One line of the table; sizes are of the pages of a whole window, raw ones included."""
    found = delta(coded, raw)
    kept = coded.n_bytes.get("raw", 0)
    row: Row = [
        ("task", task.name),
        ("page_size", size),
        ("codec", codec),
        ("windows", len(raw.bits)),
        ("raw_bits", raw.bits.mean().item()),
        ("delta_bits", found.mean),
        ("two_errors", found.error),
        ("bytes_of_float32", raw.used_bytes / coded.used_bytes),
        # The fixture computes in float32; raw pages of 16 bits are half as large, to the byte.
        ("bytes_of_16_bits", raw.used_bytes / 2 / (coded.used_bytes - kept / 2)),
        ("seconds", round(time.perf_counter() - started, 1)),
    ]
    target = TARGETS.get(task.name, {}).get(codec)
    return row if target is None else [*row, ("target", target), ("met", found.mean <= target)]


if __name__ == "__main__":
    sys.exit(main())
