"""The demo's two processes: one answers and stores, the other restores and answers.

Every figure is measured by the protocol of `flowkv.demo.timing`: after a warm-up with other
prompts, interleaved with the runs it is compared to, and repeated.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

import flowkv
from flowkv.core.config import load_config, parse_place
from flowkv.core.errors import UnsupportedModelError
from flowkv.demo.findings import (
    DemoCase,
    DemoPlan,
    DemoTask,
    DemoWorkload,
    Findings,
    Sample,
    WatchedRestore,
    build_workload,
)
from flowkv.demo.timing import NOTHING, Reuse, timed_generate
from flowkv.hooks.huggingface.load import LoadedModel, load
from flowkv.observe.timeline import Timelines
from flowkv.report.screen import Tell
from flowkv.residency.places import make_envelope
from flowkv.testing import Faults, FlakyTier
from flowkv.tiers.base import UNBOUNDED, Tier
from flowkv.tiers.disk import DiskTier


class _Meter:
    """Runner of requests that measures them and compares answers; one progress step per request."""

    def __init__(self, loaded: LoadedModel, plan: DemoPlan, tell: Tell, total: int) -> None:
        self.loaded, self.model, self.plan = loaded, loaded.model, plan
        self.samples: list[Sample] = []
        self._tell, self._total, self._done = tell, total, 0

    def show(self, text: str) -> None:
        self._done += 1
        self._tell(min(self._done, self._total), self._total, text)

    def answer(
        self, way: str, case: DemoCase, kv: flowkv.KV | None = None, *, whole: bool = False
    ) -> list[list[int]]:
        """Answer with or without FlowKV; only the first token unless `whole`."""
        count = self.plan.sizes.answer if whole else 1
        before = Reuse.of(kv) if kv else NOTHING
        timing = timed_generate(self.model, case.prompts, max_new_tokens=count)
        found = Reuse.of(kv).since(before) if kv else NOTHING
        # The first answer without FlowKV is the reference. The second process computes it again: it
        # must agree with itself, or a comparison would mean nothing.
        reference = [answer[:count] for answer in case.answers or timing.answers]
        self.samples.append(
            Sample(
                way=way,
                case=case.name,
                ttft_s=timing.ttft_s,
                tpot_s=timing.tpot_s,
                identical=timing.answers == reference,
                seen=found.seen,
                reused=found.reused,
                loaded_bytes=found.loaded_bytes,
            )
        )
        self.show(f"{case.name}, {'with' if kv else 'without'} FlowKV")
        return timing.answers


def run_task(task: DemoTask, tell: Tell) -> Findings:
    """Run the task of a process of the demo.

    Raises:
        FlowKVError: The task cannot be done.
    """
    if task.phase == "store":
        return store_phase(task.plan, Path(task.work), tell)
    return restore_phase(task.plan, Path(task.work), task.cases, tell)


def store_phase(plan: DemoPlan, work: Path, tell: Tell) -> Findings:
    """Run the first process: answer without FlowKV, then with it, and leave pages in the store."""
    repeats = plan.repeats
    meter, workload = _prepare(plan, work, tell, repeats * 3 * (plan.sizes.turns + 1))
    loaded = meter.loaded
    cases = _converse(meter, workload)
    fresh, pool_bytes = True, 0
    for repeat in range(repeats):
        if repeat:
            for case in cases:
                meter.answer("cold", case)
        # Only the first repeat fills the store, with whole answers. The others use scratch stores,
        # so that prompts are unknown again.
        place = str(work / f"scratch-{repeat}") if repeat else plan.store
        with _attached(loaded.model, place) as kv:
            for way in ("first", "again"):
                for case in cases:
                    meter.answer(way, case, kv, whole=not repeat)
            kv.flush()
            pools = kv.stats()["devices"].values()
            pool_bytes = pool_bytes or sum(pool["used_bytes"] for pool in pools)
        if repeat:
            shutil.rmtree(place, ignore_errors=True)
        else:
            first = [sample for sample in meter.samples if sample.way == "first"]
            fresh = not first[0].reused
            for sample in [] if fresh else first:  # the user's store had the opening before
                sample.way = "known"
    return Findings(
        samples=meter.samples,
        pool_bytes=pool_bytes,
        machine=_machine(loaded.model, plan),
        fresh=fresh,
        cases=cases,
    )


def restore_phase(plan: DemoPlan, work: Path, cases: list[DemoCase], tell: Tell) -> Findings:
    """Run the second process: continue the first one's conversation from disk."""
    asked, earlier = cases[-2:], cases[:-2]
    steps = (plan.repeats + 1) * 2 * len(asked) + len(earlier)
    meter, _ = _prepare(plan, work, tell, steps)
    attach_s, answers = 0.0, dict[str, list[list[int]]]()
    for repeat in range(plan.repeats):
        for case in asked:
            meter.answer("recompute", case, whole=not repeat)
        _drop_page_cache(Path(parse_place(f"disk:{plan.store}").path))
        started = time.perf_counter()
        # A new cache every time: its pool is empty, so that pages come from disk.
        with _attached(meter.model, plan.store) as kv:
            attach_s = attach_s or time.perf_counter() - started
            for case in asked:
                answers.setdefault(case.name, meter.answer("disk", case, kv, whole=not repeat))
            if not repeat:
                for case in earlier:
                    answers[case.name] = meter.answer("check", case, kv, whole=True)
    return Findings(
        samples=meter.samples,
        machine=_machine(meter.model, plan),
        attach_s=attach_s,
        talk=[
            (question, meter.loaded.decode(answer))
            for case in cases
            for question, answer in zip(case.asked, answers[case.name], strict=False)
        ],
        restores=_watch(meter, asked),
    )


def _watch(meter: _Meter, asked: list[DemoCase]) -> list[WatchedRestore]:
    """Restore the last turn twice more with its timeline: from the disk, and from a slow one.

    The slow disk takes about as long to load a prompt as the model takes to compute it. These times
    are not among the figures, since recording a timeline costs a little. Other cases go before, so
    that the cache measures the rates.
    """
    plan, (talk, *others) = meter.plan, asked
    said = [sample for sample in meter.samples if sample.case == talk.name]
    compute_s = median(sample.ttft_s for sample in said if sample.way == "recompute")
    slow = max(sum(sample.loaded_bytes.values()) for sample in said) / compute_s
    found = []
    _drop_page_cache(Path(parse_place(f"disk:{plan.store}").path))
    # Without a rate nothing was loaded from the disk.
    for rate in (0.0, slow) if slow else (0.0,):
        place = _slow_disk(plan.store, rate) if rate else plan.store
        with _attached(meter.model, place) as kv, contextlib.ExitStack() as stack:
            if plan.trace and not rate:
                stack.enter_context(kv.trace(plan.trace))
            for case in others:
                meter.answer("watched", case, kv)
            restores = stack.enter_context(Timelines(kv.bus))
            meter.answer("watched", talk, kv)
            found += [WatchedRestore(timeline=one, bytes_per_s=rate) for one in restores.ended]
    return found


def _slow_disk(place: str, bytes_per_s: float) -> FlakyTier:
    """Return the store as a slow tier object, opened as the cache itself would open it."""
    config = load_config(disk=place)
    (disk,) = (one for one in config.places(on_cpu=True) if one.kind == "disk")
    most = disk.size_bytes(shutil.disk_usage(disk.path).total) or UNBOUNDED
    tier = DiskTier(disk.path, most, envelope=make_envelope(config))
    return FlakyTier(tier, 0, Faults(bytes_per_s=bytes_per_s), name="slow disk")


def _prepare(plan: DemoPlan, work: Path, tell: Tell, steps: int) -> tuple[_Meter, DemoWorkload]:
    """Return a warmed-up model's meter, and its workload."""
    total = 2 + 4 + steps
    tell(0, total, "loading the model")
    if plan.threads:
        torch.set_num_threads(plan.threads)
    loaded = load(plan.model, dtype=plan.dtype, device=plan.device or None)
    most = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    workload = build_workload(loaded.encode, plan.sizes, most_tokens=most, chat=loaded.chat)
    meter = _Meter(loaded, plan, tell, total)
    meter.show("warming up")
    _warm_up(meter, workload, work)
    return meter, workload


@contextlib.contextmanager
def _attached(model: Any, place: str | Tier) -> Iterator[flowkv.KV]:
    disk: dict[str, Any] = {"disk": place} if isinstance(place, str) else {"tiers": [place]}
    kv = flowkv.attach(model, **disk)
    try:
        if kv.geometry is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be served from pages, so there is nothing to show",
                "Choose another --model; flowkv.verify(model) says why",
            )
        yield kv
    finally:
        kv.detach()
        kv.close()


def _warm_up(meter: _Meter, workload: DemoWorkload, work: Path) -> None:
    """Run every path once, computing and loading, with prompts that are not asked for later."""
    place = work / f"warm-up-{os.getpid()}"
    count = meter.plan.sizes.answer
    for prompts in workload.warm_up:
        timed_generate(meter.model, prompts, max_new_tokens=count)
    meter.show("compiling kernels")
    for doing in ("storing to warm up", "restoring to warm up"):
        with _attached(meter.model, str(place)) as kv:
            for prompts in workload.warm_up:
                timed_generate(meter.model, prompts, max_new_tokens=count)
            kv.flush()
        meter.show(doing)
    shutil.rmtree(place, ignore_errors=True)


def _converse(meter: _Meter, workload: DemoWorkload) -> list[DemoCase]:
    """Answer without FlowKV, and return the requests with these reference answers."""
    cases = []
    prompt, turns = workload.opening, meter.plan.sizes.turns
    for turn in range(1, turns + 1):
        asked = workload.asked[turn - 1 : turn]
        case = DemoCase(f"conversation, turn {turn}", [prompt], asked=asked)
        case.answers = meter.answer("cold", case, whole=True)
        cases.append(case)
        if turn <= len(workload.questions):
            (answer,), question = case.answers, workload.questions[turn - 1]
            # A finished answer ends with the token that the template adds there, too.
            prompt = prompt + answer + question[answer[-1:] == question[:1] :]
    asked = workload.asked[turns:]
    case = DemoCase(f"batch of {len(workload.batch)}", workload.batch, asked=asked)
    case.answers = meter.answer("cold", case, whole=True)
    return [*cases, case]


def _drop_page_cache(directory: Path) -> None:
    """Ask the operating system to drop the files' contents, so that loads reach the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # only clean pages are dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _machine(model: Any, plan: DemoPlan) -> dict[str, Any]:
    device = torch.device(model.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": str(device),
        "device_name": name,
        "threads": torch.get_num_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "dtype": plan.dtype,
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": str(torch.__version__),
        "flowkv": flowkv.__version__,
        "python": platform.python_version(),
        "pid": os.getpid(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
