"""Restores on emulated devices: real threads, real time, no work."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Collection
from itertools import pairwise

import pytest

from bench.restore.baselines import RESTORE_POLICIES, make_restore_policy
from bench.restore.device import Clock, Done, Ended, Mark, stopwatch
from bench.restore.emulated import Sleeper, emulate
from bench.restore.executor import Executor, Unit
from bench.restore.protocol import EMULATED
from flowkv.policy.restore import (
    Compute,
    Measured,
    Op,
    RestoreLoad,
    RestorePolicy,
    RestoreRequest,
    Source,
    Span,
    State,
    Suffix,
)
from flowkv.sim.restore import GPUS, SHAPES, Modelled, asked, lower_bound
from tests.inside import StateError, TwoPointer
from tests.policy.restore.verifier import Caps, verify

ONE_LINK = Caps(computes=1, loads={"link": 1})


class Flat:
    """Costs that are the same everywhere: tens of microseconds, so that tests are short."""

    def __init__(self, cell_s: float = 2e-7, load_s: float = 2e-7) -> None:
        self.cell_s, self.loaded_s = cell_s, load_s

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        return layers * tokens.size * self.cell_s

    def suffix_s(self, request: RestoreRequest) -> float:
        return request.layers * request.suffix * self.cell_s

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
        return cells * self.loaded_s


def a_request(number: int = 0, tokens: int = 2048, **fields: object) -> RestoreRequest:
    given = {"suffix": 64, "layers": 4, "sources": (Source("link", "raw", 100.0),), **fields}
    return RestoreRequest(number=number, tokens=tokens, **given)  # type: ignore[arg-type]


class Never(RestorePolicy):
    """Begins a little, then nothing."""

    name = "never"

    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        for progress in state:
            if progress.front[0] == 0:
                return Compute(progress.request.number, Span(0, 4), Span(0, 64))
        return None

    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        return None


class Late(Never):
    """Loads once it was asked often enough, though nothing has happened since."""

    name = "late"

    def __init__(self, patience: int) -> None:
        self.asked, self.patience = 0, patience

    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        for progress in state:
            request = progress.request
            if progress.suffix < request.layers and progress.there(progress.suffix):
                return Suffix(request.number, progress.suffix)
        return None

    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        self.asked += 1
        for progress in state:
            if self.asked > self.patience and not progress.met:
                return RestoreLoad(progress.request.number, Span(0, 4), Span(0, progress.back[0]))
        return None


@pytest.mark.parametrize("name", RESTORE_POLICIES)
@pytest.mark.parametrize("known", [True, False])
def test_every_policy_restores(name: str, known: bool) -> None:
    request, costs = a_request(), Flat()
    run = emulate([request], make_restore_policy(name), costs, Measured(costs) if known else None)
    verify([request], run.timeline, ONE_LINK)
    assert run.ttft_s[0] >= max(done.end_s for done in run.timeline)
    assert run.link_busy_s == pytest.approx((1 - run.met[0]) * 4 * 2048 * 2e-7)
    assert run.link_bytes == pytest.approx((1 - run.met[0]) * 4 * 2048 * 100)
    computed_s = run.met[0] * 4 * 2048 * 2e-7
    assert run.compute_busy_s == pytest.approx(computed_s + costs.suffix_s(request))


@pytest.mark.parametrize("name", RESTORE_POLICIES)
def test_requests_come_one_after_the_other_and_share_what_there_is(name: str) -> None:
    requests = [
        a_request(3, 256, arrived_s=0.1, suffix=0, resident=256),
        a_request(0, 1024),
        a_request(1, 640, arrived_s=0.001, resident=128),
        a_request(2, 1500, arrived_s=0.0005, suffix=0),
    ]
    costs = Flat()
    run = emulate(requests, make_restore_policy(name), costs, Measured(costs))
    verify(requests, run.timeline, ONE_LINK)
    assert set(run.ttft_s) == {0, 1, 2, 3}
    assert 0 <= run.ttft_s[3] < 0.1  # counted from when it came
    assert run.timeline[0].start_s < 0.1  # nobody waits for those that come later


@pytest.mark.parametrize("name", [n for n in RESTORE_POLICIES if n != "recompute"])
def test_what_failed_is_computed(name: str) -> None:
    costs, failed = Flat(load_s=5e-8), []

    def fails(op: RestoreLoad) -> bool:
        failed.append(op)
        return len(failed) in (1, 3, 7)

    request = a_request()
    run = emulate([request], make_restore_policy(name), costs, Measured(costs), fails=fails)
    verify([request], run.timeline, Caps(loads={"link": 2}))
    lost = [done.op for done in run.timeline if not done.ok]
    assert lost
    assert run.met[0] * request.tokens >= max(op.tokens.stop for op in lost) - 1


def test_engines_compute_what_is_theirs() -> None:
    requests, costs = [a_request(n, 512) for n in range(4)], Flat(cell_s=2e-5, load_s=1e-5)
    stages = ({0, 1}, {2, 3})
    run = emulate(requests, make_restore_policy("recompute"), costs, stages=stages)
    verify(requests, run.timeline, Caps(computes=2))
    busy = [
        [(d.start_s, d.end_s) for d in run.timeline if d.op.request in stage] for stage in stages
    ]
    assert any(a < d and c < b for a, b in busy[0] for c, d in busy[1])  # at the same time
    for own in busy:
        assert all(b <= c for (_, b), (c, _) in pairwise(own))


def test_what_was_expected_is_corrected() -> None:
    believed, actual = Flat(cell_s=2e-8), Flat(cell_s=1e-6)
    costs, request = Measured(believed), a_request()
    emulate([request], make_restore_policy("cake"), actual, costs)
    learnt = costs.compute_s(request, 4, Span(0, 512))
    assert learnt == pytest.approx(actual.compute_s(request, 4, Span(0, 512)), rel=0.3)
    assert costs.suffix_s(request) == pytest.approx(actual.suffix_s(request), rel=0.3)
    assert costs.load_s(request, 0, 4096) == pytest.approx(actual.load_s(request, 0, 4096), rel=0.3)


def test_a_policy_that_stops_is_told_so() -> None:
    with pytest.raises(StateError, match=r"never .*is not restored"):
        emulate([a_request()], Never(), Flat())


def test_a_policy_may_change_its_mind() -> None:
    run = emulate([a_request()], Late(patience=2), Flat())
    assert run.met[0] == 0.0


class Counting:
    """A device that notes what it had when it was given another op."""

    ahead = 2

    def __init__(self) -> None:
        self.sleeper = Sleeper(lambda op: 0.0005)
        self.has: list[tuple[type[Op], Mark]] = []
        self.seen: list[list[type[Op]]] = []

    def begin(self, op: Op, clock: Clock) -> Counting:
        self.seen.append([kind for kind, _ in self.has])
        self.has.append((type(op), self.sleeper.begin(op, clock)))
        return self

    def wait(self) -> Ended:
        ended = self.has[0][1].wait()
        del self.has[0]
        return ended


class Remembering(TwoPointer):
    """Says whom it forgot."""

    def __init__(self) -> None:
        super().__init__()
        self.forgot: list[int] = []

    def forget(self, number: int) -> None:
        super().forget(number)
        self.forgot.append(number)


def test_nothing_is_given_behind_a_chunk_and_loads_are_given_ahead() -> None:
    compute, link, policy = Counting(), Counting(), Remembering()
    executor = Executor(policy, Measured(Flat()), [Unit(compute)], {"link": link})
    executor.run([a_request(), a_request(1)])
    assert not any(Compute in had for had in compute.seen)
    assert max(map(len, link.seen)) == 1  # beside the one that it is given
    assert sorted(policy.forgot) == [0, 1]


class Broken:
    """A device that breaks at its second op."""

    ahead = 1

    def __init__(self) -> None:
        self.begun = 0

    def begin(self, op: Op, clock: object) -> Done:
        self.begun += 1
        if self.begun == 2:
            raise RuntimeError("a cable is loose")
        return Done(Ended(0.0, 0.0))


@pytest.mark.parametrize("broken", ["compute", "link"])
def test_an_error_of_a_device_comes_out(broken: str) -> None:
    before = threading.active_count()
    devices = {"compute": Sleeper(lambda op: 0.001), "link": Sleeper(lambda op: 0.001)}
    devices[broken] = Broken()  # type: ignore[assignment]
    executor = Executor(
        make_restore_policy("cake"),
        Measured(),
        [Unit(devices["compute"])],
        {"link": devices["link"]},
    )
    with pytest.raises(RuntimeError, match="a cable is loose"):
        executor.run([a_request()])
    assert threading.active_count() == before


def test_a_sleeper_works_through_its_queue() -> None:
    sleeper, clock = Sleeper(lambda op: 0.002), stopwatch()
    op = Suffix(0, 0)
    marks = [sleeper.begin(op, clock) for _ in range(3)]
    ended = [mark.wait() for mark in marks]
    assert all(a.end_s == b.start_s for a, b in pairwise(ended))
    assert [e.end_s - e.start_s for e in ended] == pytest.approx([0.002] * 3)
    assert clock() >= ended[-1].end_s
    time.sleep(0.001)
    assert sleeper.begin(op, clock).wait().start_s > ended[-1].end_s  # idle time is gone


@pytest.mark.nightly
def test_the_five_shapes_stay_near_the_bound() -> None:
    """Real time: on a machine with something else to do it says nothing."""
    ratios = []
    for model, gpu, gbps, tokens, suffix in EMULATED:
        costs, request = (
            Modelled(SHAPES[model], GPUS[gpu], gbps),
            asked(SHAPES[model], tokens, suffix),
        )
        runs = [
            emulate([request], make_restore_policy("flowkv"), costs, Measured(costs))
            for _ in range(5)
        ]
        times = [run.ttft_s[0] for run in runs]
        ratios.append(statistics.median(times) / lower_bound(request, costs.ideal))
    assert statistics.median(ratios) <= 1.15, ratios
