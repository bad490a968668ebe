"""Cold pages decoded by Triton, in Triton's interpreter, against the decoder of the CPU.

See `interpreted`, which says how and why; this file is run like it. Symbols and verdicts are the
same. Elements are the same but for sums of float32 products, which each side adds up in an order of
its own: half a unit in the last place of the largest sum, for each of its few dozen terms.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.tiers import Outcome
from flowkv.tiers.disk import DiskTier
from tests.inside import (
    SHIFTS,
    CodedPage,
    CodedSymbols,
    DeviceDecoder,
    KeyTurn,
    PageCoder,
    deviation_class,
    interpreted,
    kvt_basis,
    kvt_device,
    kvt_tier,
    triton_kvt,
)
from tests.kvt import test_tier as tiers
from tests.kvt.pages import TURN, Source, layout, learner, page
from tests.kvt.test_entropy import draw, tables

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/kernels/test_triton_interpreter.py"

CPU = torch.device("cpu")
TOKENS = 8
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
"""Of the largest element; a rounding to another neighbour costs one unit in the last place."""


def walled(data: bytes) -> torch.Tensor:
    """Return bytes with memory right behind them that nothing may read: a read there crashes."""
    room = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    whole = np.frombuffer(memory, np.uint8)
    wall = ctypes.c_void_p(whole.ctypes.data + room)
    assert not ctypes.CDLL(None).mprotect(wall, mmap.PAGESIZE, 0)
    there = whole[room - len(data) : room]
    there[:] = np.frombuffer(data, np.uint8)
    return torch.from_numpy(there)


def int32(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array, np.int32))


def test_cold_is_interpreted() -> None:
    assert interpreted(triton_kvt.symbols_kernel) and interpreted(triton_kvt.elements_kernel)


def spoilt(coded: CodedSymbols, random: np.random.Generator, how: str) -> CodedSymbols:
    """Return a stream with one kind of damage."""
    words, literals = coded.words.copy(), coded.literals.copy()
    if how == "word":
        words[random.integers(len(words))] ^= np.uint16(1 << random.integers(16))
    elif how == "states":  # below what they are between two symbols
        words[1:8:2] &= np.uint16(random.integers(1 << 16))
    elif how == "literal" and len(literals):
        literals[random.integers(len(literals))] ^= np.int16(1 << random.integers(15))
    elif how == "cut":
        words = words[: random.integers(len(words))]
    elif how == "more":
        words = np.append(words, np.uint16(7))
    elif how == "fewer literals":
        literals = literals[: len(literals) // 2]
    elif how == "more literals":
        literals = np.append(literals, np.int16(1))
    elif how == "noise":
        words = random.integers(0, 1 << 16, len(words)).astype(np.uint16)
    return CodedSymbols(words, literals)


DAMAGES = ("word", "states", "literal", "cut", "more", "fewer literals", "more literals", "noise")


def decoded(table: Any, classes: np.ndarray, coarse: int, data: bytes, parts: list[Any]) -> Any:
    """Decode streams, whose bytes end where memory does."""
    none = torch.empty(0)
    basis = triton_kvt.BasisTables(
        int32(table.slots.view(np.int32).ravel()),
        int32(classes.astype(np.int32) | SHIFTS[classes].astype(np.int32) << 8),
        int32([[0, len(classes), coarse, 0, 1, 1]]),
        *(none, none, torch.empty(1, 16), torch.empty(1, 64), none, none, none),
    )
    spans = [(0, 1, n) for n in range(len(parts))]
    places = int32(parts)[:, None], int32(spans)
    return triton_kvt.decode_symbols(
        basis, triton_kvt.CodedBatch(walled(data), *places, none, none), TOKENS
    )


@pytest.mark.parametrize("deviation", [0.5, 900.0], ids=["one word", "two words"])
def test_cold_symbols_end_with_their_memory(deviation: float) -> None:
    table, classes = tables(), deviation_class(np.full(16, deviation))
    q = draw(np.random.default_rng(1), np.full(16, deviation), TOKENS)
    words = table.encode(q, classes).words[:8]
    found = decoded(table, classes, 16, words.tobytes(), [(0, 8, 0, 0)])
    assert found.bad.tolist() == [1]


@pytest.mark.parametrize(("token", "bad"), [(TOKENS - 1, 0), (TOKENS, 1), (255, 1)])
def test_cold_symbols_of_tokens_behind_a_page(token: int, bad: int) -> None:
    table, classes = tables(), deviation_class(np.full(2, 1.0))
    coded = table.encode(draw(np.random.default_rng(2), np.full(2, 1.0), TOKENS), classes)
    data = coded.words.tobytes() + coded.literals.tobytes() + bytes([0, token])
    parts = [(0, len(coded.words), len(coded.literals), 2)]
    assert decoded(table, classes, 1, data, parts).bad.tolist() == [bad]


@settings(max_examples=25)
@given(
    rows=st.integers(0, 5),
    coarse=st.integers(0, 5),
    seed=st.integers(0, 1 << 20),
    damages=st.lists(st.sampled_from(("none", *DAMAGES)), min_size=1, max_size=10),
)
def test_cold_symbols_and_damages(rows: int, coarse: int, seed: int, damages: list[str]) -> None:
    random, table, coarse = np.random.default_rng(seed), tables(seed % 3), min(coarse, rows)
    deviations = 2.0 ** random.uniform(-4, 10, rows)
    classes = deviation_class(deviations)
    streams, data, parts = list[CodedSymbols](), bytearray(random.bytes(seed % 2)), list[Any]()
    for how in damages:
        q = draw(random, deviations, TOKENS)
        wild = random.random(q.shape) < 0.1  # of another scale than the class says
        q[wild] = random.integers(-32767, 32768, int(wild.sum()))
        streams.append(spoilt(table.encode(q, classes), random, how))
        tokens = random.integers(0, TOKENS + (how == "noise"), random.integers(3)).astype(np.uint8)
        parts.append((len(data), *map(len, streams[-1]), len(tokens)))
        data += b"".join(one.tobytes() for one in (*streams[-1], tokens))
    found = decoded(table, classes, coarse, bytes(data), parts)
    for n, (at, words, literals, whole) in enumerate(parts):
        wide, small = (
            np.empty((coarse, TOKENS), np.float32),
            np.empty((rows - coarse, TOKENS), np.int8),
        )
        (sound,) = table.decode(bytes(data), np.array([parts[n]]), classes, wide, small)
        behind = at + 2 * (words + literals)
        assert (not found.bad[n]) == (
            sound and max(data[behind : behind + whole], default=0) < TOKENS
        )
        assert not found.coarse[n, 0, :, coarse:].any()
        if sound:
            assert np.array_equal(found.coarse[n, 0, :, :coarse], wide.T)
            assert np.array_equal(found.fine[n, 0, :, : rows - coarse], small.T)


TURNS = {
    "halves": TURN,
    "interleaved, a part": KeyTurn(TURN.inv_freq[:3], interleaved=True, start=5),
    "halves, a part": KeyTurn(TURN.inv_freq[:3], start=9),
    "none": None,
}
SHAPES: dict[str, dict[str, Any]] = {
    "even": {"size": TOKENS},
    "odd": {"size": 24, "kv_heads": 1, "head_dim": 17, "value_dim": 33, "layers": (0, 1)},
}


@lru_cache
def learned(dtype: str, turn: str, shape: str) -> tuple[Source, PageCoder]:
    source = Source(layout(dtype, **SHAPES[shape]))
    return source, learner(source, TURNS[turn]).coder(3e-3, {})


def compare(coder: PageCoder, pages: list[tuple[bytes, int, int]]) -> list[bool]:
    """Decode pages in both ways, each from one layer on; return which were sound."""
    step = coder.layout.stripe_stride_bytes
    ours, theirs = ([bytearray(b"\xff" * (n * step + 64)) for *_, n in pages] for _ in range(2))
    batch = [
        CodedPage(coder, data, memoryview(out)[:-64], first, count, print)
        for (data, first, count), out in zip(pages, ours, strict=True)
    ]
    found = DeviceDecoder(coder, CPU).decode_batch(batch)
    for (data, first, count), own, out, sound in zip(pages, ours, theirs, found, strict=True):
        target = memoryview(out)[:-64]
        assert coder.decode(memoryview(data), target, first, count) is sound
        assert set(own[-64:]) == {255} and (sound or set(own) == {255})
        parts = (coder.views(memoryview(x)[:-64], count) for x in (own, out))
        for got, wanted in zip(*parts, strict=True) if sound else ():
            most = wanted[wanted.isfinite()].abs().max().item() * TOLERANCE[coder.layout.dtype]
            torch.testing.assert_close(
                got.float(), wanted.float(), rtol=0, atol=most, equal_nan=True
            )
    return found


CASES = [("float32", turn, "even") for turn in TURNS]
CASES += [("bfloat16", "halves", "odd"), ("float16", "halves", "even")]


@pytest.mark.parametrize(("dtype", "turn", "shape"), CASES)
def test_cold_pages(dtype: str, turn: str, shape: str) -> None:
    source, coder = learned(dtype, turn, shape)
    bodies = [page(coder, source, number) for number in (0, 1, 70_000)]
    for view in coder.views(memoryview(bodies[1])):
        view[:, :, 5::2] *= 900  # an odd number of tokens is stored whole
    pages = [
        coder.encode(memoryview(body), n) for body, n in zip(bodies, (0, 1, 70_000), strict=True)
    ]
    parts = [coder.parts(memoryview(data or b"")) for data in pages]
    assert [bool(found is not None and found[1][:, 3].any()) for found in parts] == [
        True,
        True,
        False,
    ]
    last = coder.layout.layers - 1
    spans = (0, last + 1), (last, 1), (0, 1)
    assert all(
        compare(coder, [(data or b"", *span) for data, span in zip(pages, spans, strict=True)])
    )


def test_cold_pages_under_another_default_dtype() -> None:
    """Programs set one while they load models; coefficients are float32."""
    source, coder = learned("float32", "halves", "even")
    data = coder.encode(memoryview(page(coder, source, 3)), 3) or b""
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert compare(coder, [(data, 0, 3)]) == [True]
    finally:
        torch.set_default_dtype(torch.float32)


def test_cold_float16_saturates_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    source, coder = learned("float16", "none", "even")
    body = page(coder, source, 2)
    coder.views(memoryview(body))[1][:, :, 5] = 65504.0
    data, out = coder.encode(memoryview(body), 2) or b"", bytearray(len(body))
    assert compare(coder, [(data, 0, 3)]) == [True]
    monkeypatch.setattr(kvt_device, "BATCH_BYTES", 1)
    out = out[: coder.layout.stripe_stride_bytes]
    batch = [CodedPage(coder, data, memoryview(out), n, 1, print) for n in range(3)]
    assert DeviceDecoder(coder, CPU).decode_batch(batch) == [True], "one page, whatever it takes"


def test_cold_chunks_of_some_layers_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other layers are neither decoded nor judged."""
    monkeypatch.setattr(kvt_basis, "MOST_DIMS", 32)
    monkeypatch.setattr(kvt_basis, "HEAD_DIMS", 16)
    source = Source(layout(size=TOKENS))
    coder = learner(source).coder(1e-3, {})
    assert len({(one.layers.start, one.heads.start) for one in coder.places}) == 4
    data = coder.encode(memoryview(page(coder, source, 3)), 3) or b""
    found = coder.parts(memoryview(data))
    assert found is not None
    damaged, at = bytearray(data), int(found[1][2, 0])  # keys of the last layer
    assert coder.places[2].layers == slice(2, 3)
    damaged[at : at + 8] = bytes(8)
    pages = [
        *((data, 0, 3), (bytes(damaged), 0, 2), (bytes(damaged), 1, 2), (data[:-1], 0, 3)),
        (b"", 0, 1),
    ]
    assert compare(coder, pages) == [True, True, False, False, False]


@lru_cache
def one_page() -> tuple[PageCoder, bytes]:
    source, coder = learned("float32", "halves", "even")
    return coder, coder.encode(memoryview(page(coder, source, 0)), 0) or b""


@settings(max_examples=5)
@given(
    places=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)), min_size=1, max_size=3)
)
def test_cold_damaged_pages(places: list[tuple[int, int]]) -> None:
    coder, good = one_page()
    pages = [bytearray(good) for _ in (*places, None)]
    for damaged, (at, bit) in zip(pages, places, strict=False):
        damaged[at % len(good)] ^= 1 << bit
    assert compare(coder, [(bytes(one), 0, 3) for one in pages])[-1]


def test_cold_tier_decodes_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers lie on a device that decodes, here the interpreter."""
    monkeypatch.setattr(kvt_tier, "DEVICES", {"cpu"})
    tier = tiers.made(DiskTier(tmp_path, 64 << 20))
    tiers.store(tier, range(3))
    step, got = tiers.STEP, []
    for _ in range(2):  # for a trial, then in earnest
        answer, own = tiers.load(tier, 1, 1, 1)
        assert answer.outcome is Outcome.HIT and tiers.near(own, tiers.PAGES[1][step : 2 * step])
        assert answer.info == tiers.info(fidelity=tiers.COLD)
        got.append(own)
        while not tier._device._proven.get(tiers.CODER.name):
            time.sleep(0.01)
    assert got[0] == got[1] and tier.bases.measured()["device_pages"] == 1
    tier.close()
