"""Decoding over sealed pages in Triton's interpreter, against attention over what they decode to.

As `interpreted`, which see; groups "sealed", "switches" and "rows".
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.kernels import Scoring
from tests.inside import few as triton_few
from tests.inside import layout_CODECS as CODECS
from tests.inside import paged_attention as attend_triton
from tests.inside import rotation, sealed_config, turn
from tests.inside import task as triton_lists
from tests.kernels.scene import Scene, alone, attend, layout_like, layout_of

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/kernels/test_triton_interpreter.py"

SEALED = CODECS[1:]
NEAR = 1e-3
"""Of outputs and logarithms; what one digit less of queries or probabilities exceeds tenfold."""


def few_processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    traits = triton_few.traits(torch.device("cpu"))
    less = traits._replace(processors=count, shared_bytes=1)
    monkeypatch.setattr(triton_few, "traits", lambda device: less)


@pytest.fixture(autouse=True)
def small_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreted program takes as long to find nothing to do as to do it."""
    few_processors(monkeypatch, 2)


def check(scene: Scene, group: int, near: float = NEAR, **switches: object) -> None:
    """Compare a call with attention over the tokens themselves."""
    q = scene.queries(group)
    rows, heads = len(scene.lengths), scene.layout.kv_heads
    pages = -(-max(scene.lengths) // scene.layout.page_size)
    mass = torch.rand(rows, pages + 1, heads) if switches.pop("mass", False) else None
    options = {"window": scene.window, "causal": scene.causal, "mass": mass}
    bounds = {"near_mass": (0.0, near * max(scene.new) * group)}
    rounding = 2e-3 if q.dtype is torch.float16 else 0.0
    how = Scoring(0.17, **options, **switches)
    attend(scene, q, how, near, "triton", near_lse=near, rounding=rounding, **bounds)


# (kv heads, group, D, Dv, page, dtype)
SHAPES = {
    "plain": (2, 4, 128, 128, 64, "float32"),
    "two parts of a page": (1, 2, 64, 64, 128, "float16"),
    "padded dims": (1, 2, 80, 96, 96, "float32"),
    "wide": (1, 1, 256, 64, 64, "float32"),
    "many columns": (1, 16, 64, 64, 64, "float32"),
}


def each_codec_and_shape() -> list[Any]:
    """Every shape and every codec at once or twice; all pairs where there is time."""
    pairs = itertools.product(enumerate(SEALED), enumerate(SHAPES))
    return [
        pytest.param(
            codec,
            SHAPES[shape],
            id=f"{codec}-{shape}",
            marks=[] if (n + m) % len(SEALED) == 0 or shape == "plain" else pytest.mark.slow,
        )
        for (n, codec), (m, shape) in pairs
    ]


@pytest.mark.parametrize(("codec", "shape"), each_codec_and_shape())
def test_sealed_codec(codec: str, shape: tuple) -> None:
    """One new token a row: sealed pages and raw ones among them, a row with none."""
    heads, group, dim, dim_v, page, dtype = shape
    layout = layout_of(heads, dim, dim_v, page, dtype)
    lengths, far = [3 * page + 9, 5, 2 * page], dtype == "float16"
    check(Scene(layout, lengths, [1, 1, 1], sealed=(codec,), far=far), group)


@pytest.mark.parametrize(("dim", "page"), [(20, 16), (32, 24), (64, 256)])
def test_sealed_bytes_in_pages_of_any_size(dim: int, page: int) -> None:
    scene = Scene(layout_of(1, dim, page_size=page), [2 * page + 3, page], [1, 1], sealed=("kv8",))
    check(scene, 3)


@pytest.mark.parametrize("codec", SEALED)
def test_sealed_error_is_within_its_bound(codec: str) -> None:
    """The bound of `triton.sealed`, from the very values that were attended over."""
    scene = Scene(layout_of(1, 64, page_size=64), [192], [1], sealed=(codec,), causal=False)
    group, scale = 4, 0.17
    k, v = scene.k[0][:, 0].double(), scene.v[0][:, 0].double()
    q = scene.queries(group)[0].double()
    how = Scoring(scale, return_lse=True, causal=False)
    o, lse = attend_triton(q.float()[None], scene.pages, scene.batch, how)
    expected, expected_lse, _ = scene.answer(q.float()[None], how)
    if codec == "kv4h":
        block, norm = rotation(64)
        matrix = turn(64, q.device).double() * norm
        assert block == 64
        q, k = q @ matrix, k @ matrix
    most = q.abs().amax(1)
    if codec == "kv4c":  # a channel's scale is its range over 15, and n at most 15
        reach = k.amax(0) - k.amin(0)
        logit = scale * (q * reach).abs().amax(1) * (64 + 4) / 65024
    else:
        step = k.abs().amax(1) / (127 if codec in ("kv8", "k8v4") else 7)
        logit = scale * most * (k.abs().sum(1) + 4 * step).amax() / 65024
    logit = logit + 1e-5
    shape, _ = sealed_config(layout_like(scene.layout, codec), 8, triton_few.traits(q.device))
    value = v.abs().amax() * (2 * logit + (shape.TILE + 8) / 65024)
    assert ((lse.double() - expected_lse)[0].abs() <= logit).all()
    assert ((o.double() - expected)[0].abs() <= value[:, None]).all()
    assert value.max() < 0.02 * v.abs().amax()  # and it says something


ALL = ("kv8", "k8v4", "kv4c", "kv4h")
SWITCHES = {
    "plain": (None, {}),
    "softcap and sinks": (None, {"softcap": 4.0, "sinks": torch.linspace(-2, 3, 4)}),
    "window": (100, {"mass": True}),
    "narrow window": (1, {}),
    "alibi": (None, {"alibi": torch.linspace(0.01, 0.1, 4)}),
    "alibi, softcap, window": (70, {"alibi": torch.linspace(0.01, 0.1, 4), "softcap": 3.0}),
    "mass": (None, {"mass": True, "sinks": torch.linspace(-2, 3, 4)}),
    "invariant": (None, {"mass": True, "invariant": True}),
    "tree": (None, {"tree": torch.tensor([1, 3, 5, 1], dtype=torch.int64)}),
}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("codecs", [(), ALL], ids=["raw", "mixed"])
def test_switches(name: str, codecs: tuple[str, ...]) -> None:
    """Every switch of a call, with up to three new tokens a row."""
    window, switches = SWITCHES[name]
    layout = layout_of(2, 64, page_size=64)
    near = NEAR if codecs else 1e-5
    scene = Scene(layout, [390, 65, 7], [3, 1, 0], window, seed=3, sealed=codecs)
    check(scene, 2, near, **switches)


@pytest.mark.parametrize("codecs", [(), ALL], ids=["raw", "mixed"])
def test_switches_of_cross_attention(codecs: tuple[str, ...]) -> None:
    """Every query sees all of its row, more of them than the row has tokens; one row is empty."""
    layout = layout_of(1, 64, page_size=64)
    scene = Scene(layout, [256, 2, 0, 150], [1, 4, 1, 2], sealed=codecs, causal=False)
    check(scene, 4, NEAR if codecs else 1e-5, mass=True)


def test_switches_with_many_new_tokens_beside() -> None:
    """One row prefills, another decodes, both over sealed pages."""
    scene = Scene(layout_of(1, 64, page_size=64), [300, 290], [1, 70], sealed=ALL)
    check(scene, 4, 5e-3)


@pytest.mark.parametrize(
    ("window", "shares"),
    [(None, 1), (90, 2), (90, 5), (None, 64)]
    + [
        pytest.param(*pair, marks=pytest.mark.slow)
        for pair in ((90, 1), (None, 2), (None, 5), (90, 64))
    ],
)
def test_rows_in_any_shares(
    shares: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the pages of each codec are dealt out, the answer is the same."""
    few_processors(monkeypatch, shares)
    layout = layout_of(1, 64, page_size=64)
    check(Scene(layout, [450, 17, 640, 1, 130], [1, 1, 1, 0, 1], window, sealed=ALL), 2)


@pytest.mark.parametrize("codecs", [(), ALL], ids=["raw", "mixed"])
def test_rows_do_not_depend_on_the_batch(
    codecs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: alone, among others, and on more processors."""
    monkeypatch.setattr(triton_few, "MOST_UNITS", 3)
    # The interpreter multiplies by numpy, whose BLAS may round by where in memory a tile lies.
    monkeypatch.setattr(np, "matmul", lambda a, b, **how: np.einsum("...ij,...jk", a, b, **how))
    few_processors(monkeypatch, 2)
    lengths = [700, 65, 1, 450]
    scene = Scene(layout_of(1, 64, page_size=64), lengths, [1, 1, 1, 1], sealed=codecs)
    q, batch = scene.queries(2), scene.batch
    how = Scoring(0.17, invariant=True, return_lse=True)
    together = attend_triton(q, scene.pages, batch, how)
    few_processors(monkeypatch, 7)
    for b in range(len(lengths)):
        row_alone = attend_triton(q[b : b + 1], scene.pages, alone(scene, b), how)
        for all_rows, row in zip(together, row_alone, strict=True):
            assert torch.equal(all_rows[b : b + 1], row), b
    expected, _, _ = scene.answer(q, how)
    torch.testing.assert_close(together[0].double(), expected, rtol=0, atol=NEAR)


def test_rows_of_a_batch_that_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed graph sees its batch changed; the layers of one step share the lists."""
    made = []
    make = triton_lists._make
    monkeypatch.setattr(triton_lists, "_make", lambda task: made.append(1) or make(task))
    layout = layout_of(1, 64, page_size=64)
    scenes = [Scene(layout, [330], [1], seed=seed, sealed=ALL, layer=0) for seed in (1, 2)]
    batch = scenes[0].batch
    lines = [scene.batch.table[scene.batch.rows[0]].clone() for scene in scenes]
    for scene, line in zip(scenes, lines, strict=True):
        batch.table[batch.rows[0]] = line
        q, how = scene.queries(2), Scoring(0.17)
        o = attend_triton(q, scene.pages, batch, how)
        expected, _, _ = scene.answer(q, how)
        torch.testing.assert_close(o.double(), expected, rtol=0, atol=NEAR)
        pages = scene.pages._replace(arena=torch.zeros_like(scene.pages.arena), layer=1)
        assert not attend_triton(q, pages, batch, how).any()
    assert len(made) == 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_with_bad_queries() -> None:
    """NaN shows; zeros see all tokens of their window alike."""
    scene = Scene(layout_of(1, 64, page_size=64), [200, 200], [1, 1], 90, sealed=ALL)
    q = scene.queries(2)
    q[0, 0, 3], q[0, 1, 60] = torch.nan, torch.inf
    q[1] = 0.0
    o, lse = attend_triton(q, scene.pages, scene.batch, Scoring(0.17, 90, return_lse=True))
    assert o[0].isnan().all() and lse[0].isnan().all()
    torch.testing.assert_close(
        o[1].double(), scene.v[1][-90:, 0].double().mean(0).expand(2, -1), rtol=0, atol=NEAR
    )
    torch.testing.assert_close(lse[1], torch.full((2,), 90.0).log())


@settings(max_examples=5)
@given(data=st.data())
def test_rows_of_anything(data: st.DataObject) -> None:
    draw = data.draw
    size, dim = draw(st.sampled_from([64, 72, 128])), draw(st.sampled_from([64, 72]))
    codecs = draw(st.lists(st.sampled_from(ALL), min_size=1, unique=True))
    codecs.sort(key=CODECS.index)
    new = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    past = st.sampled_from([0, 1, size - 1, size, 3 * size + 1, 5 * size])
    lengths = [max(1, n + draw(past)) for n in new]
    window = draw(st.sampled_from([None, 5, size, size + 3]))
    switches = {"softcap": draw(st.sampled_from([None, 4.0])), "mass": draw(st.booleans())}
    layout = layout_of(draw(st.integers(1, 2)), dim, page_size=size)
    scene = Scene(layout, lengths, new, window, draw(st.integers(0, 99)), sealed=tuple(codecs))
    check(scene, draw(st.sampled_from([1, 3])), invariant=draw(st.booleans()), **switches)
