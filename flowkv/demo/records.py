"""What the demo's processes tell each other, as files of JSON."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.observe.timeline import Timeline

# What the demo asks: a conversation and a batch with a shared beginning, over real source text.
#
# The text is the source of Python's standard library, which is wherever Python is. Conversation,
# batch and warm-up read different parts of it, so that none of them is served by another's pages.

Encode = Callable[[str], list[int]]


class DemoSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is asked, in tokens.

    Attributes:
        context: About what the last turn of the conversation and the batch's prompts hold.
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
        """Tokens of a question: what follows the opening, the answers and questions, fits."""
        return max(64, self.context // 16)

    @property
    def opening(self) -> int:
        """Tokens before the first answer."""
        return self.context - (self.turns - 1) * (self.question + self.answer)

    @property
    def shared(self) -> int:
        """Tokens that all prompts of the batch begin with."""
        return self.context * 2 // 3

    @property
    def ending(self) -> int:
        """Tokens of each prompt of the batch that are its own."""
        return max(32, self.context // 32)


class DemoCase(msgspec.Struct):
    """One request, with the answer of the model without FlowKV.

    Attributes:
        name: Shown to people.
        prompts: Rows of equal length.
        answers: New tokens of each row.
    """

    name: str
    prompts: list[list[int]]
    answers: list[list[int]] = []

    @property
    def tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(map(len, self.prompts))


class DemoWorkload(msgspec.Struct):
    """Prompts as tokens; the conversation grows by the answers it gets.

    Attributes:
        opening: The conversation's first prompt.
        questions: What each further turn appends to the answer before it.
        batch: Prompts with a shared beginning.
        warm_up: One prompt of the conversation's length and a batch of the other's shape, about
            other text.
    """

    opening: list[int]
    questions: list[list[int]]
    batch: list[list[int]]
    warm_up: list[list[list[int]]]


def build_workload(
    encode: Encode, sizes: DemoSizes, *, most_tokens: int | None = None
) -> DemoWorkload:
    """Makes prompts out of source text.

    Args:
        encode: The model's tokenizer.
        sizes: How much.
        most_tokens: Longest sequence that the model takes.

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


class _Text:
    """Source text that is read once, from the beginning of a line each time."""

    def __init__(self, encode: Encode) -> None:
        self._encode, self._at = encode, 0
        self._text = "".join(_sources())

    def take(self, count: int, heading: str = "") -> list[int]:
        """The next `count` tokens, heading included."""
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
    """Source files of the standard library, by name; those of FlowKV where it comes without."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(library.glob("*.py")) if path.name[0] != "_"]
    for path in paths or sorted(Path(__file__).parents[1].rglob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def _bare(encode: Encode, text: str) -> list[int]:
    """Tokens of a text in the middle: without what the tokenizer puts at the beginning."""
    tokens, before = encode(text), encode("")
    return tokens[len(before) :] if tokens[: len(before)] == before else tokens


PLAN = "plan.json"
FINDINGS = "{}-findings.json"


class DemoPlan(msgspec.Struct, kw_only=True):
    """What both processes are told.

    Attributes:
        model: Folder or id of the model.
        store: Directory of the disk tier, with a size if need be ("./kv:20GiB").
        sizes: How much is asked.
        repeats: How often everything is measured.
        dtype: Of weights and cache.
        device: Where the model computes; "" chooses.
        threads: Threads of torch; 0 leaves torch's choice.
        trace: File that gets a Chrome trace of the restores that are watched; "" for none.
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
    """One request, measured.

    Attributes:
        way: "cold" (without FlowKV, first process), "first" (FlowKV attached, nothing stored),
            "again" (pages in the pool of the same process), "recompute" (without FlowKV, second
            process), "disk" (second process, pages on disk), "watched" (the same once more, with
            its timeline taken).
        case: Name of the case.
        ttft_s: Time to the first token.
        tpot_s: Time per further token; 0 if only the first was asked for.
        identical: Whether the tokens are those of the model without FlowKV.
        seen: Prompt tokens that FlowKV was asked for.
        reused: Prompt tokens that were not computed.
        loaded_bytes: Read from tiers, by kind.
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
    """A restore of the conversation's last turn, as it went.

    Attributes:
        timeline: What was computed, what was loaded, and when they met.
        bytes_per_s: Of the slow disk that was emulated; 0.0 for the disk as it is.
    """

    timeline: Timeline
    bytes_per_s: float = 0.0


class Findings(msgspec.Struct, kw_only=True):
    """What one process found out.

    Attributes:
        samples: In the order they were measured.
        pool_bytes: What the device pools held at the end.
        machine: Device, threads and versions.
        attach_s: How long attaching took, the store's opening included.
        fresh: Whether the store knew nothing of this before.
        cases: The requests.
        texts: What the last turn asked and what was answered, to be shown.
        restores: Those that were watched.
    """

    samples: list[Sample]
    pool_bytes: int
    machine: dict[str, Any]
    attach_s: float = 0.0
    fresh: bool = True
    cases: list[DemoCase] = []
    texts: list[str] = []
    restores: list[WatchedRestore] = []
