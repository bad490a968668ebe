"""`generate`: traces without a file.

| kind | what it is like |
|---|---|
| `chat` | people who read, think and ask again |
| `agents` | programs that call tools in a loop |
| `rag` | questions about documents that others ask about too |
| `bursts` | chat whose conversations begin in bursts (MMPP) |
| `drift` | questions about documents whose popularity changes from phase to phase |
| `mix` | chat and agents at the same time |
| `scan` | popular blocks, disturbed by scans |
| `cyclic` | all blocks in order, again and again: weights |
| `markov` | the next block depends on the last ones: experts, table rows |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flowkv.core.errors import ConfigError, did_you_mean
from flowkv.policy.config import PolicyConfig, configure
from flowkv.sim import streams, talks
from flowkv.sim.arrivals import bursts, poisson
from flowkv.sim.chains import join
from flowkv.sim.draft import Draft, Seconds, TalkConfig, Times
from flowkv.sim.trace import Trace


class BurstsConfig(talks.ChatConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Chat whose conversations begin in bursts.

    Attributes:
        factor: How many times more of them begin in a burst.
        calm_s: Mean time between bursts.
        burst_s: Mean length of a burst.
    """

    factor: Times = 20.0
    calm_s: Seconds = 300.0
    burst_s: Seconds = 30.0


class DriftConfig(talks.RagConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Documents whose popularity changes.

    Attributes:
        phase_s: Time after which other documents are the popular ones.
    """

    phase_s: Seconds = 600.0


class MixConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Chat and agents at the same time, in proportion to their default rates.

    Attributes:
        requests: How many.
        seed: Equal seeds give equal traces.
        block_tokens: Tokens of a block.
    """

    requests: int = 5000
    seed: int = 0
    block_tokens: int = 512


class Kind(NamedTuple):
    """One row of the table of generators.

    Attributes:
        config: Its options.
        make: Makes the trace of a configuration.
    """

    config: type[PolicyConfig]
    make: Callable[[Any], Trace]


def generate(kind: str, **options: object) -> Trace:
    """Makes a trace.

    Args:
        kind: A name of `KINDS`.
        **options: Fields of its configuration: `requests` and `seed` for all; see `KINDS`.

    Returns:
        The trace; equal arguments give equal ones.

    Raises:
        ConfigError: If there is no such kind, or an option is wrong.
    """
    row = KINDS.get(kind)
    if row is None:
        hint = did_you_mean(kind, KINDS)
        raise ConfigError(f"there is no generator {kind!r}", f"{hint}Use one of {', '.join(KINDS)}")
    return row.make(configure(row.config, kind, options))


def _talked(name: str, config: TalkConfig, talk: talks.Talk, starts: Any) -> Trace:
    draft = Draft(config, np.random.default_rng(config.seed))
    draft.play(starts(draft), talk)
    return draft.trace(name)


def _steady(draft: Draft) -> Any:
    return poisson(draft.rng, draft.config.sessions_per_s)


def _chat(config: talks.ChatConfig) -> Trace:
    return _talked("chat", config, talks.chat(config), _steady)


def _agents(config: talks.AgentsConfig) -> Trace:
    return _talked("agents", config, talks.agents(config), _steady)


def _rag(config: talks.RagConfig) -> Trace:
    return _talked("rag", config, talks.rag(config), _steady)


def _bursts(config: BurstsConfig) -> Trace:
    def starts(draft: Draft) -> Any:
        terms = {"factor": config.factor, "calm_s": config.calm_s, "burst_s": config.burst_s}
        return bursts(draft.rng, config.sessions_per_s, **terms)

    return _talked("bursts", config, talks.chat(config), starts)


def _drift(config: DriftConfig) -> Trace:
    def starts(draft: Draft) -> Any:
        def renamed(at: int, n: int) -> int:
            return (at + 7919 * int(draft.now // config.phase_s)) % n

        draft.renamed = renamed
        return poisson(draft.rng, config.sessions_per_s)

    return _talked("drift", config, talks.rag(config), starts)


def _mix(config: MixConfig) -> Trace:
    common = msgspec.structs.asdict(config)
    both = join("mix", [generate("chat", **common), generate("agents", **common)])
    return both.head(config.requests)


def _streamed(make: Callable[[Any, np.random.Generator], Trace]) -> Callable[[Any], Trace]:
    return lambda config: make(config, np.random.default_rng(config.seed))


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "chat": Kind(talks.ChatConfig, _chat),
        "agents": Kind(talks.AgentsConfig, _agents),
        "rag": Kind(talks.RagConfig, _rag),
        "bursts": Kind(BurstsConfig, _bursts),
        "drift": Kind(DriftConfig, _drift),
        "mix": Kind(MixConfig, _mix),
        "scan": Kind(streams.ScanConfig, _streamed(streams.scan)),
        "cyclic": Kind(streams.CyclicConfig, _streamed(streams.cyclic)),
        "markov": Kind(streams.MarkovConfig, _streamed(streams.markov)),
    }
)
"""Generators by name, and the configuration of each."""
