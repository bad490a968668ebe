"""One compiled function per thing that a hedge does beside the order that decides.

Arguments: `watch` is what is kept about the place itself: cells, book (`flowkv.policy.hedge.ghost`)
and sums (`flowkv.policy.hedge.rule`). `shadows` = shades, heaps and counts of some rows.
`learned` = shade, leaves and count of the learned order's shadow. For `mind` and `order` see
`flowkv.policy.hazard.calls`.
"""

from __future__ import annotations

from flowkv.policy.hazard.tips import rekey
from flowkv.policy.hedge import ghost, rule, shadow
from flowkv.policy.hedge.ghost import FOUND, LINE, MASK, ROOM
from flowkv.policy.hedge.shadow import AWAY, HELD, LEAVES, NO_KEY
from flowkv.policy.order.compiled import Array, fold, inner, kernel
from flowkv.policy.order.ranking import attend, reorder
from flowkv.policy.order.slots import CLOCK, DIGEST, ETA, KNOWN, MODE, TAU

LEARNED, ASIDE = 0, 2
"""Modes of the order: by the learned index; by a static key, while the index only learns."""

SAMPLED = 1 << 8


@kernel
def access(watch: tuple[Array, ...], slots: Array, session: int, now: int, active: int) -> int:
    """A request uses these known blocks.

    Returns:
        The row that is to decide from now on, `SAMPLED` added if the request is in the sample; -1
        if a slot has no cell, and nothing was done.
    """
    cells, book, sums = watch
    for s in slots:
        if s < 0 or s >= len(cells):
            return -1
    rows = (len(sums) - rule.ROWS) // 3
    here, book[FOUND] = ghost.arrive(cells, book, slots, session, now)
    more = here - book[FOUND]
    rule.witness(sums, now, len(slots), more)
    if active == rows - 1:
        rule.credit(sums, active, len(slots), more)
    chosen = rule.decide(sums, rows, active)
    if chosen != active:
        rule.turn(sums, chosen)
    return int(chosen) + (SAMPLED if book[LINE] & book[MASK] == 0 else 0)


@inner
def crowded(counts: Array, width: int, n: int) -> bool:
    """Whether a heap might be too narrow for `n` leaves more."""
    most = 0
    for k in range(len(counts)):
        most = max(most, counts[k, LEAVES])
    return bool(most + n > width)


@kernel
def serve(
    watch: tuple[Array, ...], shadows: tuple[Array, ...], taus: Array, slots: Array, now: int
) -> bool:
    """A sampled request uses these blocks. False if the heaps are too narrow; nothing was done."""
    cells, _book, sums = watch
    shades, heaps, counts = shadows
    if crowded(counts, heaps.shape[1], len(slots)):
        return False
    lru = shadow.serve(shades[0], heaps[0], counts[0], cells, taus[0], slots, now)
    for k in range(1, len(taus)):
        hits = shadow.serve(shades[k], heaps[k], counts[k], cells, taus[k], slots, now)
        rule.credit(sums, k, len(slots), hits - lru)
    return True


@kernel
def keep(cells: Array, shadows: tuple[Array, ...], slots: Array, now: int) -> bool:
    """A sampled request's blocks became resident. As `serve`."""
    shades, heaps, counts = shadows
    if crowded(counts, heaps.shape[1], len(slots)):
        return False
    for k in range(len(shades)):
        shadow.keep(shades[k], heaps[k], counts[k], cells, slots, now)
    return True


@kernel
def come(
    watch: tuple[Array, ...], shadows: tuple[Array, ...], slots: Array, parents: Array, now: int
) -> int:
    """Blocks became resident; they have cells.

    Returns:
        0 if they are not in the sample, 1 if the sampled shadows hold them now, -1 if `keep` has
        still to see to that, with wider heaps.
    """
    cells, book, _sums = watch
    ghost.come(cells, book, slots, parents, now)
    if book[LINE] & book[MASK] != 0:
        return 0
    return 1 if keep(cells, shadows, slots, now) else -1


@kernel
def go(
    watch: tuple[Array, ...],
    shadows: tuple[Array, ...],
    slots: Array,
    sample: int,
    grown: bool,
) -> None:
    """Blocks were given up here; so do the sampled shadows, where they have `grown`."""
    cells, book, _sums = watch
    ghost.go(cells, book, slots, False)
    ghost.measure(book)
    if grown:
        trim(watch, shadows, sample)


@inner
def trim(watch: tuple[Array, ...], shadows: tuple[Array, ...], sample: int) -> None:
    """The sampled shadows give up what is too much; the sample shrinks as the place grows."""
    cells, book, _sums = watch
    shades, heaps, counts = shadows
    while book[ROOM] // (book[MASK] + 1) > sample:
        book[MASK] = 2 * book[MASK] + 1
        for k in range(len(shades)):
            shadow.thin(shades[k], heaps[k], counts[k], cells, book[MASK])
    capacity = max(book[ROOM] // (book[MASK] + 1), 1)
    for k in range(len(shades)):
        shadow.trim(shades[k], heaps[k], counts[k], cells, capacity)


@kernel
def learn(
    watch: tuple[Array, ...],
    learned: tuple[Array, ...],
    mind: tuple[Array, ...],
    slots: Array,
    now: int,
    asked: bool,
) -> bool:
    """The learned order's shadow sees a request, if `asked`, or what became resident. As `serve`.

    Its surplus goes when the next request comes.
    """
    cells, book, sums = watch
    shade, leaves, count = learned
    if count[LEAVES] + len(slots) > len(leaves):
        return False
    if asked and book[ROOM] > 0:
        shadow.trim_learned(shade, leaves, count, cells, mind, book[ROOM], now)
    hits = shadow.serve_learned(shade, leaves, count, cells, mind, slots, now)
    if asked:
        row = (len(sums) - rule.ROWS) // 3 - 1
        rule.credit(sums, row, len(slots), hits - book[FOUND])
    return True


@kernel
def lose(watch: tuple[Array, ...], slots: Array) -> None:
    """Blocks left, for another reason than that they were too many: LRU has lost them too."""
    cells, book, _sums = watch
    ghost.go(cells, book, slots, True)


@kernel
def drop(cells: Array, shadows: tuple[Array, ...], slots: Array, forget: bool) -> None:
    """Shadows lose what left like that; `forget`: and what they know of it."""
    shades, heaps, counts = shadows
    for s in slots:
        if 0 <= s < len(cells):
            for k in range(len(shades)):
                if shades[k, s].place != AWAY:
                    shadow.drop(shades[k], heaps[k], counts[k], cells, s)
                if forget:
                    shades[k, s].key, shades[k, s].kids = NO_KEY, 0


@kernel
def forget(watch: tuple[Array, ...], slots: Array) -> None:
    """These numbers name nothing any more."""
    cells, book, _sums = watch
    for s in slots:
        if 0 <= s < len(cells):
            ghost.unname(cells, book, s)


# ---- another row decides


@kernel
def follow_learned(order: tuple[Array, ...], mind: tuple[Array, ...]) -> None:
    """The learned order decides from now on: every leaf is judged by its index."""
    nodes, terms, heaps, state = order
    state[MODE], state[TAU] = LEARNED, 1
    fold(state, DIGEST, LEARNED)
    for s in range(len(nodes)):
        if nodes[s].marks & ETA:
            nodes[s].marks &= ~ETA  # the index knows the hints itself
            reorder(nodes, terms, heaps, state, s)
            attend(nodes, terms, heaps, state, s)
        if nodes[s].birth != 0 and nodes[s].kids == 0:
            rekey(order, mind, s, state[CLOCK])


@kernel
def follow_counts(order: tuple[Array, ...], shade: Array, tau: int, known: bool) -> None:
    """Decayed counts decide from now on; those of a shadow that serves everybody are `known`.

    Else every block begins with a count of 1, from its last use on.
    """
    nodes, terms, heaps, state = order
    state[MODE], state[TAU] = ASIDE, tau
    fold(state, DIGEST, ASIDE + tau)
    for s in range(len(nodes)):
        if nodes[s].marks & KNOWN:
            nodes[s].key = nodes[s].last
            if known and shade[s].key != NO_KEY:
                nodes[s].key = max(shade[s].key, nodes[s].last)
            reorder(nodes, terms, heaps, state, s)


@kernel
def copy_place(cells: Array, learned: tuple[Array, ...], mind: tuple[Array, ...], now: int) -> None:
    """The learned order's shadow begins with what is really here. Its heap is wide enough."""
    shade, leaves, count = learned
    count[LEAVES] = count[HELD] = 0
    for s in range(len(cells)):
        shade[s].place, shade[s].kids = AWAY, 0
    for s in range(len(cells)):
        if cells[s].here == 1:
            shadow.appraise(shade, mind, s, now)
            shadow.hold(shade, leaves, count, cells, s)
