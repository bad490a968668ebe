"""`generate`: traces without a file.

| kind | content |
|---|---|
| `chat` | people who read, think and ask again |
| `agents` | programs that call tools in a loop |
| `rag` | questions about documents that other questions share |
| `bursts` | chat with conversations that begin in bursts (MMPP) |
| `drift` | questions about documents with changing popularity |
| `mix` | chat and agents at the same time |
| `scan` | popular blocks, disturbed by scans |
| `cyclic` | all blocks in order, again and again: weights |
| `markov` | the next block depends on the last ones: experts, table rows |
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.random import Generator
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, refuse_unknown
from flowkv.policy.base import TOOL_USE, TURN_END, PolicyConfig, configure
from flowkv.sim.trace import COLUMNS, Trace, build_trace, join, wide

# Conversations under way while a trace is generated, each a Python generator.

Count = Annotated[int, Meta(ge=1, le=10**7)]
Rate = Annotated[float, Meta(gt=0.0, le=1e6)]
Odds = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(gt=0.0, le=1e8)]
Times = Annotated[float, Meta(ge=1.0, le=1e6)]
Spread = Annotated[float, Meta(ge=0.0, le=5.0)]
Span = tuple[int, int]
"""Space of ids, and a number of its first blocks."""


class TalkConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of all generated conversations.

    Attributes:
        requests: Number of requests.
        seed: Equal seeds give equal traces.
        block_tokens: Tokens of a block; only whole ones count.
        sessions_per_s: New conversations per second, on average.
        tenants: Number of tenants, to which conversations belong evenly.
    """

    requests: Count = 5000
    seed: int = 0
    block_tokens: Count = 512
    sessions_per_s: Rate = 0.6
    tenants: Count = 1


class Draft:
    """Conversations under way, and the requests that they made.

    Args:
        config: Common options.
        rng: Source of randomness.

    Attributes:
        spaces: Spaces of ids given away; those below the first belong to prompts and documents.
        now: Seconds of the current request,
        session: ... and its conversation.
        renamed: (index, count) -> actual index; for changing popularity.
    """

    def __init__(self, config: TalkConfig, rng: Generator) -> None:
        self.config, self.rng = config, rng
        self.spaces = 1 << 20  # below: prompts and documents
        self._pending: list[tuple[float, int, Iterator[float | None]]] = []
        self._rows: list[tuple[float, int, int, int, int, int, int]] = []
        self._ids: list[NDArray[np.uint64]] = []
        self._begun = 0
        self.now, self.session = 0.0, 0
        self.renamed: Callable[[int, int], int] = lambda at, _n: at

    def fresh(self) -> int:
        """Return a space of ids that is not shared."""
        self.spaces += 1
        return self.spaces

    def length(self, median: float, spread: float) -> int:
        """Draw a length in tokens."""
        return max(1, round(median * float(np.exp(spread * self.rng.standard_normal()))))

    def time(self, median_s: float, spread: float) -> float:
        """Draw a time in seconds."""
        return median_s * float(np.exp(spread * self.rng.standard_normal()))

    def pick(self, shares: list[float]) -> int:
        """Draw an index by cumulative popularity, and map it with `renamed`."""
        at = min(bisect.bisect_right(shares, self.rng.random()), len(shares) - 1)
        return self.renamed(at, len(shares))

    def request(self, prompts: list[Span], own: int, tokens: int, output: int, stop: int) -> None:
        """Add a request of the current session: whole blocks of prompts, then of its own tokens."""
        size = self.config.block_tokens
        spans = [(space, length // size) for space, length in prompts]
        rest = max(1, tokens // size) - sum(count for _, count in spans)
        spans.append((own, max(0, rest)))
        pairs = [wide(np.arange(count), space) for space, count in spans]
        self._ids.append(np.concatenate(pairs))
        tenant = self.session % self.config.tenants
        length = len(self._ids[-1])
        self._rows.append((self.now, length, tokens, output, self.session, stop, tenant))

    def play(
        self, starts: Iterator[float], talk: Callable[[Draft], Iterator[float | None]]
    ) -> None:
        """Begin conversations at `starts` until there are enough requests.

        `talk` makes a generator: each step notes a request and yields the time to the next one, or
        None.
        """
        start = next(starts)
        while len(self._rows) < self.config.requests:
            if not self._pending or start <= self._pending[0][0]:
                heapq.heappush(self._pending, (start, self._begun, talk(self)))
                self._begun += 1
                start = next(starts)
                continue
            now, session, steps = heapq.heappop(self._pending)
            self.now, self.session = now, session
            gap = next(steps, None)
            if gap is not None:
                heapq.heappush(self._pending, (now + gap, session, steps))

    def trace(self, name: str) -> Trace:
        """Return the trace of all noted requests."""
        times, lengths, *table = zip(*self._rows, strict=True)
        times_ns = np.round(np.array(times) * 1e9).astype(np.int64)
        ids, tokens = np.concatenate(self._ids), self.config.block_tokens
        columns = dict(zip(COLUMNS, table, strict=True))
        return build_trace(name, times_ns, lengths, ids, tokens, **columns)


# Generated conversations: people who chat, agents, questions about documents.
#
# Medians, spreads and chances of a return are those of published traces, rounded: chat from
# Mooncake's conversation trace (FAST 2025), agents from coding-agent sessions
# (github.com/callanjfox/kv-cache-tester); those of questions about documents are assumptions.
# Lengths and gaps are lognormal.

Talk = Callable[[Draft], Iterator[float | None]]


class ChatConfig(TalkConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of chats: people who read, think and ask again.

    Attributes:
        system_tokens: Tokens of one prompt before every conversation.
        first_tokens: Median of the first question, documents included.
        next_tokens: Median of later ones.
        output_tokens: Median of an answer.
        spread: Standard deviation of the logarithm of all lengths.
        returns: Chance of another turn after the first, second, ... answer; the last for all later.
        gap_s: Median time to the next turn.
        gap_spread: Standard deviation of its logarithm.
    """

    system_tokens: Count = 600
    first_tokens: Count = 6000
    next_tokens: Count = 600
    output_tokens: Count = 350
    spread: Spread = 1.0
    returns: tuple[Odds, ...] = (0.35, 0.49, 0.58, 0.66, 0.72, 0.8)
    gap_s: Seconds = 120.0
    gap_spread: Spread = 1.0


class AgentsConfig(TalkConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of agents: programs that call tools in a loop, and now and then wait for a person.

    Attributes:
        programs: Different tool and system prompts, of Zipf popularity.
        prompt_tokens: Length of these prompts.
        first_tokens: Median of a session's further first tokens.
        growth_tokens: Median growth per turn, the answer included.
        output_tokens: Median of an answer.
        spread: Standard deviation of the logarithm of all lengths.
        tool_share: Chance that an answer calls a tool.
        tool_returns: Chance that a session goes on after a tool call,
        end_returns: ... and after the end of a turn.
        tool_s: Median time to the next request after a tool call,
        end_s: ... and after the end of a turn.
        tool_spread: Standard deviations of the logarithms of these times.
        end_spread: The same, after the end of a turn.
        context_tokens: Context length above which it is summarised, and the chain restarts.
    """

    sessions_per_s: Rate = 0.012
    programs: Count = 40
    prompt_tokens: Count = 16_000
    first_tokens: Count = 12_000
    growth_tokens: Count = 1000
    output_tokens: Count = 200
    spread: Spread = 1.0
    tool_share: Odds = 0.86
    tool_returns: Odds = 0.98
    end_returns: Odds = 0.88
    tool_s: Seconds = 15.0
    end_s: Seconds = 90.0
    tool_spread: Spread = 0.6
    end_spread: Spread = 1.2
    context_tokens: Count = 180_000


class RagConfig(TalkConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of questions about documents, the best one first.

    Attributes:
        documents: Number of documents, of Zipf popularity.
        zipf: Exponent of the popularity.
        document_tokens: Median of their lengths.
        spread: Standard deviation of the logarithm of lengths.
        passages: Documents before each question.
        system_tokens: Tokens of one prompt before all documents.
        question_tokens: Median of a question.
        output_tokens: Median of an answer.
        returns: Chance of a further question about the same documents.
        gap_s: Median time to it.
    """

    sessions_per_s: Rate = 2.0
    documents: Count = 2000
    zipf: Annotated[float, Meta(ge=0.0, le=4.0)] = 0.9
    document_tokens: Count = 3000
    spread: Spread = 0.6
    passages: Count = 2
    system_tokens: Count = 1024
    question_tokens: Count = 300
    output_tokens: Count = 250
    returns: Odds = 0.3
    gap_s: Seconds = 40.0


def chat(config: ChatConfig) -> Talk:
    """Return the generator of a conversation between a person and a model."""

    def talk(draft: Draft) -> Iterator[float | None]:
        own, turn = draft.fresh(), 0
        tokens = config.system_tokens + draft.length(config.first_tokens, config.spread)
        while True:
            output = draft.length(config.output_tokens, config.spread)
            draft.request([(0, config.system_tokens)], own, tokens, output, TURN_END)
            if draft.rng.random() >= config.returns[min(turn, len(config.returns) - 1)]:
                return
            turn += 1
            tokens += output + draft.length(config.next_tokens, config.spread)
            yield draft.time(config.gap_s, config.gap_spread)

    return talk


def agents(config: AgentsConfig) -> Talk:
    """Return the generator of a session of a program."""
    popularity = zipf(config.programs, 1.0)

    def talk(draft: Draft) -> Iterator[float | None]:
        program = draft.pick(popularity)
        own = draft.fresh()
        prompt = [(1 + program, config.prompt_tokens)]
        tokens = config.prompt_tokens + draft.length(config.first_tokens, config.spread)
        while True:
            calls = draft.rng.random() < config.tool_share
            output = draft.length(config.output_tokens, config.spread)
            draft.request(prompt, own, tokens, output, TOOL_USE if calls else TURN_END)
            if draft.rng.random() >= (config.tool_returns if calls else config.end_returns):
                return
            tokens += output + draft.length(config.growth_tokens, config.spread)
            if tokens > config.context_tokens:
                own = draft.fresh()
                tokens = config.prompt_tokens + draft.length(config.first_tokens, config.spread)
            if calls:
                yield draft.time(config.tool_s, config.tool_spread)
            else:
                yield draft.time(config.end_s, config.end_spread)

    return talk


def rag(config: RagConfig) -> Talk:
    """Return the generator of one question about documents, and perhaps more."""
    popularity = zipf(config.documents, config.zipf)
    lengths: dict[int, int] = {}

    def talk(draft: Draft) -> Iterator[float | None]:
        found = [draft.pick(popularity) for _ in range(config.passages)]
        spans = [(0, config.system_tokens)]
        for document in dict.fromkeys(found):
            if document not in lengths:
                lengths[document] = draft.length(config.document_tokens, config.spread)
            spans.append((1 + document, lengths[document]))
        own = draft.fresh()
        tokens = sum(n for _, n in spans) + draft.length(config.question_tokens, config.spread)
        while True:
            output = draft.length(config.output_tokens, config.spread)
            draft.request(spans, own, tokens, output, TURN_END)
            if draft.rng.random() >= config.returns:
                return
            tokens += output + draft.length(config.question_tokens, config.spread)
            yield draft.time(config.gap_s, 1.0)

    return talk


def zipf(n: int, exponent: float) -> list[float]:
    """Return the cumulative popularity of `n` items, the first being the most popular."""
    weights = np.arange(1, n + 1, dtype=np.float64) ** -exponent
    shares: list[float] = (np.cumsum(weights) / weights.sum()).tolist()
    return shares


# Generated streams of single blocks: scans, cyclic scans, Markov chains.
#
# They model accesses to weights, experts and table rows. Every block is a root.

MOST_CONTEXTS = 1 << 22


class StreamConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of all streams.

    Attributes:
        requests: Number of requests.
        seed: Equal seeds give equal traces.
        blocks: Different blocks.
        per_s: Requests per second.
    """

    requests: Count = 20_000
    seed: int = 0
    blocks: Count = 512
    per_s: Rate = 1000.0


class ScanConfig(StreamConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of popular blocks, and of scans between them over blocks never used again.

    Attributes:
        scan_share: Share of the requests that belong to scans.
        scan_blocks: Length of a scan.
        zipf: Exponent of the popularity.
    """

    scan_share: Odds = 0.5
    scan_blocks: Count = 1000
    zipf: Annotated[float, Meta(ge=0.0, le=4.0)] = 1.0


class CyclicTraceConfig(StreamConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of cyclic streams: all blocks in order, again and again, as layers' weights are."""


class MarkovTraceConfig(StreamConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of Markov streams: the next block depends on the last ones.

    Attributes:
        order: Number of last blocks that it depends on.
        fanout: Blocks that may follow.
        skew: Concentration of the Dirichlet distribution of their chances: small means that one of
            them is nearly certain.
    """

    blocks: Count = 64
    order: Annotated[int, Meta(ge=1, le=4)] = 2
    fanout: Annotated[int, Meta(ge=1, le=256)] = 4
    skew: Annotated[float, Meta(gt=0.0, le=100.0)] = 0.5


def scan(config: ScanConfig, rng: Generator) -> Trace:
    """Return a trace of popular blocks disturbed by scans."""
    shares = np.array(zipf(config.blocks, config.zipf))
    chosen = np.searchsorted(shares, rng.random(config.requests), side="right")
    chosen = np.minimum(chosen, config.blocks - 1)
    fresh, r = config.blocks, 0
    odds = config.scan_share / max(config.scan_blocks * (1.0 - config.scan_share), 1e-9)
    while r < config.requests:
        r += int(rng.geometric(min(odds, 1.0))) if odds > 0 else config.requests
        n = max(0, min(config.scan_blocks, config.requests - r))
        chosen[r : r + n] = np.arange(fresh, fresh + n)
        fresh, r = fresh + n, r + n
    return _stream("scan", config, rng, chosen)


def cyclic(config: CyclicTraceConfig, rng: Generator) -> Trace:
    """Return a trace of a repeated scan."""
    return _stream("cyclic", config, rng, np.arange(config.requests) % config.blocks)


def markov(config: MarkovTraceConfig, rng: Generator) -> Trace:
    """Return a trace of a Markov chain."""
    return _stream("markov", config, rng, walk(config, rng))


def walk(config: MarkovTraceConfig, rng: Generator) -> NDArray[np.int64]:
    """Return the blocks of a chain, as `transitions` numbers them."""
    followers, odds = transitions(config)
    edges, draws = np.cumsum(odds, axis=1), rng.random(config.requests)
    contexts = len(followers)
    chosen, context = np.empty(config.requests, np.int64), 0
    for i, draw in enumerate(draws.tolist()):
        which = min(int(np.searchsorted(edges[context], draw, side="right")), odds.shape[1] - 1)
        chosen[i] = followers[context, which]
        context = (context * config.blocks + int(chosen[i])) % contexts
    return chosen


def transitions(config: MarkovTraceConfig) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return each context's followers, [blocks ** order, fanout], and their chances, descending.

    A context is the number with the last blocks as digits in base `blocks`, latest last; the stream
    begins in context 0.

    Raises:
        ConfigError: If there are too many contexts, or fewer blocks than may follow.
    """
    contexts = config.blocks**config.order
    if contexts > MOST_CONTEXTS or config.fanout > config.blocks:
        raise ConfigError(
            f"a chain of order {config.order} over {config.blocks} blocks, {config.fanout} of "
            "which may follow",
            f"Keep blocks ** order within {MOST_CONTEXTS}, and fanout within blocks",
        )
    rng = np.random.default_rng((config.seed, config.order))
    keys = rng.integers(0, config.blocks, contexts)
    steps = rng.permutation(config.blocks)[: config.fanout]
    followers = (keys[:, None] + steps) % config.blocks
    odds = -np.sort(-rng.dirichlet(np.full(config.fanout, config.skew), contexts), axis=1)
    return followers, odds


def _stream(name: str, config: StreamConfig, rng: Generator, chosen: NDArray[np.int64]) -> Trace:
    gaps = rng.exponential(1.0 / config.per_s, len(chosen))
    times = np.round(np.cumsum(gaps) * 1e9).astype(np.int64)
    return build_trace(name, times, np.ones(len(chosen), np.int64), wide(chosen), 1)


# Arrival times: steadily at random, or in bursts.


def poisson(rng: Generator, rate: float) -> Iterator[float]:
    """Yield the seconds of independent arrivals, `rate` per second on average."""
    now = 0.0
    while True:
        now += rng.exponential(1.0 / rate)
        yield now


def bursts(
    rng: Generator, rate: float, *, factor: float, calm_s: float, burst_s: float
) -> Iterator[float]:
    """Yield a Markov-modulated Poisson process of two states, `rate` a second on average over both.

    Args:
        rng: Source of randomness.
        rate: Mean over both states.
        factor: Density of arrivals in a burst, relative to the time between bursts.
        calm_s: Mean length of the time between bursts.
        burst_s: Mean length of a burst.

    References:
        Fischer and Meier-Hellstern, "The Markov-modulated Poisson process (MMPP) cookbook", 1993.
    """
    calm = rate * (calm_s + burst_s) / (calm_s + factor * burst_s)
    now, hot = 0.0, False
    until = rng.exponential(calm_s)
    while True:
        step = rng.exponential(1.0 / (calm * (factor if hot else 1.0)))
        if now + step < until:
            now += step
            yield now
        else:  # exponential waiting is memoryless: draw again from the switch on
            now, hot = until, not hot
            until += rng.exponential(burst_s if hot else calm_s)


class BurstsConfig(ChatConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of chat with conversations that begin in bursts.

    Attributes:
        factor: Rate of new conversations in a burst, relative to the time between bursts.
        calm_s: Mean time between bursts.
        burst_s: Mean length of a burst.
    """

    factor: Times = 20.0
    calm_s: Seconds = 300.0
    burst_s: Seconds = 30.0


class DriftConfig(RagConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of questions about documents with changing popularity.

    Attributes:
        phase_s: Time after which other documents are the popular ones.
    """

    phase_s: Seconds = 600.0


class MixConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of chat and agents at the same time, in proportion to their default rates.

    Attributes:
        requests: Number of requests.
        seed: Equal seeds give equal traces.
        block_tokens: Tokens of a block.
    """

    requests: int = 5000
    seed: int = 0
    block_tokens: int = 512


class Kind(NamedTuple):
    """Row of the table of generators.

    Attributes:
        config: Configuration class.
        make: Makes the trace of a configuration.
    """

    config: type[PolicyConfig]
    make: Callable[[Any], Trace]


def generate(kind: str, **options: object) -> Trace:
    """Make a trace of one kind.

    Args:
        kind: A name of `KINDS`.
        **options: Fields of its configuration: `requests` and `seed` for all; see `KINDS`.

    Returns:
        The trace; equal arguments give equal ones.

    Raises:
        ConfigError: If there is no such kind, or an option is wrong.
    """
    refuse_unknown("there is no generator", kind, KINDS)
    return KINDS[kind].make(configure(KINDS[kind].config, kind, options))


def _steady(draft: Draft, config: TalkConfig) -> Iterator[float]:
    return poisson(draft.rng, config.sessions_per_s)


def _in_bursts(draft: Draft, config: BurstsConfig) -> Iterator[float]:
    terms = {"factor": config.factor, "calm_s": config.calm_s, "burst_s": config.burst_s}
    return bursts(draft.rng, config.sessions_per_s, **terms)


def _drifting(draft: Draft, config: DriftConfig) -> Iterator[float]:
    draft.renamed = lambda at, n: (at + 7919 * int(draft.now // config.phase_s)) % n
    return poisson(draft.rng, config.sessions_per_s)


def _talked(
    name: str,
    talk: Callable[[Any], Talk],
    config: Any,
    starts: Callable[[Draft, Any], Iterator[float]] = _steady,
) -> Trace:
    draft = Draft(config, np.random.default_rng(config.seed))
    draft.play(starts(draft, config), talk(config))
    return draft.trace(name)


def _mix(config: MixConfig) -> Trace:
    common = msgspec.structs.asdict(config)
    both = join("mix", [generate("chat", **common), generate("agents", **common)])
    return both.head(config.requests)


def _streamed(make: Callable[[Any, np.random.Generator], Trace]) -> Callable[[Any], Trace]:
    return lambda config: make(config, np.random.default_rng(config.seed))


KINDS: Mapping[str, Kind] = {
    "chat": Kind(ChatConfig, partial(_talked, "chat", chat)),
    "agents": Kind(AgentsConfig, partial(_talked, "agents", agents)),
    "rag": Kind(RagConfig, partial(_talked, "rag", rag)),
    "bursts": Kind(BurstsConfig, partial(_talked, "bursts", chat, starts=_in_bursts)),
    "drift": Kind(DriftConfig, partial(_talked, "drift", rag, starts=_drifting)),
    "mix": Kind(MixConfig, _mix),
    "scan": Kind(ScanConfig, _streamed(scan)),
    "cyclic": Kind(CyclicTraceConfig, _streamed(cyclic)),
    "markov": Kind(MarkovTraceConfig, _streamed(markov)),
}
"""Generators by name, and the configuration of each."""
