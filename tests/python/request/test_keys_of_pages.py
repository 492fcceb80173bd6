# SPDX-License-Identifier: Apache-2.0
"""The extra keys that overlap each page, from which chained page keys are computed."""

from __future__ import annotations

import random

import pytest

from builders import error_of
from kvcore.extra_keys import ExtraKey, keys_of_pages


def test_two_images() -> None:
    images = [(30, 18, b"dog"), (11, 10, b"cat")]
    assert keys_of_pages(images, 70, 16) == [
        [(b"cat", 11, 10)],
        [(b"cat", -5, 10), (b"dog", 14, 18)],
        [(b"dog", -2, 18)],
        None,
    ]
    assert keys_of_pages(images, 31, 16) == [[(b"cat", 11, 10)]]


@pytest.mark.parametrize("keys", [None, [], ()])
def test_no_keys(keys: list[ExtraKey] | None) -> None:
    assert keys_of_pages(keys, 10, 4) == [None, None]
    assert keys_of_pages(keys, 0, 4) == []


def test_a_key_that_fills_pages_exactly_and_one_beyond_the_end() -> None:
    assert keys_of_pages([(4, 4, b"a")], 12, 4) == [None, [(b"a", 0, 4)], None]
    whole = [[(b"a", start, 2**60)] for start in (3, -1, -5)]
    assert keys_of_pages([(3, 2**60, b"a")], 12, 4) == whole


def test_against_every_token() -> None:
    rng = random.Random(7)
    for _ in range(300):
        page_size, n = rng.randint(1, 5), rng.randint(1, 30)
        keys = [
            (rng.randrange(n), rng.randint(1, 9), rng.choice([b"a", b"b"]))
            for _ in range(rng.randint(0, 5))
        ]
        expected = []
        for page in range(n // page_size):
            span = set(range(page * page_size, (page + 1) * page_size))
            touched = [k for k in sorted(set(keys)) if span & set(range(k[0], k[0] + k[1]))]
            expected.append([(k[2], k[0] - page * page_size, k[1]) for k in touched] or None)
        assert keys_of_pages(keys, n, page_size) == expected


def test_wrong_arguments() -> None:
    for keys, tokens, size, text in [
        ([(0, 1, b"")], 4, 0, "page_size is 0"),
        (None, -1, 4, "num_tokens is -1"),
        ([(4, 1, b"")], 4, 4, "starts at 4"),
        ([(0, 1, b"")], 0, 4, "starts at 0"),
    ]:
        error = error_of(lambda: keys_of_pages(keys, tokens, size))  # noqa: B023
        assert isinstance(error, ValueError)
        assert text in str(error)
