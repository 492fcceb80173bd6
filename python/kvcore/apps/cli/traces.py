# SPDX-License-Identifier: Apache-2.0
"""``kvcore trace``: convert traces, and capture them from an engine."""

import math
from pathlib import Path
from typing import Annotated

import typer

from kvcore.apps.cli import replay_options as options
from kvcore.apps.cli.options import checked
from kvcore.apps.cli.output_file import check_writable
from kvcore.apps.cli.progress import progress_bar
from kvcore.apps.traces.canonical import write_trace
from kvcore.apps.traces.clock import UNITS
from kvcore.apps.traces.formats import FORMATS
from kvcore.apps.traces.read import load_trace
from kvcore.apps.traces.rows import ReadOptions
from kvcore.apps.traces.trace import Trace
from kvcore.replay import TraceError

app = typer.Typer(help="Convert logs of requests to one form.", rich_markup_mode=None)

_STDIN = Path("-")


@app.callback()
def _commands() -> None:
    """Convert logs of requests to one form, and capture them from an engine."""


def read_with_progress(path: Path, given: ReadOptions, format_name: str | None) -> Trace:
    """Read a trace with a progress bar; report a bad trace or option as bad input."""
    if format_name is not None and format_name not in FORMATS:
        raise typer.BadParameter(
            f"expected one of {', '.join(FORMATS)}, got {format_name!r}", param_hint="'--format'"
        )
    if given.time_unit is not None and given.time_unit not in UNITS:
        raise typer.BadParameter(
            f"expected one of {', '.join(UNITS)}, got {given.time_unit!r}",
            param_hint="'--time-unit'",
        )
    share = given.prefix_share
    if share is not None and (math.isnan(share) or not 0 <= share < 1):
        raise typer.BadParameter(
            f"expected 0 to less than 1, got {share}", param_hint="'--prefix-share'"
        )
    size = path.stat().st_size if path != _STDIN and path.is_file() else 0
    try:
        with progress_bar("bytes", max(size, 1)) as on_progress:
            trace = load_trace(
                str(path), given, format_name=format_name, on_progress=on_progress if size else None
            )
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint="'TRACE'") from error
    return trace


@app.command()
def convert(
    *,
    trace: Annotated[
        Path, typer.Argument(metavar="IN", help="A log in a known format; - for stdin.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file; compressed if it ends in .gz.")
    ],
    format_name: options.TraceFormat = None,
    block_size: options.BlockSize = None,
    time_unit: options.TimeUnit = None,
    tokenizer: options.Tokenizer = None,
    prefix_share: options.PrefixShare = None,
    limit: options.Limit = None,
) -> None:
    """Convert a log of requests to kvcore's own format: a header, and a JSON line per request.

    A replay of OUT is a replay of IN. Texts become token ids.

    Example: kvcore trace convert azure.csv trace.jsonl.gz
    """
    checked("OUT", check_writable, target, trace if trace != _STDIN else None)
    given = ReadOptions(
        limit=limit,
        block_size=block_size,
        time_unit=time_unit,
        tokenizer=tokenizer,
        prefix_share=prefix_share,
    )
    found = read_with_progress(trace, given, format_name)
    with progress_bar("requests", len(found)) as on_progress:
        write_trace(found, target, on_progress)
    typer.echo(f"{len(found):,} requests from {found.format} to {target}")
    for line in found.notes:
        typer.echo(line)
