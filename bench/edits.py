"""What reuse of edited conversations saves and costs: `python -m bench edits`.

Sessions of an agent: a first line with the time, a system text with tools, then turns of a user's
words, a tool's result and an answer. Each is edited as agents do it: *clear* replaces the results
of all but the last turns by a note, *compact* replaces all turns but the last by a summary at every
tenth turn, *date* changes the time in the first line at every turn. Tokens are those
that the fixture computed over the sessions, against exact prefixes alone. Quality is that of a real
model at the last edit of a session: the divergence over 48 tokens of a passage that is copied from
a kept result, and how much of the divergence without any token computed again a rule mends. Work is
the share of the spans' tokens that is computed again, with the layer that a rule looks at.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import flowkv
from bench.blend import computed
from bench.figures import divergence, interval
from bench.real import english, load
from flowkv.cli.arguments import AddVerb
from flowkv.data import tiny_path
from flowkv.hooks.huggingface.attach import door_of
from flowkv.policy.blend import BlendRule, FirstTokens, ValueDeviation
from flowkv.report.screen import Screen

KINDS = "clear", "compact", "date"
RULES: dict[str, BlendRule] = {
    "nothing": FirstTokens(0),
    "first:16": FirstTokens(16),
    "values:0.15": ValueDeviation(0.15),
    "values:0.27": ValueDeviation(0.27),
}
COPIED = 48
"""Scored tokens of a passage from a kept result, behind the 24 before them."""
CLEARED, SUMMARY = "[cleared]\n", "Summary of what was done so far: {}\n"


class Turn(NamedTuple):
    """One turn of a session."""

    words: str
    result: str
    answer: str


def sessions(count: int, turns: int, seed: int) -> Iterator[tuple[str, list[Turn]]]:
    """Yield system texts and turns, all of them pieces of one text."""
    text, random = english(), np.random.default_rng(seed)

    def piece(least: int, most: int) -> str:
        at = int(random.integers(0, len(text) - most))
        return text[at : at + int(random.integers(least, most))]

    for _ in range(count):
        yield (
            f"You are an agent with these tools:\n{piece(800, 1_200)}\n",
            [
                Turn(
                    f"User: {piece(60, 160)}\n",
                    f"Tool: {piece(300, 900)}\n",
                    f"Answer: {piece(80, 240)}\n",
                )
                for _ in range(turns)
            ],
        )


def prompts(
    kind: str, system: str, turns: list[Turn], kept: int = 5, every: int = 10
) -> Iterator[list[str]]:
    """Yield the prompt of each turn as its pieces; the answer of a turn stands in the next one."""
    for number, last in enumerate(turns):
        time = f"It is {number // 60 + 9:02}:{number % 60:02}.\n" if kind == "date" else ""
        old = max(number // every * every - kept, 0) if kind == "compact" else 0
        parts = [time, system]
        if old:
            parts.append(SUMMARY.format("; ".join(turn.words[6:46] for turn in turns[:old])))
        for at, turn in enumerate(turns[old:number], old):
            cleared = kind == "clear" and at < number - kept
            parts += [turn.words, f"Tool: {CLEARED}" if cleared else turn.result, turn.answer]
        yield [*parts, last.words, last.result]


def replayed(
    reuse: str, kind: str, given: argparse.Namespace, encode: Callable[[str], list[int]]
) -> Counter[str]:
    """Return the tokens of all prompts of a kind of session, and those that were computed."""
    model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32).eval()
    model.config.max_position_embeddings = 1 << 16
    known, fresh = set[str](), 0
    with flowkv.attach(model, gpu="2GiB", reuse=reuse, recompute=given.recompute) as kv:
        for system, turns in sessions(given.sessions, given.turns, given.seed):
            for parts in prompts(kind, system, turns):
                ids = [encode(part) for part in parts]
                fresh += sum(
                    len(own) for own, part in zip(ids, parts, strict=True) if part not in known
                )
                known.update(parts)
                with torch.no_grad():
                    model(
                        torch.tensor([[t for own in ids for t in own]]),
                        **cache_of(model),
                        logits_to_keep=1,
                    )
        said = kv.stats()
        kv.detach()
    taken = said["tokens_reused"] + said["blend"]["taken_tokens"]
    return Counter(prompts=said["tokens_seen"], computed=said["tokens_seen"] - taken, new=fresh)


def cache_of(model: Any) -> dict[str, Any]:
    from transformers import DynamicCache

    return {"past_key_values": DynamicCache(config=model.config), "use_cache": True}


def judged(loaded: Any, kind: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the divergence of each rule at the last edit of a session, and the work of the rule."""
    kv = flowkv.attach(loaded.model, gpu="2GiB", reuse="edits", recompute=0.15)
    door = door_of(loaded.model)
    assert door is not None
    blender = door.blending.now()
    layers = len(blender.turns)
    for system, turns in sessions(given.prompts, 5, given.seed):
        *_, before, after = prompts(kind, system, turns[:5], 2, 4)
        ids = [[t for part in parts for t in loaded.encode(part)] for parts in (before, after)]
        kept = loaded.encode(turns[3].result)
        follows = loaded.encode("\n\n") + kept[len(kept) // 2 - 36 :][:72]
        with torch.no_grad():
            loaded.model(torch.tensor([ids[0]]), **cache_of(loaded.model), logits_to_keep=1)
        whole, spans, row = torch.empty(0), 0, dict[str, Any]()
        for name, rule in {"whole": None, **RULES}.items():
            past = kv.stats()["blend"]["taken_tokens"]
            with kv.open(ids[1]) as seq:
                if rule is not None:
                    blender.rule = rule
                    blender.blend(seq, len(ids[1]) - 1)
                    taken = kv.stats()["blend"]["taken_tokens"] - past
                seq.publishable = False
                logits = computed(blender, seq, ids[1][seq.length :] + follows[:-1])
                found = logits[-COPIED:].float().log_softmax(-1)
            if rule is None:
                whole = found
                continue
            kv.forget(ids[1])  # the next rule may not go on from these pages
            row[name] = divergence(found, whole).mean().item()
            spans = taken if name == "nothing" else spans
            row[f"{name} work"] = 1 - taken / spans + (1 / layers if rule.looks else 0)
        yield row
        kv.invalidate()
    kv.close()


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("edits", _edits, "edited conversations, against exact prefixes alone")
    added.option("--model", "MODEL", "folder or Hugging Face id", default="smollm2")
    added.option("--sessions", "N", "replayed; default %(default)s", type=int, default=100)
    added.option("--turns", "N", "of each; default %(default)s", type=int, default=20)
    added.option("--prompts", "N", "judged of each kind; default %(default)s", type=int, default=16)
    added.option("--recompute", "RULE", "of the replay; default %(default)s", default="values:0.15")
    added.option("--seed", "N", "default %(default)s", type=int, default=7)
    added.option("--threads", "N", "of torch; default %(default)s", type=int, default=1)
    added.set_defaults(dtype="float32")


def _sampled(text: str) -> list[int]:
    """Return every eighth byte of a long text, so that there are fewer tokens to compute."""
    return list(text.encode()[:: 8 if len(text) > 20 else 1])


def _edits(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    warnings.simplefilter("ignore", flowkv.ExperimentalWarning)
    torch.set_num_threads(given.threads)
    result: dict[str, Any] = {"tokens": {}, "quality": {}}
    lines = []
    for kind in KINDS if given.sessions else ():
        found = {way: replayed(way, kind, given, _sampled) for way in ("exact", "edits")}
        share = found["edits"]["computed"] / found["exact"]["computed"]
        result["tokens"][kind] = {**{way: dict(found[way]) for way in found}, "share": share}
        counts = [f"{found[way]['computed']:,}" for way in found]
        more = [f"{found['exact'][name]:,}" for name in ("prompts", "new")]
        lines.append([kind, *more, *counts, f"{share:.2f}"])
    if lines:
        screen.table(["edit", "prompts", "new", "exact", "edits", "share"], lines)
    if not given.prompts:
        return 0, result
    loaded, table = load(given), []
    for kind in KINDS:
        rows = list(judged(loaded, kind, given))
        none = [row["nothing"] for row in rows]
        for name in RULES:
            own = np.array([row[name] for row in rows])
            closed, high, low = (1 - share for share in interval(own, none))
            work = float(np.mean([row[f"{name} work"] for row in rows]))
            table.append(
                [kind, name]
                + [f"{x:.4f}" for x in (work, own.mean(), np.median(own), own.max(), closed)]
                + [f"{low:.2f} to {high:.2f}"]
            )
        result["quality"][kind] = rows
    screen.table(
        ["edit", "computed again", "work", "KL", "median", "most", "closed", "95 %"], table
    )
    return 0, result
