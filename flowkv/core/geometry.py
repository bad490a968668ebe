"""What a model's cache looks like: groups of layers of one kind, one K/V shape and one device."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from flowkv.core.errors import GeometryError

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
GroupKind = Literal["full", "sliding", "chunked", "latent"]


class LayerGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers that share a kind of attention, one K/V geometry and one device.

    Attributes:
        layers: The model's own layer indices, ascending.
        kv_heads: Key/value heads Hk of each layer.
        head_dim: Key dimension D of a head.
        value_dim: Value dimension Dv of a head; MLA latents and some models differ from `head_dim`.
        dtype: Name of the torch dtype K and V are kept in ("float32", "bfloat16", ...).
        kind: "full", "sliding" (last `window` tokens), "chunked", or "latent" (MLA: one head,
            a token's value is the first `value_dim` elements of its key and is not kept).
        window: Tokens a query sees, itself included; None for all.
        device: Where the layers compute ("cpu", "cuda:0"); not part of a page's identity.
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
        if min(self.kv_heads, self.head_dim, self.value_dim) < 1:
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
        if self.kind == "latent" and (self.kv_heads != 1 or self.value_dim > self.head_dim):
            raise GeometryError(
                f"a latent group has kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
                f"value_dim={self.value_dim}",
                "A latent is one head, whose first value_dim of head_dim elements are its value",
            )
        if self.window is not None and self.window < 1:
            raise GeometryError(f"window={self.window}", "A window is at least one token")

    def heads(self, rank: int, world: int) -> range:
        """KV heads that one rank of a tensor-parallel model holds.

        Latents, and heads of which there are fewer than ranks, are held by several of them.

        Args:
            rank: From 0.
            world: Number of ranks.

        Raises:
            GeometryError: There is no such rank, or the heads cannot be divided evenly.
        """
        if not 0 <= rank < world:
            raise GeometryError(f"rank {rank} of {world}", "Ranks are 0 to world - 1")
        if self.kind == "latent" or world == 1:
            return range(self.kv_heads)
        if self.kv_heads % world and world % self.kv_heads:
            raise GeometryError(
                f"{self.kv_heads} KV heads cannot be divided evenly among {world} ranks",
                "Choose a number of ranks that divides the KV heads, or is a multiple of them",
            )
        each = max(1, self.kv_heads // world)
        first = rank * self.kv_heads // world
        return range(first, first + each)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over all layers of the group, unencoded."""
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
        """Geometry of a model whose attention layers are all alike.

        Args:
            layers: Their number, or their indices.
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

    def local(self, rank: int, world: int) -> Geometry:
        """The part of this geometry that one rank of a tensor-parallel model holds.

        Raises:
            GeometryError: There is no such rank, or heads cannot be divided evenly.
        """
        groups = [
            msgspec.structs.replace(group, kv_heads=len(group.heads(rank, world)))
            for group in self.groups
        ]
        return Geometry(groups=tuple(groups), page_size=self.page_size)

    def locate(self, layer: int) -> tuple[int, int]:
        """(group, position within the group) of a model layer.

        Raises:
            GeometryError: No group holds the layer.
        """
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise GeometryError(f"layer {layer} is in no group", "Add it to the geometry's groups")

    def fingerprint(self) -> bytes:
        """32 bytes that change with anything that changes the bytes of a page; devices do not."""
        plain = [
            (g.kind, g.layers, g.kv_heads, g.head_dim, g.value_dim, g.dtype, g.window)
            for g in self.groups
        ]
        return hashlib.sha256(msgspec.json.encode(["geometry/1", self.page_size, plain])).digest()
