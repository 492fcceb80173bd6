# SPDX-License-Identifier: Apache-2.0
"""Downloads vLLM's sources, with its tests, from the package index; this folder keeps no copy."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from typing import Any

VERSION = "0.33.0"


def unpacked(folder: Path) -> Path:
    """Return the folder of vLLM's sources in `folder`; download them once."""
    root = folder / f"vllm-{VERSION}"
    if not (root / "PKG-INFO").exists():
        archive = folder / f"vllm-{VERSION}.tar.gz"
        if not archive.exists():
            folder.mkdir(parents=True, exist_ok=True)
            fetch(archive)
        with tarfile.open(archive) as file:
            # Older releases of 3.10 and 3.11 have no filters.
            rules: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            file.extractall(folder, **rules)
    return root


def fetch(archive: Path) -> None:
    """Download the sdist as pip would, by its settings, but build nothing: that takes torch.

    Raises
    ------
    RuntimeError
        The index has no sdist of this version, or it is another file than the index says.
    """
    from pip._internal.commands.download import DownloadCommand
    from pip._vendor.packaging.specifiers import SpecifierSet

    command = DownloadCommand("download", "")
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "vllm"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        found = finder.find_best_candidate("vllm", SpecifierSet(f"=={VERSION}")).best_candidate
        if found is None:
            raise RuntimeError(f"the package index has no sdist of vllm {VERSION}")
        content = session.get(found.link.url_without_fragment, timeout=180).content
    expected = found.link.hash
    if expected and hashlib.new(str(found.link.hash_name), content).hexdigest() != expected:
        raise RuntimeError(f"{found.link.filename} is not the file that the index names; try again")
    archive.write_bytes(content)
