"""The page store: where blocks lie, what is given up for new pages, and where that goes.

Identity and residency are decided here, by one writer at a time (the KV lock); policies only order
slots.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache.index import BUNDLE_LAYOUT, LAYOUT, UNKNOWN, Block, PrefixIndex, SwappedCopy
from flowkv.cache.mover import CopyMark, IOPriority, Mover
from flowkv.cache.pool import AT_ONCE_BYTES, PagePool, download, make_forms
from flowkv.core import compiling, interrupts
from flowkv.core.clock import Clock
from flowkv.core.config import Config, format_size
from flowkv.core.errors import CapacityError, ConfigError, StoreError
from flowkv.core.geometry import CODEC_SHIFT, GRANULE_BYTES, Geometry, granule_of
from flowkv.core.keys import ROOT, tenant_salt
from flowkv.observe.events import Bus, Demoted, Evicted, Failed, Quarantined, Stored, Warned
from flowkv.policy.base import NO_SLOTS, Policy, Slots
from flowkv.policy.restore import LoadGate
from flowkv.policy.tenants import Tenants
from flowkv.tiers.base import Entry, FrameInfo, Load, Outcome, Tier, TierAnswer, no_room
from flowkv.tiers.erasure_log import ErasureLog
from flowkv.tiers.host import HostTier
from flowkv.tiers.remote.erasures import RemoteErasures

# Pages whose weights are not proven yet: known in the process, kept out of all other places.
#
# Writes to weights that PyTorch does not count are found by reading the weights again. A page is
# proven once such a reading, begun after the page became known, has found all weights unchanged.


class Provisional:
    """Blocks that no lasting or shared tier may be given yet. Callers hold the KV lock.

    Attributes:
        active: Blocks that become known from now on have to be proven.
    """

    def __init__(self) -> None:
        self.active = False
        self._known: dict[Block, bool] = {}  # whether a reading has begun since it became known

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, block: Block) -> bool:
        return block in self._known

    def add(self, block: Block) -> None:
        """A block became known."""
        if self.active:
            self._known[block] = False

    def discard(self, block: Block) -> None:
        """A block is known no more."""
        self._known.pop(block, None)

    def begin(self) -> None:
        """A reading of all weights begins: what is known by now waits for its end."""
        self._known = dict.fromkeys(self._known, True)

    def confirm(self) -> list[Block]:
        """The reading has ended, and nothing had changed; returns what is proven by it."""
        proven = [block for block, read in self._known.items() if read]
        self._known = {block: False for block, read in self._known.items() if not read}
        return proven

    def reject(self) -> list[Block]:
        """Weights had changed: returns what may have been computed by others than it is named."""
        rejected, self._known = list(self._known), {}
        return rejected


# One place that blocks lie in: its policy, and what that may not give up there now.


class PolicyPlace:
    """A policy and the slots that are protected from it. Callers hold the KV lock.

    Blocks are held and let go far more often than room is made, and mostly both between two
    evictions: so the policy is told of pins where it is about to choose, and of the changes only.
    A policy that does not count pins gets all of them with every choice.

    Args:
        name: Of the device or tier.
        kind: "gpu", "host", "disk" or "remote".
        policy: Chooses what the place keeps.

    Attributes:
        held: Slots that must not be given up.
    """

    __slots__ = ("_changed", "_counts", "_told", "held", "kind", "name", "policy")

    def __init__(self, name: str, kind: str, policy: Policy) -> None:
        self.name, self.kind, self.policy = name, kind, policy
        self.held: dict[int, None] = {}
        self._counts = type(policy).pin is not Policy.pin
        self._told: dict[int, None] = {}
        self._changed: dict[int, None] = {}

    def hold(self, slot: int) -> None:
        """Protects a slot, resident or not, until `let_go`."""
        if slot not in self.held:
            self.held[slot] = self._changed[slot] = None

    def let_go(self, slot: int) -> None:
        """Protects a slot no longer."""
        if slot in self.held:
            del self.held[slot]
            self._changed[slot] = None

    def evict(self, now_ns: int, n: int) -> Slots | None:
        """`n` victims of the policy, or None."""
        if not self._counts:
            return self.policy.evict(now_ns, n, self.held)
        self._tell()
        return self.policy.evict(now_ns, n)

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Up to `n` ends of chains that are not resident and worth bringing here, best first."""
        return self.policy.wanted(now_ns, n)

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Gives up to `n` victims to a prefetch: only what is worth less than that."""
        if not self._counts:
            return self.policy.displace(now_ns, n, rate, {*self.held, *protected})
        self._tell()
        return self.policy.displace(now_ns, n, rate, protected)

    def expired(self, now_ns: int) -> list[int]:
        """Slots whose lease has run out here and that nothing protects, removed."""
        slots = [slot for slot in self.policy.expired(now_ns).tolist() if slot not in self.held]
        if slots:
            self.policy.remove(as_slots(slots))
        return slots

    def surplus(self, now_ns: int) -> list[int]:
        """Slots that go as a tenant has more than its quota allows, removed."""
        if not isinstance(self.policy, Tenants):
            return []
        self._tell()
        slots: list[int] = self.policy.shed(now_ns, () if self._counts else self.held).tolist()
        return slots

    def forget(self, slots: Sequence[int]) -> None:
        """Nobody knows the blocks of these slots any more."""
        for slot in slots:
            self.let_go(slot)
        self._tell()
        self.policy.forget(as_slots(slots))

    def _tell(self) -> None:
        if not self._changed or not self._counts:
            return
        pins = [slot for slot in self._changed if slot in self.held and slot not in self._told]
        ends = [slot for slot in self._changed if slot in self._told and slot not in self.held]
        self._changed.clear()
        if pins:
            self.policy.pin(as_slots(pins))
            self._told.update(dict.fromkeys(pins))
        if ends:
            self.policy.unpin(as_slots(ends))
            for slot in ends:
                del self._told[slot]


def as_slots(slots: Sequence[int]) -> Slots:
    """Slot numbers as policies take them."""
    return np.array(slots, np.int64) if len(slots) else NO_SLOTS


# Which blocks lie where: the stack of tiers, what each holds, and what its policy may not take.
#
# A block is forgotten when no place holds it any more.

_MOST_LISTED = 1 << 16
"""So many frames of a remote tier are listed at start; others are found when they are asked for."""
_ADOPTED, _LOOKED_AT = 64, 1 << 12
"""Frames of others that are adopted at a time, and those that are looked at for it."""


# Which restored pages are to be recomputed and compared, and what came of it
# (`flowkv.cache.audit`).

MOST_WAITING = 1 << 12
"""Sampled pages that wait for their audit at most; the oldest are forgotten."""


class Verdict(NamedTuple):
    """The distance of a page from what the model computes in its place.

    Attributes:
        error: Greatest distance of a token's keys or values, relative to their size.
        bound: How large that may be there.
    """

    error: float
    bound: float

    @property
    def sound(self) -> bool:
        """Whether the page is what the model computes, as far as that can be told."""
        return self.error <= self.bound


class Samples:
    """The sample of restored pages. Callers hold the KV lock.

    A page is in the sample for good or not at all, as its key says: the same pages in every run
    and in every process. Keys are SHA-256, so that the share is met whatever the prompts are.

    Args:
        share: Of all restored pages, 0 to 1; 0 samples none.

    Attributes:
        audited: Pages that were recomputed and compared.
        mismatches: Those that were not what the model computes.
        skipped: Those that could not be recomputed.
        worst: The greatest error as a share of its bound, mismatches left out.
    """

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self._border = round(share * 2.0**64)
        self._came: dict[bytes, str] = {}
        self.audited = self.mismatches = self.skipped = 0
        self.worst = 0.0

    def __len__(self) -> int:
        return len(self._came)

    def has(self, key: bytes) -> bool:
        """Whether a page belongs to the sample."""
        return int.from_bytes(key[:8], "little") < self._border

    def came(self, key: bytes, tier: str) -> None:
        """A page was restored from a tier."""
        if self._border and self.has(key):
            self._came.pop(key, None)
            self._came[key] = tier
            if len(self._came) > MOST_WAITING:
                del self._came[next(iter(self._came))]

    def waiting(self, key: bytes) -> bool:
        """Whether a page was restored and is still to be audited."""
        return key in self._came

    def take(self, key: bytes) -> str:
        """The tier that a page was restored from, which is audited now; "" if it need not be."""
        return self._came.pop(key, "")

    def skip(self, key: bytes) -> None:
        """A page cannot be audited."""
        self.skipped += bool(self.take(key))

    def judged(self, verdict: Verdict) -> None:
        """A page was compared."""
        self.audited += 1
        if not verdict.sound:
            self.mismatches += 1
        elif verdict.bound:
            self.worst = max(self.worst, verdict.error / verdict.bound)


# What moves between pages and tiers: saved, read, demoted, evicted, erased.
#
# A block leaves a tier when that tier's policy says so. A tier that loses, damages or refuses a
# frame has missed, and nothing worse.

_BENIGN = ("", "absent", "layout", "fidelity")
_REST_DEADLINES = 10
"""For so many deadlines a tier is left alone that missed one: waiting costs a tenth at most."""
_MOST_BODIES = 16
_HOST_BYTES = 1 << 30
_REST_S = 1.0
"""So long a tier is left alone that says that it does not answer now."""
AWAY = ("breaker", "closed")
"""What a tier says that is not there now, and may be later."""
_CODES = {name: code for code, name in errno.errorcode.items()}
_NO_ROOM = ("full", "remote")
"""What an engine says whose memory or disk is full; of a local tier, that is a passing state."""


_Copied = tuple[memoryview, CopyMark]
"""The bytes of a page in host memory, and the copy that fills them."""


class ReadFrom(NamedTuple):
    """A place from which a page may be read, and its form there.

    Attributes:
        tier: Number in the stack.
        codec: Index of the codec that its copy has, or is guessed to have.
        last: No other codec is left to be guessed.
    """

    tier: int
    codec: int
    last: bool


# Pages that were prefetched, until it is known whether that was of use.


class PrefetchedUnused:
    """Pages that prefetches brought and that nobody has used yet. Callers hold the KV lock.

    What becomes of them is told to the guard of the tier they came from, which stops prefetching
    where it costs more than it saves.

    Args:
        mover: Has the guards.
        on_leave: Told of those that left unused.
    """

    def __init__(self, mover: Mover, on_leave: Callable[[Block], None]) -> None:
        self._mover, self._on_leave = mover, on_leave
        self._pages: dict[Block, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, block: Block, tier: int, n_bytes: int) -> None:
        """A prefetch brought a page from a tier."""
        self._pages[block] = tier, n_bytes

    def end(self, block: Block, *, used: bool) -> None:
        """Somebody uses a page, prefetched or not; or it left its device."""
        tier, n_bytes = self._pages.pop(block, (-1, 0))
        if 0 <= tier < len(self._mover.lanes):
            lane = self._mover.lanes[tier]
            (lane.guard.used if used else lane.guard.wasted)(lane.clock_ns(), n_bytes)
            if not used:
                self._on_leave(block)


# The devices: which block lies on which page there, and who uses it.


_BATCH_SHARE, _BATCH_PAGES = 64, 32
"""Pages are given up in batches, of this share of the pool and this number of pages at most: a
call costs as much as the choice of some pages."""
_ATTEMPTS = 4
_LONGEST_S = 0.1


class PageStore:
    """Blocks over device pools and tiers: where they lie, how they move. Callers hold the KV lock.

    Args:
        geometry: The model's layer groups.
        pools: One pool per device name.
        tiers: The stack below them, nearest first.
        policies: `policies(kind, capacity_bytes)` makes the policy of one place.
        clock: Time for the policies.
        bus: Where events go.
        config: The codec of sealed pages (also what a reader accepts, DESIGN D6), whether they are
            written down at once, and how long a load may take.
        gate: Knows what loads and steps take, and whether a page can ever be worth loading.
        sends: Whether pages are written for others, whose rates nobody here knows.
        on_drop: Told the slots that name nothing any more.
        on_unused: Told of pages that were prefetched and left their device unused.
        give_up_late: Gives up loads that are overdue, so that nothing waits behind them.

    Raises:
        ConfigError: A layer group cannot have the codec, or two tiers have one name.

    Attributes:
        forms: The codecs and layouts of each group's pages.
        fidelity: Index of the lossiest codec that is accepted.
        mover: Transfers to and from the tiers.
        tier_places: The tiers as policies see them, in the order of the stack.
        swapped: Pages on their device that suspended sequences need as they are now.
        tails: What closed sequences left unfilled, the oldest first, and the page of each group. No
            policy is told of them; what tiers are given are copies, see `save_tail`.
        samples: Restored pages that are to be audited.
        coming: Who has a device page for a block that is on its way (`load.PageLoad`).
        provisional: Blocks that must not leave the process yet.
        erasure_logs: Of tiers that other caches use, too: what was erased there.
        behind: Others erased something, and stores wait until it is dropped here.
        loaded_bytes: Bytes loaded, by tier name.
        stored_bytes: Bytes stored, by tier name.
        refused: Frames that a tier gave and that were refused, by tier name.
        dropped: Pages that should have been saved and were not: a tier was busy, away or full.
        lost: Those of them that the tier which lasts should have got.
        unpaid: Pages that were not saved as loading them could never pay, by tier name.
    """

    def __init__(  # noqa: PLR0913 - what a store stands on is named where it is made
        self,
        geometry: Geometry,
        pools: dict[str, PagePool],
        tiers: Sequence[Tier],
        *,
        policies: Callable[[str, int], Policy],
        clock: Clock,
        bus: Bus,
        config: Config,
        gate: LoadGate,
        sends: Callable[[], bool],
        on_drop: Callable[[Sequence[int]], None],
        on_unused: Callable[[Block], None],
        give_up_late: Callable[[], None],
    ) -> None:
        self.geometry = geometry
        self.erasure_logs: dict[int, ErasureLog | RemoteErasures] = {}
        self.behind = False
        self.forms = make_forms(geometry, config)
        self.fidelity = max(codec for forms in self.forms for codec in forms.layouts)
        self.clock, self.bus, self.write_back = clock, bus, config.write_back
        self.overflows = config.overflow
        self.tiers: list[Tier] = []
        self.index, self.mover = PrefixIndex(self._drop), Mover(config.load_deadline_s, gate.rates)
        self._policies, self.tier_places = policies, list[PolicyPlace]()
        self._gate, self._sends, self._on_drop = gate, sends, on_drop
        self._tenants: dict[bytes, int] = {}
        for name in config.quotas:  # these have the first numbers
            self.tenant(tenant_salt(name, config.secret_bytes))
        self._moment_ns: int | None = None
        self._resting_ns: dict[int, int] = {}
        self.samples = Samples(config.audit)
        self.coming: dict[Block, list[Any]] = {}
        self._condemned: set[tuple[int, bytes]] = set()
        self._states_only: set[int] = set()
        self.provisional = Provisional()
        self._bodies: dict[Block, tuple[FrameInfo | None, memoryview]] = {}  # of tails among them
        self._strangers: dict[int, list[Block]] = {}
        self.loaded_bytes, self.stored_bytes = Counter[str](), Counter[str]()
        self.refused, self.dropped, self.unpaid = (Counter[str]() for _ in range(3))
        self.lost = 0
        self._troubles: dict[str, str] = {}  # why a tier stores nothing; "" once that was said
        self._incoming = Counter[int]()
        self.pools = pools
        self.device_places = {
            device: PolicyPlace(device, "gpu", policies("gpu", pool.capacity_bytes()))
            for device, pool in pools.items()
        }
        self._pools = [pools[group.device] for group in geometry.groups]
        self._places = [self.device_places[group.device] for group in geometry.groups]
        self.defragment_bytes = config.defragment_bytes
        self._orphans: set[Block] = set()
        self.tails: dict[Block, list[int]] = {}
        self.swapped: dict[Block, SwappedCopy] = {}
        self._idle = dict.fromkeys(pools, 0)
        self._lent: dict[tuple[str, int], int] = {}
        self._awaited: set[tuple[str, int]] = set()
        self._unwritten: dict[Block, None] = {}
        self._give_up_late = give_up_late
        self._held_back = False  # until the first page that would not pay
        self.prefetched_unused = PrefetchedUnused(self.mover, on_unused)
        for tier in tiers:
            self.add_tier(tier)

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
        if (found := getattr(tier, "erasure_log", None)) is None:
            self.mover.add(tier)
        else:  # before it is listed: what is erased from now on is heard
            log = found if isinstance(found, RemoteErasures) else ErasureLog(found)
            self.erasure_logs[number] = log
            self.mover.add(tier, partial(self._storing, log))
        policy = self._policies(tier.kind, tier.capacity_bytes)
        self.tier_places.append(PolicyPlace(tier.name, tier.kind, policy))
        most = _MOST_LISTED if tier.kind == "remote" else None
        listed = list(islice(tier.scan(), most))
        for entry in listed:  # before kernels are told which forms there are
            if entry.info.fidelity <= self.fidelity and entry.info.group < len(self.forms):
                self.forms[entry.info.group].meet(entry.info)
        self._enter(number, listed)

    @contextmanager
    def _storing(self, log: ErasureLog | RemoteErasures) -> Iterator[bool]:
        """Whether a tier may be given frames: nobody erases there, and all that was is known."""
        with log.storing() as free:
            self.behind |= free and log.changed()
            yield free and not self.behind

    def outdated(self) -> bool:
        """Whether others erased something that is not dropped here."""
        for log in self.erasure_logs.values():  # noqa: SIM110 - a microsecond less for each `open`
            if log.changed():
                return True
        return False

    def _enter(self, number: int, entries: Iterable[Entry]) -> None:
        """Makes frames that a tier holds known, the oldest first."""
        trees, fresh = dict[bytes, list[Block]](), list[list[Block]]()
        in_use = self._knows(number)
        for entry in entries:
            info = entry.info
            block = self.index.publish(entry.key, info.parent, info.group, info.kind)
            # Copies may differ; what one of them allows is allowed.
            block.fidelity = min(info.fidelity, block.fidelity if block.tiers else info.fidelity)
            block.enter(number, info.codec)
            if info.kind != "page":
                block.n_bytes, block.tail = entry.n_bytes, info.tokens
            block.tenant, block.namespace = info.tenant, info.namespace
            if not in_use(info.namespace):
                self._strangers.setdefault(number, []).append(block)
            tree = trees.get(info.parent)
            if tree is None:
                fresh.append(tree := [])
            trees[entry.key] = tree
            tree.append(block)
        # To a policy, what comes last in one call is a leaf, and goes first: the oldest tree last.
        blocks = [block for tree in reversed(fresh) for block in tree]
        self.insert(blocks, number)

    def _knows(self, number: int) -> Callable[[bytes], bool]:
        """What says whether a namespace is in use, as far as a tier knows."""
        known: Callable[[bytes], bool] = getattr(self.tiers[number], "in_use", lambda _: True)
        return lru_cache(known)

    def stranger(self, number: int) -> Block | None:
        """A block on a tier that no cache can ask for any more, as far as the tier knows.

        Such as those of another version, which named pages otherwise: they go before all others.
        """
        left, in_use = self._strangers.get(number, []), self._knows(number)
        while left:
            block = left.pop()
            there = not block.gone and block.tiers >> number & 1
            if there and not block.kept and not block.moving and not in_use(block.namespace):
                return block
        return None

    def learn(self, number: int, meant: Callable[[FrameInfo], bool]) -> None:
        """Makes those frames known that a tier lists, are meant, and are not known there."""
        entries = [entry for entry in self.tiers[number].scan() if meant(entry.info)]
        self._enter(number, [entry for entry in entries if not self._listed(entry.key, number)])

    def _listed(self, key: bytes, number: int) -> bool:
        known = self.index.find(key)
        # What is known and not believed to be there is just being moved.
        return known is not None and bool(known.tiers >> number & 1 or known.moving)

    def adopt(self, number: int) -> int:
        """Learns of the oldest frames on a tier that others put there; returns how many.

        For where room is needed and nothing known may go: then the policy judges theirs, too.
        """
        if not self.tiers[number].shared:
            return 0
        found = []
        for entry in islice(self.tiers[number].scan(), _LOOKED_AT):
            if not self._listed(entry.key, number):
                found.append(entry)
                if len(found) == _ADOPTED:
                    break
        self._enter(number, found)
        return len(found)

    def detach_tiers(self) -> None:
        """Leaves the tiers to another store; only device pages stay known here."""
        self.close_logs()
        self._incoming.clear()
        self.tiers.clear()
        self._strangers.clear()
        self.mover.forget()
        self.tier_places.clear()
        for block in self.index:
            block.tiers = block.moving = 0
            self.settle(block)

    def close_logs(self) -> None:
        """Lets go of the erasure_logs: nothing is stored or looked up here any more."""
        for log in self.erasure_logs.values():
            log.close()
        self.erasure_logs.clear()

    def answers(self, number: int) -> bool:
        """Whether a tier may be asked now: it owes nothing, and did not fail to answer lately."""
        return not self.rests(number) and not self.mover.lanes[number].overdue

    def rests(self, number: int) -> bool:
        """Whether a tier is left alone for now."""
        return self.clock.now_ns() < self._resting_ns.get(number, 0)

    def rest(self, number: int, seconds: float) -> None:
        """Leaves a tier alone for a while: asking it costs time, or is known to be in vain."""
        self._resting_ns[number] = self.clock.now_ns() + round(seconds * 1e9)

    @property
    def watches(self) -> bool:
        """Whether others write to one of the tiers."""
        return any(tier.shared for tier in self.tiers)

    def place(self, block: Block) -> str:
        """Name of the nearest place that holds a block, or is about to; "" if none does."""
        if block.page >= 0:
            return "device"
        number = self.source(block)
        return self.tiers[number].name if number >= 0 else ""

    def source(self, block: Block) -> int:
        """Number of the nearest tier that holds a block, or else is just given it; -1 if none."""
        if block.tiers:
            return block.nearest
        moving = self.mover.on_the_way(block.key) if block.moving else None
        return moving.tier if moving else -1

    def discover(
        self,
        keys: Sequence[bytes],
        *,
        group: int,
        parent: bytes,
        tenant: bytes,
        namespace: bytes,
        kind: str = "page",
    ) -> None:
        """Asks the tiers that others write to about pages that are not known here.

        Args:
            keys: Keys of consecutive pages.
            group: Their layer group.
            parent: Key above the first one.
            tenant: Tenant salt.
            namespace: Namespace digest.
            kind: What they are, if no pages.
        """
        for number, tier in enumerate(self.tiers):
            if not tier.shared:
                continue
            above, fresh = parent, []
            for key, there in zip(keys, tier.contains(keys), strict=True):
                known = self.index.find(key)
                there = there and (number, key) not in self._condemned
                if there and (known is None or not known.tiers >> number & 1):
                    block = self.index.publish(key, above, group, kind)
                    block.tenant, block.namespace = tenant, namespace
                    block.enter(number, UNKNOWN)
                    fresh.append(block)
                above = key
            self.insert(fresh, number)

    def settle(self, block: Block) -> None:
        """Forgets a block that no place holds and none is about to."""
        if not block.somewhere and not block.moving and not block.gone:
            self.dismiss(block)
        self.protect(block)

    def dismiss(self, block: Block) -> None:
        """Takes a block out of the index; its slot stays its key's until it is a ghost no more."""
        for place in self.places:
            place.let_go(block.slot)
        self.provisional.discard(block)
        self._bodies.pop(block, None)
        self.index.forget(block)

    def protect(self, block: Block) -> None:
        """Brings what policies must not choose in line with what a block is used for."""
        if block.gone:
            return  # its slot may be another block's by now
        for place in self.tier_places:
            (place.hold if block.kept or block.moving else place.let_go)(block.slot)
        if block.group < len(self.geometry.groups):  # else it has no page
            self._guard(block)

    def keep(self, block: Block) -> None:
        """Lets no policy take a block from anywhere until `unkeep`."""
        block.kept += 1
        self.protect(block)

    def unkeep(self, block: Block) -> None:
        """Ends a `keep`."""
        block.kept -= 1
        self.protect(block)

    def now_ns(self) -> int:
        """Time for the policies."""
        return self.clock.now_ns() if self._moment_ns is None else self._moment_ns

    @contextmanager
    def moment(self) -> Iterator[None]:
        """Within it no time passes for the policies.

        What comes back for a request is then inserted when the request was, and counts once.
        """
        before, self._moment_ns = self._moment_ns, self.now_ns()
        try:
            yield
        finally:
            self._moment_ns = before

    def tenant(self, salt: bytes) -> int:
        """The number by which policies know a tenant."""
        return self._tenants.setdefault(salt, len(self._tenants))

    def insert(self, blocks: Sequence[Block], number: int = -1) -> None:
        """Tells policies that blocks became resident on a tier, or (-1) on their device.

        Args:
            blocks: Root to leaf, chain after chain. Neighbours of one size, lease and tenant take
                one call. To a policy, what comes last in one call is deepest, so that chains on a
                device begin a call each.
            number: Tier in the stack.
        """
        if len(blocks) == 1:  # a decode step that fills one page
            self._insert(blocks, number)
            return
        last, alike = None, list[Block]()
        for block in blocks:
            codec = block.page >> CODEC_SHIFT if number < 0 else block.codec_on(number)
            kind = block.group, codec, block.n_bytes, block.lease, block.tenant
            if alike and (kind != last or (number < 0 and block.parent == ROOT)):
                self._insert(alike, number)
                alike = []
            last = kind
            alike.append(block)
        if alike:
            self._insert(alike, number)

    def _insert(self, blocks: Sequence[Block], number: int) -> None:
        first, slot, size = blocks[0], self.index.slot, self.geometry.page_size
        middle = (first.depth + len(blocks) / 2) * size  # they are a chain: one cost stands for all
        self.place_of(first, number).policy.insert(
            self.now_ns(),
            as_slots([block.slot for block in blocks]),
            as_slots([slot(block.parent) for block in blocks]),
            n_bytes=self.size(first, number),
            cost_ns=round(self._gate.token_s(middle) * size * 1e9),
            lease=first.lease,
            tenant=self.tenant(first.tenant),
        )

    def remove(self, block: Block, number: int = -1) -> None:
        """Tells a policy that a block left a tier, or (-1) its device, not by the policy's will."""
        self.place_of(block, number).policy.remove(as_slots([block.slot]))

    def _drop(self, slots: Sequence[int]) -> None:
        for place in self.places:
            place.forget(slots)
        self._on_drop(slots)

    def size(self, block: Block, number: int) -> int:
        """Bytes of a block's body on a tier, or (-1) on its device, for policies: at least 1."""
        if block.group >= len(self.forms):
            return block.n_bytes or 1  # of another model
        forms = self.forms[block.group]
        likely = forms.layouts[forms.ladder.idle].page_bytes
        if number >= 0 and not block.n_bytes and block.codec_on(number) == UNKNOWN:
            return likely
        return self.body_bytes(block, number) or likely

    def takes(self, number: int, body_bytes: int, ahead_bytes: int = 0) -> bool:
        """Whether a tier could be given a frame now, after others; if not, it is busy or away."""
        room = self.mover.lanes[number].schedule.has_room
        return not self.rests(number) and room(body_bytes, IOPriority.WRITE_BACK, ahead_bytes)

    def outlives(self, number: int) -> bool:
        """Whether a tier can be read after the process is gone, or by others."""
        return self.tiers[number].kind != "host" or self.tiers[number].shared

    def miss_out(self, number: int) -> None:
        """Counts a page that a tier should have got."""
        self.dropped[self.tiers[number].name] += 1
        self.lost += number == self.lasting()

    def worth_saving(self, block: Block, number: int) -> bool:
        """Whether a page can ever be worth loading from a tier; if not, that is counted."""
        if block.kind != "page" or block.group >= len(self.forms):
            return True
        name, page, reach = self.tiers[number].name, self._prompt_bytes, self.index.reach
        size = self.geometry.page_size
        if self._sends() or self._gate.pays_to_store(name, page, size, partial(reach, block)):
            return True
        self.unpaid[name] += 1
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
        mark: CopyMark | None = None,
    ) -> bool:
        """Writes a block to a tier in the background; False if there is no room.

        Args:
            block: What.
            number: Tier in the stack.
            info: What its frame says about itself.
            body: Its bytes; they must stay as they are until `done`.
            done: Called when the tier has answered.
            mark: The copy that fills the body; None for a body that is there.
        """
        if block in self.provisional and self.outlives(number):
            return False
        n_bytes = self.tiers[number].frame_bytes(body.nbytes)
        if not self.takes(number, body.nbytes) or not self._make_room(number, n_bytes):
            return False

        def answered(answer: TierAnswer) -> None:
            self._incoming[number] -= n_bytes
            done()
            self._saved(block, number, info.codec, answer)

        if not self.mover.store(number, block.key, info, body, answered, mark):
            return False
        self._incoming[number] += n_bytes
        block.moving += 1
        self.protect(block)
        return True

    def save_tail(self, block: Block, number: int, info: FrameInfo, body: memoryview) -> None:
        """Writes a tail to a tier that lasts: now, or once its model is proven; see `confirm`."""
        self.provisional.add(block)
        if block in self.provisional:
            self._bodies[block] = info, body
            if len(self._bodies) > _MOST_BODIES:
                self.forget(next(iter(self._bodies)))
        else:
            self.save(block, number, info, body)
            self.settle(block)

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

    def _saved(self, block: Block, number: int, codec: int, answer: TierAnswer) -> None:
        block.moving -= 1
        tier, forgotten = self.tiers[number], block.gone
        if answer.outcome is not Outcome.STORED:
            self.bus.emit(Failed(tier=tier.name, operation="store", reason=answer.reason))
            if answer.reason in AWAY:
                self.rest(number, _REST_S)
        elif block.gone:  # it was forgotten while it was stored
            self._wipe(number, [block.key])
        else:
            # Where others write too, theirs may have been there before.
            block.enter(number, UNKNOWN if tier.shared else codec)
            self.insert([block], number)
            self.stored_bytes[tier.name] += answer.n_bytes
            self.bus.emit(
                Stored(tier=tier.name, pages=1, n_bytes=answer.n_bytes, seconds=answer.seconds)
            )
        self.settle(block)
        if answer.outcome is not Outcome.STORED and not forgotten:
            self._not_saved(block, number, answer.reason)

    def _not_saved(self, block: Block, number: int, reason: str) -> None:
        """Have a page wait for a tier that is away; count what a tier did not take."""
        again = reason in AWAY and self.writes_back and number == self.lasting()
        if again and block.page >= 0:
            self._unwritten[block] = None
        elif reason != "cancelled":
            self.miss_out(number)
            if reason in _CODES or (reason, self.tiers[number].kind) == _NO_ROOM:
                self._troubles.setdefault(self.tiers[number].name, reason)

    def _say_troubles(self) -> None:
        """Warn of each tier that cannot store, once; between changes, as warnings may raise."""
        for name, reason in self._troubles.items():
            if reason:
                self._troubles[name] = ""
                said = f"{name} stores no page now ({reason}"
                if (code := _CODES.get(reason)) is not None:
                    said += f": {os.strerror(code)}"
                self.complain(
                    "store",
                    f"{said}): what it lacks is computed anew after a restart. Make room or mend"
                    ' it; kv.stats()["tiers"] counts such pages as "dropped".',
                )

    def complain(self, code: str, message: str) -> None:
        """Warn, and say so on the bus."""
        self.bus.emit(Warned(code=code, message=message))
        warnings.warn(message, UserWarning, stacklevel=2)

    @property
    def unproven(self) -> int:
        """Pages that would be written if their weights were proven."""
        return len(self.provisional) if self.writes_back and self.lasting() >= 0 else 0

    def check_room(self) -> None:
        """Warn of tiers that can store no page of this model, as they are now."""
        n_bytes = max(self.page_bytes(g, forms.ladder.idle) for g, forms in enumerate(self.forms))
        for tier in self.tiers:
            if tier.writable and (why := no_room(tier, n_bytes)):
                self.complain(
                    "room",
                    f"{tier.name} can store no page of this model: {why}. Give it more room, a"
                    " larger size, or leave it out.",
                )

    def _wipe(self, number: int, keys: list[bytes]) -> None:
        """Erases what was forgotten, as well as that can be done now."""
        tier = self.tiers[number]
        try:
            tier.erase(keys)
        except StoreError as error:
            tier.delete(keys)
            self.bus.emit(Failed(tier=tier.name, operation="erase", reason=error.problem))

    def _make_room(self, number: int, need: int) -> bool:
        tier, place = self.tiers[number], self.tier_places[number]
        while tier.used_bytes() + self._incoming[number] + need > tier.capacity_bytes:
            if need > tier.capacity_bytes:
                return False
            if self.mover.collect():
                continue  # what is there already is not on its way any more
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

    def codecs_on(self, block: Block, number: int) -> tuple[int, ...]:
        """Indices of the codecs that a tier's copy of a page, or (-1) that on its device, may have.

        None if it is unreadable.
        """
        if block.group >= len(self.forms):
            return ()  # of another model
        forms = self.forms[block.group]
        codec = block.page >> CODEC_SHIFT if number < 0 else block.codec_on(number)
        if codec == UNKNOWN:
            return forms.likely
        return (codec,) if codec in forms.layouts else ()

    def body_bytes(self, block: Block, number: int) -> int:
        """Most bytes of a block's body on a tier, or (-1) on its device; 0 if nobody can know."""
        if block.n_bytes:
            return block.n_bytes
        moving = self.mover.on_the_way(block.key) if block.moving and number >= 0 else None
        if moving is not None:
            return moving.store.body.nbytes
        layouts = [self.forms[block.group].layouts[c] for c in self.codecs_on(block, number)]
        return max((layout.page_bytes for layout in layouts), default=0)

    def sources(self, block: Block) -> Iterator[ReadFrom]:
        """Where a page may be read from now, best first; ask for the next when one did not serve.

        Copies that nobody can read here are struck off.
        """
        moving = self.mover.on_the_way(block.key) if block.moving else None
        if moving is not None and moving.store.info.codec in self.forms[block.group].layouts:
            yield ReadFrom(moving.tier, moving.store.info.codec, True)
        for number in range(len(self.tiers)):
            if block.tiers >> number & 1:
                codecs = self.codecs_on(block, number)
                if not codecs:
                    self.unlist(block, number)
                elif self.answers(number):
                    for codec in codecs:
                        if block.tiers >> number & 1:
                            yield ReadFrom(number, codec, codec == codecs[-1])

    def read(self, block: Block, number: int) -> tuple[FrameInfo, bytes] | None:
        """A block's bytes from one tier, verified, into fresh memory; None if it cannot give them.

        Args:
            block: What to read.
            number: Tier in the stack.
        """
        if not self.answers(number):
            return None
        wished = [BUNDLE_LAYOUT if block.kind == "weights" else LAYOUT]
        if block.kind == "state" and block.group < len(self.forms):
            wished.append(self.forms[block.group].fingerprints[0])  # of a tail
        if block.kind == "page":
            codecs = self.codecs_on(block, number)
            wished = [self.forms[block.group].fingerprints[codec] for codec in codecs]
        for layout in wished:
            body = bytearray(self.body_bytes(block, number))
            wanted = Load(block.key, memoryview(body), layout, self.fidelity)
            (answer,), _ = self.mover.load([(number, wanted)])
            if answer.outcome is Outcome.HIT and answer.info is not None:
                self.count_loaded(number, answer.n_bytes)
                return answer.info, bytes(memoryview(body)[: answer.n_bytes])
            if answer.reason != "layout" or layout == wished[-1]:
                self.not_served(block, number, answer)
                break
        return None

    def count_loaded(self, number: int, n_bytes: int) -> None:
        """Counts bytes that a tier gave."""
        self.loaded_bytes[self.tiers[number].name] += n_bytes

    def not_served(self, block: Block, number: int, answer: TierAnswer) -> None:
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
            self.refused[name] += 1
            self.bus.emit(Quarantined(tier=name, key=block.key, reason=answer.reason))
        self.unlist(block, number)

    def unlist(self, block: Block, number: int) -> None:
        """A tier does not hold what was believed, or nothing that can be read here."""
        self.remove(block, number)
        block.tiers &= ~(1 << number)
        self.settle(block)

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
        lower = self._taker(block, number + 1)
        found = self.read(block, number) if lower >= 0 else None
        if found is not None and self.save(block, lower, found[0], memoryview(found[1])):
            self._demoted(self.tiers[number].name, lower, len(found[1]))

    def _taker(self, block: Block, first: int) -> int:
        """The nearest tier from number `first` on that wants a block; -1 if one before has it."""
        for number in range(first, len(self.tiers)):
            if block.tiers >> number & 1:
                break
            if not self.tiers[number].writable or self.rests(number):
                continue
            if block in self.provisional and self.outlives(number):
                continue
            if self.worth_saving(block, number) and self.admits(block, number):
                return number
        return -1

    def admits(self, block: Block, number: int) -> bool:
        """Whether the policy of a tier finds a block worth its bytes there."""
        if block.kind == "page" and number in self._states_only:
            return False
        policy = self.tier_places[number].policy
        return bool(policy.admit(self.now_ns(), as_slots([block.slot]))[0])

    def device(self, group: int) -> str:
        """Name of a group's device."""
        return self.geometry.groups[group].device

    def pool(self, group: int) -> PagePool:
        """The pool of a group's device."""
        return self._pools[group]

    def page_bytes(self, group: int, codec: int = 0) -> int:
        """Bytes of a page of a group."""
        return self.forms[group].layouts[codec].page_bytes

    def views(self, group: int, page: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the first tokens of a raw page, views `[layers, heads, count, dim]`."""
        n_bytes = self.forms[group].raw.page_bytes
        return self.layers(self.pool(group).page_bytes(page, n_bytes), group, count)

    def layers(
        self, page: torch.Tensor, group: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of a raw page in any memory, uint8 `[page_bytes]`."""
        layout = self.forms[group].raw
        cells = page.view(getattr(torch, layout.dtype))
        steps = layout.stripe_stride_bytes, layout.run_bytes, layout.v_offset_bytes
        stripe, run, v = (n_bytes // cells.element_size() for n_bytes in steps)

        def view(dim: int, stride: int, offset: int) -> torch.Tensor:
            size, strides = (layout.layers, layout.kv_heads, count, dim), (stripe, run, stride, 1)
            return cells.as_strided(size, strides, cells.storage_offset() + offset)

        return view(layout.head_dim, layout.head_dim, 0), view(
            layout.value_dim, layout.value_stride, v
        )

    def find(self, key: bytes) -> Block | None:
        """The block of this key if it lies somewhere, or moves, and is exact enough."""
        block = self.index.find(key)
        if block is None or not (block.page >= 0 or block.tiers or self.source(block) >= 0):
            return None
        return block if block.fidelity <= self.fidelity else None

    def touch(self, blocks: Sequence[Block]) -> None:
        """Tells every policy that these blocks were used, root to leaf, by no request of a model.

        For those of a request, see `flowkv.cache.requests`.
        """
        now, slots = self.now_ns(), as_slots([block.slot for block in blocks])
        for place in self.places:
            place.policy.access(now, slots)

    @property
    def places(self) -> Iterable[PolicyPlace]:
        """All places that have a policy, nearest first."""
        return (*self.device_places.values(), *self.tier_places)

    def place_of(self, block: Block, number: int) -> PolicyPlace:
        """A tier's place; for -1, that of a block's device."""
        return self._places[block.group] if number < 0 else self.tier_places[number]

    def blocks_on(self, device: str) -> list[Block]:
        """Blocks with a page on a device, also those that only open sequences still use."""
        groups = {g for g, spec in enumerate(self.geometry.groups) if spec.device == device}
        known = [*self.index, *self._orphans]
        return [block for block in known if block.page >= 0 and block.group in groups]

    def hold(self, block: Block) -> None:
        """Keeps a block's device page where it is until `drop`."""
        self.pool(block.group).share(block.page)
        if self.prefetched_unused:
            self.prefetched_unused.end(block, used=True)
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
        self._swap_out(block)
        block.page = page
        self.recount(block)

    def swapped_copy(self, block: Block) -> SwappedCopy:
        """What brings a block's page back for one more suspended sequence."""
        copy = self.swapped.get(block)
        if copy is None:
            copy = self.swapped[block] = SwappedCopy(block)
        copy.users += 1
        return copy

    def unswap(self, copy: SwappedCopy) -> bool:
        """A sequence needs such a page no more; whether that was the last one."""
        copy.users -= 1
        if not copy.users and copy.content is None:
            del self.swapped[copy.block]
        return not copy.users

    def _swap_out(self, block: Block) -> None:
        """A page is about to change, or to go: what suspended sequences need of it is copied."""
        copy = self.swapped.get(block)
        if copy is not None:
            n_bytes = self.page_bytes(block.group, copy.codec)
            copy.content = download(self.pool(block.group), [block.page], n_bytes)[0]
            del self.swapped[block]

    def room(self, device: str) -> int:
        """Granules of a device that are free, or held by nobody but the index and no pin."""
        pool = self.pools[device]
        return pool.capacity_granules - pool.used_granules + self._idle[device]

    def within_reach(self, counts: Mapping[tuple[int, int], int]) -> bool:
        """Whether so many pages of each (group, codec) could be had by giving up all that is idle.

        What transfers hold counts, too: nobody knows yet what of it comes free.
        """
        return not self.lacking(counts)

    def lacking(self, counts: Mapping[tuple[int, int], int]) -> dict[str, int]:
        """Granules that devices lack for so many pages, as `within_reach` counts."""
        wanted = dict.fromkeys(self.pools, 0)
        for (g, codec), count in counts.items():
            wanted[self.device(g)] += count * self.forms[g].layouts[codec].granules
        for device, page in self._lent:
            wanted[device] -= self.pools[device].size_bytes(page) // GRANULE_BYTES
        short = {device: granules - self.room(device) for device, granules in wanted.items()}
        return {device: granules for device, granules in short.items() if granules > 0}

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
        return self.free(group, count, codec)

    def free(self, group: int, count: int, codec: int) -> list[int]:
        """Up to `count` private pages that are free, or hold what fills no page."""
        pool, granules = self.pool(group), self.forms[group].layouts[codec].granules
        while self.tails and pool.available(granules) < count:
            self.drop_tails(islice(self.tails, 1))
        return pool.allocate(granules, min(count, pool.available(granules)), codec) or []

    def keep_tail(self, tail: Block, pages: list[int]) -> None:
        """Shares the pages of a tail until they are needed for others."""
        self.outgrow(tail.place, tail.tokens)  # type: ignore[arg-type]
        self.tails[tail] = pages
        self.index.beginnings.add(tail)
        for g, page in enumerate(pages):
            self.pool(g).share(page)
            self._idle[self.device(g)] += self.forms[g].raw.granules

    def outgrow(self, place: bytes, tokens: NDArray[np.uint32]) -> None:
        """Gives up tails that hold nothing but the first of some tokens, see `Block.place`."""
        near = self.index.beginnings.near(place, tokens) if self.tails else ()
        known = [(shared, one) for shared, one in near if shared and one in self.tails]
        self.drop_tails([one for shared, one in known if shared == len(one.tokens)])  # type: ignore[arg-type]

    def drop_tails(self, tails: Iterable[Block] | None = None) -> None:
        """Gives tails up; all of them if something was erased, or is not what it was named."""
        for tail in list(self.tails if tails is None else tails):
            self.index.beginnings.discard(tail)
            for g, page in enumerate(self.tails.pop(tail)):
                self._idle[self.device(g)] -= self.forms[g].raw.granules
                self.pool(g).release(page)

    def _give_up(self, group: int, short: int) -> bool:
        if self.tails:
            self.drop_tails(islice(self.tails, max(short, 1)))
            return True
        device, now = self.device(group), self.now_ns()
        place, pages = self.device_places[device], self.pools[device].capacity_granules
        share = pages // self.forms[group].raw.granules // _BATCH_SHARE
        for n in dict.fromkeys((max(short, min(share, _BATCH_PAGES)), short, 1)):
            victims = place.evict(now, n)
            if victims is not None:
                self._leave_together([*map(self.index.at, victims.tolist())], "space")
                return True
        return False

    def _leave_together(self, blocks: Sequence[Block], reason: str) -> None:
        """Takes blocks off their device; those that a tier wants are copied a few at a time."""
        for (group, n_bytes), some in groupby(blocks, self._kind):
            copies, left = self.pool(group).copies, [*some]
            while left:
                part = left[: max(1, AT_ONCE_BYTES // n_bytes)]
                del left[: len(part)]
                takers = {b: -1 if b.moving else self._taker(b, 0) for b in part}
                wanted = [b for b, number in takers.items() if number >= 0]
                if copies is not None and wanted:
                    need = len(wanted) * n_bytes
                    while not copies.has_room(need) and self.mover.drain(self.mover.deadline_s):
                        pass
                copied = self._copy_out(wanted)
                for block, number in takers.items():
                    if number < 0 and not (block.moving or block.tiers):
                        number = self._taker(block, 0)  # its copy below made room meanwhile
                    if number >= 0 and not self.outlives(number):  # as fast as memory
                        self._await(number, n_bytes)
                    self._take_off(block, number, copied.pop(block, None))
                self._evicted(len(part), n_bytes * len(part), reason)
                self.mover.drain()

    def _leave_device(self, block: Block, reason: str) -> None:
        saves, n_bytes = reason != "lease" and not block.moving, self.body_bytes(block, -1)
        self._take_off(block, self._taker(block, 0) if saves else -1)
        self._evicted(1, n_bytes, reason)

    def _evicted(self, pages: int, n_bytes: int, reason: str) -> None:
        self.bus.emit(Evicted(tier="device", pages=pages, n_bytes=n_bytes, reason=reason))

    def _take_off(self, block: Block, number: int, copied: _Copied | None = None) -> None:
        """Takes a block off its device, and gives it to a tier, unless the number is -1."""
        waited, page = block in self._unwritten and not block.moving, block.page
        if number >= 0:
            n_bytes = self.body_bytes(block, -1)
            if self._save_page(block, number, copied):
                self._demoted("device", number, n_bytes)
            elif not waited and not self.takes(number, n_bytes):
                self.miss_out(number)
        self.change(block, -1)
        self.prefetched_unused.end(block, used=False)
        self._unwritten.pop(block, None)
        if waited and not block.moving:
            self.miss_out(self.lasting())
        self.pool(block.group).release(page)
        self.settle(block)

    def put_below(self, blocks: Sequence[Block], serves: Callable[[int], bool]) -> list[Block]:
        """Writes pages to the nearest tiers that take them, and waits; returns which did.

        Args:
            blocks: Pages on their device.
            serves: Whether a tier will do.
        """
        for block in blocks:
            for number in filter(serves, range(len(self.tiers))):
                if block.tiers >> number & 1 and not self._alike(block, number):
                    continue  # that copy is another one
                if self._keeps(block, number) or self._puts(block, number):
                    break
        while any(block.moving for block in blocks) and self.drain(self.mover.deadline_s):
            pass
        usable = [number for number in range(len(self.tiers)) if serves(number)]
        return [b for b in blocks if not b.moving and any(self._alike(b, n) for n in usable)]

    def _alike(self, block: Block, number: int) -> bool:
        """Whether a tier has a page as it is encoded on its device."""
        return bool(block.tiers >> number & 1) and (
            block.codec_on(number) == block.page >> CODEC_SHIFT
        )

    def _keeps(self, block: Block, number: int) -> bool:
        """Whether a tier says that it has a page which it is believed to have."""
        if not block.tiers >> number & 1:
            return False
        there = self.tiers[number].contains([block.key])[0]
        if not there:
            self.unlist(block, number)
        return there

    def _puts(self, block: Block, number: int) -> bool:
        barred = number in self._states_only or self.rests(number)
        if barred or (block in self.provisional and self.outlives(number)):
            return False
        self._await(number, self.forms[block.group].of(block.page).page_bytes)
        return self._save_page(block, number)

    def _await(self, number: int, n_bytes: int) -> None:
        """Waits until a tier takes a frame, as long as it answers others."""
        while not self.takes(number, n_bytes) and self.mover.drain(self.mover.deadline_s):
            pass

    def set_down(self, block: Block) -> None:
        """Takes a block, which lies on a tier and is held by nobody, off its device."""
        self._evicted(1, self.body_bytes(block, -1), "overflow")
        self.remove(block)
        self.prefetched_unused.end(block, used=False)
        self._unwritten.pop(block, None)
        page = block.page
        self.change(block, -1)
        self.pool(block.group).release(page)

    def _demoted(self, source: str, number: int, n_bytes: int) -> None:
        tier = self.tiers[number].name
        self.bus.emit(Demoted(source=source, tier=tier, pages=1, n_bytes=n_bytes))

    def expire(self) -> None:
        """Takes blocks whose lease has run out away from where it ran out."""
        self._relieve(PolicyPlace.expired, "lease")

    def shed(self) -> None:
        """Has tenants give up what they have above their quotas."""
        self._relieve(PolicyPlace.surplus, "quota")

    def _relieve(self, chosen: Callable[[PolicyPlace, int], list[int]], reason: str) -> None:
        for place in self.device_places.values():
            for slot in chosen(place, self.now_ns()):
                self._leave_device(self.index.at(slot), reason)
        for number, place in enumerate(self.tier_places):
            for slot in chosen(place, self.now_ns()):
                self._leave_tier(self.index.at(slot), number, reason)

    def displace(self, slots: Sequence[int]) -> None:
        """Takes blocks off their device that its policy has given up for a prefetch."""
        for slot in slots:
            self._leave_device(self.index.at(slot), "prefetch")
        self.mover.drain()

    def publish(self, block: Block, page: int) -> None:
        """A private page becomes a block's device page; its one reference becomes the store's.

        The device's policy is to be told of it (`insert`), of all pages of a request at once.
        """
        block.page = page
        self.recount(block)

    def publish_held(self, group: int, pages: Mapping[Block, int]) -> None:
        """Publishes private pages of a sequence, which goes on to use them: holds each of them."""
        place, pool = self._places[group], self.pool(group)
        for block, page in pages.items():
            pool.share(page)
            block.page = page
            block.holds += 1
            place.hold(block.slot)
            self.provisional.add(block)

    def supersede(self, block: Block) -> None:
        """Deletes a block's copies that are too lossy to be read here, before it is made anew."""
        if block.tiers and block.fidelity > self.fidelity:
            self.delete(block)

    def write_down(self, *blocks: Block) -> None:
        """Saves full pages on the first persistent tier, in the background.

        While that is busy or away they wait; what leaves the device meanwhile is dropped.
        What would not have paid before comes along once its prompt is long enough.
        """
        number = self.lasting() if self.writes_back else -1
        for block in blocks if number >= 0 else ():
            if block in self.provisional or not self._unwritten_on(block, number):
                continue
            if not self.worth_saving(block, number):
                self._held_back = True
                continue
            chain = [block]
            while self._held_back:
                above = self.index.find(chain[-1].parent)
                if above is None or not self._may_write(above, number):
                    break
                chain.append(above)
            self._unwritten |= dict.fromkeys(reversed(chain))
        if self._unwritten:
            self._write_out()

    @property
    def writes_back(self) -> bool:
        """Whether pages are given to a tier that lasts as soon as they are full."""
        return self.write_back or self._sends()

    def _unwritten_on(self, block: Block, number: int) -> bool:
        return not (block.moving or block.gone or block.tiers >> number & 1)

    def confirm(self) -> None:
        """A reading of all weights has ended: what it proves may leave the process."""
        number = self.lasting() if self.writes_back else -1
        for block in self.provisional.confirm():
            info, body = self._bodies.pop(block, (None, memoryview(b"")))
            if info is not None and not block.gone:
                if number >= 0:
                    self.save(block, number, info, body)
                self.settle(block)
                continue
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

    def _write_out(self) -> None:
        """Gives pages that wait to the tier that lasts, as far as it takes them now."""
        number = self.lasting()
        while number >= 0 and self._unwritten:
            waiting, n_bytes = list[Block](), 0
            for block in self._unwritten:
                if self._waits(block, number):
                    own_bytes = self._kind(block)[1]
                    if not self.takes(number, own_bytes, n_bytes) or n_bytes > AT_ONCE_BYTES:
                        break
                    n_bytes += own_bytes
                waiting.append(block)
            if not waiting:
                break
            copied = self._copy_out([block for block in waiting if self._waits(block, number)])
            for block in waiting:
                if (
                    self._waits(block, number)
                    and not self._save_page(block, number, copied.get(block))
                    and not self.takes(number, self._kind(block)[1])
                ):
                    return  # it is away by now: the others wait
                self._unwritten.pop(block, None)

    def _waits(self, block: Block, number: int) -> bool:
        return block.page >= 0 and self._unwritten_on(block, number)

    def _copy_out(self, blocks: Sequence[Block]) -> dict[Block, _Copied]:
        """Start copying pages to host memory, where their device has copies of its own."""
        copied = dict[Block, _Copied]()
        for (group, n_bytes), some in groupby(blocks, self._kind):
            copies, those = self.pool(group).copies, [*some]
            if copies is not None:
                rows, mark = copies.download([granule_of(b.page) for b in those], n_bytes)
                copied |= {b: (row.numpy().data, mark) for b, row in zip(those, rows, strict=True)}
        return copied

    def _kind(self, block: Block) -> tuple[int, int]:
        """Group and bytes of a block's page."""
        return block.group, self.forms[block.group].of(block.page).page_bytes

    def drain(self, timeout_s: float = 0.0) -> int:
        """Sends and answers what can be, see `Mover.drain`; pages that waited go on their way."""
        handled = 0
        if self.mover.lanes and self.mover.busy:
            handled = self.mover.drain(timeout_s)
            self._give_up_late()
        if self._unwritten:
            self._write_out()
        if self._troubles:
            self._say_troubles()
        return handled

    def flush(self, timeout_s: float, now_s: Callable[[], float] = compiling.now_s) -> int:
        """Wait until nothing is being stored or waits for that.

        Pages that wait for a tier which is away keep waiting.

        Args:
            timeout_s: Longest wait.
            now_s: Its clock; the default one stands still while something is compiled.

        Returns:
            Pages that still wait, or are on their way.
        """
        end_s = now_s() + timeout_s
        self.drain()
        while self.mover.storing() or (self._unwritten and not self.rests(self.lasting())):
            left_s = end_s - now_s()
            if left_s <= 0 or interrupts.waiting():
                break
            self.drain(min(left_s, _LONGEST_S))
        return self.unsaved

    @property
    def unsaved(self) -> int:
        """Pages that wait to be written, or are on their way."""
        return self.mover.storing() + len(self._unwritten)

    def lasting(self) -> int:
        """Number of the first writable tier that outlives the process, -1 if there is none."""
        numbers = [number for number, tier in enumerate(self.tiers) if tier.writable]
        for number in numbers:
            if self.tiers[number].kind != "host":
                return number
        return next((number for number in numbers if self.tiers[number].shared), -1)

    def _save_page(self, block: Block, number: int, copied: _Copied | None = None) -> bool:
        """Gives a tier a block's page, or a copy of it; whether it takes that."""
        pool, page, (group, n_bytes) = self.pool(block.group), block.page, self._kind(block)
        if pool.copies is not None:
            body, mark = copied or self._copy_out([block])[block]
            return self.save(block, number, self.describe(block), body, mark=mark)
        body = pool.page_bytes(page, n_bytes).cpu().numpy().data
        self.lend(group, page)
        if self.save(
            block, number, self.describe(block), body, lambda: self.give_back(group, page)
        ):
            return True
        self.give_back(group, page)
        return False

    def describe(self, block: Block) -> FrameInfo:
        """What the frame of a block's device page says about itself."""
        forms, codec = self.forms[block.group], block.page >> CODEC_SHIFT
        layout = forms.of(block.page)
        return block.info(
            forms.fingerprints[codec],
            tokens=layout.page_size,
            stripe_bytes=layout.stripe_stride_bytes,
            codec=codec,
        )

    def condemn(self, block: Block) -> None:
        """Forgets a block whose content is wrong, also where others wrote it and it stays."""
        self.drop_tails()
        for number, tier in enumerate(self.tiers):
            if block.tiers >> number & 1 and not tier.writable:
                self._condemned.add((number, block.key))
        self.forget(block)

    def lose(self, blocks: Sequence[Block], erased_from: int) -> None:
        """Forgets blocks that another cache erased, from one tier at least (-1: from none)."""
        for number, tier in enumerate(self.tiers):
            keys = [block.key for block in blocks if block.tiers >> number & 1]
            if number == erased_from or not keys:
                continue
            if tier.writable:
                self._wipe(number, keys)
            else:
                self._condemned |= {(number, key) for key in keys}
        self.mover.retract({block.key for block in blocks})
        for block in blocks:
            self.strike(block)
            self.forget(block)

    def forget(self, block: Block) -> None:
        """Deletes a block everywhere; open sequences keep their own use of its page."""
        if block.gone:
            return
        self.delete(block)
        self.prefetched_unused.end(block, used=False)
        self._unwritten.pop(block, None)
        page = block.page
        if page >= 0:
            self.remove(block)
            self._swap_out(block)
            if block.holds:
                self._orphans.add(block)
            else:
                block.page = -1
            self.pool(block.group).release(page)
        self.dismiss(block)
        self.recount(block)
