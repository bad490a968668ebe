"""States of recurrent layers beside the pages of the same prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from flowkv import KV, Salt, Sequence
from flowkv.testing import FlakyTier, MemoryTier
from flowkv.tiers import Load
from tests.cache.audit import audit
from tests.cache.fakes import lasting
from tests.cache.links import Link, Trouble, evict, forward
from tests.cache.toy import (
    PAGE,
    advance,
    check_content,
    history,
    make_kv,
    opened,
    prefill,
    published,
    simple,
)
from tests.inside import Faults, HostTier, Late, ManualClock, StatePlacement, encode_state
from tests.inside import kv_plan as plan

TEXT = list(range(60))


def state_of(tokens: list[int]) -> dict[str, Any]:
    """What a recurrent layer would remember of the tokens."""
    past = int(history(tokens)[-1]) if tokens else 0
    return {
        "conv": torch.tensor([past % 1009, len(tokens)], dtype=torch.float32),
        "ssm": (torch.arange(6).view(2, 3) + past % 97).bfloat16(),
        "seen": len(tokens),
    }


def save(kv: KV, seq: Sequence) -> bool:
    return kv.save_state(seq, state_of(seq.tokens[: seq.length].tolist()))


def talk(kv: KV, tokens: list[int], *, every: int = 10**9, **options: Any) -> None:
    """Computes a prompt and keeps states: every so many tokens, and at its end."""
    seq = kv.open(tokens, **options)
    while seq.length < len(tokens):
        end = min(seq.length + every, len(tokens))
        advance(kv, [seq], [tokens[seq.length : end]])
        assert save(kv, seq)
    seq.close()


def check(kv: KV, tokens: list[int], **options: Any) -> int:
    """Opens a prompt, checks that state and pages fit together; returns the tokens reused."""
    with kv.open(tokens, state=True, **options) as seq:
        assert seq.reused == seq.length
        check_content(kv, seq, tokens[: seq.length])
        assert (seq.state is None) == (seq.length == 0)
        if seq.state is not None:
            want = state_of(tokens[: seq.length])
            assert seq.state.keys() == want.keys() and seq.state["seen"] == want["seen"]
            assert all(torch.equal(seq.state[name], want[name]) for name in ("conv", "ssm"))
        audit(kv)
        length = seq.length
        prefill(kv, seq)
        check_content(kv, seq, tokens)
        return length


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 20])
def test_a_state_is_found_at_its_exact_length(length: int) -> None:
    kv = make_kv()
    talk(kv, TEXT[:length])
    assert check(kv, TEXT[: length + 5]) == length
    assert check(kv, TEXT[:length]) == 0, "the last token must run, and no earlier state is kept"
    assert check(kv, [*TEXT[: length - 1], 77, 78]) == 0
    assert kv.open(TEXT[: length + 5]).reused == (length + 4) // PAGE * PAGE


@given(st.integers(1, 9), st.lists(st.integers(1, 59), max_size=5))
def test_the_longest_state_within_the_prompt_is_used(every: int, lengths: list[int]) -> None:
    kv = make_kv(pages=80)
    talk(kv, TEXT[:40], every=every)
    for length in lengths:
        wanted = min(40, length - 1)
        kept = [n for n in range(1, 41) if n % every == 0 or n == 40]
        assert check(kv, [*TEXT[:length]]) == max([n for n in kept if n <= wanted], default=0)
    kv.close()


def test_a_tail_is_a_copy_of_its_tokens_only() -> None:
    """Neither what a page held before nor what follows the state travels with it."""
    memory = MemoryTier()
    kv = make_kv(simple(), tiers=[memory])
    kv.planner.store.pools["cpu"].arena.fill_(0x41)
    seq = opened(kv, TEXT[:11])
    assert save(kv, seq)
    (body,) = (body for header, body in memory.frames.values() if header.info.kind == "state")
    assert b"AAAAAAAA" not in body
    advance(kv, [seq], [[99] * 4])
    seq.close()
    assert check(kv, TEXT[:20]) == 11


def test_states_survive_a_restart_with_their_tails(tmp_path: Path) -> None:
    def start() -> KV:
        return make_kv(tiers=[f"disk:{tmp_path / 'kv'}:64MiB"])

    with start() as kv:
        talk(kv, TEXT[:21], every=10)
        talk(kv, TEXT[:21], tenant="bob")
    with start() as kv:
        assert kv.stats()["blocks"] == 2 * (2 * 2) + 3 + 1, "pages of both, and their states"
        store = kv.planner.store
        for block in store.index:  # lengths are known roughly until a frame is read
            if block.kind == "state":
                _, info, body = store.stack.load(block)
                assert len(body) % info.stripe_bytes == 0 and len(body) < block.n_bytes
        assert check(kv, TEXT) == 21
        assert check(kv, TEXT, tenant="carol") == 0
        assert kv.forget(tenant="bob") > 0
        assert check(kv, TEXT, tenant="bob") == 0
    with start() as kv:
        assert check(kv, TEXT, tenant="bob") == 0
        assert kv.forget(TEXT[:21]) > 0
    with start() as kv:
        assert check(kv, TEXT) == 0


def test_forgetting_a_prompt_takes_the_states_along_it() -> None:
    kv = make_kv()
    talk(kv, TEXT[:30], every=7)
    assert kv.forget(TEXT[:30]) == 3 * 2 + 5
    assert kv.stats()["blocks"] == 0
    talk(kv, TEXT[:30], every=7)
    talk(kv, [*TEXT[:20], 9, 9, 9, 9])
    kv.forget(TEXT[:30])
    assert check(kv, [*TEXT[:20], 9, 9, 9, 9, 9]) == 24
    assert check(kv, TEXT[:31]) <= 16


def test_states_go_down_the_stack() -> None:
    near, far = HostTier(4 * 5300, name="near"), MemoryTier(name="far")
    kv = make_kv(simple(), tiers=[near, far], pages=20)
    for number in range(6):
        talk(kv, [number] * 11)
    assert sum(entry.info.kind == "state" for entry in far.scan()) >= 2
    for number in range(6):
        assert check(kv, [number] * 20) == 11


def test_states_are_written_near_and_where_they_last() -> None:
    near, disk = MemoryTier(), lasting()
    kv = make_kv(tiers=[near, disk])
    talk(kv, TEXT[:11])
    kv.flush()
    assert all(
        any(header.info.kind == "state" for header, _ in tier.frames.values())
        for tier in (near, disk)
    )


@pytest.mark.parametrize("rests", [False, True])
def test_a_state_is_read_while_a_slow_tier_stores_it(rests: bool, tmp_path: Path) -> None:
    clock = ManualClock()
    slow = FlakyTier(lasting(), 0, Faults(latency_s=1e3), clock)
    kv = make_kv(tiers=[slow])
    talk(kv, TEXT[:11])
    (state,) = [block for block in kv.planner.store.index if block.kind == "state"]
    if rests:
        kv.planner.store.stack.mover.lanes[0].rest(1e3)
    assert not state.tiers and kv.export(tmp_path / "kv", TEXT).missing == 0
    assert check(kv, TEXT[:40]) == 11
    clock.advance(s=1e3)
    kv.flush()


def test_pages_that_are_gone_take_the_state_along() -> None:
    kv = make_kv(simple(), pages=6)
    talk(kv, TEXT[:20])
    published(kv, [7] * 40)
    assert check(kv, TEXT[:40]) == 0


def test_a_tail_that_does_not_fit_is_no_error() -> None:
    kv = make_kv(simple(), pages=4)
    talk(kv, TEXT[:12])
    held = opened(kv, [5] * 24)
    with kv.open(TEXT[:20], state=True) as seq:
        assert seq.length == 0 and seq.state is None
    held.close()


def test_states_of_damaged_or_foreign_frames_are_misses() -> None:
    memory = MemoryTier()
    kv = make_kv(simple(), tiers=[memory])
    talk(kv, TEXT[:11])
    talk(kv, TEXT[:19])
    for key, (header, body) in list(memory.frames.items()):
        if header.info.kind == "state" and header.info.tokens == 3:
            memory.frames[key] = header, body[:9] + b"\xff" + body[10:]
            break
    assert check(kv, TEXT) in (11, 19)
    kv.invalidate()
    flaky = make_kv(
        simple(), tiers=[FlakyTier(MemoryTier(), 5, Faults(fail=0.3, lose=0.2, flip=0.2))]
    )
    for _ in range(20):
        seq = flaky.open(TEXT[:11], state=True)
        check_content(flaky, seq, TEXT[: seq.length])
        prefill(flaky, seq)
        flaky.save_state(seq, state_of(TEXT[:11]))
        seq.close()
        check(flaky, TEXT)


class Faulty(Link):
    """A link that troubles pages only."""

    def _carry_out(self, job: int, index: int, item: Load) -> None:
        header, _ = self.inner.frames[item.key]
        trouble = self.trouble
        if header.info.kind == "state":
            self.trouble = Trouble()
        super()._carry_out(job, index, item)
        self.trouble = trouble


@given(
    length=st.integers(1, 40),
    keep=st.integers(0, 3),
    fail=st.sampled_from([0.0, 0.3]),
    plain=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pages_below_a_state_come_behind(
    length: int, keep: int, fail: float, plain: bool, seed: int
) -> None:
    link = Faulty(per_poll=100, seed=seed)
    kv = make_kv(simple() if plain else None, tiers=[link], prefetch="off")
    talk(kv, TEXT[:length])
    evict(kv, keep)
    link.per_poll, link.trouble = 1, Trouble(fail=fail, miss=fail / 3)
    with kv.open(TEXT, state=True, wait=False) as seq:
        there, coming = seq.reused, seq.restoration
        if coming is not None:
            assert coming.settled and not coming.request.computable
            assert seq.length == length and there == length - coming.tokens + coming.front
        assert seq.length == length or (fail and not seq.length), "all of it or nothing"
        assert (seq.state is None) == (seq.length == 0)
        first = kv.step([seq], [TEXT[seq.length : seq.length + 3]])
        try:
            with first as step:
                forward(step)
            kept = True
        except Late:
            kept = False
        if coming is not None:
            coming.finish(ok=kept)
        assert kept or fail
        if not kept and seq.length < length:
            assert seq.length == 0 and seq.state is None
        check_content(kv, seq, TEXT[: seq.length])
        audit(kv)
        prefill(kv, seq)
        check_content(kv, seq, TEXT)
        audit(kv)
    kv.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"flowkv.tail.0.k": 1},
        {"flowkv.tail.0.v": torch.zeros(1, 1, 2, 8)},
        {"flowkv.tail.0.v": torch.zeros(1, 1, 3, 8, dtype=torch.float64)},
    ],
)
def test_a_state_with_wrong_tails_is_a_miss(wrong: dict[str, Any]) -> None:
    kv = make_kv(simple())
    seq = opened(kv, TEXT[:11])
    assert kv.save_state(seq, {})
    sound = {"flowkv.tail.0.k": torch.zeros(1, 1, 3, 8), "flowkv.tail.0.v": torch.zeros(1, 1, 3, 8)}
    blob = encode_state({**sound, **wrong})
    read = kv.planner.store.stack.load
    kv.planner.store.stack.load = lambda block: (*read(block)[:2], blob)
    with kv.open(TEXT[:20], state=True) as other:
        assert other.length == 0
        audit(kv)
        prefill(kv, other)
        check_content(kv, other, TEXT[:20])


def test_non_finite_tails_are_not_kept() -> None:
    kv = make_kv(simple())
    seq = opened(kv, TEXT[:3])
    page = int(kv.planner.tables.pages[0][seq.row, 0])
    kv.planner.store.pool(0).page_bytes(page, 4096).view(torch.float32)[0] = float("nan")
    assert not save(kv, seq)


def test_salted_states_are_apart() -> None:
    kv = make_kv()
    talk(kv, TEXT[:11], salts=[Salt(9, b"c" * 32)])
    assert check(kv, TEXT[:20]) == 0
    assert check(kv, TEXT[:20], salts=[Salt(9, b"d" * 32)]) == 0
    assert check(kv, TEXT[:20], salts=[Salt(9, b"c" * 32)]) == 11


def test_what_cannot_be_kept_says_so() -> None:
    kv = make_kv()
    seq = kv.open([])
    assert not save(kv, seq), "no token, no state"
    plan(kv, [seq], [3]).commit()
    assert not save(kv, seq), "its tokens are not known"
    full = make_kv(simple(), tiers=[MemoryTier(5000)])
    published(full, TEXT[:8])
    other = opened(full, TEXT[:12])
    assert not full.save_state(other, {"big": torch.zeros(9000)})
    audit(full)
    kv.invalidate()
    other.close()
    silent = opened(kv, TEXT[:12])
    kv.invalidate()
    assert not save(kv, silent)


def lengths(kv: KV, tokens: list[int], **options: Any) -> list[int]:
    """Tokens of the known states within a text."""
    with kv.open(tokens, reuse=False, **options) as seq:
        return [block.depth * PAGE + block.tail for block in kv.snapshots.known_states(seq)][::-1]


def converse(kv: KV, tokens: list[int], turns: list[int], **options: Any) -> None:
    """Computes a text to each of some lengths, keeping states in place of earlier ones."""
    seq = kv.open(tokens, **options)
    for end in turns:
        advance(kv, [seq], [tokens[seq.length : end]])
        values = state_of(seq.tokens[: seq.length].tolist())
        assert kv.save_state(seq, values, replaces=True)
    seq.close()


def test_a_state_replaces_earlier_ones_of_its_text() -> None:
    kv = make_kv(pages=80)
    kv.snapshots.placement = StatePlacement("newest")
    converse(kv, TEXT[:40], [8, 17, 24, 33, 40])
    assert lengths(kv, TEXT[:40]) == [40]
    converse(kv, TEXT[:20], [8, 20], tenant="bob")
    assert lengths(kv, TEXT[:40]) == [40], "others' states are others'"
    converse(kv, TEXT[:50], [40, 50], lease="turn_end")
    converse(kv, TEXT[:60], [60])
    assert lengths(kv, TEXT[:60]) == [50, 60], "a lease was asked for"
    assert check(kv, [*TEXT[:59], 7, 7]) == 50


def test_the_state_of_a_pinned_prompt_stays() -> None:
    kv = make_kv(pages=80)
    kv.snapshots.placement = StatePlacement("newest")
    converse(kv, TEXT[:24], [8, 16, 24])
    assert kv.pin(TEXT[:24]) == 24
    converse(kv, TEXT[:48], [40, 48])
    assert lengths(kv, TEXT[:48]) == [24, 48]


def test_a_state_stays_where_prompts_part() -> None:
    kv = make_kv(pages=120)
    kv.snapshots.placement = StatePlacement("newest", least_tokens=16)
    converse(kv, TEXT[:32], [16, 32])
    assert lengths(kv, TEXT[:32]) == [32]
    other = [*TEXT[:16], *range(99, 131)]
    with kv.open(other, state=True) as seq:
        assert seq.length == 0
        assert kv.snapshots.plan_stops([seq], 0, 47) == [16, 40] and seq.placed == 40
    converse(kv, other, [16, 40, 48])
    assert lengths(kv, other) == [16, 48]
    assert check(kv, [*TEXT[:16], 5, 5, 5]) == 16


def test_the_state_behind_an_answer_that_was_left_is_forgotten() -> None:
    kv = make_kv(pages=120)
    seq = kv.open(TEXT[:16])
    seq.placed = 16
    for end in (16, 29):  # the prompt and its answer
        advance(kv, [seq], [TEXT[seq.length : end]])
        assert kv.save_state(seq, state_of(TEXT[:end]), replaces=True)
    seq.close()
    assert lengths(kv, TEXT[:40]) == [16, 29]
    shortened = [*TEXT[:16], *range(200, 230)]
    assert check(kv, shortened) == 16
    converse(kv, shortened, [46])
    assert lengths(kv, TEXT[:40]) == [16] and lengths(kv, shortened) == [16, 46]


def test_an_answer_to_another_question_is_not_left() -> None:
    """Two users share a long beginning; each goes on from the state behind the own answer."""
    kv = make_kv(pages=160)

    def turn(text: list[int], prompted: int, placed: int) -> None:
        seq = kv.open(text[:prompted])
        seq.placed, seq.stops = placed, [placed]
        for end in (placed, len(text)):
            if seq.length < end:
                advance(kv, [seq], [text[seq.length : end]])
            assert kv.save_state(seq, state_of(text[: seq.length]), replaces=True)
        seq.close()

    one, two = ([*TEXT[:16], *range(n, n + 13)] for n in (100, 130))
    turn(one, 19, 16)
    turn(two, 19, 16)
    assert check(kv, [*one, 1, 2]) == 29 and check(kv, [*two, 1, 2]) == 29
    three = [*one[:19], *range(160, 170)]
    turn(three, 19, 16)  # another answer to the same question
    assert check(kv, [*one, 1, 2]) == 29 and check(kv, [*three, 1, 2]) == 29
    turn(one, 19, 16)  # again, as the latest
    more = [*three, *range(170, 190)]
    turn(more, 35, 32)  # the beginning is still of use to `one` and `two`
    assert check(kv, [*TEXT[:16], 1, 2]) == 16
    assert check(kv, [*one, 1, 2]) == 29 and check(kv, [*more, 1, 2]) == 49
    short = [*one[:19], *range(220, 250)]
    turn(short, 40, 40)  # the answer comes back as another one
    assert check(kv, [*two, 1, 2]) == 29 and check(kv, [*short, 1, 2]) == 49


@pytest.mark.parametrize("what", ["bodies", "frames", "lost", "flipped"])
def test_a_state_of_another_prompt_or_length_is_never_served(what: str) -> None:
    """Whatever happened to the frames of states, a state fits its tokens or there is none."""
    memory = MemoryTier()
    kv = make_kv(simple(), tiers=[memory], pages=80)
    talk(kv, TEXT[:16])
    talk(kv, TEXT[:24])
    talk(kv, [9] * 16)
    kv.flush()
    frames = memory.frames
    keys = [key for key, (header, _) in frames.items() if header.info.kind == "state"]
    assert len(keys) == 3
    for key, other in zip(keys, [*keys[1:], keys[0]], strict=True):
        (header, body), (strange, foreign) = frames[key], frames[other]
        if what == "bodies":
            frames[key] = header, foreign
        elif what == "frames":
            frames[key] = strange, foreign
        elif what == "flipped":
            frames[key] = header, body[:40] + bytes([body[40] ^ 1]) + body[41:]
        else:
            del frames[key]
            break
    for text in (TEXT, [9] * 30):
        assert check(kv, text) in ((0, 16, 24) if what == "lost" else (0,))
