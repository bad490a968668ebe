"""Pages written by one shard layout and read by another."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from flowkv import Geometry, LayerGroup, Shard, Tier
from flowkv.testing import FlakyTier, check_tier
from flowkv.tiers import FrameInfo, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.shared import SharedTier
from tests.inside import (
    ConfigError,
    Faults,
    GeometryError,
    Heads,
    HostTier,
    PageLayout,
    ShardedTier,
    page_layout,
    stored_key,
)
from tests.inside import layout_CODECS as CODECS

from .frames import answers, key_of, outcomes

WORLDS = (1, 2, 4, 8)


def group(heads: int, layers: int = 3, dim: int = 64, dim_v: int = 64) -> LayerGroup:
    return LayerGroup(layers=tuple(range(layers)), kv_heads=heads, head_dim=dim, value_dim=dim_v)


def layout_of(whole: LayerGroup, size: int, heads: int, codec: int) -> PageLayout:
    part = msgspec.structs.replace(whole, kv_heads=heads)
    return page_layout(part, size, CODECS[codec])


def whole_page(whole: LayerGroup, size: int, codec: int, seed: int) -> np.ndarray:
    """uint8 `[L, Hk, run]`: random runs."""
    layout = layout_of(whole, size, whole.kv_heads, codec)
    shape = len(whole.layers), whole.kv_heads, layout.run_bytes
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def cut(page: np.ndarray, layout: PageLayout, heads: range) -> bytes:
    """The page of some heads, laid out run by run."""
    body = np.zeros((layout.layers, layout.stripe_stride_bytes), np.uint8)
    body[:, : layout.stripe_bytes] = page[:, heads.start : heads.stop].reshape(layout.layers, -1)
    return body.tobytes()


def info_of(layout: PageLayout, number: int, codec: int, fidelity: int) -> FrameInfo:
    return FrameInfo(
        kind="page",
        codec=codec,
        fidelity=fidelity,
        layout=layout.fingerprint(),
        parent=key_of("parent"),
        namespace=key_of("namespace"),
        group=number,
        tokens=layout.page_size,
        stripe_bytes=layout.stripe_stride_bytes,
    )


def write(tier: Tier, geometry: Geometry, world: int, name: object, codec: int, seed: int) -> None:
    """Each rank stores its heads of one page of each group."""
    for rank in range(world):
        view = ShardedTier(tier, geometry, Shard(rank, world))
        for number, whole in enumerate(geometry.groups):
            heads = whole.heads(rank, world)
            layout = layout_of(whole, geometry.page_size, len(heads), codec)
            body = cut(whole_page(whole, geometry.page_size, codec, seed), layout, heads)
            info = info_of(layout, number, codec, min(codec + rank % 2, len(CODECS) - 1))
            key = key_of((name, number))
            done = answers(view, view.submit_store([Store(key, info, memoryview(body))]), 1)
            assert outcomes(done) == [("stored", "")]


def read(view: ShardedTier, number: int, name: object, codec: int, **part: int) -> tuple:
    whole, size = view.division.geometry.groups[number], view.division.geometry.page_size
    heads = whole.heads(view.division.shard.rank, view.division.shard.world)
    layout = layout_of(whole, size, len(heads), codec)
    target = bytearray(b"\xaa" * (layout.page_bytes + 5))
    key = key_of((name, number))
    wish = Load(key, memoryview(target), layout.fingerprint(), len(CODECS) - 1, **part)
    (answer,) = answers(view, view.submit_load([wish]), 1)
    return answer, target, layout, heads


def check(view: ShardedTier, number: int, name: object, codec: int, seed: int) -> None:
    """A page, and its last layers, are the heads that were cut out of the whole one."""
    answer, target, layout, heads = read(view, number, name, codec)
    whole, size = view.division.geometry.groups[number], view.division.geometry.page_size
    body = cut(whole_page(whole, size, codec, seed), layout, heads)
    assert answer.outcome is Outcome.HIT, answer
    assert target[: answer.n_bytes] == body and answer.n_bytes == layout.page_bytes
    assert target[answer.n_bytes :] == b"\xaa" * 5
    assert answer.info.layout == layout.fingerprint()
    assert answer.info.stripe_bytes == layout.stripe_stride_bytes
    assert answer.info.codec == codec
    step, first = layout.stripe_stride_bytes, layout.layers - 1
    answer, target, *_ = read(view, number, name, codec, first=first, stripes=1)
    assert answer.outcome is Outcome.HIT and answer.n_bytes == step
    assert target[:step] == body[first * step :]


GEOMETRIES = st.builds(
    lambda heads, layers, dims, size: Geometry(
        groups=(
            group(heads, layers, *dims),
            LayerGroup(layers=(90, 91), kv_heads=1, head_dim=80, value_dim=64, kind="latent"),
        ),
        page_size=size,
    ),
    heads=st.sampled_from((2, 4, 8)),
    layers=st.integers(1, 3),
    dims=st.sampled_from(((64, 64), (96, 64))),
    size=st.just(64),
)


@settings(max_examples=20)
@given(
    geometry=GEOMETRIES,
    writers=st.sampled_from(WORLDS),
    readers=st.sampled_from(WORLDS),
    codec=st.integers(0, len(CODECS) - 1),
    seed=st.integers(0, 99),
)
def test_any_layout_reads_any_other(
    geometry: Geometry, writers: int, readers: int, codec: int, seed: int
) -> None:
    if codec:  # codecs have no latents
        geometry = Geometry(groups=geometry.groups[:1], page_size=geometry.page_size)
    tier = HostTier(64 << 20)
    write(tier, geometry, writers, "p", codec, seed)
    for rank in range(readers):
        view = ShardedTier(tier, geometry, Shard(rank, readers))
        for number in range(len(geometry.groups)):
            check(view, number, "p", codec, seed)
            assert view.contains([key_of(("p", number)), key_of("none")]) == [True, False]
        listed = {entry.key: entry for entry in view.scan()}
        assert set(listed) == {key_of(("p", n)) for n in range(len(geometry.groups))}
        held = geometry.groups[0].heads(rank, readers)
        entry = listed[key_of(("p", 0))]
        wanted = layout_of(geometry.groups[0], geometry.page_size, len(held), codec)
        assert entry.info.layout == wanted.fingerprint()
        assert answer_says(entry.info, held, geometry.groups[0].kv_heads)


def answer_says(info: FrameInfo, heads: range, total: int) -> bool:
    return (info.head_start, info.head_stop or total) == (heads.start, heads.stop)


GEOMETRY = Geometry(groups=(group(4),), page_size=64)


@pytest.mark.parametrize("kind", ["shared", "disk"])
def test_over_other_tiers(tmp_path, kind: str) -> None:
    if kind == "disk":
        tier: Tier = DiskTier(tmp_path / "kv", 32 << 20)
    else:
        tier = SharedTier("n", 32 << 20, directory=tmp_path)
    write(tier, GEOMETRY, 2, "p", 0, 1)
    for rank, world in ((0, 1), (3, 4), (1, 2)):
        check(ShardedTier(tier, GEOMETRY, Shard(rank, world)), 0, "p", 0, 1)
    tier.close()


def test_a_cache_without_ranks_and_a_single_rank_share_frames() -> None:
    tier = HostTier(64 << 20)
    write(tier, GEOMETRY, 1, "p", 0, 1)
    assert tier.contains([key_of(("p", 0))]) == [True]
    (entry,) = tier.scan()
    assert (entry.info.rank, entry.info.world, entry.info.head_stop) == (0, 1, 0)


def test_one_missing_or_damaged_piece_is_a_miss() -> None:
    tier = HostTier(64 << 20)
    write(tier, GEOMETRY, 2, "p", 0, 1)
    view, heads = ShardedTier(tier, GEOMETRY, Shard()), Heads(2, 4, 4)
    name = stored_key(key_of(("p", 0)), heads)
    tier._frames[name].body[0] ^= 1
    answer, *_ = read(view, 0, "p", 0)
    assert (answer.outcome, answer.reason) == (Outcome.MISS, "digest")
    assert view.contains([key_of(("p", 0))]) == [False]
    answer, *_ = read(view, 0, "p", 0)
    assert (answer.outcome, answer.reason) == (Outcome.MISS, "")
    check(ShardedTier(tier, GEOMETRY, Shard(0, 2)), 0, "p", 0, 1)
    (rest,) = view.scan()  # of no use here, but it can be erased from here
    assert rest.key != key_of(("p", 0)) and view.contains([rest.key]) == [True]
    assert view.erase([rest.key]) == 1
    assert tier.used_bytes() == 0


def test_a_damaged_piece_is_replaced_by_another_way() -> None:
    tier = HostTier(64 << 20)
    write(tier, GEOMETRY, 2, "p", 0, 1)
    write(tier, GEOMETRY, 4, "p", 0, 1)
    name = stored_key(key_of(("p", 0)), Heads(2, 4, 4))
    tier._frames[name].body[0] ^= 1
    check(ShardedTier(tier, GEOMETRY, Shard()), 0, "p", 0, 1)


def test_fidelity_is_that_of_the_worst_piece() -> None:
    tier = HostTier(64 << 20)
    write(tier, GEOMETRY, 2, "p", 1, 1)  # rank 1 descends from something lossier
    answer, *_ = read(ShardedTier(tier, GEOMETRY, Shard()), 0, "p", 1)
    assert answer.info.fidelity == 2
    view = ShardedTier(tier, GEOMETRY, Shard())
    layout = layout_of(GEOMETRY.groups[0], 64, 4, 1)
    target = memoryview(bytearray(layout.page_bytes))
    wish = Load(key_of(("p", 0)), target, layout.fingerprint(), 1)
    assert outcomes(answers(view, view.submit_load([wish]), 1)) == [("miss", "fidelity")]


def test_targets_that_do_not_fit() -> None:
    tier = HostTier(64 << 20)
    write(tier, GEOMETRY, 2, "p", 0, 1)
    view = ShardedTier(tier, GEOMETRY, Shard())
    layout = layout_of(GEOMETRY.groups[0], 64, 4, 0)
    for target in (memoryview(bytearray(100)), memoryview(bytes(layout.page_bytes))):
        wish = Load(key_of(("p", 0)), target, layout.fingerprint(), 1)
        assert outcomes(answers(view, view.submit_load([wish]), 1)) == [("failed", "target")]
    wish = Load(key_of(("p", 0)), memoryview(bytearray(9)), layout.fingerprint(), 1, 3, 1)
    assert outcomes(answers(view, view.submit_load([wish]), 1)) == [("miss", "stripes")]


def test_states_belong_to_one_rank() -> None:
    tier, layout = HostTier(64 << 20), b"a state's layout"
    views = {
        shard: ShardedTier(tier, GEOMETRY, Shard(*shard)) for shard in ((0, 2), (1, 2), (0, 1))
    }
    for shard, view in views.items():
        body = bytes([shard[0] + 8 * shard[1]]) * 100
        info = info_of(layout_of(GEOMETRY.groups[0], 64, 4, 0), 0, 0, 0)
        info = info._replace(kind="state", layout=layout, stripe_bytes=100, tokens=3)
        item = Store(key_of("s"), info, memoryview(body))
        assert outcomes(answers(view, view.submit_store([item]), 1)) == [("stored", "")]
        assert view.contains([key_of("s")]) == [True]
    for shard, view in views.items():
        target = bytearray(100)
        wish = Load(key_of("s"), memoryview(target), layout, 0)
        assert outcomes(answers(view, view.submit_load([wish]), 1)) == [("hit", "")]
        assert target == bytes([shard[0] + 8 * shard[1]]) * 100
        assert key_of("s") in {entry.key for entry in view.scan()}


def test_delete_makes_room_and_erase_reaches_all_ranks() -> None:
    tier = HostTier(64 << 20)
    for name in ("p", "q"):
        write(tier, GEOMETRY, 4, name, 0, 1)
        write(tier, GEOMETRY, 1, name, 0, 1)
    view = ShardedTier(tier, GEOMETRY, Shard(1, 2))
    assert view.delete([key_of(("p", 0)), key_of("none")]) == 1
    assert view.contains([key_of(("p", 0))]) == [False]
    left = [entry.info.head_start for entry in tier.scan()]
    assert sorted(left) == [0, 0, 0, 1, 1, 2, 3]  # heads 0 and 1 of p, and all of q
    assert view.erase([key_of(("q", 0))]) == 1
    assert len(list(tier.scan())) == 2
    assert view.erase([key_of(("p", 0))]) == 0  # not readable here, and gone all the same
    assert tier.used_bytes() == 0


def test_uneven_heads_are_refused() -> None:
    tier = HostTier(1 << 20)
    for world in (3, 6):
        with pytest.raises(GeometryError, match="evenly"):
            ShardedTier(tier, GEOMETRY, Shard(0, world))
    with pytest.raises(GeometryError, match="rank 2 of 2"):
        ShardedTier(tier, GEOMETRY, Shard(2, 2))
    with pytest.raises(ConfigError, match="leave the range out"):
        ShardedTier(tier, GEOMETRY, Shard(1, 2, 0, 2))
    ShardedTier(tier, GEOMETRY, Shard(1, 2, 2, 4))


@pytest.mark.usefixtures("briefly")
def test_conformance() -> None:
    for shard in (Shard(), Shard(1, 2)):
        check_tier(lambda n: ShardedTier(HostTier(n), GEOMETRY, shard), capacity_bytes=1 << 20)  # noqa: B023
    faults = Faults(fail=0.2, lose=0.1, flip=0.2, latency_s=0.001)
    check_tier(
        lambda n: ShardedTier(FlakyTier(HostTier(n), 7, faults), GEOMETRY, Shard(1, 2)), lossy=True
    )


@given(key=st.binary(min_size=32, max_size=32), numbers=st.tuples(*[st.integers(0, 99)] * 3))
def test_names_can_be_taken_back(key: bytes, numbers: tuple[int, int, int]) -> None:
    heads = Heads(*numbers)
    assert stored_key(stored_key(key, heads), heads) == key
