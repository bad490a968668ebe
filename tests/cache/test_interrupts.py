"""Ctrl-C anywhere in a cache: no lock stays held, no sequence open, no page without an owner."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from flowkv import KV
from tests import interrupts
from tests.cache.fakes import Silent, lasting
from tests.cache.toy import advance, check_content, make_kv, opened, prefill
from tests.inside import current_step

P = list(range(1, 30))

# An interrupt that meets a finalizer ends there: Python reports such errors, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def story(kv: KV) -> None:
    seq = kv.open(P)
    prefill(kv, seq)
    advance(kv, [seq], [[3]])
    twin = kv.fork(seq)
    advance(kv, [seq, twin], [[4], [5]])
    kv.truncate(twin, 20)
    kv.explain(P)
    twin.close()
    with kv.open([*P, 7], wait=False) as other:
        prefill(kv, other)
    seq.close()
    kv.flush()


def check(kv: KV, most: int, **options: Any) -> None:
    story(kv)
    count, came = interrupts.places(lambda: story(kv), **options), 0
    with interrupts.collectable():
        for at in interrupts.chosen(count, most):
            came += interrupts.run(lambda: story(kv), interrupts.Tracer(at, **options))
            interrupts.whole(kv)
    assert came > min(most, count) * 0.9  # the last lines may be run by others, or later
    with opened(kv, P) as seq:
        check_content(kv, seq, P)
    kv.close()


def test_at_lines_of_the_way_in_and_out() -> None:
    only = ("cache/kv.py", "cache/sequence.py", "cache/step.py", "cache/block_table.py")
    check(make_kv(), 120, only=only)


def test_a_sequence_dropped_in_a_cycle_ends_what_is_on_its_way() -> None:
    """As a traceback makes one: the collector clears weak references before it finalizes."""
    tier = Silent(lasting())
    tier.silent = False
    kv = make_kv(tiers=[tier], prefetch="off")
    opened(kv, P).close()
    kv.flush()
    again = make_kv(tiers=[tier], prefetch="off")
    tier.silent = True
    seq = again.open([*P, 7], wait=False)
    assert seq.restoration is not None
    seq.importance[99] = seq  # type: ignore[assignment]
    del seq
    gc.collect()
    again.lock.run_deferred()
    assert not again.restores._active
    assert len(again.planner.tables._free) == again.planner.tables.max_rows
    tier.speak()


def test_a_step_whose_end_never_came_is_rolled_back() -> None:
    """An interrupt may come just before `with` calls `__exit__`; nothing holds the step then."""
    kv = make_kv()
    seq = kv.open(P)
    kv.step([seq], [P[:9]]).__enter__()
    gc.collect()
    kv.lock.run_deferred()
    assert current_step() is None
    prefill(kv, seq)
    check_content(kv, seq, P)
    seq.close()
    interrupts.whole(kv)


@pytest.mark.slow
def test_at_every_line() -> None:
    check(make_kv(), 10_000)


@pytest.mark.thorough
def test_at_any_line_with_a_tier(tmp_path: Any) -> None:
    check(make_kv(tiers=[f"disk:{tmp_path / 'kv'}:8MiB"]), 600)


@pytest.mark.slow
def test_at_any_bytecode() -> None:
    check(make_kv(), 600, opcodes=True)
