"""Pages that wait for a device: each is decoded once, in batches, whatever the device does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flowkv import Geometry
from flowkv.tiers import Outcome
from flowkv.tiers.disk import DiskTier
from tests.inside import (
    CodedPage,
    DeviceDecoder,
    DeviceQueue,
    PageBases,
    coded_forms,
    compiling,
    kvt_device,
    kvt_tier,
)
from tests.kvt.pages import SIZE, group
from tests.kvt.test_tier import PAGES, load, made, near, store


class Fake:
    """A decoder whose pages are sound if their first byte is even; it may wait, or fail."""

    def __init__(self) -> None:
        self.batches, self.error = list[list[int]](), BaseException()
        self.fails, self.asked, self.wrong = False, 0, 0
        self.begun, self.goes_on = threading.Semaphore(0), threading.Event()
        self.goes_on.set()

    def decode_batch(self, pages: list[CodedPage]) -> list[bool]:
        self.asked, pages = self.asked + 1, pages[:3]
        self.begun.release()
        with compiling.around():
            assert self.goes_on.wait(10)
        if self.fails:
            raise self.error
        self.batches.append([page.data[0] for page in pages])
        for page in pages:
            page.target[0] = page.data[0] ^ self.wrong
        return [not page.data[0] % 2 for page in pages]


class Basis:
    """A coder of pages of one byte, which the processor decodes as the fake does."""

    layout = SimpleNamespace(page_bytes=1, layers=1)

    def __init__(self, name: bytes) -> None:
        self.name = name

    def decode(self, data: memoryview, target: memoryview, first: int, layers: int) -> bool:
        target[0] = data[0]
        return not data[0] % 2

    def views(self, body: memoryview, layers: int) -> tuple[torch.Tensor, ...]:
        return (torch.frombuffer(body, dtype=torch.uint8).view(1, 1, 1, 1).float(),)


FIRST, SECOND = Basis(b"first"), Basis(b"second")


class Room:
    """A queue, and what it answers."""

    def __init__(self) -> None:
        self.queue, self.decoder, self.threads = DeviceQueue(), Fake(), list[threading.Thread]()
        self.answers, self.targets = dict[int, bool | None](), dict[int, bytearray]()

    def put(self, number: int, basis: Basis = FIRST) -> bool:
        """Put a page; return whether it is decoded there, as far as is known."""

        def done(page: CodedPage, sound: bool | None) -> None:
            assert number not in self.answers and page.data[0] == number
            self.answers[number] = sound

        target = self.targets[number] = bytearray(1)
        page = CodedPage(cast(Any, basis), bytes([number]), memoryview(target), 0, 1, done)
        elsewhere: Callable[..., Any] = lambda pages: [one.done(one, None) for one in pages]  # noqa: E731
        self.queue.decode_soon([page], lambda _: cast(DeviceDecoder, self.decoder), elsewhere)
        return self.answers.get(number, True) is not None

    def lead(self, number: int) -> None:
        """Put a page from another thread, which decodes it."""
        self.decoder.goes_on.clear()
        while self.decoder.begun.acquire(blocking=False):
            pass
        self.threads.append(threading.Thread(target=self.put, args=(number,)))
        self.threads[-1].start()
        assert self.decoder.begun.acquire(timeout=10)

    def end(self) -> None:
        self.decoder.goes_on.set()
        for thread in self.threads:
            thread.join()


def test_the_first_page_of_a_basis_is_a_trial() -> None:
    """No load waits for a compiler: others are decoded elsewhere while it may be at work."""
    room = Room()
    room.lead(8)
    assert not room.put(6) and room.answers == {8: None, 6: None}
    room.end()
    assert room.answers == {8: None, 6: None} and room.targets[8] == b"\0", (
        "it is decoded elsewhere, too"
    )
    assert room.decoder.batches == [[8]]
    assert room.put(4) and room.answers.pop(4) and room.targets[4] == b"\x04"
    assert not room.put(2, SECOND) and room.put(10, SECOND)


@pytest.mark.parametrize("wrong", [2, 1])
def test_a_device_that_decodes_something_else_gets_no_page(
    wrong: int, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room()
    room.decoder.wrong = wrong
    assert not any([room.put(n) for n in (8, 4, 6)])
    assert room.decoder.batches == [[8]]
    (said,) = (one.getMessage() for one in caplog.records)
    assert "decodes cold pages to something else" in said
    room.decoder.wrong = 0
    assert not room.put(2, SECOND) and room.put(10, SECOND), "it is asked about another basis"


def test_deadlines_pass_while_a_trial_compiles() -> None:
    room = Room()
    room.lead(8)
    begun_s = compiling.now_s()
    time.sleep(0.02)
    assert compiling.now_s() - begun_s > 0.01
    room.end()
    room.lead(4)  # no trial: what is compiled now, a load waits for
    begun_s = compiling.now_s()
    time.sleep(0.02)
    assert compiling.now_s() - begun_s < 0.01
    room.end()


def test_a_damaged_page_proves_nothing() -> None:
    room = Room()
    assert not room.put(3) and not room.put(4) and room.put(6) and room.put(5)
    assert room.answers == {3: None, 4: None, 6: True, 5: False}


def test_an_answer_that_fails_leaves_no_page_behind() -> None:
    room = Room()
    assert not room.put(20)
    room.lead(0)
    room.answers[2] = None  # so that its answer raises
    assert [room.put(n) for n in (2, 4)] == [False, True]
    room.end()
    assert room.answers == {20: None, 0: True, 2: None, 4: True}
    assert room.put(6) and room.answers[6] is True


def test_pages_that_wait_are_batches() -> None:
    room = Room()
    assert not room.put(20) and not room.put(22, SECOND)
    room.answers.clear()
    room.lead(0)
    first = [room.put(n) for n in range(1, 6)]
    assert all(first) and room.put(8, SECOND) and room.put(6) and room.put(9, SECOND)
    assert not room.answers
    room.end()
    assert room.decoder.batches[2:] == [[0], [1, 2, 3], [4, 5, 6], [8, 9]]
    assert room.answers == {n: not n % 2 for n in (*range(7), 8, 9)}


ERRORS = (RuntimeError("out of memory"), MemoryError(), SystemExit())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_leaves_no_page_behind(error: BaseException) -> None:
    room = Room()
    assert not room.put(20) and room.put(0)
    room.lead(2)
    assert room.put(4) and room.put(6) and not room.put(12, SECOND)
    room.decoder.fails, room.decoder.error = True, error
    room.end()
    assert room.answers == {20: None, 0: True, 2: None, 4: None, 6: None, 12: None}
    asked = room.decoder.asked
    assert not room.put(8) and room.decoder.asked == asked == 3, "it is asked no more"
    with pytest.MonkeyPatch.context() as patch:  # a minute later
        patch.setattr(kvt_device.time, "monotonic", lambda: 1e18)
        room.decoder.fails = False
        assert not room.put(10) and not room.put(14, SECOND), "other trials"
        assert room.decoder.batches == [[20], [0], [10], [14]]
        assert room.put(16) and room.put(18, SECOND)


def test_a_device_that_fails_costs_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no device decodes: the launch of a kernel on the processor's memory fails."""
    asked, make = list[Any](), kvt_tier.DeviceDecoder
    wraps: Callable[..., Any] = lambda *args: asked.append(args) or make(*args)  # noqa: E731
    monkeypatch.setattr(kvt_tier, "DeviceDecoder", wraps)
    tier = made(DiskTier(tmp_path, 64 << 20))
    store(tier)
    load(tier, 0)
    assert not asked, "pages of layers on the processor"
    monkeypatch.setattr(kvt_tier, "DEVICES", {"cpu"})
    for number, wanted in enumerate(PAGES):
        answer, got = load(tier, number)
        assert answer.outcome is Outcome.HIT and near(got, wanted)
    assert len(asked) == 1 and not tier.bases.measured()["device_pages"]
    tier.close()


def test_pages_are_decoded_where_their_layers_lie() -> None:
    groups = group("bfloat16"), group("bfloat16", layers=(3,), device="cuda:1")
    forms = PageBases(coded_forms(Geometry(groups=groups, page_size=SIZE))).forms
    assert [forms[n].device.type in kvt_device.DEVICES for n in (0, 1)] == [False, True]
    assert forms[1].device.index == 1
