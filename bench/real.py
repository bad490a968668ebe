"""A real language model, attached against plain: `python -m bench real`.

SmolLM2-135M-Instruct by default (see `flowkv.hooks.huggingface.load`), any other folder or id
with `--model`. Prompts are English: the language reference that ships with CPython, cut into tokens
and named by its digest in the result. Calls of plain and attached models alternate in one process,
answers are compared before times, and a ratio is the median of the ratios of neighbouring calls,
since machines are shared and noisy. What only a new process shows (an empty compile cache, a
restart, memory) is measured in processes of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch

import flowkv
from bench.figures import answer, ratios, read_rate, save, shown, spread
from bench.serve.baselines import Batched
from bench.serve.models import twin
from bench.serve.workload import Ask
from flowkv.cli.arguments import AddVerb, count, names
from flowkv.core.config import parse_size
from flowkv.demo.timing import Reuse, Timing, timed_generate
from flowkv.hooks.huggingface.load import DTYPES, LoadedModel
from flowkv.report.screen import Screen

PARTS = ("first", "ttft", "tpot", "restart", "engine")
UNSEEN, LENGTHS, RESTARTED = (256, 1024, 2048, 4000), (64, 256, 1024, 2048, 4000), (2048, 4000)
POOL, WARM = "2GiB", 700
Row = dict[str, Any]


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    real = verb("real", _real, "measure a real language model, attached against plain")
    real.add_argument("--model", default="smollm2", help="folder or Hugging Face id")
    real.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    real.add_argument("--threads", type=count, default=os.cpu_count() or 1)
    real.add_argument("--rounds", type=count, default=3)
    real.add_argument(
        "--parts",
        type=names,
        default=list(PARTS),
        help=f"of {','.join(PARTS)}; quality takes an hour",
    )
    real.add_argument("--longest", type=count, default=4000, help="tokens of the longest context")
    real.add_argument(
        "--out", type=Path, metavar="FILE", help="write there, too; other parts in it are kept"
    )
    real.add_argument("--contexts", type=count, default=53, help="of quality")
    real.add_argument("--text", type=Path, metavar="FILE", help="of quality, not the frozen one")
    basis = "of quality: pages in codec kvt, by `flowkv calibrate`; may be given again"
    real.add_argument("--basis", type=Path, metavar="FILE", action="append", default=[], help=basis)
    real.add_argument("--minutes", type=float, default=inf, help="quality reads no longer")
    real.add_argument("--resume", metavar="DIR", help="where quality keeps what it has read")
    real.add_argument("--child", default="", help=argparse.SUPPRESS)


def _real(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    torch.set_num_threads(given.threads)
    if given.child:
        part, folder = given.child.split(":", 1)
        return 0, _CHILDREN[part](given, folder)
    result: dict[str, Any] = {
        "model": given.model,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "text_sha256": hashlib.sha256(english().encode()).hexdigest(),
        "parts": {},
        "runs": {},
    }
    if given.out and given.out.exists():
        kept = json.loads(given.out.read_text())
        result |= {name: kept[name] for name in ("parts", "runs")}
    measured: list[Row] = []
    for part in given.parts:
        name = part if given.dtype == "float32" else f"{part}, {given.dtype}"
        rows = result["parts"][name] = []
        before = os.getloadavg()[0]
        for row in _PARTS[part](given):
            rows.append(row | {"what": row["what"] + name.removeprefix(part)})
            screen.say("  ".join(f"{k} {shown(v)}" for k, v in rows[-1].items()))
        result["runs"][name] = {
            "threads": given.threads,
            "rounds": given.rounds,
            "load": spread([before, *os.getloadavg()[:2]]),
        }
        measured += rows
        save(given.out, result)
    return int(not all(row.get("identical", True) for row in measured)), result


def english() -> str:
    """The language reference that ships with CPython; some 700 kB of English, less its tables."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def load(given: argparse.Namespace) -> LoadedModel:
    """The model, which does not stop before it is told to."""
    loaded = flowkv.load(given.model, dtype=given.dtype, device="cpu")
    loaded.model.generation_config.eos_token_id = None
    loaded.model.generation_config.pad_token_id = 0
    return loaded


class Texts:
    """Prompts out of the text, none of which begins as another does."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._tokens, self._at = encode(english()), 0

    def next(self, tokens: int) -> list[int]:
        """The next tokens of the text; from its start again where it ends."""
        if self._at + tokens > len(self._tokens):
            self._at = self._at % 97 + 1  # other beginnings than the first time
        self._at += tokens
        return self._tokens[self._at - tokens : self._at]


class Pair:
    """The model twice: as it is, and attached."""

    def __init__(self, given: argparse.Namespace, **config: Any) -> None:
        self.given = given
        self.plain, self.served = load(given), load(given)
        self.texts = Texts(self.plain.encode)
        self.kv = flowkv.attach(self.served.model, **{"gpu": POOL, **config})
        warm = self.texts.next(WARM)
        for _ in range(2):  # compile and allocate before anything is timed
            for loaded in (self.plain, self.served):
                timed_generate(loaded.model, [warm], max_new_tokens=70)

    def compare(
        self, what: str, prompts: Sequence[list[int]], new_tokens: int, figure: str, **plain: Any
    ) -> Row:
        """Neighbouring calls on each prompt; ratios are plain / attached.

        Args:
            what: Name of the row.
            prompts: One a round.
            new_tokens: Of an answer.
            figure: Field of `Timing` that counts.
            **plain: Options of `generate` for the plain model.
        """
        pairs: list[tuple[Timing, Timing]] = []
        for number, prompt in enumerate(prompts):
            sides = [(self.plain, plain), (self.served, {})]
            calls = [
                timed_generate(loaded.model, [prompt], max_new_tokens=new_tokens, **options)
                for loaded, options in (sides if number % 2 else sides[::-1])
            ]
            one, two = calls if number % 2 else calls[::-1]
            pairs.append((one, two))
        alone, served = (
            [getattr(side, figure) for side in sides] for sides in zip(*pairs, strict=True)
        )
        return {
            "what": what,
            "tokens": len(prompts[0]),
            "identical": all(a.answers == b.answers for a, b in pairs),
            "plain_ms": spread([1e3 * s for s in alone]),
            "attached_ms": spread([1e3 * s for s in served]),
            "ratio": spread(ratios(alone, served)),
        }

    def lengths(self, of: Sequence[int]) -> list[int]:
        """Those that were asked for."""
        return [n for n in of if n <= self.given.longest]


def ttft(given: argparse.Namespace) -> Iterator[Row]:
    """First tokens: of prompts never seen, and of the same ones again."""
    pair = Pair(given)
    for n in pair.lengths(UNSEEN):
        fresh = [pair.texts.next(n) for _ in range(given.rounds)]
        yield pair.compare("ttft, unseen", fresh, 1, "ttft_s")
        yield pair.compare("ttft, asked again", fresh, 1, "ttft_s")
    pair.kv.close()


def tpot(given: argparse.Namespace) -> Iterator[Row]:
    """Further tokens, beside DynamicCache and StaticCache."""
    pair = Pair(given)
    for n in pair.lengths(LENGTHS):
        prompts = [pair.texts.next(n)] * given.rounds
        pair.compare("", prompts[:1], 2, "tpot_s")  # the prompt is known from here on
        yield pair.compare("tpot, DynamicCache / attached", prompts, 25, "tpot_s")
        static = {"cache_implementation": "static"}
        yield pair.compare("tpot, StaticCache / attached", prompts, 25, "tpot_s", **static)
    pair.kv.close()


def engine(given: argparse.Namespace) -> Iterator[Row]:
    """New tokens a second of several clients at once, over those of transformers' own ways.

    The engine, and the manager that `generate_batch` runs, are made and warm before the clock runs.
    """
    pair, tokens, most = Pair(given), 32, 4
    plain, text = pair.plain.model, pair.texts
    made = flowkv.Engine(pair.served.model, pair.kv)
    Clocked = tuple[list[list[int]], float, float]

    def clocked(serve: Callable[[], list[list[int]]]) -> Clocked:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        return serve(), time.perf_counter() - wall_s, time.process_time() - cpu_s

    def one_by_one(prompts: Sequence[list[int]]) -> Clocked:
        ways = [partial(timed_generate, plain, [p], max_new_tokens=tokens) for p in prompts]
        return clocked(lambda: [way().answers[0] for way in ways])

    def batched(prompts: Sequence[list[int]]) -> Clocked:
        asks = [Ask(prompt, tokens) for prompt in prompts]
        manager = Batched(twin(plain), most_rows=most, token_budget=1024, pool_tokens=4096)
        manager.serve([Ask(prompt[:9], 2) for prompt in prompts], most)
        try:  # its thread ends with it, or the others would share the processors with that
            return clocked(lambda: [one.tokens for one in manager.serve(asks, most).served])
        finally:
            manager.close()

    def served(prompts: Sequence[list[int]]) -> Clocked:
        done = partial(made.run, prompts, max_new_tokens=tokens)
        return clocked(lambda: [list(completion.tokens) for completion in done()])

    ways = one_by_one, batched, served
    for way in ways:
        way([text.next(64) for _ in range(most)])
    for clients in (1, most):
        turns: list[list[Clocked]] = []
        for number in range(given.rounds):
            prompts = [text.next(256) for _ in range(clients)]
            first = number % len(ways)  # each turn begins with another one
            found = {way: way(prompts) for way in (*ways[first:], *ways[:first])}
            turns.append([found[way] for way in ways])
        same = all(one[0] == two[0] == three[0] for one, two, three in turns)
        for place, name in enumerate(("generate", "generate_batch")):
            yield {
                "what": f"engine / {name}, {clients} clients",
                "tokens": 256,
                "identical": same,
                "ratio": spread([turn[place][1] / turn[2][1] for turn in turns]),
                "cpu_ratio": spread([turn[place][2] / turn[2][2] for turn in turns]),
            }
    made.close()
    pair.kv.close()


# --- what only a new process shows ---------------------------------------------------------------


def _child(given: argparse.Namespace, part: str, folder: str, **environment: str) -> Any:
    """Runs a part in a process of its own and returns what it found."""
    command = [sys.executable, "-m", "bench", "real", "--json", "--child", f"{part}:{folder}"]
    for name in ("model", "dtype", "threads", "rounds", "longest", "contexts", "minutes", "text"):
        if getattr(given, name) is not None:
            command += [f"--{name}", str(getattr(given, name))]
    for path in given.basis:
        command += ["--basis", str(path)]
    return answer(command, **environment)


def first(given: argparse.Namespace) -> Iterator[Row]:
    """The first minute: with nothing compiled, and in the next process."""
    with tempfile.TemporaryDirectory() as folder:
        for what in ("empty compile cache", "warm compile cache"):
            yield {"what": what, **_child(given, "first", folder, NUMBA_CACHE_DIR=folder)}


def _first(given: argparse.Namespace, folder: str) -> Row:
    loaded = load(given)
    ids = Texts(loaded.encode).next(300)
    timed_generate(loaded.model, [ids], max_new_tokens=4)  # what the model itself allocates
    before, start = _resident(), time.process_time()
    kv = flowkv.attach(loaded.model, gpu="64MiB")
    attached = time.process_time()
    timed_generate(loaded.model, [ids], max_new_tokens=4)
    done = time.process_time()
    kv.close()
    code = "import time; t = time.perf_counter(); import flowkv; print(time.perf_counter() - t)"
    imports = [
        float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(given.rounds)
    ]
    added = _resident() - before - parse_size("64MiB")
    return {
        "attach_cpu_s": attached - start,
        "first_generate_cpu_s": done - attached,
        "rss_beyond_pool_mib": added / 2**20,
        "import_ms": spread([1e3 * s for s in imports]),
    }


def _resident() -> int:
    """Bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def restart(given: argparse.Namespace) -> Iterator[Row]:
    """Prompts that an earlier process stored, beside computing them and beside the lower bound.

    Each is the first call of a process of its own: neither model has run before.
    """
    with tempfile.TemporaryDirectory() as folder:
        stored = _child(given, "store", folder)
        for n in _restarted(given):
            places = [f"{n}:{number}:{folder}" for number in range(given.rounds)]
            calls = [_child(given, "restored", place) for place in places]
            n_bytes = sum(call["loaded_bytes"] for call in calls) / len(calls)
            attached = spread([call["attached_ms"] for call in calls])
            bound_ms = median(call["bound_ms"] for call in calls)
            yield {
                "what": "ttft, restarted",
                "tokens": n,
                "identical": all(call["identical"] for call in calls),
                "plain_ms": spread([call["plain_ms"] for call in calls]),
                "attached_ms": attached,
                "ratio": spread([call["plain_ms"] / call["attached_ms"] for call in calls]),
                "loaded_bytes": n_bytes,
                "bound_ms": bound_ms,
                "over_bound": attached[1] / bound_ms,
                "store_bytes_a_token": stored["bytes_a_token"],
            }


def _restarted(given: argparse.Namespace) -> list[int]:
    """Lengths of the prompts that are stored."""
    return sorted({min(n, given.longest) for n in RESTARTED})


def _stored(texts: Texts, given: argparse.Namespace) -> dict[int, list[list[int]]]:
    """Prompts that all processes know, by length."""
    return {n: [texts.next(n) for _ in range(given.rounds)] for n in _restarted(given)}


def _store(given: argparse.Namespace, folder: str) -> Row:
    loaded = load(given)
    kv = flowkv.attach(loaded.model, gpu=POOL, disk=f"{folder}/kv:8GiB")
    prompts = [p for n in _stored(Texts(loaded.encode), given).values() for p in n]
    for prompt in prompts:
        timed_generate(loaded.model, [prompt], max_new_tokens=1)
    kv.flush()
    kv.close()
    kept = sum(f.stat().st_blocks * 512 for f in Path(folder).rglob("*") if f.is_file())
    return {"bytes_a_token": kept / sum(map(len, prompts))}


def _restored(given: argparse.Namespace, place: str) -> Row:
    """The first call of the attached model, and then that of the plain one."""
    length, number, folder = place.split(":", 2)
    plain, served = load(given), load(given)
    kv = flowkv.attach(served.model, gpu=POOL, disk=f"{folder}/kv:8GiB")
    prompt = _stored(Texts(plain.encode), given)[int(length)][int(number)]
    before = Reuse.of(kv)
    one = timed_generate(served.model, [prompt], max_new_tokens=1)
    n_bytes = sum(Reuse.of(kv).since(before).loaded_bytes.values())
    other = timed_generate(plain.model, [prompt], max_new_tokens=1)
    step_s = timed_generate(plain.model, [prompt[:64]], max_new_tokens=9).tpot_s
    kv.close()
    compute_s, bound_s = other.ttft_s, other.ttft_s
    if n_bytes:
        load_s = n_bytes / _disk_rate(Path(folder), n_bytes)
        # Loading from one end, computing from the other, then the step that makes the token.
        bound_s = 1 / (1 / load_s + 1 / compute_s) + step_s
    return {
        "identical": one.answers == other.answers,
        "plain_ms": 1e3 * other.ttft_s,
        "attached_ms": 1e3 * one.ttft_s,
        "loaded_bytes": n_bytes,
        "bound_ms": 1e3 * bound_s,
    }


def _disk_rate(folder: Path, n_bytes: float) -> float:
    """Bytes per second of direct reads from a file of that many bytes."""
    block, path = 1 << 20, folder / "rate"
    with path.open("wb") as file:
        for _ in range(max(1, int(n_bytes) // block)):
            file.write(os.urandom(block))
        file.flush()
        os.fsync(file.fileno())
    try:
        return read_rate(path)
    finally:
        path.unlink()


def quality(given: argparse.Namespace) -> Iterator[Row]:
    """What caches cost in perplexity; see `bench.perplexity`."""
    from bench import perplexity

    def child(one: argparse.Namespace, share: str) -> None:
        _child(one, "quality", share)

    return perplexity.quality(given, child)


def _quality(given: argparse.Namespace, share: str) -> None:
    from bench import perplexity

    perplexity.read_share(given, share)


_PARTS = {"first": first, "ttft": ttft, "tpot": tpot, "restart": restart, "engine": engine}
_PARTS["quality"] = quality
_CHILDREN: dict[str, Callable[[argparse.Namespace, str], Any]] = {
    "quality": _quality,
    "first": _first,
    "store": _store,
    "restored": _restored,
}
