# SPDX-License-Identifier: Apache-2.0
"""Pages for stores: the page number determines the bytes, so a test can check each page."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.stores import BlockStore, DiskStore

PAGE = 6000
FINGERPRINT = hashlib.sha256(b"a model").digest()


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def content(number: int, part: int = 0, size: int = PAGE) -> bytes:
    return random.Random(number * 64 + part).randbytes(size)


def quota(pages: int, page_bytes: int = PAGE) -> int:
    """Return the bytes of a directory that has room for `pages` pages."""
    return 4096 + pages * (4096 + -(-page_bytes // 4096) * 4096)


def open_disk(folder: Path, pages: int, page_bytes: int = PAGE, **options: Any) -> DiskStore:
    """Open a store with room for `pages` pages, four in a file."""
    slot = quota(1, page_bytes) - 4096
    return DiskStore(
        f"disk:{folder}:{quota(pages, page_bytes)}",
        page_bytes=page_bytes,
        fingerprint=FINGERPRINT,
        segment_bytes=4 * slot,
        **options,
    )


def put(store: BlockStore, *numbers: int) -> int:
    """Store pages; return the number of stored pages."""
    pages = [content(n) for n in numbers]
    return store.put_from([key(n) for n in numbers], pages).result()


def get(store: BlockStore, *numbers: int) -> int:
    """Read pages and check their bytes; return the number of pages that the store returned."""
    pages = [bytearray(PAGE) for _ in numbers]
    served = store.get_into([key(n) for n in numbers], pages).result()
    check(numbers[:served], pages)
    return served


def check(numbers: Sequence[int], pages: Sequence[bytearray]) -> None:
    for number, page in zip(numbers, pages, strict=False):
        assert page == content(number), f"page {number} differs from the stored page"


def random_page(seed: int, size: int = 5000) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def read_pages(store: BlockStore, keys: list[bytes], size: int = 5000) -> tuple[int, list[Any]]:
    """Return the number of pages that a store reads, and the pages."""
    to = [np.zeros(size, np.uint8) for _ in keys]
    return store.get_into(keys, to).result(), to
