"""Runs the rate search of ``kvbench load --find-max-rate``: one measured load after the other, each kept."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_OK, MeasurementError
from kvbench.common.files import read_json, write_json
from kvbench.common.text import clock, plural
from kvbench.load.validity import invalid_reasons
from kvbench.loadtest.folder import INVALID, METRICS, LoadFolder
from kvbench.loadtest.max_rate.plan import RunLength
from kvbench.loadtest.max_rate.search import (
    ALWAYS,
    CLIENT_LIMIT,
    FOUND,
    NEVER,
    OUT_OF_TIME,
    TOO_SHORT,
    Answer,
    Bounds,
    Condition,
    NextRun,
    Trial,
    bracket,
    filling_s,
    next_step,
    queue_growth,
    unmet,
)
from kvbench.metrics.latency import goodput_share

_RUN_OVER_FILLING = 4.0  # a run is so many times as long as the queue takes to fill

Measure = Callable[[float, int, int, Path], Mapping[str, Any]]
"""rate [1/s], number of requests, number of the run (its seed), folder -> what metrics.json holds, of one run."""


class OutOfTimeError(Exception):
    """The search has had its time while a run was going on."""


@dataclass
class RateSearch:
    """One search. ``measure`` runs one load and calls ``check_time`` meanwhile; ``limit_s``: seconds for all runs."""

    conditions: tuple[Condition, ...]
    bounds: Bounds
    length: RunLength
    folder: LoadFolder
    measure: Measure
    console: Console
    limit_s: float = math.inf
    trials: list[Trial] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    outcome: str | None = field(default=None, init=False)
    _ends_at: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        self._print = partial(print_plain, self.console)

    @property
    def can_continue(self) -> bool:
        """Whether the same command can measure more of it: its time was over, or its runs were invalid."""
        return self.outcome in (INVALID, OUT_OF_TIME)

    def run(self) -> int:
        """Searches to the answer, which is printed and stored. Returns the exit code."""
        self._read_finished()
        self._ends_at = time.monotonic() + self.limit_s
        allowed = f"{self.limit_s / 60:g} minutes were allowed (--max-minutes)"
        while isinstance(step := next_step(self.trials, self.bounds), NextRun):
            rate, needed = f"{step.rate:g} {self.length.unit}/s", self.length.seconds_of(step.rate, self.conditions)
            reason = f"{allowed}; the next run, at {rate}, takes {clock(needed)}"
            if time.monotonic() + needed <= self._ends_at:
                try:
                    self._run_one(step)
                    continue
                except OutOfTimeError:
                    reason = f"{allowed}, and the run at {rate} was cut"
            step = Answer(OUT_OF_TIME, *bracket(self.trials), False, reason)
            break
        return self._conclude(step)

    def check_time(self) -> None:
        """Raises OutOfTimeError when the search must end within its run."""
        if time.monotonic() > self._ends_at:
            raise OutOfTimeError

    def _read_finished(self) -> None:
        """Takes over the runs of a stopped search. Invalid runs at its end are removed and run again."""
        finished = list(self.folder.finished_runs())
        while finished and finished[-1][1]["trial"]["cause"] == INVALID:
            shutil.rmtree(finished.pop()[0])
        for path, kept in finished:
            self._note(path, kept)
        if self.trials:
            self._print(f"{plural(len(self.trials), 'finished run')}: not run again")

    def _run_one(self, step: NextRun) -> None:
        number, count = len(self.trials) + 1, self.length.requests(step.rate, self.conditions)
        path = self.folder.run(number, f"r{step.rate:g}")
        name = f"run {number}: {step.rate:g} {self.length.unit}/s{' (again, to confirm)' if step.confirms else ''}"
        seconds = clock(self.length.seconds_of(step.rate, self.conditions))
        self._print(f"{name}, {count} {self.length.unit}, about {seconds}")
        try:
            kept = dict(self.measure(step.rate, count, number, path))
        except MeasurementError as error:  # as an invalid run: once more, then the search ends with the reason
            kept = {"valid": False, "invalid_reasons": [str(error)], "metrics": {}}
        kept["trial"] = {"rate": step.rate, "confirms": step.confirms} | self._judged(kept, path)
        write_json(path / METRICS, kept)
        self._note(path, kept)
        trial = self.trials[-1]
        verdict = {True: "met", False: "not met", None: f"NOT JUDGED ({trial.cause})"}[trial.met]
        self._print(f"{name}: {verdict}" + (f": {'; '.join(trial.reasons)}" if trial.reasons else ""))

    def _judged(self, kept: Mapping[str, Any], run: Path) -> dict[str, Any]:
        """The ``trial`` of metrics.json: met (None: cannot be judged, with the cause), reasons, values, backlog.

        ``seconds``: how long a run must be to be judged. ``arrivals``: requests, or conversations.
        """
        metrics = kept["metrics"] | {"goodput_share": goodput_share(kept["metrics"])}
        starts, ends = request_times(run / "requests.parquet")
        growth, seconds = queue_growth(starts, ends), None
        met, cause, reasons = None, None, list(kept["invalid_reasons"])
        if kept["valid"]:
            reasons = unmet(self.conditions, metrics, growth, self.bounds.tolerance)
            met = not reasons
            if met and growth is None:  # all was over before a queue could have grown
                met, cause, seconds = None, TOO_SHORT, _RUN_OVER_FILLING * filling_s(starts, ends)
                reasons = [f"too short to tell whether the server keeps up: {seconds:.0f} s of arrivals are needed"]
        else:
            cause = CLIENT_LIMIT if client_alone(kept, run) else INVALID
        return {
            "met": met,
            "cause": cause,
            "reasons": reasons,
            "values": {c.text: c.value(metrics) for c in self.conditions},
            "backlog": None if growth is None else {"early": growth.early, "late": growth.late},
            "seconds": seconds,
            "arrivals": len(starts),
        }

    def _note(self, path: Path, kept: Mapping[str, Any]) -> None:
        trial, metrics = kept["trial"], kept["metrics"]
        self.trials.append(Trial(trial["rate"], trial["met"], tuple(trial["reasons"]), trial["cause"]))
        if trial["seconds"] is not None:  # from here on
            self.length = replace(self.length, seconds=max(self.length.seconds, trial["seconds"]))
        sent = (metrics.get("completed") or 0) + (metrics.get("failed") or 0)
        self.rows.append(
            {"run": path.name, "requests": sent, "arrivals": sent, "failed": metrics.get("failed"), **trial}
        )

    def _conclude(self, answer: Answer) -> int:
        self.outcome = answer.outcome
        sentence = answer_sentence(answer, self.conditions, self.rows, self.bounds, self.length)
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
        print_table(self.console, _table(self.conditions, self.rows))
        self._print(sentence)
        if answer.outcome == INVALID:
            return EXIT_INVALID
        return EXIT_OK if answer.outcome in (FOUND, ALWAYS, NEVER) else EXIT_INCONCLUSIVE


def client_alone(kept: Mapping[str, Any], run: Path) -> bool:
    """Whether nothing but the load client's own figures made a run invalid: it was too much for the client."""
    result = read_json(run / "load.json") if (run / "load.json").is_file() else {}
    client = result.get("client")
    if not client:
        return False
    own = {*invalid_reasons(client, 0), *((kept.get("calibration") or {}).get("reasons") or ())}
    names = tuple(f"{process['name']}: " for process in client.get("processes") or ())
    return all(reason in own or reason.startswith(names) for reason in kept["invalid_reasons"])


def request_times(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends [s] of the requests, a conversation as one: from its first turn to the end of its last."""
    if not path.is_file():
        return np.empty(0), np.empty(0)
    rows = pd.read_parquet(path, columns=["index", "session", "t0", "end"])
    key = rows["session"].where(rows["session"].notna(), -1 - rows["index"])
    spans = rows.groupby(key).agg({"t0": "min", "end": "max"})
    return spans["t0"].to_numpy(), spans["end"].to_numpy()


def answer_sentence(
    answer: Answer,
    conditions: Sequence[Condition],
    rows: Sequence[Mapping[str, Any]],
    bounds: Bounds,
    length: RunLength,
) -> str:
    """The answer in words, with the number of requests behind it and what its runs could not show."""
    slo, met, missed = " and ".join(c.text for c in conditions), answer.met, answer.unmet
    if met is not None:
        text = f"Highest rate that met {slo}: {met:g} {length.unit}/s ({_evidence(met, conditions, rows)}); "
        if missed is not None:
            text += f"the lowest that did not: {missed:g} {length.unit}/s."
        elif answer.outcome == ALWAYS:
            text += f"every rate that was tried met it, up to --max-rate {bounds.high:g}."
        else:
            text += "every rate that was judged met it."
        text += _undetected_overload(met, rows, bounds, length)
    elif missed is None:
        text = f"Not known whether any rate meets {slo}: no run could be judged."
    elif answer.outcome == NEVER:
        text = f"No rate met {slo}; the lowest that was tried is {missed:g} {length.unit}/s: lower --min-rate."
    else:
        text = f"Not known which rate meets {slo}; {missed:g} {length.unit}/s, the lowest that was judged, did not."
    if not answer.confirmed and (met, missed) != (None, None):
        text += " It was not confirmed by further runs."
    return text + (f" The search ended early: {answer.reason.rstrip('.')}." if answer.reason else "")


def _evidence(rate: float, conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]]) -> str:
    """How many requests the runs at ``rate`` had. Each run was judged by the percentile of its own requests."""
    met = [r for r in rows if r["rate"] == rate and r["met"]]
    seconds = min(r["arrivals"] for r in met) / rate
    text = f"{sum(r['requests'] for r in met)} requests in {plural(len(met), 'run')} that sent for {seconds:.0f} s"
    needed = max((c.samples_needed for c in conditions), default=1)
    fewest = min(r["requests"] - (r["failed"] or 0) for r in met)
    few = f", {fewest} completed in the smallest, fewer than the {needed} that a percentile needs"
    return text + (few if fewest < needed else "")


def _undetected_overload(rate: float, rows: Sequence[Mapping[str, Any]], bounds: Bounds, length: RunLength) -> str:
    """A sentence when the runs were too short to show a small overload, else empty."""
    share = max(length.detectable_overload(rate, r["arrivals"]) for r in rows if r["rate"] == rate and r["met"])
    if share <= bounds.tolerance * 1.01:
        return ""
    return (
        f" Runs this short show an overload only from {share:.0%} on: what the server can serve may be that much less. "
        "Give more --run-seconds, or a longer trace."
    )


def _table(conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]]) -> Table:
    """All runs, in their order."""
    heads = ("run", "rate/s", "requests", *(c.title for c in conditions), "failed", "in flight", "")
    return make_table(heads, [_table_row(conditions, row) for row in rows])


def _table_row(conditions: Sequence[Condition], row: Mapping[str, Any]) -> tuple[str, ...]:
    growth = row["backlog"]
    return (
        row["run"][:2],
        f"{row['rate']:g}",
        str(row["requests"]),
        *(c.format(row["values"].get(c.text)) for c in conditions),
        "-" if row["failed"] is None else str(row["failed"]),
        f"{growth['early']:.1f} to {growth['late']:.1f}" if growth else "-",
        {True: "met", False: "not met", None: row["cause"]}[row["met"]],
    )
