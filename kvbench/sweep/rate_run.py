"""Plans and runs the rate search of ``kvbench load --find-max-rate``: one measured load after the other, each kept."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from kvbench.calibration.calibrate import ClientCalibration
from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_OK, MeasurementError, UsageError
from kvbench.common.files import write_json
from kvbench.common.records import read_record, write_record
from kvbench.common.text import clock, plural, significant
from kvbench.load.validity import client_reasons
from kvbench.metrics.latency import QUANTILES
from kvbench.metrics.model import LoadMetrics, LoadOutcome
from kvbench.sweep.load_folder import METRICS, LoadFolder
from kvbench.sweep.load_options import choose_load
from kvbench.sweep.rate_search import (
    ALWAYS,
    CLIENT_LIMIT,
    CONFIDENCE,
    FOUND,
    INVALID,
    NEVER,
    OUT_OF_TIME,
    TOO_SHORT,
    Bounds,
    Condition,
    RateInterval,
    SearchAnswer,
    Trial,
    arrivals_to_detect,
    detectable_share,
    filling_s,
    interval_so_far,
    misses,
    next_step,
    parse_conditions,
    queue_growth,
)
from kvbench.sweep.requests import LoadOptions, SearchOptions
from kvbench.sweep.show_load import StoredLoad
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload
from kvbench.workload.load_section import LoadConfig, Slo

_FIRST_RATE = 1.0  # of a closed-loop workload, which has none
_BELOW, _ABOVE = 64.0, 1024.0  # how far from the first rate the search goes by itself
_INCLUDE_THE_WAIT = ("ttft_ms", "ttfo_ms", "e2el_ms")
_REACHED = {**QUANTILES, "max": 1.0}  # share of the longest wait, as waits grow evenly; the mean is half of it
_RUN_OVER_FILLING = 4.0  # a run is so many times as long as the queue takes to fill


@dataclass(frozen=True)
class RunLength:
    """The length of a run: at least ``least`` requests, or conversations, and ``seconds`` of arrivals.

    ``enough``: also as many requests as the percentiles of the SLO need, and as a rate ``overload`` (a share) above
    the capacity needs to show (by ``patience_s``, or by the number of arrivals); False with --num-prompts.
    ``fixed``: exactly ``least``, the requests of a trace.
    """

    least: int
    seconds: float
    enough: bool = True
    overload: float = 1.0
    patience_s: float = math.inf
    fixed: bool = False
    unit: str = "requests"

    def requests(self, rate: float, conditions: Sequence[Condition]) -> int:
        """The requests of a run at ``rate`` [1/s]."""
        if self.fixed:
            return self.least
        counts = [self.least, math.ceil(rate * self.seconds)]
        if self.enough:
            counts += [c.samples_needed for c in conditions]
            by_number = arrivals_to_detect(self.overload)
            counts.append(math.ceil(min(rate * self.patience_s / self.overload, by_number)))
        return max(counts)

    def seconds_of(self, rate: float, conditions: Sequence[Condition]) -> float:
        """The seconds for which a run at ``rate`` [1/s] sends."""
        return self.requests(rate, conditions) / rate

    def detectable_overload(self, rate: float, requests: int) -> float:
        """The least overload, as a share of the capacity, that a run of so many requests at ``rate`` [1/s] shows."""
        return min(rate * self.patience_s / max(requests, 1), detectable_share(requests))


def patience_s(conditions: Sequence[Condition], slo: Slo | None) -> float:
    """The seconds T until an overload of 100 % breaks the SLO; one of a share x needs T / x.

    After T seconds the last requests wait T, so the quantile q of a latency that includes the wait is q * T: it
    reaches its limit at T = limit / q. Infinite where no latency of the SLO includes the wait.
    """
    seconds = [math.inf]
    for condition in conditions:
        if condition.metric in _INCLUDE_THE_WAIT:
            seconds.append(condition.limit / 1000.0 / _REACHED.get(condition.stat, 0.5))
        elif condition.metric == "goodput" and slo is not None:
            limits = [limit for name in _INCLUDE_THE_WAIT if (limit := getattr(slo, name)) is not None]
            seconds += [limit / 1000.0 / condition.limit for limit in limits]
    return min(seconds)


@dataclass(frozen=True)
class SearchPlan:
    """The options of a search; two searches with equal ones are one search."""

    slo: str
    start: float | None
    min_rate: float | None
    max_rate: float | None
    tolerance: float
    max_runs: int
    run_seconds: float
    num_prompts: int | None
    max_minutes: float

    @property
    def conditions(self) -> tuple[Condition, ...]:
        try:
            return parse_conditions(self.slo)
        except ValueError as error:
            raise UsageError(f"--find-max-rate: {error}") from None

    def bounds(self, start: float | None) -> Bounds:
        """The rates to search; ``start``: the workload's own [1/s]. Raises UsageError for rates that contradict."""
        named = {"--min-rate": self.min_rate, "--request-rate": self.start, "--max-rate": self.max_rate}
        given = [(name, rate) for name, rate in named.items() if rate is not None]
        for (one, below), (other, above) in pairwise(given):
            if below > above:
                raise UsageError(f"{one} {below:g} is above {other} {above:g}: change one of them")
        first = self.start or start or _FIRST_RATE
        first = min(first, self.max_rate or first)  # an option wins over what the file begins with
        first = max(first, self.min_rate or first)
        low, high = self.min_rate or first / _BELOW, self.max_rate or first * _ABOVE
        return Bounds(first, low, high, self.tolerance, self.max_runs)

    def run_length(self, load: LoadConfig, least: int | None) -> RunLength:
        """The length of a run; ``least``: requests of ``load``, or of a trace."""
        return RunLength(
            self.num_prompts or least or 1,
            self.run_seconds,
            enough=self.num_prompts is None,
            overload=self.bounds(None).overload,
            patience_s=patience_s(self.conditions, load.slo),
            fixed=load.arrivals == "trace",
            unit="requests" if load.sessions is None else "conversations",
        )


def plan_search(
    path: str, slo: str, chosen: LoadOptions, how: Mapping[str, Any], request: SearchOptions
) -> tuple[Workload, LoadPoint, SearchPlan]:
    """Plans a search: the workload in open loop, its load point, and the search. Raises UsageError."""
    if chosen.request_rate is not None and math.isinf(chosen.request_rate):
        raise UsageError("--find-max-rate begins at a finite --request-rate: leave inf out")
    names = ("min_rate", "max_rate", "tolerance", "max_runs", "run_seconds", "max_minutes")
    stated = {name: getattr(request, name) for name in names}
    plan = SearchPlan(slo, chosen.request_rate, **stated, num_prompts=chosen.num_prompts)
    conditions = plan.conditions
    workload, point = choose_load(path, replace(chosen, request_rate=None, burstiness=None), **how)
    if workload.load.arrivals in ("ramp", "step"):
        raise UsageError(
            f"--find-max-rate needs one rate a run, and this load's arrivals are a {workload.load.arrivals}: use "
            "poisson, constant, gamma or a trace (-o load.arrivals=poisson)"
        )
    if any(c.metric == "goodput" for c in conditions) and workload.load.slo is None:
        raise UsageError("a goodput condition needs an SLO: give --goodput 'ttft:200 tpot:50', or load.slo in the file")
    if workload.load.arrivals != "trace":  # which is played faster or slower, gaps and all
        rate = plan.bounds(point.request_rate).start
        workload, point = choose_load(path, replace(chosen, request_rate=rate), **how)
    plan.bounds(point.request_rate)
    return workload, point, plan


def at_rate(load: LoadConfig, rate: float, count: int, native_rate: float | None = None) -> LoadConfig:
    """The ``load`` with ``count`` requests (or conversations) at ``rate`` [1/s].

    A trace has its own requests and gaps: it is played ``rate / native_rate`` times as fast as ``load`` plays it.
    """
    if load.arrivals == "trace":
        assert native_rate is not None
        scale = load.prompts.rate_scale * rate / native_rate
        return load.model_copy(update={"prompts": load.prompts.model_copy(update={"rate_scale": scale})})
    update: dict[str, Any] = {"request_rate": (rate,), "duration_s": None}
    if load.sessions is None:
        update["num_requests"] = (count,)
    else:
        update["sessions"] = load.sessions.model_copy(update={"num_sessions": (count,)})
    return load.model_copy(update=update)


def mean_rate(requests: Sequence[Any]) -> float:
    """The arrivals a second of requests with times of their own. Raises UsageError where no time passes."""
    times = [r.arrival_s for r in requests if r.arrival_s is not None]
    span = max(times, default=0.0) - min(times, default=0.0)
    if span <= 0:
        raise UsageError("--find-max-rate needs arrivals at different times, and these are all at once")
    return (len(times) - 1) / span


Measure = Callable[[float, int, int], StoredLoad]
"""Runs one load: rate [1/s], number of requests, number of the run (its seed)."""


class OutOfTimeError(Exception):
    """The end of a search whose time is over during a run."""


@dataclass(frozen=True)
class SearchRun:
    """A run of a search that has ended; ``name``: of its folder. ``requests`` were sent, of which ``failed``."""

    name: str
    trial: Trial
    requests: int
    failed: int


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
    runs: list[SearchRun] = field(default_factory=list)
    outcome: str | None = field(default=None, init=False)
    _ends_at: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        self._print = partial(print_plain, self.console)

    @property
    def trials(self) -> list[Trial]:
        return [run.trial for run in self.runs]

    @property
    def can_continue(self) -> bool:
        """Tests whether the same command can measure more of it: its time was over, or its runs were invalid."""
        return self.outcome in (INVALID, OUT_OF_TIME)

    def run(self) -> int:
        """Searches to the answer, which is printed and stored. Returns the exit code."""
        self._read_finished()
        self._ends_at = time.monotonic() + self.limit_s
        allowed = f"{self.limit_s / 60:g} minutes were allowed (--max-minutes)"
        while not isinstance(step := next_step(self.trials, self.bounds), SearchAnswer):
            rate, needed = f"{step:g} {self.length.unit}/s", self.length.seconds_of(step, self.conditions)
            reason = f"{allowed}; the next run, at {rate}, takes {clock(needed)}"
            if time.monotonic() + needed <= self._ends_at:
                try:
                    self._run_one(step)
                    continue
                except OutOfTimeError:
                    reason = f"{allowed}, and the run at {rate} was cut"
            step = SearchAnswer(OUT_OF_TIME, interval_so_far(self.trials, self.bounds), reason)
            break
        return self._conclude(step)

    def check_time(self) -> None:
        """Raises OutOfTimeError when the search must end within its run."""
        if time.monotonic() > self._ends_at:
            raise OutOfTimeError

    def _read_finished(self) -> None:
        """Takes over the runs of a stopped search. Invalid runs at its end are removed and run again."""
        finished = list(self.folder.finished_runs())
        while finished and (trial := finished[-1][1].trial) and trial.cause == INVALID:
            shutil.rmtree(finished.pop()[0])
        for path, kept in finished:
            self._note(path, kept)
        if self.runs:
            self._print(f"{plural(len(self.runs), 'finished run')}: not run again")

    def _run_one(self, rate: float) -> None:
        number, count = len(self.runs) + 1, self.length.requests(rate, self.conditions)
        path = self.folder.run(number, f"r{rate:g}")
        name = f"run {number}: {rate:g} {self.length.unit}/s"
        seconds = clock(self.length.seconds_of(rate, self.conditions))
        self._print(f"{name}, {count} {self.length.unit}, about {seconds}")
        try:
            kept = self.measure(rate, count, number)
        except MeasurementError as error:  # as an invalid run, which is measured again
            kept = StoredLoad(valid=False, invalid_reasons=(str(error),), metrics=LoadMetrics())
            path.mkdir(parents=True, exist_ok=True)
        trial = self._judged(rate, kept, path)
        kept = kept.model_copy(update={"trial": trial})
        self._note(path, kept)
        verdict = {True: "met", False: "missed", None: f"NOT JUDGED ({trial.cause})"}[trial.met]
        self._print(f"{name}: {verdict}" + (f": {'; '.join(trial.reasons)}" if trial.reasons else ""))
        if trial.met is not None and (interval := interval_so_far(self.trials, self.bounds)):
            self._print(f"  so far: {_interval_words(interval, self.length.unit)}")
        write_record(path / METRICS, kept)  # after it is told: a full disk must not take it away

    def _judged(self, rate: float, kept: StoredLoad, run: Path) -> Trial:
        """Judges what the run shows of the rate."""
        starts, ends = request_times(run / "requests.parquet")
        growth = queue_growth(starts, ends)
        trial = Trial(
            rate,
            met=None,
            reasons=kept.invalid_reasons,
            values={c.text: c.value(kept.metrics) for c in self.conditions},
            backlog=None if growth is None else {"early": growth.early, "late": growth.late},
            arrivals=len(starts),
        )
        if not kept.valid:
            if kept.wrong_answers and not kept.invalid_reasons:
                return replace(trial, met=False, reasons=(kept.wrong_answers,), missed=("wrong answers",))
            return replace(trial, cause=CLIENT_LIMIT if client_alone(kept, run) else INVALID)
        missed = misses(self.conditions, kept.metrics, growth, self.bounds.overload)
        if not missed and growth is None:  # all was over before a queue could have grown
            seconds = _RUN_OVER_FILLING * filling_s(starts, ends)
            reason = f"too short to tell whether the server keeps up: {seconds:.0f} s of arrivals are needed"
            return replace(trial, cause=TOO_SHORT, seconds=seconds, reasons=(reason,))
        reasons, causes = tuple(miss.text for miss in missed), tuple(miss.cause for miss in missed)
        return replace(trial, met=not missed, reasons=reasons, missed=causes)

    def _note(self, path: Path, kept: StoredLoad) -> None:
        trial = kept.trial or Trial(0.0, None, cause=INVALID)
        if trial.seconds is not None:  # from here on
            self.length = replace(self.length, seconds=max(self.length.seconds, trial.seconds))
        self.runs.append(SearchRun(path.name, trial, kept.metrics.sent, kept.metrics.failed))

    def _conclude(self, answer: SearchAnswer) -> int:
        self.outcome, interval = answer.outcome, answer.interval
        sentence = answer_sentence(answer, self.conditions, self.runs, self.bounds, self.length)
        heads = ("run", "rate/s", "requests", *(c.title for c in self.conditions), "failed", "in flight", "result")
        print_table(self.console, make_table(heads, [_table_row(self.conditions, run) for run in self.runs]))
        self._print(sentence)
        ends = {"low": interval.low, "high": interval.high, "confidence": CONFIDENCE} if interval else None
        write_json(
            self.folder.path / "search.json",
            {
                "format": 2,
                "slo": [c.text for c in self.conditions],
                "outcome": answer.outcome,
                "max_rate": interval.rate if interval else None,
                "interval": ends,
                "reason": answer.reason or None,
                "answer": sentence,
                "tolerance": self.bounds.tolerance,
                "runs": [
                    {"run": run.name, "requests": run.requests, "failed": run.failed, **asdict(run.trial)}
                    for run in self.runs
                ],
            },
        )
        if answer.outcome == INVALID:
            return EXIT_INVALID
        return EXIT_OK if answer.outcome in (FOUND, ALWAYS, NEVER) else EXIT_INCONCLUSIVE


def client_alone(kept: StoredLoad, run: Path) -> bool:
    """Tests whether nothing but the load client's own figures made a run invalid: it was too much for the client."""
    if not (run / "load.json").is_file():
        return False
    outcome = read_record(LoadOutcome, run / "load.json", "remove the run's folder")
    if not outcome.client.model_fields_set:
        return False
    calibration = ClientCalibration.from_json(kept.calibration) if kept.calibration else None
    reasons = set(calibration.reasons if calibration else ()) - set(kept.disturbances)
    return reasons.union(client_reasons(outcome)).issuperset(kept.invalid_reasons)


def request_times(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The starts and ends [s] of requests; a conversation lasts from its first turn to the end of its last."""
    import pandas as pd

    if not path.is_file():
        return np.empty(0), np.empty(0)
    rows = pd.read_parquet(path, columns=["index", "session", "t0", "end"])
    key = rows["session"].where(rows["session"].notna(), -1 - rows["index"])
    spans = rows.groupby(key).agg({"t0": "min", "end": "max"})
    return spans["t0"].to_numpy(), spans["end"].to_numpy()


def answer_sentence(
    answer: SearchAnswer, conditions: Sequence[Condition], runs: Sequence[SearchRun], bounds: Bounds, length: RunLength
) -> str:
    """The answer in words, with the runs behind it and what they could not show."""
    slo, interval = " and ".join(c.text for c in conditions), answer.interval
    if interval is None:
        text = f"Not known whether any rate meets {slo}: no run could be judged."
    else:
        bound = {ALWAYS: f" (--max-rate is {bounds.high:g})", NEVER: f" (--min-rate is {bounds.low:g})"}
        end = bound.get(answer.outcome, "")  # beyond which nothing was tried
        text = f"Highest rate that meets {slo}: {_interval_words(interval, length.unit)}{end}; "
        text += f"{_evidence(conditions, runs)}.{_undetected_overload(runs, bounds, length)}"
    if not answer.reason:
        return text
    return (
        f"{text} The search ended before the interval was within {bounds.tolerance:.0%}: {answer.reason.rstrip('.')}."
    )


def _interval_words(interval: RateInterval, unit: str) -> str:
    ends = (interval.low, interval.rate, interval.high)
    low, rate, high = (None if end is None else significant(end) for end in ends)
    if low is not None and high is not None:
        return f"{rate} {unit}/s (95 % interval {low} to {high})"
    if low is None and high is None:
        return "not known yet"
    return f"at least {low} {unit}/s" if high is None else f"less than {high} {unit}/s"


def _evidence(conditions: Sequence[Condition], runs: Sequence[SearchRun]) -> str:
    """Counts the runs and requests that were judged. Each run was judged by the percentile of its own requests."""
    judged = [run for run in runs if run.trial.met is not None]
    text = f"{plural(len(judged), 'run')} with {sum(run.requests for run in judged):,} requests"
    if left_out := len(runs) - len(judged):
        text += f", and {left_out} that could not be judged"
    needed = max((c.samples_needed for c in conditions), default=1)
    fewest = min(run.requests - run.failed for run in judged)
    few = f" ({fewest} completed in the smallest, fewer than the {needed} that a percentile needs)"
    return text + (few if fewest < needed else "")


def _undetected_overload(runs: Sequence[SearchRun], bounds: Bounds, length: RunLength) -> str:
    """Warns where the highest rate that met the SLO ran too shortly to show a small overload; else empty."""
    highest = max((run.trial for run in runs if run.trial.met), key=lambda trial: trial.rate, default=None)
    share = length.detectable_overload(highest.rate, highest.arrivals) if highest else 0.0
    if share <= bounds.overload * 1.01:
        return ""
    return (
        f" Runs this short show an overload only from {share:.0%} on: what the server can serve may be that much less. "
        "Give more --run-seconds, or a longer trace."
    )


def _table_row(conditions: Sequence[Condition], run: SearchRun) -> tuple[str, ...]:
    trial, missed = run.trial, f"missed: {', '.join(run.trial.missed or ['not stored'])}"
    result = str(trial.cause) if trial.met is None else "met" if trial.met else missed
    return (
        run.name.partition("-")[0],
        f"{trial.rate:g}",
        str(run.requests),
        *(c.format(trial.values.get(c.text)) for c in conditions),
        str(run.failed),
        f"{trial.backlog['early']:.1f} to {trial.backlog['late']:.1f}" if trial.backlog else "-",
        result,
    )
