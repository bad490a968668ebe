"""A CPU in the place of a GPU: the code for devices that compute beside their host runs on it.

Work is done at once, and is reported late: an event is over when it was asked about some times.
Copies between pinned memory and the device are as late as they may be:

- The host finds ones in the target of a copy from the device, until an event behind it is over.
- A copy on a stream of its own is done when that event is over, or another stream waits for it.
- The source of a copy to the device must not change before that event is over.
"""

from __future__ import annotations

import ctypes
import functools
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from flowkv import kernels
from tests.conftest import of_torch
from tests.hooks import recorder
from tests.hooks.recorder import LaunchRecorder, recorded
from tests.inside import GRANULE_BYTES, dispatch, door, graphs, operands, slots

_RECORDER_OF = graphs.recorder_of
_COPY, _TO, _CLONE = torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.clone
_GATHER, _SCATTER = dispatch.gather_pages, dispatch.scatter_pages


Work = Generator[None, None, None]
"""Work of a stream: the device comes to it at the first `next`; the second is its end."""

_ORDER = threading.RLock()
_MOST = 256  # work of a stream whose end is not known


class Event:
    """A `torch.cuda.Event`."""

    late = random.Random(0)

    def __init__(self, enable_timing: bool = False) -> None:
        self._timing, self._at_s, self._asked = enable_timing, 0.0, 0
        self.stream, self.behind = Stream(), 0

    def record(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)
        self._at_s, self._asked = time.perf_counter(), self.late.randrange(3)
        self.stream, self.behind = stream, stream.queued

    def query(self) -> bool:
        assert not recorder.recording(), "a captured step asks about the device's progress"
        self._asked -= 1
        if self._asked < 0:
            self.stream.end(self.behind)
        return self._asked < 0

    def synchronize(self) -> None:
        assert not recorder.recording(), "a captured step waits for the device"
        self._asked = 0
        self.stream.end(self.behind)

    def elapsed_time(self, end: Event) -> float:
        assert self._timing and end._timing and max(self._asked, end._asked) < 0
        return 1e3 * (end._at_s - self._at_s)


class Stream:
    """A `torch.cuda.Stream`.

    Attributes:
        eager: Whether all of its work is done when it is queued.
        queued: Number of works queued so far.
    """

    def __init__(self, device: Any = None, priority: int = 0, *, eager: bool = False) -> None:
        self.device, self.eager, self.queued, self._come = device, eager, 0, 0
        self._works = deque[Work]()  # those that are not over, the latest last

    def queue(self, work: Work, *, eager: bool = False) -> None:
        with _ORDER:
            self._works.append(work)
            self.queued += 1
            if self.eager or eager:
                self.come(self.queued)
            self.end(self.queued - _MOST)

    def come(self, behind: int) -> None:
        """Bring the device to the end of the first works."""
        with _ORDER:
            while self._come < behind:
                self._come += 1
                next(self._works[self._come - self.queued - 1], None)

    def end(self, behind: int) -> None:
        """End the first works."""
        with _ORDER:
            self.come(behind)
            while self.queued - len(self._works) < behind:
                next(self._works.popleft(), None)

    def _after(self, stream: Stream, behind: int) -> Work:
        stream.come(behind)
        yield
        stream.end(behind)

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)
        self.queue(self._after(stream, stream.queued))

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)
        self.queue(self._after(event.stream, event.behind))

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        assert not recorder.recording(), "a captured step waits for the device"
        self.end(self.queued)


class Graph:
    """A `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.recorder = LaunchRecorder()

    def replay(self) -> None:
        self.recorder.replay()


class Memory:
    """Bytes of a tensor; where they are registered, the tensor itself may be gone before."""

    def __init__(self, tensor: torch.Tensor, runtime: Runtime) -> None:
        assert tensor.is_contiguous()
        self._address, self._n_bytes, self._runtime = tensor.data_ptr(), tensor.nbytes, runtime
        self._kept = None if runtime.registers(self._address) else tensor

    def read(self) -> bytes:
        there = self._kept is not None or self._runtime.registers(self._address)
        return ctypes.string_at(self._address, self._n_bytes) if there else b""

    def write(self, content: bytes) -> None:
        assert self._kept is not None or self._runtime.registers(self._address)
        ctypes.memmove(self._address, content, self._n_bytes)

    def spoil(self) -> None:
        self.write(b"\xff" * self._n_bytes)


class Runtime:
    """The functions of CUDA's runtime that register memory.

    Attributes:
        registered: Addresses and bytes of registered memory.
        faults: What was done wrong with memory of copies.
        late: Says how late events are.
    """

    def __init__(self, seed: int) -> None:
        self.registered, self.faults = dict[int, int](), list[str]()
        self.late = random.Random(seed)
        self._pinned = set[int]()

    def registers(self, address: int) -> bool:
        """Return whether memory is registered."""
        held = self.registered
        return any(first <= address < first + held.get(first, 0) for first in list(held))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a new tensor's memory as pinned, and return the tensor."""
        storage = tensor.untyped_storage()
        if address := storage.data_ptr():
            self._pinned.add(address)
            weakref.finalize(storage, self._pinned.discard, address).atexit = False
        return tensor

    def pins(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in pinned memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned or self.registers(
            tensor.data_ptr()
        )

    def from_device(self, target: Memory, source: Memory) -> Work:
        """Copy to pinned memory; its content is undefined from now on."""
        target.spoil()

        def work() -> Work:
            found = source.read()
            yield
            target.write(found)

        return work()

    def to_device(self, read: Callable[[], bytes], copy: Callable[[], object]) -> Work:
        """Copy from pinned memory."""
        before = read()
        copy()
        yield
        if read() not in (before, b""):
            self.faults.append("memory changed before the copy from it was over")

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        assert address % 4096 == 0 and n_bytes > 0 and address not in self.registered
        self.registered[address] = n_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def _pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a maker of tensors whose argument `pin_memory` is the stand-in's."""

    @functools.wraps(make)
    def made(*args: object, **options: object) -> torch.Tensor:
        pinned = options.pop("pin_memory", False)
        found = make(*args, **options)
        return torch.cuda._late_pin(found) if pinned else found  # type: ignore[attr-defined]

    return of_torch(made)


def _late(name: str) -> Callable[..., torch.Tensor]:
    """Return a method of tensors that is a function of the stand-in, which names of models skip."""

    def called(*args: object, **options: object) -> torch.Tensor:
        found: torch.Tensor = getattr(torch.cuda, name)(*args, **options)
        return found

    return of_torch(called)


def _only(work: Callable[[], object]) -> Work:
    work()
    yield


@contextmanager
def _among(kinds: set[str], kind: str) -> Iterator[None]:
    """Have a kind in a set, inside the block."""
    new = {kind} - kinds
    kinds |= new
    try:
        yield
    finally:
        kinds -= new


@contextmanager
def like_a_gpu(seed: int = 0) -> Iterator[Runtime]:
    """Treat the CPU as a GPU inside the block."""
    current, runtime = threading.local(), Runtime(seed)
    default = Stream(eager=True)

    def stream_now(_: object = None) -> Stream:
        found: Stream = getattr(current, "stream", default)
        return found

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, current.stream = stream_now(), stream
        try:
            yield
        finally:
            current.stream = before

    @contextmanager
    def capture(graph: Graph, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        with on(stream), recorder.keeping(graph.recorder):
            yield

    memory = functools.partial(Memory, runtime=runtime)

    def parts(data: torch.Tensor, lines: torch.Tensor, granules: int) -> list[Memory]:
        firsts = [GRANULE_BYTES * line for line in lines.tolist()]
        return [memory(data[first:][: granules * GRANULE_BYTES]) for first in firsts]

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        if non_blocking and runtime.pins(source):
            there, here = memory(target), memory(source)
            work = runtime.to_device(here.read, lambda: there.write(here.read()))
            stream_now().queue(work)
        elif non_blocking and runtime.pins(target):
            stream_now().queue(runtime.from_device(memory(target), memory(source)))
        else:
            _COPY(target, source)
        return target

    def to(source: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        late = options.pop("non_blocking", False) and options.get("copy", False)
        made = _TO(source, *args, **options)
        if late and made.numel():  # from the device
            made = made.contiguous()
            work = runtime.from_device(memory(runtime.pin(made)), memory(_CLONE(made)))
            stream_now().queue(work, eager=True)
        return made

    def gather_pages(pages: Any, source: Any, size: int, out: Any, *, lines: Any = None) -> None:
        move = functools.partial(_GATHER, pages, source, size, out, lines=lines)
        if lines is None or stream_now() is default or not runtime.pins(out):
            return move()
        for part in parts(out, lines, size):
            part.spoil()
        stream_now().queue(_only(move))

    def scatter_pages(pages: Any, target: Any, size: int, data: Any, *, lines: Any = None) -> None:
        move = functools.partial(_SCATTER, pages, target, size, data, lines=lines)
        if lines is None or stream_now() is default or not runtime.pins(data):
            return move()
        held = parts(data, lines, size)
        stream_now().queue(runtime.to_device(lambda: b"".join(x.read() for x in held), move))

    with recorded(), _among(operands.GPUS, "cpu"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Event, "late", runtime.late)
        patch.setattr(graphs, "recorder_of", _RECORDER_OF)
        patch.setattr(door, "recorder_of", _RECORDER_OF)
        for name in ("CHUNK_BYTES", "AHEAD_BYTES"):  # there are many caches, and few pages
            patch.setattr(slots, name, 4 << 20)
        # Decodes that are prepared read tables in place; a device has copies of them.
        patch.setattr(kernels, "prepare_decode", lambda *_: None)
        for name, part in (
            *(("Event", Event), ("Stream", Stream), ("CUDAGraph", Graph), ("graph", capture)),
            *(("stream", on), ("device", lambda _: nullcontext())),
            *(("current_stream", stream_now), ("cudart", lambda: runtime)),
            ("memory_reserved", lambda _=None: 1 << 20),
            ("mem_get_info", lambda _=None: (1 << 30, 1 << 40)),
        ):
            patch.setattr(torch.cuda, name, part)
        methods = copy_, to, lambda tensor: runtime.pin(_CLONE(tensor))
        for name, method in zip(("copy_", "to", "pin_memory"), methods, strict=True):
            patch.setattr(torch.cuda, f"_late_{name}", method, raising=False)
            patch.setattr(torch.Tensor, name, _late(f"_late_{name}"))
        patch.setattr(torch.cuda, "_late_pin", runtime.pin, raising=False)
        patch.setattr(torch.Tensor, "new_empty", _pinning(torch.Tensor.new_empty))
        for name in ("empty", "zeros", "zeros_like", "full_like"):
            patch.setattr(torch, name, _pinning(getattr(torch, name)))
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(dispatch, "gather_pages", gather_pages)
        patch.setattr(dispatch, "scatter_pages", scatter_pages)
        yield runtime
