"""Stand-ins for K, V and masks while a model runs, and the attention functions that take them.

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
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map

from flowkv.cache.step import Step
from flowkv.core.errors import UnsupportedModelError
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
"""Attribute of keys that a layer hands back as they came: who is to see their queries."""

# Tensors without storage: K and V that still lie in pages, and masks that nobody has built yet.
#
# `Cache.update()` must return tensors, and an attention function receives no cache, only what
# `update()` returned. So it returns a `PagedView`: a `torch.Tensor` wrapper subclass of the right
# shape that knows its layer. FlowKV's attention takes the layer out of it and reads pages in place;
# any other operation that touches it, whatever the model does, receives the dense tensor. Hence no
# list of supported models is needed. `MaskRecipe` does the same for masks.


def solid(value: Any) -> Any:
    """The dense tensor behind a view or recipe; anything else unchanged."""
    return value.dense() if isinstance(value, (PagedView, MaskRecipe)) else value


def _touch(func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    return func(*tree_map(solid, args), **tree_map(solid, kwargs or {}))


class PagedView(torch.Tensor):
    """K or V of one layer, `[B, Hk, S, D]`, as far as the layer shows it to the model.

    Attributes:
        layer: The cache layer it belongs to, a `cache.PagedLayer`.
        which: 0 for keys, 1 for values.
        gathered: The tensor itself, once the layer has left its pages.
    """

    layer: Any
    which: int
    gathered: torch.Tensor | None
    # Otherwise torch would turn the dense results of operations into views again.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, layer: Any, which: int, like: torch.Tensor, columns: int) -> PagedView:
        """A view of `columns` tokens, otherwise shaped like the new tokens `like`."""
        shape = like.shape
        view: PagedView = torch.Tensor._make_wrapper_subclass(
            cls,  # type: ignore[arg-type]
            (shape[0], shape[1], columns, shape[3]),
            dtype=like.dtype,
            device=like.device,
        )
        view.layer, view.which, view.gathered = layer, which, None
        return view

    def dense(self) -> torch.Tensor:
        """The tensor itself, gathered from pages."""
        return self.layer.dense()[self.which] if self.gathered is None else self.gathered  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """An operation of the model touches the view: it gets the tensor, later ones at once."""
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, PagedView) and value.gathered is None:
                value.layer.touched()
        return _touch(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PagedView({tuple(self.shape)}, {'keys' if self.which == 0 else 'values'})"


class MaskRecipe(torch.Tensor):
    """The mask `[B, 1, T, S]` of a causal or sliding layer over cached tokens, not built.

    Attributes:
        build: Builds it in the format of the model's own attention; None if that needs none. That
            of a packed forward refuses to.
        arguments: What the mask function was called with.
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
        """A recipe for `build(**arguments)`, which gives elements of `dtype`."""
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
        """What the model's own mask function returns, None included."""
        return self.build(**self.arguments)

    def dense(self) -> torch.Tensor:
        """The mask as a tensor, also where the model's own attention would need none."""
        mask = self.build(**{**self.arguments, "allow_is_causal_skip": False})
        assert mask is not None
        return mask

    def fits(self, rows: Rows) -> bool:
        """Whether it says no more than causality, the window and the rows' own left padding."""
        known = self._fits
        if known is None or known[0] is not rows or known[1] != rows.total:
            fits = rows.padded_by(self.arguments.get("attention_mask"), rows.total)
            known = self._fits = (rows, rows.total, fits)
        return known[2]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Moving it to another device (`device_map`) keeps it a recipe; anything else builds it."""
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
# The model is given one row `[1, N]`: the new tokens of all rows, one after the other, each at
# its own position. Its masks and its attention must know which token belongs to which row, and
# the step knows that. So while a packed forward runs, masks are only described (`MaskRecipe`),
# and attention over the keys that a cache layer was just given goes to the step. Nothing else may
# happen to either: what a model computes from them itself would mix the rows, and is refused
# (`Unpackable`).

RUNNING: ContextVar[Packing | None] = ContextVar("flowkv_packing", default=None)
"""The packed forward that runs in this thread."""


class Unpackable(UnsupportedModelError):
    """A model does something in which rows that are packed together would mix."""


class Packing:
    """A packed forward under way.

    Args:
        step: Its rows and their pages.
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
        """Puts the new keys and values of a layer into pages.

        Args:
            placed: The layer, a `cache.PlacedLayer`.
            window: Its sliding window, or None.
            key: `[1, Hk, N, D]`.
            value: `[1, Hk, N, Dv]`.

        Raises:
            Unpackable: They are not what the pages hold.
        """
        step, decode = self._step, self._step.decode(placed.group)
        if decode is not None and len(key) == 1 and decode.append(placed.place, key, value):
            step.pages(placed.index)  # it is written
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
            device = arguments.get("device", "cpu")
            found = self._masks[window, dtype] = packed_mask(self._count, window, dtype, device)
        return found

    def begins(self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Whether tokens see these keys causally, and no others: those of a single row's start."""
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
        placed, window, _, own, decode = self._written.get(id(key), (None,) * 5)
        if placed is None or own is not value:
            _refuse("attention is over other keys than the cache was given")
        if type(mask) is not MaskRecipe or mask.build is not _unbuilt or mask.window != window:
            shown = getattr(mask, "window", "no mask of ours")
            _refuse(f"a layer with window {window} is shown {shown}")
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
    """The mask of a packed forward over so many tokens: which of them meet, the step knows."""
    shape = dict(batch_size=1, q_length=count, kv_length=count, device=device)
    return MaskRecipe(_unbuilt, shape, window, dtype)


def exact(device: torch.device) -> AbstractContextManager[object]:
    """Keeps the autocast of whoever runs the engine out of keys and values."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _refuse(problem: str) -> NoReturn:
    raise Unpackable(f"rows cannot be packed: {problem}", "Let each row run by itself")


def _unbuilt(**arguments: Any) -> NoReturn:
    """Builds no mask of a packed forward."""
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
"""The same by implementation: old versions of sdpa drop these two silently, and so they count."""


@cache
def register() -> None:
    """Makes the implementations known to transformers."""
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
        begins = previous == "sdpa" and packing.begins(key, value, attention_mask)
        if begins and not _unserved(arguments, obeyed):
            own = _function(previous, module)  # as alone: nothing is gathered out of pages
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
        if value.layer is layer and _plain(layer, attention_mask, arguments, _OBEYED[previous]):
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
    layer: Any,
    attention_mask: torch.Tensor | None,
    arguments: dict[str, Any],
    obeyed: frozenset[str],
) -> bool:
    rows = layer.rows
    if not layer.in_step or layer.chunked or rows.wants_weights:
        return False
    new = rows.new
    if _unserved(arguments, obeyed, new):
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


def _unserved(arguments: dict[str, Any], obeyed: frozenset[str], new: int = 2) -> str:
    """An argument that attention over pages, of so many new tokens, does not obey; "" if none."""
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


# Switches the decoder's attention implementation to FlowKV's for forwards over pages.
#
# Between them the configuration says what it said before: callers read it, save it and set it, and
# compiled code is made of it.

_COMPARED = re.compile(
    r"_attn_implementation\s*(?:==|!=|not in|in)\s*(\([^)]*\)|\[[^\]]*\]|[\"']\w+[\"'])"
)


_CHOSEN = "_attn_implementation_internal"
"""Where a configuration keeps the implementation it chose."""


class Switch:
    """The attention implementation of one model's decoder. Thread-safe.

    Args:
        model: The model.

    Attributes:
        reason: Why it is not switched, so that layers are read dense; "" if it is.
    """

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None  # uses the cache
        decoder = decoder if isinstance(decoder, torch.nn.Module) else model
        configs: list[Any] = [getattr(module, "config", None) for module in decoder.modules()]
        known = {id(c): vars(c) for c in configs if _CHOSEN in getattr(c, "__dict__", ())}
        # Configurations compute every attribute that they are asked for: 5 us each.
        self._configs = [(held, str(held[_CHOSEN]).removeprefix(PREFIX)) for held in known.values()]
        self.reason = _obstacle(decoder, {name for _, name in self._configs})
        self._switched: list[tuple[dict[str, Any], str]] = []
        self._forwards = 0
        self._lock = threading.RLock()  # a finalizer may end a forward that was interrupted

    def on(self) -> None:
        """A forward over pages begins: FlowKV stands in, if it can."""
        with self._lock:
            self._forwards += 1
            if self._forwards > 1 or self.reason:
                return
            register()
            for held, known in self._configs:
                # What somebody else has set meanwhile was not asked for an obstacle.
                if held[_CHOSEN] == known:
                    self._switched.append((held, known))
                    # The property would set it for sub-configurations (a vision tower's) as well.
                    held[_CHOSEN] = PREFIX + known

    def off(self) -> None:
        """It is over: with the last one, what was there is put back, unless it was set anew."""
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
