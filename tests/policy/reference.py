"""LFU-TTL as written down, slowly: recomputes everything from what is stored, keeps no order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal

import numpy as np

from flowkv import Policy
from tests.inside import NEVER_NS, NO_VISIT, aged

EXACT = Context(prec=60, rounding=ROUND_HALF_EVEN)


def key_after(key: int, now: int, tau: int) -> Decimal:
    """K = t_last + tau * log2(c), after c <- 1 + c * 2^(-dt / tau), in nanoseconds."""
    if tau == 0:
        return Decimal(now)
    far = EXACT.divide(Decimal(-abs(key - now)), Decimal(tau))
    log2 = EXACT.divide(EXACT.ln(1 + EXACT.power(2, far)), EXACT.ln(Decimal(2)))
    return EXACT.add(max(key, now), EXACT.multiply(log2, tau))


@dataclass
class Block:
    parent: Block | None
    key: int
    last: int
    depth: int
    lease: float
    limit: float
    rank: int = 35
    fall: float = math.inf
    tenant: int = 0
    here: bool = True


class SlowLfuTtl(Policy):
    """A `Policy` in Python. Parts are methods, so that mutants can spoil them one by one."""

    name = "slow"

    def __init__(self, tau_ns: int = 7, leases: dict[str, tuple[float, ...]] | None = None):
        self.tau = tau_ns
        self.leases = leases or {"": (math.inf, math.inf)}
        self.blocks: dict[int, Block] = {}
        self.clock: int | None = None
        self.log: list[object] = []
        self.left: dict[int, tuple[int, int]] = {}  # slot -> key and last, of what left
        self.etas: dict[int, int] = {}
        self.dead: set[int] = set()
        self.branched: set[int] = set()
        self.pins: Counter[int] = Counter()
        self.requests: dict[int, list[int]] = {}

    # --- the rules

    def tick(self, now: int) -> int:
        self.clock = now if self.clock is None else max(now, self.clock)
        return self.clock

    def parent(self, block: Block) -> Block | None:
        return block.parent if block.parent is not None and block.parent.here else None

    def children(self, block: Block) -> list[Block]:
        return [b for b in self.blocks.values() if self.parent(b) is block]

    def own_expiry(self, block: Block) -> float:
        return min(block.last + block.lease, block.limit)

    def expiry(self, block: Block) -> float:
        return max([self.own_expiry(block), *map(self.expiry, self.children(block))])

    def is_expired(self, block: Block) -> bool:
        return self.clock is not None and self.expiry(block) <= self.clock

    def is_queued(self, slot: int) -> bool:
        return any(slot in chain for chain in self.requests.values())

    def order_class(self, slot: int) -> int:
        block = self.blocks[slot]
        if self.is_expired(block):
            return 0
        if self.is_queued(slot):
            return 127
        return 1 if slot in self.dead else 2 + (block.rank if self.clock < block.fall else 35)

    def base_key(self, slot: int) -> int:
        return self.blocks[slot].key

    def standing(self, slot: int) -> tuple[int, int, bool]:
        """Class and key; a use ahead counts as one that is as long ago."""
        here, key, eta = self.order_class(slot), self.base_key(slot), self.etas.get(slot, -math.inf)
        ahead = eta > self.clock and 1 < here < 127
        return here, 2 * self.clock - eta if ahead else max(key, eta), ahead

    def turn(self, slot: int) -> tuple[int, int, int, int]:
        """What goes first is least."""
        here, key, ahead = self.standing(slot)
        return here, 2 * key + ahead, -self.blocks[slot].depth, slot

    def blocked(self, slots: Iterable[int]) -> set[int]:
        """What is pinned and all above it."""
        found = set()
        for slot in [*slots, *(s for s, n in self.pins.items() if n > 0)]:
            block = self.blocks.get(slot)
            while block is not None:
                found.add(id(block))
                block = self.parent(block)
        return found

    def candidates(self, protected: set[int]) -> list[int]:
        fixed = self.blocked(protected)
        return [s for s, b in self.blocks.items() if not self.children(b) and id(b) not in fixed]

    def can_free(self, n: int, protected: set[int]) -> bool:
        return n <= len(self.blocks) - len(self.blocked(protected))

    def pick(self, slots: list[int]) -> int:
        return min(slots, key=self.turn)

    def give_up(self, slot: int) -> None:
        self.drop(slot)

    def drop(self, slot: int) -> None:
        block = self.blocks.pop(slot)
        block.here = False
        self.left[slot] = block.key, block.last

    def touch(self, block: Block) -> None:
        assert self.clock is not None
        block.key = aged(block.key, self.clock, self.tau)
        block.last = self.clock

    def end_hints(self, slot: int) -> None:
        self.etas.pop(slot, None)
        self.dead.discard(slot)

    def adopter(self, slot: int, p: int) -> Block | None:
        block = above = self.blocks.get(p)
        if block is None or self.is_expired(block):
            return None
        while above is not None and above is not self.blocks.get(slot):
            above = self.parent(above)
        return block if above is None else None

    def adopt(self, block: Block, parent: Block | None, p: int) -> None:
        if parent is not None and self.children(parent):
            self.branched.add(p)
        block.parent = parent

    def sign(self, block: Block, lease: float, max_age: float, rank: int = 35, s: float = math.inf):
        """More of what it has."""
        block.lease = max(block.lease, lease)
        block.limit = max(block.limit, self.clock + max_age)
        now, fall = (block.rank, block.fall) if self.clock < block.fall else (35, math.inf)
        if rank >= now:
            ends = self.clock + s
            block.rank, block.fall = rank, max(ends, fall) if rank == now else ends

    # --- the protocol

    def insert(self, now_ns, slots, parents, *, n_bytes=1, cost_ns=0, lease="", tenant=0):
        now = self.tick(now_ns)
        for i, (s, p) in enumerate(zip(slots.tolist(), parents.tolist(), strict=True)):
            block = self.blocks.get(s)
            if block is not None and self.is_expired(block):
                self.drop(s)
                block = None
            if block is not None:
                if block.last != now:
                    self.touch(block)
                    self.end_hints(s)
                if lease:
                    self.sign(block, *self.leases[lease])
                if self.parent(block) is None:
                    self.adopt(block, self.adopter(s, p), p)
                continue
            parent = self.adopter(s, p)
            key, last = self.left.get(s, (None, None))
            key = now if key is None else key if last == now else aged(key, now, self.tau)
            for_s, max_age, *rank = self.leases[lease]
            depth = parent.depth + 1 if parent else i
            block = Block(None, key, now, depth, for_s, now + max_age, tenant=tenant)
            if rank:
                block.rank, block.fall = rank[0], now + rank[1]
            self.adopt(block, parent, p)
            self.blocks[s] = block

    def access(self, now_ns, slots, visit=NO_VISIT):
        self.tick(now_ns)
        for s in slots.tolist():
            if s not in self.blocks or not self.is_expired(self.blocks[s]):
                self.end_hints(s)
                if s in self.blocks:
                    self.touch(self.blocks[s])
        self.requests.pop(visit.request, None)

    def remove(self, slots):
        for s in slots.tolist():
            if s in self.blocks:
                self.drop(s)

    def forget(self, slots):
        for s in set(slots.tolist()) - set(self.blocks):
            self.left.pop(s, None)
            self.branched.discard(s)
            self.end_hints(s)

    def pin(self, slots):
        self.pins.update(s for s in slots.tolist() if s >= 0)

    def unpin(self, slots):
        for s in slots.tolist():
            self.pins[s] = max(0, self.pins[s] - 1)

    def enqueue(self, now_ns, request, slots):
        self.requests[request] = slots.tolist()

    def abort(self, now_ns, request):
        self.requests.pop(request, None)

    def hint(self, now_ns, slots, eta_ns, sigma=0.5):
        now = self.tick(now_ns)
        chain = [s for s in slots.tolist() if s >= 0]
        for i, s in reversed(list(enumerate(chain))):
            kids = len(self.children(self.blocks[s])) if s in self.blocks else 0
            shared = s in self.branched or kids > (i < len(chain) - 1)
            if eta_ns == NEVER_NS:
                if shared:
                    break
                self.end_hints(s)
                self.dead.add(s)
                continue
            before = self.etas.get(s, -math.inf)
            self.end_hints(s)
            when = min(now + max(eta_ns, 0), (1 << 62) - 1)
            self.etas[s] = min(before, when) if shared and before > now else when

    def invalidate(self, now_ns, tenant):
        self.tick(now_ns)
        for block in self.blocks.values():
            if block.tenant == tenant and not self.is_expired(block):
                block.limit = -math.inf

    def admit(self, now_ns, slots):
        self.tick(now_ns)
        return np.ones(len(slots), np.bool_)

    def evict(self, now_ns, n, protected=()):
        self.tick(now_ns)
        guarded = {int(s) for s in protected}
        if not self.can_free(n, guarded):
            self.log.append(None)
            return None
        victims = []
        for _ in range(n):
            victims.append(self.pick(self.candidates(guarded)))
            self.give_up(victims[-1])
        self.log.append(tuple(victims))
        return np.array(victims, np.int64)

    def expired(self, now_ns):
        self.tick(now_ns)
        out = sorted(s for s, b in self.blocks.items() if self.is_expired(b))
        self.log.append(tuple(out))
        return np.array(out, np.int64)

    def priority(self, slot):
        if slot not in self.blocks:
            return -math.inf
        here, key, _ = self.standing(slot)
        return (here - 37) * 2.0**64 + key

    def resident(self):
        return list(self.blocks)

    def digest(self):
        return hash(tuple(self.log)) & (1 << 64) - 1
