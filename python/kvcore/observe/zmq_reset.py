# SPDX-License-Identifier: Apache-2.0
"""A socket that receives requests to reset the prefix cache."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import weakref
from collections import deque
from typing import Any

from kvcore.observe.ipc_claim import IpcClaim
from kvcore.support.threads import Threads

__all__ = ["ResetListener"]

_LOGGER = logging.getLogger("kvcore")
_PATIENCE_S = 5.0  # maximum wait for the thread at its end
# Maximum size of a message; its content is ignored. ZeroMQ closes the connection of a longer frame.
_MOST_BYTES = 4 << 10


class ResetListener:
    """Listens at ``<base>-reset_prefix_cache`` for messages; its methods never block on ZeroMQ.

    Parameters
    ----------
    endpoint_base : str
        A ZeroMQ endpoint such as ``ipc:///run/engine/kv``; a PULL socket is bound.

    Messages may have any content of up to 4 KiB. A longer message closes its connection.

    Raises
    ------
    ImportError
        pyzmq is not installed.
    ValueError
        The endpoint is invalid or in use. The socket of a dead process is replaced.

    Notes
    -----
    A thread waits at the socket, because a ZeroMQ call costs microseconds and every request calls
    ``is_asked``. The thread ends and frees the endpoint at ``close``, when the listener is
    collected, and at the end of the program. In a forked child the listener is closed; in the
    parent it continues. If the socket fails, a warning is logged and the listener is closed.
    """

    def __init__(self, endpoint_base: str) -> None:
        self.endpoint = f"{endpoint_base}-reset_prefix_cache"
        # One entry represents any number of messages.
        self._mail: deque[bool] = deque(maxlen=1)
        # The thread refers only to the receiver, so collecting this object ends the thread.
        self._receiver = _Receiver(self.endpoint, self._mail)
        self._finalizer = weakref.finalize(self, self._receiver.stop)

    @property
    def is_listening(self) -> bool:
        """True while messages are received."""
        return self._receiver.is_running

    def is_asked(self) -> bool:
        """Take all messages; return true if there were any. Only one thread gets true for them.

        Never raises and never blocks. Without a message, the cost is one attribute access.
        """
        if not self._mail:
            return False
        try:
            return self._mail.pop()
        except IndexError:  # another thread took the entry
            return False

    def close(self) -> None:
        """Stop listening, and free the endpoint before returning; may be repeated."""
        self._finalizer()
        self._mail.clear()


class _Receiver:
    """Owns the socket and the thread that waits at it."""

    def __init__(self, endpoint: str, mail: deque[bool]) -> None:
        self._zmq = _import_zmq()
        self._endpoint = endpoint
        self._mail = mail
        self._is_forked = False
        try:
            self._claim = IpcClaim(endpoint)
        except (OSError, ValueError) as error:
            raise _cannot_listen(endpoint, error) from error
        # The thread also waits at `_stopped`; closing `_stopper` wakes it.
        self._stopped, self._stopper = socket.socketpair()
        self._context, self._owns_context = self._make_context()
        self._socket: Any = None
        self._threads = Threads("kvcore-reset")  # one
        try:
            self._bind()
            _RECEIVERS.add(self)
            self._threads.start(self._run)
        except BaseException:
            if len(self._threads) > 0:  # interrupted after the start: the thread frees everything
                self.stop()
            else:
                self._free()
                self._stopper.close()
            raise

    @property
    def is_running(self) -> bool:
        return not self._is_forked and len(self._threads) > 0

    def _make_context(self) -> tuple[Any, bool]:
        """Return a private context and true; for inproc, a shadow of the shared context and false.

        The shadow has its own list of sockets. When another user destroys the shared context, this
        closes no socket of the thread, but wakes the thread.
        """
        zmq = self._zmq
        if self._endpoint.startswith("inproc://"):
            return zmq.Context.shadow(zmq.Context.instance()), False
        return zmq.Context(), True

    def _bind(self) -> None:
        zmq = self._zmq
        try:
            self._socket = self._context.socket(zmq.PULL)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
            self._socket.bind(self._endpoint)
            self._claim.bound()
        except (OSError, zmq.ZMQError) as error:
            raise _cannot_listen(self._endpoint, error) from error

    def _run(self) -> None:
        try:
            self._receive()
        except self._zmq.ZMQError as error:
            # The code that terminates a context waits for its sockets; only one may terminate it.
            self._owns_context &= not isinstance(error, self._zmq.ContextTerminated)
            _LOGGER.warning(
                "messages to %s no longer reset the prefix cache: %s", self._endpoint, error
            )
        finally:
            self._free()

    def _receive(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._socket, self._zmq.POLLIN)
        poller.register(self._stopped, self._zmq.POLLIN)
        while True:
            ready = [each for each, _ in poller.poll()]
            if self._stopped.fileno() in ready:
                return
            self._socket.recv(self._zmq.NOBLOCK)
            self._mail.append(True)

    def _free(self) -> None:
        """Close the objects of the thread, and free the endpoint after its socket is closed."""
        with contextlib.suppress(self._zmq.ZMQError):
            if self._socket is not None:
                self._socket.close(linger=0)
            if self._owns_context:
                self._context.term()
        self._claim.release()
        self._stopped.close()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        if self._is_forked:
            return
        with contextlib.suppress(OSError):  # the thread has already ended
            self._stopper.shutdown(socket.SHUT_RDWR)
        self._stopper.close()
        self._threads.join(_PATIENCE_S)

    def forget(self) -> None:
        """Close the copies in a forked child; the parent process keeps listening."""
        self._is_forked = True
        self._claim.forget()
        self._stopped.close()
        self._stopper.close()


def _import_zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise ImportError("zmq_endpoint_base needs pyzmq: pip install 'kvcore[zmq]'") from error
    return zmq


def _cannot_listen(endpoint: str, error: Exception) -> ValueError:
    return ValueError(
        f"cannot listen at {endpoint}: {error}; pass an endpoint that is free and writable, such "
        f"as ipc:///tmp/NAME"
    )


_RECEIVERS: weakref.WeakSet[_Receiver] = weakref.WeakSet()


def _forget_all() -> None:
    for receiver in list(_RECEIVERS):
        receiver.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
