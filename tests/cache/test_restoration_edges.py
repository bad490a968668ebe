"""Restores at the edges: full pools, several tiers, sequences that are cut, costs that mislead."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from flowkv import Step
from flowkv.policy.restore import RestoreLoad, State
from tests.inside import Late, RestoreEnded, StateError
from tests.inside import kv_plan as plan

from . import toy
from .audit import audit
from .links import Link, Trouble, forward
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
            block.enter(1, 0)
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

        kv.restores.flights.busy_tiers = seen
        with kv.open(prompt, wait=False) as seq:
            threading.Timer(0.02, lambda: setattr(link, "per_poll", 100)).start()
            finish(kv, [seq], "restore")
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
        last.enter(1, 0)
        store.stack.insert([last], 1)
        store.stack.mover.lanes[1].rest(60.0)
        with kv.open(prompt, wait=False) as seq:
            assert seq.restoration is not None and seq.restoration.tokens == 5 * PAGE
            finish(kv, [seq], "restore")
            toy.check_content(kv, seq, prompt)
        audit(kv)
