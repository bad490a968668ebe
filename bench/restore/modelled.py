"""The cells of the protocol on a virtual clock: a formula gives the time of each operation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from time import thread_time

from bench.restore.baselines import RESTORE_POLICIES, make_restore_policy
from bench.restore.grid import staged
from bench.restore.row import OURS, Bounds, Cell, Outcome
from flowkv.core.errors import ConfigError
from flowkv.policy.restore import Compute, RestoreLoad, RestorePolicy, RestoreRequest, State, Suffix
from flowkv.policy.restore.costs import Measured, lower_bound
from flowkv.sim.restore import GPUS, SHAPES, Modelled, Run, asked, run

STAGED = "stages"
"""The part of the protocol that is about several devices."""


_READS = 16  # of the clock, to know what one takes


class Timed(RestorePolicy):
    """A policy beside a stopwatch: of this thread's processor time, which others do not move.

    Attributes:
        seconds: Spent in its code.
    """

    def __init__(self, policy: RestorePolicy) -> None:
        self.policy, self.name, self.seconds = policy, policy.name, 0.0
        reads = [(thread_time(), thread_time()) for _ in range(_READS)]
        self._reading_s = min(second - first for first, second in reads)

    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        begun = thread_time()
        op = self.policy.next_compute(state, among)
        self.seconds += thread_time() - begun - self._reading_s
        return op

    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        begun = thread_time()
        op = self.policy.next_load(state, tier)
        self.seconds += thread_time() - begun - self._reading_s
        return op

    def forget(self, number: int) -> None:
        self.policy.forget(number)


def policies(cell: Cell) -> Sequence[str]:
    """Return the names of the policies that are compared in a cell: one, where layers lie apart."""
    return [OURS] if cell.part == STAGED else list(RESTORE_POLICIES)


@cache  # for all policies of a cell
def bounds(cell: Cell) -> Bounds:
    """Return the lower bounds of a cell."""
    if cell.part == STAGED:
        bound_s = staged(costs_of(cell), cell.tokens, cell.stages).bound_s
        return Bounds(mean_s=bound_s, makespan_s=bound_s)
    requests, costs = requests_of(cell), costs_of(cell).ideal
    makespan_s = lower_bound(requests, costs)
    # Where the bound is reached, the link is busy until then with what is not computed.
    all_s = sum(costs.load_s(one, 0, one.tokens * one.layers) for one in requests)
    return Bounds(
        mean_s=lower_bound(requests, costs, of="mean"),
        makespan_s=makespan_s,
        computed=max(0.0, 1.0 - makespan_s / all_s),
    )


def play(cell: Cell, policy: str) -> Outcome:
    """Run a policy in a cell; it begins with the costs of the formula, as if calibrated."""
    if cell.part == STAGED:
        return _staged(cell)
    timed, costs = Timed(make_restore_policy(policy)), costs_of(cell)
    requests = requests_of(cell)
    return _outcome(run(requests, timed, costs, believed=Measured(costs)), requests, timed)


def _staged(cell: Cell) -> Outcome:
    found = staged(costs_of(cell), cell.tokens, cell.stages)
    moved = found.link_bytes + found.boundary_bytes
    all_bytes = cell.tokens * SHAPES[cell.model].layers * SHAPES[cell.model].cell_bytes
    return Outcome(
        ttft_s=(found.restored_s,),
        link_bytes=moved,
        computed=1.0 - found.link_bytes / all_bytes,
        compute_busy=None,
        link_busy=moved * 8.0 / (cell.gbps * 1e9) / cell.stages / found.restored_s,
        planner_s=0.0,
        boundary_bytes=found.boundary_bytes,
    )


def _outcome(run: Run, requests: Sequence[RestoreRequest], timed: Timed) -> Outcome:
    """Return the outcome of a run."""
    ttft_s = tuple(run.ttft_s[request.number] for request in requests)
    span_s = run.makespan_s
    tokens = {request.number: request.tokens for request in requests}
    return Outcome(
        ttft_s=ttft_s,
        link_bytes=run.link_bytes,
        computed=sum(run.met[i] * n for i, n in tokens.items()) / sum(tokens.values()),
        compute_busy=run.compute_busy_s / span_s,
        link_busy=run.link_busy_s / span_s,
        planner_s=timed.seconds,
    )


def costs_of(cell: Cell) -> Modelled:
    """What things take in a cell, by formula.

    Raises:
        ConfigError: If a model or GPU is unknown.
    """
    if cell.model not in SHAPES or cell.gpu not in GPUS:
        raise ConfigError(
            f"there is no {cell.model} on {cell.gpu}",
            f"Models are {', '.join(SHAPES)}; GPUs are {', '.join(GPUS)}",
        )
    return Modelled(SHAPES[cell.model], GPUS[cell.gpu], cell.gbps, share=cell.compute_share)


def requests_of(cell: Cell) -> list[RestoreRequest]:
    """What is asked for in a cell."""
    shape = SHAPES[cell.model]
    return [
        asked(shape, tokens, cell.suffix, number=number, codecs=cell.codecs)
        for number, tokens in enumerate(cell.lengths or (cell.tokens,))
    ]
