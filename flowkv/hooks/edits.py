"""Reuse of the cached pages of a text that was edited: spans removed, replaced, moved or put in.

Prompts and answers are remembered as token ids. Spans of a new prompt behind its exact prefix are
looked for in them at any offset, as rsync does: by hashes of all windows of the prompt, against
those of adjacent blocks of the known texts. Keys of a span are rotated to their new positions, and
a rule chooses the tokens that are computed again (`flowkv.hooks.blend`). Pages from the first such
span on have keys of their own: later turns of the edited text find them, exact prompts never do.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from flowkv.cache.block_table import Planner
from flowkv.cache.erasure import forget_prompt
from flowkv.cache.index import matching
from flowkv.cache.kv import count_tokens
from flowkv.cache.sequence import Sequence
from flowkv.core.keys import Salt
from flowkv.hooks.blend import LEAST_TOKENS, Blender, FoundSpan, Tokens

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
