"""Restores on this GPU: every policy in every cell of the protocol, correctness beside the times.

The whole protocol, every model and link, is `python -m bench restore --engine cuda --full --json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from bench.gpu.machine import Machine
from bench.restore.protocol import measure_restores
from bench.restore.real import Cuda, Processor
from bench.restore.row import Cell

TINY = Cell(part="small", model="fixture", gpu="none", tokens=256, suffix=16, gbps=1.0)


def restores(machine: Machine) -> Iterator[dict[str, Any]]:
    """The links of the paper and an unthrottled one, on one model; dry, one tiny cell, once."""
    engine = Processor() if machine.dry else Cuda()
    engine.repetitions = 1 if machine.dry else engine.repetitions
    for cell in [TINY] if machine.dry else engine.cells():
        link = f"{cell.gbps:g} Gbps" if cell.gbps else cell.link
        name = f"restore {cell.tokens} tokens of {cell.model} at {link}"
        try:
            rows = measure_restores(engine, cells=[cell])
        except Exception as error:  # a cell that does not fit must not take the others along
            if machine.dry:
                raise
            yield {"case": name, "failed": f"{type(error).__name__}: {error}"[:500]}
            continue
        for row in rows:
            us = 1.0 if machine.dry else 1e6 * row.ttft_s
            yield {"case": f"{name}: {row.policy}", "us": us, **msgspec.structs.asdict(row)}
