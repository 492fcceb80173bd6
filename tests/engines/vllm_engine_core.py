# SPDX-License-Identifier: Apache-2.0
"""Serves requests with vLLM's EngineCore and a model that reads its pages; prints the results.

    KVCORE_VLLM=1 python tests/engines/vllm_engine_core.py

Prints a line of JSON for each scene. vLLM finds kvcore by its entry point, if installed.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import vllm_models
import vllm_stubs  # noqa: F401 - replaces missing packages

vllm_models.describe_models()

from vllm import SamplingParams  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.engine import EngineCoreEventType, EngineCoreRequest  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402

from vllm_reading_model import PAGE, VOCABULARY, ReadingModel, answers  # noqa: E402

#: Requests whose clients disconnect after a few tokens.
ABORTED = ("request 20", "request 21")


@dataclass(frozen=True)
class Scene:
    """A model, and the settings with which it is served."""

    model: str
    is_async: bool = False
    drafts: bool = False
    cached: bool = True
    second_runner: bool = False  # vLLM's newer runner, with another notice of preemptions
    blocks: int = 90  # shared by all groups; few, so requests are preempted
    seed: int = 0  # of the prompts


SCENES = [
    Scene("full"),
    Scene("full", is_async=True, second_runner=True),
    Scene("full", drafts=True, blocks=50),
    Scene("full", is_async=True, cached=False),
    Scene("window", is_async=True, blocks=45),
    Scene("mixed", is_async=True, blocks=150),
    Scene("mixed", drafts=True, blocks=100, seed=5),
]


def engine_of(scene: Scene) -> EngineCore:
    """Start an engine."""
    length = 160
    model = ModelConfig(model="facebook/opt-125m", dtype="float16", max_model_len=length)
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=PAGE,
            enable_prefix_caching=scene.cached,
            num_gpu_blocks_override=scene.blocks,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=12,
            max_num_batched_tokens=48,
            max_model_len=length,
            enable_chunked_prefill=True,
            async_scheduling=False,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=False,
            watermark=0.0,
        ),
        speculative_config=SpeculativeConfig(
            model="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
        )
        if scene.drafts
        else None,
    )
    config.scheduler_config.async_scheduling = scene.is_async  # CPUs would turn it off
    ReadingModel.layers = scene.model
    engine = EngineCore(config, ReadingModel, log_stats=True)
    engine.scheduler.use_v2_model_runner = scene.second_runner
    return engine


def prompts(seed: int) -> dict[str, tuple[list[int], int]]:
    """Return prompts and the number of answers to each: some share a prefix, one has two turns."""
    chance = random.Random(seed)

    def text(length: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(length)]

    shared = [text(length) for length in (37, 64, 16)]
    made = {}
    for index in range(40):
        head = shared[index % 3][: chance.randrange(8, 65)] if index % 4 else []
        tokens = head + text(chance.randrange(1, 50))
        made[f"request {index}"] = (tokens, chance.randrange(1, 40))
    return made


def add(engine: EngineCore, name: str, tokens: list[int], count: int) -> None:
    """Add a waiting request in the same way as a client does."""
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
    params.update_from_generation_config({}, None)
    request = EngineCoreRequest(
        request_id=name, prompt_token_ids=tokens, mm_features=None, sampling_params=params,
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip
    engine.add_request(*engine.preprocess_add_request(request))


def serve(engine: EngineCore, wanted: dict[str, tuple[list[int], int]]) -> dict[str, Any]:
    """Serve requests that arrive one after the other; return their answers and the events."""
    told: dict[str, list[int]] = {}
    waiting, gone, preempted = list(wanted), set(ABORTED), 0
    for step in range(5000):
        if step % 2 == 0 and waiting:
            name = waiting.pop(0)
            told[name] = []
            add(engine, name, *wanted[name])
        outputs, executed = engine.step_fn()
        engine.post_step(executed)
        check(engine)
        for output in (each for of in (outputs or {}).values() for each in of.outputs):
            told[output.request_id] += output.new_token_ids
            events = output.events or ()
            preempted += sum(each.type is EngineCoreEventType.PREEMPTED for each in events)
        for name in [each for each in gone if len(told.get(each, ())) > 2]:  # client disconnects
            gone.remove(name)
            engine.abort_requests([name])
        if not waiting and not engine.scheduler.has_requests() and not engine.batch_queue:
            return {"told": told, "preempted": preempted, "steps": step}
    raise AssertionError("the requests do not end")


def check(engine: EngineCore) -> None:
    """Check all laws of kvcore, if the manager is kvcore's."""
    core = getattr(engine.scheduler.kv_cache_manager, "core", None)
    if core is not None:
        core.check_integrity()


def run(scene: Scene) -> dict[str, Any]:
    """Serve the requests of a scene; return the results."""
    engine = engine_of(scene)
    manager = engine.scheduler.kv_cache_manager
    wanted = prompts(scene.seed)
    happened = serve(engine, wanted)
    told = happened["told"]
    for name in ABORTED:
        told[name] = told[name][:2]
    right = {
        name: answers(engine.model_executor.groups, tokens, 2 if name in ABORTED else count)
        for name, (tokens, count) in wanted.items()
    }
    happened |= {
        "scene": str(scene),
        "manager": type(manager).__name__,
        "scheduler": type(engine.scheduler).__name__,
        "wrong": [name for name, tokens in right.items() if told[name] != tokens],
        "read": engine.model_executor.num_read,
        "free": manager.block_pool.get_num_free_blocks(),
        "blocks": scene.blocks,
        "reset": engine.reset_prefix_cache(),
    }
    engine.shutdown()
    return happened


if __name__ == "__main__":
    for scene in SCENES:
        print(json.dumps(run(scene)), flush=True)
