"""The protocol: which cells there are, and every policy in each of them, in turns.

Source: the papers that it compares (CacheFlow, arXiv 2604.25080; Cake, arXiv 2410.03065) restore at
10, 40 and 80 Gbps, and at 7 to 100. A Gbps is 1e9 bits per second. The suffix is part of the time
to the first token, all policies restore the same pages over the same link, and nothing is resident
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median
from typing import Protocol

from bench.restore.grid import GRID_GBPS, GRID_GPUS, GRID_MODELS, GRID_TOKENS, lengths
from bench.restore.row import Bounds, Cell, Label, Outcome, Row
from bench.restore.table import known_median
from flowkv.core.errors import ConfigError

Tell = Callable[[int, int, str], None]

PARTS = {
    "paper": "Links of 10, 40 and 80 Gbps, a suffix of 512 tokens",
    "suffix": "Shorter and longer suffixes",
    "busy": "Restores get a part of the computing only",
    "links": "Links of 7 to 100 Gbps",
    "pcie": "An unthrottled link",
    "disk": "A file",
    "batch": "Eight requests at once",
    "stages": "Layers over several devices",
    "precision": "Pages in fewer bits, or in several at choice",
    "small": "Small models that really run",
}
"""Parts of the protocol, by name."""

DENSE, _, EXPERTS = GRID_MODELS
CAKE_GBPS = (7.0, 25.0, 32.0, 56.0, 100.0)
PCIE_GBPS = 440.0
"""What copies reach over PCIe 5 x16: 55 GB/s (`sim.hardware`)."""
SUFFIX, OTHER_SUFFIXES = 512, (64, 2048)
BUSY = (0.125, 0.5)
STAGES = (2, 4)
CODECS: tuple[tuple[str, ...], ...] = (("kv8",), ("kv4",), ("raw", "kv8", "kv4"))
BATCH = 8

EMULATED = (
    (DENSE, "H100", 10.0, 30720, 512),
    (DENSE, "H100", 40.0, 16384, 512),
    (DENSE, "H100", 80.0, 30720, 1024),
    (EXPERTS, "H100", 40.0, 30720, 512),
    (DENSE, "L40S", 40.0, 16384, 512),
)
"""The five shapes that are played in real time: model, GPU, Gbps, tokens, suffix."""


class Engine(Protocol):
    """What plays the devices.

    Attributes:
        name: For `--engine`.
        label: How its times come about.
        repetitions: How often each policy is run in each cell; 1 where runs are equal.
    """

    name: str
    label: Label
    repetitions: int

    def cells(self) -> Sequence[Cell]:
        """The situations that it can play."""
        ...

    def policies(self, cell: Cell) -> Sequence[str]:
        """Names of the policies that are compared there."""
        ...

    def bounds(self, cell: Cell) -> Bounds:
        """What nobody can beat there."""
        ...

    def run(self, cell: Cell, policy: str) -> Outcome:
        """One policy, once."""
        ...

    def close(self) -> None:
        """Gives back what it holds; it is not used any more."""
        ...


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
    cells += _cells("pcie", models, gpus, (PCIE_GBPS,), link="pcie")
    cells += _batches(models, gpus, draws=4 if full else 2)
    for stages in (1, *STAGES):
        cells += _cells("stages", GRID_MODELS, GRID_GPUS, GRID_GBPS, suffix=0, stages=stages)
    for codecs in CODECS:
        cells += _cells("precision", models, gpus, GRID_GBPS, codecs=codecs)
    return cells


def emulated_cells() -> list[Cell]:
    """The cells that are played in real time."""
    return [
        Cell(part="paper", model=model, gpu=gpu, tokens=tokens, suffix=suffix, gbps=gbps)
        for model, gpu, gbps, tokens, suffix in EMULATED
    ]


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


def cells_of_parts(engine: Engine, parts: Sequence[str] | None) -> list[Cell]:
    """The cells of an engine that belong to some parts of the protocol; None for all.

    Raises:
        ConfigError: If the engine plays no such part.
    """
    cells = list(engine.cells())
    if parts is None:
        return cells
    known = dict.fromkeys(cell.part for cell in cells)
    unknown = [part for part in parts if part not in known]
    if unknown:
        raise ConfigError(
            f"engine {engine.name} has no part {unknown[0]!r}", f"Use {', '.join(known)}"
        )
    return [cell for cell in cells if cell.part in parts]


def measure_restores(
    engine: Engine,
    *,
    policies: Sequence[str] | None = None,
    cells: Sequence[Cell] | None = None,
    tell: Tell | None = None,
) -> list[Row]:
    """Every policy in every cell of an engine.

    Policies run in turns, and each turn begins with another one, so that what else happens on the
    machine meets all of them alike.

    Args:
        engine: What plays the devices.
        policies: Names; None for all that the engine compares.
        cells: Some of the engine's cells; None for all.
        tell: Called with (done, all, what is going on).

    Raises:
        ConfigError: If a policy is not compared anywhere.
    """
    given = engine.cells() if cells is None else cells
    todo = [(cell, _chosen(engine, cell, policies)) for cell in given]
    if policies is not None:
        unknown = set(policies) - {name for _, names in todo for name in names}
        if unknown:
            known = ", ".join(dict.fromkeys(n for c, _ in todo for n in engine.policies(c)))
            raise ConfigError(f"there is no policy {min(unknown)!r} here", f"Use {known}")
    total = engine.repetitions * sum(len(names) for _, names in todo)
    done, rows = 0, []
    for cell, names in todo:
        outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
        for turn in range(engine.repetitions):
            first = turn % max(1, len(names))
            for name in (*names[first:], *names[:first]):
                if tell is not None:
                    tell(
                        done, total, f"{engine.name}: {cell.model}, {cell.tokens:,} tokens, {name}"
                    )
                outcomes[name].append(engine.run(cell, name))
                done += 1
        bounds = engine.bounds(cell)
        rows += [_row(engine, cell, name, bounds, outcomes[name]) for name in names]
    return rows


def _chosen(engine: Engine, cell: Cell, policies: Sequence[str] | None) -> list[str]:
    return [n for n in engine.policies(cell) if policies is None or n in policies]


def _row(engine: Engine, cell: Cell, name: str, bounds: Bounds, runs: Sequence[Outcome]) -> Row:
    means = [sum(run.ttft_s) / len(run.ttft_s) for run in runs]
    ttft_s = median(means)
    errors = [run.error for run in runs if run.error is not None]
    tokens = [run.same_token for run in runs if run.same_token is not None]
    return Row(
        engine=engine.name,
        model=cell.model,
        gpu=cell.gpu,
        tokens=cell.tokens,
        suffix=cell.suffix,
        gbps=cell.gbps,
        compute_share=cell.compute_share,
        batch=cell.batch,
        policy=name,
        ttft_s=ttft_s,
        bound_s=bounds.mean_s,
        bound_ratio=ttft_s / bounds.mean_s,
        link_bytes=median(run.link_bytes for run in runs),
        label=engine.label,
        part=cell.part,
        lengths=cell.lengths,
        stages=cell.stages,
        codec="/".join(cell.codecs),
        link=cell.link,
        repetitions=len(runs),
        ttft_min_s=min(means),
        ttft_max_s=max(means),
        makespan_s=median(max(run.ttft_s) for run in runs),
        makespan_bound_s=bounds.makespan_s,
        bound_computed=bounds.computed,
        worst_s=max(max(run.ttft_s) for run in runs),
        computed=median(run.computed for run in runs),
        boundary_bytes=median(run.boundary_bytes for run in runs),
        compute_busy=known_median(run.compute_busy for run in runs),
        link_busy=known_median(run.link_busy for run in runs),
        planner_share=median(run.planner_s / max(run.ttft_s) for run in runs),
        error=max(errors, default=None),
        same_token=all(tokens) if tokens else None,
    )
