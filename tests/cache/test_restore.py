"""Prefixes found again: in windows, across groups, behind a gate, and after a restart."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from flowkv import KV, Geometry, LayerGroup, Namespace, Salt
from flowkv.testing import MemoryTier
from tests.cache.audit import audit
from tests.cache.fakes import lasting
from tests.cache.toy import (
    PAGE,
    WINDOW,
    advance,
    check_content,
    geometry,
    make_kv,
    opened,
    published,
    simple,
)
from tests.inside import ConfigError, ManualClock, StateError

TEXT = list(range(100))


def reused(kv: KV, tokens: list[int], *, tag: int = 0, **options: Any) -> int:
    with kv.open(tokens, **options) as seq:
        check_content(kv, seq, tokens[: seq.length], tag)
        audit(kv)
        return seq.reused


def drop(kv: KV, group: int, *pages: int, tokens: list[int] = TEXT) -> None:
    """Forgets single pages of a prompt."""
    with kv._probe(tokens, None, ()) as seq:
        for page in pages:
            kv.planner.store.forget(kv.restorer.find(seq, group, page))


# ---- which prefix


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 17, 63, 64, 65])
def test_the_last_token_is_always_left_to_run(length: int) -> None:
    kv = make_kv()
    published(kv, TEXT[:length])
    assert reused(kv, TEXT[:length]) == max(0, length - 1) // PAGE * PAGE
    assert reused(kv, TEXT[:length], limit=length) == length // PAGE * PAGE
    assert reused(kv, TEXT[:length], limit=9) == min(length, 9) // PAGE * PAGE
    assert reused(kv, TEXT[:length], limit=0) == 0
    assert reused(kv, TEXT[:length], reuse=False) == 0


def test_the_longest_common_beginning_is_reused() -> None:
    kv = make_kv()
    published(kv, TEXT[:60])
    for length in range(0, 60, 7):
        assert reused(kv, [*TEXT[:length], *[999] * 20]) == length // PAGE * PAGE


def test_prompts_that_are_answered_are_known_with_their_answers() -> None:
    kv = make_kv()
    with opened(kv, TEXT[:20]) as seq:
        for token in TEXT[20:50]:
            advance(kv, [seq], [[token]])
    assert reused(kv, TEXT) == 48


@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 11)), max_size=6, unique=True),
)
def test_the_prefix_is_the_longest_that_is_valid_in_every_group(
    pages: int, holes: list[tuple[int, int]]
) -> None:
    kv = make_kv(geometry(window=WINDOW))
    published(kv, TEXT[: pages * PAGE])
    missing = [(group, page) for group, page in holes if page < pages]
    for group, page in missing:
        drop(kv, group, page)

    def valid(count: int) -> bool:
        seen = max(0, count * PAGE - WINDOW + 1) // PAGE  # what the next query's window reaches
        return not any(
            page < count and (group == 0 or page >= min(seen, count - 1)) for group, page in missing
        )

    assert reused(kv, [*TEXT[: pages * PAGE], 1]) == PAGE * max(filter(valid, range(pages + 1)))
    kv.close()


def test_windows_drop_what_lies_behind_them() -> None:
    kv = make_kv()
    seq = opened(kv, [i % 50 for i in range(400)])
    assert seq.first_page[0] == 0
    held = [sum(page >= 0 for page in kv.planner.tables.pages[g][seq.row]) for g in (0, 1)]
    assert held == [50, 50 - seq.first_page[1]] and seq.first_page[1] > 25
    check_content(kv, seq, [i % 50 for i in range(400)])
    seq.close()
    assert reused(kv, [i % 50 for i in range(401)]) == 400


def test_cutting_behind_a_window_is_refused_and_starting_anew_is_not() -> None:
    kv = make_kv()
    seq = opened(kv, [1] * 400)
    kv.truncate(seq, 300)
    with pytest.raises(StateError, match=r"reaches behind the sliding window\. Cut at most 128"):
        kv.truncate(seq, 100)
    check_content(kv, seq, [1] * 300)
    kv.truncate(seq, 0)
    audit(kv)
    advance(kv, [seq], [[2] * 30])
    check_content(kv, seq, [2] * 30)


def test_models_of_windows_only() -> None:
    kv = make_kv(simple(window=9))
    text = [i % 7 for i in range(90)]
    published(kv, text)
    assert reused(kv, text) == 88
    assert reused(kv, [*text[:60], *[9] * 9]) == 56
    assert reused(kv, [9] * 60) == 0
    tiny = make_kv(simple(window=1))
    assert reused(tiny, text) == 0, "a page of the prompt itself must be known, seen or not"
    published(tiny, text)
    assert reused(tiny, text) == 88


def test_groups_of_two_devices() -> None:
    """`cpu:1` is the CPU again, with a pool of its own."""
    groups = tuple(
        LayerGroup(layers=(i,), kv_heads=1, head_dim=8, value_dim=8, device=device)
        for i, device in enumerate(("cpu", "cpu:1"))
    )
    kv = make_kv(Geometry(groups=groups, page_size=8))
    published(kv, TEXT[:30])
    assert reused(kv, TEXT[:30]) == 24 and set(kv.stats()["devices"]) == {"cpu", "cpu:1"}
    assert kv.defragment() >= 0


# ---- the gate


def test_loads_that_do_not_help_are_not_made() -> None:
    memory = MemoryTier()
    kv = make_kv(simple(), pages=4, tiers=[memory])
    published(kv, [1] * 24)
    published(kv, [2] * 24)
    for _ in range(30):
        kv.gate.computed(100, 1e-7)
    kv.gate.loaded("memory", 4096, 1.0)
    assert reused(kv, [1] * 25) < 24
    for _ in range(2000):
        if reused(kv, [1] * 25) == 24:
            break
        kv.gate.computed(100, 1e-4)
    else:
        pytest.fail("a slow first load is held against the tier for ever")


@pytest.mark.at_once
def test_only_prompts_measure_the_rate_of_computing() -> None:
    kv, told = make_kv(), list[tuple[int, bool]]()
    kv.planner.measured = lambda tokens, seconds, _: told.append((tokens, seconds > 0))
    seq = opened(kv, [1] * 40)
    advance(kv, [seq], [[1]])
    assert told == [(16, True), (16, True), (8, True)]


# ---- restart


def disk_kv(directory: Path, shape: Geometry | None = None, **options: Any) -> KV:
    return make_kv(shape, tiers=[f"disk:{directory / 'kv'}:64MiB"], **options)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    with disk_kv(tmp_path) as kv:
        published(kv, TEXT[:50])
        published(kv, TEXT[:50], tenant="bob", tag=5)
    return tmp_path


def test_prefixes_survive_a_restart(filled: Path) -> None:
    with disk_kv(filled) as kv:
        assert kv.stats()["blocks"] == 24
        explained = kv.explain(TEXT)
        assert explained.known == 48 and set(explained.residency) == {f"disk:{filled / 'kv'}"}
        assert reused(kv, TEXT) == 48
        assert reused(kv, TEXT, tenant="bob", tag=5) == 48
        assert kv.stats()["tiers"][f"disk:{filled / 'kv'}"]["loaded_bytes"] > 0
        assert kv.explain(TEXT).residency == {"device": 48}
        with opened(kv, TEXT[:90]) as seq:
            check_content(kv, seq, TEXT[:90])
    with disk_kv(filled) as kv:
        assert reused(kv, TEXT) == 88


@pytest.mark.parametrize(
    "options",
    [
        *({"namespace": "other"}, {"namespace": Namespace(model="toy", weights="00")}),
        {"namespace": Namespace(model="toy", adapter="lora")},
        *({"shape": geometry(page_size=16)}, {"shape": geometry(window=13)}),
        *({"shape": geometry(layers=4)}, {"secret": "00"}, {"tenant": "carol"}),
    ],
    ids=str,
)
def test_whatever_differs_misses(filled: Path, options: dict[str, Any]) -> None:
    with disk_kv(filled, **options) as kv:
        assert reused(kv, TEXT) == 0
        published(kv, TEXT[:50], tag=3)
        assert reused(kv, TEXT[:50], tag=3) > 0
    with disk_kv(filled) as kv:
        assert reused(kv, TEXT) == 48


def test_damaged_files_miss(filled: Path) -> None:
    for file in (filled / "kv").glob("slab-*"):
        data = bytearray(file.read_bytes())
        for at in range(100, len(data), 4096):
            data[at] ^= 1
        file.write_bytes(data)
    with disk_kv(filled) as kv:
        assert reused(kv, TEXT) == 0
        published(kv, TEXT[:50])
        assert reused(kv, TEXT) == 48


def test_forgetting_reaches_the_disk(filled: Path) -> None:
    with disk_kv(filled) as kv:
        assert kv.forget(TEXT[:32], tenant="bob") == 12, "and what continues it"
        assert reused(kv, TEXT, tenant="bob") == 0
    with disk_kv(filled) as kv:
        assert reused(kv, TEXT, tenant="bob") == 0 and reused(kv, TEXT) == 48
        assert kv.forget() == 12
    with disk_kv(filled) as kv:
        assert kv.stats()["blocks"] == 0


def test_a_lasting_tier_needs_a_namespace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no namespace"):
        disk_kv(tmp_path, namespace="")
    with pytest.raises(ConfigError, match="has no namespace"):
        KV(simple(), tiers=["gpu:1MiB", lasting()])
    KV(simple(), tiers=["gpu:1MiB", MemoryTier()]).close()


def test_a_second_process_reads(filled: Path) -> None:
    with disk_kv(filled) as owner:
        with pytest.warns(UserWarning, match="this one reads it"):
            reader = disk_kv(filled)
        assert reused(reader, TEXT) == 48
        published(owner, TEXT[:90])
        owner.flush()
        assert reused(reader, TEXT) == 88
        published(reader, [5] * 40)
        reader.close()
        assert reused(owner, [5] * 40) == 0


# ---- erasing


def prompts_of(kv: KV, *texts: list[int]) -> list[int]:
    return [kv.explain([*text, 0]).known for text in texts]


def test_forgetting_takes_what_only_the_prompt_uses() -> None:
    kv = make_kv(simple())
    trunk, left, right = [1] * 16, [1] * 16 + [2] * 16, [1] * 16 + [3] * 16
    published(kv, left)
    published(kv, right)
    assert kv.forget(left) == 2
    assert prompts_of(kv, trunk, left, right) == [16, 16, 32]
    assert kv.forget(right) == 4
    assert len(kv.planner.store.index) == 0
    published(kv, left)
    assert kv.forget(trunk) == 4, "a beginning takes all that continues it"


def test_forgetting_part_of_a_page_takes_the_page() -> None:
    kv = make_kv(simple())
    published(kv, [1, 2, 3] + [4] * 21)
    published(kv, [1, 2, 9] + [4] * 21)
    assert kv.forget([1, 2, 3]) == 3
    assert prompts_of(kv, [1, 2, 3] + [4] * 21, [1, 2, 9] + [4] * 21) == [0, 24]
    assert kv.forget([1, 2]) == 3 and kv.stats()["blocks"] == 0


def test_forgetting_reaches_below_holes() -> None:
    kv = make_kv(simple())
    published(kv, TEXT[:48])
    drop(kv, 0, 2, tokens=TEXT[:48])
    assert kv.forget(TEXT[:16]) == 5 and kv.stats()["blocks"] == 0


def test_open_sequences_publish_nothing_of_what_was_forgotten() -> None:
    kv = make_kv()
    seq = opened(kv, TEXT[:20])
    kv.forget(TEXT[:20])
    check_content(kv, seq, TEXT[:20])
    advance(kv, [seq], [TEXT[20:40]])
    twin = kv.fork(seq)
    check_content(kv, twin, TEXT[:40])
    advance(kv, [twin], [TEXT[40:60]])
    assert kv.stats()["blocks"] == 0
    other = opened(kv, TEXT[:40])  # takes the slots of what was forgotten
    assert kv.pin(TEXT[:40]) == 40
    seq.close()
    audit(kv)
    twin.close()
    audit(kv)
    other.close()
    assert reused(kv, TEXT) == 40


@pytest.mark.parametrize("salted", [False, True])
def test_erasing_a_tenant_silences_its_open_sequences(salted: bool) -> None:
    salts = [Salt(0, b"x" * 32)] if salted else []
    kv = make_kv()
    seq, other = kv.open(TEXT[:20], tenant="a", salts=salts), kv.open(TEXT[:20], tenant="b")
    kv.forget(tenant="a")
    advance(kv, [seq, other], [TEXT[:20]] * 2)
    assert kv.explain(TEXT, tenant="a", salts=salts).known == 0
    assert kv.explain(TEXT, tenant="b").known == 16


# ---- what the policies see


def test_reused_pages_are_the_last_to_go() -> None:
    kv = make_kv(simple(), pages=9)
    published(kv, [1] * 24)
    for number in range(2, 9):
        published(kv, [number] * 24)
        assert reused(kv, [1] * 25) == 24


def test_equal_calls_give_equal_decisions() -> None:
    def run() -> list[Any]:
        kv = make_kv(pages=6, tiers=[MemoryTier(9 * 4096)], clock=ManualClock())
        told = []
        for number, length in itertools.product((1, 2, 3, 1), (9, 20)):
            published(kv, [number] * length)
            told.append((kv.stats()["blocks"], str(kv.explain([1] * 30))))
        return told

    assert run() == run()


def test_content_is_checked_by_tests_that_can_fail() -> None:
    kv = make_kv()
    seq = opened(kv, TEXT[:20])
    page = int(kv.planner.tables.pages[0][seq.row, 1])
    kv.planner.store.pools["cpu"].page_bytes(page, 4096)[5] ^= 1
    with pytest.raises(AssertionError, match="layer 0 is wrong"):
        check_content(kv, seq, TEXT[:20])
    assert torch.get_num_threads() >= 1
