"""Prefixes computed from the front while they are loaded from the back."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from bench.restore.baselines import RESTORE_POLICIES, make_restore_policy
from flowkv import KV, Geometry, Step
from flowkv.policy.restore import Compute, RestoreLoad, RestorePolicy, Span, State, Suffix
from tests.clock import together
from tests.inside import (
    Event,
    Hit,
    Late,
    Miss,
    NonFiniteError,
    Restored,
    RestoreEnded,
    RestoreSpan,
    StateError,
)

from . import toy
from .audit import audit
from .links import Link, Trouble, evict, forward

PAGE = toy.PAGE


class Split(RestorePolicy):
    """Computes `front` tokens a page at a time, loads the rest as it is told.

    Args:
        front: Tokens.
        whole: Pages that are loaded at once, of all layers; 0 for layer after layer.
    """

    name = "split"

    def __init__(self, front: int = 0, whole: int = 1) -> None:
        self.front, self.whole = front, whole

    def next_compute(self, state: State, among: Any = None) -> Compute | Suffix | None:
        for progress in state.among(among):
            request, first = progress.request, progress.front[0]
            stop = min(max(self.front, progress.lost), *progress.back)
            if request.computable and progress.computed[0] == first < stop:
                tokens = Span(first, min(first + request.unit, stop))
                return Compute(request.number, Span(0, request.layers), tokens)
        return None

    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        for progress in state:
            request = progress.request
            floor = max(self.front if request.computable else 0, progress.lost, request.resident)
            for layer in range(request.layers):
                stop = progress.back[layer]
                if stop > floor:
                    if not self.whole:
                        return RestoreLoad(
                            request.number, Span(layer, layer + 1), Span(floor, stop)
                        )
                    first = max(floor, stop - self.whole * request.unit)
                    return RestoreLoad(request.number, Span(0, request.layers), Span(first, stop))
        return None


def tokens(count: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 7 * n * n) % 50 for n in range(count)]


def shape(kind: str = "windows") -> Geometry:
    if kind == "windows":
        return toy.geometry(layers=4)
    if kind == "simple":
        return toy.simple(layers=3)
    return Geometry.uniform(layers=2, kv_heads=2, head_dim=64, page_size=64)


def stored(
    prompt: list[int], link: Link, *, kind: str = "simple", policy: Any = None, **options: Any
) -> KV:
    """A cache that knows a prompt, none of it on its device."""
    patience = options.pop("load_deadline_s", 20.0)
    kv = toy.make_kv(shape(kind), tiers=[link], load_deadline_s=patience, **options)
    per_poll, link.per_poll = link.per_poll, 100
    toy.published(kv, prompt)
    evict(kv)
    link.per_poll = per_poll
    if policy is not None:
        kv.restores.policy = make_restore_policy(policy)
    return kv


def heard(kv: KV) -> list[Event]:
    events: list[Event] = []
    kv.bus.subscribe(events.append, Hit, Miss, Restored, RestoreEnded, RestoreSpan)
    return events


def only(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


# ---- what is counted


def test_what_did_not_come_is_not_counted_as_reused() -> None:
    prompt = tokens(8 * PAGE + 3)
    with stored(prompt, Link(per_poll=0)) as kv, kv.open(prompt, wait=False) as seq:
        assert seq.restoration is not None and seq.restoration.tokens == 8 * PAGE
        seq.restoration.finish(ok=False)
        assert seq.length == 0 and seq.restoration is None
        assert seq.reused == 0 == kv.tokens_reused


@pytest.mark.parametrize("ok", [True, False])
def test_what_came_behind_the_front_is_counted_as_reused(ok: bool) -> None:
    prompt, link = tokens(8 * PAGE + 3), Link(per_poll=100)
    with stored(prompt, link) as kv, kv.open(prompt, wait=False) as seq:
        restoration = seq.restoration
        assert restoration is not None and restoration.complete()
        came = 8 * PAGE - restoration.front
        restoration.finish(ok=ok)
        assert seq.length == 8 * PAGE and seq.reused == came == kv.tokens_reused


# ---- what overlaps with what


def test_the_front_is_computed_while_the_back_is_loaded() -> None:
    prompt, link = tokens(8 * PAGE + 3), Link(per_poll=0)
    with stored(prompt, link, policy=Split(front=3 * PAGE)) as kv:
        events = heard(kv)
        with kv.open(prompt, wait=False) as seq:
            restoration = seq.restoration
            assert restoration is not None and seq.length == 0 == seq.reused
            assert restoration.tokens == 8 * PAGE
            assert link.waiting == 4, "the back was asked for before anything was computed"
            computed = []
            while count := restoration.next():
                computed.append(count)
                with kv.step([seq], [prompt[seq.length : seq.length + count]]) as step:
                    forward(step)
            assert computed == [PAGE] * 3 and link.waiting == 4
            assert restoration.settle() == 8 * PAGE == seq.length
            order: list[int] = []

            def awaits(layer: int) -> None:
                link.per_poll = 100
                restoration.wait(layer)
                order.append(layer)

            with kv.step([seq], [prompt[seq.length :]]) as step:
                step.awaits = awaits
                forward(step)
            assert order == [0, 1, 2]
            assert restoration.finish(ok=True) == len(prompt) and seq.restoration is None
            toy.check_content(kv, seq, prompt)
            audit(kv)
        (ended,) = only(events, RestoreEnded)
        assert (ended.computed_tokens, ended.loaded_tokens) == (3 * PAGE, 5 * PAGE)
        assert ended.n_bytes == 5 * 3 * 4096 and ended.failed == 0
        engines = [span.engine for span in only(events, RestoreSpan)]
        assert engines.count("compute") == 3 and engines.count("link") == 5
        assert engines.count("suffix") == 3
        assert [(hit.tier, hit.tokens) for hit in only(events, Hit)] == [("link", 5 * PAGE)]
        assert sum(miss.tokens for miss in only(events, Miss)) == 3 * PAGE + 2
        assert sum(one.tokens for one in only(events, Restored)) == 5 * PAGE
        with kv.open(prompt) as seq:
            assert seq.reused == 8 * PAGE
        assert len(link.asked) == 5, "everything is on the device now"


def test_the_suffix_runs_behind_the_stripes_of_its_layer() -> None:
    prompt, link = tokens(4 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(whole=0)) as kv, kv.open(prompt, wait=False) as seq:
        restoration = seq.restoration
        assert restoration is not None and restoration.next() == 0
        assert [load.stripes for load in link.asked] == [1] * 12
        assert [load.first for load in link.asked] == [0] * 4 + [1] * 4 + [2] * 4
        restoration.settle()
        left: list[int] = []
        with kv.step([seq], [prompt[seq.length :]]) as step:
            wait = step.awaits
            assert wait is not None, "a step waits by itself for what is on its way"

            def awaits(layer: int) -> None:
                link.work(4)  # what this layer needs, and nothing of the next
                wait(layer)
                left.append(link.waiting)

            step.awaits = awaits
            forward(step)
        assert left == [8, 4, 0], "each layer went on before the next one was there"
        restoration.finish()
        toy.check_content(kv, seq, prompt)


@pytest.mark.parametrize("policy", sorted(RESTORE_POLICIES))
@pytest.mark.parametrize("kind", ["windows", "simple"])
def test_every_policy_restores(policy: str, kind: str) -> None:
    prompt = tokens(9 * PAGE + 3)
    with stored(prompt, Link(), kind=kind, policy=policy) as kv:
        for way in ("restore", "prefill"):
            with kv.open(prompt, wait=False) as seq:
                finish(kv, [seq], way)
                toy.check_content(kv, seq, prompt)
                audit(kv)
            evict(kv)


def finish(kv: KV, seqs: list[Any], way: str, within: float = 0.0, chunk: int = 512) -> None:
    if way == "restore":
        outs = kv.restore(seqs, lambda step: forward(step, within), chunk=chunk)
        assert all(out is not None for out in outs)
    else:
        for step in kv.prefill(seqs, chunk=chunk):
            forward(step, within)


def test_nothing_is_on_its_way_where_all_is_on_the_device() -> None:
    prompt = tokens(4 * PAGE + 1)
    with stored(prompt, Link()) as kv:
        with kv.open(tokens(30, seed=9), wait=False) as seq:
            assert seq.restoration is None and seq.length == 0
        with kv.open(prompt) as seq:
            assert seq.reused == 4 * PAGE
        with kv.open(prompt, wait=False) as seq:
            assert seq.restoration is None and seq.length == seq.reused == 4 * PAGE
            audit(kv)


def test_what_is_on_the_device_already_is_not_loaded() -> None:
    prompt, link = tokens(8 * PAGE + 1), Link(per_poll=100)
    with stored(prompt, link, policy=Split()) as kv:
        with kv.open(prompt[: 3 * PAGE + 1]):
            evict(kv)  # but for what is held
            link.asked.clear()
            with kv.open(prompt, wait=False) as seq:
                assert seq.length == seq.reused == 3 * PAGE
                finish(kv, [seq], "restore")
                toy.check_content(kv, seq, prompt)
        assert len({load.key for load in link.asked}) == 5


def test_a_load_that_cannot_pay_is_not_begun() -> None:
    prompt, link = tokens(4 * PAGE + 1), Link()
    with stored(prompt, link) as kv:
        kv.gate.computed(1000, 1e-6)
        kv.gate.loaded("link", 1000, 1.0)
        with kv.open(prompt, wait=False) as seq:
            assert seq.restoration is None and seq.length == 0
        assert not link.asked
        audit(kv)


def test_where_nobody_computes_all_is_loaded() -> None:
    prompt = tokens(6 * PAGE + 2)
    with (
        stored(prompt, Link(), policy="flowkv") as kv,
        kv.open(prompt, wait=False, computable=False) as seq,
    ):
        restoration = seq.restoration
        assert restoration is not None
        assert restoration.next() == 0 and seq.length == 0
        assert restoration.settle() == 6 * PAGE
        assert restoration.complete() and restoration.finish() == 6 * PAGE
        toy.check_content(kv, seq, prompt[: 6 * PAGE])
        audit(kv)


@pytest.mark.parametrize("late", [False, True])
def test_where_nobody_computes_the_prefix_ends_at_what_is_missing(late: bool) -> None:
    prompt, link = tokens(6 * PAGE + 2), Link(per_poll=0)
    with (
        stored(prompt, link, policy=Split()) as kv,
        kv.open(prompt, wait=False, computable=False) as seq,
    ):
        restoration = seq.restoration
        assert restoration is not None
        if late:
            assert restoration.settle() == 6 * PAGE
        link.work(2)
        link.trouble = Trouble(miss=1.0)
        link.work(1)
        link.trouble, link.per_poll = Trouble(), 100
        whole = restoration.complete()
        assert whole is not late
        assert restoration.finish(ok=whole) == seq.length == restoration.tokens == 3 * PAGE
        toy.check_content(kv, seq, prompt[: 3 * PAGE])
        audit(kv)


# ---- several at once


@pytest.mark.parametrize("way", ["restore", "prefill"])
def test_several_requests_share_policy_and_link(way: str) -> None:
    prompts = [tokens(n * PAGE + 1, seed) for seed, n in enumerate((5, 2, 7, 2))]
    link = Link()
    with stored(prompts[0], link, kind="windows") as kv:
        for prompt in prompts[1:]:
            link.per_poll = 100
            toy.published(kv, prompt)
        evict(kv)
        link.per_poll = 0
        seqs = [kv.open(prompt, wait=False) for prompt in (*prompts, prompts[0])]
        assert len(kv.restores.state.requests) == 5
        link.per_poll = 1
        finish(kv, seqs, way)
        assert not kv.restores.state.requests and not len(kv.restores.flights)
        for seq, prompt in zip(seqs, (*prompts, prompts[0]), strict=True):
            toy.check_content(kv, seq, prompt)
        audit(kv)
        for seq in seqs:
            seq.close()
        audit(kv)


def _loaded(link: Link) -> Counter[tuple[bytes, int]]:
    """How often each layer of each page was loaded."""
    found = Counter[tuple[bytes, int]]()
    for load in link.carried:
        stripes = load.stripes or 3
        found.update((load.key, stripe) for stripe in range(load.first, load.first + stripes))
    return found


ways_to_restore = st.builds(Split, st.integers(0, 3).map(lambda n: n * PAGE), st.integers(0, 3))


@pytest.mark.at_once
@settings(max_examples=20)
@given(
    policy=st.just("flowkv") | ways_to_restore,
    pages=st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8)),
    moves=st.lists(st.tuples(st.integers(0, 2), st.sampled_from("owps")), min_size=5, max_size=20),
)
def test_what_requests_share_is_loaded_once(policy: Any, pages: Any, moves: Any) -> None:
    prompt, link = tokens(8 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=policy) as kv:
        seqs: dict[int, Any] = {}
        texts = [prompt[: n * PAGE] + tokens(PAGE, seed=9 + n) for n in pages]
        for who, what in [*moves, *((who, "o") for who in range(3))]:
            if who not in seqs:
                seqs[who] = kv.open(texts[who], wait=False, computable=False)
            restoration = seqs[who].restoration
            link.work(3 if what == "w" else 0)
            if restoration is not None and what == "p":
                restoration.pump()
            if restoration is not None and what == "s":
                restoration.settle()
        link.per_poll = 2
        finish(kv, list(seqs.values()), "prefill")
        for who, seq in seqs.items():
            assert seq.reused == pages[who] * PAGE
            toy.check_content(kv, seq, texts[who])
        assert set(_loaded(link).values()) == {1}
        assert kv.stats()["tiers"]["link"]["loaded_bytes"] == sum(
            load.target.nbytes for load in link.carried
        )
        audit(kv)


@pytest.mark.parametrize("policy", ["flowkv", Split(whole=0), Split(whole=2)])
@pytest.mark.parametrize("happens", ["cancel", "close", "fail", "hang", "cancel later"])
def test_what_is_shared_comes_whatever_becomes_of_who_asked_first(
    policy: Any, happens: str
) -> None:
    prompt, link = tokens(6 * PAGE + 1), Link(per_poll=0)
    deadline_s = 0.5 if happens == "hang" else 30.0
    with stored(prompt, link, policy=policy, load_deadline_s=deadline_s) as kv:
        first = kv.open(prompt, wait=False, computable=False)
        link.work(2)
        first.restoration.pump()
        second = kv.open(prompt[: 5 * PAGE + 1], wait=False, computable=False)
        second.restoration.pump()
        if happens == "cancel later":
            link.work(3)
            second.restoration.pump()
        before = _loaded(link).total()
        if happens == "fail":
            link.trouble = Trouble(fail=1.0)
        elif happens == "hang":
            link.trouble = Trouble(hang=1.0)
        elif happens == "close":
            first.close()
        else:
            first.restoration.cancel()
        link.work(1)
        second.restoration.pump()
        link.trouble, link.per_poll = Trouble(), 2
        finish(kv, [second] if first.closed else [first, second], "prefill")
        toy.check_content(kv, second, prompt[: 5 * PAGE + 1])
        link.release()
        kv.planner.store.writes.drain()
        toy.check_content(kv, second, prompt[: 5 * PAGE + 1])
        if happens in ("cancel", "close", "cancel later"):  # only what it had to itself is lost
            assert _loaded(link).total() <= len(_loaded(link)) + before
        first.close()
        audit(kv)


@pytest.mark.parametrize("together", [True, False])
def test_rows_of_one_forward_share_its_time(together: bool) -> None:
    prompt, other, link = tokens(4 * PAGE + 1), tokens(4 * PAGE + 1, seed=2), Link(per_poll=0)
    with stored(prompt, link, policy=Split(front=2 * PAGE)) as kv:
        link.per_poll = 100
        toy.published(kv, other)
        evict(kv)
        link.per_poll = 0
        spans: list[RestoreSpan] = []
        kv.bus.subscribe(spans.append, RestoreSpan)
        seqs = [kv.open(one, wait=False) for one in (prompt, other)]
        begun_s = time.perf_counter()
        counts = [seq.restoration.next() for seq in seqs]
        assert counts == [PAGE, PAGE]
        for batch in [seqs] if together else [[seq] for seq in seqs]:
            with kv.step(batch, [seq.tokens[:PAGE] for seq in batch]) as step:
                forward(step)
                time.sleep(0.02)
            if not together:
                batch[0].restoration.pump()
        for seq in seqs:
            seq.restoration.pump()
        passed_s = time.perf_counter() - begun_s
        assert [span.engine for span in spans] == ["compute"] * 2
        assert 0.02 <= sum(span.seconds for span in spans) <= passed_s
        assert min(span.seconds for span in spans) >= 0.01
        for seq in seqs:
            seq.close()


def test_threads_restore_beside_each_other() -> None:
    prompts = [tokens(n * PAGE + 1, seed) for seed, n in enumerate((5, 3, 6, 4))]
    link = Link()
    with stored(prompts[0], link, kind="windows") as kv:
        for prompt in prompts[1:]:
            toy.published(kv, prompt)
        evict(kv)

        def serve(prompt: list[int]) -> None:
            for _ in range(3):
                with kv.open(prompt, wait=False) as seq:
                    finish(kv, [seq], "restore")
                    toy.check_content(kv, seq, prompt)

        together(*(partial(serve, prompt) for prompt in prompts))
        audit(kv)


# ---- what goes wrong


def test_a_load_that_fails_moves_the_split() -> None:
    prompt, link = tokens(8 * PAGE + 1), Link(per_poll=0, trouble=Trouble(miss=1.0))
    with stored(prompt, link, policy=Split(front=2 * PAGE)) as kv:
        events = heard(kv)
        with kv.open(prompt, wait=False) as seq:
            restoration, counts = seq.restoration, []
            assert restoration is not None
            link.work(2)  # the last two pages are not there any more
            link.trouble = Trouble()
            while count := restoration.next():
                counts.append(count)
                with kv.step([seq], [prompt[seq.length : seq.length + count]]) as step:
                    forward(step)
            assert sum(counts) == 8 * PAGE, "what nobody has is computed, and all before it"
            assert restoration.settle() == 8 * PAGE and seq.restoration is None
            finish(kv, [seq], "prefill")
            toy.check_content(kv, seq, prompt)
            audit(kv)
        (ended,) = only(events, RestoreEnded)
        assert ended.failed and ended.computed_tokens == 8 * PAGE


def test_what_is_late_is_computed() -> None:
    prompt, link = tokens(6 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(front=PAGE), load_deadline_s=0.5) as kv:
        seq, counts = kv.open(prompt, wait=False), list[int]()
        link.work(2)
        link.trouble = Trouble(hang=1.0)
        (out,) = kv.restore([seq], lambda step: counts.append(forward(step)) or "end")
        assert out == "end" and counts[0] == PAGE
        toy.check_content(kv, seq, prompt)
        seq.close()
        link.work(100)
        link.release()  # rubbish, into pages that nobody may have got meanwhile
        with kv.open(prompt) as seq:
            toy.check_content(kv, seq, prompt[: 6 * PAGE])
        audit(kv)
        assert not any(pool.lent for pool in kv.planner.store.pools.values())


def test_late_says_which_layer_and_the_step_is_undone() -> None:
    prompt, link = tokens(4 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(whole=0), load_deadline_s=0.5) as kv:
        with kv.open(prompt, wait=False) as seq:
            restoration = seq.restoration
            assert restoration is not None and restoration.settle() == 4 * PAGE
            link.work(4)
            with pytest.raises(Late, match="layer 1"), kv.step([seq], [prompt[-1:]]) as step:
                forward(step)
            assert seq.length == 4 * PAGE
            with pytest.raises(StateError, match="on its way"):
                kv.fork(seq)
            assert restoration.finish(ok=False) == 0 == seq.length
            finish(kv, [seq], "prefill")
            toy.check_content(kv, seq, prompt)
        link.release()


@pytest.mark.parametrize("hang", [False, True])
def test_nobody_copies_from_a_page_that_could_not_be_filled(
    hang: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = shape("simple").page_size
    prompt, link = tokens(5 * size + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(), load_deadline_s=0.5) as kv:
        seq = kv.open(prompt, wait=False)
        restoration = seq.restoration
        assert restoration is not None and restoration.settle() == 5 * size
        link.work(3)
        link.trouble = Trouble(hang=1.0) if hang else Trouble(miss=0.5, fail=0.5)
        link.per_poll = 100

        def awaits(layer: int) -> None:
            with contextlib.suppress(Late):
                restoration.wait(layer)
            begun = [one for one in restoration.back if not one.complete]
            with kv.open(prompt, reuse=False) as twin:
                toy.prefill(kv, twin)

                def fails(*_: object) -> None:
                    raise NonFiniteError("half of it is written", "Compute it")

                with monkeypatch.context() as patch:
                    patch.setattr(type(kv.planner.store.pool(0)), "copy", fails)
                    with pytest.raises(NonFiniteError):
                        restoration.fill(twin)
                tried = [one for one in begun if one.filled]
                assert tried
                for one in tried:
                    assert not any(one.offers(n, one.codec) for n in range(one.stripes))
                restoration.fill(twin)

        def awaits_once(layer: int) -> None:
            if not all(one.complete for one in restoration.back):
                awaits(layer)

        with kv.step([seq], [prompt[seq.length :]]) as step:
            step.awaits = awaits_once
            forward(step, 0.0)
        restoration.finish()
        toy.check_content(kv, seq, prompt)
        link.release()


@pytest.mark.parametrize("kind", ["simple", "windows", "kv8"])
@pytest.mark.parametrize("hang", [False, True])
def test_what_is_missing_is_filled_within_the_step(kind: str, hang: bool) -> None:
    size, within = shape(kind).page_size, 0.02 if kind == "kv8" else 0.0
    options = {"codec": "kv8", "recent_tokens": 0} if kind == "kv8" else {}
    prompt, link = tokens(5 * size + 1), Link(per_poll=0)
    with stored(prompt, link, kind=kind, policy=Split(), load_deadline_s=0.5, **options) as kv:
        seq = kv.open(prompt, wait=False)
        restoration = seq.restoration
        assert restoration is not None and restoration.settle() == 5 * size
        link.work(3)
        link.trouble = Trouble(hang=1.0) if hang else Trouble(miss=0.5, fail=0.5)
        link.per_poll, filled = 100, list[int]()

        def awaits(layer: int) -> None:
            try:
                restoration.wait(layer)
            except Late:
                with kv.open(prompt, reuse=False) as twin:
                    with pytest.raises(StateError, match="too short"):
                        restoration.fill(twin)
                    toy.prefill(kv, twin)
                    restoration.fill(twin)
                for _ in range(20):  # more lines, longer ones: what the step reads stays right
                    kv.open(tokens(900, seed=8), reuse=False).close()
                kv.planner.tables.reserve(500)
                filled.append(layer)
                link.release()
                link.trouble = Trouble()
                restoration.wait(layer)

        with kv.step([seq], [prompt[seq.length :]]) as step:
            step.awaits = awaits
            forward(step, within)
        assert filled == [0]
        assert restoration.finish() == len(prompt)
        toy.check_content(kv, seq, prompt, within=within)
        seq.close()
        audit(kv)
        assert not any(pool.lent for pool in kv.planner.store.pools.values())
        with kv.open(prompt) as seq:
            toy.check_content(kv, seq, prompt[: seq.length], within=within)


@pytest.mark.parametrize("when", ["front", "behind", "in a step"])
@pytest.mark.parametrize("how", ["cancel", "close", "kv"])
def test_called_off(when: str, how: str) -> None:
    prompt, link = tokens(6 * PAGE + 1), Link(per_poll=0)
    kv = stored(prompt, link, kind="windows", policy=Split(front=2 * PAGE))
    seq = kv.open(prompt, wait=False)
    restoration = seq.restoration
    assert restoration is not None
    link.work(3)

    def end() -> None:
        {"cancel": restoration.cancel, "close": seq.close, "kv": kv.close}[how]()

    if when == "front":
        count = restoration.next()
        with kv.step([seq], [prompt[:count]]) as step:
            forward(step)
        end()
    else:
        restoration.settle()
        if when == "behind":
            end()
        else:
            with pytest.raises(Late), kv.step([seq], [prompt[seq.length :]]) as step:
                step.awaits = lambda layer: (end(), restoration.wait(layer))[1]
                forward(step)
            restoration.finish(ok=False)
    if how == "cancel":
        finish(kv, [seq], "prefill")
        toy.check_content(kv, seq, prompt)
        audit(kv)
        seq.close()
    if how != "kv":
        link.per_poll = 100
        with kv.open(prompt) as seq:
            toy.check_content(kv, seq, prompt[: seq.length])
        audit(kv)
        assert not kv.restores.state.requests and not any(
            pool.lent for pool in kv.planner.store.pools.values()
        )
        kv.close()


def test_what_is_forgotten_meanwhile_stays_forgotten() -> None:
    prompt, link = tokens(5 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split()) as kv:
        with kv.open(prompt, wait=False) as seq:
            assert seq.restoration is not None
            seq.restoration.settle()
            kv.forget(prompt)
            link.per_poll = 100
            finish(kv, [seq], "restore")
            toy.check_content(kv, seq, prompt)
        assert len(kv.planner.store.index) == 0
        audit(kv)


def test_a_pool_without_room_to_compute_loads() -> None:
    prompt = tokens(8 * PAGE + 1)
    with (
        stored(prompt, Link(), pages=10, policy=Split(front=8 * PAGE)) as kv,
        kv.open(prompt, wait=False) as seq,
    ):
        finish(kv, [seq], "restore")
        toy.check_content(kv, seq, prompt)
        audit(kv)


# ---- everything at once


@settings(max_examples=20)
@given(data=st.data())
def test_whatever_happens_nothing_wrong_is_attended_to(data: st.DataObject) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(("windows", "simple", "kv8")))
    size = shape(kind).page_size
    pages, resident = draw(st.integers(1, 7)), draw(st.integers(0, 4))
    prompt = tokens(pages * size + draw(st.integers(1, size)), draw(st.integers(0, 9)))
    split = st.builds(Split, st.integers(0, 7).map(lambda n: n * size), st.integers(0, 3))
    policy = draw(st.sampled_from(sorted(RESTORE_POLICIES)) | split)
    rare = st.sampled_from((0.0, 0.0, 0.0, 0.1, 0.4))
    trouble = Trouble(draw(rare), draw(rare), draw(rare), draw(rare) / 4)
    link = Link(per_poll=draw(st.integers(1, 5)), trouble=trouble, seed=draw(st.integers(0, 99)))
    options: dict[str, Any] = {"codec": "kv8", "recent_tokens": 0} if kind == "kv8" else {}
    if kind != "kv8" and draw(st.booleans()):
        options["pages"] = pages + draw(st.integers(2, 8))
    within = 0.02 if kind == "kv8" else 0.0
    link.trouble = Trouble()
    with stored(prompt, link, kind=kind, policy=policy, load_deadline_s=0.02, **options) as kv:
        link.trouble = trouble
        with kv.open(prompt[: resident * size + 1], limit=resident * size):
            evict(kv)
            seqs = [kv.open(prompt, wait=False, computable=draw(st.booleans()))]
            if draw(st.booleans()) and "pages" not in options:
                seqs.append(kv.open(prompt[: draw(st.integers(1, len(prompt)))], wait=False))
        ends = draw(st.sampled_from(("restore", "prefill", "cancel", "close")))
        chunk = draw(st.sampled_from((size // 2, 2 * size, 512)))
        if ends in ("restore", "prefill"):
            finish(kv, seqs, ends, within, chunk)
        else:
            _stop_at(kv, seqs[0], draw(st.integers(0, 9)), within)
            if ends == "close":
                seqs[0].close()
                del seqs[0]
            finish(kv, seqs, "prefill", within, chunk)
        for seq in seqs:
            toy.check_content(kv, seq, seq.tokens.tolist(), within=within)
        audit(kv)
        for seq in seqs:
            seq.close()
        link.release()
        kv.planner.store.writes.drain()
        with kv.lock:
            kv.restores.flights.expire()
            kv.planner.store.writes.drain()
        link.trouble, link.per_poll = Trouble(), 100
        with kv.open(prompt) as seq:
            finish(kv, [seq], "prefill", within)
            toy.check_content(kv, seq, prompt, within=within)
        audit(kv)
        assert not kv.restores.state.requests


def _stop_at(kv: KV, seq: Any, moment: int, within: float) -> None:
    """Follows a restore a few steps far, then calls it off."""
    restoration = seq.restoration
    if restoration is None:
        return
    while moment and (count := restoration.next()):
        part = seq.tokens[seq.length : seq.length + count].copy()
        with kv.step([seq], [part]) as step:
            forward(step, within)
        moment -= 1
    if moment:
        restoration.settle()
        steps: list[Step] = []
        try:
            with kv.step([seq], [seq.tokens[seq.length :].copy()]) as step:
                wait = step.awaits

                def awaits(layer: int) -> None:
                    steps.append(step)
                    if len(steps) == moment:
                        restoration.cancel()
                    if wait is not None:
                        wait(layer)

                step.awaits = awaits
                forward(step, within)
            restoration.finish(ok=True)
        except Late:
            restoration.finish(ok=False)
    restoration.cancel()
