"""The numba functions that Python calls, and the only ones with machine code cached on disk.

The cached code is stamped with a digest of the sources of all kernels: numba itself looks only at
the file of the function, not at those of the functions that it calls.
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

_SOURCES = b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))
STAMP = zlib.crc32(_SOURCES, DIGEST_STAMP)
_WORD = np.int64(0)


def entry(function, **options):
    """Return a function as Python calls it, without the lock of the interpreter."""
    return kept(STAMP, nogil=True, error_model="numpy", **options)(function)


def entry_of(part):
    """Return a part of compiled code (`compiled.parts`) as Python calls it."""
    return entry(part.py_func, fastmath=part.targetoptions.get("fastmath", False))


@entry
def attend(a, threads, layer, q, q_token, q_head, out):
    """Attend with the queries at q: `threads` of a team, 1 alone, 0 sets operands only.

    Return how many slices are not done, since C functions cannot pass on what a slice raises.
    """
    to = pointer(a, _WORD)
    to[LAYER], to[Q], to[Q_TOKEN], to[Q_HEAD], to[OUT] = layer, q, q_token, q_head, out
    to[NEXT] = to[DONE] = 0
    if threads > 1:
        call_team(to[TEAM], to[WORK], a, threads)
    elif threads:
        call(to[WORK], a)
    return to[PARTS] - to[DONE]


@entry
def help_with(a):
    """Draw slices of a call until none is left."""
    call(pointer(a, _WORD)[WORK], a)


@entry
def append_step(a, layer, k, k_token, k_head, v, v_token, v_head):
    """Write one layer's new tokens; operands `a` as of `append`, its arena's first layer."""
    to = pointer(a, _WORD)
    arena = to[2]
    to[0], to[1], to[2], to[15], to[16], to[17], to[18] = (
        k, v, arena + layer, k_token, k_head, v_token, v_head,
    )  # fmt: skip
    bits.append(to, None, None, 0, 1)
    to[2] = arena


merge, gather_dense = entry_of(cpu_attend.merge), entry_of(cpu_attend.gather)
append, drop_tokens = entry_of(bits.append), entry_of(bits.drop_tokens)
reposition = entry_of(bits.reposition)
checksum, recode = entry_of(bits.sum_blocks), entry_of(transcode.transcode)
move_pages, digest_pages = entry_of(bits.move_pages), entry_of(bits.digest_pages)


@lru_cache(maxsize=None, typed=True)  # zeros of different types are equal
def worker(like_q, like, sealed: bool):
    """Return the C function of an attention call, compiled for these types; see `attend`.

    Args:
        like_q: Type under which elements of q and of the output travel.
        like: Type under which elements of pages travel.
        sealed: Whether pages of other codecs than raw are served.
    """

    def work(address):
        a = pointer(address, _WORD)
        part = draw(ahead(a, NEXT))
        while part < a[PARTS]:
            if sealed:  # a constant: the other branch is not compiled
                cpu_attend.attend_any(a, (like_q, like), part)
            else:
                cpu_attend.attend_raw(a, (like_q, like), part)
            if draw(ahead(a, DONE)) == a[PARTS] - 1:
                cpu_attend.combine(a, like_q)
            part = draw(ahead(a, NEXT))

    with compiling.around():
        return kept_callback(types.void(types.int64), STAMP, error_model="numpy")(work)
