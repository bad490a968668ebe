"""Tiers for tests: slow ones, read-only ones, ones that only claim to last; and how to restore."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from flowkv.policy.restore import Compute, RestoreLoad, RestorePolicy, Span, State
from flowkv.testing import MemoryTier
from flowkv.tiers import Completion, Load, Outcome, Store


class Wrapped:
    """A tier that is another one but for what a subclass or keyword changes."""

    def __init__(self, inner: Any, **changes: Any) -> None:
        self.inner = inner
        for name, value in changes.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def lasting(**options: Any) -> Wrapped:
    """Memory that claims to be a disk, so that pages are written down at once."""
    return Wrapped(MemoryTier(**{"name": "lasting"} | options), kind="disk")


class Silent(Wrapped):
    """Takes loads and says nothing until told to; then answers with or without the bytes."""

    def __init__(self, inner: Any, **changes: Any) -> None:
        super().__init__(inner, **changes)
        self.silent, self.loads = True, 0
        self._kept: list[tuple[int, Sequence[Load]]] = []
        self._ready: list[Completion] = []

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        self.loads += 1
        if not self.silent:
            return int(self.inner.submit_load(items))
        self._kept.append((-self.loads, list(items)))
        return -self.loads

    def scribble(self) -> None:
        """Writes rubbish into every target that is still lent to it."""
        for _, items in self._kept:
            for item in items:
                item.target.cast("B")[:] = b"\xee" * item.target.nbytes

    def speak(self) -> None:
        """Answers everything kept so far."""
        for job, items in self._kept:
            for index, item in enumerate(items):
                self._ready.append(Completion(job, index, item.key, Outcome.MISS))
        self._kept, self.silent = [], False

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        ready, self._ready = self._ready, []
        return ready + self.inner.poll(0.0)


class Halting(Silent):
    """Answers the first load of each job while it is silent, and only that one."""

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        job = super().submit_load(items, deadline_s=deadline_s)
        if self.silent:
            self.inner.submit_load(items[:1])
            self._ready += [one._replace(job=job, item=0) for one in self.inner.poll(0.0)]
        return job


class Deferred(Wrapped):
    """Stores are carried out, and answered, when told to: until then it holds their bodies."""

    def __init__(self, inner: Any, **changes: Any) -> None:
        super().__init__(inner, **changes)
        self._kept: list[tuple[int, Sequence[Store]]] = []
        self._ready: list[Completion] = []
        self._jobs = 0

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        self._jobs -= 1
        self._kept.append((self._jobs, items))
        return self._jobs

    def work(self, reason: str = "") -> None:
        """Carries out what was submitted, or fails it for a reason."""
        for job, items in self._kept:
            for index, item in enumerate(items):
                if reason:
                    answer = Completion(job, index, item.key, Outcome.FAILED, reason)
                else:
                    self.inner.submit_store([item])
                    (answer,) = self.inner.poll(0.0)
                self._ready.append(answer._replace(job=job, item=index))
        self._kept = []

    @property
    def waiting(self) -> int:
        return sum(len(items) for _, items in self._kept)

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        if timeout_s > 0:
            self.work()
        ready, self._ready = self._ready, []
        return ready + self.inner.poll(0.0)


class Halves(RestorePolicy):
    """Computes page by page up to a part of the prefix, and loads page by page down to it."""

    name = "halves"

    def __init__(self, part: float) -> None:
        self.part = part

    def _meet(self, progress: Any) -> int:
        request = progress.request
        pages = round((request.tokens - request.resident) * self.part) // request.unit
        return max(request.resident + pages * request.unit, progress.lost)

    def next_compute(self, state: State, among: Collection[int] | None = None) -> Any:
        for progress in state.among(among):
            first, request = progress.front[0], progress.request
            if request.computable and first < min(self._meet(progress), *progress.back):
                stop = min(first + request.unit, *progress.back)
                return Compute(request.number, Span(0, request.layers), Span(first, stop))
        return None

    def next_load(self, state: State, tier: str) -> Any:
        for progress in state:
            request, stop = progress.request, progress.back[0]
            floor = self._meet(progress) if request.computable else request.resident
            if stop > floor and request.sources[0].tier == tier:
                tokens = Span(max(floor, stop - request.unit), stop)
                return RestoreLoad(request.number, Span(0, request.layers), tokens, 0)
        return None


def load_everything(patch: pytest.MonkeyPatch) -> None:
    """Have caches store and load all pages, also where computing them is faster."""
    patch.setattr("flowkv.cache.restore.make_restore_policy", lambda _: Halves(0.0))
    for asked in ("worth", "pays_to_store"):
        patch.setattr(f"flowkv.policy.restore.LoadGate.{asked}", lambda *_: True)
