# SPDX-License-Identifier: Apache-2.0
"""Checks that GPUs can be used, and the reason if they cannot."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

from kvcore.errors import KVCacheError

__all__ = ["attention_kernels", "cupy", "is_built", "kernels", "require_devices", "why_unavailable"]

_NOT_BUILT = "kvcore was built without nvcc; install a CUDA toolkit and build it again"
_NO_TRITON = "triton is not installed; pip install 'kvcore[attention]'"
_NO_CUPY = "cupy is not installed; pip install 'kvcore[cuda13]'"


@cache
def _imported(name: str) -> ModuleType:
    return importlib.import_module(name)  # the cache does not keep a failed import


def is_built() -> bool:
    """Return true if this build has the module of GPU kernels."""
    try:
        _imported("kvcore._cuda")
    except ModuleNotFoundError:
        return False
    return True


def kernels() -> ModuleType:
    """Return the module of GPU kernels.

    Raises
    ------
    KVCacheError
        The build has no GPU kernels.
    """
    if not is_built():
        raise KVCacheError(f"CUDA unavailable: {_NOT_BUILT}")
    return _imported("kvcore._cuda")


def cupy() -> ModuleType:
    """Return cupy; kvcore's kernels work on its arrays.

    Raises
    ------
    KVCacheError
        cupy is not installed.
    """
    try:
        return _imported("cupy")
    except ImportError as error:
        raise KVCacheError(f"CUDA unavailable: {_NO_CUPY}") from error


def attention_kernels() -> ModuleType:
    """Return the module of GPU attention.

    Raises
    ------
    KVCacheError
        Triton, which compiles it, is not installed.
    """
    try:
        return _imported("kvcore.backends.cuda.attention.verb")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise KVCacheError(f"attention on GPUs unavailable: {_NO_TRITON}") from error


def why_unavailable() -> str:
    """Return the reason why no GPU can be used; "" if a GPU can be used.

    Returns
    -------
    str
        The build has no kernels, the driver finds no GPU (its own error text), or cupy is not
        installed.

    Examples
    --------
    >>> from kvcore.cuda import why_unavailable
    >>> isinstance(why_unavailable(), str)
    True
    """
    if not is_built():
        return _NOT_BUILT
    count, reason = kernels().count_devices()
    if not count:
        return str(reason)
    try:
        cupy()
    except KVCacheError:
        return _NO_CUPY
    return ""


def require_devices() -> int:
    """Return the number of GPUs, at least 1.

    Returns
    -------
    int

    Raises
    ------
    KVCacheError
        No GPU can be used: "CUDA unavailable: " and the reason.
    """
    reason = why_unavailable()
    if reason:
        raise KVCacheError(f"CUDA unavailable: {reason}")
    return int(kernels().count_devices()[0])
