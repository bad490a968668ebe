"""Traces to measure on: public ones where they are, generated ones everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from flowkv.policy import make_policy
from flowkv.policy.base import Learner
from flowkv.sim.formats import read_sessions, read_trace
from flowkv.sim.generate import generate
from flowkv.sim.replay import Maker, ReplaySettings, Result, replay
from flowkv.sim.trace import Trace

PUBLIC = "FLOWKV_TRACES"
"""Environment variable: the directory of the public traces."""

_QUICK = 1500  # requests
_TWO_HOURS_S = 7200.0

Kind = Literal["agents", "chat", "other"]
_PUBLIC_KINDS: dict[str, Kind] = {"kct_dev": "agents", "moon_conv": "chat"}
_GENERATED = ("chat", "agents", "rag", "mix", "bursts", "drift")
_GENERATED_KINDS: dict[str, Kind] = {"chat": "chat", "agents": "agents"}


class Ground(NamedTuple):
    """A trace, and what kind of traffic it is.

    Attributes:
        trace: The requests.
        kind: "agents" and "chat" have targets of their own.
        public: Whether it is a published trace; the targets were set on those.
    """

    trace: Trace
    kind: Kind
    public: bool


def part(trace: Trace, requests: np.ndarray) -> Trace:
    """Some requests of a trace, in their order, its blocks numbered anew."""
    spans = [trace.blocks[trace.offsets[r] : trace.offsets[r + 1]] for r in requests]
    blocks = np.concatenate([*spans, np.zeros(0, np.int64)])
    _, at, index = np.unique(blocks, return_index=True, return_inverse=True)
    order = np.empty(len(at), np.int64)  # dense numbers in the order of first use
    order[np.argsort(at)] = np.arange(len(at))
    old = blocks[np.sort(at)]
    numbers = np.full(trace.unique, -1)
    numbers[old] = np.arange(len(old))
    parents = trace.parents[old]
    columns = ("times_ns", "input_tokens", "output_tokens", "sessions", "stops", "tenants")
    mine = {name: getattr(trace, name)[requests] for name in columns}
    return Trace(
        name=trace.name,
        offsets=np.cumsum([0, *map(len, spans)]),
        blocks=order[index],
        parents=np.where(parents < 0, -1, numbers[parents]),
        depths=trace.depths[old],
        block_tokens=trace.block_tokens,
        **mine,
    )


class Replays:
    """Replays, each made once however often it is asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Result] = {}

    def __call__(self, trace: Trace, policy: str, size: float, **settings: object) -> Result:
        """Replays the trace, as `flowkv.sim.replay.replay` does."""
        key = (trace.name, len(trace), policy, size, *sorted(map(str, settings.items())))
        if key not in self._known:
            self._known[key] = replay(trace, policy, size=size, **ReplaySettings(**settings))  # type: ignore[typeddict-item]
        return self._known[key]


def learned(trace: Trace, policy: Maker, size: float) -> bytes:
    """What a policy has learned at the end of a trace."""
    made = make_policy(policy) if isinstance(policy, str) else policy
    replay(trace, made, size=size)
    return made.save_model() if isinstance(made, Learner) else b""


def grounds(quick: bool) -> list[Ground]:
    """All that is measured on: public traces if they are there, and generated ones."""
    folder = os.environ.get(PUBLIC)
    found = _public(Path(folder)) if folder else []
    for name in _GENERATED:
        trace = generate(name, seed=1)
        # Targets of their own have agents and chat; they were set on the public ones.
        kind = "other" if found else _GENERATED_KINDS.get(name, "other")
        found.append(Ground(trace, kind, False))
    if quick:
        found = [ground._replace(trace=ground.trace.head(_QUICK)) for ground in found]
    return found


def _public(folder: Path) -> list[Ground]:
    """The traces of a directory, and its raw sessions, started anew within two hours."""
    paths = sorted((folder / "blocks").glob("*.npz"))
    found = [
        Ground(read_trace(path), _PUBLIC_KINDS.get(path.stem, "other"), True) for path in paths
    ]
    for path in sorted((folder / "raw").glob("*.jsonl*")):
        trace = read_sessions(path, span_s=_TWO_HOURS_S, seed=2)
        name = f"{path.name.partition('.')[0]}, 2 h"
        found.append(Ground(msgspec.structs.replace(trace, name=name), "agents", True))
    return found
