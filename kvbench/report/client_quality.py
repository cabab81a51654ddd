"""The quality of the measurement: the client's calibration, and a row a cell on its delays and on the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbench.common import text as words
from kvbench.report import tables
from kvbench.report.tables import NO_TABLE, Column, Render, ReportTable, Section, Value
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell, Run, number

_MACHINE = (  # figure of the machine, heading, how it is written
    ("server_cpu_cores", "server cores", words.significant),
    ("foreign_cpu_cores", "other processes, cores", words.significant),
    ("steal_share", "steal", words.percent),
    ("load_average", "load average", words.significant),
    ("cores", "cores there are", words.count),
)
_WORST = {  # figure of the client or the machine -> how it is written; the phrase: ``client_quality.worst``
    "lag_p99_ms": words.ms,
    "schedule_slip_p99_ms": words.ms,
    "cpu_fraction": words.percent,
    "cpu_s_per_1000_output_tokens": words.significant,
    "foreign_cpu_cores": words.significant,
}


def section(run: Run, cells: Sequence[MeasuredCell]) -> Section:
    """The table with its sentences; without rows of a simulated run, which has no client."""
    table = NO_TABLE if run.simulated else quality_table(cells)
    sentences = (*calibrations(run), *worst_of_all(cells))
    return Section("quality", "How good the measurement was", table, say("client_quality.note"), sentences)


def quality_table(cells: Sequence[MeasuredCell]) -> ReportTable:
    """One row a cell; configuration, load and validity always, the rest where there are numbers for it."""

    def client(key: str, title: str, render: Render) -> Column:
        return tables.number_column(f"client_{key}", title, lambda cell: _worst(cell.client(key)), render)

    def machine(key: str, title: str, render: Render) -> Column:
        return tables.number_column(f"machine_{key}", title, lambda cell: _of_machine(cell, key), render)

    columns = [
        *tables.identity_columns(),
        tables.column("valid", "valid", _valid),
        tables.column("client_lag_p99_ms", "lag p99 ms", _lag),
        client("schedule_slip_p99_ms", "slip p99 ms", words.milliseconds),
        client("coalesced_share", "coalesced", _fine_percent),
        tables.column("client_cpu", "client CPU", _client_cpu),
        tables.column("client_processes", "load processes", _processes),
        *(machine(*row) for row in _MACHINE),
    ]
    return tables.cell_table(columns, cells, ("configuration", "load", "valid"), numbers_from=3)


def _fine_percent(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.2f} %"


def _valid(cell: MeasuredCell) -> Value:
    if cell.doubt == "invalid":
        return Value("no", 0, words.plural(len(cell.invalid_reasons), "reason"), "worse")
    return Value("yes", 1, say("client_quality.doubt", cell.doubt))


def _client_cpu(cell: MeasuredCell) -> Value:
    worst, cost = (_worst(cell.client(name)) for name in ("cpu_fraction", "cpu_s_per_1000_output_tokens"))
    return tables.entry(worst, words.percent(worst), say("client_quality.cpu_cost", cost is not None, seconds=cost))


def _processes(cell: MeasuredCell) -> Value:
    most = max((len(processes) for processes in cell.client("processes")), default=0)
    return tables.entry(most or None, str(most))


def _lag(cell: MeasuredCell) -> Value:
    worst = _worst(cell.client("lag_p99_ms"))
    sources = sorted({str(source) for source in cell.client("lag_source")})
    if worst is None and sources == ["kernel stamps"]:  # the calibration measures their error
        worst, sources = _worst(cell.client("loop_lag_p99_ms")), ["of the loop; kernel stamps"]
    elif False in cell.client("lag_judged"):
        sources.append("not judged: too few chunks")
    return tables.entry(worst, words.milliseconds(worst), words.listing(sources))


def _of_machine(cell: MeasuredCell, key: str) -> float | None:
    """The worst repeat; of getloadavg(3) the last minute."""
    values = [getattr(repeat.machine, key, None) for repeat in cell.repeats]
    return _worst(value[0] if isinstance(value, list) else value for value in values)


def _worst(values: Iterable[object]) -> float | None:
    return max((size for value in values if (size := number(value)) is not None), default=None)


def worst_of_all(cells: Sequence[MeasuredCell]) -> list[str]:
    """Says what was the worst of all cells; nothing where nothing is known."""
    worst = []
    for key, render in _WORST.items():
        values = [_of_machine(cell, key) for cell in cells] + [v for cell in cells for v in cell.client(key)]
        if (value := _worst(values)) is not None:
            worst.append(say("client_quality.worst", key, value=render(value)))
    return [say("client_quality.worst_of_all", worst=", ".join(worst))] * bool(worst)


def calibrations(run: Run) -> list[str]:
    """Returns one sentence for each calibration of the load client, or that there was none."""
    stored = run.manifest.calibration or {}
    if stored.get("left_out"):
        return [say("client_quality.not_calibrated")]
    sentences = []
    for measured in stored.get("measured") or ():
        if "figures" in measured:
            reasons = " ".join(measured.get("reasons") or ())
            what = words.calibration_words(measured["settings"], measured["figures"])
            sentences.append(say("client_quality.calibrated", measured=what, reasons=reasons))
    return sentences
