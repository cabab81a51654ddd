"""Two settings at once: output tokens/s of every combination against the baseline, for runs of a full product."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.effects.comparison import Call, Comparison
from kvbench.metrics.definitions import SERVED, SIMULATED
from kvbench.report.comparisons import THROUGHPUT, Comparisons, interval, marked
from kvbench.report.style import CONTIGUOUS, PAGED, Drawing, finish, safe
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run
from kvbench.workload.settings import applies, effective, setting_title, value_words

_NO_ENTRY = {"configuration": "", "ratio": math.nan, "decided": False, "text": "", "interval": ""}
_NONE = "–"  # the value of a setting that means nothing beside the others
_GREY, _INK = "#dfe3e8", "#1c2430"
_SCALE = [[0.0, CONTIGUOUS], [0.5, _GREY], [1.0, PAGED]]
_LEAST = math.log(1.05)  # of the scale's ends: a smaller effect is not drawn as if it were large
_BAND, _HEAD = 58, 40  # px a row of cells, and above a panel
_LINE = 10  # characters of an axis label


def heat_map(run: Run, comparisons: Comparisons, load: MeasuredLoad) -> pd.DataFrame:
    """Every combination of the settings that vary, at one load; empty unless they make a full product.

    A column a setting, with its value in words; the setting with most values comes last. Then:
    configuration: the cell's name; empty where the combination was not measured
    ratio: output tokens/s relative to the baseline's; NaN where there is none
    decided: whether it is told apart from 1
    text: the ratio with its mark, "baseline", or why there is none; empty where no such configuration can be
    interval: of the ratio; empty where it is not known
    time: "engine time (whole run)", "served" or "simulated"
    """
    cells, base = comparisons.at(load), comparisons.baselines[load]
    values = _values(cells, list(run.spec.get("sweep") or {}))
    full = run.spec.get("design", "full") == "full" and any(len(cell.varied) > 1 for cell in cells)
    if base is None or len(values) < 2 or not full:
        return pd.DataFrame()
    measured = {tuple(_value(cell, key) for key in values): cell for cell in cells}
    # The two kinds of time are never mixed in one figure.
    in_turns = all(THROUGHPUT in comparisons.engine[cell.cell_id] for cell in cells if cell is not base)
    time, ratios = run.clock, comparisons.served
    if in_turns and run.engine_time:
        time, ratios = run.engine_time.label, comparisons.engine
    rows = []
    for combination in itertools.product(*(listed.items() for listed in values.values())):
        chosen = {key: text for key, (text, _) in zip(values, combination, strict=True)}
        settings = {**base.settings, **{key: raw for key, (_, raw) in zip(values, combination, strict=True)}}
        possible = all(applies(key, settings) == (text != _NONE) for key, text in chosen.items())
        if cell := measured.get(tuple(chosen.values())):
            rows.append(chosen | _entry(cell, base, ratios[cell.cell_id].get(THROUGHPUT)))
        else:
            rows.append(chosen | _NO_ENTRY | {"text": "missing" * possible})
    return pd.DataFrame(rows).assign(time=time)


def _values(cells: Sequence[MeasuredCell], order: list[str]) -> dict[str, dict[str, Any]]:
    """Setting -> its values, in words and as they are, numbers ascending; the setting with most values last.

    ``order``: of the settings in the workload.
    """

    def rank(value: tuple[str, Any]) -> tuple[bool, float]:
        """Numbers by size, other values as they come, "–" last."""
        text, raw = value
        return text == _NONE, float(raw) if isinstance(raw, int | float) else 0.0

    varied = list(dict.fromkeys(key for cell in cells for key in cell.varied))
    varied.sort(key=lambda key: order.index(key) if key in order else len(order))
    values = {key: {_value(cell, key): effective(cell.settings, key) for cell in cells} for key in varied}
    several = {key: dict(sorted(listed.items(), key=rank)) for key, listed in values.items() if len(listed) > 1}
    return dict(sorted(several.items(), key=lambda pair: len(pair[1])))


def _value(cell: MeasuredCell, key: str) -> str:
    return value_words(key, effective(cell.settings, key)) if applies(key, cell.settings) else _NONE


def _entry(cell: MeasuredCell, base: MeasuredCell, ratio: Comparison | None) -> dict[str, Any]:
    """The frame's entries of a measured combination beside its settings."""
    entry = _NO_ENTRY | {"configuration": cell.name}
    if cell is base:
        return entry | {"ratio": 1.0, "text": "baseline"}
    if ratio is None:
        return entry | {"text": cell.doubt or base.doubt or "no value"}
    low, high = ratio.spread if ratio.values else (ratio.low, ratio.high)
    several = ratio.n > 1 if ratio.values else bool(interval(ratio))
    bounds = say("heat_map.bounds", several, low=low, high=high)
    decided = ratio.call in (Call.BETTER, Call.WORSE)
    return entry | {"ratio": ratio.ratio, "decided": decided, "text": marked(ratio), "interval": bounds}


def _settings(frame: pd.DataFrame) -> list[str]:
    """The columns of the frame that are settings."""
    return [str(name) for name in frame.columns[: list(frame.columns).index("configuration")]]


def heat_map_figure(frame: pd.DataFrame) -> go.Figure:
    """Tiles by two settings, the last two of the frame; a panel for each combination of the others."""
    *others, across, down = _settings(frame)
    panels = list(frame.groupby(others, sort=False)) if others else [((), frame)]
    columns, rows = frame[across].drop_duplicates().tolist(), frame[down].drop_duplicates().tolist()
    height = len(panels) * _BAND * len(rows) + _HEAD * (len(panels) - 1)
    named = [zip(map(setting_title, others), values, strict=True) for values, _ in panels]
    figure = make_subplots(
        rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=_HEAD * (len(panels) > 1) / height,
        subplot_titles=[safe(", ".join(f"{setting}: {value}" for setting, value in pairs)) for pairs in named],
    )  # fmt: skip
    figure.update_annotations(font={"size": 13})
    most = max([_LEAST, *(abs(math.log(ratio)) for ratio in frame.loc[frame["decided"], "ratio"])])
    for position, (_, tiles) in enumerate(panels, start=1):
        strengths = [[math.nan] * len(columns) for _ in rows]
        for tile in tiles.to_dict("records"):
            x, y = columns.index(tile[across]), rows.index(tile[down])
            strengths[y][x] = strength = math.log(tile["ratio"]) * bool(tile["decided"]) / most
            text = f"<b>{safe(tile['text'])}</b>" + "<br>" * bool(tile["interval"]) + tile["interval"]
            font = {"size": 12}
            if not math.isnan(strength):  # a missing one is on nothing
                font["color"] = "#fff" if strength > 0.75 else _INK
            figure.add_annotation(x=x, y=y, text=text, showarrow=False, font=font, row=position, col=1)
        figure.add_heatmap(
            x=list(range(len(columns))), y=list(range(len(rows))), z=strengths, zmin=-1, zmax=1, colorscale=_SCALE,
            showscale=False, xgap=3, ygap=3, hoverinfo="skip", row=position, col=1,
        )  # fmt: skip
    for update, labels in ((figure.update_xaxes, columns), (figure.update_yaxes, rows)):
        names = ["<br>".join(map(safe, wrap(label, _LINE))) or safe(label) for label in labels]
        update(showgrid=False, tickangle=0, tickvals=list(range(len(labels))), ticktext=names)
    figure.update_xaxes(title_text=setting_title(across), row=len(panels))
    figure.update_yaxes(autorange="reversed", title_text=setting_title(down))
    top = _HEAD if others else 12
    finish(figure, height + top + 84, legend=False)
    return figure.update_layout(margin={"t": top, "b": 84})


def drawing(run: Run, comparisons: Comparisons) -> Drawing | None:
    """The highest load at which settings vary together; None for a run of one setting at a time."""
    for load in reversed(comparisons.loads):
        frame = heat_map(run, comparisons, load)
        if len(frame):
            time = str(frame["time"].iloc[0])
            caption = say("heat_map.caption", time in (SERVED, SIMULATED), load=load.label, time=time)
            caption += say("heat_map.uncoloured") * bool(frame["ratio"].isna().any())
            width = 130 + 90 * frame[_settings(frame)[-2]].nunique()
            return Drawing("heat-map", _title(frame), caption, heat_map_figure(frame), width)
    return None


def _title(frame: pd.DataFrame) -> str:
    """Names the best combination that is told apart from the baseline."""
    better = frame[frame["decided"] & (frame["ratio"] > 1)]
    if better.empty:
        settings = words.listing([setting_title(key) for key in _settings(frame)])
        return say("heat_map.none_ahead", bool(frame["decided"].any()), settings=settings)
    top = better.loc[better["ratio"].idxmax()]
    values = {"name": top["configuration"], "ratio": top["text"]}
    return say("heat_map.furthest", measured=frame["ratio"].notna().sum(), **values)
