"""Scenarios of the conformance checks: the same in every run, with at most one fault reported."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

__all__ = ["VerificationError", "require", "tell", "tell_machine", "told"]


def told(max_examples: int, *, shrink: bool = True, steps: int = 50) -> settings:
    """Return the Hypothesis settings of a suite.

    Args:
        max_examples: Number of stories (examples) to run.
        shrink: Search for the shortest story that shows a fault, rather than report the first.
        steps: Most steps of a state machine's story.
    """
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def tell(stories: Callable[[], object]) -> None:
    """Run stories until one shows a fault.

    Raises:
        AssertionError: A story failed; or it ended differently when it was run again, so the
            tested object is not deterministic.
    """
    try:
        stories()
    except Flaky as error:
        raise AssertionError("the same story told again ended differently") from error


def tell_machine(
    machine: type[RuleBasedStateMachine], max_examples: int, steps: int, shrink: bool
) -> None:
    """Run stories of a state machine; a fault has the machine's `calls` as its note, if any."""
    how = told(max_examples, shrink=shrink, steps=steps)
    try:
        tell(lambda: run_state_machine_as_test(machine, settings=how))
    except Exception as error:
        fault = AssertionError(f"it raised {type(error).__name__}: {error}")
        if isinstance(error, AssertionError):
            fault = error
        if calls := getattr(machine, "calls", None):  # in place of the machine's rules
            error.__notes__ = []
            fault.__notes__ = ["\n    ".join(["The calls that show it:", *calls])]
        raise fault from (error.__cause__ if fault is error else error)


class VerificationError(AssertionError):
    """Error of a broken rule, which its message begins with."""


def require(holds: bool, sentence: str, about: object = None) -> None:
    """Fail with a sentence, and the object it is about, unless a condition holds.

    Raises:
        VerificationError: (an `AssertionError`) The condition does not hold.
    """
    if not holds:
        raise VerificationError(sentence if about is None else f"{sentence}: {about}")
