"""The state machine behind `check_tier`: any tier against a dict."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import NamedTuple

from flowkv.core.errors import MissingDependencyError
from flowkv.core.layout import CODECS, GRANULE_BYTES
from flowkv.tiers.base import Completion, FrameInfo, Load, Outcome, Store, Tier
from flowkv.tiers.frame import KINDS

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
    raise MissingDependencyError("flowkv.testing", "dev") from None

PATIENCE_S = 20.0
NAMES = st.integers(0, 11)


def key_of(name: int) -> bytes:
    """Key of the frame that the machine knows by a small number."""
    return hashlib.sha256(b"check_tier %d" % name).digest()


LAYOUTS = (b"\1" * 16, b"\2" * 16)


class Sketch(NamedTuple):
    """What a frame is made from; small, so that a failing example can be read."""

    kind: str
    codec: int
    lossier: int
    layout: bytes
    parent: int
    numbers: tuple[int, int, int, int]
    stripes: int
    stripe_bytes: int
    seed: int

    def frame(self) -> tuple[FrameInfo, bytes]:
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
        return info, hashlib.shake_128(bytes([self.seed])).digest(step * self.stripes)


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
)
WISHES = st.tuples(NAMES, st.sampled_from(LAYOUTS), st.integers(0, len(CODECS) - 1), st.booleans())


class TierMachine(RuleBasedStateMachine):
    """Random calls; `model` holds what must be found."""

    factory: Callable[[int], Tier]
    reopener: Callable[[Tier], Tier] | None
    lossy: bool
    capacity_bytes: int

    def __init__(self) -> None:
        super().__init__()
        self.tier = type(self).factory(self.capacity_bytes)
        self.model: dict[bytes, tuple[FrameInfo, bytes]] = {}
        self.stores = 0
        self.batches: dict[bytes, int] = {}

    def answers(self, job: int, count: int) -> list[Completion]:
        """All answers of the one job in flight, in the order of its items."""
        found: list[Completion] = []
        end = time.monotonic() + PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < end, f"{len(found)} of {count} items were answered"
            found += self.tier.poll(0.05)
        assert {answer.job for answer in found} <= {job}, "an answer names another job"
        assert sorted(a.item for a in found) == list(range(count)), "not each item once"
        return sorted(found, key=lambda answer: answer.item)

    @rule(wanted=st.lists(st.tuples(NAMES, SKETCHES), min_size=1, max_size=4))
    def store(self, wanted: list[tuple[int, Sketch]]) -> None:
        """Stores frames; a key that is there keeps its frame."""
        frames = [(key_of(name), *sketch.frame()) for name, sketch in wanted]
        items = [Store(key, info, memoryview(body)) for key, info, body in frames]
        self.stores += 1
        for item in items if self.lossy else ():
            if not self.tier.contains([item.key])[0]:
                self.model.pop(item.key, None)  # lost: the next store is the first again
        room = self.tier.used_bytes() + sum(self.tier.frame_bytes(i.body.nbytes) for i in items)
        answers = self.answers(self.tier.submit_store(items), len(items))
        for item, answer in zip(items, answers, strict=True):
            assert answer.key == item.key
            assert answer.outcome in (Outcome.STORED, Outcome.FAILED)
            if answer.outcome is Outcome.STORED:
                assert not answer.reason
                if item.key not in self.model:
                    self.model[item.key] = item.info, bytes(item.body)
                    self.batches[item.key] = self.stores
            else:
                assert answer.reason, "a failure says why"
                assert self.lossy or (answer.reason == "full" and room > self.capacity_bytes)

    @rule(wanted=st.lists(WISHES, min_size=1, max_size=4))
    def load(self, wanted: list[tuple[int, bytes, int, bool]]) -> None:
        """Loads frames; an honest wish hits exactly what is in the model."""
        items = []
        for name, layout, fidelity, honest in wanted:
            key = key_of(name)
            if honest and key in self.model:
                layout, fidelity = self.model[key][0].layout, len(CODECS) - 1
            size = len(self.model[key][1]) if key in self.model else GRANULE_BYTES
            items.append(Load(key, memoryview(bytearray(size + 3)), layout, fidelity))
        answers = self.answers(self.tier.submit_load(items), len(items))
        for item, answer in zip(items, answers, strict=True):
            self.compare(item, answer)

    def compare(self, item: Load, answer: Completion) -> None:
        """One answered load against the model."""
        assert answer.key == item.key
        info, body = self.model.get(item.key, (None, b""))
        if answer.outcome is Outcome.HIT:
            assert info is not None, "a hit for what was never stored"
            assert answer.info == info
            assert info.layout == item.layout and info.fidelity <= item.fidelity
            assert answer.n_bytes == len(body)
            assert item.target[: len(body)] == body, "WRONG BYTES"
            assert item.target[len(body) :] == bytes(3), "bytes written past the body"
            return
        assert answer.outcome in (Outcome.MISS, Outcome.FAILED)
        if self.lossy:
            if answer.reason not in ("injected", "layout", "fidelity"):
                self.model.pop(item.key, None)
            return
        assert answer.outcome is Outcome.MISS, answer
        if info is None:
            assert answer.reason == ""
        elif info.layout != item.layout:
            assert answer.reason == "layout"
        else:
            assert answer.reason == "fidelity" and info.fidelity > item.fidelity, answer

    @rule(names=st.lists(NAMES, max_size=4, unique=True))
    def delete(self, names: list[int]) -> None:
        """Forgets frames."""
        keys = [key_of(name) for name in names]
        there = sum(self.model.pop(key, None) is not None for key in keys)
        gone = self.tier.delete(keys)
        assert gone <= there if self.lossy else gone == there
        assert not any(self.tier.contains(keys))

    @rule()
    def scan(self) -> None:
        """Lists frames."""
        entries = list(self.tier.scan())
        found = {entry.key: entry.info for entry in entries}
        assert len(found) == len(entries), "a key twice"
        assert all(entry.n_bytes > 0 for entry in entries)
        expected = {key: info for key, (info, _) in self.model.items()}
        batches = [self.batches[key] for key in found]
        assert batches == sorted(batches), "not oldest first"
        if self.lossy:
            assert found.items() <= expected.items()
        else:
            assert found == expected

    @precondition(lambda self: self.reopener is not None)
    @rule()
    def reopen(self) -> None:
        """Closes the tier and opens it again."""
        assert self.reopener is not None
        self.tier = type(self).reopener(self.tier)  # type: ignore[misc]

    @invariant()
    def capacity_holds(self) -> None:
        """Never more than allowed, never less than what it holds."""
        assert 0 <= self.tier.used_bytes() <= self.tier.capacity_bytes

    @invariant()
    def contains_agrees(self) -> None:
        """What was stored is believed to be there, and nothing else."""
        keys = [key_of(name) for name in range(12)]
        for key, there in zip(keys, self.tier.contains(keys), strict=True):
            assert there == (key in self.model) or (self.lossy and not there)

    def teardown(self) -> None:
        """Closes the tier."""
        self.tier.close()


def run(
    factory: Callable[[int], Tier],
    *,
    reopen: Callable[[Tier], Tier] | None,
    lossy: bool,
    capacity_bytes: int,
) -> None:
    """Runs the machine under the caller's hypothesis profile."""
    machine = type(
        "TierMachine",
        (TierMachine,),
        {
            "factory": staticmethod(factory),
            "reopener": staticmethod(reopen) if reopen else None,
            "lossy": lossy,
            "capacity_bytes": capacity_bytes,
        },
    )
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=30))
