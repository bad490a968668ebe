"""A policy that hears of everything later answers as one that heard of it at once."""

from __future__ import annotations

import math
import os
import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.policy import CATALOGUE, HazardIndex, Hedge, Visit, make_policy
from flowkv.testing import check_policy
from tests.inside import (
    FEW_VISITS,
    MOST_KEPT,
    NEVER_NS,
    ConfigError,
    Deferred,
    Rehearsals,
    deferred,
)

NAMES = [
    pytest.param(name, marks=[] if name in ("auto", "lru") else pytest.mark.thorough)
    for name in sorted(set(CATALOGUE) - {"opt"})
]
SECOND = 10**9
slots = st.lists(st.integers(0, 11), max_size=5, unique=True).map(lambda x: np.array(x, np.int64))
few = st.integers(0, 3)
calls = st.one_of(
    st.tuples(st.just("insert"), slots, few),
    st.tuples(st.just("access"), slots, few),
    st.tuples(st.sampled_from(["remove", "forget", "pin", "unpin"]), slots),
    st.tuples(st.just("complete"), few),
    st.tuples(st.just("abort"), few),
    st.tuples(st.just("hint"), slots, st.sampled_from([0, SECOND, NEVER_NS])),
    st.tuples(st.just("enqueue"), few, slots),
    st.tuples(st.sampled_from(["admit", "expired", "wanted", "displace", "digest"])),
)
questions = st.one_of(
    calls,
    st.tuples(st.just("evict"), few),
    st.tuples(st.just("invalidate"), st.integers(0, 1)),
    st.tuples(st.sampled_from(["resident", "priority", "weakest", "certain"])),
)


def tell(policy, now, name, *said):
    """One call; answers as lists."""
    x = [a.copy() if isinstance(a, np.ndarray) else a for a in said]
    if name == "insert":
        parents = np.concatenate([[-1], x[0][:-1]])[: len(x[0])].astype(np.int64)
        answer = policy.insert(now, x[0], parents, n_bytes=2, tenant=x[1] & 1)
    elif name == "access":
        answer = policy.access(now, x[0], Visit(x[1], blocks=len(x[0])))
    elif name in ("remove", "forget", "pin", "unpin"):
        answer = getattr(policy, name)(x[0])
    elif name == "complete":
        answer = policy.complete(now, x[0], stop=2, output_tokens=9)
    elif name in ("abort", "evict", "invalidate"):
        answer = getattr(policy, name)(now, x[0])
    elif name == "hint":
        answer = policy.hint(now, *x)
    elif name == "enqueue":
        answer = policy.enqueue(now, *x)
    elif name == "admit":
        answer = policy.admit(now, np.array([12]))
    elif name in ("expired", "weakest"):
        answer = getattr(policy, name)(now)
    elif name in ("displace", "certain"):
        answer = policy.displace(now, 1, math.inf if name == "certain" else 0.5)
    elif name == "wanted":
        return [part.tolist() for part in policy.wanted(now, 2)]
    elif name == "priority":
        answer = policy.priority(3)
    else:
        answer = getattr(policy, name)()
    for a in x:  # whoever was told may do with its arrays what it likes
        if isinstance(a, np.ndarray):
            a[:] = 11
    return answer.tolist() if isinstance(answer, np.ndarray) else answer


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 90), calls), max_size=30),
    st.lists(st.tuples(st.integers(-1, 90), questions), max_size=20),
    st.sampled_from([{}, {"lease_s": 20.0}]),
)
def test_every_answer_is_that_of_a_policy_that_heard_at_once(name, before, after, options):
    later, at_once, now = Deferred(make_policy(name, **options)), make_policy(name, **options), 0
    for seconds, call in before + after:
        now += seconds * SECOND
        assert tell(later, now, *call) == tell(at_once, now, *call)
    for last in ("digest", "resident", "evict", "evict", "digest"):
        said = [1] if last == "evict" else []
        assert tell(later, now, last, *said) == tell(at_once, now, last, *said)


def test_the_deferred_default_conforms():
    check_policy(lambda: Deferred(Hedge()), leases=("", "one_shot"), max_examples=12)


def story(policy, visits):
    for n in range(visits):
        block = np.array([n % 7])
        policy.access(n * SECOND, block, Visit(n))
        policy.insert(n * SECOND, block, np.array([-1]))
        policy.complete(n * SECOND, n, stop=2, output_tokens=3)
        assert policy.expired(n * SECOND).size == 0 and policy.admit(n * SECOND, block).all()
        assert policy.wanted(n * SECOND, 1)[0].size == 0


def test_nothing_is_told_while_nothing_has_to_be_decided():
    policy = Deferred(Hedge())
    story(policy, 100)
    assert len(policy.policy) == 0 and policy.digest() == Hedge().digest()
    assert policy.evict(100 * SECOND, 1).size == 1 and len(policy.policy) == 6


def test_calls_are_not_kept_forever():
    policy = Deferred(Hedge())
    policy.access(0, np.arange(MOST_KEPT))
    policy.insert(0, np.array([3]), np.array([-1]))
    assert len(policy.policy) == 1


def test_what_is_wrong_is_said_at_once():
    for wrong in (
        lambda p: p.insert(0, np.array([1]), np.array([], np.int64)),
        lambda p: p.insert(0, np.array([-1]), np.array([-1])),
        lambda p: p.insert(0, np.array([1]), np.array([-1]), tenant=-1),
        lambda p: p.insert(0, np.array([1]), np.array([-1]), lease="unheard of"),
        lambda p: p.load_model(b"nothing"),
    ):
        with pytest.raises(ConfigError):
            wrong(Deferred(Hedge()))


def test_what_was_learned_is_carried_over_and_a_little_is_not():
    taught, at_once = Deferred(HazardIndex()), HazardIndex()
    quick = Deferred(Hedge())
    for policy in (taught, at_once):
        for n in range(FEW_VISITS):
            policy.access(n * SECOND, np.array([n % 7]), Visit(n))
    learned = taught.save_model()
    assert learned == at_once.save_model() != HazardIndex().save_model()
    quick.load_model(learned)
    story(quick, 2)
    assert quick.save_model() == learned and len(quick.policy) == 0
    third, warm = quick, Hedge()
    warm.load_model(learned)
    story(warm, 2)
    for policy in (third, warm):
        policy.access(9 * SECOND, np.array([2]))
    assert third.wanted(9 * SECOND, 1)[0].tolist() == warm.wanted(9 * SECOND, 1)[0].tolist()
    assert len(third.policy) == len(warm) and third.digest() == warm.digest()
    assert Deferred(make_policy("lru")).save_model() == b""


def test_nobody_waits_for_what_may_be_none():
    """While the policy is compiled nothing is wished for; afterwards, all that would have been."""
    ready = False
    later, at_once = Deferred(HazardIndex(), lambda: ready), HazardIndex()
    for policy in (later, at_once):
        for n in range(9):
            policy.access(n * SECOND, np.arange(3), Visit(n))
    assert at_once.wanted(9 * SECOND, 4)[0].tolist() == [2]
    assert later.wanted(9 * SECOND, 4)[0].size == 0
    ready = True
    assert later.wanted(9 * SECOND, 4)[0].tolist() == [2]


def test_a_rehearsal_begins_by_itself_once_requests_come():
    asked = []
    policy = Deferred(HazardIndex(), lambda: bool(asked.append(1)))
    for n in range(2 * FEW_VISITS):
        assert len(asked) == (n >= FEW_VISITS)
        policy.access(n * SECOND, np.arange(3), Visit(n))
    assert len(asked) == 1


class Slow(HazardIndex):
    """Takes its time with the first call, as one that is compiled does."""

    def __init__(self, begun, go):
        super().__init__()
        self.begun, self.go = begun, go

    def access(self, now_ns, slots, visit):
        self.begun.set()
        assert self.go.wait(60.0)
        super().access(now_ns, slots, visit)


def test_a_rehearsal_is_one_and_ends_with_the_process():
    begun, go, made = threading.Event(), threading.Event(), []

    def make():
        made.append(Slow(begun, go))
        return made[-1]

    rehearsals = Rehearsals()
    assert not rehearsals.ready(Slow, make) and begun.wait(60.0)
    assert not rehearsals.ready(Slow, make) and len(made) == 1
    ending = threading.Thread(target=rehearsals.end)
    ending.start()
    go.set()
    ending.join()
    assert rehearsals.ready(Slow, make) and len(made) == 1
    assert len(made[0]) == 0, "it went on to the end of the call, and no further"
    assert not rehearsals.ready(HazardIndex, HazardIndex), "nothing begins at the end"


@pytest.mark.parametrize("name", NAMES)
def test_rehearsals_make_every_call(name):
    make, rehearsals = partial(make_policy, name), Rehearsals()
    policy = deferred(make)
    if not isinstance(policy, Deferred):
        pytest.skip("has nothing to compile")
    rehearsals.ready(type(policy.policy), make)
    rehearsals.wait()
    assert rehearsals.ready(type(policy.policy), make)


def test_a_child_of_fork_rehearses_anew():
    begun, go = threading.Event(), threading.Event()
    rehearsals = Rehearsals()
    assert not rehearsals.ready(Slow, lambda: Slow(begun, go)) and begun.wait(60.0)
    child = os.fork()
    if child == 0:  # its thread is not here
        rehearsals.wait()
        os._exit(Slow in rehearsals._done)
    go.set()
    rehearsals.wait()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Stuck(HazardIndex):
    """Is never compiled: whoever asks it waits for ever."""

    def _waits(self, *said, **more):
        raise AssertionError("a call waited for a compiler")

    insert = access = evict = remove = pin = unpin = admit = wanted = displace = _waits


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.booleans()), max_size=60))
def test_while_a_policy_is_compiled_the_longest_unused_leaf_goes(uses):
    """As LRU over chains would choose, call by call; nothing pinned, and nothing twice."""
    later, at_once = Deferred(Stuck(), lambda: False), make_policy("lru")
    now, here = 0, set()
    for chain, depth, frees in uses:
        now += SECOND
        blocks = np.arange(depth) + 10 * chain
        fresh = np.array([b for b in blocks.tolist() if b not in here], np.int64)
        above = np.where(fresh % 10 > 0, fresh - 1, -1)
        for policy in (later, at_once):
            policy.access(now, blocks)
            policy.insert(now, fresh, above, n_bytes=1)
        here.update(fresh.tolist())
        if frees:
            held = sorted(here)[:2]
            found = []
            for policy in (later, at_once):
                policy.pin(np.array(held, np.int64))
                found.append(policy.evict(now, 1))
                policy.unpin(np.array(held, np.int64))
            assert (found[0] is None) == (found[1] is None)
            if found[0] is not None:
                assert found[0].tolist() == found[1].tolist() and not set(held) & set(found[0])
                here.difference_update(found[0].tolist())
    assert later.displace(now, 1, math.inf).size == 0 and later.save_model() == b""


def test_the_policy_hears_of_what_left_before_it_could_choose():
    ready = False
    policy = Deferred(HazardIndex(), lambda: ready)
    for n in range(6):
        policy.access(n * SECOND, np.array([n]))
        policy.insert(n * SECOND, np.array([n]), np.array([-1]))
    assert [policy.evict(6 * SECOND, 1, protected=[0]).tolist() for _ in range(2)] == [[1], [2]]
    assert policy.evict(6 * SECOND, 5) is None and len(policy.policy) == 0
    ready = True
    assert policy.evict(7 * SECOND, 1).size == 1
    assert len(policy.policy) == 3 and not {1, 2} & set(policy.resident())


def test_a_compiler_that_takes_for_ever_does_not_fill_the_memory():
    ready = False
    policy = Deferred(HazardIndex(), lambda: ready)
    policy.pin(np.array([3, 3]))
    for n in range(MOST_KEPT // 8):
        policy.access(n * SECOND, np.array([n % 4, 4 + n % 4]), Visit(n))
        policy.insert(n * SECOND, np.array([n % 4, 4 + n % 4]), np.array([-1, n % 4]))
    assert len(policy._calls) < MOST_KEPT // 8
    ready = True
    assert sorted(policy.resident()) == list(range(8))
    assert all(policy.evict(2 * MOST_KEPT * SECOND, 1) is not None for _ in range(7))
    assert list(policy.resident()) == [3]
