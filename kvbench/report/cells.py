"""The table of all cells and summary.csv; failures, settings changed alone, steps of a rate, groups of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.common import text as words
from kvbench.effects.comparison import FEWEST, Comparison
from kvbench.measure.words import PLATEAU_HEADS, plateau_row
from kvbench.metrics.definitions import Figure, compared, figure, latencies
from kvbench.metrics.latency import LONG_OPEN, SAMPLES_NEEDED
from kvbench.metrics.model import failure_words
from kvbench.report import tables
from kvbench.report.comparisons import RATIO_MARKS, WHOLE_RUN, Comparisons, median, spread
from kvbench.report.tables import MEDIANS, NO_TABLE, NONE, UNCERTAIN, Column, Render, ReportTable, Row, Section, Value
from kvbench.report.wording import say
from kvbench.runs.kv_ledger import accounting
from kvbench.runs.model import MeasuredCell
from kvbench.workload.settings import setting_title, value_words

_ALWAYS = ("configuration", "load", "output_tokens_per_s", "failed")
_OF_GROUPS = [figure(f"{which}_ms") for which in ("p50_ttft", "p95_ttft", "p50_tpot", "p95_tpot", "p95_e2el")]
_TOKENS_A_CHUNK = "tokens a chunk"  # beside an ITL
_WINDOWS = {True: "steady window", False: WHOLE_RUN}


# --- All cells ---


def _latency_figures() -> list[Figure]:
    """The latencies of the table: those that ship, and those that were added since."""
    return [Figure(metric, statistic) for metric in latencies() for statistic in metric.statistics]


def main_table(comparisons: Comparisons, slo: str = "", cache_state: str = "") -> ReportTable:
    """The table of all cells, the highest load first, in the columns that this run has values for.

    ``slo``: of the workload in words; ``cache_state``: the one that its loads began with.
    """

    def gauge(key: str, title: str, name: str, render: Render) -> Column:
        return tables.number_column(key, title, lambda cell: median(cell.observed(name)), render)

    def preempted(cell: MeasuredCell) -> float | None:
        return cell.counter("num_preemptions_total")

    hits = say("cells.hits_head", bool(cache_state), state=cache_state)
    columns = [
        tables.column("configuration", "configuration", _configuration),
        tables.identity_columns()[1],
        tables.column("output_tokens_per_s", "output tok/s", _throughput),
        tables.column("non_reasoning_tokens_per_s", "tok/s without reasoning", _without_reasoning),
        *_ratio_columns(comparisons),
        *map(_latency_column, _latency_figures()),
        tables.column("goodput", "goodput", _goodput, slo or "every SLO"),
        gauge("running_mean", "running", "running_mean", words.decimal),
        gauge("kv_usage_peak", "peak KV", "usage_max", words.percent),
        gauge("waste_share", "waste", "waste_share", words.percent),
        tables.number_column("preemptions", "pre\u00adempted", preempted, words.count),
        tables.recomputed_column(),
        tables.column("prefix_hit_rate", hits, _hits),
        tables.column("open_after_last_ms", "open after last chunk ms", _open_after_last),
        tables.column("failed", "failed", _failed),
        tables.column("canaries_wrong", "canaries wrong", _canaries),
    ]
    return tables.cell_table(columns, comparisons.by_load, _ALWAYS)


def _configuration(cell: MeasuredCell) -> Value:
    notes = ", ".join(filter(None, ("baseline" * cell.is_baseline, cell.doubt)))
    return Value(cell.name, cell.name, notes, "worse" * (not cell.valid))


def _ratio_columns(comparisons: Comparisons) -> list[Column]:
    """The column of ratios to the reference of each load; none where a run has one configuration."""
    if len({cell.name for cell in comparisons.cells}) < 2:
        return []
    named = comparisons.references[comparisons.loads[-1]]

    def ratio(cell: MeasuredCell) -> Value:
        reference = comparisons.references[cell.load]
        if cell is reference:
            return Value("1", 1.0) if cell.valid else NONE
        return tables.ratio_value(comparisons.to_reference[cell.cell_id], cell, reference)

    title = f"ratio to {named.name if named else 'baseline'}"
    return [Column("ratio", title, say("cells.ratio_hint", marks=RATIO_MARKS), ratio)]


def _throughput(cell: MeasuredCell) -> Value:
    rates, whole = spread(cell.throughput()), median(cell.throughput(steady=False))
    if rates is None:
        return NONE
    low, high = words.tokens_per_s(rates.low), words.tokens_per_s(rates.high)
    beside = say("cells.whole", cell.has_steady and whole is not None, value=whole)
    notes = (say("tables.repeats", n=rates.n, low=low, high=high), beside, WHOLE_RUN * (not cell.has_steady))
    return tables.entry(rates.median, words.tokens_per_s(rates.median), *notes)


def _without_reasoning(cell: MeasuredCell) -> Value:
    """Output tokens/s without reasoning, and reasoning's share; empty where no request reasoned."""
    rate = median(cell.per_repeat("steady_" * cell.has_steady + "non_reasoning_output_throughput"))
    reasoning, total, notes = cell.per_repeat("total_reasoning_tokens"), cell.count("total_output_tokens"), []
    if total and len(reasoning) == len(cell.repeats):
        notes.append(words.percent(sum(reasoning.values()) / total))
    if silent := cell.count("without_output"):
        notes.append(say("cells.without_output", count=silent))
    return tables.entry(rate, words.tokens_per_s(rate), *notes)


def _latency_column(shown: Figure) -> Column:
    """The column of a percentile: of the steady window, else marked as one of the whole run."""
    metric, which = shown.metric, shown.statistic

    def value(cell: MeasuredCell) -> Value:
        (number, few), steady = cell.percentile(metric.path, which), cell.has_steady_latency
        text, notes = words.milliseconds(number), [WHOLE_RUN * (not steady)]
        alike = number is None or text == words.milliseconds(cell.percentile("ttft_ms", which)[0])
        if metric.name == "ttfo" and alike and not cell.count("without_output"):  # each with a TTFT has a TTFO
            return Value("as TTFT")
        if metric.name == "ttft":
            other, other_few = cell.percentile(metric.path, which, not steady)
            beside = words.milliseconds(other) + UNCERTAIN * other_few
            notes.append(say("cells.other_window", steady, value=beside) * (other is not None))
        if metric.name == "itl" and (per_chunk := cell.several_tokens_per_chunk):
            notes.append(f"{per_chunk:.1f} {_TOKENS_A_CHUNK}")
        return tables.entry(number, text + UNCERTAIN * few, *notes)

    short = {"client_queue": "client queue"}.get(metric.name, metric.short)
    return Column(_key(shown), f"{short} {which} ms", say("cells.latency_hint", metric.name), value)


def _key(shown: Figure) -> str:
    """The name of its column in summary.csv: ttft_ms_p95."""
    return f"{shown.metric.path}_{shown.statistic}"


def _goodput(cell: MeasuredCell) -> Value:
    rate, steady = median(cell.per_repeat("goodput")), median(cell.per_repeat("steady_goodput"))
    share = words.percent(cell.share_within_slo) * bool(cell.share_within_slo)
    beside = say("cells.steady", steady is not None, value=steady)
    return tables.entry(rate, words.significant(rate), share, beside)


def _open_after_last(cell: MeasuredCell) -> Value:
    """The time that streams stayed open, where it is a visible share of the requests' time."""
    share, open_ms = (median(cell.per_repeat(f"open_after_last_{what}")) for what in ("share", "p50_ms"))
    if share is None or share <= LONG_OPEN:
        return NONE
    return tables.entry(open_ms, words.milliseconds(open_ms), words.percent(share))


def _hits(cell: MeasuredCell) -> Value:
    notes = []
    if cell.hit_rate is not None and (possible := cell.possible_hits):
        low, high = map(words.percent, possible)
        notes.append(say("cells.possible_hits", low=low[:-2], high=high))
    if any(repeat.prefix_cache.unverified for repeat in cell.repeats):
        notes.append("not verified")
    return tables.entry(cell.hit_rate, words.percent(cell.hit_rate), *notes)


def _canaries(cell: MeasuredCell) -> Value:
    counts = cell.canaries
    if not counts.sent:
        return NONE
    text = say("cells.of", part=counts.wrong, whole=counts.answered)
    return tables.entry(counts.wrong, text, counts.first_wrong or "", mark="worse" * bool(counts.wrong))


def _failed(cell: MeasuredCell) -> Value:
    failed, total = cell.count("failed"), cell.sent
    kinds = sorted({kind for repeat in cell.repeats for kind in repeat.metrics.failure_kinds})
    why = failure_words(cell.failure_messages, total, kinds=True) or ", ".join(kinds)
    text = say("cells.of", bool(failed), part=failed, whole=total)
    return Value(text or "0", failed, why, "worse" * bool(failed))


def flat_rows(table: ReportTable, comparisons: Comparisons) -> list[dict[str, Any]]:
    """Returns plain numbers for summary.csv: the table of all cells plus what it abbreviates."""
    rows = []
    for row, cell in zip(table.rows, comparisons.by_load, strict=True):
        shown = {column.key: value.sort for column, value in zip(table.columns, row.values, strict=True)}
        flat = _identity(cell)
        flat |= {key: value for key, value in shown.items() if key not in flat}
        for part, steady in (("steady", True), ("whole_run", False)):
            flat |= {f"{part}_ttft_ms_{w}": cell.percentile("ttft_ms", w, steady)[0] for w in ("p50", "p95")}
        window = _WINDOWS[cell.has_steady_latency]
        flat |= {f"{key}_window": window for metric in _latency_figures() if (key := _key(metric)) in shown}
        flat |= {"tokens_per_chunk": median(cell.per_repeat("tokens_per_chunk"))}
        if rates := spread(cell.throughput()):
            bounds = {"min": rates.low, "max": rates.high, "window": _WINDOWS[cell.has_steady]}
            flat |= {f"output_tokens_per_s_{end}": value for end, value in bounds.items()}
        reference, ratio = comparisons.references[cell.load], comparisons.to_reference[cell.cell_id]
        if reference is not None and ratio is not None:
            low, high = ratio.spread
            flat |= {"ratio_to": reference.name, "ratio_min": low, "ratio_max": high, "ratio_verdict": str(ratio.call)}
            flat |= {"ratio_ci95_low": ratio.low, "ratio_ci95_high": ratio.high}
        flat |= accounting(cell)
        rows.append(flat | {f"setting_{k}": v for k, v in cell.settings.items() if not isinstance(v, (dict, list))})
    return rows


def _identity(cell: MeasuredCell) -> dict[str, Any]:
    clock = {"clock": cell.clock} if cell.simulated else {}
    counts = cell.canaries
    canaries = {f"canaries_{name}": getattr(counts, name) for name in ("sent", "answered", "wrong")}
    return {
        "cell_id": cell.cell_id,
        "config_id": cell.config_id,
        "configuration": cell.name,
        **clock,
        "load_mode": cell.load.mode,
        "load": cell.load.value,
        "valid": cell.valid,
        "invalid_reasons": "; ".join(cell.invalid_reasons),
        "refused": "; ".join(cell.refused),
        "wrong_answers": "; ".join(cell.wrong_answers),
        **(canaries if counts.sent else dict.fromkeys(canaries)),
        "repeats": len(cell.repeats),
        "invalid_repeats": len(cell.invalid_repeats),
        "completed": cell.count("completed"),
    }


# --- The tables beside it ---


def cell_parts(
    table: ReportTable, comparisons: Comparisons, slo: str, missing: Sequence[str], problems: Sequence[str]
) -> tuple[Section, ...]:
    """All cells, those that were planned and not measured too, and what failed.

    ``missing``: ids of cells; ``problems``: loads that failed as a whole.
    """
    columns = table.columns if table.rows else table.columns[:1]
    empty = (NONE,) * (len(columns) - 1)
    absent = tuple(Row(None, (Value(cell, cell, "not measured"), *empty), "missing") for cell in missing)
    every = ReportTable(columns, table.rows + absent)
    return (
        Section("cells", "All cells", every, _cells_note(table, comparisons, slo), folded=False),
        Section("failures", "Failures", _failure_table(comparisons.by_load, problems)),
    )


def _cells_note(table: ReportTable, comparisons: Comparisons, slo: str) -> str:
    """The note under the table of all cells, about the marks that it has."""
    others = [cell for cell in comparisons.cells if cell is not comparisons.references[cell.load]]
    ratios = [comparisons.to_reference[cell.cell_id] for cell in others]
    shown = "\n".join(value.text + value.note for row in table.rows for value in row.values)
    sentences = {
        say("cells.note", whole_run=WHOLE_RUN, marks=RATIO_MARKS): True,
        say("cells.medians", give=words.upper_first(MEDIANS)): MEDIANS in shown,
        _smallest_effects({"output tok/s": ratios}): True,
        say("cells.latencies", whole_run=WHOLE_RUN): True,
        say("cells.chunks"): _TOKENS_A_CHUNK in shown,
        say("cells.goodput", slo=slo): bool(slo),
        uncertain_note(): UNCERTAIN in shown,
    }
    return " ".join(text for text, holds in sentences.items() if holds and text)


def uncertain_note() -> str:
    """Explains the mark of percentiles of too few samples."""
    return say("cells.uncertain", samples=SAMPLES_NEEDED)


def _failure_table(cells: Sequence[MeasuredCell], problems: Sequence[str]) -> ReportTable:
    """Failed requests by cell and kind, with the most frequent message; loads that failed as a whole first."""
    rows = [Row(None, (*tables.texts(text), *(NONE,) * 3)) for text in problems]
    for cell in cells:
        for kind, failure in cell.failure_messages.items():
            count = say("cells.of", part=failure.requests, whole=cell.sent)
            rows.append(
                Row(cell, tables.texts(cell.name, cell.load.short, f"{kind}: {failure.message}", count), cell.load)
            )
    return tables.listed_table(("configuration", "load", "failure", "requests"), rows, numbers_from=3)


def served_words(cell: MeasuredCell) -> str:
    """Writes `served 20 of 48 requests and refused the others (28 of 48: "Context size has been exceeded.")`."""
    why = failure_words(cell.failure_messages, cell.sent)
    return say("cells.served", completed=cell.count("completed"), sent=cell.sent, why=why)


def setting_parts(comparisons: Comparisons) -> tuple[Section, ...]:
    """Each setting alone, and the steps of a changing rate."""
    title = f"Each setting alone, as {comparisons.clock}"
    return (
        Section("effects", title, effect_table(comparisons), _effects_note(comparisons)),
        Section("plateaus", "Step by step of the rate", plateau_table(comparisons.cells), say("cells.plateaus")),
    )


def compared_heads() -> list[str]:
    """Returns the heading of each metric in which configurations are compared."""
    return [figure(metric).title.replace("tokens/s", "tok/s") for metric in compared()]


def effect_table(comparisons: Comparisons) -> ReportTable:
    """One setting changed alone: ratios to the baseline, setting by setting, the highest load first."""
    effects = comparisons.alone
    settings = list(dict.fromkeys(e.setting for e in effects))
    changes = list(dict.fromkeys((e.setting, str(e.value)) for e in effects))
    changes.sort(key=lambda change: settings.index(change[0]))
    effects.sort(key=lambda e: (changes.index((e.setting, str(e.value))), -e.cell.load.value))
    rows = []
    for e in effects:
        change = " → ".join(value_words(e.setting, value) for value in (e.baseline_value, e.value))
        ratios = (tables.ratio_value(comparisons.as_served(e.cell, metric), e.cell, e.base) for metric in compared())
        head = tables.texts(setting_title(e.setting), change, e.cell.load.short)
        rows.append(Row(e.cell if e.base.valid else e.base, (*head, *ratios), change))
    return tables.listed_table(("setting", "change", "load", *compared_heads()), rows, numbers_from=3)


def _effects_note(comparisons: Comparisons) -> str:
    cells = [effect.cell for effect in comparisons.alone]
    ratios = [[comparisons.as_served(cell, metric) for cell in cells] for metric in compared()]
    seen = _smallest_effects(dict(zip(compared_heads(), ratios, strict=True)))
    return say("cells.effects", marks=RATIO_MARKS, seen=seen)


def _smallest_effects(ratios: Mapping[str, Sequence[Comparison | None]]) -> str:
    """Says which effects these repeats could have shown; ``ratios``: by metric. Empty where there is no ratio."""
    parts = []
    for metric, of_metric in ratios.items():
        sizes = sorted(ratio.smallest for ratio in of_metric if ratio and ratio.smallest is not None)
        if sizes:
            ends = dict.fromkeys(words.percent(size) for size in (sizes[0], sizes[-1]))
            parts.append(f"{' to '.join(ends)} in {metric}")
    if parts:
        return say("cells.smallest", sizes=", ".join(parts))
    return say("cells.few_repeats", any(map(any, ratios.values())), fewest=FEWEST)


def plateau_table(cells: Sequence[MeasuredCell]) -> ReportTable:
    """A row a cell and step of a changing rate; empty where no rate changes."""
    rows = []
    for cell in cells:
        steps = [repeat.metrics.plateaus for repeat in cell.repeats]
        if len(set(map(len, steps))) == 1:
            rows += [
                Row(cell, tables.texts(cell.name, *plateau_row(step)), cell.name) for step in zip(*steps, strict=True)
            ]
    return tables.listed_table(("configuration", *PLATEAU_HEADS), rows, numbers_from=1)


def group_parts(cells: Sequence[MeasuredCell]) -> tuple[Section, ...]:
    """Latencies by class of request, where there are several, and of the first and later turns of conversations."""
    classes = _group_table(cells, "class", {})
    if len({row.group for row in classes.rows}) < 2:
        classes = NO_TABLE
    turns = _group_table(cells, "turn", {"first": "first turn", "later": "later turns"})
    raw = say("cells.raw_samples")
    return (
        Section("classes", "By class of request", classes, f"{raw} {uncertain_note()}"),
        Section("turns", "By turn of the conversation", turns, raw),
    )


def _group_table(cells: Sequence[MeasuredCell], head: str, titles: Mapping[str, str]) -> ReportTable:
    """Latencies of groups of requests: the highest load first, then by priority, group by group.

    ``titles``: of the groups in their order; all that there are without any.
    """
    groups = []
    for cell in cells:
        stored = cell.latency_groups(f"per_{head}")
        groups += [(cell, titles.get(key, key), stored[key]) for key in titles or stored if key in stored]
    names = list(dict.fromkeys(name for _, name, _ in groups))
    loads = list(dict.fromkeys(cell.load for cell, _, _ in groups))
    urgency = {name: summary.priority or 0 for _, name, summary in groups}
    urgent = head == "class" and len(set(urgency.values())) > 1
    groups.sort(key=lambda group: (loads.index(group[0].load), urgency[group[1]] * urgent, names.index(group[1])))
    rows = []
    for cell, name, summary in groups:
        title = say("cells.priority", name=name, priority=urgency[name]) if urgent else name
        load = Value(cell.load.short, cell.load.value, WHOLE_RUN * (not cell.has_steady_groups(f"per_{head}")))
        shown = [*tables.texts(title), load, *tables.texts(cell.name), Value(str(summary.n), summary.n)]
        for of_group in _OF_GROUPS:
            number = summary.value(of_group.path)
            few = of_group.statistic in summary.distribution(of_group.metric.path).uncertain
            shown.append(Value(words.ms(number) + UNCERTAIN * few, number))
        rows.append(Row(cell, tuple(shown), name))
    heads = (f"{of_group.metric.short} {of_group.statistic}" for of_group in _OF_GROUPS)
    return tables.listed_table((head, "load", "configuration", "requests", *heads), rows, numbers_from=3)
