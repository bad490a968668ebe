"""A small model whose next token depends on every token before it, and which tests can make fail.

Its attention goes through pages, so that a token is wrong as soon as a page is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import torch

import flowkv
from flowkv import KV, Engine, Geometry
from tests.inside import current_step, page_layout

VOCABULARY, LAYERS, HEADS, DIM, PAGE = 61, 2, 2, 16, 8
WIDTH = HEADS * DIM


class Nano(torch.nn.Module):
    """Two layers of rotary attention over tokens of a small vocabulary, packed."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        self.embed = torch.randn(VOCABULARY, WIDTH, generator=draws)
        self.project = [
            [torch.randn(WIDTH, WIDTH, generator=draws) / WIDTH**0.5 for _ in range(4)]
            for _ in range(LAYERS)
        ]
        self.head = torch.randn(WIDTH, VOCABULARY, generator=draws)
        self.calls, self.tokens = 0, 0
        self.before: Callable[[torch.Tensor], object] = lambda tokens: None
        self.after: Callable[[torch.Tensor], object] = lambda tokens: None

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.before(tokens)
        self.calls, self.tokens = self.calls + 1, self.tokens + tokens.shape[1]
        logits = self._logits(tokens, positions)
        self.after(tokens)
        return logits

    def _logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed[tokens] + _waves(positions)
        for layer, (wq, wk, wv, wo) in enumerate(self.project):
            q, k, v = (_heads(x @ w) for w in (wq, wk, wv))
            y = flowkv.attention(q, k, v, layer=layer)
            x = torch.tanh(x + y.transpose(1, 2).reshape(x.shape) @ wo)
        return x @ self.head

    def alone(self, prompt: Items[int], count: int) -> list[int]:
        """The tokens that it makes without any cache."""
        assert current_step() is None
        known = list(prompt)
        for _ in range(count):
            logits = self._logits(torch.tensor([known]), torch.arange(len(known))[None])
            known.append(int(logits[0, -1].argmax()))
        return known[len(prompt) :]


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def _waves(positions: torch.Tensor) -> torch.Tensor:
    rates = torch.exp(-torch.arange(WIDTH // 2) / 4.0)
    angles = positions[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


def geometry() -> Geometry:
    return Geometry.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_size=PAGE)


def make_kv(pages: int = 256, **options: Any) -> KV:
    """A cache of about so many pages, all raw."""
    shape = geometry()
    granules = page_layout(shape.groups[0], PAGE).granules
    options = {"policy": "lru", "max_rows": 64, "gpu": pages * granules * 4096} | options
    return KV(shape, **{"namespace": "nano"} | options)


class Gate:
    """Holds a model's forwards until it is opened; tells when one has come."""

    def __init__(self, model: Nano) -> None:
        self.came, self.free = threading.Semaphore(0), threading.Event()
        model.before = self._hold

    def _hold(self, tokens: torch.Tensor) -> None:
        self.came.release()
        assert self.free.wait(60)

    def arrived(self) -> None:
        """Waits for a forward."""
        assert self.came.acquire(timeout=60)

    def open(self) -> None:
        self.free.set()


def settled(engine: Engine) -> bool:
    """Whether the engine has let go of everything, soon."""
    for _ in range(2000):
        if engine._loop.idle and not engine.kv._open:
            return True
        time.sleep(0.002)
    return False


def prompts(count: int, *, longest: int = 40, seed: int = 3) -> list[list[int]]:
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=draws).tolist()
    return [torch.randint(0, VOCABULARY, (n,), generator=draws).tolist() for n in lengths]
