"""Cost of dropping half of the tokens, chosen by what was looked at, on the trained fixture.

What was looked at tells what will be, not what might be: where a text that came back once comes
back again, importance keeps most of it, and beats what keeps the latest tokens, or any. Where the
next text is new, or comes back for the first time, nothing could be known: all ways are alike.
"""

from __future__ import annotations

import pytest

from bench.sparsified import RETURNING, ways
from tests.fixture_model import corpus

pytest.importorskip("transformers")


def test_importance_keeps_what_will_be_needed_again() -> None:
    ((_, found),) = ways(corpus("validation"), 12, only=RETURNING)
    (_, kept), (_, latest), (_, guessed) = (
        found[way] for way in ("importance", "latest", "random pages")
    )
    assert kept.within(0.3), "half of the tokens for less than 0.3 bits"
    assert latest.beyond(kept.mean + kept.error)
    assert guessed.mean > kept.mean


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_bounds_over_many_windows() -> None:
    found = dict(ways(corpus("validation"), 96))
    bounds = {RETURNING: 0.25, "continuation": 0.25, "second copy": 0.9}
    for task, bound in bounds.items():
        assert found[task]["importance"][1].within(bound), task
    again = found[RETURNING]
    kept = again["importance"][1]
    assert again["latest"][1].beyond(kept.mean + kept.error + 0.3)
    assert again["random pages"][1].beyond(kept.mean + kept.error)
