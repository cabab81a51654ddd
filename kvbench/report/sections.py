"""The chapters below the report's first screen, in their order: figures, and tables that HTML and Markdown share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.common import text as words
from kvbench.report import simulated
from kvbench.report.client_quality import QUALITY_NOTE, quality_sentences, quality_table
from kvbench.report.comparisons import effects, paging
from kvbench.report.engine_time import engine_time_note, engine_time_table
from kvbench.report.figures import (
    answer_quality,
    distributions,
    frontier,
    heat_map,
    hits,
    kv_timeline,
    slowest,
    step_time,
)
from kvbench.report.hits import hit_sentences, hit_table
from kvbench.report.kv import ledger_figure, ledger_note, ledger_table, memory_table
from kvbench.report.limits import limits
from kvbench.report.load_growth import NOTE as GROWTH_NOTE
from kvbench.report.load_growth import growth_sentence, growth_table
from kvbench.report.predictions import PREDICTIONS_NOTE, prediction_sentences, prediction_table
from kvbench.report.quality import ANSWERS_NOTE, answer_quality_table, answer_sentences, passkey_table
from kvbench.report.samples import OutputSamples
from kvbench.report.style import Drawing
from kvbench.report.tables import (
    CHUNKS_NOTE,
    MEDIANS,
    TOKENS_A_CHUNK,
    UNCERTAIN,
    UNCERTAIN_NOTE,
    WHOLE_RUN,
    Column,
    Row,
    Table,
    Value,
    latency_ratio,
    main_table,
    percentile_value,
    throughput_ratio,
)
from kvbench.report.wording import RATIO_MARKS, ledger_sentence, reservation, sensitivity, smallest_effects
from kvbench.runs.aggregate import PLATEAU_HEADS, plateau_row
from kvbench.runs.model import MeasuredCell, Run, number
from kvbench.workload.settings import setting_title, value_words

_CLASS_METRICS = (("ttft_ms", "p50"), ("ttft_ms", "p95"), ("tpot_ms", "p50"), ("tpot_ms", "p95"), ("e2el_ms", "p95"))
_HITS_NOTE = "Shares of the prompt tokens. Each gap is that to the column before; simulated from the prompts sent."
_PLATEAU_NOTE = (
    "The steady part of each step of the rate, median over repeats. A step that answers far fewer requests/s than its "
    "rate is beyond what the configuration can serve."
)


@dataclass(frozen=True)
class Section:
    """A table with its title, sentences above and a note below; ``folded``: opened by the reader of the page."""

    key: str
    title: str
    table: Table
    note: str = ""
    sentences: tuple[str, ...] = ()
    folded: bool = True


@dataclass(frozen=True)
class Chapter:
    """A heading with its figures and tables; ``sentences`` stand above both."""

    title: str
    sections: tuple[Section, ...] = ()
    drawings: tuple[Drawing, ...] = ()
    sentences: tuple[str, ...] = field(default=())


def chapters(run: Run, samples: OutputSamples | None, price_per_hour: float | None = None) -> list[Chapter]:
    """Every chapter that has something to show, without empty sections; ``samples``: of the run's outputs."""
    found = []
    for each in (*_chapters_by_subject(run, samples), _all_cells(run, price_per_hour)):
        kept = tuple(section for section in each.sections if section.table.rows)
        if kept or each.drawings:
            found.append(Chapter(each.title, kept, each.drawings, each.sentences))
    return found


def _chapters_by_subject(run: Run, samples: OutputSamples | None) -> list[Chapter]:
    """All chapters but the last in the order of the report, also those that have nothing to show."""
    ledger = ledger_table(run)
    kv = tuple(filter(None, (ledger_sentence(run), *(reservation(pair) for pair in paging(run)[-1:]))))
    timelines = (kv_timeline.drawing(run, load) for load in reversed(run.loads))
    return [
        Chapter(
            "As the load grows",
            (Section("growth", "p95 TTFT by load", growth_table(run), GROWTH_NOTE, folded=False),),
            sentences=tuple(filter(None, (growth_sentence(run),))),
        ),
        Chapter(
            "Quality of the answers",
            (
                Section("answer-quality", "By configuration", answer_quality_table(run), ANSWERS_NOTE, folded=False),
                Section("passkeys", "Where passkeys go wrong", passkey_table(run)),
            ),
            _drawn(answer_quality.drawing(run)), tuple(answer_sentences(run)),
        ),
        Chapter(
            "Where the KV bytes went",
            (
                Section("ledger", "Use by use", ledger, ledger_note(ledger)),
                Section("memory", "Bytes a token, scales and page table", memory_table(run)),
            ),
            _drawn(ledger_figure(run), *timelines), kv,
        ),
        Chapter(
            "Latencies",
            (
                Section("slowest", "The slowest requests", slowest.slowest_table(run)),
                Section("classes", "By class of request", class_table(run), f"Raw samples. {UNCERTAIN_NOTE}"),
                Section("turns", "By turn of the conversation", turn_table(run), "Raw samples of all repeats."),
            ),
            _drawn(distributions.drawing(run), slowest.drawing(run)),
        ),
        Chapter(
            "Prefix cache: hits", (Section("hits", "From what is shared to what was hit", hit_table(run), _HITS_NOTE),),
            _drawn(hits.drawing(run)), tuple(hit_sentences(run)),
        ),
        Chapter(
            "Inside the engine",
            (
                Section("simulated_time", "Where the simulated time goes", simulated.time_table(run),
                        simulated.TIME_NOTE, folded=False),
                Section("steps", "Step time", step_time.step_time_table(run)),
            ),
            _drawn(step_time.drawing(run), heat_map.drawing(run)),
        ),
        Chapter(
            "Predicted by simulation",
            (Section("predictions", "Cell by cell", prediction_table(run), PREDICTIONS_NOTE, folded=False),),
            (), tuple(prediction_sentences(run)),
        ),
        Chapter(
            "Outputs side by side",
            (Section("outputs", "Equal to the baseline", agreement_table(samples), _outputs_note(samples)),),
        ),
    ]  # fmt: skip


def _all_cells(run: Run, price_per_hour: float | None) -> Chapter:
    """The tables that have a row a cell or a load."""
    cells = _with_missing(run, main_table(run))
    return Chapter(
        "All cells",
        (
            Section("cells", "All cells", cells, _cells_note(run), folded=False),
            Section("failures", "Failures", failure_table(run)),
            Section("limits", "What limited each cell", limit_table(run)),
            Section("frontier", "Throughput against latency", frontier.frontier_table(run, price_per_hour)),
            Section("engine_time", "Engine time", engine_time_table(run), engine_time_note(run)),
            Section("effects", f"Each setting alone, as {run.clock}", effect_table(run), _effects_note(run)),
            Section("plateaus", "Step by step of the rate", plateau_table(run), _PLATEAU_NOTE),
            Section(
                "quality", "How good the measurement was",
                Table((), ()) if run.simulated else quality_table(run), QUALITY_NOTE, tuple(quality_sentences(run)),
            ),
        ),
    )  # fmt: skip


def _drawn(*drawings: Drawing | None) -> tuple[Drawing, ...]:
    return tuple(drawing for drawing in drawings if drawing is not None)


def _effects_note(run: Run) -> str:
    compared = [effect.comparison for effect in effects(run) if effect.comparison.valid]
    seen = smallest_effects({"output tok/s": [c.throughput for c in compared], "p95 TTFT": [c.ttft for c in compared],
                             "p50 TPOT": [c.tpot for c in compared], "p95 ITL": [c.itl for c in compared]})  # fmt: skip
    return f"Ratio to the baseline, paired by repeat: median and, small, lowest to highest. {RATIO_MARKS}. {seen}"


def _with_missing(run: Run, table: Table) -> Table:
    """Cells that were planned and not measured as rows of their own."""
    empty = (Value("–"),) * (len(table.columns) - 1)
    cells = () if run.not_kept else run.missing
    missing = tuple(Row(None, (Value(cell, cell, "not measured"), *empty), "missing") for cell in cells)
    return Table(table.columns, table.rows + missing)


def _cells_note(run: Run) -> str:
    slo = words.slo_words(run.load_section.get("slo"))
    texts = [value.text + value.note for row in main_table(run).rows for value in row.values]
    found = {
        f"Medians over repeats, small: lowest to highest; of the steady window, else marked {WHOLE_RUN}. Ratios are "
        f"paired by repeat: {RATIO_MARKS}.": True,
        f"{words.upper_first(MEDIANS)}: the ratio of the medians shown.": any(MEDIANS in text for text in texts),
        sensitivity(run): True,
        f"Latencies: raw samples of the requests due in the steady window, else marked {WHOLE_RUN}.": True,
        CHUNKS_NOTE: any(TOKENS_A_CHUNK in text for text in texts),
        f"Goodput: requests/s that met {slo}.": bool(slo),
        UNCERTAIN_NOTE: any(UNCERTAIN in text for text in texts),
    }
    return " ".join(text for text, holds in found.items() if holds and text)


def _outputs_note(samples: OutputSamples | None) -> str:
    return "Random weights: a difference says nothing of quality." if samples and samples.random_weights else ""


def agreement_table(samples: OutputSamples | None) -> Table:
    """How many outputs of each configuration are the baseline's; no rows where no outputs are stored."""
    rows = [
        Row(None, (Value(each.configuration, each.configuration), Value(str(each), each.equal / each.both)))
        for each in (samples.agreements if samples else ())
    ]
    return Table((Column("configuration", "configuration"), Column("equal", "outputs")), tuple(rows))


def limit_table(run: Run) -> Table:
    """The limit of each valid cell with everything that the rules saw."""
    rows = []
    for each in limits(run):
        shown = (each.cell.name, each.cell.load.short, each.limit, "; ".join(each.evidence) or "–")
        rows.append(Row(each.cell, tuple(Value(text, text) for text in shown), each.cell.load))
    heads = ("configuration", "load", "limit", "seen")
    return Table(tuple(Column(head, head) for head in heads), tuple(rows), numbers_from=4)


def failure_table(run: Run) -> Table:
    """Failed requests by cell and kind, with the most frequent message; loads that failed as a whole first."""
    rows = [Row(None, (Value(text, text), *(Value("–"),) * 3)) for text in run.problems]
    for cell in run.by_load:
        for kind, each in cell.failure_messages.items():
            shown = (
                cell.name, cell.load.short, f"{kind}: {each['message']}", f"{each['requests']} of {cell.sent}",
            )  # fmt: skip
            rows.append(Row(cell, tuple(Value(text, text) for text in shown), cell.load))
    heads = ("configuration", "load", "failure", "requests")
    return Table(tuple(Column(head, head) for head in heads), tuple(rows), numbers_from=3)


def effect_table(run: Run) -> Table:
    """One setting changed alone: ratios to the baseline, setting by setting, the highest load first."""
    listed = effects(run)
    values = list(dict.fromkeys((e.setting, str(e.value)) for e in listed))
    settings = list(dict.fromkeys(setting for setting, _ in values))
    listed.sort(
        key=lambda e: (settings.index(e.setting), values.index((e.setting, str(e.value))), -e.comparison.load.value)
    )
    rows = []
    for e in listed:
        c = e.comparison
        change = " → ".join(value_words(e.setting, value) for value in (e.baseline_value, e.value))
        head = (setting_title(e.setting), change, c.load.short)
        latencies = (latency_ratio(c, r) for r in (c.ttft, c.tpot, c.itl))
        shown = (*(Value(text, text) for text in head), throughput_ratio(c), *latencies)
        rows.append(Row(c.a if c.b.valid else c.b, shown, change))
    heads = ("setting", "change", "load", "output tok/s", "p95 TTFT", "p50 TPOT", "p95 ITL")
    return Table(tuple(Column(head, head) for head in heads), tuple(rows), numbers_from=3)


def class_table(run: Run) -> Table:
    """Latencies by class of request, the most urgent first; empty when there are fewer than two classes."""
    table = _group_table(run, "class", lambda cell: cell.latency_groups("per_class"))
    return table if len({row.group for row in table.rows}) > 1 else Table((), ())


def turn_table(run: Run) -> Table:
    """Latencies of the first and of later turns of conversations; empty for a workload without."""
    titles = {"first": "first turn", "later": "later turns"}

    def per_turn(cell: MeasuredCell) -> Mapping[str, Any]:
        found = cell.latency_groups("per_turn")
        return {title: found[key] for key, title in titles.items() if found.get(key)}

    return _group_table(run, "turn", per_turn)


def _group_table(run: Run, head: str, groups: Callable[[MeasuredCell], Mapping[str, Any]]) -> Table:
    """Latencies of groups of requests: the highest load first, then by priority, group by group."""
    found = [(cell, name, summary) for cell in run.by_load for name, summary in groups(cell).items() if summary]
    names = list(dict.fromkeys(name for _, name, _ in found))
    loads = list(dict.fromkeys(cell.load for cell, _, _ in found))
    urgency = {name: int(number(summary.get("priority")) or 0) for _, name, summary in found}
    urgent = head == "class" and len(set(urgency.values())) > 1
    found.sort(key=lambda each: (loads.index(each[0].load), urgency[each[1]] * urgent, names.index(each[1])))
    rows = []
    for cell, name, summary in found:
        n = int(number(summary.get("n")) or 0)
        title = f"{name} (priority {urgency[name]})" if urgent else name
        latencies = (percentile_value(summary.get(metric) or {}, which) for metric, which in _CLASS_METRICS)
        whole = "" if cell.has_steady_groups(f"per_{head}") else WHOLE_RUN
        shown = (Value(title, title), Value(cell.load.short, cell.load.value, whole), Value(cell.name, cell.name))
        rows.append(Row(cell, (*shown, Value(str(n), n), *latencies), name))
    heads = (head, "load", "configuration", "requests", *(f"{m[:-3].upper()} {w}" for m, w in _CLASS_METRICS))
    return Table(tuple(Column(title, title) for title in heads), tuple(rows), numbers_from=3)


def plateau_table(run: Run) -> Table:
    """What each step of a changing rate came to, cell by cell; empty where no rate changes."""
    rows = []
    for cell in run.cells:
        steps = [repeat.metrics.get("plateaus") or () for repeat in cell.repeats]
        if len({len(each) for each in steps}) == 1:
            for repeats in zip(*steps, strict=True):
                row = (cell.name, *plateau_row(repeats))
                rows.append(Row(cell, tuple(Value(text, text) for text in row), cell.name))
    heads = ("configuration", *PLATEAU_HEADS)
    return Table(tuple(Column(head, head) for head in heads), tuple(rows), numbers_from=1)
