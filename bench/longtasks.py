"""`python -m bench longtasks`: what everything approximate in FlowKV does to long prompts.

A prompt's context is read once and kept in each approximate way; its question is then read
exactly behind each. Three kinds of tasks, because each alone calls some way free:

- *needle* and *passkey*: one number in repeated noise; right if greedy decoding says all of it,
  behind at most four other tokens, such as a colon.
- Six tasks of RULER (arXiv 2404.06654) that need no other data. Small models cannot solve them, but
  rank answers: the score is the share of pairs of a right and a wrong answer, both of the context,
  in which the right one is likelier.
- *text*: the next 256 tokens of a text, their divergence from the exact prediction by distance.

Intervals are 95 %, by bootstrap over prompts; ratios are of the same prompts.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import json
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

import flowkv
from bench import figures
from bench.blend import begun, computed
from bench.figures import divergence, score
from bench.real import english, load
from bench.sparsify import begin, thinned
from flowkv.cli.arguments import AddVerb
from flowkv.core.geometry import GRANULE_BYTES, page_layout
from flowkv.hooks.huggingface.attach import door_of
from flowkv.kernels.reference import decoded, encoded
from flowkv.kvt.learning import coded_pages
from flowkv.policy.blend import FirstTokens, ValueDeviation
from flowkv.policy.sparsify import SPARSIFIERS, SnapKV
from flowkv.report.screen import Screen

_ROOT = Path(__file__).parents[1]
EXACT, TAIL, BANDS, SEED = "exact", 256, (16, 64, 256), 2027
BEFORE = 4
"""Most tokens that decoding may say before the answer of a needle or passkey."""
DOCUMENTS = 4
"""Parts of a context that are known as documents, for reuse behind another beginning."""
WAYS = ("kvt:kl=0.005", "kvt:kl=0.02", "kv8", "k8v4", "kv4c", "2 bits", "sparsify", "blend")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_FIRST = "amber brisk calm dusty eager fuzzy grand hasty ivory jolly keen lucid mellow noble olive"
_SECOND = "anchor bridge candle desert engine forest garden hammer island jacket kettle ladder"
NAMES = [f"{a}-{b}" for a in _FIRST.split() for b in _SECOND.split()]


class Asked(NamedTuple):
    """A prompt and its answers, as text.

    Attributes:
        context: What is kept in approximate ways.
        question: What follows; the answer comes next.
        right: Right answers.
        wrong: Other ones of the context; none for exact match.
    """

    context: str
    question: str
    right: list[str]
    wrong: list[str]


Make = Callable[[random.Random, int], Asked]
"""Makes a prompt with a size: lines, pairs or words, as the task counts."""


def _number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _hidden(rng: random.Random, size: int, needles: Sequence[str]) -> str:
    lines = [NOISE] * size
    for needle in needles:
        lines.insert(rng.randint(0, len(lines)), needle)
    return "\n".join(lines)


def _magic(name: str, value: str) -> str:
    return f"One of the special magic numbers for {name} is: {value}."


_HEAD = "Some special magic numbers are hidden within the following text. Memorize them.\n"


def _ask(name: str) -> str:
    return (
        f"\nWhat is the special magic number for {name} mentioned in the provided text? The "
        f"special magic number for {name} mentioned in the provided text is"
    )


def needle(rng: random.Random, size: int) -> Asked:
    """One number for one name."""
    name, value = rng.choice(NAMES), _number(rng)
    return Asked(_HEAD + _hidden(rng, size, [_magic(name, value)]), _ask(name), [f" {value}"], [])


def passkey(rng: random.Random, size: int) -> Asked:
    """A pass key, said twice in one place."""
    key = str(rng.randint(10_000, 99_999))
    head = "There is an important info hidden inside a lot of irrelevant text. Memorize it.\n"
    said = f"The pass key is {key}. Remember it. {key} is the pass key."
    asked = "\nWhat is the pass key? The pass key is"
    return Asked(head + _hidden(rng, size, [said]), asked, [f" {key}"], [])


def _pairs(rng: random.Random, names: int, each: int) -> dict[str, list[str]]:
    return {n: [_number(rng) for _ in range(each)] for n in rng.sample(NAMES, names)}


def _of_pairs(rng: random.Random, size: int, pairs: dict[str, list[str]], said: int) -> Asked:
    """Ask for the numbers of one name, some of which are said already."""
    needles = [_magic(name, value) for name, values in pairs.items() for value in values]
    rng.shuffle(needles)
    name = rng.choice(list(pairs))
    known, right = pairs[name][:said], pairs[name][said:]
    wrong = [value for other, values in pairs.items() if other != name for value in values]
    question = _ask(name) + "".join(f" {value}, and" for value in known)
    rng.shuffle(wrong)
    return Asked(
        _HEAD + _hidden(rng, size, needles),
        question,
        *([f" {v}" for v in s] for s in (right, wrong[:7])),
    )


def multikey(rng: random.Random, size: int) -> Asked:
    """One number of eight names."""
    return _of_pairs(rng, size, _pairs(rng, 8, 1), 0)


def multivalue(rng: random.Random, size: int) -> Asked:
    """The numbers of a name that has three."""
    return _of_pairs(rng, size, _pairs(rng, 4, 3), 0)


def multiquery(rng: random.Random, size: int) -> Asked:
    """The other number of a name, the first of which is said."""
    return _of_pairs(rng, size, _pairs(rng, 5, 2), 1)


def variables(rng: random.Random, size: int) -> Asked:
    """Variables that were assigned a value by way of others."""
    names = ["".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=5)) for _ in range(8)]
    values, chains = (str(rng.randint(10_000, 99_999)) for _ in range(2)), (names[:4], names[4:])
    lines, places = [NOISE] * size, list[tuple[int, str]]()
    value = ""
    for value, chain in zip(values, chains, strict=True):
        said = [f"VAR {chain[0]} = {value}"]
        said += [f"VAR {b} = VAR {a}" for a, b in pairwise(chain)]
        places += zip(sorted(rng.choices(range(size + 1), k=len(said))), said, strict=True)
    for at, line in sorted(places, reverse=True):
        lines.insert(at, line)
    head = "Memorize and track the chains of variable assignment hidden in the following text.\n\n"
    asked = (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. "
        f"Answer: the variables that are assigned the value {value} are:"
    )
    right, wrong = ([f" {name}" for name in chain] for chain in (chains[1], chains[0]))
    return Asked(head + "\n".join(lines), asked, right, wrong)


def _listed(rng: random.Random, often: list[str], seldom: list[str], times: int) -> str:
    said = often * times + seldom
    rng.shuffle(said)
    return " ".join(f"{n + 1}. {word}" for n, word in enumerate(said))


def common_words(rng: random.Random, size: int) -> Asked:
    """Words that a list has much more often than others."""
    names = rng.sample(NAMES, 32)
    often, others = names[:4], names[4:]
    seldom = [others[n % len(others)] for n in range(size)]
    said = _listed(rng, often, seldom, max(2, 4 * size // len(others)))
    asked = "\nQuestion: What are the most common words in the above list? Answer: The words are:"
    right, wrong = ([f" {name}" for name in some] for some in (often, others[:8]))
    return Asked(f"Below is a numbered list of words.\n{said}", asked, right, wrong)


def frequent_words(rng: random.Random, size: int) -> Asked:
    """Coded words by frequency, which falls as a power."""
    names = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(24)]
    shares = np.arange(1, len(names) + 1, dtype=float) ** -2.0
    counts = np.maximum(shares / shares.sum() * size, 1).astype(int)
    said = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    rng.shuffle(said)
    head = "Read the following coded text and track the frequency of each coded word.\n"
    asked = (
        "\nQuestion: What are the three most frequent words in the coded text? Answer: They are:"
    )
    right, wrong = ([f" {name}" for name in some] for some in (names[:3], names[8:16]))
    return Asked(head + " ... ".join(said), asked, right, wrong)


MATCHED: dict[str, Make] = {"needle": needle, "passkey": passkey}
RANKED: dict[str, Make] = {
    "multikey": multikey,
    "multivalue": multivalue,
    "multiquery": multiquery,
    "variables": variables,
    "common words": common_words,
    "frequent words": frequent_words,
}


class Prompt(NamedTuple):
    """A prompt as token ids.

    Attributes:
        context: What is kept.
        question: What follows.
        right: Right answers, or the text that follows.
        wrong: Wrong ones.
    """

    context: torch.Tensor
    question: torch.Tensor
    right: list[torch.Tensor]
    wrong: list[torch.Tensor]


def fitted(encode: Any, make: Make, seed: str, length: int) -> Prompt:
    """Return the largest prompt of a task whose context has at most `length` tokens."""
    low, high = 1, length
    while low < high:
        middle = (low + high + 1) // 2
        if len(encode(make(random.Random(seed), middle).context)) <= length:
            low = middle
        else:
            high = middle - 1
    asked = make(random.Random(seed), low)
    context, question = (torch.tensor(encode(t)) for t in (asked.context, asked.question))
    right, wrong = ([torch.tensor(encode(t)) for t in some] for some in (asked.right, asked.wrong))
    return Prompt(context, question, right, wrong)


class Reader:
    """Prompts behind whose contexts questions are read, in some ways.

    Args:
        loaded: The model.
        page: Tokens of a page.
    """

    def __init__(self, loaded: Any, page: int) -> None:
        weights = {id(weight): weight for weight in loaded.model.parameters()}
        self.model = copy.deepcopy(loaded.model, weights)  # each is attached in its own way
        self.page, self.bits = page, dict[str, float]()

    def ways(self, ids: torch.Tensor) -> Iterator[tuple[str, Any]]:
        """Yield the name of each way, and a state that holds the context."""
        raise NotImplementedError

    def read(self, state: Any, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits `[tokens, vocabulary]` of tokens that a state then holds, too."""
        return self.model(ids[None], past_key_values=state).logits[0].float()

    def tried(self, state: Any, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of tokens that a state does not keep."""
        twin = copy.deepcopy(state)
        logits = self.read(twin, ids)
        twin.close()
        return logits


class Coded(Reader):
    """Pages of a codec, coded and decoded once: what a prompt that is computed whole leaves."""

    def __init__(self, loaded: Any, page: int, ways: Sequence[str], learn: Any) -> None:
        super().__init__(loaded, page)
        self._coders, self._made = dict[str, Any](), ways
        for way in ways:
            if way.startswith("kvt"):
                bound = float(way.partition("=")[2] or 0.005)
                self._coders[way], self.bits[way] = learn(bound)

    def ways(self, ids: torch.Tensor) -> Iterator[tuple[str, Any]]:
        exact = DynamicCache()
        self.model(ids[None], past_key_values=exact, logits_to_keep=1)
        yield EXACT, exact
        exact.crop(len(ids) - exact.get_seq_length())
        for way in self._made:
            yield way, self._kept(exact, way, len(ids) // self.page * self.page)

    def tried(self, state: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = self.read(state, ids)
        state.crop(-len(ids))
        return logits

    def _kept(self, exact: Any, way: str, end: int) -> Any:
        own = copy.deepcopy(exact)
        if coder := self._coders.get(way):
            sides = [
                torch.stack([getattr(x, n)[0] for x in own.layers]) for n in ("keys", "values")
            ]
            (keys, values), _, _ = coded_pages(coder, (sides[0][:, :, :end], sides[1][:, :, :end]))
            for layer, k, v in zip(own.layers, keys, values, strict=True):
                layer.keys[0, :, :end], layer.values[0, :, :end] = k, v
            return own
        for layer in own.layers:
            k, v = (
                side[0, :, :end].unflatten(1, (-1, self.page)).transpose(0, 1)
                for side in (layer.keys, layer.values)
            )
            k, v = rounded(k, v) if way == "2 bits" else self._page(k, v, way)
            for side, part in ((layer.keys, k), (layer.values, v)):
                side[0, :, :end] = part.transpose(0, 1).flatten(1, 2)
        return own

    def _page(self, k: torch.Tensor, v: torch.Tensor, codec: str) -> tuple[torch.Tensor, ...]:
        group = flowkv.LayerGroup(
            layers=(0,),
            kv_heads=k.shape[1],
            head_dim=k.shape[-1],
            value_dim=v.shape[-1],
            dtype="float16",
        )
        layout = page_layout(group, self.page, codec)
        self.bits[codec] = 8 * layout.page_bytes / (k[0].numel() + v[0].numel())
        stripes, _ = encoded(k.float(), v.float(), layout)
        step = layout.stripe_stride_bytes // GRANULE_BYTES
        return decoded(stripes.flatten(), layout, 0, [n * step for n in range(len(k))])


def rounded(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to two bits by groups of 32, as KIVI does (arXiv 2402.02750): 3 bits with its scales.

    Keys by channel over 32 tokens, values by token over 32 channels.
    """

    def by_groups(x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (-1, 32))
        low = parts.amin(-1, keepdim=True)
        step = ((parts.amax(-1, keepdim=True) - low) / 3).clamp(min=1e-8)
        return (low + step * ((parts - low) / step).round()).flatten(-2)

    return by_groups(k.mT).mT, by_groups(v)


class Sparse(Reader):
    """Rules that drop half of the tokens of a prompt."""

    def __init__(self, loaded: Any, page: int) -> None:
        super().__init__(loaded, page)
        self._rules = [rule(0.5) for rule in SPARSIFIERS.values()]
        how: dict[str, Any] = {"sparsify": SnapKV(0.5)}  # it has layers measure what all rules need
        self._kv = flowkv.attach(self.model, gpu="2GiB", page_size=page, **how)

    def ways(self, ids: torch.Tensor) -> Iterator[tuple[str, Any]]:
        cache = begin(self.model, self._kv, ids)
        for rule in (None, *self._rules):
            twin = thinned(cache, rule)
            yield EXACT if rule is None else f"{rule.name}, half", twin
            twin.close()
        cache.close()

    def read(self, state: Any, ids: torch.Tensor) -> torch.Tensor:
        # The first token alone: with it the answer begins, and tokens are dropped.
        some = [part for part in (ids[:1], ids[1:]) if len(part)]
        return torch.cat([super(Sparse, self).read(state, part) for part in some])


class Blended(Reader):
    """Parts of a context that were computed alone, reused behind what comes before them."""

    def __init__(self, loaded: Any, page: int) -> None:
        super().__init__(loaded, page)
        how: dict[str, Any] = {"reuse": "blend", "recompute": 0.15}
        self._kv = flowkv.attach(self.model, gpu="2GiB", page_size=page, **how)
        self._blender = door_of(self.model).blending.now()
        self._rules = {
            "blend: no token": FirstTokens(0),
            "blend: values:0.15": ValueDeviation(0.15),
            "blend: values:0.3": ValueDeviation(0.3),
        }

    def ways(self, ids: torch.Tensor) -> Iterator[tuple[str, Any]]:
        prompt = ids.tolist()
        size = -(-len(prompt) // DOCUMENTS)
        self._kv.learn([prompt[at : at + size] for at in range(0, len(prompt), size)])
        case: Any = argparse.Namespace(prompt=prompt)
        for way, rule in {EXACT: None, **self._rules}.items():
            with begun(self._blender, case, rule) as seq:
                yield way, seq
        self._kv.invalidate()

    def read(self, state: Any, ids: torch.Tensor) -> torch.Tensor:
        return computed(self._blender, state, ids.tolist()).float()

    def tried(self, state: Any, ids: torch.Tensor) -> torch.Tensor:
        with self._kv.fork(state) as twin:
            return self.read(twin, ids)


def answered(reader: Reader, state: Any, prompt: Prompt) -> float:
    """Return the score of a prompt's answers behind a state."""
    last = reader.read(state, prompt.question)[-1:]

    def said(answer: torch.Tensor) -> torch.Tensor:
        if len(answer) == 1:
            return last
        return torch.cat([last, reader.tried(state, answer[:-1])])

    if not prompt.wrong:
        (right,) = prompt.right
        if torch.equal(said(right).argmax(-1), right):
            return 1.0
        spoken = last.argmax(-1)
        while len(spoken) < len(right) + BEFORE:
            spoken = torch.cat([spoken, reader.tried(state, spoken)[-1:].argmax(-1)])
        return float((spoken.unfold(0, len(right), 1) == right).all(1).any())

    def likely(answer: torch.Tensor) -> float:
        return said(answer).log_softmax(-1).gather(1, answer[:, None]).mean().item()

    right, wrong = ([likely(answer) for answer in some] for some in (prompt.right, prompt.wrong))
    return mean((a > b) + (a == b) / 2 for a in right for b in wrong)


class Followed(NamedTuple):
    """What a way changes in the text behind a context.

    Attributes:
        kl: Mean divergence from the exact prediction in nats, by distance: see `BANDS`.
        all_kl: Of all tokens.
        same: Share of tokens with the same likeliest one.
        nats: Mean of the text's tokens.
    """

    kl: list[float]
    all_kl: float
    same: float
    nats: float


def followed(found: torch.Tensor, exact: torch.Tensor, ids: torch.Tensor) -> Followed:
    """Return what differs between log-probabilities `[tokens, vocabulary]`, behind `ids`."""
    kl = divergence(found, exact)
    bands = [kl[a:b].mean().item() for a, b in zip((0, *BANDS), BANDS, strict=False)]
    nats = score(found[:-1], exact[:-1], ids[1:]).nats
    same = (found.argmax(-1) == exact.argmax(-1)).double().mean().item()
    return Followed(bands, kl.mean().item(), same, nats)


def texts(given: Sequence[str]) -> dict[str, str]:
    """Texts of several kinds: own ones, those of the installed packages, and `NAME=FILE`."""
    spoken = [str(getattr(torch, name).__doc__) for name in sorted(torch.__all__)]
    code = [inspect.getsource(m) for m in (argparse, inspect, random, dataclasses, tempfile)]
    pages = [_ROOT / "docs" / "faq.md", *sorted((_ROOT / "docs" / "guides").glob("*.md"))]
    turns = [turn for page in pages for turn in page.read_text().split("\n## ")[1:]]
    chat = [
        f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{said.strip()}<|im_end|>\n"
        for asked, _, said in (turn.partition("\n") for turn in turns)
    ]
    named = dict(one.split("=", 1) for one in given)
    return {
        "English": english(),
        "code": "\n\n".join(code),
        "docstrings": "\n\n".join(spoken),
        "chat": "".join(chat),
        **{name: Path(file).read_text(encoding="utf-8") for name, file in named.items()},
    }


def learner(given: argparse.Namespace, loaded: Any) -> Callable[[float], tuple[Any, float]]:
    """Return a function that calibrates pages to a bound: the coder, and bits a value."""
    docs = sorted((_ROOT / "docs" / "explain").glob("*.md"))
    ids = loaded.encode("\n\n".join(path.read_text() for path in docs))[: given.calibration]

    def learn(bound: float) -> tuple[Any, float]:
        with tempfile.TemporaryDirectory() as place:
            how: dict[str, Any] = {"disk": f"{place}:4GiB", "cold": "kvt"}
            kv = flowkv.attach(loaded.model, page_size=given.page, **how)
            with kv:
                found = kv.calibrate(ids, kl=bound)
                if not found["kept"]:
                    raise SystemExit(f"no setting keeps to {bound}: {found}")
                return kv.bases.current[0], found["bits"]  # type: ignore[union-attr]

    return learn


def readers(given: argparse.Namespace, loaded: Any) -> Iterator[Reader]:
    """Yield the readers of the ways that are asked for."""
    asked = given.ways.split(",")
    if unknown := {way for way in asked if not way.startswith("kvt:kl=")} - set(WAYS):
        raise SystemExit(f"unknown ways: {', '.join(sorted(unknown))}; known: {', '.join(WAYS)}")
    if own := [way for way in asked if way not in ("sparsify", "blend")]:
        yield Coded(loaded, given.page, own, learner(given, loaded))
    for way, made in (("sparsify", Sparse), ("blend", Blended)):
        if way in asked:
            yield made(loaded, given.page)


def cells(given: argparse.Namespace, loaded: Any) -> Iterator[tuple[str, int, int, Prompt]]:
    """Yield task, length, number and prompt of all prompts, those of one number after another."""
    lengths = [int(one) for one in given.lengths.split(",")]
    tasks = given.tasks.split(",")
    rows = {name: loaded.encode(text) for name, text in texts(given.text).items()}
    for number in range(max(given.prompts, given.ranked, given.windows)):
        for length in lengths:
            for some, count, kind in (
                (MATCHED, given.prompts, "matched"),
                (RANKED, given.ranked, "ranked"),
            ):
                for task, make in some.items():
                    if number < count and kind in tasks:
                        seed = f"{SEED} {task} {number}"
                        yield task, length, number, fitted(loaded.encode, make, seed, length)
            for name, ids in rows.items() if "text" in tasks and number < given.windows else ():
                last = len(ids) - length - TAIL
                if last < 0:
                    continue
                at = last * number // max(given.windows - 1, 1)
                own = torch.tensor(ids[at : at + length + TAIL])
                yield f"text: {name}", length, number, Prompt(own[:length], own[length:], [], [])


def measure(
    given: argparse.Namespace, loaded: Any, say: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    """Yield the result of each prompt and reader; those of the file --out are not read again."""
    done = [json.loads(x) for x in given.out.read_text().splitlines()] if given.out.exists() else []
    known = {(row["reader"], row["task"], row["length"], row["number"]) for row in done}
    yield from done
    for reader in readers(given, loaded):
        name = type(reader).__name__
        for task, length, number, prompt in cells(given, loaded):
            if (name, task, length, number) in known:
                continue
            row: dict[str, Any] = {"reader": name, "task": task, "length": length}
            row |= {"number": number, "scores": {}}
            exact = None
            for way, state in reader.ways(prompt.context):
                if prompt.right:
                    row["scores"][way] = answered(reader, state, prompt)
                    continue
                found = reader.read(state, prompt.question).log_softmax(-1)
                exact = found if exact is None else exact
                row["scores"][way] = followed(found, exact, prompt.question)._asdict()
            row["bits"] = reader.bits
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            say(f"{name}: {task}, {length} tokens, prompt {number + 1}")
            yield row


def interval(values: Sequence[float], over: Sequence[float] | None = None) -> str:
    """Return a mean, or the ratio of two, with its interval by bootstrap over prompts."""
    found = figures.interval(values, over, 4000)
    return "{:.3g} [{:.3g}, {:.3g}]".format(*found) if found else "-"


def tables(found: Sequence[dict[str, Any]]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the tables: header and rows."""
    bits = {way: n for row in found for way, n in row["bits"].items()}
    ways = list(dict.fromkeys(way for row in found for way in row["scores"]))
    for tasks, title in ((MATCHED, "right"), (RANKED, "ranked right")):
        cells = sorted({(r["task"], r["length"]) for r in found if r["task"] in tasks})
        rows = []
        for way in ways if cells else ():
            row = [way, f"{bits[way]:.2f}" if way in bits else ""]
            for cell in cells:
                some = [
                    (r["scores"][way], r["scores"][EXACT])
                    for r in found
                    if (r["task"], r["length"]) == cell and way in r["scores"]
                ]
                own, exact = zip(*some, strict=True) if some else ((), ())
                row.append("" if not some else interval(own, None if way == EXACT else exact))
            rows.append(row)
        yield ["way", "bits", *(f"{task}, {n}: {title}, over exact" for task, n in cells)], rows
    cells = sorted({(r["task"], r["length"]) for r in found if r["task"].startswith("text")})
    heads = [f"KL at {a} to {b}" for a, b in zip((0, *BANDS), BANDS, strict=False)]
    rows = []
    for task, length in cells:
        for way in ways:
            some = [
                (r["scores"][way], r["scores"][EXACT])
                for r in found
                if (r["task"], r["length"]) == (task, length) and way in r["scores"]
            ]
            if way == EXACT or not some:
                continue
            own = [one for one, _ in some]
            more = mean(a["nats"] - b["nats"] for a, b in some)
            rows.append(
                [
                    task.removeprefix("text: "),
                    str(length),
                    way,
                    f"{bits[way]:.2f}" if way in bits else "",
                    interval([one["all_kl"] for one in own]),
                    *(f"{mean(one['kl'][n] for one in own):.3g}" for n in range(len(BANDS))),
                    interval([one["same"] for one in own]),
                    f"{100 * np.expm1(more):+.2f} %",
                    str(len(own) * TAIL),
                ]
            )
    yield ["text", "context", "way", "bits", "KL", *heads, "same token", "ppl", "tokens"], rows


def _longtasks(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore", flowkv.ExperimentalWarning)
    with torch.inference_mode():
        found = list(measure(given, load(given), screen.say))
    shown = [(head, rows) for head, rows in tables(found) if rows]
    for head, rows in shown:
        screen.table(head, rows)
    result = {"tables": shown, "seed": SEED, "page": given.page, "torch": torch.__version__}
    if given.tables:
        given.tables.write_text(json.dumps(result, indent=1) + "\n")
    return 0, result


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("longtasks", _longtasks, "needles, RULER and divergence of all that approximates")
    added.option("--model", "NAME", "as of flowkv.load; default %(default)s", default="smollm2")
    added.option("--ways", "LIST", "default %(default)s", default=",".join(WAYS))
    added.option("--tasks", "LIST", "default %(default)s", default="matched,ranked,text")
    added.option("--lengths", "LIST", "of contexts; default %(default)s", default="512,1024")
    added.option(
        "--prompts", "N", "of needle and passkey; default %(default)s", type=int, default=200
    )
    added.option("--ranked", "N", "of each RULER task; default %(default)s", type=int, default=50)
    added.option("--windows", "N", "of each text; default %(default)s", type=int, default=64)
    added.option("--text", "NAME=FILE", "another text", action="append", default=[])
    added.option("--calibration", "N", "tokens; default %(default)s", type=int, default=16384)
    added.option("--page", "N", "tokens of a page; default %(default)s", type=int, default=64)
    added.option("--threads", "N", "of torch; default %(default)s", type=int, default=1)
    added.option("--out", "FILE", "results, added to; needed", type=Path, required=True)
    added.option("--tables", "FILE", "writes the tables as JSON", type=Path)
    added.set_defaults(dtype="float32")
