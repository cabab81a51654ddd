"""Numbers and lists as text: one way to write each quantity. Sizes in bytes are the engine's (engine/sizes.py)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbench_engine.sizes import format_bytes as format_bytes
from kvbench_engine.sizes import parse_bytes as parse_bytes

_MESSAGE_CHARACTERS = 120  # of a server's message


def tokens_per_s(value: float | None) -> str:
    """Writes a speed with three digits: `324`, `48.2`, `3.14`."""
    return significant(value)


def ms(value: float | None) -> str:
    """Milliseconds, or seconds from 10,000 ms on."""
    if value is None:
        return "–"
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{milliseconds(value)} ms"


def milliseconds(value: float | None) -> str:
    """The number of `ms` without its unit, for a column that has it in its heading."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def ratio(value: float | None) -> str:
    """Writes a ratio as `1.94x`, with one decimal from 10x on."""
    if value is None:
        return "–"
    return f"{value:.1f}x" if value >= 9.995 else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """Writes a share as a percentage: 0.934 is `93 %`; one decimal under 10 %."""
    if value is None:
        return "–"
    return f"{value * 100:.0f} %" if value >= 0.0995 or value == 0 else f"{value * 100:.1f} %"


def count(value: float | None) -> str:
    """Writes a whole number with commas: `1,234`."""
    return "–" if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """Writes a number with one decimal: `18.2`."""
    return "–" if value is None else f"{value:.1f}"


def significant(value: float | None, figures: int = 3) -> str:
    """`value` with `figures` figures, without an exponent; integers keep all their digits."""
    if value is None:
        return "–"
    if abs(value) >= 10 ** (figures - 1) or value == 0:
        return f"{value:,.0f}"
    decimals = figures - 1
    while decimals > 0 and abs(value) >= 10 ** (figures - decimals):
        decimals -= 1
    return f"{value:.{decimals}f}"


def data_size(value: float | None, decimals: int = 1) -> str:
    """Bytes in the largest binary unit that keeps at least one whole; no decimals from 100 on."""
    if value is None:
        return "–"
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value == int(value) or value >= 100 else f"{value:.{decimals}f} {unit}"


def csv_cell(value: Any) -> Any:
    """The value as a cell that no spreadsheet takes for a formula: OWASP's leading apostrophe, but for numbers."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def upper_first(text: str) -> str:
    """Capitalises without lowering the rest, as str.capitalize would; an address stays as it is."""
    return text if "://" in text.partition(" ")[0] else text[:1].upper() + text[1:]


def listing(items: Sequence[str]) -> str:
    """Joins words: `a`, `a and b`, `a, b and c`."""
    items = list(items)
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def nearest(name: str, candidates: Iterable[str], most: int = 1) -> list[str]:
    """The names among `candidates` that differ from `name` by a slip or a missing part, the nearest first."""
    return difflib.get_close_matches(name, list(candidates), most)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Writes the way out of a misspelt name: `; did you mean 'page_size'?`, or all names where none is near."""
    names = list(allowed)
    near = nearest(name, names)
    return f"; did you mean {near[0]!r}?" if near else f": choose one of {', '.join(names)}"


def plural(number: float, noun: str) -> str:
    """Writes a number with its noun: `1 preemption`, `12 preemptions`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def slo_words(slo: Mapping[str, float | None] | None) -> str:
    """Writes an SLO as ``ttft <= 200 ms and tpot <= 50 ms``; empty without one."""
    limits = {k: v for k, v in (slo or {}).items() if v is not None}
    return " and ".join(f"{name.removesuffix('_ms')} <= {limit:g} ms" for name, limit in limits.items())


_CALIBRATION = {
    "lag_p99_ms": "timestamp lag p99 {:.2f} ms",
    "itl_error_p99_ms": "ITL error p99 {:.2f} ms",
    "cpu_us_per_event": "{:.0f} µs of CPU an event",
    "coalesced_share": "{:.2%} coalesced",
}


def calibration_words(settings: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """Writes how well the client measures: ``64 streams of 10 ms ITL: timestamp lag p99 0.12 ms, ...``."""
    processes = settings.get("processes", 1)
    over = f" over {processes} processes" if processes > 1 else ""
    parts = ", ".join(form.format(figures[key]) for key, form in _CALIBRATION.items() if figures.get(key) is not None)
    return f"{settings['streams']} streams of {settings['itl_ms']:g} ms ITL{over}: {parts.replace('%', ' %')}"


def shorten(text: str, most: int) -> str:
    """Puts ``text`` into one line that can be printed, cut to ``most`` characters with " ..." at the end."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else f"{line[: most - 4].rstrip()} ..."


def clock(seconds: float) -> str:
    """Writes seconds as ``1:15`` (75) or ``1:06:40`` (4000)."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def and_more(items: Sequence[object], most: int = 3, between: str = ", ") -> str:
    """Writes ``a, b, c and 2 more``: the first ``most`` items with ``between`` in between, then how many are left."""
    shown = between.join(map(str, items[:most]))
    return f"{shown} and {len(items) - most:,} more" if len(items) > most else shown


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1) -> list[str]:
    """Lines of a Markdown table; columns from ``numbers_from`` on are right-aligned. Entries are escaped already."""
    rule = ["---:" if i >= numbers_from else "---" for i in range(len(heads))]
    return [f"| {' | '.join(row)} |" for row in (heads, rule, *rows)]
