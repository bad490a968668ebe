"""What one restore took and brought: told to whoever learns from it, counts it or watches it."""

from __future__ import annotations

import time
from collections import Counter

from flowkv.core import compiling
from flowkv.observe.events import Hit, Miss, Restored, RestoreEnded, RestoreSpan
from flowkv.policy.restore import Compute, Request, Span, Suffix
from flowkv.policy.restore.bounds import lower_bound
from flowkv.runtime.flights import Flight
from flowkv.runtime.restores import Restores
from flowkv.runtime.sequence import Sequence


class Tally:
    """Adds up one restore. Callers hold the KV lock.

    Args:
        restores: All of the cache.
        seq: Whose.
        request: As the policy knows it.

    Attributes:
        front: Tokens that were there when the front was done.
    """

    def __init__(self, restores: Restores, seq: Sequence, request: Request) -> None:
        self._restores, self._seq, self._request = restores, seq, request
        self._progress = restores.state.requests[request.number]
        self.front = request.resident
        self._n_bytes: Counter[int] = Counter()
        self._seconds: dict[int, float] = {}
        self._pages: set[int] = set()
        self._failed, self._exposed_s, self._suffix_s = 0, 0.0, 0.0
        self._layer_s = 0.0  # when the suffix went on with its latest layer
        self._known = True  # what the suffix took

    def computed(self, op: Compute, started_s: float, seconds: float, counted_s: float) -> None:
        """Part of the front was computed; `counted_s` of it say what that takes."""
        self._restores.costs.computed(self._request, op.layers.size, op.tokens, counted_s)
        self._span("compute", op.tokens, Span(0, self._request.layers), started_s, seconds)

    def loaded(self, flight: Flight) -> None:
        """A load is over."""
        self._failed += flight.lost
        if flight.n_bytes:
            (first, stop), unit = flight.op.tokens, self._request.unit
            self._pages.update(range(first // unit, -(-stop // unit)))
        for tier, n_bytes in flight.n_bytes.items():
            self._n_bytes[tier] += n_bytes
            self._seconds[tier] = self._seconds.get(tier, 0.0) + flight.seconds

    def waited(self, index: int, begun_s: float, *, suffix: bool) -> None:
        """Somebody asked for a layer at `begun_s`, and goes on now: the suffix, or no compute."""
        now = time.perf_counter()
        self._exposed_s += now - begun_s
        if not suffix or index != self._progress.suffix or not self._request.suffix:
            return  # asked once more, or in an order of its own
        self._behind(begun_s)
        if self._progress.there(index):
            self._restores.state.begin(Suffix(self._request.number, index))
            self._layer_s = now

    def _behind(self, until_s: float) -> None:
        """The suffix is done with the layer that it went on with."""
        layer = self._progress.suffix - 1
        if self._progress.answered <= layer:
            self._restores.state.end(Suffix(self._request.number, layer))
            seconds = max(0.0, until_s - self._layer_s)
            counted_s = compiling.measured_s(self._layer_s, self._layer_s + seconds)
            self._suffix_s += counted_s
            self._known &= counted_s > 0 or not seconds
            tokens = Span(self._request.tokens, self._request.tokens + self._request.suffix)
            self._span("suffix", tokens, Span(layer, layer + 1), self._layer_s, seconds)

    def ended(self, stop: int, *, ok: bool) -> None:
        """The restore is over.

        Args:
            stop: Pages that are there.
            ok: Whether the suffix is computed.
        """
        self._behind(time.perf_counter())
        request, unit = self._request, self._request.unit
        if ok and self._known and self._suffix_s and self._progress.answered == request.layers:
            self._restores.costs.suffixed(request, self._suffix_s)
        front = self._seq.length if self._seq.length < stop * unit else self.front
        came = [page for page in self._pages if self.front <= page * unit < stop * unit]
        loaded, total = len(came) * unit, self._n_bytes.total()
        bus = self._restores.bus
        for number, n_bytes in self._n_bytes.items():
            name = self._restores.store.tiers[number].name
            tokens = loaded * n_bytes // total if total else 0
            bus.emit(Hit(tier=name, tokens=tokens, n_bytes=n_bytes, tenant=self._seq.owner))
            seconds = self._seconds[number]
            bus.emit(Restored(tier=name, tokens=tokens, n_bytes=n_bytes, seconds=seconds))
        computed = max(0, front - request.resident)
        if computed:
            bus.emit(Miss(tokens=computed, tenant=self._seq.owner))
        if bus.wants(RestoreEnded):
            bus.emit(self._event(stop * unit, computed, loaded))

    def _event(self, tokens: int, computed: int, loaded: int) -> RestoreEnded:
        request = self._request
        return RestoreEnded(
            request=request.number,
            tokens=tokens,
            resident_tokens=request.resident,
            computed_tokens=computed,
            loaded_tokens=loaded,
            n_bytes=self._n_bytes.total(),
            started_s=request.arrived_s,
            seconds=time.perf_counter() - request.arrived_s,
            exposed_s=self._exposed_s,
            bound_s=self._bound_s(),
            failed=self._failed,
            tenant=self._seq.owner,
        )

    def _bound_s(self) -> float:
        """What nobody could beat at these rates; 0.0 while one of them is not known."""
        known = self._restores.gate.seconds_per_token > 0 and bool(self._n_bytes)
        return lower_bound(self._request, self._restores.costs) if known else 0.0

    def _span(
        self, engine: str, tokens: Span, layers: Span, started_s: float, seconds: float
    ) -> None:
        if self._restores.bus.wants(RestoreSpan):
            span = RestoreSpan(
                request=self._request.number,
                engine=engine,
                token=tokens.first,
                tokens=tokens.size,
                layer=layers.first,
                layers=layers.size,
                started_s=started_s,
                seconds=seconds,
            )
            self._restores.bus.emit(span)
