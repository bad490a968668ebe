"""Storing: pages that can never pay are not written; a prompt that grows takes them along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowkv import KV
from tests.cache.audit import audit
from tests.cache.fakes import lasting
from tests.cache.toy import PAGE, advance, geometry, make_kv, opened, published, simple

TEXT = list(range(200))


def slow_to_begin(kv: KV, pages: float, name: str = "lasting") -> KV:
    """As if loads from a tier took what computing so many pages takes, times the margin."""
    kv.gate.computed(1000, 1.0)
    page_s = 8 * PAGE * 1e-3
    for n in range(1, 21):
        kv.gate.loaded(name, n, pages * page_s + n * 1e-9)
    return kv


def on(tier: Any, kv: KV, tokens: list[int], group: int = 0) -> list[bool]:
    with kv._probe(tokens, None, ()) as seq:
        return tier.contains([seq.key(group, page) for page in range(len(tokens) // PAGE)])


def unpaid(kv: KV, name: str = "lasting") -> int:
    return int(kv.stats()["tiers"][name]["unpaid"])


@pytest.mark.parametrize("shape", [simple(), geometry()])
def test_short_prompts_are_not_written_down_and_long_ones_whole(shape: Any) -> None:
    tier, groups = lasting(), len(shape.groups)
    with slow_to_begin(make_kv(shape, tiers=[tier]), 4.5) as kv:
        published(kv, TEXT[:32])
        kv.flush()
        assert not any(on(tier, kv, TEXT[:32])) and unpaid(kv) == 4 * groups
        seq = opened(kv, TEXT[:60])
        for token in TEXT[60:70]:
            advance(kv, [seq], [[token]])
        kv.flush()
        for group in range(groups):
            assert on(tier, kv, TEXT[:70], group) == [True] * 8
        published(kv, [*TEXT[:16], *range(300, 320)])
        kv.flush()
        assert on(tier, kv, [*TEXT[:16], *range(300, 320)]) == [True] * 2 + [False] * 2
        audit(kv)
        seq.close()


def test_a_prompt_that_grows_by_decoding_is_written_down_once_it_pays() -> None:
    tier = lasting()
    with slow_to_begin(make_kv(simple(), tiers=[tier]), 5.5) as kv:
        seq = opened(kv, TEXT[:10])
        for end in range(10, 90):
            advance(kv, [seq], [[TEXT[end]]])
            kv.flush()
            assert on(tier, kv, TEXT[: end + 1]) == [end + 1 >= 6 * PAGE] * ((end + 1) // PAGE)
        audit(kv)
        seq.close()


def test_encoded_pages_come_along_too() -> None:
    tier, shape = lasting(), simple(head_dim=64, page_size=PAGE)
    options = {"tiers": [tier], "codec": "kv8", "recent_tokens": 16}
    with slow_to_begin(make_kv(shape, **options), 5.5) as kv:
        seq = opened(kv, TEXT[:100])
        kv.flush()
        assert on(tier, kv, TEXT[:100]) == [True] * 10 + [False] * 2  # which are still raw
        seq.close()
        kv.flush()
        assert on(tier, kv, TEXT[:100]) == [True] * 12
        published(kv, [9, *TEXT[:40]])
        kv.flush()
        assert not any(on(tier, kv, [9, *TEXT[:40]]))
        audit(kv)


def test_what_leaves_the_device_is_dropped_or_goes_where_it_pays() -> None:
    slow, fast = lasting(name="slow"), lasting(name="fast")
    with make_kv(simple(), tiers=[slow, fast], write_back=False, pages=16) as kv:
        slow_to_begin(kv, 1000, "slow")
        published(kv, TEXT[:64])
        published(kv, range(1000, 1120))
        kv.flush()
        assert not slow.frames and len(fast.frames) > 4 and unpaid(kv, "fast") == 0
        assert unpaid(kv, "slow") == len(fast.frames)
        audit(kv)


def test_a_sender_writes_down_everything(tmp_path: Path) -> None:
    with make_kv(simple(), tiers=[f"disk:{tmp_path}:8MiB"]) as kv:
        (name,) = kv.stats()["tiers"]
        slow_to_begin(kv, 1000, name)
        published(kv, TEXT[:32])
        kv.flush()
        assert kv.stats()["tiers"][name]["blocks"] == 0 < unpaid(kv, name)
        with kv.hand_over():
            published(kv, [5, *TEXT[:32]])
            kv.flush()
        assert kv.stats()["tiers"][name]["blocks"] >= 4


def test_a_page_that_can_never_pay_is_counted_once() -> None:
    for more in ({"admit": "second-touch"}, {"admit": "all"}):
        tier = lasting()
        with slow_to_begin(make_kv(simple(), tiers=[tier], pages=16, **more), 1000) as kv:
            published(kv, TEXT[:32])
            published(kv, TEXT[:32])  # the second use
            for _ in range(3):
                kv.flush()
            assert unpaid(kv) == 4
            published(kv, range(1000, 1120))  # some of the others leave memory
            kv.flush()
            assert not tier.frames and unpaid(kv) == 4 + 15 * (more["admit"] == "all")


def test_where_nothing_was_measured_everything_is_written_down() -> None:
    tier = lasting()
    with make_kv(simple(), tiers=[tier]) as kv:
        published(kv, TEXT[:32])
        kv.flush()
        assert all(on(tier, kv, TEXT[:32])) and unpaid(kv) == 0
