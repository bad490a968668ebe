"""Learned eviction: `HazardIndex`, the learned order, and `Hedge`, the default policy, over it.

`Hedge` follows the learned order unless plain LRU would have hit more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.core.files import MALFORMED
from flowkv.policy.base import (
    NEVER_NS,
    NO_SLOTS,
    NO_VISIT,
    UNKNOWN_STOP,
    HazardConfig,
    Policy,
    Slots,
    Visit,
    configure,
)
from flowkv.policy.hazard import compiled as learned
from flowkv.policy.hazard.compiled import rekey
from flowkv.policy.order import compiled
from flowkv.policy.order.compiled import COUNT, NEVER, Array, inner, kernel
from flowkv.policy.order.leaf import LeafOrder, as_slots

# Saved models of a learned order, for a warm start.

MODEL_VERSION = 1
TAIL_LIMIT = 1e15  # bound of a model's counts, so that their sums are finite
PSEUDO, PSEUDO_BASE = 0.5, 5.0  # initial sums of squared steps of a loaded weight


class _Model(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    shape: list[int]
    weights: bytes
    bases: bytes
    reach: list[float]


def model_bytes(model: NDArray[np.float64]) -> bytes:
    """Return the weights of one model without its learning state; less than 100 KB."""
    return msgspec.msgpack.encode(
        _Model(
            MODEL_VERSION,
            [learned.BINS, learned.KNOTS, *learned.SIZES.values()],
            model[: learned.BASES : 2].astype("<f4").tobytes(),
            model[learned.BASES : learned.REACH : 2].astype("<f4").tobytes(),
            model[learned.REACH : learned.REACH + 8].tolist(),
        )
    )


def model_of(saved: bytes) -> NDArray[np.float64]:
    """Return the row of a model that `model_bytes` wrote, ready to learn on.

    Raises:
        ConfigError: The bytes have another version or shape, or are damaged.
    """
    wrong = "It comes from another version or is damaged: start without it"
    try:
        image = msgspec.msgpack.decode(saved, type=_Model)
    except MALFORMED as error:
        raise ConfigError(f"this is no hazard model: {error}", wrong) from None
    shape = [learned.BINS, learned.KNOTS, *learned.SIZES.values()]
    sizes = len(image.weights), len(image.bases), len(image.reach)
    wanted = 4 * learned.BUCKETS * learned.KNOTS, 4 * learned.BINS, learned.REACHES
    if (image.version, image.shape, sizes) != (MODEL_VERSION, shape, wanted):
        raise ConfigError("the hazard model has another shape", wrong)
    row: NDArray[np.float64] = fresh_model()[0]
    row[: learned.BASES : 2] = np.frombuffer(image.weights, "<f4")
    row[learned.BASES : learned.REACH : 2] = np.frombuffer(image.bases, "<f4")
    row[1 : learned.BASES : 2], row[learned.BASES + 1 : learned.REACH : 2] = PSEUDO, PSEUDO_BASE
    row[learned.REACH : learned.REACH + 8] = image.reach
    if not is_model(row[None]):
        raise ConfigError("the hazard model is outside the bounds of learned models", wrong)
    return row


def fresh_model() -> NDArray[np.float64]:
    """Return a model without any observation."""
    model = np.zeros((1, learned.MODEL_SIZE))
    model[0, learned.BASES : learned.REACH : 2] = learned.FIRST_BASE
    model[0, learned.BASES + 1 : learned.REACH : 2] = 1.0
    model[0, learned.REACH] = 1.0
    return model


def is_model(models: NDArray[np.float64]) -> bool:
    """Return whether models are within the bounds that learning keeps."""
    tail = models[:, learned.REACH :]
    return bool(
        np.isfinite(models).all()
        and (np.abs(models[:, : learned.BASES : 2]) <= learned.WEIGHT_LIMIT).all()
        and (np.abs(models[:, learned.BASES : learned.REACH : 2]) <= learned.BASE_LIMIT).all()
        and (models[:, 1 : learned.REACH : 2] >= 0).all()
        and (models[:, learned.BASES + 1 : learned.REACH : 2] > 0).all()
        and ((tail >= 0) & (tail <= TAIL_LIMIT)).all()
        and (models[:, learned.REACH : learned.REACH + 8].sum(axis=1) > 0).all()
    )


FIRST_TIPS = 1024
GHOSTS = 4096
SOON_NS, SOON_SIGMA = 10**9, 1.0


class HazardIndex(LeafOrder):
    """Leaf order by learned return: evicts the leaf with the chain least worth its room.

    *Worth* is the Gittins index of the chain's return (`flowkv.policy.hazard.compiled`): the best
    chance of a return per second of room, in 1/s, from the present age on. The chance of a return
    at each age is learned online from earlier turns: reason and length of the answer, lengths,
    gaps. A block shared by several chains (forks seen four times or more) is worth the rate of its
    forks besides. An evicted chain still trains the model, which so learns from wrong evictions;
    at most four such *ghosts* are stored per live chain, and 4096 more.

    Leases, ranks, pins, queued requests and tenants are those of `LeafOrder`. `hint(eta, sigma)`
    replaces the model with a lognormal time of return: the same index from a better source. The
    hint holds until the next use, or until the time passed makes it improbable. `complete` adds
    the length and reason of the answer; until then both are unknown, which is a value too.

    Without parents each block has its chain's index and the deepest goes first. Memory: as
    `LeafOrder`, 32 bytes per slot and about 300 bytes per chain.

    Args:
        **options: Fields of `HazardConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "hazard"

    def __init__(self, **options: object) -> None:
        self._learner: tuple[NDArray[Any], ...] = (
            np.zeros(0, learned.OWN),
            np.zeros(0, learned.TIP),
            np.zeros((0, learned.TRAITS)),
            np.zeros((0, learned.FEATURES), np.int32),
            fresh_model(),
            np.zeros(learned.COUNTERS, np.int64),
        )
        self._learner[-1][learned.REACHED :] = self._learner[-1][learned.NEXT] = NEVER
        self._open: dict[int, int] = {}
        self._asked = np.zeros(0, learned.ASKED)
        config = configure(HazardConfig, self.name, options)
        super().__init__(1, config)  # 1 ns leaves a key beyond the clock unchanged
        self._widen(0, 2 * FIRST_TIPS)

    # ---- what happens

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """Record that a request uses these known blocks, root to leaf.

        Known blocks that are not resident train the model as well.
        """
        slots = as_slots(slots)
        tip = learned.visit(self._order, self._learner, slots, now_ns, visit.blocks)
        if tip < 0:
            slots = self._fit(slots)
            self._make_room(1)
            tip = learned.visit(self._order, self._learner, slots, now_ns, visit.blocks)
        if self._queued and visit.request in self._queued:
            self.abort(now_ns, visit.request)
        if visit.request >= 0:
            self._open[visit.request] = tip

    def complete(
        self, now_ns: int, request: int, *, stop: int = UNKNOWN_STOP, output_tokens: int = 0
    ) -> None:
        """Record the end of a request: why it ended, and its output tokens."""
        tip = self._open.pop(request, -1)
        if tip >= 0:
            learned.finish(self._order, self._learner, now_ns, tip, stop, output_tokens)

    def abort(self, now_ns: int, request: int) -> None:
        """Cancel a request that was enqueued or accessed."""
        super().abort(now_ns, request)
        self._open.pop(request, None)

    def remove(self, slots: Slots) -> None:
        """Remove blocks that left for another reason than `evict`."""
        learned.remove(self._order, self._learner, as_slots(slots))

    def forget(self, slots: Slots) -> None:
        """Forget slots that are not resident; the numbers may be reused for other blocks."""
        super().forget(slots)
        learned.forget(self._order, self._learner, as_slots(slots))

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """Record that the application expects the next use of this chain in about `eta_ns`.

        A hint about an unknown last block is ignored.
        """
        slots = as_slots(slots)
        if eta_ns >= NEVER_NS:
            super().hint(now_ns, slots, eta_ns, sigma)
        elif len(slots):
            self._tick(now_ns)
            if eta_ns <= 0:
                eta_ns, sigma = SOON_NS, max(sigma, SOON_SIGMA)
            learned.announce(self._order, self._learner, slots, eta_ns, sigma)

    # ---- what is decided

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Evict up to `n` victims for a prefetch: only blocks worth less than those it brings.

        A queued request's blocks are never evicted for a prefetch.
        """
        victims = np.empty(max(min(n, int(self._state[COUNT])), 0), np.int64)
        said = as_slots(protected), victims, now_ns, rate
        return victims[: learned.displace(self._order, self._learner, *said)]

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Return up to `n` ends of non-resident chains that are worth prefetching, best first.

        Evicted chains are judged as resident ones are.
        """
        if n < 1:
            return NO_SLOTS.copy(), np.empty(0)
        if len(self._asked) < len(self._learner[0]):
            self._asked = np.zeros(len(self._learner[0]), learned.ASKED)
        slots, rates = np.empty(n, np.int64), np.zeros(n)
        arrays = self._order, self._learner, self._asked, slots, rates
        count = learned.wanted(*arrays, now_ns)
        return slots[:count], rates[:count]

    # ---- compiled calls

    def _insert(
        self, slots: Slots, parents: Slots, terms: Slots, said: tuple[int, int, int]
    ) -> None:
        if not learned.insert(self._order, self._learner, slots, parents, terms, said):
            self._make_room(len(slots))
            learned.join(self._order, self._learner, slots, parents)

    def _evict(self, guarded: Slots, victims: Slots, now_ns: int) -> bool:
        return bool(learned.evict(self._order, self._learner, guarded, victims, now_ns))

    def _tick(self, now_ns: int) -> int:
        return int(learned.tick(self._order, self._learner, now_ns))

    def _worth(self, slot: int) -> float:
        """Return the index in 1/s as of the last call; non-default classes lie far off."""
        return float(learned.worth(self._order, self._learner, slot))

    # ---- carrying it over

    def save_model(self) -> bytes:
        """Return the learned model for `load_model` elsewhere: less than 100 KB of msgpack.

        Of two models it is the one that has predicted better lately; of equals the loaded one.
        """
        models = self._learner[4]
        best = len(models) - 1 - int(np.argmin(models[::-1, learned.LOSS]))
        return model_bytes(models[best])

    def load_model(self, saved: bytes) -> None:
        """Load a model that `save_model` returned, for a warm start.

        The model that is learned here goes on beside it. The loaded model decides once it has
        predicted clearly better, and as long as it does so: a dozen turns prove a model of the same
        kind of traffic, and one of another kind hardly ever decides.

        Raises:
            ConfigError: The bytes come from another version or are damaged.
        """
        own, tips, traits, rows, models, counters = self._learner
        both = np.stack([models[0], model_of(saved)])
        self._learner = (own, tips, traits, rows, both, counters)

    # ---- parts

    def _grow(self, room: int) -> None:
        if room > len(self._order[0]):
            super()._grow(room)
        old = self._learner[0]
        own = np.zeros(len(self._order[0]), learned.OWN)
        own[: len(old)] = old[: len(own)]
        own["tip"][len(old) :] = -1
        self._learner = (own, *self._learner[1:])

    def _make_room(self, n: int) -> None:
        """Make room for `n` more tips: drop needless ones, and double the vectors if that helps."""
        tips, used = self._learner[1], int(self._learner[-1][learned.TIPS])
        if used + n <= len(tips):
            return
        keep = np.zeros(max(used, 1), np.int64)
        used = learned.compact(self._learner, self._order[0], keep, GHOSTS)
        self._open = {r: int(keep[t]) for r, t in self._open.items() if keep[t] >= 0}
        if used + n > len(tips) // 2:
            self._widen(used, 2 * (used + n))

    def _widen(self, used: int, room: int) -> None:
        """Resize the vectors of tips to `room`, of which the first `used` are kept."""
        own, *tips, model, counters = self._learner
        more = (np.zeros((room - used, *old.shape[1:]), old.dtype) for old in tips)
        wide = [np.concatenate([old[:used], new]) for old, new in zip(tips, more, strict=True)]
        self._learner = (own, *wide, model, counters)


# Plain LRU is simulated without blocks by a ring of as many slots as fit, newest first, a block
# before those below it. A request moves its blocks to the front, and LRU evicts the last.

RING = np.dtype([("before", np.int32), ("after", np.int32), ("held", np.int32)])

# Entries of the book: blocks in the ring; time and last block of the current request; requested
# blocks so far; hits here less hits in the ring; whether the learned order may decide. The head of
# the ring comes last.
HELD, NOW, LAST, ASKED, SURPLUS, MAY = range(6)
BOOK_SIZE = compiled.LISTS + 1

# The learned order decides unless it has lost more than a stake: so many blocks, and one in so many
# of all. LRU hands back once the traffic has restored part of the stake.
STAKE, SHARE, AGAIN = 40, 1000, 20
EPOCH = 64  # evictions per window of the measured capacity; two windows count

LEARNED, ASIDE = 0, 2
"""Modes of the order: by the learned index; by last use, while the index only learns."""


@inner
def drop(ring: Array, book: Array, s: int) -> None:
    """Take a block out of the ring."""
    compiled.delist(ring, book, 0, s)
    ring[s].held = 0
    book[HELD] -= 1


@kernel
def ask(nodes: Array, ring: Array, book: Array, slots: Array, now: int, room: int) -> bool:
    """Move a request's known blocks, root to leaf, to the front of the ring.

    Blocks that LRU or the place holds become the newest. Blocks beyond `room` (how many fit; 0 if
    unknown) leave the ring before.

    Returns:
        Whether the learned order may decide from now on.
    """
    while book[HELD] > room > 0:
        drop(ring, book, ring[book[compiled.LISTS] - 1].before)
    book[NOW], book[LAST] = now, -1
    for i in range(len(slots) - 1, -1, -1):  # the first block ends up newest
        s = slots[i]
        if s < 0 or s >= len(ring):
            continue
        here, held = nodes[s].birth != 0, ring[s].held != 0
        book[SURPLUS] += int(here) - int(held)
        if held:
            drop(ring, book, s)
        if held or here:
            compiled.enlist(ring, book, 0, s)
            ring[s].held = 1
            book[HELD] += 1
            if book[LAST] < 0:
                book[LAST] = s
    book[ASKED] += len(slots)
    left = book[SURPLUS] + STAKE + book[ASKED] // SHARE
    if left < 0 or left >= AGAIN:
        book[MAY] = left >= 0
    return bool(book[MAY])


@kernel
def bring(ring: Array, book: Array, slots: Array, parents: Array, now: int) -> None:
    """Put blocks that became resident into the ring, root to leaf, each behind its parent."""
    above = book[LAST] if book[NOW] == now else -1
    for i in range(len(slots)):
        s, p = slots[i], parents[i]
        if 0 <= p < len(ring) and ring[p].held:
            above = p
        if not ring[s].held:
            if above >= 0 and ring[above].held:
                compiled.enlist_behind(ring, s, above)
            else:
                compiled.enlist(ring, book, 0, s)
            ring[s].held = 1
            book[HELD] += 1
        above = s


@kernel
def lose(ring: Array, book: Array, slots: Array) -> None:
    """Take blocks out of the ring that left for another reason than eviction."""
    for s in slots:
        if 0 <= s < len(ring) and ring[s].held:
            drop(ring, book, s)


@kernel
def follow(order: tuple[Array, ...], learner: tuple[Array, ...], mode: int) -> None:
    """Switch the order to another mode, and sort every leaf by its new key."""
    nodes, heaps, state = order
    state[compiled.MODE] = mode
    state[compiled.TAU] = mode == LEARNED  # 1 ns keeps a key, 0 is the last use
    compiled.fold(state, compiled.DIGEST, mode)
    for s in range(len(nodes)):
        if mode != LEARNED:
            if nodes[s].marks & compiled.KNOWN:
                nodes[s].key = nodes[s].last
                compiled.reorder(nodes, heaps, state, s)
            continue
        if nodes[s].marks & compiled.ETA:
            nodes[s].marks &= ~compiled.ETA  # the index has the hints too
            compiled.reorder(nodes, heaps, state, s)
            compiled.attend(nodes, heaps, state, s)
        if nodes[s].birth != 0 and nodes[s].kids == 0:
            rekey(order, learner, s, state[compiled.CLOCK])


class Hedge(HazardIndex):
    """Learned index (`HazardIndex`), replaced by plain LRU while LRU would have hit more.

    The hits of leaf-first LRU are known exactly, but for leases and pins: a ring of as many block
    numbers as fit follows the same traffic. The learned order decides from the beginning, and may
    lose 40 blocks and a thousandth of all requested blocks against LRU, beside its gains. Then LRU
    decides, which loses nothing, until the traffic has earned half of a stake again. The index
    learns in both modes.

    One order holds the blocks in both modes; a switch sorts the same leaves by another key. So
    pins, leases, ranks, tenants and queued requests persist. Both modes obey hints of a time, the
    learned one with more use. Chains are offered to a prefetch only while the learned index
    decides.

    Memory: as `HazardIndex` and 12 bytes per slot.

    Args:
        **options: Fields of `HazardConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "auto"

    def __init__(self, **options: object) -> None:
        self._ring = np.zeros(0, RING)
        self._book = np.zeros(BOOK_SIZE, np.int64)
        self._book[LAST], self._book[MAY] = -1, 1
        self._left = [0, 0]  # most blocks left after an eviction: this window, and the one before
        self._evictions = 0
        super().__init__(**options)

    # ---- what happens

    def insert(self, now_ns: int, slots: Slots, parents: Slots, **said: Any) -> None:
        """Add blocks that became resident, root to leaf; `parents[i]` is a slot or -1."""
        slots, parents = as_slots(slots), as_slots(parents)
        super().insert(now_ns, slots, parents, **said)
        bring(self._ring, self._book, slots, parents, now_ns)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """Record that a request uses these known blocks, root to leaf.

        The index learns from known blocks that are not resident as well.
        """
        slots = as_slots(slots)
        super().access(now_ns, slots, visit)
        self._book[ASKED] += max(visit.blocks - len(slots), 0)
        told = self._order[0], self._ring, self._book, slots, now_ns, max(self._left)
        if ask(*told) != self._learned:
            self._turn(not self._learned)

    def remove(self, slots: Slots) -> None:
        """Remove blocks that left for another reason than `evict`."""
        slots = as_slots(slots)
        super().remove(slots)
        lose(self._ring, self._book, slots)

    def forget(self, slots: Slots) -> None:
        """Forget slots that are not resident; the numbers may be reused for other blocks."""
        slots = as_slots(slots)
        super().forget(slots)
        lose(self._ring, self._book, slots)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """Record that the application expects the next use of this chain in about `eta_ns`.

        The learned index records the hint in both modes.
        """
        super().hint(now_ns, slots, eta_ns, sigma)
        if not self._learned and eta_ns < NEVER_NS:
            LeafOrder.hint(self, now_ns, slots, eta_ns, sigma)

    # ---- what is decided

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Remove and return `n` victims, none pinned or protected; None if there are fewer."""
        victims = super().evict(now_ns, n, protected)
        if victims is not None and len(victims):
            self._measure()
        return victims

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Evict up to `n` victims for a prefetch: only blocks worth less than those it brings.

        While LRU decides, only for a certain use.
        """
        if not self._learned:
            return Policy.displace(self, now_ns, n, rate, protected)
        victims = super().displace(now_ns, n, rate, protected)
        if len(victims):
            self._measure()
        return victims

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Return up to `n` ends of non-resident chains that are worth prefetching, best first.

        While LRU decides, there are none.
        """
        if not self._learned:
            return NO_SLOTS.copy(), np.empty(0)
        return super().wanted(now_ns, n)

    def _worth(self, slot: int) -> float:
        """Return the worth by the order that decides: an index in 1/s, or a static key in ns."""
        return super()._worth(slot) if self._learned else LeafOrder._worth(self, slot)

    def seldom(self) -> list[Callable[[], object]]:
        """Return calls that compile code which traffic reaches late; they spoil the policy."""
        one = as_slots([0])
        return [
            partial(self._turn, False),
            partial(self.priority, 0),
            partial(self.hint, 30, one, 1),
        ]

    @property
    def chosen(self) -> str:
        """Name of the rule that decides at present: "lru" or "hazard"."""
        return "hazard" if self._learned else "lru"

    @property
    def surplus(self) -> int:
        """Hits so far, less those that plain LRU would have had, in blocks."""
        return int(self._book[SURPLUS])

    # ---- parts

    @property
    def _learned(self) -> bool:
        """Whether the learned index decides."""
        return bool(self._state[compiled.MODE] == LEARNED)

    def _turn(self, learned: bool) -> None:
        """Let the learned index decide, or LRU."""
        follow(self._order, self._learner, LEARNED if learned else ASIDE)

    def _measure(self) -> None:
        """Estimate how many blocks fit from the number left after an eviction.

        Drivers make room before an insert or after it: the most blocks left after any of the last
        evictions is the capacity, but for the smallest insert.
        """
        self._evictions += 1
        if self._evictions % EPOCH == 0:
            self._left = [0, self._left[0]]
        self._left[0] = max(self._left[0], int(self._state[compiled.COUNT]), 1)

    def _grow(self, room: int) -> None:
        super()._grow(room)
        more = len(self._order[0]) - len(self._ring)
        self._ring = np.append(self._ring, np.zeros(more, RING))
