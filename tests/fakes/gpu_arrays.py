# SPDX-License-Identifier: Apache-2.0
"""Compares the resulting bytes of the same work on host memory and on a GPU.

Environment: ``KVCORE_GPU_TESTS_UNPOOLED`` gives each array its own memory, for sanitizers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import conftest
from same_arrays import same_bytes

#: Puts an array into the memory of the work.
Put = Callable[[Any], Any]
#: Does the work with arrays from `Put`, and returns the arrays to compare.
Work = Callable[[Put, np.random.Generator], Sequence[Any]]


def require_gpu() -> Any:
    """Return cupy; skip the calling file if there is no GPU, or fail if a GPU is required."""
    reason = _why_not()
    if reason and "gpu" in conftest.REQUIRED:
        raise RuntimeError(f"KVCORE_REQUIRE names gpu, but CUDA is unavailable: {reason}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else jax takes most of a GPU
    if reason:
        pytest.skip(f"CUDA unavailable: {reason}", allow_module_level=True)
    cupy = conftest.require("cupy")
    if os.environ.get("KVCORE_GPU_TESTS_UNPOOLED"):
        cupy.cuda.set_allocator(None)
    return cupy


def require_torch() -> Any:
    """Return a torch that uses GPUs, or skip; fail if torch is required."""
    return _with_gpus("torch", lambda torch: torch.cuda.is_available())


def require_jax() -> Any:
    """Return a jax that uses GPUs, or skip; fail if jax is required."""
    return _with_gpus("jax", lambda jax: any(each.platform == "gpu" for each in jax.devices()))


def require_compiler() -> None:
    """Skip if Triton would interpret its kernels, or fail if triton is required."""
    if conftest.require("triton").knobs.runtime.interpret:
        _refuse("triton", "kernels would be interpreted: set TRITON_INTERPRET=0")


def _with_gpus(name: str, has_gpus: Callable[[Any], bool]) -> Any:
    library = conftest.require(name)
    if not has_gpus(library):
        _refuse(name, f"this {name} uses no GPU: install the one that does")
    return library


def _refuse(name: str, reason: str) -> None:
    if name in conftest.REQUIRED:
        raise RuntimeError(f"KVCORE_REQUIRE names {name}, but {reason}")
    pytest.skip(reason, allow_module_level=True)


def _why_not() -> str:
    try:
        from kvcore.cuda import why_unavailable
    except ImportError as error:
        return str(error)
    return str(why_unavailable())


def on_host(array: Any) -> Any:
    """Copy an array, because the work may write to it."""
    return np.array(array, order="C")


def on_gpu(array: Any) -> Any:
    """Copy an array of any dtype to the GPU, by its bytes."""
    import cupy

    dense = np.ascontiguousarray(array)
    raw = cupy.asarray(dense.reshape(-1).view(np.uint8))
    return raw.view(dense.dtype).reshape(dense.shape)


def to_host(array: Any) -> Any:
    """Copy a GPU array to the host after its stream's work; return other arrays as they are."""
    if isinstance(array, np.ndarray | np.generic | int):
        return np.asarray(array)
    import cupy

    dense = cupy.ascontiguousarray(array)
    raw = dense.reshape(-1).view(np.uint8).get()
    return raw.view(array.dtype).reshape(array.shape)


def check_both(work: Work, seed: int = 0) -> None:
    """Do the work on the host and on the GPU, from the same random numbers, and compare."""
    expected = [to_host(x) for x in work(on_host, np.random.default_rng(seed))]
    found = [to_host(x) for x in work(on_gpu, np.random.default_rng(seed))]
    assert len(expected) == len(found)
    for i, pair in enumerate(zip(expected, found, strict=True)):
        assert same_bytes(*pair), f"array {i} of seed {seed} differs"


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return random numbers of moderate size."""
    return rng.normal(0, 2, shape).astype(np.float32).astype(dtype)
