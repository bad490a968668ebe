"""The stack of tiers below a cache: admission of blocks, listed frames, and moves between tiers.

A tier's own policy chooses its victims. A frame that a tier loses, damages or refuses counts as a
miss, and nothing worse.

Writes to weights that PyTorch does not count are found by reading the weights again. A page is
proven once such a reading, begun after the page became known, has found all weights unchanged.
Unproven pages are known in the process, but kept out of all persistent and shared places.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import compress, islice
from typing import NamedTuple

from flowkv.cache.index import (
    BUNDLE_LAYOUT,
    LAYOUT,
    UNKNOWN,
    Block,
    PolicyContext,
    PrefixIndex,
    chains,
    enter_tier,
)
from flowkv.cache.mover import CopyMark, Mover
from flowkv.cache.pool import Forms
from flowkv.core.config import Config
from flowkv.core.errors import ConfigError, StoreError
from flowkv.core.geometry import COLD
from flowkv.kvt.tier import CodecTier
from flowkv.observe.events import Bus, Demoted, Evicted, Failed, Quarantined, Stored
from flowkv.policy.base import DEFAULT_RANK, Lease, Policy
from flowkv.policy.order.leaf import as_slots
from flowkv.residency.places import PolicyPlace
from flowkv.tiers.base import (
    Entry,
    FrameInfo,
    Load,
    Outcome,
    Store,
    Tier,
    TierAnswer,
    bases_in,
    evictable,
    listed,
)
from flowkv.tiers.erasure_log import ErasureLogs
from flowkv.tiers.host import HostTier

_SHORT = ("", "one_shot", "ephemeral")


def _stays(block: Block) -> bool:
    """Return whether a request asked for a page to be kept: by a pin, a lease or `Retain`."""
    lease = block.lease
    asked = lease.rank >= DEFAULT_RANK if isinstance(lease, Lease) else lease not in _SHORT
    return block.pinned or asked


class Provisional(dict[Block, bool]):
    """Unproven blocks, kept out of persistent and shared tiers. Callers hold the KV lock.

    The value of each is whether a reading of all weights has begun since it became known.

    Attributes:
        active: Whether blocks that become known from now on have to be proven.
        tails: Header and body of each unproven tail, the oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active, self.tails = False, dict[Block, tuple[FrameInfo, memoryview]]()

    def add(self, block: Block) -> None:
        """Add a block that became known, if blocks have to be proven now."""
        if self.active:
            self[block] = False

    def discard(self, block: Block) -> None:
        """Remove a block that was forgotten."""
        self.pop(block, None)
        self.tails.pop(block, None)

    def begin(self) -> None:
        """Begin a reading of all weights, which can prove all blocks known by now."""
        self.update(dict.fromkeys(self, True))

    def confirm(self) -> dict[Block, tuple[FrameInfo, memoryview] | None]:
        """End a reading that found no change; return the blocks proven by it, and tails' bodies."""
        proven = [block for block, read in self.items() if read]
        for block in proven:
            del self[block]
        return {block: self.tails.pop(block, None) for block in proven}


class Admission:
    """Choice of the tiers that store a block. Callers hold the KV lock.

    Args:
        context: The known blocks, with time and rates.
        tiers: The tiers, nearest first.
        places: The tiers as policies see them.
        mover: Transfers to the tiers.
        forms: The page forms of each layer group.
        provisional: Blocks that must not leave the process yet.
        write_back: Whether full pages are written to the persistent tier at once.
        sends: Returns whether other processes read the pages, at rates that are unknown here.

    Attributes:
        states_only: Numbers of the tiers that are closed to pages.
    """

    def __init__(
        self, context: PolicyContext, tiers: Sequence[Tier], places: Sequence[PolicyPlace],
        mover: Mover, forms: Sequence[Forms], provisional: Provisional, *, write_back: bool,
        sends: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._context, self._tiers, self._places, self._mover = context, tiers, places, mover
        self._provisional, self.write_back, self._sends = provisional, write_back, sends
        self._groups, whole = len(forms), [one for one in forms if one.whole] or forms
        self._prompt_bytes = sum(one.likely_bytes for one in whole)  # per page of a long prompt
        self.states_only = set[int]()

    def outlives(self, number: int) -> bool:
        """Return whether a tier is persistent, or shared with other processes."""
        return self._tiers[number].kind != "host" or self._tiers[number].shared

    def worth_storing(self, blocks: Sequence[Block], number: int) -> list[Block]:
        """Return the pages that can ever be worth loading from a tier; count each other once."""
        terms = self._tiers[number].name, self._prompt_bytes, self._context.page_size
        groups, gate, poor = 0 if self._sends() else self._groups, self._context.gate, set[Block]()
        for block in [b for b in blocks if b.kind == "page" and b.group < groups]:
            reach = lru_cache(partial(self._context.index.reach, block))
            if not gate.pays_to_store(*terms, reach):
                poor.add(block)
            elif not reach.cache_info().misses:  # it pays in any prompt: so do all others
                break
        new = [block for block in poor if not block.unpaid >> number & 1]
        self._mover.lanes[number].unpaid += len(new)
        for block in new:
            block.unpaid |= 1 << number
        return [block for block in blocks if block not in poor]

    @property
    def writes_all(self) -> bool:
        """Return whether every page is written at once: without write admission, or to memory."""
        if self._context.writes is None or self._sends():
            return True
        number = self.lasting()
        return number < 0 or self._tiers[number].kind == "host"

    def at_once(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return the blocks that are written as soon as they are final."""
        return blocks if self.writes_all else [b for b in blocks if b.kind != "page" or _stays(b)]

    def chosen(self, blocks: Iterable[Block]) -> list[Block]:
        """Return the pages that write admission would let leave memory now."""
        some, rule = [*blocks], self._context.writes
        if rule is None:
            return some
        rule.choose(as_slots([block.slot for block in some if _stays(block)]))
        return [*compress(some, rule.admits(as_slots([block.slot for block in some])))]

    def decline(self, blocks: Iterable[Block], number: int) -> set[Block]:
        """Return the pages that leave memory for no lasting tier, by write admission; count them.

        Args:
            blocks: Blocks that leave memory and that the tier may store.
            number: The tier.
        """
        rule = self._context.writes
        if rule is None or self.writes_all or self._tiers[number].kind == "host":
            return set()
        pages = [block for block in blocks if block.kind == "page"]
        self.chosen(pages)
        found = {*compress(pages, ~rule.depart(as_slots([block.slot for block in pages])))}
        self._mover.lanes[number].declined += len(found)
        return found

    def storable(self, blocks: Iterable[Block], number: int) -> list[Block]:
        """Return the blocks that a tier is open to, if it is writable, be it resting or not."""
        barred = self._provisional if self.outlives(number) else ()
        pages = number not in self.states_only
        some = blocks if self._tiers[number].writable else ()
        return [one for one in some if one not in barred and (pages or one.kind != "page")]

    def admitted(self, blocks: Iterable[Block], number: int) -> list[Block]:
        """Return the blocks that a tier may store, and that its policy admits."""
        some, policy = self.storable(blocks, number), self._places[number].policy
        slots = as_slots([block.slot for block in some])
        return [*compress(some, policy.admit(self._context.now_ns(), slots) if some else ())]

    def writes_to(self) -> int:
        """Return the number of the tier that full pages are written to at once, else -1."""
        return self.lasting() if self.write_back or self._sends() else -1

    def near(self) -> int:
        """Return the number of the nearest writable tier if it ends with the process, else -1."""
        some = [n for n, t in enumerate(self._tiers) if t.writable and n not in self.states_only]
        return some[0] if some and not self.outlives(some[0]) else -1

    def lasting(self) -> int:
        """Return the number of the first writable tier that outlives the process, else -1."""
        numbers = [n for n, tier in enumerate(self._tiers) if tier.writable and self.outlives(n)]
        return min(numbers, key=lambda number: self._tiers[number].kind == "host", default=-1)


_ADOPTED, _LOOKED_AT = 64, 1 << 12  # other caches' frames per call: most adopted, most examined


class Listing:
    """Publisher of the frames that tiers list. Callers hold the KV lock.

    Args:
        tiers: The tiers, nearest first; others may be added.
        index: The known blocks.
        insert: Inserts blocks that became resident on a tier into its policy.

    Attributes:
        quarantined: Tier numbers and keys of frames with wrong content, which are not published.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        index: PrefixIndex,
        insert: Callable[[Sequence[Block], int], None],
    ) -> None:
        self._tiers, self._index, self._insert = tiers, index, insert
        self._strangers: dict[int, list[Block]] = {}
        self.quarantined: set[tuple[int, bytes]] = set()

    def publish_frames(self, number: int, entries: Iterable[Entry]) -> None:
        """Publish blocks for frames that a tier holds, given the oldest first."""
        trees, fresh = dict[bytes, list[Block]](), list[list[Block]]()
        in_use = self._in_use(number)
        for entry in entries:
            info = entry.info
            block = self._index.get_or_create(entry.key, info.parent, info.group, info.kind)
            # Copies may differ in fidelity; the best of them counts.
            block.fidelity = min(info.fidelity, block.fidelity if block.tiers else info.fidelity)
            enter_tier([block], number, info.codec)
            block.placed &= info.tokens > 0
            if info.kind != "page":
                block.n_bytes, block.tail = entry.n_bytes, info.tokens
            block.tenant, block.namespace = info.tenant, info.namespace
            if not in_use(info.namespace):
                self._strangers.setdefault(number, []).append(block)
            if (tree := trees.get(info.parent)) is None:
                fresh.append(tree := [])
            trees[entry.key] = tree
            tree.append(block)
        # A policy evicts the last block of a call first, as a leaf: so the oldest tree comes last.
        blocks = [block for tree in reversed(fresh) for block in tree]
        self._insert(blocks, number)

    def _in_use(self, number: int) -> Callable[[bytes], bool]:
        """Return a cached predicate: whether a tier records a namespace as in use."""
        known: Callable[[bytes], bool] = getattr(self._tiers[number], "in_use", lambda _: True)
        return lru_cache(known)

    def stranger(self, number: int) -> Block | None:
        """Return a block of a tier in a namespace that is out of use; None if there is none.

        Frames of another version, which named pages differently, are such blocks: they are evicted
        before all others.
        """
        left, in_use = self._strangers.get(number, []), self._in_use(number)
        while left:
            block = left.pop()
            free = not (block.gone or block.kept or block.going)
            if free and block.tiers >> number & 1 and not in_use(block.namespace):
                return block
        return None

    def list_unknown(self, number: int, meant: Callable[[FrameInfo], bool]) -> None:
        """Publish the listed frames of a tier that `meant` selects and that are unknown there."""
        self._add(number, (entry for entry in self._tiers[number].scan() if meant(entry.info)))

    def _add(self, number: int, entries: Iterable[Entry], most: int | None = None) -> int:
        """Publish the first unknown of a tier's frames; return their number."""
        fresh = [*islice((one for one in entries if not self._knows(one.key, number)), most)]
        self.publish_frames(number, fresh)
        return len(fresh)

    def _knows(self, key: bytes, number: int) -> bool:
        known = self._index.find(key)
        return known is not None and bool((known.tiers | known.going) >> number & 1)

    def adopt(self, number: int) -> int:
        """Publish the oldest unknown frames of a shared tier; return their number.

        Used where room is needed and no known block may go: the policy then orders the frames of
        other caches, too.
        """
        tier = self._tiers[number]
        found = islice(evictable(tier), _LOOKED_AT)
        return self._add(number, found, _ADOPTED) if tier.shared else 0

    @property
    def watches(self) -> bool:
        """Return whether any of the tiers is shared with other writers."""
        return any(tier.shared for tier in self._tiers)

    def discover(
        self, keys: Sequence[bytes], above: bytes, realm: tuple[bytes, bytes], like: tuple[int, str]
    ) -> None:
        """Look up pages on the shared tiers, and publish those that are unknown here.

        Args:
            keys: Keys of consecutive pages.
            above: Key above the first one.
            realm: Their tenant salt and namespace digest.
            like: Their layer group and kind.
        """
        for number, tier in enumerate(self._tiers):
            if not tier.shared:
                continue
            parent, fresh = above, []
            for key, there in zip(keys, tier.contains(keys), strict=True):
                known = self._index.find(key)
                there = there and (number, key) not in self.quarantined
                if there and (known is None or not known.tiers >> number & 1):
                    block = self._index.get_or_create(key, parent, *like)
                    block.tenant, block.namespace = realm
                    enter_tier([block], number, UNKNOWN)
                    fresh.append(block)
                parent = key
            self._insert(fresh, number)


Plain = tuple[Block, FrameInfo, memoryview]
Frame = Plain | tuple[Block, FrameInfo, memoryview, memoryview | None]


class ReadFrom(NamedTuple):
    """A place from which a page may be read, and its form there.

    Attributes:
        tier: Number in the stack.
        codec: Index of the codec that its copy has, or is guessed to have.
        last: Whether no other codec is left to guess.
    """

    tier: int
    codec: int
    last: bool


class TierCopies:
    """Codecs and bytes of blocks on tiers, as far as they are known. Callers hold the KV lock.

    Args:
        forms: The page forms of each layer group.
        mover: Transfers, with the frames on their way to tiers.
    """

    def __init__(self, forms: Sequence[Forms], mover: Mover) -> None:
        self._forms, self._mover = forms, mover

    def size(self, block: Block, number: int) -> int:
        """Return the bytes of a block's body as a tier (-1: any) gives it: at least 1."""
        if block.group >= len(self._forms):
            return block.n_bytes or 1  # a block of another model
        unknown = number < 0 or (not block.n_bytes and block.codec_on(number) == UNKNOWN)
        known = 0 if unknown else self.body_bytes(block, number)
        return known or self._forms[block.group].likely_bytes

    def nearest_size(self, block: Block) -> int:
        """Return the bytes of a block's device page, or of its copy on the nearest tier."""
        if block.page >= 0:
            return self._forms[block.group].layout(block.page).page_bytes
        return self.size(block, block.tier)

    def nearest_bytes(self, blocks: Iterable[Block]) -> dict[int, int]:
        """Return the bytes of blocks in the tier that each is read from now, by its number."""
        found, known = dict[int, int](), dict[tuple[int, ...], tuple[int, int]]()
        for block in blocks:
            form = block.group, block.tiers, block.codecs, block.n_bytes
            if block.going or form not in known:
                known[form] = (tier := self._source(block)), self.size(block, tier)
            number, n_bytes = known.pop(form) if block.going else known[form]
            found[number] = found.get(number, 0) + n_bytes
        return found

    def _source(self, block: Block) -> int:
        """Return the tier that a block is read from now; the nearest one if none can be read."""
        moving = self._mover.on_the_way(block.key) if block.going else None
        if moving is not None:
            return moving.tier
        lanes = (n for n, lane in enumerate(self._mover.lanes) if lane.answering)
        return next((n for n in lanes if block.tiers >> n & 1), block.tier)

    def codecs(self, block: Block, number: int) -> tuple[int, ...]:
        """Return the codecs that a tier's copy of a page may have; () if it is unreadable."""
        if block.group >= len(self._forms):
            return ()  # a block of another model
        forms, codec = self._forms[block.group], block.codec_on(number)
        if codec == UNKNOWN:
            return forms.likely
        return (codec,) if codec in forms.layouts else ()

    def body_bytes(self, block: Block, number: int) -> int:
        """Return the most bytes of a block's body on a tier; 0 if that is unknown here."""
        if block.n_bytes:
            return block.n_bytes
        moving = self._mover.on_the_way(block.key, number) if block.going >> number & 1 else None
        if moving is not None:
            return moving.store.body.nbytes
        codecs = self.codecs(block, number)
        return max([self._forms[block.group].layouts[c].page_bytes for c in codecs], default=0)


# The stack of tiers: residency of blocks there, protection from each policy, and moves.
#
# A block is forgotten when no place holds it any more.

_BENIGN = ("", "absent", "layout", "fidelity")
_REST_DEADLINES = 10  # rest of a tier after a missed deadline: waiting costs a tenth at most
_REST_S = 1.0  # rest of a tier that reports that it does not answer now
_AWAY = ("breaker", "closed")  # reasons of a tier that is away now, and may come back
# Reason and kind of a full remote engine; on a local tier, "full" is a passing state.
_NO_ROOM = ("full", "remote")


def serves(mover: Mover, block: Block, number: int) -> bool:
    """Return whether a tier has a block and answers, or is storing the block."""
    lane = mover.lanes[number]
    return block.key in lane.bodies or bool(block.tiers >> number & 1 and lane.answering)


class TierStack:
    """The tiers below the devices and the blocks in them. Callers hold the KV lock.

    Args:
        context: The known blocks, with time, tenants and costs for all policies.
        tiers: The tiers, nearest first.
        forms: The page forms of each layer group.
        policies: `policies(kind, capacity_bytes)` makes the policy of one place.
        bus: Bus that events are emitted on.
        config: Write-back on or off, and the deadline of a load.
        sends: Returns whether other processes read the pages, at rates that are unknown here.
        on_forget: Called with a block before the index forgets it.

    Raises:
        ConfigError: Two tiers have one name.

    Attributes:
        tiers: The tiers, nearest first.
        places: The tiers as policies see them, in the same order.
        admission: Choice of the tiers that store a block.
        copies: Codecs and bytes of blocks on the tiers.
        listing: What publishes the frames that tiers list.
        mover: Transfers to and from the tiers.
        fidelity: Index of the lossiest codec that is accepted.
        provisional: Blocks that must not leave the process yet.
        unwritten: Blocks that wait for the persistent tier, in whatever place they lie.
        leaving: Blocks between their device and the tier that is to store them.
        erasure_logs: Erasure logs of the tiers that other caches use too.
        lost: Dropped pages that the persistent tier should have stored.
        troubles: Reason why a tier stores nothing, by its name; "" once it was warned of.
    """

    def __init__(
        self, context: PolicyContext, tiers: Sequence[Tier], forms: Sequence[Forms], *,
        policies: Callable[[str, int], Policy], bus: Bus, config: Config,
        sends: Callable[[], bool], on_forget: Callable[[Block], None],
    ) -> None:  # fmt: skip
        self.context, self.index, self.forms, self.bus = context, context.index, forms, bus
        self.fidelity = max((codec for one in forms for codec in one.layouts), default=0)
        self.fidelity = COLD if config.cold else self.fidelity
        self.mover = Mover(config.load_deadline_s, context.gate.rates, context.clock.now_ns)
        self._policies, self._on_forget = policies, on_forget
        self.tiers, self.places = list[Tier](), list[PolicyPlace]()
        self.listing = Listing(self.tiers, self.index, self.insert)
        self.erasure_logs = ErasureLogs()
        self.provisional, self.unwritten = Provisional(), dict[Block, None]()
        self.lost, self.leaving = 0, set[Block]()
        self.copies = TierCopies(forms, self.mover)
        self.admission = Admission(
            context, self.tiers, self.places, self.mover, forms, self.provisional,
            write_back=config.write_back, sends=sends,
        )  # fmt: skip
        self.troubles: dict[str, str] = {}  # reason why a tier stores nothing; "" once warned
        for tier in tiers:
            self.add(tier)

    def add(self, tier: Tier, *, states_only: bool = False) -> None:
        """Add a tier below the others, and list its frames.

        Args:
            tier: The tier.
            states_only: Whether the tier is closed to pages.

        Raises:
            ConfigError: Another tier has its name.
        """
        if any(other.name == tier.name for other in self.tiers):
            raise ConfigError(f"two tiers are named {tier.name!r}", "Give each a name of its own")
        number = len(self.tiers)
        if states_only:
            self.admission.states_only.add(number)
        self.tiers.append(tier)
        if isinstance(tier, CodecTier):
            tier.page_of = self._page_of
        # The log is opened before the listing, so that no erasure after it is missed.
        log = self.erasure_logs.open_log(number, tier)
        storing = self.erasure_logs.storing
        self.mover.add(tier, None if log is None else partial(storing, log))
        policy = self._policies(tier.kind, tier.capacity_bytes)
        self.places.append(PolicyPlace(tier.name, tier.kind, policy))
        found = listed(tier)
        for entry in found:  # before kernels are prepared for the forms
            if entry.info.fidelity <= self.fidelity and entry.info.group < len(self.forms):
                self.forms[entry.info.group].meet(entry.info)
        self.listing.publish_frames(number, found)

    def _page_of(self, key: bytes) -> int | None:
        block = self.index.find(key)
        return block.depth if block is not None and block.placed else None

    def detach(self) -> None:
        """Hand the tiers over to another store; only device pages stay known here."""
        for block in self.index:
            block.tiers = block.going = 0
            self.settle(block)
        self.erasure_logs.close()
        self.mover.forget()
        for book in (self.tiers, self.places, self.unwritten):
            book.clear()

    def settle(self, *blocks: Block) -> None:
        """Update the protection of blocks; forget those that no place holds, or is storing."""
        for block in blocks:
            lies = (block.page >= 0 and not block.ahead) or block.tiers or block.going
            if not (lies or block.gone or block in self.leaving):
                self.dismiss(block)
        self.protect(*blocks)

    def dismiss(self, block: Block) -> None:
        """Remove a block from the index; its slot stays reserved while its key is a ghost."""
        self._on_forget(block)
        if self.unwritten.pop(block, 0) is None:  # the block waited, and no place holds it now
            self.miss_out(self.admission.lasting())
        for place in self.places:
            place.let_go(block.slot)
        self.provisional.discard(block)
        self.index.forget(block)

    def protect(self, *blocks: Block) -> None:
        """Hold the slots of blocks in all places while the blocks are kept or being stored."""
        held, free = list[int](), list[int]()
        for block in blocks:
            if not block.gone:  # its slot may be another block's by now
                (held if block.kept or block.going else free).append(block.slot)
        for place in self.places:
            if held:
                place.hold(*held)
            if free:
                place.let_go(*free)

    def insert(self, blocks: Sequence[Block], number: int) -> None:
        """Insert blocks that became resident on a tier into its policy, root to leaf."""
        coded = isinstance(self.tiers[number], CodecTier)
        takes = partial(self._takes, number=number)
        self.context.insert(self.places[number], blocks, takes, apart=coded)

    def _takes(self, block: Block, number: int) -> int:
        """Return the bytes that a block takes on a tier, for policies: at least 1."""
        tier = self.tiers[number]
        coded = tier.coded_bytes(block.key) if isinstance(tier, CodecTier) else 0
        return coded or self.copies.size(block, number)

    def miss_out(self, number: int) -> None:
        """Count a page that a tier should have stored and did not; -1 stands for no tier."""
        if number < 0:
            return
        self.mover.lanes[number].dropped += 1
        self.lost += number == self.admission.lasting()

    def store(
        self,
        frames: Sequence[Frame],
        number: int,
        done: Callable[[list[Block]], object] = lambda _: None,
        mark: CopyMark | None = None,
        *,
        waits: bool = False,
        leaves: bool = False,
    ) -> list[Block]:
        """Store blocks of one form in a tier in the background; return those without room there.

        A block with a store under way is not stored a second time, nor is a forgotten one.

        Args:
            frames: Blocks, each with the header, the bytes and perhaps the digests of its frame;
                bytes and digests must stay unchanged until `done` is called with the block.
            number: Tier in the stack.
            done: Called with blocks that are not returned, several together: now with those that
                are not stored again, and later with those that the tier has answered.
            mark: The copy that fills the bytes; None for bytes that are complete.
            waits: Whether to wait while the tier is busy.
            leaves: Whether to count blocks that a busy tier refuses as dropped, unless they wait to
                be written.
        """
        if late := dict.fromkeys(b for b, *_ in frames if b.gone or b.going >> number & 1):
            done([*late])
            frames = [one for one in frames if one[0] not in late]
        blocks = {block.key: block for block, *_ in frames}
        if not blocks:
            return []
        lane, n_bytes, count = self.mover.lanes[number], frames[0][2].nbytes, len(frames)
        each = self.tiers[number].frame_bytes(n_bytes)
        if waits:
            self.mover.await_room(number, n_bytes, (count - 1) * n_bytes)
        proven = self.provisional.keys().isdisjoint(blocks.values())
        busy = not lane.takes(n_bytes, (count - 1) * n_bytes)
        takes = not busy and (proven or not self.admission.outlives(number))
        if not (takes and self.make_room(number, count * each)):
            refused = [] if count > 1 else [*blocks.values()]
            if leaves and busy and refused and refused[0] not in self.unwritten:
                self.miss_out(number)
            for one in frames if count > 1 else ():
                refused += self.store([one], number, done, mark, waits=waits, leaves=leaves)
                # What has landed may make room for the next one.
                self.mover.wait([number], waits * self.mover.deadline_s)
            return refused

        def answered(answers: list[TierAnswer]) -> None:
            lane.incoming_bytes -= each * len(answers)
            ended = [blocks[answer.key] for answer in answers]
            done(ended)
            self._stored(ended, number, frames[0][1].codec, answers)

        items = [Store(frame[0].key, *frame[1:]) for frame in frames]
        taken = [*blocks.values()][: self.mover.store(number, items, answered, mark)]
        lane.incoming_bytes += each * len(taken)
        for block in taken:
            block.going |= 1 << number
        for block in taken if number == self.admission.lasting() else ():
            self.unwritten.pop(block, None)
        self.protect(*taken)
        return [*blocks.values()][len(taken) :]

    def _stored(
        self, blocks: list[Block], number: int, codec: int, answers: list[TierAnswer]
    ) -> None:
        tier, lane, kept = self.tiers[number], self.mover.lanes[number], list[Block]()
        n_bytes, seconds, failed = 0, 0.0, dict[Block, str]()
        known = UNKNOWN if tier.shared else codec  # others may have stored theirs before
        for block, answer in zip(blocks, answers, strict=True):
            block.going &= ~(1 << number)
            if answer.outcome is not Outcome.STORED:
                self.bus.emit(Failed(tier=tier.name, operation="store", reason=answer.reason))
                if answer.reason in _AWAY:
                    lane.rest(_REST_S)
                if not block.gone:
                    failed[block] = answer.reason
            elif block.gone:  # the block was forgotten while it was stored
                self._wipe(number, [block.key])
            else:
                kept.append(block)
                n_bytes, seconds = n_bytes + answer.n_bytes, max(seconds, answer.seconds)
        if kept:
            enter_tier(kept, number, known)
            for chain in chains(kept):
                self.insert(chain, number)
            lane.stored_bytes += n_bytes
            told = Stored(tier=tier.name, pages=len(kept), n_bytes=n_bytes, seconds=seconds)
            self.bus.emit(told)
        self.settle(*blocks)
        for block, reason in failed.items():
            self._not_stored(block, number, reason)

    def _not_stored(self, block: Block, number: int, reason: str) -> None:
        """Queue a page again if its tier is away; else count it as dropped."""
        again = reason in _AWAY and number == self.admission.writes_to()
        if not (again and self.wait(block)) and reason != "cancelled":
            self.miss_out(number)
            if reason in errno.errorcode.values() or (reason, self.tiers[number].kind) == _NO_ROOM:
                self.troubles.setdefault(self.tiers[number].name, reason)

    def wait(self, block: Block) -> bool:
        """Queue a block for the persistent tier; return False if no place holds it, or will."""
        if block.somewhere or block.going:
            self.unwritten[block] = None
        return block in self.unwritten

    def _wipe(self, number: int, keys: list[bytes]) -> None:
        """Erase keys from a tier; where that fails, delete them and emit a `Failed` event."""
        tier = self.tiers[number]
        try:
            tier.erase(keys)
        except StoreError as error:
            tier.delete(keys)
            self.bus.emit(Failed(tier=tier.name, operation="erase", reason=error.problem))

    def make_room(self, number: int, need: int) -> bool:
        """Evict from a tier until a store of so many bytes fits; return whether it does."""
        tier, place, lane = self.tiers[number], self.places[number], self.mover.lanes[number]
        while (over := tier.used_bytes() + lane.incoming_bytes + need - tier.capacity_bytes) > 0:
            if need > tier.capacity_bytes:
                return False
            if self.mover.collect():
                continue  # frames that have landed count as incoming no more
            if (stranger := self.listing.stranger(number)) is not None:
                place.remove(stranger)
                self._evict_all([stranger], number, "unused")
                continue
            victims, left = list[Block](), over
            try:
                while left > 0 and (slots := place.evict(self.context.now_ns(), 1)) is not None:
                    victims.append(self.index.at(int(slots[0])))
                    left -= tier.frame_bytes(self._takes(victims[-1], number))
            finally:  # a policy may fail
                self._evict_all(victims, number, "space")
            if not victims and not self.listing.adopt(number):
                return False
        return True

    def sources(self, block: Block) -> Iterator[ReadFrom]:
        """Yield the places that a page may be read from now, best first.

        Callers take the next one only after a failed read. Unreadable copies are unlisted.
        """
        moving = self.mover.on_the_way(block.key) if block.going else None
        if moving is not None and moving.store.info.codec in self.forms[block.group].layouts:
            yield ReadFrom(moving.tier, moving.store.info.codec, True)
        for number in range(len(self.tiers)):
            if block.tiers >> number & 1:
                codecs = self.copies.codecs(block, number)
                if not codecs:
                    self._unlist(block, number)
                elif self.mover.lanes[number].answering:
                    for codec in codecs:
                        if block.tiers >> number & 1:
                            yield ReadFrom(number, codec, codec == codecs[-1])

    def load(self, block: Block) -> tuple[int, FrameInfo, memoryview] | None:
        """Load a block from the nearest tier that serves it; return also that tier's number."""
        for number in range(len(self.tiers)):
            if not block.gone and (found := self._load(block, number)) is not None:
                return number, *found
        return None

    def _load(self, block: Block, number: int) -> tuple[FrameInfo, memoryview] | None:
        """Load and verify a block from one tier, into fresh memory.

        Args:
            block: The block to read.
            number: Tier in the stack.

        Returns:
            The frame's header and its body; None if the tier cannot serve the block now.
        """
        if not serves(self.mover, block, number):
            return None
        wished = [BUNDLE_LAYOUT if block.kind == "weights" else LAYOUT]
        if block.kind == "state" and block.group < len(self.forms):
            wished.append(self.forms[block.group].fingerprints[0])  # the layout of a tail
        if block.kind == "page":
            codecs = self.copies.codecs(block, number)
            wished = [self.forms[block.group].fingerprints[codec] for codec in codecs]
        for layout in wished:
            body = bytearray(self.copies.body_bytes(block, number))
            wanted = Load(block.key, memoryview(body), layout, self.fidelity)
            (answer,), _ = self.mover.load([(number, wanted)])
            if answer.outcome is Outcome.HIT and answer.info is not None:
                self.mover.lanes[number].loaded_bytes += answer.n_bytes
                return answer.info, memoryview(body)[: answer.n_bytes].toreadonly()
            if answer.reason != "layout" or layout == wished[-1]:
                self.not_served(block, number, answer)
                break
        return None

    def not_served(self, block: Block, number: int, answer: TierAnswer) -> None:
        """Count a failed load: rest the tier if it failed, unlist the block if its copy is bad."""
        name, lane = self.tiers[number].name, self.mover.lanes[number]
        if answer.outcome is Outcome.FAILED:  # the copy may still be there: it stays listed
            self.bus.emit(Failed(tier=name, operation="load", reason=answer.reason))
            if answer.reason.startswith("deadline"):
                lane.rest(_REST_DEADLINES * (answer.seconds or lane.deadline_s))
            elif answer.reason in _AWAY:
                lane.rest(_REST_S)
            return
        if answer.reason not in _BENIGN:
            lane.refused += 1
            self.bus.emit(Quarantined(tier=name, key=block.key, reason=answer.reason))
        self._unlist(block, number)

    def _unlist(self, block: Block, number: int) -> None:
        """Remove a block from a tier's list, as its copy there is absent or unreadable."""
        self.places[number].remove(block)
        block.tiers &= ~(1 << number)
        self.settle(block)

    def delete(self, block: Block) -> None:
        """Delete a block from every writable tier, and from the lists of all."""
        for number, tier in enumerate(self.tiers):
            if block.tiers >> number & 1 and tier.writable:
                tier.delete([block.key])
            if isinstance(tier, CodecTier):
                tier.bases.drop(block.key)
        self.unlist_all(block)

    def unlist_all(self, block: Block) -> None:
        """Remove a block from the lists of all tiers, without deleting its frames."""
        for number in range(len(self.tiers)):
            if block.tiers >> number & 1:
                self.places[number].remove(block)
        block.tiers = 0

    def _evict_all(self, victims: Sequence[Block], number: int, reason: str) -> None:
        """Evict blocks that left a tier's policy; after an error, those that stay return to it."""
        try:
            if reason not in ("lease", "unused"):
                self._pass_on(victims, number)
            for block in victims:
                taken = self._takes(block, number)
                self.tiers[number].delete([block.key])
                block.tiers &= ~(1 << number)
                name = self.tiers[number].name
                self.bus.emit(Evicted(tier=name, pages=1, n_bytes=taken, reason=reason))
                self.settle(block)
        finally:
            self.insert([block for block in victims if block.tiers >> number & 1], number)

    def _pass_on(self, victims: Sequence[Block], number: int) -> None:
        """Start copying a tier's victims to the tiers below it, equal forms together."""
        left = [b for b in victims if (b.page < 0 or b.ahead) and not b.tiers >> (number + 1)]
        last = {b for b in left if b.tiers | b.going == 1 << number} - self.leaving
        for lower, blocks in self.takers(left, number + 1, leaves=last).items():
            copied, lane = self.copy(blocks, number, lower), self.mover.lanes[lower]
            if copied:
                self.demoted(self.tiers[number].name, lower, sum(copied.values()), len(copied))
            for block in blocks:
                late = block in last and not (block in copied or block in self.unwritten)
                if late and not lane.takes(self.copies.body_bytes(block, number)):
                    self.miss_out(lower)

    def take_back(self, block: Block, number: int) -> None:
        """Delete a tier's copy of a block that lies on its device too."""
        self.places[number].remove(block)
        self._evict_all([block], number, "space")

    def copy(self, blocks: Iterable[Block], source: int, target: int) -> dict[Block, int]:
        """Start copying blocks from one tier to another; return the bytes of those on their way.

        Another tier takes them unread out of host memory, unless it is to encode them.
        """
        tier, encodes = self.tiers[source], isinstance(self.tiers[target], CodecTier)
        alike, copied = dict[tuple[int, int], list[Frame]](), dict[Block, int]()
        for block in blocks:
            found = tier.as_store(block.key) if isinstance(tier, HostTier) and not encodes else None
            frame = found[1:] if found else self._load(block, source)
            if frame:
                alike.setdefault((frame[0].codec, len(frame[1])), []).append((block, *frame))
        for (_, n_bytes), frames in alike.items():
            refused = self.store(frames, target)
            copied |= {block: n_bytes for block, *_ in frames if block not in refused}
        return copied

    def takers(
        self, blocks: Iterable[Block], first: int = 0, *, leaves: Collection[Block] = ()
    ) -> dict[int, list[Block]]:
        """Return the blocks by the nearest tier, from number `first` on, that should store them.

        Blocks are left out that no tier should store, or that a nearer one has or is storing.

        Args:
            blocks: The blocks.
            first: Number of the nearest tier to consider.
            leaves: Blocks that leave their last place, so that each is dropped, and counted so, if
                all tiers that should store it rest.
        """
        found, left, admission = dict[int, list[Block]](), [*blocks], self.admission
        from_memory = first == 0 or self.tiers[first - 1].kind == "host"
        for rests in (False, True):
            for number in range(first, len(self.tiers)):
                left = [b for b in left if not (b.gone or (b.tiers | b.going) >> number & 1)]
                if left and self.mover.lanes[number].rests is rests:
                    worth = admission.worth_storing(admission.storable(left, number), number)
                    asked = [b for b in worth if from_memory and b not in self.unwritten]
                    declined = admission.decline(asked, number)
                    worth = [block for block in worth if block not in declined]
                    takes = dict.fromkeys(admission.admitted(worth, number))
                    left = [b for b in left if not (b in takes or b in declined)]
                    if takes and not rests:
                        found[number] = [*takes]
                    for block in takes if rests else ():
                        if block not in self.unwritten:
                            self.miss_out(number)
            left = [block for block in left if block in leaves]
        return found

    def demoted(self, source: str, number: int, n_bytes: int, pages: int = 1) -> None:
        """Emit the event that pages are on their way down to a tier."""
        tier = self.tiers[number].name
        self.bus.emit(Demoted(source=source, tier=tier, pages=pages, n_bytes=n_bytes))

    def still_holds(self, block: Block, number: int) -> bool:
        """Return whether a tier that is listed for a page still has it; else unlist the page."""
        if not block.tiers >> number & 1:
            return False
        there = self.tiers[number].contains([block.key])[0]
        if not there:
            self._unlist(block, number)
        return there

    def supersede(self, block: Block | None) -> None:
        """Delete a block's copies that are too lossy to be read here, before it is made anew."""
        if block is not None and block.tiers and block.fidelity > self.fidelity:
            self.delete(block)

    def quarantine(self, blocks: Iterable[Block]) -> None:
        """Bar read-only tiers' copies of blocks with wrong content from being read again."""
        numbers = [number for number, tier in enumerate(self.tiers) if not tier.writable]
        there = ((n, block) for block in blocks for n in numbers if block.tiers >> n & 1)
        self.listing.quarantined |= {(number, block.key) for number, block in there}

    def drop_bases(self, covers: Callable[[bytes, bytes], bool]) -> None:
        """Drop the bases of coded pages, where `covers(tenant, namespace)` says so."""
        for tier in self.tiers:
            if isinstance(tier, CodecTier):
                tier.drop_bases(covers)

    def lose(
        self,
        blocks: Sequence[Block],
        erased_from: int,
        covers: Callable[[bytes, bytes], bool] | None = None,
    ) -> None:
        """Erase from all tiers the blocks that another cache erased.

        Args:
            blocks: The erased blocks.
            erased_from: Number of a tier that they are gone from already, -1 if there is none.
            covers: Returns whether the bases of a tenant and a namespace were erased, too.
        """
        if covers is not None:
            self.drop_bases(covers)
        for number, tier in enumerate(self.tiers):
            keys = [block.key for block in blocks if block.tiers >> number & 1]
            keys += bases_in(tier, covers) if covers is not None else ()
            if isinstance(tier, CodecTier):
                tier.drop_copies(keys)
            if number == erased_from or not keys:
                continue
            if tier.writable:
                self._wipe(number, keys)
            else:
                self.listing.quarantined |= {(number, key) for key in keys}
        for block in blocks:
            self.unlist_all(block)

    def relieve(self, chosen: Callable[[PolicyPlace, int], list[int]], reason: str) -> None:
        """Evict the blocks that `chosen` has removed from each place's policy."""
        for number, place in enumerate(self.places):
            if slots := chosen(place, self.context.now_ns()):
                self._evict_all([self.index.at(slot) for slot in slots], number, reason)
                self.mover.drain()  # what it passed on counts in the places below
