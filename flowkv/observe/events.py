"""Events and their bus, which metrics, traces and tests subscribe to.

Events carry counts, not contents: token ids, texts and tensors never travel on the bus.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Self

import msgspec

_log = logging.getLogger("flowkv")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event", gc=False):
    """Base of all events; a subscription to it receives every event."""


class Published(Event, frozen=True, kw_only=True):
    """Full pages were published in the index, where other prompts can find them."""

    group: int
    pages: int
    tokens: int
    tenant: str = ""


class Encoded(Event, frozen=True, kw_only=True):
    """Full pages were encoded, or encoded again; `n_bytes` is their size afterwards."""

    group: int
    pages: int
    source: str
    target: str
    n_bytes_before: int
    n_bytes: int


class Hit(Event, frozen=True, kw_only=True):
    """Part of a prompt was found in a tier; one event per request and tier."""

    tier: str
    tokens: int
    n_bytes: int
    tenant: str = ""


class Miss(Event, frozen=True, kw_only=True):
    """Part of a prompt was found nowhere and is computed."""

    tokens: int
    tenant: str = ""


class Restored(Event, frozen=True, kw_only=True):
    """Pages of a prompt were loaded, verified and are ready to be attended to."""

    tier: str
    tokens: int
    n_bytes: int
    seconds: float


class RestoreSpan(Event, frozen=True, kw_only=True):
    """One piece of a restore, as it happened.

    `engine` is "compute", "suffix" or the name of the tier that was loaded from; times are those of
    `time.perf_counter`. A span over all layers has `layers` = their number and `layer` 0.
    """

    request: int
    engine: str
    token: int
    tokens: int
    layer: int
    layers: int
    started_s: float
    seconds: float
    n_bytes: int = 0


class RestoreEnded(Event, frozen=True, kw_only=True):
    """The restore of a prefix ended, with its computed and loaded tokens, and its duration.

    `exposed_s` is the part of `seconds` in which the caller waited for loads; `bound_s` the lower
    bound by measured rates, 0.0 while rates are unknown; `failed` counts loads that failed, and
    were recomputed.
    """

    request: int
    tokens: int
    resident_tokens: int
    computed_tokens: int
    loaded_tokens: int
    n_bytes: int
    started_s: float
    seconds: float
    exposed_s: float = 0.0
    bound_s: float = 0.0
    failed: int = 0
    tenant: str = ""


class Hinted(Event, frozen=True, kw_only=True):
    """A request with `cache_control` was served: its tokens before the last breakpoint."""

    read_tokens: int
    created_tokens: int
    dropped: int


class Audited(Event, frozen=True, kw_only=True):
    """A restored page was recomputed and compared; `error` over `bound` is a mismatch."""

    tier: str
    group: int
    page: int
    codec: str
    error: float
    bound: float


class Stored(Event, frozen=True, kw_only=True):
    """Pages were written to a tier, which answered for all of them together."""

    tier: str
    pages: int
    n_bytes: int
    seconds: float = 0.0


class Evicted(Event, frozen=True, kw_only=True):
    """A tier evicted pages.

    `reason` is "space", "unused" (a namespace that no cache uses), "lease", "quota", "prefetch",
    "overflow" (a sequence that is longer than its device) or "close".
    """

    tier: str
    pages: int
    n_bytes: int
    reason: str = "space"


class Promoted(Event, frozen=True, kw_only=True):
    """Pages were copied to a faster tier."""

    source: str
    tier: str
    pages: int
    n_bytes: int


class Demoted(Event, frozen=True, kw_only=True):
    """Pages were moved to a slower tier to make room, as one batch."""

    source: str
    tier: str
    pages: int
    n_bytes: int


class Defragmented(Event, frozen=True, kw_only=True):
    """Pages moved within a device's pool; `slabs` counts the slabs that became empty."""

    device: str
    pages: int
    n_bytes: int
    slabs: int
    seconds: float
    fragmentation: float


class Failed(Event, frozen=True, kw_only=True):
    """An operation of a tier failed; its pages are treated as missing."""

    tier: str
    operation: str
    reason: str
    items: int = 1


class Quarantined(Event, frozen=True, kw_only=True):
    """A stored page failed its check, and is never used again."""

    tier: str
    key: bytes
    reason: str


class Forgotten(Event, frozen=True, kw_only=True):
    """Blocks were dropped because another cache erased them on a shared tier."""

    tier: str
    blocks: int


class Remembered(Event, frozen=True, kw_only=True):
    """A function made by `flowkv.memo` was called: its rows, split into found and computed ones."""

    name: str
    rows: int
    found: int
    computed: int
    seconds: float
    tenant: str = ""


class RowsRead(Event, frozen=True, kw_only=True):
    """Rows of an embedding on disk were looked up: distinct rows, and those found in memory."""

    rows: int
    found: int
    n_bytes: int
    seconds: float


class WeightsRead(Event, frozen=True, kw_only=True):
    """A forward with streamed weights ended: the units it used, and those already in memory."""

    units: int
    found: int
    n_bytes: int
    seconds: float
    """Time that the forward waited for the other units."""


class StepPlanned(Event, frozen=True, kw_only=True):
    """A forward pass over a ragged batch was planned."""

    rows: int
    new_tokens: int
    context_tokens: int


class Queued(Event, frozen=True, kw_only=True):
    """An engine accepted a request; `waiting` counts all requests that wait, this one included."""

    request: int
    prompt_tokens: int
    waiting: int
    tenant: str = ""


class Admitted(Event, frozen=True, kw_only=True):
    """A request entered the batch, for the first time or again after it was preempted.

    `queued_s` is the wait that ended now; `reused_tokens` counts tokens that were not computed.
    """

    request: int
    queued_s: float
    reused_tokens: int
    resumed: bool = False
    tenant: str = ""


class Preempted(Event, frozen=True, kw_only=True):
    """A request left the batch to make room; its pages went to host memory, or were dropped."""

    request: int
    pages: int
    n_bytes: int
    kept: bool


class EngineStep(Event, frozen=True, kw_only=True):
    """A step of an engine is over; times are those of `time.perf_counter`.

    `seconds` is the whole turn, `model_s` the forward, `sampling_s` the choice of tokens; the rest
    is bookkeeping. `gaps_s` has the time since the last token of each row that made a further
    one; `decode_tokens` and `made_tokens` count tokens that were read in the turn, which on a GPU
    may be those of the step before. `pages` counts pages of `total_pages` in use by sequences after
    the forward, without idle pages that only the index knows.
    """

    rows: int
    prefill_tokens: int
    decode_tokens: int
    made_tokens: int
    waiting: int
    aside: int
    pages: int
    total_pages: int
    started_s: float
    seconds: float
    model_s: float
    sampling_s: float
    gaps_s: tuple[float, ...] = ()


class Finished(Event, frozen=True, kw_only=True):
    """A request of an engine is over.

    `reason` is "stop", "length", "cancelled", "deadline" or "failed"; `ttft_s` and `tpot_s` are 0.0
    if there was no first, or no further token.
    """

    request: int
    reason: str
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    started_s: float
    seconds: float
    queued_s: float
    ttft_s: float
    tpot_s: float
    preempted: int = 0
    restore_s: float = 0.0
    exposed_s: float = 0.0
    tenant: str = ""


class Warned(Event, frozen=True, kw_only=True):
    """A warning for the user; `code` is stable, `message` ends with a remedy."""

    code: str
    message: str


class Closing:
    """Base of classes that are closed at the end of their `with` block."""

    __slots__ = ()

    def close(self) -> None:
        """End the object's work. Safe to call again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Subscription(Closing):
    """Callback on a bus, until `close()` or the end of its `with` block."""

    __slots__ = ("_bus", "_failed", "callback", "types")

    def __init__(
        self, bus: Bus, callback: Callable[[Any], object], types: tuple[type[Event], ...]
    ) -> None:
        self._bus, self.callback, self.types = bus, callback, types
        self._failed = False

    def close(self) -> None:
        """End the subscription. A call that runs on another thread still finishes."""
        self._bus._remove(self)

    def _deliver(self, event: Event) -> None:
        try:
            self.callback(event)
        except Exception:  # a faulty listener must not stop serving
            if not self._failed:
                self._failed = True
                _log.exception(
                    "a subscriber failed on %s; its further failures are not logged",
                    type(event).__name__,
                )


class _Routes(dict[type, tuple[Subscription, ...]]):
    """Subscriptions by type of event, each found at its first look-up; () where there is none.

    Args:
        *subscriptions: All subscriptions, in order.
    """

    __slots__ = ("subscriptions",)

    def __init__(self, *subscriptions: Subscription) -> None:
        super().__init__()
        self.subscriptions = subscriptions

    def __missing__(self, kind: type[Event]) -> tuple[Subscription, ...]:
        route = self[kind] = tuple(s for s in self.subscriptions if issubclass(kind, s.types))
        return route


class Bus:
    """Bus that delivers events on the emitter's thread, to subscribers in order of subscription.

    Thread-safe. Without a subscriber, `emit` is one dictionary look-up; if building the event
    costs more than that, check `wants` first. A callback should be quick and must not block.

    Attributes:
        routes: Subscriptions by type of event; replaced whole on change, so that readers need no
            lock.
    """

    __slots__ = ("_lock", "routes")

    def __init__(self) -> None:
        self._lock, self.routes = threading.Lock(), _Routes()

    def subscribe(self, callback: Callable[[Any], object], *types: type[Event]) -> Subscription:
        """Call `callback` with every event of `types` and their subclasses; no types means all.

        Exceptions of the callback are logged once and otherwise ignored.
        """
        subscription = Subscription(self, callback, types or (Event,))
        with self._lock:
            self.routes = _Routes(*self.routes.subscriptions, subscription)
        return subscription

    def wants(self, kind: type[Event]) -> bool:
        """Return whether any subscriber receives events of exactly this type."""
        return bool(self.routes[kind])

    def emit(self, event: Event) -> None:
        """Deliver `event`, and return once every subscriber has been called."""
        for subscription in self.routes[type(event)]:
            subscription._deliver(event)

    def _remove(self, subscription: Subscription) -> None:
        with self._lock:
            left = (s for s in self.routes.subscriptions if s is not subscription)
            self.routes = _Routes(*left)
