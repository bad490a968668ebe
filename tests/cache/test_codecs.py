"""Encoded pages through a whole cache: what they hold, who shares them, where they go."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Items
from contextlib import suppress
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import flowkv
from flowkv import KV, Geometry, LayerGroup, Sequence, kernels
from flowkv.testing import MemoryTier
from flowkv.tiers import Outcome
from tests.cache.audit import audit
from tests.cache.fakes import Deferred, Wrapped, lasting
from tests.cache.toy import (
    advance,
    content,
    geometry,
    keys_values,
    make_kv,
    opened,
    prefill,
    settle,
    write,
)
from tests.clock import together
from tests.inside import (
    CODEC_SHIFT,
    UNKNOWN,
    CapacityError,
    ConfigError,
    Encoded,
    NonFiniteError,
    Warned,
    enter_tier,
    page_layout,
)
from tests.inside import kv_plan as plan
from tests.inside import layout_CODECS as CODECS

PAGE = 64
FIXED = CODECS[1:]
EVERY = (*FIXED, "auto")
# Largest error of K and of V: the toy's numbers lie in [-1, 1), and half a step of their scales is
# the error of one encoding. Rotated keys spread theirs over the head.
BOUNDS = {
    "raw": (0.0, 0.0),
    "kv8": (0.005, 0.005),
    "k8v4": (0.005, 0.08),
    "kv4c": (0.075, 0.08),
    "kv4h": (0.6, 0.08),
}


def wide(dtype: str = "float32", window: int | None = None) -> Geometry:
    """Two groups whose pages every codec can hold; one of them may slide."""
    full = LayerGroup(layers=(0, 2), kv_heads=2, head_dim=64, value_dim=64, dtype=dtype)
    other = LayerGroup(
        layers=(1,),
        kv_heads=1,
        head_dim=64,
        value_dim=128,
        dtype=dtype,
        kind="full" if window is None else "sliding",
        window=window,
    )
    return Geometry(groups=(full, other), page_size=PAGE)


def make(codec: str = "kv8", pages: int = 40, shape: Geometry | None = None, **options: Any) -> KV:
    """A cache with room for so many raw pages of each group, that keeps no recent page raw."""
    options = {"codec": codec, "recent_tokens": 0, "warm_tokens": 128} | options
    return make_kv(shape or wide(), pages=pages, **options)


def codecs_of(kv: KV, seq: Sequence, group: int = 0) -> list[str]:
    """How each page of a sequence is encoded; "" where there is none."""
    settle(kv)
    line = kv.planner.tables.pages[group][seq.row, : len(seq.blocks[group])].tolist()
    return ["" if page < 0 else CODECS[page >> CODEC_SHIFT] for page in line]


def check(
    kv: KV, seq: Sequence, tokens: Items[int], *, times: float = 1.0, loosest: str = "raw"
) -> None:
    """Every position holds what the model computed, within what its page's codec allows.

    Args:
        times: How often it was encoded at most; raw pages may hold what was decoded, too.
        loosest: What any page may have been encoded with.
    """
    shape = seq.planner.geometry
    assert seq.length == len(tokens)
    loosest = CODECS[seq.fidelity] if times > 1 else loosest
    for g, group in enumerate(shape.groups):
        first = seq.first_page[g] * shape.page_size
        names = np.repeat([name or "raw" for name in codecs_of(kv, seq, g)], shape.page_size)
        names = names[first : len(tokens)]
        for layer in group.layers:
            wanted = keys_values(shape, layer, tokens, first)
            for part, (got, want) in enumerate(zip(content(kv, seq, layer), wanted, strict=True)):
                error = (got[first:].float() - want.float()).abs().amax((1, 2))
                for codec in set(names.tolist()):
                    most = max(BOUNDS[name][part] for name in (codec, loosest)) * times
                    worst = error[torch.from_numpy(names == codec)].max()
                    assert worst <= most, f"{'KV'[part]} of layer {layer} in {codec}: {worst}"
    assert max(CODECS.index(name or "raw") for name in ["", *codecs_of(kv, seq)]) <= seq.fidelity


def text(length: int, seed: int = 0) -> list[int]:
    return [seed] * length


# ---- what pages hold


@pytest.mark.parametrize(
    "dtype",
    ["float32", *(pytest.param(d, marks=pytest.mark.thorough) for d in ("bfloat16", "float16"))],
)
@pytest.mark.parametrize("codec", EVERY)
def test_full_pages_are_encoded_and_hold_what_was_computed(codec: str, dtype: str) -> None:
    kv = make(codec, shape=wide(dtype))
    tokens = text(5 * PAGE + 9)
    seq = opened(kv, tokens[:100])
    assert codecs_of(kv, seq) == (["kv8"] if codec == "auto" else [codec]) + ["raw"]
    for position in range(100, len(tokens)):
        advance(kv, [seq], [tokens[position : position + 1]])
        if position % 20 == 0:
            audit(kv)
    worn = [codec] * 5 if codec != "auto" else ["kv4c"] * 3 + ["kv8"] * 2
    assert codecs_of(kv, seq) == codecs_of(kv, seq, 1) == [*worn, "raw"]
    # Rounding to half precision comes on top, before and behind the codec.
    check(kv, seq, tokens, times=1.0 if dtype == "float32" else 1.2)
    again = opened(kv, tokens)
    assert again.reused == len(tokens) - 1 and codecs_of(kv, again)[:5] == worn


@pytest.mark.parametrize("codec", EVERY)
def test_recent_pages_stay_raw_and_exact(codec: str) -> None:
    kv = make(codec, recent_tokens=100)
    tokens = text(6 * PAGE - 1)
    seq = opened(kv, tokens)
    assert codecs_of(kv, seq)[3:] == ["raw"] * 3 and "raw" not in codecs_of(kv, seq)[:3]
    advance(kv, [seq], [[1]])
    assert codecs_of(kv, seq)[4:] == ["raw"] * 2 and "raw" not in codecs_of(kv, seq)[:4]
    check(kv, seq, [*tokens, 1])
    seq.close()
    with kv.open([*tokens, 1, 1]) as again:
        assert "raw" not in codecs_of(kv, again), "what is only cached is small"


def test_a_long_prompt_is_encoded_once_and_at_once() -> None:
    kv, seen = make("auto", warm_tokens=2 * PAGE), list[Encoded]()
    kv.bus.subscribe(seen.append, Encoded)
    prefill(kv, kv.open(text(8 * PAGE)), chunk=1 << 20)
    assert sorted((e.group, e.source, e.target, e.pages) for e in seen) == [
        (0, "raw", "kv4c", 6),
        (0, "raw", "kv8", 2),
        (1, "raw", "kv4c", 6),
        (1, "raw", "kv8", 2),
    ]
    layout = page_layout(wide().groups[0], PAGE, "kv4c")
    (event,) = (e for e in seen if e.group == 0 and e.target == "kv4c")
    assert event.n_bytes == 6 * layout.page_bytes < event.n_bytes_before
    assert kv.stats()["events"]['encoded_pages_total{source="raw",target="kv4c"}'] == 12


def test_raw_caches_have_nothing_to_do_with_it() -> None:
    kv = make("raw")
    assert kv.planner.sealer is None
    assert all(kv.planner.pages(layer).sealed == () for layer in range(3))
    seq = opened(kv, text(200))
    assert codecs_of(kv, seq) == ["raw"] * 4 and seq.fidelity == 0
    assert kv.stats()["devices"]["cpu"]["compression"] == 1.0


def test_statistics_tell_bytes_by_codec() -> None:
    kv = make("kv8")
    seq = opened(kv, text(4 * PAGE))
    device = kv.stats()["devices"]["cpu"]
    assert set(device["codecs"]) == {"kv8"} and device["codecs"]["kv8"] == device["used_bytes"]
    assert 3.1 < device["compression"] < 3.2, "and padding"
    seq.close()
    assert kv.stats()["devices"]["cpu"] == device


def test_attention_over_encoded_pages_is_that_over_what_they_decode_to() -> None:
    for codec in EVERY:
        kv = make(codec, shape=Geometry.uniform(layers=1, kv_heads=2, head_dim=64, page_size=PAGE))
        seq = kv.open(text(300))
        for step in kv.prefill([seq], chunk=128):
            write(step)
        with plan(kv, [seq], [1]) as step:
            q, k, v = torch.randn(1, 4, 64), torch.randn(1, 2, 64), torch.randn(1, 2, 64)
            out = step.attend(0, q, k, v)
            keys, values = kernels.gather_dense(step.pages(0), step.batch(0), 301)
            with flowkv.kernels.checking():
                assert torch.equal(out, step.attend(0, q, k, v))
        dense = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, enable_gqa=True
        )
        assert torch.allclose(out, dense[0].transpose(0, 1), atol=3e-3), codec
        kv.close()


# ---- who may have what


def test_a_codec_that_a_group_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="head dims of at least 64"):
        make_kv(geometry(page_size=64), codec="kv4c")
    with pytest.raises(ConfigError, match="pages of at least 64 tokens"):
        make("kv4h", shape=Geometry(groups=wide().groups, page_size=32))


def test_auto_leaves_out_what_a_group_cannot_have() -> None:
    shape = geometry(page_size=64, window=500)
    kv = make_kv(shape, codec="auto", recent_tokens=0, warm_tokens=64, pages=40)
    assert [[layout.codec for layout in forms.sealed] for forms in kv.planner.store.forms] == [
        ["kv8"],
        ["kv8"],
    ]
    seq = opened(kv, text(300))
    assert codecs_of(kv, seq) == ["kv8"] * 4 + ["raw"]


def test_sliding_groups_drop_encoded_pages_too() -> None:
    kv = make("kv8", shape=wide(window=70))
    seq = opened(kv, text(6 * PAGE))
    assert codecs_of(kv, seq, 1)[:2] == ["", ""] and codecs_of(kv, seq, 1)[-1] == "kv8"
    check(kv, seq, text(6 * PAGE))


# ---- sharing


@pytest.mark.parametrize("codec", EVERY)
def test_a_page_that_is_shared_is_encoded_for_all(codec: str) -> None:
    kv = make(codec, recent_tokens=PAGE)
    first = opened(kv, text(2 * PAGE + 5))
    second = kv.open(text(2 * PAGE + 9))
    assert second.reused == 2 * PAGE + 5
    twin = kv.fork(first)
    for seq in (first, second, twin):
        assert codecs_of(kv, seq)[1] == "raw"
    prefill(kv, second)
    advance(kv, [first], [[1] * PAGE])
    assert codecs_of(kv, first)[1] == "raw", "it is recent for the others"
    advance(kv, [second, twin], [[2] * PAGE, [3] * PAGE])
    expected = "kv8" if codec == "auto" else codec
    assert codecs_of(kv, first)[1] == codecs_of(kv, twin)[1] == expected
    lines = kv.planner.tables.pages[0]
    assert len({int(lines[seq.row, 1]) for seq in (first, second, twin)}) == 1
    audit(kv)
    check(kv, first, text(2 * PAGE + 5) + [1] * PAGE)
    check(kv, second, text(2 * PAGE + 9) + [2] * PAGE)
    check(kv, twin, text(2 * PAGE + 5) + [3] * PAGE)
    assert min(seq.fidelity for seq in (first, second, twin)) == CODECS.index(expected)


def test_what_another_still_needs_raw_is_encoded_when_it_is_gone() -> None:
    kv = make("kv8", recent_tokens=PAGE)
    first = opened(kv, text(2 * PAGE))
    second = kv.fork(first)
    advance(kv, [first], [[1] * PAGE])
    assert codecs_of(kv, first) == ["kv8", "raw", "raw"]
    second.close()
    assert codecs_of(kv, first) == ["kv8", "kv8", "raw"]


def silently(kv: KV, seq: Sequence, count: int) -> None:
    """A step of which nobody says which tokens it computes, so that nothing is published."""
    first = seq.length
    with plan(kv, [seq], [count]) as step:
        for g, group in enumerate(step.groups):
            for layer in group.layers:
                k, v = keys_values(kv.geometry, layer, text(first + count), first)
                kernels.append(k, v, step.pages(layer), step.batch(g))
    settle(kv)


def test_private_pages_are_encoded_for_all_who_forked_them() -> None:
    kv = make("kv8", recent_tokens=PAGE)
    seq = kv.open(text(1))
    silently(kv, seq, 2 * PAGE)
    assert seq.blocks[0] == [None, None] and codecs_of(kv, seq) == ["kv8", "raw"]
    twin = kv.fork(seq)
    for row in (seq, twin):
        silently(kv, row, PAGE)
    lines = kv.planner.tables.pages[0]
    assert codecs_of(kv, seq) == codecs_of(kv, twin) == ["kv8", "kv8", "raw"]
    assert lines[seq.row, 1] == lines[twin.row, 1] and lines[seq.row, 2] != lines[twin.row, 2]
    audit(kv)
    check(kv, twin, text(3 * PAGE))
    seq.note(text(3 * PAGE - 1))  # now it is known, and found, as it is
    kv.planner.publish(seq)
    assert kv.explain(text(3 * PAGE)).known == 3 * PAGE - 1
    with kv.open(text(3 * PAGE)) as again:
        assert codecs_of(kv, again) == ["kv8", "kv8", "raw"] and again.fidelity == 1


@pytest.mark.parametrize("publisher", [0, 1])
def test_a_private_page_that_another_fork_published_is_encoded_for_both(publisher: int) -> None:
    kv = make("kv8", recent_tokens=PAGE)
    seq = kv.open(text(1))
    silently(kv, seq, PAGE)
    rows = [seq, kv.fork(seq)]
    rows[publisher].note(text(PAGE - 1))
    kv.planner.publish(rows[publisher])
    assert [row.blocks[0][0] is None for row in rows] == [publisher == 1, publisher == 0]
    for row in (rows[1 - publisher], rows[publisher]):
        silently(kv, row, PAGE)
        audit(kv)
    assert codecs_of(kv, rows[0]) == codecs_of(kv, rows[1]) == ["kv8", "raw"]
    for row in rows:
        check(kv, row, text(2 * PAGE))
        row.close()
        audit(kv)


def test_a_private_page_waits_for_whoever_published_it() -> None:
    kv = make("kv8", recent_tokens=PAGE)
    seq = kv.open(text(1))
    silently(kv, seq, PAGE)
    twin = kv.fork(seq)
    seq.note(text(PAGE - 1))
    kv.planner.publish(seq)
    for row in (seq, twin):
        silently(kv, row, PAGE)
        audit(kv)
        check(kv, row, text(2 * PAGE))
    seq.close()
    audit(kv)
    check(kv, twin, text(2 * PAGE))


def test_computing_what_is_known_already_takes_the_known_page() -> None:
    kv = make("kv8")
    opened(kv, text(2 * PAGE)).close()
    seq = prefill(kv, kv.open(text(2 * PAGE), reuse=False), chunk=PAGE)
    assert codecs_of(kv, seq) == ["kv8", "kv8"] and seq.fidelity == 1
    audit(kv)
    assert kv.stats()["blocks"] == 4


def test_a_sequence_closed_within_its_step_leaves_encoded_pages() -> None:
    kv = make("kv8")
    seq = opened(kv, text(PAGE - 1))
    with kv.step([seq], [[0]]) as step:
        write(step)
        seq.close()
    audit(kv)
    with kv.open(text(PAGE + 1)) as again:
        assert codecs_of(kv, again) == ["kv8"]
        check(kv, again, text(PAGE))


# ---- cutting


@pytest.mark.parametrize("codec", EVERY)
@pytest.mark.parametrize("shared", [False, True])
def test_a_sequence_cut_inside_a_sealed_page_goes_on_in_a_raw_copy(
    codec: str, shared: bool
) -> None:
    kv = make(codec)
    tokens = text(3 * PAGE)
    seq = opened(kv, tokens)
    twin = kv.fork(seq) if shared else None
    kv.truncate(seq, 100)
    sealed = codecs_of(kv, seq)[1]
    assert sealed != "raw"
    check(kv, seq, tokens[:100])
    advance(kv, [seq], [[7] * 20])
    assert codecs_of(kv, seq)[1] == "raw"
    check(kv, seq, tokens[:100] + [7] * 20, times=1.01)
    audit(kv)
    advance(kv, [seq], [[7] * 40])
    assert codecs_of(kv, seq)[1] == (codec if codec != "auto" else "kv8")
    check(kv, seq, tokens[:100] + [7] * 60, times=2.2)
    if twin is not None:
        check(kv, twin, tokens)


def test_a_private_page_is_raw_again_before_it_is_written_to() -> None:
    kv = make("kv8")
    seq = kv.open(text(1))
    silently(kv, seq, 2 * PAGE)
    kv.truncate(seq, 100)
    assert codecs_of(kv, seq) == ["kv8", "kv8"]
    silently(kv, seq, 10)
    assert codecs_of(kv, seq) == ["kv8", "raw"]
    check(kv, seq, text(110), times=1.01)


def test_a_cut_sequence_publishes_its_lineage() -> None:
    kv = make("kv4c", recent_tokens=1 << 20)
    seq = opened(kv, text(2 * PAGE))
    assert seq.fidelity == 0
    seq.close()
    with kv.open(text(2 * PAGE + 1)) as again:
        prefill(kv, again)
        assert again.fidelity == CODECS.index("kv4c")
        advance(kv, [again], [[1] * PAGE])
        assert codecs_of(kv, again)[2] == "raw"
        assert again.blocks[0][2].fidelity == CODECS.index("kv4c")


# ---- setting aside


@pytest.mark.parametrize("codec", EVERY)
def test_suspended_sequences_come_back_as_they_were(codec: str) -> None:
    kv = make(codec, recent_tokens=PAGE)
    tokens = text(5 * PAGE + 3)
    seq = opened(kv, tokens)
    before, kinds = [content(kv, seq, layer) for layer in range(3)], codecs_of(kv, seq)
    used = kv.suspend(seq)
    assert used < 6 * sum(kv.planner.store.forms[g].raw.page_bytes for g in (0, 1))
    kv.forget(tokens)
    kv.resume(seq)
    assert codecs_of(kv, seq) == kinds
    for layer in range(3):
        for a, b in zip(before[layer], content(kv, seq, layer), strict=True):
            assert torch.equal(a, b)
    audit(kv)
    advance(kv, [seq], [[1] * PAGE])
    check(kv, seq, [*tokens, *[1] * PAGE])


# ---- tiers


@pytest.mark.parametrize("codec", EVERY)
@pytest.mark.parametrize("place", ["host", "disk"])
def test_pages_leave_and_come_back_encoded(codec: str, place: str, tmp_path: Any) -> None:
    tier: Any = MemoryTier() if place == "host" else f"disk:{tmp_path / 'kv'}:1GiB"
    kv = make(codec, tiers=[tier], namespace="n", recent_tokens=PAGE)
    tokens = text(5 * PAGE + 2)
    opened(kv, tokens).close()
    assert kv.flush()
    with kv.lock:
        while kv.planner.store.eviction.make_room(0, 8):
            kv.planner.store.writes.flush(60)
    assert kv.planner.store.pool(0).used_bytes() == 0
    seq = kv.open(tokens)
    assert seq.reused == 5 * PAGE and "raw" not in codecs_of(kv, seq)
    check(kv, seq, tokens[: 5 * PAGE])
    name = kv.planner.store.stack.tiers[0].name
    loaded = kv.stats()["tiers"][name]["loaded_bytes"]
    forms = kv.planner.store.forms
    assert loaded == sum(
        forms[g].layout(int(page)).page_bytes
        for g in (0, 1)
        for page in kv.planner.tables.pages[g][seq.row, :5]
    )


def test_pages_are_written_down_when_they_are_first_encoded() -> None:
    tier = lasting()
    kv = make("kv8", tiers=[tier], recent_tokens=PAGE)
    seq = opened(kv, text(3 * PAGE))
    kv.flush()
    found = {entry.info.codec for entry in tier.scan()}
    assert found == {1} and len(list(tier.scan())) == 2 * 2, "the last page is still raw"
    seq.close()
    kv.flush()
    assert len(list(tier.scan())) == 2 * 3
    for entry in tier.scan():
        layout = kv.planner.store.forms[entry.info.group].layouts[1]
        assert entry.info.layout == layout.fingerprint() and entry.info.fidelity == 1


def test_closing_a_cache_writes_down_what_its_open_sequences_leave() -> None:
    tier = lasting()
    kv = make("kv8", tiers=[tier], recent_tokens=PAGE)
    seq = opened(kv, text(3 * PAGE))
    tier.close = lambda: None
    kv.close()
    assert seq.closed
    assert len(list(tier.scan())) == 2 * 3


@pytest.mark.at_once
def test_a_page_on_its_way_to_a_tier_waits() -> None:
    inner = MemoryTier(name="slow")
    slow = Wrapped(Deferred(inner), kind="disk")
    kv = make("auto", tiers=[slow], warm_tokens=PAGE)
    seq = opened(kv, text(PAGE))
    assert codecs_of(kv, seq) == ["kv8"] and slow.inner.waiting
    advance(kv, [seq], [[1] * 2 * PAGE])
    assert codecs_of(kv, seq)[0] == "kv8", "the tier still reads it"
    slow.inner.work()
    advance(kv, [seq], [[1] * PAGE])
    assert codecs_of(kv, seq) == ["kv4c"] * 3 + ["kv8"]
    audit(kv)
    slow.inner.work()


def test_a_state_saved_after_a_cut_inside_an_encoded_page_holds_its_tail() -> None:
    kv = make("kv8", tiers=[MemoryTier()])
    seq = opened(kv, text(3 * PAGE))
    kv.truncate(seq, 100)
    assert kv.save_state(seq, {"h": torch.ones(2)})
    assert codecs_of(kv, seq) == ["kv8", "raw"] and seq.length == 100
    seq.close()
    kv.forget(text(2 * PAGE))
    prefill(kv, kv.open(text(PAGE))).close()
    seq = opened(kv, text(100))
    assert kv.save_state(seq, {"h": torch.ones(2)})
    with kv.open(text(150), state=True) as again:
        assert again.reused == 100
        check(kv, again, text(100), times=1.01)


def test_a_state_is_as_lossy_as_the_one_that_is_read() -> None:
    tier = Wrapped(MemoryTier(name="shared"), kind="remote", shared=True)
    tier.close = lambda: None
    exact, lossy = (make("kv4c", tiers=[tier], recent_tokens=n) for n in (1 << 20, 0))
    for kv in (lossy, exact):  # the first one's stays
        seq = prefill(kv, kv.open(text(100), reuse=False))
        assert kv.save_state(seq, {"h": torch.ones(2)})
        assert seq.fidelity == (3 if kv is lossy else 0)
        kv.flush()
    with exact.open(text(150), state=True) as again:
        assert again.reused == 100 and again.fidelity == 3


# ---- another run with another codec


def rerun(writer: str, reader: str, tier: Any, **options: Any) -> tuple[KV, Sequence]:
    """What a second process with another codec reuses of a first one's store."""
    tier.close = lambda: None
    kv = make(writer, tiers=[tier])
    opened(kv, text(4 * PAGE)).close()
    kv.close()
    kv = make(reader, tiers=[tier], **options)
    return kv, kv.open(text(4 * PAGE + 1))


@pytest.mark.parametrize("writer", ["raw", *EVERY])
@pytest.mark.parametrize("reader", ["raw", *EVERY])
def test_a_reader_takes_what_is_not_lossier_than_itself(writer: str, reader: str) -> None:
    kv, seq = rerun(writer, reader, lasting())
    worst = {"raw": 0, "auto": 3} | {codec: CODECS.index(codec) for codec in FIXED}
    # "auto" wrote two pages that became cold in the meantime with four bits, the others with eight.
    if worst[writer] <= worst[reader]:
        assert seq.reused == 4 * PAGE
        check(kv, seq, text(4 * PAGE))
    else:
        assert seq.reused < 4 * PAGE
    audit(kv)
    prefill(kv, seq)
    advance(kv, [seq], [[1] * PAGE])
    check(kv, seq, [*text(4 * PAGE + 1), *[1] * PAGE], times=2.0)
    if reader == "raw":
        assert seq.fidelity == 0 and set(codecs_of(kv, seq)) == {"raw"}
    else:
        assert "raw" not in codecs_of(kv, seq)[:4]


def test_what_is_too_lossy_is_replaced_by_what_is_computed() -> None:
    tier = lasting()
    kv, seq = rerun("kv8", "raw", tier)
    assert seq.reused == 0
    assert "kv8 is too lossy" in kv.explain(text(4 * PAGE + 1)).reason
    prefill(kv, seq).close()
    kv.close()
    assert {entry.info.fidelity for entry in tier.scan()} == {0}
    kv = make("raw", tiers=[tier])
    with kv.open(text(4 * PAGE + 1)) as again:
        assert again.reused == 4 * PAGE
        check(kv, again, text(4 * PAGE))


def test_a_state_that_is_too_lossy_is_replaced_by_what_is_computed() -> None:
    tier = lasting()
    tier.close = lambda: None
    for codec in ("kv8", "raw"):
        kv = make(codec, tiers=[tier], **({} if codec == "raw" else {"recent_tokens": 0}))
        seq = prefill(kv, kv.open(text(2 * PAGE + 5), reuse=False))
        assert kv.save_state(seq, {"h": torch.ones(2)})
        seq.close()
        kv.flush()
        if codec == "kv8":
            kv.close()
    with kv.open(text(2 * PAGE + 9), state=True) as again:
        assert again.reused == 2 * PAGE + 5 and again.fidelity == 0


@pytest.mark.parametrize("exact_first", [False, True])
def test_of_two_copies_the_exact_one_is_read(exact_first: bool) -> None:
    tiers = {codec: lasting(name=codec) for codec in ("kv8", "raw")}
    for codec, tier in tiers.items():
        tier.close = lambda: None
        kv = make(codec, tiers=[tier])
        opened(kv, text(4 * PAGE)).close()
        kv.close()
    kv = make("raw", tiers=[tiers[codec] for codec in sorted(tiers, reverse=exact_first)])
    with kv.open(text(4 * PAGE + 1)) as seq:
        assert seq.reused == 4 * PAGE and seq.fidelity == 0
        check(kv, seq, text(4 * PAGE))


@pytest.mark.parametrize("codec", ["raw", "kv8", "auto"])
def test_frames_that_others_wrote_tell_their_codec_when_they_are_read(codec: str) -> None:
    tier = Wrapped(MemoryTier(name="shared"), kind="remote", shared=True)
    tier.close = lambda: None
    readers = [make(reader, tiers=[tier]) for reader in ("auto", "kv4c", "raw")]
    kv = make(codec, tiers=[tier])
    opened(kv, text(4 * PAGE)).close()
    kv.close()
    for reader, name in zip(readers, ("auto", "kv4c", "raw"), strict=True):
        with reader.open(text(4 * PAGE + 1)) as seq:
            exact = name != "raw" or codec == "raw"
            readable = exact and (name == "auto" or codec == "raw")
            assert seq.reused == (4 * PAGE if readable else 0), name
            for block in seq.blocks[0][:4]:
                assert block is not None and block.codec_on(0) == block.page >> CODEC_SHIFT
            check(reader, seq, text(seq.length))
        audit(reader)
        reader.close()


def test_policies_are_told_the_likely_size_of_what_others_wrote() -> None:
    kv = make("kv8", tiers=[lasting()])
    opened(kv, text(2 * PAGE)).close()
    assert kv.flush()
    store = kv.planner.store
    for block in store.index:
        enter_tier([block], 0, UNKNOWN)
        wanted = store.forms[block.group].layouts[1].page_bytes
        assert store.stack.copies.size(block, 0) == wanted < store.stack.copies.body_bytes(block, 0)


def test_what_others_stored_first_is_what_is_read_back() -> None:
    tier = Wrapped(MemoryTier(name="shared"), kind="remote", shared=True)
    tier.close = lambda: None
    kv, other = (make(codec, tiers=[tier], warm_tokens=PAGE) for codec in ("auto", "kv8"))
    opened(other, text(4 * PAGE)).close()
    other.close()
    seq = prefill(kv, kv.open(text(4 * PAGE), reuse=False), chunk=4 * PAGE)
    assert codecs_of(kv, seq)[0] == "kv4c" and {e.info.codec for e in tier.scan()} == {1}
    seq.close()
    with kv.lock:
        while kv.planner.store.eviction.make_room(0, 8):
            pass
    with kv.open(text(4 * PAGE + 1)) as again:
        assert again.reused == 4 * PAGE and codecs_of(kv, again) == ["kv8"] * 4
        check(kv, again, text(4 * PAGE))


# ---- room


def test_pages_that_find_no_room_stay_raw_until_there_is_some() -> None:
    kv = make("kv8", pages=3)
    seq = opened(kv, text(PAGE - 1))
    pool = kv.planner.store.pool(0)
    room = kv.planner.store.allocator.spare
    kv.planner.store.allocator.spare = lambda group, count, codec: []  # type: ignore[method-assign]
    advance(kv, [seq], [[1]])
    assert codecs_of(kv, seq) == ["raw"] and seq.fidelity == 0
    audit(kv)
    kv.planner.store.allocator.spare = room  # type: ignore[method-assign]
    advance(kv, [seq], [[1] * (PAGE - 1)])
    assert codecs_of(kv, seq) == ["raw", "raw"]
    advance(kv, [seq], [[1]])
    assert codecs_of(kv, seq) == ["kv8", "kv8"]
    audit(kv)
    assert pool.used_bytes() == sum(pool.bytes_by_codec().values())


def test_encoding_makes_room_for_more_sequences() -> None:
    def fitting(codec: str) -> int:
        kv, seqs = make(codec, pages=16), []
        with suppress(CapacityError):
            for seed in range(100):
                seqs.append(opened(kv, text(4 * PAGE, seed)))
        for seq in seqs:
            check(kv, seq, seq.tokens[: seq.length].tolist())
        audit(kv)
        kv.close()
        return len(seqs)

    counts = {codec: fitting(codec) for codec in ("raw", "kv8", "kv4c")}
    assert counts["kv8"] > 2 * counts["raw"] and counts["kv4c"] > 3 * counts["raw"]


def test_idle_pages_make_way_for_encoded_ones() -> None:
    kv = make("kv8", pages=12)
    for seed in range(40):
        with kv.open(text(3 * PAGE, seed)) as seq:
            prefill(kv, seq, chunk=PAGE)
            assert set(codecs_of(kv, seq)) == {"kv8"}
            check(kv, seq, text(3 * PAGE, seed))
        audit(kv)


def test_pages_of_several_codecs_are_moved_together() -> None:
    kv = make("auto", pages=60, warm_tokens=PAGE)
    seqs = [opened(kv, text(3 * PAGE + 7 * seed, seed)) for seed in range(8)]
    for seq in seqs[::2]:
        seq.close()
    for seed in range(0, 8, 2):
        kv.forget(text(3 * PAGE + 7 * seed, seed))
    kv.defragment()
    audit(kv)
    for seed in range(1, 8, 2):
        check(kv, seqs[seed], text(3 * PAGE + 7 * seed, seed))


# ---- what cannot be encoded


def poison(kv: KV, seq: Sequence, value: float, *, settles: bool = True) -> None:
    """Computes the rest of a prompt, one element of layer 1 being `value`."""
    for step in kv.prefill([seq], chunk=1 << 20):
        for g, group in enumerate(step.groups):
            for number in group.layers:
                known = seq.tokens[: seq.length + int(step.counts[0])].tolist()
                k, v = keys_values(kv.geometry, number, known, seq.length)
                if number == 1:
                    k[PAGE + 3, 0, 5] = value
                kernels.append(k, v, step.pages(number), step.batch(g))
    if settles:
        settle(kv)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_what_no_codec_holds_stays_raw_with_one_warning(value: float) -> None:
    kv, said = make("kv8"), list[Warned]()
    kv.bus.subscribe(said.append, Warned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seq = kv.open(text(3 * PAGE))
        poison(kv, seq, value)
        other = kv.open(text(3 * PAGE, 5))
        poison(kv, other, value)
    (told,) = (event for event in said if event.code == "unencoded")
    assert "Page 1 of layer 1" in told.message
    assert codecs_of(kv, seq, 1) == ["kv8", "raw", "kv8"], "of its group only"
    assert codecs_of(kv, seq, 0) == ["kv8"] * 3
    audit(kv)
    seq.close()
    if value == 1e38:  # finite: it is cached, raw
        with kv.open(text(3 * PAGE)) as again:
            assert again.reused == 3 * PAGE - 1
            assert codecs_of(kv, again, 1) == ["kv8", "raw", "raw"]


@pytest.mark.parametrize("value", [float("nan"), 1e38])
def test_it_can_be_an_error(value: float) -> None:
    kv = make("kv4c", non_finite="error")
    seq = kv.open(text(3 * PAGE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NonFiniteError, match="page 1 of layer 1 holds"):
            poison(kv, seq, value)
    assert seq.length == 3 * PAGE, "what was computed is there"
    audit(kv)
    seq.close()


def test_a_page_that_is_never_known_is_refused_once() -> None:
    kv = make("kv8", pages=60, non_finite="error")
    seq = kv.open(text(3 * PAGE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NonFiniteError, match="page 1 of layer 1"):
            poison(kv, seq, float("nan"))
    fork = kv.fork(seq)
    for _ in range(2 * PAGE):
        advance(kv, [seq, fork], [[1], [2]])
    assert codecs_of(kv, fork, 1) == ["kv8", "raw", "kv8", "kv8", "kv8"]
    kv.truncate(seq, PAGE)
    advance(kv, [seq], [text(2 * PAGE, 3)])
    assert codecs_of(kv, seq, 1) == ["kv8"] * 3, "what was computed anew has its turn again"


def test_a_refusal_at_the_end_keeps_no_other_sequence_from_leaving() -> None:
    kv = make("kv8", recent_tokens=8 * PAGE, non_finite="error")
    seqs = [kv.open(text(2 * PAGE, seed)) for seed in range(3)]
    for seq in seqs:
        poison(kv, seq, 1e38)
    with pytest.raises(NonFiniteError, match="page 1 of layer 1"):
        with kv.step(seqs, [[1]] * 3) as step:
            write(step)
            for seq in seqs:
                seq.close()
        settle(kv)
    assert not kv._open and len(kv.planner.tables._free) == kv.planner.tables.max_rows


def test_a_refusal_at_the_end_keeps_no_cache_from_closing() -> None:
    tier, left = lasting(), list[str]()
    tier.close = lambda: left.append("closed")
    kv = make("kv8", recent_tokens=8 * PAGE, non_finite="error", tiers=[tier])
    seqs = [kv.open(text(2 * PAGE, seed)) for seed in range(3)]
    for seq in seqs:
        poison(kv, seq, 1e38)
    with pytest.raises(NonFiniteError, match="page 1 of layer 1"):
        kv.close()
    assert kv.closed and not kv._open and left == ["closed"]
    assert len(list(tier.scan())) == 3 * 2 * 2, "what was published is written down"


def test_a_page_that_cannot_be_encoded_is_written_down_raw() -> None:
    tier = lasting()
    kv = make("kv8", tiers=[tier])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        poison(kv, kv.open(text(3 * PAGE)), 1e38)
    kv.flush()
    found = sorted((entry.info.group, entry.info.codec) for entry in tier.scan())
    assert found == [(0, 1), (0, 1), (0, 1), (1, 0), (1, 1), (1, 1)]


# ---- threads


def test_threads_encode_while_others_step() -> None:
    kv = make("auto", pages=200, warm_tokens=PAGE, max_rows=8)

    def work(seed: int) -> None:
        for turn in range(3):
            tokens = text(2 * PAGE) + text(40 + 30 * seed, seed)
            seq = kv.open(tokens, reuse=turn > 0)
            for at in range(seq.length, len(tokens), 17):
                advance(kv, [seq], [tokens[at : at + 17]])
            check(kv, seq, tokens, loosest="kv4c")  # others encode what is shared
            seq.close()

    together(*(partial(work, seed) for seed in range(1, 5)))


def test_a_page_that_a_step_reads_is_left_alone() -> None:
    kv = make("kv8", recent_tokens=PAGE)
    seq = opened(kv, text(2 * PAGE))
    reader = kv.fork(seq)
    advance(kv, [reader], [[1] * PAGE])
    kv.truncate(reader, 3 * PAGE)
    step = plan(kv, [reader], [0])
    before = codecs_of(kv, seq)
    advance(kv, [seq], [[2] * PAGE])
    assert codecs_of(kv, seq)[:2] == before == ["kv8", "raw"]
    step.rollback()
    advance(kv, [seq], [[2] * PAGE])
    assert codecs_of(kv, seq) == ["kv8"] * 3 + ["raw"] and codecs_of(kv, reader)[1] == "kv8"


# ---- any order


@settings(max_examples=15)
@given(
    codec=st.sampled_from(EVERY),
    recent=st.sampled_from((0, PAGE)),
    calls=st.lists(
        st.tuples(st.sampled_from("aaafctsre"), st.integers(0, 7), st.integers(0, 200)),
        min_size=4,
        max_size=14,
    ),
)
def test_any_order_of_calls(codec: str, recent: int, calls: list[tuple[str, int, int]]) -> None:
    kv = make(codec, pages=30, recent_tokens=recent, warm_tokens=PAGE, tiers=[MemoryTier()])
    rows: list[tuple[Sequence, list[int]]] = []
    for name, choice, amount in calls:
        if name == "a" or not rows:
            tokens = text(amount) + text(amount // 3, choice % 3)
            if len(rows) < 4:
                rows.append((kv.open(tokens), tokens))
            seq, known = rows[choice % len(rows)]
            fresh = [] if seq.length < len(known) else [choice] * amount
            try:
                prefill(kv, seq, chunk=100)
                advance(kv, [seq], [fresh])
                known += fresh
            except CapacityError:
                pass
            continue
        at = choice % len(rows)
        seq, known = rows[at]
        if name == "f" and len(rows) < 4:
            rows.append((kv.fork(seq), list(known)))
        elif name == "c":
            seq.close()
            del rows[at]
        elif name == "t":
            length = max(0, seq.length - amount)
            kv.truncate(seq, length)
            del known[length:]
        elif name == "s":
            kv.suspend(seq)
            kv.resume(seq)
        elif name == "r":
            kv.defragment()
        elif name == "e":
            with kv.lock:
                kv.planner.store.eviction.make_room(0, 3)
        audit(kv)
        for seq, known in rows:
            check(kv, seq, known[: seq.length], times=4.0)
    kv.close()


def test_a_fixture_of_this_file() -> None:
    """The checks above rest on errors that can be told from another page's numbers."""
    assert max(bound for bounds in BOUNDS.values() for bound in bounds) < 0.7
    k, _ = keys_values(wide(), 0, text(2 * PAGE))
    assert (k[:PAGE] - k[PAGE:]).abs().amax() > 1.5 and Outcome.HIT
