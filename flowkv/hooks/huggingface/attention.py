"""FlowKV's attention and mask functions, registered beside the model's own as their fallback.

Two names are registered, one for each implementation that a model may have had before (`sdpa`,
`eager`). Whatever is not plainly "new queries over cached keys, causal, windowed, left-padded" goes
to the function of that name, with masks in its own format: exactly what the model did before.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from flowkv import kernels
from flowkv.cache.step import Step
from flowkv.core.errors import UnsupportedModelError
from flowkv.hooks.huggingface.cache import MaskRecipe, PagedView, solid
from flowkv.hooks.huggingface.versions import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    causal_mask_function,
    overlay_window,
)

if TYPE_CHECKING:
    from flowkv.hooks.huggingface.plan import PlacedLayer


# One forward over packed rows, as an unmodified model's attention and masks see it.
#
# The model is given one row `[1, N]`: the new tokens of all rows, one after the other, each at
# its own position. Its masks and its attention must know which token belongs to which row, and
# the step knows that. So while a packed forward runs, masks are only described (`PackedMask`),
# and attention over the keys that a cache layer was just given goes to the step. Nothing else may
# happen to either: what a model computes from them itself would mix the rows, and is refused
# (`Unpackable`).

RUNNING: ContextVar[Packing | None] = ContextVar("flowkv_packing", default=None)
"""The packed forward that runs in this thread."""


class Unpackable(UnsupportedModelError):
    """A model does something in which rows that are packed together would mix."""


class PackedMask(torch.Tensor):
    """The mask of a packed forward: causal within each row, windowed or not; never built.

    Attributes:
        window: The sliding window; None for plain causal.
    """

    window: int | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], window: int | None, dtype: torch.dtype, device: Any
    ) -> PackedMask:
        """A mask that looks like any other of this shape."""
        mask: PackedMask = torch.Tensor._make_wrapper_subclass(
            cls,  # type: ignore[arg-type]
            shape,
            dtype=dtype,
            device=device,
        )
        mask.window = window
        return mask

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Moving it to another device (`device_map`) keeps it; nothing else can be done with it."""
        wanted = kwargs or {}
        if func is torch.ops.aten._to_copy.default and wanted.get("device") is not None:
            (mask,) = args
            dtype = wanted.get("dtype") or mask.dtype
            return PackedMask(tuple(mask.shape), mask.window, dtype, wanted["device"])
        _refuse(f"the model computes with its mask ({func})")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedMask({tuple(self.shape)}, window={self.window})"


class _Written(NamedTuple):
    placed: PlacedLayer
    window: int | None
    key: torch.Tensor
    value: torch.Tensor


class Packing:
    """A packed forward under way.

    Args:
        step: Its rows and their pages.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._count = int(step.counts.sum())
        # Held by their objects: as long as they are here, no other tensor has the same id.
        self._written: dict[int, _Written] = {}
        self._masks: dict[tuple[int | None, torch.dtype], PackedMask] = {}

    def write(
        self, placed: PlacedLayer, window: int | None, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Puts the new keys and values of a layer into pages.

        Args:
            placed: The layer.
            window: Its sliding window, or None.
            key: `[1, Hk, N, D]`.
            value: `[1, Hk, N, Dv]`.

        Raises:
            Unpackable: They are not what the pages hold.
        """
        heads, dim, dim_v, dtype, device = placed.shape
        if key.shape != (1, heads, self._count, dim) or key.dtype is not dtype:
            _refuse(f"layer {placed.index} has keys {key.dtype} {tuple(key.shape)}")
        if value.shape != (1, heads, self._count, dim_v) or value.dtype is not dtype:
            _refuse(f"layer {placed.index} has values {value.dtype} {tuple(value.shape)}")
        if key.device != device:
            _refuse(f"layer {placed.index} has moved to {key.device}")
        self._step.write(placed.index, key[0].transpose(0, 1), value[0].transpose(0, 1))
        self._written[id(key)] = _Written(placed, window, key, value)

    def mask(self, previous: str, arguments: dict[str, Any]) -> PackedMask:
        """The mask that a model asks for.

        Args:
            previous: Implementation that the model had before.
            arguments: What transformers asks mask functions.

        Raises:
            Unpackable: It is neither causal nor sliding, or more than that.
        """
        function = arguments.get("mask_function")
        window = overlay_window(function)
        if window is None and function is not causal_mask_function:
            _refuse("a mask is neither causal nor a sliding window")
        if arguments.get("use_vmap") or arguments.get("attention_mask") is not None:
            _refuse("a mask is more than causality and a window")
        dtype = _mask_dtype(previous, arguments)
        found = self._masks.get((window, dtype))
        if found is None:
            shape = (1, 1, self._count, self._count)
            found = PackedMask(shape, window, dtype, arguments.get("device", "cpu"))
            self._masks[window, dtype] = found
        return found

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: dict[str, Any],
        obeyed: frozenset[str],
    ) -> torch.Tensor:
        """Attention of each row's new tokens over the row's own pages.

        Args:
            query: `[1, Hq, N, D]`.
            key: What the layer's cache returned.
            value: Likewise.
            mask: What the model's mask function returned.
            arguments: scaling, dropout and what else the model passes.
            obeyed: Those of them that are obeyed, or change nothing.

        Returns:
            `[1, N, Hq, Dv]`.

        Raises:
            Unpackable: It is not plainly that.
        """
        written = self._written.get(id(key))
        if written is None or written.value is not value:
            _refuse("attention is over other keys than the cache was given")
        if type(mask) is not PackedMask or mask.window != written.window:
            shown = mask.window if type(mask) is PackedMask else "no mask of ours"
            _refuse(f"a layer with window {written.window} is shown {shown}")
        for name, given in arguments.items():
            if given is not None and name not in obeyed:
                _refuse(f"attention is given {name!r}")
        if arguments.get("dropout") or arguments.get("is_causal") is False:
            _refuse("attention drops weights out, or is not causal")
        heads, dim = written.placed.shape[:2]
        rows, query_heads, count, query_dim = query.shape
        if (rows, count, query_dim) != (1, self._count, dim) or query_heads % heads:
            _refuse(f"queries are {tuple(query.shape)}")
        out = self._step.read(
            written.placed.index,
            query[0].transpose(0, 1),
            scale=arguments.get("scaling"),
            softcap=arguments.get("softcap"),
            sinks=arguments.get("s_aux"),
        )
        return out.unsqueeze(0)


def exact(device: torch.device) -> AbstractContextManager[object]:
    """Keeps the autocast of whoever runs the engine out of keys and values."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _refuse(problem: str) -> NoReturn:
    raise Unpackable(f"rows cannot be packed: {problem}", "Let each row run by itself")


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
    function = arguments.get("mask_function")
    window = overlay_window(function)
    if window is None and function is not causal_mask_function:
        return build(**arguments)
    if (
        window is None
        and previous == "sdpa"
        and arguments["q_length"] == 1
        and arguments.get("attention_mask") is None
        and arguments.get("allow_is_causal_skip", True)
    ):
        return None  # as sdpa's own function answers, without asking it
    return MaskRecipe(build, arguments, window, _mask_dtype(previous, arguments))


def _mask_dtype(previous: str, arguments: dict[str, Any]) -> torch.dtype:
    """What an implementation's masks are made of."""
    given: torch.dtype = arguments.get("dtype", torch.float32)
    return given if previous == "eager" else torch.bool


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


# Switches the decoder's attention implementation to FlowKV's for forwards over pages.
#
# Between them the configuration says what it said before: callers read it, save it and set it, and
# compiled code is made of it.

_COMPARED = re.compile(
    r"_attn_implementation\s*(?:==|!=|not in|in)\s*(\([^)]*\)|\[[^\]]*\]|[\"']\w+[\"'])"
)


class Switch:
    """The attention implementation of one model's decoder. Thread-safe.

    Args:
        model: The model.

    Attributes:
        reason: Why it is not switched, so that layers are read dense; "" if it is.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        decoder = decoder_of(model)
        self._configs = [(config, own(config)) for config in _configs(decoder)]
        self.reason = _obstacle(decoder, {name for _, name in self._configs})
        self._switched: list[tuple[Any, str]] = []
        self._forwards, self._lock = 0, threading.Lock()

    def on(self) -> None:
        """A forward over pages begins: FlowKV stands in, if it can."""
        with self._lock:
            self._forwards += 1
            if self._forwards > 1 or self.reason:
                return
            register()
            for config, known in self._configs:
                # What somebody else has set meanwhile was not asked for an obstacle.
                if config._attn_implementation == known:
                    self._switched.append((config, known))
                    # The property would set it for sub-configurations (a vision tower's) as well.
                    config._attn_implementation_internal = PREFIX + known

    def off(self) -> None:
        """It is over: with the last one, what was there is put back, unless it was set anew."""
        with self._lock:
            self._forwards -= 1
            while self._switched and not self._forwards:
                config, known = self._switched.pop()
                if config._attn_implementation == PREFIX + known:
                    config._attn_implementation_internal = known


def own(config: Any) -> str:
    """The attention implementation that a configuration has when FlowKV does not stand in."""
    return str(config._attn_implementation).removeprefix(PREFIX)


def decoder_of(model: Any) -> torch.nn.Module:
    """The part of a model whose layers use the cache."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else None
    return found if isinstance(found, torch.nn.Module) else model


def _configs(decoder: torch.nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


def _obstacle(decoder: torch.nn.Module, names: set[str]) -> str:
    for name in sorted(names):
        if name not in FALLBACKS:
            return f"its attention implementation is {name!r}; {FALLBACKS[0]!r} reads pages"
    for module in decoder.modules():
        if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
            return "its attention is not chosen by configuration"
    for source in {sys.modules.get(type(module).__module__) for module in decoder.modules()}:
        if _compares(source, names):
            return "its source asks for the name of its attention implementation"
    return "" if names else "it has no configuration of its attention"


def _compares(source: Any, names: set[str]) -> bool:
    """Whether a modeling file treats one of these implementations in a special way."""
    if source is None or source.__name__.startswith("torch."):
        return False
    try:
        text = inspect.getsource(source)
    except (OSError, TypeError):
        return True
    asked = " ".join(_COMPARED.findall(text))
    return any(re.search(rf"[\"']{name}[\"']", asked) for name in names)
