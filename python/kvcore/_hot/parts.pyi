# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Hashable
from typing import Any

from kvcore._core import CacheManager
from kvcore._hot.claims import RowClaims
from kvcore._hot.store_side import StoreSide
from kvcore.backends.protocol import Copier, DevicePools, Mover, Shard
from kvcore.groups.layers import LayerMap
from kvcore.metrics import KVCacheMetrics
from kvcore.states import StateArrays
from kvcore.zmq_reset import ResetListener

class EngineParts:
    """Hold the parts of an engine: claims, the walk of batches, what settles copies, makes inputs.

    The caller's: `copier`, `mover`, `gpus`, `listener`, `clock`, each None where there is none.
    """

    def __init__(
        self,
        core: CacheManager,
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
    @property
    def _core(self) -> CacheManager: ...
    @property
    def _shards(self) -> list[list[Shard]]: ...
    @property
    def _copier(self) -> Copier | None: ...
    @property
    def _mover(self) -> Mover | None: ...
    @property
    def _gpus(self) -> DevicePools | None: ...
    @property
    def _listener(self) -> ResetListener | None: ...
    def _row_claims(self, request_ids: list[Hashable], bundle: int = 0) -> RowClaims: ...
    def _counters(self) -> KVCacheMetrics: ...
    def _set_below(self, below: Any, onload: Any = None) -> StoreSide: ...
    def _time_calls(self, on: bool) -> None: ...
    def _call_times(self) -> dict[str, tuple[list[tuple[float, int]], float]]: ...
    def _reset_times(self) -> None: ...
    def _require_open(self) -> None: ...
    def _let_go(self) -> None: ...
    def _set_copier(self, copier: Copier | None) -> None: ...
