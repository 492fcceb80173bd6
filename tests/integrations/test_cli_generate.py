# SPDX-License-Identifier: Apache-2.0
"""``kvcore generate``: tiny models from folders, streamed text, conversations."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cli_runs import refused, shown, told
from conftest import require
from kvcore.apps.cli.main import main

torch = require("torch")
transformers = require("transformers")

from tiny_model_dir import CHAT_TEMPLATE, word_tokenizer, write_folder  # noqa: E402

PROMPT = "w1 w2 w3 w4 w5 w6 w7"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    write_folder(folder, word_tokenizer())
    return folder


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chatty")
    write_folder(folder, word_tokenizer(chat_template=CHAT_TEMPLATE))
    return folder


def plainly(folder: Path, ids: Sequence[int], tokens: int) -> list[int]:
    """Return the tokens that the model generates without kvcore."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    given = torch.tensor([ids])
    mask = torch.ones_like(given)
    out = model.generate(given, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    new: list[int] = out[0, len(ids) :].tolist()
    return new


# -- one call ------------------------------------------------------------------------------------
def test_tokens_are_the_models_own(capsys: pytest.CaptureFixture[str], words: Path) -> None:
    tokenizer = word_tokenizer()
    answer = told(capsys, "generate", words, PROMPT, "--max-new-tokens", 9, "--page-size", 4)
    (result,) = answer["results"]
    assert result["token_ids"] == plainly(words, tokenizer(PROMPT)["input_ids"], 9)
    assert result["text"] == tokenizer.decode(result["token_ids"], skip_special_tokens=True)
    assert (result["prompt"], result["prompt_tokens"]) == (PROMPT, 7)
    assert (result["cached_tokens"], result["finish_reason"]) == (0, "length")
    assert (answer["model"], answer["dtype"], answer["page_size"]) == (str(words), "float32", 4)
    assert (answer["prompt_tokens"], answer["generated_tokens"]) == (7, 9)
    assert answer["pages"] == answer["peak_used_pages"] == 4
    assert answer["peak_bytes"] == 4 * 4 * 2 * 2 * 2 * 16 * 4


def test_equal_beginnings_are_found_in_the_cache(
    capsys: pytest.CaptureFixture[str], words: Path
) -> None:
    prompts = [f"{PROMPT} {PROMPT} w{i}" for i in range(8, 11)]
    answer = told(capsys, "generate", words, *prompts, "--page-size", 2, "--max-new-tokens", 4)
    assert [r["prompt"] for r in answer["results"]] == prompts
    assert answer["cached_tokens"] == sum(r["cached_tokens"] for r in answer["results"]) == 2 * 14
    assert answer["hit_rate"] == pytest.approx(28 / 45)


def test_text_comes_and_then_a_summary(capsys: pytest.CaptureFixture[str], words: Path) -> None:
    text = told(capsys, "generate", words, PROMPT)["results"][0]["text"]
    first, *between, last = shown(capsys, "generate", words, PROMPT).splitlines()
    assert (first, between) == (text, [""])
    assert last.startswith("64 tokens at ")
    assert "0 of 7 prompt tokens from the cache (hit rate 0.0%)" in last
    assert "in 5 pages of 16" in last


def test_texts_of_several_prompts_stand_under_their_prompts(
    capsys: pytest.CaptureFixture[str], words: Path
) -> None:
    prompts = ["w1 w2", "w3", "w4 w5 w6"]
    results = told(capsys, "generate", words, *prompts, "--max-new-tokens", 6)["results"]
    out = shown(capsys, "generate", words, *prompts, "--max-new-tokens", 6)
    want = "".join(f"> {r['prompt']}\n{r['text']}\n" for r in results)
    assert out.startswith(want)


def test_text_is_written_while_it_is_generated(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr("kvcore.apps.cli.generate._write", written.append)
    assert main(["generate", str(words), PROMPT, "--max-new-tokens", "5"]) == 0
    assert len(written) == 6  # five tokens and the end of the line


def test_generation_ends_with_the_models_eos(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: Path
) -> None:
    said = told(capsys, "generate", words, PROMPT)["results"][0]["token_ids"]
    write_folder(tmp_path, word_tokenizer(), eos_token_id=said[5])
    (result,) = told(capsys, "generate", tmp_path, PROMPT)["results"]
    assert result["token_ids"] == said[: said.index(said[5]) + 1]
    assert result["finish_reason"] == "eos"
    assert shown(capsys, "generate", tmp_path, PROMPT).startswith(f"{result['text']}\n")


def test_drawing_repeats_with_a_seed(capsys: pytest.CaptureFixture[str], words: Path) -> None:
    def drawn(*options: object) -> list[int]:
        (answer,) = told(capsys, "generate", words, PROMPT, *options)["results"]
        tokens: list[int] = answer["token_ids"]
        return tokens

    greedy = drawn()
    assert drawn("--temperature", 0) == greedy
    one = drawn("--temperature", 5, "--seed", 1)
    assert one == drawn("--temperature", 5, "--seed", 1)
    assert greedy != one != drawn("--temperature", 5, "--seed", 2)


def test_dtype_is_that_of_model_and_pages(capsys: pytest.CaptureFixture[str], words: Path) -> None:
    wide, narrow = (
        told(capsys, "generate", words, PROMPT, "--dtype", dtype)
        for dtype in ("float32", "bfloat16")
    )
    assert narrow["dtype"] == "bfloat16"
    assert narrow["peak_bytes"] * 2 == wide["peak_bytes"]


def test_memory_bounds_the_pool(capsys: pytest.CaptureFixture[str], words: Path) -> None:
    prompts = ["w1", "w2", "w3", "w4"]
    free = told(capsys, "generate", words, *prompts, "--max-new-tokens", 20)
    tight = told(capsys, "generate", words, *prompts, "--max-new-tokens", 20, "--memory", "24KiB")
    assert tight["pages"] == 3 < free["pages"]
    assert [r["token_ids"] for r in tight["results"]] == [r["token_ids"] for r in free["results"]]


# -- conversations -------------------------------------------------------------------------------
def says(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


@pytest.mark.parametrize("folder", ["words", "chatty"])
def test_every_turn_finds_the_pages_of_those_before(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    folder: str,
) -> None:
    where = request.getfixturevalue(folder)
    says(monkeypatch, "w8 w9 w10\n\n  \nw11 w12\n")
    how = ("--chat", "--page-size", 4, "--max-new-tokens", 9)
    results = told(capsys, "generate", where, PROMPT, *how)["results"]
    assert [r["prompt"] for r in results] == [PROMPT, "w8 w9 w10", "w11 w12"]
    for before, after in itertools.pairwise(results):
        # All written tokens are found; the last token of an answer has not run yet.
        said = before["prompt_tokens"] + len(before["token_ids"]) - 1
        assert after["cached_tokens"] in (said, said - said % 4)
        assert after["prompt_tokens"] > said


def test_a_turn_answers_all_that_was_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, chatty: Path
) -> None:
    says(monkeypatch, "w8 w9 w10\n")
    results = told(capsys, "generate", chatty, PROMPT, "--chat", "--max-new-tokens", 9)["results"]
    said = f"<user> {PROMPT} <bot> {results[0]['text']} <user> w8 w9 w10 <bot>"
    ids = word_tokenizer()(said)["input_ids"]
    assert results[1]["prompt_tokens"] == len(ids)
    assert results[1]["token_ids"] == plainly(chatty, ids, 9)


def test_a_conversation_on_a_terminal_asks_for_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, chatty: Path
) -> None:
    says(monkeypatch, "w8\nw9\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    out = shown(capsys, "generate", chatty, "--chat", "--max-new-tokens", 3)
    assert out.count("> ") == 3
    assert "hit rate" in out


def test_a_conversation_without_a_word_ends_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: Path
) -> None:
    says(monkeypatch, "")
    answer = told(capsys, "generate", words, "--chat")
    assert (answer["results"], answer["hit_rate"], answer["peak_used_pages"]) == ([], 0.0, 0)


def test_a_conversation_longer_than_the_model_is_bad_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: Path
) -> None:
    says(monkeypatch, "w8\n" * 9)
    assert main(["generate", str(words), "--chat"]) == 2
    assert "max_new_tokens" in capsys.readouterr().err


def test_a_template_that_refuses_is_bad_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_folder(tmp_path, word_tokenizer(chat_template="{{ raise_exception('no users') }}"))
    says(monkeypatch, "w8\n")
    assert "template refuses: no users" in refused(capsys, "generate", tmp_path, "--chat")


def test_interrupting_a_conversation_ends_it_without_a_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: Path
) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    says(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "readline", interrupt)
    assert main(["generate", str(words), "--chat"]) == 130
    assert "Traceback" not in capsys.readouterr().err


# -- bad input -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "expected a prompt, or --chat"),
        ([""], "prompt 0 is empty"),
        (["w1", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["w1", "--temperature", "-1"], "--temperature"),
        (["w1", "--page-size", "0"], "--page-size"),
        (["w1", "--dtype", "float64"], "dtype is 'float64'"),
        (["w1", "--memory", "much"], "--memory"),
        (["w1", "--memory", "9B"], "--memory"),
        (["w1", "--memory", "16KiB", "--max-new-tokens", "200"], "max_new_tokens"),
        (["w1", "--max-new-tokens", "300"], "max_seq_len is 256"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], words: Path, options: list[str], text: str
) -> None:
    assert text in refused(capsys, "generate", words, *options)


def without(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def with_text(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (without("config.json"), "no config.json"),
        (without("model.safetensors"), "no *.safetensors"),
        (without("tokenizer.json", "tokenizer_config.json"), "cannot be read"),
        (with_text("config.json", "{"), "cannot be read"),
        (with_text("config.json", '{"model_type": "nothing-known"}'), "cannot be read"),
        (with_text("model.safetensors", "torn"), "cannot be read"),
        (with_text("tokenizer.json", "{}"), "cannot be read"),
    ],
)
def test_folders_that_are_not_whole_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: Path,
    damage: Callable[[Path], None],
    text: str,
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(words, folder)
    damage(folder)
    assert text in refused(capsys, "generate", folder, "w1")


def test_a_folder_that_is_none_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "is not a folder" in refused(capsys, "generate", tmp_path / "nowhere", "w1")


def test_models_that_cannot_run_on_pages_are_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = transformers.MambaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, state_size=4
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    assert "recurrent state" in refused(capsys, "generate", tmp_path, "w1")


def test_missing_libraries_are_one_line_and_exit_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = refused(capsys, "generate", words, "w1", code=1)
    assert "pip install 'kvcore[transformers]'" in line


# -- the program ---------------------------------------------------------------------------------
def test_neither_the_library_nor_the_help_imports_torch() -> None:
    code = (
        "import sys, kvcore, kvcore.apps.cli.main as cli; cli.main(['generate', '--help']);"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert "Example: kvcore generate" in done.stdout


def test_program_prints_nothing_but_its_answer(words: Path) -> None:
    line = [sys.executable, "-m", "kvcore", "generate", str(words), PROMPT, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert json.loads(done.stdout)["generated_tokens"] == 64


def test_command_line_page_names_every_json_key(
    capsys: pytest.CaptureFixture[str], words: Path
) -> None:
    answer = told(capsys, "generate", words, PROMPT)
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    section = page.split("\n## kvcore generate")[1].split("\n## ")[0]
    keys = [*answer, *answer["results"][0]]
    assert [key for key in keys if f"`{key}`" not in section] == []
