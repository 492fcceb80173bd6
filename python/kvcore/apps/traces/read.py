# SPDX-License-Identifier: Apache-2.0
"""Read a trace of any known format."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.apps.traces.block_rows import read_bailian, read_mooncake
from kvcore.apps.traces.canonical import read_canonical
from kvcore.apps.traces.errors import LineError, TraceError, printable
from kvcore.apps.traces.formats import FORMATS, found_format
from kvcore.apps.traces.lengths import read_azure, read_burstgpt, read_lengths
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.apps.traces.sessions import read_sessions
from kvcore.apps.traces.signatures import check_readable
from kvcore.apps.traces.source import Source, opened
from kvcore.apps.traces.texts import read_openai, read_sharegpt
from kvcore.apps.traces.tokens import read_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcore.apps.replay.workload import Workload
    from kvcore.apps.traces.trace import Trace

__all__ = ["load_trace", "read_trace"]

_BLOCKS = ("block_size", "time_unit")
_LENGTHS = ("prefix_share", "time_unit")

#: For each format its reader, and the options that it may use.
_READERS: dict[str, tuple[Callable[[Source, str, ReadOptions], Trace], tuple[str, ...]]] = {
    "kvcore": (read_canonical, ("block_size", "prefix_share", "time_unit")),
    "mooncake": (read_mooncake, _BLOCKS),
    "bailian": (read_bailian, _BLOCKS),
    "sessions": (read_sessions, _BLOCKS),
    "tokens": (read_tokens, ("time_unit",)),
    "openai": (read_openai, ("time_unit", "tokenizer")),
    "sharegpt": (read_sharegpt, ("tokenizer",)),
    "azure": (read_azure, _LENGTHS),
    "burstgpt": (read_burstgpt, _LENGTHS),
    "lengths": (read_lengths, _LENGTHS),
}


def read_trace(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    format: str | None = None,  # noqa: A002 - the name of the option
    block_size: int | None = None,
    time_unit: str | None = None,
    tokenizer: Any = None,
    prefix_share: float | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Workload:
    """Read a trace, plain or gzip-compressed.

    Parameters
    ----------
    path : str or os.PathLike
        A file or a pipe, read once; "-" is standard input. The first bytes show the compression and
        the format, not the name.
    limit : int, optional
        Read only this many requests from the beginning of the file.
    format : str, optional
        Name of the format, from ``kvcore.replay.TRACE_FORMATS``; found by default.
    block_size : int, optional
        Tokens per block of a trace with block ids; found by default.
    time_unit : {"s", "ms", "us", "ns"}, optional
        Unit of the times; the unit of the format by default.
    tokenizer : str, os.PathLike or tokenizers.Tokenizer, optional
        Tokenizer of a trace with texts: a file, a folder with ``tokenizer.json``, or a name.
    prefix_share : float, optional
        For a trace of lengths: share of each prompt, below 1, that is made up to be equal in all
        prompts.
    on_progress : callable, optional
        Called from time to time with the number of bytes of the file read until now.

    Returns
    -------
    Workload
        The requests, sorted by their arrival. `assumptions` has a line for everything that was
        found or assumed.

    Raises
    ------
    TraceError
        The format is not known, or a row does not follow the format: the text has the file, the
        row, the field and the expected value. The file cannot be read or has no request. The
        distinct blocks need more token ids than int32 has. The text or the blocks exceed their
        bounds. An option has no effect on this trace, such as a block size on token ids.
    ValueError
        An argument is not valid.
    """
    trace = load_trace(
        os.fspath(path),
        ReadOptions(
            limit=limit,
            block_size=block_size,
            time_unit=time_unit,
            tokenizer=tokenizer,
            prefix_share=prefix_share,
        ),
        format_name=format,
        on_progress=on_progress,
    )
    return trace.workload()


def load_trace(
    path: str,
    options: ReadOptions,
    *,
    format_name: str | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Trace:
    """Read a trace into the one form; see `read_trace`."""
    if format_name is not None and format_name not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format_name!r}")
    after = ""
    title = "standard input" if path == "-" else path
    name = "stdin" if path == "-" else printable(Path(path).name)
    try:
        with opened(path, on_progress) as source:
            check_readable(source.beginning)
            found = format_name or found_format(source, title)
            read, used = _READERS[found]
            options.require_used(used, f"the format {found}")
            try:
                trace = read(source, name, options)
            except (OSError, EOFError, zlib.error):
                after = f" after row {source.rows}" if source.rows else ""
                raise
        trace.workload()  # checks the number of token ids
        return trace
    except LineError as error:
        raise TraceError(title, error.line, str(error)) from None
    except TraceError:
        raise
    except ValueError as error:
        raise TraceError(title, None, str(error)) from None
    except MemoryError as error:
        raise TraceError(title, None, "it needs more memory than there is") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(title, None, f"cannot be read{after}: {reason}") from error
