"""Rotated keys (RoPE): on their way into pages, and in pages that move to other positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.kernels import Pages, Rotary, append, checking, gather_dense, reposition, rotations
from tests.inside import ConfigError, GeometryError, PageLayout, page_views
from tests.inside import pages as cpu
from tests.kernels.latent import latent_layout
from tests.kernels.scene import Scene, int32, layout_of, poisoned_arena

each_backend = pytest.mark.parametrize("backend", ["reference", "cpu"])
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
DTYPES = list(ROUNDOFF)


def rotary(lines: int, pairs: int, interleaved: bool = False, start: int = 0) -> Rotary:
    speed = 100.0 ** -torch.linspace(0, 1, pairs, dtype=torch.float64)
    angle = torch.arange(lines, dtype=torch.float64)[:, None] * speed
    return Rotary(angle.cos().float(), angle.sin().float(), interleaved, start)


def turned(x: torch.Tensor, rope: Rotary, position: int) -> np.ndarray:
    """`x [heads, D]` rotated pair by pair in float32, each operation rounded by itself."""
    out = x.float().numpy().copy()
    cos, sin = rope.cos[position].numpy(), rope.sin[position].numpy()
    for i in range(len(cos)):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + len(cos))
        u, v = x[:, rope.start + a].float().numpy(), x[:, rope.start + b].float().numpy()
        out[:, rope.start + a] = np.float32(u * cos[i]) - np.float32(v * sin[i])
        out[:, rope.start + b] = np.float32(v * cos[i]) + np.float32(u * sin[i])
    return out


@st.composite
def rotaries(draw: st.DrawFn, head_dim: int, lines: int) -> Rotary:
    pairs = draw(st.integers(1, head_dim // 2))
    start = draw(st.integers(0, head_dim - 2 * pairs))
    return rotary(lines, pairs, draw(st.booleans()), start)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    layout = layout_of(
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([16, 20, 64])),
        value_dim=draw(st.sampled_from([16, 24])),
        page_size=draw(st.sampled_from([8, 16])),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    new = [draw(st.integers(0, length)) for length in lengths]
    return Scene(layout, lengths, new, seed=draw(st.integers(0, 99)))


@each_backend
@settings(max_examples=20)
@given(data=st.data())
def test_appended_keys_are_rotated_by_their_positions(backend: str, data: st.DataObject) -> None:
    scene = data.draw(scenes())
    layout, dtype = scene.layout, getattr(torch, scene.layout.dtype)
    rope = data.draw(rotaries(layout.head_dim, max(scene.lengths)))
    given_dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, dtype]))
    fused = torch.randn(sum(scene.new), 2, layout.kv_heads, 64).to(given_dtype)
    k, v = fused[:, 0, :, : layout.head_dim], fused[:, 1, :, : layout.value_dim]
    plain = scene.pages.arena.clone()
    append(k, v, scene.pages._replace(arena=plain), scene.batch, backend=backend)
    with checking():
        append(k, v, scene.pages, scene.batch, rope, backend=backend)
    columns = max(scene.lengths)
    keys, values = gather_dense(scene.pages, scene.batch, columns, backend="reference")
    old_keys, old_values = gather_dense(
        scene.pages._replace(arena=plain), scene.batch, columns, backend="reference"
    )
    assert torch.equal(values, old_values)
    start = 0
    for b, (length, new) in enumerate(zip(scene.lengths, scene.new, strict=True)):
        kept = columns - new
        assert torch.equal(keys[b, :, :kept], old_keys[b, :, :kept])
        for j in range(new):
            expected = torch.from_numpy(turned(k[start + j], rope, length - new + j)).to(dtype)
            assert torch.equal(keys[b, :, kept + j], expected)
        start += new
    # What differs from an append without rotation lies in keys of new tokens.
    changed = int((plain != scene.pages.arena).sum())
    assert changed <= sum(scene.new) * layout.kv_heads * 2 * rope.cos.shape[1] * dtype.itemsize


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_keep_their_values(backend: str, dtype: str) -> None:
    """MLA: the dims behind the latent are rotated, as keys come and as pages move."""
    layout = latent_layout(40, 32, dtype=dtype)
    scene, rope = Scene(layout, [21], [9]), rotary(21, 4, interleaved=True, start=32)
    k = torch.randn(9, 1, 40).to(getattr(torch, dtype))
    append(k, None, scene.pages, scene.batch, rope, backend=backend)
    keys, values = gather_dense(scene.pages, scene.batch, 9, backend="reference")
    assert torch.equal(values[0, 0], k[:, 0, :32])
    expected = np.stack([turned(x, rope, 12 + j) for j, x in enumerate(k)])
    assert torch.equal(keys[0, 0], torch.from_numpy(expected)[:, 0].to(k.dtype))
    shift, turns = rotations([3, 3], [100.0**-x for x in range(4)], interleaved=True, start=32)
    pages = scene.batch.table[scene.batch.rows[0], :2].contiguous()
    reposition(scene.pages.arena, pages, turns, shift, layout, layer=1, backend=backend)
    moved, values = gather_dense(scene.pages, scene.batch, 9, backend="reference")
    assert torch.equal(values[0, 0], k[:, 0, :32]) and not torch.equal(moved, keys)
    with pytest.raises(GeometryError, match="start=32"):
        reposition(scene.pages.arena, pages, turns, shift._replace(start=31), layout)


@each_backend
def test_a_model_of_rotation_agrees(backend: str) -> None:
    """The halves of Llama, written as its model code writes them: x cos + rotate_half(x) sin."""
    scene = Scene(layout_of(2, 16, page_size=8), [11], [11])
    rope = rotary(11, 8)
    k = scene.k[0]
    append(k, scene.v[0], scene.pages, scene.batch, rope, backend=backend)
    cos, sin = (torch.cat((x, x), -1)[:, None] for x in (rope.cos, rope.sin))
    expected = k * cos + torch.cat((-k[..., 8:], k[..., :8]), -1) * sin
    keys, _ = gather_dense(scene.pages, scene.batch, 11, backend="reference")
    assert torch.equal(keys[0].transpose(0, 1), expected)


def test_float64_pages_are_rotated_in_float64() -> None:
    scene = Scene(layout_of(2, 16, page_size=8, dtype="float64"), [9], [9])
    rope = rotary(9, 8)
    append(scene.k[0], scene.v[0], scene.pages, scene.batch, rope)
    cos, sin = (torch.cat((x, x), -1)[:, None].double() for x in (rope.cos, rope.sin))
    k = scene.k[0]
    expected = k * cos + torch.cat((-k[..., 8:], k[..., :8]), -1) * sin
    keys, _ = gather_dense(scene.pages, scene.batch, 9)
    assert torch.equal(keys[0].transpose(0, 1), expected)


Pool = tuple[torch.Tensor, torch.Tensor, PageLayout]


def pool(layout: PageLayout, count: int, seed: int = 0) -> Pool:
    """(arena, granules of `count` scattered pages with noise in them, layout); poison between."""
    rng = torch.Generator().manual_seed(seed)
    arena = poisoned_arena(layout, 2 * count)
    pages = int32(1 + layout.granules * torch.randperm(2 * count, generator=rng)[:count])
    for layer in range(layout.layers):
        for view in page_views(Pages(arena, layout, layer)):
            shape = (count, *view.shape[1:])
            view[pages.long()] = torch.randn(shape, generator=rng).to(view.dtype)
    return arena, pages, layout


def keys_of(arena: torch.Tensor, pages: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """`[L, n, Hk, P, D]` in float64."""
    layers = [page_views(Pages(arena, layout, i))[0][pages.long()] for i in range(layout.layers)]
    return torch.stack(layers).double()


def outside_keys(arena: torch.Tensor, pages: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """The arena with the pages' keys zeroed: whatever must stay."""
    rest = arena.clone()
    for layer in range(layout.layers):
        page_views(Pages(rest, layout, layer))[0][pages.long()] = 0
    return rest


def pair_lengths(keys: torch.Tensor, rope: Rotary) -> torch.Tensor:
    """The length of the pair to which an element belongs; 0 where it is not rotated."""
    end = rope.start + 2 * rope.cos.shape[1]
    part = keys[..., rope.start : end]
    if rope.interleaved:
        length = part.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    else:
        length = part.unflatten(-1, (2, -1)).norm(dim=-2).repeat(*[1] * (part.dim() - 1), 2)
    out = torch.zeros_like(keys)
    out[..., rope.start : end] = length
    return out


@settings(max_examples=20)
@given(data=st.data())
def test_implementations_write_the_same_bits(data: st.DataObject) -> None:
    layout = layout_of(
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([16, 20, 48])),
        page_size=data.draw(st.sampled_from([8, 24])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        layers=3,
    )
    arena, pages, _ = pool(layout, data.draw(st.integers(0, 4)), data.draw(st.integers(0, 99)))
    rope = data.draw(rotaries(layout.head_dim, 6))
    turns = int32(data.draw(st.integers(-1, 5)) for _ in pages)
    layer = data.draw(st.sampled_from([None, 0, 1, 2]))
    rest, before = outside_keys(arena, pages, layout), keys_of(arena, pages, layout)
    arenas = [arena, arena.clone()]
    with checking():
        for x, backend in zip(arenas, ("reference", "cpu"), strict=True):
            reposition(x, pages, turns, rope, layout, layer=layer, backend=backend)
    assert torch.equal(*arenas)
    assert torch.equal(outside_keys(arena, pages, layout), rest)
    after = keys_of(arena, pages, layout)
    for n in range(layout.layers):
        for i, turn in enumerate(turns.tolist()):
            expected = before[n, i]
            if turn >= 0 and layer in (None, n):
                flat = turned(expected.flatten(0, 1).float(), rope, turn)
                dtype = getattr(torch, layout.dtype)
                expected = torch.from_numpy(flat).to(dtype).double().view(expected.shape)
            assert torch.equal(after[n, i], expected)


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_two_moves_are_one_within_the_bound(backend: str, dtype: str, interleaved: bool) -> None:
    arena, pages, layout = pool(layout_of(2, 32, page_size=8, dtype=dtype), 5)
    speed = 1e4 ** -torch.linspace(0, 1, 12)
    before = keys_of(arena, pages, layout)
    a, b = [1000, -3, 0, 70_000, -512], [24, 3, 11, -70_000, 0]
    once, both = arena.clone(), [x + y for x, y in zip(a, b, strict=True)]
    for deltas in (a, b):
        rope, turns = rotations(deltas, speed, interleaved=interleaved, start=4)
        reposition(arena, pages, turns, rope, layout, backend=backend)
    rope, turns = rotations(both, speed, interleaved=interleaved, start=4)
    reposition(once, pages, turns, rope, layout, backend=backend)
    length = pair_lengths(before, rope)
    error = (keys_of(arena, pages, layout) - keys_of(once, pages, layout)).abs()
    assert (error <= (3 * ROUNDOFF[dtype] + 2.0**-20) * length).all()
    assert (error > 0).any() and both[1] == both[3] == 0


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_good_as_computed_at_the_new_position(backend: str, dtype: str) -> None:
    """Keys that were rotated for p, rounded, and moved by d, beside the exact keys of p + d."""
    layout = layout_of(1, 32, page_size=16, dtype=dtype, layers=1)
    speed = 1e4 ** -torch.linspace(0, 1, 16)
    exact = torch.randn(16, 1, 32, dtype=torch.float64)

    def rotated(first: int) -> torch.Tensor:
        angle = torch.arange(first, first + 16)[:, None, None].double() * speed.double()
        x, y = exact.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((x * cos - y * sin, y * cos + x * sin), -1)  # [P, Hk, D]

    arena = poisoned_arena(layout, 1)
    keys, _ = page_views(Pages(arena, layout, 0))
    for old, new in ((0, 100_000), (5000, 16), (77, 78)):
        keys[1] = rotated(old).transpose(0, 1).to(keys.dtype)
        rope, turns = rotations([new - old], speed)
        reposition(arena, int32([1]), turns, rope, layout, backend=backend)
        error = (keys[1].double() - rotated(new).transpose(0, 1)).abs()
        bound = (2 * ROUNDOFF[dtype] + 2.0**-21) * pair_lengths(exact.transpose(0, 1), rope)
        assert (error <= bound).all()


@each_backend
def test_nothing_moves_bit_for_bit(backend: str) -> None:
    """Not even a sign of zero, which x * 1 - y * 0 would lose, nor NaN."""
    layout = layout_of(2, 16, page_size=8, dtype="bfloat16")
    arena, pages, _ = pool(layout, 3)
    keys, _ = page_views(Pages(arena, layout, 0))
    keys[pages[0].long(), 0, 0] = -0.0
    before = arena.clone()
    rope, turns = rotations([0, 5, 0], torch.ones(8))
    assert turns.tolist() == [-1, 0, -1] and rope.cos.shape == (1, 8)
    reposition(arena, pages[[0, 2]], turns[[0, 2]], rope, layout, backend=backend)
    assert torch.equal(arena, before)
    rope, turns = rotations([0], torch.ones(8))
    reposition(arena, pages[:1], turns, rope, layout, backend=backend)
    assert torch.equal(arena, before)


@pytest.mark.parametrize("speed", [[1.0, 0.1], torch.tensor([1.0, 0.1])])
def test_angles_are_exact_far_away(speed: list[float] | torch.Tensor) -> None:
    deltas = [1_000_003, -1_000_003, 1, 1]
    rope, turns = rotations(deltas, speed)
    assert turns.tolist() == [2, 0, 1, 1]
    for delta, turn in zip(deltas, turns.tolist(), strict=True):
        angle = delta * torch.as_tensor(speed, dtype=torch.float64).numpy()
        assert np.array_equal(rope.cos[turn].numpy(), np.cos(angle).astype(np.float32))
        assert np.array_equal(rope.sin[turn].numpy(), np.sin(angle).astype(np.float32))


def test_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "slices", lambda work, least: 5)
    arena, pages, layout = pool(layout_of(3, 16, page_size=8), 4)
    rope, turns = rotations([1, 2, 0, -9], torch.rand(8))
    arenas = [arena, arena.clone()]
    for x, backend in zip(arenas, ("reference", "cpu"), strict=True):
        reposition(x, pages, turns, rope, layout, backend=backend)
    assert torch.equal(*arenas)
    scene = Scene(layout_of(3, 16, page_size=8), [33, 3], [30, 3])
    k, v = torch.randn(2, 33, 3, 16)
    arenas = [scene.pages.arena, scene.pages.arena.clone()]
    for x, backend in zip(arenas, ("reference", "cpu"), strict=True):
        append(k, v, scene.pages._replace(arena=x), scene.batch, rotary(40, 8), backend=backend)
    assert torch.equal(*arenas)


Call = Callable[[Scene, torch.Tensor, Rotary], object]


def moves(turns: torch.Tensor, rope: Rotary, s: Scene, layer: int | None = None) -> None:
    reposition(s.pages.arena, int32([1]), turns, rope, s.layout, layer=layer)


REFUSED: dict[str, tuple[Call, str]] = {
    "too few positions": (
        lambda s, x, r: append(x, x, s.pages, s.batch, Rotary(r.cos[:8], r.sin[:8])),
        "8 lines of rotations for 9 positions",
    ),
    "cos once per dim": (
        lambda s, x, r: append(x, x, s.pages, s.batch, Rotary(*[torch.ones(9, 16)] * 2)),
        "32 rotated dims from 0 on, of 16",
    ),
    "beyond the head": (
        lambda s, x, r: append(x, x, s.pages, s.batch, r._replace(start=1)),
        "16 rotated dims from 1 on",
    ),
    "no dims": (
        lambda s, x, r: append(x, x, s.pages, s.batch, Rotary(*[torch.ones(9, 0)] * 2)),
        "0 rotated dims",
    ),
    "dtype": (
        lambda s, x, r: append(x, x, s.pages, s.batch, r._replace(cos=r.cos.half())),
        "cos is torch.float16",
    ),
    "shapes": (
        lambda s, x, r: append(x, x, s.pages, s.batch, r._replace(sin=r.sin[1:])),
        r"sin is torch.float32 \(8, 8\)",
    ),
    "strides": (lambda s, x, r: moves(int32([0]), Rotary(*[torch.ones(8, 9).T] * 2), s), "cos is"),
    "turns": (lambda s, x, r: moves(int32([0, 1]), r, s), r"turns are torch.int32 \(2,\)"),
    "turns dtype": (lambda s, x, r: moves(torch.zeros(1), r, s), "turns are torch.float32"),
    "line beyond": (lambda s, x, r: moves(int32([9]), r, s), "numbers from -1 to 8"),
    "layer": (lambda s, x, r: moves(int32([0]), r, s, layer=2), "layer 2 of a group of 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    scene = Scene(layout_of(2, 16, page_size=8), [9], [9])
    with checking(), pytest.raises(GeometryError, match=message):
        call(scene, scene.k[0], rotary(9, 8))


def test_sealed_pages_are_decoded_first() -> None:
    import msgspec

    arena, pages, layout = pool(layout_of(1, 16, page_size=8), 1)
    sealed = msgspec.structs.replace(layout, codec="kv8")
    rope, turns = rotations([3], torch.ones(8))
    with pytest.raises(ConfigError, match="Use a codec of: raw"):
        reposition(arena, pages, turns, rope, sealed)
