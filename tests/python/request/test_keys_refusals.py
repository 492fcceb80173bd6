# SPDX-License-Identifier: Apache-2.0
"""Invalid prompts, keys and schemes are refused with the value, the bound and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore import keys

#: For calls that a type checker refuses.
ANY: Any = keys


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: ANY.page_keys([1], 0),
            ValueError,
            "page_size is 0, must be 1 .. 2147483647",
        ),
        (lambda: ANY.page_keys([1], 2**31), ValueError, "page_size is 2147483648"),
        (lambda: ANY.page_keys([1], 2.0), TypeError, "page_size is a float, must be an int"),
        (lambda: ANY.KeyChain(-1), ValueError, "page_size is -1"),
        (lambda: ANY.page_keys([2**31], 1), ValueError, "token 0 is 2147483648, must be"),
        (
            lambda: ANY.page_keys(np.ones((2, 2), np.int32), 1),
            ValueError,
            "must have one dim",
        ),
        (lambda: ANY.page_keys(b"abc", 1), TypeError, "tokens are a bytes"),
        (
            lambda: ANY.page_keys([1], 1, extra_key=5),
            TypeError,
            "extra_key is a int, must be",
        ),
        (lambda: ANY.page_keys([1], 1, cache_salt=b"a"), TypeError, "cache_salt is a bytes"),
        (
            lambda: ANY.page_keys([1], 1, seed=1.5),
            TypeError,
            "seed is a float, must be a str",
        ),
        (lambda: ANY.page_keys([1], 1, seed=True), TypeError, "seed is a bool"),
        (lambda: ANY.page_keys([1], 1, seed=2**64), ValueError, "seed is 18446744073709551616"),
        (lambda: ANY.root_key(seed=b"0", scheme="vllm"), TypeError, "must be a str or an int"),
        (
            lambda: ANY.root_key(scheme="sglang"),
            ValueError,
            "scheme is 'sglang', must be",
        ),
        (lambda: ANY.root_key(scheme=None), TypeError, "scheme is a NoneType"),
        (
            lambda: ANY.page_keys([1], 1, extra_keys=[(1, 1, b"")]),
            ValueError,
            "starts at 1, must",
        ),
        (
            lambda: ANY.page_keys([1], 1, extra_keys=[(0, 1, b"\xff")], scheme="vllm"),
            ValueError,
            "must be UTF-8 with scheme 'vllm'",
        ),
        (
            lambda: ANY.page_keys([1], 1, prompt_embeds=np.ones((1, 1))),
            ValueError,
            "prompt_embeds are given with scheme 'kvcore'",
        ),
        (
            lambda: ANY.page_keys([1], 1, prompt_embeds=[[1]], scheme="vllm"),
            TypeError,
            "prompt_embeds is a list, must be an array",
        ),
        (
            lambda: ANY.page_keys([1], 1, prompt_embeds=np.ones(3), scheme="vllm"),
            ValueError,
            "must be .tokens, elements.",
        ),
        (
            lambda: ANY.page_keys([1], 1, prompt_embeds=np.array([[None]]), scheme="vllm"),
            TypeError,
            "prompt_embeds have dtype object",
        ),
        (lambda: ANY.page_key(b"abc", [1]), ValueError, "parent has 3 bytes, must have 32"),
        (lambda: ANY.page_key(None, [1]), TypeError, "parent is a NoneType.*root_key"),
        (lambda: ANY.page_key(bytearray(32), [1]), TypeError, "parent is a bytearray"),
        (lambda: ANY.page_key(bytes(32), [1], "abc"), TypeError, "extra is a str"),
        (lambda: ANY.page_key(bytes(32), [1], [1.5]), TypeError, r"extra\[0\] is a float"),
        (
            lambda: ANY.page_key(bytes(32), [1], [(b"", True)]),
            TypeError,
            r"\[0\]\[1\] is a bool",
        ),
        (
            lambda: ANY.page_key(bytes(32), [1], [2**63]),
            ValueError,
            r"extra\[0\] is 92233720368547",
        ),
    ],
)
def test_what_is_wrong_is_said(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_lists_in_lists_come_to_an_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="16 lists deep, must be at most 15"):
        ANY.page_key(bytes(32), [1], endless)


def test_subclasses_are_what_their_content_is() -> None:
    """Methods that subclasses override do not matter."""

    class Bytes(bytes):
        def __len__(self) -> int:
            return 32

        def __bytes__(self) -> bytes:
            return b"lie"

    class Text(str):
        def __len__(self) -> int:
            return 1

    plain = keys.page_keys([1], 1, extra_key="name", extra_keys=[(0, 1, b"abc")])
    assert (
        keys.page_keys([1], 1, extra_key=Text("name"), extra_keys=[(0, 1, Bytes(b"abc"))]) == plain
    )
    expected = keys.page_key(bytes(32), [1], [b"abc", "name"])
    assert keys.page_key(Bytes(32), [1], [Bytes(b"abc"), Text("name")]) == expected
    with pytest.raises(ValueError, match="parent has 3 bytes, must have 32"):
        keys.page_key(Bytes(b"abc"), [1])


def test_a_chain_that_is_extended_while_it_is_extended_stays_whole() -> None:
    chain = keys.KeyChain(4)

    class Start:
        def __index__(self) -> int:
            chain.extend([1, 2, 3])
            return 0

    extra_keys: Any = [(Start(), 1, b"")]
    with pytest.raises(ValueError, match="extra key 0 starts at 0, must be 3"):
        chain.extend([5, 6], extra_keys)
    chain.extend([4])
    assert chain.keys == keys.page_keys([1, 2, 3, 4], 4)
