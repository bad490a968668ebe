"""The inline PTX of sealed kernels does what the plain code beside it does.

No test here can run PTX, and the interpreter runs the plain variant: so the few instructions are
run in a model of them, written from the PTX manual, on random and on extreme words.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from tests.inside import FLIP_SIGNS, SPLIT_DIGITS, SPLIT_NIBBLES
from tests.inside import tile_MOST as MOST

MAGIC = np.float32(12582912.0)


def permuted(a: int, b: int, selector: int) -> int:
    """`prmt.b32`: byte i of the result is the byte of b:a that nibble i of the selector names."""
    pool = (b << 32 | a).to_bytes(8, "little")
    assert not selector & 0x8888  # no sign is replicated
    return int.from_bytes(bytes(pool[selector >> 4 * i & 7] for i in range(4)), "little")


OPS = {
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, n: a >> n,
    "prmt.b32": permuted,
}


def run(code: str, outputs: int, *inputs: int) -> list[int]:
    """The output registers of a block of PTX: $0 and on, then come the inputs."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in code.strip().strip("{}").split(";"):
        if not (words := line.split(None, 1)) or words[0] == ".reg":
            continue
        target, *sources = (x.strip() for x in words[1].split(","))
        registers[target] = OPS[words[0]](*map(value, sources)) & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(outputs)]


def words(count: int) -> list[int]:
    rng = np.random.default_rng(0)
    return [
        0,
        0xFFFFFFFF,
        0x80808080,
        0x7F7F7F7F,
        0x0F0F0F0F,
        *map(int, rng.integers(0, 1 << 32, count)),
    ]


def int8(word: int) -> list[int]:
    return np.frombuffer(word.to_bytes(4, "little"), np.int8).tolist()


def test_nibbles() -> None:
    for word in words(50):
        low, high = run(SPLIT_NIBBLES.value, 2, word)
        packed = word.to_bytes(4, "little")
        assert int8(low) == [b & 15 for b in packed]
        assert int8(high) == [b >> 4 for b in packed]


def test_signs() -> None:
    for word in words(50):
        (out,) = run(FLIP_SIGNS.value, 1, word)
        assert int8(out) == [b - 128 for b in word.to_bytes(4, "little")]


def test_digits() -> None:
    most = int(MOST.value)
    numbers = np.r_[-most:most:97, most, -most, -129:130].astype(np.float32)
    numbers = numbers[: len(numbers) // 4 * 4]
    bits = (numbers + (MAGIC + np.float32(128))).view(np.uint32)
    for four, want in zip(bits.reshape(-1, 4).tolist(), numbers.reshape(-1, 4), strict=True):
        high, low = (np.array(int8(word)) for word in run(SPLIT_DIGITS.value, 2, *four))
        assert (256 * high + low == want).all()
        assert abs(high).max() <= 127
        plain = np.array(four, np.uint32)
        assert (((plain >> 8) & 255).astype(np.uint8).view(np.int8) == high).all()
        assert ((plain ^ 128).astype(np.uint8).view(np.int8) == low).all()
