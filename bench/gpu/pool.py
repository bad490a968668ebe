"""Pools full of noise, sealed as a case asks, with tables over different pages for each replay."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bench.gpu.machine import Machine
from flowkv.core.geometry import CODECS, GRANULE_BYTES, Geometry, PageLayout, page_id, page_layout
from flowkv.kernels import Pages, Ragged, transcode

CHUNK = 256
"""Pages that are filled with noise and sealed at a time."""


class Case(NamedTuple):
    """Rows of one step and the shape of their cache.

    Attributes:
        name: What tables and `-k` call it.
        codecs: Of the full pages before the new tokens, taken in turn; the others are raw.
        group: Query heads of a KV head.
        shared: Tokens with which all rows begin, in the same pages.
        of: The case that this one is a multiple of, in tables.
    """

    name: str
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    codecs: tuple[str, ...] = ("raw",)
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    page: int = 128
    dtype: str = "bfloat16"
    layers: int = 1
    window: int | None = None
    shared: int = 0
    of: str = ""

    def shrunk(self) -> Case:
        """A case of the same kind that a CPU runs in an instant."""
        lengths, news, shared = [], [], self.page if self.shared else 0
        for b, (length, new) in enumerate(zip(self.lengths[:3], self.new[:3], strict=True)):
            least = self.page if 1 < new < length and length % new == 0 else min(new, 40)
            past = 2 * self.page + shared if length > new else 0
            news.append(least)
            lengths.append(least + past + (b if len(set(self.lengths)) > 1 else 0))
        window = min(self.window, 50) if self.window else None
        changes = {"lengths": tuple(lengths), "new": tuple(news), "shared": shared}
        return self._replace(kv_heads=2, layers=min(self.layers, 2), window=window, **changes)


class Step(NamedTuple):
    """A pool, and batches over different pages of it.

    Attributes:
        kv_bytes: Of K, V and scales that a call must read.
    """

    case: Case
    pages: Pages
    batches: list[Ragged]
    q: torch.Tensor
    kv_bytes: int


def layouts(case: Case) -> dict[str, PageLayout]:
    """Of raw and all codecs that a case names, least lossy first."""
    geometry = Geometry.uniform(
        layers=case.layers,
        kv_heads=case.kv_heads,
        head_dim=case.dim,
        dtype=case.dtype,
        window=case.window,
        page_size=case.page,
    )
    names = [codec for codec in CODECS if codec in ("raw", *case.codecs)]
    return {codec: page_layout(geometry.groups[0], case.page, codec) for codec in names}


def codecs_of(case: Case) -> list[list[str]]:
    """The codec of each page of each row."""
    rows = []
    for length, new in zip(case.lengths, case.new, strict=True):
        full, count = (length - new) // case.page, -(-length // case.page)
        rows.append([case.codecs[p % len(case.codecs)] for p in range(full)] + ["raw"] * count)
        del rows[-1][count:]
    return rows


def read_bytes(case: Case, forms: dict[str, PageLayout]) -> int:
    """Bytes of K, V and scales of one layer that the new tokens of all rows see."""
    token = forms["raw"].stripe_bytes // case.page
    total = 0
    for b, (length, new, line) in enumerate(
        zip(case.lengths, case.new, codecs_of(case), strict=True)
    ):
        first = max(0, length - new - (case.window or length) + 1)
        first = max(first, case.shared if b else 0)
        for p, codec in enumerate(line):
            seen = min(length, (p + 1) * case.page) - max(first, p * case.page)
            if seen > 0:
                total += seen * token if codec == "raw" else forms[codec].stripe_bytes
    return total


def prepare(case: Case, machine: Machine, sets: int = 0) -> Step:
    """A pool with `sets` batches, or as many as replays need to miss the L2 cache."""
    forms, lines = layouts(case), codecs_of(case)
    kv_bytes = read_bytes(case, forms)
    sets = sets or max(2, min(8, 1 + machine.l2_bytes() // max(kv_bytes, 1)))
    sharing = case.shared // case.page
    wanted: list[str] = []
    for _ in range(sets):
        for b, line in enumerate(lines):
            wanted += line[sharing if b else 0 :]
    arena, ids = _fill(wanted, forms, machine)
    batches, taken = [], 0
    for _ in range(sets):
        table = torch.full((len(lines), max(map(len, lines))), -1, dtype=torch.int32)
        for b, line in enumerate(lines):
            own = len(line) - (sharing if b else 0)
            table[b, len(line) - own : len(line)] = ids[taken : taken + own]
            table[b, : len(line) - own] = table[0, : len(line) - own]
            taken += own
        batches.append(ragged(case, table, machine))
    dtype = getattr(torch, case.dtype)
    q = machine.noise(sum(case.new), case.kv_heads * case.group, case.dim, dtype=dtype)
    sealed = tuple(layout for codec, layout in forms.items() if codec != "raw")
    return Step(case, Pages(arena, forms["raw"], 0, sealed), batches, q, kv_bytes)


def ragged(case: Case, table: torch.Tensor, machine: Machine) -> Ragged:
    """The batch of a case over a table."""
    starts = torch.tensor([0, *case.new]).cumsum(0).int()
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    rows = torch.arange(len(case.lengths), dtype=torch.int32)
    given = (x.to(machine.device) for x in (table, rows, lengths, starts))
    return Ragged(*given, max(case.new), max(case.lengths))


def _fill(
    wanted: list[str], forms: dict[str, PageLayout], machine: Machine
) -> tuple[torch.Tensor, torch.Tensor]:
    """(An arena with pages of these codecs in scattered places, their ids in the order asked)."""
    raw = forms["raw"]
    order = torch.randperm(len(wanted)).tolist()
    ids = torch.empty(len(wanted), dtype=torch.int32)
    end, places = 0, {codec: [] for codec in forms}
    for i in order:
        ids[i] = page_id(end, wanted[i])
        places[wanted[i]].append(end)
        end += forms[wanted[i]].granules
    spare = min(CHUNK, len(wanted)) * raw.granules
    arena = torch.empty((end + spare) * GRANULE_BYTES, dtype=torch.uint8, device=machine.device)
    dtype = getattr(torch, raw.dtype)
    elements = arena.view(dtype).view(-1, GRANULE_BYTES // dtype.itemsize)
    for part in elements.split(1 << 16):
        part.normal_()
    source = torch.arange(end, end + spare, raw.granules, dtype=torch.int32).to(machine.device)
    for codec, layout in forms.items():
        for begin in range(0, len(places[codec]) if codec != "raw" else 0, CHUNK):
            target = torch.tensor(places[codec][begin : begin + CHUNK], dtype=torch.int32)
            elements[end:].normal_()
            status = transcode(arena, source[: len(target)], target.to(machine.device), raw, layout)
            assert not status.any(), f"{codec}: noise could not be sealed"
    return arena, ids
