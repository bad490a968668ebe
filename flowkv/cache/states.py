"""Snapshots of recurrent layers: named tensors, numbers and partial pages as one checked blob.

    blob = u32 length of the description | description (MessagePack) | tensor bytes ... | padding

No pickle: every length is checked against the blob before it is used (DESIGN D11).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from flowkv.core.errors import StoreError
from flowkv.core.layout import GRANULE_BYTES

MOST_ELEMENTS = 1 << 40

LAYOUT = hashlib.sha256(b"flowkv.state/1").digest()[:16]
"""What a state's frame carries as its layout."""

BUNDLE_LAYOUT = hashlib.sha256(b"flowkv.bundle/1").digest()[:16]
"""What frames of named tensors (`bundles`) carry as theirs."""

DTYPES = {  # those that a stored tensor may have
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tensors: tuple[_Tensor, ...]
    plain: dict[str, Any]


def encode_state(values: Mapping[str, Any]) -> bytes:
    """One blob from named tensors and plain values (numbers, text, bytes and lists of them).

    Raises:
        StoreError: A value is of another kind.
    """
    tensors, plain, bodies = [], {}, []
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise StoreError(f"state {name!r} has dtype {dtype}", "Convert it to a plain dtype")
            tensors.append(_Tensor(name, dtype, tuple(value.shape)))
            flat = value.detach().contiguous().reshape(-1).cpu()
            bodies.append(flat.view(torch.uint8).numpy().tobytes())
        else:
            plain[name] = value
    try:
        head = msgspec.msgpack.encode(_Description(tuple(tensors), plain))
    except TypeError as error:
        raise StoreError(f"a state cannot be kept ({error})", "Keep tensors and numbers") from None
    blob = len(head).to_bytes(4, "little") + head + b"".join(bodies)
    return blob + bytes(-len(blob) % GRANULE_BYTES)


def decode_state(blob: bytes) -> dict[str, Any]:
    """What `encode_state` was given, tensors on the CPU.

    Raises:
        StoreError: It is no such blob.
    """
    length = int.from_bytes(blob[:4], "little")
    try:
        description = msgspec.msgpack.decode(blob[4 : 4 + length], type=_Description)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"a stored state is damaged ({error})", "Delete the store") from None
    values: dict[str, Any] = dict(description.plain)
    at = 4 + length
    for tensor in description.tensors:
        dtype = DTYPES.get(tensor.dtype)
        shape = tensor.shape
        n_bytes = math.prod(shape) * dtype.itemsize if dtype else 0
        sound = min(shape, default=0) >= 0 and math.prod(max(n, 1) for n in shape) <= MOST_ELEMENTS
        if dtype is None or not sound or at + n_bytes > len(blob):
            raise StoreError(f"stored state {tensor.name!r} is damaged", "Delete the store")
        raw = bytearray(blob[at : at + n_bytes])
        room = torch.frombuffer(raw or bytearray(dtype.itemsize), dtype=dtype)
        flat = room[: n_bytes // dtype.itemsize]
        values[tensor.name] = flat.reshape(shape)
        at += n_bytes
    return values
