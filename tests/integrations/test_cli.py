# SPDX-License-Identifier: Apache-2.0
"""The program itself, ``kvcore info``, sizes, models, and the modules that an import leaves out."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import kvcore
from cli_runs import refused, shown, told
from kvcore.apps.cli.machine import isa_level, x86_64_level
from kvcore.apps.cli.presets import PRESETS, model_params
from kvcore.apps.cli.progress import progress_bar
from kvcore.apps.cli.token_counts import parse_tokens
from kvcore.backends.cuda import availability
from kvcore.support.byte_sizes import format_size, parse_size

V2 = "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def test_options_print_version_and_paths(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--version") == f"kvcore {kvcore.__version__}\n"
    assert shown(capsys, "--cmakedir") == f"{kvcore.get_cmake_dir()}\n"
    assert shown(capsys, "--includes") == f"{kvcore.get_include()}\n"


def without_libraries(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program without a library of the extra `cli`."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from kvcore.__main__ import main; sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_builds_find_the_library_without_the_extra(missing: str) -> None:
    for option, path in (
        ("--cmakedir", kvcore.get_cmake_dir()),
        ("--includes", kvcore.get_include()),
    ):
        done = without_libraries(missing, option)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}\n", "")


@pytest.mark.parametrize("missing", ["typer", "rich"])
@pytest.mark.parametrize("arguments", [[], ["demo"], ["--cmakedir", "info"]])
def test_without_the_extra_one_line_says_how_to_get_it(missing: str, arguments: list[str]) -> None:
    done = without_libraries(missing, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    line = f"kvcore: error: the command line needs {missing}; pip install 'kvcore[cli]'\n"
    assert done.stderr == line


@pytest.mark.parametrize(
    "command", [[], ["demo"], ["replay"], ["plan"], ["info"], ["tune-attention"]]
)
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert f"Example: kvcore {' '.join(command)}" in shown(capsys, *command, "--help")


@pytest.mark.skipif(availability.why_unavailable() == "", reason="there is a GPU")
def test_attention_is_tuned_on_a_gpu_only(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "tune-attention", code=1)
    assert line == f"kvcore: error: CUDA unavailable: {availability.why_unavailable()}\n"
    assert "expected a multiple of the 8 --heads" in refused(
        capsys, "tune-attention", "--q-heads", 12
    )
    assert "--dtype is float32, expected one of float16, bfloat16" in refused(
        capsys, "tune-attention", "--dtype", "float32"
    )


def test_without_arguments_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys) == shown(capsys, "--help")


@pytest.mark.parametrize("arguments", [["fly"], ["--fly"], ["info", "--fly"], ["info", "now"]])
def test_unknown_words_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    refused(capsys, *arguments)


def test_info_tells_versions_isa_and_why_cuda_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    facts = told(capsys, "info")
    assert facts["kvcore"] == kvcore.__version__
    assert facts["python"] == platform.python_version()
    assert facts["numpy"] == np.__version__
    assert facts["compiler"]
    assert facts["isa"] == isa_level()
    assert facts["cuda"]["available"] is (facts["cuda"]["reason"] is None)
    text = shown(capsys, "info")
    assert facts["isa"] in text
    assert "cuda" in text


def test_import_of_the_library_leaves_the_command_line_out() -> None:
    code = (
        "import sys, kvcore; print(sorted({'typer', 'rich', 'kvcore.replay'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("sse2", "x86-64"),
        (V2, "x86-64-v2"),
        (f"{V2} avx avx2", "x86-64-v2"),
        (V3, "x86-64-v3"),
        (V4, "x86-64-v4"),
        (V4.replace("fma ", ""), "x86-64-v2"),
    ],
)
def test_isa_level_needs_all_features_of_all_levels_below(flags: str, level: str) -> None:
    assert x86_64_level(flags.split()) == level


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10B", 10),
        ("80GiB", 80 << 30),
        ("80gib", 80 << 30),
        (" 1.5 GB ", 1_500_000_000),
        (".5KiB", 512),
        ("2TiB", 2 << 40),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1G", "1e3", "0x10", "1 000", "1PiB", "nan"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as 80GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1_081_344, "1.03 MiB"),
        (80 << 30, "80 GiB"),
        (3 << 49, "1536 TiB"),
    ],
)
def test_sizes_are_written(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1", 1), ("4096", 4096), ("32k", 32_768), ("128K", 131_072), (" 1M ", 1 << 20)],
)
def test_tokens_are_read(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "0", "-1", "1.5k", "32kB", "32KiB", "1G", "2048M", "x"])
def test_other_counts_of_tokens_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="tokens"):
        parse_tokens(text)


def test_presets_give_the_published_bytes_per_token() -> None:
    want = {"llama-3.1-8b": 128 << 10, "llama-3.1-70b": 320 << 10, "deepseek-v3": 61 * 576 * 2}
    got = {name: model_params(name, 16).bytes_per_token for name in want}
    assert got == want
    assert all(shape.params(16, groups=True).page_size == 16 for shape in PRESETS.values())


def test_progress_is_shown_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress_bar("requests", 10) as on_progress:
        assert on_progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("requests", 10) as on_progress:
        assert on_progress is not None
        on_progress(5)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "requests" in captured.err


def failing(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def test_what_the_machine_does_not_give_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (OSError(28, "No space left on device"), MemoryError()):
        monkeypatch.setattr("kvcore.apps.cli.info.collect", failing(error))
        refused(capsys, "info", code=1)
