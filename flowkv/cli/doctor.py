"""`flowkv doctor`: examine this machine: versions, GPU, kernel interfaces, limits, free space.

Nothing is changed and nothing is loaded that could fail: a probe that fails becomes a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.metadata
import itertools
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import flowkv
from flowkv.cli.arguments import AddVerb
from flowkv.core import errors
from flowkv.core.config import format_size
from flowkv.report.screen import Screen

if TYPE_CHECKING:
    from flowkv import KV, Geometry, Step

State = Literal["ok", "note", "warn", "bad"]

EXTRAS = {  # extra -> (distribution, oldest version, purpose)
    "hf": ("transformers", "5.17", "Hugging Face models"),
    "cli": ("rich", "13", "tables and progress bars"),
    "aead": ("cryptography", "47", "encrypted frames"),
    "object": ("obstore", "0.6", "object storage"),
    "redis": ("redis", "5.3", "Redis and Valkey"),
    "mooncake": ("mooncake-transfer-engine", "0.3.13", "Mooncake Store"),
    "nixl": ("nixl", "1.5", "directories through NIXL"),
    "report": ("matplotlib", "3.10", "reports as HTML"),
    "metrics": ("prometheus-client", "0.20", "Prometheus metrics"),
    "otel": ("opentelemetry-api", "1.25", "OpenTelemetry metrics and spans"),
    "serve": ("uvicorn", "0", "flowkv serve"),
    "events": ("pyzmq", "26", "events of engines"),
    "ray": ("ray", "2.49", "replicas of Ray Serve"),
    "smollm2": ("gguf", "0.10", "the model smollm2"),
    "testing": ("hypothesis", "6.130", "checks of your own policies and tiers"),
}
_CORE = {  # distribution -> oldest version
    "torch": "2.11",
    "numba": "0.61",
    "numpy": "2.0",
    "msgspec": "0.21",
    "zstandard": "0.23",
    "xxhash": "3.5",
}
_ALIKE = {"mooncake-transfer-engine": "mooncake-transfer-engine-non-cuda"}
"""Distributions with the same contents under another name."""
_SHAPES = ((8, 32, 128), (8, 64, 128), (4, 32, 128), (8, 16, 128), (8, 32, 64), (2, 14, 64))
"""Key heads, query heads and head dimension of many decoders."""


class Finding(NamedTuple):
    """Result of one probe.

    Attributes:
        name: Name of the subject.
        state: "ok"; "note" if something optional is missing; "warn" if that costs speed or safety;
            "bad" if FlowKV does not work without.
        value: Description of the result.
        advice: Remedy, if one is needed.
        data: The same as plain values, for programs.
    """

    name: str
    state: State
    value: str
    advice: str = ""
    data: Mapping[str, object] = MappingProxyType({})


def examine(directory: str | os.PathLike[str] = ".") -> list[Finding]:
    """Run all probes and return their findings; takes as long as importing torch.

    Args:
        directory: Directory of a store, which need not exist.
    """
    found: list[Finding] = []
    probes: dict[str, Callable[[], Iterator[Finding]]] = {
        "Python": _python,
        "packages": _core,
        "GPU": _gpu,
        "C compiler": _compiler,
        "processor": _processor,
        "memory": _memory,
        "locked memory": _locked,
        "huge pages": _huge_pages,
        "disk": lambda: _disk(Path(directory)),
        "io_uring": _io_uring,
        "extras": _extras,
    }
    for name, probe in probes.items():
        try:
            found += probe()
        except Exception as error:  # a strange machine must not keep the rest from being shown
            text = f"cannot be examined: {type(error).__name__}: {error}"
            found.append(Finding(name, "warn", text))
    return found


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; "" if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return ""


def older(version: str, oldest: str) -> bool:
    """Return whether a version such as "2.13.0+cpu" is older than "2.11"."""
    return _numbers(version) < _numbers(oldest)


def _numbers(version: str) -> tuple[int, ...]:
    released = re.split(r"[^\d.]", version, maxsplit=1)[0]
    return tuple(int(part) for part in released.split(".") if part)


# ---- software


def _python() -> Iterator[Finding]:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("Python", "ok", text, data={"version": sys.version})


def _package(
    name: str, oldest: str, wanted: str, states: tuple[State, State], note: str = "", **data: object
) -> Finding:
    """Return the finding about a package; `states` are those of a missing and of an old one."""
    version = version_of(name)
    data["version"] = version
    if not version:
        return Finding(name, states[0], f"not installed{note}", f"pip install '{wanted}'", data)
    if older(version, oldest):
        text = f"{version} is too old, older than {oldest}{note}"
        return Finding(name, states[1], text, f"pip install -U '{wanted}'", data)
    return Finding(name, "ok", f"{version}{note}", data=data)


def _core() -> Iterator[Finding]:
    for name, oldest in _CORE.items():
        yield _package(name, oldest, f"{name}>={oldest}", ("bad", "bad"))
    yield _package("triton", "0", "triton", ("note", "note"), " (comes with PyTorch, for GPUs)")


def _gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip
        text = "none; numba kernels run on the CPU"
        advice = "torch has GPU support but sees no GPU: look at nvidia-smi" if build else ""
        yield Finding("GPU", "note", text, advice, {"count": 0})
        return
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        capability = f"{about.major}.{about.minor}"
        text = f"{about.name}, {format_size(free)} of {format_size(total)} free, sm {capability}"
        data: dict[str, object] = {"name": about.name, "capability": capability}
        data |= {"total_bytes": total, "free_bytes": free}
        yield Finding(f"GPU {number}", "ok", text, data=data)


def _compiler() -> Iterator[Finding]:
    wanted = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    path = next((found for name in wanted if name and (found := shutil.which(name))), None)
    if path:
        yield Finding("C compiler", "ok", path, data={"path": path})
    else:
        advice = "Install gcc or clang; Triton needs one to launch kernels"
        yield Finding("C compiler", "warn", "none", advice)


def _extras() -> Iterator[Finding]:
    for extra, (name, oldest, purpose) in EXTRAS.items():
        if name in _ALIKE and not version_of(name) and version_of(_ALIKE[name]):
            name = _ALIKE[name]
        wanted, note = f"flowkv[{extra}]", f" ({purpose})"
        found = _package(name, oldest, wanted, ("note", "warn"), note, extra=extra)
        if extra == "mooncake" and found.state == "ok" and (lacking := errors.missing()):
            text = f"{found.value}, without {', '.join(lacking)}"
            advice = f"As root: {errors.remedy(lacking)}"
            found = Finding(name, "warn", text, advice, {**found.data, "missing": lacking})
        yield found


# ---- machine


def _processor() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    data: dict[str, object] = {"cores": cores}
    text = f"{cores} cores"
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        share = int(quota[0]) / int(quota[1])
        data["quota_cores"] = share
        text += f", {share:.3g} of them by quota"
    yield Finding("processor", "ok", text, data=data)


def _memory() -> Iterator[Finding]:
    lines = _meminfo()
    total = int(lines["MemTotal"].split()[0]) << 10
    free = int(lines.get("MemAvailable", "0").split()[0]) << 10
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    data: dict[str, object] = {"total_bytes": total, "available_bytes": free}
    text = f"{format_size(free)} of {format_size(total)} available"
    if limit.isdigit():
        data["limit_bytes"] = int(limit)
        text += f", limited to {format_size(int(limit))}"
    yield Finding("memory", "ok", text, data=data)


def _meminfo() -> dict[str, str]:
    lines = _read("/proc/meminfo").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _locked() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked memory", "ok", "unlimited", data={"bytes": None})
        return
    few = soft < 64 << 20
    advice = "Registered I/O buffers need more: raise `ulimit -l`" if few else ""
    text = f"up to {format_size(soft)}"
    yield Finding("locked memory", "note" if few else "ok", text, advice, {"bytes": soft})


def _huge_pages() -> Iterator[Finding]:
    modes = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = modes[modes.find("[") + 1 : modes.find("]")] if "[" in modes else ""
    reserved = int(_meminfo().get("HugePages_Total", "0"))
    if not chosen:
        yield Finding("huge pages", "note", "unknown on this system")
        return
    data: dict[str, object] = {"transparent": chosen, "reserved": reserved}
    text = f"transparent: {chosen}, reserved: {reserved}"
    advice = "Large pools like `madvise` or `always`" if chosen == "never" else ""
    yield Finding("huge pages", "note" if advice else "ok", text, advice, data)


def _disk(directory: Path) -> Iterator[Finding]:
    place = directory.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    usage, kind = shutil.disk_usage(place), _file_system(place)
    data: dict[str, object] = {"directory": str(place), "file_system": kind}
    data |= {"free_bytes": usage.free, "total_bytes": usage.total}
    free, total = format_size(usage.free), format_size(usage.total)
    text = f"{free} of {total} free at {place}" + (f" ({kind})" if kind else "")
    advice = ""
    if kind in ("tmpfs", "ramfs"):
        advice = "This is memory: a store here is lost at a restart"
    elif kind.startswith(("nfs", "cifs", "smb", "9p", "fuse.sshfs")):
        advice = "Put stores on a local disk: their locks need one"
    elif not os.access(place, os.W_OK):
        advice = "This user may not write there: choose another directory"
    elif usage.free < 1 << 30:
        advice = "Free some space, or choose another directory"
    yield Finding("disk", "warn" if advice else "ok", text, advice, data)


def _file_system(place: Path) -> str:
    best, kind = "", ""
    for line in _read("/proc/mounts").splitlines():
        fields = line.split()
        mount = fields[1].replace("\\040", " ")
        if place.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind


def _io_uring() -> Iterator[Finding]:
    from flowkv.tiers.io import probe_ring

    code, kernel = probe_ring(), platform.release()
    data: dict[str, object] = {"available": code == 0, "errno": code, "kernel": kernel}
    why, advice = {
        0: (f"available (kernel {kernel})", ""),
        errno.ENOSYS: ("not part of this kernel", "Use Linux 5.1 or newer; now threads do it"),
        errno.EPERM: ("forbidden here", _ALLOW_IO_URING),
        errno.EACCES: ("forbidden here", _ALLOW_IO_URING),
    }.get(code, (f"does not work here ({os.strerror(code)})", ""))
    yield Finding("io_uring", "note" if code else "ok", why, advice, data)


_ALLOW_IO_URING = "Allow it in the container's seccomp profile and in kernel.io_uring_disabled"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


# ---- the verb


def add_verb(verb: AddVerb) -> None:
    """Add the verb `doctor`."""
    doctor = verb("doctor", _doctor, "show what this machine offers")
    doctor.option("--store", "DIR", "look at its disk", type=Path, default=Path())
    doctor.add_argument(
        "--compile",
        action="store_true",
        help="compile what first calls would: a minute or two, once on a machine",
    )


def compile_all() -> Finding:
    """Compile code that is cached on disk, by running small caches of its own through each path."""
    from flowkv import KV, Geometry
    from flowkv.core.geometry import CODECS
    from flowkv.policy.warming import main as compile_policy

    begun_s = time.process_time()
    for dtype, codec in itertools.product(("float32", "bfloat16"), CODECS):
        shape = Geometry.uniform(layers=1, kv_heads=1, head_dim=64, dtype=dtype)
        with tempfile.TemporaryDirectory() as folder:
            tiers = ["gpu:2MiB", f"disk:{folder}:64MiB"]
            with KV(shape, namespace="flowkv-doctor", tiers=tiers, codec=codec) as kv:
                for prompt in (*range(40), 0):  # more than fits, and then an evicted one
                    _answer(kv, [prompt] * 200)
                kv.flush()
    compile_policy("auto")
    _compile_for_gpu()
    seconds = time.process_time() - begun_s
    return Finding("compiled code", "ok", f"is there now: {seconds:.1f} s", "", {"cpu_s": seconds})


def _compile_for_gpu() -> None:
    """Compile the kernels of the most frequent shapes for the first GPU, if there is one.

    As many processes run at once as there are processors. `flowkv.attach` compiles kernels of
    other shapes beside the first calls.
    """
    import torch

    from flowkv import Geometry

    if not torch.cuda.is_available():
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for heads, query_heads, head_dim in _SHAPES:
            shape = Geometry.uniform(
                layers=32, kv_heads=heads, head_dim=head_dim, dtype="bfloat16", device="cuda:0"
            )
            for codec in ("raw", "kv8", "kv4c"):
                pool.submit(_compile_shape, shape, codec, query_heads)


def _compile_shape(shape: Geometry, codec: str, query_heads: int) -> None:
    from flowkv.cache import ahead

    if (process := ahead.begin(shape, codec, query_heads)) is not None:
        process.wait()


def _answer(kv: KV, prompt: list[int]) -> None:
    def attend(step: Step) -> None:
        n, dtype = int(step.counts[0]), step.dtype(0)
        q, k, v = (torch.ones(n, heads, 64, dtype=dtype) for heads in (2, 1, 1))
        step.attend(0, q, k, v)

    import torch

    with kv.open(prompt) as seq:
        for step in kv.prefill([seq]):
            attend(step)
        for _ in range(2):
            with kv.step([seq], [[1]]) as step:
                attend(step)


def _doctor(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    findings = examine(given.store)
    if given.compile:
        findings.append(compile_all())
    states = [finding.state for finding in findings]
    marks = {"ok": "ok", "note": "-", "warn": "!", "bad": "BAD"}
    advice = [f"\n-> {f.advice}" if f.advice else "" for f in findings]
    rows = [[marks[f.state], f.name, f.value + a] for f, a in zip(findings, advice, strict=True)]
    title = f"FlowKV {flowkv.__version__} on this machine"
    screen.table(["", "what", "found"], rows, title=title, numbers=False, states=states)
    bad = states.count("bad")
    if bad:
        screen.say("FlowKV does not work here before that is repaired.", style="red bold")
    result = {
        "flowkv": flowkv.__version__,
        "ok": not bad,
        "warnings": states.count("warn"),
        "findings": [{**f._asdict(), "data": dict(f.data)} for f in findings],
    }
    return (1 if bad else 0), result
