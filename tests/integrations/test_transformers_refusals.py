# SPDX-License-Identifier: Apache-2.0
"""The arguments that generate() refuses before it runs, and the cleanup after a failed call."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from conftest import require

torch = require("torch")
transformers = require("transformers")

import hf_models  # noqa: E402
from generated import NEW, checked_manager  # noqa: E402
from hf_models import VOCABULARY, expected_of, model_of, prompts_of  # noqa: E402
from kvcore import (  # noqa: E402
    CapacityError,
    InsufficientBlocksError,
    KVCacheParams,
    PagedKVCacheManager,
)
from kvcore.integrations.transformers import (  # noqa: E402
    cache_params,
    generate,
    paged_attention,
)

torch.set_num_threads(1)


def manager_of(model: Any, pages: int = 200, **options: Any) -> PagedKVCacheManager:
    return checked_manager(cache_params(model, 4), pages, **options)


def never_run(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model has run")

    monkeypatch.setattr(model, "forward", forward)


# -- models ---------------------------------------------------------------------------------------
def tiny(name: str, **fields: Any) -> Any:
    common = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**(common | fields))
    makers = {"T5": "T5ForConditionalGeneration", "Gemma4Text": "Gemma4ForCausalLM"}
    maker = makers.get(name, f"{name}ForCausalLM")
    return getattr(transformers, maker)(config).eval()


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon": ("Falcon", {"num_attention_heads": 4}, "not open"),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2}, "not open"),
    "mamba": ("Mamba", {"state_size": 4}, "recurrent state"),
    "jamba": ("Jamba", {**HEADS, "use_mamba_kernels": False}, "recurrent state"),
    "t5": ("T5", {"d_model": 32, "num_layers": 1, "num_heads": 2}, "encoder-decoder"),
    "dynamic-rope": ("Llama", {**HEADS, "rope_parameters": DYNAMIC}, "dynamic NTK"),
    "head_dims-far-apart": (
        "Gemma4Text",
        {**HEADS, "head_dim": 8, "global_head_dim": 12},
        "differ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_work_are_refused_before_they_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fields, reason = REFUSED[name]
    model = tiny(kind, **fields)
    before = model.config._attn_implementation
    never_run(model, monkeypatch)
    with pytest.raises(ValueError, match=reason):
        generate(model, [[1, 2, 3]])
    assert model.config._attn_implementation == before


def test_a_model_with_masks_of_its_own_is_refused() -> None:
    model = tiny("Doge", **HEADS)
    with pytest.raises(ValueError, match="mask of its own"):
        generate(model, [[1, 2, 3]])


def test_longrope_ends_where_its_frequencies_change(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 40,
        "factor": 2.0,
    }
    model = hf_models.build(
        "phi3", sliding_window=None, rope_parameters=rope, original_max_position_embeddings=40
    )
    prompts = [p[:26] for p in prompts_of()]
    results = generate(model, prompts, max_new_tokens=NEW)  # 39 tokens at most
    assert [r.token_ids for r in results] == hf_models.plain(model, prompts, NEW)
    never_run(model, monkeypatch)
    with pytest.raises(ValueError, match=r"goes up to 40 .* longrope"):
        generate(model, prompts, max_new_tokens=NEW + 2)


def test_windows_that_masks_and_layers_tell_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = hf_models.build("qwen2-moe")  # its layers do not pass their window
    monkeypatch.setattr(model.config, "layer_types", ["full_attention"] * 4)
    with pytest.raises(ValueError, match=r"windows of \[7\], its layers \[\]"):
        generate(model, [[1, 2, 3]])


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="causal language model"):
        generate(object(), [[1]])
    with pytest.raises(TypeError, match="causal language model"):
        generate(model_of("llama").model, [[1]])


def test_dropout_is_refused() -> None:
    model = hf_models.build("llama", attention_dropout=0.5).train()
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        generate(model, [[1]])


@pytest.mark.parametrize("value", [3, torch.zeros(1)], ids=["number", "tensor"])
def test_an_unknown_argument_of_attention_is_refused(value: Any) -> None:
    model = model_of("llama")
    with paged_attention(model), pytest.raises(ValueError, match="passes new_bias"):
        model(input_ids=torch.tensor([[1]]), new_bias=value)


def test_a_mask_with_a_packed_batch_is_refused() -> None:
    from kvcore import TextGenerationContext
    from kvcore.integrations.transformers import PackedBatch

    model, context = model_of("llama"), TextGenerationContext("a", [1, 2])
    manager = manager_of(model)
    manager.claim("a")
    packed = PackedBatch(manager.fetch([context])[0], [context])
    with paged_attention(model), pytest.raises(ValueError, match="mask"):
        model(**packed.model_inputs(), attention_mask=torch.ones((1, 2)))


# -- arguments ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompts", "error", "reason"),
    [
        ([[]], ValueError, "prompt 0 is empty"),
        ([1, 2, 3], TypeError, "list of such lists"),
        ([[1], [0.5]], TypeError, "prompt 1"),
        ([[1], [VOCABULARY]], ValueError, f"token {VOCABULARY}"),
        ([[-1]], ValueError, "token -1"),
    ],
    ids=["empty", "flat", "float", "beyond", "negative"],
)
def test_bad_prompts_are_refused(
    prompts: Any, error: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=reason):
        generate(model_of("llama"), prompts)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"num_return_sequences": 0},
        {"max_batch_tokens": 0},
        {"do_sample": True, "temperature": 0.0},
        {"eos_token_id": "never"},
    ],
    ids=lambda options: "-".join(options),
)
def test_bad_numbers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        generate(model_of("llama"), [[1, 2]], **options)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_layers": 3}, "num_layers is 3"),
        ({"n_kv_heads": 4}, "n_kv_heads is 4"),
        ({"head_dim": 8}, "row_widths"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16"),
    ],
    ids=["layers", "heads", "head_dim", "dtype"],
)
def test_a_manager_of_another_shape_is_refused(fields: dict[str, Any], reason: str) -> None:
    shape: dict[str, Any] = {
        "dtype": "float32",
        "n_kv_heads": 2,
        "head_dim": 16,
        "num_layers": 4,
        "page_size": 4,
    }
    manager = PagedKVCacheManager(
        KVCacheParams(**(shape | fields)), max_batch_size=2, max_seq_len=64, num_pages=8
    )
    with pytest.raises(ValueError, match=reason):
        generate(model_of("llama"), [[1, 2]], manager=manager)


def test_a_manager_without_a_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="no pool"):
        generate(model_of("llama"), [[1, 2]], manager=manager_of(model_of("llama"), blocks=None))
    with pytest.raises(TypeError, match="PagedKVCacheManager"):
        generate(model_of("llama"), [[1, 2]], manager=object())  # type: ignore[arg-type]


def test_a_sequence_that_can_never_fit_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    small, short = manager_of(model, pages=10), manager_of(model, max_seq_len=40)
    exact = generate(model, [[3] * 27], manager=small, max_new_tokens=14)  # 40 are written
    assert len(exact[0].token_ids) == 14
    never_run(model, monkeypatch)
    for manager in (small, short):
        with pytest.raises(CapacityError, match=r"prompt 1 of 28 tokens comes to 41"):
            generate(model, [[3], [3] * 28], manager=manager, max_new_tokens=14)


# -- cleanup after a failure ----------------------------------------------------------------------
class BrokenError(Exception):
    pass


def assert_clean(model: Any, manager: PagedKVCacheManager, before: str) -> None:
    """Check that no page is in use, the setting is unchanged, and the next call succeeds."""
    manager.check_integrity()
    assert manager.num_free_blocks == manager.total_num_pages
    assert "0 requests" in repr(manager)
    assert model.config._attn_implementation == before
    results = generate(model, prompts_of(), manager=manager, max_new_tokens=NEW)
    assert [r.token_ids for r in results] == expected_of("llama", NEW)


@pytest.mark.parametrize("call", [0, 1, 5, 12])
def test_an_exception_in_the_model_leaves_nothing_behind(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    manager, before = manager_of(model), model.config._attn_implementation
    layer, calls = model.model.layers[2].mlp, iter(range(100))
    forward = layer.forward

    def failing(x: Any) -> Any:
        if next(calls) == call:
            raise BrokenError
        return forward(x)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", failing)
        with pytest.raises(BrokenError):
            generate(model, prompts_of(), manager=manager, max_batch_tokens=30, max_new_tokens=NEW)
    assert_clean(model, manager, before)


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
def test_a_call_cancelled_from_its_stream_leaves_nothing_behind(
    error: type[BaseException],
) -> None:
    model = model_of("llama")
    manager, before = manager_of(model), model.config._attn_implementation
    tokens = iter(range(100))

    def stream(index: int, token: int) -> None:
        if next(tokens) == 20:
            raise error

    with pytest.raises(error):
        generate(
            model,
            prompts_of(),
            manager=manager,
            max_new_tokens=NEW,
            stream=stream,
            num_return_sequences=2,
        )
    assert_clean(model, manager, before)


def test_memory_that_others_hold_stops_a_call_cleanly() -> None:
    from kvcore import TextGenerationContext

    model = model_of("llama")
    manager, before = manager_of(model, pages=20), model.config._attn_implementation
    other = TextGenerationContext("other", list(range(60)))
    manager.claim("other")
    assert manager.reserve(other)
    with pytest.raises(InsufficientBlocksError, match="5 free pages of 20"):
        generate(model, [[1] * 30], manager=manager, max_new_tokens=2)
    assert manager.contains("other")
    assert manager.num_free_blocks == 5
    fits = generate(model, [[1] * 10], manager=manager, max_new_tokens=2)
    assert len(fits[0].token_ids) == 2
    manager.release("other")
    assert_clean(model, manager, before)


def test_requests_of_others_take_slots_but_no_turn() -> None:
    model = model_of("llama")
    manager = manager_of(model, max_batch_size=3)
    manager.claim("other")
    results = generate(
        model, prompts_of()[:3], manager=manager, max_new_tokens=NEW, num_return_sequences=3
    )
    assert [r.token_ids for r in results[::3]] == expected_of("llama", NEW)[:3]
    manager.release("other")


def test_models_in_two_threads_do_not_disturb_each_other() -> None:
    """Also two models with one config, in which transformers keeps the setting."""
    first = hf_models.build("llama")
    second = transformers.LlamaForCausalLM(first.config).eval()
    second.load_state_dict(first.state_dict())
    models = [first, second, model_of("gemma2")]
    settings = [m.config._attn_implementation for m in models]
    answers: list[Any] = [None] * 3

    def run(i: int) -> None:
        answers[i] = [
            [r.token_ids for r in generate(models[i], prompts_of(), max_new_tokens=NEW)]
            for _ in range(3)
        ]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    llama, gemma = expected_of("llama", NEW), expected_of("gemma2", NEW)
    assert answers == [[llama] * 3, [llama] * 3, [gemma] * 3]
    assert [m.config._attn_implementation for m in models] == settings


def test_generate_within_a_stream_works() -> None:
    model = model_of("llama")
    inner: list[Any] = []

    def stream(index: int, token: int) -> None:
        if not inner:
            inner.extend(generate(model, prompts_of()[:1], max_new_tokens=NEW))

    results = generate(model, prompts_of(), max_new_tokens=NEW, stream=stream)
    assert [r.token_ids for r in results] == expected_of("llama", NEW)
    assert inner[0].token_ids == expected_of("llama", NEW)[0]


def test_kvcore_itself_imports_neither_torch_nor_transformers() -> None:
    code = "import kvcore, sys; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_rows_packed_by_their_positions_alone_are_refused() -> None:
    model = model_of("llama")
    ids, places = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 1, 0, 1]])
    with paged_attention(model), pytest.raises(ValueError, match="mask of its own"):
        model(input_ids=ids, position_ids=places, use_cache=False)


def test_a_static_cache_is_refused() -> None:
    model = model_of("llama")
    with paged_attention(model), pytest.raises(ValueError, match="dynamic cache"):
        model.generate(
            torch.tensor([[1, 2]]), max_new_tokens=3, cache_implementation="static", pad_token_id=0
        )
