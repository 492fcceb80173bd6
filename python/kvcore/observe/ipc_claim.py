# SPDX-License-Identifier: Apache-2.0
"""A lock that makes one manager the only listener at an ``ipc://`` endpoint."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl

__all__ = ["IpcClaim"]

_IPC = "ipc://"
_PEER = struct.Struct("3i")  # pid, user, group of the process that listens


class IpcClaim:
    """Reserves an ``ipc://`` endpoint for one listener among all processes and managers.

    When ZeroMQ binds an endpoint, it removes an existing socket file, even if another process
    listens at it. Therefore the listener locks a second file, ``<path>.lock``. The system unlocks
    the file when the process dies. Endpoints of other kinds need no lock: a second bind fails.

    Parameters
    ----------
    endpoint : str

    Raises
    ------
    ValueError
        Another manager or program listens at the endpoint, or its file is not a socket.
    OSError
        The folder does not exist or cannot be written.
    """

    def __init__(self, endpoint: str) -> None:
        self._lock = -1
        self._socket: os.stat_result | None = None
        if sys.platform == "win32" or not endpoint.startswith(_IPC):
            return
        path = endpoint.removeprefix(_IPC)
        if path.startswith("@"):  # an abstract name without a file: the system allows one owner
            return
        self._path = Path(path)
        self._lock = _locked(_lock_path(self._path))
        try:
            _check_unused(self._path)
        except BaseException:
            self.release()
            raise

    def bound(self) -> None:
        """Record the bound socket file, so that ``release`` removes it; ZeroMQ does not."""
        if self._lock >= 0:
            self._socket = self._path.lstat()

    def release(self) -> None:
        """Remove the socket and free the endpoint."""
        if self._lock < 0:
            return
        if self._socket is not None:
            _remove(self._path, self._socket)
        # The lock file is removed while it is locked, so no other process has locked it.
        _remove(_lock_path(self._path), os.fstat(self._lock))
        self.forget()

    def forget(self) -> None:
        """Close the lock in a forked child; the parent process keeps the endpoint."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _locked(path: Path) -> int:
    """Lock a file, which is created if it is missing, and return its descriptor."""
    while True:
        # In a shared folder such as /tmp, another user may have put a link or a pipe at this path.
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                raise ValueError(f"the lock file {path} is not a regular file")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ValueError("another manager listens there") from None
        except BaseException:
            os.close(lock)
            raise
        if _is_still(path, os.fstat(lock)):
            return lock
        os.close(lock)  # the previous owner removed the file before this process locked it


def _remove(path: Path, ours: os.stat_result) -> None:
    """Remove a file, unless another process has replaced it."""
    with contextlib.suppress(OSError):
        if _is_still(path, ours):
            path.unlink()


def _is_still(path: Path, ours: os.stat_result) -> bool:
    try:
        return os.path.samestat(ours, path.lstat())
    except FileNotFoundError:
        return False


def _check_unused(path: Path) -> None:
    """Raise ValueError if the file is not a socket, or a living process listens at the socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError("the file there is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # the socket of a dead process
        except BlockingIOError:
            pass  # a process listens, and its backlog is full
        if _is_alive(probe):
            raise ValueError("another program listens there")


def _is_alive(probe: socket.socket) -> bool:
    """Return true if the listening process lives; its forked child may keep the socket open."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    try:
        pid, _, _ = _PEER.unpack(probe.getsockopt(socket.SOL_SOCKET, option, _PEER.size))
        if pid <= 0:  # a process of another container
            return True
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
