"""Which blocks lie where: the stack of tiers, what each holds, and what its policy may not take.

A block is forgotten when no place holds it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice

from flowkv.core.clock import Clock
from flowkv.core.config import Config
from flowkv.core.errors import ConfigError
from flowkv.core.geometry import Geometry
from flowkv.core.keys import ROOT, tenant_salt
from flowkv.core.layout import CODEC_SHIFT
from flowkv.observe.events import Bus
from flowkv.policy.base import Policy
from flowkv.policy.rates import Rates
from flowkv.runtime.forms import make_forms
from flowkv.runtime.index import UNKNOWN, Block, PrefixIndex
from flowkv.runtime.mover import Mover
from flowkv.runtime.places import Place, as_slots
from flowkv.runtime.provisional import Provisional
from flowkv.runtime.samples import Samples
from flowkv.tiers.base import Entry, FrameInfo, Tier

_MOST_LISTED = 1 << 16
"""So many frames of a remote tier are listed at start; others are found when they are asked for."""
_ADOPTED, _LOOKED_AT = 64, 1 << 12
"""Frames of others that are adopted at a time, and those that are looked at for it."""


class Residency:
    """Blocks below the device, and the tiers they lie on. Callers hold the KV lock.

    Args:
        geometry: The model's layer groups.
        tiers: The stack, nearest first.
        policies: `policies(kind, capacity_bytes)` makes the policy of one place.
        clock: Time for the policies.
        bus: Where events go.
        config: The codec of sealed pages (also what a reader accepts, DESIGN D6), whether they are
            written down at once, and how long a load may take.
        rates: Load rates by tier name, where somebody decides by them.

    Raises:
        ConfigError: A layer group cannot have the codec, or two tiers have one name.

    Attributes:
        forms: The codecs and layouts of each group's pages.
        fidelity: Index of the lossiest codec that is accepted.
        mover: Transfers to and from the tiers.
        tier_places: The tiers as policies see them, in the order of the stack.
        on_drop: Told the slots that name nothing any more.
        page_cost_ns: Says how long it takes to compute a page; 0 while that is not known.
        pays: `pays(tier, n_bytes, reach)` says whether a page of so many bytes there can ever be
            worth loading; `reach(most)` are the pages of its longest prompt, as far as `most`.
        samples: Restored pages that are to be audited.
        provisional: Blocks that must not leave the process yet.
    """

    def __init__(
        self,
        geometry: Geometry,
        tiers: Sequence[Tier],
        *,
        policies: Callable[[str, int], Policy],
        clock: Clock,
        bus: Bus,
        config: Config,
        rates: dict[str, Rates] | None = None,
    ) -> None:
        self.geometry = geometry
        self.forms = make_forms(geometry, config)
        self.fidelity = max(codec for forms in self.forms for codec in forms.layouts)
        self.clock, self.bus, self.write_back = clock, bus, config.write_back
        self.tiers: list[Tier] = []
        self.index, self.mover = PrefixIndex(), Mover(config.load_deadline_s, rates)
        self.index.on_drop = self._drop
        self.on_drop: Callable[[Sequence[int]], None] = lambda slots: None
        self._policies, self.tier_places = policies, list[Place]()
        self.page_cost_ns: Callable[[], int] = lambda: 0
        self.pays: Callable[[str, int, Callable[[int], int]], bool] = lambda *page: True
        self._tenants: dict[bytes, int] = {}
        for name in config.quotas:  # these have the first numbers
            self.tenant(tenant_salt(name, config.secret_bytes))
        self._moment_ns: int | None = None
        self._resting_ns: dict[int, int] = {}
        self.samples = Samples(config.audit)
        self._condemned: set[tuple[int, bytes]] = set()
        self._states_only: set[int] = set()
        self.provisional = Provisional()
        self._strangers: dict[int, list[Block]] = {}
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
        self.mover.add(tier)
        policy = self._policies(tier.kind, tier.capacity_bytes)
        self.tier_places.append(Place(tier.name, tier.kind, policy))
        most = _MOST_LISTED if tier.kind == "remote" else None
        listed = list(islice(tier.scan(), most))
        for entry in listed:  # before kernels are told which forms there are
            if entry.info.fidelity <= self.fidelity and entry.info.group < len(self.forms):
                self.forms[entry.info.group].meet(entry.info)
        self._enter(number, listed)

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
        self.tiers.clear()
        self._strangers.clear()
        self.mover.forget()
        self.tier_places.clear()
        for block in self.index:
            block.tiers = block.moving = 0
            self.settle(block)

    def answers(self, number: int) -> bool:
        """Whether a tier may be asked now: it owes nothing, and did not fail to answer lately."""
        return not self.rests(number) and not self.mover.overdue(number)

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

    # ---- what is known

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
        self.index.forget(block)

    def protect(self, block: Block) -> None:
        """Brings what policies must not choose in line with what a block is used for."""
        if block.gone:
            return  # its slot may be another block's by now
        for place in self.tier_places:
            (place.hold if block.kept or block.moving else place.let_go)(block.slot)

    def keep(self, block: Block) -> None:
        """Lets no policy take a block from anywhere until `unkeep`."""
        block.kept += 1
        self.protect(block)

    def unkeep(self, block: Block) -> None:
        """Ends a `keep`."""
        block.kept -= 1
        self.protect(block)

    # ---- what policies are told

    @property
    def places(self) -> Iterable[Place]:
        """All places that have a policy, nearest first."""
        return self.tier_places

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

    def place_of(self, block: Block, number: int) -> Place:
        """A tier's place; for -1, that of a block's device."""
        return self.tier_places[number]

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
        first, slot = blocks[0], self.index.slot
        self.place_of(first, number).policy.insert(
            self.now_ns(),
            as_slots([block.slot for block in blocks]),
            as_slots([slot(block.parent) for block in blocks]),
            n_bytes=self.size(first, number),
            cost_ns=self.page_cost_ns(),
            lease=first.lease,
            tenant=self.tenant(first.tenant),
        )

    def remove(self, block: Block, number: int = -1) -> None:
        """Tells a policy that a block left a tier, or (-1) its device, not by the policy's will."""
        self.place_of(block, number).policy.remove(as_slots([block.slot]))

    def _drop(self, slots: Sequence[int]) -> None:
        for place in self.places:
            place.forget(slots)
        self.on_drop(slots)

    def size(self, block: Block, number: int) -> int:
        """Most bytes of a block's body on a tier, or (-1) on its device; at least 1."""
        if block.n_bytes:
            return block.n_bytes
        if block.group >= len(self.forms):
            return 1  # of another model
        codec = block.page >> CODEC_SHIFT if number < 0 else block.codec_on(number)
        layouts = self.forms[block.group].layouts
        return (layouts.get(codec) or layouts[self.forms[block.group].likely[0]]).page_bytes
