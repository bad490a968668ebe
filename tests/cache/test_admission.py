"""Write admission: the pages on lasting tiers, what is promised of them, and the simulator's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv import KV, Retain
from flowkv.policy import make_policy
from flowkv.residency import Ledger, Meta, Place
from tests.cache.audit import audit
from tests.cache.fakes import lasting
from tests.cache.toy import (
    PAGE,
    advance,
    check_content,
    make_kv,
    opened,
    prefill,
    published,
    settle,
    simple,
)
from tests.inside import (
    WRITE_RULES,
    ConfigError,
    HostTier,
    ManualClock,
    WriteAdmission,
    write_admission,
)

P, Q, R = [1] * 24, [2] * 24, [3] * 24


def small(*tiers: Any, admit: str = "second-touch", pages: int = 4, **options: Any) -> KV:
    return make_kv(simple(), pages=pages, tiers=tiers, admit=admit, prefetch="off", **options)


def reused(kv: KV, tokens: list[int]) -> int:
    with kv.open([*tokens, 0]) as seq:
        check_content(kv, seq, tokens[: seq.length])
        return seq.reused


def test_a_page_that_one_request_used_leaves_memory_unwritten() -> None:
    disk = lasting()
    kv = small(disk)
    published(kv, P)
    for prompt in (Q, R):
        published(kv, prompt)
    assert not disk.frames and kv.stats()["tiers"]["lasting"]["declined"] >= 3
    said = kv.explain([*P, 0]).reason
    assert said == "the page at token 0 left memory, and admit='second-touch' did not write it"
    assert kv.flush() and not kv.stats()["tiers"]["lasting"]["dropped"]
    for prompt in (P, Q, R):  # the second use of each
        published(kv, prompt)
    kv.flush()
    assert len(disk.frames) == 9 and reused(kv, P) == 24


def test_pages_go_from_host_memory_to_the_disk_after_two_uses() -> None:
    disk, host = lasting(), HostTier(3 * 4096)
    kv = small(host, disk)
    for prompt in (P, P, Q, R, [4] * 24, [5] * 24):
        published(kv, prompt)
    kv.flush()
    assert len(disk.frames) == 3 and reused(kv, P) == 24
    assert kv.stats()["tiers"]["lasting"]["declined"] >= 3


@pytest.mark.parametrize("how", ["flush", "close"])
def test_what_two_requests_used_outlives_the_process(tmp_path: Path, how: str) -> None:
    place = f"disk:{tmp_path / 'kv'}:2MiB"
    kv = small(place, pages=16)
    published(kv, P)
    published(kv, [*P, *Q])
    published(kv, R)
    assert kv.stats()["tiers"][next(iter(kv.stats()["tiers"]))]["stored_bytes"] == 0
    getattr(kv, how)()
    kv.close()
    with small(place, pages=16) as again:
        assert reused(again, [*P, *Q]) == 24 and reused(again, R) == 0


def test_pages_in_host_memory_are_written_at_the_end(tmp_path: Path) -> None:
    place = f"disk:{tmp_path / 'kv'}:2MiB"
    with small(HostTier(1 << 20), place) as kv:
        for prompt in (P, P, Q, R):
            published(kv, prompt)
    with small(place) as again:
        assert reused(again, P) == 24 and reused(again, Q) == 0


HINTS: list[dict[str, Any]] = [
    {"lease": "pinned_prefix"},
    {"lease": "turn_end"},
    {"retain": [Retain(0, 24, priority=80, for_s=300.0)]},
]


@pytest.mark.parametrize("hints", HINTS)
def test_pages_with_a_hint_are_written_at_once(hints: dict[str, Any]) -> None:
    disk = lasting()
    kv = small(disk)
    published(kv, P, **hints)
    assert len(disk.frames) == 3 and kv.stats()["tiers"]["lasting"]["declined"] == 0


@pytest.mark.parametrize("hints", [{"lease": "one_shot"}, {"retain": [Retain(0, 24, priority=1)]}])
def test_hints_that_shorten_a_stay_are_no_reason_to_write(hints: dict[str, Any]) -> None:
    disk = lasting()
    kv = small(disk)
    published(kv, P, **hints)
    published(kv, Q)
    kv.flush()
    assert not disk.frames


def test_a_hint_in_the_middle_brings_the_pages_above(tmp_path: Path) -> None:
    disk = lasting()
    kv = small(disk)
    published(kv, P, retain=[Retain(16, 24, priority=80)])
    assert len(disk.frames) == 3


def test_a_hint_on_known_pages_writes_them_now() -> None:
    for pinned in (False, True):
        disk = lasting()
        kv = small(disk)
        published(kv, P)
        if pinned:
            assert kv.pin(P) == 24
        else:
            published(kv, [*P, 7], lease="pinned_prefix")
        assert kv.flush()
        assert len(disk.frames) == 3


def test_a_hint_in_the_middle_brings_the_pages_above_out_of_host_memory() -> None:
    disk = lasting()
    kv = small(HostTier(9 * 4096), disk)
    for prompt in (P, Q):
        published(kv, prompt)
    published(kv, [*P, 7], retain=[Retain(16, 24, priority=80)])
    kv.planner.store.writes.drain()
    assert len(disk.frames) == 3


def test_pages_that_wait_to_be_written_are_not_declined() -> None:
    disk = lasting()
    kv = small(disk)
    published(kv, P)
    store = kv.planner.store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.writes, "_write_out", lambda: None)
        store.writes.write_down(*store.index)  # as those of a loaded export
        assert store.writes.unsaved == 3
        published(kv, Q)
    assert kv.flush() and kv.stats()["tiers"]["lasting"]["declined"] == 0
    assert len(disk.frames) == 3 and reused(kv, P) == 24


def test_flush_is_content_with_pages_that_the_next_disk_has() -> None:
    first, second = lasting(capacity_bytes=3 * 4700, name="first"), lasting(name="second")
    kv = small(first, second)
    for prompt in (P, Q, R, [4] * 24):
        for _ in range(2):
            published(kv, prompt)
            kv.planner.store.writes.drain()
    assert len(second.frames) >= 3
    assert kv.flush() and not kv.stats()["tiers"]["first"]["dropped"]


def test_a_declined_page_is_asked_once_and_goes_to_no_other_lasting_tier() -> None:
    first, second = lasting(name="first"), lasting(name="second")
    kv = small(first, second)
    for prompt in (P, Q):
        published(kv, prompt)
    tiers = kv.stats()["tiers"]
    assert tiers["first"]["declined"] >= 2 and not tiers["second"]["declined"]
    assert not (first.frames or second.frames)


def test_pages_in_host_memory_whose_weights_are_proven_later_are_asked_too() -> None:
    disk = lasting()
    kv = small(HostTier(1 << 20), disk)
    stack = kv.planner.store.stack
    stack.provisional.active = True
    for prompt in (P, Q, R):
        published(kv, prompt)
    assert stack.provisional
    stack.provisional.begin()
    kv.planner.store.writes.confirm()
    kv.planner.store.writes.flush(2.0)
    assert not disk.frames


def test_prompts_that_are_handed_over_are_written_whole() -> None:
    disk = lasting()
    kv = small(disk)
    with kv.hand_over():
        published(kv, P)
    assert len(disk.frames) == 3


def test_memory_that_processes_share_is_not_behind_write_admission(tmp_path: Path) -> None:
    host = lasting()
    host.kind, host.shared = "host", True
    kv = small(host)
    published(kv, P)
    assert len(host.frames) == 3


def test_tails_follow_the_page_above() -> None:
    for more in ({}, {"lease": "turn_end"}):
        disk = lasting()
        kv = small(disk, pages=8)
        with opened(kv, P, **more) as seq:
            advance(kv, [seq], [[9, 9, 9, 9]])
        kv.flush()
        assert len(disk.frames) == (4 if more else 0)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="second-touch"):
        KV(admit="thrice")


prompts = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=8, max_size=60
)  # a conversation, and the pages of its prompt


@pytest.mark.parametrize("rule", WRITE_RULES)
@settings(max_examples=20, deadline=None)
@given(prompts=prompts, room=st.integers(6, 12))
def test_the_simulator_writes_the_same_pages(
    rule: str, prompts: list[tuple[int, int]], room: int
) -> None:
    """Hits, refusals and the pages that are left in any place, request by request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_admission, "USUAL", 2)
        disk, clock = lasting(), ManualClock()
        kv = small(disk, admit=rule, pages=room, clock=clock)
        rooms = kv.planner.store.pools["cpu"].capacity_granules - 1
        places = [Place(make_policy("lru"), rooms), Place(make_policy("lru"), 999, lasts=True)]
        ledger = Ledger(places, admission=WriteAdmission(rule))
        space = ledger.namespace(b"")
        for request, (talk, pages) in enumerate(prompts):
            clock.advance(s=1.0)
            tokens = [*([talk % 2] * PAGE), *([talk] * PAGE * (pages - 1))]
            with kv.open([*tokens, 99]) as seq:
                hits = seq.reused // PAGE
                prefill(kv, seq, chunk=1 << 10)
            kv.planner.store.writes.drain()
            chain = [n and talk * 8 + n for n in range(pages)]
            ids = np.array([[one + 1, talk % 2 if not n else 9] for n, one in enumerate(chain)])
            now = clock.now_ns()
            plan = ledger.begin(
                now, request, space, ids.astype(np.uint64), Meta(tokens=len(tokens))
            )
            ledger.complete(now, request)
            assert plan.hits == hits
            # The ledger copies the pages above with a page, the cache when they leave memory, too.
            assert len(ledger) == sum(block.somewhere for block in kv.planner.store.index)
            assert ledger.declined == kv.stats()["tiers"]["lasting"]["declined"]
        audit(kv)
        kv.close()


steps = st.lists(
    st.tuples(
        st.sampled_from(["serve"] * 3 + ["keep", "middle", "pin", "unpin", "flush", "forget"]),
        st.integers(0, 4),
        st.integers(1, 5),
    ),
    min_size=6,
    max_size=40,
)


@pytest.mark.parametrize("rule", WRITE_RULES)
@settings(max_examples=20, deadline=None)
@given(steps=steps, host=st.booleans(), room=st.integers(8, 11))
def test_promises_hold_whatever_happens(
    rule: str, steps: list[tuple[str, int, int]], host: bool, room: int
) -> None:
    """What is to stay is on disk with all above; erased pages are nowhere; no count is left."""
    disk = lasting()
    kv = small(*([HostTier(5 * 4096)] if host else []), disk, admit=rule, pages=room)
    store, number = kv.planner.store, int(host)
    for how, talk, pages in steps:
        tokens = [*([talk % 2] * PAGE), *([talk] * PAGE * (pages - 1))]
        if how in ("serve", "keep", "middle"):
            first = 0 if how == "keep" else (pages - 1) * PAGE
            hint = [] if how == "serve" else [Retain(first, pages * PAGE, priority=80)]
            published(kv, [*tokens, 99], retain=hint)
        elif how in ("pin", "unpin"):
            if how == "pin" and sum(b.pinned for b in store.index) + pages > room - 7:
                continue
            assert kv.pin(tokens, pinned=how == "pin") >= 0
        elif how == "flush":
            assert kv.flush()
        else:
            kv.forget(tokens)
            keys = {b.key for b in store.index}
            assert disk.frames.keys() <= keys
        settle(kv)
        store.writes.drain()
        for block in store.index:
            if block.kind == "page" and (block.pinned or block.lease):
                above = block
                while above is not None:
                    assert above.tiers >> number & 1, (how, talk, pages)
                    above = store.index.find(above.parent)
        assert not store.writes.unsaved
        rows = store.context.writes._slots
        known = {b.slot for b in store.index} | {g.slot for g in store.index.ghosts._known.values()}
        assert set(np.flatnonzero(rows["uses"]).tolist()) <= known
    lanes = kv.stats()["tiers"]["lasting"]
    assert not lanes["dropped"]
    audit(kv)
    kv.close()
