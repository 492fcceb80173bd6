# SPDX-License-Identifier: Apache-2.0
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from kvcore._core import CacheConfig
from kvcore.backends.protocol import Copier, DevicePools, Mover, Shard
from kvcore.context import ContextLike
from kvcore.layers.layer_map import LayerMap
from kvcore.metrics import (
    EvictionMetrics,
    GroupMetrics,
    KVCacheMetrics,
    Misses,
    MissMetrics,
    ReplicaMetrics,
    StateMetrics,
    TenantMetrics,
)
from kvcore.native.contexts import RaggedKVCacheInputs, TextGenerationContext
from kvcore.observe.zmq_reset import ResetListener
from kvcore.pools import StateArrays
from kvcore.results import ReservePlan, SharedPrefix
from kvcore.stores.tiers.onload import Onload

_Context: TypeAlias = TextGenerationContext | ContextLike
_Tokens: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]

MEDIA: Final[tuple[str, str, str]]
STATE_PART: Final[int]
log: logging.Logger

class PageTable(np.ndarray[Any, np.dtype[np.uint32]]):
    def __dlpack__(self, **options: Any) -> Any: ...

@final
class CacheCore:
    def __new__(cls, config: CacheConfig) -> Self: ...
    def stats(self, replica: int = 0) -> ReplicaMetrics: ...
    def total_pages(self) -> int: ...
    def available_pages(self, replica: int) -> int: ...
    def cached_pages(self, replica: int) -> int: ...
    def group_stats(self, replica: int = 0) -> list[GroupMetrics]: ...
    def tenant_stats(self, replica: int = 0) -> list[TenantMetrics]: ...
    def state_stats(self, replica: int = 0) -> StateMetrics: ...
    def miss_counts(self) -> MissMetrics: ...
    def advice(
        self,
    ) -> tuple[list[tuple[int, int, dict[float, float], float]], dict[str, float]]: ...
    def eviction_counts(self) -> tuple[EvictionMetrics, EvictionMetrics]: ...
    def tier_counts(self) -> tuple[int, int, int, int]: ...
    def reset_metrics(self) -> None: ...
    def check_integrity(self) -> None: ...
    def late_reads(self, replica: int) -> int: ...

@final
class TableMemory: ...

@final
class FetchBuffer: ...

@final
class FetchBuffers: ...

@final
class ReleasedMisses: ...

@final
class Claim:
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    @property
    def misses(self) -> Misses | None: ...

@final
class ClaimTable:
    def __new__(cls, core: CacheCore, tenants: tuple[str, ...] = ()) -> Self: ...

@final
class RowClaims:
    def __new__(cls, claims: ClaimTable, request_ids: list[Hashable]) -> Self: ...
    def __call__(self, row: int, column: int, page: int) -> None: ...

@final
class BatchReader:
    def __new__(cls, claims: ClaimTable) -> Self: ...

@final
class Settler:
    def __new__(cls, core: CacheCore, copier: Copier | None, mover: Mover | None) -> Self: ...

@final
class StoreSide:
    def __new__(cls, core: CacheCore) -> Self: ...
    @property
    def waiting(self) -> int: ...
    @property
    def dropped(self) -> int: ...

@final
class PythonStore:
    def __new__(cls, adapter: Any, memory: Any) -> Self: ...

@final
class LowerStores:
    def __new__(cls, stores: list[Any], memory: Any) -> Self: ...

@final
class StoreReader:
    def __new__(
        cls,
        side: StoreSide,
        stores: LowerStores,
        drain: Callable[[], bool],
        *,
        batch_bytes: int,
        seconds: float,
    ) -> Self: ...
    def reach(self, search: LowerSearch) -> int: ...
    def load(self, search: LowerSearch) -> None: ...
    def forget(self) -> None: ...
    def switch_off(self) -> None: ...
    def leave_to_parent(self) -> None: ...
    def close(self, timeout: float | None) -> None: ...

@final
class StoreWriter:
    def __new__(cls, side: StoreSide, stores: LowerStores) -> Self: ...
    def take(self, most: int) -> StoreWrites | None: ...
    def forget(self) -> None: ...

@final
class StoreWrites:
    @property
    def replica(self) -> int: ...
    def __len__(self) -> int: ...
    def write(self) -> int: ...
    def finish(self) -> None: ...

@final
class LowerSearch:
    @property
    def max_hit(self) -> int | None: ...
    @property
    def have(self) -> int: ...
    @property
    def legal(self) -> int: ...

def search_prefix(
    side: StoreSide,
    tokens: _Tokens,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    replica_idx: int = 0,
    *,
    extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
) -> LowerSearch | None: ...

class PinnedPrefix:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

@final
class HeldPages:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def pages(self) -> NDArray[np.int32]: ...
    def let_go(self) -> None: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

@final
class Fork: ...

@final
class InputMaker:
    def __new__(
        cls, shards: list[list[Shard]], gpus: DevicePools | None, total_pages: int
    ) -> Self: ...

class EngineBase:
    @property
    def _core(self) -> CacheCore: ...
    @property
    def _shards(self) -> list[list[Shard]]: ...
    @property
    def _mover(self) -> Mover | None: ...
    @property
    def _gpus(self) -> DevicePools | None: ...
    @property
    def _listener(self) -> ResetListener | None: ...

class StepEngine(EngineBase):
    @property
    def _onload(self) -> Onload | None: ...
    def __init__(
        self,
        core: CacheCore,
        *,
        shards: list[list[Shard]],
        copier: Copier | None,
        mover: Mover | None,
        gpus: DevicePools | None,
        listener: ResetListener | None,
        layers: LayerMap | None = None,
        pages_per_column: tuple[int, ...] = (1,),
        runtime_checks: bool,
        clock: Callable[[], float] | None = None,
        tenants: tuple[str, ...] = (),
        state_groups: int = 0,
        states: StateArrays | None = None,
    ) -> None: ...
    def _row_claims(self, request_ids: list[Hashable], bundle: int = 0) -> RowClaims: ...
    def _counters(self) -> KVCacheMetrics: ...
    def explain(self, request_id: Hashable) -> Misses | None: ...
    def _misses_with(self, ctx: _Context) -> Misses | None: ...
    def _set_below(self, below: Any, reader: StoreReader, onload: Onload | None = None) -> None: ...
    def _time_calls(self, on: bool) -> None: ...
    def _call_times(self) -> dict[str, tuple[list[tuple[float, int]], float]]: ...
    def forget(
        self, pages: Sequence[int] | NDArray[np.integer[Any]], replica_idx: int = 0
    ) -> int: ...
    def hold(
        self, pages: Sequence[int] | NDArray[np.integer[Any]], replica_idx: int = 0
    ) -> HeldPages: ...
    def next_pages(self, replica_idx: int = 0) -> NDArray[np.int32]: ...
    def _reset_times(self) -> None: ...
    def _require_open(self) -> None: ...
    def _let_go(self) -> None: ...
    def maybe_reserve(
        self,
        ctx: _Context | None = None,
        num_steps: int = 1,
        *,
        max_hit: int | None = None,
        keep_free: int = 0,
        must_fit: int | None = None,
        data: _Context | None = None,
    ) -> bool: ...
    def reserve(
        self,
        ctx: _Context | None = None,
        num_steps: int = 1,
        *,
        max_hit: int | None = None,
        keep_free: int = 0,
        must_fit: int | None = None,
        data: _Context | None = None,
    ) -> bool: ...
    def _stand_back(self, ctx: _Context, start: int, active: int) -> None: ...
    def maybe_reserve_batch(self, batch: Iterable[_Context], num_steps: int = 1) -> int: ...
    def plan(
        self,
        ctx: _Context,
        num_steps: int = 1,
        *,
        replica_idx: int | None = None,
        max_hit: int | None = None,
        keep_free: int = 0,
        must_fit: int | None = None,
    ) -> ReservePlan: ...
    def external_claim(
        self, request_id: Hashable, replica_idx: int | Literal["auto"] | None = None
    ) -> None: ...
    def claim(
        self, request_id: Hashable, replica_idx: int | Literal["auto"] | None = None
    ) -> None: ...
    def contains(self, request_id: Hashable) -> bool: ...
    def release(
        self,
        request_id: Hashable,
        *,
        after: Any = None,
        returns_in: float | Literal["soon", "later", "never"] | None = None,
    ) -> None: ...
    def get_replica(
        self, ctx: _Context | None = None, *, context: _Context | None = None
    ) -> int: ...
    def get_or_recommend_replica(
        self, ctx: _Context | None = None, *, context: _Context | None = None
    ) -> int: ...
    def get_req_blocks(
        self, request_id: Hashable, bundle: int = 0, *, first: int = 0
    ) -> list[int]: ...
    def fork(self, parent_id: Hashable, *child_ctxs: _Context) -> None: ...
    def truncate(self, request_id: Hashable, n_tokens: int) -> None: ...
    def accept(self, ctx: _Context, n: int) -> None: ...
    def leave_windows(
        self, request_id: Hashable, n_tokens: int, *, after: object = None
    ) -> int: ...
    def shared_prefixes(self, batch: Iterable[_Context]) -> list[SharedPrefix]: ...
    def fetch(self, batch: Iterable[_Context], num_steps: int = 1) -> list[RaggedKVCacheInputs]: ...
    def step(self, batch: Iterable[_Context], *, after: Any = None) -> NDArray[np.int32]: ...
    def take_copies(self) -> NDArray[np.int32]: ...
    def take_state_copies(self) -> NDArray[np.int32]: ...
    @overload
    def match_prefix(  # type: ignore[overload-overlap]
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: Literal[False] = False,
        touch: bool = False,
        lookahead: Literal[0] = 0,
        out: None = None,
        bundle: int = 0,
    ) -> int: ...
    @overload
    def match_prefix(  # type: ignore[overload-overlap]
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: Literal[True],
        touch: bool = False,
        lookahead: Literal[0] = 0,
        out: None = None,
        bundle: int = 0,
    ) -> tuple[int, NDArray[np.int32]]: ...
    @overload
    def match_prefix(  # type: ignore[overload-overlap]
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: bool = False,
        touch: bool = False,
        lookahead: Literal[0] = 0,
        out: NDArray[np.int32],
        bundle: int = 0,
    ) -> tuple[int, NDArray[np.int32]]: ...
    @overload
    def match_prefix(
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: Literal[False] = False,
        touch: bool = False,
        lookahead: int,
        out: None = None,
        bundle: int = 0,
    ) -> tuple[int, int]: ...
    @overload
    def match_prefix(
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: Literal[True],
        touch: bool = False,
        lookahead: int,
        out: None = None,
        bundle: int = 0,
    ) -> tuple[int, NDArray[np.int32], int]: ...
    @overload
    def match_prefix(
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: bool = False,
        touch: bool = False,
        lookahead: int,
        out: NDArray[np.int32],
        bundle: int = 0,
    ) -> tuple[int, NDArray[np.int32], int]: ...
    def pin(
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
    ) -> PinnedPrefix: ...
    def reset_prefix_cache(self) -> bool: ...

class Mark(NamedTuple):
    written: int
    slot: int
    stands_at: int
    replica: int
    stamp: tuple[int, ...]
    context: Any

def mark_of(engine: StepEngine, request_id: Hashable) -> Mark: ...
def begin_at(engine: StepEngine, context: Any, n: int, name_space: bytes | None = None) -> bool: ...

@final
class PagesStored:
    @property
    def replica(self) -> int: ...
    @property
    def medium(self) -> str: ...
    @property
    def group_idx(self) -> int | None: ...
    @property
    def keys(self) -> list[bytes]: ...
    @property
    def hashes(self) -> list[int]: ...
    def __len__(self) -> int: ...
    @property
    def parent_key(self) -> bytes | None: ...
    @property
    def parent_hash(self) -> int | None: ...
    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def page_size(self) -> int: ...
    @property
    def extra_key(self) -> str | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def extra_keys(self) -> list[list[tuple[bytes, int, int]] | None] | None: ...

@final
class PagesRemoved:
    @property
    def replica(self) -> int: ...
    @property
    def medium(self) -> str: ...
    @property
    def group_idx(self) -> int | None: ...
    @property
    def keys(self) -> list[bytes]: ...
    @property
    def hashes(self) -> list[int]: ...
    def __len__(self) -> int: ...

@final
class CacheCleared:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def replica(self) -> int: ...

def take_events(
    engine: StepEngine,
) -> list[PagesStored | PagesRemoved | CacheCleared]: ...
