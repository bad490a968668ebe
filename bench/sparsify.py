"""What rules that drop tokens cost in quality: `python -m bench sparsify`.

A context is read once and copied for each rule and share, so that all are compared on the same
keys. Two tasks, because one would call every rule free: *continuation* is what comes next in the
text; *copy* asks for a passage of the first third by its first tokens, which come after the drop.
All is against the same model with every token kept. Nats are of the scored tokens, given the true
ones before. Where shares fall from the first layers to the last, or rise, the mean is the share.
Presses of kvpress (`--presses`) run by their own hooks on a plain prefill of the context, and so
do rules that read it twice.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

import flowkv
from bench.figures import Score, percent_more, score
from bench.perplexity import contexts
from bench.real import english, load
from flowkv.cli.arguments import AddVerb, names
from flowkv.core.errors import ConfigError
from flowkv.hooks.huggingface.press import Pressing, Repetition, make_press
from flowkv.policy.sparsify import SPARSIFIERS, KeepLatest, SnapKV, Sparsifier
from flowkv.report.screen import Screen

SHARES, CUE, SCORED, STEPS = (0.75, 0.5, 0.25), 24, 64, 16
BANDS = 5
"""Of layers with one share."""
TASKS = ("continuation", "copy")


class RandomTokens(Sparsifier):
    """The control: for each layer and head, tokens at random."""

    name = "random"

    def score(self, layer: int, keys: Any, values: Any, mass: Any) -> Any:
        """The same for the same keys."""
        seed = layer, zlib.crc32(np.ascontiguousarray(keys[0, -1]).tobytes())
        return np.random.default_rng(seed).random(keys.shape[:2])


class Pressed(NamedTuple):
    """A press of kvpress.

    Attributes:
        share: Part of the tokens that it keeps.
        name: Its class.
        press: The press.
    """

    share: float
    name: str
    press: Any


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("sparsify", _sparsify, "rules that drop tokens of a prompt, against keeping all")
    added.option("--model", "MODEL", "folder or Hugging Face id", default="smollm2")
    added.option("--contexts", "N", "default %(default)s", type=int, default=8)
    added.option("--length", "N", "tokens of each; default %(default)s", type=int, default=1600)
    added.option("--threads", "N", "of torch; default %(default)s", type=int, default=1)
    added.option("--presses", "NAMES", "classes of kvpress, beside them", type=names, default=[])
    added.option("--out", "FILE", "writes all figures as JSON", type=Path)
    added.set_defaults(dtype="float32")


def _sparsify(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    if given.length < 3 * (CUE + SCORED):
        raise ConfigError(f"contexts of {given.length} tokens", "Ask for a longer --length")
    torch.set_num_threads(given.threads)
    loaded = load(given)
    tokens = loaded.encode(english())
    cut = contexts(tokens, given.contexts, given.length + SCORED)
    presses = [
        Pressed(share, name, make_press(f"kvpress.{name}:{share}"))
        for share in SHARES
        for name in given.presses
    ]
    # Its layers are paged by bands, which serves rules with one share as well.
    kv = flowkv.attach(loaded.model, gpu="1GiB", sparsify=sloped(loaded.model)[0])
    read = []
    with torch.no_grad():
        for number, ids in enumerate(cut):
            read.append(dict(scores(loaded.model, kv, ids, given.length, presses)))
            screen.say(f"context {number + 1} of {len(cut)}")
        kv.close()
        speed = dict(paces(loaded.model, cut[0], given.length))
    table = list(rows(read, speed))
    screen.table(list(table[0]), [list(row.values()) for row in table])
    if given.out:
        given.out.write_bytes(
            msgspec.json.encode([{str(k): v for k, v in r.items()} for r in read])
        )
    return 0, {"rows": table, "contexts": len(read), "length": given.length}


def sloped(model: Any) -> list[Sparsifier]:
    """SnapKV with shares that fall from band to band of layers, as PyramidKV's, or rise."""
    layers, made = model.config.num_hidden_layers, list[Sparsifier]()
    bands = min(BANDS, layers)
    of_layer = np.arange(layers) * bands // layers
    for share in SHARES[1:]:
        for name, ends in (("snapkv, falling", (1.5, 0.5)), ("snapkv, rising", (0.5, 1.5))):
            made.append(SnapKV(share * np.linspace(*ends, bands)[of_layer]))
            made[-1].name = name
    return made


def rules(model: Any, presses: Sequence[Pressed] = ()) -> Iterator[Sparsifier | Pressed | None]:
    """All of them; None keeps all tokens."""
    yield None
    yield from presses
    sloping = sloped(model)
    for share in SHARES:
        for rule in (*SPARSIFIERS.values(), RandomTokens):
            yield rule(share)
        yield from (rule for rule in sloping if named(rule)[0] == share)


def named(rule: Sparsifier | Pressed | None) -> tuple[float, str]:
    """Share and name of a rule."""
    return (1.0, "whole") if rule is None else (round(float(np.mean(rule.share)), 3), rule.name)


def begin(model: Any, kv: Any, ids: torch.Tensor) -> Any:
    """A cache that has read a prompt, before anything of it is dropped."""
    kv.invalidate()
    cache = kv.cache(input_ids=ids[None])
    model(ids[None], past_key_values=cache, logits_to_keep=1)
    return cache


def thinned(cache: Any, rule: Sparsifier | Pressed | None) -> Any:
    """A copy of it, which a rule thins out when it goes on."""
    twin = copy.deepcopy(cache)
    if rule is None:
        twin.rows.thinning = None
    elif isinstance(rule, Sparsifier) and rule.repeats:
        twin.rows.thinning = Pressing(Repetition(rule), twin.rows.base)
    elif isinstance(rule, Pressed):
        twin.rows.thinning = Pressing(rule.press, twin.rows.base)
    else:
        twin.rows.thinning.policy = rule
    return twin


def scores(
    model: Any, kv: Any, ids: torch.Tensor, length: int, presses: Sequence[Pressed] = ()
) -> Iterator[tuple[tuple[float, str, str], Score]]:
    """What each rule makes of one context, by share, rule and task."""
    prompt, at = ids[:length], length // 6
    asked = {
        "continuation": (ids[length : length + SCORED], 1),
        "copy": (prompt[at : at + CUE + SCORED], CUE),
    }
    cache, exact = begin(model, kv, prompt), dict[str, torch.Tensor]()
    for rule in rules(model, presses):
        for task, (given, first) in asked.items():
            twin = thinned(cache, rule)
            # The first token alone: with it the answer begins, and tokens are dropped.
            parts = [
                model(part[None], past_key_values=twin).logits[0]
                for part in (given[:1], given[1:-1])
            ]
            found = torch.cat(parts)[first - 1 :].float().log_softmax(-1)
            whole = exact.setdefault(task, found)
            yield (*named(rule), task), score(found, whole, given[first:])
            twin.close()
    cache.close()


def paces(
    model: Any, ids: torch.Tensor, length: int
) -> Iterator[tuple[tuple[float, str], tuple[float, float]]]:
    """Time of a decode step and bytes of the prompt, over those of the whole prompt.

    By share and rule, where "latest" stands for all with one share. Steps alternate with steps over
    the whole, of which all layers are paged together; a ratio is the median of neighbours'.
    """
    token, even = ids[length][None, None], [KeepLatest(share) for share in SHARES]
    begun = []
    for one, some in ((copy.deepcopy(model), sloped(model)), (model, even)):
        kv = flowkv.attach(one, gpu="1GiB", sparsify=some[0])
        begun.append((one, kv, begin(one, kv, ids[:length]), some))
    for one, _, cache, some in begun:
        for rule in some:
            both = [(model, thinned(begun[1][2], None)), (one, thinned(cache, rule))]
            taken: list[list[float]] = [[], []]
            for step in range(1 + STEPS):
                for times, (mine, twin) in zip(taken, both, strict=True):
                    begun_s = time.process_time()
                    mine(token, past_key_values=twin)
                    if step:  # the first drops tokens
                        times.append(time.process_time() - begun_s)
            sizes = [held_bytes(twin) for _, twin in both]
            ratio = median(b / a for a, b in zip(*taken, strict=True))
            yield named(rule), (ratio, sizes[1] / sizes[0])
            for _, twin in both:
                twin.close()
    for _, kv, cache, _ in begun:
        cache.close()
        kv.close()


def held_bytes(cache: Any) -> int:
    """Bytes of the pages of its only row."""
    groups = cache.rows.kv.geometry.groups
    pages = map(len, cache.rows.seqs[0].blocks)
    return sum(n * group.token_bytes for n, group in zip(pages, groups, strict=True))


def rows(
    read: Sequence[dict[tuple[float, str, str], Score]],
    speed: dict[tuple[float, str], tuple[float, float]],
) -> Iterator[dict[str, str]]:
    """The table: means over contexts, and 95 % intervals of the differences to the whole prompt."""
    for share, rule in dict.fromkeys((share, rule) for share, rule, _ in read[0]):
        row = {"kept": f"{share:g}", "rule": rule}
        for task in TASKS:
            mine = [one[share, rule, task] for one in read]
            more = [
                a.nats - one[1.0, "whole", task].nats for a, one in zip(mine, read, strict=True)
            ]
            low, middle, high = percent_more(more)
            if rule == "whole":
                row[task] = f"ppl {math.exp(mean(score.nats for score in mine)):.2f}"
            else:
                row[task] = f"{middle:+.1f} % [{low:+.1f}, {high:+.1f}]"
            row[f"{task}: same token"] = f"{mean(score.agreement for score in mine):.3f}"
            row[f"{task}: KL"] = f"{mean(score.kl for score in mine):.3f}"
        step, size = speed.get((share, rule)) or speed.get((share, "latest"), (1.0, 1.0))
        yield row | {"step": f"{step:.2f}", "bytes": f"{size:.2f}"}
