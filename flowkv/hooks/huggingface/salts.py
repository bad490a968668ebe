"""What keys and values depend on beside token ids and images: encoder outputs, options, types."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.keys import Salt
from flowkv.hooks.huggingface.weights import parts_of


def condition_salts(condition: Mapping[str, Any], row: int, rows: int) -> list[Salt]:
    """Salts for what every token of a row depends on, such as the encoder's output.

    Tensors and lists whose first dimension counts rows are taken apart, so that a row's salt does
    not depend on its neighbours. Flat ones of numbers count whole, too: as many as there are rows
    may as well be one for each layer, or all for every row.

    Raises:
        TypeError: A value has no digest.
    """
    if not condition:
        return []
    try:
        parts = _row(condition, row, rows), _flat(condition, rows) if rows > 1 else {}
    except (IndexError, RuntimeError) as error:  # sparse and nested tensors
        raise TypeError(f"an input has no rows that can be told apart ({error})") from error
    return [Salt(0, digest_of("condition", *parts))]


def place_salts(row: int, rows: int) -> list[Salt]:
    """A salt for a row's place in its batch, for models that treat rows by it."""
    return [Salt(0, digest_of("place", row, rows))]


def type_salts(name: str, types: NDArray[np.int64]) -> list[Salt]:
    """Salts for a row's token types: one wherever the type changes, none while it is zero."""
    changes = np.flatnonzero(np.diff(types, prepend=0))
    return [Salt(int(at), digest_of("type", name, int(types[at]))) for at in changes]


def column_salts(pad: int, positions: torch.Tensor | None) -> list[Salt]:
    """A salt for positions that the model makes itself, in which it may count the padding."""
    return [Salt(0, digest_of("columns", pad))] if pad and positions is None else []


def _flat(value: Any, rows: int) -> Any:
    """What may have a number for each row, or as many for all of them."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value if value.ndim == 1 and value.shape[0] == rows else None
    if isinstance(value, Mapping):
        return {key: _flat(item, rows) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) == rows and all(isinstance(x, (int, float)) for x in value):
            return value
        return [_flat(item, rows) for item in value]
    return None


def _row(value: Any, row: int, rows: int) -> Any:
    if type(value) in (torch.Tensor, torch.nn.Parameter, np.ndarray):
        return value[row] if value.ndim and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        own = dict(getattr(value, "__dict__", None) or {})  # of a subclass
        return [own, {key: _row(item, row, rows) for key, item in value.items()}]
    if isinstance(value, (list, tuple)):
        if len(value) == rows and not any(isinstance(x, torch.Tensor) for x in value):
            return value[row]
        return [_row(item, row, rows) for item in value]
    return value


def digest_of(*parts: object) -> bytes:
    """32 bytes over tensors (dtype, shape, content) and plain values, nested in any way.

    Raises:
        TypeError: A value has no digest.
    """
    state = hashlib.sha256()
    try:
        _feed(state, parts)
    except (ValueError, RuntimeError, RecursionError) as error:  # NotImplementedError is one
        raise TypeError(f"an input cannot be read ({error})") from error
    return state.digest()


def _feed(state: hashlib._Hash, value: object) -> None:
    if isinstance(value, (torch.Tensor, Mapping, np.ndarray)) and getattr(value, "__dict__", None):
        _feed(state, vars(value))  # what a subclass, or somebody, hung on it
    if isinstance(value, torch.Tensor):
        state.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        for part in parts_of(value):
            state.update(f"{part.dtype} {tuple(part.shape)};".encode())
            plain = part.resolve_conj().resolve_neg().cpu().contiguous()
            state.update(plain.view(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        state.update(f"map {len(value)};".encode())
        for key in sorted(value, key=str):
            _feed(state, str(key))
            _feed(state, value[key])
    elif isinstance(value, (list, tuple)):
        state.update(f"list {len(value)};".encode())
        for item in value:
            _feed(state, item)
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        state.update(f"array {value.dtype} {value.shape};".encode())
        state.update(np.ascontiguousarray(value).tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = f"{type(value).__name__} {value!r}"
        state.update(f"{len(text)} {text};".encode())
    else:
        raise TypeError(f"{type(value).__name__} has no digest")
