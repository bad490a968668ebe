"""The sequences behind one cache, one per batch row, and the step they are in.

transformers sees a batch as columns: a left-padded rectangle in which every row has the same past
length. Pages hold rows without their padding, so column c of a row is token `c - pad`. `Rows`
translates, and records the token ids that were computed, so that full pages can be published.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from operator import attrgetter
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache.block_table import Planner
from flowkv.cache.kv import KV, count_tokens, plan
from flowkv.cache.sequence import Sequence
from flowkv.cache.step import Step
from flowkv.core.errors import StateError
from flowkv.hooks.huggingface.inputs import ForwardCall, read_notes, usual
from flowkv.hooks.huggingface.versions import EncoderDecoderCache
from flowkv.kernels.operands import Later, Pages, Ragged, sent

_CLOSED = attrgetter("closed")

# The sequences of a batch.


def close_all(seqs: list[Sequence]) -> None:
    """Close all sequences and clear the list."""
    for seq in seqs:
        seq.close()
    seqs.clear()


@contextmanager
def closed_on_error(seqs: list[Sequence]) -> Iterator[None]:
    """Close sequences if the block fails: nothing else refers to them yet."""
    try:
        yield
    except BaseException:
        close_all(seqs)
        raise


def exclusive(cache: Any) -> AbstractContextManager[Any]:
    """Keep operations of other threads off a cache, which need not be paged, between forwards."""
    rows: Rows | None = getattr(cache, "rows", None)
    if rows is None or rows.pid != os.getpid():  # the holder does not exist in a forked process
        return nullcontext()
    return rows.turn


def apart(kv: KV, seqs: list[Sequence]) -> None:
    """Replace repeated sequences in the list by forks, so that every row has its own."""
    taken = set[int]()
    for row, seq in enumerate(seqs):
        if id(seq) in taken:
            seqs[row] = kv.fork(seq)
            count_tokens(kv, len(seq.tokens), seq.reused)
        taken.add(id(seq))


class Rows:
    """Rows of one Hugging Face cache.

    The cache and its layers refer to the rows; the rows refer to neither, so that a cache is
    released with its last reference.

    Attributes:
        kv: Cache that holds the pages.
        seqs: One sequence per row; mutated in place, finalizers hold the list.
        base: Columns that are in the cache.
        total: Columns when the step is over.
        new: Columns of the step, T.
        step: The step under way, or None.
        updated: Layers that the step has reached.
        forwards: Finished forwards.
        wants_weights: The caller asked for attention weights, which pages do not give.
        blind: K and V depend on inputs that keys do not cover: no further page is published.
        shifts: Offset of each row's next positions from the usual ones.
        by_column: Positions count columns, padding included: the model was given none.
        prefilling: Every forward so far was as long as a page.
        noted: Columns with ids from forwards; pages behind them are not published.
        lengths: Lengths of a text at which positions are encoded as in these rows; None for any.
        uneven: Some rows may hold tokens behind `base`; the next forward leaves those alone.
        restoring: A `restore.Restoring`, until the first forward behind it is over, or None.
        pid: Process that made the rows.
        turn: Lock of what changes or reads the rows between forwards, see `exclusive`.
        lost: Columns that failed to load, and that the caller still counts on.
        views: By layer: the views of K and V that it passes to the model in the step.
        taken: The caller got K and V of a layer as tensors, and may write to them.
        thinning: A `thin.Thinning` until tokens are removed from the rows, or None.

    Args:
        kv: Cache that holds the pages.
        seqs: One sequence per row.
        pads: Padding columns of each row.
        base: Columns that are in the sequences.
        layers: Number of layers in a step.
        trusted: Returns whether the model of these rows is unchanged; called before pages are
            published.
    """

    # Slots instead of a dictionary stop walks through the attributes of a cache here.
    __slots__ = tuple(
        """kv seqs base layers trusted pid turn total new updated forwards step wants_weights blind
        by_column prefilling uneven lengths restoring lost pads shifts most_pad views
        _last taken thinning noted _index _notes _agrees _mask _one _left _known _next_full
        __weakref__""".split()
    )

    def __init__(
        self,
        kv: KV,
        seqs: Items[Sequence],
        pads: Items[int],
        base: int,
        *,
        layers: int,
        trusted: Callable[[Rows], bool],
    ) -> None:
        self.kv, self.seqs, self.base, self.layers = kv, list(seqs), base, layers
        self.trusted, self.pid, self.turn = trusted, os.getpid(), threading.RLock()
        self.total, self.new, self.updated = base, 0, 0
        self.forwards = 0
        self.step: Step | None = None
        self.wants_weights = self.blind = self.by_column = self.taken = False
        self.prefilling, self.uneven = True, False
        self.lengths: range | None = None
        self.restoring: Any = None
        self.thinning: Any = None
        self.lost = 0
        self.views: dict[int, Any] = {}
        self._last: Step | None = None
        self._index: torch.Tensor | None = None
        self._agrees: Later | None = None
        self._mask: Any = None
        self._notes: list[tuple[int, Later]] = []
        self.noted = base
        self.shifts = np.zeros(len(self.seqs), np.int64)
        self._pad(pads)

    def _pad(self, pads: Items[int] | NDArray[np.int64]) -> None:
        self.pads = np.asarray(pads, np.int64)
        self.most_pad = int(self.pads.max(initial=0))
        self._one = np.ones(len(self.seqs), np.int64)
        self._left: torch.Tensor | None = None
        self._look()

    def _look(self) -> None:
        """Compute the next columns at which pages fill or known prompts end."""
        size = self.kv.page_size
        self._known = max((len(seq.tokens) + pad for seq, pad in self.padded), default=0)
        filled = (self.base - self.pads).clip(0) // size * size
        self._next_full = int((self.pads + filled + size).min(initial=1 << 62))

    @property
    def padded(self) -> Iterator[tuple[Sequence, int]]:
        """Pairs of each row's sequence and number of padding columns."""
        return zip(self.seqs, self.pads.tolist(), strict=True)

    # ---- a step

    def plan(self, new: int) -> Step:
        """Plan the next forward, over `new` columns.

        Args:
            new: Columns of the forward.

        Returns:
            Step of the forward.

        Raises:
            CapacityError: The pages do not fit; the rows are as before.
            StateError: Tokens before the forward are missing.
        """
        if self.step is not None:
            self.abandon()
        total = self.base + new
        if self.lengths is not None and not same_encoding(self, total):
            self.disable_publishing()
        if self.base >= self.most_pad and not self.uneven:
            counts, ragged = self._one if new == 1 else self._one * new, False
        else:
            counts = total - self.pads - self._lengths()
            if (counts > new).any():
                raise StateError("tokens before the forward are missing", "Start a new generation")
            counts, ragged = counts.clip(0, new), bool((counts < new).any())
        last, self._last = self._last if self.restoring is None else None, None
        self.step = step = plan(self.kv, self.seqs, counts, last)
        if self.restoring is not None:
            step.awaits = self._await
        self.new, self.total, self.updated = new, total, 0
        self._index = None
        if ragged:  # indices of the real tokens among all columns
            real = np.arange(new) >= new - counts[:, None]
            self._index = torch.from_numpy(np.flatnonzero(real))
        return step

    def _await(self, layer: int) -> None:
        if self.restoring is not None and self.restoring.wait(layer) and self.step is not None:
            self.step.refresh()

    def _lengths(self) -> NDArray[np.int64]:
        return np.array([seq.length for seq in self.seqs], np.int64)

    def finish(self) -> None:
        """Commit the step of a finished forward, and publish full pages.

        Raises:
            StateError: Restored pages failed to load in layers that the forward left out; the step
                stays open.
        """
        step = self.step
        self.views.clear()  # views refer to layers
        if step is None:
            return
        if self._agrees is not None:
            self.agree()
        if self.restoring is not None and not self.restoring.complete():
            raise StateError("pages on their way to this cache did not come", "Try again")
        self.step = None
        full = self.total >= self._next_full
        if full and not self.blind:
            self.flush()
            # The keys of pages cover only the ids that forwards were given.
            given = step.tokens is not None or self.noted >= self.total
            if not self.blind:
                step.vouched = given and self.trusted(self)
                if not step.vouched:
                    self.disable_publishing()
        step.commit()
        self._last = step if self.new == 1 else None
        self.base, self.uneven = self.total, False
        if self.restoring is not None:
            self.restoring.finish(ok=True)
            self.restoring = None
        self.forwards += 1
        if full:
            self._look()

    def abandon(self) -> None:
        """Roll back the step of a forward that did not finish; the rows are as before it."""
        step, self.step, self._agrees = self.step, None, None
        self.views.clear()
        if step is not None:
            step.rollback()
            if self.thinning is not None:
                self.thinning.forget()
            self.total = self.base
            self._notes = [note for note in self._notes if note[0] < self.base]
            self.noted = min(self.noted, self.base)
            self.land(wait=False)

    def land(self, *, wait: bool = True) -> bool:
        """End the restore of the rows, if any; return False if columns are missing afterwards.

        Args:
            wait: Wait for loads under way. Otherwise they are cancelled.
        """
        restoring, self.restoring = self.restoring, None
        if restoring is None:
            return True
        restoring.finish(ok=wait and restoring.complete())
        apart(self.kv, self.seqs)
        base, held = self.base, (self._lengths() + self.pads).min(initial=self.base)
        self.rebase(int(held))
        self.lost += base - self.base
        if self.base != base and not restoring.cut:
            self.disable_publishing()  # the states of recurrent layers are ahead of the rows
        return self.base == base

    def arrive(self) -> None:
        """Wait until all pages of a restore are loaded, in a forward or between two.

        Raises:
            StateError: Some pages failed to load, or the process was forked.
        """
        if self.restoring is None:
            return
        if self.kv.inherited or not self.restoring.complete():
            raise StateError("pages on their way to this cache did not come", "Try again")
        if self.step is not None:
            self.step.refresh()

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Convert `[B, H, T, D]` into the kernels' `[N, H, D]`: row after row, without padding."""
        if self.new == 1 and self._index is None:
            return x.select(2, 0)
        batch, heads, new, dim = x.shape
        flat = x.transpose(1, 2).reshape(batch * new, heads, dim)
        return flat if self._index is None else flat[self._moved_index(x.device)]

    def unpack(self, y: torch.Tensor) -> torch.Tensor:
        """Convert the kernels' `[N, H, D]` into `[B, T, H, D]`, with zeros at padding."""
        shape = (len(self.seqs), self.new, *y.shape[1:])
        if self._index is None:
            return y.view(shape)
        out = y.new_zeros(shape[0] * shape[1], *y.shape[1:])
        out[self._moved_index(y.device)] = y
        return out.view(shape)

    def _moved_index(self, device: torch.device) -> torch.Tensor:
        assert self._index is not None
        self._index = sent(self._index, device)
        return self._index

    @contextmanager
    def reading(self, layer: int, group: int) -> Iterator[tuple[Pages, Ragged]]:
        """Yield pages and rows of the cache outside a step; no page moves inside the block."""
        self.land()
        step = Step(Planner.of(self.seqs[0]), self.seqs, self._one * 0)  # in a forked child, too
        try:
            batch = step.batch(group)
            if self.uneven:
                shown = torch.from_numpy((self.base - self.pads).clip(0))
                shown = shown.to(batch.lengths.device, batch.lengths.dtype)
                batch = batch._replace(lengths=shown)
            yield step.pages(layer), batch
        finally:
            step.rollback()

    # ---- token ids

    def record_ids(
        self, ids: torch.Tensor, positions: torch.Tensor | None, padded: torch.Tensor | None = None
    ) -> None:
        """Record the ids of the columns that begin at `base`; they are read when a page fills.

        Args:
            ids: `[B, T]`.
            positions: Positions passed to the model, `[..., T]`, or None.
            padded: Whether its mask is the rows' padding, from `compare`; read by `agree`.
        """
        if self.blind and padded is None:
            return
        later = Later(ids, positions, padded)
        self._agrees = later if padded is not None else None
        if not self.blind:
            self._notes.append((self.base, later))
            self.noted = self.base + ids.shape[1]
            if self.base < self._known:
                self.flush()  # the prompt is known ahead: compare the ids with it now
                self._look()

    def flush(self) -> None:
        """Append the recorded ids to the sequences; stop publishing if positions are unusual."""
        if not self._notes or self.blind:
            return
        notes, self._notes = self._notes, []
        places = self.pads, self.shifts
        low, ids, ordinary = read_notes(notes, *places, by_column=self.by_column)
        if not ordinary:
            self.disable_publishing()
            return
        for row, (seq, pad) in enumerate(self.padded):
            first = max(low - pad, 0)  # position of the first real token of these columns
            fresh = ids[row, max(pad - low, 0) :]
            if len(seq.tokens) < first:
                self.disable_publishing()
                return
            known = seq.tokens[first : first + len(fresh)]
            if not np.array_equal(known, fresh[: len(known)]):
                # The text differs from the prompt of the cache. Computed tokens stay valid.
                if first < seq.length:
                    self.disable_publishing()
                    return
                self.kv.truncate(seq, seq.length)
                seq.note(fresh[seq.length - first :])
            elif len(fresh) > len(known):
                seq.note(fresh[len(known) :])

    def usual(self, columns: int, positions: torch.Tensor | None) -> bool:
        """Return whether the positions of the next columns are the usual ones."""
        given = self.base, columns, positions, self.pads, self.shifts
        return usual(*given, by_column=self.by_column)

    def disable_publishing(self) -> None:
        """Publish no further pages: K and V depend on inputs that keys do not cover."""
        try:
            for seq in [] if self.blind or self.kv.inherited else self.seqs[:1]:
                Planner.of(seq).publish_pending()  # earlier pages may wait for their device
        finally:
            self.blind = True
            self._notes.clear()
            for seq in self.seqs:
                seq.publishable = False

    def agree(self) -> bool:
        """Return whether the recorded mask is the padding; stop publishing if not.

        Raises:
            StateError: It shows padding.
        """
        later, self._agrees = self._agrees, None
        same = None if later is None else later.result()[2]
        if same is None or bool(same.numpy()):
            return True
        self.disable_publishing()
        check_padding(self, self._mask)
        return False

    def padded_by(self, mask: torch.Tensor | None, columns: int) -> bool:
        """Return whether a 2D mask (1 = token) of `columns` columns is the rows' left padding.

        Raises:
            StateError: It shows padding.
        """
        same = bool(self.compare(mask, columns))
        if not same:
            check_padding(self, mask)
        return same

    def compare(self, mask: torch.Tensor | None, columns: int) -> torch.Tensor | bool:
        """Return the result of `padded_by`, as a tensor where the mask's device computes it."""
        if not isinstance(mask, torch.Tensor) or mask.shape != (len(self.seqs), columns):
            check_padding(self, mask)
            return mask is None
        self._mask = mask  # for `agree`
        left = self._left
        if left is None or left.shape[1] < columns or left.device != mask.device:
            every = torch.arange(2 * columns, device=mask.device)
            left = self._left = every >= sent(torch.from_numpy(self.pads), mask.device)[:, None]
        seen = mask if mask.dtype is torch.bool else mask != 0
        return (seen == left[:, :columns]).all()

    # ---- operations of generation

    @property
    def told(self) -> int:
        """Columns that the cache has reported to its caller."""
        return self.base + self.lost

    def rebase(self, base: int) -> None:
        """Set the columns of the cache, after its sequences were replaced."""
        self.base = self.total = base
        self.noted = min(self.noted, base)
        self._look()

    def crop(self, columns: int) -> None:
        """Remove the last `columns` of the reported columns, see `told`."""
        self.refuse_thinned("be cut")
        left = max(self.told - columns, 0)
        self.abandon()
        self.land()
        self.flush()
        if self.thinning is not None:
            self.thinning.forget()
        self.base = self.total = min(self.base, left)
        self.noted = min(self.noted, self.base)
        self.lost = left - self.base
        for seq, pad in self.padded:
            length = max(self.base - pad, 0)
            if length < seq.length or length < len(seq.tokens):
                self.kv.truncate(seq, length)
        self._pad(self.pads.clip(max=left))  # the next columns may be tokens of any row

    def thin(self, keep: Items[Items[NDArray[np.int32]]]) -> None:
        """Remove tokens from each row, see `KV.sparsify`; columns and positions stay as they are.

        Raises:
            CapacityError: The remaining tokens of a row do not fit beside it: it is as before.
        """
        self.abandon()
        self._last = None
        try:
            for seq, part in zip(self.seqs, keep, strict=True):
                self.kv.sparsify(seq, part)
        finally:
            if any(seq.dropped for seq in self.seqs):
                self.disable_publishing()

    def refuse_thinned(self, wish: str) -> None:
        """Check that no tokens were removed from the rows.

        Args:
            wish: The operation that needs all of them, for the message.

        Raises:
            StateError: Tokens were removed.
        """
        if any(seq.dropped for seq in self.seqs):
            raise StateError(
                f"a cache that lost tokens by sparsify= cannot {wish}",
                "Attach the model without sparsify= for this",
            )

    def select(self, indices: Items[int]) -> None:
        """Make row `indices[i]` the new row i; rows share pages until one of them writes."""
        self.abandon()
        if list(indices) == list(range(len(self.seqs))):
            return
        self.land()
        self.flush()
        old, taken = list(self.seqs), set[int]()
        fresh = self._forked(indices, taken)
        self.seqs[:] = fresh
        for index, seq in enumerate(old):
            if index not in taken:
                seq.publishable = False  # no look at the model for what beams drop in each step
                seq.close()
        self.shifts = self.shifts[list(indices)]
        self._pad([int(self.pads[index]) for index in indices])
        if self.thinning is not None:
            self.thinning.select(list(indices))

    def _forked(self, indices: Items[int], taken: set[int]) -> list[Sequence]:
        """Return the sequences of some rows, and forks of those in `taken`."""
        found: list[Sequence] = []
        try:
            for index in indices:
                seq = self.seqs[index]
                found.append(self.kv.fork(seq) if index in taken else seq)
                taken.add(index)
        except BaseException:
            close_all([seq for seq in found if seq not in self.seqs])
            raise
        return found

    def fork(self) -> Rows:
        """Return an independent copy, which shares pages until one of the two writes."""
        self.abandon()
        self.land()
        self.flush()
        every = range(len(self.seqs))
        seqs = self._forked(every, set(every))
        twin = copy(self)  # no ids are recorded, and no restore is under way
        twin.turn = threading.RLock()
        twin.seqs, twin._notes, twin._index, twin.wants_weights = seqs, [], None, False
        twin._agrees = None
        twin.views = {}
        twin.thinning = self.thinning and self.thinning.fork()
        return twin

    def alive(self) -> None:
        """Check that the pages of the rows can still be read.

        Raises:
            StateError: The KV is closed, or this process was forked in the middle of a change.
        """
        if self.kv.lock.torn:
            raise StateError(
                "this process was forked while another thread changed the KV behind this cache",
                "Start a new generation without it",
            )
        if self.kv.closed or not self.seqs or any(map(_CLOSED, self.seqs)):
            raise StateError("the KV behind this cache is closed", "Start a new generation")


def replace_all(rows: Rows, seqs: Items[Sequence], columns: int) -> None:
    """Go on at a column with other sequences, which lost tokens and are not published."""
    rows.abandon()
    rows.land()
    with closed_on_error(rows.seqs):  # an interrupt leaves no row at another column
        rows._last, old = None, list(rows.seqs)
        rows.seqs[:] = seqs
        close_all(old)
        rows.disable_publishing()
        rows.rebase(columns)


def same_encoding(rows: Rows, total: int) -> bool:
    """Return whether positions are still encoded as before once rows have `total` columns."""
    if rows.lengths is None:
        return True
    longest = total - int(rows.pads.min(initial=total))
    return total in rows.lengths and longest in rows.lengths


# The first forward of `generate`, and the part of the prompt that it passes again.
#
# It passes a mask by which it cuts off the columns of a filled cache.


def check_paired(call: ForwardCall) -> None:
    """Check that an encoder-decoder has a cache for each of its two kinds of attention.

    Raises:
        StateError: A single cache would mix the encoder's K and V with those of the tokens.
    """
    cache = call.given.get(call.names.cache)
    if call.names.encoder and not isinstance(cache, EncoderDecoderCache):
        raise StateError(
            "an encoder-decoder needs a cache of its cross attention beside the one of its tokens",
            f"Pass {call.names.cache}=EncoderDecoderCache(kv.cache(...), DynamicCache())",
        )


def without_known(rows: Rows, call: ForwardCall) -> tuple[ForwardCall, bool]:
    """Remove the columns from a forward that its cache holds already.

    Args:
        rows: Rows of the cache.
        call: The forward.

    Returns:
        The forward, and whether it was given the whole prompt.

    Raises:
        StateError: The cache lost columns that the tokens continue.
    """
    whole = _passed_again(rows, call)
    if rows.lost and not whole and not _noticed(rows, call):
        refuse_lost(rows)
    rows.lost = 0
    if whole:
        call = ForwardCall(call.names, call.skip(rows.base))
    return call, whole


def refuse_lost(rows: Rows) -> None:
    """Check that no reported column failed to load; raise once only, as the caller then knows.

    Raises:
        StateError: Some columns failed to load.
    """
    told, rows.lost = rows.told, 0
    if rows.base < told:
        raise StateError(
            f"this cache holds {rows.base} columns, not {told}: the others did not come "
            "and could not be computed",
            "Give the model all that is behind its get_seq_length(), as generate does",
        )


def _noticed(rows: Rows, call: ForwardCall) -> bool:
    """Return whether a forward surely continues the columns left, not all those reported."""
    mask, positions = call.mask, call.positions
    if _is_flat(mask):
        return mask.shape[1] == rows.base + call.columns
    if isinstance(positions, torch.Tensor):
        return rows.usual(call.columns, positions)
    if call.ids is None or len(call.ids) != len(rows.seqs):
        return False
    ids = call.ids.detach().cpu().numpy()
    return goes_on(rows, ids, rows.base) and not goes_on(rows, ids, rows.told)


def check_padding(rows: Rows, mask: Any) -> None:
    """Check that the mask of a forward hides the padding, of which pages hold no K and V.

    Raises:
        StateError: The mask shows padding.
    """
    if rows.most_pad and _shows(mask, np.arange(rows.most_pad) < rows.pads[:, None]):
        raise StateError(
            "the mask shows tokens that are padding to this cache",
            "Give the model a mask that hides them, as the forwards before or kv.cache(...) had",
        )


def _shows(mask: Any, padding: NDArray[np.bool_]) -> bool:
    """Return whether a mask, one of several or none, shows any of the padding `[B, n]`."""
    if isinstance(mask, Mapping):
        return any(_shows(part, padding) for part in mask.values())
    if not isinstance(mask, torch.Tensor):
        return mask is None
    seen = mask[..., : padding.shape[1]].cpu()
    if seen.dim() == 4:
        seen = (seen if seen.dtype is torch.bool else seen > -1e4).any(2).any(1)
    return bool((seen.bool().numpy() & padding[:, : seen.shape[-1]]).any())


def _passed_again(rows: Rows, call: ForwardCall) -> bool:
    """Return whether a cache's first forward repeats its prompt, instead of continuing it."""
    if rows.forwards or not rows.told or call.ids is None or call.problem:
        return False
    if len(call.ids) != len(rows.seqs) or _continues(rows, call):
        return False
    if not _is_flat(call.mask) and call.positions is None:
        return False  # decoders get only the columns that the cache does not hold
    ids = call.ids.detach().cpu().numpy()
    each = zip(ids, rows.padded, strict=True)
    return all(_begins(line, seq.tokens, pad) for line, (seq, pad) in each)


def _continues(rows: Rows, call: ForwardCall) -> bool:
    """Return whether mask or positions place the columns behind those in the cache."""
    mask, positions = call.mask, call.positions
    if _is_flat(mask):
        return mask.shape[1] in (rows.told + call.columns, rows.base + call.columns)
    if not isinstance(positions, torch.Tensor) or not positions.min():
        return False  # those of a prompt begin at 0, and may leave out some
    return int(positions.max()) >= call.columns


def _is_flat(mask: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether a mask is 2D, with a number per token."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2


def goes_on(rows: Rows, ids: NDArray[Any], base: int) -> bool:
    """Return whether tokens agree with the known ones from column `base` on."""
    return all(
        _alike(line[max(pad - base, 0) :], seq.tokens[max(base - pad, 0) :])
        for line, (seq, pad) in zip(ids, rows.padded, strict=True)
    )


def _begins(line: NDArray[Any], tokens: NDArray[np.uint32], pad: int) -> bool:
    return len(line) >= pad + len(tokens) > pad and _alike(line[pad:], tokens)


def _alike(some: NDArray[Any], others: NDArray[Any]) -> bool:
    """Return whether two lines of tokens agree up to the end of the shorter one."""
    count = min(len(some), len(others))
    return np.array_equal(some[:count], others[:count])
