"""Prefixes of a batch that are still on their way while the model runs (DESIGN D14).

Before the first forward of a generation, nested forwards compute prefix chunks from the front while
loads arrive from the back, until both have met. Then the user's own forward runs; each layer of it
waits for that layer of the pages. What does not come is computed in nested forwards of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from flowkv.cache.audit import due
from flowkv.cache.block_table import Planner
from flowkv.cache.kv import KV
from flowkv.cache.restore import Late, RestoreJob
from flowkv.cache.sequence import Sequence
from flowkv.core.errors import CapacityError, StateError
from flowkv.hooks.huggingface.cache import PagedCache, readable
from flowkv.hooks.huggingface.inputs import Fill, ForwardCall, Prompt
from flowkv.hooks.huggingface.rows import apart, close_all
from flowkv.hooks.huggingface.versions import DynamicCache, EncoderDecoderCache

# Opens one sequence per row of a batch so that all rows begin at the same column.

_ROUNDS = 3
NOTHING: Mapping[str, Any] = MappingProxyType({})
"""A request says nothing about how its pages should be kept."""


class AdmittedRows(NamedTuple):
    """Rows with their known prefixes in place, or on their way.

    Attributes:
        seqs: One per row; rows of one prompt may share theirs while it is on its way.
        base: Columns that need no computing, the same for all rows.
        states: One per row, for recurrent layers; None without.
    """

    seqs: list[Sequence]
    base: int
    states: list[Mapping[str, Any]] | None


class ReuseLimits(NamedTuple):
    """Limits of what may be reused.

    Attributes:
        most: Most columns.
        tenant: Whose pages; None for the cache's own tenant.
        stateful: Recurrent layers: only where all rows have a state.
        fill: What fills placeholders, which cannot be cut anywhere.
        care: `session`, `lease` and `retain` for `KV.open`, as far as they are said.
        wait: Everything is there when the rows are; otherwise `restoring` sees to the rest.
    """

    most: int
    tenant: str | None = None
    stateful: bool = False
    fill: Fill | None = None
    care: Mapping[str, Any] = NOTHING
    wait: bool = True


def admit(kv: KV, prompts: Items[Prompt], limits: ReuseLimits) -> AdmittedRows:
    """Opens the rows. One past length serves the whole batch: the shortest known one, in columns.

    Raises:
        CapacityError: Too many sequences are open.
    """
    most, pads = limits.most, [prompt.pad for prompt in prompts]
    requests = [-1] * len(pads)
    if limits.stateful and any(pads):
        most = 0  # states of padded rows depend on the padding of their batch
    limit = most
    for _ in range(_ROUNDS):
        seqs = _open(kv, prompts, requests, (most, limit), limits)
        if not any(map(reach, seqs)):
            return AdmittedRows(seqs, 0, None)
        base = min(pad + reach(seq) for pad, seq in zip(pads, seqs, strict=True))
        cut = base if limits.fill is None else limits.fill.cut(base, pads)
        if cut == base and _align(kv, prompts, seqs, base, limits):
            if not limits.stateful:
                return AdmittedRows(seqs, base, None)
            states = [seq.state for seq in seqs if seq.state is not None]
            if len(states) == len(seqs) and all(map(readable, states)):
                return AdmittedRows(seqs, base, states)
            base = cut = 0
        if cut == base and not limits.wait and not limits.stateful:
            limit = base  # some are on their way that nobody needs
        else:
            most = limit = cut if cut < base or limits.stateful else 0
        requests = discard(kv, seqs)
    return AdmittedRows(_open(kv, prompts, requests, (0, 0), limits), 0, None)


def _open(
    kv: KV, prompts: Items[Prompt], requests: Items[int], most: tuple[int, int], limits: ReuseLimits
) -> list[Sequence]:
    seqs: list[Sequence] = []
    slack = 0 if limits.stateful else kv.page_size - 1  # a row is cut within a page, if need be
    most_columns, limit = most
    try:
        for row, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            tokens = min(most_columns, limit + slack) - prompt.pad
            seq = _shared(prompts, seqs, row)
            if seq is None:
                seq = kv.open(
                    prompt.tokens,
                    tenant=limits.tenant,
                    salts=prompt.salts,
                    limit=max(tokens, 0),
                    reuse=tokens > 0,
                    state=limits.stateful,
                    request=request,
                    wait=limits.wait,
                    **limits.care,
                )
            seqs.append(seq)
            limit = min(limit, prompt.pad + reach(seq))
    except BaseException:
        close_all(seqs)
        raise
    return seqs


def _shared(prompts: Items[Prompt], seqs: Items[Sequence], row: int) -> Sequence | None:
    """The sequence of an earlier row of the same prompt, of which something is on its way."""
    tokens, *rest = prompts[row]
    for (known, *others), seq in zip(prompts, seqs, strict=False):
        if seq.restoration is not None and others == rest and np.array_equal(known, tokens):
            return seq
    return None


def reach(seq: Sequence) -> int:
    """Where the known prefix of a sequence ends, once what is on its way is there."""
    coming = 0 if seq.restoration is None else seq.restoration.tokens
    return max(seq.length, coming)  # a saved state reaches further than its whole pages


def _align(
    kv: KV, prompts: Items[Prompt], seqs: list[Sequence], base: int, limits: ReuseLimits
) -> bool:
    """Cuts every row to column `base`; False if a sliding window or a state does not allow it.

    What is on its way is not cut: it may end within a page of the others.
    """
    for prompt, seq in zip(prompts, seqs, strict=True):
        length, end = max(base - prompt.pad, 0), reach(seq)
        if end > length and limits.stateful:
            return False
        if seq.restoration is not None:
            if end - length >= kv.page_size:
                return False
        elif end > length:
            try:
                kv.truncate(seq, length)
            except StateError:
                return False
            seq.note(prompt.tokens[length:])
            uncount(kv, 0, seq.reused - length)
            seq.reused = length
    return True


def discard(kv: KV, seqs: list[Sequence]) -> list[int]:
    """Closes sequences that were opened in vain, which do not count; returns their requests."""
    requests = []
    for seq in seqs:
        requests.append(seq.request)
        seq.request = -1  # it goes on in another sequence
    own = list(dict.fromkeys(seqs))
    uncount(kv, sum(len(seq.tokens) for seq in own), sum(seq.reused for seq in own))
    close_all(own)
    seqs.clear()
    return requests


def abort(kv: KV, requests: Items[int]) -> None:
    """Tells policies that requests do not go on."""
    with kv.lock:
        for request in requests:
            kv.visits.abort(request)


def uncount(kv: KV, seen: int, reused: int) -> None:
    """Takes tokens out of the statistics that were counted for the same request before."""
    with kv.lock:
        kv.seen_most = max(kv.seen_most, kv.tokens_seen)
        kv.reused_most = max(kv.reused_most, kv.tokens_reused)
        kv.tokens_seen -= seen
        kv.tokens_reused -= reused


# Nested forwards: the model runs over a few tokens of known prompts, inside its own forward.
#
# What is computed so goes into the pages of the sequences themselves. Each nested forward sees a
# left padded rectangle of its own: rows that have computed different numbers of tokens end at one
# column, and a row that is further than the rectangle's first column keeps what it has
# (`Rows.uneven`).


class Part(NamedTuple):
    """A span of one row that a nested forward computes.

    Attributes:
        row: The row of the batch whose inputs it shares.
        seq: Where it goes. Its tokens are known beyond what is computed here.
        pad: Padding columns of the row.
        count: Tokens behind those that the sequence holds; at least one.
    """

    row: int
    seq: Sequence
    pad: int
    count: int  # type: ignore[assignment]


class Nested:
    """Runs a model over parts of prompts with the arguments of the forward that needs them.

    Args:
        door: Whose model it is, a `door.ForwardHook`; its hooks let nested forwards pass.
        call: The forward that all of this is for.
        types: Token types of the whole prompts, by name, if there are any.
        fill: What fills placeholders of the whole prompts.

    Attributes:
        kv: Where the pages are.
        rows: Rows of the forward.
        fill: What fills placeholders of the whole prompts.
        cut: Prompts can be gone on with anywhere: no layer keeps a state of its own.
    """

    def __init__(
        self,
        door: Any,
        call: ForwardCall,
        types: Mapping[str, torch.Tensor],
        fill: Fill,
    ) -> None:
        # Not the call itself: its cache would be held by what the cache holds.
        self._door, self._model, self._plan, self._names = door, door.model, door.plan, call.names
        self.kv: KV = door.kv
        self.fill, self.rows, self.cut = fill, call.rows, not self._plan.stateful
        self._types = {
            name: value.repeat_interleave(max(call.rows // len(value), 1), 0)
            for name, value in types.items()
        }
        self._mask, self._positions = call.mask, call.positions
        whole = call.given.get(call.names.cache)
        self._paired = call.names.encoder or isinstance(whole, EncoderDecoderCache)
        names = call.names
        own = {names.ids, names.mask, names.positions, names.cache, *call.modal, *call.types}
        self._given = {name: value for name, value in call.given.items() if name not in own}
        for name, value in (("use_cache", True), ("logits_to_keep", 1)):
            if name in names.parameters:
                self._given[name] = value
        like = call.ids if call.ids is not None else call.given[names.embeds]
        self._device = like.device
        self._state: PagedCache | None = None

    def prove(self) -> None:
        """Reads the model's weights, so that what was computed may go where it outlives them."""
        self._door.proof.finish()

    def whole(self, part: Part) -> Part:
        """Extend a part to where its prompt can be cut, or to the end of the prompt."""
        seq, stop = part.seq, part.seq.length + part.count
        fitting = min(self.fill.whole(part.row, stop, self.kv.page_size), seq.known)
        return part._replace(count=fitting - seq.length)

    def compute(self, parts: Items[Part], awaits: Callable[[int], None] | None = None) -> None:
        """Computes the next tokens of some rows.

        Args:
            parts: At most one for each sequence.
            awaits: See `Step.awaits`.

        Raises:
            CapacityError: The pages do not fit.
        """
        # Models that make positions themselves count columns: each row keeps its own. What fills
        # placeholders is counted by models: none may be shown that are known already.
        together = self._positions is not None and self.cut and not self.fill.inputs
        for batch in [list(parts)] if together else [[part] for part in parts]:
            if batch:
                self._forward(batch, 0 if together else batch[0].pad, awaits)

    def _forward(self, parts: list[Part], pad: int, awaits: Callable[[int], None] | None) -> None:
        stops = [part.seq.length + part.count for part in parts]
        total, new = max(stops) + pad, max(part.count for part in parts)
        pads = [total - stop for stop in stops]
        cache = self._cache([part.seq for part in parts], pads, total - new)
        rows, inputs = cache.rows, self._inputs(parts, pads, (total - new, total), cache)
        rows.by_column = self._positions is None and any(pads)
        rows.note(inputs[self._names.ids], inputs.get(self._names.positions))
        rows.begin(new).awaits = awaits
        try:
            with self._door.aside(), torch.no_grad():
                self._model(**inputs)
        finally:
            rows.abandon()  # nothing, unless it failed: a hook has finished it

    def _cache(self, seqs: list[Sequence], pads: list[int], base: int) -> PagedCache:
        if self._state is not None and self._state.rows.seqs == seqs:
            return self._state  # recurrent layers go on in it
        rows = self._door.rows(seqs, pads, base)
        rows.uneven = True
        cache = PagedCache(rows, self._plan, self._door, owns=False)
        if not self.cut:
            self._state = cache
        return cache

    # ---- inputs

    def _inputs(
        self, parts: list[Part], pads: list[int], columns: tuple[int, int], cache: PagedCache
    ) -> dict[str, Any]:
        """Return the arguments for columns `[base, total)`.

        Raises:
            StateError: A part ends behind the known tokens of its prompt.
        """
        names, (base, total) = self._names, columns
        ids = np.zeros((len(parts), total - base), np.int64)
        for line, part, pad in zip(ids, parts, pads, strict=True):
            known = part.seq.tokens[max(base - pad, 0) : total - pad]
            if len(known) != total - max(base, pad):
                raise StateError(
                    f"{total - pad} tokens of a prompt of {part.seq.known} are to be computed",
                    "Ask for no more tokens than the sequence knows",
                )
            line[total - base - len(known) :] = known
        given = _rows_of(self._given, [part.row for part in parts], self.rows)
        given[names.ids] = torch.from_numpy(ids).to(self._device)
        given.update(self._more(parts, pads, base, total))
        spans = {part.row: (part.seq.length, part.seq.length + part.count) for part in parts}
        given.update(self.fill.of(spans))
        paired = EncoderDecoderCache(cache, DynamicCache()) if self._paired else cache
        given[names.cache] = paired
        return given  # type: ignore[no-any-return]

    def _more(
        self, parts: list[Part], pads: list[int], base: int, total: int
    ) -> dict[str, torch.Tensor]:
        """Mask, positions and token types of columns `[base, total)`."""
        names, mask, positions = self._names, self._mask, self._positions
        left, found = torch.tensor(pads, device="cpu")[:, None], {}
        if mask is not None or any(pads):
            seen = torch.arange(total, device="cpu") >= left
            found[names.mask] = seen.to(self._device, torch.int64 if mask is None else mask.dtype)
        if positions is not None:
            counted = (torch.arange(base, total, device="cpu") - left).clamp_min(0)
            shape = (*positions.shape[:-2], len(parts), total - base)
            counted = counted.to(positions.device, positions.dtype)
            found[names.positions] = counted.expand(shape).contiguous()
        for name, types in self._types.items():
            rows = []
            for part, pad in zip(parts, pads, strict=True):
                row = types[min(part.row, len(types) - 1), part.pad :]
                own = row[max(base - pad, 0) : total - pad]
                rows.append(torch.nn.functional.pad(own, (total - base - len(own), 0)))
            found[name] = torch.stack(rows)
        return found


def _rows_of(value: Any, rows: list[int], count: int) -> Any:
    """An argument with some rows of the batch only; tensors that count no rows as they are."""
    if rows == list(range(count)):
        return dict(value) if type(value) is dict else value
    if isinstance(value, torch.Tensor):
        return value[rows] if value.dim() and value.shape[0] == count else value
    if isinstance(value, Mapping):
        found = {key: _rows_of(item, rows, count) for key, item in value.items()}
        return found if type(value) is dict else type(value)(**found)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        return type(value)([_rows_of(item, rows, count) for item in value])
    return value


CHUNK = 512
"""Tokens of a row that one nested forward computes where no policy says how many."""


class _Coming:
    """One prefix on its way.

    Attributes:
        part: Its row.
        restoration: Brings it.
        shared: Several rows are of this prompt.
        front: Tokens that were computed, or there, when the rest was left to come.
        over: Nothing is waited for any more.
    """

    def __init__(self, part: Part, restoration: RestoreJob, *, shared: bool) -> None:
        self.part, self.restoration, self.shared = part, restoration, shared
        self.front, self.over = part.seq.length, False

    def finish(self, kv: KV, *, ok: bool) -> None:
        """Ends it; what came counts as reused."""
        self.restoration.finish(ok=ok)
        if not self.over:
            self.over = True
            came = max(0, self.restoration.tokens - self.front)
            if not self.restoration.tokens:
                came = -self.part.seq.reused  # a saved state was of no use, nor was its prefix
            self.part.seq.reused += came
            uncount(kv, 0, -came)


class Restoring:
    """The restorations of one batch, until the first forward behind them is over.

    Args:
        kv: The cache.
        seqs: One per row; rows of one prompt may share theirs, until `meet` takes them apart.
        pads: Padding columns of each row.
        types: Token types of the whole prompts, by name.
    """

    def __init__(
        self,
        kv: KV,
        seqs: list[Sequence],
        pads: Items[int],
        types: Mapping[str, torch.Tensor],
    ) -> None:
        self._kv, self._seqs, self._pads, self.types = kv, seqs, list(pads), types
        self._coming: list[_Coming] = []
        for row, seq in enumerate(seqs):
            if seq not in seqs[:row] and (restoration := RestoreJob.of(seq)) is not None:
                part = Part(row, seq, pads[row], 0)
                self._coming.append(_Coming(part, restoration, shared=seq in seqs[row + 1 :]))
        self._nested: Nested | None = None

    def __bool__(self) -> bool:
        return bool(self._coming)

    @property
    def cut(self) -> bool:
        """Whether rows that hold less than was to come can be gone on with."""
        return self._nested is None or self._nested.cut

    # ---- before the user's forward

    def restore(self, found: AdmittedRows, nested: Nested) -> AdmittedRows:
        """As `meet`, for rows whose forward may begin where that ends.

        Returns:
            The rows, each with a sequence of its own, and the columns that need no computing.
        """
        try:
            self.meet(nested, front=nested.cut)
            ends = [p + seq.length for p, seq in zip(self._pads, found.seqs, strict=True)]
            base = nested.fill.cut(min(ends), self._pads)
            return found._replace(base=base, states=found.states if base == found.base else None)
        except BaseException:
            close_all(found.seqs)
            raise

    def meet(self, nested: Nested, *, front: bool, columns: int = 0) -> None:
        """Computes prefix chunks while loads arrive, then lets the rest come behind the forward.

        Args:
            nested: Computes.
            front: Chunks from the front can be computed; otherwise everything is loaded.
            columns: Every row has so many in the end, whatever comes.
        """
        self._nested, times = nested, nested.rows // len(self._pads)
        for one in self._coming:  # rows may have been repeated, for beams
            one.part = one.part._replace(row=one.part.row * times)
        with suppress(CapacityError):  # what has no room to be computed is not restored
            while front and (wanted := self._wanted(nested)):
                nested.compute(wanted, self._pump)
        for one in self._coming:
            if columns:  # they were told: no row goes on behind them
                one.restoration.bound(columns - one.part.pad)
            else:
                one.restoration.meet()
            one.restoration.settle()
            one.front = one.restoration.front
        for one in self._coming:
            if one.shared:  # what is on its way cannot be forked
                one.finish(self._kv, ok=one.restoration.complete())
        while short := self._short(columns):
            nested.compute(short)
        apart(self._kv, self._seqs)

    def _wanted(self, nested: Nested) -> list[Part]:
        found = []
        for one in self._coming:
            if count := one.restoration.next():
                part = nested.whole(one.part._replace(count=count))
                if part.count < part.seq.known - part.seq.length:
                    found.append(part)
        return found

    def _short(self, columns: int) -> list[Part]:
        """What is missing of so many columns, a chunk of each row."""
        lacks = [(one.part, columns - one.part.pad - one.part.seq.length) for one in self._coming]
        return [part._replace(count=min(left, CHUNK)) for part, left in lacks if left > 0]

    @property
    def _left(self) -> list[_Coming]:
        return [one for one in self._coming if not one.over]

    def _pump(self, layer: int) -> None:
        for one in self._left:
            one.restoration.pump()

    # ---- behind it

    def wait(self, layer: int) -> bool:
        """Returns when a layer of all pages is there; True if other pages took the place of some.

        Raises:
            CapacityError: There is no room to compute what does not come.
            Late: It cannot be computed either.
        """
        mended = False
        for one in self._left:
            try:
                one.restoration.wait(layer)
            except Late:
                self._mend(one)
                one.restoration.wait(layer)
                mended = True
        return mended

    def complete(self) -> bool:
        """Returns when all of it is there, loaded or computed; False if that cannot be."""
        with suppress(CapacityError):
            for one in self._left:
                if not one.restoration.complete():
                    if self._nested is None:
                        return False
                    self._mend(one)
            return True
        return False

    def _mend(self, one: _Coming) -> None:
        """Computes what does not come in a sequence of its own, whose pages then take its place."""
        nested, seq, end = self._nested, one.part.seq, one.restoration.page_tokens
        assert nested is not None
        twin = self._kv.open(
            seq.tokens, tenant=seq.owner, salts=seq.salts, limit=end, reuse=nested.cut, wait=False
        )
        try:
            twin.publishable = seq.publishable
            if twin.restoration is not None:
                twin.restoration.cancel()
            one.front += max(0, end - twin.length)
            while twin.length < end:
                rest = one.part._replace(seq=twin, count=min(CHUNK, end - twin.length))
                nested.compute([nested.whole(rest)], self._pump)
            one.restoration.fill(twin)
        finally:
            abort(self._kv, discard(self._kv, [twin]))

    def finish(self, *, ok: bool) -> None:
        """The forward is over, and was committed or not: what came is kept."""
        for one in self._coming:
            one.finish(self._kv, ok=ok)


# Prompts longer than the pool: one forward writes keys and values of all of its tokens, for which
# there must be room.


def go_ahead(nested: Nested, found: AdmittedRows, pads: Items[int], columns: int) -> AdmittedRows:
    """Computes a long prompt chunk by chunk, until the rest of it fits.

    Args:
        nested: Computes.
        found: The rows.
        pads: Padding columns of each row.
        columns: Of the prompt that may be computed before the forward.

    Returns:
        The rows, and the columns that need no computing any more.

    Raises:
        CapacityError: The pages of a chunk do not fit.
    """
    overflow = Planner.of(found.seqs[0]).overflow
    chunk, base = 0 if overflow is None else overflow.chunk(len(pads)), found.base
    try:
        while chunk and columns - base > chunk:
            parts = []
            for row, (seq, pad) in enumerate(zip(found.seqs, pads, strict=True)):
                if (count := base + chunk - pad - seq.length) > 0:
                    part = nested.whole(Part(row, seq, pad, count))
                    parts += [part] if pad + seq.length + part.count <= columns else []
            try:
                nested.compute(parts)
            except CapacityError:  # what is not proven yet may not go to a disk
                nested.prove()
                nested.compute(parts)
            ends = [pad + seq.length for pad, seq in zip(pads, found.seqs, strict=True)]
            if (reached := nested.fill.cut(min(ends), list(pads))) <= base:
                break
            base = reached
    except BaseException:
        close_all(found.seqs)
        raise
    return found._replace(base=base)


# Audits of an attached model: sampled pages of its prompts are computed once more and compared.


def audit_rows(cache: PagedCache) -> None:
    """Audits what was restored for a cache, once; what is wrong is forgotten, and told.

    Args:
        cache: In no forward. Its `audits` computes, with the arguments of its first forward.
    """
    nested, cache.audits = cache.audits, None
    rows, kv = cache.rows, cache.rows.kv
    size = kv.page_size
    for row, (seq, pad) in enumerate(list(rows.padded)):
        for page in due(seq) if nested.cut else ():
            if not nested.fill.parts(row, page * size, (page + 1) * size):
                continue  # an image lies across its border; it waits for another sequence
            with kv.auditor.audit(seq, page) as case:
                if case is not None:
                    with suppress(CapacityError):
                        nested.compute([Part(row, case.twin, pad, size)])
                    case.judge()


# Chunked prefill: a prompt that is shown bit by bit is looked up again with every bit.


def extend(cache: PagedCache, call: ForwardCall) -> dict[str, Any]:
    """Skips what is known of a further chunk; returns the arguments that are left to compute.

    Args:
        cache: A cache of which only prompts were computed so far.
        call: The next chunk.
    """
    rows, kv = cache.rows, cache.rows.kv
    if not call.skippable or call.ids is None or call.rows != len(rows.seqs):
        return call.given
    rows.flush()
    if rows.blind or not rows.usual(call.columns, call.positions) or not rows.trusted(rows):
        return call.given
    end = rows.base + call.columns
    if rows.switch is not None and end >= rows.switch:
        return call.given
    try:
        asked = 0 if rows.thinning is None else rows.thinning.policy.queries
        most = end - max(call.keep, asked)
        limits = ReuseLimits(most, cache.tenant, cache.plan.stateful, care=cache.care)
        ids = call.ids.cpu().numpy().astype(np.uint32)
        prompts = []  # each row's tokens so far with the chunk's
        for row, (seq, pad) in enumerate(rows.padded):
            parts = seq.tokens[: max(rows.base - pad, 0)], ids[row, max(pad - rows.base, 0) :]
            prompts.append(Prompt(np.concatenate(parts), pad, list(seq.salts)))
        found = admit(kv, prompts, limits)
    except CapacityError:
        return call.given
    gained = found.base - rows.base
    if gained <= 0:
        abort(kv, discard(kv, found.seqs))
        uncount(kv, -len(rows.seqs) * call.columns, 0)
        return call.given
    abort(kv, discard(kv, list(rows.seqs)))
    rows.seqs[:] = found.seqs
    rows.rebase(found.base)
    cache.restore(found.states)
    cache.follow()
    return call.skip(gained)
