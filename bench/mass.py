"""Where decoding looks, and which pages should stay: `python -m bench mass`.

A real model answers a chat, a question about documents, and a piece of code to be continued. Every
step of the answer says how much weight each layer gave to each page. Exact attention reads all of
them in every step, a cyclic scan, which the simulator replays for the policies; the tables beside
say how much of the weight the pages that stay would hold.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import flowkv
from bench.blend import cases
from bench.real import english, load
from flowkv.cli.arguments import AddVerb, count
from flowkv.hooks.huggingface.attach import door_of
from flowkv.hooks.huggingface.packed import packed_way
from flowkv.report.screen import Screen
from flowkv.sim import replay
from flowkv.sim.trace import Trace

AGES = {"the first page": 0, "the latest": -1, "2 to 4 from the end": -4, "5 to 8": -8}
SHARES = (0.25, 0.5)
POLICIES = ("opt", "lru", "arc", "lfu-ttl", "cost-aware", "auto")


def prompts(loaded: Any, tokens: int) -> Iterator[tuple[str, list[int]]]:
    """Of about so many tokens each, by what they are."""
    prose = english()
    chat = f"<|im_start|>user\nSum up what follows.\n\n{prose[: 3 * tokens]}<|im_end|>\n"
    code = inspect.getsource(argparse) + inspect.getsource(textwrap)
    yield "chat", loaded.encode(chat)[:tokens]
    yield "documents", next(iter(cases(loaded, 8))).prompt[:tokens]
    yield "code", loaded.encode(code)[2000 : 2000 + tokens]


def recorded(model: Any, kv: flowkv.KV, prompt: list[int], steps: int) -> NDArray[np.float64]:
    """`[steps, layers, pages]`: the share of each layer's weight that a page was given."""
    door = door_of(model)
    assert door is not None
    forward, why = packed_way(model, kv, door)
    assert forward is not None, why
    found, logits = list[NDArray[np.float64]](), torch.empty(0)
    with kv.open(prompt) as seq, torch.no_grad():
        for step in kv.prefill([seq]):
            logits = forward(step, torch.tensor([int(step.counts[0]) - 1]))
        for _ in range(steps):
            with kv.step([seq], [[int(logits[-1].argmax())]]) as step:
                step.watch()
                logits = forward(step, torch.tensor([0]))
                assert step._watch is not None
                layers = [mass[0].sum(-1) for _, mass in sorted(step._watch._mass.items())]
            mass = torch.stack(layers).double()
            found.append((mass / mass.sum(-1, keepdim=True)).numpy())
    pages = min(one.shape[1] for one in found)  # an answer that begins a page ends in more
    return np.stack([one for one in found if one.shape[1] == pages])


def by_age(mass: NDArray[np.float64]) -> dict[str, list[float]]:
    """Share of the weight by age of pages, in the first, middle and last third of the layers."""
    found, left = {}, np.ones(mass.shape[2], np.bool_)
    for name, place in AGES.items():
        own = np.zeros_like(left)
        own[[0] if place == 0 else slice(place, None)] = True
        own &= left
        left &= ~own
        found[name] = [float(part[:, :, own].sum(-1).mean()) for part in np.array_split(mass, 3, 1)]
    found["all others"] = [
        float(part[:, :, left].sum(-1).mean()) for part in np.array_split(mass, 3, 1)
    ]
    return found


def held(mass: NDArray[np.float64], share: float) -> dict[str, float]:
    """Share of the weight on the pages that stay, by who chooses them."""
    _, layers, pages = mass.shape
    room = max(1, round(share * pages))
    warm = np.zeros((layers, pages))
    temperature = []
    for step in mass:  # by what was seen before, of which a step's weight fades by half in 8 steps
        best = np.argsort(-warm, 1, kind="stable")[:, :room]
        temperature.append(np.take_along_axis(step, best, 1).sum(1).mean())
        warm = warm * 0.5 ** (1 / 8) + step
    best = np.sort(mass, 2)[:, :, -room:].sum(2).mean()
    return {
        "the first ones": float(mass[:, :, :room].sum(2).mean()),
        "the latest": float(mass[:, :, -room:].sum(2).mean()),
        "temperature": float(np.mean(temperature[1:])),
        "the best of each step": float(best),
    }


def scan(steps: int, stripes: int) -> Trace:
    """Every step reads every stripe, in one order."""
    reads = steps * stripes
    return Trace(
        "scan",
        np.arange(reads) * 1_000_000,
        np.arange(reads + 1),
        np.tile(np.arange(stripes), steps),
        np.full(stripes, -1),
        np.zeros(stripes, np.int32),
        np.full(reads, 64, np.int32),
        np.zeros(reads, np.int32),
        np.full(reads, -1),
        np.zeros(reads, np.int8),
        np.zeros(reads, np.int32),
        64,
    )


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    parser = verb("mass", _mass, "where decoding looks, and which pages should stay")
    parser.add_argument("--model", default="smollm2", help="folder or Hugging Face id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=count, default=2048)
    parser.add_argument("--steps", type=count, default=48)
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--out", type=Path, help="writes the weights as an npz file")


def _mass(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    torch.set_num_threads(given.threads)
    loaded = load(given)
    kv = flowkv.attach(loaded.model, gpu="1GiB")
    masses = {}
    for name, prompt in prompts(loaded, given.tokens):
        masses[name] = recorded(loaded.model, kv, prompt, given.steps)
    kv.close()
    if given.out:
        np.savez_compressed(given.out, **masses)  # type: ignore[arg-type]
    ages = [
        [kind, age, *(f"{100 * part:.1f} %" for part in parts)]
        for kind, mass in masses.items()
        for age, parts in by_age(mass).items()
    ]
    thirds = ["first layers", "middle", "last"]
    screen.table(["answer", "pages", *thirds], ages, title="where steps look")
    ways: list[list[str]] = []
    for share in SHARES:
        for kind, mass in masses.items():
            ways.append([f"{share:.0%}", kind, *(f"{x:.3f}" for x in held(mass, share).values())])
    heads = list(held(next(iter(masses.values())), 0.25))
    screen.table(["that stay", "answer", *heads], ways, title="weight on the pages that stay")
    steps, layers, pages = next(iter(masses.values())).shape
    trace, hits = scan(steps, layers * pages), list[list[str]]()
    for policy in POLICIES:
        parts = [replay(trace, policy, size=share).block_hit_ratio for share in SHARES]
        hits.append([policy, *(f"{part:.3f}" for part in parts)])
    screen.table(
        ["policy", *(f"{share:.0%}" for share in SHARES)], hits, title="reads of a scan that stay"
    )
    return 0, {"ages": ages, "held": ways, "hits": hits}
