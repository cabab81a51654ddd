"""Strict pydantic base model, and pydantic's errors as sentences."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from kvbench.common.parsing import as_yaml
from kvbench.common.text import nearest, shorten

_UNION_TAGS = ("synthetic", "text", "trace")
_LONGEST_SHOWN = 300  # characters of a wrong value
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_LIMITS = {
    "greater_than_equal": "give at least {ge}",
    "greater_than": "give more than {gt}",
    "less_than_equal": "give at most {le}",
    "less_than": "give less than {lt}",
    "too_short": "give at least {min_length} of them",
    "too_long": "give at most {max_length} of them",
    "string_too_short": "give at least {min_length} characters",
    "string_too_long": "give at most {max_length} characters",
    "literal_error": "give {expected}",
    "finite_number": "give a finite number",
}


class StrictModel(BaseModel):
    """Base of every section: no unknown keys, no silent conversion ("3" is not 3), frozen.

    The text below a field describes it, in the code and in ``kvbench help workload``.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        allowed = list(cls.model_fields)
        for key in data:
            if key not in allowed:
                near = nearest(str(key), allowed)
                hint = f"did you mean `{near[0]}`?" if near else f"known keys here: {', '.join(allowed)}."
                raise ValueError(f"`{key}` is not a known key; {hint}")
        return data


def explain(error: ValidationError, prefix: str = "load") -> list[str]:
    """One sentence per mistake: where it is, what was given, what is allowed.

    ``prefix`` is the YAML path of the validated section ("" for the whole file).
    """
    out = []
    for item in error.errors():
        steps = [str(s) for s in item["loc"] if s not in _UNION_TAGS]
        where = ".".join([prefix, *steps] if prefix else steps)
        lead = f"{where}: " if where else ""
        out.append(_sentence(item, lead))
    return out


def _sentence(item: Any, lead: str) -> str:
    """One pydantic error dict as a sentence."""
    kind, context, given = item["type"], item.get("ctx") or {}, shorten(as_yaml(item["input"]), _LONGEST_SHOWN)
    if kind == "value_error":
        return lead + item["msg"].removeprefix("Value error, ")
    if kind == "missing":
        return f"{lead.removesuffix(': ')} is missing; add it."
    if kind == "union_tag_invalid":
        return f"{lead}{context['tag']!r} is not a known kind; use one of {context['expected_tags']}."
    if kind == "union_tag_not_found":
        return f"{lead}the key {context['discriminator']} is missing; give one of {', '.join(_UNION_TAGS)}."
    if kind in _WANTED:
        return f"{lead}{given} is not {_WANTED[kind]}; write {_WANTED[kind]} here."
    if kind in _LIMITS:
        limits = {name: as_yaml(limit).removesuffix(".0") for name, limit in context.items() if name != "expected"}
        return f"{lead}{given} is not allowed; {_LIMITS[kind].format(**context | limits)}."
    return f"{lead}{given} is not allowed. {item['msg']}."
