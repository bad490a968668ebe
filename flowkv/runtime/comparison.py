"""How far a page lies from what the model computes in its place, and how far it may lie.

A token's distance is the Euclidean norm of the difference of its keys (or values) of one head, over
their own norm, or over the page's root mean square where that is larger. Three things may make
it: rounding, the page's own codec, and what codecs took from the pages before it, which the model
reads when it computes (docs/explain/audit.md has the reasons and the measurements).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from flowkv import kernels
from flowkv.core.layout import CODEC_SHIFT, PageLayout
from flowkv.kernels.loss import bounds, by_rotation
from flowkv.kernels.operands import Pages
from flowkv.kernels.reference.pages import page_views
from flowkv.runtime.forms import Forms
from flowkv.runtime.pool import PagePool
from flowkv.runtime.samples import Verdict

ROUNDING = {"float64": 1e-6, "float32": 1e-3, "float16": 0.03, "bfloat16": 0.1}
"""Distance that comes from another order of the same additions, by dtype of the page: the same
forward with other rows beside it, or in other chunks, rounds otherwise in every layer."""

DRIFT = {"raw": 0.0, "kv8": 0.1, "k8v4": 0.5, "kv4c": 0.65, "kv4h": 0.65}
"""Distance that comes from the pages before, by the lossiest codec among them and their own past:
a page was computed when they were raw, or otherwise encoded, and is recomputed as they are now.
The model's first layer has none: its keys and values depend on their own token only."""

_NOTHING = 1e-30


def compare(
    pool: PagePool,
    forms: Forms,
    page: int,
    computed: int,
    *,
    lossiest: str,
    layers: Sequence[int],
) -> Verdict:
    """Compares a restored page with a raw one that the model has just computed.

    Args:
        pool: Holds both.
        forms: Layouts of their layer group.
        page: Id of the restored page.
        computed: Id of the other.
        lossiest: Codec of the lossiest page that either was computed from.
        layers: The group's layers, as the model counts them.

    Returns:
        Error and bound where they are furthest apart in proportion; the error is infinite if one of
        the pages holds NaN or infinity.
    """
    layout = forms.of(page)
    rounding = ROUNDING[layout.dtype]
    stored = _raw(pool, forms, page)
    fresh = _raw(pool, forms, computed)
    if stored is None or fresh is None:
        return Verdict(math.inf, rounding)
    worst, ratio = Verdict(0.0, rounding), 0.0
    for layer, number in enumerate(layers):
        allowed = rounding + (DRIFT[lossiest] if number else 0.0)
        views = zip(_views(stored, forms.raw, layer), _views(fresh, forms.raw, layer), strict=True)
        (k, wanted_k), (v, wanted_v) = views
        lost = _lost(layout, wanted_k, wanted_v)
        parts = [(k, wanted_k, lost[0])]
        if not layout.latent:  # else values are a part of the keys
            parts.append((v, wanted_v, lost[1]))
        for found in _distances(parts, allowed):
            if not math.isfinite(found.error):
                return Verdict(math.inf, found.bound)
            if found.error > ratio * found.bound:
                worst, ratio = found, found.error / found.bound
    return worst


def _distances(
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], allowed: float
) -> Iterator[Verdict]:
    """The worst token of each part: (restored, recomputed, what the codec may lose)."""
    for got, wanted, lost in parts:
        norm = wanted.norm(dim=-1)
        typical = norm.square().mean(-1, keepdim=True).sqrt()
        norm = torch.maximum(norm, typical).clamp_min(_NOTHING)
        error = (got - wanted).norm(dim=-1) / norm
        bound = lost / norm + allowed
        at = int((error / bound).argmax())  # where something is NaN, that is it
        yield Verdict(float(error.view(-1)[at]), float(bound.view(-1)[at]))


def _lost(layout: PageLayout, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The norm of what the page's codec may lose of each token of `[Hk, P, D]`."""
    if layout.codec == "raw":
        return k.new_zeros(k.shape[:-1]), v.new_zeros(v.shape[:-1])
    lost_k, lost_v = bounds(layout.codec, k, v)
    if layout.codec == "kv4h":  # which bounds a token, and not its elements
        return by_rotation(k), lost_v.norm(dim=-1)
    return lost_k.norm(dim=-1), lost_v.norm(dim=-1)


def _raw(pool: PagePool, forms: Forms, page: int) -> torch.Tensor | None:
    """A page's bytes in the raw layout; None if it cannot be decoded."""
    layout = forms.of(page)
    held = pool.page_bytes(page, layout.page_bytes)
    if not page >> CODEC_SHIFT:
        return held
    # Beside the pool, where room may be short: the encoded page, and behind it the decoded one.
    beside = held.new_empty(layout.page_bytes + forms.raw.page_bytes)
    beside[: layout.page_bytes] = held
    places = torch.tensor([0, layout.granules], dtype=torch.int32, device=held.device)
    status = kernels.transcode(beside, places[:1], places[1:], layout, forms.raw)
    return None if bool(status.any()) else beside[layout.page_bytes :]


def _views(page: torch.Tensor, raw: PageLayout, layer: int) -> Iterator[torch.Tensor]:
    """K and V of one layer of a raw page, float64 `[Hk, P, D]`."""
    for view in page_views(Pages(page, raw, layer, ())):
        yield view[0].double()
