"""A GPU as devices: a stream that computes, and one that copies out of pinned memory.

Ops are given to streams and end by events, one for each op: the tail of a restore is loaded a layer
at a time, so that each of its stripes has one. A layer is begun when the host knows that its cells
are there; as the host is a layer ahead, the GPU does not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack

import torch

from bench.restore.canvas import Canvas
from bench.restore.device import Clock, Ended, rest
from bench.restore.processor import Link
from bench.restore.store import Mark
from flowkv.policy.restore import Op, RestoreLoad

_LAYERS_AHEAD, _LOADS_AHEAD = 3, 3


class Times:
    """Tells the time of events, by one clock.

    Args:
        device: Whose; it is idle when this is made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.synchronize(device)
        self._zero = self.record(torch.cuda.current_stream(device))
        self._zero.synchronize()
        self._zero_s = time.perf_counter()
        self._origin_s: float | None = None
        self._lock = threading.Lock()

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event behind what a stream was given. Who waits for it sleeps."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def at_s(self, event: torch.cuda.Event, clock: Clock) -> float:
        """What a clock showed at an event that is over."""
        with self._lock:  # one origin for all, so that what came later is later here
            if self._origin_s is None:
                self._origin_s = clock() - (time.perf_counter() - self._zero_s)
        return self._origin_s + float(self._zero.elapsed_time(event)) / 1e3


class CudaStream:
    """A stream of a device.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def used(self) -> AbstractContextManager[object]:
        """Within it, this thread gives work to the stream."""
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self._device))
            stack.enter_context(torch.cuda.stream(self.stream))
            return stack.pop_all()

    def mark(self) -> Mark:
        """Waits until it has done what it was given so far."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        wait: Mark = event.synchronize
        return wait


class _Given:
    """Work between two events of a stream."""

    def __init__(
        self, stream: CudaStream, first: torch.cuda.Event, times: Times, clock: Clock
    ) -> None:
        self._first, self._last = first, times.record(stream.stream)
        self._times, self._clock = times, clock

    def wait(self) -> tuple[float, float]:
        """Sleeps until it is over; when it began and ended."""
        self._last.synchronize()
        return self._times.at_s(self._first, self._clock), self._times.at_s(self._last, self._clock)


class _Computed:
    """A compute under way, in a share of the time."""

    def __init__(self, given: _Given, share: float, clock: Clock) -> None:
        self._given, self._share, self._clock = given, share, clock

    def wait(self) -> Ended:
        start_s, end_s = self._given.wait()
        if self._share < 1.0:
            end_s = start_s + (end_s - start_s) / self._share
            rest(end_s, self._clock)
        return Ended(start_s, end_s)


class CudaProcessor:
    """Computes on a stream of its own.

    Args:
        canvases: By number of the request.
        stream: The one that computes.
        times: Of the device.
        share: Of the time, what it computes in; others have the rest.

    Attributes:
        ahead: See `Device`.
    """

    def __init__(
        self,
        canvases: Mapping[int, Canvas],
        stream: CudaStream,
        times: Times,
        share: float = 1.0,
    ) -> None:
        self._canvases, self._stream, self._times = canvases, stream, times
        self._share, self.ahead = share, _LAYERS_AHEAD if share == 1.0 else 1

    def begin(self, op: Op, clock: Clock) -> _Computed:
        assert not isinstance(op, RestoreLoad)
        with self._stream.used():
            first = self._times.record(self._stream.stream)
            self._canvases[op.request].compute(op)
            given = _Given(self._stream, first, self._times, clock)
        return _Computed(given, self._share, clock)


class _Copied:
    """Copies under way, over a link with a limit."""

    def __init__(self, given: _Given, slot: tuple[float, float], ok: bool, clock: Clock) -> None:
        self._given, self._slot, self._ok, self._clock = given, slot, ok, clock

    def wait(self) -> Ended:
        start_s, end_s = self._given.wait()
        rest(self._slot[1], self._clock)
        return Ended(max(start_s, self._slot[0]), max(end_s, self._slot[1]), self._ok)


class CudaCopier:
    """Loads on a stream of its own.

    Args:
        link: What it loads over; its stores give out pinned memory.
        stream: The one that copies.
        times: Of the device.

    Attributes:
        ahead: See `Device`.
    """

    def __init__(self, link: Link, stream: CudaStream, times: Times) -> None:
        self._link, self._stream, self._times, self.ahead = link, stream, times, _LOADS_AHEAD

    def begin(self, op: Op, clock: Clock) -> _Copied:
        assert isinstance(op, RestoreLoad)
        slot = self._link.slot(op, clock())
        with self._stream.used():
            first = self._times.record(self._stream.stream)
            ok = self._link.copy(op, self._stream.mark)
            given = _Given(self._stream, first, self._times, clock)
        return _Copied(given, slot, ok, clock)
