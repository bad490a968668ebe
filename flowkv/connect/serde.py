"""FlowKV's codecs for LMCache: the serde `flowkv`, which `flowkv.connect.lmcache` registers.

It encodes K and V in INT8 or INT4 on the way to any L2 adapter. Importing this module imports
LMCache and torch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import xxhash
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, Serializer

from flowkv.core.errors import ConfigError
from flowkv.core.geometry import CODECS, Geometry, PageLayout, page_layout
from flowkv.kernels import transcode

_HEADER = struct.Struct("<8sIIff16s16s")
_MAGIC = b"flowkv/1"


class ObjectHead(NamedTuple):
    """Head of an object that the serde made.

    Attributes:
        codec: One of FlowKV's, such as "kv8".
        n_bytes: Bytes of the pages behind the head.
        most_lost_k: Greatest difference of a decoded element of K from the original.
        most_lost_v: The same of V.
        layout: Fingerprint of the pages' shape, dtype and codec.
    """

    codec: str
    n_bytes: int
    most_lost_k: float
    most_lost_v: float
    layout: bytes

    @classmethod
    def of(cls, blob: bytes | bytearray | memoryview) -> ObjectHead:
        """Read the head of an object.

        Raises:
            ConfigError: The object was not made by this version of FlowKV's serde, or is damaged.
        """
        if len(blob) < _HEADER.size or bytes(blob[: len(_MAGIC)]) != _MAGIC:
            raise ConfigError(
                "the object was not made by FlowKV's serde", "Give each serde places of its own"
            )
        _, codec, n_bytes, *said, _ = _HEADER.unpack_from(blob)
        if codec >= len(CODECS) or len(blob) < _HEADER.size + n_bytes:
            raise ConfigError("the head of an object is damaged", "It is computed and stored again")
        return cls(CODECS[codec], n_bytes, *said)


@lru_cache(maxsize=64)
def _layouts(
    codec: str, head_dim: int, shape: torch.Size, dtype: torch.dtype
) -> tuple[PageLayout, PageLayout]:
    """Return the layouts of `[2, layers, tokens, heads * head_dim]` as a page, raw and encoded."""
    if len(shape) != 4 or shape[0] != 2 or shape[3] % head_dim:
        raise ConfigError(
            f"objects of shape {list(shape)} have no heads of size {head_dim}",
            "The serde takes [2, layers, tokens, heads * head_dim]: set head_dim to the model's; "
            "for latents (MLA) and states there is no codec, leave the serde out",
        )
    _, layers, tokens, width = shape
    name, heads = str(dtype).removeprefix("torch."), width // head_dim
    said: dict[str, Any] = {"head_dim": head_dim, "page_size": tokens, "dtype": name}
    group = Geometry.uniform(layers=layers, kv_heads=heads, **said).groups[0]
    return page_layout(group, tokens), page_layout(group, tokens, codec)


class _Page:
    """One page in memory, raw and encoded.

    Attributes:
        coded: Layout of the encoded page.
        data: The encoded page, uint8 `[bytes]`.
        heads: The raw page, a view `[2, layers, tokens, heads, head_dim]` of K and V.
    """

    def __init__(self, raw: PageLayout, coded: PageLayout) -> None:
        self._raw, self.coded = raw, coded
        self._arena = torch.zeros(raw.page_bytes + coded.page_bytes, dtype=torch.uint8)
        self._first, self._second = torch.tensor([[0], [raw.granules]], dtype=torch.int32)
        self.data = self._arena[raw.page_bytes :]
        elements = self._arena.view(getattr(torch, raw.dtype))
        size = (2, raw.layers, raw.page_size, raw.kv_heads, raw.head_dim)
        steps = (raw.v_offset_bytes, raw.stripe_stride_bytes, raw.run_bytes)
        v, stripe, run = (n_bytes // elements.itemsize for n_bytes in steps)
        self.heads = elements.as_strided(size, (v, stripe, raw.head_dim, run, 1))

    def encode_page(self) -> bool:
        """Encode the raw page; return whether the codec holds all of its numbers."""
        at = self._first, self._second
        return not transcode(self._arena, *at, self._raw, self.coded).any()

    def decode_page(self) -> bool:
        """Decode the encoded page; return whether it holds numbers."""
        at = self._second, self._first
        return not transcode(self._arena, *at, self.coded, self._raw).any()


class _Codec:
    """Conversion of one model's objects between LMCache's layout and FlowKV pages."""

    def __init__(self, codec: str, head_dim: int) -> None:
        self._codec, self._layouts = codec, partial(_layouts, codec, head_dim)


def _digest(head: bytes, pages: torch.Tensor, key: Any) -> bytes:
    """Return a digest over the head, up to the digest, the pages and the key of an object."""
    whose = (key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
    digest = xxhash.xxh3_128(repr(whose).encode())
    digest.update(head)
    digest.update(pages.numpy().data)
    return digest.digest()


class FlowKVSerializer(_Codec, Serializer):
    """Serializer of `[2, layers, tokens, heads * head_dim]` as a head and one FlowKV page.

    Args:
        codec: "kv8", "k8v4", "kv4c" or "kv4h"; docs/explain/codecs.md.
        head_dim: Head dimension of the model.
    """

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Return the exact size of an object in bytes.

        Raises:
            ConfigError: There is no codec for such objects.
        """
        if len(layout_desc.shapes) != 1:
            raise ConfigError(
                "an object has several tensors", "Leave the serde out: its codecs take one, K and V"
            )
        _, coded = self._layouts(layout_desc.shapes[0], layout_desc.dtypes[0])
        return _HEADER.size + coded.page_bytes

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Encode an object, decode it again to measure the loss, and return its size.

        Raises:
            ConfigError: A number is not finite, or out of the codec's range: it is not stored.
        """
        page = _Page(*self._layouts(src.tensor.shape, src.tensor.dtype))
        values = src.tensor.view(page.heads.shape)
        page.heads.copy_(values)
        if not page.encode_page():
            raise ConfigError(
                f"an object has numbers that {self._codec} cannot hold, and is not stored",
                "If this is frequent, use another codec, or none",
            )
        page.decode_page()
        lost = (page.heads.float() - values.float()).abs().flatten(1).amax(1).tolist()
        said = CODECS.index(self._codec), len(page.data), *lost, page.coded.fingerprint()
        head = _HEADER.pack(_MAGIC, *said, b"")[:-16]
        head += _digest(head, page.data, key)
        into, end = dst.tensor.view(torch.uint8).flatten(), len(head) + len(page.data)
        into[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        into[len(head) : end].copy_(page.data)
        return end


class FlowKVDeserializer(_Codec, Deserializer):
    """Deserializer of objects that `FlowKVSerializer` made. Arguments are the same."""

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Decode into `dst`, which is not changed if anything is wrong.

        Raises:
            ConfigError: The object is damaged, another key's, or of another model, dtype or codec.
        """
        blob = src.tensor.view(torch.uint8).flatten()
        said = ObjectHead.of(memoryview(blob.numpy()))
        head, data = bytes(blob[: _HEADER.size].numpy()), blob[_HEADER.size :][: said.n_bytes]
        page = _Page(*self._layouts(dst.tensor.shape, dst.tensor.dtype))
        if said.layout != page.coded.fingerprint() or len(data) != len(page.data):
            raise ConfigError(
                f"an object in {said.codec} has another shape, dtype or codec than {self._codec}",
                "Give each configuration places of its own",
            )
        if head[-16:] != _digest(head[:-16], data, key):
            raise ConfigError("an object is damaged, or of another key", "It is computed again")
        page.data.copy_(data)
        if not page.decode_page():
            raise ConfigError("an object holds no numbers", "It is computed again")
        dst.tensor.view(page.heads.shape).copy_(page.heads)


def make_serde(kwargs: Mapping[str, Any]) -> Any:
    """Return LMCache's processor for the serde's options: codec, head_dim and max_workers.

    Raises:
        ConfigError: An option is missing or invalid.
    """
    options = dict(kwargs)
    codec, head_dim = str(options.pop("codec", "kv8")), options.pop("head_dim", None)
    workers = int(options.pop("max_workers", 1))
    if options or not isinstance(head_dim, int) or codec not in CODECS[1:]:
        raise ConfigError(
            f"FlowKV's serde has no options {dict(kwargs)}",
            'Set "serde": {"type": "flowkv", "codec": "kv8", "head_dim": 128}, with a codec of '
            f"{', '.join(CODECS[1:])} and, where one thread is not enough, max_workers",
        )
    both = FlowKVSerializer(codec, head_dim), FlowKVDeserializer(codec, head_dim)
    return AsyncSerdeProcessor(*both, workers)
