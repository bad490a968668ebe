"""A prefix in host memory as sealed pages, which the device decodes as they come."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.restore.store import Mark
from flowkv.core.errors import ConfigError
from flowkv.core.geometry import Geometry, PageLayout, page_layout
from flowkv.kernels import transcode
from flowkv.policy.restore import RestoreLoad

_AT_ONCE = 64
"""Most pages of one layer that are sealed or decoded at once."""


class EncodedStore:
    """Host memory with pages of one layer each, in a codec.

    Args:
        kv: `[L, N, 2, Hk, D]`.
        codec: One of `CODECS`, not raw.
        unit: Tokens of a page, P.
        pin: Whether a GPU is to copy from it without the processor.

    Attributes:
        cell_bytes: See `Store`; padding and scales included.

    Raises:
        ConfigError: The codec does not fit, or N is no whole number of pages.
    """

    def __init__(self, kv: torch.Tensor, codec: str, unit: int, *, pin: bool = False) -> None:
        layers, tokens, _, heads, dim = kv.shape
        if tokens % unit:
            raise ConfigError(
                f"{tokens} tokens are no whole number of pages of {unit}",
                "Only raw prefixes may end within a page",
            )
        geometry = Geometry.uniform(
            layers=1,
            kv_heads=heads,
            head_dim=dim,
            dtype=str(kv.dtype).removeprefix("torch."),
            page_size=unit,
        )
        (group,) = geometry.groups
        self._raw, self._sealed = page_layout(group, unit), page_layout(group, unit, codec)
        room = _AT_ONCE * (self._raw.page_bytes + self._sealed.page_bytes)
        self._unit, self._arena = unit, torch.empty(room, dtype=torch.uint8, device=kv.device)
        self.cell_bytes = self._sealed.page_bytes / unit
        size = layers, tokens // unit, self._sealed.page_bytes
        self._pages = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        for first in range(0, size[1], _AT_ONCE):
            for layer in range(layers):
                self._seal(kv, layer, first, min(size[1], first + _AT_ONCE))

    def fill(self, kv: torch.Tensor, op: RestoreLoad, mark: Callable[[], Mark]) -> None:
        first, stop = op.tokens.first // self._unit, op.tokens.stop // self._unit
        layers = max(1, min(op.layers.size, _AT_ONCE // (stop - first)))
        for low in range(op.layers.first, op.layers.stop, layers):
            high = min(op.layers.stop, low + layers)
            for begin in range(first, stop, _AT_ONCE):
                self._open(kv, low, high, begin, min(stop, begin + _AT_ONCE))

    def _seal(self, kv: torch.Tensor, layer: int, first: int, stop: int) -> None:
        raw, sealed = self._room(stop - first)
        tokens = kv[layer, first * self._unit : stop * self._unit]
        pages = tokens.view(-1, self._unit, *tokens.shape[1:])
        self._numbers(raw).copy_(pages.permute(0, 3, 2, 1, 4))
        status = transcode(self._arena, *self._places(len(raw)), self._raw, self._sealed)
        if status.any():
            raise ConfigError(
                f"keys or values cannot be sealed in {self._sealed.codec}", "Use another codec"
            )
        self._pages[layer, first:stop].copy_(sealed)

    def _open(self, kv: torch.Tensor, low: int, high: int, first: int, stop: int) -> None:
        """Some pages of some layers: as many copies as layers, decoded at once."""
        layers, pages = high - low, stop - first
        raw, sealed = self._room(layers * pages)
        for number, rows in enumerate(sealed.view(layers, pages, -1)):
            rows.copy_(self._pages[low + number, first:stop], non_blocking=True)
        source, target = self._places(len(raw))
        transcode(self._arena, target, source, self._sealed, self._raw)
        tokens = kv[low:high, first * self._unit : stop * self._unit]
        numbers = self._numbers(raw)  # [layers * pages, Hk, 2, P, D]
        numbers = numbers.view(layers, pages, *numbers.shape[1:])
        rows = tokens.view(layers, pages, self._unit, *tokens.shape[2:])
        rows.copy_(numbers.permute(0, 1, 4, 3, 2, 5))

    def _room(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw and sealed pages, `[count, bytes]`, one behind the other in the arena."""
        raw_bytes, sealed_bytes = count * self._raw.page_bytes, count * self._sealed.page_bytes
        raw = self._arena[:raw_bytes].view(count, -1)
        return raw, self._arena[raw_bytes : raw_bytes + sealed_bytes].view(count, -1)

    def _places(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Granules at which raw and sealed pages begin."""
        numbers = torch.arange(count, dtype=torch.int32, device=self._arena.device)
        behind = count * self._raw.granules
        return numbers * self._raw.granules, behind + numbers * self._sealed.granules

    def _numbers(self, pages: torch.Tensor) -> torch.Tensor:
        """Raw pages as numbers, `[n, Hk, 2, P, D]`."""
        layout: PageLayout = self._raw
        numbers = pages[:, : layout.stripe_bytes].view(getattr(torch, layout.dtype))
        return numbers.view(len(pages), layout.kv_heads, 2, layout.page_size, layout.head_dim)
