"""`check_tier` and `check_codec`: what keeps frames, and what is in them, whoever wrote it.

FlowKV's own codecs write the same bytes everywhere: seal on one machine, read on any other.
Running the suite with `device="cuda"` proves it for the compiler and the GPU at hand.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from flowkv.core.errors import StoreError
from flowkv.core.geometry import CODECS, GRANULE_BYTES, LayerGroup, PageLayout, page_layout
from flowkv.kernels import reference as reference_codec
from flowkv.kernels import transcode
from flowkv.kernels.dispatch import SOUND
from flowkv.kernels.loss import bounds
from flowkv.testing.stories import (
    RuleBasedStateMachine,
    given,
    invariant,
    precondition,
    require,
    rule,
    run_state_machine_as_test,
    settings,
    st,
    tell,
    told,
)
from flowkv.tiers.base import FrameInfo, Load, Outcome, Store, Tier, TierAnswer
from flowkv.tiers.frame import KINDS

# What a tier may hold, seen from outside: the model that `check_tier` compares it with.
#
# With several jobs in flight nobody outside knows which came first. So the model keeps, per key,
# all frames that may be there now (`None` stands for nothing there), and every request collects
# what may have been there while it was under way. An answer must agree with one of them; one to
# a request that nothing disturbed tells which one it is.


class Frame(NamedTuple):
    """A description and a body."""

    info: FrameInfo
    body: bytes

    def part(self, request: Load) -> bytes | None:
        """The stripes wished for; None if the frame has not got them."""
        stripes = len(self.body) // self.info.stripe_bytes
        end = request.first + request.stripes if request.stripes else stripes
        if not 0 <= request.first < end <= stripes:
            return None
        return self.body[request.first * self.info.stripe_bytes : end * self.info.stripe_bytes]

    def problems(self, request: Load) -> set[tuple[Outcome, str]]:
        """Why a request for this frame cannot be granted; any of the reasons may be given."""
        found = set()
        part = self.part(request)
        if self.info.layout != request.layout:
            found.add((Outcome.MISS, "layout"))
        if self.info.fidelity > request.fidelity:
            found.add((Outcome.MISS, "fidelity"))
        if part is None:
            found.add((Outcome.MISS, "stripes"))
        if request.target.readonly or (part is not None and request.target.nbytes < len(part)):
            found.add((Outcome.FAILED, "target"))
        return found


class TierRequest:
    """One item in flight.

    Args:
        item: What was asked of the tier.
        frame: What a store should make of the key.
        due_s: When it must be answered, in `time.monotonic` seconds.
        step: Number of the call that submitted it.

    Attributes:
        seen: What may have been there since it was submitted.
        alone: Whether no store or deletion of the key overlapped with it.
        deleted: Whether the key was deleted meanwhile.
        brought: Whether its frame may be there only because of it.
        room_bytes: Most bytes that the tier may need, counting everything in flight.
        cancelled: Whether it was to be cancelled.
        n_bytes: Bytes of its memory.
    """

    def __init__(
        self, item: Load | Store, frame: Frame | None, due_s: float, step: int = 0
    ) -> None:
        self.item, self.frame, self.due_s, self.step = item, frame, due_s, step
        self.seen: set[Frame | None] = set()
        self.alone, self.deleted, self.brought, self.cancelled = True, False, False, False
        self.room_bytes = 0
        self.n_bytes = (item.target if isinstance(item, Load) else item.body).nbytes


class Model:
    """All keys, and all requests in flight.

    Args:
        lossy: Frames may vanish at any time, and a store that failed may be there all the same.

    Attributes:
        may: What may be there now, by key.
        flying: Requests in flight.
        doubtful: Keys whose frame may be damaged: said to be there, and refused when it is read.
        promised: Keys whose frame was written, and answered `STORED`, since the last `doubt`.
    """

    def __init__(self, lossy: bool) -> None:
        self.lossy = lossy
        self.doubtful: set[bytes] = set()
        self.promised: set[bytes] = set()
        self.may: defaultdict[bytes, set[Frame | None]] = defaultdict(lambda: {None})
        self.flying: list[TierRequest] = []
        self._ghosts: defaultdict[bytes, set[Frame]] = defaultdict(set)

    def stores(self, key: bytes) -> list[TierRequest]:
        """Stores of a key that are in flight."""
        return [request for request in self.flying if request.frame and request.item.key == key]

    def submit(self, request: TierRequest) -> None:
        """A request was given to the tier."""
        key, may = request.item.key, self.may[request.item.key]
        others = [other for other in self.flying if other.item.key == key]
        if request.frame is not None:
            for other in others:
                other.alone = False
            request.alone = may == {None} and not others
            if None in may:
                self._add(request)
        else:
            request.alone = not any(other.frame for other in others)
        request.seen = set(may)
        self.flying.append(request)

    def delete(self, key: bytes) -> None:
        """A key was deleted; stores in flight may bring it back."""
        self.may[key] = {None, *self._ghosts[key]}
        self.doubtful.discard(key)
        self.promised.discard(key)
        for request in self.flying:
            if request.item.key == key:
                request.alone, request.deleted = False, True
                request.seen.add(None)
        for request in self.stores(key):
            self._add(request)

    def doubt(self, *, but_promised: bool = False) -> None:
        """Every frame that is there now may be gone, or damaged.

        Args:
            but_promised: Except those that were promised.
        """
        kept = self.promised if but_promised else set()
        for key, states in self.may.items():
            if key not in kept:
                self.doubtful.update([key] if states != {None} else [])
                states.add(None)
        for request in self.flying:
            if request.item.key not in kept:
                request.seen.add(None)
                self.doubtful.add(request.item.key)
        self.promised = set(kept)

    def stored(self, request: TierRequest) -> None:
        """A store was answered `STORED`; one of an impossible frame says that another is there."""
        self.flying.remove(request)
        if request.alone and request.frame:
            self.promised.add(request.item.key)
        doubtful = self.lossy or request.item.key in self.doubtful
        if request.frame and not request.deleted and not doubtful:
            self.may[request.item.key].discard(None)
            assert self.may[request.item.key]

    def failed(self, request: TierRequest) -> None:
        """A store was answered `FAILED`: unless the tier is lossy, its frame is not there."""
        self.flying.remove(request)
        if request.frame is None:
            return
        if self.lossy:
            self._ghosts[request.item.key].add(request.frame)
        elif request.brought:
            heirs = [w for w in self.stores(request.item.key) if w.frame == request.frame]
            if heirs:
                heirs[0].brought = True
            else:
                self.may[request.item.key].discard(request.frame)

    def loaded(self, request: TierRequest, answer: TierAnswer) -> None:
        """A load was answered; raises AssertionError if it cannot have been."""
        self.flying.remove(request)
        load = request.item
        assert isinstance(load, Load)
        agree = {state for state in request.seen if agrees(state, load, answer)}
        if answer.outcome is Outcome.HIT:
            assert agree, f"WRONG BYTES, or a hit for what was not stored: {_short(answer)}"
        elif self.lossy:
            assert answer.outcome in (Outcome.MISS, Outcome.FAILED)
            assert answer.outcome is Outcome.MISS or answer.reason, "a failure says why"
            return
        else:
            excused = answer.outcome is Outcome.FAILED and (
                answer.reason == "deadline" or (answer.reason == "cancelled" and request.cancelled)
            )
            assert agree or excused, f"{_short(answer)} does not fit what is there"
            if excused:
                return
        if request.alone:
            doubtful = self.lossy or load.key in self.doubtful
            self.may[load.key] &= agree | ({None} if doubtful else set())

    def present(self, key: bytes, there: bool) -> None:
        """The tier said whether a key is there; raises AssertionError if it cannot be so."""
        may = self.may[key]
        if there:
            assert may != {None}, "a key that is not there is said to be there"
        else:
            assert None in may or self.lossy, "a key that is there is said not to be there"
        if not there and not self.stores(key):
            self.doubtful.discard(key)
        if not self.stores(key) and not self.lossy and key not in self.doubtful:
            self.may[key] = {state for state in may if (state is not None) == there}

    def _add(self, request: TierRequest) -> None:
        key, frame = request.item.key, request.frame
        assert frame is not None
        request.brought = request.brought or frame not in self.may[key]
        self.may[key].add(frame)
        for other in self.flying:
            if other.item.key == key:
                other.seen.add(frame)


def agrees(state: Frame | None, request: Load, answer: TierAnswer) -> bool:
    """Whether a load may be answered so while this is what is there."""
    said = answer.outcome, answer.reason
    if state is None:
        return said == (Outcome.MISS, "") or (
            request.target.readonly and said == (Outcome.FAILED, "target")
        )
    problems = state.problems(request)
    if problems or answer.outcome is not Outcome.HIT:
        return said in problems
    part = state.part(request)
    assert part is not None
    return (
        answer.info == state.info
        and answer.n_bytes == len(part)
        and request.target[: len(part)] == part
    )


def _short(answer: TierAnswer) -> str:
    key = answer.key.hex()[:8]
    return f"{answer.outcome.name} {answer.reason!r} of {answer.n_bytes} bytes for {key}"


# What is stored and asked for: frames and loads, at random, small enough to read.

NAMES = st.integers(0, 11)


def key_of(name: int) -> bytes:
    """Key of the frame that the machine knows by a small number."""
    return hashlib.sha256(b"check_tier %d" % name).digest()


LAYOUTS = (b"\1" * 16, b"\2" * 16)


class Sketch(NamedTuple):
    """The ingredients of a frame; small, so that a failing example can be read."""

    kind: str
    codec: int
    lossier: int
    layout: bytes
    parent: int
    numbers: tuple[int, int, int, int]
    stripes: int
    stripe_bytes: int
    seed: int
    spoil: str = ""

    def frame(self) -> Frame:
        """Description and body: one odd stripe, or several of a granule."""
        step = self.stripe_bytes if self.stripes == 1 else GRANULE_BYTES
        group, tokens, world, heads = self.numbers
        info = FrameInfo(
            kind=self.kind,
            codec=self.codec,
            fidelity=min(self.codec + self.lossier, len(CODECS) - 1),
            layout=self.layout,
            parent=key_of(self.parent),
            namespace=bytes(32),
            group=group,
            tokens=tokens,
            stripe_bytes=step,
            tenant=key_of(group),
            rank=world - 1,
            world=world,
            head_stop=heads,
        )
        body = hashlib.shake_128(bytes([self.seed])).digest(step * self.stripes)
        return Frame(info._replace(**SPOILED[self.spoil]), body)


SPOILED: dict[str, dict[str, Any]] = {
    "": {},
    "kind": {"kind": "picture"},
    "parent": {"parent": b"short"},
    "rank": {"rank": 9, "world": 9},
    "stripes": {"stripe_bytes": 3 * GRANULE_BYTES + 1},
    "codec": {"codec": len(CODECS), "fidelity": len(CODECS)},
}
"""Descriptions that no frame can have; a store of one fails as "invalid"."""

SKETCHES = st.builds(
    Sketch,
    kind=st.sampled_from(KINDS),
    codec=st.integers(0, len(CODECS) - 1),
    lossier=st.integers(0, 2),
    layout=st.sampled_from(LAYOUTS),
    parent=NAMES,
    numbers=st.tuples(*(st.integers(low, 256) for low in (0, 0, 1, 0))),
    stripes=st.sampled_from((1, 1, 2, 3, 11)),
    stripe_bytes=st.integers(1, 3 * GRANULE_BYTES),
    seed=st.integers(0, 255),
    spoil=st.sampled_from(("",) * 15 + tuple(SPOILED)),
)


class Want(NamedTuple):
    """A load to make: an honest one asks for what the frame can give; `lie` says if not."""

    name: int
    layout: bytes
    fidelity: int
    lie: str
    first: int
    stripes: int
    target: str


WANTS = st.builds(
    Want,
    name=NAMES,
    layout=st.sampled_from(LAYOUTS),
    fidelity=st.integers(0, len(CODECS) - 1),
    lie=st.sampled_from(("",) * 5 + ("layout", "fidelity", "anything")),
    first=st.sampled_from((0, 0, 0, 1, 2, 10, 11, -1)),
    stripes=st.sampled_from((0, 0, 1, 1, 2, 11, -1)),
    target=st.sampled_from(("spare",) * 8 + ("exact",) * 4 + ("short", "readonly")),
)


# The state machine behind `check_tier`: any tier against a model of what it may hold.


GRACE_S = 5.0
"""How much later than its deadline an answer may be seen on a busy machine."""
PATIENCE_S = 20.0
STEPS = 30
HANDLES = st.integers(0, 1)
DEADLINES_S = st.sampled_from((10.0, 10.0, 10.0, 0.05, 0.0))
BEFORE, AFTER = 0xA5, 0x5A
SPARE_BYTES = 3


class TierMachine(RuleBasedStateMachine):
    """Random calls, several jobs in flight; `model` knows what may be there."""

    factory: Callable[[int], Tier]
    reopener: Callable[[Tier], Tier] | None
    peer: Callable[[Tier], Tier] | None
    damager: Callable[[Tier, int], None] | None
    lossy: bool
    capacity_bytes: int

    def __init__(self) -> None:
        super().__init__()
        cls = type(self)
        self.tiers = [cls.factory(self.capacity_bytes)]
        if self.peer is not None:
            self.tiers.append(cls.peer(self.tiers[0]))  # type: ignore[misc]
        self.model = Model(self.lossy)
        self.jobs: dict[tuple[Tier, int], dict[int, TierRequest]] = {}
        self.born: dict[bytes, tuple[int, int]] = {}  # when its store began and was answered
        self.done: list[tuple[object, bytes]] = []  # memory that no tier may touch any more
        self.step = 0
        self.sound = True  # until a check of answers fails: then some of them are lost

    def teardown(self) -> None:
        """Closes everything; what was in flight is answered all the same."""
        for tier in reversed(self.tiers):
            tier.close()
            if self.sound:
                self.collect(tier, all_of_it=True, closed=True)
        self.nothing_is_touched_after_its_answer()

    # ---- calls

    @rule(
        wanted=st.lists(st.tuples(NAMES, SKETCHES), min_size=1, max_size=4),
        handle=HANDLES,
        deadline_s=DEADLINES_S,
    )
    def store(self, wanted: list[tuple[int, Sketch]], handle: int, deadline_s: float) -> None:
        """Starts stores; a key that is there keeps its frame."""
        tier = self.tiers[handle % len(self.tiers)]
        self.step += 1
        requests, due_s = {}, time.monotonic() + deadline_s
        for index, (name, sketch) in enumerate(wanted):
            frame = sketch.frame()
            body = memoryview(bytearray(frame.body))
            valid = None if sketch.spoil or not tier.writable else frame
            request = TierRequest(Store(key_of(name), frame.info, body), valid, due_s, self.step)
            requests[index] = request
        need = sum(tier.frame_bytes(request.n_bytes) for request in requests.values())
        flying = [request for request in self.model.flying if request.frame]
        before = tier.used_bytes() + sum(tier.frame_bytes(request.n_bytes) for request in flying)
        for request in flying:
            request.room_bytes += need
        for request in requests.values():
            request.room_bytes = before + need
            self.model.submit(request)
        items = [request.item for request in requests.values()]
        self.jobs[tier, tier.submit_store(items, deadline_s=deadline_s)] = requests  # type: ignore[arg-type]

    @rule(wanted=st.lists(WANTS, min_size=1, max_size=4), handle=HANDLES, deadline_s=DEADLINES_S)
    def load(self, wanted: list[Want], handle: int, deadline_s: float) -> None:
        """Starts loads, most of them of what may be there."""
        tier = self.tiers[handle % len(self.tiers)]
        self.step += 1
        requests, due_s = {}, time.monotonic() + deadline_s
        for index, want in enumerate(wanted):
            requests[index] = TierRequest(self.load_of(want), None, due_s, self.step)
            self.model.submit(requests[index])
        items = [request.item for request in requests.values()]
        self.jobs[tier, tier.submit_load(items, deadline_s=deadline_s)] = requests  # type: ignore[arg-type]

    def load_of(self, want: Want) -> Load:
        """A load with a target that has the size wished for, or not quite."""
        key, layout, fidelity = key_of(want.name), want.layout, want.fidelity
        there = [each for each, states in self.model.may.items() if any(states)]
        if there and want.name % 4:  # mostly something that is there
            key = there[want.name % len(there)]
        first, stripes, size = want.first, want.stripes, GRANULE_BYTES
        frame = next(filter(None, self.model.may[key]), None)
        if frame is not None:
            if want.lie != "anything":
                other = next(each for each in LAYOUTS if each != frame.info.layout)
                layout = other if want.lie == "layout" else frame.info.layout
                too_low = max(0, frame.info.fidelity - 1)
                fidelity = too_low if want.lie == "fidelity" else len(CODECS) - 1
                if frame.part(Load(key, memoryview(b""), layout, 0, first, stripes)) is None:
                    first = stripes = 0
            part = frame.part(Load(key, memoryview(b""), layout, 0, first, stripes))
            size = len(part) if part is not None else len(frame.body)
        size += {"spare": SPARE_BYTES, "short": -1}.get(want.target, 0)
        target = memoryview(bytearray([BEFORE]) * size)
        if want.target == "readonly":
            target = target.toreadonly()
        return Load(key, target, layout, fidelity, first, stripes)

    @rule(handle=HANDLES, all_of_it=st.booleans())
    def poll(self, handle: int, all_of_it: bool) -> None:
        """Takes some answers, or waits for all."""
        self.collect(self.tiers[handle % len(self.tiers)], all_of_it=all_of_it)

    @rule(which=st.integers(0, 7))
    def cancel(self, which: int) -> None:
        """Gives up a job, if one is in flight; no precondition, since threads decide about that."""
        if not self.jobs:
            return
        (tier, job), requests = list(self.jobs.items())[which % len(self.jobs)]
        for request in requests.values():
            request.cancelled = True
        tier.cancel(job)

    @rule(names=st.lists(NAMES, max_size=4, unique=True), handle=HANDLES, erase=st.booleans())
    def delete(self, names: list[int], handle: int, erase: bool) -> None:
        """Forgets frames."""
        tier = self.tiers[handle % len(self.tiers)]
        keys = [key_of(name) for name in names]
        if not tier.writable:
            assert tier.delete(keys) == 0, "a reader deleted something"
            return
        surely = sum(None not in self.model.may[key] for key in keys)
        maybe = sum(self.model.may[key] != {None} for key in keys)
        before = {key: set(self.model.may[key]) for key in keys}
        try:
            gone = tier.erase(keys) if erase else tier.delete(keys)
        except StoreError:
            assert erase and self.model.lossy, "what was asked for was not done"
            for key in keys:  # some may still be there, which is what it says
                self.model.delete(key)
                self.model.may[key] |= before[key]
            return
        assert gone <= maybe, "more was deleted than was there"
        assert surely <= gone or self.model.lossy, "less was deleted than was there"
        for key in keys:
            self.born.pop(key, None)
            self.model.delete(key)

    @rule(handle=HANDLES)
    def scan(self, handle: int) -> None:
        """Lists frames."""
        tier = self.tiers[handle % len(self.tiers)]
        entries = list(tier.scan())
        found = {entry.key: entry.info for entry in entries}
        assert len(found) == len(entries), "a key twice"
        assert all(entry.n_bytes > 0 for entry in entries)
        for key, info in found.items():
            infos = [state.info for state in self.model.may[key] if state]
            assert info in infos, "a frame that was not stored, or described wrongly"
        missing = [key for key, may in self.model.may.items() if None not in may]
        assert self.model.lossy or set(missing) <= set(found), "a frame is not listed"
        if not tier.shared and not self.model.lossy:
            latest = 0
            for begun, answered in (self.born[key] for key in found if key in self.born):
                assert answered >= latest, "not oldest first"
                latest = max(latest, begun)

    @precondition(lambda self: self.reopener is not None)
    @rule()
    def reopen(self) -> None:
        """Closes the tier, with whatever is in flight, and opens it again."""
        assert self.reopener is not None
        old = self.tiers[0]
        self.tiers[0] = type(self).reopener(old)  # type: ignore[misc]
        self.collect(old, all_of_it=True, closed=True)

    @precondition(lambda self: self.damager is not None)
    @rule(number=st.integers(0, 2**31 - 1))
    def damage(self, number: int) -> None:
        """Spoils a bit where the frames lie."""
        assert self.damager is not None
        self.collect(self.tiers[0], all_of_it=True)
        type(self).damager(self.tiers[0], number)  # type: ignore[misc]
        self.model.lossy = True
        self.model.doubt()

    # ---- answers

    def collect(self, tier: Tier, *, all_of_it: bool, closed: bool = False) -> None:
        """Takes answers of a tier and compares them with the model."""
        self.sound = False
        end_s = time.monotonic() + PATIENCE_S
        while True:
            asked_s = time.monotonic()
            timeout_s = 0.02 if all_of_it and any(t is tier for t, _ in self.jobs) else 0.0
            answers = tier.poll(timeout_s)
            assert time.monotonic() - asked_s < timeout_s + GRACE_S, "poll waited too long"
            for answer in answers:
                self.check(tier, answer, closed)
            left = [
                w for (t, _), requests in self.jobs.items() if t is tier for w in requests.values()
            ]
            late = [request for request in left if asked_s > request.due_s + GRACE_S]
            assert not late, f"{len(late)} items were not answered by their deadline"
            if not left or not all_of_it:
                break
            assert time.monotonic() < end_s, f"{len(left)} items were not answered"
        if not left:
            assert not tier.poll(0.0), "more answers than items"
        self.sound = True

    def check(self, tier: Tier, answer: TierAnswer, closed: bool) -> None:
        """One answer against the model."""
        requests = self.jobs.get((tier, answer.job), {})
        request = requests.pop(answer.item, None)
        assert request is not None, (
            f"job {answer.job} item {answer.item} was answered twice, or never asked"
        )
        if not requests:
            del self.jobs[tier, answer.job]
        item, loose = request.item, closed or self.model.lossy
        assert answer.key == item.key, "the answer names another key"
        if isinstance(item, Load):
            if closed and answer.outcome is Outcome.FAILED:
                self.model.failed(request)
            else:
                self.model.loaded(request, answer)
            moved = answer.n_bytes if answer.outcome is Outcome.HIT else item.target.nbytes
            rest = item.target[moved:]
            assert rest == bytes([BEFORE]) * len(rest), "bytes written past what was wished for"
            memory = item.target
        elif answer.outcome is Outcome.STORED:
            assert request.frame or any(request.seen), "a frame that cannot be was stored"
            assert not answer.reason
            self.model.stored(request)
            if request.alone and request.frame:
                self.born.setdefault(item.key, (request.step, self.step))
            memory = item.body
        else:
            assert answer.outcome is Outcome.FAILED and answer.reason, "a failure says why"
            assert loose or self.excused(tier, request, answer.reason), f"failed: {answer.reason}"
            self.model.failed(request)
            memory = item.body
        if not memory.readonly:
            memory[:] = bytes([AFTER]) * memory.nbytes  # its owner uses it again, at once
        self.done.append((memory.obj, bytes(memory)))

    def excused(self, tier: Tier, request: TierRequest, reason: str) -> bool:
        """Whether a store may fail for this reason."""
        return {
            "read-only": not tier.writable,
            "invalid": request.frame is None,
            "full": request.room_bytes > tier.capacity_bytes,
            "busy": len(self.model.flying) > 1,
            "deadline": True,
            "cancelled": request.cancelled,
        }.get(reason, False)

    # ---- what always holds

    @invariant()
    def capacity_holds(self) -> None:
        """Never more than allowed."""
        for tier in self.tiers:
            assert 0 <= tier.used_bytes() <= tier.capacity_bytes, "over its capacity"

    @invariant()
    def contains_agrees(self) -> None:
        """What was stored is believed to be there, and nothing else."""
        keys = [key_of(name) for name in range(12)]
        for tier in self.tiers:
            for key, there in zip(keys, tier.contains(keys), strict=True):
                self.model.present(key, there)

    @invariant()
    def nothing_is_touched_after_its_answer(self) -> None:
        """Targets and bodies belong to their owner again."""
        assert all(memory == kept for memory, kept in self.done), "memory touched after its answer"


def check_tier(
    factory: Callable[[int], Tier],
    *,
    reopen: Callable[[Tier], Tier] | None = None,
    peer: Callable[[Tier], Tier] | None = None,
    damage: Callable[[Tier, int], None] | None = None,
    lossy: bool = False,
    capacity_bytes: int = 4 << 20,
) -> None:
    """Drives a tier through random calls and compares it with a model.

    Several jobs are in flight at a time, their answers are polled whenever, and the memory of every
    item is used for something else the moment it is answered. Checked: every item is answered once
    and in time; a `HIT` has exactly the bytes and the description that were stored, and only the
    stripes wished for; another layout, a fidelity above the accepted one, or stripes that are not
    there are a `MISS` that says so; unfit targets and impossible frames fail; nothing is written
    past what was wished for, nor after an answer; a store that failed is not there; deleted and
    erased frames stay away; `scan` and `contains` agree; the capacity holds; a frame for which
    there is room is stored; closing answers what is in flight; after `reopen` everything is there.

    Args:
        factory: Makes an empty tier of a capacity in bytes.
        reopen: Closes a tier and opens it again, where frames should survive that.
        peer: Opens a second handle of the same place: a reader, or another writer.
        damage: `damage(tier, number)` spoils a bit where the frames lie, which one is up to the
            number. The tier may lose frames from then on, but never give wrong bytes.
        lossy: The tier may fail and lose frames (never lie), as `FlakyTier` does.
        capacity_bytes: Capacity to test with; about fifty frames should fit.

    Raises:
        AssertionError: The tier broke the protocol; the message has the calls that led there.
    """
    members: dict[str, Any] = {
        "factory": staticmethod(factory),
        "reopener": reopen and staticmethod(reopen),
        "peer": peer and staticmethod(peer),
        "damager": damage and staticmethod(damage),
        "lossy": lossy,
        "capacity_bytes": capacity_bytes,
    }
    machine = type("TierMachine", (TierMachine,), members)
    how = settings(stateful_step_count=STEPS)  # and the caller's profile
    tell(lambda: run_state_machine_as_test(machine, settings=how))


# Codecs, on pages that codecs get wrong.

Runs = tuple[torch.Tensor, torch.Tensor]

PAGE_KINDS = (
    "noise",
    "zeros",
    "constant",
    "ramp",
    "outlier channels",
    "outlier tokens",
    "large",
    "tiny",
    "denormal",
    "halves",
    "mixed",
)
"""Of pages that codecs get wrong; see `page_of`."""


class Codec(Protocol):
    """The protocol `check_codec` needs of your codec; K is `[Hk, P, D]`, V `[Hk, P, Dv]`."""

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        """A page as bytes; raises `ValueError` for NaN and infinity."""

    def decode(self, code: bytes) -> Runs:
        """What attention reads, float32."""

    def bounds(self, k: torch.Tensor, v: torch.Tensor) -> Runs:
        """The most by which each decoded element may differ from the given one, float64."""


def page_of(kind: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Float32 runs `[..., P, D]` of a kind; all but "denormal" and "tiny" suit float16."""
    rng = torch.Generator().manual_seed(seed)
    tokens, dim = shape[-2:]
    x = torch.randn(*shape, generator=rng)
    if kind == "zeros":
        x *= 0
        x[..., ::2, :] = -0.0
    elif kind == "constant":
        x = x[..., :1, :1].expand(*shape).clone()
    elif kind == "ramp":
        x = torch.linspace(-3, 5, tokens * dim).view(tokens, dim).expand(*shape).clone()
    elif kind == "outlier channels":
        where = torch.randint(dim, (max(1, dim // 16),), generator=rng)
        x[..., where] = x[..., where] * 0.1 + 300 * x[..., :1, where].sign()
    elif kind == "outlier tokens":
        x[..., torch.randint(tokens, (1,), generator=rng), :] *= 1000
    elif kind == "large":
        x = torch.where(x.abs() < 1, x, 65280 * x.sign())  # bfloat16 has it too
    elif kind == "tiny":
        x *= 2.0 ** float(torch.randint(-30, -10, (1,), generator=rng))
    elif kind == "denormal":
        x = x.sign() * torch.randint(0, 1 << 20, shape, generator=rng).int().view(torch.float32)
    elif kind == "halves":  # ties wherever the scale is 1
        x = torch.randint(-13, 14, shape, generator=rng).float() / 2
        x[..., 0] = 7.0 * x[..., 0].sign() + (x[..., 0] == 0) * 7.0
        x[..., 0, :] = -7.0
    elif kind == "mixed":
        x *= torch.exp2(torch.randint(-24, 12, (*shape[:-1], 1), generator=rng).float())
        x *= torch.rand(*shape, generator=rng) > 0.3
    elif kind != "noise":
        raise ValueError(f"kind {kind!r} is none of {', '.join(PAGE_KINDS)}")
    return x


class CatalogueCodec:
    """A codec of the catalogue as a `Codec`: pages of one layer, through `kernels.transcode`.

    Args:
        codec: One of `CODECS`.
        shape: Hk, P, D, Dv.
        dtype: Of raw pages.
        device: Of the pages.
        backend: As for `kernels.transcode`.
    """

    def __init__(
        self,
        codec: str,
        shape: tuple[int, int, int, int],
        dtype: str = "float32",
        device: str = "cpu",
        backend: str | None = None,
    ) -> None:
        heads, tokens, dim, dim_v = shape
        group = LayerGroup(layers=(0,), kv_heads=heads, head_dim=dim, value_dim=dim_v, dtype=dtype)
        self.raw, self.layout = page_layout(group, tokens), page_layout(group, tokens, codec)
        self.device, self.backend = device, backend

    def moved(
        self, page: bytes, old: PageLayout, new: PageLayout, backend: str | None
    ) -> tuple[bytes, int]:
        """A page in another layout, and the status of that; guards what lies around it."""
        place = old.granules + 2
        arena = torch.full(((place + new.granules + 1) * GRANULE_BYTES,), 0xA5, dtype=torch.uint8)
        arena[GRANULE_BYTES:][: len(page)] = torch.frombuffer(bytearray(page), dtype=torch.uint8)
        arena = arena.to(self.device)
        before = arena.clone()
        at, to = (torch.tensor([x], dtype=torch.int32, device=self.device) for x in (1, place))
        status = transcode(arena, at, to, old, new, backend=backend)
        begin, end = place * GRANULE_BYTES, (place + new.granules) * GRANULE_BYTES
        result = arena[begin:end].clone()
        arena[begin:end] = before[begin:end]
        require(torch.equal(arena, before), "bytes outside of the target were written")
        return result.cpu().numpy().tobytes(), int(status)

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        """Seal a page, twice: the backend and the oracle must write the same bytes."""
        runs = torch.zeros(self.raw.kv_heads, self.raw.run_bytes, dtype=torch.uint8)
        for x, start in ((k, 0), (v, self.raw.v_offset_bytes)):
            part = x.to(getattr(torch, self.raw.dtype)).flatten(1).view(torch.uint8)
            runs[:, start : start + part.shape[1]] = part
        page = runs.numpy().tobytes()
        code, status = self.moved(page, self.raw, self.layout, self.backend)
        same = code, status
        require(
            same == self.moved(page, self.raw, self.layout, "reference"),
            "the backend and the oracle write different bytes",
        )
        if status != SOUND:
            raise ValueError("NaN, infinity, or a scale beyond float16")
        return code

    def decode(self, code: bytes) -> Runs:
        """What attention reads; a raw page made of it must hold the same, rounded."""
        page = torch.frombuffer(bytearray(code), dtype=torch.uint8)
        k, v = reference_codec.decoded(page, self.layout, 0, [0])
        raw, status = self.moved(code, self.layout, self.raw, self.backend)
        page = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        for got, exact in zip(reference_codec.decoded(page, self.raw, 0, [0]), (k, v), strict=True):
            expected = reference_codec.narrowed(exact, getattr(torch, self.raw.dtype))
            require(torch.equal(got, expected.float()), "a page decodes to something else")
        require(status == SOUND, "a sealed page decodes to NaN or infinity")
        return k[0], v[0]

    def bounds(self, k: torch.Tensor, v: torch.Tensor) -> Runs:
        """The bounds that docs/explain/codecs.md derives."""
        return bounds(self.layout.codec, k, v)


def check_codec(
    codec: str | Codec,
    *,
    shapes: Sequence[tuple[int, int, int, int]] = ((2, 64, 64, 96), (1, 128, 80, 64)),
    dtype: str = "float32",
    device: str = "cpu",
    backend: str | None = None,
    max_examples: int = 40,
) -> None:
    """Runs the conformance suite on a codec; returns if it found no fault. Deterministic.

    Checked on pages of zeros, outliers, extremes, denormals, ties and noise: no element is off by
    more than the bound; what was decoded once and is encoded again stays within the bound; equal
    pages give equal bytes, in a number that depends on their shape alone; NaN and infinity are
    refused; operands are not written to. Of a codec of the catalogue also: this device and backend
    write the very bytes that the oracle writes, and none beside the page.

    Args:
        codec: A name, one of `CODECS`, or a codec of your own.
        shapes: Hk, P, D and Dv of the pages.
        dtype: What elements are rounded to first; of raw pages.
        device: Where the pages of a codec of the catalogue lie.
        backend: Which kernels encode and decode it: "reference", "cpu" or "triton".
        max_examples: Pages to try.

    Raises:
        AssertionError: The codec breaks a rule; the message says which.
    """
    cases = [
        (
            CatalogueCodec(codec, shape, dtype, device, backend)
            if isinstance(codec, str)
            else codec,
            shape,
        )
        for shape in shapes
    ]

    element = getattr(torch, dtype)

    @told(max_examples, shrink=False)  # a smaller seed is no simpler page
    @given(st.sampled_from(cases), *[st.sampled_from(PAGE_KINDS)] * 2, st.integers(0, 1 << 16))
    def story(
        case: tuple[Codec, tuple[int, int, int, int]], kind: str, kind_v: str, seed: int
    ) -> None:
        one, (heads, tokens, dim, dim_v) = case
        k, v = (
            page_of(kind, (heads, tokens, dim), seed),
            page_of(kind_v, (heads, tokens, dim_v), seed + 1),
        )
        judge(one, k.to(element).float(), v.to(element).float(), element, seed)

    tell(story)


def judge(codec: Codec, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, seed: int) -> None:
    """All rules of `check_codec` on one page, whose elements `dtype` can hold.

    Raises:
        AssertionError: The codec breaks one.
    """
    given_k, given_v = k.clone(), v.clone()
    code = codec.encode(k, v)
    require(torch.equal(k, given_k) and torch.equal(v, given_v), "encode wrote to its operands")
    require(codec.encode(k.clone(), v.clone()) == code, "equal pages must give equal bytes")
    zero = codec.encode(torch.zeros_like(k), torch.zeros_like(v))
    require(len(zero) == len(code), "the number of bytes must depend on the shape alone")
    near = codec.decode(code)
    _within(near, (k, v), codec, "an element is off by more than the bound")
    once = [reference_codec.narrowed(x, dtype).float() for x in near]
    _within(
        codec.decode(codec.encode(*once)),
        (once[0], once[1]),
        codec,
        "what was encoded twice is off by more than the bound",
    )
    for x, bad in ((k, torch.nan), (v, torch.inf), (k, -torch.inf), (v, torch.nan)):
        place = seed % x.numel()
        kept = x.view(-1)[place].item()
        x.view(-1)[place] = bad
        try:
            codec.encode(k, v)
        except ValueError:
            x.view(-1)[place] = kept
        else:
            raise AssertionError(f"{bad} was not refused")


def _within(got: Runs, exact: Runs, codec: Codec, sentence: str) -> None:
    for x, y, most in zip(got, exact, codec.bounds(*exact), strict=True):
        require(x.shape == y.shape and bool(x.isfinite().all()), "decode gives finite runs")
        require(bool(((x.double() - y.double()).abs() <= most).all()), sentence)
