"""What one cache erases, no cache that shares a tier with it answers from any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from flowkv import KV
from flowkv.testing import MemoryTier
from flowkv.tiers.shared import SharedTier
from tests.cache.audit import audit
from tests.cache.fakes import Silent, Wrapped
from tests.cache.toy import (
    PAGE,
    advance,
    check_content,
    geometry,
    make_kv,
    opened,
    published,
    settle,
)
from tests.cache.toy import simple as one_group
from tests.inside import ErasureLog, StoreError, drop, mover

P, Q, R = [1] * 24, [2] * 24, [3] * 24

Forget = Callable[[KV], int]
WAYS: dict[str, Forget] = {
    "prompt": lambda kv: kv.forget(P),
    "tenant": lambda kv: kv.forget(tenant=""),
    "model": lambda kv: kv.invalidate(),
}
each_way = pytest.mark.parametrize("forget", WAYS.values(), ids=WAYS)


def kv_over(*tiers: Any, **options: Any) -> KV:
    return make_kv(one_group(), pages=32, tiers=tiers, **options)


def reused(kv: KV, prompt: list[int], **options: Any) -> int:
    """Tokens of a prompt that need no computing, all of which are right."""
    with kv.open([*prompt, 0], **options) as seq:
        check_content(kv, seq, prompt[: seq.length])
        return seq.reused


def shared(directory: Path, **changes: Any) -> Any:
    """Memory that every cache may write to, and is written to at once."""
    return Wrapped(SharedTier("coherency", 4 << 20, directory=directory), **changes)


@pytest.fixture(params=["disk", "host"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """What opens the same place again: a directory, or memory that processes share."""
    if request.param == "disk":
        return lambda: f"disk:{tmp_path / 'kv'}:8MiB"
    return lambda: shared(tmp_path)


@contextmanager
def reader() -> Iterator[None]:
    with pytest.warns(UserWarning, match="another cache of this process"):
        yield


@pytest.fixture
def two(place: Callable[[], Any], request: pytest.FixtureRequest) -> tuple[KV, KV]:
    """Two caches over one place, the second with a host tier of its own; the first may write."""
    a = kv_over(place())
    with reader() if "disk" in request.node.callspec.id else nullcontext():
        b = kv_over("host:1MiB", place())
    return a, b


# ---- two caches in one process


@each_way
def test_another_cache_does_not_answer_from_its_pages(two: tuple[KV, KV], forget: Forget) -> None:
    a, b = two
    published(a, P)
    assert a.flush() and reused(b, P) == 24 and reused(b, P) == 24
    assert forget(a) == 3
    assert reused(b, P) == reused(a, P) == 0


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_a_model_that_a_command_drops(two: tuple[KV, KV], tmp_path: Path) -> None:
    """By `flowkv scrub --drop`, after its owner ended and before a reader follows."""
    owner, other = two
    published(owner, P)
    assert owner.flush() and reused(other, P) == 24
    owner.close()
    assert drop(tmp_path / "kv", "toy").frames == 3
    assert reused(other, P) == 0


def test_a_log_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a relative path, in a program that changes its directory later."""
    monkeypatch.chdir(tmp_path)
    a, b = (kv_over(shared(Path())) for _ in range(2))
    published(a, P)
    assert a.flush() and reused(b, P) == 24
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert a.forget(P) == 3
    assert reused(b, P) == 0 and not [*(tmp_path / "else").iterdir()]
    a.close()
    b.close()


@each_way
def test_nor_from_its_private_host_tier(two: tuple[KV, KV], forget: Forget) -> None:
    a, b = two
    published(a, P)
    assert a.flush() and reused(b, P) == 24
    store = b.planner.store
    for block in list(store.index):
        store.device_places[store.devices[block.group]].remove(block)
        store.eviction.leave([block], "space")
    assert b.flush() and len(list(store.stack.tiers[0].scan())) == 3
    forget(a)
    assert reused(b, P) == 0 and not list(store.stack.tiers[0].scan())


@each_way
def test_everything_that_looks_prompts_up_hears_of_it(two: tuple[KV, KV], forget: Forget) -> None:
    a, b = two
    asks: list[Callable[[], Any]] = [
        *(lambda: b.explain([*P, 0]).known, lambda: b.warm(P)),
        *(lambda: (b.prefetch(P).wait(), len(b.planner.store.index))[1], lambda: b.pin(P)),
        *(lambda: b.hint(P, 1.0), lambda: (b.enqueue(P).cancel(), len(b.planner.store.index))[1]),
    ]
    for ask in asks:
        published(a, P)
        assert a.flush() and reused(b, P) == 24
        forget(a)
        assert not ask()


def test_other_prompts_and_tenants_stay(two: tuple[KV, KV]) -> None:
    a, b = two
    for prompt in (P, Q):
        published(a, prompt)
    published(a, R, tenant="bob")
    a.flush()
    assert reused(b, P) == reused(b, Q) == reused(b, R, tenant="bob") == 24
    a.forget(P)
    assert reused(b, P) == 0 and reused(b, Q) == 24
    a.forget(tenant="")
    assert reused(b, Q) == 0 and reused(b, R, tenant="bob") == 24
    assert b.metrics.total("forgotten_blocks_total") == 6


@pytest.mark.parametrize("tokens", [20, 5])
def test_of_an_unfilled_page_all_continuations_are_dropped(two: tuple[KV, KV], tokens: int) -> None:
    """Whoever else knows the page before does not know how it goes on: tails, too."""
    a, b = two
    published(a, P)
    a.flush()
    published(b, P[:tokens])
    opened(b, P)
    a.forget(P[:tokens])
    whole = tokens // PAGE * PAGE
    assert reused(b, P) in (whole, 0)


def test_what_was_erased_is_known_again_once_it_is_computed_again(two: tuple[KV, KV]) -> None:
    a, b = two
    published(a, P)
    a.flush()
    assert reused(b, P) == 24
    for _ in range(3):
        a.invalidate()
        assert reused(b, P) == 0
        published(b, P)
        assert reused(b, P) == 24
        published(a, P)
        a.flush()


# ---- sequences that are open, or set aside


@each_way
def test_open_sequences_keep_their_pages_and_publish_nothing_more(
    two: tuple[KV, KV], forget: Forget
) -> None:
    a, b = two
    published(a, P)
    a.flush()
    seq, aside = b.open([*P, *Q, 0]), b.open([*P, 0])
    b.suspend(aside)
    forget(a)
    assert reused(b, P) == 0
    check_content(b, seq, P)
    advance(b, [seq], [Q])
    assert reused(b, P + Q) == 0
    b.resume(aside)
    check_content(b, aside, P)
    assert reused(b, P) == 0
    seq.close()
    aside.close()
    assert reused(b, P + Q) == 0


def test_a_restore_that_goes_on_is_not_known_to_others(tmp_path: Path) -> None:
    a = kv_over(shared(tmp_path))
    tier = Silent(shared(tmp_path))
    b = kv_over(tier)
    published(a, P)
    a.flush()
    coming = b.prefetch(P)
    seq = b.open([*P, 0], wait=False)
    a.forget(P)
    assert reused(b, P) == 0  # while it is on its way
    tier.silent = False
    for _job, items in tier._kept:
        tier.inner.submit_load(items)
    b.planner.store.writes.drain()
    assert reused(b, P) == 0  # and when it has come
    coming.cancel()
    seq.close()
    assert reused(b, P) == 0
    a.close()
    tier.speak()


# ---- stores that begin, go on or end while others erase


def test_nobody_erases_while_somebody_stores(tmp_path: Path) -> None:
    a, b = kv_over(shared(tmp_path)), kv_over(shared(tmp_path, kind="disk"))
    log = a.planner.store.stack.erasure_logs[0]
    log._patience_s = 0.05
    with b.planner.store.stack.erasure_logs[0].storing() as free:
        assert free
        with pytest.raises(StoreError, match=r"is locked by a process .* forget again"):
            a.forget(P)
    assert a.forget(P) == 0


def test_stores_wait_while_somebody_erases_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "_BARRED_S", 0.2)
    a, b = kv_over(shared(tmp_path)), kv_over(shared(tmp_path, kind="disk"))
    with a.planner.store.stack.erasure_logs[0].erasing():
        published(b, P)
        assert not list(b.planner.store.stack.tiers[0].scan())
        begun_s = time.monotonic()
        assert not b.flush(30.0), "pages were dropped"
        assert time.monotonic() - begun_s < 25.0
    assert not list(b.planner.store.stack.tiers[0].scan())
    published(b, Q)
    assert b.flush() and len(list(b.planner.store.stack.tiers[0].scan())) == 3
    a.close()
    b.close()


@pytest.mark.parametrize("tiers", [1, 2])
def test_pages_whose_stores_wait_for_an_erasure_elsewhere_are_waited_for(
    tiers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of which they took the most had no room for the next prompt, alone as it was."""
    monkeypatch.setattr(mover, "_BARRED_S", 0.2)
    memory = shared(tmp_path)
    beside = [MemoryTier(1 << 20)] * (tiers - 1)
    b = make_kv(one_group(), pages=4, tiers=[*beside, Wrapped(memory, kind="disk")])
    with kv_over(shared(tmp_path)).planner.store.stack.erasure_logs[0].erasing():
        for prompt in (P, Q, R):
            published(b, prompt)
    audit(b)


def test_a_step_hears_of_it_where_nobody_opens_prompts(tmp_path: Path) -> None:
    """Else its stores would wait for ever: a step looks only when one of them had to."""
    a, b = kv_over(shared(tmp_path)), kv_over(shared(tmp_path, kind="disk"))
    seq = b.open([9])
    a.forget(P)
    advance(b, [seq], [[9, *[7] * 16]])
    settle(b)
    b.planner.store.writes.drain()
    stack = b.planner.store.stack
    assert stack.erasure_logs.behind and not list(stack.tiers[0].scan())
    advance(b, [seq], [[7]])
    settle(b)
    b.planner.store.writes.drain()
    assert not stack.erasure_logs.behind and len(list(stack.tiers[0].scan())) == 2
    seq.close()


# ---- who may only read


def test_a_reader_cannot_forget_and_the_owner_does_it_for_him(tmp_path: Path) -> None:
    a = kv_over(f"disk:{tmp_path / 'kv'}:8MiB")
    with reader():
        b = kv_over(f"disk:{tmp_path / 'kv'}:8MiB")
    published(a, P)
    a.flush()
    assert reused(b, P) == 24
    with pytest.raises(StoreError, match="3 of them and can only be read here"):
        b.forget(P)
    assert reused(a, P) == 0  # he heard of it
    assert not list(a.planner.store.stack.tiers[0].scan())
    assert reused(b, P) == 0
    with pytest.raises(StoreError, match="perhaps some of them and can only be read here"):
        b.invalidate()  # what the owner stores just now would stay


def test_where_nobody_can_be_told_it_says_so(tmp_path: Path) -> None:
    a = kv_over(f"disk:{tmp_path / 'kv'}:8MiB")
    log = tmp_path / "kv" / "erased"
    log.unlink()
    log.mkdir()
    published(a, P)
    with pytest.raises(StoreError, match="cannot be written, so other caches would not learn"):
        a.forget(P)
    assert reused(a, P) == 0 and not list(a.planner.store.stack.tiers[0].scan())
    log.rmdir()
    assert a.forget(P) == 0


# ---- what it costs


class Counted(ErasureLog):
    """Counts what is asked of the system."""

    asked = 0

    def changed(self) -> bool:
        Counted.asked += 1
        return super().changed()


def test_nothing_is_asked_per_token_and_one_thing_per_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowkv.tiers.erasure_log.ErasureLog", Counted)
    kv = kv_over(shared(tmp_path))
    published(kv, P)
    kv.flush()
    Counted.asked = 0
    seq = kv.open([*P, 0])
    assert Counted.asked == 1
    advance(kv, [seq], [[0]])
    for token in range(5):  # fills no page: nothing is stored
        advance(kv, [seq], [[token]])
    assert Counted.asked == 1
    seq.close()
    kv.close()


# ---- several groups


@each_way
def test_all_groups_are_dropped(tmp_path: Path, forget: Forget) -> None:
    a = make_kv(geometry(), tiers=[shared(tmp_path, kind="disk")])
    b = make_kv(geometry(), tiers=["host:1MiB", shared(tmp_path)])
    published(a, P)
    assert a.flush() and reused(b, P) == 24
    forget(a)
    assert reused(b, P) == 0 and not len(b.planner.store.index)
