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

ROOT = Path(__file__).parents[3]
FILES = {
    "kvbench/capacity/sentences_en.toml": ("say", "kvbench/capacity"),
    "kvbench/ray/sentences_en.toml": ("sentence", "kvbench/ray"),
    "kvbench/report/sentences_en.toml": ("say", "kvbench/report", "kvbench/view"),
    "kvbench/simulation/sentences_en.toml": ("sentence", "kvbench/simulation"),
    "kvbench/trace_analysis/sentences_en.toml": ("say", "kvbench/trace_analysis"),
}
"""Each file of sentences: the function that says them, and the folders that call it."""


@pytest.fixture
def wording(tmp_path: Path) -> Wording:
    path = tmp_path / "sentences.toml"
    path.write_text(
        '[a]\nkeep = "Keep {name}"\nchanges = {one = "1 change is", other = "{n:,} changes are"}\n'
        'loads = {zero = "no load", other = "{n} loads"}\nclock = {served = " served", other = ""}\n'
        'use = {yes = "Use {size}", no = "Keep {size}"}\n',
        encoding="utf-8",
    )
    return Wording(path)


def test_a_sentence_is_filled_with_its_values(wording: Wording) -> None:
    assert wording.say("a.keep", name="page 16") == "Keep page 16"


@pytest.mark.parametrize(("n", "text"), [(0, "0 changes are"), (1, "1 change is"), (1234, "1,234 changes are")])
def test_the_number_chooses_the_form(wording: Wording, n: int, text: str) -> None:
    assert wording.say("a.changes", n=n) == text


def test_zero_has_a_form_of_its_own_where_the_file_gives_one(wording: Wording) -> None:
    assert [wording.say("a.loads", n=n) for n in (0, 1)] == ["no load", "1 loads"]


def test_a_named_form_is_taken_else_the_other(wording: Wording) -> None:
    assert [wording.say("a.clock", form) for form in ("served", "simulated")] == [" served", ""]


def test_yes_or_no_chooses_a_form_and_a_template_alone_is_left_out(wording: Wording) -> None:
    assert [wording.say("a.use", safe, size=8) for safe in (True, False)] == ["Use 8", "Keep 8"]
    assert [wording.say("a.keep", said, name="page 16") for said in (True, False)] == ["Keep page 16", ""]


@pytest.mark.parametrize(("size", "text"), [(8.0, "Keep it (8.00x)"), (None, "Keep it"), (float("nan"), "Keep it")])
def test_a_part_between_bars_is_left_out_without_its_value(tmp_path: Path, size: float | None, text: str) -> None:
    path = tmp_path / "sentences.toml"
    path.write_text('[a]\nheld = "Keep it| ({size:ratio})|"\n', encoding="utf-8")
    assert Wording(path, {"ratio": lambda value: f"{value:.2f}x"}).say("a.held", size=size) == text


@pytest.mark.parametrize("key", ["a.missing", "missing.keep", "a.keep"])
def test_a_sentence_or_value_that_is_missing_raises(wording: Wording, key: str) -> None:
    with pytest.raises(KeyError):
        wording.say(key)


# --- Code and file agree ---


def trees(folder: str) -> Iterator[tuple[str, ast.Module]]:
    """Every file of a folder, parsed."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def entries(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every key of a file with the templates of its forms; a table of forms is one whose path has two names."""
    for name, entry in table.items():
        key = f"{prefix}{name}"
        if isinstance(entry, str):
            yield key, (entry,)
        elif prefix:
            yield key, tuple(entry.values())
        else:
            yield from entries(entry, f"{key}.")


def fields(template: str) -> set[str]:
    return {name.partition(".")[0] for _, name, _, _ in string.Formatter().parse(template) if name is not None}


@pytest.mark.parametrize("file", FILES)
def test_every_sentence_is_used_and_gets_the_values_it_has_places_for(file: str) -> None:
    sentences = dict(entries(tomllib.loads((ROOT / file).read_text(encoding="utf-8"))))
    function, *folders = FILES[file]
    used, problems = set(), []
    for where, tree in (entry for folder in folders for entry in trees(folder)):
        literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        used |= {key for key in sentences if key in literals}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == function:
                problems += [f"{where}:{call.lineno}: {why}" for why in wrong(call, sentences)]
    problems += [f"{file}: nothing says {key}" for key in sentences.keys() - used]
    assert not problems, "\n".join(problems)


def wrong(call: ast.Call, sentences: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Says what is wrong with a call; a key that is no literal is not followed."""
    key = call.args[0]
    if not isinstance(key, ast.Constant):
        return
    if key.value not in sentences:
        yield f"{key.value} names no sentence of the file"
        return
    values = {keyword.arg for keyword in call.keywords if keyword.arg}
    unpacked = len(values) < len(call.keywords)  # **values: which ones they are shows when it is said
    wanted = set().union(*map(fields, sentences[key.value]))
    chosen_by_number = {"n"} if len(call.args) == 1 and len(sentences[key.value]) > 1 else set()
    wanted |= chosen_by_number
    if values != wanted and not (unpacked and values < wanted):
        yield f"{key.value} has places for {sorted(wanted)} and gets {sorted(values)}"
