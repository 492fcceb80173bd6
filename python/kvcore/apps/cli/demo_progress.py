# SPDX-License-Identifier: Apache-2.0
"""Show a demo while it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from kvcore.apps.demo import ChatServer, DemoSettings, Watcher

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_EVERY_S = 0.1


@contextmanager
def watching(settings: DemoSettings) -> Iterator[Watcher]:
    """Show progress bars on stderr while the block runs, if stderr is a terminal.

    Parameters
    ----------
    settings : DemoSettings
        Settings of the demo: they give the totals of the bars.

    Yields
    ------
    Watcher
        The watcher to pass to ``run_demo``.
    """
    if not sys.stderr.isatty():
        yield Watcher()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TextColumn("{task.fields[seen]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bars(progress, settings)


class _Bars(Watcher):
    """Draw a bar for each part of a demo."""

    def __init__(self, progress: Progress, settings: DemoSettings) -> None:
        self._progress = progress
        turns = settings.chats * settings.turns
        parts = (("prefix cache", turns), ("no prefix cache", turns), ("check", settings.chats))
        self._tasks = [progress.add_task(name, total=total, seen="") for name, total in parts]
        self._due = 0.0

    def serving(self, server: ChatServer) -> None:
        """Show the progress, the speed, the hit rate and the used pages of a run."""
        is_done = server.num_answered == server.num_turns
        if perf_counter() < self._due and not is_done:
            return
        self._due = perf_counter() + _EVERY_S
        cached = server.settings.prefix_caching
        told = [f"{server.tokens_per_second:,.0f} tokens/s"]
        if cached:
            told.append(f"hits {server.hit_rate:.0%}")
        if not is_done:
            used = server.manager.used_blocks_pct
            told += [f"pool {used:.0%}", f"{server.num_running} running"]
        self._show(self._tasks[0 if cached else 1], server.num_answered, ", ".join(told))

    def checking(self, done: int) -> None:
        """Show the number of checked chats."""
        self._show(self._tasks[2], done, f"{done} chats recomputed without a cache")

    def _show(self, task: TaskID, done: int, seen: str) -> None:
        # Redraw now: calls are as rare as the automatic redraws of the bars.
        self._progress.update(task, completed=done, seen=seen, refresh=True)
