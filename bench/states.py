"""`python -m bench states`: hits of hybrid models and bytes of their states, by rule of placement.

Traces are replayed with room for all blocks. A rule's hits are compared with those of attention
alone, which every block serves; its bytes with those of K and V if all layers had attention. All
figures are simulated.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.figures import save
from bench.policy.ground import PUBLIC
from flowkv.cli.arguments import AddVerb
from flowkv.policy.pages import STATE_RULES
from flowkv.report.screen import Screen
from flowkv.sim import Trace, generate, read_trace, replay
from flowkv.sim.formats import read_sessions

MODELS = ("qwen3-next", "kimi-linear", "falcon-h1-7b", "jamba")
ROOMS = (0.0, 0.05, 0.01)
"""Most bytes of states; 0 for no limit."""
SESSIONS, PAGE_TOKENS, PAGED_REQUESTS = "raw/kct_sessions_even.jsonl.zst", 64, 3000


def traces(quick: bool) -> Iterator[Trace]:
    """Public traces where they are, generated ones elsewhere."""
    folder = os.environ.get(PUBLIC)
    if not folder:
        yield from (generate(kind, seed=1) for kind in ("agents", "chat"))
        return
    for name in ("kct_dev", "moon_conv"):
        trace = read_trace(f"{folder}/blocks/{name}.npz")
        yield trace.head(1500) if quick else trace
    if not quick:  # pages as small as the cache's
        paged = read_sessions(Path(folder) / SESSIONS, span_s=7200.0, block_tokens=PAGE_TOKENS)
        yield paged.head(PAGED_REQUESTS)


def rules() -> dict[str, dict[str, object]]:
    """Options by the name in tables: every rule, and the interval in two lengths."""
    found: dict[str, dict[str, object]] = {
        "interval 512": {"rule": "interval", "every_tokens": 512}
    }
    for name, config in STATE_RULES.items():
        title = f"{name} {config.every_tokens}" if config.every_tokens else name
        found[title] = {"rule": name}
    return found


def measure(trace: Trace, model: str) -> Iterator[dict[str, Any]]:
    """Rows of one trace and model."""
    for room in ROOMS if model == MODELS[0] and trace.block_tokens > PAGE_TOKENS else ROOMS[:1]:
        for rule, options in rules().items():
            found = replay(trace, "lru", size=1.0, model=model, states={**options, "room": room})
            whole = float(found.extra["attention_hit_ratio"] or 0.0)  # type: ignore[arg-type]
            yield {
                "trace": f"{trace.name}, blocks of {trace.block_tokens}",
                "requests": len(trace),
                "model": model,
                "room": room,
                "rule": rule,
                "attention_hits": whole,
                "of_attention": found.prefix_hit_ratio / whole if whole else 0.0,
                "bytes": found.extra["states_share"],
                "stops": found.extra["stops_per_request"],
            }


def _states(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    rows = []
    for trace in traces(given.quick):
        for model in given.models.split(","):
            found = list(measure(trace, model))
            rows += found
            head = ["rule", "most bytes", "hits of attention's", "bytes", "stops a request"]
            lines = [
                [
                    row["rule"],
                    f"{row['room']:.0%}" if row["room"] else "",
                    *(f"{row[name]:.2%}" for name in ("of_attention", "bytes")),
                    f"{row['stops']:.2f}",
                ]
                for row in found
            ]
            screen.table(head, lines, title=f"{found[0]['trace']}, {model} (simulated)")
    save(given.out, {"rows": rows})
    return 0, {"rows": rows}


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("states", _states, "hits and bytes of recurrent states, by rule of placement")
    several = "hybrids of flowkv.sim.hardware; default %(default)s"
    added.option("--models", "A,B", several, default=",".join(MODELS))
    added.add_argument("--quick", action="store_true", help="beginnings of traces only")
    added.option("--out", "FILE", "writes all figures as JSON", type=Path)
