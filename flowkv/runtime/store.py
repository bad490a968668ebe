"""Residency on the devices: who holds which page, what is given up for new ones, and where it goes.

Identity and residency are decided here, by one writer at a time (the KV lock); policies only order
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flowkv.core.clock import Clock
from flowkv.core.config import Config
from flowkv.core.errors import CapacityError
from flowkv.core.geometry import Geometry
from flowkv.core.layout import CODEC_SHIFT
from flowkv.core.sizes import format_size
from flowkv.observe.events import Bus, Evicted
from flowkv.policy.base import Policy
from flowkv.runtime.index import Block
from flowkv.runtime.pool import PagePool
from flowkv.runtime.traffic import Traffic
from flowkv.tiers.base import FrameInfo, Tier

_BATCH_SHARE, _BATCH_PAGES = 64, 32
"""Pages are given up in batches, of this share of the pool and this number of pages at most: what
a policy is asked costs as much as there are protected pages."""
_ATTEMPTS = 4


class Store(Traffic):
    """Blocks over device pools and tiers. Callers hold the KV lock.

    Args:
        geometry: The model's layer groups.
        pools: One pool per device name.
        tiers: The stack below them, nearest first.
        policies: `policies(kind)` makes the policy of one place.
        clock: Time for the policies.
        bus: Where events go.
        config: See `Traffic`.
    """

    def __init__(
        self,
        geometry: Geometry,
        pools: dict[str, PagePool],
        tiers: Sequence[Tier],
        *,
        policies: Callable[[str], Policy],
        clock: Clock,
        bus: Bus,
        config: Config,
    ) -> None:
        self.pools = pools
        self.device_policies = {device: policies("gpu") for device in pools}
        self.defragment_bytes = config.defragment_bytes
        self._held: dict[int, None] = {}
        self._ghosts: set[Block] = set()
        self._lent: dict[tuple[str, int], int] = {}
        super().__init__(geometry, tiers, policies=policies, clock=clock, bus=bus, config=config)

    def device(self, group: int) -> str:
        """Name of a group's device."""
        return self.geometry.groups[group].device

    def pool(self, group: int) -> PagePool:
        """The pool of a group's device."""
        return self.pools[self.device(group)]

    def page_bytes(self, group: int, codec: int = 0) -> int:
        """Bytes of a page of a group."""
        return self.forms[group].layouts[codec].page_bytes

    # ---- look-up

    def find(self, key: bytes) -> Block | None:
        """The block of this key if it lies somewhere and is exact enough."""
        block = self.index.find(key)
        if block is None or not block.somewhere:
            return None
        return block if block.fidelity <= self.fidelity else None

    def touch(self, blocks: Sequence[Block]) -> None:
        """Tells every policy that a request used these blocks, root to leaf."""
        now = self.clock.now_ns()
        slots = np.array([block.slot for block in blocks], np.int64)
        for policy in (*self.device_policies.values(), *self.tier_policies):
            policy.access(now, slots)

    def blocks_on(self, device: str) -> list[Block]:
        """Blocks with a page on a device, also those that only open sequences still use."""
        groups = {g for g, spec in enumerate(self.geometry.groups) if spec.device == device}
        known = [*self.index, *self._ghosts]
        return [block for block in known if block.page >= 0 and block.group in groups]

    # ---- holding device pages

    def hold(self, block: Block) -> None:
        """Keeps a block's device page where it is until `drop`."""
        self.pool(block.group).share(block.page)
        block.holds += 1
        self.protect(block)

    def drop(self, block: Block) -> None:
        """Ends a `hold`."""
        block.holds -= 1
        self.protect(block)
        pool, page = self.pool(block.group), block.page
        if block.gone and not block.holds:
            self._ghosts.discard(block)
            block.page = -1
        pool.release(page)

    def pin(self, block: Block, pinned: bool) -> None:
        """Protects a block from every policy, or no longer."""
        if pinned != block.pinned:
            block.pinned = pinned
            (self.keep if pinned else self.unkeep)(block)

    def protect(self, block: Block) -> None:
        """See `Traffic.protect`; here for what sequences hold too."""
        super().protect(block)
        if block.gone:
            return
        if block.holds or block.kept:
            self._held[block.slot] = None
        else:
            self._held.pop(block.slot, None)

    def dismiss(self, block: Block) -> None:
        """See `Traffic.dismiss`."""
        self._held.pop(block.slot, None)
        super().dismiss(block)

    def lend(self, group: int, page: int) -> None:
        """Gives a page to a transfer: it neither moves nor becomes free until `give_back`."""
        self.pool(group).share(page)
        place = self.device(group), page
        self._lent[place] = self._lent.get(place, 0) + 1

    def give_back(self, group: int, page: int) -> None:
        """The transfer is over."""
        place = self.device(group), page
        self._lent[place] -= 1
        if not self._lent[place]:
            del self._lent[place]
        self.pool(group).release(page)

    def is_lent(self, group: int, page: int) -> bool:
        """Whether a transfer uses a page."""
        return (self.device(group), page) in self._lent

    def lent(self, device: str) -> set[int]:
        """Pages of a device that transfers use."""
        return {page for place, page in self._lent if place == device}

    # ---- making room

    def allocate(self, group: int, count: int, codec: int = 0) -> list[int]:
        """Private pages, made free by evicting idle ones.

        Args:
            group: Layer group.
            count: How many.
            codec: Index of the codec that they are for.

        Raises:
            CapacityError: Too much of the pool is in use.
        """
        pages = self.try_allocate(group, count, codec)
        if pages is None:
            pool = self.pool(group)
            raise CapacityError(
                f"{count} pages of {format_size(self.page_bytes(group, codec))} do not fit: "
                f"{format_size(pool.used_bytes())} of {format_size(pool.capacity_bytes())} are in "
                "use by open sequences",
                "Close or suspend sequences, or give the device pool more bytes",
            )
        return pages

    def try_allocate(self, group: int, count: int, codec: int = 0) -> list[int] | None:
        """Like `allocate`, but None if they do not fit."""
        pool, granules = self.pool(group), self.forms[group].layouts[codec].granules
        while (pages := pool.allocate(granules, count, codec)) is None:
            short = count - pool.available(granules)
            leaving = sum(pool.references(page) == 1 for page in self.lent(self.device(group)))
            if leaving >= short and self.mover.drain(self.mover.deadline_s):
                continue  # enough pages are only waiting for a tier to take them
            if not self._give_up(group, max(1, short - leaving)) and (
                not self.mover.storing() or not self.mover.drain(self.mover.deadline_s)
            ):
                return None
        return pages

    def spare(self, group: int, count: int, codec: int) -> list[int]:
        """Up to `count` private pages; for those that do not fit, a few idle ones are given up."""
        pool, granules = self.pool(group), self.forms[group].layouts[codec].granules
        for _ in range(_ATTEMPTS):  # victims may be of another size
            short = count - pool.available(granules)
            if short <= 0 or not self._give_up(group, short):
                break
        return pool.allocate(granules, min(count, pool.available(granules)), codec) or []

    def _give_up(self, group: int, short: int) -> bool:
        device, now = self.device(group), self.clock.now_ns()
        policy, pages = self.device_policies[device], self.pools[device].capacity_granules
        share = pages // self.forms[group].raw.granules // _BATCH_SHARE
        for n in dict.fromkeys((max(short, min(share, _BATCH_PAGES)), short, 1)):
            victims = policy.evict(now, n, self._held)
            if victims is not None:
                for slot in victims.tolist():
                    self._leave_device(self.index.at(slot), "space")
                self.mover.drain()
                return True
        return False

    def _leave_device(self, block: Block, reason: str) -> None:
        if reason == "space" and not block.moving:
            self._demote_page(block)
        n_bytes = self.forms[block.group].of(block.page).page_bytes
        self.bus.emit(Evicted(tier="device", pages=1, n_bytes=n_bytes, reason=reason))
        page, block.page = block.page, -1
        self.pool(block.group).release(page)
        self.settle(block)

    def _demote_page(self, block: Block) -> None:
        # To the nearest tier that wants it, unless that one or a nearer one holds it already.
        for number, tier in enumerate(self.tiers):
            if block.tiers >> number & 1:
                return
            if tier.writable and self.admits(block, number):
                self._save_page(block, number)
                return

    def expire(self) -> None:
        """Takes blocks whose lease has run out away from where it ran out."""
        for policy in self.device_policies.values():
            for slot in policy.expired(self.clock.now_ns()).tolist():
                block = self.index.at(slot)
                if not block.holds and not block.kept:
                    policy.remove(np.array([slot], np.int64))
                    self._leave_device(block, "lease")
        super().expire()

    # ---- pages that become known, and that are forgotten

    def publish(self, block: Block, page: int) -> None:
        """A private page becomes a block's device page; its one reference becomes the store's."""
        block.page = page
        self.insert(self.device_policies[self.device(block.group)], [block])

    def supersede(self, block: Block) -> None:
        """Erases a block's copies that are too lossy to be read here, before it is made anew."""
        if block.tiers and block.fidelity > self.fidelity:
            self.erase(block)

    def write_down(self, block: Block) -> None:
        """Saves a full page on the first persistent tier, in the background."""
        if self.write_back and not block.moving and not block.gone:
            for number, tier in enumerate(self.tiers):
                if tier.kind != "host" and tier.writable:
                    if not block.tiers >> number & 1:
                        self._save_page(block, number)
                    return

    def _save_page(self, block: Block, number: int) -> None:
        pool, page, group = self.pool(block.group), block.page, block.group
        body = pool.page_bytes(page, self.forms[group].of(page).page_bytes).cpu().numpy().data
        self.lend(group, page)
        if not self.save(
            block, number, self._info(block), body, lambda: self.give_back(group, page)
        ):
            self.give_back(group, page)

    def _info(self, block: Block) -> FrameInfo:
        layout = self.forms[block.group].of(block.page)
        return FrameInfo(
            kind="page",
            codec=block.page >> CODEC_SHIFT,
            fidelity=block.fidelity,
            layout=layout.fingerprint(),
            parent=block.parent,
            namespace=block.namespace,
            group=block.group,
            tokens=layout.page_size,
            stripe_bytes=layout.stripe_stride_bytes,
            tenant=block.tenant,
        )

    def forget(self, block: Block) -> None:
        """Erases a block everywhere; open sequences keep their own use of its page."""
        if block.gone:
            return
        self.erase(block)
        page = block.page
        if page >= 0:
            policy = self.device_policies[self.device(block.group)]
            policy.remove(np.array([block.slot], np.int64))
            if block.holds:
                self._ghosts.add(block)
            else:
                block.page = -1
            self.pool(block.group).release(page)
        self.dismiss(block)
