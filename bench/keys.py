# SPDX-License-Identifier: Apache-2.0
"""Compare computing the keys of a prompt with SHA-256 of the same bytes.

The limit is OpenSSL's SHA-256 of the hashed bytes: the items of all pages in canonical CBOR, in one
piece and thus without the padding of each page. ``extend`` adds the tokens of one page to a chain.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from functools import partial

from harness import Row, main, make_row, repeat_calls, sample_calls
from kvcore.keys import KeyChain, page_keys
from limits import sha256_us
from workload import Tokens, prompts

_PAGES = (16, 64, 128)
_STEPS = 20_000


def _item_bytes(tokens: Tokens, page_size: int) -> int:
    """Return the bytes of all pages: 1, 2, 3 or 5 per token, and 37 or more per page."""
    of_tokens = 1 + (tokens >= 24) + (tokens >= 1 << 8) + 2 * (tokens >= 1 << 16)
    head = 1 if page_size < 24 else 2 if page_size < 1 << 8 else 3
    return int(of_tokens.sum()) + tokens.size // page_size * (36 + head)


def _prompt(page_size: int, tokens: int) -> Row:
    prompt = prompts(1, tokens, 6)[0]
    size = _item_bytes(prompt, page_size)
    limit = statistics.median(sha256_us(size))
    samples = repeat_calls(partial(page_keys, page_size=page_size), prompt, tokens)
    limit = min(limit, statistics.median(sha256_us(size)))
    name = f"keys of {tokens:,} tokens, pages of {page_size}"
    more = {"limit": limit, "limit_name": "SHA-256 of the bytes"}
    return make_row(f"keys.{page_size}.{tokens}", name, samples, **more)


def _extend() -> Row:
    """Measure adding one key to the chain of a growing prompt."""
    pages = list(prompts(1, _STEPS * 16, 7).reshape(-1, 16))
    samples = sample_calls(KeyChain(16).extend, pages, _STEPS // 40)
    return make_row("keys.extend", "one page of 16 more", samples)


def measure(options: Namespace) -> list[Row]:
    """Measure whole prompts by page size, and adding one page."""
    lengths = (8192,) if options.quick else (8192, 131_072)
    return [*(_prompt(page, tokens) for tokens in lengths for page in _PAGES), _extend()]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
