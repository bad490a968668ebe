"""A process that prefills, decodes, or is one rank, as it is told: `python -m tests.cache.relay`.

Reads one JSON order a line and answers each with one line. The model is a small transformer with
fixed random weights in float64, so that tokens do not hang on rounding.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import flowkv
from flowkv import KV, Geometry, Step
from tests.inside import Promoted

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY, PAGE = 4, 4, 4, 16, 32, 61, 16
PROMPT = [(7 * n * n + 3 * n) % VOCABULARY for n in range(100)]
ANSWER_TOKENS = 12


def geometry() -> Geometry:
    shape = {"layers": LAYERS, "kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE}
    return Geometry.uniform(dtype="float64", **shape)


class Model:
    """A transformer; `layer_s` makes each layer slow."""

    def __init__(self, layer_s: float = 0.0) -> None:
        make, self.layer_s = torch.Generator().manual_seed(5), layer_s

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=make, dtype=torch.float64) / shape[-1] ** 0.5

        self.tokens, self.places = weights(VOCABULARY, WIDTH) * 5, weights(512, WIDTH) * 2
        shapes = [((HEADS + 2 * KV_HEADS) * DIM, WIDTH), (WIDTH, HEADS * DIM), (WIDTH, WIDTH)]
        self.layers = [[weights(*shape) for shape in shapes] for _ in range(LAYERS)]
        self.last = weights(VOCABULARY, WIDTH)
        self.after: Callable[[int], None] = lambda layer: None

    def __call__(self, step: Step) -> torch.Tensor:
        """Logits of the last token."""
        x = self.tokens[step.tokens[0]] + self.places[step.positions[0]]
        for layer, (inner, outer, mix) in enumerate(self.layers):
            time.sleep(self.layer_s)
            parts = (torch.nn.functional.layer_norm(x, [WIDTH]) @ inner.T).view(len(x), -1, DIM)
            q, k, v = parts.transpose(0, 1).unsqueeze(0).split([HEADS, KV_HEADS, KV_HEADS], 1)
            y = flowkv.attention(q, k, v, layer=layer)
            x = x + y[0].transpose(0, 1).reshape(len(x), -1) @ outer.T
            x = x + torch.relu(x @ mix.T)
            self.after(layer)
        return self.last @ x[-1]


def answer(kv: KV, seq: flowkv.Sequence, model: Model, logits: torch.Tensor) -> list[int]:
    """The tokens that follow, greedily."""
    found = [int(logits.argmax())]
    while len(found) < ANSWER_TOKENS:
        with kv.step([seq], [[found[-1]]]) as step:
            found.append(int(model(step).argmax()))
    return found


def fresh_answer(prompt: list[int]) -> list[int]:
    """The same without anything cached, token by token from a cold start."""
    model = Model()
    with KV(geometry(), gpu="4MiB") as kv, kv.open(prompt) as seq:
        for step in kv.prefill([seq]):
            logits = model(step)
        return answer(kv, seq, model, logits)


def opened(order: dict[str, Any]) -> KV:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # who opens a directory second is told that it only reads
        tiers = ["gpu:4MiB", order["tier"]]
        kv = KV(geometry(), namespace="relay", tiers=tiers)
    kv.planner.measured = lambda tokens, seconds, _: None  # loading is always worth it
    return kv


class Worker:
    """What one process has open between orders."""

    def __init__(self) -> None:
        self.kv: KV | None = None
        self.times: list[float] = []

    def note(self, event: Promoted) -> None:
        self.times.append(time.monotonic())

    def open(self, order: dict[str, Any]) -> dict[str, Any]:
        self.times, self.kv = [], opened(order)
        self.kv.bus.subscribe(self.note, Promoted)
        return {"writable": [tier.writable for tier in self.kv.planner.store.stack.tiers]}

    def send(self, order: dict[str, Any]) -> dict[str, Any]:
        model, kv = Model(order["layer_s"]), self.kv
        assert kv is not None
        with kv.hand_over(), kv.open(PROMPT) as seq:
            for number, step in enumerate(kv.prefill([seq], chunk=order.get("chunk", 512))):
                if number == order.get("die_after"):
                    kv.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                model(step)
        return {"ended": time.monotonic()}

    def receive(self, order: dict[str, Any]) -> dict[str, Any]:
        model, kv, forwards = Model(), self.kv, []
        assert kv is not None

        def forward(step: Step) -> torch.Tensor:
            forwards.append(int(step.counts.sum()))
            return model(step)

        with kv.open(PROMPT) as seq:
            logits = kv.take_over(seq, forward, patience_s=order["patience_s"])
            found = answer(kv, seq, model, logits)
        known = kv.explain(PROMPT).known
        return {"tokens": found, "forwards": forwards, "times": self.times, "known": known}

    def close(self, _: dict[str, Any]) -> dict[str, Any]:
        if self.kv is not None:
            tiers = self.kv.planner.store.stack.tiers
            kinds = [entry.info.kind for tier in tiers for entry in tier.scan()]
            self.kv.close()
            self.kv = None
            return {"kinds": kinds}
        return {}


def main() -> None:
    torch.set_num_threads(1)
    worker = Worker()
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(worker, order["do"])(order)), flush=True)


if __name__ == "__main__":
    main()
