"""Codecs: the format byte by byte, the twin bit by bit, the bounds, and what is refused.

The Triton kernel is held to the same oracle in `interpreted_codecs`.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.kernels import transcode
from flowkv.testing import check_codec
from tests.inside import (
    GRANULE_BYTES,
    SOUND,
    ConfigError,
    GeometryError,
    bounds,
    by_token,
    decoded,
    dispatch,
    page_of,
    rotate,
    turning,
)
from tests.inside import codecs_KINDS as KINDS
from tests.inside import layout_CODECS as CODECS
from tests.inside import pages as cpu
from tests.inside import reference as reference_codec
from tests.kernels.codec_pages import (
    DTYPES,
    EXTREMES,
    SHAPES,
    filled,
    layouts_of,
    moved,
    padding,
    status_of,
)
from tests.kernels.scene import int32, layout_like, layout_of

SEALED = CODECS[1:]
kinds = st.sampled_from((*KINDS, *EXTREMES))


@settings(max_examples=20)
@given(data=st.data())
def test_the_twin_writes_the_oracles_bytes(data: st.DataObject) -> None:
    """From raw into any codec, then from there into any other."""
    draw = data.draw
    layouts = layouts_of(draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES)))
    first, second = (draw(st.sampled_from(sorted(layouts))) for _ in range(2))
    pages = draw(st.lists(st.tuples(kinds, kinds), min_size=1, max_size=2))
    given_pages = filled(layouts["raw"], pages, draw(st.integers(0, 999)))
    arena, source, old = given_pages.arena, given_pages.source, layouts["raw"]
    for codec in (first, second):
        new = layouts[codec]
        one, other = (moved(arena, source, old, new, name) for name in ("reference", "cpu"))
        assert torch.equal(one.status, other.status)
        assert torch.equal(one.pages(new), other.pages(new))
        assert not one.pages(new)[:, padding(new)].any()
        arena, source, old = one.arena, one.target, new


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["noise", *EXTREMES])
def test_status_names_the_layer(codec: str, dtype: str, kind: str) -> None:
    layouts = layouts_of((2, 64, 64, 80), dtype)
    raw, new = layouts["raw"], layouts[codec]
    pairs = [("noise", "noise"), (kind, "noise"), ("noise", kind)]
    page = filled(raw, pairs, seed=5)
    # Only layer 1 of the others is special: the extremes of layer 0 become noise.
    calm = filled(raw, [("noise", "noise")] * 3, seed=5)
    stride = raw.stripe_stride_bytes
    for granule in page.source.tolist():
        begin = granule * GRANULE_BYTES
        page.arena[begin : begin + stride] = calm.arena[begin : begin + stride]
    expected = [[SOUND, status_of(k[1], v[1], codec)] for k, v in zip(page.k, page.v, strict=True)]
    assert expected[0] == [SOUND, SOUND]
    for backend in ("reference", "cpu"):
        assert moved(page.arena, page.source, raw, new, backend).status.tolist() == expected


def test_extremes_are_what_they_are_called() -> None:
    x = filled(
        layouts_of((1, 64, 64, 64), "float32")["raw"], [(kind, "noise") for kind in EXTREMES]
    )
    said = {
        kind: [status_of(x.k[i, 0], x.v[i, 0], codec) for codec in SEALED]
        for i, kind in enumerate(EXTREMES)
    }
    assert said["largest"] == [0, 0, 0, 0] and said["huge"] == [2, 2, 2, 2]
    assert said["beyond"] == [0, 0, 2, 0]  # only an offset has to hold the element itself
    assert said["nan"] == said["infinite"] == said["nan and huge"] == [1, 1, 1, 1]


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_any_number_of_slices(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = layouts_of((2, 64, 64, 64), "bfloat16")
    raw, new = layouts["raw"], layouts["kv4c"]
    page = filled(raw, [("noise", "nan"), ("mixed", "ramp"), ("huge", "noise")])
    one = moved(page.arena, page.source, raw, new, "cpu")
    monkeypatch.setattr(cpu, "slices", lambda work, least: parts)
    other = moved(page.arena, page.source, raw, new, "cpu")
    assert torch.equal(one.arena, other.arena) and torch.equal(one.status, other.status)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("codec", CODECS)
def test_nothing_to_do(codec: str, backend: str) -> None:
    raw = layout_of(1, 64, page_size=64)
    arena = torch.zeros(4 * raw.page_bytes, dtype=torch.uint8)
    new = layout_like(raw, codec)
    assert transcode(arena, int32([]), int32([]), raw, new, backend=backend).shape == (0, 2)


def test_lists_may_be_strided() -> None:
    layouts = layouts_of((1, 16, 20, 24), "float16")
    raw, new = layouts["raw"], layouts["kv8"]
    page = filled(raw, [("noise", "noise")] * 2)
    expected = moved(page.arena, page.source, raw, new, "cpu")
    wide = torch.stack([page.source, -page.source], 1)
    assert torch.equal(moved(page.arena, wide[:, 0], raw, new, "cpu").arena, expected.arena)


def test_where_nibbles_lie() -> None:
    """Whole numbers up to 7 have the scale 1, so that a nibble is a number and 8."""
    raw = layouts_of((1, 64, 64, 64), "float32")["raw"]
    page = filled(raw, [("halves", "halves")])
    k, v = (x[0, 0, 0].round() for x in (page.k, page.v))
    begin = GRANULE_BYTES
    page.arena[begin : begin + raw.run_bytes] = torch.cat([k, v]).flatten().view(torch.uint8)
    v4 = (v.T[:, :32] + 8 + 16 * (v.T[:, 32:] + 8)).to(torch.uint8)  # token i, token i + 32
    for codec in ("k8v4", "kv4c", "kv4h"):
        new = layout_like(raw, codec)
        run = moved(page.arena, page.source, raw, new, "reference").pages(new)[0]
        at = new.v_offset_bytes
        assert torch.equal(run[at : at + v4.numel()].view(v4.shape), v4)
        scales = run[new.v_scale_offset_bytes :][:128].view(torch.float16)
        assert torch.equal(scales, torch.ones(64).half())
    # The transform of one 56 on the diagonal is +-7 everywhere: a row of a Hadamard matrix.
    x = torch.diag(torch.full((64,), 56.0))
    page.arena[begin : begin + x.numel() * 4] = x.flatten().view(torch.uint8)
    new = layout_like(raw, "kv4h")
    run = moved(page.arena, page.source, raw, new, "reference").pages(new)[0]
    index = torch.arange(64)
    odd = sum((index[:, None] & index[None, :]) >> bit & 1 for bit in range(6)) % 2
    q = (1 - 2 * odd) * 7 + 8
    assert torch.equal(run[: 64 * 32].view(64, 32), (q[:, :32] + 16 * q[:, 32:]).to(torch.uint8))


PINNED = {
    "kv8": "0cbfae4e229bc87b",
    "k8v4": "7f95ee797f4c5f90",
    "kv4c": "60738040cb4d0b1e",
    "kv4h": "9186ec1998c54ff2",
}
"""Frames on disk hold these bytes: a change wants a codec of another name."""


@pytest.mark.parametrize("codec", SEALED)
def test_the_format_is_pinned(codec: str) -> None:
    raw = layout_of(2, 80, 96, 64, "bfloat16")
    flat = torch.arange(2 * 2 * 64 * 176, dtype=torch.float64)
    wave = (torch.remainder(flat * 0.61803398875, 1.0) * 2 - 1) * torch.exp2(flat % 23 - 11)
    arena = torch.zeros(2 * raw.page_bytes, dtype=torch.uint8)
    data = wave.float().to(torch.bfloat16).view(2, -1).view(torch.uint8)
    for layer in range(2):
        begin = layer * raw.stripe_stride_bytes
        arena[begin : begin + raw.stripe_bytes] = data[layer]
    new = layout_like(raw, codec)
    page = moved(arena, int32([0]), raw, new, "reference").pages(new)
    assert hashlib.sha256(page.numpy().tobytes()).hexdigest()[:16] == PINNED[codec]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_conformance(codec: str, dtype: str) -> None:
    check_codec(codec, dtype=dtype, max_examples=15)


@pytest.mark.parametrize("codec", ["raw", "kv8"])
def test_conformance_of_small_pages(codec: str) -> None:
    check_codec(codec, shapes=((3, 16, 20, 24), (1, 8, 7, 5)), dtype="float16", max_examples=15)


@settings(max_examples=12)
@given(st.sampled_from(KINDS), st.sampled_from([64, 80, 96, 128, 256]), st.integers(0, 999))
def test_kv4h_is_bounded_in_its_own_basis(kind: str, dim: int, seed: int) -> None:
    """Element by element where it is encoded; norms where it is used."""
    raw = layout_of(1, dim, 64, 64, layers=1)
    page = filled(raw, [(kind, "zeros")], seed)
    new = layout_like(raw, "kv4h")
    got = moved(page.arena, page.source, raw, new, "cpu")
    near = decoded(got.arena, new, 0, got.target.tolist())[0][0, 0].double()
    x = page.k[0, 0, 0].double()
    lost = turning(x)
    slack = lost * (x.norm(dim=-1) + near.norm(dim=-1))[:, None] * 1.01
    y = rotate(x)
    most = y.abs().amax(-1, keepdim=True) + slack
    bound = by_token(torch.cat([y, most], -1), 7)[:, :dim] + slack
    assert ((rotate(near) - y).abs() <= bound).all()
    norm = bounds("kv4h", x, x)[0][:, 0]
    assert ((near - x).norm(dim=-1) <= norm).all()


@pytest.mark.parametrize("dim", [20, 64, 80, 96, 128, 256])
def test_the_transform_is_orthonormal(dim: int) -> None:
    x = torch.randn(50, dim)
    y = rotate(x)
    torch.testing.assert_close(rotate(y), x)
    torch.testing.assert_close(y @ rotate(torch.ones(dim)), x @ torch.ones(dim))
    block = dim & -dim
    other = x.clone()
    other[:, :block] = 0  # blocks do not mix
    assert torch.equal(rotate(other)[:, block:], y[:, block:])


@pytest.mark.parametrize("codec", ["kv8", "k8v4"])
def test_symmetric_codes_of_decoded_pages_are_the_same(codec: str) -> None:
    """Not only within the bound: while scales are normal numbers, nothing more is lost."""
    raw = layout_of(2, 64, page_size=64)
    new = layout_like(raw, codec)
    page = filled(raw, [("noise", "outlier channels"), ("ramp", "noise")])
    once = moved(page.arena, page.source, raw, new, "cpu")
    back = moved(once.arena, once.target, new, raw, "cpu")
    twice = moved(back.arena, back.target, raw, new, "cpu")
    assert torch.equal(once.pages(new), twice.pages(new))


@pytest.mark.parametrize("last", ["k8v4", "kv4c", "kv4h"])
def test_losses_of_demotion_add_up(last: str) -> None:
    raw = layout_of(2, 64, page_size=64, dtype="bfloat16")
    warm, cold = layout_like(raw, "kv8"), layout_like(raw, last)
    page = filled(raw, [(kind, kind) for kind in KINDS])
    first = moved(page.arena, page.source, raw, warm, "cpu")
    second = moved(first.arena, first.target, warm, cold, "cpu")
    assert not first.status.any() and not second.status.any()
    for layer in range(2):
        exact = page.k[:, layer], page.v[:, layer]
        between = decoded(first.arena, warm, layer, first.target.tolist())
        end = decoded(second.arena, cold, layer, second.target.tolist())
        for x, y, *losses in zip(exact, end, bounds("kv8", *exact), bounds(last, *between)):  # noqa: B905
            assert ((x.double() - y.double()).abs() <= sum(losses)).all()


MUTATIONS = {
    "rounds down": ("rint", torch.floor),
    "rounds up": ("rint", torch.ceil),
    "rounds halves away": ("rint", lambda t: t.sign() * (t.abs() + 0.502).floor()),
    "forgets a sign": ("rotate", lambda x: rotate(x).abs()),
    "shifts nibbles": ("_packed", lambda q: q.roll(1, -1)[..., ::2] | q[..., 1::2] << 4),
    "narrow scales": ("to_half", lambda x: _halved(x, 1 - 2.0**-6)),
    "wide scales": ("to_half", lambda x: _halved(x, 1 + 2.0**-6)),
    "wrong reciprocals": ("_reciprocal", lambda s: torch.where(s == 0, s, 0.99 / s)),
}


def _halved(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * factor).half(), x.abs() > 65504


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_codec_that_errs_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are tight enough to see any of these, in the oracle itself."""
    attribute, wrong = MUTATIONS[name]
    monkeypatch.setattr(reference_codec, attribute, wrong)
    codec = "kv4h" if attribute == "rotate" else "kv4c"
    with pytest.raises(AssertionError, match=r"bound|finite"):
        check_codec(codec, backend="reference", max_examples=25)


@pytest.mark.parametrize("codec", SEALED)
def test_a_twin_that_errs_is_noticed(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(arena, source, target, old, new):  # type: ignore[no-untyped-def]
        status = reference_codec.transcode(arena, source, target, old, new)
        arena[int(target[0]) * GRANULE_BYTES + 5] ^= 1
        return status

    monkeypatch.setattr(dispatch, "resolve", dispatch.resolve)
    monkeypatch.setattr("flowkv.kernels.cpu.operations.transcode", wrong)
    dispatch.resolve.cache_clear()
    try:
        with pytest.raises(AssertionError, match="different bytes"):
            check_codec(codec, backend="cpu", max_examples=5)
    finally:
        dispatch.resolve.cache_clear()


class Halves:
    """A codec as a user may write it: float16."""

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        self.shapes = k.shape, v.shape
        x = torch.cat([k.flatten(), v.flatten()])
        if not x.isfinite().all():
            raise ValueError("not finite")
        return x.half().numpy().tobytes()

    def decode(self, code: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.frombuffer(bytearray(code), dtype=torch.float16).float()
        k, v = x.split([shape.numel() for shape in self.shapes])
        return k.view(self.shapes[0]), v.view(self.shapes[1])

    def bounds(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (x.double().abs() * 2.0**-11 + 2.0**-25 for x in (k, v))
        return k, v


class Accepting(Halves):
    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        return super().encode(k.nan_to_num(posinf=0, neginf=0), v.nan_to_num(posinf=0, neginf=0))


class Writing(Halves):
    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        return super().encode(k.add_(1), v)


class Counting(Halves):
    count = 0

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        self.count += 1
        return super().encode(k, v * (1 + self.count * 2.0**-9))


class Skipping(Halves):
    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        return super().encode(k, v) + (b"" if k.any() else b"zero")

    def decode(self, code: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        return super().decode(code.removesuffix(b"zero"))


class Coarse(Halves):
    def decode(self, code: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super().decode(code)
        return k, v * (1 + 2.0**-9)


def test_a_codec_of_ones_own() -> None:
    check_codec(Halves())
    for broken, sentence in (
        *((Accepting(), "not refused"), (Writing(), "wrote to its operands")),
        *((Counting(), "equal bytes"), (Skipping(), "number of bytes")),
        (Coarse(), "more than the bound"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            check_codec(broken)


def test_pages_have_kinds() -> None:
    with pytest.raises(ValueError, match="none of noise, zeros"):
        page_of("nice", (1, 8, 8), 0)


def test_refusals() -> None:
    raw, other = layout_of(1, 64, page_size=64), layout_of(2, 64, page_size=64)
    arena = torch.zeros(8 * raw.page_bytes, dtype=torch.uint8)
    with pytest.raises(GeometryError, match="differ in"):
        transcode(arena, int32([0]), int32([20]), raw, layout_like(other, "kv8"))
    with pytest.raises(GeometryError, match="1 pages to 2"):
        transcode(arena, int32([0]), int32([20, 30]), raw, layout_like(raw, "kv8"))
    with pytest.raises(ConfigError, match="float64"):
        layout_like(layout_of(1, 64, page_size=64, dtype="float64"), "kv8")
    exact = layout_of(1, 16, dtype="float64")
    arena = torch.zeros(2 * exact.page_bytes, dtype=torch.uint8)
    status = transcode(arena, int32([0]), int32([exact.granules]), exact, exact)
    assert status.tolist() == [[SOUND, SOUND]]
    with pytest.raises(ConfigError, match="backend='reference'"):
        transcode(arena, int32([0]), int32([1]), exact, exact, backend="cpu")
