# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers generate the same from slots: cold, from checkpoints, in chunks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from builders import in_groups
from conftest import require

torch = require("torch")
transformers = require("transformers")

from generated import LONGEST, NEW, check_cold_and_cached, tokens_of  # noqa: E402
from hf_models import STATEFUL, expected_of, plain, prompts_of  # noqa: E402
from kvcore import CapacityError, KVCacheParams, PagedKVCacheManager  # noqa: E402
from kvcore.context import TextGenerationContext  # noqa: E402
from kvcore.groups import FullAttention, State  # noqa: E402
from kvcore.integrations.transformers import (  # noqa: E402
    PackedBatch,
    cache_params,
    generate,
    memory,
    mixers,
    paged_attention,
    slots,
)
from kvcore.sizing import longest_sequence  # noqa: E402
from preemptions import preemptions  # noqa: E402
from stateful_models import manager_of, model_of, overwrite  # noqa: E402

torch.set_num_threads(1)

FEW = ["falcon-h1", "bamba", "qwen3-next", "jamba"]
REST = sorted(STATEFUL.keys() - set(FEW))


def check_family(family: str, page: int, tokens: int = 11) -> None:
    model, expected = model_of(family), expected_of(family, NEW)
    assert len({token for answer in expected for token in answer}) > 20  # varied
    manager = manager_of(model, page)
    check_cold_and_cached(model, manager, expected, tokens)
    assert manager.state_metrics.checkpoint_hits >= 4
    assert manager.metrics.cache_tokens > 0.5 * sum(map(len, prompts_of()))


@pytest.mark.parametrize("family", FEW)
def test_family_generates_the_same(family: str) -> None:
    check_family(family, 3)


@pytest.mark.slow
@pytest.mark.parametrize("family", FEW)
def test_family_generates_the_same_at_every_page_size(family: str) -> None:
    check_family(family, 1)
    check_family(family, 16)


@pytest.mark.slow
@pytest.mark.parametrize("family", REST)
def test_other_families_generate_the_same(family: str) -> None:
    check_family(family, 3)
    check_family(family, 16, tokens=2048)


def check_preemption(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool holds little more than the longest sequence."""
    preempted = preemptions(monkeypatch)
    model = model_of(family)
    params = cache_params(model, 3)
    pages = next(n for n in range(1000) if longest_sequence(params, n, 40) >= LONGEST) + 3
    assert tokens_of(model, manager_of(model, 3, pages), 40) == expected_of(family, NEW)
    assert preempted


@pytest.mark.parametrize("family", ["qwen3-next"])
def test_preempted_requests_generate_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_preemption(family, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(STATEFUL.keys() - {"qwen3-next"}))
def test_preempted_requests_of_others_generate_the_same(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_preemption(family, monkeypatch)


@pytest.mark.parametrize("num_states", [8, pytest.param(None, marks=pytest.mark.slow)])
def test_sequences_of_a_prompt_get_a_state_each(num_states: int | None) -> None:
    """With one slot per request there are no checkpoints, and forks wait for each other."""
    model = model_of("qwen3-next")
    manager = manager_of(model, 4, num_states=num_states)
    results = generate(
        model, prompts_of(), manager=manager, max_new_tokens=NEW, num_return_sequences=3
    )
    tokens = [result.token_ids for result in results]
    assert tokens == [each for each in expected_of("qwen3-next", NEW) for _ in range(3)]


@pytest.mark.slow
def test_sampling_does_not_depend_on_who_runs_beside() -> None:
    model = model_of("bamba")
    options = {"do_sample": True, "seed": 3, "num_return_sequences": 2}
    together = tokens_of(model, manager_of(model, 4), **options)
    alone = tokens_of(model, manager_of(model, 4, max_batch_size=1), **options)
    assert together == alone


def test_a_manager_that_generate_makes_has_slots() -> None:
    results = generate(model_of("qwen3-next"), prompts_of(), max_new_tokens=NEW)
    assert [result.token_ids for result in results] == expected_of("qwen3-next", NEW)


def test_checkpoints_every_few_tokens_change_nothing() -> None:
    """This includes checkpoints that are made during generation."""
    model = model_of("qwen3-next")
    made = cache_params(model, 4)
    (state,) = made.state_groups
    often = dataclasses.replace(state, interval=8)
    params = dataclasses.replace(made, groups=(*made.attention_groups, often))
    manager = manager_of(model, 4, params=params, num_states=60)
    expected = expected_of("qwen3-next", NEW)
    assert tokens_of(model, manager) == expected
    turns = [p + e[:-1] for p, e in zip(prompts_of(), expected, strict=True)]
    manager.reset_metrics()
    results = generate(model, turns, manager=manager, max_new_tokens=2)
    assert [r.token_ids[0] for r in results] == [answer[-1] for answer in expected]
    assert manager.metrics.cache_tokens > 0.7 * sum(map(len, turns))


# -- rows ----------------------------------------------------------------------------------------
def calls_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that grows by the input shapes of each call of a module."""
    shapes: list[tuple[int, ...]] = []
    forward = module.forward

    def noted(hidden: Any) -> Any:
        shapes.append(tuple(hidden.shape[:2]))
        return forward(hidden)

    monkeypatch.setattr(module, "forward", noted)
    return shapes


def test_requests_that_generate_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3-next")
    params = cache_params(model, 4, enable_prefix_caching=False)  # runs the model once
    shapes = calls_of(model.model.layers[0].linear_attn.in_proj_ba, monkeypatch)
    prompts = prompts_of()[:4]
    manager = manager_of(model, 4, params=params)
    generate(model, prompts, manager=manager, max_new_tokens=NEW)
    assert shapes[:4] == [(1, len(prompt)) for prompt in prompts]
    assert shapes[4:] == [(4, 1)] * (NEW - 1)


def test_a_class_that_starts_anew_runs_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("jamba")
    manager = manager_of(model, 4)
    assert tokens_of(model, manager) == expected_of("jamba", NEW)
    monkeypatch.setattr(slots, "goes_on", lambda *_: True)
    assert tokens_of(model, manager_of(model, 4)) != expected_of("jamba", NEW)


@pytest.mark.parametrize(
    ("family", "expected"), [("jamba", False), ("bamba", True), ("qwen3-next", True)]
)
def test_a_layer_tells_whether_it_goes_on_from_a_state(family: str, expected: bool) -> None:
    model = model_of(family)
    generate(model, [list(range(1, 9))], max_new_tokens=1, max_batch_tokens=5)
    told = {mixers._GOES_ON[module] for module in mixers.mixers_of(model)}
    assert told == {expected}


def test_a_layer_that_overflows_on_noise_runs_token_by_token() -> None:
    (layer, *_) = mixers.mixers_of(model_of("bamba"))
    states = {"conv_states": torch.zeros((1, 8, 4)), "recurrent_states": torch.zeros((1, 2, 4, 4))}
    tells_nothing = mixers._reads_states(
        layer, 8, states, lambda *_: torch.full((1, 2, 8), torch.nan)
    )
    assert tells_nothing is False


@pytest.mark.parametrize("family", ["jamba", pytest.param("bamba", marks=pytest.mark.slow)])
def test_an_overwritten_checkpoint_changes_the_output(family: str) -> None:
    model = model_of(family)
    manager = manager_of(model, 4)
    assert tokens_of(model, manager) == expected_of(family, NEW)
    overwrite(manager)
    tokens = tokens_of(model, manager)
    assert tokens[0] == expected_of(family, NEW)[0]  # one token, without a hit
    assert all(a != b for a, b in zip(tokens[1:], expected_of(family, NEW)[1:], strict=True))


# -- params --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "family", [*FEW, *(pytest.param(family, marks=pytest.mark.slow) for family in REST)]
)
def test_groups_are_those_of_the_config(family: str) -> None:
    config = model_of(family).config.get_text_config(decoder=True).to_dict()
    read = KVCacheParams.from_hf_config(config, "float32", page_size=16, enable_prefix_caching=True)
    assert cache_params(model_of(family)) == read


def test_a_model_with_states_needs_groups() -> None:
    with pytest.raises(ValueError, match=r"3 of the 4 layers of Qwen3Next.* leave out groups"):
        cache_params(model_of("qwen3-next"), groups=False)


def test_a_manager_without_the_states_of_a_model_is_refused() -> None:
    model = model_of("qwen3-next")
    made = cache_params(model, 4)
    (state,) = made.state_groups
    other = {name: ((3, 3), dtype) for name, (_, dtype) in state.arrays.items()}
    for groups, reason in (
        ((FullAttention([2]),), "has slots for none"),
        ((FullAttention([2]), State([0, 1], state.arrays)), "layer 3 keeps a state"),
        ((FullAttention([2]), State([0, 1, 3], other)), "layer 0 keeps a state"),
    ):
        params = dataclasses.replace(made, groups=groups)
        with pytest.raises(ValueError, match=reason):
            generate(model, [[1, 2]], manager=manager_of(model, 4, params=params))


def test_states_that_are_not_in_a_cache_are_refused() -> None:
    config = transformers.RecurrentGemmaConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        intermediate_size=32,
        lru_width=32,
        head_dim=8,
        pad_token_id=0,
    )
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    with pytest.raises(ValueError, match="does not keep states in a cache of transformers"):
        generate(model, [[1, 2]])


# -- a custom loop -------------------------------------------------------------------------------
def test_a_batch_needs_the_manager_of_its_states() -> None:
    model, context = model_of("qwen3-next"), TextGenerationContext("a", [1, 2, 3])
    manager = manager_of(model, 4)
    manager.claim("a")
    inputs = manager.fetch([context])[0]
    with paged_attention(model), pytest.raises(ValueError, match=r"PackedBatch\(..., manager=\)"):
        model(**PackedBatch(inputs, [context]).model_inputs())
    packed = PackedBatch(inputs, [context], manager=manager)
    with paged_attention(model), torch.no_grad():
        logits = model(**packed.model_inputs()).logits[0, -1]
        alone = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]  # no batch: unchanged
    assert torch.allclose(logits, alone, atol=1e-4)
    assert all("forward" not in vars(module) for module in mixers.mixers_of(model))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"devices": ["cpu", "cpu"]}, "states on 2 devices"), ({"blocks": None}, "has no arrays")],
    ids=["devices", "no-arrays"],
)
def test_states_that_are_not_on_one_device_are_refused(
    options: dict[str, Any], reason: str
) -> None:
    groups = (FullAttention([0]), State([1], {"conv_states": ((2, 2), "float32")}))
    devices = len(options.get("devices", "1"))
    params = KVCacheParams("float32", 2, 8, 2, page_size=4, n_devices=devices, groups=groups)
    manager = PagedKVCacheManager(params, 1, 16, num_pages=4, **in_groups(options))
    manager.claim("a")
    context = TextGenerationContext("a", [1])
    with pytest.raises(ValueError, match=reason):
        PackedBatch(manager.fetch([context])[0], [context], manager=manager)


# -- memory --------------------------------------------------------------------------------------
def test_slots_and_pages_stay_within_half_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3-next")
    params = cache_params(model)
    slot, longest = params.bytes_per_state_slot, -(-LONGEST // 16) * params.bytes_per_page
    made: list[Any] = []

    class Noted(PagedKVCacheManager):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(memory, "PagedKVCacheManager", Noted)
    expected = expected_of("qwen3-next", NEW)
    for room, batch in ((longest + 2 * slot, 1), (longest + 7 * slot, 3), (1 << 30, 7)):
        monkeypatch.setattr(memory, "free_memory", lambda _, room=room: 2 * room)
        results = generate(model, prompts_of(), max_new_tokens=NEW)
        assert [result.token_ids for result in results] == expected
        assert made[-1].max_batch_size == batch
        held = made[-1].total_num_pages * params.bytes_per_page
        assert held + made[-1].state_metrics.total_slots * slot <= room
    monkeypatch.setattr(memory, "free_memory", lambda _: 2 * (longest + 2 * slot - 1))
    with pytest.raises(CapacityError, match=f"beside {2 * slot} bytes of states"):
        generate(model, prompts_of(), max_new_tokens=NEW)


def test_an_exception_in_a_model_leaves_its_layers_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("qwen3-next")
    manager = manager_of(model, 4)

    def failing(*_: Any) -> Any:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].linear_attn.out_proj, "forward", failing)
        with pytest.raises(RuntimeError, match="broken"):
            generate(model, prompts_of(), manager=manager)
    assert all("forward" not in vars(module) for module in mixers.mixers_of(model))
    assert plain(model, prompts_of()[:2], NEW) == expected_of("qwen3-next", NEW)[:2]
    assert tokens_of(model, manager) == expected_of("qwen3-next", NEW)
