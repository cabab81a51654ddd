"""What ``kvbench load --find-max-rate`` says: before and after each run, and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvbench.common.text import clock
from kvbench.loadtest.folder import INVALID
from kvbench.loadtest.max_rate.plan import Sizes
from kvbench.loadtest.max_rate.search import (
    ALWAYS,
    CLIENT_LIMIT,
    NEVER,
    TOO_SHORT,
    Answer,
    Ask,
    Bounds,
    Condition,
    Trial,
)

_UNTOLD = {INVALID: "INVALID", TOO_SHORT: "TOO SHORT TO TELL", CLIENT_LIMIT: "NOT MEASURED, the client was the limit"}


def ahead(number: int, ask: Ask, sizes: Sizes, conditions: Sequence[Condition]) -> str:
    """What the next run is, and how long it sends; and why for longer than was asked for."""
    count, seconds = sizes.requests(ask.rate, conditions), sizes.seconds_of(ask.rate, conditions)
    text = f"run {number}: {ask.rate:g} {sizes.unit}/s{_again(ask)}, {count} {sizes.unit}, about {clock(seconds)}"
    why = sizes.why_longer(ask.rate, conditions)
    return text + (f" ({why})" if why else "")


def told(number: int, ask: Ask, trial: Trial, sizes: Sizes) -> str:
    """What became of a run."""
    what = _UNTOLD[trial.cause or INVALID] if trial.met is None else "met" if trial.met else "not met"
    reasons = f": {'; '.join(trial.reasons)}" if trial.reasons else ""
    return f"run {number}: {ask.rate:g} {sizes.unit}/s{_again(ask)}: {what}{reasons}"


def _again(ask: Ask) -> str:
    return " (again, to confirm)" if ask.confirms else ""


def say(
    answer: Answer, conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]], bounds: Bounds, sizes: Sizes
) -> str:
    """The answer in words, with the number of requests behind it and what its runs could not show."""
    slo = " and ".join(c.text for c in conditions)
    if answer.met is None and answer.unmet is None:
        text = f"Not known whether any rate meets {slo}: no run told."
    elif answer.met is None and answer.outcome == NEVER:
        text = (
            f"No rate met {slo}; the lowest that was tried is {answer.unmet:g} {sizes.unit}/s. "
            "Lower --min-rate to look further down."
        )
    elif answer.met is None:
        text = (
            f"Not known which rate meets {slo}; {answer.unmet:g} {sizes.unit}/s, the lowest that was judged, did not."
        )
    else:
        text = f"Highest rate that met {slo}: {answer.met:g} {sizes.unit}/s ({_behind(answer.met, conditions, rows)})"
        if answer.unmet is not None:
            text += f"; the lowest that did not: {answer.unmet:g} {sizes.unit}/s."
        elif answer.outcome == ALWAYS:
            text += f"; every rate that was tried met it, up to --max-rate {bounds.high:g}."
        else:
            text += "; every rate that was judged met it."
        text += _unseen(answer.met, rows, bounds, sizes)
    if not answer.confirmed and (answer.met, answer.unmet) != (None, None):
        text += " It was not confirmed by further runs."
    return text + (f" The search ended early: {answer.reason.rstrip('.')}." if answer.reason else "")


def _behind(rate: float, conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]]) -> str:
    """Each run was judged by its own percentile, of the requests that it completed."""
    met = [r for r in rows if r["rate"] == rate and r["met"]]
    requests = sum(r["requests"] for r in met)
    runs = "1 run" if len(met) == 1 else f"{len(met)} runs"
    text = f"{requests} requests in {runs} that sent for {min(r['arrivals'] for r in met) / rate:.0f} s"
    needed = max((c.samples_needed for c in conditions), default=1)
    fewest = min(r["requests"] - (r["failed"] or 0) for r in met)
    of_run = "" if fewest == requests else f"{fewest} completed in the smallest, "
    return text + (f", {of_run}fewer than the {needed} that a percentile needs" if fewest < needed else "")


def _unseen(rate: float, rows: Sequence[Mapping[str, Any]], bounds: Bounds, sizes: Sizes) -> str:
    """That the runs were too short to show a small overload, where they were."""
    share = max(sizes.overload_told(rate, r["arrivals"]) for r in rows if r["rate"] == rate and r["met"])
    if share <= bounds.tolerance * 1.01:
        return ""
    return (
        f" Runs this short show an overload only from {share:.0%} on: what the server can serve may be that much less. "
        "Give more --run-seconds, or a longer trace."
    )


def table(conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]]) -> Table:
    """All runs, in their order."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    heads = ("run", "rate/s", "requests", *(c.title for c in conditions), "failed", "in flight", "")
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
            {True: "met", False: "not met", None: row["cause"]}[row["met"]],
        )
    return made


def print_table(console: Console, made: Table) -> None:
    """As wide as it is: a column that is cut would hide what was asked for."""
    usual = console.width
    needed = console.measure(made, options=console.options.update(max_width=10_000)).maximum
    console.width = max(usual, needed)
    try:
        console.print(made)
    finally:
        console.width = usual


def _value(condition: Condition, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if condition.metric == "goodput" else f"{value:.1f}"
