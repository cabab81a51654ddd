"""The slowest requests of one cell, each as a timeline: waiting in the client, waiting for its first token, decode."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from textwrap import shorten

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvbench.common import text as words
from kvbench.metrics.rows import MS, inter_token_latencies, times_to_end
from kvbench.report.comparisons import Comparisons, best
from kvbench.report.style import Drawing, compact, finish, hatch, label_above, legend_outside, room_for_labels
from kvbench.report.tables import Part, ReportTable, Row, Section, Value, listed_table, texts
from kvbench.runs.model import MeasuredCell

MOST = 10  # requests
LONG_GAP = 5.0  # times the median ITL
CLIENT, FIRST, DECODE, GAP = "client", "first token", "decode", "gap"
_PARTS: Mapping[str, tuple[str, str, str]] = {  # part -> title, colour, pattern
    CLIENT: ("waiting in the client", "#8A8A8A", "x"),
    FIRST: ("waiting for the first token", "#56B4E9", "/"),
    DECODE: ("decoding", "#0072B2", ""),
    GAP: (f"gap over {LONG_GAP:g}x the median ITL", "#D55E00", "\\"),
}
_SAID = {GAP: "in long gaps"}  # in a title
_COLUMNS = ("request", "index", "repeat", "class", "prompt_tokens", "output_tokens", "part", "start_ms", "ms")
_ROW = 42  # px


def slowest_of(comparisons: Comparisons) -> MeasuredCell | None:
    """The cell whose requests are shown: the baseline at the highest load, else the best one there; valid only."""
    for load in reversed(comparisons.loads):
        for cell in (comparisons.baselines[load], best(comparisons.at(load))):
            if cell is not None and cell.valid and len(cell.requests()):
                return cell
    return None


def slowest(requests: pd.DataFrame) -> pd.DataFrame:
    """The slowest of the successful ``requests`` (rows of requests.parquet) by E2EL; a row a part of one's time.

    request: 1 (slowest) to MOST
    index, repeat, class, prompt_tokens, output_tokens: of the request
    part: CLIENT (waited under max_concurrency), FIRST (then until the first token), DECODE, or GAP: one gap between
      chunks of more than LONG_GAP times the median ITL of all requests; the parts of a request add up to its E2EL
    start_ms, ms: since the intended start, and how long
    """
    e2el = (requests["last"] - requests["t0"]).astype(float)
    top = requests.loc[e2el.sort_values(ascending=False, kind="stable").index[:MOST]]
    gaps = inter_token_latencies(requests)
    limit = LONG_GAP * float(np.median(gaps)) if len(gaps) else np.inf
    rows = []
    for place, (_, request) in enumerate(top.iterrows(), start=1):
        of = {"request": place, **{name: request.get(name) for name in _COLUMNS[1:6]}}
        rows += [of | {"part": part, "start_ms": at, "ms": ms} for part, at, ms in _parts(request, limit)]
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def _parts(request: pd.Series, limit: float) -> list[tuple[str, float, float]]:
    """(part, start, length) [ms] in order, neighbours of the same part as one; ``limit`` [ms]: longer gaps are GAP.

    Of several sequences, those of the one that ended last.
    """
    times = (times_to_end(request) - request["t0"]) * MS  # [chunks]
    times = times if len(times) else np.array([(request["last"] - request["t0"]) * MS])
    queued = min(float(np.nan_to_num(request.get("queued_s", 0.0))) * MS, float(times[0]))
    edges = [(CLIENT, 0.0, queued), (FIRST, queued, float(times[0]))]
    for start, end in pairwise(times):
        part = GAP if end - start > limit else DECODE
        if part == DECODE and edges[-1][0] == DECODE:
            start = edges.pop()[1]
        edges.append((part, float(start), float(end)))
    return [(part, start, end - start) for part, start, end in edges if end > start]


def slowest_figure(frame: pd.DataFrame) -> go.Figure:
    """A bar a request, the slowest on top, its parts after one another; above it who it is and how long it took."""
    figure, count = go.Figure(), int(frame["request"].max())
    for part, (title, colour, pattern) in _PARTS.items():
        rows = frame[frame["part"] == part]
        if len(rows):
            figure.add_bar(
                y=rows["request"].astype("int8"),
                x=compact(rows["ms"], 1),
                base=compact(rows["start_ms"], 1),
                width=0.4,
                orientation="h",
                name=title,
                marker={"color": colour, "line": {"width": 0}, "pattern": hatch(pattern, 0.2)},
                hovertemplate=f"{title}: %{{x:,.0f}} ms, from %{{base:,.0f}} ms on<extra></extra>",
            )
    for place, rows in frame.groupby("request"):
        label_above(figure, place, _label(rows))
    figure.update_xaxes(title_text="ms since the intended start", rangemode="tozero", tickformat=",")
    figure.update_yaxes(range=[count + 0.5, 0.3], showticklabels=False, showgrid=False)
    finish(figure, _ROW * count + 130)
    legend_outside(figure, 1.0)
    figure.update_layout(barmode="overlay", margin={"t": 24, "b": 52, "l": 16, "r": 40})
    return figure


def _label(parts: pd.DataFrame) -> str:
    """How long a request took, its class, prompt and output tokens, and which it is."""
    one = parts.iloc[0]
    kind, tokens = shorten(str(one["class"]), 24), f"{one['prompt_tokens']:,} → {one['output_tokens']:,}"
    return f"{words.ms(parts['ms'].sum())} · {kind} · {tokens} · #{one['index']} r{one['repeat']}"


def slowest_parts(comparisons: Comparisons) -> tuple[Part, ...]:
    """The figure and the table; empty without raw samples of a valid baseline or best configuration."""
    cell = slowest_of(comparisons)
    if cell is None:
        return ()
    requests = cell.requests()
    frame = slowest(requests)
    table = slowest_table(cell, frame)
    return (_drawing(cell, frame, len(requests)), Section("slowest", "The slowest requests", table))


def _drawing(cell: MeasuredCell, frame: pd.DataFrame, requests: int) -> Drawing:
    caption = (
        f"{cell.name} at {cell.load.label}, {cell.clock}, all repeats. Above each bar: class, prompt → output tokens, "
        "request and repeat; in a long gap it may have been preempted or have waited for others."
    )
    width = room_for_labels(_label(parts) for _, parts in frame.groupby("request"))
    return Drawing("slowest", _title(frame, requests), caption, slowest_figure(frame), width)


def _title(frame: pd.DataFrame, of: int) -> str:
    """What two parts of their time the requests spent most of it with."""
    shares = (frame.groupby("part")["ms"].sum() / frame["ms"].sum()).nlargest(2)
    said = [f"{words.percent(share)} {_SAID.get(part, _PARTS[part][0])}" for part, share in shares.items()]
    return f"The slowest {frame['request'].nunique()} of {of:,} requests: {', '.join(said)}"


def slowest_table(cell: MeasuredCell, frame: pd.DataFrame) -> ReportTable:
    """The same requests as numbers."""
    parts = {CLIENT: "in the client ms", FIRST: "first token ms", DECODE: "decode ms", GAP: "long gaps ms"}
    parts = {part: title for part, title in parts.items() if part != CLIENT or (frame["part"] == CLIENT).any()}
    rows = []
    for place, spent in frame.groupby("request"):
        one = spent.iloc[0]
        who = (str(place), str(one["class"]), f"{one['index']}, repeat {one['repeat']}")
        tokens = (Value(words.count(float(one[name])), float(one[name])) for name in ("prompt_tokens", "output_tokens"))
        times = (_time(spent.loc[spent["part"] == part, "ms"], part) for part in parts)
        rows.append(Row(cell, (*texts(*who), *tokens, _time(spent["ms"], ""), *times)))
    heads = ("#", "class", "request", "prompt tokens", "output tokens", "E2EL ms", *parts.values())
    return listed_table(heads, rows, numbers_from=3)


def _time(lengths: pd.Series, part: str) -> Value:
    """The sum of ``lengths`` [ms]; of gaps also how many there are, and the longest."""
    total = float(lengths.sum())
    note = f"{len(lengths)}, longest {words.milliseconds(float(lengths.max()))}" if part == GAP and total else ""
    return Value(words.milliseconds(total) if total else "0", total, note)
