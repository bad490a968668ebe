"""Moves bytes between pages and tiers: submits jobs, waits with a deadline, matches the answers.

A buffer given to a tier stays untouchable until the tier has answered, however late: a tag cannot
stop a DMA or a read that is under way (DESIGN D10).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flowkv.tiers.base import Completion, FrameInfo, Load, Outcome, Store, Tier

Done = Callable[[Completion], None]


class Mover:
    """Transfers of all tiers of a stack. Callers hold the KV lock.

    Args:
        tiers: The stack, nearest first.
        deadline_s: Longest wait for a load.
    """

    def __init__(self, tiers: Sequence[Tier], deadline_s: float) -> None:
        self.tiers, self.deadline_s = list(tiers), deadline_s
        self._waiting: dict[tuple[int, int], dict[int, Done]] = {}
        self._storing = 0
        self._overdue: dict[int, int] = {}

    def forget(self) -> None:
        """Leaves the tiers; who still waits for an answer will get none."""
        self.tiers.clear()
        self._waiting.clear()
        self._overdue.clear()
        self._storing = 0

    # ---- stores

    def store(self, tier: int, key: bytes, info: FrameInfo, body: memoryview, done: Done) -> None:
        """Writes a frame in the background; `done` is called from a later `drain`."""

        def answered(answer: Completion) -> None:
            self._storing -= 1
            done(answer)

        job = self.tiers[tier].submit_store([Store(key, info, body)])
        self._storing += 1
        self._waiting[tier, job] = {0: answered}

    def storing(self) -> int:
        """Stores that are not answered yet."""
        return self._storing

    def drain(self, timeout_s: float = 0.0) -> int:
        """Handles answers that are there, or the first within `timeout_s`. Returns how many."""
        if not self._waiting:
            return 0
        waiting = sorted({tier for tier, _ in self._waiting})
        handled = sum(self._handle(tier, self.tiers[tier].poll(0.0)) for tier in waiting)
        if handled or timeout_s <= 0:
            return handled
        return self._handle(waiting[0], self.tiers[waiting[0]].poll(timeout_s))

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is being stored; False if that took too long."""
        end = time.monotonic() + timeout_s
        while self._storing:
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.drain(min(left, 0.1))
        return True

    # ---- loads

    def overdue(self, tier: int) -> int:
        """Loads that a tier still owes after their deadline; ask it for nothing meanwhile."""
        return self._overdue.get(tier, 0)

    def load(
        self, tier: int, items: Sequence[Load], late: Callable[[int], None]
    ) -> tuple[list[Completion], set[int]]:
        """Reads frames and waits for all of them.

        Args:
            tier: Number in the stack.
            items: What to read, and where to.
            late: Called with an item's index once a tier answers it after the deadline; until then
                its target must be left alone.

        Returns:
            One answer per item, and the items that are overdue (answered as `FAILED` here).
        """
        answers: dict[int, Completion] = {}

        def take(answer: Completion) -> None:
            if answer.item in answers:
                self._overdue[tier] -= 1
                late(answer.item)
            else:
                answers[answer.item] = answer

        job = self.tiers[tier].submit_load(items, deadline_s=self.deadline_s)
        self._waiting[tier, job] = dict.fromkeys(range(len(items)), take)
        end = time.monotonic() + self.deadline_s
        left = self.deadline_s
        while len(answers) < len(items) and left > 0:
            left = end - time.monotonic()  # once more after the end: the tier may have given up
            self._handle(tier, self.tiers[tier].poll(min(max(left, 0.0), 0.1)))
        overdue = set(range(len(items))) - answers.keys()
        self._overdue[tier] = self._overdue.get(tier, 0) + len(overdue)
        for item in overdue:
            key, waited = items[item].key, self.deadline_s
            answers[item] = Completion(
                job, item, key, Outcome.FAILED, "deadline passed", seconds=waited
            )
        return [answers[item] for item in range(len(items))], overdue

    def _handle(self, tier: int, answers: Sequence[Completion]) -> int:
        for answer in answers:
            waiting = self._waiting.get((tier, answer.job))
            done = waiting.pop(answer.item, None) if waiting else None
            if waiting is not None and not waiting:
                del self._waiting[tier, answer.job]
            if done is not None:
                done(answer)
        return len(answers)
