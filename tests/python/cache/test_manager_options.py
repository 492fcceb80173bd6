# SPDX-License-Identifier: Apache-2.0
"""Options of a manager in groups, their keywords, and the files in which an option is spelled."""

from __future__ import annotations

import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from builders import error_of, make_manager, make_params, with_host
from kvcore import CacheOptions, LayerOptions, PagedKVCacheManager, TierOptions
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.options import Keywords

ROOT = Path(__file__).parents[3]
GROUPS: dict[str, type[Any]] = {"cache": CacheOptions, "layers": LayerOptions, "tiers": TierOptions}
#: The keywords that SPEC names stay; the others go with the next release.
STAY = {
    *("dedup", "partial_page_reuse", "eviction", "clock", "quotas", "events", "first_page"),
    *("reserve_chunks", "max_draft_tokens", "num_states", "fingerprint", "write_policy"),
}
#: A value of each option that is also a keyword; the value differs from the default.
VALUES: dict[str, Any] = {
    "dedup": False,
    "partial_page_reuse": 3,
    "eviction": "lfu",
    "clock": lambda: 0.0,
    "quotas": {"a": (1, 2)},
    "events": 5,
    "first_page": 2,
    "reserve_chunks": True,
    "max_draft_tokens": 1,
    "keep_windows": True,
    "num_states": 0,
    "fingerprint": "weights",
    "write_policy": "write_back",
    "write_threshold": 3,
    "host_eviction": "lfu",
    "host_min_priority": 0,
    "num_host_states": 0,
    "async_onload": True,
    "store_timeout": 1.0,
    "max_write_wait": 2.0,
    "layerwise_loads": True,
}


def made(**options: Any) -> PagedKVCacheManager:
    params = make_params(**with_host(4, 8), groups=(FullAttention([0]), SlidingWindow([1], 8)))
    return PagedKVCacheManager(params, 4, 64, num_pages=40, **options)


def test_old_options_have_a_keyword_until_the_next_release() -> None:
    options = {each.name: each for kind in GROUPS.values() for each in fields(kind)}
    keywords = {name for name, each in options.items() if each.metadata.get("is_keyword")}
    assert keywords == Keywords.__annotations__.keys() == VALUES.keys()


@pytest.mark.parametrize("name", VALUES)
def test_both_spellings_make_a_manager(name: str) -> None:
    group = next(group for group, kind in GROUPS.items() if name in {f.name for f in fields(kind)})
    spelling = f"{group}={GROUPS[group].__name__}({name}=...)"
    made(**{group: GROUPS[group](**{name: VALUES[name]})}).close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made(**{name: VALUES[name]}).close()
    expected = f"the argument {name} of PagedKVCacheManager is deprecated; pass {spelling}"
    assert [str(each.message) for each in caught] == ([] if name in STAY else [expected])
    assert all(each.filename == __file__ for each in caught)
    refused = error_of(lambda: made(**{group: GROUPS[group](), name: VALUES[name]}))
    assert isinstance(refused, ValueError)
    assert (
        str(refused) == f"{name} and {group} are both given, must be one of them; pass {spelling}"
    )


def test_options_of_a_group_reach_the_cache() -> None:
    first = make_manager(4, 8, cache=CacheOptions(first_page=3, quotas={"a": (2, None)}))
    assert first.quotas == {"a": (2, None)}
    assert min(make_manager(4, 8, cache=CacheOptions(first_page=3)).next_pages()) == 3
    tiers = TierOptions(["host:64KiB"], write_policy="write_back")
    with make_manager(4, 8, blocks="allocate", tiers=tiers) as manager:
        assert [*manager.tier_metrics] == ["host"]
    with make_manager(4, 8, blocks="allocate", tiers=["host:64KiB"], fingerprint="a") as manager:
        assert [*manager.tier_metrics] == ["host"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"evicton": "lru"}, TypeError, "PagedKVCacheManager has no option 'evicton'; its options"),
        ({"num_blocks": 4}, TypeError, "has no option 'num_blocks'"),
        ({"cache": {"dedup": True}}, TypeError, "cache is a dict, must be a CacheOptions"),
        ({"layers": CacheOptions()}, TypeError, "layers is a CacheOptions, must be a LayerOptions"),
        ({"tiers": LayerOptions()}, TypeError, "tiers is a LayerOptions, must be a TierOptions"),
        ({"tiers": TierOptions(tiers="host:1MiB")}, TypeError, "must be a list"),
        ({"partial_page_reuse": 2.5}, TypeError, "partial_page_reuse is a float, must be an int"),
        ({"dedup": 1}, TypeError, "dedup is a int, must be a bool"),
        ({"first_page": -1}, ValueError, "first_page is -1, must be at least 0"),
        ({"events": 0.5}, TypeError, "events is a float, must be an int"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: Any, text: str) -> None:
    refused = error_of(lambda: make_manager(4, 8, **options))
    assert type(refused) is error
    assert text in str(refused)


def test_groups_are_checked_where_they_are_made() -> None:
    wrong: Any = "yes"
    with pytest.raises(TypeError, match="layerwise_loads is a str, must be a bool"):
        TierOptions(layerwise_loads=wrong)
    with pytest.raises(ValueError, match=r"store_timeout is 0\.0, must be more than 0 seconds"):
        TierOptions(store_timeout=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dedupe'"):
        CacheOptions(dedupe=True)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        CacheOptions().dedup = False  # type: ignore[misc]


# ---- files ---------------------------------------------------------------------------------------


def files_with(name: str) -> list[str]:
    """The product files that spell an option, without programs that use a manager."""
    word = re.compile(rf"\b{name}\b")
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("cpp", "python")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".hpp", ".cpp", ".cu", ".py", ".pyi", ".pyx", ".pxi", ".pxd"}
        and word.search(path.read_text())
    ]
    return sorted(path for path in found if "/apps/" not in path and "/integrations/" not in path)


@pytest.mark.skipif(not (ROOT / "cpp").exists(), reason="needs a checkout")
def test_an_option_is_spelled_in_three_files() -> None:
    """Declared with its bounds in C++, read by a room of C++, and offered in Python."""
    assert files_with("write_threshold") == [
        "cpp/include/kvcore/cache_config.hpp",
        "cpp/src/transfer/store_rules.cpp",
        "python/kvcore/options.py",
    ]
