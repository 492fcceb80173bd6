# SPDX-License-Identifier: Apache-2.0
"""A request on both sides of a comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

from foreign_context import Context


@dataclasses.dataclass(eq=False)
class Request:
    """One request in the forms that kvcore and the reference take."""

    core: Any
    model: Context
    foreign: bool

    @property
    def request_id(self) -> Any:
        return self.model.request_id

    def both(self, verb: str, *args: Any) -> None:
        getattr(self.core, verb)(*args)
        getattr(self.model, verb)(*args)
