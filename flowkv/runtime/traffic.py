"""What the tiers hold, and what moves between them: saved, read, demoted, evicted, erased.

A block leaves a tier when that tier's policy says so; it is forgotten when no place holds it any
more. A tier that loses, damages or refuses a frame has missed, and nothing worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flowkv.core.clock import Clock
from flowkv.core.config import Config
from flowkv.core.errors import ConfigError
from flowkv.core.geometry import Geometry
from flowkv.observe.events import Bus, Demoted, Evicted, Failed, Quarantined, Stored
from flowkv.policy.base import Policy
from flowkv.runtime.forms import make_forms
from flowkv.runtime.index import UNKNOWN, Block, PrefixIndex
from flowkv.runtime.mover import Mover
from flowkv.runtime.states import LAYOUT
from flowkv.tiers.base import Completion, FrameInfo, Load, Outcome, Tier

_BENIGN = ("", "absent", "layout", "fidelity")
_REST_DEADLINES = 10
"""For so many deadlines a tier is left alone that missed one: waiting costs a tenth at most."""


class Traffic:
    """Blocks below the device. Callers hold the KV lock.

    Args:
        geometry: The model's layer groups.
        tiers: The stack, nearest first.
        policies: `policies(kind)` makes the policy of one place.
        clock: Time for the policies.
        bus: Where events go.
        config: The codec of sealed pages (also what a reader accepts, DESIGN D6), whether they are
            written down at once, and how long a load may take.

    Raises:
        ConfigError: A layer group cannot have the codec, or two tiers have one name.

    Attributes:
        forms: The codecs and layouts of each group's pages.
        fidelity: Index of the lossiest codec that is accepted.
        loaded_bytes: Bytes loaded, by tier name.
        stored_bytes: Bytes stored, by tier name.
        refused: Frames that a tier gave and that were refused, by tier name.
    """

    def __init__(
        self,
        geometry: Geometry,
        tiers: Sequence[Tier],
        *,
        policies: Callable[[str], Policy],
        clock: Clock,
        bus: Bus,
        config: Config,
    ) -> None:
        self.geometry = geometry
        self.forms = make_forms(geometry, config)
        self.fidelity = max(codec for forms in self.forms for codec in forms.layouts)
        self.clock, self.bus, self.write_back = clock, bus, config.write_back
        self.tiers: list[Tier] = []
        self.index, self.mover = PrefixIndex(), Mover([], config.load_deadline_s)
        self._policies, self.tier_policies = policies, list[Policy]()
        self._fixed: dict[int, None] = {}
        self._resting_ns: dict[int, int] = {}
        self._incoming: list[int] = []
        self._states_only: set[int] = set()
        self.loaded_bytes: dict[str, int] = {}
        self.stored_bytes: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        for tier in tiers:
            self.add_tier(tier)

    # ---- the stack

    def add_tier(self, tier: Tier, *, states_only: bool = False) -> None:
        """Puts a tier below the others and learns what it holds.

        Args:
            tier: Anything that keeps frames.
            states_only: No page is demoted to it.

        Raises:
            ConfigError: Another tier has its name.
        """
        if any(other.name == tier.name for other in self.tiers):
            raise ConfigError(f"two tiers are named {tier.name!r}", "Give each a name of its own")
        number = len(self.tiers)
        if states_only:
            self._states_only.add(number)
        self.tiers.append(tier)
        self.mover.tiers.append(tier)
        self._incoming.append(0)
        self.tier_policies.append(self._policies(tier.kind))
        fresh = []
        for entry in tier.scan():
            info = entry.info
            block = self.index.publish(entry.key, info.parent, info.group, info.kind)
            # Copies may differ; what one of them allows is allowed.
            block.fidelity = min(info.fidelity, block.fidelity if block.tiers else info.fidelity)
            block.enter(number, info.codec)
            if info.kind != "page":
                block.n_bytes, block.tail = entry.n_bytes, info.tokens
            elif info.fidelity <= self.fidelity and info.group < len(self.forms):
                self.forms[info.group].meet(info)
            block.tenant, block.namespace = info.tenant, info.namespace
            fresh.append(block)
        self.insert(self.tier_policies[number], fresh)

    def detach_tiers(self) -> None:
        """Leaves the tiers to another store; only device pages stay known here."""
        self.tiers.clear()
        self._incoming.clear()
        self.mover.forget()
        self.tier_policies.clear()
        for block in self.index:
            block.tiers = block.moving = 0
            self.settle(block)

    def answers(self, number: int) -> bool:
        """Whether a tier may be asked now: it owes nothing, and was in time lately."""
        rested = self.clock.now_ns() >= self._resting_ns.get(number, 0)
        return rested and not self.mover.overdue(number)

    @property
    def watches(self) -> bool:
        """Whether others write to one of the tiers."""
        return any(tier.shared for tier in self.tiers)

    def place(self, block: Block) -> str:
        """Name of the nearest place that holds a block; "" if none does."""
        if block.page >= 0:
            return "device"
        return self.tiers[block.nearest].name if block.tiers else ""

    # ---- what is known

    def discover(
        self, keys: Sequence[bytes], *, group: int, parent: bytes, tenant: bytes, namespace: bytes
    ) -> None:
        """Asks the tiers that others write to about pages that are not known here.

        Args:
            keys: Keys of consecutive pages.
            group: Their layer group.
            parent: Key above the first one.
            tenant: Tenant salt.
            namespace: Namespace digest.
        """
        for number, tier in enumerate(self.tiers):
            if not tier.shared:
                continue
            above, fresh = parent, []
            for key, there in zip(keys, tier.contains(keys), strict=True):
                known = self.index.find(key)
                if there and (known is None or not known.tiers >> number & 1):
                    block = self.index.publish(key, above, group)
                    block.tenant, block.namespace = tenant, namespace
                    block.enter(number, UNKNOWN)
                    fresh.append(block)
                above = key
            self.insert(self.tier_policies[number], fresh)

    def settle(self, block: Block) -> None:
        """Forgets a block that no place holds and none is about to."""
        if not block.somewhere and not block.moving and not block.gone:
            self.dismiss(block)
        self.protect(block)

    def dismiss(self, block: Block) -> None:
        """Takes a block out of the index; its slot is free for another one."""
        self._fixed.pop(block.slot, None)
        self.index.forget(block)

    def protect(self, block: Block) -> None:
        """Brings the slots that policies must not choose in line with what a block is used for."""
        if block.gone:
            return  # its slot may be another block's by now
        if block.kept or block.moving:
            self._fixed[block.slot] = None
        else:
            self._fixed.pop(block.slot, None)

    def keep(self, block: Block) -> None:
        """Lets no policy take a block from anywhere until `unkeep`."""
        block.kept += 1
        self.protect(block)

    def unkeep(self, block: Block) -> None:
        """Ends a `keep`."""
        block.kept -= 1
        self.protect(block)

    def insert(self, policy: Policy, blocks: Sequence[Block]) -> None:
        """Tells a policy that blocks became resident."""
        if blocks:
            slots = np.array([block.slot for block in blocks], np.int64)
            parents = np.array([self.index.slot(block.parent) for block in blocks], np.int64)
            policy.insert(self.clock.now_ns(), slots, parents)

    # ---- saving

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
        if not self._make_room(number, body.nbytes):
            return False

        n_bytes = self.tiers[number].frame_bytes(body.nbytes)

        def answered(answer: Completion) -> None:
            self._incoming[number] -= n_bytes
            done()
            self._saved(block, number, info.codec, answer)

        self.mover.store(number, block.key, info, body, answered)
        self._incoming[number] += n_bytes
        block.moving += 1
        self.protect(block)
        return True

    def save_state(self, block: Block, info: FrameInfo, body: bytes) -> bool:
        """Saves bytes on the nearest tier and the first persistent one; False if none has room."""
        writable = [n for n, tier in enumerate(self.tiers) if tier.writable]
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
        elif block.gone:
            tier.delete([block.key])
        else:
            # Where others write too, theirs may have been there before.
            block.enter(number, UNKNOWN if tier.shared else codec)
            self.insert(self.tier_policies[number], [block])
            stored = self.stored_bytes.get(tier.name, 0)
            self.stored_bytes[tier.name] = stored + answer.n_bytes
            self.bus.emit(
                Stored(tier=tier.name, pages=1, n_bytes=answer.n_bytes, seconds=answer.seconds)
            )
        self.settle(block)

    def _make_room(self, number: int, body_bytes: int) -> bool:
        tier, policy = self.tiers[number], self.tier_policies[number]
        self.mover.drain()  # so that what is on its way is not counted twice
        need = tier.frame_bytes(body_bytes)
        while tier.used_bytes() + self._incoming[number] + need > tier.capacity_bytes:
            if need > tier.capacity_bytes:
                return False
            victims = policy.evict(self.clock.now_ns(), 1, self._fixed)
            if victims is None:
                return False
            self._leave_tier(self.index.at(int(victims[0])), number, "space")
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
        layouts = [self.forms[block.group].layouts[c] for c in self.codecs_on(block, number)]
        return max((layout.page_bytes for layout in layouts), default=0)

    def read(self, block: Block, number: int) -> tuple[FrameInfo, bytes] | None:
        """A block's bytes from one tier, verified, into fresh memory; None if it cannot give them.

        Args:
            block: What to read.
            number: Tier in the stack.
        """
        if not self.answers(number):
            return None
        wished = [LAYOUT]
        if block.kind != "state":
            codecs = self.codecs_on(block, number)
            wished = [self.forms[block.group].layouts[codec].fingerprint() for codec in codecs]
        for layout in wished:
            body = bytearray(self.body_bytes(block, number))
            wanted = Load(block.key, memoryview(body), layout, self.fidelity)
            (answer,), _ = self.mover.load(number, [wanted], lambda _: None)
            if answer.outcome is Outcome.HIT and answer.info is not None:
                return answer.info, bytes(memoryview(body)[: answer.n_bytes])
            if answer.reason != "layout" or layout == wished[-1]:
                self.not_served(block, number, answer)
                break
        return None

    def not_served(self, block: Block, number: int, answer: Completion) -> None:
        """A tier did not give what it was believed to hold: a miss, counted, never an answer."""
        name = self.tiers[number].name
        if answer.outcome is Outcome.FAILED:  # it may still be there: ask again another time
            self.bus.emit(Failed(tier=name, operation="load", reason=answer.reason))
            if answer.reason.startswith("deadline"):
                rest_s = _REST_DEADLINES * self.mover.deadline_s
                self._resting_ns[number] = self.clock.now_ns() + round(rest_s * 1e9)
            return
        if answer.reason not in _BENIGN:
            self.refused[name] = self.refused.get(name, 0) + 1
            self.bus.emit(Quarantined(tier=name, key=block.key, reason=answer.reason))
        self.unlist(block, number)

    def unlist(self, block: Block, number: int) -> None:
        """A tier does not hold what was believed, or nothing that can be read here."""
        self.tier_policies[number].remove(np.array([block.slot], np.int64))
        block.tiers &= ~(1 << number)
        self.settle(block)

    # ---- leaving

    def expire(self) -> None:
        """Takes blocks whose lease has run out off the tiers where it ran out."""
        for number, policy in enumerate(self.tier_policies):
            for slot in policy.expired(self.clock.now_ns()).tolist():
                block = self.index.at(slot)
                if not block.kept and not block.moving:
                    policy.remove(np.array([slot], np.int64))
                    self._leave_tier(block, number, "lease")

    def erase(self, block: Block) -> None:
        """Erases a block from every tier."""
        slot = np.array([block.slot], np.int64)
        for number, tier in enumerate(self.tiers):
            if block.tiers >> number & 1:
                self.tier_policies[number].remove(slot)
                if tier.writable:
                    tier.delete([block.key])
        block.tiers = 0

    def _leave_tier(self, block: Block, number: int, reason: str) -> None:
        if reason == "space" and block.page < 0 and not block.tiers >> (number + 1):
            self._demote(block, number)
        name, n_bytes = self.tiers[number].name, self.body_bytes(block, number)
        self.tiers[number].delete([block.key])
        block.tiers &= ~(1 << number)
        self.bus.emit(Evicted(tier=name, pages=1, n_bytes=n_bytes, reason=reason))
        self.settle(block)

    def _demote(self, block: Block, number: int) -> None:
        for lower in range(number + 1, len(self.tiers)):
            if self.tiers[lower].writable and self.admits(block, lower):
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
        slot = np.array([block.slot], np.int64)
        return bool(self.tier_policies[number].admit(self.clock.now_ns(), slot)[0])
