# SPDX-License-Identifier: Apache-2.0
"""Listeners for resets: one per endpoint, across forks, destroyed contexts and process ends."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders import make_manager, put_in_cache
from conftest import require, slow_but
from interrupted_starts import MOMENTS, interrupt_starts, threads_named
from kvcore.observe.zmq_reset import ResetListener
from reset_sender import base, fetch_until_reset, send_reset
from together import run_together, switch_often
from waiting import wait_until

__all__ = ["base", "switch_often"]

zmq = require("zmq")

PROMPT = list(range(12))

# ---- one listener per endpoint ----------------------------------------------------------------

# Listens, prints a line, and waits for a line of input.
LISTEN = """
import sys
from kvcore.observe.zmq_reset import ResetListener
listener = ResetListener(sys.argv[1])
print("listening", flush=True)
sys.stdin.readline()
"""


def files(base: str) -> list[str]:
    """Return the files in the folder of the endpoint."""
    folder = Path(base.removeprefix("ipc://")).parent
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def other_process(base: str) -> Iterator[subprocess.Popen[str]]:
    """A process that listens at the endpoint."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, base],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield process
        process.kill()


def test_second_manager_at_an_endpoint_is_refused(base: str) -> None:
    manager = make_manager(zmq_endpoint_base=base)
    put_in_cache(manager, PROMPT)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cannot listen at ipc:.*another manager listens"):
            make_manager(zmq_endpoint_base=base)
    send_reset(base)
    fetch_until_reset(manager, PROMPT)


def test_a_constructor_that_failed_leaves_the_endpoint_free(base: str) -> None:
    with pytest.raises(ValueError, match="blocks") as failed:
        make_manager(zmq_endpoint_base=base, blocks=[])
    make_manager(zmq_endpoint_base=base)
    assert failed.value.__traceback__ is not None  # the traceback holds the constructor's objects


def test_endpoint_of_another_process_is_refused(
    base: str, other_process: subprocess.Popen[str]
) -> None:
    with pytest.raises(ValueError, match="another manager listens"):
        ResetListener(base)
    other_process.communicate("end\n")
    assert other_process.returncode == 0
    assert files(base) == []
    ResetListener(base).close()


def test_socket_of_a_dead_process_is_taken_over(
    base: str, other_process: subprocess.Popen[str]
) -> None:
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    assert files(base) == ["kv-reset_prefix_cache", "kv-reset_prefix_cache.lock"]
    listener = ResetListener(base)
    send_reset(base)
    wait_until(listener.is_asked)
    listener.close()
    assert files(base) == []


def test_socket_of_another_program_is_left_alone(base: str) -> None:
    path = f"{base}-reset_prefix_cache".removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        with pytest.raises(ValueError, match="another program listens"):
            ResetListener(base)
        assert files(base) == ["kv-reset_prefix_cache"]
    ResetListener(base).close()  # no process listens any more


def test_file_that_is_no_socket_is_left_alone(base: str) -> None:
    path = Path(f"{base}-reset_prefix_cache".removeprefix("ipc://"))
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a socket"):
        ResetListener(base)
    assert path.read_text(encoding="utf-8") == "mine"
    assert files(base) == ["kv-reset_prefix_cache"]


@pytest.mark.parametrize(
    "base", ["ipc:///no/such/folder/kv", f"ipc:///tmp/{'x' * 200}", "nonsense", ""]
)
def test_endpoints_at_which_nobody_can_listen_are_value_errors(base: str) -> None:
    with pytest.raises(ValueError, match="cannot listen at"):
        ResetListener(base)


@pytest.mark.usefixtures("switch_often")
def test_of_many_at_once_one_listens(base: str) -> None:
    for _ in range(10):
        got: list[ResetListener] = []

        def work(_: int, got: list[ResetListener] = got) -> None:
            with contextlib.suppress(ValueError):
                got.append(ResetListener(base))

        run_together(work)
        assert len(got) == 1
        got.pop().close()


# ---- contexts, closing, forks -----------------------------------------------------------------


def test_contexts_that_others_destroy_do_no_harm(base: str) -> None:
    manager = make_manager(zmq_endpoint_base=base)
    put_in_cache(manager, PROMPT)
    zmq.Context.instance().destroy(linger=0)
    manager.fetch([])
    send_reset(base)
    fetch_until_reset(manager, PROMPT)


@pytest.mark.parametrize("how", ["term", "destroy"])
def test_shared_context_that_ends_closes_the_listener(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only inproc:// sockets are reached through the context of the program."""
    listener = ResetListener("inproc://kv")
    with zmq.Context.instance().socket(zmq.PUSH) as socket:
        socket.connect(listener.endpoint)
        socket.send(b"reset")
        wait_until(listener.is_asked)
    with caplog.at_level(logging.WARNING, "kvcore"):
        getattr(zmq.Context.instance(), how)()
        wait_until(lambda: not listener.is_listening)
    assert "inproc://kv-reset_prefix_cache no longer reset" in caplog.text
    assert not listener.is_asked()
    listener.close()


def contexts_of_zmq() -> list[Any]:
    # Check only the type: some objects override `__class__`, and warn at each access.
    return [each for each in gc.get_objects() if issubclass(type(each), zmq.Context)]


def test_own_context_that_ends_closes_the_listener(
    base: str, caplog: pytest.LogCaptureFixture
) -> None:
    zmq.Context.instance()
    others = contexts_of_zmq()
    manager = make_manager(zmq_endpoint_base=base)
    with caplog.at_level(logging.WARNING, "kvcore"):
        for context in contexts_of_zmq():
            if not any(context is other for other in others):
                context.term()
        wait_until(lambda: files(base) == [])
    manager.fetch([])
    assert manager.match_prefix(PROMPT) == 0
    assert "no longer reset the prefix cache" in caplog.text


def test_closing_is_final_and_may_be_repeated(base: str) -> None:
    listener = ResetListener(base)
    assert listener.is_listening
    for _ in range(3):
        listener.close()
        assert not listener.is_listening
        assert not listener.is_asked()
    assert files(base) == []


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors cannot be counted")
def test_listeners_leave_no_thread_descriptor_or_file(base: str) -> None:
    def held() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    ResetListener(base).close()
    gc.collect()  # objects of earlier tests
    before = held()
    for _ in range(5):
        ResetListener(base)
        gc.collect()
    assert all(now <= then for now, then in zip(held(), before, strict=True))
    assert files(base) == []


# The child queries, closes, collects and exits like a program; the parent still gets resets.
FORK = """
import gc, os, sys
from kvcore.observe.zmq_reset import ResetListener
listener = ResetListener(sys.argv[1])
child = os.fork()
if child == 0:
    assert not listener.is_asked() and not listener.is_listening
    try:
        ResetListener(sys.argv[1])
    except ValueError:
        pass
    else:
        sys.exit("two listen")
    if sys.argv[2] == "close":
        listener.close()
    elif sys.argv[2] == "collect":
        del listener
        gc.collect()
    sys.exit(7)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), listener.is_listening, flush=True)
while not listener.is_asked():
    pass
print("heard", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("ending", slow_but(["exit"], ["close", "collect", "exit"]))
def test_forked_child_leaves_the_parents_listener_alone(base: str, ending: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, base, ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "7 True\n"
        send_reset(base)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (out, err, process.returncode) == ("heard\n", "", 0)
    assert files(base) == []


# The parent is killed; its child lives on and holds the inherited socket.
ORPHAN = """
import os, sys
from kvcore.observe.zmq_reset import ResetListener
listener = ResetListener(sys.argv[1])
if os.fork() == 0:
    print("listening", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="needs the listener's process id")
def test_socket_of_a_dead_parent_is_taken_over(base: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ORPHAN, base],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        listener = ResetListener(base)
        send_reset(base)
        wait_until(listener.is_asked)
        listener.close()


ENDINGS = {
    "plain": "",
    "exit": "sys.exit(0)",
    "cycle": "class A: pass\na = A(); a.a, a.listener = a, listener; del listener, a",
    "error": "raise SystemExit(0)",
    "context": "import zmq; zmq.Context.instance().destroy()",
}


@pytest.mark.parametrize("ending", slow_but(["plain", "cycle"], ENDINGS))
def test_program_that_listens_ends(base: str, ending: str) -> None:
    code = (
        "import sys\nfrom kvcore.observe.zmq_reset import ResetListener\n"
        f"listener = ResetListener(sys.argv[1])\n{ENDINGS[ending]}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, base], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert files(base) == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_that_meets_the_start_leaves_neither_thread_nor_socket(
    base: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with monkeypatch.context() as patch:
        interrupt_starts(patch, "kvcore-reset", moment, lambda: True)
        with pytest.raises(KeyboardInterrupt):
            ResetListener(base)
    assert threads_named("kvcore-reset") == []
    assert files(base) == []
    listener = ResetListener(base)
    assert listener.is_listening
    listener.close()


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
@pytest.mark.parametrize("suffix", ["", ".lock"])
def test_a_link_or_a_pipe_in_the_place_of_a_file_is_left_alone(
    base: str, kind: str, suffix: str
) -> None:
    path = Path(f"{base}-reset_prefix_cache{suffix}".removeprefix("ipc://"))
    target = path.with_name("target")
    if kind == "link":
        target.write_text("of somebody else")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    with pytest.raises(ValueError, match="cannot listen at ipc:"):
        ResetListener(base)
    assert target.exists() == (kind == "link")
    assert kind != "link" or target.read_text() == "of somebody else"
    path.unlink()
    ResetListener(base).close()
