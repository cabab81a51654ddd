"""Sentences of the gates, the history, the claims and simulations: code and file agree on keys and values."""

from __future__ import annotations

import ast
import string
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = {"gate": "**/*.py", "history": "*.py", "claims": "judges.py", "simulation": "**/*.py"}
"""Each room with the files that say its sentences; elsewhere `say` is a function that shows a text."""


def calls(room: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call that writes a sentence, and where it is."""
    for path in sorted((ROOT / "kvbench" / room).glob(ROOMS[room])):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("say", "sentence", "_WORDING.say"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def keys_of(call: ast.Call) -> list[str]:
    """The keys that a call may name; none where it computes the key."""
    first = call.args[0] if call.args else None
    parts = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
    return [part.value for part in parts if isinstance(part, ast.Constant)]


def entries(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every key with the templates of its forms."""
    for name, entry in table.items():
        if isinstance(entry, str):
            yield f"{prefix}{name}", (entry,)
        elif prefix or {"yes", "no", "one", "other"} & entry.keys():
            yield f"{prefix}{name}", tuple(entry.values())
        else:
            yield from entries(entry, f"{name}.")


def places(template: str) -> set[str]:
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    return {name.partition("[")[0] for name in names}


@pytest.mark.parametrize("room", ROOMS)
def test_every_sentence_is_used_and_its_places_are_filled(room: str) -> None:
    file = ROOT / "kvbench" / room / "sentences_en.toml"
    sentences = dict(entries(tomllib.loads(file.read_text(encoding="utf-8"))))
    used, problems = {"more"}, []
    for where, call in calls(room):
        values = {keyword.arg for keyword in call.keywords} | {"more"}
        for key in keys_of(call):
            used.add(key)
            missing = set().union(*map(places, sentences.get(key, ()))) - values
            if key not in sentences:
                problems.append(f"{where}: there is no sentence {key}")
            elif missing and None not in values:  # **values: seen when it is said
                problems.append(f"{where}: {key} gets no {sorted(missing)}")
    constants = {
        node.value
        for path in (ROOT / "kvbench" / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    computed = {key for key in sentences if key.rpartition(".")[2] in constants or key in constants}
    problems += [f"nothing says {key}" for key in sentences.keys() - used - computed]
    assert not problems, "\n".join(problems)
