# SPDX-License-Identifier: Apache-2.0
"""Starts ``vllm serve`` on the loopback address, and streams from it with many clients at once."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
START_SECONDS = 600.0
CLIENTS = 16


def free_port() -> int:
    """Return a port that no process uses."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


@contextmanager
def server(
    python: Path, model: Path, engine: dict[str, Any], environment: dict[str, str], log: Path
) -> Iterator[int]:
    """Serve a model until the end of the block; yield the port."""
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", HOST, "--port", str(port), "--served-model-name", "model"]
    for name, value in engine.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [flag, str(value)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            wait_until_up(process, port, log)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            # A server that did not end in time may leave processes in its session.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when the server answers; raise RuntimeError if it ends or takes too long."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            connection = http.client.HTTPConnection(HOST, port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"vllm serve does not start:\n{log.read_text()[-4000:]}")


def stream(port: int, tokens: list[int], count: int, hang_up_after: int | None) -> list[int]:
    """Return the answer to a prompt, or the tokens before the client hangs up."""
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    body = {"model": "model", "prompt": tokens, "max_tokens": count, "temperature": 0.0,
            "ignore_eos": True, "stream": True, "return_token_ids": True}  # fmt: skip
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read()[:500]!r}")
    answer: list[int] = []
    try:
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            answer += choice.get("token_ids") or ()
            if hang_up_after is not None and len(answer) >= hang_up_after:
                break
    finally:
        connection.close()
    return answer[:hang_up_after]


def serve_all(
    port: int, wanted: list[tuple[list[int], int]], gone: set[int]
) -> dict[str, list[int]]:
    """Stream an answer to each prompt, `CLIENTS` at a time; the clients in `gone` hang up."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = clients.map(
            lambda i: stream(port, *wanted[i], 2 if i in gone else None), range(len(wanted))
        )
        return {str(i): answer for i, answer in enumerate(answers)}
