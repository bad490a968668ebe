"""The demo's prompts, the findings of its processes, their summary, and its report."""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.data import tiny_path
from flowkv.observe.timeline import Timeline
from flowkv.report.account import restore_section
from flowkv.report.page import Bars, Figures, Section, Table, write_report
from flowkv.report.words import seconds, times

# Prompts of the demo: a conversation and a batch with a shared beginning, over real text.
#
# A chat model is asked about a page that ships with FlowKV, other models continue the source of
# Python's standard library, which comes with Python. Conversation, batch and warm-up begin
# differently, so that none of them is served by another's pages.

Encode = Callable[[str], list[int]]
Chat = Callable[[list[dict[str, str]]], str]

QUESTIONS = (
    "How many parameters does the model have?",
    "What are its tokens?",
    "On which data was it trained?",
    "How long did the training take?",
    "What is the licence of the weights?",
    "What is the model good for?",
)
"""Questions about the model card that ships with FlowKV, `flowkv/data/tiny/README.md`."""


class DemoSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the demo's prompts, in tokens.

    Attributes:
        context: Approximate length of the conversation's last prompt and of the batch's prompts.
        turns: Turns of the conversation.
        rows: Prompts of the batch.
        answer: New tokens per answer.
    """

    context: int = 3072
    turns: int = 4
    rows: int = 3
    answer: int = 24

    @property
    def question(self) -> int:
        """Return the tokens of a question, so that opening, questions and answers fit."""
        return max(64, self.context // 16)

    @property
    def opening(self) -> int:
        """Return the tokens before the first answer."""
        return self.context - (self.turns - 1) * (self.question + self.answer)

    @property
    def shared(self) -> int:
        """Return the tokens that all prompts of the batch begin with."""
        return self.context * 2 // 3

    @property
    def ending(self) -> int:
        """Return the tokens of each prompt of the batch after the shared ones."""
        return max(32, self.context // 32)


class DemoCase(msgspec.Struct):
    """One request, with the answer of the model without FlowKV.

    Attributes:
        name: Displayed name.
        prompts: Rows of equal length.
        answers: New tokens of each row.
        asked: Question of each row in words, for a chat model.
    """

    name: str
    prompts: list[list[int]]
    answers: list[list[int]] = []
    asked: Sequence[str] = ()

    @property
    def tokens(self) -> int:
        """Return the tokens of all prompts together."""
        return sum(map(len, self.prompts))


class DemoWorkload(msgspec.Struct):
    """Prompts as tokens; the conversation grows by the answers it gets.

    Attributes:
        opening: The conversation's first prompt.
        questions: Tokens that each further turn appends to the answer before it.
        batch: Prompts with a shared beginning.
        warm_up: One prompt of the conversation's length and a batch of the other's shape, about
            other text.
        asked: Questions of the turns, then of the batch's rows, in words, for a chat model.
    """

    opening: list[int]
    questions: list[list[int]]
    batch: list[list[int]]
    warm_up: list[list[list[int]]]
    asked: Sequence[str] = ()


def build_workload(
    encode: Encode, sizes: DemoSizes, *, most_tokens: int | None = None, chat: Chat | None = None
) -> DemoWorkload:
    """Make prompts out of source text, or questions about a document.

    Args:
        encode: The model's tokenizer.
        sizes: Sizes of the prompts; questions keep their length, and the document is cut to fit.
        most_tokens: Longest sequence that the model takes.
        chat: The model's chat template, if it has one.

    Raises:
        ConfigError: The sizes do not fit each other or the model.
    """
    if most_tokens is not None and sizes.context + sizes.answer > most_tokens:
        raise ConfigError(
            f"a context of {sizes.context} tokens and an answer do not fit into the model's"
            f" {most_tokens}",
            f"Give at most --context {most_tokens - sizes.answer}",
        )
    if sizes.opening < sizes.question:
        raise ConfigError(
            f"a context of {sizes.context} tokens is too short for {sizes.turns} turns",
            f"Give at least --context {sizes.turns * (sizes.question + sizes.answer)}",
        )
    text = _Text(encode)
    if chat:
        return _interview(encode, chat, sizes, text)
    opening = text.take(sizes.opening, "# Here is some Python to talk about.\n\n")
    questions = [
        text.take(sizes.question, f"\n\n# Question {turn}: and how does this differ?\n\n")
        for turn in range(2, sizes.turns + 1)
    ]

    def batch(heading: str) -> list[list[int]]:
        shared = text.take(sizes.shared, heading)
        tasks = range(1, sizes.rows + 1)
        return [shared + text.take(sizes.ending, f"\n\n# Task {n}:\n") for n in tasks]

    asked = batch("# Here is some Python, and a task about it.\n\n")
    warm_up = [[text.take(sizes.context, "# To warm up:\n")], batch("# To warm up a batch:\n")]
    return DemoWorkload(opening, questions, asked, warm_up)


_MARK = "\N{SECTION SIGN}"


def _interview(encode: Encode, chat: Chat, sizes: DemoSizes, text: _Text) -> DemoWorkload:
    """Return questions about a document, in the form of the chat template."""

    def around(*said: str) -> list[list[int]]:
        """Return the tokens of a chat with alternating turns, in parts between the marks."""
        roles = itertools.cycle(("user", "assistant"))
        turns = [{"role": role, "content": words} for role, words in zip(roles, said, strict=False)]
        return [_bare(encode, part) for part in chat(turns).split(_MARK)]

    asked = [QUESTIONS[n % len(QUESTIONS)] for n in range(sizes.turns + sizes.rows)]
    head, first = around(f"{_MARK}\n\n{asked[0]}")
    questions = [around("?", _MARK, question)[1] for question in asked[1 : sizes.turns]]
    rows = [around(f"In a sentence:\n\n{_MARK}\n\n{ask}") for ask in asked[sizes.turns :]]
    ending, line = max(len(row[1]) for row in rows), _bare(encode, "\n")[-1:]
    around_it = len(head) + len(first) + sum(len(q) + sizes.answer for q in questions)
    if around_it >= sizes.context:
        raise ConfigError(
            f"a context of {sizes.context} tokens is too short for {sizes.turns} turns",
            f"Give more than --context {around_it}",
        )
    document = _bare(encode, (tiny_path() / "README.md").read_text())[: sizes.context - around_it]
    shared = text.take(len(rows[0][0]) + len(document))
    return DemoWorkload(
        opening=head + document + first,
        questions=questions,
        # Rows of a batch are equally long: empty lines pad shorter questions.
        batch=[top + document + line * (ending - len(end)) + end for top, end in rows],
        warm_up=[
            [text.take(around_it + len(document))],
            [shared + text.take(ending) for _ in rows],
        ],
        asked=asked,
    )


class _Text:
    """Source text that is read once, from the beginning of a line each time."""

    def __init__(self, encode: Encode) -> None:
        self._encode, self._at = encode, 0
        self._text = "".join(_sources())

    def take(self, count: int, heading: str = "") -> list[int]:
        """Return the next `count` tokens, heading included."""
        size = 2 * count  # characters; most tokens are longer than that
        while True:
            end = self._at + size
            tokens = _bare(self._encode, heading + self._text[self._at : end])
            if len(tokens) >= count:
                self._at = self._text.find("\n", end) + 1 or len(self._text)
                return tokens[:count]
            if end >= len(self._text):
                raise ConfigError(
                    "there is too little Python source on this machine for such long prompts",
                    "Give a smaller --context",
                )
            size *= 2


def _sources() -> Iterator[str]:
    """Yield source files of the standard library, by name; those of FlowKV if there are none."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(library.glob("*.py")) if path.name[0] != "_"]
    for path in paths or sorted(Path(__file__).parents[1].rglob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def _bare(encode: Encode, text: str) -> list[int]:
    """Return the tokens of a text without those that the tokenizer puts at the beginning."""
    tokens, before = encode(text), encode("")
    return tokens[len(before) :] if tokens[: len(before)] == before else tokens


# The plan of both processes, and the findings of each.


class DemoPlan(msgspec.Struct, kw_only=True):
    """Plan of the demo that both processes get.

    Attributes:
        model: Folder or id of the model.
        store: Directory of the disk tier, with a size if need be ("./kv:20GiB").
        sizes: Sizes of the prompts.
        repeats: Number of measurements of each request.
        dtype: Dtype of weights and cache.
        device: Device of the model; "" chooses one.
        threads: Threads of torch; 0 leaves torch's choice.
        trace: File for a Chrome trace of the watched restores; "" for none.
    """

    model: str
    store: str
    sizes: DemoSizes = DemoSizes()
    repeats: int = 3
    dtype: str = "float32"
    device: str = ""
    threads: int = 0
    trace: str = ""


class Sample(msgspec.Struct, kw_only=True):
    """Measurement of one request.

    Attributes:
        way: "cold" (without FlowKV, first process), "first" (FlowKV attached, nothing stored),
            "again" (pages in the pool of the same process), "recompute" (without FlowKV, second
            process), "disk" (second process, pages on disk), "watched" (the same once more, with
            its timeline taken).
        case: Name of the case.
        ttft_s: Time to the first token.
        tpot_s: Time per further token; 0 if only the first was asked for.
        identical: Whether the tokens are those of the model without FlowKV.
        seen: Prompt tokens that FlowKV looked up.
        reused: Prompt tokens that were not computed.
        loaded_bytes: Bytes read from tiers, by kind.
    """

    way: str
    case: str
    ttft_s: float
    tpot_s: float
    identical: bool = True
    seen: int = 0
    reused: int = 0
    loaded_bytes: dict[str, int] = {}


class WatchedRestore(msgspec.Struct, kw_only=True):
    """Restore of the conversation's last turn, with its timeline.

    Attributes:
        timeline: Computed and loaded pieces, and their meeting point.
        bytes_per_s: Rate of the emulated slow disk; 0.0 for the real disk.
    """

    timeline: Timeline
    bytes_per_s: float = 0.0


class Findings(msgspec.Struct, kw_only=True):
    """Findings of one process.

    Attributes:
        samples: Measurements, in their order.
        machine: Device, threads and versions.
        pool_bytes: Used bytes of the device pools at the end of the first process.
        attach_s: Time of attaching, with the opening of the store.
        fresh: Whether the store had none of these prompts before.
        cases: The requests.
        talk: Questions and answers of a chat model, answered from the store.
        restores: Restores with their timelines.
    """

    samples: list[Sample]
    machine: dict[str, Any]
    pool_bytes: int = 0
    attach_s: float = 0.0
    fresh: bool = True
    cases: list[DemoCase] = []
    talk: list[tuple[str, str]] = []
    restores: list[WatchedRestore] = []


class DemoTask(msgspec.Struct):
    """Task of one process.

    Attributes:
        phase: "store" or "restore".
        plan: The plan of the demo.
        work: A directory of the demo's own.
        cases: The requests of the first process, with their answers.
    """

    phase: str
    plan: DemoPlan
    work: str
    cases: list[DemoCase] = []


class DemoMessage(msgspec.Struct, omit_defaults=True):
    """Line that a process writes: its progress, a note, a failure, or its findings."""

    done: int = 0
    total: int = 0
    doing: str = ""
    note: str = ""
    problem: str = ""
    remedy: str = ""
    found: Findings | None = None


# Summary of the demo's samples: medians, factors, and the equality of answers.


class CaseSummary(msgspec.Struct, kw_only=True):
    """Summary of one request; times are medians in seconds, NaN where nothing was measured.

    Attributes:
        name: Displayed name.
        rows: Prompts of the request.
        tokens: Tokens of all its prompts.
        ttft_cold_s: TTFT without FlowKV, first process.
        ttft_first_s: TTFT with FlowKV, where the store began empty and has the earlier requests.
        reused_first_tokens: Prompt tokens reused in that run.
        ttft_again_s: TTFT of the same request again, same process.
        ttft_recompute_s: TTFT without FlowKV, second process.
        ttft_disk_s: TTFT in the second process, pages on disk.
        reused_tokens: Prompt tokens reused in that run.
        loaded_bytes: Bytes read in that run, by kind of tier.
        identical: Whether every answer was that of the model without FlowKV.
    """

    name: str
    rows: int
    tokens: int
    ttft_cold_s: float
    ttft_first_s: float
    reused_first_tokens: int
    ttft_again_s: float
    ttft_recompute_s: float
    ttft_disk_s: float
    reused_tokens: int
    loaded_bytes: dict[str, int]
    identical: bool

    @property
    def speedup(self) -> float:
        """Return the factor between recomputing and restoring, both in the second process."""
        return self.ttft_recompute_s / self.ttft_disk_s if self.ttft_disk_s else math.nan


class Summary(msgspec.Struct, kw_only=True):
    """Summary of the demo, as shown and as the object of `--json`.

    Attributes:
        tokens_identical: Whether all answers of both processes were the same.
        tokens_reused: Prompt tokens that the second process did not compute, asking once.
        hit_rate: Share of `tokens_reused` in the prompt tokens.
        ttft_cold_s: TTFT of the conversation's last turn without FlowKV, first process.
        ttft_recompute_s: The same in the second process.
        ttft_again_s: TTFT with FlowKV, asked again in the first process.
        ttft_restored_s: TTFT with FlowKV in the second process, from disk.
        tpot_plain_s: Time per further token without FlowKV.
        tpot_paged_s: The same with FlowKV, second process.
        attach_s: Time of attaching, once in a process, before any prompt.
        restored_from: Bytes that the second process read, asking once, by kind of tier.
        store_bytes: Bytes of the store on the disk at the end.
        pool_bytes: Used bytes of the device pools at the end of the first process.
        device: Device of the model.
        report: Path of the HTML report; "" if none was written.
        store: Directory of the store; "" if it was removed.
        store_was_new: Whether the store had none of these prompts before.
        restores: Descriptions of the watched restores of the last turn, a line each.
        talk: Questions and answers of a chat model, answered from the store.
        repeats: Measurements behind each median.
        seconds: Duration of the whole demo.
        model: Folder or id of the model.
        machine: Device, threads and versions.
        cases: All requests.
        processes: Process ids of both processes.
    """

    tokens_identical: bool
    tokens_reused: int
    hit_rate: float
    ttft_cold_s: float
    ttft_recompute_s: float
    ttft_again_s: float
    ttft_restored_s: float
    tpot_plain_s: float
    tpot_paged_s: float
    attach_s: float
    restored_from: dict[str, int]
    store_bytes: int
    pool_bytes: int
    device: str
    report: str = ""
    store: str = ""
    store_was_new: bool
    restores: list[str]
    talk: list[tuple[str, str]]
    repeats: int
    seconds: float = 0.0
    model: str
    machine: dict[str, Any]
    cases: list[CaseSummary]
    processes: list[int]


def summarise(
    plan: DemoPlan, stored: Findings, restored: Findings, *, store_bytes: int = 0
) -> Summary:
    """Summarise the findings of both processes.

    Args:
        plan: The plan of the demo.
        stored: Findings of the first process.
        restored: Findings of the second process.
        store_bytes: Bytes of the store on the disk.
    """
    samples = [*stored.samples, *restored.samples]
    cases = [_case(case, samples) for case in stored.cases]
    asked, talk = cases[-2:], cases[-2]
    seen = sum(_worst(samples, case.name).seen for case in asked)
    reused, loaded = sum(case.reused_tokens for case in asked), Counter[str]()
    for case in asked:
        loaded.update(case.loaded_bytes)
    tpot_s = {
        way: _median(s.tpot_s for s in samples if (s.way, s.case) == (way, talk.name) and s.tpot_s)
        for way in ("cold", "disk")
    }
    return Summary(
        tokens_identical=all(sample.identical for sample in samples),
        tokens_reused=reused,
        hit_rate=reused / seen if seen else 0.0,
        ttft_cold_s=talk.ttft_cold_s,
        ttft_recompute_s=talk.ttft_recompute_s,
        ttft_again_s=talk.ttft_again_s,
        ttft_restored_s=talk.ttft_disk_s,
        tpot_plain_s=tpot_s["cold"],
        tpot_paged_s=tpot_s["disk"],
        attach_s=restored.attach_s,
        restored_from=dict(loaded),
        store_bytes=store_bytes,
        pool_bytes=stored.pool_bytes,
        device=restored.machine["device"],
        store_was_new=stored.fresh,
        restores=[
            f"{_source(watched)}: {watched.timeline.describe()}" for watched in restored.restores
        ],
        talk=restored.talk,
        repeats=plan.repeats,
        model=plan.model,
        machine={k: v for k, v in restored.machine.items() if k != "pid"},
        cases=cases,
        processes=[stored.machine["pid"], restored.machine["pid"]],
    )


def _source(watched: WatchedRestore) -> str:
    slow = f"from a disk of {watched.bytes_per_s / 1e6:.3g} MB/s, emulated"
    return slow if watched.bytes_per_s else "measured"


def _case(case: DemoCase, samples: list[Sample]) -> CaseSummary:
    mine = [sample for sample in samples if sample.case == case.name]
    disk = _worst(mine, case.name)
    return CaseSummary(
        name=case.name,
        rows=len(case.prompts),
        tokens=case.tokens,
        **{f"ttft_{way}_s": _median(s.ttft_s for s in mine if s.way == way) for way in _WAYS},
        reused_first_tokens=next((s.reused for s in mine if s.way == "first"), 0),
        reused_tokens=disk.reused,
        loaded_bytes=disk.loaded_bytes,
        identical=all(sample.identical for sample in mine),
    )


_WAYS = {
    "cold": "1st process, without FlowKV",
    "first": "with FlowKV, first time",
    "again": "with FlowKV, asked again",
    "recompute": "2nd process, without FlowKV",
    "disk": "restored from disk",
}


def _worst(samples: Iterable[Sample], case: str) -> Sample:
    """Return the restore that reused least: a claim must hold for every repeat."""
    nothing = Sample(way="", case="", ttft_s=0.0, tpot_s=0.0)
    restored = [sample for sample in samples if (sample.way, sample.case) == ("disk", case)]
    return min(restored, key=lambda sample: sample.reused, default=nothing)


def _median(values: Iterable[float]) -> float:
    return statistics.median(found) if (found := list(values)) else math.nan


def write_demo_report(
    path: Path, plan: DemoPlan, summary: Summary, *, restores: Sequence[WatchedRestore] = ()
) -> Path:
    """Write the report, and return its path.

    Args:
        path: The HTML file.
        plan: The plan of the demo.
        summary: The summary of both processes.
        restores: Restores of the last turn with their timelines.
    """
    talk, batch = summary.cases[-2:]
    first = "The conversation is taken up where it was left, with a new question at its end."
    shared = (
        f"{batch.rows} prompts of {batch.tokens // batch.rows:,} tokens in one call; the first"
        f" {plan.sizes.shared:,} are the same in all of them."
    )
    of = _of(summary)
    sections = [
        _headline(summary),
        _first_token(talk, first, f"Prompt of {talk.tokens:,} tokens, {of}"),
        *map(_restore, restores),
        _conversation(summary),
        _first_token(batch, shared, f"{batch.tokens:,} prompt tokens, {of}"),
        _method(plan, summary),
    ]
    today = datetime.datetime.now().astimezone()
    machine = summary.machine
    return write_report(
        path.absolute(),
        "Prompts that outlive their process",
        sections,
        lead="FlowKV demo: one process answered and exited, a second one answered from its store.",
        footer=f"{machine['device_name']}, {machine['threads']} threads, {machine['dtype']};"
        f" FlowKV {machine['flowkv']}, torch {machine['torch']}, Python {machine['python']};"
        f" {today:%Y-%m-%d %H:%M %Z}; {summary.seconds:.0f} s in all.",
    )


def _restore(watched: WatchedRestore) -> Section:
    if not watched.bytes_per_s:
        return restore_section(watched.timeline, title="How it was restored")
    title = f"How it would be from a disk of {watched.bytes_per_s / 1e6:.3g} MB/s"
    return restore_section(watched.timeline, title=title, source="emulated")


def _headline(summary: Summary) -> Section:
    talk = summary.cases[-2]
    same = "yes" if summary.tokens_identical else "NO"
    figures = Figures(
        [
            ("Faster first token", times(talk.speedup), "restored, over recomputing"),
            ("Restored in", seconds(talk.ttft_disk_s), f"{talk.tokens:,} prompt tokens"),
            ("Reused", f"{summary.hit_rate:.1%}", f"{summary.tokens_reused:,} tokens"),
            ("Tokens identical", same, "in every answer of both processes"),
        ]
    )
    return Section("In short", source="measured", parts=[figures])


def _first_token(case: CaseSummary, text: str, caption: str) -> Section:
    times_ms = [1e3 * getattr(case, f"ttft_{way}_s") for way in _WAYS]
    bars = Bars(caption, list(_WAYS.values()), {"": times_ms}, unit="ms")
    return Section(f"Time to the first token: {case.name}", text, [bars], source="measured")


def _of(summary: Summary) -> str:
    return f"median of {summary.repeats}" if summary.repeats > 1 else "measured once"


def _conversation(summary: Summary) -> Section:
    turns = summary.cases[:-1]
    labels = [case.name.rpartition(", ")[2] for case in turns]
    ways = {
        "without FlowKV": [case.ttft_cold_s * 1e3 for case in turns],
        "with FlowKV, first time": [case.ttft_first_s * 1e3 for case in turns],
    }
    reused = [
        [label, case.tokens, case.reused_first_tokens]
        for label, case in zip(labels, turns, strict=True)
    ]
    return Section(
        "Turn by turn, first process",
        "Without a cache every turn computes all turns before it. With FlowKV attached, only new"
        " tokens are computed; the first turn shows the cost of an attached cache without any hit.",
        [
            Bars("Time to the first token", labels, ways, unit="ms"),
            Table(["turn", "prompt tokens", "of these reused"], reused),
        ],
        source="measured",
    )


def _method(plan: DemoPlan, summary: Summary) -> Section:
    first, second = summary.processes
    empty = "" if summary.store_was_new else " The store had these prompts before."
    prompts = "source text of Python's standard library"
    if summary.talk:
        prompts = "questions about the model card of the model that ships with FlowKV"
    text = (
        f"Model: {Path(plan.model).name or plan.model}, {summary.machine['parameters']:,}"
        f" parameters. The prompts are {prompts}. Process {first}"
        f" answered, stored and exited; process {second} was started afterwards and opened the same"
        f" directory.{empty} TTFT is the wall time from calling generate to the first new token;"
        f" attaching, once in a process, took {seconds(summary.attach_s)} and is not in it."
        " Both processes warmed up with other prompts of the same shapes first. Compared runs were"
        f" interleaved ({_of(summary)}). Before every restore the cache was opened"
        " again, and the operating system was asked to drop the files from its page cache."
    )
    if summary.machine["wait_policy"]:
        text += f" OMP_WAIT_POLICY was {summary.machine['wait_policy']} in all runs."
    return Section("How it was measured", text)
