"""Coded pages: near the raw ones by the step, wherever they stand, and never anything else."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.inside import (
    CLASSES,
    SYMBOLS,
    Basis,
    GroupLearner,
    KeyTurn,
    PageCoder,
    chunk_places,
    codable,
    kvt_basis,
    read_head,
)
from tests.kvt.pages import TURN, Source, layout, learner, page

INTERLEAVED = KeyTurn(TURN.inv_freq[:4], interleaved=True, start=4)


def far(coder: PageCoder, one: bytearray, other: bytearray, side: int) -> float:
    """The relative distance of the keys or values of two pages, without the first tokens."""
    a, b = (coder.views(memoryview(x))[side][:, :, 4:].float() for x in (one, other))
    return float((a - b).norm() / b.norm())


def decoded(coder: PageCoder, data: bytes) -> bytearray:
    out = bytearray(coder.layout.page_bytes)
    assert coder.decode(memoryview(data), memoryview(out), 0, coder.layout.layers)
    return out


@lru_cache
def learned(dtype: str, interleaved: bool, turns: bool) -> tuple[Source, GroupLearner]:
    source = Source(layout(dtype))
    return source, learner(source, (INTERLEAVED if interleaved else TURN) if turns else None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("turn", [TURN, INTERLEAVED, None], ids=["halves", "interleaved", "none"])
@pytest.mark.parametrize("page_no", [0, 1, 57])
def test_pages_come_back(dtype: str, turn: KeyTurn | None, page_no: int) -> None:
    source, made = learned(dtype, turn is not None and turn.interleaved, turn is not None)
    distances = []
    for step in (3e-3, 3e-4):
        coder = made.coder(step, {})
        body = page(coder, source, page_no)
        before = bytes(body)
        data = coder.encode(memoryview(body), page_no)
        assert data is not None and len(data) < len(body)
        assert body == before  # it is a page that is in use
        back = decoded(coder, data)
        distances.append([far(coder, back, body, side) for side in (0, 1)])
    assert max(distances[1]) < min(0.06, *distances[0])
    # Elsewhere its keys would be rotated wrongly: the page says where it stands.
    head = read_head(memoryview(data))
    assert head is not None and head.page_no == page_no and head.basis == coder.name


@pytest.mark.parametrize("given", [{"loud": 60.0}, {"bias": 40.0}, {"loud": 30.0, "bias": -9.0}])
def test_outlier_channels_and_large_biases(given: dict[str, float]) -> None:
    source = Source(layout(), **given)
    coder = learner(source).coder(1e-3, {})
    body = page(coder, source, 3)
    data = coder.encode(memoryview(body), 3)
    assert data is not None and len(data) < len(body) / 3
    assert far(coder, decoded(coder, data), body, 0) < 0.1


def test_first_tokens_are_kept_whole() -> None:
    source = Source(layout())
    coder = learner(source).coder(3e-3, {})
    body = page(coder, source, 0)
    for view in coder.views(memoryview(body)):
        view[:, :, :4] *= 300
    data = coder.encode(memoryview(body), 0)
    assert data is not None
    for got, wanted in zip(
        coder.views(memoryview(decoded(coder, data))), coder.views(memoryview(body)), strict=True
    ):
        torch.testing.assert_close(got[:, :, :4], wanted[:, :, :4], rtol=2e-3, atol=0.3)


def test_values_near_the_end_of_float16_stay_finite() -> None:
    source = Source(layout("float16"))
    coder = learner(source).coder(3e-3, {})
    body = page(coder, source, 5)
    coder.views(memoryview(body))[1][:, :, 9] = 65504.0
    data = coder.encode(memoryview(body), 5)
    assert data is not None
    assert all(bool(x.isfinite().all()) for x in coder.views(memoryview(decoded(coder, data))))


def test_strange_tokens_are_kept_whole() -> None:
    source = Source(layout())
    coder = learner(source).coder(1e-4, {})
    body = page(coder, source, 5)
    for view in coder.views(memoryview(body)):
        view[:, :, 17] *= 4000
    data = coder.encode(memoryview(body), 5)
    assert data is not None
    got, wanted = (coder.views(memoryview(x))[1] for x in (decoded(coder, data), body))
    torch.testing.assert_close(got[:, :, 17], wanted[:, :, 17], rtol=2e-3, atol=1.0)
    assert float((got - wanted)[:, :, 18:].norm() / wanted[:, :, 18:].norm()) < 0.05


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_cannot_be_coded_is_left_raw(value: float) -> None:
    source = Source(layout())
    coder = learner(source).coder(1e-3, {})
    body = page(coder, source, 2)
    coder.views(memoryview(body))[1][1, 0, 9, 3] = value
    assert coder.encode(memoryview(body), 2) is None


def test_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvt_basis, "MOST_DIMS", 64)
    monkeypatch.setattr(kvt_basis, "HEAD_DIMS", 16)
    source = Source(layout(layers=tuple(range(9))))
    coder = learner(source).coder(1e-3, {})
    assert len({place.layers.start for place in coder.places}) > 1
    assert len({place.heads.start for place in coder.places}) > 1
    body = page(coder, source, 1)
    data = coder.encode(memoryview(body), 1)
    assert data is not None
    whole, step = decoded(coder, data), coder.layout.stripe_stride_bytes
    for first, count in ((0, 1), (3, 4), (8, 1), (0, 9)):
        some = bytearray(count * step)
        assert coder.decode(memoryview(data), memoryview(some), first, count)
        assert some == whole[first * step : (first + count) * step]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@given(numbers=st.lists(st.integers(0, 4), min_size=1, max_size=5), at=st.integers(0, 1 << 12))
def test_pages_together_are_the_same_as_alone(dtype: str, numbers: list[int], at: int) -> None:
    """Whole tokens, damage and pages of nothing included; what is damaged changes no other."""
    source, made = learned(dtype, at % 2 == 0, True)
    coder, step, data = made.coder(1e-3, {}), made.coder(1e-3, {}).layout.stripe_stride_bytes, []
    for number in numbers:
        body = page(coder, source, number)
        coder.views(memoryview(body))[0][:, :, 40] *= 3e3 if number == 3 else 1
        one = bytearray(coder.encode(memoryview(body), number) or b"")
        if number == 4:
            one[at % len(one)] ^= 1 << at % 8
        data.append(one)
    first = at % 3
    alone, there = ([bytearray((3 - first) * step) for _ in data] for _ in range(2))
    pairs = [(memoryview(one), memoryview(out)) for one, out in zip(data, there, strict=True)]
    found = coder.decode_batch(pairs, first, 3 - first)
    for one, out, own, sound in zip(data, alone, there, found, strict=True):
        assert coder.decode(memoryview(one), memoryview(out), first, 3 - first) is sound
        assert not sound or own == out
    assert all(found[n] for n, number in enumerate(numbers) if number < 4 and data[n])


def test_angles_are_computed_once_for_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of two rotations took turns, and each chunk computed those of both anew."""
    monkeypatch.setattr(kvt_basis, "MOST_DIMS", 64)
    source = Source(layout(layers=tuple(range(8))))
    coder, own, asked = learner(source, TURN, INTERLEAVED).coder(1e-3, {}), KeyTurn.angles, []
    data = [coder.encode(memoryview(page(coder, source, n)), n) or b"" for n in (1, 2)]
    monkeypatch.setattr(KeyTurn, "angles", lambda *args: asked.append(args) or own(*args))
    outs = [bytearray(coder.layout.page_bytes) for _ in data]
    pairs = [(memoryview(one), memoryview(out)) for one, out in zip(data, outs, strict=True)]
    assert all(coder.decode_batch(pairs, 0, 8)) and len(asked) == 2


def test_groups_that_are_coded() -> None:
    assert codable(layout()) and codable(layout("bfloat16"))
    assert not codable(layout("float64"))
    assert not codable(layout(kind="latent", kv_heads=1))


def test_every_element_is_in_one_chunk() -> None:
    for shape in (
        layout(),
        layout(layers=tuple(range(40)), kv_heads=8, head_dim=128, value_dim=64),
    ):
        for side in (0, 1):
            seen = np.zeros((shape.layers, shape.kv_heads), int)
            for place in chunk_places(shape):
                if place.side == side:
                    seen[place.layers, place.heads] += 1
            assert (seen == 1).all()


SOURCE = Source(layout())
CODER = learner(SOURCE).coder(3e-3, {"kl": 0.25})  # axes of both kinds
DATA = CODER.data
BODY = page(CODER, SOURCE, 4)
CODED = CODER.encode(memoryview(BODY), 4) or b""


@given(at=st.integers(0, 1 << 20), bit=st.integers(0, 7), cut=st.integers(0, 64), data=st.data())
def test_damaged_pages_raise_nothing(at: int, bit: int, cut: int, data: Any) -> None:
    assert CODED
    spoilt = bytearray(CODED)
    spoilt[at % len(spoilt)] ^= 1 << bit
    spoilt = spoilt[: len(spoilt) - cut] if data.draw(st.booleans()) else spoilt
    guard = bytearray(len(BODY) + 64)
    CODER.decode(memoryview(spoilt), memoryview(guard)[: len(BODY)], 0, CODER.layout.layers)
    assert not any(guard[len(BODY) :])
    if len(spoilt) != len(CODED):
        assert not CODER.decode(memoryview(spoilt), memoryview(guard)[: len(BODY)], 0, 3)


def test_bases_come_back_the_same() -> None:
    again = PageCoder(CODER.layout, DATA)
    assert again.basis.measured == {"kl": 0.25} and again.basis.pack() == DATA
    assert again.encode(memoryview(BODY), 4) == CODED


PLACES = st.one_of(st.integers(0, 80), st.integers(0, len(DATA) - 1))


@given(at=PLACES)
def test_cut_bases_are_refused(at: int) -> None:
    with pytest.raises(ValueError, match="basis"):
        Basis.unpack(DATA[:at], CODER.layout)


@given(at=PLACES, bit=st.integers(0, 7))
def test_damaged_bases_have_another_name(at: int, bit: int) -> None:
    """Their pages are never taken for those of the sound one, nor the other way round."""
    assert CODED
    spoilt = bytearray(DATA)
    spoilt[at] ^= 1 << bit
    with np.errstate(all="ignore"):
        try:
            other = PageCoder(CODER.layout, bytes(spoilt))
        except ValueError:
            return
    out = bytearray(len(BODY))
    assert other.name != CODER.name
    assert not other.decode(memoryview(CODED), memoryview(out), 0, 3) and not any(out)


def changed(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(DATA) | fields)


@pytest.mark.parametrize(
    "name", ["axes", "mean", "metric", "coarse", "fine", "scale", "classes", "class", "not finite"]
)
def test_bases_with_a_wrong_chunk_are_refused(name: str) -> None:
    first, *others = msgspec.msgpack.decode(DATA)["chunks"]
    if name == "axes":
        first[name] += 8
    elif name == "not finite":
        first["mean"] = np.full(len(first["mean"]) // 4, np.nan, np.float32).tobytes()
    elif name == "class":
        first["classes"] = bytes([CLASSES]) * first["axes"]
    else:
        first[name] = first[name][: len(first[name]) // 2]
    assert Basis.unpack(changed(), CODER.layout)
    with pytest.raises(ValueError, match=r"basis|reshape"):
        Basis.unpack(changed(chunks=[first, *others]), CODER.layout)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": 3}, "version"),
        ({"layout": bytes(16)}, "other pages"),
        ({"chunks": []}, "other chunks"),
        ({"turn_of": [0, 0]}, "other chunks"),
        ({"turn_of": [0, 0, 1]}, "rotations"),
        ({"turn_of": [0, 0, -2]}, "rotations"),
        *(
            ({"turns": [(np.ones(half).tobytes(), False, start)]}, "beyond a key")
            for half, start in (
                *((CODER.layout.head_dim // 2 + 1, 0), (CODER.layout.head_dim // 2, 1), (1, -1)),
                *((1, 2**63 - 5), (10**5, 0)),
            )
        ),
        ({"turns": [(np.full(1, np.nan).tobytes(), False, 0)]}, "no angle"),
        *(({"step": step}, "version") for step in (0.0, -1.0, math.nan, math.inf, 1e200)),
        ({"frequencies": bytes(2 * CLASSES * SYMBOLS)}, "not complete"),
        ({"more": 1}, "no basis"),
    ],
)
def test_bases_with_a_wrong_part_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Basis.unpack(changed(**fields), CODER.layout)


def test_bases_of_other_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="other pages"):
        Basis.unpack(DATA, layout("bfloat16"))


def test_pages_of_another_basis_are_refused() -> None:
    other = learner(Source(layout(), seed=9)).coder(1e-3, {})
    out = bytearray(len(BODY))
    assert CODED
    assert not other.decode(memoryview(CODED), memoryview(out), 0, other.layout.layers)
    assert not any(out)


def test_bases_of_the_first_version_open() -> None:
    """Their axes are bfloat16; their pages come back as they did, up to rounding."""
    chunks = msgspec.msgpack.decode(DATA)["chunks"]
    for one in chunks:
        scale = torch.frombuffer(bytearray(one.pop("scale")), dtype=torch.float32)
        fine = torch.frombuffer(bytearray(one["fine"]), dtype=torch.int8).view(-1, len(scale))
        assert len(fine)
        one["fine"] = (fine * scale).bfloat16().view(torch.int16).numpy().tobytes()
    old = PageCoder(CODER.layout, changed(version=1, chunks=chunks))
    data = old.encode(memoryview(BODY), 4)
    assert data is not None
    for side in (0, 1):
        assert far(old, decoded(old, data), BODY, side) < 1.05 * far(
            CODER, decoded(CODER, CODED), BODY, side
        )


def test_products_of_bytes_are_those_of_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = decoded(CODER, CODED)
    for exact in (True, False):
        monkeypatch.setattr(kvt_basis, "multiplies_bytes", lambda exact=exact: exact)
        assert decoded(CODER, CODED) == wanted


# ---- pages of another size, at places that are not known

PARTIAL = KeyTurn(TURN.inv_freq[:6], start=2)
KINDS = {
    "halves": (TURN,),
    "interleaved": (INTERLEAVED,),
    "some dims": (PARTIAL,),
    "some layers": (TURN, None),
    "two kinds": (TURN, KeyTurn(TURN.inv_freq / 8, interleaved=True)),
}


@lru_cache
def biased(kind: str) -> tuple[Source, PageCoder]:
    """Keys with means, as models have them."""
    source = Source(layout(), bias=6.0)
    return source, learner(source, *KINDS[kind]).coder(2e-3, {})


@given(
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    size=st.sampled_from([64, 128, 256]),
    place=st.integers(0, (1 << 17) - 1),
)
def test_places_of_pages_are_found(kind: str, dtype: str, size: int, place: int) -> None:
    source, made = biased(kind)
    coder, number = made.fitted(layout(dtype, size=size)), place // size
    body = page(coder, source, number)
    found = coder.likeliest(memoryview(body))
    assert found == number
    data = coder.encode(memoryview(body), found)
    assert data is not None
    back = decoded(coder, data)
    assert coder.loss(memoryview(body), memoryview(back), found) <= 1
    assert max(far(coder, back, body, side) for side in (0, 1)) < 0.2


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16], ids=str)
def test_places_are_found_under_another_default_dtype(default: torch.dtype) -> None:
    """Programs set one while they load models."""
    source, coder = biased("halves")
    body = memoryview(page(coder, source, 300))
    data, back = coder.encode(body, 300) or b"", memoryview(bytearray(len(body)))
    torch.set_default_dtype(default)
    try:
        assert coder.decode(memoryview(data), back, 0, 3) and coder.likeliest(body) == 300
        lost = coder.loss(body, back, 300)
    finally:
        torch.set_default_dtype(torch.float32)
    assert lost == coder.loss(body, back, 300)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_wrong_place_costs_no_wrong_key(kind: str) -> None:
    source, made = biased(kind)
    fine = made.fitted(layout(size=256))
    body = page(fine, source, 300)
    right, wrong = (fine.encode(memoryview(body), number) for number in (300, 301))
    assert right is not None and wrong is not None and len(wrong) > len(right)
    backs = [decoded(fine, data) for data in (right, wrong)]
    losses = [
        fine.loss(memoryview(body), memoryview(back), number)
        for back, number in zip(backs, (300, 301), strict=True)
    ]
    assert losses[0] <= 1 < losses[1]
    assert far(fine, backs[1], body, 0) < 1  # far, and nothing like keys of another place
    turns = fine.basis.turns
    keys = fine.views(memoryview(body))[0]
    elsewhere = turns.apply(turns.apply(keys, 300 * 256, back=True), 301 * 256)
    assert far(fine, backs[1], body, 0) < float((elsewhere - keys).norm() / keys.norm())


def test_keys_that_do_not_rotate_have_the_first_place() -> None:
    source, made = learned("float32", False, False)
    coder = made.coder(3e-3, {})
    assert coder.likeliest(memoryview(page(coder, source, 7))) == 0


def test_the_loss_is_the_price_of_errors() -> None:
    source, coder = biased("two kinds")
    body = page(coder, source, 5)
    data = coder.encode(memoryview(body), 5)
    assert data is not None
    back = decoded(coder, data)
    sides = [
        [
            coder.basis.turns.apply(view.float(), 5 * 64, back=True) if not side else view.float()
            for side, view in enumerate(coder.views(memoryview(one)))
        ]
        for one in (body, back)
    ]
    prices, elements = np.zeros(64), 0
    for place, chunk in zip(coder.places, coder.basis.chunks, strict=True):
        error = (place.elements(sides[0]) - place.elements(sides[1])).double().numpy()
        metric = np.zeros((error.shape[1], error.shape[1]))
        size = chunk.metric.shape[-1]
        for n, block in enumerate(chunk.metric.reshape(-1, size, size)):
            metric[n * size : (n + 1) * size, n * size : (n + 1) * size] = block
        prices += np.einsum("tn,nm,tm->t", error, metric, error)
        elements += error.shape[1]
    prices /= elements * (0.35 * coder.basis.step) ** 2
    got = coder.loss(memoryview(body), memoryview(back), 5)
    assert got == pytest.approx(max(prices.mean(), prices.max() / 4), rel=1e-3)
    assert coder.loss(memoryview(body), memoryview(body), 5) == 0
    coder.views(memoryview(back))[1][:, :, 9] += 5.0  # one token
    assert coder.loss(memoryview(body), memoryview(back), 5) > 1
    coder.views(memoryview(back))[1][0, 0, 9] = math.nan
    assert not coder.loss(memoryview(body), memoryview(back), 5) <= 1


def test_pages_of_another_model_lose_more() -> None:
    _, coder = biased("halves")
    for seed in (3, 4):
        other = Source(layout(), seed=seed, bias=6.0)
        body = page(coder, other, 2)
        data = coder.encode(memoryview(body), 2)
        assert data is None or coder.loss(memoryview(body), memoryview(decoded(coder, data)), 2) > 1


@pytest.mark.parametrize(
    "other",
    [
        *({"layers": (0, 1)}, {"kv_heads": 1}, {"head_dim": 32}, {"value_dim": 8}),
        *({"dtype": "float64"}, {"size": 512}, {"codec": "kv8"}),
    ],
)
def test_other_pages_do_not_fit(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of the basis are"):
        CODER.fitted(layout(**other))
    assert CODER.fitted(layout("bfloat16", size=256)).name == CODER.name
    assert CODER.layout == layout()
