# SPDX-License-Identifier: Apache-2.0
"""Read counts of tokens."""

from kvcore.support.byte_sizes import match_quantity

_TOKENS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_MOST_TOKENS = 2**31 - 1


def parse_tokens(text: str) -> int:
    """Read a count of tokens such as ``32k`` or ``131072``.

    Parameters
    ----------
    text : str
        A whole number, optionally with k (1,024) or M (1,048,576), in any case.

    Raises
    ------
    ValueError
        The text has another form, or the count is not in 1 .. 2**31 - 1.

    Examples
    --------
    >>> parse_tokens("32k"), parse_tokens("1M"), parse_tokens("4096")
    (32768, 1048576, 4096)
    """
    match = match_quantity(text)
    factor = _TOKENS.get(match[2].lower()) if match else None
    if match is None or factor is None or not match[1].isdecimal():
        raise ValueError(f"expected tokens such as 32k (32768), 1M or 4096, got {text!r}")
    tokens = int(match[1]) * factor
    if not 1 <= tokens <= _MOST_TOKENS:
        raise ValueError(f"expected 1 to {_MOST_TOKENS} tokens, got {text!r}")
    return tokens
