"""Which rows of a step begin with the same pages, so that attention reads those once for all."""

from __future__ import annotations

import numpy as np
import torch

from flowkv import kernels
from flowkv.kernels.cascade_plan import Cascade, shared_prefixes
from flowkv.kernels.operands import Ragged
from flowkv.runtime.advance import Advance
from flowkv.runtime.planner import Planner

LEAST_TOKENS = 16384
"""Reads of tokens that a group of rows must spare.

Measured on a CPU, in CPU time of whole decoding steps of the fixture model: nothing is gained at 15
thousand (16 rows, 1024 shared tokens: 0.98 times), 1.17 times at 45 thousand (16 rows, 3000), 1.20
times at 65 thousand (64 rows, 1024). Attention alone gains 1.1 to 2.6 times beyond the bound, in
shapes of 2 to 100 rows, 512 to 8192 shared tokens and heads of 64 and 128; far below, it loses.
"""


def shared(planner: Planner, step: Advance, group: int, batch: Ragged) -> Cascade | None:
    """What neighbouring rows share, where reading it once pays; None where it does not.

    Args:
        planner: Holds the tables.
        step: The rows.
        group: The layer group.
        batch: What its kernels are told of the rows.
    """
    size = planner.page_size
    if len(step.rows) < 2 or planner.geometry.groups[group].kind != "full":
        return None
    most = int(step.before.max()) // size
    if (len(step.rows) - 1) * most * size < LEAST_TOKENS:
        return None
    with planner.guard:
        table = planner.tables.pages[group]
        pages = table[step.rows, :most]
    if not (pages[1:, 0] == pages[:-1, 0]).any():  # the usual case, told by a glance
        return None
    groups = shared_prefixes(pages.astype(np.int64), step.before // size, size, LEAST_TOKENS)
    if not groups:
        return None
    lines, rows, lengths, starts = (
        torch.from_numpy(array) for array in (table, step.rows, step.after, step.starts)
    )
    host = Ragged(lines, rows, lengths, starts, batch.most_new, batch.most_length)
    plan: Cascade = kernels.plan_cascade(batch, size, host=host, groups=groups)
    return plan
