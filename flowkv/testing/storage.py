"""`check_tier` and `check_codec`: check tiers, which store frames, and codecs, which encode them.

FlowKV's own codecs write the same bytes everywhere: seal on one machine, read on any other.
Running the suite with `device="cuda"` proves that for the compiler and the GPU at hand.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flowkv.core.errors import StoreError
from flowkv.core.geometry import FIDELITIES, GRANULE_BYTES, LayerGroup, PageLayout, page_layout
from flowkv.kernels import reference as reference_codec
from flowkv.kernels import transcode
from flowkv.kernels.dispatch import SOUND
from flowkv.kernels.loss import bounds
from flowkv.testing.stories import require, tell, told
from flowkv.tiers.base import FrameInfo, Load, Outcome, Store, Tier, TierAnswer
from flowkv.tiers.frame import KINDS

# A model of the possible contents of a tier, which `check_tier` compares with the tier's answers.
#
# With several jobs in flight, their order is not visible outside. So the model keeps, per key, all
# frames that may be stored now (`None` stands for no frame), and every request collects the frames
# that may have been stored while it was in flight. An answer must agree with one of them; the
# answer to an undisturbed request reveals which one is stored.


class Frame(NamedTuple):
    """Description and body of a frame."""

    info: FrameInfo
    body: bytes

    def part(self, request: Load) -> bytes | None:
        """Return the requested stripes; None if the frame does not have them."""
        stripes = len(self.body) // self.info.stripe_bytes
        end = request.first + request.stripes if request.stripes else stripes
        if not 0 <= request.first < end <= stripes:
            return None
        return self.body[request.first * self.info.stripe_bytes : end * self.info.stripe_bytes]

    def problems(self, request: Load) -> set[tuple[Outcome, str]]:
        """Return the reasons to refuse a request for this frame; a tier may answer any of them."""
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
    """Item in flight.

    Args:
        item: The item submitted to the tier.
        frame: The frame that a store writes; None for loads, and stores that must fail.
        due_s: Time by which it must be answered, in `time.monotonic` seconds.
        step: Number of the call that submitted it.

    Attributes:
        seen: Frames that may have been stored since it was submitted.
        alone: Whether no store or deletion of the key overlapped with it.
        deleted: Whether the key was deleted meanwhile.
        brought: Whether its frame may be stored only because of it.
        room_bytes: Most bytes that the tier may need, counting everything in flight.
        cancelled: Whether its job was cancelled.
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
        lossy: Frames may vanish at any time, and a failed store may have stored its frame.

    Attributes:
        may: Frames that may be stored now, by key.
        flying: Requests in flight.
        doubtful: Keys of frames that may be damaged: listed as stored, and refused when read.
        promised: Keys of frames that were written, and answered `STORED`, since the last `doubt`.
    """

    def __init__(self, lossy: bool) -> None:
        self.lossy = lossy
        self.doubtful: set[bytes] = set()
        self.promised: set[bytes] = set()
        self.may: defaultdict[bytes, set[Frame | None]] = defaultdict(lambda: {None})
        self.flying: list[TierRequest] = []
        self._ghosts: defaultdict[bytes, set[Frame]] = defaultdict(set)

    def stores(self, key: bytes) -> list[TierRequest]:
        """Return the stores of a key that are in flight."""
        return [request for request in self.flying if request.frame and request.item.key == key]

    def submit(self, request: TierRequest) -> None:
        """Record a request that was submitted to the tier."""
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
        """Record the deletion of a key; stores in flight may bring it back."""
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
        """Record that every frame stored now may be gone, or damaged.

        Args:
            but_promised: Except promised ones.
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
        """Record the answer `STORED`; to an impossible frame it means that another is stored."""
        self.flying.remove(request)
        if request.alone and request.frame:
            self.promised.add(request.item.key)
        doubtful = self.lossy or request.item.key in self.doubtful
        if request.frame and not request.deleted and not doubtful:
            self.may[request.item.key].discard(None)
            assert self.may[request.item.key]

    def failed(self, request: TierRequest) -> None:
        """Record the answer `FAILED` to a store; only a lossy tier may have stored its frame."""
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

    def check_load(self, request: TierRequest, answer: TierAnswer) -> None:
        """Record the answer to a load; raise AssertionError if the answer is impossible."""
        self.flying.remove(request)
        load = request.item
        assert isinstance(load, Load)
        agree = {state for state in request.seen if agrees(state, load, answer)}
        if answer.outcome is Outcome.HIT:
            assert agree, f"WRONG BYTES, or a hit for a frame that was not stored: {_short(answer)}"
        elif self.lossy:
            assert answer.outcome in (Outcome.MISS, Outcome.FAILED)
            assert answer.outcome is Outcome.MISS or answer.reason, "a failure says why"
            return
        else:
            reasons = ("deadline", "cancelled") if request.cancelled else ("deadline",)
            excused = answer.outcome is Outcome.FAILED and answer.reason in reasons
            assert agree or excused, f"{_short(answer)} does not fit the stored frame"
            if excused:
                return
        if request.alone:
            doubtful = self.lossy or load.key in self.doubtful
            self.may[load.key] &= agree | ({None} if doubtful else set())

    def present(self, key: bytes, there: bool) -> None:
        """Record whether the tier has a key; raise AssertionError if that is impossible."""
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
    """Return whether a load may be answered like this if `state` is stored."""
    said = answer.outcome, answer.reason
    if state is None:
        unfit = request.target.readonly and said == (Outcome.FAILED, "target")
        return unfit or said == (Outcome.MISS, "")
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


# Random frames and loads, small enough to read.

NAMES = st.integers(0, 11)


def key_of(name: int) -> bytes:
    """Return the key of the frame with a small number."""
    return hashlib.sha256(b"check_tier %d" % name).digest()


LAYOUTS = (b"\1" * 16, b"\2" * 16)


class Sketch(NamedTuple):
    """Ingredients of a frame; small, so that a failing example can be read."""

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
        """Return description and body: one odd stripe, or several of a granule."""
        step = self.stripe_bytes if self.stripes == 1 else GRANULE_BYTES
        group, tokens, world, heads = self.numbers
        info = FrameInfo(
            kind=self.kind,
            codec=self.codec,
            fidelity=min(self.codec + self.lossier, len(FIDELITIES) - 1),
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
    "codec": {"codec": len(FIDELITIES), "fidelity": len(FIDELITIES)},
}
"""Impossible descriptions; a store with one fails as "invalid"."""

SKETCHES = st.builds(
    Sketch,
    kind=st.sampled_from(KINDS),
    codec=st.integers(0, len(FIDELITIES) - 1),
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
    """Load to make; `lie` names the property that does not fit the stored frame, "" for none."""

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
    fidelity=st.integers(0, len(FIDELITIES) - 1),
    lie=st.sampled_from(("",) * 5 + ("layout", "fidelity", "anything")),
    first=st.sampled_from((0, 0, 0, 1, 2, 10, 11, -1)),
    stripes=st.sampled_from((0, 0, 1, 1, 2, 11, -1)),
    target=st.sampled_from(("spare",) * 8 + ("exact",) * 4 + ("short", "readonly")),
)


# The state machine behind `check_tier`: any tier against a model of its possible contents.


GRACE_S = 5.0
"""Most seconds after its deadline at which an answer may arrive on a busy machine."""
PATIENCE_S = 20.0
STEPS = 30
HANDLES = st.integers(0, 1)
DEADLINES_S = st.sampled_from((10.0, 10.0, 10.0, 0.05, 0.0))
BEFORE, AFTER = 0xA5, 0x5A
SPARE_BYTES = 3


class TierMachine(RuleBasedStateMachine):
    """Random calls with several jobs in flight, compared with `model`."""

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
        self.born: dict[bytes, tuple[int, int]] = {}  # steps of a store's begin and answer
        self.given_up = set[bytes]()  # keys of stores that were answered early, in this step
        self.done: list[tuple[object, bytes]] = []  # memory that no tier may write any more
        self.step = 0
        self.sound = True  # False once a check of answers failed, which loses some of them

    def teardown(self) -> None:
        """Close all tiers; items in flight must still be answered."""
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
        """Start stores; a key that is stored keeps its frame."""
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
        """Start loads, most of them of frames that may be stored."""
        tier = self.tiers[handle % len(self.tiers)]
        self.step += 1
        requests, due_s = {}, time.monotonic() + deadline_s
        for index, want in enumerate(wanted):
            requests[index] = TierRequest(self.load_of(want), None, due_s, self.step)
            self.model.submit(requests[index])
        items = [request.item for request in requests.values()]
        self.jobs[tier, tier.submit_load(items, deadline_s=deadline_s)] = requests  # type: ignore[arg-type]

    def load_of(self, want: Want) -> Load:
        """Return a load with a target of the requested size, or not quite."""
        key, layout, fidelity = key_of(want.name), want.layout, want.fidelity
        there = [each for each, states in self.model.may.items() if any(states)]
        if there and want.name % 4:  # mostly a key that is stored
            key = there[want.name % len(there)]
        first, stripes, size = want.first, want.stripes, GRANULE_BYTES
        frame = next(filter(None, self.model.may[key]), None)
        if frame is not None:
            if want.lie != "anything":
                other = next(each for each in LAYOUTS if each != frame.info.layout)
                layout = other if want.lie == "layout" else frame.info.layout
                too_low = max(0, frame.info.fidelity - 1)
                fidelity = too_low if want.lie == "fidelity" else len(FIDELITIES) - 1
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
        """Take some answers, or wait for all."""
        self.collect(self.tiers[handle % len(self.tiers)], all_of_it=all_of_it)

    @rule(which=st.integers(0, 7))
    def cancel(self, which: int) -> None:
        """Cancel a job, if one is in flight; no precondition, since threads decide about that."""
        if not self.jobs:
            return
        (tier, job), requests = list(self.jobs.items())[which % len(self.jobs)]
        for request in requests.values():
            request.cancelled = True
        tier.cancel(job)

    @rule(names=st.lists(NAMES, max_size=4, unique=True), handle=HANDLES, erase=st.booleans())
    def delete(self, names: list[int], handle: int, erase: bool) -> None:
        """Delete or erase frames."""
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
            assert erase and self.model.lossy, "a deletion was not carried out"
            for key in keys:  # the error means that some may still be stored
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
        """List frames, and compare them with the model."""
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
        """Close the tier, with items in flight, and open it again."""
        assert self.reopener is not None
        old = self.tiers[0]
        self.tiers[0] = type(self).reopener(old)  # type: ignore[misc]
        self.collect(old, all_of_it=True, closed=True)

    @precondition(lambda self: self.damager is not None)
    @rule(number=st.integers(0, 2**31 - 1))
    def damage(self, number: int) -> None:
        """Flip a bit in the tier's storage."""
        assert self.damager is not None
        self.collect(self.tiers[0], all_of_it=True)
        type(self).damager(self.tiers[0], number)  # type: ignore[misc]
        self.model.lossy = True
        self.model.doubt()

    # ---- answers

    def collect(self, tier: Tier, *, all_of_it: bool, closed: bool = False) -> None:
        """Take answers of a tier, and compare them with the model."""
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
        """Compare one answer with the model."""
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
                self.model.check_load(request, answer)
            moved = answer.n_bytes if answer.outcome is Outcome.HIT else item.target.nbytes
            rest = item.target[moved:]
            assert rest == bytes([BEFORE]) * len(rest), "bytes written past the requested ones"
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
            self.given_up |= {item.key} if answer.reason in ("deadline", "cancelled") else set()
            self.model.failed(request)
            memory = item.body
        if not memory.readonly:
            memory[:] = bytes([AFTER]) * memory.nbytes  # reused at once, as its owner may do
        self.done.append((memory.obj, bytes(memory)))

    def excused(self, tier: Tier, request: TierRequest, reason: str) -> bool:
        """Return whether a store may fail for this reason."""
        return {
            "read-only": not tier.writable,
            "invalid": request.frame is None,
            "full": request.room_bytes > tier.capacity_bytes,
            "busy": len(self.model.flying) > 1,
            "deadline": True,
            "cancelled": request.cancelled,
        }.get(reason, False)

    # ---- invariants

    @invariant()
    def capacity_holds(self) -> None:
        """Check that no tier exceeds its capacity."""
        for tier in self.tiers:
            assert 0 <= tier.used_bytes() <= tier.capacity_bytes, "over its capacity"

    @invariant()
    def contains_agrees(self) -> None:
        """Check that `contains` is true for stored keys alone.

        A peer may still find what its owner is deleting: the frame of a store answered early.
        """
        keys = [key_of(name) for name in range(12)]
        for tier in self.tiers:
            end_s = time.monotonic() + (GRACE_S if tier is not self.tiers[0] else 0.0)
            gone = [key for key in self.given_up if self.model.may[key] == {None}]
            while any(tier.contains(gone)) and time.monotonic() < end_s:
                time.sleep(0.001)
            for key, there in zip(keys, tier.contains(keys), strict=True):
                self.model.present(key, there)
        self.given_up.clear()

    @invariant()
    def nothing_is_touched_after_its_answer(self) -> None:
        """Check that targets and bodies are not written after their answer."""
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
    """Drive a tier through random calls, and compare it with a model.

    Several jobs are in flight at a time, their answers are polled at random times, and the memory
    of every item is reused the moment it is answered. Checked: every item is answered once and in
    time; a `HIT` has exactly the bytes and the description that were stored, and only the requested
    stripes; another layout, a fidelity above the accepted one, or missing stripes are a `MISS` with
    that reason; unfit targets and impossible frames fail; nothing is written past the requested
    bytes, nor after an answer; a failed store has not stored its frame; deleted and erased frames
    stay away; `scan` and `contains` agree; the capacity holds; a frame that fits is stored; closing
    answers all items in flight; after `reopen` all frames are stored.

    Args:
        factory: Makes an empty tier of a capacity in bytes.
        reopen: Closes a tier and opens it again, if frames should survive that.
        peer: Opens a second handle of the same place: a reader, or another writer.
        damage: `damage(tier, number)` flips a bit in the tier's storage, chosen by the number. The
            tier may lose frames from then on, but never return wrong bytes.
        lossy: The tier may fail and lose frames (never return wrong bytes), as `FlakyTier` does.
        capacity_bytes: Capacity to test with; about fifty frames should fit.

    Raises:
        AssertionError: The tier broke the protocol; the message has the calls up to the fault.
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
    slow = [HealthCheck.too_slow]  # on a busy machine, or while code is compiled
    how = settings(stateful_step_count=STEPS, deadline=None, suppress_health_check=slow)
    tell(lambda: run_state_machine_as_test(machine, settings=how))


# Codecs, on pages that are hard for codecs.

Runs = tuple[torch.Tensor, torch.Tensor]

PAGE_KINDS = (
    *("noise", "zeros", "constant", "ramp", "outlier channels", "outlier tokens", "large", "tiny"),
    *("denormal", "halves", "mixed"),
)
"""Kinds of pages that are hard for codecs; see `page_of`."""


class Codec(Protocol):
    """Protocol of codecs for `check_codec`; K is `[Hk, P, D]`, V `[Hk, P, Dv]`."""

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        """Return a page as bytes; raise `ValueError` for NaN and infinity."""

    def decode(self, code: bytes) -> Runs:
        """Return K and V as attention reads them, float32."""

    def bounds(self, k: torch.Tensor, v: torch.Tensor) -> Runs:
        """Return the greatest allowed error of each decoded element, float64."""


def page_of(kind: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return float32 runs `[..., P, D]` of a kind; all but "denormal" and "tiny" suit float16."""
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
        dtype: Dtype of raw pages.
        device: Device of the pages.
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

    def convert(
        self, page: bytes, old: PageLayout, new: PageLayout, backend: str | None
    ) -> tuple[bytes, int]:
        """Return a page in another layout, and the status; check that no byte around it changes."""
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
        code, status = self.convert(page, self.raw, self.layout, self.backend)
        oracle = self.convert(page, self.raw, self.layout, "reference")
        require((code, status) == oracle, "the backend and the oracle write different bytes")
        if status != SOUND:
            raise ValueError("NaN, infinity, or a scale beyond float16")
        return code

    def decode(self, code: bytes) -> Runs:
        """Return K and V of a page; check that its raw page has the same values, rounded."""
        page = torch.frombuffer(bytearray(code), dtype=torch.uint8)
        k, v = reference_codec.decoded(page, self.layout, 0, [0])
        raw, status = self.convert(code, self.layout, self.raw, self.backend)
        page = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        for got, exact in zip(reference_codec.decoded(page, self.raw, 0, [0]), (k, v), strict=True):
            expected = reference_codec.narrowed(exact, getattr(torch, self.raw.dtype))
            require(torch.equal(got, expected.float()), "a page decodes to something else")
        require(status == SOUND, "a sealed page decodes to NaN or infinity")
        return k[0], v[0]

    def bounds(self, k: torch.Tensor, v: torch.Tensor) -> Runs:
        """Return the bounds that docs/explain/codecs.md derives."""
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
    """Run the conformance suite on a codec; return if it found no fault. Deterministic.

    Checked on pages of zeros, outliers, extremes, denormals, ties and noise: no element is off by
    more than the bound; decoded pages that are encoded again stay within the bound; equal pages
    give equal bytes, in a number that depends on their shape alone; NaN and infinity are refused;
    operands are not written to. For a codec of the catalogue also: this device and backend write
    the same bytes as the oracle, and none beside the page.

    Args:
        codec: A name, one of `CODECS`, or a codec of your own.
        shapes: Hk, P, D and Dv of the pages.
        dtype: Dtype of raw pages, which elements are rounded to first.
        device: Device of the pages of a codec of the catalogue.
        backend: Kernels that encode and decode its pages: "reference", "cpu" or "triton".
        max_examples: Number of pages to try.

    Raises:
        AssertionError: The codec breaks a rule; the message says which.
    """
    element, cases = getattr(torch, dtype), list[tuple[Codec, tuple[int, int, int, int]]]()
    for shape in shapes:
        if isinstance(codec, str):
            cases.append((CatalogueCodec(codec, shape, dtype, device, backend), shape))
        else:
            cases.append((codec, shape))

    @told(max_examples, shrink=False)  # a smaller seed is no simpler page
    @given(st.sampled_from(cases), *[st.sampled_from(PAGE_KINDS)] * 2, st.integers(0, 1 << 16))
    def story(
        case: tuple[Codec, tuple[int, int, int, int]], kind: str, kind_v: str, seed: int
    ) -> None:
        one, (heads, tokens, dim, dim_v) = case
        k = page_of(kind, (heads, tokens, dim), seed)
        v = page_of(kind_v, (heads, tokens, dim_v), seed + 1)
        judge(one, k.to(element).float(), v.to(element).float(), element, seed)

    tell(story)


def judge(codec: Codec, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, seed: int) -> None:
    """Check all rules of `check_codec` on one page with elements of `dtype`.

    Raises:
        AssertionError: The codec breaks a rule.
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
    again = codec.decode(codec.encode(*once))
    sentence = "an element that was encoded twice is off by more than the bound"
    _within(again, (once[0], once[1]), codec, sentence)
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
