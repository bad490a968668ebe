"""A learned order: keeps the chains whose return is most likely per second of room."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import NEVER_NS, NO_SLOTS, NO_VISIT, UNKNOWN_STOP, Slots, Visit
from flowkv.policy.config import HazardConfig, Lease, configure
from flowkv.policy.hazard import calls as hazard_calls
from flowkv.policy.hazard import desk, reach
from flowkv.policy.hazard.features import FEATURES, TIP, TRAITS
from flowkv.policy.hazard.image import mind_columns, mind_of, model_bytes, model_of, requests_of
from flowkv.policy.hazard.model import LOSS, fresh_model
from flowkv.policy.hazard.tips import COUNTERS, NEXT, OWN, REACHED, TIPS
from flowkv.policy.order import calls
from flowkv.policy.order.compiled import SLOT_LIMIT
from flowkv.policy.order.desk import Desk
from flowkv.policy.order.image import damaged, seal, unseal
from flowkv.policy.order.leaf import LeafOrder, as_slots
from flowkv.policy.order.slots import CLOCK, COUNT, LISTS, NEVER, STALE, TENANTS

FIRST_TIPS = 1024
GHOSTS = 4096
SOON_NS, SOON_SIGMA = 10**9, 1.0


class HazardIndex(LeafOrder):
    """Gives up, among the leaves, the one whose chain is least worth its room.

    *Worth* is the Gittins index of the chain's return (`flowkv.policy.hazard.model`): the best
    chance of a return per second of room, in 1/s, from the present age on. How likely a return is
    at which age is learned online from the turns that went before: reason and length of the
    answer, lengths, gaps. A block shared by several chains (forks seen four times or more) is worth
    the rate of its forks besides. A chain keeps teaching after it has been given up, so that the
    model sees what it should have kept; at most four such *ghosts* are remembered per live chain,
    and 4096 more.

    Leases, ranks, pins, queued requests and tenants are those of `LeafOrder`. `hint(eta, sigma)`
    takes the place of the model with a lognormal time of return: the same index from a better
    source. It holds until the next use, or until the time passed makes it incredible. `complete`
    brings what an answer tells; until then its length and reason are unknown, which is a value too.

    Without parents each block has its chain's index and the deepest goes first. Memory: as
    `LeafOrder`, 32 bytes per slot and about 300 bytes per chain.

    Args:
        **options: Fields of `HazardConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "hazard"

    def __init__(self, **options: object) -> None:
        self.config = configure(HazardConfig, self.name, options)
        self._mind: tuple[NDArray[Any], ...] = (
            np.zeros(0, OWN),
            np.zeros(0, TIP),
            np.zeros((0, TRAITS)),
            np.zeros((0, FEATURES), np.int32),
            fresh_model(),
            np.zeros(COUNTERS, np.int64),
        )
        self._mind[-1][REACHED:] = self._mind[-1][NEXT] = NEVER
        self._open: dict[int, int] = {}
        self._laid = Desk()
        self._asked = np.zeros(0, reach.ASKED)
        super().__init__(1, self.config)  # 1 ns leaves a key beyond the clock as it is
        self._make_room(FIRST_TIPS)

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
        done = desk.NOT_DONE
        if len(slots) == len(parents) and 0 <= tenant < len(self._state) - LISTS - TENANTS:
            numbers = now_ns, tenant, self._extra(n_bytes, cost_ns)
            arguments = slots, parents, self._lease(lease), numbers
            done = desk.insert(self._desk, *arguments)
        if done == 0:
            return
        if done != desk.NOT_JOINED:  # there is no room, or something to complain of
            said: dict[str, Any] = {"n_bytes": n_bytes, "cost_ns": cost_ns, "tenant": tenant}
            super().insert(now_ns, slots, parents, lease=lease, **said)
        self._make_room(len(slots))
        hazard_calls.join(self._order, self._mind, slots, parents)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """See `Policy.access`. Known blocks that are not resident teach as well."""
        slots = as_slots(slots)
        said = (now_ns, visit.blocks)
        tip = desk.visit(self._desk, slots, *said)
        if tip < 0:
            slots = self._fit(slots)
            tip = desk.visit(self._desk, slots, *said)
        if self._queued and visit.request in self._queued:
            self.abort(now_ns, visit.request)
        if visit.request >= 0:
            self._open[visit.request] = tip

    def complete(
        self, now_ns: int, request: int, *, stop: int = UNKNOWN_STOP, output_tokens: int = 0
    ) -> None:
        """See `Policy.complete`."""
        tip = self._open.pop(request, -1)
        if tip >= 0:
            desk.finish(self._desk, now_ns, tip, stop, output_tokens)

    def abort(self, now_ns: int, request: int) -> None:
        """See `Policy.abort`."""
        super().abort(now_ns, request)
        self._open.pop(request, None)

    def remove(self, slots: Slots) -> None:
        """See `LeafOrder.remove`."""
        hazard_calls.remove(self._order, self._mind, as_slots(slots))

    def forget(self, slots: Slots) -> None:
        """See `Policy.forget`."""
        super().forget(slots)
        hazard_calls.forget(self._order, self._mind, as_slots(slots))

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """See `Policy.hint`. Ignored if nothing is known of the chain's last block."""
        slots = as_slots(slots)
        if eta_ns >= NEVER_NS:
            super().hint(now_ns, slots, eta_ns, sigma)
        elif len(slots):
            hazard_calls.tick(self._order, self._mind, now_ns)
            if eta_ns <= 0:
                eta_ns, sigma = SOON_NS, max(sigma, SOON_SIGMA)
            hazard_calls.announce(self._order, self._mind, slots, eta_ns, sigma)

    # ---- what is decided

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """See `LeafOrder.evict`."""
        if n < 0:
            raise ConfigError(f"cannot evict {n} blocks", "Ask for none or more")
        if n > self._state[COUNT]:
            n = int(self._state[COUNT]) + 1  # as hopeless, without the memory
        victims = np.empty(n, np.int64)
        guarded = as_slots(protected) if len(protected) else NO_SLOTS
        done = desk.evict(self._desk, guarded, victims, now_ns)
        return victims if done else None

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """See `Policy.displace`. A queued request's blocks stay, whatever comes."""
        victims = np.empty(max(min(n, int(self._state[COUNT])), 0), np.int64)
        guarded = as_slots(protected) if len(protected) else NO_SLOTS
        prefetch = reach.displace
        count = prefetch(self._order, self._mind, guarded, victims, now_ns, rate)
        return victims[:count]

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """See `Policy.wanted`. Chains that have left, judged as those that are here."""
        if n < 1:
            return NO_SLOTS.copy(), np.empty(0)
        if len(self._asked) < len(self._mind[0]):
            self._asked = np.zeros(len(self._mind[0]), reach.ASKED)
        slots, rates = np.empty(n, np.int64), np.zeros(n)
        arrays = self._order, self._mind, self._asked, slots, rates
        count = reach.wanted(*arrays, now_ns)
        return slots[:count], rates[:count]

    def expired(self, now_ns: int) -> Slots:
        """See `LeafOrder.expired`."""
        if desk.tick(self._desk, now_ns) == 0:
            return np.empty(0, np.int64)
        return super().expired(now_ns)

    def admit(self, now_ns: int, slots: Slots) -> NDArray[np.bool_]:
        """See `LeafOrder.admit`."""
        hazard_calls.tick(self._order, self._mind, now_ns)
        return super().admit(now_ns, slots)

    def priority(self, slot: int) -> float:
        """The index in 1/s, as of the last call; other classes than the default lie far away."""
        nodes = self._arrays[0]
        if not 0 <= slot < len(nodes) or nodes[slot]["birth"] == 0:
            return -np.inf
        if self._state[STALE]:
            calls.tick(*self._order, self._state[CLOCK])
        return float(hazard_calls.worth(self._order, self._mind, slot))

    # ---- carrying it over

    def snapshot(self) -> bytes:
        """See `Policy.snapshot`. 32 bytes per slot and 130 per chain more than `LeafOrder`'s."""
        hazard_calls.tick(self._order, self._mind, self._state[CLOCK])
        values = {"order": super().snapshot(), "open": self._open, "room": len(self._mind[1])}
        return seal(self.name, self.config, values | mind_columns(self._mind))

    def restore(self, snapshot: bytes) -> None:
        """See `Policy.restore`. Nothing has changed if it is refused."""
        values = unseal(snapshot, self.name, self.config)
        order = values.get("order")
        if not isinstance(order, bytes):
            raise damaged("it holds no order")
        mind = mind_of(values)
        requests = requests_of(values.get("open"), len(mind[1]))
        super().restore(order)
        self._mind, self._open = mind, requests
        self._asked = np.zeros(0, reach.ASKED)
        self._grow(len(mind[0]))
        room, used = values.get("room"), len(mind[1])
        if not isinstance(room, int) or not used <= room <= FIRST_TIPS + 64 * used:
            room = used + FIRST_TIPS
        self._widen(used, room)  # as it was, so that tips go when they would have gone

    def save_model(self) -> bytes:
        """What has been learned, for `load_model` elsewhere: less than 100 KB of msgpack.

        Of two models the one that has predicted better lately; of equals what was brought.
        """
        models = self._mind[4]
        best = len(models) - 1 - int(np.argmin(models[::-1, LOSS]))
        return model_bytes(models[best])

    def load_model(self, saved: bytes) -> None:
        """Starts warm, from what `save_model` gave.

        The model that is learned here goes on beside it. What was brought decides once it has
        predicted clearly better, and as long as it does so: a dozen turns prove a model of the same
        kind of traffic, and one from another kind is hardly ever heard.

        Raises:
            ConfigError: If it comes from another version or is damaged.
        """
        own, tips, traits, rows, models, counters = self._mind
        both = np.stack([models[0], model_of(saved)])
        self._mind = (own, tips, traits, rows, both, counters)

    # ---- parts

    @property
    def _desk(self) -> NDArray[Any]:
        """Where everything lies, for `desk`."""
        laid, arrays, state, mind = self._laid, self._arrays, self._state, self._mind
        kept = laid.groups
        if kept and kept[0] is arrays and kept[1] is state and kept[2] is mind:
            return laid.words
        return laid.lay(desk.KINDS, (arrays, state, mind))

    @property
    def _order(self) -> tuple[NDArray[Any], ...]:
        return (*self._arrays, self._state)

    def _fit(self, slots: Slots) -> Slots:
        """The slot numbers among these, and makes room for them and for a tip."""
        room = hazard_calls.room_needed(len(self._arrays[0]), slots)
        if room < 0:
            slots = slots[(slots >= 0) & (slots < SLOT_LIMIT)]
            room = hazard_calls.room_needed(len(self._arrays[0]), slots)
        if room > 0:
            self._grow(room)
        self._make_room(1)
        return slots

    def _grow(self, room: int) -> None:
        if room > len(self._arrays[0]):
            super()._grow(room)
        old = self._mind[0]
        own = np.zeros(len(self._arrays[0]), OWN)
        own[: len(old)] = old[: len(own)]
        own["tip"][len(old) :] = -1
        self._mind = (own, *self._mind[1:])

    def _make_room(self, n: int) -> None:
        """Makes room for `n` more tips: drops what no longer matters, and doubles if that helps."""
        tips, used = self._mind[1], int(self._mind[-1][TIPS])
        if used + n <= len(tips):
            return
        keep = np.zeros(max(used, 1), np.int64)
        used = hazard_calls.compact(self._mind, self._arrays[0], keep, GHOSTS)
        self._open = {r: int(keep[t]) for r, t in self._open.items() if keep[t] >= 0}
        if used + n > len(tips) // 2:
            self._widen(used, 2 * (used + n))

    def _widen(self, used: int, room: int) -> None:
        """Makes the vectors of tips so long, of which so many are used."""
        own, tips, traits, rows, model, counters = self._mind
        more = room - used
        self._mind = (
            own,
            np.concatenate([tips[:used], np.zeros(more, TIP)]),
            np.concatenate([traits[:used], np.zeros((more, TRAITS))]),
            np.concatenate([rows[:used], np.zeros((more, FEATURES), np.int32)]),
            model,
            counters,
        )
