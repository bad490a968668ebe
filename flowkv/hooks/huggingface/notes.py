"""Token ids and positions that went into a model, kept until a page fills and its name is needed.

Reading them from a GPU waits for it, so they are read once a page and not once a token. They are
copied when they come: a caller may write its next token into the same tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Note(NamedTuple):
    """Ids `[B, T]` and positions `[..., T]` of the columns from `low` on."""

    low: int
    ids: torch.Tensor
    positions: torch.Tensor | None


class Notes:
    """The notes of one cache, in order of columns."""

    def __init__(self) -> None:
        self._notes: list[Note] = []

    def __bool__(self) -> bool:
        return bool(self._notes)

    def add(self, low: int, ids: torch.Tensor, positions: torch.Tensor | None) -> None:
        """Copies what a forward was given for the columns from `low` on."""
        copied = None if positions is None else positions.detach().clone()
        self._notes.append(Note(low, ids.detach().clone(), copied))

    def drop(self, low: int) -> None:
        """Forgets what was noted for columns from `low` on."""
        self._notes = [note for note in self._notes if note.low < low]

    def clear(self) -> None:
        """Forgets everything."""
        self._notes.clear()

    def take(self, pads: NDArray[np.int64], by_column: bool) -> tuple[int, NDArray[np.int64], bool]:
        """Hands everything over.

        Args:
            pads: Padding columns of each row.
            by_column: Positions are expected to be missing: they count columns.

        Returns:
            The first column, ids `[B, n]`, and whether all positions are the usual ones.
        """
        notes, self._notes = self._notes, []
        joined = _join(notes)
        ordinary = all(
            usual(note.low, note.ids.shape[1], note.positions, pads, by_column=by_column)
            for note in joined
        )
        ids = torch.cat([note.ids for note in joined], dim=1).cpu().numpy()
        return notes[0].low, ids, ordinary


def _join(notes: list[Note]) -> list[Note]:
    """Adjacent columns as one note, if their positions have one shape: a GPU is asked once."""
    positions = [note.positions for note in notes]
    ids = torch.cat([note.ids for note in notes], dim=1)
    given = [p for p in positions if p is not None]
    if not given:
        return [Note(notes[0].low, ids, None)]
    alike = len({p.shape[:-1] for p in given}) == 1
    fitting = all(p.shape[-1] == note.ids.shape[1] for p, note in zip(given, notes, strict=False))
    if len(given) < len(notes) or not alike or not fitting:
        return notes
    return [Note(notes[0].low, ids, torch.cat(given, dim=-1))]


def usual(
    low: int,
    columns: int,
    positions: torch.Tensor | None,
    pads: NDArray[np.int64],
    *,
    by_column: bool = False,
) -> bool:
    """Whether positions count each row's own tokens, which every reuse relies on.

    Args:
        low: First column.
        columns: How many.
        positions: What the model was told, `[..., columns]`; None if it makes them itself.
        pads: Padding columns of each row.
        by_column: Such own positions count the padding, and pages are named after that.
    """
    padded = bool(pads.any())
    if positions is None:
        return by_column or not padded
    if (by_column and padded) or positions.shape[-1] != columns:
        return False
    wanted = torch.arange(low, low + columns, device=positions.device)
    if not padded:
        return bool((positions == wanted).all())
    wanted = wanted - torch.from_numpy(pads).to(positions.device)[:, None]
    return bool(((positions == wanted) | (wanted < 0)).all())
