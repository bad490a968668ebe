"""`check_codec`: the conformance suite for codecs, FlowKV's own on your device, or one you wrote.

FlowKV's own write the same bytes everywhere: seal on one machine, read on any other. Running the
suite with `device="cuda"` proves it for the compiler and the GPU at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from flowkv.core.geometry import LayerGroup
from flowkv.core.layout import GRANULE_BYTES, PageLayout, page_layout
from flowkv.kernels import reference as reference_codec
from flowkv.kernels import (
    transcode,
)
from flowkv.kernels.dispatch import SOUND
from flowkv.kernels.loss import bounds
from flowkv.testing.stories import given, require, st, tell, told

Run = tuple[torch.Tensor, torch.Tensor]

KINDS = (
    "noise",
    "zeros",
    "constant",
    "ramp",
    "outlier channels",
    "outlier tokens",
    "large",
    "tiny",
    "denormal",
    "halves",
    "mixed",
)
"""Of pages that codecs get wrong; see `page_of`."""


class Codec(Protocol):
    """What `check_codec` needs of a codec of your own; K is `[Hk, P, D]`, V `[Hk, P, Dv]`."""

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        """A page as bytes; raises `ValueError` for NaN and infinity."""

    def decode(self, code: bytes) -> Run:
        """What attention reads, float32."""

    def bounds(self, k: torch.Tensor, v: torch.Tensor) -> Run:
        """The most by which each decoded element may differ from the given one, float64."""


def page_of(kind: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Float32 runs `[..., P, D]` of one of `KINDS`; all but "denormal" and "tiny" suit float16."""
    rng = torch.Generator().manual_seed(seed)
    tokens, dim = shape[-2:]
    x = torch.randn(*shape, generator=rng)
    if kind == "zeros":
        x *= 0
        x[..., ::2, :] = -0.0
    elif kind == "constant":
        x = x[..., :1, :1].expand(*shape).clone()
    elif kind == "ramp":
        x = torch.linspace(-3, 5, tokens * dim).view(tokens, dim).expand(*shape).clone()
    elif kind == "outlier channels":
        where = torch.randint(dim, (max(1, dim // 16),), generator=rng)
        x[..., where] = x[..., where] * 0.1 + 300 * x[..., :1, where].sign()
    elif kind == "outlier tokens":
        x[..., torch.randint(tokens, (1,), generator=rng), :] *= 1000
    elif kind == "large":
        x = torch.where(x.abs() < 1, x, 65280 * x.sign())  # bfloat16 has it too
    elif kind == "tiny":
        x *= 2.0 ** float(torch.randint(-30, -10, (1,), generator=rng))
    elif kind == "denormal":
        x = x.sign() * torch.randint(0, 1 << 20, shape, generator=rng).int().view(torch.float32)
    elif kind == "halves":  # ties wherever the scale is 1
        x = torch.randint(-13, 14, shape, generator=rng).float() / 2
        x[..., 0] = 7.0 * x[..., 0].sign() + (x[..., 0] == 0) * 7.0
        x[..., 0, :] = -7.0
    elif kind == "mixed":
        x *= torch.exp2(torch.randint(-24, 12, (*shape[:-1], 1), generator=rng).float())
        x *= torch.rand(*shape, generator=rng) > 0.3
    elif kind != "noise":
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    return x


class CatalogueCodec:
    """A codec of the catalogue as a `Codec`: pages of one layer, through `kernels.transcode`.

    Args:
        codec: One of `CODECS`.
        shape: Hk, P, D, Dv.
        dtype: Of raw pages.
        device: Of the pages.
        backend: As for `kernels.transcode`.
    """

    def __init__(
        self,
        codec: str,
        shape: tuple[int, int, int, int],
        dtype: str = "float32",
        device: str = "cpu",
        backend: str | None = None,
    ) -> None:
        heads, tokens, dim, dim_v = shape
        group = LayerGroup(layers=(0,), kv_heads=heads, head_dim=dim, value_dim=dim_v, dtype=dtype)
        self.raw, self.layout = page_layout(group, tokens), page_layout(group, tokens, codec)
        self.device, self.backend = device, backend

    def moved(
        self, page: bytes, old: PageLayout, new: PageLayout, backend: str | None
    ) -> tuple[bytes, int]:
        """A page in another layout, and the status of that; guards what lies around it."""
        place = old.granules + 2
        arena = torch.full(((place + new.granules + 1) * GRANULE_BYTES,), 0xA5, dtype=torch.uint8)
        arena[GRANULE_BYTES:][: len(page)] = torch.frombuffer(bytearray(page), dtype=torch.uint8)
        arena = arena.to(self.device)
        before = arena.clone()
        at, to = (torch.tensor([x], dtype=torch.int32, device=self.device) for x in (1, place))
        status = transcode(arena, at, to, old, new, backend=backend)
        begin, end = place * GRANULE_BYTES, (place + new.granules) * GRANULE_BYTES
        result = arena[begin:end].clone()
        arena[begin:end] = before[begin:end]
        require(torch.equal(arena, before), "bytes outside of the target were written")
        return result.cpu().numpy().tobytes(), int(status)

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        """Seal a page, twice: the backend and the oracle must write the same bytes."""
        runs = torch.zeros(self.raw.kv_heads, self.raw.run_bytes, dtype=torch.uint8)
        for x, start in ((k, 0), (v, self.raw.v_offset_bytes)):
            part = x.to(getattr(torch, self.raw.dtype)).flatten(1).view(torch.uint8)
            runs[:, start : start + part.shape[1]] = part
        page = runs.numpy().tobytes()
        code, status = self.moved(page, self.raw, self.layout, self.backend)
        same = code, status
        require(
            same == self.moved(page, self.raw, self.layout, "reference"),
            "the backend and the oracle write different bytes",
        )
        if status != SOUND:
            raise ValueError("NaN, infinity, or a scale beyond float16")
        return code

    def decode(self, code: bytes) -> Run:
        """What attention reads; a raw page made of it must hold the same, rounded."""
        page = torch.frombuffer(bytearray(code), dtype=torch.uint8)
        k, v = reference_codec.decoded(page, self.layout, 0, [0])
        raw, status = self.moved(code, self.layout, self.raw, self.backend)
        page = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        for got, exact in zip(reference_codec.decoded(page, self.raw, 0, [0]), (k, v), strict=True):
            expected = reference_codec.narrowed(exact, getattr(torch, self.raw.dtype))
            require(torch.equal(got, expected.float()), "a page decodes to something else")
        require(status == SOUND, "a sealed page decodes to NaN or infinity")
        return k[0], v[0]

    def bounds(self, k: torch.Tensor, v: torch.Tensor) -> Run:
        """The bounds that docs/explain/codecs.md derives."""
        return bounds(self.layout.codec, k, v)


def check_codec(
    codec: str | Codec,
    *,
    shapes: Sequence[tuple[int, int, int, int]] = ((2, 64, 64, 96), (1, 128, 80, 64)),
    dtype: str = "float32",
    device: str = "cpu",
    backend: str | None = None,
    max_examples: int = 40,
) -> None:
    """Runs the conformance suite on a codec; returns if it found no fault. Deterministic.

    Checked on pages of zeros, outliers, extremes, denormals, ties and noise: no element is off by
    more than the bound; what was decoded once and is encoded again stays within the bound; equal
    pages give equal bytes, in a number that depends on their shape alone; NaN and infinity are
    refused; operands are not written to. Of a codec of the catalogue also: this device and backend
    write the very bytes that the oracle writes, and none beside the page.

    Args:
        codec: A name, one of `CODECS`, or a codec of your own.
        shapes: Hk, P, D and Dv of the pages.
        dtype: What elements are rounded to first; of raw pages.
        device: Where the pages of a codec of the catalogue lie.
        backend: Which kernels encode and decode it: "reference", "cpu" or "triton".
        max_examples: Pages to try.

    Raises:
        AssertionError: The codec breaks a rule; the message says which.
    """
    cases = [
        (
            CatalogueCodec(codec, shape, dtype, device, backend)
            if isinstance(codec, str)
            else codec,
            shape,
        )
        for shape in shapes
    ]

    element = getattr(torch, dtype)

    @told(max_examples, shrink=False)  # a smaller seed is no simpler page
    @given(st.sampled_from(cases), *[st.sampled_from(KINDS)] * 2, st.integers(0, 1 << 16))
    def story(
        case: tuple[Codec, tuple[int, int, int, int]], kind: str, kind_v: str, seed: int
    ) -> None:
        one, (heads, tokens, dim, dim_v) = case
        k, v = (
            page_of(kind, (heads, tokens, dim), seed),
            page_of(kind_v, (heads, tokens, dim_v), seed + 1),
        )
        judge(one, k.to(element).float(), v.to(element).float(), element, seed)

    tell(story)


def judge(codec: Codec, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, seed: int) -> None:
    """All rules of `check_codec` on one page, whose elements `dtype` can hold.

    Raises:
        AssertionError: The codec breaks one.
    """
    given_k, given_v = k.clone(), v.clone()
    code = codec.encode(k, v)
    require(torch.equal(k, given_k) and torch.equal(v, given_v), "encode wrote to its operands")
    require(codec.encode(k.clone(), v.clone()) == code, "equal pages must give equal bytes")
    zero = codec.encode(torch.zeros_like(k), torch.zeros_like(v))
    require(len(zero) == len(code), "the number of bytes must depend on the shape alone")
    near = codec.decode(code)
    _within(near, (k, v), codec, "an element is off by more than the bound")
    once = [reference_codec.narrowed(x, dtype).float() for x in near]
    _within(
        codec.decode(codec.encode(*once)),
        (once[0], once[1]),
        codec,
        "what was encoded twice is off by more than the bound",
    )
    for x, bad in ((k, torch.nan), (v, torch.inf), (k, -torch.inf), (v, torch.nan)):
        place = seed % x.numel()
        kept = x.view(-1)[place].item()
        x.view(-1)[place] = bad
        try:
            codec.encode(k, v)
        except ValueError:
            x.view(-1)[place] = kept
        else:
            raise AssertionError(f"{bad} was not refused")


def _within(got: Run, exact: Run, codec: Codec, sentence: str) -> None:
    for x, y, most in zip(got, exact, codec.bounds(*exact), strict=True):
        require(x.shape == y.shape and bool(x.isfinite().all()), "decode gives finite runs")
        require(bool(((x.double() - y.double()).abs() <= most).all()), sentence)
