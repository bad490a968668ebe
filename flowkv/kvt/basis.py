"""Bases of pages: which linear combinations of heads and layers are stored, and how finely.

The elements of a token within one *chunk*, some heads of some neighbouring layers, are a vector.
Its errors e cost about e' F e / 2 of divergence, where F is the mean of g g' over gradients g of
log-probabilities (the Fisher information). So vectors are scaled by a root of F before they are
rotated onto their principal axes: an equal step on every axis then is an equal price for every bit.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from flowkv.compiled.machine_code import kept
from flowkv.core.geometry import PageLayout
from flowkv.kvt.entropy import CLASSES, SYMBOLS, SymbolTables, count, deviation_class

MOST_DIMS, HEAD_DIMS = 1152, 256
"""Most elements of a chunk, and most of them within one layer: an element of a page takes as many
multiplications as its chunk has axes."""
LEAST_DEVIATION = 0.35
"""Axes with a smaller standard deviation, in steps, are left out: a finer step for the others saves
more for the same bits."""
COARSE_DEVIATION = 12.0
"""Axes with a larger one are multiplied as float32: their coefficients would multiply the rounding
of bytes, and may not fit one."""


@cache
def multiplies_bytes() -> bool:
    """Return whether products of bytes are exact and fast.

    Other CPUs add up pairs of them in 16 bits, and oneDNN may be held to an older CPU. The product
    starts threads of OpenMP, so it is not made at import: forked processes would wait for them.
    """
    x = torch.full((64, 64), 127, dtype=torch.int8, device="cpu")
    try:
        return bool(torch.cpu._is_vnni_supported() and (torch._int_mm(x, x) == 64 * 127**2).all())
    except (AttributeError, RuntimeError):  # of an older torch
        return False


_MOST_STEP = 1e18
_SHORT = (
    torch.bfloat16 if getattr(torch.cpu, "_is_avx512_bf16_supported", bool)() else torch.float32
)
_RIDGE = 0.05  # of F's mean eigenvalue, added: few gradients leave directions unseen
_MULTIPLE = 8  # of axes: some devices multiply bytes in blocks of 8

Floats = NDArray[np.float32]


class KeyTurn(NamedTuple):
    """Rotation of a layer's keys by their position: RoPE, see `kernels.Rotary`.

    Attributes:
        inv_freq: Inverse frequencies, float64 `[R/2]`.
        interleaved: Whether the two dims of a pair are neighbours.
        start: First of the R rotated dims.
    """

    inv_freq: NDArray[np.float64]
    interleaved: bool = False
    start: int = 0

    def angles(self, deltas: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 cos and sin `[N, 1, R/2]` for tokens that move by `deltas` positions."""
        angle = deltas.astype(np.float64)[:, None, None] * self.inv_freq
        return tuple(torch.from_numpy(f(angle).astype(np.float32)) for f in (np.cos, np.sin))  # type: ignore[return-value]

    def pairs(self, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views `[..., R/2]` of the two dims of each rotated pair of keys `[..., D]`."""
        half = len(self.inv_freq)
        own = k[..., self.start : self.start + 2 * half]
        if self.interleaved:
            return own[..., 0::2], own[..., 1::2]
        return own[..., :half], own[..., half:]

    def moved(self, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return keys `[N, Hk, D]`, rotated in float32 and rounded once."""
        x, y = (part.float() for part in self.pairs(k))
        out = k.clone()
        one, other = self.pairs(out)
        one[...], other[...] = x * cos - y * sin, y * cos + x * sin
        return out


class KeyTurns:
    """Rotations of the keys of a group's layers. Thread-safe.

    Args:
        turns: The rotations.
        of_layer: Index in `turns` for each layer: -1 for none.
    """

    def __init__(self, turns: list[KeyTurn], of_layer: list[int]) -> None:
        self.turns, self.of_layer, self._memory = turns, of_layer, threading.local()

    @classmethod
    def of_layers(cls, turns: Sequence[KeyTurn | None]) -> KeyTurns:
        """Return the rotations of layers, None for none."""
        some, of_layer = list[KeyTurn](), list[int]()
        for turn in turns:
            alike = (n for n, one in enumerate(some) if turn is not None and _alike(one, turn))
            of_layer.append(next(alike, -1 if turn is None else len(some)))
            if turn is not None and of_layer[-1] == len(some):
                some.append(turn)
        return cls(some, of_layer)

    def apply(
        self, keys: torch.Tensor, start: int, layers: range | None = None, *, back: bool = False
    ) -> torch.Tensor:
        """Return keys, rotated to positions from `start` on, or back.

        Args:
            keys: Keys of some layers, `[layers, heads, tokens, dim]`.
            start: Position of the first token.
            layers: These layers; None for all.
            back: Whether the keys are rotated, and shall not be.
        """
        which = [self.of_layer[n] for n in layers] if layers is not None else self.of_layer
        if set(which) == {-1}:
            return keys
        out = keys.clone()
        for number in {*which} - {-1}:
            own = [n for n, turn in enumerate(which) if turn == number]
            cos, sin = self._angles(number, (start,), keys.shape[2])
            out[own] = self.turns[number].moved(keys[own], cos, -sin if back else sin)
        return out

    def likeliest(
        self, keys: torch.Tensor, means: torch.Tensor, first: int, stride: int, count: int
    ) -> int:
        """Return the n below `count` for which keys from position `n * stride` on are likeliest.

        Keys of a model have large means: rotated back from their place, these are what is left of
        the mean over the tokens. Each pair counts by its spread.

        Args:
            keys: Rotated keys of all layers, float32 `[layers, heads, tokens, dim]`.
            means: Means of keys before their rotation, `[layers, heads, dim]`.
            first: First token that counts.
            stride: Distance of two places.
            count: Number of places.
        """
        keys, score = self.apply(keys, 0, back=True)[:, :, first:], np.zeros(count)
        for number, turn in enumerate(self.turns):
            own = [n for n, of in enumerate(self.of_layer) if of == number]
            seen, mean = (torch.complex(*turn.pairs(x[own])) for x in (keys, means))
            alike = mean.conj() * seen.mean(2) / seen.var(2).clamp_min_(1e-12)
            angle = np.outer(np.arange(count) * stride, turn.inv_freq)
            score += (np.exp(-1j * angle) @ alike.sum((0, 1)).numpy()).real
        return int(score.argmax())

    def of_chunk(self, layers: range, starts: Any, count: int) -> list[tuple[Any, ...]]:
        """Return each rotation of some layers' keys: a mask of its layers, and angles and place.

        Args:
            layers: The layers.
            starts: Position of the first token of each page; None for values, which do not rotate.
            count: Tokens of a page.
        """
        found, still = list[tuple[Any, ...]](), (_STILL, _STILL, False, 0)
        which = np.array([-1 if starts is None else self.of_layer[layer] for layer in layers])
        for number in {*which.tolist()}:
            turn = still
            if number >= 0:
                angles = (one.numpy() for one in self._angles(number, starts, count))
                turn = *angles, *self.turns[number][1:]
            found.append((which == number, turn))
        return found

    def _angles(self, number: int, starts: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        known: Any = getattr(self._memory, "angles", ((), {}))
        if known[0] != (starts, count):
            known = self._memory.angles = (starts, count), {}
        if number not in known[1]:
            positions = np.add.outer(np.array(starts), np.arange(count)).ravel()
            known[1][number] = [one[:, 0] for one in self.turns[number].angles(positions)]
        return known[1][number]  # type: ignore[no-any-return]


_STILL = np.zeros((1, 0), np.float32)


@kept(nogil=True)
def finish(coded, shape, out, place, own, turn):  # type: ignore[no-untyped-def]
    """Write elements of a page's chunk, of keys in their rotation.

    Args:
        coded: What `BasisChunk.synthesise` wrote for some pages, and the units of the second part.
        shape: Number of the page, first layer within the chunk, heads, dim, tokens of a page.
        out: Memory float32 of layers.
        place: Index of the first element, and strides of layers and heads.
        own: Layers that are written, bool `[layers]`.
        turn: Their rotation, see `KeyTurns.of_chunk`.
    """
    base, sums, scale = coded
    (page, first, heads, dim, tokens), (begin, deep, wide), (cos, sin) = shape, place, turn[:2]
    angles = cos[page * tokens :], sin[page * tokens :]
    for layer in range(len(own)):
        if not own[layer]:
            continue
        for head in range(heads):
            at, to = ((first + layer) * heads + head) * dim, begin + layer * deep + head * wide
            units = scale[at : at + dim]
            for token in range(page * tokens, (page + 1) * tokens):
                x, y = base[token, at : at + dim], sums[token, at : at + dim]
                row = out[to : to + dim]
                for n in range(dim):
                    row[n] = x[n] + units[n] * np.float32(y[n])
                to += dim
            if cos.shape[1]:
                _rotate(out[to - tokens * dim : to].reshape(tokens, dim), *angles, *turn[2:])


@njit
def _rotate(rows, cos, sin, interleaved, start):  # type: ignore[no-untyped-def]
    half = cos.shape[1]
    for token in range(len(rows)):
        row, c, s = rows[token, start:], cos[token], sin[token]
        if interleaved:
            for n in range(half):
                u, v = row[2 * n], row[2 * n + 1]
                row[2 * n], row[2 * n + 1] = u * c[n] - v * s[n], v * c[n] + u * s[n]
        else:
            one, two = row[:half], row[half : 2 * half]
            for n in range(half):
                u, v = one[n], two[n]
                one[n], two[n] = u * c[n] - v * s[n], v * c[n] + u * s[n]


def _alike(one: KeyTurn, other: KeyTurn) -> bool:
    return one[1:] == other[1:] and one.inv_freq.tobytes() == other.inv_freq.tobytes()


class ChunkPlace(NamedTuple):
    """Elements that are transformed together.

    Attributes:
        side: 0 for keys, 1 for values.
        layers: Layers within the group.
        heads: Heads of these layers.
    """

    side: int
    layers: slice
    heads: slice

    def elements(self, sides: Sequence[torch.Tensor], first: int = 0) -> torch.Tensor:
        """Return the elements `[tokens, n]` of tokens from `first` on.

        Args:
            sides: Keys and values `[layers, heads, tokens, dim]`.
            first: First token.
        """
        part = sides[self.side][self.layers, self.heads, first:].permute(2, 0, 1, 3)
        return part.reshape(part.shape[0], -1)


def chunk_places(layout: PageLayout) -> Iterator[ChunkPlace]:
    """Yield the chunks of a page, layers first, keys before values."""
    for side, dim in enumerate((layout.head_dim, layout.value_dim)):
        heads = max(1, min(layout.kv_heads, HEAD_DIMS // dim))
        deep = max(1, MOST_DIMS // (heads * dim))
        for layer in range(0, layout.layers, deep):
            layers = slice(layer, min(layer + deep, layout.layers))
            for head in range(0, layout.kv_heads, heads):
                yield ChunkPlace(side, layers, slice(head, min(head + heads, layout.kv_heads)))


class _StoredChunk(msgspec.Struct, frozen=True):
    """A chunk as it is stored: the bytes of the arguments of `BasisChunk`."""

    axes: int
    mean: bytes
    metric: bytes
    coarse: bytes
    fine: bytes
    classes: bytes
    scale: bytes = b""


class _StoredBasis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A basis as it is stored."""

    version: int
    layout: bytes
    step: float
    turns: list[tuple[bytes, bool, int]]
    turn_of: list[int]
    frequencies: bytes
    chunks: list[_StoredChunk]
    measured: dict[str, float]


class BasisChunk:
    """Transform of one chunk.

    Args:
        mean: `[n]`, added to what is stored.
        coarse: `[coarse axes, n]`, elements of one step along each of the first axes.
        fine: i8 `[other axes, n]`, elements of one step along the others, in units of `scale`.
        scale: `[n]`.
        metric: `[layers, heads, dim, dim]`, price of errors.
        classes: u8 `[axes]`, classes of the coefficients.
        step: Step of the quantiser.

    Attributes:
        axes: Number of axes.
        coarse_axes: Number of those that are multiplied as floats.
    """

    def __init__(
        self,
        mean: Floats,
        coarse: Floats,
        fine: NDArray[np.int8],
        scale: Floats,
        metric: Floats,
        classes: NDArray[np.uint8],
        step: float,
    ) -> None:
        self.mean, self.metric, self.classes = torch.from_numpy(mean), metric, classes
        self.axes, self.coarse_axes = len(classes), len(coarse)
        self.coarse, self.fine, self.scale = torch.from_numpy(coarse), torch.from_numpy(fine), scale
        whole = np.concatenate([coarse, fine * scale])
        apart = whole.reshape(self.axes, *metric.shape[:-1])
        priced = np.einsum("alhd,lhde->alhe", apart, metric).reshape(self.axes, -1)
        priced /= np.float32(step**2)
        priced = 2 * priced - (priced @ whole.T) @ priced  # axes that are rounded are oblique
        analysis = torch.from_numpy(np.ascontiguousarray(priced.T))
        self._analysis = analysis[:, : len(coarse)], analysis[:, len(coarse) :].to(_SHORT)

    def quantise(self, x: torch.Tensor) -> torch.Tensor:
        """Return coefficients `[tokens, axes]` of elements `[tokens, n]`, as floats."""
        x = x - self.mean
        out = x.new_empty(len(x), self.axes)
        out[:, : self.coarse_axes] = x @ self._analysis[0]
        out[:, self.coarse_axes :] = x.to(_SHORT) @ self._analysis[1]
        return out.round_()

    def synthesise(self, coarse: Any, fine: Any, base: Any, sums: Any, size: int) -> None:
        """Write two parts of the elements `[tokens, n]`, arrays.

        Args:
            coarse: Coefficients of the first axes, float32 `[axes, tokens]`.
            fine: Those of the others, i8.
            base: Memory of the first part, float32.
            sums: Memory of the second one, i32, in units of `scale`.
            size: Tokens of a page: floats are added in the same order for each, whatever is beside.
        """
        low, high, first, second = map(torch.from_numpy, (fine.T, coarse.T, base, sums))
        for at in range(0, len(base), size):
            own = slice(at, at + size)
            torch.addmm(self.mean, high[own], self.coarse, out=first[own])
        if len(fine) and multiplies_bytes():
            torch._int_mm(low, self.fine, out=second)
        else:  # whole numbers below 2**24, the same
            second.copy_(low.float() @ self.fine.float())


class Basis(NamedTuple):
    """Bases of all chunks of one layer group's pages, with the tables of their coefficients.

    Attributes:
        layout: Fingerprint of the raw pages.
        step: Step of the quantiser.
        turns: Rotations of keys.
        chunks: In the order of `chunk_places`.
        tables: Tables of all chunks.
        measured: What was measured at calibration: bits, kl and more.
    """

    layout: bytes
    step: float
    turns: KeyTurns
    chunks: list[BasisChunk]
    tables: SymbolTables
    measured: dict[str, float]

    def pack(self) -> bytes:
        """Return the bytes that `unpack` reads."""
        turns = [(turn.inv_freq.tobytes(), *turn[1:]) for turn in self.turns.turns]
        names = _StoredChunk.__struct_fields__[1:]
        chunks = [
            _StoredChunk(one.axes, *(np.asarray(getattr(one, name)).tobytes() for name in names))
            for one in self.chunks
        ]
        frequencies = self.tables.frequencies.tobytes()
        parts = turns, self.turns.of_layer, frequencies, chunks, self.measured
        return msgspec.msgpack.encode(_StoredBasis(2, self.layout, self.step, *parts))

    @classmethod
    def unpack(cls, data: bytes, layout: PageLayout) -> Basis:
        """Return the basis that `pack` wrote.

        Raises:
            ValueError: The bytes are no basis of pages of this layout.
        """
        try:
            stored = msgspec.msgpack.decode(data, type=_StoredBasis)
        except msgspec.MsgspecError as error:
            raise ValueError(f"no basis: {error}") from None
        known = stored.version in (1, 2) and 0 < stored.step < _MOST_STEP
        if not known or stored.layout != layout.fingerprint():
            raise ValueError("a basis of another version or of other pages")
        places = list(islice(chunk_places(layout), len(stored.chunks) + 1))
        if len(stored.chunks) != len(places) or len(stored.turn_of) != layout.layers:
            raise ValueError("a basis with other chunks")
        chunks = []
        for place, one in zip(places, stored.chunks, strict=True):
            shape = shape_of(place, layout)
            n = shape[0] * shape[1] * shape[2]
            if stored.version == 1:  # all axes as floats
                old = (np.frombuffer(one.fine, np.uint16).astype(np.uint32) << 16).tobytes()
                one = msgspec.structs.replace(
                    one, coarse=one.coarse + old, fine=b"", scale=bytes(4 * n)
                )
            parts = (
                np.frombuffer(one.mean, np.float32).copy(),
                np.frombuffer(one.coarse, np.float32).reshape(-1, n).copy(),
                np.frombuffer(one.fine, np.int8).reshape(-1, n).copy(),
                np.frombuffer(one.scale, np.float32).copy(),
                np.frombuffer(one.metric, np.float32).reshape(*shape, shape[2]).copy(),
                np.frombuffer(one.classes, np.uint8).copy(),
            )
            lengths = *(len(parts[at]) for at in (0, 3, 5)), len(parts[1]) + len(parts[2])
            if lengths != (n, n, one.axes, one.axes) or one.axes > n:
                raise ValueError("a basis with chunks of other sizes")
            if one.axes and int(parts[5].max()) >= CLASSES:
                raise ValueError("a basis with unknown classes")
            if not all(np.isfinite(part).all() for part in parts):
                raise ValueError("a basis with numbers that are not finite")
            chunks.append(BasisChunk(*parts, stored.step))
        turns = [
            KeyTurn(np.frombuffer(raw, np.float64), interleaved, start)
            for raw, interleaved, start in stored.turns
        ]
        for turn in turns:
            beyond = not 0 <= turn.start <= layout.head_dim - 2 * len(turn.inv_freq)
            if beyond or not np.isfinite(turn.inv_freq).all():
                raise ValueError("a basis with rotations beyond a key, or by no angle")
        if not all(-1 <= number < len(turns) for number in stored.turn_of):
            raise ValueError("a basis with unknown rotations")
        shares = np.frombuffer(stored.frequencies, np.uint16).reshape(CLASSES, SYMBOLS).copy()
        tables, rotation = SymbolTables(shares), KeyTurns(turns, stored.turn_of)
        return cls(stored.layout, stored.step, rotation, chunks, tables, stored.measured)


def most_basis_bytes(layout: PageLayout) -> int:
    """Return an upper bound of the bytes of a basis of such pages."""
    total = 1 << 16  # tables, names, what was measured
    total += layout.layers * (8 * layout.head_dim + 64)  # rotations
    for place in chunk_places(layout):
        shape = shape_of(place, layout)
        n = math.prod(shape)
        total += n * (4 * n + 4 * shape[2] + 16) + 256
    return total


def shape_of(place: ChunkPlace, layout: PageLayout) -> tuple[int, int, int]:
    """Return the layers, heads and dims of a chunk."""
    dim = layout.value_dim if place.side else layout.head_dim
    deep, wide = place.layers.stop - place.layers.start, place.heads.stop - place.heads.start
    return deep, wide, dim


def digest(data: bytes) -> bytes:
    """Return the 16 bytes that name a basis."""
    return hashlib.blake2b(data, digest_size=16, person=b"flowkv.kvt/1").digest()


# Learning.


class ChunkStatistics:
    """Moments of a chunk's elements, and their axes in the metric of errors.

    Args:
        shape: Layers, heads and dims of the chunk.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        n = shape[0] * shape[1] * shape[2]
        self.shape, self.tokens = shape, 0
        self.sum, self.squares = np.zeros(n), np.zeros((n, n))
        self.price, self.gradients = np.zeros((*shape, shape[2])), 0
        self._axes: tuple[NDArray[np.float64], ...] | None = None

    def add(self, x: torch.Tensor) -> None:
        """Add elements `[tokens, n]`."""
        x = x.float()
        self.sum += x.double().sum(0).numpy()
        self.squares += (x.T @ x).double().numpy()
        self.tokens += len(x)

    def add_gradients(self, g: torch.Tensor) -> None:
        """Add gradients `[tokens, n]` of log-probabilities."""
        g = g.double().view(len(g), *self.shape)
        self.price += torch.einsum("tlhd,tlhe->lhde", g, g).numpy()
        self.gradients += len(g)

    def axes(self) -> tuple[NDArray[np.float64], ...]:
        """Return mean, metric, deviations and synthesis `[n, n]` of unit steps, largest first."""
        if self._axes is None:
            mean = self.sum / self.tokens
            spread = self.squares / self.tokens - np.outer(mean, mean)
            metric = self.price / max(self.gradients, 1)
            ridge = _RIDGE * np.trace(metric, axis1=-2, axis2=-1) / self.shape[2]
            metric = metric + (ridge[..., None, None] + 1e-30) * np.eye(self.shape[2])
            values, vectors = np.linalg.eigh(metric)
            root = (vectors * np.sqrt(values)[..., None, :]) @ vectors.swapaxes(-1, -2)
            back = (vectors / np.sqrt(values)[..., None, :]) @ vectors.swapaxes(-1, -2)
            scaled = _apply(root, _apply(root, spread).T)
            found, turned = np.linalg.eigh((scaled + scaled.T) / 2)
            deviations = np.sqrt(np.maximum(found[::-1], 0.0))
            self._axes = mean, metric, deviations, _apply(back, turned[:, ::-1]).T
        return self._axes

    def chunk(self, step: float) -> BasisChunk:
        """Return the transform with a step."""
        mean, metric, deviations, synthesis = self.axes()
        coarse = int((deviations > COARSE_DEVIATION * step).sum())
        axes = max(int((deviations > LEAST_DEVIATION * step).sum()), 1) - coarse
        axes = min(coarse + -(-axes // _MULTIPLE) * _MULTIPLE, len(deviations))
        whole = (synthesis[:axes] * step).astype(np.float32)
        scale = np.abs(whole[coarse:]).max(0, initial=1e-30) / np.float32(127)
        return BasisChunk(
            mean.astype(np.float32),
            whole[:coarse],
            np.rint(whole[coarse:] / scale).astype(np.int8),
            scale,
            metric.astype(np.float32),
            deviation_class(deviations[:axes] / step),
            step,
        )


def _apply(blocks: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Multiply block-diagonal matrices `[layers, heads, dim, dim]` with `[n, columns]`."""
    dim = blocks.shape[-1]
    parts = x.reshape(-1, dim, x.shape[1])
    return np.asarray((blocks.reshape(-1, dim, dim) @ parts).reshape(x.shape))


def learn_tables(pairs: Iterator[tuple[BasisChunk, torch.Tensor]]) -> SymbolTables:
    """Return the tables of coefficients, from chunks and their elements `[tokens, n]`."""
    counts = np.zeros((CLASSES, SYMBOLS), np.int64)
    for chunk, x in pairs:
        q = chunk.quantise(x).clamp_(-32767, 32767).to(torch.int16)
        count(q.T.contiguous().numpy(), chunk.classes, counts)
    return SymbolTables.learned(counts)
