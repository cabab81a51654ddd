"""Workload YAML as plain data: reading it strictly, merging a profile in, applying ``-o key=value``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvbench.common.errors import UsageError

PROFILES = ("cpu", "gpu")


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; a benchmark must not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                continue  # SafeLoader reports unhashable keys itself
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice in one mapping", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"there is no workload file {str(path)!r}: {_other_workloads(path)}") from None
    except IsADirectoryError:
        raise UsageError(f"{str(path)!r} is a folder: give a workload file, {_other_workloads(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the workload file {str(path)!r} cannot be read: {error}") from None
    data = parse_yaml(text, path)
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise UsageError(f"{path}: a workload is a mapping of name, model, engine, load ...; this file is {kind}")
    return data


def parse_yaml(text: str, path: Path) -> Any:
    """``text`` of the file ``path`` as plain data. Raises UsageError, also for a key that stands twice."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it does not parse"
        raise UsageError(f"{path}{at}: not valid YAML: {problem}") from None


def _other_workloads(path: Path) -> str:
    folder = path if path.is_dir() else path.parent if path.parent.is_dir() else Path("workloads")
    found = sorted(str(p) for p in folder.glob("*.yaml")) if folder.is_dir() else []
    if not found:
        return "give the path of a YAML file"
    near = difflib.get_close_matches(str(path), found, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(found)}"


def apply_profile(data: dict[str, Any], profile: str, source: Path, *, asked: bool) -> dict[str, Any]:
    profiles = data.pop("profiles", None) or {}
    if not isinstance(profiles, dict) or not all(isinstance(p, dict | None) for p in profiles.values()):
        raise UsageError(f"{source}: profiles must be a mapping of profile name to settings, such as `cpu: {{...}}`")
    if profile not in profiles:
        if asked and profile not in PROFILES:
            known = ", ".join(profiles) or "none"
            raise UsageError(f"there is no profile {profile!r} in {source}: the profiles are {known}")
        return data
    return deep_merge(data, profiles[profile] or {})


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``base``: mappings merge, everything else replaces.

    A mapping with another ``kind``, ``config`` or ``path`` is another thing, and replaces too.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not _other_thing(old, value):
            merged[key] = deep_merge(old, value)
        else:
            merged[key] = value
    return merged


def _other_thing(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if "kind" in new and "kind" in old:
        return new["kind"] != old["kind"]
    return ("config" in new and "path" in old) or ("path" in new and "config" in old)


def apply_override(data: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    key = key.strip()
    if not sign or not key:
        raise UsageError(f"-o {override!r} is not key=value: write for example -o engine.kv_budget=64MiB")
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError:
        raise UsageError(f"-o {key}: {text!r} is not a YAML value: quote it or mend the brackets") from None
    *parents, last = key.split(".")
    node: Any = data
    for depth, part in enumerate(parents):
        node = _step_into(node, part, ".".join(parents[: depth + 1]), override)
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    else:
        node[last] = value
    if key == "model.path" and value is not None:  # takes the place of the file's model, random weights included
        for name in ("config", "load_format"):
            node.pop(name, None)
    elif key == "model.config" and value is not None:
        node.pop("path", None)


def _step_into(node: Any, part: str, so_far: str, override: str) -> Any:
    if isinstance(node, list):
        child = node[_index(node, part, override)]
    else:
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
    if not isinstance(child, dict | list):
        raise UsageError(f"-o {override!r}: {so_far} is {child!r}, which has no settings below it; set it as a whole")
    return child


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise UsageError(f"-o {override!r}: {part!r} is not an item of that list: use 0 to {len(node) - 1}")
    return int(part)


def section_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.setdefault(name, {})
    if not isinstance(section, dict):
        raise UsageError(f"{name} is {section!r}: it must be a mapping of settings")
    return section
