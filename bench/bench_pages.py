"""FlowKV functions that run for a page on its way from a device to host memory, and back.

    python -m bench.bench_pages                    # 1,000 pages of 2 MiB: 5 GiB of memory
    python -m bench.bench_pages --pages 250 --functions 30

Memory of the CPU stands in for the device, and its kernels, which are not counted, for those that
make and check the digests. Pages leave in the batches that the policy gives for 32
new pages at a time; prompts of 125 pages bring them back. All threads are counted, and the host
tier has one thread and as many bytes under way as where it is fast, so that the figure is the same
on every machine.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import flowkv
from flowkv import KV, Geometry
from flowkv.tiers import host
from flowkv.tiers.digest import compile_frames
from tests.inside import _COMPILED, dispatch, open_copies

PAGE_BYTES, PROMPT, CHUNK = 2 << 20, 125, 32
SHAPE = Geometry.uniform(layers=32, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
HOME = str(Path(flowkv.__file__).parent)
KERNELS = str(Path(HOME, "kernels", "cpu"))
"""Code that runs in place of the device's own, which makes and checks the digests."""


class Mark:
    """A copy that is over when it is asked about for the second time."""

    def __init__(self) -> None:
        self.asked = 0

    def done(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def wait(self, timeout_s: float = 0.0) -> bool:
        self.asked = 1
        return True


class Streams:
    """Copies of the CPU's memory, made when they are asked for."""

    def use(self, *, behind: bool = False) -> None: ...

    def used(self) -> list[Mark]:
        return []

    def follow(self) -> None: ...

    def lead(self) -> None: ...

    def after(self, mark: Mark) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        target.copy_(source)

    def scatter(self, pages: Any, granules: Any, memory: Any, lines: Any, n_bytes: int) -> None:
        for granule, line in zip(granules, lines, strict=True):
            pages[granule * 4096 :][:n_bytes] = memory[line * 4096 :][:n_bytes]

    def gather(self, pages: Any, granules: Any, memory: Any, lines: Any, n_bytes: int) -> None:
        for granule, line in zip(granules, lines, strict=True):
            memory[line * 4096 :][:n_bytes] = pages[granule * 4096 :][:n_bytes]

    def digest(self, pages: Any, granules: Any, stripes: int, n_bytes: int, memory: Any, *,
               to_device: bool) -> None:  # fmt: skip
        where = torch.tensor(granules, dtype=torch.int32)
        found = dispatch.digest_pages(pages, where, n_bytes // 4096, stripes)
        memory.copy_(found.view(-1).view(torch.uint8))

    def mark(self, *, to_device: bool) -> Mark:
        return Mark()

    def pin(self, address: int, n_bytes: int) -> str:
        return ""

    def unpin(self, address: int) -> None: ...


class Calls:
    """Calls of FlowKV's functions in all threads, while `counting`."""

    def __init__(self) -> None:
        self.found: Counter[str] | None = None
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def end(self) -> None:
        """Stops looking."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        code, found = frame.f_code, self.found
        ours = code.co_filename.startswith(HOME) and not code.co_filename.startswith(KERNELS)
        if event == "call" and found is not None and ours:
            found[f"{code.co_filename[len(HOME) + 1 :]} {code.co_qualname}"] += 1

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        self.found = found = Counter[str]()
        try:
            yield found
        finally:
            self.found = None


def measure(pages: int) -> tuple[Counter[str], Counter[str]]:
    """The calls while so many pages leave the device, and while they come back."""
    compile_frames()
    _COMPILED.ready("lru")
    _COMPILED.wait()
    Streams().digest(torch.zeros(4096).byte(), [0], 1, 4096, torch.zeros(16).byte(), to_device=True)
    calls = Calls()
    tier = host.HostTier((pages + CHUNK) * (PAGE_BYTES + (1 << 14)))
    gpu = f"gpu:{(pages + 2 * CHUNK) * PAGE_BYTES}B"
    kv = KV(SHAPE, namespace="pages", tiers=[gpu, tier], policy="lru")
    kv.planner.measured = lambda *_: None  # nothing is computed: no rate says what a load is worth
    store = kv.planner.store
    (lane,) = store.stack.mover.lanes
    lane.schedule.background_bytes = 1 << 27
    lane._measure = lambda job: None  # type: ignore[method-assign]
    (pool,) = store.pools.values()
    pool.copies = open_copies(Streams(), pool.arena, tier.slots)  # type: ignore[arg-type]
    prompts = [[n, *range(PROMPT * 16 - 1), 0] for n in range(pages // PROMPT)]
    for prompt in prompts:
        with kv.open(prompt) as seq:
            for step in kv.prefill([seq], chunk=CHUNK * 16):
                for layer in range(32):
                    step.pages(layer)  # what lies there serves as its keys and values
    with calls.counting() as out:
        taken = list[int]()
        while more := store.allocator.try_allocate(
            0, min(CHUNK, store.allocator.room("cpu") // 512)
        ):
            taken += more
            store.writes.drain()
        assert kv.flush(60.0)
    assert sum(block.page < 0 and block.tiers == 1 for block in store.index) == pages
    for page in taken:
        pool.release(page)
    with calls.counting() as back:
        for prompt in prompts:
            with kv.open(prompt) as seq:
                assert seq.reused == PROMPT * 16
    calls.end()
    kv.close()
    return out, back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=1000, help="pages, a multiple of 125")
    parser.add_argument("--functions", type=int, default=0, help="functions to list")
    given = parser.parse_args()
    host.THREADS = 1
    ways = measure(given.pages)
    for name, found in zip(("out", "back"), ways, strict=True):
        print(f"{name}: {found.total() / given.pages:.1f} calls a page")
        for function, times in found.most_common(given.functions):
            print(f"  {times / given.pages:8.2f} {function}")
    print(f"sum: {sum(found.total() for found in ways) / given.pages:.1f}")


if __name__ == "__main__":
    main()
