"""vLLM's offloading where the device is the CPU: its own copies need a GPU, all else is vLLM's."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostOffloadingWorker(OffloadingWorker):
    """Copies blocks between vLLM's cache and the rows of its host memory with torch, at once."""

    def __init__(self, caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._per_chunk, self._groups, self._region = (
            blocks_per_chunk,
            caches.group_data_refs,
            region,
        )
        self._memory = [
            (
                one.tensor.view(torch.int8).view(-1, one.page_size_bytes),
                region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk),
            )
            for one in caches.tensors
        ]
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copy(job_id, src_spec, dst_spec.chunk_ids, store=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copy(job_id, dst_spec, src_spec.chunk_ids, store=False)
        return True

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, store: bool) -> None:
        begun_s, n_bytes, first, row = time.monotonic(), 0, 0, 0
        sizes = zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True)
        for refs, count, at in sizes:
            if not count:
                continue
            spots = np.arange(count) + at % self._per_chunk
            ids = torch.from_numpy(np.asarray(blocks.block_ids[first : first + count], np.int64))
            rows = torch.from_numpy(np.asarray(chunks[row + spots // self._per_chunk], np.int64))
            parts = torch.from_numpy(spots % self._per_chunk)
            for tensor in sorted({ref.tensor_idx for ref in refs}):
                cache, host = self._memory[tensor]
                page = cache.shape[1]
                for part in parts.unique().tolist():  # all blocks that lie there in their rows
                    mine, at_row = ids[parts == part], rows[parts == part]
                    there = host[:, part * page : (part + 1) * page]
                    if store:
                        there[at_row] = cache[mine]
                    else:
                        cache[mine] = there[at_row]
                n_bytes += page * count
            first, row = first + count, row + int(spots[-1]) // self._per_chunk + 1
        self._done.append(TransferResult(job_id, True, n_bytes, time.monotonic() - begun_s))

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._memory.clear()
        self._region.cleanup()


class HostOffloadingSpec(TieringOffloadingSpec):
    """vLLM's spec with these copies."""

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostOffloadingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
