"""The door for any model: `flowkv.attention` in place of scaled-dot-product attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from flowkv.core.errors import GeometryError, StateError
from flowkv.runtime.batch import CURRENT, Step

_SDPA = F.scaled_dot_product_attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *,
    layer: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention that stores `k` and `v` in pages and reads them where they lie.

    Outside `with kv.step(...)` this is `torch.nn.functional.scaled_dot_product_attention`, so
    training and evaluation code needs no branch.

    Args:
        q: Queries `[1, Hq, N, D]`: all rows of the step packed one after the other.
        k: New keys `[1, Hk, N, D]`; `Hq` is a multiple of `Hk`.
        v: New values `[1, Hk, N, Dv]`. None in groups of kind "latent" (absorbed MLA), inside a
            step only: there `k` is `[1, 1, N, D]`, and its first Dv dims are the value.
        layer: Index of the layer, as in the cache's geometry.
        scale: Of the logits; default `D ** -0.5`.
        softcap: `tanh(logit / softcap) * softcap`, inside a step only.
        sinks: `[Hq]` extra logits that join the denominator, inside a step only.

    Returns:
        `[1, Hq, N, Dv]` in the dtype of `q`.

    Raises:
        GeometryError: Shapes or dtypes do not fit the step or the geometry.
        StateError: `softcap`, `sinks` or latents outside a step, or the step is over.

    Example:
        >>> with kv.step([seq], [tokens]) as step:  # doctest: +SKIP
        ...     logits = model(step.tokens, step.positions)
    """
    step = CURRENT.get()
    if step is None:
        if v is None or softcap is not None or sinks is not None:
            raise StateError(
                "softcap, sinks and latents work inside a step only",
                "Call the model inside kv.step(...)",
            )
        grouped = q.shape[1] != k.shape[1]
        return _SDPA(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return _attend(step, layer, q, k, v, scale=scale, softcap=softcap, sinks=sinks)


def _attend(
    step: Step, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    n_tokens, given = int(step.counts.sum()), [q, k] if v is None else [q, k, v]
    if any(x.dim() != 4 or x.shape[0] != 1 or x.shape[2] != n_tokens for x in given):
        shapes = ", ".join(str(tuple(x.shape)) for x in given)
        raise GeometryError(
            f"queries, keys and values {shapes} in a step of {n_tokens} tokens",
            "Pass [1, heads, tokens, dim] with the rows of the step packed one after the other",
        )
    dtype = step.dtype(layer)
    if any(x.dtype is not dtype for x in given[1:]):
        raise GeometryError(
            f"keys and values are {', '.join(str(x.dtype) for x in given[1:])}, the geometry keeps "
            f"{dtype}",
            "Say the dtype that the model computes in: LayerGroup(dtype=...)",
        )
    q, k = q[0].transpose(0, 1), k[0].transpose(0, 1)
    v = None if v is None else v[0].transpose(0, 1)
    return step.attend(layer, q, k, v, **options).transpose(0, 1).unsqueeze(0)


class intercept(TorchFunctionMode):
    """Routes a model's own causal `scaled_dot_product_attention` calls to pages, inside steps.

    For models whose source is not to be changed. Layers are numbered by call order within a step,
    so every attention layer must call it once per forward pass, in the same order, with
    `is_causal=True`. Other calls (cross-attention, encoders) are left alone.

    Example:
        >>> with flowkv.intercept(), kv.step([seq], [tokens]) as step:  # doctest: +SKIP
        ...     logits = model(step.tokens, step.positions)
    """

    def __init__(self) -> None:
        super().__init__()
        self._step: Step | None = None
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Sees every torch function; takes the causal attention of an open step."""
        kwargs = kwargs or {}
        step = CURRENT.get()
        if func is not _SDPA or step is None or not _causal(args, kwargs):
            return func(*args, **kwargs)
        if step is not self._step:
            self._step, self._calls = step, 0
        order = sorted(layer for group in step.groups for layer in group.layers)
        if self._calls >= len(order):
            raise GeometryError(
                f"the model calls attention more often than the geometry's {len(order)} layers",
                "List every attention layer in the geometry",
            )
        layer = order[self._calls]
        self._calls += 1
        with torch._C.DisableTorchFunctionSubclass():
            names = ("query", "key", "value")
            given = dict(zip(names, args, strict=False)) | kwargs
            q, k, v = (given[name] for name in names)
            return _attend(step, layer, q, k, v, scale=kwargs.get("scale"))


def _causal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False))
