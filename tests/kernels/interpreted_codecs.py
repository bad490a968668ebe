"""The Triton codecs in Triton's interpreter: the oracle's bytes, all of them.

See `interpreted`, which says how and why; this file is run like it. bfloat16 is tested here, for
these kernels widen and narrow it as integers.
"""

from __future__ import annotations

import os

import pytest
import torch

from flowkv.kernels import transcode
from tests.inside import ConfigError, interpreted
from tests.inside import codec as triton_codec
from tests.inside import codecs_KINDS as KINDS
from tests.inside import layout_CODECS as CODECS
from tests.kernels.codec_pages import (
    DTYPES,
    EXTREMES,
    SHAPES,
    SMALL,
    filled,
    layouts_of,
    moved,
    padding,
)
from tests.kernels.scene import int32, layout_of

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/kernels/test_triton_interpreter.py"


def follow(shape: tuple, dtype: str, pages: list, codecs: tuple[str, ...], seed: int = 0) -> None:
    """From raw into the first codec, from there into the next, and so on: as the oracle does."""
    layouts = layouts_of(shape, dtype)
    old = layouts["raw"]
    page = filled(old, pages, seed)
    arena, source = page.arena, page.source
    for codec in codecs:
        new = layouts[codec]
        one, other = (moved(arena, source, old, new, name) for name in ("reference", "triton"))
        assert torch.equal(one.status, other.status)
        assert torch.equal(one.pages(new), other.pages(new))
        assert not other.pages(new)[:, padding(new)].any()
        arena, source, old = one.arena, one.target, new


def test_codecs_are_interpreted() -> None:
    assert interpreted(triton_codec.transcode_kernel)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, *EXTREMES])
def test_codecs_of_small_pages(kind: str, dtype: str) -> None:
    which = (*KINDS, *EXTREMES).index(kind) + DTYPES.index(dtype)
    shape = SMALL[which % len(SMALL)]
    follow(shape, dtype, [(kind, "noise"), ("mixed", kind)], ("kv8", "raw"), seed=which)


PATHS = (
    ("kv8", "kv4c", "kv4h", "raw"),
    ("kv4h", "k8v4", "kv4c", "kv8", "k8v4"),
    ("kv4c", "raw", "raw", "k8v4", "kv4h", "kv8"),
)


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        pytest.param(
            shape, path, marks=[] if (n + m) % len(PATHS) == 0 else pytest.mark.slow, id=f"{n}-{m}"
        )
        for n, shape in enumerate(SHAPES[len(SMALL) :])
        for m, path in enumerate(PATHS)
    ],
)
def test_sealed_into_anything(shape: tuple, path: tuple[str, ...]) -> None:
    which = SHAPES.index(shape) + PATHS.index(path)
    pages = [(KINDS[3 * which % len(KINDS)], KINDS[(2 * which + 5) % len(KINDS)])]
    follow(shape, DTYPES[which % 3], pages, path, which)


@pytest.mark.parametrize("kind", [*KINDS, *EXTREMES])
def test_seal_of_every_kind(kind: str) -> None:
    which = (*KINDS, *EXTREMES).index(kind)
    shape = (1, 64, (64, 80, 96)[which % 3], 64)
    for codec in CODECS[1:]:
        follow(shape, DTYPES[which % 2], [(kind, kind)], (codec,), which)


@pytest.mark.parametrize("codec", ["kv8", "kv4c", "kv4h"])
def test_sealed_large_pages(codec: str) -> None:
    """Several tiles of K and of V, wide heads."""
    follow((1, 256, 64, 64), "bfloat16", [("outlier channels", "mixed")], (codec, "raw"))
    follow((1, 128, 256, 256), "bfloat16", [("mixed", "outlier tokens")], (codec,))


def test_codecs_refuse_and_do_nothing() -> None:
    raw = layout_of(1, 16, dtype="float64")
    arena = torch.zeros(4 * raw.page_bytes, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="backend='reference'"):
        transcode(arena, int32([0]), int32([raw.granules]), raw, raw, backend="triton")
    layouts = layouts_of((2, 16, 20, 24), "float16")
    old, new = layouts["raw"], layouts["kv8"]
    arena = torch.zeros(4 * old.page_bytes, dtype=torch.uint8)
    assert transcode(arena, int32([]), int32([]), old, new, backend="triton").shape == (0, 2)
    page = filled(old, [("noise", "noise")] * 2)
    expected = moved(page.arena, page.source, old, new, "reference")
    wide = torch.stack([page.source, -page.source], 1)
    assert torch.equal(moved(page.arena, wide[:, 0], old, new, "triton").arena, expected.arena)
