# SPDX-License-Identifier: Apache-2.0
"""The small engine of examples/ gives model.generate's answers, on one process and on three."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import require

torch = require("torch")
transformers = require("transformers")

from hf_models import VOCABULARY, build, expected_of, model_of, plain, prompts_of  # noqa: E402
from mini_engine.__main__ import main  # noqa: E402
from mini_engine.engine import Engine, Token  # noqa: E402
from mini_engine.processes import WorkerError  # noqa: E402
from mini_engine.random_model import write_random_model  # noqa: E402
from tiny_model_dir import byte_tokenizer  # noqa: E402

torch.set_num_threads(1)

NEW = 14
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mini_engine"

Answers = dict[tuple[int, int], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    model_of("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two workers"])
def engine(request: Any, folder: Path) -> Iterator[Engine]:
    """An engine with chunks of 24 tokens, and pages for little more than the longest sequence."""
    with closing(
        Engine(folder, workers=request.param, page_size=4, num_pages=24, max_batch_tokens=24)
    ) as made:
        yield made


def answers_of(engine: Engine) -> Answers:
    answers: Answers = defaultdict(list)
    for token in engine.stream():
        answers[token.sequence].append(token.token)
    engine.manager.check_integrity()
    assert engine.manager.num_free_blocks == engine.manager.total_num_pages
    return answers


def greedily(engine: Engine, prompts: list[list[int]], new: int) -> list[list[int]]:
    numbers = [engine.add(prompt, new) for prompt in prompts]
    answers = answers_of(engine)
    return [answers[number, 0] for number in numbers]


def test_prompts_in_chunks_and_with_preemptions_answer_what_generate_does(engine: Engine) -> None:
    engine.manager.reset_metrics()
    before = engine.scheduler.num_preemptions
    assert greedily(engine, prompts_of(), NEW) == expected_of("llama", NEW)
    assert engine.manager.metrics.cache_tokens > 0  # of prompts with a common prefix
    assert engine.scheduler.num_preemptions > before


def test_what_was_served_is_found_in_the_cache(engine: Engine) -> None:
    (prompt,), (expected,) = prompts_of()[6:7], expected_of("llama", NEW)[6:7]
    assert greedily(engine, [prompt], NEW) == [expected]
    engine.manager.reset_metrics()
    assert greedily(engine, [prompt], NEW) == [expected]
    found = engine.manager.metrics
    assert (found.input_tokens, found.generated_tokens) == (1, NEW)  # the prompt's last token


def test_the_likeliest_tokens_of_two_samples_are_the_same(engine: Engine) -> None:
    number = engine.add(prompts_of()[3], NEW, n=2)
    answers = answers_of(engine)
    assert answers[number, 0] == answers[number, 1] == expected_of("llama", NEW)[3]


def test_samples_differ_and_are_the_same_again_on_other_workers(folder: Path) -> None:
    found = []
    for workers, beside in ((0, 0), (2, 3)):
        with closing(Engine(folder, workers=workers)) as engine:
            engine.add(prompts_of()[3], NEW, n=3, temperature=1.0, seed=5)
            for prompt in prompts_of()[:beside]:
                engine.add(prompt, NEW, temperature=0.7)
            answers = answers_of(engine)
        found.append([answers[0, sample] for sample in range(3)])
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == 3


def test_draws_follow_the_softmax(folder: Path) -> None:
    """The first token of many samples, against the probabilities that transformers computes."""
    count, prompt = 600, prompts_of()[1]
    with closing(Engine(folder, max_running=count, max_batch_tokens=count)) as engine:
        engine.add(prompt, 1, n=count, temperature=2.0, seed=1)
        drawn = [token.token for token in engine.stream()]
    with torch.inference_mode():
        logits = model_of("llama")(torch.tensor([prompt])).logits[0, -1]
    likely = torch.softmax(logits / 2.0, 0).numpy()
    found = np.bincount(drawn, minlength=VOCABULARY) / count
    spread = np.sqrt(likely * (1 - likely) / count)
    assert (np.abs(found - likely) < 5 * spread + 1 / count).all()


def test_tokens_come_in_order_and_requests_join_those_that_run(engine: Engine) -> None:
    expected = expected_of("llama", NEW)
    first = engine.add(prompts_of()[0], NEW)
    seen: dict[int, list[Token]] = defaultdict(list)
    second = -1
    for token in engine.stream():
        seen[token.sequence[0]].append(token)
        if second < 0:
            second = engine.add(prompts_of()[1], NEW)
        elif len(seen) == 2 and len(seen[second]) == 1:
            assert len(seen[first]) < NEW  # the other request runs in the same batches
    assert [[t.token for t in seen[n]] for n in (first, second)] == expected[:2]
    for tokens in seen.values():
        assert [t.finish_reason for t in tokens] == [None] * (NEW - 1) + ["length"]


def test_an_end_of_text_token_stops_a_sequence(tmp_path: Path) -> None:
    answer = expected_of("llama", NEW)[2]
    model = build("llama")
    model.generation_config.eos_token_id = [answer[5], 1]
    model.save_pretrained(tmp_path)
    with closing(Engine(tmp_path)) as engine:
        engine.add(prompts_of()[2], NEW)
        tokens = list(engine.stream())
    place = answer.index(answer[5])
    assert [token.token for token in tokens] == answer[: place + 1]
    assert tokens[-1].finish_reason == "stop"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_sharded_checkpoints_with_scaled_rotations_are_read(
    dtype: str, tmp_path: Path
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    made = build("llama", tie_word_embeddings=True, rope_parameters=rope, num_hidden_layers=2)
    made.to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with closing(Engine(tmp_path)) as engine:
        assert greedily(engine, prompts_of(), 6) == plain(model, prompts_of(), 6)


def test_transformers_reads_the_random_model(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(write_random_model(tmp_path))
    with closing(Engine(tmp_path)) as engine:
        assert greedily(engine, prompts_of(), 6) == plain(model, prompts_of(), 6)


# -- failures --------------------------------------------------------------------------------------
def test_what_it_cannot_serve_is_refused(folder: Path, tmp_path: Path) -> None:
    with closing(Engine(folder)) as engine:
        for prompt in ([], [VOCABULARY], [-1]):
            with pytest.raises(ValueError, match="tokens from 0 to 198"):
                engine.add(prompt, 1)
        with pytest.raises(ValueError, match="n is 0"):
            engine.add([1], 1, n=0)
        with pytest.raises(ValueError, match="temperature -1"):
            engine.add([1], 1, temperature=-1)
        with pytest.raises(ValueError, match="seed -1"):
            engine.add([1], 1, seed=-1)
        assert list(engine.stream()) == []
    write_random_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field, value in {
        "attention_bias": True,
        "architectures": ["GPT2LMHeadModel"],
        "hidden_act": "gelu",
        "quantization_config": {"bits": 4},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }.items():
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(ValueError, match="must be one of"):
            Engine(tmp_path)
    with pytest.raises(ValueError, match="n_kv_heads 2 does not divide"):
        Engine(folder, workers=3)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks /proc")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_in_a_step_ends_with_an_error_and_leaves_nothing(
    victim: int, folder: Path
) -> None:
    with closing(Engine(folder, workers=1)):
        pass  # opens the files of multiprocessing
    opened = descriptors()
    engine = Engine(folder, workers=2)
    assert engine._processes is not None
    processes = engine._processes._processes
    engine.add(prompts_of()[3], 100)
    assert len(engine.step()) == 1
    killed = processes[victim].pid
    assert killed is not None
    os.kill(killed, signal.SIGSTOP)  # the step waits for it
    errors: list[Exception] = []

    def step(engine: Engine = engine) -> None:
        try:
            engine.step()
        except WorkerError as error:
            errors.append(error)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    os.kill(killed, signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()
    codes = [0, 0]
    codes[victim] = -9
    assert [f"exit codes {codes}" in str(error) for error in errors] == [True]
    assert not any(process.is_alive() for process in processes)
    with pytest.raises(WorkerError, match="exit codes"):
        engine.step()
    engine.close()
    del engine, processes, step, thread
    errors.clear()  # its frames reference the engine
    gc.collect()
    assert list(Path("/dev/shm").glob(f"pym-{os.getpid()}-*")) == []
    assert descriptors() <= opened


def test_a_worker_that_cannot_begin_ends_the_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_random_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"model.norm.weight", b"model.nora.weight"))
    with pytest.raises(WorkerError, match=r"exit codes \[1, [01]\]"):
        Engine(tmp_path, workers=2)
    assert "KeyError: 'model.norm.weight'" in capfd.readouterr().err


def test_workers_end_with_a_scheduler_that_is_killed(folder: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from mini_engine.engine import Engine\n"
        "if __name__ == '__main__':\n"
        "    engine = Engine(Path(sys.argv[2]), workers=2)\n"
        "    engine.add([1, 2, 3], 400)\n"
        "    for token in engine.stream():\n"
        "        print(token.token, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(EXAMPLE.parent), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
        process.communicate(timeout=60)  # until all processes, also workers, have closed the pipe


# -- the command line ------------------------------------------------------------------------------
def test_the_command_line_serves_a_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build("llama", vocab_size=261).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    command = [str(tmp_path), "good day", "good night", "--max-new-tokens", "6", "--n", "2"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line[:3] for line in lines] == ["0.0", "0.1", "1.0", "1.1"]
    assert "24 tokens in" in err
    assert main([str(tmp_path), "good day", "--max-new-tokens", "6", "--stream"]) == 0
    streamed = capsys.readouterr().out
    assert repr(streamed.rstrip("\n")) in lines[0]


def test_without_a_folder_there_is_a_random_model(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "Hello", "--workers", "2", "--max-new-tokens", "5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0
    assert done.stdout.startswith("0.0 'Hello' -> ")
    assert "use a tiny random model" in done.stderr


def test_the_command_line_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workers", "3"]) == 2
    assert "n_kv_heads 2 does not divide" in capsys.readouterr().err
