"""What restores are believed to take before any was measured."""

from __future__ import annotations

from flowkv.policy.restore import LoadGate, Request, Span

_BYTES_PER_S = 1e9
_LEAST_S = 1e-9


class Prior:
    """Costs (`policy.restore.Costs`) from what steps and loads took so far, and guesses.

    What nothing is known of is guessed: a link of 1 GB/s, and that computing takes as long as
    loading, so that both are tried. A belief is kept once it was asked for: what was measured since
    is held against it by `Measured`.

    Args:
        gate: Knows rates of loads and steps.
    """

    def __init__(self, gate: LoadGate) -> None:
        self._gate = gate
        self._links: dict[str, tuple[float, float]] = {}
        self._token_s = 0.0

    def compute_s(self, request: Request, layers: int, tokens: Span) -> float:
        """So many layers of these tokens."""
        if not self._token_s:
            self._token_s = self._gate.seconds_per_token or self._guess_s(request)
        return self._token_s * tokens.size * layers / request.layers

    def suffix_s(self, request: Request) -> float:
        """All layers of the suffix."""
        behind = Span(request.tokens, request.tokens + request.suffix)
        return self.compute_s(request, request.layers, behind)

    def load_s(self, request: Request, source: int, cells: int) -> float:
        """So many cells at once."""
        tier, _, cell_bytes = request.sources[source]
        if tier not in self._links:
            rates = self._gate.rates.get(tier)
            known = (rates.latency_s, rates.bytes_per_s) if rates is not None else (0.0, 0.0)
            self._links[tier] = known if known[1] else (0.0, _BYTES_PER_S)
        latency_s, bytes_per_s = self._links[tier]
        return latency_s + cells * cell_bytes / bytes_per_s

    def _guess_s(self, request: Request) -> float:
        """As long as it takes to load a token."""
        if not request.sources:
            return _LEAST_S
        tokens = max(1, request.tokens - request.resident)
        return max(_LEAST_S, self.load_s(request, 0, tokens * request.layers) / tokens)
