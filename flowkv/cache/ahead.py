"""Ahead-of-time compilation of a geometry's kernels, in a process that runs each once and ends.

Triton keeps compiled kernels on disk, where this process finds them. A mark file beside them shows
that all of a geometry's kernels are compiled, so that later processes skip the work.
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
from flowkv.compiled import compile_process
from flowkv.core.geometry import CODECS, GRANULE_BYTES, Geometry, page_layout

_PAGES, _ROWS = 64, (1, 2, 8, 32)


class Kernels(msgspec.Struct, frozen=True):
    """A geometry and settings for which all kernels are compiled.

    Attributes:
        geometry: The layers.
        codec: Codec of full pages; "auto" for all codecs.
        query_heads: Query heads of each layer.
    """

    geometry: Geometry
    codec: str
    query_heads: int

    def on_gpu(self) -> bool:
        """Return whether there are kernels for Triton to compile."""
        groups = self.geometry.groups
        served = not any(group.kind == "chunked" for group in groups)  # no kernel serves chunks
        return served and any(torch.device(group.device).type == "cuda" for group in groups)

    def mark(self) -> Path:
        """Return the path of the file that marks all these kernels as compiled, for any depth."""
        import triton
        import triton.knobs

        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        sources = sorted(Path(kernels.__file__).with_name("triton").glob("*.py"))
        small = msgspec.structs.replace(self, geometry=self._small())
        named = (msgspec.json.encode(small), triton.__version__, devices)
        name = hashlib.sha256(repr((*named, *map(Path.read_bytes, sources))).encode())
        return Path(triton.knobs.cache.dir) / f"flowkv-{name.hexdigest()[:32]}"

    def use(self) -> None:
        """Run every kernel once: prefill, decode, encode and copy pages in a small cache."""
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
                    if rows == 1:  # tokens behind so many share their pages among programs
                        new += 256 + shape.page_size
                    for count in (new, 64, 4, 1, 1) if rows < 8 else (new, 1):
                        with kv.step(seqs, [[1] * count] * rows) as step:
                            self._attend(step, shape, count * rows)
                    kv.truncate(seqs[0], 1)  # a full page: the sequence goes on in a raw copy
                    with kv.step(seqs[:1], [[1]]) as step:
                        self._attend(step, shape, 1)
                    for seq in seqs:
                        seq.close()
                kv.flush()
                for pool in kv.planner.store.pools.values() if kv.planner is not None else ():
                    if pool.copies is not None:
                        pool.copies.digest([0], GRANULE_BYTES, 1)
                        pool.copies.download(range(0, 2 * LEAST_PIECES, 2), GRANULE_BYTES)

    def _small(self) -> Geometry:
        """Return a geometry with one layer of each group; kernels do not depend on their number."""
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
                if group.kind == "keys":
                    step.write(layer, k, None)
                else:
                    step.attend(layer, q, k, None if group.kind == "latent" else v)


def begin(
    geometry: Geometry | None, codec: str, query_heads: int
) -> subprocess.Popen[bytes] | None:
    """Start a process that compiles the kernels of a geometry.

    Args:
        geometry: The layers, if they are known.
        codec: Codec of full pages.
        query_heads: Query heads of each layer; 0 if that is unknown.

    Returns:
        The process; None if there is nothing to compile, or no process can be started.
    """
    if geometry is None or not query_heads:
        return None
    needed = Kernels(geometry, codec, query_heads)
    if not needed.on_gpu() or needed.mark().exists():
        return None
    lock = needed.mark().with_suffix(".lock")
    return compile_process.begin(lock, __name__, msgspec.json.encode(needed).decode())


def main(text: str) -> None:
    """Run the kernels of a `Kernels` in JSON, and mark them as compiled."""
    needed = msgspec.json.decode(text, type=Kernels)
    if needed.on_gpu() and needed.mark().exists():  # another process held the lock
        return
    needed.use()
    if needed.on_gpu():
        needed.mark().touch()
