"""An engine over io_uring, whose loop never enters the interpreter (`ring_loop`)."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import sys
import threading
import time
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import StateError
from flowkv.tiers.io.engine import (
    COMPLETION,
    OPERATION,
    SYNC,
    Completions,
    Operations,
    ThreadsEngine,
    allows_direct,
    open_file,
)
from flowkv.tiers.io.ring import Ring
from flowkv.tiers.io.staging import Arena

DEPTH = 32  # enough for any device; with more, a batch is handed over whole and comes back whole
CAPACITY = 8192  # operations that the loop knows of at a time; more wait on this side
CLOSE_S = 10.0
START_S = 120.0  # the first time on a machine the loop is compiled
LONGEST_S = 1e6
SHARED_WAIT_S = 0.005  # how often the second of two who wait looks for itself


class _Shared:
    """What the engine and the thread of its loop both hold."""

    def __init__(self, depth: int, arena: Arena | None) -> None:
        self.depth, self.arena = depth, arena
        self.requests = np.zeros((CAPACITY, 5), np.int64)
        self.cancels = np.zeros(CAPACITY, np.int64)
        self.answers = np.zeros((CAPACITY, 2), np.int64)
        self.control: NDArray[np.int64] = np.zeros(0, np.int64)
        self.loop: Any = None  # the module, once it is imported
        self.up = threading.Event()  # the loop runs, or never will
        self.error: BaseException | None = None  # why it never ran
        self.code = 0  # the errno because of which it ended
        self.flags, self.registered = 0, False
        self.ended = False
        self._abandoned, self._open = False, True
        self._lock = threading.RLock()  # a garbage collection may come to `abandon` from anywhere
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC)  # blocking: the ring waits on it
        try:
            self.done_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            os.close(self.wake_fd)
            raise

    def end(self) -> None:
        """The loop has ended."""
        with self._lock:
            self.ended = True
            os.eventfd_write(self.done_fd, 1)
            if self._abandoned:
                self.close()

    def abandon(self, pid: int) -> None:
        """Nobody can reach the engine any more: the loop ends when what is in flight has."""
        if pid == os.getpid():
            with self._lock:
                self._abandoned = True
                if self.ended:
                    self.close()
                else:
                    self.loop.stop(self.control, self.wake_fd)

    def close(self) -> None:
        """Closes what wakes the loop, and what wakes who waits."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.wake_fd)
                os.close(self.done_fd)


class UringEngine:
    """An `Engine` over io_uring.

    Args:
        direct: Open files with O_DIRECT.
        depth: Operations that the kernel works on at a time.
        arena: Memory to register with the ring, which makes transfers a little cheaper; where the
            limit of locked memory forbids it, it is used unregistered.

    Attributes:
        flags: Set-up flags that the kernel granted.
        registered: Whether the arena is registered.
        why: Why it is not `direct` any more; "" as long as it is.

    Raises:
        OSError: io_uring is not there or not allowed here.
    """

    name = "io_uring"
    why = ""

    def __init__(
        self, *, direct: bool = True, depth: int = DEPTH, arena: Arena | None = None
    ) -> None:
        if sys.platform != "linux":
            raise OSError(errno.ENOSYS, "io_uring is a part of Linux")
        self.direct, self.depth = direct, depth
        self._pid, self._closed = os.getpid(), False
        self._lock, self._waiting = threading.Lock(), threading.Lock()
        self._held: deque[NDArray[np.int64]] = deque()  # operations that the loop has no room for
        self._extra: list[NDArray[np.int64]] = []  # completions that the loop does not know of
        shared = self._shared = _Shared(depth, arena)
        self._thread = threading.Thread(
            target=_run, args=(shared,), name="flowkv io_uring", daemon=True
        )
        self._thread.start()
        shared.up.wait()
        if shared.error is not None:
            self._thread.join()
            shared.close()
            raise shared.error
        self.flags, self.registered = shared.flags, shared.registered
        self._finalize = weakref.finalize(self, shared.abandon, self._pid)
        self._finalize.atexit = False  # a process that ends takes the thread along
        self._try()

    def open(self, path: str, *, write: bool) -> int:
        """Opens a regular file; the engine is not direct any more from the first that is not.

        Raises:
            OSError: It cannot be opened.
        """
        fd, direct = open_file(path, write=write, direct=self.direct)
        if not direct and self.direct:
            self.direct, self.why = False, f"no O_DIRECT for {path}"
        return fd

    def submit(self, operations: Operations) -> None:
        """Hands operations to the loop.

        Raises:
            StateError: The engine is closed, or was opened before a fork.
        """
        if self._pid != os.getpid():
            raise StateError("the engine was opened before a fork", "Open another one, here")
        rows = np.array(operations, OPERATION).view(np.int64).reshape(-1, 5)  # the caller's changes
        with self._lock:
            if self._closed:
                raise StateError("the engine is closed", "Open another one")
            if self._shared.ended:
                self._fail(rows, self._shared.code or errno.EIO)
            elif len(rows):
                self._held.append(rows)
                self._push()

    def wait(self, timeout_s: float = 0.0, *, least: int = 1) -> Completions:
        """Completions that are there; waits up to `timeout_s` for the first `least` of them."""
        if self._pid != os.getpid():
            return np.empty(0, COMPLETION)
        end_s = time.monotonic() + timeout_s
        parts: list[NDArray[np.int64]] = []
        count = 0
        while True:
            with self._lock:
                over = self._closed or self._shared.ended
                taken = self._take()
            parts += taken
            count += sum(map(len, taken))
            left_s = end_s - time.monotonic()
            if count >= least or over or left_s <= 0:
                break
            self._await(min(least - count, CAPACITY), left_s)
        return (np.concatenate(parts) if parts else np.empty((0, 2), np.int64)).view(COMPLETION)[
            :, 0
        ]

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Ends operations that have not begun, and asks the kernel about the others."""
        if self._pid != os.getpid():
            return
        wanted = np.ascontiguousarray(tags, np.uint64).view(np.int64)
        with self._lock:
            if self._closed or self._shared.ended:
                return
            for i, rows in enumerate(self._held):
                gone = np.isin(rows[:, 4], wanted)
                if gone.any():
                    self._fail(rows[gone], errno.ECANCELED)
                    self._held[i] = rows[~gone]
            shared = self._shared
            shared.loop.ask(shared.control, shared.cancels, wanted, shared.wake_fd)
            self._wake_waiters()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Cancels what has not begun and waits for the rest; False if that took too long."""
        if self._pid != os.getpid():
            return True
        shared = self._shared
        with self._lock:
            first, self._closed = not self._closed, True
            if first and not shared.ended:
                for rows in self._held:
                    self._fail(rows, errno.ECANCELED)
                self._held.clear()
                shared.loop.stop(shared.control, shared.wake_fd)
        self._thread.join(timeout_s)
        if self._thread.is_alive() or shared.control[shared.loop.IN_KERNEL]:
            return False
        if self._finalize.detach():
            self._wake_waiters()
            with self._waiting, self._lock:
                shared.close()
        return True

    def _try(self) -> None:
        """One operation: all that is compiled is loaded now, and a ring that is mute is noticed."""
        self.submit(np.array([(SYNC, -1, 0, 0, 0, 0)], OPERATION))
        results = self.wait(START_S)["result"].tolist()
        if results != [-errno.EBADF]:
            self.close()
            code = -results[0] if results else errno.ETIME
            raise OSError(code, os.strerror(code), "io_uring")

    def _push(self) -> None:
        """Gives the loop what it has room for. The lock is held."""
        shared, control = self._shared, self._shared.control
        room = CAPACITY - int(control[shared.loop.SUBMITTED] - control[shared.loop.REPORTED])
        while self._held and room > 0:
            rows = self._held.popleft()
            if len(rows) > room:
                self._held.appendleft(rows[room:])
                rows = rows[:room]
            room -= len(rows)
            shared.loop.push(control, shared.requests, rows, shared.wake_fd)

    def _take(self) -> list[NDArray[np.int64]]:
        """All completions that are there. The lock is held."""
        shared = self._shared
        if shared.ended and not self._closed:
            self._give_up()
        taken, self._extra = self._extra, []
        count = shared.loop.ready(shared.control)
        if count:
            rows = np.empty((count, 2), np.int64)
            shared.loop.pop(shared.control, shared.answers, rows)
            taken.append(rows)
            if self._held:
                self._push()
        return taken

    def _give_up(self) -> None:
        """The loop ended by itself: nothing that it had not begun ever will be."""
        shared, loop = self._shared, self._shared.loop
        for k in range(shared.control[loop.TAKEN], shared.control[loop.SUBMITTED]):
            row = shared.requests[k % CAPACITY]
            if row[0] & loop.LOW32 != loop.GONE:
                self._fail(row[None], shared.code)
        shared.control[loop.TAKEN] = shared.control[loop.SUBMITTED]
        for rows in self._held:
            self._fail(rows, shared.code)
        self._held.clear()

    def _fail(self, rows: NDArray[np.int64], code: int) -> None:
        answers = np.full((len(rows), 2), -code, np.int64)
        answers[:, 0] = rows[:, 4]
        self._extra.append(answers)

    def _await(self, count: int, timeout_s: float) -> None:
        """Waits until so many completions are there, or something else has changed."""
        end_s = time.monotonic() + timeout_s
        if not self._waiting.acquire(timeout=min(timeout_s, SHARED_WAIT_S)):
            return  # who waits already may wait for more than this
        try:
            shared = self._shared
            with self._lock:
                if self._extra or self._closed or shared.ended:
                    return
                waits = shared.loop.want(shared.control, count)
            if waits:
                poll = select.poll()
                poll.register(shared.done_fd, select.POLLIN)
                poll.poll(max(0.0, 1e3 * min(end_s - time.monotonic(), LONGEST_S)))
                try:
                    os.eventfd_read(shared.done_fd)
                except BlockingIOError:
                    return  # too late
        finally:
            self._waiting.release()

    def _wake_waiters(self) -> None:
        os.eventfd_write(self._shared.done_fd, 1)


def _run(shared: _Shared) -> None:
    """The thread: makes the ring, since only its maker may enter it, and serves it to the end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # others may handle them
    ring = None
    try:
        ring = Ring(4 * shared.depth)
        arguments = _prepare(shared, ring)
    except BaseException as error:
        if ring is not None:
            ring.close()
        shared.error = error.with_traceback(None)  # its frames hold mappings, and they files
        return
    finally:
        shared.up.set()
    shared.code = errno.EIO
    try:
        shared.code = shared.loop.serve(*arguments)
    finally:
        if not shared.control[shared.loop.IN_KERNEL]:
            ring.close()
        shared.end()


def _prepare(shared: _Shared, ring: Ring) -> tuple[Any, ...]:
    """The arguments of the loop."""
    from flowkv.tiers.io import ring_loop as loop  # costs half a second, where numba is new

    shared.loop, shared.flags = loop, ring.flags
    shared.control = np.zeros(loop.CONTROL_WORDS, np.int64)
    shared.control[loop.ONE] = 1
    arena = shared.arena
    if arena is not None:
        shared.registered = ring.register(arena.address, arena.n_bytes)
    facts = np.zeros(loop.FACTS, np.int64)
    facts[loop.FD], facts[loop.DEPTH] = ring.fd, shared.depth
    facts[loop.WAKE_FD], facts[loop.DONE_FD] = shared.wake_fd, shared.done_fd
    facts[loop.SQ_HEAD], facts[loop.SQ_TAIL] = ring.sq_head, ring.sq_tail
    facts[loop.CQ_HEAD], facts[loop.CQ_TAIL] = ring.cq_head, ring.cq_tail
    if arena is not None and shared.registered:
        facts[loop.FIXED_AT], facts[loop.FIXED_BYTES] = arena.address, arena.n_bytes
    queues = (shared.requests, shared.cancels, shared.answers)
    work = (
        np.zeros((shared.depth, loop.COLUMNS), np.int64),
        np.zeros(shared.depth, np.int64),
        np.zeros(loop.STATES, np.int64),
    )
    return facts, shared.control, queues, (ring.sqes, ring.cqes), work


# Picks the engine: the best one that this machine allows.

SPARE = 16
"""Files that a tier may want to open: locks, journal, and slab files of a few sizes."""


def open_engine(
    *, arena: Arena | None = None, directory: str | None = None
) -> UringEngine | ThreadsEngine:
    """Opens the best engine: io_uring, threads with O_DIRECT, or threads through the page cache.

    `name` says which was taken, and `why` what was wrong with a better one.

    Args:
        arena: Memory that most operations will use, which io_uring may register.
        directory: Where the files will lie: without O_DIRECT there, "buffered" is taken.

    Raises:
        OSError: The directory cannot be written to.
    """
    if directory is not None and not allows_direct(directory):
        return ThreadsEngine(direct=False, why=f"no O_DIRECT in {directory}")
    try:
        ring = UringEngine(arena=arena)
    except OSError as error:
        return ThreadsEngine(why=f"no io_uring here ({reason_of(error)})")
    if _files_left():
        return ring
    ring.close()
    return ThreadsEngine(why="io_uring takes files, of which few may be open still, `ulimit -n`")


def _files_left() -> bool:
    """Whether as many files may be opened still as a tier wants."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return most == resource.RLIM_INFINITY or most - len(os.listdir("/proc/self/fd")) >= SPARE
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)  # nobody counts them without /proc


def reason_of(error: OSError) -> str:
    """What the system's name for an error means to whoever wants io_uring."""
    name = errno.errorcode.get(error.errno or 0, "EIO")
    if error.errno == errno.EPERM:
        return f"{name}: forbidden by a seccomp filter or kernel.io_uring_disabled"
    if error.errno == errno.ENOSYS:
        return f"{name}: the kernel has none, or an old one"
    if error.errno == errno.ENOMEM:
        return f"{name}: beyond the limit of locked memory, `ulimit -l`"
    return name
