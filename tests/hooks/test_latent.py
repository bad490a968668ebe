"""A model with latent attention (MLA) that hands its latents to pages and reads them there."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Items
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flowkv
from flowkv import KV, Geometry, LayerGroup
from tests.inside import GeometryError, StateError

HEADS, RANK, ROPE, DIM, WIDTH, LAYERS = 4, 16, 8, 12, 32, 2
GROUP = LayerGroup(
    layers=tuple(range(LAYERS)), kv_heads=1, head_dim=RANK + ROPE, value_dim=RANK, kind="latent"
)
SHAPE = Geometry(groups=(GROUP,), page_size=8)
PROMPTS = [[7, 3, 9, 4, 4, 1] * 4, [5], list(range(30)), [7, 3, 9, 4, 4, 1] * 4 + [2] * 9]


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE over the last dim; positions `[N]` stand at x's dim -2."""
    speed = 100.0 ** -torch.linspace(0, 1, ROPE // 2)
    angle = positions[:, None] * speed
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Block(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1) and a residual."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.query = nn.Linear(WIDTH, HEADS * (DIM + ROPE), bias=False)
        self.down = nn.Linear(WIDTH, RANK + ROPE, bias=False)
        self.up_k = nn.Parameter(torch.randn(HEADS, DIM, RANK) / RANK**0.5)
        self.up_v = nn.Parameter(torch.randn(HEADS, DIM, RANK) / RANK**0.5)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, paged: bool) -> torch.Tensor:
        x_in = F.layer_norm(x, x.shape[-1:])  # [N, WIDTH]
        q, q_rope = self.query(x_in).view(-1, HEADS, DIM + ROPE).transpose(0, 1).split(
            [DIM, ROPE], -1
        )  # fmt: skip
        latent, k_rope = self.down(x_in).split([RANK, ROPE], -1)
        q_rope, k_rope = turned(q_rope, positions), turned(k_rope, positions)
        attend = self._paged if paged else self._plain
        y = attend(q, q_rope, latent, k_rope)  # [H, N, DIM]
        return x + self.out(y.transpose(0, 1).flatten(1))

    def _paged(self, q: torch.Tensor, q_rope: torch.Tensor, *key: torch.Tensor) -> torch.Tensor:
        """Absorbed: queries go down to the latents, what they find comes up again."""
        absorbed = torch.cat([q @ self.up_k, q_rope], -1)[None]
        found = flowkv.attention(
            absorbed,
            torch.cat(key, -1)[None, None],
            None,
            layer=self.index,
            scale=(DIM + ROPE) ** -0.5,
        )
        return found[0] @ self.up_v.mT

    def _plain(
        self, q: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor
    ) -> torch.Tensor:
        """As it is written: keys and values of every head."""
        k, v = (latent @ up.mT for up in (self.up_k, self.up_v))
        k = torch.cat([k, k_rope.expand(HEADS, -1, -1)], -1)
        q = torch.cat([q, q_rope], -1)
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(i) for i in range(LAYERS))

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, paged: bool = True
    ) -> torch.Tensor:
        x = self.tokens(tokens[0])
        for block in self.blocks:
            x = block(x, positions[0], paged)
        return F.layer_norm(x, x.shape[-1:]) @ self.tokens.weight.T


@functools.cache
def model() -> Model:
    torch.manual_seed(0)
    return Model().requires_grad_(False)


def plain(prompt: Items[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        logits = model()(torch.tensor([ids]), torch.arange(len(ids))[None], paged=False)
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :]


def paged(kv: KV, prompts: Items[Items[int]], count: int) -> list[list[int]]:
    seqs, made = [kv.open(list(prompt)) for prompt in prompts], [[] for _ in prompts]
    for step in kv.prefill(seqs, chunk=11):
        logits = model()(step.tokens, step.positions)
        for seq, end in zip(step.seqs, step.counts.cumsum(), strict=True):
            made[seqs.index(seq)] = [int(logits[end - 1].argmax())]
    for _ in range(count - 1):
        with kv.step(seqs, [line[-1:] for line in made]) as step:
            logits = model()(step.tokens, step.positions)
        for line, own in zip(made, logits, strict=True):
            line.append(int(own.argmax()))
    for seq in seqs:
        seq.close()
    return made


def test_latents_make_the_tokens_of_the_model_as_written() -> None:
    with KV(SHAPE, gpu="4MiB", namespace="mla") as kv:
        made = paged(kv, PROMPTS, 12)
    assert made == [plain(prompt, 12) for prompt in PROMPTS]
    assert len({tuple(line[:3]) for line in made}) > 1, "the model says the same to everyone"


def test_latents_are_shared_and_restored(tmp_path: Path) -> None:
    """From the pool, and from a directory by another cache."""
    expected = [plain(prompt, 5) for prompt in PROMPTS]
    where = {"gpu": "4MiB", "disk": f"{tmp_path}/kv:16MiB", "namespace": "mla"}
    for _ in range(2):
        with KV(SHAPE, **where) as kv:
            assert paged(kv, PROMPTS, 5) == expected
            with kv.open(list(PROMPTS[3])) as seq:
                assert seq.reused == 32
            assert paged(kv, PROMPTS, 5) == expected


def test_a_page_of_latents_holds_no_values() -> None:
    full = Geometry.uniform(layers=LAYERS, kv_heads=1, head_dim=RANK + ROPE, value_dim=RANK)
    assert GROUP.token_bytes == 4 * LAYERS * (RANK + ROPE)
    assert full.groups[0].token_bytes == 4 * LAYERS * (2 * RANK + ROPE)


def test_values_and_latents_are_not_confused() -> None:
    q, latent = torch.zeros(1, HEADS, 1, RANK + ROPE), torch.zeros(1, 1, 1, RANK + ROPE)
    with pytest.raises(StateError, match="inside a step only"):
        flowkv.attention(q, latent, None, layer=0)
    with (
        KV(SHAPE, gpu="1MiB", namespace="mla") as kv,
        pytest.raises(GeometryError, match="v=None to latent"),
        kv.step([kv.open([3])], [[3]]),
    ):
        flowkv.attention(q, latent, latent[..., :RANK], layer=0)
