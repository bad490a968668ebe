"""What the superblock says about the frames of a store: hints for whoever looks at it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowkv.tiers.disk.home import MOST_NAMED, Geometry, Home
from flowkv.tiers.disk.records import Held, Rows
from flowkv.tiers.frame import KINDS


class Contents:
    """Shapes and tenants of frames met so far."""

    def __init__(self) -> None:
        self._tenants: set[bytes] = set()
        self._shapes: set[tuple[bytes, int, int, int]] = set()

    def start(self, rows: Rows) -> None:
        """Begins anew with what a journal says."""
        self._tenants, self._shapes = set(), set()
        _, first = np.unique(_mixed(rows), return_index=True)
        some = rows[first[:MOST_NAMED]]
        self._tenants = set(some["tenant"].tolist())
        shapes = (some[name].tolist() for name in ("layout", "kind", "stripes", "stripe_bytes"))
        self._shapes = set(zip(*shapes, strict=True))

    def add(self, held: Held) -> None:
        """One more frame."""
        info = held.info
        self._tenants.add(info.tenant)
        kind = KINDS.index(info.kind)
        self._shapes.add((info.layout, kind, held.stripes, info.stripe_bytes))

    def note(self, home: Home) -> None:
        """Writes it down, if it is news.

        Raises:
            OSError: The superblock could not be written; the old one is still there.
        """
        home.note(
            {
                Geometry(layout=layout.hex(), kind=KINDS[kind], stripes=stripes, stripe_bytes=step)
                for layout, kind, stripes, step in self._shapes
            },
            {salt.hex() for salt in self._tenants},
        )


def _mixed(rows: Rows) -> NDArray[np.uint64]:
    """A number for each row, equal for one tenant and shape; two that collide cost a hint."""
    mixed = rows["stripe_bytes"] * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= (rows["stripes"].astype(np.uint64) << np.uint64(8)) + rows["kind"]
    for name in ("tenant", "layout"):
        words = (
            np.ascontiguousarray(rows[name]).view("<u8").reshape(-1, rows.dtype[name].itemsize // 8)
        )
        for column in range(words.shape[1]):
            mixed = mixed * np.uint64(0xC2B2AE3D27D4EB4F) + words[:, column]
    return mixed
