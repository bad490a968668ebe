"""A whole run: what compiles and what tests first, side by side; then what is timed, alone.

Parts run in processes of their own (`bench/gpu/part.py`), so that one that hangs, is killed or
leaves the device in ruins costs itself alone: it is noted, and the rest goes on in a new process.
All that is known is written after each row, and the table shows what is there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
SECONDS = {
    "warm": 115.0,
    "tests": 115.0,
    "plain": 45.0,
    "attached": 45.0,
    "pressure": 60.0,
    "path": 40.0,
    "engine": 50.0,
    "kernels": 60.0,
    "batch": 40.0,
    "codecs": 30.0,
    "ungraphed": 30.0,
    "static": 75.0,
}
"""Most that a part may take; those that are timed in their order, the most wanted first."""
START_S = 60.0
"""Until a process has imported what it needs."""
LENGTHS = (512, 2048, 8192, 32768)
CHILD = (sys.executable, "-m", "bench.gpu", "--parts")


class Figure(NamedTuple):
    """A line of the table.

    Attributes:
        today: What an H200 showed before steps were graphs (transformers 5.17, torch 2.11).
        of: The case and the keys in its row that lead to the figure, between slashes.
        over: Those of another figure that this one is divided by.
    """

    what: str
    today: str
    goal: str
    of: str
    over: str = ""


A, B, BATCH = "decode 32 x 4k", "decode 1 x 128k", "batch 16 x 2048"
FEW, MANY = "<= 1.05", ">= 2.5"
LONG, STATIC = "plain 8192/ttft_ms", "static batch/tokens_per_s"
UP = "KiB pieces to the device/of_to_device_ceiling"
TENSOR_CORES = "FlashInfer, tensor cores"


def per_length(what: str, today: str, goal: str, of: str, over: str = "") -> list[Figure]:
    """A line for each length, which replaces N."""
    return [
        Figure(f"{what}, {n}", before, goal, of.replace("N", f"{n}"), over.replace("N", f"{n}"))
        for n, before in zip(LENGTHS, today.split(), strict=True)
    ]


TABLE = (
    *per_length(
        "a token: plain's time over attached's",
        *(".58 .80 .72 .95", MANY, "plain N/tpot_ms", "attached N/tpot_ms"),
    ),
    *per_length("a token, attached, ms", "40.0 34.4 35.7 38.4", "10", "attached N/tpot_ms"),
    *per_length("a token, plain, ms", "23.2 27.7 25.8 36.7", "", "plain N/tpot_ms"),
    *per_length(
        "a token without graphs: plain's time over it",
        *("- - - -", ">= .95", "plain N/tpot_ms", "without graphs N/tpot_ms"),
    ),
    *per_length(
        "first token, unseen, over plain",
        *("2.2 1.4 1.15 1.36", FEW, "attached N/ttft_ms", "plain N/ttft_ms"),
    ),
    *per_length(
        "asked again, in tokens",
        *("1.7 1.7 1.7 2.0-2.8", "<= 1.5", "attached N again/ttft_ms", "attached N/tpot_ms"),
    ),
    Figure("100 tokens behind 2048 known ones, ms", "-", "", "attached 2048, next turn/ttft_ms"),
    *(
        Figure(f"pool full: prompt {i} over plain", t, FEW, f"pool full {i}/ttft_ms", LONG)
        for i, t in enumerate(("-", "-", "74", "3.1", "2.1", "-", "-", "-"))
    ),
    *(
        Figure(f"from the host: prompt {i}, ms", t, "<= 60", f"from the host {i}/ttft_ms")
        for i, t in ((0, "1063"), (1, "1252"), (3, "1272"), (2, "-"), (4, "-"))
    ),
    *(
        Figure(
            f"pages of {n} KiB {way}, of the link", t, ">= .85", f"pages of {n} KiB {way}/of_link"
        )
        for n in (256, 2048, 4096)
        for way, t in (("out", ".03"), ("back", ".04 to .16"))
    ),
    Figure("pages lost on the way", "254 to 463", "0", "tier host/dropped"),
    Figure("engine, 32 clients, tokens/s", "320 to 434", "2000", "engine/tokens_per_s"),
    Figure("... over one static batch", "1.0 to 1.4", ">= 5", "engine/tokens_per_s", STATIC),
    Figure(
        "... over generate_batch", "-", "", "engine/tokens_per_s", "generate_batch/tokens_per_s"
    ),
    Figure("... time to the first token, p50, s", "1.36 to 1.47", "<= .4", "engine/ttft_p50_s"),
    Figure("... prompts known, tokens/s", "301", "", "engine, prompts known/tokens_per_s"),
    Figure(
        "a token of a static cache, compiled, 2048, ms", "-", "", "static compiled 2048/tpot_ms"
    ),
    Figure(f"a step, plain {BATCH}, ms", "30.7", "", f"plain {BATCH}/tpot_ms"),
    *(
        Figure(f"a step, {codec} {BATCH}, ms", today, "12", f"{BATCH} {codec}/tpot_ms")
        for codec, today in (("raw", "45.7"), ("kv8", "-"), ("kv4c", "-"))
    ),
    *(
        Figure(f"{codec} 8192: {what}, ms", today, goal, f"{codec} 8192/{key}")
        for codec, what, today, goal, key in (
            ("kv8", "a token", "38.6", "10", "tpot_ms"),
            ("kv8", "first token", "3100", "250", "ttft_ms"),
            ("kv4c", "a token", "62.2", "10", "tpot_ms"),
            ("kv4c", "first token", "3300", "250", "ttft_ms"),
        )
    ),
    Figure("attach, s", "5.7", "1", "attached: attach/s"),
    Figure(f"{A}, of read ceiling", ".90", ">= .92", f"{A}/of_read_ceiling"),
    Figure(f"{B}, of read ceiling", ".81", ">= .90", f"{B}/of_read_ceiling"),
    Figure(f"{A}: FlashInfer's over ours", ".96", ">= 1.02", f"{A}/rivals/{TENSOR_CORES}/times"),
    *(
        Figure(f"{A} {codec}: raw over it", today, f">= {goal}", f"{A} {codec}/times")
        for codec, today, goal in zip(
            ("kv8", "k8v4", "kv4c", "kv4h"),
            ("1.35", "1.41", "1.25", "1.50"),
            (1.8, 2.3, 3.0, 3.0),
            strict=True,
        )
    ),
    *(
        Figure(f"prefill {n}, of matmul ceiling", today, goal, f"prefill 1 x {n}/of_matmul_ceiling")
        for n, today, goal in (("2k", ".37", ">= .55"), ("16k", ".56", ">= .70"))
    ),
    *(
        Figure(f"transcode {x}, of a copy", today, ">= .7", f"transcode {x}/of_copy_ceiling")
        for x, today in (("raw to kv8", "1.10"), ("raw to kv4c", ".29"), ("kv8 to kv4c", ".11"))
    ),
    *(
        Figure(f"{x} KiB pieces up, of the link", today, ">= .9", f"{x} {UP}")
        for x, today in ((2048, ".92"), (256, ".13"), (16, ".18"))
    ),
    Figure("cold pages: a core's time over the device's", "-", ">= 10", "cold pages/times"),
    Figure("GPU tests that pass", "387", "all", "GPU tests/passed"),
    Figure("GPU tests that fail", "2", "0", "GPU tests/failed"),
)


def found(cases: dict[str, Row], path: str) -> float | None:
    """The figure at the end of a path."""
    at: Any = cases
    for key in path.split("/"):
        at = at.get(key) if isinstance(at, dict) else None
    return at if isinstance(at, int | float) and not isinstance(at, bool) else None


def cases_of(report: Row) -> dict[str, Row]:
    """Return the rows of a report by their cases, and its ceilings as one."""
    cases = {row["case"]: row for row in report["results"] + report["rows"]}
    return cases | {"ceilings": report.get("ceilings", {})}


def table(report: Row) -> str:
    """A report beside the figures of today and the goals, and what went wrong on its way."""
    cases = cases_of(report)
    lines = [("", report.get("device", "no device")[-16:], "H200 before", "goal")]
    for figure in TABLE:
        value = found(cases, figure.of)
        if figure.over:
            below = found(cases, figure.over)
            value = value / below if value and below else None
        shown = "-" if value is None else f"{value:.3g}" if value < 1e5 else f"{value:.2g}"
        lines.append((figure.what, shown, figure.today, figure.goal))
    width = max(len(line[0]) for line in lines)
    text = [f"{a:{width}} {b:>16} {c:>15} {d:>8}" for a, b, c, d in lines]
    for part in report["parts"]:
        why = f" FAILED: {part['failed']}" if "failed" in part else ""
        text.append(f"{part['part']}: {part['s']:.0f} s{why}")
    text += [
        f"{case}: {row.get('failing') or row.get('failed') or 'WRONG ANSWER'}"
        for case, row in cases.items()
        if row.get("wrong") or row.get("failed")
    ]
    return "\n".join(text)


class Process:
    """A process whose lines are read as they come, and which is killed once its time is over.

    Args:
        command: What to run, in the project's folder.
        seconds: That it has, until `until` gives it others.
        alone: Whether it has the machine to itself: else it computes with one thread.
    """

    def __init__(self, command: Sequence[str], seconds: float, *, alone: bool) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as it runs
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ if alone else os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._timer = threading.Timer(seconds, self.kill)
        self.until(seconds)

    def until(self, seconds: float) -> None:
        """From now on it has so many seconds."""
        self._timer.cancel()
        self._seconds, self._late = seconds, False
        self._timer = threading.Timer(seconds, self.kill)
        self._timer.daemon = True
        self._timer.start()

    def kill(self) -> None:
        """End it and all that it started, unless it has ended."""
        if self._process.returncode is None:
            self._late = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def __iter__(self) -> Iterator[str]:
        with self._errors, self._process:
            assert self._process.stdout is not None
            yield from self._process.stdout
            self._process.wait()
            self._timer.cancel()
            self._errors.seek(0)
            self._said = self._errors.read()[-500:].strip()

    def why(self) -> str:
        """Why it ended, as far as anything can be said."""
        if self._late:
            return f"It was stopped after {self._seconds:.0f} s."
        return f"Exit status {self._process.returncode}: {self._said}"


class Whole:
    """One run of all parts.

    Args:
        out: Folder for the report.
        seconds: That all of it may take.
        dry: Whether it runs on the CPU, tiny.
        only: The parts to run.
        child: The command that runs parts, whose names follow.
    """

    def __init__(
        self,
        out: Path,
        seconds: float,
        *,
        dry: bool,
        only: Sequence[str] = tuple(SECONDS),
        child: Sequence[str] = CHILD,
    ) -> None:
        self.out, self.dry, self._only, self._child = out, dry, only, child
        self._end_s = time.monotonic() + seconds
        self.report: Row = {"bench": "gpu", "results": [], "rows": [], "parts": []}
        self._lock = threading.Lock()
        self._running: list[Process] = []

    def run(self) -> int:
        """Run everything that there is time for, and print the table; the exit status."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        cores = len(os.sched_getaffinity(0))
        shares = max(1, cores // 2)
        warm = [[f"warm {i}/{shares}"] for i in range(shares * ("warm" in self._only))]
        timed = [name for name in SECONDS if name in self._only and name not in ("warm", "tests")]
        if self.dry:  # where nothing is timed one process will do, and one share says enough
            warm = [["warm 1/6", *timed]]
        try:
            with ThreadPoolExecutor(shares + 1) as threads:
                try:
                    wanted = "tests" in self._only
                    tests = threads.submit(self._tests, shares) if wanted else None
                    list(threads.map(self._parts, warm))
                    if tests:
                        tests.result()
                except BaseException:
                    self._stop()
                    raise
            if not self.dry:
                self._parts(timed, alone=True)
        finally:
            self._stop()
            print(table(self.report), flush=True)
        return 1 if any("failed" in part for part in self.report["parts"]) else 0

    def _parts(self, names: Sequence[str], alone: bool = False) -> None:
        """Have processes run parts, one after the other, until all have ended or time is over."""
        left = list(names)
        while left and self._end_s > time.monotonic():
            del left[: self._process(left, alone)]
        for name in left:
            self._note({"part": name, "s": 0.0, "failed": "There was no time left."})

    def _process(self, names: Sequence[str], alone: bool) -> int:
        """One process; how many of the parts have ended, well or not."""
        command = [*self._child, ",".join(names), *["--dry-run"] * self.dry]
        process = self._start(command, START_S, alone)
        ended, begun_s = 0, time.monotonic()
        failed: Row = {}
        for line in process:
            said = json.loads(line) if line.startswith("{") else {}
            if "begin" in said:
                begun_s, failed = time.monotonic(), {}
                process.until(self._capped(SECONDS[said["begin"].split()[0]]))
            elif "failed" in said:
                failed = {"failed": said["failed"]}
            elif "end" in said:
                self._note({"part": said["end"], "s": said["s"]} | failed)
                ended += 1
            elif said:
                self._note(said)
        if ended < len(names):
            failed = failed or {"failed": process.why()}
            self._note({"part": names[ended], "s": time.monotonic() - begun_s} | failed)
            ended += 1
        return ended

    def _tests(self, workers: int) -> None:
        """The tests that need a GPU, in as many processes."""
        tests = sorted(
            (ROOT / "tests").rglob("test_*.py"), key=lambda path: "kernels" in path.parts
        )
        tests = [path for path in tests if "pytest.mark.gpu" in path.read_text()]
        command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-m", "gpu"]
        if self.dry:
            tests = tests[:1]
        elif importlib.util.find_spec("xdist"):
            command += ["-n", str(workers)]
        begun_s, passed, errors, last = time.monotonic(), 0, list[str](), ""
        failing = dict[str, None]()
        process = self._start([*command, *map(str, tests)], SECONDS["tests"], False)
        for line in process:
            last = line.strip() or last
            passed += bool(re.search(r"::.* PASSED|PASSED .*::", line))
            if found := re.search(r"(FAILED|ERROR) (\S+::\S+)|(\S+::\S+) (FAILED|ERROR)", line):
                failing[found[2] or found[3]] = None
            elif line.startswith("E  ") and len(errors) < 20:
                errors.append(line.strip())
        counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|skipped)", last)}
        row = {"case": "GPU tests", "passed": passed, "failed": len(failing), "failing": [*failing]}
        row |= {"errors": errors} if errors else {}
        self._note({"part": "tests", "row": row | counts})
        over = re.search(r" in \d", last)
        why = {} if over else {"failed": process.why()}
        self._note({"part": "tests", "s": time.monotonic() - begun_s} | why)

    def _start(self, command: Sequence[str], seconds: float, alone: bool) -> Process:
        process = Process(command, self._capped(seconds), alone=alone)
        self._running.append(process)
        return process

    def _capped(self, seconds: float) -> float:
        """Seconds, or those that are left; dry, on whatever machine, a part may take them all."""
        left_s = self._end_s - time.monotonic()
        return max(0.1, left_s if self.dry else min(seconds, left_s))

    def _stop(self) -> None:
        self._end_s = 0.0
        for process in self._running:
            process.kill()

    def _note(self, said: Row) -> None:
        """Keep what was said, and write all that is known."""
        with self._lock:
            print(json.dumps(said)[:300], file=sys.stderr, flush=True)
            report = self.report
            if "facts" in said:
                report |= said["facts"]
            elif "row" not in said:
                report["parts"].append(said)
            elif said["row"]["case"] == "ceilings":
                report["ceilings"] = {key: x for key, x in said["row"].items() if key != "case"}
            else:
                report["results" if said["part"] == "kernels" else "rows"].append(said["row"])
            slug = re.sub(r"\W+", "-", report.get("device", "unknown").lower())
            self.out.mkdir(parents=True, exist_ok=True)
            file = self.out / f"gpu-{slug}.json"
            beside = file.with_suffix(".part")
            beside.write_text(json.dumps(report, indent=1) + "\n")
            beside.replace(file)
