"""Codecs of pages by their distance from the end of the sequence."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.inside import ConfigError, Ladder, make_ladder
from tests.inside import layout_CODECS as CODECS

RUNGS = st.lists(
    st.tuples(st.integers(0, 400), st.sampled_from(CODECS[1:])),
    max_size=4,
    unique_by=lambda rung: rung[1],
).map(
    lambda rungs: list(
        zip(
            sorted(tokens for tokens, _ in rungs),
            sorted((codec for _, codec in rungs), key=CODECS.index),
            strict=True,
        )
    )
)
SIZES = st.sampled_from((8, 64, 72, 128))


@given(RUNGS, SIZES, st.integers(0, 2000))
def test_a_page_gets_the_codec_of_the_furthest_rung_that_it_is_behind(
    rungs: list[tuple[int, str]], size: int, length: int
) -> None:
    ladder = Ladder(rungs, size)
    for page in range(length // size):
        behind = (length // size - page - 1) * size  # whole pages, the open one left out
        reached = [CODECS.index(codec) for tokens, codec in rungs if tokens <= behind]
        assert ladder.codec(page, length) == max(reached, default=0)
    assert ladder.codec(length // size, length) == 0, "the open page is raw"


@given(RUNGS, SIZES, st.integers(0, 2000), st.integers(0, 300))
def test_pages_only_climb_down_and_only_where_a_page_fills(
    rungs: list[tuple[int, str]], size: int, length: int, more: int
) -> None:
    ladder, pages = Ladder(rungs, size), range(length // size)
    now = [ladder.codec(page, length) for page in pages]
    later = [ladder.codec(page, length + more) for page in pages]
    assert now == sorted(now, reverse=True)
    assert all(a <= b for a, b in zip(now, later, strict=True))
    assert (length + more) // size > length // size or now == later
    borders = [ladder.border(rung, length) for rung in ladder.rungs]
    assert borders == sorted(borders)
    assert borders == [sum(codec >= r.codec for codec in now) for r in ladder.rungs]


def test_ladders_of_configurations() -> None:
    def made(codec: str, *possible: str, recent: int = 128, warm: int = 512) -> list[tuple]:
        ladder = make_ladder(codec, 128, possible, recent_tokens=recent, warm_tokens=warm)
        return [(rung.pages, CODECS[rung.codec]) for rung in ladder.rungs]

    assert made("raw") == []
    assert made("kv4h", recent=0) == [(0, "kv4h")] and made("kv8", recent=1) == [(1, "kv8")]
    assert made("auto", "kv8", "kv4c") == [(5, "kv4c"), (1, "kv8")]
    assert made("auto", "kv8") == [(1, "kv8")] and made("auto") == []
    assert made("auto", "kv8", "kv4c", warm=0) == [(1, "kv4c")]


def test_idle_pages_get_the_mildest_codec() -> None:
    assert Ladder([(0, "kv8"), (64, "kv4c")], 64).idle == CODECS.index("kv8")
    assert Ladder([], 64).idle == 0 and Ladder([], 64).codecs == (0,)
    assert Ladder([(0, "kv8"), (64, "kv4c")], 64).codecs == (0, 1, 3)


@pytest.mark.parametrize(
    "rungs", [[(0, "raw")], [(0, "kv2")], [(-1, "kv8")], [(0, "kv4c"), (64, "kv8")]]
)
def test_ladders_that_make_no_sense_are_refused(rungs: list[tuple[int, str]]) -> None:
    with pytest.raises(ConfigError, match="rungs"):
        Ladder(rungs, 64)
