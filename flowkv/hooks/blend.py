"""Reuse of cached documents behind another prefix than the one they were computed behind.

K and V of a document are stored behind the first token of any text, as an exact sequence of their
own. In a prompt with the document at any place, its keys are rotated to their new positions (by a
difference of positions, as RoPE allows), and a rule chooses tokens that are computed again at their
place, with attention to the true prefix. Tokens between documents are always computed. The result
is approximate: the sequence is private from there on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv import kernels
from flowkv.cache.block_table import Planner
from flowkv.cache.kv import KV, count_tokens, plan
from flowkv.cache.sequence import Sequence
from flowkv.cache.step import CURRENT, Step
from flowkv.core.errors import StateError
from flowkv.core.keys import as_tokens
from flowkv.kernels.operands import Ragged
from flowkv.policy.blend import BlendRule

__all__ = ["Blender", "KeyTurn"]

Tokens = NDArray[np.uint32]
LEAST_TOKENS = 32
"""Least tokens of a document that is looked for; shorter ones are computed."""
_CHUNK = 512
Advance = Callable[[Sequence, int], object]
"""Function that computes so many next tokens of a sequence."""


class KeyTurn(NamedTuple):
    """Rotation of a layer's keys by their position: RoPE, see `kernels.Rotary`.

    Attributes:
        inv_freq: Inverse frequencies, float64 `[R/2]`.
        interleaved: Whether the two dims of a pair are neighbours.
        start: First of the R rotated dims.
    """

    inv_freq: NDArray[np.float64]
    interleaved: bool = False
    start: int = 0

    def angles(self, deltas: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 cos and sin `[N, 1, R/2]` for tokens that move by `deltas` positions."""
        angle = deltas.astype(np.float64)[:, None, None] * self.inv_freq
        return tuple(torch.from_numpy(f(angle).astype(np.float32)) for f in (np.cos, np.sin))  # type: ignore[return-value]

    def moved(self, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return keys `[N, Hk, D]`, rotated in float32 and rounded once."""
        half = cos.shape[-1]
        own = k[..., self.start : self.start + 2 * half]
        if self.interleaved:
            x, y = own[..., 0::2], own[..., 1::2]
        else:
            x, y = own[..., :half], own[..., half:]
        x, y = x.float(), y.float()
        turned = x * cos - y * sin, y * cos + x * sin
        out = k.clone()
        place = out[..., self.start : self.start + 2 * half]
        if self.interleaved:
            place[..., 0::2], place[..., 1::2] = turned[0], turned[1]
        else:
            place[..., :half], place[..., half:] = turned[0], turned[1]
        return out


class _Seen(Exception):
    """Signal that ends a forward after the layer it was needed for."""


class Rewrite:
    """Step that computes chosen tokens of an open step again; each attends to all before it.

    A packed model runs it like any other step.

    Args:
        step: A step of one row, with its new tokens in pages already.
        where: Places of the chosen new tokens, int64 `[n]`, ascending.
        until: Model layer after which the forward ends once its K and V are written, or None.
    """

    begins = fills = apart = False

    def __init__(self, step: Step, where: NDArray[np.int64], until: int | None = None) -> None:
        assert step.tokens is not None
        self.step = step
        self.counts, self._until = np.array([len(where)]), until
        self._where = torch.from_numpy(where)
        self.tokens = step.tokens[:, self._where]
        self.positions = step.positions[:, self._where]
        self.values: torch.Tensor | None = None
        self._batches: dict[int, Ragged] = {}

    def batch(self, group: int = 0) -> Ragged:
        """Return each run of consecutive tokens as a row that ends behind it."""
        if group not in self._batches:
            whole = self.step.batch(group)
            at = self.positions[0].numpy()
            firsts = np.flatnonzero(np.diff(at, prepend=-2) != 1)
            starts = np.append(firsts, len(at))
            ends = at[starts[1:] - 1] + 1
            table, rows = whole.table, whole.rows.expand(len(firsts)).contiguous()
            lengths, cuts = (
                torch.from_numpy(x.astype(np.int32)).to(table.device) for x in (ends, starts)
            )
            most_new, most_length = int(np.diff(starts).max()), int(ends[-1])
            self._batches[group] = Ragged(table, rows, lengths, cuts, most_new, most_length)
        return self._batches[group]

    def decode(self, group: int) -> None:
        """Do nothing: no decode is prepared."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the step, such as its layer groups and pages."""
        return getattr(self.step, name)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Overwrite K and V of the chosen tokens in pages."""
        planner = Planner.of(self.seqs[0])
        kernels.append(k, v, self.pages(layer), self.batch(planner.locate(layer)[0]))
        if layer == self._until:
            self.values = v
            raise _Seen

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        """Write K and V, and attend."""
        self.write(layer, k, v)
        return self.read(layer, q, **how)

    def read(self, layer: int, q: torch.Tensor, **how: Any) -> torch.Tensor:
        """Attend to all tokens before each chosen one."""
        batch = self.batch(Planner.of(self.seqs[0]).locate(layer)[0])
        found = kernels.paged_attention(q, self.pages(layer), batch, **how)
        return found  # type: ignore[return-value] # without return_lse it is one tensor


class FoundDocument(NamedTuple):
    """Known document in a prompt: `count` of its tokens, from the prompt's token `first` on."""

    first: int
    count: int  # type: ignore[assignment]
    document: Tokens


Forward = Callable[[Any, torch.Tensor], Any]
"""Runs a model over the tokens of a step, packed: (step, int64 places of requested logits)."""


class Blender:
    """Finder of documents in prompts that copies their cached pages. Thread-safe as `KV` is.

    Args:
        kv: The cache; all of its layers attend to the whole context.
        forward: Runs the model.
        turns: Rotation of each layer's keys.
        lead: The token in front of documents when they are computed.
        rule: Chooses the tokens that are computed again.
        compute: Computes a text for a tenant and publishes its pages; default by `KV.prefill` and
            packed forwards.

    Documents are found by their first `LEAST_TOKENS` tokens, and compared whole.
    """

    def __init__(
        self,
        kv: KV,
        forward: Forward,
        turns: Mapping[int, KeyTurn],
        lead: int,
        rule: BlendRule,
        compute: Callable[[Tokens, str | None], object] | None = None,
    ) -> None:
        self.kv, self.forward, self.turns, self.lead, self.rule = kv, forward, turns, lead, rule
        self._compute = compute or self._prefill
        self._known: dict[bytes, list[Tokens]] = {}

    def learn(self, documents: Items[Any], tenant: str | None = None) -> int:
        """Compute documents behind the first token of a text, unless their pages are cached.

        Args:
            documents: Token ids of each, without a first token of their own.
            tenant: Owner of the pages.

        Returns:
            Number of tokens that were computed.

        Raises:
            CapacityError: A document does not fit the pool.
            StateError: The pages of a document were not published.
            TokenError: A document has no valid token ids.
        """
        computed = 0
        for given in documents:
            document = as_tokens(given)
            if len(document) < LEAST_TOKENS:
                continue
            ids = self._stored(document)
            if missing := self._missing(ids, tenant):
                self._compute(ids, tenant)
                if self._missing(ids, tenant):
                    raise StateError(
                        f"a document of {len(document)} tokens was computed, but not published",
                        "Call model.eval(), outside of function and dispatch modes, and see that "
                        "the device pool holds it",
                    )
                computed += missing
            self.note(document)
        return computed

    def _missing(self, ids: Tokens, tenant: str | None) -> int:
        """Return the number of tokens that are not cached."""
        with self.kv.open(ids, tenant=tenant, limit=len(ids)) as seq:
            return len(ids) - seq.length

    def _prefill(self, ids: Tokens, tenant: str | None) -> None:
        with self.kv.open(ids, tenant=tenant) as seq, torch.no_grad():
            for step in self.kv.prefill([seq]):
                self.forward(step, torch.tensor([int(step.counts[0]) - 1]))

    def unlearn(self, tokens: Any, tenant: str | None) -> int:
        """Erase a document with these tokens, if there is one, and stop looking for it.

        Returns:
            Number of erased blocks.
        """
        document = as_tokens(tokens)
        near = self._known.get(document[:LEAST_TOKENS].tobytes(), [])
        for place, one in enumerate(near):
            if np.array_equal(one, document):
                del near[place]
                return self.kv.forget(self._stored(document), tenant=tenant)
        return 0

    def note(self, document: Tokens) -> None:
        """Look for a document from now on."""
        near = self._known.setdefault(document[:LEAST_TOKENS].tobytes(), [])
        if not any(np.array_equal(document, one) for one in near):
            near.append(document)
            near.sort(key=len, reverse=True)  # the longest that fits is taken

    def adopt(self, former: Blender) -> None:
        """Take over the documents of the blender before this one."""
        self._known = former._known

    def _stored(self, document: Tokens) -> Tokens:
        """Return a document behind the lead token, padded to whole pages: only those are cached.

        Tokens behind a document do not change its K and V. With whole pages, a document of any
        length is found whole, for at most a page more; to copy its tail would cost as much.
        """
        size = self.kv.page_size
        whole = np.full(-(-(1 + len(document)) // size) * size, self.lead, np.uint32)
        whole[1 : 1 + len(document)] = document
        return whole

    def find(
        self, tokens: Tokens, first: int = 0, without: Container[int] = ()
    ) -> list[FoundDocument]:
        """Find known documents in a prompt from token `first` on, the earliest and longest first.

        Args:
            tokens: The prompt; a document at its end may be cut off.
            first: First token of the search.
            without: Documents, by `id`, to leave out.
        """
        found: list[FoundDocument] = []
        at, last = first, len(tokens) - LEAST_TOKENS
        raw, width = tokens.tobytes(), tokens.itemsize
        while self._known and at <= last:
            near = self._known.get(raw[at * width : (at + LEAST_TOKENS) * width], ())
            left = tokens[at:] if near else tokens[:0]
            fits = (
                d
                for d in near
                if id(d) not in without and np.array_equal(left[: len(d)], d[: len(left)])
            )
            document = next(fits, None)
            if document is None:
                at += 1
                continue
            count = min(len(document), len(tokens) - at)
            found.append(FoundDocument(at, count, document))
            at += count
        return found

    def reach(self, seq: Sequence, most: int) -> int:
        """Return the tokens of a prompt up to the end of the last document that may be known."""
        places = self.find(seq.tokens[: max(most, 0)], seq.length)
        return places[-1].first + places[-1].count if places else seq.length

    def blend(self, seq: Sequence, most: int, advance: Advance | None = None) -> int:
        """Copy cached documents into a sequence's prompt, and recompute the tokens of the rule.

        Args:
            seq: A sequence outside any step, without loads on their way. Tokens before the first
                document are computed exactly, and published in whole pages; from there on the
                sequence is private.
            most: Most tokens of the prompt to fill.
            advance: Computes so many of its next tokens; default by packed forwards.

        Returns:
            Number of tokens that the sequence has grown by.

        Raises:
            CapacityError: There is no room; the sequence is exact as far as it goes.
        """
        before, size = seq.length, self.kv.page_size
        prompt, sources = seq.tokens[: max(most, 0)], dict[int, Sequence]()
        try:
            places = self._sources(seq, prompt, sources)
            if not places:
                return 0
            exact = places[0].first // size * size - before
            if exact > 0:
                (advance or self._advance)(seq, exact)
            return seq.length - before + self._blend(seq, places, sources)
        finally:
            for source in sources.values():
                source.close()

    def _sources(
        self, seq: Sequence, prompt: Tokens, sources: dict[int, Sequence]
    ) -> list[FoundDocument]:
        """Return the documents of a prompt that are cached whole for its model and tenant.

        Args:
            seq: The sequence.
            prompt: Its tokens that may be filled.
            sources: Receives the open sequence of each document, by the document's `id`.
        """
        unknown = set[int]()
        while places := self.find(prompt, seq.length, unknown):
            for document in {id(place.document): place.document for place in places}.values():
                if id(document) in sources:
                    continue
                ids = self._stored(document)
                source = self.kv.open(ids, tenant=seq.owner, salts=seq.salts, limit=len(ids))
                count_tokens(self.kv, -len(ids), -source.reused)  # tokens of one prompt count once
                if source.length < len(ids):  # it may hide a shorter document that is cached
                    unknown.add(id(document))
                    source.close()
                else:
                    sources[id(document)] = source
            if all(id(place.document) in sources for place in places):
                return places
        return []

    def _advance(self, seq: Sequence, count: int) -> None:
        end = seq.length + count
        while seq.length < end:
            part = seq.tokens[seq.length : min(end, seq.length + _CHUNK)]
            with self.kv.step([seq], [part]) as step, torch.no_grad():
                self.forward(step, torch.tensor([len(part) - 1]))

    def _blend(
        self, seq: Sequence, places: list[FoundDocument], sources: Mapping[int, Sequence]
    ) -> int:
        start, end = seq.length, places[-1].first + places[-1].count
        count, taken = end - start, np.zeros(end - start, np.bool_)
        for place in places:
            taken[place.first - start : place.first - start + place.count] = True
        publishable, seq.publishable = seq.publishable, False
        try:
            with torch.no_grad(), plan(self.kv, [seq], [count]) as step:
                step.audits = True  # its time is no measure of computing prompts
                step.give(seq.tokens[start:end])
                old = self._put(step, places, sources, start)
                deviation = self._deviation(step, old, taken) if self.rule.looks else None
                chosen = self.rule.chosen([place.count for place in places], deviation)
                again = ~taken
                again[taken] = chosen
                if again.any():
                    self._run(Rewrite(step, np.flatnonzero(again)))
        except BaseException:
            seq.publishable = publishable
            raise
        seq.fidelity = max(seq.fidelity, *(source.fidelity for source in sources.values()))
        with self.kv.lock:
            self.kv.blended["documents"] += len(places)
            self.kv.blended["taken_tokens"] += int(count - again.sum())
            self.kv.blended["computed_tokens"] += int(again.sum())
        return count

    def _run(self, rewrite: Rewrite) -> None:
        before = CURRENT.set(rewrite)  # type: ignore[arg-type] # has all that models use
        try:
            self.forward(rewrite, torch.tensor([rewrite.counts[0] - 1]))
        finally:
            CURRENT.reset(before)

    @property
    def _second(self) -> int:
        """Return the model's second layer with keys and values."""
        return sorted(self.turns)[:2][-1]

    def _put(
        self,
        step: Step,
        places: list[FoundDocument],
        sources: Mapping[int, Sequence],
        start: int,
    ) -> torch.Tensor:
        """Write rotated K and V of documents; return the second layer's values, else zeros."""
        planner, count = Planner.of(step.seqs[0]), int(step.counts[0])
        # A document at several places is read once, up to the longest of them.
        counts = dict.fromkeys(sources, 0)
        for place in places:
            counts[id(place.document)] = max(counts[id(place.document)], place.count)
        lines, widest = list(sources), max(counts.values())
        reading = Step(planner, list(sources.values()), np.zeros(len(sources), np.int64))
        # By new token: its place in all tokens read, -1 for none, and how far it moves.
        source, deltas = np.full(count, -1), np.zeros(count, np.int64)
        for place in places:
            row, held = lines.index(id(place.document)), counts[id(place.document)]
            own = slice(place.first - start, place.first - start + place.count)
            source[own] = (row + 1) * widest - held + np.arange(place.count)
            deltas[own] = place.first - 1  # in its own sequence the lead is at 0
        at = torch.from_numpy(np.flatnonzero(source >= 0))
        taken, moved = torch.from_numpy(source)[at], deltas[at.numpy()]
        shown = torch.tensor([1 + counts[line] for line in lines], dtype=torch.int32)
        angles: dict[int, Any] = {}
        values: torch.Tensor | None = None
        try:
            for layer, turn in self.turns.items():
                pages = reading.pages(layer)
                batch = reading.batch(planner.locate(layer)[0])
                device = batch.table.device
                batch = batch._replace(lengths=shown.to(device), most_length=1 + widest)
                if id(turn) not in angles:
                    angles[id(turn)] = [x.to(device) for x in turn.angles(moved)]
                dense = kernels.gather_dense(pages, batch, widest)
                k, v = (x.transpose(1, 2).flatten(0, 1)[taken.to(device)] for x in dense)
                k = turn.moved(k, *angles[id(turn)])
                put = []
                for x in (k, v):
                    whole = x.new_zeros(count, *x.shape[1:])
                    whole[at.to(device)] = x
                    put.append(whole)
                step.write(layer, *put)
                if layer == self._second:
                    values = put[1]
        finally:
            reading.rollback()
        assert values is not None
        return values

    def _deviation(
        self, step: Step, old: torch.Tensor, taken: NDArray[np.bool_]
    ) -> NDArray[np.floating]:
        """Return the squared difference of each token's second-layer values from the exact ones."""
        look = Rewrite(step, np.arange(len(taken)), until=self._second)
        with contextlib.suppress(_Seen):
            self._run(look)
        assert look.values is not None
        far = (look.values.float() - old.float()).square().sum((1, 2))
        return far.cpu().numpy()[taken]
