# SPDX-License-Identifier: Apache-2.0
"""Stubs of packages that SGLang imports on a CPU and does not call: GPU kernels, images.

`write` makes packages in which every name is an `Absent` class. SGLang may import a name, derive
from it and read its members; a call raises an error with the name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

#: The packages, and the modules of them that SGLang imports.
PACKAGES = (
    "IPython",
    "IPython.display",
    "sgl_kernel",
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class Absent(type):
    """The class of each name in a stub: its members are also `Absent`, and a call raises."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} is a stub of a test: nothing may call it")


def names_of(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a stub."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module}.{name}", (), {})

    return get


def write(site: Path) -> None:
    """Write the packages to a folder for PYTHONPATH; this module must also be on that path."""
    for module in PACKAGES:
        folder = site.joinpath(*module.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(
            f"import sglang_engine_stubs\n\n"
            f'__version__ = "0.0.0"\n'
            f'__getattr__ = sglang_engine_stubs.names_of("{module}")\n'
        )
