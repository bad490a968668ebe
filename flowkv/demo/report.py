"""The demo's figures as one HTML file."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from flowkv.core.sizes import format_size
from flowkv.demo.records import Plan, Watched
from flowkv.demo.show import seconds, times
from flowkv.demo.summary import CaseSummary, Summary
from flowkv.observe.report import Bars, Figures, Section, Table, Text, write_report
from flowkv.observe.restores import restore_section

_EXCERPT = 420  # characters of the last prompt that are shown


def write_demo_report(
    path: Path,
    plan: Plan,
    summary: Summary,
    texts: Sequence[str],
    *,
    restores: Sequence[Watched] = (),
) -> Path:
    """Writes the report and returns its path.

    Args:
        path: The HTML file.
        plan: What was run.
        summary: What came out.
        texts: The last turn's prompt and answer.
        restores: How the last turn was restored.
    """
    sections = [_headline(summary), _first_token(summary)]
    sections += map(_restore, restores)
    sections += [
        _conversation(summary),
        _batch(plan, summary),
        _bytes(summary),
        _method(plan, summary),
        _excerpt(texts),
    ]
    today = datetime.datetime.now().astimezone()
    machine = summary.machine
    return write_report(
        path.absolute(),
        "Prompts that outlive their process",
        [section for section in sections if section.parts or section.text],
        lead="FlowKV demo: one process answered and exited, a second one answered from its store.",
        footer=f"{machine['device_name']}, {machine['threads']} threads, {machine['dtype']};"
        f" FlowKV {machine['flowkv']}, torch {machine['torch']}, Python {machine['python']};"
        f" {today:%Y-%m-%d %H:%M %Z}; {summary.seconds:.0f} s in all.",
    )


def _restore(watched: Watched) -> Section:
    if not watched.bytes_per_s:
        return restore_section(watched.timeline, title="How it was restored")
    rate = f"{watched.bytes_per_s / 1e6:.3g} MB/s"
    title = f"How it would be from a disk of {rate}"
    return restore_section(watched.timeline, title=title, source="emulated")


def _headline(summary: Summary) -> Section:
    talk = summary.cases[-2]
    same = "yes" if summary.tokens_identical else "NO"
    return Section(
        "In short",
        source="measured",
        parts=[
            Figures(
                [
                    ("Faster first token", times(talk.speedup), "restored, over recomputing"),
                    ("Restored in", seconds(talk.ttft_disk_s), f"{talk.tokens:,} prompt tokens"),
                    ("Reused", f"{summary.hit_rate:.1%}", f"{summary.tokens_reused:,} tokens"),
                    ("Tokens identical", same, "in every answer of both processes"),
                ]
            )
        ],
    )


def _first_token(summary: Summary) -> Section:
    talk = summary.cases[-2]
    ways = _ways(talk)
    return Section(
        f"Time to the first token: {talk.name}",
        "The conversation is taken up where it was left, with a new question at its end.",
        [
            Bars(
                f"Prompt of {talk.tokens:,} tokens, {_of(summary)}",
                [way for way, _ in ways],
                {"": [value * 1e3 for _, value in ways]},
                unit="ms",
            )
        ],
        source="measured",
    )


def _batch(plan: Plan, summary: Summary) -> Section:
    batch = summary.cases[-1]
    ways = _ways(batch)
    return Section(
        f"Time to the first token: {batch.name}",
        f"{batch.rows} prompts of {batch.tokens // batch.rows:,} tokens in one call; the first"
        f" {plan.sizes.shared:,} are the same in all of them.",
        [
            Bars(
                f"{batch.tokens:,} prompt tokens, {_of(summary)}",
                [way for way, _ in ways],
                {"": [value * 1e3 for _, value in ways]},
                unit="ms",
            )
        ],
        source="measured",
    )


def _ways(case: CaseSummary) -> list[tuple[str, float]]:
    return [
        ("1st process, without FlowKV", case.ttft_cold_s),
        ("with FlowKV, first time", case.ttft_first_s),
        ("with FlowKV, asked again", case.ttft_again_s),
        ("2nd process, without FlowKV", case.ttft_recompute_s),
        ("restored from disk", case.ttft_disk_s),
    ]


def _of(summary: Summary) -> str:
    return f"median of {summary.repeats}" if summary.repeats > 1 else "measured once"


def _conversation(summary: Summary) -> Section:
    turns = summary.cases[:-1]
    labels = [case.name.rpartition(", ")[2] for case in turns]
    return Section(
        "Turn by turn, first process",
        "Without a cache every turn pays for all turns before it. With FlowKV attached, only what"
        " is new is computed; the first turn shows what attaching costs when nothing is known.",
        [
            Bars(
                "Time to the first token",
                labels,
                {
                    "without FlowKV": [case.ttft_cold_s * 1e3 for case in turns],
                    "with FlowKV, first time": [case.ttft_first_s * 1e3 for case in turns],
                },
                unit="ms",
            ),
            Table(
                ["turn", "prompt tokens", "of these reused"],
                [
                    [label, case.tokens, case.reused_first_tokens]
                    for label, case in zip(labels, turns, strict=True)
                ],
            ),
        ],
        source="measured",
    )


def _bytes(summary: Summary) -> Section:
    rows: list[list[object]] = [
        ["device pool, first process, at its end", format_size(summary.pool_bytes)],
        ["store on disk, at the end", format_size(summary.store_bytes)],
    ]
    for case in summary.cases[-2:]:
        for kind, n_bytes in case.loaded_bytes.items():
            rows.append([f"read from {kind} for: {case.name}", format_size(n_bytes)])
    return Section("Bytes", parts=[Table(["where", "bytes"], rows)], source="measured")


def _method(plan: Plan, summary: Summary) -> Section:
    first, second = summary.processes
    empty = "" if summary.store_was_new else " The store knew these prompts before."
    text = (
        f"Model: {Path(plan.model).name or plan.model}, {summary.machine['parameters']:,}"
        f" parameters. The prompts are source text of Python's standard library. Process {first}"
        f" answered, stored and exited; process {second} was started afterwards and opened the same"
        f" directory.{empty} TTFT is the wall time from calling generate to the first new token;"
        f" attaching, once in a process, took {seconds(summary.attach_s)} and is not in it."
        " Both processes warmed up with other prompts of the same shapes first. What is compared"
        f" was measured in turns ({_of(summary)}). Before every restore the cache was opened"
        " anew, and the operating system was asked to drop the files from its page cache."
    )
    if summary.machine["wait_policy"]:
        text += f" OMP_WAIT_POLICY was {summary.machine['wait_policy']} in all runs."
    return Section("How it was measured", text)


def _excerpt(texts: Sequence[str]) -> Section:
    if len(texts) != 2:
        return Section("")
    prompt, answer = texts
    parts = [Text(f"…{prompt[-_EXCERPT:]}", mono=True), Text(answer, mono=True)]
    note = "The end of the conversation's last prompt, and the answer without FlowKV."
    return Section("What was asked", note, parts)
