"""Poisoned pools with known tokens in them, and attention without any pages to compare with."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flowkv import Geometry
from flowkv.kernels import (
    Pages,
    Ragged,
    Scoring,
    append,
    checking,
    copy_pages,
    gather_pages,
    paged_attention,
    scatter_pages,
)
from tests.inside import GRANULE_BYTES, PageLayout, decoded, page_id, page_layout, transcode

POISON = 0xFF
"""A byte that, repeated, is NaN in every floating dtype."""
FAR_BYTES = 40 << 30
"""Bytes, and values of four bytes, beyond those that 32 bits count."""


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
    codec: str = "raw",
) -> PageLayout:
    """A page layout."""
    geometry = Geometry.uniform(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        page_size=page_size,
    )
    return page_layout(geometry.groups[0], page_size, codec)


def layout_like(raw: PageLayout, codec: str) -> PageLayout:
    """The layout of the same pages in another codec."""
    dims = raw.kv_heads, raw.head_dim, raw.value_dim
    return layout_of(*dims, raw.page_size, raw.dtype, raw.layers, codec)


def poisoned_arena(layout: PageLayout, pages: int, *, apart: int = 1) -> torch.Tensor:
    """Room for `pages` pages, and one granule at each end that no kernel may touch.

    Every page but the first lies `apart` pages behind another; beyond 1, the arena is zeros.
    """
    n_bytes = (pages * layout.granules * apart + 2) * GRANULE_BYTES
    if apart > 1:
        with tempfile.NamedTemporaryFile() as file:  # takes only the pages that are written
            return torch.from_file(file.name, shared=True, size=n_bytes, dtype=torch.uint8)
    return torch.full((n_bytes,), POISON, dtype=torch.uint8)


@dataclass
class Scene:
    """Rows of given lengths, all of their tokens appended to pages in scattered places.

    Attributes:
        lengths: Tokens of each row.
        new: The last tokens of each row, those that attend.
        window: What the rows were planned for: pages behind it are absent and poisoned.
        sealed: Codecs that full pages of the past may have; each page has one of these, or is raw.
            `k` and `v` are then what they decode to.
        far: Whether pages are spread over `FAR_BYTES`, as in the pool of a large GPU.
        causal: Whether queries stand among the tokens; if not, the last pages may be sealed too.
    """

    layout: PageLayout
    lengths: list[int]
    new: list[int]
    window: int | None = None
    seed: int = 0
    layer: int = 1
    backend: str | None = "reference"
    sealed: tuple[str, ...] = ()
    far: bool = False
    causal: bool = True
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
        if layout.latent:
            self.v = [k[..., : layout.value_dim] for k in self.k]
        else:
            self.v = [noise(n, layout.kv_heads, layout.value_dim) for n in self.lengths]
        counts = [-(-n // size) for n in self.lengths]
        width = max(counts, default=0) + 1  # a column more than any row needs
        room = sum(counts) * (2 if self.sealed else 1)
        size_bytes = max(1, room * layout.granules * GRANULE_BYTES)
        apart = -(-FAR_BYTES // size_bytes) if self.far else 1
        every = 1 + apart * layout.granules * torch.randperm(room, generator=rng).int()
        places, spare = every[: sum(counts)], every[sum(counts) :].tolist()
        table = torch.full((len(self.lengths) + 1, width), -1, dtype=torch.int32)
        rows = torch.randperm(len(self.lengths) + 1, generator=rng)[: len(self.lengths)].int()
        for row, own in zip(rows.tolist(), places.split(counts), strict=True):
            table[row, : len(own)] = own
        self.pages = Pages(poisoned_arena(layout, room, apart=apart), layout, self.layer)
        self.batch = self._ragged(table, rows, self.lengths)
        if sum(self.lengths):
            v = None if layout.latent else torch.cat(self.v)
            append(torch.cat(self.k), v, self.pages, self.batch, backend=self.backend)
        self._drop_unseen(table, rows.tolist())
        self._seal(table, rows.tolist(), spare)
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

    def _seal(self, table: torch.Tensor, rows: list[int], spare: list[int]) -> None:
        if not self.sealed:
            return
        layout, size, rng = self.layout, self.layout.page_size, random.Random(self.seed)
        layouts = {codec: layout_like(layout, codec) for codec in self.sealed}
        self.pages = self.pages._replace(sealed=tuple(layouts.values()))
        frames = self.pages.arena.view(-1, GRANULE_BYTES)
        self.k, self.v = ([x.float() for x in xs] for xs in (self.k, self.v))
        for b, row in enumerate(rows):
            past = self.lengths[b] - (self.new[b] if self.causal else 0)
            for page in range(max(0, past) // size):
                codec, old = rng.choice(["raw", *self.sealed]), int(table[row, page])
                if codec == "raw" or old < 0:
                    continue
                place, form = spare.pop(), layouts[codec]
                lists = int32([old]), int32([place])
                status = transcode(self.pages.arena, *lists, layout, form)
                assert status[0, self.layer] == 0  # other layers hold poison
                frames[old : old + layout.granules] = POISON
                table[row, page] = page_id(place, codec)
                k, v = decoded(self.pages.arena, form, self.layer, [place])
                here = slice(page * size, (page + 1) * size)
                self.k[b][here], self.v[b][here] = (x[0].transpose(0, 1) for x in (k, v))

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
        return self.answer(q, Scoring(scale, self.window, softcap, sinks))[:2]

    def answer(self, q: torch.Tensor, how: Scoring) -> tuple[torch.Tensor, ...]:
        """(o, lse, mass) in float64, token by token from the inputs, under every switch."""
        heads, kv_heads, size = q.shape[1], self.layout.kv_heads, self.layout.page_size
        o = torch.zeros(q.shape[0], heads, self.layout.value_dim, dtype=torch.float64)
        lse = torch.full((q.shape[0], heads), -torch.inf, dtype=torch.float64)
        pages = -(-max(self.lengths, default=0) // size)
        mass = torch.zeros(len(self.lengths), pages, kv_heads, dtype=torch.float64)
        n = 0
        for b, (k, v, new) in enumerate(zip(self.k, self.v, self.new, strict=True)):
            k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            for j in range(new):
                own = len(k) - new + j
                seen = [t for t in range(len(k)) if self._sees(own, t, len(k) - new, n, how)]
                s = (q[n].double() * k[seen]).sum(-1) * how.scale  # [S, Hq]
                s = s if how.softcap is None else torch.tanh(s / how.softcap) * how.softcap
                if how.alibi is not None:
                    s = s + how.alibi.double() * (torch.tensor(seen)[:, None] - own)
                sinks = [] if how.sinks is None else [how.sinks.double()[None]]
                lse[n] = torch.logsumexp(torch.cat([s, *sinks]), 0)
                p = torch.exp(s - lse[n])
                if seen:
                    o[n] = (p[..., None] * v[seen]).sum(0)
                    share = p.unflatten(1, (kv_heads, -1)).sum(2)
                    mass[b].index_add_(0, torch.tensor(seen) // size, share)
                n += 1
        return o, lse, mass

    def _sees(self, own: int, t: int, first: int, n: int, how: Scoring) -> bool:
        if not how.causal:
            return True
        if how.window is not None and t <= own - how.window:
            return False
        if how.tree is not None and t >= first:
            return bool(int(how.tree[n]) >> (t - first) & 1)
        return t <= own


def attend(
    scene: Scene,
    q: torch.Tensor,
    how: Scoring,
    near: float,
    backend: str | None = None,
    *,
    near_lse: float | None = None,
    near_mass: tuple[float, float] | None = None,
    rounding: float = 0.0,
) -> torch.Tensor:
    """Compare a backend with dense attention over what the pages decode to; return its output.

    Args:
        near: Bound of absolute errors of outputs.
        near_lse: That of logarithms, if another.
        near_mass: Bounds of relative and absolute errors of pages' mass, if others.
        rounding: Relative errors of outputs that are allowed beside `near`.
    """
    expected, expected_lse, weights = scene.answer(q, how)
    mass, (rtol, atol) = how.mass, near_mass or (0.0, near)
    before = None if mass is None else mass.clone()
    options = how._replace(return_lse=True)._asdict()
    with checking():
        o, lse = paged_attention(q, scene.pages, scene.batch, **options, backend=backend)
    assert o.dtype == q.dtype and o.is_contiguous() and lse.dtype == torch.float32
    torch.testing.assert_close(o.double(), expected, rtol=rounding, atol=near + rounding)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=near_lse or near)
    if mass is not None:
        count = weights.shape[1]
        assert torch.equal(mass[:, count:], before[:, count:])
        total = before[:, :count].double() + weights
        torch.testing.assert_close(mass[:, :count].double(), total, rtol=rtol, atol=atol)
    return o


def alone(scene: Scene, b: int) -> Ragged:
    """Row b of a scene's batch as a batch."""
    batch, new, length = scene.batch, scene.new[b], scene.lengths[b]
    return Ragged(batch.table, batch.rows[b : b + 1], int32([length]), int32([0, new]), new, length)


def check_tokens_of_no_row(past: int, new: int, padded: int, near: float, backend: str) -> None:
    """As in captured steps, whose buffers hold more tokens than their single row has."""
    scene = Scene(layout_of(2, 64, page_size=16), [past + new], [new])
    more = scene.batch._replace(most_new=padded, most_length=2 * (past + padded))
    q = torch.cat([scene.queries(4), torch.full((padded - new, 8, 64), torch.nan)])
    o = paged_attention(q, scene.pages, more, backend=backend)[:new]
    expected = paged_attention(q[:new], scene.pages, scene.batch, backend="reference")
    torch.testing.assert_close(o, expected, rtol=0, atol=near)


def check_nan_shows(scene: Scene, where: str, group: int, backend: str) -> None:
    """NaN in a key or a value of a visible token of a scene of one row and one head."""
    getattr(scene, where)[0][21, 0, 3] = torch.nan
    full = scene.batch._replace(starts=int32([0, *scene.lengths]), most_new=scene.lengths[0])
    append(scene.k[0], scene.v[0], scene.pages, full)
    o, lse = paged_attention(
        scene.queries(group), scene.pages, scene.batch, return_lse=True, backend=backend
    )
    if where == "k":
        assert o.isnan().all() and lse.isnan().all()
    else:
        assert o[..., 3].isnan().all() and o.isnan().sum() == group * scene.new[0]


def check_copies(
    places: Sequence[int], granules: int, backend: str | None, device: str = "cpu"
) -> None:
    """Copy, gather and scatter pages between some places, of which two stay as they are."""
    count = (len(places) - 2) // 2
    from_, to = list(places[:count]), list(places[count : 2 * count])
    shape = len(places), granules * GRANULE_BYTES
    arena = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).flatten()
    frames = arena.clone().view(shape)
    source, target = (int32(p * granules for p in x).to(device) for x in (from_, to))
    with checking():
        copy_pages(arena, source, target, granules, backend=backend)
        frames[to] = frames[from_]
        assert torch.equal(arena, frames.flatten())
        out = torch.full((count, shape[1]), 7, dtype=torch.uint8, device=device)
        gather_pages(arena, source, granules, out, backend=backend)
        assert torch.equal(out, frames[from_])
        scatter_pages(arena, target, granules, out.flip(0).contiguous(), backend=backend)
    frames[to] = out.flip(0)
    assert torch.equal(arena, frames.flatten())
