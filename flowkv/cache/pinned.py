"""Pages between a device and pinned memory, through slots that live as long as their copies.

    stage -> a tier fills the rows -> upload those that came -> flush        to the device
    download -> a tier reads the rows                                        from the device

Rows of one `stage` lie side by side in a slot of the staging arena, which is registered with the
device once. The slot is used again when nobody refers to its rows any more: neither whoever staged
them, nor a tier that was given their memory and is late, nor a copy. For a copy reads its source
when the device comes to it, long after it was asked for (TensorRT-LLM issue 15546).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from flowkv.core.geometry import GRANULE_BYTES
from flowkv.kernels import dispatch
from flowkv.tiers.io.engine import Arena, ArenaSlot

# What copies between pinned memory and a device need of it: order, and nothing else.
#
# Copies run on a stream of their own. `follow` makes it wait for what the caller's stream was
# given so far, `lead` the caller's for what it was given so far, and a mark tells when it has
# come so far. A copy reads its source when the stream comes to it, never before: the order in
# which a driver may read sources ahead of the stream (`cudaMemcpySrcAccessOrderAny`) has sent
# half-written pages to disks elsewhere (vLLM issue 45704), and nothing here asks for it.

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister: for all contexts, and for kernels


class CudaMark:
    """A place in the order of copies: an event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def done(self) -> bool:
        """Whether all copies before it are over."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Returns when they are."""
        self._event.synchronize()


class CudaStreams:
    """The copy stream of a CUDA (or ROCm) device, beside the stream that its caller computes on.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Copies given from now on begin after what the caller's stream was given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead(self) -> None:
        """What the caller's stream is given from now on begins after the copies given so far."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies bytes of equal number, in either direction."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def scatter(self, pages: torch.Tensor, granules: list[int], rows: torch.Tensor) -> None:
        """Copies `rows`, uint8 `[n, bytes]`, to the pages of an arena that begin there."""
        with torch.cuda.stream(self._stream):
            dispatch.scatter_pages(pages, self._places(granules), _granules(rows), rows)

    def gather(self, pages: torch.Tensor, granules: list[int], rows: torch.Tensor) -> None:
        """Copies pages of an arena into `rows`."""
        with torch.cuda.stream(self._stream):
            dispatch.gather_pages(pages, self._places(granules), _granules(rows), rows)

    def mark(self) -> CudaMark:
        """The place after the copies given so far."""
        return CudaMark(self._stream)

    def pin(self, address: int, n_bytes: int) -> str:
        """Has the device reach memory without the processor; why that does not work, or ""."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(address, n_bytes, _PORTABLE_AND_MAPPED))
        if not code:
            return ""
        with contextlib.suppress(RuntimeError):  # a later launch would be blamed for it
            torch.zeros(1, device=self.device)
        return f"cudaHostRegister of {n_bytes} bytes failed with error {code}"

    def unpin(self, address: int) -> None:
        """Ends `pin`."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(address)

    def _places(self, granules: list[int]) -> torch.Tensor:
        # Made on the copy stream, so that its memory is not used again before the kernel has run.
        return torch.tensor(granules, dtype=torch.int32, device=self.device)


def _granules(rows: torch.Tensor) -> int:
    return rows.shape[1] // 4096


KERNEL_BYTES, LEAST_PIECES = 28 << 10, 16
"""Pieces below this size, and so many of them, are copied by one kernel. A copy engine is told of
each piece, which takes about as long as 30 KB of copying; one kernel moves thousands of small ones,
but occupies processors (vLLM's `swap_blocks_triton` draws the same line; figures in its "KV
offloading connector" report of January 2026)."""

STAGING_BYTES = 256 << 20


class Copies:
    """Copies between the pages of one device and pinned memory. Callers hold the KV lock.

    Args:
        streams: Of the device.
        pages: uint8 `[bytes]`, the arena of the device's pages.
        arena: Staging memory that is registered with the device; None for torch's own.
        why: Why there is no arena.
        kernel_bytes: Smaller pieces are copied by a kernel,
        least_pieces: if they are so many.
    """

    def __init__(
        self,
        streams: CudaStreams,
        pages: torch.Tensor,
        arena: Arena | None,
        *,
        why: str = "",
        kernel_bytes: int = KERNEL_BYTES,
        least_pieces: int = LEAST_PIECES,
    ) -> None:
        self.streams, self.pages, self.arena, self.why = streams, pages, arena, why
        self._kernel_bytes, self._least_pieces = kernel_bytes, least_pieces
        self._unused: deque[ArenaSlot] = deque()  # whose rows are gone; a finalizer may only append
        self._queue: list[tuple[int, torch.Tensor]] = []  # (granule, row)
        self._leaving: deque[tuple[CudaMark, list[torch.Tensor]]] = deque()
        self._end = weakref.finalize(self, _end, streams, arena, self._leaving)
        self._end.atexit = False

    def stage(self, count: int, n_bytes: int) -> list[torch.Tensor]:
        """Rows of pinned memory, with whatever was there before.

        Args:
            count: How many.
            n_bytes: Of each, a multiple of 4096.
        """
        if not count:
            return []
        self._reclaim()
        slot = self._slot(count * n_bytes)
        if slot is None:
            pin = self.pages.device.type == "cuda"
            rows = self.pages.new_empty((count, n_bytes), pin_memory=pin, device="cpu")
            return list(rows)
        view = memoryview(slot.view)  # what the rows, and all that is made of them, keep alive
        weakref.finalize(view, self._unused.append, slot).atexit = False
        return list(torch.frombuffer(view, dtype=torch.uint8).view(count, n_bytes))

    def upload(self, row: torch.Tensor, granule: int) -> None:
        """Queues the copy of a staged row to the page at a granule."""
        self._queue.append((granule, row))

    def flush(self) -> None:
        """Gives queued copies to the device; what it computes from now on sees them."""
        if not self._queue:
            return
        queue, self._queue = sorted(self._queue, key=lambda x: x[1].data_ptr()), []
        self.streams.follow()  # the pages may still be read as what they were before
        self._move(queue, to_device=True)
        self.streams.lead()
        self._leaving.append((self.streams.mark(), [row for _, row in queue]))

    def send(self, row: torch.Tensor, target: torch.Tensor) -> CudaMark:
        """Copies a staged row to memory of the device, beside the pages.

        What the device was given so far may still read that memory; what it computes from now on
        sees the copy.

        Returns:
            A mark of the copy: until then the row stays as it is.
        """
        self.streams.follow()
        self.streams.copy(target, row)
        self.streams.lead()
        mark = self.streams.mark()
        self._leaving.append((mark, [row]))
        return mark

    def join(self) -> None:
        """What the caller's stream is given from now on begins after all copies under way."""
        self._reclaim()
        if self._leaving:
            self.streams.lead()

    def download(self, granules: Sequence[int], n_bytes: int) -> list[torch.Tensor]:
        """Copies pages into staged rows, which hold them when this returns.

        Args:
            granules: Where the pages begin.
            n_bytes: Of each.
        """
        rows = self.stage(len(granules), n_bytes)
        if rows:
            self.streams.follow()  # whoever computes the pages must be done with them
            self._move(list(zip(granules, rows, strict=True)), to_device=False)
            self.streams.mark().wait()
        return rows

    def has_room(self, n_bytes: int) -> bool:
        """Whether rows of so many bytes would lie in the arena, or never would."""
        self._reclaim()
        most = 0 if self.arena is None else self.arena.n_bytes
        return n_bytes > most or self.staged_bytes() + n_bytes <= most

    def staged_bytes(self) -> int:
        """Bytes of the arena that rows occupy, those of copies under way among them."""
        self._reclaim()
        return 0 if self.arena is None else self.arena.n_bytes - self.arena.free_bytes

    def close(self) -> None:
        """Waits for the copies under way, and unpins the arena, which goes with its last row."""
        self.flush()
        self._end()
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def _slot(self, n_bytes: int) -> ArenaSlot | None:
        """A slot of the arena, once copies that are under way have left one."""
        if self.arena is None or n_bytes > self.arena.n_bytes:
            return None
        while (slot := self.arena.take(n_bytes)) is None and self._leaving:
            self._leave()
        return slot

    def _reclaim(self) -> None:
        """Takes back what copies that are over, and whoever else, have let go of."""
        while self._leaving and self._leaving[0][0].done():
            self._leaving.popleft()
        while self._unused and self.arena is not None:
            self.arena.give_back(self._unused.popleft())

    def _leave(self) -> None:
        self._leaving[0][0].wait()
        self._leaving.popleft()
        self._reclaim()

    def _move(self, queue: list[tuple[int, torch.Tensor]], *, to_device: bool) -> None:
        """Copies neighbouring rows in one go, by a kernel if they are many and small."""
        kernel = self.streams.scatter if to_device else self.streams.gather
        for run in _runs(queue):
            granules, first = [granule for granule, _ in run], run[0][1]
            if len(first) < self._kernel_bytes and len(run) >= self._least_pieces:
                kernel(self.pages, granules, _joined(first, len(run)).view(len(run), len(first)))
                continue
            start = 0
            for end in range(1, len(run) + 1):
                step = len(first) // GRANULE_BYTES
                if end < len(run) and granules[end] == granules[end - 1] + step:
                    continue  # side by side on both sides: one piece
                row = _joined(run[start][1], end - start)
                page = self.pages[granules[start] * GRANULE_BYTES :][: len(row)]
                self.streams.copy(*((page, row) if to_device else (row, page)))
                start = end


def open_copies(streams: CudaStreams, pages: torch.Tensor, n_bytes: int = STAGING_BYTES) -> Copies:
    """Copies for the pages of a device.

    Where the driver does not pin the arena, torch's own pinned memory is used, and `why` says so.

    Args:
        streams: Of the device.
        pages: uint8 `[bytes]`, the arena of its pages.
        n_bytes: Of staging memory.
    """
    arena = Arena(n_bytes)
    why = streams.pin(arena.address, arena.n_bytes)
    if why:
        arena.close()
    return Copies(streams, pages, None if why else arena, why=why)


def _end(
    streams: CudaStreams, arena: Arena | None, leaving: deque[tuple[CudaMark, list[torch.Tensor]]]
) -> None:
    """Neither pages nor pinned memory go before the copies that use them."""
    while leaving:
        leaving[0][0].wait()
        leaving.popleft()
    if arena is not None:
        streams.unpin(arena.address)


def _runs(queue: list[tuple[int, torch.Tensor]]) -> list[list[tuple[int, torch.Tensor]]]:
    """Splits rows, sorted by address, where two are no neighbours of one `stage`."""
    runs: list[list[tuple[int, torch.Tensor]]] = []
    for granule, row in queue:
        last = runs[-1][-1][1] if runs else None
        beside = (
            last is not None
            and last.data_ptr() + len(last) == row.data_ptr()
            and last.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
        )
        if beside:
            runs[-1].append((granule, row))
        else:
            runs.append([(granule, row)])
    return runs


def _joined(first: torch.Tensor, count: int) -> torch.Tensor:
    """The bytes of a row and of those behind it."""
    return first.as_strided((count * len(first),), (1,))
