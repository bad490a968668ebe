"""Deterministic simulation of a stack of tiers: time, disks, networks and chance in one hand.

    from tests.tiers.simulation import simulate
    simulate(seed=7, steps=10_000)

A host tier, a disk tier whose files are no files, and a slow and moody remote one serve a small
store: a request falls through the tiers, what is found is copied upwards, what is not found is made
anew and written down, and a full tier loses a victim. Meanwhile processes are killed, power fails,
bits flip, disks fill up, fail and hang. After every step: no wrong byte, no capacity exceeded, no
answer late, double or missing, and no frame lost that was promised to be there. The same seed is
the same run, so a failure is a seed and a step.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import stat
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv import Tier
from flowkv.testing import FlakyTier, MemoryTier
from flowkv.tiers import Completion, FrameInfo, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import (
    COMPLETION,
    GRANULE_BYTES,
    OPERATION,
    WRITE,
    Buffer,
    Clock,
    Faults,
    FileIO,
    Frame,
    HostTier,
    ManualClock,
    Model,
    Operations,
    StoreError,
    TierRequest,
)
from tests.inside import engine_Completions as Completions
from tests.tiers.files_engine import FilesEngine, memory

__all__ = [
    "HAZARDS",
    "Report",
    "SimulatedEngine",
    "SimulatedFiles",
    "Simulation",
    "SimulationFailure",
    "shrink",
    "simulate",
]


# A disk that is no disk: files in memory that tear, forget, lie and fill up, all by one seed.

SECTOR_BYTES = 512
BLOCK_BYTES = 4096
_LOG_MOST = 256
_FIRST_FD = 1000


class _Inode:
    """One file: what programs see, what the device has for certain, and what is on its way."""

    def __init__(self) -> None:
        self.data, self.durable = bytearray(), bytearray()
        self.log: list[tuple[str, int, bytes | int]] = []  # not synced, oldest first
        self.blocks: set[int] = set()  # that the file system gave it


def _put(data: bytearray, offset: int, content: bytes) -> None:
    data.extend(bytes(max(0, offset + len(content) - len(data))))
    data[offset : offset + len(content)] = content


def _cut(data: bytearray, size: int) -> None:
    data[size:] = bytes(max(0, size - len(data)))


def _blank(data: bytearray, offset: int, size: int) -> None:
    data[offset : offset + size] = bytes(len(data[offset : offset + size]))


class SimulatedFiles(FileIO):
    """A file system in memory, for one directory tree and one process at a time.

    What was written and not synced is lost by `lose_power`, sector by sector and name by name, in
    any combination; a sector may also come back as it was some writes ago. `troubles` makes calls
    fail. A file that could not be synced loses what was to be synced, and says so only once, as
    Linux does.

    Args:
        chance: Source of every accident.
        space_bytes: Of all blocks on the device. A write that needs more ends where they do, and
            one that gets none fails with ENOSPC.

    Attributes:
        space_bytes: The same; others may take it and give it back.
        troubles: Probability by name: "write", "enospc", "short", "torn", "read", "short read",
            "sync", "open", "names" (removing, renaming and resizing).
        harmed: Whether a call was made to fail since the last `kill`.
    """

    def __init__(self, chance: random.Random, space_bytes: int = 1 << 40) -> None:
        self.chance, self.space_bytes = chance, space_bytes
        self.troubles: dict[str, float] = {}
        self.harmed = False
        self._names: dict[str, _Inode] = {}
        self._durable_names: dict[str, _Inode] = {}
        self._renames: list[tuple[str, str, _Inode | None]] = []
        self._open: dict[int, _Inode] = {}
        self._locked: dict[int, str] = {}
        self._next_fd = _FIRST_FD

    # ---- what a program may do

    def open(self, path: str, *, write: bool) -> int:
        """Opens or makes a file."""
        self._trouble("open", errno.EIO)
        if path not in self._names:
            if not write:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self._names[path] = _Inode()
            self._renames.append((path, "", self._names[path]))
        self._next_fd += 1
        self._open[self._next_fd] = self._names[path]
        return self._next_fd

    def close(self, fd: int) -> None:
        """Closes a file."""
        del self._open[fd]

    def size(self, fd: int) -> int:
        """Length of a file."""
        return len(self._file(fd).data)

    def next_data(self, fd: int, offset: int) -> int:
        """Where the next block that the file has got begins, from `offset` on."""
        inode = self._file(fd)
        first = offset // BLOCK_BYTES
        block = min((block for block in inode.blocks if block >= first), default=None)
        return len(inode.data) if block is None else max(offset, block * BLOCK_BYTES)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads; perhaps less than was asked for."""
        self._trouble("read", errno.EIO)
        data, done = self._file(fd).data, 0
        short = self._happens("short read")
        for buffer in buffers:
            part = data[offset + done : offset + done + len(buffer)]
            if short and len(part) > 1:
                part = part[: self.chance.randrange(1, len(part))]
            buffer[: len(part)] = part
            done += len(part)
            if len(part) < len(buffer):
                break
        return done

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Writes; perhaps less than was asked for, perhaps before it fails."""
        self._trouble("write", errno.EIO)
        self._trouble("enospc", errno.ENOSPC)
        content = b"".join(bytes(buffer) for buffer in buffers)
        torn = self._happens("torn")
        if torn or self._happens("short"):
            content = content[: self.chance.randrange(len(content) + 1)]
        written = self._write(self._file(fd), offset, content)
        if torn:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return written

    def truncate(self, fd: int, size: int) -> None:
        """Sets the length of a file."""
        self._trouble("names", errno.EIO)
        inode = self._file(fd)
        _cut(inode.data, size)
        inode.blocks = {block for block in inode.blocks if block * BLOCK_BYTES < size}
        self._note(inode, ("cut", size, 0))

    def punch(self, fd: int, offset: int, size: int) -> None:
        """Makes a hole of whole blocks."""
        self._trouble("names", errno.EIO)
        inode = self._file(fd)
        _blank(inode.data, offset, size)
        inode.blocks -= set(range(offset // BLOCK_BYTES, (offset + size) // BLOCK_BYTES))
        self._note(inode, ("punch", offset, size))

    def sync(self, fd: int) -> None:
        """Makes a file's content durable; or loses what was not, and says so once."""
        inode = self._file(fd)
        if self._happens("sync"):
            self._settle(inode, self.chance.choice((0.0, 0.5)))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._settle(inode, 1.0)

    def replace(self, source: str, target: str, *, durable: bool = True) -> None:
        """Renames."""
        self._trouble("names", errno.EIO)
        inode = self._names.pop(source)
        self._names[target] = inode
        self._renames.append((target, source, inode))
        if durable:
            self.sync_directory(os.path.dirname(target))

    def sync_directory(self, path: str) -> None:
        """Makes names durable."""
        self._trouble("sync", errno.EIO)
        self._durable_names = dict(self._names)
        self._renames.clear()

    def make_directory(self, path: str) -> None:
        """Directories are no more than the beginnings of names."""

    def status(self, path: str) -> tuple[int, int]:
        """A directory of our own."""
        return os.geteuid(), stat.S_IFDIR | 0o700

    def restrict(self, path: str) -> None:
        """It is ours already."""

    def names(self, path: str) -> list[str]:
        """What is in a directory."""
        start = path.rstrip("/") + "/"
        return sorted(
            {name[len(start) :].split("/")[0] for name in self._names if name.startswith(start)}
        )

    def remove(self, path: str) -> None:
        """Removes a file."""
        self._trouble("names", errno.EIO)
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        del self._names[path]
        self._renames.append(("", path, None))

    def same(self, fd: int, path: str) -> bool:
        """Whether a path leads to an open file."""
        return self._names.get(path) is self._file(fd)

    def lock(self, path: str, *, patient: bool = True) -> int:
        """Locks; -1 if the lock is taken."""
        if path in self._locked.values():
            return -1
        fd = self.open(path, write=True)
        self._locked[fd] = path
        return fd

    def lock_directory(self, path: str, *, patient: bool = True) -> int:
        """Locks; -1 if the lock is taken."""
        if path in self._locked.values():
            return -1
        self._next_fd += 1
        self._open[self._next_fd], self._locked[self._next_fd] = _Inode(), path
        return self._next_fd

    def unlock(self, fd: int) -> None:
        """Gives a lock up."""
        del self._locked[fd]
        self.close(fd)

    # ---- what fate may do

    def kill(self) -> None:
        """The process is gone; what it wrote stays in the page cache."""
        self._open.clear()
        self._locked.clear()
        self.harmed = False

    def lose_power(self) -> None:
        """The machine is gone: of what was not synced, any part may be there."""
        self.kill()
        for target, source, inode in self._renames[: self.chance.randint(0, len(self._renames))]:
            self._durable_names.pop(source, None)
            if inode is not None:
                self._durable_names[target] = inode
        self._renames.clear()
        self._names = dict(self._durable_names)
        for inode in self._names.values():
            self._settle(inode, None)
            inode.data = bytearray(inode.durable)
            inode.blocks = {
                at // BLOCK_BYTES
                for at in range(0, len(inode.data), BLOCK_BYTES)
                if any(inode.data[at : at + BLOCK_BYTES])
            }

    def flip(self) -> str:
        """Turns one bit of one file, on the device and in the cache; says which."""
        files = [(name, inode) for name, inode in sorted(self._names.items()) if inode.blocks]
        if not files:
            return ""
        name, inode = self.chance.choice(files)
        block = self.chance.choice(sorted(inode.blocks))
        at, bit = block * BLOCK_BYTES + self.chance.randrange(BLOCK_BYTES), self.chance.randrange(8)
        for data in (inode.data, inode.durable):
            if at < len(data):
                data[at] ^= 1 << bit
        return f"{os.path.basename(name)} {at} {bit}"

    def used_bytes(self) -> int:
        """Blocks that all files occupy."""
        return BLOCK_BYTES * sum(len(inode.blocks) for inode in self._names.values())

    def images(self, *, device: bool = False) -> Iterator[tuple[str, bytes]]:
        """All files as programs see them, or as the device has them."""
        for name, inode in sorted(self._names.items()):
            yield name, bytes(inode.durable if device else inode.data)

    # ---- inside

    def _file(self, fd: int) -> _Inode:
        if fd not in self._open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._open[fd]

    def _happens(self, name: str) -> bool:
        happens = name in self.troubles and self.chance.random() < self.troubles[name]
        self.harmed = self.harmed or happens
        return happens

    def _trouble(self, name: str, code: int) -> None:
        if self._happens(name):
            raise OSError(code, os.strerror(code))

    def _write(self, inode: _Inode, offset: int, content: bytes) -> int:
        """As much as there are blocks for, as Linux does; nothing at all is an error."""
        if not content:
            return 0
        free = (self.space_bytes - self.used_bytes()) // BLOCK_BYTES
        for block in range(offset // BLOCK_BYTES, (offset + len(content) - 1) // BLOCK_BYTES + 1):
            if block not in inode.blocks:
                if free <= 0:
                    self.harmed = True
                    content = content[: max(0, block * BLOCK_BYTES - offset)]
                    break
                inode.blocks.add(block)
                free -= 1
        if not content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _put(inode.data, offset, content)
        self._note(inode, ("write", offset, content))
        return len(content)

    def _note(self, inode: _Inode, change: tuple[str, int, bytes | int]) -> None:
        inode.log.append(change)
        if len(inode.log) > _LOG_MOST:  # the kernel writes back on its own
            late, inode.log = inode.log[: _LOG_MOST // 2], inode.log[_LOG_MOST // 2 :]
            for each in late:
                self._persist(inode.durable, each, 1.0)

    def _settle(self, inode: _Inode, keep: float | None) -> None:
        for change in inode.log:
            part = self.chance.choice((0.0, 0.5, 0.9, 1.0)) if keep is None else keep
            self._persist(inode.durable, change, part)
        inode.log.clear()

    def _persist(
        self, durable: bytearray, change: tuple[str, int, bytes | int], keep: float
    ) -> None:
        what, offset, content = change
        if isinstance(content, bytes):
            if keep >= 1.0:
                _put(durable, offset, content)
                return
            for at in range(0, len(content), SECTOR_BYTES):
                if self.chance.random() < keep:
                    _put(durable, offset + at, content[at : at + SECTOR_BYTES])
        elif self.chance.random() < keep:
            if what == "cut":
                _cut(durable, offset)
            else:
                _blank(durable, offset, content)


# An engine that is late, out of order, or silent, on a clock that somebody else moves.

NEVER_NS = 1 << 62
_CANCELLED = 1000


class SimulatedEngine:
    """An `Engine` whose operations take effect when they complete, some day, in any order.

    So memory that is used again too early is read or written too late, and a tier that trusts its
    deadline instead of the engine is caught.

    Args:
        files: The disk.
        chance: Source of every delay.
        clock: Time.

    Attributes:
        latency_s: Longest delay of an operation.
        hang: Probability that one waits for `revive`.
    """

    name = "simulated"
    direct = False
    depth = 64

    def __init__(self, files: SimulatedFiles, chance: random.Random, clock: Clock) -> None:
        self.files, self.chance, self.clock = files, chance, clock
        self.latency_s, self.hang = 0.002, 0.0
        self._inner = FilesEngine(files)
        self._pending: list[tuple[int, tuple[int, ...]]] = []
        self._gone = False

    def open(self, path: str, *, write: bool) -> int:
        """Opens a file."""
        return self.files.open(path, write=write)

    def submit(self, operations: Operations) -> None:
        """Puts operations off."""
        now = self.clock.now_ns()
        for row in operations.tolist():
            late = round(self.chance.random() * self.latency_s * 1e9)
            due = NEVER_NS if self.chance.random() < self.hang else now + late
            self._pending.append((due, row))

    def wait(self, timeout_s: float = 0.0) -> Completions:
        """Does what is due; never waits, because time stands still meanwhile."""
        now = self.clock.now_ns()
        ready = [row for due, row in self._pending if due <= now]
        self._pending = [each for each in self._pending if each[0] > now]
        self.chance.shuffle(ready)
        return self._do(ready)

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Half of the operations listen, and are then reported as cancelled."""
        wanted, now = set(tags.tolist()), self.clock.now_ns()
        for number, (due, row) in enumerate(self._pending):
            if row[-1] in wanted and self.chance.random() < 0.5:
                self._pending[number] = min(due, now), (_CANCELLED, *row[1:])

    def in_flight(self) -> int:
        """Operations that were not reported."""
        return len(self._pending)

    def revive(self) -> None:
        """What hung goes on."""
        now = self.clock.now_ns()
        self._pending = [(now if due == NEVER_NS else due, row) for due, row in self._pending]

    def close(self) -> bool:
        """Ends what can be ended; False if something hangs."""
        hung = any(due == NEVER_NS for due, _ in self._pending)
        if not self._gone:
            self._do([row for due, row in self._pending if due != NEVER_NS])
            self._pending = [each for each in self._pending if each[0] == NEVER_NS]
        self._gone = not hung
        return not hung

    def kill(self) -> None:
        """The process is gone: of the writes under way, any part happens, unheard."""
        self.files.troubles = {}
        for _, (op, fd, offset, address, length, _) in self._pending:
            if op == WRITE:
                part = self.chance.choice((0, self.chance.randrange(length + 1), length))
                with contextlib.suppress(OSError):
                    self.files.write(fd, [bytes(memory(address, length)[:part])], offset)
        self._pending.clear()
        self._gone = True

    def _do(self, rows: list[tuple[int, ...]]) -> Completions:
        done = []
        for row in rows:
            if row[0] == _CANCELLED:
                done.append((row[-1], -errno.ECANCELED))
                continue
            self._inner.submit(np.array([row], OPERATION))
            done += self._inner.wait().tolist()
        return np.array(done, COMPLETION)


# One tier of a simulated stack: what was asked of it, and what it may answer.

DAMAGED = frozenset({"digest", "key", "foreign", "truncated", "version"})
BEFORE, AFTER = 0xA5, 0x5A


class SimulatedTier:
    """A tier, the model of what it may hold, and its jobs in flight.

    Args:
        tier: The tier.
        lossy: It may lose frames whenever it likes.
        clock: The one that the tier looks at.
        note: Called with a line for every answer.

    Attributes:
        excused: Reasons for which stores and loads may fail now.
        harmed: Whether bits were flipped, so that frames may be refused as damaged.
        answered: Items answered so far.
        undone: Keys of stores that failed half done: a killed tier may find their frames.
    """

    def __init__(
        self, tier: Tier, *, lossy: bool, clock: Clock, note: Callable[[str], None]
    ) -> None:
        self.tier, self.clock, self.note = tier, clock, note
        self.model = Model(lossy)
        self.excused: frozenset[str] = frozenset()
        self.harmed = False
        self.answered = 0
        self.undone: set[bytes] = set()
        self._jobs: dict[
            int, dict[int, tuple[TierRequest, Callable[[Completion], None] | None]]
        ] = {}
        self._done: list[tuple[object, bytes]] = []  # bytearrays compare far faster than views

    @property
    def flying(self) -> int:
        """Items that wait for an answer."""
        return len(self.model.flying)

    @property
    def jobs(self) -> list[int]:
        """Jobs that wait for answers."""
        return list(self._jobs)

    def store(
        self,
        frames: Sequence[tuple[bytes, Frame]],
        deadline_s: float,
        done: Callable[[Completion], None] | None = None,
    ) -> None:
        """Starts a job of stores."""
        now_s = self.clock.now_ns() / 1e9
        requests = []
        for key, frame in frames:
            item = Store(key, frame.info, memoryview(bytearray(frame.body)))
            requests.append(TierRequest(item, frame, now_s + deadline_s))
        need = sum(self.tier.frame_bytes(request.n_bytes) for request in requests)
        flying = [request for request in self.model.flying if request.frame]
        before = sum(self.tier.frame_bytes(request.n_bytes) for request in flying)
        for request in flying:
            request.room_bytes += need
        for request in requests:
            request.room_bytes = self.tier.used_bytes() + before + need
            self.model.submit(request)
        items = [request.item for request in requests if isinstance(request.item, Store)]
        job = self.tier.submit_store(items, deadline_s=deadline_s)
        self._jobs[job] = {index: (request, done) for index, request in enumerate(requests)}

    def load(
        self,
        items: Sequence[Load],
        deadline_s: float,
        done: Callable[[Completion], None] | None = None,
    ) -> None:
        """Starts a job of loads; their targets are full of one byte before."""
        due_s = self.clock.now_ns() / 1e9 + deadline_s
        requests = [TierRequest(item, None, due_s) for item in items]
        for request in requests:
            self.model.submit(request)
        job = self.tier.submit_load(items, deadline_s=deadline_s)
        self._jobs[job] = {index: (request, done) for index, request in enumerate(requests)}

    def cancel(self, job: int) -> None:
        """Gives up a job."""
        for request, _ in self._jobs[job].values():
            request.cancelled = True
        self.tier.cancel(job)

    def delete(self, keys: Sequence[bytes], *, erase: bool = False) -> None:
        """Forgets frames."""
        surely = sum(None not in self.model.may[key] for key in keys)
        gone = self.tier.erase(keys) if erase else self.tier.delete(keys)
        assert surely <= gone or self.model.lossy, "less was deleted than was there"
        for key in keys:
            self.model.delete(key)

    def poll(self) -> None:
        """Takes what is ready; everything overdue is."""
        now_s = self.clock.now_ns() / 1e9
        for answer in self.tier.poll(0.0):
            self._check(answer)
        late = [request for request in self.model.flying if request.due_s < now_s - 1e-6]
        assert not late, f"{len(late)} items of {self.tier.name} missed their deadline"

    def abandon(self) -> None:
        """The process is gone: nobody will hear how what is in flight ended."""
        for request in list(self.model.flying):
            self.model.flying.remove(request)
            if request.frame is not None:
                self.model.may[request.item.key].add(request.frame)
            self._retire(request)
        self._jobs.clear()

    def look(self, keys: Sequence[bytes]) -> None:
        """Checks what always holds."""
        assert 0 <= self.tier.used_bytes() <= self.tier.capacity_bytes, "over its capacity"
        for key, there in zip(keys, self.tier.contains(keys), strict=True):
            self.model.present(key, there)
        for seen, kept in self._done:
            assert seen == kept, "memory touched after its answer"
        del self._done[:-64]

    def _check(self, answer: Completion) -> None:
        requests = self._jobs.get(answer.job, {})
        assert answer.item in requests, f"{answer.job}.{answer.item} answered twice, or never asked"
        request, done = requests.pop(answer.item)
        if not requests:
            del self._jobs[answer.job]
        self.answered += 1
        self.note(f"{self.tier.name} {answer.key.hex()[:6]} {answer.outcome.value} {answer.reason}")
        assert answer.key == request.item.key, "the answer names another key"
        if request.frame is None:
            self._loaded(request, answer)
        elif answer.outcome is Outcome.STORED:
            self.model.stored(request)
        else:
            assert answer.outcome is Outcome.FAILED and answer.reason, "a failure says why"
            assert self._may_fail(request, answer.reason), f"store failed: {answer.reason}"
            self.model.failed(request)
            self.undone.add(request.item.key)
        self._retire(request)
        if done is not None:
            done(answer)

    def _loaded(self, request: TierRequest, answer: Completion) -> None:
        item = request.item
        assert isinstance(item, Load)
        refused = answer.outcome is Outcome.MISS and answer.reason in DAMAGED
        if answer.outcome is Outcome.FAILED and not self.model.lossy:
            assert self._may_fail(request, answer.reason), f"load failed: {answer.reason}"
            self.model.failed(request)
        elif refused and not self.model.lossy:
            doubtful = self.harmed and None in request.seen
            assert doubtful, f"{answer.key.hex()[:6]} was refused as damaged: {answer.reason}"
            self.model.failed(request)
        else:
            self.model.check_load(request, answer)
        moved = answer.n_bytes if answer.outcome is Outcome.HIT else item.target.nbytes
        rest = item.target[moved:]
        assert rest == bytes([BEFORE]) * len(rest), "bytes written past what was wished for"

    def _may_fail(self, request: TierRequest, reason: str) -> bool:
        if reason in self.excused or self.model.lossy:
            return True
        return {
            "full": request.room_bytes > self.tier.capacity_bytes,
            "busy": self.flying > 1,
            "deadline": self.clock.now_ns() / 1e9 >= request.due_s - 1e-6,
            "cancelled": request.cancelled,
        }.get(reason, False)

    def _retire(self, request: TierRequest) -> None:
        item = request.item
        memory = item.target if isinstance(item, Load) else item.body
        memory[:] = bytes([AFTER]) * memory.nbytes  # its owner uses it again, at once
        self._done.append((memory.obj, bytes(memory)))


# The small store that the simulation drives: requests fall through the tiers and fill them.

NAMES = 48
DEADLINES_S = (0.0, 0.001, 0.05, 10.0, 10.0, 10.0)
_LAYOUT = bytes(range(16))


def make_frame(name: int) -> tuple[bytes, Frame]:
    """Key and content of the frame with a number; content follows from the key, as in life."""
    key = hashlib.sha256(b"simulated %d" % name).digest()
    stripes = (1, 1, 2, 4)[name % 4]
    step = GRANULE_BYTES if stripes > 1 else 1500 + 97 * name
    info = FrameInfo(
        kind="page",
        codec=0,
        fidelity=0,
        layout=_LAYOUT,
        parent=bytes(32),
        namespace=bytes(32),
        group=name % 3,
        tokens=64,
        stripe_bytes=step,
    )
    return key, Frame(info, hashlib.shake_128(key).digest(step * stripes))


FRAMES = [make_frame(name) for name in range(NAMES)]
KEYS = [key for key, _ in FRAMES]


class SimulatedStack:
    """Places, nearest first, and what a store does with them.

    Args:
        chance: Source of every decision.
        clock: Moved by the one who owns this.

    Attributes:
        places: The tiers with their models.
        counts: How often each thing happened.
        tail: The last lines of the log.
    """

    def __init__(self, chance: random.Random, clock: ManualClock) -> None:
        self.chance, self.clock = chance, clock
        self.places: list[SimulatedTier] = []
        self.counts: Counter[str] = Counter()
        self.tail: deque[str] = deque(maxlen=40)
        self._digest = hashlib.blake2b(digest_size=16)

    def place(self, tier: Tier, *, lossy: bool = False) -> SimulatedTier:
        """A tier with a model."""
        return SimulatedTier(tier, lossy=lossy, clock=self.clock, note=self.note)

    def note(self, event: str) -> None:
        """A line of the log."""
        self._digest.update(event.encode() + b"\n")
        self.tail.append(event)

    def digest(self) -> str:
        """Of all events in order."""
        return self._digest.hexdigest()

    # ---- what a store does

    def request(self) -> None:
        """Wants a page: from the nearest tier that gives it, or made anew."""
        self._ask(self.chance.randrange(NAMES), 0)

    def load(self) -> None:
        """Wants a few pages, or stripes of them, from one tier."""
        place = self.chance.choice(self.places)
        place.load([self._wish(self._any()) for _ in range(self._few())], self._deadline_s())

    def store(self) -> None:
        """Writes a few pages to one tier."""
        level = self.chance.randrange(len(self.places))
        frames = [FRAMES[self._any()] for _ in range(self._few())]
        self._save(level, frames)

    def cancel(self) -> None:
        """Gives up a job."""
        place = self.chance.choice(self.places)
        if place.jobs:
            place.cancel(self.chance.choice(place.jobs))

    def forget(self) -> None:
        """Deletes a few pages on one tier."""
        place = self.chance.choice(self.places)
        place.delete(sorted({KEYS[self._any()] for _ in range(self._few())}))

    def wait(self) -> None:
        """Lets time pass."""
        self.clock.advance(s=self.chance.choice((1e-5, 1e-3, 1e-3, 0.03, 1.0, 11.0)))

    def _any(self) -> int:
        return self.chance.randrange(NAMES)

    def _few(self) -> int:
        return self.chance.choice((1, 1, 2, 3))

    def _deadline_s(self) -> float:
        return self.chance.choice(DEADLINES_S)

    def _wish(self, name: int, *, whole: bool = False) -> Load:
        key, (info, body) = FRAMES[name]
        first = 0 if whole else self.chance.choice((0, 0, 0, 1, 3))
        stripes = 0 if whole else self.chance.choice((0, 0, 1, 2))
        target = memoryview(bytearray([BEFORE]) * (len(body) + self.chance.choice((0, 0, 3))))
        return Load(key, target, info.layout, 0, first, stripes)

    def _ask(self, name: int, level: int) -> None:
        if level == len(self.places):  # nowhere: computed, and written down
            for each in range(2):
                self._save(each, [FRAMES[name]])
            return

        def answered(answer: Completion) -> None:
            if answer.outcome is not Outcome.HIT:
                self._ask(name, level + 1)
            for above in range(level if answer.outcome is Outcome.HIT else 0):
                self._save(above, [FRAMES[name]])

        self.places[level].load([self._wish(name, whole=True)], 10.0, answered)

    def _save(self, level: int, frames: list[tuple[bytes, Frame]]) -> None:
        place = self.places[level]

        def answered(answer: Completion) -> None:
            if answer.reason == "full":
                there = [
                    key for key, has in zip(KEYS, place.tier.contains(KEYS), strict=True) if has
                ]
                self.counts["evict"] += 1
                place.delete(self.chance.sample(there, min(2, len(there))))

        place.store(frames, self._deadline_s(), answered)


# A stack of tiers, simulated: one thread, one clock, one seed, all that can go wrong.

HAZARDS = frozenset({"kill", "power", "flips", "file errors", "full", "hangs", "remote", "erase"})
"""What may go wrong beyond eviction, cancellation and missed deadlines."""
DIRECTORY = "/simulated/kv"
HOST_BYTES, DISK_BYTES, REMOTE_BYTES = 80 << 10, 464 << 10, 192 << 10
_TROUBLES = {"write": 0.1, "enospc": 0.1, "short": 0.2, "torn": 0.1, "read": 0.1}
_TROUBLES |= {"short read": 0.2, "sync": 0.2, "names": 0.1}
_MOODS = Faults(fail=0.05, lose=0.02, flip=0.02, latency_s=0.05)
_BY_KEY = dict(FRAMES)
_STEPS = {"request": 40.0, "load": 20.0, "store": 20.0, "wait": 60.0, "cancel": 2.0}
_STEPS |= {"forget": 4.0, "reopen": 2.0}
_RARE = {"kill": 0.5, "power": 0.5, "flips": 0.5, "file errors": 0.5, "hangs": 0.5, "erase": 1.0}
_RARE |= {"full": 4.0}
_LEFT = (0, 1, 1, 1, 2, 1 << 20)  # blocks


class SimulationFailure(AssertionError):
    """A promise was broken; the same seed breaks it again, at the same step.

    Attributes:
        seed: Of the run.
        step: That broke it.
        hazards: That were switched on.
    """

    def __init__(self, run: Simulation, step: int, problem: BaseException) -> None:
        self.seed, self.step, self.hazards = run.seed, step, run.hazards
        events = "\n  ".join(run.tail)
        super().__init__(
            f"{type(problem).__name__}: {problem}\nlast events:\n  {events}\nStep {step} of"
            f" simulate({self.seed}, {step + 1}, hazards={sorted(self.hazards)}): replay that."
        )


class Report(NamedTuple):
    """What a run was like.

    Attributes:
        seed: Of the run.
        steps: Taken.
        answers: Items answered.
        counts: How often each thing happened.
        digest: Of all events in order: equal runs have equal digests.
    """

    seed: int
    steps: int
    answers: int
    counts: Counter[str]
    digest: str


class Simulation(SimulatedStack):
    """One run over a host tier, a disk tier and a remote one.

    Args:
        seed: Decides everything.
        hazards: Some of `HAZARDS`.
        open_disk: Opens the disk tier, from files, engine, clock, capacity and durability; for
            tests of the simulation itself.
    """

    def __init__(
        self,
        seed: int,
        hazards: Collection[str] = HAZARDS,
        open_disk: Callable[[Simulation], Tier] | None = None,
    ) -> None:
        super().__init__(random.Random(seed), ManualClock())
        self.seed, self.hazards = seed, frozenset(hazards)
        self._open_disk = open_disk or open_disk_tier
        self.durable = self.chance.random() < 0.5
        self.crowded = self.chance.random() < 0.2  # the device is smaller than the tier may be
        self.disk_bytes = DISK_BYTES + GRANULE_BYTES * self.chance.randrange(64)
        space_bytes = 280 << 10 if self.crowded else 1 << 40
        self.files = SimulatedFiles(random.Random(f"files {seed}"), space_bytes)
        self.engine = self._fresh_engine()
        self.bucket = MemoryTier(REMOTE_BYTES)
        self.cut_off: set[bytes] = set()  # keys that were erased and not stored since
        self.scarred = False  # the journal may say what was once true
        moody = "remote" in self.hazards
        self.places = [
            self.place(HostTier(HOST_BYTES, clock=self.clock)),
            self.place(self._disk_tier()),
            self.place(self._remote(), lossy=moody),
        ]
        rates = _STEPS | {name: _RARE[name] for name in sorted(self.hazards) if name in _RARE}
        self._names, self._weights = list(rates), list(rates.values())
        self._acts: dict[str, Callable[[], None]] = {
            "kill": self.kill,
            "power": self.lose_power,
            "flips": self.flip,
            "file errors": self.trouble,
            "full": self.crowd,
            "hangs": self.hang,
            "erase": self.erase,
        }

    @property
    def disk(self) -> SimulatedTier:
        """The place in the middle."""
        return self.places[1]

    def step(self) -> None:
        """Does one thing, and checks everything."""
        name = self.chance.choices(self._names, self._weights)[0]
        self.counts[name] += 1
        self.note(f"{self.clock.now_ns()} {name}")
        act: Callable[[], None] = self._acts.get(name) or getattr(self, name)
        act()
        for place in self.places:
            place.poll()
            place.look(KEYS)
        used_bytes = self.files.used_bytes()
        assert used_bytes <= self.disk_bytes, f"{used_bytes} of {self.disk_bytes} bytes on the disk"
        if not self.disk.flying:
            self._excuse()

    # ---- what may happen

    def reopen(self) -> None:
        """Closes the disk tier when it is idle, and opens it again."""
        self.engine.revive()
        self.engine.hang = 0.0
        while self.disk.flying or self.engine.in_flight():
            self.clock.advance(s=0.5)
            self.disk.poll()
        self.disk.tier.close()
        self._restart(exact=not self.files.harmed)

    def kill(self) -> None:
        """The process dies, in the middle of whatever it does."""
        exact = not self.files.harmed
        self.engine.kill()
        self.files.kill()
        self._restart(exact=exact)
        self._lose_memory()

    def lose_power(self) -> None:
        """The machine dies. What the device confirmed is there, if the tier waits for that."""
        self.engine.kill()
        self.files.lose_power()
        self.disk.model.doubt(but_promised=self.durable)
        self.scarred = self.disk.harmed = True  # what was half written is refused
        self._restart(exact=False)
        self._lose_memory()

    def flip(self) -> None:
        """A bit turns on the disk."""
        self.note(self.files.flip())
        self.scarred = self.disk.harmed = True
        self.disk.model.doubt()

    def trouble(self) -> None:
        """The disk begins to fail, or ends to."""
        chosen = self.chance.sample(sorted(_TROUBLES), self.chance.randint(1, 3))
        self.files.troubles = {} if self.files.troubles else {n: _TROUBLES[n] for n in chosen}
        self._excuse()

    def crowd(self) -> None:
        """Others take what is left of the device but for some blocks, or give all of it back.

        Places are free, and frames come by the dozen: so the journal grows by more than one page.
        """
        self.files.space_bytes = 1 << 40
        self._save(1, FRAMES)
        self._settle()
        self.disk.delete(sorted(self.chance.sample(KEYS, len(KEYS) * 3 // 4)))
        left = self.chance.choice(_LEFT)
        self.files.space_bytes = self.files.used_bytes() + left * GRANULE_BYTES
        self.crowded = left < max(_LEFT)
        if self.crowded:  # else what failed meanwhile may still be answered
            self._excuse()
        self._save(1, self.chance.sample(FRAMES, len(FRAMES)))
        self._settle()

    def _settle(self) -> None:
        """Lets what is under way on the disk end at one time: the journal hears of it together."""
        self.disk.poll()
        self.clock.advance(s=0.01)
        self.disk.poll()

    def hang(self) -> None:
        """The disk begins to hang, or ends to."""
        if self.engine.hang:
            self.engine.revive()
        self.engine.hang = 0.0 if self.engine.hang else 0.2
        self.engine.latency_s = self.chance.choice((0.0, 0.002, 0.5))
        self._excuse()

    def erase(self) -> None:
        """Erases a few pages; then no file has a byte of them."""
        keys = sorted({KEYS[self._any()] for _ in range(self._few())})
        try:
            self.disk.delete(keys, erase=True)
        except StoreError as error:
            self.note(f"erase refused: {type(error).__name__}")
            self.counts["erase refused"] += 1
            for key in keys:
                self.disk.model.delete(key)
                self._may_be_back(key)
            return
        if self.engine.in_flight() or self.scarred:
            return  # something may be written yet; or lies where a lost record would have said so
        gone = {key for key in keys if not self.disk.model.stores(key)}
        if not self.files.troubles and not self.crowded:  # else the journal may still name it
            self.cut_off |= gone
        bodies = [frame.body[:64] for key, frame in FRAMES if key in gone]
        for name, image in self.files.images():
            assert not any(body in image for body in bodies), f"erased bytes are still in {name}"

    # ---- what follows

    def _fresh_engine(self) -> SimulatedEngine:
        return SimulatedEngine(
            self.files, random.Random(f"engine {self.chance.random()}"), self.clock
        )

    def _disk_tier(self) -> Tier:
        self.engine = self._fresh_engine()
        try:
            tier = self._open_disk(self)
        except StoreError:  # the disk fails: it is repaired or emptied
            self.files.troubles, self.files.space_bytes = {}, 1 << 40  # and has room again
            self.files.kill()
            self.counts["open refused"] += 1
            tier = self._open_disk(self)
        assert tier.writable, "the lock of a dead process holds"
        return tier

    def _remote(self) -> Tier:
        self.bucket.poll()
        if "remote" not in self.hazards:
            return self.bucket
        return FlakyTier(self.bucket, self.chance.randrange(1 << 30), _MOODS, self.clock)

    def _restart(self, *, exact: bool) -> None:
        self.disk.abandon()
        # Where a record may be gone that says "deleted", anything may be back; else only what was
        # given up on its way, since a journal without records has the slots looked through.
        back = KEYS if self.scarred or not exact else sorted(self.disk.undone)
        for key in back:
            self._may_be_back(key)
        self.disk.undone.clear()
        self.disk.tier = self._disk_tier()
        self._excuse()

    def _lose_memory(self) -> None:
        self.places[0] = self.place(HostTier(HOST_BYTES, clock=self.clock))
        self.places[2].abandon()
        self.places[2].tier = self._remote()

    def _may_be_back(self, key: bytes) -> None:
        model = self.disk.model
        if None in model.may[key] and key not in self.cut_off:
            model.may[key].add(_BY_KEY[key])
            model.doubtful.add(key)
            self.disk.harmed = True

    def _save(self, level: int, frames: list[tuple[bytes, Frame]]) -> None:
        if level == 1:
            self.cut_off.difference_update(key for key, _ in frames)
        super()._save(level, frames)

    def _excuse(self) -> None:
        reasons = set()
        if self.files.troubles or self.crowded:
            reasons |= {"EIO", "ENOSPC", "full"}  # full: freed blocks could not be given back
        if self.engine.hang:
            reasons |= {"breaker"}
        self.disk.excused = frozenset(reasons)


def open_disk_tier(run: Simulation) -> Tier:
    """The disk tier without threads, over the simulated disk."""
    return DiskTier(
        DIRECTORY,
        run.disk_bytes,
        name="disk",
        durability="sync" if run.durable else "none",
        files=run.files,
        engine=run.engine,
        threads=0,
        clock=run.clock,
    )


def simulate(seed: int, steps: int = 1000, hazards: Collection[str] = HAZARDS) -> Report:
    """Runs a simulation; the same arguments give the same run.

    Args:
        seed: Decides everything.
        steps: How many.
        hazards: What may go wrong, some of `HAZARDS`.

    Raises:
        SimulationFailure: A promise was broken; it names the seed and the step.
    """
    return _drive(Simulation(seed, hazards), steps)


def _drive(run: Simulation, steps: int) -> Report:
    for number in range(steps):
        try:
            run.step()
        except Exception as error:
            raise SimulationFailure(run, number, error) from error
    answers = sum(place.answered for place in run.places)
    return Report(run.seed, steps, answers, run.counts, run.digest())


def shrink(failure: SimulationFailure, tries: int = 20) -> SimulationFailure:
    """The same kind of failure with fewer hazards and, among some seeds, in fewer steps.

    Args:
        failure: What to make smaller.
        tries: Seeds to try after the hazards.
    """
    best = failure
    for hazard in sorted(failure.hazards):
        best = _shorter(best, failure.seed, best.hazards - {hazard}, failure.step + 1)
    for seed in range(tries):
        best = _shorter(best, seed, best.hazards, best.step)
    return best


def _shorter(
    best: SimulationFailure, seed: int, hazards: Collection[str], steps: int
) -> SimulationFailure:
    try:
        simulate(seed, steps, hazards)
    except SimulationFailure as smaller:
        return smaller
    return best
