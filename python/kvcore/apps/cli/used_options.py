# SPDX-License-Identifier: Apache-2.0
"""Report options that a user has given and that have no effect on a command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import typer

__all__ = ["Use", "require_used", "warn_unused"]


@dataclass(frozen=True)
class Use:
    """Whether options have an effect.

    Attributes
    ----------
    options : tuple of str
        Names of the parameters of the command.
    is_used : bool
        Whether the options have an effect on this call.
    needs : str
        What gives them an effect, for the error or the warning.
    """

    options: tuple[str, ...]
    is_used: bool
    needs: str


def require_used(context: typer.Context, uses: Iterable[Use]) -> None:
    """Report an option as bad input if the user has given it and it has no effect.

    An option with its default value is not given, unless the command line has it.
    """
    for flag, needs in _unused(context, uses):
        raise typer.BadParameter(
            f"expected {needs}; otherwise {flag} has no effect", param_hint=f"'{flag}'"
        )


def warn_unused(context: typer.Context, uses: Iterable[Use]) -> None:
    """Print a warning to stderr for each option that the user has given and that has no effect.

    For options that a script may give to each of its calls, such as a seed.
    """
    for flag, needs in _unused(context, uses):
        typer.echo(f"kvcore: warning: {flag} has no effect: expected {needs}", err=True)


def _unused(context: typer.Context, uses: Iterable[Use]) -> Iterator[tuple[str, str]]:
    """Yield the flag of each given option without effect, and what gives it an effect."""
    flags = {each.name: each.opts[0] for each in context.command.params}
    for use in uses:
        for name in use.options:
            source = context.get_parameter_source(name)
            if not use.is_used and source is not None and source.name != "DEFAULT":
                yield flags[name], use.needs
