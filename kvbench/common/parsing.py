"""JSON and YAML from outside as plain data, in bounded time and memory.

Both refuse what no reader of ours means: deep nesting, which exhausts Python's stack, numbers of thousands of digits,
and in YAML characters that no path or terminal takes, and aliases or merge keys that stand for millions of values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from datetime import date
from pathlib import Path
from typing import Any

import yaml

MOST_DEPTH = 100  # of lists and mappings in one another
MOST_VALUES = 20_000  # of a YAML text, aliases and merge keys written out: PyYAML takes 60 us for each
_TOO_DEEP = f"nested more than {MOST_DEPTH} deep"
MOST_BYTES = 1 << 20  # of a YAML file
_LONGEST_NUMBER = 80  # characters: 64 binary digits, with underscores in between
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_CONTAINERS = (list, dict, tuple)
_MERGE = "tag:yaml.org,2002:merge"
_OF_THE_TEXT = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)  # of PyYAML's constructors


def parse_json(data: str | bytes) -> Any:
    """Parses JSON. Raises ValueError for what is not JSON, or nested more than ``MOST_DEPTH`` deep."""
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:
        raise ValueError("a number has thousands of digits") from None
    if text.count("[") + text.count("{") > MOST_DEPTH:
        _check_depth(value)
    return value


_KINDS = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a mapping"}


def kind_of(value: Any) -> str:
    """Names the kind of a value in a YAML file: a list, a text, empty."""
    return "empty" if value is None else _KINDS.get(type(value), "a date" if isinstance(value, date) else "a value")


def as_yaml(value: Any) -> str:
    """Writes a value as a YAML file has it, on one line: null, true, [8, 'x']."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {as_yaml(part)}' for key, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def json_at(value: Any, *path: str) -> Any:
    """Returns what lies at ``path`` in JSON from outside; None where it or an object above it is missing."""
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def _check_depth(value: Any) -> None:
    level: list[Any] = [[value]]
    for _ in range(MOST_DEPTH + 1):
        parts = (part for one in level for part in (one.values() if type(one) is dict else one))
        level = [part for part in parts if isinstance(part, _CONTAINERS)]
    if level:
        raise ValueError(_TOO_DEEP)


def parse_yaml(text: str) -> Any:
    """Parses YAML. Raises ValueError with the line and the problem, also for a key that stands twice in a mapping."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it does not parse"
        raise ValueError(f"line {mark.line + 1}: {problem}" if mark else problem) from None
    except _OF_THE_TEXT as error:
        raise ValueError(f"a value cannot be read ({error})") from None
    _check_depth(value)  # with its aliases written out
    return value


def read_yaml(path: Path) -> Any:
    """Reads a file as ``parse_yaml`` does. Raises OSError and ValueError, also for more than ``MOST_BYTES``."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return parse_yaml(data.decode())


class _Loader(yaml.SafeLoader):
    """Refuses what the module's docstring lists, and a key that stands twice, of which PyYAML would keep the last."""

    depth = values = 0

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.sizes: dict[yaml.Node, int] = {}  # values that a node stands for, its aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event, before = self.peek_event(), self.values
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise _refused(_TOO_DEEP, event)
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and _UNUSABLE.search(node.value):
            raise _refused("a text has a NUL or half a character (a surrogate)", event)
        is_alias = isinstance(event, yaml.AliasEvent)
        self.values += self.sizes.get(node, MOST_VALUES) if is_alias else 1  # one within its own anchor has no end
        if self.values > MOST_VALUES:
            raise _refused(f"more than {MOST_VALUES:,} values, with its aliases written out", event)
        if not is_alias:
            self.sizes[node] = self.values - before
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _refused(f"a key is {kind_of(key)}, and can only be a word or a number", key_node)
            if key in seen:
                raise _refused(f"the key {key!r} stands twice in one mapping", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """An int of PyYAML, which makes numbers of any length."""
    if len(node.value) > _LONGEST_NUMBER or abs(value := loader.construct_yaml_int(node)) >= 2**63:
        raise _refused("a number does not fit into 64 bits", node)
    return value


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _refused(problem: str, where: yaml.Node | yaml.Event) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, where.start_mark)
