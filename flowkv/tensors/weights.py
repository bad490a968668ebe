"""Streamed weights for models larger than their memory: weights are read while the model computes.

    with flowkv.attach_weights(model, "checkpoint/", budget="50%"):
        model(inputs)

Consecutive modules form units of a few MiB. A forward reads the same units in the same order every
time, a cyclic scan, for which the best policy is known: a fixed set stays, the rest passes through
a few buffers, each read ahead while others compute. A call of a module first waits for its unit.
The weights of all other units are empty tensors: use outside of forwards raises or has no elements,
but never reads other values.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from flowkv.core.config import cache_home, format_size, parse_place, parse_size
from flowkv.core.errors import CapacityError, ConfigError, StateError, StoreError
from flowkv.core.files import remove_left, renew_lock
from flowkv.core.interrupts import cover, unbroken
from flowkv.core.memory import own_memory
from flowkv.naming.fingerprint import UnnamedError, bytes_of, sums_of
from flowkv.observe.events import Bus, WeightsRead
from flowkv.tensors.checkpoint import Checkpoint, StoredTensor, write
from flowkv.tiers.io.engine import ALIGNMENT

Devices = str | torch.device | Mapping[str, str | torch.device] | None
MOST_UNIT_BYTES = 4 << 20
"""Most bytes of a unit, which is also at most a 128th of all weights."""
_SMALL_BYTES = 64 << 10
_SMALL_SHARE = 16
"""Weights of up to 64 KiB stay, if all of them take no more than a sixteenth of the budget."""
_SAMPLE = 64
"""Bytes of each resident weight that are compared before a forward."""
_LEFT = re.compile(r"\.?weights-\d+-\d{18,20}\.safetensors(\.[0-9a-f]{16}\.part)?")
_GOLDEN = 0.6180339887498949  # its multiples are spread evenly, wherever they end
_HANDED_UP = (nn.ParameterList, nn.ParameterDict)
"""Modules without a forward, with parameters that are read with the module above."""
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch that use weights of the modules below without calling them."""


def attach_weights(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    budget: int | str = "50%",
    device: Devices = None,
    host: int | str = 0,
    disk: str | None = None,
    bus: Bus | None = None,
) -> StreamedWeights:
    """Stream a model's weights from files while it computes, within a memory budget.

    Outputs are those of the plain model, bit for bit. For inference: parameters have no gradients
    while attached. One forward at a time computes; others wait.

    Args:
        model: Any module on the CPU. With `checkpoint`, parameters may be on the meta device: then
            nothing is loaded first. Buffers that the checkpoint does not have must hold their
            values.
        checkpoint: Safetensors file, or directory of such files, read in place. Without one, the
            model's own weights are written to `disk`, to a file that vanishes with the process.
        budget: Memory for weights on the device of the model, in bytes ("700MiB") or as a share of
            all weights ("50%").
        device: Device of the model: "cuda:0", or by module, as {"": "cuda:0", "layers.1":
            "cuda:1"}, where the longest matching name counts. Buffers move there; inputs are moved
            by the caller. Default: the device of its weights.
        host: Host memory that keeps weights once they were read, for devices other than the CPU;
            in bytes or as a share.
        disk: Directory, with or without its capacity ("./weights:2GiB"), for manifests of digests
            and for weights without a checkpoint. By default manifests go to
            `$XDG_CACHE_HOME/flowkv`.
        bus: Bus of a `WeightsRead` event a forward; caches that are attached later receive it, too.

    Returns:
        The streamed weights, with `detach` to load all and `stats` for counts.

    Raises:
        ConfigError: The budget is too small, or the model is not supported.
        StoreError: The checkpoint lacks a weight, has another shape or dtype, or cannot be read.
    """
    with torch.inference_mode(False), torch.no_grad():  # inference tensors count no writes
        places = budget, device, host, disk
        return StreamedWeights(model, checkpoint, places, bus)


class _Entry:
    """Parameter with its state at the time its memory was last set; `fingerprint.Streamed`.

    Args:
        names: Names of the parameter in the model.
        parameter: The parameter.
        stored: Its tensor in the checkpoint.
        sums: Returns the sums that name its content.
        device: Device of its module.
    """

    def __init__(
        self,
        names: list[str],
        parameter: nn.Parameter,
        stored: StoredTensor,
        sums: Callable[[StoredTensor], bytes],
        device: torch.device,
    ) -> None:
        self.names, self.parameter, self.stored, self._sums = names, parameter, stored, sums
        self.device = device
        self._turns, self._state = 0, tuple[Any, ...]()
        # A shape that no operation accepts by mistake: `cat` would skip a tensor of shape [0].
        self.empty = torch.empty((0,) * 9, dtype=stored.dtype, device=device)
        self.like = torch.empty(stored.shape, dtype=stored.dtype, device="meta")

    @unbroken
    def set(self, data: torch.Tensor) -> None:
        self._turns += 1
        self.parameter.data = data
        self._state = self._now()
        self._turns += 1

    def _now(self) -> tuple[Any, ...]:
        p = self.parameter
        storage = p.untyped_storage()._cdata  # an empty tensor has no address
        return p._version, p.data_ptr(), storage, p.dtype, p.shape, p.stride()

    @property
    def changed(self) -> bool:
        return self._now() != self._state

    def stays(self) -> bool:
        """Return whether its content is still the stored one. From threads that hold no lock."""
        while True:
            turns = self._turns
            if not self.changed:
                return True
            if turns == self._turns and turns % 2 == 0:  # no `set` was under way meanwhile
                return False

    def sums(self) -> bytes | None:
        known = self._sums(self.stored)
        data = self.data()
        if data is None or sums_of(bytes_of(data.cpu())) == known:
            return known
        self._state = ()  # from here on it counts as written to, and is not emptied
        return None

    def data(self) -> torch.Tensor | None:
        data = self.parameter.data
        return data if data.shape == self.stored.shape and self.stays() else None


class _Buffer:
    """Aligned memory; a view that is still referenced is never written to again."""

    def __init__(self, memory: memoryview) -> None:
        self.n_bytes = len(memory)
        self.unit: _Unit | None = None
        self._lent: weakref.ref[Any] | None = None
        self._memory = memory

    def lend(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a fresh view; new memory replaces the old if an earlier view is referenced."""
        if self._lent is not None and self._lent() is not None:
            self._memory = own_memory(self.n_bytes)
        view = np.frombuffer(self._memory, np.uint8)
        self._lent = weakref.ref(view)
        return view


class _Unit:
    """Weights that are read and released together."""

    def __init__(self, entries: list[_Entry], checkpoint: Checkpoint) -> None:
        self.entries = entries
        self.layout = checkpoint.layout(e.stored for e in entries)
        self.n_bytes = self.layout.n_bytes
        self.device = entries[0].device if entries else torch.device("cpu")
        self.resident = self.bound = False
        self.pins, self.uses = 0, 1
        self.buffer: _Buffer | None = None
        self.reading: Future[torch.Tensor] | None = None
        self._sample: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @unbroken
    def bind(self, base: torch.Tensor) -> None:
        """Set the parameters to the weights that were read.

        Raises:
            StateError: A parameter was written to while it was empty.
        """
        for entry, place in zip(self.entries, self.layout.places, strict=True):
            if entry.changed:
                if entry.parameter.numel() == 0 and entry.stored.n_bytes:
                    raise StateError(
                        f"{entry.names[0]} was written to while it was not in memory",
                        "Load the model anew, change it, and attach the weights then",
                    )
                continue  # it was given memory of its own, which stays
            entry.set(view_of(base, place, entry.stored).to(entry.device))
        self.bound = True
        if self.resident and self.entries:
            places = self._sampled().to(base.device)
            self._sample = base, places, base[places]

    def _sampled(self) -> torch.Tensor:
        """Return byte offsets `[entries, _SAMPLE]` of whole elements, spread over each entry."""
        found = []
        for entry, place in zip(self.entries, self.layout.places, strict=True):
            size = entry.stored.dtype.itemsize
            last = max(entry.stored.n_bytes // size - 1, 0)
            elements = torch.linspace(0, last, _SAMPLE // size, dtype=torch.float64).long()
            found.append((place + elements[:, None] * size + torch.arange(size)).flatten())
        return torch.stack(found).clamp_max(max(self.n_bytes - 1, 0))

    def written(self) -> int:
        """Count entries with memory that was written to without PyTorch counting it."""
        if not self.bound or self._sample is None:
            return 0
        base, places, known = self._sample
        if torch.equal(now := base[places], known):
            return 0
        other = (now != known).any(1).tolist()
        return sum(o and not e.changed for o, e in zip(other, self.entries, strict=True))

    @property
    def changed(self) -> bool:
        return any(entry.changed for entry in self.entries)

    @unbroken
    def unbind(self) -> None:
        for entry in self.entries:
            if not entry.changed:
                entry.set(entry.empty)
        self.bound, self.reading, self._sample = False, None, None


def view_of(base: torch.Tensor, place: int, stored: StoredTensor) -> torch.Tensor:
    """Return a tensor in a buffer of bytes, without a copy if it is aligned."""
    data = base[place : place + stored.n_bytes]
    if place % stored.dtype.itemsize:
        data = data.clone()
    return data.view(stored.dtype).view(stored.shape)


def _refuse_copy(*_: Any) -> Any:
    """Raise if weights are to be copied or loaded, since some of them are empty."""
    raise StateError(
        "weights that are read as needed cannot be copied, nor others loaded", "Call detach() first"
    )


class StreamedWeights:
    """Streamed weights of a model, read as they are needed. Thread-safe.

    The end of its `with` block loads all weights again, like `detach`.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str] | None,
        places: tuple[int | str, Devices, int | str, str | None],
        bus: Bus | None,
    ) -> None:
        budget, device, host, disk = places
        self.bus = Bus() if bus is None else bus
        self._lock, self._pid = threading.RLock(), os.getpid()
        renew_lock(self, self._lock)
        self._model, self._handles = model, list[Any]()
        self._counts = dict.fromkeys(("met", "hits", "reads", "read_bytes", "changed_bytes"), 0)
        self._blocked_s, self._state = 0.0, "attached"
        self._told = dict(self._counts), 0.0
        self._stack: list[tuple[nn.Module, list[_Unit]]] = []
        self._calls: list[nn.Module] = []
        self._met: list[_Unit] = []
        owners = dict(_owners(model))
        _check(model, owners)
        directory, most_bytes = _directory(disk)
        own = checkpoint is None
        if checkpoint is None:
            checkpoint = _written(model, directory, most_bytes)
        self._checkpoint = Checkpoint(checkpoint, directory)
        if own:
            self._checkpoint.unlink()
        self._reader = ThreadPoolExecutor(1, "flowkv-weights")
        try:
            where = _Devices(device)
            entries = _entries(model, self._checkpoint, self._sums, where)
            self._total_bytes = sum(e.stored.n_bytes for e in entries.values())
            self._budget = parse_size(budget, total_bytes=self._total_bytes)
            self._owned = {m: [entries[id(p)] for p in ps] for m, ps in owners.items()}
            self._link = _Link(self._checkpoint, parse_size(host, total_bytes=self._total_bytes))
            self._plan(list(owners))
            _fill_buffers(model, self._checkpoint)
            where.move_buffers(model)
        except BaseException:
            self._reader.shutdown()
            self._checkpoint.close()
            raise
        self._learned = False
        wanted = [entries[id(p)] for p in model.parameters() if p.requires_grad]
        self._take(model, entries)
        self._needed_gradients = [entry.parameter for entry in wanted]
        self._hook(model)

    def _take(self, model: nn.Module, entries: dict[int, _Entry]) -> None:
        """Empty all weights; those on the meta device become parameters of the CPU."""
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is None:
                    continue
                entry = entries[id(p)]
                if p.is_meta:
                    if entry.parameter is p:
                        entry.parameter = nn.Parameter(entry.empty, requires_grad=False)
                    module._parameters[name] = entry.parameter
        for entry in entries.values():
            entry.parameter.requires_grad_(False)
            entry.parameter.streamed_weight = entry  # type: ignore[attr-defined]
            entry.set(entry.empty)

    def _hook(self, model: nn.Module) -> None:
        self._hooked: list[Any] = [*dict.fromkeys((model, *self._owned))]
        for module in self._hooked:  # wraps the whole call, so that its hooks have the weights
            module._call_impl = partial(self._call, module)
            self._handles.append(module.register_state_dict_pre_hook(_refuse_copy))
            self._handles.append(module.register_load_state_dict_pre_hook(_refuse_copy))

    def _plan(self, order: list[nn.Module]) -> None:
        """Cut modules into units, and decide which units stay."""
        self._link.drop()
        most = min(MOST_UNIT_BYTES, self._total_bytes // 128)
        entries = dict.fromkeys(itertools.chain.from_iterable(self._owned.values()))
        small = [e for e in entries if e.stored.n_bytes <= _SMALL_BYTES]
        if sum(e.stored.n_bytes for e in small) * _SMALL_SHARE > self._budget:
            small = []
        self._small = _Unit(small, self._checkpoint)
        self._small.resident = True
        groups: list[list[_Entry]] = []
        of: dict[int, int] = dict.fromkeys(map(id, small), -1)
        size = most + 1
        for module in order:
            new = [e for e in dict.fromkeys(self._owned[module]) if id(e) not in of]
            n_bytes = sum(e.stored.n_bytes for e in new)
            apart = groups and {e.device for e in (*groups[-1], *new)} != {groups[-1][0].device}
            if new and (size + n_bytes > most or not groups or apart):
                groups.append([])
                size = 0
            size += n_bytes
            for entry in new:
                of[id(entry)] = len(groups) - 1
                groups[-1].append(entry)
        passing = [_Unit(group, self._checkpoint) for group in groups]
        units = [*passing, self._small] if small else passing
        units_of = {
            m: list(dict.fromkeys(units[of[id(e)]] for e in es)) for m, es in self._owned.items()
        }
        met = [u for m in order for u in units_of[m] if u is not self._small]
        sequence = [u for i, u in enumerate(met) if not i or met[i - 1] is not u]
        for unit in units:
            unit.uses = max(1, sequence.count(unit))
        slots = 1 + _depth(self._model, units_of, self._small)
        size = _settle(passing, self._budget - self._small.n_bytes, slots)
        size = -(-size // ALIGNMENT) * ALIGNMENT
        passed = own_memory(slots * size)  # in one piece, which gets more huge pages
        starts = range(0, slots * size, max(size, 1))
        self._slots = [_Buffer(passed[at : at + size]) for at in starts]
        self._order, self._units, self._units_of = order, units, units_of
        self._sequence, self._at, self._last = sequence, -1, None

    _last: _Unit | None

    def _call(self, module: nn.Module, *args: Any, **given: Any) -> Any:
        """Call a module with its weights in memory until the call ends, in any way."""
        own: Any = type(module)._call_impl
        if os.getpid() != self._pid:
            if all(unit.bound for unit in self._units):
                return own(module, *args, **given)
            self._refuse_fork()
        with self._lock:
            depth = len(self._stack)
            try:
                self._before(module)
                return own(module, *args, **given)
            finally:
                self._back_to(depth)

    def _refuse_fork(self) -> None:
        """Refuse a forked process, in which no thread reads weights.

        Raises:
            StateError: This is not the process that attached the weights.
        """
        if os.getpid() != self._pid:
            raise StateError(
                "weights of this model are not in memory, and only the process that attached them "
                "reads them: this one was forked from it",
                "Load the model and attach its weights in this process",
            )

    # The methods below run in the thread that computes, under the lock.

    def _before(self, module: nn.Module) -> None:
        if self._state != "attached":
            raise StateError("the weights are closed", "Load the model anew, and attach it")
        if not self._stack:
            cover()
            self._refuse_half()
        self._stack.append(call := (module, list[_Unit]()))
        for unit in self._units_of.get(module, ()):
            self._acquire(unit)
            call[1].append(unit)
        if not self._learned and module in self._owned:
            self._calls.append(module)

    def _refuse_half(self) -> None:
        """Refuse changes of the whole model, which reach only the part in memory.

        Raises:
            StateError: Several resident weights were written to without a count.
        """
        written = sum(unit.written() for unit in self._units if unit.resident)
        if written > 1 and not all(unit.bound for unit in self._units):
            raise StateError(
                f"{written} weights were written to through `.data` or numpy while others were not "
                "in memory, so that only a part of the model would be changed",
                "Load the model anew, change it, and attach the weights then",
            )

    @unbroken
    def _back_to(self, depth: int) -> None:
        """End the calls that are deeper than `depth`."""
        while len(self._stack) > depth:
            module, units = self._stack.pop()
            for unit in units:
                unit.pins -= 1
                if unit is not self._last:
                    self._leave(unit)
            if not self._stack:
                for unit in self._units:  # an interrupt may have left pins
                    unit.pins = 0
                self._end(module is self._model)

    def _end(self, whole: bool) -> None:
        """End the outermost forward: learn the order of units, and read ahead for the next one."""
        if self._last is not None:
            self._leave(self._last)
        if not whole:
            return
        self._tell()
        if not self._learned:
            self._learned = True
            order = list(dict.fromkeys(self._calls))
            order += [m for m in self._order if m not in set(order)]
            small = [m for m, us in self._units_of.items() if us == [self._small]]
            now, before = ([m for m in ms if m not in small] for ms in (order, self._order))
            twice = any(self._met.count(u) > 1 and not u.resident for u in set(self._met))
            self._calls = []
            if (now != before or twice) and not any(u.changed for u in self._units):
                self._drop()
                self._met = []
                with contextlib.suppress(ConfigError):  # the first order needs less memory
                    self._plan(order)
            self._reader.submit(self._checkpoint.save)  # on the thread that records digests
        if self._met:
            self._sequence, self._at = self._met, len(self._met) - 1
        self._met, self._last = [], None
        self._ahead()

    def _tell(self) -> None:
        """Emit the units and bytes of a forward."""
        if self.bus.wants(WeightsRead):
            before, blocked_s = self._told
            units, found, n_bytes = (
                self._counts[name] - before[name] for name in ("met", "hits", "read_bytes")
            )
            seconds = self._blocked_s - blocked_s
            event = WeightsRead(units=units, found=found, n_bytes=n_bytes, seconds=seconds)
            self.bus.emit(event)
        self._told = dict(self._counts), self._blocked_s

    def _sums(self, stored: StoredTensor) -> bytes:
        """Return the sums that name the content of a weight."""
        if os.getpid() != self._pid:
            raise UnnamedError("a weight that only a parent process reads")
        try:
            return self._reader.submit(self._checkpoint.sums, stored).result()
        except RuntimeError as error:  # the reader is shut down
            raise UnnamedError("a weight of a model that was closed") from error

    def _acquire(self, unit: _Unit) -> None:
        if unit is not self._last and unit is not self._small:
            if self._last is not None:
                self._leave(self._last)
            self._last = unit
            self._met.append(unit)
            self._move_to(unit)
        if not unit.bound:
            held = unit.reading is not None
            if not held:
                self._read(unit, self._room(unit, set(), demanded=True))
            self._ahead()
            self._await(unit)
        else:
            held = True
            self._ahead()
        self._counts["met"] += 1
        self._counts["hits"] += held
        unit.pins += 1

    def _move_to(self, unit: _Unit) -> None:
        n = len(self._sequence)
        for step in range(1, n + 1):
            if self._sequence[(self._at + step) % n] is unit:
                self._at = (self._at + step) % n
                return

    def _await(self, unit: _Unit) -> None:
        assert unit.reading is not None
        start = time.perf_counter()
        try:
            base = unit.reading.result()
            if base.is_cuda:  # keeps its memory from being reused by another copy too early
                base.record_stream(torch.cuda.current_stream(base.device))
        except BaseException:
            if unit.buffer is not None:
                unit.buffer.unit = None
            unit.buffer = unit.reading = None
            self._last = None
            raise
        finally:
            self._blocked_s += time.perf_counter() - start
        with torch.inference_mode(False), torch.no_grad():
            unit.bind(base)

    def _leave(self, unit: _Unit) -> None:
        """Empty the weights of a unit that is not in use, unless it is resident."""
        if unit.resident or unit.pins or not unit.bound:
            return
        if unit.changed:
            self._keep(unit)
            return
        reading = unit.reading
        with torch.inference_mode(False), torch.no_grad():
            unit.unbind()
        # The weights may serve again, as long as nothing else needs the memory.
        unit.reading = reading

    def _keep(self, unit: _Unit) -> None:
        """Keep a unit that was written to, with the memory of another unit if possible."""
        unit.resident = True
        buffer, unit.buffer = unit.buffer, None
        self._counts["changed_bytes"] += unit.n_bytes
        if buffer is None:
            return
        self._slots.remove(buffer)
        self._slots.append(_Buffer(own_memory(buffer.n_bytes)))
        for other in self._units:
            fits = other is not self._small and unit.n_bytes <= other.n_bytes <= buffer.n_bytes
            if fits and other.resident and not (other.pins or other.changed):
                if other.reading is not None and not other.reading.cancel():
                    other.reading.exception()
                with torch.inference_mode(False), torch.no_grad():
                    other.unbind()
                other.resident, other.buffer = False, None
                return

    # Reading.

    def _read(self, unit: _Unit, buffer: _Buffer | None) -> bool:
        """Start to read a unit; return False if there is no room now."""
        if buffer is None:
            return False
        buffer.unit, unit.buffer = unit, buffer
        if is_far(unit.device) and unit is not self._small:
            kept = self._link.keeps(unit)
            unit.reading = self._reader.submit(self._link.bring, unit)
        else:
            kept, view = False, buffer.lend()
            unit.reading = self._reader.submit(_fill, self._checkpoint, view, unit.layout)
        self._counts["reads"] += not kept
        self._counts["read_bytes"] += 0 if kept else unit.layout.read_bytes
        return True

    def _room(self, unit: _Unit, needed: set[int], *, demanded: bool = False) -> _Buffer | None:
        """Return a buffer for a unit: a new one if resident, else one that is not needed sooner."""
        if unit.resident:
            return _Buffer(own_memory(unit.n_bytes))
        free = [b for b in self._slots if b.unit is None]
        if free:
            return free[0]
        idle = [
            b
            for b in self._slots
            if b.unit and not (b.unit.bound or b.unit.pins or b.unit is self._last)
        ]
        victims = [b for b in idle if id(b.unit) not in needed]
        if demanded and not victims:
            victims = idle[-1:]
        if not victims:
            if demanded:
                raise CapacityError(
                    "more weights are in use at a time than the budget holds",
                    "Call attach_weights with a larger budget",
                )
            return None
        buffer = victims[0]
        old = buffer.unit
        assert old is not None
        if old.reading is not None and not old.reading.cancel():
            old.reading.exception()  # waits for the read, which uses the memory until then
        old.reading = old.buffer = buffer.unit = None
        return buffer

    def _ahead(self) -> None:
        """Start to read the next units, as far as there is room."""
        needed: set[int] = set()
        n, waiting = len(self._sequence), 0
        for step in range(1, n):
            unit = self._sequence[(self._at + step) % n]
            missing = unit.reading is None and not unit.bound
            if missing and not self._read(unit, self._room(unit, needed)):
                return
            needed.add(id(unit))
            waiting += unit.reading is not None and not unit.reading.done()
            if waiting > len(self._slots):
                return

    def _drop(self) -> None:
        """Empty all weights, and drop all reads."""
        for unit in self._units:
            if unit.reading is not None and not unit.reading.cancel():
                unit.reading.exception()
            if unit.bound:
                with torch.inference_mode(False), torch.no_grad():
                    unit.unbind()
            unit.reading = unit.buffer = None
        for buffer in self._slots:
            buffer.unit = None

    # The methods below are called by users.

    def stats(self) -> dict[str, float]:
        """Return counts since the weights were attached.

        Returns:
            `total_bytes` of all weights, `budget_bytes`, `resident_bytes` that stay,
            `buffer_bytes` of memory that the others pass through, `host_bytes` kept for other
            devices, `units`, `resident_units`, `met` (units that modules needed one after the
            other), `hits` (units that were in memory or on their way then), `reads` of units and
            `read_bytes` of files, `changed_bytes` of units that stay because they were written to,
            and `blocked_s`: seconds that forwards waited.
        """
        with self._lock:
            kept = [u for u in self._units if u.resident]
            return {
                "total_bytes": self._total_bytes,
                "budget_bytes": self._budget,
                "resident_bytes": sum(u.n_bytes for u in kept),
                "buffer_bytes": sum(b.n_bytes for b in self._slots),
                "host_bytes": self._link.kept_bytes,
                "units": len(self._units),
                "resident_units": len(kept),
                **self._counts,
                "blocked_s": self._blocked_s,
            }

    def detach(self) -> None:
        """Remove the hooks, and load all weights as ordinary tensors; changes are kept.

        Raises:
            StateError: A forward is under way, the weights are closed, a weight was written to
                while it was not in memory, or this is a forked process.
            StoreError: A weight cannot be read; the weights are still attached.
        """
        self._refuse_fork()
        with self._lock:
            if self._state == "detached":
                return
            if self._stack or self._state != "attached":
                raise StateError("weights are in use or closed", "Detach between forwards")
            self._refuse_half()
            self._last = None
            with torch.inference_mode(False), torch.no_grad():
                for unit in self._units:
                    if not unit.bound:
                        if unit.reading is None:
                            self._read(unit, _Buffer(own_memory(unit.n_bytes)))
                        self._await(unit)
                    for entry in unit.entries:
                        if not entry.changed:
                            entry.set(entry.parameter.data.clone())
                    # From here on the unit is never emptied, even if the next one cannot be read.
                    unit.resident, unit.reading = True, None
                    if unit.buffer in self._slots:
                        unit.buffer.unit = None
                    unit.buffer = None
            for parameter in self._needed_gradients:
                parameter.requires_grad_(True)
            self._finish("detached")

    def close(self) -> None:
        """Close without reading anything: weights that are not in memory stay empty.

        The model raises when it is called, and cannot be used without being loaded again. In a
        forked process this does nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._stack:
                raise StateError("weights are in use", "Close between forwards")
            if self._state == "attached":
                self._drop()
                self._finish("closed")

    def _finish(self, state: str) -> None:
        self._state = state
        if state == "detached":  # a closed model keeps its hooks, which raise the right error
            for module in self._hooked:
                module.__dict__.pop("_call_impl", None)
            for handle in self._handles:
                handle.remove()
            for unit in self._units:
                for entry in unit.entries:
                    del entry.parameter.streamed_weight  # type: ignore[attr-defined]
        self._reader.shutdown()
        self._checkpoint.close()
        self._slots = []

    __reduce_ex__ = _refuse_copy  # copies of the model would share this object

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._state == "attached" and os.getpid() == self._pid:
            self.detach()


def is_far(device: torch.device) -> bool:
    """Return whether weights reach a device by a copy from the host."""
    return device.type != "cpu"


class _Link:
    """Loader of units to devices other than the CPU. Used by the reader alone, except `keeps`.

    Args:
        checkpoint: Source of the units.
        host_bytes: Host memory for units that were read: it keeps the first ones that fit, since
            any fixed set is as good for a cyclic scan.
    """

    def __init__(self, checkpoint: Checkpoint, host_bytes: int) -> None:
        self._checkpoint, self._left = checkpoint, host_bytes
        self._kept: dict[_Unit, torch.Tensor] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._streams: dict[torch.device, Any] = {}

    def keeps(self, unit: _Unit) -> bool:
        """Return whether a unit is kept in host memory."""
        return unit in self._kept

    @property
    def kept_bytes(self) -> int:
        """Return the bytes kept in host memory."""
        return sum(map(len, self._kept.values()))

    def drop(self) -> None:
        """Drop all kept units, before units are planned again."""
        self._left += self.kept_bytes
        self._kept.clear()

    def bring(self, unit: _Unit) -> torch.Tensor:
        """Return a unit's bytes on its device.

        Raises:
            StoreError: As from `Checkpoint.fill`.
        """
        data, size = self._kept.get(unit), unit.n_bytes
        if data is None:
            room = self._left >= size and not unit.resident
            data = _pinned(size) if room else self._stage(size)
            self._checkpoint.fill(data.numpy(), unit.layout)
            if room:
                self._kept[unit] = data
                self._left -= size
        if unit.device.type != "cuda":
            return data.to(unit.device, copy=True)
        if unit.device not in self._streams:
            self._streams[unit.device] = torch.cuda.Stream(unit.device)  # type: ignore[no-untyped-call]
        stream = self._streams[unit.device]
        with torch.cuda.stream(stream):  # beside the model's own stream
            there = torch.empty(size, dtype=torch.uint8, device=unit.device)
            there.copy_(data, non_blocking=True)
        stream.synchronize()
        return there

    def _stage(self, size: int) -> torch.Tensor:
        if len(self._staging) < size:
            self._staging = _pinned(size)
        return self._staging[:size]


def _pinned(size: int) -> torch.Tensor:
    """Return memory that a file is read into, pinned if a GPU copies from it."""
    if not torch.cuda.is_available():
        return torch.frombuffer(own_memory(size), dtype=torch.uint8)
    pinned = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
    skip = -pinned.data_ptr() % ALIGNMENT
    return pinned[skip : skip + size]


class _Devices:
    """Devices of modules.

    Args:
        said: A device, devices by names of modules, or None for the devices of their weights.

    Raises:
        ConfigError: A device is unknown, or not available.
    """

    def __init__(self, said: Devices) -> None:
        given = said if isinstance(said, Mapping) else {} if said is None else {"": said}
        self._by_name: dict[str, torch.device] = {}
        for name, device in given.items():
            try:
                self._by_name[name] = torch.empty(0, device=torch.device(device)).device
            except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
                raise ConfigError(
                    f"device={device!r} cannot be used ({str(error).splitlines()[0]})",
                    'Pass one that torch has, such as "cuda:0"',
                ) from error
            if self._by_name[name].type == "meta":
                raise ConfigError("device='meta' cannot compute", 'Pass "cpu" or "cuda:0"')

    def device(self, name: str) -> torch.device | None:
        """Return the device of a module or parameter; None if none was passed."""
        fits = [one for one in self._by_name if not one or f"{name}.".startswith(f"{one}.")]
        return self._by_name[max(fits, key=len)] if fits else None

    def move_buffers(self, model: nn.Module) -> None:
        """Move buffers to the devices of their modules."""
        for path, module in model.named_modules():
            device = self.device(path)
            for name, buffer in module._buffers.items():
                if buffer is not None and device is not None:
                    module._buffers[name] = buffer.to(device)


def _fill(checkpoint: Checkpoint, view: Any, layout: Any) -> torch.Tensor:
    checkpoint.fill(view, layout)
    return torch.from_numpy(view)  # holds the view as long as any tensor uses it


def _owners(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield modules with a forward that needs parameters, and those, in the order of the tree."""

    def handed_up(module: nn.Module) -> list[nn.Parameter]:
        kinds: Any = nn.Module if isinstance(module, _WHOLE) else _HANDED_UP
        own = list(module.parameters(recurse=False))
        for child in module.children():
            if isinstance(child, kinds):
                own += handed_up(child)
        return own

    skipped: set[int] = set()
    for module in model.modules():
        if isinstance(module, _WHOLE):
            skipped.update(id(m) for m in module.modules() if m is not module)
        own = [] if id(module) in skipped else handed_up(module)
        if own and not isinstance(module, _HANDED_UP):
            yield module, own


def _check(model: nn.Module, owners: dict[nn.Module, list[nn.Parameter]]) -> None:
    """Refuse models that cannot be streamed."""
    covered = {id(p) for own in owners.values() for p in own}
    for name, p in model.named_parameters():
        if hasattr(p, "streamed_weight"):
            raise StateError("the weights of this model are attached already", "Detach them first")
        if p.device.type not in ("cpu", "meta"):
            raise ConfigError(f"{name} is on {p.device}", "Move the model to the CPU first")
        if type(p) is not nn.Parameter or p.layout is not torch.strided or p.is_inference():
            raise ConfigError(f"{name} is no plain parameter", "Load the model without that")
        if id(p) not in covered:
            raise ConfigError(f"{name} belongs to no module with a forward", "Put it into one")
    if not owners:
        raise ConfigError(f"{type(model).__name__} has no weights", "Pass a model that has")
    here = ((n, p) for n, p in model.named_parameters() if p.is_contiguous() and not p.is_meta)
    for one, other in itertools.pairwise(sorted((p.data_ptr(), p.nbytes, n) for n, p in here)):
        if one[0] + one[1] > other[0]:
            raise ConfigError(
                f"{one[2]} and {other[2]} share memory", "Make them one parameter, or clone one"
            )


def _directory(disk: str | None) -> tuple[Path, int | None]:
    if disk is None:
        home = cache_home()
        if home is None:
            raise ConfigError("there is no directory for manifests", "Pass one as disk=")
        return home / "weights", None
    place = parse_place(f"disk:{disk}")
    return Path(place.path).absolute(), place.size_bytes()


def _written(model: nn.Module, directory: Path, most_bytes: int | None) -> Path:
    """Write the model's own weights to a file, and return its path."""
    unique: dict[int, tuple[str, nn.Parameter]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        unique.setdefault(id(p), (name, p))
    n_bytes = sum(p.numel() * p.element_size() for _, p in unique.values())
    if most_bytes is not None and n_bytes > most_bytes:
        raise ConfigError(
            f"the weights are {format_size(n_bytes)}, and {directory} may hold "
            f"{format_size(most_bytes)}",
            "Pass disk= with more, or checkpoint=",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(f"{directory} cannot be made ({error})", "Pass another disk=") from error
    for name in filter(_LEFT.fullmatch, os.listdir(directory)):  # by a process that was killed
        remove_left(directory / name)
    path = directory / f"weights-{os.getpid()}-{time.time_ns()}.safetensors"
    write(path, dict(unique.values()))
    return path


def _finder(model: nn.Module, checkpoint: Checkpoint) -> Callable[[list[str]], StoredTensor | None]:
    """Return a function that finds a tensor by its names, else by those with another prefix."""
    prefix = f"{getattr(model, 'base_model_prefix', '') or 'model'}."
    whole = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    others, tensors = {name for name, _ in whole}, checkpoint.tensors

    def find(own: list[str]) -> StoredTensor | None:
        near = [*(prefix + n for n in own), *(n.removeprefix(prefix) for n in own)]
        names = (*own, *(n for n in near if n not in others))
        return next((tensors[n] for n in names if n in tensors), None)

    return find


def _entries(
    model: nn.Module, checkpoint: Checkpoint, sums: Callable[[StoredTensor], bytes], where: _Devices
) -> dict[int, _Entry]:
    """Return parameters by id, each with its tensor in the checkpoint.

    Raises:
        StoreError: A parameter is missing, or has another shape or dtype there.
    """
    names: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, p in parameters.items():
        names.setdefault(id(p), []).append(name)
    find, found = _finder(model, checkpoint), {}
    for key, own in names.items():
        p, stored = parameters[own[0]], find(own)
        if stored is None:
            raise StoreError(f"the checkpoint has no {own[0]}", "Pass the one of this model")
        if stored.shape != tuple(p.shape) or stored.dtype != p.dtype:
            raise StoreError(
                f"{own[0]} is {p.dtype} {list(p.shape)} in the model, and {stored.dtype} "
                f"{list(stored.shape)} in the checkpoint",
                "Make the model with the checkpoint's dtype and sizes",
            )
        device = where.device(own[0]) or torch.device("cpu")
        found[key] = _Entry(own, p, stored, sums, device)
    return found


def _fill_buffers(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the buffers that the checkpoint has, and all that are on the meta device."""
    find = _finder(model, checkpoint)
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            passing = name in module._non_persistent_buffers_set
            if buffer is None or (passing and not buffer.is_meta):
                continue
            full = f"{path}.{name}" if path else name
            stored = find([full])
            if stored is None and not buffer.is_meta:
                continue
            if stored is None or stored.shape != tuple(buffer.shape):
                raise ConfigError(
                    f"the checkpoint has no buffer {full} of shape {list(buffer.shape)}",
                    "Pass the checkpoint of this model, or make buffers on the CPU",
                )
            layout = checkpoint.layout([stored])
            base = _fill(checkpoint, _Buffer(own_memory(layout.n_bytes)).lend(), layout)
            if buffer.is_meta:
                module._buffers[name] = buffer = torch.empty_like(buffer, device="cpu")
            buffer.copy_(view_of(base, layout.places[0], stored))


def _depth(model: nn.Module, units_of: dict[nn.Module, list[_Unit]], small: _Unit) -> int:
    """Return the most units in use at a time by a module and those above it, without small ones."""
    deepest = 1

    def walk(module: nn.Module, above: frozenset[int]) -> None:
        nonlocal deepest
        held = above | {id(u) for u in units_of.get(module, ()) if u is not small}
        deepest = max(deepest, len(held))
        for child in module.children():
            walk(child, held)

    walk(model, frozenset())
    return deepest


def _settle(units: list[_Unit], budget: int, slots: int) -> int:
    """Decide which units stay, and return the bytes of a buffer for the others (0: none)."""
    for unit in units:
        unit.resident = True
    if sum(u.n_bytes for u in units) <= budget:
        return 0
    best: tuple[int, int, set[int]] | None = None
    least = sum(u.n_bytes for u in units)
    for size in sorted({u.n_bytes for u in units}):
        stay = {id(u) for u in units if u.n_bytes > size}
        fixed = sum(u.n_bytes for u in units if u.n_bytes > size) + slots * size
        least = min(least, fixed)
        room = budget - fixed
        if room < 0:
            continue
        # First units that are used twice, then an even spread: buffers fill while others compute.
        for i in sorted(range(len(units)), key=lambda i: (-units[i].uses, i * _GOLDEN % 1.0)):
            if id(units[i]) not in stay and units[i].n_bytes <= room:
                stay.add(id(units[i]))
                room -= units[i].n_bytes
        streamed = sum(u.n_bytes * u.uses for u in units if id(u) not in stay)
        if best is None or streamed < best[0]:
            best = streamed, size, stay
    if best is None:
        raise ConfigError(
            f"a budget of {format_size(budget)} holds neither the largest weights nor the buffers "
            "beside them",
            f"Give it at least {least} bytes ({format_size(least)})",
        )
    for unit in units:
        unit.resident = id(unit) in best[2]
    return best[1]
