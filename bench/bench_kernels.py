"""Page kernels against plain torch: one table for each operation and shape.

    python -m pytest bench --benchmark-group-by=group                # all tables
    python -m pytest bench/bench_kernels.py -k ratio -s              # decode against torch, A B A B
    python -m pytest bench/bench_kernels.py -k crossover -s          # numba against torch, by T

Every case compares its answer with torch's before it is timed. The ratios are medians of the ratios
of neighbouring calls, since machines are shared and noisy; their 10th and 90th percentiles are
printed beside them. All threads that torch uses are used by both sides. On a machine with a GPU the
tables have Triton's and torch's times on it too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch

from bench.figures import ratios, took, turns
from flowkv.core.geometry import CODECS, Geometry, PageLayout, page_layout
from flowkv.kernels import (
    Pages,
    Ragged,
    Rotary,
    append,
    cascade_attention,
    checksum,
    copy_pages,
    digest_pages,
    drop_tokens,
    gather_dense,
    gather_pages,
    merge,
    paged_attention,
    plan_cascade,
    reposition,
    rotations,
    scatter_pages,
    transcode,
)
from flowkv.kernels.cpu import operations

Tensors = tuple[torch.Tensor, ...]


GPU = ("triton", "torch on the GPU") if torch.cuda.is_available() else ()
OURS = ("numba", "triton")


def benched(op: str) -> pytest.MarkDecorator:
    """The group of an operation; a test looks for one in every row of the kernels' registry."""
    return pytest.mark.benchmark(group=op, min_rounds=5, max_time=2.0, warmup=True)


def sides(*more: str) -> pytest.MarkDecorator:
    """Ours and torch's, on the CPU and on the GPU if there is one, and what else is compared."""
    return pytest.mark.parametrize("side", ["numba", "torch", *more, *GPU])


@pytest.fixture(autouse=True)
def table_of_a_shape(request: pytest.FixtureRequest) -> None:
    """Sides of one shape stand in one table, each under its own name."""
    if "benchmark" in request.fixturenames:
        shape = {k: v for k, v in request.node.callspec.params.items() if k != "side"}
        benchmark = request.getfixturevalue("benchmark")
        parts = [request.node.originalname.removeprefix("test_"), *map(str, shape.values())]
        benchmark.group = f"{benchmark.group}: {' '.join(parts)}"
        benchmark.name = request.node.callspec.params["side"]


def device_of(side: str) -> torch.device:
    """Where the tensors of a side lie; as a context manager, where new ones are made."""
    return torch.device("cuda" if side in GPU else "cpu")


def run(benchmark: Any, side: str, calls: dict[str, Callable[[], object]]) -> None:
    """Times the call of a side: "ours", "torch", or one of its own name."""
    call = calls[side if side in calls else "ours" if side in OURS else "torch"]
    if side in GPU:
        benchmark(lambda: (call(), torch.cuda.synchronize()))
    else:
        benchmark(call)


class Case(NamedTuple):
    """Rows of a decode step and the shape of their cache."""

    lengths: tuple[int, ...]
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    value_dim: int = 128
    dtype: str = "float32"
    page_size: int = 64
    new: int = 1
    window: int | None = None


DECODE = {
    "8 x 4k float32": Case((4096,) * 8),
    "8 x 4k bfloat16": Case((4096,) * 8, dtype="bfloat16"),
    "8 x 4k float16": Case((4096,) * 8, dtype="float16"),
    "1 x 32k bfloat16": Case((32768,), dtype="bfloat16"),
    "ragged 64..16k bfloat16": Case((64, 16384, 300, 2048, 1000, 5000), dtype="bfloat16"),
    "8 x 4k window 512 bfloat16": Case((4096,) * 8, dtype="bfloat16", window=512),
    "8 x 1k MHA float32": Case((1024,) * 8, group=1, kv_heads=16, dim=64, value_dim=64),
    "4 x 4k latent bfloat16": Case((4096,) * 4, 1, 16, 576, 512, dtype="bfloat16"),
}


class Setting(NamedTuple):
    """A pool filled with noise, a step over it, and the same step as tensors that torch can use."""

    pages: Pages
    batch: Ragged
    q: torch.Tensor
    case: Case


def setting(case: Case) -> Setting:
    """The setting of a case, on the device where tensors are made now."""
    return _setting(case, torch.get_default_device())


@cache
def _setting(case: Case, device: torch.device) -> Setting:
    rng = torch.Generator(device).manual_seed(0)
    dtype, size = getattr(torch, case.dtype), case.page_size
    geometry = Geometry.uniform(
        layers=1,
        kv_heads=case.kv_heads,
        head_dim=case.dim,
        value_dim=case.value_dim,
        dtype=case.dtype,
        page_size=size,
    )
    layout = page_layout(geometry.groups[0], size)
    counts = [-(-n // size) for n in case.lengths]
    places = torch.randperm(sum(counts), generator=rng).int() * layout.granules
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    for line, own in zip(table, places.split(counts), strict=True):
        line[: len(own)] = own
    item = dtype.itemsize
    arena = torch.randn(sum(counts) * layout.page_bytes // item, generator=rng, dtype=torch.float32)
    pages = Pages(arena.to(dtype).view(torch.uint8), layout, 0)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    starts = torch.arange(len(counts) + 1, dtype=torch.int32) * case.new
    rows = torch.arange(len(counts), dtype=torch.int32)
    batch = Ragged(table, rows, lengths, starts, case.new, max(case.lengths))
    heads = case.kv_heads * case.group
    q = torch.randn(case.new * len(counts), heads, case.dim, generator=rng).to(dtype)
    return Setting(pages, batch, q, case)


def torch_gather(pages: Pages, table: torch.Tensor) -> Tensors:
    """K and V `[B, Hk, pages * P, D]` by fancy indexing: what a cache without kernels does."""
    layout, dtype = pages.layout, getattr(torch, pages.layout.dtype)
    item = dtype.itemsize
    frames = pages.arena.view(dtype).view(-1, layout.page_bytes // item)
    chosen = frames[(table // layout.granules).long()]  # [B, pages, page]
    runs = chosen[..., : layout.stripe_bytes // item].unflatten(-1, (layout.kv_heads, -1))

    def part(offset_bytes: int, dim: int) -> torch.Tensor:
        flat = runs[..., offset_bytes // item :][..., : layout.page_size * dim]
        return flat.unflatten(-1, (layout.page_size, dim)).transpose(1, 2).flatten(2, 3)

    return part(0, layout.head_dim), part(layout.v_offset_bytes, layout.value_dim)


def torch_decode(scene: Setting, grouped: bool = False) -> torch.Tensor:
    """Gather, then fused attention; rows of unequal length one by one, as without padding.

    `grouped` passes the query heads of a KV head as if they were query tokens, which spares torch
    the copies of K and V that `enable_gqa` makes; few models are written that way.
    """
    pages, batch, q, case = scene
    sdpa = torch.nn.functional.scaled_dot_product_attention
    same = len(set(case.lengths)) == 1
    outs = []
    for rows in [slice(None)] if same else [slice(b, b + 1) for b in range(len(case.lengths))]:
        length = case.lengths[0] if same else case.lengths[rows.start]
        first = 0 if case.window is None else (length - case.window) // case.page_size
        last = -(-length // case.page_size)
        k, v = torch_gather(pages, batch.table[rows, first:last])
        low = 0 if case.window is None else length - case.window - first * case.page_size
        k, v = (x[:, :, low : length - first * case.page_size] for x in (k, v))
        if grouped:
            outs.append(sdpa(q[rows].unflatten(1, (case.kv_heads, -1)), k, v).flatten(1, 2))
        else:
            outs.append(sdpa(q[rows][:, :, None], k, v, enable_gqa=True)[:, :, 0])
    return torch.cat(outs)


def ours(scene: Setting) -> torch.Tensor:
    return paged_attention(scene.q, scene.pages, scene.batch, window=scene.case.window)


def near(got: Tensors, expected: Tensors) -> None:
    for a, b in zip(got, expected, strict=True):
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[b.dtype]
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def percentiles(values: list[float]) -> str:
    low, *_, high = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):.1f}x (10 % {low:.1f}x, 90 % {high:.1f}x)"


WAYS: dict[str, Callable[[Setting], torch.Tensor]] = {
    "ours": ours,
    "torch": torch_decode,
    "torch, grouped": partial(torch_decode, grouped=True),
}


@benched("paged_attention")
@sides("torch, grouped")
@pytest.mark.parametrize("name", DECODE)
def test_decode(benchmark: Any, name: str, side: str) -> None:
    with device_of(side):
        scene = setting(DECODE[name])
    near((ours(scene),), (torch_decode(scene),))
    run(benchmark, side, {way: partial(call, scene) for way, call in WAYS.items()})


@pytest.mark.parametrize("name", DECODE)
def test_decode_ratio(name: str) -> None:
    """Ours against torch's, call by call."""
    scene = setting(DECODE[name])
    near((ours(scene),), (torch_decode(scene),))
    calls = {way: partial(call, scene) for way, call in WAYS.items()}
    own, plain, grouped = turns(calls, 9).values()
    layout = scene.pages.layout
    seen = sum(min(n, scene.case.window or n) for n in scene.case.lengths)
    gigabytes = seen * layout.kv_heads * (layout.head_dim + layout.value_dim) / 1e9
    gigabytes *= 4 if scene.case.dtype == "float32" else 2
    best = min(own)
    print(
        f"\n{name}, {torch.get_num_threads()} threads:"
        f" {best * 1e3:.2f} ms at best, {gigabytes / best:.1f} GB/s of K and V\n"
        f"    {percentiles(ratios(plain, own))} faster than torch,"
        f" {percentiles(ratios(grouped, own))} than torch grouped"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_crossover(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From how many new tokens on torch beats numba (`cpu.operations.FEW_NEW`)."""
    for heads, group, dim, length in ((8, 4, 128, 4096), (8, 1, 64, 1024), (2, 8, 128, 2048)):
        line = []
        for new in (2, 4, 8, 16, 24, 32, 64):
            scene = setting(Case((length,), heads, group, dim, dim, dtype, new=new))
            times = []
            for few in (1000, 0):
                limits = dict.fromkeys(operations.FEW_NEW, few)
                monkeypatch.setattr(operations, "FEW_NEW", limits)
                ours(scene)
                times.append(min(took(partial(ours, scene)) for _ in range(5)))
            line.append(f"T={new} {times[0] / times[1]:.2f}")
        print(f"\n{dtype} {heads}x{group}x{dim} over {length}, numba / torch: " + "  ".join(line))


@benched("cascade_attention")
@sides("numba, flat")
@pytest.mark.parametrize("rows", [8, 32])
def test_cascade(benchmark: Any, side: str, rows: int) -> None:
    """Decode over 4k tokens that all rows share and 256 that they do not, against flat attention.

    The planning of a step, which all its layers share, is not timed.
    """
    with device_of(side):
        scene = setting(Case((4352,) * rows, dtype="bfloat16"))
    pages, batch, q, _ = scene
    table = batch.table.clone()
    table[:, : 4096 // 64] = table[0, : 4096 // 64]
    batch = batch._replace(table=table)
    plan = plan_cascade(batch, 64)
    assert plan.groups == ((0, rows, 64),)
    shared = scene._replace(batch=batch)
    calls = {
        "ours": lambda: cascade_attention(q, pages, batch, plan),
        "numba, flat": lambda: paged_attention(q, pages, batch),
        "torch": lambda: torch_decode(shared),
    }
    near((calls["ours"](),), (calls["numba, flat"](),))
    run(benchmark, side, calls)


@benched("append")
@sides()
@pytest.mark.parametrize("new", [1, 512])
def test_append(benchmark: Any, side: str, new: int) -> None:
    with device_of(side):
        scene = setting(Case((1024,) * 8, dtype="bfloat16", new=new))
        layout: PageLayout = scene.pages.layout
        k, v = torch.randn(2, 8 * new, layout.kv_heads, layout.head_dim).to(torch.bfloat16).unbind()
        position, row = torch.arange(1024 - new, 1024).repeat(8), torch.arange(8)
    pages, batch, case = scene.pages, scene.batch, scene.case
    runs = pages.arena.view(torch.bfloat16).view(-1, layout.page_bytes // 2)
    runs = runs[:, : layout.stripe_bytes // 2].unflatten(1, (layout.kv_heads, 2, 64, -1))
    page = batch.table[row.repeat_interleave(new), position // 64] // layout.granules

    def with_torch() -> None:
        runs[page.long(), :, 0, position % 64] = k
        runs[page.long(), :, 1, position % 64] = v

    append(k, v, pages, batch)
    dense, _ = gather_dense(pages, batch, case.new)
    assert torch.equal(dense.transpose(1, 2).flatten(0, 1), k)
    run(benchmark, side, {"ours": lambda: append(k, v, pages, batch), "torch": with_torch})


@benched("gather_dense")
@sides("memcpy")
def test_gather_dense(benchmark: Any, side: str) -> None:
    """`memcpy` copies as many bytes from one tensor to a new one: the floor."""
    with device_of(side):
        scene = setting(DECODE["8 x 4k bfloat16"])
    pages, table = scene.pages, scene.batch.table
    got, expected = gather_dense(pages, scene.batch, 4096), torch_gather(pages, table)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    del got, expected
    calls = {
        "ours": lambda: gather_dense(pages, scene.batch, 4096),
        "torch": lambda: torch_gather(pages, table),
        "memcpy": pages.arena.clone,
    }
    run(benchmark, side, calls)


@benched("merge")
@sides()
def test_merge(benchmark: Any, side: str) -> None:
    with device_of(side):
        outs, lses = torch.randn(4, 64, 32, 128), torch.randn(4, 64, 32)
    parts = list(zip(outs, lses, strict=True))

    def with_torch() -> Tensors:
        total = torch.logsumexp(lses, 0)
        return (torch.exp(lses - total)[..., None] * outs).sum(0), total

    near(merge(parts), with_torch())
    run(benchmark, side, {"ours": lambda: merge(parts), "torch": with_torch})


@benched("checksum")
@pytest.mark.parametrize("side", ["flowkv", "torch"])
def test_checksum(benchmark: Any, side: str) -> None:
    """512 MiB, as much as a small model's weights; torch reads them once and sums them up."""
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (1 << 26,))
    benchmark(words.sum if side == "torch" else lambda: checksum(words, 1 << 19))


@benched("digest_pages")
@pytest.mark.parametrize("side", ["flowkv", "torch"])
def test_digest_pages(benchmark: Any, side: str) -> None:
    """512 pages of 1 MiB in 32 stripes, where they lie; torch reads them once and sums them up."""
    arena = torch.randint(0, 256, (512 << 20,), dtype=torch.uint8)
    words, source = arena.view(torch.int64), torch.arange(0, 512 * 256, 256).int()
    ours = partial(digest_pages, arena, source, 256, 32)
    benchmark(words.sum if side == "torch" else ours)


def remade() -> tuple[Setting, torch.Tensor, Tensors]:
    """(a setting, granules of its pages, K `[pages, Hk, P, D]` and V where they lie)."""
    scene = setting(Case((16384,), dtype="bfloat16"))
    layout, table = scene.pages.layout, scene.batch.table[0]
    frames = scene.pages.arena.view(torch.bfloat16).view(-1, layout.page_bytes // 2)
    runs = frames[:, : layout.stripe_bytes // 2].unflatten(1, (8, 2, 64, 128))
    return scene, table, (runs[:, :, 0], runs[:, :, 1])


@benched("append")
@sides()
def test_append_rotated(benchmark: Any, side: str) -> None:
    """RoPE and writing in one pass, against rotation in torch and then writing."""
    with device_of(side):
        scene = setting(Case((1024,) * 8, dtype="bfloat16", new=512))
        k, v = torch.randn(2, 8 * 512, 8, 128).to(torch.bfloat16).unbind()
        angle, position = torch.rand(1024, 64), torch.arange(512, 1024).repeat(8)
    rope = Rotary(angle.cos(), angle.sin())
    cos, sin = (x[position].repeat(1, 2)[:, None] for x in (rope.cos, rope.sin))

    def with_torch() -> torch.Tensor:
        x = k.float()
        turned = torch.cat((-x[..., 64:], x[..., :64]), -1)
        rotated = (x * cos + turned * sin).to(k.dtype)
        append(rotated, v, scene.pages, scene.batch)
        return rotated

    append(k, v, scene.pages, scene.batch, rope)
    dense, _ = gather_dense(scene.pages, scene.batch, 512)
    assert torch.equal(dense.transpose(1, 2).flatten(0, 1), with_torch())
    calls = {"ours": lambda: append(k, v, scene.pages, scene.batch, rope), "torch": with_torch}
    run(benchmark, side, calls)


@benched("reposition")
@sides()
def test_reposition(benchmark: Any, side: str) -> None:
    with device_of(side):
        scene, table, (keys, _) = remade()
        speed = 1e4 ** -torch.linspace(0, 1, 64)
    layout, arena = scene.pages.layout, scene.pages.arena
    rope, turns = rotations([7 - i % 3 for i in range(len(table))], speed)
    cos, sin = (x[turns.long()].repeat(1, 2)[:, None, None] for x in (rope.cos, rope.sin))
    places = (table // layout.granules).long()

    def with_torch() -> None:
        x = keys[places].float()
        turned = torch.cat((-x[..., 64:], x[..., :64]), -1)
        keys[places] = (x * cos + turned * sin).to(keys.dtype)

    before = keys.clone()
    with_torch()
    expected = keys.clone()
    keys.copy_(before)
    reposition(arena, table, turns, rope, layout)
    assert torch.equal(keys, expected)
    keys.copy_(before)
    calls = {"ours": lambda: reposition(arena, table, turns, rope, layout), "torch": with_torch}
    run(benchmark, side, calls)


@benched("drop_tokens")
@sides()
def test_drop_tokens(benchmark: Any, side: str) -> None:
    """Half of 16k tokens are kept, others for each head."""
    size = 64
    with device_of(side):
        scene, table, views = remade()
        some = [torch.randperm(128 * size)[: 64 * size].sort().values for _ in range(8)]
        keep, heads = torch.stack(some), torch.arange(8)[:, None]
    layout, arena, kept = scene.pages.layout, scene.pages.arena, keep[None].int()
    source, target = table[:128].contiguous(), table[128:192].contiguous()
    of, to = ((x // layout.granules).long() for x in (source, target))

    def with_torch() -> None:
        for x in views:
            chosen = x[of[keep // size], heads, keep % size]  # [Hk, n, D]
            x[to] = chosen.unflatten(1, (64, size)).transpose(0, 1)

    with_torch()
    expected = [x[to] for x in views]
    drop_tokens(arena, source, target, kept, layout)
    assert all(torch.equal(x[to], y) for x, y in zip(views, expected, strict=True))
    calls = {"ours": lambda: drop_tokens(arena, source, target, kept, layout), "torch": with_torch}
    run(benchmark, side, calls)


PAGES, GRANULES = 256, 16


def page_lists() -> Tensors:
    arena = torch.randint(0, 256, (2 * PAGES * GRANULES * 4096,), dtype=torch.uint8)
    rng = torch.Generator(arena.device).manual_seed(0)
    places = torch.randperm(2 * PAGES, generator=rng)
    return arena, places[:PAGES], places[PAGES:]


SEALS = [("raw", codec) for codec in CODECS[1:]] + [("kv8", "kv4c"), ("kv8", "raw")]


@benched("transcode")
@sides("memcpy")
@pytest.mark.parametrize(("old", "new"), SEALS)
def test_transcode(benchmark: Any, old: str, new: str, side: str) -> None:
    """`memcpy` moves as many bytes as are read and written here: the floor."""
    count, geometry = 64, Geometry.uniform(layers=4, kv_heads=8, head_dim=128, dtype="bfloat16")
    layouts = {c: page_layout(geometry.groups[0], 64, c) for c in ("raw", old, new)}
    raw, of, to = layouts["raw"], layouts[old], layouts[new]
    with device_of(side):
        noise = torch.randn(count * raw.page_bytes // 2).to(torch.bfloat16).view(torch.uint8)
        arena = torch.cat((noise, torch.zeros(2 * noise.numel(), dtype=torch.uint8)))
        source, middle, target = (
            (torch.arange(i * count, (i + 1) * count) * raw.granules).int() for i in range(3)
        )
    transcode(arena, source, middle, raw, of)
    other = arena.clone()
    status = transcode(arena, middle, target, of, to)
    expected = transcode(other, middle, target, of, to, backend="reference")
    assert not status.any() and torch.equal(status, expected) and torch.equal(arena, other)
    moved = arena[: count * (of.page_bytes + to.page_bytes) // 2]
    into = torch.empty_like(moved)
    calls = {
        "ours": lambda: transcode(arena, middle, target, of, to),
        "torch": lambda: transcode(arena, middle, target, of, to, backend="reference"),
        "memcpy": lambda: into.copy_(moved),
    }
    run(benchmark, side, calls)


@benched("copy_pages")
@sides()
def test_copy_pages(benchmark: Any, side: str) -> None:
    with device_of(side):
        arena, source, target = page_lists()
    frames = arena.view(2 * PAGES, -1)
    lists = [(GRANULES * x).int() for x in (source, target)]

    def with_torch() -> None:
        frames[target] = frames[source]

    copy_pages(arena, *lists, GRANULES)
    assert torch.equal(frames[target], frames[source])
    calls = {"ours": lambda: copy_pages(arena, *lists, GRANULES), "torch": with_torch}
    run(benchmark, side, calls)


@benched("gather_pages")
@sides()
def test_gather_pages(benchmark: Any, side: str) -> None:
    with device_of(side):
        arena, source, _ = page_lists()
        out = torch.empty(PAGES, GRANULES * 4096, dtype=torch.uint8)
    frames = arena.view(2 * PAGES, -1)
    places = (GRANULES * source).int()
    gather_pages(arena, places, GRANULES, out)
    assert torch.equal(out, frames[source])
    calls = {
        "ours": lambda: gather_pages(arena, places, GRANULES, out),
        "torch": lambda: torch.index_select(frames, 0, source, out=out),
    }
    run(benchmark, side, calls)


@benched("scatter_pages")
@sides()
def test_scatter_pages(benchmark: Any, side: str) -> None:
    with device_of(side):
        arena, _, target = page_lists()
        data = torch.randint(0, 256, (PAGES, GRANULES * 4096), dtype=torch.uint8)
    frames = arena.view(2 * PAGES, -1)
    places = (GRANULES * target).int()
    scatter_pages(arena, places, GRANULES, data)
    assert torch.equal(frames[target], data)
    calls = {
        "ours": lambda: scatter_pages(arena, places, GRANULES, data),
        "torch": lambda: frames.index_copy_(0, target, data),
    }
    run(benchmark, side, calls)
