"""The loop that feeds an io_uring: compiled, one call from start to end, without the interpreter.

`serve` runs on a thread of its own and returns only when it is told to stop, so that transfers keep
their pace while Python is busy. Python threads talk to it through arrays: `push` adds operations to
a ring and writes to an eventfd that the io_uring itself waits on; `serve` adds completions to
another ring and writes to a second eventfd when as many are there as somebody waits for.

All words are int64 (numba turns a mix with unsigned ones into floats); tags only pass through.
"""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from flowkv.tiers.io.engine import READ, SYNC
from flowkv.tiers.io.ring import ASYNC_CANCEL, ENTER, FSYNC, READ_FIXED, WRITE_FIXED
from flowkv.tiers.io.ring import READ as OP_READ
from flowkv.tiers.io.ring import WRITE as OP_WRITE

# Loads and stores that two threads, or a thread and the kernel, agree about; for compiled code.

_WORDS = {4: types.int32, 8: types.int64}


def _loader(n_bytes: int) -> Any:
    @intrinsic
    def load_acquire(context, address):
        def emit(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], ir.IntType(8 * n_bytes).as_pointer())
            return builder.load_atomic(pointer, ordering="acquire", align=n_bytes)

        return _WORDS[n_bytes](types.int64), emit

    return load_acquire


def _storer(n_bytes: int) -> Any:
    @intrinsic
    def store_release(context, address, value):
        def emit(context, builder, signature, arguments):
            word = ir.IntType(8 * n_bytes)
            pointer = builder.inttoptr(arguments[0], word.as_pointer())
            value = arguments[1]
            if n_bytes < 8:
                value = builder.trunc(value, word)
            builder.store_atomic(value, pointer, ordering="release", align=n_bytes)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    return store_release


@intrinsic
def fence(context):
    """What was stored before is seen by others before anything is loaded after."""

    def emit(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


load32, load64 = _loader(4), _loader(8)
store32, store64 = _storer(4), _storer(8)


# Words of `control`, each in a cache line of its own. Counters only grow.
SUBMITTED, TAKEN = 0, 8  # operations
ASKED, HEARD = 16, 24  # cancellations
ANSWERED, REPORTED = 32, 40  # completions
WANTED = 48  # wake who waits when this many are answered; 0: nobody waits
STOP = 56
IN_KERNEL = 64  # operations that the kernel works on
WOKEN = 72  # what the ring reads from the eventfd
ONE = 80  # what is written to an eventfd
CONTROL_WORDS = 88

# Words of `facts`, which never change.
FD, DEPTH, WAKE_FD, DONE_FD, SQ_HEAD, SQ_TAIL, CQ_HEAD, CQ_TAIL, FIXED_AT, FIXED_BYTES = range(10)
FACTS = 10

# Words of `state`, which only the loop knows.
FREE, TAIL, ARMED, STOPPED = range(4)
STATES = 4

# Columns of `slots`: operations that the kernel works on.
OP, FILE, OFFSET, ADDRESS, LENGTH, TAG, DONE, TRIES = range(8)
COLUMNS = 8

GONE = 0xFFFF_FFFF  # in place of an operation that was cancelled before it began
UNUSED = -1
TO_WAKE, TO_CANCEL = -1, -2  # user data of entries that are no operations
PIECE_BYTES = 1 << 30
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

loop = njit(nogil=True, cache=True, error_model="numpy")
"""Runs without the interpreter's lock."""
call = njit(cache=True, error_model="numpy")
"""Runs with it: too short to be worth giving it away, and then waiting for it."""


@call
def push(control: Any, requests: Any, rows: Any, wake_fd: int) -> None:
    """Adds operations, int64 `[n, 5]`, to the ring, which has room for them; wakes the loop."""
    submitted, mask = control[SUBMITTED], len(requests) - 1
    for i in range(len(rows)):
        for k in range(5):
            requests[(submitted + i) & mask, k] = rows[i, k]
    store64(control.ctypes.data + 8 * SUBMITTED, submitted + len(rows))
    _write(wake_fd, control.ctypes.data + 8 * ONE, 8)


@call
def ask(control: Any, cancels: Any, tags: Any, wake_fd: int) -> None:
    """Asks for an end of operations; more than fit into the ring are not heard."""
    asked, mask = control[ASKED], len(cancels) - 1
    room = len(cancels) - (asked - load64(control.ctypes.data + 8 * HEARD))
    count = min(room, len(tags))
    for i in range(count):
        cancels[(asked + i) & mask] = tags[i]
    store64(control.ctypes.data + 8 * ASKED, asked + count)
    _write(wake_fd, control.ctypes.data + 8 * ONE, 8)


@call
def pop(control: Any, answers: Any, out: Any) -> int:
    """Takes completions into `out`, int64 `[n, 2]`; returns how many."""
    reported, mask = control[REPORTED], len(answers) - 1
    count = min(load64(control.ctypes.data + 8 * ANSWERED) - reported, len(out))
    for i in range(count):
        out[i, 0] = answers[(reported + i) & mask, 0]
        out[i, 1] = answers[(reported + i) & mask, 1]
    store64(control.ctypes.data + 8 * REPORTED, reported + count)
    return count


@call
def ready(control: Any) -> int:
    """How many completions wait to be taken."""
    return load64(control.ctypes.data + 8 * ANSWERED) - control[REPORTED]


@call
def want(control: Any, count: int) -> bool:
    """Asks for the eventfd when `count` completions wait; False where they do already."""
    wanted = control[REPORTED] + count
    store64(control.ctypes.data + 8 * WANTED, wanted)
    fence()
    return load64(control.ctypes.data + 8 * ANSWERED) < wanted


@call
def stop(control: Any, wake_fd: int) -> None:
    """Tells the loop to end what is in flight, and itself."""
    store64(control.ctypes.data + 8 * STOP, 1)
    _write(wake_fd, control.ctypes.data + 8 * ONE, 8)


@loop
def serve(facts: Any, control: Any, queues: Any, kernel: Any, work: Any) -> int:
    """Moves operations into the io_uring and completions out of it until told to stop.

    Args:
        facts: int64 `[FACTS]`.
        control: int64 `[CONTROL_WORDS]`.
        queues: (requests int64 `[n, 5]`, cancels int64 `[n]`, answers int64 `[n, 2]`); lengths are
            powers of two.
        kernel: (submission entries int64 `[n, 8]`, completion entries int64 `[n, 2]`).
        work: (slots int64 `[depth, COLUMNS]`, free int64 `[depth]`, state int64 `[STATES]`).

    Returns:
        0, or the errno because of which the ring cannot be entered any more.
    """
    slots, free, state = work
    base = control.ctypes.data
    for i in range(len(slots)):
        slots[i, OP], free[i] = UNUSED, i
    state[FREE] = len(slots)
    state[TAIL] = load32(facts[SQ_TAIL])
    while True:
        if load64(base + 8 * STOP) and not state[STOPPED]:
            _cancel_all(facts, kernel[0], slots, state)
        _hear(facts, control, queues, kernel[0], work)
        _begin(facts, control, queues, kernel[0], work)
        _tell(facts, control)
        control[IN_KERNEL] = len(slots) - state[FREE]
        if state[STOPPED] and state[FREE] == len(slots) and not state[ARMED]:
            return 0
        if not state[ARMED] and not state[STOPPED]:
            state[ARMED] = 1
            _entry(
                kernel[0], state, OP_READ | facts[WAKE_FD] << 32, 0, base + 8 * WOKEN, 8, TO_WAKE, 0
            )
        store32(facts[SQ_TAIL], state[TAIL] & LOW32)
        entries = (state[TAIL] - load32(facts[SQ_HEAD])) & LOW32
        if _syscall(ENTER, facts[FD], entries, 1, GETEVENTS, 0, 8) < 0:
            code = int(load32(_errno_at()))
            if code not in (EINTR, EAGAIN, EBUSY):
                _recall(facts, control, queues[2], kernel[0], work, code)
                return code
            _yield()
        _reap(facts, control, queues[2], kernel, work)
        _tell(facts, control)


@loop
def _recall(facts: Any, control: Any, answers: Any, sqes: Any, work: Any, code: int) -> None:
    """Answers for operations whose entries the kernel has not taken, and never will."""
    slots, free, state = work
    count = (state[TAIL] - load32(facts[SQ_HEAD])) & LOW32
    for k in range(state[TAIL] - count, state[TAIL]):
        user = sqes[k & (len(sqes) - 1), 4]
        if user >= 0:
            _answer(control, answers, slots[user, TAG], -code)
            _free(slots, free, state, user)
    control[IN_KERNEL] = len(slots) - state[FREE]


@loop
def _free(slots: Any, free: Any, state: Any, i: int) -> None:
    slots[i, OP] = UNUSED
    free[state[FREE]] = i
    state[FREE] += 1


@loop
def _entry(
    sqes: Any, state: Any, head: int, offset: int, address: int, length: int, user: int, buffer: int
) -> None:
    """Writes a submission entry; `length` has the operation's flags in its upper half."""
    i = state[TAIL] & (len(sqes) - 1)
    sqes[i, 0], sqes[i, 1], sqes[i, 2], sqes[i, 3] = head, offset, address, length
    sqes[i, 4], sqes[i, 5], sqes[i, 6], sqes[i, 7] = user, buffer, 0, 0
    state[TAIL] += 1


@loop
def _room(facts: Any, sqes: Any, state: Any) -> int:
    """Entries that can be written beyond those that slots and the eventfd may need."""
    used = (state[TAIL] - load32(facts[SQ_HEAD])) & LOW32
    return len(sqes) - used - facts[DEPTH] - 1


@loop
def _start(facts: Any, sqes: Any, slots: Any, state: Any, i: int) -> None:
    """Hands what is left of an operation to the kernel."""
    fd = (slots[i, FILE] & LOW32) << 32
    if slots[i, OP] == SYNC:
        _entry(sqes, state, FSYNC | fd, 0, 0, DATASYNC << 32, i, 0)
        return
    done = slots[i, DONE]
    address, length = slots[i, ADDRESS] + done, min(slots[i, LENGTH] - done, PIECE_BYTES)
    at = address - facts[FIXED_AT]
    reads = slots[i, OP] == READ
    code, buffer = OP_READ if reads else OP_WRITE, 0
    if at >= 0 and at + length <= facts[FIXED_BYTES]:
        buffer = at // PIECE_BYTES
        if (at + length - 1) // PIECE_BYTES == buffer:
            code = READ_FIXED if reads else WRITE_FIXED
        else:
            buffer = 0
    _entry(sqes, state, code | fd, slots[i, OFFSET] + done, address, length, i, buffer)


@loop
def _answer(control: Any, answers: Any, tag: int, result: int) -> None:
    at = control[ANSWERED] & (len(answers) - 1)
    answers[at, 0], answers[at, 1] = tag, result
    store64(control.ctypes.data + 8 * ANSWERED, control[ANSWERED] + 1)


@loop
def _tell(facts: Any, control: Any) -> None:
    """Wakes who waits, if as many completions are there as were wanted."""
    fence()
    wanted = load64(control.ctypes.data + 8 * WANTED)
    if 0 < wanted <= control[ANSWERED]:
        store64(control.ctypes.data + 8 * WANTED, 0)
        _write(facts[DONE_FD], control.ctypes.data + 8 * ONE, 8)


@loop
def _begin(facts: Any, control: Any, queues: Any, sqes: Any, work: Any) -> None:
    """Starts operations while there are slots for them."""
    requests, _, answers = queues
    slots, free, state = work
    taken, mask = control[TAKEN], len(requests) - 1
    submitted = load64(control.ctypes.data + 8 * SUBMITTED)
    while taken < submitted:
        row = requests[taken & mask]
        op, fd, length, tag = row[0] & LOW32, row[0] >> 32, row[3], row[4]
        if op == GONE:
            pass
        elif state[STOPPED]:
            _answer(control, answers, tag, -ECANCELED)
        elif op > SYNC or length < 0:
            _answer(control, answers, tag, -EINVAL)
        elif length == 0 and op != SYNC:
            _answer(control, answers, tag, 0)
        elif state[FREE] == 0:
            break
        else:
            state[FREE] -= 1
            i = free[state[FREE]]
            slots[i, OP], slots[i, FILE], slots[i, OFFSET] = op, fd, row[1]
            slots[i, ADDRESS], slots[i, LENGTH], slots[i, TAG] = row[2], length, tag
            slots[i, DONE], slots[i, TRIES] = 0, 0
            _start(facts, sqes, slots, state, i)
        taken += 1
    store64(control.ctypes.data + 8 * TAKEN, taken)


@loop
def _reap(facts: Any, control: Any, answers: Any, kernel: Any, work: Any) -> None:
    """Takes what the kernel has completed."""
    sqes, cqes = kernel
    slots, free, state = work
    head, tail = np.int64(load32(facts[CQ_HEAD])), np.int64(load32(facts[CQ_TAIL]))
    count = (tail - head) & LOW32
    for k in range(count):
        entry = cqes[(head + k) & (len(cqes) - 1)]
        user, result = entry[0], np.int64(np.int32(entry[1] & LOW32))
        if user == TO_WAKE:
            state[ARMED] = 0
        elif user >= 0 and not _continued(facts, sqes, slots, state, user, result):
            _answer(control, answers, slots[user, TAG], _result(slots, user, result))
            slots[user, OP] = UNUSED
            free[state[FREE]] = user
            state[FREE] += 1
    store32(facts[CQ_HEAD], (head + count) & LOW32)


@loop
def _continued(facts: Any, sqes: Any, slots: Any, state: Any, i: int, result: int) -> bool:
    """Whether an operation needs another entry, for what is left of it."""
    if result in (-EINTR, -EAGAIN):
        slots[i, TRIES] += 1
        if slots[i, TRIES] > MOST_TRIES:
            return False
    elif result <= 0 or slots[i, OP] == SYNC:
        return False
    else:
        slots[i, DONE] += result
        slots[i, TRIES] = 0
        if slots[i, DONE] >= slots[i, LENGTH]:
            return False
    if state[STOPPED]:
        return False
    _start(facts, sqes, slots, state, i)
    return True


@loop
def _result(slots: Any, i: int, result: int) -> int:
    """What is reported of an operation whose last entry gave `result`."""
    op, done = slots[i, OP], slots[i, DONE]
    if op == SYNC:
        return min(result, 0)
    if result == 0:
        return done if op == READ else -ENOSPC
    if result == -EINVAL and op == READ and done > 0:
        return done  # a direct read of a file that ends within a sector: the rest is not aligned
    if result < 0:
        return result
    return done if done >= slots[i, LENGTH] else -ECANCELED  # closed before it could go on


@loop
def _hear(facts: Any, control: Any, queues: Any, sqes: Any, work: Any) -> None:
    """Cancels operations: those that wait at once, those in the kernel as far as it can."""
    requests, cancels, answers = queues
    slots, state = work[0], work[2]
    heard, asked = control[HEARD], load64(control.ctypes.data + 8 * ASKED)
    submitted = load64(control.ctypes.data + 8 * SUBMITTED)
    while heard < asked and _room(facts, sqes, state) > 0:
        tag = cancels[heard & (len(cancels) - 1)]
        heard += 1
        for i in range(len(slots)):
            if slots[i, OP] != UNUSED and slots[i, TAG] == tag:
                _entry(sqes, state, ASYNC_CANCEL, 0, i, 0, TO_CANCEL, 0)
        for k in range(control[TAKEN], submitted):
            row = requests[k & (len(requests) - 1)]
            if row[0] & LOW32 != GONE and row[4] == tag:
                row[0] = GONE
                _answer(control, answers, tag, -ECANCELED)
    store64(control.ctypes.data + 8 * HEARD, heard)


@loop
def _cancel_all(facts: Any, sqes: Any, slots: Any, state: Any) -> None:
    if _room(facts, sqes, state) < len(slots):
        return  # on the next round
    for i in range(len(slots)):
        if slots[i, OP] != UNUSED:
            _entry(sqes, state, ASYNC_CANCEL, 0, i, 0, TO_CANCEL, 0)
    state[STOPPED] = 1
