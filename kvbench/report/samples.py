"""Outputs of the baseline and of the other configurations for the same requests, side by side.

Equal outputs show that a setting changed no answer. Unequal ones say nothing of which is better: with random weights
many tokens are nearly tied, and a difference within rounding decides between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import pandas as pd

from kvbench.report.comparisons import Comparisons
from kvbench.report.tables import Row, Section, Value, listed_table, texts
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredLoad

MOST_REQUESTS = 3
MOST_CHARACTERS = 400  # of one output
_BEFORE = 80  # characters shown before the first difference, where the start has no room for it


@dataclass(frozen=True)
class Agreement:
    """The number of outputs of ``configuration`` that are the baseline's."""

    configuration: str
    equal: int
    both: int  # requests that both served
    by_tokens: bool  # all their token ids were compared; else, where a server did not tell them, the texts

    def __str__(self) -> str:
        """Writes `47 of 48 equal in all tokens`."""
        return say("samples.equal", self.by_tokens, equal=self.equal, both=self.both)


@dataclass(frozen=True)
class OtherOutput:
    """One configuration's output for a request; without a text where it is that of the baseline."""

    configuration: str
    text: str = ""
    differs_at: str = ""  # "token 12" or "character 57", counted from 1


@dataclass(frozen=True)
class SampledRequest:
    """A request with the baseline's output and those of the others that served it, all from the same place.

    Of each text at most MOST_CHARACTERS are shown, with "…" where something is left out.
    """

    repeat: int
    index: int
    group: str
    prompt_tokens: int
    output_tokens: int
    text: str
    variants: tuple[OtherOutput, ...]


@dataclass(frozen=True)
class OutputSamples:
    """Outputs of the baseline (its name) and the others at one load; with random weights they mean nothing."""

    baseline: str
    load: MeasuredLoad
    agreements: tuple[Agreement, ...]
    requests: tuple[SampledRequest, ...]
    random_weights: bool


@dataclass(frozen=True)
class _Output:
    """The output of one request; ``ids``: its tokens, empty where the server did not tell them."""

    ids: tuple[int, ...]
    text: str

    def differs_at(self, other: _Output) -> str:
        """The first token in which they differ, or character where a server told no tokens; empty where none does."""
        kind, mine, theirs = "character", self.text, other.text
        if self.ids and other.ids:
            kind, mine, theirs = "token", self.ids, other.ids
        return f"{kind} {_first_difference(mine, theirs) + 1}" if mine != theirs else ""

    def shown(self, start: int) -> str:
        """The text from ``start`` on, as far as there is room for it."""
        end = start + MOST_CHARACTERS
        return "…" * (start > 0) + self.text[start:end] + "…" * (len(self.text) > end)


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """The place of the first element in which two sequences differ, from 0; their length where they do not."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=None)) if x != y), len(a))


Outputs = Mapping[tuple[int, int], _Output]  # by repeat and index


def output_samples(comparisons: Comparisons, random_weights: bool = False) -> OutputSamples | None:
    """The samples of the highest load at which the baseline has outputs; None where none are stored.

    Shown are requests whose outputs differ, those that differ in most configurations first, then others.
    """
    for load in reversed(comparisons.loads):
        base = comparisons.baselines[load]
        rows = base.requests() if base is not None else pd.DataFrame()
        mine = _outputs(rows)
        if base is None or not mine:
            continue
        others = {cell.name: _outputs(cell.requests()) for cell in comparisons.at(load) if cell is not base}
        agreements = tuple(_agreement(name, mine, o) for name, o in others.items() if mine.keys() & o.keys())
        unequal = {key: sum(bool(mine[key].differs_at(o[key])) for o in others.values() if key in o) for key in mine}
        chosen = sorted(mine, key=lambda key: (-unequal[key], key))[:MOST_REQUESTS]
        facts = rows.set_index(["repeat", "index"]).sort_index()
        requests = tuple(_request(facts.loc[key], key, mine[key], others) for key in chosen)
        return OutputSamples(base.name, load, agreements, requests, random_weights)
    return None


def _outputs(rows: pd.DataFrame) -> Outputs:
    if "text" not in rows:
        return {}
    ids = rows["output_token_ids"] if "output_token_ids" in rows else [None] * len(rows)
    return {
        (int(repeat), int(index)): _Output(() if tokens is None else tuple(map(int, tokens)), str(text or ""))
        for repeat, index, tokens, text in zip(rows["repeat"], rows["index"], ids, rows["text"], strict=True)
    }


def _agreement(name: str, mine: Outputs, theirs: Outputs) -> Agreement:
    both = mine.keys() & theirs.keys()
    equal = sum(not mine[key].differs_at(theirs[key]) for key in both)
    return Agreement(name, equal, len(both), all(mine[key].ids and theirs[key].ids for key in both))


def _request(facts: pd.Series, key: tuple[int, int], mine: _Output, others: Mapping[str, Outputs]) -> SampledRequest:
    """One request; the texts begin where the earliest difference can still be seen."""
    outputs = {name: theirs[key] for name, theirs in others.items() if key in theirs}
    differs_at = {name: mine.differs_at(output) for name, output in outputs.items()}
    first = min((_first_difference(mine.text, outputs[n].text) for n, where in differs_at.items() if where), default=0)
    start = 0 if first < MOST_CHARACTERS - _BEFORE else first - _BEFORE
    variants = tuple(
        OtherOutput(name, outputs[name].shown(start), where) if where else OtherOutput(name)
        for name, where in differs_at.items()
    )
    numbers = (int(facts[name]) for name in ("prompt_tokens", "output_tokens"))
    return SampledRequest(*key, str(facts["class"]), *numbers, mine.shown(start), variants)


def section(samples: OutputSamples | None) -> Section:
    """A row a configuration: outputs that are the baseline's; no rows where no outputs are stored."""
    agreements = samples.agreements if samples else ()
    rows = [Row(None, (*texts(one.configuration), Value(str(one), one.equal / one.both))) for one in agreements]
    note = say("samples.random", samples is not None and samples.random_weights)
    return Section("outputs", "Equal to the baseline", listed_table(("configuration", "outputs"), rows), note)
