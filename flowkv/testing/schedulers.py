"""`check_scheduler`: what every `Scheduler` must do, told as stories by Hypothesis."""

from __future__ import annotations

import math
from collections.abc import Callable

from flowkv.core.errors import MissingDependencyError
from flowkv.policy.scheduling import Job, Limits, Scheduler, Turns
from flowkv.sim.serving import Ask, Costs
from flowkv.testing.scheduler_story import SchedulerStory, World
from flowkv.testing.scheduler_watch import require
from flowkv.testing.told import tell, told

try:
    from hypothesis import given
    from hypothesis import strategies as st
except ImportError:  # pragma: no cover
    raise MissingDependencyError("flowkv.testing", "testing", "pytest and hypothesis") from None

_priorities = st.sampled_from([0, 0, 0, 1, 2, -1, 10, 99])
_gaps = st.sampled_from([0, 0, 0, 1, 3, 12])  # steps
_patience_s = st.sampled_from([math.inf, math.inf, 0.0, 3.0, 100.0])
_behind_s = st.sampled_from([1e-3, 0.1, 5.0, 1e3, 1e5])
_SIZES = (1, 2, 5, 12, 30)


@st.composite
def _asks(draw: st.DrawFn, step_s: float) -> list[Ask]:
    """Requests of all kinds, some of them at once; or a long one, and short and urgent ones."""
    now_s, asks, stream = 0.0, [], draw(st.booleans())
    for number in range(draw(st.sampled_from([1, 4, 8, 12]))):
        now_s += step_s * draw(_gaps)
        prompt, new = draw(st.sampled_from(_SIZES)), draw(st.sampled_from(_SIZES))
        if stream:
            prompt, new = (prompt, 30) if number == 0 else (min(prompt, 5), min(new, 2))
        prompt += draw(st.integers(0, 3))
        asks.append(
            Ask(
                arrived_s=now_s,
                prompt=prompt,
                new=new,
                limit=new + draw(st.sampled_from([0, 0, 1, 20])),
                priority=draw(_priorities) if not stream else min(number, 1),
                deadline_s=now_s + draw(_patience_s),
                found=draw(st.sampled_from([0, 0, prompt // 2, prompt - 1])),
            )
        )
    return asks


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A load, a device that is too small for it, and what goes wrong."""
    step_s = draw(st.sampled_from([0.001, 0.1, 10.0]))
    asks, size = draw(_asks(step_s)), draw(st.sampled_from([1, 4, 16]))
    most = max(-(-(ask.prompt + ask.limit) // size) for ask in asks)
    least = most + draw(st.sampled_from([0, 1, 4, 12]))
    numbers = st.integers(0, len(asks) - 1)
    return World(
        asks=asks,
        limits=Limits(
            max_rows=draw(st.sampled_from([1, 2, 4, 8])),
            token_budget=draw(st.sampled_from([1, 4, 9, 20, 40])),
            page_size=size,
            watermark=draw(st.sampled_from([0.0, 0.02, 0.3])),
            grace=draw(st.sampled_from([1, 2, 16])),
        ),
        pages=least + draw(st.sampled_from([0, 2, 10, 50])),
        least=least,
        shrinks=draw(st.sampled_from([1, 10, 40, 1000])),
        costs=Costs(step_s=step_s, token_s=0.0, load_s=draw(st.sampled_from([0.0, step_s]))),
        keeps=draw(st.sampled_from([(True,), (False,), (True, False, False)])),
        called_off=draw(st.dictionaries(numbers, st.integers(1, 40), max_size=2)),
    )


@st.composite
def _jobs(draw: st.DrawFn, number: int, arrived_s: float) -> Job:
    """A job, however far it is."""
    job = Job(
        number,
        arrived_s,
        draw(st.sampled_from([1, 50, 100_000])),
        draw(st.sampled_from([1, 20, 5000])),
        priority=draw(_priorities),
        deadline_s=arrived_s + draw(_patience_s),
    )
    job.made = draw(st.integers(0, job.limit - 1))
    job.ready = draw(st.integers(0, job.prompt + job.made - 1))
    job.preempted = draw(st.integers(0, 3))
    job.move(draw(st.integers(0, 3)), arrived_s)
    return job


def check_scheduler(
    make: Callable[[], Scheduler], *, max_examples: int = 100, shrink: bool = True
) -> None:
    """Runs the conformance suite on a scheduler; returns if it found no fault. Deterministic.

    Stories are loads of up to twelve requests on a virtual engine with few rows, tokens and pages,
    which shrinks; with prefixes that are on their way, rows that are kept or dropped, and requests
    that are called off. Checked: ranks are a total order, steady if they are said to be; questions
    change nothing, and the answers depend on nothing but what is shown; victims are some of the
    rows shown; rows, tokens and pages are not exceeded; nothing idles that could be used; nobody is
    passed by more than `bound_s` says, preempted too often or again at once; everything ends.

    Args:
        make: Makes a fresh scheduler: its class, or any callable without arguments.
        max_examples: Stories to tell.
        shrink: Look for the shortest story that shows a fault, rather than tell the first.

    Raises:
        VerificationError: (an `AssertionError`) Says what is wrong; Hypothesis adds the story.
        StateError: The scheduler names a victim that is none of the rows, or nothing goes on.
    """

    @told(max_examples, shrink=shrink)
    @given(data=st.data(), first_s=st.sampled_from([0.0, 1e5]), behind_s=_behind_s)
    def bound(data: st.DataObject, first_s: float, behind_s: float) -> None:
        scheduler = make()
        job = data.draw(_jobs(3, first_s))
        bound_s = scheduler.bound_s(job)
        require(bound_s >= 0, "bound_s is below 0", bound_s)
        if bound_s < math.inf:
            later = data.draw(_jobs(4, first_s + bound_s + behind_s))
            now_s = later.arrived_s + data.draw(st.floats(0.0, 1e5))
            passes = scheduler.rank(later, now_s) < scheduler.rank(job, now_s)
            require(not passes, f"{later} passes {job}, though it came later than bound_s allows")

    tell(bound)
    check_turns(Turns, make, max_examples=max_examples, shrink=shrink)


def check_turns(
    turns: Callable[..., Turns],
    make: Callable[[], Scheduler],
    *,
    max_examples: int = 100,
    shrink: bool = True,
) -> None:
    """Tells the stories of `check_scheduler` about a mechanism.

    Args:
        turns: A class like `Turns`.
        make: Makes a fresh scheduler.
        max_examples: Stories to tell.
        shrink: Look for the shortest story that shows a fault.

    Raises:
        VerificationError: A rule is broken.
        StateError: Nothing goes on.
    """

    @told(max_examples, shrink=shrink)
    @given(world=worlds())
    def story(world: World) -> None:
        SchedulerStory(make, world, turns).run()

    tell(story)
