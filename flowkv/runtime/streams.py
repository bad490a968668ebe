"""What copies between pinned memory and a device need of it: order, and nothing else.

Copies run on a stream of their own. `follow` makes it wait for what the caller's stream was given
so far, `lead` the caller's for what it was given so far, and a mark tells when it has come so far.
A copy reads its source when the stream comes to it, never before: the order in which a driver may
read sources ahead of the stream (`cudaMemcpySrcAccessOrderAny`) has sent half-written pages to
disks elsewhere (vLLM issue 45704), and nothing here asks for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch

from flowkv.kernels import movement

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister: for all contexts, and for kernels


class Mark(Protocol):
    """A place in the order of copies."""

    def done(self) -> bool:
        """Whether all copies before it are over."""
        ...

    def wait(self) -> None:
        """Returns when they are."""
        ...


class Streams(Protocol):
    """One device's stream of copies, beside the stream that its caller computes on."""

    name: str

    def follow(self) -> None:
        """Copies given from now on begin after what the caller's stream was given so far."""
        ...

    def lead(self) -> None:
        """What the caller's stream is given from now on begins after the copies given so far."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies bytes of equal number, in either direction."""
        ...

    def scatter(self, pages: torch.Tensor, granules: list[int], rows: torch.Tensor) -> None:
        """Copies `rows`, uint8 `[n, bytes]`, to the pages of an arena that begin there."""
        ...

    def gather(self, pages: torch.Tensor, granules: list[int], rows: torch.Tensor) -> None:
        """Copies pages of an arena into `rows`."""
        ...

    def mark(self) -> Mark:
        """The place after the copies given so far."""
        ...

    def timed(self, call: Callable[[], None]) -> float:
        """Seconds that the copies of a call take on the device."""
        ...

    def pin(self, address: int, n_bytes: int) -> str:
        """Has the device reach memory without the processor; why that does not work, or ""."""
        ...

    def unpin(self, address: int) -> None:
        """Ends `pin`."""
        ...


class CudaMark:
    """An event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def done(self) -> bool:
        """See `Mark`."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See `Mark`."""
        self._event.synchronize()


class CudaStreams:
    """The copy stream of a CUDA (or ROCm) device.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = torch.cuda.get_device_name(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """See `Streams`."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead(self) -> None:
        """See `Streams`."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Streams`."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def scatter(self, pages: torch.Tensor, granules: list[int], rows: torch.Tensor) -> None:
        """See `Streams`."""
        with torch.cuda.stream(self._stream):
            movement.scatter_pages(pages, self._places(granules), _granules(rows), rows)

    def gather(self, pages: torch.Tensor, granules: list[int], rows: torch.Tensor) -> None:
        """See `Streams`."""
        with torch.cuda.stream(self._stream):
            movement.gather_pages(pages, self._places(granules), _granules(rows), rows)

    def mark(self) -> CudaMark:
        """See `Streams`."""
        return CudaMark(self._stream)

    def timed(self, call: Callable[[], None]) -> float:
        """See `Streams`."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record(self._stream)
        call()
        end.record(self._stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def pin(self, address: int, n_bytes: int) -> str:
        """See `Streams`."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(address, n_bytes, _PORTABLE_AND_MAPPED))
        if not code:
            return ""
        with contextlib.suppress(RuntimeError):  # a later launch would be blamed for it
            torch.zeros(1, device=self.device)
        return f"cudaHostRegister of {n_bytes} bytes failed with error {code}"

    def unpin(self, address: int) -> None:
        """See `Streams`."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(address)

    def _places(self, granules: list[int]) -> torch.Tensor:
        # Made on the copy stream, so that its memory is not used again before the kernel has run.
        return torch.tensor(granules, dtype=torch.int32, device=self.device)


def _granules(rows: torch.Tensor) -> int:
    return rows.shape[1] // 4096
