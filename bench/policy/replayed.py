"""Replays: closure, the floor, prefetches, hints, warm starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.policy.finding import Finding
from bench.policy.ground import Ground, Replays, learned, part
from flowkv.policy import make_policy
from flowkv.policy.base import Learner
from flowkv.sim.trace import Trace, next_turns

SMALL, MIDDLE, ALL = (0.005, 0.01, 0.02), (0.05, 0.1), (0.005, 0.01, 0.02, 0.05, 0.1, 0.3)
BELOW = -0.002
_CLOSURES: dict[str, list[tuple[tuple[float, ...], float]]] = {
    "agents": [(SMALL, 0.60)],
    "chat": [(SMALL, 0.33), (MIDDLE, 0.20)],
}
ETA_ERROR = 0.5


def closure(grounds: Sequence[Ground], replays: Replays) -> list[Finding]:
    """Mean closure of the shipped default; leaf-first LRU is 0, Belady 1."""
    findings = []
    for ground in grounds:
        for sizes, target in _CLOSURES.get(ground.kind, []):
            found = [replays(ground.trace, "auto", size).closure for size in sizes]
            each = ", ".join("-" if value is None else f"{value:.3f}" for value in found)
            known = [value for value in found if value is not None]
            measured = sum(known) / len(known) if known else None
            what = f"mean at {_percent(sizes)}"
            name = ground.trace.name
            findings.append(Finding("closure", what, name, target, "at least", measured, note=each))
    return findings


def floor(grounds: Sequence[Ground], replays: Replays) -> list[Finding]:
    """Prefix hit ratio of the default less that of leaf-first LRU, where it is worst."""
    findings = []
    for ground in grounds:
        above = {
            size: replays(ground.trace, "auto", size).prefix_hit_ratio
            - replays(ground.trace, "lru", size).prefix_hit_ratio
            for size in ALL
        }
        worst = min(above, key=above.__getitem__)
        what = f"at {100 * worst:g}%"
        findings.append(Finding("floor", what, ground.trace.name, BELOW, "at least", above[worst]))
    return findings


def prefetch(grounds: Sequence[Ground], replays: Replays) -> list[Finding]:
    """Learned prefetches: worth it on agents, off by themselves on chat."""
    findings = []
    for ground in grounds:
        name = ground.trace.name
        if ground.kind == "agents":
            for size, target in ((0.005, 0.80), (0.01, 0.70)):
                found = replays(ground.trace, "auto", size, prefetch=True)
                at = f"at {100 * size:g}%"
                traffic, precision = found.load_traffic_vs_lru, found.prefetch_precision
                findings += [
                    Finding("prefetch", f"closure {at}", name, target, "at least", found.closure),
                    Finding(
                        "prefetch", f"traffic over that of lru {at}", name, 1.15, "at most", traffic
                    ),
                    Finding("prefetch", f"precision {at}", name, 0.50, "at least", precision),
                ]
        if ground.kind == "chat":
            for size in SMALL:
                found = replays(ground.trace, "auto", size, prefetch=True)
                plain = replays(ground.trace, "auto", size)
                more = found.load_traffic / plain.load_traffic if plain.load_traffic else None
                what = f"traffic over that without at {100 * size:g}%"
                note = f"{found.prefetched:,} prefetched"
                findings.append(Finding("prefetch", what, name, 1.02, "at most", more, note=note))
    return findings


def hints(grounds: Sequence[Ground], replays: Replays) -> list[Finding]:
    """Closure where the application says when conversations go on, with an error."""
    findings = []
    for ground in grounds:
        for size in SMALL:
            found = replays(ground.trace, "auto", size, hints=ETA_ERROR)
            what = f"at {100 * size:g}%"
            name = ground.trace.name
            findings.append(Finding("hints", what, name, 0.80, "at least", found.closure))
    return findings


def bursts(grounds: Sequence[Ground], replays: Replays) -> list[Finding]:
    """What the slowest requests must load or compute, with prefetch and without."""
    findings = []
    for ground in grounds:
        name = ground.trace.name
        if name not in ("bursts", "drift"):
            continue
        for size in SMALL + MIDDLE:
            plain = replays(ground.trace, "auto", size)
            found = replays(ground.trace, "auto", size, prefetch=True)
            what = f"blocks missed at {100 * size:g}%, p99"
            note = f"{found.prefetched:,} prefetched"
            p99, target = found.missed_p99, plain.missed_p99
            findings.append(Finding("bursts", what, name, target, "at most", p99, note=note))
    return findings


def warm_start(grounds: Sequence[Ground]) -> list[Finding]:
    """The first 500 requests after what was learned from other sessions, and from other traffic."""
    halves: dict[str, tuple[Trace, Trace]] = {
        ground.kind: _halves(ground) for ground in grounds if ground.kind in ("agents", "chat")
    }
    if "agents" not in halves or "chat" not in halves:
        return []
    if not isinstance(make_policy("auto"), Learner):
        what = "closure, learned from other sessions"
        note = "the default learns nothing that could be carried over"
        return [Finding("warm start", what, "", 0.60, "at least", None, note=note)]
    size, replays = 0.005, Replays()
    taught = {kind: learned(taught, "auto", size) for kind, (taught, _) in halves.items()}
    findings = []
    own = halves["agents"][1]
    found = replays(own, "auto", size, warm=taught["agents"]).first_closure
    cold = replays(own, "auto", size).first_closure
    what = "closure, learned from other sessions"
    note = "" if cold is None else f"{cold:.3f} cold"
    findings.append(Finding("warm start", what, own.name, 0.60, "at least", found, note=note))
    for kind, foreign in (("agents", "chat"), ("chat", "agents")):
        other = halves[kind][1]
        warm = replays(other, "auto", size, warm=taught[foreign]).first_closure
        cold = replays(other, "auto", size).first_closure
        less = None if warm is None or cold is None else warm - cold
        what = f"closure, learned from {foreign}, less that from cold"
        findings.append(Finding("warm start", what, other.name, -0.02, "at least", less))
    return findings


def _halves(ground: Ground) -> tuple[Trace, Trace]:
    """Two traces, each with every second conversation."""
    following = next_turns(ground.trace)
    side, begun = np.full(len(following), -1), 0
    for r, turn in enumerate(following.tolist()):
        if side[r] < 0:  # a conversation begins
            side[r], begun = begun % 2, begun + 1
        if turn >= 0:
            side[turn] = side[r]
    even, odd = (part(ground.trace, np.flatnonzero(side == which)) for which in (0, 1))
    return even, odd


def _percent(sizes: Sequence[float]) -> str:
    return "/".join(f"{100 * size:g}" for size in sizes) + "%"
