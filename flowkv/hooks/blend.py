"""Reuse of cached documents behind another prefix than the one they were computed behind.

K and V of a document are stored behind the first token of any text, as an exact sequence of their
own. In a prompt with the document at any place, its keys are rotated to their new positions (by a
difference of positions, as RoPE allows), and a rule chooses tokens that are computed again at their
place, with attention to the true prefix. Tokens between documents are always computed. The result
is approximate: the sequence is private from there on.

An `EditBlender` reuses the cached pages of a text that was edited: spans removed, replaced, moved
or put in. Prompts and answers are remembered as token ids. Spans of a new prompt behind its exact
prefix are looked for in them at any offset, as rsync does: by hashes of all windows of the prompt,
against those of adjacent blocks of the known texts. Pages from the first such span on have keys of
their own: later turns of the edited text find them, exact prompts never do.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping
from collections.abc import Sequence as Items
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv import kernels
from flowkv.cache.block_table import Planner
from flowkv.cache.erasure import forget_prompt
from flowkv.cache.index import matching
from flowkv.cache.kv import KV, count_tokens, plan
from flowkv.cache.sequence import Sequence
from flowkv.cache.step import CURRENT, Step
from flowkv.core.errors import StateError
from flowkv.core.interrupts import Setting
from flowkv.core.keys import Salt, as_tokens
from flowkv.kernels.operands import Ragged
from flowkv.kvt.basis import KeyTurn
from flowkv.policy.blend import BlendRule

__all__ = ["Blender", "KeyTurn"]

Tokens = NDArray[np.uint32]
LEAST_TOKENS = 32
"""Least tokens of a document that is looked for; shorter ones are computed."""
MOST_TOKENS = 1 << 24
"""Most tokens of documents that are looked for; those learned longest ago are given up first."""
_CHUNK = 512
Advance = Callable[[Sequence, int], object]
"""Function that computes so many next tokens of a sequence."""


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


class FoundSpan(NamedTuple):
    """Tokens of a prompt with cached K and V, computed at other positions or behind other tokens.

    Attributes:
        first: First token of the prompt.
        count: Number of tokens.
        text: The document, or another cached text; sources are kept by its `id`.
        offset: Position of the first token in the cached sequence; a document's is 1.
        continued: The cached sequence begins as the prompt does: nothing is computed again.
    """

    first: int
    count: int  # type: ignore[assignment]
    text: Any
    offset: int = 1
    continued: bool = False


class TooFar(Exception):
    """Signal that a prompt would diverge by more than its limit."""


class Gauge:
    """Estimator of a blended prompt's divergence, from the values of the second layer.

    The estimate is proportional to the squared deviation of the values that are kept, over the
    squared values of the whole prompt. The factor is measured: the first `TRIALS` prompts, and one
    of `EVERY` later ones, are computed exactly and blended beside that.

    Args:
        most: Largest divergence in nats.
    """

    TRIALS, EVERY, TOKENS = 3, 64, 16

    def __init__(self, most: float) -> None:
        self._most, self._factors, self._seen = most, deque[float](maxlen=self.TRIALS), 0

    def due(self) -> bool:
        """Return whether the next prompt is a trial; counts it."""
        self._seen += 1
        return len(self._factors) < self.TRIALS or self._seen % self.EVERY == 0

    def take_trial(self, far: float, divergence: float) -> None:
        """Record the divergence, in nats, of a prompt with a deviation."""
        if far > 0:
            self._factors.append(max(divergence, 0.0) / far)

    def limit(self, far: float) -> None:
        """Raise `TooFar` if a prompt with a deviation is estimated to diverge by too much."""
        if len(self._factors) == self.TRIALS and far * max(tuple(self._factors)) > self._most:
            raise TooFar


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
        max_kl: Largest estimate of a prompt's divergence, in nats; above it the prompt is computed.

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
        max_kl: float | None = None,
    ) -> None:
        self.kv, self.forward, self.turns, self.lead, self.rule = kv, forward, turns, lead, rule
        self._compute = compute or self._prefill
        self._gauge = None if max_kl is None else Gauge(max_kl)
        self._known: dict[bytes, list[Tokens]] = {}  # those learned last come last

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
        """Erase a document with these tokens, also of a former process; stop looking for it.

        Returns:
            Number of erased blocks.
        """
        document = as_tokens(tokens)
        near = self._known.pop(document[:LEAST_TOKENS].tobytes(), [])
        for other in near:
            if not np.array_equal(other, document):
                self.note(other)
        with self.kv._probe(self._stored(document), tenant, ()) as seq:
            for one in self.kv._open.values():  # such as one that computes it
                same = one.tenant == seq.tenant and np.array_equal(one.tokens, seq.tokens)
                one.publishable &= not same
            return forget_prompt(Planner.of(seq).store, seq)

    def note(self, document: Tokens) -> None:
        """Look for a document from now on."""
        begin = document[:LEAST_TOKENS].tobytes()
        near = self._known[begin] = self._known.pop(begin, [])
        if not any(np.array_equal(document, one) for one in near):
            near.append(document)
            near.sort(key=len, reverse=True)  # the longest that fits is taken
            while sum(map(len, chain.from_iterable(self._known.values()))) > MOST_TOKENS:
                del self._known[next(iter(self._known))]

    def remember(self, seq: Sequence) -> None:
        """Take note of a sequence that ends: documents need none."""

    def forget(self, owner: str) -> int:
        """Forget the texts of a tenant; returns 0, as they are no blocks."""
        return 0

    def adopt(self, former: Any) -> None:
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

    def find(self, tokens: Tokens, first: int = 0, without: Container[int] = ()) -> list[FoundSpan]:
        """Find known documents in a prompt from token `first` on, the earliest and longest first.

        Args:
            tokens: The prompt; a document at its end may be cut off.
            first: First token of the search.
            without: Documents, by `id`, to leave out.
        """
        found: list[FoundSpan] = []
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
            found.append(FoundSpan(at, count, document))
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
            advance = advance or self._advance
            exact = places[0].first // size * size - before
            if exact > 0:
                advance(seq, exact)
            fresh = not all(place.continued for place in places)  # continued texts were judged
            if self._gauge is not None and fresh and self._gauge.due():
                self._try(seq, places, sources, advance)
            else:
                self._blend(seq, places, sources)
            return seq.length - before
        finally:
            for source in sources.values():
                source.close()

    def _sources(
        self, seq: Sequence, prompt: Tokens, sources: dict[int, Sequence]
    ) -> list[FoundSpan]:
        """Return the documents of a prompt that are cached whole for its model and tenant.

        Args:
            seq: The sequence.
            prompt: Its tokens that may be filled.
            sources: Receives the open sequence of each document, by the document's `id`.
        """
        unknown = set[int]()
        prompt = prompt[: min((salt.position for salt in seq.salts), default=len(prompt))]
        while places := self.find(prompt, seq.length, unknown):
            fresh = {id(one.text): one.text for one in places if id(one.text) not in sources}
            for document in fresh.values():
                ids = self._stored(document)
                source = self.kv.open(ids, tenant=seq.owner, limit=len(ids))
                count_tokens(self.kv, -len(ids), -source.reused)  # tokens of one prompt count once
                if source.length < len(ids):  # it may hide a shorter document that is cached
                    unknown.add(id(document))
                    source.close()
                else:
                    sources[id(document)] = source
            if all(id(place.text) in sources for place in places):
                return places
        return []

    def _advance(self, seq: Sequence, count: int) -> None:
        end = seq.length + count
        while seq.length < end:
            part = seq.tokens[seq.length : min(end, seq.length + _CHUNK)]
            with self.kv.step([seq], [part]) as step, torch.no_grad():
                self.forward(step, torch.tensor([len(part) - 1]))

    def separate(self, seq: Sequence, places: list[FoundSpan]) -> None:
        """Keep the pages from the first span on apart from exact ones: here by not publishing."""
        seq.publishable = False

    def _blend(
        self,
        seq: Sequence,
        places: list[FoundSpan],
        sources: Mapping[int, Sequence],
        *,
        trial: bool = False,
    ) -> float:
        """Fill the spans and the tokens between them; return their deviation, see `Gauge`."""
        start, end = seq.length, places[-1].first + places[-1].count
        count, taken = end - start, np.zeros(end - start, np.bool_)
        fresh = [place for place in places if not place.continued]
        for place in fresh:
            taken[place.first - start : place.first - start + place.count] = True
        again = np.ones(count, np.bool_)
        for place in places:
            again[place.first - start : place.first - start + place.count] = False
        before, far = (seq.publishable, seq.salts, seq.fidelity), 0.0
        Planner.of(seq).publish_pending()  # exact pages before the spans
        self.separate(seq, places)
        try:
            with torch.no_grad(), plan(self.kv, [seq], [count]) as step:
                step.audits = True  # its time is no measure of computing prompts
                step.give(seq.tokens[start:end])
                old = self._put(step, places, sources, start)
                deviation = None
                if fresh and (self.rule.looks or self._gauge is not None):
                    deviation = self._deviation(step, old, taken)
                if fresh:
                    chosen = self.rule.chosen([place.count for place in fresh], deviation)
                    again[taken] |= chosen
                if deviation is not None and self._gauge is not None:
                    scale = float(old.float().square().sum()) / max(int((~again).sum()), 1)
                    far = float(deviation[~chosen].sum()) / (max(scale, 1e-30) * end)
                    if not trial:
                        self._gauge.limit(far)
                if again.any():
                    self._run(Rewrite(step, np.flatnonzero(again)))
                # Before the commit, which publishes pages.
                lossiest = max(source.fidelity for source in sources.values())
                seq.fidelity = max(seq.fidelity, lossiest)
        except BaseException as error:
            seq.publishable, seq.fidelity = before[0], before[2]
            seq.replace_salts(before[1])
            if isinstance(error, TooFar):
                with self.kv.lock:
                    self.kv.blended["declined"] += 1
                return far
            raise
        if not trial:
            with self.kv.lock:
                self.kv.blended["documents"] += len(places)
                self.kv.blended["taken_tokens"] += int(count - again.sum())
                self.kv.blended["computed_tokens"] += int(again.sum())
        return far

    def _try(
        self,
        seq: Sequence,
        places: list[FoundSpan],
        sources: Mapping[int, Sequence],
        advance: Advance,
    ) -> None:
        """Compute a prompt exactly up to its last span, and measure the divergence of blending."""
        assert self._gauge is not None
        first, count = places[-1].first, places[-1].count
        end = min(first + count, len(seq.tokens) - Gauge.TOKENS)
        if end <= first:
            return  # too short a prompt to judge by
        behind = seq.tokens[end : end + Gauge.TOKENS]
        with self.kv.fork(seq) as twin:
            twin.publishable = False
            cut = [*places[:-1], places[-1]._replace(count=end - first)]
            far = self._blend(twin, cut, sources, trial=True)
            ours = self._logits(twin, behind)
        advance(seq, end - seq.length)
        with self.kv.fork(seq) as twin:
            true = self._logits(twin, behind)
        self._gauge.take_trial(far, float((true.exp() * (true - ours)).sum(-1).mean()))

    def _logits(self, seq: Sequence, tokens: Tokens) -> torch.Tensor:
        """Return the log-probabilities `[n, V]` behind each of the next tokens of a sequence."""
        seq.publishable = False
        with self.kv.step([seq], [tokens]) as step, torch.no_grad():
            found = self.forward(step, torch.arange(len(tokens)))
        return torch.log_softmax(found.double(), -1)

    def _run(self, rewrite: Rewrite) -> None:
        own: Any = weakref.ref(rewrite)  # which has all of a step that models use
        with Setting(CURRENT, own):
            self.forward(rewrite, torch.tensor([rewrite.counts[0] - 1]))

    @property
    def _second(self) -> int:
        """Return the model's second layer with keys and values."""
        return sorted(self.turns)[:2][-1]

    def _put(
        self, step: Step, places: list[FoundSpan], sources: Mapping[int, Sequence], start: int
    ) -> torch.Tensor:
        """Write rotated K and V of documents; return the second layer's values, else zeros."""
        planner, count = Planner.of(step.seqs[0]), int(step.counts[0])
        # Of each source, the tokens from its first span to the end of its last are read once.
        firsts, stops = dict[int, int](), dict[int, int]()
        for _, length, text, offset, _ in places:
            key = id(text)
            firsts[key] = min(offset, firsts.get(key, offset))
            stops[key] = max(offset + length, stops.get(key, 0))
        lines, widest = list(firsts), max(stops[key] - firsts[key] for key in firsts)
        reading = Step(planner, [sources[key] for key in lines], np.zeros(len(lines), np.int64))
        # By new token: its place in all tokens read, -1 for none, and how far it moves.
        source, deltas = np.full(count, -1), np.zeros(count, np.int64)
        for first, length, text, offset, _ in places:
            line = (lines.index(id(text)) + 1) * widest - stops[id(text)] + offset
            own = slice(first - start, first - start + length)
            source[own] = line + np.arange(length)
            deltas[own] = first - offset
        at = torch.from_numpy(np.flatnonzero(source >= 0))
        taken, moved = torch.from_numpy(source)[at], deltas[at.numpy()]
        shown = torch.tensor([stops[line] for line in lines], dtype=torch.int32)
        angles: dict[int, Any] = {}
        values: torch.Tensor | None = None
        try:
            for layer, turn in self.turns.items():
                pages = reading.pages(layer)
                batch = reading.batch(planner.locate(layer)[0])
                device = batch.table.device
                batch = batch._replace(lengths=shown.to(device), most_length=max(stops.values()))
                if id(turn) not in angles:
                    angles[id(turn)] = [x.to(device) for x in turn.angles(moved)]
                dense = kernels.gather_dense(pages, batch, widest)
                k, v = (x.transpose(1, 2).flatten(0, 1)[taken.to(device)] for x in dense)
                k = turn.moved(k, *angles[id(turn)])
                where = at.to(device)
                put = [x.new_zeros(count, *x.shape[1:]).index_copy_(0, where, x) for x in (k, v)]
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


_MOST_TOKENS = 1 << 20
"""Most token ids remembered, of all tenants; the tenants used longest ago lose texts first."""
_MOST_TEXTS = 512
"""Most texts remembered of a tenant."""
_TRIED, _KEPT = 8, 64
"""Most places that are tried for one window, and kept of equal blocks."""
_BASE = np.uint64(0x9E3779B97F4A7C15)


class KnownText(NamedTuple):
    """Prompt and answer that were computed, and the marks of the edited spans in them."""

    tokens: Tokens
    salts: tuple[Salt, ...]


def _hashes(tokens: Tokens, stride: int) -> list[int]:
    """Return the hashes of the windows of `LEAST_TOKENS` tokens that begin at each `stride`."""
    windows = max(len(tokens) - LEAST_TOKENS, -1) // stride + 1
    found = np.zeros(windows, np.uint64)
    for at in range(LEAST_TOKENS if windows else 0):
        found = found * _BASE + tokens[at : at + (windows - 1) * stride + 1 : stride]
    return found.tolist()


class History:
    """Texts of one tenant, to find their spans at any offset. Not thread-safe.

    Attributes:
        texts: The texts.
        size: Number of their token ids.
    """

    def __init__(self) -> None:
        self.texts: dict[int, KnownText] = {}  # by `id`, the latest last
        self.size = 0  # tokens of all
        self._blocks: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def add(self, text: KnownText) -> None:
        """Remember a text; it replaces texts that it begins with."""
        for key, known in list(self.texts.items()):
            if known.salts == text.salts[: len(known.salts)]:
                alike = matching(known.tokens, text.tokens)
                if alike == len(text.tokens) and known.salts == text.salts:
                    self.texts[key] = self.texts.pop(key)
                    return
                if alike == len(known.tokens):
                    self.drop(key)
        self.texts[id(text)] = text
        own = Counter[int]()
        for block, value in enumerate(_hashes(text.tokens, LEAST_TOKENS)):
            own[value] += 1
            if own[value] <= _TRIED:  # the first of repeated blocks: behind them are most tokens
                places = self._blocks[value]
                places.append((id(text), block * LEAST_TOKENS))
                del places[:-_KEPT]
        self.size += len(text.tokens)
        while len(self.texts) > _MOST_TEXTS:
            self.drop(next(iter(self.texts)))

    def drop(self, key: int) -> None:
        """Forget a text and the places of its blocks."""
        tokens = self.texts.pop(key).tokens
        self.size -= len(tokens)
        for value in set(_hashes(tokens, LEAST_TOKENS)):
            self._blocks[value] = [place for place in self._blocks[value] if place[0] != key]
            if not self._blocks[value]:
                del self._blocks[value]

    def spans(self, prompt: Tokens, first: int) -> Iterator[FoundSpan]:
        """Yield the spans of a prompt, from token `first` on, that known texts have.

        An edited text that begins as the prompt does comes first; then, of the texts that have one
        of the next windows of the prompt, the one that has most of the tokens around it.
        """
        begun = {
            alike: text
            for text in self.texts.values()
            if text.salts and (alike := matching(text.tokens, prompt)) > text.salts[0].position
        }
        if (longest := max(begun, default=0)) >= first + LEAST_TOKENS:
            yield FoundSpan(first, longest - first, begun[longest], first, continued=True)
            first = longest
        at, values = first, _hashes(prompt[first:], 1)
        end = first + len(values)
        while at < end:
            if values[at - end] not in self._blocks:
                at += 1
                continue
            near = range(at, min(at + LEAST_TOKENS, end))
            spans = [
                span
                for here in near
                for place in self._blocks.get(values[here - end], ())[-_TRIED:]
                for span in self._around(prompt, first, here, *place)
            ]
            best = max(spans, key=lambda span: span.count, default=None)
            if best is None:  # equal hashes of different tokens
                at += 1
                continue
            yield best
            at = first = best.first + best.count

    def _around(
        self, prompt: Tokens, first: int, at: int, key: int, offset: int
    ) -> Iterator[FoundSpan]:
        """Yield the span around the window at `at` that a place of a text has, if there is one."""
        text = self.texts[key]
        count = matching(text.tokens[offset:], prompt[at:])
        if count >= LEAST_TOKENS:
            before = matching(text.tokens[:offset][::-1], prompt[first:at][::-1])
            yield FoundSpan(at - before, before + count, text, offset - before)


class EditBlender(Blender):
    """Finder of the spans of edited texts, which takes their cached pages. See `Blender`."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._histories: dict[str, History] = {}  # the latest last
        self._lock = threading.Lock()
        kind, fields = type(self.rule).__qualname__, sorted(vars(self.rule).items())
        how = f"edited, {self.rule.name}, {kind}, {fields}, {options.get('max_kl')}"
        self._mark = hashlib.sha256(how.encode()).digest()

    def adopt(self, former: Any) -> None:
        """Begin anew: no page of the model before is found."""

    def remember(self, seq: Sequence) -> None:
        """Remember the text of a sequence that ends, unless it was forgotten meanwhile."""
        if seq.publishable and seq.length >= LEAST_TOKENS and self._plain(seq):
            tokens = seq.tokens[: seq.length].copy()
            with self._lock:
                history = self._histories.pop(seq.owner, None) or History()
                salts = tuple(salt for salt in seq.salts if salt.position < len(tokens))
                history.add(KnownText(tokens, salts))
                self._histories[seq.owner] = history
                while sum(one.size for one in self._histories.values()) > _MOST_TOKENS:
                    owner, first = next(iter(self._histories.items()))
                    if first.texts:
                        first.drop(next(iter(first.texts)))
                    else:
                        del self._histories[owner]

    def _plain(self, seq: Sequence) -> bool:
        """Return whether K and V of a sequence depend on its tokens alone."""
        return all(salt.digest == self._mark for salt in seq.salts)

    def forget(self, owner: str) -> int:
        """Forget the texts of a tenant; returns 0, as they are no blocks."""
        with self._lock:
            self._histories.pop(owner, None)
        return 0

    def unlearn(self, tokens: Any, tenant: str | None) -> int:
        """Forget the texts that begin so, or that these tokens continue; erase their edited pages.

        Returns:
            Number of erased blocks.
        """
        given, erased = np.asarray(tokens, np.uint32), 0
        with self._lock:
            history = self._histories.get(self.kv.config.tenant if tenant is None else tenant)
            gone = [
                text
                for text in (history.texts.values() if history else ())
                if matching(text.tokens, given) == min(len(text.tokens), len(given))
            ]
            for text in gone:
                history.drop(id(text))  # type: ignore[union-attr] # it has texts
        for salts in {text.salts for text in gone if text.salts} | self._marked(given, tenant):
            with self.kv._probe(given, tenant, salts) as seq:
                erased += forget_prompt(Planner.of(seq).store, seq)
        return erased

    def _marked(self, given: Tokens, tenant: str | None) -> set[tuple[Salt, ...]]:
        """Return the marks under which full pages of a text are cached, also by former processes.

        Texts with several marks in a page are known to the process that computed them only.
        """
        size, found, left = self.kv.page_size, set[tuple[Salt, ...]](), [tuple[Salt, ...]()]
        while left:
            salts = left.pop()
            with self.kv._probe(given, tenant, salts) as seq:
                index, chain = Planner.of(seq).store.index, seq.chains[0]
                begin = salts[-1].position // size + 1 if salts else 0
                for page in range(begin, len(given) // size):
                    above, part = seq.parent_key(0, page), given[page * size : (page + 1) * size]
                    for at in range(size):
                        if index.find(chain.page(above, part, [Salt(at, self._mark)])) is not None:
                            left.append((*salts, Salt(page * size + at, self._mark)))
            found |= {salts} if salts else set()
        return found

    def reach(self, seq: Sequence, most: int) -> int:
        """Return the tokens of a prompt up to the end of the last span that may be known."""
        places = self._spans(seq, seq.tokens[: max(most, 0)])
        return places[-1].first + places[-1].count if places else seq.length

    def _spans(self, seq: Sequence, prompt: Tokens) -> list[FoundSpan]:
        if not self._plain(seq):
            return []
        with self._lock:
            history = self._histories.get(seq.owner)
            places = list(history.spans(prompt, seq.length)) if history else []
        head = places[0] if places else None
        if head is not None and head.continued:
            # Pages behind exact ones that reach further than the first edit get keys of their own.
            mark, size = head.text.salts[0].position, self.kv.page_size
            if mark // size < seq.length // size:
                places[0] = head._replace(continued=False)
        return places

    def _sources(
        self, seq: Sequence, prompt: Tokens, sources: dict[int, Sequence]
    ) -> list[FoundSpan]:
        """Return the spans of a prompt that are cached; open the sequences that hold them."""
        size = self.kv.page_size
        held = list[KnownText]()  # no other text gets the id of one that is forgotten meanwhile
        while places := self._spans(seq, prompt):
            found, lost = list[FoundSpan](), set[int]()
            for text in {id(place.text): place.text for place in places}.values():
                stop = max(place.offset + place.count for place in places if place.text is text)
                ids = text.tokens[: -(-stop // size) * size]
                held.append(text)
                if id(text) not in sources or len(sources[id(text)].tokens) < len(ids):
                    if id(text) in sources:
                        sources.pop(id(text)).close()
                    source = self.kv.open(ids, tenant=seq.owner, salts=text.salts, limit=len(ids))
                    count_tokens(self.kv, -len(ids), -source.reused)  # they count once
                    sources[id(text)] = source
            for place in places:
                count = min(place.count, sources[id(place.text)].length - place.offset)
                if count >= LEAST_TOKENS:
                    found.append(place._replace(count=count))
                else:
                    lost.add(id(place.text))  # its pages are gone; another text may have them
            if not lost:
                return found
            for key in lost:
                with self._lock:
                    history = self._histories.get(seq.owner)
                    if history and key in history.texts:
                        history.drop(key)
                sources.pop(key).close()  # which remembers what is left of it
        return []

    def separate(self, seq: Sequence, places: list[FoundSpan]) -> None:
        """Give pages from the first edited span on keys of their own."""
        salts = list(seq.salts)
        for place in places:
            if place.continued:
                end = place.first + place.count
                salts += [salt for salt in place.text.salts if salt.position < end]
            else:
                salts.append(Salt(place.first, self._mark))
                break
        seq.replace_salts(list(dict.fromkeys(salts)))
