"""Conducts the demo: two processes of their own, one after the other, and what they found out."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from flowkv.core.errors import ConfigError, FlowKVError, StoreError
from flowkv.core.sizes import format_size, parse_place
from flowkv.demo.records import FINDINGS, PLAN, Findings, Plan
from flowkv.demo.report import write_demo_report
from flowkv.demo.show import Screen, Tell, seconds, times
from flowkv.demo.summary import Summary, summarise
from flowkv.tiers.disk.inspect import inspect

_GRACE_S = 5.0  # for a process that was interrupted


class DemoFailed(RuntimeError):
    """A process of the demo died for a reason that it could not explain."""


def run_demo(
    plan: Plan, screen: Screen, *, report: Path, keep: bool = False, debug: bool = False
) -> Summary:
    """Runs both processes, writes the report and shows a summary.

    Args:
        plan: What is asked of which model; an empty `store` makes a fresh temporary directory.
        screen: Where people read.
        report: The HTML file to write.
        keep: Keep the temporary directory of the store.
        debug: Show what the processes write on standard error.

    Raises:
        FlowKVError: What a process could explain.
        DemoFailed: What it could not.
    """
    _check_file(report, "the report", "--report")
    if plan.trace:
        _check_file(Path(plan.trace), "the trace", "--trace")
    started = time.monotonic()
    screen.say("FlowKV demo", style="bold")
    screen.say("One process fills a store and exits; a second one starts and answers from it.")
    screen.say()
    with _directories(plan.store, keep) as (work, store):
        plan = msgspec.structs.replace(plan, store=store)
        (work / PLAN).write_bytes(msgspec.json.encode(plan))
        stored = _phase("store", work, screen, threads=plan.threads, debug=debug)
        restored = _phase("restore", work, screen, threads=plan.threads, debug=debug)
        lasting = Path(parse_place(f"disk:{store}").path)
        store_bytes = inspect(lasting).disk_bytes
    summary = summarise(plan, stored, restored, store_bytes=store_bytes)
    summary.store = str(lasting) if lasting.exists() else ""
    summary.seconds = time.monotonic() - started
    summary.report = str(
        write_demo_report(report, plan, summary, stored.texts, restores=restored.restores)
    )
    _show(summary, plan, screen)
    return summary


def _check_file(path: Path, what: str, flag: str) -> None:
    """Better before the work than after it."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise ConfigError(f"{what} {path} cannot be written", f"Choose another file with {flag}")


@contextlib.contextmanager
def _directories(store: str, keep: bool) -> Iterator[tuple[Path, str]]:
    """A working directory, and the store's: given, or fresh and removed unless it is kept."""
    made: list[str] = []
    try:
        try:
            work = tempfile.mkdtemp(prefix="flowkv-demo-")
            made.append(work)
            if not store:
                store = tempfile.mkdtemp(prefix="flowkv-store-")
                made += [] if keep else [store]
        except OSError as error:
            raise StoreError(
                f"no temporary directory can be made ({error.strerror or error})",
                "Free some space, or set TMPDIR to another directory",
            ) from error
        yield Path(work), store
    finally:
        for directory in made:
            shutil.rmtree(directory, ignore_errors=True)


def _phase(
    phase: str, work: Path, screen: Screen, *, threads: int = 0, debug: bool = False
) -> Findings:
    label = {"store": "first process", "restore": "second process"}[phase]
    log = work / f"{phase}.log"
    command = [sys.executable, "-m", "flowkv.demo", "--phase", phase, "--work", str(work)]
    # Started elsewhere, it must still import this very package.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    # Threads that spin while they wait slow everything several times where cores are shared.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": path}
    if threads:  # the thread pools of OpenMP and numba are sized when they are loaded
        environment |= {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    with log.open("wb") as errors, screen.progress(f"{label:<14}") as tell:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=None if debug else errors,
            env=environment,
        )
        try:
            problem, notes = _follow(process, tell)
        finally:
            _end(process)
    for note in notes:
        screen.say(f"Note: {note}", style="yellow")
    if problem is not None:
        raise problem
    if process.returncode:
        said = "see above" if debug else _last_line(log)
        raise DemoFailed(f"the {label} ended with status {process.returncode}: {said}")
    return msgspec.json.decode((work / FINDINGS.format(phase)).read_bytes(), type=Findings)


def _follow(
    process: subprocess.Popen[bytes], tell: Tell
) -> tuple[FlowKVError | None, dict[str, None]]:
    """Passes progress on until the process closes its pipe; returns its complaint and its notes."""
    problem = None
    notes: dict[str, None] = {}  # each once, in order
    for line in process.stdout or ():
        message = msgspec.json.decode(line)
        if "problem" in message:
            problem = FlowKVError(message["problem"], message["remedy"])
        elif "note" in message:
            notes[message["note"]] = None
        else:
            tell(message["done"], message["total"], message["doing"])
    process.wait()
    return problem, notes


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdout:
        process.stdout.close()
    if process.poll() is None:  # this process was interrupted: so was the other, in a terminal
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    return lines[-1][:300]


def _show(summary: Summary, plan: Plan, screen: Screen) -> None:
    start, talk, batch = summary.cases[0], summary.cases[-2], summary.cases[-1]
    screen.say()
    shown = [start, talk, batch] if len(summary.cases) > 2 else [talk, batch]
    rows = [
        ["prompt tokens", *(f"{case.tokens:,}" for case in shown)],
        ["cold: without FlowKV", *(seconds(case.ttft_cold_s) for case in shown)],
        ["first time with FlowKV", *(seconds(case.ttft_first_s) for case in shown)],
        ["asked again, same process", *(seconds(case.ttft_again_s) for case in shown)],
        ["recompute, second process", *(seconds(case.ttft_recompute_s) for case in shown)],
        ["restored from disk, second process", *(seconds(case.ttft_disk_s) for case in shown)],
        ["  faster than recomputing", *(times(case.speedup) for case in shown)],
        ["  tokens reused", *(_reused(case.reused_tokens, case.ttft_disk_s) for case in shown)],
        ["tokens identical", *("yes" if case.identical else "NO" for case in shown)],
    ]
    names = [case.name.removeprefix("conversation, ") for case in shown]
    screen.table(["", *names], rows, title="Time to the first token: conversation and batch")
    read = ", ".join(f"{format_size(n)} from {kind}" for kind, n in summary.restored_from.items())
    facts = [
        ["restored by the second process", read or "nothing"],
        ["tokens reused", f"{summary.tokens_reused:,} ({summary.hit_rate:.1%} of the prompts)"],
        ["pool of the first process", format_size(summary.pool_bytes)],
        ["store on disk", format_size(summary.store_bytes)],
        ["time per further token", _tpot(summary)],
        ["attaching, once per process", seconds(summary.attach_s)],
        ["processes", f"{summary.processes[0]}, then {summary.processes[1]}"],
    ]
    screen.table(["", ""], facts, numbers=False)
    for line in summary.restores:
        screen.say(f"The last turn, {line}.")
    if summary.tokens_identical:
        screen.say("All answers are identical to those without FlowKV.", style="green")
    else:
        screen.say("Some answers differ from those without FlowKV.", style="red bold")
        if summary.machine["dtype"] != "float32":
            text = f"In {summary.machine['dtype']} rounding alone can do that: compare in float32."
            screen.say(text, style="yellow")
    if not summary.tokens_reused:
        screen.say("The second process restored nothing and computed all of it.", style="yellow")
    screen.say(
        f"Measured on {summary.machine['device_name']}, medians of {summary.repeats}, after a"
        " warm-up with other prompts.",
        style="dim",
    )
    if not summary.store_was_new:
        screen.say(
            "The store knew these prompts: its pages served the first process, too.", style="dim"
        )
    if summary.store:
        screen.say(f"Store:  {summary.store}")
    screen.say(f"Report: {summary.report}")
    if plan.trace:
        screen.say(f"Trace:  {plan.trace}  (open it in https://ui.perfetto.dev)")
    screen.say(f"Took {summary.seconds:.0f} s.", style="dim")


def _reused(tokens: int, ttft_s: float) -> str:
    return f"{tokens:,}" if math.isfinite(ttft_s) else "-"


def _tpot(summary: Summary) -> str:
    return f"{seconds(summary.tpot_paged_s)} (without FlowKV {seconds(summary.tpot_plain_s)})"
