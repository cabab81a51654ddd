"""The reference of a workload's keys: complete, as the code has it, and a schema that takes what kvbench takes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvbench.common.packages import REPOSITORY
from kvbench.targets.builtin import engine_settings_schema
from kvbench.workload.file import MODEL_SECTION
from kvbench.workload.from_options import workload_text
from kvbench.workload.options import Answers
from kvbench.workload.reference import workload_reference, workload_schema
from kvbench_engine.config import EngineConfig

SCHEMA = workload_schema(engine_settings_schema())
SHIPPED = [p for p in sorted(Path(REPOSITORY, "workloads").glob("*.yaml")) if p.stem != "ci_counters"]


def mistakes(data):
    return [error.json_path for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(data)]


def test_the_pages_in_docs_are_those_that_the_command_writes():
    docs = Path(REPOSITORY, "docs")
    assert (docs / "workload.md").read_text() == workload_reference(engine_settings_schema()).rstrip() + "\n"
    assert json.loads((docs / "workload.schema.json").read_text()) == SCHEMA


def test_every_key_is_told_with_a_description():
    every = [SCHEMA, *SCHEMA["$defs"].values()]
    assert all(key.get("description") for each in every for key in each.get("properties", {}).values())
    assert set(engine_settings_schema()) == {f.name for f in fields(EngineConfig)} - MODEL_SECTION


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_schema_takes_every_workload_that_ships(path):
    assert mistakes(yaml.safe_load(path.read_text())) == []


def test_the_schema_refuses_what_kvbench_refuses():
    answers = Answers(input_len="600", output_len="150", concurrency=(20,), vary=("kv_cache_dtype=auto,fp8",))
    data = yaml.safe_load(workload_text(answers, profile="cpu"))
    assert mistakes(data) == []
    assert mistakes({**data, "desing": "full"}) == ["$"]
    assert mistakes({**data, "engine": {"kv_cache_dtype": "fp9"}}) == ["$.engine.kv_cache_dtype"]
    assert mistakes({**data, "load": {**data["load"], "concurrency": [0]}}) == ["$.load.concurrency"]
    assert mistakes({**data, "load": {**data["load"], "repeats": "3"}}) == ["$.load.repeats"]
