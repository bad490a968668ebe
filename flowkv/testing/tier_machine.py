"""The state machine behind `check_tier`: any tier against a model of what it may hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flowkv.core.errors import MissingDependencyError, StoreError
from flowkv.core.layout import CODECS, GRANULE_BYTES
from flowkv.testing.tier_model import Model, Wish
from flowkv.testing.tier_sketch import LAYOUTS, NAMES, SKETCHES, WANTS, Sketch, Want, key_of
from flowkv.testing.told import tell
from flowkv.tiers.base import Completion, Load, Outcome, Store, Tier

try:
    from hypothesis import settings
    from hypothesis import strategies as st
    from hypothesis.stateful import (
        RuleBasedStateMachine,
        invariant,
        precondition,
        rule,
        run_state_machine_as_test,
    )
except ImportError:  # pragma: no cover
    raise MissingDependencyError("flowkv.testing", "testing", "pytest and hypothesis") from None

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
        self.jobs: dict[tuple[Tier, int], dict[int, Wish]] = {}
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
        wishes, due_s = {}, time.monotonic() + deadline_s
        for index, (name, sketch) in enumerate(wanted):
            frame = sketch.frame()
            body = memoryview(bytearray(frame.body))
            valid = None if sketch.spoil or not tier.writable else frame
            wish = Wish(Store(key_of(name), frame.info, body), valid, due_s, self.step)
            wishes[index] = wish
        need = sum(tier.frame_bytes(wish.n_bytes) for wish in wishes.values())
        flying = [wish for wish in self.model.flying if wish.frame]
        before = tier.used_bytes() + sum(tier.frame_bytes(wish.n_bytes) for wish in flying)
        for wish in flying:
            wish.room_bytes += need
        for wish in wishes.values():
            wish.room_bytes = before + need
            self.model.submit(wish)
        items = [wish.item for wish in wishes.values()]
        self.jobs[tier, tier.submit_store(items, deadline_s=deadline_s)] = wishes  # type: ignore[arg-type]

    @rule(wanted=st.lists(WANTS, min_size=1, max_size=4), handle=HANDLES, deadline_s=DEADLINES_S)
    def load(self, wanted: list[Want], handle: int, deadline_s: float) -> None:
        """Starts loads, most of them of what may be there."""
        tier = self.tiers[handle % len(self.tiers)]
        self.step += 1
        wishes, due_s = {}, time.monotonic() + deadline_s
        for index, want in enumerate(wanted):
            wishes[index] = Wish(self.load_of(want), None, due_s, self.step)
            self.model.submit(wishes[index])
        items = [wish.item for wish in wishes.values()]
        self.jobs[tier, tier.submit_load(items, deadline_s=deadline_s)] = wishes  # type: ignore[arg-type]

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
        (tier, job), wishes = list(self.jobs.items())[which % len(self.jobs)]
        for wish in wishes.values():
            wish.cancelled = True
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
            left = [w for (t, _), wishes in self.jobs.items() if t is tier for w in wishes.values()]
            late = [wish for wish in left if asked_s > wish.due_s + GRACE_S]
            assert not late, f"{len(late)} items were not answered by their deadline"
            if not left or not all_of_it:
                break
            assert time.monotonic() < end_s, f"{len(left)} items were not answered"
        if not left:
            assert not tier.poll(0.0), "more answers than items"
        self.sound = True

    def check(self, tier: Tier, answer: Completion, closed: bool) -> None:
        """One answer against the model."""
        wishes = self.jobs.get((tier, answer.job), {})
        wish = wishes.pop(answer.item, None)
        assert wish is not None, (
            f"job {answer.job} item {answer.item} was answered twice, or never asked"
        )
        if not wishes:
            del self.jobs[tier, answer.job]
        item, loose = wish.item, closed or self.model.lossy
        assert answer.key == item.key, "the answer names another key"
        if isinstance(item, Load):
            if closed and answer.outcome is Outcome.FAILED:
                self.model.failed(wish)
            else:
                self.model.loaded(wish, answer)
            moved = answer.n_bytes if answer.outcome is Outcome.HIT else item.target.nbytes
            rest = item.target[moved:]
            assert rest == bytes([BEFORE]) * len(rest), "bytes written past what was wished for"
            memory = item.target
        elif answer.outcome is Outcome.STORED:
            assert wish.frame or any(wish.seen), "a frame that cannot be was stored"
            assert not answer.reason
            self.model.stored(wish)
            if wish.alone and wish.frame:
                self.born.setdefault(item.key, (wish.step, self.step))
            memory = item.body
        else:
            assert answer.outcome is Outcome.FAILED and answer.reason, "a failure says why"
            assert loose or self.excused(tier, wish, answer.reason), f"failed: {answer.reason}"
            self.model.failed(wish)
            memory = item.body
        if not memory.readonly:
            memory[:] = bytes([AFTER]) * memory.nbytes  # its owner uses it again, at once
        self.done.append((memory.obj, bytes(memory)))

    def excused(self, tier: Tier, wish: Wish, reason: str) -> bool:
        """Whether a store may fail for this reason."""
        return {
            "read-only": not tier.writable,
            "invalid": wish.frame is None,
            "full": wish.room_bytes > tier.capacity_bytes,
            "busy": len(self.model.flying) > 1,
            "deadline": True,
            "cancelled": wish.cancelled,
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


def run(factory: Callable[[int], Tier], **options: Any) -> None:
    """Runs the machine under the caller's hypothesis profile; options as of `check_tier`."""
    functions = {name: options.pop(name) for name in ("reopen", "peer", "damage")}
    names = {"reopen": "reopener", "peer": "peer", "damage": "damager"}
    members: dict[str, Any] = {
        names[name]: staticmethod(function) if function else None
        for name, function in functions.items()
    }
    machine = type(
        "TierMachine", (TierMachine,), {"factory": staticmethod(factory), **members, **options}
    )
    how = settings(stateful_step_count=STEPS)
    tell(lambda: run_state_machine_as_test(machine, settings=how))
