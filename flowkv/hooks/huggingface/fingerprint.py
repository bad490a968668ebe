"""Digests of tensors: what weights are, and whether they are still what they were."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

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
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            content = (flat if full else torch.cat(_blocks(flat))).cpu()
        except (RuntimeError, NotImplementedError, TypeError):  # meta, or a wrapper
            digest.update(PROCESS.encode())
            continue
        digest.update(xxhash.xxh3_128_digest(content.numpy().data))
    return digest.hexdigest()


class Content:
    """What tensors hold at this moment, to be compared later as cheaply as their device allows.

    Bytes on the CPU are hashed where they lie; elsewhere whole tensors become sums there, samples
    travel together.

    Attributes:
        n_bytes: Bytes of all tensors.

    Args:
        tensors: The tensors; views of their memory are kept.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        given = list(tensors)
        self.n_bytes = tensor_bytes(given)
        full = self.n_bytes <= FULL_BYTES
        self._here: list[NDArray[np.uint8]] = []
        self._samples: dict[torch.device, list[torch.Tensor]] = {}
        self._whole: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in given:
            with suppress(RuntimeError, NotImplementedError, TypeError):
                self._take(tensor, full)
        self._digest = self._read()

    def _take(self, tensor: torch.Tensor, full: bool) -> None:
        flat = _bytes(tensor)
        parts = [flat] if full else _blocks(flat)
        if tensor.device.type == "cpu":
            self._here += [part.numpy() for part in parts]
        elif full:
            self._whole.setdefault(tensor.device, []).append(flat)
        else:
            self._samples.setdefault(tensor.device, []).append(parts[len(parts) // 2])

    def same(self) -> bool:
        """Whether they still hold it."""
        return self._read() == self._digest

    def _read(self) -> bytes:
        state = xxhash.xxh3_128()
        for array in self._here:
            state.update(array.data)
        for tensors in self._whole.values():
            state.update(torch.cat([_columns(flat) for flat in tensors]).cpu().numpy().data)
        for tensors in self._samples.values():
            state.update(torch.cat(tensors).cpu().numpy().data)
        return state.digest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device has no content")
    # Not contiguous would mean a copy, which no later change reaches.
    whole = tensor.detach()
    dense = whole if whole.is_contiguous() else whole.untyped_storage()
    if isinstance(dense, torch.UntypedStorage):
        return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(dense)
    return dense.view(-1).view(torch.uint8)


def _blocks(flat: torch.Tensor) -> list[torch.Tensor]:
    """Evenly spaced samples of a tensor's bytes; all of them if there are few."""
    if flat.numel() <= _BLOCKS * _BLOCK_BYTES:
        return [flat]
    last = flat.numel() - _BLOCK_BYTES
    starts = [last * i // (_BLOCKS - 1) for i in range(_BLOCKS)]
    return [flat[start : start + _BLOCK_BYTES] for start in starts]


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
