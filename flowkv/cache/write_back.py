"""Write-back: full pages, tails and states are written to the tier that lasts, ahead of eviction.

What that tier cannot take now waits, wherever it lies, and is lost once no place holds it.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterable, Sequence

from flowkv.cache.index import Block
from flowkv.cache.pool import AT_ONCE_BYTES
from flowkv.cache.tier_stack import TierStack
from flowkv.compiled import compiling
from flowkv.core import interrupts
from flowkv.core.geometry import CODEC_SHIFT
from flowkv.observe.events import Warned
from flowkv.tiers.base import FrameInfo, no_room
from flowkv.tiers.host import HostTier

_HOST_BYTES = 1 << 30
_LONGEST_S = 0.1
_MOST_TAILS = 16


def _alike(block: Block, number: int) -> bool:
    """Return whether a tier has a page in the codec that it has on its device."""
    return bool(block.tiers >> number & 1) and (block.codec_on(number) == block.page >> CODEC_SHIFT)


class WriteBack:
    """Writer of pages, tails and states to the tier that lasts. Callers hold the KV lock.

    Args:
        stack: The tiers, and the pages that wait.
        put: Stores device pages in a tier; returns those that it refuses.

    Attributes:
        give_up_late: Gives up overdue loads, so that nothing waits behind them.
    """

    def __init__(self, stack: TierStack, put: Callable[[list[Block], int], list[Block]]) -> None:
        self._stack, self._admission, self._put = stack, stack.admission, put
        self.give_up_late: Callable[[], None] = lambda: None
        self._held_back = False  # until the first page that would not pay

    def write_filled(self, *blocks: Block) -> None:
        """Write pages down that became final, as far as they need not wait to leave memory."""
        some = self._admission.at_once(blocks)
        self._held_back |= len(some) < len(blocks)
        self.write_down(*some)

    def write_chosen(self, blocks: Iterable[Block]) -> None:
        """Write the pages in memory down that write admission would let leave it now."""
        number = self._admission.writes_to()
        if number >= 0 and not self._admission.writes_all:
            self.write_down(
                *self._admission.chosen(b for b in blocks if self._may_write(b, number))
            )

    def write_down(self, *blocks: Block) -> None:
        """Write full pages to the first persistent tier, in the background.

        While that tier is busy or away, the pages wait. Pages of a prompt that was too short to be
        worth storing are written as well, once a longer prompt continues them.
        """
        stack, number = self._stack, self._admission.writes_to()
        final = [b for b in blocks if number >= 0 and b not in stack.provisional]
        fresh = [block for block in final if block.lacked_by(number)]
        worth = self._admission.worth_storing(fresh, number) if fresh else []
        self._held_back |= len(worth) < len(fresh)
        for block in worth:
            chain = [block]
            while self._held_back:
                above = stack.index.find(chain[-1].parent)
                if above is None or not self._may_write(above, number):
                    break
                chain.append(above)
            stack.unwritten |= dict.fromkeys(reversed(chain))
        if stack.unwritten:
            self._write_out()

    def confirm(self) -> None:
        """Write the pages and tails that the finished reading of all weights has proven."""
        stack, number = self._stack, self._admission.writes_to()
        for block, tail in stack.provisional.confirm().items():
            if number < 0:
                stack.settle(block)
            elif tail is not None:
                self._store_or_miss(block, number, *tail)
            elif block.page >= 0:
                if self._may_write(block, number):
                    self.write_filled(block)
            elif block.lacked_by(number) and self._admission.worth_storing(
                self._admission.at_once([block]), number
            ):
                stack.wait(block)

    def _may_write(self, block: Block, number: int) -> bool:
        """Return whether memory has a final page that is neither on a tier nor queued for it."""
        stack = self._stack
        if block.kind != "page" or block in stack.provisional or block in stack.unwritten:
            return False
        if block.page < 0:
            final = block.tiers > 0 and stack.tiers[block.nearest].kind == "host"
        else:
            coming = block.sealable and bool(stack.forms[block.group].ladder.rungs)
            final = block.page >> CODEC_SHIFT > 0 or not coming
        return final and block.lacked_by(number)

    def _write_out(self) -> None:
        """Store waiting pages in the persistent tier, as far as it takes them now.

        A page that has left its device is read from host memory, one block at a time.
        """
        stack, number = self._stack, self._admission.lasting()
        lane = stack.mover.lanes[number] if number >= 0 else None
        while stack.unwritten and lane and not lane.rests:
            waiting, n_bytes = list[Block](), 0
            for block in stack.unwritten:
                if block.lacked_by(number):
                    if not block.somewhere:
                        continue  # its copy below is still on the way
                    own_bytes = stack.copies.nearest_size(block)
                    if not lane.takes(own_bytes, n_bytes) or n_bytes > AT_ONCE_BYTES:
                        break
                    n_bytes += own_bytes
                waiting.append(block)
                if block.page < 0:
                    break
            there = [block for block in waiting if block.page >= 0 and block.lacked_by(number)]
            refused = {*self._put(there, number)}
            for block in waiting:
                lacked = block.lacked_by(number)
                if lacked and block.page >= 0 and block not in refused:
                    continue  # an answer has come, which has counted it, or queued it again
                if lacked and not (block.page < 0 and self._bring(block, number)):
                    if not lane.takes(stack.copies.nearest_size(block)):
                        return  # the tier is away by now: the others wait
                    if block in stack.unwritten and block not in stack.provisional:
                        stack.miss_out(number)
                stack.unwritten.pop(block, None)
            if not waiting or waiting[-1].page < 0:
                break

    def _bring(self, block: Block, number: int) -> bool:
        """Copy a block that waited from memory to its tier; return whether the tier takes it."""
        near = self._stack.tiers[block.nearest].kind == "host"  # others take too long for a request
        return near and bool(self._stack.copy([block], block.nearest, number))

    def put_below(self, blocks: Sequence[Block], serves: Callable[[int], bool]) -> list[Block]:
        """Write pages to the nearest tiers that take them, and wait for the answers.

        Args:
            blocks: Pages on their device.
            serves: Returns whether the tier of a number may be used.

        Returns:
            The blocks that such a tier holds now as they are encoded on their device.
        """
        stack, deadline_s = self._stack, self._stack.mover.deadline_s
        usable = [number for number in range(len(stack.tiers)) if serves(number)]
        for block in blocks:
            for number in usable:
                if block.tiers >> number & 1 and not _alike(block, number):
                    continue  # that copy has another codec
                if stack.still_holds(block, number) or self._puts(block, number):
                    break
        while any(block.going for block in blocks) and self.drain(deadline_s):
            pass
        return [b for b in blocks if not b.going and any(_alike(b, n) for n in usable)]

    def _puts(self, block: Block, number: int) -> bool:
        stack = self._stack
        if stack.mover.lanes[number].rests or not self._admission.storable([block], number):
            return False
        stack.mover.await_room(number, stack.copies.nearest_size(block))
        return not self._put([block], number)

    def drain(self, timeout_s: float = 0.0) -> int:
        """Advance the transfers (see `Mover.drain`) and send waiting pages; return the answers."""
        stack, handled = self._stack, 0
        if stack.mover.lanes and stack.mover.busy:
            handled = stack.mover.drain(timeout_s)
            self.give_up_late()
        if stack.unwritten:
            self._write_out()
        if stack.troubles:
            self._say_troubles()
        return handled

    def flush(self, timeout_s: float, now_s: Callable[[], float] = compiling.now_s) -> int:
        """Wait until no page is being stored or waits to be.

        Pages that wait for a tier which is away keep waiting.

        Args:
            timeout_s: Longest wait.
            now_s: Clock of the wait; the default one stands still during compilation.

        Returns:
            Number of pages that still wait, or are on their way.
        """
        stack, lanes, end_s = self._stack, self._stack.mover.lanes, now_s() + timeout_s
        self.drain()
        while stack.mover.storing or (
            stack.unwritten and (n := self._admission.lasting()) >= 0 and not lanes[n].rests
        ):
            left_s = end_s - now_s()
            if left_s <= 0 or interrupts.waiting():
                break
            waiting = len(stack.unwritten)
            self._write_out()
            if len(stack.unwritten) == waiting:
                self.drain(min(left_s, _LONGEST_S))
        return self.unsaved

    @property
    def unsaved(self) -> int:
        """Return the number of pages that wait to be written, or are on their way."""
        return self._stack.mover.storing + len(self._stack.unwritten)

    def store_tail(self, block: Block, number: int, info: FrameInfo, body: memoryview) -> bool:
        """Write a tail to a persistent tier: now, or once its weights are proven; see `confirm`.

        Return False if the tier refuses it.
        """
        provisional = self._stack.provisional
        provisional.add(block)
        if block not in provisional:
            return self._store_or_miss(block, number, info, body)
        provisional.tails[block] = info, body
        if len(provisional.tails) > _MOST_TAILS:
            oldest = next(iter(provisional.tails))
            self._stack.miss_out(number)
            self._stack.delete(oldest)
            self._stack.dismiss(oldest)
        return True

    def _store_or_miss(self, block: Block, number: int, info: FrameInfo, body: memoryview) -> bool:
        refused = self._stack.store([(block, info, body)], number)
        if refused:
            self._stack.miss_out(number)
        self._stack.settle(block)
        return not refused

    def store_state(self, block: Block, info: FrameInfo, body: bytes) -> bool:
        """Store a state on the nearest tier and the first persistent one.

        Without a writable tier, a host tier of 1 GiB is added for states. Return False if no tier
        has room.
        """
        stack = self._stack
        stack.provisional.add(block)
        open_ones = [n for n in range(len(stack.tiers)) if self._admission.storable([block], n)]
        if not open_ones:
            stack.add(HostTier(_HOST_BYTES, name="states"), states_only=True)
            open_ones.append(len(stack.tiers) - 1)
        lasting = [n for n in open_ones if stack.tiers[n].kind != "host"]
        block.n_bytes = len(body)
        numbers = sorted({*open_ones[:1], *lasting[:1]})
        frame = block, info, memoryview(body)
        refused = [stack.store([frame], number) for number in numbers]
        if refused[-1]:
            stack.wait(block)
        stack.settle(block)
        return not all(refused)

    def _say_troubles(self) -> None:
        """Warn once of each tier that cannot store.

        Called between changes of state, as a warning may raise.
        """
        for name, reason in self._stack.troubles.items():
            if reason:
                self._stack.troubles[name] = ""
                code = getattr(errno, reason, None)
                why = reason if code is None else f"{reason}: {os.strerror(code)}"
                self._complain(
                    "store",
                    f"{name} stores no page now ({why}): what it lacks is computed anew after a"
                    ' restart. Make room or mend it; kv.stats()["tiers"] counts such pages as'
                    ' "dropped".',
                )

    def _complain(self, code: str, message: str) -> None:
        self._stack.bus.emit(Warned(code=code, message=message))
        warnings.warn(message, stacklevel=2)

    @property
    def unproven(self) -> int:
        """Return the number of pages that wait for proven weights to be written."""
        return len(self._stack.provisional) if self._admission.writes_to() >= 0 else 0

    def check_room(self) -> None:
        """Warn of each writable tier that can store no page of this model."""
        n_bytes = max(forms.likely_bytes for forms in self._stack.forms)
        for tier in self._stack.tiers:
            if tier.writable and (why := no_room(tier, n_bytes)):
                self._complain(
                    "room",
                    f"{tier.name} can store no page of this model: {why}. Give it more room, a"
                    " larger size, or leave it out.",
                )
