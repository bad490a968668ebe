"""The devices: which block lies on which page there, and who uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from flowkv.core.clock import Clock
from flowkv.core.config import Config
from flowkv.core.geometry import Geometry
from flowkv.core.layout import GRANULE_BYTES
from flowkv.observe.events import Bus
from flowkv.policy.base import Policy
from flowkv.policy.rates import Rates
from flowkv.runtime.index import Block
from flowkv.runtime.places import Place, as_slots
from flowkv.runtime.pool import PagePool
from flowkv.runtime.traffic import Traffic
from flowkv.runtime.unproven import Unproven
from flowkv.tiers.base import Tier


class Devices(Traffic):
    """Blocks on device pages, above the tiers. Callers hold the KV lock.

    Args:
        geometry: The model's layer groups.
        pools: One pool per device name.
        tiers: The stack below them, nearest first.
        policies: See `Residency`.
        clock: Time for the policies.
        bus: Where events go.
        config: See `Residency`.
        rates: See `Residency`.
    """

    def __init__(
        self,
        geometry: Geometry,
        pools: dict[str, PagePool],
        tiers: Sequence[Tier],
        *,
        policies: Callable[[str, int], Policy],
        clock: Clock,
        bus: Bus,
        config: Config,
        rates: dict[str, Rates] | None = None,
    ) -> None:
        self.pools = pools
        self.device_places = {
            device: Place(device, "gpu", policies("gpu", pool.capacity_bytes()))
            for device, pool in pools.items()
        }
        self._pools = [pools[group.device] for group in geometry.groups]
        self._places = [self.device_places[group.device] for group in geometry.groups]
        self.defragment_bytes = config.defragment_bytes
        self._orphans: set[Block] = set()
        self._idle = dict.fromkeys(pools, 0)
        self._lent: dict[tuple[str, int], int] = {}
        self._awaited: set[tuple[str, int]] = set()
        super().__init__(
            *(geometry, tiers), policies=policies, clock=clock, bus=bus, config=config, rates=rates
        )
        self.unproven = Unproven(self.mover)

    def device(self, group: int) -> str:
        """Name of a group's device."""
        return self.geometry.groups[group].device

    def pool(self, group: int) -> PagePool:
        """The pool of a group's device."""
        return self._pools[group]

    def page_bytes(self, group: int, codec: int = 0) -> int:
        """Bytes of a page of a group."""
        return self.forms[group].layouts[codec].page_bytes

    # ---- look-up

    def find(self, key: bytes) -> Block | None:
        """The block of this key if it lies somewhere, or moves, and is exact enough."""
        block = self.index.find(key)
        if block is None or not (block.somewhere or self.source(block) >= 0):
            return None
        return block if block.fidelity <= self.fidelity else None

    def touch(self, blocks: Sequence[Block]) -> None:
        """Tells every policy that these blocks were used, root to leaf, by no request of a model.

        For those of a request, see `runtime.visits`.
        """
        now, slots = self.now_ns(), as_slots([block.slot for block in blocks])
        for place in self.places:
            place.policy.access(now, slots)

    @property
    def places(self) -> Iterable[Place]:
        """All places that have a policy, nearest first."""
        return (*self.device_places.values(), *self.tier_places)

    def place_of(self, block: Block, number: int) -> Place:
        """A tier's place; for -1, that of a block's device."""
        return self._places[block.group] if number < 0 else self.tier_places[number]

    def blocks_on(self, device: str) -> list[Block]:
        """Blocks with a page on a device, also those that only open sequences still use."""
        groups = {g for g, spec in enumerate(self.geometry.groups) if spec.device == device}
        known = [*self.index, *self._orphans]
        return [block for block in known if block.page >= 0 and block.group in groups]

    # ---- holding device pages

    def hold(self, block: Block) -> None:
        """Keeps a block's device page where it is until `drop`."""
        self.pool(block.group).share(block.page)
        if self.unproven:
            self.unproven.use(block)
        block.holds += 1
        if block.holds == 1 and not block.gone:
            self._guard(block)

    def drop(self, block: Block) -> None:
        """Ends a `hold`."""
        block.holds -= 1
        if not block.holds and not block.gone:
            self._guard(block)
        pool, page = self.pool(block.group), block.page
        if block.gone and not block.holds:
            self._orphans.discard(block)
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
        if not block.gone and block.group < len(self.geometry.groups):  # else it has no page
            self._guard(block)

    def _guard(self, block: Block) -> None:
        place = self._places[block.group]
        if not (block.holds or block.kept):
            place.let_go(block.slot)
            self.recount(block)
            return
        place.hold(block.slot)
        if block.idle:
            self._idle[self.geometry.groups[block.group].device] -= block.idle
            block.idle = 0

    def recount(self, block: Block) -> None:
        """Counts a block's page among the idle ones, or no longer, after anything changed."""
        now = 0
        if block.page >= 0 and not (block.holds or block.kept or block.gone):
            now = self.forms[block.group].of(block.page).granules
        if now != block.idle:
            self._idle[self.geometry.groups[block.group].device] += now - block.idle
            block.idle = now

    def change(self, block: Block, page: int) -> None:
        """A block has another device page, or (-1) none any more; who is suspended keeps a copy."""
        if block.keepsake is not None:
            block.keepsake.save(self)
        block.page = page
        self.recount(block)

    def room(self, device: str) -> int:
        """Granules of a device that are free, or held by nobody but the index and no pin."""
        pool = self.pools[device]
        return pool.capacity_granules - pool.used_granules + self._idle[device]

    def within_reach(self, counts: Mapping[tuple[int, int], int]) -> bool:
        """Whether so many pages of each (group, codec) could be had by giving up all that is idle.

        What transfers hold counts, too: nobody knows yet what of it comes free.
        """
        wanted = dict.fromkeys(self.pools, 0)
        for (g, codec), count in counts.items():
            wanted[self.device(g)] += count * self.forms[g].layouts[codec].granules
        for device, page in self._lent:
            wanted[device] -= self.pools[device].size_bytes(page) // GRANULE_BYTES
        return all(granules <= self.room(device) for device, granules in wanted.items())

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
            self._awaited.discard(place)
        self.pool(group).release(page)

    def awaits(self, group: int, page: int, awaited: bool) -> None:
        """A lent page is to hold what a sequence waits for, or no longer: it is not leaving."""
        place = self.device(group), page
        (self._awaited.add if awaited else self._awaited.discard)(place)

    def leaving(self, device: str) -> int:
        """Pages of a device that become free as soon as transfers let go of them."""
        lent = (place for place in self._lent.keys() - self._awaited if place[0] == device)
        return sum(self.pools[device].references(page) == 1 for _, page in lent)

    def join(self) -> None:
        """What is computed from now on comes after the copies to all devices."""
        for pool in self.pools.values():
            if pool.copies is not None:
                pool.copies.join()

    def is_lent(self, group: int, page: int) -> bool:
        """Whether a transfer uses a page."""
        return (self.device(group), page) in self._lent

    def lent(self, device: str) -> set[int]:
        """Pages of a device that transfers use."""
        return {page for place, page in self._lent if place == device}
