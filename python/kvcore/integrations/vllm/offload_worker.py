# SPDX-License-Identifier: Apache-2.0
"""Copy blocks of a KV cache in host memory to chunks of the tier and back, in threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvcore.integrations.vllm.offload_threads import ordered_calls

__all__ = ["CopyWorker"]


class Run(NamedTuple):
    """Blocks of one group, and the place of each block in the tier."""

    group: int
    blocks: Any
    chunks: Any
    places: Any


class CopyWorker(OffloadingWorker):
    """Copy in order of submission; stores, loads and urgent loads have one thread each.

    Parameters
    ----------
    kv_caches : CanonicalKVCaches
        Its tensors are int8 [num_blocks, page_bytes] in host memory.
    blocks_per_chunk, num_chunks : int
    region : SharedOffloadRegion
        Released by `shutdown`.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_chunks: int,
        region: Any,
    ) -> None:
        self._blocks_per_chunk, self._region = blocks_per_chunk, region
        self._refs = kv_caches.group_data_refs
        self._cache = [each.tensor for each in kv_caches.tensors]
        sizes = [each.page_size_bytes for each in kv_caches.tensors]
        self._tier = [
            region.create_next_worker_view(size * blocks_per_chunk).unflatten(
                1, (blocks_per_chunk, size)
            )
            for size in sizes
        ]
        assert all(each.shape[0] == num_chunks for each in self._tier)
        self._threads = [ordered_calls(f"kvcore {name}") for name in _NAMES]
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start to copy blocks to chunks."""
        return self._submit(0, job_id, src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Start to copy chunks to blocks; an expedited load does not wait for normal loads."""
        return self._submit(2 if expedited else 1, job_id, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        """Return the results of jobs that finished since the last call."""
        done = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [self._jobs.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs are finished."""
        wait([self._jobs[job_id] for job_id in job_ids if job_id in self._jobs])

    def shutdown(self) -> None:
        """Finish all submitted jobs, and release the memory."""
        for thread in self._threads:
            thread.shutdown()
        self._jobs.clear()
        self._tier, self._cache = [], []
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _submit(self, thread: int, job_id: int, blocks: Any, chunks: Any) -> bool:
        runs = [*self._runs(blocks, chunks.block_ids)]
        self._jobs[job_id] = self._threads[thread].submit(self._copy, job_id, runs, thread == 0)
        return True

    def _runs(self, spec: GPULoadStoreSpec, chunks: Any) -> Iterator[Run]:
        """Yield the places of each group's blocks; the first block may be inside a chunk."""
        per, block, chunk = self._blocks_per_chunk, 0, 0
        sizes = zip(spec.group_sizes, spec.block_indices, strict=True)
        for group, (size, first) in enumerate(sizes):
            if not size:
                continue
            at = np.arange(size) + first % per
            blocks = spec.block_ids[block : block + size]
            yield Run(group, blocks, chunks[chunk + at // per], at % per)
            block, chunk = block + size, chunk + int(at[-1]) // per + 1

    def _copy(self, job_id: int, runs: list[Run], is_store: bool) -> TransferResult:
        began, moved = perf_counter(), 0
        for run in runs:
            blocks, chunks, places = (torch.from_numpy(each.astype(np.int64)) for each in run[1:])
            for ref in self._refs[run.group]:
                cache = self._cache[ref.tensor_idx][:, : ref.page_size_bytes]
                tier = self._tier[ref.tensor_idx][:, :, : ref.page_size_bytes]
                if is_store:
                    tier[chunks, places] = cache[blocks]
                else:
                    cache[blocks] = tier[chunks, places]
                moved += len(blocks) * ref.page_size_bytes
        return TransferResult(job_id, True, moved, perf_counter() - began)


_NAMES = ("stores", "loads", "urgent loads")
