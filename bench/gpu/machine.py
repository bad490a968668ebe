"""The machine and its timer: a GPU, or a dry run that takes no times."""

from __future__ import annotations

import itertools
import platform
import statistics
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import torch

Call = Callable[[], Any]


class Machine:
    """One device. Dry, it is the CPU: everything runs once, and every time is a microsecond.

    Attributes:
        dry: Whether it is the CPU, for tiny cases.
        timing: Whether anything is timed; where nothing is, calls compile what they need.
        limits: What the device can do at most, measured by `measure_limits`.
    """

    def __init__(self, dry: bool, *, warm: bool = False) -> None:
        self.dry, self.device = dry, torch.device("cpu" if dry else "cuda")
        self.timing = not (dry or warm)
        self.limits: dict[str, float] = {}

    def facts(self) -> dict[str, Any]:
        """Device and versions, for the head of a report."""
        try:
            from triton import __version__ as triton_version
        except ImportError:
            triton_version = None
        return {
            "label": "dry run" if self.dry else "measured",
            "date": date.today().isoformat(),
            "device": "none" if self.dry else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton_version,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        }

    def l2_bytes(self) -> int:
        """What must be read before data may come round again, to be read from memory each time."""
        if not self.timing:
            return 1
        return 2 * getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)

    def noise(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Fresh normal values."""
        return torch.empty(shape, dtype=dtype, device=self.device).normal_()

    def poison(self, *shapes: Sequence[int], dtype: torch.dtype) -> None:
        """Leave NaN where the allocator will put results of these shapes: unwritten ones show."""
        for shape in shapes:
            torch.full(tuple(shape), torch.nan, dtype=dtype, device=self.device)

    def timed(self, calls: Sequence[Call], rounds: int = 40) -> dict[str, float]:
        """Microseconds of one call, replayed from graphs, one after the other over other data."""
        for call in calls:
            call()
        if not self.timing:
            return {"us": 1.0, "us_p10": 1.0, "us_p90": 1.0}
        torch.cuda.synchronize()
        graphs = []
        for call in calls:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            graphs.append(graph)
        return self._events([graph.replay for graph in graphs], rounds)

    def eager(self, calls: Sequence[Call], rounds: int = 20) -> dict[str, float]:
        """The same without graphs: with what Python and the launches cost."""
        for call in calls:
            call()
        return self._events(calls, rounds) if self.timing else {"us": 1.0}

    def _events(self, calls: Sequence[Call], rounds: int) -> dict[str, float]:
        for call in [*calls] * 3:
            call()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds * len(calls) + 1)]
        events[0].record()
        for i, event in enumerate(events[1:]):
            calls[i % len(calls)]()
            event.record()
        torch.cuda.synchronize()
        us = sorted(1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events))
        ends = {"us_p10": us[len(us) // 10], "us_p90": us[len(us) * 9 // 10]}
        return {"us": statistics.median(us), **ends}

    def measure_limits(self) -> dict[str, float]:
        """Bytes a second of a read and of a copy (both ways counted), to and from pinned memory;
        bfloat16 operations a second."""
        words, side, host = (1 << 12, 64, 1 << 12) if self.dry else (1 << 29, 8192, 1 << 28)
        x = self.noise(words, dtype=torch.float32)
        y, a = torch.empty_like(x), self.noise(side, side, dtype=torch.bfloat16)
        pinned = torch.empty(host, dtype=torch.float32, pin_memory=not self.dry)
        room = torch.empty_like(pinned, device=self.device)

        def rate(amount: float, call: Call) -> float:
            return 1e6 * amount / self.timed([call], 10)["us"]

        self.limits = {
            "read_bytes_s": rate(x.nbytes, lambda: torch.sum(x)),
            "copy_bytes_s": rate(2 * x.nbytes, lambda: y.copy_(x)),
            "to_device_bytes_s": rate(room.nbytes, lambda: room.copy_(pinned, non_blocking=True)),
            "to_host_bytes_s": rate(room.nbytes, lambda: pinned.copy_(room, non_blocking=True)),
            "bfloat16_flop_s": rate(2.0 * side**3, lambda: a @ a),
        }
        return self.limits
