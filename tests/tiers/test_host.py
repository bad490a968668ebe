from __future__ import annotations

import gc
import select
import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv import Tier
from flowkv.tiers import Load, Outcome, Store
from tests.clock import together, without_threads
from tests.inside import ConfigError, HostTier, ManualClock, StateError, host, tiers_digest

from .counting import Counting
from .frames import LAYOUT, answers, body_of, get, hits, info_of, key_of, outcomes, put, stored


def test_is_a_tier() -> None:
    assert isinstance(HostTier(1 << 20), Tier)


def test_bodies_are_copied() -> None:
    tier, body = HostTier(1 << 20), bytearray(body_of("a"))
    answers(tier, tier.submit_store([Store(key_of("a"), info_of(8192), memoryview(body))]), 1)
    body[:] = bytes(len(body))
    assert hits(tier, ["a"]) == 1


def test_rotten_memory_is_a_miss() -> None:
    tier = HostTier(1 << 20)
    stored(tier, ["a", "b"])
    tier._frames[key_of("a")].body[5000] ^= 8
    target = bytearray(8192)
    job = tier.submit_load([Load(key_of("a"), memoryview(target), LAYOUT, 0)])
    assert outcomes(answers(tier, job, 1)) == [("miss", "digest")]
    assert outcomes(get(tier, ["a", "b"])) == [("miss", ""), ("hit", "")]
    assert tier.corrupt == 1


def test_erased_memory_is_blank() -> None:
    tier = HostTier(1 << 20)
    stored(tier, ["a", "b"])
    body = tier._frames[key_of("a")].body
    assert tier.erase([key_of("a"), key_of("nobody")]) == 1
    assert not body.any()
    assert outcomes(get(tier, ["a", "b"])) == [("miss", ""), ("hit", "")]
    assert tier.used_bytes() == sum(entry.n_bytes for entry in tier.scan())


def test_what_is_erased_while_it_is_read_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier(1 << 20)
    stored(tier, ["a"])

    def slow(rows: object) -> list[int]:
        tier.erase([key_of("a")])  # half of it was overwritten when it was copied
        return [tiers_digest.REASONS.index("digest")]

    monkeypatch.setattr(tiers_digest, "check_known", slow)
    assert outcomes(get(tier, ["a"])) == [("miss", "")]
    assert tier.corrupt == 0


def test_full() -> None:
    tier = HostTier(4 * HostTier(1).frame_bytes(8192))
    done = put(tier, range(5))
    assert outcomes(done) == [("stored", "")] * 4 + [("failed", "full")]
    assert tier.used_bytes() <= tier.capacity_bytes
    assert tier.delete([key_of(0), key_of("nobody")]) == 1
    assert outcomes(put(tier, [4])) == [("stored", "")]


def test_a_late_item_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "THREADS", 1)
    monkeypatch.setattr(host, "TOGETHER_BYTES", 1)  # else four small ones are one call

    class Slow(ManualClock):
        def now_ns(self) -> int:
            self.advance(s=1)
            return super().now_ns()

    tier = HostTier(1 << 20, clock=Slow())
    items = [Store(key_of(n), info_of(8192), memoryview(body_of(n))) for n in range(4)]
    done = answers(tier, tier.submit_store(items, deadline_s=2.5), 4)
    assert outcomes(done) == [("stored", "")] * 2 + [("failed", "deadline")] * 2


def test_targets_that_do_not_fit() -> None:
    tier = HostTier(1 << 20)
    stored(tier, ["a"])
    for target in (memoryview(bytearray(8191)), memoryview(bytes(8192))):
        job = tier.submit_load([Load(key_of("a"), target, LAYOUT, 0)])
        assert outcomes(answers(tier, job, 1)) == [("failed", "target")]


def test_unsound_stores_fail() -> None:
    tier = HostTier(1 << 20)
    assert outcomes(put(tier, ["a"], stripe_bytes=100)) == [("failed", "invalid")]
    assert tier.used_bytes() == 0


def test_the_descriptor_follows_the_answers() -> None:
    tier = HostTier(1 << 20)
    tier.submit_load([Load(key_of("a"), memoryview(bytearray(1)), LAYOUT, 0)])
    fd = tier.fileno()
    assert select.select([fd], [], [], 0)[0]
    tier.poll()
    assert not select.select([fd], [], [], 0)[0]
    tier.submit_load([Load(key_of("a"), memoryview(bytearray(1)), LAYOUT, 0)])
    assert select.select([fd], [], [], 0)[0]


def test_threads() -> None:
    tier, done = HostTier(64 * 10_000), []

    def work(seed: int) -> None:
        for n in range(100):
            name = (seed * 7 + n) % 20
            item = Store(key_of(name), info_of(8192), memoryview(body_of(name)))
            tier.submit_store([item])
            target = memoryview(bytearray(8192))
            tier.submit_load([Load(key_of(name), target, LAYOUT, 0)])
            tier.delete([key_of(name + 1)])
            done.extend(tier.poll())

    together(*(partial(work, seed) for seed in range(4)))
    done += tier.poll()
    assert len(done) == 800
    assert {answer.outcome for answer in done} <= {Outcome.STORED, Outcome.HIT, Outcome.MISS}
    assert tier.used_bytes() == sum(entry.n_bytes for entry in tier.scan())


def test_closed() -> None:
    tier = HostTier(1 << 20)
    stored(tier, ["a"])
    tier.close()
    assert tier.contains([key_of("a")]) == [False]
    with pytest.raises(StateError, match="closed"):
        put(tier, ["a"])


def test_needs_room() -> None:
    with pytest.raises(ConfigError):
        HostTier(0)


# ---- loads that a thread carries out


def load_all(tier: HostTier, names: list[str], size: int, damaged: str = "") -> list[Load]:
    for name in names:
        body = body_of(name, size)
        info = info_of(size, stripe_bytes=4096)
        answers(tier, tier.submit_store([Store(key_of(name), info, memoryview(body))]), 1)
    if damaged:
        tier._frames[key_of(damaged)].body[-1] ^= 1
    return [Load(key_of(name), memoryview(bytearray(size)), LAYOUT, 0) for name in names]


def test_many_bytes_come_from_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "APART_BYTES", 1 << 14)
    tier, names = HostTier(1 << 20), ["a", "b", "c"]
    loads = load_all(tier, names, 8192, damaged="b")
    threads, begin, inner = set[str](), threading.Event(), tier._load_all

    def load(items: list[Load]) -> object:
        threads.add(threading.current_thread().name)
        assert begin.wait(60)
        return inner(items)

    monkeypatch.setattr(tier, "_load_all", load)
    job = tier.submit_load(loads)
    assert tier.poll() == [], "whoever asked goes on meanwhile"
    begin.set()
    found = answers(tier, job, 3)
    assert outcomes(found) == [("hit", ""), ("miss", "digest"), ("hit", "")]
    assert bytes(loads[0].target) == body_of("a", 8192) and found[0].n_bytes == 8192
    assert threads == {"flowkv host_0"}
    small = tier.submit_load(loads[:1])
    assert [one.job for one in tier.poll()] == [small], "a small job is answered at once"


def many(names: str, size: int = 1 << 17, step: int = 4096) -> list[Store]:
    """Stores of frames that lie in slots."""
    bodies = [body_of(name, size) for name in names]
    info = info_of(size, stripe_bytes=step)
    return [Store(key_of(n), info, memoryview(b)) for n, b in zip(names, bodies, strict=True)]


@pytest.mark.parametrize("threads", [1, 3])
def test_many_bytes_are_stored_by_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsound frame, a full tier and a frame that is there are answered as ever."""
    monkeypatch.setattr(host, "THREADS", threads)
    monkeypatch.setattr(host, "TOGETHER_BYTES", 1 << 18)
    tier = HostTier(6 * HostTier(1).frame_bytes(1 << 17))
    odd = Store(key_of("odd"), info_of(1 << 17, stripe_bytes=100), memoryview(bytes(1 << 17)))
    items = [*many("abc"), odd, *many("defgh")]
    said = outcomes(answers(tier, tier.submit_store(items), len(items)))
    assert said.count(("failed", "full")) == 2 and said.count(("failed", "invalid")) == 1
    assert said.count(("stored", "")) == 6
    there = [name for name in "abcdefgh" if tier.contains([key_of(name)])[0]]
    assert len(there) == 6 and hits(tier, there, 1 << 17) == 6
    assert outcomes(answers(tier, tier.submit_store(many(there[:4])), 4)) == [("stored", "")] * 4
    assert tier.used_bytes() == sum(entry.n_bytes for entry in tier.scan())
    tier.delete([key_of(name) for name in there])
    twice = answers(tier, tier.submit_store(many("aabb")), 4)
    assert outcomes(twice) == [("stored", "")] * 4 and hits(tier, "ab", 1 << 17) == 2
    assert tier.used_bytes() == sum(entry.n_bytes for entry in tier.scan())


@pytest.mark.parametrize("error", [MemoryError, ValueError])
@pytest.mark.parametrize(
    "where", ["count_stripes", "seal_frames", "_memory", "addresses_of", "KeptFrame"]
)
def test_a_store_that_raises_occupies_nothing(
    where: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "TOGETHER_BYTES", 3 << 17)
    tier = HostTier(1 << 20)
    stored(tier, ["a"], 1 << 17)
    before = tier.used_bytes(), tier.slots.used_bytes, tier.slots.kept_bytes

    place = {"seal_frames": tiers_digest, "_memory": tier}.get(where, host)
    real, calls = getattr(place, where), list[int]()

    def failing(*args: object) -> object:
        calls.append(1)
        if where in ("count_stripes", "KeptFrame") and len(calls) < 3:
            return real(*args)
        raise error("odd")

    with monkeypatch.context() as patch:
        patch.setattr(place, where, failing)
        items = [store for n, name in enumerate("bcd") for store in many(name, step=4096 << n)]
        said = outcomes(answers(tier, tier.submit_store(items), 3))
    kept = 2 * (where == "KeptFrame" and error is MemoryError)
    assert [outcome for outcome, _ in said] == ["stored"] * kept + ["failed"] * (3 - kept)
    tier.delete([key_of("b"), key_of("c")])
    gc.collect()
    assert (tier.used_bytes(), tier.slots.used_bytes, tier.slots.kept_bytes) == before
    assert (tier._used_bytes, tier._claimed_bytes) == (tier.used_bytes(), 0)
    assert outcomes(answers(tier, tier.submit_store(many("bcd")), 3)) == [("stored", "")] * 3
    assert hits(tier, "abcd", 1 << 17) == 4


def test_memory_of_frames_that_went_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not while a copy that is late reads it."""
    tier = HostTier(3 * HostTier(1).frame_bytes(1 << 17))
    for turn in range(20):
        names, late = [f"{turn}{n}" for n in range(3)], None
        for name in names:
            item = Store(key_of(name), info_of(1 << 17, stripe_bytes=4096),
                         memoryview(body_of(name, 1 << 17)))  # fmt: skip
            assert outcomes(answers(tier, tier.submit_store([item]), 1)) == [("stored", "")]
        assert hits(tier, names, 1 << 17) == 3
        assert all(tier._frames[key_of(name)].kept_bytes for name in names)
        late = tier._frames[key_of(names[0])]
        assert tier.delete([*map(key_of, names)]) == 3
        assert tier.used_bytes() == tier.slots.kept_bytes == 0
        assert tier.slots.used_bytes == 1 << 17  # of the frame that is held
    stored(tier, ["new"], 1 << 17)
    monkeypatch.setitem(tier._frames, key_of(names[0]), late)
    assert hits(tier, [names[0], "new"], 1 << 17) == 2


def test_stores_loads_and_erasures_of_threads_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "APART_BYTES", 1)
    monkeypatch.setattr(host, "TOGETHER_BYTES", 1)
    monkeypatch.setattr(host, "THREADS", 2)
    tier, names = HostTier(5 * HostTier(1).frame_bytes(1 << 17)), "abcdefg"
    for turn in range(30):
        store = tier.submit_store(many(names))
        targets = [bytearray(1 << 17) for _ in names]
        loads = zip(names, targets, strict=True)
        load = tier.submit_load(
            [Load(key_of(name), memoryview(target), LAYOUT, 0) for name, target in loads]
        )
        tier.erase([key_of(names[turn % 7]), key_of(names[(turn + 3) % 7])])
        done: dict[int, list[object]] = {store: [], load: []}
        while len(done[store]) < 7 or len(done[load]) < 7:
            for answer in tier.poll(1.0):
                done[answer.job].append(answer)
        for answer in done[load]:
            if answer.outcome is Outcome.HIT:
                assert targets[answer.item] == body_of(names[answer.item], 1 << 17)
            else:
                assert answer.outcome is Outcome.MISS and not answer.reason
        assert tier.used_bytes() <= tier.capacity_bytes
    tier.erase([*map(key_of, names)])
    gc.collect()
    assert tier.used_bytes() == tier.slots.kept_bytes == tier.slots.used_bytes == 0


@pytest.mark.parametrize("how", ["cancel", "close", "late", "raise"])
def test_what_a_thread_does_not_carry_out_is_answered(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "APART_BYTES", 1)
    monkeypatch.setattr(host, "TOGETHER_BYTES", 1)
    monkeypatch.setattr(host, "THREADS", 1)
    clock = ManualClock()
    tier = HostTier(1 << 20, clock=clock)
    loads, inner = load_all(tier, ["a", "b"], 8192), tier._load_all
    begun, go_on = threading.Event(), threading.Event()

    def load(items: list[Load]) -> object:
        begun.set()
        assert go_on.wait(60)
        if how == "raise":
            raise ValueError("odd")
        return inner(items)

    monkeypatch.setattr(tier, "_load_all", load)
    job = tier.submit_load(loads, deadline_s=1.0)
    assert begun.wait(60)
    closing = threading.Thread(target=tier.close)
    if how == "cancel":
        tier.cancel(job)
    elif how == "close":
        closing.start()
        while not tier._closed:
            pass
    elif how == "late":
        clock.advance(s=2.0)
    go_on.set()
    reasons = {"cancel": "cancelled", "close": "closed", "late": "deadline"}
    second = ("failed", reasons.get(how, "ValueError: odd"))
    first = ("hit", "") if how != "raise" else second
    assert outcomes(answers(tier, job, 2)) == [first, second]
    if how == "close":
        closing.join()


# ---- beside a device that reaches the memory


def reached(frames: int, size: int = 1 << 17) -> HostTier:
    tier = HostTier(frames * HostTier(1).frame_bytes(size))
    tier.slots.register(lambda address, n_bytes: "", lambda address: None, 1 << 20)
    return tier


def filled(tier: HostTier, names: str, size: int = 1 << 17) -> dict[str, np.ndarray]:
    """Bodies in slots, as a device leaves them there."""
    rows = {name: tier.slots.acquire(size, pinned=True) for name in names}
    for name, row in rows.items():
        row[:] = np.frombuffer(body_of(name, size), np.uint8)
    return rows


@pytest.fixture(params=["alone", "together"])
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames one at a time in the caller's thread, or many in others."""
    if request.param == "together":
        for name in ("APART_BYTES", "TOGETHER_BYTES"):
            monkeypatch.setattr(host, name, 1)


def loads_in_place(tier: HostTier, names: str, first: int = 0, stripes: int = 0) -> list[Load]:
    lent = {name: tier.lend(key_of(name), first, stripes) for name in names}
    return [
        Load(key_of(name), row.data.toreadonly(), LAYOUT, 0, first, stripes)
        for name, row in lent.items()
        if row is not None
    ]


@pytest.mark.usefixtures("apart")
def test_bodies_in_slots_are_kept_and_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, size = reached(4), 1 << 17
    count, rows = Counting(monkeypatch), filled(tier, "abc")
    info = info_of(size, stripe_bytes=4096)
    items = [Store(key_of(name), info, row.data) for name, row in rows.items()]
    assert outcomes(answers(tier, tier.submit_store(items), 3)) == [("stored", "")] * 3
    assert {n: tier._frames[key_of(n)].body_at for n in rows} == {
        name: row.ctypes.data for name, row in rows.items()
    }
    assert tier.slots.used_bytes == tier.slots.kept_bytes == 3 * size
    del rows, items
    loads = loads_in_place(tier, "abc") + loads_in_place(tier, "b", 3, 2)
    found = answers(tier, tier.submit_load(loads), 4)
    assert outcomes(found) == [("hit", "")] * 4 and not count.n_bytes
    assert bytes(loads[2].target) == body_of("c", size)
    assert bytes(loads[3].target) == body_of("b", size)[3 * 4096 : 5 * 4096]
    tier._frames[key_of("b")].body[-1] ^= 1
    last, others = loads_in_place(tier, "b"), loads_in_place(tier, "ac")
    found = answers(tier, tier.submit_load([*last, *others]), 3)
    assert outcomes(found) == [("miss", "digest"), ("hit", ""), ("hit", "")]
    assert hits(tier, "ac", size) == 2 and count.n_bytes == 2 * size
    assert tier.lend(key_of("b")) is None and tier.lend(key_of("a"), 30, 3) is None


def test_lent_memory_stays_as_it_is() -> None:
    """Whether its frame is deleted, erased, or stored anew; erased bytes go with the last array."""
    tier, size = reached(4), 1 << 17
    info = info_of(size, stripe_bytes=4096)
    for name, row in filled(tier, "abc").items():
        answers(tier, tier.submit_store([Store(key_of(name), info, row.data)]), 1)
    del row
    lent = {name: tier.lend(key_of(name)) for name in "abc"}
    places = {name: memory.ctypes.data for name, memory in lent.items()}
    whole, first = tier.slots.locate(min(places.values()))
    assert tier.delete([key_of("a")]) == tier.erase([key_of("b")]) == 1
    stored(tier, ["a", "b", "d"], size)
    assert hits(tier, ["a", "b", "c", "d"], size) == 4
    for name in "abc":
        assert bytes(lent[name]) == body_of(name, size)
    assert tier.slots.used_bytes - tier.slots.kept_bytes == 2 * size
    del lent["b"]
    at = places["b"] - min(places.values()) + first
    assert not whole[at : at + size].any(), "erased when nothing reads it any more"
    lent.clear()
    assert tier.slots.used_bytes == tier.slots.kept_bytes == 4 * size
    assert tier.erase([key_of("c")]) == 1
    at = places["c"] - min(places.values()) + first
    assert not whole[at : at + size].any(), "erased at once"


@pytest.mark.usefixtures("apart")
def test_lent_memory_is_never_written_to() -> None:
    """Not by a load whose frame was stored anew meanwhile, elsewhere and with other bytes."""
    tier, size = reached(4), 1 << 17
    info = info_of(size, stripe_bytes=4096)
    (row,) = filled(tier, "a").values()
    answers(tier, tier.submit_store([Store(key_of("a"), info, row.data)]), 1)
    loads = loads_in_place(tier, "a")
    tier.delete([key_of("a")])
    other = memoryview(body_of("b", size))
    answers(tier, tier.submit_store([Store(key_of("a"), info, other)]), 1)
    assert outcomes(answers(tier, tier.submit_load(loads), 1)) == [("failed", "target")]
    assert bytes(row) == body_of("a", size)


def test_a_frame_goes_elsewhere_from_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, size = HostTier(1 << 20), 1 << 17
    stored(tier, "abc", size)
    stored(tier, ["small"], 4096)  # in memory of its own
    frame, item = tier._frames[key_of("a")], tier.as_store(key_of("a"))
    assert item is not None and item.body.readonly and item.digests == frame.header.digests
    assert np.frombuffer(item.body, np.uint8).ctypes.data == frame.body_at
    assert tier.as_store(key_of("small")) is None and tier.as_store(key_of("none")) is None
    del frame
    assert tier.delete([key_of("a")]) == 1
    stored(tier, "de", size)
    assert bytes(item.body) == body_of("a", size), "nothing else uses it before the store is over"
    monkeypatch.setattr(host, "TRANSIT_BYTES", size - 1)
    assert tier.as_store(key_of("b")) is None, "too much is on its way"
    del item
    assert tier.as_store(key_of("b")) is not None


def test_memory_that_no_device_reaches_is_not_lent() -> None:
    tier = HostTier(1 << 20)
    stored(tier, ["a"], 1 << 17)
    assert tier.lend(key_of("a")) is None
    tier.slots.register(lambda address, n_bytes: "no rights", lambda address: None)
    assert tier.lend(key_of("a")) is None and tier.slots.why == "no rights"
    assert tier.slots.acquire(4096, pinned=True) is None and hits(tier, ["a"], 1 << 17) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from("abcx"), st.integers(0, 3), st.integers(0, 3), st.integers(0, 6))
    )
)
def test_many_are_answered_as_each(
    wishes: list[tuple[str, int, int, int]],
) -> None:
    def run(together: bool) -> list[object]:
        tier, found = HostTier(1 << 20), []
        load_all(tier, ["a", "b", "c"], 8192, damaged="c")
        items = []
        for name, first, stripes, odd in wishes:
            target = memoryview(bytearray(8192 if odd != 1 else 4000))
            target = target.toreadonly() if odd == 2 else target[::2] if odd == 3 else target
            layout = bytes(16) if odd == 4 else LAYOUT
            items.append(Load(key_of(name), target, layout, 0, first, stripes))
        each = [items] if together else [[item] for item in items]
        done = [answer for some in each for answer in tier._load_all(some)]
        for item, answer in zip(items, done, strict=True):
            there = bytes(item.target[: answer.n_bytes]) if answer.outcome is Outcome.HIT else b""
            found.append((answer, there))
            if there:
                start = 4096 * item.first
                assert there == body_of(names[item.key])[start : start + len(there)]
        tier.close()
        return found

    names = {key_of(name): name for name in "abcx"}
    both = zip(wishes, run(True), run(False), strict=True)
    assert all(one == other for (name, *_), one, other in both if name != "c")


def test_a_job_is_answered_once_if_no_thread_could_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier(1 << 20, clock=ManualClock())
    first, then = (load_all(tier, [name], 8192) for name in "ab")

    monkeypatch.setattr(host, "APART_BYTES", 1)
    with without_threads():
        job = tier.submit_load(first)
    later = tier.submit_load(then)
    found = [answer.job for _ in range(4) for answer in tier.poll(0.5)]
    assert sorted(found) == sorted([job, later])


def test_its_own_thread_can_close_it() -> None:
    tier = HostTier(1 << 20)
    assert tier._apart.submit(tier.close).exception(timeout=60) is None
    assert tier._closed and not tier.contains([bytes(32)])[0]


# ---- loads into the memory of a frame, which the caller verifies


def test_a_frame_is_left_unread_where_its_own_memory_is_the_target() -> None:
    tier, size = HostTier(1 << 20), 1 << 17
    tier.slots.register(lambda *_: "", lambda _: None)
    assert outcomes(answers(tier, tier.submit_store(many("ab")), 2)) == [("stored", "")] * 2
    known = tier._frames[key_of("a")].header.digests
    tier._frames[key_of("a")].body[5] ^= 1  # nobody reads it
    for first, count in ((0, 0), (3, 5), (31, 1)):
        memory = tier.lend(key_of("a"), first, count).data.toreadonly()
        wish = Load(key_of("a"), memory, LAYOUT, 0, first, count, unread=True)
        (answer,) = answers(tier, tier.submit_load([wish]), 1)
        assert answer.outcome is Outcome.HIT and answer.n_bytes == memory.nbytes
        assert answer.digests == known[16 * first : 16 * (first + count or 32)]
    assert tier.corrupt == 0
    other = bytearray(size)
    wishes = [
        Load(key_of("a"), memoryview(other), LAYOUT, 0, unread=True),
        Load(key_of("b"), memoryview(other), LAYOUT, 0, unread=True),
        Load(key_of("c"), memoryview(other), LAYOUT, 0, unread=True),
        Load(key_of("b"), memoryview(other), bytes(16), 0, unread=True),
        Load(key_of("b"), memoryview(other), LAYOUT, 0, 30, 3, unread=True),
    ]
    found = answers(tier, tier.submit_load(wishes), 5)
    reasons = [("miss", "digest"), ("hit", ""), ("miss", ""), ("miss", "layout")]
    assert outcomes(found) == [*reasons, ("miss", "stripes")]
    assert bytes(other) == body_of("b", size) and not any(one.digests for one in found)
    assert tier.corrupt == 1
