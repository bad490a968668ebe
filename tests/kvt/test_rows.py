"""Rows of engines: the same keys and values as pages, whatever their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.tiers import FrameInfo, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import CodecTier, OpenBasis, PageCoder, RowCoder, RowForm, row_bases
from tests.kvt.pages import Source, layout, learner, page

COLD, LAYOUT = 5, layout()  # 3 layers, 2 heads of 16 dims
SOURCE = Source(LAYOUT)
CODER = learner(SOURCE).coder(1e-3, {})
BASIS = OpenBasis(Path("a.kvt"), "org/model", CODER)


def form(axes: str = "RLBHN", dtype: str = "float32", **sizes: int) -> RowForm:
    given = {"R": 1, "L": 3, "B": 1, "H": 2, "N": 64}
    return RowForm(axes, given | sizes, LAYOUT.head_dim, dtype)


def row_of(shape: RowForm, pages: PageCoder, body: bytearray, behind: int = 0) -> bytearray:
    """A row with the keys and values of a page, element by element."""
    sides = [side.float().numpy() for side in pages.views(memoryview(body))]
    sizes = [shape.sizes[axis] for axis in shape.axes]
    row = np.empty((*sizes, 2, shape.dim), np.float32)
    for at in np.ndindex(*sizes):
        where = dict(zip(shape.axes, at, strict=True))
        head = where["R"] * shape.sizes["H"] + where["H"]
        token = where["B"] * shape.sizes["N"] + where["N"]
        for side in range(2):
            row[(*at, side)] = sides[side][where["L"], head, token]
    data = torch.from_numpy(row).to(getattr(torch, shape.dtype)).view(torch.uint8)
    return bytearray(data.numpy().tobytes()) + bytearray(behind)


orders = st.permutations("RLBHN").map("".join)
splits = st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2)])


@settings(max_examples=25, deadline=None)
@given(
    axes=orders,
    split=splits,
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    size=st.sampled_from([16, 64]),
    number=st.integers(0, 2000),
    behind=st.integers(0, 64),
)
def test_rows_in_any_order_are_coded_as_their_pages(
    axes: str, split: tuple[int, int], dtype: str, size: int, number: int, behind: int
) -> None:
    """Byte for byte: the same code, and of it the same keys and values, where they belong."""
    ranks, blocks = split
    shape = form(axes, dtype, R=ranks, H=2 // ranks, B=blocks, N=size // blocks)
    coder, pages = RowCoder(BASIS, shape, "m"), CODER.fitted(layout(dtype, size=size))
    assert shape.filled_bytes + behind == len(row_of(shape, pages, page(pages, SOURCE, 0), behind))
    body = page(pages, SOURCE, number)
    row = row_of(shape, pages, body, behind)
    data = coder.encode(memoryview(row), number)
    found = pages.encode_within(memoryview(body), number)
    assert found is not None and data == found[0]
    target = bytearray(b"\x55") * len(row)
    assert coder.decode(memoryview(data), memoryview(target), 0, 1)
    wanted = row_of(shape, pages, found[1])
    assert target[: len(wanted)] == wanted and set(target[len(wanted) :]) <= {0x55}


@settings(max_examples=25, deadline=None)
@given(at=st.integers(0, 1 << 20), bit=st.integers(0, 7), cut=st.booleans())
def test_other_bytes_are_no_row(at: int, bit: int, cut: bool) -> None:
    coder, row = RowCoder(BASIS, form(), "m"), row_of(form(), CODER, page(CODER, SOURCE, 3))
    data = bytearray(coder.encode(memoryview(row), 3) or b"")
    if cut:
        del data[at % len(data) :]
    else:
        data[at % 20] ^= 1 << bit  # its kind, and the name of its basis
    target = bytearray(len(row))
    assert not coder.decode(memoryview(data), memoryview(target), 0, 1)
    assert not any(target)


def test_a_row_of_another_basis_is_a_miss_and_makes_way(tmp_path: Path) -> None:
    """Also where that basis lies in the same tier, as a cache's bases do."""
    raw = bytes(range(16))
    info = FrameInfo("page", 0, COLD, raw, bytes(32), bytes(32), 0, 64, form().filled_bytes)
    row = row_of(form(), CODER, page(CODER, SOURCE, 3))
    other = OpenBasis(Path("b.kvt"), "org/model", learner(SOURCE).coder(2e-3, {}))
    found = list[tuple[Any, bool]]()
    for basis, stores in ((other, True), (BASIS, False), (BASIS, True), (other, False)):
        coder = RowCoder(basis, form(), "m")
        tier = CodecTier(DiskTier(tmp_path, 16 << 20), row_bases(0, raw, len(row), coder))
        tier.page_of = lambda key: 3
        target = bytearray(len(row))
        if stores:
            tier.submit_store([Store(bytes(32), info, memoryview(row))])
            assert tier.poll(20.0)[0].outcome is Outcome.STORED
            assert next(iter(tier.inner.scan())).n_bytes < len(row) / 2
        tier.submit_load([Load(bytes(32), memoryview(target), raw, COLD)])
        (answer,) = tier.poll(20.0)
        found.append((answer.outcome, any(target)))
        tier.close()
    hit, miss = (Outcome.HIT, True), (Outcome.MISS, False)
    assert found == [hit, miss, hit, miss]


def test_what_the_basis_does_not_fit_is_not_coded(caplog: pytest.LogCaptureFixture) -> None:
    coder, shape = RowCoder(BASIS, form(), "org/served"), form()
    other = page(CODER, Source(LAYOUT, seed=9), 1)
    for _ in range(3):
        assert coder.encode(memoryview(row_of(shape, CODER, other)), 1) is None
    assert coder.encode(memoryview(row_of(shape, CODER, page(CODER, SOURCE, 1))), 1)
    messages = [one.getMessage() for one in caplog.records]
    assert len(messages) == 2
    assert "2 of 2 objects of org/served are stored in raw: the basis a.kvt" in messages[1]
    for swapped in (form("RLBNH"), form(B=4, N=16)):  # in another order than the code is for
        assert coder.encode(memoryview(row_of(swapped, CODER, page(CODER, SOURCE, 2))), 2) is None


@pytest.mark.parametrize(
    "change", [{"L": 2}, {"H": 1}, {"R": 2}, {"N": 512}, {"N": 6}, {"dtype": "float64"}]
)
def test_rows_of_another_model_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of the basis are"):
        RowCoder(BASIS, form(**change), "m")
