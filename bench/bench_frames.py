"""Cost of checking, encrypting and compressing frames, as ratios within one run.

    python -m pytest bench/bench_frames.py -s

All ways take a turn in every round; a figure is the median over rounds, with the 10th and the 90th
percentile beside it. Small differences are taken between fastest rounds, as noise only adds. Gets
are those of a disk tier over real files, with the engine that this machine allows. Pages for the
lossless layer are keys and values of the trained fixture model over source text, in the order in
which raw pages hold them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from bench.figures import LAYOUT, finish, frames, page_info, ratios, repeated, show, turns
from flowkv.compiled.digest import compile_digest
from flowkv.core.digest import digests
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.tiers.base import Load, Outcome, Store
from flowkv.tiers.digest import CHECK, check_frames
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.frame import Envelope, Integrity, Keyring, describe, fixed_fields, pack_header
from flowkv.tiers.lossless import Lossless, unpack_stripe
from tests.fixture_model import load_tiny, stdlib_text

ROUND_BYTES = 64 << 20
STRIPES = 16
SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20}
each_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


def envelope_of(integrity: Integrity) -> Envelope:
    return Envelope(integrity=integrity, keyring=Keyring(bytes(32)))


class Getter:
    """A disk tier that holds the frames; a call reads all of them."""

    def __init__(self, path: Path, items: list[Store], envelope: Envelope) -> None:
        self.tier = DiskTier(path, 4 * ROUND_BYTES, envelope=envelope)
        self.target, self.count = memoryview(bytearray(ROUND_BYTES)), len(items)
        size = items[0].body.nbytes
        self.tier.submit_store(items)
        finish(self.tier, self.count, Outcome.STORED)
        self.loads = [
            Load(item.key, self.target[n * size : (n + 1) * size], LAYOUT)
            for n, item in enumerate(items)
        ]
        self()
        assert all(load.target == item.body for load, item in zip(self.loads, items, strict=True))

    def __call__(self) -> None:
        self.tier.submit_load(self.loads)
        finish(self.tier, self.count, Outcome.HIT)


@pytest.fixture
def getters(tmp_path: Path) -> Iterator[Callable[[list[Store], Envelope], Getter]]:
    made: list[Getter] = []

    def make(items: list[Store], envelope: Envelope) -> Getter:
        made.append(Getter(tmp_path / str(len(made)), items, envelope))
        return made[-1]

    yield make
    for getter in made:
        getter.tier.close()


class Staged:
    """Frames as a disk delivers them, and the ways to take them out."""

    def __init__(self, items: list[Store]) -> None:
        self.size = items[0].body.nbytes
        heads = [describe(*item[:3]) for item in items]
        data = b"".join(
            pack_header(head) + bytes(item.body) for head, item in zip(heads, items, strict=True)
        )
        self.memory = np.frombuffer(data, np.uint8).copy()
        target = np.zeros(ROUND_BYTES + GRANULE_BYTES, np.uint8)
        start = -target.ctypes.data % GRANULE_BYTES  # as pages in a pool are
        self.target = target[start : start + ROUND_BYTES]
        self.expected = np.frombuffer(b"".join(map(fixed_fields, heads)), np.uint8).reshape(-1, 256)
        self.starts = [n * (GRANULE_BYTES + self.size) for n in range(len(items))]
        at, to = self.memory.ctypes.data, self.target.ctypes.data
        self.rows = np.array(
            [
                (
                    *(at + start, GRANULE_BYTES, at + start + GRANULE_BYTES, self.size),
                    *(to + n * self.size, self.size // STRIPES, STRIPES, 0, STRIPES, 0),
                )
                for n, start in enumerate(self.starts)
            ],
            CHECK,
        )

        self.keys = [item.key for item in items]
        self.sealed: dict[Integrity, list[memoryview]] = {}
        for integrity in ("xxh3", "aead"):
            envelope = envelope_of(integrity)
            sealed = [envelope.seal(*item[:3]) for item in items]
            self.sealed[integrity] = [
                memoryview(bytearray(b"".join([frame.header, *frame.parts]))) for frame in sealed
            ]

    def open(self, integrity: Integrity) -> None:
        """One by one, as tiers do that do not use the compiled call."""
        envelope, target = envelope_of(integrity), memoryview(self.target)
        for key, data in zip(self.keys, self.sealed[integrity], strict=True):
            header = envelope.head(data, key)
            envelope.open(header, data[GRANULE_BYTES:], target, 0, STRIPES)

    def check(self) -> None:
        assert not check_frames(self.rows, self.expected).any()

    def copy(self) -> None:
        for n, start in enumerate(self.starts):
            body = self.memory[start + GRANULE_BYTES : start + GRANULE_BYTES + self.size]
            self.target[n * self.size : (n + 1) * self.size] = body


@each_size
def test_digests(size: int, getters: Callable[[list[Store], Envelope], Getter]) -> None:
    """What checking adds to copying, as a part of a get; what tags cost in its place."""
    items = frames(size, ROUND_BYTES)
    plain, keyed = (getters(items, envelope_of(name)) for name in ("xxh3", "aead"))
    staged = Staged(items)
    took = turns({"get": plain, "get, aead": keyed}, 25)
    ways: dict[str, Callable[[], object]] = {"check": staged.check, "copy": staged.copy}
    for name in ("xxh3", "aead"):
        ways[f"open {name}"] = partial(staged.open, name)
    cpu = turns(ways, 25, time.thread_time)
    print(f"\n{size >> 10} KiB in {STRIPES} stripes, engine {plain.tier.engine}")
    show("get, GB/s", [ROUND_BYTES / second / 1e9 for second in took["get"]])
    show("check and copy, GB/s and core", [ROUND_BYTES / second / 1e9 for second in cpu["check"]])
    show("copy alone / check and copy", ratios(cpu["copy"], cpu["check"]))
    show("aead: get with tags / get with digests", ratios(took["get, aead"], took["get"]))
    least = {name: min(seconds) for name, seconds in (took | cpu).items()}
    print("  fastest round of each way:")
    added = least["check"] - least["copy"]
    show("digests: (check and copy - copy) / get", [added / least["get"]] * 2)
    more = least["open aead"] - least["open xxh3"]
    show("aead: more work of a core / get and that, no overlap", [more / (least["get"] + more)] * 2)
    show("aead: (get with tags - get) / get with tags", [1 - least["get"] / least["get, aead"]] * 2)


@pytest.mark.parametrize("size", [4 << 10, 64 << 10, 1 << 20])
def test_nh_128(size: int) -> None:
    """The digest alone, over memory that fits the caches and that does not."""
    noise = np.frombuffer(np.random.default_rng(0).bytes(ROUND_BYTES), np.uint8)
    start = time.process_time()
    compile_digest()
    print(f"\nNH-128, {size >> 10} KiB; loaded or compiled in {time.process_time() - start:.2f} s")
    copy = np.zeros_like(noise)
    for name, count in (("in cache", 1), ("in memory", ROUND_BYTES // size)):
        parts = [noise[n * size : (n + 1) * size] for n in range(count)]
        targets = [copy[n * size : (n + 1) * size] for n in range(count)]
        words, times = noise[: count * size].view(np.uint64), max(1, ROUND_BYTES // size // count)
        ways: dict[str, Callable[[], object]] = {
            "digest": lambda whole=noise[: count * size]: digests(whole, size),
            "xxh3_128": lambda parts=parts: [xxhash.xxh3_128_digest(part) for part in parts],
            "read (sum of words)": words.sum,
            "copy": lambda parts=parts, targets=targets: [*map(np.copyto, targets, parts)],
        }
        many = {way: repeated(call, times) for way, call in ways.items()}
        took = turns(many, 15, time.thread_time)
        for way in ways:
            n_bytes = times * count * size
            show(f"{way}, {name}, GB/s and core", [n_bytes / s / 1e9 for s in took[way]])
        show(f"digest / read, {name}", ratios(took["read (sum of words)"], took["digest"]))


def test_before_it_is_compiled() -> None:
    noise = np.frombuffer(np.random.default_rng(0).bytes(ROUND_BYTES), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowkv.core.digest.compiled", None)
        took = turns({"numpy": lambda: digests(noise, 1 << 18)}, 9, time.thread_time)
    print()
    show("NH-128 in numpy, GB/s and core", [ROUND_BYTES / s / 1e9 for s in took["numpy"]])


@cache
def pages(dtype: torch.dtype, page: int) -> tuple[list[bytes], int]:
    """Raw pages of the fixture model over 4,096 tokens, and the bytes of a stripe."""
    ids = torch.tensor(list(stdlib_text(4096)))[None]
    with torch.no_grad():
        out = load_tiny(dtype)(ids, attention_mask=torch.ones_like(ids), use_cache=True)
    found = []
    for start in range(0, 4096, page):
        stripes = [
            torch.stack(
                [part[0, :, start : start + page] for part in (layer.keys, layer.values)], 1
            )
            for layer in out.past_key_values.layers
        ]
        found.append(b"".join(x.contiguous().view(torch.int16).numpy().tobytes() for x in stripes))
    return found, len(found[0]) // len(stripes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [64, 256])
def test_lossless(dtype: torch.dtype, page: int) -> None:
    """Ratio and rates on keys and values of a trained model."""
    bodies, step = pages(dtype, page)
    info, lossless = page_info(step), Lossless(lambda: 1.0)
    packed = [lossless.pack(info, memoryview(body)) for body in bodies]
    kept = [part for part in packed if part is not None]
    total = sum(map(len, bodies))
    stripes, target = [], memoryview(bytearray(step))
    for part in kept:
        offset = 0
        for size in np.frombuffer(part.sizes, "<u4").tolist():
            if size < step:
                stripes.append(part.data[offset : offset + size])
            offset += -(-size // GRANULE_BYTES) * GRANULE_BYTES
    took = turns(
        {
            "pack": lambda: [lossless.pack(info, memoryview(body)) for body in bodies],
            "unpack": lambda: [unpack_stripe(stripe, target) for stripe in stripes],
        },
        15,
        time.thread_time,
    )
    print(f"\n{dtype}, pages of {page}, stripes of {step >> 10} KiB, {len(kept)} of {len(packed)}")
    stored = sum(len(part.data) for part in kept)
    show("smaller, aligned to 4 KiB", [len(kept) * len(bodies[0]) / stored] * 2)
    show("smaller, bytes of stripes", [len(stripes) * step / sum(map(len, stripes))] * 2)
    show("pack, GB/s and core", [total / second / 1e9 for second in took["pack"]])
    show("unpack, GB/s and core", [len(stripes) * step / s / 1e9 for s in took["unpack"]])
