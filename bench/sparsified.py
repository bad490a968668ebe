"""The fixture as one's own model over pages, and what it costs to drop half of what it has read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

import flowkv
from bench.quality import Delta, Scores, delta, windows
from bench.tiny.model import Shape, TinyLlama, rotate
from flowkv import KV, Geometry, Sequence
from flowkv.data import tiny_path
from flowkv.policy.pages import Importance

PAGE_SIZE, SCORED = 64, 64
RETURNING = "a text read twice comes back after another"
Choice = Callable[[KV, Sequence, int], np.ndarray | None]


class Paged(TinyLlama):
    """The tiny model, its attention being `flowkv.attention`."""

    def __init__(self) -> None:
        super().__init__(Shape())
        weights = load_file(tiny_path() / "model.safetensors")
        self.load_state_dict({name: weight.float() for name, weight in weights.items()})
        self.eval()

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits `[1, N, vocab]` for a step's packed tokens."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[positions[0]], self.sin[positions[0]]
        for i, layer in enumerate(self.model.layers):
            own, h = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                project(h).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
                for project in (own.q_proj, own.k_proj, own.v_proj)
            )
            y = flowkv.attention(rotate(q, cos, sin), rotate(k, cos, sin), v, layer=i)
            x = x + own.o_proj(y.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.lm_head(self.model.norm(x))


def important(kv: KV, seq: Sequence, budget: int) -> np.ndarray | None:
    """What the policy says."""
    policy: Importance = seq.importance[0]
    return policy.keep(seq.length, budget)


def latest(kv: KV, seq: Sequence, budget: int) -> np.ndarray | None:
    """The first four tokens and the last ones (StreamingLLM)."""
    keep = np.r_[0:4, seq.length - budget + 4 : seq.length]
    return np.broadcast_to(keep, (*seq.importance[0].mass.shape[:2], budget))


def random(kv: KV, seq: Sequence, budget: int) -> np.ndarray | None:
    """Whole pages at random, with the same first and last tokens as the policy keeps."""
    policy: Importance = seq.importance[0]
    guess = Importance(*policy.mass.shape[:2], PAGE_SIZE)
    guess.observe(np.random.default_rng(seq.tokens[:8].tolist()).random(policy.mass.shape), 1)
    return guess.keep(seq.length, budget)


WAYS: dict[str, Choice] = {"importance": important, "latest": latest, "random pages": random}


def tasks(text: bytes, count: int) -> dict[str, tuple[torch.Tensor, int, int]]:
    """By name: rows, the tokens read before half of them goes, and where scoring begins."""
    plain, period = windows(text, count, 512 + SCORED + 1), 128
    own = windows(text, count, 2 * period)
    a, b = own[:, :period], own[:, period:].roll(count // 2, 0)
    return {
        "continuation": (plain, 512, 512),
        "second copy": (torch.cat([a, a], 1), period, period + 8),
        RETURNING: (torch.cat([a, a, b, a], 1), 3 * period, 3 * period + 8),
    }


def ways(
    text: bytes, count: int, only: str = ""
) -> Iterator[tuple[str, dict[str, tuple[float, Delta]]]]:
    """Per task and way of keeping half: mean bits, and the delta to keeping everything."""
    model = Paged()
    shape = Geometry.uniform(layers=4, kv_heads=2, head_dim=64, page_size=PAGE_SIZE)
    for name, (rows, read, scored) in tasks(text, count).items():
        if only not in ("", name):
            continue
        with KV(shape, namespace="sparsified", gpu="128MiB", max_rows=64) as kv:
            bits = dict[str, list[torch.Tensor]]()
            for row in rows:
                for way, value in _one(kv, model, row, read, scored).items():
                    bits.setdefault(way, []).append(value)
        scores = {way: Scores(torch.stack(values).double(), {}) for way, values in bits.items()}
        whole = scores["everything"]
        yield (name, {way: (s.bits.mean().item(), delta(s, whole)) for way, s in scores.items()})


def _one(
    kv: KV, model: Paged, row: torch.Tensor, read: int, scored: int
) -> dict[str, torch.Tensor]:
    """Bits of one row by way: its beginning is read once, forked, and thinned out each way."""
    kv.invalidate()
    ids, found = row.tolist(), dict[str, torch.Tensor]()
    with kv.open(ids[:read], reuse=False) as seq:
        for step in kv.prefill([seq], chunk=PAGE_SIZE):
            step.watch()
            model(step.tokens, step.positions)
        for way in ("everything", *WAYS):
            with kv.fork(seq) as twin:
                if way in WAYS:
                    kv.sparsify(twin, WAYS[way](kv, twin, read // 2))
                with kv.step([twin], [ids[read:-1]]) as step:
                    logits = model(step.tokens, step.positions)[0]
            cost = functional.cross_entropy(logits, row[read + 1 :], reduction="none")
            found[way] = cost[scored - read :].mean() / math.log(2)
    return found
