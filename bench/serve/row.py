"""One line of the result: a system under a load, over all repetitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import msgspec

from bench.serve.ground import Setting
from bench.serve.served import Outcome, Spread, percentile
from bench.serve.workload import Load

UNCACHED = "engine without caching"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A system under a load.

    Times are of all requests of all repetitions together. Ratios are of this row over each
    baseline in the same repetition.

    Attributes:
        part: Of the protocol.
        model: Its name.
        device: Where it computed.
        dtype: Of weights and cache.
        concurrency: Clients at once.
        scheduler: Of the engine; "" of baselines.
        baseline: Which of the baselines this is; "" for the engine.
        ttft_p50_s: Time to the first token, from submission.
        ttft_p95_s: The same.
        ttft_p99_s: The same.
        tpot_p50_s: Mean time per further token of a request.
        tpot_p99_s: The same.
        tokens_per_s: New tokens over the time from the first submission to the last token; median
            of the repetitions.
        kv_utilisation: Share of the pool's pages that anybody held, mean over steps; None where
            there is no pool.
        arrivals: See `Load`, like the next three.
        rate: Requests a second.
        lengths: Of prompts and answers.
        prefix_share: Share of prompts.
        prefix_tokens: Tokens before them.
        page_size: See `Setting`, like the next two.
        token_budget: Of a step.
        max_rows: Of a step.
        caching: Whether prompts found what others computed.
        requests: In each repetition.
        repetitions: How often.
        prompt_tokens: Mean of a request.
        new_tokens: Mean of a request.
        completion_mean_s: From submission to the end.
        completion_max_s: The same.
        overtaken_s: How much later than a request somebody came who was let in before it, at most.
        tokens_per_s_min: Of the slowest repetition.
        tokens_per_s_max: Of the fastest.
        reused: Share of prompts' tokens that were not computed.
        preempted: How often requests made room for others, all together.
        same_tokens: Share of requests with the tokens of sequential `generate`; None without it.
        throughput_over: `tokens_per_s` over that of each baseline: (median, least, most).
        cpu_over: The same of tokens over processor time, which others on the machine hardly change.
        ttft_over: The same of `ttft_p95_s`.
        completion_over: The same of `completion_mean_s`.
        label: How times came about.
    """

    part: str
    model: str
    device: str
    dtype: str
    concurrency: int
    scheduler: str
    baseline: str
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    tokens_per_s: float
    kv_utilisation: float | None
    arrivals: str
    lengths: str
    requests: int
    repetitions: int
    prompt_tokens: float
    new_tokens: float
    completion_mean_s: float
    completion_max_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    rate: float = 0.0
    prefix_share: float = 0.0
    prefix_tokens: int = 0
    page_size: int = 0
    token_budget: int = 0
    max_rows: int = 0
    caching: bool = True
    reused: float = 0.0
    preempted: int = 0
    overtaken_s: float = 0.0
    same_tokens: float | None = None
    throughput_over: dict[str, Spread] = {}
    cpu_over: dict[str, Spread] = {}
    ttft_over: dict[str, Spread] = {}
    completion_over: dict[str, Spread] = {}
    label: Literal["measured"] = "measured"


class Who(msgspec.Struct, frozen=True, kw_only=True):
    """What a row is of.

    Attributes:
        part: Of the protocol.
        model: Its name.
        device: Where it computed.
        dtype: Of weights and cache.
        load: What was asked.
        baseline: Its name; "" for the engine.
        setting: Of the engine; None for what is none.
    """

    part: str
    model: str
    device: str
    dtype: str
    load: Load
    baseline: str
    setting: Setting | None


def make_row(
    who: Who,
    runs: Sequence[Outcome],
    prompts: Sequence[Sequence[int]],
    rivals: Mapping[str, Sequence[Outcome]],
    reference: Sequence[Outcome] = (),
) -> Row:
    """A row of what a system did.

    Args:
        who: What it is of.
        runs: Its repetitions.
        prompts: Tokens of the prompts of each repetition.
        rivals: Baselines' repetitions of the same requests, by name.
        reference: Repetitions whose tokens are right; none to say nothing about them.
    """
    load, setting = who.load, who.setting
    served = [one for run in runs for one in run.served]
    ttft = [one.ttft_s for one in served]
    tpot = [one.tpot_s for one in served if len(one.tokens) > 1]
    rates = Spread.of([run.tokens_per_s for run in runs])
    used = [run.kv_utilisation for run in runs if run.kv_utilisation is not None]
    told = sum(map(sum, prompts))
    return Row(
        part=who.part,
        model=who.model,
        device=who.device,
        dtype=who.dtype,
        concurrency=load.concurrency,
        baseline=who.baseline,
        ttft_p50_s=percentile(ttft, 50),
        ttft_p95_s=percentile(ttft, 95),
        ttft_p99_s=percentile(ttft, 99),
        tpot_p50_s=percentile(tpot, 50),
        tpot_p99_s=percentile(tpot, 99),
        tokens_per_s=rates.median,
        tokens_per_s_min=rates.least,
        tokens_per_s_max=rates.most,
        kv_utilisation=fmean(used) if used else None,
        arrivals=load.arrivals,
        rate=load.rate,
        lengths=load.lengths,
        prefix_share=load.prefix_share,
        prefix_tokens=load.prefix_tokens,
        requests=load.requests,
        repetitions=len(runs),
        prompt_tokens=told / len(served),
        new_tokens=fmean(len(one.tokens) for one in served),
        completion_mean_s=fmean(one.seconds for one in served),
        completion_max_s=max(one.seconds for one in served),
        reused=sum(one.reused for one in served) / told,
        preempted=sum(one.preempted for one in served),
        overtaken_s=max(run.overtaken_s for run in runs),
        same_tokens=_same(runs, reference),
        throughput_over=_over(runs, rivals, "tokens_per_s"),
        cpu_over=_over(runs, rivals, "tokens_per_cpu_s"),
        ttft_over=_over(runs, rivals, "ttft_p95_s"),
        completion_over=_over(runs, rivals, "completion_s"),
        **_set_up(setting),
    )


def _set_up(setting: Setting | None) -> dict[str, Any]:
    if setting is None:
        return {"scheduler": "", "caching": False}
    names = ("scheduler", "page_size", "token_budget", "max_rows", "caching")
    return {name: getattr(setting, name) for name in names}


def _over(
    runs: Sequence[Outcome], rivals: Mapping[str, Sequence[Outcome]], what: str
) -> dict[str, Spread]:
    """Ratios to each rival, repetition by repetition."""
    return {
        name: Spread.of(
            [getattr(a, what) / getattr(b, what) for a, b in zip(runs, others, strict=True)]
        )
        for name, others in rivals.items()
    }


def _same(runs: Sequence[Outcome], reference: Sequence[Outcome]) -> float | None:
    pairs = [
        (one.tokens, other.tokens)
        for run, right in zip(runs, reference, strict=False)
        for one, other in zip(run.served, right.served, strict=True)
    ]
    return fmean(a == b for a, b in pairs) if pairs else None


COLUMNS = ["", "clients", "tokens/s", "TTFT ms p50 / 95 / 99", "TPOT ms p50 / 99", "KV"]
"""Columns of the table of a part; the last is the share of pages in use."""


def cells(row: Row) -> list[str]:
    """Return a line under `COLUMNS`."""
    used = "-" if row.kv_utilisation is None else f"{row.kv_utilisation:.0%}"
    ttft = " / ".join(map(_ms, (row.ttft_p50_s, row.ttft_p95_s, row.ttft_p99_s)))
    tpot = " / ".join(map(_ms, (row.tpot_p50_s, row.tpot_p99_s)))
    return [situation(row), f"{row.concurrency}", f"{row.tokens_per_s:,.0f}", ttft, tpot, used]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def situation(row: Row) -> str:
    """Return the words in which a row differs from others of its part."""
    if row.part in ("concurrency", "prefix"):
        words = [row.baseline or "engine"]
    else:
        words = [row.baseline or f"engine, {row.scheduler}"]
    if row.arrivals != "closed":
        words.append(f"{row.arrivals}, {row.rate:.2g}/s")
    if row.part == "prefix":
        shared = f"{row.prefix_tokens:,} tokens" if row.prefix_tokens else f"{row.prefix_share:.0%}"
        words.append(f"{shared} shared")
    if row.part == "pages":
        words.append(f"pages of {row.page_size}")
    if row.part == "budget":
        words.append(f"steps of {row.token_budget}")
    return ", ".join(words)
