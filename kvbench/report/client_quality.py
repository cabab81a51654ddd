"""How good the measurement was: the client's calibration, and a row a cell on its delays and on the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.common import text as words
from kvbench.report.tables import Column, Row, Value
from kvbench.runs.model import MeasuredCell, Run, number

QUALITY_NOTE = (
    "The worst repeat of each cell. Lag: how late the client stamped a chunk, against the source named below it; where "
    "the kernel stamps arrivals, how late the client's loop was, which delays no timestamp. "
    "Slip: how late requests were sent in open loop. Coalesced: chunks read together with the one before although they "
    "were sent apart. Client CPU: share of a core of its busiest process, and CPU seconds per 1,000 output tokens. "
    "Other processes: cores used by what is neither the client nor the server; steal: share of CPU time that a virtual "
    "machine's host kept. The client's and others' work takes cores from the server where they share a machine."
)


def quality_columns(run: Run) -> list[Column]:
    """The columns the run has numbers for; configuration, load and validity always."""
    every = [
        Column("configuration", "configuration", "engine settings", lambda _, c: Value(c.name, c.name)),
        Column("load", "load", "", lambda _, c: Value(c.load.short, c.load.value)),
        Column("valid", "valid", "whether all repeats pass their checks", lambda _, c: _valid(c)),
        Column("client_lag_p99_ms", "lag p99 ms", "of the client's timestamps, worst repeat", lambda _, c: _lag(c)),
        _client("schedule_slip_p99_ms", "slip p99 ms", "open loop, worst repeat", words.milliseconds),
        _client("coalesced_share", "coalesced", "share of the chunks, worst repeat", _fine_percent),
        Column("client_cpu", "client CPU", "share of one core, worst repeat", lambda _, c: _client_cpu(c)),
        Column("client_processes", "load processes", "that shared the load", lambda _, c: _processes(c)),
        *(
            Column(f"machine_{key}", title, "worst repeat", lambda _, c, key=key, share=share: _machine(c, key, share))
            for key, title, share in (
                ("server_cpu_cores", "server cores", False),
                ("foreign_cpu_cores", "other processes, cores", False),
                ("steal_share", "steal", True),
                ("load_average", "load average", False),
                ("cores", "cores there are", False),
            )
        ),
    ]
    always = {"configuration", "load", "valid"}
    return [c for c in every if c.key in always or any(c.of(run, cell).sort is not None for cell in run.cells)]


def quality_rows(run: Run) -> list[Row]:
    """One row a cell in the order of the big table."""
    shown = quality_columns(run)
    return [
        Row(cell, tuple(col.of(run, cell) for col in shown)) for load in reversed(run.loads) for cell in run.at(load)
    ]


def quality_sentences(run: Run) -> list[str]:
    """What to know without reading the table: the calibrations, and the worst of all cells."""
    return [*calibrations(run), *_worst_of_all(run)]


def calibrations(run: Run) -> list[str]:
    """One sentence for each calibration of the load client, or that there was none."""
    told = run.manifest.get("calibration")
    if not isinstance(told, Mapping):
        return []
    if told.get("left_out"):
        return ["The load client was not calibrated (--no-calibration): how well it measures here is not known."]
    measured = [c for c in told.get("measured") or () if isinstance(c, Mapping)]
    return [_calibration(c["settings"], c["figures"], c.get("reasons") or ()) for c in measured if "figures" in c]


def _calibration(settings: Mapping[str, Any], figures: Mapping[str, Any], reasons: Sequence[str]) -> str:
    shared = settings.get("processes", 1)
    where = f"{settings['streams']} streams of {settings['itl_ms']:g} ms ITL"
    where += f" over {shared} processes" if shared > 1 else ""
    parts = [
        f"{title} {render(value)}"
        for key, title, render in (
            ("lag_p99_ms", "p99 timestamp lag", lambda v: f"{v:.2f} ms"),
            ("itl_error_p99_ms", "p99 ITL error", lambda v: f"{v:.2f} ms"),
            ("cpu_us_per_event", "CPU an event", lambda v: f"{v:.0f} µs"),
            ("coalesced_share", "coalesced", _fine_percent),
        )
        if (value := number(figures.get(key))) is not None
    ]
    verdict = "" if not reasons else " Over the limits: " + " ".join(reasons)
    return f"The load client was calibrated against the mock server at {where}: {', '.join(parts)}.{verdict}"


def _worst_of_all(run: Run) -> list[str]:
    def worst(values: list[float | None], render: Any, words_: str) -> list[str]:
        known = [v for v in values if v is not None]
        return [words_.format(render(max(known)))] if known else []

    cells = run.cells
    parts = worst([_worst(c.client("lag_p99_ms")) for c in cells], words.ms, "p99 timestamp lag {}")
    parts += worst([_worst(c.client("schedule_slip_p99_ms")) for c in cells], words.ms, "p99 schedule slip {}")
    parts += worst([_worst(c.client("cpu_fraction")) for c in cells], words.percent, "client at {} of a core")
    costs = [_worst(c.client("cpu_s_per_1000_output_tokens")) for c in cells]
    parts += worst(costs, words.significant, "{} s of client CPU per 1,000 output tokens")
    foreign = [_worst([r.machine.get("foreign_cpu_cores") for r in c.repeats]) for c in cells]
    parts += worst(foreign, words.significant, "{} cores taken by other processes")
    return [f"The worst of all loads: {', '.join(parts)}."] if parts else []


def _fine_percent(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.2f} %"


def _client(key: str, title: str, hint: str, render: Any) -> Column:
    def of(_: Run, cell: MeasuredCell) -> Value:
        worst = _worst(cell.client(key))
        return Value(render(worst), worst)

    return Column(f"client_{key}", title, hint, of)


def _valid(cell: MeasuredCell) -> Value:
    return Value("yes", 1) if cell.valid else Value("no", 0, words.plural(len(cell.invalid_reasons), "reason"), "worse")


def _worst(values: Sequence[object]) -> float | None:
    known = [v for value in values if (v := number(value)) is not None]
    return max(known) if known else None


def _lag(cell: MeasuredCell) -> Value:
    worst = _worst(cell.client("lag_p99_ms"))
    sources = sorted({str(source) for source in cell.client("lag_source")})
    if worst is None and sources == ["kernel stamps"]:  # whose error the calibration tells
        worst, sources = _worst(cell.client("loop_lag_p99_ms")), ["of the loop; kernel stamps"]
    elif any(judged is False for judged in cell.client("lag_judged")):
        sources.append("not judged: too few chunks")
    return Value(words.milliseconds(worst), worst, words.listing(sources) if sources and worst is not None else "")


def _client_cpu(cell: MeasuredCell) -> Value:
    worst, cost = _worst(cell.client("cpu_fraction")), _worst(cell.client("cpu_s_per_1000_output_tokens"))
    note = "" if cost is None else f"{words.significant(cost)} s/1,000"
    return Value(words.percent(worst), worst, note)


def _processes(cell: MeasuredCell) -> Value:
    most = max((len(p) for p in cell.client("processes") if isinstance(p, list)), default=0)
    return Value(str(most), most) if most else Value("–")


def _machine(cell: MeasuredCell, key: str, share: bool) -> Value:
    values = [r.machine.get(key) for r in cell.repeats]
    # load_average may be the three numbers of getloadavg(3): the first is that of the last minute.
    worst = _worst([v[0] if isinstance(v, list | tuple) and v else v for v in values])
    if key == "cores":
        return Value(words.count(worst), worst)
    return Value(words.percent(worst) if share else words.significant(worst), worst)
