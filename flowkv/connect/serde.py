"""FlowKV's codecs for LMCache: the serde `flowkv`, which `flowkv.connect.lmcache` registers.

It encodes K and V in INT8 or INT4, or at one to two bits a value, on the way to an L2 adapter.
Importing this module imports LMCache and torch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, Serializer

from flowkv.core.errors import ConfigError, GeometryError
from flowkv.core.geometry import CODECS, COLD, FIDELITIES, Geometry, PageLayout, page_layout
from flowkv.kernels import transcode
from flowkv.kvt.codec import PageCoder, coded_fingerprint, read_head
from flowkv.kvt.file import OpenBasis, Unfit, open_basis

_INSTEAD = "kv8"
"""Codec of objects that lose too much in kvt."""
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
        if codec >= len(FIDELITIES) or len(blob) < _HEADER.size + n_bytes:
            raise ConfigError("the head of an object is damaged", "It is computed and stored again")
        return cls(FIDELITIES[codec], n_bytes, *said)


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
    try:
        group = Geometry.uniform(layers=layers, kv_heads=heads, **said).groups[0]
        return page_layout(group, tokens), page_layout(group, tokens, codec)
    except GeometryError as error:
        raise ConfigError(
            f"{codec} holds no objects of {tokens} tokens with heads of {head_dim} ({error})",
            "Change chunk_size, which is that number of tokens, or the codec",
        ) from error


class _Page:
    """One page in memory, raw and encoded.

    Attributes:
        coded: Layout of the encoded page.
        data: The encoded page, uint8 `[bytes]`.
        body: The raw page.
        heads: A view of it, `[2, layers, tokens, heads, head_dim]` of K and V.
    """

    def __init__(self, raw: PageLayout, coded: PageLayout) -> None:
        self._raw, self.coded = raw, coded
        self._arena = torch.zeros(raw.page_bytes + coded.page_bytes, dtype=torch.uint8)
        self._first, self._second = torch.tensor([[0], [raw.granules]], dtype=torch.int32)
        self.data = self._arena[raw.page_bytes :]
        self.body = self._arena[: raw.page_bytes].numpy().data
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
    """Conversion of one model's objects between LMCache's layout and FlowKV pages.

    Args:
        codec: "kv8", "k8v4", "kv4c" or "kv4h" (docs/explain/codecs.md), or "kvt".
        head_dim: Head dimension of the model; that of the basis, if there is one.
        basis: Basis of "kvt".
    """

    def __init__(self, codec: str, head_dim: int = 0, basis: OpenBasis | None = None) -> None:
        self._codec, self._plain, self._basis = codec, _INSTEAD if basis else codec, basis
        self._head_dim = head_dim or (basis.coder.layout.head_dim if basis else 0)
        self._unfit = Unfit(basis, _INSTEAD) if basis else None

    def _layouts(
        self, shape: torch.Size, dtype: torch.dtype
    ) -> tuple[PageLayout, PageLayout, PageCoder | None]:
        """Return the layouts of objects as pages, raw and encoded, and their coder in kvt."""
        raw, coded = _layouts(self._plain, self._head_dim, shape, dtype)
        if self._basis is None:
            return raw, coded, None
        try:
            return raw, coded, self._basis.coder.fitted(raw)
        except ValueError as error:
            raise ConfigError(
                f"objects of {self._basis} are expected, and not such ({error})",
                'Make a basis of this model: flowkv calibrate; with tensor parallelism use "kv8"',
            ) from error


def _digest(head: bytes, pages: torch.Tensor, key: Any) -> bytes:
    """Return a digest over the head, up to the digest, the pages and the key of an object."""
    whose = (key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
    digest = xxhash.xxh3_128(repr(whose).encode())
    digest.update(head)
    digest.update(pages.numpy().data)
    return digest.digest()


class FlowKVSerializer(_Codec, Serializer):
    """Serializer of `[2, layers, tokens, heads * head_dim]` as a head and one FlowKV page.

    In kvt an object is turned back to where its keys are likeliest, as LMCache does not pass its
    place. One that loses more than its basis is for, or is no smaller, is encoded in kv8 instead.
    """

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Return the size of an object in bytes; in kvt the most that it can be.

        Raises:
            ConfigError: There is no codec for such objects.
        """
        if len(layout_desc.shapes) != 1:
            raise ConfigError(
                "an object has several tensors", "Leave the serde out: its codecs take one, K and V"
            )
        _, coded, _ = self._layouts(layout_desc.shapes[0], layout_desc.dtypes[0])
        return _HEADER.size + coded.page_bytes

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Encode an object, decode it again to measure the loss, and return its size.

        Raises:
            ConfigError: A number is not finite, or out of the codec's range: it is not stored.
        """
        raw, coded, coder = self._layouts(src.tensor.shape, src.tensor.dtype)
        page = _Page(raw, coded)
        values = src.tensor.view(page.heads.shape)
        page.heads.copy_(values)
        data = self._encode_cold(page, coder, key) if coder is not None else None
        if data is not None:
            codec, layout = COLD, coded_fingerprint(raw.fingerprint())
        else:
            codec, layout, data = CODECS.index(self._plain), coded.fingerprint(), page.data
            if not page.encode_page():
                raise ConfigError(
                    f"an object has numbers that {self._plain} cannot hold, and is not stored",
                    "If this is frequent, use another codec, or none",
                )
            page.decode_page()
        lost = (page.heads.float() - values.float()).abs().flatten(1).amax(1).tolist()
        head = _HEADER.pack(_MAGIC, codec, len(data), *lost, layout, b"")[:-16]
        head += _digest(head, data, key)
        into, end = dst.tensor.view(torch.uint8).flatten(), len(head) + len(data)
        into[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        into[len(head) : end].copy_(data)
        return end

    def _encode_cold(self, page: _Page, coder: PageCoder, key: Any) -> torch.Tensor | None:
        """Replace a page by what comes back of it in kvt; return that, or None if it is unfit."""
        found = coder.encode_within(page.body, coder.likeliest(page.body))
        fits = found is not None and len(found[0]) <= len(page.data)
        if self._unfit is not None:
            self._unfit.count_part(key.model_name, fits=fits)
        if found is None or not fits:
            return None
        page.body[:] = found[1]
        return torch.frombuffer(bytearray(found[0]), dtype=torch.uint8)


class FlowKVDeserializer(_Codec, Deserializer):
    """Deserializer of objects that `FlowKVSerializer` made. Arguments are the same."""

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Decode into `dst`, which is not changed if anything is wrong.

        Raises:
            ConfigError: The object is damaged, another key's, or of another model, dtype, codec or
                basis.
        """
        blob = src.tensor.view(torch.uint8).flatten()
        said = ObjectHead.of(memoryview(blob.numpy()))
        head, data = bytes(blob[: _HEADER.size].numpy()), blob[_HEADER.size :][: said.n_bytes]
        raw, coded, coder = self._layouts(dst.tensor.shape, dst.tensor.dtype)
        page = _Page(raw, coded)
        cold = coder is not None and said.codec == FIDELITIES[COLD]
        wanted = coded_fingerprint(raw.fingerprint()) if cold else coded.fingerprint()
        if said.layout != wanted or (len(data) != len(page.data) and not cold):
            raise ConfigError(
                f"an object in {said.codec} has another shape, dtype or codec than {self._codec}",
                "Give each configuration places of its own",
            )
        if head[-16:] != _digest(head[:-16], data, key):
            raise ConfigError("an object is damaged, or of another key", "It is computed again")
        if coder is not None and cold:
            coded_page = memoryview(data.numpy())
            known = read_head(coded_page)
            if known is None or known.basis != coder.name:
                raise ConfigError(
                    f"an object was stored with another one than {self._basis}",
                    "It is computed again. Give each basis places, or a revision, of its own",
                )
            sound = coder.decode(coded_page, page.body, 0, raw.layers)
        else:
            page.data.copy_(data)
            sound = page.decode_page()
        if not sound:
            raise ConfigError("an object holds no numbers", "It is computed again")
        dst.tensor.view(page.heads.shape).copy_(page.heads)


def make_serde(kwargs: Mapping[str, Any]) -> Any:
    """Return LMCache's processor for the options: codec, head_dim, basis and max_workers.

    Raises:
        ConfigError: An option is missing or invalid.
    """
    options = dict(kwargs)
    codec, head_dim = str(options.pop("codec", _INSTEAD)), options.pop("head_dim", 0)
    basis, workers = str(options.pop("basis", "")), int(options.pop("max_workers", 1))
    cold = codec == FIDELITIES[COLD]
    wrong = (codec not in CODECS[1:] and not cold) or bool(basis) != cold
    if options or wrong or not isinstance(head_dim, int) or not (head_dim or cold):
        raise ConfigError(
            f"FlowKV's serde has no options {dict(kwargs)}",
            'Set "serde": {"type": "flowkv", "codec": "kv8", "head_dim": 128}, with a codec of '
            f'{", ".join(CODECS[1:])}; or {{"type": "flowkv", "codec": "kvt", "basis": "FILE"}} '
            "with the file that `flowkv calibrate` wrote; and, where one thread is not enough, "
            "max_workers",
        )
    said = codec, head_dim, open_basis(Path(basis)) if cold else None
    both = FlowKVSerializer(*said), FlowKVDeserializer(*said)
    return AsyncSerdeProcessor(*both, workers)
