# SPDX-License-Identifier: Apache-2.0
"""Endpoints of event sockets, limits of messages, and the import of pyzmq."""

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

#: Length of a sequence number, highest byte first.
SEQUENCE_BYTES = 8

#: Takes the place of a sequence number in the last message of a replay.
END = b"\xff" * SEQUENCE_BYTES

#: Maximum size of a batch that a subscriber accepts. ZeroMQ closes the connection of a longer frame
#: and allocates no memory for it. Publishers of kvcore split longer batches.
MOST_BATCH_BYTES = 256 << 20

#: Maximum size of a frame that a publisher accepts: a subscription, a request for batches, or a
#: part of the handshake, in which a name has up to 255 bytes.
MOST_REQUEST_BYTES = 4 << 10

_PORT = re.compile(r"(tcp://.*:)(\d+)")
_MOST_PORT = 65535


def import_zmq() -> Any:
    """Return pyzmq.

    Raises
    ------
    ImportError
        pyzmq is not installed. The text has the pip command.
    """
    try:
        import zmq
    except ImportError as error:
        raise ImportError("kvcore.events needs pyzmq: pip install 'kvcore[events]'") from error
    return zmq


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return the endpoint of a replica: the port plus `rank`, or the path plus ``_dp<rank>``.

    Raises
    ------
    ValueError
        The port is out of range.
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
