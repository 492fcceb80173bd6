# SPDX-License-Identifier: Apache-2.0
"""Call the process in which Mooncake's client runs."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any

from kvcore.stores.shared_arena import SharedArena
from kvcore.stores.specs import MooncakeTier

__all__ = ["MooncakeClient"]

_START_SECONDS = 10.0  # the engine gives up on a dead master earlier
_GONE = ("the process has ended", None)


class MooncakeClient:
    """Start the process of the client; each call is a request and its reply.

    Parameters
    ----------
    tier : MooncakeTier
    arena : SharedArena
        Memory for values in both directions.

    Raises
    ------
    OSError
        From every method: the process has ended, or the engine refuses; TimeoutError after the
        deadline of the call. After a time-out the process is killed, so that it cannot change the
        arena any more.
    """

    def __init__(self, tier: MooncakeTier, arena: SharedArena) -> None:
        from multiprocessing.connection import Connection  # not imported by `import kvcore`

        host = _own_address(tier)
        settings = {
            "bytes": arena.size,
            "host": host,
            "master": f"{tier.host}:{tier.port}",
            "protocol": tier.protocol,
            "devices": tier.devices,
            "tenant": tier.tenant,
            "path": sys.path,
        }
        self._lock, self._sending = Lock(), Lock()
        self._numbers = count()
        self._waiting: dict[int, SimpleQueue[tuple[str | None, Any]]] = {}
        self._is_over = self._is_connected = False
        # This connection detects a missing master at once; the engine would try for seconds.
        socket.create_connection((tier.host, tier.port), tier.seconds).close()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            whole = int(tier.seconds)
            limit = struct.pack("ll", whole, int((tier.seconds - whole) * 1e6) + 1)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, str(Path(__file__).with_name("mooncake_process.py"))),
                    *(str(theirs.fileno()), str(arena.fd), json.dumps(settings)),
                ],
                # The address that holders use for the client; the client listens on all addresses.
                env={"MC_TCP_BIND_ADDRESS": host, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # much output; the errors are in the replies
                pass_fds=(theirs.fileno(), arena.fd),
                start_new_session=True,  # an interrupt of the program must not end it
            )
            try:
                self._connection = Connection(ours.detach())
                self._gives_up = monotonic() + _START_SECONDS
                self._first = self._expect()[1]  # the first message has the number 0
                Thread(target=self._read, name="kvcore mooncake", daemon=True).start()
            except BaseException:  # an interrupt: end the process before raising
                self.kill()
                raise

    @property
    def is_over(self) -> bool:
        """True if the process has ended, or has exceeded its time to connect."""
        return self._is_over or not (self._is_connected or monotonic() < self._gives_up)

    def await_start(self, ends: float | None = None) -> None:
        """Wait until the engine's client is connected, or until its time to connect is over."""
        if not self._is_connected:
            ends = self._gives_up if ends is None else min(ends, self._gives_up)
            error, _ = first = self._wait_for(self._first, ends, "the client has not connected yet")
            self._first.put(first)  # for other waiting threads
            if error is not None:
                raise OSError(error)
            self._is_connected = True

    def call(self, verb: str, *arguments: Any, ends: float) -> Any:
        """Call a method of ``mooncake_process.Client``."""
        self.await_start(ends)
        number, reply = self._expect()
        is_over = False
        try:
            with self._sending:  # messages of two threads must not mix
                self._connection.send((number, verb, *arguments))
            error, result = self._wait_for(reply, ends, "the call took too long")
            is_over = True
        except BlockingIOError:
            raise TimeoutError("the call took too long") from None
        finally:
            if not is_over:  # the process would write to memory that is reused soon
                self.kill()
        if error is not None:
            raise OSError(error)
        return result

    def kill(self) -> None:
        """End the process and every call in flight. A second call does nothing."""
        self._process.kill()
        self._process.wait()  # until it has ended, it may change memory
        self._fail_all()

    def _expect(self) -> tuple[int, SimpleQueue[tuple[str | None, Any]]]:
        reply: SimpleQueue[tuple[str | None, Any]] = SimpleQueue()
        with self._lock:
            if self._is_over:
                raise OSError(_GONE[0])
            number = next(self._numbers)
            self._waiting[number] = reply
        return number, reply

    def _wait_for(
        self, reply: SimpleQueue[tuple[str | None, Any]], ends: float, too_late: str
    ) -> tuple[str | None, Any]:
        try:
            return reply.get(timeout=max(0.0, ends - monotonic()))
        except Empty:
            raise TimeoutError(too_late) from None

    def _read(self) -> None:
        """Pass replies to their callers until the connection ends."""
        with suppress(EOFError, OSError):
            while True:
                number, error, result = self._connection.recv()
                with self._lock:
                    reply = self._waiting.pop(number, None)
                if reply is not None:  # otherwise `kill` has already answered
                    reply.put((error, result))
        self._fail_all()
        with self._sending:
            self._connection.close()
        self._process.wait()

    def _fail_all(self) -> None:
        with self._lock:
            self._is_over = True
            left, self._waiting = self._waiting, {}
        for reply in left.values():
            reply.put(_GONE)


def _own_address(tier: MooncakeTier) -> str:
    """Return this machine's address as the master reaches it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((tier.host, tier.port))  # sends nothing
        return str(probe.getsockname()[0])
