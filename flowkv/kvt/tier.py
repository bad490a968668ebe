"""A tier that stores raw pages in coded form, over any other tier.

A page is coded in a thread behind its store, and decoded in a thread behind its load, straight into
the target. All but raw pages with a basis pass through. Frames of the inner tier are
opaque, so its checks, encryption, journal and erasure cover coded pages like all others.

Bases lie in the same tier, each in a frame under its own name, so that pages of an earlier basis,
or of another process's, open with theirs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import queue
import threading
import time
from bisect import bisect
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.compiled.compiling import SystemClock
from flowkv.core.clock import Clock
from flowkv.core.digest import digests
from flowkv.core.errors import StateError
from flowkv.core.geometry import COLD, Geometry, PageLayout, page_layout
from flowkv.core.memory import address_of
from flowkv.core.reaper import started
from flowkv.kvt.basis import digest, most_basis_bytes
from flowkv.kvt.codec import PageCoder, codable, coded_fingerprint, read_head
from flowkv.kvt.device import DEVICES, CodedPage, DeviceDecoder, DeviceQueue
from flowkv.tiers.base import (
    BASIS_LAYOUT,
    CURRENT_LAYOUT,
    Entry,
    FrameInfo,
    Load,
    Outcome,
    OverTier,
    Store,
    Tier,
    TierAnswer,
)
from flowkv.tiers.worker import Completions, Handle

_CORES = os.cpu_count() or 1
ENCODERS, DECODERS = max(1, min(4, _CORES // 2)), min(4, _CORES)
"""Threads that encode in the background, and that decode what a request waits for."""
BATCH_TOKENS = 512
"""Tokens of pages that a thread decodes at once."""
RECENT_BYTES = 32 << 20
"""Coded pages that are remembered: layers of one page are often loaded one after the other."""
EARLIER = 3
"""Earlier bases of each layer group that stay, so that their pages stay readable."""
MOST_AUDITED = 0.02
"""Largest divergence of a basis with audited pages: at larger ones sound pages differ from computed
ones by as much as their size."""
ENOUGH_SEEN, MOST_SEEN = 1 << 14, 1 << 15
"""Tokens of prompts from which `cold="kvt:auto"` learns, and most that are kept to learn from."""
MOST_DECODED = 1 << 14
"""Decoded pages that are known as such."""
_POLL_S, _BASIS_S, _AGAIN_S = 0.5, 30.0, 60.0
_NOTHING = bytes(32)


class CodedForm(NamedTuple):
    """Pages of one layer group.

    Attributes:
        layout: Layout of the raw pages.
        raw: Its fingerprint.
        coded: Fingerprint of coded pages.
        device: Device of the layers.
    """

    layout: PageLayout
    raw: bytes
    coded: bytes
    device: torch.device


class _Current(msgspec.Struct, frozen=True):
    """Names and sizes of the bases in use, by layer group, and of earlier ones, newest first."""

    bases: dict[int, tuple[bytes, int]] = {}
    earlier: list[tuple[bytes, int]] = []


def coded_forms(geometry: Geometry) -> dict[int, CodedForm]:
    """Return the layer groups with pages that can be coded."""
    forms = dict[int, CodedForm]()
    for group, one in enumerate(geometry.groups):
        layout = page_layout(one, geometry.page_size)
        if one.kind in ("full", "sliding") and codable(layout):
            raw = layout.fingerprint()
            forms[group] = CodedForm(layout, raw, coded_fingerprint(raw), torch.device(one.device))
    return forms


class PageBases:
    """Bases of a cache's pages, for all of its tiers. Thread-safe.

    Args:
        forms: The layer groups with pages that can be coded.
        given: Coders in bases that lie in no tier; no others are used. None where tiers keep them.

    Attributes:
        forms: The groups.
        given: Whether coders were given.
        current: Coders of new pages, by group; pages of other groups stay raw.
        recent: Coded pages that were loaded, with their descriptions.
        decoded: Keys of pages that were decoded.
        dropped: How often all bases were dropped, as their model was forgotten or changed.
    """

    def __init__(
        self, forms: dict[int, CodedForm], given: dict[int, PageCoder] | None = None
    ) -> None:
        self.forms, self.given = forms, given is not None
        self.by_raw = {form.raw: form for form in self.forms.values()}
        self.by_coded = {form.coded: form for form in self.forms.values()}
        self._lock = threading.Lock()
        self._known = {coder.name: coder for coder in (given or {}).values()}
        self._there = lru_cache(len(self.forms))(DeviceDecoder)
        self.current = dict[int, PageCoder](given or {})
        self._counts: Counter[str] = Counter()
        self.recent, self._recent_bytes = OrderedDict[bytes, tuple[bytes, FrameInfo]](), 0
        self.decoded = dict[bytes, bytes]()
        self._seen = list[NDArray[Any]]()  # what prompts brought
        self._begun, self._room = list[bytes](), MOST_SEEN  # these prompts whole, sorted
        self._asked, self.dropped = False, 0

    def keep_prompt(self, ids: NDArray[Any]) -> None:
        """Keep the tokens of a prompt that begin none before, to learn bases from them."""
        with self._lock:
            if self.current or self._room <= 0:
                return
            whole = ids.astype(">u4").tobytes()
            at = bisect(self._begun, whole)  # one beside it shares most with it
            near = self._begun[max(at - 1, 0) : at + 1]
            known = max((_shared(whole, one) for one in near), default=0)
            new = ids[known : known + self._room].copy()
            if len(new):
                self._begun.insert(at, whole[: 4 * (known + len(new))])
                self._seen.append(new)
                self._room -= len(new)

    def take_turn(self) -> bool:
        """Return True once, when enough tokens were kept to learn from."""
        with self._lock:
            enough = MOST_SEEN - self._room >= ENOUGH_SEEN
            due, self._asked = enough and not self._asked, enough or self._asked
        return due

    def kept_tokens(self) -> NDArray[Any]:
        """Return the tokens of prompts that were kept, behind each other."""
        with self._lock:
            return np.concatenate([*self._seen, np.empty(0, np.uint32)])

    def _drop_prompts(self) -> None:
        self._seen, self._begun, self._room = [], [], MOST_SEEN

    def add(self, coder: PageCoder) -> PageCoder:
        """Return the coder of a basis: the one that is known, if any."""
        with self._lock:
            return self._known.setdefault(coder.name, coder)

    def chunk_layers(self) -> int:
        """Return the neighbouring layers that pages of the first group decode together."""
        return next((one.places[0].layers.stop for one in self.current.values()), 1)

    def coder(self, name: bytes) -> PageCoder | None:
        """Return the coder of a basis by its name, if it is known."""
        return self._known.get(name)

    def on_device(self, coder: PageCoder) -> DeviceDecoder:
        """Return the decoder of a coder's pages on their device; the last ones stay there."""
        return self._there(coder, self.by_raw[coder.layout.fingerprint()].device)

    def rounded(self, key: bytes, body: memoryview, page_no: int) -> bytearray | None:
        """Return a raw page as it comes back from the code of another one.

        None if that one has no code, or a coarser one than audits know a bound for.

        Args:
            key: Key of the other page.
            body: The raw page, writable.
            page_no: Number of the page in its prompt.
        """
        own = self.coder(self.decoded.get(key, b""))
        if own is None or own.basis.measured.get("kl", 0.0) > MOST_AUDITED:
            return None
        found = own.round_trip(body, page_no)
        return found[1] if found is not None else None

    def count(self, **more: int) -> None:
        """Count pages and bytes that were coded or decoded."""
        with self._lock:
            self._counts.update(more)

    def remember(self, key: bytes, data: bytes, info: FrameInfo) -> None:
        """Remember a coded page for a while."""
        with self._lock:
            if key not in self.recent:
                self.recent[key] = data, info
                self._recent_bytes += len(data)
            while self._recent_bytes > RECENT_BYTES:
                self._drop(next(iter(self.recent)))

    def drop(self, key: bytes) -> None:
        """Forget a coded page that cannot be read, or is wrong: it is made anew."""
        with self._lock:
            self._drop(key)
            self.decoded.pop(key, None)

    def _drop(self, key: bytes) -> None:
        if key in self.recent:
            self._recent_bytes -= len(self.recent.pop(key)[0])

    def note_decoded(self, key: bytes, n_bytes: int, basis: bytes) -> None:
        """Record that a page was decoded: coded once more, it would lose more."""
        with self._lock:
            self._counts["decoded_bytes"] += n_bytes
            self.decoded[key] = basis
            if len(self.decoded) > MOST_DECODED:
                del self.decoded[next(iter(self.decoded))]

    def forget(self) -> None:
        """Forget all pages, as some were erased: those in no tier any more may be among them."""
        with self._lock:
            self.recent.clear()
            self.decoded.clear()
            self._drop_prompts()
            self._recent_bytes = 0

    def measured(self) -> dict[str, Any]:
        """Return totals of coded pages, and the measured costs of the bases in use."""
        measured = next((one.basis.measured for one in self.current.values()), {})
        with self._lock:
            return {"groups": len(self.current), **measured, **self._counts}

    def use(self, coders: dict[int, PageCoder], since: int | None = None) -> bool:
        """Code pages of these groups from now on; those of others stay raw.

        Return False if the bases were dropped since `dropped` was `since`: nothing is changed then.
        """
        with self._lock:
            if since not in (None, self.dropped):
                return False
            self.current, self._asked = coders, bool(coders)
            self._drop_prompts()
            if not coders:
                self.dropped += 1
                self._known.clear()
                self._there.cache_clear()
        return True


def _shared(one: bytes, other: bytes) -> int:
    """Return how many tokens of 4 bytes two prompts share at their begin."""
    least = min(len(one), len(other)) // 4
    first, second = (np.frombuffer(each, np.uint32, least) for each in (one, other))
    return int(np.argmin(np.append(first == second, False)))


class _Asked(NamedTuple):
    """An item of a job.

    Attributes:
        job: Job of this tier; 0 for loads and stores of its own.
        number: Index of the item in it.
        item: The item, as the caller gave it.
        start_ns: Time of submission.
        end_ns: Deadline.
        reply: Queue for the answer to a load or store of its own.
    """

    job: int
    number: int
    item: Any
    start_ns: int
    end_ns: int
    reply: queue.SimpleQueue[TierAnswer] | None = None

    def answer(self, outcome: Outcome, reason: str = "") -> TierAnswer:
        """Return an answer without bytes."""
        return TierAnswer(self.job, self.number, self.item.key, outcome, reason)


class _Sent(NamedTuple):
    """A job of the inner tier.

    Attributes:
        asked: Its items that are not answered yet, by their index.
        coded: Form of the frames asked for, or stored.
        scratch: Memory of each coded page that is loaded.
        last: Whether no other form is left to ask for.
        known: Keys that were not deleted since.
    """

    asked: dict[int, _Asked]
    coded: bool
    scratch: Sequence[Any]
    last: bool
    known: set[bytes]


class CodecTier(Handle, OverTier):
    """Raw pages in coded form over another tier.

    Args:
        inner: The tier that holds the frames. Its answers are polled here alone.
        bases: Bases of the pages.
        clock: Source of time.

    Attributes:
        page_of: Returns the number of a page in its prompt by its key; None if it is not known.
    """

    def __init__(self, inner: Tier, bases: PageBases, *, clock: Clock | None = None) -> None:
        super().__init__(inner.name, Completions())
        self.inner, self.bases, self._clock = inner, bases, clock or SystemClock()
        self.kind, self.capacity_bytes = inner.kind, inner.capacity_bytes
        self.page_of: Callable[[bytes], int | None] = lambda key: None
        self._namespace = _NOTHING
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._sent = dict[int, _Sent]()
        self._left = dict[int, set[int]]()  # items of each job that are not answered yet
        self._held, self._again_ns = set[bytes](), 0  # bases that lie here
        self._made, self._named = set[bytes](), set[bytes]()  # stored here, and named by pages
        self._earlier = list[tuple[bytes, int]]()
        self._storing, self._reading = threading.RLock(), threading.Lock()  # one basis at a time
        self._cancelled, self._device = set[int](), DeviceQueue()
        self._encoding = deque[tuple[_Asked, PageCoder, int | bytes]]()
        self._waiting = deque[tuple[_Asked, bytes, FrameInfo]]()
        self._coded = dict[bytes, int]()  # coded pages here, and their bytes
        self._over = False
        name = f"flowkv {inner.name} codec"  # loads never wait for stores
        self._encoders = ThreadPoolExecutor(ENCODERS, name)
        self._decoders = ThreadPoolExecutor(DECODERS, name)
        self._reader = started(self._read, name="flowkv codec")

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def coded_bytes(self, key: bytes) -> int:
        """Return the bytes of a coded page here, rounded up; 0 for other frames."""
        n_bytes = self._coded.get(key, 0)
        grain = 1 << max(n_bytes.bit_length() - 5, 0)  # neighbours are then of one size, mostly
        return -(-n_bytes // grain) * grain

    # ---- bases

    def read_bases(self, namespace: bytes) -> None:
        """Read the bases that pages of a namespace have in this tier, if none are known."""
        self._namespace = namespace
        said, coders = self._record(), dict[int, PageCoder]()
        self._earlier = said.earlier
        for group, (name, n_bytes) in () if self.bases.current else said.bases.items():
            form = self.bases.forms.get(group)
            coder = self._coder(name, n_bytes, form.layout)[0] if form else None
            if coder is not None:
                coders[group] = coder
        if coders:
            self.bases.use(coders)

    def _record(self) -> _Current:
        """Return which bases of the namespace lie here."""
        key, raw = self._current_key(), None
        if self.inner.contains([key])[0]:
            raw = self._get(key, CURRENT_LAYOUT, 1 << 16)
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(raw or b"", type=_Current)
        return _Current()

    def store_bases(self) -> bool:
        """Store the bases in use, and that they are; return whether all is stored.

        Of earlier ones, the newest stay, as far as they take a quarter of the tier with those in
        use, and none that no page names.
        """
        if not self.inner.writable:
            return False
        coders, said = list(self.bases.current.values()), self._record()
        own = {coder.name for coder in coders}
        with self._storing:
            self._again_ns, left = 0, self.capacity_bytes // 4 - self.basis_bytes()
            # Until they lie here, those in use before stay, and the record of them.
            if left < 0 or not all([self._put_basis(coder) for coder in coders]):
                return False
            earlier = dict([*said.bases.values(), *said.earlier, *self._earlier])
            self._earlier, most = [], EARLIER * len(self.bases.forms)
            for name in [name for name in earlier if name not in own]:
                left -= self.inner.frame_bytes(earlier[name])
                unnamed = name in self._made - self._named and not self.inner.shared
                if left >= 0 and not unnamed and len(self._earlier) < most:
                    self._earlier.append((name, earlier[name]))
            old = earlier.keys() - {name for name, _ in self._earlier} - own
            self.inner.delete([self._current_key(), *map(_basis_key, old)])
            self._held -= old | own
        return all([self._holds(coder) for coder in coders])

    def basis_bytes(self) -> int:
        """Return the most bytes of the bases in use here."""
        sizes = [len(one.data) for one in self.bases.current.values()]
        return sum(map(self.inner.frame_bytes, [*sizes, 1 << 10]))

    def _holds(self, coder: PageCoder) -> bool:
        """Return whether a basis lies here; store it if need be: pages are useless without it."""
        with self._storing:
            if self.bases.given:
                return True
            own = _basis_key(coder.name)
            there = coder.name in self._held and self.inner.contains([own])[0]  # not removed
            if there or self._clock.now_ns() < self._again_ns:
                return there
            if self.bases.coder(coder.name) is None:  # dropped meanwhile
                return False
            if self.basis_bytes() > self.capacity_bytes // 4:  # more than they save
                return False
            current = self.bases.current.items()
            said = {group: (one.name, len(one.data)) for group, one in current}
            data = msgspec.msgpack.encode(_Current(said, self._earlier))
            if self._put_basis(coder) and self._put(self._current_key(), CURRENT_LAYOUT, data):
                self._held.add(coder.name)
                return True
            self._again_ns = self._clock.now_ns() + round(_AGAIN_S * 1e9)
            return False

    def _put_basis(self, coder: PageCoder) -> bool:
        own = _basis_key(coder.name)
        if not self.inner.contains([own])[0]:
            self._made.add(coder.name)
        elif self._get(own, BASIS_LAYOUT, len(coder.data)) not in (None, coder.data):
            self.inner.delete([own])  # damaged, or of another secret: it would stay
        return self._put(own, BASIS_LAYOUT, coder.data)

    def _current_key(self) -> bytes:
        return hashlib.blake2b(self._namespace, digest_size=32, person=b"kvt current").digest()

    def _coder(
        self, name: bytes, n_bytes: int, layout: PageLayout, end_ns: int = 0
    ) -> tuple[PageCoder | None, bool]:
        """Return the coder of a basis, read from the inner tier by a time, and if it is gone."""
        if (known := self.bases.coder(name)) is not None:
            return known, False
        if self.bases.given or not 0 < n_bytes <= most_basis_bytes(layout):
            return None, True
        with self._reading:
            if (known := self.bases.coder(name)) is not None:
                return known, False
            data = self._get(_basis_key(name), BASIS_LAYOUT, n_bytes, end_ns)
            with suppress(ValueError):
                if data is not None and digest(data) == name:
                    known = self.bases.add(PageCoder(layout, data))
                    self._held.add(name)
            return known, known is None and data is not None

    def _get(self, key: bytes, layout: bytes, n_bytes: int, end_ns: int = 0) -> bytes | None:
        """Return a frame's body, empty if there is none; None if the tier does not say."""
        body = bytearray(n_bytes)
        answer = self._await(self.inner.submit_load, Load(key, memoryview(body), layout), end_ns)
        if answer.outcome is Outcome.FAILED:
            return None
        return bytes(body[: answer.n_bytes]) if answer.outcome is Outcome.HIT else b""

    def _put(self, key: bytes, layout: bytes, data: bytes) -> bool:
        info = FrameInfo("memo", 0, 0, layout, _NOTHING, self._namespace, 0, 0, len(data))
        item = Store(key, info, memoryview(data))
        return self._await(self.inner.submit_store, item).outcome is Outcome.STORED

    def _await(self, submit: Any, item: Load | Store, end_ns: int = 0) -> TierAnswer:
        reply, now_ns = queue.SimpleQueue[TierAnswer](), self._clock.now_ns()
        end_ns = min(end_ns or 1 << 62, now_ns + round(_BASIS_S * 1e9))
        one = _Asked(0, 0, item, now_ns, end_ns, reply)
        if threading.current_thread() is self._reader:  # at the end, where no other thread works
            return one.answer(Outcome.FAILED, "closed")
        self._send(submit, [item], [one])
        try:
            return reply.get(timeout=max((end_ns - now_ns) / 1e9 + _POLL_S, 0))
        except queue.Empty:
            return one.answer(Outcome.FAILED, "deadline")

    # ---- jobs

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Start reading, and decoding what is coded; return a job number.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        job, start_ns, end_ns = self._begin(len(items), deadline_s)
        plain, coded = list[_Asked](), list[_Asked]()
        for number, item in enumerate(items):
            one = _Asked(job, number, item, start_ns, end_ns)
            likely = item.key in self._coded or (self.inner.shared and bool(self.bases.current))
            guess = likely and item.layout in self.bases.by_raw
            recent = self.bases.recent.get(item.key) if item.key in self._coded else None
            if guess and recent is not None and recent[1].fidelity <= item.fidelity:
                self._decode_soon(one, *recent)
            else:
                (coded if guess else plain).append(one)
        self._load(plain, coded=False)
        self._load(coded, coded=True)
        return job

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Start coding pages and writing them, and all else as it is; return a job number.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        job, start_ns, end_ns = self._begin(len(items), deadline_s)
        plain = list[_Asked]()
        for number, item in enumerate(items):
            one, how = _Asked(job, number, item, start_ns, end_ns), self._how(item)
            if how is None:
                plain.append(one)
            else:
                self._soon(self._encoders, self._encode, self._encoding, (one, *how))
        self._send(self.inner.submit_store, [one.item for one in plain], plain)
        return job

    def cancel(self, job: int) -> None:
        """Answer the unanswered items of a job "cancelled", where that is possible."""
        with self._lock:
            if job not in self._left:
                return
            self._cancelled.add(job)
            inner = [
                number
                for number, sent in self._sent.items()
                if any(one.job == job for one in sent.asked.values())
            ]
        for number in inner:
            self.inner.cancel(number)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget frames at once; return how many were present."""
        try:
            return self.inner.delete(keys)
        finally:  # loads that began meanwhile have read them
            self._drop(keys)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Delete frames and leave no copy of their bytes; see `Tier.erase`."""
        try:
            return self.inner.erase(keys)
        finally:
            self.drop_copies(keys)

    def scan(self) -> Iterator[Entry]:
        """Yield all frames, bases too, and coded pages as the raw pages that they stand for."""
        for entry in self.inner.scan():
            form = self.bases.by_coded.get(entry.info.layout)
            if form is not None:
                self._coded[entry.key] = entry.n_bytes
                entry = entry._replace(info=_as_raw(entry.info, form))
            yield entry

    def close(self) -> None:
        """Finish or fail the items in flight, and close the inner tier."""
        if self._pid != os.getpid():  # the parent's threads may have held the lock
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._encoders.shutdown()
        self._decoders.shutdown()
        self.inner.close()
        with self._lock:
            self._over = True
            self._changed.notify_all()
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._answers.close()

    def _begin(self, count: int, deadline_s: float) -> tuple[int, int, int]:
        self._require_usable()
        job, start_ns = self._answers.new_job(), self._clock.now_ns()
        if count:
            with self._lock:
                self._left[job] = {*range(count)}
        return job, start_ns, start_ns + round(min(deadline_s, 1e9) * 1e9)

    def _how(self, item: Store) -> tuple[PageCoder, int | bytes] | None:
        """Return the coder of a page, with its number or its coded form; None if it stays raw."""
        info, bases = item.info, self.bases
        plain = info.kind == "page" and not info.codec
        form = bases.forms.get(info.group) if plain else None
        whole = info.world == 1 and not info.head_stop
        if form is None or info.layout != form.raw or not whole:
            return None
        if info.tokens != form.layout.page_size or len(item.body) != form.layout.page_bytes:
            return None
        if info.fidelity == COLD and item.key in bases.decoded:  # it lies in another tier, or did
            known = bases.recent.get(item.key)
            head = read_head(memoryview(known[0])) if known is not None else None
            own = bases.coder(head.basis) if head is not None else None
            return None if own is None or known is None else (own, known[0])
        coder = bases.current.get(info.group)
        page_no = self.page_of(item.key) if coder is not None else None
        return None if coder is None or page_no is None else (coder, page_no)

    def _soon(
        self, pool: ThreadPoolExecutor, work: Callable[[], None], queued: deque[Any], item: Any
    ) -> None:
        """Queue an item and work in a thread, or work in this one if the pool gets no thread.

        Work for which no thread starts may stay in the pool's queue: it then finds no item.
        """
        queued.append(item)
        try:
            pool.submit(work)
        except Exception:
            work()

    def _taken(self, queued: deque[Any], most: int, threads: int = 1) -> list[Any]:
        """Return a thread's fair share of queued items."""
        with self._lock:
            count = min(-(-len(queued) // threads), most)
            return [queued.popleft() for _ in range(count)]

    def _over_or_late(self, one: _Asked) -> bool:
        """Return whether an item was cancelled, or its time is over; answer it then."""
        late = self._clock.now_ns() >= one.end_ns
        if gone := late or one.job in self._cancelled:
            self._post(one, one.answer(Outcome.FAILED, "deadline" if late else "cancelled"))
        return gone

    @contextmanager
    def _answering(self, *asked: _Asked) -> Iterator[None]:
        """Answer items `FAILED` if what is done for them ends with an error."""
        try:
            yield
        except BaseException as error:  # libraries in other languages panic with one
            reason = f"{type(error).__name__}: {error}"
            reason = "memory" if isinstance(error, MemoryError) else reason
            reason = "closed" if isinstance(error, StateError) else reason
            for one in asked:
                self._post(one, one.answer(Outcome.FAILED, reason))
            if isinstance(error, KeyboardInterrupt):
                raise

    def _load(self, asked: list[_Asked], *, coded: bool, last: bool = False) -> None:
        with self._answering(*asked):
            items, scratch = [one.item for one in asked], list[Any]()
            for n, item in enumerate(items if coded else ()):
                form = self.bases.by_raw[item.layout]
                scratch.append(np.empty(form.layout.page_bytes, np.uint8))
                items[n] = Load(item.key, scratch[n].data, form.coded, item.fidelity)
            self._send(self.inner.submit_load, items, asked, coded, scratch, last)

    def _send(
        self,
        submit: Any,
        items: Sequence[Any],
        asked: list[_Asked],
        coded: bool = False,
        scratch: Sequence[Any] = (),
        last: bool = True,
    ) -> None:
        if not asked:
            return
        with self._answering(*asked), self._lock:
            known = {item.key for item in items}
            sent = _Sent(dict(enumerate(asked)), coded, scratch, last, known)
            left_s = (asked[0].end_ns - self._clock.now_ns()) / 1e9
            self._sent[submit(items, deadline_s=max(left_s, 1e-3))] = sent
            self._changed.notify_all()

    def _read(self) -> None:
        """Route the inner tier's answers until it is closed, and fail what it leaves unanswered."""
        answers, over = list[TierAnswer](), False
        while answers or not over:
            with self._lock:
                while not (self._sent or self._over):
                    self._changed.wait()
                over = self._over
            try:
                answers = self.inner.poll(0.0 if over else _POLL_S)
            except BaseException:  # whatever happens, later answers are routed
                answers = []
                time.sleep(0.0 if over else _POLL_S)
            for answer in answers:
                with suppress(BaseException):
                    self._route(answer)
        with self._lock:
            left = [one for sent in self._sent.values() for one in sent.asked.values()]
            self._sent.clear()
        for one in left:
            self._post(one, one.answer(Outcome.FAILED, "closed"))

    def _route(self, answer: TierAnswer) -> None:
        with self._lock:
            sent = self._sent.get(answer.job)
            one = sent.asked.get(answer.item) if sent is not None else None
        if sent is None or one is None:
            return
        with self._answering(one):
            self._take(one, answer, sent)
        with self._lock:
            sent.asked.pop(answer.item)
            if not sent.asked:
                del self._sent[answer.job]

    def _take(self, one: _Asked, answer: TierAnswer, sent: _Sent) -> None:
        """Decode a page, ask for its other form, or pass the answer on."""
        item, info = one.item, answer.info
        if answer.outcome is Outcome.HIT and sent.coded and info is not None:
            data = bytes(sent.scratch[answer.item][: answer.n_bytes])
            with self._lock:
                if item.key in sent.known:
                    self._coded[item.key] = self.inner.frame_bytes(len(data))
                    self.bases.remember(item.key, data, info)
            self._decode_soon(one, data, info)
        elif answer.reason == "layout" and item.layout in self.bases.by_raw and not sent.last:
            if sent.coded:
                self._coded.pop(item.key, None)
            self._load([one], coded=not sent.coded, last=True)
        else:
            if answer.outcome is Outcome.STORED and sent.coded:
                with self._lock:
                    if item.key in sent.known:  # 0 bytes: one lay there
                        n_bytes = answer.n_bytes and self.inner.frame_bytes(answer.n_bytes)
                        self._coded[item.key] = n_bytes or self._coded.get(item.key, 0)
            self._post(one, answer)

    def _post(self, one: _Asked, answer: TierAnswer) -> None:
        """Answer an item, unless it has an answer."""
        if one.reply is not None:
            one.reply.put(answer)
            return
        with self._lock:
            left = self._left.get(one.job, set())
            if one.number in left:
                self._answers.post([answer._replace(job=one.job, item=one.number)])
                left.discard(one.number)
            if not left:
                self._left.pop(one.job, None)
                self._cancelled.discard(one.job)

    def _decode_soon(self, one: _Asked, data: bytes, info: FrameInfo) -> None:
        with self._answering(one):
            self._soon(self._decoders, self._decode_some, self._waiting, (one, data, info))

    def _decode_some(self) -> None:
        """Decode a fair share of the pages that wait. It runs once for each: so none is left."""
        most = BATCH_TOKENS // max(form.layout.page_size for form in self.bases.forms.values())
        batch = self._taken(self._waiting, most, DECODERS)
        here, there = list[CodedPage](), list[CodedPage]()
        with self._answering(*(one for one, *_ in batch)):
            for one, data, info in batch:
                with self._answering(one):
                    page = None if self._over_or_late(one) else self._page(one, data, info)
                    if page is not None:
                        device = self.bases.by_raw[one.item.layout].device.type
                        (there if device in DEVICES else here).append(page)
            self._decode_here(here)
            if there:
                self._device.decode_soon(there, self.bases.on_device, self._decode_here)

    def _decode_here(self, pages: Sequence[CodedPage]) -> None:
        """Decode pages on the processor: those alike together, or each alone after an error."""
        alike = defaultdict[tuple[PageCoder, int, int], list[CodedPage]](list)
        for page in pages:
            alike[page.coder, page.first, page.layers].append(page)
        for (coder, first, layers), some in alike.items():
            found: Sequence[bool | None] = [None] * len(some)
            own = [(memoryview(page.data), page.target) for page in some]
            with suppress(Exception):
                found = coder.decode_batch(own, first, layers)
            for page, sound in zip(some, found, strict=True):
                page.done(page, sound, True)

    def _page(self, one: _Asked, data: bytes, info: FrameInfo) -> CodedPage | None:
        """Return a page to decode; None if its load is answered, as it cannot be."""
        item, head = one.item, read_head(memoryview(data))
        form, answer = self.bases.by_raw[item.layout], one.answer(Outcome.MISS, "layout")
        coder, gone = None, True
        if head is not None:
            coder, gone = self._coder(head.basis, head.basis_bytes, form.layout, one.end_ns)
        if coder is None and not gone:  # the tier below does not say
            answer = one.answer(Outcome.FAILED, "deadline")
        layers, step = form.layout.layers, form.layout.stripe_stride_bytes
        count = item.stripes or layers - item.first
        if coder is not None and not 0 <= item.first < item.first + count <= layers:
            answer = answer._replace(reason="stripes")
        elif coder is not None and (item.target.nbytes < count * step or item.target.readonly):
            answer = answer._replace(outcome=Outcome.FAILED, reason="target")
        elif coder is not None:
            target = item.target.cast("B")[: count * step]
            done = partial(self._decoded, one, _as_raw(info, form))
            return CodedPage(coder, data, target, item.first, count, done)
        self._settle(one, answer, gone=gone)
        return None

    def _decoded(
        self, one: _Asked, info: FrameInfo, page: CodedPage, sound: bool | None, here: bool = False
    ) -> None:
        """Answer a load, with a page that is decoded, or that is decoded here."""
        with self._answering(one):
            self.bases.count(device_pages=not here and sound is not None)
            if sound is None:
                sound = page.coder.decode(memoryview(page.data), *page[2:5])
            answer = one.answer(Outcome.MISS, "digest")
            if sound:
                answer = one.answer(Outcome.HIT)._replace(n_bytes=page.target.nbytes, info=info)
                self.bases.note_decoded(one.item.key, page.target.nbytes, page.coder.name)
            self._settle(one, answer, gone=not sound)

    def _settle(self, one: _Asked, answer: TierAnswer, *, gone: bool) -> None:
        """Answer a load; remove a page that is never readable again, in the way of a new one."""
        if gone and self.inner.writable:
            self.delete([one.item.key])
            self.bases.drop(one.item.key)
        self._post(one, answer._replace(seconds=(self._clock.now_ns() - one.start_ns) / 1e9))

    def _encode(self) -> None:
        for one, coder, page in self._taken(self._encoding, 1):
            with self._answering(one):
                if not self._over_or_late(one):
                    self._encode_page(one, coder, page)

    def _encode_page(self, one: _Asked, coder: PageCoder, page: Any) -> None:
        item = one.item
        step, known = item.info.stripe_bytes, item.digests
        if known is not None and digests(item.body, step) != bytes(known):
            # A device's copy went wrong, or changed: the coded page would have sound digests.
            self._post(one, one.answer(Outcome.FAILED, "digest"))
            return
        sent, data = item, None
        self._named.add(coder.name)
        if self._holds(coder):
            new = isinstance(page, int)
            data = coder.encode(_writable(item.body), page) if new else page
        if data is not None:
            info = item.info._replace(codec=COLD, fidelity=COLD, stripe_bytes=len(data))
            info = info._replace(layout=self.bases.forms[info.group].coded)
            sent = Store(item.key, info, memoryview(data))
            self.bases.count(pages=1, raw_bytes=len(item.body), coded_bytes=len(data))
        self._send(self.inner.submit_store, [sent], [one], coded=data is not None)

    def drop_copies(self, keys: Sequence[bytes]) -> None:
        """Remove all that is remembered of frames that were erased, here or by others."""
        self._drop(keys)
        self.bases.forget()

    def drop_bases(self, covers: Callable[[bytes, bytes], bool]) -> None:
        """Drop the bases if their model is forgotten, and store them no more.

        Args:
            covers: Returns whether the frames of a tenant and a namespace are forgotten.
        """
        if covers(_NOTHING, self._namespace):
            with self._storing:
                self._held.clear()
                self._earlier.clear()
                self.bases.use({})

    def _drop(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for sent in self._sent.values():
                sent.known.difference_update(keys)
            for key in keys:
                self._coded.pop(key, None)


def _basis_key(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=32, person=b"kvt basis").digest()


def _as_raw(info: FrameInfo, form: CodedForm) -> FrameInfo:
    """Return the description of the raw page that a coded one stands for."""
    return info._replace(codec=0, layout=form.raw, stripe_bytes=form.layout.stripe_stride_bytes)


def _writable(body: memoryview) -> memoryview:
    """Return the same bytes as a writable view, which torch wants; nothing is written there."""
    if not body.readonly:
        return body
    own = (ctypes.c_char * body.nbytes).from_address(address_of(body))
    return memoryview(own).cast("B")
