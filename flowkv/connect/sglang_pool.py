"""Pages of SGLang's host pools as frames. Importing this module imports torch."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flowkv.core.keys import ROOT

_MOST_RUNS = 4  # memory runs of a page; with more, a copy costs less than the frames
_SHAPE = (
    "dtype layout page_size logical_page_size layer_num start_layer end_layer head_num head_dim "
    "v_head_dim kv_lora_rank qk_rope_head_dim kv_cache_dim storage_format_tag size_per_token "
    "num_mamba_layers temporal_state_shape temporal_dtype conv_state_shapes conv_dtype"
).split()
"""Attributes of host pools that describe the bytes of a page, as far as a pool has them."""


def bytes_of(page: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous page in host memory."""
    return page.view(torch.uint8).numpy().reshape(-1).data


class HostPool:
    """Pages of one of SGLang's host pools, in place in its memory or as copies.

    Attributes:
        name: SGLang's name of the pool, such as "kv" or "mamba".
        namespace: Namespace of its frames.
        layout: Fingerprint of a page's layout.
        page_size: Tokens of a page.
        sizes: Bytes of each run of a page, which is a frame; a copy is a single run.
    """

    def __init__(self, pool: Any, name: str, *, in_place: bool) -> None:
        self.pool, self.name = pool, name
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        self.sizes = self._runs() if in_place else ()
        self.in_place = bool(self.sizes)
        if not self.in_place:
            page = pool.get_dummy_flat_data_page()
            self.sizes, self._dtype = (page.nbytes,), page.dtype
        self.namespace, self.layout = ROOT, bytes(16)

    def _runs(self) -> tuple[int, ...]:
        """Return the bytes of a page's runs in memory; empty if there are too many."""
        try:
            _, sizes = self.pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError):
            return ()
        return tuple(map(int, sizes)) if 0 < len(sizes) <= _MOST_RUNS else ()

    def said(self) -> dict[str, str]:
        """Return all properties that the bytes of a page depend on."""
        shape = {of: str(getattr(self.pool, of)) for of in _SHAPE if hasattr(self.pool, of)}
        return {**shape, "pool": type(self.pool).__qualname__, "runs": str(self.sizes)}

    def runs(self, indices: torch.Tensor) -> list[memoryview]:
        """Return the runs of pages, for reading."""
        if self.in_place:
            return self._in_place(indices)
        first = indices[:: self.page_size].tolist()
        return [bytes_of(self.pool.get_data_page(at).contiguous()) for at in first]

    def filled(
        self, indices: torch.Tensor, fill: Callable[[list[memoryview]], list[bool]]
    ) -> list[bool]:
        """Fill pages by `fill`, and put copies into the pool; return which pages were filled."""
        if self.in_place:
            return self.whole(fill(self._in_place(indices)))
        first = indices[:: self.page_size].tolist()
        copies = torch.empty((len(first), *self.sizes), dtype=torch.uint8)
        good = fill([bytes_of(copy) for copy in copies])
        for at, copy, there in zip(first, copies, good, strict=True):
            if there:
                self.pool.set_from_flat_data_page(at, copy.view(self._dtype))
        return good

    def _in_place(self, indices: torch.Tensor) -> list[memoryview]:
        pointers, sizes = self.pool.get_page_buffer_meta(indices)
        runs = ((ctypes.c_char * n).from_address(p) for p, n in zip(pointers, sizes, strict=True))
        return [memoryview(run).cast("B") for run in runs]

    def whole(self, runs: Sequence[bool]) -> list[bool]:
        """Return for each page whether all of its runs are true."""
        n = len(self.sizes)
        return [all(runs[i : i + n]) for i in range(0, len(runs), n)]

    def frame_names(self, keys: Sequence[str]) -> list[bytes]:
        """Return the names of the frames of pages, run by run."""
        said = [self.namespace + key.encode() for key in keys]
        runs = [bytes([run]) for run in range(len(self.sizes))]
        return [hashlib.sha256(page + run).digest() for page in said for run in runs]
