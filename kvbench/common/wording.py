"""Sentences with places for numbers, kept in one TOML file a language instead of in the code that computes them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any


class Wording:
    """The sentences of one TOML file, read when the first is asked for.

    An entry is a template of `str.format`, or a table of forms. A form is named by the caller, who may give True or
    False for ``yes`` and ``no``; without a name the value ``n`` chooses: ``zero`` where the table has it, ``one``, else
    ``other``. A template that is no table is the form ``yes``, whose ``no`` is empty.

        keep = "Keep {name}: {reason}"
        changes = { one = "1 change is not ahead", other = "{n} changes are not ahead" }
        clock = { "engine time" = " in engine time", served = " served", other = "" }
        size = { yes = "Use {size}", no = "Keep {size}" }
    """

    def __init__(self, path: Path) -> None:
        self.path = path

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
        return (entry[form] if form in entry else entry["other"]).format(**values)
