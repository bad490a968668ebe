"""What rules that drop tokens cost in quality: `python -m bench sparsify`.

A context is read once and copied for each rule and share, so that all are compared on the same
keys. Two tasks, because one would call every rule free: *continuation* is what comes next in the
text; *copy* asks for a passage of the first third by its first tokens, which come after the drop.
All is against the same model with every token kept. Nats are of the scored tokens, given the true
ones before.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.nn.functional import cross_entropy

import flowkv
from bench.perplexity import contexts
from bench.real import english, load
from flowkv.cli.arguments import AddVerb
from flowkv.core.errors import ConfigError
from flowkv.policy.sparsify import SPARSIFIERS, Sparsifier
from flowkv.report.screen import Screen

SHARES, CUE, SCORED, STEPS = (0.75, 0.5, 0.25), 24, 64, 16
TASKS = ("continuation", "copy")


class RandomTokens(Sparsifier):
    """The control: for each layer and head, tokens at random."""

    name = "random"

    def score(self, layer: int, keys: Any, values: Any, mass: Any) -> Any:
        """The same for the same keys."""
        seed = layer, zlib.crc32(np.ascontiguousarray(keys[0, -1]).tobytes())
        return np.random.default_rng(seed).random(keys.shape[:2])


class Score(NamedTuple):
    """One task of one context.

    Attributes:
        nats: Mean of the scored tokens.
        agreement: Share of them where the likeliest token is that of the whole prompt.
        kl: Mean Kullback-Leibler divergence from the whole prompt's predictions, in nats.
    """

    nats: float
    agreement: float
    kl: float


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("sparsify", _sparsify, "rules that drop tokens of a prompt, against keeping all")
    added.option("--model", "MODEL", "folder or Hugging Face id", default="smollm2")
    added.option("--contexts", "N", "default %(default)s", type=int, default=8)
    added.option("--length", "N", "tokens of each; default %(default)s", type=int, default=1600)
    added.option("--threads", "N", "of torch; default %(default)s", type=int, default=1)
    added.option("--out", "FILE", "writes all figures as JSON", type=Path)
    added.set_defaults(dtype="float32")


def _sparsify(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    if given.length < 3 * (CUE + SCORED):
        raise ConfigError(f"contexts of {given.length} tokens", "Ask for a longer --length")
    torch.set_num_threads(given.threads)
    loaded = load(given)
    tokens = loaded.encode(english())
    cut = contexts(tokens, given.contexts, given.length + SCORED)
    kv = flowkv.attach(loaded.model, gpu="1GiB", sparsify="snapkv:0.5")
    read = []
    with torch.no_grad():
        for number, ids in enumerate(cut):
            read.append(dict(scores(loaded.model, kv, ids, given.length)))
            screen.say(f"context {number + 1} of {len(cut)}")
        speed = dict(paces(loaded.model, kv, cut[0], given.length))
    kv.close()
    table = list(rows(read, speed))
    screen.table(list(table[0]), [list(row.values()) for row in table])
    if given.out:
        given.out.write_bytes(
            msgspec.json.encode([{str(k): v for k, v in r.items()} for r in read])
        )
    return 0, {"rows": table, "contexts": len(read), "length": given.length}


def rules() -> Iterator[Sparsifier | None]:
    """All of them; None keeps all tokens."""
    yield None
    for share in SHARES:
        for rule in (*SPARSIFIERS.values(), RandomTokens):
            yield rule(share)


def named(rule: Sparsifier | None) -> tuple[float, str]:
    """Share and name of a rule."""
    return (1.0, "whole") if rule is None else (rule.share, rule.name)


def begin(model: Any, kv: Any, ids: torch.Tensor) -> Any:
    """A cache that has read a prompt, before anything of it is dropped."""
    kv.invalidate()
    cache = kv.cache(input_ids=ids[None])
    model(ids[None], past_key_values=cache, logits_to_keep=1)
    return cache


def thinned(cache: Any, rule: Sparsifier | None) -> Any:
    """A copy of it, which a rule thins out when it goes on."""
    twin = copy.deepcopy(cache)
    if rule is None:
        twin.rows.thinning = None
    else:
        twin.rows.thinning.policy = rule
    return twin


def scores(
    model: Any, kv: Any, ids: torch.Tensor, length: int
) -> Iterator[tuple[tuple[float, str, str], Score]]:
    """What each rule makes of one context, by share, rule and task."""
    prompt, at = ids[:length], length // 6
    asked = {
        "continuation": (ids[length : length + SCORED], 1),
        "copy": (prompt[at : at + CUE + SCORED], CUE),
    }
    cache, exact = begin(model, kv, prompt), dict[str, torch.Tensor]()
    for rule in rules():
        for task, (given, first) in asked.items():
            twin = thinned(cache, rule)
            # The first token alone: with it the answer begins, and tokens are dropped.
            parts = [
                model(part[None], past_key_values=twin).logits[0]
                for part in (given[:1], given[1:-1])
            ]
            found = torch.cat(parts)[first - 1 :].float().log_softmax(-1)
            whole = exact.setdefault(task, found)
            nats = cross_entropy(found, given[first:]).item()
            same = (found.argmax(-1) == whole.argmax(-1)).double().mean().item()
            kl = (whole.exp() * (whole - found)).sum(-1).mean().item()
            yield (*named(rule), task), Score(nats, same, kl)
            twin.close()
    cache.close()


def paces(
    model: Any, kv: Any, ids: torch.Tensor, length: int
) -> Iterator[tuple[float, tuple[float, float]]]:
    """By share: time of a decode step and bytes of the prompt, over those of the whole prompt.

    Steps alternate with steps over the whole, and a ratio is the median of neighbours'.
    """
    cache, token = begin(model, kv, ids[:length]), ids[length][None, None]
    for share in SHARES:
        both = [thinned(cache, rule) for rule in (None, SPARSIFIERS["latest"](share))]
        for twin in both:
            model(token, past_key_values=twin)
        taken: list[list[float]] = [[], []]
        for _ in range(STEPS):
            for times, twin in zip(taken, both, strict=True):
                begun_s = time.process_time()
                model(token, past_key_values=twin)
                times.append(time.process_time() - begun_s)
        pages = [len(twin.rows.seqs[0].blocks[0]) for twin in both]
        ratio = median(b / a for a, b in zip(*taken, strict=True))
        yield share, (ratio, pages[1] / pages[0])
        for twin in both:
            twin.close()
    cache.close()


def rows(
    read: Sequence[dict[tuple[float, str, str], Score]], speed: dict[float, tuple[float, float]]
) -> Iterator[dict[str, str]]:
    """The table: means over contexts, and 95 % intervals of the differences to the whole prompt."""
    for share, rule in dict.fromkeys((share, rule) for share, rule, _ in read[0]):
        row = {"kept": f"{share:g}", "rule": rule}
        for task in TASKS:
            mine = [one[share, rule, task] for one in read]
            more = [
                a.nats - one[1.0, "whole", task].nats for a, one in zip(mine, read, strict=True)
            ]
            error = 1.96 * stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0
            low, middle, high = (100 * math.expm1(mean(more) + e) for e in (-error, 0.0, error))
            if rule == "whole":
                row[task] = f"ppl {math.exp(mean(score.nats for score in mine)):.2f}"
            else:
                row[task] = f"{middle:+.1f} % [{low:+.1f}, {high:+.1f}]"
            row[f"{task}: same token"] = f"{mean(score.agreement for score in mine):.3f}"
            row[f"{task}: KL"] = f"{mean(score.kl for score in mine):.3f}"
        step, size = speed.get(share, (1.0, 1.0))
        yield row | {"step": f"{step:.2f}", "bytes": f"{size:.2f}"}
