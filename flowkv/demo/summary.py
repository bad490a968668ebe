"""What the demo's samples amount to: medians, factors, and whether the answers were the same."""

from __future__ import annotations

import math
import statistics
from typing import Any

import msgspec

from flowkv.demo.records import Findings, Plan, Sample, Watched
from flowkv.demo.workload import Case


class CaseSummary(msgspec.Struct, kw_only=True):
    """One request; times are medians in seconds, NaN where nothing was measured.

    Attributes:
        name: Shown to people.
        rows: Prompts in it.
        tokens: Tokens of all its prompts.
        ttft_cold_s: Without FlowKV, first process.
        ttft_first_s: FlowKV attached, empty store, what was asked before it being known.
        reused_first_tokens: Prompt tokens reused then.
        ttft_again_s: Asked again in the same process.
        ttft_recompute_s: Without FlowKV, second process.
        ttft_disk_s: Second process, pages on disk.
        reused_tokens: Prompt tokens reused then.
        loaded_bytes: Read then, by kind of tier.
        identical: Whether every answer was that of the model without FlowKV.
    """

    name: str
    rows: int
    tokens: int
    ttft_cold_s: float
    ttft_first_s: float
    reused_first_tokens: int
    ttft_again_s: float
    ttft_recompute_s: float
    ttft_disk_s: float
    reused_tokens: int
    loaded_bytes: dict[str, int]
    identical: bool

    @property
    def speedup(self) -> float:
        """How many times faster than recomputing, both in the second process."""
        return self.ttft_recompute_s / self.ttft_disk_s if self.ttft_disk_s else math.nan


class Summary(msgspec.Struct, kw_only=True):
    """Everything that is shown, and the object of `--json`.

    Attributes:
        tokens_identical: Whether all answers of both processes were the same.
        tokens_reused: Prompt tokens that the second process did not compute, asking once.
        hit_rate: Their share of the prompt tokens.
        ttft_cold_s: Last turn of the conversation: without FlowKV, first process.
        ttft_recompute_s: The same in the second process.
        ttft_again_s: With FlowKV, asked again in the first process.
        ttft_restored_s: With FlowKV in the second process, from disk.
        tpot_plain_s: Time per further token without FlowKV.
        tpot_paged_s: The same with FlowKV, second process.
        attach_s: What attaching takes once in a process, before any prompt.
        restored_from: Bytes that the second process read, asking once, by kind of tier.
        store_bytes: What the store occupies on the disk at the end.
        pool_bytes: What the device pools held at the end of the first process.
        device: Where the model computed.
        report: Path of the HTML report.
        store: Directory of the store; "" if it was removed.
        store_was_new: Whether it knew nothing of these prompts before.
        restores: How restores of the last turn went that were watched, a line each.
        repeats: Measurements behind each median.
        seconds: Duration of the whole demo.
        model: What was asked for.
        machine: Device, threads and versions.
        cases: All requests.
        processes: Process ids of the two.
    """

    tokens_identical: bool
    tokens_reused: int
    hit_rate: float
    ttft_cold_s: float
    ttft_recompute_s: float
    ttft_again_s: float
    ttft_restored_s: float
    tpot_plain_s: float
    tpot_paged_s: float
    attach_s: float
    restored_from: dict[str, int]
    store_bytes: int
    pool_bytes: int
    device: str
    report: str = ""
    store: str = ""
    store_was_new: bool
    restores: list[str]
    repeats: int
    seconds: float = 0.0
    model: str
    machine: dict[str, Any]
    cases: list[CaseSummary]
    processes: list[int]


def summarise(plan: Plan, stored: Findings, restored: Findings, *, store_bytes: int = 0) -> Summary:
    """Puts the findings of both processes together.

    Args:
        plan: What was run.
        stored: Of the first process.
        restored: Of the second.
        store_bytes: What the store occupies on the disk.
    """
    samples = [*stored.samples, *restored.samples]
    cases = [_case(case, samples) for case in stored.cases]
    talk = cases[-2]
    once = [_worst(_of(samples, "disk", case.name)) for case in stored.cases[-2:]]
    seen, reused = sum(s.seen for s in once), sum(s.reused for s in once)
    loaded: dict[str, int] = {}
    for sample in once:
        for kind, n_bytes in sample.loaded_bytes.items():
            loaded[kind] = loaded.get(kind, 0) + n_bytes
    plain = [s.tpot_s for s in _of(samples, "cold", talk.name) if s.tpot_s]
    paged = [s.tpot_s for s in _of(samples, "disk", talk.name) if s.tpot_s]
    return Summary(
        tokens_identical=all(sample.identical for sample in samples),
        tokens_reused=reused,
        hit_rate=reused / seen if seen else 0.0,
        ttft_cold_s=talk.ttft_cold_s,
        ttft_recompute_s=talk.ttft_recompute_s,
        ttft_again_s=talk.ttft_again_s,
        ttft_restored_s=talk.ttft_disk_s,
        tpot_plain_s=_median(plain),
        tpot_paged_s=_median(paged),
        attach_s=restored.attach_s,
        restored_from=loaded,
        store_bytes=store_bytes,
        pool_bytes=sum(pool["used_bytes"] for pool in stored.tiers["devices"].values()),
        device=restored.machine["device"],
        store_was_new=stored.fresh,
        restores=[_told(watched) for watched in restored.restores],
        repeats=plan.repeats,
        model=plan.model,
        machine={k: v for k, v in restored.machine.items() if k != "pid"},
        cases=cases,
        processes=[stored.machine["pid"], restored.machine["pid"]],
    )


def _told(watched: Watched) -> str:
    slow = f"from a disk of {watched.bytes_per_s / 1e6:.3g} MB/s, emulated"
    return f"{slow if watched.bytes_per_s else 'measured'}: {watched.timeline.describe()}"


def _case(case: Case, samples: list[Sample]) -> CaseSummary:
    first, disk = _of(samples, "first", case.name), _worst(_of(samples, "disk", case.name))
    return CaseSummary(
        name=case.name,
        rows=len(case.prompts),
        tokens=case.tokens,
        ttft_cold_s=_ttft(samples, "cold", case),
        ttft_first_s=_ttft(samples, "first", case),
        reused_first_tokens=first[0].reused if first else 0,
        ttft_again_s=_ttft(samples, "again", case),
        ttft_recompute_s=_ttft(samples, "recompute", case),
        ttft_disk_s=_ttft(samples, "disk", case),
        reused_tokens=disk.reused,
        loaded_bytes=disk.loaded_bytes,
        identical=all(sample.identical for sample in samples if sample.case == case.name),
    )


def _of(samples: list[Sample], way: str, case: str) -> list[Sample]:
    return [sample for sample in samples if sample.way == way and sample.case == case]


def _worst(samples: list[Sample]) -> Sample:
    """The one that reused least: a claim must hold for every repeat."""
    nothing = Sample(way="", case="", ttft_s=0.0, ttft_cpu_s=0.0, tpot_s=0.0)
    return min(samples, key=lambda sample: sample.reused, default=nothing)


def _ttft(samples: list[Sample], way: str, case: Case) -> float:
    return _median([sample.ttft_s for sample in _of(samples, way, case.name)])


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan
