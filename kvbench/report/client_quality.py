"""How good the measurement was: the client's calibration, and a row a cell on its delays and on the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbench.common import text as words
from kvbench.report.tables import (
    NO_TABLE,
    Column,
    Render,
    ReportTable,
    Section,
    Value,
    cell_table,
    identity_columns,
    number_column,
)
from kvbench.runs.model import MeasuredCell, Run, number

QUALITY_NOTE = (
    "The worst repeat of each cell. Lag: of a chunk's timestamp, against the source below it. Slip: how late requests "
    "were sent (open loop). Coalesced: chunks read with the one before though sent apart. Other processes: neither "
    "client nor server. Steal: CPU time that a virtual machine's host kept."
)


def section(run: Run, cells: Sequence[MeasuredCell]) -> Section:
    """The table with its sentences; without rows of a simulated run, which has no client."""
    table = NO_TABLE if run.simulated else quality_table(cells)
    sentences = (*calibrations(run), *worst_of_all(cells))
    return Section("quality", "How good the measurement was", table, QUALITY_NOTE, sentences)


def quality_table(cells: Sequence[MeasuredCell]) -> ReportTable:
    """One row a cell; configuration, load and validity always, the rest where there are numbers for it."""

    def fine_percent(value: float | None) -> str:
        return "–" if value is None else f"{value * 100:.2f} %"

    every = [
        *identity_columns(),
        Column("valid", "valid", "whether all repeats pass their checks", _valid),
        Column("client_lag_p99_ms", "lag p99 ms", "of the client's timestamps, worst repeat", _lag),
        _client("schedule_slip_p99_ms", "slip p99 ms", "open loop, worst repeat", words.milliseconds),
        _client("coalesced_share", "coalesced", "share of the chunks, worst repeat", fine_percent),
        Column("client_cpu", "client CPU", "share of one core, worst repeat", _client_cpu),
        Column("client_processes", "load processes", "that shared the load", _processes),
        _machine("server_cpu_cores", "server cores", words.significant),
        _machine("foreign_cpu_cores", "other processes, cores", words.significant),
        _machine("steal_share", "steal", words.percent),
        _machine("load_average", "load average", words.significant),
        _machine("cores", "cores there are", words.count),
    ]
    return cell_table(every, cells, {"configuration", "load", "valid"}, numbers_from=3)


def worst_of_all(cells: Sequence[MeasuredCell]) -> list[str]:
    """A sentence on the worst of all cells; none where nothing is known."""
    worst = []
    for key, render, phrase in (
        ("lag_p99_ms", words.ms, "p99 timestamp lag {}"),
        ("schedule_slip_p99_ms", words.ms, "p99 schedule slip {}"),
        ("cpu_fraction", words.percent, "client at {} of a core"),
        ("cpu_s_per_1000_output_tokens", words.significant, "{} s of client CPU per 1,000 output tokens"),
        ("foreign_cpu_cores", words.significant, "{} cores taken by other processes"),
    ):
        machine = (getattr(r.machine, key, None) for cell in cells for r in cell.repeats)
        value = _worst([*machine, *(v for cell in cells for v in cell.client(key))])
        if value is not None:
            worst.append(phrase.format(render(value)))
    return [f"The worst of all loads: {', '.join(worst)}."] if worst else []


def calibrations(run: Run) -> list[str]:
    """One sentence for each calibration of the load client, or that there was none."""
    stored = run.manifest.calibration or {}
    if stored.get("left_out"):
        return ["The load client was not calibrated (--no-calibration): how well it measures here is not known."]
    found = []
    for each in stored.get("measured") or ():
        if "figures" in each:
            over = f" Over the limits: {' '.join(each['reasons'])}" if each.get("reasons") else ""
            measured = words.calibration_words(each["settings"], each["figures"])
            found.append(f"The load client was calibrated against the mock server at {measured}.{over}")
    return found


def _worst(values: Iterable[object]) -> float | None:
    return max((v for value in values if (v := number(value)) is not None), default=None)


def _client(key: str, title: str, hint: str, render: Render) -> Column:
    return number_column(f"client_{key}", title, hint, lambda cell: _worst(cell.client(key)), render)


def _machine(key: str, title: str, render: Render) -> Column:
    def worst(cell: MeasuredCell) -> float | None:
        values = [getattr(r.machine, key) for r in cell.repeats]
        return _worst(v[0] if isinstance(v, list) else v for v in values)  # of getloadavg(3): the last minute

    return number_column(f"machine_{key}", title, "worst repeat", worst, render)


def _valid(cell: MeasuredCell) -> Value:
    if cell.doubt == "invalid":
        return Value("no", 0, words.plural(len(cell.invalid_reasons), "reason"), "worse")
    return Value("yes", 1, "wrong answers" if cell.wrong_answers else "requests refused" if cell.refused else "")


def _lag(cell: MeasuredCell) -> Value:
    worst = _worst(cell.client("lag_p99_ms"))
    sources = sorted({str(source) for source in cell.client("lag_source")})
    if worst is None and sources == ["kernel stamps"]:  # the calibration measures their error
        worst, sources = _worst(cell.client("loop_lag_p99_ms")), ["of the loop; kernel stamps"]
    elif False in cell.client("lag_judged"):
        sources.append("not judged: too few chunks")
    return Value(words.milliseconds(worst), worst, words.listing(sources) if worst is not None else "")


def _client_cpu(cell: MeasuredCell) -> Value:
    worst, cost = _worst(cell.client("cpu_fraction")), _worst(cell.client("cpu_s_per_1000_output_tokens"))
    return Value(words.percent(worst), worst, "" if cost is None else f"{words.significant(cost)} s/1,000")


def _processes(cell: MeasuredCell) -> Value:
    most = max((len(p) for p in cell.client("processes")), default=0)
    return Value(str(most), most) if most else Value("–")
