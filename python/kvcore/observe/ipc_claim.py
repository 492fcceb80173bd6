# SPDX-License-Identifier: Apache-2.0
"""The sole right to listen at an ``ipc://`` endpoint."""

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
    """Hold an ``ipc://`` endpoint against every other process and manager.

    ZeroMQ removes the file of an endpoint it binds, whoever listens there. So a file beside it,
    ``<path>.lock``, is locked as long as somebody listens; the system unlocks it when a process
    dies. Other endpoints are claimed by binding them alone.

    Parameters
    ----------
    endpoint : str

    Raises
    ------
    ValueError
        Somebody listens there, or there is a file that is no socket.
    OSError
        The folder does not exist or cannot be written.
    """

    def __init__(self, endpoint: str) -> None:
        self._lock = -1
        self._socket: os.stat_result | None = None
        if sys.platform == "win32" or not endpoint.startswith(_IPC):
            return
        path = endpoint.removeprefix(_IPC)
        if path.startswith("@"):  # a name without a file, which the system keeps to one owner
            return
        self._path = Path(path)
        self._lock = _locked(_lock_path(self._path))
        try:
            _check_unused(self._path)
        except BaseException:
            self.release()
            raise

    def bound(self) -> None:
        """Remember the socket, to remove it in the end; ZeroMQ leaves it behind."""
        if self._lock >= 0:
            self._socket = self._path.lstat()

    def release(self) -> None:
        """Remove the socket and let others have the endpoint."""
        if self._lock < 0:
            return
        if self._socket is not None:
            _remove(self._path, self._socket)
        # Removed while it is locked: nobody else can have locked a file of this name.
        _remove(_lock_path(self._path), os.fstat(self._lock))
        self.forget()

    def forget(self) -> None:
        """Leave the endpoint to the process that this one was forked from."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _locked(path: Path) -> int:
    """Lock a file, made if need be, and return its descriptor."""
    while True:
        # Anybody may have put a link or a pipe there, where the folder is of all, such as /tmp.
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                raise ValueError(f"there is a file {path} that is no regular file")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ValueError("another manager listens there") from None
        except BaseException:
            os.close(lock)
            raise
        if _is_still(path, os.fstat(lock)):
            return lock
        os.close(lock)  # its owner removed it before we had it


def _remove(path: Path, ours: os.stat_result) -> None:
    """Remove a file unless somebody put another one in its place."""
    with contextlib.suppress(OSError):
        if _is_still(path, ours):
            path.unlink()


def _is_still(path: Path, ours: os.stat_result) -> bool:
    try:
        return os.path.samestat(ours, path.lstat())
    except FileNotFoundError:
        return False


def _check_unused(path: Path) -> None:
    """Refuse what is no socket, or one behind which a living process listens without a lock."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError("there is a file that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # the socket of a dead process
        except BlockingIOError:
            pass  # somebody listens and has many waiting
        if _is_alive(probe):
            raise ValueError("another program listens there")


def _is_alive(probe: socket.socket) -> bool:
    """Whether the process that listens lives; a child forked from it may hold its socket open."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    try:
        pid, _, _ = _PEER.unpack(probe.getsockopt(socket.SOL_SOCKET, option, _PEER.size))
        if pid <= 0:  # of another container
            return True
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
