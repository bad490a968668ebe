"""The numba functions that Python calls, and the only ones whose machine code is kept on disk.

numba keeps the machine code of a function until the function's own file changes, whatever becomes
of the functions it calls. So the sources of all kernels are digested into a constant that the
entries close over, which makes it part of their key.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from numba import njit

from flowkv.kernels.cpu import attend as cpu_attend
from flowkv.kernels.cpu import attend as cpu_dense
from flowkv.kernels.cpu import attend as cpu_merge
from flowkv.kernels.cpu import attend as cpu_mixed
from flowkv.kernels.cpu import bits as cpu_move
from flowkv.kernels.cpu import bits as cpu_rotary
from flowkv.kernels.cpu import bits as cpu_sums
from flowkv.kernels.cpu import transcode as cpu_transcode


def _entries(stamp, cache):
    jit = njit(cache=cache, nogil=True, error_model="numpy")

    @jit
    def attend(a, likes, factors, part, parts):
        return cpu_attend.attend(a, likes, factors, part, parts) if stamp else 0

    @jit
    def combine(a, like, parts):
        return cpu_attend.combine(a, like, parts) if stamp else 0

    @jit
    def attend_mixed(a, likes, factors, part, parts):
        return cpu_mixed.attend_mixed(a, likes, factors, part, parts) if stamp else 0

    @jit
    def combine_mixed(a, like):
        return cpu_mixed.combine_mixed(a, like) if stamp else 0

    @jit
    def merge(a, like, part, parts):
        return cpu_merge.merge(a, like, part, parts) if stamp else 0

    @jit
    def append(a, part, parts):
        return cpu_move.append(a, part, parts) if stamp else 0

    @jit
    def append_rotary(a, turn, likes, part, parts):
        return cpu_rotary.append_rotary(a, turn, likes, part, parts) if stamp else 0

    @jit
    def reposition(a, turn, like, part, parts):
        return cpu_rotary.reposition(a, turn, like, part, parts) if stamp else 0

    @jit
    def drop_tokens(a, part, parts):
        return cpu_move.drop_tokens(a, part, parts) if stamp else 0

    @jit
    def gather_dense(a, part, parts):
        return cpu_move.gather_dense(a, part, parts) if stamp else 0

    @jit
    def gather_mixed(a, raw, part, parts):
        return cpu_dense.gather(a, raw, part, parts) if stamp else 0

    @jit
    def transcode(a, raw, part, parts):
        return cpu_transcode.transcode(a, raw, part, parts) if stamp else 0

    @jit
    def checksum(a, part, parts):
        return cpu_sums.sum_blocks(a, part, parts) if stamp else 0

    @jit
    def move_pages(a, part, parts):
        return cpu_move.move_pages(a, part, parts) if stamp else 0

    return (
        attend,
        combine,
        attend_mixed,
        combine_mixed,
        merge,
        append,
        append_rotary,
        reposition,
        drop_tokens,
        gather_dense,
        gather_mixed,
        transcode,
        checksum,
        move_pages,
    )


_SOURCES = b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))
_STAMP = 1 + zlib.crc32(_SOURCES)
try:
    _ENTRIES = _entries(_STAMP, cache=True)
except RuntimeError:  # no directory to write to: some seconds of compilation in every process
    _ENTRIES = _entries(_STAMP, cache=False)
(
    attend,
    combine,
    attend_mixed,
    combine_mixed,
    merge,
    append,
    append_rotary,
    reposition,
    drop_tokens,
    gather_dense,
    gather_mixed,
    transcode,
    checksum,
    move_pages,
) = _ENTRIES
