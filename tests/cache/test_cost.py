"""Cost of a step, counted in calls: it must not grow with the context."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flowkv import KV, Sequence
from tests.cache.toy import make_kv, opened, prefill, simple
from tests.calls import calls_of
from tests.inside import kv_plan as plan

ROWS = 8


def decode(kv: KV, seqs: list, tokens: int = 1) -> Callable[[], None]:
    def work() -> None:
        step = plan(kv, seqs, np.full(len(seqs), tokens))
        for group in range(len(step.groups)):
            step.batch(group)
        step.commit()

    return work


def decoding(context: int, rows: int = ROWS) -> tuple[KV, list[Sequence]]:
    kv = make_kv(simple(), pages=2 * rows * (context // 8 + 2))
    return kv, [prefill(kv, kv.open([row] * context), chunk=context) for row in range(rows)]


@pytest.mark.at_once
@pytest.mark.parametrize("fills", [False, True], ids=["in a page", "at a border"])
def test_a_step_costs_the_same_whatever_the_context(fills: bool) -> None:
    counts = []
    for context in (8 * 4, 8 * 300):
        kv, seqs = decoding(context - fills)
        for seq in seqs:
            seq.note([7] * 9)
        if not fills:
            decode(kv, seqs)()
        decode(kv, seqs[:1], 0)()  # whatever is made at first use
        counts.append(calls_of(decode(kv, seqs)))
        kv.close()
    assert counts[0] == counts[1] < (170 * ROWS if fills else 120)


def test_a_step_within_pages_calls_nothing_per_row() -> None:
    counts = []
    for rows in (2, 20):
        kv, seqs = decoding(33, rows)
        decode(kv, seqs)()
        counts.append(calls_of(decode(kv, seqs)))
        kv.close()
    assert counts[1] - counts[0] < 20


def test_a_known_prompt_is_found_with_a_few_calls_per_page() -> None:
    kv = make_kv(simple(), pages=2000)
    counts = []
    for pages in (50, 500):
        text = list(range(8 * pages + 1))
        opened(kv, text).close()
        counts.append(calls_of(lambda text=text: kv.open(text).close()))
    assert counts[1] < 12 * counts[0] and counts[1] / 500 < 54
