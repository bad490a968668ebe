"""What reuse of documents behind another beginning costs in quality: `python -m bench blend`.

A prompt is a system text and four documents; the third and the fourth are one text, cut anywhere.
The first three hold a number each. Four questions follow, each alone behind the same prompt: *copy*
asks for a passage from the middle of a document, *boundary* for what follows the cut, *fact* for a
number, *continuation* is what comes next in the text. One kind alone would call every rule free.
All is against the same model having computed the whole prompt; nats are of the scored tokens, given
the true ones before. A rule's time is the processor's for its prompt and a question of 50 tokens,
over that of computing both, in one run; documents lie in the device pool.
"""

from __future__ import annotations

import argparse
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

import flowkv
from bench.figures import Score, between, interval, percent_more, score
from bench.real import english, load
from flowkv.cli.arguments import AddVerb
from flowkv.data import tiny_path
from flowkv.hooks.blend import Blender
from flowkv.hooks.huggingface.attach import door_of
from flowkv.policy.blend import BlendRule, FirstTokens, ValueDeviation
from flowkv.report.screen import Screen

SYSTEM = (
    "You answer questions about the documents below. Quote them word for word where you can, and "
    "say so if they do not tell what is asked.\n\n"
)
THINGS = ("north gate", "archive", "laboratory")
QUESTIONS = ("copy", "boundary", "fact", "continuation")
LEAST, MOST, QUESTION_TOKENS, CHUNK = 270, 360, 50, 512


class RandomTokens(BlendRule):
    """The control: as many tokens as `values`, at random."""

    name = "random"

    def __init__(self, amount: float = 0.15) -> None:
        self.share = amount

    def choose(self, sizes: Sequence[int], deviation: Any) -> Any:
        """The same for the same sizes."""
        count, seed = sum(sizes), zlib.crc32(np.array(sizes).tobytes())
        found = np.zeros(count, np.bool_)
        chosen = np.random.default_rng(seed).permutation(count)[: math.ceil(self.share * count)]
        found[chosen] = True
        return found


RULES: dict[str, BlendRule] = {
    "nothing": FirstTokens(0),
    "first:16": FirstTokens(16),
    "first:32": FirstTokens(32),
    "values:0.15": ValueDeviation(0.15),
    "values:0.3": ValueDeviation(0.3),
    "values:0.5": ValueDeviation(0.5),
    "random:0.15": RandomTokens(0.15),
}


class Case(NamedTuple):
    """A prompt, its documents, and the questions: token ids, and how many lead to those scored."""

    prompt: list[int]
    documents: list[list[int]]
    questions: dict[str, tuple[list[int], int]]


def cases(loaded: Any, count: int, seed: int = 7) -> Iterator[Case]:
    """Prompts that share no document."""
    tokens, random = loaded.encode(english()), np.random.default_rng(seed)
    encode = loaded.encode
    span = (len(tokens) - 4 * MOST) // (4 * count)
    starts = random.permutation(4 * count)[: 3 * count] * span
    for n in range(count):
        documents, codes = [], []
        for part, thing in enumerate(THINGS):
            size, at = int(random.integers(LEAST, MOST)), int(starts[3 * n + part])
            codes.append(str(random.integers(10_000, 100_000)))
            fact = encode(f" The access code of the {thing} is {codes[-1]}.")
            own, cut = tokens[at : at + size], int(random.integers(40, size - 60))
            documents.append(own[:cut] + fact + own[cut:])
        after = int(starts[3 * n + 2]) + len(documents[2]) - len(fact)  # goes on where it was cut
        size = int(random.integers(LEAST, MOST))
        documents.append(tokens[after : after + size])
        prompt = encode(SYSTEM) + [t for document in documents for t in document]
        which = int(random.integers(0, 2))
        middle = len(documents[which]) // 2
        passage = documents[which][middle : middle + 24 + 48]
        asked = encode(f"\n\nThe access code of the {THINGS[which]} is")
        digits = encode(f" {codes[which]}")
        follows = tokens[after + size : after + size + 48]
        yield Case(
            prompt,
            documents,
            {
                "copy": (encode("\n\n") + passage, len(encode("\n\n")) + 24),
                "boundary": (
                    encode("\n\n") + documents[2][-16:] + documents[3][:32],
                    len(encode("\n\n")) + 16,
                ),
                "fact": (asked + digits, len(asked)),
                "continuation": (follows, 1),
            },
        )


def computed(blender: Blender, seq: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits behind each of the next tokens of a sequence."""
    found = []
    for at in range(0, len(ids), CHUNK):
        part = list(ids[at : at + CHUNK])
        with blender.kv.step([seq], [part]) as step, torch.no_grad():
            found.append(blender.forward(step, torch.arange(len(part))))
    return torch.cat(found)


def begun(blender: Blender, case: Case, rule: BlendRule | None) -> Any:
    """A sequence that holds the prompt, by a rule, or computed whole."""
    seq = blender.kv.open(case.prompt, reuse=False)
    seq.publishable = False
    if rule is not None:
        blender.rule = rule
        blender.blend(seq, len(case.prompt))
    rest = case.prompt[seq.length :]
    for at in range(0, len(rest), CHUNK):
        part = rest[at : at + CHUNK]
        with blender.kv.step([seq], [part]) as step, torch.no_grad():
            blender.forward(step, torch.tensor([len(part) - 1]))
    return seq


def scores(blender: Blender, case: Case) -> Iterator[tuple[tuple[str, str], Score]]:
    """What each rule makes of one prompt, by rule and question."""
    exact: dict[str, torch.Tensor] = {}
    for name, rule in {"whole": None, **RULES}.items():
        with begun(blender, case, rule) as seq:
            for question, (ids, first) in case.questions.items():
                with blender.kv.fork(seq) as twin:
                    logits = computed(blender, twin, ids[:-1])[first - 1 :]
                found = logits.float().log_softmax(-1)
                whole = exact.setdefault(question, found)
                yield (name, question), score(found, whole, torch.tensor(ids[first:]))


def paces(blender: Blender, case: Case) -> Iterator[tuple[str, float]]:
    """By rule: time to the end of prompt and question, over that of computing both."""
    question = case.prompt[:QUESTION_TOKENS]

    def took(rule: BlendRule | None) -> float:
        begun_s = time.process_time()
        with begun(blender, case, rule) as seq:
            with blender.kv.step([seq], [question]) as step, torch.no_grad():
                blender.forward(step, torch.tensor([len(question) - 1]))
            return time.process_time() - begun_s

    for rule in RULES.values():  # what is compiled, is
        took(rule)
    whole_s = took(None)
    for name, rule in RULES.items():
        own_s, after_s = took(rule), took(None)
        yield name, 2 * own_s / (whole_s + after_s)
        whole_s = after_s


def rows(
    read: Sequence[dict[tuple[str, str], Score]], speed: Sequence[dict[str, float]]
) -> Iterator[dict[str, str]]:
    """The table: means over prompts, and 95 % intervals over prompts like them."""

    def kl(rule: str) -> NDArray[np.float64]:
        return np.array([mean(one[rule, question].kl for question in QUESTIONS) for one in read])

    nothing = kl("nothing")
    for rule in ("whole", *RULES):
        row = {"rule": rule}
        agreed = mean(one[rule, q].agreement for one in read for q in QUESTIONS)
        row["same token"] = f"{agreed:.3f}"
        own = kl(rule)
        row["KL"] = f"{own.mean():.3f}"
        closed, high, low = (100 * (1 - share) for share in interval(own, nothing))
        row["KL closed"] = f"{closed:.0f} % [{low:.0f}, {high:.0f}]"
        for question in QUESTIONS:
            more = [one[rule, question].nats - one["whole", question].nats for one in read]
            low, middle, high = percent_more(more)
            if rule == "whole":
                plain = math.exp(mean(one[rule, question].nats for one in read))
                row[question] = f"ppl {plain:.2f}"
            else:
                row[question] = f"{middle:+.0f} % [{low:+.0f}, {high:+.0f}]"
        row["time"] = between([one[rule] for one in speed] if rule != "whole" else [1.0])
        yield row


def served(requests: int, documents: int, clients: int) -> Iterator[tuple[str, list[float]]]:
    """Seconds to the first tokens of RAG requests over the fixture, by what is reused.

    Each asks about so many of the same documents in an order of its own, 500 tokens each; as many
    requests as clients are under way at any time.
    """
    random, text = np.random.default_rng(3), english().encode()
    pool = [list(text[at : at + 500]) for at in range(0, 500 * 2 * documents, 500)]
    prompts = []
    for _ in range(requests):
        chosen = random.permutation(len(pool))[:documents]
        question = list(f"\n\n{random.integers(1 << 30)}: which of these?".encode())
        prompts.append([*b"Documents:\n", *(t for i in chosen for t in pool[i]), *question])
    for name in ("exact", "first:16", "values:0.15"):
        model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32).eval()
        model.config.max_position_embeddings = 1 << 16
        how: dict[str, Any] = {}
        if name != "exact":
            how = {"reuse": "blend", "recompute": name}
        with (
            flowkv.attach(model, gpu="1GiB", **how) as kv,
            flowkv.Engine(model, kv, max_rows=clients) as engine,
        ):
            if how:
                kv.learn(pool)
            engine.run(prompts[:1], max_new_tokens=2)  # what is compiled, is
            with ThreadPoolExecutor(clients) as people:
                done = people.map(
                    lambda p: engine.submit(p, max_new_tokens=8).result(), prompts[1:]
                )
                yield name, [one.ttft_s for one in done]


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("blend", _blend, "documents known behind another beginning, against computing all")
    added.option("--model", "MODEL", "folder or Hugging Face id", default="smollm2")
    added.option("--prompts", "N", "default %(default)s", type=int, default=48)
    added.option("--seed", "N", "of where texts are cut; default %(default)s", type=int, default=7)
    added.option("--timed", "N", "prompts that are timed; default %(default)s", type=int, default=5)
    added.option("--requests", "N", "also serves so many over the fixture", type=int, default=0)
    added.option("--documents", "N", "of each; default %(default)s", type=int, default=20)
    added.option("--clients", "N", "default %(default)s", type=int, default=2)
    added.option("--threads", "N", "of torch; default %(default)s", type=int, default=1)
    added.set_defaults(dtype="float32")


def _blend(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    torch.set_num_threads(given.threads)
    if given.requests:
        found = list(served(given.requests, given.documents, given.clients))
        exact = found[0][1]
        screen.table(
            ["reuse", "TTFT p50", "p95", "of exact, p95"],
            [
                [
                    name,
                    f"{np.percentile(seconds, 50):.2f} s",
                    f"{np.percentile(seconds, 95):.2f} s",
                    f"{np.percentile(seconds, 95) / np.percentile(exact, 95):.2f}",
                ]
                for name, seconds in found
            ],
        )
        return 0, {name: seconds for name, seconds in found}
    loaded = load(given)
    kv = flowkv.attach(loaded.model, gpu="1GiB", reuse="blend", recompute=0.15)
    door = door_of(loaded.model)
    assert door is not None
    blender, read, speed = door.blending.now(), list[Any](), list[dict[str, float]]()
    for number, case in enumerate(cases(loaded, given.prompts, given.seed)):
        kv.learn(case.documents)
        if number < given.timed:
            speed.append(dict(paces(blender, case)))
        read.append(dict(scores(blender, case)))
        kv.invalidate()
        screen.say(f"prompt {number + 1} of {given.prompts}")
    kv.close()
    table = list(rows(read, speed))
    screen.table(list(table[0]), [list(row.values()) for row in table])
    return 0, {"rows": table, "prompts": len(read)}
