"""`PagedCache`: a `DynamicCache` whose K and V lie in pages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple

import torch
import transformers
from torch.utils._pytree import tree_map

from flowkv import kernels
from flowkv.core.errors import StateError
from flowkv.hooks.huggingface.plan import LayerSpec, ModelPlan, PlacedLayer
from flowkv.hooks.huggingface.rows import Rows, close_all, refuse_lost
from flowkv.hooks.huggingface.versions import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    removed,
)
from flowkv.kernels.operands import Pages, Ragged

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
        layer: The cache layer it belongs to.
        which: 0 for keys, 1 for values.
        gathered: The tensor itself, once the layer has left its pages.
    """

    layer: PagedLayer
    which: int
    gathered: torch.Tensor | None
    # Otherwise torch would turn the dense results of operations into views again.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, layer: PagedLayer, which: int, like: torch.Tensor, columns: int) -> PagedView:
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
        return self.layer.dense()[self.which] if self.gathered is None else self.gathered

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
        build: Builds it in the format of the model's own attention; None if that needs none.
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
        names = ("batch_size", "q_length", "kv_length")
        batch, new, length = (arguments[name] for name in names)
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


# Cache layers whose K and V lie in pages, beside a recurrent state or not.

PAGED_STATE = frozenset(
    ("rows", "placed", "spec", "pages", "batch", "_cache", "_step", "_gathered", "_views")
)
"""Attributes of a layer that are no other layer's."""


class Gathered(NamedTuple):
    """K and V that were taken out of pages, as somebody holds them and may write to them.

    Attributes:
        keys: `[B, Hk, S, D]`.
        values: `[B, Hk, S, Dv]`.
        versions: How often torch saw them written to when they were taken out.
        asked: Somebody beside the model's forward was given them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    versions: tuple[int, int]
    asked: bool

    @property
    def written(self) -> bool:
        """Whether torch has seen a write since."""
        return (_version(self.keys), _version(self.values)) != self.versions

    def last(self, columns: int) -> Gathered:
        """The last columns, of the same memory."""
        if columns == self.keys.shape[2]:
            return self
        first = self.keys.shape[2] - columns
        return self._replace(keys=self.keys[:, :, first:], values=self.values[:, :, first:])


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer of a `PagedCache`.

    To the model it looks like the layer it replaces, lengths and window included; only K and V are
    elsewhere. Where they are not what the geometry says (another dtype, device or shape), or
    somebody writes to them, the cache turns into a native one, layers in place, for the rest of its
    life, and nothing more is published.

    Attributes:
        rows: The sequences of the cache.
        index: The model's layer index.
        window: Sliding window, or None.
        chunked: Attention is chunked: only ever read dense.
        shape: (Hk, D, Dv, dtype, device) that K and V must have.
        pages: This layer of all pages, of the step.
        batch: Rows of the step.
        columns: Columns that the layer shows in the step.

    Args:
        rows: The sequences of the cache.
        placed: Where its pages are.
        spec: What it keeps.
        cache: The cache that it is made for.
    """

    is_compileable, is_croppable, supports_early_init = False, True, False

    def __init__(
        self,
        rows: Rows,
        placed: PlacedLayer,
        spec: LayerSpec,
        cache: weakref.ref[PagedCache],
    ) -> None:
        super().__init__()
        self._cache = cache
        self.rows, self.placed, self.spec, self.index = rows, placed, spec, placed.index
        self.window = spec.window if spec.kind == "sliding" else None
        self.shown = spec.window  # of sliding and chunked layers: as the native layer keeps them
        self.chunked, self.shape = spec.kind == "chunked", placed.shape
        self.columns, self.record_past = 0, False
        self.dtype, self.device = placed.shape[3:]
        self.pages: Pages
        self.batch: Ragged
        self._step: object = None
        self._gathered: Gathered | None = None
        self._views: list[weakref.ref[PagedView]] = []
        self.is_initialized = True

    @property
    def is_sliding(self) -> bool:
        """Whether the native layer would keep a window only."""
        return self.shown is not None

    @property
    def seen(self) -> int:
        """Columns written."""
        return self.rows.total if self.in_step else self.rows.base

    @property
    def in_step(self) -> bool:
        """Whether the step that wrote its newest tokens is still open."""
        return self._step is not None and self._step is self.rows.step

    # ---- what the model calls

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: shapes are known beforehand."""

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new tokens into pages.

        Args:
            key_states: `[B, Hk, T, D]`.
            value_states: `[B, Hk, T, Dv]`.
            *args: Ignored, as by the native layer.
            **kwargs: Likewise.

        Returns:
            K and V of the columns that the layer shows: the given ones if there are no others, else
            views for FlowKV's attention, or dense tensors for any other.
        """
        rows, cache = self.rows, self._cache()
        if rows.step is None or rows.step is self._step:
            stays = self._own_step(key_states)
        else:
            stays = not self.edited()
        if not stays or not self._expected(key_states, value_states):
            return self.leave().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        rows.updated += 1
        self._step = rows.step
        found = self._write(key_states, value_states)
        if rows.driven and rows.updated == rows.layers and (cache is None or cache.stays()):
            rows.finish()
        return found

    def _write(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, step = self.rows, self.rows.step
        assert step is not None
        self.pages, self.batch = step.pages(self.index), step.batch(self.placed.group)
        self._gathered, self._views = None, []
        backend = self.placed.backend
        kernels.append(rows.pack(k), rows.pack(v), self.pages, self.batch, backend=backend)
        step.appended(self.index)
        self.batch = step.batch(self.placed.group)  # pages may have been put in place meanwhile
        self.columns = self._shown(rows.base) + rows.new
        if rows.base == 0:
            return k, v
        if rows.driven or not self.placed.in_pages:
            return self.dense()
        views = PagedView(self, 0, k, self.columns), PagedView(self, 1, v, self.columns)
        self._views = [weakref.ref(view) for view in views]
        return views

    def _own_step(self, k: torch.Tensor) -> bool:
        """Begins a step that no hook has begun; False if that cannot be done in pages."""
        rows, cache = self.rows, self._cache()
        rows.alive()
        if (rows.step is not None and not rows.driven) or (cache and not cache.stays()):
            return False  # called twice in one forward: a native layer would append twice
        rows.finish()  # of a forward that left layers out
        rows.land()  # nobody computes meanwhile
        refuse_lost(rows)
        rows.expand(k.shape[0])
        rows.begin(k.shape[2], driven=True)
        return True

    def _expected(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        heads, dim, dim_v, dtype, device = self.shape
        return (
            k.dtype is dtype
            and v.dtype is dtype
            and k.shape == (len(self.rows.seqs), heads, self.rows.new, dim)
            and v.shape[1:] == (heads, self.rows.new, dim_v)
            and k.device == device
        )

    def _shown(self, seen: int) -> int:
        return seen if self.shown is None else min(seen, self.shown - 1)

    def touched(self) -> None:
        """The model computes with its K and V itself: later steps hand it tensors at once."""
        self.placed.in_pages = False

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the columns it shows, gathered once a step."""
        if self._gathered is None:
            self._gathered = self._hold(self._gather(self.columns), asked=False)
        return self._gathered[:2]

    # ---- lengths, as the native layer tells them

    def get_seq_length(self) -> int:
        """Columns seen, those dropped behind a window included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns of the mask, first of them) for `query_length` new ones."""
        shown = self._shown(self.seen)
        return shown + query_length, self.seen - shown

    def get_max_length(self) -> int:
        """The window, or -1."""
        return -1 if self.shown is None else self.shown

    def activate_past_recording(self) -> None:
        """Nothing to do: pages behind a window stay for a while, see `KV.truncate`."""
        self.record_past = True

    # ---- K and V for whoever asks, and may write to them

    @property
    def keys(self) -> torch.Tensor | None:
        """`[B, Hk, S, D]`, the same until the next forward; None before the first token."""
        return self._shows("keys")

    @keys.setter
    def keys(self, given: Any) -> None:
        """Leaves pages, for this cache only; the base class sets None at first."""
        if "rows" in self.__dict__:
            self.leave().keys = given

    @property
    def values(self) -> torch.Tensor | None:
        """`[B, Hk, S, Dv]`, likewise."""
        return self._shows("values")

    @values.setter
    def values(self, given: Any) -> None:
        """Leaves pages, for this cache only; the base class sets None at first."""
        if "rows" in self.__dict__:
            self.leave().values = given

    def _shows(self, name: str) -> torch.Tensor | None:
        rows = self.__dict__.get("rows")
        if rows is None:
            return None
        if rows.kv.inherited:
            return getattr(self.leave(), name)  # type: ignore[no-any-return]
        if rows.step is None:
            rows.land()
        if not self.seen:
            return None
        if self._gathered is None:
            columns = self.columns if self.in_step else self._shown(self.seen)
            self._gathered = self._hold(self._gather(columns), asked=True)
        self._gathered = self._gathered._replace(asked=True)
        return getattr(self._gathered.last(self._shown(self.seen)), name)  # type: ignore[no-any-return]

    @staticmethod
    def _hold(pair: tuple[torch.Tensor, torch.Tensor], *, asked: bool) -> Gathered:
        return Gathered(*pair, (_version(pair[0]), _version(pair[1])), asked)

    def _gather(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, step = self.rows, self.rows.step
        rows.alive()
        if self.in_step:
            return kernels.gather_dense(self.pages, self.batch, columns)
        if step is None:
            with rows.reading(self.index, self.placed.group) as (pages, batch):
                return kernels.gather_dense(pages, batch, columns)
        # A forward is under way and has not reached this layer: leave its new columns out.
        pages, batch = step.pages(self.index), step.batch(self.placed.group)
        k, v = kernels.gather_dense(pages, batch, columns + rows.new)
        return k[:, :, :columns], v[:, :, :columns]

    def edited(self) -> bool:
        """Whether somebody has written to K or V that were taken out of pages."""
        held = self._gathered
        if held is None or held.written or not held.asked:
            return held is not None and held.written
        # Writes through `.data` or numpy are not counted.
        held = held.last(self._shown(self.seen))
        keys, values = self._gather(held.keys.shape[2])
        return not (_same(keys, held.keys) and _same(values, held.values))

    # ---- leaving pages

    def become_native(self) -> None:
        """Turns into a native layer with the same content, in place."""
        native, held = self.spec.make(), self._gathered
        if self.record_past and hasattr(native, "activate_past_recording"):
            native.activate_past_recording()
        for view in (known() for known in self._views):
            if view is not None and self.in_step:
                view.gathered = self.dense()[view.which]
        if self.seen:
            native.update(*self._gather(self.seen))
        if held is not None:
            shown = held.last(self._shown(self.seen))
            if native.keys.shape[2] == shown.keys.shape[2]:
                native.keys, native.values = shown.keys, shown.values
            else:  # a window that records its past has more than it shows
                native.keys[:, :, -shown.keys.shape[2] :] = shown.keys
                native.values[:, :, -shown.values.shape[2] :] = shown.values
        self._keep_state(native)
        self.__dict__.clear()
        self.__class__ = type(native)
        self.__dict__.update(native.__dict__)

    def _keep_state(self, native: Any) -> None:
        """Gives a native layer what is kept beside K and V."""

    def leave(self) -> Any:
        """Leaves pages with the whole cache; returns itself, which is a native layer now."""
        cache = self._cache()
        if cache is not None:
            cache.give_up(private=True)
        else:
            self.rows.go_blind()
            self.become_native()
        return self

    # ---- what is done to all layers of a cache is done to the rows; to one alone, natively

    def follow(self, kept: int | None = None) -> None:
        """Agrees with the rows again, after they were cropped, reordered or swapped.

        Args:
            kept: Columns that are left, if that is all that happened.
        """
        held, self._step, self._gathered, self._views = self._gathered, None, None, []
        if held is not None and held.asked and kept and self.shown is None:
            # As of a native layer, what was taken out and what is left share their memory.
            cut = held._replace(keys=held.keys[:, :, :kept], values=held.values[:, :, :kept])
            self._gathered = cut

    def crop(self, tokens_to_remove: int) -> None:
        """Leaves pages, and crops this layer alone."""
        self.leave().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Leaves pages, and reorders this layer alone."""
        self.leave().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Leaves pages, and repeats the rows of this layer alone."""
        self.leave().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Leaves pages, and selects rows of this layer alone."""
        self.leave().batch_select_indices(indices)

    def reset(self) -> None:
        """Leaves pages, and empties this layer alone."""
        self.leave().reset()

    def __copy__(self) -> Any:
        return copy(self.leave())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.leave(), memo)

    def offload(self) -> None:
        """Nothing: pages move on their own."""

    def prefetch(self) -> None:
        """Nothing: pages move on their own."""


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[misc]
    """A layer with attention in pages beside a recurrent state, kept as transformers keeps it."""

    is_compileable = False

    def __init__(
        self,
        rows: Rows,
        placed: PlacedLayer,
        spec: LayerSpec,
        cache: weakref.ref[PagedCache],
    ) -> None:
        PagedLayer.__init__(self, rows, placed, spec, cache)
        LinearAttentionLayer.__init__(self, spec.arguments.get("number_of_states", 1))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialises states, which are named; attention needs nothing."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def activate_past_recording(self) -> None:
        """Of states and attention."""
        LinearAttentionLayer.activate_past_recording(self)
        PagedLayer.activate_past_recording(self)

    crop, reorder_cache, reset = PagedLayer.crop, PagedLayer.reorder_cache, PagedLayer.reset

    def get_max_length(self) -> int:
        """The attention's."""
        return PagedLayer.get_max_length(self)

    @property
    def is_croppable(self) -> bool:
        """As the states say."""
        return bool(LinearAttentionLayer.is_croppable.fget(self))

    def _keep_state(self, native: Any) -> None:
        for name in vars(LinearAttentionLayer()):
            setattr(native, name, getattr(self, name))


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# Recurrent layers' states as named tensors and numbers, one row at a time, and back.
#
# A state has no tokens: it can be continued only where it was taken. It is taken when a cache is
# released and every so many tokens, and put into fresh native layers when a prompt begins with
# exactly the tokens it was taken after.

PLAIN = (bool, int, float, str)
_MAKER = "transformers"
"""Name of the version in a state: another one may keep its layers' states otherwise."""


class Recurrent:
    """The recurrent layers of one cache; refers to its rows and layers, never to the cache.

    Args:
        plan: All layers.
        rows: The sequences.
        layers: Layers of the cache.
    """

    def __init__(self, plan: ModelPlan, rows: Rows, layers: Sequence[Any]) -> None:
        self.plan, self.rows = plan, rows
        self.layers = {
            index: layer
            for index, layer in enumerate(layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
        }
        self._saved = rows.base
        self._marks: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.mark()

    def mark(self) -> None:
        """The states are what the model made of the tokens: who writes to them now edits them."""
        self._marks = [(weakref.ref(state), _version(state)) for state in self._tensors()]

    def edited(self) -> bool:
        """Whether torch has seen a state replaced or written to since."""
        now = self._tensors()
        return len(now) != len(self._marks) or any(
            known() is not state or _version(state) != version
            for state, (known, version) in zip(now, self._marks, strict=True)
        )

    def _tensors(self) -> list[torch.Tensor]:
        return [value for _, value in self._items() if isinstance(value, torch.Tensor)]

    def _items(self) -> Iterator[tuple[str, Any]]:
        """What the layers keep, under names that `restore` knows."""
        for index, layer in self.layers.items():
            held = vars(LinearAttentionLayer()) if isinstance(layer, PagedLayer) else vars(layer)
            for name in held:
                value = getattr(layer, name)
                if isinstance(value, dict):
                    yield from ((f"{index}.{name}.{part}", item) for part, item in value.items())
                else:
                    yield f"{index}.{name}", value

    def due(self, every: int) -> bool:
        """Whether `every` tokens were seen since a state was saved."""
        return self.rows.base - self._saved >= every

    def save(self) -> None:
        """Keeps the state of every row after exactly its tokens, if they are known.

        Not while a row is suspended: its pages are not there to be published.
        """
        rows = self.rows
        if rows.step is not None or rows.blind or rows.kv.closed or self._saved == rows.base:
            return
        if any(seq.suspended is not None for seq in rows.seqs):
            return
        if self.edited():
            rows.go_blind()
            return
        rows.flush()
        self._saved = rows.base
        for row, (seq, pad) in enumerate(rows.padded):
            if not rows.blind and not pad and not seq.closed and rows.trusted(rows):
                rows.kv.save_state(seq, self._take(row))

    def _take(self, row: int) -> dict[str, Any]:
        values: dict[str, Any] = {_MAKER: transformers.__version__}
        for name, value in self._items():
            if isinstance(value, torch.Tensor):
                values[name] = value[row : row + 1].detach().cpu()
            elif isinstance(value, PLAIN):
                values[name] = value
        return values

    def restore(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Puts one state per row into the layers, which must be fresh; False if they do not fit."""
        first = states[0]
        if any(state.keys() != first.keys() for state in states):
            return False
        for name, value in first.items():
            if name == _MAKER:
                continue
            index, _, key = name.partition(".")
            layer = self.layers.get(int(index)) if index.isdigit() else None
            if layer is None:
                return False
            if isinstance(value, torch.Tensor):
                rows = [state[name] for state in states]
                if any(row.shape != value.shape or row.dtype != value.dtype for row in rows):
                    return False
                device = self.plan.devices.get(int(index), torch.device("cpu"))
                value = torch.cat(rows).to(device)
                layer.device, layer.dtype = device, value.dtype
            elif any(state[name] != value for state in states):
                return False
            _put(layer, key, value)
        self.mark()
        return True


def readable(state: Mapping[str, Any]) -> bool:
    """Whether a state was taken by this version of transformers."""
    return state.get(_MAKER) == transformers.__version__


def _put(layer: Any, key: str, value: Any) -> None:
    name, _, part = key.partition(".")
    if part:
        getattr(layer, name)[int(part)] = value
    else:
        setattr(layer, name, value)


def release(rows: Rows, seqs: list[Any], recurrent: Recurrent | None) -> None:
    """What is left of a cache that nobody holds: its states are kept, its pages released.

    Runs as a finalizer, at any moment and in any thread, so that all work waits until the KV lock
    is free of its own thread.
    """
    if rows.kv.inherited:
        return  # the pages are the parent's

    def work() -> None:
        try:
            if not rows.kv.closed:
                rows.abandon()
                if recurrent is not None:
                    recurrent.save()
        finally:
            close_all(seqs)

    rows.kv.lock.defer(work)


SNAPSHOT_PAGES = 16
"""Recurrent states are saved at least every so many pages."""


class PagedCache(DynamicCache):  # type: ignore[misc]
    """A cache for one call of `generate`, one sequence per row.

    A subclass of `DynamicCache` because models and `EncoderDecoderCache` ask for one. A fresh
    native cache becomes one in place (`take_over`), so that whoever made it holds the same object.
    Whatever is done to it that pages cannot hold, writing to its keys above all, turns it back in
    place (`give_up`). Released, it gives its pages back; what was published stays known.

    Attributes:
        rows: Its sequences.
        plan: Its layers.
        recurrent: Its recurrent layers, if there are any.
        door: The attached model that it serves, or None.
        tenant: Whose pages it uses, if not the cache's own tenant's.
        care: `session`, `lease` and `retain` of its requests, as far as they were said.
        options: Arguments beside token ids that its first forward was given.
        fresh: Whoever made it saw it empty until its first forward was over.
        audits: Computes restored pages once more after the first forward, or None.
        drawn: Where random generators stood when its forward began; None where nobody draws.
        watched: Its forward began with a model as it was named.
        close: Releases it now instead of when nobody holds it any more.
    """

    rows: Rows
    plan: ModelPlan
    recurrent: Recurrent | None
    door: Any
    tenant: str | None
    care: Mapping[str, Any]
    options: dict[str, Any]
    fresh: bool
    audits: Any  # a `restore.Nested` that computes sampled pages once more
    drawn: tuple[bytes, ...] | None
    watched: bool
    unsteady: int
    close: weakref.finalize[..., PagedCache]
    _made: list[Any]

    def __init__(self, rows: Rows, plan: ModelPlan, door: Any = None) -> None:
        me = weakref.ref(self)
        layers = [_layer(rows, plan, index, me) for index in range(len(plan.specs))]
        Cache.__init__(self, layers=list(layers))
        self._made = layers
        self.rows, self.plan, self.door = rows, plan, door
        self.tenant, self.care, self.options, self.audits = None, {}, {}, None
        self.fresh, self.watched, self.drawn = False, False, None
        self.unsteady = 0 if door is None else door.identity.unsteady
        self.recurrent = Recurrent(plan, rows, layers) if plan.stateful else None
        # Works because neither rows nor layers refer to the cache.
        self.close = weakref.finalize(self, release, rows, rows.seqs, self.recurrent)
        self.close.atexit = False

    @classmethod
    def take_over(cls, cache: Any, rows: Rows, plan: ModelPlan, door: Any) -> PagedCache:
        """Turns a fresh native cache into a paged one, in place."""
        cache.__dict__.clear()
        cache.__class__ = cls
        cls.__init__(cache, rows, plan, door)
        return cache  # type: ignore[no-any-return]

    def restore(self, states: Sequence[Mapping[str, Any]] | None) -> None:
        """Puts one state per row into fresh recurrent layers, if there are any.

        Raises:
            StateError: They are of other layers.
        """
        if states is None:
            return
        if self.recurrent is None or not self.recurrent.restore(states):
            raise StateError(
                "a saved state does not fit the model", "Call kv.invalidate(), then try again"
            )

    @property
    def paged(self) -> list[PagedLayer]:
        """Its layers in pages."""
        return [layer for layer in self._made if isinstance(layer, PagedLayer)]

    @property
    def reused(self) -> int:
        """Tokens that were known when it was made, over all rows."""
        return sum(seq.reused for seq in self.rows.seqs)

    def stays(self, *, computed: bool = False) -> bool:
        """Whether it is as FlowKV made it; otherwise it is a native cache from now on.

        Asked before anything is done with it. Somebody may have written to its keys and values, or
        put other layers into it; or this process was forked, and its pages are the parent's.

        Args:
            computed: A forward is just over, which writes to recurrent states itself.
        """
        if self.rows.kv.inherited or self.layers != self._made or self._edited():
            self.give_up(private=True)
            return False
        if not computed and self.recurrent is not None and self.recurrent.edited():
            self.rows.go_blind()
        return True

    def _edited(self) -> bool:
        return any(layer.edited() for layer in self.paged)

    def give_up(self, *, private: bool = False) -> None:
        """Becomes a native `DynamicCache` of the same content, in place, and so do its layers.

        Args:
            private: Nothing of it is to be published, states of recurrent layers included.

        Raises:
            StateError: Pages of it were on their way and did not come.
        """
        rows = self.rows
        rows.arrive()
        if private:
            rows.go_blind()
        for layer in self.paged:
            layer.become_native()
        for layer in self.layers:
            if isinstance(layer, PagedLayer):  # of another cache: both advance it from now on
                layer.leave()
        close, kept = self.close, dict(self.__dict__)
        for name in PagedCache.__annotations__.keys() - {"close"}:
            kept.pop(name, None)
        self.__dict__.clear()
        self.__dict__.update(kept, left_pages=True)  # its copies know it, too
        self.__class__ = DynamicCache
        if not rows.kv.inherited:
            rows.abandon()
        close()

    def finish(self) -> None:
        """A forward of the model is over.

        Raises:
            StateError: It left out layers that cannot be had; the cache is as before it.
        """
        if not self.stays(computed=True):
            return
        try:
            self.rows.finish()
        except StateError:
            self.fail()
            refuse_lost(self.rows)
            raise
        if self.recurrent is not None:
            self.recurrent.mark()
            every = SNAPSHOT_PAGES * self.rows.kv.page_size
            if self.recurrent.due(every):
                self.recurrent.save()

    def fail(self) -> None:
        """A forward of the model failed: as before it, as far as that can be."""
        base, rows, self.audits = self.rows.base, self.rows, None
        stateful, anew = self.recurrent is not None, self.fresh and not self.rows.forwards
        if anew or (stateful and rows.step is not None):
            rows.go_blind()  # another prompt may follow; some states may be further than others
        if rows.step is not None:
            self.follow()
        rows.abandon()
        if anew or (stateful and rows.base < base):
            self.empty()

    def follow(self, kept: int | None = None) -> None:
        """Lets every layer agree with the rows again.

        Args:
            kept: Columns that are left, if that is all that happened.
        """
        for layer in self.paged:
            layer.follow(kept)

    # ---- what generation does to a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in the cache, padding and what was reused included."""
        if self.layers != self._made and not self.stays():
            return self.get_seq_length(layer_idx)
        if self.rows.step is None:
            return self.rows.base
        length: int = super().get_seq_length(layer_idx)
        return length

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens.

        Args:
            tokens_to_remove: Minus their number; a positive number is the length that remains.

        Raises:
            StateError: They reach behind a sliding window.
        """
        self.rows.alive()
        tokens = int(tokens_to_remove)  # assisted generation passes a tensor
        if not self.stays():
            return self.crop(tokens)
        self._each("crop", tokens)
        self.rows.crop(removed(tokens, self.rows.told))
        self.follow(self.rows.base)
        self._mark()
        return None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row `beam_idx[i]` row i: pages are shared, nothing is copied."""
        self._move("reorder_cache", beam_idx, beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some rows."""
        every = torch.arange(len(self.rows.seqs), device=indices.device)
        self._move("batch_select_indices", indices, every[indices].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        rows = [row for row in range(len(self.rows.seqs)) for _ in range(repeats)]
        self._move("batch_repeat_interleave", repeats, rows)

    def _move(self, name: str, argument: Any, rows: list[int]) -> None:
        self.rows.alive()
        if not self.stays():
            getattr(self, name)(argument)
            return
        self._each(name, argument)
        self.rows.select(rows)
        self.follow()
        self._mark()

    def _each(self, name: str, *arguments: Any) -> None:
        """Does to what layers keep themselves what is done to the rows."""
        for layer in self.layers:
            if isinstance(layer, PagedHybridLayer):
                operation = getattr(LinearAttentionLayer, name, None)
                if operation is not None:
                    operation(layer, *arguments)
            elif not isinstance(layer, PagedLayer) and hasattr(layer, name):
                getattr(layer, name)(*arguments)

    def _mark(self) -> None:
        if self.recurrent is not None:
            self.recurrent.mark()

    def empty(self) -> None:
        """Forgets all tokens; those computed from now on begin a prompt again."""
        if self.recurrent is not None:
            self._each("reset")
        self.rows.crop(self.rows.told)
        self.follow()
        self._mark()

    def reset(self) -> None:
        """Forgets all tokens."""
        self.rows.alive()
        if not self.stays():
            self.reset()
            return
        self.rows.abandon()
        self._each("reset")
        self.rows.crop(self.rows.told)
        self.rows.go_blind()
        self.follow()
        self._mark()

    @property
    def is_linear(self) -> list[bool]:
        """Which layers keep a recurrent state and nothing else."""
        found: list[bool] = super().is_linear
        return [
            linear and not isinstance(layer, PagedHybridLayer)
            for linear, layer in zip(found, self.layers, strict=True)
        ]

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """An independent cache: pages are shared until one of the two writes."""
        self.rows.alive()
        if not self.stays():
            return deepcopy(self, memo)  # type: ignore[return-value]
        rows = self.rows.fork()
        twin = PagedCache(rows, self.plan, self.door)
        memo[id(self)] = twin
        own = ("layers", "_made", "rows", "recurrent", "close")
        twin.__dict__.update({k: v for k, v in self.__dict__.items() if k not in own})
        for old, new in zip(self.layers, twin.layers, strict=True):
            _copy_layer(old, new)
        twin._mark()
        return twin

    def __copy__(self) -> PagedCache:
        """Like a deep copy: two caches cannot advance the same rows."""
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, it is a `DynamicCache` of the same content."""
        twin: Any = self.__deepcopy__({})
        if isinstance(twin, PagedCache):
            twin.give_up(private=True)
        return _itself, (twin,)


def _itself(cache: Any) -> Any:
    return cache


def _layer(rows: Rows, plan: ModelPlan, index: int, cache: weakref.ref[PagedCache]) -> Any:
    spec, placed = plan.specs[index], plan.placed.get(index)
    if placed is None:
        return spec.make()
    return (PagedHybridLayer if spec.hybrid else PagedLayer)(rows, placed, spec, cache)


def _copy_layer(old: Any, new: Any) -> None:
    """Copies what a layer keeps itself: plain attributes, and tensors as clones."""
    for name, value in vars(old).items():
        if not isinstance(old, PagedLayer) or name not in PAGED_STATE:
            new.__dict__[name] = _clone(value)


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    return value
