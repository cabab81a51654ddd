"""A column of numbers, one a step, as one short line that a person and a diff can read.

    37:4      4 at step 37 and after it
    37:4+2    4 at step 37, 6 at step 38, 8 at step 39 and so on
    37*4      4 at step 37 alone, and then again what it was before

Each entry holds until the next one's step. Most columns are 0 nearly always, or grow by the same amount for a while.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ENTRY = re.compile(r"(?P<step>\d+)(?P<kind>[:*])(?P<value>-?\d+)(?P<slope>[+-]\d+)?")
_LEAST_RAMP = 3  # values that make a slope worth its characters


def encode(values: Sequence[int]) -> str:
    """The line of ``values``, whose first is step 1's; empty for none."""
    entries: list[str] = []
    at, level = 0, None  # level: the value that holds, unless it rises or falls
    while at < len(values):
        value = values[at]
        if level is not None and values[at + 1 : at + 2] == (level,):
            entries.append(f"{at + 1}*{value}")
            end = _run(values, at + 1, 0)
        else:
            slope = values[at + 1] - value if at + 1 < len(values) else 0
            end = _run(values, at, slope)
            if slope and end - at < _LEAST_RAMP:
                slope, end = 0, _run(values, at, 0)
            entries.append(f"{at + 1}:{value}{f'{slope:+d}' if slope else ''}")
            level = None if slope else value
        at = end
    return " ".join(entries)


def _run(values: Sequence[int], start: int, slope: int) -> int:
    """Where the values that follow ``start`` with this slope end."""
    end = start + 1
    while end < len(values) and values[end] - values[end - 1] == slope:
        end += 1
    return end


def decode(text: str, length: int) -> tuple[int, ...]:
    """The ``length`` values of a line. ValueError when it is not one that ``encode`` could have written."""
    values: list[int] = []
    level, slope = 0, 0
    for word in text.split():
        entry = _ENTRY.fullmatch(word)
        if entry is None:
            raise ValueError(f"{word!r} is not step:value, step:value+slope or step*value")
        step, value = int(entry["step"]), int(entry["value"])
        if not len(values) < step <= length or (not values and step != 1):
            raise ValueError(f"{word!r} does not follow step {len(values)} of {length}")
        _hold(values, level, slope, step - 1)
        if entry["kind"] == "*":
            if slope or not values:
                raise ValueError(f"{word!r} has no level to go back to")
            values.append(value)
        else:
            level, slope = value, int(entry["slope"] or 0)
            values.append(level)
    if length and not values:
        raise ValueError(f"there are no values for {length} steps")
    _hold(values, level, slope, length)
    return tuple(values)


def _hold(values: list[int], level: int, slope: int, length: int) -> None:
    """Go on as the last entry says; a level that rises goes on from the last value."""
    while len(values) < length:
        values.append(values[-1] + slope if slope else level)
