"""An 8B Llama of random weights in bfloat16: attached beside plain, what others offer beside both.

Each part yields rows of figures: milliseconds to the first token (`ttft_ms`) and of a further one
(`tpot_ms`, the median of those behind the first few, so that what is compiled or captured once does
not count), with the tokens of all steps compared where they must be the same.
"""

from __future__ import annotations

import collections
import gc
import itertools
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch

import flowkv
from bench.gpu.machine import Machine
from bench.gpu.path import path
from flowkv.hooks.graphs import SHORT

Row = dict[str, Any]
SKIPPED = 4
"""Steps behind the first token that no median counts."""
CAPTURED, TURN = 4, 100
"""Short prompts until one is captured; new tokens of a chat's turn."""
CODECS = ("kv8", "kv4c")
NEW = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
SMALL = dict(hidden_size=128, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)


class Size(NamedTuple):
    """How much is asked of a model; all of it is counted in tokens, whatever rows are called."""

    config: dict[str, int]
    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)
    long: int = 8192
    batch: tuple[int, int] = (16, 2048)
    clients: tuple[int, int, int] = (32, 1024, 64)
    new: int = 21
    rounds: int = 2


WHOLE = Size(NEW | dict(num_hidden_layers=32, vocab_size=128256, head_dim=128))
WARM = WHOLE._replace(config=WHOLE.config | dict(num_hidden_layers=2, vocab_size=1000), rounds=1)
"""The same kernels, of which a few layers tell the compiler as much as all."""
DRY = Size(
    SMALL | dict(num_hidden_layers=2, vocab_size=100, head_dim=64),
    *((8, 24, 40, 70), 150, (2, 24), (2, 24, 3), 6, 1),
)
LENGTHS, LONG, BATCH = WHOLE.lengths, WHOLE.long, "{} x {}".format(*WHOLE.batch)
"""What rows are called, also where less is asked."""


class Stamps:
    """A streamer that notes when tokens are there."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync, self.at_s = sync, list[float]()

    def put(self, value: torch.Tensor) -> None:
        self._sync()
        self.at_s.append(time.perf_counter())

    def end(self) -> None:
        return


class Sampler:
    """Stacks of all threads, looked at every two milliseconds in a block."""

    def __init__(self) -> None:
        self.leaves, self.holders = collections.Counter[str](), collections.Counter[str]()
        self.rounds, self._over = 0, threading.Event()

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def report(self) -> Row:
        """The functions in which most samples ended, and those that were under way in most."""
        ends = {"leaves": self.leaves.most_common(20), "under_way": self.holders.most_common(40)}
        return {"rounds": self.rounds, **ends}

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.rounds += 1
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for thread, frame in sys._current_frames().items():
                if thread == threading.get_ident():
                    continue
                seen, name = list[str](), names.get(thread, "?")[:20]
                while frame is not None:
                    code = frame.f_code
                    file = code.co_filename.split("site-packages/")[-1][-48:]
                    seen.append(f"{name} {file}:{code.co_name}")
                    frame = frame.f_back
                self.leaves[seen[0]] += 1
                self.holders.update(set(seen))


class Bed:
    """The model of a run, and how it is asked.

    Args:
        machine: On what.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.size = DRY if machine.dry else WHOLE if machine.timing else WARM
        self._generator = torch.Generator().manual_seed(3)
        self._prompts: dict[int, torch.Tensor] = {}
        self.answers: dict[int, list[list[int]]] = {}

    @cached_property
    def model(self) -> Any:
        import transformers

        transformers.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        config = transformers.LlamaConfig(
            **self.size.config,
            max_position_embeddings=131072,
            rope_theta=5e5,
            tie_word_embeddings=False,
            eos_token_id=None,
            bos_token_id=1,
            pad_token_id=0,
        )
        torch.set_default_dtype(torch.float32 if self.machine.dry else torch.bfloat16)
        try:
            with self.machine.device:
                return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)

    def bytes_of(self, tokens: int) -> int:
        """Bytes of keys and values of so many tokens."""
        config = self.size.config
        heads = 2 * config["num_key_value_heads"] * config["head_dim"]
        item = 4 if self.machine.dry else 2
        return max(config["num_hidden_layers"] * heads * item * tokens, 1 << 20)

    def sync(self) -> None:
        if not self.machine.dry:
            torch.cuda.synchronize()

    def fresh(self, tokens: int, rows: int = 1) -> torch.Tensor:
        """A prompt that nothing has seen."""
        shape = rows, tokens
        found = torch.randint(5, self.size.config["vocab_size"], shape, generator=self._generator)
        return found.to(self.machine.device)

    def known(self, tokens: int) -> torch.Tensor:
        """The prompt of a length that all parts ask for."""
        if tokens not in self._prompts:
            self._prompts[tokens] = self.fresh(tokens)
        return self._prompts[tokens]

    def ask(self, ids: torch.Tensor, new: int = 3, **options: Any) -> Row:
        """Generate greedily: times, and the new tokens."""
        stamps = Stamps(self.sync)
        streamer = {"streamer": stamps} if len(ids) == 1 else {}
        self.sync()
        begun_s = time.perf_counter()
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            **streamer,
            **options,
        )
        self.sync()
        seconds, at_s = time.perf_counter() - begun_s, stamps.at_s
        row: Row = {"s": seconds, "tokens": found[:, ids.shape[1] :].tolist()}
        if at_s:
            gaps = [1e3 * (b - a) for a, b in itertools.pairwise(at_s[1:])]
            row |= {"ttft_ms": 1e3 * (at_s[1] - begun_s), "tpot_ms": median(gaps)}
        return row

    @contextmanager
    def attached(self, tokens: int, host_tokens: int = 0, **options: Any) -> Iterator[flowkv.KV]:
        """The model with a cache, by tokens that its devices hold."""
        if host_tokens:
            options["host"] = self.bytes_of(host_tokens)
        kv = flowkv.attach(self.model, gpu=self.bytes_of(tokens), **options)
        try:
            yield kv
        finally:
            kv.close()
            del kv
            gc.collect()
            if not self.machine.dry:
                torch.cuda.empty_cache()


def median(figures: list[float]) -> float:
    """Of those behind the first few, if there are more."""
    return statistics.median(figures[SKIPPED:] or figures)


def asked(answers: list[Row], **more: Any) -> Row:
    """The medians of some answers to one question, and all times to the first token."""
    firsts = [answer["ttft_ms"] for answer in answers]
    rest = statistics.median(answer["tpot_ms"] for answer in answers)
    return {"ttft_ms": statistics.median(firsts), "tpot_ms": rest, "all_ttft_ms": firsts, **more}


def plain(bed: Bed) -> Iterator[Row]:
    """The model's own cache, at each length."""
    bed.ask(bed.fresh(64))
    for name, n in zip(LENGTHS, bed.size.lengths, strict=True):
        bed.ask(bed.fresh(n))
        answers = [bed.ask(bed.known(n), bed.size.new) for _ in range(bed.size.rounds)]
        bed.answers[n] = answers[0]["tokens"]
        yield asked(answers, case=f"plain {name}")


def attached(bed: Bed, title: str = "attached", **options: Any) -> Iterator[Row]:
    """Attached, at each length: prompts not seen before, and one asked again."""
    bed.ask(bed.fresh(64))
    begun_s, most = time.perf_counter(), max(bed.size.lengths)
    with ExitStack() as stack:
        with Sampler() as sampler:
            kv = stack.enter_context(bed.attached(5 * most, **options))
        seconds = time.perf_counter() - begun_s
        yield {"case": f"{title}: attach", "s": seconds, "samples": sampler.report()}
        bed.ask(bed.fresh(64))
        for name, n in zip(LENGTHS, bed.size.lengths, strict=True):
            for _ in range(CAPTURED if n <= SHORT[-1] else 1):
                bed.ask(bed.fresh(n))
            unseen = [bed.ask(bed.known(n), bed.size.new)]
            unseen += [bed.ask(bed.fresh(n), bed.size.new) for _ in range(bed.size.rounds - 1)]
            again = [bed.ask(bed.known(n), bed.size.new) for _ in range(bed.size.rounds)]
            # Sums of bfloat16 in another order may choose another token of random weights.
            same = [a["tokens"] == bed.answers.get(n) for a in (unseen[0], *again)]
            yield asked(unseen, case=f"{title} {name}", same=same)
            yield asked(again, case=f"{title} {name} again")
        short = bed.size.lengths[0]
        turns = [torch.cat([bed.known(bed.size.lengths[1]), bed.fresh(TURN)], 1) for _ in range(8)]
        answers = [bed.ask(turn, bed.size.new) for turn in turns][CAPTURED:]
        yield asked(answers, case=f"{title} {LENGTHS[1]}, next turn")
        for what, prompts, new in (
            ("decoding", [bed.known(bed.size.lengths[1])], 2 * bed.size.new),
            ("known", [bed.known(short)] * 4, 3),
            ("unseen", [bed.fresh(short) for _ in range(4)], 3),
        ):
            with Sampler() as sampler:
                for prompt in prompts:
                    bed.ask(prompt, new)
            yield {"case": f"{title}: threads, {what}", "samples": sampler.report()}
        stats = kv.stats()
        reused = stats["tokens_reused"]
        yield {"case": f"{title}: stats", "graphs": stats.get("graphs"), "tokens_reused": reused}


def ungraphed(bed: Bed) -> Iterator[Row]:
    """Attached, and every step in Python."""
    if "graphs" not in flowkv.Config.__struct_fields__:
        return iter([{"case": "without graphs", "skipped": "There are none."}])
    return attached(bed, "without graphs", graphs="off")


def pressure(bed: Bed) -> Iterator[Row]:
    """A pool that is full: prompts that push others out, and those asked again."""
    n = bed.size.long
    with bed.attached(n * 13 // 5, 12 * n) as kv:
        prompts = [bed.fresh(n) for _ in range(8)]
        bed.ask(bed.fresh(64))
        for number, prompt in enumerate(prompts):
            with Sampler() as sampler:
                answer = bed.ask(prompt)
            yield asked([answer], case=f"pool full {number}", samples=sampler.report())
        kv.flush()
        for number in (0, 1, 3, 2, 4):
            with Sampler() as sampler:
                answer = bed.ask(prompts[number])
            yield asked([answer], case=f"from the host {number}", samples=sampler.report())
        tiers = kv.stats()["tiers"].items()
        names = "stored_bytes loaded_bytes dropped".split()
        for name, tier in tiers:
            yield {"case": f"tier {name}", **{key: tier.get(key) for key in names}}


def codecs(bed: Bed) -> Iterator[Row]:
    """Sealed pages, at one length."""
    n = bed.size.long
    for codec in CODECS:
        with bed.attached(4 * n, codec=codec, recent_tokens=0):
            bed.ask(bed.fresh(64))
            bed.ask(bed.fresh(n))
            yield asked([bed.ask(bed.fresh(n), bed.size.new)], case=f"{codec} {LONG}")


def batch(bed: Bed) -> Iterator[Row]:
    """Many rows in one `generate`: a step of all of them."""
    rows, n = bed.size.batch
    prompts = bed.fresh(n, rows)

    def step_ms() -> Row:
        bed.ask(prompts, 8)  # its graph is captured
        short, long = (bed.ask(prompts, new)["s"] for new in (6, 5 + bed.size.new))
        return {"tpot_ms": 1e3 * (long - short) / (bed.size.new - 1), "short_ms": 1e3 * short}

    yield {"case": f"plain batch {BATCH}", **step_ms()}
    for codec in ("raw", *CODECS):
        with bed.attached(2 * rows * n, codec=codec, recent_tokens=0):
            yield {"case": f"batch {BATCH} {codec}", **step_ms()}


def engine(bed: Bed) -> Iterator[Row]:
    """Clients at once, beside one static batch and transformers' continuous batching."""
    rows, n, new = bed.size.clients
    prompts = bed.fresh(n, rows)
    lists, before = prompts.tolist(), bed.fresh(n, rows).tolist()

    def served(case: str, run: Callable[[], Any]) -> tuple[Row, Any]:
        bed.sync()
        begun_s = time.perf_counter()
        found = run()
        bed.sync()
        seconds = time.perf_counter() - begun_s
        return {"case": case, "s": seconds, "tokens_per_s": rows * new / seconds}, found

    bed.ask(prompts)
    yield served("static batch", lambda: bed.ask(prompts, new))[0]
    with (
        bed.attached(3 * rows * (n + new)) as kv,
        flowkv.Engine(bed.model, kv, max_rows=rows, token_budget=8192) as serving,
    ):
        serving.run(before, max_new_tokens=8)
        for case in ("engine", "engine, prompts known"):
            with Sampler() as sampler:
                row, done = served(case, lambda: serving.run(lists, max_new_tokens=new))
            ttft_s = sorted(one.ttft_s for one in done)
            yield row | {"ttft_p50_s": ttft_s[rows // 2], "ttft_max_s": ttft_s[-1]}
            yield {"case": f"{case}: threads", "samples": sampler.report()}
    yield {"case": "generate_batch", **_generate_batch(bed, served, lists)}


def _generate_batch(
    bed: Bed, served: Callable[..., tuple[Row, Any]], lists: list[list[int]]
) -> Row:
    if not bed.machine.timing:
        return {"skipped": "It wants a GPU."}
    import transformers

    options = dict(max_new_tokens=bed.size.clients[2], do_sample=False)
    config = transformers.GenerationConfig(eos_token_id=-1, pad_token_id=0, **options)
    for _ in range(2):  # it captures its graphs first
        row, _ = served("", lambda: bed.model.generate_batch(lists, generation_config=config))
    return {key: figure for key, figure in row.items() if key != "case"}


def static(bed: Bed) -> Iterator[Row]:
    """A static cache, compiled: transformers' own way to one graph a step."""
    n = bed.size.lengths[1]
    # A dry run has no use for what a compiler takes.
    config = {"cache_implementation": "static", "disable_compile": bed.machine.dry}
    begun_s = time.perf_counter()
    for new in (12, 40):
        bed.ask(bed.known(n), new, **config)
    seconds = time.perf_counter() - begun_s
    row = asked([bed.ask(bed.known(n), 40, **config)], case=f"static compiled {LENGTHS[1]}")
    yield row | {"first_s": seconds}


PARTS: dict[str, Callable[[Bed], Iterator[Row]]] = {
    "path": lambda bed: path(bed.machine),
    "plain": plain,
    "attached": attached,
    "pressure": pressure,
    "engine": engine,
    "batch": batch,
    "codecs": codecs,
    "ungraphed": ungraphed,
    "static": static,
}
