"""Histories of many caches at once, in threads and in processes that are killed and stopped."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cache.histories import Witness
from tests.cache.peer import Nursery, Peer, act, cache_over
from tests.clock import together
from tests.inside import ErasureLog

PLACES = ["disk", "host", "pool"]
ACTIONS = ["ask", "ask", "ask", "ask", "evict", "forget", "invalidate", "flush"]
HAZARDS = ["kill", "stop", "go"]
steps = st.tuples(st.integers(0, 2), st.sampled_from(ACTIONS), st.sampled_from("ab"))
hazards = st.tuples(st.integers(0, 2), st.sampled_from([*ACTIONS, *HAZARDS]), st.sampled_from("ab"))
quietly = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True
)


@given(place=st.sampled_from(PLACES), script=st.lists(steps, min_size=6, max_size=40))
@settings(quietly, max_examples=12)
def test_threads(
    tmp_path_factory: pytest.TempPathFactory, place: str, script: list[tuple[int, str, str]]
) -> None:
    directory, witness = str(tmp_path_factory.mktemp("threads")), Witness()
    caches = [cache_over(place, directory, private=number == 1) for number in range(3)]
    begin = threading.Barrier(6)

    def work(number: int) -> None:
        mine = [one for one in script if one[0] == number % 3]
        begin.wait()
        for _, action, name in mine[number // 3 :: 2]:  # two threads for each cache
            act(caches[number % 3], witness, action, name)

    together(*(partial(work, number) for number in range(6)))
    for kv in caches:
        for name in "ab":
            act(kv, witness, "ask", name)
    witness.check()
    for kv in caches:
        kv.close()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    found = Nursery(tmp_path_factory.mktemp("nursery"))
    yield found
    found.close()


@given(place=st.sampled_from(PLACES), script=st.lists(hazards, min_size=6, max_size=40))
@settings(quietly, max_examples=8)
def test_processes_that_are_killed_and_stopped(
    nursery: Nursery,
    tmp_path_factory: pytest.TempPathFactory,
    place: str,
    script: list[tuple[int, str, str]],
) -> None:
    directory, witness = str(tmp_path_factory.mktemp("processes")), Witness()

    def start(number: int) -> Peer:
        told = {"place": place, "directory": directory, "private": number == 1}
        return Peer(nursery, str(number), **told)

    peers = [start(number) for number in range(3)]
    try:
        for number, action, name in script:
            peer = peers[number]
            if action == "kill":
                peer.signal(signal.SIGKILL)
                witness.history += peer.answers()
                peer.close()
                peers[number] = start(number)
            elif action in ("stop", "go"):
                peer.signal(signal.SIGSTOP if action == "stop" else signal.SIGCONT)
            else:
                peer.tell(action, name, next(witness.numbers))
            time.sleep(0.002)
        for peer in peers:
            peer.signal(signal.SIGCONT)
        for peer in peers:
            witness.history += peer.answers()
        for peer in peers:
            for name in "ab":
                peer.tell("ask", name, next(witness.numbers))
            witness.history += peer.answers()
        witness.check()
    finally:
        for peer in peers:
            peer.close()


def test_a_history_of_caches_that_do_not_agree_is_found(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing is shown by those above."""
    monkeypatch.setattr(ErasureLog, "changed", lambda self: False)
    directory, witness = str(tmp_path_factory.mktemp("blind")), Witness()
    caches = [cache_over("pool", directory, private=False) for _ in range(2)]
    for action in ("ask", "flush"):
        act(caches[0], witness, action, "a")
    act(caches[1], witness, "ask", "a")
    act(caches[0], witness, "forget", "a")
    act(caches[1], witness, "ask", "a")
    with pytest.raises(AssertionError, match="was read afterwards"):
        witness.check()
    for kv in caches:
        kv.close()
