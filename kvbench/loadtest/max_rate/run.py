"""Runs the rate search of ``kvbench load --find-max-rate``: one measured load after the other, each kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_OK, MeasurementError
from kvbench.common.files import read_json, write_json
from kvbench.load.validity import invalid_reasons
from kvbench.loadtest.folder import INVALID, METRICS, LoadFolder
from kvbench.loadtest.max_rate.plan import Sizes
from kvbench.loadtest.max_rate.queue_growth import backlog_of, filling_s
from kvbench.loadtest.max_rate.search import (
    ALWAYS,
    CLIENT_LIMIT,
    FOUND,
    NEVER,
    TOO_SHORT,
    Answer,
    Ask,
    Bounds,
    Condition,
    Trial,
    advance,
    bracket,
    unmet,
)
from kvbench.loadtest.max_rate.text import ahead, print_table, say, table, told
from kvbench.metrics.latency import goodput_share

OUT_OF_TIME = "out of time"
_RUN_OVER_FILLING = 4.0

Measure = Callable[[float, int, int, Path], Mapping[str, Any]]
"""rate [1/s], number of requests, number of the run (its seed), folder -> what metrics.json holds, of one run."""


class OutOfTimeError(Exception):
    """The search has had its time while a run was going on."""


@dataclass
class RateSearch:
    """``measure`` runs one load, and calls ``check_time`` meanwhile; ``limit_s``: seconds that all runs may take."""

    conditions: tuple[Condition, ...]
    bounds: Bounds
    sizes: Sizes
    folder: LoadFolder
    measure: Measure
    console: Console
    limit_s: float = math.inf
    trials: list[Trial] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    outcome: str | None = field(default=None, init=False)
    _ends_at: float = field(default=math.inf, init=False)

    @property
    def goes_on(self) -> bool:
        """Whether more of it can be measured by the same command: its time was over, or its runs were invalid."""
        return self.outcome in (INVALID, OUT_OF_TIME)

    def run(self) -> int:
        """To the answer, which is printed and stored; the exit code."""
        self._take_finished()
        self._ends_at = time.monotonic() + self.limit_s
        while isinstance(step := advance(self.trials, self.bounds), Ask):
            if (reason := self._no_time_for(step.rate)) is None:
                try:
                    self._one(step)
                except OutOfTimeError:
                    reason = f"{self._allowed}, and the run at {step.rate:g} {self.sizes.unit}/s was cut"
            if reason is not None:
                return self._conclude(Answer(OUT_OF_TIME, *bracket(self.trials), False, reason))
        return self._conclude(step)

    def check_time(self) -> None:
        """Raises OutOfTimeError when the search must end within its run."""
        if time.monotonic() > self._ends_at:
            raise OutOfTimeError

    @property
    def _allowed(self) -> str:
        return f"{self.limit_s / 60:g} minutes were allowed (--max-minutes)"

    def _no_time_for(self, rate: float) -> str | None:
        """Why a run at ``rate`` cannot end in time; None when it can."""
        left, needed = self._ends_at - time.monotonic(), self.sizes.seconds_of(rate, self.conditions)
        if needed <= left:
            return None
        return f"{self._allowed}; the next run, at {rate:g} {self.sizes.unit}/s, sends for {needed / 60:.3g} minutes"

    def _take_finished(self) -> None:
        """What a stopped search has measured. Invalid runs at its end are run again: they may be what ended it."""
        finished = list(self.folder.finished_runs())
        while finished and finished[-1][1]["trial"]["cause"] == INVALID:
            self.folder.drop(finished.pop()[0])
        for path, kept in finished:
            self._note(path, kept)
        if self.trials:
            done = (
                "1 run is finished and is" if len(self.trials) == 1 else f"{len(self.trials)} runs are finished and are"
            )
            self._print(f"{done} not run again")

    def _one(self, ask: Ask) -> None:
        number = len(self.trials) + 1
        path = self.folder.run(number, f"r{ask.rate:g}")
        count = self.sizes.requests(ask.rate, self.conditions)
        self._print(ahead(number, ask, self.sizes, self.conditions))
        try:
            kept = dict(self.measure(ask.rate, count, number, path))
        except MeasurementError as error:  # as an invalid run: once more, then the search ends with the reason
            kept = {"valid": False, "invalid_reasons": [str(error)], "metrics": {}}
        kept["trial"] = {"rate": ask.rate, "confirms": ask.confirms} | self._judged(kept, path)
        write_json(path / METRICS, kept)
        self._note(path, kept)
        self._print(told(number, ask, self.trials[-1], self.sizes))

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _judged(self, kept: Mapping[str, Any], run: Path) -> dict[str, Any]:
        """met (None: not told, with the cause), why not, the values, the backlog.

        ``seconds``: how long a run must be to tell. ``arrivals``: requests, or conversations.
        """
        metrics = kept["metrics"] | {"goodput_share": goodput_share(kept["metrics"])}
        starts, ends = _visits(run / "requests.parquet")
        backlog, seconds = backlog_of(starts, ends), None
        met, cause, reasons = None, None, list(kept["invalid_reasons"])
        if kept["valid"]:
            reasons = unmet(self.conditions, metrics, backlog, self.bounds.tolerance)
            met = not reasons
            if met and backlog is None:  # all was over before a backlog could have shown
                met, cause, seconds = None, TOO_SHORT, _RUN_OVER_FILLING * filling_s(starts, ends)
                reasons = [f"too short to tell whether the server keeps up: {seconds:.0f} s of arrivals are needed"]
        else:
            cause = CLIENT_LIMIT if client_alone(kept, run) else INVALID
        return {
            "met": met,
            "cause": cause,
            "reasons": reasons,
            "values": {c.text: c.value(metrics) for c in self.conditions},
            "backlog": None if backlog is None else {"early": backlog.early, "late": backlog.late},
            "seconds": seconds,
            "arrivals": len(starts),
        }

    def _note(self, path: Path, kept: Mapping[str, Any]) -> None:
        trial, metrics = kept["trial"], kept["metrics"]
        self.trials.append(Trial(trial["rate"], trial["met"], tuple(trial["reasons"]), trial["cause"]))
        if trial["seconds"] is not None:  # from here on
            self.sizes = replace(self.sizes, seconds=max(self.sizes.seconds, trial["seconds"]))
        sent = (metrics.get("completed") or 0) + (metrics.get("failed") or 0)
        self.rows.append(
            {"run": path.name, "requests": sent, "arrivals": sent, "failed": metrics.get("failed"), **trial}
        )

    def _conclude(self, answer: Answer) -> int:
        self.outcome = answer.outcome
        sentence = say(answer, self.conditions, self.rows, self.bounds, self.sizes)
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
        print_table(self.console, table(self.conditions, self.rows))
        self._print(sentence)
        if answer.outcome == INVALID:
            return EXIT_INVALID
        return EXIT_OK if answer.outcome in (FOUND, ALWAYS, NEVER) else EXIT_INCONCLUSIVE


def client_alone(kept: Mapping[str, Any], run: Path) -> bool:
    """Whether nothing but the load client's own figures made a run invalid: what it could not bear, not the server."""
    told = read_json(run / "load.json") if (run / "load.json").is_file() else {}
    client = told.get("client")
    if not client:
        return False
    own = {*invalid_reasons(client, 0), *((kept.get("calibration") or {}).get("reasons") or ())}
    names = tuple(f"{process['name']}: " for process in client.get("processes") or ())
    return all(reason in own or reason.startswith(names) for reason in kept["invalid_reasons"])


def _visits(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends [s] of the requests, a conversation as one: from its first turn to the end of its last."""
    if not path.is_file():
        return np.empty(0), np.empty(0)
    rows = pd.read_parquet(path, columns=["index", "session", "t0", "end"])
    key = rows["session"].where(rows["session"].notna(), -1 - rows["index"])
    visits = rows.groupby(key).agg({"t0": "min", "end": "max"})
    return visits["t0"].to_numpy(), visits["end"].to_numpy()
