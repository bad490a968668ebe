"""Plain LRU answers until a policy's compiled code is loaded: no call waits, and one switch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.policy import CATALOGUE, LRU, HazardIndex, Hedge, Lease, Visit, make_policy
from flowkv.testing import check_policy
from tests.inside import (
    FEW_VISITS,
    CompiledPolicies,
    ConfigError,
    Warming,
    compile_process,
    machine_code,
    warming_module,
)
from tests.policy.slots import ids

SECOND = 10**9
LEASES = ["", "", "", "one_shot", Lease(20.0), Lease(math.inf, 30.0)]


class Traffic:
    """Requests of three tenants over chains, told to several policies alike."""

    def __init__(self, *policies: Any) -> None:
        self.policies, self.now = policies, 0
        self.pinned: list[Any] = []

    def all(self, name: str, *said: Any, **more: Any) -> Any:
        """The answer, which all have to agree on."""
        found = [getattr(policy, name)(*said, **more) for policy in self.policies]
        answers = [x.tolist() if isinstance(x, np.ndarray) else x for x in found]
        assert all(answer == answers[0] for answer in answers), (name, said, answers)
        return answers[0]

    def request(self, seconds: int, chain: int, depth: int, lease: object) -> None:
        self.now += 1 + seconds * SECOND
        asked = np.arange(depth) + 10 * chain
        gone = set(self.all("expired", self.now))
        here = {s for s in self.policies[0].resident() if s not in gone}
        self.all("access", self.now, asked, Visit(chain))
        new = asked if lease else np.array([s for s in asked.tolist() if s not in here], np.int64)
        above = np.where(new % 10 > 0, new - 1, -1)
        self.all("insert", self.now, new, above, lease=lease, tenant=chain % 3)

    def other(self, what: str, number: int) -> None:
        self.now += 1
        if what == "evict":
            self.all("evict", self.now, 1 + number % 4)
        elif what == "protect":
            self.all("evict", self.now, 1, (10 * number, 10 * number + 1))
        elif what == "pin":
            self.pinned.append(np.arange(10 * number, 10 * number + 2))
            self.all("pin", self.pinned[-1])
        elif what == "unpin" and self.pinned:
            self.all("unpin", self.pinned.pop(0))
        elif what == "remove":  # the end of a chain, as a tier that loses it
            ends = [s for s in self.policies[0].resident() if s // 10 == number]
            self.all("remove", np.array(sorted(ends)[-1:], np.int64))
        elif what == "invalidate":
            self.all("invalidate", self.now, number % 3)
        elif what == "weakest":
            self.all("weakest", self.now)


requests = st.tuples(
    st.integers(0, 25), st.integers(0, 5), st.integers(1, 6), st.sampled_from(LEASES)
)
others = st.tuples(
    st.sampled_from(["evict", "evict", "protect", "pin", "unpin", "remove", "invalidate"]),
    st.integers(0, 5),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(requests | others, min_size=12, max_size=50),
    st.integers(0, 50),
    st.sampled_from([{}, {"lease_s": 40.0}]),
)
def test_for_lru_the_switch_cannot_be_told(
    story: list[tuple[Any, ...]], there: int, options: dict[str, Any]
) -> None:
    """Victims, what has run out, and what is there: the same before, at and after the switch."""
    loaded = False
    warms = Warming(LRU(**options), lambda: loaded)
    traffic = Traffic(warms, LRU(**options))
    warms._visits = FEW_VISITS
    for n, one in enumerate(story):
        loaded = n >= there
        (traffic.request if len(one) == 4 else traffic.other)(*one)
        assert sorted(warms.resident()) == sorted(traffic.policies[1].resident())
    loaded = True
    traffic.request(1, 7, 3, "")
    assert not warms.plain
    for _ in range(60):
        traffic.other("evict", 0)


@pytest.mark.parametrize("requests", [1000, 3])
def test_it_conforms_before_the_switch_and_after_it(requests: int) -> None:
    """Calls come in any order, and the switch after a few requests, or never."""

    def made() -> Warming:
        policy = Warming(Hedge(), lambda: policy._visits >= FEW_VISITS + requests)
        policy._visits = FEW_VISITS
        return policy

    check_policy(made, leases=("", "one_shot"), max_examples=12)


class Stuck(HazardIndex):
    """Code that is never there: a call of it would wait for ever."""

    def _waits(self, *said: object, **more: object) -> Any:
        raise AssertionError("a call waited for a compiler")

    insert = access = evict = remove = forget = pin = unpin = admit = _waits
    wanted = displace = expired = priority = weakest = complete = hint = enqueue = _waits


def test_leases_that_differ_each_time_take_no_more_memory() -> None:
    """The highest rank is among those that the policy is given at the switch."""
    stand_in = Warming(make_policy("lru"), lambda: False)
    for now in range(500):
        rank = 90 if now == 7 else 50
        lease = Lease(rank=rank, rank_s=60.0 + now)
        stand_in.insert(now, ids(0), ids(-1), lease=lease if now else "")
    renewals = stand_in._order[0].renewals
    assert renewals is not None and len(renewals) <= 16
    assert Lease(rank=90, rank_s=67.0) in renewals and Lease(rank=50, rank_s=559.0) in renewals


def test_without_code_no_call_reaches_the_policy() -> None:
    asked: list[int] = []
    policy = Warming(Stuck(), lambda: bool(asked.append(1)))
    traffic = Traffic(policy)
    for n in range(FEW_VISITS - 1):
        traffic.request(1, n % 4, 3, "one_shot" if n % 2 else "")
    assert not asked, "few requests need no code"
    traffic.request(1, 1, 3, "")
    assert len(asked) == 1
    policy.complete(traffic.now, 1, stop=2)
    policy.hint(traffic.now, ids(1), SECOND)
    policy.enqueue(traffic.now, 9, ids(1))
    assert policy.wanted(traffic.now, 2)[0].size == 0
    assert policy.displace(traffic.now, 1, 0.5).size == 0
    assert policy.displace(traffic.now, 1, math.inf).tolist() == [32]
    assert policy.admit(traffic.now, ids(1, 2)).all() and policy.save_model() == b""
    policy.forget(ids(32))
    assert policy.plain and policy.digest() != Stuck().digest()


def test_the_first_choice_has_the_code_loaded() -> None:
    asked: list[int] = []
    policy = Warming(Stuck(), lambda: bool(asked.append(1)))
    policy.insert(0, ids(1), ids(-1))
    assert policy.evict(1, 1).tolist() == [1] and len(asked) == 1
    assert policy.evict(2, 1) is None


def test_the_switch_is_one_and_comes_with_a_request() -> None:
    policy = Warming(HazardIndex(), lambda: True)
    policy.insert(0, ids(0, 1), ids(-1, 0))
    policy.enqueue(1, 5, ids(0, 1))
    policy.pin(ids(3, 3))
    for n in range(2, FEW_VISITS + 1):
        policy.access(n * SECOND, ids(0, 1), Visit(100 + n))
        assert policy.plain and len(policy.policy) == 0
    assert policy.weakest(FEW_VISITS * SECOND) == 1 and policy.plain
    policy.access((FEW_VISITS + 1) * SECOND, ids(0), Visit(40))
    assert not policy.plain and list(policy.policy.resident()) == [0, 1] == policy.resident()
    assert policy.insert == policy.policy.insert and policy.policy._queued.keys() == {5}
    policy.insert((FEW_VISITS + 1) * SECOND, ids(3), ids(-1))
    assert policy.evict((FEW_VISITS + 2) * SECOND, 3) is None, "3 is pinned, twice"
    policy.unpin(ids(3))
    assert policy.evict((FEW_VISITS + 2) * SECOND, 3) is None
    policy.unpin(ids(3))
    assert sorted(policy.evict((FEW_VISITS + 2) * SECOND, 3)) == [0, 1, 3]


def test_what_is_wrong_is_said_at_once() -> None:
    for wrong in (
        *(lambda p: p.insert(0, ids(1), ids()), lambda p: p.insert(0, ids(-1), ids(-1))),
        lambda p: p.insert(0, ids(1), ids(-1), tenant=-1),
        *(lambda p: p.insert(0, ids(1), ids(-1), lease="unheard of"), lambda p: p.evict(0, -1)),
        lambda p: p.load_model(b"nothing"),
    ):
        with pytest.raises(ConfigError):
            wrong(Warming(Hedge(), lambda: False))


def test_a_model_that_was_brought_is_kept_and_calls_for_the_code() -> None:
    taught, loaded = HazardIndex(), False
    for n in range(FEW_VISITS):
        taught.access(n * SECOND, ids(n % 7), Visit(n))
    learned = taught.save_model()
    policy = Warming(Hedge(), lambda: loaded)
    policy.load_model(learned)
    policy.access(0, ids(1), Visit(1))
    assert policy.plain and policy.save_model() == learned
    loaded = True
    policy.access(1, ids(1), Visit(2))
    assert not policy.plain and policy.save_model() == learned
    lru = Warming(make_policy("lru"), lambda: True)
    lru.load_model(learned)
    assert lru.save_model() == b""


# Where the code comes from: loaded by a thread, compiled by a process.


class Compiler:
    """Stands in for the process: it ends when it is allowed to."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.may_end = code, threading.Event()

    def wait(self) -> int:
        assert self.may_end.wait(60.0)
        return self.code

    def end(self, code: int = 0) -> None:
        self.code = code
        self.may_end.set()


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> list[Compiler]:
    """Processes that would be begun, where no policy is compiled until one has ended well."""
    begun: list[Compiler] = []

    def begin(*given: object) -> Compiler:
        begun.append(Compiler())
        return begun[-1]

    def calls(name: str) -> Any:
        if not any(one.code == 0 and one.may_end.is_set() for one in begun):
            raise machine_code.NotKept(name)
        yield lambda: None

    monkeypatch.setattr(compile_process, "begin", begin)
    monkeypatch.setattr(warming_module, "every_call", calls)
    return begun


def first(compilers: list[Compiler]) -> Compiler:
    """The process that a thread begins soon."""
    for _ in range(6000):
        if compilers:
            return compilers[0]
        time.sleep(0.01)
    raise AssertionError("no process was begun")


def test_one_process_compiles_and_the_code_is_loaded_after_it(compilers: list[Compiler]) -> None:
    code = CompiledPolicies()
    assert not any(code.ready("auto") for _ in range(9)) and not code.loaded("auto")
    first(compilers).end()
    code.wait()
    assert code.ready("auto") and code.loaded("auto") and len(compilers) == 1
    assert not code.loaded("lru"), "which is another policy"


@pytest.mark.parametrize("how", ["crashes", "cannot begin", "nothing can be kept", "no thread"])
def test_without_a_compiler_lru_stays_and_that_is_said_once(
    how: str,
    compilers: list[Compiler],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    code = CompiledPolicies()
    policy = Warming(make_policy("lru"), lambda: code.ready("lru"))
    if how == "cannot begin":
        monkeypatch.setattr(compile_process, "begin", lambda *given: None)
    elif how == "nothing can be kept":
        monkeypatch.setattr(machine_code, "lock_file", lambda: None)
    elif how == "no thread":

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
    policy.insert(0, ids(0, 1, 2), ids(-1, 0, 1))
    assert policy.evict(1, 1).tolist() == [2]
    if how == "crashes":
        first(compilers).end(1)
    code.wait()
    for n in range(FEW_VISITS):
        policy.access(n + 2, ids(0), Visit(n))
    assert policy.plain and policy.evict(99, 1).tolist() == [1]
    assert len(caplog.records) == 1 and "plain LRU stands in" in caplog.text


def test_the_end_of_the_process_ends_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, code = Compiler(1), CompiledPolicies()
    monkeypatch.setattr(warming_module, "every_call", lambda name: 1 / 0)
    monkeypatch.setattr(compile_process, "begin", lambda *given: compiler)
    monkeypatch.setattr(code, "_complete", lambda name: False)
    monkeypatch.setattr(compile_process, "end", compiler.may_end.set)
    assert not code.ready("auto")
    code.end()
    assert not code.ready("lru") and set(code._threads) == {"auto"}, "nothing begins at the end"


def test_a_compiler_that_begins_at_the_end_ends_too(
    compilers: list[Compiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, real = CompiledPolicies(), compile_process.begin

    def begin(*given: object) -> Any:
        code._ended = True  # by `end`, which found no process
        return real(*given)

    monkeypatch.setattr(compile_process, "begin", begin)
    monkeypatch.setattr(compile_process, "end", lambda: compilers[0].end(-15))
    assert not code.ready("auto")
    (thread,) = code._threads.values()
    thread.join(3.0)
    ended = not thread.is_alive()
    first(compilers).end()
    assert ended, "the end of the process would wait for it"


def test_a_child_of_fork_loads_anew(compilers: list[Compiler]) -> None:
    code = CompiledPolicies()
    assert not code.ready("auto")
    child = os.fork()
    if child == 0:  # its thread is not here
        code.wait()
        os._exit(len(code._threads))
    first(compilers).end()
    code.wait()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_LATER = """
import sys
from flowkv.policy import make_policy
from flowkv.policy.warming import every_call
from flowkv.testing import check_policy

def compiled():
    modules = [m for name, m in sys.modules.items() if name.startswith("flowkv.policy")]
    functions = {v for m in modules for v in vars(m).values() if hasattr(v, "nopython_signatures")}
    return {(f.__module__, f.__name__): len(f.nopython_signatures) for f in functions}

for call in every_call(sys.argv[1]):
    call()
before = compiled()
check_policy(lambda: make_policy(sys.argv[1]), leases=("", "one_shot"), max_examples=12)
print({name: count for name, count in compiled().items() if count > before.get(name, 0)})
"""


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(set(CATALOGUE) - {"opt"}))
def test_no_call_needs_code_that_was_not_loaded(name: str) -> None:
    command = [sys.executable, "-c", _LATER, name]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout == "{}\n"
