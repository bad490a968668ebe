"""The shipped default: what serves the traffic at hand best, and never worse than recency."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import (
    NEVER_NS,
    NO_SLOTS,
    NO_VISIT,
    HedgeConfig,
    Policy,
    Slots,
    Visit,
    configure,
)
from flowkv.policy.hazard.compiled import (
    KINDS,
    decay,
    key_of,
    mind_on,
    rekey,
    speaker,
    worth_of,
)
from flowkv.policy.hazard.index import HazardIndex
from flowkv.policy.order.compiled import (
    CLOCK,
    DIGEST,
    ETA,
    KNOWN,
    MODE,
    SLOT_BITS,
    SLOT_MASK,
    TAU,
    Array,
    aged,
    attend,
    fold,
    inner,
    kernel,
    opener,
    order_on,
    put,
    reorder,
    sift_down,
    take,
)
from flowkv.policy.order.leaf import LeafOrder, as_slots

# Shadows: places that hold only numbers. What would a rule have kept, what would the optimum keep?
#
# Leaf first, by a static key, without leases, pins or anything else that the order itself knows.
# `cells` says where blocks belong: records with the block above each (`up`, which counts while its
# `birth` equals `bond`) and its `depth`. Every shadow has a heap of its leaves.

SHADE = np.dtype(
    [
        ("key", np.int64),  # static key; NO_KEY: never used
        ("kids", np.int32),  # blocks below it that this shadow holds
        ("place", np.int32),  # among the leaves; INNER: no leaf; AWAY: not held
    ]
)
INNER, AWAY = -1, -2
NO_KEY = np.iinfo(np.int64).min

LEAVES, HELD = 0, 1  # columns of the counts of shadows


def fresh_shades(*shape: int) -> Array:
    """Shadows that hold nothing."""
    shades = np.zeros(shape, SHADE)
    shades["place"], shades["key"] = AWAY, NO_KEY
    return shades


@inner
def above_of(cells: Array, s: int) -> int:
    """The block above another one, -1 if there is none or it is forgotten."""
    p = cells[s].up
    if p >= 0 and cells[p].birth == cells[s].bond:
        return int(p)
    return -1


@inner
def stand(shade: Array, leaves: Array, count: Array, cells: Array, s: int, i: int) -> None:
    """A block takes entry `i` of the leaves, whoever had it, and goes where its key says."""
    tie = (SLOT_MASK - min(cells[s].depth, SLOT_MASK)) << SLOT_BITS | s
    put(leaves, shade["place"], count[LEAVES], i, (shade[s].key, tie))


@inner
def lift(shade: Array, leaves: Array, count: Array, cells: Array, s: int) -> None:
    """A block stands among the leaves, according to its key."""
    i = shade[s].place
    if i < 0:
        i = count[LEAVES]
        count[LEAVES] += 1
    stand(shade, leaves, count, cells, s, i)


@inner
def sink(shade: Array, leaves: Array, count: Array, s: int) -> None:
    """A leaf is none any more."""
    take(leaves, shade["place"], count[LEAVES], shade[s].place)
    count[LEAVES] -= 1


@inner
def bared(shade: Array, cells: Array, s: int) -> int:
    """The held block that becomes a leaf once `s` is given up, -1 for none."""
    p = above_of(cells, s)
    return int(p) if p >= 0 and shade[p].kids == 1 and shade[p].place != AWAY else -1


@inner
def shadow_drop(shade: Array, leaves: Array, count: Array, cells: Array, s: int) -> None:
    """A block is given up."""
    p, q, i = above_of(cells, s), bared(shade, cells, s), shade[s].place
    if q >= 0 and i >= 0:  # it takes its place
        stand(shade, leaves, count, cells, q, i)
    elif i >= 0:
        sink(shade, leaves, count, s)
    shade[s].place = AWAY
    count[HELD] -= 1
    if p >= 0:
        shade[p].kids -= 1
    if q >= 0 and i < 0:
        lift(shade, leaves, count, cells, q)


@inner
def hold(shade: Array, leaves: Array, count: Array, cells: Array, s: int) -> None:
    """A block is held from now on, and stands where its key says; those below it come first."""
    if shade[s].place == AWAY:
        shade[s].place = INNER
        count[HELD] += 1
        p = above_of(cells, s)
        if p >= 0:
            shade[p].kids += 1
            if shade[p].place >= 0:
                sink(shade, leaves, count, p)
    if shade[s].kids == 0:
        lift(shade, leaves, count, cells, s)


# Where blocks belong, and how many fit.

CELL = np.dtype(
    [
        ("up", np.int32),  # the block above it, -1 for a root
        ("depth", np.int32),
        ("birth", np.int32),  # changes whenever the number names another block; 0: not known
        ("bond", np.int32),  # the birth of the block above it when they were linked
    ]
)

# Entries of the book: how many blocks fit (0: not known yet); time and last block of the request at
# hand; numbers given; the most that remained after an eviction lately, and before that; evictions;
# blocks of the request that LRU would have; its time for LRU, for which of two requests at one time
# the second is the later one.
ROOM, NOW, LAST, BIRTHS, PEAK, OLD_PEAK, EVICTIONS, FOUND, STAMP, BOOK_SIZE = range(10)
EPOCH = 64  # evictions after which what remained after those before them no longer counts
BIRTH_MASK = (1 << 30) - 1


def fresh_cells(n: int) -> Array:
    """Cells of blocks that nothing is known of."""
    cells = np.zeros(n, CELL)
    cells["up"] = -1
    return cells


@inner
def name(cells: Array, book: Array, s: int, above: int) -> None:
    """A block is seen for the first time, below `above` (-1: not known)."""
    book[BIRTHS] = (book[BIRTHS] & BIRTH_MASK) + 1
    cell = cells[s]
    cell.birth, cell.up, cell.depth = book[BIRTHS], above, 0
    if above >= 0:
        cell.bond = cells[above].birth
        cell.depth = cells[above].depth + 1
    book[LAST] = s


@inner
def name_asked(cells: Array, book: Array, slots: Array, now: int) -> None:
    """A request uses these known blocks, root to leaf; those seen for the first time come last."""
    n = len(slots)
    known = n
    while known > 0 and cells[slots[known - 1]].birth == 0:
        known -= 1
    for i in range(known, n):
        name(cells, book, slots[i], slots[i - 1] if i > 0 else -1)
    book[NOW] = now
    book[LAST] = slots[n - 1] if n > 0 else -1


@inner
def name_inserted(cells: Array, book: Array, slots: Array, parents: Array, now: int) -> None:
    """Blocks became resident; those without a known parent continue the chain of their request."""
    above = book[LAST] if book[NOW] == now else -1
    for i in range(len(slots)):
        s, p = slots[i], parents[i]
        if 0 <= p < len(cells) and cells[p].birth != 0:
            above = p
        if cells[s].birth == 0:
            name(cells, book, s, above if above != s else -1)
        above = s


@kernel
def measure(book: Array, left: int) -> None:
    """An eviction is over: what is left tells how many blocks fit.

    Whether a driver makes room before an insert or after it, the most that remains after any of the
    last evictions is what fits, but for the smallest insert.
    """
    book[EVICTIONS] += 1
    if book[EVICTIONS] % EPOCH == 0:
        book[OLD_PEAK], book[PEAK] = book[PEAK], 0
    book[PEAK] = max(book[PEAK], left)
    book[ROOM] = max(book[PEAK], book[OLD_PEAK], 1)


# What would a candidate have hit? It decides over as many blocks as really fit: LRU and a decayed
# count always, the learned index while it does not decide itself. (A sample of the conversations
# tells too little about a large place.)
#
# A learned index changes by itself, so its shadow gives up a few hundredths of its blocks at once,
# after a look at all its leaves.

SLACK_BITS = 5  # the learned shadow's size may be off by a 32nd
LRU_TAU, LEARNED_TAU = 0, -1

WATCHED = (
    (CELL, 1),
    (np.int64, 1),
    (np.float64, 1),
    (SHADE, 2),
    (np.int64, 3),
    (np.int64, 2),
    (np.int64, 1),
)
"""Cells, book, sums; of each shadow shades, leaves, counts and `tau`: the half-life of its counts,
`LRU_TAU` or `LEARNED_TAU`."""

watched_on = opener(len(KINDS), WATCHED)


def longer(old: Array, new: Array) -> Array:
    """`new`, which begins with what was in `old`, a shorter vector, or several."""
    new[..., : old.shape[-1]] = old
    return new


@inner
def appraise(shade: Array, mind: tuple[Array, ...], s: int, now: int) -> None:
    """Writes the learned key of a block as of now."""
    shade[s].key = key_of(worth_of(mind, s, now))


@inner
def trim(desk: Array, k: int, capacity: int, now: int) -> None:
    """Gives up what is too much; by a learned index, once that is worth a look at all leaves."""
    mind = mind_on(desk)
    cells, _book, _sums, shades, heaps, counts, taus = watched_on(desk)
    shade, leaves, count = shades[k], heaps[k], counts[k]
    learned = taus[k] == LEARNED_TAU
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


@kernel
def serve(desk: Array, k: int, slots: Array, now: int, asked: bool) -> int:
    """A request uses these blocks, if `asked`, or they became resident: how many a shadow holds.

    Those that are resident are held next. What is too much goes when the next request comes.
    """
    nodes, mind = order_on(desk)[0], mind_on(desk)
    cells, book, _sums, shades, heaps, counts, taus = watched_on(desk)
    shade, leaves, count, tau = shades[k], heaps[k], counts[k], taus[k]
    if asked and book[ROOM] > 0:
        trim(desk, k, book[ROOM], now)
    # Blocks of one prefix mostly share their history, hence their key: compute it once.
    old, new, hits = np.int64(NO_KEY), np.int64(now), 0
    for i in range(len(slots) - 1, -1, -1):  # so that what is no leaf in the end never was
        s = slots[i]
        held = shade[s].place != AWAY
        stays = held or nodes[s].birth != 0
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
    return int(hits)


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


# One compiled function per thing that a hedge does beside the order that decides. `desk` is that of
# the learned order, with what `WATCHED` says behind it.

LEARNED, ASIDE = 0, 2
"""Modes of the order: by the learned index; by a static key, while the index only learns."""


@kernel
def access(desk: Array, slots: Array, now: int, active: int, proved: bool) -> int:
    """A request uses these known blocks. `proved`: a model that was brought need not wait.

    Returns:
        The row that is to decide from now on; if that is another one, `show` has to follow. -1 if a
        slot has no cell, and nothing was done.
    """
    nodes = order_on(desk)[0]
    cells, book, sums = watched_on(desk)[:3]
    here = 0
    for s in slots:
        if s < 0 or s >= len(cells):
            return -1
        here += nodes[s].birth != 0
    name_asked(cells, book, slots, now)
    book[STAMP] = max(book[STAMP] + 1, now)
    book[FOUND] = serve(desk, 0, slots, book[STAMP], True)
    rows = (len(sums) - ROWS) // 3
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
        show(desk, slots, now, active)
    return int(chosen)


@kernel
def show(desk: Array, slots: Array, now: int, active: int) -> None:
    """The shadows see a request, but for those of LRU and of the learned order where it decides."""
    _cells, book, sums, shades = watched_on(desk)[:4]
    for k in range(1, len(shades)):
        if active == k == len(shades) - 1:
            continue
        credit(sums, k, len(slots), serve(desk, k, slots, now, True) - book[FOUND])


@kernel
def come(desk: Array, slots: Array, parents: Array, now: int, active: int) -> None:
    """Blocks became resident; they have cells."""
    cells, book, _sums, shades = watched_on(desk)[:4]
    name_inserted(cells, book, slots, parents, now)
    for k in range(len(shades)):
        if not active == k == len(shades) - 1:
            serve(desk, k, slots, max(book[STAMP], now) if k == 0 else now, False)


@kernel
def lose(desk: Array, slots: Array, forget: bool) -> None:
    """Blocks left, for another reason than that they were too many: no shadow holds them now.

    `forget`: their numbers name nothing any more.
    """
    cells, book, _sums, shades, heaps, counts = watched_on(desk)[:6]
    for s in slots:
        if s < 0 or s >= len(cells):
            continue
        for k in range(len(shades)):
            if shades[k, s].place != AWAY:
                shadow_drop(shades[k], heaps[k], counts[k], cells, s)
            if forget:
                shades[k, s].key, shades[k, s].kids = NO_KEY, 0
        if forget:
            cells[s].up, cells[s].birth = -1, 0
            if book[LAST] == s:
                book[LAST] = -1


# ---- another row decides


@kernel
def follow_learned(desk: Array) -> None:
    """The learned order decides from now on: every leaf is judged by its index."""
    order = order_on(desk)
    nodes, heaps, state = order
    state[MODE], state[TAU] = LEARNED, 1
    fold(state, DIGEST, LEARNED)
    for s in range(len(nodes)):
        if nodes[s].marks & ETA:
            nodes[s].marks &= ~ETA  # the index knows the hints itself
            reorder(nodes, heaps, state, s)
            attend(nodes, heaps, state, s)
        if nodes[s].birth != 0 and nodes[s].kids == 0:
            rekey(order, mind_on(desk), s, state[CLOCK])


@kernel
def follow_counts(desk: Array, k: int) -> None:
    """Decayed counts or LRU decide from now on, as their shadow knows them."""
    nodes, heaps, state = order_on(desk)
    shade, tau = watched_on(desk)[3][k], watched_on(desk)[6][k]
    state[MODE], state[TAU] = ASIDE, tau
    fold(state, DIGEST, ASIDE + tau)
    for s in range(len(nodes)):
        if nodes[s].marks & KNOWN:
            nodes[s].key = nodes[s].last if tau == LRU_TAU else max(shade[s].key, nodes[s].last)
            reorder(nodes, heaps, state, s)


@kernel
def copy_place(desk: Array, now: int) -> None:
    """The learned order's shadow, the last one, begins with what is really here."""
    nodes = order_on(desk)[0]
    cells, _book, _sums, shades, heaps, counts = watched_on(desk)[:6]
    shade, leaves, count = shades[-1], heaps[-1], counts[-1]
    count[LEAVES] = count[HELD] = 0
    for s in range(len(cells)):
        shade[s].place, shade[s].kids = AWAY, 0
    for s in range(len(cells)):
        if nodes[s].birth != 0:
            appraise(shade, mind_on(desk), s, now)
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
        self._active, self._learned = 0, 1 + len(config.taus_s)  # rows: the one that decides, last
        rows = self._learned + 1
        taus = [LRU_TAU, *(round(tau_s * 1e9) for tau_s in config.taus_s), LEARNED_TAU]
        self._watched: tuple[NDArray[Any], ...] = (
            fresh_cells(0),
            np.zeros(BOOK_SIZE, np.int64),
            np.zeros(ROWS + 3 * rows),
            fresh_shades(rows, 0),
            np.zeros((rows, 0, 2), np.int64),
            np.zeros((rows, 2), np.int64),
            np.array(taus, np.int64),
        )
        self._watched[1][LAST] = -1
        super().__init__(**{f: getattr(config, f) for f in ("lease_s", "max_age_s", "leases")})
        self.config = config
        self._state[MODE], self._state[TAU] = ASIDE, LRU_TAU

    # ---- what happens

    def insert(self, now_ns: int, slots: Slots, parents: Slots, **said: Any) -> None:
        """Blocks became resident here, root to leaf; `parents[i]` is a slot or -1."""
        slots, parents = as_slots(slots), as_slots(parents)
        super().insert(now_ns, slots, parents, **said)
        come(self._desk, slots, parents, self._state[CLOCK], self._active)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """A request uses these known blocks, root to leaf.

        Known blocks that are not resident teach as well.
        """
        slots = as_slots(slots)
        super().access(now_ns, slots, visit)
        models = self._mind[4]
        said = self._state[CLOCK], self._active, len(models) > 1 and speaker(models) == 1
        chosen = access(self._desk, slots, *said)
        if chosen < 0:
            slots = slots[(slots >= 0) & (slots < len(self._watched[0]))]
            chosen = access(self._desk, slots, *said)
        if chosen != self._active:
            self._turn(chosen)
            show(self._desk, slots, self._state[CLOCK], chosen)

    def remove(self, slots: Slots) -> None:
        """Blocks left for another reason than `evict`."""
        slots = as_slots(slots)
        super().remove(slots)
        lose(self._desk, slots, False)

    def forget(self, slots: Slots) -> None:
        """Nobody knows these blocks any more: their slots may name others next."""
        slots = as_slots(slots)
        super().forget(slots)
        lose(self._desk, slots, True)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """The application expects the next use of this chain in about `eta_ns`.

        The learned index hears of it whoever decides.
        """
        super().hint(now_ns, slots, eta_ns, sigma)
        if self._active != self._learned and eta_ns < NEVER_NS:
            LeafOrder.hint(self, now_ns, slots, eta_ns, sigma)

    # ---- what is decided

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Chooses and removes `n` victims, none pinned or protected; None if there are fewer."""
        victims = super().evict(now_ns, n, protected)
        if victims is not None and len(victims):
            measure(self._watched[1], len(self))
        return victims

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Gives up to `n` victims to a prefetch: only what is worth less than that.

        For what is certain only, unless the learned index decides.
        """
        if self._active != self._learned:
            return Policy.displace(self, now_ns, n, rate, protected)
        victims = super().displace(now_ns, n, rate, protected)
        if len(victims):
            measure(self._watched[1], len(self))
        return victims

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Up to `n` ends of chains that are not resident and worth bringing here, best first.

        Nothing, unless the learned index decides.
        """
        if self._active != self._learned:
            return NO_SLOTS.copy(), np.empty(0)
        return super().wanted(now_ns, n)

    def _worth(self, slot: int) -> float:
        """As the order that decides: an index in 1/s, or a static key in nanoseconds."""
        if self._active != self._learned:
            return LeafOrder._worth(self, slot)
        return super()._worth(slot)

    @property
    def chosen(self) -> str:
        """The rule that decides at present: "lru", "lfu-ttl 30 s", "hazard"."""
        if self._active == self._learned:
            return "hazard"
        return f"lfu-ttl {self._watched[6][self._active] / 1e9:g} s" if self._active else "lru"

    @property
    def surplus(self) -> int:
        """Blocks that hit so far, less those that plain LRU would have hit."""
        return int(self._watched[2][SURPLUS])

    # ---- parts

    @property
    def _desk(self) -> NDArray[Any]:
        """Where everything lies, for compiled calls."""
        arrays = self._arrays, self._state, self._mind, self._watched
        return self._laid.lay(KINDS + WATCHED, arrays)

    def _turn(self, chosen: int) -> None:
        """Another row decides from now on."""
        if self._active == self._learned:
            copy_place(self._desk, self._state[CLOCK])
        self._active = chosen
        if chosen == self._learned:
            follow_learned(self._desk)
        else:
            follow_counts(self._desk, chosen)

    def _grow(self, room: int) -> None:
        super()._grow(room)
        new = len(self._arrays[0])
        cells, book, sums, shades, heaps, counts, taus = self._watched
        wider, used = np.zeros((len(heaps), new, 2), np.int64), int(counts[:, LEAVES].max())
        wider[:, :used] = heaps[:, :used]
        cells = longer(cells, fresh_cells(new))
        shades = longer(shades, fresh_shades(len(shades), new))
        self._watched = cells, book, sums, shades, wider, counts, taus
