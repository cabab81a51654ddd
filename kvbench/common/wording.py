"""Sentences with places for numbers, kept in one TOML file a language instead of in the code that computes them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any


class Wording:
    """The sentences of one TOML file, read when the first is asked for.

    An entry is a template of `str.format`, or a table of forms. A form is named by the caller; without a name the
    value ``n`` chooses: ``zero`` where the table has it, ``one``, else ``other``.

        keep = "Keep {name}: {reason}"
        changes = { one = "1 change is not ahead", other = "{n} changes are not ahead" }
        clock = { "engine time" = " in engine time", served = " served", other = "" }
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _tables(self) -> Mapping[str, Any]:
        return tomllib.loads(self.path.read_text(encoding="utf-8"))

    def say(self, key: str, form: str | None = None, **values: Any) -> str:
        """Writes the sentence ``key``, such as ``decision.keep``, with its values.

        Raises KeyError where the file has no such sentence or form, or the template needs a value that is missing.
        """
        entry: Any = self._tables
        for name in key.split("."):
            entry = entry[name]
        if isinstance(entry, str):
            return entry.format(**values)
        name = form if form is not None else _plural_form(values["n"])
        return (entry[name] if name in entry else entry["other"]).format(**values)


def _plural_form(n: float) -> str:
    return {0: "zero", 1: "one"}.get(n, "other")
