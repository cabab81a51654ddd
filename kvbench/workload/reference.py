"""Writes the keys of a workload file as a JSON schema for editors and as a page for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvbench.common.parsing import json_at
from kvbench.workload.file import WorkloadFile
from kvbench.workload.load_section import LoadConfig

Schema = dict[str, Any]
"""A JSON schema, or a part of one."""
_INTRODUCTION = """\
# A workload file, key by key

`kvbench help workload` prints this page. `kvbench init my.yaml` writes a short file; `workloads/` has longer ones.

A JSON schema for editors is in [workload.schema.json](workload.schema.json). With the first line
`# yaml-language-server: $schema=PATH/TO/workload.schema.json` in a file, VS Code completes keys and checks values.

A sweep measures cells. A cell is one configuration under one load.

- **Configurations** are the baseline (`engine`) and the values in `sweep`. With `page_size: [16, 32]` and
  `kv_cache_dtype: [auto, fp8]` there are 4 combinations. `design: one_at_a_time`, the default, measures the baseline
  and each other value alone (3 of them), so that every difference has one cause. `design: full` measures all 4.
- **Loads** are the values of `concurrency` or `request_rate`.

`-o KEY=VALUE` on the command line wins over the profile, and the profile wins over the rest of the file.
"""
_PROFILES = (
    "values that replace those of the file: for each profile's name, any of the keys above. `cpu` or `gpu` is chosen "
    "by the machine, another one by --profile"
)


def workload_schema(engine: Schema) -> Schema:
    """The JSON schema of a workload file; ``engine``: a schema for each engine setting, by name.

    Whatever a profile may bring is not required of the file itself.
    """
    schema = _schema(engine)
    for part in (schema, *(schema["$defs"][name] for name in ("Load", "ModelSection"))):
        part.pop("required", None)
    for name in ("SyntheticPrompts", "TextPrompts", "TracePrompts"):
        schema["$defs"][name]["required"] = ["kind"]
    return schema


def _schema(engine: Schema) -> Schema:
    """One schema of WorkloadFile, whose ``load`` is checked apart, and of LoadConfig."""
    whole, load = WorkloadFile.model_json_schema(), LoadConfig.model_json_schema()
    definitions = {**whole.pop("$defs", {}), **load.pop("$defs", {}), "Load": load}
    lists = {name: {"type": "array", "items": value} for name, value in engine.items()}
    keys = whole["properties"]
    for name, settings in (("engine", engine), ("sweep", lists)):
        keys[name] |= {"properties": dict(settings), "additionalProperties": True}
    keys["load"] = {"$ref": "#/$defs/Load", "description": keys["load"]["description"]}
    keys["profiles"] = {"type": "object", "description": _PROFILES, "additionalProperties": {"type": "object"}}
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **whole, "title": "kvbench workload", "$defs": definitions}


def workload_reference(engine: Schema) -> str:
    """The page of all keys, in Markdown; ``engine`` as ``workload_schema`` takes it."""
    schema = _schema(engine)
    parts = schema["$defs"]
    sections = [
        ("The file", schema),
        ("model:", parts["ModelSection"]),
        ("engine: and sweep:", {"description": _ENGINE, "properties": engine}),
        ("simulate:", parts["SimulateSection"]),
        ("load:", parts["Load"]),
        ("load.prompts: of kind synthetic", parts["SyntheticPrompts"]),
        ("load.prompts.classes:", parts["PromptClass"]),
        ("load.prompts.shared_prefix:", parts["SharedPrefix"]),
        ("load.prompts: of kind text", parts["TextPrompts"]),
        ("load.prompts: of kind trace", parts["TracePrompts"]),
        ("load.sessions:", parts["Sessions"]),
        ("load.canaries:", parts["Canaries"]),
        ("load.slo: in milliseconds", parts["Slo"]),
        ("load.steps:", parts["Step"]),
    ]
    return "\n".join([_INTRODUCTION, *(line for title, part in sections for line in _section(title, part))])


_ENGINE = (
    "`engine` has one value for each setting, `sweep` a list of values. Another engine gets the settings that it has "
    "an option for; the others are named when the sweep begins."
)


def _section(title: str, schema: Schema) -> Iterator[str]:
    yield f"## {title}\n"
    if title != "The file":
        yield " ".join(schema["description"].split()) + "\n"
    for name, key in schema["properties"].items():
        facts, default = [_kind(key)], json_at(key, "default")
        if name in (json_at(schema, "required") or ()):
            facts.append("needed")
        elif default not in (None, "", {}, []):
            facts.append(f"default {str(default).lower() if isinstance(default, bool) else default}")
        text = " ".join((json_at(key, "description") or "").split())
        yield f"- `{name}` ({', '.join(filter(None, facts))}): {text}"
    yield ""


def _kind(key: Schema) -> str:
    """Names the type of a value in a few words: ``closed | open``, ``number or list``."""
    if "$ref" in key:
        return _NAMED.get(key["$ref"].rpartition("/")[2], "mapping")
    if "enum" in key or "const" in key:
        return " | ".join(map(str, key["enum"] if "enum" in key else [key["const"]]))
    if "anyOf" in key or "oneOf" in key:
        forms = key["anyOf" if "anyOf" in key else "oneOf"]
        return " or ".join(dict.fromkeys(_kind(form) for form in forms if json_at(form, "type") != "null"))
    kinds = json_at(key, "type") or ""
    return " or ".join(_TYPES.get(kind, "") for kind in ([kinds] if isinstance(kinds, str) else kinds))


_TYPES = {
    "integer": "whole number", "number": "number", "boolean": "true | false", "string": "text", "array": "list",
    "object": "mapping",
}  # fmt: skip
_NAMED = {
    "Length": "tokens, [low, high] or {percentiles: {p50: .., max: ..}}",
    "Turns": "number or [low, high]",
    "Think": "seconds, [low, high] or {exponential: mean}",
}
