"""One rank's view of a tier that ranks of any shard layout may have written; heads of frames."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from flowkv.core import compiling
from flowkv.core.errors import ConfigError
from flowkv.core.geometry import CODECS, Geometry, PageLayout, page_layout
from flowkv.core.keys import KEY_BYTES, Shard
from flowkv.tiers.base import (
    Entry,
    FrameInfo,
    Load,
    Outcome,
    Store,
    Tier,
    TierAnswer,
    reserved_bytes,
)
from flowkv.tiers.remote.erasures import RemoteErasures

# Which KV heads a frame holds, what it is called for that, and how heads move between frames.
#
# Under tensor parallelism each rank holds some of a layer's KV heads. A stripe is one contiguous
# run per head (`core.geometry`), each with everything its codec needs, so the stripes of heads [a,
# b) can be made from those of any frames that cover them.
#
# All ranks, and a model in one piece, name a page alike: by the chain key of the *whole* model.
# Below that the name also says which heads: it is the chain key XOR-ed with a digest of the
# range, which a listing can take back. All heads have the key itself, so that an ordinary cache
# and a single rank share frames. What has no heads (states of recurrent layers) is named for one
# rank of one layout.

_TAG = b"flowkv.shard/1\0\0"


class Heads(NamedTuple):
    """A range of a layer's KV heads.

    Attributes:
        start: First one.
        stop: One past the last.
        total: Heads of the whole model; 0 for what has no heads: rank `start` of `stop` then.
    """

    start: int
    stop: int
    total: int


@lru_cache(maxsize=1 << 12)
def _mask(heads: Heads) -> int:
    if heads.stop - heads.start == (heads.total or 1) and not heads.start:
        return 0
    text = _TAG + b"".join(number.to_bytes(4, "little") for number in heads)
    return int.from_bytes(hashlib.sha256(text).digest(), "little")


def stored_key(key: bytes, heads: Heads) -> bytes:
    """What a page's heads are called below; of such a name, the page's key again."""
    if len(key) != KEY_BYTES:
        return key
    return (int.from_bytes(key, "little") ^ _mask(heads)).to_bytes(KEY_BYTES, "little")


class Form(NamedTuple):
    """The meaning of a layout fingerprint for a rank.

    Attributes:
        group: Index of the layer group.
        codec: Index of the codec.
        mine: Heads of this rank.
        layout: Of this rank's pages, or of one layer of them.
    """

    group: int
    codec: int
    mine: Heads
    layout: PageLayout


class Division:
    """The heads of a model, as one rank sees them.

    Args:
        geometry: Of the whole model.
        shard: Which rank of how many this is. A head range, if one is given, must be what that rank
            holds of every group.

    Raises:
        ConfigError: The shard names other heads than the rank holds.
        GeometryError: There is no such rank, or heads cannot be divided evenly.
    """

    def __init__(self, geometry: Geometry, shard: Shard) -> None:
        self.geometry, self.shard = geometry, shard
        self.own = Heads(shard.rank, shard.world, 0)
        self._mine: list[Heads] = []
        self._forms: dict[bytes, list[Form]] = {}
        for number, group in enumerate(geometry.groups):
            held = group.heads(shard.rank, shard.world)
            if shard.head_stop and (shard.head_start, shard.head_stop) != (held.start, held.stop):
                raise ConfigError(
                    f"heads {shard.head_start} to {shard.head_stop} for rank {shard.rank}",
                    f"It holds {held.start} to {held.stop} of group {number}: leave the range out",
                )
            self._mine.append(Heads(held.start, held.stop, group.kv_heads))
            self._add(number)

    def _add(self, number: int) -> None:
        mine, layers = self._mine[number], len(self.geometry.groups[number].layers)
        for codec in range(len(CODECS)):
            for depth in sorted({1, layers}, reverse=True):
                layout = self._layout(number, mine, codec, depth)
                if layout is not None:
                    form = Form(number, codec, mine, layout)
                    self._forms.setdefault(layout.fingerprint(), []).append(form)

    def _layout(self, group: int, heads: Heads, codec: int, depth: int) -> PageLayout | None:
        """Layout of some heads of the first `depth` layers of a page: all of them, or one."""
        whole = self.geometry.groups[group]
        part = msgspec.structs.replace(
            whole, kv_heads=heads.stop - heads.start, layers=whole.layers[:depth]
        )
        try:
            return page_layout(part, self.geometry.page_size, CODECS[codec])
        except ConfigError:
            return None  # the codec needs larger pages or heads

    # ---- names

    def forms(self, layout: bytes) -> Sequence[Form]:
        """What pages of such a layout may be; none if it is no layout of this rank's pages."""
        return self._forms.get(layout, ())

    def covers(self, mine: Heads) -> list[list[Heads]]:
        """Ways to get some heads from frames of even layouts.

        First these heads themselves, then larger frames before smaller ones.
        """
        found = [[mine]]
        for each in range(mine.total, 0, -1):
            if mine.total % each == 0:
                parts = range(mine.start // each, -(-mine.stop // each))
                cover = [Heads(n * each, (n + 1) * each, mine.total) for n in parts]
                if cover != [mine]:
                    found.append(cover)
        return found

    def names(self, key: bytes) -> list[list[bytes]]:
        """Sets of frames each of which would do for a key; for what has no heads, one frame."""
        ways = [cover for mine in dict.fromkeys(self._mine) for cover in self.covers(mine)]
        return [[stored_key(key, heads) for heads in way] for way in (*ways, [self.own])]

    def every_name(self, key: bytes) -> list[bytes]:
        """Names of all frames that hold heads of a page, of any even layout."""
        found = [stored_key(key, self.own)]
        for total in {mine.total for mine in self._mine}:
            for cover in self.covers(Heads(0, total, total)):
                found += [stored_key(key, heads) for heads in cover]
        return list(dict.fromkeys(found))

    def held(self, info: FrameInfo) -> tuple[Heads, int]:
        """The heads that a frame holds, and of how many layers; `own` and 0 if it has none."""
        if info.group < len(self._mine):
            total = self._mine[info.group].total
            heads = Heads(info.head_start, info.head_stop or total, total)
            if heads.start < heads.stop <= total:
                for depth in sorted({1, len(self.geometry.groups[info.group].layers)}):
                    layout = self._layout(info.group, heads, info.codec, depth)
                    if layout is not None and layout.fingerprint() == info.layout:
                        return heads, depth
        return self.own, 0

    def form_of(self, info: FrameInfo) -> Form | None:
        """What this rank makes of the page, or layer of one, that a frame holds heads of."""
        _, depth = self.held(info)
        if not depth:
            return None
        mine = self._mine[info.group]
        layout = self._layout(info.group, mine, info.codec, depth)
        return Form(info.group, info.codec, mine, layout) if layout else None

    # ---- what frames say

    def mark(self, info: FrameInfo) -> tuple[Heads, FrameInfo]:
        """The heads of a page that this rank stores, and its description with them."""
        form = next((f for f in self.forms(info.layout) if f.group == info.group), None)
        if form is None or form.codec != info.codec:
            return self.own, info
        heads = form.mine
        if heads.stop - heads.start == heads.total:  # as a cache without ranks writes it
            return heads, info._replace(rank=0, world=1, head_start=0, head_stop=0)
        rank, world = self.shard.rank, self.shard.world
        return heads, info._replace(
            rank=rank, world=world, head_start=heads.start, head_stop=heads.stop
        )

    def joined(self, form: Form, infos: Sequence[FrameInfo]) -> FrameInfo:
        """What is said of this rank's page, made from such frames."""
        given = infos[0]._replace(
            layout=form.layout.fingerprint(),
            stripe_bytes=form.layout.stripe_stride_bytes,
            fidelity=max(info.fidelity for info in infos),
        )
        return self.mark(given)[1]

    # ---- bytes

    def part_layout(self, form: Form, heads: Heads) -> PageLayout:
        """The layout of other heads of the same pages, or layers of pages."""
        layout = self._layout(form.group, heads, form.codec, form.layout.layers)
        assert layout is not None, "a codec that can hold this rank's heads can hold any"
        return layout

    def assemble(
        self, form: Form, parts: Iterable[tuple[Heads, memoryview]], target: memoryview
    ) -> None:
        """Puts the stripes of this rank's heads together.

        Args:
            form: Of this rank's page.
            parts: Heads and the same stripes of frames that cover them.
            target: Memory for these stripes; what pads them is blanked.
        """
        mine, layout = form.mine, form.layout
        sink = np.frombuffer(target, np.uint8).reshape(-1, layout.stripe_stride_bytes)
        sink[:, layout.stripe_bytes :] = 0
        for heads, memory in parts:
            source = np.frombuffer(memory, np.uint8).reshape(len(sink), -1)
            first, last = max(heads.start, mine.start), min(heads.stop, mine.stop)
            run = layout.run_bytes
            given = source[:, (first - heads.start) * run : (last - heads.start) * run]
            sink[:, (first - mine.start) * run : (last - mine.start) * run] = given


class _Way(NamedTuple):
    """A way to read one page: its form, and heads that cover this rank's."""

    form: Form
    cover: list[Heads]

    @property
    def direct(self) -> bool:
        """Whether it is this rank's own frame, straight to the target."""
        return self.cover == [self.form.mine]


class _ShardedRequest:
    """One item of the caller's, on its way."""

    def __init__(self, job: int, index: int, item: Load | Store, end_s: float) -> None:
        self.job, self.index, self.item, self.end_s = job, index, item, end_s
        self.start_s, self.reason = compiling.now_s(), ""
        self.ways: list[_Way] = []  # not tried yet
        self.way: _Way | None = None  # None: one frame, as it is
        self.parts: list[tuple[Heads, memoryview]] = []
        self.answers: list[TierAnswer | None] = [None]


class ShardedTier:
    """A tier whose pages hold the heads of one rank, whoever wrote the heads below, and how.

    A page that this rank stored is read straight into its target. One that lies below in other
    pieces (fewer ranks, more ranks, one) is cut out of them or put together, from stripes that the
    inner tier verified. What a rank stores says which heads it holds, so that others can do so too.

    Args:
        inner: Where the frames lie.
        geometry: Of the *whole* model; pages that are stored and loaded have the layout of
            `geometry.local(shard.rank, shard.world)`.
        shard: Which rank of how many this is.

    Raises:
        ConfigError: The shard names other heads than the rank holds.
        GeometryError: There is no such rank, or heads cannot be divided evenly.
    """

    def __init__(self, inner: Tier, geometry: Geometry, shard: Shard) -> None:
        self.inner, self.division = inner, Division(geometry, shard)
        self.name, self.kind = inner.name, inner.kind
        self.capacity_bytes = inner.capacity_bytes
        if hasattr(inner, "fileno"):  # readable while answers wait
            self.fileno = inner.fileno
        self._lock, self._jobs = threading.Lock(), 0
        self._waiting: dict[int, list[tuple[_ShardedRequest, int] | None]] = {}
        self._ready: list[TierAnswer] = []

    # ---- what is there

    @property
    def writable(self) -> bool:
        """What the inner tier says."""
        return self.inner.writable

    @property
    def shared(self) -> bool:
        """What the inner tier says."""
        return self.inner.shared

    @property
    def erasure_log(self) -> Path | RemoteErasures | None:
        """What the inner tier says: prompts have one name, whatever the ranks."""
        return getattr(self.inner, "erasure_log", None)

    def in_use(self, namespace: bytes) -> bool:
        """What the inner tier says, if it knows."""
        known: Callable[[bytes], bool] | None = getattr(self.inner, "in_use", None)
        return known is None or known(namespace)

    def used_bytes(self) -> int:
        """Bytes of everybody's frames."""
        return self.inner.used_bytes()

    @property
    def reserved_bytes(self) -> int:
        """What the inner tier says."""
        return reserved_bytes(self.inner)

    def no_room(self, n_bytes: int) -> str:
        """What the inner tier says, if it does."""
        own: Callable[[int], str] | None = getattr(self.inner, "no_room", None)
        return "" if own is None else own(n_bytes)

    def frame_bytes(self, body_bytes: int) -> int:
        """What the inner tier says."""
        return self.inner.frame_bytes(body_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are there with all heads of this rank, however they are divided."""
        asked = [self.division.names(key) for key in keys]
        return [any(known) for known in self._known(asked)]

    def _known(self, asked: Sequence[Sequence[Sequence[bytes]]]) -> list[list[bool]]:
        """For each page, which sets of frames are believed to be there completely."""
        names = [name for sets in asked for frames in sets for name in frames]
        there = dict(zip(names, self.inner.contains(names) if names else (), strict=True))
        return [[all(there[name] for name in frames) for frames in sets] for sets in asked]

    def scan(self) -> Iterator[Entry]:
        """Pages with all heads of this rank, and whatever else is there; about oldest first.

        What this rank can make no page of is listed frame by frame, under names by which it can be
        deleted and erased, so that a tenant can be forgotten from any rank.
        """
        own, pieces = self.division.own, dict[tuple[bytes, int], dict[Heads, Entry]]()
        for entry in self.inner.scan():
            heads, _ = self.division.held(entry.info)
            name = stored_key(entry.key, heads), entry.info.codec
            pieces.setdefault(name, {})[heads] = entry
        listed: set[bytes] = set()
        for (key, _), found in pieces.items():
            mine = self._listed(key, found)
            rest = [e._replace(key=stored_key(e.key, own)) for e in found.values()]
            for entry in [mine] if mine else rest:
                if entry.key not in listed:
                    listed.add(entry.key)
                    yield entry

    def survey(self) -> None:
        """Has the inner tier look anew at what others wrote, if it does not see that by itself.

        Raises:
            StoreError: It cannot.
        """
        if hasattr(self.inner, "survey"):
            self.inner.survey()

    def _listed(self, key: bytes, pieces: dict[Heads, Entry]) -> Entry | None:
        division = self.division
        if division.own in pieces:
            return pieces[division.own]._replace(key=key)
        info = next(iter(pieces.values())).info
        form = division.form_of(info)
        for cover in division.covers(form.mine) if form else ():
            if form is not None and all(heads in pieces for heads in cover):
                used = [pieces[heads] for heads in cover]
                given = division.joined(form, [entry.info for entry in used])
                return Entry(key, given, sum(entry.n_bytes for entry in used))
        return None

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets pages, with all frames that hold heads of this rank."""
        names = [[n for frames in self.division.names(key) for n in frames] for key in keys]
        return self._forget(keys, names, self.inner.delete)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Erases pages, with the heads of all ranks.

        Raises:
            StoreError: Some may still be there.
        """
        names = [self.division.every_name(key) for key in keys]
        return self._forget(keys, names, self.inner.erase)

    def _forget(
        self,
        keys: Sequence[bytes],
        names: Sequence[Sequence[bytes]],
        forget: Callable[[Sequence[bytes]], int],
    ) -> int:
        there = self.contains(keys)
        forget(list(dict.fromkeys(name for several in names for name in several)))
        return sum(there) - sum(self.contains(keys))

    def close(self) -> None:
        """Closes the inner tier."""
        self.inner.close()

    # ---- loads

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Reads this rank's own frames, or those of other layouts that cover them."""
        with self._lock:
            requests = self._requests(items, deadline_s)
            self._find_ways(requests)
            self._load(requests)
            return self._jobs

    def _requests(self, items: Sequence[Load | Store], deadline_s: float) -> list[_ShardedRequest]:
        self._jobs += 1
        end_s = compiling.now_s() + deadline_s
        return [_ShardedRequest(self._jobs, n, item, end_s) for n, item in enumerate(items)]

    def _find_ways(self, requests: Sequence[_ShardedRequest]) -> None:
        """What may be read for each request: what is believed to be there, else the rank's own."""
        for request in requests:
            request.ways = [
                _Way(form, cover)
                for form in self.division.forms(_load_of(request).layout)
                for cover in self.division.covers(form.mine)
            ]
        asked = [
            [[stored_key(request.item.key, heads) for heads in way.cover] for way in request.ways]
            for request in requests
        ]
        for request, known in zip(requests, self._known(asked), strict=True):
            believed = [way for way, is_there in zip(request.ways, known, strict=True) if is_there]
            request.ways = believed or [way for way in request.ways if way.direct]

    def _load(self, requests: Sequence[_ShardedRequest]) -> None:
        """Starts the next way of each request."""
        loads: list[Load] = []
        places: list[tuple[_ShardedRequest, int] | None] = []
        for request in requests:
            load, request.parts = _load_of(request), []
            request.way = request.ways.pop(0) if request.ways else None
            if request.way is None:
                fresh = [load._replace(key=stored_key(load.key, self.division.own))]
            elif request.way.direct:
                fresh = [load._replace(key=stored_key(load.key, request.way.form.mine))]
            else:
                fresh = [self._part(request, request.way, heads) for heads in request.way.cover]
            request.answers = [None] * len(fresh)
            places += [(request, number) for number in range(len(fresh))]
            loads += fresh
        if loads:
            left_s = max(0.0, min(request.end_s for request in requests) - compiling.now_s())
            self._waiting[self.inner.submit_load(loads, deadline_s=left_s)] = places

    def _part(self, request: _ShardedRequest, way: _Way, heads: Heads) -> Load:
        """The request for some heads, into memory of their own."""
        load, layout = _load_of(request), self.division.part_layout(way.form, heads)
        stripes = load.stripes or max(0, layout.layers - load.first)
        memory = memoryview(bytearray(stripes * layout.stripe_stride_bytes))
        request.parts.append((heads, memory))
        key = stored_key(load.key, heads)
        return load._replace(key=key, target=memory, layout=layout.fingerprint())

    # ---- stores

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Writes this rank's heads of pages, and what has no heads."""
        stores = []
        for item in items:
            heads, info = self.division.mark(item.info)
            stores.append(item._replace(key=stored_key(item.key, heads), info=info))
        with self._lock:
            requests = self._requests(items, deadline_s)
            if stores:
                inner = self.inner.submit_store(stores, deadline_s=deadline_s)
                self._waiting[inner] = [(request, 0) for request in requests]
            return self._jobs

    # ---- answers

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Answers that are ready; waits up to `timeout_s` for the first one."""
        end_s = time.monotonic() + timeout_s
        while True:
            fresh = self.inner.poll(max(0.0, end_s - time.monotonic()))
            with self._lock:
                for answer in fresh:
                    self._take(answer)
                answers, self._ready = self._ready, []
            if answers or time.monotonic() >= end_s:
                return answers

    def cancel(self, job: int) -> None:
        """Cancels what the inner tier still has of a job."""
        with self._lock:
            for inner, places in self._waiting.items():
                if any(place and place[0].job == job for place in places):
                    self.inner.cancel(inner)

    def _take(self, answer: TierAnswer) -> None:
        places = self._waiting[answer.job]
        place = places[answer.item]
        assert place is not None, "answered twice"
        places[answer.item] = None
        if not any(places):
            del self._waiting[answer.job]
        request, part = place
        request.answers[part] = answer
        if all(request.answers):
            self._end(request, [answer for answer in request.answers if answer])

    def _end(self, request: _ShardedRequest, answers: list[TierAnswer]) -> None:
        """All parts are answered: with a page, with another way to get it, or with the reason."""
        bad = next((a for a in answers if a.outcome is Outcome.FAILED), None)
        bad = bad or next((a for a in answers if a.outcome is Outcome.MISS), None)
        answer, way = bad or answers[0], request.way
        if answer.outcome is Outcome.MISS:
            request.reason = request.reason or answer.reason
            if request.ways:
                self._load([request])
                return
            answer = answer._replace(reason=request.reason)
        elif answer.outcome is Outcome.HIT and way is not None and not way.direct:
            answer = self._joined(request, way, answers)
        seconds = compiling.now_s() - request.start_s
        answer = answer._replace(
            job=request.job, item=request.index, key=request.item.key, seconds=seconds
        )
        self._ready.append(answer)

    def _joined(self, request: _ShardedRequest, way: _Way, answers: list[TierAnswer]) -> TierAnswer:
        target, stride = _load_of(request).target, way.form.layout.stripe_stride_bytes
        infos = [answer.info for answer in answers if answer.info is not None]
        if [self.division.held(info)[0] for info in infos] != way.cover:
            return answers[0]._replace(outcome=Outcome.MISS, reason="key", info=None, n_bytes=0)
        n_bytes = answers[0].n_bytes // infos[0].stripe_bytes * stride
        if target.readonly or target.nbytes < n_bytes:
            reason = "target"
            return answers[0]._replace(outcome=Outcome.FAILED, reason=reason, info=None, n_bytes=0)
        self.division.assemble(way.form, request.parts, target.cast("B")[:n_bytes])
        info: FrameInfo = self.division.joined(way.form, infos)
        return answers[0]._replace(info=info, n_bytes=n_bytes)


def _load_of(request: _ShardedRequest) -> Load:
    assert isinstance(request.item, Load)
    return request.item
