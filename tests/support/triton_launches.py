# SPDX-License-Identifier: Apache-2.0
"""Launch the attention kernels on a GPU that only notes what it is asked for.

Prints one JSON object: for each call the launches with device, stream and grid, and how many
kernels were compiled by then. A process of its own: where tests run, the kernels are interpreted.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

BUSY, OTHER, STREAM = 3, 1, 0x7F0000001230


class NotingDriver:
    """What Triton asks a driver for; of compute capability 9.0."""

    def __init__(self) -> None:
        self.device = OTHER
        self.launches: list[dict[str, Any]] = []
        self.compiled = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"multiprocessor_count": 132, "max_shared_mem": 232448},
            load_binary=self.load_binary,
            unload_module=lambda _: None,
        )

    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        self.compiled += 1
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
            args = rest[4:]  # behind metadata and hooks
            assert len(args) == len(source.signature)
            pointers = [a for i, a in enumerate(args) if i not in constants and not given(a)]
            assert not pointers, pointers
            self.launches.append(
                {"function": function, "device": self.device, "stream": stream, "grid": [x, y, z]}
            )

        return launch


def given(argument: Any) -> bool:
    """Tell whether an argument is one that Triton's launcher takes without torch."""
    if isinstance(argument, tuple):
        return all(map(given, argument))
    return isinstance(argument, int | float) or callable(getattr(argument, "data_ptr", None))


def main() -> None:
    from triton.runtime import driver

    noting = NotingDriver()
    driver.set_active(noting)
    from kvcore.backends.cuda.attention import call as calls
    from kvcore.backends.cuda.attention.plan import scratch_elements

    place = SimpleNamespace(device=BUSY, launch_args=lambda _: (BUSY, STREAM))
    results = []
    # Rows, new tokens of each, columns of the table, pages, window.
    for rows, new, columns, pages, window in (
        (4, 1, 8, 64, 33),
        (5, 1, 7, 99, 16),
        (16, 1, 16, 2**20, 1),
        (1, 1, 1, 1, 4096),
    ):
        noting.launches.clear()
        key = np.lib.stride_tricks.as_strided(
            np.zeros(16, np.float16), (pages, 16, 2, 64), (16 * 2 * 64 * 2, 2 * 64 * 2, 64 * 2, 2)
        )
        q = np.zeros((rows * new, 8, 64), np.float16)
        call = calls.Call(
            q,
            key,
            key,
            None,
            None,
            None,
            np.zeros((rows, columns), np.uint32),
            np.zeros(rows, np.uint32),
            np.zeros(rows + 1, np.uint32),
            calls.Rule(0.125, True, window, None, None, None),
            64,
        )
        for splits in (1, 4):
            plan = calls.planned(call, splits, place)
            scratch = np.zeros(scratch_elements(call.sizes, splits), np.float32)
            calls.attend(call, plan, np.empty_like(q), None, scratch, place)
        results.append({"launches": noting.launches[:], "compiled": noting.compiled})
    print(json.dumps({"calls": results, "after": noting.device, "torch": "torch" in sys.modules}))


if __name__ == "__main__":
    main()
