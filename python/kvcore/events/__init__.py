# SPDX-License-Identifier: Apache-2.0
"""KV-cache events for routers, in vLLM's wire format.

Needs the extra: ``pip install 'kvcore[events]'``.
"""

from __future__ import annotations

from kvcore.events.publisher import EventPublisher
from kvcore.events.subscriber import EventSubscriber
from kvcore.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    decode_batch,
    encode_batch,
    wire_event,
)

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventPublisher",
    "EventSubscriber",
    "KVEventBatch",
    "decode_batch",
    "encode_batch",
    "wire_event",
]
