# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed at any moment while they save a cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moved_requests import moving_manager
from snapshot_contents import assert_right, cached_in, contents_of, filled

KILLS = 40

#: A separate process forks writers, one after the other, and kills them.
KILLER = """
import os, random, signal, sys
sys.path[:0] = {support!r}
from kvcore import moving
from snapshot_contents import filled
manager, draw, path = filled(), random.Random(1), {path!r}
manager.snapshot(path)
for _ in range({kills}):
    size = draw.randrange(1, 16)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            manager.snapshot(path)
            os.write(tell, b".")
    while size > 0:
        size -= len(os.read(told, size))
    for _ in range(draw.randrange(3000)):
        pass
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(told), os.close(tell)
    moving.check_snapshot(path)
    print(path, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "cache.kv"
    wanted = cached_in(filled(), tmp_path)
    code = KILLER.format(support=sys.path, path=str(path), kills=KILLS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == KILLS
    assert contents_of(path) == wanted
    other = moving_manager()
    assert other.restore(path).is_whole
    assert assert_right(other) == 5 * 16
