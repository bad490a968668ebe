"""Restores may be allowed so much time of the thread that drives them, and no more."""

from __future__ import annotations

from flowkv import KV, Sequence
from tests.inside import RestoreJob

from .links import Link, evict
from .toy import PAGE, check_content, make_kv, prefill, published, simple

TEXT = [1, 2, 3] * 30


def coming() -> tuple[KV, Link, Sequence, RestoreJob]:
    """A prompt that lies on a link, opened while no time is allowed."""
    link = Link(per_poll=100)
    kv = make_kv(simple(), pages=40, tiers=[link])
    published(kv, TEXT)
    evict(kv)
    kv.restores.allow(0.0)
    seq = kv.open(TEXT, wait=False)
    assert seq.restoration is not None
    return kv, link, seq, seq.restoration


def test_without_time_nothing_is_asked_for_and_nothing_is_given_up() -> None:
    kv, link, seq, restoration = coming()
    for _ in range(5):
        restoration.pump()
    assert not link.asked and kv.restores.paused and not restoration.quiet
    restoration.settle()
    assert restoration.poll() is None  # it may come yet
    kv.restores.allow()
    while (there := restoration.poll()) is None:
        pass
    assert there and link.asked and not kv.restores.paused
    restoration.finish()
    check_content(kv, seq, TEXT[: seq.length])


def test_whoever_waits_needs_no_permission() -> None:
    kv, link, seq, restoration = coming()
    assert restoration.complete() and link.asked
    restoration.finish()
    prefill(kv, seq)
    check_content(kv, seq, TEXT)


def test_what_was_too_much_is_taken_off_and_little_is_saved() -> None:
    kv, _, _, _ = coming()
    restores = kv.restores
    restores.allow(0.25)
    restores._spent(1.0, 0)
    restores.allow(0.25)
    assert restores.paused  # half a second is still owed
    restores.allow(0.25)
    restores.allow(0.25)
    restores.allow(0.25)
    assert not restores.paused
    for _ in range(9):
        restores.allow(0.25)
    restores._spent(0.5, 0)
    assert restores.paused


def test_as_much_is_asked_for_as_the_time_is_expected_to_suffice() -> None:
    kv, link, _, restoration = coming()
    restores = kv.restores
    page = kv.planner.store.forms[0].raw.page_bytes
    restores.s_per_byte = 1.0 / page  # a second a page
    link.per_poll = 0
    restores.allow(2.5)
    restoration.pump()
    asked = sum(len(load.target.cast("B")) for load in link.asked)
    assert 0 < asked < 6 * page <= len(TEXT) // PAGE * page
