"""Cascades: what rows share is found, and attended over once, with the answer of flat attention."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowkv.kernels import Ragged, cascade_attention, checking, paged_attention, plan_cascade
from tests.inside import GeometryError, Group, shared_prefixes
from tests.kernels.scene import Scene, int32, layout_of

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def share(scene: Scene, groups: list[Group]) -> Scene:
    """The scene with the first pages of each group's first row in all rows of the group."""
    table = scene.batch.table.clone()
    for first, end, count in groups:
        for line in scene.batch.rows[first + 1 : end].tolist():
            table[line, :count] = table[scene.batch.rows[first], :count]
    scene.batch = scene.batch._replace(table=table)
    return scene


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Lines of few rows that often begin alike, and their full pages."""
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    lines = np.arange(rows * columns).reshape(rows, columns)
    for row in range(1, rows):
        count = draw(st.integers(0, columns))
        lines[row, :count] = lines[row - 1, :count]
    full = np.array(draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows)))
    if draw(st.booleans()):
        lines[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = -1
    return lines, full


def spared(lines: np.ndarray, full: np.ndarray, cuts: tuple[int, ...]) -> int:
    """Reads of pages that the groups between `cuts` spare."""
    total = 0
    for first, end in itertools.pairwise(cuts):
        depth = 0
        for column in range(min(full[first:end], default=0)):
            if (lines[first:end, column] != lines[first, column]).any() or lines[first, column] < 0:
                break
            depth += 1
        total += (end - first - 1) * depth
    return total


@given(tables=tables(), least=st.sampled_from([0, 32, 100]))
def test_groups_spare_the_most_reads(tables: tuple[np.ndarray, np.ndarray], least: int) -> None:
    lines, full = tables
    rows, size = len(lines), 16
    groups = shared_prefixes(lines, full, size, least)
    for a, b in itertools.pairwise([Group(0, 0, 0), *groups]):
        assert a.end <= b.first < b.end - 1 < rows
    for first, end, count in groups:
        assert 0 < count <= full[first:end].min() and (lines[first:end, :count] >= 0).all()
        assert (lines[first:end, :count] == lines[first, :count]).all()
        assert (end - first - 1) * count * size >= least
    if least == 0:
        every = (
            (0, *cut, rows)
            for n in range(rows)
            for cut in itertools.combinations(range(1, rows), n)
        )
        best = max(spared(lines, full, cuts) for cuts in every)
        assert sum((end - first - 1) * count for first, end, count in groups) == best


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Scene, list[Group]]:
    size = draw(st.sampled_from([8, 16]))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    layout = layout_of(draw(st.integers(1, 2)), 32, draw(st.sampled_from([32, 16])), size, dtype)
    rows = draw(st.integers(1, 5))
    cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=2))})
    groups = [
        Group(first, end, draw(st.integers(1, 4)))
        for first, end in itertools.pairwise(cuts)
        if draw(st.booleans())
    ]
    new = [draw(st.sampled_from([0, 1, 1, 2, 9])) for _ in range(rows)]
    lengths = [n + 4 * size + draw(st.integers(0, 3 * size)) + (n == 0) for n in new]
    sealed = draw(st.sampled_from([(), ("kv8",)]))
    scene = Scene(layout, lengths, new, seed=draw(st.integers(0, 9)), sealed=sealed)
    return share(scene, groups), groups


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@given(case=scenes(), softcap=st.sampled_from([None, 3.0]), sinks=st.booleans())
def test_as_flat(
    backend: str, case: tuple[Scene, list[Group]], softcap: float | None, sinks: bool
) -> None:
    scene, groups = case
    q, pages, batch = scene.queries(3), scene.pages, scene.batch
    options = {"scale": 0.2, "softcap": softcap, "return_lse": True, "backend": backend}
    options["sinks"] = torch.linspace(-1, 2, q.shape[1]) if sinks else None
    expected = paged_attention(q, pages, batch, **options | {"backend": "reference"})
    for known in (None, groups):
        plan = plan_cascade(batch, pages.layout.page_size, groups=known, least_tokens=1)
        if known is not None:
            assert list(plan.groups) == groups
        with checking():
            got = cascade_attention(q, pages, batch, plan, **options)
        near = TOLERANCE[scene.layout.dtype]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=near)


def decode_step(rows: int = 6, pages: int = 4, own: int = 20) -> Scene:
    scene = Scene(layout_of(2, 32, page_size=16), [16 * pages + own] * rows, [1] * rows)
    return share(scene, [Group(0, rows, pages)])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_shared_page_is_read_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two calls, together, name each shared page once, and all others too."""
    scene = decode_step()
    module = {"reference": "reference", "cpu": "cpu.operations"}[backend]
    from tests.inside import dispatch

    attend, named = dispatch.resolve("paged_attention", "raw", backend), []

    def counted(q: object, pages: object, batch: Ragged, how: object) -> object:
        for row, length in zip(batch.rows.tolist(), batch.lengths.tolist(), strict=True):
            named.extend(batch.table[row, : -(-length // 16)].tolist())
        return attend(q, pages, batch, how)

    monkeypatch.setattr(f"flowkv.kernels.{module}.paged_attention", counted)
    dispatch.resolve.cache_clear()
    plan = plan_cascade(scene.batch, 16, least_tokens=1)
    assert plan.groups == (Group(0, 6, 4),)
    cascade_attention(scene.queries(2), scene.pages, scene.batch, plan, backend=backend)
    dispatch.resolve.cache_clear()
    assert len(named) == len(set(named)) == 4 + 6 * 2 and -1 not in named


def test_small_groups_are_left_flat() -> None:
    scene = decode_step()
    plan = plan_cascade(scene.batch, 16)  # spares 5 * 64 reads: less than launches cost
    assert plan.groups == () and plan.prefix is None and plan.suffix is scene.batch
    q = scene.queries(2)
    flat = paged_attention(q, scene.pages, scene.batch)
    assert torch.equal(flat, cascade_attention(q, scene.pages, scene.batch, plan))


def test_a_window_that_hides_something_is_refused() -> None:
    scene = decode_step()
    plan, q = plan_cascade(scene.batch, 16, least_tokens=1), scene.queries(2)
    with pytest.raises(GeometryError, match="Call paged_attention"):
        cascade_attention(q, scene.pages, scene.batch, plan, window=83)
    wide = cascade_attention(q, scene.pages, scene.batch, plan, window=84)
    assert torch.equal(wide, cascade_attention(q, scene.pages, scene.batch, plan))


def test_wrong_plans_are_refused() -> None:
    scene = decode_step()
    batch = scene.batch
    plan = plan_cascade(batch, 16, least_tokens=1)
    again = batch._replace(lengths=batch.lengths + 0)
    with pytest.raises(GeometryError, match="Plan each step"):
        cascade_attention(scene.queries(2), scene.pages, again, plan)
    for groups in (
        [Group(0, 6, 5)],  # the fifth page is not shared
        [Group(0, 7, 1)],
        [Group(0, 3, 1), Group(2, 6, 1)],
        [Group(3, 3, 1)],
        [Group(0, 2, 0)],
    ):
        with pytest.raises(GeometryError, match="does not fit the step"):
            plan_cascade(batch, 16, groups=groups)
    longer = batch._replace(starts=int32([0, *range(30, 36)]), most_new=30)  # reach into page 3
    with pytest.raises(GeometryError, match="does not fit the step"):
        plan_cascade(longer, 16, groups=[Group(0, 6, 4)])


def test_tree_tokens_see_the_shared_prefix() -> None:
    scene = Scene(layout_of(1, 32, page_size=16), [70, 70], [3, 3])
    share(scene, [Group(0, 2, 4)])
    tree = torch.tensor([1, 3, 5, 1, 2, 4])
    q = scene.queries(2)
    plan = plan_cascade(scene.batch, 16, least_tokens=1)
    for backend in ("reference", "cpu"):
        flat = paged_attention(q, scene.pages, scene.batch, tree=tree, backend="reference")
        got = cascade_attention(q, scene.pages, scene.batch, plan, tree=tree, backend=backend)
        torch.testing.assert_close(got, flat, rtol=0, atol=1e-5)
