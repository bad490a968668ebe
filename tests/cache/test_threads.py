"""Many threads on one cache, and finalizers at any moment."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from flowkv import KV
from flowkv.testing import MemoryTier
from tests.cache.audit import audit, audit_empty
from tests.cache.fakes import lasting
from tests.cache.toy import advance, check_content, make_kv, opened, prefill, published, write
from tests.clock import held, together
from tests.inside import CapacityError, StateError, current_step


def worker(kv: KV, number: int) -> Callable[[], None]:
    """One user: opens, computes, forks, suspends, cuts and closes, and checks what is read."""
    dice, tenant = random.Random(number), f"tenant {number % 2}"

    def work() -> None:
        for _ in range(12):
            text = [dice.randrange(3)] * dice.randrange(1, 40)
            tag = number % 2
            with kv.open(text, tenant=tenant) as seq:
                try:
                    prefill(kv, seq, chunk=dice.randrange(1, 30), tag=tag)
                    with kv.fork(seq) as twin:
                        advance(kv, [seq, twin], [[7, 8], [9] * 11], [tag, tag])
                        check_content(kv, twin, text + [9] * 11, tag)
                    kv.suspend(seq)
                    kv.resume(seq)
                    check_content(kv, seq, [*text, 7, 8], tag)
                    kv.truncate(seq, len(text))
                    check_content(kv, seq, text, tag)
                except CapacityError:
                    continue
            dice.choice((kv.stats, kv.defragment, partial(kv.explain, text, tenant=tenant)))()
            if dice.random() < 0.2:
                kv.forget(text, tenant=tenant)

    return work


@pytest.mark.parametrize("pages", [30, 400])
def test_threads_share_a_cache(pages: int) -> None:
    kv = make_kv(pages=pages, tiers=[MemoryTier(40 * 4096), lasting()])
    together(*(worker(kv, number) for number in range(4)))
    kv.flush()
    audit(kv)
    for tenant in ("tenant 0", "tenant 1"):
        kv.forget(tenant=tenant)
    audit_empty(kv)


def test_steps_belong_to_their_threads() -> None:
    kv, inside, leave = make_kv(), threading.Event(), threading.Event()
    seq = kv.open([1] * 9)

    def other() -> None:
        inside.wait(60)
        assert current_step() is None
        published(kv, [2] * 30)  # a whole request while the other step is open
        leave.set()

    def one() -> None:
        with kv.step([seq], [[1] * 9]) as step:
            inside.set()
            assert leave.wait(60) and current_step() is step
            write(step)

    together(one, other)
    check_content(kv, seq, [1] * 9)


def test_a_finalizer_may_close_a_sequence_at_any_moment() -> None:
    """Also while its own thread, or another one, changes the cache."""
    kv = make_kv()

    class Holder:
        pass

    def garbage() -> None:
        holder, seq = Holder(), opened(kv, [4] * 12)
        holder.me = holder  # only the collector frees it
        weakref.finalize(holder, seq.close)

    garbage()
    assert kv.stats()["sequences"] == 1
    with kv.lock:
        gc.collect()
        assert kv.stats()["sequences"] == 1, "in the middle of a change it waits"
    assert kv.stats()["sequences"] == 0
    audit(kv)
    garbage()
    with held(kv.lock):
        gc.collect()  # must not wait for the lock
    assert kv.stats()["sequences"] == 0
    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(3):
            garbage()
            published(kv, [5] * 30)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert kv.stats()["sequences"] == 0


def test_closing_the_cache_while_others_work() -> None:
    kv = make_kv(pages=200, tiers=[lasting()])

    def work() -> None:
        with pytest.raises(StateError):
            for number in range(10**6):
                with kv.open([number % 5] * 20) as seq:
                    prefill(kv, seq)

    def end() -> None:
        threading.Event().wait(0.2)
        kv.close()

    together(work, work, end)
    assert kv.closed
