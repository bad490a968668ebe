"""Which replica a prompt goes to: what each knows is what its events say, and costs decide."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.connect.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from flowkv.connect.routing import ReplicaRates, Router
from tests.inside import ConfigError

SIZE = 4
REPLICAS = ["a", "b", "c"]
chains = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
"""Blocks of a prompt, each a number; a block is named by the chain down to it."""


def ids(chain: tuple[int, ...]) -> list[int]:
    return [block for block in chain for _ in range(SIZE)]


def name(replica: str, chain: tuple[int, ...]) -> bytes:
    """Replicas need not agree on names."""
    return f"{replica}{chain}".encode()


def say(router: Router, replica: str, *events: Any) -> None:
    router.feed(replica, [EventBatch(0.0, [event]) for event in events])


def store(replica: str, chain: tuple[int, ...], first: int = 0, **said: Any) -> BlockStored:
    names = [name(replica, chain[: n + 1]) for n in range(first, len(chain))]
    parent = name(replica, chain[:first]) if first else None
    return BlockStored(names, parent, ids(chain[first:]), SIZE, **said)


class World:
    """What each replica has: prefixes by medium, as a set that nobody optimised."""

    def __init__(self) -> None:
        self.router = Router(REPLICAS)
        self.has: dict[str, set[tuple[tuple[int, ...], str]]] = {one: set() for one in REPLICAS}

    def prefixes(self, replica: str) -> set[tuple[int, ...]]:
        return {chain for chain, _ in self.has[replica]}

    def known(self, chain: tuple[int, ...]) -> dict[str, int]:
        found = {}
        for replica in REPLICAS:
            there, n = self.prefixes(replica), 0
            while n < len(chain) and chain[: n + 1] in there:
                n += 1
            found[replica] = n * SIZE
        return found


steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from(REPLICAS), chains, st.sampled_from("GC")),
        st.tuples(st.just("remove"), st.sampled_from(REPLICAS), chains, st.sampled_from("GC")),
        st.tuples(st.just("clear"), st.sampled_from(REPLICAS)),
    ),
    min_size=8,
    max_size=25,
)


@settings(deadline=None)
@given(steps, st.lists(chains, min_size=1, max_size=4))
def test_what_is_known_is_what_events_say(story: list[Any], asked: list[Any]) -> None:
    world = World()
    for step in story:
        kind, replica = step[:2]
        has = world.has[replica]
        if kind == "clear":
            has.clear()
            say(world.router, replica, AllBlocksCleared())
        elif kind == "store":
            chain, medium = step[2:]
            there, first = world.prefixes(replica), 0
            while first < len(chain) - 1 and chain[: first + 1] in there:
                first += 1  # engines say what is new, below what is there
            say(world.router, replica, store(replica, chain, first, medium=medium))
            has |= {(chain[: n + 1], medium) for n in range(first, len(chain))}
        else:
            chain, medium = step[2:]
            has.discard((chain, medium))
            say(world.router, replica, BlockRemoved([name(replica, chain)], medium))
    for chain in asked:
        assert world.router.known([*ids(chain), 9]) == world.known(chain)
    for replica in REPLICAS:
        say(world.router, replica, AllBlocksCleared())
    assert not world.router._holders, "nothing is left of what nobody has"


def test_the_nearest_prefix_wins_until_it_costs_more_to_wait() -> None:
    router = Router("ab", ReplicaRates(compute=1000.0), clock=lambda: 0.0)
    say(router, "b", store("b", (1, 2, 3)))
    prompt = [*ids((1, 2, 3)), 7]
    assert router.choose([5, 5]) == "a", "of equals the first"
    with router.request(prompt) as first:
        assert first == "b" and router.scores(prompt)["b"].queued == 1
    with router.request([5] * 40) as busy:  # nobody knows it
        assert busy == "a" and router.scores(prompt)["a"].queued == 40
    assert router.scores(prompt)["a"].queued == 0, "it is over"
    say(router, "b", store("b", (8,) * 10))
    with router.request([8] * 40 + [1] * 30) as long:
        assert long == "b"
        assert router.choose(prompt) == "a", "thirty tokens of others before one of ours"


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 500), st.integers(0, 5)),
        min_size=5,
        max_size=20,
    )
)
def test_work_is_done_in_its_order(story: list[tuple[int, int, int]]) -> None:
    """Against a replica that computes a token at a time."""
    now_s, there = 0.0, list[list[Any]]()
    router = Router("a", ReplicaRates(compute=1000.0), clock=lambda: now_s)
    for wait_ms, tokens, over in story:
        now_s += wait_ms / 1e3
        for _ in range(wait_ms):
            if (one := next((one for one in there if one[0]), None)) is not None:
                one[0] -= 1
        there.append([tokens, router.request([5] * tokens)])
        there[-1][1].__enter__()
        if over < len(there):
            there.pop(over)[1].__exit__(None, None, None)
        assert router.scores([1])["a"].queued == sum(left for left, _ in there)


def test_equals_share_what_is_to_be_known() -> None:
    router = Router("abc")
    say(router, "a", store("a", (1, 2)))
    say(router, "c", store("c", (3,)))
    assert router.ranked([5, 5]) == ["b", "c", "a"]
    with router.request([5, 5]) as busy:
        assert busy == "b" and router.ranked([5, 5]) == ["c", "a", "b"]
    assert router.ranked([*ids((1, 2)), 5])[0] == "a"


def test_what_others_know_can_be_fetched() -> None:
    prompt = ids((1,) * 50)
    alone, sharing = (
        Router("ab", ReplicaRates(1000.0)),
        Router("ab", ReplicaRates(1000.0, fetch=20_000.0)),
    )
    for router in (alone, sharing):
        say(router, "a", store("a", (1,) * 50))
    assert alone.scores(prompt)["b"][1:4] == (0, 0, 200)
    score = sharing.scores(prompt)["b"]
    assert score[1:4] == (0, 200, 1) and score.seconds == pytest.approx(0.011)
    slow = Router("ab", ReplicaRates(1000.0, fetch=500.0))
    say(slow, "a", store("a", (1,) * 50))
    assert slow.scores(prompt)["b"].fetched == 0, "what is slower than computing is not fetched"


def test_salts_and_adapters_are_told_apart() -> None:
    router = Router("a")
    salted = store("a", (1, 1), extra_keys=[("ours",), None])
    adapted = BlockStored([b"x", b"y"], None, ids((1, 1)), SIZE, extra_keys=[("lora",), ("lora",)])
    say(router, "a", salted, adapted)
    assert router.known(ids((1, 1))) == {"a": 0}
    assert router.known(ids((1, 1)), "ours") == router.known(ids((1, 1)), "lora") == {"a": 8}
    say(router, "a", BlockStored([b"z"], b"y", ids((1,)), SIZE, extra_keys=[("lora",)]))
    assert router.known(ids((1, 1, 1)), "lora") == {"a": 12}
    image = BlockStored([b"i"], b"z", ids((1,)), SIZE, extra_keys=[[["picture", 0]]])
    say(router, "a", image)
    assert router.known(ids((1, 1, 1, 1)), "lora") == {"a": 12}, "tokens do not name a picture"


def test_replicas_come_and_go() -> None:
    router = Router()
    with pytest.raises(ConfigError, match="no replica"):
        router.choose([1])
    with pytest.raises(ConfigError, match="no rates"):
        Router(rates=ReplicaRates(0.0))
    for one in "ab":
        router.add(one)
        say(router, one, store(one, (1, 2)))
    with router.request(ids((1, 2))) as first:
        router.remove(first)
        assert router.replicas == ["b"] and router.choose(ids((1, 2))) == "b"
        say(router, first, store(first, (1, 2)))  # a late message
    assert router.known(ids((1, 2))) == {"b": 8} and router.replicas == ["b"]
    router.add(first)
    assert router.known(ids((1, 2))) == {"b": 8, "a": 0}, "it comes back with nothing"


def test_what_hangs_from_nothing_and_what_does_not_fit_is_not_believed() -> None:
    router = Router("a")
    say(router, "a", store("a", (1, 2, 3), first=2), BlockStored([b"x"], None, [1, 2], SIZE))
    say(router, "a", BlockStored([b"x"], None, [1], 0), store("a", (4,), group_idx=1))
    assert router.known(ids((1, 2, 3))) == router.known(ids((4,))) == {"a": 0}
    assert not router._holders
