# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay``: its JSON, its table, its options and its exit on bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import refused, told
from kvcore.apps.cli.main import main
from trace_files import row, write_trace

PROMISED = {
    "requests",
    "refused",
    "leaked_pages",
    "prompt_tokens",
    "cached_tokens",
    "token_hit_rate",
    "page_hit_rate",
    "evicted_pages",
    "preemptions",
    "pages",
    "peak_used_pages",
    "manager_seconds",
    "wall_seconds",
    "tokens_per_second",
    "step_us_p50",
    "step_us_p99",
}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [row([0, n % 3], timestamp=n * 50, output=20) for n in range(30)]
    return str(write_trace(tmp_path, *rows))


@pytest.mark.parametrize("mode", ["online", "admission"])
def test_json_has_every_promised_key(
    capsys: pytest.CaptureFixture[str], trace: str, mode: str
) -> None:
    answer = told(capsys, "replay", trace, "--mode", mode, "--pages", "500")
    assert answer.keys() >= PROMISED
    assert answer["mode"] == mode
    assert (answer["requests"], answer["refused"], answer["leaked_pages"]) == (30, 0, 0)
    assert (answer["pages"], answer["page_size"]) == (500, 16)
    assert answer["prompt_tokens"] == 30 * 1024
    outputs = 30 * 20 if mode == "online" else 0
    tokens = answer["tokens_per_second"] * answer["manager_seconds"]
    assert tokens == pytest.approx(answer["prompt_tokens"] + outputs)
    assert answer["token_hit_rate"] == answer["cached_tokens"] / answer["prompt_tokens"]
    assert 0 < answer["manager_seconds"] <= answer["wall_seconds"]
    assert 0 < answer["step_us_p50"] <= answer["step_us_p99"]


def test_refused_prompts_do_not_count_as_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(write_trace(tmp_path, row([0]), row([1, 2])))
    answer = told(capsys, "replay", path, "--mode", "admission", "--pages", "40")
    assert (answer["requests"], answer["refused"]) == (1, 1)
    assert answer["prompt_tokens"] == 3 * 512
    tokens = answer["tokens_per_second"] * answer["manager_seconds"]
    assert tokens == pytest.approx(512)


def test_without_a_trace_there_is_chat(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "replay", "--limit", "40", "--seed", "3")
    assert answer["requests"] == 40
    assert answer["workload"] == "built-in chat, seed 3"
    assert answer == told(capsys, "replay", "--limit", "40", "--seed", "3") | {
        name: answer[name]
        for name in answer
        if "seconds" in name or "_us_" in name or name == "tokens_per_second"
    }


def test_table_names_what_was_measured(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    assert main(["replay", trace, "--replicas", "2", "--pages", "100"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "trace.jsonl, online: 2 x 100 pages of 16 tokens" in shown.out
    for name in (
        "token hit rate",
        "page hit rate",
        "evicted pages",
        "preemptions",
        "peak occupancy",
        "mean occupancy",
        "per step",
        "per request",
        "M tokens/s",
    ):
        assert name in shown.out


def test_memory_and_model_size_the_pool(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    # 2 * 32 layers * 8 heads * 128 elements * 2 bytes = 128 KiB per token
    sized = ("--memory", "64 MiB", "--model", "Llama-3.1-8B")
    assert told(capsys, "replay", trace, *sized)["pages"] == 32
    halved = told(capsys, "replay", trace, *sized, "--replicas", "2", "--page-size", "32")
    assert (halved["pages"], halved["total_pages"]) == (8, 16)


def test_model_may_be_a_config_file(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "torch_dtype": "float16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    # 2 * 2 layers * 2 heads * 16 elements * 2 bytes * 16 tokens = 4 KiB per page
    for model in (path, tmp_path):
        answer = told(capsys, "replay", trace, "--memory", "1MiB", "--model", str(model))
        assert answer["pages"] == 256
    path.write_text("[]", encoding="utf-8")
    assert "config.json: " in refused(
        capsys, "replay", trace, "--memory", "1MiB", "--model", str(path)
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--page-size", "0"], "'--page-size': expected 1 to 2147483647, got 0"),
        (["--pages", "0"], "'--pages': expected 1 to 2147483647, got 0"),
        (["--page-size", "2147483648"], "expected 1 to 2147483647, got 2147483648"),
        (["--pages", "many"], "'--pages'"),
        (["--replicas", "-1"], "'--replicas': expected 1 to 32767, got -1"),
        (["--replicas", "100000"], "'--replicas': expected 1 to 32767, got 100000"),
        (["--seed", "-1"], "'--seed': expected at least 0, got -1"),
        (["--limit", "0"], "'--limit': expected 1 to 2147483647, got 0"),
        (["--chunk", "0"], "'--chunk': expected 1 to 2147483647, got 0"),
        (["--concurrency", "0"], "'--concurrency': expected 1 to 2147483647, got 0"),
        (["--decode-steps", "0"], "'--decode-steps': expected 1 to 2147483647, got 0"),
        (["--decode-rate", "0.5"], "'--decode-rate': expected at least 1, got 0.5"),
        (["--prefill-rate", "nan"], "'--prefill-rate': expected at least 1, got nan"),
        (["--mode", "offline"], "'--mode'"),
        (["--memory", "1GiB"], "expected --pages, or --memory together with --model"),
        (["--model", "llama-3.1-8b"], "expected --pages, or --memory together with --model"),
        (["--pages", "1", "--memory", "1GiB", "--model", "x"], "expected --pages, or --memory"),
        (["--memory", "1", "--model", "qwen3-8b"], "pages of 2359296 bytes on each of 1 replicas"),
        (["--memory", "lots", "--model", "qwen3-8b"], "expected a size such as 80GiB"),
        (["--memory", "1GiB", "--model", "gpt-9"], "llama-3.1-8b, llama-3.1-70b"),
        (["no-such-trace"], "no-such-trace: cannot be read: No such file"),
        (["one", "two"], "unexpected extra argument"),
        (["--wrong"], "No such option"),
    ],
)
def test_bad_option_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    line = refused(capsys, "replay", *arguments)
    assert line.startswith("kvcore: error: ")
    assert told in line


def test_malformed_trace_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_trace(tmp_path, row([0]), row([0], output=-3))
    told = f"{path}:2: output_length: expected a positive integer, at most 16777216 tokens, got -3"
    assert told in refused(capsys, "replay", str(path))
    assert told in refused(capsys, "replay", str(path), "--json")


def test_module_is_the_same_program(trace: str) -> None:
    command = [sys.executable, "-m", "kvcore", "replay", trace, "--json", "--mode", "admission"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["requests"] == 30
    done = subprocess.run([*command, "--pages", "-1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
