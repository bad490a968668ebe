"""Tokens that fill no page: found by themselves, in open pages, left ones, and full ones."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from flowkv import KV, Salt
from flowkv.tiers import Outcome
from tests.cache.audit import audit, audit_empty
from tests.cache.fakes import MemoryTier, Wrapped
from tests.cache.toy import (
    PAGE,
    advance,
    check_content,
    geometry,
    make_kv,
    opened,
    prefill,
    published,
    simple,
)
from tests.inside import ManualClock

PROMPT = list(range(1, 30))  # three pages, and five tokens


def kept() -> Any:
    """Memory that claims to be a disk, and outlives caches."""
    return Wrapped(MemoryTier(name="kept"), kind="disk", close=lambda: None)


def common(some: list[int], others: list[int]) -> int:
    """Tokens with which both begin."""
    pairs = zip(some, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)))


# ---- an oracle: every prompt reuses the most that it shares with any one before it

TOKENS = st.lists(st.integers(1, 2), max_size=3 * PAGE)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[int], list[int], bool]]:
    """(prompt, answer, closed at once): prompts go on from random points of earlier ones."""
    told, found = [list[int]()], []
    for _ in range(draw(st.integers(2, 8))):
        before = draw(st.sampled_from(told))
        cut = draw(st.integers(0, len(before)))
        prompt, answer = before[:cut] + draw(TOKENS), draw(TOKENS)
        prompt = prompt or [1]
        found.append((prompt, answer, draw(st.booleans())))
        told.append(prompt + answer)
    return found


@pytest.mark.parametrize("shape", [geometry(), simple()], ids=["sliding", "full"])
@given(talk=conversations(), wait=st.booleans())
@settings(max_examples=25)
def test_what_is_reused_is_all_that_is_shared(shape: Any, talk: Any, wait: bool) -> None:
    sliding, known = len(shape.groups) > 1, list[list[int]]()
    with make_kv(shape, pages=400) as kv:
        held = []
        for prompt, answer, close in talk:
            seq = kv.open(prompt, wait=wait)
            most = max((common(prompt, one) for one in known), default=0)
            expected = min(most, len(prompt) - 1)
            # What lies behind a window is given up, so that nobody can branch off there.
            assert seq.reused <= expected if sliding else seq.reused == expected
            prefill(kv, seq)
            if answer:
                advance(kv, [seq], [answer])
            check_content(kv, seq, prompt + answer)
            known.append(prompt + answer)
            audit(kv)
            held.append(seq)
            if close:
                held.pop().close()
        for seq in held:
            seq.close()
        audit(kv)
        kv.forget()
        audit_empty(kv)


# ---- who holds them


def test_a_prompt_is_known_while_its_row_is_held_and_once_it_is_closed() -> None:
    with make_kv() as kv:
        first = opened(kv, PROMPT)
        second = kv.open(PROMPT)
        assert second.reused == len(PROMPT) - 1
        prefill(kv, second)
        advance(kv, [first, second], [[77], [78]])  # neither writes to the other's page
        check_content(kv, first, [*PROMPT, 77])
        check_content(kv, second, [*PROMPT, 78])
        first.close()
        second.close()
        for answer in (77, 78):
            third = kv.open([*PROMPT, answer, 5])
            assert third.reused == len(PROMPT) + 1
            check_content(kv, third, [*PROMPT, answer])
            third.close()


def test_tokens_in_the_middle_of_a_page_are_known() -> None:
    with make_kv(simple()) as kv:
        published(kv, PROMPT)
        for shared in (1, 7, 15, 23, 27):
            fork = kv.open([*PROMPT[:shared], 99, 98])
            assert fork.reused == shared
            check_content(kv, prefill(kv, fork), [*PROMPT[:shared], 99, 98])
            fork.close()


@pytest.mark.parametrize("codec", ["raw", "kv8"])
def test_tails_of_compressed_pools(codec: str) -> None:
    with make_kv(geometry(heads=16), codec=codec, recent_tokens=0) as kv:
        published(kv, PROMPT)
        for prompt, shared in ((PROMPT, 28), ([*PROMPT[:20], 99], 20)):
            seq = kv.open(prompt)
            assert seq.reused == shared
            check_content(kv, prefill(kv, seq), prompt, within=0.0 if codec == "raw" else 0.005)
            assert seq.fidelity == (codec != "raw")


def test_a_conversation_leaves_one_tail() -> None:
    with make_kv(pages=200) as kv:
        for end in range(5, 60, 9):
            seq = opened(kv, range(1, end))
            assert seq.reused == max(0, end - 10)
            seq.close()
            assert len(kv.planner.store.tails) == ((end - 1) % PAGE > 0)


# ---- those that tiers keep for later processes


@pytest.mark.parametrize("shape", [geometry(), simple()], ids=["sliding", "full"])
@given(talk=conversations(), wait=st.booleans())
@settings(max_examples=20)
def test_a_later_process_knows_ends_of_prompts_and_of_answers(
    shape: Any, talk: Any, wait: bool
) -> None:
    sliding, tier, told = len(shape.groups) > 1, kept(), list[list[int]]()
    ends = list[list[int]]()
    for prompt, answer, _ in talk:
        with make_kv(shape, tiers=[tier]) as kv, kv.open(prompt, wait=wait) as seq:
            if (restoration := seq.restoration) is not None:
                assert restoration.complete()
                restoration.finish()
            whole = max((common(prompt, one) // PAGE * PAGE for one in told), default=0)
            expected = min(whole, (len(prompt) - 1) // PAGE * PAGE)
            if whole == len(prompt):  # its last page is there, but for the token to compute
                expected = whole - 1
            own = [len(end) for end in ends if prompt[: len(end)] == end and len(end) < len(prompt)]
            expected = max([expected, *own])
            # What lies behind a window may have been given up before its end was known.
            assert seq.length <= expected if sliding else seq.length == expected
            check_content(kv, seq, prompt[: seq.length])
            prefill(kv, seq)
            if answer:
                advance(kv, [seq], [answer])
            check_content(kv, seq, prompt + answer)
            seq.close()
            assert kv.flush()
            audit(kv)
        told.append(prompt + answer)
        last = prompt[:-1] if len(prompt) % PAGE else []
        ends += [end for end in (told[-1], last) if len(end) % PAGE >= PAGE // 4]


def test_a_stored_tail_is_erased_with_its_prompt_its_tenant_and_all() -> None:
    for ask in ({"tokens": PROMPT}, {"tenant": "eve"}, {}):
        tier = kept()
        with make_kv(simple(), tiers=[tier]) as kv:
            published(kv, PROMPT, tenant="eve")
            assert kv.flush() and len(tier.frames) == 3 + 2
        with make_kv(simple(), tiers=[tier]) as kv:
            kv.forget(**({"tenant": "eve"} | ask))
            assert not tier.frames and kv.open(PROMPT, tenant="eve").reused == 0


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize("tokens", [None, PROMPT], ids=["all", "prompt"])
def test_stored_tails_are_exported_and_loaded(tmp_path: Path, tokens: Any, proven: bool) -> None:
    with make_kv(simple(), tiers=[stored()]) as kv:
        done = kv.export(tmp_path / "warm.kv", tokens)
    with make_kv(simple(), tiers=[kept()]) as kv:
        stack = kv.planner.store.stack
        stack.provisional.active = not proven
        assert kv.load(tmp_path / "warm.kv") == (done.frames, 0, 0, 0, 0)
        stack.provisional.begin()
        kv.planner.store.writes.confirm()
        assert kv.flush() and kv.open(PROMPT).reused == len(PROMPT) - 1
        audit(kv)
    with make_kv(simple()) as kv:  # no tier keeps them
        ends = done.frames - len(PROMPT) // PAGE
        assert ends > 0 and kv.load(tmp_path / "warm.kv") == (done.frames - ends, 0, 0, 0, ends)
    for other in (simple(page_size=2 * PAGE), simple(layers=3)):
        with make_kv(other, tiers=[kept()]) as kv:
            assert kv.load(tmp_path / "warm.kv").foreign == done.frames


def test_stored_tails_are_of_one_tenant_and_of_the_same_images() -> None:
    tier, image = kept(), [Salt(26, bytes(32))]
    with make_kv(simple(), tiers=[tier]) as kv:
        published(kv, PROMPT, salts=image)
        assert kv.flush()
    with make_kv(simple(), tiers=[tier]) as kv:
        assert kv.open(PROMPT, tenant="bob").reused == 0
        assert kv.open(PROMPT).reused == 24
        assert kv.open(PROMPT, salts=image).reused == 28


def test_a_stored_tail_holds_nothing_of_whoever_had_its_page_before() -> None:
    tier = kept()
    with make_kv(simple(), tiers=[tier]) as kv:
        kv.planner.store.pool(0).arena.fill_(0x77)
        published(kv, PROMPT)
        assert kv.flush()
    tails = [body for header, body in tier.frames.values() if header.info.kind == "state"]
    assert len(tails) == 2 and not any(b"\x77" * 4 in bytes(body) for body in tails)


@pytest.mark.parametrize("outcome", ["lost", "wrong"])
def test_a_stored_tail_that_does_not_come_is_computed(outcome: str) -> None:
    tier = kept()
    with make_kv(simple(), tiers=[tier]) as kv:
        published(kv, PROMPT)
        assert kv.flush()
    with make_kv(simple(), tiers=[tier]) as kv:
        for key, (header, body) in list(tier.frames.items()):
            if header.info.kind == "state" and outcome == "lost":
                tier.delete([key])
            elif header.info.kind == "state":
                tier.frames[key] = header, bytes(len(body))
        with kv.open(PROMPT) as seq:
            assert seq.reused == 24
            check_content(kv, prefill(kv, seq), PROMPT)
        audit(kv)


def test_nothing_is_stored_of_what_is_private_short_or_not_proven() -> None:
    tier = kept()
    with make_kv(simple(), tiers=[tier]) as kv:
        published(kv, PROMPT[:25])  # one token in its last page
        seq = opened(kv, [7] * 13)
        seq.publishable = False
        seq.close()
        kv.planner.store.stack.provisional.active = True
        published(kv, [8] * 13)
        assert kv.flush()
        kinds = [header.info.kind for header, _ in tier.frames.values()]
        assert kinds.count("state") == 0
        store = kv.planner.store
        store.stack.provisional.begin()
        store.writes.confirm()
        assert kv.flush()
        kinds = [header.info.kind for header, _ in tier.frames.values()]
        assert kinds.count("state") == 2  # of 13 tokens and of 12
        published(kv, [9] * 13)
        assert store.stack.provisional.tails
        store.forget(*store.stack.provisional)
        assert not store.stack.provisional and not store.stack.provisional.tails
        audit(kv)


def stored(prompt: list[int] = PROMPT) -> Any:
    """A tier that holds a prompt."""
    tier = kept()
    with make_kv(simple(), tiers=[tier]) as kv:
        published(kv, prompt)
        assert kv.flush()
    return tier


def test_whoever_waits_for_a_stored_tail_is_told_of_the_end() -> None:
    with make_kv(simple(), tiers=[stored()]) as kv:
        (tier,) = kv.planner.store.stack.tiers
        poll, tier.poll = tier.poll, lambda timeout_s=0.0: []
        seq = kv.open(PROMPT, wait=False)
        timer = threading.Timer(0.05, seq.restoration.cancel)
        timer.start()
        seq.restoration.complete()  # returns
        timer.join()
        tier.poll = poll


@pytest.mark.parametrize("computable", [True, False])
def test_a_load_that_is_lost_while_room_is_made_for_a_tail_is_lost(computable: bool) -> None:
    tier = stored()
    with make_kv(simple(), pages=8, tiers=[tier]) as kv:
        for first in (50, 60):
            published(kv, [first] * 33)  # the device is full of idle pages
        assert kv.flush()
        store = kv.planner.store
        (own,) = store.stack.tiers
        poll, held, there = own.poll, [True], list[Any]()
        lost = _key(kv, PROMPT, 2)
        header, body = tier.frames[lost]
        tier.frames[lost] = header, bytes(len(body))  # what is in its page is nothing then

        def later(timeout_s: float = 0.0) -> list[Any]:
            there.extend(poll(timeout_s))
            pages = [one for one in there if held[0] and one.key in tier.frames]
            pages = [one for one in pages if tier.frames[one.key][0].info.kind == "page"]
            found = [one for one in there if one not in pages]
            there[:] = pages
            return [
                one._replace(outcome=Outcome.MISS, reason="absent", info=None)
                if one.key == lost
                else one
                for one in found
            ]

        own.poll = later
        seq = kv.open(PROMPT, wait=False, computable=computable)
        restoration, allocate = seq.restoration, store.allocator.try_allocate
        restoration.meet()

        def answered(*wanted: Any) -> Any:
            held[0] = False  # a tier that answers at that very moment
            store.writes.drain()
            return allocate(*wanted)

        store.allocator.try_allocate = answered
        restoration.settle()
        store.allocator.try_allocate = allocate
        restoration.finish(ok=restoration.complete())
        check_content(kv, seq, PROMPT[: seq.length])
        own.poll = poll
        with kv.open(PROMPT) as other:
            check_content(kv, other, PROMPT[: other.length])


def test_what_is_condemned_meanwhile_is_no_tail() -> None:
    with make_kv(simple(), tiers=[stored(PROMPT[:24])]) as kv:
        seq = kv.open(PROMPT[:24], wait=False)
        restoration = seq.restoration
        restoration.meet()
        (one,) = restoration._behind
        assert one.complete
        kv.planner.store.stack.quarantine([one.block])
        kv.planner.store.forget(one.block)
        assert restoration.gone
        restoration.complete()
        restoration.finish()
        assert seq.length == 16
        check_content(kv, seq, PROMPT[:16])


def test_a_page_that_becomes_its_block_s_is_not_taken_for_a_private_one() -> None:
    tier = stored([*PROMPT[:24], 9, 9])
    with make_kv(simple(), tiers=[tier]) as kv:
        block = kv.planner.store.index.find(_key(kv, PROMPT[:24], 2))
        (one,) = _behind(kv, PROMPT[:24])
        assert one.block is block
        published(kv, PROMPT[:24])  # its block is on its device now, by somebody else
        assert block.page >= 0 and not one.meet() and not one.held
        one.drop()
        audit(kv)


def _key(kv: KV, tokens: list[int], page: int) -> bytes:
    with kv._probe(tokens, None, ()) as seq:
        return seq.key(0, page)


def _behind(kv: KV, tokens: list[int]) -> list[Any]:
    with kv.lock, kv._probe(tokens, None, ()) as seq:
        return kv.restorer.behind(seq, len(tokens) // PAGE - 1, len(tokens) - 1)


def test_an_exact_tail_takes_the_place_of_a_lossy_one() -> None:
    tier = stored()
    for key, (header, body) in list(tier.frames.items()):
        if header.info.kind == "state":
            info = header.info._replace(fidelity=2)
            tier.frames[key] = header._replace(info=info), body
    for reused in (24, 28):
        with make_kv(simple(), tiers=[tier]) as kv:
            with kv.open(PROMPT) as seq:
                assert seq.reused == reused
                check_content(kv, prefill(kv, seq), PROMPT)
            assert kv.flush()


def test_where_much_lies_below_a_key_tails_are_looked_up() -> None:
    with make_kv(simple(), pages=200, tiers=[stored(PROMPT[:7])]) as kv:
        for first in range(50, 70):
            published(kv, [first] * PAGE)
        with kv.open(PROMPT) as seq:
            assert seq.reused == 7


# ---- who may not have them


def test_other_tenants_images_and_models_have_none() -> None:
    def image(position: int, number: int) -> list[Salt]:
        return [Salt(position, bytes([number]) * 32)]

    def known(prompt: list[int], **options: Any) -> int:
        with kv.open(prompt, **options) as seq:
            return seq.reused

    with make_kv(simple()) as kv:
        published(kv, PROMPT, salts=image(26, 1))
        assert known(PROMPT, salts=image(26, 1)) == 28
        assert known(PROMPT, salts=image(26, 2)) == 24
        assert known(PROMPT, salts=image(25, 1)) == 24
        assert known(PROMPT) == 24
        assert known(PROMPT, tenant="bob") == 0
        with opened(kv, PROMPT[:5], salts=image(3, 1), tenant="eve"):
            assert known(PROMPT, tenant="eve") == 3  # what comes before the image


def test_a_run_that_ends_elsewhere_is_another_from_its_beginning() -> None:
    def run(end: int) -> list[Salt]:
        return [Salt(place, bytes([place]) * 32) for place in (2, end)]

    with make_kv() as kv, opened(kv, range(7), salts=run(6)):
        assert kv.open(range(8), salts=run(4)).reused == 2
        assert kv.open(range(8), salts=run(6)).reused == 7


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("length", [5, len(PROMPT)])
def test_what_was_erased_is_not_known(held: bool, length: int) -> None:
    with make_kv() as kv:
        seq = opened(kv, PROMPT[:length])
        if not held:
            seq.close()
        kv.forget(PROMPT[:length])
        assert kv.open(PROMPT).reused == 0
        seq.close()
        assert kv.open(PROMPT).reused == 0


def test_what_is_private_or_not_finite_is_not_known() -> None:
    with make_kv(simple()) as kv:
        seq = opened(kv, PROMPT)
        seq.publishable = False
        assert kv.open(PROMPT).reused == 24
        seq.close()
        assert kv.open(PROMPT).reused == 24
        seq = opened(kv, PROMPT)
        page = int(kv.planner.tables.pages[0][seq.row, 3])
        raw = kv.planner.store.pool(0).page_bytes(page, 4096).view(torch.float32)
        raw[4 * 8] = float("nan")  # the last token's key
        seq.close()
        assert kv.open(PROMPT).reused == 28
        assert kv.open([*PROMPT, 7]).reused == 24
        audit(kv)


# ---- memory


def test_tails_go_before_all_others() -> None:
    with make_kv(simple(), pages=8) as kv:
        published(kv, PROMPT)  # three pages and a tail
        store = kv.planner.store
        full = opened(kv, [50] * (4 * PAGE))
        assert store.tails
        advance(kv, [full], [[50]])
        assert not store.tails and kv.open(PROMPT).reused == 24
        audit(kv)


def test_what_is_asked_for_is_not_given_up_for_itself() -> None:
    with make_kv(simple(), pages=8) as kv:
        published(kv, PROMPT)
        published(kv, [50] * (4 * PAGE))
        again = kv.open(PROMPT)
        assert again.reused == 28
        check_content(kv, prefill(kv, again), PROMPT)
        audit(kv)


def test_tails_move_with_all_pages() -> None:
    with make_kv(geometry(heads=16), codec="kv8", recent_tokens=0) as kv:
        for number in range(6):
            published(kv, [number + 50, *PROMPT])
        kv.defragment()
        audit(kv)
        for number in range(6):
            seq = kv.open([number + 50, *PROMPT])
            assert seq.reused == 29
            check_content(kv, prefill(kv, seq), [number + 50, *PROMPT], within=0.005)


def test_an_explanation_counts_them() -> None:
    with make_kv(simple()) as kv:
        published(kv, PROMPT)
        told = kv.explain(PROMPT)
        assert told.known == 28 and told.residency == {"device": 28}


@pytest.mark.parametrize("count", [5, 24, 27])
@pytest.mark.parametrize("held", [False, True])
def test_no_page_is_read_past_its_age_full_or_not(held: bool, count: int) -> None:
    kv = make_kv(simple(), pages=16, clock=ManualClock(), policy_options={"max_age_s": 10})
    with opened(kv, [1] * count) as seq:
        assert opened(kv, [*[1] * count, 2]).reused == count
        seq.close() if not held else kv.fork(seq).close()
        kv.clock.advance(s=11.0)
        with kv.open([1] * 30) as twin:
            assert twin.reused == 0
        if held:
            check_content(kv, seq, [1] * count)
