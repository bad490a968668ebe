"""Restores at the edges: full pools, several tiers, sequences that are cut, costs that mislead."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import pytest

from flowkv import KV, Step
from flowkv.policy.restore import RestoreLoad, Span, State
from tests.inside import (
    HostTier,
    Late,
    PageLoad,
    RestoreEnded,
    RestoreJob,
    RestoreSpan,
    StateError,
    enter_tier,
)
from tests.inside import kv_plan as plan

from . import toy
from .audit import audit
from .links import Link, Trouble, evict, forward
from .test_pinned import behind_a_bus
from .test_restoration import PAGE, Split, finish, heard, only, stored, tokens


class Farther(Split):
    """Loads from the farther one of two tiers."""

    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        op = super().next_load(state, tier)
        return op._replace(source=1) if op is not None and tier == "far" else None


def test_pages_on_their_way_are_not_waited_for_where_others_need_room() -> None:
    prompt, other, link = tokens(6 * PAGE + 1), tokens(8 * PAGE + 1, seed=3), Link(per_poll=0)
    with stored(prompt, link, pages=15, policy=Split()) as kv:
        link.per_poll = 100
        toy.published(kv, other)  # idle pages fill the pool
        assert kv.flush()
        link.per_poll = 0
        store, waits = kv.planner.store, list[float]()
        drain = store.stack.mover.drain
        store.stack.mover.drain = lambda timeout_s=0.0: (waits.append(timeout_s), drain(0.0))[1]
        with kv.open(prompt, wait=False) as seq:
            assert seq.restoration is not None and link.waiting == 4
            with kv.open(tokens(5 * PAGE, seed=5)) as decode:  # some other request
                toy.prefill(kv, decode)
            assert not any(waits), "nobody waits for a link while idle pages can be given up"
            link.per_poll = 100
            finish(kv, [seq], "restore")
            toy.check_content(kv, seq, prompt)
        audit(kv)


def test_what_is_called_off_is_asked_of_no_other_tier() -> None:
    prompt, near, far = tokens(6 * PAGE + 1), Link(), Link(per_poll=0, name="far")
    with stored(prompt, near, policy=Farther()) as kv:
        kv.planner.store.stack.add(far)
        for block in kv.planner.store.index:
            enter_tier([block], 1, 0)
            kv.planner.store.stack.insert([block], 1)
        near.per_poll = 0
        kv.planner.store.stack.mover.lanes[1].schedule.demand_bytes = 1  # all but one of them wait
        with kv.open(prompt, wait=False) as seq:
            assert seq.restoration is not None and len(far.asked) == 1
            seq.restoration.cancel()
            kv.planner.store.writes.drain()
            assert not near.asked and not any(pool.lent for pool in kv.planner.store.pools.values())


def test_a_prompt_that_is_cut_is_not_restored_any_more() -> None:
    prompt, other = tokens(6 * PAGE + 1), tokens(4 * PAGE, seed=4)
    with stored(prompt, Link(), policy=Split(front=PAGE)) as kv, kv.open(prompt, wait=False) as seq:
        count = seq.restoration.next()
        with kv.step([seq], [prompt[:count]]) as step:
            forward(step)
        kv.truncate(seq, seq.length)
        assert seq.restoration is None and seq.known == seq.length == PAGE
        seq.note(other)
        finish(kv, [seq], "restore")
        toy.check_content(kv, seq, prompt[:PAGE] + other)
        audit(kv)


def test_nobody_learns_from_a_suffix_that_was_not_computed() -> None:
    prompt, link = tokens(6 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split()) as kv:
        events = heard(kv)
        told: list[float] = []
        kv.restores.costs.suffixed = lambda request, seconds: told.append(seconds)
        with kv.open(prompt, wait=False) as seq:
            threading.Timer(0.05, lambda: setattr(link, "per_poll", 100)).start()
            finish(kv, [seq], "prefill")
            assert not told
        (ended,) = only(events, RestoreEnded)
        assert 0.01 < ended.exposed_s <= ended.seconds, "each moment counts once"


def test_a_step_over_pages_that_did_not_come_cannot_be_committed() -> None:
    prompt, link = tokens(4 * PAGE + PAGE, seed=2), Link(per_poll=0)
    with (
        stored(prompt[: 4 * PAGE + 1], link, policy=Split(), load_deadline_s=0.5) as kv,
        kv.open(prompt, wait=False) as seq,
    ):
        assert seq.restoration is not None and seq.restoration.settle() == 4 * PAGE

        def careless(step: Step) -> None:
            for layer in sorted(kv.planner.layers):
                step.pages(layer)
                with suppress(Late):
                    step.appended(layer)

        with (
            pytest.raises(StateError, match="did not come"),
            kv.step([seq], [prompt[4 * PAGE :]]) as step,
        ):
            careless(step)
        seq.restoration.finish(ok=False)
        assert kv.planner.store.find(seq.key(0, 4)) is None, "nobody else gets it"
        link.release()
        link.per_poll = 100
        finish(kv, [seq], "prefill")
        toy.check_content(kv, seq, prompt)


@pytest.mark.parametrize("closed", [False, True])
def test_a_load_that_hangs_keeps_nothing_from_being_written(closed: bool) -> None:
    prompt, link = tokens(4 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(), load_deadline_s=0.5) as kv:
        with kv.open(prompt, wait=False) as seq:
            link.per_poll, link.trouble = 100, Trouble(hang=1.0)
            kv.planner.store.writes.drain()
            if closed:
                seq.close()
            toy.published(kv, tokens(2 * PAGE, seed=6))
            assert kv.flush(60), "writes wait for demands, but not for overdue ones"
        link.trouble = Trouble()
        link.release()
        kv.planner.store.writes.drain()
        audit(kv)
        assert not any(pool.lent for pool in kv.planner.store.pools.values()) and not len(
            kv.restores.flights
        )


def test_a_page_that_left_the_line_is_not_put_back() -> None:
    prompt, link = tokens(4 * PAGE + 200, seed=2), Link(per_poll=0)
    with (
        stored(prompt[: 4 * PAGE + 1], link, kind="windows", policy=Split()) as kv,
        kv.open(prompt, wait=False) as seq,
    ):
        restoration = seq.restoration
        assert restoration is not None and restoration.settle() == 4 * PAGE
        step = plan(kv, [seq], [200])
        step.commit()  # its layers did not wait, and pages behind windows were dropped
        link.per_poll = 100
        assert restoration.complete() and not seq.publishable
        restoration.finish(ok=True)
        audit(kv)
        assert kv.planner.store.find(seq.key(0, 5)) is None


def test_waiting_is_no_computing() -> None:
    prompt, link = tokens(4 * PAGE + 2 * PAGE), Link(per_poll=0)
    with stored(prompt[: 4 * PAGE + 1], link, policy=Split()) as kv:
        told: list[float] = []
        kv.planner.measured = lambda tokens, seconds, _: told.append(seconds)
        with kv.open(prompt, wait=False) as seq:
            threading.Timer(0.3, lambda: setattr(link, "per_poll", 100)).start()
            begun_s = time.perf_counter()
            finish(kv, [seq], "restore")
            assert sum(told) < time.perf_counter() - begun_s - 0.2


def test_a_wait_looks_at_flights_while_others_begin() -> None:
    """`rest` is called without the KV lock, beside threads that change what is in flight."""
    prompt, link = tokens(6 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split()) as kv:
        held: list[bool] = []
        busy = kv.restores.flights.busy_tiers

        def seen() -> set[int]:
            held.append(kv.lock._is_owned())
            return busy()

        def waits() -> list[int]:
            link.per_poll = 100
            return files()

        files, kv.restores.files = kv.restores.files, waits
        kv.restores.flights.busy_tiers = seen
        with kv.open(prompt, wait=False) as seq:
            finish(kv, [seq], "restore")
        assert link.per_poll, "nothing was waited for"
        assert held and all(held)


@pytest.mark.parametrize("policy", ["flowkv", "cake", "two-pointer-v1", "split"])
def test_the_rest_of_a_settled_prefix_is_asked_for_layer_by_layer(policy: str) -> None:
    prompt, link = tokens(12 * PAGE + 1), Link(per_poll=0)
    policies = {"split": Split(front=10 * PAGE)}
    with stored(prompt, link, policy=policies.get(policy, policy)) as kv:
        kv.restores.costs.computed = kv.restores.costs.suffixed = lambda *args: None
        with kv.open(prompt, wait=False) as seq:
            before = link.waiting
            assert seq.restoration is not None and seq.restoration.settle() == 12 * PAGE
            progress = kv.restores.state.requests[seq.restoration.request.number]
            assert progress.cells() < 3 * 12 * PAGE
            while not progress.restored:
                assert link.waiting > 1 or not progress.cells(), "the link never pauses"
                link.work(1)
                seq.restoration.pump()
            layers = [load.first for load in link.asked[before:] if load.stripes]
            assert layers == sorted(layers)
            finish(kv, [seq], "restore")
            toy.check_content(kv, seq, prompt)


def test_of_a_small_prefix_little_is_asked_for_at_first() -> None:
    prompt, link = tokens(40 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(), pages=100) as kv, kv.open(prompt, wait=False) as seq:
        assert 2 <= link.waiting <= 8, "the split can still move"
        link.per_poll = 100
        finish(kv, [seq], "restore")
        toy.check_content(kv, seq, prompt)


def test_a_tier_that_answers_at_once_gives_more_than_is_asked_for_at_first() -> None:
    prompt, link = tokens(40 * PAGE + 1), Link(per_poll=0)
    with (
        stored(prompt, link, policy=Split(), pages=100) as kv,
        kv.open(prompt, wait=False, computable=False) as seq,
    ):
        link.per_poll, kv.restores._window = 100, lambda tier: 1.0
        assert seq.restoration is not None and seq.restoration.complete()
        assert seq.restoration.finish() == 40 * PAGE
        toy.check_content(kv, seq, prompt[: 40 * PAGE])


def test_one_page_out_of_reach_does_not_keep_the_others() -> None:
    prompt, near, far = tokens(6 * PAGE + 1), Link(per_poll=100), Link(name="far")
    with stored(prompt, near, policy=Split()) as kv:
        store = kv.planner.store
        store.stack.add(far)
        with kv.open(prompt, limit=0) as seq:
            last = store.find(seq.key(0, 5))
        assert last is not None
        store.stack.places[0].remove(last)
        last.tiers = 0
        enter_tier([last], 1, 0)
        store.stack.insert([last], 1)
        store.stack.mover.lanes[1].rest(60.0)
        with kv.open(prompt, wait=False) as seq:
            assert seq.restoration is not None and seq.restoration.tokens == 5 * PAGE
            finish(kv, [seq], "restore")
            toy.check_content(kv, seq, prompt)
        audit(kv)


class Device:
    """A device that comes to the end of a step some steps later, half a second after its begin."""

    def __init__(self) -> None:
        self.left = 1

    def stop(self) -> None:
        pass

    def seconds(self) -> float | None:
        self.left -= 1
        return 0.5 if self.left < 0 else None


@pytest.mark.at_once
def test_the_front_is_timed_by_its_device() -> None:
    """As any prompt is: the host queues a step in a fraction of the time that it takes."""
    prompt, link = tokens(6 * PAGE + 1), Link(per_poll=0)
    with (
        stored(prompt, link, policy=Split(front=4 * PAGE)) as kv,
        kv.open(prompt, wait=False) as seq,
    ):
        told, timed = dict[Span, float](), Span(PAGE, 2 * PAGE)
        kv.restores.costs.computed = lambda _, layers, tokens, s: told.__setitem__(tokens, s)
        for turn in range(4):  # something may be compiled in the first one
            assert seq.restoration is not None and seq.restoration.next() == PAGE
            with kv.step([seq], [prompt[turn * PAGE : (turn + 1) * PAGE]]) as step:
                forward(step)
                if turn == 1:
                    step._timer, step._waited_s = Device(), 0.0
            assert (timed in told) == (turn == 3)
        assert told[timed] == pytest.approx(0.5, rel=0.05)
        link.per_poll = 1
        finish(kv, [seq], "restore")


def test_spans_of_the_front_come_before_the_end_of_the_restore() -> None:
    """Also where the time of its device is known later; until then, nothing keeps it open."""
    prompt, link = tokens(3 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(front=3 * PAGE)) as kv:
        events = heard(kv)
        with kv.open(prompt, wait=False) as seq:
            while count := seq.restoration.next() if seq.restoration is not None else 0:
                with kv.step([seq], [prompt[seq.length : seq.length + count]]) as step:
                    forward(step)
                    step._timer, step._waited_s = Device(), 0.0
                    step._timer.left = 100
            finish(kv, [seq], "restore")
            gone = weakref.ref(seq)
        del seq, step
        gc.collect()
        assert gone() is None
        kinds = [type(event) for event in events if isinstance(event, (RestoreSpan, RestoreEnded))]
        assert kinds == [RestoreSpan] * 3 + [RestoreEnded]


@pytest.mark.at_once
def test_a_front_in_steps_of_less_than_a_page_is_measured() -> None:
    """But not as the rate of a prompt."""
    prompt, link = tokens(4 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(front=2 * PAGE)) as kv:
        events, told = heard(kv), list[float]()
        kv.planner.measured = lambda tokens, seconds, _: told.append(seconds)
        with kv.open(prompt, wait=False) as seq:
            assert seq.restoration is not None
            while seq.restoration.next():
                with kv.step([seq], [prompt[seq.length :][: PAGE // 2]]) as step:
                    forward(step)
            link.per_poll = 100
            finish(kv, [seq], "restore")
        spans = [span for span in only(events, RestoreSpan) if span.engine == "compute"]
        assert len(spans) == 4 and kv.restores.costs.tried and not told


@pytest.mark.at_once
def test_a_row_is_not_closed_while_its_front_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, link = tokens(4 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(front=3 * PAGE)) as kv:
        seq = kv.open(prompt, wait=False)
        count, settled, closing = seq.restoration.next(), RestoreJob.settled.fget, list[Any]()

        def closes(job: RestoreJob) -> bool:
            found = settled(job)
            for thread in [closing.pop() for _ in closing]:
                thread.start()
                thread.join()
            return found

        monkeypatch.setattr(RestoreJob, "settled", property(closes))
        with kv.step([seq], [prompt[:count]]) as step:
            forward(step)
            closing.append(threading.Thread(target=seq.close))
        kv.planner.guard.run_deferred()
        assert not closing and seq.closed and kv.restores.costs.tried
        audit(kv)


# ---- after a restore, and after a failed one


def broken(kv: KV, link: Link, prompt: list[int]) -> tuple[Any, Any, Any]:
    """A row whose pages do not come, its restore, and a computed row of the same tokens."""
    seq = kv.open(prompt, wait=False)
    restoration = seq.restoration
    assert restoration.settle() == 4 * PAGE
    link.trouble, link.per_poll = Trouble(miss=1.0), 100
    assert not restoration.complete()
    twin = kv.open(prompt, reuse=False)
    toy.prefill(kv, twin)
    return seq, restoration, twin


@pytest.mark.parametrize("closed", [False, True])
def test_nothing_is_filled_behind_the_end(closed: bool) -> None:
    """The pages are others' by then."""
    prompt, link = tokens(4 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(), pages=20) as kv:
        seq, restoration, twin = broken(kv, link, prompt)
        seq.close() if closed else restoration.finish(ok=False)
        texts = [tokens(PAGE + 1, seed=10 + n) for n in range(6)]
        others = [toy.opened(kv, text) for text in texts]
        with pytest.raises(StateError, match="no page of the restore is missing"):
            restoration.fill(twin)
        for other, text in zip(others, texts, strict=True):
            toy.check_content(kv, other, text)
        audit(kv)


def test_what_is_cut_off_stays_missing() -> None:
    prompt, link = tokens(4 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(), pages=20) as kv:
        _, restoration, _ = rows = broken(kv, link, prompt)
        assert restoration.finish(ok=False) == rows[0].length == 0
        assert restoration.poll() is False and not restoration.complete()
        with pytest.raises(Late):
            restoration.wait(0)


def test_a_restore_that_is_over_keeps_no_sequence_open() -> None:
    prompt, link = tokens(4 * PAGE + 1), Link()
    with stored(prompt, link, policy=Split()) as kv:
        seq = kv.open(prompt, wait=False)
        restoration, gone = seq.restoration, weakref.ref(seq)
        assert restoration.complete() and restoration.finish() == 4 * PAGE and restoration.poll()
        del seq
        gc.collect()
        assert gone() is None


def test_what_is_filled_in_part_is_not_counted_as_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, link = tokens(4 * PAGE + 1), Link(per_poll=0)
    with stored(prompt, link, policy=Split(), pages=20) as kv:
        seq, restoration, twin = broken(kv, link, prompt)
        copy, left = PageLoad.copy_from, [2]

        def copies(one: PageLoad, source: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise StateError("no", "room")
            copy(one, source)

        monkeypatch.setattr(PageLoad, "copy_from", copies)
        with pytest.raises(StateError):
            restoration.fill(twin)
        assert restoration.finish(ok=False) > 0 and seq.reused == 0 == kv.tokens_reused


# ---- whether loading pays


@pytest.mark.parametrize("fast", ["near", "far"])
def test_of_tiers_the_one_that_is_read_is_asked_whether_it_pays(fast: str) -> None:
    """The nearer one rests."""
    prompt, near, far = tokens(6 * PAGE + 1), Link(name="near"), Link(per_poll=0, name="far")
    with stored(prompt, near) as kv:
        stack = kv.planner.store.stack
        stack.add(far)
        for block in kv.planner.store.index:
            enter_tier([block], 1, 0)
            stack.insert([block], 1)
        stack.mover.lanes[0].rest(60.0)
        kv.gate.computed(1000, 1e-3)
        for _ in range(20):
            for name in ("near", "far"):
                kv.gate.loaded(name, *((10**6, 1e-6) if name == fast else (1000, 1.0)))
        with kv.open(prompt, wait=False) as seq:
            assert (seq.restoration is not None) == (fast == "far")


def test_a_page_behind_that_does_not_pay_keeps_no_others_from_being_copied_at_once() -> None:
    slow, kv = Link(name="slow"), toy.make_kv(pages=20, tiers=[HostTier(1 << 24)], prefetch="off")
    with kv:
        behind_a_bus(kv)
        text, store = tokens(4 * kv.page_size), kv.planner.store
        toy.published(kv, text)
        evict(kv)
        kv.flush()
        store.writes.drain()
        store.stack.add(slow)
        with kv.open(text, limit=0) as seq:
            for last in [store.find(seq.key(g, 3)) for g in range(len(seq.blocks))]:
                assert last is not None and last.page < 0
                store.stack.places[0].remove(last)
                last.tiers = 0
                enter_tier([last], 1, 0)
                store.stack.insert([last], 1)
        kv.gate.computed(1000, 1e-3)
        for _ in range(20):
            kv.gate.loaded("slow", 1000, 10.0)
        with kv.open(text, wait=False) as seq:
            assert seq.restoration is None and seq.length == 3 * kv.page_size
            toy.check_content(kv, seq, text[: 3 * kv.page_size])
