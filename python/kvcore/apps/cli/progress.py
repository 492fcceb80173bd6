# SPDX-License-Identifier: Apache-2.0
"""Show progress only on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Show a bar on stderr while the block runs.

    Parameters
    ----------
    what : str
        Name of the counted things.
    total : int
        Their number.

    Yields
    ------
    callable or None
        A function of the number done until now; None if stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
