# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler on kvcore, with a model that answers at once.

Run by ``tests/integrations/run_vllm.py --part ours``.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from importlib.metadata import entry_points
from typing import Any

import pytest
import vllm
from tests.v1.core.utils import (  # type: ignore[import-not-found]
    create_requests,
    create_scheduler,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.engine import core as core_module
from vllm.v1.outputs import ModelRunnerOutput

import kvcore
import kvcore.integrations.vllm as integration
from kvcore.integrations.vllm import choice
from kvcore.integrations.vllm.manager import KVCoreManager

#: vLLM's own: these tests run after vllm_plugin has replaced the class in vLLM's module.
KVCacheManager = choice.KVCacheManager  # type: ignore[attr-defined]


def test_the_entry_point_is_found() -> None:
    (found,) = [
        each for each in entry_points(group="vllm.general_plugins") if each.name == "kvcore"
    ]
    assert found.load() is integration.register


def answer(output: Any) -> ModelRunnerOutput:
    """Return the output of a model that has run everything that was scheduled."""
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
        "KV cache manager: vLLM's own, not kvcore's: "
        "kvcore serves vLLM 0.32.0 and 0.33.0, and this is 0.34.0"
    ]


@pytest.mark.parametrize(
    ("module", "name"),
    [(scheduler_module, "KVCacheManager"), (core_module, "get_request_block_hasher")],
)
def test_what_another_plug_in_has_replaced_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: Any, name: str
) -> None:
    unbind(monkeypatch)
    other = object()
    monkeypatch.setattr(module, name, other)
    monkeypatch.setenv("KVCORE_VLLM", "on")
    with caplog.at_level(logging.INFO):
        integration.register()
        integration.register()
    assert getattr(module, name) is other
    assert scheduler_module.KVCacheManager is not choice.make_manager
    assert core_module.get_request_block_hasher is not choice.lazily_hashed
    (line,) = said(caplog)
    assert "another plug-in has replaced" in line


def test_a_manager_that_is_called_otherwise_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unbind(monkeypatch)

    def free(self: Any, request: Any, *, reason: str) -> None:
        """A method with a parameter that a patched vLLM may add."""

    monkeypatch.setattr(KVCacheManager, "free", free)
    monkeypatch.setenv("KVCORE_VLLM", "1")
    with caplog.at_level(logging.INFO):
        integration.register()
    assert scheduler_module.KVCacheManager is KVCacheManager
    (line,) = said(caplog)
    assert "this vLLM calls its manager in another way (KVCoreManager.free: " in line


def unbind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore vLLM's modules as they are without kvcore, until the test ends."""
    monkeypatch.setattr(scheduler_module, "KVCacheManager", KVCacheManager)
    monkeypatch.setattr(
        core_module, "get_request_block_hasher", kv_cache_utils.get_request_block_hasher
    )
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that kvcore wrote to vLLM's log."""
    return [each.getMessage() for each in caplog.records if each.name == "vllm.kvcore"]


def test_nothing_happens_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "KVCacheManager", KVCacheManager)
    monkeypatch.setenv("KVCORE_VLLM", "0")
    integration.register()
    assert scheduler_module.KVCacheManager is KVCacheManager


def test_which_manager_runs_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the manager once, also if kvcore does not serve the cache, or fails."""
    monkeypatch.setattr(choice, "_told", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        made = made_with()
        assert type(made) is KVCoreManager
        (line,) = said(caplog)
        assert line.startswith(f"KV cache manager: kvcore {kvcore.__version__} (KVCoreManager), ")
        assert [each.levelno for each in caplog.records if each.name == "vllm.kvcore"] == [
            logging.INFO
        ]
        for options, reason in (
            ({"num_hash_lookahead_tokens": 1}, "kvcore does not serve hashes that look ahead"),
            ({"pcp_world_size": 2}, "kvcore does not serve context parallelism"),
        ):
            caplog.clear()
            for _ in range(2):
                assert type(made_with(**options)) is KVCacheManager
            assert said(caplog) == [f"KV cache manager: vLLM's own, not kvcore's: {reason}"]


def test_a_manager_that_fails_is_replaced_by_vllms_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "_told", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def fail(*_: Any) -> None:
        raise RuntimeError("no core today")

    config = config_of_a_cache()
    monkeypatch.setattr(KVCoreManager, "_make_core", fail)
    with caplog.at_level(logging.INFO):
        made = made_with(config)
        assert type(made) is KVCacheManager
    assert said(caplog) == [
        "KV cache manager: vLLM's own, not kvcore's: kvcore failed with RuntimeError: no core today"
    ]
    assert choice._made == [False]  # the hashes are also vLLM's


def test_arguments_that_are_not_known_are_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later vLLM may pass its manager an argument that changes which tokens must be cached."""
    config = config_of_a_cache()
    assert choice.unserved(config, share_between_models=True) == (
        "kvcore does not know the manager's arguments share_between_models"
    )
    known = inspect.signature(KVCacheManager).parameters
    defaults = {name: each.default for name, each in known.items() if name != "kv_cache_config"}
    assert choice.unserved(config, **defaults) is None


def config_of_a_cache() -> Any:
    from vllm_checks_faults import make_manager

    return make_manager().kv_cache_config


def made_with(config: Any = None, **options: Any) -> Any:
    return choice.make_manager(
        config or config_of_a_cache(), max_model_len=64, scheduler_block_size=16,
        hash_block_size=16, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("interval", "reason"),
    [(None, None), (0, None), (64, "kvcore does not serve windows that are kept at intervals")],
)
def test_windows_at_ends_of_prompts_are_served(interval: int | None, reason: str | None) -> None:
    """0 is vLLM's default."""
    from vllm_checks_faults import make_manager

    config = dataclasses.replace(
        make_manager().kv_cache_config, prefix_cache_retention_interval=interval
    )
    assert choice.unserved(config) == reason
