"""How the conformance suites tell their stories: the same every time, and one fault at most."""

from __future__ import annotations

from flowkv.core.errors import MissingDependencyError

try:
    from hypothesis import HealthCheck, Phase, settings
except ImportError:  # pragma: no cover
    raise MissingDependencyError("flowkv.testing", "dev") from None


def told(max_examples: int, *, shrink: bool = True, steps: int = 50) -> settings:
    """Settings of a suite.

    Args:
        max_examples: Stories to tell.
        shrink: Look for the shortest story that shows a fault, rather than tell the first.
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
