"""`Ledger`: answers of policies that cannot be are refused; moves that a driver can carry out.

Its hits are those of the bare loop: tests/sim/test_replay.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from flowkv.policy import LRU
from flowkv.residency import Ledger, Meta, Place
from tests.inside import Quota, StateError, Tenants


class Answers(LRU):
    """LRU, until it is told to answer something else."""

    def __init__(self):
        super().__init__()
        self.wrong = {}

    def evict(self, now_ns, n, protected=()):
        got = super().evict(now_ns, n, protected)
        return self.wrong["evict"](got) if "evict" in self.wrong and got is not None else got

    def expired(self, now_ns):
        return self.wrong.get("expired", super().expired(now_ns))

    def admit(self, now_ns, slots):
        return self.wrong.get("admit", super().admit(now_ns, slots))


def filled(*capacities):
    policies = [Answers() for _ in capacities]
    ledger = Ledger([Place(p, c) for p, c in zip(policies, capacities, strict=True)], block_bytes=1)
    ns, ids = ledger.namespace(b""), np.arange(40, dtype=np.uint64).reshape(-1, 2)
    ledger.serve(0, ns, ids[:8])
    return ledger, ns, ids, policies


BEYOND = (-1, -(2**40), 20, 2000, 2**28, 2**40, 2**62)


@pytest.mark.parametrize("slot", BEYOND)
@pytest.mark.parametrize("places", [(8,), (8, 8)])
def test_victims_that_are_none_are_refused(slot, places):
    ledger, ns, ids, policies = filled(*places)
    policies[0].wrong["evict"] = lambda got: np.full_like(got, slot)
    before = ledger._blocks.copy()
    with pytest.raises(StateError, match=r"gave up blocks that do not lie in place 0"):
        ledger.serve(1, ns, ids[8:9])
    touched = np.flatnonzero(ledger._blocks != before)
    assert set(touched.tolist()) <= {8}  # the block that came; no other
    policies[0].wrong.clear()
    ledger.serve(2, ns, ids[9:10])
    assert ledger.used_bytes(0) <= 8


@pytest.mark.parametrize(
    "wrong",
    [
        lambda got: np.repeat(got[:1], len(got)),
        lambda got: np.array([[7], [6]]),  # two vectors of one
        lambda got: np.array([3.0, 3.5]),  # the same one, as whole numbers
    ],
)
def test_victims_that_are_named_twice_or_are_no_vector(wrong):
    ledger, ns, ids, policies = filled(8)
    policies[0].wrong["evict"] = wrong
    if np.asarray(wrong(np.array([7, 6]))).ndim == 2:
        ledger.serve(1, ns, ids[8:10])  # read as the slots that it holds
        assert ledger.used_bytes(0) == 8
        return
    with pytest.raises(StateError, match="or one of them twice"):
        ledger.serve(1, ns, ids[8:10])


def test_other_answers_beyond_the_blocks():
    ledger, _, _, policies = filled(4, 8)
    before = ledger._blocks.copy()
    for place in policies:
        place.wrong["expired"] = np.array(BEYOND)
    assert ledger.tick(1) == []  # they lie nowhere, so they cannot leave
    for place in policies:
        place.wrong["expired"] = list(BEYOND)
    assert ledger.tick(1) == []
    assert (ledger._blocks == before).all()


@pytest.mark.parametrize("admitted", [np.ones(1, np.int64), [1], np.ones(99, bool), True, None])
def test_what_admit_answers_is_one_bool_for_each_block(admitted):
    ledger, ns, ids, policies = filled(4, 8)
    policies[1].wrong["admit"] = admitted
    with pytest.raises(StateError, match=r"Answer admit\(\) with one bool for each block"):
        ledger.serve(4, ns, ids[10:15])


@pytest.mark.parametrize("slots", [[slot] for slot in BEYOND] + [[0]])
def test_only_what_is_pinned_is_unpinned(slots):
    ledger, ns, ids, _ = filled(8)
    with pytest.raises(StateError, match="not all pinned"):
        ledger.unpin(1, np.array(slots))
    pinned = ledger.pin(ns, ids[:2])
    ledger.unpin(1, pinned)
    with pytest.raises(StateError, match="not all pinned"):
        ledger.unpin(1, pinned)


def over_disk(room=4, policies=LRU, below=LRU, disk=100):
    ledger = Ledger([Place(policies(), room), Place(below(), disk, lasts=True)], block_bytes=1)
    ids = np.arange(40, dtype=np.uint64).reshape(-1, 2)
    return ledger, ledger.namespace(b""), ids


def told(moves):
    return [(move.slots.tolist(), move.source, move.target) for move in moves]


def test_what_has_no_room_leaves_again_while_other_blocks_are_written():
    """They cannot be victims: a request under way has them pinned."""
    ledger, ns, ids = over_disk(1)
    ledger.serve(0, ns, ids[:2])
    assert ledger.begin(1, 1, ns, ids[:3]).kept == 1
    assert told(ledger.serve(2, ns, ids[:3]).moves) == [([2], 0, 1), ([1, 2], 0, -1)]
    assert ledger.used_bytes(0) == 1 and ledger.used_bytes(1) == 3


@pytest.mark.parametrize("held", [False, True])
def test_a_block_that_a_request_names_twice_is_written_once(held):
    ledger, ns, ids = over_disk()
    chain, meta = ids[[0, 1, 0, 2, 1]], Meta(chained=False)
    if held:
        assert not ledger.begin(0, 1, ns, chain, meta).moves
    ended = ledger.complete(1, 1) if held else ledger.serve(0, ns, chain, meta).moves
    assert told(ended) == [([0, 1, 2], 0, 1)]
    assert sorted(ledger.policy(1).resident()) == [0, 1, 2] and ledger.used_bytes(1) == 3
    ledger.resize(2, 0, 0)
    assert ledger.used_bytes(0) == 0 and ledger.lookup(ns, ids[:3]) == 3


def test_what_a_request_computed_lasts_where_its_room_went_meanwhile():
    """It is written before it leaves for the memory in between."""
    places = [Place(LRU(), 4), Place(LRU(), 4), Place(LRU(), 4, lasts=True)]
    ledger, ids = Ledger(places), np.arange(6, dtype=np.uint64).reshape(-1, 2)
    ns = ledger.namespace(b"")
    ledger.begin(0, 1, ns, ids)
    ledger.resize(1, 0, 1)
    assert told(ledger.complete(2, 1)) == [([0, 1, 2], 0, 2), ([2, 1], 0, 1), ([2, 1], 0, -1)]


def test_a_copy_that_expired_while_pinned_leaves_before_others_come():
    ledger, ns, ids, (_, below) = filled(8, 8)
    ledger.resize(1, 0, 0)
    ledger.resize(2, 0, 8)
    ledger.begin(3, 2, ns, ids[:1])
    below.wrong["expired"] = [0]
    ledger.tick(5)
    below.wrong.clear()
    ledger.resize(6, 0, 0)
    assert told(ledger.complete(7, 2)) == [([0], 1, -1), ([0], 0, 1), ([0], 0, -1)]
    assert len(below.resident()) == ledger.used_bytes(1) == 8


@pytest.mark.parametrize("held", [False, True])
def test_limits_of_tenants_hold_in_slower_places(held):
    ledger, ns, ids = over_disk(4, below=lambda: Tenants(LRU, {0: Quota(0, 3)}))
    for number in range(8):
        chain = ids[2 * number :][:2]
        if held:
            ledger.begin(number, number, ns, chain)
            ledger.complete(number, number)
        else:
            ledger.serve(number, ns, chain)
    assert (ledger.used_bytes(0), ledger.used_bytes(1)) == (4, 3)


def test_a_block_that_another_request_brings_is_not_written_before():
    ledger, _, ids = over_disk(4, lambda: Tenants(LRU, {0: Quota(3), 1: Quota()}))
    ns = ledger.namespace(b"other")
    ledger.serve(0, 0, ids[:3])
    assert ledger.begin(1, 1, ns, ids[5:7]).kept == 1  # the others are a tenant's reserve
    ledger.resize(2, 0, 5)
    assert ledger.begin(3, 2, ns, ids[5:7]).kept == 2
    assert told(ledger.complete(4, 1)) == [([3], 0, 1)]
    assert told(ledger.complete(5, 2)) == [([4], 0, 1)]
