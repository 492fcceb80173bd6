# SPDX-License-Identifier: Apache-2.0
"""CacheConfig: the options of the C++ cache as keywords, by the list in cache_config.hpp."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from builders import error_of
from kvcore._core import CacheConfig
from kvcore.native.engine import CacheCore

HEADER = Path(__file__).parents[3] / "cpp/include/kvcore/cache_config.hpp"
SIZES = {"num_pages": 4, "page_size": 2, "max_sequences": 4, "max_seq_len": 8}


@pytest.mark.skipif(not HEADER.exists(), reason="needs a checkout")
def test_every_field_is_an_option() -> None:
    body = HEADER.read_text().partition("struct CacheConfig {")[2].partition("\n};")[0]
    fields = re.findall(r"^    [^/\n]*?(\w+) = [^;\n]*;", body, re.M)
    assert tuple(fields) == CacheConfig.options


def test_a_cache_has_the_sizes_of_its_configuration() -> None:
    core = CacheCore(CacheConfig(**SIZES, num_replicas=2))
    assert [core.stats(replica).total_pages for replica in (0, 1)] == [4, 4]
    with pytest.raises(IndexError, match="replica 2 does not exist, there are 2"):
        core.stats(2)
    core.check_integrity()
    with pytest.raises(ValueError, match="num_pages is 0, must be 1"):
        CacheCore(CacheConfig(page_size=2))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_blocks": 4}, TypeError, "'num_blocks' is not an option"),
        ({"page_size": 2.0}, TypeError, "page_size is a float, must be an int"),
        ({"page_size": True}, TypeError, "page_size is a bool, must be an int"),
        (
            {"page_size": 1 << 31},
            ValueError,
            r"page_size is 2147483648, must be -2147483648 \.\. 2",
        ),
        ({"num_pages": -(1 << 70)}, ValueError, "num_pages is -1180591620717411303424, must be"),
        ({"dedup": 1}, TypeError, "dedup is a int, must be a bool"),
        ({"key_seed": "a"}, TypeError, "key_seed is a str, must be bytes"),
        ({"eviction": "mru"}, ValueError, "eviction is 'mru', must be one of 'lru'"),
        ({"host_eviction": 3}, TypeError, "host_eviction is 3, must be a policy"),
        ({"write_policy": "never"}, ValueError, "never"),
        ({"write_policy": 3}, TypeError, "write_policy is a int, must be the name of a policy"),
        ({"stand_ins": object()}, TypeError, "stand_ins is a object, must be a capsule"),
        ({"groups": [("wide", 0, 1, 0)]}, ValueError, "the kind of a group is 'wide', must be"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: Any, text: str) -> None:
    refused = error_of(lambda: CacheConfig(**options))
    assert isinstance(refused, error)
    assert re.search(text, str(refused)), refused


def test_a_cache_needs_a_configuration() -> None:
    wrong: Any = None
    with pytest.raises(TypeError, match="'config' must not be None"):
        CacheCore(wrong)
