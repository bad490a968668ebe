"""Pages are encoded beside the computation, on a device that does both as oddly as it may."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from flowkv import KV, Geometry, Sequence, kernels
from tests.cache.test_pinned import FakeMark, FakeStreams
from tests.cache.toy import (
    PAGE,
    advance,
    check_content,
    keys_values,
    make_kv,
    opened,
    published,
    write,
)
from tests.inside import Copies, CudaStreams, Later, SlotPool, kv_plan, seal

pytestmark = pytest.mark.at_once

WITHIN = 0.03
"""Largest error of an encoded number."""


class LateDevice(FakeStreams):
    """A device to which nothing happens at once, and a stream of its own for encoding.

    Attributes:
        wrong: What was read and is not what was computed.
        encoded: Calls of the encoder that were carried out.
    """

    def __init__(self, seed: int, *faults: str) -> None:
        super().__init__(seed, *faults)
        self.wrong: list[str] = []
        self.encoded = 0

    def give(self, call: Callable[[], object]) -> FakeMark:
        """Queues a call on the caller's stream; the mark behind it."""
        self.queues[self.current].append((None, call))
        return self._mark(self.current)


class Behind:
    """What `Later` promises, of a value that its device has not computed yet."""

    def __init__(self, mark: FakeMark, result: Callable[[], list[torch.Tensor | None]]) -> None:
        self._mark, self._result, self.ready = mark, result, False

    def result(self) -> list[torch.Tensor | None]:
        found = self._result()  # the values are written into these tensors
        if not found or "result" not in self._mark.device.faults:
            self._mark.wait()
        return found or self._result()


def kept(batch: Any) -> Any:
    """Rows as a kernel was launched with them: tables and lengths go on changing on the host."""
    return batch._replace(
        **{name: getattr(batch, name).clone() for name in ("table", "rows", "lengths", "starts")}
    )


@contextmanager
def on(device: LateDevice, kv: KV) -> Iterator[None]:
    """Appends, encodings, copies, and looks for NaN happen when the device comes to them."""
    append, copy, transcode = kernels.append, kernels.copy_pages, kernels.transcode
    ask, inside = seal.Publisher._ask, list[bool]()

    def late_append(k: torch.Tensor, v: torch.Tensor, pages: Any, batch: Any) -> None:
        rows = kept(batch)
        device.give(lambda: append(k, v, pages, rows))

    def late_transcode(*args: Any) -> torch.Tensor:
        if device.current != "aside":  # a page to write to is decoded: the caller reads its status
            device.give(int).wait()
            return transcode(*args)
        status = torch.zeros(len(args[1]), args[3].layers, dtype=torch.int32)

        def carry_out() -> None:
            device.encoded += 1
            status.copy_(transcode(*args))

        device.give(carry_out)
        return status

    def late_ask(self: Any, pages: Any) -> Any:
        found: list[Any] = []

        def carry_out() -> None:
            inside.append(True)
            found.append(ask(self, pages))
            inside.pop()

        return Behind(device.give(carry_out), lambda: found and found[0].result())

    def late(*values: Any) -> Any:
        return Later(*values) if inside else Behind(device.give(int), lambda: [*values])

    with pytest.MonkeyPatch.context() as patch:
        for pool in kv.planner.store.pools.values():
            slots = SlotPool(1 << 16)
            slots.register(device.pin, device.unpin, 0)
            patch.setattr(pool, "copies", Copies(device, pool.arena, slots))
        patch.setattr(kernels, "append", late_append)
        patch.setattr(kernels, "copy_pages", lambda *args: device.give(lambda: copy(*args)))
        patch.setattr(kernels, "transcode", late_transcode)
        patch.setattr(seal.Publisher, "_ask", late_ask)
        patch.setattr(seal, "Later", late)
        yield
        device.finish()


def read(device: LateDevice, kv: KV, seq: Sequence) -> None:
    """Reads all that a sequence may still see, once the device comes to it."""
    shape, text = seq.planner.geometry, seq.tokens[: seq.length].tolist()
    step = kv_plan(kv, [seq], [0])
    for g, group in enumerate(shape.groups):
        first, columns = seq.first_page[g] * shape.page_size, int(seq.lengths[g])
        rows = kept(step.batch(g))
        for layer in group.layers:
            pages, wanted = step.pages(layer), keys_values(shape, layer, text, first)

            def carry_out(pages: Any = pages, rows: Any = rows, wanted: Any = wanted,
                          first: int = first, columns: int = columns) -> None:  # fmt: skip
                for got, want in zip(
                    kernels.gather_dense(pages, rows, columns), wanted, strict=True
                ):
                    error = got[0].transpose(0, 1)[first:] - want
                    if len(want) and not float(error.abs().max()) <= WITHIN:
                        device.wrong.append(f"{text[:4]}: {float(error.abs().max())}")

            device.give(carry_out)
    step.rollback()


KINDS = ["open", "decode", "decode", "fork", "cut", "close"]
Story = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 99)), min_size=8, max_size=25)


def told(story: list[tuple[str, int]], device: LateDevice) -> LateDevice:
    """Sequences grow, share pages, are cut and leave in a small pool; each is read all the time."""
    kv, seqs = make_kv(pages=40, codec="kv8", recent_tokens=0), list[Any]()
    with on(device, kv):
        for what, n in story:
            if what == "open" and len(seqs) < 3:
                seqs.append(opened(kv, [n, *range(5 + n % (3 * PAGE))]))
            elif what == "decode" and seqs and max(seq.length for seq in seqs) < 7 * PAGE:
                for turn in range(1 + n % (2 * PAGE)):
                    some = seqs[: 1 + n % len(seqs)]
                    advance(kv, some, [[turn % 50]] * len(some))
                    read(device, kv, some[turn % len(some)])
                    device.advance(device.random.randrange(4))
            elif what == "fork" and 0 < len(seqs) < 3:
                seqs.append(kv.fork(seqs[n % len(seqs)]))
            elif what == "cut" and seqs:
                seq = seqs[n % len(seqs)]
                kv.truncate(seq, max(1, seq.length - n % 9))
            elif what == "close" and seqs:
                seqs.pop(n % len(seqs)).close()
            for seq in seqs:
                read(device, kv, seq)
        for seq in seqs:
            seq.close()
        kv.planner.publish_pending()
    assert not kv.planner.pending.work
    kv.close()
    return device


@settings(max_examples=30, deadline=None)
@given(Story, st.integers(0, 1 << 30))
def test_every_order_of_the_device_gives_what_was_computed(story: Any, seed: int) -> None:
    assert not told(story, LateDevice(seed)).wrong


def tale(seed: int) -> list[tuple[str, int]]:
    picks = random.Random(seed)
    turns = ["open", "decode", "decode", "decode", "close", "cut"]
    return [("open", 7), *((picks.choice(turns), picks.randrange(100)) for _ in range(12))]


@pytest.mark.parametrize("fault", ["", "encoding", "result"])
def test_a_missing_dependency_of_encoding_is_noticed(fault: str) -> None:
    """Encoding begins behind the work that fills its pages; its pages are used once it ended."""
    encoded = 0
    for seed in range(12 if not fault else 120):
        device = told(tale(seed), LateDevice(seed, fault))
        encoded += device.encoded
        if device.wrong:
            break
    assert encoded and bool(device.wrong) == bool(fault)


@pytest.mark.parametrize("second", ["compute", "other"])
@pytest.mark.parametrize("use", ["encode", "copy"])
def test_pages_that_are_still_coming_are_used_on_another_stream(
    use: str, second: str, tmp_path: Path
) -> None:
    """Raw pages of a disk are encoded, or cut and copied, where no step joined their copies."""
    text, wrong = [*range(6 * PAGE)], list[str]()
    tiers, codec = [f"disk:{tmp_path / 'kv'}:64MiB"], "kv8" if use == "encode" else "raw"
    kv = make_kv(pages=40, tiers=tiers)
    published(kv, text)
    kv.close()
    for seed in range(6):
        kv, device = make_kv(pages=40, tiers=tiers, codec=codec, recent_tokens=0), LateDevice(seed)
        with on(device, kv):
            seq = kv.open([*text, 99])
            assert seq.reused == len(text) and device.calls
            device.current = second
            if use == "copy":
                kv.truncate(seq, len(text) - 3)
                advance(kv, [seq], [[1]])
                read(device, kv, seq)
            seq.close()
            kv.planner.publish_pending()
            assert (device.encoded > 0) == (use == "encode")
            with kv.open([*text, 99]) as seq:
                read(device, kv, seq)
        wrong += device.wrong
        kv.close()
    assert not wrong


def test_an_open_page_that_another_stream_fills_is_copied_behind_it() -> None:
    """Two threads with streams of their own: one asks for what the other is computing."""
    text, wrong = [*range(PAGE - 1)], list[str]()
    for seed in range(12):
        kv, device = make_kv(pages=40, prefetch="off"), LateDevice(seed)
        with on(device, kv):
            for device.current in ("other", "compute"):  # both use pages
                published(kv, [seed, 99])
            first = opened(kv, text)
            device.current = "other"
            with kv.open([*text, 99]) as second:
                assert second.reused == len(text)
                read(device, kv, second)
            first.close()
        wrong += device.wrong
        kv.close()
    assert not wrong


def test_streams_of_a_gpu_are_asked_for_that_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding waits for its caller's stream; the pool's memory is kept until it is over."""
    said: list[str] = []

    class Stream:
        def __init__(self, device: object) -> None:
            self.name = f"stream {len(said)}"
            said.append(self.name)

        def wait_stream(self, other: str) -> None:
            said.append(f"{self.name} waits for {other}")

        def synchronize(self) -> None:
            said.append(f"the host waits for {self.name}")

    class Pages:
        def record_stream(self, stream: Stream) -> None:
            said.append(f"pages are used by {stream.name}")

    @contextmanager
    def stream(one: Stream) -> Iterator[None]:
        said.append(f"on {one.name}")
        try:
            yield
        finally:
            said.append("on the caller's")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    streams = CudaStreams(torch.device("cuda:0"))
    name = said[-1]
    said.clear()
    with streams.encoding(Pages()):  # type: ignore[arg-type]
        said.append("work")
    order = [f"{name} waits for the caller's", f"pages are used by {name}", f"on {name}", "work"]
    assert said == [*order, "on the caller's"]
    said.clear()
    with pytest.raises(MemoryError), streams.encoding(Pages()):  # type: ignore[arg-type]
        said.append("work")
        raise MemoryError
    assert said == [*order, "on the caller's", f"the host waits for {name}"]


def test_pages_of_an_encoder_that_fails_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence stays as it is, and is encoded once its next page is full."""
    kv, transcode = make_kv(codec="kv8", recent_tokens=0), kernels.transcode

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    seq, pool = opened(kv, [*range(PAGE - 1)]), next(iter(kv.planner.store.pools.values()))
    before = pool.used_bytes()
    monkeypatch.setattr(kernels, "transcode", fails)
    with pytest.raises(torch.OutOfMemoryError):
        advance(kv, [seq], [[1]])
    assert pool.used_bytes() == before and seq.length == PAGE
    monkeypatch.setattr(kernels, "transcode", transcode)
    advance(kv, [seq], [[*range(PAGE)]])
    assert {*pool.bytes_by_codec()} == {"kv8"}
    check_content(kv, seq, seq.tokens.tolist(), within=WITHIN)
    seq.close()


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["kv8", "kv4c"])
def test_a_slow_forward_on_a_gpu(codec: str) -> None:
    """Pages are encoded as the forward leaves them, long after they were asked for."""
    shape = Geometry.uniform(layers=2, kv_heads=2, head_dim=64, page_size=64, device="cuda:0")
    kv = make_kv(shape, codec=codec, recent_tokens=0, pages=40)
    seq = kv.open([1] * 400)
    for step in kv.prefill([seq], chunk=128):
        torch.cuda._sleep(50_000_000)  # the kernels that fill the pages come late
        write(step)
    for turn in range(130):
        if not turn % 32:
            torch.cuda._sleep(50_000_000)
        advance(kv, [seq], [[turn % 50]])
    check_content(kv, seq, seq.tokens.tolist(), within=0.08)
    assert kv.stats()["devices"]["cuda:0"]["compression"] > 1.3
