"""What differs between versions of transformers, and what we lean on in it. Tested: 5.17, 5.23.

Only the cache base classes, the two registries of attention and mask functions, and forward hooks
are used elsewhere; whatever has changed between releases is asked for here.
"""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import (
    MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
    GenerationMixin,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "MODAL_INPUTS",
    "PREFILL",
    "AttentionInterface",
    "AttentionMaskInterface",
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "EncoderDecoderCache",
    "EosTokenCriteria",
    "LinearAttentionCacheLayerMixin",
    "LinearAttentionLayer",
    "MaxLengthCriteria",
    "PreTrainedModel",
    "causal_mask_function",
    "layer_types",
    "native_layer",
    "overlay_window",
    "removed",
]

MODAL_INPUTS = frozenset(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
"""Inputs that `generate` itself gives to the first forward only: they fill placeholder tokens."""

PREFILL: Any = getattr(getattr(GenerationMixin, "_prefill", None), "__code__", None)
"""What `generate` runs its first forward in; None if a release does that otherwise."""

_STATELESS = ("dummy", "moe", "mlp")  # the latter two up to 5.2x, as empty recurrent layers


def layer_types(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """(type, arguments of its cache layer) of each decoder layer; "none" for those without."""
    types, kwargs = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    each = [kwargs] * len(types) if isinstance(kwargs, dict) else kwargs  # one dict up to 5.2x
    return [
        ("none" if name in _STATELESS else name, dict(arguments))
        for name, arguments in zip(types, each, strict=True)
    ]


def native_layer(name: str) -> type | None:
    """The cache layer class that `DynamicCache` would use; None for an unknown type."""
    if name == "none":
        found = DYNAMIC_LAYER_TYPE_MAPPING.get("dummy") or DYNAMIC_LAYER_TYPE_MAPPING.get("mlp")
    else:
        found = DYNAMIC_LAYER_TYPE_MAPPING.get(name)
    return found if isinstance(found, type) else None


def removed(tokens: int, length: int) -> int:
    """Tokens that `crop(tokens)` removes: the positive form (deprecated) names what remains."""
    return max(length - tokens, 0) if tokens > 0 else -tokens


def overlay_window(mask_function: Any) -> int | None:
    """Window w of a plain sliding causal mask function; None if it is any other function.

    Such a function is `and_masks(sliding_window_overlay(w), causal_mask_function)`, told by what
    its closures hold. Whatever is not told is treated as a custom mask and built.
    """
    parts = _closure(mask_function, "and_mask").get("mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    window = _closure(parts[0], "inner_mask").get("sliding_window")
    right = getattr(parts[0], "__qualname__", "").startswith("sliding_window_overlay.")
    return window if right and isinstance(window, int) else None


def _closure(function: Any, name: str) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells or code.co_name != name:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
