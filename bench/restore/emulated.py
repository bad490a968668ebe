"""Emulated devices: an accelerator and links that sleep for as long as the real ones would work.

Threads, locks, wake-ups and the policy are real, time passes; only the work is missing. So what is
measured holds for the scheduling, and nothing is said about kernels or copies: figures from here
are labelled *emulated*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from bench.restore.device import Clock, Ended, rest
from bench.restore.executor import Executor, Unit
from flowkv.policy.restore import Compute, Costs, Op, RestoreLoad, RestorePolicy, RestoreRequest
from flowkv.policy.restore.costs import Measured
from flowkv.sim.restore import Run

_AHEAD = 2


class _Due:
    """An op that ends at a set time."""

    def __init__(self, start_s: float, end_s: float, ok: bool, clock: Clock) -> None:
        self._ended, self._clock = Ended(start_s, end_s, ok), clock

    def wait(self) -> Ended:
        rest(self._ended.end_s, self._clock)
        return self._ended


class Sleeper:
    """A device on which each op takes as long as it is said to take, one after the other.

    Ends are absolute: an op begins when the one before it was due, if it was given by then, however
    late the threads woke up.

    Attributes:
        ahead: See `Device`.

    Args:
        seconds: What an op takes.
        fails: Which of them fail, having taken as long.
    """

    def __init__(
        self, seconds: Callable[[Op], float], fails: Callable[[RestoreLoad], bool] | None = None
    ) -> None:
        self._seconds, self._fails, self._free_s, self.ahead = seconds, fails, 0.0, _AHEAD

    def begin(self, op: Op, clock: Clock) -> _Due:
        start_s = max(self._free_s, clock())
        self._free_s = start_s + self._seconds(op)
        ok = self._fails is None or not isinstance(op, RestoreLoad) or not self._fails(op)
        return _Due(start_s, self._free_s, ok, clock)


def emulate(
    requests: Sequence[RestoreRequest],
    policy: RestorePolicy,
    actual: Costs,
    costs: Measured | None = None,
    *,
    stages: Sequence[Collection[int] | None] = (None,),
    fails: Callable[[RestoreLoad], bool] | None = None,
) -> Run:
    """Restores requests on emulated devices: one accelerator per stage, one link per tier.

    Args:
        requests: What is restored.
        policy: Decides.
        actual: What things take.
        costs: What the policy expects; it learns from what happens. None: it knows nothing yet.
        stages: Per accelerator: the requests that it computes, None for all.
        fails: Loads that fail.

    Raises:
        StateError: The policy stopped too early, or begins what is not due.
    """
    by_number: Mapping[int, RestoreRequest] = {request.number: request for request in requests}

    def seconds(op: Op) -> float:
        request = by_number[op.request]
        if isinstance(op, RestoreLoad):
            return actual.load_s(request, op.source, op.layers.size * op.tokens.size)
        if isinstance(op, Compute):
            return actual.compute_s(request, op.layers.size, op.tokens)
        return actual.suffix_s(request) / request.layers

    tiers = {source.tier for request in requests for source in request.sources}
    executor = Executor(
        policy,
        Measured() if costs is None else costs,
        [Unit(Sleeper(seconds), among) for among in stages],
        {tier: Sleeper(seconds, fails) for tier in sorted(tiers)},
    )
    return executor.run(requests)
