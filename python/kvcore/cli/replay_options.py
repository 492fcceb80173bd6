# SPDX-License-Identifier: Apache-2.0
"""Declare the options of ``kvcore replay``."""

import math
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvcore.replay import DEFAULT_POOL_TOKENS

Number = TypeVar("Number", bound=float | None)

MOST_PAGES = 2**31 - 1
_DEFAULT_PAGES = f"{DEFAULT_POOL_TOKENS:,} tokens' worth"


class Mode(str, Enum):
    """Name the two ways to replay."""

    online = "online"
    admission = "admission"


def _within(least: int, most: float) -> Callable[[Number], Number]:
    """Make an option's check of its bounds; None, "not given", passes."""

    def check(value: Number) -> Number:
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise typer.BadParameter(f"expected {bound}, got {value}")
        return value

    return check


_count = _within(1, MOST_PAGES)
_rate = _within(1, math.inf)

Trace = Annotated[
    Path | None,
    typer.Argument(
        metavar="TRACE",
        help="Mooncake trace, JSONL or JSONL.gz; without one, generated multi-turn chat.",
        show_default=False,
    ),
]
ReplayMode = Annotated[
    Mode, typer.Option("--mode", help="An engine in virtual time, or one prompt after the other.")
]
PageSize = Annotated[int, typer.Option(metavar="N", callback=_count, help="Tokens per page.")]
Pages = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=_count,
        help="Pages per replica.",
        show_default=_DEFAULT_PAGES,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Pool over all replicas, such as 80GiB; needs --model."),
]
Model = Annotated[
    str | None,
    typer.Option(metavar="PRESET|config.json", help="Says how large a page of --memory is."),
]
Replicas = Annotated[
    int, typer.Option(metavar="N", callback=_count, help="Data-parallel replicas.")
]
Seed = Annotated[
    int,
    typer.Option(metavar="N", callback=_within(0, math.inf), help="Seed of the generated chat."),
]
Limit = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=_count,
        help="Only the first N requests.",
        show_default=False,
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(metavar="N", callback=_count, help="Online: requests running at a time."),
]
PrefillRate = Annotated[
    float,
    typer.Option(
        metavar="RATE", callback=_rate, help="Online: prompt tokens per simulated second."
    ),
]
DecodeRate = Annotated[
    float,
    typer.Option(metavar="RATE", callback=_rate, help="Online: decode steps per simulated second."),
]
Chunk = Annotated[
    int,
    typer.Option(metavar="N", callback=_count, help="Online: most prompt tokens per step."),
]
DecodeSteps = Annotated[
    int,
    typer.Option(
        metavar="N",
        callback=_count,
        help="Online: tokens per request in a step without prompts.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
