"""The index of a disk tier: which frame lies in which slot, in the order of the stores.

What a journal says at opening stays in its rows until somebody asks, so that a store of a hundred
thousand frames opens in a fraction of the time that their objects would take.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowkv.tiers.disk.journal import charge_bytes
from flowkv.tiers.disk.records import (
    RECORD_BYTES,
    STORED,
    Held,
    Record,
    Rows,
    pack_record,
    unpack_row,
)


class Index:
    """A dict of `Held` by key, oldest store first. Not thread-safe but for `in`."""

    def __init__(self) -> None:
        self._held: dict[bytes, Held | int] = {}
        self._rows = b""

    def load(self, rows: Rows) -> None:
        """Starts from the rows that hold (`records.newest`); forgets everything else."""
        self._rows = rows.tobytes()
        self._held = dict(zip(rows["key"].tolist(), range(len(rows)), strict=True))

    def apply(self, rows: Rows) -> None:
        """What the owner did since; nothing that is older than what is known here."""
        packed = rows.tobytes()
        for row in range(len(rows)):
            op, key, held = unpack_row(packed, row)
            known = self.get(key)
            if known is not None and known.seq > held.seq:
                continue
            self._held.pop(key, None)
            if op == STORED:
                self._held[key] = held

    def get(self, key: bytes) -> Held | None:
        """Where a frame lies."""
        held = self._held.get(key)
        if isinstance(held, int):
            held = self._held[key] = unpack_row(self._rows, held).held
        return held

    def __setitem__(self, key: bytes, held: Held) -> None:
        self._held[key] = held

    def pop(self, key: bytes) -> Held | None:
        """Forgets a frame; where it lay."""
        held = self.get(key)
        self._held.pop(key, None)
        return held

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def oldest(self, n_bytes: int) -> list[bytes]:
        """Keys of the oldest frames that are charged so much together."""
        keys = []
        for key, held in self.items():
            if n_bytes <= 0:
                break
            keys.append(key)
            n_bytes -= charge_bytes(held)
        return keys

    def items(self) -> Iterator[tuple[bytes, Held]]:
        """All frames, oldest store first; the index must not change meanwhile."""
        rows = self._rows
        for key, held in self._held.items():
            yield key, unpack_row(rows, held).held if isinstance(held, int) else held

    def lines(self) -> Iterator[bytes]:
        """Packed records of all frames, oldest store first."""
        rows = memoryview(self._rows)
        for key, held in self._held.items():
            if isinstance(held, int):
                yield bytes(rows[held * RECORD_BYTES : (held + 1) * RECORD_BYTES])
            else:
                yield pack_record(Record(STORED, key, held))

    def clear(self) -> None:
        """Forgets everything."""
        self._held, self._rows = {}, b""
