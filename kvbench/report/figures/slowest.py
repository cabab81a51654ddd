"""The slowest requests of one cell, each as a timeline: waiting in the client, waiting for its first token, decode."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvbench.common import text as words
from kvbench.metrics.latency import MS, inter_token_latencies
from kvbench.report.comparisons import baseline, best
from kvbench.report.figures.axes import compact, label_above
from kvbench.report.style import Drawing, finish
from kvbench.report.tables import Column, Row, Table, Value
from kvbench.runs.model import MeasuredCell, Run

MOST = 10  # requests
LONG_GAP = 5.0  # times the median ITL
CLIENT, FIRST, DECODE, GAP = "client", "first token", "decode", "gap"
_PARTS: Mapping[str, tuple[str, str, str]] = {  # part -> title, colour, pattern
    CLIENT: ("waiting in the client", "#8A8A8A", "x"),
    FIRST: ("waiting for the first token", "#56B4E9", "/"),
    DECODE: ("decoding", "#0072B2", ""),
    GAP: (f"gap over {LONG_GAP:g}x the median ITL", "#D55E00", "\\"),
}
_COLUMNS = ("request", "index", "repeat", "class", "prompt_tokens", "output_tokens", "part", "start_ms", "ms")
_ROW = 42  # px


def slowest_of(run: Run) -> MeasuredCell | None:
    """The cell whose requests are shown: the baseline at the highest load, else the best one there; valid only."""
    for load in reversed(run.loads):
        top = best(run, load)
        for cell in (baseline(run, load), top.cell if top else None):
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
    """(part, start, length) [ms] in order, neighbours of the same part as one; ``limit`` [ms]: longer gaps are GAP."""
    chunks = request["chunk_times"]
    times = (np.asarray(chunks if chunks is not None else [], dtype=float) - request["t0"]) * MS  # [chunks]
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
                marker={
                    "color": colour,
                    "line": {"width": 0},
                    "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "#fff", "size": 5, "solidity": 0.2},
                },
                hovertemplate=f"{title}: %{{x:,.0f}} ms, from %{{base:,.0f}} ms on<extra></extra>",
            )
    for place, rows in frame.groupby("request"):
        one = rows.iloc[0]
        text = (
            f"{words.ms(rows['ms'].sum())} · {one['class']} · {one['prompt_tokens']:,} → {one['output_tokens']:,} "
            f"tokens · request {one['index']}, repeat {one['repeat']}"
        )
        label_above(figure, place, text)
    figure.update_xaxes(title_text="ms since the intended start", rangemode="tozero")
    figure.update_yaxes(range=[count + 0.5, 0.3], showticklabels=False, showgrid=False)
    finish(figure, _ROW * count + 150)
    figure.update_layout(barmode="overlay", margin={"t": 92, "l": 16, "r": 40})
    return figure


def drawing(run: Run) -> Drawing | None:
    """None without raw samples of a valid baseline or best configuration."""
    cell = slowest_of(run)
    if cell is None:
        return None
    requests = cell.requests()
    frame = slowest(requests)
    caption = (
        f"{cell.name} at {cell.load.label}, all repeats; class, prompt and output tokens above each bar. In a gap the "
        "request was preempted or waited for the prefill of others."
    )
    return Drawing("slowest", _title(frame, len(requests)), caption, slowest_figure(frame))


def _title(frame: pd.DataFrame, of: int) -> str:
    """What the requests spent most of their time with."""
    count, shares = frame["request"].nunique(), frame.groupby("part")["ms"].sum() / frame["ms"].sum()
    said = [f"{words.percent(shares[part])} {_PARTS[part][0]}" for part in (CLIENT, FIRST, DECODE) if part in shares]
    said += [f"{words.percent(shares[GAP])} in long gaps"] if GAP in shares else []
    return f"The slowest {count} of {of:,} requests: {', '.join(said)}"


def slowest_table(run: Run) -> Table:
    """The same requests as numbers; empty where there is no figure."""
    cell = slowest_of(run)
    if cell is None:
        return Table((), ())
    rows = []
    for place, parts in slowest(cell.requests()).groupby("request"):
        one, spent = parts.iloc[0], parts.groupby("part")["ms"].sum()
        gaps = parts.loc[parts["part"] == GAP, "ms"]
        numbers = (one["prompt_tokens"], one["output_tokens"])
        times = (spent.sum(), spent.get(CLIENT, 0.0), spent.get(FIRST, 0.0), spent.get(DECODE, 0.0), gaps.sum())
        rows.append(
            Row(cell, (
                Value(str(place), place), Value(str(one["class"]), str(one["class"])),
                Value(f"{one['index']}, repeat {one['repeat']}", place),
                *(Value(words.count(float(n)), float(n)) for n in numbers),
                *(Value(words.milliseconds(float(ms)), float(ms)) for ms in times[:4]),
                Value(words.milliseconds(float(times[4])) if len(gaps) else "0", float(times[4]),
                      f"{len(gaps)}, longest {words.milliseconds(float(gaps.max()))}" if len(gaps) else ""),
            ))
        )  # fmt: skip
    columns = (
        Column("place", "#"), Column("class", "class"), Column("request", "request"),
        Column("prompt_tokens", "prompt", "tokens"), Column("output_tokens", "output", "tokens"),
        Column("e2el_ms", "E2EL ms"), Column("client_ms", "in the client ms", "waited under max_concurrency"),
        Column("first_ms", "first token ms", "after that, until the first token"),
        Column("decode_ms", "decode ms", "without the gaps"),
        Column("gaps_ms", "long gaps ms", f"longer than {LONG_GAP:g} times the median ITL: preempted, or blocked"),
    )  # fmt: skip
    return Table(columns, tuple(rows), numbers_from=3)
