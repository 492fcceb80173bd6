# SPDX-License-Identifier: Apache-2.0
"""Logits of models with recurrent layers over slots, compared with a whole sequence."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import require

torch = require("torch")
require("transformers")

import hf_models  # noqa: E402
from generated import NEW  # noqa: E402
from hf_models import expected_of, prompts_of  # noqa: E402
from kvcore.context import TextGenerationContext  # noqa: E402
from kvcore.integrations.transformers import PackedBatch, paged_attention  # noqa: E402
from stateful_models import manager_of, model_of  # noqa: E402

torch.set_num_threads(1)


def logits_through_slots(model: Any, tokens: list[int], chunk: int) -> Any:
    """Return the logits of every token, given all tokens before it."""
    manager = manager_of(model, 3)
    context = TextGenerationContext("row", tokens, active_idx=chunk)
    manager.claim("row")
    parts = []
    with paged_attention(model), torch.inference_mode():
        while context.start_idx < len(tokens):
            context.active_idx = min(context.start_idx + chunk, len(tokens))
            inputs = manager.fetch([context])[0]
            packed = PackedBatch(inputs, [context], manager=manager)
            rows = torch.arange(context.active_length).numpy()
            parts.append(model(**packed.model_inputs(rows)).logits[0])
            context.update(0)
            manager.step([context])
    return torch.cat(parts).float()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bamba", "lfm2", "jamba"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(family: str) -> None:
    exact = model_of(family)
    model = hf_models.build(family).to(torch.bfloat16)
    mine, theirs = [], []
    for prompt, answer in zip(prompts_of(), expected_of(family, NEW), strict=True):
        tokens = prompt + answer
        with torch.inference_mode():
            truth = exact(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            alone = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        theirs.append((alone - truth).abs())
        mine.append((logits_through_slots(model, tokens, 9) - truth).abs())
    assert float(torch.cat(mine).mean()) <= 1.25 * float(torch.cat(theirs).mean())


def test_float32_logits_are_those_of_the_whole_sequence() -> None:
    model, tokens = model_of("bamba"), prompts_of()[-1]
    with torch.inference_mode():
        whole = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    for chunk in (7, 53):
        assert torch.allclose(logits_through_slots(model, tokens, chunk), whole, atol=2e-4)
