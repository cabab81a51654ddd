"""pairs.html: the change of each pair under each hypothesis, with floor and margin, as one page that needs no other.

One panel a metric, one row a hypothesis, all rows of a panel on one scale, worse to the right. Drawn as SVG with the
report's colours, so that it follows light and dark; hovering over a dot names its pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from kvbench.gate import wording
from kvbench.gate.strip_plot import scale, thresholds
from kvbench.gate.verdict import Finding, Verdict

ROWS = 80  # of one panel; the best of those that passed are left out
_LABELS, _PLOT, _SAID, _ROW, _HEAD, _FOOT = 300, 640, 230, 34, 26, 30  # px
_WIDTH = _LABELS + _PLOT + _SAID
_DOTS = {"compare": "pair of fresh servers", "limits": "repeat"}
_STYLE = """
svg { width: 100%; min-width: 900px; height: auto; }
svg { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
svg text { fill: var(--ink); } svg .soft { fill: var(--soft); font-size: 12px; }
svg .grid { stroke: var(--line); } svg .zero { stroke: var(--soft); }
svg .floor, svg .margin { stroke: var(--bad); stroke-width: 1.5; }
svg .margin { stroke: var(--warn); stroke-dasharray: 4 3; }
svg .row { fill: var(--panel); } svg .pair { fill-opacity: 0.55; }
svg .interval { stroke-width: 3; stroke-linecap: round; }
.fail { fill: var(--bad); stroke: var(--bad); } .pass { fill: var(--accent); stroke: var(--accent); }
.invalid, .inconclusive { fill: var(--warn); stroke: var(--warn); }
svg text.fail, svg text.invalid, svg text.inconclusive, svg text.pass { stroke: none; font-weight: 600; }
svg text.fail { fill: var(--bad); } svg text.pass { fill: var(--soft); }
svg text.invalid, svg text.inconclusive { fill: var(--warn); }
.key { display: inline-block; width: 16px; border-top: 2px solid var(--bad); margin: 0 6px 4px 0; }
.key.dashed { margin-left: 20px; border-top: 2px dashed var(--warn); }
.banner.fail, .banner.invalid, .banner.empty { border-color: var(--bad); }
.banner.fail strong, .banner.invalid strong { color: var(--bad); }
.banner.inconclusive { border-color: var(--warn); } .banner.inconclusive strong { color: var(--warn); }
"""


def pair_page(verdict: Verdict) -> str | None:
    """The page; None where no finding has pairs."""
    panels: dict[str, list[Finding]] = {}
    for finding in wording.worst_first(verdict.findings):
        if any(map(wording.is_number, finding.series)):
            panels.setdefault(finding.metric or finding.title, []).append(finding)
    if not panels:
        return None
    css = files("kvbench.report").joinpath("templates", "page.css").read_text(encoding="utf-8")
    label = wording.LABELS[verdict.outcome]
    known = ", ".join(f"{role} {words}" for role, words in wording.sides(verdict))
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{label}: pairs</title><style>{css}{_STYLE}</style></head><body><main>",
            f'<p class="kicker">kvbench {verdict.kind}{": " if known else ""}{_text(known)}</p>',
            f'<h1>{_text(verdict.sentence)}</h1><div class="banner {verdict.outcome}"><strong>{label}</strong>',
            f"{_text(wording.counted(verdict))}</div>",
            f'<p class="caption">A dot is one {_DOTS.get(verdict.kind, "pair")}: the candidate against the base. The '
            "diamond is the effect and the bar its 95 % interval; worse is to the right.</p>",
            '<p class="caption"><span class="key"></span>floor: a smaller effect never fails'
            '<span class="key dashed"></span>margin: to pass, a worse effect must be ruled out</p>',
            *(_panel(metric, findings) for metric, findings in panels.items()),
            "</main></body></html>\n",
        ]
    )


def _panel(metric: str, findings: Sequence[Finding]) -> str:
    """One metric's rows on one scale."""
    shown = findings[:ROWS]
    worse = wording.worse_sign(shown[0])
    values = [value for finding in shown for value in _values(finding)]
    axis = _Axis(*scale(values), worse)
    height = _HEAD + _ROW * len(shown) + _FOOT
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Pairs of {_text(metric)}">']
    parts += [_row_back(i) for i in range(0, len(shown), 2)]
    foot = height - _FOOT
    for tick in axis.ticks():
        x = axis.x(tick)
        kind = "zero" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD - 6}" y2="{foot + 4}"/>')
        words = f"{tick * 100:+.6g} %" if tick else "0"
        parts.append(f'<text class="soft" x="{x:.1f}" y="{foot + 20}" text-anchor="middle">{words}</text>')
    for i, finding in enumerate(shown):
        parts += _row(finding, axis, _HEAD + _ROW * i)
    left = len(findings) - len(shown)
    note = f'<p class="note">… and {left:,} more of this metric, none worse: verdict.json has all.</p>' if left else ""
    direction = "less" if worse < 0 else "more"
    title = f"<h2>{_text(metric)} <small>{direction} is worse</small></h2>"
    return f'{title}<div class="scroll">{"".join(parts)}</svg></div>{note}'


def _values(finding: Finding) -> list[float]:
    """All that a row has to have room for."""
    values = (*finding.series, *(finding.interval or ()), finding.change, *thresholds(finding).values())
    return [value for value in values if wording.is_number(value)]


def _row_back(i: int) -> str:
    return f'<rect class="row" x="0" y="{_HEAD + _ROW * i}" width="{_WIDTH}" height="{_ROW}"/>'


def _row(finding: Finding, axis: _Axis, top: float) -> list[str]:
    """Title, thresholds, pairs, effect with its interval, and the numbers."""
    middle = top + _ROW / 2
    title = wording.line(finding.title, 200)
    parts = [
        f'<text x="8" y="{middle + 4.5}">{_text(wording.shortened(title, 42))}<title>{_text(title)}</title></text>',
        *(
            f'<line class="{name}" x1="{axis.x(at):.1f}" x2="{axis.x(at):.1f}" y1="{top + 3}" y2="{top + _ROW - 3}"/>'
            for name, at in thresholds(finding).items()
        ),
    ]
    for i, value in enumerate(finding.series):
        if wording.is_number(value):
            y = middle + (i % 3 - 1) * 6  # side by side where values are equal; the order says which
            told = f"<title>pair {i + 1}: {wording.percent(value)}</title>"
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
    parts.append(f'<text class="soft" x="{said}" y="{middle + 12}">{_text(wording.change(finding))}</text>')
    return parts


class _Axis:
    """Changes to px, worse to the right."""

    def __init__(self, low: float, high: float, worse: int) -> None:
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
