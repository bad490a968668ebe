"""`check_policy`: what every `Policy` must do, told as stories by Hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from flowkv.core.errors import FlowKVError, MissingDependencyError
from flowkv.policy.base import Policy
from flowkv.policy.config import Lease
from flowkv.testing.told import tell, told

try:
    from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
except ImportError:  # pragma: no cover
    raise MissingDependencyError("flowkv.testing", "testing", "pytest and hypothesis") from None


def check_policy(
    make: Callable[[], Policy],
    *,
    leases: Sequence[str | Lease] = ("",),
    leaf_first: bool = True,
    key_order: bool = True,
    heeds: Collection[str] = ("queue", "rank"),
    max_examples: int = 150,
    steps: int = 50,
    shrink: bool = True,
) -> None:
    """Runs the conformance suite on a policy; returns if it found no fault. Deterministic.

    Checked, on the policy itself: victims are resident, distinct, neither pinned nor protected, and
    as many as asked for; an eviction that is refused, and a question, change nothing; nothing is
    refused that could be had leaf by leaf; expired and invalid blocks go first, stay expired and
    are resident; queued blocks go last, and lower ranks before higher ones; the smallest priority
    goes first, and none is NaN; time that runs backwards stands still; removal, forgetting and
    reuse of slots; equal stories, and a story that is saved and taken up again, give equal answers
    and digests; arrays are neither kept nor written; nothing is raised. Methods that are not
    overridden are not used.

    Args:
        make: Makes a fresh policy: its class, or any callable without arguments.
        leases: Lease classes and leases that inserts draw from.
        leaf_first: Also demand that a block goes after its resident children.
        key_order: Also demand that the smallest priority goes first.
        heeds: "queue": queued blocks go last, if `enqueue` is overridden; "rank": lower ranks go
            first, if one of the leases has a rank.
        max_examples: Stories to tell.
        steps: Calls per story.
        shrink: Look for the shortest story that shows a fault, rather than tell the first.

    Raises:
        AssertionError: With a story that shows the fault.
    """
    from flowkv.testing.ledger_story import LedgerStory
    from flowkv.testing.policy_story import PolicyStory

    said = {"make": staticmethod(make), "leases": tuple(leases), "leaf_first": leaf_first}
    said |= {"key_order": key_order, "heeds": frozenset(heeds)}
    tell_machine(type("Story", (PolicyStory,), said), max_examples, steps, shrink)
    tell_machine(type("LedgerStory", (LedgerStory,), said), max_examples, steps, shrink)


def tell_machine(
    machine: type[RuleBasedStateMachine], max_examples: int, steps: int, shrink: bool
) -> None:
    """Tells stories of a state machine."""
    how = told(max_examples, shrink=shrink, steps=steps)
    try:
        tell(lambda: run_state_machine_as_test(machine, settings=how))
    except FlowKVError as error:
        raise AssertionError(f"it raised {type(error).__name__}: {error}") from error
