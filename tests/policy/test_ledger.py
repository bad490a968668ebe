"""`Ledger`: answers of policies that cannot be are refused.

Its hits are those of the bare loop: tests/sim/test_replay.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from flowkv.policy import LRU
from flowkv.residency import Ledger, Place
from tests.inside import StateError


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
