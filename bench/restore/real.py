"""The protocol on torch: real tensors over a real link, on this processor or on CUDA."""

from __future__ import annotations

import contextlib
import platform
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from bench.restore.baselines import RESTORE_POLICIES, make_restore_policy
from bench.restore.grid import GRID_GBPS, GRID_MODELS, GRID_TOKENS
from bench.restore.model import DECODERS
from bench.restore.modelled import Timed, bounds_of, outcome
from bench.restore.protocol import BUSY, CAKE_GBPS, OTHER_SUFFIXES, SUFFIX
from bench.restore.row import Bounds, Cell, Label, Outcome
from bench.restore.torch_engine import Prompt, TorchEngine
from flowkv.core.errors import ConfigError
from flowkv.policy.restore import Span
from flowkv.policy.restore.costs import Measured

_GIGABIT = 1e9 / 8  # bytes
_SMALL_TOKENS, _SMALL_SUFFIX = 2048, 128
CODECS: tuple[tuple[str, ...], ...] = (("kv8",), ("kv4c",), ("raw", "kv8", "kv4c"))
_SHARES = (0.25, 0.5, 1.0, 2.0)
"""What loading takes, of computing: links of a processor's rows are as fast as that makes them."""


class _Real:
    """What both devices have in common.

    One model is kept at a time, so cells that share one should follow each other.
    """

    label: Label = "measured"

    def __init__(self, repetitions: int) -> None:
        self.repetitions = repetitions
        self._made: tuple[tuple[object, ...], TorchEngine] | None = None
        self._costs: dict[Cell, Measured] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def policies(self, cell: Cell) -> Sequence[str]:
        return list(RESTORE_POLICIES)

    def close(self) -> None:
        if self._made is not None:
            self._made[1].close()
            self._made = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def bounds(self, cell: Cell) -> Bounds:
        """By what things took at their fastest, just before."""
        return bounds_of(self._engine(cell).requests(), self._calibrated(cell))

    def run(self, cell: Cell, policy: str) -> Outcome:
        engine, costs = self._engine(cell), Measured(self._calibrated(cell))
        timed = Timed(make_restore_policy(policy))
        rate, share = _rate(cell), cell.compute_share
        requests = engine.requests()
        with self._alone():
            found = engine.restore(timed, costs, bytes_per_s=rate, share=share)
        return outcome(
            found,
            requests,
            timed,
            error=max(engine.error(request.number) for request in requests),
            same_token=all(engine.same_tokens(request.number) for request in requests),
        )

    def _calibrated(self, cell: Cell) -> Measured:
        if cell not in self._costs:
            engine = self._engine(cell)
            with self._alone():
                self._costs[cell] = engine.calibrated(
                    bytes_per_s=_rate(cell), share=cell.compute_share
                )
        return self._costs[cell]

    def _engine(self, cell: Cell) -> TorchEngine:
        key = (cell.model, cell.tokens, cell.suffix, cell.link == "disk", cell.codecs)
        if self._made is None or self._made[0] != key:
            if self._made is not None:
                self._made[1].close()
                self._made = None  # before the next one takes its room
            self._made = (key, self._make(cell))
        return self._made[1]

    def _make(self, cell: Cell) -> TorchEngine:
        folder = None
        if cell.link == "disk":
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="flowkv-restore-")
            folder = Path(self._folder.name)
        device, dtype = self._place()
        prompts = [Prompt(cell.tokens, cell.suffix)]
        shape, codecs = DECODERS[cell.model], cell.codecs
        return TorchEngine(shape, prompts, device, dtype, folder=folder, codecs=codecs)

    def _place(self) -> tuple[str, torch.dtype]:
        return "cpu", torch.float32

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing but the restore, as far as it is up to us."""
        yield


class Processor(_Real):
    """Small models on this processor (`Engine`).

    Args:
        full: More links, a part of the computing, a file, and five repetitions.
    """

    name = "cpu"

    def __init__(self, *, full: bool = False) -> None:
        super().__init__(5 if full else 3)
        self._full = full
        self._known: list[Cell] = []

    def cells(self) -> Sequence[Cell]:
        """Links are as fast as makes the better of two pointers interesting."""
        if not self._known:
            for model in ("small", "wide"):
                self._known += self._cells_of(model)
        return self._known

    def _cells_of(self, model: str) -> list[Cell]:
        cell = Cell(
            part="small",
            model=model,
            gpu=platform.machine(),
            tokens=_SMALL_TOKENS,
            suffix=_SMALL_SUFFIX,
            gbps=0.0,
            link="memory",
        )
        engine, costs = self._engine(cell), self._calibrated(cell)
        (request,) = engine.requests()
        all_s = costs.compute_s(request, request.layers, Span(0, request.tokens))
        n_bytes = request.layers * request.tokens * request.sources[0].cell_bytes

        def at(share: float, **changed: object) -> Cell:
            gbps = float(f"{n_bytes / (share * all_s) / _GIGABIT:.2g}")
            told = {"gbps": gbps, "link": "limited", **changed}
            return msgspec.structs.replace(cell, **told)

        cells = [at(share) for share in (_SHARES if self._full else _SHARES[::2])]
        if self._full:
            cells += [at(1.0, compute_share=share) for share in BUSY]
            cells += [cell, at(1.0, part="precision", codecs=("raw", "kv8"))]
            cells.append(msgspec.structs.replace(cell, part="disk", link="disk"))
        return cells

    def _make(self, cell: Cell) -> TorchEngine:
        with self._alone():
            return super()._make(cell)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread computes, so that the link's has a core of its own where there are two."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class Cuda(_Real):
    """Models of the protocol on one GPU (`Engine`).

    Args:
        full: All of the protocol; else the links of the paper and an unthrottled one, on one model.

    Raises:
        ConfigError: If torch sees no CUDA device.
    """

    name = "cuda"

    def __init__(self, *, full: bool = False) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "torch sees no CUDA device", "Use --engine virtual, emulated or cpu here"
            )
        super().__init__(5)
        self._full, self._gpu = full, torch.cuda.get_device_name()

    def cells(self) -> Sequence[Cell]:
        return [
            cell
            for model in (GRID_MODELS if self._full else GRID_MODELS[:1])
            for tokens in GRID_TOKENS
            for cell in cuda_cells(model, self._gpu, tokens, full=self._full)
        ]

    def _place(self) -> tuple[str, torch.dtype]:
        return "cuda", torch.bfloat16

    def _make(self, cell: Cell) -> TorchEngine:
        torch.cuda.empty_cache()
        return super()._make(cell)


def cuda_cells(model: str, gpu: str, tokens: int, *, full: bool) -> list[Cell]:
    """The cells of one length; those that need the same model and prompt follow each other."""
    cell = Cell(part="paper", model=model, gpu=gpu, tokens=tokens, suffix=SUFFIX, gbps=0.0)

    def at(gbps: float, **changed: object) -> Cell:
        return msgspec.structs.replace(cell, gbps=gbps, **changed)

    cells = [at(gbps) for gbps in GRID_GBPS]
    cells.append(at(0.0, part="pcie", link="pcie"))
    if full:
        cells += [at(gbps, part="links") for gbps in CAKE_GBPS]
        rates = (*GRID_GBPS, CAKE_GBPS[2])
        cells += [at(gbps, part="busy", compute_share=s) for s in BUSY for gbps in rates]
        cells += [
            at(gbps, part="suffix", suffix=suffix)
            for suffix in OTHER_SUFFIXES
            for gbps in GRID_GBPS
        ]
        for codecs in CODECS:
            cells += [at(gbps, part="precision", codecs=codecs) for gbps in GRID_GBPS]
        cells.append(at(0.0, part="disk", link="disk"))
    return cells


def _rate(cell: Cell) -> float | None:
    """Bytes per second that the link is limited to."""
    return cell.gbps * _GIGABIT if cell.gbps else None
