"""Arithmetic of pages: nothing overlaps, everything is aligned, every difference has a name."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv import LayerGroup
from tests.inside import GRANULE_BYTES, ITEMSIZE, ConfigError, PageLayout, page_layout
from tests.inside import layout_CODECS as CODECS

BITS = {"kv8": (8, 8), "k8v4": (8, 4), "kv4c": (4, 4), "kv4h": (4, 4)}


def group(**fields: object) -> LayerGroup:
    base = {"layers": (0, 1), "kv_heads": 2, "head_dim": 64, "value_dim": 64}
    return LayerGroup(**(base | fields))  # type: ignore[arg-type]


groups = st.builds(
    group,
    layers=st.integers(1, 5).map(lambda n: tuple(range(n))),
    kv_heads=st.integers(1, 9),
    head_dim=st.integers(32, 144).map(lambda n: 2 * n),
    value_dim=st.integers(64, 288),
    dtype=st.sampled_from(sorted(ITEMSIZE)),
)
pages = st.integers(8, 32).map(lambda n: 8 * n)


def codecs_of(shape: LayerGroup) -> st.SearchStrategy[str]:
    return st.just("raw") if shape.dtype == "float64" else st.sampled_from(CODECS)


groups_and_codecs = groups.flatmap(lambda shape: st.tuples(st.just(shape), codecs_of(shape)))


@given(groups_and_codecs, pages)
def test_parts_fit_their_run_and_runs_do_not_overlap(
    coded: tuple[LayerGroup, str], page_size: int
) -> None:
    shape, codec = coded
    layout = page_layout(shape, page_size, codec)
    tokens, dim, dim_v = page_size, shape.head_dim, shape.value_dim
    if codec == "raw":
        item = ITEMSIZE[shape.dtype]
        lengths = [tokens * dim * item, tokens * dim_v * item, 0, 0]
    else:
        k_bits, v_bits = BITS[codec]
        # fp16 scales: per token, but scale and minimum per channel for the keys of kv4c
        k_scales = 4 * dim if codec == "kv4c" else 2 * tokens
        lengths = [tokens * dim * k_bits // 8, tokens * dim_v * v_bits // 8, k_scales, 2 * tokens]
    starts = [
        *(0, layout.v_offset_bytes, layout.k_scale_offset_bytes, layout.v_scale_offset_bytes),
        layout.run_bytes,
    ]
    for start, length, end in zip(starts, lengths, starts[1:], strict=False):
        assert start % 16 == 0
        assert start + length <= end < start + length + 16

    runs = [
        (layout.run_offset_bytes(layer, head), layout.run_bytes)
        for layer in range(layout.layers)
        for head in range(layout.kv_heads)
    ]
    for (start, length), (following, _) in pairwise(runs):
        assert start + length <= following
    assert runs[-1][0] + runs[-1][1] <= layout.page_bytes


@given(groups_and_codecs, pages)
def test_stripes_are_granules(coded: tuple[LayerGroup, str], page_size: int) -> None:
    shape, codec = coded
    layout = page_layout(shape, page_size, codec)
    assert layout.stripe_bytes == layout.kv_heads * layout.run_bytes
    stride = layout.stripe_stride_bytes
    assert stride % GRANULE_BYTES == 0
    assert layout.stripe_bytes <= stride < layout.stripe_bytes + GRANULE_BYTES
    assert layout.page_bytes == layout.granules * GRANULE_BYTES == layout.layers * stride
    for layer in range(layout.layers):
        assert layout.run_offset_bytes(layer, 0) == layer * stride


def test_raw_is_as_large_as_its_tokens() -> None:
    shape = group(dtype="bfloat16", head_dim=128, value_dim=128, kv_heads=8)
    assert page_layout(shape, 64).page_bytes == 64 * shape.token_bytes
    assert page_layout(shape, 64).page_bytes / page_layout(shape, 64, "kv8").page_bytes > 1.8
    assert page_layout(shape, 128).page_bytes / page_layout(shape, 128, "kv4h").page_bytes > 3.5


def test_codecs_are_ordered_from_exact_to_small() -> None:
    assert CODECS == ("raw", "kv8", "k8v4", "kv4c", "kv4h")  # the index is stored in frames
    sizes = [page_layout(group(head_dim=128, value_dim=128), 64, c).run_bytes for c in CODECS]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("fields", "page_size", "codec"),
    [
        ({}, 64, "kv3"),
        ({}, 56, "kv4c"),
        ({"head_dim": 32}, 64, "kv4h"),
        ({"value_dim": 32}, 64, "k8v4"),
        ({"head_dim": 65}, 64, "kv4h"),
        ({}, 65, "k8v4"),
        *(({"dtype": "float64"}, 64, codec) for codec in CODECS[1:]),
    ],
)
def test_refused(fields: dict[str, object], page_size: int, codec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        page_layout(group(**fields), page_size, codec)
    assert caught.value.remedy


def test_odd_shapes_that_are_fine() -> None:
    assert page_layout(group(dtype="float64"), 64).granules
    assert page_layout(group(head_dim=65), 64, "k8v4").run_bytes % 16 == 0
    assert page_layout(group(head_dim=1, value_dim=3, kv_heads=1), 8).granules == 2
    assert page_layout(group(head_dim=7, value_dim=5), 8, "kv8").granules == 2


def test_fingerprint_sees_every_field() -> None:
    layout = page_layout(group(), 64)
    prints = {layout.fingerprint()}
    for field in PageLayout.__struct_fields__:
        value = getattr(layout, field)
        other = value + 1 if isinstance(value, int) else value + "x"
        prints.add(msgspec.structs.replace(layout, **{field: other}).fingerprint())
    assert len(prints) == 1 + len(PageLayout.__struct_fields__)
    assert {len(fingerprint) for fingerprint in prints} == {16}
    # Pinned: frames on disk carry it. A change wants a new "layout/n" tag.
    assert layout.fingerprint().hex() == "9e1a215c095979402fda0e99f96bb9b0"


def test_model_indices_and_devices_do_not_move_a_byte() -> None:
    here, there = group(), group(layers=(4, 9), device="cuda:1")
    assert page_layout(here, 64) == page_layout(there, 64)
