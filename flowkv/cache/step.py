"""Steps: forward passes over ragged rows, planned once and read by every layer."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from contextvars import ContextVar, Token
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv import kernels
from flowkv.cache.block_table import FILLS, Advance, Planner
from flowkv.cache.overflow import Scan
from flowkv.cache.sequence import Sequence, extend_each
from flowkv.compiled import compiling
from flowkv.core import interrupts
from flowkv.core.errors import ConfigError, GeometryError, NonFiniteError, StateError, TokenError
from flowkv.core.geometry import CODEC_SHIFT, LayerGroup
from flowkv.kernels import dispatch
from flowkv.kernels.cascade import Cascade, shared_prefixes
from flowkv.kernels.operands import GPUS, DeviceTimer, Pages, Ragged, sent
from flowkv.policy.pages import Importance

# A step split into rows of one new token each, which attend as if they were decoded.
#
# The attention of a token is then computed the same way for any number of new tokens in its row.

MOST = 256
"""Most rows in one call: kernels process all rows of a batch at once."""


def singles(batch: Ragged, step: Advance, group: int) -> list[tuple[slice, Ragged]]:
    """Split the new tokens of a step into batches of rows with one token each.

    Args:
        batch: The rows for the kernels.
        step: The same rows, on the host.
        group: The layer group.

    Returns:
        (slice of the packed tokens, their batch), in order.
    """
    counts, new = np.diff(step.starts), int(step.starts[-1])
    lines = np.repeat(step.rows, counts)
    lengths = np.repeat(step.ends[group] - step.starts[1:], counts) + np.arange(
        1, new + 1, dtype=np.int32
    )
    device, found = batch.table.device, []
    for first in range(0, max(new, 1), MOST):
        part = slice(first, min(first + MOST, new))
        starts = np.arange(part.stop - first + 1, dtype=np.int32)
        line, length, start = (
            sent(torch.from_numpy(each), device) for each in (lines[part], lengths[part], starts)
        )
        found.append((part, Ragged(batch.table, line, length, start, 1, batch.most_length, 0)))
    return found


# Rows of a step that begin with the same pages, which attention then reads once for all.

LEAST_TOKENS = 16384
"""Least number of token reads that sharing must save for a group of rows.

Measured on a CPU, in CPU time of whole decoding steps of the fixture model: nothing is gained at 15
thousand (16 rows, 1024 shared tokens: 0.98 times), 1.17 times at 45 thousand (16 rows, 3000), 1.20
times at 65 thousand (64 rows, 1024). Attention alone gains 1.1 to 2.6 times beyond the bound, in
shapes of 2 to 100 rows, 512 to 8192 shared tokens and heads of 64 and 128; far below, it loses.
"""


def shared(planner: Planner, step: Advance, group: int, batch: Ragged) -> Cascade | None:
    """Plan to read the pages that neighbouring rows share once; None if that does not pay.

    Args:
        planner: Owner of the tables.
        step: The rows.
        group: The layer group.
        batch: The rows for the group's kernels.
    """
    size = planner.page_size
    if len(step.rows) < 2 or planner.geometry.groups[group].kind != "full":
        return None
    before = step.ends[group].astype(np.int64) - np.diff(step.starts)
    most = int(before.max()) // size
    if (len(step.rows) - 1) * most * size < LEAST_TOKENS:
        return None
    with planner.guard:
        table = planner.tables.pages[group]
        pages = table[step.rows, :most]
    if not (pages[1:, 0] == pages[:-1, 0]).any():  # the usual case, found cheaply
        return None
    groups = shared_prefixes(pages.astype(np.int64), before // size, size, LEAST_TOKENS)
    if not groups:
        return None
    lines, rows, lengths, starts = (
        torch.from_numpy(array) for array in (table, step.rows, step.ends[group], step.starts)
    )
    host = Ragged(lines, rows, lengths, starts, batch.most_new, batch.most_length)
    plan: Cascade = kernels.plan_cascade(batch, size, host=host, groups=groups)
    return plan


# Sparsification: tokens with the least attention are removed from open sequences, for each layer
# and head.
#
# A sparsified sequence has fewer slots than positions, and each layer group may have another number
# of slots. Keys keep the rotations of their positions, so the model continues at the true ones;
# only counts of slots (pages, lengths for kernels) are smaller. Its pages no longer match its
# tokens, so they are private, and no further ones are published. Groups that lose no token keep
# their pages.


class MassWatch:
    """Attention mass on the pages of one step, layer by layer."""

    def __init__(self) -> None:
        self._mass: dict[int, torch.Tensor] = {}

    def mass(self, layer: int, batch: Ragged, group: LayerGroup, page_size: int) -> torch.Tensor:
        """Return the mass of a layer, float32 `[B, pages, Hk]`; its attention adds to it."""
        shape = len(batch.rows), -(-batch.most_length // page_size), group.kv_heads
        fresh = batch.table.new_zeros(shape, dtype=torch.float32)
        return self._mass.setdefault(layer, fresh)

    def add_mass(self, seqs: Items[Sequence], groups: Items[LayerGroup], step: Advance) -> None:
        """Add the mass of the step to the importance of each row's pages."""
        counts = np.diff(step.starts).tolist()
        for g, group in enumerate(groups):
            if not all(layer in self._mass for layer in group.layers):
                continue  # only full attention is watched
            seen = torch.stack([self._mass[layer] for layer in group.layers]).cpu().numpy()
            for b, seq in enumerate(seqs):
                size = Planner.of(seq).page_size
                pages = -(-int(step.ends[g, b]) // size)
                policy = importance(seq, g)
                policy.observe(seen[:, b, :pages].transpose(0, 2, 1), counts[b])


def importance(seq: Sequence, group: int) -> Importance:
    """Return the `Importance` of a sequence's pages in a layer group, made on first use."""
    found = seq.importance.get(group)
    if found is None:
        spec = Planner.of(seq).geometry.groups[group]
        found = Importance(len(spec.layers), spec.kv_heads, Planner.of(seq).page_size)
        seq.importance[group] = found
    return found


def chosen(seq: Sequence, budget_tokens: int | Items[int]) -> list[NDArray[np.int32]]:
    """Choose the slots to keep within a budget by watched attention, int32 per group.

    Raises:
        ConfigError: A budget is too small for the first tokens, or there is not one for each group.
        StateError: No step of the sequence was watched.
    """
    if not seq.importance:
        raise StateError(
            "no step of the sequence was watched",
            "Call step.watch() in its steps, or pass the slots to keep",
        )
    count = len(seq.blocks)
    budgets = budget_tokens if isinstance(budget_tokens, Items) else [budget_tokens] * count
    if len(budgets) != count:
        raise ConfigError(
            f"{len(budgets)} budgets for {count} layer groups", "Pass one number, or one for each"
        )
    each = enumerate(zip(seq.lengths.tolist(), budgets, strict=True))
    return [importance(seq, g).keep(length, budget) for g, (length, budget) in each]


def sparsify(lines: Planner, seq: Sequence, keep: Items[NDArray[np.integer]]) -> int:
    """Copy the tokens to keep into fresh private pages; return the most tokens a group lost.

    Callers hold the KV lock.

    Args:
        lines: Planner of the sequence.
        seq: The sequence, in no step.
        keep: For each group `[L, Hk, n]`, ascending slots below the group's length.

    Raises:
        CapacityError: The new pages do not fit beside the old ones; the sequence is as before.
        GeometryError: `keep` has another shape or other slots, or a layer group has a window.
        StateError: The sequence is closed, suspended or in a step.
    """
    lines.idle(seq)
    lines.whole(seq)
    kept = _checked(lines, seq, keep)
    lost = seq.lengths - [part.shape[2] for part in kept]
    losers = np.flatnonzero(lost).tolist()
    if not losers:
        return 0
    pages = [-(-kept[g].shape[2] // lines.page_size) if lost[g] else 0 for g in range(len(kept))]
    sealed = {g: sum(page >> CODEC_SHIFT > 0 for page in _line(seq, g)) for g in losers}
    # All pages are allocated at once: making room may move pages, but only those in a table.
    fresh = lines.allocate_raw([n + sealed.get(g, 0) for g, n in enumerate(pages)])
    spare: list[tuple[int, int]] = []
    try:
        for g in losers:
            spare += ((g, page) for page in fresh[g][pages[g] :])
            _drop(lines, seq, g, fresh[g], kept[g])
    except NonFiniteError:
        spare = [(g, page) for g, taken in enumerate(fresh) for page in taken]
        raise
    finally:
        for g, page in spare:
            lines.store.pool(g).release(page)
    lines.vacate(seq, losers)
    lines.occupy(seq, [taken[:n] for taken, n in zip(fresh, pages, strict=True)])
    lines.tables.lost[:, seq.row] += lost
    seq.publishable = False
    for g in losers:
        if g in seq.importance:
            seq.importance[g].kept(kept[g])
    return int(lost.max())


def stand_for(short: Sequence, seq: Sequence, length: int) -> None:
    """Let a sequence stand for the first tokens of another one, of which its pages hold the rest.

    It takes over the request; it is private from now on. Callers hold the KV lock.

    Args:
        short: The sequence, in no step, whose pages hold at most `length` tokens.
        seq: The other one, with the tokens, and the salts of later tokens.
        length: Number of its tokens.
    """
    lines = Planner.of(short)
    lines.idle(short)
    lines.tables.lost[:, short.row] += length - short.length
    lines.tables.lengths[short.row] = length
    short.publishable = False
    short.forget_tokens(0)
    short.note(seq.tokens)
    short.prompted, short.care, short.reused = seq.prompted, seq.care, seq.reused
    short.request, seq.request = seq.request, short.request


def _checked(
    lines: Planner, seq: Sequence, keep: Items[NDArray[np.integer]]
) -> list[NDArray[np.int32]]:
    groups = lines.geometry.groups
    for group in groups:
        if group.kind != "full":
            raise GeometryError(
                f"a {group.kind!r} layer group counts distances in slots, or has no tokens to drop",
                "Sparsify only models with full attention in all layers",
            )
    if len(keep) != len(groups):
        raise GeometryError(
            f"tokens to keep of {len(keep)} layer groups, of {len(groups)}",
            "Pass one [layers, heads, n] array for each group",
        )
    kept = [np.ascontiguousarray(part, np.int32) for part in keep]
    for group, part, length in zip(groups, kept, seq.lengths.tolist(), strict=True):
        shape = len(group.layers), group.kv_heads
        if part.ndim != 3 or part.shape[:2] != shape or not part.size:
            raise GeometryError(
                f"tokens to keep {part.shape}", f"Pass {[*shape, 'n']}, n being at least 1"
            )
        if part.min() < 0 or part.max() >= length or (np.diff(part, axis=2) <= 0).any():
            raise GeometryError(
                f"slots {part.min()} to {part.max()} of a sequence of {length}",
                "Name each slot once, in ascending order",
            )
    return kept


def _line(seq: Sequence, group: int) -> list[int]:
    table = Planner.of(seq).tables.pages[group]
    line: list[int] = table[seq.row, : len(seq.blocks[group])].tolist()
    return line


def _drop(
    lines: Planner, seq: Sequence, group: int, fresh: list[int], keep: NDArray[np.int32]
) -> None:
    """Copy a group's tokens to keep into the first fresh pages; the others take decoded pages."""
    pool, layout, line = lines.store.pool(group), lines.store.forms[group].raw, _line(seq, group)
    target = fresh[: -(-keep.shape[2] // lines.page_size)]
    sealed = (page for page in line if page >> CODEC_SHIFT)
    decoded = dict(zip(sealed, fresh[len(target) :], strict=True))
    for old, page in decoded.items():
        lines.thaw(group, old, page)
    source = pool.granules([decoded.get(page, page) for page in line])
    where = sent(torch.from_numpy(keep), pool.device)
    kernels.drop_tokens(pool.arena, source, pool.granules(target), where, layout)


_RESTORATION = attrgetter("restoration")


CURRENT: ContextVar[weakref.ref[Step] | None] = ContextVar("flowkv_step", default=None)
"""Weak reference to the step of this context's `flowkv.attention`.

An interrupt may come before the `__exit__` that a `with` calls: the step is then dropped and rolled
back, which a strong reference here would prevent.
"""


def current_step() -> Step | None:
    """Return the step of this context, if there is one."""
    ref = CURRENT.get()
    return None if ref is None else ref()


class Step:
    """One forward over rows of different lengths. Made by `KV.step`, `KV.prefill` or `KV.plan`.

    As a context manager it makes `flowkv.attention` read and write pages, commits at the end, and
    rolls back if the block raises. A step that is dropped unfinished is rolled back too.

    Attributes:
        seqs: The rows.
        counts: int64 `[B]`: new tokens T of each row.
        awaits: Called with each layer after it wrote its new tokens; returns when it may attend.
        tokens: int64 `[1, N]`: the new token ids, packed row after row; None for `KV.plan`.
        audits: Whether the step only recomputes known pages to compare them; logits are unused.
        apart: Whether each new token attends as if it were the only one: the same bits, for any
            other rows in the step and any chunking of a prompt.
        overflows: Whether pages of a row are below the device: only `read` attends over them.
        vouched: Whether the model was as named behind the forward; a commit records it in the rows.
        planner: Planner of the rows.
        advance: Advance of the rows.
    """

    # Slots instead of a dictionary stop walks through the attributes of a cache here.
    __slots__ = tuple(
        """seqs counts tokens awaits audits apart _open planner _started_s _token _batches _singles
        _shared _decodes _writers _most _single _tables _noted _touched _watch advance _waited_s
        _coming overflows _scans _told _timer vouched __weakref__""".split()
    )

    def __init__(
        self,
        planner: Planner,
        seqs: Items[Sequence],
        counts: NDArray[np.int64],
        last: Step | None = None,
    ) -> None:
        self.seqs, self.counts = list(seqs), counts
        self.apart = self.vouched = self._open = False  # until everything is reserved
        self.tokens: torch.Tensor | None = None
        self._told = True
        self.awaits: Callable[[int], object] | None = None
        self.audits = False
        self.planner = planner
        self._started_s = time.perf_counter()
        self._token: Token[weakref.ref[Step] | None] | None = None
        self._batches: dict[int, Ragged] = {}
        self._singles: dict[int, list[tuple[slice, Ragged]]] = {}
        self._shared: dict[int, Cascade | None] = {}
        self._decodes: dict[int, Any] = {}
        self._writers: dict[int, Any] = {}
        self._most = 0  # longest row that `_decodes` serve, in tokens
        self._noted: list[tuple[Sequence, int]] = []
        self._touched: set[int] = set()
        self._watch: MassWatch | None = None
        last = None if last is None or last._open or last.planner is not planner else last
        before = None if last is None else last.advance
        with planner.guard:  # pages reserved before `_open` is set would never be released
            for pool in planner.store.pools.values():
                if pool.copies is not None:  # another thread's stream may have begun copies
                    pool.copies.join()
            self.advance: Advance = planner.reserve(self.seqs, counts, before)
            self._open = True
        self._single = self.advance.most_new == 1 and self.advance.starts[-1] == len(self.seqs)
        self._tables = planner.tables.pages
        self._waited_s = 0.0
        over = planner.overflow
        self.overflows = over is not None and over.away > 0 and any(s.away for s in self.seqs)
        self._scans: dict[int, Scan | None] = {}
        device = planner.tables.devices[0]
        self._coming = [*filter(_RESTORATION, self.seqs)]
        timed = self.advance.most_new >= planner.page_size or self._coming
        self._timer = DeviceTimer(device) if timed and device.type in GPUS else None
        if self._coming:  # layers wait for pages that are not loaded yet
            waits = [seq.restoration.wait for seq in self._coming if seq.restoration is not None]
            self.awaits = lambda layer: [wait(layer) for wait in waits]
        elif last is not None and last._decodes and not self.overflows:
            self._follow(last)

    def _follow(self, last: Step) -> None:
        """Reuse the prepared decodes of the step before, if they serve this one.

        While the same rows decode, the kernels read lengths and pages in place, as long as the
        tables are the same arrays and no row has more pages than the longest row had.
        """
        step, kept = self.advance, last._decodes
        same = step.rows is last.advance.rows and self._tables is last._tables
        fits = same and self._single and step.most_length <= last._most
        if fits and None not in kept.values() and not dispatch.checks:
            self._decodes, self._most = kept, last._most

    def repeats(self, most_new: int = 1) -> bool:
        """Return whether a CUDA graph serves steps like this one, which differ in integers only.

        Each row has one new token, or a single row at most `most_new`, and all tokens that it
        attends to are in resident pages.
        """
        planner, fits = self.planner, self._single or self._short(most_new)
        plain = fits and self._open and not (self.apart or self.audits or self.overflows)
        if not plain or self._coming or self.awaits is not None or self._watch is not None:
            return False
        return not (planner.chunked or planner.tables.lost[:, self.advance.rows].any())

    def _short(self, most_new: int) -> bool:
        """Return whether a single row has few new tokens, in raw pages that all of them see."""
        planner = self.planner
        alone = len(self.seqs) == 1 and 0 < self.advance.most_new <= most_new
        return alone and not planner.slides and planner.sealer is None

    def rerun(self) -> None:
        """Record that it was run more than once, so that its time is none of one forward."""
        self._waited_s = math.inf

    def replayed(self) -> None:
        """Record that a CUDA graph wrote the new tokens of all layers."""
        self._touched, self._decodes = set(self.planner.layers), {}

    def give(self, tokens: NDArray[np.uint32]) -> None:
        """Set the token ids of the step, and append unknown ones to their sequences.

        Args:
            tokens: Packed row after row.

        Raises:
            TokenError: The ids differ from the known ones of a prompt. The step is rolled back.
        """
        step = self.advance
        self.tokens = torch.from_numpy(tokens.astype(np.int64)).unsqueeze(0)
        starts, lengths = step.starts.tolist(), step.before.tolist()
        if self._single:
            self._noted = list(zip(self.seqs, lengths, strict=True))
            if extend_each(self.seqs, lengths, tokens.tolist()):  # the usual case of decoding
                return
            self._noted = []
        for b, (seq, length) in enumerate(zip(self.seqs, lengths, strict=True)):
            known = seq.known
            ids = tokens[starts[b] : starts[b + 1]]
            if known > length:
                pending = seq.tokens[length : length + len(ids)]
                if not np.array_equal(pending, ids[: len(pending)]):
                    self.rollback()
                    raise TokenError(
                        f"the new tokens of a row differ from its prompt at position {length}",
                        "Pass the prompt's own tokens, or open another sequence",
                    )
                ids = ids[len(pending) :]
            if known >= length and len(ids):  # a gap would shift all ids behind it
                self._noted.append((seq, known))
                seq.extend(ids)

    def give_later(self, tokens: torch.Tensor) -> None:
        """Set token ids that are still on their device; `Planner.append_ids` gets them once read.

        Args:
            tokens: int64 `[N]`, packed row after row.
        """
        self.tokens, self._told = tokens.view(1, -1), False

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups of the geometry."""
        return self.planner.geometry.groups

    def group(self, layer: int) -> LayerGroup:
        """Return the layer group of a model layer.

        Raises:
            GeometryError: No group holds the layer.
        """
        return self.groups[self.planner.locate(layer)[0]]

    @property
    def open(self) -> bool:
        """Return whether the step is neither committed nor rolled back."""
        return self._open

    @property
    def fills(self) -> bool:
        """Return whether the step fills pages, which are then published."""
        return bool(self.advance.flags & FILLS)

    @property
    def begins(self) -> bool:
        """Return whether the step starts a single row, whose tokens attend to each other only.

        False if attention must read pages all the same: results must not depend on the step, are
        watched, or wait for loads.
        """
        alone = len(self.seqs) == 1 and not self.advance.before[0]
        return alone and not self.apart and self._watch is None and self.awaits is None

    def dtype(self, layer: int) -> torch.dtype:
        """Return the dtype of a layer's K and V in raw pages.

        Raises:
            GeometryError: No group holds the layer.
        """
        dtype: torch.dtype = getattr(torch, self.group(layer).dtype)
        return dtype

    @property
    def positions(self) -> torch.Tensor:
        """Position of each new token in its sequence, int64 `[1, N]`."""
        step = self.advance
        first = step.before
        if not self._single:
            first = np.repeat(first - step.starts[:-1], self.counts) + np.arange(step.starts[-1])
        return torch.from_numpy(first).unsqueeze(0)

    def batch(self, group: int = 0) -> Ragged:
        """Return the rows for the kernels, on the group's device."""
        found = self._batches.get(group)
        if found is None:
            found = self._batches[group] = self.planner.ragged(group, self.advance)
        return found

    def decode(self, group: int) -> Any:
        """Return a group's prepared decode (`kernels.prepare_decode`); None if it cannot serve.

        It serves rows of one new token each, with resident pages that no two rows read together,
        if results may depend on the batch and are not watched.
        """
        if group in self._decodes:
            return self._decodes[group]
        prepared = None
        plain = not self._coming and self.awaits is None and self._watch is None
        plain = plain and self._scan(group) is None
        if self._single and plain and not self.apart and self.groups[group].kind != "chunked":
            batch = self.batch(group)
            if self._shares(group, batch) is None:
                first = self.planner.pages(self.groups[group].layers[0])
                prepared = kernels.prepare_decode(first, batch, self.planner.window(group))
                size = self.planner.page_size
                self._most = -(-batch.most_length // size) * size
        self._decodes[group] = prepared
        return prepared

    def pages(self, layer: int) -> Pages:
        """Return the pages of a model layer, and mark the layer as written.

        Raises:
            GeometryError: No group holds the layer.
        """
        pages = self.planner.pages(layer)
        self._touched.add(layer)
        return pages

    def attend(  # noqa: PLR0913 - the switches of attention belong to one call
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        window: int | None = None,
        alibi: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new K and V of a layer into pages and attend over them.

        Args:
            layer: Index of the layer, as listed in the geometry.
            q: Packed queries `[N, Hq, D]`.
            k: Packed new keys `[N, Hk, D]`.
            v: Packed new values `[N, Hk, Dv]`; None for latent groups.
            scale: Scale of the logits; default `D ** -0.5`.
            softcap: `tanh(logit / softcap) * softcap`, if given.
            sinks: `[Hq]` extra logits that join the denominator, if given.
            window: Tokens that a token attends to, itself included; default that of the group.
            alibi: float32 `[Hq]`, slopes of a bias by distance, if given.

        Returns:
            `[N, Hq, Dv]` in the dtype of `q`.

        Raises:
            GeometryError: Shapes, dtypes or devices do not fit, no group holds the layer, its group
                keeps fewer tokens than the window, or slopes meet a sequence with dropped tokens.
            StateError: The step is over.
        """
        self.write(layer, k, v)
        return self.read(
            layer, q, scale=scale, softcap=softcap, sinks=sinks, window=window, alibi=alibi
        )

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Write the new K and V of a layer into pages, the first half of `attend`."""
        self._fits("k", k)
        group, place = self.planner.locate(layer)
        decode, pages = writer(self, group), self.pages(layer)
        if decode is None or v is None or not decode.append(place, k, v):
            kernels.append(k, v, pages, self.batch(group))
        self.appended(layer)

    def read(
        self,
        layer: int,
        q: torch.Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        window: int | None = None,
        alibi: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over the pages of a layer after `write`, the second half of `attend`."""
        self._fits("q", q)
        group, place = self.planner.locate(layer)
        plain = window is None and alibi is None
        scan = self._scan(group)
        if scan is not None:
            self._plain(layer, plain=plain)
            return scan.attend(place, q, scale, softcap, sinks)
        decode = self.decode(group) if plain else None
        if decode is not None:
            found = decode.attend(place, q, scale, softcap, sinks)
            if found is not None:
                return found  # type: ignore[no-any-return]
        pages = self.planner.pages(layer)
        how: dict[str, Any] = dict(scale=scale, softcap=softcap, sinks=sinks)
        kept = self.planner.window(group)
        if not plain or self.groups[group].kind == "chunked":
            self._serves(layer, window, alibi)
            how["alibi"] = alibi
        window = kept if window is None else window
        out: torch.Tensor
        if self.apart:
            if group not in self._singles:
                self._singles[group] = singles(self.batch(group), self.advance, group)
            parts: list[Any] = [
                kernels.paged_attention(q[part], pages, one, window=window, invariant=True, **how)
                for part, one in self._singles[group]
            ]
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
            return out
        batch = self.batch(group)
        shared = self._shares(group, batch) if plain else None
        if shared is not None:
            found = kernels.cascade_attention(q, pages, batch, shared, **how)
            return found  # type: ignore[return-value] # without return_lse it is one tensor
        mass = self._watched(layer, group, batch)
        found = kernels.paged_attention(q, pages, batch, window=window, mass=mass, **how)
        return found  # type: ignore[return-value]

    def _scan(self, group: int) -> Scan | None:
        """Return the scan of a group with pages below the device; None if all are on it."""
        if not self.overflows:
            return None
        if group not in self._scans:
            self._scans[group] = self.planner.scan(group, self.seqs, self.batch(group))
        return self._scans[group]

    def _plain(self, layer: int, *, plain: bool) -> None:
        """Check that a layer uses no option that attention below the device does not support.

        Raises:
            StateError: It uses one.
        """
        if not plain or self.apart or self._watch is not None:
            asked = "a bias or window of its own" if not plain else "results apart"
            asked = asked if self._watch is None else "to be watched"
            raise StateError(
                f"layer {layer} asks for {asked} over pages that lie below the device",
                "Give the device pool more bytes, or leave overflow out",
            )

    def _serves(self, layer: int, window: int | None, alibi: torch.Tensor | None) -> None:
        group = self.group(layer)
        if group.kind == "chunked":
            raise GeometryError(
                f"layer {layer} is chunked, which no kernel over pages serves",
                "Gather its keys and values, or let flowkv.attach serve the model",
            )
        if window is not None and group.window is not None and window > group.window:
            raise GeometryError(
                f"layer {layer} is to see {window} tokens, its group keeps {group.window}",
                "Say the widest window in the geometry: LayerGroup(window=...)",
            )
        if alibi is not None and any(seq.dropped for seq in self.seqs):
            raise GeometryError(  # kernels count distances in the remaining slots
                f"layer {layer} adds slopes by distance, and tokens were dropped from its sequence",
                "Do not sparsify sequences of models with ALiBi",
            )

    def _fits(self, name: str, x: torch.Tensor) -> None:
        """Check that the step is open, and the number of new tokens: kernels on a GPU cannot raise.

        Raises:
            GeometryError: `x` has another number of tokens than the step.
            StateError: The step is over.
        """
        if not self._open:
            raise StateError("this step is over", "Call the model inside `with kv.step(...)`")
        new = self.advance.starts[-1]
        if x.shape[0] != new:
            raise GeometryError(
                f"{name} is {list(x.shape)} in a step of {new} new tokens",
                "Pass the new tokens of all rows, packed: [N, heads, dim]",
            )

    def _shares(self, group: int, batch: Ragged) -> Cascade | None:
        """Return the plan to read shared pages once; None if there is none, or it cannot serve."""
        if self._watch is not None or self._coming or self.overflows:
            return None  # pages of a restore may be replaced while layers run
        if group not in self._shared:
            self._shared[group] = shared(self.planner, self.advance, group, batch)
        return self._shared[group]

    def appended(self, layer: int) -> None:
        """Record that a layer has written its new tokens, and wait until it may attend."""
        self._touched.add(layer)
        if self.awaits is not None:
            begun_s = time.perf_counter()
            self.awaits(layer)
            # Compile time meanwhile is subtracted from the whole step, so it is not counted here.
            ended_s = time.perf_counter()
            self._waited_s += ended_s - begun_s - compiling.within_s(begun_s, ended_s)

    def refresh(self) -> None:
        """Drop all prepared batches, after pages of the rows were replaced."""
        self._batches.clear()
        self._singles.clear()
        self._shared.clear()
        self._decodes.clear()
        self._writers.clear()
        self._scans.clear()

    def watch(self) -> None:
        """Record the attention mass of this step's tokens on each page from now on.

        `KV.sparsify` chooses tokens by it. It costs a copy of `[layers, rows, pages, heads]`
        numbers from the device at the end of the step.
        """
        self._watch = self._watch or MassWatch()
        self._decodes.clear()

    def _watched(self, layer: int, group: int, batch: Ragged) -> torch.Tensor | None:
        if self._watch is None or self.groups[group].kind != "full":
            return None
        return self._watch.mass(layer, batch, self.groups[group], self.planner.page_size)

    def check(self) -> None:
        """Check that all layers were written, and all loaded pages arrived.

        Raises:
            StateError: The step has token ids, and the model left layers out, or continued though
                pages did not arrive, so that its results are wrong. The step is rolled back.
        """
        given = self.tokens is not None and self.tokens.numel()
        missed = self.planner.layers - self._touched if given else ()
        if missed:
            self.rollback()
            raise StateError(
                f"the model gave no keys and values for layers {sorted(missed)} of a step",
                "Call flowkv.attention(..., layer=i), or scaled_dot_product_attention with "
                "is_causal=True inside flowkv.intercept(), in every layer of the geometry",
            )
        if self._coming:
            self._refuse_absent()

    def commit(self) -> None:
        """Commit the new tokens: advance lengths, and publish full pages.

        Raises:
            StateError: See `check`.
        """
        if not self._open:
            return
        self.check()
        with self.planner.guard:
            self._open = False
            self.planner.commit(self.seqs, self.advance, told=self._told)
            if self.vouched:
                for seq, length in zip(self.seqs, self.advance.after.tolist(), strict=True):
                    seq.vouched = length
            long = self.advance.most_new >= self.planner.page_size
            if (long or self._coming) and not self.audits:
                self._measure(long)
        if self._watch is not None:
            self._watch.add_mass(self.seqs, self.groups, self.advance)

    def _refuse_absent(self) -> None:
        """Refuse results computed over pages that are not loaded.

        Raises:
            StateError: Pages are missing in a step with token ids. The step is rolled back.
        """
        absent = [seq for seq in self._coming if seq.restoration and seq.restoration.lacks]
        if absent and self.tokens is not None and self.tokens.numel():
            self.rollback()
            raise StateError(
                "a step went on over pages that did not come",
                "Let flowkv.cache.restore.Late pass, or fill what is missing",
            )
        for seq in absent:
            seq.publishable = False

    def rollback(self) -> None:
        """Roll the step back: lengths, tokens and pages are as before it."""
        with self.planner.guard:
            if self._open:
                self._open = False
                self.planner.undo(self.advance)
                for seq, known in self._noted:
                    seq.forget_tokens(known)

    def _measure(self, long: bool) -> None:
        """Record the time of a prompt or a front. Callers hold the KV lock.

        Args:
            long: Whether its rate is that of a prompt; decode steps do not measure that.
        """
        now, before, after = time.perf_counter(), self.advance.before, self.advance.after
        counted_s = compiling.measured_s(self._started_s, now)
        seconds = counted_s - self._waited_s
        tokens = max(1, int(self.advance.starts[-1]))
        middle = float((after - before) @ (before + after)) / (2 * tokens) if long else None
        host_s = (now - self._started_s) / tokens
        fronts = [
            seq.restoration.computed(first, stop, self._started_s, host_s)
            for seq, first, stop in zip(self.seqs, before.tolist(), after.tolist(), strict=True)
            if first < stop and seq.restoration is not None and not seq.restoration.settled
        ]
        if not (long or fronts):
            return
        if self._timer is None:
            self.planner.measure(tokens, seconds, middle, fronts)
        elif self._waited_s <= compiling.MOST_SHARE * counted_s and counted_s:
            # A device computes while the host waits: of a longer wait, its share is not known.
            idle_s = now - self._started_s - seconds
            self.planner.measure_later(self._timer, tokens, idle_s, middle, fronts)
        else:
            self.planner.measure(tokens, 0.0, middle, fronts)

    @interrupts.unbroken
    def __del__(self) -> None:
        if getattr(self, "_open", False):  # unset if an interrupt came during `__init__`
            self.planner.guard.defer(self.rollback)

    @interrupts.unbroken
    def __enter__(self) -> Step:
        self._token = CURRENT.set(weakref.ref(self))
        return self

    @interrupts.unbroken
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._token is not None:
            with suppress(ValueError):  # a generator may be closed in another context
                CURRENT.reset(self._token)
            self._token = None
        if kind is None:
            self.commit()
        else:
            self.rollback()


def writer(step: Step, group: int) -> Any:
    """Return the prepared decode that writes a group's new tokens; None if it cannot serve.

    Its `append` takes tensors of the packed tokens, or of a single row.
    """
    if step.advance.most_new == 1:
        return step.decode(group)
    if group not in step._writers:
        first = step.planner.pages(step.groups[group].layers[0])
        step._writers[group] = kernels.prepare_decode(first, step.batch(group), None)
    return step._writers[group]
