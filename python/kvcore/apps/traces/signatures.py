# SPDX-License-Identifier: Apache-2.0
"""Refuse file formats that no reader reads and no writer writes, by their first bytes or names."""

from __future__ import annotations

from pathlib import Path

__all__ = ["check_name", "check_readable"]

_UNPACK = "{} FILE | kvcore replay - reads its rows"
_CONVERT = "pandas.{}(FILE).to_json('rows.jsonl', orient='records', lines=True) writes JSON lines"

#: First bytes, name of the format, and a command that makes a trace of the file.
_SIGNATURES = (
    (b"\x28\xb5\x2f\xfd", "zstd", _UNPACK.format("zstd -dc")),
    (b"\xfd7zXZ\x00", "xz", _UNPACK.format("xz -dc")),
    (b"BZh", "bzip2", _UNPACK.format("bzip2 -dc")),
    (b"\x04\x22\x4d\x18", "lz4", _UNPACK.format("lz4 -dc")),
    (b"PK\x03\x04", "zip", _UNPACK.format("unzip -p")),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", _UNPACK.format("7z x -so")),
    (b"PAR1", "Parquet", _CONVERT.format("read_parquet")),
    (b"ARROW1\x00", "Arrow", _CONVERT.format("read_feather")),
)
_SUFFIXES = frozenset(
    {".zst", ".xz", ".bz2", ".lz4", ".zip", ".7z", ".parquet", ".arrow", ".feather"}
    | {".tar", ".tgz"}
)
_TEXT = frozenset(range(0x20, 0x7F)) | frozenset(b"\t\r\n")
_LOOKED_AT = 16


def check_readable(beginning: bytes) -> None:
    """Refuse a file of a known format that is neither text, gzip nor tar.

    Parameters
    ----------
    beginning : bytes
        First bytes of the file, without its gzip compression.

    Raises
    ------
    ValueError
        The first bytes are the signature of such a format; the text has a command that unpacks or
        converts the file.
    """
    if _TEXT.issuperset(beginning[:_LOOKED_AT]):
        return
    for signature, name, remedy in _SIGNATURES:
        if beginning.startswith(signature):
            raise ValueError(
                f"expected text, gzip or tar, got a file in the format {name}; {remedy}"
            )


def check_name(path: Path) -> None:
    """Refuse a name whose suffix promises a format that no writer of traces has.

    Raises
    ------
    ValueError
        The suffix is that of such a format; the text has it.
    """
    if path.suffix.lower() in _SUFFIXES:
        raise ValueError(
            f"{path.name}: expected a name for JSON lines, or .gz for gzip, got {path.suffix}"
        )
