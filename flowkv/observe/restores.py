"""Restores as a section of a report: the picture, key figures, and what each engine did."""

from __future__ import annotations

from typing import Literal

from flowkv.observe.overlap import Overlap, brief
from flowkv.observe.report import Figures, Section, Table
from flowkv.observe.timeline import COMPUTING, Timeline


def restore_section(
    timeline: Timeline,
    *,
    title: str = "One restore, as it went",
    source: Literal["measured", "simulated", "emulated"] = "measured",
) -> Section:
    """What was computed, what was loaded, and when the two met.

    Args:
        timeline: The restore, of `Timelines`.
        title: Heading.
        source: How it came about.
    """
    ended = timeline.ended
    return Section(
        title,
        _told(timeline),
        [
            Overlap(f"{ended.tokens:,} tokens of prefix in {brief(ended.seconds)}", timeline),
            Figures(_figures(timeline)),
            Table(["engine", "tokens", "pieces", "MB", "busy, ms", "busy, %"], _rows(timeline)),
        ],
        source=source,
    )


def _told(timeline: Timeline) -> str:
    ended, met = timeline.ended, timeline.met
    tiers = " and ".join(timeline.names[name] for name in timeline.tiers) or "a tier"
    text = (
        "Tokens are computed from the front, upwards in the picture, and loaded from the back,"
        " downwards."
    )
    if met is not None:
        text += (
            f" Here the two met at token {met.token:,}: what lies above was loaded from {tiers}"
            " meanwhile."
        )
    elif ended.loaded_tokens:
        text += f" Here all of it was loaded from {tiers}."
    elif ended.computed_tokens:
        text += " Here all of it was computed."
    if any(span.engine == "suffix" for span in timeline.spans):
        text += " The new tokens behind the prefix were computed layer by layer, as layers came."
    if any(span.layers < timeline.layers for span in timeline.spans):
        text += " What came layer by layer is drawn as a band per layer, the first of them first."
    if ended.failed:
        text += f" {ended.failed:,} loads failed, and what they would have brought was computed."
    return text


def _figures(timeline: Timeline) -> list[tuple[str, object, str]]:
    ended = timeline.ended
    known = ended.tokens - ended.resident_tokens
    share = 100 * ended.loaded_tokens / known if known else 0.0
    figures: list[tuple[str, object, str]] = [
        ("Computed", f"{ended.computed_tokens:,}", "tokens, from the front"),
        ("Loaded", f"{ended.loaded_tokens:,}", f"tokens, {share:.0f}% of what was missing"),
        (
            "Both at work",
            f"{100 * timeline.overlap_s() / timeline.until_s:.0f}%" if timeline.until_s else "0%",
            "of the time",
        ),
    ]
    if timeline.bound_ratio:
        figures.append(
            (
                "Of the bound",
                f"{timeline.bound_ratio:.2f}x",
                "what nobody could beat, at these rates",
            )
        )
    return figures


def _rows(timeline: Timeline) -> list[list[object]]:
    rows: list[list[object]] = []
    for engine in timeline.engines:
        spans = [span for span in timeline.spans if span.engine == engine]
        cells = sum(span.tokens * span.layers for span in spans)
        n_bytes = sum(span.n_bytes for span in spans)
        busy_s = timeline.busy_s(engine)
        share = 100 * busy_s / timeline.until_s if timeline.until_s else 0.0
        rows.append(
            [
                timeline.names[engine],
                round(cells / timeline.layers),
                len(spans),
                None if engine in COMPUTING else n_bytes / 1e6,
                busy_s * 1e3,
                share,
            ]
        )
    return rows
