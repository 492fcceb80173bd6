# SPDX-License-Identifier: Apache-2.0
"""Settings of the documentation: ``python -m sphinx -W --keep-going -n docs build/docs``."""

from __future__ import annotations

import re
from typing import Any

import kvcore

project = "kvcore"
author = "the kvcore authors"
project_copyright = author
version = release = kvcore.__version__

extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_parser", "sphinxcontrib.mermaid"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
default_role = "code"
smartquotes = False  # "" is an argument
add_module_names = False

# The docstrings say types and shapes; annotations would say the types once more.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
# The reference is built without these optional packages.
autodoc_mock_imports = ["torch", "transformers"]

# The bases of the errors are Python's.
nitpick_ignore_regex = [("py:class", r"(RuntimeError|ValueError|KeyError|MemoryError)")]

myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]  # as GitHub renders them
html_theme = "furo"
html_title = f"kvcore {release}"
html_copy_source = False


def _without_self(
    _app: Any, what: str, _name: str, _obj: Any, _options: Any, signature: str | None, result: Any
) -> tuple[str, Any] | None:
    """Leave out what the signatures of pybind11's methods begin with."""
    if what != "method" or signature is None:
        return None
    return re.sub(r"^\(self(, )?", "(", signature), result


def setup(app: Any) -> None:
    """Connect the hooks of this file."""
    app.connect("autodoc-process-signature", _without_self, priority=400)  # before numpydoc's
