"""Readers against writers in every order (F4): a slot is never read while it becomes another's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from flowkv import Tier
from flowkv.tiers import Completion, Load, Outcome, Store
from flowkv.tiers.shared import SharedTier
from tests.tiers.simulation import SimulatedFiles

from .files_engine import tier_over
from .frames import LAYOUT, body_of, info_of, key_of
from .interleaving import Deadlock, Scene, Turns, explore, locks_in

SIZE = 8192


class Client:
    """One thread's calls; answers are shared, as threads that share a tier must."""

    def __init__(
        self, tier: Tier, answers: dict[tuple[int, int], Completion], turns: Turns | None = None
    ) -> None:
        self.tier, self.answers, self.turns = tier, answers, turns
        self.outcomes: list[str] = []

    def _wait(self, job: int) -> Completion:
        for _ in range(1000):
            if (job, 0) in self.answers:
                return self.answers[job, 0]
            for answer in self.tier.poll(0.0):
                assert (answer.job, answer.item) not in self.answers, "answered twice"
                self.answers[answer.job, answer.item] = answer
            if self.turns is not None and (job, 0) not in self.answers:
                self.turns.rest()
        raise AssertionError("not answered")

    def get(self, name: str, *versions: str) -> Completion:
        """Loads a frame, whose bytes must be those of one of the versions."""
        target = bytearray(SIZE)
        load = Load(key_of(name), memoryview(target), LAYOUT)
        answer = self._wait(self.tier.submit_load([load]))
        if answer.outcome is Outcome.HIT:
            assert bytes(target) in [body_of(v, SIZE) for v in versions or (name,)], "WRONG BYTES"
        else:
            assert (answer.outcome, answer.reason) == (Outcome.MISS, ""), answer
        self.outcomes.append(answer.outcome.value)
        return answer

    def put(self, name: str, version: str = "") -> None:
        body = memoryview(bytearray(body_of(version or name, SIZE)))
        store = Store(key_of(name), info_of(SIZE), body)
        answer = self._wait(self.tier.submit_store([store]))
        assert answer.outcome is Outcome.STORED or answer.reason == "busy", answer
        body[:] = bytes(SIZE)
        self.outcomes.append(answer.outcome.value)

    def delete(self, name: str) -> None:
        self.tier.delete([key_of(name)])


Makes = Callable[[Turns], tuple[Client, Client]]


class Points(SimulatedFiles):
    """Files in memory; every call may be in the middle of another thread's."""

    turns: Turns | None = None

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._point()
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Any, offset: int) -> int:
        self._point()
        done = super().write(fd, [memoryview(buffers[0])[: len(buffers[0]) // 2]], offset)
        self._point()  # half of it is written
        return done or super().write(fd, buffers, offset)

    def _point(self) -> None:
        if self.turns is not None:
            self.turns.point()


def disk(turns: Turns) -> tuple[Client, Client]:
    """A disk tier that two threads use, small enough that slots are used again at once."""
    files = Points(random.Random(0))
    with locks_in(turns):
        tier = tier_over(files, "/points/kv", 256 << 10, threads=0)
    Client(tier, {}).put("K")
    files.turns = turns
    answers: dict[tuple[int, int], Completion] = {}
    return Client(tier, answers, turns), Client(tier, answers, turns)


def shared(directory: Path) -> Makes:
    """Two handles of one shared tier, as two processes have them."""
    numbers = itertools.count()

    class Stepping(SharedTier):
        turns: Turns | None = None

        def _change(self, *arguments: Any, **options: Any) -> int:
            self._point()
            return super()._change(*arguments, **options)

        def _copy(self, memory: Any, row: Any, skip: int, target: memoryview) -> None:
            half = len(target) // 8192 * 4096  # whole granules
            self._point()
            super()._copy(memory, row, skip, target[:half])
            self._point()
            super()._copy(memory, row, skip + half, target[half:])

        def _put(self, memory: Any, row: Any, skip: int, data: Any) -> bool:
            half = len(data) // 8192 * 4096
            self._point()
            whole = super()._put(memory, row, skip, data[:half])
            self._point()
            return super()._put(memory, row, skip + half, data[half:]) and whole

        def _point(self) -> None:
            if self.turns is not None:
                self.turns.point()

    def make(turns: Turns) -> tuple[Client, Client]:
        name = f"flowkv-test-{next(numbers)}"
        tiers = [Stepping(name, 256 << 10, directory=directory) for _ in range(2)]
        Client(tiers[0], {}).put("K")
        for tier in tiers:
            tier.turns = turns
        return Client(tiers[0], {}, turns), Client(tiers[1], {}, turns)

    return make


def readers_and_writers(make: Makes, *, second: Callable[[Client], None], reads: int = 1) -> Any:
    """A thread that reads K, against one that does something to it."""
    seen: set[tuple[str, ...]] = set()

    def scene(turns: Turns) -> Scene:
        one, two = make(turns)

        def reader() -> None:
            for _ in range(reads):
                one.get("K", "K", "K2")

        def check() -> None:
            last = Client(two.tier, two.answers)
            last.get("K", "K", "K2")
            last.get("L")
            seen.add((*one.outcomes, "then", *last.outcomes))
            for tier in {one.tier, two.tier}:
                if isinstance(tier, SharedTier):
                    tier.remove() if tier is one.tier else tier.close()
                else:
                    tier.close()

        return [reader, lambda: second(two)], check

    return scene, seen


def replace(client: Client) -> None:
    client.delete("K")
    client.put("L")


def renew(client: Client) -> None:
    client.delete("K")
    client.put("K", "K2")


def renew_and_fill(client: Client) -> None:
    client.delete("K")
    client.put("L")
    client.put("K", "K2")


@pytest.mark.parametrize("second", [replace, renew, renew_and_fill])
def test_disk(second: Callable[[Client], None]) -> None:
    scene, seen = readers_and_writers(disk, second=second)
    runs = explore(scene, switches=1)
    assert runs > 40
    assert {line[0] for line in seen} == {"hit", "miss"}


@pytest.mark.deep
@pytest.mark.parametrize("second", [replace, renew, renew_and_fill])
def test_disk_deep(second: Callable[[Client], None]) -> None:
    scene, _ = readers_and_writers(disk, second=second, reads=2)
    assert explore(scene, switches=2, most=20_000) > 1000


@pytest.mark.parametrize("durability", ["none", "sync"])
def test_a_store_that_failed_is_not_found(durability: Literal["none", "sync"]) -> None:
    ends: set[tuple[str, bool]] = set()

    def scene(turns: Turns) -> Scene:
        with locks_in(turns):
            files = Points(random.Random(0))
            tier = tier_over(files, "/points/kv", 256 << 10, threads=0, durability=durability)
        files.turns = turns
        used = tier.used_bytes()
        job = tier.submit_store([Store(key_of("K"), info_of(SIZE), memoryview(body_of("K", SIZE)))])
        found: list[Completion] = []

        def work() -> None:
            while tier._conductor.step(0.0):
                pass

        def cancel() -> None:
            tier.cancel(job)
            found.extend(tier._wishes.poll(0.0))
            for answer in found:
                there = tier.contains([key_of("K")])[0]
                assert there is (answer.outcome is Outcome.STORED), f"{answer.reason}: {there}"

        def check() -> None:
            work()
            found.extend(tier.poll(0.0))
            (answer,) = found
            stored = answer.outcome is Outcome.STORED
            assert tier.contains([key_of("K")]) == [stored]
            assert stored or tier.used_bytes() == used
            tier.close()
            again = tier_over(files, "/points/kv", 256 << 10, threads=0)
            assert again.contains([key_of("K")]) == [stored]
            again.close()
            ends.add((answer.reason, stored))

        return [work, cancel], check

    assert explore(scene, switches=1) > 100
    assert ends == {("", True), ("cancelled", False)}


@pytest.mark.parametrize("second", [replace, renew, renew_and_fill])
def test_shared(second: Callable[[Client], None], tmp_path: Path) -> None:
    scene, seen = readers_and_writers(shared(tmp_path), second=second)
    runs = explore(scene, switches=2)
    assert runs > 40
    assert {line[0] for line in seen} == {"hit", "miss"}


@pytest.mark.deep
@pytest.mark.parametrize("second", [replace, renew, renew_and_fill])
def test_shared_deep(second: Callable[[Client], None], tmp_path: Path) -> None:
    scene, _ = readers_and_writers(shared(tmp_path), second=second, reads=2)
    assert explore(scene, switches=3, most=50_000) > 200


# ---- the explorer itself


def test_explorer_runs_every_schedule() -> None:
    seen = []

    def scene(turns: Turns) -> Scene:
        line: list[str] = []

        def work(name: str) -> Callable[[], None]:
            def steps() -> None:
                for number in range(2):
                    turns.point()
                    line.append(f"{name}{number}")

            return steps

        return [work("a"), work("b")], lambda: seen.append(" ".join(line))

    explore(scene, switches=9)
    assert set(seen) == {
        *("a0 a1 b0 b1", "a0 b0 a1 b1", "a0 b0 b1 a1"),
        *("b0 a0 a1 b1", "b0 a0 b1 a1", "b0 b1 a0 a1"),
    }
    seen.clear()
    assert explore(scene, switches=0) == 2
    assert set(seen) == {"a0 a1 b0 b1", "b0 b1 a0 a1"}


def test_explorer_finds_a_race() -> None:
    def scene(turns: Turns) -> Scene:
        total = [0]

        def add() -> None:
            before = total[0]
            turns.point()
            total[0] = before + 1

        def check() -> None:
            assert total[0] == 2, "lost update"

        return [add, add], check

    with pytest.raises(AssertionError, match="lost update"):
        explore(scene, switches=1)


def test_explorer_finds_a_deadlock() -> None:
    def scene(turns: Turns) -> Scene:
        import threading

        with locks_in(turns):
            one, two = threading.Lock(), threading.Lock()

        def forwards() -> None:
            with one, two:
                pass

        def backwards() -> None:
            with two, one:
                pass

        return [forwards, backwards], lambda: None

    with pytest.raises(AssertionError) as found:
        explore(scene, switches=1)
    assert isinstance(found.value.__cause__, Deadlock)
