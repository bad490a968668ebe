"""Latents (MLA): pages without values, and every operation over them, on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv import LayerGroup
from flowkv.kernels import (
    Scoring,
    append,
    cascade_attention,
    checking,
    drop_tokens,
    gather_dense,
    paged_attention,
    plan_cascade,
    transcode,
)
from tests.inside import GRANULE_BYTES, ConfigError, GeometryError, page_layout
from tests.inside import layout_CODECS as CODECS
from tests.kernels.latent import SWITCHES, latent_layout
from tests.kernels.scene import Scene, attend, int32

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def test_values_take_no_bytes() -> None:
    group = LayerGroup(layers=(0, 1), kv_heads=1, head_dim=576, value_dim=512, kind="latent")
    layout = page_layout(group, 64)
    assert layout.run_bytes == layout.stripe_bytes == 64 * 576 * 4
    assert (layout.latent, layout.value_stride, layout.stored_value_dim) == (True, 576, 0)
    assert group.token_bytes == 2 * 576 * 4
    full = page_layout(LayerGroup(layers=(0,), kv_heads=1, head_dim=576, value_dim=512), 64)
    assert (full.latent, full.value_stride, full.stored_value_dim) == (False, 512, 512)
    assert full.fingerprint() != layout.fingerprint()


@pytest.mark.parametrize("codec", CODECS[1:])
def test_raw_is_the_only_codec(codec: str) -> None:
    group = LayerGroup(layers=(0,), kv_heads=1, head_dim=576, value_dim=512, kind="latent")
    with pytest.raises(ConfigError, match="Use codec='raw'"):
        page_layout(group, 128, codec)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@settings(max_examples=15)
@given(data=st.data(), switches=st.sampled_from(list(SWITCHES.values())))
def test_attention(backend: str, data: st.DataObject, switches: dict[str, object]) -> None:
    draw = data.draw
    size = draw(st.sampled_from([8, 16, 64]))
    dtype = draw(st.sampled_from(sorted(TOLERANCE)))
    dims = draw(st.sampled_from([(576, 512), (40, 32), (24, 24), (80, 48)]))
    layout = latent_layout(*dims, size, dtype)
    new = draw(st.lists(st.sampled_from([0, 1, 2, 30]), min_size=1, max_size=3))
    lengths = [max(1, n + draw(st.sampled_from([0, 1, size, 100]))) for n in new]
    scene = Scene(layout, lengths, new, switches.get("window"), seed=draw(st.integers(0, 9)))
    q = scene.queries(draw(st.sampled_from([1, 3, 16])))
    how = Scoring(**{"scale": 0.05} | switches | tensors(scene, q.shape[1], switches))
    attend(scene, q, how, TOLERANCE[dtype], backend)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_weights_of_pages(backend: str) -> None:
    scene = Scene(latent_layout(40, 32), [70, 33], [1, 3])
    q, mass = scene.queries(5), torch.ones(2, 5, 1)
    paged_attention(q, scene.pages, scene.batch, scale=0.2, mass=mass, backend=backend)
    _, _, expected = scene.answer(q, Scoring(scale=0.2))
    torch.testing.assert_close(mass.double(), 1 + expected, rtol=0, atol=1e-5)


def tensors(scene: Scene, heads: int, switches: dict[str, object]) -> dict[str, torch.Tensor]:
    """Tensors for the switches that say True."""
    own = torch.cat([torch.arange(n) for n in scene.new])
    known = {
        "sinks": torch.linspace(-2, 3, heads),
        "alibi": torch.linspace(0.01, 0.3, heads),
        "tree": 0b1010_1010_1010 & ((2 << own) - 1) | 1 << own,
    }
    return {name: x for name, x in known.items() if switches.get(name)}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_append_and_gather(backend: str) -> None:
    scene = Scene(latent_layout(40, 32), [70, 3, 41], [7, 3, 0], backend=backend)
    for columns in (1, 33, 70, 75):
        with checking():
            k, v = gather_dense(scene.pages, scene.batch, columns, backend=backend)
        assert torch.equal(v, k[..., :32]) and v.data_ptr() == k.data_ptr()
        for line, own in zip(k[:, 0], scene.k, strict=True):
            count = min(columns, len(own))
            assert torch.equal(line[columns - count :], own[len(own) - count :, 0])
            assert (line[: columns - count] == 0).all()


def test_values_beside_latents_are_refused() -> None:
    scene = Scene(latent_layout(40, 32), [20], [3])
    k = torch.zeros(3, 1, 40)
    with pytest.raises(GeometryError, match="v=None to latent"):
        append(k, k[..., :32], scene.pages, scene.batch)
    full = Scene(page_layout(LayerGroup(layers=(0, 1), kv_heads=1, head_dim=40, value_dim=32), 16),
                 [20], [3])  # fmt: skip
    with pytest.raises(GeometryError, match="Pass values"):
        append(k, None, full.pages, full.batch)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_tokens_are_dropped_whole(backend: str) -> None:
    layout = latent_layout(40, 32)
    scene = Scene(layout, [48], [0], layer=0)
    source = scene.batch.table[scene.batch.rows[0], :3].contiguous()
    arena = torch.cat([scene.pages.arena, torch.zeros(2 * layout.page_bytes, dtype=torch.uint8)])
    target = int32(
        [scene.pages.arena.numel() // GRANULE_BYTES + i * layout.granules for i in (0, 1)]
    )
    kept = torch.arange(0, 48, 2, dtype=torch.int32)
    keep = kept.expand(layout.layers, 1, -1).contiguous()
    drop_tokens(arena, source, target, keep, layout, backend=backend)
    table = scene.batch.table.clone()
    table[scene.batch.rows[0], :2] = target
    batch = scene.batch._replace(table=table, lengths=int32([24]), most_length=24)
    k, _ = gather_dense(scene.pages._replace(arena=arena), batch, 24)
    assert torch.equal(k[0, 0], scene.k[0][kept.long(), 0])


def test_transcoding_is_refused() -> None:
    layout = latent_layout(40, 32)
    arena = torch.zeros(2 * layout.page_bytes, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="their only codec is raw"):
        transcode(arena, int32([0]), int32([layout.granules]), layout, layout)


def test_cascade_over_latents() -> None:
    scene = Scene(latent_layout(40, 32), [70, 75, 66], [1, 2, 1])
    table = scene.batch.table.clone()
    lines = scene.batch.rows.tolist()
    for line in lines[1:]:
        table[line, :4] = table[lines[0], :4]
    batch = scene.batch._replace(table=table)
    plan = plan_cascade(batch, 16, least_tokens=1)
    assert [group.pages for group in plan.groups] == [4]
    q = scene.queries(4)
    flat = paged_attention(q, scene.pages, batch, backend="reference")
    for backend in ("reference", "cpu"):
        got = cascade_attention(q, scene.pages, batch, plan, backend=backend)
        torch.testing.assert_close(got, flat, rtol=0, atol=1e-5)


def test_heads_share_each_latent() -> None:
    """What absorbed MLA computes: per head, q_nope absorbed by W_uk, and o decompressed by W_uv."""
    rng = torch.Generator().manual_seed(0)
    heads, rank, rope, dim, length = 4, 32, 8, 12, 21
    up_k, up_v = (torch.randn(heads, dim, rank, generator=rng) for _ in range(2))
    latents, turned = (torch.randn(length, n, generator=rng) for n in (rank, rope))
    q_nope, q_rope = (torch.randn(1, heads, n, generator=rng) for n in (dim, rope))
    scene = Scene(latent_layout(rank + rope, rank), [length], [1])
    every = scene.batch._replace(starts=int32([0, length]), most_new=length)
    append(torch.cat([latents, turned], 1)[:, None], None, scene.pages, every)
    scale = (dim + rope) ** -0.5
    q = torch.cat([torch.einsum("thd,hdr->thr", q_nope, up_k), q_rope], 2)
    o = paged_attention(q, scene.pages, scene.batch, scale=scale)
    got = torch.einsum("thr,hdr->thd", o, up_v)
    for h in range(heads):
        k = torch.cat([latents @ up_k[h].T, turned], 1)
        p = torch.softmax(torch.cat([q_nope, q_rope], 2)[0, h] @ k.T * scale, 0)
        torch.testing.assert_close(got[0, h], p @ (latents @ up_v[h].T), rtol=1e-5, atol=1e-4)
