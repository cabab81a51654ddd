"""Two settings at once: output tokens/s of every combination against the baseline, for runs of a full product."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
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
    engine = run.engine_time if in_turns else None
    ratios = comparisons.served if engine is None else comparisons.engine
    rows = []
    for combination in itertools.product(*(listed.items() for listed in values.values())):
        chosen = {key: text for key, (text, _) in zip(values, combination, strict=True)}
        cell = measured.get(tuple(chosen.values()))
        settings = {**base.settings, **{key: raw for key, (_, raw) in zip(values, combination, strict=True)}}
        possible = all(applies(key, settings) == (text != _NONE) for key, text in chosen.items())
        if cell is None:
            rows.append(chosen | _NO_ENTRY | {"text": "missing" if possible else ""})
        elif cell is base:
            rows.append(chosen | _NO_ENTRY | {"configuration": cell.name, "ratio": 1.0, "text": "baseline"})
        else:
            rows.append(chosen | _entry(cell, base, ratios[cell.cell_id].get(THROUGHPUT)))
    return pd.DataFrame(rows).assign(time=run.clock if engine is None else engine.label)


def _values(cells: list[MeasuredCell], order: list[str]) -> dict[str, dict[str, Any]]:
    """Setting -> its values, in words and as they are, numbers ascending; the setting with most values last.

    ``order``: of the settings in the workload.
    """
    varied = list(dict.fromkeys(key for cell in cells for key in cell.varied))
    varied.sort(key=lambda key: order.index(key) if key in order else len(order))
    found = {}

    def rank(value: tuple[str, Any]) -> tuple[bool, float]:
        """Numbers by size, other values as they come, "–" last."""
        text, raw = value
        return text == _NONE, float(raw) if isinstance(raw, int | float) else 0.0

    for key in varied:
        values = {_value(cell, key): effective(cell.settings, key) for cell in cells}
        if len(values) > 1:
            found[key] = dict(sorted(values.items(), key=rank))
    return dict(sorted(found.items(), key=lambda pair: len(pair[1])))


def _value(cell: MeasuredCell, key: str) -> str:
    return value_words(key, effective(cell.settings, key)) if applies(key, cell.settings) else _NONE


def _entry(cell: MeasuredCell, base: MeasuredCell, ratio: Comparison | None) -> dict[str, Any]:
    """What the frame has of a measured combination beside its settings."""
    entry = _NO_ENTRY | {"configuration": cell.name}
    if ratio is None:
        return entry | {"text": cell.doubt or base.doubt or "no value"}
    low, high = ratio.spread if ratio.values else (ratio.low, ratio.high)
    known = ratio.n > 1 if ratio.values else bool(interval(ratio))
    bounds = f"{low:.2f}–{high:.2f}" if known else ""
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
    figure = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=_HEAD / height if len(panels) > 1 else 0.0,
        subplot_titles=[_panel_title(others, values) for values, _ in panels] if others else None,
    )
    figure.update_annotations(font={"size": 13})
    known = frame.loc[frame["decided"], "ratio"]
    most = max([_LEAST, *(abs(math.log(ratio)) for ratio in known)])
    for position, (_, tiles) in enumerate(panels, start=1):
        strength = {
            (tile[across], tile[down]): math.log(tile["ratio"]) * bool(tile["decided"]) / most
            for tile in tiles.to_dict("records")
        }
        figure.add_heatmap(
            x=list(range(len(columns))),
            y=list(range(len(rows))),
            z=[[strength[column, row] for column in columns] for row in rows],
            zmin=-1,
            zmax=1,
            colorscale=_SCALE,
            showscale=False,
            xgap=3,
            ygap=3,
            hoverinfo="skip",
            row=position,
            col=1,
        )
        for tile in tiles.to_dict("records"):
            place = columns.index(tile[across]), rows.index(tile[down])
            _write(figure, tile, place, strength[tile[across], tile[down]], position)
    figure.update_xaxes(
        showgrid=False, tickangle=0, tickvals=list(range(len(columns))), ticktext=[_label(v) for v in columns]
    )
    figure.update_yaxes(showgrid=False, tickvals=list(range(len(rows))), ticktext=[_label(v) for v in rows])
    figure.update_xaxes(title_text=setting_title(across), row=len(panels))
    figure.update_yaxes(autorange="reversed", title_text=setting_title(down))
    top = _HEAD if others else 12
    finish(figure, height + top + 84, legend=False)
    figure.update_layout(margin={"t": top, "b": 84})
    return figure


def _panel_title(settings: list[str], values: Any) -> str:
    values = values if isinstance(values, tuple) else (values,)
    return safe(", ".join(f"{setting_title(key)}: {value}" for key, value in zip(settings, values, strict=True)))


def _label(value: str) -> str:
    """A value from outside as a label of an axis, in lines of a few words."""
    return "<br>".join(safe(line) for line in wrap(value, _LINE)) or safe(value)


def _write(figure: go.Figure, tile: Mapping[str, Any], place: tuple[int, int], strength: float, row: int) -> None:
    """The ratio in a tile at ``place`` (column, row), its interval below; a missing one is on nothing."""
    interval = f"<br>{tile['interval']}" if tile["interval"] else ""
    ink = {} if math.isnan(strength) else {"color": "#fff" if strength > 0.75 else _INK}
    figure.add_annotation(
        x=place[0],
        y=place[1],
        text=f"<b>{safe(tile['text'])}</b>{interval}",
        showarrow=False,
        font={"size": 12} | ink,
        row=row,
        col=1,
    )


def drawing(run: Run, comparisons: Comparisons) -> Drawing | None:
    """The highest load at which settings vary together; None for a run of one setting at a time."""
    for load in reversed(comparisons.loads):
        frame = heat_map(run, comparisons, load)
        if len(frame):
            time = str(frame["time"].iloc[0])
            empty = " Without a colour: invalid, refused or missing." if frame["ratio"].isna().any() else ""
            caption = (
                f"Output tokens/s relative to the baseline at {load.label}, {time}; below it the "
                f"{'lowest and highest repeat' if time in (SERVED, SIMULATED) else '95 % interval'}. Grey: level (≈) "
                f"or not told apart (?).{empty}"
            )
            width = 130 + 90 * frame[_settings(frame)[-2]].nunique()
            return Drawing("heat-map", _title(frame), caption, heat_map_figure(frame), width)
    return None


def _title(frame: pd.DataFrame) -> str:
    """The best combination that is told apart from the baseline."""
    settings = _settings(frame)
    better = frame[frame["decided"] & (frame["ratio"] > 1)]
    if better.empty:
        said = "ahead of" if frame["decided"].any() else "told apart from"
        return f"No combination of {words.listing([setting_title(key) for key in settings])} is {said} the baseline"
    top = better.loc[better["ratio"].idxmax()]
    return f"Furthest ahead of {frame['ratio'].notna().sum()}: {top['configuration']}, {top['text']} the baseline"
