"""The default: several rules watch the same traffic, and the one that would hit most decides."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import NEVER_NS, NO_SLOTS, NO_VISIT, Policy, Slots, Visit
from flowkv.policy.config import HedgeConfig, Lease, configure
from flowkv.policy.hazard.index import HazardIndex
from flowkv.policy.hazard.model import speaker
from flowkv.policy.hedge import calls as hedge_calls
from flowkv.policy.hedge import ghost, rule, shadow
from flowkv.policy.hedge.image import Memory, columns_of, memory_of, refill
from flowkv.policy.order.image import damaged, seal, unseal
from flowkv.policy.order.leaf import LeafOrder, as_slots
from flowkv.policy.order.slots import CLOCK, MODE, TAU

FIRST_LEAVES = 1024


class Hedge(HazardIndex):
    """LRU until something else is surely better here, and again as soon as it is not.

    Candidates: LRU; decayed counts (`LfuTtl`) with half-lives of 30 s, 2 and 10 minutes; and the
    learned index (`HazardIndex`), which learns whoever decides. Each has a *shadow*, a place that
    holds only numbers, and is judged by what that hits (`flowkv.policy.hedge.shadow`). LRU's own is
    of full size, always: so how many hits more than LRU there really were is known exactly
    (`flowkv.policy.hedge.ghost`), and a rule that disappoints is dismissed before the damage passes
    a small share of all blocks (`flowkv.policy.hedge.rule`). A model that was brought
    (`load_model`) and predicts well here spares the learned order the wait for such evidence.

    One order holds the blocks, whoever decides; another rule sorts the same leaves by another key.
    So pins, leases, ranks, tenants and queued requests go on as they were. Hints of a time are
    obeyed by every rule, the learned one making most of them. Chains are offered to a prefetch
    while the learned index decides, and not otherwise.

    Memory: as `HazardIndex` and about 130 bytes per slot.

    Args:
        **options: Fields of `HedgeConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "auto"

    def __init__(self, **options: object) -> None:
        config = configure(HedgeConfig, self.name, options)
        taus = np.array([0, *(round(tau_s * 1e9) for tau_s in config.taus_s)], np.int64)
        rows = len(taus)
        self._watch = (
            ghost.fresh_cells(0),
            ghost.fresh_book(),
            rule.fresh_sums(rows + 1),
        )
        self._sampled: tuple[NDArray[Any], ...] = (
            shadow.fresh_shades(rows, 0),
            np.zeros((rows, FIRST_LEAVES, 2), np.int64),
            np.zeros((rows, 2), np.int64),
        )
        self._learned: tuple[NDArray[Any], ...] = (
            shadow.fresh_shades(1, 0)[0],
            np.zeros((FIRST_LEAVES, 2), np.int64),
            np.zeros(2, np.int64),
        )
        self._taus, self._active, self._grown = taus, 0, False
        self._sample = config.sample
        super().__init__(**{f: getattr(config, f) for f in ("lease_s", "max_age_s", "leases")})
        self.config = config
        self._state[MODE], self._state[TAU] = hedge_calls.ASIDE, 0

    # ---- what happens

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
        """See `LeafOrder.insert`."""
        slots, parents = as_slots(slots), as_slots(parents)
        said: dict[str, Any] = {"n_bytes": n_bytes, "cost_ns": cost_ns, "tenant": tenant}
        super().insert(now_ns, slots, parents, lease=lease, **said)
        now = self._state[CLOCK]
        kept = hedge_calls.come(self._watch, self._sampled, slots, parents, now)
        if kept != 0:
            self._grown = True
        while kept < 0:
            self._widen_sampled()
            kept = 0 if hedge_calls.keep(self._watch[0], self._sampled, slots, now) else -1
        if self._active != len(self._taus):
            self._learn(slots, False)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """See `Policy.access`. Known blocks that are not resident teach as well."""
        slots = as_slots(slots)
        super().access(now_ns, slots, visit)
        now = self._state[CLOCK]
        said = (visit.session, now, self._active)
        answer = hedge_calls.access(self._watch, slots, *said)
        if answer < 0:
            slots = slots[(slots >= 0) & (slots < len(self._watch[0]))]
            answer = hedge_calls.access(self._watch, slots, *said)
        chosen = answer % hedge_calls.SAMPLED
        if chosen == 0 and len(self._mind[4]) > 1 and self._proved():
            chosen = len(self._taus)
            rule.turn(self._watch[2], chosen)
        if chosen != self._active:
            self._turn(chosen)
        if chosen != len(self._taus):
            self._learn(slots, True)
        if answer >= hedge_calls.SAMPLED:
            while not hedge_calls.serve(self._watch, self._sampled, self._taus, slots, now):
                self._widen_sampled()
            self._grown = True

    def remove(self, slots: Slots) -> None:
        """See `LeafOrder.remove`."""
        slots = as_slots(slots)
        super().remove(slots)
        self._drop(slots, False)
        hedge_calls.lose(self._watch, slots)

    def forget(self, slots: Slots) -> None:
        """See `Policy.forget`."""
        slots = as_slots(slots)
        super().forget(slots)
        self._drop(slots, True)
        hedge_calls.forget(self._watch, slots)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """See `Policy.hint`. The learned index hears of it whoever decides."""
        super().hint(now_ns, slots, eta_ns, sigma)
        if self._active != len(self._taus) and eta_ns < NEVER_NS:
            LeafOrder.hint(self, now_ns, slots, eta_ns, sigma)

    # ---- what is decided

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """See `LeafOrder.evict`."""
        victims = super().evict(now_ns, n, protected)
        if victims is not None and len(victims):
            self._give_up(victims)
        return victims

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """See `Policy.displace`. For what is certain only, unless the learned index decides."""
        if self._active != len(self._taus):
            return Policy.displace(self, now_ns, n, rate, protected)
        victims = super().displace(now_ns, n, rate, protected)
        if len(victims):
            self._give_up(victims)
        return victims

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """See `Policy.wanted`. Nothing, unless the learned index decides."""
        if self._active != len(self._taus):
            return NO_SLOTS.copy(), np.empty(0)
        return super().wanted(now_ns, n)

    def priority(self, slot: int) -> float:
        """As the order that decides: an index in 1/s, or a static key in nanoseconds."""
        if self._active != len(self._taus):
            return LeafOrder.priority(self, slot)
        return super().priority(slot)

    @property
    def chosen(self) -> str:
        """The rule that decides at present: "lru", "lfu-ttl 30 s", "hazard"."""
        if self._active == len(self._taus):
            return "hazard"
        tau_s = self._taus[self._active] / 1e9
        return f"lfu-ttl {tau_s:g} s" if self._active else "lru"

    @property
    def surplus(self) -> int:
        """Blocks that hit so far, less those that plain LRU would have hit."""
        return int(self._watch[2][rule.SURPLUS])

    # ---- carrying it over

    def snapshot(self) -> bytes:
        """See `Policy.snapshot`. About 100 bytes per slot more than `HazardIndex`'s."""
        shades = np.concatenate([self._sampled[0], self._learned[0][None]])
        memory = Memory(*self._watch, shades["key"], shades["place"] != shadow.AWAY)
        own = {"mind": super().snapshot(), "active": self._active, "grown": self._grown}
        return seal(self.name, self.config, own | columns_of(memory))

    def restore(self, snapshot: bytes) -> None:
        """See `Policy.restore`. Nothing has changed if it is refused."""
        values = unseal(snapshot, self.name, self.config)
        mind, active = values.get("mind"), values.get("active")
        if not isinstance(mind, bytes) or type(active) is not int:
            raise damaged("it holds no order")
        if not 0 <= active <= len(self._taus):
            raise damaged("it holds no order")
        heir = Hedge(**msgspec.structs.asdict(self.config))
        heir._active = active
        heir._state[MODE], heir._state[TAU] = heir._mode()
        HazardIndex.restore(heir, mind)
        here = heir._arrays[0]["birth"] != 0
        memory = memory_of(values, here, len(self._taus) + 1)
        heir._take(memory)
        heir._grown = values.get("grown") is True
        vars(self).update(vars(heir))

    # ---- parts

    def _proved(self) -> bool:
        """Whether a model that was brought predicts well here, and no rule has failed yet."""
        return speaker(self._mind[4]) == 1 and self._watch[2][rule.FAILED] == 0.0

    def _mode(self) -> tuple[int, int]:
        """How the order sorts while the present row decides."""
        learned = self._active == len(self._taus)
        return (
            (hedge_calls.LEARNED, 1) if learned else (hedge_calls.ASIDE, self._taus[self._active])
        )

    def _take(self, memory: Memory) -> None:
        """Takes over what a snapshot told of."""
        cells, rows = memory.cells, len(self._taus)
        n = len(cells)
        shades = shadow.fresh_shades(rows + 1, n)
        shades["key"] = memory.keys
        heaps, counts = np.zeros((rows + 1, n, 2), np.int64), np.zeros((rows + 1, 2), np.int64)
        for row in zip(shades, heaps, counts, memory.held, strict=True):
            refill(row[:3], cells, row[3])
        self._watch = cells, memory.book, memory.sums
        self._sampled = shades[:rows].copy(), heaps[:rows].copy(), counts[:rows].copy()
        self._learned = shades[rows].copy(), heaps[rows].copy(), counts[rows].copy()

    def _turn(self, chosen: int) -> None:
        """Another row decides from now on."""
        learned = len(self._taus)
        if self._active == learned:
            if len(self._learned[1]) < len(self._watch[0]):
                self._widen_learned(len(self._watch[0]))
            now = self._state[CLOCK]
            hedge_calls.copy_place(self._watch[0], self._learned, self._mind, now)
        self._active = chosen
        if chosen == learned:
            hedge_calls.follow_learned(self._order, self._mind)
        else:
            everybody = self._watch[1][ghost.MASK] == 0
            shade, tau = self._sampled[0][chosen], self._taus[chosen]
            hedge_calls.follow_counts(self._order, shade, tau, everybody)

    def _give_up(self, victims: Slots) -> None:
        """Notes victims; shadows follow, where anything was added to them."""
        hedge_calls.go(self._watch, self._sampled, victims, self._sample, self._grown)
        self._grown = False

    def _learn(self, slots: Slots, asked: bool) -> None:
        """Shows these blocks to the learned order's shadow."""
        said = (slots, self._state[CLOCK], asked)
        while not hedge_calls.learn(self._watch, self._learned, self._mind, *said):
            self._widen_learned(2 * len(self._learned[1]) + len(slots))

    def _drop(self, slots: Slots, forget: bool) -> None:
        """Takes blocks out of all shadows."""
        cells = self._watch[0]
        hedge_calls.drop(cells, self._sampled, slots, forget)
        shade, leaves, count = self._learned
        hedge_calls.drop(cells, (shade[None], leaves[None], count[None]), slots, forget)

    def _widen_learned(self, width: int) -> None:
        shade, leaves, count = self._learned
        wider = np.zeros((width, 2), np.int64)
        wider[: len(leaves)] = leaves
        self._learned = shade, wider, count

    def _widen_sampled(self) -> None:
        shades, heaps, counts = self._sampled
        rows, width, _ = heaps.shape
        wider = np.zeros((rows, 2 * width, 2), np.int64)
        wider[:, :width] = heaps
        self._sampled = shades, wider, counts

    def _grow(self, room: int) -> None:
        super()._grow(room)
        cells, book, sums = self._watch
        old, new = len(cells), len(self._arrays[0])
        more = ghost.fresh_cells(new)
        more[:old] = cells
        self._watch = more, book, sums
        shades = shadow.fresh_shades(len(self._taus), new)
        shades[:, :old] = self._sampled[0]
        self._sampled = (shades, *self._sampled[1:])
        shade = shadow.fresh_shades(1, new)[0]
        shade[:old] = self._learned[0]
        self._learned = (shade, *self._learned[1:])
