"""Parts of transformers for measuring: models of a shape, and its own continuous batching."""

from __future__ import annotations

import copy
from typing import Any

import torch

from flowkv.sim.restore import Decoder

_EPSILON, _THETA, _VOCABULARY = 1e-5, 500_000.0, 128_256


def shaped_model(
    shape: Decoder, *, context: int, dtype: torch.dtype, device: torch.device | str
) -> Any:
    """A Llama with random weights: what it computes costs what a trained one's costs.

    Args:
        shape: Layers, width, heads; without experts.
        context: Most tokens of a prompt and its answer.
        dtype: Of weights and cache.
        device: Where it computes.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context,
        rms_norm_eps=_EPSILON,
        rope_theta=_THETA,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def twin(model: Any) -> Any:
    """The same model once more, with the same weights in the same memory, and hooks of its own."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def longer(model: Any, positions: int) -> Any:
    """The model, made to take so many positions at least: what they cost, not what they say."""
    config = model.config
    config.max_position_embeddings = max(config.max_position_embeddings, positions)
    return model


def endless(model: Any) -> Any:
    """The model, made to end answers at `max_new_tokens` only, so that costs can be compared."""
    config = model.generation_config
    config.eos_token_id = None
    config.pad_token_id = 0 if config.pad_token_id is None else config.pad_token_id
    return model


def batching(model: Any, *, most_rows: int, token_budget: int, pool_tokens: int) -> Any:
    """A context that runs transformers' continuous batching, and gives its manager.

    Args:
        model: A causal language model that FlowKV is not attached to.
        most_rows: Requests in a step.
        token_budget: Tokens in a step.
        pool_tokens: Of its cache.
    """
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    generation = copy.deepcopy(model.generation_config)
    generation.eos_token_id = -1  # how it says that there is none
    config = ContinuousBatchingConfig(max_batch_tokens=token_budget)
    config.max_requests_per_batch = most_rows
    config.num_blocks = -(-pool_tokens // config.page_size)
    return model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=config,
        warmup=model.device.type != "cpu",
    )
