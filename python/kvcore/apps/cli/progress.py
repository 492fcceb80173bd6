# SPDX-License-Identifier: Apache-2.0
"""Show progress on a terminal, and nowhere else."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Show a bar on stderr while the block runs.

    Parameters
    ----------
    what : str
        What is counted.
    total : int
        How many there are.

    Yields
    ------
    callable or None
        Takes the number done so far; None when stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
