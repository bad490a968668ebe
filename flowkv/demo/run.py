"""Driver of the demo: runs two processes, one after the other, and shows their findings.

This process needs no model, so it imports neither torch nor modules that need torch.
"""

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

from flowkv.core.config import format_size, parse_place
from flowkv.core.errors import ConfigError, FlowKVError, StoreError
from flowkv.demo.findings import (
    CaseSummary,
    DemoMessage,
    DemoPlan,
    DemoTask,
    Findings,
    Summary,
    summarise,
    write_demo_report,
)
from flowkv.report.screen import Screen
from flowkv.report.words import seconds, times
from flowkv.tiers.disk.inspect import inspect


class DemoFailed(RuntimeError):
    """Error of a process of the demo that died without an explanation."""


def run_demo(
    plan: DemoPlan, screen: Screen, *, report: Path | None, keep: bool = False, debug: bool = False
) -> Summary:
    """Run both processes, write the report and show a summary.

    Args:
        plan: Model and sizes of the demo; an empty `store` makes a fresh temporary directory.
        screen: Output for people.
        report: The HTML file to write, if any.
        keep: Keep the temporary directory of the store.
        debug: Show the processes' standard error.

    Raises:
        FlowKVError: A process failed with an explanation.
        DemoFailed: A process failed without one.
    """
    if report is not None:
        _check_file(report, "the report", "--report")
    if plan.trace:
        _check_file(Path(plan.trace), "the trace", "--trace")
    started = time.monotonic()
    screen.say("FlowKV demo", style="bold")
    screen.say("One process fills a store and exits; a second one starts and answers from it.")
    screen.say()
    with _directories(plan.store, keep) as (work, store):
        plan = msgspec.structs.replace(plan, store=store)
        task = DemoTask("store", plan, str(work))
        stored = _phase(task, "first process", screen, debug=debug)
        task = DemoTask("restore", plan, str(work), stored.cases)
        restored = _phase(task, "second process", screen, debug=debug)
        lasting = Path(parse_place(f"disk:{store}").path)
        store_bytes = inspect(lasting).disk_bytes
    summary = summarise(plan, stored, restored, store_bytes=store_bytes)
    summary.store = str(lasting) if lasting.exists() else ""
    summary.seconds = time.monotonic() - started
    if report is not None:
        written = write_demo_report(report, plan, summary, restores=restored.restores)
        summary.report = str(written)
    _show(summary, plan, screen)
    return summary


def _check_file(path: Path, what: str, flag: str) -> None:
    """Check that a file can be written, before the work rather than after it."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise ConfigError(f"{what} {path} cannot be written", f"Choose another file with {flag}")


@contextlib.contextmanager
def _directories(store: str, keep: bool) -> Iterator[tuple[Path, str]]:
    """Yield a working directory, and the store's: given, or fresh and removed unless it is kept."""
    with contextlib.ExitStack() as stack:

        def make(prefix: str) -> str:
            made = tempfile.mkdtemp(prefix=prefix)
            stack.callback(shutil.rmtree, made, ignore_errors=True)
            return made

        try:
            work = make("flowkv-demo-")
            if not store:
                prefix = "flowkv-store-"
                store = tempfile.mkdtemp(prefix=prefix) if keep else make(prefix)
        except OSError as error:
            raise StoreError(
                f"no temporary directory can be made ({error.strerror or error})",
                "Free some space, or set TMPDIR to another directory",
            ) from error
        yield Path(work), store


def _phase(task: DemoTask, label: str, screen: Screen, *, debug: bool) -> Findings:
    """Run one process, and show its progress and its notes."""
    file, log = (Path(task.work) / f"{task.phase}.{kind}" for kind in ("json", "log"))
    file.write_bytes(msgspec.json.encode(task))
    # The process must import this very package, whatever its directory.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    # Threads that spin while they wait slow everything several times if cores are shared.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": path}
    if threads := str(task.plan.threads or ""):  # thread pools are sized when libraries load
        environment |= {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
    command = [sys.executable, "-m", "flowkv.demo", str(file)]
    last, notes = DemoMessage(), dict[str, None]()  # notes: each once, in order
    with (
        log.open("wb") as errors,
        screen.progress(f"{label:<14}") as tell,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=None if debug else errors, env=environment
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                last = msgspec.json.decode(line, type=DemoMessage)
                if last.note:
                    notes[last.note] = None
                elif last.total:
                    tell(last.done, last.total, last.doing)
        except BaseException:  # this process was interrupted
            process.terminate()
            raise
    for note in notes:
        screen.say(f"Note: {note}", style="yellow")
    if last.problem:
        raise FlowKVError(last.problem, last.remedy)
    if last.found is None:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        said = "see above" if debug else lines[-1][:300]
        raise DemoFailed(f"the {label} ended with status {process.returncode}: {said}")
    return last.found


def _show(summary: Summary, plan: DemoPlan, screen: Screen) -> None:
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
        ["  tokens reused", *(_reused(case) for case in shown)],
        ["tokens identical", *("yes" if case.identical else "NO" for case in shown)],
    ]
    names = [case.name.removeprefix("conversation, ") for case in shown]
    screen.table(["", *names], rows, title="Time to the first token: conversation and batch")
    read = ", ".join(f"{format_size(n)} from {kind}" for kind, n in summary.restored_from.items())
    paged, plain = seconds(summary.tpot_paged_s), seconds(summary.tpot_plain_s)
    facts = [
        ["restored by the second process", read or "nothing"],
        ["tokens reused", f"{summary.tokens_reused:,} ({summary.hit_rate:.1%} of the prompts)"],
        ["pool of the first process", format_size(summary.pool_bytes)],
        ["store on disk", format_size(summary.store_bytes)],
        ["time per further token", f"{paged} (without FlowKV {plain})"],
        ["attaching, once per process", seconds(summary.attach_s)],
        ["processes", f"{summary.processes[0]}, then {summary.processes[1]}"],
    ]
    screen.table(["", ""], facts, numbers=False)
    for line in summary.restores:
        screen.say(f"The last turn, {line}.")
    if summary.talk:
        screen.say("The second process, about a page on the tiny model that ships with FlowKV:")
    for question, answer in summary.talk:
        screen.say(f"  {question}", style="bold")
        screen.say(f"    {' '.join(answer.split())}")
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
            "The store had these prompts: its pages served the first process, too.", style="dim"
        )
    if summary.store:
        screen.say(f"Store:  {summary.store}")
    if summary.report:
        screen.say(f"Report: {summary.report}")
    if plan.trace:
        screen.say(f"Trace:  {plan.trace}  (open it in https://ui.perfetto.dev)")
    screen.say(f"Took {summary.seconds:.0f} s.", style="dim")


def _reused(case: CaseSummary) -> str:
    return f"{case.reused_tokens:,}" if math.isfinite(case.ttft_disk_s) else "-"
