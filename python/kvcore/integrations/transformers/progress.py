# SPDX-License-Identifier: Apache-2.0
"""The progress reports of a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Report", "progress_reports"]

#: Called with the numbers of finished sequences and of generated tokens.
Report = Callable[[int, int], None]


@contextmanager
def progress_reports(
    wanted: bool | Report | None,  # noqa: FBT001 - generate passes its argument on
    sequences: int,
) -> Iterator[Report | None]:
    """Yield the callback for each step: the caller's own, a terminal bar's, or None."""
    if callable(wanted):
        yield wanted
    elif wanted:
        with _bar(sequences) as report:
            yield report
    else:
        yield None


@contextmanager
def _bar(sequences: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("generate"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("sequences, {task.fields[tokens]} tokens"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sequences, tokens=0)
        yield lambda done, tokens: bar.update(task, completed=done, tokens=tokens)
