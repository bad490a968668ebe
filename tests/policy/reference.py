"""LFU-TTL as written down, slowly: recomputes everything from what is stored, keeps no order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal

import numpy as np

from flowkv.policy.base import NO_VISIT, Policy
from flowkv.policy.order import aged

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
    here: bool = True


class SlowLfuTtl(Policy):
    """A `Policy` in Python. Parts are methods, so that mutants can spoil them one by one."""

    name = "slow"

    def __init__(self, tau_ns: int = 7, leases: dict[str, tuple[float, float]] | None = None):
        self.tau = tau_ns
        self.leases = leases or {"": (math.inf, math.inf)}
        self.blocks: dict[int, Block] = {}
        self.clock: int | None = None
        self.log: list[object] = []

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

    def turn(self, slot: int) -> tuple[bool, int, int, int]:
        block = self.blocks[slot]
        return not self.is_expired(block), block.key, -block.depth, slot

    def candidates(self, protected: set[int]) -> list[int]:
        return [s for s, b in self.blocks.items() if not self.children(b) and s not in protected]

    def can_free(self, n: int, protected: set[int]) -> bool:
        blocked = set()
        for slot in protected:
            block = self.blocks.get(slot)
            while block is not None:
                blocked.add(id(block))
                block = self.parent(block)
        return n <= len(self.blocks) - len(blocked)

    def drop(self, slot: int) -> None:
        self.blocks.pop(slot).here = False

    def touch(self, block: Block) -> None:
        assert self.clock is not None
        block.key = aged(block.key, self.clock, self.tau)
        block.last = self.clock

    def adopter(self, slot: int, p: int) -> Block | None:
        block = above = self.blocks.get(p)
        if block is None or self.is_expired(block):
            return None
        while above is not None and above is not self.blocks.get(slot):
            above = self.parent(above)
        return block if above is None else None

    # --- the protocol

    def insert(self, now_ns, slots, parents, *, n_bytes=1, cost_ns=0, lease="", tenant=0):
        now = self.tick(now_ns)
        for i, (s, p) in enumerate(zip(slots.tolist(), parents.tolist(), strict=True)):
            block = self.blocks.get(s)
            if block is not None and self.is_expired(block):
                self.drop(s)
                block = None
            if block is not None:
                self.touch(block)
                if self.parent(block) is None:
                    block.parent = self.adopter(s, p)
                continue
            parent = self.adopter(s, p)
            for_s, max_age = self.leases[lease]
            depth = parent.depth + 1 if parent else i
            self.blocks[s] = Block(parent, now, now, depth, for_s, now + max_age)

    def access(self, now_ns, slots, visit=NO_VISIT):
        self.tick(now_ns)
        for s in slots.tolist():
            if s in self.blocks and not self.is_expired(self.blocks[s]):
                self.touch(self.blocks[s])

    def remove(self, slots):
        for s in slots.tolist():
            if s in self.blocks:
                self.drop(s)

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
            victims.append(min(self.candidates(guarded), key=self.turn))
            self.drop(victims[-1])
        self.log.append(tuple(victims))
        return np.array(victims, np.int64)

    def expired(self, now_ns):
        self.tick(now_ns)
        out = sorted(s for s, b in self.blocks.items() if self.is_expired(b))
        self.log.append(tuple(out))
        return np.array(out, np.int64)

    def priority(self, slot):
        return float(self.blocks[slot].key) if slot in self.blocks else -math.inf

    def resident(self):
        return list(self.blocks)

    def digest(self):
        return hash(tuple(self.log)) & (1 << 64) - 1
