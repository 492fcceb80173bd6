# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with a model that answers at once, on kvcore.

Run by ``tests/integrations/run_vllm.py --part ours``.
"""

from __future__ import annotations

import dataclasses
import logging
from importlib.metadata import entry_points
from typing import Any

import pytest
import vllm
from tests.v1.core.utils import (  # type: ignore[import-not-found]
    create_requests,
    create_scheduler,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.outputs import ModelRunnerOutput

import kvcore.integrations.vllm as integration
from kvcore.integrations.vllm import choice
from kvcore.integrations.vllm.manager import KVCoreManager


def test_the_entry_point_is_found() -> None:
    (found,) = [
        each for each in entry_points(group="vllm.general_plugins") if each.name == "kvcore"
    ]
    assert found.load() is integration.register


def answer(output: Any) -> ModelRunnerOutput:
    """What a model says that has run all that was scheduled."""
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[11] for _ in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_run_to_their_end_through_preemptions(is_async: bool) -> None:
    engine = create_scheduler(
        enable_prefix_caching=True, num_blocks=41, max_num_batched_tokens=64, max_model_len=256,
        async_scheduling=is_async,
    )  # fmt: skip
    manager = engine.kv_cache_manager
    assert isinstance(manager, KVCoreManager)
    requests = create_requests(num_requests=12, num_tokens=50, max_tokens=40, same_prompt=False)
    for request in requests:
        engine.add_request(request)
    for _ in range(2000):
        output = engine.schedule()
        manager.core.check_integrity()
        engine.update_from_output(output, answer(output))
        if not engine.has_unfinished_requests():
            break
    assert all(request.num_output_tokens == 40 for request in requests)
    assert manager.block_pool.get_num_free_blocks() == 40
    assert engine.reset_prefix_cache()


def test_another_release_keeps_its_own_manager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler_module, "KVCacheManager", KVCacheManager)
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setenv("KVCORE_VLLM", "1")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        integration.register()
    assert scheduler_module.KVCacheManager is KVCacheManager
    assert [each.getMessage() for each in caplog.records] == [
        "KVCORE_VLLM=1, but kvcore serves vLLM 0.33.x and this is 0.34.0: "
        "vLLM keeps its own manager"
    ]


def test_nothing_happens_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "KVCacheManager", KVCacheManager)
    monkeypatch.setenv("KVCORE_VLLM", "0")
    integration.register()
    assert scheduler_module.KVCacheManager is KVCacheManager


def test_what_is_not_served_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "_told", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        made = [make_lookahead_manager() for _ in range(2)]
    assert all(type(each) is not KVCoreManager for each in made)
    assert [each.getMessage() for each in caplog.records if each.name == "vllm.kvcore"] == [
        "kvcore does not serve hashes that look ahead: vLLM keeps its own manager"
    ]


def make_lookahead_manager() -> Any:
    from vllm_checks_faults import make_manager

    config = make_manager().kv_cache_config
    return choice.make_manager(
        config, max_model_len=64, scheduler_block_size=16, hash_block_size=16,
        num_hash_lookahead_tokens=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("interval", "reason"), [(None, None), (0, None), (64, "windows that are kept at intervals")]
)
def test_windows_at_ends_of_prompts_are_served(interval: int | None, reason: str | None) -> None:
    """0 is what vLLM has where nobody says otherwise."""
    from vllm_checks_faults import make_manager

    config = dataclasses.replace(
        make_manager().kv_cache_config, prefix_cache_retention_interval=interval
    )
    assert choice.unserved(config) == reason
