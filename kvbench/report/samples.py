"""Outputs of the baseline and of the other configurations for the same requests, side by side.

Equal outputs show that a setting changed no answer. Unequal ones say nothing of which is better: with random weights
many tokens are nearly tied, and a difference within rounding decides between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import pandas as pd

from kvbench.report.comparisons import baseline
from kvbench.report.provenance import random_weights
from kvbench.report.tables import Row, Table, Value, listed_table, texts
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run

MOST_REQUESTS = 3
MOST_CHARACTERS = 400  # of one output
_BEFORE = 80  # characters shown before the first difference, where the start has no room for it

Key = tuple[int, int]  # repeat, index
Outputs = Mapping[Key, tuple[tuple[int, ...], str]]  # ids of the output (empty: not told), and its text


@dataclass(frozen=True)
class Agreement:
    """How many outputs of ``configuration`` are those of the baseline; ``both``: requests that both served.

    ``by_tokens``: all their token ids were compared; else, where a server did not tell them, the texts.
    """

    configuration: str
    equal: int
    both: int
    by_tokens: bool

    def __str__(self) -> str:
        """47 of 48 equal in all tokens"""
        return f"{self.equal:,} of {self.both:,} equal in {'all tokens' if self.by_tokens else 'text'}"


@dataclass(frozen=True)
class Variant:
    """One configuration's output for a request. ``differs_at``: "token 12" or "character 57", counted from 1.

    ``text`` is empty and ``differs_at`` too where the output is that of the baseline.
    """

    configuration: str
    text: str
    differs_at: str


@dataclass(frozen=True)
class SampledRequest:
    """A request with the baseline's output and those of the others that served it; all texts are of the same place.

    ``text``, ``Variant.text``: at most MOST_CHARACTERS, with "…" where something is left out.
    """

    repeat: int
    index: int
    group: str
    prompt_tokens: int
    output_tokens: int
    text: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class OutputSamples:
    """Of one load: ``baseline`` is the name of its configuration. ``random_weights``: the outputs mean nothing."""

    baseline: str
    load: MeasuredLoad
    agreements: tuple[Agreement, ...]
    requests: tuple[SampledRequest, ...]
    random_weights: bool


def output_samples(run: Run) -> OutputSamples | None:
    """Of the highest load at which the baseline has outputs; None where none are stored.

    Shown are requests whose outputs differ, those that differ in most configurations first, then others.
    """
    for load in reversed(run.loads):
        base = baseline(run, load)
        rows = base.requests() if base is not None else pd.DataFrame()
        if base is None or rows.empty or "text" not in rows:
            continue
        mine = _outputs(rows)
        others = {cell.name: _outputs(_served(cell)) for cell in run.at(load) if cell is not base}
        agreements = tuple(_agreement(name, mine, o) for name, o in others.items() if mine.keys() & o.keys())
        differing = {key: sum(key in o and _differs(mine[key], o[key]) for o in others.values()) for key in mine}
        chosen = sorted(mine, key=lambda key: (-differing[key], key))[:MOST_REQUESTS]
        facts = rows.set_index(["repeat", "index"]).sort_index()
        shown = tuple(_request(facts.loc[key], key, mine[key], others) for key in chosen)
        return OutputSamples(base.name, load, agreements, shown, random_weights(run))
    return None


def _served(cell: MeasuredCell) -> pd.DataFrame:
    rows = cell.requests()
    return rows if "text" in rows else rows.iloc[:0].reindex(columns=["repeat", "index", "text"])


def _outputs(rows: pd.DataFrame) -> Outputs:
    ids = rows["output_token_ids"] if "output_token_ids" in rows else [None] * len(rows)
    return {
        (int(repeat), int(index)): (() if tokens is None else tuple(map(int, tokens)), str(text or ""))
        for repeat, index, tokens, text in zip(rows["repeat"], rows["index"], ids, rows["text"], strict=True)
    }


def _differs(a: tuple[Sequence[int], str], b: tuple[Sequence[int], str]) -> bool:
    """By token ids where both servers told them, else by text."""
    return a[0] != b[0] if a[0] and b[0] else a[1] != b[1]


def _agreement(name: str, mine: Outputs, theirs: Outputs) -> Agreement:
    both = mine.keys() & theirs.keys()
    equal = sum(not _differs(mine[key], theirs[key]) for key in both)
    return Agreement(name, equal, len(both), all(mine[key][0] and theirs[key][0] for key in both))


def _request(
    facts: pd.Series, key: Key, mine: tuple[Sequence[int], str], others: Mapping[str, Outputs]
) -> SampledRequest:
    """One request; the texts begin where the earliest difference can still be seen."""
    found = {name: outputs[key] for name, outputs in others.items() if key in outputs}
    changed = [output for output in found.values() if _differs(mine, output)]
    first = min((_first_difference(mine[1], output[1]) for output in changed), default=0)
    start = 0 if first < MOST_CHARACTERS - _BEFORE else first - _BEFORE
    variants = tuple(
        Variant(name, _cut(output[1], start), _where(mine, output)) if _differs(mine, output) else Variant(name, "", "")
        for name, output in found.items()
    )
    numbers = (int(facts[name]) for name in ("prompt_tokens", "output_tokens"))
    return SampledRequest(*key, str(facts["class"]), *numbers, _cut(mine[1], start), variants)


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """The place of the first element in which two sequences differ, from 0; their length where they do not."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=None)) if x != y), len(a))


def _where(mine: tuple[Sequence[int], str], theirs: tuple[Sequence[int], str]) -> str:
    of = 0 if mine[0] and theirs[0] else 1
    return f"{('token', 'character')[of]} {_first_difference(mine[of], theirs[of]) + 1}"


def _cut(text: str, start: int) -> str:
    end = start + MOST_CHARACTERS
    return f"{'…' if start else ''}{text[start:end]}{'…' if len(text) > end else ''}"


def agreement_table(samples: OutputSamples | None) -> Table:
    """How many outputs of each configuration are the baseline's; no rows where no outputs are stored."""
    rows = [
        Row(None, (*texts(each.configuration), Value(str(each), each.equal / each.both)))
        for each in (samples.agreements if samples else ())
    ]
    return listed_table(("configuration", "outputs"), rows)


def outputs_note(samples: OutputSamples | None) -> str:
    """What a difference means where the weights are random."""
    return "Random weights: a difference says nothing of quality." if samples and samples.random_weights else ""
