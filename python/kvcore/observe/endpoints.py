# SPDX-License-Identifier: Apache-2.0
"""Where events are sent, and pyzmq."""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "END",
    "MOST_BATCH_BYTES",
    "MOST_REQUEST_BYTES",
    "SEQUENCE_BYTES",
    "endpoint_of",
    "import_zmq",
]

#: Of a sequence number, highest byte first.
SEQUENCE_BYTES = 8

#: In the place of a sequence number: nothing more is replayed.
END = b"\xff" * SEQUENCE_BYTES

#: Of a batch that a subscriber takes: ZeroMQ drops the connection that brings a longer frame, and
#: takes no memory for the frame. Publishers of kvcore divide what is longer.
MOST_BATCH_BYTES = 256 << 20

#: Of a frame that a publisher takes: a subscription, a request for batches, or a part of the
#: handshake, of which a name takes up to 255 bytes.
MOST_REQUEST_BYTES = 4 << 10

_PORT = re.compile(r"(tcp://.*:)(\d+)")
_MOST_PORT = 65535


def import_zmq() -> Any:
    """Return pyzmq.

    Raises
    ------
    ImportError
        Says how to install it.
    """
    try:
        import zmq
    except ImportError as error:
        raise ImportError("kvcore.events needs pyzmq: pip install 'kvcore[events]'") from error
    return zmq


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return the endpoint of a replica: so many ports further, or with its number at the end.

    Raises
    ------
    ValueError
        There is no such port.
    """
    if endpoint.startswith("tcp://") and endpoint.endswith(":*"):
        return endpoint
    found = _PORT.fullmatch(endpoint)
    if found is None:
        return endpoint if rank == 0 else f"{endpoint}_dp{rank}"
    port = int(found[2]) + rank
    if not 0 < port <= _MOST_PORT:
        raise ValueError(f"{endpoint} has port {port} for replica {rank}, must be 1 .. 65535")
    return f"{found[1]}{port}"
