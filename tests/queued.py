"""A CPU in the place of a GPU: the code for devices that compute beside their host runs on it.

Work is done at once, and is reported late: an event is over when it was asked about some times.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from flowkv import kernels
from tests.conftest import of_torch
from tests.hooks import recorder
from tests.hooks.recorder import LaunchRecorder, recorded
from tests.inside import door, graphs, operands

_RECORDER_OF = graphs.recorder_of


class Event:
    """A `torch.cuda.Event`."""

    late = random.Random(0)

    def __init__(self, enable_timing: bool = False) -> None:
        self._timing, self._at_s, self._asked = enable_timing, 0.0, 0

    def record(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)
        self._at_s, self._asked = time.perf_counter(), self.late.randrange(3)

    def query(self) -> bool:
        assert not recorder.recording(), "a captured step asks about the device's progress"
        self._asked -= 1
        return self._asked < 0

    def synchronize(self) -> None:
        assert not recorder.recording(), "a captured step waits for the device"
        self._asked = 0

    def elapsed_time(self, end: Event) -> float:
        assert self._timing and end._timing and max(self._asked, end._asked) < 0
        return 1e3 * (end._at_s - self._at_s)


class Stream:
    """A `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        assert not recorder.recording(), "a captured step waits for the device"


class Graph:
    """A `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.recorder = LaunchRecorder()

    def replay(self) -> None:
        self.recorder.replay()


class Runtime:
    """The functions of CUDA's runtime that register memory.

    Attributes:
        registered: Addresses and bytes of registered memory.
    """

    def __init__(self) -> None:
        self.registered = dict[int, int]()

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        assert address % 4096 == 0 and n_bytes > 0 and address not in self.registered
        self.registered[address] = n_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def _unpinned(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function without its argument `pin_memory`."""

    @functools.wraps(call)
    def made(*args: object, **options: object) -> torch.Tensor:
        options.pop("pin_memory", None)
        return call(*args, **options)

    return of_torch(made)


@contextmanager
def like_a_gpu(seed: int = 0) -> Iterator[Runtime]:
    """Treat the CPU as a GPU inside the block."""
    current, runtime = threading.local(), Runtime()
    default = Stream()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before = getattr(current, "stream", default)
        current.stream = stream
        try:
            yield
        finally:
            current.stream = before

    @contextmanager
    def capture(graph: Graph, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        with on(stream), recorder.keeping(graph.recorder):
            yield

    with recorded(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Event, "late", random.Random(seed))
        patch.setattr(graphs, "recorder_of", _RECORDER_OF)
        patch.setattr(door, "recorder_of", _RECORDER_OF)
        patch.setattr(operands, "GPUS", {"cuda", "cpu"})
        # Decodes that are prepared read tables in place; a device has copies of them.
        patch.setattr(kernels, "prepare_decode", lambda *_: None)
        for name, part in (
            ("Event", Event),
            ("Stream", Stream),
            ("CUDAGraph", Graph),
            ("graph", capture),
            ("stream", on),
            ("device", lambda _: nullcontext()),
            ("current_stream", lambda _=None: getattr(current, "stream", default)),
            ("cudart", lambda: runtime),
            ("memory_reserved", lambda _=None: 1 << 20),
            ("mem_get_info", lambda _=None: (1 << 30, 1 << 40)),
        ):
            patch.setattr(torch.cuda, name, part)
        patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(torch.Tensor, "new_empty", _unpinned(torch.Tensor.new_empty))
        for make in ("empty", "zeros", "zeros_like", "full_like"):
            patch.setattr(torch, make, _unpinned(getattr(torch, make)))
        yield runtime
