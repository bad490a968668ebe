"""Which way rows of a model can run together is tried on a few tokens, not looked up."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.errors import CapacityError, FlowKVError
from flowkv.hooks.huggingface.apart import Apart
from flowkv.hooks.huggingface.beside import Beside
from flowkv.hooks.huggingface.door import Door
from flowkv.hooks.huggingface.packed import PackedForward
from flowkv.hooks.huggingface.probe import close, ordinary_tokens, quiet
from flowkv.runtime.cache import KV
from flowkv.runtime.sequence import Sequence

Run = Callable[[list[Sequence], list[NDArray[np.uint32]]], torch.Tensor]
"""Runs the next tokens of some sequences; returns the logits behind the last of each."""

TRIED = (7, 3, 0), (1, 6, 4), (2, 2, 1), (1, 1, 1)
"""Tokens of three rows in the steps of a trial: prompts cut anywhere, beside each other and beside
single tokens. Of fewer rows where the cache never has more."""


class Way(NamedTuple):
    """How rows of a model are run.

    Attributes:
        forward: Over packed rows; None if they cannot be packed.
        runner: Otherwise: beside each other, or each by itself.
        reason: Why they cannot be packed; "" if they can.
    """

    forward: PackedForward | None
    runner: Beside | Apart
    reason: str


def choose_way(model: Any, kv: KV, door: Door) -> Way:
    """The fastest way in which rows that run together answer as each does alone.

    Args:
        model: The model.
        kv: The cache that it is attached to.
        door: Its door.

    Raises:
        CapacityError: The cache has no room to try it, which says nothing about the model.
    """
    beside = Beside(model, kv, door)
    reason = _unpackable(door)
    if not reason:
        for by_index in (True, False):
            if by_index and "logits_to_keep" not in door.names.parameters:
                continue
            forward = PackedForward(model, door, by_index=by_index)
            reason = _try(model, kv, door, _packed(kv, forward))
            if not reason:
                return Way(forward, beside, "")
    fits = not _lone(door) and not _try(model, kv, door, beside.run)
    return Way(None, beside if fits else Apart(model, kv, door), reason)


def _lone(door: Door) -> str:
    """Why rows cannot even run beside each other."""
    if door.plan.stateful:
        return "layers keep a recurrent state"
    if any(spec.kind == "chunked" for spec in door.plan.specs):
        return "attention is chunked"
    if door.names.mask not in door.names.parameters:
        return "the model takes no mask"
    return ""


def _unpackable(door: Door) -> str:
    names, plan = door.names, door.plan
    if names.positions not in names.parameters:
        return "the model takes no position of each token"
    if not all(placed.in_pages for placed in plan.placed.values()):
        return door.switch.reason or "the model computes with keys and values itself"
    alone = _lone(door)
    return alone if plan.stateful or "chunked" in alone else ""


def _packed(kv: KV, forward: PackedForward) -> Run:
    def run(seqs: list[Sequence], tokens: list[NDArray[np.uint32]]) -> torch.Tensor:
        with kv.step(seqs, tokens) as step:
            return forward(step, torch.from_numpy(step.counts.cumsum() - 1))

    return run


def _try(model: Any, kv: KV, door: Door, run: Run) -> str:
    """Why rows cannot be run so; "" if they can."""
    try:
        with quiet(model):
            if _agrees(model, kv, door, run):
                return ""
        return "rows that run together do not answer as each does alone"
    except CapacityError as error:
        raise CapacityError(
            f"how rows of the model run together cannot be tried: {error.problem}", error.remedy
        ) from error
    except FlowKVError as error:
        return error.problem
    except Exception as error:  # whatever a model raises: it cannot be run so
        return f"it does not run over rows together ({type(error).__name__}: {error})"


def _agrees(model: Any, kv: KV, door: Door, run: Run) -> bool:
    ends = [sum(counts) for counts in zip(*TRIED, strict=True)][: kv.config.max_rows]
    texts = ordinary_tokens(model, door.names, sum(ends))[0].split(ends)
    ids = [text.cpu().numpy().astype(np.uint32) for text in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    seqs: list[Sequence] = []
    try:
        for text in ids:
            seqs.append(kv.open(text, reuse=False))
            seqs[-1].publishable = False
        for counts in TRIED:
            rows = [row for row, count in enumerate(counts[: len(seqs)]) if count]
            parts = [ids[row][seqs[row].length :][: counts[row]] for row in rows]
            for row, logits in zip(rows, run([seqs[row] for row in rows], parts), strict=True):
                found[row].append(logits.detach().float())
    finally:
        for seq in seqs:
            seq.close()
    wanted = _alone(model, door, texts)
    return all(
        close(torch.stack(answers)[None], own, model.dtype)
        for answers, own in zip(found, wanted, strict=True)
    )


def _alone(model: Any, door: Door, texts: Items[torch.Tensor]) -> list[torch.Tensor]:
    """What the model answers without a cache, at the ends of the parts of each text."""
    names, found = door.names, []
    for row, text in enumerate(texts):
        given = {names.ids: text[None]}
        if names.positions in names.parameters:
            # As `generate` gives them: some models would not count from 0 by themselves.
            given[names.positions] = torch.arange(len(text), device=text.device)[None]
        with door.aside():
            logits = model(**given, use_cache=False).logits.detach().float()
        ends = torch.tensor([counts[row] for counts in TRIED if counts[row]], device="cpu").cumsum(
            0
        )
        found.append(logits[:, ends.to(logits.device) - 1])
    return found
