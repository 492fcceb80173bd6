# SPDX-License-Identifier: Apache-2.0
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from kvcore.native.engine import StepEngine

class CachedRuns(NamedTuple):
    num_resets: int
    names: list[bytes]
    runs: NDArray[np.int32]
    tokens: NDArray[np.int32]

def cached_runs(engine: StepEngine, replica: int) -> CachedRuns: ...
def num_resets(engine: StepEngine) -> int: ...

@final
class ExportedColumns:
    @property
    def pages(self) -> NDArray[np.int32]: ...
    @property
    def parts(self) -> NDArray[np.int32]: ...
    def __enter__(self) -> ExportedColumns: ...
    def __exit__(
        self,
        *error: object,
    ) -> None: ...

def export_columns(
    engine: StepEngine,
    replica: int,
    resets: int,
    name: bytes,
    tokens: NDArray[np.int32],
    first: int,
) -> ExportedColumns: ...

@final
class ImportedColumns:
    @property
    def status(self) -> str: ...
    @property
    def pages(self) -> NDArray[np.int32]: ...
    @property
    def parts(self) -> NDArray[np.int32]: ...
    def publish(self, more: bool) -> bool: ...
    def __enter__(self) -> ImportedColumns: ...
    def __exit__(
        self,
        *error: object,
    ) -> None: ...

def import_columns(
    engine: StepEngine,
    replica: int,
    resets: int,
    name: bytes,
    tokens: NDArray[np.int32],
    first: int,
    parts: NDArray[np.int32],
) -> ImportedColumns: ...

@final
class HeldStandIns:
    def name_of(self, token: int) -> bytes | None: ...
    def token_of(self, name: bytes) -> int: ...

def is_keyed(engine: StepEngine) -> bool: ...
def expect_keys(engine: StepEngine) -> None: ...
