"""Numbers as words: one way to write each quantity, used by the sentence, the tables and the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def tokens_per_s(value: float | None) -> str:
    """324, 48.2, 3.14: three figures."""
    return significant(value)


def ms(value: float | None) -> str:
    """Milliseconds, or seconds from 10,000 ms on."""
    if value is None:
        return "–"
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    if value >= 100:
        return f"{value:,.0f} ms"
    return f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def milliseconds(value: float | None) -> str:
    """The number of `ms` without its unit, for a column that has it in its heading."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def ratio(value: float | None) -> str:
    """1.94x; one decimal from 10x on."""
    if value is None:
        return "–"
    return f"{value:.1f}x" if value >= 9.995 else f"{value:.2f}x"


def spread(low: float, high: float, n: int, repeats: bool = True) -> str:
    """The parenthesis behind a ratio; `repeats`: say over how many."""
    if n < 2:
        return "one repeat, so no spread"
    bounds = f"{ratio(low)[:-1]}–{ratio(high)[:-1]}"
    return f"{bounds} over {n} repeats" if repeats else bounds


def percent(value: float | None) -> str:
    """0.934 -> 93 %; one decimal under 10 %."""
    if value is None:
        return "–"
    return f"{value * 100:.0f} %" if value >= 0.0995 or value == 0 else f"{value * 100:.1f} %"


def count(value: float | None) -> str:
    """1234.0 -> 1,234."""
    return "–" if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """18.2: one decimal."""
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


def data_size(value: float | None) -> str:
    """Bytes in the largest binary unit that keeps at least one whole."""
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if value == int(value) or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def upper_first(text: str) -> str:
    """Capitalise without lowering the rest, as str.capitalize would."""
    return text[:1].upper() + text[1:]


def listing(items: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    items = list(items)
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def plural(number: float, noun: str) -> str:
    """1 preemption, 12 preemptions."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def slo_words(slo: Mapping[str, float | None] | None) -> str:
    """``ttft <= 200 ms and tpot <= 50 ms``; empty without one."""
    limits = {k: v for k, v in (slo or {}).items() if v is not None}
    return " and ".join(f"{name.removesuffix('_ms')} <= {limit:g} ms" for name, limit in limits.items())


def clock(seconds: float) -> str:
    """``75`` -> ``1:15``, ``4000`` -> ``1:06:40``."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
