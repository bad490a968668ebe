"""Which layers of a model can lie in pages, learned from its configuration and one probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from flowkv.core.errors import GeometryError, UnsupportedModelError
from flowkv.core.geometry import Geometry, LayerGroup
from flowkv.hooks.huggingface.versions import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    layer_types,
    native_layer,
)
from flowkv.kernels.dispatch import choose

Kind = Literal["full", "sliding", "chunked", "recurrent", "none"]
_KINDS: dict[str, tuple[Kind, bool]] = {
    "full_attention": ("full", False),
    "sliding_attention": ("sliding", False),
    "chunked_attention": ("chunked", False),
    "hybrid": ("full", True),
    "hybrid_sliding": ("sliding", True),
    "none": ("none", False),
}


class LayerSpec:
    """What one decoder layer keeps, as transformers' configuration says.

    Attributes:
        kind: Kind of attention; "recurrent" for a state only, "none" for nothing.
        hybrid: A recurrent state lies beside the attention.
        arguments: Arguments of the native cache layer.

    Args:
        native: Class of the native cache layer.
    """

    __slots__ = ("_native", "arguments", "hybrid", "kind")

    def __init__(
        self, kind: Kind, native: Any, arguments: dict[str, Any], *, hybrid: bool = False
    ) -> None:
        self.kind, self.hybrid, self.arguments, self._native = kind, hybrid, arguments, native

    @property
    def window(self) -> int | None:
        """Tokens that a sliding or chunked layer keeps; None for the others."""
        windowed = self.kind in ("sliding", "chunked")
        return int(self.arguments["sliding_window"]) if windowed else None

    @property
    def in_pages(self) -> bool:
        """Whether it has keys and values."""
        return self.kind in ("full", "sliding", "chunked")

    @property
    def stateful(self) -> bool:
        """Whether it has a recurrent state."""
        return self.hybrid or self.kind == "recurrent"

    def make(self) -> Any:
        """A fresh native cache layer."""
        return self._native(**self.arguments)


def read_layer(name: str, arguments: dict[str, Any]) -> LayerSpec:
    """What a layer of a type that the configuration names keeps.

    Raises:
        UnsupportedModelError: FlowKV does not know it.
    """
    native = native_layer(name)
    if native is None:
        raise UnsupportedModelError(
            f"a layer of type {name!r} has no known cache", "Use the model without FlowKV"
        )
    if name in _KINDS:
        kind, hybrid = _KINDS[name]
    elif issubclass(native, LinearAttentionCacheLayerMixin):
        kind, hybrid = "recurrent", False
    else:
        raise UnsupportedModelError(
            f"layers of type {name!r} keep more than keys and values",
            "Use the model without FlowKV",
        )
    return LayerSpec(kind, native, arguments, hybrid=hybrid)


class PlacedLayer:
    """Where one layer's pages are.

    Attributes:
        index: The model's layer index.
        group: Its layer group.
        shape: (Hk, D, Dv, dtype, device) of its keys and values.
        in_pages: FlowKV's attention reads it in pages; False once the model was seen to compute
            with keys and values itself. Shared by all caches of a model.
        was_read: FlowKV's attention has read it in pages.
        contradicted: The model's mask shows another window than its cache keeps.
        backend: Which kernels serve it.
    """

    __slots__ = ("backend", "contradicted", "group", "in_pages", "index", "shape", "was_read")

    def __init__(self, index: int, group: int, spec: LayerGroup, *, in_pages: bool = True) -> None:
        self.index, self.group, self.in_pages = index, group, in_pages
        self.was_read = self.contradicted = False
        self.shape = (
            spec.kv_heads,
            spec.head_dim,
            spec.value_dim,
            getattr(torch, spec.dtype),
            torch.device(spec.device),
        )
        dtype, device = self.shape[3:]
        self.backend = choose(device, dtype, page_dtype=spec.dtype)


class ModelPlan:
    """All layers of a model, and the geometry of those in pages.

    Attributes:
        specs: One per layer.
        geometry: What the cache is bound to.
        placed: Layers in pages, by their index.
        devices: Devices of layers with a recurrent state, by their index.
        count: Layers that the configuration asked for.
    """

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
        self.placed = {
            index: PlacedLayer(index, g, group, in_pages=in_pages)
            for g, group in enumerate(geometry.groups)
            for index in group.layers
        }

    @property
    def stateful(self) -> bool:
        """Whether some layers are recurrent: prefixes are reusable only where states were saved."""
        return any(spec.stateful for spec in self.specs)

    def matches(self, layers: Sequence[Any], count: int) -> bool:
        """Whether a native cache, made by the configuration of the moment, has these layers.

        Args:
            layers: The layers of the cache; none if it makes them as they come.
            count: Layers that the configuration asks for.
        """
        if not layers:
            return count == self.count
        return len(layers) == len(self.specs) and all(
            getattr(layer, "sliding_window", None) == spec.window
            for index, (layer, spec) in enumerate(zip(layers, self.specs, strict=True))
            if index in self.placed
        )


def configured_layers(config: Any) -> int:
    """Layers that a configuration asks for at this moment."""
    return int(getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0) or 0)


def read_layers(config: Any) -> list[LayerSpec]:
    """What each decoder layer keeps.

    Raises:
        UnsupportedModelError: A layer keeps something that FlowKV does not know, or none has keys.
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


def place_layers(
    specs: Sequence[LayerSpec], layers: Sequence[Any], page_size: int, *, in_pages: bool
) -> ModelPlan:
    """Groups layers by kind, shape and device, as found in a native cache after a probe.

    Args:
        specs: What `read_layers` said.
        layers: The layers of the native cache, one token in each.
        page_size: Tokens per page.
        in_pages: Layers may be read in pages.

    Raises:
        UnsupportedModelError: Keys and values cannot be paged.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    devices: dict[int, torch.device] = {}
    seen = list(specs)
    for index, (spec, layer) in enumerate(zip(specs, layers, strict=True)):
        if spec.stateful:
            states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
            for state in states:
                if state is not None:
                    devices[index] = state.device
        if not spec.in_pages:
            continue
        keys, values = layer.keys, layer.values
        if keys is None or keys.dim() != 4:  # it reads another layer's keys, or has none today
            seen[index] = read_layer("none", {})
            continue
        shape = (keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)
        groups.setdefault((spec.kind, spec.window, *shape), []).append(index)
    if not groups:
        raise UnsupportedModelError(
            "the model put no keys and values into its cache", "Use the model without FlowKV"
        )
    try:
        geometry = Geometry(
            groups=tuple(_group(key, found) for key, found in groups.items()), page_size=page_size
        )
    except GeometryError as error:
        raise UnsupportedModelError(error.problem, error.remedy) from error
    return ModelPlan(seen, geometry, devices, in_pages=in_pages)


def _group(key: tuple[Any, ...], layers: list[int]) -> LayerGroup:
    kind, window, heads, dim, dim_v, dtype, device = key
    return LayerGroup(
        layers=tuple(layers),
        kv_heads=heads,
        head_dim=dim,
        value_dim=dim_v,
        dtype=str(dtype).removeprefix("torch."),
        kind=kind,
        window=window,
        device=str(device),
    )


def plan_geometry(geometry: Geometry) -> ModelPlan:
    """A plan from a geometry alone, for caches of models that are not attached."""
    count = 1 + max(layer for group in geometry.groups for layer in group.layers)
    specs = [LayerSpec("full", DynamicLayer, {}) for _ in range(count)]
    for group in geometry.groups:
        kind: Kind = "full" if group.kind == "latent" else group.kind
        for layer in group.layers:
            specs[layer] = (
                LayerSpec(kind, DynamicLayer, {})
                if group.window is None
                else LayerSpec(kind, DynamicSlidingWindowLayer, {"sliding_window": group.window})
            )
    return ModelPlan(specs, geometry, in_pages=False)
