# SPDX-License-Identifier: Apache-2.0
"""Tile sizes: the built-in table, a file of measured sizes, and their measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.backends.cuda.attention.plan import (
    MOST_SPLITS,
    Sizes,
    default_splits,
    make_plan,
    power_of_two,
)
from kvcore.backends.cuda.attention.settings import TABLE, Row, Settings, settings_for
from kvcore.backends.cuda.attention.settings_file import (
    VARIABLE,
    measured_rows,
    read_rows,
    write_row,
)

DECODE, PROMPT = Settings(64, 32, 2, 4), Settings(64, 128, 8, 1)
OF_16_BITS: dict[str, Any] = {"has_codes": False, "is_wide": False}


@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.parametrize("arch", [0, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dim", [1, 64, 80, 128, 200, 256, 512])
def test_every_kernel_has_settings(arch: int, dim: int, has_codes: bool) -> None:
    for tokens in (0.5, 1, 9, 4000):
        for group in (1, 4, 128):
            found = settings_for(
                arch,
                dim,
                group=group,
                tokens_per_row=tokens,
                has_codes=has_codes,
                is_wide=False,
            )
            assert found.block_m in (16, 32, 64, 128)
            assert found.block_m <= max(16, 2 * group * max(1, tokens))
    assert settings_for(arch, dim, group=8, tokens_per_row=1, has_codes=has_codes, is_wide=True)


def test_newer_architectures_have_rows_of_their_own() -> None:
    asked: dict[str, Any] = {"group": 4, "tokens_per_row": 100, **OF_16_BITS}
    assert settings_for(80, 128, **asked) == settings_for(86, 128, **asked)
    assert settings_for(86, 128, **asked) != settings_for(90, 128, **asked)
    assert len({row[:3] for row in TABLE}) == len(TABLE)


def test_measured_rows_come_first_on_their_architecture() -> None:
    rows = Row(90, 128, False, DECODE, PROMPT), Row(90, 96, False, PROMPT, DECODE)
    asked: dict[str, Any] = {"group": 64, "tokens_per_row": 1, **OF_16_BITS}
    assert settings_for(90, 128, measured=rows, **asked) == DECODE
    assert settings_for(90, 80, measured=rows, **asked) == PROMPT
    assert settings_for(90, 64, measured=rows, **asked) == settings_for(90, 64, **asked)
    assert settings_for(100, 128, measured=rows, **asked) == settings_for(100, 128, **asked)
    asked["has_codes"] = True
    assert settings_for(90, 128, measured=rows, **asked) == settings_for(90, 128, **asked)


def test_rows_are_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.json"
    write_row(path, Row(90, 128, False, DECODE, PROMPT))
    write_row(path, Row(80, 64, True, DECODE, PROMPT))
    write_row(path, Row(90, 128, False, PROMPT, DECODE))
    expected = Row(80, 64, True, DECODE, PROMPT), Row(90, 128, False, PROMPT, DECODE)
    assert read_rows(path) == expected
    monkeypatch.delenv(VARIABLE, raising=False)
    assert measured_rows() == ()
    monkeypatch.setenv(VARIABLE, str(path))
    assert measured_rows() == expected
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        measured_rows()


GOOD: dict[str, Any] = {
    "arch": 90,
    "dim": 128,
    "has_codes": False,
    "decode": DECODE._asdict(),
    "prompt": PROMPT._asdict(),
}


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "90"},
        {"has_codes": 1},
        {"decode": [64, 64, 4, 2]},
        {"decode": DECODE._asdict() | {"block_m": 48}},
        {"decode": DECODE._asdict() | {"block_n": 8}},
        {"prompt": PROMPT._asdict() | {"warps": 0}},
        {"prompt": PROMPT._asdict() | {"stages": True}},
        {"prompt": {"block_m": 64}},
    ],
)
def test_files_of_something_else_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "settings.json"
    nested = "[" * 100_000
    for text in (json.dumps({"rows": [GOOD | change]}), "[]", "{", '{"rows": 1}', nested):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no settings of attention"):
            read_rows(path)
        with pytest.raises(ValueError, match="holds no settings of attention"):
            write_row(path, Row(90, 128, False, DECODE, PROMPT))
        assert path.read_text() == text


# ---- plans ---------------------------------------------------------------------------------------
def sizes(**given: int) -> Sizes:
    usual = {
        "tokens": 8,
        "rows": 8,
        "q_heads": 32,
        "heads": 8,
        "dim": 128,
        "rest": 0,
        "v_dim": 128,
        "page_size": 16,
        "columns": 256,
    }
    return Sizes(**usual | given)


def test_grids_depend_on_shapes_alone() -> None:
    """A grid has enough programs for any row lengths, and for all heads of a group."""
    settings = Settings(64, 64, 4, 2)
    assert make_plan(sizes(tokens=100, rows=3), settings, 90, 5).grid == (100 // 16 + 3, 8, 5)
    plan = make_plan(sizes(heads=1, q_heads=160), settings, 90, 1)
    assert (plan.heads_per_block, plan.grid) == (64, (16, 3, 1))
    plan = make_plan(sizes(q_heads=40), settings, 90, 1)  # 12 tokens of 5 heads, 4 rows idle
    assert plan.grid == (8 // 12 + 8, 8, 1)


def test_splits_are_for_processors_that_would_be_idle() -> None:
    plan = make_plan(sizes(), Settings(16, 64, 4, 2), 90, 1)
    assert plan.grid == (10, 8, 1)
    assert default_splits(sizes(), plan, 132) == 4 * 132 // 64  # 8 rows with 8 heads of K
    assert default_splits(sizes(columns=16), plan, 132) == 1  # 256 tokens are not worth two splits
    assert default_splits(sizes(columns=10**6), plan, 10**6) == MOST_SPLITS
    full = make_plan(sizes(rows=600, tokens=600), Settings(16, 64, 4, 2), 90, 1)
    assert default_splits(sizes(rows=600), full, 132) == 1


def test_sizes_are_rounded_to_powers_of_two() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]
    plan = make_plan(sizes(dim=80, rest=9, v_dim=1), Settings(16, 64, 4, 2), 90, 1)
    assert (plan.block_dim, plan.block_rest, plan.block_v) == (128, 16, 16)
