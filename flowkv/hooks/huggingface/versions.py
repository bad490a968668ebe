"""Differences between versions of transformers, and the parts relied on. Tested: 5.17, 5.23, 5.24.

Only the cache base classes, the registries of functions for attention, masks and experts, and
forward hooks are used elsewhere; everything that has changed between releases is read here.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
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
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, GenerationMixin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

CACHES = (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)
"""Native classes of caches and layers that keep keys and values of models."""

MODAL_INPUTS = frozenset(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
"""Inputs that `generate` passes to the first forward only: they fill placeholder tokens."""

RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
"""Whether `generate` passes the cache as `cache`: from 5.24 on."""

PREFILL: Any = getattr(GenerationMixin, "_prefill", None)
"""Method in which `generate` runs its first forward; None if a release has none."""

_STATELESS = ("dummy", "moe", "mlp")  # the latter two up to 5.2x, as empty recurrent layers


def layer_types(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return (type, arguments of its cache layer) of each decoder layer; "none" if it has none."""
    types, kwargs = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    each = [kwargs] * len(types) if isinstance(kwargs, dict) else kwargs  # one dict up to 5.2x
    return [
        ("none" if name in _STATELESS else name, dict(arguments))
        for name, arguments in zip(types, each, strict=True)
    ]


def native_layer(name: str) -> type | None:
    """Return the cache layer class that `DynamicCache` would use; None for an unknown type."""
    names = ("dummy", "mlp") if name == "none" else (name,)
    found = next(filter(None, map(DYNAMIC_LAYER_TYPE_MAPPING.get, names)), None)
    return found if isinstance(found, type) else None


def removed(tokens: int, length: int) -> int:
    """Return how many tokens `crop(tokens)` removes; a positive argument (deprecated) is kept."""
    return max(length - tokens, 0) if tokens > 0 else -tokens


def overlay_window(mask_function: Any) -> int | None:
    """Return the window w of a plain sliding causal mask function; None for any other function.

    Such a function is `and_masks(sliding_window_overlay(w), causal_mask_function)`, recognised by
    the contents of its closures. Any other function counts as a custom mask, which is built.
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


BOOKKEEPING = frozenset(
    """generation_config name_or_path warnings_issued model_tags all_tied_weights_keys kernel_config
    hf_device_map hf_quantizer quantization_method is_quantized is_parallelizable model_parallel
    device_map _cache _is_hf_initialized _keep_in_fp32_modules _keep_in_fp32_modules_strict
    _no_split_modules _skip_keys_device_placement _keys_to_ignore_on_load_unexpected
    _keys_to_ignore_on_load_missing _keys_to_ignore_on_save _tp_plan _ep_plan _pp_plan _fsdp_plan
    _tp_size _device_mesh _weight_conversions _compiled_call _last_compile_config _loss_function
    loss_type gradient_checkpointing _gradient_checkpointing_func _require_grads_hook
    _output_capturing_hooks_installed peft_config _hf_peft_config_loaded tokenizer processor
    _name_or_path _commit_hash _auto_class __deepcopy__ __reduce_ex__ compile
    _prefill rope_deltas _require_grads_hooks _use_kernels
    _previous_max_cache_length""".split()
)
"""Attributes of models that do not change the results of a forward."""

UNIMPORTANT = BOOKKEEPING | frozenset(
    """transformers_version architectures dtype torch_dtype id2label label2id problem_type use_cache
    return_dict output_attentions output_hidden_states task_specific_params auto_map
    chunk_size_feed_forward _output_attentions _post_init_done""".split()
)
OWN_PREFIX = "flowkv_"
_STAND_INS = {"batched_mm": "grouped_mm"}
"""Implementations of experts that `generate` sets while it decodes on a GPU: the same products, in
another order."""
_CHOSEN = {
    "_attn_implementation_internal": (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS),
    "_experts_implementation_internal": (ALL_EXPERTS_FUNCTIONS,),
}
"""Settings that name functions, and the registries of these."""


def lasting(implementation: str) -> str:
    """Return the implementation that is set between calls of the model, for one set in a call."""
    own = implementation.removeprefix(OWN_PREFIX)
    return _STAND_INS.get(own, own)


def settings(config: Any) -> str:
    """Return all settings of a configuration that can change results, as canonical text."""
    held = _important(config.to_dict(), config)
    for name in _CHOSEN:
        chosen = getattr(config, name, None)
        held[name.removesuffix("_internal")] = lasting(chosen) if isinstance(chosen, str) else None
    return json.dumps(_plain(held), sort_keys=True, separators=(",", ":"))


def _important(held: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the dict of a configuration and of those inside it, without `UNIMPORTANT` settings."""
    found = {}
    for name, value in held.items():
        if name not in UNIMPORTANT:
            inner = getattr(config, name, None)
            nested = isinstance(inner, PreTrainedConfig) and isinstance(value, dict)
            found[name] = _important(value, inner) if nested else value
    return found


_TEXTS = (str, int, float, type(None), torch.dtype, torch.device)


def settled(value: Any) -> bool:
    """Return whether the text of a setting is all of its value."""
    if isinstance(value, dict):
        if "dtype" in value:  # `to_dict` replaces this entry
            return False
        return all(settled(key) and settled(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(settled, value))
    return isinstance(value, (*_TEXTS, PreTrainedConfig))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_plain(item)) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value) if isinstance(value, _TEXTS) else type(value).__qualname__


def chosen_functions(model: Any) -> list[tuple[Any, str, Any]]:
    """Return (registry, name, function) of the attention, masks and experts a model may run."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    found = list[tuple[Any, str, Any]]()
    for setting, registries in _CHOSEN.items():
        chosen = {getattr(c, setting, None) for c in configs.values()}
        names = {lasting(name) for name in chosen if isinstance(name, str)}
        names |= {name for name, other in _STAND_INS.items() if other in names}
        found += ((each, name, each.get(name)) for each in registries for name in sorted(names))
    return found
