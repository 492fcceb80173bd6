# SPDX-License-Identifier: Apache-2.0
"""The KV-cache core of an LLM inference engine.

Which page of K and V memory belongs to whom, which pages a new prompt can reuse, and what goes when
memory is full: a C++ library, bound thinly.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing
from pathlib import Path as _Path

# `saved`: contexts and inputs can be pickled and copied from now on.
from kvcore import _core, groups, ops, policies, saved  # noqa: F401
from kvcore._core import BlockPool, CacheManager, __version__
from kvcore._hot.inputs import RaggedKVCacheInputs
from kvcore._hot.prefix_tree import PrefixTree
from kvcore._hot.prefixes import HeldPages, PinnedPrefix
from kvcore.compat.continuous import ContinuousBatchingKVCacheManager
from kvcore.compat.layer_views import ContinuousBatchingKVCache, KVCacheLayer, PagedKVCacheLayer
from kvcore.compat.slot_inputs import ContinuousBatchingKVCacheInputs
from kvcore.compat.views import (
    ContinuousBatchingKVCacheCollection,
    FetchContinuousBatchingKVCacheCollection,
    KVCacheCollection,
    PagedKVCacheCollection,
)
from kvcore.context import ContextLike, TextGenerationContext, update_batch
from kvcore.device import Device
from kvcore.errors import (
    AlreadyClaimedError,
    CapacityError,
    InsufficientBlocksError,
    InvalidHandleError,
    KVCacheError,
    PendingTransfersError,
    RequestNotFoundError,
)
from kvcore.metrics import KVCacheMetrics
from kvcore.ops.batch import PagedBatch
from kvcore.paged import PagedKVCacheManager
from kvcore.params import KVCacheParams
from kvcore.plans import ReservePlan, SharedPrefix
from kvcore.prefix_runs import PrefixRun

if _typing.TYPE_CHECKING:
    from kvcore import functional, moving, scheduler
    from kvcore import keys as keys
    from kvcore import routing as routing
    from kvcore import stores as stores

__all__ = [
    "AlreadyClaimedError",
    "BlockPool",
    "CacheManager",
    "CapacityError",
    "ContextLike",
    "ContinuousBatchingKVCache",
    "ContinuousBatchingKVCacheCollection",
    "ContinuousBatchingKVCacheInputs",
    "ContinuousBatchingKVCacheManager",
    "Device",
    "FetchContinuousBatchingKVCacheCollection",
    "HeldPages",
    "InsufficientBlocksError",
    "InvalidHandleError",
    "KVCacheCollection",
    "KVCacheError",
    "KVCacheLayer",
    "KVCacheMetrics",
    "KVCacheParams",
    "PagedBatch",
    "PagedKVCacheCollection",
    "PagedKVCacheLayer",
    "PagedKVCacheManager",
    "PendingTransfersError",
    "PinnedPrefix",
    "PrefixRun",
    "PrefixTree",
    "RaggedKVCacheInputs",
    "RequestNotFoundError",
    "ReservePlan",
    "SharedPrefix",
    "TextGenerationContext",
    "__version__",
    "functional",
    "get_cmake_dir",
    "get_include",
    "groups",
    "moving",
    "ops",
    "policies",
    "scheduler",
    "update_batch",
]


_AT_FIRST_USE = ("functional", "keys", "moving", "routing", "scheduler", "stores")


if not _typing.TYPE_CHECKING:  # to type checkers every name would be one of the package

    def __getattr__(name: str) -> object:
        """Import a module that many programs do without, so that these start sooner."""
        if name in _AT_FIRST_USE:
            return _importlib.import_module(f"kvcore.{name}")
        raise AttributeError(f"module 'kvcore' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Name those modules too."""
    return sorted({*globals(), *_AT_FIRST_USE})


# Of the build: an editable install has its Python sources elsewhere.
_INSTALLED = _Path(_core.__file__).parent


def get_include() -> str:
    """Return the directory of the C++ headers, for compilers and Cython."""
    return str(_INSTALLED / "include")


def get_cmake_dir() -> str:
    """Return the directory that ``find_package(kvcore)`` needs in CMAKE_PREFIX_PATH."""
    return str(_INSTALLED / "lib" / "cmake" / "kvcore")
