"""Rows whose known prefix is on its way: they join the others as soon as it is there.

While it is loaded from its back, its front is computed in steps that run anyway. Nobody waits for
loads as long as anybody can compute: rows join once all of their prefix is there. Where nobody else
computes, what follows the prefix is computed behind the loads, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from flowkv.engine.live import Live
from flowkv.policy.scheduling import COMING, RUNNING
from flowkv.runtime.cache import KV
from flowkv.runtime.front import end
from flowkv.runtime.restoration import Restoration, choose

_SHARE, _LONGEST_S = 0.05, 0.1
"""Part of a turn that loads take from rows that decode; a turn that waited says nothing."""


class _Wait:
    """Since when a row waits for its prefix, and what for.

    Attributes:
        begun_s: Since when.
        exposed_s: How much of that nothing of it was computed.
        computes: Something of it is computed in this turn.
        tokens: That are not there.
        n_bytes: To load.
        loads: All of it is loaded in less time than it takes to compute.
    """

    __slots__ = ("begun_s", "computes", "exposed_s", "loads", "n_bytes", "seen_s", "tokens")

    def __init__(self, restoration: Restoration, kv: KV, now_s: float) -> None:
        self.begun_s = self.seen_s = now_s
        self.exposed_s, self.computes = 0.0, False
        request = restoration.request
        source, self.tokens = request.sources[0], request.tokens - request.resident
        self.n_bytes = round(source.cell_bytes * request.layers * self.tokens)
        with kv.lock:
            self.loads = kv.gate.worth({source.tier: self.n_bytes}, self.tokens)

    def see(self, now_s: float) -> None:
        """A turn is over in which something of it was computed, or not."""
        if not self.computes:
            self.exposed_s += now_s - self.seen_s
        self.seen_s, self.computes = now_s, False


class Coming:
    """Rows in state `COMING`. Belongs to the thread that runs the engine.

    Args:
        kv: The cache.
    """

    def __init__(self, kv: KV) -> None:
        self._kv = kv
        self._waits: dict[Live, _Wait] = {}
        self._seen_s = self._turn_s = 0.0
        self._budget, self._alone = 1, True

    def expect(self) -> None:
        """A row is about to be opened, and to ask for what it lacks."""
        self._allow(alone=self._alone)

    def begin(self, live: Live, now_s: float) -> None:
        """A row was opened: its prefix is on its way, or there."""
        live.ready = live.open_row.seq.length
        restoration = live.open_row.seq.restoration
        if restoration is None:
            self._join(live, now_s)
            return
        self._waits[live] = _Wait(restoration, self._kv, now_s)
        live.move(COMING, now_s)

    def forget(self, live: Live, now_s: float) -> None:
        """A row is closed; what is on its way for it is called off with that."""
        self._over(live, now_s)
        self._lift()

    def _lift(self) -> None:
        """Where nothing is on its way for the engine, others of the cache are not held up."""
        if not self._waits:
            self._allow(alone=True)

    def pace(self, now_s: float, *, alone: bool) -> None:
        """A turn begins: loads may take a small part of what the last one took.

        Or more, if they take longer than computing the same in so many turns otherwise.

        Args:
            now_s: The time.
            alone: Nobody else computes, so that they may take all of it.
        """
        seconds = min(now_s - self._seen_s, _LONGEST_S)
        self._turn_s += (seconds - self._turn_s) / 4
        self._seen_s, self._alone = now_s, alone
        if self._waits:
            self._allow(alone=alone)

    def _allow(self, *, alone: bool) -> None:
        with self._kv.lock:
            restores = self._kv.restores
            if alone:
                restores.allow()
                return
            tokens = sum(wait.tokens for wait in self._waits.values())
            least_s = _SHARE * self._turn_s
            if tokens:
                turns = -(-tokens // self._budget)
                n_bytes = sum(wait.n_bytes for wait in self._waits.values())
                least_s = max(least_s, n_bytes * restores.s_per_byte / turns)
            restores.allow(least_s)

    def parts(
        self, coming: Items[Live], budget: int, *, alone: bool, now_s: float
    ) -> list[tuple[Live, int]]:
        """What they compute in the next step; those whose prefix is there run from now on.

        Args:
            coming: Rows in state `COMING`.
            budget: Most tokens, of all of them together.
            alone: Nobody else computes: one of them may wait for its loads within the step.
            now_s: The time.

        Returns:
            Tokens of each, from its `ready` on; rows that compute none are left out.
        """
        shares: dict[Live, int] = {}
        self._budget = max(budget, 1)
        if alone:
            self._allow(alone=True)
        for live in coming:
            self._waits[live].see(now_s)
            self._look(live, now_s)
            budget -= self._joined(live, budget, shares)
        budget -= self._fronts(self._due(coming, alone), budget, shares, now_s)
        if alone and not shares:  # what follows is computed behind the loads
            for live in coming:
                if live.state == COMING and self._settled(live) and budget > 0:
                    shares[live] = min(live.missing, budget)
                    budget -= shares[live]
        for live in shares:
            if live in self._waits:
                self._waits[live].computes = True
        return list(shares.items())

    def late(self, live: Live, now_s: float) -> bool:
        """A step found that loads of a row do not come: the rest of its prefix is computed.

        Returns:
            Whether it waited for any.
        """
        restoration = live.open_row.seq.restoration
        if restoration is None:
            return False
        end(self._kv, restoration, ok=False)
        self._join(live, now_s)
        return True

    def finish(self, live: Live) -> None:
        """A row is over right after a step behind its loads: what came is known from now on."""
        restoration = live.row.seq.restoration if live.row is not None else None
        if restoration is not None and restoration.settled and restoration.poll():
            end(self._kv, restoration, ok=True)
            self._reuse(live)

    def _due(self, coming: Items[Live], alone: bool) -> dict[Restoration, Live]:
        """Those of whose front something should be computed now, if there is anything.

        Where others decode, computing would slow them down, and loading hardly does: as long as
        loads go on, and all of it is loaded in less time than it takes to compute, it is loaded.
        """
        found = dict[Restoration, Live]()
        for live in coming:
            restoration = live.open_row.seq.restoration if live.state == COMING else None
            if restoration is None or restoration.settled:
                continue
            restoration.pump()
            if alone or not self._waits[live].loads or restoration.quiet:
                found[restoration] = live
        return found

    def _fronts(
        self,
        fronts: dict[Restoration, Live],
        budget: int,
        shares: dict[Live, int],
        now_s: float,
    ) -> int:
        """Hands out what is computed from the front meanwhile; returns the tokens."""
        left = budget
        while fronts:
            found = choose(fronts, max(left, 1))
            if found is None:  # all wait for loads
                break
            restoration, tokens = found
            live = fronts.pop(restoration)
            if not tokens:
                restoration.settle()
                self._look(live, now_s)
                left -= self._joined(live, left, shares)
            elif left > 0:
                live.ready = live.open_row.seq.length
                shares[live] = min(tokens, left)
                left -= shares[live]
            elif restoration.quiet:  # it only waits for its turn, like others
                end(self._kv, restoration, ok=False)
                self._join(live, now_s)
        return budget - left

    def _look(self, live: Live, now_s: float) -> None:
        """Sees whether a settled prefix is there, or is not going to be."""
        seq = live.open_row.seq
        restoration, there = seq.restoration, None
        if restoration is not None and restoration.settled:
            there = restoration.poll()
            if there is not None:
                end(self._kv, restoration, ok=there)
        live.ready = seq.length
        if seq.restoration is None:
            self._join(live, now_s)

    def _settled(self, live: Live) -> bool:
        restoration = live.open_row.seq.restoration
        return restoration is not None and restoration.settled

    def _joined(self, live: Live, budget: int, shares: dict[Live, int]) -> int:
        """A row that runs now takes part at once, as far as the budget goes."""
        if live.state != RUNNING or budget <= 0 or live.missing <= 0:
            return 0
        shares[live] = min(live.missing, budget)
        return shares[live]

    def _join(self, live: Live, now_s: float) -> None:
        live.ready = live.open_row.seq.length
        self._reuse(live)
        self._over(live, now_s)
        live.move(RUNNING, now_s)
        self._lift()

    def _reuse(self, live: Live) -> None:
        if not live.preempted:
            live.reused = live.open_row.seq.reused

    def _over(self, live: Live, now_s: float) -> None:
        """A row waits no longer for its prefix, be it that it is there."""
        wait = self._waits.pop(live, None)
        if wait is not None:
            wait.see(now_s)
            live.restore_s += now_s - wait.begun_s
            live.exposed_s += wait.exposed_s
