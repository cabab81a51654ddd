"""Just enough of JSON Schema 2020-12 to check a document against a schema of ours: a keyword it lacks is an error."""

from __future__ import annotations

from functools import reduce
from operator import getitem
from typing import Any

_ANNOTATIONS = {"$schema", "$id", "$defs", "title", "description"}
_TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}


def errors(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None, where: str = "$") -> list[str]:
    """What is wrong with ``value``, each with its place; none where it conforms."""
    root = schema if root is None else root
    found: list[str] = []
    for keyword, rule in schema.items():
        if keyword in _ANNOTATIONS:
            continue
        if keyword == "$ref":
            found += errors(value, reduce(getitem, rule.removeprefix("#/").split("/"), root), root, where)
        elif keyword == "properties":
            for key, below in rule.items():
                if isinstance(value, dict) and key in value:
                    found += errors(value[key], below, root, f"{where}.{key}")
        elif keyword == "additionalProperties":
            extra = set(value) - set(schema.get("properties", {})) if isinstance(value, dict) else set()
            for key in sorted(extra):
                found += [f"{where}.{key} is unknown"] if rule is False else errors(value[key], rule, root, where)
        elif keyword == "items":
            for i, item in enumerate(value if isinstance(value, list) else ()):
                found += errors(item, rule, root, f"{where}[{i}]")
        elif not _holds(keyword, rule, value):
            found.append(f"{where} is {value!r:.80}, against {keyword} {rule!r}")
    return found


def _holds(keyword: str, rule: Any, value: Any) -> bool:
    """One keyword that looks at nothing below. KeyError for one that is not known here."""
    number = _TYPES["number"](value)
    rules = {
        "type": lambda: any(_TYPES[name](value) for name in ([rule] if isinstance(rule, str) else rule)),
        "const": lambda: value == rule,
        "enum": lambda: value in rule,
        "required": lambda: not isinstance(value, dict) or set(rule) <= set(value),
        "minimum": lambda: not number or value >= rule,
        "maximum": lambda: not number or value <= rule,
        "minItems": lambda: not isinstance(value, list) or len(value) >= rule,
        "maxItems": lambda: not isinstance(value, list) or len(value) <= rule,
        "minLength": lambda: not isinstance(value, str) or len(value) >= rule,
    }
    return rules[keyword]()
