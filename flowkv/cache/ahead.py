"""Kernels compiled ahead of use, by a process that uses each of a geometry's once and ends.

What Triton compiles is kept on disk, where this process finds it. A mark beside it says that all of
a geometry's kernels are there, so that later processes begin none.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import torch

from flowkv import kernels
from flowkv.cache.pinned import LEAST_PIECES
from flowkv.core import compile_process
from flowkv.core.geometry import CODECS, GRANULE_BYTES, Geometry, page_layout

_PAGES, _ROWS = 64, (1, 2, 8, 32)


class Kernels(msgspec.Struct, frozen=True):
    """What kernels are compiled for.

    Attributes:
        geometry: The layers.
        codec: Of full pages; "auto" for all codecs.
        query_heads: Of each layer.
    """

    geometry: Geometry
    codec: str
    query_heads: int

    def on_gpu(self) -> bool:
        """Whether there is anything for Triton to compile."""
        groups = self.geometry.groups
        served = not any(group.kind == "chunked" for group in groups)  # no kernel serves those
        return served and any(torch.device(group.device).type == "cuda" for group in groups)

    def mark(self) -> Path:
        """The file that says that all of it is compiled."""
        import triton
        import triton.knobs

        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        sources = sorted(Path(kernels.__file__).with_name("triton").glob("*.py"))
        named = (msgspec.json.encode(self), triton.__version__, devices)
        name = hashlib.sha256(repr((*named, *map(Path.read_bytes, sources))).encode())
        return Path(triton.knobs.cache.dir) / f"flowkv-{name.hexdigest()[:32]}"

    def use(self) -> None:
        """Prefills, decodes, encodes, opens and gives up pages, in a small cache of its own."""
        from flowkv.cache.kv import KV

        shape = self._small()
        page_bytes = sum(page_layout(group, shape.page_size).page_bytes for group in shape.groups)
        for codec in CODECS if self.codec == "auto" else (self.codec,):
            given: dict[str, Any] = {"recent_tokens": 0} if codec != "raw" else {}
            gpu, host = (max(pages * page_bytes, 4 << 20) for pages in (_PAGES, 8))
            with KV(shape, gpu=gpu, host=host, namespace="ahead", codec=codec, **given) as kv:
                for rows in _ROWS:
                    seqs = [kv.open([], reuse=False) for _ in range(rows)]
                    new = shape.page_size + 9 if rows < 8 else 9
                    for count in (new, 64, 4, 1, 1) if rows < 8 else (new, 1):
                        with kv.step(seqs, [[1] * count] * rows) as step:
                            self._attend(step, shape, count * rows)
                    kv.truncate(seqs[0], 1)  # a full page: it goes on in a copy, which is raw
                    with kv.step(seqs[:1], [[1]]) as step:
                        self._attend(step, shape, 1)
                    for seq in seqs:
                        seq.close()
                kv.flush()
                for pool in kv.planner.store.pools.values() if kv.planner is not None else ():
                    if pool.copies is not None:
                        pool.copies.download([0] * LEAST_PIECES, GRANULE_BYTES)

    def _small(self) -> Geometry:
        """A layer of each group: kernels are the same for all, and for any number of them."""
        groups = [
            msgspec.structs.replace(group, layers=group.layers[:1])
            for group in self.geometry.groups
        ]
        return Geometry(groups=tuple(groups), page_size=self.geometry.page_size)

    def _attend(self, step: Any, shape: Geometry, tokens: int) -> None:
        for group in shape.groups:
            heads, dtype = group.kv_heads, getattr(torch, group.dtype)
            for layer in group.layers:
                q, k, v = (
                    torch.ones(tokens, *size, dtype=dtype, device=group.device)
                    for size in (
                        (self.query_heads, group.head_dim),
                        (heads, group.head_dim),
                        (heads, group.value_dim),
                    )
                )
                step.attend(layer, q, k, None if group.kind == "latent" else v)


def begin(
    geometry: Geometry | None, codec: str, query_heads: int
) -> subprocess.Popen[bytes] | None:
    """Have a process of its own compile the kernels of a geometry.

    Args:
        geometry: The layers, if they are known.
        codec: Of full pages.
        query_heads: Of each layer; 0 if nothing is known of them.

    Returns:
        The process; None if there is nothing to compile, or no process to be had.
    """
    if geometry is None or not query_heads:
        return None
    needed = Kernels(geometry, codec, query_heads)
    if not needed.on_gpu() or needed.mark().exists():
        return None
    lock = needed.mark().with_suffix(".lock")
    return compile_process.begin(lock, __name__, msgspec.json.encode(needed).decode())


def main(text: str) -> None:
    """Use kernels that are given as JSON, and mark them as compiled."""
    needed = msgspec.json.decode(text, type=Kernels)
    if needed.on_gpu() and needed.mark().exists():  # another process held the lock
        return
    needed.use()
    if needed.on_gpu():
        needed.mark().touch()
