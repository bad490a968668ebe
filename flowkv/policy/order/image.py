"""What a policy remembers as bytes, and back: msgpack of plain values and columns, all checked.

Nothing that arrives is trusted (DESIGN D11): lengths and ranges are checked, and whatever follows
from the rest (counters, heaps, lists) is not stored but built anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import Slots
from flowkv.policy.config import PolicyConfig
from flowkv.policy.order.compiled import SLOT_MASK, Array, kernel
from flowkv.policy.order.ranking import attend, hold, settle_leaf
from flowkv.policy.order.rings import enlist, members
from flowkv.policy.order.slots import (
    ARC,
    BLOCKED,
    CLOCK_LIMIT,
    COUNT,
    EXPIRED,
    FIXED,
    GHOST,
    GHOSTS,
    HELD_FAST,
    KNOWN,
    LATEST,
    LISTS,
    MODE,
    NODE,
    ONCE,
    QUEUED,
    RANK_SHIFT,
    RUN_OUT,
    TENANTS,
    TERMS,
    TWICE,
)

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
