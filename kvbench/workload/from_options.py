"""The text of a workload file from a few answers: lengths, users, and what to vary.

``kvbench init`` writes it, and `sweep`, `plan` and `load` run it where no file is given, so that a question asked on
the command line can be kept as a file and changed there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvbench.common.errors import UsageError
from kvbench.common.option_rules import flag
from kvbench.common.parsing import parse_yaml
from kvbench.workload.file import Workload, default_profile, load_workload
from kvbench.workload.options import Answers
from kvbench.workload.settings import canonical, named_twice, slug

_LENGTH = re.compile(r"(\d+)(?:[:-](\d+))?")
_LONGEST_OF_A_FILE = 2048  # tokens
_OPEN_REQUESTS = 130  # as many as a p95 needs to be certain
EXAMPLE = "--input-len 600 --output-len 150 --concurrency 20"
COMMAND_LINE = "the command line"  # the name of a workload without a file, in messages
_COMMENT_AT = 34  # the column
_DESIGN = "one_at_a_time: each value alone beside the baseline; full: every combination"
_INSTEAD = {"concurrency": "--concurrency 8,32", "request_rate": "--request-rate 2,4"}

Line = tuple[str, str]  # YAML, comment


@dataclass(frozen=True)
class _Defaults:
    """The values that a small workload needs besides the answers, by profile."""

    model: str
    kv_budget: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    more_engine: Mapping[str, tuple[Any, str]] = field(default_factory=dict)


_DEFAULTS = {
    "cpu": _Defaults(
        "{config: llama-32m, load_format: dummy, dtype: float32}", "256MiB", 1024, 64, 512,
        {"device": ("cpu", ""), "num_threads": (1, "one thread gives the narrowest intervals on a CPU")},
    ),
    "gpu": _Defaults("{config: llama-3.1-8b, load_format: dummy, dtype: bfloat16}", "8GiB", 8192, 256, 4096),
}  # fmt: skip


def workload_text(answers: Answers, *, profile: str, name: str | None = None) -> str:
    """A commented workload file of about 20 lines. Raises UsageError for answers that make none."""
    if answers == Answers(vary=answers.vary, design=answers.design):
        raise UsageError(f"the workload is missing: give a file such as workloads/mixed.yaml, or {EXAMPLE}")
    prompts, longest = _prompts(answers)
    swept = parse_vary(answers.vary)
    if alone := [key for key, values in swept.items() if len(values) < 2]:
        raise UsageError(f"--vary {alone[0]} has one value, so nothing is compared: give two, or -o engine.{alone[0]}=")
    if answers.design and not swept:
        raise UsageError("--design says how settings are combined, and none is varied: give --vary, or leave it out")
    load = _load_lines(answers)
    base = _DEFAULTS["gpu" if profile == "gpu" else "cpu"]
    seqs = max(base.max_num_seqs, *answers.concurrency, 0)
    engine = {
        "page_size": (16, ""),
        "kv_budget": (base.kv_budget, "bytes of K and V, the same for every configuration"),
        "max_model_len": (max(base.max_model_len, 1 << (longest - 1).bit_length()), "most tokens of a request"),
        "max_num_seqs": (seqs, "most requests in one step"),
        "max_num_batched_tokens": (max(base.max_num_batched_tokens, seqs), "most tokens in one step"),
        **base.more_engine,
        **{key: (values[0], "") for key, values in swept.items()},
    }
    lines = [
        ("# kvbench plan FILE: what memory holds. kvbench sweep FILE: measures. kvbench help workload: every key.", ""),
        (f"name: {name or _name(answers)}", ""),
        (f"model: {base.model}", "random weights: speed is real, text is not"),
        ("engine:", "the baseline"),
        *((f"  {key}: {_yaml(value)}", why) for key, (value, why) in engine.items()),
    ]
    if swept:
        lines += [
            ("sweep:", "compared with the baseline"),
            *((f"  {key}: [{', '.join(map(_yaml, values))}]", "") for key, values in swept.items()),
            (f"design: {answers.design or 'one_at_a_time'}", _DESIGN),
            ("max_minutes: 8", "every cell once in any case, then what decides most"),
        ]
    lines += [("load:", ""), *load, ("  prompts:", ""), *prompts]
    return "".join(f"{code:<{_COMMENT_AT}}  # {comment}".rstrip(" #") + "\n" for code, comment in lines)


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def changes_of_file(answers: Answers) -> list[str]:
    """Returns ``KEY=VALUE`` of what the options vary in place of a file's sweep. UsageError for other answers."""
    others = [name for name in answers.stated if name not in ("vary", "design")]
    if others:
        raise UsageError(
            f"{flag(others[0])} makes a workload of its own: leave the file out, or change the file's value with "
            "-o load.KEY=VALUE"
        )
    swept = parse_vary(answers.vary)
    changes = [f"sweep={json.dumps(swept)}"] if swept else []
    return changes + ([f"design={answers.design}"] if answers.design else [])


def parse_vary(words: Sequence[str]) -> dict[str, list[Any]]:
    """Reads ``page_size=16,32`` as {"page_size": [16, 32]}. Raises UsageError."""
    swept: dict[str, list[Any]] = {}
    for word in words:
        key, sign, text = word.partition("=")
        key = key.strip().replace("-", "_").removeprefix("engine.")
        if key in _INSTEAD:
            raise UsageError(f"--vary {word}: {key} is no engine setting; write {_INSTEAD[key]}")
        try:  # the brackets of a YAML list may be there
            values = [canonical(key, parse_yaml(part)) for part in text.strip().strip("[]").split(",")]
        except ValueError:
            values = []
        if not sign or not values or any(value is None or isinstance(value, list | dict) for value in values):
            raise UsageError(f"--vary {word!r} names no values: write for example --vary page_size=16,32")
        if key in swept:
            raise UsageError(f"--vary {key} is given twice: write all its values in one, as --vary {key}=A,B")
        if twice := named_twice(key, values, {}):
            raise UsageError(f"--vary {key} {twice}")
        swept[key] = values
    return swept


def _length(option: str, text: str | None) -> tuple[int, int]:
    match = _LENGTH.fullmatch(text.strip()) if text else None
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        given = f"{text!r} is no length" if text else "is missing"
        raise UsageError(f"{option} {given}: write tokens, as {option} 600, or a range, as {option} 400:800")
    return low, high


def _prompts(answers: Answers) -> tuple[list[Line], int]:
    """The lines below ``prompts:``, and the tokens of the longest request; of a file, whose lengths are made to fit."""
    if answers.dataset_path is not None:
        return _dataset(answers), _LONGEST_OF_A_FILE
    if answers.dataset_name not in (None, "random"):
        raise UsageError(f"--dataset-name {answers.dataset_name} needs its file: give --dataset-path FILE")
    (low, high), (short, long) = _length("--input-len", answers.input_len), _length("--output-len", answers.output_len)
    lines = [("    kind: synthetic", "random tokens, which share nothing")]
    if answers.prefix_len:
        lines.append((f"    shared_prefix: {{tokens: {answers.prefix_len}}}", "all prompts begin with the same"))
    lines.append((f"    classes: [{{prompt_tokens: {_span(low, high)}, output_tokens: {_span(short, long)}}}]", ""))
    return lines, high + long + (answers.prefix_len or 0)


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}, {high}]"


def _dataset(answers: Answers) -> list[Line]:
    """Prompts of a file: of ShareGPT the first turn of each conversation, as ``vllm bench serve`` has it."""
    for option, value in (("--input-len", answers.input_len), ("--prefix-len", answers.prefix_len)):
        if value:
            raise UsageError(f"{option} {value} contradicts --dataset-path, whose prompts have lengths: leave one out")
    if answers.dataset_name == "random":
        raise UsageError("--dataset-name random needs no file: leave --dataset-path out, or name its format")
    path, name = Path(answers.dataset_path or "").expanduser().absolute(), answers.dataset_name
    lines = [("    kind: trace", ""), (f"    path: {json.dumps(str(path))}", ""), ("    sessions: false", "")]
    if name not in (None, "auto"):
        lines.append((f"    format: {name}", ""))
    if name == "sharegpt":
        lines.append(("    turns: first", ""))
    if answers.output_len:
        lines.append((f"    output_tokens: {_span(*_length('--output-len', answers.output_len))}", ""))
    return lines


def _load_lines(answers: Answers) -> list[Line]:
    users, rates = answers.concurrency, answers.request_rate
    if answers.dataset_path is not None and not users and not rates:
        counted = [(f"  num_requests: {answers.num_prompts}", "the first of the trace")] if answers.num_prompts else []
        return [("  mode: open", ""), ("  arrivals: trace", "at the recorded times"), *counted]
    if bool(users) == bool(rates):
        what = "both are given" if users else "neither is given"
        raise UsageError(f"give --concurrency N (users) or --request-rate R (requests/s): {what}")
    counts = [answers.num_prompts] if answers.num_prompts else [max(16, 3 * n) for n in users] or [_OPEN_REQUESTS]
    counted = (f"  num_requests: {counts}", "of each load")
    if users:
        return [(f"  concurrency: {list(users)}", "users, each with one request at a time"), counted]
    shown = ", ".join("inf" if rate == float("inf") else f"{rate:.9f}".rstrip("0").rstrip(".") for rate in rates)
    return [("  mode: open", ""), (f"  request_rate: [{shown}]", "requests/s at random times"), counted]


def _name(answers: Answers) -> str:
    if answers.dataset_path is not None:
        return slug(Path(answers.dataset_path).stem).lstrip("._-") or "dataset"
    lengths = [slug(str(text).replace(":", "-")) for text in (answers.input_len, answers.output_len)]
    return f"random-{'-'.join(lengths)}"


def read_or_make(
    path: str | None,
    answers: Answers,
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    repeats: int | None = None,
    other_engine: bool = False,
) -> Workload:
    """Reads the workload file, or without one makes the workload of the ``answers``. Raises UsageError.

    ``other_engine``: it runs on an engine that is not the built-in one. The rest is as in ``load_workload``.
    """
    how = {"profile": profile, "seed": seed, "repeats": repeats}
    if path is not None:
        return load_workload(path, overrides=(*changes_of_file(answers), *overrides), **how)
    text, first = workload_text(answers, profile=profile or default_profile()), []
    if other_engine:  # one thread is what the built-in engine is compared at
        first.append("engine.num_threads=null")
    if repeats:  # all of them
        first.append("max_minutes=null")
    return load_workload(COMMAND_LINE, text=text, overrides=(*first, *overrides), **how)
