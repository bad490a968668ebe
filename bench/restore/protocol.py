"""The protocol: its cells, and every policy in each of them.

Source: the papers that it compares (CacheFlow, arXiv 2604.25080; Cake, arXiv 2410.03065) restore at
10, 40 and 80 Gbps, and at 7 to 100. A Gbps is 1e9 bits per second. The suffix is part of the time
to the first token, all policies restore the same pages over the same link, and nothing is resident
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median

from bench.restore.grid import GRID_GBPS, GRID_GPUS, GRID_MODELS, GRID_TOKENS, lengths
from bench.restore.modelled import bounds, play, policies
from bench.restore.row import Cell, Outcome, Row
from flowkv.core.errors import ConfigError

Tell = Callable[[int, int, str], None]

PARTS = {
    "paper": "Links of 10, 40 and 80 Gbps, a suffix of 512 tokens",
    "suffix": "Shorter and longer suffixes",
    "busy": "Restores get a part of the computing only",
    "links": "Links of 7 to 100 Gbps",
    "pcie": "An unthrottled link",
    "batch": "Eight requests at once",
    "stages": "Layers over several devices",
    "precision": "Pages in fewer bits, or in several at choice",
}
"""Parts of the protocol, by name."""

CAKE_GBPS = (7.0, 25.0, 32.0, 56.0, 100.0)
PCIE_GBPS = 440.0
"""What copies reach over PCIe 5 x16: 55 GB/s (`sim.hardware`)."""
SUFFIX, OTHER_SUFFIXES = 512, (64, 2048)
BUSY = (0.125, 0.5)
STAGES = (2, 4)
CODECS: tuple[tuple[str, ...], ...] = (("kv8",), ("kv4",), ("raw", "kv8", "kv4"))
BATCH = 8


def paper_cells(full: bool) -> list[Cell]:
    """All cells of the protocol that a virtual clock can play.

    Args:
        full: All parts on every model and GPU; else those behind the first on one of each, but
            for stages: where a link is slow beside the GPU, they lose most.
    """
    cells = list(_cells("paper", GRID_MODELS, GRID_GPUS, GRID_GBPS))
    models, gpus = (GRID_MODELS, GRID_GPUS) if full else (GRID_MODELS[:1], GRID_GPUS[-1:])
    gbps = GRID_GBPS if full else GRID_GBPS[1:2]
    for suffix in OTHER_SUFFIXES:
        cells += _cells("suffix", models, gpus, gbps, suffix=suffix)
    for share in BUSY:
        cells += _cells("busy", models, gpus, GRID_GBPS, compute_share=share)
    cells += _cells("busy", models, gpus, CAKE_GBPS[2:3], compute_share=BUSY[0])
    cells += _cells("links", models, gpus, CAKE_GBPS)
    cells += _cells("pcie", models, gpus, (PCIE_GBPS,))
    cells += _batches(models, gpus, draws=4 if full else 2)
    for stages in (1, *STAGES):
        cells += _cells("stages", GRID_MODELS, GRID_GPUS, GRID_GBPS, suffix=0, stages=stages)
    for codecs in CODECS:
        cells += _cells("precision", models, gpus, GRID_GBPS, codecs=codecs)
    return cells


def _cells(
    part: str,
    models: Sequence[str],
    gpus: Sequence[str],
    gbps: Sequence[float],
    *,
    suffix: int = SUFFIX,
    **others: object,
) -> Iterator[Cell]:
    for model, gpu, rate, tokens in product(models, gpus, gbps, GRID_TOKENS):
        yield Cell(
            part=part,
            model=model,
            gpu=gpu,
            tokens=tokens,
            suffix=suffix,
            gbps=rate,
            **others,  # type: ignore[arg-type]
        )


def _batches(models: Sequence[str], gpus: Sequence[str], draws: int) -> Iterator[Cell]:
    """Prompts of lognormal lengths around 12K tokens, and prompts of one length."""
    drawn = [lengths(BATCH, seed) for seed in range(draws)]
    drawn.append((12_288,) * BATCH)
    for model, gpu, gbps, sizes in product(models, gpus, GRID_GBPS, drawn):
        middle = int(median(sizes))
        yield Cell(
            part="batch",
            model=model,
            gpu=gpu,
            tokens=middle,
            suffix=SUFFIX,
            gbps=gbps,
            lengths=sizes,
        )


def cells_of_parts(parts: Sequence[str] | None, *, full: bool = False) -> list[Cell]:
    """Return the cells of some parts of the protocol; None for all.

    Raises:
        ConfigError: There is no such part.
    """
    for part in parts or ():
        if part not in PARTS:
            raise ConfigError(f"there is no part {part!r}", f"Use {', '.join(PARTS)}")
    return [cell for cell in paper_cells(full) if parts is None or cell.part in parts]


def measure_restores(
    cells: Sequence[Cell], *, chosen: Sequence[str] | None = None, tell: Tell | None = None
) -> list[Row]:
    """Run every policy in every cell.

    Args:
        cells: The cells.
        chosen: Names of policies; None for all.
        tell: Called with (done, all, the work at hand).

    Raises:
        ConfigError: A policy is compared in none of the cells.
    """
    known = dict.fromkeys(name for cell in cells for name in policies(cell))
    for name in chosen or ():
        if name not in known:
            raise ConfigError(f"there is no policy {name!r} here", f"Use {', '.join(known)}")
    todo = [(c, n) for c in cells for n in policies(c) if chosen is None or n in chosen]
    rows = []
    for done, (cell, name) in enumerate(todo):
        if tell is not None:
            tell(done, len(todo), f"{cell.model}, {cell.tokens:,} tokens, {name}")
        rows.append(_row(cell, name, play(cell, name)))
    return rows


def _row(cell: Cell, name: str, done: Outcome) -> Row:
    least, ttft_s = bounds(cell), sum(done.ttft_s) / len(done.ttft_s)
    return Row(
        model=cell.model,
        gpu=cell.gpu,
        tokens=cell.tokens,
        suffix=cell.suffix,
        gbps=cell.gbps,
        compute_share=cell.compute_share,
        batch=cell.batch,
        policy=name,
        ttft_s=ttft_s,
        bound_s=least.mean_s,
        bound_ratio=ttft_s / least.mean_s,
        link_bytes=done.link_bytes,
        part=cell.part,
        lengths=cell.lengths,
        stages=cell.stages,
        codec="/".join(cell.codecs),
        makespan_s=max(done.ttft_s),
        makespan_bound_s=least.makespan_s,
        bound_computed=least.computed,
        computed=done.computed,
        boundary_bytes=done.boundary_bytes,
        compute_busy=done.compute_busy,
        link_busy=done.link_busy,
        planner_share=done.planner_s / max(done.ttft_s),
    )
