# SPDX-License-Identifier: Apache-2.0
"""Refuse options that a user has given and that have no effect on a command."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import typer

__all__ = ["Use", "require_used"]


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
        What gives them an effect, for the error.
    """

    options: tuple[str, ...]
    is_used: bool
    needs: str


def require_used(context: typer.Context, uses: Iterable[Use]) -> None:
    """Report an option as bad input if the user has given it and it has no effect.

    An option with its default value is not given, unless the command line has it.
    """
    flags = {each.name: each.opts[0] for each in context.command.params}
    for use in uses:
        for name in use.options:
            source = context.get_parameter_source(name)
            if not use.is_used and source is not None and source.name != "DEFAULT":
                raise typer.BadParameter(
                    f"expected {use.needs}; otherwise {flags[name]} has no effect",
                    param_hint=f"'{flags[name]}'",
                )
