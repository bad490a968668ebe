"""Paged attention, append and page moves on one GPU: checked first, then timed, in one call.

    python bench/gpu/bench_attend.py --out results     # or $OUT, or the working directory

Writes `bench_attend.json`: device, versions, measured bandwidth and matrix ceilings, and for each
case microseconds (median and 10th and 90th percentile), bytes or operations a second, their share
of the ceiling, and the same attention by torch over keys and values gathered beforehand, which is
given for nothing there. A case that answers wrongly is reported and not timed.

Calls are captured in CUDA graphs, as a serving engine does; each replay works on other pages than
the one before it, so that nothing is read from the L2 cache. `eager_us` is the time of a call
without a graph, which is mostly what Python and the launch cost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flowkv.core.geometry import GRANULE_BYTES, Geometry, page_layout
from flowkv.kernels import (
    Pages,
    Ragged,
    append,
    copy_pages,
    gather_dense,
    gather_pages,
    paged_attention,
    scatter_pages,
)

sdpa = torch.nn.functional.scaled_dot_product_attention
L2_BYTES = 128 << 20  # what a replay must read before a page may come round again


class Case(NamedTuple):
    """Rows of one step and the shape of their cache."""

    name: str
    lengths: list[int]
    new: list[int]
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    page: int = 64
    dtype: str = "bfloat16"
    window: int | None = None


K = 1024
CASES = [
    Case("decode 32 x 4k", [4 * K] * 32, [1] * 32),
    Case("decode 1 x 128k", [128 * K], [1]),
    Case("decode 1 x 1k", [K], [1]),
    Case("decode 1 x 16k", [16 * K], [1]),
    Case("decode 256 x 1k", [K] * 256, [1] * 256),
    Case("decode 32 ragged 1k-32k", [K * (1 + i * i // 31) for i in range(32)], [1] * 32),
    Case("decode 32 x 4k D=64", [4 * K] * 32, [1] * 32, dim=64),
    Case("decode 32 x 4k D=80", [4 * K] * 32, [1] * 32, dim=80),
    Case("decode 32 x 4k D=256", [4 * K] * 32, [1] * 32, dim=256, kv_heads=4),
    Case("decode 32 x 4k page 16", [4 * K] * 32, [1] * 32, page=16),
    Case("decode 32 x 4k page 128", [4 * K] * 32, [1] * 32, page=128),
    Case("decode 32 x 4k MHA", [4 * K] * 32, [1] * 32, kv_heads=32, group=1),
    Case("decode 32 x 4k group 8", [4 * K] * 32, [1] * 32, group=8),
    Case("decode 32 x 4k float32", [4 * K] * 32, [1] * 32, dtype="float32"),
    Case("decode 32 x 16k window 1k", [16 * K] * 32, [1] * 32, window=K),
    Case("verify 32 x 4k T=4", [4 * K] * 32, [4] * 32),
    Case("prefill 1 x 2k", [2 * K], [2 * K]),
    Case("prefill 1 x 16k", [16 * K], [16 * K]),
    Case("prefill 8 x 2k", [2 * K] * 8, [2 * K] * 8),
    Case("prefill 1 x 2k D=64", [2 * K], [2 * K], dim=64),
    Case("prefill 1 x 2k D=256", [2 * K], [2 * K], dim=256),
    Case("chunk 2k at 14k", [16 * K], [2 * K]),
    Case("suffix 64 over 32k", [32 * K + 64], [64]),
    Case("mixed 2k chunk + 31 x 4k decode", [8 * K] + [4 * K] * 31, [2 * K] + [1] * 31),
]


class Step(NamedTuple):
    """A pool full of noise and sets of tables over different pages of it."""

    pages: Pages
    batches: list[Ragged]
    q: torch.Tensor


def prepare(case: Case) -> Step:
    geometry = Geometry.uniform(
        layers=1,
        kv_heads=case.kv_heads,
        head_dim=case.dim,
        dtype=case.dtype,
        window=case.window,
        page_size=case.page,
    )
    layout = page_layout(geometry.groups[0], case.page)
    counts = [-(-n // case.page) for n in case.lengths]
    sets = max(2, min(8, 1 + 2 * L2_BYTES // (sum(counts) * layout.page_bytes)))
    total = sets * sum(counts)
    dtype = getattr(torch, case.dtype)
    elements = total * layout.page_bytes // dtype.itemsize
    arena = torch.empty(elements, dtype=dtype, device="cuda").normal_().view(torch.uint8)
    order = torch.randperm(total, dtype=torch.int32).split(counts * sets)
    starts = torch.tensor([0, *case.new]).cumsum(0).int().cuda()
    batches = []
    for i in range(sets):
        table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for row, own in enumerate(order[i * len(counts) : (i + 1) * len(counts)]):
            table[row, : len(own)] = own * layout.granules
        batches.append(
            Ragged(
                table.cuda(),
                torch.arange(len(counts), dtype=torch.int32, device="cuda"),
                torch.tensor(case.lengths, dtype=torch.int32, device="cuda"),
                starts,
                max(case.new),
                max(case.lengths),
            )
        )
    q = torch.randn(sum(case.new), case.kv_heads * case.group, case.dim, device="cuda").to(dtype)
    return Step(Pages(arena, layout, 0), batches, q)


def exact(case: Case, step: Step) -> torch.Tensor:
    """Attention in float32 over gathered pages, query block by query block."""
    k, v = gather_dense(step.pages, step.batches[0], max(case.lengths), backend="reference")
    out, n = torch.empty_like(step.q), 0
    for b, (length, new) in enumerate(zip(case.lengths, case.new, strict=True)):
        for begin in range(0, new, 256):
            rows = min(256, new - begin)
            q = step.q[n : n + rows].float().transpose(0, 1)
            keys = k[b, :, -length:].float().repeat_interleave(case.group, 0)
            values = v[b, :, -length:].float().repeat_interleave(case.group, 0)
            at = torch.arange(length - new + begin, length - new + begin + rows, device="cuda")
            seen = torch.arange(length, device="cuda")
            mask = seen[None] <= at[:, None]
            if case.window:
                mask &= seen[None] > at[:, None] - case.window
            s = (q @ keys.transpose(1, 2)) * case.dim**-0.5
            p = s.masked_fill(~mask, -torch.inf).softmax(-1)
            out[n : n + rows] = (p @ values).transpose(0, 1).to(out.dtype)
            n += rows
    return out


def dense_torch(case: Case, step: Step) -> list[Callable[[], Any]] | None:
    """torch's attention over gathered keys and values, where the batch is uniform."""
    if len(set(case.lengths)) > 1 or len(set(case.new)) > 1 or case.window:
        return None
    length, new, rows = case.lengths[0], case.new[0], len(case.new)
    if new not in (1, length):
        return None
    calls = []
    q = step.q.view(rows, new, -1, case.dim).transpose(1, 2)
    for batch in step.batches:
        k, v = gather_dense(step.pages, batch, length)
        calls.append(lambda k=k, v=v: sdpa(q, k, v, is_causal=new > 1, enable_gqa=case.group > 1))
    return calls


def timed(calls: list[Callable[[], Any]], rounds: int = 40) -> dict[str, float]:
    """Microseconds of one call, replayed from graphs, one after the other over different data."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graphs = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    for graph in graphs * 3:
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds * len(graphs) + 1)]
    events[0].record()
    for i, event in enumerate(events[1:]):
        graphs[i % len(graphs)].replay()
        event.record()
    torch.cuda.synchronize()
    us = sorted(1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return {
        "us": statistics.median(us),
        "us_p10": us[len(us) // 10],
        "us_p90": us[len(us) * 9 // 10],
    }


def eager(call: Callable[[], Any], rounds: int = 50) -> float:
    """Microseconds of a call without a graph, many of them queued."""
    for _ in range(5):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(rounds):
        call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / rounds


def ceilings() -> dict[str, float]:
    """Bytes a second of a read, of a copy (both ways counted), bfloat16 operations a second."""
    x = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    read = timed([lambda: torch.sum(x)], 10)["us"]
    copy = timed([lambda: y.copy_(x)], 10)["us"]
    matmul = timed([lambda: a @ a], 10)["us"]
    return {
        "read_bytes_s": x.nbytes / read * 1e6,
        "copy_bytes_s": 2 * x.nbytes / copy * 1e6,
        "bfloat16_flop_s": 2 * 8192**3 / matmul * 1e6,
    }


def work(case: Case) -> tuple[float, float]:
    """(Bytes of keys and values that must be read, multiply-adds counted as two operations)."""
    item = getattr(torch, case.dtype).itemsize
    n_bytes = flops = 0.0
    for length, new in zip(case.lengths, case.new, strict=True):
        seen = min(length, case.window + new - 1) if case.window else length
        n_bytes += 2 * seen * case.kv_heads * case.dim * item
        pairs = new * (seen - new) + new * (new + 1) / 2
        flops += 4 * pairs * case.kv_heads * case.group * case.dim
    return n_bytes, flops


def attention(case: Case, limits: dict[str, float]) -> dict[str, Any]:
    step = prepare(case)
    options = {"window": case.window}
    got = paged_attention(step.q, step.pages, step.batches[0], **options)
    right = exact(case, step).float()
    # In norms: averages of thousands of random values are small, and so is any error in them.
    error = float((got.float() - right).norm() / right.norm())
    result: dict[str, Any] = {"case": case.name, "relative_error": error}
    if not error <= {"float32": 1e-4}.get(case.dtype, 1e-2):
        return result | {"wrong": True}
    calls = [lambda b=b: paged_attention(step.q, step.pages, b, **options) for b in step.batches]
    result |= timed(calls)
    result["eager_us"] = eager(calls[0])
    n_bytes, flops = work(case)
    result["bytes_s"], result["flop_s"] = n_bytes / result["us"] * 1e6, flops / result["us"] * 1e6
    result["of_read_ceiling"] = result["bytes_s"] / limits["read_bytes_s"]
    result["of_matmul_ceiling"] = result["flop_s"] / limits["bfloat16_flop_s"]
    dense = dense_torch(case, step)
    if dense:
        result["torch_us"] = timed(dense)["us"]
        result["times_torch"] = result["torch_us"] / result["us"]
    return result


def moves(limits: dict[str, float]) -> list[dict[str, Any]]:
    """Append and page moves; copies are checked bitwise."""
    case = Case("moves", [4 * K] * 64, [1] * 64)
    step = prepare(case)
    pages, batch, layout = step.pages, step.batches[0], step.pages.layout
    n = pages.arena.numel() // layout.page_bytes // 2 * 2
    order = torch.randperm(n, dtype=torch.int32).cuda() * layout.granules
    source, target = order[: n // 2].contiguous(), order[n // 2 :].contiguous()
    frames = pages.arena.view(n, -1)
    at, to = (x.long() // layout.granules for x in (source, target))
    staging = torch.empty(n // 2, layout.page_bytes, dtype=torch.uint8, device="cuda")
    copied = staging.nbytes * 2
    k = torch.randn(64, 8, 128, device="cuda").bfloat16()
    long = batch._replace(starts=batch.starts * (4 * K), most_new=4 * K)
    many = torch.randn(64 * 4 * K, 8, 128, device="cuda").bfloat16()

    def checked(name: str, call: Callable[[], Any], ok: Callable[[], bool], n_bytes: int) -> dict:
        call()
        if not ok():
            return {"case": name, "wrong": True}
        times = timed([call])
        rate = n_bytes / times["us"] * 1e6
        share = rate / limits["copy_bytes_s"]
        return {"case": name, **times, "bytes_s": rate, "of_copy_ceiling": share}

    results = [
        checked(
            "gather pages",
            lambda: gather_pages(pages.arena, source, layout.granules, staging),
            lambda: torch.equal(staging, frames[at]),
            copied,
        ),
        checked(
            "scatter pages",
            lambda: scatter_pages(pages.arena, target, layout.granules, staging),
            lambda: torch.equal(staging, frames[to]),
            copied,
        ),
        checked(
            "copy pages",
            lambda: copy_pages(pages.arena, source, target, layout.granules),
            lambda: torch.equal(frames[at], frames[to]),
            copied,
        ),
        checked(
            "append 64 tokens",
            lambda: append(k, k, pages, batch),
            lambda: torch.equal(gather_dense(pages, batch, 1)[0][:, :, 0], k),
            4 * k.nbytes,
        ),
        checked(
            "append 64 x 4k tokens",
            lambda: append(many, many, pages, long),
            lambda: torch.equal(
                gather_dense(pages, long, 4 * K)[1], many.view(64, 4 * K, 8, 128).transpose(1, 2)
            ),
            4 * many.nbytes,
        ),
    ]
    dense_bytes = 2 * 2 * 64 * 4 * K * 8 * 128 * 2
    always = checked(
        "gather dense 64 x 4k", lambda: gather_dense(pages, batch, 4 * K), lambda: True, dense_bytes
    )
    return [*results, always]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("-k", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_attend.py needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    import triton

    limits = ceilings()
    report: dict[str, Any] = {
        "label": "measured",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "granule_bytes": GRANULE_BYTES,
        "ceilings": limits,
        "results": [],
    }
    print(json.dumps(limits), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "bench_attend.json"
    jobs = [
        (case.name, lambda case=case: [attention(case, limits)])
        for case in CASES
        if args.k in case.name
    ]
    if args.k in "moves":
        jobs.append(("moves", lambda: moves(limits)))
    for name, job in jobs:
        try:
            results = job()
        except Exception as error:  # one case that fails must not take the others' results along
            results = [{"case": name, "failed": f"{type(error).__name__}: {error}"[:500]}]
        for result in results:
            print(json.dumps(result), flush=True)
        report["results"] += results
        path.write_text(json.dumps(report, indent=1))
        torch.cuda.empty_cache()
    bad = [r["case"] for r in report["results"] if "us" not in r]
    if bad:
        print("wrong or failed: " + ", ".join(bad), file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
