"""Sentences with places for numbers, kept in one TOML file a language instead of in the code that computes them."""

from __future__ import annotations

import string
import tomllib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

_UNKNOWN = (None, "", "–")  # values without which a part between bars is left out


class Wording(string.Formatter):
    """The sentences of one TOML file, read when the first is asked for.

    An entry is a template of `str.format`, or a table of forms. A form is named by the caller, who may give True or
    False for ``yes`` and ``no``; without a name the value ``n`` chooses: ``zero`` where the table has it, ``one``, else
    ``other``. A template that is no table is the form ``yes``, whose ``no`` is empty. A part between bars is left out
    where a value in it is None, NaN, empty or "–". Behind a colon stands one of ``formats``, or a format of Python.

        keep = "Keep {name}: {reason}"
        changes = { one = "1 change is not ahead", other = "{n} changes are not ahead" }
        clock = { "engine time" = " in engine time", served = " served", other = "" }
        size = { yes = "Use {size}", no = "Keep {size}" }
        held = "{cell.name} holds {tokens:count} tokens|, {size:bytes} of them shared|"
    """

    def __init__(self, path: Path, formats: Mapping[str, Callable[[Any], str]] | None = None) -> None:
        self.path, self.formats = path, formats or {}

    @cached_property
    def _tables(self) -> Mapping[str, Any]:
        return tomllib.loads(self.path.read_text(encoding="utf-8"))

    def say(self, key: str, form: str | bool | None = None, **values: Any) -> str:
        """Writes the sentence ``key``, such as ``decision.keep``, with its values.

        Raises KeyError where the file has no such sentence or form, or the template needs a value that is missing.
        """
        entry: Any = self._tables
        for name in key.split("."):
            entry = entry[name]
        if isinstance(form, bool):
            form = ("no", "yes")[form]
        if isinstance(entry, str):
            entry = {"other": entry, "no": ""}
        elif form is None:
            form = {0: "zero", 1: "one"}.get(values["n"])
        parts = (entry[form] if form in entry else entry["other"]).split("|")
        shown = (part for i, part in enumerate(parts) if i % 2 == 0 or self._is_known(part, values))
        return "".join(self.vformat(part, (), values) for part in shown)

    def _is_known(self, part: str, values: Mapping[str, Any]) -> bool:
        """Tests whether each place of an optional part has a value."""
        names = [name for _, name, _, _ in self.parse(part) if name is not None]
        placed = (self.get_field(name, (), values)[0] for name in names)
        return all(value not in _UNKNOWN and value == value for value in placed)  # NaN is not equal to itself

    def format_field(self, value: Any, format_spec: str) -> str:
        """Writes a value in one of ``formats``, else as Python does."""
        write = self.formats.get(format_spec)
        return write(value) if write else super().format_field(value, format_spec)
