"""Stand-ins for K, V and masks while a model runs, and the attention functions that take them.

Two names are registered, one for each implementation that a model may have had before (`sdpa`,
`eager`). A call that is not plainly "new queries over cached keys, causal, windowed, left-padded"
goes to the function of that name, with masks in its own format, as without FlowKV.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map

from flowkv.cache.step import Step
from flowkv.core.errors import StateError, UnsupportedModelError
from flowkv.hooks.huggingface.rows import Rows
from flowkv.hooks.huggingface.versions import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    causal_mask_function,
    overlay_window,
)

OBSERVER = "flowkv_observer"
"""Attribute of keys that a layer returns unchanged: a function that observes their queries."""

# Tensors without storage: K and V that still lie in pages, and masks that have not been built.
#
# `Cache.update()` must return tensors, and an attention function receives no cache, only those
# tensors. So `update()` returns a `PagedView`: a `torch.Tensor` wrapper subclass of the right shape
# with a reference to its layer. FlowKV's attention takes the layer out of it and reads pages in
# place; any other operation of the model receives the dense tensor. Hence no list of supported
# models is needed. `MaskRecipe` does the same for masks.


def solid(value: Any) -> Any:
    """Return the dense tensor of a view or recipe; any other value unchanged."""
    return value.dense() if isinstance(value, (PagedView, MaskRecipe)) else value


def _touch(func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    return func(*tree_map(solid, args), **tree_map(solid, kwargs or {}))


class PagedView(torch.Tensor):
    """K or V of one layer, `[B, Hk, S, D]`, as far as the model may see it.

    Attributes:
        layer: The cache layer it belongs to, a `cache.PagedLayer`.
        which: 0 for keys, 1 for values.
        step: The step in which the layer made it; in later ones the layer shows other tokens.
        total: Columns of the rows in that step; steps that graphs compute do not call the layer.
        gathered: The tensor itself, once the layer has left its pages.
    """

    layer: Any
    which: int
    step: Any
    total: int
    gathered: torch.Tensor | None
    # Otherwise torch would turn the dense results of operations into views again.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, layer: Any, which: int, like: torch.Tensor, columns: int) -> PagedView:
        """Make a view of `columns` tokens, otherwise shaped like the new tokens `like`."""
        shape = like.shape
        view: PagedView = torch.Tensor._make_wrapper_subclass(
            cls,  # type: ignore[arg-type]
            (shape[0], shape[1], columns, shape[3]),
            dtype=like.dtype,
            device=like.device,
        )
        view.layer, view.which, view.gathered = layer, which, None
        view.step, view.total = layer.wrote, layer.rows.total
        return view

    def dense(self) -> torch.Tensor:
        """Return the dense tensor, gathered from pages.

        Raises:
            StateError: The layer's tokens have changed since the forward that made the view.
        """
        if self.gathered is not None:
            return self.gathered
        stale = getattr(self.layer, "wrote", None) is not self.step
        if stale or self.layer.rows.total != self.total:
            raise StateError(
                "these keys or values are from an earlier forward, and the cache has changed since",
                "Copy them with .clone() before the next forward",
            )
        return self.layer.dense()[self.which]  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the dense tensor, and mark the layer: later views start out dense."""
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, PagedView) and value.gathered is None:
                value.dense()  # a stale view is refused first
                value.layer.placed.in_pages = False
        return _touch(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PagedView({tuple(self.shape)}, {'keys' if self.which == 0 else 'values'})"


class MaskRecipe(torch.Tensor):
    """Mask `[B, 1, T, S]` of a causal or sliding layer over cached tokens, not yet built.

    Attributes:
        build: Function that builds it in the format of the model's own attention, or returns None
            if that needs no mask. In a packed forward it raises.
        arguments: Arguments of the mask function.
        window: The sliding window; None for plain causal.
    """

    build: Callable[..., torch.Tensor | None]
    arguments: dict[str, Any]
    window: int | None
    _fits: tuple[Rows, int, bool] | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        build: Callable[..., torch.Tensor | None],
        arguments: dict[str, Any],
        window: int | None,
        dtype: torch.dtype,
    ) -> MaskRecipe:
        """Make a recipe for `build(**arguments)`, a mask of `dtype`."""
        batch, new, length = (arguments[n] for n in ("batch_size", "q_length", "kv_length"))
        recipe: MaskRecipe = torch.Tensor._make_wrapper_subclass(
            cls,  # type: ignore[arg-type]
            (batch, 1, new, length),
            dtype=dtype,
            device=arguments.get("device", "cpu"),
        )
        recipe.build, recipe.arguments, recipe.window = build, arguments, window
        recipe._fits = None
        return recipe

    def native(self) -> torch.Tensor | None:
        """Return the result of the model's own mask function, which may be None."""
        return self.build(**self.arguments)

    def dense(self) -> torch.Tensor:
        """Build the mask as a tensor, even where the model's own attention would need none."""
        mask = self.build(**{**self.arguments, "allow_is_causal_skip": False})
        assert mask is not None
        return mask

    def fits(self, rows: Rows) -> bool:
        """Return whether the mask is only causality, the window and the rows' own left padding."""
        known = self._fits
        if known is None or known[0] is not rows or known[1] != rows.total:
            fits = rows.padded_by(self.arguments.get("attention_mask"), rows.total)
            known = self._fits = (rows, rows.total, fits)
        return known[2]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep the recipe if it moves to another device (`device_map`); else build the mask."""
        if func is torch.ops.aten._to_copy.default:
            wanted, recipe = dict(kwargs or {}), args[0]
            if wanted.get("device") is not None and wanted.get("dtype") in (None, recipe.dtype):
                arguments = dict(recipe.arguments, device=torch.device(wanted["device"]))
                mask = arguments.get("attention_mask")
                if isinstance(mask, torch.Tensor):
                    arguments["attention_mask"] = mask.to(arguments["device"])
                return MaskRecipe(recipe.build, arguments, recipe.window, recipe.dtype)
        return _touch(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"MaskRecipe({tuple(self.shape)}, window={self.window})"


# One forward over packed rows, as an unmodified model's attention and masks see it.
#
# The model runs over one row `[1, N]`: the new tokens of all rows, one after the other, each at
# its own position. Only the step maps tokens to rows. So while a packed forward runs, masks are
# only described (`MaskRecipe`), and attention over the keys that a cache layer has just received
# goes to the step. Any other use of keys or masks by the model would mix the rows, and is refused
# (`Unpackable`).

RUNNING: ContextVar[Packing | None] = ContextVar("flowkv_packing", default=None)
"""The packed forward that runs in this thread."""


class Unpackable(UnsupportedModelError):
    """The model computes something in which rows that are packed together would mix."""


class Packing:
    """Packed forward that is running.

    Args:
        step: The rows and their pages.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._count, self._begins = int(step.counts.sum()), step.begins
        # Layer, window, K, V and `Step.decode` by the id of K, which no other tensor has meanwhile.
        self._written: dict[int, tuple[Any, ...]] = {}
        self._masks: dict[tuple[int | None, torch.dtype], MaskRecipe] = {}

    def write(
        self, placed: Any, window: int | None, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write the new keys and values of a layer into pages.

        Args:
            placed: The layer, a `cache.PlacedLayer`.
            window: Its sliding window, or None.
            key: `[1, Hk, N, D]`.
            value: `[1, Hk, N, Dv]`.

        Raises:
            Unpackable: They do not have the shape, dtype or device of the pages.
        """
        step, decode = self._step, self._step.decode(placed.group)
        if decode is not None and len(key) == 1 and decode.append(placed.place, key, value):
            step.pages(placed.index)  # marks the layer as written
        else:
            decode, (heads, dim, dim_v, dtype, device) = None, placed.shape
            for name, x, width in (("keys", key, dim), ("values", value, dim_v)):
                if x.shape != (1, heads, self._count, width) or x.dtype is not dtype:
                    _refuse(f"layer {placed.index} has {name} {x.dtype} {tuple(x.shape)}")
            if key.device != device:
                _refuse(f"layer {placed.index} has moved to {key.device}")
            step.write(placed.index, key[0].transpose(0, 1), value[0].transpose(0, 1))
        self._written[id(key)] = placed, window, key, value, decode

    def mask(self, previous: str, arguments: dict[str, Any]) -> MaskRecipe:
        """Return the recipe of a mask for the model.

        Args:
            previous: Implementation that the model had before.
            arguments: The arguments of transformers' mask functions.

        Raises:
            Unpackable: The mask is neither causal nor sliding, or more than that.
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
            device = arguments.get("device", "cpu")
            found = self._masks[window, dtype] = packed_mask(self._count, window, dtype, device)
        return found

    def begins(self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Return whether a single row starts with these keys, so that causal attention suffices."""
        _, window, _, own, _ = self._written.get(id(key), (None,) * 5)
        plain = type(mask) is MaskRecipe and mask.build is _unbuilt and mask.window is None
        return self._begins and plain and window is None and own is value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: dict[str, Any],
        obeyed: frozenset[str],
    ) -> torch.Tensor:
        """Compute attention of each row's new tokens over the row's own pages.

        Args:
            query: `[1, Hq, N, D]`.
            key: The keys that the layer's cache returned.
            value: The values that it returned.
            mask: The mask that the model's mask function returned.
            arguments: scaling, dropout and other arguments of the attention function.
            obeyed: Names of the arguments that are obeyed, or change nothing.

        Returns:
            `[1, N, Hq, Dv]`.

        Raises:
            Unpackable: The model asks for any other attention.
        """
        placed, window, _, own, decode = self._written.get(id(key), (None,) * 5)
        if placed is None or own is not value:
            _refuse("attention uses other keys than those passed to the cache")
        if type(mask) is not MaskRecipe or mask.build is not _unbuilt or mask.window != window:
            shown = getattr(mask, "window", "a mask of its own")
            _refuse(f"a layer with window {window} gets {shown}")
        if odd := _unserved(arguments, obeyed):
            _refuse(f"attention is given {odd!r}")
        scale, softcap, sinks = map(arguments.get, ("scaling", "softcap", "s_aux"))
        if decode is not None and len(query) == 1:
            found = decode.attend(placed.place, query, scale, softcap, sinks)
            if found is not None:
                return found  # type: ignore[no-any-return]
        heads, dim = placed.shape[:2]
        rows, query_heads, count, query_dim = query.shape
        if (rows, count, query_dim) != (1, self._count, dim) or query_heads % heads:
            _refuse(f"queries are {tuple(query.shape)}")
        q, read = query[0].transpose(0, 1), self._step.read
        return read(placed.index, q, scale=scale, softcap=softcap, sinks=sinks).unsqueeze(0)


def packed_mask(
    count: int, window: int | None, dtype: torch.dtype, device: torch.device | str
) -> MaskRecipe:
    """Make the mask of a packed forward over `count` tokens; the step maps them to rows."""
    shape = dict(batch_size=1, q_length=count, kv_length=count, device=device)
    return MaskRecipe(_unbuilt, shape, window, dtype)


def exact(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast, so that keys and values keep their dtype."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _refuse(problem: str) -> NoReturn:
    raise Unpackable(f"rows cannot be packed: {problem}", "Let each row run by itself")


def _unbuilt(**arguments: Any) -> NoReturn:
    """Refuse to build the mask of a packed forward."""
    _refuse("the model computes with its mask")


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
"""The same by implementation: old releases of sdpa ignore the last two, so pages must as well."""


@cache
def register() -> None:
    """Register the implementations with transformers."""
    for name in FALLBACKS:
        AttentionInterface.register(PREFIX + name, partial(attend, name))
        AttentionMaskInterface.register(PREFIX + name, partial(mask, name))


def unwrap() -> None:
    """Remove wrappers from the implementations: kvpress wraps all that are there at its import."""
    for name in FALLBACKS:
        with suppress(KeyError):
            del ALL_ATTENTION_FUNCTIONS[PREFIX + name]


@torch.compiler.disable
def mask(previous: str, **arguments: Any) -> torch.Tensor | None:
    """Return a mask recipe where pages may be read, else the model's own mask.

    Args:
        previous: Implementation that the model had before.
        **arguments: The arguments of transformers' mask functions.
    """
    packing = RUNNING.get()
    if packing is not None:
        return packing.mask(previous, arguments)
    build: Callable[..., torch.Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS[previous]
    offset = arguments.get("q_offset", 0)
    if not isinstance(offset, int) or offset == 0 or arguments.get("use_vmap"):
        return build(**arguments)
    function = arguments.get("mask_function")
    window = None if function is causal_mask_function else overlay_window(function)
    if window is None and function is not causal_mask_function:
        return build(**arguments)
    if (
        window is None
        and previous == "sdpa"
        and arguments["q_length"] == 1
        and arguments.get("attention_mask") is None
        and arguments.get("allow_is_causal_skip", True)
    ):
        return None  # sdpa's own mask function would return None, too
    return MaskRecipe(build, arguments, window, _mask_dtype(previous, arguments))


def _mask_dtype(previous: str, arguments: dict[str, Any]) -> torch.dtype:
    """Return the dtype of an implementation's masks."""
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
    """Compute attention over pages if K and V still lie there, else by the model's own function.

    Args:
        previous: Implementation that the model had before.
        module: The calling attention module.
        query: `[B, Hq, T, D]`.
        key: `[B, Hk, S, D]`, possibly a `PagedView`.
        value: `[B, Hk, S, Dv]`, likewise.
        attention_mask: None, a tensor, or a `MaskRecipe`.
        **arguments: scaling, dropout and other arguments of attention functions.

    Returns:
        `[B, T, Hq, Dv]`, and attention weights or None.
    """
    packing = RUNNING.get()
    if packing is not None:
        obeyed = _OBEYED[previous]
        begins = previous == "sdpa" and packing.begins(key, value, attention_mask)
        if begins and not _unserved(arguments, obeyed):
            own = _function(previous, module)  # as for a row alone: no page needs to be read
            return own(module, query, key, value, None, **{**arguments, "is_causal": True})
        return packing.attend(query, key, value, attention_mask, arguments, obeyed), None
    if type(key) is not PagedView:
        observer = getattr(key, OBSERVER, None)
        if observer is not None:
            observer(query, arguments)
    elif type(value) is PagedView and key.gathered is None:
        layer = key.layer
        if layer.rows.thinning is not None:
            layer.rows.thinning.observe(layer.index, query, arguments)
        if value.layer is layer and _plain(key, attention_mask, arguments, _OBEYED[previous]):
            say = arguments.get
            out = layer.read(query, say("scaling"), say("softcap"), say("s_aux"))
            if out is not None:
                layer.placed.was_read = True
                return out, None
    if isinstance(attention_mask, MaskRecipe):
        attention_mask = attention_mask.native()
    own = _function(previous, module)
    return own(module, query, solid(key), solid(value), attention_mask, **arguments)


def _plain(
    key: PagedView,
    attention_mask: torch.Tensor | None,
    arguments: dict[str, Any],
    obeyed: frozenset[str],
) -> bool:
    layer, rows = key.layer, key.layer.rows
    if key.step is not rows.step or layer.chunked or rows.wants_weights:
        return False
    new = rows.new
    if _unserved(arguments, obeyed, new):
        return False
    if attention_mask is None:
        # Without a mask, one query sees every key of the view, which is the layer's window.
        return new == 1
    if type(attention_mask) is not MaskRecipe:
        return False
    if attention_mask.window != layer.window:
        layer.placed.contradicted = True
        return False
    return attention_mask.shape[3] == layer.columns and attention_mask.fits(rows)


def _unserved(arguments: dict[str, Any], obeyed: frozenset[str], new: int = 2) -> str:
    """Return an argument that attention over pages of `new` tokens cannot obey; "" for none."""
    if not arguments.keys() <= obeyed:
        for name, value in arguments.items():
            if name not in obeyed and value is not None:
                return name
    if arguments.get("dropout"):
        return "dropout"
    return "is_causal" if arguments.get("is_causal") is False and new > 1 else ""


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


# `Switch` sets the decoder's attention implementation to FlowKV's for forwards over pages.
#
# Between forwards the configuration has its own values: callers read, save and set it, and compiled
# code depends on it.

_COMPARED = re.compile(
    r"_attn_implementation\s*(?:==|!=|not in|in)\s*(\([^)]*\)|\[[^\]]*\]|[\"']\w+[\"'])"
)


_CHOSEN = "_attn_implementation_internal"
"""Attribute in which a configuration keeps its chosen implementation."""


class Switch:
    """Switch of the attention implementation of one model's decoder. Thread-safe.

    Args:
        model: The model.

    Attributes:
        reason: Why it cannot be switched, so that layers are read dense; "" if it can.
    """

    def __init__(self, model: Any) -> None:
        unwrap()
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None  # uses the cache
        decoder = decoder if isinstance(decoder, torch.nn.Module) else model
        configs: list[Any] = [getattr(module, "config", None) for module in decoder.modules()]
        known = {id(c): vars(c) for c in configs if _CHOSEN in getattr(c, "__dict__", ())}
        # A configuration's own attribute lookup takes 5 us, so their dicts are kept.
        self._configs = [(held, str(held[_CHOSEN]).removeprefix(PREFIX)) for held in known.values()]
        self.reason = _obstacle(decoder, {name for _, name in self._configs})
        self._switched: list[tuple[dict[str, Any], str]] = []
        self._forwards = 0
        self._lock = threading.RLock()  # a finalizer may end a forward that was interrupted

    def on(self) -> None:
        """Begin a forward over pages; the first one sets FlowKV's implementation, if possible."""
        with self._lock:
            self._forwards += 1
            if self._forwards > 1 or self.reason:
                return
            register()
            unwrap()
            for held, known in self._configs:
                # An implementation that was set meanwhile has not been checked for obstacles.
                if held[_CHOSEN] == known:
                    self._switched.append((held, known))
                    # The property would set it for sub-configurations (a vision tower's) as well.
                    held[_CHOSEN] = PREFIX + known

    def off(self) -> None:
        """End a forward over pages; the last one restores the settings that are still FlowKV's."""
        with self._lock:
            self._forwards -= 1
            while self._switched and not self._forwards:
                held, known = self._switched.pop()
                if held[_CHOSEN] == PREFIX + known:
                    held[_CHOSEN] = known


def _obstacle(decoder: torch.nn.Module, names: set[str]) -> str:
    for name in sorted(names):
        if name not in FALLBACKS:
            return f"its attention implementation is {name!r}; {FALLBACKS[0]!r} reads pages"
    for module in decoder.modules():
        if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
            return "its attention is not chosen by configuration"
    for source in {sys.modules.get(type(module).__module__) for module in decoder.modules()}:
        if _compares(source, names):
            return "its source depends on the name of its attention implementation"
    return "" if names else "it has no configuration of its attention"


def _compares(source: Any, names: set[str]) -> bool:
    """Return whether a modeling file compares its implementation with one of these names."""
    if source is None or source.__name__.startswith("torch."):
        return False
    try:
        text = inspect.getsource(source)
    except (OSError, TypeError):
        return True
    asked = " ".join(_COMPARED.findall(text))
    return any(re.search(rf"[\"']{name}[\"']", asked) for name in names)
