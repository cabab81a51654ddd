"""The tables of the report, for HTML, Markdown, CSV and the terminal: the table of all cells, and those beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.common import text as words
from kvbench.effects.comparison import FEWEST, Call, Comparison
from kvbench.measure.words import PLATEAU_HEADS, plateau_row
from kvbench.metrics.definitions import Figure, compared, figure, latencies
from kvbench.metrics.latency import LONG_OPEN, SAMPLES_NEEDED
from kvbench.metrics.model import GroupLatencies, failure_words
from kvbench.report.comparisons import (
    RATIO_MARKS,
    THROUGHPUT,
    WHOLE_RUN,
    Comparisons,
    marked,
    median,
    median_ratio,
    spread,
)
from kvbench.report.style import Drawing
from kvbench.runs.kv_ledger import accounting
from kvbench.runs.model import MeasuredCell
from kvbench.workload.settings import setting_title, value_words

Render = Callable[[float | None], str]
TOKENS_A_CHUNK = "tokens a chunk"  # beside an ITL
CHUNKS_NOTE = "ITL is between chunks: where they carry several tokens, TPOT is the time of a token."
MEDIANS = "medians give"  # before the ratio of two medians that contradicts the paired one
UNCERTAIN = "*"
UNCERTAIN_NOTE = f"* too few samples for 99 % confidence ({SAMPLES_NEEDED})."
PLATEAU_NOTE = (
    "The steady part of each step of the rate, median over repeats. A step that answers far fewer requests/s than its "
    "rate is beyond what the configuration can serve."
)
_OF_GROUPS = ("p50_ttft_ms", "p95_ttft_ms", "p50_tpot_ms", "p95_tpot_ms", "p95_e2el_ms")
_BEFORE_HINT = {
    "client_queue": "the part of TTFT for which requests waited in the client because of the cap; ",
    "reasoning": "from a request's first chunk of reasoning to its first text or tool call; ",
    "ttfo": "to the first text or tool call, where reasoning or text held back comes before it; ",
}
_AFTER_HINT = {
    "ttft": "; small: of the whole run, or the other way round",
    "itl": f"; small: {TOKENS_A_CHUNK}, where they are several",
}
_WINDOWS = {True: "steady window", False: WHOLE_RUN}


@dataclass(frozen=True)
class Value:
    """One table entry: its text, a number to sort by (None sorts last) and small further lines."""

    text: str
    sort: float | str | None = None
    note: str = ""
    mark: str = ""  # "better" | "worse" | ""


@dataclass(frozen=True)
class Column:
    """``key`` names the CSV column; ``title`` the heading; ``hint`` explains it; ``of`` makes a cell's entry."""

    key: str
    title: str
    hint: str = ""
    of: Callable[[MeasuredCell], Value] = lambda cell: Value("–")


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


def listed_table(heads: Sequence[str], rows: Sequence[Row], numbers_from: int = 2) -> ReportTable:
    """A table whose columns have a heading and nothing else."""
    return ReportTable(tuple(Column(head, head) for head in heads), tuple(rows), numbers_from)


def texts(*entries: str) -> tuple[Value, ...]:
    """Entries that are sorted by their texts."""
    return tuple(Value(text, text) for text in entries)


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
        """A chapter of those parts that have something to show."""
        parts = list(parts)
        return cls(
            title,
            tuple(part for part in parts if isinstance(part, Section) and part.table.rows),
            tuple(part for part in parts if isinstance(part, Drawing)),
            tuple(part for part in parts if isinstance(part, str) and part),
        )


def cell_table(
    every: Sequence[Column], cells: Sequence[MeasuredCell], always: set[str], numbers_from: int = 2
) -> ReportTable:
    """One row a cell; of the columns those in ``always`` and those that have a value in some cell."""
    shown = tuple(c for c in every if c.key in always or any(c.of(cell).sort is not None for cell in cells))
    return ReportTable(
        shown, tuple(Row(cell, tuple(c.of(cell) for c in shown), cell.load) for cell in cells), numbers_from
    )


def identity_columns() -> list[Column]:
    """Configuration and load."""
    loads = "concurrent requests or users (closed loop), requests/s or conversations/s (open loop)"
    return [
        Column("configuration", "configuration", "engine settings", lambda c: Value(c.name, c.name)),
        Column("load", "load", loads, lambda c: Value(c.load.short, c.load.value)),
    ]


def number_column(
    key: str, title: str, hint: str, of: Callable[[MeasuredCell], float | None], render: Render
) -> Column:
    """A column of one number a cell."""

    def value(cell: MeasuredCell) -> Value:
        return Value(render(of(cell)), of(cell))

    return Column(key, title, hint, value)


RECOMPUTED = number_column(
    "recomputed_tokens",
    "recom\u00adputed",
    "tokens computed again after a preemption, all repeats",
    lambda c: c.counter("recomputed_tokens_total"),
    words.count,
)


def main_table(comparisons: Comparisons, slo: str = "", cache_state: str = "") -> ReportTable:
    """All cells, the highest load first, in the columns that this run has values for.

    ``slo``: of the workload in words; ``cache_state``: that its loads began with.
    """
    ref = comparisons.references[comparisons.loads[-1]] if comparisons.loads else None
    ratio = Column(
        "ratio",
        f"ratio to {ref.name if ref else 'baseline'}",
        f"paired by repeat; {RATIO_MARKS}",
        lambda c: _ratio_to(comparisons.references[c.load], c, comparisons.to_reference[c.cell_id]),
    )

    def configuration(cell: MeasuredCell) -> Value:
        notes = filter(None, ("baseline" if cell.is_baseline else "", cell.doubt))
        return Value(cell.name, cell.name, ", ".join(notes), "" if cell.valid else "worse")

    def gauge(key: str, title: str, hint: str, name: str, render: Render) -> Column:
        return number_column(key, title, hint, lambda cell: median(cell.observed(name)), render)

    every = [
        Column("configuration", "configuration", "engine settings", configuration),
        identity_columns()[1],
        Column("output_tokens_per_s", "output tok/s", "steady window: median, lowest–highest repeat; then the whole "
               "run, ramp-up and drain included", _throughput),
        Column("non_reasoning_tokens_per_s", "tok/s without reasoning", "output tokens/s without reasoning, in the "
               "same window; small: reasoning's share of the output tokens", _without_reasoning),
        *([ratio] if len({cell.name for cell in comparisons.cells}) > 1 else []),
        *map(_latency_column, _latency_figures()),
        Column("goodput", "goodput", f"requests/s that met {slo or 'every SLO'}, whole run; small: "
               "their share of all requests, and requests/s in the steady window", _goodput),
        gauge("running_mean", "running", "sequences running at once, mean in the steady window", "running_mean",
              words.decimal),
        gauge("kv_usage_peak", "peak KV", "highest share of the KV budget owned", "usage_max", words.percent),
        gauge("waste_share", "waste", "slots reserved but unused, share of reserved, mean in the steady window",
              "waste_share", words.percent),
        number_column("preemptions", "pre\u00adempted", "preemptions, all repeats",
                      lambda c: c.counter("num_preemptions_total"), words.count),
        RECOMPUTED,
        Column("prefix_hit_rate", f"prefix hits{f' ({cache_state})' if cache_state else ''}",
               "share of prompt tokens found in the prefix cache; small: what prompts and declared cache state allow, "
               "and whether nothing shows that the cache was in that state (not verified)", _hits),
        Column("open_after_last_ms", "open after last chunk ms", "median time that a stream stayed open after its "
               "last chunk: not in E2EL, but a user's next request waits for it; small: its share of the requests' "
               "time", _open_after_last),
        Column("failed", "failed", "failed requests, all repeats", _failed),
        Column("canaries_wrong", "canaries wrong", "requests with known answers, all repeats", _canaries),
    ]  # fmt: skip
    return cell_table(every, comparisons.by_load, {"configuration", "load", "output_tokens_per_s", "failed"})


def _latency_figures() -> list[Figure]:
    return [Figure(metric, statistic) for metric in latencies() for statistic in metric.statistics]


def _key(shown: Figure) -> str:
    """The name of its column in summary.csv: ttft_ms_p95."""
    return f"{shown.metric.path}_{shown.statistic}"


def flat_rows(table: ReportTable, comparisons: Comparisons) -> list[dict[str, Any]]:
    """Plain numbers for summary.csv: the table of all cells plus what it abbreviates."""
    rows = []
    for row, cell in zip(table.rows, comparisons.by_load, strict=True):
        shown = {column.key: value.sort for column, value in zip(table.columns, row.values, strict=True)}
        flat = _identity(cell)
        flat |= {key: value for key, value in shown.items() if key not in flat}
        for part, steady in (("steady", True), ("whole_run", False)):
            flat |= {f"{part}_ttft_ms_{w}": cell.percentile("ttft_ms", w, steady)[0] for w in ("p50", "p95")}
        window = _WINDOWS[cell.has_steady_latency]
        flat |= {f"{key}_window": window for each in _latency_figures() if (key := _key(each)) in shown}
        flat |= {"tokens_per_chunk": median(cell.per_repeat("tokens_per_chunk"))}
        if s := spread(cell.throughput()):
            bounds = {"min": s.low, "max": s.high, "window": _WINDOWS[cell.has_steady]}
            flat |= {f"output_tokens_per_s_{end}": value for end, value in bounds.items()}
        ref, ratio = comparisons.references[cell.load], comparisons.to_reference[cell.cell_id]
        if ref is not None and ratio is not None:
            low, high = ratio.spread
            flat |= {"ratio_to": ref.name, "ratio_min": low, "ratio_max": high, "ratio_verdict": str(ratio.call)}
            flat |= {"ratio_ci95_low": ratio.low, "ratio_ci95_high": ratio.high}
        flat |= accounting(cell)
        rows.append(flat | {f"setting_{k}": v for k, v in cell.settings.items() if not isinstance(v, (dict, list))})
    return rows


def _identity(cell: MeasuredCell) -> dict[str, Any]:
    names = ("sent", "answered", "wrong")
    canaries = [getattr(cell.canaries, name) for name in names] if cell.canaries.sent else [None] * len(names)
    return {
        "cell_id": cell.cell_id,
        "config_id": cell.config_id,
        "configuration": cell.name,
        **({"clock": cell.clock} if cell.simulated else {}),
        "load_mode": cell.load.mode,
        "load": cell.load.value,
        "valid": cell.valid,
        "invalid_reasons": "; ".join(cell.invalid_reasons),
        "refused": "; ".join(cell.refused),
        "wrong_answers": "; ".join(cell.wrong_answers),
        **{f"canaries_{name}": count for name, count in zip(names, canaries, strict=True)},
        "repeats": len(cell.repeats),
        "invalid_repeats": len(cell.invalid_repeats),
        "completed": cell.count("completed"),
    }


def ratio_value(ratio: Comparison | None, cell: MeasuredCell, other: MeasuredCell) -> Value:
    """The entry of a ratio of two cells with its spread, marked where it is better or worse.

    Small: the smallest effect that its repeats could have shown, where it is not told apart from 1; that it is of the
    whole run; and the ratio of the medians shown, where that is visibly another one.
    """
    if ratio is None:
        return Value("–")
    low, high = ratio.spread
    notes = [f"{words.ratio(low)[:-1]}–{words.ratio(high)[:-1]}" if ratio.n > 1 else "one repeat"]
    if not ratio.decided and ratio.smallest is not None:
        notes.append(f"{words.percent(ratio.smallest)} would show")
    if ratio.basis:
        notes.append(ratio.basis)
    if ratio.metric == THROUGHPUT and (of_medians := median_ratio(cell, other, ratio)):
        notes.append(f"{MEDIANS} {words.ratio(of_medians)}")
    return Value(marked(ratio), ratio.ratio, "\n".join(notes), mark_of(ratio.call))


def mark_of(call: Call) -> str:
    """The mark of an entry with this call: better, worse or none."""
    return str(call) if call in (Call.BETTER, Call.WORSE) else ""


def _ratio_to(ref: MeasuredCell | None, cell: MeasuredCell, ratio: Comparison | None) -> Value:
    if ref is None or (cell is ref and not cell.valid):
        return Value("–")
    return Value("1", 1.0) if cell is ref else ratio_value(ratio, cell, ref)


def _latency_column(shown: Figure) -> Column:
    metric, name, which = shown.metric.path, shown.metric.name, shown.statistic
    title = "client queue" if name == "client_queue" else shown.metric.short
    hint = "requests due in the steady window, raw samples of all repeats"
    hint = f"{_BEFORE_HINT.get(name, '')}{hint}{_AFTER_HINT.get(name, '')}"

    def entry(cell: MeasuredCell) -> Value:
        (value, uncertain), in_steady = cell.percentile(metric, which), cell.has_steady_latency
        text = words.milliseconds(value)
        alike = value is None or text == words.milliseconds(cell.percentile("ttft_ms", which)[0])
        if name == "ttfo" and alike and not cell.count("without_output"):  # each with a TTFT has a TTFO
            return Value("as TTFT")
        notes = [] if value is None or in_steady else [WHOLE_RUN]
        other, few = cell.percentile(metric, which, not in_steady)
        if name == "ttft" and other is not None:
            notes.append(f"{'whole' if in_steady else 'steady'} {words.milliseconds(other)}{UNCERTAIN * few}")
        if name == "itl" and value is not None and (per_chunk := cell.several_tokens_per_chunk):
            notes.append(f"{per_chunk:.1f} {TOKENS_A_CHUNK}")
        return Value(text + UNCERTAIN * uncertain, value, "\n".join(notes))

    return Column(_key(shown), f"{title} {which} ms", hint, entry)


def _throughput(cell: MeasuredCell) -> Value:
    s = spread(cell.throughput())
    if s is None:
        return Value("–")
    notes = [f"{words.tokens_per_s(s.low)}–{words.tokens_per_s(s.high)}" if s.n > 1 else "one repeat"]
    whole = median(cell.throughput(steady=False))
    if not cell.has_steady:
        notes.append(WHOLE_RUN)
    elif whole is not None:
        notes.append(f"whole {words.tokens_per_s(whole)}")
    return Value(words.tokens_per_s(s.median), s.median, "\n".join(notes))


def _without_reasoning(cell: MeasuredCell) -> Value:
    """The entry of output tokens/s without reasoning; empty where no request reasoned."""
    name = f"{'steady_' if cell.has_steady else ''}non_reasoning_output_throughput"
    rate = median(cell.per_repeat(name))
    reasoning, total = cell.per_repeat("total_reasoning_tokens"), cell.count("total_output_tokens")
    notes = [words.percent(sum(reasoning.values()) / total)] if len(reasoning) == len(cell.repeats) and total else []
    if silent := cell.count("without_output"):
        notes.append(f"{silent} without output")
    return Value(words.tokens_per_s(rate), rate, "\n".join(notes))


def _goodput(cell: MeasuredCell) -> Value:
    rates = cell.per_repeat("goodput")
    notes = [words.percent(cell.share_within_slo)] if cell.share_within_slo else []
    if (steady := median(cell.per_repeat("steady_goodput"))) is not None:
        notes.append(f"steady {words.significant(steady)}")
    return Value(words.significant(median(rates)), median(rates), "\n".join(notes))


def _open_after_last(cell: MeasuredCell) -> Value:
    """The entry of open streams, where they take a visible share of the requests' time."""
    share, open_ms = (median(cell.per_repeat(f"open_after_last_{what}")) for what in ("share", "p50_ms"))
    if share is None or share <= LONG_OPEN:
        return Value("–")
    return Value(words.milliseconds(open_ms), open_ms, words.percent(share))


def _hits(cell: MeasuredCell) -> Value:
    possible = cell.possible_hits if cell.hit_rate is not None else None
    notes = [] if possible is None else [f"of {words.percent(possible[0])[:-2]}–{words.percent(possible[1])}"]
    notes += ["not verified"] if any(r.prefix_cache.unverified for r in cell.repeats) else []
    return Value(words.percent(cell.hit_rate), cell.hit_rate, "\n".join(notes))


def _canaries(cell: MeasuredCell) -> Value:
    counts = cell.canaries
    if not counts.sent:
        return Value("–")
    text, mark = f"{counts.wrong} of {counts.answered}", "worse" if counts.wrong else ""
    return Value(text, counts.wrong, counts.first_wrong or "", mark)


def _failed(cell: MeasuredCell) -> Value:
    failed, total = cell.count("failed"), cell.sent
    kinds = sorted({kind for r in cell.repeats for kind in r.metrics.failure_kinds})
    why = failure_words(cell.failure_messages, total, kinds=True) or ", ".join(kinds)
    return Value(f"{failed} of {total}" if failed else "0", failed, why, "worse" if failed else "")


# --- The tables beside it ---


def cell_parts(
    table: ReportTable,
    comparisons: Comparisons,
    slo: str,
    missing: Sequence[str],
    problems: Sequence[str],
) -> tuple[Section, ...]:
    """All cells, those that were planned and not measured too, and what failed.

    ``missing``: ids of cells; ``problems``: loads that failed as a whole.
    """  # fmt: skip
    empty = (Value("–"),) * (len(table.columns) - 1)
    absent = tuple(Row(None, (Value(cell, cell, "not measured"), *empty), "missing") for cell in missing)
    note = cells_note(table, comparisons, slo)
    return (
        Section("cells", "All cells", ReportTable(table.columns, table.rows + absent), note, folded=False),
        Section("failures", "Failures", failure_table(comparisons.by_load, problems)),
    )


def failure_table(cells: Sequence[MeasuredCell], problems: Sequence[str]) -> ReportTable:
    """Failed requests by cell and kind, with the most frequent message; loads that failed as a whole first."""
    rows = [Row(None, (*texts(text), *(Value("–"),) * 3)) for text in problems]
    for cell in cells:
        for kind, each in cell.failure_messages.items():
            failure, count = f"{kind}: {each.message}", f"{each.requests} of {cell.sent}"
            rows.append(Row(cell, texts(cell.name, cell.load.short, failure, count), cell.load))
    return listed_table(("configuration", "load", "failure", "requests"), rows, numbers_from=3)


def compared_heads() -> list[str]:
    """The heading of each metric in which configurations are compared."""
    return [figure(metric).title.replace("tokens/s", "tok/s") for metric in compared()]


def setting_parts(comparisons: Comparisons) -> tuple[Section, ...]:
    """Each setting alone, and the steps of a changing rate."""
    title = f"Each setting alone, as {comparisons.clock}"
    return (
        Section("effects", title, effect_table(comparisons), effects_note(comparisons)),
        Section("plateaus", "Step by step of the rate", plateau_table(comparisons.cells), PLATEAU_NOTE),
    )


def effect_table(comparisons: Comparisons) -> ReportTable:
    """One setting changed alone: ratios to the baseline, setting by setting, the highest load first."""
    listed = comparisons.alone
    changed = list(dict.fromkeys((e.setting, str(e.value)) for e in listed))
    settings = list(dict.fromkeys(setting for setting, _ in changed))
    listed.sort(key=lambda e: (settings.index(e.setting), changed.index((e.setting, str(e.value))), -e.cell.load.value))
    rows = []
    for e in listed:
        change = " → ".join(value_words(e.setting, value) for value in (e.baseline_value, e.value))
        ratios = (ratio_value(comparisons.as_served(e.cell, metric), e.cell, e.base) for metric in compared())
        shown = (*texts(setting_title(e.setting), change, e.cell.load.short), *ratios)
        rows.append(Row(e.cell if e.base.valid else e.base, shown, change))
    return listed_table(("setting", "change", "load", *compared_heads()), rows, numbers_from=3)


def effects_note(comparisons: Comparisons) -> str:
    """The note under the table of effects."""
    cells = [effect.cell for effect in comparisons.alone]
    ratios = [[comparisons.as_served(cell, metric) for cell in cells] for metric in compared()]
    seen = _smallest_effects(dict(zip(compared_heads(), ratios, strict=True)))
    return f"Ratio to the baseline, paired by repeat: median and, small, lowest to highest. {RATIO_MARKS}. {seen}"


def plateau_table(cells: Sequence[MeasuredCell]) -> ReportTable:
    """A row a cell and step of a changing rate; empty where no rate changes."""
    rows = []
    for cell in cells:
        steps = [repeat.metrics.plateaus for repeat in cell.repeats]
        if len({len(each) for each in steps}) == 1:
            for repeats in zip(*steps, strict=True):
                rows.append(Row(cell, texts(cell.name, *plateau_row(repeats)), cell.name))
    return listed_table(("configuration", *PLATEAU_HEADS), rows, numbers_from=1)


def group_parts(cells: Sequence[MeasuredCell]) -> tuple[Section, ...]:
    """Latencies by class of request, where there are several, and of the first and later turns of conversations."""
    classes = _group_table(cells, "class", {})
    if len({row.group for row in classes.rows}) < 2:
        classes = NO_TABLE
    turns = _group_table(cells, "turn", {"first": "first turn", "later": "later turns"})
    return (
        Section("classes", "By class of request", classes, f"Raw samples. {UNCERTAIN_NOTE}"),
        Section("turns", "By turn of the conversation", turns, "Raw samples of all repeats."),
    )


def _group_table(cells: Sequence[MeasuredCell], head: str, titles: Mapping[str, str]) -> ReportTable:
    """Latencies of groups of requests: the highest load first, then by priority, group by group.

    ``titles``: of the groups in their order; all that there are without any.
    """
    listed = []
    for cell in cells:
        groups = cell.latency_groups(f"per_{head}")
        listed += [(cell, titles.get(key, key), groups[key]) for key in titles or groups if key in groups]
    names = list(dict.fromkeys(name for _, name, _ in listed))
    loads = list(dict.fromkeys(cell.load for cell, _, _ in listed))
    urgency = {name: summary.priority or 0 for _, name, summary in listed}
    urgent = head == "class" and len(set(urgency.values())) > 1
    listed.sort(key=lambda one: (loads.index(one[0].load), urgency[one[1]] * urgent, names.index(one[1])))
    figures = [figure(name) for name in _OF_GROUPS]
    rows = []
    for cell, name, summary in listed:
        n = summary.n
        title = f"{name} (priority {urgency[name]})" if urgent else name
        whole = "" if cell.has_steady_groups(f"per_{head}") else WHOLE_RUN
        shown = (*texts(title), Value(cell.load.short, cell.load.value, whole), *texts(cell.name), Value(str(n), n))
        rows.append(Row(cell, (*shown, *(_of_group(summary, each) for each in figures)), name))
    heads = (head, "load", "configuration", "requests", *(f"{f.metric.short} {f.statistic}" for f in figures))
    return listed_table(heads, rows, numbers_from=3)


def _of_group(summary: GroupLatencies, shown: Figure) -> Value:
    """A percentile of a group's latencies, marked where it is of too few samples."""
    samples, value = summary.distribution(shown.metric.path), summary.value(shown.path)
    return Value(words.ms(value) + UNCERTAIN * (shown.statistic in samples.uncertain), value)


# --- Sentences of the tables ---


def _smallest_effects(ratios: Mapping[str, Sequence[Comparison | None]]) -> str:
    """The smallest effects that these repeats could have shown, by row; ``ratios``: by metric.

    Empty where there is no ratio.
    """
    if not any(ratio for each in ratios.values() for ratio in each):
        return ""
    parts = []
    for metric, each in ratios.items():
        if sizes := sorted(ratio.smallest for ratio in each if ratio and ratio.smallest is not None):
            low, high = (words.percent(size) for size in (sizes[0], sizes[-1]))
            parts.append(f"{low if low == high else f'{low} to {high}'} in {metric}")
    if not parts:
        return f"Fewer than {FEWEST} repeats have no interval, so no verdict on them."
    return f"Smallest effect that these repeats could show (80 % power at 95 %), by row: {', '.join(parts)}."


def served_words(cell: MeasuredCell) -> str:
    """served 20 of 48 requests and refused the others (28 of 48: "Context size has been exceeded.")"""
    why = failure_words(cell.failure_messages, cell.sent)
    return f"served {cell.count('completed')} of {cell.sent} requests and refused the others ({why})"


def cells_note(table: ReportTable, comparisons: Comparisons, slo: str) -> str:
    """The note under the table of all cells, about the marks that it has."""
    cells = [cell for cell in comparisons.cells if cell is not comparisons.references[cell.load]]
    ratios = [comparisons.to_reference[cell.cell_id] for cell in cells]
    entries = [value.text + value.note for row in table.rows for value in row.values]
    sentences = {
        f"Medians over repeats, small: lowest to highest; of the steady window, else marked {WHOLE_RUN}. Ratios are "
        f"paired by repeat: {RATIO_MARKS}.": True,
        f"{words.upper_first(MEDIANS)}: the ratio of the medians shown.": any(MEDIANS in text for text in entries),
        _smallest_effects({"output tok/s": ratios}): True,
        f"Latencies: raw samples of the requests due in the steady window, else marked {WHOLE_RUN}.": True,
        CHUNKS_NOTE: any(TOKENS_A_CHUNK in text for text in entries),
        f"Goodput: requests/s that met {slo}.": bool(slo),
        UNCERTAIN_NOTE: any(UNCERTAIN in text for text in entries),
    }
    return " ".join(text for text, holds in sentences.items() if holds and text)
