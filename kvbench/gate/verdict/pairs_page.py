"""pairs.html: the change of each pair under each hypothesis, with what it is held to, as one page that needs no other.

One panel a metric, one row a hypothesis, all rows of a panel on one scale, worse to the right. Drawn as SVG with the
report's colours, so that it follows light and dark; hovering over a dot names its pair.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import Finding, Verdict

ROWS = 80  # of one panel; the best of those that passed are left out
_LABELS, _PLOT, _SAID, _ROW, _HEAD, _FOOT = 300, 640, 230, 34, 26, 30  # px
_WIDTH = _LABELS + _PLOT + _SAID
_NAME, _LINES, _LINE = 42, 5, 16  # of a row's name: characters a line, lines at most, px a line
_DOTS = {
    "pair": "A dot is one pair of fresh servers: the candidate against the base.",
    "repeat": "A dot is one repeat: the first configuration against the second, under the same requests.",
}
_MARKS = {
    "floor": "floor: a smaller effect never fails",
    "margin": "margin: to pass, a worse effect must be ruled out",
    "limit": "limit: it may be reached, and not passed",
}
_STYLE = """
svg { width: 100%; min-width: 900px; height: auto; }
svg { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
svg text { fill: var(--ink); } svg .soft { fill: var(--soft); font-size: 12px; }
svg .grid { stroke: var(--line); } svg .zero { stroke: var(--soft); }
svg .floor, svg .margin, svg .limit { stroke: var(--bad); stroke-width: 1.5; }
svg .margin { stroke: var(--warn); stroke-dasharray: 4 3; }
svg .row { fill: var(--panel); } svg .pair { fill-opacity: 0.55; }
svg .interval { stroke-width: 3; stroke-linecap: round; }
.fail { fill: var(--bad); stroke: var(--bad); } .pass { fill: var(--accent); stroke: var(--accent); }
.invalid, .inconclusive { fill: var(--warn); stroke: var(--warn); }
svg text.fail, svg text.invalid, svg text.inconclusive, svg text.pass { stroke: none; font-weight: 600; }
svg text.fail { fill: var(--bad); } svg text.pass { fill: var(--soft); }
svg text.invalid, svg text.inconclusive { fill: var(--warn); }
.key { display: inline-block; width: 16px; border-top: 2px solid var(--bad); margin: 0 6px 4px 0; }
.key.margin { border-top: 2px dashed var(--warn); } .caption span + span.key { margin-left: 20px; }
.banner.fail, .banner.invalid, .banner.empty { border-color: var(--bad); }
.banner.fail strong, .banner.invalid strong { color: var(--bad); }
.banner.inconclusive { border-color: var(--warn); } .banner.inconclusive strong { color: var(--warn); }
"""


def pair_page(verdict: Verdict) -> str | None:
    """The page; None where no finding has pairs."""
    panels: dict[tuple[str, bool | None], list[Finding]] = {}
    for finding in wording.worst_first(verdict.findings):
        if any(map(wording.is_number, finding.series)):
            panels.setdefault((finding.metric or finding.title, finding.higher_is_better), []).append(finding)
    if not panels:
        return None
    drawn = [finding for findings in panels.values() for finding in findings]
    css = files("kvbench.report").joinpath("templates", "page.css").read_text(encoding="utf-8")
    label = wording.LABELS[verdict.outcome]
    known = ", ".join(wording.sides(verdict))
    effect = "The diamond is what is judged: their median, or the worst of them where each is held."
    if any(finding.interval for finding in drawn):
        effect = "The diamond is the effect and the bar its 95 % interval; worse is to the right."
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{label}: pairs</title><style>{css}{_STYLE}</style></head><body><main>",
            f'<p class="kicker">kvbench {verdict.kind}{": " if known else ""}{_text(known)}</p>',
            f'<h1>{_text(verdict.sentence)}</h1><div class="banner {verdict.outcome}"><strong>{label}</strong>',
            f"{_text(wording.counted(verdict))}</div>",
            f'<p class="caption">{_DOTS[wording.dot_of(verdict)]} {effect}</p>',
            _key(drawn),
            *(_panel(metric, findings, wording.dot_of(verdict)) for (metric, _), findings in panels.items()),
            "</main></body></html>\n",
        ]
    )


def _key(findings: Sequence[Finding]) -> str:
    """The legend of the lines that are drawn."""
    there = {name for finding in findings for name, _ in wording.thresholds(finding)}
    known = [f'<span class="key {name}"></span><span>{words}</span>' for name, words in _MARKS.items() if name in there]
    return f'<p class="caption">{"".join(known)}</p>' if known else ""


def _panel(metric: str, findings: Sequence[Finding], dot: str) -> str:
    """One metric's rows on one scale. ``dot``: what a dot is."""
    shown = findings[:ROWS]
    names = [_name(finding) for finding in shown]
    row = max(_ROW, max(map(len, names)) * _LINE + 8)
    ranges = [wording.plot_range(finding) for finding in shown]
    axis = _Axis(min(low for low, _ in ranges), max(high for _, high in ranges), wording.worse_sign(shown[0]))
    height = _HEAD + row * len(shown) + _FOOT
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Pairs of {_text(metric)}">']
    parts += [
        f'<rect class="row" x="0" y="{_HEAD + row * i}" width="{_WIDTH}" height="{row}"/>'
        for i in range(0, len(shown), 2)
    ]
    foot = height - _FOOT
    for tick in axis.ticks():
        x = axis.x(tick)
        kind = "zero" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD - 6}" y2="{foot + 4}"/>')
        words = f"{tick * 100:+.6g} %" if tick else "0"
        parts.append(f'<text class="soft" x="{x:.1f}" y="{foot + 20}" text-anchor="middle">{words}</text>')
    for i, (finding, name) in enumerate(zip(shown, names, strict=True)):
        parts += _row(finding, name, axis, _HEAD + row * i, row, dot)
    left = len(findings) - len(shown)
    note = f'<p class="note">… and {left:,} more of this metric, none worse: verdict.json has all.</p>' if left else ""
    direction = {True: "less is worse, to the right", False: "more is worse, to the right", None: "more to the right"}
    title = f"<h2>{_text(metric)} <small>{direction[shown[0].higher_is_better]}</small></h2>"
    return f'{title}<div class="scroll">{"".join(parts)}</svg></div>{note}'


def _name(finding: Finding) -> list[str]:
    """Its title in lines; the middle of a very long one is left out."""
    lines = textwrap.wrap(wording.line(finding.title), _NAME)
    if len(lines) > _LINES:
        lines = textwrap.wrap(wording.shortened(finding.title, _NAME * (_LINES - 1)), _NAME)
    return lines[:_LINES]


def _numbers(finding: Finding) -> str:
    """+10.1 % [+9.20, +11.0]; of a ratio that is held: 1.05 (+5.01 %), >= 0.950"""
    if bounds := wording.bounds(finding):
        return f"{wording.number(finding.candidate)} ({wording.change(finding)}), {bounds}"
    return wording.change(finding)


def _row(finding: Finding, name: Sequence[str], axis: _Axis, top: float, height: float, dot: str) -> list[str]:
    """Name, thresholds, pairs, effect with its interval, and the numbers."""
    middle = top + height / 2
    first = middle + 4.5 - (len(name) - 1) * _LINE / 2
    parts = [
        *(f'<text x="8" y="{first + _LINE * i:.1f}">{_text(words)}</text>' for i, words in enumerate(name)),
        *(
            f'<line class="{kind}" x1="{axis.x(at):.1f}" x2="{axis.x(at):.1f}" y1="{top + 3}" y2="{top + height - 3}"/>'
            for kind, at in wording.thresholds(finding)
        ),
    ]
    for i, value in enumerate(finding.series):
        if wording.is_number(value):
            y = middle + (i % 3 - 1) * 6  # side by side where values are equal; the order says which
            told = f"<title>{dot} {i + 1}: {wording.percent(value)}</title>"
            parts.append(
                f'<circle class="pair {finding.outcome}" cx="{axis.x(value):.1f}" cy="{y:.1f}" r="3.4">{told}</circle>'
            )
    bounds = finding.interval or ()
    if len(bounds) == 2 and all(map(wording.is_number, bounds)):
        ends = " ".join(f'x{i}="{axis.x(bound):.1f}"' for i, bound in enumerate(bounds, 1))
        parts.append(f'<line class="interval {finding.outcome}" {ends} y1="{middle}" y2="{middle}"/>')
    if wording.is_number(finding.change):
        x = axis.x(finding.change)
        parts.append(
            f'<path class="{finding.outcome}" d="M{x - 6:.1f} {middle}L{x:.1f} {middle - 6}L{x + 6:.1f} {middle}'
            f'L{x:.1f} {middle + 6}Z"><title>{_text(finding.sentence)}</title></path>'
        )
    said = _LABELS + _PLOT + 14
    label = wording.LABELS[finding.outcome]
    parts.append(f'<text class="{finding.outcome}" x="{said}" y="{middle - 2}" font-size="12">{label}</text>')
    parts.append(f'<text class="soft" x="{said}" y="{middle + 12}">{_text(_numbers(finding))}</text>')
    return parts


class _Axis:
    """Changes to px, worse to the right."""

    def __init__(self, low: float, high: float, worse: int) -> None:
        low, high = (low, high) if high - low > 1e-9 else (-0.001, 0.001)
        room = (high - low) * 0.04
        self.low, self.high, self.worse = low - room, high + room, worse

    def x(self, change: float) -> float:
        share = (change - self.low) / (self.high - self.low)
        return _LABELS + _PLOT * (share if self.worse > 0 else 1 - share)

    def ticks(self) -> list[float]:
        """Round changes, five to ten of them; 0 is one."""
        step = 10 ** math.floor(math.log10((self.high - self.low) / 5))
        step *= next(k for k in (1, 2, 5, 10) if (self.high - self.low) / (step * k) <= 9)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [i * step for i in range(first, last + 1)]


def _text(text: object) -> str:
    return escape(wording.line(text))
