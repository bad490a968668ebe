"""Answers of system calls that this machine's files never give."""

from __future__ import annotations

import ctypes
import errno

import pytest

from tests.inside import MOST_BYTES, READ, WRITE, ThreadsEngine


@pytest.mark.parametrize(
    ("op", "answers", "reported"),
    [
        (READ, [4096, 4096, 4096], 12288),
        (READ, [4096, -errno.EINTR, 8192], 12288),
        (READ, [-errno.EINTR, 5000, 0], 5000),
        (READ, [5000, -errno.EINVAL], 5000),  # a direct read went on where no sector begins
        (READ, [-errno.EINVAL], -errno.EINVAL),
        (READ, [4096, -errno.EIO], -errno.EIO),
        (WRITE, [4096, 1, 8191], 12288),
        (WRITE, [4096, 0], -errno.ENOSPC),
        (WRITE, [4096, -errno.EINVAL], -errno.EINVAL),
        (WRITE, [-errno.EDQUOT], -errno.EDQUOT),
    ],
)
def test_transfers_go_on_until_they_end(op: int, answers: list[int], reported: int) -> None:
    engine, calls, left = ThreadsEngine(), [], list(answers)

    def call(fd: int, address: int, length: int, offset: int) -> int:
        calls.append((fd, address, length, offset))
        answer = left.pop(0)
        ctypes.set_errno(max(0, -answer))
        return max(-1, answer)

    engine._read = engine._write = call
    assert engine._do(op, 7, 1 << 40, 1 << 20, 12288) == reported
    assert not left
    done = 0
    for (fd, address, length, offset), answer in zip(calls, answers, strict=True):
        assert (fd, address - (1 << 20), offset - (1 << 40), length) == (
            7,
            done,
            done,
            12288 - done,
        )
        done += max(0, answer)
    assert engine.close()


def test_no_call_is_asked_for_more_than_it_takes() -> None:
    engine, lengths = ThreadsEngine(), []

    def call(fd: int, address: int, length: int, offset: int) -> int:
        lengths.append(length)
        return length

    engine._read = call
    assert engine._do(READ, 7, 0, 0, 5 << 30) == 5 << 30
    assert max(lengths) == MOST_BYTES
    assert len(lengths) == 3
    assert engine.close()
