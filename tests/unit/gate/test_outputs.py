"""The files of a verdict: all there, verdict.json whole and conforming to the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvbench.gate.verdict
from kvbench.gate.verdict.outputs import write_outputs
from tests.support import verdicts

SCHEMA = json.loads((Path(kvbench.gate.verdict.__file__).parent / "verdict.schema.json").read_bytes())
TYPES = {"object": dict, "array": list, "string": str, "number": (int, float), "boolean": bool, "null": type(None)}
RULES = {  # keyword -> whether a value keeps to it
    "type": lambda v, names: isinstance(v, tuple(TYPES[name] for name in names)),
    "const": lambda v, rule: v == rule,
    "enum": lambda v, rule: v in rule,
    "required": lambda v, rule: set(rule) <= set(v),
    "minimum": lambda v, rule: v is None or v >= rule,
    "maximum": lambda v, rule: v is None or v <= rule,
    "minItems": lambda v, rule: v is None or len(v) >= rule,
    "maxItems": lambda v, rule: v is None or len(v) <= rule,
    "minLength": lambda v, rule: len(v) >= rule,
}


def errors(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """The places where ``value`` breaks a rule of JSON Schema, of the keywords that ours has."""
    schema = schema | (SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {})
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"]]
    found = [f"{where}: {key}" for key in RULES if key in schema and not RULES[key](value, schema[key])]
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    for key, below in value.items() if isinstance(value, dict) else ():
        rule = known.get(key, others)
        found += [f"{where}.{key} is unknown"] if rule is False else errors(below, rule, f"{where}.{key}")
    for i, item in enumerate(value) if isinstance(value, list) else ():
        found += errors(item, schema.get("items", {}), f"{where}[{i}]")
    return found


@pytest.mark.parametrize("name", verdicts.EVERY)
def test_every_verdict_is_written_whole_and_conforms(name: str, tmp_path: Path) -> None:
    verdict = verdicts.EVERY[name]()
    written = write_outputs(verdict, tmp_path)
    assert sorted(written) == sorted(tmp_path.iterdir())
    assert [path.name for path in written[:3]] == ["verdict.json", "junit.xml", "summary.md"]
    document = json.loads((tmp_path / "verdict.json").read_bytes())
    assert errors(document, SCHEMA) == []
    assert document["exit_code"] == verdict.exit_code
    for path in written:
        assert path.read_bytes().decode("utf-8")
    if name == "invalid":  # a number that could not be had is null
        assert verdicts.read(tmp_path).findings[1].figures["kld"] is None
    elif name != "hostile":
        assert verdicts.read(tmp_path) == verdict


def test_the_schema_refuses_what_is_no_verdict() -> None:
    document = json.loads(json.dumps(verdicts.failed().to_json()))
    wrong = {"outcome": "green", "exit_code": 2, "more": 1, "findings": [{"id": "a"}], "moved": [{"interval": [1.0]}]}
    for key, value in wrong.items():
        found = errors(document | {key: value}, SCHEMA)
        assert found and all(each.startswith(f"$.{key}") for each in found)


def test_files_of_an_earlier_verdict_do_not_stay(tmp_path: Path) -> None:
    write_outputs(verdicts.failed(), tmp_path)
    assert (tmp_path / "pairs.html").exists() and (tmp_path / "benchmark-bigger-is-better.json").exists()
    write_outputs(verdicts.empty(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"verdict.json", "junit.xml", "summary.md"}
    with pytest.raises(FileExistsError, match="verdict"):
        write_outputs(verdicts.failed(), tmp_path / "verdict.json")
