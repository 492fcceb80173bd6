# SPDX-License-Identifier: Apache-2.0
"""URLs of Redis servers in the names of tiers."""

from __future__ import annotations

import pytest

from kvcore.stores import RedisTier, parse_tier


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("redis:127.0.0.1", "'//' and the server's name must follow"),
        ("redis://", "without a host"),
        ("redis://h:0", "port is 0"),
        ("redis://h:99999", "the port is not a number"),
        ("redis://:pass@h/x", "the database 'x' is not a number"),
        ("redis://h?timeouts=1", "it has no option 'timeouts'"),
        ("redis://h?ttl=0", "ttl is 0.0, must be more than 0"),
        ("redis://h?timeout=inf", "timeout is inf"),
        ("redis://h?prefix=a*", "prefix is 'a\\*'"),
        ("redis://h?ca_certs=/x", "ca_certs needs rediss"),
    ],
)
def test_bad_names_say_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        parse_tier(text)
    assert "for example 'redis://127.0.0.1:6379'" in str(error.value)
    assert "pass@" not in str(error.value)


@pytest.mark.parametrize("secret", ["se/cret", "se#cret", "se?cret", "se@cret/cret", "cret:cret"])
def test_passwords_are_not_shown(secret: str) -> None:
    for text in (f"redis://:{secret}@h:6379", f"redis://user:{secret}@h:x?ttl=a"):
        try:
            shown = repr(parse_tier(text))
        except ValueError as error:
            shown = str(error)
        assert "cret" not in shown


def test_a_name_says_all_there_is() -> None:
    tier = parse_tier("rediss://u%40x:p%2Fw@[::1]:7/3?timeout=2&ttl=60&prefix=a.b&ca_certs=/c")
    assert tier == RedisTier("::1", 7, 3, "u@x", "p/w", True, "/c", 2.0, 60.0, "a.b")
    assert parse_tier("redis://cache") == RedisTier("cache")
