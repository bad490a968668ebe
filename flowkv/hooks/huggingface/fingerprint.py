"""Digests of tensors: what weights are, and whether they are still what they were."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping

import torch
import xxhash

FULL_BYTES = 256 << 20
"""Up to so many bytes of weights are read whole; of more, samples of every tensor are."""

_BLOCK_BYTES = 4096
_BLOCKS = 4
_COLUMNS = 1024
PROCESS = uuid.uuid4().hex
"""Stands for what cannot be read or named: equal within this process, equal to no other's."""


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def fingerprint(named: Mapping[str, torch.Tensor]) -> str:
    """Hex digest of names, dtypes, shapes and content; the same on every device."""
    full = tensor_bytes(named.values()) <= FULL_BYTES
    digest = hashlib.sha256(b"flowkv.weights/1")
    for name, tensor in sorted(named.items()):
        head = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{full}"
        digest.update(len(head).to_bytes(4, "little") + head.encode())
        try:
            content = _sample(tensor, full).cpu()
        except (RuntimeError, NotImplementedError, TypeError):
            digest.update(PROCESS.encode())
            continue
        digest.update(xxhash.xxh3_128_digest(content.numpy().data))
    return digest.hexdigest()


def content(tensors: Iterable[torch.Tensor]) -> bytes:
    """Digest that changes with what the tensors hold, as cheaply as their device allows."""
    given = list(tensors)
    full = tensor_bytes(given) <= FULL_BYTES
    state, elsewhere = xxhash.xxh3_128(), dict[torch.device, list[torch.Tensor]]()
    for tensor in given:
        try:
            part = _sample(tensor, full)
            if part.device.type == "cpu":
                state.update(part.numpy().data)
            else:
                elsewhere.setdefault(part.device, []).append(_columns(part) if full else part)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
    for parts in elsewhere.values():
        state.update(torch.cat(parts).cpu().numpy().data)
    return state.digest()


def _sample(tensor: torch.Tensor, full: bool) -> torch.Tensor:
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device has no content")
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if full or flat.numel() <= _BLOCKS * _BLOCK_BYTES:
        return flat
    last = flat.numel() - _BLOCK_BYTES
    starts = [last * i // (_BLOCKS - 1) for i in range(_BLOCKS)]
    return torch.cat([flat[start : start + _BLOCK_BYTES] for start in starts])


def _columns(part: torch.Tensor) -> torch.Tensor:
    """1024 sums instead of all bytes, computed where they are; order within a column is lost."""
    whole = part.numel() - part.numel() % (4 * _COLUMNS)
    words = part[:whole].view(torch.int32).view(-1, _COLUMNS)
    sums = words.sum(0, dtype=torch.int64).view(torch.uint8)
    return torch.cat([sums, part[whole:]])


def digest_of(*parts: object) -> bytes:
    """32 bytes over tensors (dtype, shape, content) and plain values, nested in any way."""
    state = hashlib.sha256()
    _feed(state, parts)
    return state.digest()


def _feed(state: hashlib._Hash, value: object) -> None:
    if isinstance(value, torch.Tensor):
        head = f"tensor {value.dtype} {tuple(value.shape)};"
        state.update(head.encode())
        state.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        state.update(f"map {len(value)};".encode())
        for key in sorted(value, key=str):
            _feed(state, str(key))
            _feed(state, value[key])
    elif isinstance(value, (list, tuple)):
        state.update(f"list {len(value)};".encode())
        for item in value:
            _feed(state, item)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = f"{type(value).__name__} {value!r}"
        state.update(f"{len(text)} {text};".encode())
    else:
        raise TypeError(f"{type(value).__name__} has no digest")
