"""The prefix index: all known blocks, by chain key, and what policies know of them.

A chain key names a whole prefix, so the radix tree over prefixes is a dictionary of keys with
links to the keys above: following a prompt is one look-up per page, and two tenants or models
never share a block (their keys differ from the root on).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, itemgetter
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.clock import Clock
from flowkv.core.errors import StateError
from flowkv.core.geometry import CODEC_SHIFT
from flowkv.core.keys import ROOT
from flowkv.policy.admission import WriteAdmission
from flowkv.policy.base import Lease
from flowkv.policy.restore import LoadGate
from flowkv.residency.places import PolicyPlace
from flowkv.tiers.base import FrameInfo

# Ghosts: keys of forgotten blocks, with their slots reserved for a while, so that policies learn.
#
# A policy that evicted a block it should have kept can only notice if the block comes back under
# its old slot number. So the slot of a forgotten block stays with its key, until enough others were
# forgotten after it. Nothing of the block itself stays; a ghost takes about 210 bytes.

_BATCH = 64
"""Ghosts that drop out together, so that policies get one call for all of them."""


class Ghost(NamedTuple):
    """Slot and place in the tree of a forgotten block.

    Attributes:
        slot: The block's number in all policies.
        parent: Chain key above the block.
        realm: Namespace digest, tenant salt and layer group.
    """

    slot: int
    parent: bytes
    realm: tuple[bytes, bytes, int]


class Ghosts:
    """A bounded first-in, first-out list of forgotten blocks. Callers hold the KV lock.

    Args:
        drop: Called with slots that no block or ghost has any more.
    """

    def __init__(self, drop: Callable[[list[int]], None]) -> None:
        self._drop = drop
        self._known: dict[bytes, Ghost] = {}
        self._realms: dict[tuple[bytes, bytes, int], tuple[bytes, bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def get(self, key: bytes) -> Ghost | None:
        """Return the ghost of a key, or None."""
        return self._known.get(key)

    def add(
        self, key: bytes, slot: int, parent: bytes, realm: tuple[bytes, bytes, int], most: int
    ) -> None:
        """Add a ghost; the oldest ones drop out where there are more than `most`."""
        realm = self._realms.setdefault(realm, realm)  # one object for all ghosts of a realm
        self._known[key] = Ghost(slot, parent, realm)
        surplus = len(self._known) - most
        if surplus >= min(_BATCH, most + 1):
            self._leave(list(islice(self._known, surplus)))
            if len(self._realms) > 2 * len(self._known):
                self._realms = {ghost.realm: ghost.realm for ghost in self._known.values()}

    def revive(self, key: bytes) -> int:
        """Remove the ghost of a key that comes back; return its slot, -1 if there is none."""
        ghost = self._known.pop(key, None)
        return ghost.slot if ghost else -1

    def bury(self, keys: Collection[bytes]) -> int:
        """Drop the ghosts of keys and all ghosts below them; return their number."""
        children: dict[bytes, list[bytes]] = {}
        for key, ghost in self._known.items():
            children.setdefault(ghost.parent, []).append(key)
        doomed = dict.fromkeys(key for key in keys if key in self._known)
        waiting = list(keys)
        while waiting:
            for key in children.pop(waiting.pop(), ()):
                doomed[key] = None
                waiting.append(key)
        self._leave(doomed)
        return len(doomed)

    def bury_realm(self, meant: Callable[[tuple[bytes, bytes, int]], bool]) -> int:
        """Drop the ghosts of the realms that `meant` selects; return their number."""
        doomed = [key for key, ghost in self._known.items() if meant(ghost.realm)]
        self._leave(doomed)
        self._realms = {realm: realm for realm in self._realms if not meant(realm)}
        return len(doomed)

    def _leave(self, keys: Iterable[bytes]) -> None:
        slots = [self._known.pop(key).slot for key in keys]
        if slots:
            self._drop(slots)


LEAST_GHOSTS, MANY_GHOSTS = 1 << 10, 1 << 14
GHOSTS_PER_BLOCK = 16, 2
"""Ghosts kept for each known block: up to `MANY_GHOSTS` in all, and beyond."""

_TRACELESS = ("state", "memo")
"""Kinds of blocks that leave no ghost: hardly any later request has exactly their tokens."""


def most_ghosts(blocks: int) -> int:
    """Return the number of forgotten blocks that keep their slots beside `blocks` known ones.

    A victim of a small pool comes back after many others; one of a large pool, sooner or never.
    """
    few, many = GHOSTS_PER_BLOCK
    return max(LEAST_GHOSTS, min(few * blocks, MANY_GHOSTS), many * blocks)


_WIDEST = 16
"""Most branches followed at each level to find a long chain."""

UNKNOWN = 15
"""Codec index of a copy that only its frame's header can identify."""

LAYOUT = hashlib.sha256(b"flowkv.state/1").digest()[:16]
"""Layout field of a state's frame."""

BUNDLE_LAYOUT = hashlib.sha256(b"flowkv.bundle/1").digest()[:16]
"""Layout field of the frames of named tensors (`KV.keep`)."""


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A known page or state: its identity, and its places on the device and the tiers.

    Attributes:
        slot: Small integer by which policies know the block; reserved for its key until both the
            block and its ghost are forgotten.
        key: Chain key.
        parent: Chain key above the block.
        group: Layer group.
        kind: "page" or "state".
        depth: Pages above the block, as far as they were known when it was published.
        placed: Whether these are all of them, so that `depth` is its number in its prompt.
        page: Id of its page in the device pool, -1 for none.
        tiers: Bit i is set while tier i of the stack holds a copy.
        codecs: Four bits for each tier: codec index of its copy; see `codec_on`.
        fidelity: Lossiest codec index of the block and its ancestors (DESIGN D6).
        holds: Open sequences that use the device page.
        idle: Granules of its device page while that may be evicted; else 0.
        kept: Number of reasons, beside holds, that protect it from eviction everywhere.
        going: Bit i is set while a store of it to tier i of the stack is under way.
        unpaid: Bit i is set once tier i was spared it, as loading it could never pay.
        pinned: Whether `KV.pin` protects it.
        ahead: Whether its page was evicted from the device, and stays until its room is needed.
        gone: Whether the index has forgotten it; only open sequences may still use its page.
        lease: Retention class for the policies, see `policy.Lease`.
        n_bytes: Bytes of a state's body, an upper bound after a restart; 0 for pages.
        tail: Tokens of a state behind its parent page.
        answer: Key of the latest state behind an answer to a prompt that a state is the last one
            of, and the prompt's tokens behind it.
        made: Last tokens of a page that are of an answer, not of a prompt, as far as known.
        sealable: False once a codec could not hold its page.
        tokens: Ids that it covers, where this process knows them; for `KV.explain`, `KV.forget`.
        tenant: Tenant salt.
        namespace: Namespace digest.
    """

    slot: int
    key: bytes
    parent: bytes
    group: int
    kind: str
    depth: int = 0
    placed: bool = False
    page: int = -1
    tiers: int = 0
    codecs: int = 0
    fidelity: int = 0
    holds: int = 0
    idle: int = 0
    kept: int = 0
    going: int = 0
    unpaid: int = 0
    pinned: bool = False
    ahead: bool = False
    gone: bool = False
    lease: str | Lease = ""
    n_bytes: int = 0
    tail: int = 0
    answer: tuple[bytes, Sequence[int]] = b"", ()
    made: int = 0
    sealable: bool = True
    tokens: NDArray[np.uint32] | None = None
    tenant: bytes = b""
    namespace: bytes = b""

    @property
    def somewhere(self) -> bool:
        """Return whether the device or a tier holds the block."""
        return self.page >= 0 or self.tiers != 0

    @property
    def nearest(self) -> int:
        """Return the number of the nearest tier that holds the block, -1 if none does."""
        return (self.tiers & -self.tiers).bit_length() - 1

    @property
    def tier(self) -> int:
        """Return the number of the nearest tier that holds the block, or stores it now, or -1."""
        there = self.tiers or self.going
        return (there & -there).bit_length() - 1

    def lacked_by(self, tier: int) -> bool:
        """Return whether a tier neither has the known block nor is storing it."""
        return not (self.gone or (self.tiers | self.going) >> tier & 1)

    def codec_on(self, tier: int) -> int:
        """Return the codec index of a tier's copy; `UNKNOWN` if others may have written it."""
        return self.codecs >> 4 * tier & UNKNOWN

    @property
    def place(self) -> bytes:
        """Return the block's key in `Beginnings`, distinct for each tenant and model."""
        return self.parent if self.parent != ROOT else self.namespace + self.tenant


def enter_tier(blocks: Iterable[Block], tier: int, codec: int) -> None:
    """Record that a tier holds a copy of this codec of each block."""
    for block in blocks:
        block.tiers |= 1 << tier
        block.codecs = block.codecs & ~(UNKNOWN << 4 * tier) | codec << 4 * tier


def frame_infos(
    blocks: Iterable[Block], layout: bytes, tokens: int, stripe_bytes: int, codec: int = 0
) -> list[FrameInfo]:
    """Return the headers of frames of blocks.

    Args:
        blocks: The blocks.
        layout: Fingerprint of the bodies' layout.
        tokens: Number of tokens in each body; headers of pages whose number does not say the
            positions of their tokens have 0.
        stripe_bytes: Bytes of each part that can be read alone.
        codec: Index of the bodies' codec.
    """
    found = list[FrameInfo]()
    for block in blocks:
        ancestry = block.fidelity, layout, block.parent, block.namespace, block.group
        count = tokens if block.placed or block.kind != "page" else 0
        found.append(FrameInfo(block.kind, codec, *ancestry, count, stripe_bytes, block.tenant))
    return found


def matching(some: NDArray[np.uint32], others: NDArray[np.uint32]) -> int:
    """Return the length of the longest common prefix of two token arrays."""
    most = min(len(some), len(others))
    differing = np.flatnonzero(some[:most] != others[:most])
    return int(differing[0]) if len(differing) else most


_NEAREST = 16
"""Most neighbours offered; mostly the first one serves."""


class Beginnings:
    """Pages of the first layer group, sorted by their tokens, below each key.

    The page with the longest common prefix is one of the two neighbours in this order.
    """

    def __init__(self) -> None:
        # Below each key: the tokens of its pages as sortable bytes, and the pages in that order.
        self._below: dict[bytes, tuple[list[bytes], list[Block]]] = {}

    def add(self, block: Block) -> None:
        """Add a page of which the tokens are known."""
        order, blocks = self._below.setdefault(block.place, ([], []))
        mine = _order(block.tokens)  # type: ignore[arg-type]
        at = bisect_right(order, mine)
        order.insert(at, mine)
        blocks.insert(at, block)

    def discard(self, block: Block) -> None:
        """Remove a page that was added."""
        order, blocks = self._below[block.place]
        at = blocks.index(block, bisect_left(order, _order(block.tokens)))  # type: ignore[arg-type]
        del order[at], blocks[at]
        if not order:
            del self._below[block.place]

    def near(self, place: bytes, tokens: NDArray[np.uint32]) -> list[tuple[int, Block]]:
        """Return pages near these tokens with their common prefix lengths, the longest first.

        Args:
            place: Key of the pages, see `Block.place`.
            tokens: Token ids.
        """
        if place not in self._below:
            return []
        (order, blocks), mine = self._below[place], _order(tokens)
        at, found = bisect_left(order, mine), list[tuple[int, Block]]()
        for side in (range(at - 1, -1, -1), range(at, len(order))):
            for i in side[:_NEAREST]:
                alike = order[i][:4] == mine[:4]  # the first token; else no further page matches
                found.append((matching(blocks[i].tokens, tokens) if alike else 0, blocks[i]))  # type: ignore[arg-type]
                if not alike:
                    break
        return sorted(found, key=itemgetter(0), reverse=True)[:_NEAREST]


def _order(tokens: NDArray[np.uint32]) -> bytes:
    return tokens.astype(">u4").tobytes()


class PrefixIndex:
    """All known blocks, and ghosts of forgotten ones. Callers hold the KV lock.

    Args:
        on_drop: Called with slots that belong to no key any more, before they are reused.
        most_ghosts: Returns the number of ghosts to keep, given the number of known blocks.

    Attributes:
        watchers: Called with a block and True when its tokens become known, False when it is
            forgotten.
        find: Returns the block of a key, or None.
    """

    def __init__(
        self,
        on_drop: Callable[[list[int]], None] = lambda slots: None,
        most_ghosts: Callable[[int], int] = most_ghosts,
    ) -> None:
        self._on_drop, self._most_ghosts = on_drop, most_ghosts
        self.ghosts, self.beginnings = Ghosts(self._drop), Beginnings()
        self.watchers: list[Callable[[Block, bool], None]] = []
        self._by_key: dict[bytes, Block] = {}
        self.find: Callable[[bytes], Block | None] = self._by_key.get
        self._slots: list[Block | None] = []
        self._free: list[int] = []
        # The tree by keys. A forgotten block between known ones stays as a *hole*, an entry of
        # `_holes` that maps its key to its parent, so that `branches` loses nothing below it.
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._holes: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self._by_key.values()))

    def at(self, slot: int) -> Block:
        """Return the block of a slot; see `those`."""
        return self.those([slot])[0]

    def those(self, slots: Sequence[int]) -> list[Block]:
        """Return the blocks of slots.

        Raises:
            StateError: A slot is not in use.
        """
        blocks = [self._slots[slot] for slot in slots]
        if None in blocks:
            slot = slots[blocks.index(None)]
            raise StateError(f"slot {slot} is not in use", "Report this as a bug")
        return cast(list[Block], blocks)

    def get_all(self, slots: Iterable[int]) -> list[Block | None]:
        """Return the block of each slot; None if the slot is a ghost's, or free."""
        known, most = self._slots, len(self._slots)
        return [known[slot] if 0 <= slot < most else None for slot in slots]

    def slot(self, key: bytes) -> int:
        """Return the slot of a key, known or a ghost; -1 if it has none."""
        return self.slots([key])[0]

    def slots(self, keys: Iterable[bytes]) -> list[int]:
        """Return what `slot` returns for each key."""
        known, ghosts = self._by_key, self.ghosts._known
        return [one.slot if (one := known.get(key) or ghosts.get(key)) else -1 for key in keys]

    def chain(self, key: bytes) -> list[int]:
        """Return the slots from the first page down to a key, as far up as they are known."""
        slots: dict[int, None] = {}
        while key != ROOT and (known := self._by_key.get(key) or self.ghosts.get(key)):
            if known.slot in slots:
                break  # a stored frame may have a wrong parent key
            slots[known.slot] = None
            key = known.parent
        return list(reversed(slots))

    def get_or_create(self, key: bytes, parent: bytes, group: int, kind: str = "page") -> Block:
        """Return the block of a key, creating it if it is new."""
        block = self._by_key.get(key)
        if block is not None:
            return block
        slot = self.ghosts.revive(key)
        if slot < 0:
            slot = self._free.pop() if self._free else len(self._slots)
        above = self._by_key.get(parent)
        depth, placed = (0, parent == ROOT) if above is None else (above.depth + 1, above.placed)
        block = Block(slot, key, parent, group, kind, depth, placed)
        if slot == len(self._slots):
            self._slots.append(block)
        else:
            self._slots[slot] = block
        self._by_key[key] = block
        self._holes.pop(key, None)
        self._children.setdefault(parent, {})[key] = None
        return block

    def set_tokens(self, block: Block, tokens: NDArray[np.uint32]) -> None:
        """Record the tokens of a page, if they are unknown; the array must not change later."""
        if block.tokens is None:
            block.tokens = tokens
            if not block.group:
                self.beginnings.add(block)
            for watch in self.watchers:
                watch(block, True)

    def forget(self, block: Block) -> None:
        """Remove a block; a page leaves a ghost, and the blocks below it stay known."""
        block.gone = True
        for watch in self.watchers:
            watch(block, False)
        if block.kind == "page" and block.tokens is not None and not block.group:
            self.beginnings.discard(block)
        del self._by_key[block.key]
        self._slots[block.slot] = None
        if block.kind in _TRACELESS:
            self._drop([block.slot])
        else:
            realm, most = (block.namespace, block.tenant, block.group), self._most_ghosts(len(self))
            self.ghosts.add(block.key, block.slot, block.parent, realm, most)
        if block.key in self._children:
            self._holes[block.key] = block.parent
        else:
            self._unlink(block.key, block.parent)

    def tails(self, key: bytes, most: int) -> Iterable[int]:
        """Return the token counts of the tails right below a key, largest first, up to `most`.

        Where the key has more than `most` children, return all numbers, for the caller to try.
        """
        if len(self._children.get(key, ())) > most:
            return range(most, 0, -1)
        found = {one.tail for one in self.children(key) if one.kind == "state"}
        return sorted((count for count in found if 0 < count <= most), reverse=True)

    def children(self, key: bytes) -> list[Block]:
        """Return the known blocks directly below a key; `ROOT` is above all first pages."""
        found = map(self._by_key.get, self._children.get(key, ()))
        return [block for block in found if block is not None]

    def reach(self, block: Block, most: int) -> int:
        """Return the length in pages of the longest known chain through a block, up to `most`."""
        pages, above = 1, self._by_key.get(block.parent)
        while above is not None and pages < most:
            pages, above = pages + 1, self._by_key.get(above.parent)
        level = self.children(block.key)
        while level and pages < most:
            pages += 1
            level = [below for one in level[:_WIDEST] for below in self.children(one.key)]
        return pages

    def branches(self, key: bytes) -> list[list[Block]]:
        """Return the known blocks below a key, all the way down: a list for each child.

        A branch begins with the child itself, unless that was forgotten.
        """
        found = []
        for child in self._children.get(key, ()):
            branch, keys, seen = [], [child], {child}
            while keys:
                below = keys.pop()
                # A stored frame may have a wrong parent key: a circle is followed only once.
                fresh = [one for one in self._children.get(below, ()) if one not in seen]
                seen.update(fresh)
                keys += fresh
                block = self._by_key.get(below)
                if block is not None:
                    branch.append(block)
            found.append(branch)
        return found

    def below(self, meant: Callable[[bytes], bool]) -> list[Block]:
        """Return the known blocks below the keys that `meant` selects, all the way down."""
        above = [key for key in self._children if meant(key)]
        return [block for key in above for branch in self.branches(key) for block in branch]

    def _drop(self, slots: list[int]) -> None:
        self._on_drop(slots)
        self._free += slots

    def _unlink(self, key: bytes, parent: bytes) -> None:
        siblings = self._children[parent]
        del siblings[key]
        while not siblings:
            del self._children[parent]
            if parent not in self._holes:
                return
            key, parent = parent, self._holes.pop(parent)
            siblings = self._children[parent]
            del siblings[key]


# Contents of pages that suspended sequences need again, bit for bit.


class Copy(NamedTuple):
    """Host copy of a private page of a suspended sequence.

    Attributes:
        codec: Index of its codec.
        content: Its bytes.
    """

    codec: int
    content: torch.Tensor


class SwappedCopy:
    """A known page that suspended sequences need again as it is now. Callers hold the KV lock.

    While the page stays in place, nothing is copied: suspending a shared prefix costs nothing, and
    a sequence that resumes before the page is evicted moves no byte. Just before the page is
    evicted, encoded or erased, it is copied once for all of them (`SwappedCopies`).

    Args:
        block: Block of the page.

    Attributes:
        codec: Index of the page's codec.
        content: The page's bytes in host memory, once it has left its place; else None.
        users: Suspended sequences that need the page.
    """

    __slots__ = ("block", "codec", "content", "users")

    def __init__(self, block: Block) -> None:
        self.block, self.codec = block, block.page >> CODEC_SHIFT
        self.content: torch.Tensor | None = None
        self.users = 0


Saved = list[list[Copy | SwappedCopy | None]]
"""For each group, the source of each page of a suspended sequence; None behind the window."""


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
