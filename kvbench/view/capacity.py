"""The capacity form: what a KV budget holds, paged and contiguous, as ``kvbench plan`` works it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvbench.common import text as words
from kvbench.common.errors import UsageError
from kvbench.sweep.capacity import Lengths, at_once, memory_notes
from kvbench.targets.builtin import check_configuration, kv_dtypes, shipped_models
from kvbench.workload.design import Cell, Configuration, Design, LoadPoint

_LAYOUTS = ("paged", "contiguous")
_MOST_DIGITS = 12
_MOST_CONCURRENT = 100_000
_TOKENS_IN_A_STEP = 512  # at least: it must hold a decode step of all sequences


@dataclass(frozen=True)
class Field:
    """One input of the form. ``choices``: of a list, (value, title); empty for a text."""

    name: str
    title: str
    default: str
    hint: str = ""
    choices: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class CapacityAnswer:
    """The table, a row a figure (name, paged, contiguous), and the sentence on whether memory limits the load."""

    rows: tuple[tuple[str, ...], ...]
    sentence: str


@dataclass(frozen=True)
class Form:
    """What the page shows: the fields with what was entered, the answer, or what is wrong with the input."""

    fields: tuple[Field, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    answer: CapacityAnswer | None = None
    error: str = ""


def form(entered: Mapping[str, str]) -> Form:
    """The form for what was entered; what is left out has its default."""
    fields = _fields()
    values = {each.name: entered.get(each.name, each.default).strip() for each in fields}
    try:
        return Form(fields, values, _answer(values, fields))
    except ValueError as error:
        return Form(fields, values, error=str(error))


def _fields() -> tuple[Field, ...]:
    dtypes = ("float32", "bfloat16", "float16")
    return (
        Field("model", "model", "llama-3.1-8b", "", tuple((name, name) for name in shipped_models())),
        Field("dtype", "weights", "auto", "", (("auto", "the model's own dtype"), *((each, each) for each in dtypes))),
        Field("kv_budget", "KV budget", "8GiB", "such as 8GiB, 97MiB"),
        Field("kv_cache_dtype", "KV dtype", "auto", "", tuple((each, each) for each in kv_dtypes())),
        Field("page_size", "page size", "16", "tokens"),
        Field("max_model_len", "max_model_len", "8192", "tokens"),
        Field("concurrency", "concurrency", "32", "requests at once"),
        Field("input_len", "input length", "600", "tokens"),
        Field("output_len", "output length", "150", "tokens"),
    )


def _answer(values: Mapping[str, str], fields: tuple[Field, ...]) -> CapacityAnswer:
    """Raises ValueError, in a sentence with the value and the limit."""
    for each in fields:
        if each.choices and values[each.name] not in dict(each.choices):
            known = ", ".join(value for value, _ in each.choices)
            raise UsageError(f"{each.title} {values[each.name]!r} is not one of {known}: choose one of these")
    numbers = ("page_size", "max_model_len", "concurrency", "input_len", "output_len")
    page_size, length, users, prompt, output = (_whole_number(values, fields, name) for name in numbers)
    if users > _MOST_CONCURRENT:
        raise UsageError(f"concurrency {users} is more than {_MOST_CONCURRENT:,}: give a smaller one")
    if prompt + output > length:
        raise UsageError(
            f"input length {prompt} + output length {output} is {prompt + output} tokens, more than max_model_len "
            f"{length}: raise max_model_len or shorten the requests"
        )
    shared = {
        "model": values["model"],
        "load_format": "dummy",
        "device": "cuda",  # arithmetic: "auto" is then the model's own dtype
        "dtype": values["dtype"],
        "kv_budget": values["kv_budget"],
        "kv_cache_dtype": values["kv_cache_dtype"],
        "max_model_len": length,
        "max_num_seqs": users,
        "max_num_batched_tokens": max(_TOKENS_IN_A_STEP, users),
    }
    load = LoadPoint(f"{users} at once", "closed", users, None, users)
    sizes = Lengths(np.full(users, prompt), np.full(users, output), np.zeros(users, dtype=int), 0)
    return _answered([shared | {"page_size": page_size, "layout": layout} for layout in _LAYOUTS], load, sizes)


def _answered(settings: list[dict[str, Any]], load: LoadPoint, sizes: Lengths) -> CapacityAnswer:
    configurations = tuple(Configuration(each["layout"], each["layout"], each, {}, False) for each in settings)
    capacity = {each.config_id: check_configuration(each.settings) for each in configurations}
    design = Design(configurations, tuple(Cell(each.config_id, each, load) for each in configurations))
    fit = {each.config_id: at_once(each, capacity[each.config_id], sizes)[0] for each in configurations}
    tokens = int(sizes.prompts[0] + sizes.outputs[0])
    lines = (
        ("KV budget", lambda c: words.data_size(c["kv_budget_bytes"])),
        ("bytes a token", lambda c: words.count(c["bytes_per_token"])),
        ("of it scales", lambda c: words.count(c["scale_bytes_per_token"])),
        ("page table", lambda c: words.data_size(c["page_table_bytes"])),
        ("tokens held", lambda c: words.count(c["capacity_tokens"])),
        (f"sequences of {words.count(settings[0]['max_model_len'])} tokens at once",
         lambda c: words.count(c["max_concurrency_at_max_len"])),
    )  # fmt: skip
    rows = [(title, *(of(capacity[layout]) for layout in _LAYOUTS)) for title, of in lines]
    rows.append((f"requests of {words.count(tokens)} tokens at once", *(words.count(int(fit[x])) for x in _LAYOUTS)))
    (sentence,) = memory_notes(design, capacity, {load.load_id: sizes})
    return CapacityAnswer(tuple(rows), f"{words.upper_first(sentence)}.")


def _whole_number(values: Mapping[str, str], fields: tuple[Field, ...], name: str) -> int:
    text = values[name].replace(",", "")
    if not (text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) > 0):
        title = next(each.title for each in fields if each.name == name)
        raise UsageError(f"{title} {values[name]!r} is not a whole number of at least 1: give one such as 16")
    return int(text)
