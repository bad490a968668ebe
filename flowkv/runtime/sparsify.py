"""Takes tokens out of open sequences: for each layer and head, what was looked at least.

A sparsified sequence has fewer slots than positions. Keys keep the rotations of their positions, so
the model goes on at the true ones; only what counts slots (pages, lengths) is shorter. Its pages
are no longer what its tokens say, so they are private, and nothing of it is published any more.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv import kernels
from flowkv.core.errors import GeometryError, NonFiniteError, StateError
from flowkv.core.geometry import LayerGroup
from flowkv.core.layout import CODEC_SHIFT
from flowkv.kernels.operands import Ragged
from flowkv.policy.importance import Importance
from flowkv.runtime.advance import Advance
from flowkv.runtime.lines import Lines
from flowkv.runtime.sequence import Sequence


class Watch:
    """The page mass of one step, layer by layer, and whom it is told at its end."""

    def __init__(self) -> None:
        self._mass: dict[int, torch.Tensor] = {}

    def mass(self, layer: int, batch: Ragged, group: LayerGroup, page_size: int) -> torch.Tensor:
        """float32 `[B, pages, Hk]`, zeros at first, to which the attention of a layer adds."""
        shape = len(batch.rows), -(-batch.most_length // page_size), group.kv_heads
        fresh = batch.table.new_zeros(shape, dtype=torch.float32)
        return self._mass.setdefault(layer, fresh)

    def tell(self, seqs: Items[Sequence], groups: Items[LayerGroup], step: Advance) -> None:
        """Adds what was seen to the importance of each row's pages."""
        counts, lengths = np.diff(step.starts).tolist(), step.after.tolist()
        for g, group in enumerate(groups):
            if not all(layer in self._mass for layer in group.layers):
                continue  # it has a window, or no single tokens
            seen = torch.stack([self._mass[layer] for layer in group.layers]).cpu().numpy()
            for b, seq in enumerate(seqs):
                size = seq.planner.page_size
                pages = -(-lengths[b] // size)
                policy = importance(seq, g)
                policy.observe(seen[:, b, :pages].transpose(0, 2, 1), counts[b])


def importance(seq: Sequence, group: int) -> Importance:
    """What is known of the weights that a sequence's pages were given."""
    found = seq.importance.get(group)
    if found is None:
        spec = seq.planner.geometry.groups[group]
        found = Importance(len(spec.layers), spec.kv_heads, seq.planner.page_size)
        seq.importance[group] = found
    return found


def chosen(seq: Sequence, budget_tokens: int) -> list[NDArray[np.int32]]:
    """What the watched weights say should stay, for each group.

    Raises:
        ConfigError: The budget does not even hold the first tokens.
        StateError: No step of the sequence was watched.
    """
    if not seq.importance:
        raise StateError(
            "nothing is known of what the sequence looks at",
            "Call step.watch() in its steps, or say what to keep",
        )
    groups = range(len(seq.blocks))
    return [importance(seq, g).keep(seq.length, budget_tokens) for g in groups]


def sparsify(lines: Lines, seq: Sequence, keep: Items[NDArray[np.integer]]) -> int:
    """Keeps some tokens of a sequence, in fresh private pages; returns how many it lost.

    Callers hold the KV lock.

    Args:
        lines: Its lines.
        seq: The sequence, in no step.
        keep: For each group `[L, Hk, n]`, ascending slots below the sequence's length.

    Raises:
        CapacityError: The new pages do not fit beside the old ones; the sequence is as before.
        GeometryError: `keep` has another shape or other slots, or a layer group has a window.
        StateError: The sequence is closed, suspended or in a step.
    """
    lines.idle(seq)
    length = seq.length
    kept = _checked(lines, length, keep)
    count = int(kept[0].shape[2])
    if count == length:
        return 0
    pages = -(-count // lines.page_size)
    sealed = [sum(page >> CODEC_SHIFT > 0 for page in _line(seq, g)) for g in range(len(kept))]
    # All at once: to make room pages may move, but none that is in no table yet.
    fresh = lines.allocate_raw([pages + aside for aside in sealed])
    spare: list[tuple[int, int]] = []
    try:
        for g, part in enumerate(kept):
            spare += ((g, page) for page in fresh[g][pages:])
            _drop(lines, seq, g, fresh[g], part)
    except NonFiniteError:
        spare = [(g, page) for g, taken in enumerate(fresh) for page in taken]
        raise
    finally:
        for g, page in spare:
            lines.store.pool(g).release(page)
    lines.vacate(seq)
    lines.occupy(seq, [taken[:pages] for taken in fresh])
    lines.tables.lengths[seq.row], lines.tables.shared[seq.row] = count, False
    seq.publishable = False
    seq.dropped += length - count
    for g, part in enumerate(kept):
        if g in seq.importance:
            seq.importance[g].kept(part)
    return length - count


def _checked(
    lines: Lines, length: int, keep: Items[NDArray[np.integer]]
) -> list[NDArray[np.int32]]:
    groups = lines.geometry.groups
    for group in groups:
        if group.kind != "full":
            raise GeometryError(
                f"a {group.kind!r} layer group counts distances in slots, or has no tokens to drop",
                "Sparsify models all of whose layers see the whole context",
            )
    if len(keep) != len(groups):
        raise GeometryError(
            f"tokens to keep of {len(keep)} layer groups, of {len(groups)}",
            "Pass one [layers, heads, n] array for each group",
        )
    kept = [np.ascontiguousarray(part, np.int32) for part in keep]
    counts = {part.shape[2] if part.ndim == 3 else -1 for part in kept}
    for group, part in zip(groups, kept, strict=True):
        shape = len(group.layers), group.kv_heads
        if part.ndim != 3 or part.shape[:2] != shape or len(counts) > 1 or not part.size:
            raise GeometryError(
                f"tokens to keep {part.shape}",
                f"Pass {[*shape, 'n']}, n being at least 1 and the same everywhere",
            )
        if part.min() < 0 or part.max() >= length or (np.diff(part, axis=2) <= 0).any():
            raise GeometryError(
                f"slots {part.min()} to {part.max()} of a sequence of {length}",
                "Name each slot once, in ascending order",
            )
    return kept


def _line(seq: Sequence, group: int) -> list[int]:
    table = seq.planner.tables.pages[group]
    line: list[int] = table[seq.row, : len(seq.blocks[group])].tolist()
    return line


def _drop(
    lines: Lines, seq: Sequence, group: int, fresh: list[int], keep: NDArray[np.int32]
) -> None:
    """Writes the tokens of one group that stay into fresh pages; those beyond are for decoding."""
    pool, layout, line = lines.store.pool(group), lines.store.forms[group].raw, _line(seq, group)
    target = fresh[: -(-keep.shape[2] // lines.page_size)]
    sealed = (page for page in line if page >> CODEC_SHIFT)
    decoded = dict(zip(sealed, fresh[len(target) :], strict=True))
    for old, page in decoded.items():
        lines.thaw(group, old, page)
    source = pool.granules([decoded.get(page, page) for page in line])
    where = torch.from_numpy(keep).to(pool.device)
    kernels.drop_tokens(pool.arena, source, pool.granules(target), where, layout)
