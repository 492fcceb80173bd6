# SPDX-License-Identifier: Apache-2.0
"""Installs SGLang for this CPU and the current kvcore into a separate environment.

SGLang's wheel depends on gigabytes for GPUs. Here it is installed without its dependencies: the
packages that it imports on a CPU are listed below, and stubs replace kernels and image packages.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import sglang_engine_stubs
import sglang_sources
import vllm_engine_install

ENGINES = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"
PACKAGES = (
    "aiohttp==3.14.5",
    "dill==0.4.1",
    "einops==0.8.2",
    "fastapi==0.165.0",
    "msgspec==0.22.0",
    "numpy==2.3.5",
    "openai==2.8.0",
    "orjson==3.13.0",
    "partial-json-parser==0.2.1.1.post7",
    "pillow==13.0.0",
    "prometheus_client==0.26.0",
    "psutil==7.2.2",
    "pybase64==1.5.1",
    "python-multipart==0.0.34",
    "pyzmq==27.3.0",
    "requests==2.34.2",
    "sentencepiece==0.2.3",
    "setproctitle==1.3.8",
    "transformers==5.19.0",
    "triton==3.9.0",
    "uvicorn==0.54.0",
    "uvloop==0.23.0",
)
#: Packages that depend on much more than SGLang needs from them.
BARE = (
    "apache-tvm-ffi==0.1.11",
    "compressed-tensors==0.18.0",
    "gguf==0.19.0",
    "loguru==0.7.3",
    "xgrammar==0.2.7",
)


def environment(folder: Path, wheel: Path) -> Path:
    """Return the Python of an environment with SGLang; the environment is made once."""
    root = folder / "environment"
    python = root / "bin" / "python"
    done = root / "installed"
    wanted = "\n".join((TORCH, *PACKAGES, *BARE, wheel.name))
    if done.exists() and done.read_text() == wanted:
        return python
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, TORCH], check=True)  # from the configured index, perhaps with CPU builds
    subprocess.run([*pip, TORCH, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", *BARE, str(wheel)], check=True)
    done.write_text(wanted)
    return python


def site_of(folder: Path) -> Path:
    """Return the folder for PYTHONPATH with the stubs and the probe; it is made anew."""
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    sglang_engine_stubs.write(site)
    probe = "[sglang.srt.plugins]\nsglang_engine_probe = sglang_engine_probe:register\n"
    vllm_engine_install.write_distribution(site, "sglang_engine_probe", "1.0", probe)
    return site


def install(folder: Path, wheels: Path) -> tuple[Path, Path]:
    """Return the Python and the folder for PYTHONPATH that run SGLang and kvcore."""
    wheels.mkdir(parents=True, exist_ok=True)
    python = environment(folder, sglang_sources.fetch(wheels).resolve())
    vllm_engine_install.link_kvcore(python)
    return python, site_of(folder)
