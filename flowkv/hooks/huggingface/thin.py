"""`Thinning`: drops tokens of a cache's rows once their prompt is computed, by a policy."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from flowkv.cache.kv import warn
from flowkv.core.errors import CapacityError, ConfigError, FlowKVError, GeometryError
from flowkv.hooks.huggingface.rows import Rows
from flowkv.policy.sparsify import Sparsifier


class Thinning:
    """Policy and observed queries with which one cache drops tokens, until that is done.

    Args:
        policy: The policy that selects the tokens that stay.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self._seen: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}

    def fork(self) -> Thinning:
        """Return a copy, for a copy of the rows."""
        twin = copy(self)
        twin._seen = dict(self._seen)
        return twin

    def select(self, indices: list[int]) -> None:
        """Reorder the rows: the former row `indices[i]` becomes row i."""
        self._seen = {layer: (q[indices], how) for layer, (q, how) in self._seen.items()}

    def observe(self, layer: int, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        """Store the latest queries of a layer, `[B, Hq, T, D]`, and their attention arguments."""
        most = self.policy.queries
        if not most:
            return
        before = self._seen.get(layer, (query[:, :, :0], {}))[0]
        latest = torch.cat([before, query.detach()[:, :, -most:]], 2)[:, :, -most:]
        how = {name: arguments.get(name) for name in ("scaling", "softcap", "s_aux")}
        self._seen[layer] = latest.clone(), how

    def forget(self) -> None:
        """Drop the stored queries after a rollback of their tokens."""
        self._seen.clear()

    def due(self, rows: Rows, call: Any) -> bool:
        """Return whether the prompt is computed, and the answer begins with a forward."""
        return bool(rows.forwards) and call.columns == 1

    def apply(self, cache: Any) -> None:
        """Drop tokens of all rows, between two forwards; warn of rows that must keep all of them.

        Args:
            cache: The cache, of which nothing is published from now on.
        """
        rows, layers = cache.rows, {layer.index: layer for layer in cache.paged}
        for index, layer in layers.items():
            if not layer.placed.in_pages or (self.policy.queries and index not in self._seen):
                self._refuse(rows, f"the attention of layer {index} is not over pages")
                return
        groups = [group.layers for group in rows.kv.geometry.groups]  # type: ignore[union-attr]
        kept: list[list[NDArray[np.int32]]] = [[] for _ in rows.seqs]
        try:
            for group in groups:
                parts = [self._kept(rows, index, layers[index]) for index in group]
                for row, of_layers in enumerate(zip(*parts, strict=True)):
                    counts = sorted({part.shape[1] for part in of_layers})
                    if len(counts) > 1:
                        raise GeometryError(
                            f"layers of one share keep {counts} tokens",
                            "Let share_of() return a different share for each number",
                        )
                    kept[row].append(np.stack(of_layers))
            rows.thin(kept)
        except CapacityError as error:
            self._refuse(rows, f"{error.problem} to copy the other tokens; pass a larger gpu=")
        except FlowKVError as error:  # such as NaN among scores or keys
            self._refuse(rows, error.problem)

    @staticmethod
    def _refuse(rows: Rows, problem: str) -> None:
        whole = sum(not seq.dropped for seq in rows.seqs)
        text = f"FlowKV keeps all tokens of {whole} of {len(rows.seqs)} prompts: {problem}."
        warn(rows.kv, f"sparsify: {problem}", text)

    def _kept(self, rows: Rows, index: int, layer: Any) -> list[NDArray[np.int32]]:
        """Return the slots of a layer that stay, for each row."""
        k, v = layer.gather(rows.base)
        mass = self._mass(index, k, rows) if self.policy.queries else None
        found = []
        for row, seq in enumerate(rows.seqs):  # behind its padding
            own = [
                None if x is None else x[row, :, rows.base - seq.length :].float().cpu().numpy()
                for x in (k, v, mass)
            ]
            found.append(self.policy.keep(index, own[0], own[1], own[2]))  # type: ignore[arg-type]
        return found

    def _mass(self, index: int, k: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the mean attention of the latest queries over them and heads, f32 `[B, Hk, S]`."""
        q, how = self._seen[index]
        return attention(q, k, how, rows.pads).mean((2, 3))


def attention(
    q: torch.Tensor, k: torch.Tensor, how: dict[str, Any], pads: ArrayLike
) -> torch.Tensor:
    """Return the weights that the latest queries give to keys, f32 `[B, Hk, Hq / Hk, T, S]`.

    Args:
        q: `[B, Hq, T, D]`, of the last T of the keys' columns.
        k: `[B, Hk, S, D]`.
        how: The scaling, softcap and sinks ("s_aux") of the attention, as far as it has them.
        pads: Padding columns of each row, which get no weight.
    """
    batch, _, new, dim = q.shape
    scale, cap, sinks = how.get("scaling"), how.get("softcap"), how.get("s_aux")
    grouped = q.float().reshape(batch, k.shape[1], -1, new, dim)
    logits = torch.einsum("bhgtd,bhsd->bhgts", grouped, k.float())
    logits *= dim**-0.5 if scale is None else scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    columns = torch.arange(k.shape[2], device=k.device)
    first = torch.as_tensor(pads, device=k.device)[:, None, None]
    seen = (columns >= first) & (columns <= columns[-new:, None])  # [B, T, S]
    logits.masked_fill_(~seen[:, None, None], float("-inf"))
    if sinks is not None:  # sinks take a share of each query's weight
        parked = sinks.float().reshape(1, k.shape[1], -1, 1, 1).expand(*logits.shape[:4], 1)
        logits = torch.cat([logits, parked], -1)
    return torch.nan_to_num(logits.softmax(-1))[..., : k.shape[2]]  # 0 for padding


def check_thinnable(door: Any, policy: Any, reads: str) -> None:
    """Check that a policy can drop tokens from the cache of an attached model.

    Raises:
        ConfigError: The model or its configuration does not allow it.
    """
    plan, problem, share = door.plan, "", policy.share
    kinds = {group.kind for group in plan.geometry.groups} - {"full"}
    if door.names.encoder:
        problem = "an encoder-decoder is not covered"
    elif plan.stateful or kinds:
        odd = sorted(kinds) or ["recurrent"]
        problem = f"layers that are {' or '.join(odd)} have no tokens to choose among"
    elif door.kv.config.overflow:
        problem = "overflow=True keeps all of a prompt, wherever it lies"
    elif door.kv.config.audit and not isinstance(policy, Sparsifier):
        problem = "audit= computes pages exactly, and would take pruned ones for wrong"
    elif reads != "auto":
        problem = f"reads={reads!r} gathers K and V of all columns, dropped ones included"
    elif not all(placed.in_pages for placed in plan.placed.values()):
        problem = door.switch.reason or "the model computes with keys and values itself"
    elif not isinstance(share, float) and len(share) != len(plan.specs):
        raise ConfigError(
            f"shares of {len(share)} layers for a {type(door.model).__name__} of {len(plan.specs)}",
            "Pass one for each layer of the model, or one number for all",
        )
    if problem:
        raise ConfigError(
            f"sparsify= does not fit this {type(door.model).__name__}: {problem}",
            "Leave sparsify out; it is for models with layers that all see the whole context and "
            "attend by 'sdpa' or 'eager'",
        )
