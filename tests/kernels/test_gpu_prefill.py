"""Sealed prompts, cascades and latents on a real GPU, against the oracle on the CPU."""

from __future__ import annotations

import pytest
import torch

from flowkv.kernels import Pages, Ragged, cascade_attention, paged_attention, plan_cascade
from tests.kernels.latent import latent_layout
from tests.kernels.scene import Scene, layout_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

CODECS = ("kv8", "k8v4", "kv4c", "kv4h")
ROWS = {
    "prompts": ([1300, 700], [300, 130]),
    "mixed": ([3000, 700, 300, 64], [1, 300, 140, 0]),
    "suffix": ([9000], [50]),
}
SWITCHES = {
    "plain": {},
    "window": {"window": 200},
    "capped": {"softcap": 20.0, "return_lse": True},
    "cross": {"causal": False},
    "invariant": {"invariant": True},
}


def on_gpu(scene: Scene) -> tuple[Pages, Ragged]:
    """Copies of a scene's pages and batch on the GPU."""
    moved = (x.cuda() if isinstance(x, torch.Tensor) else x for x in scene.batch)
    return scene.pages._replace(arena=scene.pages.arena.cuda()), Ragged(*moved)


def near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    got, expected = got.cpu().double(), expected.double()
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    assert (got - expected).norm() <= tolerance / 2 * expected.norm()


def compare(scene: Scene, group: int, tolerance: float, **switches: object) -> None:
    q = scene.queries(group)
    options = switches | {"return_lse": True}
    expected, expected_lse = paged_attention(
        q, scene.pages, scene.batch, backend="reference", **options
    )
    pages, batch = on_gpu(scene)
    o, lse = paged_attention(q.cuda(), pages, batch, **options)
    near(o, expected, tolerance)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(
    ("past", "new", "padded"),
    [(0, 20, 32), (0, 1, 32), (0, 300, 512), (150, 60, 64), (9000, 40, 64)],
)
def test_tokens_of_no_row_behind_a_single_row(past: int, new: int, padded: int) -> None:
    """As in captured steps, whose buffers hold more tokens than the row has."""
    scene = Scene(layout_of(2, 128, page_size=64, dtype="bfloat16"), [past + new], [new])
    pages, batch = on_gpu(scene)
    q = torch.cat([scene.queries(4), torch.full((padded - new, 8, 128), torch.nan).bfloat16()])
    more = batch._replace(most_new=padded, most_length=2 * (past + padded))
    o = paged_attention(q.cuda(), pages, more)[:new]
    near(o, paged_attention(q[:new], scene.pages, scene.batch, backend="reference"), 3e-2)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("codecs", [*((codec,) for codec in CODECS), CODECS])
@pytest.mark.parametrize("dims", [(64, 64), (96, 80), (128, 128), (256, 256)])
def test_sealed_prompts(rows: str, codecs: tuple[str, ...], dims: tuple[int, int]) -> None:
    layout = layout_of(2, *dims, page_size=64, dtype="bfloat16")
    compare(Scene(layout, *ROWS[rows], sealed=codecs), 4, 3e-2)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SWITCHES)
def test_switches_over_sealed_prompts(rows: str, name: str) -> None:
    switches = SWITCHES[name]
    layout = layout_of(2, 64, page_size=128, dtype="float16")
    scene = Scene(layout, *ROWS[rows], switches.get("window"), sealed=("kv8", "kv4c"))
    compare(scene, 4, 3e-2, **switches)


@pytest.mark.parametrize("sealed", [(), CODECS])
def test_mass_of_prompts(sealed: tuple[str, ...]) -> None:
    layout = layout_of(2, 128, page_size=64, dtype="bfloat16")
    scene = Scene(layout, *ROWS["mixed"], sealed=sealed)
    q, (pages, batch) = scene.queries(4), on_gpu(scene)
    expected = torch.zeros(4, -(-3000 // 64), 2)
    got = expected.cuda()
    paged_attention(q, scene.pages, scene.batch, mass=expected, backend="reference")
    paged_attention(q.cuda(), pages, batch, mass=got)
    torch.testing.assert_close(got.cpu(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("sealed", [(), ("kv8", "kv4c")])
@pytest.mark.parametrize("rows", [2, 17, 64])
def test_cascades(sealed: tuple[str, ...], rows: int) -> None:
    layout = layout_of(2, 128, page_size=64, dtype="bfloat16")
    scene = Scene(layout, [1100 + b for b in range(rows)], [1] * rows, sealed=sealed)
    table = scene.batch.table.clone()
    table[scene.batch.rows.long(), :16] = table[int(scene.batch.rows[0]), :16]
    scene.batch = scene.batch._replace(table=table)
    q, (pages, batch) = scene.queries(4), on_gpu(scene)
    expected = paged_attention(q, scene.pages, scene.batch, backend="reference")
    plan = plan_cascade(batch, 64, least_tokens=1)
    assert plan.groups == ((0, rows, 16),)
    near(cascade_attention(q.cuda(), pages, batch, plan), expected, 3e-2)


@pytest.mark.parametrize("rows", [([700, 64, 4097], [1, 1, 1]), ([900, 300], [1, 200])])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_latents(rows: tuple[list[int], list[int]], heads: int, dtype: str) -> None:
    scene = Scene(latent_layout(576, 512, 64, dtype), *rows)
    compare(scene, heads, 1e-4 if dtype == "float32" else 2e-2, scale=0.05)
