"""The shipped default: what serves the traffic at hand best, and never worse than recency."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import NEVER_NS, NO_SLOTS, NO_VISIT, Policy, Slots, Visit
from flowkv.policy.config import HedgeConfig, configure
from flowkv.policy.hazard.compiled import decay, key_of, rekey, speaker, worth_of
from flowkv.policy.hazard.index import HazardIndex
from flowkv.policy.order.compiled import (
    CLOCK,
    DIGEST,
    ETA,
    KNOWN,
    LISTS,
    MODE,
    SLOT_MASK,
    TAU,
    Array,
    aged,
    attend,
    delist,
    enlist,
    enlist_behind,
    fold,
    inner,
    kernel,
    reorder,
    sift_down,
)
from flowkv.policy.order.leaf import LeafOrder, as_slots
from flowkv.policy.order.shadow import (
    AWAY,
    HELD,
    LEAVES,
    NO_KEY,
    above_of,
    bared,
    fresh_shades,
    hold,
    shadow_drop,
)

# What plain LRU would have here, exactly: a whole place of the same size, without the blocks.
#
# The reference that a hedge is measured against. A list of blocks by the time of their last use,
# in which the blocks of one request lie root first, so that the oldest is always a leaf:
# leaf-first LRU at a few nanoseconds a block. Beside it, what really lies here, so that both can
# be compared request by request, and which block lies above which.

CELL = np.dtype(
    [
        ("before", np.int32),  # neighbours in the ring of ghosts: the newer, the older
        ("after", np.int32),
        ("up", np.int32),  # the block above it, -1 for a root
        ("depth", np.int32),
        ("birth", np.int32),  # changes whenever the number names another block; 0: not known
        ("bond", np.int32),  # the birth of the block above it when they were linked
        ("ghost", np.int32),  # 1: LRU would hold it
        ("here", np.int32),  # 1: it is resident
    ]
)

# Entries of the book: how many blocks LRU holds, how many are resident, how many fit (0: not known
# yet); time and last block of the request at hand; numbers given; the most that remained after an
# eviction lately, and before that; evictions. `FOUND`: blocks of the request that LRU would have.
# Last comes the front of the ring of ghosts, the newest.
GHOSTS, HERE, ROOM, NOW, LAST, BIRTHS, PEAK, OLD_PEAK, COUNT, FOUND = range(10)
BOOK_SIZE = LISTS + 1
EPOCH = 64  # evictions after which what remained after those before them no longer counts
BIRTH_MASK = (1 << 30) - 1


def fresh_cells(n: int) -> Array:
    """Cells of blocks that nothing is known of."""
    cells = np.zeros(n, CELL)
    cells["up"] = -1
    return cells


def fresh_book() -> Array:
    """The book of an empty place whose capacity is not known."""
    book = np.zeros(BOOK_SIZE, np.int64)
    book[LAST] = -1
    return book


# ---- the list


@inner
def ghost_lose(cells: Array, book: Array, s: int) -> None:
    """LRU would not hold this block any more."""
    delist(cells, book, 0, s)
    cells[s].ghost = 0
    book[GHOSTS] -= 1


@inner
def lose_surplus(cells: Array, book: Array) -> None:
    """LRU gives up what is too much, as far as the capacity is known."""
    if book[ROOM] > 0:
        while book[GHOSTS] > book[ROOM]:
            ghost_lose(cells, book, cells[book[LISTS] - 1].before)


# ---- who belongs to whom


@inner
def name(cells: Array, book: Array, s: int, above: int) -> None:
    """A block is seen for the first time, below `above` (-1: not known)."""
    book[BIRTHS] = (book[BIRTHS] & BIRTH_MASK) + 1
    cell = cells[s]
    cell.birth, cell.up, cell.depth = book[BIRTHS], above, 0
    if above >= 0:
        cell.bond = cells[above].birth
        cell.depth = cells[above].depth + 1


# ---- what happens


@inner
def arrive(cells: Array, book: Array, slots: Array, now: int) -> tuple[int, int]:
    """A request uses these known blocks: how many are resident, and how many LRU would have."""
    lose_surplus(cells, book)
    n = len(slots)
    known = n
    while known > 0 and cells[slots[known - 1]].birth == 0:
        known -= 1
    for i in range(known, n):
        name(cells, book, slots[i], slots[i - 1] if i > 0 else -1)
    here = ghosts = 0
    for i in range(n - 1, -1, -1):  # so that the root is the newest
        s = slots[i]
        here += cells[s].here
        if cells[s].ghost == 1:
            ghosts += 1
            delist(cells, book, 0, s)
            enlist(cells, book, 0, s)
        elif cells[s].here == 1:
            cells[s].ghost = 1
            book[GHOSTS] += 1
            enlist(cells, book, 0, s)
    book[NOW] = now
    book[LAST] = slots[n - 1] if n > 0 else -1
    return here, ghosts


@inner
def ghost_insert(cells: Array, book: Array, slots: Array, parents: Array, now: int) -> None:
    """Blocks became resident; those that LRU does not hold continue the chain of their request."""
    above = book[LAST] if book[NOW] == now else -1
    for i in range(len(slots)):
        s = slots[i]
        if parents[i] >= 0 and parents[i] < len(cells) and cells[parents[i]].birth != 0:
            above = parents[i]
        elif i == 0 and cells[s].birth != 0:
            above = above_of(cells, s)
        if cells[s].birth == 0:
            name(cells, book, s, above if above != s else -1)
            book[LAST] = s
        if cells[s].here == 0:
            cells[s].here = 1
            book[HERE] += 1
        if cells[s].ghost == 0:
            cells[s].ghost = 1
            book[GHOSTS] += 1
            if above >= 0 and cells[above].ghost == 1:
                enlist_behind(cells, s, above)
            else:
                enlist(cells, book, 0, s)
        above = s


@inner
def ghost_remove(cells: Array, book: Array, slots: Array, whole: bool) -> None:
    """Blocks are no longer resident here; `whole`: nor would they be with LRU."""
    for s in slots:
        if 0 <= s < len(cells):
            if cells[s].here == 1:
                cells[s].here = 0
                book[HERE] -= 1
            if whole and cells[s].ghost == 1:
                ghost_lose(cells, book, s)


@inner
def measure(book: Array) -> None:
    """An eviction is over: what remains tells how many blocks fit.

    Whether a driver makes room before an insert or after it, the most that remains after any of the
    last evictions is what fits, but for the smallest insert.
    """
    book[COUNT] += 1
    if book[COUNT] % EPOCH == 0:
        book[OLD_PEAK], book[PEAK] = book[PEAK], 0
    book[PEAK] = max(book[PEAK], book[HERE])
    book[ROOM] = max(book[PEAK], book[OLD_PEAK], 1)


@inner
def unname(cells: Array, book: Array, s: int) -> None:
    """A number names nothing any more."""
    if book[LAST] == s:
        book[LAST] = -1
    if cells[s].ghost == 1:
        ghost_lose(cells, book, s)
    cells[s].up = -1
    cells[s].birth = 0


# Places that hold only numbers, one per candidate: what would it have hit?
#
# A candidate is judged by letting it decide over as many blocks as really fit: a decayed count
# always, the learned index while it does not decide itself. (A sample of the conversations tells
# too little about a large place.)
#
# Every shadow has a heap of its leaves. A learned index changes by itself, so its shadow gives up a
# few hundredths of its blocks at once, after a look at all its leaves.

SLACK_BITS = 5  # the learned shadow's size may be off by a 32nd
LEARNED_TAU = -1


def longer(old: Array, new: Array) -> Array:
    """`new`, which begins with what was in `old`, a shorter vector, or several."""
    new[..., : old.shape[-1]] = old
    return new


# ---- what happens to a shadow; `tau` is the half-life of its counts, or `LEARNED_TAU`


@inner
def appraise(shade: Array, mind: tuple[Array, ...], s: int, now: int) -> None:
    """Writes the learned key of a block as of now."""
    shade[s].key = key_of(worth_of(mind, s, now))


@inner
def serve(
    shadow: tuple[Array, ...],
    cells: Array,
    mind: tuple[Array, ...],
    tau: int,
    slots: Array,
    now: int,
    asked: bool,
) -> int:
    """A request uses these blocks, if `asked`, or they became resident: how many are held.

    Those that are resident are held next.
    """
    shade, leaves, count = shadow
    # Blocks of one prefix mostly share their history, hence their key: compute it once.
    old, new, hits = np.int64(NO_KEY), np.int64(now), 0
    for i in range(len(slots) - 1, -1, -1):  # so that what is no leaf in the end never was
        s = slots[i]
        held = shade[s].place != AWAY
        stays = held or cells[s].here == 1
        hits += held
        if tau == LEARNED_TAU:
            if stays and shade[s].kids == 0:
                appraise(shade, mind, s, now)
        elif asked or shade[s].key == NO_KEY:
            if shade[s].key != old:
                old = shade[s].key
                new = aged(old, now, tau) if old != NO_KEY else np.int64(now)
            shade[s].key = new
        if stays:
            hold(shade, leaves, count, cells, s)
    return hits


@inner
def trim(
    shadow: tuple[Array, ...],
    cells: Array,
    mind: tuple[Array, ...],
    tau: int,
    capacity: int,
    now: int,
) -> None:
    """Gives up what is too much; by a learned index, once that is worth a look at all leaves."""
    shade, leaves, count = shadow
    learned = tau == LEARNED_TAU
    slack = capacity >> SLACK_BITS if learned else 0
    if count[HELD] <= capacity + slack:
        return
    if learned:
        n = count[LEAVES]
        for i in range(n):
            s = leaves[i, 1] & SLOT_MASK
            appraise(shade, mind, s, now)
            leaves[i, 0] = shade[s].key
        for i in range(n // 2 - 1, -1, -1):
            sift_down(leaves, shade["place"], n, i)
    while count[HELD] > capacity - slack:
        s = leaves[0, 1] & SLOT_MASK
        p = bared(shade, cells, s)
        if learned and p >= 0:
            appraise(shade, mind, p, now)  # first, so that it moves once
        shadow_drop(shade, leaves, count, cells, s)


# Which candidate decides: what each has hit more than LRU, and when that is reason to change.
#
# Row 0 is LRU, and has the benefit of the doubt. Another row takes over once it is *surely*
# better: by more than `SURE` standard deviations of what it gains per block, over the last half
# hour or so. It hands back at once if, since it took over, it has really cost more than a small
# stake, however sure one was; and then LRU stays until half as many blocks again have been asked
# for, and until what was lost is small against that, or the next try is sure to bring it back. So
# a try is paid from a loss that nobody notices, 0.002 of all blocks, or from what was gained
# before.

# Entries of the sums: seconds of the last request; blocks so far; hits more than LRU's so far; the
# same lately with the sum of its squares, since the last change; blocks when LRU last had to help
# out; surplus at the last change. Then three per row: blocks lately, hits more than LRU's, squares.
TIME, BLOCKS, SURPLUS, LATELY, SQUARES, FAILED, ENTRY, ROWS = range(8)
WEIGHT, GAIN, SPREAD = range(3)

HALF_LIFE_S = 1800.0
SURE, SURE_COUNTED, SURE_IN_DEBT, SURE_IN_PLACE = 1.0, 2.0, 3.0, 2.0
DOUBT = 24.0  # blocks: as if one request had already gone the other way
STAKE, SHARE = 40.0, 0.0004  # of a try: blocks, and of all blocks so far
DEBT, DEBT_SHARE = 24.0, 0.0005  # with which a try may begin
MOST, MOST_SHARE = 64.0, 0.0006  # of all tries
WAIT = 1.5
HYSTERESIS = 0.02
LN2 = 0.6931471805599453


def fresh_sums(rows: int) -> Array:
    """Nothing has been seen."""
    return np.zeros(ROWS + 3 * rows)


@inner
def witness(sums: Array, now: int, blocks: int, more: int) -> None:
    """A request of so many blocks has come; `more` of them were resident than LRU would have."""
    gone = now * 1e-9 - sums[TIME]
    if gone > 0.0:
        fade = decay(LN2 * gone / HALF_LIFE_S)
        sums[LATELY] *= fade
        sums[SQUARES] *= fade
        for i in range(ROWS, len(sums)):
            sums[i] *= fade
        sums[TIME] = now * 1e-9
    sums[BLOCKS] += blocks
    sums[SURPLUS] += more
    sums[LATELY] += more
    sums[SQUARES] += float(more) * more


@inner
def credit(sums: Array, row: int, blocks: int, more: int) -> None:
    """A candidate would have hit `more` blocks than LRU, of a request of so many."""
    i = ROWS + 3 * row
    sums[i + WEIGHT] += blocks
    sums[i + GAIN] += more
    sums[i + SPREAD] += float(more) * more


@inner
def rate_of(sums: Array, row: int) -> tuple[float, float]:
    """Hits more than LRU's per block, and the variance of that."""
    i = ROWS + 3 * row
    weight = max(sums[i + WEIGHT], 1.0)
    return sums[i + GAIN] / weight, (sums[i + SPREAD] + DOUBT * DOUBT) / (weight * weight)


@inner
def surely_best(sums: Array, rows: int) -> int:
    """The row that gains most for sure, 0 if none does."""
    best, most = 0, 0.0
    for a in range(1, rows):
        rate, variance = rate_of(sums, a)
        least = rate - (SURE if a == rows - 1 else SURE_COUNTED) * np.sqrt(variance)
        if least > most:
            best, most = a, least
    return best


@inner
def in_debt(sums: Array, row: int, debt: float, share: float) -> bool:
    """Whether more was lost than that, and the row is not sure to bring it back."""
    if sums[SURPLUS] >= -(debt + share * sums[BLOCKS]):
        return False
    rate, variance = rate_of(sums, row)
    return bool(rate <= SURE_IN_DEBT * np.sqrt(variance))


@inner
def decide(sums: Array, rows: int, active: int) -> int:
    """The row that is to decide from now on."""
    best = surely_best(sums, rows)
    if active == 0:
        early = sums[BLOCKS] < WAIT * sums[FAILED]
        return 0 if early or in_debt(sums, best, DEBT, DEBT_SHARE) else int(best)
    since = sums[SURPLUS] - sums[ENTRY]
    lost = since < -(STAKE + SHARE * sums[BLOCKS])
    broke = since < 0.0 and in_debt(sums, active, MOST, MOST_SHARE)
    if lost or broke or sums[LATELY] < -SURE_IN_PLACE * np.sqrt(sums[SQUARES] + DOUBT * DOUBT):
        return 0
    if best not in (0, active):
        rate, variance = rate_of(sums, best)
        mine, also = rate_of(sums, active)
        if rate - (1.0 + HYSTERESIS) * mine > SURE * np.sqrt(variance + also):
            return best
    return int(active)


@inner
def turn(sums: Array, chosen: int) -> None:
    """Another row decides from now on."""
    if chosen == 0:
        sums[FAILED] = sums[BLOCKS]
    sums[ENTRY] = sums[SURPLUS]
    sums[LATELY] = sums[SQUARES] = 0.0


# One compiled function per thing that a hedge does beside the order that decides.
#
# Arguments: `watch` is what is kept about the place itself: cells, book and sums. `shadows` =
# shades, heaps and counts of the rows beside LRU. For `mind` and `order` see
# `flowkv.policy.hazard.compiled`.

LEARNED, ASIDE = 0, 2
"""Modes of the order: by the learned index; by a static key, while the index only learns."""


@inner
def show(
    watch: tuple[Array, ...],
    shadows: tuple[Array, ...],
    mind: tuple[Array, ...],
    taus: Array,
    slots: Array,
    now: int,
    active: int,
    asked: bool,
) -> None:
    """All shadows see a request, if `asked`, or what became resident; not that which decides.

    Their surplus goes when the next request comes.
    """
    cells, book, sums = watch
    shades, heaps, counts = shadows
    for k in range(len(taus)):
        if taus[k] == LEARNED_TAU and active == k + 1:
            continue
        shadow = shades[k], heaps[k], counts[k]
        if asked and book[ROOM] > 0:
            trim(shadow, cells, mind, taus[k], book[ROOM], now)
        hits = serve(shadow, cells, mind, taus[k], slots, now, asked)
        if asked:
            credit(sums, k + 1, len(slots), hits - book[FOUND])


@kernel
def access(
    watch: tuple[Array, ...],
    shadows: tuple[Array, ...],
    mind: tuple[Array, ...],
    taus: Array,
    slots: Array,
    now: int,
    active: int,
    proved: bool,
) -> int:
    """A request uses these known blocks. `proved`: a model that was brought need not wait.

    Returns:
        The row that is to decide from now on; if that is another one, `seen` has to follow. -1 if a
        slot has no cell, and nothing was done.
    """
    cells, book, sums = watch
    for s in slots:
        if s < 0 or s >= len(cells):
            return -1
    rows = (len(sums) - ROWS) // 3
    here, book[FOUND] = arrive(cells, book, slots, now)
    more = here - book[FOUND]
    witness(sums, now, len(slots), more)
    if active == rows - 1:
        credit(sums, active, len(slots), more)
    chosen = decide(sums, rows, active)
    if proved and active == 0 and chosen == 0 and sums[FAILED] == 0.0:
        chosen = rows - 1
    if chosen != active:
        turn(sums, chosen)
    else:
        show(watch, shadows, mind, taus, slots, now, active, True)
    return int(chosen)


@kernel
def seen(
    watch: tuple[Array, ...],
    shadows: tuple[Array, ...],
    mind: tuple[Array, ...],
    taus: Array,
    slots: Array,
    now: int,
    active: int,
) -> None:
    """What the shadows have to see of a request after another row took over."""
    show(watch, shadows, mind, taus, slots, now, active, True)


@kernel
def come(
    watch: tuple[Array, ...],
    shadows: tuple[Array, ...],
    mind: tuple[Array, ...],
    taus: Array,
    slots: Array,
    parents: Array,
    now: int,
    active: int,
) -> None:
    """Blocks became resident; they have cells."""
    cells, book, _sums = watch
    ghost_insert(cells, book, slots, parents, now)
    show(watch, shadows, mind, taus, slots, now, active, False)


@kernel
def go(watch: tuple[Array, ...], slots: Array) -> None:
    """Blocks were given up here."""
    cells, book, _sums = watch
    ghost_remove(cells, book, slots, False)
    measure(book)


@kernel
def lose(watch: tuple[Array, ...], shadows: tuple[Array, ...], slots: Array, forget: bool) -> None:
    """Blocks left, for another reason than that they were too many: LRU has lost them too.

    `forget`: their numbers name nothing any more.
    """
    cells, book, _sums = watch
    shades, heaps, counts = shadows
    for s in slots:
        if 0 <= s < len(cells):
            for k in range(len(shades)):
                if shades[k, s].place != AWAY:
                    shadow_drop(shades[k], heaps[k], counts[k], cells, s)
                if forget:
                    shades[k, s].key, shades[k, s].kids = NO_KEY, 0
    if not forget:
        ghost_remove(cells, book, slots, True)
        return
    for s in slots:
        if 0 <= s < len(cells):
            unname(cells, book, s)


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
def follow_counts(order: tuple[Array, ...], shade: Array, tau: int) -> None:
    """Decayed counts decide from now on, as their shadow knows them."""
    nodes, terms, heaps, state = order
    state[MODE], state[TAU] = ASIDE, tau
    fold(state, DIGEST, ASIDE + tau)
    for s in range(len(nodes)):
        if nodes[s].marks & KNOWN:
            nodes[s].key = max(shade[s].key, nodes[s].last)
            reorder(nodes, terms, heaps, state, s)


@kernel
def copy_place(cells: Array, shadows: tuple[Array, ...], mind: tuple[Array, ...], now: int) -> None:
    """The learned order's shadow, the last one, begins with what is really here."""
    shade, leaves, count = shadows[0][-1], shadows[1][-1], shadows[2][-1]
    count[LEAVES] = count[HELD] = 0
    for s in range(len(cells)):
        shade[s].place, shade[s].kids = AWAY, 0
    for s in range(len(cells)):
        if cells[s].here == 1:
            appraise(shade, mind, s, now)
            hold(shade, leaves, count, cells, s)


# The default: several rules watch the same traffic, and the one that would hit most decides.


class Hedge(HazardIndex):
    """LRU until something else is surely better here, and again as soon as it is not.

    Candidates: LRU; a decayed count (`LfuTtl`) with a half-life of 2 minutes; and the learned index
    (`HazardIndex`), which learns whoever decides. Each has a *shadow*, a place as large that holds
    only numbers, and is judged by what that hits. So how many hits more than LRU there really were
    is known exactly, and a rule that disappoints is dismissed before it has cost more than a
    small share of all blocks. A model that was brought (`load_model`) and predicts well here spares
    the learned order the wait for such evidence.

    One order holds the blocks, whoever decides; another rule sorts the same leaves by another key.
    So pins, leases, ranks, tenants and queued requests go on as they were. Hints of a time are
    obeyed by every rule, the learned one making most of them. Chains are offered to a prefetch
    while the learned index decides, and not otherwise.

    Memory: as `HazardIndex` and about 100 bytes per slot.

    Args:
        **options: Fields of `HedgeConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "auto"

    def __init__(self, **options: object) -> None:
        config = configure(HedgeConfig, self.name, options)
        taus = [*(round(tau_s * 1e9) for tau_s in config.taus_s), LEARNED_TAU]
        rows = len(taus)
        self._watch = (fresh_cells(0), fresh_book(), fresh_sums(rows + 1))
        self._shadows: tuple[NDArray[Any], ...] = (
            fresh_shades(rows, 0),
            np.zeros((rows, 0, 2), np.int64),
            np.zeros((rows, 2), np.int64),
        )
        self._taus, self._active = np.array(taus, np.int64), 0
        super().__init__(**{f: getattr(config, f) for f in ("lease_s", "max_age_s", "leases")})
        self.config = config
        self._state[MODE], self._state[TAU] = ASIDE, 0

    # ---- what happens

    def insert(self, now_ns: int, slots: Slots, parents: Slots, **said: Any) -> None:
        """Blocks became resident here, root to leaf; `parents[i]` is a slot or -1."""
        slots, parents = as_slots(slots), as_slots(parents)
        super().insert(now_ns, slots, parents, **said)
        come(*self._all, slots, parents, self._state[CLOCK], self._active)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """A request uses these known blocks, root to leaf.

        Known blocks that are not resident teach as well.
        """
        slots = as_slots(slots)
        super().access(now_ns, slots, visit)
        models = self._mind[4]
        said = self._state[CLOCK], self._active, len(models) > 1 and speaker(models) == 1
        chosen = access(*self._all, slots, *said)
        if chosen < 0:
            slots = slots[(slots >= 0) & (slots < len(self._watch[0]))]
            chosen = access(*self._all, slots, *said)
        if chosen != self._active:
            self._turn(chosen)
            seen(*self._all, slots, self._state[CLOCK], chosen)

    def remove(self, slots: Slots) -> None:
        """Blocks left for another reason than `evict`."""
        slots = as_slots(slots)
        super().remove(slots)
        lose(self._watch, self._shadows, slots, False)

    def forget(self, slots: Slots) -> None:
        """Nobody knows these blocks any more: their slots may name others next."""
        slots = as_slots(slots)
        super().forget(slots)
        lose(self._watch, self._shadows, slots, True)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """The application expects the next use of this chain in about `eta_ns`.

        The learned index hears of it whoever decides.
        """
        super().hint(now_ns, slots, eta_ns, sigma)
        if self._active != len(self._taus) and eta_ns < NEVER_NS:
            LeafOrder.hint(self, now_ns, slots, eta_ns, sigma)

    # ---- what is decided

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Chooses and removes `n` victims, none pinned or protected; None if there are fewer."""
        victims = super().evict(now_ns, n, protected)
        if victims is not None and len(victims):
            go(self._watch, victims)
        return victims

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Gives up to `n` victims to a prefetch: only what is worth less than that.

        For what is certain only, unless the learned index decides.
        """
        if self._active != len(self._taus):
            return Policy.displace(self, now_ns, n, rate, protected)
        victims = super().displace(now_ns, n, rate, protected)
        if len(victims):
            go(self._watch, victims)
        return victims

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Up to `n` ends of chains that are not resident and worth bringing here, best first.

        Nothing, unless the learned index decides.
        """
        if self._active != len(self._taus):
            return NO_SLOTS.copy(), np.empty(0)
        return super().wanted(now_ns, n)

    def _worth(self, slot: int) -> float:
        """As the order that decides: an index in 1/s, or a static key in nanoseconds."""
        if self._active != len(self._taus):
            return LeafOrder._worth(self, slot)
        return super()._worth(slot)

    @property
    def chosen(self) -> str:
        """The rule that decides at present: "lru", "lfu-ttl 30 s", "hazard"."""
        if self._active == len(self._taus):
            return "hazard"
        return f"lfu-ttl {self._taus[self._active - 1] / 1e9:g} s" if self._active else "lru"

    @property
    def surplus(self) -> int:
        """Blocks that hit so far, less those that plain LRU would have hit."""
        return int(self._watch[2][SURPLUS])

    # ---- parts

    @property
    def _all(self) -> tuple[Any, ...]:
        """What compiled calls about the shadows work on."""
        return self._watch, self._shadows, self._mind, self._taus

    def _turn(self, chosen: int) -> None:
        """Another row decides from now on."""
        learned = len(self._taus)
        if self._active == learned:
            copy_place(self._watch[0], self._shadows, self._mind, self._state[CLOCK])
        self._active = chosen
        if chosen == learned:
            follow_learned(self._order, self._mind)
        else:
            # A shadow that knows nothing: LRU goes by the last uses.
            shade = self._shadows[0][chosen - 1] if chosen else fresh_shades(len(self._watch[0]))
            follow_counts(self._order, shade, self._taus[chosen - 1] if chosen else 0)

    def _grow(self, room: int) -> None:
        super()._grow(room)
        new = len(self._arrays[0])
        cells, book, sums = self._watch
        shades, heaps, counts = self._shadows
        self._watch = longer(cells, fresh_cells(new)), book, sums
        wider, used = np.zeros((len(heaps), new, 2), np.int64), int(counts[:, LEAVES].max())
        wider[:, :used] = heaps[:, :used]
        self._shadows = longer(shades, fresh_shades(len(shades), new)), wider, counts
