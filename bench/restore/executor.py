"""Restores by real threads: one per engine, one state, one policy, whatever the devices are.

Each thread asks the policy for its engine's next op, begins it, and waits for its end; whoever has
nothing to do sleeps until something happened elsewhere. All of it is under one lock, but for what
the devices do.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from bench.restore.device import Device, Ended, Mark, stopwatch
from flowkv.core.errors import StateError
from flowkv.policy.restore import (
    Compute,
    Op,
    Progress,
    RestoreLoad,
    RestorePolicy,
    RestoreRequest,
    State,
    Suffix,
)
from flowkv.policy.restore.costs import Measured
from flowkv.sim.restore import Done, Run, summed

_LOOKS, _PAUSE_S = 3, 0.001  # of every engine, before it is believed that none goes on


class Unit(NamedTuple):
    """An engine that computes, and the requests that it can compute (None for all)."""

    device: Device
    among: Collection[int] | None = None


class _Engine:
    """One thread's device, what it asks, and what it has under way."""

    def __init__(self, device: Device, ask: Callable[[], Op | None]) -> None:
        self.device, self.ask = device, ask
        self.flying: deque[tuple[Op, float, Mark]] = deque()  # with when its cells were taken

    def room(self) -> bool:
        """Whether it takes another op before what it has under way is over.

        Chunks of a prefix are given one by one: which is next depends on what was loaded by then.
        """
        if not self.flying:
            return True
        one_by_one = isinstance(self.flying[-1][0], Compute)
        return len(self.flying) < self.device.ahead and not one_by_one


class Executor:
    """Restores some requests, together, once.

    Args:
        policy: Decides.
        costs: What it is told to expect; learns from what happens.
        units: Engines that compute, at least one. The first runs on the thread of `run`.
        links: What loads, by tier.
    """

    def __init__(
        self,
        policy: RestorePolicy,
        costs: Measured,
        units: Sequence[Unit],
        links: Mapping[str, Device],
    ) -> None:
        self.policy, self.costs = policy, costs
        self.state = state = State(costs)
        self._engines = [
            _Engine(unit.device, partial(policy.next_compute, state, unit.among)) for unit in units
        ]
        self._engines += [
            _Engine(device, partial(policy.next_load, state, tier))
            for tier, device in links.items()
        ]
        self._waiting: deque[RestoreRequest] = deque()
        self._changed = threading.Condition()
        self._flying = self._looks = self._resting = 0
        self._error: BaseException | None = None
        self._timeline: list[Done] = []
        self._failed_s: dict[int, float] = {}  # of each request, when a load last failed
        self._ttft_s: dict[int, float] = {}

    def run(self, requests: Sequence[RestoreRequest]) -> Run:
        """Restores them, each from when it arrives.

        Raises:
            StateError: The policy has nothing left to do, and something is not restored.
        """
        self._waiting.extend(sorted(requests, key=lambda request: request.arrived_s))
        self._clock = stopwatch()
        threads = [
            threading.Thread(target=self._work, args=(engine,), daemon=True)
            for engine in self._engines[1:]
        ]
        for thread in threads:
            thread.start()
        self._work(self._engines[0])
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        # A first token is there when its thread knows, not when the device was done.
        return msgspec.structs.replace(summed(requests, self._timeline), ttft_s=self._ttft_s)

    # ---- one engine

    def _work(self, engine: _Engine) -> None:
        try:
            self._serve(engine)
        except BaseException as error:  # of a thread: told to whoever called `run`
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            for *_, mark in engine.flying:  # a device may still write
                mark.wait()

    def _serve(self, engine: _Engine) -> None:
        while True:
            with self._changed:
                begun = self._next(engine)
            if begun is not None:
                engine.flying.append((*begun, engine.device.begin(begun[0], self._clock)))
            elif engine.flying:
                op, taken_s, mark = engine.flying.popleft()
                ended = mark.wait()
                with self._changed:
                    self._end(op, taken_s, ended)
            else:
                return

    def _next(self, engine: _Engine) -> tuple[Op, float] | None:
        """What it begins, and when; None if it waits for what is under way, or all is over."""
        while self._error is None and (self._waiting or self.state.requests):
            self._arrive()
            op = engine.ask() if engine.room() else None
            if op is not None:
                self.state.begin(op)
                self._flying += 1
                self._happened()
                return op, self._clock()
            if engine.flying:
                return None
            self._idle()
        return None

    def _idle(self) -> None:
        """Waits until something happens."""
        if self._waiting:
            self._changed.wait(max(0.0, self._waiting[0].arrived_s - self._clock()))
        elif self._flying:
            self._changed.wait()
        else:  # only what the policy remembers can change
            self._resting += 1
            # An engine between two ops has nothing under way, and is about to ask.
            self._looks += self._resting == len(self._engines)
            if self._looks > _LOOKS * len(self._engines):
                raise StateError(
                    f"policy {self.policy.name} has nothing to do and something is not restored",
                    "Have next_compute or next_load answer",
                )
            self._changed.notify_all()
            self._changed.wait(_PAUSE_S)
            self._resting -= 1

    # ---- what happens

    def _happened(self) -> None:
        self._looks = 0
        self._changed.notify_all()

    def _arrive(self) -> None:
        self.state.now_s = self._clock()
        while self._waiting and self._waiting[0].arrived_s <= self.state.now_s:
            self._finish(self.state.add(self._waiting.popleft()))
            self._happened()

    def _end(self, op: Op, taken_s: float, ended: Ended) -> None:
        start_s, end_s, ok = ended
        progress = self.state.requests[op.request]
        self._flying -= 1
        if ok:
            self.state.end(op)
            self._learn(progress.request, op, end_s - start_s)
        else:  # until now, others went on as if it came
            end_s = self._failed_s[op.request] = self._clock()
            self.state.fail(op)
        failed_s = self._failed_s.get(op.request, 0.0)
        if isinstance(op, RestoreLoad) and taken_s < failed_s <= start_s:
            start_s = math.nextafter(failed_s, 0.0)  # begun before that, whenever its turn came
        self._timeline.append(Done(op, start_s, end_s, ok))
        self._finish(progress)
        self._happened()

    def _finish(self, progress: Progress) -> None:
        if progress.done and not progress.flying:
            number = progress.request.number
            self._ttft_s[number] = self._clock() - progress.request.arrived_s
            self.state.remove(number)
            self.policy.forget(number)

    def _learn(self, request: RestoreRequest, op: Op, seconds: float) -> None:
        if isinstance(op, RestoreLoad):
            self.costs.loaded(request, op.source, op.layers.size * op.tokens.size, seconds)
        elif isinstance(op, Suffix):
            self.costs.suffixed(request, seconds * request.layers)
        else:
            self.costs.computed(request, op.layers.size, op.tokens, seconds)
