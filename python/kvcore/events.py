# SPDX-License-Identifier: Apache-2.0
"""KV-cache events for routers, in vLLM's wire format.

Needs the extra: ``pip install 'kvcore[events]'``.
"""

from __future__ import annotations

from kvcore.observe.publisher import EventPublisher
from kvcore.observe.subscriber import EventSubscriber
from kvcore.observe.wire import (
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
