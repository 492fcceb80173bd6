# SPDX-License-Identifier: Apache-2.0
"""Launch kernels on a stream, or run them in Triton's interpreter if TRITON_INTERPRET is set.

The device of the arrays becomes the current device, Triton returns the compiled kernel, and kvcore
launches it on the stream of the call. kvcore passes no torch tensor: Triton takes the address and
the dtype name of an array, and the handle of a stream. From 3.8 on, Triton itself does not need
torch; 3.6 and 3.7 import torch to find the GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import triton
from triton.runtime.jit import JITFunction

from kvcore.backends.cuda import driver as devices
from kvcore.errors import KVCacheError

__all__ = ["COMPILED", "architecture", "is_interpreted", "launch", "processors"]

#: Compile options of every kernel; Triton's default changes with 3.10.
COMPILED = {"enable_fp_fusion": True}

_INTERPRETED_PROCESSORS = 8


def is_interpreted(kernel: Any) -> bool:
    """Return true if a kernel runs in Triton's interpreter, on host memory."""
    return not isinstance(kernel, JITFunction)


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    place: Any,
    **options: int,
) -> None:
    """Run a kernel.

    Parameters
    ----------
    kernel : Triton kernel
    grid : (int, int, int)
    args : tuple
        All of its arguments, in order.
    place : Place
        The kernel runs on the stream of the place; the interpreter first waits for this stream.
    **options
        Options of the compiler.
    """
    if is_interpreted(kernel):
        place.wait()
        with np.errstate(all="ignore"):  # GPUs do not warn
            kernel[grid](*args)
        return
    device, stream = place.launch_args(1)
    driver = _driver()
    with devices.on_device(device):
        before = driver.get_current_device()  # torch may set another device later
        if before != device:
            driver.set_current_device(device)
        try:
            compiled = kernel.run(*args, grid=grid, warmup=True, **COMPILED, **options)
            compiled[grid](*args, stream=stream)
        finally:
            if before != device:
                driver.set_current_device(before)


def processors(kernel: Any, place: Any) -> int:
    """Return the number of multiprocessors of a device."""
    return _INTERPRETED_PROCESSORS if is_interpreted(kernel) else _processors(place.device)


def architecture(kernel: Any, place: Any) -> int:
    """Return the compute capability of a device, 90 for 9.0; 0 in the interpreter."""
    return 0 if is_interpreted(kernel) else _architecture(place.device)


@cache
def _processors(device: int) -> int:
    return int(_driver().utils.get_device_properties(device)["multiprocessor_count"])


@cache
def _architecture(device: int) -> int:
    major, minor = _driver().get_device_capability(device)
    return int(10 * major + minor)


def _driver() -> Any:
    """Return Triton's driver.

    Raises
    ------
    KVCacheError
        Triton finds no GPU: torch is loaded, but was built for CPUs; or torch is not installed, and
        Triton is older than 3.8.
    """
    from triton.runtime import driver

    try:
        return driver.active
    except RuntimeError as error:
        raise KVCacheError(
            f"attention on GPUs unavailable: Triton finds no GPU, {error}; if torch is loaded, it "
            f"must be built with CUDA, and before 3.8 Triton needs torch: this is "
            f"{triton.__version__}"
        ) from error
