"""Changes of what a model is made of: the content of its tensors, and memory words of its objects.

PyTorch counts writes to a tensor (`_version`), so a tensor that was read once need not be read
again while it is the same object, at the same address, with the same count. Writes through `.data`
or a numpy view are not counted; a rolling reading goes over all bytes again and again to find them.
In this module, a write is "counted" if it raises `_version`.

A look at a model compares thousands of values, and most of its time is the processor's waiting for
memory. CPython counts the changes of each dict in one word (its version: PEP 509), and a function,
a cell and an instance point to their code, content and class. The words of all objects are read by
one call, in which the waits overlap. A version never comes back. A pointer does, and is worth
something only while its object is kept alive: its address may be another object's afterwards.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import operator
import struct
import sys
import sysconfig
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, repeat
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flowkv.kernels import checksum
from flowkv.kernels.operands import Later

_CLASS, _DICT, _CHANGES, _CONTENT, _CODE = 8, -24, 24, 16, (48, 56, 64)
"""Offsets: class and `__dict__` of an instance, count of a dict's changes, content of a cell; code,
defaults and keyword defaults of a function."""
_MANAGED = 1 << 4
"""Flag of classes whose instances have their `__dict__` at that offset."""


def versions_of(thing: Any) -> list[int]:
    """Return the address of the version of a dict, or of a class given by its `__dict__`.

    Other objects, and some interpreters, have none.
    """
    if type(thing) is types.MappingProxyType:
        (thing,) = gc.get_referents(thing)
    # An OrderedDict's version does not count changes of its order.
    counts = type(thing) is dict or (type(thing) is OrderedDict and not thing)
    return [id(thing) + _CHANGES] if counts and SUPPORTED else []


def pointers_of(thing: Any, values: Sequence[Any]) -> list[tuple[int, int]]:
    """Return addresses of pointers, and what they hold while an object has some values.

    Args:
        thing: A function, a cell that is not empty, or an instance; others have none.
        values: Code, defaults and keyword defaults; content; or class and `__dict__`.
    """
    kind = type(thing)
    if not SUPPORTED:
        return []
    if kind is types.FunctionType:
        held = [0 if value is None else id(value) for value in values]
        return [*zip([id(thing) + offset for offset in _CODE], held, strict=True)]
    offsets = (_CONTENT,) if kind is types.CellType else (_CLASS, _DICT)
    if kind is not types.CellType and not kind.__flags__ & _MANAGED:
        return []
    return [(id(thing) + at, id(value)) for at, value in zip(offsets, values, strict=True)]


def places_of(addresses: Iterable[int]) -> NDArray[np.int64]:
    """Return the places for `TAKE` of words at some addresses, which are multiples of 8."""
    return (np.fromiter(addresses, np.int64) - 8) >> 3


class _Memory:
    """All memory from address 8 on."""

    def __init__(self) -> None:
        shape, data = (1 << 59,), (8, True)
        self.__array_interface__ = {"shape": shape, "data": data, "typestr": "<i8", "version": 3}


class _Thing:
    """Instance with an attribute that is set until the interpreter specialises the instruction."""

    def __init__(self) -> None:
        self.value: Any = 0

    def store(self, value: Any) -> None:
        self.value = value


class _Other(_Thing):
    """Another class of that instance."""


def _changes() -> Iterator[tuple[list[int], Callable[[], Any]]]:
    """Yield addresses, and a change that the words there have to show."""
    held: dict[Any, Any] = {"a": 1, "b": 2}
    ordered = OrderedDict[Any, Any]()
    for one, words in ((held, versions_of(held)), (ordered, versions_of(ordered))):
        yield words, functools.partial(one.__setitem__, "a", [])
        yield words, functools.partial(one.update, {"a": 3})
        yield words, functools.partial(one.setdefault, "c", 4)
        yield words, functools.partial(one.pop, "c")
        yield words, functools.partial(operator.setitem, one, "d", 5)
        yield words, functools.partial(operator.delitem, one, "d")
        yield words, functools.partial(operator.ior, one, {"e": 6})
        yield words, one.popitem
        yield words, one.clear
    thing = _Thing()
    words, others = versions_of(vars(thing)), versions_of(vars(_Thing))
    for i in range(64):
        yield words, functools.partial(thing.store, float(i))
        yield others, functools.partial(setattr, _Thing, "count", i)
    yield words, functools.partial(object.__setattr__, thing, "value", None)
    yield words, functools.partial(delattr, thing, "value")
    yield others, functools.partial(delattr, _Thing, "count")
    number = 0

    def function(one: int = 0, *, other: int = 0) -> int:
        return number + one + other

    def set_number(value: int) -> None:
        nonlocal number
        number = value

    cell: Any = set_number.__closure__ and set_number.__closure__[0]
    code = (lambda: number).__code__
    parts = (function.__code__, function.__defaults__, function.__kwdefaults__)
    changes: list[tuple[Any, Any, list[Callable[[], Any]]]] = [
        (function, parts, [functools.partial(setattr, function, "__code__", code)]),
        (thing, (_Thing, vars(thing)), [functools.partial(setattr, thing, "__class__", _Other)]),
        (cell, (number,), [functools.partial(set_number, 1000 + i) for i in range(64)]),
    ]
    changes[0][2].append(functools.partial(setattr, function, "__defaults__", (1,)))
    changes[0][2].append(functools.partial(setattr, function, "__kwdefaults__", {}))
    changes[1][2].append(functools.partial(setattr, thing, "__dict__", {}))
    changes[2][2].append(functools.partial(setattr, cell, "cell_contents", None))
    for one, values, made in changes:
        pointers = pointers_of(one, values)
        if [*TAKE(places_of(at for at, _ in pointers))] != [value for _, value in pointers]:
            raise ValueError("a pointer elsewhere")
        for change in made:
            yield [at for at, _ in pointers], change


def _proven() -> bool:
    """Return whether each kind of change is seen in this interpreter, and reading changes none."""
    for addresses, change in _changes():
        places = places_of(addresses)
        before, again = TAKE(places), TAKE(places)
        change()
        still = len(places) and np.array_equal(before, again)
        if not still or np.array_equal(before, TAKE(places)):
            return False
    return True


TAKE = np.asarray(_Memory()).take
"""Read words at places of objects that the caller keeps alive. Other uses of the array crash."""
PYTHON, PYTHONS = sys.version_info[:2], ((3, 11), (3, 12))
"""Version of Python, and the first and the last that counts all changes of dicts."""
SUPPORTED = (
    sys.implementation.name == "cpython"
    and PYTHONS[0] <= PYTHON <= PYTHONS[1]
    and struct.calcsize("P") == 8
    and sys.byteorder == "little"
    and not sysconfig.get_config_var("Py_TRACE_REFS")  # which has other offsets
)
try:
    SUPPORTED = SUPPORTED and _proven()
except Exception:  # an interpreter with other objects
    SUPPORTED = False


BLOCK_BYTES = 4 << 20
_BLOCK_WORDS = BLOCK_BYTES // 8


class UnnamedError(TypeError):
    """The content of a tensor cannot be read: it is on the meta device, or of an opaque kind."""


class Streamed(Protocol):
    """Content of a parameter that is in memory only while a forward uses it.

    It is the parameter's attribute `streamed_weight`. Methods may be called by any thread.

    Attributes:
        like: A tensor without memory, of the parameter's shape and dtype.
        parameter: The parameter; its copies have the attribute, too, but content of their own.
    """

    like: torch.Tensor
    parameter: torch.nn.Parameter

    def stays(self) -> bool:
        """Return whether the parameter has had no counted write, and no memory of its own."""

    def sums(self) -> bytes | None:
        """Return `sums_of` the content; None after an uncounted write.

        From then on the tensor in memory is the content, and `stays` is false.

        Raises:
            UnnamedError: The content can no longer be read.
        """

    def data(self) -> torch.Tensor | None:
        """Return the content that is in memory now; None if it is not."""


class _Read(NamedTuple):
    """Record of a tensor at the time of its reading."""

    tensor: torch.Tensor
    state: tuple[Any, ...]  # see `_LOOKS`
    parts: list[torch.Tensor]  # plain tensors that hold its content
    sums: bytes
    streamed: Streamed | None = None  # then parts have no memory

    def counted(self) -> bool:
        """Return whether the tensor has had no counted write, and has the same place in memory."""
        if self.streamed is not None:
            return _streamed(self.tensor) is self.streamed
        return _state_of(self.tensor) == self.state


_LOOKS = (
    attrgetter("_version"),
    methodcaller("data_ptr"),
    attrgetter("dtype"),
    attrgetter("shape"),
    methodcaller("stride"),
)
"""Readers of the compared attributes of a tensor, in C for speed. `t_`, `as_strided_` and the like
change nothing but dtype, shape or strides."""


class _Glance(NamedTuple):
    """Parts of tensors in this process's memory, and one digest of their content."""

    parts: list[torch.Tensor]
    addresses: list[int]
    memory: list[Any]
    digest: bytes

    def same(self) -> bool:
        there = [part.data_ptr() for part in self.parts] == self.addresses
        return there and _digest(self.memory) == self.digest


class _Block(NamedTuple):
    """Block of a tensor, and the sums over it at the time of its reading."""

    part: torch.Tensor
    streamed: Streamed | None
    number: int
    n_bytes: int
    sums: bytes


class Weights:
    """Named tensors and the sums of their content, recorded by object, address and version.

    Attributes:
        n_bytes: Bytes of all tensors.
        passes: Rolling readings that went over all bytes and found them unchanged.
    """

    def __init__(self) -> None:
        self.n_bytes = self.passes = self._next = 0
        self._names = set[str]()
        self._layout: list[Any] | None = None
        self._reads: dict[int, _Read]
        self._blocks: list[_Block] | None
        self._unread: tuple[Later, list[bytes]] | None
        self._glance: _Glance | None
        self._hold({})

    def read(self, named: Mapping[str, torch.Tensor]) -> str:
        """Return a hex digest of names, dtypes, shapes and every byte, the same on every device.

        Only tensors that are new, or have had a counted write, are read; all where tensors came or
        went: modules that leave may have been merged into others, by writes without a count.

        Raises:
            UnnamedError: A tensor cannot be read.
        """
        if named.keys() != self._names:
            self.forget()
        reads: dict[int, _Read] = {}
        fresh: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for tensor in named.values():
            known = self._reads.get(id(tensor))
            if known is not None and known.tensor is tensor and known.counted():
                reads[id(tensor)] = known
            elif (at := _streamed(tensor)) is not None and (sums := at.sums()) is not None:
                parts = list(_ordered(at.like))
                reads[id(tensor)] = _Read(tensor, (), parts, sums, at)
            else:
                fresh.setdefault(id(tensor), (tensor, list(parts_of(tensor))))
        # Versions are read before the content, so that a write meanwhile counts as a later one.
        states = {key: _state_of(tensor) for key, (tensor, _) in fresh.items()}
        for key, sums in _sums({key: parts for key, (_, parts) in fresh.items()}).items():
            tensor, parts = fresh[key]
            reads[key] = _Read(tensor, states[key], parts, sums)
        self._hold({id(tensor): reads[id(tensor)] for tensor in named.values()})
        self._names = {*named}
        self.n_bytes = sum(part.nbytes for read in reads.values() for part in read.parts)
        digest = hashlib.sha256(b"flowkv.weights/2")
        for name, tensor in sorted(named.items()):
            read = reads[id(tensor)]
            heads = [f"{part.dtype}|{tuple(part.shape)}" for part in read.parts]
            whole = tensor if read.streamed is None else read.streamed.like
            head = f"{name}|{whole.dtype}|{tuple(whole.shape)}|{heads}".encode()
            digest.update(len(head).to_bytes(4, "little") + head + read.sums)
        return digest.hexdigest()

    def counted(self, tensor: torch.Tensor | None = None) -> bool:
        """Return whether no tensor, or not this one, has had a counted write since its reading."""
        if tensor is not None:
            known = self._reads.get(id(tensor))
            return known is not None and known.tensor is tensor and known.counted()
        try:  # all at once, and in C: every decode step pays for this
            columns: Any = map
            now = [*zip(*columns(map, _LOOKS, repeat(self._met)), strict=True)]
            return now == self._states and all(map(_Read.counted, self._streamed))
        except RuntimeError:  # some tensors have no version, address or strides
            return all(map(_Read.counted, self._reads.values()))

    def forget(self) -> None:
        """Release all tensors and their recorded sums."""
        self._hold({})

    def _hold(self, reads: dict[int, _Read]) -> None:
        layout = [(key, *(part.nbytes for part in read.parts)) for key, read in reads.items()]
        if layout != self._layout:  # else the rolling reading goes on where it was
            self._layout, self._next, self._unread = layout, 0, None
        self._reads, self._blocks, self._glance = reads, None, None
        met = [read for read in reads.values() if read.streamed is None]
        self._streamed = [read for read in reads.values() if read.streamed is not None]
        self._met = [read.tensor for read in met]
        self._states = [read.state for read in met]

    def roll(self, n_bytes: int) -> bool:
        """Read the next bytes of a rolling reading, at least one block.

        Sums from a GPU are compared in a later call, so that no call waits for the device. The call
        that ends a reading of all bytes reads no more.

        Returns:
            False if bytes that were read, in this call or the one before, have changed.
        """
        passes = self.passes
        if not self._compare() or self.passes > passes:
            return self.passes > passes
        blocks, begin, done = self._all_blocks(), self._next, 0
        end = begin
        while end < len(blocks) and (done < n_bytes or not done):
            done += max(blocks[end].n_bytes, 1)
            end += 1
        sums, known = list[torch.Tensor](), list[bytes]()
        # A block that is no whole number of words is copied, so it is read by itself.
        runs = groupby(blocks[begin:end], lambda block: (id(block.part), block.n_bytes % 8))
        for _, run in runs:
            each = [*run]
            streamed, first = each[0].streamed, each[0].number * BLOCK_BYTES
            part = each[0].part if streamed is None else streamed.data()
            if part is not None:  # content outside memory is verified when it is loaded
                data = bytes_of(part)[first : first + len(each) * BLOCK_BYTES]
                sums.append(checksum(_words(data), _BLOCK_WORDS))
                known.append(b"".join(block.sums for block in each))
        self._unread, self._next = (Later(*sums), known), end
        return not self._unread[0].ready or self._compare()

    def _compare(self) -> bool:
        """Return whether the blocks that were read last are unchanged; count a complete reading."""
        if self._unread is None:
            return True
        (later, known), end = self._unread, self._next
        self._unread, self._next = None, 0  # after a change, the reading begins anew
        found = later.result()
        if any(x is None or x.numpy().tobytes() != y for x, y in zip(found, known, strict=True)):
            return False
        self._next = end
        if self._next >= len(self._all_blocks()):
            self._next, self.passes = 0, self.passes + 1
        return True

    @property
    def waits(self) -> bool:
        """Return whether a device still computes sums, for which the next reading would wait."""
        return self._unread is not None

    def restart(self) -> None:
        """Begin the rolling reading anew."""
        self._next, self._unread = 0, None

    def same(self) -> bool:
        """Read all bytes and return whether they are unchanged.

        Memory of this process is compared by a digest that is faster than the sums of the name.
        """
        reads = self._reads
        if self._glance is None:
            copies: dict[int, list[torch.Tensor]] = {}
            for key, read in reads.items():
                if read.streamed is None and all(map(_lies_here, read.parts)):
                    copies[key] = [bytes_of(part).clone() for part in read.parts]
            # Sums and digest are those of one copy, whatever is written meanwhile.
            if any(sums != reads[key].sums for key, sums in _sums(copies).items()):
                return False
            parts = [part for key in copies for part in reads[key].parts]
            memory, held = map(_memory_of, parts), chain(*copies.values())
            addresses = [part.data_ptr() for part in parts]
            glance = _Glance(parts, addresses, [*memory], _digest(map(_memory_of, held)))
            if reads is not self._reads:  # another thread has read other weights meanwhile
                return False
            self._apart = {key: read for key, read in reads.items() if key not in copies}
            self._glance = glance
        return self._glance.same() and not _differing(self._apart)

    @property
    def rolling(self) -> bool:
        """Return whether a rolling reading has begun; it proves only pages that are older."""
        return self._next > 0

    def _all_blocks(self) -> list[_Block]:
        if self._blocks is None:
            self._blocks = []
            for read in self._reads.values():
                at = 0
                for part in read.parts:
                    for number in range(-(-part.nbytes // BLOCK_BYTES)):
                        size = min(part.nbytes - number * BLOCK_BYTES, BLOCK_BYTES)
                        sums = read.sums[at : at + 16]
                        self._blocks.append(_Block(part, read.streamed, number, size, sums))
                        at += 16
        return self._blocks


def _differing(reads: Mapping[int, _Read]) -> set[int]:
    """Return the keys of the tensors with other content than at their reading."""
    parts = {key: read.parts for key, read in reads.items() if read.streamed is None}
    for key, read in reads.items():
        if read.streamed is not None and (data := read.streamed.data()) is not None:
            parts[key] = [data]
    found = _sums(parts)
    return {key for key, sums in found.items() if sums != reads[key].sums}


def _streamed(tensor: torch.Tensor) -> Streamed | None:
    """Return the streamed content of a tensor; None if the tensor itself holds its content."""
    where: Streamed | None = getattr(tensor, "streamed_weight", None)
    if where is None or where.parameter is not tensor or not where.stays():
        return None
    return where


def readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's content can be read."""
    if _streamed(tensor) is not None:
        return True
    try:
        for part in parts_of(tensor):
            if part.dtype not in _COMMON:
                _words(bytes_of(part[:0] if part.dim() else part))
    except Exception:  # a tensor's class may raise anything
        return False
    return True


_COMMON = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield plain tensors with the whole content of a tensor of any class.

    Raises:
        UnnamedError: The content cannot be read.
    """
    x: Any = tensor.detach()
    try:
        if is_traceable_wrapper_subclass(x):
            names, context = x.__tensor_flatten__()
            yield _text(f"{type(x).__module__}.{type(x).__qualname__} {context}")
            for name in names:
                yield from parts_of(getattr(x, name))
        elif x.is_quantized:
            yield x.int_repr()
            if x.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
                scale = x.q_scale(), float(x.q_zero_point())
                yield torch.tensor(scale, dtype=torch.float64, device="cpu")
            else:
                yield x.q_per_channel_scales()
                yield x.q_per_channel_zero_points()
        elif x.layout is torch.sparse_coo:
            yield x.coalesce().indices()
            yield x.coalesce().values()
        elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
            yield from (x.crow_indices(), x.col_indices(), x.values())
        elif x.layout is torch.strided and not x.is_meta and _stored(type(x)):
            if type(x) not in _PLAIN:  # the class may override functions of tensors
                with torch._C.DisableTorchFunctionSubclass():
                    x = x.as_subclass(torch.Tensor)
            x.data_ptr()  # raises where there is no memory
            yield from _ordered(x)
        else:
            raise UnnamedError(f"a tensor of type {type(tensor).__name__} on {tensor.device}")
    except (RuntimeError, NotImplementedError) as error:
        raise UnnamedError(f"a tensor of type {type(tensor).__name__}: {error}") from error


def _ordered(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor in the order of memory, so that a transposed one is read without a copy."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: (x.shape[d] == 1, -strides[d]))
    wide = [d for d in order if x.shape[d] > 1]
    if wide != sorted(wide):
        yield torch.tensor(order, dtype=torch.uint8, device="cpu")
    yield x.permute(order)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _stored(cls: Any) -> bool:
    """Return whether tensors of a class store their content as plain ones do."""
    plain = torch._C._disabled_torch_dispatch_impl
    return cls in _PLAIN or getattr(cls, "__torch_dispatch__", None) is plain


def _text(value: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(value.encode()), dtype=torch.uint8)


def _lies_here(part: torch.Tensor) -> bool:
    return part.is_cpu and bytes_of(part).data_ptr() == part.data_ptr() > 0


def _memory_of(part: torch.Tensor) -> Any:
    return (ctypes.c_char * part.nbytes).from_address(part.data_ptr())


def _digest(memory: Iterable[Any]) -> bytes:
    state = xxhash.xxh3_128()
    for each in memory:
        state.update(each)
    return state.digest()


def bytes_of(part: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor, in the order of its elements."""
    if part.is_conj() or part.is_neg():
        part = part.resolve_conj().resolve_neg()
    return part.contiguous().view(-1).view(torch.uint8)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return bytes as 64-bit words, padded with zeros."""
    short = -len(data) % 8
    if short:
        return torch.nn.functional.pad(data, (0, short)).view(torch.int64)
    aligned = not (data.storage_offset() % 8 or data.data_ptr() % 8)
    return (data if aligned else data.clone()).view(torch.int64)


def sums_of(data: torch.Tensor) -> bytes:
    """Return two 64-bit sums over each block of bytes, u8 [n]; digests of weights use these."""
    return checksum(_words(data), _BLOCK_WORDS).cpu().numpy().tobytes()


def _sums(parts: Mapping[int, list[torch.Tensor]]) -> dict[int, bytes]:
    """Return the sums of all blocks of all tensors; no read waits for a device before the last."""
    found = {
        key: Later(*(checksum(_words(bytes_of(part)), _BLOCK_WORDS) for part in tensors))
        for key, tensors in parts.items()
    }
    return {
        key: b"".join(sums.numpy().tobytes() for sums in later.result() if sums is not None)
        for key, later in found.items()
    }


def version_of(tensor: torch.Tensor) -> int:
    """Return PyTorch's count of writes to a tensor; -1 for those of inference mode."""
    return -1 if tensor.is_inference() else tensor._version  # an error would take 10 us


def _state_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the compared attributes of a tensor; None for those it has not, as some classes."""
    found = list[Any]()
    for look in _LOOKS:
        try:
            found.append(look(tensor))
        except RuntimeError:
            found.append(None)
    return tuple(found)
