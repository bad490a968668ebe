"""What every page kernel is given: where the pages lie, and which tokens of which rows are meant.

Shape legend (used by all kernels): B rows of a ragged batch, N new tokens of all rows together,
T new tokens of one row, S context of one row, P page size, Hq/Hk query and KV heads, D/Dv head
dims of K and V, L layers of the group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flowkv.core.layout import PageLayout


class Pages(NamedTuple):
    """One layer of all pages of one layer group.

    Attributes:
        arena: The pool, uint8 `[bytes]`, contiguous; granule g begins at byte 4096 * g.
        layout: Where a page's bytes lie.
        layer: Layer within the group, 0 to `layout.layers` - 1.
    """

    arena: torch.Tensor
    layout: PageLayout
    layer: int


class Ragged(NamedTuple):
    """The rows of one step. Planned once per step and group, read by every layer.

    Token j of row b stands at position `lengths[b] - T_b + j` of its sequence, where
    `T_b = starts[b + 1] - starts[b]`; it is element `starts[b] + j` of packed tensors.

    Attributes:
        table: int32 `[rows, pages]`: granule at which page p of a row begins; -1 where a page is
            absent (beyond the end, or dropped behind a sliding window) and must not be read.
        rows: int32 `[B]`: line of `table` of each row.
        lengths: int32 `[B]`: tokens of each row, the new ones included.
        starts: int32 `[B + 1]`: first new token of each row in packed tensors; the last is N.
        most_new: max over rows of T, known on the host.
        most_length: max over rows of `lengths`, known on the host.
    """

    table: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    most_new: int
    most_length: int
