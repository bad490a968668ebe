"""In what order a tier is asked for what, and for how much at a time.

Pure bookkeeping: neither tiers, threads nor time, so that tests drive it on a clock of their own.

- A *demand* is what somebody waits for. It goes first, and its bytes in flight have a limit that
  nothing else uses up.
- *Prefetches* go before *write-backs*; both together have a second, smaller limit, and wait while a
  demand is queued or in flight. Prefetches go in *chunks*: a demand finds one in flight at most.
- Yet write-back has a fair share: for every eight bytes of others, one of its own goes ahead of
  them, or pages could never leave a busy device. Only demands earn it a place before a demand.
- A frame is loaded once, whoever asks for it meanwhile, and stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, IntEnum

from flowkv.tiers.base import Completion, Load, Store

SHARE = 8
"""Of so many bytes, one is write-back's, however much is demanded."""


class Priority(IntEnum):
    """Who goes first."""

    DEMAND = 0
    PREFETCH = 1
    WRITE_BACK = 2


class Verdict(Enum):
    """What became of a wish."""

    QUEUED = "queued"
    JOINED = "joined"
    REFUSED = "refused"


class Wish:
    """One load or store on its way.

    Args:
        item: What a tier is asked.
        done: Called with the answer.
        priority: Who waits for it.
        owner: Wishes of one owner are cancelled together; None for those that never are.

    Attributes:
        n_bytes: Bytes of its target or body.
        alike: Equal for wishes that one answer serves.
        stores: Whether it is a store.
        demanded: Whether it was a demand from the first.
        flying: The tier has it, and owes the answer.
        ended: It was answered.
        followers: Wishes for the same, answered with it.
        leader: The wish that it follows.
    """

    __slots__ = (
        *("alike", "demanded", "done", "ended", "flying", "followers", "item", "leader"),
        *("n_bytes", "owner", "priority", "stores"),
    )

    def __init__(
        self,
        item: Load | Store,
        done: Callable[[Completion], None],
        priority: Priority,
        owner: object = None,
    ) -> None:
        self.item, self.done, self.priority, self.owner = item, done, priority, owner
        self.demanded = priority is Priority.DEMAND
        if isinstance(item, Load):
            self.stores, self.n_bytes = False, item.target.nbytes
            key, _, layout, fidelity, first, stripes = item
            self.alike: tuple[object, ...] = key, layout, fidelity, first, stripes, self.n_bytes
        else:
            self.stores, self.n_bytes, self.alike = True, item.body.nbytes, (item.key,)
        self.flying = self.ended = False
        self.followers: tuple[Wish, ...] = ()
        self.leader: Wish | None = None


class Schedule:
    """What one tier is asked, and what waits for that.

    Args:
        demand_bytes: Most bytes of demands in flight; one alone may be larger.
        background_bytes: Most bytes of prefetches and write-backs in flight, likewise.
        queue_bytes: Most bytes of prefetches, and of write-backs, that wait; beyond that they are
            refused. Demands never are.
        chunk_bytes: Most bytes of prefetches in flight; one alone may be larger.

    Attributes:
        background_bytes: May be changed while transfers run.
        chunk_bytes: Likewise.
        joined: Wishes that needed no transfer of their own.
        refused: Wishes that found the queue full.
    """

    def __init__(
        self,
        demand_bytes: int = 1 << 28,
        background_bytes: int = 1 << 26,
        queue_bytes: int = 1 << 28,
        chunk_bytes: int = 1 << 22,
    ) -> None:
        self.demand_bytes, self.background_bytes = demand_bytes, background_bytes
        self.queue_bytes, self.chunk_bytes = queue_bytes, chunk_bytes
        self.joined = self.refused = 0
        self._queues: tuple[dict[Wish, None], ...] = tuple({} for _ in Priority)
        self._queued_bytes = [0 for _ in Priority]
        self._flying: dict[Wish, Priority] = {}
        self._flying_bytes = [0 for _ in Priority]
        self._leaders: dict[tuple[object, ...], Wish] = {}
        self._awaited: set[Wish] = set()
        self._credit = [0.0 for _ in Priority]  # earned for write-back, by whom

    def __len__(self) -> int:
        """Wishes that wait or are in flight, but for those that follow another."""
        return len(self._flying) + self.waiting

    @property
    def waiting(self) -> int:
        """Wishes that wait to be sent."""
        return sum(map(len, self._queues))

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return sum(self._queued_bytes)

    @property
    def flying_bytes(self) -> int:
        """Bytes in flight."""
        return sum(self._flying_bytes)

    def in_the_way(self) -> int:
        """Bytes of prefetches that a demand would find in flight; 0 if one has found them yet."""
        if self._queues[Priority.DEMAND] or self._demanding:
            return 0
        return self._flying_bytes[Priority.PREFETCH]

    def waits(self, priority: Priority) -> bool:
        """Whether any wish of a kind waits to be sent."""
        return bool(self._queues[priority])

    def __iter__(self) -> Iterator[Wish]:
        """All wishes that wait or are in flight, but for those that follow another."""
        yield from self._flying
        for queue in self._queues:
            yield from queue

    def has_room(self, n_bytes: int, priority: Priority) -> bool:
        """Whether a wish for so many bytes would be taken."""
        queued = self._queued_bytes[priority]
        return priority is Priority.DEMAND or not queued or queued + n_bytes <= self.queue_bytes

    def ask(self, wish: Wish) -> Verdict:
        """Takes a wish, or lets it follow one for the same; refuses it if too much waits."""
        leader = self._leaders.get(wish.alike)
        if leader is not None:
            self.joined += 1
            wish.leader = leader
            leader.followers += (wish,)
            if wish.priority < leader.priority:
                self._hasten(leader, wish.priority)
            return Verdict.JOINED
        if not self.has_room(wish.n_bytes, wish.priority):
            self.refused += 1
            return Verdict.REFUSED
        self._leaders[wish.alike] = wish
        self._queue(wish)
        return Verdict.QUEUED

    def take(self) -> list[Wish]:
        """What is to be sent to the tier now, in this order; it is in flight from then on."""
        batch = []
        while (wish := self._next()) is not None:
            self._unqueue(wish)
            wish.flying = True
            self._flying[wish] = wish.priority
            self._flying_bytes[wish.priority] += wish.n_bytes
            if wish.priority is Priority.WRITE_BACK:
                self._spend(wish.n_bytes)
            elif self._queues[Priority.WRITE_BACK]:
                self._credit[wish.priority] += wish.n_bytes / SHARE
            batch.append(wish)
        return batch

    def end(self, wish: Wish) -> tuple[Wish, ...]:
        """A wish in flight was answered; returns those that followed it, which are free again."""
        self._land(wish)
        return self._part(wish)

    def retire(self, wish: Wish) -> tuple[Wish, ...]:
        """Counts a wish in flight no more: its answer is overdue, and others should not wait.

        Returns those that followed it; whoever asks for the same begins anew.
        """
        self._land(wish)
        return self._part(wish)

    def withdraw(self, wish: Wish) -> bool:
        """Takes back a wish that was not sent; False if it is in flight, or was answered."""
        if wish.leader is not None:
            others = [one for one in wish.leader.followers if one is not wish]
            wish.leader.followers, wish.leader = tuple(others), None
            return True
        if wish not in self._queues[wish.priority]:
            return False
        self._unqueue(wish)
        followers = self._part(wish)
        if followers:  # the first of those that followed goes in its place
            heir, *others = followers
            heir.followers = tuple(others)
            for other in others:
                other.leader = heir
                heir.priority = min(heir.priority, other.priority)
            self._leaders[heir.alike] = heir
            self._queue(heir)
        return True

    def _part(self, wish: Wish) -> tuple[Wish, ...]:
        if self._leaders.get(wish.alike) is wish:
            del self._leaders[wish.alike]
        followers, wish.followers = wish.followers, ()
        for follower in followers:
            follower.leader = None
        return followers

    def _hasten(self, wish: Wish, priority: Priority) -> None:
        if wish in self._queues[wish.priority]:
            self._unqueue(wish)
            wish.priority = priority
            self._queue(wish)
        elif wish in self._flying and priority is Priority.DEMAND:
            self._awaited.add(wish)  # nothing is to be sent that could overtake it

    def _queue(self, wish: Wish) -> None:
        self._queues[wish.priority][wish] = None
        self._queued_bytes[wish.priority] += wish.n_bytes

    def _unqueue(self, wish: Wish) -> None:
        del self._queues[wish.priority][wish]
        self._queued_bytes[wish.priority] -= wish.n_bytes
        if not self._queues[Priority.WRITE_BACK]:
            self._credit = [0.0 for _ in Priority]

    def _spend(self, n_bytes: float) -> None:
        for priority in (Priority.PREFETCH, Priority.DEMAND):
            paid = min(n_bytes, self._credit[priority])
            self._credit[priority] -= paid
            n_bytes -= paid

    def _land(self, wish: Wish) -> None:
        self._awaited.discard(wish)
        priority = self._flying.pop(wish, None)
        if priority is not None:
            self._flying_bytes[priority] -= wish.n_bytes

    @property
    def _demanding(self) -> bool:
        """Whether somebody waits for what is in flight."""
        return bool(self._flying_bytes[Priority.DEMAND] or self._awaited)

    def _next(self) -> Wish | None:
        demands, prefetches, write_backs = self._queues
        demand = next(iter(demands), None)
        write_back = next(iter(write_backs), None) if write_backs else None
        credit = self._credit[Priority.DEMAND]
        if demand is None and not self._demanding:
            credit += self._credit[Priority.PREFETCH]
        if write_back is not None and credit >= write_back.n_bytes and self._fits(write_back):
            return write_back
        if demand is not None:
            return demand if self._fits(demand) else None
        if self._demanding:
            return None
        first = next(iter(prefetches), write_back)
        if first is not None and self._fills_chunk(first):
            first = write_back
        return first if first is not None and self._fits(first) else None

    def _fits(self, wish: Wish) -> bool:
        """Whether its bytes may be in flight beside the others of its kind."""
        demand, prefetch, write_back = self._flying_bytes
        if wish.priority is Priority.DEMAND:
            return not demand or demand + wish.n_bytes <= self.demand_bytes
        others = prefetch + write_back
        return not others or others + wish.n_bytes <= self.background_bytes

    def _fills_chunk(self, wish: Wish) -> bool:
        """Whether it is a prefetch too many for the chunk that is in flight."""
        chunk = self._flying_bytes[Priority.PREFETCH]
        own = wish.priority is Priority.PREFETCH
        return own and chunk > 0 and chunk + wish.n_bytes > self.chunk_bytes
