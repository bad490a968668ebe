"""What moves between pages and tiers: saved, read, demoted, evicted, erased.

A block leaves a tier when that tier's policy says so. A tier that loses, damages or refuses a frame
has missed, and nothing worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

from flowkv.core.errors import StoreError
from flowkv.observe.events import Demoted, Evicted, Failed, Quarantined, Stored
from flowkv.runtime.index import UNKNOWN, Block
from flowkv.runtime.places import as_slots
from flowkv.runtime.residency import Residency
from flowkv.runtime.states import BUNDLE_LAYOUT, LAYOUT
from flowkv.tiers.base import Completion, FrameInfo, Load, Outcome
from flowkv.tiers.host import HostTier

_BENIGN = ("", "absent", "layout", "fidelity")
_REST_DEADLINES = 10
"""For so many deadlines a tier is left alone that missed one: waiting costs a tenth at most."""
_HOST_BYTES = 1 << 30
_REST_S = 1.0
"""So long a tier is left alone that says that it does not answer now."""
AWAY = ("breaker", "closed")
"""What a tier says that is not there now, and may be later."""


class Source(NamedTuple):
    """Where a page may be read from, and as what.

    Attributes:
        tier: Number in the stack.
        codec: Index of the codec that its copy has, or is guessed to have.
        last: No other codec is left to be guessed.
    """

    tier: int
    codec: int
    last: bool


class Traffic(Residency):
    """Moves blocks to and from the tiers. Callers hold the KV lock.

    Args:
        *args: See `Residency`.
        **options: See `Residency`.

    Attributes:
        loaded_bytes: Bytes loaded, by tier name.
        stored_bytes: Bytes stored, by tier name.
        refused: Frames that a tier gave and that were refused, by tier name.
        dropped: Pages that should have been saved and were not, as a tier was busy or away.
        unpaid: Pages that were not saved as loading them could never pay, by tier name.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.loaded_bytes: dict[str, int] = {}
        self.stored_bytes: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.unpaid: dict[str, int] = {}
        self._incoming: dict[int, int] = {}
        super().__init__(*args, **options)

    def detach_tiers(self) -> None:
        """Leaves the tiers to another store; only device pages stay known here."""
        self._incoming.clear()
        super().detach_tiers()

    # ---- saving

    def takes(self, number: int, body_bytes: int) -> bool:
        """Whether a tier could be given a frame now; if not, it is busy or away."""
        return not self.rests(number) and self.mover.has_room(number, body_bytes)

    def outlives(self, number: int) -> bool:
        """Whether a tier can be read after the process is gone, or by others."""
        return self.tiers[number].kind != "host" or self.tiers[number].shared

    def miss_out(self, number: int) -> None:
        """Counts a page that a tier should have got."""
        name = self.tiers[number].name
        self.dropped[name] = self.dropped.get(name, 0) + 1

    def worth_saving(self, block: Block, number: int) -> bool:
        """Whether a page can ever be worth loading from a tier; if not, that is counted."""
        if block.kind != "page" or block.group >= len(self.forms):
            return True
        name = self.tiers[number].name
        if self.pays(name, self._prompt_bytes, partial(self.index.reach, block)):
            return True
        self.unpaid[name] = self.unpaid.get(name, 0) + 1
        return False

    @cached_property
    def _prompt_bytes(self) -> int:
        """What each page of a long prompt takes, in all groups whose pages it needs all of."""
        groups = zip(self.forms, self.geometry.groups, strict=True)
        whole = [forms for forms, group in groups if group.window is None] or self.forms
        return sum(forms.layouts[forms.ladder.idle].page_bytes for forms in whole)

    def save(
        self,
        block: Block,
        number: int,
        info: FrameInfo,
        body: memoryview,
        done: Callable[[], None] = lambda: None,
    ) -> bool:
        """Writes a block to a tier in the background; False if there is no room.

        Args:
            block: What.
            number: Tier in the stack.
            info: What its frame says about itself.
            body: Its bytes; they must stay as they are until `done`.
            done: Called when the tier has answered.
        """
        if block in self.provisional and self.outlives(number):
            return False
        if not self.takes(number, body.nbytes) or not self._make_room(number, body.nbytes):
            return False

        n_bytes = self.tiers[number].frame_bytes(body.nbytes)

        def answered(answer: Completion) -> None:
            self._incoming[number] -= n_bytes
            done()
            self._saved(block, number, info.codec, answer)

        if not self.mover.store(number, block.key, info, body, answered):
            return False
        self._incoming[number] = self._incoming.get(number, 0) + n_bytes
        block.moving += 1
        self.protect(block)
        return True

    def save_state(self, block: Block, info: FrameInfo, body: bytes) -> bool:
        """Saves bytes on the nearest tier and the first persistent one; False if none has room.

        Without any tier, a host tier of 1 GiB is made for them.
        """
        self.provisional.add(block)
        held = block in self.provisional
        usable = [n for n, tier in enumerate(self.tiers) if tier.writable]
        if not usable or (held and all(map(self.outlives, usable))):
            self.add_tier(HostTier(_HOST_BYTES, name="states"), states_only=True)
            usable.append(len(self.tiers) - 1)
        writable = [n for n in usable if not (held and self.outlives(n))]
        lasting = [n for n in writable if self.tiers[n].kind != "host"]
        block.n_bytes = len(body)
        numbers = sorted({*writable[:1], *lasting[:1]})
        saved = [self.save(block, number, info, memoryview(body)) for number in numbers]
        self.settle(block)
        return any(saved)

    def _saved(self, block: Block, number: int, codec: int, answer: Completion) -> None:
        block.moving -= 1
        tier = self.tiers[number]
        if answer.outcome is not Outcome.STORED:
            self.bus.emit(Failed(tier=tier.name, operation="store", reason=answer.reason))
            if answer.reason in AWAY:
                self.rest(number, _REST_S)
        elif block.gone:
            self._take_back(block, number)
        else:
            # Where others write too, theirs may have been there before.
            block.enter(number, UNKNOWN if tier.shared else codec)
            self.insert([block], number)
            stored = self.stored_bytes.get(tier.name, 0)
            self.stored_bytes[tier.name] = stored + answer.n_bytes
            self.bus.emit(
                Stored(tier=tier.name, pages=1, n_bytes=answer.n_bytes, seconds=answer.seconds)
            )
        self.settle(block)

    def _take_back(self, block: Block, number: int) -> None:
        """Erases what was forgotten while it was stored."""
        tier = self.tiers[number]
        try:
            tier.erase([block.key])
        except StoreError as error:
            tier.delete([block.key])
            self.bus.emit(Failed(tier=tier.name, operation="erase", reason=error.problem))

    def _make_room(self, number: int, body_bytes: int) -> bool:
        tier, place = self.tiers[number], self.tier_places[number]
        self.mover.collect()  # so that what is on its way is not counted twice
        need = tier.frame_bytes(body_bytes)
        while tier.used_bytes() + self._incoming.get(number, 0) + need > tier.capacity_bytes:
            if need > tier.capacity_bytes:
                return False
            if (stranger := self.stranger(number)) is not None:
                self.remove(stranger, number)
                self._leave_tier(stranger, number, "unused")
                continue
            victims = place.evict(self.now_ns(), 1)
            if victims is not None:
                self._leave_tier(self.index.at(int(victims[0])), number, "space")
            elif not self.adopt(number):
                return False
        return True

    # ---- reading

    def codecs_on(self, block: Block, number: int) -> tuple[int, ...]:
        """Indices of the codecs that a tier's copy of a page may have; none if it is unreadable."""
        if block.group >= len(self.forms):
            return ()  # of another model
        forms, codec = self.forms[block.group], block.codec_on(number)
        if codec == UNKNOWN:
            return forms.likely
        return (codec,) if codec in forms.layouts else ()

    def body_bytes(self, block: Block, number: int) -> int:
        """Most bytes of a block's body on a tier; 0 if that cannot be known."""
        if block.n_bytes:
            return block.n_bytes
        moving = self.mover.on_the_way(block.key) if block.moving else None
        if moving is not None:
            return moving.store.body.nbytes
        layouts = [self.forms[block.group].layouts[c] for c in self.codecs_on(block, number)]
        return max((layout.page_bytes for layout in layouts), default=0)

    def sources(self, block: Block) -> Iterator[Source]:
        """Where a page may be read from now, best first; ask for the next when one did not serve.

        Copies that nobody can read here are struck off.
        """
        moving = self.mover.on_the_way(block.key) if block.moving else None
        if moving is not None and moving.store.info.codec in self.forms[block.group].layouts:
            yield Source(moving.tier, moving.store.info.codec, True)
        for number in range(len(self.tiers)):
            if block.tiers >> number & 1:
                codecs = self.codecs_on(block, number)
                if not codecs:
                    self.unlist(block, number)
                elif self.answers(number):
                    for codec in codecs:
                        if block.tiers >> number & 1:
                            yield Source(number, codec, codec == codecs[-1])

    def read(self, block: Block, number: int) -> tuple[FrameInfo, bytes] | None:
        """A block's bytes from one tier, verified, into fresh memory; None if it cannot give them.

        Args:
            block: What to read.
            number: Tier in the stack.
        """
        if not self.answers(number):
            return None
        wished = [BUNDLE_LAYOUT if block.kind == "weights" else LAYOUT]
        if block.kind == "page":
            codecs = self.codecs_on(block, number)
            wished = [self.forms[block.group].fingerprints[codec] for codec in codecs]
        for layout in wished:
            body = bytearray(self.body_bytes(block, number))
            wanted = Load(block.key, memoryview(body), layout, self.fidelity)
            (answer,), _ = self.mover.load([(number, wanted)], lambda _: None)
            if answer.outcome is Outcome.HIT and answer.info is not None:
                self.count_loaded(number, answer.n_bytes)
                return answer.info, bytes(memoryview(body)[: answer.n_bytes])
            if answer.reason != "layout" or layout == wished[-1]:
                self.not_served(block, number, answer)
                break
        return None

    def count_loaded(self, number: int, n_bytes: int) -> None:
        """Counts bytes that a tier gave."""
        name = self.tiers[number].name
        self.loaded_bytes[name] = self.loaded_bytes.get(name, 0) + n_bytes

    def not_served(self, block: Block, number: int, answer: Completion) -> None:
        """A tier did not give what it was believed to hold: a miss, counted, never an answer."""
        name = self.tiers[number].name
        if answer.outcome is Outcome.FAILED:  # it may still be there: ask again another time
            self.bus.emit(Failed(tier=name, operation="load", reason=answer.reason))
            if answer.reason.startswith("deadline"):
                self.rest(number, _REST_DEADLINES * (answer.seconds or self.mover.deadline_s))
            elif answer.reason in AWAY:
                self.rest(number, _REST_S)
            return
        if answer.reason not in _BENIGN:
            self.refused[name] = self.refused.get(name, 0) + 1
            self.bus.emit(Quarantined(tier=name, key=block.key, reason=answer.reason))
        self.unlist(block, number)

    def unlist(self, block: Block, number: int) -> None:
        """A tier does not hold what was believed, or nothing that can be read here."""
        self.remove(block, number)
        block.tiers &= ~(1 << number)
        self.settle(block)

    # ---- leaving

    def expire(self) -> None:
        """Takes blocks whose lease has run out off the tiers where it ran out."""
        for number, place in enumerate(self.tier_places):
            for slot in place.expired(self.now_ns()):
                self._leave_tier(self.index.at(slot), number, "lease")

    def shed(self) -> None:
        """Has tenants give up what they have above their quotas."""
        for number, place in enumerate(self.tier_places):
            for slot in place.surplus(self.now_ns()):
                self._leave_tier(self.index.at(slot), number, "quota")

    def delete(self, block: Block) -> None:
        """Has every tier forget a block."""
        for number, tier in enumerate(self.tiers):
            if block.tiers >> number & 1 and tier.writable:
                tier.delete([block.key])
        self.strike(block)

    def strike(self, block: Block) -> None:
        """Takes a block off the lists of all tiers, which are not told."""
        for number in range(len(self.tiers)):
            if block.tiers >> number & 1:
                self.remove(block, number)
        block.tiers = 0

    def _leave_tier(self, block: Block, number: int, reason: str) -> None:
        if reason not in ("lease", "unused") and block.page < 0 and not block.tiers >> (number + 1):
            self._demote(block, number)
        name, n_bytes = self.tiers[number].name, self.body_bytes(block, number)
        self.tiers[number].delete([block.key])
        block.tiers &= ~(1 << number)
        self.bus.emit(Evicted(tier=name, pages=1, n_bytes=n_bytes, reason=reason))
        self.settle(block)

    def _demote(self, block: Block, number: int) -> None:
        for lower in range(number + 1, len(self.tiers)):
            if not self.tiers[lower].writable or self.rests(lower):
                continue
            if block in self.provisional and self.outlives(lower):
                continue
            if self.worth_saving(block, lower) and self.admits(block, lower):
                found = self.read(block, number)
                if found is not None and self.save(block, lower, found[0], memoryview(found[1])):
                    source, tier = self.tiers[number].name, self.tiers[lower].name
                    n_bytes = len(found[1])
                    self.bus.emit(Demoted(source=source, tier=tier, pages=1, n_bytes=n_bytes))
                return

    def admits(self, block: Block, number: int) -> bool:
        """Whether the policy of a tier finds a block worth its bytes there."""
        if block.kind == "page" and number in self._states_only:
            return False
        policy = self.tier_places[number].policy
        return bool(policy.admit(self.now_ns(), as_slots([block.slot]))[0])
