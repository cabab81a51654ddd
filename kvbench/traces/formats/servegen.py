"""ServeGen's clients (arXiv 2505.09999): distributions of arrivals and lengths, from which a trace is drawn.

Two files a client: a CSV without header (``window's start [s], rate [1/s], cv, distribution, shape, scale``; windows of
10 minutes) and JSON (``{"start [s]": {"input_tokens": "{length: probability}", "output_tokens": ...}}``; a window
without requests has none). Gaps are Gamma or Weibull of the window's shape, scaled to its rate; input and output
lengths are drawn independently, from the window's own lengths or else from the last window before that has some.
"""

from __future__ import annotations

import ast
import math
from bisect import bisect_right

import numpy as np

from kvbench.traces.model import MOST_TOKENS, Trace, find_tick
from kvbench.traces.rows import Source, TraceFormat, lines, short

_SEED = 0  # the same trace on every machine
_MOST_REQUESTS = 1_000_000  # clients of a week have a hundred times as many
_LAST_WINDOW_S = 600.0


def _is_arrivals(source: Source) -> bool:
    return source.container == "csv" and len(source.columns) == 6 and _number(source.columns[0]) is not None


def _is_lengths(source: Source) -> bool:
    windows = source.first
    return bool(windows) and all(
        _number(start) is not None and isinstance(window, dict) and {"input_tokens", "output_tokens"} <= window.keys()
        for start, window in windows.items()
    )


def _read(sources: list[Source], page_size: int | None) -> Trace:
    """The first million requests of one client. Raises ValueError."""
    arrivals = [s for s in sources if _is_arrivals(s)]
    lengths = [s for s in sources if _is_lengths(s)]
    if len(arrivals) != 1 or len(lengths) != 1:
        raise ValueError(
            f"a client of ServeGen is two files, its arrivals (CSV) and its lengths (JSON); given are {len(arrivals)} "
            f"and {len(lengths)} of them: give one of each"
        )
    rng = np.random.default_rng(_SEED)
    windows = _windows(arrivals[0])
    tables = _length_windows(lengths[0])
    starts = list(tables)
    times, prompts, outputs = [], [], []
    left, drawn = 0.0, 0
    for start, end, rate, name, shape in windows:
        if not rate:
            continue
        if drawn >= _MOST_REQUESTS:
            left += rate * (end - start)
            continue
        came = _arrivals(start, end, rate, name, shape, rng)[: _MOST_REQUESTS - drawn]
        inputs, replies = tables[starts[max(0, bisect_right(starts, start) - 1)]]
        times.append(came)
        for drawn_lengths, (values, shares) in ((prompts, inputs), (outputs, replies)):
            drawn_lengths.append(rng.choice(values, len(came), p=shares))
        drawn += len(came)
    if not drawn:
        raise ValueError(f"{arrivals[0].path} has no window with a rate above 0: it has no requests")
    arrival = np.concatenate(times)
    return Trace(
        "servegen",
        np.concatenate(prompts).astype(np.int64),
        np.concatenate(outputs).astype(np.int64),
        arrival_s=arrival - arrival[0],
        tick_s=find_tick(arrival),
        left_out={f"or so requests after the first {_MOST_REQUESTS:,}": round(left)} if left else {},
    )


def _arrivals(start: float, end: float, rate: float, name: str, shape: float, rng: np.random.Generator) -> np.ndarray:
    """Times [s] of a renewal process in [start, end). float64 [n]"""
    times = np.array([start])
    while times[-1] < end:
        count = int((end - times[-1]) * rate * 1.1) + 64
        if name == "Gamma":
            gaps = rng.gamma(shape, 1 / shape, count)
        else:
            gaps = rng.weibull(shape, count) / math.gamma(1 + 1 / shape)
        times = np.concatenate([times, times[-1] + np.cumsum(gaps) / rate])
    return times[1:][times[1:] < end]


def _windows(source: Source) -> list[tuple[float, float, float, str, float]]:
    """Start, end, rate, distribution and shape of each window; the file has no header. ValueError with the line."""
    windows: list[tuple[float, float, str, float]] = []
    for number, text in lines(source.path):
        cells = [*(cell.strip() for cell in text.split(",")), *[""] * 5]
        start, rate, shape = (_number(cells[i]) for i in (0, 1, 4))
        if start is None or rate is None or start < 0 or rate < 0 or (windows and start <= windows[-1][0]):
            what = f"start {cells[0]!r} and rate {cells[1]!r} are no window: mend it"
            raise source.error(f"line {number}", what)
        if rate and (cells[3] not in ("Gamma", "Weibull") or shape is None or shape <= 0):
            what = f"{cells[3]!r} of shape {cells[4]!r} is no Gamma or Weibull: mend it"
            raise source.error(f"line {number}", what)
        windows.append((start, rate, cells[3], shape or 1.0))
    ends = [start for start, *_ in windows[1:]] + [windows[-1][0] + _LAST_WINDOW_S]
    return [(start, end, *rest) for (start, *rest), end in zip(windows, ends, strict=True)]


_Table = tuple[np.ndarray, np.ndarray]  # token counts, int64, and their probabilities


def _length_windows(source: Source) -> dict[float, tuple[_Table, _Table]]:
    """Tables of input and output lengths by their window's start, ascending. Raises ValueError."""
    tables_at = {}
    for start in sorted(source.first, key=float):
        tables = [_table(source, start, column) for column in ("input_tokens", "output_tokens")]
        if all(table is not None for table in tables):
            tables_at[float(start)] = tuple(tables)
    if not tables_at:
        raise ValueError(f"{source.path} has no window with lengths")
    return tables_at


def _table(source: Source, start: str, column: str) -> _Table | None:
    given = source.first[start][column]
    try:
        table = ast.literal_eval(given) if isinstance(given, str) else given
        lengths = np.array([int(n) for n in table], dtype=np.int64)
        shares = np.array([float(p) for p in table.values()])
        if not len(lengths):
            return None
        if lengths.min() < 0 or lengths.max() >= MOST_TOKENS or shares.min() < 0 or not 0 < shares.sum() < math.inf:
            raise ValueError
    except (ValueError, SyntaxError, TypeError, AttributeError, RecursionError, OverflowError):
        raise source.error(
            f"window {start}", f"{column} {short(given)} is no table of lengths and their shares: mend it"
        ) from None
    return lengths, shares / shares.sum()


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


FORMATS = (
    TraceFormat(
        "servegen", "a client's CSV and JSON: a trace is drawn", lambda s: _is_arrivals(s) or _is_lengths(s), _read
    ),
)
