"""Launches of `attend_sealed`: tile sizes and warps of each codec."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from flowkv.core.layout import GRANULE_BYTES, PageLayout
from flowkv.kernels.triton.launch import Traits, launch, padded, traits
from flowkv.kernels.triton.lists import Lists
from flowkv.kernels.triton.sealed import attend_sealed
from flowkv.kernels.triton.task import REGISTERS, Task
from flowkv.kernels.triton.turn import turned

_BITS = {"kv8": (8, 8), "k8v4": (8, 4), "kv4c": (4, 4), "kv4h": (4, 4)}


class Work(NamedTuple):
    """What the launches of one decoding call share.

    Attributes:
        lists: Pages by codec, if any may be sealed.
        segments: Room of one list in the partials.
        part: float32 `[lists * segments, Hk, COLUMNS, Dv]`.
        part_lse: float32 `[lists * segments, Hk, COLUMNS]`.
        parts: Weights of tiles, `[B, pages, tiles, Hk, COLUMNS]`, if they are asked for.
        tiles: Tiles of a page in `parts`; 0 if they are not.
        common: Constants of all kernels.
    """

    lists: Lists | None
    segments: int
    part: torch.Tensor
    part_lse: torch.Tensor
    parts: torch.Tensor
    tiles: int
    common: dict[str, int]


def attend_list(task: Task, work: Work, i_list: int, codec: PageLayout, shares: int) -> None:
    """Attend over the pages of one sealed codec."""
    device, columns = traits(task.out.device), work.part.shape[2]
    shape, tune = sealed_config(codec, columns, device)
    q = turned(task.q) if codec.codec == "kv4h" else task.q
    assert work.lists is not None
    _, _, lengths, starts = task.operands[2:]
    launch(
        attend_sealed,
        (shares, codec.kv_heads),
        q,
        task.pages.arena,
        lengths,
        starts,
        work.part,
        work.part_lse,
        q.stride(0),
        q.stride(1),
        task.pages.layer,
        task.rows,
        *task.softmax,
        task.alibi,
        *work.lists,
        i_list,
        work.segments,
        task.most_pages,
        work.parts,
        work.parts.stride(0),
        **shape,
        **work.common,
        SOFTCAP=task.softmax[1] > 0,
        ALIBI=task.flags["ALIBI"],
        CAUSAL=task.flags["CAUSAL"],
        MASS=work.tiles,
        WARPS=tune["warps"],
        ASM=device.ptx,
        num_warps=tune["warps"],
        **REGISTERS,
    )


@lru_cache(maxsize=256)
def sealed_config(
    layout: PageLayout, columns: int, device: Traits
) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of `attend_sealed`; warps of a program, programs that a processor holds at once."""
    k_bits, v_bits = _BITS[layout.codec]
    dim, value_dim = layout.head_dim, layout.value_dim
    d, dv = max(32, padded(dim * k_bits // 8)), padded(value_dim)
    pair = 2 if v_bits == 4 else 1  # slots of a tile whose values share a byte
    slots = layout.page_size // pair
    width = d * 8 // k_bits + dv
    # One warp needs no barriers, and holds scores, outputs and operands of 64 slots of 128 dims
    # for 8 columns. Integer tensor cores take 32 slots at least.
    block = 128 // pair
    while block > 32 and (slots % block or block * pair * width > 16384):
        block //= 2
    warps = min(4, max(1, block * pair * width >> 14) * (columns // 8))
    parts = 1
    if layout.codec == "kv4c" and device.major >= 10:  # whose assembler spills otherwise
        warps = min(4, 2 * warps)
        block *= 2 if slots % (2 * block) == 0 else 1
    elif layout.codec == "kv4c" and slots % (2 * block) == 0:
        parts = 2  # which share the query that a page's scales were multiplied into
    tile = block * pair * parts
    tile_bytes = tile * (dim * k_bits + value_dim * v_bits) // 8
    programs = max(1, min(8 // warps, device.shared_bytes // (2 * tile_bytes + 3072)))
    shape = {
        "HEAD_DIM": dim,
        "VALUE_DIM": value_dim,
        "D": d,
        "DV": dv,
        "PAGE": layout.page_size,
        "TILE": tile,
        "PARTS": parts,
        "SPLIT": dv >= 128,
        "GRANULE": GRANULE_BYTES,
        "VALUES": layout.v_offset_bytes,
        "K_SCALES": layout.k_scale_offset_bytes,
        "V_SCALES": layout.v_scale_offset_bytes,
        "RUN": layout.run_bytes,
        "STRIPE": layout.stripe_stride_bytes,
        "K_BITS": k_bits,
        "V_BITS": v_bits,
        "CHANNELS": layout.codec == "kv4c",
        "STAGES": 5,
    }
    return shape, {"warps": warps, "programs": programs, "tile": tile // parts}
