"""Poisoned pools with known tokens in them, and attention without any pages to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flowkv.core.geometry import Geometry
from flowkv.core.layout import GRANULE_BYTES, PageLayout, page_layout
from flowkv.kernels import Pages, Ragged, append

POISON = 0xFF
"""A byte that, repeated, is NaN in every floating dtype."""


def int32(values: object) -> torch.Tensor:
    """A vector as kernels want it."""
    return torch.tensor(list(values), dtype=torch.int32)


def layout_of(
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    page_size: int = 16,
    dtype: str = "float32",
    layers: int = 2,
) -> PageLayout:
    """A raw page layout."""
    geometry = Geometry.uniform(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        page_size=page_size,
    )
    return page_layout(geometry.groups[0], page_size)


def poisoned_arena(layout: PageLayout, pages: int) -> torch.Tensor:
    """Room for `pages` pages, and one granule at each end that no kernel may touch."""
    n_bytes = (pages * layout.granules + 2) * GRANULE_BYTES
    return torch.full((n_bytes,), POISON, dtype=torch.uint8)


@dataclass
class Scene:
    """Rows of given lengths, all of their tokens appended to pages in scattered places.

    Attributes:
        lengths: Tokens of each row.
        new: The last tokens of each row, those that attend.
        window: What the rows were planned for: pages behind it are absent and poisoned.
    """

    layout: PageLayout
    lengths: list[int]
    new: list[int]
    window: int | None = None
    seed: int = 0
    layer: int = 1
    backend: str | None = "reference"
    k: list[torch.Tensor] = field(init=False)
    v: list[torch.Tensor] = field(init=False)
    pages: Pages = field(init=False)
    batch: Ragged = field(init=False)

    def __post_init__(self) -> None:
        layout, rng = self.layout, torch.Generator().manual_seed(self.seed)
        dtype, size = getattr(torch, layout.dtype), layout.page_size

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng).to(dtype)

        self.k = [noise(n, layout.kv_heads, layout.head_dim) for n in self.lengths]
        self.v = [noise(n, layout.kv_heads, layout.value_dim) for n in self.lengths]
        counts = [-(-n // size) for n in self.lengths]
        width = max(counts, default=0) + 1  # a column more than any row needs
        places = 1 + layout.granules * torch.randperm(sum(counts), generator=rng).int()
        table = torch.full((len(self.lengths) + 1, width), -1, dtype=torch.int32)
        rows = torch.randperm(len(self.lengths) + 1, generator=rng)[: len(self.lengths)].int()
        for row, own in zip(rows.tolist(), places.split(counts), strict=True):
            table[row, : len(own)] = own
        self.pages = Pages(poisoned_arena(layout, sum(counts)), layout, self.layer)
        self.batch = self._ragged(table, rows, self.lengths)
        if sum(self.lengths):
            append(
                torch.cat(self.k), torch.cat(self.v), self.pages, self.batch, backend=self.backend
            )
        self._drop_unseen(table, rows.tolist())
        self.batch = self._ragged(table, rows, self.new)

    def _ragged(self, table: torch.Tensor, rows: torch.Tensor, new: list[int]) -> Ragged:
        starts = int32([0, *torch.tensor([0, *new]).cumsum(0)[1:].tolist()])
        most_new, most_length = max(new, default=0), max(self.lengths, default=0)
        return Ragged(table.clone(), rows, int32(self.lengths), starts, most_new, most_length)

    def _drop_unseen(self, table: torch.Tensor, rows: list[int]) -> None:
        if self.window is None:
            return
        frames = self.pages.arena.view(-1, GRANULE_BYTES)
        for row, length, new in zip(rows, self.lengths, self.new, strict=True):
            seen = max(0, length - new - self.window + 1) // self.layout.page_size
            for granule in table[row, :seen].tolist():
                frames[granule : granule + self.layout.granules] = POISON
            table[row, :seen] = -1

    def queries(self, group: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Queries for the new tokens, `group` heads to a KV head."""
        rng = torch.Generator().manual_seed(self.seed + 1)
        shape = (sum(self.new), group * self.layout.kv_heads, self.layout.head_dim)
        return torch.randn(shape, generator=rng).to(dtype or getattr(torch, self.layout.dtype))

    def dense(
        self,
        q: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention should answer: (o, lse) in float64, token by token from the inputs."""
        outs, lses, group = [], [], q.shape[1] // self.layout.kv_heads
        queries = iter(q.double())
        for k, v, length, new in zip(self.k, self.v, self.lengths, self.new, strict=True):
            for end in range(length - new + 1, length + 1):
                start = 0 if self.window is None else max(0, end - self.window)
                k_seen = k[start:end].double().repeat_interleave(group, 1)
                v_seen = v[start:end].double().repeat_interleave(group, 1)
                s = (next(queries) * k_seen).sum(-1) * scale  # [S, Hq]
                s = s if softcap is None else torch.tanh(s / softcap) * softcap
                e = torch.exp(s)
                total = e.sum(0) if sinks is None else e.sum(0) + torch.exp(sinks.double())
                outs.append((e[..., None] * v_seen).sum(0) / total[:, None])
                lses.append(torch.log(total))
        if not outs:
            return q.new_zeros(0, q.shape[1], self.layout.value_dim), q.new_zeros(0, q.shape[1])
        return torch.stack(outs), torch.stack(lses)
