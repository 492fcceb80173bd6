# SPDX-License-Identifier: Apache-2.0
"""The examples on the documentation page of transformers, and its loop with late requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from conftest import require

torch = require("torch")
require("transformers")

from hf_models import expected_of, model_of, plain, prompts_of  # noqa: E402
from tiny_model_dir import byte_tokenizer, write_folder  # noqa: E402

torch.set_num_threads(1)

NEW = 14
PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"
*CALLS, LOOP = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def test_the_calls_run_on_a_local_model(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_tokenizer())
    names: dict[str, Any] = {"gemma": model_of("gemma3"), "qwen3_next": model_of("qwen3-next")}
    exec("\n".join(CALLS).replace("path/of/a/model", str(tmp_path)), names)
    assert names["second"].cached_tokens >= 48  # most of the first turn
    assert names["manager"].num_free_blocks == 1024
    assert 0.5 < names["held"][names["windows"]] / names["held"][names["flat"]] < 0.6
    assert [names["answer"].token_ids] == plain(model_of("gemma3"), [names["prompt"]], 20)
    assert [names["resumed"].token_ids] == plain(model_of("qwen3-next"), [names["turn"]], 20)


def engine_class() -> Any:
    names: dict[str, Any] = {}
    exec(compile(LOOP, str(PAGE), "exec"), names)
    return names["Engine"]


def test_the_loop_is_short() -> None:
    assert len(LOOP.splitlines()) < 60


@pytest.mark.parametrize(("family", "num_pages"), [("llama", 60), ("llama", 8), ("qwen3-next", 8)])
def test_the_loop_answers_what_the_model_does(family: str, num_pages: int) -> None:
    engine = engine_class()(model_of(family), num_pages, max_batch_size=4)
    late = dict(enumerate(prompts_of()))
    for number in (0, 1, 2):
        engine.submit(number, late.pop(number), NEW)
    answers = {}
    for context in engine.run():
        answers[context.request_id] = context.tokens.tolist()
        for number in list(late)[:2]:
            engine.submit(number, late.pop(number), NEW)
    expected = expected_of(family, NEW)
    assert answers == {n: p + expected[n] for n, p in enumerate(prompts_of())}
    assert engine.manager.num_free_blocks == num_pages
    engine.manager.check_integrity()
