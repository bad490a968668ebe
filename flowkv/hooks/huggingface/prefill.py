"""What `generate` does with prompts: which forward is its first, and what it passes over again.

Decoders say with `logits_to_keep` that only the last logits are wanted, and have a mask by which
`generate` cuts off what a filled cache holds. Encoder-decoders often have neither.
"""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

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


def without_known(rows: Rows, call: Call, model: torch.nn.Module | None) -> tuple[Call, bool]:
    """A forward over a cache, without columns that the cache holds already.

    Args:
        rows: Of the cache.
        call: The forward.
        model: Whose.

    Returns:
        The forward, and whether it was given the whole prompt.

    Raises:
        StateError: It is not clear what its tokens are, the cache has no room for some, or holds
            less than they go on from.
    """
    whole = _passed_again(rows, call, model)
    if rows.lost and not whole and not _noticed(rows, call):
        refuse_lost(rows)
    rows.lost = 0
    if whole:
        call = Call(call.names, call.skip(rows.base))
    _check_padding(rows, call)
    return call, whole


def refuse_lost(rows: Rows) -> None:
    """Sees that nobody goes on from columns that did not come. Says so once: then it is known.

    Raises:
        StateError: Some did not.
    """
    told, rows.lost = rows.told, 0
    if rows.base < told:
        raise StateError(
            f"these past_key_values hold {rows.base} columns, not {told}: the others did not come "
            "and could not be computed",
            "Give the model all that is behind their get_seq_length(), as generate does",
        )


def _noticed(rows: Rows, call: Call) -> bool:
    """Whether a forward surely goes on from what is left, not from all that was to come."""
    mask, positions = call.mask, call.positions
    if _is_flat(mask):
        return mask.shape[1] == rows.base + call.columns
    if isinstance(positions, torch.Tensor):
        return rows.usual(call.columns, positions)
    if call.ids is None or len(call.ids) != len(rows.seqs):
        return False
    ids = call.ids.detach().cpu().numpy()
    return _follows(rows, ids, rows.base) and not _follows(rows, ids, rows.told)


def _check_padding(rows: Rows, call: Call) -> None:
    """Sees that a cache's first forward shows nothing that the cache was told is padding."""
    if rows.forwards or not rows.most_pad:
        return
    mask, width = call.mask, rows.most_pad
    shown = mask is None
    if isinstance(mask, torch.Tensor) and mask.shape == (len(rows.seqs), rows.base + call.columns):
        padding = torch.arange(width, device="cpu") < torch.from_numpy(rows.pads)[:, None]
        shown = bool((mask[:, :width].cpu().bool() & padding[:, : mask.shape[1]]).any())
    if shown:
        raise StateError(
            "the mask shows tokens that are padding to these past_key_values",
            "Give kv.cache(...) and the model the same prompt and the same mask",
        )


def _passed_again(rows: Rows, call: Call, model: torch.nn.Module | None) -> bool:
    """Whether a cache's first forward begins with the cache's prompt, rather than go on there."""
    if rows.forwards or not rows.told or call.ids is None or call.problem:
        return False
    if len(call.ids) != len(rows.seqs) or _continues(rows, call):
        return False
    silent = not _is_flat(call.mask) and call.positions is None
    if silent and not call.names.encoder:
        return False  # decoders are given what a cache does not hold
    ids = call.ids.detach().cpu().numpy()
    known = [(seq.tokens, pad) for seq, pad in zip(rows.seqs, rows.pads.tolist(), strict=True)]
    begins = all(_begins(line, tokens, pad) for line, (tokens, pad) in zip(ids, known, strict=True))
    follows = _follows(rows, ids, rows.told)
    if begins and (not follows or not silent or wants_last(model)):
        return True
    if call.names.encoder and call.mask is None and begins is follows:
        either = "both begin with the prompt and" if begins else "neither begin with the prompt nor"
        raise StateError(
            f"the cache holds {rows.told} tokens of a prompt, and these tokens {either} go on from "
            "there",
            "Give generate the prompt that kv.cache(...) was given, or a decoder_attention_mask",
        )
    return False


def _continues(rows: Rows, call: Call) -> bool:
    """Whether mask or positions say that the columns come behind those in the cache."""
    mask, positions = call.mask, call.positions
    if _is_flat(mask):
        return mask.shape[1] in (rows.told + call.columns, rows.base + call.columns)
    return isinstance(positions, torch.Tensor) and int(positions.max()) >= call.columns


def _is_flat(mask: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether a mask has a number per token."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2


def _follows(rows: Rows, ids: NDArray[Any], base: int) -> bool:
    """Whether tokens may be what is known from column `base` on."""
    return all(
        _alike(line[max(pad - base, 0) :], seq.tokens[max(base - pad, 0) :])
        for line, seq, pad in zip(ids, rows.seqs, rows.pads.tolist(), strict=True)
    )


def _begins(line: NDArray[Any], tokens: NDArray[np.uint32], pad: int) -> bool:
    return len(line) >= pad + len(tokens) > pad and _alike(line[pad:], tokens)


def _alike(some: NDArray[Any], others: NDArray[Any]) -> bool:
    """Whether two lines of tokens are the same as far as both go."""
    count = min(len(some), len(others))
    return np.array_equal(some[:count], others[:count])
