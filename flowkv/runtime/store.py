"""Residency on the devices: what is given up for new pages, and where it goes.

Identity and residency are decided here, by one writer at a time (the KV lock); policies only order
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowkv.core import compiling
from flowkv.core.errors import CapacityError
from flowkv.core.layout import CODEC_SHIFT, GRANULE_BYTES, granule_of
from flowkv.core.sizes import format_size
from flowkv.observe.events import Demoted, Evicted
from flowkv.runtime.devices import Devices
from flowkv.runtime.index import Block
from flowkv.runtime.traffic import AWAY
from flowkv.tiers.base import Completion, FrameInfo

_BATCH_SHARE, _BATCH_PAGES = 64, 32
"""Pages are given up in batches, of this share of the pool and this number of pages at most: a
call costs as much as the choice of some pages."""
_ATTEMPTS = 4
_LONGEST_S = 0.1


class Store(Devices):
    """Blocks over device pools and tiers. Callers hold the KV lock.

    Args:
        *args: See `Devices`.
        **options: See `Devices`.

    Attributes:
        give_up_late: Gives up loads that are overdue, so that nothing waits behind them.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._unwritten: dict[Block, None] = {}
        self.give_up_late: Callable[[], None] = lambda: None
        self._held_back = False  # until the first page that would not pay
        super().__init__(*args, **options)

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
            raise self._short(group, count, codec)
        return pages

    def require(self, counts: Mapping[tuple[int, int], int]) -> None:
        """Refuses what cannot fit, before anything is given up for it.

        Args:
            counts: Pages of each (group, codec index).

        Raises:
            CapacityError: Too much of a pool is in use.
        """
        if not self.within_reach(counts):
            (group, codec), count = max(counts.items(), key=lambda item: item[1])
            raise self._short(group, count, codec)

    def _short(self, group: int, count: int, codec: int) -> CapacityError:
        device, pool = self.device(group), self.pool(group)
        used = (pool.capacity_granules - self.room(device)) * GRANULE_BYTES
        return CapacityError(
            f"{count} pages of {format_size(self.page_bytes(group, codec))} do not fit: "
            f"{format_size(used)} of {format_size(pool.capacity_bytes())} are in use by open "
            "sequences",
            "Close or suspend sequences, or give the device pool more bytes",
        )

    def try_allocate(self, group: int, count: int, codec: int = 0) -> list[int] | None:
        """Like `allocate`, but None if they do not fit."""
        pool, granules = self.pool(group), self.forms[group].layouts[codec].granules
        while (pages := pool.allocate(granules, count, codec)) is None:
            short = count - pool.available(granules)
            leaving = self.leaving(self.device(group))
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
        device, now = self.device(group), self.now_ns()
        place, pages = self.device_places[device], self.pools[device].capacity_granules
        share = pages // self.forms[group].raw.granules // _BATCH_SHARE
        for n in dict.fromkeys((max(short, min(share, _BATCH_PAGES)), short, 1)):
            victims = place.evict(now, n)
            if victims is not None:
                for slot in victims.tolist():
                    self._leave_device(self.index.at(slot), "space")
                self.mover.drain()
                return True
        return False

    def _leave_device(self, block: Block, reason: str) -> None:
        waited = block in self._unwritten
        if reason != "lease" and not block.moving:
            self._demote_page(block)
        n_bytes = self.forms[block.group].of(block.page).page_bytes
        self.bus.emit(Evicted(tier="device", pages=1, n_bytes=n_bytes, reason=reason))
        page = block.page
        self.change(block, -1)
        self.unproven.leave(block)
        self._unwritten.pop(block, None)
        if waited and not block.moving:
            self.miss_out(self.lasting())
        self.pool(block.group).release(page)
        self.settle(block)

    def _demote_page(self, block: Block) -> None:
        # To the nearest tier that wants it, unless that one or a nearer one holds it already.
        for number, tier in enumerate(self.tiers):
            if block.tiers >> number & 1:
                return
            if not tier.writable or self.rests(number) or not self.worth_saving(block, number):
                continue
            if block in self.provisional and self.outlives(number):
                continue
            if self.admits(block, number):
                n_bytes = self.forms[block.group].of(block.page).page_bytes
                if self._save_page(block, number):
                    moved = Demoted(source="device", tier=tier.name, pages=1, n_bytes=n_bytes)
                    self.bus.emit(moved)
                elif not self.takes(number, n_bytes) and block not in self._unwritten:
                    self.miss_out(number)
                return

    def expire(self) -> None:
        """Takes blocks whose lease has run out away from where it ran out."""
        for place in self.device_places.values():
            for slot in place.expired(self.now_ns()):
                self._leave_device(self.index.at(slot), "lease")
        super().expire()

    def displace(self, slots: Sequence[int]) -> None:
        """Takes blocks off their device that its policy has given up for a prefetch."""
        for slot in slots:
            self._leave_device(self.index.at(slot), "prefetch")
        self.mover.drain()

    def shed(self) -> None:
        """Has tenants give up what they have above their quotas."""
        for place in self.device_places.values():
            for slot in place.surplus(self.now_ns()):
                self._leave_device(self.index.at(slot), "quota")
        super().shed()

    # ---- pages that become known, and that are forgotten

    def publish(self, block: Block, page: int) -> None:
        """A private page becomes a block's device page; its one reference becomes the store's.

        The device's policy is to be told of it (`insert`), of all pages of a request at once.
        """
        block.page = page
        self.recount(block)

    def supersede(self, block: Block) -> None:
        """Deletes a block's copies that are too lossy to be read here, before it is made anew."""
        if block.tiers and block.fidelity > self.fidelity:
            self.delete(block)

    def write_down(self, block: Block) -> None:
        """Saves a full page on the first persistent tier, in the background.

        While that is busy or away the page waits; if it leaves the device meanwhile, it is dropped.
        What would not have paid before comes along once its prompt is long enough.
        """
        number = self.lasting() if self.write_back else -1
        if number < 0 or block in self.provisional or not self._unwritten_on(block, number):
            return
        if not self.worth_saving(block, number):
            self._held_back = True
            return
        chain = [block]
        while self._held_back:
            above = self.index.find(chain[-1].parent)
            if above is None or not self._may_write(above, number):
                break
            chain.append(above)
        for one in reversed(chain):
            self._write_down(one, number)

    def _unwritten_on(self, block: Block, number: int) -> bool:
        return not (block.moving or block.gone or block.tiers >> number & 1)

    def confirm(self) -> None:
        """A reading of all weights has ended: what it proves may leave the process."""
        number = self.lasting() if self.write_back else -1
        for block in self.provisional.confirm():
            if number < 0 or block.gone:
                continue
            if block.page >= 0:
                if self._may_write(block, number):
                    self.write_down(block)
            elif block.tiers and self._unwritten_on(block, number):
                found = self.read(block, block.nearest)
                if found is not None and (block.kind != "page" or self.worth_saving(block, number)):
                    self.save(block, number, found[0], memoryview(found[1]))
                    self.settle(block)

    def reject(self) -> int:
        """Forgets what may be of other weights than it is named after; returns how many."""
        rejected = [block for block in self.provisional.reject() if not block.gone]
        for block in rejected:
            self.forget(block)
        return len(rejected)

    def _may_write(self, block: Block, number: int) -> bool:
        """Whether a page is as it will stay, and is neither written down nor about to be."""
        if block in self.provisional:
            return False
        sealed = block.page >> CODEC_SHIFT or not self.forms[block.group].ladder.rungs
        final = block.page >= 0 and (sealed or not block.sealable)
        return bool(final and self._unwritten_on(block, number) and block not in self._unwritten)

    def _write_down(self, block: Block, number: int) -> None:
        n_bytes = self.forms[block.group].of(block.page).page_bytes
        if self.takes(number, n_bytes) and not self._unwritten:
            self._save_page(block, number)
        else:
            self._unwritten[block] = None

    def drain(self, timeout_s: float = 0.0) -> int:
        """Sends and answers what can be, see `Mover.drain`; pages that waited go on their way."""
        handled = self.mover.drain(timeout_s)
        self.give_up_late()
        number = self.lasting() if self._unwritten else -1
        while number >= 0 and self._unwritten:
            block = next(iter(self._unwritten))
            if block.page >= 0 and not (block.gone or block.moving or block.tiers >> number & 1):
                if not self.takes(number, self.forms[block.group].of(block.page).page_bytes):
                    break
                self._save_page(block, number)
            self._unwritten.pop(block, None)
        return handled

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is being stored or waits for that; False if that took too long.

        Pages that wait for a tier which is away keep waiting.
        """
        end_s = compiling.now_s() + timeout_s
        self.drain()
        while self.mover.storing() or (self._unwritten and not self.rests(self.lasting())):
            left_s = end_s - compiling.now_s()
            if left_s <= 0:
                return False
            self.drain(min(left_s, _LONGEST_S))
        return not self._unwritten

    def _saved(self, block: Block, number: int, codec: int, answer: Completion) -> None:
        super()._saved(block, number, codec, answer)
        again = answer.reason in AWAY and self.write_back and number == self.lasting()
        if again and block.page >= 0 and not block.gone:
            self._unwritten[block] = None

    def lasting(self) -> int:
        """Number of the first writable tier that outlives the process, -1 if there is none."""
        numbers = [number for number, tier in enumerate(self.tiers) if tier.writable]
        for number in numbers:
            if self.tiers[number].kind != "host":
                return number
        return next((number for number in numbers if self.tiers[number].shared), -1)

    def _save_page(self, block: Block, number: int) -> bool:
        pool, page, group = self.pool(block.group), block.page, block.group
        n_bytes = self.forms[group].of(page).page_bytes
        if pool.copies is None:
            body = pool.page_bytes(page, n_bytes).cpu().numpy().data
        else:
            body = pool.copies.download([granule_of(page)], n_bytes)[0].numpy().data
        self.lend(group, page)
        if self.save(
            block, number, self.describe(block), body, lambda: self.give_back(group, page)
        ):
            return True
        self.give_back(group, page)
        return False

    def describe(self, block: Block) -> FrameInfo:
        """What the frame of a block's device page says about itself."""
        layout = self.forms[block.group].of(block.page)
        return FrameInfo(
            kind="page",
            codec=block.page >> CODEC_SHIFT,
            fidelity=block.fidelity,
            layout=self.forms[block.group].fingerprints[block.page >> CODEC_SHIFT],
            parent=block.parent,
            namespace=block.namespace,
            group=block.group,
            tokens=layout.page_size,
            stripe_bytes=layout.stripe_stride_bytes,
            tenant=block.tenant,
        )

    def condemn(self, block: Block) -> None:
        """Forgets a block whose content is wrong, also where others wrote it and it stays."""
        for number, tier in enumerate(self.tiers):
            if block.tiers >> number & 1 and not tier.writable:
                self._condemned.add((number, block.key))
        self.forget(block)

    def forget(self, block: Block) -> None:
        """Deletes a block everywhere; open sequences keep their own use of its page."""
        if block.gone:
            return
        self.delete(block)
        self.unproven.leave(block)
        self._unwritten.pop(block, None)
        page = block.page
        if page >= 0:
            self.remove(block)
            if block.keepsake is not None:
                block.keepsake.save(self)
            if block.holds:
                self._orphans.add(block)
            else:
                block.page = -1
            self.pool(block.group).release(page)
        self.dismiss(block)
        self.recount(block)
