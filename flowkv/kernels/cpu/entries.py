"""The numba functions that Python calls, and the only ones with machine code cached on disk.

numba caches the machine code of a function until the function's own file changes, regardless of
the functions it calls. So the sources of all kernels are digested into a constant that the entries
close over, which makes it part of their key.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np
from numba import types

from flowkv.compiled import compiling
from flowkv.compiled.addresses import ahead, pointer
from flowkv.compiled.digest import STAMP as DIGEST_STAMP
from flowkv.compiled.machine_code import kept, kept_callback
from flowkv.kernels.cpu import attend as cpu_attend
from flowkv.kernels.cpu import bits, transcode
from flowkv.kernels.cpu.attend import DONE, LAYER, NEXT, OUT, PARTS, Q_HEAD, Q_TOKEN, TEAM, WORK, Q
from flowkv.kernels.cpu.bits import call, call_team, draw


def _entries(stamp):
    jit = kept(nogil=True, error_model="numpy")

    @jit
    def attend(a, threads, layer, q, q_token, q_head, out):
        """Attend with the queries at q: `threads` of a team, 1 alone, 0 sets operands only.

        Return how many slices are not done, since C functions cannot pass on what a slice raises.
        """
        to = pointer(a, np.int64(stamp))
        to[LAYER], to[Q], to[Q_TOKEN], to[Q_HEAD], to[OUT] = layer, q, q_token, q_head, out
        to[NEXT] = to[DONE] = 0
        if threads > 1:
            call_team(to[TEAM], to[WORK], a, threads)
        elif threads:
            call(to[WORK], a)
        return to[PARTS] - to[DONE]

    @jit
    def help_with(a):
        call(pointer(a, np.int64(stamp))[WORK], a)

    @jit
    def append_step(a, layer, k, k_token, k_head, v, v_token, v_head):
        """Write one layer's new tokens; operands `a` as of `append`, its arena's first layer."""
        to = pointer(a, np.int64(stamp))
        arena = to[2]
        to[0], to[1], to[2], to[15], to[16], to[17], to[18] = (
            k, v, arena + layer, k_token, k_head, v_token, v_head,
        )  # fmt: skip
        bits.append(to, 0, 1)
        to[2] = arena

    @jit
    def merge(a, like, part, parts):
        return cpu_attend.merge(a, like, part, parts) if stamp else 0

    @jit
    def append(a, part, parts):
        return bits.append(a, part, parts) if stamp else 0

    @jit
    def append_rotary(a, turn, likes, part, parts):
        return bits.append_rotary(a, turn, likes, part, parts) if stamp else 0

    @jit
    def reposition(a, turn, like, part, parts):
        return bits.reposition(a, turn, like, part, parts) if stamp else 0

    @jit
    def drop_tokens(a, part, parts):
        return bits.drop_tokens(a, part, parts) if stamp else 0

    @jit
    def gather_dense(a, raw, part, parts):
        return cpu_attend.gather(a, raw, part, parts) if stamp else 0

    @jit
    def recode(a, raw, part, parts):
        return transcode.transcode(a, raw, part, parts) if stamp else 0

    @jit
    def checksum(a, part, parts):
        return bits.sum_blocks(a, part, parts) if stamp else 0

    @jit
    def move_pages(a, part, parts):
        return bits.move_pages(a, part, parts) if stamp else 0

    @jit
    def digest_pages(a, part, parts):
        return bits.digest_pages(a, part, parts) if stamp else 0

    return (
        attend, help_with, append_step, merge, append, append_rotary, reposition, drop_tokens,
        gather_dense, recode, checksum, digest_pages, move_pages,
    )  # fmt: skip


def _worker(stamp, like_q, like, sealed):
    """Compile the C function that draws slices of an attention call until none is left."""

    def work(address):
        a = pointer(address, np.int64(stamp))
        part = draw(ahead(a, NEXT))
        while part < a[PARTS]:
            if sealed:  # a constant: the other branch is not compiled
                cpu_attend.attend_any(a, (like_q, like), part)
            else:
                cpu_attend.attend_raw(a, (like_q, like), part)
            if draw(ahead(a, DONE)) == a[PARTS] - 1:
                cpu_attend.combine(a, like_q)
            part = draw(ahead(a, NEXT))

    return kept_callback(types.void(types.int64), error_model="numpy")(work)


@lru_cache(maxsize=None, typed=True)  # zeros of different types are equal
def worker(like_q, like, sealed: bool):
    """Return the C function of an attention call, compiled for these types; see `attend`.

    Args:
        like_q: Type under which elements of q and of the output travel.
        like: Type under which elements of pages travel.
        sealed: Whether pages of other codecs than raw are served.
    """
    with compiling.around():
        return _worker(_STAMP, like_q, like, sealed)


_SOURCES = b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))
_STAMP = 1 + zlib.crc32(_SOURCES, DIGEST_STAMP)
(
    attend, help_with, append_step, merge, append, append_rotary, reposition, drop_tokens,
    gather_dense, recode, checksum, digest_pages, move_pages,
) = _entries(_STAMP)  # fmt: skip
