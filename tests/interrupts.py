"""Ctrl-C at any chosen place of FlowKV: a tracer that lets a signal arrive there.

The signal is the real one, so its handler runs where Python runs handlers, and nowhere else: what
a tracer raises by itself would also come where no interrupt can.
"""

from __future__ import annotations

import _thread
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import flowkv
from flowkv import KV
from tests.cache.audit import audit
from tests.inside import interrupts

PACKAGE = str(Path(flowkv.__file__).parent)


class _Signal(int):
    """Its attribute is a call in C, behind which no handler runs before the tracer has returned."""

    arrives = property(_thread.interrupt_main)


_CTRL_C = _Signal(signal.SIGINT)


class Tracer:
    """Counts places of FlowKV that are reached, and interrupts at one of them.

    Args:
        at: Which, from 1 on; 0 only counts.
        opcodes: Every bytecode is a place; otherwise the first visit of each line.
        only: Paths of modules within the package, all by default.
    """

    def __init__(self, at: int, *, opcodes: bool = False, only: tuple[str, ...] = ("",)) -> None:
        self.at, self.places, self.opcodes = at, 0, opcodes
        self._only = tuple(f"{PACKAGE}/{path}" for path in only)
        self._seen: set[tuple[object, int]] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(self._only):
            return None
        frame.f_trace_opcodes = self.opcodes
        self._visit(frame, event)
        return self._visit

    def _visit(self, frame: FrameType, event: str, arg: Any = None) -> Callable[..., Any]:
        if not self.opcodes:
            place = frame.f_code, frame.f_lineno
            if event not in ("call", "line") or place in self._seen:
                return self._visit
            self._seen.add(place)
        self.places += 1
        if self.places == self.at:
            sys.settrace(None)
            _CTRL_C.arrives  # noqa: B018 - the attribute is what does it
        return self._visit


def run(story: Callable[[], object], tracer: Tracer) -> bool:
    """Runs a story with an interrupt in it; whether that came.

    Python drops an exception in a callback of its garbage collector, such as Hypothesis has one.
    """
    before, callbacks, gc.callbacks[:] = sys.gettrace(), gc.callbacks[:], []
    try:
        sys.settrace(tracer)
        try:
            story()
        finally:
            sys.settrace(before)
        while interrupts.waiting():  # until what it fell into is over
            time.sleep(1e-4)
    except KeyboardInterrupt:
        return True
    finally:
        gc.callbacks[:] = callbacks
    return False


def places(story: Callable[[], object], **options: Any) -> int:
    """How many places a story reaches."""
    tracer = Tracer(0, **options)
    assert not run(story, tracer)
    return tracer.places


def chosen(count: int, most: int, seed: int = 0) -> Iterator[int]:
    """Places spread over all of them."""
    step = max(1.0, count / most)
    for n in range(min(count, most)):
        yield 1 + (int(n * step) + seed) % count


def free(lock: Any) -> bool:
    """Whether another thread can take a lock."""
    found: list[bool] = []

    def take() -> None:
        if lock.acquire(timeout=5.0):
            lock.release()
            found.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(found)


@contextmanager
def collectable() -> Iterator[None]:
    """Let Ctrl-C raise, and garbage be what is made within, so that looking for it is cheap.

    A shell starts what runs in the background with Ctrl-C ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        signal.signal(signal.SIGINT, before)


def whole(kv: KV) -> None:
    """Nothing of what was interrupted is left: no lock, no sequence, no page without an owner."""
    gc.collect()
    assert free(kv.lock)
    kv.lock.run_deferred()
    assert kv.planner is not None and not list(kv._open.values()), list(kv._open.values())
    lines = kv.planner.tables
    assert len(lines._free) == lines.max_rows and not kv.planner._leaving
    audit(kv)
