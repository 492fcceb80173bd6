# SPDX-License-Identifier: Apache-2.0
"""The program: ``python -m kvcore`` is the same as ``kvcore``.

The folders of headers and CMake files are printed even without the libraries of the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import kvcore
from kvcore.apps.cli.streams import finish, open_streams, tell

__all__ = ["main"]

_BUILDS_ASK: dict[tuple[str, ...], Callable[[], str]] = {
    ("--cmakedir",): kvcore.get_cmake_dir,
    ("--includes",): kvcore.get_include,
}
_OF_THE_EXTRA = frozenset({"rich", "typer"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments without the program's name; by default ``sys.argv[1:]``.

    Returns
    -------
    int
        The result of ``kvcore.apps.cli.main.main``; 2 without typer and rich.
    """
    given = tuple(sys.argv[1:] if arguments is None else arguments)
    try:
        from kvcore.apps.cli.main import main as run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _OF_THE_EXTRA:
            raise
        return _without_libraries(given, missing)
    return run(given)


def _without_libraries(given: tuple[str, ...], missing: str) -> int:
    open_streams()
    told = _BUILDS_ASK.get(given)
    if told is not None:
        sys.stdout.write(f"{told()}\n")
        return finish(0)
    tell(f"error: the command line needs {missing}; pip install 'kvcore[cli]'")
    return finish(2)


if __name__ == "__main__":
    sys.exit(main())
