"""Sentences in TOML files: how one is chosen and filled, and that code and file agree on keys and values."""

from __future__ import annotations

import ast
import string
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvbench.common.wording import Wording

ROOT = Path(__file__).parents[3] / "kvbench"
ROOMS = {
    "capacity": ("say", ["capacity/**/*.py"]),
    "claims": ("say", ["claims/judges.py"]),  # elsewhere `say` is a function that shows a text
    "gate": ("say", ["gate/**/*.py"]),
    "history": ("say", ["history/*.py"]),
    "ray": ("sentence", ["ray/**/*.py"]),
    "report": ("say", ["report/**/*.py", "view/**/*.py"]),
    "simulation": ("sentence", ["simulation/**/*.py"]),
    "trace_analysis": ("say", ["trace_analysis/**/*.py"]),
}
"""Each room with a file of sentences: the function that says them, and the files that call it."""
EXACT = {"capacity", "ray", "report", "simulation", "trace_analysis"}  # whose calls give no value without a place


@pytest.fixture
def wording(tmp_path: Path) -> Wording:
    path = tmp_path / "sentences.toml"
    path.write_text(
        '[a]\nkeep = "Keep {name}"\nchanges = {one = "1 change is", other = "{n:,} changes are"}\n'
        'loads = {zero = "no load", other = "{n} loads"}\nclock = {served = " served", other = ""}\n'
        'use = {yes = "Use {size}", no = "Keep {size}"}\nheld = "Keep it| ({size:ratio})|"\n',
        encoding="utf-8",
    )
    return Wording(path, {"ratio": lambda value: f"{value:.2f}x"})


@pytest.mark.parametrize(
    ("key", "form", "values", "text"),
    [
        ("keep", [], {"name": "page 16"}, "Keep page 16"),
        ("changes", [], {"n": 0}, "0 changes are"),
        ("changes", [], {"n": 1}, "1 change is"),
        ("changes", [], {"n": 1234}, "1,234 changes are"),
        ("loads", [], {"n": 0}, "no load"),
        ("loads", [], {"n": 1}, "1 loads"),
        ("clock", ["served"], {}, " served"),
        ("clock", ["simulated"], {}, ""),  # else the other
        ("use", [True], {"size": 8}, "Use 8"),
        ("use", [False], {"size": 8}, "Keep 8"),
        ("keep", [False], {"name": "page 16"}, ""),
        ("held", [], {"size": 8.0}, "Keep it (8.00x)"),
        ("held", [], {"size": None}, "Keep it"),  # a part between bars is left out without its value
        ("held", [], {"size": float("nan")}, "Keep it"),
    ],
)
def test_a_form_is_chosen_and_filled_with_its_values(wording: Wording, key: str, form: list, values: dict, text: str):
    assert wording.say(f"a.{key}", *form, **values) == text


@pytest.mark.parametrize("key", ["a.missing", "missing.keep", "a.keep"])
def test_a_sentence_or_value_that_is_missing_raises(wording: Wording, key: str) -> None:
    with pytest.raises(KeyError):
        wording.say(key)


def entries(table: Mapping[str, Any], exact: bool, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every key of a file with the templates of its forms; not ``exact``: the file may have forms without a section."""
    for name, entry in table.items():
        if isinstance(entry, str):
            yield f"{prefix}{name}", (entry,)
        elif prefix or (not exact and {"yes", "no", "one", "other"} & entry.keys()):
            yield f"{prefix}{name}", tuple(entry.values())
        else:
            yield from entries(entry, exact, f"{name}.")


def places(template: str) -> set[str]:
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    return {name.partition(".")[0].partition("[")[0] for name in names}


def keys_of(call: ast.Call) -> list[str]:
    """The keys that a call may name; none where it computes the key."""
    first = call.args[0] if call.args else None
    parts = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
    return [part.value for part in parts if isinstance(part, ast.Constant)]


@pytest.mark.parametrize("room", ROOMS)
def test_every_sentence_is_used_and_gets_the_values_it_has_places_for(room: str) -> None:
    file = tomllib.loads((ROOT / room / "sentences_en.toml").read_text(encoding="utf-8"))
    sentences = dict(entries(file, room in EXACT))
    function, patterns = ROOMS[room]
    said, texts, problems = {"more"}, set(), []
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (function, "_WORDING.say"):
                said |= set(keys_of(node))
                problems += [f"{path.relative_to(ROOT)}:{node.lineno}: {why}" for why in wrong(node, sentences, room)]
    said |= {key for key in sentences if key in texts or (room not in EXACT and key.rpartition(".")[2] in texts)}
    problems += [f"nothing says {key}" for key in sentences.keys() - said]
    assert not problems, "\n".join(problems)


def wrong(call: ast.Call, sentences: Mapping[str, tuple[str, ...]], room: str) -> Iterator[str]:
    """Says what is wrong with a call; a key that is no literal is not followed."""
    values = {keyword.arg for keyword in call.keywords if keyword.arg}
    unpacked = len(values) < len(call.keywords)  # **values: which ones they are shows when it is said
    for key in keys_of(call):
        if key not in sentences:
            yield f"there is no sentence {key}"
            continue
        wanted = set().union(*map(places, sentences[key]))
        if room in EXACT and len(call.args) == 1 and len(sentences[key]) > 1:
            wanted.add("n")  # the number chooses the form
        missing, more = wanted - values - {"more"}, values - wanted if room in EXACT else set()
        if more or (missing and not unpacked):
            yield f"{key} has places for {sorted(wanted)} and gets {sorted(values)}"
