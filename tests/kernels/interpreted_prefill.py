"""Triton kernels for many new tokens in Triton's interpreter: sealed prefixes, every switch.

Run by `test_triton_interpreter`, as `interpreted` is.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.kernels import (
    Scoring,
    cascade_attention,
    drop_tokens,
    gather_dense,
    plan_cascade,
    transcode,
)
from flowkv.kernels import paged_attention as flat_attention
from tests.inside import (
    CODEC_SHIFT,
    GRANULE_BYTES,
    GRANULE_MASK,
    ConfigError,
    codec_of,
    paged_attention,
)
from tests.inside import attend as triton_attend
from tests.inside import codec as triton_unseal
from tests.inside import many as triton_many
from tests.kernels.latent import SWITCHES as LATENT_SWITCHES
from tests.kernels.latent import latent_layout
from tests.kernels.scene import (
    Scene,
    alone,
    attend,
    check_tokens_of_no_row,
    int32,
    layout_of,
)

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/kernels/test_triton_interpreter.py"

TOLERANCE = {"float32": 2e-5, "float16": 3e-3}
CODECS = ("kv8", "k8v4", "kv4c", "kv4h")


@pytest.fixture(autouse=True)
def all_rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few query rows too are served here, not by the decode kernel."""
    monkeypatch.setattr(triton_attend, "MOST_COLUMNS", 0)


@pytest.mark.parametrize(
    ("past", "new", "padded"), [(0, 20, 32), (0, 1, 32), (0, 3, 64), (150, 60, 64), (700, 40, 64)]
)
def test_tokens_of_no_row_behind_a_single_row(past: int, new: int, padded: int) -> None:
    check_tokens_of_no_row(past, new, padded, TOLERANCE["float32"], "triton")


def check(scene: Scene, q: torch.Tensor, how: Scoring, near: float) -> torch.Tensor:
    """Compare the kernels with attention over the tokens themselves; their output."""
    bounds = {"near_lse": 2 * near, "near_mass": (1e-4, 10 * near)}
    return attend(scene, q, how, near, "triton", **bounds)


DIMS = [(64, 64), (128, 96), (80, 72), (96, 64)]
PAIRS = [  # the rotated codec over all, others over half of them; all pairs where there is time
    pytest.param(
        codec,
        dims,
        marks=pytest.mark.slow if codec != "kv4h" and (c + d) % 2 else [],
        id=f"{codec}-{dims}",
    )
    for c, codec in enumerate(CODECS)
    for d, dims in enumerate(DIMS)
]


@pytest.mark.parametrize(("codec", "dims"), PAIRS)
def test_sealed_pages_of_a_prompt(codec: str, dims: tuple[int, int]) -> None:
    """Every codec alone, over head dims whose halves and rotations do not fit each other."""
    layout = layout_of(2, *dims, 64, "float16")
    scene = Scene(layout, [190, 70, 200], [40, 6, 1], sealed=(codec,))
    check(scene, scene.queries(3), Scoring(scale=0.1), 3e-3)


@pytest.mark.parametrize(("dim", "page"), [(20, 16), (16, 24), (128, 8), (256, 32)])
def test_sealed_bytes_in_small_pages(dim: int, page: int) -> None:
    layout = layout_of(1, dim, page_size=page)
    scene = Scene(layout, [page * 5 + 3, 4 * page], [35, 36], sealed=("kv8",))
    check(scene, scene.queries(1), Scoring(scale=0.1), 2e-5)


def test_sealed_wide_heads_and_pages() -> None:
    layout = layout_of(1, 256, 256, 128, "float16")
    scene = Scene(layout, [300], [40], sealed=CODECS, far=True)
    check(scene, scene.queries(1), Scoring(scale=0.05), 3e-3)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sealed_is_as_if_decoded(dtype: str) -> None:
    """Bit for bit what attention over the same pages gives after `transcode` into raw."""
    layout = layout_of(2, 64, 64, 64, dtype)
    scene = Scene(layout, [200, 290], [9, 40], sealed=CODECS)
    pages, table = scene.pages, scene.batch.table.clone()
    forms = {form.codec: form for form in pages.sealed}
    end = pages.arena.numel() // GRANULE_BYTES
    spare = torch.zeros(table.numel() * layout.page_bytes, dtype=torch.uint8)
    arena = torch.cat([pages.arena, spare])
    for place in (table >> CODEC_SHIFT > 0).nonzero().tolist():
        page = int(table[tuple(place)])
        old, new = int32([page & GRANULE_MASK]), int32([end])
        transcode(arena, old, new, forms[codec_of(page)], layout, backend="reference")
        table[tuple(place)] = end
        end += layout.granules
    q, how = scene.queries(2), Scoring(scale=0.1)
    decoded = pages._replace(arena=arena, sealed=())
    expected = paged_attention(q, decoded, scene.batch._replace(table=table), how)
    assert (scene.batch.table != table).sum() >= 4
    assert torch.equal(paged_attention(q, pages, scene.batch, how), expected)


BLOCKS = [  # whole, and cut into chunks
    pytest.param(1, [150, 70], [30, 1], id="1-whole"),
    pytest.param(2, [330], [9], id="2-chunks"),
    pytest.param(1, [330], [9], id="1-chunks", marks=pytest.mark.slow),
    pytest.param(2, [150, 70], [30, 1], id="2-whole", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("heads_at_once", "lengths", "new"), BLOCKS)
def test_sealed_heads_a_few_at_a_time(
    heads_at_once: int, lengths: list[int], new: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few heads the spare runs hold, and whether blocks are cut into chunks or not."""
    layout = layout_of(3, 64, 64, 64, "float16")
    scene = Scene(layout, lengths, new, sealed=("kv8", "kv4c", "kv4h"), seed=heads_at_once)
    spare = heads_at_once * layout.run_bytes * -(-max(lengths) // 64) * len(new)
    monkeypatch.setattr(triton_unseal, "SPARE_BYTES", spare)
    mass = torch.ones(len(new), -(-max(lengths) // 64), 3)
    check(scene, scene.queries(2), Scoring(scale=0.1, mass=mass), 3e-3)


def test_sealed_spare_runs_fit_what_the_host_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt among decoding rows needs the spare runs of one row."""
    sizes, empty = [], torch.Tensor.new_empty

    def noted(like: torch.Tensor, *size: int, **options: object) -> torch.Tensor:
        sizes.append(size[0])
        return empty(like, *size, **options)

    layout = layout_of(1, 64, 64, 64)
    scene = Scene(layout, [140, 70, 150, 135], [1, 1, 40, 1], sealed=("kv8",))
    scene.batch = scene.batch._replace(most_prompts=1)
    monkeypatch.setattr(triton_attend, "MOST_COLUMNS", 32)
    with monkeypatch.context() as patch:
        patch.setattr(triton_unseal.torch.Tensor, "new_empty", noted)
        check(scene, scene.queries(2), Scoring(scale=0.1), 1e-2)  # decode rounds to 8 bits
    assert 3 * layout.run_bytes // 4 in sizes


SWITCHES = {
    "window": {"window": 70},
    "narrow window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "alibi and softcap": {"alibi": True, "softcap": 2.0},
    "tree": {"tree": True},
    "tree and window": {"tree": True, "window": 40},
    "cross": {"causal": False},
    "cross with sinks": {"causal": False, "sinks": True, "softcap": 3.0},
    "mass": {"mass": True},
    "all": {"mass": True, "sinks": True, "alibi": True, "tree": True, "window": 90, "softcap": 3.0},
}


def scoring(scene: Scene, heads: int, switches: dict[str, object], seed: int = 0) -> Scoring:
    """Switches of a call with tensors where `switches` says True."""
    rng, tensors = torch.Generator().manual_seed(seed), {}
    if switches.get("alibi"):
        tensors["alibi"] = torch.linspace(0.01, 0.3, heads)
    if switches.get("sinks"):
        tensors["sinks"] = torch.linspace(-2, 3, heads)
    if switches.get("tree"):
        own = torch.cat([torch.arange(n) for n in scene.new])
        bits = torch.randint(0, 2**62, (len(own),), generator=rng)
        tensors["tree"] = bits & ((2 << own) - 1) | 1 << own  # ancestors at random, and itself
    if switches.get("mass"):
        columns = -(-max(scene.lengths) // scene.layout.page_size)
        tensors["mass"] = torch.rand(len(scene.new), columns, scene.layout.kv_heads, generator=rng)
    return Scoring(**({"scale": 0.15} | switches | tensors))


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_switches(switches: dict[str, object]) -> None:
    """Rows whose blocks are not cut, and one whose pages are; raw pages, and sealed ones."""
    causal, window = bool(switches.get("causal", True)), switches.get("window")
    for lengths, new, sealed in (
        ([130, 64, 41], [40, 64, 41], ("kv8",)),
        ([90, 41], [40, 41], ()),
        ([400, 8], [24, 0], ("kv8",)),
    ):
        layout = layout_of(1, 32, page_size=32, dtype="float16")
        scene = Scene(layout, lengths, new, window, sealed=sealed, causal=causal)
        how = scoring(scene, 2, switches)
        check(scene, scene.queries(2), how, 3e-3)


def test_switches_cross_attention_over_other_lengths() -> None:
    """Queries of another sequence: more of them than tokens, none at all, over nothing."""
    layout = layout_of(1, 64, 64, 64)
    scene = Scene(layout, [70, 200, 64, 9], [0] * 4, sealed=("kv8", "kv4c"), causal=False)
    for new in ([90, 3, 0, 40], [1, 1, 1, 1]):
        starts = torch.tensor([0, *new]).cumsum(0).int()
        scene.batch = scene.batch._replace(starts=starts, most_new=max(new))
        scene.new = new
        check(scene, scene.queries(2), Scoring(scale=0.1, causal=False), 2e-5)
    empty = scene.batch._replace(lengths=int32([0] * 4), most_length=64)
    q = torch.randn(4, 40, 64)
    how = Scoring(scale=0.1, causal=False, return_lse=True)
    o, lse = paged_attention(q, scene.pages, empty, how)
    assert (o == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("kind", ["raw", pytest.param("kv8", marks=pytest.mark.slow), "latent"])
def test_switches_invariant(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's bits are the same alone, among others, and with another number of processors."""
    monkeypatch.setattr(triton_many, "INVARIANT_TOKENS", 64)
    if kind == "latent":
        layout = latent_layout(40, 32, 32, "float16")
    else:
        layout = layout_of(1, 32, page_size=32, dtype="float16")
    sealed = ("kv8",) if kind == "kv8" else ()
    # Alone, the long row's pages would be cut into chunks; among the others, not.
    scene = Scene(layout, [290, 70, 7], [18, 60, 1], sealed=sealed)
    q, how = scene.queries(2), Scoring(scale=0.1, invariant=True, sinks=torch.tensor([0.5, -1.0]))
    together = check(scene, q, how, 3e-3)
    first = 0
    for b, new in enumerate(scene.new):
        part = slice(first, first + new)
        assert torch.equal(
            paged_attention(q[part], scene.pages, alone(scene, b), how), together[part]
        )
        first += new


@settings(max_examples=6)
@given(data=st.data())
def test_sealed_anything(data: st.DataObject) -> None:
    draw = data.draw
    size = draw(st.sampled_from([16, 64]))
    dim = draw(st.sampled_from([64, 96]))
    layout = layout_of(draw(st.integers(1, 2)), dim, page_size=size)
    new = draw(st.lists(st.sampled_from([0, 33, 2, 40]), min_size=1, max_size=3))
    lengths = [max(1, n + draw(st.sampled_from([0, 1, size, 3 * size + 1, 190]))) for n in new]
    tree = max(new) <= 64 and draw(st.booleans())
    switches = {
        "window": draw(st.sampled_from([None, 1, size, 100])),
        "softcap": draw(st.sampled_from([None, 4.0])),
        "sinks": draw(st.booleans()) or None,
        "alibi": draw(st.booleans()) or None,
        "mass": draw(st.booleans()) or None,
        "tree": tree or None,
    }
    known = ("kv8",) if size < 64 else CODECS
    sealed = tuple(codec for codec in known if draw(st.booleans()))
    seed = draw(st.integers(0, 9))
    scene = Scene(layout, lengths, new, switches["window"], seed, sealed=sealed)
    group = draw(st.sampled_from([1, 3]))
    how = scoring(scene, group * layout.kv_heads, switches, seed)
    check(scene, scene.queries(group), how, 2e-5)


@pytest.mark.parametrize("switches", LATENT_SWITCHES.values(), ids=LATENT_SWITCHES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_latent_rows(switches: dict[str, object], dtype: str) -> None:
    """Decode and prompts in one batch; a row alone, whose pages are cut."""
    dims, window = ((80, 64) if dtype == "float16" else (40, 32)), switches.get("window")
    for lengths, new, heads in (([150, 70, 9, 5], [1, 40, 9, 0], 3), ([330], [1], 20)):
        scene = Scene(latent_layout(*dims, 32, dtype), lengths, new, window)
        how = scoring(scene, heads, switches)
        check(scene, scene.queries(heads), how, TOLERANCE[dtype])


def test_latent_is_read_where_it_lies() -> None:
    """The dims of DeepSeek's models, and pages that tiles do not divide."""
    scene = Scene(latent_layout(576, 512, 24, "float16"), [50], [1])
    check(scene, scene.queries(16), Scoring(scale=0.05), 3e-3)


def test_latent_movement() -> None:
    """Written by the Triton kernel, read as dense keys of which values are a view."""
    layout = latent_layout(40, 32)
    scene = Scene(layout, [70, 3], [7, 3], backend="triton")
    for columns in (33, 75):
        k, v = gather_dense(scene.pages, scene.batch, columns, backend="triton")
        expected, _ = gather_dense(scene.pages, scene.batch, columns, backend="reference")
        assert torch.equal(k, expected) and torch.equal(v, k[..., :32])
    arenas = [torch.cat([scene.pages.arena, scene.pages.arena]) for _ in range(2)]
    granules = scene.pages.arena.numel() // 4096
    keep = torch.arange(0, 40, 2, dtype=torch.int32).expand(2, 1, -1)
    source = scene.batch.table[scene.batch.rows[0], :3].contiguous()
    target = source[:2] + granules
    for arena, backend in zip(arenas, ("triton", "reference"), strict=True):
        drop_tokens(arena, source, target, keep, layout, backend=backend)
    assert torch.equal(*arenas)


def test_latent_has_no_kernel_for_mass() -> None:
    scene = Scene(latent_layout(40, 32), [20], [1])
    with pytest.raises(ConfigError, match="Leave `mass` out"):
        paged_attention(
            scene.queries(2), scene.pages, scene.batch, Scoring(0.1, mass=torch.zeros(1, 2, 1))
        )


@pytest.mark.parametrize("sealed", [(), ("kv8", "kv4c")])
def test_switches_cascade(sealed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two groups and one of none, over shared pages that are raw, sealed or mixed."""
    monkeypatch.setattr(triton_attend, "MOST_COLUMNS", 32)
    scene = Scene(
        layout_of(1, 64, 64, 64), [200, 150, 140, 270, 260], [1, 2, 1, 1, 5], sealed=sealed
    )
    table, lines = scene.batch.table.clone(), scene.batch.rows.tolist()
    table[lines[1], :2] = table[lines[0], :2]
    table[lines[4], :3] = table[lines[3], :3]
    batch = scene.batch._replace(table=table)
    plan = plan_cascade(batch, 64, least_tokens=1)
    assert [group[:2] for group in plan.groups] == [(0, 2), (3, 5)]
    q, sinks = scene.queries(2), torch.tensor([0.5, -1.0])
    options = {"scale": 0.2, "sinks": sinks, "return_lse": True}
    expected = flat_attention(q, scene.pages, batch, backend="reference", **options)
    got = cascade_attention(q, scene.pages, batch, plan, backend="triton", **options)
    near = 2e-2 if sealed else 2e-5  # the decode kernel rounds weights to 8 bits
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=near)
