"""Coding of an engine's rows, which hold the keys and values of pages in other places."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import msgspec
import torch

from flowkv.core.geometry import ITEMSIZE, LayerGroup, PageLayout, page_layout
from flowkv.kvt.codec import PageCoder, coded_fingerprint
from flowkv.kvt.file import OpenBasis, Unfit
from flowkv.kvt.tier import CodedForm, PageBases


class RowForm(NamedTuple):
    """Places of keys and values in a row: of each token and head the key, and the value behind it.

    Attributes:
        axes: Axes from the outermost on: R ranks and H heads of each, L layers, B blocks and N
            tokens of each.
        sizes: Their sizes.
        dim: Dimension of a head.
        dtype: dtype of an element.
    """

    axes: str
    sizes: dict[str, int]
    dim: int
    dtype: str

    @property
    def tokens(self) -> int:
        """Return the tokens of a row."""
        return self.sizes["B"] * self.sizes["N"]

    @property
    def filled_bytes(self) -> int:
        """Return the bytes of a row without what is behind the last value."""
        return prod(self.sizes.values()) * 2 * self.dim * ITEMSIZE[self.dtype]

    def page(self) -> PageLayout:
        """Return the layout of raw pages of the same keys and values."""
        heads, layers = self.sizes["R"] * self.sizes["H"], tuple(range(self.sizes["L"]))
        said = {"head_dim": self.dim, "value_dim": self.dim, "dtype": self.dtype}
        return page_layout(LayerGroup(layers=layers, kv_heads=heads, **said), self.tokens)  # type: ignore[arg-type]

    def sides(self, row: memoryview) -> tuple[torch.Tensor, ...]:
        """Return views `[L, R, H, B, N, dim]` of the keys and the values of a row."""
        flat = torch.frombuffer(row[: self.filled_bytes], dtype=getattr(torch, self.dtype))
        shape = *(self.sizes[axis] for axis in self.axes), 2, self.dim
        return flat.view(shape).permute(5, *map(self.axes.index, "LRHBN"), 6).unbind()


class RowCoder(PageCoder):
    """Encoder and decoder of rows. Thread-safe.

    Args:
        basis: Basis of the model.
        form: Form of the rows.
        model: Name of the model, for the warning that counts rows which the basis does not fit.

    Raises:
        ValueError: The basis is of other layers, heads or dims, or such rows cannot be coded.
    """

    def __init__(self, basis: OpenBasis, form: RowForm, model: str) -> None:
        self._pages, self._form, self._model = basis.coder.fitted(form.page()), form, model
        vars(self).update(vars(self._pages))
        self._unfit = Unfit(basis, "raw")

    def encode(self, body: memoryview, page_no: int) -> bytes | None:
        """Return the coded row; None if it loses more than the basis is for, or is no smaller."""
        page = memoryview(bytearray(self.layout.page_bytes))
        for own, side in zip(self._split(page), self._form.sides(body), strict=True):
            own.copy_(side)
        found = self._pages.encode_within(page, page_no)
        self._unfit.count_part(self._model, fits=found is not None)
        return found[0] if found is not None else None

    def decode_batch(
        self, pages: Sequence[tuple[memoryview, memoryview]], first: int, layers: int
    ) -> list[bool]:
        """Write rows, but not what is behind the last value of each; return which were coded rows.

        Args:
            pages: Each coded row, and the memory of the row.
            first: 0: a row is one stripe.
            layers: 1.
        """
        made = [memoryview(bytearray(self.layout.page_bytes)) for _ in pages]
        coded = [(data, page) for (data, _), page in zip(pages, made, strict=True)]
        found = self._pages.decode_batch(coded, 0, self.layout.layers)
        for page, (_, row), sound in zip(made, pages, found, strict=True):
            for own, side in zip(self._split(page), self._form.sides(row), strict=True):
                if sound:
                    side.copy_(own)
        return found

    def _split(self, page: memoryview) -> list[torch.Tensor]:
        """Return the keys and the values of a page in the shape of a row's."""
        ranks, blocks = self._form.sizes["R"], self._form.sizes["B"]
        shape = self.layout.layers, ranks, -1, blocks, self._form.sizes["N"], self._form.dim
        return [x.view(shape) for x in self._pages.views(page)]


def row_bases(group: int, raw: bytes, row_bytes: int, coder: RowCoder) -> PageBases:
    """Return the bases of a `CodecTier` for rows.

    Args:
        group: Number of the rows' layer group.
        raw: Fingerprint that frames of raw rows carry.
        row_bytes: Bytes of a row.
        coder: Coder of the rows.
    """
    stripe = msgspec.structs.replace(coder.layout, layers=1, stripe_stride_bytes=row_bytes)
    form = CodedForm(stripe, raw, coded_fingerprint(raw), torch.device("cpu"))
    return PageBases({group: form}, {group: coder})
