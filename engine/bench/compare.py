"""Sides side by side: turns, ratios, whether they did the same work, and bars."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbench_engine.bench.case import Outputs
from kvbench_engine.bench.sides import OURS

SAME_TOKENS_LIMIT = 0.9  # rounding can break a near tie; more than that is not the same work
# In half precision rounding changes about one choice in 70 (vLLM and transformers on llama-32m), and what follows
# another choice is another text: the first 4 tokens, of which decode chose 3, stay equal in 94 % of requests.
HALF_TOKENS, HALF_LIMIT = 4, 0.75

Turn = Callable[[], tuple[float, Outputs]]  # output tokens/s and tokens; ValueError: it could not be measured
Report = Callable[[str, int, float], None]  # side, repeat from 0, output tokens/s


@dataclass(frozen=True)
class SpeedComparison:
    """The measured speeds by side. ``ratio``: kvbench's speed over the side's, repeat by repeat.

    ``same_tokens``: share of requests whose tokens equal kvbench's, lowest of the repeats. ``compared_tokens``: how
    many of each request's first tokens count there; None: all.
    """

    output_tokens_per_s: dict[str, list[float]]
    ratio: dict[str, list[float]]
    same_tokens: dict[str, float]
    compared_tokens: int | None = None

    def lines(self) -> list[str]:
        """Write one line a side."""
        lines = []
        for side, speeds in self.output_tokens_per_s.items():
            line = f"{side:18} median {statistics.median(speeds):8.1f} output tokens/s"
            line += f" ({min(speeds):.1f} to {max(speeds):.1f})"
            if ratios := self.ratio.get(side):
                line += f"   kvbench is {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
                first = f"in their first {self.compared_tokens} tokens"
                what = "token for token" if self.compared_tokens is None else first
                line += f", {self.same_tokens[side]:.0%} of requests {what} equal"
            lines.append(line)
        return lines

    def other_work(self) -> list[str]:
        """List the sides that gave other tokens than kvbench."""
        limit = SAME_TOKENS_LIMIT if self.compared_tokens is None else HALF_LIMIT
        return [side for side, share in self.same_tokens.items() if share < limit]


@dataclass(frozen=True)
class SpeedBar:
    """A required median ratio of kvbench's speed to that of ``side``."""

    side: str
    ratio: float

    def judge(self, comparison: SpeedComparison) -> tuple[bool, str]:
        """Tell whether the ratio is reached, with the line that says so."""
        reached = statistics.median(comparison.ratio[self.side])
        met = reached >= self.ratio
        return met, f"bar {self.ratio:.2f}x {self.side}: {reached:.2f}x, {'reached' if met else 'MISSED'}"


def parse_bars(texts: Sequence[str], sides: Sequence[str]) -> list[SpeedBar]:
    """Parse texts such as ``hf-continuous=5``.

    Raises:
        ValueError: a text has another form, or names a side that does not run.
    """
    bars = []
    for text in texts:
        side, _, value = text.partition("=")
        try:
            ratio = float(value)
        except ValueError:
            ratio = 0.0
        if not 0.0 < ratio < float("inf"):
            raise ValueError(
                f"--require cannot be {text!r}: write SIDE=RATIO with a ratio above 0, such as hf-continuous=5"
            )
        if side not in sides or OURS not in sides or side == OURS:
            raise ValueError(
                f"--require {text!r} compares {OURS} with {side}, and the sides that run are {', '.join(sides)}: "
                "name two of them"
            )
        bars.append(SpeedBar(side, ratio))
    return bars


def compare(turns: Mapping[str, Turn], repeats: int, report: Report, half_precision: bool = False) -> SpeedComparison:
    """Measure every side once a repeat, in an order drawn anew each time.

    ``half_precision``: only the first ``HALF_TOKENS`` of each request are compared.

    Raises:
        ValueError: a side could not be measured; the text names it.
    """
    speeds: dict[str, list[float]] = {side: [] for side in turns}
    compared = HALF_TOKENS if half_precision else None
    same: dict[str, float] = {side: 1.0 for side in turns if side != OURS and OURS in turns}
    for repeat in range(repeats):
        outputs: dict[str, Outputs] = {}
        for side in random.Random(repeat).sample(list(turns), len(turns)):
            try:
                speed, outputs[side] = turns[side]()
            except ValueError as error:
                raise ValueError(f"{side} could not be measured: {error}") from error
            speeds[side].append(speed)
            report(side, repeat, speed)
        for side in same:
            same[side] = min(same[side], _agreement(outputs[OURS], outputs[side], compared))
    ratios = {side: [a / b for a, b in zip(speeds[OURS], speeds[side], strict=True)] for side in same}
    return SpeedComparison(speeds, ratios, same, compared)


def _agreement(ours: Outputs, theirs: Outputs, count: int | None) -> float:
    """Share of requests whose first ``count`` greedy tokens are equal."""
    return sum(a[:count] == b[:count] for a, b in zip(ours, theirs, strict=True)) / len(ours)
