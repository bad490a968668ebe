"""The operation that encodes pages: check the operands, choose the backend, run."""

from __future__ import annotations

import torch

from flowkv.core.errors import ConfigError, GeometryError
from flowkv.core.layout import CODECS, PageLayout
from flowkv.kernels import bounds
from flowkv.kernels.dispatch import choose
from flowkv.kernels.registry import resolve

SOUND, NON_FINITE, OUT_OF_RANGE = 0, 1, 2
"""What `transcode` says of a layer of a page."""


def transcode(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    old: PageLayout,
    new: PageLayout,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Write full pages once more in another codec: seal, demote, or decode.

    All implementations write the same bytes: every step is one correctly rounded float32
    operation in a given order (docs/explain/codecs.md). Bytes between runs and stripes become 0.

    Args:
        arena: uint8 `[bytes]`.
        source: int32 `[n]`, granules at which pages in layout `old` begin.
        target: int32 `[n]`, granules for their copies in layout `new`; no two pages overlap.
        old: Layout of the sources.
        new: Layout of the targets, of the same layers, heads, dims and page size.
        backend: "reference", "cpu" or "triton"; default by device and dtype.

    Returns:
        int32 `[n, L]`: per page and layer `SOUND`; `NON_FINITE` where K or V hold NaN or infinity;
        `OUT_OF_RANGE` where a scale is beyond float16. A target that is not `SOUND` in all its
        layers must not be used.

    Raises:
        GeometryError: An operand has the wrong shape, dtype or device.
        ConfigError: No such backend, or it does not know one of the codecs; latent pages.
    """
    bounds.check_granules(arena, old.granules, source=source)
    bounds.check_granules(arena, new.granules, target=target)
    same = ("layers", "kv_heads", "page_size", "head_dim", "value_dim", "dtype")
    differing = [name for name in same if getattr(old, name) != getattr(new, name)]
    if differing or source.shape != target.shape:
        raise GeometryError(
            f"{len(source)} pages to {len(target)}, layouts that differ in {differing or 'codec'}",
            "Pass a target for every source, and two codecs of one layer group",
        )
    if old.latent:
        raise ConfigError(
            "transcoding pages of a latent group", "Leave them: their only codec is raw"
        )
    lossiest = max(old, new, key=lambda layout: CODECS.index(layout.codec))
    backend = backend or choose(arena.device, page_dtype=old.dtype)
    status: torch.Tensor = resolve("transcode", lossiest.codec, backend)(
        arena, source, target, old, new
    )
    return status
