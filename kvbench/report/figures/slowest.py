"""The slowest requests of one cell, each as a timeline: waiting in the client, waiting for its first token, decode."""

from __future__ import annotations

from itertools import pairwise
from textwrap import shorten

import numpy as np
import pandas as pd

from kvbench.common import text as words
from kvbench.metrics.rows import MS, inter_token_latencies, times_to_end
from kvbench.report.comparisons import Comparisons, best
from kvbench.report.figures.bars import COLUMNS, BarPart, bars
from kvbench.report.style import Drawing, room_for_labels
from kvbench.report.tables import Row, Section, Value, entry, listed_table, texts
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell

MOST = 10  # requests
LONG_GAP = 5.0  # times the median ITL
CLIENT, FIRST, DECODE, GAP = "client", "first token", "decode", "gap"
_PARTS = {
    CLIENT: BarPart("waiting in the client", "#8A8A8A", "x"),
    FIRST: BarPart("waiting for the first token", "#56B4E9", "/"),
    DECODE: BarPart("decoding", "#0072B2"),
    GAP: BarPart(f"gap over {LONG_GAP:g}x the median ITL", "#D55E00", "\\"),
}
_HEADS = {CLIENT: "in the client ms", FIRST: "first token ms", DECODE: "decode ms", GAP: "long gaps ms"}
_FACTS = ("index", "repeat", "class", "prompt_tokens", "output_tokens")


def slowest_of(comparisons: Comparisons) -> MeasuredCell | None:
    """Finds the valid cell whose requests are shown: the baseline at the highest load, else the best one there."""
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
        facts = [request.get(name) for name in _FACTS]
        rows += [(place, *facts, *part) for part in _parts(request, limit)]
    return pd.DataFrame(rows, columns=["request", *_FACTS, "part", "start_ms", "ms"])


def _parts(request: pd.Series, limit: float) -> list[tuple[str, float, float]]:
    """Lists (part, start, length) [ms] in order, neighbours of the same part as one; gaps over ``limit`` are GAP.

    limit: [ms]. Of several sequences, the parts are those of the one that ended last.
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


def drawing(comparisons: Comparisons) -> Drawing | None:
    """A bar a request, the slowest on top; None without raw samples of a valid baseline or best configuration."""
    cell = slowest_of(comparisons)
    if cell is None:
        return None
    requests, rows = cell.requests(), []
    frame = slowest(requests)
    for _, parts in frame.groupby("request"):
        values = {name: parts[name].iloc[0] for name in ("prompt_tokens", "output_tokens", "index", "repeat")}
        kind, length = shorten(str(parts["class"].iloc[0]), 24), parts["ms"].sum()
        label = say("slowest.label", length=length, kind=kind, **values)
        for row in parts.itertuples():
            hover = say("slowest.hover", title=_PARTS[row.part].title, ms=row.ms, start=row.start_ms)
            rows.append((row.request, label, "", row.part, row.start_ms, row.ms, "", hover))
    shown = pd.DataFrame(rows, columns=COLUMNS)
    figure = bars(shown, _PARTS, title_text="ms since the intended start", tickformat=",")
    shares = (frame.groupby("part")["ms"].sum() / frame["ms"].sum()).nlargest(2)
    parts_text = ", ".join(say("slowest.part", part, share=share) for part, share in shares.items())
    title = say("slowest.title", shown=frame["request"].nunique(), every=len(requests), parts=parts_text)
    caption = say("slowest.caption", cell=cell)
    return Drawing("slowest", title, caption, figure, room_for_labels(shown["label"]))


def section(comparisons: Comparisons) -> Section | None:
    """The same requests as numbers."""
    cell = slowest_of(comparisons)
    if cell is None:
        return None
    rows = []
    for place, spent in slowest(cell.requests()).groupby("request"):
        facts = spent.iloc[0]
        who = (str(place), str(facts["class"]), say("slowest.request", index=facts["index"], repeat=facts["repeat"]))
        tokens = (Value(words.count(facts[name]), float(facts[name])) for name in ("prompt_tokens", "output_tokens"))
        times = (_time(spent.loc[spent["part"] == part, "ms"], part) for part in _HEADS)
        rows.append(Row(cell, (*texts(*who), *tokens, _time(spent["ms"]), *times)))
    heads = ("#", "class", "request", "prompt tokens", "output tokens", "E2EL ms", *_HEADS.values())
    return Section("slowest", "The slowest requests", listed_table(heads, rows, numbers_from=3))


def _time(lengths: pd.Series, part: str = "") -> Value:
    """Sums ``lengths`` [ms]; of gaps also how many there are, and the longest. No entry for a wait in no client."""
    total = float(lengths.sum())
    if not total:
        return entry(None if part == CLIENT else 0.0, "0")
    gaps = say("slowest.gaps", count=len(lengths), longest=words.milliseconds(lengths.max()))
    return entry(total, words.milliseconds(total), gaps if part == GAP else "")
