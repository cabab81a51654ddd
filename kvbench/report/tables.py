"""The table of all cells, once, for HTML, Markdown, CSV and the console."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.common import text as words
from kvbench.report.comparisons import HIGHER, LOWER, Ratio, compare, reference, spread
from kvbench.report.style import RATIO_MARKS, marked_ratio
from kvbench.runs.kv_ledger import accounting
from kvbench.runs.model import MeasuredCell, Run

CLIENT_QUEUE = "client_queue_ms"
TITLES = {CLIENT_QUEUE: "client queue"}
PERCENTILES = (
    ("ttft_ms", "p50"),
    ("ttft_ms", "p95"),
    (CLIENT_QUEUE, "p95"),
    ("tpot_ms", "p50"),
    ("tpot_ms", "p95"),
    ("itl_ms", "p50"),
    ("itl_ms", "p95"),
)
UNCERTAIN = "*"
UNCERTAIN_NOTE = (
    "* too few samples to be 99 % sure that at least two lie above the true percentile (p95 needs 130, p99 662)."
)


@dataclass(frozen=True)
class Value:
    """One table entry: its text, a number to sort by (None sorts last) and a small second line, or several."""

    text: str
    sort: float | str | None = None
    note: str = ""
    mark: str = ""  # "better" | "worse" | ""

    @property
    def uncertain(self) -> bool:
        """Whether it refers to UNCERTAIN_NOTE."""
        return self.text.endswith(UNCERTAIN) or self.note.endswith(UNCERTAIN)


@dataclass(frozen=True)
class Column:
    """`key` names the CSV column; `title` the heading; `hint` explains it."""

    key: str
    title: str
    hint: str
    of: Callable[[Run, MeasuredCell], Value]


@dataclass(frozen=True)
class Row:
    """One cell's entries, in the order of `columns(run)`."""

    cell: MeasuredCell
    values: tuple[Value, ...]


def columns(run: Run) -> list[Column]:
    """The columns this run has something to say in; configuration, load, throughput always."""
    always = {"configuration", "load", "output_tokens_per_s", "failed"}
    hidden = {"ratio"} if len(run.configs) < 2 else set()
    return [
        col
        for col in (*_client_columns(run), *_server_columns(run), FAILED)
        if col.key in always
        or (col.key not in hidden and any(col.of(run, cell).sort is not None for cell in run.cells))
    ]


def _client_columns(run: Run) -> list[Column]:
    """What the client saw."""
    whole = "whole run, raw samples of all repeats"
    steady = ("ttft_ms",)
    hints = {
        "ttft_ms": f"{whole}; small: of the requests due in the steady window",
        CLIENT_QUEUE: f"the part of TTFT for which requests waited in the client for a place under the cap; {whole}",
    }
    return [
        Column("configuration", "configuration", "engine settings", lambda _, c: _configuration(c)),
        Column(
            "load",
            "load",
            "concurrent requests or users (closed loop), requests/s or conversations/s (open loop)",
            lambda _, c: Value(c.load.short, c.load.value),
        ),
        Column(
            "output_tokens_per_s",
            "output tok/s",
            "steady window: median, lowest–highest repeat; then the whole run, ramp-up and drain included",
            lambda _, c: _throughput(c),
        ),
        Column("ratio", f"ratio to {_reference_name(run)}", f"paired by repeat; {RATIO_MARKS}", _ratio),
        *(
            Column(
                f"{metric}_{which}",
                f"{TITLES.get(metric) or metric[:-3].upper()} {which} ms{' (steady)' if metric in steady else ''}",
                hints.get(metric, whole),
                _percentile(metric, which),
            )
            for metric, which in PERCENTILES
        ),
        Column(
            "goodput",
            "goodput",
            f"requests/s that met {words.slo_words(run.load_section.get('slo')) or 'every SLO'}, whole run; small: "
            "their share of all requests, and requests/s in the steady window",
            lambda _, c: _goodput(c),
        ),
    ]


def _server_columns(run: Run) -> list[Column]:
    """What the server's /metrics said; none of it exists for a server without one."""
    state = run.load_section.get("cache_state", "cold") if run.load_section else None
    return [
        Column(
            "running_mean",
            "running",
            "sequences running at once, mean in the steady window",
            lambda _, c: _spread_value(c.observed("running_mean"), words.decimal),
        ),
        Column(
            "kv_usage_peak",
            "peak KV",
            "highest share of the KV budget owned",
            lambda _, c: _spread_value(c.observed("usage_max"), words.percent),
        ),
        Column(
            "waste_share",
            "waste",
            "slots reserved but unused, share of reserved, mean in the steady window",
            lambda _, c: _spread_value(c.observed("waste_share"), words.percent),
        ),
        Column("preemptions", "pre-empted", "preemptions, all repeats", _counter("num_preemptions_total")),
        Column(
            "recomputed_tokens",
            "recom-puted",
            "tokens computed again after a preemption, all repeats",
            _counter("recomputed_tokens_total"),
        ),
        Column(
            "prefix_hit_rate",
            f"prefix hits{f' ({state})' if state else ''}",
            "share of prompt tokens found in the prefix cache; small: what prompts and declared cache state allow, and "
            "whether nothing shows that the cache was in that state (not verified)",
            lambda _, c: _hits(c),
        ),
    ]


FAILED = Column("failed", "failed", "failed requests, all repeats", lambda _, c: _failed(c))


def rows(run: Run) -> list[Row]:
    """One row a cell, configurations in display order within each load, the highest load first."""
    shown = columns(run)
    return [
        Row(cell, tuple(col.of(run, cell) for col in shown)) for load in reversed(run.loads) for cell in run.at(load)
    ]


def flat_rows(run: Run) -> list[dict[str, Any]]:
    """Plain numbers for summary.csv: the table plus what the table abbreviates."""
    found = []
    for row in rows(run):
        cell = row.cell
        flat: dict[str, Any] = {
            "cell_id": cell.cell_id,
            "config_id": cell.config_id,
            "configuration": cell.name,
            "load_mode": cell.load.mode,
            "load": cell.load.value,
            "valid": cell.valid,
            "invalid_reasons": "; ".join(cell.invalid_reasons),
            "repeats": len(cell.repeats),
            "completed": cell.count("completed"),
        }
        for column, value in zip(columns(run), row.values, strict=True):
            if column.key not in flat:
                flat[column.key] = value.sort
        flat |= {f"steady_ttft_ms_{w}": cell.percentile("steady_latency.ttft_ms", w)[0] for w in ("p50", "p95")}
        s, ref = spread(cell.throughput()), reference(run, cell.load)
        flat |= {"output_tokens_per_s_min": s.low, "output_tokens_per_s_max": s.high} if s else {}
        if ref is not None and (r := compare(cell, ref).throughput) is not None:
            flat |= {
                "ratio_to": ref.name,
                "ratio_min": r.low,
                "ratio_max": r.high,
                "ratio_verdict": r.verdict,
                "ratio_ci95_low": r.ci[0] if r.ci else None,
                "ratio_ci95_high": r.ci[1] if r.ci else None,
            }
        flat |= accounting(cell)
        found.append(flat | {f"setting_{k}": v for k, v in cell.settings.items() if not isinstance(v, (dict, list))})
    return found


def ratio_value(r: Ratio | None, higher_is_better: bool = True) -> Value:
    """A ratio with its spread, marked better or worse where the verdict is one of the two."""
    if r is None:
        return Value("–")
    note = f"{words.ratio(r.low)[:-1]}–{words.ratio(r.high)[:-1]}" if r.n > 1 else "one repeat"
    mark = ("better" if (r.verdict == HIGHER) == higher_is_better else "worse") if r.verdict in (HIGHER, LOWER) else ""
    return Value(marked_ratio(r), r.median, note, mark)


def _configuration(cell: MeasuredCell) -> Value:
    notes = [n for n, true in (("baseline", cell.is_baseline), ("invalid", not cell.valid)) if true]
    return Value(cell.name, cell.name, ", ".join(notes), "" if cell.valid else "worse")


def _reference_name(run: Run) -> str:
    ref = reference(run, run.loads[-1]) if run.loads else None
    return ref.name if ref else "baseline"


def _throughput(cell: MeasuredCell) -> Value:
    s = spread(cell.throughput())
    if s is None:
        return Value("–")
    note = f"{words.tokens_per_s(s.low)}–{words.tokens_per_s(s.high)}" if s.n > 1 else "one repeat"
    whole = spread(cell.throughput(steady=False))
    if not cell.has_steady:
        note += "\nwhole run"
    elif whole is not None:
        note += f"\nwhole {words.tokens_per_s(whole.median)}"
    return Value(words.tokens_per_s(s.median), s.median, note)


def _goodput(cell: MeasuredCell) -> Value:
    s = spread(cell.per_repeat("goodput"))
    if s is None:
        return Value("–")
    shares = {r: v * cell.per_repeat("duration_s").get(r, 0.0) for r, v in cell.per_repeat("goodput").items()}
    sent = cell.count("completed") + cell.count("failed")
    notes = [words.percent(sum(shares.values()) / sent)] if sent and sum(shares.values()) else []
    if (steady := spread(cell.per_repeat("steady_goodput"))) is not None:
        notes.append(f"steady {words.significant(steady.median)}")
    return Value(words.significant(s.median), s.median, "\n".join(notes))


def _hits(cell: MeasuredCell) -> Value:
    possible = cell.possible_hits if cell.hit_rate is not None else None
    notes = [] if possible is None else [f"of {words.percent(possible[0])[:-2]}–{words.percent(possible[1])}"]
    notes += ["not verified"] if any(r.cache.get("unverified") for r in cell.repeats) else []
    return Value(words.percent(cell.hit_rate), cell.hit_rate, "\n".join(notes))


def _ratio(run: Run, cell: MeasuredCell) -> Value:
    ref = reference(run, cell.load)
    r = compare(cell, ref).throughput if ref is not None and ref is not cell else None
    if r is None:
        return Value("1" if ref is cell else "–", 1.0 if ref is cell else None)
    return ratio_value(r)


def _percentile(metric: str, which: str) -> Callable[[Run, MeasuredCell], Value]:
    def text(value: float | None, uncertain: bool) -> str:
        return words.milliseconds(value) + (UNCERTAIN if uncertain else "")

    def of(_: Run, cell: MeasuredCell) -> Value:
        value, uncertain = cell.percentile(metric, which)
        steady = cell.percentile(f"steady_latency.{metric}", which) if metric == "ttft_ms" else (None, False)
        note = "" if steady[0] is None else text(*steady)
        return Value(text(value, uncertain), value, note)

    return of


def _counter(name: str) -> Callable[[Run, MeasuredCell], Value]:
    def of(_: Run, cell: MeasuredCell) -> Value:
        value = cell.counter(name)
        return Value(words.count(value), value)

    return of


def _spread_value(values: Mapping[int, float], render: Callable[[float | None], str]) -> Value:
    s = spread(values)
    return Value(render(s.median), s.median) if s else Value("–")


def _failed(cell: MeasuredCell) -> Value:
    failed, total = cell.count("failed"), cell.count("failed") + cell.count("completed")
    kinds = sorted({kind for r in cell.repeats for kind in (r.metrics.get("failure_kinds") or {})})
    return Value(f"{failed} of {total}" if failed else "0", failed, ", ".join(kinds), "worse" if failed else "")
