"""Where every byte of a page lies, for each codec. The one place that knows.

A page is layer-major: one *stripe* per layer, padded to 4 KiB so that a stripe can be read from a
disk on its own. A stripe holds one contiguous *run* per KV head: keys, values, then their scales.
The same bytes lie in the device pool and in a frame below it, so that moving a page is one copy.

    page   = stripe(layer 0) | stripe(layer 1) | ...                   each padded to GRANULE_BYTES
    stripe = run(head 0) | run(head 1) | ...
    run    = K | V | K scales | V scales                               each padded to 16 bytes

K is row-major [P, D]. V is [P, Dv] for `raw`, transposed [Dv, P] for the 8- and 4-bit codecs, whose
nibbles are split by halves (DESIGN D1). Latent groups have no V: it is the first Dv dims of K.
Pages are addressed by the number of the 4 KiB *granule* at which they begin, so one pool holds
pages of any size and codec.

A *page id*, as block tables and pools use it, is that number with the page's codec above it: one
int32 says where a page begins (within 1 TiB) and how it is encoded. Ids of raw pages are their
granules; -1 is no page.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.core.geometry import ITEMSIZE, LayerGroup

GRANULE_BYTES = 4096
CODECS = ("raw", "kv8", "k8v4", "kv4c", "kv4h")
"""Every codec with a layout, from exact to small: the index in this tuple is its (in)fidelity."""

CODEC_SHIFT = 28
GRANULE_MASK = (1 << CODEC_SHIFT) - 1

_BITS = {"kv8": (8, 8), "kv4c": (4, 4), "kv4h": (4, 4), "k8v4": (8, 4)}
_SCALE_BYTES = 2


class PageLayout(msgspec.Struct, frozen=True, kw_only=True):
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
        stripe_bytes: Bytes of a stripe that mean something.
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
    def page_bytes(self) -> int:
        """Bytes of a page, padding included."""
        return self.layers * self.stripe_stride_bytes

    @property
    def granules(self) -> int:
        """Granules of a page."""
        return self.page_bytes // GRANULE_BYTES

    @property
    def latent(self) -> bool:
        """Whether a token's value is the first `value_dim` elements of its key (MLA)."""
        return self.v_offset_bytes == 0

    @property
    def value_stride(self) -> int:
        """Elements from one token's value to the next one's, in a raw page."""
        return self.head_dim if self.latent else self.value_dim

    @property
    def stored_value_dim(self) -> int:
        """Elements of a token's value that are kept beside its key: all, or none of latents."""
        return 0 if self.latent else self.value_dim

    def run_offset_bytes(self, layer: int, head: int) -> int:
        """Start of a head's run from the start of the page; `layer` counts within the group."""
        return layer * self.stripe_stride_bytes + head * self.run_bytes

    def fingerprint(self) -> bytes:
        """16 bytes that change with anything that changes where a byte lies or what it means."""
        return hashlib.sha256(msgspec.json.encode(["layout/1", self])).digest()[:16]


def _pad(n_bytes: int, unit: int) -> int:
    return -(-n_bytes // unit) * unit


def page_id(granule: int, codec: str) -> int:
    """The id of a page that begins at `granule`."""
    return CODECS.index(codec) << CODEC_SHIFT | granule


def granule_of(page: int) -> int:
    """The granule at which a page begins."""
    return page & GRANULE_MASK


def codec_of(page: int) -> str:
    """How a page is encoded."""
    return CODECS[page >> CODEC_SHIFT]


@lru_cache(maxsize=256)
def page_layout(group: LayerGroup, page_size: int, codec: str = "raw") -> PageLayout:
    """The layout of one page of `group`.

    Raises:
        ConfigError: The codec is unknown, or needs a larger page or head or a smaller dtype.
    """
    if codec not in CODECS:
        raise ConfigError(f"codec {codec!r} is unknown", f"Use one of {', '.join(CODECS)}")
    tokens, dim, dim_v = page_size, group.head_dim, group.value_dim
    latent = group.kind == "latent"
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
                "Use codec='raw': codecs compute in float32, and whoever needs more keeps it all",
            )
        k_bits, v_bits = _BITS[codec]
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
        k_scales = _SCALE_BYTES * (2 * dim if codec == "kv4c" else tokens)
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
