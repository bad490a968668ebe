"""Runner of an unmodified model over packed rows: one forward for rows of any lengths, no padding.

A trial shows whether a model can be run so (`packed_way`); there is no list of models.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache.kv import KV, drop_unproven
from flowkv.cache.sequence import Sequence
from flowkv.cache.step import Step
from flowkv.core.errors import CapacityError, FlowKVError
from flowkv.hooks.huggingface.cache import BY_COLUMN, ModelPlan
from flowkv.hooks.huggingface.door import ForwardHook
from flowkv.hooks.huggingface.packing import PackedCall
from flowkv.hooks.huggingface.probe import close, ordinary_tokens, quiet
from flowkv.kernels.operands import sent
from flowkv.naming.identity import modes


class PackedForward:
    """Forward of a model over the rows of a step, see `engine.runner.Forward`.

    Args:
        door: The model's door; held by the model's hooks.
        call: The call of the model over packed tokens.
        by_index: The model can compute the logits of given tokens only.
    """

    def __init__(self, door: ForwardHook, call: PackedCall, *, by_index: bool) -> None:
        self._door, self._call, self._by_index = door, call, by_index

    def __call__(self, step: Step, last: torch.Tensor) -> torch.Tensor:
        """Return the logits behind some tokens of a step.

        Args:
            step: The step, with its token ids.
            last: int64 `[B]`: indices of tokens in the step.

        Returns:
            `[B, V]`.

        Raises:
            StateError: The model has moved to another dtype or device since the rows were opened.
            Unpackable: Its rows would mix.
        """
        assert step.tokens is not None
        door, model = self._door, self._door.model
        every = len(last) == step.tokens.shape[1]  # all rows decode one token
        odd = not door.unchanged(full=step.fills)
        graphs = door.graphs if every else None
        found = None if graphs is None or odd else graphs.replay(step, step.tokens, step.positions)
        if found is None:
            keep = last if self._by_index and not every else None
            logits = self._call(step, door.plan, keep)[0]
            found = logits if every or keep is not None else logits[sent(last, logits.device)]
            if graphs is not None and not odd:
                graphs.record_step(step, step.tokens, step.positions, logits)
        # Checked late: the forward still runs on a GPU, and changes during it are noticed.
        odd = odd or (step.fills and bool(modes(own=False) or not door.trusted()))
        door.retract()
        if odd:  # rows outside of this step may have been computed by the same changed model
            drop_unproven(door.kv)
        if model.training or odd:
            for seq in step.seqs:
                seq.publishable = False
        step.vouched = step.fills and not odd
        return found  # type: ignore[no-any-return]


# A trial on a few tokens finds the way in which rows of a model can run together.

Run = Callable[[list[Sequence], list[NDArray[np.uint32]]], torch.Tensor]
"""Runs the next tokens of some sequences; returns the logits behind the last of each."""

TRIED = (7, 3, 0), (1, 6, 4), (2, 2, 1), (1, 1, 1)
"""Tokens of three rows in the steps of a trial: prompts cut anywhere, beside each other and beside
single tokens. A cache with `max_rows` below three uses the first rows only."""


def packed_way(model: Any, kv: KV, door: ForwardHook) -> tuple[PackedForward | None, str]:
    """Return the fastest forward in which packed rows answer as each alone, or why none does.

    Raises:
        CapacityError: The cache has no room for the trial; the model may be packable.
    """
    names, reason = door.names, _unpackable(door)
    if not reason:
        indexed = "logits_to_keep" in names.parameters
        windows = any(spec.kind == "sliding" for spec in door.plan.specs)
        masked = names.mask in names.parameters and not windows
        for by_index, given in dict.fromkeys(
            [(indexed, masked), (indexed, False), (False, False)]  # the fastest first
        ):
            call = PackedCall(model, names, masked=given)
            forward = PackedForward(door, call, by_index=by_index)
            reason = try_rows(model, kv, door, _packed(kv, forward))
            if not reason:
                return forward, ""
    return None, reason


def alone_reason(plan: ModelPlan) -> str:
    """Return why rows cannot run in one forward, packed or padded; "" if nothing forbids it."""
    if plan.stateful:
        return "layers keep a recurrent state"
    if plan.by_column:
        return BY_COLUMN
    return "attention is chunked" if any(spec.kind == "chunked" for spec in plan.specs) else ""


def _unpackable(door: ForwardHook) -> str:
    if door.names.positions not in door.names.parameters:
        return "the model takes no position of each token"
    if not all(placed.in_pages for placed in door.plan.placed.values()):
        return door.switch.reason or "the model computes with keys and values itself"
    return alone_reason(door.plan)


def _packed(kv: KV, forward: PackedForward) -> Run:
    def run(seqs: list[Sequence], tokens: list[NDArray[np.uint32]]) -> torch.Tensor:
        with kv.step(seqs, tokens) as step:
            return forward(step, torch.from_numpy(step.counts.cumsum() - 1))

    return run


def try_rows(model: Any, kv: KV, door: ForwardHook, run: Run) -> str:
    """Test a way to run rows together; return why it does not work, "" if it does."""
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
    except Exception as error:  # a model may raise anything: then it cannot be run so
        return f"it does not run over rows together ({type(error).__name__}: {error})"


def _agrees(model: Any, kv: KV, door: ForwardHook, run: Run) -> bool:
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


def _alone(model: Any, door: ForwardHook, texts: Items[torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits of each text without a cache, at the ends of the parts of a trial."""
    names, found = door.names, []
    for row, text in enumerate(texts):
        given = {names.ids: text[None]}
        if names.positions in names.parameters:
            # As `generate` gives them: some models would not count from 0 by themselves.
            given[names.positions] = torch.arange(len(text), device=text.device)[None]
        with door.aside():
            logits = model(**given, use_cache=False).logits.detach().float()
        ends = np.cumsum([counts[row] for counts in TRIED if counts[row]]) - 1
        found.append(logits[:, ends.tolist()])
    return found
