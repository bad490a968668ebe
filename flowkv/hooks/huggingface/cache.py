"""`PagedCache`: a `DynamicCache` with K and V in pages; its layers, and their places in pages."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import transformers

from flowkv import kernels
from flowkv.cache.block_table import Planner
from flowkv.cache.step import writer
from flowkv.core import interrupts
from flowkv.core.errors import GeometryError, StateError, UnsupportedModelError
from flowkv.core.geometry import INDEXERS, Geometry, LayerGroup
from flowkv.hooks.huggingface.attention import OBSERVER, PagedView
from flowkv.hooks.huggingface.rows import Rows, close_all, exclusive, refuse_lost
from flowkv.hooks.huggingface.versions import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    layer_types,
    native_layer,
    removed,
)
from flowkv.naming.fingerprint import version_of

# The layers of a model that can be in pages, from its configuration and one probe.

Kind = Literal["full", "sliding", "chunked", "recurrent", "none"]
_KINDS: dict[str, tuple[Kind, dict[str, bool]]] = {
    "full_attention": ("full", {}),
    "sliding_attention": ("sliding", {}),
    "chunked_attention": ("chunked", {}),
    "hybrid": ("full", {"hybrid": True}),
    "hybrid_sliding": ("sliding", {"hybrid": True}),
    "indexed_attention": ("full", {}),
    "deepseek_sparse_attention": ("full", {}),  # in 5.17
    "minimax_m3_sparse": ("full", {"by_column": True}),
    "compressed_sparse_attention": ("sliding", {"by_column": True, "compressed": True}),
    "heavily_compressed_attention": ("sliding", {"by_column": True, "compressed": True}),
    "none": ("none", {}),
}
"""Kind and flags of the specs of layer types; those by column choose blocks of columns."""
BY_COLUMN = "padding changes which tokens its layers attend to"
_POSITIONS = "indexer_position_ids"
"""Positions `[3, B, S]` of all tokens, which one layer keeps for the indexers of all."""


class LayerSpec(NamedTuple):
    """Cache state of one decoder layer, from transformers' configuration.

    Attributes:
        kind: Kind of attention; "recurrent" for a state only, "none" for nothing.
        native: Class of the native cache layer.
        arguments: Arguments of the native cache layer.
        hybrid: Whether the layer has a recurrent state beside its attention.
        positions: Whether the layer keeps the positions of all tokens for indexers.
        by_column: Whether padding changes which tokens the layer attends to.
        compressed: Whether the layer keeps compressed entries of tokens behind its window.
        absent: Whether the layer had no keys when the model was probed.
    """

    kind: Kind
    native: Any
    arguments: dict[str, Any]
    hybrid: bool = False
    positions: bool = False
    by_column: bool = False
    compressed: bool = False
    absent: bool = False

    @property
    def window(self) -> int | None:
        """Tokens in the window of a sliding or chunked layer; None for the others."""
        if self.kind not in ("sliding", "chunked"):
            return None
        given = self.arguments
        return int(given["config"].sliding_window if self.compressed else given["sliding_window"])

    @property
    def in_pages(self) -> bool:
        """Return whether the layer has keys and values."""
        return self.kind in ("full", "sliding", "chunked")

    @property
    def stateful(self) -> bool:
        """Return whether the layer has a state that can be continued only where it was taken."""
        return self.hybrid or self.positions or self.compressed or self.kind == "recurrent"

    def make(self) -> Any:
        """Make a fresh native cache layer."""
        return self.native(**self.arguments)


def read_layer(name: str, arguments: dict[str, Any]) -> LayerSpec:
    """Return the spec of a layer type that the configuration names.

    Args:
        name: Name of the layer type, such as "full_attention".
        arguments: Arguments of the native cache layer.

    Raises:
        UnsupportedModelError: FlowKV does not know the type.
    """
    native, problem = native_layer(name), "keep more than keys and values"
    if native is None:
        problem = "have no known cache"
    elif name in _KINDS:
        kind, more = _KINDS[name]
        if "compressed" in more:
            arguments = deepcopy(arguments)  # a configuration may change
        return LayerSpec(kind, native, arguments, **more)
    elif issubclass(native, LinearAttentionCacheLayerMixin):
        return LayerSpec("recurrent", native, arguments)
    raise UnsupportedModelError(
        f"layers of type {name!r} {problem}", "Use the model without FlowKV"
    )


class PlacedLayer:
    """Place of one layer's pages; shared by all caches of a model.

    Attributes:
        index: The layer's index in the geometry.
        group: Layer group of the layer.
        place: Number of the layer within the group.
        shape: (Hk, D, Dv, dtype, device) of its keys and values.
        in_pages: Whether FlowKV's attention reads its pages; False once the model has computed
            with keys and values itself.
        was_read: Whether FlowKV's attention has read its pages.
        contradicted: Whether the model's mask shows another window than its cache.
    """

    __slots__ = tuple("contradicted group in_pages index place shape was_read".split())

    def __init__(self, index: int, group: int, spec: LayerGroup, *, in_pages: bool = True) -> None:
        self.index, self.group, self.in_pages = index, group, in_pages
        self.place = spec.layers.index(index)
        self.was_read = self.contradicted = False
        dtype, device = getattr(torch, spec.dtype), torch.device(spec.device)
        self.shape = (spec.kv_heads, spec.head_dim, spec.value_dim, dtype, device)


class ModelPlan:
    """All layers of a model, and the geometry of the layers in pages.

    Attributes:
        specs: One spec per layer.
        geometry: Geometry that the cache is bound to.
        placed: Layers in pages, by their index.
        indexers: Indexers in pages, by the index of their layer.
        devices: Devices of layers with a state, by their index.
        count: Number of layers in the configuration.
        stateful: Some layers have states: prefixes are reusable only where states were saved.
        by_column: Padding changes which tokens some layers attend to.
        compressed: Some layers keep compressed entries.
        from_0: Without positions, the model counts from 0.
        uncounted: Tokens that the model leaves out where it counts positions.
    """

    from_0, uncounted = True, frozenset[int]()

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        geometry: Geometry,
        devices: dict[int, torch.device] | None = None,
        *,
        in_pages: bool = True,
    ) -> None:
        self.specs, self.geometry, self.devices = tuple(specs), geometry, devices or {}
        self.count = len(self.specs)
        self.stateful = any(spec.stateful for spec in self.specs)
        self.by_column = any(spec.by_column for spec in self.specs)
        self.compressed = any(spec.compressed for spec in self.specs)
        found = {
            index: PlacedLayer(index, g, group, in_pages=in_pages)
            for g, group in enumerate(geometry.groups)
            for index in group.layers
        }
        self.placed = {index: one for index, one in found.items() if index < INDEXERS}
        self.indexers = {i - INDEXERS: one for i, one in found.items() if i >= INDEXERS}

    def matches(self, layers: Sequence[Any], config: Any) -> bool:
        """Return whether a native cache of the current configuration has the layers of the plan.

        Args:
            layers: The layers of the cache; empty if it makes them on first use.
            config: The configuration.
        """
        if not layers:
            return configured_layers(config) == self.count
        found = [getattr(layer, "sliding_window", None) for layer in layers]
        windows = [self.specs[index].window for index in self.placed if index < len(found)]
        fits = len(found) in (self.count, len(self.specs))
        return fits and [found[i] for i in self.placed if i < len(found)] == windows


def configured_layers(config: Any) -> int:
    """Return the current number of layers in a configuration."""
    return int(getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0) or 0)


def read_layers(config: Any) -> list[LayerSpec]:
    """Return the spec of each decoder layer.

    Raises:
        UnsupportedModelError: FlowKV does not know a layer's type, or no layer has keys.
    """
    try:
        named = layer_types(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"the configuration does not describe cache layers ({error})",
            "Use the model without FlowKV",
        ) from error
    specs = [read_layer(name, arguments) for name, arguments in named]
    if not any(spec.in_pages for spec in specs):
        raise UnsupportedModelError(
            "no layer keeps keys and values per token", "Use the model without FlowKV"
        )
    return specs


def repeated(specs: Sequence[LayerSpec], layers: Sequence[Any]) -> list[LayerSpec]:
    """Return the specs of layers that a model added to its cache, for those that it runs in loops.

    Args:
        specs: Specs of the layers in the configuration.
        layers: The layers of the native cache after a forward.
    """
    known = {(spec.native, spec.window): spec for spec in specs}
    more = [(type(x), getattr(x, "sliding_window", None)) for x in layers[len(specs) :]]
    return [known[kind] for kind in more if kind in known]


def place_layers(
    specs: Sequence[LayerSpec],
    layers: Sequence[Any],
    page_size: int,
    *,
    in_pages: bool,
    share_of: Callable[[int], float] | None = None,
) -> ModelPlan:
    """Group layers by kind, shape and device, as found in a native cache after a probe.

    Args:
        specs: Specs of the layers, from `read_layers`.
        layers: The layers of the native cache, one token in each.
        page_size: Tokens per page.
        in_pages: Whether attention may read pages.
        share_of: Returns the share of tokens that a layer keeps; layers of a group keep the same.

    Raises:
        UnsupportedModelError: Keys and values cannot be paged.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    devices: dict[int, torch.device] = {}
    seen = list(specs)
    for index, (spec, layer) in enumerate(zip(specs, layers, strict=True)):
        if spec.stateful and not spec.compressed:
            for state in (*layer.conv_states.values(), *layer.recurrent_states.values()):
                if state is not None:
                    devices[index] = state.device
        if not spec.in_pages:
            continue
        keys, values, indexed = layer.keys, layer.values, indexer_keys(layer)
        if keys is None or keys.dim() != 4:  # the layer reads another's keys, or has none now
            if indexed is not None:
                raise UnsupportedModelError(
                    f"layer {index} has keys of an indexer and none of attention",
                    "Use the model without FlowKV",
                )
            seen[index] = LayerSpec("none", spec.native, spec.arguments, absent=True)
            continue
        if getattr(layer, _POSITIONS, None) is not None:
            seen[index], devices[index] = spec._replace(positions=True), keys.device
        if spec.compressed:
            devices[index] = keys.device
        share = 1.0 if share_of is None else share_of(index)
        kept = [(index, keys, values.shape[3])]
        if indexed is not None:
            kept.append((INDEXERS + index, indexed, 0))
        for number, x, dim_v in kept:
            kind = spec.kind if dim_v else "keys"
            shape = (x.shape[1], x.shape[3], dim_v, x.dtype, x.device)
            groups.setdefault((share, kind, spec.window, *shape), []).append(number)
    if not groups:
        raise UnsupportedModelError(
            "the model put no keys and values into its cache", "Use the model without FlowKV"
        )
    try:
        found = tuple(
            LayerGroup(
                layers=tuple(sorted(indices)),
                kv_heads=heads,
                head_dim=dim,
                value_dim=dim_v,
                dtype=str(dtype).removeprefix("torch."),
                kind=kind,
                window=window,
                device=str(device),
            )
            for (_, kind, window, heads, dim, dim_v, dtype, device), indices in groups.items()
        )
        geometry = Geometry(groups=found, page_size=page_size)
    except GeometryError as error:
        raise UnsupportedModelError(error.problem, error.remedy) from error
    in_pages = in_pages and not any(number >= INDEXERS for g in found for number in g.layers)
    in_pages = in_pages and not any(spec.compressed for spec in specs)
    return ModelPlan(seen, geometry, devices, in_pages=in_pages)


# Cache layers with K and V in pages, and some with a recurrent state beside them.

PAGED_STATE = frozenset("rows placed spec decode indexer update _cache wrote _gathered".split())
"""Attributes that belong to one layer, and are not copied to another."""


class Gathered(NamedTuple):
    """K and V gathered out of pages into tensors, which a caller may hold and write to.

    Attributes:
        keys: `[B, Hk, S, D]`.
        values: `[B, Hk, S, Dv]`.
        versions: Torch's version counters of both tensors when they were gathered.
        asked: Whether a caller beside the model's forward got them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    versions: tuple[int, int]
    asked: bool

    @property
    def written(self) -> bool:
        """Return whether torch has counted a write since."""
        return (version_of(self.keys), version_of(self.values)) != self.versions

    def last(self, columns: int) -> Gathered:
        """Return the last `columns` columns, in the same memory."""
        if columns == self.keys.shape[2]:
            return self
        first = self.keys.shape[2] - columns
        return self._replace(keys=self.keys[:, :, first:], values=self.values[:, :, first:])


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Attention layer of a `PagedCache`.

    To the model it looks like the layer it replaces, lengths and window included; only K and V are
    in pages. If they differ from the geometry (another dtype, device or shape), or the caller
    writes to them, the cache turns into a native one for the rest of its life, layers in place, and
    no further page is published.

    Attributes:
        rows: The sequences of the cache.
        index: The model's layer index.
        window: Sliding window, or None.
        chunked: Attention is chunked: only ever read dense.
        shape: (Hk, D, Dv, dtype, device) that K and V must have.
        decode: Prepared decode of the step (`Step.decode`), if this layer has used it.
        columns: Columns that the layer shows in the step.
        wrote: The step that wrote its newest tokens, or None; views of other steps are stale.
        skipped: Columns that it has, if forwards have skipped it since; else None.

    Args:
        rows: The sequences of the cache.
        placed: Place of its pages.
        spec: Spec of the layer.
        cache: Weak reference to its cache.
    """

    is_compileable, is_croppable = False, True
    states: tuple[str, ...] = ()
    """Attributes that are the layer's state beside its pages."""

    def __init__(
        self, rows: Rows, placed: PlacedLayer, spec: LayerSpec, cache: weakref.ref[PagedCache]
    ) -> None:
        super().__init__()
        self._cache = cache
        self.rows, self.placed, self.spec, self.index = rows, placed, spec, placed.index
        self.window = spec.window if spec.kind == "sliding" else None
        self.shown = spec.window  # window of sliding and chunked layers, as in the native layer
        self.is_sliding = self.shown is not None
        self.chunked, self.shape = spec.kind == "chunked", placed.shape
        self.columns, self.record_past = 0, False
        self.dtype, self.device = placed.shape[3:]
        self.supports_early_init = getattr(spec.native, "supports_early_init", True)
        self.decode: Any = None
        self.wrote: object = None
        self.skipped: int | None = None
        self._gathered: Gathered | None = None

    is_initialized = property(
        lambda layer: bool(layer.seen), lambda *_: None, doc="As of a native layer: it has tokens."
    )

    @property
    def seen(self) -> int:
        """Number of columns written so far, padding included."""
        if self.skipped is not None:
            return self.skipped
        return self.rows.total if self.in_step else self.rows.base

    @property
    def in_step(self) -> bool:
        """Return whether the step that wrote its newest tokens is still open."""
        return self.wrote is not None and self.wrote is self.rows.step

    # ---- methods that the model calls

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: shapes are known beforehand."""

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens into pages.

        Args:
            key_states: `[B, Hk, T, D]`.
            value_states: `[B, Hk, T, Dv]`.
            *args: Ignored, as by the native layer.
            **kwargs: Ignored likewise.

        Returns:
            K and V of the columns that the layer shows: the given ones if there are no others, else
            views for FlowKV's attention, or dense tensors for any other.
        """
        rows = self.rows
        if not self.extend(key_states, value_states):
            return self.to_native().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        if rows.base == 0:
            if rows.thinning is not None:
                setattr(key_states, OBSERVER, partial(rows.thinning.observe, self.index))
            return key_states, value_states
        if not self.placed.in_pages:
            return self.dense()
        seen = self.columns
        views = PagedView(self, 0, key_states, seen), PagedView(self, 1, value_states, seen)
        rows.views[self.index] = views
        return views

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Write new tokens into pages; return False if the layer has to leave them first."""
        stays = self._begun() and (self._gathered is None or not self.edited())
        if not stays or self.skipped is not None or not self._write(k, v):
            return False
        self.rows.updated += 1
        self.wrote = self.rows.step
        return True

    def _write(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Write new tokens into pages; return False if class, shape, dtype or device do not fit."""
        rows, step, group = self.rows, self.rows.step, self.placed.group
        assert step is not None
        if not type(k) is type(v) is torch.Tensor:  # kernels read the memory of a tensor itself
            return False
        if k.requires_grad or v.requires_grad:  # pages pass no gradients on
            return False
        decode = writer(step, group)
        if decode is None or not decode.append(self.placed.place, k, v):
            if not self._expected(k, v):
                return False
            decode = None
        self._gathered, self.decode = None, decode if rows.new == 1 else None
        if decode is None:
            alone = step.groups[group].kind == "keys"
            step.write(self.index, rows.pack(k), None if alone else rows.pack(v))
        else:
            step.appended(self.index)  # may wait for pages of this layer to load
        self.columns = self._shown(rows.base) + rows.new
        return True

    def read(
        self,
        q: torch.Tensor,
        scale: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Attend with queries `[B, Hq, T, D]` over pages; return `[B, T, Hq, Dv]`.

        Returns None if the queries do not fit the rows or the geometry, or want gradients.
        """
        if self.decode is not None and not q.requires_grad:
            found = self.decode.attend(self.placed.place, q, scale, softcap, sinks)
            if found is not None:
                return found  # type: ignore[no-any-return]
        (batch, heads, new, dim), rows, step = q.shape, self.rows, self.rows.step
        assert step is not None
        kv_heads, head_dim, _, dtype, device = self.shape
        if (batch, new, dim) != (len(rows.seqs), rows.new, head_dim) or heads % kv_heads:
            return None
        if q.dtype is not dtype or q.device != device or q.requires_grad:
            return None
        packed = rows.pack(q)
        return rows.unpack(step.read(self.index, packed, scale=scale, softcap=softcap, sinks=sinks))

    def _begun(self) -> bool:
        """Return whether a hook began the step under way, and this layer has no part of it yet.

        Raises:
            StateError: Outside a step, reported columns failed to load.
        """
        rows = self.rows
        if rows.step is None:  # the model's own forward, and with it its hook, was bypassed
            rows.alive()
            rows.land()
            refuse_lost(rows)
        return rows.step is not None and rows.step is not self.wrote

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

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the shown columns as dense tensors, gathered once a step."""
        return (self._gathered or self._hold(self.columns, asked=False))[:2]

    # ---- lengths, as of the native layer

    def get_seq_length(self) -> int:
        """Return the columns written, including those dropped behind a window."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns of the mask, first of them) for `query_length` new columns."""
        shown = self._shown(self.seen)
        return shown + query_length, self.seen - shown

    def get_max_length(self) -> int:
        """Return the window in columns, -1 if there is none."""
        return -1 if self.shown is None else self.shown

    def activate_past_recording(self) -> None:
        """Record the request only: pages behind a window stay for a while, see `KV.truncate`."""
        self.record_past = True

    # ---- K and V as tensors for callers, which may write to them

    @staticmethod
    def _shown_as(name: str) -> property:
        """Make the property of K or V: the same `[B, Hk, S, D]` tensor until the next forward.

        Its value is None before the first token.
        """

        def put(layer: PagedLayer, given: Any) -> None:
            if "rows" in layer.__dict__:  # the base class sets None at first
                setattr(layer.to_native(), name, given)

        return property(lambda layer: layer._show(name), put, doc="K or V, as of a native layer.")

    keys, values = _shown_as("keys"), _shown_as("values")

    def _show(self, name: str) -> torch.Tensor | None:
        rows = self.__dict__.get("rows")
        if rows is None:
            return None
        if rows.kv.inherited:
            return getattr(self.to_native(), name)  # type: ignore[no-any-return]
        if rows.step is None:
            rows.land()
        if not self.seen:
            return None
        shown, held = self._shown(self.seen), self._gathered
        if (
            held is None and rows.step is not None and not self.in_step
        ):  # a model looks at its cache
            heads, dim, dim_v, dtype, device = self.shape
            width = dim if name == "keys" else dim_v
            like = torch.empty((len(rows.seqs), heads, 0, width), dtype=dtype, device=device)
            return PagedView(self, int(name != "keys"), like, shown)
        if held is None:
            held = self._hold(self.columns if self.in_step else shown, asked=True)
        self._gathered = held._replace(asked=True)
        return getattr(held.last(shown), name)  # type: ignore[no-any-return]

    def _hold(self, columns: int, *, asked: bool) -> Gathered:
        keys, values = self.gather(columns)
        self.rows.taken = True
        self._gathered = Gathered(keys, values, (version_of(keys), version_of(values)), asked)
        return self._gathered

    def gather(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V of the last columns out of pages, as `[B, Hk, S, D]` and `[B, Hk, S, Dv]`.

        Raises:
            StateError: The pages cannot be read, or tokens were removed.
        """
        rows, step = self.rows, self.rows.step
        rows.alive()
        for seq in rows.seqs:
            Planner.of(seq).whole(seq)
        rows.refuse_thinned("be read as one tensor")
        # Leave columns out that a forward under way, or one that skipped the layer, did not write.
        more = (rows.base if step is None else rows.total) - self.seen
        if step is None:
            with rows.reading(self.index, self.placed.group) as (pages, batch):
                k, v = kernels.gather_dense(pages, batch, columns + more)
        else:
            batch = step.batch(self.placed.group)
            k, v = kernels.gather_dense(step.pages(self.index), batch, columns + more)
        return k[:, :, :columns], v[:, :, :columns]

    def edited(self) -> bool:
        """Return whether gathered K or V were written to since."""
        held = self._gathered
        if held is None or held.written or not held.asked:
            return held is not None and held.written
        # Writes through `.data` or numpy are not counted.
        shown = held.last(self._shown(self.seen))
        keys, values = self.gather(shown.keys.shape[2])
        if not (_same(keys, shown.keys) and _same(values, shown.values)):
            return True
        if self.in_step:  # pages that others computed may replace these at the end of the step
            self._gathered = held._replace(asked=False)
        return False

    # ---- leaving pages

    def become_native(self) -> None:
        """Turn into a native layer with the same content, in place."""
        native, held = self.spec.make(), self._gathered
        if self.record_past and hasattr(native, "activate_past_recording"):
            native.activate_past_recording()
        for view in self.rows.views.get(self.index, ()):
            view.gathered = self.dense()[view.which]
        if self.seen:
            native.update(*self.gather(self.seen))
        if held is not None:
            shown = held.last(self._shown(self.seen))
            if native.keys.shape[2] == shown.keys.shape[2]:
                native.keys, native.values = shown.keys, shown.values
            else:  # a window that records its past holds more columns than it shows
                native.keys[:, :, -shown.keys.shape[2] :] = shown.keys
                native.values[:, :, -shown.values.shape[2] :] = shown.values
        if isinstance(self, LinearAttentionLayer):
            for name in vars(LinearAttentionLayer()):
                setattr(native, name, getattr(self, name))
        _become(self, type(native), vars(native))

    def to_native(self) -> Any:
        """Turn the whole cache into a native one; return this layer, now native."""
        cache = self._cache()
        if cache is not None:
            cache.give_up(private=True)
        else:
            self.rows.disable_publishing()
            self.become_native()
        return self

    # ---- operations on all layers change the rows; operations on one layer alone make it native

    def follow(self, kept: int | None = None) -> None:
        """Drop state of the step and gathered tensors, after the rows changed.

        Args:
            kept: Columns that are left, if the rows were only cut.
        """
        held, self.wrote, self._gathered = self._gathered, None, None
        if not self.rows.base:
            self.skipped = None
        if held is not None and held.asked and kept and self.shown is None:
            # As with a native layer, the remaining columns share memory with the caller's tensors.
            keys, values = (x[:, :, :kept] for x in held[:2])
            self._gathered = held._replace(keys=keys, values=values)

    def crop(self, tokens_to_remove: int) -> None:
        """Leave pages, and crop this layer alone."""
        self.to_native().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Leave pages, and reorder this layer alone."""
        self.to_native().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Leave pages, and repeat the rows of this layer alone."""
        self.to_native().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Leave pages, and select rows of this layer alone."""
        self.to_native().batch_select_indices(indices)

    def reset(self) -> None:
        """Leave pages, and empty this layer alone."""
        self.to_native().reset()

    def __copy__(self) -> Any:
        return copy(self.to_native())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.to_native(), memo)

    def offload(self) -> None:
        """Do nothing: pages are offloaded by the cache's policies."""

    def prefetch(self) -> None:
        """Do nothing: pages are prefetched by the cache's policies."""


class PagedHybridLayer(PagedLayer, LinearAttentionLayer):  # type: ignore[misc]
    """Layer with attention in pages, and a recurrent state as in transformers."""

    states = tuple(vars(LinearAttentionLayer()))
    is_croppable = LinearAttentionLayer.is_croppable
    lazy_initialization = LinearAttentionLayer.lazy_initialization

    def __init__(self, *given: Any) -> None:
        PagedLayer.__init__(self, *given)
        LinearAttentionLayer.__init__(self, self.spec.arguments.get("number_of_states", 1))


def indexer_keys(layer: Any) -> torch.Tensor | None:
    """Return the keys `[B, Hk, S, D]` of a native layer's indexer; None if it has none."""
    keys = getattr(layer, "idx_keys", None)
    if keys is None and (found := getattr(layer, "indexer_keys", None)) is not None:
        keys = found.unsqueeze(1)
    return keys


def _grow(native: Any, keys: torch.Tensor) -> Any:
    """Add keys `[B, Hk, T, D]` to the indexer of a native layer; return what the layer returns."""
    grow = getattr(native, "update_index", None)
    return native.update_indexer(keys[:, 0]) if grow is None else grow(keys)


class PagedIndexedLayer(PagedLayer):
    """Layer with the keys of a sparse indexer beside its attention, in pages of their own.

    Attributes:
        indexer: Layer of the indexer's keys, which have no values.
        indexer_position_ids: Positions of all columns if the native layer keeps them, else None.
    """

    states = (_POSITIONS,)
    indexer: PagedLayer
    indexer_position_ids: torch.Tensor | None = None

    @torch.compiler.disable
    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Write new keys `[B, T, D]` or `[B, Hk, T, D]` into pages; return those of all columns."""
        keys = states if states.dim() == 4 else states.unsqueeze(1)
        if not self.indexer.extend(keys, keys[..., :0]):
            return _grow(self.to_native(), keys)  # type: ignore[no-any-return]
        found = keys if self.rows.base == 0 else self.indexer.dense()[0]
        return found if found.dim() == states.dim() else found[:, 0]

    update_index = update_indexer

    @staticmethod
    def _indexed_as(name: str) -> property:
        """Make the property of the indexer's keys, see `PagedLayer._shown_as`."""

        def show(layer: PagedIndexedLayer) -> torch.Tensor | None:
            if layer.rows.kv.inherited:
                return getattr(layer.to_native(), name)  # type: ignore[no-any-return]
            keys = layer.indexer.keys
            return keys if keys is None or name == "idx_keys" else keys[:, 0]

        def put(layer: PagedIndexedLayer, given: Any) -> None:
            setattr(layer.to_native(), name, given)

        return property(show, put, doc="The indexer's keys, as of a native layer.")

    indexer_keys, idx_keys = _indexed_as("indexer_keys"), _indexed_as("idx_keys")

    def become_native(self) -> None:
        """Turn into a native layer with the same content, in place."""
        indexer, positions = self.indexer, self.indexer_position_ids
        held, seen = indexer._gathered, indexer.seen
        super().become_native()
        if seen:
            _grow(self, indexer.gather(seen)[0] if held is None else held.last(seen).keys)
        self.indexer_position_ids = positions

    def change_positions(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Apply an operation of the native layer to the positions, if there are any."""
        if self.indexer_position_ids is not None:
            native = self.spec.make()
            native.indexer_position_ids = self.indexer_position_ids
            getattr(native, name)(*arguments)
            self.indexer_position_ids = native.indexer_position_ids


class PagedCompressedLayer(PagedLayer):
    """Layer with a window in pages, and with what it compresses of all tokens as its state.

    Attributes:
        compressor: Native layer without keys, which holds the compressed entries and the tokens
            of the block under way.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.compressor = self.spec.make()
        held = vars(self.compressor).items()
        self.states = tuple(name for name, value in held if isinstance(value, dict))

    def __getattr__(self, name: str) -> Any:
        if "compressor" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.compressor, name)

    def become_native(self) -> None:
        """Turn into a native layer with the same content, in place."""
        compressor, states = self.compressor, self.states
        super().become_native()
        for name in states:
            setattr(self, name, getattr(compressor, name))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    if a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# States of layers as named tensors and numbers, one row at a time, and back.
#
# A state cannot be cut: it can be continued only where it was taken. States are taken when a cache
# is released and at intervals of tokens, and put into fresh native layers when a prompt begins with
# exactly the tokens that a state was taken after.

PLAIN = (bool, int, float, str)
_MAKER = "transformers"
"""Name of the version in a state: other versions may have other states."""


class Recurrent:
    """Layers of one cache with states; refers to its rows and layers, but never to the cache.

    Args:
        plan: All layers.
        rows: The sequences.
        layers: Layers of the cache.
    """

    def __init__(self, plan: ModelPlan, rows: Rows, layers: Sequence[Any]) -> None:
        self.plan, self.rows = plan, rows
        self.layers = {
            index: layer for index, layer in enumerate(layers) if plan.specs[index].stateful
        }
        self._saved = rows.base
        self._marks: list[tuple[weakref.ref[torch.Tensor], int]] = []
        if self.layers:
            self.mark()

    def __bool__(self) -> bool:
        return bool(self.layers)

    def mark(self) -> None:
        """Record the current states as made by the model: later writes count as edits."""
        self._marks = [(weakref.ref(state), version_of(state)) for state in self._tensors()]

    def edited(self) -> bool:
        """Return whether a state was replaced, or written to as counted by torch, since `mark`."""
        now = self._tensors()
        return len(now) != len(self._marks) or any(
            known() is not state or version_of(state) != version
            for state, (known, version) in zip(now, self._marks, strict=True)
        )

    def _tensors(self) -> list[torch.Tensor]:
        return [value for _, value in self._items() if isinstance(value, torch.Tensor)]

    def _items(self) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of the layers' states under the names that `restore` reads."""
        for index, layer in self.layers.items():
            for name in layer.states if isinstance(layer, PagedLayer) else vars(layer):
                if name == "record_past":  # an option of one call, not of its tokens
                    continue
                value = getattr(layer, name)
                if isinstance(value, dict):
                    yield from ((f"{index}.{name}.{part}", item) for part, item in value.items())
                else:
                    yield f"{index}.{name}", value

    def _convolutions(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the recorded inputs of convolutions, and the last columns that these read."""
        for layer in self.layers.values():
            sizes = getattr(layer, "conv_kernel_size", {})  # since 5.2x
            for part, kept in getattr(layer, "conv_states", {}).items():
                if kept is not None and sizes.get(part) is not None:
                    yield kept, int(sizes[part])

    def save(self, every: int = 1) -> None:
        """Save the state of every row after exactly its tokens, if they are known.

        While a row is suspended no state is saved: its pages cannot be published.

        Args:
            every: Least number of new columns since the last save.
        """
        rows = self.rows
        if not self or (every > 1 and rows.base - self._saved < every):
            return
        if rows.step is not None or rows.blind or rows.kv.closed or self._saved == rows.base:
            return
        if any(seq.suspended is not None for seq in rows.seqs):
            return
        if self.edited():
            rows.disable_publishing()
            return
        if any(kept.shape[-1] < size for kept, size in self._convolutions()):
            return  # a recorded past is not padded
        rows.flush()
        self._saved = rows.base
        for row, (seq, pad) in enumerate(rows.padded):
            if not rows.blind and not pad and not seq.closed and rows.trusted(rows):
                rows.kv.save_state(seq, self.state_of(row), replaces=True)

    def state_of(self, row: int) -> dict[str, Any]:
        """Return the state of a row."""
        values: dict[str, Any] = {_MAKER: transformers.__version__}
        ends = {id(kept): kept[..., -size:] for kept, size in self._convolutions()}
        for name, value in self._items():
            value = ends.get(id(value), value)  # the columns of a recorded past that are needed
            if isinstance(value, torch.Tensor):
                values[name] = value.narrow(_row_dim(name), row, 1).detach().cpu()
            elif isinstance(value, PLAIN):
                values[name] = value
        return values

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Put one state per row into fresh layers; return False if the states do not fit."""
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
                value = torch.cat(rows, _row_dim(name)).to(device)
                if not _row_dim(name):
                    layer.device, layer.dtype = device, value.dtype
            elif any(state[name] != value for state in states):
                return False
            attribute, _, part = key.partition(".")
            if part:
                getattr(layer, attribute)[int(part) if part.isdigit() else part] = value
            else:
                setattr(layer, attribute, value)
        self.mark()
        return True


def _row_dim(name: str) -> int:
    return int(name.endswith(_POSITIONS))


def readable(state: Mapping[str, Any]) -> bool:
    """Return whether a state was taken by this version of transformers."""
    return state.get(_MAKER) == transformers.__version__


class Release:
    """Release of a cache's sequences, once: when called, or when the cache is collected.

    States and tails are saved, pages released. As a finalizer it runs at any moment and in any
    thread, so all work waits until the KV lock is free.

    Args:
        rows: The cache's rows; they may not refer to the cache.
        recurrent: Its recurrent layers.
        door: The attached model that it serves, or None.
        key: Key of the cache in the door.
    """

    __slots__ = ("_door", "_key", "_recurrent", "_rows")

    def __init__(self, rows: Rows, recurrent: Recurrent, door: Any, key: int) -> None:
        self._recurrent, self._door, self._key = recurrent, door, key
        self._rows: Rows | None = rows

    @interrupts.unbroken
    def __call__(self) -> None:
        """Release the sequences now, or as soon as the KV lock is free."""
        rows, self._rows = self._rows, None
        if rows is not None and not rows.kv.inherited:  # in a fork, the pages are the parent's
            rows.kv.lock.defer(partial(self._work, rows))

    @interrupts.unbroken
    def __del__(self) -> None:
        if hasattr(self, "_rows") and not sys.is_finalizing():
            self()

    def _work(self, rows: Rows) -> None:
        try:
            if self._door is not None:
                self._door.left(self._key)
            if not rows.kv.closed:
                rows.abandon()
                self._recurrent.save()
                rows.flush()  # the answer's last tokens
        finally:
            close_all(rows.seqs)


SNAPSHOT_PAGES = 16
"""Interval of saves of recurrent states, in pages."""


class PagedCache(DynamicCache):  # type: ignore[misc]
    """Hugging Face cache in pages for one call of `generate`, one sequence per row.

    A subclass of `DynamicCache` because models and `EncoderDecoderCache` require one. A fresh
    native cache becomes one in place (`take_over`), so that its owner holds the same object.
    Operations that pages cannot represent, above all writes to its keys, turn it back in place
    (`give_up`). When it is released its pages are freed; published ones stay cached.

    Attributes:
        rows: Its sequences.
        plan: Its layers.
        recurrent: Its recurrent layers, if there are any.
        door: The attached model that it serves, or None.
        care: `tenant`, `session`, `lease` and `retain` of its requests, as far as they are set.
        options: Arguments beside token ids that its first forward was given.
        fresh: Whether it looks empty to its owner until its first forward is over.
        skips: Whether a forward has skipped layers, which have fewer tokens since.
        audits: Recomputes restored pages after the first forward, or None.
        drawn: States of the random generators when its forward began; None if none is used.
        form: Form of its last forward, or None; see `inputs.ForwardCall`.
        decoding: Ids and positions of a decode step under way that may be captured, or None.
        answer: Step computed by a CUDA graph and its output, until the model's forward runs.
        close: Releases it now instead of with its last reference.
    """

    def __init__(self, rows: Rows, plan: ModelPlan, door: Any = None, *, owns: bool = True) -> None:
        me = weakref.ref(self)
        layers = [_layer(rows, plan, index, me) for index in range(len(plan.specs))]
        Cache.__init__(self, layers=list(layers))
        native = set(vars(self))
        self._made = layers
        self._absent = [layers[i] for i, spec in enumerate(plan.specs) if spec.absent]
        self.rows, self.plan, self.door = rows, plan, door
        self.care: Mapping[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.audits: Any = None  # a `restore.Nested` that recomputes sampled pages
        self.form: Any = None
        self.decoding: tuple[torch.Tensor, torch.Tensor] | None = None
        self.answer: tuple[Any, Any] | None = None
        self.drawn: tuple[bytes, ...] | None = None
        self.fresh = self.skips = False
        self.recurrent = Recurrent(plan, rows, layers)
        self.close: Callable[[], object] = int  # does nothing if the sequences are not its own
        if owns:
            self.close = Release(rows, self.recurrent, door, id(self))
        self._own = {"_own", *vars(self)} - native  # attributes that a native cache lacks

    @classmethod
    def take_over(cls, cache: Any, rows: Rows, plan: ModelPlan, door: Any) -> PagedCache:
        """Turn a fresh native cache into a paged one, in place."""
        records = any(getattr(layer, "record_past", False) for layer in cache.layers)
        _become(cache, cls, {})
        cls.__init__(cache, rows, plan, door)
        if records:  # drafts will be taken back
            cache.activate_past_recording()
        return cache  # type: ignore[no-any-return]

    def load_states(self, states: Sequence[Mapping[str, Any]] | None) -> None:
        """Put one state per row into fresh recurrent layers, if there are any.

        Raises:
            StateError: The states do not fit the layers.
        """
        if states is not None and not self.recurrent.load_states(states):
            raise StateError(
                "a saved state does not fit the model", "Call kv.invalidate(), then try again"
            )

    @property
    def paged(self) -> list[PagedLayer]:
        """Layers of the cache that are in pages, and their indexers."""
        return [one for one in (*self._made, *self.indexers) if isinstance(one, PagedLayer)]

    @property
    def indexers(self) -> list[PagedLayer]:
        """Indexers of layers in pages."""
        return [layer.indexer for layer in self._made if isinstance(layer, PagedIndexedLayer)]

    @property
    def reused(self) -> int:
        """Tokens that were cached when it was made, over all rows."""
        return sum(seq.reused for seq in self.rows.seqs)

    def stays(self, *, computed: bool = False) -> bool:
        """Return whether the cache stays paged; turn it into a native one if it was changed.

        Called before every operation. The owner may have written to its keys and values, or
        replaced layers; a layer that had no keys when the model was probed, and so has no pages,
        may have got some; or this process was forked, and its pages are the parent's.

        Args:
            computed: Whether a forward has just finished, which writes to recurrent states itself.
        """
        if (
            self.rows.kv.lock.inherited
            or self.layers != self._made
            or (self._absent and any(layer.get_seq_length() for layer in self._absent))
            or (self.rows.taken and any(layer.edited() for layer in self.paged))
        ):
            self.give_up(private=True)
            return False
        if not computed and self.recurrent.layers and self.recurrent.edited():
            self.rows.disable_publishing()
        return True

    def give_up(self, *, private: bool = False) -> None:
        """Turn the cache and its layers into a native `DynamicCache` of the same content, in place.

        Args:
            private: Publish no further pages or states of recurrent layers.

        Raises:
            StateError: Pages of a restore failed to load.
        """
        with exclusive(self):
            if isinstance(self, PagedCache):  # else another thread was here first
                self._give_up(private=private)

    def _give_up(self, *, private: bool) -> None:
        rows = self.rows
        rows.arrive()
        if private:
            rows.disable_publishing()
        for layer in self._made:
            if isinstance(layer, PagedLayer):
                layer.become_native()
        for layer in self.layers:
            if isinstance(layer, PagedLayer):  # a layer of another cache, used by both from now on
                layer.to_native()
        close, own = self.close, self._own
        kept = {name: value for name, value in vars(self).items() if name not in own}
        _become(self, DynamicCache, kept | {"left_pages": True})  # copies inherit the mark
        if not rows.kv.inherited:
            rows.abandon()
        close()

    def finish(self) -> None:
        """Commit a finished forward of the model, and save recurrent states at stops and intervals.

        Raises:
            StateError: Layers that the forward left out failed to load; the cache is as before it.
        """
        if not self.stays(computed=True):
            return
        try:
            if self.rows.step is not None and self.rows.updated != self.rows.layers:
                self._skip()
            self.rows.finish()
        except StateError:
            self.fail()
            refuse_lost(self.rows)
            raise
        if self.recurrent.layers:
            self.recurrent.mark()
            stops = any(self.rows.base in seq.stops for seq in self.rows.seqs)
            self.recurrent.save(1 if stops else SNAPSHOT_PAGES * self.rows.kv.page_size)

    def _skip(self) -> None:
        """Record which layers a forward skipped, and publish no further pages."""
        self.skips = True
        self.rows.disable_publishing()
        for layer in self.paged:
            if not layer.in_step and layer.skipped is None:
                layer.skipped = self.rows.base

    def fail(self) -> None:
        """Roll back a failed forward; empty the cache if it was the first, or states changed."""
        base, rows, self.audits = self.rows.base, self.rows, None
        stateful, anew = bool(self.recurrent), self.fresh and not self.rows.forwards
        if anew or (stateful and rows.step is not None):
            # Another prompt may follow, or states of some layers may be ahead of others.
            rows.disable_publishing()
        if rows.step is not None:
            self.follow()
        rows.abandon()
        if anew or (stateful and rows.base < base):
            self.empty()

    def follow(self, kept: int | None = None) -> None:
        """Update every layer after a change of the rows, see `PagedLayer.follow`.

        Args:
            kept: Columns that are left, if the rows were only cut.
        """
        for layer in self.paged:
            layer.follow(kept)

    def thin(self) -> None:
        """Remove tokens from the rows by `thinning`, between two forwards; only once."""
        thinning, self.rows.thinning = self.rows.thinning, None
        thinning.apply(self)
        self.follow()

    # ---- operations of generation

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns in the cache, including padding and reused ones."""
        if self.layers != self._made and not self.stays():
            return self.get_seq_length(layer_idx)
        if self.rows.step is None:
            return self.rows.base
        length: int = super().get_seq_length(layer_idx)
        return length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of all rows.

        Args:
            tokens_to_remove: Minus their number; a positive number is the length that remains.

        Raises:
            StateError: The cut reaches behind a sliding window.
        """
        rows, tokens = self.rows, int(tokens_to_remove)  # assisted generation passes a tensor
        self._change("crop", (tokens,), lambda: rows.crop(removed(tokens, rows.told)), cut=True)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row `beam_idx[i]` row i: pages are shared, not copied."""
        self._select("reorder_cache", beam_idx, beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows with these indices only."""
        every = torch.arange(len(self.rows.seqs), device=indices.device)
        self._select("batch_select_indices", indices, every[indices].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times in place."""
        every = [row for row in range(len(self.rows.seqs)) for _ in range(repeats)]
        self._select("batch_repeat_interleave", repeats, every)

    def expand(self, rows: int) -> None:
        """Repeat each row if `rows` is a multiple, as `generate` does with its inputs for beams."""
        have = len(self.rows.seqs)
        if have and rows % have == 0:
            self.reorder_cache(torch.arange(have, device="cpu").repeat_interleave(rows // have))

    def _select(self, name: str, given: Any, indices: list[int]) -> None:
        """Make row `indices[i]` row i by an operation of a native cache."""
        rows = self.rows
        if self.recurrent:  # native layers with states have no other operation on their rows
            name, given = "reorder_cache", torch.tensor(indices, device="cpu")
        self._change(name, (given,), lambda: rows.select(indices))

    def reset(self) -> None:
        """Remove all tokens, and publish no further pages."""
        rows = self.rows

        def change() -> None:
            rows.crop(rows.told)
            rows.disable_publishing()

        self._change("reset", (), change)

    def _change(
        self, name: str, given: tuple[Any, ...], change: Callable[[], None], *, cut: bool = False
    ) -> None:
        """Apply an operation of a native cache to the rows, and to states that layers hold.

        Args:
            name: Name of the operation.
            given: Its arguments.
            change: Applies it to the rows.
            cut: Whether it only cuts all rows.
        """
        with exclusive(self):
            self.rows.alive()
            stays = self.stays()
            apart = stays and self.plan.compressed and name not in ("reorder_cache", "reset")
            if apart or (stays and cut and self.skips):  # each layer changes what it keeps itself
                self.give_up(private=True)
                stays = False
            if not stays:
                getattr(self, name)(*given)
                return
            self._each(name, *given)
            change()
            self.follow(self.rows.base if cut else None)
            self.recurrent.mark()

    def _each(self, name: str, *arguments: Any) -> None:
        """Apply an operation to native layers and to states that paged layers hold."""
        for layer in self.layers:
            if isinstance(layer, PagedHybridLayer):
                operation = getattr(LinearAttentionLayer, name, None)
                if operation is not None:
                    operation(layer, *arguments)
            elif isinstance(layer, PagedIndexedLayer):
                layer.change_positions(name, arguments)
            elif isinstance(layer, PagedCompressedLayer):
                getattr(layer.compressor, name)(*arguments)
            elif not isinstance(layer, PagedLayer) and hasattr(layer, name):
                getattr(layer, name)(*arguments)

    def empty(self) -> None:
        """Remove all tokens; the next ones begin a prompt again."""
        if self.recurrent:
            self._each("reset")
        self.rows.crop(self.rows.told)
        self.follow()
        self.recurrent.mark()

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, whether it has a recurrent state and no attention."""
        found: list[bool] = super().is_linear
        if not self.plan.stateful:
            return found
        return [
            linear and not isinstance(layer, PagedHybridLayer)
            for linear, layer in zip(found, self.layers, strict=True)
        ]

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """Return an independent cache; pages are shared until one of the two writes."""
        self.rows.alive()
        if not self.stays():
            return deepcopy(self, memo)  # type: ignore[return-value]
        rows = self.rows.fork()
        twin = PagedCache(rows, self.plan, self.door)
        memo[id(self)] = twin
        own = ("layers", "_made", "_absent", "rows", "recurrent", "close")
        twin.__dict__.update({k: v for k, v in vars(self).items() if k not in own})
        olds, news = ([*one.layers, *one.indexers] for one in (self, twin))
        for old, new in zip(olds, news, strict=True):
            kept = {k: _clone(v) for k, v in vars(old).items() if k not in PAGED_STATE}
            new.__dict__.update(kept)
        twin.recurrent.mark()
        if self.door is not None:
            self.door.hold(twin)
        return twin

    def __copy__(self) -> PagedCache:
        """Return a deep copy: two caches cannot advance the same rows."""
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the cache as a `DynamicCache` of the same content."""
        twin: Any = self.__deepcopy__({})
        if isinstance(twin, PagedCache):
            twin.give_up(private=True)
        return copy, (twin,)


def _become(held: Any, cls: type, attributes: Mapping[str, Any]) -> None:
    """Turn an object that callers hold into one of another class; nothing else of it changes."""
    held.__dict__.clear()
    held.__class__ = cls
    held.__dict__.update(attributes)


def _layer(rows: Rows, plan: ModelPlan, index: int, cache: weakref.ref[PagedCache]) -> Any:
    spec, placed = plan.specs[index], plan.placed.get(index)
    if placed is None:
        return spec.make()
    if index not in plan.indexers:
        kind = PagedHybridLayer if spec.hybrid else PagedLayer
        return (PagedCompressedLayer if spec.compressed else kind)(rows, placed, spec, cache)
    layer = PagedIndexedLayer(rows, placed, spec, cache)
    layer.indexer = PagedLayer(rows, plan.indexers[index], spec, cache)
    return layer


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    return deepcopy(value) if isinstance(value, CacheLayerMixin) else value
