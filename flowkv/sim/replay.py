"""`replay`: what a policy would have kept of a trace, from cold.

    result = replay(trace, policy="auto", size="1%")

The policy is the very object that the runtime uses (DESIGN D8). All blocks of a request become
resident, and afterwards what is too much leaves; requests take no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol, TypedDict, Unpack, runtime_checkable

import msgspec
import numpy as np

from flowkv.core.errors import ConfigError
from flowkv.policy import Policy, make_policy
from flowkv.policy.optimum import Optimum, belady
from flowkv.policy.prefetch import Prefetcher
from flowkv.sim.bounds import bounds_of
from flowkv.sim.conversations import hints_of
from flowkv.sim.hardware import HARDWARE, MODELS, Hardware, Shape, block_costs
from flowkv.sim.place import Course, OnePlace, Progress
from flowkv.sim.result import Result, judge
from flowkv.sim.sizes import pages_of
from flowkv.sim.tiers import Stack, Tier, priced, tier_from
from flowkv.sim.trace import Trace

Options = Mapping[str, object]
Maker = str | Policy | Callable[[], Policy]


@runtime_checkable
class Warm(Protocol):
    """A policy that can begin with what another one learned."""

    def save_model(self) -> bytes:
        """What it has learned."""

    def load_model(self, saved: bytes) -> None:
        """Takes it over."""


class Settings(TypedDict, total=False):
    """How a trace is replayed, besides policy and size. Every field may be left out.

    Attributes:
        options: Of the policy, if it is given by name.
        hints: The application tells when each conversation goes on, with this standard deviation of
            the error's natural logarithm, and which part of its prompt it will send again; never
            where it ends (see `flowkv.sim.conversations.hints_of`); nothing without.
        queue_s: Requests are known so many seconds before they run.
        prefetch: Bring blocks before they are asked for, from a place that has all blocks seen so
            far; a mapping of options of `Prefetcher` turns it on too.
        warm: What a policy of this kind had learned elsewhere: what its `save_model` gave.
        costs: Tell the policy what each block costs to compute, with this hardware and model.
        tiers: More places below the first, fastest first: "dram:5%", "disk:30%:kv8" (see
            `flowkv.sim.tiers`). Hits are then those of all places, traffic what none of them had,
            and there is no closure. Without hints, queue, prefetch, warm start.
        codec: How blocks of the first place are compressed: raw, kv8 or kv4; as with `tiers`.
        hardware: A name of `HARDWARE`, which gives times and prices; "h100" with `tiers`.
        model: A name of `MODELS`; "8b" by default.
        seed: Of the errors of hints.
        progress: Called now and then with the requests done and all requests.
    """

    options: Options | None
    hints: float | None
    queue_s: float
    prefetch: bool | Options
    warm: bytes | None
    costs: bool
    tiers: Sequence[str | Tier]
    codec: str
    hardware: str | None
    model: str
    seed: int
    progress: Progress | None


def replay(
    trace: Trace,
    policy: Maker = "auto",
    *,
    pages: int | None = None,
    size: float | str | None = None,
    **settings: Unpack[Settings],
) -> Result:
    """Replays a trace from cold.

    Args:
        trace: What `read_trace` or `generate` gave.
        policy: A name of the catalogue, something that makes a policy, or a fresh policy.
        pages: Blocks that fit.
        size: The same as a share of the trace's different blocks: 0.01 or "1%".
        **settings: See `Settings`.

    Returns:
        What happened, and how it compares with LRU and the optimum.

    Raises:
        ConfigError: If an argument is wrong.
    """
    unknown = sorted(set(settings) - set(Settings.__annotations__))
    if unknown:
        raise ConfigError(
            f"replay knows no {', '.join(unknown)}", f"Use {', '.join(Settings.__annotations__)}"
        )
    capacity = pages_of(trace, pages, size)
    if settings.get("tiers") or settings.get("codec", "raw") != "raw":
        return _tiered(trace, policy, capacity, settings)
    if policy == "opt" and not _beyond(settings) and not settings.get("options"):
        return _told(trace, _optimum(trace, capacity), settings)
    mine = make(trace, policy, settings)
    name = policy if isinstance(policy, str) else mine.name
    name += "".join(f"+{word}" for word in _beyond(settings))
    place = _place(trace, mine, capacity, settings)
    start = perf_counter()
    course = place.run(settings.get("progress"))
    seconds = perf_counter() - start
    bounds, costs = bounds_of(trace, capacity), block_costs(trace)
    digest = f"{mine.digest():016x}"
    result = judge(
        trace, course, bounds, costs, policy=name, pages=capacity, seconds=seconds, digest=digest
    )
    return _told(trace, result, settings)


def make(trace: Trace, policy: Maker, settings: Settings) -> Policy:
    """A fresh policy, told what it may know beforehand.

    Raises:
        ConfigError: If there is no such policy, or it cannot be warmed.
    """
    options = dict(settings.get("options") or {})
    if callable(policy):
        policy = policy()
    made = make_policy(policy, **options)
    if len(made.resident()):
        raise ConfigError(
            f"policy {made.name!r} holds blocks already", "Pass its name, or a fresh object"
        )
    if isinstance(made, Optimum):
        made.foresee(trace.offsets, trace.blocks)
    saved = settings.get("warm")
    if saved is not None:
        if not isinstance(made, Warm):
            raise ConfigError(
                f"policy {made.name!r} learns nothing that it could begin with", "Leave out warm"
            )
        made.load_model(saved)
    return made


def _place(trace: Trace, policy: Policy, capacity: int, settings: Settings) -> OnePlace:
    sigma = settings.get("hints")
    wish = settings.get("prefetch", False)
    told: dict[str, Any] = dict(wish) if isinstance(wish, Mapping) else {}
    on = isinstance(wish, Mapping) or bool(wish)
    hardware, model = _machine(settings)
    costs_s = hardware.prefill_s(block_costs(trace, model))
    queue_s = settings.get("queue_s", 0.0)
    if not 0.0 <= queue_s < math.inf:
        raise ConfigError(f"queue_s={queue_s!r} is no time", "Use 0 (no queue) or more seconds")
    return OnePlace(
        trace,
        policy,
        capacity,
        hints=None if sigma is None else hints_of(trace, sigma, settings.get("seed", 0)),
        sigma=sigma or 0.0,
        queue_ns=round(queue_s * 1e9),
        prefetcher=Prefetcher(capacity, **told) if on and capacity else None,
        costs_ns=(costs_s * 1e9).astype(np.int64) if settings.get("costs") else None,
    )


def _tiered(trace: Trace, policy: Maker, capacity: int, settings: Settings) -> Result:
    """Several places; the result is about all of them."""
    if _beyond(settings) or not isinstance(policy, str):
        raise ConfigError(
            "with tiers there are no hints, queue, prefetch or warm start, and policies have names",
            "Leave those out, or the tiers",
        )
    hardware, model = _machine(settings)
    below = [tier_from(t) if isinstance(t, str) else t for t in settings.get("tiers", ())]
    codec, share = settings.get("codec", "raw"), capacity / max(trace.unique, 1)
    first = Tier(place=hardware.places[0].name, size=max(share, 1e-12), codec=codec)
    tiers = [first, *below]
    pages = [tier.pages(trace.unique) for tier in tiers]
    policies = [make(trace, tier.policy or policy, settings) for tier in tiers]
    stack = Stack(trace, policies, pages)
    start = perf_counter()
    course = stack.run(settings.get("progress"))
    seconds = perf_counter() - start
    name = "/".join(dict.fromkeys(tier.policy or policy for tier in tiers))
    bounds, costs, room = bounds_of(trace, sum(pages)), block_costs(trace, model), sum(pages)
    result = judge(
        trace,
        course,
        bounds,
        costs,
        policy=name,
        pages=room,
        seconds=seconds,
        digest=stack.digest(),
    )
    return msgspec.structs.replace(
        result,
        extra=priced(trace, stack.found, tiers, hardware, model),
        closure=None,  # the bounds are those of one place
        first_closure=None,
        load_traffic_vs_lru=None,
    )


def _told(trace: Trace, result: Result, settings: Settings) -> Result:
    """The result with times and prices, if hardware is named."""
    if settings.get("hardware") is None:
        return result
    hardware, model = _machine(settings)
    tier = Tier(place=hardware.places[0].name, size=max(result.size, 1e-12))
    extra = priced(trace, result.hits[:, None], [tier], hardware, model)
    return msgspec.structs.replace(result, extra=extra)


def _machine(settings: Settings) -> tuple[Hardware, Shape]:
    names = (settings.get("hardware") or "h100", settings.get("model") or "8b")
    for name, known in zip(names, (HARDWARE, MODELS), strict=True):
        if name not in known:
            raise ConfigError(f"{name!r} is not known", f"Use one of {', '.join(known)}")
    return HARDWARE[names[0]], MODELS[names[1]]


def _optimum(trace: Trace, capacity: int) -> Result:
    """The bound itself: what is resident is always a leading run."""
    start = perf_counter()
    hits = belady(trace.offsets, trace.blocks, trace.parents, capacity)
    seconds = perf_counter() - start
    course = Course(len(trace))
    course.hits = course.held = hits
    asked = np.zeros(trace.unique, np.bool_)
    sizes = np.diff(trace.offsets)
    known = np.zeros(len(trace), np.int64)
    for r, first in enumerate(trace.offsets[:-1].tolist()):
        chain = trace.blocks[first : first + int(sizes[r])]
        known[r] = np.count_nonzero(asked[chain])
        asked[chain] = True
    course.loaded = known - hits
    costs = block_costs(trace)
    bounds = bounds_of(trace, capacity)
    return judge(trace, course, bounds, costs, policy="opt", pages=capacity, seconds=seconds)


def _beyond(settings: Settings) -> list[str]:
    """What the policy is given besides the requests."""
    words = []
    if settings.get("hints") is not None:
        words.append("hints")
    if settings.get("queue_s"):
        words.append("queue")
    if settings.get("prefetch", False) is not False:
        words.append("prefetch")
    if settings.get("warm") is not None:
        words.append("warm")
    return words
