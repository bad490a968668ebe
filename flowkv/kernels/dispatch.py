"""The operations of a forward pass: check the operands, choose the backend, run.

CUDA tensors go to Triton; float32, bfloat16 and float16 on the CPU to numba; anything else to the
torch oracle. `backend=` overrides the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from flowkv.core.errors import GeometryError
from flowkv.kernels import bounds
from flowkv.kernels.bounds_rotary import check_rotary
from flowkv.kernels.operands import Pages, Ragged, Rotary, Scoring
from flowkv.kernels.registry import ANY, resolve

_CPU_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CPU_PAGES = frozenset({"float32", "bfloat16", "float16"})


@cache
def choose(device: torch.device, *dtypes: torch.dtype, page_dtype: str | None = None) -> str:
    """The backend that serves tensors of these dtypes on this device."""
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
    """Write new tokens into the open pages, on request with their keys rotated on the way.

    Token j of row b goes to position `lengths[b] - T_b + j`, whose page must be present.

    Args:
        k: `[N, Hk, D]`, packed by tokens, of any floating dtype.
        v: `[N, Hk, Dv]`; None for latents, whose value is a part of their key.
        pages: One layer of the pages, raw.
        batch: Which tokens of which rows.
        rope: Line p of it rotates the key at position p; keys that are rotated already, or never,
            need none. Queries are not touched: rotate them before attention.
        backend: "reference", "cpu" or "triton"; default by device.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: No such backend or codec.
    """
    layout = pages.layout
    bounds.check_packed("k", k, pages, layout.kv_heads, layout.head_dim)
    if (v is None) is not layout.latent:
        raise GeometryError(
            f"v is {None if v is None else tuple(v.shape)} for pages that keep "
            f"{layout.stored_value_dim} elements of a value",
            "Pass values to groups that keep them, and v=None to latent ones",
        )
    v = k[..., :0] if v is None else v
    bounds.check_packed("v", v, pages, layout.kv_heads, layout.stored_value_dim)
    if v.shape[0] != k.shape[0]:
        raise GeometryError(
            f"keys of {k.shape[0]} tokens and values of {v.shape[0]}", "Pass both of every token"
        )
    bounds.check_batch(pages, batch, k.shape[0], writes=True)
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
    """Attention of each row's new tokens over the row's pages, where they lie.

    The keys and values of the new tokens are read from the pages too: `append` them first. Pages
    that no new token of the row sees through `window` are never read. Pages of different codecs
    may stand in one row; full ones only are sealed.

    Args:
        q: `[N, Hq, D]`, packed by tokens; Hq is a multiple of Hk.
        pages: One layer of the pages.
        batch: Which tokens of which rows; rows may have no new tokens.
        scale: Of the logits; default 1 / sqrt(D).
        window: Tokens that a token sees, itself included; default all before it.
        softcap: c in `c * tanh(s / c)` on scaled logits.
        sinks: `[Hq]`, logits that join each softmax's denominator.
        alibi: float32 `[Hq]`, slopes of a bias by distance (Press et al., arXiv 2108.12409).
        tree: int64 `[N]`, bit j: the token sees new token j of its row (speculative decoding).
        causal: False lets every query see all of its row; its own token is in no page then.
        mass: float32 `[B, pages, Hk]`, to which the weight that each page gets is added.
        return_lse: Return the natural-log normaliser too, the sink included, for `merge`.
        invariant: Give each row the same bits whatever else is in the batch.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Returns:
        `[N, Hq, Dv]` in q's dtype; with `return_lse` also float32 `[N, Hq]`.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: No such backend or codec.
    """
    layout = pages.layout
    bounds.check_queries(q, pages, batch)
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
    bounds.check_scoring(how, q, pages, batch)
    backend = backend or choose(q.device, q.dtype, page_dtype=layout.dtype)
    return resolve("paged_attention", lossiest(pages), backend)(q, pages, batch, how)


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint sets of tokens, exactly, from its parts.

    Args:
        parts: One or more `(o [N, Hq, Dv], lse float32 [N, Hq])`; -inf marks a part without tokens.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Returns:
        `(o, lse)` of the union, in the dtype of the first part.

    Raises:
        GeometryError: No parts, or parts of different shapes.
        ConfigError: No such backend.
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
    """The last `columns` tokens of each row, dense, for models that do not attend through pages.

    Args:
        pages: One layer of the pages.
        batch: Which rows; their new tokens count like the others.
        columns: Tokens per row of the result.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Returns:
        k `[B, Hk, columns, D]` and v `[B, Hk, columns, Dv]`, right-aligned: a row's last token lies
        in the last column; zeros before a row begins and where a page is absent. Of latents, v is a
        view of k.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: No such backend or codec.
    """
    bounds.check_batch(pages, batch, None)
    backend = backend or choose(pages.arena.device, page_dtype=pages.layout.dtype)
    k, v = resolve("gather_dense", lossiest(pages), backend)(pages, batch, columns)
    return k, k[..., : pages.layout.value_dim] if pages.layout.latent else v


def lossiest(pages: Pages) -> str:
    """The codec by which an implementation is looked up: who serves it serves the ones before."""
    return pages.sealed[-1].codec if pages.sealed else pages.layout.codec
