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
from kvbench.common.files import write_json
from kvbench.common.records import read_record
from kvbench.common.text import clock, plural, significant
from kvbench.load.validity import client_reasons
from kvbench.metrics.latency import goodput_share
from kvbench.metrics.model import LoadOutcome
from kvbench.sweep.load_folder import INVALID, METRICS, LoadFolder
from kvbench.sweep.max_rate.plan import RunLength
from kvbench.sweep.max_rate.search import (
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
    filling_s,
    interval_so_far,
    misses,
    next_step,
    queue_growth,
)
from kvbench.sweep.max_rate.threshold import CONFIDENCE, Interval

_RUN_OVER_FILLING = 4.0  # a run is so many times as long as the queue takes to fill

Measure = Callable[[float, int, int], Mapping[str, Any]]
"""rate [1/s], number of requests, number of the run (its seed) -> what metrics.json holds, of one run."""


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
            step = Answer(OUT_OF_TIME, interval_so_far(self.trials, self.bounds), reason)
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
        name = f"run {number}: {step.rate:g} {self.length.unit}/s"
        seconds = clock(self.length.seconds_of(step.rate, self.conditions))
        self._print(f"{name}, {count} {self.length.unit}, about {seconds}")
        try:
            kept = dict(self.measure(step.rate, count, number))
        except MeasurementError as error:  # as an invalid run, which is measured again
            kept = {"valid": False, "invalid_reasons": [str(error)], "metrics": {}}
            path.mkdir(parents=True, exist_ok=True)
        kept["trial"] = {"rate": step.rate} | self._judged(kept, path)
        self._note(path, kept)
        trial = self.trials[-1]
        verdict = {True: "met", False: "missed", None: f"NOT JUDGED ({trial.cause})"}[trial.met]
        self._print(f"{name}: {verdict}" + (f": {'; '.join(trial.reasons)}" if trial.reasons else ""))
        if trial.met is not None and (found := interval_so_far(self.trials, self.bounds)):
            self._print(f"  so far: {_interval_words(found, self.length.unit)}")
        write_json(path / METRICS, kept)  # after it is told: a full disk must not take it away

    def _judged(self, kept: Mapping[str, Any], run: Path) -> dict[str, Any]:
        """The ``trial`` of metrics.json: met (None: cannot be judged, with the cause), reasons, values, backlog.

        ``missed``: why in a few words each, where the run missed.
        ``seconds``: how long a run must be to be judged. ``arrivals``: requests, or conversations.
        """
        metrics = kept["metrics"] | {"goodput_share": goodput_share(kept["metrics"])}
        starts, ends = request_times(run / "requests.parquet")
        growth, seconds = queue_growth(starts, ends), None
        met, cause, reasons, missed = None, None, list(kept["invalid_reasons"]), []
        if kept["valid"]:
            found = misses(self.conditions, metrics, growth, self.bounds.overload)
            met, reasons, missed = not found, [miss.text for miss in found], [miss.cause for miss in found]
            if met and growth is None:  # all was over before a queue could have grown
                met, cause, seconds = None, TOO_SHORT, _RUN_OVER_FILLING * filling_s(starts, ends)
                reasons = [f"too short to tell whether the server keeps up: {seconds:.0f} s of arrivals are needed"]
        elif not reasons and kept.get("wrong_answers"):
            met, reasons, missed = False, [kept["wrong_answers"]], ["wrong answers"]
        else:
            cause = CLIENT_LIMIT if client_alone(kept, run) else INVALID
        return {
            "met": met,
            "cause": cause,
            "reasons": reasons,
            "missed": missed,
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
        self.outcome, found = answer.outcome, answer.interval
        sentence = answer_sentence(answer, self.conditions, self.rows, self.bounds, self.length)
        print_table(self.console, _table(self.conditions, self.rows))
        self._print(sentence)
        write_json(
            self.folder.path / "search.json",
            {
                "format": 2,
                "slo": [c.text for c in self.conditions],
                "outcome": answer.outcome,
                "max_rate": found.rate if found else None,
                "interval": {"low": found.low, "high": found.high, "confidence": CONFIDENCE} if found else None,
                "reason": answer.reason or None,
                "answer": sentence,
                "tolerance": self.bounds.tolerance,
                "runs": self.rows,
            },
        )
        if answer.outcome == INVALID:
            return EXIT_INVALID
        return EXIT_OK if answer.outcome in (FOUND, ALWAYS, NEVER) else EXIT_INCONCLUSIVE


def client_alone(kept: Mapping[str, Any], run: Path) -> bool:
    """Whether nothing but the load client's own figures made a run invalid: it was too much for the client."""
    if not (run / "load.json").is_file():
        return False
    outcome = read_record(LoadOutcome, run / "load.json", "measure its load again")
    if not outcome.client.model_fields_set:
        return False
    of_calibration = set((kept.get("calibration") or {}).get("reasons") or ()) - set(kept.get("disturbances") or ())
    own = of_calibration.union(client_reasons(outcome))
    return own.issuperset(kept["invalid_reasons"])


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
    """The answer in words, with the runs behind it and what they could not show."""
    slo, found = " and ".join(c.text for c in conditions), answer.interval
    if found is None:
        text = f"Not known whether any rate meets {slo}: no run could be judged."
    else:
        text = f"Highest rate that meets {slo}: {_interval_words(found, length.unit)}{_open_end(answer, bounds)}; "
        text += f"{_evidence(conditions, rows)}.{_undetected_overload(rows, bounds, length)}"
    if not answer.reason:
        return text
    return (
        f"{text} The search ended before the interval was within {bounds.tolerance:.0%}: {answer.reason.rstrip('.')}."
    )


def _interval_words(found: Interval, unit: str) -> str:
    low, rate, high = (None if each is None else significant(each) for each in (found.low, found.rate, found.high))
    if low is not None and high is not None:
        return f"{rate} {unit}/s (95 % interval {low} to {high})"
    if low is None and high is None:
        return "not known yet"
    return f"at least {low} {unit}/s" if high is None else f"less than {high} {unit}/s"


def _open_end(answer: Answer, bounds: Bounds) -> str:
    """The bound that ended the search, beyond which nothing was tried."""
    ends = {ALWAYS: f" (--max-rate is {bounds.high:g})", NEVER: f" (--min-rate is {bounds.low:g})"}
    return ends.get(answer.outcome, "")


def _evidence(conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]]) -> str:
    """How many runs and requests were judged. Each run was judged by the percentile of its own requests."""
    judged = [r for r in rows if r["met"] is not None]
    text = f"{plural(len(judged), 'run')} with {sum(r['requests'] for r in judged):,} requests"
    if left_out := len(rows) - len(judged):
        text += f", and {left_out} that could not be judged"
    needed = max((c.samples_needed for c in conditions), default=1)
    fewest = min(r["requests"] - (r["failed"] or 0) for r in judged)
    few = f" ({fewest} completed in the smallest, fewer than the {needed} that a percentile needs)"
    return text + (few if fewest < needed else "")


def _undetected_overload(rows: Sequence[Mapping[str, Any]], bounds: Bounds, length: RunLength) -> str:
    """A sentence when the highest rate that met the SLO ran too shortly to show a small overload, else empty."""
    highest = max((r for r in rows if r["met"]), key=lambda r: r["rate"], default=None)
    share = length.detectable_overload(highest["rate"], highest["arrivals"]) if highest else 0.0
    if share <= bounds.overload * 1.01:
        return ""
    return (
        f" Runs this short show an overload only from {share:.0%} on: what the server can serve may be that much less. "
        "Give more --run-seconds, or a longer trace."
    )


def _table(conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]]) -> Table:
    """All runs, in their order."""
    heads = ("run", "rate/s", "requests", *(c.title for c in conditions), "failed", "in flight", "result")
    return make_table(heads, [_table_row(conditions, row) for row in rows])


def _table_row(conditions: Sequence[Condition], row: Mapping[str, Any]) -> tuple[str, ...]:
    growth = row["backlog"]
    return (
        row["run"].partition("-")[0],
        f"{row['rate']:g}",
        str(row["requests"]),
        *(c.format(row["values"].get(c.text)) for c in conditions),
        "-" if row["failed"] is None else str(row["failed"]),
        f"{growth['early']:.1f} to {growth['late']:.1f}" if growth else "-",
        {True: "met", False: f"missed: {', '.join(row.get('missed') or ['not stored'])}", None: row["cause"]}[
            row["met"]
        ],
    )
