"""JSON and YAML from outside: what is meant is read, what exhausts a reader is refused in one line, soon."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest

from kvbench.common.parsing import MOST_BYTES, MOST_DEPTH, MOST_VALUES, json_at, parse_json, parse_yaml, read_yaml


def bomb(first: str, row: str) -> str:
    rows = [f"a: &a {first}"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        rows.append(f"{name}: &{name} {row.format(', '.join([f'*{before}'] * 9))}")
    return "\n".join(rows)


MERGES, ALIASES = bomb("{x: 1, y: 2}", "{{<<: [{}]}}"), bomb("[x, x, x]", "[{}]")
DEEP_ALIASES = f"a: &a {'[' * 60}{']' * 60}\nb: {'[' * 40}*a{']' * 40}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:\n  " + "[" * 50_000, "line 2: nested more than 100 deep"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested"),
        (MERGES, "aliases"),
        (ALIASES, "aliases"),
        (DEEP_ALIASES, "nested more than 100 deep"),
        ("a: &a [*a]", "aliases"),
        (f"[{'x,' * MOST_VALUES}]", "values"),
        ("{[1]: 2}", "line 1: a key is a list"),
        ("{a: 1, a: 2}", "'a' stands twice"),
        ("a:\n- " + "9" * 5000, "line 2: a number does not fit into 64 bits"),
        (f"a: {2**63}", "64 bits"),
        ('a: "x\\0y"', "NUL"),
        ("a: 2020-99-99", "month"),
        ("a: !!int x", "cannot be read"),
        ("a: !!python/object:os.system x", "constructor"),
        ('a: "x', "unexpected end of stream"),
        ("a: \x01", "special characters"),
    ],
)
def test_yaml_that_nobody_means_is_refused_in_one_line(text, words):
    began = time.thread_time()
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        parse_yaml(text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
    assert time.thread_time() - began < 2


def test_bombs_are_under_a_kilobyte_and_take_no_memory():
    assert len(MERGES) < 1000 and len(ALIASES) < 1000
    code = "from kvbench.common.parsing import parse_yaml\ntry: parse_yaml({!r})\nexcept ValueError: print('refused')"
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n{code.format(MERGES)}"
    done = subprocess.run([sys.executable, "-c", limit], capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused\n", done.stderr


def test_yaml_at_the_limits_is_read(tmp_path):
    assert parse_yaml("[" * (MOST_DEPTH - 1) + "x" + "]" * (MOST_DEPTH - 1)) is not None
    assert len(parse_yaml(f"[{'x,' * (MOST_VALUES - 1)}]")) == MOST_VALUES - 1
    assert parse_yaml(DEEP_ALIASES.replace("a: &a [", "a: &a ", 1).replace("]\n", "\n", 1)) is not None
    assert parse_yaml(f"a: [{2**63 - 1}, -{2**63 - 1}, 0x_ff, 1:30]") == {"a": [2**63 - 1, 1 - 2**63, 255, 90]}
    assert parse_yaml("base: &b {x: 1}\nc: {<<: *b, y: 2}\nd: [*b, *b]") == {
        "base": {"x": 1}, "c": {"x": 1, "y": 2}, "d": [{"x": 1}] * 2}  # fmt: skip
    (tmp_path / "w.yaml").write_text("a: 1 #".ljust(MOST_BYTES, "."))
    assert read_yaml(tmp_path / "w.yaml") == {"a": 1}
    (tmp_path / "w.yaml").write_text("a: 1 #".ljust(MOST_BYTES + 1, "."))
    with pytest.raises(ValueError, match="more than 1,048,576 bytes"):
        read_yaml(tmp_path / "w.yaml")


@pytest.mark.parametrize(
    ("data", "words"),
    [("[" * 100_000, "nested"), (b'{"a":' * 100_000, "nested"), ("[" * 101 + "]" * 101, "nested"),
     ("9" * 5000, "thousands of digits"), ("[1", "delimiter"), (b"\xff[]", "decode"), ("", "value"),
     ("[" * 101 + '\\"' * 20_000, "value"), ("[" * 101 + '"' + '\\"' * 20_000, "Unterminated")],
)  # fmt: skip
def test_json_that_nobody_means_is_refused_soon(data, words):
    began = time.thread_time()
    with pytest.raises(ValueError, match=words):
        parse_json(data)
    assert time.thread_time() - began < 1


def test_json_is_read_whatever_its_texts_hold():
    deep = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    for value in ("[" * 1000, '"' + "[{" * 100, "\\" * 7 + '"[', {'a"': ["{" * 200]}, "é", 2.5):
        assert parse_json(json.dumps(value)) == value == parse_json(json.dumps(value).encode())
    assert parse_json(deep) == json.loads(deep)


@pytest.mark.parametrize("value", [None, [], "text", 7, {}, {"a": None}, {"a": []}, {"a": {"b": None}}, {"a": "b"}])
def test_nothing_lies_at_a_path_that_is_missing_or_leads_through_something_else(value):
    assert json_at(value, "a", "b") is None
    assert json_at({"a": {"b": value}}, "a", "b") is value and json_at(value) is value
