"""The rows of a step, taken apart: a row for each new token, that attends as if it were decoded.

What a token sees is computed the same way then, however many new tokens its row has.
"""

from __future__ import annotations

import numpy as np
import torch

from flowkv.kernels.operands import Ragged
from flowkv.runtime.advance import Advance

MOST = 256
"""Most of them in one call: kernels look at all rows of a batch at once."""


def singles(batch: Ragged, step: Advance) -> list[tuple[slice, Ragged]]:
    """The new tokens of a step, as batches of rows with one each.

    Args:
        batch: The rows, as kernels are told of them.
        step: The same, on the host.

    Returns:
        (which of the packed tokens, their batch), in their order.
    """
    counts, new = np.diff(step.starts), int(step.starts[-1])
    lines = np.repeat(step.rows, counts)
    lengths = np.repeat(step.after - step.starts[1:], counts) + np.arange(
        1, new + 1, dtype=np.int32
    )
    device, found = batch.table.device, []
    for first in range(0, max(new, 1), MOST):
        part = slice(first, min(first + MOST, new))
        starts = np.arange(part.stop - first + 1, dtype=np.int32)
        line, length, start = (
            torch.from_numpy(each).to(device) for each in (lines[part], lengths[part], starts)
        )
        found.append((part, Ragged(batch.table, line, length, start, 1, batch.most_length, 0)))
    return found
