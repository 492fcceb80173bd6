# SPDX-License-Identifier: Apache-2.0
"""Check the option values of all commands."""

import math
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

MOST_PAGES = 2**31 - 1
MOST_VALUES = 64

Number = TypeVar("Number", bound=float | None)
Result = TypeVar("Result")


def within(least: int, most: float) -> Callable[[Number], Number]:
    """Make a callback that checks the bounds of an option; None, an option not given, passes."""

    def check(value: Number) -> Number:
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise typer.BadParameter(f"expected {bound}, got {value}")
        return value

    return check


count = within(1, MOST_PAGES)


def listed(text: str, read: Callable[[str], Result]) -> tuple[Result, ...]:
    """Read distinct values separated by commas; ValueError for a duplicate or too many values."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MOST_VALUES:
        raise ValueError(f"expected at most {MOST_VALUES} values, got {len(parts)}")
    values = tuple(read(part) for part in parts)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ValueError(f"expected each value once, got {value} twice")
    return values


def pages(text: str) -> int:
    """Read a number of pages; ValueError for any other text."""
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"expected a whole number of pages, got {text!r}") from None
    if not 1 <= value <= MOST_PAGES:
        raise ValueError(f"expected 1 to {MOST_PAGES}, got {value}")
    return value


def checked(option: str, read: Callable[..., Result], *arguments: object) -> Result:
    """Call `read`; report its ValueError as bad input of the option."""
    try:
        return read(*arguments)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from error


def fitting_pages(memory: int, replicas: int, page_bytes: int, beside: int = 0) -> int:
    """Return the pages of each replica in `memory` bytes; bad input if they are 0 or too many.

    The states of each replica also take a part of `memory`.
    """
    pages = (memory // replicas - beside) // page_bytes
    if 1 <= pages <= MOST_PAGES:
        return pages
    raise typer.BadParameter(
        f"expected room for 1 to {MOST_PAGES} pages of {page_bytes} bytes"
        f"{f' and {beside} bytes of states' if beside else ''} on each of "
        f"{replicas} replicas, got {memory} bytes",
        param_hint="'--memory'",
    )


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
PageSize = Annotated[int, typer.Option(metavar="N", callback=count, help="Tokens per page.")]
