"""What a ledger remembers as bytes, and back. Nothing that arrives is trusted (DESIGN D11).

Stored is what does not follow from the rest: records, the order of ghosts and of free slots, who is
under way. Totals, pins of places and the table of ids are made anew, and contradictions refused.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.policy.config import Lease
from flowkv.policy.ledger import blocks as at
from flowkv.policy.ledger.blocks import BLOCK
from flowkv.policy.ledger.residence import TERMS, Residence
from flowkv.policy.ledger.table import enter_all
from flowkv.policy.order.image import column, damaged, seal, uncolumn, unseal

NAME = "ledger"
COLUMNS = "lo hi bytes birth bond space parent heir pins here flight stale".split()


class Book(msgspec.Struct, forbid_unknown_fields=True):
    """The plain values.

    Attributes:
        names: (name, space, generation) of each namespace.
        live: Request -> slots.
        queued: Likewise.
        tips: Session -> (slot, births when it was seen).
    """

    fresh: int
    births: int
    largest: int
    digest: int
    clock: int
    next_space: int
    unnamed: int
    capacities: list[int]
    names: list[tuple[bytes, int, int]]
    leases: list[str | Lease]
    live: dict[int, list[int]]
    queued: dict[int, list[int]]
    tips: list[tuple[int, int, int]]


def dump(ledger: Residence, book: Book) -> bytes:
    """A snapshot: the records and policies of a ledger, and what else it told of itself."""
    n = book.fresh
    blocks = ledger._blocks[:n]
    values = {name: column(blocks[name]) for name in COLUMNS}
    values |= {"ghosts": column(_ring(ledger)), "free": column(_free(ledger))}
    terms = ledger._terms[:n] if len(ledger._terms) else np.zeros(n, TERMS)
    values |= {f"terms_{name}": column(terms[name]) for name in TERMS.names or ()}
    policies = [shelf.policy.snapshot() for shelf in ledger._shelves]
    return seal(NAME, None, {**values, "book": msgspec.to_builtins(book, builtin_types=(bytes,)),
                             "counts": [len(_ring(ledger)), len(_free(ledger))],
                             "policies": policies})  # fmt: skip


def load(ledger: Residence, snapshot: bytes) -> Book:
    """Takes over records and policies, on a fresh ledger; returns the rest.

    Raises:
        ConfigError: If the bytes are no snapshot of a ledger with as many places, or damaged.
    """
    values = unseal(snapshot, NAME, None)
    try:
        book = msgspec.convert(values["book"], Book)
        counts = msgspec.convert(values["counts"], tuple[int, int])
        policies = msgspec.convert(values["policies"], list[bytes])
    except (msgspec.ValidationError, KeyError) as error:
        raise damaged(str(error)) from None
    if not len(policies) == len(ledger._shelves) == len(book.capacities):
        raise damaged(f"it has {len(policies)} places, and the ledger {len(ledger._shelves)}")
    n = book.fresh
    blocks = np.zeros(n, BLOCK)
    for name in COLUMNS:
        blocks[name] = uncolumn(values.get(name), BLOCK[name], n)
    ghosts, free = (
        uncolumn(values.get(name), np.int64, count)
        for name, count in zip(("ghosts", "free"), counts, strict=True)
    )
    _check(blocks, book, len(policies), ghosts, free)
    _install(ledger, blocks, book, ghosts, free)
    for name in TERMS.names or () if len(ledger._terms) else ():
        ledger._terms[name][:n] = uncolumn(values.get(f"terms_{name}"), TERMS[name], n)
    if len(ledger._terms) and not (ledger._terms["lease"] < len(book.leases)).all():
        raise damaged("a block has a lease that does not exist")
    ledger._leases = book.leases
    for shelf, image, capacity in zip(ledger._shelves, policies, book.capacities, strict=True):
        shelf.resize(capacity)
        shelf.policy.restore(image)
    return book


def _ring(ledger: Residence) -> NDArray[np.int64]:
    """Ghosts, the oldest first."""
    found, s = [], int(ledger._state[at.OLDEST])
    while s >= 0:
        found.append(s)
        s = int(ledger._blocks["younger"][s])
    return np.array(found, np.int64)


def _free(ledger: Residence) -> NDArray[np.int64]:
    """Slots that were used before, the one to be used next first."""
    found, s = [], int(ledger._state[at.FREE])
    while s >= 0:
        found.append(s)
        s = int(ledger._blocks["older"][s])
    return np.array(found, np.int64)


def _check(
    blocks: NDArray[Any],
    book: Book,
    places: int,
    ghosts: NDArray[np.int64],
    free: NDArray[np.int64],
) -> None:
    """Refuses what contradicts itself.

    Raises:
        ConfigError: It does.
    """
    n = len(blocks)
    known = blocks["space"] >= 0
    used = [s for chains in (book.live, book.queued) for chain in chains.values() for s in chain]
    used += [s for _, s, _ in book.tips]
    inside = all(0 <= s < n for s in used)
    for name in ("parent", "heir"):
        inside &= bool(((blocks[name] >= -1) & (blocks[name] < n)).all())
    pins, watch = np.zeros(n, np.int64), np.zeros(n, np.int64)
    if inside:
        for counts, chains in ((pins, book.live), (watch, book.queued)):
            for chain in chains.values():
                np.add.at(counts, chain, 1)
    blocks["watch"] = watch
    here = blocks["here"] != 0
    idle = known & ~here & (blocks["pins"] == 0) & (watch == 0)
    sound = (
        inside
        and (blocks["pins"] >= pins).all()
        and bool((blocks["here"] >> places == 0).all())
        and bool((((blocks["flight"] | blocks["stale"]) & ~blocks["here"]) == 0).all())
        and bool((blocks["bytes"][here] > 0).all())
        and bool((blocks["bytes"][here] <= book.largest).all())
        and not here[~known].any()
        and sorted(ghosts.tolist()) == np.flatnonzero(idle).tolist()
        and sorted(free.tolist()) == np.flatnonzero(~known).tolist()
        and bool((blocks["birth"] <= book.births).all())
        and bool((blocks["space"] < book.next_space).all())
        and all(0 <= space < book.next_space for _, space, _ in book.names)
        and len({name for name, _, _ in book.names}) == len(book.names)
        and all(capacity >= 0 for capacity in book.capacities)
        and book.largest > 0
    )
    if not sound:
        raise damaged("its blocks contradict each other")


def _install(
    ledger: Residence,
    blocks: NDArray[Any],
    book: Book,
    ghosts: NDArray[np.int64],
    free: NDArray[np.int64],
) -> None:
    """Takes over checked records, and makes anew what follows from them."""
    n, state = len(blocks), ledger._state
    if n > len(ledger._blocks):
        ledger._grow(n)
    ledger._blocks[:n] = blocks
    if not enter_all(ledger._blocks, ledger._buckets, ledger._mix, n):
        raise damaged("two blocks have one id")
    here, size = blocks["here"], blocks["bytes"]
    state[[at.FRESH, at.BIRTHS, at.LARGEST, at.DIGEST]] = (
        n,
        book.births,
        book.largest,
        book.digest,
    )
    state[at.RESIDENT] = np.count_nonzero(here)
    for k in range(len(ledger._shelves)):
        there = here >> k & 1 == 1
        state[at.USED + k] = size[there].sum()
        state[at.PINNED + k] = size[there & (blocks["pins"] > 0)].sum()
    for s in ghosts.tolist():
        at.haunt(ledger._blocks, state, s)
    for s in reversed(free.tolist()):
        ledger._blocks["older"][s] = state[at.FREE]
        state[at.FREE] = s
    ledger._clock = book.clock
