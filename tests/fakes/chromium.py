# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven through a pipe (the DevTools protocol), for pages that kvcore writes.

Needs only the program ``chromium``, no library and no port.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["Browser", "Shown", "browser"]

_SECONDS = 60.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-extensions", "--disable-background-networking", "--no-first-run", "--mute-audio",
    "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip
# A program that becomes the browser with its end of the pipe at descriptors 3 and 4. The copies of
# the descriptors are above both numbers first, which may be the numbers of the pipe.
_WIRE = """
import os, sys
ends = [os.dup2(int(end), 60 + i) for i, end in enumerate(sys.argv[1:3])]
for i, end in enumerate(ends):
    os.dup2(end, 3 + i)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Shown:
    """A page in a tab, and the errors that its console has until now."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the tab."""
        return self._browser.call(method, params, self._session)

    def value(self, script: str) -> Any:
        """Evaluate a script and return its value; AssertionError if it raises."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, height: int | None = None) -> bytes:
        """Return a PNG of the page from its top; of the whole page without a height."""
        width, full = self.value("[innerWidth, document.documentElement.scrollHeight]")
        size = {"x": 0, "y": 0, "width": width, "height": height or full, "scale": 1}
        found = self.call("Page.captureScreenshot", clip=size, captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def on_event(self, event: dict[str, Any]) -> None:
        """Collect exceptions, messages of the kind error, and refused loads."""
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        if event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))
        if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])


class Browser:
    """The two ends of the pipe to a browser."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._rest = b""
        self._last = 0
        self._loaded = False
        self._on_event: Callable[[dict[str, Any]], None] = lambda _: None

    def show(self, path: Path, *, width: int, scheme: str = "light", height: int = 900) -> Shown:
        """Open a file in a new tab of this width, in a light or dark scheme, and load it."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        shown = Shown(self, attached["sessionId"])
        self._on_event = shown.on_event
        for domain in ("Page", "Runtime", "Log"):
            shown.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        shown.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        shown.call("Emulation.setEmulatedMedia", features=features)
        self._loaded = False
        shown.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + _SECONDS
        while not self._loaded:
            self._take(end)
        return shown

    def call(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """Call a method of the browser, or of a tab by its session; return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _SECONDS
        while True:
            answer = self._take(end)
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def _take(self, end: float) -> dict[str, Any]:
        """Take the next message; TimeoutError at the time `end`."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"chromium sent no message for {_SECONDS} s")
            part = os.read(self._reads, 1 << 16)
            if not part:
                raise ConnectionError("chromium ended")
            self._rest += part
        text, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._loaded = self._loaded or message["method"] == "Page.loadEventFired"
            self._on_event(message)
        return message


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """Run a headless browser and end it, with all its processes."""
    their_reads, our_writes = os.pipe()
    our_reads, their_writes = os.pipe()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        wired = [sys.executable, "-c", _WIRE, str(their_reads), str(their_writes), program]
        command = [*wired, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(their_reads, their_writes),
        )
        os.close(their_reads)
        os.close(their_writes)
        try:
            found = Browser(our_reads, our_writes)
            yield found
            with suppress(ConnectionError, OSError):
                found.call("Browser.close")
        finally:
            os.close(our_writes)
            os.close(our_reads)
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
