"""Tiers that are wrong in one way each; `check_tier` must find every one of them.

Each is `MemoryTier` with one thing changed, so that what is found is that thing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from flowkv.testing import MemoryTier
from flowkv.tiers import Completion, Entry, Header, Load, Outcome, Store
from tests.inside import frame_describe as describe

Stored = tuple[Header, bytes]


class WrongStripe(MemoryTier):
    """Gives the first stripes, whichever were wished for."""

    def _load(self, item: Load) -> Completion:
        if item.first and item.stripes:
            item = item._replace(first=0)
        return super()._load(item)


class ShortByOne(MemoryTier):
    """Leaves out the last byte."""

    def _load(self, item: Load) -> Completion:
        last = bytes(item.target[-1:])
        done = super()._load(item)
        if done.outcome is Outcome.HIT and done.n_bytes == item.target.nbytes:
            item.target[-1:] = last
        return done


class WritesBeyond(MemoryTier):
    """Writes whole frames where the target is long enough, whatever was wished for."""

    def _load(self, item: Load) -> Completion:
        done = super()._load(item)
        if done.outcome is Outcome.HIT and item.target.nbytes > done.n_bytes:
            item.target[done.n_bytes] = 0
        return done


class Stale(MemoryTier):
    """Remembers what a key held before it was deleted."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.memory: dict[bytes, Stored] = {}

    def _store(self, item: Store) -> Completion:
        done = super()._store(item)
        if done.outcome is Outcome.STORED:
            self.frames[item.key] = self.memory.setdefault(item.key, self.frames[item.key])
        return done


class Overwrites(MemoryTier):
    """Lets the second store of a key win."""

    def _store(self, item: Store) -> Completion:
        old = self.frames.pop(item.key, None)
        done = super()._store(item)
        if done.outcome is not Outcome.STORED and old is not None:
            self.frames[item.key] = old
        return done


class AnswersTwice(MemoryTier):
    """Answers the last item of a longer job twice."""

    def _answer(self, answers: list[Completion]) -> int:
        job = super()._answer(answers)
        if len(answers) > 2:
            self._answers.append(self._answers[-1])
        return job


class ForgetsToAnswer(MemoryTier):
    """Leaves the last item of a longer job without an answer."""

    def _answer(self, answers: list[Completion]) -> int:
        job = super()._answer(answers)
        if len(answers) > 2:
            self._answers.pop()
        return job


class AnswersLate(MemoryTier):
    """Gives the answers to urgent loads long after their deadline."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.held_until_s = 0.0

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        if deadline_s < 1:
            self.held_until_s = time.monotonic() + 1.0
        return super().submit_load(items)

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        if time.monotonic() < self.held_until_s:
            time.sleep(timeout_s)
            return []
        return super().poll(timeout_s)


class WritesAfterwards(MemoryTier):
    """Says that an urgent load missed its deadline, and fills its target later."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.overdue: list[Load] = []

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        if deadline_s < 1:
            self.overdue += items
            late = [Completion(0, 0, i.key, Outcome.FAILED, "deadline") for i in items]
            return self._answer(late)
        return super().submit_load(items)

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        answers = super().poll(timeout_s)
        if not answers:
            for item in self.overdue:
                self._load(item)
            self.overdue.clear()
        return answers


class KeepsTheBody(MemoryTier):
    """Keeps the caller's memory instead of a copy."""

    def _store(self, item: Store) -> Completion:
        fresh = item.key not in self.frames
        done = super()._store(item)
        if fresh and done.outcome is Outcome.STORED:
            self.frames[item.key] = self.frames[item.key][0], item.body  # type: ignore[assignment]
        return done


class AnyLayout(MemoryTier):
    """Does not look at the layout."""

    def _load(self, item: Load) -> Completion:
        if item.key in self.frames:
            item = item._replace(layout=self.frames[item.key][0].info.layout)
        return super()._load(item)


class AnyFidelity(MemoryTier):
    """Does not look at the fidelity."""

    def _load(self, item: Load) -> Completion:
        return super()._load(item._replace(fidelity=1 << 20))


class Resurrects(MemoryTier):
    """Finds deleted frames again when it is opened again."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.buried: dict[bytes, Stored] = {}

    def delete(self, keys: Sequence[bytes]) -> int:
        self.buried |= {key: self.frames[key] for key in keys if key in self.frames}
        return super().delete(keys)

    def close(self) -> None:
        self.frames |= self.buried


class ErasesNothing(MemoryTier):
    """Says that it erased."""

    def erase(self, keys: Sequence[bytes]) -> int:
        return sum(self.contains(keys))


class Overruns(MemoryTier):
    """Notices that it is full one frame too late."""

    def _store(self, item: Store) -> Completion:
        if self.used_bytes() >= self.capacity_bytes:
            return super()._store(item)
        self.capacity_bytes += item.body.nbytes
        try:
            return super()._store(item)
        finally:
            self.capacity_bytes -= item.body.nbytes


class AlwaysFull(MemoryTier):
    """Refuses frames long before it is full."""

    def _store(self, item: Store) -> Completion:
        if len(self.frames) > 3 and item.key not in self.frames:
            return Completion(0, 0, item.key, Outcome.FAILED, "full")
        return super()._store(item)


class WrongInfo(MemoryTier):
    """Describes pages of later ranks as those of rank 0."""

    def _load(self, item: Load) -> Completion:
        done = super()._load(item)
        if done.info is None:
            return done
        return done._replace(info=done.info._replace(rank=0))


class FailedButThere(MemoryTier):
    """Says that an urgent store failed, and keeps it."""

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        done = [self._store(item) for item in items]
        if not deadline_s:
            late = [Completion(0, 0, i.key, Outcome.FAILED, "deadline") for i in items]
            return self._answer(late)
        return self._answer(done)


class LosesAtClose(MemoryTier):
    """Forgets its newest frame when it is closed."""

    def close(self) -> None:
        if self.frames:
            self.frames.popitem()


class MixesJobs(MemoryTier):
    """Swaps the first answers of two jobs that are polled together."""

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        answers = super().poll(timeout_s)
        jobs = sorted({answer.job for answer in answers})
        if len(jobs) > 1:
            first, last = (next(i for i, a in enumerate(answers) if a.job == j) for j in jobs[:2])
            answers[first], answers[last] = (
                answers[first]._replace(job=jobs[1]),
                answers[last]._replace(job=jobs[0]),
            )
        return answers


class RaisesForTargets(MemoryTier):
    """Lets the caller's mistake escape as an exception."""

    def _load(self, item: Load) -> Completion:
        if item.key in self.frames and item.target.readonly:
            raise BufferError("the target is read-only")
        return super()._load(item)


class TakesAnything(MemoryTier):
    """Does not look at what it stores."""

    def _store(self, item: Store) -> Completion:
        done = super()._store(item)
        return done._replace(outcome=Outcome.STORED) if done.reason == "invalid" else done


class CancelsTwice(MemoryTier):
    """Answers a cancelled job again."""

    def cancel(self, job: int) -> None:
        self._answers.append(Completion(job, 0, bytes(32), Outcome.FAILED, "cancelled"))


class ListsBackwards(MemoryTier):
    """Newest first."""

    def scan(self) -> Iterator[Entry]:
        return reversed(list(super().scan()))


class HidesFrames(MemoryTier):
    """Does not list the oldest frame."""

    def scan(self) -> Iterator[Entry]:
        return itertools.islice(super().scan(), 1, None)


class ClosesSilently(MemoryTier):
    """Forgets its answers when it is closed."""

    def close(self) -> None:
        self._answers.clear()


class Unverified(MemoryTier):
    """Believes its memory."""

    def _load(self, item: Load) -> Completion:
        if item.key in self.frames:
            header, body = self.frames[item.key]
            self.frames[item.key] = describe(header.key, header.info, body), body
        return super()._load(item)


MUTANTS = [
    *(WrongStripe, ShortByOne, WritesBeyond, Stale, Overwrites, AnswersTwice, ForgetsToAnswer),
    *(AnswersLate, WritesAfterwards, KeepsTheBody, AnyLayout, AnyFidelity, ErasesNothing),
    *(Overruns, AlwaysFull, WrongInfo, FailedButThere, MixesJobs, RaisesForTargets),
    *(TakesAnything, CancelsTwice, ListsBackwards, HidesFrames, ClosesSilently),
]
"""Found without further help; the others need `reopen`, `damage` or `peer`."""


class Behind(MemoryTier):
    """As a second handle: sees what the first one held when it was opened."""

    writable = False

    def __init__(self, first: MemoryTier) -> None:
        super().__init__(first.capacity_bytes)
        self.frames = dict(first.frames)

    def delete(self, keys: Sequence[bytes]) -> int:
        return 0
