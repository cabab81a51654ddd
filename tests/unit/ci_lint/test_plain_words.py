"""Tests of the language check: each rule with text that passes and text that fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci import plain_words

ROOT = Path(__file__).parents[3]
TWENTY_WORDS = "Reads " + " ".join(["word"] * 18) + " end"


@pytest.fixture(autouse=True)
def _an_empty_tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rules(docstring: str) -> list[str]:
    return [rule for rule, _ in plain_words.check_docstring(docstring)]


@pytest.mark.parametrize(
    "docstring",
    [
        "Tests whether `metric` got worse, at significance `level`.",
        "Return the number of pages.",
        "A load that has ended.",
        "The pages of a request.",
        "Two configurations beside each other.",
        "Latencies of a load [ms], by request.",
        "``kvbench sweep`` runs a workload.",
        "float32 holds the sums.",
        "metrics.json has one row a load.",
        "vLLM's counters, read by name.",
        "kvbench starts the server.",
        "Writes `+16 % tokens/s (13 to 20)`.",
        "Office hours are no preposition.",
    ],
)
def test_a_verb_an_article_or_a_noun_begins_a_docstring(docstring):
    assert rules(docstring) == []


@pytest.mark.parametrize("word", sorted(plain_words.NO_BEGINNING))
def test_a_preposition_a_question_word_or_a_pronoun_begins_none(word):
    assert rules(f"{word.capitalize()} the run is.") == ["beginning"]
    assert rules(f"{word.capitalize()}, the run is.") == ["beginning"]


@pytest.mark.parametrize(
    "docstring",
    [
        "+16 % tokens/s (13 to 20)",
        "1.65x",
        "[runs, 2] pairs",
        "(share, low, high)",
        "contiguous reserves",
        "x of y",
        "",
    ],
)
def test_an_example_a_shape_or_a_lower_case_word_begins_none(docstring):
    assert rules(docstring) == ["beginning"]


def test_a_literal_alone_begins_a_module_only():
    assert list(plain_words.check_docstring("``kvbench sweep``: runs a workload.", of_module=True)) == []
    assert rules("``pages``: of the pool.") == ["beginning"]
    assert rules("``pages`` of the pool.") == []


def test_twenty_words_pass_and_twenty_one_fail():
    assert rules(TWENTY_WORDS + ".") == []
    assert rules(TWENTY_WORDS + " more.") == ["length"]


@pytest.mark.parametrize("end", [". ", ": ", "? ", "! ", ".\n", ".\n\n", "\n\n", "::\n\n", "). "])
def test_what_comes_after_the_first_sentence_is_not_counted(end):
    assert rules(TWENTY_WORDS + end + "More words follow.") == []


@pytest.mark.parametrize("middle", ["; ", ", ", "\n", " e.g. ", " i.e. ", " 3.5 "])
def test_a_sentence_goes_on_after_a_semicolon_or_an_abbreviation(middle):
    assert rules(TWENTY_WORDS + middle + "more.") == ["length"]


def test_a_literal_is_one_word_and_a_sign_is_none():
    assert rules(TWENTY_WORDS.replace("end", "``kvbench sweep: a. b; c``.")) == []
    assert rules(TWENTY_WORDS + " - = %.") == []


def breaches(folder: Path, code: str) -> list[str]:
    file = folder / "code.py"
    file.write_text(code)
    return [f"{breach.line} {breach.rule}" for breach in plain_words.check([file])]


@pytest.mark.parametrize(
    "code",
    [
        "found = 1",
        "for each in cells: pass",
        "total = sum(known for known in cells)",
        "def name(of): pass",
        "def name(*, told=None): pass",
        "key = lambda said: said",
        "with folder as found: pass",
        "a, (found, b) = cells",
        "if (found := cells): pass",
        "class Cell:\n    def read(self):\n        found = 1",
    ],
)
def test_a_variable_says_what_it_holds(tmp_path, code):
    assert breaches(tmp_path, code) == [f"{code.count(chr(10)) + 1} local"]


@pytest.mark.parametrize(
    "code",
    [
        "cell = 1",
        "foundation = 1",
        "class Cell:\n    known: int\n    found = 1",
        "def of(): return cells.found",
        "cell.known = read(of=1)",
    ],
)
def test_fields_attributes_and_functions_are_no_variables(tmp_path, code):
    assert breaches(tmp_path, code) == []


def classes(folder: Path, files: dict[str, str]) -> list[str]:
    for name, code in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    return [f"{breach.path} {breach.rule}" for breach in plain_words.check([Path("kvbench"), Path("tests")])]


def test_a_class_name_stands_once_in_the_code_and_once_in_the_tests_support(tmp_path):
    once = {"kvbench/a.py": "class Cell: pass", "tests/support/a.py": "class Cell: pass"}
    assert classes(tmp_path, once) == []
    assert classes(tmp_path, {"tests/unit/a.py": "class Cell: pass"}) == []
    assert classes(tmp_path, {"tests/support/b.py": "class Cell: pass"}) == ["tests/support/b.py class"]
    twice = {"tests/support/b.py": "", "engine/a.py": "class Cell: pass"}
    assert classes(tmp_path, twice) == ["kvbench/a.py class"]  # engine comes first, though it was not asked for


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ci.plain_words", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_the_command_prints_each_place_and_its_exit_code_says_whether_there_is_one(tmp_path):
    (tmp_path / "bad.py").write_text('"""Of a run."""\nfound = 1\n')
    failed = run(tmp_path, "bad.py")
    assert failed.returncode == 1
    assert failed.stdout == (
        'bad.py:1: beginning: "Of a run" begins with "Of": begin with a verb or an article\n'
        'bad.py:2: local: a variable is called "found": name it for what it holds\n'
        "2 breaches of the rules in ci/plain_words.py\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.plain_words]\nexclude = ["bad.py"]\n')
    clean = run(tmp_path, "bad.py")
    assert (clean.returncode, clean.stdout) == (0, "")


def test_a_path_that_is_not_there_is_a_usage_error(tmp_path):
    missing = run(tmp_path, "nowhere")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "nowhere: no such file or folder" in missing.stderr
