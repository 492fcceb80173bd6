# SPDX-License-Identifier: Apache-2.0
"""Keys of pages, page by page: a small encoder of canonical CBOR, hashlib, and the rules."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

ExtraKey = tuple[int, int, bytes]


def head(major: int, number: int) -> bytes:
    """Return the head of an item: its number in the fewest bytes."""
    if number < 24:
        return bytes([major << 5 | number])
    size = next(n for n in (1, 2, 4, 8) if number < 1 << 8 * n)
    return bytes([major << 5 | 23 + size.bit_length()]) + number.to_bytes(size, "big")


def encoded(item: Any) -> bytes:
    """Return one item of canonical CBOR (RFC 8949, 4.2.1)."""
    if item is None:
        return b"\xf6"
    if isinstance(item, int):
        return head(0, item) if item >= 0 else head(1, -1 - item)
    if isinstance(item, bytes):
        return head(2, len(item)) + item
    if isinstance(item, str):
        text = item.encode("utf-8", "surrogatepass")
        return head(3, len(text)) + text
    return head(4, len(item)) + b"".join(map(encoded, item))


def digest(item: Any) -> bytes:
    return hashlib.sha256(encoded(item)).digest()


def overlapping(keys: Sequence[ExtraKey], first: int, end: int) -> list[ExtraKey]:
    """Return the extra keys of the tokens first .. end - 1, in order and each once."""
    return [key for key in sorted(set(keys)) if key[0] < end and key[0] + key[1] > first]


def slow_root(
    seed: Any = None, cache_salt: str | None = None, extra_key: str | None = None
) -> bytes:
    return digest(["kvcore", 1, seed, cache_salt, extra_key])


def slow_keys(
    tokens: Sequence[int],
    page_size: int,
    *,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    seed: Any = None,
    extra_keys: Sequence[ExtraKey] = (),
) -> list[bytes]:
    keys = [slow_root(seed, cache_salt, extra_key)]
    for first in range(0, len(tokens) - page_size + 1, page_size):
        end = first + page_size
        overlaps = overlapping(extra_keys, first, end)
        extra = [[key, start - first, length] for start, length, key in overlaps]
        keys.append(digest([keys[-1], list(map(int, tokens[first:end])), extra or None]))
    return keys[1:]


def vllm_keys(
    tokens: Sequence[int],
    page_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    hash_seed: str | None = None,
    images: Sequence[tuple[int, int, str]] = (),
    embeds: Any = None,
) -> list[bytes]:
    """Return vLLM's block keys, with vLLM's extras of each block in vLLM's order."""
    keys = [digest("vllm-none-hash" if hash_seed is None else hash_seed)]
    for first in range(0, len(tokens) - page_size + 1, page_size):
        end = first + page_size
        extra: list[Any] = [] if lora_name is None else [lora_name]
        extra += [
            (name, start - first)
            for start, length, name in images
            if start < end and first < start + length
        ]
        extra += [cache_salt] if first == 0 and cache_salt else []
        if embeds is not None:
            extra.append(hashlib.sha256(embeds[first:end].tobytes()).digest())
        keys.append(digest((keys[-1], tuple(map(int, tokens[first:end])), tuple(extra) or None)))
    return keys[1:]
