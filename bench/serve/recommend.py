"""The best configuration that was found."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.serve.row import Row

_NEARLY = 0.95
"""Throughput within this of the best is as good: then the first token decides."""

_CHOSEN = {"pages": "page_size", "budget": "token_budget", "arrivals": "scheduler"}
"""What each part of the protocol chooses."""


class Advice(msgspec.Struct, frozen=True):
    """A configuration, and what it was chosen for.

    Attributes:
        setting: Arguments of `flowkv.Engine` and `flowkv.attach`, by name.
        reasons: A sentence for each.
    """

    setting: dict[str, object]
    reasons: list[str]


def recommend(rows: Sequence[Row]) -> Advice:
    """What to set where parts of the protocol compared settings; nothing where none did.

    Among those that serve nearly as many tokens as the fastest, the one whose first tokens come
    soonest. Rows of one part had requests of the same lengths in the same turns, as far as they
    got.
    """
    setting: dict[str, object] = {}
    reasons = []
    for part, name in _CHOSEN.items():
        own = [row for row in rows if row.part == part and row.baseline == "" and row.caching]
        if len({getattr(row, name) for row in own}) < 2:
            continue
        by_value: dict[object, list[Row]] = {}
        for row in own:
            by_value.setdefault(getattr(row, name), []).append(row)
        best = max(map(_rate, by_value.values()))
        good = {v: some for v, some in by_value.items() if _rate(some) >= _NEARLY * best}
        value = min(good, key=lambda v: _first(good[v]))
        setting[name] = value
        chosen = by_value[value]
        reasons.append(
            f"{name}={value!r}: {_rate(chosen):,.0f} tokens/s, 95 % of first tokens within"
            f" {1e3 * _first(chosen):,.0f} ms"
        )
    if rows_of := _filled(rows):
        setting["max_rows"], reason = rows_of
        reasons.append(reason)
    return Advice(setting, reasons)


def _filled(rows: Sequence[Row]) -> tuple[int, str] | None:
    """The fewest rows that serve nearly as much as any number of clients."""
    own = [row for row in rows if row.part == "concurrency" and row.baseline == "" and row.caching]
    if len(own) < 2:
        return None
    best = max(row.tokens_per_s for row in own)
    least = min((r for r in own if r.tokens_per_s >= _NEARLY * best), key=lambda r: r.concurrency)
    reason = f"max_rows={least.concurrency}: more serve hardly more than its"
    return least.concurrency, f"{reason} {least.tokens_per_s:,.0f} tokens/s"


def _rate(rows: Sequence[Row]) -> float:
    return sum(row.tokens_per_s for row in rows) / len(rows)


def _first(rows: Sequence[Row]) -> float:
    return max(row.ttft_p95_s for row in rows)
