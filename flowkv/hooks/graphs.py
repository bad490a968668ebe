"""Captured steps: one forward of a model, recorded once and replayed without Python.

A decode step does the same work each time: one token a row, the same kernels in the same order.
Only a few integers change: token ids, positions, lengths, and the pages of each row. Here they have
buffers of fixed addresses, so that a recording of the step (a CUDA graph) can be replayed after
new ones were written. A few new tokens of a single row, such as a short prompt or the next turn of
a chat, are such a step as well, padded by tokens of no row.
"""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from flowkv.cache.block_table import Advance, Planner
from flowkv.cache.kv import KV
from flowkv.cache.step import CURRENT, Step, current_step
from flowkv.core.config import Config
from flowkv.kernels.operands import GPUS, Ragged
from flowkv.naming.computation import switches
from flowkv.naming.identity import modes

EAGER_STEPS = 2
"""Steps of a shape that run eagerly before one is captured."""
EAGER_AGAIN = 64
"""Further ones before a graph that made room for others is captured anew, at the time of a few."""
MOST_GRAPHS = 16
"""Most graphs of one model."""
SHORT = 32, 64, 128, 256, 512
"""New tokens of a single row in captured steps; a step has the least that hold its tokens. The
forward of a longer prompt takes the device as long as the host needs to launch it."""
_FAR = 1e4
"""Number far from all that attention gives."""
_STAGES = 4
"""Pinned buffers, so that a copy under way is not overwritten by the next step."""
Call = Callable[[Step], torch.Tensor]
"""Runs a model over a step with `tokens` `[1, R]` and `positions` `[1, R]`; logits `[1, R, V]`."""


_CAPTURING = threading.Lock()  # a capture takes in all that is queued on its stream


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device's captures; torch's own belongs to the first one's device.

    torch returns a stream again after 32 others of its priority. No stream for copies has this one,
    so a capture never takes in a copy of another thread.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage by itself inside the block."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CudaRecorder:
    """Recorder of the device's work as a CUDA graph.

    Args:
        device: The device.

    Attributes:
        n_bytes: Device memory that the recording holds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._graph, self.n_bytes = device, torch.cuda.CUDAGraph(), 0

    def record(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record the work of `run`; return its result, which each replay overwrites.

        `run` runs once before: libraries and kernels are loaded then. Garbage is not collected
        meanwhile: finalizers of others wait for the device, or unregister memory, which ends a
        capture.
        """
        side, own = _capture_stream(self._device), torch.cuda.current_stream(self._device)
        # torch leaves the thread on the capture's stream if the capture fails: `own` is set again.
        with _CAPTURING, _no_collection(), torch.cuda.device(self._device), torch.cuda.stream(own):
            run()
            with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
                before = torch.cuda.memory_reserved()  # unused memory was given back by now
                out = run()
            self.n_bytes = max(torch.cuda.memory_reserved() - before, 0)
        return out

    def replay(self) -> None:
        """Replay the recorded work on the current stream."""
        with torch.cuda.device(self._device):
            self._graph.replay()


def recorder_of(device: torch.device) -> CudaRecorder | None:
    """Return a recorder of steps on a device; None if the device has none."""
    return CudaRecorder(device) if device.type in GPUS else None


class StepShape(NamedTuple):
    """Shape of a captured step.

    Attributes:
        rows: Rows R; rows beyond those of the step have no tokens.
        new: New tokens of each row; fewer where there is one row.
        pages: Pages of the longest row that it serves.
    """

    rows: int
    new: int
    pages: int

    @property
    def tokens(self) -> int:
        """Return the tokens of a step, those of no row counted."""
        return self.rows * self.new


@cache
def shape_of(rows: int, new: int, pages: int, most_rows: int) -> StepShape:
    """Return the smallest captured shape that serves a step.

    Args:
        rows: Rows of the step.
        new: Most new tokens of a row.
        pages: Pages of its longest row.
        most_rows: Most rows of a step.
    """
    step = 16 if rows > 32 else 8
    wide = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // step) * step
    new = next(most for most in (1, *SHORT, new) if most >= new)
    return StepShape(max(rows, min(wide, most_rows)), new, 1 << (pages - 1).bit_length())


class StaticStep(Step):
    """Step with rows in buffers of fixed addresses.

    Layers use it like any step; their kernel launches can be recorded.

    Attributes:
        tokens: int64 `[1, N]`.
        places: int64 `[1, N]`: positions of the tokens.
        last: int64 `[R]`: the last token of each row.
        filler: float32 `[]`: what attention gives to tokens of no row.

    Args:
        planner: The planner of the rows.
        shape: R rows of so many new tokens and pages.
        device: Device of the model and of all pages.
    """

    __slots__ = tuple(
        "_beyond _buffer _held _real _stages _table _turn filler last places shape".split()
    )

    def __init__(self, planner: Planner, shape: StepShape, device: torch.device) -> None:
        groups, rows, count = len(planner.geometry.groups), shape.rows, shape.rows * shape.new
        self.shape = shape
        n_numbers = groups * rows + rows + 1
        pinned = device.type in GPUS
        self._buffer = torch.zeros(
            2 * count + rows + (n_numbers + 1) // 2, dtype=torch.int64, device=device
        )
        self._table = torch.full((groups, rows, shape.pages), -1, dtype=torch.int32, device=device)
        self._stages = [
            (
                torch.zeros_like(self._buffer, device="cpu", pin_memory=pinned),
                torch.full_like(self._table, -1, device="cpu", pin_memory=pinned),
                torch.cuda.Event() if pinned else None,  # type: ignore[no-untyped-call]
            )
            for _ in range(_STAGES if pinned else 1)
        ]
        self._turn, self._held = 0, (-1, list[int]())
        numbers = self._buffer[2 * count + rows :].view(torch.int32)
        lines = torch.arange(rows, dtype=torch.int32, device=device)
        starts = numbers[groups * rows : n_numbers]
        length = shape.pages * planner.page_size
        self.seqs, self.counts = [], np.full(rows, shape.new)
        self.apart = self.audits = self.overflows = False
        self.awaits = None
        self.tokens = self._buffer[:count].view(1, count)
        self.places = self._buffer[count : 2 * count].view(1, count)
        self.last = self._buffer[2 * count :][:rows]
        self.filler = torch.zeros((), device=device)
        self._beyond = torch.zeros(count, 1, 1, dtype=torch.bool, device=device)
        self._real = count
        self.planner, self._open, self._token = planner, True, None
        self.advance = Advance(
            rows=np.arange(rows, dtype=np.int32),
            before=np.zeros(rows, np.int64),
            after=np.full(rows, shape.new, np.int32),
            starts=np.arange(rows + 1, dtype=np.int32) * np.int32(shape.new),
            ends=np.full((groups, rows), shape.new, np.int32),
            grown=[],
            most_new=shape.new,
            most_length=length,
            flags=0,
        )
        self._batches = {
            g: Ragged(
                self._table[g],
                lines,
                numbers[g * rows : (g + 1) * rows],
                starts,
                shape.new,
                length,
                int(shape.new > 1),
            )
            for g in range(groups)
        }
        self._decodes, self._scans = dict.fromkeys(range(groups)), {}
        self._writers = dict.fromkeys(range(groups))
        self._shared = dict.fromkeys(range(groups))
        self._coming, self._noted, self._singles, self._touched = [], [], {}, set()
        self._watch, self._waited_s = None, 0.0

    @property
    def positions(self) -> torch.Tensor:
        """Return the position of each new token, int64 `[1, N]`, where recordings read it."""
        return self.places

    @property
    def begins(self) -> bool:
        """Return False: its tokens attend to pages."""
        return False

    def fill(self, step: Step, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Write the tokens, positions, lengths and pages of a step into the buffers.

        Args:
            step: The step.
            ids: Its tokens, of n elements.
            positions: Their positions, likewise.
        """
        advance, tables, (rows, new, pages) = step.advance, self.planner.tables, self.shape
        n, groups, count = len(advance.rows), len(advance.ends), rows * new
        buffer, table, event = self._stages[self._turn]
        self._turn = (self._turn + 1) % len(self._stages)
        if event is not None:
            event.synchronize()  # waits for the copy out of this buffer, several steps ago
        numbers = buffer[2 * count + rows :].view(torch.int32).numpy()
        buffer.numpy()[2 * count :][:n] = advance.starts[1:] - 1
        lengths, starts = numbers[: groups * rows].reshape(groups, rows), numbers[groups * rows :]
        lengths[:, :n], lengths[:, n:] = advance.ends, 0
        starts[: n + 1], starts[n + 1 : rows + 1] = advance.starts, n
        given = (0, ids), (count, positions)
        for first, each in given:  # tensors on the host go in one copy
            if each.device.type == "cpu":
                buffer[first : first + each.numel()] = each.view(-1)
        self._buffer.copy_(buffer, non_blocking=True)
        for first, each in given:
            if each.device.type != "cpu":
                self._buffer[first : first + each.numel()].copy_(each.view(-1))
        if ids.numel() != self._real:
            self._real = ids.numel()
            self._beyond[: self._real], self._beyond[self._real :] = False, True
        with self.planner.guard:
            held = tables.version, advance.rows.tolist()
            if held != self._held:
                lines = table.numpy()
                lines[:] = -1
                for g, page_of in enumerate(tables.pages):
                    part = page_of[advance.rows, :pages]
                    lines[g, :n, : part.shape[1]] = part
                self._table.copy_(table, non_blocking=True)
                self._held = held
        if event is not None:  # the model may be on another device than the thread's current one
            event.record(torch.cuda.current_stream(self._buffer.device))

    def read(self, layer: int, q: torch.Tensor, **how: Any) -> torch.Tensor:
        """Attend like any step; tokens of no row, which kernels leave unwritten, get `filler`."""
        out = super().read(layer, q, **how)
        return (
            torch.where(self._beyond, self.filler.to(out), out) if self._beyond.numel() > 1 else out
        )

    def __exit__(self, *_: object) -> None:
        """Leave the context, without a commit."""
        if self._token is not None:
            CURRENT.reset(self._token)
            self._token = None

    def commit(self) -> None:
        """Do nothing: the step that it serves is committed instead."""

    def rollback(self) -> None:
        """Do nothing: the step that it serves is rolled back instead."""

    def __del__(self) -> None:
        """Do nothing: there are no pages to roll back."""


class _Graph(NamedTuple):
    """Recorded step.

    Attributes:
        padded: Its tokens were compared beside such of no row.
    """

    padded: bool
    step: StaticStep
    recorder: CudaRecorder
    logits: torch.Tensor


class GraphedForward:
    """Steps of one model, captured and replayed. Thread-safe.

    Args:
        call: Runs the model over a step.
        state: Returns the state of the model, an object that is the same as long as no part of it
            was replaced, moved, set or hooked; None between two states. With `False`, what the
            caller compared when the step began may be left out.
        config: Limits the memory of graphs.
        report: Receives counts of "captured" and "replayed" steps, "bytes" of graphs, and the
            reasons why steps stay "eager", or only "prompts".
        most_new: Most new tokens of a single row in a captured step, whose last logits are wanted.

    Attributes:
        most_new: Likewise; 1 once such a step could not be captured.
    """

    def __init__(
        self,
        call: Call,
        state: Callable[[bool], object],
        config: Config,
        report: dict[str, Any],
        most_new: int = 1,
    ) -> None:
        self._call, self._state, self._config, self._report = call, state, config, report
        self.most_new = most_new
        self._known: object = None
        self._graphs: OrderedDict[StepShape, _Graph] = OrderedDict()
        self._seen: dict[StepShape, int] = {}
        self._lock = threading.Lock()
        self._planner: Planner | None = None
        self._stream: torch.cuda.Stream | None = None

    def captured(self, rows: int, tokens: int) -> bool:
        """Return whether a graph serves decode steps of so many rows of at most so many tokens."""
        planner = self._planner
        if planner is None or not self._graphs:
            return False
        pages = -(-tokens // planner.page_size)
        with self._lock:
            return self._serving(shape_of(rows, 1, pages, planner.tables.max_rows)) is not None

    def replay(self, step: Step, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the logits `[n, V]` of the rows' last tokens by a graph; None if none serves them.

        Args:
            step: The step.
            ids: The tokens, of N elements.
            positions: Their positions, likewise.
        """
        if not self._graphs or not self._serves(step):
            return None
        with self._lock, torch.inference_mode(False), torch.no_grad():
            shape = self._shape(step)
            if shape not in self._graphs:
                longer = self._serving(shape)
                if longer is None:
                    return None
                shape = longer
            graph = self._graphs[shape]
            if not graph.padded and ids.numel() < shape.tokens:
                return None
            self._graphs.move_to_end(shape)
            try:
                self._follow_stream(graph.logits.device)
                graph.step.fill(step, ids, positions)
                graph.recorder.replay()
                logits = _last(graph.logits, step, shape).clone()
            except Exception as error:  # an error of the device or driver: the model runs eagerly
                self._refuse(f"a step cannot be replayed: {error}", shape)
                return None
            # Checked while the device computes; a step that runs again writes the same places.
            if self._state(False) is not self._known:
                self._forget()
                return None
            step.replayed()
            self._report["replayed"] += 1
            return logits

    def record_step(
        self, step: Step, ids: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """Count a step that ran eagerly; capture its shape when it comes again.

        Args:
            step: The step, still open.
            ids: The tokens, of N elements.
            positions: Their positions, likewise.
            logits: The model's logits of the rows' last tokens, `[n, V]`.
        """
        if not self._serves(step):
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if (state := self._state(True)) is not self._known:
                self._forget()
                self._known = state
            shape = self._shape(step)
            seen = self._seen[shape] = self._seen.get(shape, 0) + 1
            graph, padded = self._graphs.get(shape), ids.numel() < shape.tokens
            serves = graph is not None and (graph.padded or not padded)
            if state is not None and seen > EAGER_STEPS and not serves:
                self._follow_stream(logits.device)
                step.rerun()
                try:
                    graph = self._capture(step, shape, ids, positions, logits)
                except Exception as error:  # any error of the model: its steps stay eager
                    self._refuse(f"a step cannot be captured: {error}", shape)
                else:
                    if graph is not None:
                        self._keep(shape, graph)

    def _serves(self, step: Step) -> bool:
        """Return whether graphs can serve a step under this thread's modes and autocast."""
        if self._report["eager"] or not step.repeats(self.most_new):
            return False
        modal = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
        if modal and modes(own=False):
            return False
        return not (torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"))

    def _follow_stream(self, device: torch.device) -> None:
        """Let the device wait for steps that another stream replays from the same buffers."""
        if device.type in GPUS:
            current = torch.cuda.current_stream(device)
            if self._stream is not None and self._stream != current:
                current.wait_stream(self._stream)
            self._stream = current

    def _shape(self, step: Step) -> StepShape:
        planner = step.planner
        if planner is not self._planner:
            self._forget()
            self._planner = planner
        pages = -(-step.advance.most_length // planner.page_size)
        new = int(step.advance.most_new)
        return shape_of(len(step.seqs), new, pages, planner.tables.max_rows)

    def _serving(self, shape: StepShape) -> StepShape | None:
        """Return the shape of the graph that serves a step: its own, else the next longer one.

        A repeated prompt of 2048 tokens needs fewer pages than the tokens decoded behind it.
        """
        if shape in self._graphs:
            return shape
        longer = (s for s in self._graphs if s[:2] == shape[:2] and s.pages > shape.pages)
        return min(longer, default=None)

    def _capture(
        self,
        step: Step,
        shape: StepShape,
        ids: torch.Tensor,
        positions: torch.Tensor,
        logits: torch.Tensor,
    ) -> _Graph | None:
        device, recorder = logits.device, recorder_of(logits.device)
        if recorder is None or {*step.planner.tables.devices} != {device}:
            reason = f"its layers lie on more than one device, or nothing captures on {device}"
            self._refuse(reason, shape)
            return None
        static = StaticStep(step.planner, shape, logits.device)
        static.fill(step, ids, positions)
        with step.planner.guard:
            there, padded, alike = [*_written(step)], ids.numel() < shape.tokens, False
        kept = [x.clone() for x in there]
        try:
            out = recorder.record(lambda: self._call(static))
            for filler in (_FAR, 0.0) if padded else (0.0,):
                static.filler.fill_(filler)  # tokens must not depend on those of no row
                recorder.replay()
                found = _last(out, step, shape)
                both = [(found, logits), *zip(there, kept, strict=True)]
                if not (alike := found.shape == logits.shape and _close(both)):
                    break
        finally:  # pages keep what the model wrote
            for x, before in zip(there, kept, strict=True):
                x.copy_(before)
        if not alike:
            self._refuse("a captured step gives other logits than the model", shape)
            return None
        return _Graph(padded, static, recorder, out)

    def _keep(self, shape: StepShape, graph: _Graph) -> None:
        device = graph.logits.device
        total = torch.cuda.mem_get_info(device)[1] if device.type in GPUS else 1 << 40
        most_bytes = self._config.graph_bytes(total)
        self._graphs[shape] = graph
        self._report["captured"] += 1
        while self._graphs and (len(self._graphs) > MOST_GRAPHS or self._count() > most_bytes):
            dropped, _ = self._graphs.popitem(last=False)
            self._seen[dropped] = -EAGER_AGAIN
            if dropped == shape:
                reason = f"one graph takes more than the {most_bytes} bytes of graphs="
                self._refuse(reason, shape)

    def _count(self) -> int:
        n_bytes = sum(graph.recorder.n_bytes for graph in self._graphs.values())
        self._report["bytes"] = n_bytes
        return n_bytes

    def _forget(self) -> None:
        self._graphs.clear()
        self._seen.clear()
        self._report["bytes"] = 0

    def _refuse(self, reason: str, shape: StepShape) -> None:
        """Capture no more steps, or only those of one token a row."""
        if shape.new == 1:
            self._report["eager"] = reason
            self._forget()
            return
        self.most_new, self._report["prompts"] = 1, reason
        for other in [other for other in self._graphs if other.new > 1]:
            del self._graphs[other]
        self._count()


def _last(logits: torch.Tensor, step: Step, shape: StepShape) -> torch.Tensor:
    """Return the logits `[n, V]` of the rows' last tokens, where the model gave them or all."""
    if logits.shape[1] == shape.rows:
        return logits[0, : len(step.seqs)]
    stop = int(step.advance.starts[1])  # there is one row
    return logits[0, stop - 1 : stop]


def _written(step: Step) -> Iterator[torch.Tensor]:
    """Yield the keys and values in pages that a step has written.

    Those of the last layer change no logits of the step, and those of other tokens than the rows'
    last ones in the layers before may not.
    """
    advance, size, store = step.advance, step.planner.page_size, step.planner.store
    for group, table in enumerate(step.planner.tables.pages):
        for row, end, new in zip(
            advance.rows.tolist(), advance.ends[group].tolist(), step.counts.tolist(), strict=True
        ):
            for number in range((end - new) // size, -(-end // size)):
                first, count = max(end - new - number * size, 0), min(size, end - number * size)
                for side in store.views(group, int(table[row, number]), count):
                    if side.numel():
                        yield side[:, :, first:]


def _close(both: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Return whether all pairs of a tensor and the wanted one differ by rounding only."""
    alike = []
    for found, wanted in both:
        tolerance = torch.finfo(wanted.dtype).eps ** 0.5
        exact, made = wanted.detach().float(), found.detach().float()
        alike.append((made - exact).abs().max() <= tolerance * exact.abs().max())
    return bool(torch.stack(alike).all())


def graphed(model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], kv: KV) -> Own:
    """Capture the decode steps of your own model, and replay them.

    Inside `kv.step`, steps of one token a row are replayed once such a step has run a few times.
    The model must compute the same from the same tokens, positions and parameters each time: its
    side effects (printing, counting, reading values back) do not happen in a replay. Outside steps,
    and without a captured graph, the result is `model(tokens, positions)`.

    Args:
        model: `model(tokens [1, N], positions [1, N])` gives logits `[1, N, V]`; its attention is
            `flowkv.attention`.
        kv: The cache.

    Returns:
        A callable that replaces the model.

    Example:
        >>> run = flowkv.graphed(model, kv)
        >>> with kv.step([seq], [tokens]) as step:
        ...     logits = run(step.tokens, step.positions)
    """
    return Own(model, kv)


class Own:
    """User's own model with replayed decode steps; see `graphed`."""

    def __init__(self, model: Any, kv: KV) -> None:
        self._model = model
        self._graphs = GraphedForward(self._call, self._state, kv.config, kv.graphed)
        self._last: tuple[Any, ...] = ()

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens of the current step, `[1, N, V]`."""
        step = current_step()
        if step is None or torch.is_grad_enabled():
            return self._model(tokens, positions)  # type: ignore[no-any-return]
        found = self._graphs.replay(step, tokens, positions)
        if found is not None:
            return found.unsqueeze(0)
        logits: torch.Tensor = self._model(tokens, positions)
        if recorder_of(logits.device) is not None:
            self._graphs.record_step(step, tokens, positions, logits[0])
        return logits

    def _call(self, step: Step) -> torch.Tensor:
        with step:
            return self._model(step.tokens, step.positions)  # type: ignore[no-any-return]

    def _state(self, _: bool = True) -> object:
        """Return the same object while all parameters and torch's switches are as they were."""
        model = self._model
        now: tuple[Any, ...] = (RemovableHandle.next_id, switches())
        if isinstance(model, torch.nn.Module):
            now += (
                *(module.training for module in model.modules()),
                *(
                    (id(x), x.data_ptr(), x.dtype, x.shape, x.stride())
                    for x in (*model.parameters(), *model.buffers())
                ),
            )
        if now != self._last:
            self._last = now
        return self._last
