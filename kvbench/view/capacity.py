"""The capacity form: what a KV budget holds, paged and contiguous, as ``kvbench plan`` works it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvbench.common import text as words
from kvbench.common.errors import UsageError
from kvbench.report.wording import say
from kvbench.sweep.plan import Lengths, at_once, memory_notes
from kvbench.targets.builtin import check_configuration, kv_dtypes, shipped_models
from kvbench.workload.design import Cell, Configuration, Design, LoadPoint

_LAYOUTS = ("paged", "contiguous")
_MOST_DIGITS = 12
_MOST_CONCURRENT = 100_000
_TOKENS_IN_A_STEP = 512  # at least: it must hold a decode step of all sequences


@dataclass(frozen=True)
class Field:
    """One input of the form. ``choices``: of a list, (value, title); empty for a text; ``is_number``: of at least 1."""

    name: str
    title: str
    default: str
    hint: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    is_number: bool = False


@dataclass(frozen=True)
class Form:
    """The fields with what was entered, the answer, or the ``error`` of the input.

    ``sentence``: whether memory limits the load; ``rows``: a figure each (name, paged, contiguous).
    """

    fields: tuple[Field, ...]
    values: Mapping[str, str]
    sentence: str = ""
    rows: tuple[tuple[str, ...], ...] = ()
    error: str = ""


def form(entered: Mapping[str, str]) -> Form:
    """The form for what was entered; what is left out has its default."""

    def same(*values: str) -> tuple[tuple[str, str], ...]:
        return tuple((value, value) for value in values)

    dtypes = (("auto", "the model's own dtype"), *same("float32", "bfloat16", "float16"))
    fields = (
        Field("model", "model", "llama-3.1-8b", choices=same(*shipped_models())),
        Field("dtype", "weights", "auto", choices=dtypes),
        Field("kv_budget", "KV budget", "8GiB", "such as 8GiB, 97MiB"),
        Field("kv_cache_dtype", "KV dtype", "auto", choices=same(*kv_dtypes())),
        Field("page_size", "page size", "16", "tokens", is_number=True),
        Field("max_model_len", "max_model_len", "8192", "tokens", is_number=True),
        Field("concurrency", "concurrency", "32", "requests at once", is_number=True),
        Field("input_len", "input length", "600", "tokens", is_number=True),
        Field("output_len", "output length", "150", "tokens", is_number=True),
    )
    values = {field.name: entered.get(field.name, field.default).strip() for field in fields}
    try:
        return Form(fields, values, *_answer(values, fields))
    except ValueError as error:
        return Form(fields, values, error=str(error))


def _answer(values: Mapping[str, str], fields: tuple[Field, ...]) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """The sentence and the rows of a form. Raises ValueError, in a sentence with the value and the limit."""
    numbers = []
    for field in fields:
        text, digits = values[field.name], values[field.name].replace(",", "")
        if field.choices and text not in dict(field.choices):
            allowed = ", ".join(value for value, _ in field.choices)
            raise UsageError(say("view.not_a_choice", title=field.title, text=text, allowed=allowed))
        if field.is_number:
            if not (digits.isdecimal() and len(digits) <= _MOST_DIGITS and int(digits) > 0):
                raise UsageError(say("view.no_number", title=field.title, text=text))
            numbers.append(int(digits))
    page_size, length, users, prompt, output = numbers
    if users > _MOST_CONCURRENT:
        raise UsageError(say("view.too_many", users=users, most=_MOST_CONCURRENT))
    if prompt + output > length:
        raise UsageError(say("view.too_long", prompt=prompt, output=output, sum=prompt + output, length=length))
    settings = {
        **{name: values[name] for name in ("model", "dtype", "kv_budget", "kv_cache_dtype")},
        "load_format": "dummy",
        "device": "cuda",  # arithmetic: "auto" is then the model's own dtype
        "max_model_len": length,
        "max_num_seqs": users,
        "max_num_batched_tokens": max(_TOKENS_IN_A_STEP, users),
        "page_size": page_size,
    }
    configurations = tuple(Configuration(name, name, settings | {"layout": name}, {}, False) for name in _LAYOUTS)
    capacity = {c.config_id: check_configuration(c.settings) for c in configurations}
    load = LoadPoint(f"{users} at once", "closed", users, None, users)
    sizes = Lengths(np.full(users, prompt), np.full(users, output), np.zeros(users, dtype=int), 0)
    design = Design(configurations, tuple(Cell(c.config_id, c, load) for c in configurations))
    lines = (
        ("KV budget", "kv_budget_bytes", words.data_size),
        ("bytes a token", "bytes_per_token", words.count),
        ("of it scales", "scale_bytes_per_token", words.count),
        ("page table", "page_table_bytes", words.data_size),
        ("tokens held", "capacity_tokens", words.count),
        (say("view.sequences", tokens=length), "max_concurrency_at_max_len", words.count),
    )
    rows = [(title, *(write(getattr(capacity[layout], key)) for layout in _LAYOUTS)) for title, key, write in lines]
    fits = (words.count(int(at_once(c, capacity[c.config_id], sizes)[0])) for c in configurations)
    rows.append((say("view.requests", tokens=prompt + output), *fits))
    (sentence,) = memory_notes(design, capacity, {load.load_id: sizes})
    return f"{words.upper_first(sentence)}.", tuple(rows)
