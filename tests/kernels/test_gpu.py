"""The Triton kernels on a real GPU, against the oracle on the CPU."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.machine import Machine
from bench.gpu.pool import Case, prepare
from flowkv.kernels import (
    Pages,
    Ragged,
    append,
    gather_dense,
    merge,
    paged_attention,
)
from tests.kernels.scene import Scene, check_copies, layout_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
DTYPES = list(TOLERANCE)
ROWS = {
    "decode": ([700, 1, 64, 4097, 33], [1, 1, 1, 1, 1]),
    "verify": ([700, 9, 65, 130], [4, 0, 2, 3]),
    "prefill": ([300, 1000], [300, 1000]),
    "mixed": ([3000, 700, 300, 64], [1, 300, 40, 0]),
    "suffix": ([9000], [50]),
}


def on_gpu(scene: Scene) -> tuple[Pages, Ragged]:
    """Copies of a scene's pages and batch on the GPU."""
    pages, batch = scene.pages, scene.batch
    moved = (x.cuda() if isinstance(x, torch.Tensor) else x for x in batch)
    return pages._replace(arena=pages.arena.cuda()), Ragged(*moved)


def compare(scene: Scene, group: int, softcap: float | None = None, sinks: bool = False) -> None:
    q = scene.queries(group)
    logits = torch.linspace(-2, 3, q.shape[1]) if sinks else None
    options = {"window": scene.window, "softcap": softcap, "return_lse": True}
    expected, expected_lse = paged_attention(
        q, scene.pages, scene.batch, sinks=logits, backend="reference", **options
    )
    pages, batch = on_gpu(scene)
    logits = None if logits is None else logits.cuda()
    o, lse = paged_attention(q.cuda(), pages, batch, sinks=logits, **options)
    near = TOLERANCE[scene.layout.dtype]
    torch.testing.assert_close(o.cpu(), expected, rtol=0, atol=near)
    # Averages over thousands of random tokens are small, and so is any error in them.
    assert (o.cpu().double() - expected).norm() <= near / 2 * expected.double().norm()
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-5, atol=near / 10)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_attention(rows: str, dtype: str, group: int) -> None:
    compare(Scene(layout_of(2, 128, page_size=64, dtype=dtype), *ROWS[rows]), group)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 64), (192, 128), (256, 256)])
def test_head_dims(rows: str, dims: tuple[int, int]) -> None:
    compare(Scene(layout_of(2, *dims, page_size=64, dtype="bfloat16"), *ROWS[rows]), 4)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("page", [8, 16, 24, 128, 256])
def test_page_sizes(rows: str, page: int) -> None:
    compare(Scene(layout_of(2, 64, page_size=page, dtype="bfloat16"), *ROWS[rows]), 4)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 1, 100, 1024])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, True), (20.0, False), (20.0, True)])
def test_switches(rows: str, window: int | None, softcap: float | None, sinks: bool) -> None:
    layout = layout_of(2, 64, page_size=64, dtype="float16")
    compare(Scene(layout, *ROWS[rows], window), 4, softcap, sinks)


def test_captured_graph_follows_lengths_and_tables() -> None:
    """A decode step captured once answers for other lengths, tables and queries."""
    layout = layout_of(2, 128, page_size=64, dtype="bfloat16")
    first = Scene(layout, [900, 500, 640], [1, 1, 1], seed=1)
    pages, batch = on_gpu(first)
    batch = batch._replace(most_length=2048)
    q = first.queries(4).cuda()
    room = torch.zeros(80 << 20, dtype=torch.uint8, device="cuda")
    room[: pages.arena.numel()] = pages.arena
    pages = pages._replace(arena=room)
    table = torch.full((4, 40), -1, dtype=torch.int32, device="cuda")
    table[:, : batch.table.shape[1]] = batch.table
    batch = batch._replace(table=table)
    paged_attention(q, pages, batch)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = paged_attention(q, pages, batch)
    for seed, lengths in enumerate([[900, 500, 640], [64, 2000, 1], [1025, 63, 1999]], 1):
        scene = Scene(layout, lengths, [1, 1, 1], seed=seed)
        other_pages, other = on_gpu(scene)
        room[: other_pages.arena.numel()] = other_pages.arena
        table.fill_(-1)
        table[:, : other.table.shape[1]] = other.table
        for old, new in zip(batch[1:4], other[1:4], strict=True):
            old.copy_(new)
        q.copy_(scene.queries(4))
        graph.replay()
        expected = paged_attention(scene.queries(4), scene.pages, scene.batch, backend="reference")
        torch.testing.assert_close(o.cpu(), expected, rtol=0, atol=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("codecs", [("raw",), ("kv8", "raw", "kv4c")], ids=["raw", "sealed"])
def test_a_whole_step_is_one_graph(codecs: tuple[str, ...]) -> None:
    """Append and attention of all layers, captured once, replayed for other rows and pages."""
    machine, layers, page = Machine(dry=False), 4, 64
    lengths = 9 * page + 40, 3 * page + 17, 30
    case = Case("step", lengths, (1, 1, 1), codecs, kv_heads=2, layers=layers, page=page)
    scene = prepare(case, machine, sets=3)
    batch = Ragged(
        *(x.clone() if isinstance(x, torch.Tensor) else x for x in scene.batches[0][:5]),
        most_length=10 * page,
    )
    q = [machine.noise(*scene.q.shape, dtype=scene.q.dtype) for _ in range(layers)]
    kv = [[machine.noise(3, 2, 128, dtype=q[0].dtype) for _ in range(2)] for _ in range(layers)]

    def step(pages: Pages) -> list[torch.Tensor]:
        outs = []
        for layer in range(layers):
            own = pages._replace(layer=layer)
            append(*kv[layer], own, batch)
            outs.append(paged_attention(q[layer], own, batch))
        return outs

    step(scene.pages)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step(scene.pages)
    for fewer, other in enumerate(scene.batches):
        batch.table.copy_(other.table)
        batch.lengths.copy_(other.lengths - 7 * fewer)
        for x in (*q, *(x for pair in kv for x in pair)):
            x.normal_()
        twin = scene.pages._replace(arena=scene.pages.arena.clone())
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for out, right in zip(outs, step(twin), strict=True):
            torch.testing.assert_close(out, right, rtol=2e-2, atol=2e-3)
        assert torch.equal(scene.pages.arena, twin.arena)


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_and_gather(dtype: str) -> None:
    scene = Scene(layout_of(5, 80, 256, 16, dtype), [70, 3, 410, 9], [7, 0, 410, 1], 60)
    fused = torch.randn(418, 2, 5, 336)
    k, v = fused[:, 0, :, :80], fused[:, 1, :, 80:]
    pages, batch = on_gpu(scene)
    append(k, v, scene.pages, scene.batch, backend="reference")
    append(k.cuda(), v.cuda(), pages, batch)
    assert torch.equal(pages.arena.cpu(), scene.pages.arena)
    for columns in (0, 1, 33, 410, 415):
        got = gather_dense(pages, batch, columns)
        expected = gather_dense(scene.pages, scene.batch, columns, backend="reference")
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("granules", [1, 3, 128])
def test_pages_are_copied_bitwise(granules: int) -> None:
    check_copies(torch.randperm(202).tolist(), granules, None, "cuda")


def test_merge() -> None:
    outs, lses = torch.randn(3, 50, 8, 128).bfloat16(), torch.randn(3, 50, 8) * 9
    expected = merge(list(zip(outs, lses, strict=True)), backend="reference")
    got = merge([(a.cuda(), b.cuda()) for a, b in zip(outs, lses, strict=True)])
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=0, atol=2e-2)
    torch.testing.assert_close(got[1].cpu(), expected[1], rtol=1e-5, atol=1e-5)
