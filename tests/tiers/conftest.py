"""Ends each test of this folder: the tiers that it left open must close."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps

import pytest

from flowkv import Tier
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.remote.tier import RemoteTier
from flowkv.tiers.shared import SharedTier
from tests.inside import HostTier


def followed(act: Callable[..., None], note: Callable[[Tier], object]) -> Callable[..., None]:
    @wraps(act)
    def noted(tier: Tier, *given: object, **how: object) -> None:
        act(tier, *given, **how)
        note(tier)

    return noted


@pytest.fixture(autouse=True)
def ended(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[int, Tier]]:
    """Close the tiers that a test left open, the newest first.

    A property opens one for each example, and closes it by itself.
    """
    left: dict[int, Tier] = {}
    if not getattr(request.function, "is_hypothesis_test", False):
        for kind in (DiskTier, HostTier, RemoteTier, SharedTier):
            init = followed(kind.__init__, lambda tier: left.setdefault(id(tier), tier))
            monkeypatch.setattr(kind, "__init__", init)
            close = followed(kind.close, lambda tier: left.pop(id(tier), None))
            monkeypatch.setattr(kind, "close", close)
    yield left
    with ExitStack() as last:
        for tier in left.values():
            last.callback(tier.close)
