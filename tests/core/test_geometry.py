"""Geometry refuses what cannot be paged, and its fingerprint sees what changes a page's bytes."""

from __future__ import annotations

import msgspec
import pytest

from flowkv import Geometry, LayerGroup
from tests.inside import GeometryError

BASE = LayerGroup(layers=(0, 2), kv_heads=2, head_dim=16, value_dim=8, dtype="bfloat16")


def changed(**fields: object) -> LayerGroup:
    return msgspec.structs.replace(BASE, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        *({"layers": ()}, {"layers": (1, 0)}, {"layers": (0, 0)}, {"layers": (-1, 0)}),
        *({"kv_heads": 0}, {"head_dim": 0}, {"value_dim": 0}, {"dtype": "int8"}),
        *({"dtype": "torch.float32"}, {"kind": "sliding"}, {"kind": "chunked"}, {"window": 5}),
        *({"kind": "sliding", "window": 0}, {"kind": "latent", "kv_heads": 1, "window": 5}),
        *({"kind": "latent"}, {"kind": "latent", "kv_heads": 1, "value_dim": 17}),
        *({"kind": "keys"}, {"kind": "keys", "value_dim": 0, "window": 5}),
    ],
)
def test_bad_groups(fields: dict[str, object]) -> None:
    with pytest.raises(GeometryError) as caught:
        changed(**fields)
    assert caught.value.remedy


@pytest.mark.parametrize("page_size", [0, 4, 12, 63, 264, -8])
def test_bad_page_sizes(page_size: int) -> None:
    with pytest.raises(GeometryError, match="multiple of 8"):
        Geometry(groups=(BASE,), page_size=page_size)


def test_a_layer_is_in_one_group() -> None:
    with pytest.raises(GeometryError):
        Geometry(groups=())
    with pytest.raises(GeometryError):
        Geometry(groups=(BASE, changed(layers=(2, 3))))


def test_uniform() -> None:
    geometry = Geometry.uniform(layers=3, kv_heads=2, head_dim=16, dtype="float16")
    (group,) = geometry.groups
    assert (group.layers, group.kind, group.value_dim) == ((0, 1, 2), "full", 16)
    assert group.token_bytes == 3 * 2 * (16 + 16) * 2
    sliding = Geometry.uniform(layers=[1, 5], kv_heads=1, head_dim=8, value_dim=4, window=7)
    assert (sliding.groups[0].kind, sliding.groups[0].window) == ("sliding", 7)
    assert sliding.groups[0].token_bytes == 2 * (8 + 4) * 4
    with pytest.raises(GeometryError):
        Geometry.uniform(layers=1, kv_heads=1, head_dim=8, value_dim=0)
    with pytest.raises(GeometryError):
        Geometry.uniform(layers=0, kv_heads=1, head_dim=8)


def test_locate() -> None:
    geometry = Geometry(groups=(BASE, changed(layers=(1, 5))))
    assert [geometry.locate(layer) for layer in (0, 1, 2, 5)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    with pytest.raises(GeometryError, match="layer 3"):
        geometry.locate(3)


def test_lists_become_tuples() -> None:
    group = changed(layers=[0, 2])
    assert group == BASE
    assert hash(Geometry(groups=[group])) == hash(Geometry(groups=(BASE,)))  # type: ignore[arg-type]


def test_json_round_trip() -> None:
    geometry = Geometry(groups=(BASE,), page_size=16)
    assert msgspec.json.decode(msgspec.json.encode(geometry), type=Geometry) == geometry
    with pytest.raises(msgspec.ValidationError, match="pag"):
        msgspec.json.decode(b'{"groups":[],"pag":1}', type=Geometry)


def test_fingerprint_sees_every_field_but_the_device() -> None:
    variants = [
        *(Geometry(groups=(BASE,)), Geometry(groups=(BASE,), page_size=128)),
        Geometry(groups=(BASE, changed(layers=(1,)))),
        Geometry(groups=(changed(layers=(1,)), BASE)),
        *(Geometry(groups=(changed(layers=(0, 1)),)), Geometry(groups=(changed(kv_heads=3),))),
        *(Geometry(groups=(changed(head_dim=17),)), Geometry(groups=(changed(value_dim=9),))),
        Geometry(groups=(changed(dtype="float16"),)),
        Geometry(groups=(changed(kind="latent", kv_heads=1),)),
        Geometry(groups=(changed(kind="sliding", window=5),)),
        Geometry(groups=(changed(kind="chunked", window=5),)),
        Geometry(groups=(changed(kind="sliding", window=6),)),
    ]
    prints = [geometry.fingerprint() for geometry in variants]
    assert len(set(prints)) == len(prints)
    assert all(len(fingerprint) == 32 for fingerprint in prints)
    assert Geometry(groups=(changed(device="cuda:1"),)).fingerprint() == prints[0]
    # Pinned: a change makes every stored page unreachable, and wants a new "geometry/n" tag.
    assert prints[0].hex() == "a7943b2696e276ec42c7ab9edfe66d94e4ff5a29dc5f11b6c223017d0880c8ff"
