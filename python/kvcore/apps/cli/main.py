# SPDX-License-Identifier: Apache-2.0
"""Run the program: the options of ``kvcore`` itself, its commands, and the exit codes of errors."""

import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

import kvcore
from kvcore.apps.cli import tier
from kvcore.apps.cli.demo import demo
from kvcore.apps.cli.generate import generate
from kvcore.apps.cli.info import info
from kvcore.apps.cli.plan import plan
from kvcore.apps.cli.replay import replay
from kvcore.apps.cli.streams import finish, open_streams, tell
from kvcore.apps.cli.traces import app as traces
from kvcore.apps.cli.tune_attention import tune_attention

BAD_INPUT = 2

# The argument parser raises this class for bad usage; the class has no public name.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

app = typer.Typer(
    name="kvcore",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(replay)
app.command()(plan)
app.command()(generate)
app.command()(info)
app.command("tune-attention")(tune_attention)
app.add_typer(tier.app, name="tier")
app.add_typer(traces, name="trace")


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    cmakedir: Annotated[
        bool, typer.Option("--cmakedir", help="Print where kvcoreConfig.cmake is.")
    ] = False,
    includes: Annotated[
        bool, typer.Option("--includes", help="Print the folder of the C++ headers.")
    ] = False,
) -> None:
    """KV-cache core of an LLM inference engine.

    Example: kvcore demo
    """
    if version:
        typer.echo(f"kvcore {kvcore.__version__}")
    elif cmakedir:
        typer.echo(kvcore.get_cmake_dir())
    elif includes:
        typer.echo(kvcore.get_include())
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; ``sys.argv[1:]`` if not given.

    Returns
    -------
    int
        The exit code: 0 for success, 2 for bad input, 1 if the machine fails, 130 for an
        interrupt. The last three print one line on stderr. The code is 1 without this line if
        the reader of the output closed the pipe.
    """
    open_streams()
    return finish(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(given: list[str]) -> int:
    try:
        code = app(given, prog_name="kvcore", standalone_mode=False, obj=given)
    except _UsageError as error:
        tell(f"error: {error.format_message()}")  # type: ignore[attr-defined]
        return BAD_INPUT
    except typer.Abort:
        tell("interrupted")
        return 130
    except SystemExit as ended:  # from a library, after the reader closed the pipe
        return ended.code if isinstance(ended.code, int) else 1
    except MemoryError as error:
        what = str(error) or "it would need more memory than there is"
        tell(f"error: kvcore {' '.join(given)}: {what}")
        return 1
    except OSError as error:
        tell(f"error: {error}")
        return 1
    return int(code or 0)
