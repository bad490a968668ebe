"""Pages that wait for a device: each is decoded once, in batches, whatever the device does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from flowkv.tiers import Outcome
from flowkv.tiers.disk import DiskTier
from tests.inside import CodedPage, DeviceDecoder, DeviceQueue, kvt_device, kvt_tier
from tests.kvt.test_tier import PAGES, load, made, near, store


class Fake:
    """A decoder whose pages are sound if their first byte is even; it may wait, or fail."""

    def __init__(self, *, error: BaseException | None = None) -> None:
        self.batches, self.error = list[list[int]](), error
        self.begun, self.goes_on = threading.Semaphore(0), threading.Event()

    def __call__(self) -> DeviceDecoder:
        return cast(DeviceDecoder, self)

    def page_bytes(self, page: CodedPage) -> int:
        return 10

    def decode(self, pages: list[CodedPage]) -> list[bool]:
        self.begun.release()
        assert self.goes_on.wait(10)
        if self.error is not None:
            raise self.error
        self.batches.append([page.data[0] for page in pages])
        return [not page.data[0] % 2 for page in pages]


class Room:
    """A queue, and what it answers."""

    def __init__(self, decoder: Fake) -> None:
        self.queue, self.decoder, self.threads = DeviceQueue(), decoder, list[threading.Thread]()
        self.answers = dict[int, bool | None]()

    def put(self, number: int, basis: bytes = b"basis") -> bool:
        def done(sound: bool | None) -> None:
            assert number not in self.answers
            self.answers[number] = sound

        page = CodedPage(bytes([number]), memoryview(bytearray(1)), 0, 1)
        return self.queue.decode(self.decoder, basis, page, done)

    def lead(self, number: int) -> None:
        """Put a page from another thread, which decodes it."""
        self.threads.append(threading.Thread(target=self.put, args=(number,)))
        self.threads[-1].start()
        assert self.decoder.begun.acquire(timeout=10)

    def end(self) -> None:
        self.decoder.goes_on.set()
        for thread in self.threads:
            thread.join()


def test_pages_that_wait_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvt_device, "BATCH_BYTES", 35)
    decoder = Fake()
    room = Room(decoder)
    decoder.goes_on.set()
    assert room.put(8) and room.answers == {8: True}
    assert decoder.begun.acquire()
    decoder.goes_on.clear()
    room.lead(0)
    assert all([room.put(n) for n in range(1, 5)]) and room.put(6, b"basis")
    assert room.answers == {8: True}
    room.end()
    assert decoder.batches == [[8], [0], [1, 2, 3], [4, 6]]  # of 10 bytes each
    assert room.answers == {n: not n % 2 for n in (0, 1, 2, 3, 4, 6, 8)}


def test_pages_of_other_bases_are_other_batches() -> None:
    decoder = Fake()
    room = Room(decoder)
    decoder.goes_on.set()
    assert (
        room.put(8)
        and room.put(10, b"other")
        and decoder.begun.acquire()
        and decoder.begun.acquire()
    )
    decoder.goes_on.clear()
    room.lead(0)
    assert all([room.put(1), room.put(2, b"other"), room.put(3), room.put(4, b"other")])
    room.end()
    assert decoder.batches[2:] == [[0], [1, 3], [2, 4]] and len(room.answers) == 7


def test_no_page_waits_for_a_compiler() -> None:
    """While the first one of a basis is decoded, others are decoded elsewhere."""
    decoder = Fake()
    room = Room(decoder)
    room.lead(0)
    assert not room.put(2) and not room.answers
    room.end()
    assert room.answers == {0: True} and room.put(4)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError(), SystemExit()])
def test_an_error_leaves_no_page_behind(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Fake()
    room = Room(decoder)
    decoder.goes_on.set()
    assert room.put(0) and decoder.begun.acquire()
    decoder.goes_on.clear()
    room.lead(2)
    assert room.put(4) and room.put(6)
    decoder.error = error
    room.end()
    assert room.answers == {0: True, 2: None, 4: None, 6: None}
    assert not decoder.begun.acquire(blocking=False), "it is asked for no more"
    assert not room.put(8) and len(room.answers) == 4
    decoder.error = None
    monkeypatch.setattr(room.queue, "_again_s", 0.0)  # a minute later
    assert room.put(8) and room.answers[8] is True


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
