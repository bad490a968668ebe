"""All operations on pages: check the operands, choose the backend, run the kernel.

CUDA tensors go to Triton; float32, bfloat16 and float16 on the CPU to numba; all others to the
torch reference. `backend=` overrides the choice.

Every operation has a reference in torch ("reference"), a twin in numba ("cpu") and a Triton kernel
where a GPU may call it, imported on first use. A test walks this table, so that no operation lacks
one of them unnoticed. All of them take the same arguments, already checked: those of the public
function of that name, without `backend`, and with the switches of attention as one `Scoring`.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from flowkv.compiled import compiling
from flowkv.core.errors import ConfigError, GeometryError
from flowkv.core.geometry import CODEC_SHIFT, CODECS, GRANULE_BYTES, GRANULE_MASK, PageLayout
from flowkv.kernels.operands import Pages, Ragged, Rotary, Scoring, Side

BACKENDS = ("reference", "cpu", "triton")
ANY = "any"
"""Codec of operations that move bytes without reading them."""

_ROOM = "flowkv.kernels"
_RAW = ("raw",)
_OPERATIONS: dict[str, tuple[tuple[str, ...], str, str]] = {
    # operation: (codecs, module of its twin, module of its kernel)
    "append": (_RAW, "cpu.operations", "triton.move"),
    "paged_attention": (CODECS, "cpu.operations", "triton.attend"),
    "merge": ((ANY,), "cpu.operations", "triton.attend"),
    "gather_dense": (CODECS, "cpu.operations", "triton.codec"),
    "drop_tokens": (_RAW, "cpu.operations", "triton.move"),
    "reposition": (_RAW, "cpu.operations", "triton.move"),
    "transcode": (CODECS, "cpu.operations", "triton.codec"),
    "checksum": ((ANY,), "cpu.operations", "triton.move"),
    "move_pages": ((ANY,), "cpu.operations", "triton.move"),
}
IMPLEMENTATIONS: dict[tuple[str, str], dict[str, str]] = {
    (op, codec): {
        backend: f"{_ROOM}.{module}:{op}"
        for backend, module in zip(BACKENDS, ("reference", *modules), strict=True)
    }
    for op, (codecs, *modules) in _OPERATIONS.items()
    for codec in codecs
}


@cache
def resolve(op: str, codec: str, backend: str) -> Callable[..., Any]:
    """Return the function that serves `op` on pages of `codec`; import its module on first use.

    Raises:
        ConfigError: There is no such implementation.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown", f"Use one of {', '.join(BACKENDS)}")
    backends = IMPLEMENTATIONS.get((op, codec))
    if backends is None:
        known = ", ".join(c for o, c in IMPLEMENTATIONS if o == op) or "none"
        raise ConfigError(
            f"operation {op!r} has no kernel for codec {codec!r}", f"Use a codec of: {known}"
        )
    module, _, name = backends[backend].partition(":")
    try:
        with compiling.around():  # some modules compile code at import
            return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in (module, "triton"):
            raise
        raise ConfigError(
            f"the {backend!r} kernels cannot be imported ({error})",
            "Install Triton (it comes with torch for CUDA), or pass backend='reference'",
        ) from error


_CPU_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CPU_PAGES = frozenset({"float32", "bfloat16", "float16"})


@cache
def choose(device: torch.device, *dtypes: torch.dtype, page_dtype: str | None = None) -> str:
    """Return the backend that serves tensors of these dtypes on this device."""
    if device.type == "cuda":
        return "triton"
    fits = all(dtype in _CPU_DTYPES for dtype in dtypes)
    if device.type == "cpu" and fits and (page_dtype is None or page_dtype in _CPU_PAGES):
        return "cpu"
    return "reference"


def append(
    k: torch.Tensor,
    v: torch.Tensor | None,
    pages: Pages,
    batch: Ragged,
    rope: Rotary | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Write new tokens into the open pages, with their keys rotated on the way if `rope` is given.

    Token j of row b goes to position `lengths[b] - T_b + j`, in a page that must be present.

    Args:
        k: `[N, Hk, D]`, packed by tokens, of any floating dtype.
        v: `[N, Hk, Dv]`; None for latents, as their value is a part of their key.
        pages: One layer of the pages, raw.
        batch: Rows and tokens to write.
        rope: Its line p rotates the key at position p; keys that are rotated already, or never,
            need none. Queries are not rotated here: rotate them before attention.
        backend: "reference", "cpu" or "triton"; default by device.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: The backend or codec does not exist.
    """
    layout = pages.layout
    check_packed("k", k, pages, layout.kv_heads, layout.head_dim)
    if (v is None) is not layout.latent:
        raise GeometryError(
            f"v is {None if v is None else tuple(v.shape)} for pages that store "
            f"{layout.stored_value_dim} elements of a value",
            "Pass values to groups that store them, and v=None to latent ones",
        )
    v = k[..., :0] if v is None else v
    check_packed("v", v, pages, layout.kv_heads, layout.stored_value_dim)
    if v.shape[0] != k.shape[0]:
        raise GeometryError(
            f"keys of {k.shape[0]} tokens and values of {v.shape[0]}", "Pass both of every token"
        )
    check_batch(pages, batch, k.shape[0], writes=True)
    if rope is not None:
        check_rotary(rope, layout, k.device, batch.most_length)
    backend = backend or choose(k.device, k.dtype, v.dtype, page_dtype=layout.dtype)
    resolve("append", layout.codec, backend)(k, v, pages, batch, rope)


def paged_attention(  # noqa: PLR0913 - the switches of attention belong to one call
    q: torch.Tensor,
    pages: Pages,
    batch: Ragged,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    causal: bool = True,
    mass: torch.Tensor | None = None,
    return_lse: bool = False,
    invariant: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from each row's new tokens to the row's pages, in place.

    The keys and values of the new tokens are read from the pages too: `append` them first. Pages
    that the `window` hides from all new tokens of the row are never read. A row may mix pages of
    different codecs; only full ones are sealed.

    Args:
        q: `[N, Hq, D]`, packed by tokens; Hq is a multiple of Hk.
        pages: One layer of the pages.
        batch: Rows and their new tokens; rows may have none.
        scale: Scale of the logits; default 1 / sqrt(D).
        window: Tokens that a token sees, itself included; default all before it.
        softcap: c in `c * tanh(s / c)` on scaled logits.
        sinks: `[Hq]`, logits that join each softmax's denominator.
        alibi: float32 `[Hq]`, slopes of a bias by distance (Press et al., arXiv 2108.12409).
        tree: int64 `[N]`, bit j: the token sees new token j of its row (speculative decoding).
        causal: False lets every query see all of its row; its own token is in no page then.
        mass: float32 `[B, pages, Hk]`, to which the attention weight of each page is added.
        return_lse: Return the natural-log normaliser too, the sink included, for `merge`.
        invariant: Give each row the same bits in any batch.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Returns:
        `[N, Hq, Dv]` in q's dtype; with `return_lse` also float32 `[N, Hq]`.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: The backend or codec does not exist.
    """
    layout = pages.layout
    check_queries(q, pages, batch)
    how = Scoring(
        scale=1.0 / math.sqrt(layout.head_dim) if scale is None else scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        tree=tree,
        causal=causal,
        mass=mass,
        return_lse=return_lse,
        invariant=invariant,
    )
    check_scoring(how, q, pages, batch)
    backend = backend or choose(q.device, q.dtype, page_dtype=layout.dtype)
    return resolve("paged_attention", lossiest(pages), backend)(q, pages, batch, how)


def prepare_decode(pages: Pages, batch: Ragged, window: int | None) -> Any:
    """Prepare a step of one new token a row for `append` and `paged_attention`, over all layers.

    Args:
        pages: One layer of the pages.
        batch: Rows, each with exactly one new token; with others, it serves `append` alone.
        window: Tokens that a token sees, itself included; None for all before it.

    Returns:
        A `kernels.cpu.operations.Decode`; None where layers are served one by one: on other
        devices, with latents, and while `checking`.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
    """
    layout = pages.layout
    if choose(pages.arena.device, page_dtype=layout.dtype) != "cpu" or layout.latent:
        return None
    check_batch(pages, batch, None)
    if checks:
        return None
    twin = importlib.import_module("flowkv.kernels.cpu.operations")  # numba, on first use
    return twin.Decode(pages, batch, window)


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of tokens into that over their union, exactly.

    Args:
        parts: One or more `(o [N, Hq, Dv], lse float32 [N, Hq])`; -inf marks a part without tokens.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Returns:
        `(o, lse)` of the union, in the dtype of the first part.

    Raises:
        GeometryError: There are no parts, or they have different shapes.
        ConfigError: The backend does not exist.
    """
    if not parts:
        raise GeometryError("there are no parts to merge", "Pass at least one (o, lse) pair")
    first = parts[0][0]
    for o, lse in parts:
        if o.shape != first.shape or lse.shape != o.shape[:2] or o.dtype != first.dtype:
            raise GeometryError(
                f"a part is {o.dtype} {tuple(o.shape)} with lse {tuple(lse.shape)}, "
                f"the first {first.dtype} {tuple(first.shape)}",
                "Merge parts of the same query tokens and heads",
            )
    backend = backend or choose(first.device, first.dtype)
    return resolve("merge", ANY, backend)(parts)


def gather_dense(
    pages: Pages, batch: Ragged, columns: int, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last `columns` tokens of each row, dense, for models that need dense caches.

    Args:
        pages: One layer of the pages.
        batch: Rows to return; their new tokens count like the others.
        columns: Tokens per row of the result.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Returns:
        k `[B, Hk, columns, D]` and v `[B, Hk, columns, Dv]`, right-aligned: a row's last token is
        in the last column; zeros before a row begins and where a page is absent. For latents, v is
        a view of k.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: The backend or codec does not exist.
    """
    check_batch(pages, batch, None)
    backend = backend or choose(pages.arena.device, page_dtype=pages.layout.dtype)
    k, v = resolve("gather_dense", lossiest(pages), backend)(pages, batch, columns)
    return k, k[..., : pages.layout.value_dim] if pages.layout.latent else v


def lossiest(pages: Pages) -> str:
    """Return the codec of the kernel to look up: a kernel for it serves all less lossy ones."""
    return pages.sealed[-1].codec if pages.sealed else pages.layout.codec


# Encoding of pages.

SOUND, NON_FINITE, OUT_OF_RANGE = 0, 1, 2
"""Status of a layer of a page from `transcode`."""


def transcode(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    old: PageLayout,
    new: PageLayout,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Write full pages in another codec: seal, demote, or decode.

    All implementations write the same bytes: every step is one correctly rounded float32
    operation in a given order (docs/explain/codecs.md). Bytes between runs and stripes become 0.

    Args:
        arena: uint8 `[bytes]`.
        source: int32 `[n]`, granules at which pages in layout `old` begin.
        target: int32 `[n]`, granules for their copies in layout `new`; no two pages overlap.
        old: Layout of the sources.
        new: Layout of the targets, of the same layers, heads, dims and page size.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Returns:
        int32 `[n, L]`: per page and layer `SOUND`; `NON_FINITE` where K or V hold NaN or infinity;
        `OUT_OF_RANGE` where a scale is beyond float16. A target that is not `SOUND` in all its
        layers must not be used.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: The backend does not exist or lacks one of the codecs, or pages are latent.
    """
    check_granules(arena, old.granules, source=source)
    check_granules(arena, new.granules, target=target)
    same = ("layers", "kv_heads", "page_size", "head_dim", "value_dim", "dtype")
    differing = [name for name in same if getattr(old, name) != getattr(new, name)]
    if differing or source.shape != target.shape:
        raise GeometryError(
            f"{len(source)} pages to {len(target)}, layouts that differ in {differing or 'codec'}",
            "Pass a target for every source, and two codecs of one layer group",
        )
    if old.latent:
        raise ConfigError(
            "transcoding pages of a latent group", "Leave them: their only codec is raw"
        )
    lossiest = max(old, new, key=lambda layout: CODECS.index(layout.codec))
    backend = backend or choose(arena.device, page_dtype=old.dtype)
    status: torch.Tensor = resolve("transcode", lossiest.codec, backend)(
        arena, source, target, old, new
    )
    return status


# Moves of pages and tokens.


def copy_pages(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    granules: int,
    *,
    backend: str | None = None,
) -> None:
    """Copy pages within the arena; no target may overlap another target or a source.

    Args:
        arena: uint8 `[bytes]`.
        source: int32 `[n]`, granules at which the pages begin.
        target: int32 `[n]`, granules at which their copies begin.
        granules: Granules of a page (`PageLayout.granules`).
        backend: "reference", "cpu" or "triton"; default by device.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: The backend does not exist.
    """
    check_granules(arena, granules, source=source, target=target)
    if source.shape != target.shape:
        raise GeometryError(
            f"{len(source)} sources, {len(target)} targets", "Pass a target for every source"
        )
    backend = backend or choose(arena.device)
    move_pages(Side(arena, source), Side(arena, target), len(source), granules, backend=backend)


def gather_pages(
    arena: torch.Tensor,
    source: torch.Tensor,
    granules: int,
    out: torch.Tensor,
    *,
    part: tuple[int, int] | None = None,
    lines: torch.Tensor | None = None,
    digests: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Copy pages of the arena, or one layer's stripe of each, into staging.

    Args:
        arena: uint8 `[bytes]`.
        source: int32 `[n]`, granules at which the pages begin.
        granules: Granules of a page.
        out: uint8 `[n, granules * 4096]`, contiguous; beside a GPU it may be pinned host memory,
            which holds the pages once the stream has reached this point.
        part: `(first, count)` in granules (`stripe_part`) of each page; `out` is
            `[n, count * 4096]` then. Default: whole pages.
        lines: int32 `[n]` on the arena's device, granules of `out` at which the copies begin; `out`
            is `[bytes]` then. Default: one after the other.
        digests: int64 `[n, stripes, 2]` on the arena's device, contiguous; filled with the digests
            of the stripes, equal parts of the moved bytes, in the same pass (`digest_pages`).
        backend: "reference", "cpu" or "triton"; default by device.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: The backend does not exist.
    """
    pages, count = _part_of(arena, granules, part, source=source)
    _check_staged(arena, source, count, "out", out, lines)
    _move(arena, pages, Side(out, lines), count, digests, backend)


def scatter_pages(
    arena: torch.Tensor,
    target: torch.Tensor,
    granules: int,
    data: torch.Tensor,
    *,
    part: tuple[int, int] | None = None,
    lines: torch.Tensor | None = None,
    digests: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Copy the lines of a staging tensor to pages of the arena, or to one stripe of each.

    Args:
        arena: uint8 `[bytes]`.
        target: int32 `[n]`, granules at which the pages begin; no two overlap.
        granules: Granules of a page.
        data: uint8 `[n, granules * 4096]`, contiguous; beside a GPU it may be pinned host memory,
            which must stay alive until the stream has reached this point.
        part: `(first, count)` in granules (`stripe_part`) of each page, the only bytes written;
            `data` is `[n, count * 4096]` then. Default: whole pages.
        lines: int32 `[n]` on the arena's device, granules of `data` at which the lines begin;
            `data` is `[bytes]` then. Default: one after the other.
        digests: int64 `[n, stripes, 2]` on the arena's device, contiguous; filled with the digests
            of the stripes, equal parts of the moved bytes, in the same pass (`digest_pages`).
        backend: "reference", "cpu" or "triton"; default by device.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: The backend does not exist.
    """
    pages, count = _part_of(arena, granules, part, target=target)
    _check_staged(arena, target, count, "data", data, lines)
    _move(arena, Side(data, lines), pages, count, digests, backend)


def digest_pages(
    arena: torch.Tensor,
    source: torch.Tensor,
    granules: int,
    stripes: int,
    *,
    part: tuple[int, int] | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the digests of the stripes of pages in place (NH-128, `flowkv.core.digest`).

    Args:
        arena: uint8 `[bytes]`.
        source: int32 `[n]`, granules at which the pages begin.
        granules: Granules of a page.
        stripes: Equal parts of a page, or of its `part`, each with a digest of its own.
        part: `(first, count)` in granules of each page (`stripe_part`). Default: whole pages.
        backend: "reference", "cpu" or "triton"; default by device.

    Returns:
        int64 `[n, stripes, 2]`, low half and high half of each, on the device of `arena`, with the
        bytes of a frame's header.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: The backend does not exist.
    """
    pages, count = _part_of(arena, granules, part, source=source)
    digests = arena.new_empty(len(source), max(stripes, 0), 2, dtype=torch.int64)
    _move(arena, pages, None, count, digests, backend)
    return digests


def move_pages(
    source: Side,
    target: Side | None,
    count: int,
    granules: int,
    digests: torch.Tensor | None = None,
    *,
    backend: str,
) -> None:
    """Copy pages from one side to another, digest their stripes in the same pass, or do both.

    Args:
        source: Pages to read; it or the target lists places.
        target: Memory to write; None to digest pages in place.
        count: Number of pages.
        granules: Granules of each to move.
        digests: int64 `[count, stripes, 2]`, contiguous; filled with the digests (NH-128,
            `flowkv.core.digest`) of the stripes, equal parts of the moved bytes.
        backend: "reference", "cpu" or "triton".
    """
    resolve("move_pages", ANY, backend)(source, target, count, granules, digests)


def drop_tokens(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor,
    layout: PageLayout,
    *,
    backend: str | None = None,
) -> None:
    """Fill pages with the kept tokens of others, chosen for each layer and KV head separately.

    It serves sparsification by attention mass (H2O, Zhang et al., arXiv 2306.14048; SnapKV, Li et
    al., arXiv 2404.14469). Keys keep the rotations of their own positions. All pages are raw:
    sealed ones are decoded first (`transcode`), and the result may be sealed again.

    Args:
        arena: uint8 `[bytes]`.
        source: int32 `[s]`, granules at which the pages of a row begin, in order.
        target: int32 `[ceil(n / P)]`, granules of pages to fill; none overlaps another page.
        keep: int32 `[L, Hk, n]`: token j of the new pages of a layer and head is token
            `keep[l, h, j]`, below s * P, of the old ones, in any order.
        layout: Layout of a page.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: The backend does not exist, or the pages are sealed.
    """
    check_granules(arena, layout.granules, source=source, target=target)
    kept = keep.shape[-1] if keep.dim() else 0
    shape = layout.layers, layout.kv_heads, kept
    check_lines("keep is", keep, shape, arena.device, 0, len(source) * layout.page_size)
    if len(target) != -(-kept // layout.page_size):
        raise GeometryError(
            f"{len(target)} pages for {kept} tokens",
            f"Pass one fresh page for each {layout.page_size} tokens that are kept",
        )
    backend = backend or choose(arena.device, page_dtype=layout.dtype)
    resolve("drop_tokens", layout.codec, backend)(arena, source, target, keep, layout)


def stripe_part(layout: PageLayout, layer: int, layers: int = 1) -> tuple[int, int]:
    """Return the `part` of a page that holds `layers` layers from `layer` (within the group) on."""
    stripe = layout.stripe_stride_bytes // GRANULE_BYTES
    return layer * stripe, layers * stripe


def _part_of(
    arena: torch.Tensor, granules: int, part: tuple[int, int] | None, **lists: torch.Tensor
) -> tuple[Side, int]:
    """Return the part of each page that is moved, and its granules."""
    check_granules(arena, granules, **lists)
    first, count = part or (0, granules)
    if first < 0 or count < 0 or first + count > granules:
        raise GeometryError(
            f"part ({first}, {count}) of pages of {granules} granules",
            "Pass (first granule, granules) within the page, as stripe_part() returns",
        )
    (places,) = lists.values()
    return Side(arena[GRANULE_BYTES * first :], places), count


def _move(
    arena: torch.Tensor,
    source: Side,
    target: Side | None,
    granules: int,
    digests: torch.Tensor | None,
    backend: str | None,
) -> None:
    """Check the digests and move; one of the sides lies in the arena."""
    (count,) = {len(side.places) for side in (source, target) if side and side.places is not None}
    if digests is not None:
        stripes = digests.shape[1] if digests.dim() == 3 else 0
        _check("digests are", digests, torch.int64, (count, stripes, 2), arena.device, dense=True)
        if stripes < 1 or granules % stripes:
            raise GeometryError(
                f"{granules} granules in {stripes} stripes", "Use stripes of equal whole granules"
            )
    move_pages(source, target, count, granules, digests, backend=backend or choose(arena.device))


def _check_staged(
    arena: torch.Tensor,
    places: torch.Tensor,
    granules: int,
    name: str,
    staging: torch.Tensor,
    lines: torch.Tensor | None,
) -> None:
    if lines is None:
        check_staging(name, staging, arena, len(places), granules)
        return
    there = staging.numel() // GRANULE_BYTES
    check_staging(name, staging[None] if staging.dim() == 1 else staging, arena, 1, there)
    check_lines("lines are", lines, places.shape, arena.device, 0, there - granules + 1)


# Rotation of keys to other positions, for pages that are reused behind another prefix.
#
# A key that was rotated for position p (RoPE, Su et al., arXiv 2104.09864) and is needed at p + d
# is rotated by d once more: R(d) R(p) = R(p + d). So a chunk of text computed elsewhere can stand
# behind another prefix (CacheBlend, Yao et al., arXiv 2405.16444), for the cost of one pass over
# its keys.
#
# *Error.* Let u be the unit roundoff of the pages' dtype (2**-8 bfloat16, 2**-11 float16, 2**-24
# float32), and r the length of a pair (x, y). A stored key is off by u * r at most per pair;
# turning keeps that, and rounding adds u * r. So a repositioned key lies within (2 u + 2**-21) r
# of the exact one, where a computed one lies within u * r: one rounding more (float16 below
# 2**-14 is coarser, by 2**-24). n moves cost n roundings: move from the original. Angles are made
# in float64; models that compute theirs in float32 are off by up to 2**-24 * position radians
# themselves, which no rotation can correct.


def rotations(
    deltas: Sequence[int],
    inv_freq: torch.Tensor | Sequence[float],
    *,
    interleaved: bool = False,
    start: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Rotary, torch.Tensor]:
    """Return rotations by distances, computed on the host in float64, one line per distinct one.

    Args:
        deltas: `[n]`, new position of each page less its old one, in tokens.
        inv_freq: `[R/2]`, radians a token, of the model's rotary embedding.
        interleaved: Whether dims of a pair are neighbours, or one from either half of the R dims.
        start: First of the R rotated dims of a key.
        device: Device of the pages.

    Returns:
        (rotations, `turns` int32 `[n]`), the operands of `reposition`; -1 where nothing moves.
    """
    distinct = sorted({int(delta) for delta in deltas} - {0})
    lines = {0: -1} | {delta: line for line, delta in enumerate(distinct)}
    speed = torch.as_tensor(inv_freq, dtype=torch.float64, device="cpu").numpy()
    angle = np.array(distinct, np.float64)[:, None] * speed
    cos, sin = (torch.from_numpy(f(angle).astype(np.float32)).to(device) for f in (np.cos, np.sin))
    turns = torch.from_numpy(np.array([lines[int(delta)] for delta in deltas], np.int32)).to(device)
    return Rotary(cos, sin, interleaved, start), turns


def reposition(
    arena: torch.Tensor,
    pages: torch.Tensor,
    turns: torch.Tensor,
    rope: Rotary,
    layout: PageLayout,
    *,
    layer: int | None = None,
    backend: str | None = None,
) -> None:
    """Rotate the keys of raw pages in place, each page by a line of `rope`.

    Sealed pages are decoded before (`transcode`) and sealed again after. Values have no positions.

    Args:
        arena: uint8 `[bytes]`.
        pages: int32 `[n]`, granules at which the pages begin; none twice.
        turns: int32 `[n]`, line of `rope` for each page; -1 leaves a page unchanged, bit for bit.
        rope: Rotations, `rotations()` for distances.
        layout: Layout of a page.
        layer: Layer within the group; default all.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: The backend does not exist, or the pages are sealed.
    """
    check_granules(arena, layout.granules, pages=pages)
    if layer is not None and not 0 <= layer < layout.layers:
        raise GeometryError(
            f"layer {layer} of a group of {layout.layers}",
            "Count layers within their group, from 0, or pass None for all",
        )
    check_rotary(rope, layout, arena.device, 0)
    check_lines("turns are", turns, pages.shape, arena.device, -1, rope.cos.shape[0])
    backend = backend or choose(arena.device, page_dtype=layout.dtype)
    resolve("reposition", layout.codec, backend)(arena, pages, turns, rope, layout, layer)


# `checksum`: sums of memory, computed in place, with the same result on every device.
#
# Word w at place j of its block becomes x = mix(w XOR (j + 1) G), a bijection of w, and a block's
# two sums are the sums of x and of x times an odd number made from j, modulo 2**64. So a change of
# one word always changes both sums; words that trade places or change together collide by chance
# alone (1 in 2**64, were the sums random). It guards against mistakes and not against an attacker.


def checksum(words: torch.Tensor, block_words: int, *, backend: str | None = None) -> torch.Tensor:
    """Return two 64-bit sums over each block of a tensor.

    Args:
        words: int64 `[n]`, contiguous.
        block_words: Words of a block; the last one may be shorter.
        backend: "reference", "cpu" or "triton"; default by device.

    Returns:
        int64 `[ceil(n / block_words), 2]`, on the device of `words`.

    Raises:
        GeometryError: `words` is no flat contiguous int64 tensor, or a block has no words.
        ConfigError: The backend does not exist.
    """
    if words.dtype is not torch.int64 or words.dim() != 1 or not words.is_contiguous():
        raise GeometryError(
            f"words of shape {tuple(words.shape)} and type {words.dtype}",
            "Pass a flat contiguous int64 tensor, as in x.view(-1).view(torch.int64)",
        )
    if block_words < 1:
        raise GeometryError(f"blocks of {block_words} words", "Use at least 1")
    if not len(words):
        return words.new_zeros(0, 2)
    return resolve("checksum", ANY, backend or choose(words.device))(words, block_words)


# Checks before a kernel reads memory: cheap ones always, page by page while debugging.

checks = 0
"""Open `checking` contexts: in them, tables and lists are checked against their targets."""


@contextmanager
def checking() -> Iterator[None]:
    """Check page tables against the arena in every kernel call made inside (all threads)."""
    global checks  # noqa: PLW0603 - a counter, so that nested uses end in the right order
    checks += 1
    try:
        yield
    finally:
        checks -= 1


def _need(condition: bool, problem: str, remedy: str) -> None:
    if not condition:
        raise GeometryError(problem, remedy)


def _check(
    what: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    device: torch.device,
    *,
    dense: bool = False,
    pinned: bool = False,
) -> None:
    """Check an operand: `what` names it, with a verb; it may be pinned memory beside a GPU."""
    place = x.device == device or (pinned and device.type == "cuda" and x.is_pinned())
    if x.dtype is not dtype or x.shape != tuple(shape) or not place or dense > x.is_contiguous():
        raise GeometryError(
            f"{what} {x.dtype} {tuple(x.shape)} on {x.device}",
            f"Make it {'contiguous ' * dense}{dtype} {list(shape)} on {device}"
            + " or in pinned memory" * pinned,
        )


def check_packed(name: str, x: torch.Tensor, pages: Pages, heads: int, dim: int) -> None:
    """Check a packed `[N, heads, dim]` tensor against the arena's device.

    Raises:
        GeometryError: The shape or device is wrong.
    """
    if x.dim() != 3 or x.shape[1] != heads or x.shape[2] != dim:
        raise GeometryError(
            f"{name} has shape {tuple(x.shape)}",
            f"Pass all rows' new tokens packed as [N, {heads}, {dim}]",
        )
    if x.device != pages.arena.device:
        raise GeometryError(
            f"{name} is on {x.device}, its pages on {pages.arena.device}",
            "Give each device's layers a group, and a pool, of their own",
        )


def check_arena(arena: torch.Tensor) -> None:
    """Check that an arena is contiguous bytes, a whole number of granules.

    Raises:
        GeometryError: The arena has another dtype, shape or stride.
    """
    if (
        arena.dtype is not torch.uint8
        or arena.dim() != 1
        or arena.numel() % GRANULE_BYTES
        or not arena.is_contiguous()
    ):
        raise GeometryError(
            f"the arena is {arena.dtype} {tuple(arena.shape)}",
            "Allocate one contiguous uint8 tensor of a whole number of 4096-byte granules",
        )


_PASSED: list[tuple[Ragged | None, int, int]] = [(None, 0, -1)]


def check_batch(pages: Pages, batch: Ragged, tokens: int | None, writes: bool = False) -> None:
    """Check a batch against the pages and, if given, the number of packed tokens.

    Raises:
        GeometryError: A dtype, device or shape is wrong, or (while `checking`) a page is outside.
    """
    arena, layout, layer, _ = pages
    if not 0 <= layer < layout.layers:
        raise GeometryError(
            f"layer {layer} of a group of {layout.layers}",
            "Count layers within their group, from 0",
        )
    # A step's batch is checked by its first layer; the others, which are most calls, compare
    # identity.
    passed, address, total = _PASSED[0]
    if batch is passed and arena.data_ptr() == address and not checks:
        _check_total(tokens, total)
        return
    check_arena(arena)
    count = batch.rows.shape[0]
    if batch.lengths.shape[0] != count or batch.starts.shape[0] != count + 1:
        raise GeometryError(
            f"{count} rows, {batch.lengths.shape[0]} lengths, {batch.starts.shape[0]} starts",
            "Give every row one length, and starts one element more",
        )
    for name in ("table", "rows", "lengths", "starts"):
        x = getattr(batch, name)
        if x.dtype is not torch.int32 or x.device != arena.device or x.stride(-1) != 1:
            raise GeometryError(
                f"{name} is {x.dtype} on {x.device} with strides {x.stride()}",
                f"Make it torch.int32 on {arena.device}, neighbours in its last dimension",
            )
    if checks:
        _check_pages(pages, batch, tokens, writes)
    total = int(batch.starts[-1]) if batch.starts.is_cpu else -1  # no wait for a GPU here
    _check_total(tokens, total)
    _PASSED[0] = batch, arena.data_ptr(), total


def _check_total(tokens: int | None, total: int) -> None:
    if tokens is not None and tokens < total:  # the rest are of no row, as in a captured graph
        raise GeometryError(
            f"{tokens} packed tokens for a batch of {total}",
            "Pass the new tokens of all rows of the step, packed",
        )


def check_queries(q: torch.Tensor, pages: Pages, batch: Ragged) -> None:
    """Check packed queries against the pages and the batch.

    Raises:
        GeometryError: A shape, dtype or device is wrong, or the heads do not divide.
    """
    layout, heads = pages.layout, q.shape[1] if q.dim() == 3 else 0
    check_packed("q", q, pages, heads, layout.head_dim)
    check_batch(pages, batch, q.shape[0])
    if heads % layout.kv_heads:
        raise GeometryError(
            f"{heads} query heads over {layout.kv_heads} KV heads",
            "Query heads must be a multiple of KV heads",
        )


def check_scoring(how: Scoring, q: torch.Tensor, pages: Pages, batch: Ragged) -> None:
    """Check the switches of an attention call.

    Raises:
        GeometryError: A shape, dtype or device is wrong, or switches exclude each other.
    """
    heads = q.shape[1]
    for name, logits in (("sinks", how.sinks), ("alibi", how.alibi)):
        if logits is not None and (logits.shape != (heads,) or logits.device != q.device):
            raise GeometryError(
                f"{name} are {tuple(logits.shape)} on {logits.device}",
                f"Pass one number per query head, [{heads}] on {q.device}",
            )
    empty = how.window is not None and how.window < 1
    if empty or (how.softcap is not None and how.softcap <= 0):
        raise GeometryError(
            f"window={how.window}, softcap={how.softcap}",
            "Pass positive values, or None for neither",
        )
    if how.tree is not None:
        _check("tree is", how.tree, torch.int64, q.shape[:1], q.device)
        _need(
            batch.most_new <= 64,
            f"a tree of {batch.most_new} new tokens",
            "Draft at most 64 tokens a row",
        )
    if how.mass is not None:
        size, mass = pages.layout.page_size, how.mass
        least = [batch.rows.shape[0], -(-batch.most_length // size), pages.layout.kv_heads]
        if mass.dim() == 3:  # there may be more pages than needed
            least[1] = max(least[1], mass.shape[1])
        _check("mass is", mass, torch.float32, least, q.device, dense=True)
    _need(
        how.causal or (how.window is None and how.tree is None and how.alibi is None),
        "cross-attention with a window, a tree or ALiBi",
        "These compare positions, which queries from elsewhere do not have: leave them out",
    )


def check_granules(arena: torch.Tensor, granules: int, **lists: torch.Tensor) -> None:
    """Check lists of starting granules of pages of `granules` granules.

    Raises:
        GeometryError: A dtype or device is wrong, or (while `checking`) a page is outside the
            arena.
    """
    check_arena(arena)
    last = arena.numel() // GRANULE_BYTES - granules
    remedy = "Take granules from the pool that owns this arena"
    for name, x in lists.items():
        check_lines(f"{name} is", x, (x.numel(),), arena.device, 0, last + 1, remedy)


def check_staging(name: str, x: torch.Tensor, arena: torch.Tensor, n: int, granules: int) -> None:
    """Check a staging tensor, uint8 `[n, granules * 4096]` contiguous, for its arena.

    It must be on the arena's device, or in pinned host memory, which a GPU reaches too.

    Raises:
        GeometryError: The shape, dtype, layout or device is wrong.
    """
    shape = n, granules * GRANULE_BYTES
    _check(f"{name} is", x, torch.uint8, shape, arena.device, dense=True, pinned=True)


def _check_pages(pages: Pages, batch: Ragged, tokens: int | None, writes: bool) -> None:
    layout = pages.layout
    end = pages.arena.numel() // GRANULE_BYTES
    last = {CODECS.index(x.codec): end - x.granules for x in (layout, *pages.sealed)}
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    news = [b - a for a, b in itertools.pairwise(starts)]
    _need(
        starts[0] == 0 and min(news, default=0) >= 0 and tokens in (None, starts[-1]),
        f"starts are {starts} for {tokens} packed tokens",
        "Let starts rise from 0 to the number of new tokens",
    )
    _need(
        batch.most_new >= max(news, default=0) and batch.most_length >= max(lengths, default=0),
        f"most_new={batch.most_new}, most_length={batch.most_length} are exceeded",
        "Plan the step again after a row has grown",
    )
    for row, length, new in zip(batch.rows.tolist(), lengths, news, strict=True):
        _need(
            length <= batch.table.shape[1] * layout.page_size and (new <= length or not writes),
            f"a row of {length} tokens, {new} of them new, in {batch.table.shape[1]} pages",
            "Give the row a page for every token before the step",
        )
        _need(
            0 <= row < batch.table.shape[0],
            f"row {row} of a table of {batch.table.shape[0]} lines",
            "Pass the line of the table that belongs to the row",
        )
        line = batch.table[row, : -(-length // layout.page_size)].tolist()
        written = line[(length - new) // layout.page_size :] if writes and new else []
        _need(
            all(page == -1 or 0 <= page & GRANULE_MASK <= _last(page, last) for page in line)
            and all(page >> CODEC_SHIFT == 0 for page in written),
            f"row {row} names pages {line}, which begin at granules 0 to {last} by codec",
            "Allocate the row's pages from the pool that owns this arena; open ones are raw",
        )


def _last(page: int, last: dict[int, int]) -> int:
    return last.get(page >> CODEC_SHIFT, -1)


# Checks of rotations and of lists of tokens, before kernels read them.


def check_rotary(rope: Rotary, layout: PageLayout, device: torch.device, lines: int) -> None:
    """Check rotations of keys of `layout`, of which at least `lines` will be read.

    Raises:
        GeometryError: A shape, dtype or device is wrong, or there are too few lines.
    """
    cos, shape = rope.cos, (*rope.cos.shape, 1, 1)[:2]  # [positions, R/2]
    for what, x in (("cos is", cos), ("sin is", rope.sin)):
        _check(what, x, torch.float32, shape, device, dense=True)
    if cos.shape[0] < lines:
        raise GeometryError(
            f"{cos.shape[0]} lines of rotations for {lines} positions",
            "Make cos and sin as long as the longest row may become",
        )
    if rope.start < 0 or rope.start + 2 * cos.shape[1] > layout.head_dim or not cos.shape[1]:
        raise GeometryError(
            f"{2 * cos.shape[1]} rotated dims from {rope.start} on, of {layout.head_dim}",
            "Pass cos and sin once per pair, [positions, R/2], for R rotated dims within a head",
        )
    if layout.latent and rope.start < layout.value_dim:
        raise GeometryError(
            f"rotated dims from {rope.start} on, of which {layout.value_dim} are the value",
            f"Rotate the dims behind the latent: start={layout.value_dim}",
        )


def check_lines(
    what: str,
    x: torch.Tensor,
    shape: Sequence[int],
    device: torch.device,
    low: int,
    end: int,
    remedy: str = "Pass numbers within these bounds",
) -> None:
    """Check a list of numbers from `low` to `end` - 1; their values only while `checking`.

    Raises:
        GeometryError: A shape, dtype or device is wrong, or (while `checking`) a number is outside.
    """
    _check(what, x, torch.int32, shape, device)
    if checks and x.numel():
        least, most = int(x.min()), int(x.max())
        name = what.partition(" ")[0]
        _need(
            low <= least and most < end,
            f"{name} holds {least} to {most}, numbers from {low} to {end - 1} fit",
            remedy,
        )
