"""NH-128: three implementations bit for bit, and what it finds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.inside import KEYS, compile_digest, core_digest, digest_of, digests, own_memory

BITS = (1 << 64) - 1
PAGE = 4096
NOISE = np.frombuffer(random.Random(0).randbytes(1 << 20), np.uint8)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_digest()


def mix(x: int) -> int:
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & BITS
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9 & BITS
    return x ^ x >> 32


def defined(data: bytes) -> bytes:
    """The definition, in Python's integers."""
    step, u_sum, v_sum = 0x9E3779B97F4A7C15, 0, 0
    for g, at in enumerate(range(0, len(data), PAGE)):
        granule, products = data[at : at + PAGE], [0, 0]
        for i, start in enumerate(range(0, len(granule), 8)):
            word = int.from_bytes(granule[start : start + 8], "little")
            for one in (0, 1):
                x = word + int(KEYS[one, i]) & BITS
                products[one] += (x & 0xFFFFFFFF) * (x >> 32)
        u = mix(products[0] + (g + 1) * step & BITS)
        u_sum, v_sum = u_sum + u, v_sum + mix(products[1] + u & BITS)
    low = mix(u_sum + v_sum + (len(data) + 1) * step & BITS)
    return low.to_bytes(8, "little") + mix(v_sum + low & BITS).to_bytes(8, "little")


def plain(data: object) -> bytes:
    """By numpy alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_digest, "compiled", None)
        return digest_of(data)


def test_keys_are_those_of_splitmix64() -> None:
    """The first words from state 0, as Vigna's reference gives them."""
    assert list(map(int, KEYS[0, :3])) == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert len(np.unique(KEYS)) == KEYS.size == 1024
    halves = KEYS.view(np.uint32)
    assert halves.min() > 0


GOLDEN = {
    b"": "6739700e57689fcaa891f0bba797e9dc",
    b"abc": "b6634a1c2465443349a3592706ade76c",
    bytes(PAGE): "7ec4b33e9782996a359ee6cafd5a5171",
    bytes(range(256)) * 100 + b"rest": "c5610087fb03cc1d2ef8cb61ff50a3a1",
}


@pytest.mark.parametrize("data", GOLDEN, ids=len)
def test_golden_digests(data: bytes) -> None:
    """The format stands: other digests need another value of `integrity`."""
    assert defined(data).hex() == plain(data).hex() == digest_of(data).hex() == GOLDEN[data]


def test_every_length_wherever_it_lies() -> None:
    for n in [*range(301), *range(PAGE - 9, PAGE + 10), 2 * PAGE - 1, 2 * PAGE, 3 * PAGE + 5]:
        part = NOISE[n % 13 : n % 13 + n]
        assert digest_of(part) == plain(part) == defined(part.tobytes()), n


@given(data=st.binary(max_size=3 * PAGE), n=st.integers(0, 140_000), byte=st.integers(0, 255))
def test_anything(data: bytes, n: int, byte: int) -> None:
    for part in (data, bytes([byte]) * n + data):
        assert digest_of(part) == plain(part)
    assert digest_of(data) == defined(data)


def test_steps_are_digested_alone() -> None:
    for n, step in ((5 * PAGE, PAGE), (5 * PAGE, 2 * PAGE), (1000, 7), (PAGE, 1 << 40), (0, 8)):
        data = NOISE[:n]
        parts = [digest_of(data[at : at + step]) for at in range(0, max(n, 1), step)]
        assert digests(data, step) == b"".join(parts)


def test_memory_that_cannot_be_written_or_is_no_array() -> None:
    own = own_memory(100)
    own[:] = NOISE[:100].tobytes()
    wanted = digest_of(NOISE[:100])
    for form in (own, own.toreadonly(), bytes(own), bytearray(own), own.cast("I")):
        assert digest_of(form) == plain(form) == wanted


# ---- what it finds


def halves(found: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(found, np.uint64).reshape(-1, 2)


def all_differ(pages: Iterator[NDArray[np.uint8]], at_once: int = 1024) -> int:
    """Digests many pages; no half of a digest occurs twice. How many there were."""
    seen, held, size = [], list[NDArray[np.uint8]](), 0

    def take() -> None:
        seen.append(halves(digests(np.concatenate(held), size)))
        held.clear()

    for page in pages:
        held.append(page)
        size = len(page)
        if len(held) == at_once:
            take()
    if held:
        take()
    found = np.concatenate(seen)
    for half in (0, 1):
        assert not collisions(found[:, half])
    return len(found)


PAGES = {
    "noise": NOISE[:PAGE],
    "zeros": np.zeros(PAGE, np.uint8),
    "ones": np.full(PAGE, 255, np.uint8),
    "bfloat16": (np.random.default_rng(1).normal(size=PAGE // 2).astype(np.float32))
    .view(np.uint32)
    .__rshift__(16)
    .astype(np.uint16)
    .view(np.uint8),
}


def flipped(page: NDArray[np.uint8], *bits: int) -> NDArray[np.uint8]:
    other = page.copy()
    for bit in bits:
        other[bit // 8] ^= 1 << bit % 8
    return other


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_bit_of_a_page_counts(page: NDArray[np.uint8]) -> None:
    def changed() -> Iterator[NDArray[np.uint8]]:
        yield page
        for bit in range(8 * PAGE):
            yield flipped(page, bit)

    assert all_differ(changed()) == 8 * PAGE + 1


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_two_bits_at_any_distance(page: NDArray[np.uint8]) -> None:
    rng = random.Random(2)

    def changed() -> Iterator[NDArray[np.uint8]]:
        yield page
        for distance in range(1, 8 * PAGE):
            first = rng.randrange(8 * PAGE - distance)
            yield flipped(page, first, first + distance)

    assert all_differ(changed()) == 8 * PAGE


def test_two_bits_of_a_short_stripe() -> None:
    """All pairs."""
    page = NOISE[:37]

    def changed() -> Iterator[NDArray[np.uint8]]:
        yield page
        for a in range(8 * 37):
            yield flipped(page, a)
            for b in range(a):
                yield flipped(page, a, b)

    assert all_differ(changed()) == 1 + 296 + 296 * 295 // 2


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("bit", [0, 1, 31, 32, 62, 63])
def test_the_same_change_in_two_words(page: NDArray[np.uint8], bit: int) -> None:
    """A bit of two words is flipped, or an amount added to one and taken from the other."""
    words, rng = page.view(np.uint64), random.Random(bit)

    def changed() -> Iterator[NDArray[np.uint8]]:
        yield page
        for distance in range(1, 512):
            a = rng.randrange(512 - distance)
            for amounts in ((1 << bit, -(1 << bit)), (1 << bit, 1 << bit)):
                added = words.copy()
                for place, amount in zip((a, a + distance), amounts, strict=True):
                    added[place] += np.uint64(amount & BITS)
                if bit < 63 or amounts[1] > 0:  # of the last bit both are the same
                    yield added.view(np.uint8)

    with np.errstate(over="ignore"):
        assert all_differ(changed()) > 511


@pytest.mark.parametrize("size", [1, 4, 8, 64, 512, PAGE, 4 * PAGE])
def test_blocks_that_change_places(size: int) -> None:
    """Also where each is the other, turned: their sums of words are equal."""
    base = NOISE[: 16 * PAGE].copy()
    half = NOISE[-size:]
    turned = np.roll(half, size // 2) if size > 1 else half + 1
    with_turned = base.copy()
    for n in range(0, len(base) // size, 2):
        with_turned[n * size : (n + 1) * size] = half
        with_turned[(n + 1) * size : (n + 2) * size] = turned
    rng = random.Random(size)
    for body in (base, with_turned):
        whole, seen = digest_of(body), set[bytes]()
        for _ in range(200):
            a, b = rng.sample(range(len(body) // size), 2)
            other = body.reshape(-1, size).copy()
            other[[a, b]] = other[[b, a]]
            if not np.array_equal(other.ravel(), body):
                seen.add(digest_of(other.ravel()))
        assert whole not in seen and seen


def test_neighbouring_words_and_halves_of_words() -> None:
    words, found = NOISE[:PAGE].view(np.uint64), [digest_of(NOISE[:PAGE])]
    for n in range(511):
        other = words.copy()
        other[[n, n + 1]] = other[[n + 1, n]]
        found.append(digest_of(other))
    for n in range(512):
        other = words.copy().view(np.uint32)
        other[[2 * n, 2 * n + 1]] = other[[2 * n + 1, 2 * n]]
        found.append(digest_of(other))
    assert len(set(found)) == 1024


def test_a_pattern_over_everything() -> None:
    """The same amount added to, or XOR-ed with, every word, granule or other granule."""
    base = NOISE[: 4 * PAGE].view(np.uint64)
    found, rng = [digest_of(base)], random.Random(3)
    for n in range(300):
        pattern = np.uint64(1 << n if n < 64 else rng.getrandbits(64))
        for first, step in ((0, 1), (n % 2, 2)):
            for add in (False, True):
                if n >= 64 or not add:
                    other = base.reshape(4, 512).copy()
                    part = other[first::step]
                    part[:] = part + pattern if add else part ^ pattern
                    found.append(digest_of(other.ravel()))
    assert len(set(found)) == len(found)


def test_shifted_content() -> None:
    base = NOISE[: 8 * PAGE]
    for at_most in (100, PAGE):
        found = [digest_of(base[n : n + 4 * PAGE]) for n in range(at_most)]
        rolled = [digest_of(np.roll(base, n)) for n in range(1, 100)]
        assert len({*found, *rolled}) == at_most + 99


@pytest.mark.parametrize("byte", [0, 1, 128, 255])
def test_equal_bytes_of_other_lengths(byte: int) -> None:
    lengths = [*range(600), *range(PAGE - 20, PAGE + 20), *(PAGE * n for n in range(2, 200))]
    found = {digest_of(np.full(n, byte, np.uint8)) for n in lengths}
    assert len(found) == len(lengths)


def test_equal_bytes_of_any_value() -> None:
    found = {digest_of(np.full(n, byte, np.uint8)) for n in (8, PAGE) for byte in range(256)}
    assert len(found) == 512


def test_avalanche() -> None:
    """A bit that is flipped turns each bit of the digest in half of all cases."""
    rng = np.random.default_rng(4)
    for size in (8, 24, PAGE, 3 * PAGE):
        counts = np.zeros(128)
        trials = 3000
        pages = rng.integers(0, 256, (trials, size), np.uint8)
        bits = rng.integers(0, 8 * size, trials)
        others = pages.copy()
        others[np.arange(trials), bits // 8] ^= (1 << bits % 8).astype(np.uint8)
        before, after = (np.frombuffer(digests(x.ravel(), size), np.uint8) for x in (pages, others))
        counts = np.unpackbits((before ^ after).reshape(trials, 16), axis=1).mean(0)
        assert abs(counts - 0.5).max() < 5 * 0.5 / trials**0.5, size


def collisions(values: NDArray[Any]) -> int:
    """How many values occurred before."""
    values = np.sort(values)
    return int((values[1:] == values[:-1]).sum())


@pytest.mark.parametrize("kind", ["counters", "bits and sums", "sparse"])
def test_near_inputs_collide_by_chance_alone(kind: str) -> None:
    """Any 32 bits of the digests of a million near inputs: as many pairs as random numbers have."""
    count, size = 1 << 20, 64
    rng, number, one = np.random.default_rng(5), np.arange(1 << 20, dtype=np.uint64), np.uint64(1)
    pages = np.zeros((count, size // 8), np.uint64)
    if kind == "counters":
        pages[:, 3] = number
    elif kind == "bits and sums":  # each number another pair of places, of bits, and a sum
        pages[:] = rng.integers(0, 1 << 63, size // 8, np.uint64)
        rows, places = np.arange(count), (number % np.uint64(4)).astype(int)
        pages[rows, places] ^= one << (number >> np.uint64(2) & np.uint64(63))
        pages[rows, 4 + places] += number >> np.uint64(8)
    else:
        pages[np.arange(count), rng.integers(0, 8, count)] = rng.permutation(count) * 977 + 1
    found = np.frombuffer(digests(pages.ravel(), size), np.uint32).reshape(-1, 4)
    n = len(found)
    expected = n * (n - 1) / 2 / 2**32
    for part in range(4):
        assert abs(collisions(found[:, part]) - expected) < 6 * expected**0.5 + 1
    for half in (found[:, :2], found[:, 2:]):
        assert not collisions(half.copy().view(np.uint64).ravel())
