"""How good the measurement was: a row a cell on the client's own delay and on what else the machine did."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report import words
from kvbench.report.data import Cell, Run, number
from kvbench.report.table import Column, Row, Value

QUALITY_NOTE = (
    "The worst repeat of each cell. Client lag: how late the client stamped a chunk, against the source named. Client "
    "CPU: share of a core that the load client used. Other processes: cores used by what is neither the client nor "
    "the server; steal: share of CPU time that a virtual machine's host kept. The client's and others' work takes "
    "cores from the server where they share a machine."
)


def quality_columns(run: Run) -> list[Column]:
    """The columns the run has numbers for; configuration, load and validity always."""
    every = [
        Column("configuration", "configuration", "engine settings", lambda _, c: Value(c.name, c.name)),
        Column("load", "load", "", lambda _, c: Value(c.load.short, c.load.value)),
        Column("valid", "valid", "whether all repeats pass their checks", lambda _, c: _valid(c)),
        Column("client_lag_p99_ms", "client lag p99 ms", "worst repeat", lambda _, c: _lag(c)),
        Column("lag_source", "lag told by", "what the lag was measured with", lambda _, c: _source(c)),
        Column("client_cpu", "client CPU", "share of one core, worst repeat", lambda _, c: _client_cpu(c)),
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


def _valid(cell: Cell) -> Value:
    return Value("yes", 1) if cell.valid else Value("no", 0, words.plural(len(cell.invalid_reasons), "reason"), "worse")


def _worst(values: Sequence[object]) -> float | None:
    known = [v for value in values if (v := number(value)) is not None]
    return max(known) if known else None


def _lag(cell: Cell) -> Value:
    worst = _worst(cell.client("lag_p99_ms"))
    return Value(words.milliseconds(worst), worst)


def _source(cell: Cell) -> Value:
    sources = sorted({str(source) for source in cell.client("lag_source")})
    return Value(words.listing(sources), words.listing(sources)) if sources else Value("–")


def _client_cpu(cell: Cell) -> Value:
    worst = _worst(cell.client("cpu_fraction"))
    return Value(words.percent(worst), worst)


def _machine(cell: Cell, key: str, share: bool) -> Value:
    values = [r.machine.get(key) for r in cell.repeats]
    # load_average may be the three numbers of getloadavg(3): the first is that of the last minute.
    worst = _worst([v[0] if isinstance(v, list | tuple) and v else v for v in values])
    if key == "cores":
        return Value(words.count(worst), worst)
    return Value(words.percent(worst) if share else words.significant(worst), worst)
