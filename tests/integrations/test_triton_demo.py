# SPDX-License-Identifier: Apache-2.0
"""``kvcore demo --device cuda:N``: chats whose pages and attention are on an emulated GPU."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

from conftest import require
from cuda_machine import require_emulation
from triton_interpreter import require_interpreter

require_interpreter()
require_emulation()
require("typer")

from cli_runs import refused, told  # noqa: E402
from kvcore import Device, ops  # noqa: E402
from kvcore.apps.cli.main import main  # noqa: E402
from kvcore.apps.demo import (  # noqa: E402
    ChatServer,
    ChatSettings,
    EngineSettings,
    Shape,
    Transformer,
    chats,
    check,
    make_chats,
    run,
    settings,
)
from kvcore.backends.cuda import availability  # noqa: E402

SHAPE = Shape(num_layers=2, hidden=32, ffn=48, vocabulary=64, n_q_heads=4, n_kv_heads=2, head_dim=8)
FEW = ChatSettings(
    chats=3,
    turns=2,
    system_prompts=2,
    system_tokens=(9, 14),
    message_tokens=(2, 4),
    answer_tokens=(2, 3),
    gap_steps=(0, 2),
    pause_steps=(0, 3),
    vocabulary=64,
)
ENGINE = EngineSettings(pages=60, page_size=4, max_running=3, step_tokens=24)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "change",
    [{}, {"prefix_caching": False}, {"page_size": 3, "pages": 20}, {"pages": 12}],
    ids=str,
)
def test_tokens_are_those_without_a_cache(change: dict[str, Any]) -> None:
    model, given = Transformer(SHAPE), make_chats(FEW)
    engine = dataclasses.replace(ENGINE, device=Device("cuda", 1), **change)
    server = ChatServer(model, given, engine)
    served = server.run()
    assert server.manager.devices == (Device("cuda", 1),)
    found = check(model, served.conversations)
    assert (found.tokens, found.differing, served.leaked_pages) == (served.generated_tokens, 0, 0)
    there = [each.tokens.tolist() for each in served.conversations]
    here = ChatServer(model, given, dataclasses.replace(engine, device=Device("cpu"))).run()
    assert there == [each.tokens.tolist() for each in here.conversations]
    assert served.metrics == here.metrics


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a model and chats that an interpreter serves in seconds."""
    monkeypatch.setattr(run, "Transformer", lambda seed: Transformer(SHAPE, seed=seed))

    def few(asked: ChatSettings, seed: int = 0) -> list[chats.Chat]:
        return make_chats(dataclasses.replace(FEW, chats=asked.chats, turns=asked.turns), seed=seed)

    for module in (run, settings):
        monkeypatch.setattr(module, "make_chats", few)


SMALL = ["--chats", "2", "--turns", "2", "--page-size", "4"]


@pytest.mark.usefixtures("machine", "small")
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_the_command_serves_on_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    places: set[str] = set()
    right = ops.attention

    def noted(inputs: Any, *args: Any, **rest: Any) -> Any:
        places.add(f"cuda:{inputs.blocks.data.device_id}")
        return right(inputs, *args, **rest)

    monkeypatch.setattr(ops, "attention", noted)
    answer = told(capsys, "demo", *SMALL, "--dtype", dtype, "--device", "cuda:1")
    assert places == {"cuda:1"}
    assert (answer["device"], answer["is_right"]) == ("cuda:1", True)
    assert answer["with_cache"]["cached_tokens"] > 0
    assert answer["check"]["differing"] == 0 or dtype != "float32"


@pytest.mark.usefixtures("machine", "small")
def test_the_table_names_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, "--device", "cuda"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens in float32 on cuda:0" in text


# -- bad input -------------------------------------------------------------------------------------
@pytest.mark.usefixtures("machine")
def test_a_gpu_that_is_not_there_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "demo", "--device", "cuda:2")
    assert "'--device': expected an index below 2, got 2: there are 2 GPUs" in line


@pytest.mark.usefixtures("machine", "small")
def test_pages_beyond_the_memory_are_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "demo", "--device", "cuda:0", "--pages", 10**7, *SMALL)
    assert "more memory than there is" in line


@pytest.mark.usefixtures("machine")
def test_triton_that_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    availability._imported.cache_clear()
    for name in [n for n in sys.modules if n.startswith("kvcore.backends.cuda.attention")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    line = refused(capsys, "demo", "--device", "cuda:0", code=1)
    assert line == (
        "kvcore: error: attention on GPUs unavailable: triton is not installed; "
        "pip install 'kvcore[attention]'\n"
    )
