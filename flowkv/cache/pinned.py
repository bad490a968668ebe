"""Copies of pages between a device and pinned host memory, each in a slot of its own.

    stage -> a tier fills the rows -> upload the loaded rows -> flush        to the device
    download -> a tier reads the rows, or keeps them                         from the device

A slot is reused when nothing refers to its row any more: neither its owner, nor a late tier that
still has its memory, nor a copy. A copy reads its source when the device comes to it, long after it
was queued (TensorRT-LLM issue 15546). The slots are those of the host tier, if there is one: its
pages need no further copy on the way, in either direction.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from flowkv.core.digest import DIGEST_BYTES
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.kernels import dispatch
from flowkv.kernels.operands import GPUS, sent
from flowkv.tiers.host import SlotPool

# Order of the copies between pinned memory and a device.
#
# Copies run on streams of their own, one for each direction. `follow` makes them wait for the work
# queued so far on the streams that use pages (`use`); `lead` makes the caller's stream wait for the
# copies to the device so far, `after` for one mark; a mark is a place in the order of one
# direction. Copies from the device wait for earlier copies to it; only writes to a page that became
# free wait for the copy that reads it, and for other streams that used it. A copy reads its source
# when the stream comes to it, never before: the order in which a driver may read sources ahead of
# the stream (`cudaMemcpySrcAccessOrderAny`) has sent half-written pages to disks elsewhere (vLLM
# issue 45704), and is not requested here.

Places = Sequence[int]

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister: for all contexts, and for kernels


class CudaMark:
    """A place in the order of copies.

    Attributes:
        event: CUDA event that the device records there.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def done(self) -> bool:
        """Return whether all copies before the mark are over."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait for all copies before the mark; return False if the time ran out first."""
        if timeout_s == math.inf:
            self.event.synchronize()
            return True
        end_s = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= end_s:
                return False
            time.sleep(2e-4)
        return True


class CudaStreams:
    """Streams of a CUDA (or ROCm) device for copies and encoding, beside its caller's stream.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up, self._down, self._aside = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
        self._users, self._encodes = list[torch.cuda.Stream](), False

    def use(self, *, behind: bool = False) -> None:
        """Record that the caller's stream uses pages from now on, after other streams' work so far.

        Args:
            behind: Whether a stream that used pages before also waits for that work.
        """
        stream = torch.cuda.current_stream(self.device)
        new = stream not in self._users and not self._encodes  # pages that are encoded stay lent
        for other in self._users if new or behind else ():
            if other != stream:
                stream.wait_stream(other)
        if new:
            self._users.append(stream)

    def used(self) -> list[CudaMark]:
        """Return a mark after the work of each stream that uses pages; none if it is only one."""
        return [CudaMark(stream) for stream in self._users] if len(self._users) > 1 else []

    def follow(self) -> None:
        """Make later copies begin after the work queued on the streams that use pages so far."""
        self.use()
        for stream in self._users:
            self._up.wait_stream(stream)
        self._down.wait_stream(self._up)

    @contextlib.contextmanager
    def encoding(self, pages: torch.Tensor) -> Iterator[None]:
        """Queue the block's work on a stream of its own, behind all work on pages so far.

        The memory of `pages` is not used for anything else before that work is over. If the block
        raises, that work is over then.
        """
        self.use()
        for stream in self._users:
            self._aside.wait_stream(stream)
        pages.record_stream(self._aside)
        self._encodes = True
        try:
            with torch.cuda.stream(self._aside):
                yield
        except BaseException:
            self._aside.synchronize()
            raise
        finally:
            self._encodes = False

    def lead(self) -> None:
        """Make later work on the caller's stream begin after the copies to the device so far."""
        torch.cuda.current_stream(self.device).wait_stream(self._up)

    def after(self, mark: CudaMark) -> None:
        """Make later work on the caller's stream begin after a mark."""
        torch.cuda.current_stream(self.device).wait_event(mark.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        """Queue a copy of one tensor to another of equal size, on the stream of its direction."""
        with torch.cuda.stream(self._up if to_device else self._down):
            target.copy_(source, non_blocking=True)

    def move(self, pages: torch.Tensor, granules: Places, memory: torch.Tensor, lines: Places,
             n_bytes: int, *, to_device: bool) -> None:  # fmt: skip
        """Copy lines of pinned memory, given by their first granules, to pages, or back."""
        kernel = dispatch.scatter_pages if to_device else dispatch.gather_pages
        with torch.cuda.stream(self._up if to_device else self._down):
            places, lines_there = self._places(granules, lines)
            kernel(pages, places, n_bytes // GRANULE_BYTES, memory, lines=lines_there)

    def digest(self, pages: torch.Tensor, granules: Places, stripes: int, n_bytes: int,
               memory: torch.Tensor, *, to_device: bool) -> None:  # fmt: skip
        """Copy the digests of pages to pinned memory, behind the copies of one direction."""
        with torch.cuda.stream(self._up if to_device else self._down):
            source, _ = self._places(granules, granules)
            found = dispatch.digest_pages(pages, source, n_bytes // GRANULE_BYTES, stripes)
            memory.copy_(found.view(-1).view(torch.uint8), non_blocking=True)

    def mark(self, *, to_device: bool) -> CudaMark:
        """Return a mark after the copies of one direction that were queued so far."""
        return CudaMark(self._up if to_device else self._down)

    def pin(self, address: int, n_bytes: int) -> str:
        """Register host memory with the device; return the reason of a failure, or ""."""
        with torch.cuda.device(self.device):  # any thread may ask
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(address, n_bytes, _PORTABLE_AND_MAPPED))
        if not code:
            return ""
        with contextlib.suppress(RuntimeError):  # clears the error, else a later launch raises it
            torch.zeros(1, device=self.device)
        return f"cudaHostRegister of {n_bytes} bytes failed with error {code}"

    def unpin(self, address: int) -> None:
        """Unregister memory that `pin` registered."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(address)

    def _places(self, granules: Places, lines: Places) -> tuple[torch.Tensor, torch.Tensor]:
        # Both lists begin at a multiple of 16 bytes: kernels are compiled for that.
        count = len(granules)
        both = np.zeros((2, -(-count // 4) * 4), np.int32)
        both[0, :count], both[1, :count] = granules, lines
        # The tensor is made on the copy's stream: its memory is not reused before the kernel ran.
        there = sent(torch.from_numpy(both), self.device)
        return there[0, :count], there[1, :count]


KERNEL_BYTES, LEAST_PIECES = 2 << 20, 16
"""At least so many pieces of at most this size are copied by one kernel. A copy engine takes one
call a piece, 37 us of Python: the time of 2 MiB over the link (measured on an H200)."""

STAGING_BYTES = 256 << 20

BATCH_BYTES = 1 << 27
"""Most bytes of pages that leave or come in one batch: a batch costs a millisecond of Python."""

_DIGESTS_BYTES = 1 << 22
"""Pinned memory for the digests of batches under way."""


class Copies:
    """Copies between the pages of one device and pinned memory. Callers hold the KV lock.

    Args:
        streams: Copy streams of the device.
        pages: uint8 `[bytes]`, the arena of the device's pages.
        slots: Memory that is registered with the device; where it cannot be, torch's own is used.
        most_bytes: Most bytes of rows in transit (see `has_room`).
    """

    kernel_bytes, least_pieces = KERNEL_BYTES, LEAST_PIECES

    def __init__(
        self, streams: CudaStreams, pages: torch.Tensor, slots: SlotPool, *,
        most_bytes: int = STAGING_BYTES,
    ) -> None:  # fmt: skip
        self.streams, self.pages, self.slots = streams, pages, slots
        self.most_bytes = most_bytes
        self._queue: list[tuple[int, torch.Tensor]] = []  # (granule, row)
        self._batches: list[list[tuple[int, torch.Tensor]]] = []  # one, and those that failed
        # Rows of copies under way to the device, and from it with the pages that are read.
        self._coming: _Copying = deque()
        self._leaving: _Copying = deque()
        self._copies = itertools.count()
        self._read: dict[int, tuple[int, CudaMark]] = {}  # by granule: end of the copy that reads
        self._freed: tuple[int, CudaMark] | None = None  # latest such end of a page freed since
        self._used: list[CudaMark] = []  # last uses of freed pages, where several streams use pages
        self._small = SlotPool(_DIGESTS_BYTES)
        self._end = weakref.finalize(self, _end, self._coming, self._leaving)
        self._end.atexit = False

    def stage(self, count: int, n_bytes: int) -> list[torch.Tensor]:
        """Return rows of pinned memory, with arbitrary content.

        Args:
            count: Number of rows.
            n_bytes: Bytes of each, a multiple of 4096.
        """
        self._reclaim()
        rows = list[torch.Tensor]()
        while len(rows) < count:
            arrays = self.slots.acquire_all(count - len(rows), n_bytes, pinned=True)
            rows += map(torch.from_numpy, arrays)
            if len(rows) == count:
                break
            if (self._coming or self._leaving) and self.slots.pinned:
                (self._coming or self._leaving)[0][0].wait()
                self._reclaim()
            else:
                rows += list(self._pinned(count - len(rows), n_bytes))
        return rows

    def _pinned(self, count: int, n_bytes: int) -> torch.Tensor:
        """Return rows of torch's own pinned memory."""
        pin = self.pages.device.type in GPUS
        return self.pages.new_empty((count, n_bytes), pin_memory=pin, device="cpu")

    def _digests(self, count: int, n_bytes: int) -> torch.Tensor:
        """Return pinned memory for the digests of some pages."""
        self._small.register(self.streams.pin, self.streams.unpin)
        found = self._small.acquire(count * n_bytes, pinned=True)
        if found is None:
            return self._pinned(count, n_bytes)
        return torch.from_numpy(found).view(count, n_bytes)

    def upload(self, rows: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Queue the copies of rows to the pages at granules."""
        self._queue += rows

    def launch(self) -> None:
        """Start the queued copies to the device; work queued there from now on sees them."""
        if self._queue:
            self._batches.append(self._queue)
            self._queue = []
        if not self._batches:
            return
        self.reuse()
        self.streams.follow()  # earlier work may still read the pages' old content
        try:
            for batch in self._batches:  # in their order: a page may have been given to another
                self._move(batch, to_device=True)
        finally:  # copies that were begun use the rows
            self.streams.lead()
            rows = [row for batch in self._batches for _, row in batch]
            self._coming.append((self.streams.mark(to_device=True), rows, ()))
        self._batches = []  # if anything raises, `join` tries again before the pages are read

    def send(self, row: torch.Tensor, target: torch.Tensor) -> CudaMark:
        """Start copying a staged row to memory of the device outside the pages.

        Work queued on the device so far may still read that memory; later work sees the copy.

        Returns:
            The mark of the copy: until then the row must not change.
        """
        self.streams.follow()
        self.streams.copy(target, row, to_device=True)
        self.streams.lead()
        mark = self.streams.mark(to_device=True)
        self._coming.append((mark, [row], ()))
        return mark

    def join(self) -> None:
        """Make later work on the caller's stream begin after the copies that it may depend on.

        These are all copies to the device, and copies from pages that have become free.
        """
        self.streams.use()
        self.launch()
        self.reuse()
        if self._coming or self._leaving:
            self._reclaim()
        if self._coming:
            self.streams.lead()

    def download(
        self, granules: Sequence[int], n_bytes: int
    ) -> tuple[list[torch.Tensor], CudaMark]:
        """Start copying pages into staged rows; the pages must not change until they are free.

        Args:
            granules: First granules of the pages.
            n_bytes: Bytes of each.

        Returns:
            The rows, and the mark after which they hold the pages.
        """
        self.launch()
        staged = iter(sorted(self.stage(len(granules), n_bytes), key=torch.Tensor.data_ptr))
        # Neighbours on the device are neighbours in memory: they go, and come back, in one piece.
        there = {granule: next(staged) for granule in sorted(granules)}
        rows = [there[granule] for granule in granules]
        self.streams.follow()  # the work that computes the pages must be done first
        try:
            self._move(list(zip(granules, rows, strict=True)), to_device=False)
        finally:  # copies that were begun use the rows
            mark = self.streams.mark(to_device=False)
            self._leaving.append((mark, rows, granules))
            self._read.update(dict.fromkeys(granules, (next(self._copies), mark)))
        return rows, mark

    def digest(self, granules: Sequence[int], n_bytes: int, stripes: int, *,
               to_device: bool = False) -> torch.Tensor:  # fmt: skip
        """Start digesting pages on the device, where no copy can have changed them.

        Args:
            granules: First granules of the pages.
            n_bytes: Bytes of each.
            stripes: Stripes of each.
            to_device: Whether to begin behind the copies to the device, not those from it.

        Returns:
            uint8 `[pages, 16 * stripes]`, pinned; filled at the mark of a later copy.
        """
        self.launch()
        found = self._digests(len(granules), DIGEST_BYTES * stripes)
        self.streams.follow()  # the work that computes the pages must be done first
        where = self.pages, granules, stripes, n_bytes, found.view(-1)
        try:
            self.streams.digest(*where, to_device=to_device)
        finally:  # once it was begun, it uses the memory
            mark = self.streams.mark(to_device=to_device)
            (self._coming if to_device else self._leaving).append((mark, [found], ()))
        return found

    def verify(self, rows: Sequence[torch.Tensor], granules: Sequence[int],
               known: Sequence[bytes]) -> Callable[[], list[bool]]:  # fmt: skip
        """Start copying rows of one size to pages, and digesting them there.

        Args:
            rows: Rows.
            granules: Granule for each where it goes.
            known: Digests of the stripes of each.

        Returns:
            A call that waits, and returns which pages have their digests.
        """
        self.upload(zip(granules, rows, strict=True))
        found = self.digest(granules, len(rows[0]), len(known[0]) // DIGEST_BYTES, to_device=True)
        mark = self._coming[-1][0]

        def sound() -> list[bool]:
            mark.wait()
            return [bytes(made) == one for made, one in zip(found.numpy(), known, strict=True)]

        return sound

    def free(self, *granules: int) -> None:
        """Record that pages are free, although a copy or another stream may still read them."""
        self._used = self.streams.used() or self._used
        for granule in granules:
            read = self._read.get(granule)
            if read is not None:
                self._freed = max(read, self._freed or read)

    def reuse(self) -> None:
        """Make later work on the caller's stream begin after the last uses of freed pages."""
        if self._used:
            self._used = [mark for mark in self._used if not mark.done()]
            for mark in self._used:
                self.streams.after(mark)
        if self._freed is not None:
            if self._freed[1].done():
                self._freed = None
            else:
                self.streams.after(self._freed[1])

    def has_room(self, n_bytes: int) -> bool:
        """Return whether rows of `n_bytes` may be staged now, within `most_bytes` of slots.

        True also where nothing is staged, and where no slots are registered.
        """
        staged = self.staged_bytes()
        return not self.slots.pinned or not staged or staged + n_bytes <= self.most_bytes

    def staged_bytes(self) -> int:
        """Return the bytes of slots in transit: in use, but not kept by the host tier."""
        self._reclaim()
        return max(0, self.slots.used_bytes - self.slots.kept_bytes) if self.slots.pinned else 0

    def close(self) -> None:
        """Start the queued copies, and wait for all copies under way."""
        self.launch()
        self._end()

    def _reclaim(self) -> None:
        """Release the rows and pages of finished copies."""
        while self._coming and self._coming[0][0].done():
            self._coming.popleft()
        while self._leaving and self._leaving[0][0].done():
            mark, _, granules = self._leaving.popleft()
            for granule in granules:
                if self._read.get(granule, (0, None))[1] is mark:
                    del self._read[granule]

    def _move(self, queue: list[tuple[int, torch.Tensor]], *, to_device: bool) -> None:
        """Copy rows: many small ones by one kernel, others by pieces of adjacent rows."""
        alike = dict[tuple[int, int], list[tuple[int, int]]]()
        whole, first, stop, wholes = queue[0][1], 0, 0, dict[int, torch.Tensor]()
        for address, granule, row in sorted([(row.data_ptr(), at, row) for at, row in queue]):
            if not first <= address < stop:
                found = self.slots.locate(address)
                whole = row if found is None else torch.from_numpy(found[0])
                first = whole.data_ptr()
                stop, wholes[first] = first + whole.nbytes, whole
            alike.setdefault((first, row.nbytes), []).append((address - first, granule))
        for (first, n_bytes), those in alike.items():
            whole, step, runs = wholes[first], n_bytes // GRANULE_BYTES, list[list[int]]()
            beyond = (-1, -1)
            for at, granule in those:
                if (at, granule) == beyond:  # side by side on both sides: one piece
                    runs[-1][2] += n_bytes
                else:
                    runs.append([at, granule, n_bytes])
                beyond = at + n_bytes, granule + step
            if n_bytes <= self.kernel_bytes and len(runs) >= self.least_pieces:
                lines = [at // GRANULE_BYTES for at, _ in those]
                places = [granule for _, granule in those]
                self.streams.move(self.pages, places, whole, lines, n_bytes, to_device=to_device)
                continue
            for at, granule, size in runs:
                row, page = whole[at:][:size], self.pages[granule * GRANULE_BYTES :][:size]
                both = (page, row) if to_device else (row, page)
                self.streams.copy(*both, to_device=to_device)


def open_copies(streams: CudaStreams, pages: torch.Tensor, slots: SlotPool | None = None,
                n_bytes: int = STAGING_BYTES) -> Copies:  # fmt: skip
    """Return the copies for the pages of a device.

    Where the driver does not register memory, torch's own pinned memory is used; `slots.why` is
    then the reason.

    Args:
        streams: Copy streams of the device.
        pages: uint8 `[bytes]`, the arena of its pages.
        slots: Slots of a host tier; None makes a pool of its own.
        n_bytes: Bytes of slots for copies under way, beside those that the tier keeps.
    """
    slots, more = (SlotPool(n_bytes), 0) if slots is None else (slots, n_bytes)
    slots.register(streams.pin, streams.unpin, more)
    return Copies(streams, pages, slots, most_bytes=n_bytes)


_Copying = deque[tuple[CudaMark, list[torch.Tensor], Sequence[int]]]


def _end(*directions: _Copying) -> None:
    """Wait for all copies under way, so that pages and pinned memory outlive them."""
    for copying in directions:
        while copying:
            copying[0][0].wait()
            copying.popleft()
