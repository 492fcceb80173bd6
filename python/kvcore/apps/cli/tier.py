# SPDX-License-Identifier: Apache-2.0
"""``kvcore tier``: look at what a disk store left in a directory, check it, and remove it."""

import json
import os
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from kvcore import KVCacheError, _core
from kvcore.apps.cli import options
from kvcore.apps.cli.streams import tell
from kvcore.support.byte_sizes import format_size

Result = TypeVar("Result")

Directory = Annotated[str, typer.Argument(metavar="DIR", help="A directory of a disk store.")]

app = typer.Typer(help="Look at the directories of disk stores.", rich_markup_mode=None)


@app.command()
def ls(*, directory: Directory, as_json: options.AsJson = False) -> None:
    """Tell what the files hold, by their headers; also while a store uses them.

    Example: kvcore tier ls /var/cache/kv
    """
    _print(
        directory, _asked(_core.inspect_disk_store, os.fsencode(directory), False), as_json=as_json
    )


@app.command()
def verify(*, directory: Directory, as_json: options.AsJson = False) -> None:
    """Read every slot and check its bytes; exit code 1 if some are not those that were written.

    Such pages are never served: a store drops them when it reads them.

    Example: kvcore tier verify /var/cache/kv
    """
    report = _asked(_core.inspect_disk_store, os.fsencode(directory), True)
    _print(directory, report, as_json=as_json)
    if report["corrupt"]:
        raise typer.Exit(1)


@app.command()
def purge(
    *,
    directory: Directory,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Remove a store's files, and nothing else, from its directory.

    Example: kvcore tier purge /var/cache/kv --yes
    """
    report = _asked(_core.inspect_disk_store, os.fsencode(directory), False)
    if report["owner"]:
        _fail(f"directory {directory} is in use by process {report['owner']}; close that store")
    if not yes:
        size = format_size(report["file_bytes"])
        typer.confirm(
            f"Remove {report['stored']:,} pages ({size}) from {directory}?", abort=True, err=True
        )
    removed = _asked(_core.purge_disk_store, os.fsencode(directory))
    if as_json:
        typer.echo(json.dumps({"directory": directory, "removed_bytes": removed}))
    else:
        typer.echo(f"removed {format_size(removed)} from {directory}")


def _asked(call: Callable[..., Result], *arguments: object) -> Result:
    """Call; a directory without a store is bad input, one in use or unreadable a failure."""
    try:
        return options.checked("DIR", call, *arguments)
    except KVCacheError as error:
        _fail(str(error))


def _fail(text: str) -> NoReturn:
    tell(f"error: {text}")
    raise typer.Exit(1)


def _print(directory: str, report: dict[str, Any], *, as_json: bool) -> None:
    fingerprints = {key.hex(): pages for key, pages in report.pop("fingerprints").items()}
    answer = {"directory": directory} | report | {"fingerprints": fingerprints}
    if as_json:
        typer.echo(json.dumps(answer))
        return
    typer.echo(f"{'slots':<10} {report['slots']:,} of {format_size(report['slot_bytes'])}")
    typer.echo(f"{'pages':<10} {report['stored']:,}, {format_size(report['payload_bytes'])}")
    for key, pages in fingerprints.items():
        typer.echo(f"{'':<10} {pages:,} of {key[:16]}")
    typer.echo(f"{'files':<10} {format_size(report['file_bytes'])}")
    typer.echo(f"{'corrupt':<10} {report['corrupt']:,}")
    for slot in report["bad_slots"]:
        typer.echo(f"{'':<10} {slot}")
    typer.echo(f"{'owner':<10} {report['owner'] or 'nobody'}")
