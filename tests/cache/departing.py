"""Processes that end with pages on their way; run as `python -m tests.cache.departing DIRECTORY`.

Every case is a child that ends as any Python process does. What it left is looked at from here,
and told as JSON: its exit status, what it wrote to stderr, pages in each directory, seconds.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from flowkv import KV
from flowkv.tiers.disk import DiskTier
from tests.cache.fakes import Wrapped, lasting
from tests.cache.toy import make_kv, published, simple, write
from tests.inside import _COMPILED, follow

torch.set_num_threads(1)
warnings.simplefilter("ignore", DeprecationWarning)

PAGES = 6
held: list[Any] = []  # as the globals of a program do


class Hung(Wrapped):
    """Never answers a store."""

    def submit_store(self, items: Any, **options: Any) -> int:
        return -1


def begin(directory: Path, name: str = "kv", **options: Any) -> KV:
    """A cache with pages that wait to be written."""
    kv = make_kv(simple(), disk=f"{directory / name}:4MiB", **options)
    held.append(kv)
    lane = kv.planner.store.stack.mover.lanes[0]
    lane.schedule.barred = True
    lane._bar = lambda barred: None  # until the end, as if another one erased all the time
    published(kv, list(range(PAGES * 8)))
    atexit.register(unbar, lane)  # so it runs before what the cache registered
    assert kv.planner.store.writes.unsaved == PAGES
    return kv


def unbar(lane: Any) -> None:
    lane.schedule.barred = False


def returns(directory: Path) -> None:
    begin(directory)


def leaves(directory: Path) -> None:
    begin(directory)
    sys.exit(3)


def raises(directory: Path) -> None:
    kv = begin(directory)
    seq = kv.open([7] * 9)
    with kv.step([seq], [[7] * 9]) as step:
        write(step)
        raise ValueError("of the user's own")


def in_prefill(directory: Path) -> None:
    kv = begin(directory)
    held.append(kv.prefill([kv.open([7] * 30)]))
    next(held[-1])  # a step that nobody ends


def terminated(directory: Path) -> None:
    begin(directory)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
    os.kill(os.getpid(), signal.SIGTERM)


def detached(directory: Path) -> None:
    begin(directory).detach()


def several(directory: Path) -> None:
    for name in ("one", "two", "three"):
        begin(directory, name)


def dropped(directory: Path) -> None:
    lane = begin(directory).planner.store.stack.mover.lanes[0]
    unbar(lane)
    held.clear()
    gc.collect()


def closed(directory: Path) -> None:
    kv = begin(directory)
    unbar(kv.planner.store.stack.mover.lanes[0])
    kv.close()


def unproven(directory: Path) -> None:
    """Its pages are proven at the end only; no thread can be started any more by then."""
    kv = make_kv(simple(), disk=f"{directory / 'kv'}:4MiB")
    held.append(kv)
    store = kv.planner.store

    def prove(end_s: float) -> None:
        store.stack.provisional.begin()
        store.writes.confirm()

    follow(kv, prove=prove)
    store.stack.provisional.active = True
    published(kv, list(range(PAGES * 8)))
    assert len(store.stack.provisional) == PAGES and not store.writes.unsaved
    atexit.register(setattr, threading.Thread, "start", no_more)


def no_more(thread: threading.Thread) -> NoReturn:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def out_of_time(directory: Path) -> None:
    """Its pages cannot be proven in time."""
    kv = make_kv(simple(), disk=f"{directory / 'kv'}:4MiB", exit_s=0.1)
    held.append(kv)
    follow(kv, prove=lambda end_s: False)
    kv.planner.store.stack.provisional.active = True
    published(kv, list(range(PAGES * 8)))


def hangs(directory: Path) -> None:
    tier = Hung(lasting(capacity_bytes=1 << 20))
    kv = make_kv(simple(), tiers=[tier], exit_s=0.4)
    held.append(kv)
    published(kv, list(range(PAGES * 8)))
    begin(directory)  # another one does not suffer from it


def locked(directory: Path) -> None:
    """A daemon thread is within the cache, and stays there."""
    kv = begin(directory, exit_s=0.3)
    inside = threading.Event()

    def hold() -> None:
        with kv.lock:
            inside.set()
            time.sleep(60)

    threading.Thread(target=hold, daemon=True).start()
    inside.wait()


def forks(directory: Path) -> None:
    """A child that ends before its parent leaves what is the parent's alone."""
    begin(directory)
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        assert len(held[0].planner.store.stack.tiers[0].contains([])) == 0
        assert stored(directory / "kv") == 0
    else:
        sys.exit(0)


def works(directory: Path) -> None:
    """A process of `multiprocessing` ends its own way."""

    def work() -> None:
        begin(directory)
        unbar(held[0].planner.store.stack.mover.lanes[0])

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join()
    assert worker.exitcode == 0


def nothing(directory: Path) -> None:
    """Is told to write nothing at the end."""
    begin(directory, exit_s=0.0)


CASES: list[Callable[[Path], None]] = [
    *(returns, leaves, raises, in_prefill, terminated, detached, several, dropped, closed),
    *(unproven, out_of_time, hangs, locked, forks, works, nothing),
]


def stored(directory: Path) -> int:
    """Pages that lie in a directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tier = DiskTier(directory, 4 << 20)
    try:
        return len(list(tier.scan()))
    finally:
        tier.close()


def main(directory: Path) -> None:
    told: dict[str, dict[str, Any]] = {}
    with make_kv(simple(), disk=f"{directory / 'first'}:4MiB") as kv:  # loads what children share
        published(kv, list(range(PAGES * 8)))
    _COMPILED.wait()
    for case in CASES:
        place = directory / case.__name__
        place.mkdir()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(place / "stderr", os.O_WRONLY | os.O_CREAT), 2)
            case(place)
            return  # to the end of the interpreter
        begun = time.monotonic()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        told[case.__name__] = {"status": status, "seconds": time.monotonic() - begun}
    for name, one in told.items():
        place = directory / name
        one["stderr"] = (place / "stderr").read_text()
        one["pages"] = {each.name: stored(each) for each in place.iterdir() if each.is_dir()}
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
