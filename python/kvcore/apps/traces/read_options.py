# SPDX-License-Identifier: Apache-2.0
"""The options of a reader; an option that has no effect on a trace is refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

__all__ = ["ReadOptions", "require_used"]

#: Options that only some traces use, with the content of these traces.
_USES = {
    "block_size": "block ids",
    "time_unit": "numbers as times",
    "tokenizer": "texts",
    "prefix_share": "only lengths",
}


def require_used(option: str, found: str, *, is_used: bool) -> None:
    """Refuse an option without effect.

    Parameters
    ----------
    option : str
        Field of `ReadOptions`.
    found : str
        The trace that does not use the option, such as "the format azure".

    Raises
    ------
    ValueError
        The option is not used.
    """
    if not is_used:
        name = f"--{option.replace('_', '-')}"
        raise ValueError(
            f"{name} is for traces with {_USES[option]}, and has no effect on {found}; leave out "
            f"{name}"
        )


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What the user has said about a trace; see `kvcore.replay.read_trace`."""

    limit: int | None = None
    block_size: int | None = None
    time_unit: str | None = None
    tokenizer: Any = None
    prefix_share: float | None = None

    def require_used(self, used: Collection[str], found: str) -> None:
        """Refuse given options that are not in `used`; ValueError as of `require_used`."""
        for option in _USES:
            is_given = getattr(self, option) is not None
            require_used(option, found, is_used=not is_given or option in used)
