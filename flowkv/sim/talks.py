"""Generated conversations: people who chat, agents, questions about documents.

Medians, spreads and chances of a return are those of published traces, rounded: chat from
Mooncake's conversation trace (FAST 2025), agents from coding-agent sessions
(github.com/callanjfox/kv-cache-tester); those of questions about documents are assumptions. Lengths
and gaps are lognormal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import numpy as np
from msgspec import Meta

from flowkv.policy.base import TOOL_USE, TURN_END
from flowkv.sim.draft import Count, Draft, Odds, Rate, Seconds, Spread, TalkConfig

Talk = Callable[[Draft], Iterator[float | None]]


class ChatConfig(TalkConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """People who read, think and ask again.

    Attributes:
        system_tokens: One prompt before every conversation.
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
    """Programs that call tools in a loop, and now and then wait for a person.

    Attributes:
        programs: Different tool and system prompts, of Zipf popularity.
        prompt_tokens: Length of those.
        first_tokens: Median of what a session begins with besides.
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
        context_tokens: A longer context is summarised, and the chain begins anew.
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
    """Questions about documents, the best one first.

    Attributes:
        documents: How many there are, of Zipf popularity.
        zipf: Its exponent.
        document_tokens: Median of their lengths.
        spread: Standard deviation of the logarithm of lengths.
        passages: Documents before each question.
        system_tokens: One prompt before everything.
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
    """One conversation between a person and a model."""

    def talk(draft: Draft) -> Iterator[float | None]:
        own, turn = draft.fresh(), 0
        tokens = config.system_tokens + draft.size(config.first_tokens, config.spread)
        while True:
            output = draft.size(config.output_tokens, config.spread)
            draft.note([(0, config.system_tokens)], own, tokens, output, TURN_END)
            if draft.rng.random() >= config.returns[min(turn, len(config.returns) - 1)]:
                return
            turn += 1
            tokens += output + draft.size(config.next_tokens, config.spread)
            yield draft.time(config.gap_s, config.gap_spread)

    return talk


def agents(config: AgentsConfig) -> Talk:
    """One session of a program."""
    popularity = zipf(config.programs, 1.0)

    def talk(draft: Draft) -> Iterator[float | None]:
        program = draft.pick(popularity)
        own = draft.fresh()
        prompt = [(1 + program, config.prompt_tokens)]
        tokens = config.prompt_tokens + draft.size(config.first_tokens, config.spread)
        while True:
            calls = draft.rng.random() < config.tool_share
            output = draft.size(config.output_tokens, config.spread)
            draft.note(prompt, own, tokens, output, TOOL_USE if calls else TURN_END)
            if draft.rng.random() >= (config.tool_returns if calls else config.end_returns):
                return
            tokens += output + draft.size(config.growth_tokens, config.spread)
            if tokens > config.context_tokens:
                own = draft.fresh()
                tokens = config.prompt_tokens + draft.size(config.first_tokens, config.spread)
            if calls:
                yield draft.time(config.tool_s, config.tool_spread)
            else:
                yield draft.time(config.end_s, config.end_spread)

    return talk


def rag(config: RagConfig) -> Talk:
    """One question about documents, and perhaps more."""
    popularity = zipf(config.documents, config.zipf)
    lengths: dict[int, int] = {}

    def talk(draft: Draft) -> Iterator[float | None]:
        found = [draft.pick(popularity) for _ in range(config.passages)]
        spans = [(0, config.system_tokens)]
        for document in dict.fromkeys(found):
            if document not in lengths:
                lengths[document] = draft.size(config.document_tokens, config.spread)
            spans.append((1 + document, lengths[document]))
        own = draft.fresh()
        tokens = sum(size for _, size in spans) + draft.size(config.question_tokens, config.spread)
        while True:
            output = draft.size(config.output_tokens, config.spread)
            draft.note(spans, own, tokens, output, TURN_END)
            if draft.rng.random() >= config.returns:
                return
            tokens += output + draft.size(config.question_tokens, config.spread)
            yield draft.time(config.gap_s, 1.0)

    return talk


def zipf(n: int, exponent: float) -> list[float]:
    """Cumulative popularity of `n` things, the first being the most popular."""
    weights = np.arange(1, n + 1, dtype=np.float64) ** -exponent
    shares: list[float] = (np.cumsum(weights) / weights.sum()).tolist()
    return shares
