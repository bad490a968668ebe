"""Engine over io_uring with a compiled loop that never enters the interpreter.

`serve` runs on a thread of its own and returns only after `stop`, so that transfers keep their pace
while Python is busy. Python threads communicate with it through arrays: `push` adds operations to a
ring and writes to an eventfd that the io_uring itself waits on; `serve` adds completions to another
ring and writes to a second eventfd when a thread waits for one.

All words are int64 (numba turns a mix with unsigned ones into floats); tags only pass through.
Numbers and layouts are those of the kernel's `include/uapi/linux/io_uring.h`, which never change.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import signal
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from flowkv.compiled.machine_code import fence, instruction, kept
from flowkv.core.errors import StateError
from flowkv.core.reaper import begin
from flowkv.tiers.io.engine import (
    COMPLETION,
    OPERATION,
    READ,
    SYNC,
    Arena,
    Completions,
    DirectFiles,
    Operations,
)

# An io_uring: made with plain system calls, accessed through numpy.

SETUP, ENTER, REGISTER = 425, 426, 427  # the same on every architecture

CLAMP = 1 << 4
COOP_TASKRUN = 1 << 8
SINGLE_ISSUER = 1 << 12
DEFER_TASKRUN = 1 << 13
NO_SQARRAY = 1 << 16
FLAGS = (
    CLAMP | SINGLE_ISSUER | DEFER_TASKRUN | NO_SQARRAY,  # Linux 6.6
    CLAMP | SINGLE_ISSUER | DEFER_TASKRUN,  # 6.1
    CLAMP | COOP_TASKRUN,  # 5.19
    CLAMP,  # 5.6
)
"""Flags to try, the best first; a kernel answers EINVAL to unknown ones."""

FSYNC, READ_FIXED, WRITE_FIXED, ASYNC_CANCEL, OP_READ, OP_WRITE = 3, 4, 5, 14, 22, 23

_SINGLE_MMAP, _NODROP = 1 << 0, 1 << 1
_REGISTER_BUFFERS, _REGISTER_PROBE = 0, 8
_OFF_SQES = 0x1000_0000
_SQ_HEAD, _SQ_TAIL, _SQ_ARRAY = 0, 1, 6
_CQ_HEAD, _CQ_TAIL, _CQ_CQES = 0, 1, 5
PIECE_BYTES = 1 << 30  # most bytes of one entry, and of the largest buffer that can be registered


class _Params(ctypes.Structure):
    _names = "sq_entries cq_entries flags sq_thread_cpu sq_thread_idle features wq_fd"
    _fields_ = [
        *((name, ctypes.c_uint32) for name in _names.split()),
        ("reserved", ctypes.c_uint32 * 3),
        ("sq_off", ctypes.c_uint32 * 10),
        ("cq_off", ctypes.c_uint32 * 10),
    ]


class Ring:
    """An io_uring. Only the thread that makes it may enter it.

    Args:
        entries: Size of the submission queue; rounded up to a power of two.

    Attributes:
        fd: Descriptor of the ring.
        flags: Flags that the kernel granted.
        counters: Addresses of the kernel's 32-bit counters: head and tail of the submission queue,
            head and tail of the completion queue.
        sqes: int64 `[entries, 8]`, the submission entries.
        cqes: int64 `[n, 2]`, the completions.

    Raises:
        OSError: io_uring is missing (ENOSYS), not allowed (EPERM), too old, or locks more memory
            than this process may (ENOMEM).
    """

    def __init__(self, entries: int) -> None:
        parameters = _Params()
        for flags in FLAGS:
            parameters = _Params(flags=flags)
            try:
                self.fd = _call(SETUP, entries, ctypes.addressof(parameters))
            except OSError as error:
                if error.errno != errno.EINVAL or flags == FLAGS[-1]:
                    raise
            else:
                break
        self.flags = flags
        try:
            self._require(parameters.features)
            self._map(parameters)
        except BaseException:
            os.close(self.fd)
            raise

    def register(self, address: int, n_bytes: int) -> bool:
        """Pin memory, so that transfers need not do it; False where that is not allowed."""
        vector = np.array([address, n_bytes], np.uint64)
        try:
            _call(REGISTER, self.fd, _REGISTER_BUFFERS, vector.ctypes.data, 1)
        except OSError:
            return False  # ENOMEM beyond RLIMIT_MEMLOCK; after any error transfers are only slower
        return True

    def _require(self, features: int) -> None:
        probe = np.zeros(16 + 8 * 256, np.uint8)
        _call(REGISTER, self.fd, _REGISTER_PROBE, probe.ctypes.data, 256)
        known = probe[16:].reshape(256, 8)[:, 2] & 1
        wanted = [FSYNC, READ_FIXED, WRITE_FIXED, ASYNC_CANCEL, OP_READ, OP_WRITE]
        if not known[wanted].all() or ~features & (_SINGLE_MMAP | _NODROP):
            raise OSError(errno.ENOSYS, "this kernel's io_uring is too old")

    def _map(self, p: _Params) -> None:
        array = 0 if self.flags & NO_SQARRAY else p.sq_off[_SQ_ARRAY] + 4 * p.sq_entries
        rings = self._memory(max(array, p.cq_off[_CQ_CQES] + 16 * p.cq_entries), 0)
        entries = self._memory(64 * p.sq_entries, _OFF_SQES)
        offsets = p.sq_off[_SQ_HEAD], p.sq_off[_SQ_TAIL], p.cq_off[_CQ_HEAD], p.cq_off[_CQ_TAIL]
        self.counters = [rings.ctypes.data + offset for offset in offsets]
        if array:
            rings[array - 4 * p.sq_entries : array].view(np.uint32)[:] = np.arange(p.sq_entries)
        start = p.cq_off[_CQ_CQES]
        self.cqes = rings[start : start + 16 * p.cq_entries].view(np.int64).reshape(-1, 2)
        self.sqes = entries.view(np.int64).reshape(-1, 8)

    def _memory(self, n_bytes: int, offset: int) -> NDArray[Any]:
        flags, both = mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE
        mapping = mmap.mmap(self.fd, n_bytes, flags, both, offset=offset)
        with contextlib.suppress(OSError):  # a child must not answer for its parent
            mapping.madvise(mmap.MADV_DONTFORK)
        return np.frombuffer(mapping, np.uint8)


def _call(number: int, *arguments: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = [ctypes.c_long] * (1 + len(arguments))
    result = int(call(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "io_uring")
    return result


# Atomic loads and stores between two threads, or a thread and the kernel; for compiled code.

_WORDS = {4: types.int32, 8: types.int64}


def _loader(n_bytes: int) -> Any:
    @instruction(_WORDS[n_bytes])
    def load_acquire(builder, address):
        pointer = builder.inttoptr(address, ir.IntType(8 * n_bytes).as_pointer())
        return builder.load_atomic(pointer, ordering="acquire", align=n_bytes)

    return load_acquire


def _storer(n_bytes: int) -> Any:
    word = ir.IntType(8 * n_bytes)

    @instruction()
    def store_release(builder, address, value):
        value = value if n_bytes == 8 else builder.trunc(value, word)
        pointer = builder.inttoptr(address, word.as_pointer())
        builder.store_atomic(value, pointer, ordering="release", align=n_bytes)

    return store_release


load32, load64 = _loader(4), _loader(8)
store32, store64 = _storer(4), _storer(8)

# Words of `control`, each in a cache line of its own. Counters only grow.
# Operations: SUBMITTED, TAKEN, and those IN_KERNEL; cancellations: ASKED, HEARD; completions:
# ANSWERED, REPORTED; the waiting thread is woken when WANTED are answered, and 0 means that none
# waits. WOKEN is the target of the ring's reads from the eventfd, ONE the word written to one.
SUBMITTED, TAKEN, ASKED, HEARD, ANSWERED, REPORTED = range(0, 48, 8)
WANTED, STOP, IN_KERNEL, WOKEN, ONE = range(48, 88, 8)
CONTROL_WORDS = 88

# Words of `facts`, which never change.
SQ_HEAD, SQ_TAIL, CQ_HEAD, CQ_TAIL, FD, WAKE_FD, DONE_FD, FIXED_AT, FIXED_BYTES = range(9)

# Words of `state`, private to the loop.
FREE, TAIL, ARMED, STOPPED = range(4)
STATES = 4

# Columns of `slots`: operations in the kernel.
OP, FILE, OFFSET, ADDRESS, LENGTH, TAG, DONE, TRIES = range(8)
COLUMNS = 8

GONE = 0xFFFF_FFFF  # in place of an operation that was cancelled before it began
UNUSED = -1
TO_WAKE, TO_CANCEL = -1, -2  # user data of entries that are no operations
MOST_TRIES = 100
GETEVENTS, DATASYNC = 1, 1
LOW32 = 0xFFFF_FFFF
EINTR, EAGAIN, EBUSY, EINVAL = errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.EINVAL
ENOSPC, ECANCELED = errno.ENOSPC, errno.ECANCELED

_seven = (types.int64,) * 7
_syscall = types.ExternalFunction("syscall", types.int64(*_seven))
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))
_errno_at = types.ExternalFunction("__errno_location", types.int64())
_yield = types.ExternalFunction("sched_yield", types.int32())

loop = kept(nogil=True, error_model="numpy")
"""Compile a function to run without the interpreter's lock."""
call = kept(error_model="numpy")
"""Compile a function to run with the lock: it is too short to release the lock and wait for it."""


class Served(NamedTuple):
    """Memory of the loop, all of int64.

    Attributes:
        facts: Constants.
        control: `[CONTROL_WORDS]`, shared with Python.
        requests: `[n, 5]`, operations, a ring; lengths of rings are powers of two.
        cancels: `[n]`, tags, a ring.
        answers: `[n, 2]`, completions, a ring.
        sqes: `[n, 8]`, the kernel's submission entries.
        cqes: `[n, 2]`, its completions.
        slots: `[depth, COLUMNS]`, operations in the kernel.
        free: `[depth]`, numbers of unused slots.
        state: `[STATES]`.
    """

    facts: Any
    control: Any
    requests: Any
    cancels: Any
    answers: Any
    sqes: Any
    cqes: Any
    slots: Any
    free: Any
    state: Any


@call
def push(control: Any, requests: Any, rows: Any, wake_fd: int) -> None:
    """Add operations, int64 `[n, 5]`, to the ring, which has room for them; wake the loop."""
    submitted, mask = control[SUBMITTED], len(requests) - 1
    for i in range(len(rows)):
        for k in range(5):
            requests[(submitted + i) & mask, k] = rows[i, k]
    store64(control.ctypes.data + 8 * SUBMITTED, submitted + len(rows))
    _write(wake_fd, control.ctypes.data + 8 * ONE, 8)


@call
def ask(control: Any, cancels: Any, tags: Any, wake_fd: int) -> None:
    """Ask for an end of operations; drop tags that do not fit into the ring."""
    asked, mask = control[ASKED], len(cancels) - 1
    room = len(cancels) - (asked - load64(control.ctypes.data + 8 * HEARD))
    count = min(room, len(tags))
    for i in range(count):
        cancels[(asked + i) & mask] = tags[i]
    store64(control.ctypes.data + 8 * ASKED, asked + count)
    _write(wake_fd, control.ctypes.data + 8 * ONE, 8)


@call
def pop(control: Any, answers: Any, out: Any) -> int:
    """Take completions into `out`, int64 `[n, 2]`; return how many."""
    reported, mask = control[REPORTED], len(answers) - 1
    count = min(load64(control.ctypes.data + 8 * ANSWERED) - reported, len(out))
    for i in range(count):
        out[i, 0] = answers[(reported + i) & mask, 0]
        out[i, 1] = answers[(reported + i) & mask, 1]
    store64(control.ctypes.data + 8 * REPORTED, reported + count)
    return count


@call
def ready(control: Any) -> int:
    """Return how many completions wait to be taken."""
    return load64(control.ctypes.data + 8 * ANSWERED) - control[REPORTED]


@call
def want(control: Any) -> bool:
    """Ask for the eventfd when a completion waits; False where one does already."""
    wanted = control[REPORTED] + 1
    store64(control.ctypes.data + 8 * WANTED, wanted)
    fence()
    return load64(control.ctypes.data + 8 * ANSWERED) < wanted


@call
def stop(control: Any, wake_fd: int) -> None:
    """Make the loop cancel operations in flight, and return."""
    store64(control.ctypes.data + 8 * STOP, 1)
    _write(wake_fd, control.ctypes.data + 8 * ONE, 8)


@loop
def serve(s: Served) -> int:
    """Move operations into the io_uring and completions out of it until `stop` is called.

    Returns:
        0, or the errno because of which the ring cannot be entered any more.
    """
    facts, control, state, slots = s.facts, s.control, s.state, s.slots
    base = control.ctypes.data
    for i in range(len(slots)):
        slots[i, OP], s.free[i] = UNUSED, i
    state[FREE] = len(slots)
    state[TAIL] = load32(facts[SQ_TAIL])
    while True:
        if load64(base + 8 * STOP) and not state[STOPPED]:
            _cancel_all(s)
        _hear(s)
        _begin(s)
        _tell(s)
        control[IN_KERNEL] = len(slots) - state[FREE]
        if state[STOPPED] and state[FREE] == len(slots) and not state[ARMED]:
            return 0
        if not state[ARMED] and not state[STOPPED]:
            state[ARMED] = 1
            _entry(s, OP_READ | facts[WAKE_FD] << 32, 0, base + 8 * WOKEN, 8, TO_WAKE)
        store32(facts[SQ_TAIL], state[TAIL] & LOW32)
        entries = (state[TAIL] - load32(facts[SQ_HEAD])) & LOW32
        if _syscall(ENTER, facts[FD], entries, 1, GETEVENTS, 0, 8) < 0:
            code = int(load32(_errno_at()))
            if code not in (EINTR, EAGAIN, EBUSY):
                _recall(s, code)
                return code
            _yield()
        _reap(s)
        _tell(s)


@loop
def _recall(s: Served, code: int) -> None:
    """Answer operations with entries that the kernel has not taken, and never will."""
    count = (s.state[TAIL] - load32(s.facts[SQ_HEAD])) & LOW32
    for k in range(s.state[TAIL] - count, s.state[TAIL]):
        user = s.sqes[k & (len(s.sqes) - 1), 4]
        if user >= 0:
            _end(s, user, -code)
    s.control[IN_KERNEL] = len(s.slots) - s.state[FREE]


@loop
def _end(s: Served, i: int, result: int) -> None:
    """Answer an operation, and free its slot."""
    _answer(s, s.slots[i, TAG], result)
    s.slots[i, OP] = UNUSED
    s.free[s.state[FREE]] = i
    s.state[FREE] += 1


@loop
def _entry(s: Served, head: int, offset: int, address: int, length: int, user: int) -> None:
    """Write a submission entry; `length` has the operation's flags in its upper half."""
    sqes, i = s.sqes, s.state[TAIL] & (len(s.sqes) - 1)
    sqes[i, 0], sqes[i, 1], sqes[i, 2], sqes[i, 3] = head, offset, address, length
    sqes[i, 4], sqes[i, 5], sqes[i, 6], sqes[i, 7] = user, 0, 0, 0
    s.state[TAIL] += 1


@loop
def _room(s: Served) -> int:
    """Return how many entries are free beyond those that slots and the eventfd may need."""
    used = (s.state[TAIL] - load32(s.facts[SQ_HEAD])) & LOW32
    return len(s.sqes) - used - len(s.slots) - 1


@loop
def _start(s: Served, i: int) -> None:
    """Hand the rest of an operation to the kernel."""
    slots, facts = s.slots, s.facts
    fd = (slots[i, FILE] & LOW32) << 32
    if slots[i, OP] == SYNC:
        _entry(s, FSYNC | fd, 0, 0, DATASYNC << 32, i)
        return
    done = slots[i, DONE]
    address, length = slots[i, ADDRESS] + done, min(slots[i, LENGTH] - done, PIECE_BYTES)
    at = address - facts[FIXED_AT]
    if at >= 0 and at + length <= facts[FIXED_BYTES]:
        code = READ_FIXED if slots[i, OP] == READ else WRITE_FIXED
    else:
        code = OP_READ if slots[i, OP] == READ else OP_WRITE
    _entry(s, code | fd, slots[i, OFFSET] + done, address, length, i)


@loop
def _answer(s: Served, tag: int, result: int) -> None:
    control, at = s.control, s.control[ANSWERED] & (len(s.answers) - 1)
    s.answers[at, 0], s.answers[at, 1] = tag, result
    store64(control.ctypes.data + 8 * ANSWERED, control[ANSWERED] + 1)


@loop
def _tell(s: Served) -> None:
    """Wake the waiting thread, if a completion is there that it wants."""
    fence()
    base = s.control.ctypes.data
    if 0 < load64(base + 8 * WANTED) <= s.control[ANSWERED]:
        store64(base + 8 * WANTED, 0)
        _write(s.facts[DONE_FD], base + 8 * ONE, 8)


@loop
def _begin(s: Served) -> None:
    """Start operations while there are slots for them."""
    control, slots, state = s.control, s.slots, s.state
    taken, mask = control[TAKEN], len(s.requests) - 1
    submitted = load64(control.ctypes.data + 8 * SUBMITTED)
    while taken < submitted:
        row = s.requests[taken & mask]
        op, fd, length, tag = row[0] & LOW32, row[0] >> 32, row[3], row[4]
        if op == GONE:
            pass
        elif state[STOPPED]:
            _answer(s, tag, -ECANCELED)
        elif op > SYNC or length < 0:
            _answer(s, tag, -EINVAL)
        elif length == 0 and op != SYNC:
            _answer(s, tag, 0)
        elif state[FREE] == 0:
            break
        else:
            state[FREE] -= 1
            i = s.free[state[FREE]]
            slots[i, OP], slots[i, FILE], slots[i, OFFSET] = op, fd, row[1]
            slots[i, ADDRESS], slots[i, LENGTH], slots[i, TAG] = row[2], length, tag
            slots[i, DONE], slots[i, TRIES] = 0, 0
            _start(s, i)
        taken += 1
    store64(control.ctypes.data + 8 * TAKEN, taken)


@loop
def _reap(s: Served) -> None:
    """Take completions from the kernel, and continue or answer their operations."""
    head, tail = np.int64(load32(s.facts[CQ_HEAD])), np.int64(load32(s.facts[CQ_TAIL]))
    count = (tail - head) & LOW32
    for k in range(count):
        entry = s.cqes[(head + k) & (len(s.cqes) - 1)]
        user, result = entry[0], np.int64(np.int32(entry[1] & LOW32))
        if user == TO_WAKE:
            s.state[ARMED] = 0
        elif user >= 0:
            if _goes_on(s.slots, user, result) and not s.state[STOPPED]:
                _start(s, user)
            else:
                _end(s, user, _result(s.slots, user, result))
    store32(s.facts[CQ_HEAD], (head + count) & LOW32)


@loop
def _goes_on(slots: Any, i: int, result: int) -> bool:
    """Return whether an operation needs another entry for its rest."""
    if result in (-EINTR, -EAGAIN):
        slots[i, TRIES] += 1
        return slots[i, TRIES] <= MOST_TRIES
    if result <= 0 or slots[i, OP] == SYNC:
        return False
    slots[i, DONE] += result
    slots[i, TRIES] = 0
    return slots[i, DONE] < slots[i, LENGTH]


@loop
def _result(slots: Any, i: int, result: int) -> int:
    """Return the reported result of an operation with a last entry that gave `result`."""
    op, done = slots[i, OP], slots[i, DONE]
    if op == SYNC:
        return min(result, 0)
    if result == 0:
        return done if op == READ else -ENOSPC
    if result == -EINVAL and op == READ and done > 0:
        return done  # a direct read of a file that ends within a sector: the rest is not aligned
    if result < 0:
        return result
    return done if done >= slots[i, LENGTH] else -ECANCELED  # closed before it could continue


@loop
def _hear(s: Served) -> None:
    """Cancel operations: waiting ones at once, those in the kernel as far as it can."""
    control, slots, requests = s.control, s.slots, s.requests
    heard, asked = control[HEARD], load64(control.ctypes.data + 8 * ASKED)
    submitted = load64(control.ctypes.data + 8 * SUBMITTED)
    while heard < asked and _room(s) > 0:
        tag = s.cancels[heard & (len(s.cancels) - 1)]
        heard += 1
        for i in range(len(slots)):
            if slots[i, OP] != UNUSED and slots[i, TAG] == tag:
                _entry(s, ASYNC_CANCEL, 0, i, 0, TO_CANCEL)
        for k in range(control[TAKEN], submitted):
            row = requests[k & (len(requests) - 1)]
            if row[0] & LOW32 != GONE and row[4] == tag:
                row[0] = GONE
                _answer(s, tag, -ECANCELED)
    store64(control.ctypes.data + 8 * HEARD, heard)


@loop
def _cancel_all(s: Served) -> None:
    if _room(s) < len(s.slots):
        return  # on the next round
    for i in range(len(s.slots)):
        if s.slots[i, OP] != UNUSED:
            _entry(s, ASYNC_CANCEL, 0, i, 0, TO_CANCEL)
    s.state[STOPPED] = 1


# The engine.

DEPTH = 32  # enough for any device; a larger depth hands a batch over whole and gets it back whole
CAPACITY = 8192  # most operations in the loop's rings; more wait on this side
CLOSE_S = 10.0
START_S = 120.0  # the first time on a machine the loop is compiled
LONGEST_S = 1e6
SHARED_WAIT_S = 0.005  # interval at which the second of two waiting threads looks for itself


class UringEngine(DirectFiles):
    """`IOEngine` over io_uring, which must be closed.

    Args:
        depth: Most operations in the kernel at a time.
        arena: Memory to register with the ring, which makes transfers a little cheaper; where the
            limit of locked memory forbids it, it is used unregistered.

    Attributes:
        flags: Set-up flags that the kernel granted.
        registered: Whether the arena is registered.

    Raises:
        OSError: io_uring is missing or not allowed here.
    """

    name = "io_uring"

    def __init__(self, *, depth: int = DEPTH, arena: Arena | None = None) -> None:
        super().__init__(True)
        self.depth, self._arena = depth, arena
        self.flags, self.registered = 0, False
        self._pid, self._closed, self._open = os.getpid(), False, True
        self._lock, self._waiting = threading.Lock(), threading.Lock()
        self._held: deque[NDArray[np.int64]] = deque()  # operations for which the loop has no room
        self._extra: list[NDArray[np.int64]] = []  # completions made outside of the loop
        self._requests = np.zeros((CAPACITY, 5), np.int64)
        self._cancels = np.zeros(CAPACITY, np.int64)
        self._answers = np.zeros((CAPACITY, 2), np.int64)
        self._control = np.zeros(CONTROL_WORDS, np.int64)
        self._control[ONE] = 1
        self._up = threading.Event()  # the loop runs, or never will
        self._error: BaseException | None = None  # the reason why it never ran
        self._ended, self._code = False, 0  # the errno that ended it
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)  # blocking: the ring waits on it
        try:
            self._done_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            os.close(self._wake_fd)
            raise
        thread = begin(self._run, name="flowkv io_uring")
        if thread is None:
            self._close_files()
            raise OSError(errno.EAGAIN, "no thread can start")
        self._thread = thread
        self._up.wait()
        if self._error is not None:
            self._thread.join()
            self._close_files()
            raise self._error
        self._try()

    def submit(self, operations: Operations) -> None:
        """Hand operations to the loop.

        Raises:
            StateError: The engine is closed, or was opened before a fork.
        """
        if self._pid != os.getpid():
            raise StateError("the engine was opened before a fork", "Open another one, here")
        # a copy: the caller may change its array
        rows = np.array(operations, OPERATION).view(np.int64).reshape(-1, 5)
        with self._lock:
            if self._closed:
                raise StateError("the engine is closed", "Open another one")
            if self._ended:
                self._fail(rows, self._code or errno.EIO)
            elif len(rows):
                self._held.append(rows)
                self._push()

    def wait(self, timeout_s: float = 0.0) -> Completions:
        """Return the completions so far; wait up to `timeout_s` for the first one."""
        end_s, taken = time.monotonic() + timeout_s, list[NDArray[np.int64]]()
        while self._pid == os.getpid():
            with self._lock:
                over = self._closed or self._ended
                taken = self._take()
            left_s = end_s - time.monotonic()
            if taken or over or left_s <= 0:
                break
            self._await(left_s)
        return np.concatenate([np.empty((0, 2), np.int64), *taken]).view(COMPLETION)[:, 0]

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """End operations that have not begun, and ask the kernel to cancel the others."""
        if self._pid != os.getpid():
            return
        wanted = np.ascontiguousarray(tags, np.uint64).view(np.int64)
        with self._lock:
            if self._closed or self._ended:
                return
            for i, rows in enumerate(self._held):
                gone = np.isin(rows[:, 4], wanted)
                self._fail(rows[gone], errno.ECANCELED)
                self._held[i] = rows[~gone]
            ask(self._control, self._cancels, wanted, self._wake_fd)
            os.eventfd_write(self._done_fd, 1)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Cancel operations not begun and wait for the rest; False if that took too long."""
        if self._pid != os.getpid():
            return True
        with self._lock:
            first, self._closed = not self._closed, True
            if first and not self._ended:
                for rows in self._held:
                    self._fail(rows, errno.ECANCELED)
                self._held.clear()
                stop(self._control, self._wake_fd)
        self._thread.join(timeout_s)
        if self._thread.is_alive() or self._control[IN_KERNEL]:
            return False
        if self._open:
            os.eventfd_write(self._done_fd, 1)
            with self._waiting, self._lock:
                self._close_files()
        return True

    def _close_files(self) -> None:
        self._open = False
        os.close(self._wake_fd)
        os.close(self._done_fd)

    def _try(self) -> None:
        """Run one operation, so that all compiled code is loaded and a mute ring is noticed now."""
        self.submit(np.array([(SYNC, -1, 0, 0, 0, 0)], OPERATION))
        results = self.wait(START_S)["result"].tolist()
        if results != [-errno.EBADF]:
            self.close()
            code = -results[0] if results else errno.ETIME
            raise OSError(code, os.strerror(code), "io_uring")

    def _push(self) -> None:
        """Pass the loop as many operations as it has room for. The lock is held."""
        room = CAPACITY - int(self._control[SUBMITTED] - self._control[REPORTED])
        while self._held and room > 0:
            rows = self._held.popleft()
            if len(rows) > room:
                self._held.appendleft(rows[room:])
                rows = rows[:room]
            room -= len(rows)
            push(self._control, self._requests, rows, self._wake_fd)

    def _take(self) -> list[NDArray[np.int64]]:
        """Take all completions that are there. The lock is held."""
        if self._ended and not self._closed:
            self._give_up()
        taken, self._extra = [rows for rows in self._extra if len(rows)], []
        count = ready(self._control)
        if count:
            rows = np.empty((count, 2), np.int64)
            pop(self._control, self._answers, rows)
            taken.append(rows)
            if self._held:
                self._push()
        return taken

    def _give_up(self) -> None:
        """Fail all operations that had not begun when the loop ended by itself."""
        for k in range(self._control[TAKEN], self._control[SUBMITTED]):
            row = self._requests[k % CAPACITY]
            if row[0] & LOW32 != GONE:
                self._fail(row[None], self._code)
        self._control[TAKEN] = self._control[SUBMITTED]
        for rows in self._held:
            self._fail(rows, self._code)
        self._held.clear()

    def _fail(self, rows: NDArray[np.int64], code: int) -> None:
        answers = np.full((len(rows), 2), -code, np.int64)
        answers[:, 0] = rows[:, 4]
        self._extra.append(answers)

    def _await(self, timeout_s: float) -> None:
        """Wait until a completion is there, or the state of the engine has changed."""
        end_s = time.monotonic() + timeout_s
        if not self._waiting.acquire(timeout=min(timeout_s, SHARED_WAIT_S)):
            return
        try:
            with self._lock:
                if self._extra or self._closed or self._ended:
                    return
                waits = want(self._control)
            if waits:
                poll = select.poll()
                poll.register(self._done_fd, select.POLLIN)
                poll.poll(max(0.0, 1e3 * min(end_s - time.monotonic(), LONGEST_S)))
                with contextlib.suppress(BlockingIOError):  # another thread read it
                    os.eventfd_read(self._done_fd)
        finally:
            self._waiting.release()

    def _run(self) -> None:
        """Make the ring in this thread, since only its maker may enter it, and serve it."""
        # other threads may handle them
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ring: Ring | None = None
        try:
            ring, arena, fixed = Ring(4 * self.depth), self._arena, (0, 0)
            if arena is not None and arena.n_bytes <= PIECE_BYTES:
                self.registered = ring.register(arena.address, arena.n_bytes)
                fixed = (arena.address, arena.n_bytes) if self.registered else fixed
            served = self._serving(ring, fixed)
        except BaseException as error:
            if ring is not None:
                os.close(ring.fd)
            self._error = error.with_traceback(None)  # its frames hold mappings, which hold files
            return
        finally:
            self._up.set()
        try:
            self._code = serve(served)
        finally:
            if not self._control[IN_KERNEL]:
                os.close(ring.fd)
            self._ended = True
            os.eventfd_write(self._done_fd, 1)

    def _serving(self, ring: Ring, fixed: tuple[int, int]) -> Served:
        """Return the memory of the loop."""
        facts = *ring.counters, ring.fd, self._wake_fd, self._done_fd, *fixed
        work = np.zeros((self.depth, COLUMNS), np.int64), np.zeros(self.depth, np.int64)
        self.flags, self._code = ring.flags, errno.EIO
        return Served(
            np.array(facts, np.int64),
            *(self._control, self._requests, self._cancels, self._answers),
            *(ring.sqes, ring.cqes, *work, np.zeros(STATES, np.int64)),
        )
