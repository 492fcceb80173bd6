# SPDX-License-Identifier: Apache-2.0
"""``kvcore tier``: list, check and remove the files of a disk store in a directory."""

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

app = typer.Typer(help="Inspect or empty a directory of a disk store.", rich_markup_mode=None)


@app.command()
def ls(*, directory: Directory, as_json: options.AsJson = False) -> None:
    """List the contents of the files from their headers; works also while a store uses them.

    Example: kvcore tier ls /var/cache/kv
    """
    _print(
        directory, _asked(_core.inspect_disk_store, os.fsencode(directory), False), as_json=as_json
    )


@app.command()
def verify(*, directory: Directory, as_json: options.AsJson = False) -> None:
    """Read every slot and check its bytes; exit code 1 if a slot is corrupt.

    A store never serves a corrupt page: it drops the page when it reads it.

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
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before removing.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Remove only the store's files from its directory.

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
    """Call a function; no store is bad input, a used or unreadable directory is a failure."""
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
    typer.echo(f"{'owner':<10} {report['owner'] or 'no process'}")
