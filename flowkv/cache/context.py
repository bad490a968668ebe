"""State that the policies of all places share: time, tenants and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from flowkv.cache.index import Block, PrefixIndex
from flowkv.core.clock import Clock
from flowkv.core.geometry import CODEC_SHIFT
from flowkv.core.keys import ROOT
from flowkv.policy.admission import WriteAdmission
from flowkv.policy.restore import LoadGate
from flowkv.residency.places import PolicyPlace

_PARENT, _SLOT = attrgetter("parent"), attrgetter("slot")
MOST_TENANTS = 1 << 12
"""Tenants with a number of their own; all later ones share the next."""
_ALIKE = 16  # pages that follow each other in a prompt have one cost in tiers, however they come


@dataclass(slots=True)
class PolicyContext:
    """Time, tenants and costs, the same for the policies of all places. Callers hold the KV lock.

    Args:
        index: The known blocks.
        clock: Time for the policies.
        gate: Rates of the model and of loads.
        page_size: Tokens of a page.
        tenants: Numbers of tenants by their salt: those with a quota are the first.
        writes: Chooses the pages that leave memory for lasting tiers; None writes all.
    """

    index: PrefixIndex
    clock: Clock
    gate: LoadGate
    page_size: int
    tenants: dict[bytes, int]
    writes: WriteAdmission | None = None
    _moment_ns: int | None = None

    def now_ns(self) -> int:
        """Return the time for the policies."""
        return self.clock.now_ns() if self._moment_ns is None else self._moment_ns

    @contextmanager
    def moment(self) -> Iterator[None]:
        """Stop the time for the policies.

        Blocks restored for a request are then inserted at the time of the request: one use each.
        """
        before, self._moment_ns = self._moment_ns, self.now_ns()
        try:
            yield
        finally:
            self._moment_ns = before

    def tenant(self, salt: bytes) -> int:
        """Return the number by which policies know a tenant."""
        if len(self.tenants) < MOST_TENANTS:
            self.tenants.setdefault(salt, len(self.tenants))
        return self.tenants.get(salt, len(self.tenants))

    def insert(
        self,
        place: PolicyPlace,
        blocks: Iterable[Block],
        n_bytes: Callable[[Block], int],
        *,
        apart: bool = False,
    ) -> None:
        """Insert blocks that became resident into a place's policy.

        Args:
            place: The place.
            blocks: Root to leaf, chain after chain. Neighbours of one size, lease and tenant take
                one call. A policy takes the last block of a call for the deepest, so that chains
                on a device begin a call each. A call has one cost: that of its middle page, in
                tiers of the middle of all parts of 16 pages that it touches.
            n_bytes: Returns the bytes of a block's copy there.
            apart: Whether copies of equal blocks may have unequal sizes there.
        """
        runs, alike, here = list[list[Block]](), None, place.kind == "gpu"
        for block in blocks:
            codec = block.page >> CODEC_SHIFT if here else block.codecs
            size = n_bytes(block) if apart else block.n_bytes
            terms = block.group, codec, size, block.lease, block.tenant
            if terms != alike or (here and block.parent == ROOT):
                runs.append([])
            runs[-1].append(block)
            alike = terms
        for run in runs:
            first, last = run[0], run[-1]
            more = 0 if here else _ALIKE - 1
            middle = ((first.depth & ~more) + (last.depth | more) + 1) / 2  # one cost for all
            above = np.array(self.index.slots(map(_PARENT, run)), np.int64)
            slots = np.array([*map(_SLOT, run)], np.int64)
            if self.writes is not None:
                self.writes.insert(slots, above)
            place.policy.insert(
                self.now_ns(),
                slots,
                above,
                n_bytes=n_bytes(first),
                cost_ns=round(self.gate.token_s(middle * self.page_size) * self.page_size * 1e9),
                lease=first.lease,
                tenant=self.tenant(first.tenant),
            )


def chains(blocks: Iterable[Block]) -> list[list[Block]]:
    """Return blocks as parts of chains, root to leaf, each behind the part that it continues."""
    left, found = {block.key: block for block in blocks}, list[list[Block]]()
    for key in [*left]:
        part = list[Block]()
        while (block := left.pop(key, None)) is not None:
            part.append(block)
            key = block.parent
        for block in reversed(part):
            if not found or block.parent != found[-1][-1].key or not block.depth % _ALIKE:
                found.append([])
            found[-1].append(block)
    return found
