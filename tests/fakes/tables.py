# SPDX-License-Identifier: Apache-2.0
"""Tests that are one table: each row is a call and its expected answer or refusal."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def table(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test function for every row, and report each row that fails.

    The test is one test of pytest, so that a row costs no more than its call. A row that needs
    fixtures of its own, a mark or a skip belongs into ``pytest.mark.parametrize``.

    Parameters
    ----------
    names : str or tuple of str
        The arguments of the test that a row has.
    rows : iterable
        The rows: a value for a single name, a tuple of values for a tuple of names.

    Returns
    -------
    decorator : callable
        Makes a test of the test function.
    """
    given = list(rows)
    columns = (names,) if isinstance(names, str) else names
    assert given, "a table needs rows"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            failed: list[tuple[str, BaseException]] = []
            for row in given:
                values = (row,) if isinstance(names, str) else row
                change = dict(zip(columns, values, strict=True))
                try:
                    test(*args, **fixtures, **change)
                except pytest.skip.Exception as error:
                    raise AssertionError("a row skips; use pytest.mark.parametrize") from error
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - reported below
                    failed.append((repr(change), error))
            if failed:
                told = "\n".join(f"{row}: {error!r}" for row, error in failed)
                raise AssertionError(f"{len(failed)} of {len(given)} rows fail:\n{told}") from (
                    failed[0][1]
                )

        signature = inspect.signature(test)
        kept = [each for name, each in signature.parameters.items() if name not in columns]
        assert len(kept) + len(columns) == len(signature.parameters), "a column has no argument"
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
