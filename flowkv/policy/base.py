"""The `Policy` base class: an order over slot ids, without I/O, torch or a clock of its own.

Who drives a policy owns identity and residency: it numbers blocks with small integers (*slots*),
tells the policy of one place what happens there, and asks which to give up. A slot names the same
block until `forget`, also while that block lies elsewhere or nowhere (a *ghost*): so a policy may
remember, and learn from what it should have kept. The same object runs in the simulator, in the
runtime and inside other engines' plug-in points (DESIGN D8). Parents are optional knowledge: where
they are known, a block is given up after its descendants, as a rule of choice.

A policy of your own needs the abstract methods; the others have a default that does nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.config import Lease

Slots = NDArray[np.int64]
NO_SLOTS: Slots = np.empty(0, np.int64)

NEVER_NS = np.iinfo(np.int64).max
"""As `eta_ns`: will not be used again. `0` is soon."""

UNKNOWN_STOP, TOOL_USE, TURN_END, CUT_OFF = 0, 1, 2, 3
"""Why a response ended: not said; it calls a tool; the turn is over; length limit or abort."""


class Visit(NamedTuple):
    """What is known about a request when it arrives; every field may be left out.

    Attributes:
        request: The driver's number for it, not used by another request that is under way; -1 if
            nothing more will be said about it.
        session: The application's conversation, any 62-bit number; -1 if unknown.
        tokens: Input tokens; 0 if unknown.
        blocks: Blocks of the whole request, known ones or not; 0 if unknown.
        tenant: Whose it is; -1 if unknown.
    """

    request: int = -1
    session: int = -1
    tokens: int = 0
    blocks: int = 0
    tenant: int = -1


NO_VISIT = Visit()


class Policy(ABC):
    """Decides what one place keeps. Deterministic: equal calls give equal answers and digests.

    `now_ns` never decreases from call to call; a smaller one is treated as the last one seen.
    Arrays that are passed in are neither kept nor written.

    Attributes:
        name: Its name in the catalogue.
    """

    name: str = ""

    # ---- what happens

    @abstractmethod
    def insert(
        self,
        now_ns: int,
        slots: Slots,
        parents: Slots,
        *,
        n_bytes: int = 1,
        cost_ns: int = 0,
        lease: str | Lease = "",
        tenant: int = 0,
    ) -> None:
        """Blocks became resident here, root to leaf; `parents[i]` is a slot or -1.

        Counts as an access, unless one was counted at the same `now_ns` already.

        Args:
            now_ns: Time.
            slots: Blocks. One that was resident is accessed, and takes its parent if it has none.
            parents: Their parents.
            n_bytes: Bytes of each.
            cost_ns: Time to compute each of them anew; 0 if unknown.
            lease: Lease class, or a lease; see `LeaseConfig`.
            tenant: Whose they are.
        """

    @abstractmethod
    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """A request uses these known blocks, root to leaf.

        Those not resident here are ghosts, or lie elsewhere; an order ignores them, a learner need
        not. `insert` of the blocks that the request adds, and of those that come back for it,
        follows at the same or a later time.
        """

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Blocks left for another reason than `evict`. Slots not resident are ignored."""

    def forget(self, slots: Slots) -> None:
        """Nobody knows these blocks any more: their slots may name others next. Not resident."""

    def complete(
        self, now_ns: int, request: int, *, stop: int = UNKNOWN_STOP, output_tokens: int = 0
    ) -> None:
        """A request ended: what could only be known now. An unknown number is ignored."""

    def abort(self, now_ns: int, request: int) -> None:
        """A request that was enqueued or accessed will not go on. Unknown numbers are ignored."""

    def pin(self, slots: Slots) -> None:
        """Blocks, resident or not, must not be given up until as many `unpin`; nests."""
        raise NotImplementedError

    def unpin(self, slots: Slots) -> None:
        """Ends one `pin` of each."""
        raise NotImplementedError

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """The application expects the next use of this chain in about `eta_ns`.

        Holds until the chain's last block is used again.

        Args:
            now_ns: Time.
            slots: A chain, root to leaf, resident or not; the hint is about its last block, and
                through it about those above.
            eta_ns: Time from now; `NEVER_NS` for never, 0 for soon.
            sigma: Standard deviation of the natural logarithm of the error.
        """

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        """A queued request will use this chain: certain, until its `access` or `abort`."""

    def invalidate(self, now_ns: int, tenant: int) -> None:
        """All present blocks of a tenant became stale: as expired as by a lease, at once."""

    # ---- what is decided

    @abstractmethod
    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Chooses and removes `n` victims, none pinned or protected; None, nothing changed, else.

        Victims come in the order in which they go.
        """

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Gives up to `n` victims to a prefetch: only what is worth less than that.

        Args:
            now_ns: Time.
            n: Most victims.
            rate: Uses a second that are expected of what comes, in the unit of `wanted`; infinite
                if its use is certain. Nothing goes whose own is not below that.
            protected: See `evict`.

        Returns:
            Victims, in the order in which they go. The default, for policies that expect no rates:
            all or none for what is certain, and none for anything else.
        """
        found = self.evict(now_ns, n, protected) if rate == np.inf else None
        return NO_SLOTS.copy() if found is None else found

    def admit(self, now_ns: int, slots: Slots) -> NDArray[np.bool_]:
        """Which of these (not resident) blocks are worth their bytes here. Default: all."""
        return np.ones(len(slots), np.bool_)

    def expired(self, now_ns: int) -> Slots:
        """Resident blocks whose lease has run out: never a hit again, reclaimed first."""
        return NO_SLOTS.copy()

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Up to `n` ends of chains that are not resident and worth bringing here, best first.

        Returns:
            Slots of the deepest blocks, and their priorities, comparable with `priority`.
        """
        return NO_SLOTS.copy(), np.empty(0)

    @abstractmethod
    def priority(self, slot: int) -> float:
        """Smaller is given up earlier; -inf for a slot that is not resident."""

    def weakest(self, now_ns: int, protected: Collection[int] = ()) -> int:
        """The slot that `evict` of one would give up, for comparisons; -1 if there is none.

        The default looks at every resident block, and knows of neither pins nor children.
        """
        free = set(self.resident()).difference(protected)
        return min(free, key=lambda slot: (self.priority(slot), slot), default=-1)

    @abstractmethod
    def resident(self) -> Sequence[int]:
        """Slots it believes to be resident, in no particular order."""

    @abstractmethod
    def digest(self) -> int:
        """64-bit rolling hash of every decision so far."""
