"""Runs the rate search of ``kvbench load --find-max-rate``: one measured load after the other, each kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvbench.backlog import backlog_of, filling_s
from kvbench.errors import MeasurementError
from kvbench.load_folder import METRICS, LoadFolder
from kvbench.load_result import goodput_share
from kvbench.rate_plan import Sizes
from kvbench.rate_search import (
    ALWAYS,
    FOUND,
    INVALID,
    NEVER,
    Answer,
    Ask,
    Bounds,
    Condition,
    Trial,
    advance,
    bracket,
    unmet,
)
from kvbench.results import write_json

EXIT_OK, EXIT_INCONCLUSIVE, EXIT_INVALID = 0, 3, 4
OUT_OF_TIME = "out of time"
_RUN_OVER_FILLING = 4.0

Measure = Callable[[float, int, int, Path], Mapping[str, Any]]
"""rate [1/s], number of requests, number of the run (its seed), folder -> what metrics.json holds, of one run."""


@dataclass
class RateSearch:
    """``measure`` runs one load; ``limit_s``: no run is begun after so many seconds."""

    conditions: tuple[Condition, ...]
    bounds: Bounds
    sizes: Sizes
    folder: LoadFolder
    measure: Measure
    console: Console
    limit_s: float = math.inf
    trials: list[Trial] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> int:
        """To the answer, which is printed and stored; the exit code."""
        self._take_finished()
        began = time.monotonic()
        while isinstance(step := advance(self.trials, self.bounds), Ask):
            if time.monotonic() - began > self.limit_s:
                minutes = f"{self.limit_s / 60:g} minutes"
                step = Answer(OUT_OF_TIME, *bracket(self.trials), False, f"{minutes} were allowed (--max-minutes)")
                break
            self._one(step)
        return self._conclude(step)

    def _take_finished(self) -> None:
        """What a stopped search has measured. Invalid runs at its end are run again: they may be what ended it."""
        finished = list(self.folder.finished_runs())
        while finished and not finished[-1][1]["valid"]:
            finished.pop()
        for path, kept in finished:
            self._note(path, kept)
        if self.trials:
            self.console.print(f"{len(self.trials)} runs are finished and are not run again", highlight=False)

    def _one(self, ask: Ask) -> None:
        number = len(self.trials) + 1
        path = self.folder.run(number, f"r{ask.rate:g}")
        count = self.sizes.requests(ask.rate, self.conditions)
        try:
            kept = dict(self.measure(ask.rate, count, number, path))
        except MeasurementError as error:  # as an invalid run: once more, then the search ends with the reason
            kept = {"valid": False, "invalid_reasons": [str(error)], "metrics": {}}
        kept["trial"] = {"rate": ask.rate, "confirms": ask.confirms} | self._judged(kept, path / "requests.parquet")
        write_json(path / METRICS, kept)
        self._note(path, kept)
        self.console.print(_told(number, ask, self.trials[-1]), highlight=False, markup=False, soft_wrap=True)

    def _judged(self, kept: Mapping[str, Any], samples: Path) -> dict[str, Any]:
        """met (None: not told), why not, the values, the backlog; ``seconds``: how long a run must be to tell."""
        metrics = kept["metrics"] | {"goodput_share": goodput_share(kept["metrics"])}
        starts, ends = _visits(samples)
        backlog, seconds = backlog_of(starts, ends), None
        met, reasons = None, list(kept["invalid_reasons"])
        if kept["valid"]:
            reasons = unmet(self.conditions, metrics, backlog)
            met = not reasons
            if met and backlog is None:  # all was over before a backlog could have shown
                met, seconds = None, _RUN_OVER_FILLING * filling_s(starts, ends)
                reasons = [f"too short to tell whether the server keeps up: {seconds:.0f} s of arrivals are needed"]
        return {
            "met": met,
            "reasons": reasons,
            "values": {c.text: c.value(metrics) for c in self.conditions},
            "backlog": None if backlog is None else {"early": backlog.early, "late": backlog.late},
            "seconds": seconds,
        }

    def _note(self, path: Path, kept: Mapping[str, Any]) -> None:
        trial, metrics = kept["trial"], kept["metrics"]
        self.trials.append(Trial(trial["rate"], trial["met"], tuple(trial["reasons"])))
        if trial["seconds"] is not None:  # from here on
            self.sizes = replace(self.sizes, seconds=max(self.sizes.seconds, trial["seconds"]))
        sent = (metrics.get("completed") or 0) + (metrics.get("failed") or 0)
        self.rows.append({"run": path.name, "requests": sent, "failed": metrics.get("failed"), **trial})

    def _conclude(self, answer: Answer) -> int:
        sentence = say(answer, self.conditions, self.rows, self.bounds)
        write_json(
            self.folder.path / "search.json",
            {
                "slo": [c.text for c in self.conditions],
                "outcome": answer.outcome,
                "highest_rate_met": answer.met,
                "lowest_rate_not_met": answer.unmet,
                "confirmed": answer.confirmed,
                "reason": answer.reason or None,
                "answer": sentence,
                "tolerance": self.bounds.tolerance,
                "runs": self.rows,
            },
        )
        made = table(self.conditions, self.rows)
        width = self.console.measure(made, options=self.console.options.update(max_width=10_000)).maximum
        self.console.print(made, width=width, crop=False)  # a column that is cut would hide what was asked for
        self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)
        if answer.outcome == INVALID:
            return EXIT_INVALID
        return EXIT_OK if answer.outcome in (FOUND, ALWAYS, NEVER) else EXIT_INCONCLUSIVE


def _visits(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends [s] of the requests, a conversation as one: from its first turn to the end of its last."""
    if not path.is_file():
        return np.empty(0), np.empty(0)
    rows = pd.read_parquet(path, columns=["index", "session", "t0", "end"])
    key = rows["session"].where(rows["session"].notna(), -1 - rows["index"])
    visits = rows.groupby(key).agg({"t0": "min", "end": "max"})
    return visits["t0"].to_numpy(), visits["end"].to_numpy()


def _told(number: int, ask: Ask, trial: Trial) -> str:
    what = {True: "met", False: "not met", None: "INVALID"}[trial.met]
    again = " (again, to confirm)" if ask.confirms else ""
    return f"run {number}: {ask.rate:g} requests/s{again}: {what}" + (
        f": {'; '.join(trial.reasons)}" if trial.reasons else ""
    )


def say(answer: Answer, conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]], bounds: Bounds) -> str:
    """The answer in words, with the number of requests behind it."""
    slo = " and ".join(c.text for c in conditions)
    if answer.met is None:
        text = f"No rate met {slo}"
        text += "." if answer.unmet is None else f"; the lowest that was tried is {answer.unmet:g} requests/s."
        if answer.outcome == NEVER:
            text += " Lower --min-rate to look further down."
    else:
        behind = [r for r in rows if r["rate"] == answer.met and r["met"]]
        requests = sum(r["requests"] for r in behind)
        runs = "1 run" if len(behind) == 1 else f"{len(behind)} runs"
        text = f"Highest rate that met {slo}: {answer.met:g} requests/s ({requests} requests in {runs}"
        needed = max((c.samples_needed for c in conditions), default=1)
        text += f", fewer than the {needed} that a percentile needs)" if requests < needed else ")"
        if answer.unmet is None:
            text += "; every rate that was tried met it" + (
                f", up to --max-rate {bounds.high:g}." if answer.outcome == ALWAYS else "."
            )
        else:
            text += f"; the lowest that did not: {answer.unmet:g} requests/s."
        if not answer.confirmed:
            text += " It was not confirmed by a second run."
    return text + (f" The search ended early: {answer.reason}." if answer.reason else "")


def table(conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]]) -> Table:
    """All runs, in their order."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    heads = ("run", "req/s", "requests", *(c.title for c in conditions), "failed", "in flight", "")
    for name in heads:
        made.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        backlog = row["backlog"]
        values = [_value(c, row["values"].get(c.text)) for c in conditions]
        made.add_row(
            row["run"][:2],
            f"{row['rate']:g}",
            str(row["requests"]),
            *values,
            "-" if row["failed"] is None else str(row["failed"]),
            f"{backlog['early']:.1f} to {backlog['late']:.1f}" if backlog else "-",
            {True: "met", False: "not met", None: "invalid"}[row["met"]],
        )
    return made


def _value(condition: Condition, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if condition.metric == "goodput" else f"{value:.1f}"
