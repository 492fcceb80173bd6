# SPDX-License-Identifier: Apache-2.0
"""Launches the attention kernels on a GPU that only records its launches.

``some`` prints one JSON object: for each call the launches with device, stream and grid, and the
number of kernels compiled so far. ``growing`` and ``lists`` print which kernels batches of 1 to 300
rows compile. It is a separate process, because the process of the tests interprets the kernels.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

BUSY, OTHER, STREAM = 3, 1, 0x7F0000001230


class NotingDriver:
    """The driver interface that Triton uses; of compute capability 9.0."""

    def __init__(self) -> None:
        self.device = OTHER
        self.launches: list[dict[str, Any]] = []
        self.loaded: list[str] = []  # names of compiled kernels
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"multiprocessor_count": 132, "max_shared_mem": 232448},
            load_binary=self.load_binary,
            unload_module=lambda _: None,
        )

    @property
    def compiled(self) -> int:
        return len(self.loaded)

    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        self.loaded.append(name)
        return f"module of {name}", f"function {name}", 1, 0, 1024

    def get_current_device(self) -> int:
        return self.device

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return 9, 0

    def set_current_device(self, device: int) -> None:
        self.device = device

    def get_current_stream(self, device: int) -> int:
        return 1

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        constants = {at[0] for at in source.constants}

        def launch(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            args = rest[4:]  # after metadata and hooks
            assert len(args) == len(source.signature)
            pointers = [a for i, a in enumerate(args) if i not in constants and not given(a)]
            assert not pointers, pointers
            self.launches.append(
                {"function": function, "device": self.device, "stream": stream, "grid": [x, y, z]}
            )

        return launch


def given(argument: Any) -> bool:
    """Return true if Triton's launcher accepts an argument without torch."""
    if isinstance(argument, tuple):
        return all(map(given, argument))
    return isinstance(argument, int | float) or callable(getattr(argument, "data_ptr", None))


def call_of(rows: int, new: int, columns: int, pages: int, window: int | None, kind: Any) -> Any:
    """Return a call whose table, lengths and offsets start at addresses of any alignment."""
    from kvcore.backends.cuda.attention import call as calls

    key = np.lib.stride_tricks.as_strided(
        np.zeros(16, kind), (pages, 16, 2, 64), (16 * 2 * 64 * 2, 2 * 64 * 2, 64 * 2, 2)
    )
    # The layout of fetch: the table comes after the lengths.
    staged = np.zeros(rows * (columns + 1), np.uint32)
    offsets = np.zeros(2 * rows + 1, np.uint32)[rows:]
    q = np.zeros((rows * new, 8, 64), kind)
    rule = calls.Rule(0.125, True, window, None, None, None)
    table = staged[rows:].reshape(rows, columns)
    return calls.Call(q, key, key, None, None, None, table, staged[:rows], offsets, rule, 64)


def attend(call: Any, splits: int | None, place: Any, *, has_lse: bool = False) -> None:
    from kvcore.backends.cuda.attention import call as calls
    from kvcore.backends.cuda.attention.plan import scratch_elements

    plan = calls.planned(call, splits, place)
    scratch = np.zeros(scratch_elements(call.sizes, plan.grid[2]), np.float32)
    lse = np.zeros(call.q.shape[:2], np.float32) if has_lse else None
    calls.attend(call, plan, np.empty_like(call.q), lse, scratch, place)


def some_calls(noting: NotingDriver, place: Any) -> None:
    results = []
    # Rows, new tokens per row, columns of the table, pages, window.
    for sizes in ((4, 1, 8, 64, 33), (5, 1, 7, 99, 16), (16, 1, 16, 2**20, 1), (1, 1, 1, 1, 4096)):
        noting.launches.clear()
        for splits in (1, 4):
            attend(call_of(*sizes, np.float16), splits, place)
        results.append({"launches": noting.launches[:], "compiled": noting.compiled})
    print(json.dumps({"calls": results, "after": noting.device, "torch": "torch" in sys.modules}))


def growing_batches(noting: NotingDriver, place: Any) -> None:
    """Decode batches of 1 to 300 rows; print what each dtype compiles, by kernel."""
    from kvcore.support.dtypes import numpy_dtype

    for name in ("float16", "bfloat16"):
        noting.loaded.clear()
        for rows in range(1, 301):
            call = call_of(rows, 1, 8 + rows % 5, 64 + rows, None, numpy_dtype(name))
            for splits in (None, 1, 2 + rows % 63):
                attend(call, splits, place)
        print(json.dumps({"dtype": name, "compiled": noting.loaded}))


def page_lists(noting: NotingDriver, place: Any) -> None:
    """Decode page lists of batches of 1 to 300 rows; print the compiled kernels."""
    from kvcore.backends.cuda.attention.indices import write_page_indices
    from kvcore.backends.protocol import IndexRequest

    for rows in range(1, 301):
        columns = 8 + rows % 5
        staged = np.zeros(rows * (columns + 1), np.uint32)
        table = staged[rows:].reshape(rows, columns)
        request = IndexRequest(table, staged[:rows], 16, 64 + rows)
        out = [np.zeros(n + rows, np.int32)[rows:] for n in (rows + 1, table.size, rows, rows)]
        offsets = np.zeros(2 * rows + 1, np.uint32)[rows:]
        write_page_indices(request, offsets, out, place)
    print(json.dumps({"compiled": noting.loaded}))


def main() -> None:
    from triton.runtime import driver

    from kvcore.backends.cuda import driver as devices

    noting = NotingDriver()
    driver.set_active(noting)
    devices.on_device = lambda device: nullcontext()  # no CUDA driver
    place = SimpleNamespace(device=BUSY, launch_args=lambda _: (BUSY, STREAM))
    {"some": some_calls, "growing": growing_batches, "lists": page_lists}[sys.argv[1]](
        noting, place
    )


if __name__ == "__main__":
    main()
