"""What is said of a model that cannot be loaded."""

from __future__ import annotations

from tests.inside import ConfigError, load


class GatedRepoError(Exception):
    """As the hub calls it."""


def test_causes_that_go_round_in_a_circle_are_seen_once() -> None:
    first, second = OSError("first"), GatedRepoError("second")
    first.__cause__, second.__cause__ = second, first
    assert list(load._chain(first)) == [first, second]
    explained = load._explanation("some/model", first)
    assert isinstance(explained, ConfigError) and "gated" in str(explained)
