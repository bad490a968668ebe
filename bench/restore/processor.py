"""The processor of the machine as a device: it computes, and copies, while it is asked to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bench.restore.canvas import Canvas
from bench.restore.device import Clock, Done, Ended, rest
from flowkv.policy.restore import Op, RestoreLoad

BURST_S = 0.002
"""How late the thread of a link may ask for more, and the link goes on as if it had not stopped."""


class Processor:
    """Computes on the CPU.

    Args:
        canvases: By number of the request.

    Attributes:
        ahead: See `Device`.
    """

    def __init__(self, canvases: Mapping[int, Canvas]) -> None:
        self._canvases, self.ahead = canvases, 1

    def begin(self, op: Op, clock: Clock) -> Done:
        assert not isinstance(op, RestoreLoad)
        start_s = clock()
        self._canvases[op.request].compute(op)
        return Done(Ended(start_s, clock()))


class Link:
    """What loads over a link with a limit are.

    Args:
        canvases: Where to, by number of the request.
        kept: Where from, likewise: `[L, N, 2, Hk, D]`.
        bytes_per_s: Limit of the link; None for none.
        fails: Loads that fail; what they were to bring is not written.
    """

    def __init__(
        self,
        canvases: Mapping[int, Canvas],
        kept: Mapping[int, torch.Tensor],
        bytes_per_s: float | None = None,
        fails: Callable[[RestoreLoad], bool] | None = None,
    ) -> None:
        self._canvases, self._kept = canvases, kept
        self._bytes_per_s, self._fails, self._free_s = bytes_per_s, fails, 0.0

    def copy(self, op: RestoreLoad) -> bool:
        """Copies an op's cells; whether they came."""
        ok, where = self._fails is None or not self._fails(op), slice(*op.tokens)
        if ok:
            for layer in range(*op.layers):  # tokens of a layer lie side by side: one copy each
                self._canvases[op.request].kv[layer, where] = self._kept[op.request][layer, where]
        return ok

    def slot(self, op: RestoreLoad, now_s: float) -> tuple[float, float]:
        """When the limit has a load begin and end that the link is given now."""
        if self._bytes_per_s is None:
            return now_s, now_s
        cell_bytes = self._kept[op.request][0, 0].nbytes
        late = now_s - self._free_s < BURST_S
        start_s = self._free_s if late else now_s
        seconds = op.layers.size * op.tokens.size * cell_bytes / self._bytes_per_s
        self._free_s = start_s + seconds
        return start_s, self._free_s


class Copier:
    """Loads by copies of the CPU.

    Args:
        link: What it loads over.

    Attributes:
        ahead: See `Device`.
    """

    def __init__(self, link: Link) -> None:
        self._link, self.ahead = link, 1

    def begin(self, op: Op, clock: Clock) -> Done:
        assert isinstance(op, RestoreLoad)
        start_s = clock()
        _, due_s = self._link.slot(op, start_s)  # the copy is part of the time that a load takes
        ok = self._link.copy(op)
        rest(due_s, clock)
        return Done(Ended(start_s, clock(), ok))
