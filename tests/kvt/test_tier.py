"""Pages in coded form over other tiers: never a wrong page, whatever the tier below does."""

from __future__ import annotations

import itertools
import math
import os
import select
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv import Geometry, Tier
from flowkv.testing import FlakyTier, MemoryTier, check_tier
from flowkv.tiers import FrameInfo, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.remote.tier import RemoteTier
from tests.clock import held, in_child, wait_for, without_threads
from tests.conftest import examples
from tests.inside import (
    CodecTier,
    Faults,
    HostTier,
    PageBases,
    PageCoder,
    PrefixIndex,
    StateError,
    StoreError,
    coded_forms,
    digests,
    evictable,
    kvt_codec,
    kvt_tier,
    listed,
    most_basis_bytes,
    read_head,
)
from tests.kvt.pages import SIZE, Source, group, layout, learner, page
from tests.tiers.remote.faulty import FaultyBackend
from tests.tiers.wraps import KINDS, envelope_of

LAYOUT = layout("bfloat16")
GEOMETRY = Geometry(groups=(group("bfloat16"),), page_size=SIZE)
SOURCE = Source(LAYOUT)
CODER = learner(SOURCE).coder(1e-3, {"bits": 2.0})
OTHER = learner(SOURCE).coder(1e-3, {})  # of another text
BASIS, OTHER_BASIS = CODER.data, OTHER.data
NAMESPACE, COLD = b"n" * 32, 5
PAGES = [bytes(page(CODER, SOURCE, number)) for number in range(6)]
STEP = LAYOUT.stripe_stride_bytes


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def info(**more: Any) -> FrameInfo:
    raw = LAYOUT.fingerprint()
    return FrameInfo("page", 0, 0, raw, bytes(32), NAMESPACE, 0, SIZE, STEP)._replace(**more)


def made(inner: Tier, *, basis: bytes | None = BASIS) -> CodecTier:
    """A tier that codes pages, whose numbers are those of their keys."""
    bases = PageBases(coded_forms(GEOMETRY))
    if bind := getattr(inner, "bind", None):
        bind(NAMESPACE, "a model")
    tier = CodecTier(inner, bases)
    tier.page_of = lambda key: int.from_bytes(key, "big")
    tier.read_bases(NAMESPACE)
    if basis is not None:
        bases.use({0: bases.add(PageCoder(LAYOUT, basis))})
    return tier


def answers(tier: Tier, job: int, count: int, patience_s: float = 120.0) -> list[Any]:
    found: dict[int, Any] = {}
    end_s = time.monotonic() + patience_s
    while len(found) < count and time.monotonic() < end_s:
        for answer in tier.poll(0.2):
            assert answer.job == job and answer.item not in found
            found[answer.item] = answer
    assert sorted(found) == [*range(count)], "some were not answered in time"
    return [found[number] for number in range(count)]


def store(tier: Tier, numbers: range = range(6)) -> list[Any]:
    items = [Store(key(n), info(), memoryview(PAGES[n])) for n in numbers]
    return answers(tier, tier.submit_store(items), len(items))


def load(
    tier: Tier, number: int, first: int = 0, count: int = 0, fidelity: int = COLD
) -> tuple[Any, bytearray]:
    target = bytearray((count or LAYOUT.layers) * STEP + 64)
    item = Load(key(number), memoryview(target)[:-64], LAYOUT.fingerprint(), fidelity, first, count)
    (answer,) = answers(tier, tier.submit_load([item]), 1)
    assert not any(target[-64:])
    return answer, target[:-64]


def near(got: bytearray, wanted: bytes) -> bool:
    a, b = (CODER.views(memoryview(bytearray(x)), len(x) // STEP) for x in (got, wanted))
    pairs = zip(a, b, strict=True)
    return all(float((x.float() - y.float()).norm() / y.float().norm()) < 0.1 for x, y in pairs)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[CodecTier]:
    tier = made(DiskTier(tmp_path, 64 << 20))
    yield tier
    tier.close()


def test_pages_are_stored_small_and_come_back(disk: CodecTier) -> None:
    assert {one.outcome for one in store(disk)} == {Outcome.STORED}
    entries = {entry.key: entry for entry in listed(disk)}
    assert len(entries) == 6 and {entry.info for entry in entries.values()} == {info(fidelity=COLD)}
    assert sum(entry.n_bytes for entry in entries.values()) < sum(map(len, PAGES)) / 2
    for number, wanted in enumerate(PAGES):
        answer, got = load(disk, number)
        assert answer.outcome is Outcome.HIT and answer.info == info(fidelity=COLD)
        assert answer.n_bytes == LAYOUT.page_bytes and near(got, wanted)
        for first, count in ((0, 1), (1, 2), (2, 1)):
            answer, part = load(disk, number, first, count)
            assert answer.outcome is Outcome.HIT and answer.n_bytes == count * STEP
            assert part == got[first * STEP :][: count * STEP]
        assert load(disk, number, 2, 2)[0].reason == "stripes"
    assert disk.delete([key(1)]) == 1
    assert load(disk, 1)[0].outcome is Outcome.MISS


def test_pages_that_changed_since_they_were_digested_are_not_coded(disk: CodecTier) -> None:
    """A copy from a device that went wrong would become a sound frame of a wrong page."""
    body = bytearray(PAGES[1])
    body[STEP + 9] ^= 1
    known = [memoryview(digests(PAGES[n], STEP)) for n in range(2)]
    items = [Store(key(n), info(), memoryview(x), known[n]) for n, x in enumerate((PAGES[0], body))]
    good, bad = answers(disk, disk.submit_store(items), 2)
    assert good.outcome is Outcome.STORED and (bad.outcome, bad.reason) == (
        Outcome.FAILED,
        "digest",
    )
    assert near(load(disk, 0)[1], PAGES[0]) and load(disk, 1)[0].outcome is Outcome.MISS


def test_readers_of_exact_pages_never_get_them(disk: CodecTier) -> None:
    store(disk)
    for fidelity in range(COLD):
        for _ in range(2):  # the second time it lies in memory
            answer, got = load(disk, 2, fidelity=fidelity)
            assert (answer.outcome, answer.reason) == (Outcome.MISS, "fidelity")
            assert not any(got)
        assert load(disk, 2)[0].outcome is Outcome.HIT


def test_readers_without_bases_never_get_them(tmp_path: Path) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    store(tier)
    tier.close()
    plain = DiskTier(tmp_path, 64 << 20)
    assert load(plain, 2)[0].reason == "layout"
    plain.close()


def test_another_process_reads_with_the_stored_basis(tmp_path: Path) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    assert tier.store_bases()
    store(tier, range(3))
    tier.bases.use({0: tier.bases.add(OTHER)})
    assert tier.store_bases()
    store(tier, range(3, 6))
    tier.close()
    again = made(DiskTier(tmp_path, 64 << 20), basis=None)
    assert again.bases.current[0].name == OTHER.name
    assert {entry.key for entry in listed(again)} == {key(n) for n in range(6)}
    assert again.bases.coder(CODER.name) is None
    for number, wanted in enumerate(PAGES):
        answer, got = load(again, number)
        assert answer.outcome is Outcome.HIT and near(got, wanted), number
    again.close()


def test_a_basis_stored_twice_is_read_by_later_processes(tmp_path: Path) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    assert tier.store_bases() and tier.store_bases()
    tier.close()
    again = made(DiskTier(tmp_path, 64 << 20), basis=None)
    assert again.bases.current[0].name == CODER.name
    again.close()


@pytest.mark.parametrize("end", [Outcome.FAILED, SystemExit])
def test_a_basis_that_cannot_be_stored_costs_not_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    """A disk is full, or the process is killed meanwhile."""
    tier = made(DiskTier(tmp_path, 64 << 20))
    assert tier.store_bases()
    store(tier)
    own = tier.inner.submit_store

    def submit_store(items: list[Store], **how: Any) -> int:
        if items[0].info.layout == kvt_tier.BASIS_LAYOUT:
            if end is SystemExit:
                raise SystemExit
            items = [items[0]._replace(info=items[0].info._replace(stripe_bytes=0))]
        return own(items, **how)

    monkeypatch.setattr(tier.inner, "submit_store", submit_store)
    tier.bases.use({0: tier.bases.add(OTHER)})
    assert not tier.store_bases()
    tier.close()
    again = made(DiskTier(tmp_path, 64 << 20), basis=None)
    list(again.scan())
    assert again.bases.current[0].name == CODER.name
    assert {load(again, number)[0].outcome for number in range(6)} == {Outcome.HIT}
    again.close()


def basis(number: int) -> PageCoder:
    return learner(SOURCE).coder(1e-3, {"number": float(number)})


def bases_in(tier: CodecTier) -> int:
    return sum(one.n_bytes > len(BASIS) // 2 for one in tier.scan() if one.info.kind == "memo")


def test_old_bases_are_removed(tmp_path: Path) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    assert tier.store_bases() and bases_in(tier) == 1
    for number in range(1, 6):
        store(tier, range(number - 1, number))  # coded with the basis before
        tier.bases.use({0: tier.bases.add(basis(number))})
        assert tier.store_bases() and bases_in(tier) == min(number, 3) + 1
    tier.close()
    again = made(DiskTier(tmp_path, 64 << 20), basis=None)
    list(again.scan())
    found = [load(again, number)[0].outcome for number in range(5)]
    assert found == [Outcome.MISS] * 2 + [Outcome.HIT] * 3
    again.bases.use({0: again.bases.add(basis(6))})
    assert again.store_bases() and bases_in(again) == 4  # one that this process has not made
    again.close()


def test_bases_that_no_page_names_are_removed_first(tmp_path: Path) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    store(tier)
    for number in range(5):
        tier.bases.use({0: tier.bases.add(basis(number))})
        assert tier.store_bases()
        assert bases_in(tier) == 2
    assert {load(tier, number)[0].outcome for number in range(6)} == {Outcome.HIT}
    tier.close()


def test_bases_keep_to_a_quarter_of_a_tier(tmp_path: Path) -> None:
    size = 10 * len(BASIS)  # room for two and their record
    tier = made(HostTier(size))
    for number in range(4):
        tier.bases.use({0: tier.bases.add(basis(number))})
        assert tier.store_bases()
        store(tier, range(number, number + 1))
        assert bases_in(tier) == min(number + 1, 2)
    tier.close()


def test_bases_are_evictable_once_their_model_is_out_of_use(disk: CodecTier) -> None:
    store(disk, range(1))
    assert bases_in(disk) == 1 and len([*evictable(disk)]) == len(listed(disk)) == 1
    disk.inner.in_use = lambda namespace: namespace != NAMESPACE  # type: ignore[attr-defined]
    assert len([*evictable(disk)]) == len(listed(disk)) == 3


def test_pages_without_their_basis_are_misses(tmp_path: Path) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    store(tier)
    (own,) = (one.key for one in tier.inner.scan() if one.n_bytes > len(BASIS))
    assert tier.delete([own]) == 1
    tier.close()
    again = made(DiskTier(tmp_path, 64 << 20), basis=OTHER_BASIS)
    list(again.scan())
    for number in range(6):
        answer, got = load(again, number)
        assert answer.outcome is Outcome.MISS and not any(got)
    store(again)  # they make way for readable ones
    assert {load(again, number)[0].outcome for number in range(6)} == {Outcome.HIT}
    again.close()


def test_bases_are_stored_before_pages(tmp_path: Path) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    store(tier)  # with a basis that another tier, say, had
    tier.close()
    again = made(DiskTier(tmp_path, 64 << 20), basis=None)
    list(again.scan())
    assert again.bases.current[0].name == CODER.name
    assert {load(again, number)[0].outcome for number in range(6)} == {Outcome.HIT}
    again.close()


@pytest.mark.parametrize("size", [64 << 20, 64 << 10])
def test_pages_stay_raw_where_no_basis_fits(tmp_path: Path, size: int) -> None:
    tier = made(HostTier(size))
    if size > 1 << 20:
        tier._put = lambda *_: False  # type: ignore[method-assign]
    (stored,) = store(tier, range(1))
    assert stored.outcome is Outcome.STORED
    assert not tier.bases.measured().get("pages")
    answer, got = load(tier, 0, fidelity=0)
    assert answer.outcome is Outcome.HIT and got == PAGES[0]
    assert not tier.store_bases()
    tier.close()


def test_a_basis_in_the_name_of_another_is_refused(tmp_path: Path) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    tier.bases.current[0].data = OTHER_BASIS
    store(tier)
    tier.store_bases()
    tier.close()
    again = made(DiskTier(tmp_path, 64 << 20), basis=None)
    list(again.scan())
    assert not again.bases.current
    assert load(again, 0)[0].outcome is Outcome.MISS
    again.close()


@pytest.mark.parametrize("n_bytes", [0, 1 << 31])
def test_a_basis_of_no_basis_length_is_not_read(disk: CodecTier, n_bytes: int) -> None:
    """A page names the length of its basis: memory is taken for no more than there can be."""
    disk._get = lambda *_: pytest.fail("it was read")  # type: ignore[method-assign]
    assert disk._coder(bytes(16), n_bytes, LAYOUT) == (None, True)
    longest = len(learner(SOURCE).coder(1e-9, {"bits": 2.0}).data)  # all axes as floats
    assert len(BASIS) < longest <= most_basis_bytes(LAYOUT) < longest + (1 << 17)


def test_what_is_no_page_of_the_group_passes_through(disk: CodecTier) -> None:
    bodies = [(info(kind="state"), PAGES[0]), (info(world=2), PAGES[1])]
    bodies += [(info(layout=b"l" * 16), PAGES[2]), (info(group=3), PAGES[3])]
    bodies += [(info(tokens=9), PAGES[4]), (info(codec=1, fidelity=1), PAGES[5])]
    items = [Store(key(n), said, memoryview(body)) for n, (said, body) in enumerate(bodies)]
    found = answers(disk, disk.submit_store(items), len(items))
    assert {one.outcome for one in found} == {Outcome.STORED}
    assert not disk.bases.measured().get("pages")
    for number, (said, body) in enumerate(bodies):
        target = bytearray(len(body))
        item = Load(key(number), memoryview(target), said.layout, COLD)
        (answer,) = answers(disk, disk.submit_load([item]), 1)
        assert answer.outcome is Outcome.HIT and answer.info == said and target == body


def test_pages_of_unknown_place_stay_raw(tmp_path: Path) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    tier.page_of = lambda key: None
    store(tier)
    answer, got = load(tier, 3, fidelity=0)
    assert answer.outcome is Outcome.HIT and got == PAGES[3]
    tier.close()


def test_pages_behind_unknown_ones_have_no_place() -> None:
    index = PrefixIndex()
    blocks = [index.get_or_create(key(2), key(1), 0), index.get_or_create(key(3), key(2), 0)]
    assert not any(block.placed for block in blocks)
    index.get_or_create(key(1), bytes(32), 0)
    assert not blocks[0].placed and index.get_or_create(key(9), key(1), 0).placed
    assert (index.find(key(1)).depth, index.find(key(9)).depth) == (0, 1)


def test_pages_stored_before_stay_readable(tmp_path: Path) -> None:
    plain = DiskTier(tmp_path, 64 << 20)
    store(plain, range(3))
    plain.close()
    tier = made(DiskTier(tmp_path, 64 << 20))
    store(tier)
    for number in range(3):
        answer, got = load(tier, number, fidelity=0)
        assert answer.outcome is Outcome.HIT and got == PAGES[number]
    assert load(tier, 4, fidelity=0)[0].reason == "fidelity"
    tier.close()


@pytest.mark.parametrize("seed", range(4))
def test_flaky_tiers_never_give_wrong_pages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvt_tier, "_AGAIN_S", 0.0)  # a basis may need more than one try
    faults = Faults(fail=0.2, lose=0.2, flip=0.3, latency_s=0.001)
    tier, hits = made(FlakyTier(HostTier(64 << 20), seed, faults)), Counter[int]()
    for number in itertools.chain(range(6), range(6)):
        store(tier, range(number, number + 1))
        for first, count in ((0, 0), (1, 1)):
            answer, got = load(tier, number, first, count)
            if answer.outcome is Outcome.HIT:
                hits[answer.info.fidelity] += 1
                stop = (first + count) * STEP if count else len(PAGES[number])
                assert near(got, PAGES[number][first * STEP : stop])
    assert hits[COLD] > 3, hits
    tier.close()


def body(tier: CodecTier, number: int) -> bytes:
    """The coded page as it lies in the tier below."""
    data, form = bytearray(LAYOUT.page_bytes), tier.bases.forms[0].coded
    item = Load(key(number), memoryview(data), form, COLD)
    (answer,) = answers(tier, tier.submit_load([item]), 1)
    assert answer.outcome is Outcome.HIT
    return bytes(data[: answer.n_bytes])


def test_pages_that_move_between_tiers_lose_nothing_more(tmp_path: Path) -> None:
    upper = made(DiskTier(tmp_path, 64 << 20))
    lower = made(HostTier(64 << 20))
    lower.bases = upper.bases  # as those of one cache
    store(upper, range(2))
    upper.bases.use({0: upper.bases.add(OTHER)})
    for number, fidelity in ((0, COLD), (1, 0)):
        coded, (answer, got) = body(upper, number), load(upper, number)
        assert upper.delete([key(number)]) == 1  # as a victim, before the other tier stores it
        one = Store(key(number), answer.info._replace(fidelity=fidelity), memoryview(got))
        (stored,) = answers(lower, lower.submit_store([one]), 1)
        assert stored.outcome is Outcome.STORED
        if fidelity:
            assert body(lower, number) == coded and load(lower, number)[1] == got
        else:  # one that was computed anew is coded as all new ones are
            assert read_head(memoryview(body(lower, number))).basis == OTHER.name
    upper.bases.recent.clear()
    numbers = [0, 1]
    for number in numbers:  # what its coded form was is not known any more
        one = Store(key(9 + number), info(fidelity=COLD), memoryview(PAGES[number]))
        upper.bases.decoded[key(9)] = None
        (stored,) = answers(lower, lower.submit_store([one]), 1)
        assert stored.outcome is Outcome.STORED
        assert (load(lower, 9 + number)[1] == PAGES[number]) == (number == 0)
    assert upper.bases.recent
    assert lower.erase([key(0)]) == 1  # and nothing stays of it in memory
    assert not upper.bases.recent and not upper.bases.decoded
    upper.close()
    lower.close()


def test_erased_pages_are_not_remembered(disk: CodecTier) -> None:
    store(disk)
    assert load(disk, 3)[0].outcome is Outcome.HIT
    assert disk.erase([key(3)]) == 1
    assert load(disk, 3)[0].outcome is Outcome.MISS
    assert key(3) not in disk.bases.recent


@pytest.mark.parametrize("way", ["erase", "delete", "drop_copies"])
def test_pages_erased_while_they_are_loaded_are_not_remembered(
    disk: CodecTier, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    store(disk)
    route, held = disk._route, threading.Event()
    monkeypatch.setattr(disk, "_route", lambda answer: (held.wait(20), route(answer)))
    target = bytearray(LAYOUT.page_bytes)
    item = Load(key(3), memoryview(target), LAYOUT.fingerprint(), COLD)
    job = disk.submit_load([item])
    time.sleep(0.1)
    getattr(disk, way)([key(3)])
    held.set()
    answers(disk, job, 1)
    assert not disk.bases.recent and key(3) not in disk._coded


@pytest.mark.parametrize("way", ["erase", "delete"])
def test_pages_loaded_while_they_are_erased_are_not_remembered(
    disk: CodecTier, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    store(disk)
    own = getattr(disk.inner, way)

    def after_a_load(keys: list[bytes]) -> int:
        assert load(disk, 3)[0].outcome is Outcome.HIT and disk.bases.recent
        return int(own(keys))

    monkeypatch.setattr(disk.inner, way, after_a_load)
    assert getattr(disk, way)([key(3)]) == 1
    assert key(3) not in disk._coded and load(disk, 3)[0].outcome is Outcome.MISS
    assert bool(disk.bases.recent) == (way == "delete")  # another tier may be about to store it


def test_closing_waits_for_no_basis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    store(tier)
    tier.close()
    again = made(DiskTier(tmp_path, 64 << 20), basis=None)
    list(again.scan())
    again.bases.__init__(coded_forms(GEOMETRY))  # type: ignore[misc]
    route, held = again._route, threading.Event()
    monkeypatch.setattr(again, "_route", lambda answer: (held.wait(20), route(answer)))
    target = bytearray(LAYOUT.page_bytes)
    again.submit_load([Load(key(3), memoryview(target), LAYOUT.fingerprint(), COLD)])
    again._decoders.shutdown()  # as `close` does first
    start_s = time.monotonic()
    held.set()
    time.sleep(0.3)
    again.close()
    assert time.monotonic() - start_s < 15 and len(again.poll()) == 1


def failing_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: type) -> None:
    """Let the next call of a method raise."""
    own, calls = getattr(owner, name), itertools.count()

    def call(*args: Any, **given: Any) -> Any:
        if not next(calls):
            raise error
        return own(*args, **given)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("name", ["submit_load", "remember", "_decode_soon", "bytes"])
def test_items_fail_at_once_where_an_error_ends_them(
    disk: CodecTier, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store(disk)
    monkeypatch.setattr(kvt_tier, "bytes", bytes, raising=False)
    owners = {"submit_load": disk.inner, "remember": disk.bases, "bytes": kvt_tier}
    failing_once(monkeypatch, owners.get(name, disk), name, MemoryError)
    target = bytearray(LAYOUT.page_bytes)
    item = Load(key(2), memoryview(target), LAYOUT.fingerprint(), COLD)
    (answer,) = answers(disk, disk.submit_load([item]), 1, 2.0)
    assert (answer.outcome, answer.reason) == (Outcome.FAILED, "memory")
    assert near(load(disk, 2)[1], PAGES[2]) and near(load(disk, 3)[1], PAGES[3])


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
def test_answers_are_routed_after_an_error_of_the_tier_below(
    disk: CodecTier, monkeypatch: pytest.MonkeyPatch, error: type
) -> None:
    store(disk)
    failing_once(monkeypatch, disk.inner, "poll", error)
    assert near(load(disk, 2)[1], PAGES[2])


@pytest.mark.parametrize("end", ["decoded", "cancelled", "error", "no device"])
def test_pages_that_wait_are_decoded_together(
    disk: CodecTier, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Each piece of a page apart, and none that was cancelled; an error is of its own page."""
    store(disk)
    begun, goes_on, batches = threading.Semaphore(0), threading.Event(), list[Any]()
    own = PageCoder.decode_batch

    def decode(coder: PageCoder, pages: Any, first: int, layers: int) -> list[bool]:
        batches.append((len(pages), first, layers))
        begun.release()
        assert goes_on.wait(20)
        if end == "error" and any(out.obj is targets[-1] for _, out in pages):
            raise MemoryError
        return own(coder, pages, first, layers)

    if end == "no device":  # after an error of it, or before its trial ends
        monkeypatch.setattr(kvt_tier, "DEVICES", {"cpu"})
        disk._device._again_s = math.inf
    monkeypatch.setattr(kvt_tier, "DECODERS", 1)
    monkeypatch.setattr(PageCoder, "decode_batch", decode)
    workers = disk._decoders._max_workers
    targets = [bytearray(LAYOUT.page_bytes) for _ in range(workers + 5)]
    parts = [(n % 6, (0, 0) if n < workers + 3 else (1, 2)) for n in range(len(targets))]
    jobs = []
    for (number, part), target in zip(parts, targets, strict=True):
        item = Load(key(number), memoryview(target), LAYOUT.fingerprint(), COLD, *part)
        jobs.append(disk.submit_load([item]))
        if len(jobs) <= workers:  # they hold all threads
            assert begun.acquire(timeout=20)
    end_s = time.monotonic() + 20
    while len(disk._waiting) < 5 and time.monotonic() < end_s:
        time.sleep(0.01)
    if end == "cancelled":
        disk.cancel(jobs[-1])
    goes_on.set()
    found = dict[int, Any]()
    while len(found) < len(jobs) and time.monotonic() < end_s:
        found |= {answer.job: answer for answer in disk.poll(0.2)}
    last = {"cancelled": [(1, 1, 2)], "error": [(2, 1, 2), (1, 1, 2), (1, 1, 2)]}
    wanted = [*[(1, 0, 3)] * workers, (3, 0, 3), *last.get(end, [(2, 1, 2)])]
    assert Counter(batches) == Counter(wanted)
    assert not disk.bases.measured()["device_pages"]
    for number, job in enumerate(jobs):
        answer, raw = found[job], PAGES[parts[number][0]]
        if end in ("cancelled", "error") and job == jobs[-1]:
            reason = "memory" if end == "error" else end
            assert (answer.outcome, answer.reason) == (Outcome.FAILED, reason)
        else:
            done = targets[number] if number < workers + 3 else targets[number][: 2 * STEP]
            assert answer.outcome is Outcome.HIT
            assert near(done, raw[STEP:] if number >= workers + 3 else raw)


@pytest.mark.parametrize("way", ["decoders", "encoders"])
def test_work_that_stays_queued_is_done_once(
    disk: CodecTier, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "decoders":
        store(disk)
    pool, begun = getattr(disk, f"_{way}"), list[Any]()
    own = pool.submit

    def submit(*args: Any) -> None:
        begun.append(args)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "submit", submit)
    if way == "encoders":
        assert {answer.outcome for answer in store(disk)} == {Outcome.STORED} and len(begun) == 6
    target = bytearray(LAYOUT.page_bytes)
    item = Load(key(2), memoryview(target), LAYOUT.fingerprint(), COLD)
    (answer,) = answers(disk, disk.submit_load([item]), 1)
    assert answer.outcome is Outcome.HIT and near(target, PAGES[2])
    target[:] = bytes(len(target))  # it is the caller's again
    for args in begun:
        own(*args).result(20)
    assert not any(target) and not disk.poll() and disk.bases.measured()["pages"] == 6


def test_nothing_is_left_of_a_basis_that_came_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    store(tier)
    tier.close()
    monkeypatch.setattr(kvt_tier, "_BASIS_S", -1.0)
    again = made(DiskTier(tmp_path, 64 << 20), basis=None)
    list(again.scan())
    assert not again.bases.current and load(again, 2)[0].outcome is Outcome.FAILED
    monkeypatch.undo()
    assert load(again, 2)[0].outcome is Outcome.HIT
    wait_for(lambda: not again._sent)
    assert not again._left
    again.close()


@pytest.mark.parametrize("fault", ["late", "error"])
def test_loads_wait_for_a_basis_no_longer_than_their_deadline(fault: str) -> None:
    """Each waited half a minute, one after the other, and was unlisted as of another layout."""
    engine = FaultyBackend()
    learner_tier = made(RemoteTier(engine))
    store(learner_tier)
    tier = made(RemoteTier(engine), basis=None)
    tier.bases.use({})  # unknown here, as after another process learned anew
    here, own = kvt_tier._basis_key(CODER.name).hex(), engine.get

    def get(name: str, offset: int, into: memoryview, timeout_s: float) -> memoryview | None:
        if name == here and fault == "late":
            time.sleep(timeout_s)
        if name == here:
            raise TimeoutError if fault == "late" else ConnectionResetError
        return own(name, offset, into, timeout_s)

    engine.get = get  # type: ignore[method-assign]
    whole, begun_s = LAYOUT.page_bytes, time.monotonic()
    items = [
        Load(key(n), memoryview(bytearray(whole)), LAYOUT.fingerprint(), COLD) for n in range(6)
    ]
    found = answers(tier, tier.submit_load(items, deadline_s=0.5), 6)
    assert time.monotonic() - begun_s < 0.5 + 5
    assert {(one.outcome, one.reason) for one in found} == {(Outcome.FAILED, "deadline")}
    engine.get = own  # type: ignore[method-assign]
    end_s = time.monotonic() + 20
    while load(tier, 0)[0].outcome is not Outcome.HIT:  # once its breaker is closed
        assert time.monotonic() < end_s
        time.sleep(0.1)
    assert [load(tier, n)[0].outcome for n in range(6)] == [Outcome.HIT] * 6
    tier.close()
    learner_tier.close()


def test_a_basis_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    store(tier)
    tier.close()
    again = made(DiskTier(tmp_path, 64 << 20), basis=OTHER_BASIS)
    list(again.scan())
    again.bases = PageBases(coded_forms(GEOMETRY))
    read, own = list[bytes](), again._get

    def get(key: bytes, *more: Any) -> bytes | None:
        read.append(key)
        time.sleep(0.3)  # others want it meanwhile
        return own(key, *more)

    monkeypatch.setattr(again, "_get", get)
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(again._coder, CODER.name, len(BASIS), LAYOUT) for _ in range(3)]
    assert len(read) == 1 and len({id(one.result()[0]) for one in found}) == 1
    assert found[0].result()[0].name == CODER.name
    again.close()


def test_opening_without_a_thread_says_so() -> None:
    with without_threads(), pytest.raises(StoreError, match=r"no thread can start\. End other"):
        made(MemoryTier(), basis=None)


def test_answers_wait_for_the_process_that_asked(disk: CodecTier) -> None:
    """A forked child that polled took the parent's wake-up, or waited for a lock."""
    job = disk.submit_load([Load(key(0), memoryview(bytearray(LAYOUT.page_bytes)), bytes(16))])
    assert select.select([disk.fileno()], [], [], 20)[0]
    with disk._lock, disk._answers._changed:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)  # ends a child that hangs
            thread = threading.Thread(target=lambda: os._exit(bool(disk.poll(0.01))))
            thread.start()
            thread.join()
        assert os.waitpid(child, 0)[1] == 0
    assert select.select([disk.fileno()], [], [], 0)[0]
    assert [one.job for one in disk.poll(0)] == [job]


def test_a_basis_that_another_process_removed_is_stored_again() -> None:
    """Or no later process could read the pages of this one."""
    inner = MemoryTier()
    disk = made(inner)
    assert {one.outcome for one in store(disk, range(1))} == {Outcome.STORED}
    inner.delete([kvt_tier._basis_key(CODER.name)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "_put_basis", lambda coder: False)
        for number in (2, 3):
            store(disk, range(number, number + 1))
            assert not disk.coded_bytes(key(number)), "as it is, while no basis lies here"
    disk._again_ns = 0
    assert {one.outcome for one in store(disk, range(1, 2))} == {Outcome.STORED}
    again = made(inner, basis=None)
    assert load(again, 1)[0].outcome is Outcome.HIT
    again.close()
    disk.close()


def test_a_forked_child_closes_without_waiting_for_locks(disk: CodecTier) -> None:
    def refused() -> bool:
        with pytest.raises(StateError, match="before a fork"):
            disk.submit_load([])
        return disk.close() is not None

    with held(disk._lock):
        assert in_child(refused) == 0
    store(disk)


class Gate:
    """Makes the coder wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.open = False
        own = getattr(kvt_codec.PageCoder, name)

        def wait(coder: Any, *args: Any) -> Any:
            while not self.open:
                time.sleep(0.005)
            return own(coder, *args)

        monkeypatch.setattr(kvt_codec.PageCoder, name, wait)


def test_stores_that_wait_can_be_cancelled(
    disk: CodecTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "encode")
    items = [Store(key(n), info(), memoryview(PAGES[n])) for n in range(6)]
    job = disk.submit_store(items)
    time.sleep(0.05)
    disk.cancel(job)
    gate.open = True
    found = answers(disk, job, 6)
    assert sum(one.reason == "cancelled" for one in found) >= 2
    for number, one in enumerate(found):
        assert (load(disk, number)[0].outcome is Outcome.HIT) == (one.outcome is Outcome.STORED)


def test_loads_do_not_wait_for_stores(disk: CodecTier, monkeypatch: pytest.MonkeyPatch) -> None:
    store(disk, range(3))
    gate = Gate(monkeypatch, "encode")
    items = [Store(key(n), info(), memoryview(PAGES[n % 6])) for n in range(10, 30)]
    job = disk.submit_store(items)
    assert load(disk, 1)[0].outcome is Outcome.HIT
    gate.open = True
    answers(disk, job, len(items))


@pytest.mark.parametrize("warm", [False, True])
def test_remote_tiers_are_read_by_others(warm: bool) -> None:
    engine = FaultyBackend()
    tier = made(RemoteTier(engine))
    store(tier, range(3))
    tier.close()
    other = RemoteTier(engine)  # pages without a basis
    store(other, range(3, 6))
    other.close()
    again = made(RemoteTier(engine), basis=None)
    if not warm:
        again.bases.use({})
    for number, (first, count) in itertools.product(range(6), ((1, 1), (0, 0), (2, 1))):
        answer, got = load(again, number, first, count)
        assert answer.outcome is Outcome.HIT, (number, answer)
        stop = (first + count) * STEP if count else len(PAGES[number])
        assert near(got[: stop - first * STEP], PAGES[number][first * STEP : stop])
        exact = load(again, number, first, count, fidelity=0)[0]
        assert (exact.outcome is Outcome.HIT) == (number >= 3), (number, exact)
    again.close()


@pytest.mark.parametrize("kind", KINDS)
def test_sealed_tiers_hold_coded_pages(tmp_path: Path, kind: str) -> None:
    for basis in (BASIS, None):
        tier = made(DiskTier(tmp_path, 64 << 20, envelope=envelope_of(kind)), basis=basis)
        list(tier.scan())
        store(tier, range(3) if basis else range(3, 6))
        for number in range(3 if basis else 6):
            answer, got = load(tier, number)
            assert answer.outcome is Outcome.HIT and near(got, PAGES[number])
        assert tier.bases.measured()["pages"] == 3
        tier.close()


@pytest.mark.parametrize("kind", ["damaged", "another secret"])
def test_a_basis_that_cannot_be_read_is_stored_anew(tmp_path: Path, kind: str) -> None:
    first, then = (bytes([n]) * 32 for n in (1, 1 + (kind == "another secret")))
    tier = made(DiskTier(tmp_path, 64 << 20, envelope=envelope_of("aead", first)))
    assert tier.store_bases()
    tier.close()
    if kind == "damaged":
        for slab in tmp_path.glob("slab-*"):
            data = bytearray(slab.read_bytes())
            data[4096:] = bytes(one ^ 1 for one in data[4096:])
            slab.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that frames have another secret
        tier = made(DiskTier(tmp_path, 64 << 20, envelope=envelope_of("aead", then)))
    assert tier.store_bases()
    store(tier)
    assert tier.bases.measured()["pages"] == len(PAGES)
    tier.close()
    again = made(DiskTier(tmp_path, 64 << 20, envelope=envelope_of("aead", then)), basis=None)
    list(again.scan())
    assert again.bases.current[0].name == CODER.name
    assert {load(again, number)[0].outcome for number in range(6)} == {Outcome.HIT}
    again.close()


@pytest.mark.parametrize("name", ["encode", "decode"])
def test_closing_answers_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tier = made(DiskTier(tmp_path, 64 << 20))
    store(tier, range(3))
    gate = Gate(monkeypatch, name)
    targets = [bytearray(LAYOUT.page_bytes) for _ in range(6)]
    if name == "encode":
        job = tier.submit_store([Store(key(n), info(), memoryview(PAGES[n])) for n in range(6)])
    else:
        raw = LAYOUT.fingerprint()
        job = tier.submit_load([Load(key(n), memoryview(targets[n]), raw, COLD) for n in range(6)])
    gate.open = True
    tier.close()
    assert {one.item for one in tier.poll()} == set(range(6))
    with pytest.raises(StateError, match="closed"):
        tier.submit_load([])
    assert job


def test_targets_that_are_too_small_are_refused(disk: CodecTier) -> None:
    store(disk)
    target = bytearray(LAYOUT.page_bytes - 1)
    item = Load(key(0), memoryview(target), LAYOUT.fingerprint(), COLD)
    (answer,) = answers(disk, disk.submit_load([item]), 1)
    assert (answer.outcome, answer.reason) == (Outcome.FAILED, "target")


def test_it_is_a_tier(tmp_path: Path) -> None:
    numbers = itertools.count()

    def fresh(size: int) -> Tier:
        return CodecTier(
            DiskTier(tmp_path / str(next(numbers)), size), PageBases(coded_forms(GEOMETRY))
        )

    def reopen(tier: Tier) -> Tier:
        tier.close()
        path = tier.name.removeprefix("disk:")
        return CodecTier(DiskTier(path, tier.capacity_bytes), PageBases(coded_forms(GEOMETRY)))

    with examples(2):
        check_tier(fresh, reopen=reopen, capacity_bytes=256 << 10)


def test_it_is_a_tier_over_memory() -> None:
    with examples(3):
        check_tier(lambda size: made(HostTier(size)), capacity_bytes=1 << 20)


def test_pages_of_the_numbers() -> None:
    assert len({bytes(one) for one in PAGES}) == 6
    assert np.isfinite(CODER.views(memoryview(bytearray(PAGES[0])))[0].float().numpy()).all()


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12), st.integers(0, 40))
def test_prompts_are_kept_without_what_begins_one_before(prompts: list, most: int) -> None:
    """Each is compared with two others, however many there are."""
    with pytest.MonkeyPatch.context() as patch:
        calls, shared = list[int](), kvt_tier._shared
        patch.setattr(kvt_tier, "MOST_SEEN", most)
        patch.setattr(kvt_tier, "_shared", lambda *both: calls.append(1) or shared(*both))
        bases, wanted = PageBases(coded_forms(GEOMETRY)), list[int]()
        known = {()}
        for prompt in prompts:
            bases.keep_prompt(np.array(prompt, np.uint32))
            begins = [tuple(prompt[: n + 1]) for n in range(len(prompt))]
            new = [one for one in begins if one not in known][: most - len(wanted)]
            wanted += [one[-1] for one in new]
            known |= {*new}
        assert bases.kept_tokens().tolist() == wanted and len(calls) <= 2 * len(prompts)
