"""Ends each test of this folder: its caches must add up, and close."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from flowkv import KV
from tests.cache import toy
from tests.cache.audit import audit


@pytest.fixture(autouse=True)
def ended(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KV]]:
    """Audit and close the caches that a test made by `make_kv` and left open.

    A property makes one for each example, and ends it by itself. A test that drops a cache, or
    leaves one that cannot add up, takes it out of the list.
    """
    made: list[KV] = []
    toy.MADE = None if getattr(request.function, "is_hypothesis_test", False) else made
    yield made
    toy.MADE = None
    with ExitStack() as last:  # the newest first, and all of them
        for kv in made:
            if not kv.closed:
                last.callback(kv.close)
                if kv.planner is not None:
                    last.callback(audit, kv)
