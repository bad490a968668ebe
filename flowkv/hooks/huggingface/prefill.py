"""What `generate` does with prompts: which forward is its first, and what it passes over again.

Decoders say with `logits_to_keep` that only the last logits are wanted, and have a mask by which
`generate` cuts off what a filled cache holds. Encoder-decoders often have neither.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.errors import StateError
from flowkv.hooks.huggingface.inputs import Call
from flowkv.hooks.huggingface.rows import Rows
from flowkv.hooks.huggingface.versions import PREFILL, EncoderDecoderCache

_FRAMES = 16
"""Callers between a forward's hook and who called the model, at most: torch's own."""


def wants_last(model: torch.nn.Module | None) -> bool:
    """Whether the forward under way is the first of `generate`, which reads the last logits only.

    Asked by hooks of models that are not told so by an argument. Only the callers know: the same
    arguments, given by anybody else, may mean that all logits are wanted.
    """
    frame = sys._getframe(1).f_back
    for _ in range(_FRAMES):
        if frame is None or PREFILL is None:
            return False
        if frame.f_code is PREFILL:
            return frame.f_locals.get("self") is model
        frame = frame.f_back
    return False


def check_paired(call: Call) -> None:
    """Sees that an encoder-decoder has a cache for each of its two kinds of attention.

    Raises:
        StateError: It would keep the encoder's K and V among those of the tokens.
    """
    cache = call.given.get("past_key_values")
    if call.names.encoder and not isinstance(cache, EncoderDecoderCache):
        raise StateError(
            "an encoder-decoder needs a cache of its cross attention beside the one of its tokens",
            "Pass past_key_values=EncoderDecoderCache(kv.cache(...), DynamicCache())",
        )


def without_known(rows: Rows, call: Call) -> Call:
    """A forward over a cache, without columns that the cache holds already.

    Raises:
        StateError: It is not clear what its tokens are, or the cache has no room for some.
    """
    if again := _passed_again(rows, call):
        call = Call(call.names, call.skip(again))
    _check_padding(rows, call)
    return call


def _check_padding(rows: Rows, call: Call) -> None:
    """Sees that a cache's first forward shows nothing that the cache was told is padding."""
    if rows.forwards or not rows.most_pad:
        return
    mask, width = call.mask, rows.most_pad
    shown = mask is None
    if isinstance(mask, torch.Tensor) and mask.shape == (len(rows.seqs), rows.base + call.columns):
        padding = torch.arange(width) < torch.from_numpy(rows.pads)[:, None]
        shown = bool((mask[:, :width].cpu().bool() & padding[:, : mask.shape[1]]).any())
    if shown:
        raise StateError(
            "the mask shows tokens that are padding to these past_key_values",
            "Give kv.cache(...) and the model the same prompt and the same mask",
        )


def _passed_again(rows: Rows, call: Call) -> int:
    """Columns of a cache's first forward that the cache holds: all, or 0 if it goes on there."""
    if rows.forwards or not rows.base or call.ids is None or call.problem:
        return 0
    if len(call.ids) != len(rows.seqs) or _continues(rows.base, call):
        return 0
    ids = call.ids.detach().cpu().numpy()
    known = [(seq.tokens, pad) for seq, pad in zip(rows.seqs, rows.pads.tolist(), strict=True)]
    if all(_begins(line, tokens, pad) for line, (tokens, pad) in zip(ids, known, strict=True)):
        return rows.base
    follows = all(
        _alike(line[max(pad - rows.base, 0) :], tokens[max(rows.base - pad, 0) :])
        for line, (tokens, pad) in zip(ids, known, strict=True)
    )
    if call.names.encoder and call.mask is None and not follows:
        raise StateError(
            f"the cache holds {rows.base} tokens of a prompt, and these tokens neither begin with "
            "the prompt nor go on from there",
            "Give generate the prompt that kv.cache(...) was given, or a decoder_attention_mask",
        )
    return 0


def _continues(base: int, call: Call) -> bool:
    """Whether mask or positions say that the columns come behind those in the cache."""
    mask, positions = call.mask, call.positions
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return mask.shape[1] == base + call.columns
    return isinstance(positions, torch.Tensor) and int(positions.max()) >= call.columns


def _begins(line: NDArray[Any], tokens: NDArray[np.uint32], pad: int) -> bool:
    return len(line) >= pad + len(tokens) and _alike(line[pad:], tokens)


def _alike(some: NDArray[Any], others: NDArray[Any]) -> bool:
    """Whether two lines of tokens are the same as far as both go."""
    count = min(len(some), len(others))
    return np.array_equal(some[:count], others[:count])
