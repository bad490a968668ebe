"""How fast a restore could be at best, by whatever policy.

Seconds of one engine's work add up, whatever the order; two engines work at once. A cell costs the
link the same wherever it lies; to compute it costs more the later its token, and the same in every
layer. So the best set of cells to compute is all layers of the first tokens, and nothing ends
before the better of all splits has both engines done. Overheads, page sizes and dependencies only
add to that: give costs without them (`Modelled.ideal`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.policy.restore.state import Costs
from flowkv.policy.restore.words import Request, Span


def lower_bound(
    requests: Request | Sequence[Request],
    costs: Costs,
    *,
    of: Literal["makespan", "mean"] = "makespan",
    stages: int = 1,
    boundary_s: float = 0.0,
) -> float:
    """Seconds that no policy can beat: until the last token is there, or on the mean of all.

    Args:
        requests: One, or those that share the link and the compute engine. The suffix counts where
            a request has one.
        costs: What things take at best.
        of: For a batch: until all are done, or the mean time to first token.
        stages: Pipeline stages that each have a share of the layers, an engine and a link.
        boundary_s: With stages: seconds of a stage's link for the boundary activation of a token
            that is computed.

    Raises:
        ConfigError: No such bound, or no stages.
    """
    if stages < 1 or of not in ("makespan", "mean"):
        raise ConfigError(f"There is no bound of {of!r} over {stages} stages", "See lower_bound")
    batch = [requests] if isinstance(requests, Request) else list(requests)
    if not batch:
        return 0.0
    if of == "makespan":
        return _makespan(batch, costs, _suffixes(batch, costs), stages, boundary_s)
    alone = sum(_makespan([one], costs, None, stages, boundary_s) for one in batch) / len(batch)
    if len({one.arrived_s for one in batch}) > 1:
        return alone
    # When k have ended their joint work is done, which is at least that of the k shortest.
    suffixes = sorted(_suffixes(batch, costs))
    moved = sorted(map(_from_zero, batch), key=lambda one: one.tokens)
    ends = (
        _makespan(moved[:k], costs, suffixes[:k], stages, boundary_s)
        for k in range(1, len(moved) + 1)
    )
    return max(alone, sum(ends) / len(moved))


def _suffixes(batch: Sequence[Request], costs: Costs) -> list[float]:
    return [costs.suffix_s(one) if one.suffix else 0.0 for one in batch]


def _from_zero(request: Request) -> Request:
    """One with as many cells, which are no dearer to compute."""
    if not request.resident:
        return request
    return msgspec.structs.replace(request, tokens=request.tokens - request.resident, resident=0)


def _makespan(
    batch: Sequence[Request],
    costs: Costs,
    suffixes: Sequence[float] | None,
    stages: int,
    boundary_s: float,
) -> float:
    """Water-filling: the first tokens of all are computed, up to the same one."""
    suffixes = _suffixes(batch, costs) if suffixes is None else suffixes
    # Requests that share no tier share no link: whatever each such group needs, all need.
    groups: dict[frozenset[str], list[int]] = {}
    for index, one in enumerate(batch):
        groups.setdefault(frozenset(source.tier for source in one.sources), []).append(index)

    def compute_s(tokens: int) -> float:
        return (sum(_computed_s(one, costs, tokens) for one in batch) + sum(suffixes)) / stages

    def load_s(tokens: int) -> float:
        return max(
            sum(_loaded_s(batch[i], costs, tokens, stages, boundary_s) for i in group)
            for group in groups.values()
        )

    least = max([one.tokens for one in batch if not one.sources], default=0)
    return crossing(compute_s, load_s, least, max(one.tokens for one in batch))


def _computed_s(request: Request, costs: Costs, tokens: int) -> float:
    """Seconds to compute its cells up to a token, as far as it can be computed."""
    stop = request.tokens if not request.sources else min(tokens, request.tokens)
    if not request.computable or stop <= request.resident:
        return 0.0
    return costs.compute_s(request, request.layers, Span(request.resident, stop))


def _loaded_s(request: Request, costs: Costs, tokens: int, stages: int, boundary_s: float) -> float:
    """Seconds to load its cells from a token on, by all its tiers at once."""
    first = max(tokens, request.resident) if request.computable else request.resident
    size = max(0, request.tokens - first)
    if not request.sources:
        return 0.0
    best: dict[str, float] = {}
    for index, source in enumerate(request.sources):
        seconds = costs.load_s(request, index, size * request.layers) if size else 0.0
        best[source.tier] = min(best.get(source.tier, seconds), seconds)
    together = 0.0
    if size and min(best.values()) > 0.0:
        together = 1.0 / sum(1.0 / seconds for seconds in best.values())
    computed = min(first, request.tokens) - request.resident
    return together / stages + (boundary_s * computed if stages > 1 else 0.0)


def crossing(
    rising: Callable[[int], float], falling: Callable[[int], float], first: int, last: int
) -> float:
    """The least of the higher of two functions of a whole number, one rising and one falling.

    Between neighbours both are taken as straight lines.
    """
    if rising(first) >= falling(first):
        return max(rising(first), falling(first))
    if rising(last) <= falling(last):
        return max(rising(last), falling(last))
    while last - first > 1:
        middle = (first + last) // 2
        if rising(middle) < falling(middle):
            first = middle
        else:
            last = middle
    before, after = falling(first) - rising(first), rising(last) - falling(last)
    share = before / (before + after)
    return rising(first) + share * (rising(last) - rising(first))
