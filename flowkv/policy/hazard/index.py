"""A learned order: evicts the chains that are least likely to return per second of room."""

from __future__ import annotations

from collections.abc import Collection
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
    Slots,
    Visit,
    configure,
)
from flowkv.policy.hazard import compiled as learned
from flowkv.policy.order.compiled import COUNT, NEVER
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
