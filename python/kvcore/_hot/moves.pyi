# SPDX-License-Identifier: Apache-2.0
from collections.abc import Hashable
from typing import Any, NamedTuple

from kvcore._hot.parts import EngineParts

class Mark(NamedTuple):
    written: int
    slot: int
    stands_at: int
    replica: int
    stamp: tuple[int, ...]
    context: Any

def mark_of(engine: EngineParts, request_id: Hashable) -> Mark: ...
def begin_at(
    engine: EngineParts, context: Any, n: int, name_space: bytes | None = None
) -> bool: ...
