"""The model that a cache serves, and its sequences when that changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flowkv import KV, Namespace
from flowkv.policy import LRU
from flowkv.testing import MemoryTier
from tests.cache.audit import audit, audit_empty
from tests.cache.fakes import Deferred, lasting
from tests.cache.toy import advance, check_content, geometry, make_kv, opened, published, simple
from tests.inside import CapacityError, ConfigError, StateError, bind, follow, warn
from tests.inside import kv_plan as plan

TEXT = list(range(50))


def reused(kv: KV, tokens: list[int]) -> int:
    with kv.open(tokens) as seq:
        check_content(kv, seq, tokens[: seq.length])
        return seq.reused


def test_a_cache_learns_its_model_later() -> None:
    kv = KV(gpu="1MiB")
    assert kv.geometry is None and kv.page_size == 64 and "unbound" in repr(kv)
    assert kv.stats()["blocks"] == 0 and kv.flush()
    for call in (lambda: kv.open([1]), lambda: kv.explain([1]), kv.invalidate, kv.defragment):
        with pytest.raises(StateError, match=r"Call flowkv\.attach"):
            call()
    bind(kv, geometry(), Namespace(model="m"))
    published(kv, TEXT)
    assert reused(kv, TEXT) == 49 and kv.geometry == geometry()
    kv.close()
    assert "closed" in repr(kv)


def test_another_namespace_shares_nothing_and_what_is_open_goes_on() -> None:
    kv = make_kv()
    seq = opened(kv, TEXT[:20])
    bind(kv, geometry(), Namespace(model="toy", weights="new"))
    assert reused(kv, TEXT) == 0
    advance(kv, [seq], [TEXT[20:40]])
    check_content(kv, seq, TEXT[:40])
    twin = kv.fork(seq)
    advance(kv, [twin, seq], [TEXT[40:45], [7]])
    check_content(kv, twin, TEXT[:45])
    published(kv, TEXT[:30], tag=2)
    bind(kv, geometry(), Namespace(model="toy"))
    assert reused(kv, TEXT) == 16, "what the old weights computed under the new ones is not known"


def test_another_geometry_gets_pools_of_its_own_and_keeps_the_tiers() -> None:
    disk = lasting()
    kv = make_kv(tiers=[disk])
    seq = opened(kv, TEXT[:20])
    kv.flush()
    bind(kv, geometry(window=20), Namespace(model="toy"))
    assert reused(kv, TEXT) == 0
    advance(kv, [seq], [TEXT[20:40]])
    check_content(kv, seq, TEXT[:40])
    twin, new = kv.fork(seq), opened(kv, TEXT[:30])
    check_content(kv, twin, TEXT[:40])
    with pytest.raises(StateError, match="different models or caches"):
        kv.step([seq, new], [[1], [1]])
    kv.truncate(twin, 10)
    kv.suspend(seq)
    kv.resume(seq)
    check_content(kv, seq, TEXT[:40])
    for old in (seq, twin, new):
        old.close()
    audit(kv)
    kv.flush()
    bind(kv, geometry(), Namespace(model="toy"))
    assert reused(kv, TEXT) == 16
    assert len(disk.frames) == 4 + 6 + 4  # tails of 19 and 20 tokens, in two groups


def test_a_geometry_that_does_not_fit_changes_nothing() -> None:
    kv = make_kv(pages=8)
    published(kv, TEXT[:20])
    with pytest.raises(CapacityError):
        bind(kv, simple(head_dim=4096, layers=8), Namespace(model="big"))
    assert reused(kv, TEXT) == 20


def test_stores_under_way_do_not_reach_the_next_model() -> None:
    disk = Deferred(lasting())
    kv = make_kv(tiers=[disk], load_deadline_s=0.01)
    published(kv, TEXT[:20])
    disk.poll = lambda timeout_s=0.0: []
    bind(kv, geometry(window=20), Namespace(model="toy"))
    del disk.poll
    disk.work()
    assert kv.flush()
    published(kv, TEXT[:20])
    kv.flush()


def test_invalidation_erases_this_model_only() -> None:
    disk = lasting()
    kv = make_kv(tiers=[disk])
    published(kv, TEXT[:20])
    bind(kv, geometry(), Namespace(model="other"))
    published(kv, TEXT[:20])
    open_one = opened(kv, [9] * 20)
    assert kv.invalidate() == 8 + 4  # tails of 19 and 20 tokens, in two groups
    check_content(kv, open_one, [9] * 20)
    advance(kv, [open_one], [[9] * 20])
    open_one.close()
    assert kv.stats()["blocks"] == 4 + 4 and len(disk.frames) == 4 + 4
    bind(kv, geometry(), Namespace(model="toy"))
    assert reused(kv, TEXT) == 20


# ---- the end


def test_a_closed_cache_is_closed() -> None:
    kv = make_kv(tiers=[MemoryTier()])
    seq, told = opened(kv, TEXT), list[str]()
    follow(kv, detach=lambda: told.append("detached"))
    kv.close()
    kv.close()
    assert told == ["detached"] and seq.closed and "closed" in repr(seq) and seq.length == 0
    for call in (
        *(lambda: kv.open([1]), lambda: plan(kv, [], []), lambda: kv.fork(seq)),
        *(lambda: bind(kv, geometry(), Namespace(model="x")), kv.invalidate),
    ):
        with pytest.raises(StateError, match="closed"):
            call()
    seq.close()
    assert kv.stats()["sequences"] == 0


def test_closing_inside_a_step() -> None:
    kv = make_kv()
    seq = kv.open(TEXT)
    with pytest.raises(ZeroDivisionError), kv.step([seq], [TEXT]):
        kv.close()
        raise ZeroDivisionError
    audit_empty(kv)


def test_a_forked_process_is_refused() -> None:
    kv = make_kv(tiers=[Deferred(lasting())])  # owes answers to the parent
    seq = opened(kv, TEXT)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child says what it was told, and leaves without pytest's farewell
        told = []
        for call in (lambda: kv.open([1]), lambda: kv.step([seq], [[1]]), lambda: kv.explain([1])):
            try:
                call()
            except StateError as error:
                told.append(str(error))
        kv.close()
        os.write(writer, "\n".join(told).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        told = answer.read().splitlines()
    os.waitpid(pid, 0)
    problem = "the cache was opened by the parent process. Open another one in this process."
    assert told == [problem] * 3
    advance(kv, [seq], [[1]])


# ---- configuration


def test_configuration_is_checked_before_anything_is_opened(tmp_path: Path) -> None:
    for fields, message in (
        *(({"gpuu": 1}, "Did you mean"), ({"gpu": "many"}, "gpu")),
        ({"tiers": ["host:1GiB", "gpu:1MiB"]}, "below the slower"),
        *(({"policy": "lruu"}, "lru"), ({"codec": "zip"}, "codec"), ({"disk": ""}, "disk")),
    ):
        with pytest.raises(ConfigError, match=message):
            KV(geometry(), namespace="m", **fields)
    file = tmp_path / "flowkv.toml"
    file.write_text('gpu = "1MiB"\npolicy = "lru"\ntenant = "bob"\nmax_rows = 3\n')
    kv = KV(geometry(), config=file, max_rows=2)
    assert kv.config.max_rows == 2 and kv.planner.store.device_places["cpu"].policy.name == "lru"
    published(kv, TEXT)
    assert kv.explain(TEXT, tenant="bob").known == 49
    assert kv.explain(TEXT, tenant="").known == 0
    kv.close()


def test_warnings_are_given_once() -> None:
    kv, told = make_kv(), []
    kv.bus.subscribe(told.append)
    with pytest.warns(UserWarning, match="look") as caught:
        for _ in range(3):
            warn(kv, "code", "look here")
    assert len(caught) == 1 and [event.code for event in told] == ["code"]


def test_what_makes_no_policy_is_refused() -> None:
    """It was once ignored, and the default policy took its place."""
    for wrong in ({"host": LRU()}, {"gpu": 5}, 5, 0, [1], (), object()):
        with pytest.raises(ConfigError, match=r"makes no policies.*a class, or a callable"):
            KV(geometry(), policy=wrong)
    with pytest.raises(ConfigError, match=r"LRU\(\.\.\.\) is one policy.*policy=lambda: LRU"):
        KV(geometry(), policy=LRU())


@pytest.mark.parametrize("options", [{}, {"host": "1MiB"}])
def test_a_callable_must_make_policies(options: dict[str, Any]) -> None:
    for made in (3, None, LRU, "lru", object()):
        with pytest.raises(
            ConfigError, match=r"which is no policy\. Have it return a fresh object"
        ):
            KV(geometry(), policy=lambda made=made: made, **options)
    with pytest.raises(ZeroDivisionError):
        KV(geometry(), policy=lambda: 1 / 0, **options)
    KV(geometry(), policy=LRU, **options).close()
