# SPDX-License-Identifier: Apache-2.0
"""A config whose fields are noted as they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Fields", "Notes"]


class Notes:
    """Record the fields of a config that were read, and the ignored fields with the reasons.

    Attributes
    ----------
    read : dict of str to object
        Values by name; the name of a field inside an object is "object.field".
    defaults : dict of str to object
        Values that the config leaves to the model's class, by name.
    ignored : dict of str to str
        Reasons by name.
    """

    def __init__(self) -> None:
        self.read: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.ignored: dict[str, str] = {}


class Fields(Mapping[str, Any]):
    """Read the fields of a config, or of an object in it, and note every name that is read.

    Parameters
    ----------
    fields : mapping
    notes : Notes
        Shared by all objects of a config.
    path : str
        Names of the objects around these fields, each followed by a dot.
    defaults : mapping, optional
        What the model's class takes for a field that is missing or null.

    Notes
    -----
    ``fields[name]``, ``fields.get(name)`` and ``name in fields`` read a field. Iteration over the
    names reads no field.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        notes: Notes,
        path: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._fields = fields
        self._defaults = defaults or {}
        self.path = path
        self.notes = notes

    def __getitem__(self, name: str) -> Any:
        value = self._fields.get(name)
        if value is None and name in self._defaults:
            value = self.notes.defaults[self.path + name] = self._defaults[name]
            return value
        if name in self._fields:
            self.notes.read[self.path + name] = value
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def part(self, name: str) -> Fields:
        """Return an object inside the config; an empty one if the field is missing or null.

        Raises
        ------
        ValueError
            The field is no object.
        """
        value = self._fields.get(name)
        if not value:
            value = {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} of the config is {value!r}, must be an object")
        return Fields(value, self.notes, f"{self.path}{name}.")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Return the same fields with values for the fields that are missing or null."""
        return Fields(self._fields, self.notes, self.path, defaults)

    def says(self, name: str) -> bool:
        """Return whether the config has a field with this name, without reading it."""
        return name in self._fields

    def holds(self, name: str, value: Any) -> bool:
        """Return whether the config has a field with this name and value, without reading it."""
        return name in self._fields and bool(self._fields[name] == value)

    def ignore(self, why: str, *names: str) -> None:
        """Note that the fields with these names do not change the cache."""
        for name in names:
            if name in self._fields:
                self.notes.ignored.setdefault(self.path + name, why)
