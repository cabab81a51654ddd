"""The tables of the report: entries, columns, and the table of all cells for HTML, Markdown, CSV and the console."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.common import text as words
from kvbench.metrics.latency import LONG_OPEN, SAMPLES_NEEDED
from kvbench.report.comparisons import PairedComparison, compare, median, reference, spread
from kvbench.report.wording import RATIO_MARKS, Render, marked_ratio
from kvbench.runs.kv_ledger import accounting
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.ratios import HIGHER, LOWER, UNCLEAR, Ratio

WHOLE_RUN = "whole run"  # beside a throughput or latency that is not of the steady window
TOKENS_A_CHUNK = "tokens a chunk"  # beside an ITL
CHUNKS_NOTE = "ITL is between chunks: where they carry several tokens, TPOT is the time of a token."
MEDIANS = "medians give"  # before the ratio of two medians that contradicts the paired one
UNCERTAIN = "*"
UNCERTAIN_NOTE = f"* too few samples for 99 % confidence ({SAMPLES_NEEDED})."
_PERCENTILES = (
    ("ttft_ms", "p50"),
    ("ttft_ms", "p95"),
    ("ttfo_ms", "p50"),
    ("ttfo_ms", "p95"),
    ("reasoning_ms", "p50"),
    ("client_queue_ms", "p95"),
    ("tpot_ms", "p50"),
    ("tpot_ms", "p95"),
    ("itl_ms", "p50"),
    ("itl_ms", "p95"),
)


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
class Table:
    """Columns and rows; columns from ``numbers_from`` on are right-aligned."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    numbers_from: int = 2


def cell_table(
    every: Sequence[Column], cells: Sequence[MeasuredCell], always: set[str], numbers_from: int = 2
) -> Table:
    """One row a cell; of the columns those in ``always`` and those that have a value in some cell."""
    shown = tuple(c for c in every if c.key in always or any(c.of(cell).sort is not None for cell in cells))
    return Table(shown, tuple(Row(cell, tuple(c.of(cell) for c in shown), cell.load) for cell in cells), numbers_from)


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


PREEMPTED = number_column(
    "preemptions",
    "pre\u00adempted",
    "preemptions, all repeats",
    lambda c: c.counter("num_preemptions_total"),
    words.count,
)
RECOMPUTED = number_column(
    "recomputed_tokens",
    "recom\u00adputed",
    "tokens computed again after a preemption, all repeats",
    lambda c: c.counter("recomputed_tokens_total"),
    words.count,
)


def main_table(run: Run) -> Table:
    """All cells, the highest load first, in the columns that this run has values for."""
    ref = reference(run, run.loads[-1]) if run.loads else None
    every = [
        Column("configuration", "configuration", "engine settings", _configuration),
        identity_columns()[1],
        Column(
            "output_tokens_per_s",
            "output tok/s",
            "steady window: median, lowest–highest repeat; then the whole run, ramp-up and drain included",
            _throughput,
        ),
        Column(
            "non_reasoning_tokens_per_s",
            "tok/s without reasoning",
            "output tokens/s without reasoning, in the same window; small: reasoning's share of the output tokens",
            _without_reasoning,
        ),
        Column(
            "ratio",
            f"ratio to {ref.name if ref else 'baseline'}",
            f"paired by repeat; {RATIO_MARKS}",
            lambda c: _ratio_to(reference(run, c.load), c),
        ),
        *(_percentile_column(metric, which) for metric, which in _PERCENTILES),
        Column(
            "goodput",
            "goodput",
            f"requests/s that met {words.slo_words(run.load_section.get('slo')) or 'every SLO'}, whole run; small: "
            "their share of all requests, and requests/s in the steady window",
            _goodput,
        ),
        *_server_columns(run),
        Column(
            "open_after_last_ms",
            "open after last chunk ms",
            "median time that a stream stayed open after its last chunk: not in E2EL, but a user's next request waits "
            "for it; small: its share of the requests' time",
            _open_after_last,
        ),
        Column("failed", "failed", "failed requests, all repeats", _failed),
        Column("canaries_wrong", "canaries wrong", "requests with known answers, all repeats", _canaries),
    ]
    every = [column for column in every if column.key != "ratio" or len(run.configs) > 1]
    return cell_table(every, run.by_load, {"configuration", "load", "output_tokens_per_s", "failed"})


def _server_columns(run: Run) -> list[Column]:
    """From the server's /metrics; empty for a server without one."""

    def gauge(key: str, title: str, hint: str, name: str, render: Render) -> Column:
        return number_column(key, title, hint, lambda cell: median(cell.observed(name)), render)

    state = f" ({run.cache_state})" if run.load_section else ""
    mean = "mean in the steady window"
    return [
        gauge("running_mean", "running", f"sequences running at once, {mean}", "running_mean", words.decimal),
        gauge("kv_usage_peak", "peak KV", "highest share of the KV budget owned", "usage_max", words.percent),
        gauge(
            "waste_share", "waste", f"slots reserved but unused, share of reserved, {mean}", "waste_share",
            words.percent,
        ),
        PREEMPTED,
        RECOMPUTED,
        Column(
            "prefix_hit_rate",
            f"prefix hits{state}",
            "share of prompt tokens found in the prefix cache; small: what prompts and declared cache state allow, and "
            "whether nothing shows that the cache was in that state (not verified)",
            _hits,
        ),
    ]  # fmt: skip


def flat_rows(run: Run) -> list[dict[str, Any]]:
    """Plain numbers for summary.csv: the table plus what the table abbreviates."""
    found = []
    table = main_table(run)
    for row, cell in zip(table.rows, run.by_load, strict=True):
        flat: dict[str, Any] = {
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
            **{f"canaries_{name}": cell.canaries.get(name) for name in ("sent", "answered", "wrong")},
            "repeats": len(cell.repeats),
            "invalid_repeats": len(cell.invalid_repeats),
            "completed": cell.count("completed"),
        }
        shown = {column.key: value.sort for column, value in zip(table.columns, row.values, strict=True)}
        flat |= {key: value for key, value in shown.items() if key not in flat}
        for part, steady in (("steady", True), ("whole_run", False)):
            flat |= {f"{part}_ttft_ms_{w}": cell.percentile("ttft_ms", w, steady)[0] for w in ("p50", "p95")}
        in_steady, windows = cell.has_steady_latency, {True: "steady window", False: WHOLE_RUN}
        flat |= {f"{metric}_{w}_window": windows[in_steady] for metric, w in _PERCENTILES if f"{metric}_{w}" in shown}
        flat |= {"tokens_per_chunk": median(cell.per_repeat("tokens_per_chunk"))}
        s, ref = spread(cell.throughput()), reference(run, cell.load)
        bounds = {"min": s.low, "max": s.high, "window": windows[cell.has_steady]} if s else {}
        flat |= {f"output_tokens_per_s_{end}": value for end, value in bounds.items()}
        if ref is not None and (r := compare(cell, ref).throughput) is not None:
            flat |= {"ratio_to": ref.name, "ratio_min": r.low, "ratio_max": r.high, "ratio_verdict": r.verdict}
            flat |= dict(zip(("ratio_ci95_low", "ratio_ci95_high"), r.ci or (None, None), strict=True))
        flat |= accounting(cell)
        found.append(flat | {f"setting_{k}": v for k, v in cell.settings.items() if not isinstance(v, (dict, list))})
    return found


def ratio_value(r: Ratio | None, higher_is_better: bool = True) -> Value:
    """A ratio with its spread, marked better or worse where the verdict is one of the two.

    One that is not told apart from 1 has the smallest effect that its repeats could have shown in a line of its own.
    """
    if r is None:
        return Value("–")
    note = f"{words.ratio(r.low)[:-1]}–{words.ratio(r.high)[:-1]}" if r.n > 1 else "one repeat"
    if r.verdict == UNCLEAR and r.detectable is not None:
        note += f"\n{words.percent(r.detectable)} would show"
    mark = ("better" if (r.verdict == HIGHER) == higher_is_better else "worse") if r.verdict in (HIGHER, LOWER) else ""
    return Value(marked_ratio(r), r.median, note, mark)


def throughput_ratio(c: PairedComparison) -> Value:
    """Of output tokens/s; says where it is of the whole run, and where the medians shown have visibly another ratio."""
    value, notes = ratio_value(c.throughput), []
    if c.throughput is not None and not c.steady:
        notes.append(WHOLE_RUN)
    if c.of_medians is not None:
        notes.append(f"{MEDIANS} {words.ratio(c.of_medians)}")
    return replace(value, note="\n".join([value.note, *notes]))


def latency_ratio(c: PairedComparison, ratio: Ratio | None) -> Value:
    """The entry of the ratio of one of its latencies; says where it is of the whole run."""
    value = ratio_value(ratio, higher_is_better=False)
    return value if ratio is None or c.steady_latency else replace(value, note=f"{value.note}\n{WHOLE_RUN}")


def _ratio_to(ref: MeasuredCell | None, cell: MeasuredCell) -> Value:
    if ref is None or (cell is ref and not cell.valid):
        return Value("–")
    return Value("1", 1.0) if cell is ref else throughput_ratio(compare(cell, ref))


def percentile_value(summary: Mapping[str, Any], which: str, render: Render = words.ms) -> Value:
    """A percentile of a latency summary, marked where it is of too few samples."""
    value = summary.get(which)
    return Value(render(value) + UNCERTAIN * (which in (summary.get("uncertain") or ())), value)


def _percentile_column(metric: str, which: str) -> Column:
    title, hint = metric[:-3].upper(), "requests due in the steady window, raw samples of all repeats"
    if metric == "client_queue_ms":
        title = "client queue"
        hint = f"the part of TTFT for which requests waited in the client because of the cap; {hint}"
    elif metric == "reasoning_ms":
        title, hint = "reasoning", f"from a request's first chunk of reasoning to its first text or tool call; {hint}"
    elif metric == "ttfo_ms":
        hint = f"to the first text or tool call, where reasoning or text held back comes before it; {hint}"
    elif metric == "ttft_ms":
        hint += "; small: of the whole run, or the other way round"
    elif metric == "itl_ms":
        hint += f"; small: {TOKENS_A_CHUNK}, where they are several"

    def of(cell: MeasuredCell) -> Value:
        (value, uncertain), is_steady = cell.percentile(metric, which), cell.has_steady_latency
        (other, few), per_chunk = cell.percentile(metric, which, not is_steady), cell.several_tokens_per_chunk
        shown, ttft = words.milliseconds(value), cell.percentile("ttft_ms", which)[0]
        silent = cell.count("without_output")  # requests that have a TTFT and no TTFO
        if metric == "ttfo_ms" and not silent and (value is None or shown == words.milliseconds(ttft)):
            return Value("as TTFT")
        notes = [] if value is None or is_steady else [WHOLE_RUN]
        if other is not None and metric == "ttft_ms":
            notes.append(f"{'whole' if is_steady else 'steady'} {words.milliseconds(other)}{UNCERTAIN * few}")
        if value is not None and metric == "itl_ms" and per_chunk:
            notes.append(f"{per_chunk:.1f} {TOKENS_A_CHUNK}")
        return Value(shown + UNCERTAIN * uncertain, value, "\n".join(notes))

    return Column(f"{metric}_{which}", f"{title} {which} ms", hint, of)


def _configuration(cell: MeasuredCell) -> Value:
    notes = filter(None, ("baseline" if cell.is_baseline else "", cell.doubt))
    return Value(cell.name, cell.name, ", ".join(notes), "" if cell.valid else "worse")


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
    notes += ["not verified"] if any(r.cache.get("unverified") for r in cell.repeats) else []
    return Value(words.percent(cell.hit_rate), cell.hit_rate, "\n".join(notes))


def _canaries(cell: MeasuredCell) -> Value:
    wrong, answered = cell.canaries.get("wrong"), cell.canaries.get("answered")
    if not cell.canaries:
        return Value("–")
    return Value(f"{wrong} of {answered}", wrong, cell.canaries.get("first_wrong", ""), "worse" if wrong else "")


def _failed(cell: MeasuredCell) -> Value:
    failed, total = cell.count("failed"), cell.sent
    kinds = sorted({kind for r in cell.repeats for kind in (r.metrics.get("failure_kinds") or {})})
    why = words.failure_words(cell.failure_messages, total, kinds=True) or ", ".join(kinds)
    return Value(f"{failed} of {total}" if failed else "0", failed, why, "worse" if failed else "")
