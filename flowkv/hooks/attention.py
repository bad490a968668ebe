"""`flowkv.attention` for any model, in place of scaled-dot-product attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from flowkv.cache.step import Step, current_step
from flowkv.core.errors import GeometryError, StateError

_SDPA = F.scaled_dot_product_attention


def attention(  # noqa: PLR0913 - the switches of attention belong to one call
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *,
    layer: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    alibi: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = True,
) -> torch.Tensor:
    """Attend causally: write `k` and `v` into pages, and attend to all cached pages in place.

    Outside `with kv.step(...)` this is `torch.nn.functional.scaled_dot_product_attention`, so
    training and evaluation code needs no branch.

    Args:
        q: Queries `[1, Hq, N, D]`: all rows of the step packed one after the other.
        k: New keys `[1, Hk, N, D]`; `Hq` is a multiple of `Hk`. Heads may also be repeated
            `Hq / Hk` times each, as `repeat_interleave` does; pages hold each once.
        v: New values `[1, Hk, N, Dv]`. None in groups of kind "latent" (absorbed MLA), inside a
            step only: there `k` is `[1, 1, N, D]`, and its first Dv dims are the value.
        layer: Index of the layer, as in the cache's geometry.
        scale: Scale of the logits; default `D ** -0.5`.
        softcap: `tanh(logit / softcap) * softcap`, inside a step only.
        sinks: `[Hq]` extra logits that join the denominator, inside a step only.
        window: Tokens that a token attends to, itself included; default that of the layer's group.
        alibi: `[Hq]` slopes: `slope * (key's position - query's)` is added to the logits
            (Press et al., arXiv 2108.12409).
        attn_mask: Mask among the step's tokens, `[..., N, N]`, bool or 0 and -inf, as models
            without a cache build it. In a step it must equal the rule that pages serve, causal or
            the window; biases go into `alibi`.
        is_causal: As models pass it, such as `T > 1`: False only with such a mask, or if each row
            has at most one new token, which attends to all of its past.

    Returns:
        `[1, Hq, N, Dv]` in the dtype of `q`.

    Raises:
        GeometryError: Shapes or dtypes do not fit the step or the geometry, a mask is not served
            by pages, or a window is longer than the cached pages.
        StateError: `softcap`, `sinks` or latents are used outside a step, or the step is over;
            gradients are required inside one.

    Example:
        >>> with kv.step([seq], [tokens]) as step:
        ...     logits = model(step.tokens, step.positions)
    """
    step = current_step()
    if step is None:
        if v is None or softcap is not None or sinks is not None:
            raise StateError(
                "softcap, sinks and latents work inside a step only",
                "Call the model inside kv.step(...)",
            )
        grouped = q.shape[1] != k.shape[1]
        if window is not None or alibi is not None:
            attn_mask = _bias(q, k, attn_mask, window, alibi, causal=is_causal)
        causal = is_causal and attn_mask is None
        return _SDPA(
            q, k, v, attn_mask=attn_mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    if not _sees(step, attn_mask, window or step.group(layer).window, causal=is_causal):
        raise GeometryError(
            "attention in a step sees other tokens than all those before, in its row or window",
            "Pages serve causal attention: pass is_causal=True, window= or alibi=, or call it "
            "outside the step",
        )
    options = dict(scale=scale, softcap=softcap, sinks=sinks, window=window, alibi=alibi)
    return _attend(step, layer, q, k, v, **options)


def _bias(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    window: int | None,
    alibi: torch.Tensor | None,
    *,
    causal: bool,
) -> torch.Tensor:
    """Return the bias `[..., T, S]` of logits for a window, slopes and a mask."""
    queries, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    ahead = keys - queries.unsqueeze(1)
    hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (ahead <= -window)
    slopes = q.new_zeros(1) if alibi is None else alibi.to(q)
    bias = (slopes.view(-1, 1, 1) * ahead).masked_fill(hidden, -torch.inf)
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else bias + mask


def _sees(step: Step, mask: torch.Tensor | None, window: int | None, *, causal: bool) -> bool:
    """Return whether a mask equals the rule that pages serve: all tokens before, in each row."""
    if mask is None:
        return causal or not (step.counts > 1).any()
    if mask.shape[-2:] != (int(step.counts.sum()),) * 2:
        return False
    seen = mask if mask.dtype is torch.bool else mask == 0
    if mask.dtype is not torch.bool and not (seen | (mask <= torch.finfo(mask.dtype).min)).all():
        return False  # the mask adds a bias
    end = 0
    for count in step.counts.tolist():  # rows never attend to each other, whatever the mask
        start, end = end, end + count
        own = mask.new_ones(count, count, dtype=torch.bool).tril()
        if window is not None:
            own = own.triu(1 - window)
        if not (seen[..., start:end, start:end] == own).all():
            return False
    return True


def _attend(
    step: Step, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    n_tokens, given = int(step.counts.sum()), [q, k] if v is None else [q, k, v]
    inputs = [x for x in (*given, *options.values()) if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise StateError(
            "gradients are required in a step, but keys and values in pages pass none on",
            "Call the model under torch.no_grad(), or outside the step to train it",
        )
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
            "Pass the dtype that the model computes in: LayerGroup(dtype=...)",
        )
    group = step.group(layer)
    q, k = q[0].transpose(0, 1), _once(k[0].transpose(0, 1), group.kv_heads)
    v = None if v is None else _once(v[0].transpose(0, 1), group.kv_heads)
    return step.attend(layer, q, k, v, **options).transpose(0, 1).unsqueeze(0)


def _once(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return `[N, Hk, D]` of keys or values with heads that may each be repeated."""
    if x.shape[1] == heads or x.shape[1] % heads:
        return x  # a count that does not fit is refused with the other shapes
    every = x.reshape(len(x), heads, -1, x.shape[2])
    first = every[:, :, :1]
    if not torch.equal(every, first.expand_as(every)):
        raise GeometryError(
            f"{x.shape[1]} different heads of keys and values, the geometry has {heads}",
            "Pass the model's number of heads: LayerGroup(kv_heads=...)",
        )
    return first.squeeze(2)


class intercept(TorchFunctionMode):
    """Mode that routes causal `scaled_dot_product_attention` calls to pages, inside steps.

    Use it for models with source that should not change. Layers are numbered by call order within a
    step, so every attention layer must call it once per forward pass, in the same order, with
    `is_causal=True`, or with a mask among the step's tokens that is causal or has the window of the
    layer's group; a single new token needs neither, as in `is_causal=T > 1`. Other calls
    (cross-attention, encoders) are left alone.

    Example:
        >>> with flowkv.intercept(), kv.step([seq], [tokens]) as step:
        ...     logits = unchanged(step.tokens, step.positions)
    """

    def __init__(self) -> None:
        super().__init__()
        self._step: Step | None = None
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the causal attention of an open step, and pass on every other torch function."""
        kwargs = kwargs or {}
        step = current_step()
        if func is not _SDPA or step is None:
            return func(*args, **kwargs)
        if step is not self._step:
            self._step, self._calls = step, 0
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        order = sorted(layer for group in step.groups for layer in group.layers)
        layer = order[min(self._calls, len(order) - 1)]
        with torch._C.DisableTorchFunctionSubclass():
            if not self._own(step, layer, given):
                return func(*args, **kwargs)
            if self._calls >= len(order):
                raise GeometryError(
                    f"the model calls attention more often than the geometry's {len(order)} layers",
                    "List every attention layer in the geometry",
                )
            self._calls += 1
            q, k, v = (given[name] for name in names[:3])
            return _attend(step, layer, q, k, v, scale=given.get("scale"))

    def _own(self, step: Step, layer: int, given: dict[str, Any]) -> bool:
        """Return whether a call is the causal attention of the step's tokens."""
        mask, n_tokens = given.get("attn_mask"), int(step.counts.sum())
        if given.get("dropout_p"):
            return False
        if given.get("is_causal"):
            return mask is None  # torch refuses both
        if not given["query"].shape[2] == given["key"].shape[2] == n_tokens:
            return False
        if mask is None:
            return n_tokens == 1  # a single token attends to all of its past without a mask
        return _sees(step, mask, step.group(layer).window, causal=False)
