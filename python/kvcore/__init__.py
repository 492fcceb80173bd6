# SPDX-License-Identifier: Apache-2.0
"""The KV-cache core of an LLM inference engine.

A C++ library with thin bindings. It decides which request owns each page of K and V memory, which
pages a new prompt can reuse, and which pages to evict when the memory is full.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

from kvcore import _core, groups, ops, policies, stores
from kvcore._core import BlockPool, __version__
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
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.native.engine import HeldPages, PinnedPrefix
from kvcore.native.tree import PrefixTree
from kvcore.ops.batch import PagedBatch
from kvcore.options import CacheOptions, LayerOptions, TierOptions
from kvcore.paged import PagedKVCacheManager
from kvcore.params import KVCacheParams
from kvcore.results import PrefixRun, ReservePlan, SharedPrefix
from kvcore.snapshots import pickling as _pickling  # noqa: F401 - contexts can be pickled from now on

if _typing.TYPE_CHECKING:
    from kvcore import functional, moving, scheduler
    from kvcore import keys as keys
    from kvcore import routing as routing
    from kvcore.integrations.max.continuous import (
        ContinuousBatchingKVCacheInputs,
        ContinuousBatchingKVCacheManager,
    )
    from kvcore.integrations.max.views import (
        ContinuousBatchingKVCache,
        ContinuousBatchingKVCacheCollection,
        FetchContinuousBatchingKVCacheCollection,
        KVCacheCollection,
        KVCacheLayer,
        PagedKVCacheCollection,
        PagedKVCacheLayer,
    )

__all__ = [
    "AlreadyClaimedError",
    "BlockPool",
    "CacheOptions",
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
    "LayerOptions",
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
    "TierOptions",
    "__version__",
    "functional",
    "get_cmake_dir",
    "get_include",
    "groups",
    "moving",
    "ops",
    "policies",
    "scheduler",
    "stores",
    "update_batch",
]


# Names that many programs do not use. They are imported at first use, so that `import` is fast.
_AT_FIRST_USE = {
    "functional": "kvcore.functional",
    "keys": "kvcore.keys",
    "moving": "kvcore.moving",
    "routing": "kvcore.routing",
    "scheduler": "kvcore.scheduler",
    "ContinuousBatchingKVCache": "kvcore.integrations.max.views",
    "ContinuousBatchingKVCacheCollection": "kvcore.integrations.max.views",
    "ContinuousBatchingKVCacheInputs": "kvcore.integrations.max.continuous",
    "ContinuousBatchingKVCacheManager": "kvcore.integrations.max.continuous",
    "FetchContinuousBatchingKVCacheCollection": "kvcore.integrations.max.views",
    "KVCacheCollection": "kvcore.integrations.max.views",
    "KVCacheLayer": "kvcore.integrations.max.views",
    "PagedKVCacheCollection": "kvcore.integrations.max.views",
    "PagedKVCacheLayer": "kvcore.integrations.max.views",
}


if not _typing.TYPE_CHECKING:  # with this function, type checkers would accept every name

    def __getattr__(name: str) -> object:
        """Import a name of `_AT_FIRST_USE`."""
        module = _AT_FIRST_USE.get(name)
        if module is None:
            raise AttributeError(f"module 'kvcore' has no attribute {name!r}")
        imported = _importlib.import_module(module)
        found = imported if module == f"kvcore.{name}" else getattr(imported, name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """Return the public names, including the names that are imported at first use."""
    return sorted({*__all__, *_AT_FIRST_USE})


def _installed(*parts: str) -> str:
    # In the folder of the extension module: an editable install has its Python sources elsewhere.
    from pathlib import Path

    return str(Path(_core.__file__).parent.joinpath(*parts))


def get_include() -> str:
    """Return the directory of the C++ headers, for compilers and Cython."""
    return _installed("include")


def get_cmake_dir() -> str:
    """Return the directory that ``find_package(kvcore)`` needs in CMAKE_PREFIX_PATH."""
    return _installed("lib", "cmake", "kvcore")
