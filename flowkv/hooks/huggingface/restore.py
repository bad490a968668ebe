"""Prefixes of a batch that are being restored while the model runs (DESIGN D14).

Before the first forward of a generation, nested forwards compute prefix chunks from the front while
loads arrive from the back, until both have met. Then the user's own forward runs; each layer of it
waits for that layer of the pages. Pages that fail to load are computed in nested forwards.
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
from flowkv.cache.kv import KV, count_tokens
from flowkv.cache.restore import Late, RestoreJob, RestorePhase
from flowkv.cache.sequence import Sequence
from flowkv.core.errors import CapacityError, StateError
from flowkv.hooks.huggingface.cache import PagedCache, readable
from flowkv.hooks.huggingface.inputs import Fill, ForwardCall, Prompt
from flowkv.hooks.huggingface.rows import apart, close_all, closed_on_error, same_encoding
from flowkv.hooks.huggingface.versions import DynamicCache, EncoderDecoderCache

# `admit` opens one sequence per row of a batch so that all rows begin at the same column.

_ROUNDS = 3
NOTHING: Mapping[str, Any] = MappingProxyType({})
"""Retention options of a request that sets none."""


class AdmittedRows(NamedTuple):
    """Rows with their known prefixes in place, or being loaded.

    Attributes:
        seqs: One per row; rows of one prompt may share a sequence while its prefix is loaded.
        base: Columns that need no computing, the same for all rows.
        states: States of recurrent layers, one per row; None for models without.
    """

    seqs: list[Sequence]
    base: int
    states: list[Mapping[str, Any]] | None


class ReuseLimits(NamedTuple):
    """Limits of the prefixes that a batch may reuse.

    Attributes:
        most: Most columns.
        stateful: The model has recurrent layers: reuse only where all rows have a state.
        fill: The features that fill placeholders, which can be cut between runs only.
        care: `tenant`, `session`, `lease` and `retain` for `KV.open`, as far as they are set.
        wait: All pages are loaded before the rows are returned; otherwise `Restoring` does the
            rest.
    """

    most: int
    stateful: bool = False
    fill: Fill | None = None
    care: Mapping[str, Any] = NOTHING
    wait: bool = True


def admit(kv: KV, prompts: Items[Prompt], limits: ReuseLimits) -> AdmittedRows:
    """Open the rows of a batch with the longest past length, in columns, that all of them have.

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
            limit = base  # some pages behind `base` would be loaded in vain
        else:
            most = limit = cut if cut < base or limits.stateful else 0
        requests = discard(kv, seqs)
    return AdmittedRows(_open(kv, prompts, requests, (0, 0), limits), 0, None)


def _open(
    kv: KV, prompts: Items[Prompt], requests: Items[int], most: tuple[int, int], limits: ReuseLimits
) -> list[Sequence]:
    seqs: list[Sequence] = []
    slack = 0 if limits.stateful else kv.page_size - 1  # a row may be cut within a page
    most_columns, limit = most
    with closed_on_error(seqs):
        for row, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            tokens = min(most_columns, limit + slack) - prompt.pad
            seq = _shared(prompts, seqs, row)
            if seq is None:
                seq = kv.open(
                    prompt.tokens,
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
    return seqs


def _shared(prompts: Items[Prompt], seqs: Items[Sequence], row: int) -> Sequence | None:
    """Return the sequence of an earlier row of the same prompt if its prefix is being loaded."""
    tokens, *rest = prompts[row]
    for (known, *others), seq in zip(prompts, seqs, strict=False):
        if seq.restoration is not None and others == rest and np.array_equal(known, tokens):
            return seq
    return None


def reach(seq: Sequence) -> int:
    """Return the length of a sequence's known prefix, with the tokens that are being loaded."""
    coming = 0 if seq.restoration is None else seq.restoration.tokens
    return max(seq.length, coming)  # a saved state reaches further than its whole pages


def _align(
    kv: KV, prompts: Items[Prompt], seqs: list[Sequence], base: int, limits: ReuseLimits
) -> bool:
    """Cut every row to column `base`; False if a sliding window or a state does not allow it.

    A prefix that is being loaded is not cut, if it ends less than a page behind `base`.
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
            count_tokens(kv, 0, length - seq.reused)
            seq.reused = length
    return True


def discard(kv: KV, seqs: list[Sequence]) -> list[int]:
    """Close sequences that were opened in vain, and uncount them; return their requests."""
    requests = []
    for seq in seqs:
        requests.append(seq.request)
        seq.request = -1  # the request continues in another sequence
    own = list(dict.fromkeys(seqs))
    count_tokens(kv, -sum(len(seq.tokens) for seq in own), -sum(seq.reused for seq in own))
    close_all(own)
    seqs.clear()
    return requests


def abort(kv: KV, requests: Items[int]) -> None:
    """Notify the policies that requests have been aborted."""
    with kv.lock:
        for request in requests:
            kv.visits.abort(request)


# Nested forwards: the model runs over a few tokens of known prompts, inside its own forward.
#
# They write into the pages of the sequences themselves. Each nested forward sees a left padded
# rectangle of its own: rows that have computed different numbers of tokens end at one column, and
# a row that is further than the rectangle's first column keeps its tokens (`Rows.uneven`).


class Part(NamedTuple):
    """A span of one row that a nested forward computes.

    Attributes:
        row: The row of the batch that provides the other inputs.
        seq: The sequence that the span extends; its prompt goes on behind the span.
        pad: Padding columns of the row.
        count: Tokens of the span, behind those that the sequence holds; at least one.
    """

    row: int
    seq: Sequence
    pad: int
    count: int  # type: ignore[assignment]


class Nested:
    """Runner of a model over parts of prompts, with the arguments of the forward that needs them.

    Args:
        door: The door of the model, a `door.ForwardHook`; its hooks ignore nested forwards.
        call: The user's forward that needs the parts.
        types: Token types of the whole prompts, by name, if there are any.
        fill: The features that fill placeholders of the whole prompts.

    Attributes:
        kv: The cache.
        rows: Rows of the forward.
        fill: The features that fill placeholders of the whole prompts.
        cut: Prompts can be continued from any token: no layer keeps a recurrent state.
    """

    def __init__(
        self, door: Any, call: ForwardCall, types: Mapping[str, torch.Tensor], fill: Fill
    ) -> None:
        # The call itself is not kept: it refers to the cache, and the cache refers to this.
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
        own = {names.ids, names.mask, names.positions, names.cache, *call.fillers, *call.types}
        self._given = {name: value for name, value in call.given.items() if name not in own}
        for name, value in (("use_cache", True), ("logits_to_keep", 1)):
            if name in names.parameters:
                self._given[name] = value
        like = call.ids if call.ids is not None else call.given[names.embeds]
        self._device = like.device
        self._state: PagedCache | None = None

    def prove(self) -> None:
        """Read all weights of the model, so that computed pages are proven and may be stored."""
        self._door.proof.finish()

    def whole(self, part: Part) -> Part:
        """Extend a part to where its prompt can be cut, or to the end of the prompt."""
        seq, stop = part.seq, part.seq.length + part.count
        fitting = min(self.fill.whole(part.row, stop, self.kv.page_size), seq.known)
        return part._replace(count=fitting - seq.length)

    def compute(self, parts: Items[Part], awaits: Callable[[int], None] | None = None) -> None:
        """Compute the next tokens of some rows.

        Args:
            parts: At most one for each sequence.
            awaits: See `Step.awaits`.

        Raises:
            CapacityError: The pages do not fit.
        """
        # Models that make positions themselves count columns, so each row runs with its own
        # padding. Models count the features for placeholders, so known ones may not be shown.
        alone = not self.cut or self._plan.by_column or self.fill.inputs
        together = self._positions is not None and not alone
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
        rows.record_ids(inputs[self._names.ids], inputs.get(self._names.positions))
        rows.plan(new).awaits = awaits
        try:
            with self._door.aside(), torch.no_grad():
                self._model(**inputs)
        finally:
            rows.abandon()  # does nothing after a success: a hook has finished the step

    def _cache(self, seqs: list[Sequence], pads: list[int], base: int) -> PagedCache:
        if self._state is not None and self._state.rows.seqs == seqs:
            return self._state  # it holds the states of recurrent layers
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
                    f"{total - pad} tokens of a prompt of {part.seq.known} cannot be computed",
                    "Ask for no more tokens than the sequence knows",
                )
            line[total - base - len(known) :] = known
        given = _rows_of(self._given, [part.row for part in parts], self.rows)
        given[names.ids] = torch.from_numpy(ids).to(self._device)
        given.update(self._more(parts, pads, base, total))
        spans = {part.row: (part.seq.length, part.seq.length + part.count) for part in parts}
        given.update(self.fill.arguments(spans))
        paired = EncoderDecoderCache(cache, DynamicCache()) if self._paired else cache
        given[names.cache] = paired
        return given  # type: ignore[no-any-return]

    def _more(
        self, parts: list[Part], pads: list[int], base: int, total: int
    ) -> dict[str, torch.Tensor]:
        """Return mask, positions and token types of columns `[base, total)`."""
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
            rows, low = [], 0 if name in names.whole else base
            for part, pad in zip(parts, pads, strict=True):
                row = types[min(part.row, len(types) - 1), part.pad :]
                own = row[max(low - pad, 0) : total - pad]
                rows.append(torch.nn.functional.pad(own, (total - low - len(own), 0)))
            found[name] = torch.stack(rows)
        return found


def _rows_of(value: Any, rows: list[int], count: int) -> Any:
    """Select rows of the batch in an argument; tensors without a row dimension stay as they are."""
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
"""Tokens of a row that one nested forward computes where no policy decides."""


class _Coming(NamedTuple):
    """One prefix that is being restored.

    Attributes:
        part: Its row.
        restoration: The job that loads it.
        shared: Whether several rows have this prompt.
    """

    part: Part
    restoration: RestoreJob
    shared: bool


class Restoring:
    """Restorations of one batch, until the first forward behind them is over.

    Args:
        kv: The cache.
        seqs: One per row; rows of one prompt may share a sequence, until `meet` forks it.
        pads: Padding columns of each row.
        types: Token types of the whole prompts, by name.
    """

    def __init__(
        self, kv: KV, seqs: list[Sequence], pads: Items[int], types: Mapping[str, torch.Tensor]
    ) -> None:
        self._kv, self._seqs, self._pads, self.types = kv, seqs, list(pads), types
        self._coming: list[_Coming] = []
        for row, seq in enumerate(seqs):
            if seq not in seqs[:row] and (restoration := RestoreJob.of(seq)) is not None:
                part = Part(row, seq, pads[row], 0)
                self._coming.append(_Coming(part, restoration, seq in seqs[row + 1 :]))
        self._nested: Nested | None = None

    def __bool__(self) -> bool:
        return bool(self._coming)

    @property
    def cut(self) -> bool:
        """Return whether rows can be continued that hold less than should have been loaded."""
        return self._nested is None or self._nested.cut

    # ---- before the user's forward

    def restore(self, found: AdmittedRows, nested: Nested) -> AdmittedRows:
        """Run `meet` for rows before a forward that begins at the end of the restored prefix.

        Returns:
            The rows, each with a sequence of its own, and the columns that need no computing.
        """
        self.meet(nested, front=nested.cut)
        ends = [p + seq.length for p, seq in zip(self._pads, found.seqs, strict=True)]
        base = nested.fill.cut(min(ends), self._pads)
        return found._replace(base=base, states=found.states if base == found.base else None)

    def meet(self, nested: Nested, *, front: bool, columns: int = 0) -> None:
        """Compute prefix chunks while loads arrive, then leave the rest of them to the forward.

        Args:
            nested: Runner of the nested forwards.
            front: Chunks from the front can be computed; otherwise everything is loaded.
            columns: Columns that every row holds at the end, whatever could be loaded.
        """
        self._nested, times = nested, nested.rows // len(self._pads)
        self._coming = [  # rows may have been repeated, for beams
            one._replace(part=one.part._replace(row=one.part.row * times)) for one in self._coming
        ]
        with suppress(CapacityError):  # without room for the chunks, less of the prefix is restored
            while front and (wanted := self._wanted(nested)):
                nested.compute(wanted, self._pump)
        for one in self._coming:
            if not columns:
                one.restoration.meet()
            # If the caller knows the length of the rows, none may be longer.
            one.restoration.settle(columns - one.part.pad if columns else None)
        for one in self._coming:
            if one.shared:  # a sequence cannot be forked while its pages are loaded
                one.restoration.finish(ok=one.restoration.complete())
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
        """Return the next chunk of each row that holds fewer columns than `columns`."""
        lacks = [(one.part, columns - one.part.pad - one.part.seq.length) for one in self._coming]
        return [part._replace(count=min(left, CHUNK)) for part, left in lacks if left > 0]

    @property
    def _left(self) -> list[_Coming]:
        over = RestorePhase.OVER
        return [one for one in self._coming if one.restoration.phase is not over]

    def _pump(self, layer: int) -> None:
        for one in self._coming:
            one.restoration.pump()

    # ---- behind it

    def wait(self, layer: int) -> bool:
        """Wait until a layer of all pages is loaded; return whether computed pages replaced some.

        Raises:
            CapacityError: There is no room to compute pages that fail to load.
            Late: They cannot be computed either.
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
        """Wait until all pages are loaded or computed; False if some can be neither."""
        with suppress(CapacityError):
            for one in self._left:
                if not one.restoration.complete():
                    if self._nested is None:
                        return False
                    self._mend(one)
            return True
        return False

    def _mend(self, one: _Coming) -> None:
        """Compute a prefix that fails to load, in a new sequence, and take over its pages."""
        nested, seq, end = self._nested, one.part.seq, one.restoration.page_tokens
        assert nested is not None
        twin = self._kv.open(
            seq.tokens, tenant=seq.owner, salts=seq.salts, limit=end, reuse=nested.cut, wait=False
        )
        try:
            twin.publishable = seq.publishable
            if twin.restoration is not None:
                twin.restoration.cancel()
            while twin.length < end:
                rest = one.part._replace(seq=twin, count=min(CHUNK, end - twin.length))
                nested.compute([nested.whole(rest)], self._pump)
            one.restoration.fill(twin)
        finally:
            abort(self._kv, discard(self._kv, [twin]))

    def end_complete(self) -> bool:
        """Wait until all pages are loaded or computed; end all restorations if they are."""
        if not self.complete():
            return False
        self.finish(ok=True)
        apart(self._kv, self._seqs)
        return True

    def finish(self, *, ok: bool) -> None:
        """End all restorations after the forward, which was committed (`ok`) or not."""
        for one in self._coming:
            one.restoration.finish(ok=ok)


# Prompts longer than the pool: one forward writes the keys and values of all of its tokens, so the
# pool needs room for them.


def go_ahead(nested: Nested, found: AdmittedRows, pads: Items[int], columns: int) -> AdmittedRows:
    """Compute a long prompt chunk by chunk, until the rest of it fits.

    Args:
        nested: Runner of the nested forwards.
        found: The rows.
        pads: Padding columns of each row.
        columns: Columns of the prompt that may be computed before the forward.

    Returns:
        The rows, and the columns that need no computing any more.

    Raises:
        CapacityError: The pages of a chunk do not fit.
    """
    overflow = Planner.of(found.seqs[0]).overflow
    chunk, base = 0 if overflow is None else overflow.chunk(len(pads)), found.base
    while chunk and columns - base > chunk:
        parts = []
        for row, (seq, pad) in enumerate(zip(found.seqs, pads, strict=True)):
            if (count := base + chunk - pad - seq.length) > 0:
                part = nested.whole(Part(row, seq, pad, count))
                parts += [part] if pad + seq.length + part.count <= columns else []
        try:
            nested.compute(parts)
        except CapacityError:  # unproven pages may not be written to a disk
            nested.prove()
            nested.compute(parts)
        ends = [pad + seq.length for pad, seq in zip(pads, found.seqs, strict=True)]
        if (reached := nested.fill.cut(min(ends), list(pads))) <= base:
            break
        base = reached
    return found._replace(base=base)


# Audits of an attached model: sampled pages of its prompts are computed once more and compared.


def audit_rows(cache: PagedCache) -> None:
    """Audit the restored pages of a cache, once; wrong pages are forgotten and reported.

    Args:
        cache: A cache in no forward. Its `audits` holds the arguments of its first forward.
    """
    nested, cache.audits = cache.audits, None
    rows, kv = cache.rows, cache.rows.kv
    size = kv.page_size
    for row, (seq, pad) in enumerate(list(rows.padded)):
        for page in due(seq) if nested.cut else ():
            if not nested.fill.parts(row, page * size, (page + 1) * size):
                continue  # an image lies across the page's border: another sequence audits it
            with kv.auditor().audit(seq, page) as case:
                if case is not None:
                    with suppress(CapacityError):
                        nested.compute([Part(row, case.twin, pad, size)])
                    case.judge()


# Chunked prefill: a prompt that arrives in chunks is looked up again with every chunk.


def extend(cache: PagedCache, call: ForwardCall) -> dict[str, Any]:
    """Skip the known prefix of a further chunk; return the arguments that are left to compute.

    Args:
        cache: A cache into which only prompts were computed so far.
        call: The next chunk.
    """
    rows, kv = cache.rows, cache.rows.kv
    if not call.skippable or call.fillers or call.ids is None or call.rows != len(rows.seqs):
        return call.given
    rows.flush()
    if rows.blind or not rows.usual(call.columns, call.positions) or not rows.trusted(rows):
        return call.given
    end = rows.base + call.columns
    if not same_encoding(rows, end):
        return call.given
    try:
        asked = 0 if rows.thinning is None else rows.thinning.policy.queries
        most = end - max(call.keep, asked)
        limits = ReuseLimits(most, cache.plan.stateful, care=cache.care)
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
        count_tokens(kv, len(rows.seqs) * call.columns, 0)
        return call.given
    abort(kv, discard(kv, list(rows.seqs)))
    rows.seqs[:] = found.seqs
    rows.rebase(found.base)
    cache.load_states(found.states)
    cache.follow()
    return call.skip(gained)
