"""A tier that stores raw pages in coded form, over any other tier.

A page is coded in a thread behind its store, and decoded in a thread behind its load, straight into
the target. Whatever is not a raw page with a basis passes through. Frames of the inner tier are
opaque, so its checks, encryption, journal and erasure cover coded pages like all others.

Bases lie in the same tier, each in a frame under its own name, so that pages of an earlier basis,
or of another process's, open with theirs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flowkv.compiled.compiling import SystemClock
from flowkv.core.clock import Clock
from flowkv.core.errors import StateError
from flowkv.core.geometry import COLD, Geometry, PageLayout, page_layout
from flowkv.core.memory import address_of
from flowkv.kvt.basis import Basis, digest
from flowkv.kvt.codec import PageCoder, codable, read_head
from flowkv.tiers.base import Entry, FrameInfo, Load, Outcome, Store, Tier, TierAnswer
from flowkv.tiers.worker import Completions

THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
RECENT_BYTES = 32 << 20
"""Coded pages that are remembered: layers of one page are often loaded one after the other."""
_POLL_S, _BASIS_S, _AGAIN_S = 0.5, 30.0, 60.0
_NOTHING = bytes(32)
_BASIS_LAYOUT = hashlib.sha256(b"flowkv.kvt basis/1").digest()[:16]
_CURRENT_LAYOUT = hashlib.sha256(b"flowkv.kvt current/1").digest()[:16]
_OWN_LAYOUTS = frozenset((_BASIS_LAYOUT, _CURRENT_LAYOUT))


class CodedForm(NamedTuple):
    """Pages of one layer group.

    Attributes:
        layout: Layout of the raw pages.
        raw: Its fingerprint.
        coded: Fingerprint of coded pages.
    """

    layout: PageLayout
    raw: bytes
    coded: bytes


class _Current(msgspec.Struct, frozen=True):
    """Names and sizes of the bases in use, by layer group."""

    bases: dict[int, tuple[bytes, int]]


class PageBases:
    """Bases of a cache's pages, for all of its tiers. Thread-safe.

    Args:
        geometry: Layer groups of the model; None for none.

    Attributes:
        forms: The groups with pages that can be coded.
        counts: Pages and bytes coded and decoded.
    """

    def __init__(self, geometry: Geometry | None) -> None:
        self.forms = dict[int, CodedForm]()
        size = geometry.page_size if geometry is not None else 0
        for group, one in enumerate(geometry.groups if geometry is not None else ()):
            layout = page_layout(one, size)
            if one.kind in ("full", "sliding") and codable(layout):
                raw = layout.fingerprint()
                coded = hashlib.sha256(b"flowkv.kvt/1" + raw).digest()[:16]
                self.forms[group] = CodedForm(layout, raw, coded)
        self.by_raw = {form.raw: form for form in self.forms.values()}
        self.by_coded = {form.coded: form for form in self.forms.values()}
        self._lock = threading.Lock()
        self._known = dict[bytes, PageCoder]()
        self.current, self.blobs = dict[int, PageCoder](), dict[bytes, bytes]()
        self.counts: Counter[str] = Counter()

    def add(self, data: bytes, layout: PageLayout) -> PageCoder:
        """Return the coder of a basis.

        Raises:
            ValueError: The bytes are no basis of such pages.
        """
        name = digest(data)
        with self._lock:
            if name not in self._known:
                self._known[name] = PageCoder(layout, name, Basis.unpack(data, layout))
                self.blobs[name] = data
            return self._known[name]

    def coder(self, name: bytes) -> PageCoder | None:
        """Return the coder of a basis by its name, if it is known."""
        return self._known.get(name)

    def measured(self) -> dict[str, Any]:
        """Return what is coded, and what the bases in use were measured to cost."""
        measured = next((one.basis.measured for one in self.current.values()), {})
        return {"groups": len(self.current), **measured, **self.counts}

    def use(self, coders: dict[int, PageCoder]) -> None:
        """Code pages of these groups from now on; those of others stay raw."""
        self.current = coders


class _Sent(NamedTuple):
    """Items that the inner tier works on.

    Attributes:
        job: Job of this tier.
        numbers: Index of each item in it.
        items: The items, as the caller gave them.
        coded: Form of the frames asked for, or stored.
        scratch: Memory of each coded page that is loaded.
        last: Whether no other form is left to ask for.
        known: Keys that were not deleted since.
        end_ns: Deadline.
        start_ns: Time of submission.
    """

    job: int
    numbers: list[int]
    items: list[Any]
    coded: bool
    scratch: list[Any]
    last: bool
    known: set[bytes]
    end_ns: int
    start_ns: int


class CodecTier:
    """Raw pages in coded form over another tier.

    Args:
        inner: The tier that holds the frames. Its answers are polled here alone.
        bases: Bases of the pages.
        clock: Source of time.

    Attributes:
        page_of: Returns the number of a page in its prompt by its key; None if it is not known.
    """

    def __init__(self, inner: Tier, bases: PageBases, *, clock: Clock | None = None) -> None:
        self.inner, self.bases, self._clock = inner, bases, clock or SystemClock()
        self.name, self.kind, self.capacity_bytes = inner.name, inner.kind, inner.capacity_bytes
        self.page_of: Callable[[bytes], int | None] = lambda key: None
        self._answers, self._pid, self._namespace = Completions(), os.getpid(), _NOTHING
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._sent, self._left = dict[int, _Sent](), Counter[int]()
        self._waits = dict[int, threading.Event]()  # loads and stores of bases
        self._found = dict[int, TierAnswer]()
        self._held, self._lost = set[bytes](), set[bytes]()  # bases that lie here, or did not
        self._basis_lock, self._again_ns = threading.Lock(), 0
        self._cancelled, self._coded = set[int](), set[bytes]()
        self._recent, self._recent_bytes = OrderedDict[bytes, tuple[bytes, FrameInfo]](), 0
        self._closed = self._over = False
        name = f"flowkv {inner.name} codec"  # loads never wait for stores
        self._encoders, self._decoders = (ThreadPoolExecutor(THREADS, name) for _ in range(2))
        self._reader = threading.Thread(target=self._read, name="flowkv codec", daemon=True)
        self._reader.start()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def writable(self) -> bool:
        """Return False where another process owns the tier."""
        return self.inner.writable

    @property
    def shared(self) -> bool:
        """Return whether other processes may write to the tier."""
        return self.inner.shared

    def used_bytes(self) -> int:
        """Return the bytes occupied now, overhead included."""
        return self.inner.used_bytes()

    def frame_bytes(self, body_bytes: int) -> int:
        """Return the most bytes that a frame with such a body occupies here."""
        return self.inner.frame_bytes(body_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a frame is expected."""
        return self.inner.contains(keys)

    # ---- bases

    def read_bases(self, namespace: bytes) -> None:
        """Read the bases that pages of a namespace have in this tier, if none are known."""
        self._namespace = namespace
        if self.bases.current or not self.inner.contains([self._current_key()])[0]:
            return
        raw = self._get(self._current_key(), _CURRENT_LAYOUT, 1 << 16)
        if not raw:
            return
        with suppress(msgspec.MsgspecError):
            said = msgspec.msgpack.decode(raw, type=_Current)
            coders = dict[int, PageCoder]()
            for group, (name, n_bytes) in said.bases.items():
                form = self.bases.forms.get(group)
                coder = self._coder(name, n_bytes, form.layout) if form else None
                if coder is not None:
                    coders[group] = coder
            self.bases.use(coders)

    def store_bases(self) -> bool:
        """Store the bases in use, and that they are; return whether all is stored."""
        if not self.inner.writable:
            return False
        coders, self._again_ns = list(self.bases.current.values()), 0
        self.inner.delete([self._current_key()])
        self._held.difference_update([coder.name for coder in coders])
        return all([self._holds(coder) for coder in coders])

    def basis_bytes(self) -> int:
        """Return the most bytes of the bases in use here; 0 if they take more than they save."""
        sizes = [len(self.bases.blobs[one.name]) for one in self.bases.current.values()]
        n_bytes = sum(map(self.inner.frame_bytes, [*sizes, 1 << 10]))
        return n_bytes if n_bytes <= self.capacity_bytes // 4 else 0

    def _holds(self, coder: PageCoder) -> bool:
        """Return whether a basis lies here; store it if need be: pages are useless without it."""
        with self._basis_lock:
            if coder.name in self._held or self._clock.now_ns() < self._again_ns:
                return coder.name in self._held
            blobs, current = self.bases.blobs, self.bases.current
            if not self.basis_bytes():
                return False
            said = {group: (one.name, len(blobs[one.name])) for group, one in current.items()}
            data = msgspec.msgpack.encode(_Current(said))
            if self._put(_basis_key(coder.name), _BASIS_LAYOUT, blobs[coder.name]) and (
                self._put(self._current_key(), _CURRENT_LAYOUT, data)
            ):
                self._held.add(coder.name)
            else:
                self._again_ns = self._clock.now_ns() + round(_AGAIN_S * 1e9)
            return coder.name in self._held

    def _current_key(self) -> bytes:
        return hashlib.blake2b(self._namespace, digest_size=32, person=b"kvt current").digest()

    def _coder(self, name: bytes, n_bytes: int, layout: PageLayout) -> PageCoder | None:
        """Return the coder of a basis, read from the inner tier if need be."""
        coder = self.bases.coder(name)
        if coder is None and 0 < n_bytes < 1 << 32:
            data = self._get(_basis_key(name), _BASIS_LAYOUT, n_bytes)
            with suppress(ValueError):
                if data is not None and digest(data) == name:
                    coder = self.bases.add(data, layout)
                    self._held.add(name)
            if coder is None and data is not None:
                self._lost.add(name)
        return coder

    def _get(self, key: bytes, layout: bytes, n_bytes: int) -> bytes | None:
        """Return a frame's body, empty if there is none; None if the tier does not say."""
        body = bytearray(n_bytes)
        answer = self._await(self.inner.submit_load, Load(key, memoryview(body), layout))
        if answer.outcome is Outcome.FAILED:
            return None
        return bytes(body[: answer.n_bytes]) if answer.outcome is Outcome.HIT else b""

    def _put(self, key: bytes, layout: bytes, data: bytes) -> bool:
        info = FrameInfo("memo", 0, 0, layout, _NOTHING, self._namespace, 0, 0, len(data))
        item = Store(key, info, memoryview(data))
        return self._await(self.inner.submit_store, item).outcome is Outcome.STORED

    def _await(self, submit: Any, item: Load | Store) -> TierAnswer:
        failed = TierAnswer(0, 0, item.key, Outcome.FAILED, "deadline")
        if threading.current_thread() is self._reader:  # at the end, where no other thread works
            return failed
        done = threading.Event()
        with self._lock:
            job = submit([item], deadline_s=_BASIS_S)
            self._waits[job] = done
            self._changed.notify_all()
        if not done.wait(_BASIS_S + 1):
            return failed
        return self._found.pop(job, failed)

    # ---- jobs

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Start reading, and decoding what is coded; return a job number.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        job, start_ns, end_ns = self._begin(len(items), deadline_s)
        plain, coded = list[int](), list[int]()
        for number, item in enumerate(items):
            guess = item.layout in self.bases.by_raw and self._guess(item.key)
            recent = self._recent.get(item.key) if guess else None
            if recent is not None and recent[1].fidelity <= item.fidelity:
                self._run(self._decode, job, number, item, *recent, start_ns)
            else:
                (coded if guess else plain).append(number)
        for those, kind in ((plain, False), (coded, True)):
            self._load(job, those, [items[n] for n in those], kind, False, (start_ns, end_ns))
        return job

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Start coding pages and writing them, and all else as it is; return a job number.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        job, *times = self._begin(len(items), deadline_s)
        plain = list[int]()
        for number, item in enumerate(items):
            coder, page_no = self._coder_for(item), None
            if coder is not None:
                page_no = self.page_of(item.key)
            if coder is None or page_no is None:
                plain.append(number)
            else:
                self._run(self._encode, job, number, item, coder, page_no, times)
        self._store(job, plain, [items[n] for n in plain], [items[n] for n in plain], times)
        return job

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Return the answers that are ready; wait up to `timeout_s` for the first one."""
        return self._answers.poll(timeout_s)

    def fileno(self) -> int:
        """Return an eventfd that is readable while answers wait."""
        return self._answers.fileno()

    def cancel(self, job: int) -> None:
        """Answer the unanswered items of a job "cancelled", where that is possible."""
        with self._lock:
            if job not in self._left:
                return
            self._cancelled.add(job)
            inner = [number for number, sent in self._sent.items() if sent.job == job]
        for number in inner:
            self.inner.cancel(number)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget frames at once; return how many were present."""
        try:
            return self.inner.delete(keys)
        finally:  # loads that began meanwhile have read them
            self.drop_copies(keys)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Delete frames and leave no copy of their bytes; see `Tier.erase`."""
        try:
            return self.inner.erase(keys)
        finally:
            self.drop_copies(keys)

    def scan(self) -> Iterator[Entry]:
        """Yield all frames, coded pages as the raw pages that they stand for."""
        for entry in self.inner.scan():
            if entry.info.layout in _OWN_LAYOUTS:
                continue
            form = self.bases.by_coded.get(entry.info.layout)
            if form is not None:
                self._coded.add(entry.key)
                entry = entry._replace(info=_as_raw(entry.info, form))
            yield entry

    def close(self) -> None:
        """Finish or fail the items in flight, and close the inner tier."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        here = self._pid == os.getpid()  # threads do not exist in a forked child
        if here:
            self._encoders.shutdown()
            self._decoders.shutdown()
        self.inner.close()
        with self._lock:
            self._over = True
            self._changed.notify_all()
        if here and threading.current_thread() is not self._reader:
            self._reader.join()
        self._answers.close()

    def _begin(self, count: int, deadline_s: float) -> tuple[int, int, int]:
        if self._closed or self._pid != os.getpid():
            why = "is closed" if self._pid == os.getpid() else "was opened before a fork"
            raise StateError(f"tier {self.name!r} {why}", "Open another one, here")
        job, start_ns = self._answers.new_job(), self._clock.now_ns()
        with self._lock:
            if count:
                self._left[job] = count
        return job, start_ns, start_ns + round(min(deadline_s, 1e9) * 1e9)

    def _guess(self, key: bytes) -> bool:
        """Return whether the frame of a key is most likely coded."""
        return key in self._coded or (self.inner.shared and bool(self.bases.current))

    def _coder_for(self, item: Store) -> PageCoder | None:
        info = item.info
        plain = info.kind == "page" and not info.codec
        form = self.bases.forms.get(info.group) if plain else None
        whole = info.world == 1 and not info.head_stop
        if form is None or info.layout != form.raw or not whole:
            return None
        if info.tokens != form.layout.page_size or len(item.body) != form.layout.page_bytes:
            return None
        return self.bases.current.get(info.group)

    def _run(self, work: Callable[..., None], *args: Any) -> None:
        pool = self._decoders if work == self._decode else self._encoders
        try:
            pool.submit(self._guarded, work, *args)
        except RuntimeError:  # the tier is closed, or no thread can start
            self._guarded(work, *args)

    def _guarded(
        self, work: Callable[..., None], job: int, number: int, item: Any, *more: Any
    ) -> None:
        failed = TierAnswer(job, number, item.key, Outcome.FAILED, "cancelled")
        if job in self._cancelled:
            self._post([failed])
            return
        try:
            work(job, number, item, *more)
        except Exception as error:
            self._post([failed._replace(reason=f"{type(error).__name__}: {error}")])

    def _deadline_s(self, end_ns: int) -> float:
        return max((end_ns - self._clock.now_ns()) / 1e9, 1e-3)

    def _load(
        self,
        job: int,
        numbers: list[int],
        items: list[Load],
        coded: bool,
        last: bool,
        times: tuple[int, int],
    ) -> None:
        if not items:
            return
        scratch: list[Any] = [None] * len(items)
        asked = list(items)
        if coded:
            for n, item in enumerate(items):
                form = self.bases.by_raw[item.layout]
                scratch[n] = np.empty(form.layout.page_bytes, np.uint8)
                asked[n] = Load(item.key, scratch[n].data, form.coded, item.fidelity)
        self._send(
            self.inner.submit_load, asked, times, (job, numbers, items, coded, scratch, last)
        )

    def _store(
        self,
        job: int,
        numbers: list[int],
        items: list[Store],
        sent: list[Store],
        times: Sequence[int],
        coded: bool = False,
    ) -> None:
        if items:
            kind = job, numbers, items, coded, [None] * len(items), True
            self._send(self.inner.submit_store, sent, times, kind)

    def _send(
        self,
        submit: Any,
        items: Sequence[Any],
        times: Sequence[int],
        kind: tuple[int, list[int], list[Any], bool, list[Any], bool],
    ) -> None:
        with self._lock:
            try:
                inner = submit(items, deadline_s=self._deadline_s(times[1]))
            except StateError:
                self._post_failed(*kind[:3])
                return
            known = {item.key for item in items}
            self._sent[inner] = _Sent(*kind, known, end_ns=times[1], start_ns=times[0])
            self._left[-inner] = len(items)
            self._changed.notify_all()

    def _read(self) -> None:
        """Route the inner tier's answers until it is closed, and fail what it leaves unanswered."""
        while True:
            with self._lock:
                while not (self._sent or self._waits or self._over):
                    self._changed.wait()
                over = self._over
            answers = self.inner.poll(0.0 if over else _POLL_S)
            for answer in answers:
                self._route(answer)
            if over and not answers:
                break
        with self._lock:
            left = [*self._sent.values()]
            self._sent.clear()
        for sent in left:
            self._post_failed(sent.job, sent.numbers, sent.items)

    def _route(self, answer: TierAnswer) -> None:
        with self._lock:
            if (done := self._waits.pop(answer.job, None)) is not None:
                self._found[answer.job] = answer
                done.set()
                return
            sent = self._sent.get(answer.job)
            if sent is None:
                return
            hit = answer.outcome is Outcome.HIT and sent.coded and answer.info is not None
            data = bytes(sent.scratch[answer.item][: answer.n_bytes]) if hit else b""
            if answer.info is not None and data and answer.key in sent.known:
                self._remember(answer.key, data, answer.info)
            self._left[-answer.job] -= 1
            if not self._left[-answer.job]:
                del self._sent[answer.job], self._left[-answer.job]
        item, number = sent.items[answer.item], sent.numbers[answer.item]
        if isinstance(item, Store):
            if answer.outcome is Outcome.STORED and sent.coded and item.key in sent.known:
                self._coded.add(item.key)
        elif hit:
            self._run(self._decode, sent.job, number, item, data, answer.info, sent.start_ns)
            return
        elif answer.reason == "layout" and item.layout in self.bases.by_raw and not sent.last:
            if sent.coded:
                self._coded.discard(item.key)
            times = sent.start_ns, sent.end_ns
            self._load(sent.job, [number], [item], not sent.coded, True, times)
            return
        self._post([answer._replace(job=sent.job, item=number)])

    def _post_failed(self, job: int, numbers: list[int], items: list[Any]) -> None:
        these = zip(numbers, items, strict=True)
        self._post([TierAnswer(job, n, one.key, Outcome.FAILED, "closed") for n, one in these])

    def _post(self, answers: list[TierAnswer]) -> None:
        with self._lock:
            for answer in answers:
                self._left[answer.job] -= 1
                if self._left[answer.job] <= 0:
                    del self._left[answer.job]
                    self._cancelled.discard(answer.job)
        self._answers.post(answers)

    def _decode(
        self, job: int, number: int, item: Load, data: bytes, info: FrameInfo, start_ns: int
    ) -> None:
        form, head = self.bases.by_raw[item.layout], read_head(memoryview(data))
        answer = TierAnswer(job, number, item.key, Outcome.MISS, "layout")
        coder = head and self._coder(head.basis, head.basis_bytes, form.layout)
        layers, step = form.layout.layers, form.layout.stripe_stride_bytes
        count = item.stripes or layers - item.first
        if head is not None and coder:
            n_bytes = count * step
            if not 0 <= item.first < item.first + count <= layers:
                answer = answer._replace(reason="stripes")
            elif item.target.nbytes < n_bytes or item.target.readonly:
                answer = answer._replace(outcome=Outcome.FAILED, reason="target")
            elif coder.decode(memoryview(data), item.target.cast("B")[:n_bytes], item.first, count):
                answer = answer._replace(outcome=Outcome.HIT, reason="", n_bytes=n_bytes)
                answer = answer._replace(info=_as_raw(info, form))
                self.bases.counts["decoded_bytes"] += n_bytes
            else:
                answer = answer._replace(reason="digest")
        # Never readable again, and in the way of a new one.
        useless = head is None or answer.reason == "digest"
        useless |= head is not None and not coder and head.basis in self._lost
        if useless and self.inner.writable:
            self.delete([item.key])
        self._post([answer._replace(seconds=(self._clock.now_ns() - start_ns) / 1e9)])

    def _encode(
        self, job: int, number: int, item: Store, coder: PageCoder, page_no: int, times: list[int]
    ) -> None:
        if self._clock.now_ns() >= times[1]:
            self._post([TierAnswer(job, number, item.key, Outcome.FAILED, "deadline")])
            return
        data, blob = None, self.bases.blobs[coder.name]
        if self._holds(coder):
            data = coder.encode(_writable(item.body), page_no, len(blob))
        sent, coded = item, data is not None
        if data is not None:
            info = item.info._replace(codec=COLD, fidelity=COLD, stripe_bytes=len(data))
            info = info._replace(layout=self.bases.forms[info.group].coded)
            sent = Store(item.key, info, memoryview(data))
            counts = self.bases.counts
            counts["pages"] += 1
            counts["raw_bytes"] += len(item.body)
            counts["coded_bytes"] += len(data)
        self._store(job, [number], [item], [sent], times, coded)

    def _remember(self, key: bytes, data: bytes, info: FrameInfo) -> None:
        with self._lock:
            if key not in self._recent:
                self._recent[key] = data, info
                self._recent_bytes += len(data)
            while self._recent_bytes > RECENT_BYTES:
                self._recent_bytes -= len(self._recent.popitem(last=False)[1][0])

    def drop_copies(self, keys: Sequence[bytes]) -> None:
        """Remove what is remembered of frames that were deleted, here or by others."""
        with self._lock:
            for sent in self._sent.values():
                sent.known.difference_update(keys)
            for key in keys:
                self._coded.discard(key)
                if (known := self._recent.pop(key, None)) is not None:
                    self._recent_bytes -= len(known[0])


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
