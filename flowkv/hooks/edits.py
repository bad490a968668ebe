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
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowkv.cache.kv import KV, count_tokens
from flowkv.cache.sequence import Sequence
from flowkv.core.keys import Salt
from flowkv.hooks.blend import LEAST_TOKENS, Blender, Forward, FoundSpan, Tokens
from flowkv.kvt.basis import KeyTurn
from flowkv.policy.blend import BlendRule

_MOST_TOKENS = 1 << 20
"""Most token ids remembered; the texts that were used longest ago go first."""
_TRIED = 8
"""Most places of a known text that are tried for one window."""
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


def _alike(one: Tokens, other: Tokens) -> int:
    """Return the number of equal tokens at the beginnings of two texts."""
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    return int(differs.argmax()) if differs.any() else count


class History:
    """Texts of one tenant, whose spans are found at any offset. Not thread-safe."""

    def __init__(self) -> None:
        self.texts: dict[int, KnownText] = {}  # by `id`, the latest last
        self._blocks: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def add(self, text: KnownText) -> None:
        """Remember a text; it replaces texts that it begins with."""
        for key, known in list(self.texts.items()):
            if known.salts == text.salts[: len(known.salts)]:
                alike = _alike(known.tokens, text.tokens)
                if alike == len(text.tokens) and known.salts == text.salts:
                    self.texts[key] = self.texts.pop(key)
                    return
                if alike == len(known.tokens):
                    self.drop(key)
        self.texts[id(text)] = text
        for block, value in enumerate(_hashes(text.tokens, LEAST_TOKENS)):
            self._blocks[value].append((id(text), block * LEAST_TOKENS))
        while sum(len(known.tokens) for known in self.texts.values()) > _MOST_TOKENS:
            self.drop(next(iter(self.texts)))

    def drop(self, key: int) -> None:
        """Forget a text."""
        for value in set(_hashes(self.texts.pop(key).tokens, LEAST_TOKENS)):
            self._blocks[value] = [place for place in self._blocks[value] if place[0] != key]
            if not self._blocks[value]:
                del self._blocks[value]

    def spans(
        self, prompt: Tokens, first: int, without: Container[int] = ()
    ) -> Iterator[FoundSpan]:
        """Yield the spans of a prompt, from token `first` on, that known texts have.

        An edited text that begins as the prompt does comes first; then, of the texts that have one
        of the next windows of the prompt, the one that has most of the tokens around it.
        """
        begun = {
            alike: text
            for text in self.texts.values()
            if id(text) not in without
            and text.salts
            and (alike := _alike(text.tokens, prompt)) > text.salts[0].position
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
                for span in self._around(prompt, first, here, values[here - end])
                if id(span.text) not in without
            ]
            best = max(spans, key=lambda span: span.count, default=None)
            if best is None:  # equal hashes of different tokens
                at += 1
                continue
            yield best
            at = first = best.first + best.count

    def _around(self, prompt: Tokens, first: int, at: int, value: int) -> Iterator[FoundSpan]:
        """Yield the spans around the window at `at`, one for each place of a text with its hash."""
        for key, offset in self._blocks.get(value, ())[-_TRIED:]:
            text = self.texts[key]
            count = _alike(text.tokens[offset:], prompt[at:])
            if count >= LEAST_TOKENS:
                before = _alike(text.tokens[:offset][::-1], prompt[first:at][::-1])
                yield FoundSpan(at - before, before + count, text, offset - before)


class EditBlender(Blender):
    """Finder of the spans of edited texts, which takes their cached pages. See `Blender`."""

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
        super().__init__(kv, forward, turns, lead, rule, compute, max_kl)
        self._histories: defaultdict[str, History] = defaultdict(History)
        self._lock = threading.Lock()
        self._mark = hashlib.sha256(f"edited, {rule.name}".encode()).digest()

    def adopt(self, former: Any) -> None:
        """Begin anew: no page of the model before is found."""

    def remember(self, seq: Sequence) -> None:
        """Remember the text of a sequence that ends."""
        if seq.length >= LEAST_TOKENS and self._plain(seq):
            tokens = seq.tokens[: seq.length].copy()
            with self._lock:
                self._histories[seq.owner].add(KnownText(tokens, tuple(seq.salts)))

    def _plain(self, seq: Sequence) -> bool:
        """Return whether K and V of a sequence depend on its tokens alone."""
        return all(salt.digest == self._mark for salt in seq.salts)

    def forget(self, owner: str) -> int:
        """Forget the texts of a tenant; returns 0, as they are no blocks."""
        with self._lock:
            self._histories.pop(owner, None)
        return 0

    def unlearn(self, tokens: Any, tenant: str | None) -> int:
        """Forget the texts that begin with these tokens, and erase their edited pages.

        Returns:
            Number of erased blocks.
        """
        given = np.asarray(tokens, np.uint32)
        owner = self.kv.config.tenant if tenant is None else tenant
        with self._lock:
            history = self._histories[owner]
            gone = [t for t in history.texts.values() if _alike(t.tokens, given) == len(given)]
            for text in gone:
                history.drop(id(text))
        salts = {text.salts for text in gone if text.salts}
        return sum(self.kv.forget(given, tenant=tenant, salts=some) for some in salts)

    def reach(self, seq: Sequence, most: int) -> int:
        """Return the tokens of a prompt up to the end of the last span that may be known."""
        places = self._spans(seq, seq.tokens[: max(most, 0)])
        return places[-1].first + places[-1].count if places else seq.length

    def _spans(
        self, seq: Sequence, prompt: Tokens, without: Container[int] = ()
    ) -> list[FoundSpan]:
        if not self._plain(seq):
            return []
        with self._lock:
            places = list(self._histories[seq.owner].spans(prompt, seq.length, without))
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
        size, without = self.kv.page_size, set[int]()
        while places := self._spans(seq, prompt, without):
            found, lost = list[FoundSpan](), len(without)
            for text in {id(place.text): place.text for place in places}.values():
                stop = max(place.offset + place.count for place in places if place.text is text)
                ids = text.tokens[: -(-stop // size) * size]
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
                    without.add(id(place.text))  # its pages are gone; another text may have them
            if len(without) == lost:
                return found
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
