# SPDX-License-Identifier: Apache-2.0
"""Random requests of a manager with pools on emulated GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_machine import Machine
from grouped_traffic import Traffic
from kvcore import KVCacheParams, ops


class DeviceTraffic(Traffic):
    """Random requests that record their reads and check them at the end, to avoid waits between."""

    def __init__(self, machine: Machine, params: KVCacheParams, seed: int, **options: Any) -> None:
        devices = [f"cuda:{i}" for i in range(params.n_devices)]
        super().__init__(params, seed, num_pages=40, devices=devices, **options)
        self.machine = machine
        self.found: list[tuple[Any, Any, Any]] = []

    def append(self, inputs: Any, layer: int, arrays: list[Any]) -> None:
        tables: Any = ops.batch.layer_pools(inputs, layer).lookup_table
        device = tables.data.device_id
        there = [None if a is None else self.machine.array(a, device) for a in arrays]
        super().append(inputs, layer, there)

    def check(self, inputs: Any, layer: int, rows: Any, firsts: list[int]) -> None:
        pools: Any = ops.batch.layer_pools(inputs, layer).pools
        device = pools[0].data.device_id
        lengths = np.array([context.active_idx for context in rows], np.uint32)
        shapes = [(int(lengths.sum()), *pool.shape[2:]) for pool in pools]
        out = tuple(self.machine.memory(shape, np.float32, device) for shape in shapes)
        ops.gather(inputs, layer, lengths=lengths, out=out)
        kept = [np.arange(n) >= first for n, first in zip(lengths, firsts, strict=True)]
        owner = self.owners[layer]
        for part, array in enumerate(out):
            wanted = [self.values(owner, context, part, 0) for context in rows]
            self.found.append((array, np.concatenate(wanted), np.concatenate(kept)))

    def look(self) -> None:
        for array, wanted, kept in self.found:
            seen = self.machine.host(array)[kept]
            assert np.all(seen == wanted[kept][:, None, None])
            self.read += len(seen)
