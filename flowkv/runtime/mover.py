"""The transfer scheduler: moves bytes between pages and tiers, what is waited for first.

One `Lane` per tier sends what its `Schedule` allows: demands, prefetches, then write-backs, with
bounded bytes in flight. A load of a frame that is just being stored takes it from memory.

A buffer given to a tier stays untouchable until the tier has answered, however late: a tag cannot
stop a DMA or a read that is under way (DESIGN D10).
"""

from __future__ import annotations

import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flowkv.core import compiling
from flowkv.policy.rates import Rates
from flowkv.runtime.lane import Lane, from_memory
from flowkv.runtime.schedule import Priority, Verdict, Wish
from flowkv.tiers.base import Completion, FrameInfo, Load, Outcome, Store, Tier

Done = Callable[[Completion], None]
_LONGEST_S = 0.1
_WAIT_OF_SEVERAL_S = 0.002


class OnTheWay(NamedTuple):
    """A frame that a tier has been given and not yet acknowledged.

    Attributes:
        tier: Number of the tier.
        store: What it was given; its body is intact until it answers.
    """

    tier: int
    store: Store


class Mover:
    """Transfers of all tiers of a stack. Callers hold the KV lock.

    Args:
        deadline_s: Longest wait for a load.
        rates: Load rates by tier name; shared with who decides whether to load.

    Attributes:
        lanes: One for each tier, nearest first.
        from_memory: Loads answered with the bytes of a store that was under way.
    """

    def __init__(self, deadline_s: float, rates: dict[str, Rates] | None = None) -> None:
        self.deadline_s, self.rates = deadline_s, {} if rates is None else rates
        self.lanes: list[Lane] = []
        self.from_memory = 0
        self._storing = 0
        self._bodies: dict[bytes, list[OnTheWay]] = {}

    def add(self, tier: Tier) -> None:
        """Puts a tier below the others."""
        self.lanes.append(Lane(tier, self.deadline_s, self.rates.setdefault(tier.name, Rates())))

    def forget(self) -> None:
        """Leaves the tiers; who still waits for an answer will get none."""
        self.lanes.clear()
        self._bodies.clear()
        self._storing = 0

    # ---- stores

    def has_room(self, tier: int, n_bytes: int) -> bool:
        """Whether a store of so many bytes would be taken now."""
        return self.lanes[tier].schedule.has_room(n_bytes, Priority.WRITE_BACK)

    def store(self, tier: int, key: bytes, info: FrameInfo, body: memoryview, done: Done) -> bool:
        """Writes a frame in the background; False if too much waits for that already.

        Args:
            tier: Number in the stack.
            key: Of the frame.
            info: What the frame says about itself.
            body: Its bytes; they must stay as they are until the answer.
            done: Called with the answer, from a later `drain`.
        """
        item = Store(key, info, body)

        def answered(answer: Completion) -> None:
            self._storing -= 1
            left = [one for one in self._bodies.pop(key) if one.store is not item]
            if left:
                self._bodies[key] = left
            done(answer)

        if self.lanes[tier].ask(Wish(item, answered, Priority.WRITE_BACK)) is Verdict.REFUSED:
            return False
        self._storing += 1
        self._bodies.setdefault(key, []).append(OnTheWay(tier, item))
        return True

    def storing(self) -> int:
        """Stores that are not answered yet."""
        return self._storing

    def on_the_way(self, key: bytes) -> OnTheWay | None:
        """A frame that is being stored, to be read from memory meanwhile."""
        found = self._bodies.get(key)
        return found[0] if found else None

    def drain(self, timeout_s: float = 0.0) -> int:
        """Sends and answers what can be, or waits for the first answer. Returns how many came."""
        busy = [lane for lane in self.lanes if lane.busy]
        return self._wait(busy, timeout_s) if busy else 0

    def collect(self) -> int:
        """Handles the answers that are there, and sends nothing more. Returns how many came."""
        return sum(lane.poll() for lane in self.lanes)

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is being stored; False if that took too long."""
        end = compiling.now_s() + timeout_s
        while self._storing:
            left = end - compiling.now_s()
            if left <= 0:
                return False
            self.drain(min(left, _LONGEST_S))
        return True

    def _wait(self, lanes: Sequence[Lane], timeout_s: float) -> int:
        """Sends what can be sent, and waits for the first answers; returns how many came."""
        handled = sum(lane.settle() for lane in lanes)
        if handled or timeout_s <= 0:
            return handled
        if len(lanes) == 1:
            return lanes[0].settle(timeout_s)
        numbers = [lane.tier.fileno() for lane in lanes if hasattr(lane.tier, "fileno")]
        if len(numbers) == len(lanes) and min(numbers, default=0) >= 0:
            waiting = select.poll()  # not `select`, which knows few descriptors
            for number in numbers:
                waiting.register(number, select.POLLIN)
            waiting.poll(1000 * timeout_s)
        else:
            time.sleep(min(timeout_s, _WAIT_OF_SEVERAL_S))
        return sum(lane.settle() for lane in lanes)

    # ---- loads

    def overdue(self, tier: int) -> int:
        """Loads that a tier still owes after their deadline; ask it for nothing meanwhile."""
        return self.lanes[tier].overdue

    def load(
        self, wanted: Sequence[tuple[int, Load]], late: Callable[[int], None]
    ) -> tuple[list[Completion], set[int]]:
        """Reads frames of any tiers, all at once, and waits for all of them.

        Args:
            wanted: Numbers of tiers, what to read of each, and where to.
            late: Called with the index of a load once a tier answers it after the deadline; until
                then its target must be left alone.

        Returns:
            One answer for each, and those whose target is lent to a tier that is overdue (they are
            answered as `FAILED` here).
        """
        demand = _Demand(wanted, late)
        for index, (tier, item) in enumerate(wanted):
            held = self.on_the_way(item.key) if self._storing else None
            answer = from_memory(item, held.store) if held else None
            if answer is not None:
                self.from_memory += 1
                demand.answers[index] = answer
            else:
                self.lanes[tier].ask(demand.wish(index))
        started = compiling.now_s()
        ends = {t: started + self.lanes[t].patience_s(n) for t, n in demand.n_bytes.items()}
        while demand.left:
            now = compiling.now_s()
            left = min(ends[tier] for tier in demand.left) - now
            # Once more after the end: the tier may have given up by itself.
            self._wait([self.lanes[tier] for tier in demand.left], min(max(left, 0.0), _LONGEST_S))
            for tier in [tier for tier in demand.left if ends[tier] <= now]:
                demand.give_up(tier, self.lanes[tier], now - started)
        return [demand.answers[index] for index in range(len(wanted))], demand.lent

    def demand(self, tier: int, item: Load, done: Done, owner: object) -> Wish | None:
        """Reads a frame that somebody is going to wait for; a later `drain` sends it.

        Args:
            tier: Number in the stack.
            item: What to read, and where to.
            done: Called with the answer, now or in a later `drain`.
            owner: What `cancel` calls it off by.

        Returns:
            What `give_up` takes; None if it was answered from memory.
        """
        held = self.on_the_way(item.key) if self._storing else None
        answer = from_memory(item, held.store) if held else None
        if answer is not None:
            self.from_memory += 1
            done(answer)
            return None
        wish = Wish(item, done, Priority.DEMAND, owner)
        self.lanes[tier].ask(wish)
        return wish

    def give_up(self, tier: int, wish: Wish) -> bool:
        """Waits for a load no longer; whether the tier still owes it, and may write to its target.

        `done` is called when it does answer.
        """
        return self.lanes[tier].give_up(wish)

    def prefetch(self, tier: int, items: Sequence[tuple[Load, Done]], owner: object) -> int:
        """Reads frames of one tier in the background, as far as there is room for that.

        Args:
            tier: Number in the stack.
            items: What to read, and who is told the answer, now or in a later `drain`.
            owner: What `cancel` calls them off by.

        Returns:
            How many of the items, from the first one on, were taken.
        """
        for count, (item, done) in enumerate(items):
            held = self.on_the_way(item.key)
            if held and (answer := from_memory(item, held.store)):
                self.from_memory += 1
                done(answer)
                continue
            wish = Wish(item, done, Priority.PREFETCH, owner)
            if self.lanes[tier].ask(wish) is Verdict.REFUSED:
                return count
        return len(items)

    def cancel(self, owner: object = None) -> int:
        """Calls off the loads of an owner, or all prefetches; each is still answered."""
        return sum(lane.cancel(owner) for lane in self.lanes)


class _Demand:
    """Loads that are waited for together.

    Attributes:
        answers: By index.
        left: Loads of each tier that are not answered; a tier without any is not in it.
        n_bytes: Bytes asked of each tier.
        lent: Loads given up that a tier still owes.
    """

    def __init__(self, wanted: Sequence[tuple[int, Load]], late: Callable[[int], None]) -> None:
        self._wanted, self._late = wanted, late
        self._wishes: dict[int, Wish] = {}
        self.answers: dict[int, Completion] = {}
        self.left: Counter[int] = Counter()
        self.n_bytes: Counter[int] = Counter()
        self.lent: set[int] = set()

    def wish(self, index: int) -> Wish:
        tier, item = self._wanted[index]

        def take(answer: Completion) -> None:
            if index in self.answers:
                self._late(index)
            else:
                self._take(index, answer)

        self._wishes[index] = wish = Wish(item, take, Priority.DEMAND)
        self.left[tier] += 1
        self.n_bytes[tier] += wish.n_bytes
        return wish

    def give_up(self, tier: int, lane: Lane, waited_s: float) -> None:
        for index, wish in self._wishes.items():
            if self._wanted[index][0] == tier and index not in self.answers:
                failed = Completion(0, index, wish.item.key, Outcome.FAILED, "deadline passed")
                self._take(index, failed._replace(seconds=waited_s))
                if lane.give_up(wish):
                    self.lent.add(index)

    def _take(self, index: int, answer: Completion) -> None:
        tier, _ = self._wanted[index]
        self.answers[index] = answer
        self.left[tier] -= 1
        if not self.left[tier]:
            del self.left[tier]
