# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix cache on kvcore: imports, order, and with SGLang's wheel all behaviour.

The folder of the wheel is ``KVCORE_SGLANG``; ``KVCORE_REQUIRE=sglang`` downloads the wheel. Its
sources run in a separate process, with stubs for their imports. A whole SGLang serves models if
``KVCORE_SGLANG_ENGINE`` is the folder of its installation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from conftest import REQUIRED, require
from kvcore.integrations.sglang.order import dfs_weight_order

RUNNER = Path(__file__).with_name("run_sglang.py")
ENGINE_RUNNER = Path(__file__).with_name("run_sglang_engine.py")


def test_the_plug_in_is_an_entry_point_that_imports_nothing_of_sglang() -> None:
    found = {each.name: each.value for each in entry_points(group="sglang.srt.plugins")}
    assert found["kvcore"] == "kvcore.integrations.sglang:register"
    code = "import sys, kvcore, kvcore.integrations.sglang as s; print(s.register)\n"
    code += "assert not {'sglang', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_its_registry_the_plug_in_says_so(caplog: pytest.LogCaptureFixture) -> None:
    from kvcore.integrations import sglang

    if "sglang" in sys.modules:
        pytest.skip("SGLang is installed")
    sglang.register()
    assert "no --radix-cache-backend" in caplog.text


@pytest.mark.parametrize("error", [ValueError("'kvcore' is already registered"), TypeError()])
def test_a_registry_that_refuses_the_backend_is_told_in_a_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvcore.integrations import sglang

    def refuse(_name: str, _factory: Any) -> None:
        raise error

    stub_modules(monkeypatch, "0.5.23", register_radix_cache_backend=refuse)
    sglang.register()
    assert caplog.messages == [
        f"SGLang has no --radix-cache-backend kvcore: SGLang refused it with "
        f"{type(error).__name__}: {error}"
    ]


def test_a_cache_that_cannot_be_made_is_sglangs_own_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The modules that the cache imports are missing here."""
    from kvcore.integrations import sglang

    stub_modules(monkeypatch, "0.5.23", default_radix_cache_factory=lambda _context: "its own")
    assert sglang.make_cache(SimpleNamespace(disable_radix_cache=False)) == "its own"
    (line,) = caplog.messages
    assert line.startswith("SGLang 0.5.23 uses its own cache: kvcore failed with ")


def stub_modules(monkeypatch: pytest.MonkeyPatch, version: str, **registry: Any) -> None:
    """Install a stub of SGLang that has only its version and a registry of caches."""
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.registry": registry,
        "sglang.version": {"__version__": version},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23.post1", "0.6.0", "1.0.0rc1"])
def test_a_version_that_is_not_served_has_its_own_cache_and_a_line(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvcore.integrations import sglang

    known: dict[str, Any] = {}
    stub_modules(
        monkeypatch,
        version,
        register_radix_cache_backend=known.__setitem__,
        default_radix_cache_factory=lambda context: ("its own", context),
    )
    sglang.register()
    context = SimpleNamespace(disable_radix_cache=False)
    assert known["kvcore"](context) == ("its own", context)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"SGLang {version} uses its own cache" in caplog.text


def test_no_radix_cache_has_sglangs_own_and_a_line_that_names_the_option(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvcore.integrations import sglang

    stub_modules(monkeypatch, "0.5.23", default_radix_cache_factory=lambda _context: "its own")
    assert sglang.make_cache(SimpleNamespace(disable_radix_cache=True)) == "its own"
    assert caplog.messages == [
        "--disable-radix-cache leaves kvcore nothing to do: no prefix is cached"
    ]


def test_a_version_without_a_cache_to_fall_back_to_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvcore.integrations import sglang

    known: dict[str, Any] = {}
    stub_modules(monkeypatch, "0.7.0", register_radix_cache_backend=known.__setitem__)
    sglang.register()
    with pytest.raises(NotImplementedError, match="leave out --radix-cache-backend kvcore"):
        known["kvcore"](SimpleNamespace(disable_radix_cache=False))


@pytest.mark.parametrize(
    ("paths", "order"),
    [
        ([], []),
        ([[1]], [0]),
        ([[], [1], []], [1, 0, 2]),
        ([[1], [2, 3], [2, 4], [2]], [1, 2, 3, 0]),
        ([[1, 2], [1, 3], [1, 3, 4], [5]], [2, 1, 0, 3]),
        ([[7]] * 3, [0, 1, 2]),
    ],
)
def test_subtrees_of_many_requests_are_walked_first(
    paths: list[list[int]], order: list[int]
) -> None:
    assert dfs_weight_order(paths) == order


def test_a_long_chain_of_prefixes_is_walked() -> None:
    chain = [list(range(n)) for n in range(1500)]
    assert dfs_weight_order(chain) == list(reversed(range(1500)))


def test_written_calls_answer_as_sglangs_own_cache(tmp_path: Path) -> None:
    require("torch")
    folder = Path(os.environ.get("KVCORE_SGLANG", "."))
    if not list(folder.glob("sglang-*.whl")) and "sglang" not in REQUIRED:
        pytest.skip("KVCORE_SGLANG names no folder with the wheel of SGLang")
    found = tmp_path / "checks.json"
    options = ["--cache", str(folder), "--seeds", "1", "--steps", "25", "--json", str(found)]
    run = subprocess.run(
        [sys.executable, str(RUNNER), *options], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(json.loads(found.read_text())) > 40


@pytest.mark.slow
def test_an_engine_answers_alike_on_both_caches() -> None:
    """Installing SGLang takes minutes and gigabytes, so this test runs only on request."""
    folder = os.environ.get("KVCORE_SGLANG_ENGINE")
    if folder is None:
        pytest.skip("KVCORE_SGLANG_ENGINE names no folder with an installed SGLang")
    command = [sys.executable, str(ENGINE_RUNNER), "--folder", folder, "-k", "llama"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith(" passed, 0 failed\n")
