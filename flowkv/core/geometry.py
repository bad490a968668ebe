"""Geometry of a model's cache: groups of layers with one kind, one K/V shape and one device."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import msgspec

from flowkv.core.errors import ConfigError, GeometryError

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
GroupKind = Literal["full", "sliding", "chunked", "latent", "keys"]
INDEXERS = 1 << 20
"""Number of the first layer's indexer, which is paged as a layer of its own."""


class LayerGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers that share a kind of attention, one K/V geometry and one device.

    Attributes:
        layers: The model's own layer indices, ascending; the indexer of layer i is `INDEXERS + i`.
        kv_heads: Key/value heads Hk of each layer.
        head_dim: Key dimension D of a head.
        value_dim: Value dimension Dv of a head; MLA latents and some models differ from `head_dim`.
        dtype: Name of the torch dtype of K and V ("float32", "bfloat16", ...).
        kind: "full", "sliding" (last `window` tokens), "chunked", "latent" (MLA: one head, a
            token's value is the first `value_dim` elements of its key and is not stored), or "keys"
            (no values, such as the keys of a sparse indexer: always raw, written and gathered).
        window: Tokens a query sees, itself included; None for all.
        device: Device of the layers ("cpu", "cuda:0"); not part of a page's identity.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "float32"
    kind: GroupKind = "full"
    window: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        # Groups are dictionary keys; a list, which JSON and users give, could not be hashed.
        msgspec.structs.force_setattr(self, "layers", tuple(self.layers))
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise GeometryError(
                f"layers {self.layers} are not ascending and unique",
                "List every layer of the group once, in order",
            )
        if min(self.kv_heads, self.head_dim, self.value_dim + (self.kind == "keys")) < 1:
            raise GeometryError(
                f"kv_heads={self.kv_heads}, head_dim={self.head_dim}, value_dim={self.value_dim}",
                "Heads and head dimensions must be at least 1",
            )
        if self.dtype not in ITEMSIZE:
            raise GeometryError(
                f"dtype {self.dtype!r} cannot be paged", f"Use one of {', '.join(sorted(ITEMSIZE))}"
            )
        if (self.kind in ("sliding", "chunked")) != (self.window is not None):
            raise GeometryError(
                f"a {self.kind!r} group has window={self.window}",
                "Give a window to sliding and chunked groups, and to no others",
            )
        if self.kind == "keys" and self.value_dim:
            raise GeometryError(f"a 'keys' group has value_dim={self.value_dim}", "Set it to 0")
        if self.kind == "latent" and (self.kv_heads != 1 or self.value_dim > self.head_dim):
            raise GeometryError(
                f"a latent group has kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
                f"value_dim={self.value_dim}",
                "A latent is one head, whose first value_dim of head_dim elements are its value",
            )
        if self.window is not None and self.window < 1:
            raise GeometryError(f"window={self.window}", "A window is at least one token")

    @property
    def token_bytes(self) -> int:
        """Return the bytes of K and V of one token over all layers of the group, unencoded."""
        value_dim = 0 if self.kind == "latent" else self.value_dim  # part of the key
        width = self.kv_heads * (self.head_dim + value_dim)
        return len(self.layers) * width * ITEMSIZE[self.dtype]


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All layer groups of a model and the page size they share.

    Attributes:
        groups: The layer groups; a layer is in at most one.
        page_size: Tokens per page P, 8 to 256.
    """

    groups: tuple[LayerGroup, ...]
    page_size: int = 64

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "groups", tuple(self.groups))
        if not 8 <= self.page_size <= 256 or self.page_size % 8:
            raise GeometryError(
                f"page_size={self.page_size}", "Use a multiple of 8 between 8 and 256"
            )
        layers = [layer for group in self.groups for layer in group.layers]
        if not layers or len(layers) != len(set(layers)):
            raise GeometryError("a layer is in no group or in two", "Put each layer in one group")

    @classmethod
    def uniform(
        cls,
        *,
        layers: int | Sequence[int],
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: str = "float32",
        window: int | None = None,
        page_size: int = 64,
        device: str = "cpu",
    ) -> Geometry:
        """Return the geometry of a model with attention layers that are all alike.

        Args:
            layers: Number of layers, or their indices.
            kv_heads: Key/value heads of each layer.
            head_dim: Key dimension of a head.
            value_dim: Value dimension of a head; default `head_dim`.
            dtype: Name of the torch dtype.
            window: Sliding window in tokens; default none.
            page_size: Tokens per page.
            device: Device of the layers.
        """
        index = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        group = LayerGroup(
            layers=index,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim,
            dtype=dtype,
            kind="full" if window is None else "sliding",
            window=window,
            device=device,
        )
        return cls(groups=(group,), page_size=page_size)

    def locate(self, layer: int) -> tuple[int, int]:
        """Return (group, position within the group) of a model layer.

        Raises:
            GeometryError: No group holds the layer.
        """
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise GeometryError(f"layer {layer} is in no group", "Add it to the geometry's groups")

    def fingerprint(self) -> bytes:
        """Return 32 bytes that depend on all that changes the bytes of a page, not on devices."""
        plain = [
            (g.kind, g.layers, g.kv_heads, g.head_dim, g.value_dim, g.dtype, g.window)
            for g in self.groups
        ]
        return hashlib.sha256(msgspec.json.encode(["geometry/1", self.page_size, plain])).digest()


# Byte layout of a page for each codec, defined here alone.

GRANULE_BYTES = 4096


class CodecSpec(NamedTuple):
    """Properties of a codec, which layouts, kernels, bounds and audits read.

    Attributes:
        k_bits: Bits of an element of K; 0 where it stays in its dtype.
        v_bits: Bits of an element of V, likewise.
        k_levels: Greatest q of K, which lies in -levels to levels; by channel in 0 to levels.
        v_levels: Greatest q of V, which lies in -levels to levels.
        drift: Distance of a token that comes from pages of this codec before it (`cache.audit`).
        by_channel: Whether K has a scale and an offset for each dim, not a scale for each token.
        rotates: Whether K is rotated before it is encoded.
    """

    k_bits: int
    v_bits: int
    k_levels: int
    v_levels: int
    drift: float
    by_channel: bool = False
    rotates: bool = False


SPECS = {
    "raw": CodecSpec(0, 0, 0, 0, 0.0),
    "kv8": CodecSpec(8, 8, 127, 127, 0.1),
    "k8v4": CodecSpec(8, 4, 127, 7, 0.5),
    "kv4c": CodecSpec(4, 4, 15, 7, 0.65, by_channel=True),
    "kv4h": CodecSpec(4, 4, 7, 7, 0.65, rotates=True),
}
CODECS = tuple(SPECS)
"""Every codec with a layout of its own."""
COLD = len(CODECS)
FIDELITIES = (*CODECS, "kvt")
"""Every codec, from exact to lossy: the index in this tuple is its (in)fidelity. Pages in kvt are
decoded to raw pages (`flowkv.kvt`)."""

CODEC_SHIFT = 28
GRANULE_MASK = (1 << CODEC_SHIFT) - 1

_SCALE_BYTES = 2


class PageLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Offsets and sizes, in bytes, of one page of one layer group in one codec.

    Attributes:
        codec: One of `CODECS`.
        layers: Layers of the group (not their model indices).
        kv_heads: Runs of a stripe.
        page_size: Tokens.
        head_dim: Key dimension D.
        value_dim: Value dimension Dv.
        dtype: dtype of an unencoded element.
        v_offset_bytes: Start of V within a run; K starts at 0.
        k_scale_offset_bytes: Start of the key scales within a run.
        v_scale_offset_bytes: Start of the value scales within a run.
        run_bytes: One head's K, V and scales.
        stripe_bytes: Bytes of a stripe without padding.
        stripe_stride_bytes: Distance between two stripes.
    """

    codec: str
    layers: int
    kv_heads: int
    page_size: int
    head_dim: int
    value_dim: int
    dtype: str
    v_offset_bytes: int
    k_scale_offset_bytes: int
    v_scale_offset_bytes: int
    run_bytes: int
    stripe_bytes: int
    stripe_stride_bytes: int

    @property
    def spec(self) -> CodecSpec:
        """Return the properties of the codec."""
        return SPECS[self.codec]

    @cached_property
    def page_bytes(self) -> int:
        """Return the bytes of a page, padding included."""
        return self.layers * self.stripe_stride_bytes

    @cached_property
    def granules(self) -> int:
        """Return the granules of a page."""
        return self.page_bytes // GRANULE_BYTES

    @cached_property
    def latent(self) -> bool:
        """Return whether a token's value is the first `value_dim` elements of its key (MLA)."""
        return self.v_offset_bytes == 0

    @cached_property
    def value_stride(self) -> int:
        """Return the elements from one token's value to the next one's, in a raw page."""
        return self.head_dim if self.latent else self.value_dim

    @cached_property
    def stored_value_dim(self) -> int:
        """Return the value elements stored beside each token's key: all, or none of latents."""
        return 0 if self.latent else self.value_dim

    def run_offset_bytes(self, layer: int, head: int) -> int:
        """Return the start of a head's run in the page; `layer` counts within the group."""
        return layer * self.stripe_stride_bytes + head * self.run_bytes

    def fingerprint(self) -> bytes:
        """Return 16 bytes that depend on the place and the meaning of every byte."""
        return hashlib.sha256(msgspec.json.encode(["layout/1", self])).digest()[:16]


def _pad(n_bytes: int, unit: int) -> int:
    return -(-n_bytes // unit) * unit


def page_id(granule: int, codec: str) -> int:
    """Return the id of a page that begins at `granule`."""
    return CODECS.index(codec) << CODEC_SHIFT | granule


def codec_of(page: int) -> str:
    """Return the codec of a page."""
    return CODECS[page >> CODEC_SHIFT]


@lru_cache(maxsize=256)
def page_layout(group: LayerGroup, page_size: int, codec: str = "raw") -> PageLayout:
    """Return the layout of one page of `group`.

    Raises:
        ConfigError: The codec is unknown, or needs a larger page or head or a smaller dtype.
    """
    if codec not in CODECS:
        raise ConfigError(f"codec {codec!r} is unknown", f"Use one of {', '.join(CODECS)}")
    tokens, dim, dim_v = page_size, group.head_dim, group.value_dim
    latent = group.kind in ("latent", "keys")
    if codec == "raw":
        item = ITEMSIZE[group.dtype]
        k, v, k_scales, v_scales = tokens * dim * item, tokens * dim_v * item, 0, 0
        v = 0 if latent else v
    else:
        if latent:
            raise ConfigError(
                f"codec {codec!r} of a latent group",
                "Use codec='raw': a latent is key and value in one, and codecs lay out the two "
                "differently; it is a compressed form of both already",
            )
        if group.dtype == "float64":
            raise ConfigError(
                f"codec {codec!r} of a float64 cache",
                "Use codec='raw': codecs compute in float32, which would lose precision",
            )
        spec = SPECS[codec]
        k_bits, v_bits = spec.k_bits, spec.v_bits
        if min(k_bits, v_bits) == 4 and (tokens < 64 or min(dim, dim_v) < 64):
            raise ConfigError(
                f"codec {codec!r} with page_size={tokens} and head_dim={min(dim, dim_v)}",
                "4-bit codecs need pages of at least 64 tokens and head dims of at least 64",
            )
        # Nibbles pair dim j with j + D/2 of a key, and token i with i + P/2 of a value.
        if (k_bits == 4 and dim % 2) or (v_bits == 4 and tokens % 2):
            raise ConfigError(
                f"codec {codec!r} with page_size={tokens} and head_dim={dim}",
                "4-bit codecs need even head dims and page sizes",
            )
        k, v = tokens * dim * k_bits // 8, tokens * dim_v * v_bits // 8
        k_scales = _SCALE_BYTES * (2 * dim if spec.by_channel else tokens)
        v_scales = _SCALE_BYTES * tokens
    v_offset = 0 if latent else _pad(k, 16)
    k_scale_offset = _pad(k, 16) + _pad(v, 16)
    v_scale_offset = k_scale_offset + _pad(k_scales, 16)
    run = v_scale_offset + _pad(v_scales, 16)
    stripe = run * group.kv_heads
    return PageLayout(
        codec=codec,
        layers=len(group.layers),
        kv_heads=group.kv_heads,
        page_size=tokens,
        head_dim=dim,
        value_dim=dim_v,
        dtype=group.dtype,
        v_offset_bytes=v_offset,
        k_scale_offset_bytes=k_scale_offset,
        v_scale_offset_bytes=v_scale_offset,
        run_bytes=run,
        stripe_bytes=stripe,
        stripe_stride_bytes=_pad(stripe, GRANULE_BYTES),
    )
