"""What the demo's two processes do: one answers and stores, the other restores and answers.

Every figure is measured, here and now, by the protocol of `flowkv.demo.timing`: after a
warm-up with other prompts, in turns with what it is compared to, several times over.
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
from flowkv.core.config import load_config
from flowkv.core.errors import UnsupportedModelError
from flowkv.core.sizes import parse_place
from flowkv.demo.records import Findings, Plan, Sample, Watched
from flowkv.demo.show import Tell
from flowkv.demo.slow import Slow
from flowkv.demo.timing import NOTHING, Reuse, timed_generate
from flowkv.demo.workload import Case, Workload, build_workload
from flowkv.hooks.huggingface.load import Loaded, load_model
from flowkv.observe.timeline import Timeline, Timelines
from flowkv.runtime.stack import make_envelope
from flowkv.tiers.base import UNBOUNDED, Tier
from flowkv.tiers.disk import DiskTier


class _Meter:
    """Generates, measures and compares; one step of the progress per request."""

    def __init__(self, loaded: Loaded, plan: Plan, tell: Tell, total: int) -> None:
        self.model, self.plan, self.tell, self.total = loaded.model, plan, tell, total
        self.samples: list[Sample] = []
        self.done = 0

    def step(self, text: str) -> None:
        self.done += 1
        self.tell(min(self.done, self.total), self.total, text)

    def plain(self, way: str, case: Case, *, whole: bool) -> list[list[int]]:
        """Without FlowKV; only the first token unless `whole`."""
        return self._measure(way, case, whole, None)

    def paged(self, way: str, case: Case, kv: flowkv.KV, *, whole: bool) -> None:
        """With FlowKV."""
        self._measure(way, case, whole, kv)

    def _measure(self, way: str, case: Case, whole: bool, kv: flowkv.KV | None) -> list[list[int]]:
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
                ttft_cpu_s=timing.ttft_cpu_s,
                tpot_s=timing.tpot_s,
                identical=timing.answers == reference,
                seen=found.seen,
                reused=found.reused,
                loaded_bytes=found.loaded_bytes,
            )
        )
        self.step(f"{case.name}, {'with' if kv else 'without'} FlowKV")
        return timing.answers

    def set_known_aside(self, opening: Case) -> bool:
        """Renames samples that are no first ones, where a store of yours knew the opening before.

        Returns:
            Whether it did.
        """
        first = [sample for sample in self.samples if sample.way == "first"]
        known = any(sample.reused for sample in first if sample.case == opening.name)
        for sample in first if known else ():
            sample.way = "known"
        return known


def store_phase(plan: Plan, work: Path, tell: Tell) -> Findings:
    """First process: answers without FlowKV, then with it, and leaves pages in the store."""
    turns, repeats = plan.sizes.turns, plan.repeats
    total = 2 + 4 + repeats * 3 * (turns + 1)
    tell(0, total, "loading the model")
    loaded, workload = _prepare(plan)
    meter = _Meter(loaded, plan, tell, total)
    meter.step("warming up")
    _warm_up(meter, workload, work)
    cases = _converse(meter, workload)
    fresh, tiers = True, dict[str, Any]()
    for repeat in range(repeats):
        if repeat:
            for case in cases:
                meter.plain("cold", case, whole=False)
        # Only the first repeat fills the store, with whole answers. What the others measure as
        # unknown must be unknown.
        place = str(work / f"scratch-{repeat}") if repeat else plan.store
        with _attached(loaded.model, place) as kv:
            for way in ("first", "again"):
                for case in cases:
                    meter.paged(way, case, kv, whole=not repeat)
            kv.flush()
            tiers = tiers or _tiers(kv)
        if repeat:
            shutil.rmtree(place, ignore_errors=True)
        else:
            fresh = not meter.set_known_aside(cases[0])
    shown = cases[-2]
    texts = [loaded.decode(shown.prompts[0]), loaded.decode(shown.answers[0])]
    return Findings(
        samples=meter.samples,
        tiers=tiers,
        machine=_machine(loaded.model, plan),
        fresh=fresh,
        cases=cases,
        texts=texts,
    )


def restore_phase(plan: Plan, work: Path, cases: list[Case], tell: Tell) -> Findings:
    """Second process: takes the conversation up where the first left it, from disk."""
    asked, earlier = cases[-2:], cases[:-2]
    total = 2 + 4 + (plan.repeats + 1) * 2 * len(asked) + len(earlier)
    tell(0, total, "loading the model")
    loaded, workload = _prepare(plan)
    meter = _Meter(loaded, plan, tell, total)
    meter.step("warming up")
    _warm_up(meter, workload, work)
    tiers, attach_s = dict[str, Any](), 0.0
    for repeat in range(plan.repeats):
        for case in asked:
            meter.plain("recompute", case, whole=not repeat)
        _drop_page_cache(Path(parse_place(f"disk:{plan.store}").path))
        started = time.perf_counter()
        # A new cache every time: its pool is empty, so that pages come from disk.
        with _attached(loaded.model, plan.store) as kv:
            attach_s = attach_s or time.perf_counter() - started
            for case in asked:
                meter.paged("disk", case, kv, whole=not repeat)
            if not repeat:
                for case in earlier:
                    meter.paged("check", case, kv, whole=True)
            tiers = tiers or _tiers(kv)
    return Findings(
        samples=meter.samples,
        tiers=tiers,
        machine=_machine(loaded.model, plan),
        attach_s=attach_s,
        restores=_watch(meter, asked),
    )


def _watch(meter: _Meter, asked: list[Case]) -> list[Watched]:
    """Restores the last turn twice more, with a look at how: from the disk, and from a slow one.

    The slow one takes about as long to load a prompt as the model takes to compute it. No time of
    this is among the figures, since being watched costs a little.
    """
    plan, talk, model = meter.plan, asked[0], meter.model
    directory = parse_place(f"disk:{plan.store}").path
    said = [sample for sample in meter.samples if sample.case == talk.name]
    compute_s = median(sample.ttft_s for sample in said if sample.way == "recompute")
    n_bytes = max(sum(sample.loaded_bytes.values()) for sample in said)
    slow = n_bytes / compute_s
    found = []
    _drop_page_cache(Path(directory))
    with _attached(model, plan.store) as kv:
        found += [Watched(timeline=one) for one in _watched(meter, asked, kv, plan.trace)]
    if not slow:  # nothing was restored, or other tiers have it
        return found
    with _attached(model, _slow_disk(plan.store, slow)) as kv:
        found += [Watched(timeline=one, bytes_per_s=slow) for one in _watched(meter, asked, kv, "")]
    return found


def _slow_disk(place: str, bytes_per_s: float) -> Slow:
    """The store as a tier object, opened as the cache itself would."""
    config = load_config(disk=place)
    (disk,) = (one for one in config.places(on_cpu=True) if one.kind == "disk")
    most = disk.size_bytes(shutil.disk_usage(disk.path).total)
    envelope = make_envelope(config)
    tier = DiskTier(disk.path, most or UNBOUNDED, name="slow disk", envelope=envelope)
    return Slow(tier, bytes_per_s)


def _watched(meter: _Meter, asked: list[Case], kv: flowkv.KV, trace: str) -> list[Timeline]:
    """Timelines of the first case, after others that teach the cache the rates."""
    talk, *others = asked
    with kv.trace(trace) if trace else contextlib.nullcontext():
        for case in others:
            meter.paged("watched", case, kv, whole=False)
        with Timelines(kv.bus) as restores:
            meter.paged("watched", talk, kv, whole=False)
    return restores.ended


def _prepare(plan: Plan) -> tuple[Loaded, Workload]:
    if plan.threads:
        torch.set_num_threads(plan.threads)
    loaded = load_model(plan.model, dtype=plan.dtype, device=plan.device or None)
    config = loaded.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None)
    return loaded, build_workload(loaded.encode, plan.sizes, most_tokens=most)


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


def _warm_up(meter: _Meter, workload: Workload, work: Path) -> None:
    """Runs every path once, computing and loading, with prompts that are not asked for later."""
    place = work / f"warm-up-{os.getpid()}"
    count = meter.plan.sizes.answer
    for prompts in workload.warm_up:
        timed_generate(meter.model, prompts, max_new_tokens=count)
    meter.step("compiling kernels")
    for doing in ("storing to warm up", "restoring to warm up"):
        with _attached(meter.model, str(place)) as kv:
            for prompts in workload.warm_up:
                timed_generate(meter.model, prompts, max_new_tokens=count)
            kv.flush()
        meter.step(doing)
    shutil.rmtree(place, ignore_errors=True)


def _converse(meter: _Meter, workload: Workload) -> list[Case]:
    """Asks without FlowKV, and so makes the requests and their reference answers."""
    cases = []
    prompt = workload.opening
    for turn in range(1, meter.plan.sizes.turns + 1):
        case = Case(f"conversation, turn {turn}", [prompt])
        case.answers = meter.plain("cold", case, whole=True)
        cases.append(case)
        if turn <= len(workload.questions):
            prompt = prompt + case.answers[0] + workload.questions[turn - 1]
    case = Case(f"batch of {len(workload.batch)}", workload.batch)
    case.answers = meter.plain("cold", case, whole=True)
    return [*cases, case]


def _tiers(kv: flowkv.KV) -> dict[str, Any]:
    stats = kv.stats()
    return {"devices": stats["devices"], "tiers": stats["tiers"]}


def _drop_page_cache(directory: Path) -> None:
    """Asks the operating system to forget the files' contents, so that loads reach the disk."""
    for path in directory.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # only clean pages are dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _machine(model: Any, plan: Plan) -> dict[str, Any]:
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
