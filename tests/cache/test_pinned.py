"""Copies beside the computation, on a device that does things as late and as oddly as it may."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv import KV, kernels
from flowkv.tiers import Load, Store, TierAnswer
from flowkv.tiers.disk import DiskTier
from tests.cache.audit import audit
from tests.cache.fakes import Halves, Silent, lasting
from tests.cache.test_codecs import wide
from tests.cache.toy import check_content, geometry, make_kv, prefill, published
from tests.inside import (
    GRANULE_MASK,
    Copies,
    CudaStreams,
    HostTier,
    PagePool,
    SlotPool,
    digests,
    dispatch,
    host,
    open_copies,
)
from tests.queued import like_a_gpu
from tests.tiers.counting import Counting, Touching

GRANULE = 4096
PAGES = 8


class FakeMark:
    def __init__(self, device: FakeStreams) -> None:
        self.device, self.passed = device, False

    def done(self) -> bool:
        self.device.advance(0 if self.device.behind else self.device.random.randrange(3))
        return self.passed

    def wait(self, timeout_s: float = 0.0) -> bool:
        self.device.waits += not self.passed
        while not self.passed:
            self.device.advance(1)
        return True


def at(memory: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What lies in this memory now: a device holds no reference to it."""
    address, shape = memory.data_ptr(), memory.shape

    def found() -> torch.Tensor:
        there = (ctypes.c_ubyte * shape.numel()).from_address(address)
        return torch.frombuffer(there, dtype=torch.uint8).view(shape)

    return found


class FakeStreams:
    """Streams on the CPU: each in its own order, and any order of them that is allowed.

    Args:
        seed: Of the order.
        faults: Names of methods that are left out, to see that a test notices.

    Attributes:
        behind: It goes on where something waits for it only.
        waits: How often something did.
        current: The caller's stream, "compute" or "other"; "aside" while it encodes.
    """

    name = "fake"

    def __init__(self, seed: int, *faults: str) -> None:
        self.random, self.faults = random.Random(seed), faults
        self.behind, self.waits, self.current = False, 0, "compute"
        self.queues: dict[str, list[tuple[FakeMark | None, Callable[[], object]]]] = {
            "compute": [],
            "other": [],
            "up": [],
            "down": [],
            "aside": [],
        }
        self.calls: list[str] = []
        self.users: list[str] = []

    # ---- what the device does

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            able = [q for q in self.queues.values() if q and (q[0][0] is None or q[0][0].passed)]
            if not able:
                return
            self.random.choice(able).pop(0)[1]()

    def finish(self) -> None:
        while any(self.queues.values()):
            self.advance(1)

    def compute(self, call: Callable[[], object]) -> None:
        self.queues[self.current].append((None, call))

    def _mark(self, queue: str) -> FakeMark:
        mark = FakeMark(self)
        self.queues[queue].append((None, lambda: setattr(mark, "passed", True)))
        return mark

    # ---- Streams

    def use(self, *, behind: bool = False) -> None:
        new = self.current not in (*self.users, "aside")
        for other in self.users if new or (behind and "behind" not in self.faults) else []:
            self._wait(self.current, self._mark(other))
        if new:
            self.users.append(self.current)

    def used(self) -> list[FakeMark]:
        several = len(self.users) > 1 and "used" not in self.faults
        return [self._mark(user) for user in self.users] if several else []

    def follow(self) -> None:
        self.use()
        for user in [] if "follow" in self.faults else self.users:
            if user == self.current or "others" not in self.faults:
                self._wait("up", self._mark(user))
        if "order" not in self.faults:
            self._wait("down", self._mark("up"))

    def lead(self) -> None:
        if "lead" not in self.faults:
            self._wait(self.current, self._mark("up"))

    @contextmanager
    def encoding(self, pages: torch.Tensor) -> Iterator[None]:
        self.use()
        for user in [] if "encoding" in self.faults else self.users:
            self._wait("aside", self._mark(user))
        before, self.current = self.current, "aside"
        try:
            yield
        finally:
            self.current = before

    def after(self, mark: FakeMark) -> None:
        self.calls.append("after")
        if "after" not in self.faults:
            self._wait(self.current, mark)

    def _wait(self, queue: str, mark: FakeMark) -> None:
        self.queues[queue].append((mark, lambda: None))

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        assert target.shape == source.shape
        self.calls.append(f"copy {len(target)}")
        places = target.data_ptr(), source.data_ptr(), len(target)
        self._direction(to_device).append((None, lambda: ctypes.memmove(*places)))

    def _direction(self, to_device: bool) -> list[Any]:
        return self.queues["up" if to_device else "down"]

    def move(
        self,
        pages: torch.Tensor,
        granules: Sequence[int],
        memory: torch.Tensor,
        lines: Sequence[int],
        n_bytes: int,
        *,
        to_device: bool,
    ) -> None:
        kernel = dispatch.scatter_pages if to_device else dispatch.gather_pages
        self.calls.append(f"{'scatter' if to_device else 'gather'} {len(granules)}")
        where, those = (torch.tensor(x, dtype=torch.int32) for x in (granules, lines))
        there = at(memory)

        def carry_out() -> None:
            kernel(pages, where, n_bytes // GRANULE, there(), lines=those)

        self._direction(to_device).append((None, carry_out))

    def digest(
        self,
        pages: torch.Tensor,
        granules: Sequence[int],
        stripes: int,
        n_bytes: int,
        memory: torch.Tensor,
        *,
        to_device: bool,
    ) -> None:
        where, there = torch.tensor(granules, dtype=torch.int32), at(memory)

        def carry_out() -> None:
            found = dispatch.digest_pages(pages, where, n_bytes // GRANULE, stripes)
            there().copy_(found.view(-1).view(torch.uint8))

        self._direction(to_device).append((None, carry_out))

    def mark(self, *, to_device: bool) -> FakeMark:
        mark = self._mark("up" if to_device else "down")
        if "mark" in self.faults:
            mark.passed = True
        return mark

    def pin(self, address: int, n_bytes: int) -> str:
        self.calls.append("pin")
        return "no rights" if "pin" in self.faults else ""

    def unpin(self, address: int) -> None:
        self.calls.append("unpin")


class World:
    """Pages of one device, and what they must hold if everything happened in the order asked."""

    def __init__(self, seed: int, granules: int, rows: int, *faults: str) -> None:
        self.device = FakeStreams(seed, *faults)
        self.granules, self.n_bytes = granules, granules * GRANULE
        self.pages = torch.zeros(PAGES * self.n_bytes, dtype=torch.uint8)
        slots = SlotPool(rows * self.n_bytes)
        slots.register(self.device.pin, self.device.unpin)
        self.device.calls.clear()
        self.copies = Copies(self.device, self.pages, slots)
        self.copies.kernel_bytes, self.copies.least_pieces = 8191, 3
        self.model = [0] * PAGES
        self.writer = ["compute"] * PAGES
        self.wrong: list[str] = []
        self.saved: list[Any] = []  # copies that a tier has not read yet
        self.kept: list[Any] = []
        self.value = 0

    def page(self, number: int) -> torch.Tensor:
        return self.pages[number * self.n_bytes :][: self.n_bytes]

    def fresh(self) -> int:
        self.value = self.value % 250 + 1
        return self.value

    def check(self, what: str, found: torch.Tensor, wanted: int) -> None:
        if not bool((found == wanted).all()):
            self.wrong.append(f"{what}: {found.unique().tolist()}, not {wanted}")

    def reuse(self, *numbers: int) -> None:
        """Pages are free, and given to somebody anew."""
        for number in numbers:
            self.copies.free(number * self.granules)
        self.copies.reuse()

    def compute_write(self, number: int) -> None:
        self.reuse(number)
        self.copies.join()
        value = self.fresh()
        self.model[number], self.writer[number] = value, self.device.current
        self.device.compute(lambda: self.page(number).fill_(value))

    def compute_read(self, number: int) -> None:
        self.copies.join()
        wanted = self.model[number]
        if self.writer[number] != self.device.current:  # the host knows that it was written
            self.device._wait(self.device.current, self.device._mark(self.writer[number]))
        self.device.compute(lambda: self.check("read", self.page(number), wanted))

    def turn(self) -> None:
        """Let another thread, with a stream of its own, use the pages from now on."""
        self.device.current = "other" if self.device.current == "compute" else "compute"

    def load(self, numbers: list[int]) -> None:
        rows = self.copies.stage(len(numbers), self.n_bytes)
        self.reuse(*numbers)
        for number, row in zip(numbers, rows, strict=True):
            value = self.fresh()
            row.fill_(value)  # a tier: at once
            if value % 5:
                self.copies.upload([(number * self.granules, row)])
                self.model[number] = value  # else a miss
        self.copies.launch()

    def load_unread(self, numbers: list[int]) -> None:
        """As `load`, of memory that the device verifies; every fifth page is another one's."""
        rows = self.copies.stage(len(numbers), self.n_bytes)
        self.reuse(*numbers)
        known, values = [], [self.fresh() for _ in numbers]
        for value, row in zip(values, rows, strict=True):
            row.fill_(value)
            known.append(digests(row.numpy() + (value % 5 == 0), GRANULE))
        sound = self.copies.verify(rows, [n * self.granules for n in numbers], known)()
        for number, value, fine in zip(numbers, values, sound, strict=True):
            self.model[number] = value
            self.check("verified", torch.tensor(fine), value % 5 > 0)
            if fine:  # it is there now
                self.check("there", self.page(number), value)

    def save(self, numbers: list[int]) -> None:
        rows, mark = self.copies.download([n * self.granules for n in numbers], self.n_bytes)
        self.saved.append(
            (mark, [(row, self.model[n]) for n, row in zip(numbers, rows, strict=True)])
        )
        if self.device.faults:  # a copy that is late must not write to memory of others
            self.kept.append(rows)
        if len(self.saved) > 2:
            self.check_saved()

    def check_saved(self) -> None:
        mark, rows = self.saved.pop(0)
        mark.wait()
        for row, wanted in rows:
            self.check("saved", row, wanted)

    def finish(self) -> None:
        while self.saved:
            self.check_saved()
        self.copies.close()
        self.device.finish()
        for number, wanted in enumerate(self.model):
            self.check("at the end", self.page(number), wanted)
        self.copies.slots.close()
        assert self.device.calls[-1] == "unpin"


some = st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=5, unique=True)
steps = st.lists(
    st.tuples(st.sampled_from(["compute_write", "compute_read"]), st.integers(0, PAGES - 1))
    | st.tuples(st.sampled_from(["load", "load_unread", "save"]), some)
    | st.tuples(st.just("turn")),
    min_size=10,
    max_size=40,
)


@settings(max_examples=30)
@given(st.integers(0, 1 << 30), st.sampled_from([1, 2]), st.sampled_from([3, 6, 20]), steps)
def test_every_order_of_the_device_gives_the_same_bytes(
    seed: int, granules: int, rows: int, steps: list
) -> None:
    """Little staging memory, so that slots are used again as soon as that is allowed."""
    world = World(seed, granules, rows)
    for name, *argument in steps:
        getattr(world, name)(*argument)
    world.finish()
    assert not world.wrong


def found_wrong(seed: int, *faults: str) -> list[str]:
    """Let two streams compute in turn, with one order left out, and return what was wrong."""
    world, picks = World(seed, 1, 3, *faults), random.Random(seed)
    for _ in range(30):
        numbers = picks.sample(range(PAGES), 2)
        name = picks.choice(["compute_write", "compute_read", "load", "save", "turn"])
        given = {"load": [numbers], "save": [numbers], "turn": []}.get(name, numbers[:1])
        getattr(world, name)(*given)
    world.device.finish()
    return world.wrong


@pytest.mark.parametrize("fault", ["follow", "others", "lead", "mark", "after", "order", "used"])
def test_a_missing_dependency_is_noticed(fault: str) -> None:
    """The property above can fail: leave out one of its seven orders, and bytes are wrong."""
    assert any(found_wrong(seed, fault) for seed in range(200))


def test_two_streams_that_compute_in_turn_see_each_others_pages_whole() -> None:
    for seed in range(100):
        assert not found_wrong(seed)


def pool_of(world: World) -> PagePool:
    pool = PagePool("cpu", len(world.pages), [world.granules])
    pool.arena, pool.copies = world.pages, world.copies
    return pool


def copied_wrong(seed: int, *faults: str) -> bool:
    """Copy a page that another stream writes, and goes on to write; is the copy another one?"""
    world = World(seed, 1, 8, *faults)
    pool, values = pool_of(world), list[int]()
    for number in 0, 1:  # both streams use pages
        world.compute_write(number)
        world.turn()
    world.compute_write(2)
    wanted = world.value
    world.turn()
    with pytest.MonkeyPatch.context() as patch:
        move = kernels.copy_pages
        patch.setattr(
            kernels, "copy_pages", lambda *where: world.device.compute(lambda: move(*where))
        )
        pool.copy([2], [3], 1)
    world.device.compute(lambda: values.append(int(world.page(3)[0])))
    world.turn()
    world.copies.join()
    world.device.compute(lambda: world.page(2).fill_(255))
    world.device.finish()
    return values != [wanted]


def test_a_page_is_copied_between_the_writes_of_another_stream() -> None:
    """A prompt shares the open page of another thread's sequence; or pages are compacted."""
    assert not any(map(copied_wrong, range(100)))
    for fault in "behind", "used":
        assert any(copied_wrong(seed, fault) for seed in range(100))


def test_a_stream_that_torch_gave_to_the_encoder_as_well_is_waited_for() -> None:
    """After 32 streams, torch returns the first one again."""
    with like_a_gpu():
        few, numbers = [torch.cuda.Stream() for _ in range(3)], itertools.count(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "Stream", lambda _: few[next(numbers) % 3])
            streams, done = CudaStreams(torch.device("cpu")), list[str]()

        def work(name: str) -> Any:
            done.append(name)
            yield

        with torch.cuda.stream(few[0]):
            few[0].queue(work("page"))
            streams.follow()
        with streams.encoding(torch.empty(0)):
            streams.use()
        for direction in streams._up, streams._down:
            direction.queue(work("copy"))
            direction.synchronize()
        assert done == ["page", "copy", "copy"]


def test_a_page_is_saved_as_its_slow_producer_left_it() -> None:
    """Fault F6: the copy is asked for while the kernel that fills the page has not even begun."""
    world = World(0, 4, 8)
    world.device.random.choice = lambda queues: queues[-1]  # copies first, whenever they may
    for value in range(10):
        world.compute_write(3)
        world.save([3])
        world.compute_read(3)
        assert world.value == value + 1
    world.finish()
    assert not world.wrong


def test_a_slot_is_not_used_before_its_copy_is_over() -> None:
    world = World(0, 1, 2)
    rows = world.copies.stage(2, GRANULE)
    for number, row in enumerate(rows):
        row.fill_(number + 1)
        world.copies.upload([(number, row)])
    assert world.copies.staged_bytes() == 2 * GRANULE
    world.copies.launch()
    assert not world.page(0).any()  # nothing has happened yet
    places = [row.data_ptr() for row in rows]
    del rows, row
    assert world.copies.staged_bytes() == 2 * GRANULE
    again = world.copies.stage(2, GRANULE)  # there is room only once the copies are over
    assert sorted(row.data_ptr() for row in again) == places
    assert world.page(0).unique().tolist() == [1]
    assert world.page(1).unique().tolist() == [2]


def test_another_stream_joins_copies_that_it_did_not_ask_for() -> None:
    """Pages are prefetched by one thread and read by another, whose stream knows of no copy."""
    world = World(3, 1, 8, "lead")
    world.load([1, 2, 3])
    world.device.faults = ()
    world.copies.join()
    for number in (1, 2, 3):
        world.compute_read(number)
    world.device.random.choice = lambda queues: queues[0]  # computation first, whenever it may
    world.device.finish()
    assert not world.wrong
    before = [len(queue) for queue in world.device.queues.values()]
    world.copies.join()  # nothing is under way: nothing is waited for
    assert [len(queue) for queue in world.device.queues.values()] == before


@pytest.mark.parametrize("by", ["launch", "join", "encoding"])
def test_an_upload_from_another_stream_waits_for_the_copy_that_reads_its_page(by: str) -> None:
    """One thread gives a page up and asks for another one in its place; it comes to a second.

    To encode, the stream that computed asks for what one asked for that has not used pages yet.
    """
    for seed in range(60):
        world = World(seed, 1, 8)
        pool = pool_of(world)
        world.compute_write(1)
        (row,), mark = world.copies.download([1], GRANULE)
        world.device.current = "other" if by == "encoding" else "compute"
        world.reuse(1)
        (coming,) = world.copies.stage(1, GRANULE)
        coming.fill_(99)
        world.copies.upload([(1, coming)])
        world.turn()
        if by == "encoding":
            with pool.encoding([]):
                pool.granules([])
        else:
            getattr(world.copies, by)()
        mark.wait()
        world.check("saved", row, 1)
        world.device.finish()
        assert not world.wrong and world.page(1).unique().tolist() == [99]


@pytest.mark.parametrize("leaves", [False, True])
def test_rows_of_a_copy_that_fails_half_way_are_kept_until_it_is_over(leaves: bool) -> None:
    world = World(0, 1, 20)
    gather, world.copies.least_pieces = world.device.copy, 99

    def second(*given: Any, **how: Any) -> None:
        gather(*given, **how)
        raise MemoryError

    world.device.copy, world.device.behind = second, True
    rows = world.copies.stage(2, GRANULE)
    if not leaves:
        for place, row in zip((1, 5), rows, strict=True):
            world.copies.upload([(place, row)])
    row = rows = None
    with pytest.raises(MemoryError):
        world.copies.download([1, 5], GRANULE) if leaves else world.copies.launch()
    gc.collect()
    assert world.copies.staged_bytes() == 2 * GRANULE
    world.device.copy = gather
    world.device.finish()


def test_neighbours_are_one_piece() -> None:
    world = World(0, 2, 20)
    rows = world.copies.stage(6, 2 * GRANULE)
    for row, granule in zip(rows, (4, 6, 8, 0, 12, 14), strict=True):
        world.copies.upload([(granule, row)])
    world.copies.launch()
    sizes = [3 * 2 * GRANULE, 2 * GRANULE, 2 * 2 * GRANULE]
    assert world.device.calls == [f"copy {n}" for n in sizes]


def test_small_pieces_are_moved_by_a_kernel() -> None:
    world = World(0, 1, 20)
    world.load([5, 1, 3])
    assert world.device.calls == ["scatter 3"]
    world.save([5, 1])  # too few for a kernel
    world.save([7, 0, 2, 4])
    assert world.device.calls[1:] == [f"copy {GRANULE}"] * 2 + ["gather 4"]
    world.finish()
    assert not world.wrong


def test_what_does_not_fit_into_the_arena_lies_elsewhere() -> None:
    world = World(0, 1, 2)
    held = world.copies.stage(2, GRANULE)
    world.load([1, 2])  # nothing can leave: the rows are held
    world.load([0, 1, 2, 3, 4])  # more than the arena
    assert world.copies.staged_bytes() == 2 * GRANULE
    memory = held[1].numpy().data  # as a tier has it that is late
    del held
    assert world.copies.staged_bytes() == GRANULE
    del memory
    assert world.copies.staged_bytes() == 0
    world.finish()
    assert not world.wrong
    without = Copies(world.device, world.pages, SlotPool(1 << 20))
    rows, mark = without.download([0], GRANULE)
    mark.wait()
    assert rows[0].unique().tolist() == [world.model[0]]
    assert without.staged_bytes() == 0


def test_memory_is_registered_once_and_as_long_as_it_is_used() -> None:
    device, pages = FakeStreams(0), torch.zeros(PAGES * GRANULE, dtype=torch.uint8)
    copies = open_copies(device, pages, n_bytes=len(pages))
    assert device.calls == ["pin"]
    held = copies.stage(1, GRANULE)
    copies.close()
    copies.slots.close()
    held[0].fill_(1)  # a tier that is late: the memory is there, and registered
    assert copies.stage(1, GRANULE)[0].data_ptr() != held[0].data_ptr()
    again = open_copies(device, pages, n_bytes=len(pages))
    assert device.calls == ["pin", "pin"] and again.slots.why == ""
    del held
    assert device.calls == ["pin", "pin", "unpin"]
    refused = open_copies(FakeStreams(0, "pin"), pages, n_bytes=len(pages))
    assert refused.slots.why == "no rights" and refused.staged_bytes() == 0
    assert refused.stage(2, GRANULE)[1].shape == (GRANULE,)


def test_forgotten_copies_end_before_their_memory_goes() -> None:
    world = World(0, 1, 4)
    world.load([1, 2])
    device, calls, model = world.device, world.device.calls, list(world.model)
    pages = world.pages
    del world.copies
    gc.collect()
    assert calls[-1] == "unpin"
    assert pages.view(PAGES, GRANULE)[:, 0].tolist() == model
    device.finish()


def test_nothing_costs_nothing() -> None:
    world = World(0, 1, 2)
    world.copies.launch()
    assert world.copies.stage(0, GRANULE) == []
    assert not world.device.calls


# ---- the runtime over such a device


class Eager(FakeStreams):
    """Its computation is numpy's, in the caller's thread: it waits where a device would.

    Pages on their way to host memory are written there late.
    """

    def lead(self) -> None:
        if "lead" not in self.faults:
            while self.queues["compute"] or self.queues["up"]:
                self.advance(1)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        self.calls.append(f"copy {len(target)}")
        source = source if to_device else source.clone()
        self._direction(to_device).append(
            (None, lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), len(source)))
        )

    def move(self, pages: torch.Tensor, *move: Any, to_device: bool) -> None:
        super().move(pages if to_device else pages.clone(), *move, to_device=to_device)

    def digest(self, pages: torch.Tensor, *move: Any, to_device: bool) -> None:
        super().digest(pages if to_device else pages.clone(), *move, to_device=to_device)


def behind_a_bus(kv: KV, *faults: str) -> list[Copies]:
    """Gives every pool of a cache on the CPU memory for copies, as pools on a GPU have."""
    pools, tiers = kv.planner.store.pools.values(), kv.planner.store.stack.tiers
    shared = next((tier.slots for tier in tiers if hasattr(tier, "slots")), None)
    for seed, pool in enumerate(pools):
        streams = Eager(seed, *faults)
        slots = shared or SlotPool(1 << 18)
        slots.register(streams.pin, streams.unpin, 1 << 18)
        pool.copies = Copies(streams, pool.arena, slots, most_bytes=1 << 18)
        pool.copies.kernel_bytes, pool.copies.least_pieces = 8191, 3
    return [pool.copies for pool in pools]


def made_known(kv: KV, count: int) -> list[list[int]]:
    """Texts of 48 tokens that were published."""
    texts = [[number, *range(48)] for number in range(count)]
    for text in texts:
        published(kv, text)
    return texts


def flushed(kv: KV, count: int) -> list[list[int]]:
    """Texts of 48 tokens whose pages are in the tiers."""
    texts = made_known(kv, count)
    kv.flush()
    return texts


def opened(kv: KV, texts: list[list[int]]) -> None:
    """All pages of these texts come back as they were."""
    for text in texts:
        with kv.open([*text, 99]) as seq:
            assert seq.reused == 48
            check_content(kv, seq, text[:48])


def opened_and_published(kv: KV, texts: list[list[int]]) -> None:
    """What comes back of these texts, twice each, is as it was; the rest is computed."""
    for text in [*texts, *texts]:
        with kv.open([*text, 99]) as seq:
            check_content(kv, seq, text[: seq.length])
        published(kv, text)


def answer_apart(monkeypatch: pytest.MonkeyPatch, *limits: str) -> None:
    """The host tier answers by its threads, however small the items are."""
    for name in limits:
        monkeypatch.setattr(host, name, 1)


def close(kv: KV, copies: Copies) -> None:
    """No memory for copies is left in use."""
    gc.collect()
    assert copies.staged_bytes() == 0
    kv.close()


def end(kv: KV, copies: Copies) -> None:
    """After copies that were under way at the close, no memory for them is in use."""
    audit(kv)
    kv.close()
    copies.streams.finish()
    gc.collect()
    assert copies.staged_bytes() == 0


def test_pages_come_and_go_through_the_arena() -> None:
    kv = make_kv(pages=20, tiers=[lasting()])
    (copies,) = behind_a_bus(kv)
    texts = flushed(kv, 6)
    opened(kv, [*texts, *texts])
    calls = copies.streams.calls
    # Of both groups 5 pages and more were missing each time: they went up together.
    assert sum(name.startswith("scatter") for name in calls) >= 6
    assert sum(name.startswith(("copy", "gather")) for name in calls) >= 6 * 6
    for text in texts:
        waits = kv.prefetch([*text, 99])
        assert waits.wait() and waits.arrived == waits.pages
        with kv.open([*text, 99]) as seq:
            check_content(kv, seq, text[: seq.length])
            assert seq.reused == 48
    gc.collect()
    staging = kv.stats()["devices"]["cpu"]["staging"]
    assert staging == {"used_bytes": 0, "why_not_pinned": ""}


def test_what_leaves_a_full_device_waits_for_memory_that_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No page is dropped, whatever fits into the arena, and victims leave a few at a time."""

    class Slow(HostTier):
        def _store_all(self, items: Sequence[Store]) -> list[TierAnswer]:
            time.sleep(2e-3)
            return super()._store_all(items)

    answer_apart(monkeypatch, "TOGETHER_BYTES", "SLOT_BYTES")
    kv = make_kv(pages=20, tiers=[Slow(1 << 24)])
    (copies,) = behind_a_bus(kv)
    schedule = kv.planner.store.stack.mover.lanes[0].schedule
    schedule.background_bytes = schedule.queue_bytes = 1 << 14
    texts = made_known(kv, 12)
    tier = kv.stats()["tiers"]["host"]
    assert tier["dropped"] == 0 and tier["stored_bytes"] > 0
    opened(kv, texts)
    end(kv, copies)


@pytest.mark.parametrize("granules", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_failed_launch_do_not_win_over_later_ones(
    seed: int, granules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of a row that could not be copied is given to others: theirs is what it holds."""
    world = World(seed, granules, 8)
    rows = world.copies.stage(4, world.n_bytes)
    for value, row in enumerate(rows, 1):
        row.fill_(value)
    order = rows if seed % 2 else rows[::-1]  # of their addresses, too
    first, second = order[:2], order[2:]
    with monkeypatch.context() as patch:
        for name in ("copy", "move"):
            patch.setattr(world.device, name, lambda *_, **__: 1 / 0)
        world.copies.upload((n * granules, row) for n, row in enumerate(first))
        with pytest.raises(ZeroDivisionError):
            world.copies.launch()
    world.reuse(0, 1)
    world.copies.upload((n * granules, row) for n, row in enumerate(second))
    world.copies.launch()
    world.device.finish()
    for number, row in enumerate(second):
        assert bool((world.page(number) == row[0]).all())


@pytest.mark.parametrize("apart", [False, True])
def test_no_byte_is_copied_between_a_device_and_the_host_tier(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages leave for slots that the tier keeps, and come back from where they lie there."""
    if apart:
        answer_apart(monkeypatch, "TOGETHER_BYTES", "APART_BYTES")
    kv = make_kv(pages=20, tiers=[HostTier(1 << 24)], prefetch="off")
    (copies,) = behind_a_bus(kv)
    count, texts = Counting(monkeypatch), flushed(kv, 8)
    opened(kv, [*texts, *texts])
    tier = kv.stats()["tiers"]["host"]
    assert tier["stored_bytes"] > 0 and tier["loaded_bytes"] > 0 and tier["dropped"] == 0
    assert not count.n_bytes
    close(kv, copies)


@pytest.mark.parametrize("below", ["host", "disk"])
def test_pages_that_the_device_reads_are_copied_at_once(below: str, tmp_path: Path) -> None:
    """Also for a caller that would not wait; others, and those of other policies, come later."""
    tiers = [HostTier(1 << 24)] if below == "host" else [DiskTier(tmp_path, 1 << 24)]
    kv = make_kv(pages=20, tiers=tiers, prefetch="off")
    behind_a_bus(kv)
    texts = flushed(kv, 8)
    usual = kv.restores.policy
    for text, policy in zip(texts, ["flowkv", "halves"] * 4, strict=True):
        kv.restores.policy = usual if policy == "flowkv" else Halves(0.0)
        with kv.open([*text, 99], wait=False) as seq:
            at_once = policy == "flowkv" and below == "host"
            assert (seq.restoration is None) == at_once and (seq.length == 48) == at_once
            if not at_once:
                seq.restoration.settle()
                while seq.restoration.poll() is None:
                    time.sleep(1e-4)
                seq.restoration.finish()
            assert seq.length == 48
            check_content(kv, seq, text[:48])


def test_pages_are_copied_at_once_in_the_time_that_is_allowed() -> None:
    kv = make_kv(pages=20, tiers=[HostTier(1 << 24)], prefetch="off")
    behind_a_bus(kv)
    texts = flushed(kv, 8)
    restores = kv.restores
    for turn, (text, allowed_s) in enumerate(zip(texts, [10.0, None, 10.0, 0.0] * 2, strict=True)):
        restores.allow()
        if allowed_s is not None:
            restores.allow(allowed_s)
        with kv.open([*text, 99], wait=False) as seq:
            at_once = turn and allowed_s != 0.0  # how long it takes is not known at first
            assert (seq.restoration is None) == bool(at_once)
            assert not at_once or (restores._allowance_s == math.inf) == (allowed_s is None)
            assert restores._allowance_s < 10.0 or allowed_s is None
            restores.allow()
            if seq.restoration is not None:
                assert seq.restoration.complete()
                seq.restoration.finish()
            check_content(kv, seq, text[:48])


@pytest.mark.parametrize(
    ("codec", "kernel"),
    [
        *(("raw", False), ("raw", True), ("kv8", True), ("k8v4", False)),
        *(("kv4c", True), ("kv4h", False), ("auto", True)),
    ],
)
def test_digests_of_pages_that_leave_are_made_on_the_device(codec: str, kernel: bool) -> None:
    """They are those that a processor makes, of every form, group and last page."""
    forms = {} if codec == "raw" else {"codec": codec, "recent_tokens": 0, "warm_tokens": 128}
    tier, found = HostTier(1 << 24), list[int]()
    kv = make_kv(wide(), pages=12, tiers=[tier], prefetch="off", **forms)
    (copies,) = behind_a_bus(kv)
    copies.slots.n_bytes, copies.most_bytes = 1 << 26, 1 << 26
    copies.kernel_bytes, copies.least_pieces = 1 << 20 if kernel else 0, 1
    submit = tier.submit_store

    def compared(items: Sequence[Store], **options: Any) -> int:
        for key, info, body, known in items:
            assert bytes(known) == digests(body, info.stripe_bytes), key
            found.append(info.codec)
        return submit(items, **options)

    tier.submit_store = compared
    for number in range(24):
        published(kv, [number, *range(64 * 3 + 9)])
    kv.flush()
    assert len(found) >= 20 and (len(set(found)) > 1) == (codec == "auto")
    assert any(call.startswith("gather") for call in copies.streams.calls) == kernel
    end(kv, copies)


@pytest.mark.parametrize("below", ["host", "disk"])
def test_the_processor_reads_no_page_that_leaves_or_comes_back(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except pages that come while a forward goes on: those of a disk are read where they lie."""
    tier = HostTier(1 << 24) if below == "host" else DiskTier(tmp_path, 1 << 24, threads=0)
    kv = make_kv(pages=20, tiers=[tier], prefetch="off")
    behind_a_bus(kv)
    count, texts = Touching(monkeypatch), flushed(kv, 8)
    assert kv.stats()["tiers"][tier.name]["stored_bytes"] > 0 and not count.n_bytes
    opened(kv, texts)
    loaded_bytes = kv.stats()["tiers"][tier.name]["loaded_bytes"]
    assert loaded_bytes > 0 and not count.n_bytes
    for text in texts:
        waits = kv.prefetch([*text, 99])
        assert waits.wait() and waits.arrived == waits.pages
        with kv.open([*text, 99]) as seq:
            assert seq.reused == 48
            check_content(kv, seq, text[:48])
    more_bytes = kv.stats()["tiers"][tier.name]["loaded_bytes"] - loaded_bytes
    assert count.n_bytes == more_bytes > 0 and not count.n_copied


@pytest.mark.parametrize("wrong", [False, True])
def test_the_processor_reads_no_page_that_goes_from_memory_to_a_disk(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digests are those that the device made: memory that changed is found on the way back."""
    near, far, picks = HostTier(40_000), DiskTier(tmp_path, 1 << 24, threads=0), random.Random(3)
    kv = make_kv(geometry(layers=4), pages=20, tiers=[near, far], prefetch="off", write_back=False)
    behind_a_bus(kv)
    count, texts = Touching(monkeypatch), [[number, *range(48)] for number in range(12)]
    for text in texts:
        published(kv, text)
        if wrong and near._frames:
            spoil_bit([frame.body for frame in near._frames.values()], picks)
    kv.flush()
    assert kv.stats()["events"]['demotions_total{source="host",tier="' + far.name + '"}'] > 4
    assert kv.stats()["tiers"][far.name]["stored_bytes"] > 0 and not count.n_bytes
    for text in [*texts, *texts]:
        with kv.open([*text, 99]) as seq:
            check_content(kv, seq, text[: seq.length])
            assert wrong or seq.reused
    assert bool(far.corrupt + near.corrupt) == wrong
    kv.flush()


def spoil_bit(bodies: list[Any], picks: random.Random) -> None:
    body = picks.choice(bodies)
    body[picks.randrange(len(body))] ^= 1 << picks.randrange(8)


def spoil_page(bodies: list[Any], picks: random.Random) -> None:
    """A page of another text in the slot."""
    one, other = picks.sample([body for body in bodies if len(body) == len(bodies[0])], 2)
    one[:] = other


def spoil_stripes(bodies: list[Any], picks: random.Random) -> None:
    body = picks.choice(bodies)
    body[:] = np.roll(body, len(body) // 2)


def spoil_on_the_device(
    copies: Copies, spoil: Callable[..., None], picks: random.Random, spoilt: list[int]
) -> None:
    """Spoil pages that came up before their digests are made: the device's memory, or the way."""
    digest = copies.streams.digest

    def spoiling(pages: torch.Tensor, where: Sequence[int], *given: Any, to_device: bool) -> None:
        if to_device:
            page = [pages.numpy()[g * GRANULE :][: 2 * GRANULE] for g in where]
            both = page * (1 + (len(where) < 2))
            copies.streams.queues["up"].append((None, lambda: spoil(both, picks)))
            spoilt[0] += 1
        digest(pages, where, *given, to_device=to_device)

    copies.streams.digest = spoiling


@pytest.mark.parametrize("spoil", [spoil_bit, spoil_page, spoil_stripes])
@pytest.mark.parametrize("moment", ["stored", "lent", "queued", "copied"])
def test_nothing_wrong_comes_from_pinned_memory(
    moment: str, spoil: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever its memory changes: pages count once the device has found their digests there."""
    tier, picks, spoilt = HostTier(1 << 24), random.Random(moment), [0]
    kv = make_kv(geometry(layers=4), pages=20, tiers=[tier], prefetch="off")
    (copies,) = behind_a_bus(kv)
    texts = flushed(kv, 8)

    def now() -> None:
        bodies = [frame.body for frame in tier._frames.values() if frame.body.any()]
        before = [body.copy() for body in bodies]
        spoil(bodies, picks)
        spoilt[0] += sum(map(bool, map(np.any, map(np.not_equal, bodies, before))))

    lend, verify = tier.lend_all, copies.verify

    def lent(keys: Sequence[bytes], *part: int) -> Any:
        found = lend(keys, *part)
        if picks.randrange(4) == 0:
            now()
        return found

    def queued(*given: Any) -> Callable[[], list[bool]]:
        now()
        return verify(*given)

    if moment == "stored":
        for _ in range(6):
            now()
    elif moment == "lent":
        tier.lend_all = lent
    elif moment == "queued":
        copies.verify = queued
    else:
        spoil_on_the_device(copies, spoil, picks, spoilt)
    opened_and_published(kv, texts)
    assert spoilt[0]
    if moment == "copied":
        assert not tier.corrupt and not kv.stats()["tiers"]["host"]["refused"]
    else:
        assert 0 < tier.corrupt <= spoilt[0]
    kv.flush()
    audit(kv)
    copies.streams.finish()
    close(kv, copies)


@pytest.mark.parametrize("moment", ["stored", "read", "copied"])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_wrong_comes_from_a_disk(seed: int, moment: str, tmp_path: Path) -> None:
    """Whatever flips: on the disk, in the row that it was read into, or on the device."""
    tier, picks, spoilt = DiskTier(tmp_path, 1 << 24, threads=0), random.Random(seed), [0]
    kv = make_kv(geometry(layers=4), pages=20, tiers=[tier], prefetch="off")
    (copies,) = behind_a_bus(kv)
    texts = flushed(kv, 8)
    verify = copies.verify

    def now() -> None:
        _, held = picks.choice(tier._store.entries())
        with open(tier._store._slabs._path(held.slot.granules), "r+b") as file:
            at = held.slot.offset + picks.randrange(held.stored_bytes)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << picks.randrange(8)]))
        spoilt[0] += 1

    def read(rows: Sequence[torch.Tensor], *given: Any) -> list[bool]:
        if picks.randrange(2):
            spoil_bit([row.numpy() for row in rows], picks)
            spoilt[0] += 1
        return verify(rows, *given)

    if moment == "read":
        copies.verify = read
    elif moment == "copied":
        spoil_on_the_device(copies, spoil_bit, picks, spoilt)
    for text in [*texts, *texts]:
        if moment == "stored":
            now()
        with kv.open([*text, 99]) as seq:
            check_content(kv, seq, text[: seq.length])
            assert seq.reused == 48 or moment == "stored"
        published(kv, text)
    assert spoilt[0] and bool(tier.corrupt) == (moment == "stored")
    kv.flush()
    audit(kv)
    copies.streams.finish()
    close(kv, copies)


def test_a_copy_that_went_wrong_on_the_way_in_is_made_again() -> None:
    kv = make_kv(pages=20, tiers=[HostTier(1 << 24)], prefetch="off")
    (copies,) = behind_a_bus(kv)
    tier, verify, asked = kv.planner.store.stack.tiers[0], copies.verify, list[int]()
    texts = flushed(kv, 8)

    def never(rows: Any, *given: Any) -> Callable[[], list[bool]]:
        asked.append(len(rows))
        check = verify(rows, *given)
        return lambda: [not fine for fine in check()]

    copies.verify = never
    opened(kv, texts)
    assert asked and not tier.corrupt


@pytest.mark.parametrize("what", ["bit", "half", "swapped", "stripes"])
@pytest.mark.parametrize("below", ["host", "disk"])
def test_a_copy_that_goes_wrong_is_never_served(what: str, below: str, tmp_path: Path) -> None:
    """Or memory that changes once the copy is over: pages are found wrong when they come back."""
    tier = HostTier(1 << 24) if below == "host" else DiskTier(tmp_path, 1 << 24, threads=0)
    kv = make_kv(geometry(layers=4), pages=20, tiers=[tier], prefetch="off")
    behind_a_bus(kv)
    submit, spoilt, picks = tier.submit_store, set[bytes](), random.Random(7)

    def spoil(items: Sequence[Store], **options: Any) -> int:
        rows = [torch.frombuffer(one.body, dtype=torch.uint8) for one in items]
        for number, (item, row) in enumerate(zip(items, rows, strict=True)):
            if picks.randrange(2) and item.key not in spoilt:
                spoilt.add(item.key)
                before, half = row.clone(), len(row) // 2
                if what == "bit":
                    row[picks.randrange(len(row))] ^= 1 << picks.randrange(8)
                elif what == "half":
                    row[128:] = 0
                elif what == "stripes":
                    row.copy_(before.roll(half))
                else:
                    row.copy_(rows[number - 1] if len(rows) > 1 else before.flip(0))
                if bool((row == before).all()):
                    spoilt.discard(item.key)
        return submit(items, **options)

    tier.submit_store = spoil
    texts = flushed(kv, 8)
    assert spoilt
    opened_and_published(kv, texts)
    assert kv.stats()["tiers"][tier.name]["refused"]


@pytest.mark.parametrize("below", ["host", "disk", "both"])
def test_making_room_waits_for_no_copy(below: str) -> None:
    """Pages are given up while their copies are under way; a tier gets them afterwards."""
    tiers = {
        "host": [HostTier(1 << 24)],
        "disk": [lasting()],
        "both": [HostTier(1 << 24), lasting()],
    }
    kv = make_kv(pages=20, tiers=tiers[below], prefetch="off")
    (copies,) = behind_a_bus(kv)
    device, mover, copies.most_bytes = copies.streams, kv.planner.store.stack.mover, 1 << 30
    device.behind = True
    texts = made_known(kv, 9)
    assert not device.waits and mover.storing and "after" in device.calls
    kv.flush()
    assert device.waits and not mover.storing
    opened(kv, texts)
    assert not any(tier["dropped"] for tier in kv.stats()["tiers"].values())
    end(kv, copies)


def test_a_free_page_is_written_to_after_the_copy_that_reads_it() -> None:
    """Whatever gives it to somebody anew, and as long as that copy is under way."""
    kv = make_kv(pages=20)
    (copies,) = behind_a_bus(kv)
    (pool,), device = kv.planner.store.pools.values(), copies.streams
    device.behind, (granules, *_) = True, sorted(pool._sizes)
    for anew in (
        lambda: pool.allocate(granules, 1),
        copies.join,
        lambda: pool.copy(pool.allocate(granules, 1), pool.allocate(granules, 1), granules),
    ):
        device.calls.clear()
        (page,), (other,) = pool.allocate(granules, 1), pool.allocate(granules, 1)
        copies.download([page & GRANULE_MASK, other & GRANULE_MASK], GRANULE)
        pool.allocate(granules, 1)
        assert "after" not in device.calls, "both pages are in use"
        pool.release(page)
        anew()
        assert "after" in device.calls
        device.finish()
        copies.staged_bytes()  # looks at the marks
        device.calls.clear()
        pool.release(other)
        anew()
        assert "after" not in device.calls, "the copy is over"
    kv.close()  # nothing owns its pages


@pytest.mark.parametrize("waits", [True, False])
def test_a_page_that_is_asked_for_before_its_copy_is_over_is_waited_for(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = make_kv(pages=20, tiers=[HostTier(1 << 24)], prefetch="off")
    (copies,) = behind_a_bus(kv)
    copies.streams.behind, copies.most_bytes = True, 1 << 30
    texts, missing = made_known(kv, 8), 0
    if not waits:
        monkeypatch.setattr(FakeMark, "wait", lambda mark, timeout_s=0.0: True)
    for text in texts:
        with kv.open([*text, 99]) as seq:
            check_content(kv, seq, text[: seq.length])  # digests show what came too early
            missing += seq.reused < 48
    assert kv.planner.store.stack.mover.from_memory or not waits
    assert bool(missing) != waits
    copies.streams.finish()


@pytest.mark.parametrize("seed", range(6))
def test_pages_that_leave_late_are_forgotten_asked_for_and_closed(seed: int) -> None:
    """Whatever happens while copies are under way: no page is another one's."""
    picks, below = random.Random(seed), [HostTier(1 << 18), lasting()]
    kv = make_kv(pages=20, tiers=below[seed % 2 :], prefetch="off")
    (copies,) = behind_a_bus(kv)
    copies.streams.behind = seed % 3 == 0
    texts = [[number, *range(48)] for number in range(9)]
    for _ in range(60):
        text, turn = picks.choice(texts), picks.randrange(10)
        if turn < 5:
            published(kv, text)
        elif turn < 8:
            with kv.open([*text, 99]) as seq:
                check_content(kv, seq, text[: seq.length])
        elif turn == 8:
            kv.forget(text)
        else:
            kv.flush()
    end(kv, copies)


def test_lent_memory_that_is_checked_late_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages stay lent until the tier has answered; what waited is computed or asked anew."""
    answer_apart(monkeypatch, "TOGETHER_BYTES", "APART_BYTES")
    go_on = threading.Event()

    class Slow(HostTier):
        def submit_load(self, items: Sequence[Load], **options: Any) -> int:
            return super().submit_load([one._replace(unread=False) for one in items], **options)

        def _load_all(self, items: Sequence[Load]) -> list[TierAnswer]:
            assert go_on.wait(60)
            return super()._load_all(items)

    kv = make_kv(pages=20, tiers=[Slow(1 << 24)], prefetch="off", load_deadline_s=0.05)
    (copies,) = behind_a_bus(kv)
    texts = flushed(kv, 8)
    with kv.open([*texts[0], 99]) as seq:
        assert seq.reused < 48
        check_content(kv, seq, texts[0][: seq.length])
    store = kv.planner.store
    go_on.set()
    while store.stack.mover.lanes[0].overdue:
        store.writes.drain(0.1)
    store.stack.mover.lanes[0].rest(0.0)  # it is asked again from now on
    opened(kv, [*texts, *texts])
    audit(kv)
    close(kv, copies)


def test_pages_that_are_erased_while_they_come_stay_as_they_are() -> None:
    """What a sequence was given is not overwritten before it has been copied up."""
    kv = make_kv(pages=20, tiers=[HostTier(1 << 24)], prefetch="off")
    (copies,) = behind_a_bus(kv)
    tier, text = kv.planner.store.stack.tiers[0], [0, *range(48)]
    flushed(kv, 8)
    key, upload = next(k for k in tier._frames if tier.lend(k) is not None), copies.upload
    keys = list(tier._frames)

    def erased(rows: list[tuple[int, torch.Tensor]]) -> None:
        upload(rows)
        tier.erase(keys)

    copies.upload = erased
    with kv.open([*text, 99]) as seq:
        assert seq.reused
        check_content(kv, seq, text[: seq.length])
    assert not tier.contains([key])[0]
    close(kv, copies)


def test_an_upload_that_fails_is_made_up_for_before_its_pages_are_read() -> None:
    kv = make_kv(pages=20, tiers=[HostTier(1 << 24)], prefetch="off")
    (copies,) = behind_a_bus(kv)
    flushed(kv, 8)
    text, move = [0, *range(48)], copies._move

    def failing(queue: Any, *, to_device: bool) -> None:
        if not to_device:
            return move(queue, to_device=to_device)
        copies._move = move
        raise MemoryError

    copies._move = failing
    with pytest.raises(MemoryError):
        kv.open([*text, 99])
    mover = kv.planner.store.stack.mover
    while mover.drain(1.0):  # no answer beside the one that failed was lost
        pass
    assert not any(lane.busy for lane in mover.lanes)
    with kv.open([*text, 99]) as seq:
        check_content(kv, seq, text[: seq.length])


def test_a_step_before_which_an_upload_fails_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while the error is held, and with it the step that did not begin."""

    def fails() -> None:
        raise MemoryError

    kv = make_kv(pages=20)
    (copies,) = behind_a_bus(kv)
    with kv.open([*range(5)]) as seq:
        with monkeypatch.context() as patch, pytest.raises(MemoryError) as error:
            patch.setattr(copies, "launch", fails)
            kv.step([seq], [[*range(5)]])
        prefill(kv, seq)
        check_content(kv, seq, [*range(5)])
        assert error.value.__traceback__


def test_a_tier_that_is_late_keeps_its_rows() -> None:
    """What it writes after its deadline lands in memory that nobody else was given."""
    tier = Silent(lasting())
    tier.silent = False
    kv = make_kv(pages=20, tiers=[tier], load_deadline_s=0.05)
    (copies,) = behind_a_bus(kv)
    texts = flushed(kv, 6)
    tier.silent = True
    with kv.open([*texts[0], 99]) as seq:
        assert seq.reused < 48
    held = copies.staged_bytes()
    assert held > 0
    rows = copies.stage(3, GRANULE)
    for row in rows:
        row.fill_(7)
    tier.scribble()
    assert all(row.unique().tolist() == [7] for row in rows)
    del rows, row
    tier.speak()
    kv.planner.store.writes.drain()
    close(kv, copies)


# ---- the same on a device


@pytest.mark.gpu
@pytest.mark.parametrize("granules", [1, 512])
def test_a_slow_producer_on_a_gpu(granules: int) -> None:
    """Fault F6: what leaves is what the producer left, what arrives is what its reader sees."""
    device, count, n_bytes = torch.device("cuda"), 32, granules * GRANULE
    pages = torch.zeros(2 * count * n_bytes, dtype=torch.uint8, device=device)
    copies = open_copies(CudaStreams(device), pages, n_bytes=128 << 20)
    assert copies.slots.why == ""
    places = [2 * i * granules for i in torch.randperm(count).tolist()]
    for value in range(1, 6):
        torch.cuda._sleep(50_000_000)  # the kernel that fills the pages comes late
        pages.fill_(value)
        rows, mark = copies.download(places, n_bytes)
        mark.wait()
        assert all(row.unique().tolist() == [value] for row in rows)
        for row in rows:
            row.fill_(100 + value)
        torch.cuda._sleep(50_000_000)
        before = pages.clone()  # reads the pages late, as they were
        for row, place in zip(rows, places, strict=True):
            copies.upload([(place, row)])
        del rows, row
        copies.launch()
        after = pages.view(2 * count, n_bytes)[0::2].clone()
        again = copies.stage(count, n_bytes)
        for row in again:
            row.fill_(99)  # the slots are used again: not while they are being read
        assert before.unique().tolist() == [value]
        assert after.unique().tolist() == [100 + value]
        del again, row
    copies.close()


@pytest.mark.gpu
@pytest.mark.parametrize("granules", [1, 512])
def test_digests_are_made_and_checked_on_a_gpu(granules: int) -> None:
    """Of what a late producer left, and of what arrived: by the kernel and by the copy engine."""
    device, count, n_bytes = torch.device("cuda"), 32, granules * GRANULE
    stripes = max(1, granules // 4)
    pages = torch.randint(0, 255, (2 * count * n_bytes,), dtype=torch.uint8, device=device)
    copies = open_copies(CudaStreams(device), pages, n_bytes=128 << 20)
    places = [2 * i * granules for i in torch.randperm(count).tolist()]
    torch.cuda._sleep(50_000_000)
    pages.add_(1)
    made = copies.digest(places, n_bytes, stripes)
    rows, mark = copies.download(places, n_bytes)
    mark.wait()
    known = [digests(row.numpy(), n_bytes // stripes) for row in rows]
    assert [bytes(one) for one in made.numpy()] == known
    pages.zero_()
    assert copies.verify(rows, places, known)() == [True] * count
    rows[3][-1] ^= 1
    assert copies.verify(rows, places, known)() == [n != 3 for n in range(count)]
    assert copies.verify(rows[::-1], places, known)() == [False] * count
    copies.close()
