"""What is carried over goes on as before; what is damaged is refused, and changes nothing."""

from __future__ import annotations

import functools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.core.errors import ConfigError
from flowkv.policy import ARC, LRU, Cyclic, HazardIndex, Hedge, Lease, LfuTtl
from flowkv.policy.base import NEVER_NS, Visit
from flowkv.policy.by_score import ByScore
from flowkv.policy.order.leaf import LeafOrder

S = 10**9
MAKERS = {
    "lru": lambda: LRU(leases={"s": Lease(3, 90, 60, 7)}),
    "lfu": lambda: LfuTtl(tau_s=9, leases={"s": Lease(3, 90, 60, 7)}),
    "arc": lambda: ARC(leases={"s": Lease(3, 90, 60, 7)}),
    "cyclic": lambda: Cyclic(streaming=1, leases={"s": Lease(3, 90, 60, 7)}),
    "hazard": lambda: HazardIndex(leases={"s": Lease(3, 90, 60, 7)}),
    "auto": lambda: Hedge(leases={"s": Lease(3, 90, 60, 7)}),
    "score": lambda: ByScore(leases={"s": Lease(3, 90, 60, 7)}),
}


def ids(*values):
    return np.array(values, np.int64)


def live(policy, rounds=range(40)):
    """Something of everything; yields what it decides."""
    rng = np.random.default_rng(4)
    draws = rng.integers(0, 1 << 30, (60, 6))
    for i in rounds:
        now, (a, b, c, d, e, f) = i * S, draws[i].tolist()
        chain = ids(a % 40, 40 + b % 40, 80 + c % 40)[: 1 + d % 3]
        policy.access(now, chain, Visit(request=e % 5))
        policy.insert(
            now, chain, ids(-1, *chain[:-1]), lease="s" if e % 3 == 0 else "", tenant=f % 3
        )
        yield None if (victims := policy.evict(now, f % 4, chain)) is None else victims.tolist()
        if i % 7 == 3:
            policy.pin(chain[:2])
        if i % 7 == 6:
            policy.unpin(chain)
        if i % 5 == 1:
            policy.hint(now, chain, [3 * S, NEVER_NS, 0][b % 3])
        if i % 5 == 2:
            policy.enqueue(now, e % 5, chain)
        if i % 13 == 12:
            policy.invalidate(now, f % 3)
            policy.forget(ids(a % 120))
        yield policy.expired(now).tolist()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("after", [0, 1, 17, 40])
def test_goes_on_as_before(name, after):
    old, new = MAKERS[name](), MAKERS[name]()
    list(live(old, range(after)))
    new.restore(old.snapshot())
    alike = name not in {"hazard", "auto"}  # those may have room for more
    assert not alike or new.snapshot() == old.snapshot()
    assert list(live(old, range(after, 60))) == list(live(new, range(after, 60)))
    assert new.digest() == old.digest()
    assert not alike or new.snapshot() == old.snapshot()


def test_is_for_the_same_policy_with_the_same_options():
    snapshot = LfuTtl(tau_s=9).snapshot()
    for other in (LRU(), LfuTtl(tau_s=8), LfuTtl(tau_s=9, lease_s=5)):
        with pytest.raises(ConfigError, match="name and options"):
            other.restore(snapshot)
    with pytest.raises(ConfigError, match="half-life"):
        LeafOrder(5).restore(LeafOrder(6).snapshot())


def survives(name, snapshot):
    """Refused without a change, or taken over as something that works."""
    policy = MAKERS[name]()
    before = policy.snapshot()
    try:
        policy.restore(snapshot)
    except ConfigError:
        assert policy.snapshot() == before
        return
    policy.snapshot()
    list(live(policy, range(40, 60)))
    policy.evict(100 * S, len(policy.resident()) + 1)


@functools.cache
def whole(name):
    policy = MAKERS[name]()
    list(live(policy))
    return policy.snapshot()


@settings(max_examples=60, derandomize=True)
@given(
    name=st.sampled_from(list(MAKERS)),
    cut=st.integers(0, 1 << 20),
    flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), max_size=4),
    short=st.booleans(),
)
def test_damage_does_no_harm(name, cut, flips, short):
    data = bytearray(whole(name))
    for at, bits in flips:
        data[at % len(data)] ^= bits
    survives(name, bytes(data[: cut % len(data)] if short else data))


numbers = st.one_of(
    st.integers(-3, 200), st.sampled_from([1 << 31, -(1 << 31), 1 << 62, -(1 << 62), (1 << 63) - 1])
)


@settings(max_examples=250, derandomize=True)
@given(name=st.sampled_from(list(MAKERS)), draw=st.data())
def test_well_formed_nonsense_does_no_harm(name, draw):
    """Numbers anywhere in the columns: nothing is read or written outside of the arrays."""
    image = msgspec.msgpack.decode(whole(name))
    values = image[3]
    field = draw.draw(st.sampled_from(sorted(values)))
    value = values[field]
    if isinstance(value, bytes) and value:
        wide = len(value) % 8 == 0 and field not in {"parent", "live", "depth", "marks", "shadow"}
        narrow = np.uint8 if len(value) % 4 else np.int32
        column = np.frombuffer(value, np.int64 if wide else narrow).copy()
        for _ in range(draw.draw(st.integers(1, 3))):
            number = draw.draw(numbers)
            info = np.iinfo(column.dtype)
            column[draw.draw(st.integers(0, len(column) - 1))] = min(
                max(number, info.min), info.max
            )
        values[field] = column.tobytes()
    elif isinstance(value, list):
        values[field] = draw.draw(st.lists(st.one_of(numbers, st.lists(numbers)), max_size=50))
    else:
        values[field] = draw.draw(
            st.one_of(numbers, st.none(), st.text(), st.just({1: [3, 1 << 40]}))
        )
    survives(name, msgspec.msgpack.encode(image))
