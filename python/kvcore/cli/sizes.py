# SPDX-License-Identifier: Apache-2.0
"""Read and write sizes in bytes, and counts of tokens."""

import re
from fractions import Fraction

_UNITS = {"b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS[f"{_prefix}b"] = 1000**_power
    _UNITS[f"{_prefix}ib"] = 1024**_power

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_TOKENS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_MOST_TOKENS = 2**31 - 1
_MOST_CHARACTERS = 40  # more digits than any memory needs

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def _matched(text: str) -> re.Match[str] | None:
    if len(text) > _MOST_CHARACTERS:
        shown = text[:_MOST_CHARACTERS]
        raise ValueError(f"expected at most {_MOST_CHARACTERS} characters, got '{shown}...'")
    return _SIZE.fullmatch(text.strip())


def parse_size(text: str) -> int:
    """Read a size such as ``80GiB``, ``1.5 GB`` or ``4096``.

    Parameters
    ----------
    text : str
        A number and a unit, any case: B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB
        (powers of 1024); no unit means bytes.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ValueError
        For anything else.

    Examples
    --------
    >>> parse_size("1.5 KiB"), parse_size("2kB"), parse_size("77")
    (1536, 2000, 77)
    """
    match = _matched(text)
    factor = _UNITS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"expected a size such as 80GiB, 1.5GB or 4096 (bytes), got {text!r}")
    return int(Fraction(match[1]) * factor)


def format_size(size: int) -> str:
    """Write a number of bytes with the largest binary unit that leaves at least 1.

    Examples
    --------
    >>> format_size(80 << 30), format_size(1536), format_size(1023)
    ('80 GiB', '1.5 KiB', '1023 B')
    """
    power = min((max(size, 1).bit_length() - 1) // 10, len(_BINARY) - 1)
    return f"{round(size / 1024**power, 2):g} {_BINARY[power]}"


def parse_tokens(text: str) -> int:
    """Read a count of tokens such as ``32k`` or ``131072``.

    Parameters
    ----------
    text : str
        A whole number, with k for 1,024 or M for 1,048,576, as context lengths are named; any case.

    Raises
    ------
    ValueError
        For anything else, and outside 1 .. 2**31 - 1.

    Examples
    --------
    >>> parse_tokens("32k"), parse_tokens("1M"), parse_tokens("4096")
    (32768, 1048576, 4096)
    """
    match = _matched(text)
    factor = _TOKENS.get(match[2].lower()) if match else None
    if match is None or factor is None or not match[1].isdecimal():
        raise ValueError(f"expected tokens such as 32k (32768), 1M or 4096, got {text!r}")
    tokens = int(match[1]) * factor
    if not 1 <= tokens <= _MOST_TOKENS:
        raise ValueError(f"expected 1 to {_MOST_TOKENS} tokens, got {text!r}")
    return tokens
