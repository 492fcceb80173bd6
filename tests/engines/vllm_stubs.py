# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that makes vLLM's scheduler importable without its compiled kernels."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

# Packages that vLLM imports before its scheduler, and that the scheduler never calls: front ends,
# tokenizers, parsers of answers, kernels. An installed package of this list is used as it is.
STUBBED = (
    "anthropic",
    "cbor2",
    "compressed_tensors",
    "cv2",
    "depyf",
    "gguf",
    "httpx",
    "llguidance",
    "lmformatenforcer",
    "mcp",
    "mistral_common",
    "model_hosting_container_standards",
    "numba",
    "openai_harmony",
    "outlines_core",
    "prometheus_fastapi_instrumentator",
    "ray",
    "tblib",
    "xgrammar",
    "uvicorn",
    "uvloop",
)


class _Anything(type):
    """A class that supports subclasses, calls, subscripts and any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return {"type": "any"}

    def __or__(cls, other: Any) -> Any:
        return other

    __ror__ = __or__


class _StubModule(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package, whatever is imported from it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of the packages of `STUBBED` that no earlier finder has found."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec for a stub; None for all other modules."""
        if fullname.partition(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        """Make the stub."""
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


sys.meta_path.append(StubFinder())
