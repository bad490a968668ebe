"""A step's calls prepared for all layers do what the general operations do, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.kernels import append, checking, paged_attention, prepare_decode
from tests.inside import attention as cpu_attention
from tests.inside import cpu_pool
from tests.inside import layout_CODECS as CODECS
from tests.kernels.scene import Scene, layout_of

SHAPES = ("[B, H, 1, D]", "[1, H, B, D]", "[B, H, D]")


def shaped(x: torch.Tensor, shape: str) -> torch.Tensor:
    """Packed `[B, H, D]` as a view of that shape, whose strides are a model's."""
    if shape == "[B, H, D]":
        return x
    return x.unsqueeze(2) if shape == "[B, H, 1, D]" else x.transpose(0, 1).unsqueeze(0)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    size = draw(st.sampled_from([16, 64]))
    dim = draw(st.sampled_from([16, 64, 80]))
    codecs = CODECS[1:] if dim >= 64 and size >= 64 and draw(st.booleans()) else ()
    layout = layout_of(
        kv_heads=draw(st.integers(1, 3)),
        head_dim=dim,
        value_dim=draw(st.sampled_from([dim, 72 if codecs else 24])),
        page_size=size,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        layers=3,
    )
    lengths = draw(st.lists(st.integers(1, 5 * size + 1), min_size=1, max_size=4))
    window = draw(st.sampled_from([None, 1, size, size + 3]))
    return Scene(layout, lengths, [1] * len(lengths), window, sealed=codecs, layer=2)


@settings(max_examples=25)
@given(
    scene=scenes(),
    group=st.sampled_from([1, 2, 3, 5]),
    softcap=st.sampled_from([None, 20.0]),
    with_sinks=st.booleans(),
    shape=st.sampled_from(SHAPES),
    slices=st.sampled_from([1, 7]),
)
def test_it_is_what_the_operations_do(
    scene: Scene, group: int, softcap: float | None, with_sinks: bool, shape: str, slices: int
) -> None:
    layout, (arena, *_), n = scene.layout, scene.pages, len(scene.lengths)
    dtype = getattr(torch, layout.dtype)
    k, q = (
        torch.randn(h, n, layout.head_dim).to(dtype).transpose(0, 1)
        for h in (layout.kv_heads, layout.kv_heads * group)
    )
    v = torch.randn(n, layout.kv_heads, layout.value_dim).to(dtype)
    sinks = torch.linspace(-1, 2, q.shape[1]) if with_sinks else None
    other = scene.pages._replace(arena=arena.clone())
    how = {"scale": 0.2, "softcap": softcap, "sinks": sinks}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "slices", lambda work, least: slices)
        append(k, v, scene.pages, scene.batch, backend="cpu")
        wanted = paged_attention(
            q, scene.pages, scene.batch, window=scene.window, backend="cpu", **how
        )
        decode = prepare_decode(other, scene.batch, scene.window)
        assert decode.append(scene.layer, shaped(k, shape), shaped(v, shape))
        assert torch.equal(other.arena, arena)
        for _ in range(2):  # what was prepared for the first layer serves the others
            found = decode.attend(scene.layer, shaped(q, shape), **how)
            assert torch.equal(found.reshape(wanted.shape), wanted)
    assert found.shape[:-2] == {"[B, H, D]": (n,), "[B, H, 1, D]": (n, 1)}.get(shape, (1, n))


def test_what_does_not_fit_is_left_to_the_operations() -> None:
    scene = Scene(layout_of(2, 16), [9, 20], [1, 1])
    decode = prepare_decode(scene.pages, scene.batch, None)
    k, q = torch.randn(2, 2, 1, 16), torch.randn(2, 4, 1, 16)
    assert decode.append(0, k, k) and decode.attend(0, q) is not None
    for odd in (k[:1], k[:, :1], k[..., :8], k.double(), k.mT.contiguous().mT.expand(2, 2, 2, 16)):
        assert not decode.append(0, odd, k) and not decode.append(0, k, odd)
    for odd in (q[:1], q[:, :3], q[..., :8], q.bfloat16()):
        assert decode.attend(0, odd) is None
    assert decode.attend(0, q, sinks=torch.zeros(3)) is None
    assert decode.attend(0, q, sinks=torch.zeros(4).double()) is None
    for softcap in (0.0, -1.0, torch.tensor(20.0)):
        assert decode.attend(0, q, softcap=softcap) is None
    assert decode.attend(0, q[:, :0]) is None
    with checking():
        assert prepare_decode(scene.pages, scene.batch, None) is None


def test_outputs_are_tensors_of_their_own() -> None:
    scene = Scene(layout_of(2, 16, layers=3), [9, 20], [1, 1])
    decode = prepare_decode(scene.pages, scene.batch, None)
    q = torch.randn(2, 4, 1, 16)
    with torch.no_grad():
        one, two = decode.attend(0, q), decode.attend(1, q)
    assert (
        one._base is None and one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()
    )
    one.mul_(torch.ones(1, requires_grad=True))  # no view, which could not be changed in place


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what C ignores
@pytest.mark.parametrize("slices", [1, 7])
@pytest.mark.parametrize("team", [True, False])
def test_what_could_not_be_computed_is_raised(
    slices: int, team: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice that finds no memory to work with leaves its part of the answer unwritten."""
    monkeypatch.setattr(cpu_attention, "slices", lambda work, least: slices)
    if not team:
        monkeypatch.setattr(cpu_pool, "_team", 0)
    scene = Scene(layout_of(2, 16), [9, 20], [1, 1])
    decode = prepare_decode(scene.pages, scene.batch, None)
    q = torch.randn(2, 4, 1, 16)
    assert decode.attend(0, q) is not None
    decode._call._operands[cpu_attention.fields.MOST_ROWS] = 1 << 50
    with pytest.raises(MemoryError):
        decode.attend(0, q)


@pytest.mark.parametrize("team", [True, False])
def test_in_threads_of_torch_or_of_its_own(team: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows are read by several threads, with the bits that one makes of the same slices."""
    if not team:
        monkeypatch.setattr(cpu_pool, "_team", 0)
    elif not cpu_pool.team():
        pytest.skip("torch computes without GNU's OpenMP here")
    scene = Scene(layout_of(2, 64, page_size=64), [3000, 70], [1, 1])
    q, answers = scene.queries(3), []
    monkeypatch.setattr(cpu_attention, "slices", lambda work, least: 9)
    for threads in (1, 2, 3, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        answers.append(paged_attention(q, scene.pages, scene.batch, backend="cpu"))
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    expected, _ = scene.dense(q, 64**-0.5)
    torch.testing.assert_close(answers[0].double(), expected.double(), rtol=0, atol=4e-6)
