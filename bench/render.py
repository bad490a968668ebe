"""The figures of `bench/results/*.json` into the benchmark pages, and plots beside their pages.

    python -m bench.render            # write them
    python -m bench.render --check    # 1 if a page or plot says something else

What is between two marks, `<!-- begin: NAME -->` and `<!-- end: NAME -->`, is written by the
function of that name below; all else on a page is prose. A figure that no file holds is "not
measured yet".
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from bench.gpu import whole
from bench.plots import plots
from bench.policy.finding import GROUPS
from bench.restore.protocol import PARTS
from bench.restore.row import OURS, Row
from bench.restore.table import summaries
from bench.serve.promise import GROUPS as SERVED
from bench.serve.protocol import PARTS as SERVING
from bench.serve.row import Row as Served
from bench.serve.row import situation as served_situation

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    DOCS / "benchmarks.md",
    *sorted((DOCS / "benchmarks").glob("*.md")),
    DOCS / "guides" / "cold.md",
    DOCS / "guides" / "huggingface.md",
    DOCS / "index.md",
    ROOT / "README.md",
]
RESULTS = ROOT / "bench" / "results"
NOT_YET = "not measured yet"
SHOWN = ("recompute", "load-layers", "cake", "two-pointer-v1", "staircase", OURS)
"""Policies with a column in the tables of restores."""

Results = dict[str, Any]
"""What each file holds, by its name without `.json`."""

BLOCKS: dict[str, Callable[[Results], str]] = {}


def block(write: Callable[[Results], str]) -> Callable[[Results], str]:
    """The writer of the block of its name."""
    BLOCKS[write.__name__] = write
    return write


def load(folder: Path = RESULTS) -> Results:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names, *lines = ("| " + " | ".join(line) + " |" for line in [list(head), *map(list, rows)])
    return "\n".join([names, "|---" * len(list(head)) + "|", *lines])


def figure(value: float | None, unit: str = "") -> str:
    if value is None:
        return NOT_YET
    if unit == "%":
        return f"{100 * value:.0f}%"
    digits = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return digits + unit


def gpu_reports(results: Results) -> list[dict[str, Any]]:
    return [report for name, report in results.items() if name.startswith("gpu-")]


class Device:
    """The results of one GPU, by case."""

    def __init__(self, report: dict[str, Any] | None) -> None:
        self.cases = {row["case"]: row for row in (report or {}).get("results", [])}

    def of(self, case: str, name: str = "us") -> float | None:
        return self.cases.get(case, {}).get(name)

    def ratio(self, above: float | None, below: float | None) -> float | None:
        return above / below if above and below else None

    def rival(self, case: str, *names: str) -> float | None:
        """Microseconds of the fastest of some rivals."""
        rivals = self.cases.get(case, {}).get("rivals", {})
        return min((rivals[n]["us"] for n in names if "us" in rivals.get(n, {})), default=None)

    def lowest(self, beginning: str, name: str) -> float | None:
        found = [row.get(name) for case, row in self.cases.items() if case.startswith(beginning)]
        return min((x for x in found if x is not None), default=None)


def goals(device: Device) -> list[tuple[str, str, float | None, str]]:
    """(What, target, measured, unit) of everything that is promised of a GPU."""
    a, b = "decode 32 x 4k", "decode 1 x 128k"
    uniform, ragged = "decode 8 x 32k", "decode ragged 1k-128k"
    chunked = "prefill 16k in 2k chunks"
    infer, vllm = ("FlashInfer", "FlashInfer, tensor cores"), "vLLM Triton"
    rows: list[tuple[str, str, float | None, str]] = []
    for case, share in ((a, 92), (b, 90)):
        of_reads = device.of(case, "of_read_ceiling")
        what = f"bf16 {case}, share of read bandwidth"
        rows.append((what, f"at least {share}%", of_reads, "%"))
        for codec, least in (("kv8", 1.8), ("k8v4", 2.3), ("kv4c", 3.0), ("kv4h", 3.0)):
            times = device.of(f"{case} {codec}", "times")
            rows.append((f"{codec} {case}, against bf16", f"at least {least}x", times, "x"))
        for names, codec, least in (
            (infer, "", 1.02),
            ((vllm,), "", 1.2),
            ((f"{vllm} int8",), "kv8", 2.0),
            ((f"{vllm} int4",), "kv4c", 3.0),
        ):
            ours = device.of(f"{case} {codec}".strip())
            times = device.ratio(device.rival(case, *names), ours)
            what = f"{codec or 'bf16'} {case}, against {names[0]}"
            rows.append((what, f"at least {least}x", times, "x"))
    longer = device.ratio(device.of(ragged), device.of(uniform))
    copied = device.lowest("transcode", "of_copy_ceiling")
    moved = device.lowest("gather pages", "of_copy_ceiling")
    cascade = device.of("cascade 32k x 64", "of_read_ceiling")
    streamed = "decode step streamed from pinned memory"
    for case, share in (("prefill 1 x 2k", 55), ("prefill 1 x 16k", 70), (chunked, 55)):
        of_products = device.of(case, "of_matmul_ceiling")
        rows.append((f"{case}, share of matrix rate", f"at least {share}%", of_products, "%"))
    pieces, disk = "2048 KiB pieces", "disk to pinned memory to the device"
    up = device.of(f"{pieces} to the device", "of_to_device_ceiling")
    down = device.of(f"{pieces} from the device", "of_to_host_ceiling")
    return [
        *rows,
        ("ragged 1k-128k, time over that of 8 x 32k", "at most 1.15x", longer, "x"),
        ("cascade 32k x 64, share of its byte floor", "at least 75%", cascade, "%"),
        ("seal and transcode, share of copy bandwidth", "at least 70%", copied, "%"),
        ("gather and scatter, share of copy bandwidth", "at least 90%", moved, "%"),
        ("host to device in pieces of 2 MiB, share of one copy", "at least 90%", up, "%"),
        ("device to host in pieces of 2 MiB, share of one copy", "at least 90%", down, "%"),
        (f"{disk}, share of the slower", "at least 85%", device.of(disk, "of_slower"), "%"),
        (f"{streamed}", "reported", device.of(streamed), " us"),
        ("... the same step resident", "reported", device.of(streamed, "resident_us"), " us"),
        ("... exposed copy time", "reported", device.of(streamed, "exposed_us"), " us"),
    ]


@block
def summary(results: Results) -> str:
    """What matters most of the parts."""
    stored = {(r["way"], r["what"], r["kib"]): r for r in results.get("disk_cpu", {})["rows"]}
    found = {
        (name, row["trace"], row["what"], row["group"]): row["measured"]
        for name in ("restore_cpu", "serve_cpu", "policy_cpu")
        for row in results[name]["findings"]
    }

    def finding(*key: str) -> str:
        (value,) = (v for k, v in found.items() if all(part in k for part in key))
        return figure(value)

    opened = results["disk_cpu"]["recovery_s"]
    get = stored["FlowKV", "get", 1024]
    storage, serving = "[storage](benchmarks/storage.md)", "[serving](benchmarks/serving.md)"
    restores = "[restores](benchmarks/restores.md)"
    rows = [
        [
            "pages of 1 MiB from the disk tier, checked",
            "one file a page, unchecked; RocksDB",
            f"{spread(get['x file per block'])}; {spread(get['x RocksDB'])}",
            "measured",
            storage,
        ],
        [
            f"a store of {results['disk_cpu']['frames']:,} pages opens",
            "",
            f"{opened['median']:.2f} s ({opened['min']:.2f} to {opened['max']:.2f})",
            "measured",
            storage,
        ],
        [
            "a restore, 108 cases of models and links",
            "the lower bound: median; worst",
            "; ".join(finding("108 cells", f"x bound, {end}") for end in ("median", "at worst")),
            "simulated",
            restores,
        ],
        [
            "first token, 95th percentile, 100 clients with 2,048 tokens in common",
            "without caching",
            finding("serve_cpu", "100 clients, 2,048 tokens"),
            "measured",
            serving,
        ],
        [
            "what eviction keeps, agents' trace",
            "0: leaf-first LRU, 1: Belady's optimum",
            finding("kct_dev", "mean at 0.5/1/2%"),
            "simulated; fewer live",
            "[policies](benchmarks/policies.md)",
        ],
    ]
    return table(["what", "against", "figure", "", "all of it"], rows)


@block
def real(results: Results) -> str:
    """Ten figures of a real language model."""
    report = results.get("real_cpu", {"parts": {}})
    rows = [row for part in report["parts"].values() for row in part]

    def of(what: str, name: str, unit: str, tokens: int = 0) -> str:
        """Of the row of most tokens, but no more than `tokens` if these are said."""
        found = [r for r in rows if r["what"] == what and r.get("tokens", 0) <= (tokens or 10**9)]
        row = max(found, key=lambda row: row.get("tokens", 0), default={})
        at = f" at {row['tokens']:,} tokens" if tokens and row else ""
        return between(row.get(name), unit) + at

    alone, stock = "times as fast as the model alone", "times as fast as `DynamicCache`"
    cold, step, engine = "empty compile cache", "tpot, DynamicCache / attached", "engine / generate"
    coded = [
        [
            f"perplexity with `{codec}`",
            f"more than raw; `{peer}`",
            f"{of(f'quality, {codec}', 'more_percent', '%')};"
            f" {of(f'quality, {peer}', 'more_percent', '%')}",
        ]
        for codec, peer in (("kv8", "HF HQQ, 8 bits"), ("kv4c", "HF HQQ, 4 bits"))
    ]
    compiled = [of(cold, f"{name}_cpu_s", " s") for name in ("attach", "first_generate")]
    lines = [
        ["first token, unseen prompt", alone, of("ttft, unseen", "ratio", "x", 2048)],
        ["first token, prompt asked again", alone, of("ttft, asked again", "ratio", "x", 4000)],
        ["first token, in the next process", alone, of("ttft, restarted", "ratio", "x", 4000)],
        ["a decode step, short", stock, of(step, "ratio", "x", 256)],
        ["a decode step, long", stock, of(step, "ratio", "x", 4000)],
        [
            "4 clients at once, new tokens for the same processor time",
            "one `generate` after the other; `generate_batch`",
            f"{of(f'{engine}, 4 clients', 'cpu_ratio', 'x')};"
            f" {of(f'{engine}_batch, 4 clients', 'cpu_ratio', 'x')}",
        ],
        ["on disk, a token", "", of("ttft, restarted", "store_bytes_a_token", " bytes")],
        ["the very first call", "CPU time to attach; to answer", "; ".join(compiled)],
        *coded,
    ]
    about = (
        f"{report['model']}, float32, on {report['cpus']} processors; medians, least to most."
        f" Perplexity: over {of('quality, kv8', 'tokens', '')} tokens."
        if report["parts"]
        else NOT_YET.capitalize() + "."
    )
    return f"{table(['what', 'against', 'figure'], lines)}\n\n{about}"


class Real:
    """Middle figures of the real model."""

    def __init__(self, results: Results) -> None:
        self.rows = [row for part in results["real_cpu"]["parts"].values() for row in part]

    def row(self, what: str, tokens: int | None = None) -> dict[str, Any]:
        found = (row for row in self.rows if row["what"] == what)
        return next(row for row in found if tokens in (None, row["tokens"]))

    def ratio(self, what: str, tokens: int, name: str = "ratio") -> float:
        return float(self.row(what, tokens)[name][1])

    def sooner(self, what: str) -> str:
        """How much sooner a prompt of 2,048 tokens is answered."""
        return f"{self.ratio(f'ttft, {what}', 2048):.0f} times sooner"

    def later(self, tokens: int) -> str:
        """How much later an unseen prompt is answered."""
        return f"{100 / self.ratio('ttft, unseen', tokens) - 100:.0f}% later at {tokens:,} tokens"


def _on_gpus(results: Results) -> Iterable[tuple[str, Callable[[str], str]]]:
    """Each GPU by its name, with a reader of figures by their paths."""
    for report in gpu_reports(results):
        cases = whole.cases_of(report)
        name = report["device"].removeprefix("NVIDIA ")
        yield name, lambda path, cases=cases: figure(whole.found(cases, path))


@block
def front(results: Results) -> str:
    """What each machine gains and loses, for the front page."""
    real = Real(results)
    lines = [
        [
            "SmolLM2-135M in float32, two CPU cores",
            f"first token of 2,048 asked again: {real.sooner('asked again')}; in the next process,"
            f" from disk: {real.sooner('restarted')}",
            f"first token of an unseen prompt: {real.later(2048)}, {real.later(256)}",
        ]
    ]
    for name, of in _on_gpus(results):
        faster = (
            f"a token at 2,048 tokens: {of('attached 2048/tpot_ms')} ms, with its own cache"
            f" {of('plain 2048/tpot_ms')}; first token of 32,768 asked again:"
            f" {of('attached 32768 again/ttft_ms')} ms, computed {of('plain 32768/ttft_ms')}"
        )
        slower = (
            f"first token of 512: {of('attached 512/ttft_ms')} ms instead of"
            f" {of('plain 512/ttft_ms')}; of 2,048 asked again:"
            f" {of('attached 2048 again/ttft_ms')} instead of {of('plain 2048/ttft_ms')}"
        )
        lines.append([f"Llama 8B, random weights in bf16, one {name}", faster, slower])
    return table(["measured on", "faster", "slower"], lines)


@block
def real_all(results: Results) -> str:
    """All that was measured of the real model, less what the next table shows."""
    rows = [
        row
        for name, part in results.get("real_cpu", {"parts": {}})["parts"].items()
        for row in part
        if name != "quality"
    ]
    if not rows:
        return NOT_YET.capitalize() + "."
    others: list[str] = []
    timed: dict[str, dict[int, str]] = {}
    engine: dict[str, dict[str, str]] = {}
    tokens = sorted({row["tokens"] for row in rows if _timed(row)})
    for row in rows:
        wrong = "**other tokens**, " if row.get("identical") is False else ""
        if _timed(row):
            ms = f"{_middle(row['plain_ms'])}, {_middle(row['attached_ms'])}"
            line = timed.setdefault(row["what"], dict.fromkeys(tokens, ""))
            line[row["tokens"]] = f"{wrong}{ms}, {between(row['ratio'], '')}"
        elif clients := re.search(r", (\d+ clients)", row["what"]):
            ratios = f"{between(row['ratio'], '')}; {between(row['cpu_ratio'], '')}"
            way = engine.setdefault(row["what"].replace(clients[0], ""), {})
            way[clients[1]] = f"{wrong}{ratios}"
        else:
            at = f", {row['tokens']:,} tokens" if "tokens" in row else ""
            less = "what", "tokens", "identical", "loaded_bytes", "rss_beyond_pool_mib"
            others.append(f"- {row['what']}{at}: {wrong}{', '.join(_named(row, *less))}")
    by_tokens = [[what, *line.values()] for what, line in timed.items()]
    head = ["plain ms, attached ms, ratio", *(f"{count:,} tokens" for count in tokens)]
    parts = [table(head, by_tokens), "\n".join(others)]
    if engine:
        numbers = list(dict.fromkeys(name for line in engine.values() for name in line))
        by_clients = [[what, *(line[name] for name in numbers)] for what, line in engine.items()]
        parts.append(table(["ratio; of processor time", *numbers], by_clients))
    return "\n\n".join(parts)


def _timed(row: dict[str, Any]) -> bool:
    """Whether a row is two times and their ratio, and nothing else."""
    return {"plain_ms", "attached_ms", "ratio"} <= row.keys() and "store_bytes_a_token" not in row


def _middle(value: Any) -> str:
    return "" if value is None else figure(value[1] if isinstance(value, list) else value)


def _named(row: dict[str, Any], *less: str) -> Iterable[str]:
    for name, value in row.items():
        if name not in less:
            yield f"{name.replace('_', ' ')} {_said(value)}"


def _said(value: Any) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else between(value, "")


@block
def engines(results: Results) -> str:
    """FlowKV inside vLLM; rows that differ in a percentage of their names alone are one line."""
    alike: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for part in results.get("engines_cpu", {"parts": {}})["parts"].values():
        for row in part:
            size = re.search(r"(?<= at )\d+(?= %)", row["what"])
            base = row["what"].replace(size[0], "N", 1) if size else row["what"]
            alike.setdefault(base, []).append((size[0] if size else "", row))
    lines = []
    for base, same in alike.items():
        sizes, rows = zip(*same, strict=True)
        figures = {
            name: ", ".join(between(row[name], "") for row in rows)
            for name in rows[0]
            if name not in ("what", "goal", "wrong", "prompts", "p50", "cached", "all fits")
            and not name.endswith(" ms")
        }
        measured = figures.pop("figure")
        more = "; ".join(f"{name.replace('_', ' ')} {values}" for name, values in figures.items())
        what = base.replace("N", "/".join(sizes), 1) if sizes[0] else base
        lines.append([what, rows[0]["goal"], measured, more])
    return (
        table(["what", "goal", "measured", "more"], lines) if lines else NOT_YET.capitalize() + "."
    )


@block
def real_quality(results: Results) -> str:
    lines = [
        [
            row["what"].removeprefix("quality, "),
            f"{row['bits']:.2f}",
            f"{row['perplexity']:.4f}",
            between(row["more_percent"], "%"),
            f"{row['agreement_percent']:.2f}%",
            f"at most {row['goal_percent']}%" if "goal_percent" in row else "",
        ]
        for row in results.get("real_cpu", {"parts": {}})["parts"].get("quality", [])
    ]
    head = ["cache", "bits an element", "perplexity", "more than exact", "agreement", "goal"]
    return table(head, lines) if lines else NOT_YET.capitalize() + "."


def between(value: Any, unit: str) -> str:
    """A figure, or the middle one of three and its ends."""
    if not isinstance(value, list):
        return figure(value, unit if value is not None else "")
    least, middle, most = map(figure, value)
    return f"{middle}{unit} ({least} to {most})"


@block
def targets(results: Results) -> str:
    reports = gpu_reports(results)
    devices = [Device(report) for report in reports] or [Device(None)]
    names = [report["device"] for report in reports] or ["measured"]
    columns = [goals(device) for device in devices]
    rows, missing = [], 0
    for i, (what, target, _, _) in enumerate(columns[0]):
        cells = [figure(column[i][2], column[i][3]) for column in columns]
        if reports and all(column[i][2] is None for column in columns):
            missing += 1
        else:
            rows.append([what, target, *cells])
    text = table(["what", "target", *names], rows)
    if missing:
        text = f"{text}\n\n{missing} more targets are {NOT_YET}."
    return text


@block
def gpu(results: Results) -> str:
    reports = gpu_reports(results)
    if not reports:
        return "No GPU has run this yet."
    return "\n\n".join(map(_gpu, reports))


def _gpu(report: dict[str, Any]) -> str:
    limits = report["ceilings"]
    head = (
        f"### {report['device']}\n\n"
        f"{report['label'].capitalize()} on {report['date']}, torch {report['torch']},"
        f" Triton {report['triton']}. Ceilings of the same run: reads"
        f" {limits['read_bytes_s'] / 1e12:.2f} TB/s, copies {limits['copy_bytes_s'] / 1e12:.2f}"
        f" TB/s, bf16 products {limits['bfloat16_flop_s'] / 1e12:.0f} TFLOP/s."
    )
    rows: list[list[str]] = []
    skipped: dict[str, set[str]] = {}
    for row in report["results"]:
        if "us" not in row:
            verdict = "**wrong**" if row.get("wrong") else row.get("failed", NOT_YET)
            rows.append([row["case"], verdict, "", ""])
            continue
        shares = [(row[name], name) for name in row if name.startswith("of_") and row[name]]
        share, name = max(shares, default=(None, ""))
        shown = f"{figure(share, '%')} {name[3:-8]}" if name else ""
        others = []
        for name, rival in row.get("rivals", {}).items():
            if "us" in rival:
                others.append(f"{name} {figure(rival['times'])}x")
            else:
                skipped.setdefault(rival["skipped"], set()).add(name)
        rows.append([row["case"], figure(row["us"]), shown, ", ".join(others)])
    columns = ["case", "us", "of its ceiling", "others take"]
    head = f"{head}\n\n" + table(columns, _by_kind(rows))
    notes = "\n".join(f"- {'; '.join(sorted(skipped[why]))}: {why}" for why in sorted(skipped))
    return f"{head}\n\nSkipped:\n\n{notes}" if notes else head


def _by_kind(rows: list[list[str]]) -> list[list[str]]:
    """Return measured cases that differ in a codec or a size alone as one line each."""
    alike: dict[str, list[list[str]]] = {}
    for case, us, *rest in rows:
        kind = re.search(r" (kv8|k8v4|kv4[ch]|raw)$|^\d+(?= KiB)", case)
        measured = us.replace(",", "").replace(".", "").isdigit()
        base = case.replace(kind[0], " N" if kind[1] else "N", 1) if kind and measured else case
        alike.setdefault(base, []).append([kind[0].strip() if kind else "", us, *rest])
    return [
        [base.replace("N", "/".join(kinds), 1) if kinds[0] else base]
        + ["; ".join(filter(None, cells)) for cells in others]
        for base, same in alike.items()
        for kinds, *others in (list(zip(*same, strict=True)),)
    ]


@block
def gpu_whole(results: Results) -> str:
    """Return the lines of `bench.gpu --whole` with a figure, but for kernels (see `targets`)."""
    texts = []
    for report in gpu_reports(results):
        cases = {row["case"]: row for row in report["rows"]} | {"ceilings": report["ceilings"]}
        rows = []
        for line in whole.TABLE:
            value, below = whole.found(cases, line.of), whole.found(cases, line.over)
            if value is not None and (below or not line.over):
                value = value / below if below else value
                shown = f"{value:.3g}" if value < 1e5 else f"{value:.2g}"
                rows.append([line.what, shown, line.goal])
        head = ["", report["device"], "goal"]
        texts.append(table(head, _by_length(rows)))
    return "\n\n".join(texts) or NOT_YET.capitalize() + "."


def _by_length(rows: list[list[str]]) -> list[list[str]]:
    """The lines of one measure at several numbers (of tokens, of a prompt) as one line."""
    alike: dict[tuple[str, str], list[tuple[str, list[str]]]] = {}
    for what, *cells, goal in rows:
        number = re.search(r"(?<=, )\d+$|(?<=prompt )\d+", what)
        base = what.replace(number[0], "N", 1) if number else what
        alike.setdefault((base, goal), []).append((number[0] if number else "", cells))
    return [
        [
            base.replace("N", "/".join(number for number, _ in same)) if same[0][0] else base,
            *map(", ".join, zip(*(cells for _, cells in same), strict=True)),
            goal,
        ]
        for (base, goal), same in alike.items()
    ]


@block
def cold(results: Results) -> str:
    rows = results.get("cold_cpu", {}).get("rows", [])
    bounds = list(dict.fromkeys(row["bound"] for row in rows))
    lines: dict[str, list[str]] = {}
    for row in rows:
        said = f"{row['bits']:.2f}, {row['kl']:.4f}, {row['same_token']:.3f}"
        said += f", {100 * row['perplexity']:+.1f}%"
        lines.setdefault(row["text"], [f"{row['text']}, {row['tokens']:,.0f}"]).append(said)
    head = ["text, tokens judged", *(x if x == "kv4c" else f"at most {x:g}" for x in bounds)]
    return table(head, [*lines.values()]) if lines else NOT_YET


@block
def longtasks(results: Results) -> str:
    """For each task and way: right answers; for each length and text: divergence, same tokens."""
    parts = []
    for head, rows in results.get("longtasks_cpu", {}).get("tables", []):
        if "KL" not in head:
            shares: dict[str, list[list[str]]] = {}
            for n, one in enumerate(head[2:], 2):
                task, _, tokens = one.partition(":")[0].partition(", ")
                cells = [row[n].partition(" ")[0] for row in rows]
                shares.setdefault(task, []).append([tokens, *cells])
            lengths = [[task, *map(", ".join, zip(*some))] for task, some in shares.items()]  # noqa: B905
            parts.append(table(["task", "tokens", *(row[0] for row in rows)], lengths))
            continue
        lines: dict[str, dict[str, str]] = {}
        widest = 0.0
        for row in rows:
            cell = dict(zip(head, row, strict=True))
            bits = f", {cell['bits']} bits" * bool(cell["bits"])
            kl, *ends = (float(number.strip("[],")) for number in cell["KL"].split())
            widest = max(widest, *(abs(end - kl) / kl for end in ends))
            same = cell["same token"].partition(" ")[0]
            way = f"{cell['context']}, {cell['way']}{bits}"
            lines.setdefault(way, {})[cell["text"]] = f"{kl:.3g}, {same}"
        texts = list(dict.fromkeys(row[0] for row in rows))
        ways = [[way, *(line.get(text, "") for text in texts)] for way, line in lines.items()]
        parts.append(table(["tokens; KL, same token", *texts], ways))
        parts.append(f"95% intervals of KL, by bootstrap over prompts: at most {widest:.0%} off.")
    return "\n\n".join(parts) or NOT_YET


_WAYS = "pages", "pages and dense", "dense", "native"
_PROMPTS = dict(causal="text", seq2seq="text, encoded", image="text with images", audio="audio")
_REASONS = {
    "MiniMax uses cache of its own": "has a cache of its own",
    "weakref": "holds an LSTM, whose weak references no name covers",
    "ModuleList": "reads codebooks in place of tokens",
    "rnn_state": "has no keys or values to page",
    "get_input_embeddings": "has no input embeddings that transformers finds",
    "cannot run a few tokens": "takes no prompt of text alone",
    "does not continue": "goes on from its cache in another way than it answers in one pass",
    "no layer keeps": "has no keys or values to page",
    "put no keys": "has no keys or values to page",
    "more than keys": "keeps more than keys and values",
    "during a forward": "changes itself in each forward; served with `revision=`",
    "other windows": "masks other tokens than its cache keeps",
    "cache of its own": "has a cache of its own",
    "an empty DynamicCache": "has a cache of its own",
    "do not count from 0": "counts its positions from elsewhere",
}


@block
def architectures(results: Results) -> str:
    found = results.get("architectures", {}).get("rows", [])
    if not found:
        return NOT_YET.capitalize() + "."
    head = ["architectures of", "all", "other tokens", "with media", *_WAYS]
    lines = []
    for kind, words in _PROMPTS.items():
        rows = [row for row in found if row[0] == kind]
        sames = [row[6] for row in rows]
        ways = [str(sum(row[2] == way for row in rows)) for way in _WAYS]
        media = sum(bool(row[5]) for row in rows)
        counts = [str(n) for n in (len(rows), sames.count(False), media)]
        lines.append([words, *counts, *ways])
    native: dict[str, list[str]] = {}
    for _, name, way, why, *_ in found:
        if way == "native":
            reason = next((words for part, words in _REASONS.items() if part in why), why)
            native.setdefault(reason, []).append(name)
    unbuilt = dict.fromkeys(row[1] for row in found if row[6] is None)
    listed = ["Left to their own caches, as the model:", "", *_by_reason(native)]
    named = f"Not built small: {', '.join(unbuilt)}."
    return "\n\n".join([table(head, lines), "\n".join(listed), named])


def _by_reason(names: dict[str, list[str]]) -> list[str]:
    return [f"- {', '.join(dict.fromkeys(each))}: {reason}" for reason, each in names.items()]


@block
def quality(results: Results) -> str:
    report = results.get("quality_cpu", {})
    alike: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in [row for part in ("codecs", "auto") for row in report.get(part, {}).get("rows", [])]:
        if row.get("target") is None and not row["codec"].endswith("lost"):
            continue
        target = "" if row.get("target") is None else f"at most {row['target']}"
        alike.setdefault((row["task"], row["codec"], target), []).append(row)
    rows = [
        [
            task,
            codec,
            ", ".join(f"{row['page_size']}" for row in same),
            ", ".join(map(difference, same)),
            ", ".join(figure(row["bytes_of_float32"], "x") for row in same),
            target,
        ]
        for (task, codec, target), same in alike.items()
    ]
    head = ["bits per byte of", "codec", "page", "more than raw", "smaller", "target"]
    return table(head, rows) if rows else NOT_YET.capitalize() + "."


def difference(row: dict[str, Any]) -> str:
    return f"{row['delta_bits']:+.4f} ± {row['two_errors']:.4f}"


def spread(values: dict[str, float] | None) -> str:
    if not values:
        return ""
    return f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


@block
def ring(results: Results) -> str:
    found = results.get("ring_cpu", {}).get("rows", [])
    cells: dict[tuple[str, int], dict[str, list[str]]] = {}
    for row in found:
        busy = f"{row['busy_of_crowded']['median']:.2f}"
        cost = f"{row['cpu_of_fio']['median']:.2f}"
        ways = cells.setdefault((row["engine"], row["kib"]), {})
        ways[row["op"]] = [spread(row["of_fio"]), cost, busy]
    rows = [
        [engine, str(kib), *cells[engine, kib]["read"], *cells[engine, kib]["write"]]
        for engine, kib in sorted(cells)
    ]
    head = ["engine", "KiB", "reads, of fio", "processor time, of fio", "busy"]
    return table([*head, "writes, of fio", *head[3:]], rows) if rows else NOT_YET.capitalize() + "."


@block
def disk(results: Results) -> str:
    found = results.get("disk_cpu", {})
    cells = {(row["way"], row["what"], row["kib"]): row for row in found.get("rows", [])}
    rivals, rows = ("file per block", "RocksDB"), []
    for (way, what, kib), row in cells.items():
        if way != "FlowKV" or what not in ("put", "get"):
            continue
        line = [what, f"{kib}", _disk_rates(row)]
        line += [spread(row.get(f"x {name}")) for name in rivals]
        more = ("deep", "busy") if what == "get" else ("", "busy put")
        rows.append([*line, *(_disk_rates(cells.get((way, kind, kib))) for kind in more)])
    if not rows:
        return NOT_YET.capitalize() + "."
    seconds = found["recovery_s"]
    head = ["what", "KiB", "GB/s, CPU s/GB, of fio", *(f"x {name}" for name in rivals)]
    return (
        f"{table([*head, 'deep', 'busy'], rows)}\n\nA store of {found['frames']:,} frames opens in"
        f" {seconds['median']:.2f} s ({seconds['min']:.2f} to {seconds['max']:.2f})."
    )


def _disk_rates(row: dict[str, Any] | None) -> str:
    names = ("gb_s", "cpu_s_per_gb", "of_fio")
    rates = [f"{row[name]['median']:.2f}" for name in names] if row else []
    if row and "busy_of_idle" in row:
        rates.append(f"{row['busy_of_idle']['median']:.2f} of idle")
    return ", ".join(rates)


@block
def remote(results: Results) -> str:
    rows = []
    for engine, found in results.get("remote_cpu", {}).items():
        for size in found["sizes"]:
            kib = size["bytes"] >> 10
            ratios = [
                f"{size[way]['ratio']:.2f} ({size[way]['spread'][0]:.2f} to"
                f" {size[way]['spread'][1]:.2f})"
                for way in ("get", "put")
            ]
            late = found["stopped"]["late_ms"] if size is found["sizes"][0] else None
            rows.append([engine, str(kib), *ratios, f"{late['p99']:.1f}" if late else ""])
    head = ["engine", "KiB", "get, of its client", "put, of its client", "late, ms p99"]
    return table(head, rows) if rows else NOT_YET.capitalize() + "."


@block
def policy(results: Results) -> str:
    report = results.get("policy_cpu", {})
    parts = []
    for group, title in GROUPS.items():
        if group == "floor":  # newer replays: explain/policies.md
            continue
        found = [row for row in report.get("findings", []) if row["group"] == group]
        if found:
            lines = [_promises(rows) for rows in _by_size(found)]
            parts.append(f"### {title}\n\n{_promised(lines)}")
    if not parts:
        return NOT_YET.capitalize() + "."
    return "\n\n".join([*parts, f"Costs were measured on {report['machine']}."])


@block
def states(results: Results) -> str:
    """Hits and bytes of recurrent states by rule, for each trace, and of the default by model."""
    rows = results.get("states_cpu", {}).get("rows", [])
    parts = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        own = [row for row in rows if row["trace"] == trace and row["model"] == "qwen3-next"]
        rooms = [room for room in (0.0, 0.01) if any(row["room"] == room for row in own)]
        if len(rooms) == 1:  # its bytes are in the last line
            continue
        heads = ["any bytes" if not room else f"at most {room:.0%}" for room in rooms]
        cells = {(row["rule"], row["room"]): _state_cell(row) for row in own}
        rules = dict.fromkeys(row["rule"] for row in own)
        lines = [[rule, *(cells[rule, room] for room in rooms)] for rule in rules]
        title = f"### {trace}: {own[0]['requests']:,} requests, Qwen3-Next"
        parts.append(f"{title}\n\n{table(['rule', *heads], lines)}")
    by_model: dict[str, list[str]] = {}
    for row in rows:
        if row["rule"] == "auto" and not row["room"]:
            by_model.setdefault(row["model"], []).append(f"{row['bytes']:.2%}")
    if not parts:
        return NOT_YET.capitalize() + "."
    models = "; ".join(f"{name} {', '.join(cells)}" for name, cells in by_model.items())
    return "\n\n".join([*parts, f"Bytes of `auto` at any bytes, trace by trace: {models}."])


def _state_cell(row: dict[str, Any]) -> str:
    return f"{row['of_attention']:.2%} at {row['bytes']:.2%}, {row['stops']:.2f}"


@block
def restore(results: Results) -> str:
    report = results.get("restore_cpu", {})
    rows = msgspec.convert(report.get("rows", []), list[Row])
    if not rows:
        return NOT_YET.capitalize() + "."
    lines = []
    for part in dict.fromkeys(row.part for row in rows):
        told = {one.policy: one for one in summaries([row for row in rows if row.part == part])}
        ends = [
            f"{one.median:.2f}, {one.largest:.2f}" if one else "" for one in map(told.get, SHOWN)
        ]
        lines.append([PARTS[part], *ends, f"{told[OURS].best} of {told[OURS].cells}"])
    promised = _promised([_promise(row) for row in report["findings"]])
    compared = table(["x bound: median, worst", *SHOWN, "fastest"], lines)
    return "\n\n".join([promised, compared, f"Run on {report['machine']}."])


@block
def serve(results: Results) -> str:
    report = results.get("serve_cpu", {})
    if not report:
        return NOT_YET.capitalize() + "."
    promised = []
    for group, title in SERVED.items():
        found = [_promise(row) for row in report["findings"] if row["group"] == group]
        promised += [
            [f"{title}: {row[0]}" if row is found[0] else row[0], *row[1:]] for row in found
        ]
    parts = [f"### Promises (measured)\n\n{_promised(promised)}"]
    rows = msgspec.convert(report["rows"], list[Served])
    compared: dict[tuple[str, ...], list[str]] = {}
    for part in dict.fromkeys(row.part for row in rows):
        own = [row for row in rows if row.part == part]
        systems = dict.fromkeys(row.baseline or "engine" for row in own)
        if len({(row.baseline, row.scheduler) for row in own}) > 1:
            compared.setdefault(tuple(systems), []).append(part)
    for same in compared.values():
        title = ". ".join(SERVING[part] for part in same)
        parts.append(f"{title}.\n\n{_served([row for row in rows if row.part in same])}")
    if reasons := report["advice"]["reasons"]:
        settings = ", ".join(reason.partition(":")[0] for reason in reasons)
        parts.append(f"Recommended for this load: {settings}.")
    return "\n\n".join([*parts, f"Run on {report['machine']}."])


SHOWN_CLIENTS = (1, 4, 16, 100)
"""Numbers of clients with a line where nothing else differs."""
HIDDEN_LOADS = ("25% shared", "75% shared")
"""Loads between two others, without a line."""


def _served(rows: list[Served]) -> str:
    """A line for each load; for each system tokens/s, first tokens (p50 to p95), a token (p50).

    Where the engine alone served, its schedulers are the columns.
    """
    systems = {row.baseline or "engine" for row in rows}
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        column = row.baseline or "engine"
        load = served_situation(row).removeprefix(column).removeprefix(", ")
        if systems == {"engine"}:
            column, _, load = load.partition(", ")
        first = f"{1e3 * row.ttft_p50_s:,.0f}-{1e3 * row.ttft_p95_s:,.0f}"
        line = lines.setdefault((load, row.concurrency), {})
        line[column] = f"{row.tokens_per_s:,.0f}; {first}; {1e3 * row.tpot_p50_s:.1f}"
    columns = list(dict.fromkeys(name for line in lines.values() for name in line))
    named = any(load for load, _ in lines)
    cells = [
        [*([load] if named else []), f"{clients}", *(line.get(name, "") for name in columns)]
        for (load, clients), line in lines.items()
        if load not in HIDDEN_LOADS and (named or clients in SHOWN_CLIENTS)
    ]
    return table([*(["load"] if named else []), "clients", *columns], cells)


def _promised(lines: list[list[str]]) -> str:
    """Return promises as a table, or as a list where all are met or have one target.

    What all of them share stands above it once.
    """
    head, said = ["on", "what", "target", "figure", "", "note"], []
    columns = dict(zip(head, zip(*lines, strict=True), strict=True))
    if len(lines) > 1 and len(set(columns["what"])) == 1:
        said.append(f"Figures: {columns.pop('what')[0]}.")
        lines = [[on, "", *rest] for on, _, *rest in lines]
    if len(lines) > 1 and len(set(columns["target"])) == 1:
        said.append(f"Target: {columns.pop('target')[0]}.")
        lines = [[on, what, "", *rest] for on, what, _, *rest in lines]
    if met := set(columns[""]) == {"met"}:
        said.append("All met." if len(lines) > 1 else "Met.")
        del columns[""]
    if "target" not in columns:
        return " ".join([*said, "; ".join(map(_sentence, lines)) + "."])
    if met:
        return " ".join(said) + "\n\n" + "\n".join(f"- {_sentence(line)}" for line in lines)
    if not any(columns["note"]):
        del columns["note"]
    shown = table(columns, zip(*columns.values(), strict=True))
    return f"{' '.join(said)}\n\n{shown}" if said else shown


def _sentence(line: list[str]) -> str:
    """Return one promise; notes are those of a target of its own, or of a missed one."""
    on, what, target, measured, met, note = line
    more = [target, note] if target else [] if met == "met" else [met, note]
    name = ", ".join(filter(None, (on, what)))
    shown = "; ".join(filter(None, more))
    return f"{name}: {measured} ({shown})" if shown else f"{name}: {measured}"


def _promise(row: dict[str, Any]) -> list[str]:
    return [
        row["trace"],
        row["what"],
        f"{row['sense']} {row['target']:.4g}",
        figure(row["measured"]),
        {True: "met", False: "**missed**", None: ""}[row["met"]],
        row["note"].partition(";")[0],
    ]


SIZE = re.compile(r"(?<=at )[\d.]+(?=%)")


def _by_size(found: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Findings that differ in the cache's size alone, together."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found:
        alike.setdefault((row["trace"], SIZE.sub("", row["what"])), []).append(row)
    return list(alike.values())


def _promises(rows: list[dict[str, Any]]) -> list[str]:
    """One line of findings that differ in the cache's size alone."""
    if len(rows) == 1:
        return _promise(rows[0])
    sizes = [SIZE.search(row["what"])[0] for row in rows]  # type: ignore[index]
    targets = list(dict.fromkeys(f"{row['target']:.4g}" for row in rows))
    missed = [size for size, row in zip(sizes, rows, strict=True) if row["met"] is False]
    notes = dict.fromkeys(row["note"] for row in rows if row["note"])
    same = notes and len({note.partition(" ")[2] for note in notes}) == 1
    counts = ", ".join(note.partition(" ")[0] for note in notes)
    return [
        rows[0]["trace"],
        SIZE.sub("/".join(sizes), rows[0]["what"]),
        f"{rows[0]['sense']} {', '.join(targets)}",
        ", ".join(figure(row["measured"]) for row in rows),
        f"**missed** at {', '.join(missed)}%" if missed else "met",
        f"{counts} {next(iter(notes)).partition(' ')[2]}" if same else "; ".join(notes),
    ]


def render(page: str, results: Results) -> str:
    """The page with all its blocks written anew."""
    for name in re.findall(r"<!-- begin: (\w+) -->", page):
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n\n{BLOCKS[name](results)}\n\n{end}{after}"
    return page


def files(results: Results) -> dict[Path, str]:
    """What is written, by where it lies."""
    drawn = {ROOT / "docs" / name: svg for name, svg in plots(results).items()}
    return {page: render(page.read_text(), results) for page in PAGES} | drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    written = files(load())
    if args.check:
        return int(any(path.read_text() != text for path, text in written.items()))
    for path, text in written.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
