"""The `Policy` protocol over the compiled order: what the leaf-first policies have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import NEVER_NS, NO_SLOTS, NO_VISIT, Policy, Slots, Visit
from flowkv.policy.config import LONGEST_S, Lease, LeaseConfig, PolicyConfig
from flowkv.policy.order import compiled
from flowkv.policy.order.compiled import (
    ARC,
    BIRTHS,
    BLOCKED,
    CLOCK,
    CLOCK_LIMIT,
    COUNT,
    DIGEST,
    EXPIRED,
    FIXED,
    GHOST,
    GHOSTS,
    HEAPS,
    HELD_FAST,
    KNOWN,
    LATEST,
    LISTS,
    MODE,
    NEVER,
    NODE,
    ONCE,
    QUEUED,
    RANK_SHIFT,
    RUN_OUT,
    SIZE,
    SLOT_LIMIT,
    SLOT_MASK,
    STALE,
    TARGET,
    TAU,
    TENANTS,
    TERMS,
    TWICE,
    Array,
    attend,
    enlist,
    hold,
    kernel,
    members,
    settle_leaf,
    worth,
)

# What a policy remembers as bytes, and back: msgpack of plain values and columns, all checked.
#
# Nothing that arrives is trusted (DESIGN D11): lengths and ranges are checked, and whatever follows
# from the rest (counters, heaps, lists) is not stored but built anew.

VERSION = 1
KEPT = {"nodes": ("birth", "key", "last", "parent", "live", "depth", "marks")} | {
    "terms": ("lease", "limit", "eta", "fall", "extra", "tenant", "pins")
}
RECORDS = {"nodes": NODE, "terms": TERMS}


class _Image(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    name: str
    options: bytes
    values: dict[str, Any]


def seal(name: str, config: PolicyConfig | None, values: Mapping[str, object]) -> bytes:
    """Bytes of plain values; vectors of numbers go in with `column`.

    Args:
        name: The policy's.
        config: Its options; `unseal` refuses others.
        values: What it remembers.
    """
    options = msgspec.msgpack.encode(config)
    return msgspec.msgpack.encode(_Image(VERSION, name, options, dict(values)))


def unseal(snapshot: bytes, name: str, config: PolicyConfig | None) -> dict[str, Any]:
    """The values that `seal` was given.

    Raises:
        ConfigError: They are of another policy, version or options, or damaged.
    """
    try:
        image = msgspec.msgpack.decode(snapshot, type=_Image)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise damaged(str(error)) from None
    if (image.version, image.name, image.options) != (
        VERSION,
        name,
        msgspec.msgpack.encode(config),
    ):
        raise ConfigError(
            f"the snapshot is of policy {image.name!r}, version {image.version}, or of other "
            f"options, and this is {name!r}, version {VERSION}",
            "Make the policy with the name and options that it had, or start without a snapshot",
        )
    return image.values


def damaged(why: str) -> ConfigError:
    """The error for a snapshot that cannot be what `snapshot` gave."""
    return ConfigError(f"the snapshot is damaged: {why}", "Start without it")


def column(values: NDArray[Any]) -> bytes:
    """A vector of numbers as bytes; nothing for zeros only."""
    return values.tobytes() if values.any() else b""


def uncolumn(values: object, dtype: Any, n: int) -> NDArray[Any]:
    """A vector of `n` numbers.

    Raises:
        ConfigError: It is of another length.
    """
    size = n * np.dtype(dtype).itemsize
    if not isinstance(values, bytes) or len(values) not in {0, size}:
        raise damaged(f"a column is not {size} bytes long")
    return np.frombuffer(values, dtype).copy() if values else np.zeros(n, dtype)


def length_of(values: object, size: int) -> int:
    """How many numbers of so many bytes a column holds; 0 if it is none."""
    return len(values) // size if isinstance(values, bytes) else 0


def columns_of(nodes: Array, terms: Array, state: Array) -> dict[str, Any]:
    """What cannot be built anew, of slots up to the last one used."""
    used = (nodes["birth"] != 0) | (nodes["marks"] != 0) | (terms["pins"] != 0)
    n = int(np.flatnonzero(used).max(initial=-1)) + 1
    parent = nodes["parent"][:n]
    held = (parent >= 0) & (nodes["birth"][parent] == nodes["bond"][:n])
    records = {"nodes": nodes[:n].copy(), "terms": terms[:n]}
    records["nodes"]["parent"] = np.where(held & (nodes["birth"][:n] != 0), parent, -1)
    columns = {f: column(records[kind][f]) for kind, names in KEPT.items() for f in names}
    ghosts = [np.empty(state[GHOSTS + which], np.int64) for which in (1, 2)]
    for which, slots in enumerate(ghosts, 1):
        members(terms, state, which, slots)
    return {"slots": n, "ghosts": [slots.tolist() for slots in ghosts], **columns}


def put_ghosts(nodes: Array, terms: Array, state: Array, ghosts: object) -> None:
    """Fills ARC's lists of ghosts, newest first, and counts what was used once.

    Raises:
        ConfigError: They are not the slots marked so.
    """
    marks = nodes["marks"]
    try:
        lists = msgspec.convert(ghosts, tuple[list[int], list[int]])
    except msgspec.ValidationError:
        raise damaged("its ghosts are none") from None
    for which, slots in enumerate(lists, 1):
        marked = (marks & (GHOST | TWICE)) == (GHOST | TWICE * (which - 1))
        if sorted(slots) != np.flatnonzero(marked).tolist() or (nodes["birth"][slots] != 0).any():
            raise damaged("its ghosts are others")
        state[LISTS + which] = 0
        state[GHOSTS + which] = len(slots)
        for s in reversed(slots):
            enlist(terms, state, which, s)
    once = (nodes["birth"] != 0) & (marks & TWICE == 0)
    state[ONCE] = once.sum() if state[MODE] == ARC else 0
    state[HELD_FAST] = (marks & FIXED != 0).sum()


def chains_of(values: object) -> dict[int, Slots]:
    """The queued requests of a snapshot.

    Raises:
        ConfigError: It holds something else.
    """
    try:
        chains = msgspec.convert(values, dict[int, list[int]])
        return {request: np.array(chain, np.int64) for request, chain in chains.items()}
    except (msgspec.ValidationError, OverflowError):
        raise damaged("its queue is none") from None


def within(values: NDArray[Any], most: int) -> NDArray[np.bool_]:
    """Whether numbers lie within `most` of 0."""
    inside: NDArray[np.bool_] = (values >= -most) & (values <= most)
    return inside


def records_of(
    values: Mapping[str, Any], tenants: int, chains: Mapping[int, Slots]
) -> tuple[Array, Array]:
    """The two vectors of records that `columns_of` was given, but for what follows from the rest.

    Args:
        values: Columns.
        tenants: How many there may be.
        chains: Of the queued requests.

    Raises:
        ConfigError: Something is out of range.
    """
    n = values.get("slots")
    lengths = [
        length_of(values.get(f), size) for f, size in (("birth", 8), ("marks", 4), ("pins", 4))
    ]
    if not isinstance(n, int) or n not in {0, *lengths}:
        raise damaged("it does not say how many slots there are")
    nodes, terms = np.zeros(n, NODE), np.zeros(n, TERMS)
    for kind, into in (("nodes", nodes), ("terms", terms)):
        for field in KEPT[kind]:
            into[field] = uncolumn(values.get(field), RECORDS[kind][field], n)
    for chain in chains.values():
        np.add.at(terms["queued"], chain[(chain >= 0) & (chain < n)], 1)
    here, parent, marks = nodes["birth"] > 0, nodes["parent"], nodes["marks"]
    in_range = (
        (nodes["birth"] >= 0)
        & within(nodes["key"], LATEST)
        & within(nodes["last"], CLOCK_LIMIT)
        & (nodes["depth"] >= 0)
        & (nodes["depth"] <= SLOT_MASK)
        & within(terms["eta"], LATEST)
        & within(terms["extra"], LATEST >> 1)
        & (terms["lease"] >= 0)
        & (terms["pins"] >= 0)
        & ((marks & QUEUED != 0) == (terms["queued"] > 0))
        & ((marks & ((1 << RANK_SHIFT) - 2 * FIXED)) == 0)
        & (marks >> RANK_SHIFT >= 0)
        & (marks >> RANK_SHIFT <= 100)
        & (terms["tenant"] >= 0)
        & (terms["tenant"] < tenants)
        & (parent >= -1)
        & (parent < n)
        & ((parent < 0) | here & here[parent.clip(0, max(n - 1, 0))])
        & (~here | (marks & KNOWN != 0))
        & (here | (marks & FIXED == 0))
    )
    if not in_range.all():
        raise damaged("a number is out of range")
    return nodes, terms


@kernel
def peel(nodes: Array, order: Array) -> int:
    """Fills `order` with resident slots, children before parents; of a ring something is left."""
    for s in range(len(nodes)):
        nodes[s].held = nodes[s].kids
    found, read = 0, 0
    for s in range(len(nodes)):
        if nodes[s].birth != 0 and nodes[s].held == 0:
            order[found] = s
            found += 1
    while read < found:
        p = nodes[order[read]].parent
        read += 1
        if p >= 0:
            nodes[p].held -= 1
            if nodes[p].held == 0:
                order[found] = p
                found += 1
    return found


@kernel
def rebuild(nodes: Array, terms: Array, heaps: Array, state: Array, order: Array) -> bool:
    """Counts children, pins and tenants, and fills heaps and lists; False if there is a ring.

    `order`: room for as many slots as there are; afterwards the resident ones, leaves first.
    """
    for s in range(len(nodes)):
        nodes[s].place = terms[s].due = -1
        expired = nodes[s].birth != 0 and nodes[s].live < 0
        nodes[s].live = -1 if expired else 0
    for s in range(len(nodes)):
        p = nodes[s].parent
        if nodes[s].birth == 0:
            continue
        state[COUNT] += 1
        if p >= 0:
            nodes[s].bond = nodes[p].birth
            nodes[p].kids += 1
            if nodes[p].live < 0 and nodes[s].live >= 0:
                return False  # a live child keeps its parent alive
            nodes[p].live += nodes[s].live >= 0 and nodes[p].live >= 0
        if nodes[s].live < 0:
            state[EXPIRED] += 1
            enlist(terms, state, RUN_OUT, s)
        else:
            enlist(terms, state, TENANTS + terms[s].tenant, s)
    found = peel(nodes, order)
    if found != state[COUNT]:
        return False
    state[BLOCKED] = 0
    for i in range(found):
        if terms[order[i]].pins > 0:
            hold(nodes, terms, heaps, state, order[i])
    for i in range(found):
        settle_leaf(nodes, terms, heaps, state, order[i])
        attend(nodes, terms, heaps, state, order[i])
    return True


# The memory of a compiled order: its arrays, how they grow, and how they are carried over.

FIRST_CAPACITY = 1024
TENANT_LIMIT = 1 << 24


def as_slots(slots: object) -> Slots:
    """A contiguous, writable int64 vector: the one type the compiled calls are made for."""
    if type(slots) is np.ndarray and slots.dtype == np.int64 and slots.ndim == 1:
        flags = slots.flags
        return slots if flags.c_contiguous and flags.writeable else slots.copy()
    if isinstance(slots, Collection) and not isinstance(slots, (Sequence, np.ndarray)):
        return np.fromiter(slots, np.int64, len(slots))
    return np.array(slots, dtype=np.int64).reshape(-1)


class LeafOrder(Policy):
    """Gives up leaves only: a block goes after all its resident children.

    Among the leaves, in this order: the expired; those hinted never to be used again; the others by
    rank (`Lease`), then by key; those that a queued request will use. Of equals the deepest goes
    first, then the smallest slot. The depth of a block is fixed when it is inserted: one more than
    its parent's, or, without a resident parent, its place in the array, since arrays run from root
    to leaf. So the blocks of one request go deepest first even where no parent is known.

    *Key.* The static key of a decayed access count (`.static_key`). The count of a
    block outlives its residence until `forget`. Several inserts and an access at one `now_ns` are
    one access; two accesses are two.

    *Hints.* A block that is expected back in `eta_ns` competes as one that has been unused for as
    long as is left till then; once the time has passed, as one that was used then. `sigma` is not
    needed. A block above several chains goes by the earliest. `NEVER_NS` holds for the chain's last
    block and those above it that no other chain uses. A hint ends with the block's next use.

    *Leases.* A block expires at min(last access + lease, birth + max age) of its class, a parent
    not before its resident children. No access revives it, only `insert` does, which begins a new
    life; an expired parent is no parent. An insert that names a lease, of a block that is resident
    already, prolongs its lease and raises its rank, and never the opposite.

    A parent that is removed leaves its children resident, as roots. A block that is inserted again
    while resident takes the parent it is given if it has none. Memory: 128 bytes per slot number up
    to the largest one used, 16 per leaf, and 16 where leases or hints are used.

    Args:
        tau_ns: Half-life of a block's access count in nanoseconds; 0 for recency alone.
        leases: Lease classes.
    """

    name = "leaf-order"

    def __init__(self, tau_ns: int = 0, leases: LeaseConfig | None = None) -> None:
        self.config = leases or LeaseConfig()
        self._state = np.zeros(LISTS + TENANTS + 1, np.int64)
        self._state[CLOCK] = -CLOCK_LIMIT
        self._state[TAU] = tau_ns
        self._arrays: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] = (
            np.zeros(0, NODE),
            np.zeros(0, TERMS),
            np.zeros((HEAPS, 0, 2), np.int64),
        )
        self._queued: dict[int, Slots] = {}
        self._grow(FIRST_CAPACITY)
        self._leases = {
            name: _numbers(lease, name != "") for name, lease in self.config.classes().items()
        }

    def snapshot(self) -> bytes:
        """See `Policy.snapshot`. About 90 bytes per slot number, less where little is used."""
        nodes, terms, _ = self._arrays
        compiled.tick(*self._arrays, self._state, self._state[CLOCK])
        state = self._state.copy()
        state[:BIRTHS] = state[LISTS:] = 0
        columns = columns_of(nodes, terms, self._state)
        values: dict[str, object] = {
            "state": column(state),
            "queued": {request: slots.tolist() for request, slots in self._queued.items()},
        }
        return seal(self.name, self.config, values | columns | self._more())

    def restore(self, snapshot: bytes) -> None:
        """See `Policy.restore`. Nothing has changed if it is refused."""
        values = unseal(snapshot, self.name, self.config)
        size = length_of(values.get("state"), 8)
        state = uncolumn(values.get("state"), np.int64, max(size, LISTS + TENANTS + 1))
        self._check(state)
        queued = chains_of(values.get("queued"))
        nodes, terms = records_of(values, len(state) - LISTS - TENANTS, queued)
        n = len(nodes)
        state[:BIRTHS] = state[LISTS:] = 0
        state[BIRTHS] = max(state[BIRTHS], int(nodes["birth"].max(initial=0)))
        heaps = np.zeros((HEAPS, n, 2), np.int64)
        if not rebuild(nodes, terms, heaps, state, np.zeros(n, np.int64)):
            raise damaged("its blocks are no forest")
        put_ghosts(nodes, terms, state, values.get("ghosts"))
        self._take_more(values, n)
        self._arrays, self._state, self._queued = (nodes, terms, heaps), state, queued
        if n < FIRST_CAPACITY:
            self._grow(FIRST_CAPACITY)

    def _more(self) -> dict[str, object]:
        """What a policy on top remembers besides."""
        return {}

    def _take_more(self, values: Mapping[str, Any], n: int) -> None:
        """Takes over what `_more` gave, when there were `n` slots; refuses before it changes."""

    def _check(self, state: Slots) -> None:
        """Whether a state vector is of a policy with the same keys.

        Raises:
            ConfigError: It is not.
        """
        own = self._state
        if state[MODE] != own[MODE] or state[TAU] != own[TAU] or state[STALE] != 0:
            raise damaged("its half-life is another")
        if abs(int(state[CLOCK])) > CLOCK_LIMIT or min(state[BIRTHS], state[TARGET]) < 0:
            raise damaged("its clock is none")
        if state[TARGET] > state[SIZE]:
            raise damaged("its target is larger than the cache")

    def _welcome(self, tenant: int) -> None:
        """Makes room for the list of a tenant's blocks."""
        if not 0 <= tenant < TENANT_LIMIT:
            raise ConfigError(f"tenant {tenant}", "Number tenants densely from 0")
        old = self._state
        self._state = np.zeros(LISTS + TENANTS + 2 * (tenant + 1), np.int64)
        self._state[: len(old)] = old

    def _grow(self, room: int) -> None:
        """Makes room for slots below `room`: doubles, so that growing costs O(1) per slot."""
        nodes, terms, heaps = self._arrays
        old, new = len(nodes), max(room, 2 * len(nodes))
        grown = np.zeros(new, NODE), np.zeros(new, TERMS), np.zeros((len(heaps), new, 2), np.int64)
        grown[0][:old], grown[1][:old], grown[2][:, :old] = nodes, terms, heaps
        grown[0]["place"][old:] = grown[1]["due"][old:] = -1
        self._arrays = grown

    def insert(
        self,
        now_ns: int,
        slots: Slots,
        parents: Slots,
        *,
        n_bytes: int = 1,
        cost_ns: int = 0,
        lease: str | Lease = "",
        tenant: int = 0,
    ) -> None:
        """See `Policy.insert`. All blocks count alike, whatever their `n_bytes`.

        Raises:
            ConfigError: If the arrays differ in length or hold what is no slot number, or there is
                no such lease class.
        """
        slots, parents = as_slots(slots), as_slots(parents)
        if len(slots) != len(parents):
            raise ConfigError(
                f"insert got {len(slots)} slots and {len(parents)} parents",
                "Pass one parent per slot, -1 where it is unknown",
            )
        terms, extra = self._lease(lease), self._extra(n_bytes, cost_ns)
        if not 0 <= tenant < len(self._state) - LISTS - TENANTS:
            self._welcome(tenant)
        said = (slots, parents, terms, (now_ns, tenant, extra))
        room = compiled.insert(*self._arrays, self._state, *said)
        if room < 0:
            raise ConfigError(
                f"slot numbers must lie in 0..{SLOT_LIMIT - 1}",
                "Number the blocks of a tier densely from 0",
            )
        if room > 0:
            self._grow(room)
            compiled.insert(*self._arrays, self._state, *said)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """See `Policy.access`. Of blocks that are not resident only the hints end."""
        compiled.access(*self._arrays, self._state, as_slots(slots), now_ns)
        if self._queued and visit.request in self._queued:
            compiled.queue(*self._arrays, self._state, self._queued.pop(visit.request), -1)

    def remove(self, slots: Slots) -> None:
        """See `Policy.remove`. Children of a removed block stay, as roots."""
        compiled.remove(*self._arrays, self._state, as_slots(slots))

    def forget(self, slots: Slots) -> None:
        """See `Policy.forget`. Ends their counts and hints; resident ones are ignored."""
        compiled.forget(*self._arrays, self._state, as_slots(slots))

    def abort(self, now_ns: int, request: int) -> None:
        """See `Policy.abort`."""
        if request in self._queued:
            compiled.queue(*self._arrays, self._state, self._queued.pop(request), -1)

    def pin(self, slots: Slots) -> None:
        """See `Policy.pin`. What is above a pinned block stays as well, while both are resident."""
        slots = as_slots(slots)
        room = compiled.pin(*self._arrays, self._state, slots, 1)
        if room > 0:
            self._grow(room)
            compiled.pin(*self._arrays, self._state, slots, 1)

    def unpin(self, slots: Slots) -> None:
        """See `Policy.unpin`. Slots that are not pinned are ignored."""
        compiled.pin(*self._arrays, self._state, as_slots(slots), -1)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """See `Policy.hint` and the notes of this class."""
        said = (as_slots(slots), now_ns, min(eta_ns, NEVER_NS))
        room = compiled.hint(*self._arrays, self._state, *said)
        if room > 0:
            self._grow(room)
            compiled.hint(*self._arrays, self._state, *said)

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        """See `Policy.enqueue`. A request that is enqueued again has another chain now."""
        self.abort(now_ns, request)
        slots = as_slots(slots).copy()
        room = compiled.queue(*self._arrays, self._state, slots, 1)
        if room > 0:
            self._grow(room)
            compiled.queue(*self._arrays, self._state, slots, 1)
        self._queued[request] = slots

    def invalidate(self, now_ns: int, tenant: int) -> None:
        """See `Policy.invalidate`. O(1); the next call that decides does the rest, once a block."""
        if not 0 <= tenant < len(self._state) - LISTS - TENANTS:
            self.admit(now_ns, NO_SLOTS)  # nobody it knows; but the time is
        else:
            compiled.invalidate(*self._arrays, self._state, now_ns, tenant)

    def admit(self, now_ns: int, slots: Slots) -> NDArray[np.bool_]:
        """Everything: these policies choose what leaves, not what enters."""
        self._state[CLOCK] = max(min(now_ns, CLOCK_LIMIT), self._state[CLOCK])
        return np.ones(len(slots), np.bool_)

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """See `Policy.evict`. Victims in the order in which they go, children before parents.

        None if fewer than `n` blocks are neither pinned or protected, nor above such a block. What
        is in use for longer than a call is better pinned: that costs an eviction nothing.

        Raises:
            ConfigError: If `n` is negative.
        """
        if n < 0:
            raise ConfigError(f"cannot evict {n} blocks", "Ask for none or more")
        if n > self._state[COUNT]:
            n = int(self._state[COUNT]) + 1  # as hopeless, without the memory
        victims = np.empty(n, np.int64)
        guarded = as_slots(protected) if len(protected) else NO_SLOTS
        done = compiled.evict(*self._arrays, self._state, guarded, victims, now_ns)
        return victims if done else None

    def expired(self, now_ns: int) -> Slots:
        """See `Policy.expired`. Ascending; they stay until removed, evicted or inserted again."""
        count = compiled.tick(*self._arrays, self._state, now_ns)
        if count == 0:
            return np.empty(0, np.int64)
        out = np.empty(count, np.int64)
        members(self._arrays[1], self._state, RUN_OUT, out)
        out.sort()
        compiled.record(self._state, out)
        return out

    def priority(self, slot: int) -> float:
        """The static key in nanoseconds, as of the last call; other classes lie far away."""
        nodes = self._arrays[0]
        if not 0 <= slot < len(nodes) or nodes[slot]["birth"] == 0:
            return -np.inf
        if self._state[STALE]:
            compiled.tick(*self._arrays, self._state, self._state[CLOCK])
        return float(worth(nodes, self._arrays[1], self._state, slot))

    def weakest(self, now_ns: int, protected: Collection[int] = ()) -> int:
        """See `Policy.weakest`; O(1), and as long for each protected block as for a pin."""
        guarded = as_slots(protected) if len(protected) else NO_SLOTS
        return int(compiled.peek(*self._arrays, self._state, guarded, now_ns))

    def resident(self) -> Sequence[int]:
        """Slots it believes to be resident, ascending."""
        births: list[int] = np.flatnonzero(self._arrays[0]["birth"]).tolist()
        return births

    def digest(self) -> int:
        """64-bit rolling hash of the answers of `evict` and of `expired`, where it names any."""
        return int(self._state[DIGEST]) & 0xFFFF_FFFF_FFFF_FFFF

    def __len__(self) -> int:
        return int(self._state[COUNT])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} resident, {int(self._state[BIRTHS])} ever)"

    def _extra(self, n_bytes: int, cost_ns: int) -> int:
        """What a block's worth adds to its key."""
        return 0

    def _lease(self, lease: str | Lease) -> Slots:
        """A lease as the compiled calls take it."""
        if isinstance(lease, Lease):
            return _numbers(lease, True)
        try:
            return self._leases[lease]
        except KeyError:
            known = ", ".join(sorted(filter(None, self._leases)))
            raise ConfigError(
                f"policy {self.name!r} knows no lease class {lease!r}",
                f"Use one of {known}, or define it with leases=",
            ) from None


def _numbers(lease: Lease, explicit: bool) -> Slots:
    """`calls.LEASE_S` and so on."""
    times = (_ns(lease.lease_s), _ns(lease.max_age_s), lease.rank, _ns(lease.rank_s), explicit)
    return np.array(times, np.int64)


def _ns(seconds: float) -> int:
    return NEVER if seconds > LONGEST_S else max(1, round(seconds * 1e9))
