"""The parts of a report's chapter: sentences, figures, and tables of columns, rows and entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvbench.common import text as words
from kvbench.effects.comparison import Call, Comparison
from kvbench.metrics.definitions import THROUGHPUT
from kvbench.report.comparisons import marked, median_ratio
from kvbench.report.style import Drawing
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell

Render = Callable[[float | None], str]
MEDIANS = "medians give"  # before the ratio of two medians that contradicts the paired one
UNCERTAIN = "*"  # behind a percentile of too few samples


@dataclass(frozen=True)
class Value:
    """One table entry: its text, a number to sort by (None sorts last) and small further lines."""

    text: str
    sort: float | str | None = None
    note: str = ""
    mark: str = ""  # "better" | "worse" | ""


NONE = Value("–")


@dataclass(frozen=True)
class Column:
    """``key`` names the CSV column; ``title`` the heading; ``hint`` explains it; ``of`` makes a cell's entry."""

    key: str
    title: str
    hint: str = ""
    of: Callable[[MeasuredCell], Value] = lambda cell: NONE


@dataclass(frozen=True)
class Row:
    """The entries of one row; ``cell`` is whose they are, None for a cell that was not measured."""

    cell: MeasuredCell | None
    values: tuple[Value, ...]
    group: object = None  # a line is drawn where it changes


@dataclass(frozen=True)
class ReportTable:
    """Columns and rows; columns from ``numbers_from`` on are right-aligned."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    numbers_from: int = 2


NO_TABLE = ReportTable((), ())


@dataclass(frozen=True)
class Section:
    """A table with its title, sentences above and a note below; ``folded``: opened by the reader of the page."""

    key: str
    title: str
    table: ReportTable
    note: str = ""
    sentences: tuple[str, ...] = ()
    folded: bool = True


Part = str | Drawing | Section | None
"""What a chapter consists of: sentences, figures and tables; None: there is nothing to show."""


@dataclass(frozen=True)
class Chapter:
    """A heading with its figures and tables; ``sentences`` stand above both."""

    title: str
    sections: tuple[Section, ...]
    drawings: tuple[Drawing, ...]
    sentences: tuple[str, ...]

    @classmethod
    def of(cls, title: str, parts: Iterable[Part]) -> Chapter:
        """Makes a chapter of those parts that have something to show."""
        parts = list(parts)
        return cls(
            title,
            tuple(part for part in parts if isinstance(part, Section) and part.table.rows),
            tuple(part for part in parts if isinstance(part, Drawing)),
            tuple(part for part in parts if isinstance(part, str) and part),
        )


# --- Entries ---


def texts(*entries: str) -> tuple[Value, ...]:
    """Makes entries that are sorted by their texts."""
    return tuple(Value(text, text) for text in entries)


def entry(number: float | None, text: str, *notes: str, mark: str = "") -> Value:
    """Makes the entry of a number, written as ``text``, with the lines that are not empty; NONE without a number."""
    return NONE if number is None else Value(text, number, "\n".join(filter(None, notes)), mark)


def ratio_value(ratio: Comparison | None, cell: MeasuredCell, other: MeasuredCell | None) -> Value:
    """Makes the entry of a ratio of two cells with its spread, marked where it is better or worse.

    Small: the smallest effect that its repeats could have shown, where it is not told apart from 1; that it is of the
    whole run; and the ratio of the medians shown, where that is visibly another one.
    """
    if ratio is None or other is None:
        return NONE
    low, high = (words.ratio(end)[:-1] for end in ratio.spread)
    notes = [say("tables.repeats", n=ratio.n, low=low, high=high)]
    if not ratio.decided and ratio.smallest is not None:
        notes.append(say("tables.would_show", size=words.percent(ratio.smallest)))
    notes.append(ratio.basis or "")
    if ratio.metric == THROUGHPUT and (of_medians := median_ratio(cell, other, ratio)):
        notes.append(f"{MEDIANS} {words.ratio(of_medians)}")
    return entry(ratio.ratio, marked(ratio), *notes, mark=mark_of(ratio.call))


def mark_of(call: Call) -> str:
    """Returns the mark of an entry with this call: better, worse or none."""
    return {Call.BETTER: "better", Call.WORSE: "worse"}.get(call, "")


# --- Columns and tables ---


def column(key: str, title: str, value_of: Callable[[MeasuredCell], Value], slo: str = "") -> Column:
    """A column with the hint that the file of sentences has for its ``key``."""
    return Column(key, title, say("tables.hint", key, slo=slo), value_of)


def number_column(key: str, title: str, value_of: Callable[[MeasuredCell], float | None], render: Render) -> Column:
    """A column of one number a cell."""

    def value(cell: MeasuredCell) -> Value:
        number = value_of(cell)
        return Value(render(number), number)

    return column(key, title, value)


def identity_columns() -> list[Column]:
    """Returns the columns of configuration and load."""
    return [
        column("configuration", "configuration", lambda cell: Value(cell.name, cell.name)),
        column("load", "load", lambda cell: Value(cell.load.short, cell.load.value)),
    ]


def recomputed_column() -> Column:
    """The column of the tokens that were computed again after a preemption."""
    counter = "recomputed_tokens_total"
    return number_column("recomputed_tokens", "recom\u00adputed", lambda cell: cell.counter(counter), words.count)


def cell_table(
    columns: Iterable[Column],
    cells: Sequence[MeasuredCell],
    always: Sequence[str] = ("configuration", "load"),
    not_zero: Sequence[str] = (),
    numbers_from: int = 2,
) -> ReportTable:
    """A table of a row a cell, with those columns that have a value in some cell.

    ``always``: keys of columns that are shown without one too; ``not_zero``: that are not shown with zeros alone.
    """
    shown = []
    for candidate in columns:
        sorts = [candidate.of(cell).sort for cell in cells]
        if candidate.key in not_zero:
            sorts = [number or None for number in sorts]
        if candidate.key in always or any(number is not None for number in sorts):
            shown.append(candidate)
    rows = (Row(cell, tuple(column.of(cell) for column in shown), cell.load) for cell in cells)
    return ReportTable(tuple(shown), tuple(rows), numbers_from)


def listed_table(
    heads: Iterable[str | tuple[str, str, str]], rows: Sequence[Row], numbers_from: int = 2
) -> ReportTable:
    """A table of rows; columns from ``numbers_from`` on that have no entry are left out.

    ``heads``: a heading each, or (key, heading, hint).
    """
    columns = [Column(head, head) if isinstance(head, str) else Column(*head) for head in heads]
    kept = [i for i in range(len(columns)) if i < numbers_from or any(row.values[i].text != NONE.text for row in rows)]
    shown = tuple(Row(row.cell, tuple(row.values[i] for i in kept), row.group) for row in rows)
    return ReportTable(tuple(columns[i] for i in kept), shown, numbers_from)
