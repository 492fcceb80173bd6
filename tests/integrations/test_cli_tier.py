# SPDX-License-Identifier: Apache-2.0
"""``kvcore tier``: its report on a store's directory, and the arguments that it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from kvcore.apps.cli.main import main
from stored_pages import FINGERPRINT, PAGE, open_disk, put


def filled(folder: Path) -> Path:
    store = open_disk(folder, 6)
    assert put(store, 1, 2, 3, 4, 5) == 5
    store.close()
    return folder


def damaged(folder: Path) -> Path:
    """Flip a byte of a page's content."""
    file = filled(folder) / "segment-000000.kv"
    data = bytearray(file.read_bytes())
    data[4096 + 100] ^= 1
    file.write_bytes(data)
    return folder


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["tier", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_ls_counts_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = asked(capsys, "ls", str(filled(tmp_path)), "--json")
    found = json.loads(out)
    assert code == 0
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text().split("## kvcore tier")[1]
    assert [name for name in found if f"`{name}`" not in page] == []
    assert found["directory"] == str(tmp_path)
    assert found["stored"] == 5
    assert found["slots"] == 6
    assert found["payload_bytes"] == 5 * PAGE
    assert found["fingerprints"] == {FINGERPRINT.hex(): 5}
    assert found["owner"] == found["corrupt"] == 0
    code, out, _ = asked(capsys, "ls", str(tmp_path))
    assert code == 0
    assert f"5 of {FINGERPRINT.hex()[:16]}" in out
    assert "no process" in out


def test_ls_works_beside_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_disk(tmp_path, 4)
    put(store, 1)
    code, out, _ = asked(capsys, "ls", str(tmp_path), "--json")
    assert code == 0
    assert json.loads(out)["owner"] == os.getpid()
    store.close()


def test_verify_reads_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys, "verify", str(filled(tmp_path / "right")))[0] == 0
    folder = damaged(tmp_path / "wrong")
    code, out, _ = asked(capsys, "verify", str(folder), "--json")
    found = json.loads(out)
    assert code == 1
    assert found["stored"] == 4
    assert found["corrupt"] == 1
    assert found["bad_slots"] == ["segment-000000.kv:0"]
    assert asked(capsys, "ls", str(folder))[0] == 0  # only headers


def test_purge_removes_the_store_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "segment-1.kv").write_text("mine too")
    size = sum(f.stat().st_size for f in tmp_path.glob("*-0*.kv"))
    code, out, _ = asked(capsys, "purge", str(tmp_path), "--yes", "--json")
    assert code == 0
    assert json.loads(out)["removed_bytes"] >= size > 0
    assert sorted(f.name for f in tmp_path.iterdir()) == ["notes.txt", "segment-1.kv"]
    assert asked(capsys, "purge", str(tmp_path), "--yes")[0] == 2


def test_purge_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    asked_for = []

    def confirm(text: str, **_: object) -> None:
        asked_for.append(text)
        raise typer.Abort

    monkeypatch.setattr(typer, "confirm", confirm)
    assert asked(capsys, "purge", str(tmp_path))[0] == 130
    assert "Remove 5 pages" in asked_for[0]
    assert (tmp_path / "segment-000000.kv").exists()
    monkeypatch.setattr(typer, "confirm", lambda text, **_: asked_for.append(text))
    assert asked(capsys, "purge", str(tmp_path))[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["verify"], ["purge", "--yes"]])
def test_a_directory_in_use_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    store = open_disk(tmp_path, 4)
    put(store, 1)
    code, out, err = asked(capsys, command[0], str(tmp_path), *command[1:])
    assert (code, out) == (1, "")
    assert f"in use by process {os.getpid()}" in err
    assert len(err.splitlines()) == 1
    store.close()


@pytest.mark.parametrize("command", ["ls", "verify", "purge"])
def test_what_is_no_store_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "kvcore-store").write_text("something else")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "broken", tmp_path / "kept"):
        code, out, err = asked(capsys, command, str(folder))
        assert (code, out) == (2, ""), folder
        assert len(err.splitlines()) == 1
    assert (tmp_path / "kept").read_text() == "mine"
    assert (tmp_path / "broken" / "kvcore-store").exists()


def test_paths_need_not_be_unicode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(filled(tmp_path / "kv\udcff"))
    code, out, _ = asked(capsys, "ls", folder, "--json")
    assert code == 0
    assert json.loads(out)["directory"] == folder
    assert asked(capsys, "verify", folder)[0] == 0
    code, out, _ = asked(capsys, "purge", folder, "--yes")
    assert code == 0
    assert "kv\\udcff" in out
    code, _, err = asked(capsys, "ls", folder)
    assert code != 0
    assert "Traceback" not in err
