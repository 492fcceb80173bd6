# SPDX-License-Identifier: Apache-2.0
"""SGLang's Python sources on a machine without a GPU: its wheel, and stubs for its imports.

The stubs stay in ``sys.modules``, so use a separate process for them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

VERSION = "0.5.23"

#: Modules that the caches import and do not use: kernels, models, servers.
STUBS = (
    *("IPython", "PIL", "compressed_tensors", "dill", "gguf", "orjson", "partial_json_parser"),
    *("psutil", "pybase64", "starlette", "torchvision", "transformers", "triton", "tvm_ffi"),
    *("torch._dynamo", "torch._inductor"),
    *("sglang.srt.configs", "sglang.srt.entrypoints", "sglang.srt.utils.hf_transformers_patches"),
)


class _Anything(type):
    """A class for any name: a call returns its argument or the class; it can be a base class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and not options and callable(args[0]) else cls

    def __getitem__(cls, _key: Any) -> Any:
        return cls

    def __or__(cls, _other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


class _Stub(types.ModuleType):
    __version__ = "0.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Anything(name, (), {}))
        return getattr(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == stub or name.startswith(f"{stub}.") for stub in STUBS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def fetch(cache: Path) -> Path:
    """Return the wheel of SGLang in a folder; download it from the package index if missing."""
    found = sorted(cache.glob(f"sglang-{VERSION}-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache)]
        subprocess.run([*command, f"sglang=={VERSION}"], check=True)
        found = sorted(cache.glob(f"sglang-{VERSION}-*.whl"))
    return found[0]


def open_sources(wheel: Path, folder: Path) -> None:
    """Unpack a wheel, once, and put it on the path of ``import sglang``; needs torch."""
    sources = folder / wheel.stem
    if not sources.is_dir():
        partial = folder / f"{wheel.stem}.{os.getpid()}"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        partial.rename(sources)
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    sys.path.insert(0, str(sources))
    sys.meta_path.insert(0, _Finder())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that need a GPU
        importlib.import_module("sglang.srt.managers.schedule_batch")
