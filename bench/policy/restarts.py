"""`python -m bench restarts`: how long a cache needs to be as good as if it had never stopped.

A trace is replayed through a device and a directory. At a quarter, half and three quarters of it
the process stops: the device is empty afterwards, the directory, the index and what the policies
learned are there; or nothing is. Time counts on the trace's clock: from the stop to the first
window of requests that find at least 90 % of what they find where nothing stopped.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.cli.arguments import AddVerb
from flowkv.core.errors import ConfigError
from flowkv.policy import make_policy
from flowkv.report.screen import Screen
from flowkv.residency import Ledger, Meta, Place
from flowkv.sim import Trace, read_trace

TRACES = ("kct_dev", "moon_conv")
STOPS, STEADY, WINDOW = (0.25, 0.5, 0.75), 0.9, 20
DEVICE, DIRECTORY = 0.02, 0.3  # of all different blocks


class Restart(NamedTuple):
    """Times until a cache is as good as before, after one stop.

    Attributes:
        trace: Its name.
        request: Before which it stopped.
        kept_s: With directory, index and what was learned; 0 if the first window is such a one.
        empty_s: With nothing.
        window_s: The first window's own length.
        first_kept: Blocks found by the first window, of those found without a stop.
        first_empty: The same with nothing.
    """

    trace: str
    request: int
    kept_s: float
    empty_s: float
    window_s: float
    first_kept: float
    first_empty: float


class Process:
    """A cache over a device and a directory, to which a trace's requests come.

    Args:
        trace: Whose.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, self.rooms = trace, [int(s * trace.unique) for s in (DEVICE, DIRECTORY)]
        places = [Place(make_policy("auto"), room) for room in self.rooms]
        self.ledger = Ledger(places, ghosts=trace.unique)
        self.space = self.ledger.namespace(b"trace")

    def run(self, first: int, last: int) -> NDArray[np.int64]:
        """Serves requests; blocks that each found."""
        trace, hits = self.trace, np.zeros(last - first, np.int64)
        for r in range(first, last):
            begin, end = trace.offsets[r : r + 2].tolist()
            pairs = np.zeros((end - begin, 2), np.uint64)
            pairs[:, 0] = trace.blocks[begin:end]
            about = Meta(session=int(trace.sessions[r]), tokens=int(trace.input_tokens[r]))
            now = int(trace.times_ns[r])
            hits[r - first] = self.ledger.serve(now, self.space, pairs, about, request=r).hits
        return hits

    def stop(self, now_ns: int) -> None:
        """The device is empty; what lay there is in the directory, if its policy has it."""
        self.ledger.resize(now_ns, 0, 0)
        self.ledger.resize(now_ns, 0, self.rooms[0])


def steady_s(trace: Trace, first: int, hits: Any, undisturbed: Any) -> tuple[float, float]:
    """Seconds until a window begins that finds what it would have; what the first one finds."""
    ones = np.ones(WINDOW, np.int64)
    found, best = (np.convolve(one, ones, "valid") for one in (hits, undisturbed))
    good = np.flatnonzero(found >= STEADY * best)
    begin = trace.times_ns[first + good[0]] if len(good) else trace.times_ns[-1]
    return (int(begin) - int(trace.times_ns[first])) / 1e9, float(found[0] / max(1, best[0]))


def measure_restarts(trace: Trace) -> list[Restart]:
    """Stops one trace at several places."""
    found, whole = [], Process(trace).run(0, len(trace))
    for share in STOPS:
        at = int(share * len(trace))
        kept = Process(trace)
        kept.run(0, at)
        kept.stop(int(trace.times_ns[at - 1]))
        after = whole[at:]
        kept_s, first_kept = steady_s(trace, at, kept.run(at, len(trace)), after)
        empty_s, first_empty = steady_s(trace, at, Process(trace).run(at, len(trace)), after)
        window_s = int(trace.times_ns[at + WINDOW - 1] - trace.times_ns[at]) / 1e9
        parts = first_kept, first_empty
        found.append(Restart(trace.name, at, kept_s, empty_s, window_s, *parts))
    return found


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    verb("restarts", _restarts, "time until a cache is as good again after a restart")


def _restarts(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    folder = os.environ.get("FLOWKV_TRACES")
    if not folder:
        raise ConfigError("FLOWKV_TRACES is not set", "Name the directory of the public traces")
    found = [
        one
        for name in TRACES
        for one in measure_restarts(read_trace(Path(folder) / "blocks" / f"{name}.npz"))
    ]
    rows = [
        [
            *(one.trace, f"{one.request:,}", f"{one.kept_s:,.1f} s", f"{one.empty_s:,.1f} s"),
            *(f"{one.window_s:,.1f} s", f"{one.first_kept:.3f}", f"{one.first_empty:.3f}"),
        ]
        for one in found
    ]
    heads = ["trace", "stopped at", "kept", "empty", "a window", "first kept", "first empty"]
    screen.table(heads, rows, title=f"Until {WINDOW} requests find {STEADY:.0%} of the steady hits")
    shorter = [(one.empty_s + one.window_s) / (one.kept_s + one.window_s) for one in found]
    screen.say(
        f"Shorter, a window's own length counted in both: {min(shorter):.1f}x to"
        f" {max(shorter):.1f}x, median {median(shorter):.1f}x."
    )
    return 0, [one._asdict() for one in found]
