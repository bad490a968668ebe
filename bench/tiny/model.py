"""The architecture of the tiny model: a plain Llama, written out to need nothing but torch."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, under the names of `transformers.LlamaConfig`."""

    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 224
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64  # not 128 / 4 = 32: this is the smallest head that every codec encodes
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        q_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend over `x [B, T, hidden]`; `cos` and `sin` are `[T, D]`."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(part, cos, sin).to(v.dtype) for part in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated feed-forward layer (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform `x [B, T, hidden]`."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer, normalised before each part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Transform `x [B, T, hidden]`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """A Llama with the parameter names of `transformers`, so that exporting it is a copy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.model.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.model.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

        exponents = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        positions = torch.arange(shape.max_position_embeddings)
        angles = torch.outer(positions, shape.rope_theta**-exponents).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                into_residual = "o_proj" in name or "down_proj" in name
                scale = 0.5 if into_residual else 1.0
                nn.init.normal_(weight, std=scale * weight.shape[1] ** -0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits `[B, T, vocab]` for token ids `[B, T]`."""
        x, t = self.model.embed_tokens(ids), ids.shape[1]
        for layer in self.model.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        return self.lm_head(self.model.norm(x))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to `x [B, H, T, D]`, pairing dimension j with j + D/2."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
