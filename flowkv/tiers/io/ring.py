"""An io_uring: made with plain system calls, seen through numpy. Nothing here is compiled.

Numbers and layouts are those of the kernel's `include/uapi/linux/io_uring.h`, which never change.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
"""Flags to try, the best first; a kernel answers EINVAL to those it does not know."""

FSYNC, READ_FIXED, WRITE_FIXED, ASYNC_CANCEL, READ, WRITE = 3, 4, 5, 14, 22, 23

_SINGLE_MMAP, _NODROP = 1 << 0, 1 << 1
_REGISTER_BUFFERS, _REGISTER_PROBE = 0, 8
_OFF_SQES = 0x1000_0000
_BUFFER_BYTES = 1 << 30  # largest registered buffer
_SQ_HEAD, _SQ_TAIL, _SQ_ARRAY = 0, 1, 6
_CQ_HEAD, _CQ_TAIL, _CQ_CQES = 0, 1, 5


class _Params(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_uint32)
            for name in (
                *("sq_entries", "cq_entries", "flags", "sq_thread_cpu"),
                *("sq_thread_idle", "features", "wq_fd"),
            )
        ),
        ("reserved", ctypes.c_uint32 * 3),
        ("sq_off", ctypes.c_uint32 * 10),
        ("cq_off", ctypes.c_uint32 * 10),
    ]


class Ring:
    """One ring. Only the thread that makes it may enter it.

    Args:
        entries: Of the submission queue; rounded up to a power of two.

    Attributes:
        fd: Of the ring.
        flags: Those that were granted.
        entries: Of the submission queue.
        cq_entries: Of the completion queue.
        sq_head, sq_tail, cq_head, cq_tail: Addresses of the kernel's 32-bit counters.
        sqes: int64 `[entries, 8]`, the submission entries.
        cqes: int64 `[cq_entries, 2]`, the completions.

    Raises:
        OSError: io_uring is not there (ENOSYS), not allowed (EPERM), too old, or locks more memory
            than this process may (ENOMEM).
    """

    def __init__(self, entries: int) -> None:
        parameters = _Params()
        self.fd = -1
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
        """Pins memory, so that transfers need not do it; False where that is not allowed."""
        starts = range(address, address + n_bytes, _BUFFER_BYTES)
        pieces = [(start, min(_BUFFER_BYTES, address + n_bytes - start)) for start in starts]
        vectors = np.array(pieces, np.uint64)
        try:
            _call(REGISTER, self.fd, _REGISTER_BUFFERS, vectors.ctypes.data, len(vectors))
        except OSError:
            return False  # ENOMEM beyond RLIMIT_MEMLOCK; whatever it was, it is only slower
        return True

    def close(self) -> None:
        """Ends the ring; nothing may be in flight."""
        os.close(self.fd)

    def _require(self, features: int) -> None:
        probe = np.zeros(16 + 8 * 256, np.uint8)
        _call(REGISTER, self.fd, _REGISTER_PROBE, probe.ctypes.data, 256)
        known = probe[16:].reshape(256, 8)[:, 2] & 1
        wanted = [FSYNC, READ_FIXED, WRITE_FIXED, ASYNC_CANCEL, READ, WRITE]
        if not known[wanted].all() or ~features & (_SINGLE_MMAP | _NODROP):
            raise OSError(errno.ENOSYS, "this kernel's io_uring is too old")

    def _map(self, p: _Params) -> None:
        self.entries, self.cq_entries = p.sq_entries, p.cq_entries
        array = 0 if self.flags & NO_SQARRAY else p.sq_off[_SQ_ARRAY] + 4 * p.sq_entries
        rings = self._memory(max(array, p.cq_off[_CQ_CQES] + 16 * p.cq_entries), 0)
        entries = self._memory(64 * p.sq_entries, _OFF_SQES)
        base = rings.ctypes.data
        self.sq_head, self.sq_tail = base + p.sq_off[_SQ_HEAD], base + p.sq_off[_SQ_TAIL]
        self.cq_head, self.cq_tail = base + p.cq_off[_CQ_HEAD], base + p.cq_off[_CQ_TAIL]
        if array:
            rings[array - 4 * p.sq_entries : array].view(np.uint32)[:] = np.arange(p.sq_entries)
        start = p.cq_off[_CQ_CQES]
        self.cqes = rings[start : start + 16 * p.cq_entries].view(np.int64).reshape(-1, 2)
        self.sqes = entries.view(np.int64).reshape(-1, 8)

    def _memory(self, n_bytes: int, offset: int) -> NDArray[Any]:
        mapping = mmap.mmap(
            self.fd,
            n_bytes,
            mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0),
            mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset,
        )
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
