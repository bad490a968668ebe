"""A trace replayed through several places, and what that would mean in time and money.

The ledger decides what lies where, with one policy per place. Times follow from it by a
plain model, and are simulated: a leading run of blocks in a place takes its latency and bytes over
bandwidth, or is computed anew if that is faster (DESIGN D7); what is nowhere is computed; nothing
overlaps, and requests do not wait for each other. Prices are a proxy: the rent of the accelerator
while it computes and waits, and that of the places' room all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy import Policy
from flowkv.policy.ledger import Ledger, Place
from flowkv.policy.ledger import Meta as About
from flowkv.sim.hardware import CODECS, Hardware, Shape, block_costs
from flowkv.sim.place import Course, Progress
from flowkv.sim.result import Row
from flowkv.sim.sizes import share_of
from flowkv.sim.trace import Trace

_HOUR_S = 3600.0


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A place of a replay.

    Attributes:
        place: Its name in the hardware: "hbm", "dram", "disk", "remote".
        size: Room as a share of the trace's different blocks, uncompressed.
        policy: Name of its policy; that of the replay by default.
        codec: How its blocks are compressed, which makes room for more: a name of `CODECS`.
    """

    place: str
    size: Annotated[float, Meta(gt=0.0)]
    policy: str = ""
    codec: str = "raw"

    def pages(self, unique: int) -> int:
        """Blocks that fit, once compressed."""
        if self.codec not in CODECS:
            raise ConfigError(f"no codec {self.codec!r}", f"Use one of {', '.join(CODECS)}")
        return max(1, int(self.size * unique / CODECS[self.codec] + 1e-9))


def tier_from(text: str) -> Tier:
    """A tier from "dram:5%", "disk:0.3" or "dram:5%:kv8".

    Raises:
        ConfigError: If it is none.
    """
    parts = text.split(":")
    if not 2 <= len(parts) <= 3:
        raise ConfigError(f"{text!r} is no tier", 'Write "dram:5%" or "dram:5%:kv8"')
    return Tier(place=parts[0], size=share_of(parts[1]), codec=parts[2] if parts[2:] else "raw")


class Stack:
    """Several places, fastest first, replayed through.

    Args:
        trace: What to replay.
        policies: One fresh policy per place.
        pages: Blocks that fit in each.
    """

    def __init__(self, trace: Trace, policies: Sequence[Policy], pages: Sequence[int]) -> None:
        self.trace = trace
        places = [Place(policy, room) for policy, room in zip(policies, pages, strict=True)]
        self.ledger = Ledger(places, ghosts=trace.unique)
        self.course = Course(len(trace))
        self.found = np.zeros((len(trace), len(places)), np.int64)
        self.moved = np.zeros(len(places) + 1, np.int64)

    def run(self, progress: Progress | None = None) -> Course:
        """Replays the trace from cold.

        Fills `found`, i8 [R, places]: leading blocks of each request that were read from each
        place; and `moved`, i8 [places + 1]: blocks that came to each from the one before it, and
        last those that left for nowhere.
        """
        trace, ledger = self.trace, self.ledger
        space = ledger.namespace(b"trace")  # its chains tell tenants apart, if they do
        pairs = np.zeros((len(trace.blocks), 2), np.uint64)
        pairs[:, 0] = trace.blocks
        every = max(1, len(trace) // 100)
        seen = np.zeros(trace.unique, np.bool_)
        for r, now in enumerate(trace.times_ns.tolist()):
            first, end = int(trace.offsets[r]), int(trace.offsets[r + 1])
            about = About(session=int(trace.sessions[r]), tokens=int(trace.input_tokens[r]))
            stop, output = int(trace.stops[r]), int(trace.output_tokens[r])
            plan = ledger.serve(
                now, space, pairs[first:end], about, request=r, stop=stop, output_tokens=output
            )
            chain, sources = trace.blocks[first:end], plan.sources
            self.course.hits[r] = plan.hits
            self.course.held[r] = int(np.count_nonzero(sources >= 0))
            self.course.loaded[r] = int(np.count_nonzero(seen[chain[sources < 0]]))
            seen[chain] = True
            self.found[r] = np.bincount(sources[: plan.hits], minlength=self.found.shape[1])
            for move in plan.moves:
                self.moved[move.target] += len(move.slots)
            if progress is not None and r % every == every - 1:
                progress(r + 1, len(trace))
        return self.course

    def digest(self) -> str:
        """Of all decisions, in hexadecimal."""
        return f"{self.ledger.digest():016x}"


def first_tokens_s(
    trace: Trace, found: NDArray[np.int64], tiers: Sequence[Tier], hardware: Hardware, model: Shape
) -> NDArray[np.float64]:
    """f8 [R]: simulated seconds from each request's arrival to its first token.

    Args:
        trace: What was replayed.
        found: i8 [R, places]; see `Stack.run`. Runs are taken in the order of the places.
        tiers: The places.
        hardware: Their rates.
        model: What is computed.
    """
    flops = np.concatenate(([0.0], np.cumsum(block_costs(trace, model)[trace.blocks])))
    sizes, tokens = np.diff(trace.offsets), float(trace.block_tokens)
    at = trace.offsets[:-1].copy()
    seconds = np.zeros(len(trace))
    for k, tier in enumerate(tiers):
        place, count = hardware.place(tier.place), found[:, k]
        n_bytes = count * tokens * model.token_bytes() * CODECS[tier.codec]
        load = np.where(count > 0, place.latency_s + n_bytes / place.bytes_per_s, 0.0)
        anew = hardware.prefill_s(flops[at + count] - flops[at])
        seconds += np.minimum(load, anew) if k or tier.codec != "raw" else 0.0
        at += count
    seconds += hardware.prefill_s(flops[trace.offsets[1:]] - flops[at])
    rest = np.maximum(trace.input_tokens - sizes * tokens, 1.0)
    return seconds + hardware.prefill_s(model.prefill_flops(sizes * tokens, 1.0) * rest)


def priced(
    trace: Trace, found: NDArray[np.int64], tiers: Sequence[Tier], hardware: Hardware, model: Shape
) -> Row:
    """Times, bytes and money of a replay, by name; see `first_tokens_s`."""
    seconds = first_tokens_s(trace, found, tiers, hardware, model)
    nothing = first_tokens_s(trace, found * 0, tiers, hardware, model)
    row: Row = {"hardware": hardware.name}
    total, dollars = max(int(np.diff(trace.offsets).sum()), 1), 0.0
    block_bytes = trace.block_tokens * model.token_bytes()
    for k, tier in enumerate(tiers):
        place = hardware.place(tier.place)
        gib = tier.pages(trace.unique) * block_bytes * CODECS[tier.codec] / 2**30
        dollars += gib * place.dollars_per_gib_hour * (k > 0)  # the first is the accelerator's own
        row[f"hit_ratio_{tier.place}"] = float(found[:, k].sum() / total)
        row[f"read_gib_{tier.place}"] = float(
            found[:, k].sum() * block_bytes * CODECS[tier.codec] / 2**30
        )
        row[f"room_gib_{tier.place}"] = gib
    tokens = max(int(trace.input_tokens.sum()), 1)
    span_s = float(trace.times_ns[-1] - trace.times_ns[0]) / 1e9 if len(trace) else 0.0
    rent = hardware.dollars_per_hour * float(seconds.sum()) + dollars * span_s
    for name, value in zip(("p50", "p95", "p99"), (50, 95, 99), strict=True):
        row[f"ttft_ms_{name}"] = float(np.percentile(seconds, value) * 1e3) if len(trace) else 0.0
    row["ttft_ms_mean"] = float(seconds.mean() * 1e3) if len(trace) else 0.0
    row["ttft_ms_mean_without"] = float(nothing.mean() * 1e3) if len(trace) else 0.0
    row["dollars_per_hour"] = hardware.dollars_per_hour + dollars
    row["dollars_per_million_tokens"] = rent / _HOUR_S / tokens * 1e6
    return row
