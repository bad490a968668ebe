"""FlowKV's attention and mask functions, registered beside the model's own as their fallback.

Two names are registered, one for each implementation that a model may have had before (`sdpa`,
`eager`). Whatever is not plainly "new queries over cached keys, causal, windowed, left-padded" goes
to the function of that name, with masks in its own format: exactly what the model did before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flowkv import kernels
from flowkv.core.errors import UnsupportedModelError
from flowkv.hooks.huggingface.packing import RUNNING
from flowkv.hooks.huggingface.versions import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionInterface,
    AttentionMaskInterface,
    causal_mask_function,
    overlay_window,
)
from flowkv.hooks.huggingface.views import MaskRecipe, PagedView, solid

PREFIX = "flowkv_"
FALLBACKS = ("sdpa", "eager")
"""Implementations that FlowKV can stand in for; beside others, layers are read dense."""

_HARMLESS = frozenset(
    """dropout scaling sliding_window is_causal position_ids cache_position use_cache return_dict
    output_attentions output_hidden_states output_router_logits logits_to_keep
    num_items_in_batch""".split()
)
"""Arguments that paged attention obeys or may ignore. Any other one that is not None goes dense."""

_OBEYED = {"sdpa": _HARMLESS, "eager": _HARMLESS | {"softcap", "s_aux"}}
"""The same by implementation: old versions of sdpa drop these two silently, and so they count."""


def register() -> None:
    """Makes the implementations known to transformers. Repeating it changes nothing."""
    for name in FALLBACKS:
        AttentionInterface.register(PREFIX + name, partial(attend, name))
        AttentionMaskInterface.register(PREFIX + name, partial(mask, name))


@torch.compiler.disable
def mask(previous: str, **arguments: Any) -> torch.Tensor | None:
    """A mask function: a recipe where pages may be read, else the model's own mask.

    Args:
        previous: Implementation that the model had before.
        **arguments: What transformers asks mask functions.
    """
    packing = RUNNING.get()
    if packing is not None:
        return packing.mask(previous, arguments)
    build: Callable[..., torch.Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS[previous]
    offset = arguments.get("q_offset", 0)
    if not isinstance(offset, int) or offset == 0 or arguments.get("use_vmap"):
        return build(**arguments)
    function, window = arguments.get("mask_function"), None
    if function is not causal_mask_function:
        window = overlay_window(function)
        if window is None:
            return build(**arguments)
    elif (
        previous == "sdpa"
        and arguments["q_length"] == 1
        and arguments.get("attention_mask") is None
        and arguments.get("allow_is_causal_skip", True)
    ):
        return None  # as sdpa's own function answers, without asking it
    dtype = arguments.get("dtype", torch.float32) if previous == "eager" else torch.bool
    return MaskRecipe(build, arguments, window, dtype)


@torch.compiler.disable
def attend(
    previous: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function: over pages if K and V are still there, else the model's own.

    Args:
        previous: Implementation that the model had before.
        module: The calling attention module.
        query: `[B, Hq, T, D]`.
        key: `[B, Hk, S, D]`, possibly a `PagedView`.
        value: `[B, Hk, S, Dv]`, likewise.
        attention_mask: None, a tensor, or a `MaskRecipe`.
        **arguments: scaling, dropout and what else the model passes.

    Returns:
        `[B, T, Hq, Dv]`, and attention weights or None.
    """
    packing = RUNNING.get()
    if packing is not None:
        obeyed = _OBEYED[previous]
        return packing.attend(query, key, value, attention_mask, arguments, obeyed), None
    if type(key) is PagedView and type(value) is PagedView and key.gathered is None:
        layer = key.layer
        if value.layer is layer and _plain(
            layer, query, attention_mask, arguments, _OBEYED[previous]
        ):
            layer.placed.was_read = True
            out = kernels.paged_attention(
                layer.rows.pack(query),
                layer.pages,
                layer.batch,
                scale=arguments.get("scaling"),
                window=layer.window,
                softcap=arguments.get("softcap"),
                sinks=arguments.get("s_aux"),
                backend=layer.placed.backend,
            )
            return layer.rows.unpack(out), None
    if isinstance(attention_mask, MaskRecipe):
        attention_mask = attention_mask.native()
    own = _function(previous, module)
    return own(module, query, solid(key), solid(value), attention_mask, **arguments)


def _plain(
    layer: Any,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    arguments: dict[str, Any],
    obeyed: frozenset[str],
) -> bool:
    rows = layer.rows
    if not layer.in_step or layer.chunked or rows.wants_weights or arguments.get("dropout"):
        return False
    batch, heads, new, dim = query.shape
    kv_heads, head_dim, _, dtype, device = layer.shape
    if (batch, new, dim) != (len(rows.seqs), rows.new, head_dim) or heads % kv_heads:
        return False
    if query.dtype is not dtype or query.device != device:
        return False
    for name, value in arguments.items():
        if name not in obeyed and value is not None:
            return False
    if arguments.get("is_causal") is False and new > 1:
        return False
    if attention_mask is None:
        # One query that sees every key: as far as a layer shows them, which is its window.
        return new == 1
    if type(attention_mask) is not MaskRecipe:
        return False
    if attention_mask.window != layer.window:
        layer.placed.contradicted = True
        return False
    return attention_mask.shape[3] == layer.columns and attention_mask.fits(rows)


def _function(previous: str, module: torch.nn.Module) -> Callable[..., Any]:
    if previous != "eager":
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[previous]
        return function
    # "eager" is a function of each modeling file, not of the registry.
    for cls in type(module).__mro__:
        own = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if own is not None:
            return own  # type: ignore[no-any-return]
    raise UnsupportedModelError(
        f"{type(module).__name__} has no eager attention function",
        'Load the model with attn_implementation="sdpa"',
    )
