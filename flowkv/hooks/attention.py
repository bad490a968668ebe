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
    is_causal: bool = True,
) -> torch.Tensor:
    """Causal attention that stores `k` and `v` in pages and reads them where they lie.

    Outside `with kv.step(...)` this is `torch.nn.functional.scaled_dot_product_attention`, so
    training and evaluation code needs no branch.

    Args:
        q: Queries `[1, Hq, N, D]`: all rows of the step packed one after the other.
        k: New keys `[1, Hk, N, D]`; `Hq` is a multiple of `Hk`. Heads may also be repeated
            `Hq / Hk` times each, as `repeat_interleave` does; pages hold each once.
        v: New values `[1, Hk, N, Dv]`. None in groups of kind "latent" (absorbed MLA), inside a
            step only: there `k` is `[1, 1, N, D]`, and its first Dv dims are the value.
        layer: Index of the layer, as in the cache's geometry.
        scale: Of the logits; default `D ** -0.5`.
        softcap: `tanh(logit / softcap) * softcap`, inside a step only.
        sinks: `[Hq]` extra logits that join the denominator, inside a step only.
        is_causal: As models say it, `T > 1` say: False only where each row has one new token at
            most, which sees all of its past.

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
        return _SDPA(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    if not is_causal and (step.counts > 1).any():
        raise GeometryError(
            "attention in a step of several new tokens in a row is to look ahead",
            "Pages serve causal attention: say is_causal=True, or run it outside the step",
        )
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
    group = step.group(layer)
    q, k = q[0].transpose(0, 1), _once(k[0].transpose(0, 1), group.kv_heads)
    v = None if v is None else _once(v[0].transpose(0, 1), group.kv_heads)
    return step.attend(layer, q, k, v, **options).transpose(0, 1).unsqueeze(0)


def _once(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[N, Hk, D]` of keys or values whose heads may each be repeated."""
    if x.shape[1] == heads or x.shape[1] % heads:
        return x  # what does not fit is refused with the rest
    every = x.reshape(x.shape[0], heads, -1, x.shape[2])
    first = every[:, :, :1]
    if not torch.equal(every, first.expand_as(every)):
        raise GeometryError(
            f"{x.shape[1]} different heads of keys and values, the geometry has {heads}",
            "Say how many the model has: LayerGroup(kv_heads=...)",
        )
    return first.squeeze(2)


class intercept(TorchFunctionMode):
    """Routes a model's own causal `scaled_dot_product_attention` calls to pages, inside steps.

    For models whose source is not to be changed. Layers are numbered by call order within a step,
    so every attention layer must call it once per forward pass, in the same order, with
    `is_causal=True`; in a step of a single new token it may say False, as `is_causal=T > 1` does.
    Other calls (cross-attention, encoders) are left alone.

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
        if func is not _SDPA or step is None or not _causal(args, kwargs, step):
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


def _causal(args: tuple[Any, ...], kwargs: dict[str, Any], step: Step) -> bool:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("is_causal"):
        return True
    # A new token by itself sees all of its past: models do not call that causal.
    single = int(step.counts.sum()) == given["query"].shape[2] == given["key"].shape[2] == 1
    return single and given.get("attn_mask") is None
