"""Tensors inside tuples, dicts and dataclasses: split into parts, joined again, stored as bytes.

A value is split into a *form*, plain lists that any format can carry, and its *leaves*: tensors,
arrays and, if requested, lists of texts. A form is independent of the contents of its leaves, so
rows of a batch have one form, and each has its own bytes.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from flowkv.core.files import MALFORMED
from flowkv.naming.fingerprint import UnnamedError, bytes_of

_PLAIN = (type(None), bool, int, float, str, bytes)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SIZE_BYTES = 4


def take(value: Any, leaves: list[Any], *, texts: bool = False) -> list[Any]:
    """Return the form of a value, and append its leaves to a list.

    Args:
        value: Tensors, arrays and plain values, in tuples, lists, dicts and dataclasses.
        leaves: Receives the leaves, in order.
        texts: Lists of texts are leaves, too.

    Raises:
        UnnamedError: The value has parts of another type.
    """
    kind = type(value)
    if kind in _TENSORS or kind is np.ndarray or (texts and _is_texts(value)):
        leaves.append(value)
        return ["leaf"]
    if kind in _PLAIN:
        _check(value)
        return ["plain", value]
    if kind in (tuple, list):
        return [kind.__name__, [take(item, leaves, texts=texts) for item in value]]
    if kind is dict and all(type(key) is str for key in value):
        fields: Mapping[str, Any] = value
        name = "dict"
        for key in value:
            _check(key)
    elif _has_fields(kind):
        fields = _fields(value)
        name = f"{kind.__module__}:{kind.__qualname__}"
    elif isinstance(value, (torch.dtype, torch.device)):
        return [kind.__name__, str(value).removeprefix("torch.")]
    else:
        raise UnnamedError(f"a value of type {kind.__module__}.{kind.__qualname__}")
    return [name, [*fields], [take(item, leaves, texts=texts) for item in fields.values()]]


def _check(value: Any) -> None:
    """Refuse values that msgpack cannot hold: wide numbers, and texts that are no Unicode."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError) as error:
        raise UnnamedError(f"a value of type {type(value).__name__}: {error}") from error


def put(form: Any, leaves: Iterator[Any]) -> Any:
    """Return the value with a form and these leaves.

    Raises:
        ValueError: The form is invalid, or names a class that is not loaded.
    """
    kind = form[0]
    if kind == "leaf":
        return next(leaves)
    if kind == "plain":
        return form[1]
    if kind in ("dtype", "device"):
        return torch.device(form[1]) if kind == "device" else getattr(torch, form[1])
    if kind in ("tuple", "list"):
        items = [put(part, leaves) for part in form[1]]
        return tuple(items) if kind == "tuple" else items
    _, names, parts = form
    values = {name: put(part, leaves) for name, part in zip(names, parts, strict=True)}
    if kind == "dict":
        return values
    made = _class(kind)(**values)
    if any(getattr(made, name) is not value for name, value in values.items()):
        raise ValueError(f"{kind} changes its fields")
    return made


def _is_texts(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and {*map(type, value)} <= {str, bytes}


def _has_fields(cls: Any) -> bool:
    named = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return named or dataclasses.is_dataclass(cls)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    beside = vars(value).keys() - held.keys() if hasattr(value, "__dict__") else set[str]()
    if beside or (isinstance(value, Mapping) and value.keys() - held.keys()):
        raise UnnamedError(f"a {type(value).__name__} with more than its fields")
    return held


def _class(name: str) -> Any:
    """Return a loaded class by its name, if it only has fields; bytes may name no other."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not _has_fields(found):
        raise ValueError(f"{name} is no class of fields here")
    return found


# ---- bytes


class LeafInfo(msgspec.Struct, frozen=True, array_like=True):
    """Description of a leaf, without its contents.

    Attributes:
        kind: "tensor", "array" or "texts".
        dtype: Name of the dtype in torch or numpy.
        shape: Shape of one row.
        device: Type of the device.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        return math.prod(self.shape) * int(self._torch_or_numpy.itemsize)

    @property
    def _torch_or_numpy(self) -> Any:
        if self.kind == "array":
            return np.dtype(self.dtype)
        found = getattr(torch, self.dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{self.dtype!r} is no dtype")
        return found

    def join(self, rows: Sequence[Any], device: torch.device) -> Any:
        """Return a new leaf of rows given by their bytes.

        Raises:
            ValueError: A row has another number of bytes than its shape.
        """
        shape, dtype = (len(rows), *self.shape), self._torch_or_numpy
        data = np.empty((len(rows), self.row_bytes), np.uint8)
        for i, row in enumerate(rows):
            data[i] = np.frombuffer(row, np.uint8)
        if self.kind == "array":
            return data.reshape(-1).view(dtype).reshape(shape)
        return torch.from_numpy(data).view(-1).view(dtype).view(shape).to(device)


def info_of(leaf: Any, *, rows: bool) -> LeafInfo:
    """Return the description of a leaf, or of one of its rows.

    Raises:
        UnnamedError: The leaf's bytes cannot be read.
    """
    if isinstance(leaf, (list, tuple)):
        return LeafInfo("texts", "", () if rows else (len(leaf),))
    shape = tuple(leaf.shape[1:] if rows else leaf.shape)
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.kind not in "biufc":
            raise UnnamedError(f"an array of {leaf.dtype}")
        return LeafInfo("array", leaf.dtype.str, shape)
    if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_meta:
        raise UnnamedError(f"a tensor of layout {leaf.layout} on {leaf.device}")
    return LeafInfo("tensor", str(leaf.dtype), shape, leaf.device.type)


def count_rows(leaf: Any) -> int:
    """Return the number of rows of a leaf; -1 for a scalar."""
    if isinstance(leaf, (list, tuple)):
        return len(leaf)
    return int(leaf.shape[0]) if leaf.ndim else -1


def bytes_by_row(leaf: Any, *, rows: bool, own: bool = False) -> list[Any]:
    """Return the bytes of each row of a leaf, or of the whole leaf as one row.

    Args:
        leaf: The leaf.
        rows: Whether the leaf has rows.
        own: Copy the bytes, so that later writes to the leaf do not change them.
    """
    if isinstance(leaf, (list, tuple)):
        each = [_text(item) for item in leaf]
        return each if rows else [b"".join(each)]
    if isinstance(leaf, np.ndarray):
        data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        shared = np.may_share_memory(data, leaf)
    else:
        plain = bytes_of(leaf.detach())
        shared = plain.device.type == "cpu" and plain.data_ptr() == leaf.data_ptr()
        data = plain.cpu().numpy()
    if own and shared:
        data = data.copy()
    count = len(leaf) if rows else 1
    step = data.nbytes // max(count, 1)
    view: Any = data.data
    return [view[i * step : (i + 1) * step] for i in range(count)]


def _text(item: str | bytes) -> bytes:
    data = item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item
    return (b"s" if isinstance(item, str) else b"b") + len(data).to_bytes(8, "little") + data


def rows_of(leaf: Any, index: Sequence[int]) -> Any:
    """Return some rows of a leaf."""
    if isinstance(leaf, (list, tuple)):
        return type(leaf)(leaf[i] for i in index)
    if isinstance(leaf, np.ndarray):
        return leaf[list(index)]
    return leaf.index_select(0, torch.tensor(index, device=leaf.device))


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate leaves of one kind."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(tuple(parts))


class StoredRow(NamedTuple):
    """One row of results with its form.

    Attributes:
        form: Form of the value.
        infos: Descriptions of its leaves.
        made_ns: Time of its computation, in nanoseconds since 1970.
        parts: The bytes of each leaf.
    """

    form: Any
    infos: tuple[LeafInfo, ...]
    made_ns: int
    parts: list[Any]

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all leaves."""
        return sum(info.row_bytes for info in self.infos)

    def encode(self) -> list[Any]:
        """Return bytes that `decode_row` reads, in pieces."""
        head = msgspec.msgpack.encode([self.form, self.infos, self.made_ns])
        return [len(head).to_bytes(_SIZE_BYTES, "little"), head, *self.parts]


_HEAD = tuple[Any, tuple[LeafInfo, ...], int]


def decode_row(body: memoryview) -> tuple[StoredRow, int]:
    """Decode a row; return it and its length in bytes, without leaves if `body` is too short.

    Raises:
        ValueError: The bytes are no row.
    """
    size = int.from_bytes(body[:_SIZE_BYTES], "little")
    at = _SIZE_BYTES + size
    try:
        form, infos, made_ns = msgspec.msgpack.decode(body[_SIZE_BYTES:at], type=_HEAD)
        sizes = [info.row_bytes for info in infos]
    except (*MALFORMED, TypeError) as error:
        raise ValueError(f"no row: {error}") from error
    if min(sizes, default=0) < 0 or at > len(body):
        raise ValueError("a row with impossible sizes")
    end, parts = at + sum(sizes), []
    if end <= len(body):
        for n_bytes in sizes:
            parts.append(body[at : at + n_bytes])
            at += n_bytes
    return StoredRow(form, infos, made_ns, parts), end
