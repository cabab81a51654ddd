"""What each configuration changes in the model's answers: from quality.json, else from canaries under load. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import pandas as pd
import plotly.graph_objects as go

from kvbench.common import text as words
from kvbench.metrics.definitions import ENGINE
from kvbench.report.comparisons import Comparisons, amount, interval, sized, spread, tokens_held
from kvbench.report.provenance import model_name, random_weights
from kvbench.report.style import GREY, Drawing, LineStyle, finish, safe
from kvbench.report.tables import Column, Part, ReportTable, Row, Section, Value, listed_table, texts
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.quality import MARGINS, ConfigurationFigures, QualityResult, figure, is_beyond
from kvbench.runs.server_info import OutlierFacts
from kvbench.workload.settings import effective, value_words

CONTROL = "control: the same twice (A/A)"
ANSWERS_NOTE = (
    "Each configuration against the contiguous full-precision engine on the same prompts; small: 95 % intervals. "
    "Control (A/A): that engine twice, with other batch-mates, chunks and order, which is what rounding alone does; a "
    "limit is the control and a margin. KLD (nats a token) and RMS change in probability: how far predictions move. "
    "Equal answers: whole greedy answers that are the same. Passkeys: a fact hidden in the prompt, told exactly. Full "
    "pool: the same prompts again while the KV is too small for them."
)
_NONE = Value("–")
_MOST_REASONS = 2
_OUTLIER = 10.0  # times the median channel
_STEPS = {"int8_per_token_head": 127, "int4_per_token_head": 7}  # from zero to the largest value of a token's KV head
_LEAST_KLD = 1e-6  # nats, far below any limit: what is below, and 0, is drawn here: a log axis has no 0
_MOST_TICKS = 6
_FEWEST_CANARIES = 20  # all right: then fewer than 15 % are wrong, at 95 % (3 / n)


@dataclass(frozen=True)
class Quality:
    """The quality of one configuration's answers.

    ``figures``: as quality.json has them; None where it was not measured.
    ``model``: which one answered, where it is not the run's own.
    ``doubt``: why the figures do not count for this run, such as "random weights"; empty where they do.
    ``canaries``: how many different ones were answered under a load, if these are enough, all right, and its KV is in
    full precision.
    ``wrong``: a sentence for each load under which more were answered wrongly than its KV dtype explains.
    """

    figures: ConfigurationFigures | None = None
    model: str = ""
    doubt: str = ""
    canaries: int = 0
    wrong: tuple[str, ...] = ()

    @property
    def outside(self) -> tuple[str, ...]:
        """A sentence for each limit that it breaks, and for each load with wrong answers."""
        return (*(self.figures.outside if self.figures and not self.doubt else ()), *self.wrong)

    @property
    def safe(self) -> bool:
        """Tests whether its answers were measured and lie within the limits, or all its canaries were right."""
        return not (self.outside or self.doubt) and (bool(self.figures) or self.canaries > 0)

    @property
    def open(self) -> bool:
        """Tests whether a measurement may yet find it safe."""
        return not (self.safe or self.outside)

    @property
    def verdict(self) -> str:
        """For the end of the verdict on its speed; empty where it is safe."""
        return "" if self.safe else "not safe" if self.outside else "safety not known"

    @property
    def brief(self) -> str:
        """KLD 0.0009; KLD 0.0009 of random weights; quality not measured; all 24 canaries right; wrong answers"""
        if self.wrong:
            return "wrong answers under load"
        if not self.figures:
            return f"all {self.canaries} canaries right" if self.canaries else "quality not measured"
        return f"KLD {kld_text(figure(self.figures, 'mean'))}{f' of {self.doubt}' if self.doubt else ''}"

    def __str__(self) -> str:
        """KLD 0.0009, perplexity +0.2 %, passkeys 98 %"""
        return ", ".join(filter(None, [self.brief, *_costs(self.figures)]))


def _costs(figures: ConfigurationFigures | None) -> Iterator[str]:
    """perplexity +4.0 %; passkeys 91 %: what was measured of both"""
    more, passkeys = (figure(figures, name) for name in ("perplexity_change", "passkey.share"))
    if more is not None:
        yield f"perplexity {amount(1 + more)}"
    if passkeys is not None:
        yield f"passkeys {words.percent(passkeys)}"


def is_quantised(cell: MeasuredCell) -> bool:
    """Tests whether its KV is not in the model's own dtype."""
    return effective(cell.settings, "kv_cache_dtype") != "auto"


def outlier_words(cell: MeasuredCell, facts: OutlierFacts) -> str:
    """K of layer 2 has a channel 100x the typical one: INT8 has 1.3 of 127 steps left for the others

    ``facts``: ``kv_outliers`` of /server_info or of quality.json. Empty without an outlier.
    """
    dtype, said = effective(cell.settings, "kv_cache_dtype"), []
    for side, ratio, layer, stored in (
        ("K", facts.k, facts.k_layer, facts.k_stored or facts.k),
        ("V", facts.v, facts.v_layer, facts.v),
    ):
        if ratio is None or stored is None or ratio < _OUTLIER:
            continue
        steps = _STEPS.get(dtype)
        text = f"{side} of layer {layer} has a channel {times(ratio)} the typical one"
        if stored < ratio:
            text += f", balanced to {times(stored)} before it is stored"
        elif steps:
            name = value_words("kv_cache_dtype", dtype)
            text += f": {name} has {words.significant(steps / ratio, 2)} of {steps} steps left for the others"
        said.append(text)
    return "; ".join(said)


def times(ratio: float) -> str:
    """1.7x, 1,110x"""
    return f"{words.count(ratio) if ratio >= 100 else words.significant(ratio, 2)}x"


def saturation_words(cell: MeasuredCell) -> str:
    """0.2 % of the sampled K and V have fp8's largest code; empty where none has."""
    cut, sampled = (cell.counter(f"kv_{which}_values_total") for which in ("saturated", "sampled"))
    return f"{fine_percent(cut / sampled)} of the sampled K and V have fp8's largest code" if cut and sampled else ""


def qualities(run: Run) -> dict[str, Quality]:
    """The quality of each configuration's answers, by its id."""
    result, by_id = run.quality, {}
    doubt = "random weights" if result and result.random_weights else ""
    if result and not doubt and result.differs_from(run.manifest):
        doubt = "other code or weights"
    for config_id in dict.fromkeys(cell.config_id for cell in run.cells):
        cells = [cell for cell in run.cells if cell.config_id == config_id]
        wrong = tuple(why for cell in cells for why in cell.wrong_answers)
        if result and config_id in result.configurations:
            known = result.configurations[config_id]
            by_id[config_id] = Quality(known, result.model if result.beside else "", doubt, wrong=wrong)
            continue
        counted = [cell.canaries for cell in cells if not is_quantised(cell)]
        right = 0 if any(each.wrong for each in counted) else max((each.distinct for each in counted), default=0)
        by_id[config_id] = Quality(canaries=right if right >= _FEWEST_CANARIES else 0, wrong=wrong)
    return by_id


# --- The chapter ---


def quality_parts(
    run: Run, comparisons: Comparisons, by_id: Mapping[str, Quality], look: Mapping[str, LineStyle]
) -> Iterator[Part]:
    """The chapter on the answers: sentences, the figure and the tables; nothing without a measurement."""
    result = run.quality
    if result is None:
        return
    yield from answer_sentences(run, result, comparisons.names)
    yield from prices(comparisons, by_id)
    yield price_drawing(result, comparisons, by_id, look)
    table = answer_quality_table(result, comparisons)
    yield Section("answer-quality", "By configuration", table, ANSWERS_NOTE, folded=False)
    names = {cell.config_id: cell.name for cell in comparisons.cells}
    yield Section("passkeys", "Where passkeys go wrong", passkey_table(result, names))


def answer_sentences(run: Run, result: QualityResult, short_names: Mapping[str, str]) -> Iterator[str]:
    """Sentences on how many are within the limits, with which model; ``short_names``: by cell id."""
    names = {cell.config_id: short_names[cell.cell_id] for cell in run.cells}
    outside = [names.get(config_id, config_id) for config_id, known in result.configurations.items() if known.outside]
    whole = words.plural(len(result.configurations), "configuration")
    within = f"{len(outside)} of {whole} outside the limits: {words.and_more(outside)}"
    missing = len(names.keys() - result.configurations.keys())
    yield (
        f"{within if outside else f'{whole}, each within the limits'}"
        f"{f'; {missing} of the run not measured' if missing else ''}."
    )
    if result.note:
        yield result.note
    elif result.beside:
        own = model_name(run) or "the run's own model"
        why = ", whose weights are random and can give no wrong answer" if random_weights(run) else ""
        yield (
            f"Measured with {result.model}, not with {own}{why}. It shows what this engine and these settings do to "
            "answers; what a quantised KV costs your model, only your model tells (kvbench quality RUN --model PATH)."
        )
    if different := result.differs_from(run.manifest):
        yield f"Measured with other code, versions or weights than the run ({'; '.join(different)}): it does not count."


def prices(comparisons: Comparisons, by_id: Mapping[str, Quality]) -> Iterator[str]:
    """INT4 KV: KLD 0.03, perplexity +4.0 %, passkeys 91 %, for 3.8x the tokens in the same memory at +59 % tokens/s
    (55 to 62) served: outside the limits.

    One for each quantised KV that was measured; tokens/s where their change is decided.
    """
    for cell in comparisons.reported:
        known = by_id[cell.config_id]
        if not (is_quantised(cell) and known.figures):
            continue
        more = tokens_held(cell, comparisons.base) if comparisons.base else None
        speed = comparisons.throughput_of(cell)
        text = f"{comparisons.names[cell.cell_id]}: {known}"
        if more and more >= 1.1:
            text += f", for {words.significant(more, 2)}x the tokens in the same memory"
        if speed and speed.decided:
            clock = f"in {speed.clock}" if speed.clock == ENGINE else speed.clock
            text += " ".join(filter(None, [" at", amount(speed.ratio), "tokens/s", interval(speed), clock]))
        verdict = "outside the limits" if known.outside else known.verdict or "within the limits"
        outliers = outlier_words(cell, known.figures.kv_outliers)
        yield f"{text}: {verdict}.{f' {outliers}.' if outliers else ''}"


# --- The tables ---


def kld_text(value: float | None) -> str:
    """0.0009, 3e-11: two figures."""
    return "–" if value is None else f"{value:.2g}"


def fine_percent(value: float) -> str:
    """0.0123 -> 1.2 %; 1e-6 -> 0.0001 %"""
    return f"{100 * value:.2g} %"


def _signed_percent(value: float) -> str:
    """+4.00 %, −0.02 %"""
    return f"{100 * value:+.2f} %".replace("-", "−")


def _interval(low: float | None, high: float | None, render: Callable[[float], str]) -> str:
    return "" if low is None or high is None else f"{render(low)} to {render(high)}"


def _number(figures: ConfigurationFigures | None, name: str, render: Callable[[float], str]) -> Value:
    """A figure with its interval, whose ends are named as the figure is with ``_low`` and ``_high``."""
    known, low, high = (figure(figures, name + end) for end in ("", "_low", "_high"))
    return _NONE if known is None else Value(render(known), known, _interval(low, high, render))


def _share(figures: ConfigurationFigures | None, name: str, agreeing: str, of: str) -> Value:
    """A share with its interval and its counts: ``agreeing`` of ``of``; for greedy answers where they part."""
    parts = ("share", "low", "high", agreeing, of, "first_divergence")
    share, low, high, some, every, first = (figure(figures, f"{name}.{part}") for part in parts)
    if share is None:
        return _NONE
    notes = [
        _interval(low, high, words.percent).replace(" % to", " to"),
        f"{some:.0f} of {every:.0f}" if some is not None and every is not None else "",
        f"parts at token {first:.0f}" if first is not None else "",
    ]
    return Value(words.percent(share), share, "\n".join(filter(None, notes)))


def _full_pool(figures: ConfigurationFigures | None) -> Value:
    """Wrong passkeys of all, other answers that are not equal, and what the pool went through."""
    pool = figures.full_pool if figures else None
    if pool is None:
        return _NONE
    moved = {"swapped": pool.swapped_pages, "evicted": pool.evicted_pages}
    pages = [f"{count:,} {what}" for what, count in moved.items() if count]
    canaries, wrong = pool.canaries, pool.passkey_asked - pool.passkey_right
    notes = [
        f"{pool.agree} of {pool.answers} equal" if pool.answers else "",
        f"canaries: {canaries.wrong} of {canaries.answered}" if canaries and canaries.answered else "",
        words.plural(pool.preemptions, "preemption") if pool.preemptions else "",
        f"pages: {', '.join(pages)}" if pages else "",
    ]
    return Value(f"{wrong} of {pool.passkey_asked}", float(wrong), "\n".join(filter(None, notes)))


_COLUMNS: tuple[tuple[str, str, str, Callable[[ConfigurationFigures | None], Value]], ...] = (
    ("mean", "KLD", "mean over positions, nats", lambda f: _number(f, "mean", kld_text)),
    (
        "perplexity_change", "perplexity", "its change; of held-out text",
        lambda f: _number(f, "perplexity_change", _signed_percent),
    ),
    ("passkey.share", "passkeys", "exact answers", lambda f: _share(f, "passkey", "right", "asked")),
    (
        "full_pool", "wrong, full pool",
        "passkeys told wrongly while the KV is too small; small: answers equal to those of the baseline", _full_pool,
    ),
    ("p99", "KLD p99", "nats", lambda f: _number(f, "p99", kld_text)),
    (
        "rms_dp", "RMS Δp", "change in probability of the token that follows",
        lambda f: _number(f, "rms_dp", fine_percent),
    ),
    ("greedy.share", "equal answers", "whole greedy answers", lambda f: _share(f, "greedy", "agree", "answers")),
)  # fmt: skip
_LIMITS: dict[str, Callable[[float], str]] = {
    "perplexity_change": _signed_percent, "rms_dp": fine_percent, "greedy.share": words.percent,
    "passkey.share": words.percent,
}  # fmt: skip


def answer_quality_table(result: QualityResult, comparisons: Comparisons) -> ReportTable:
    """The control, a row a configuration in the order of the run, and the limits."""
    reported = {cell.config_id: cell for cell in comparisons.reported}
    names = {cell.config_id: cell.name for cell in comparisons.cells}
    nothing = (_NONE,) * 3
    rows = [Row(None, (Value(CONTROL), *nothing, *_figures(result.control, {})), "control")]
    for config_id in dict.fromkeys([*names, *result.configurations]):
        known, cell = result.configurations.get(config_id), reported.get(config_id)
        speed_and_room = _speed_and_room(cell, comparisons) if cell else (_NONE, _NONE)
        within = Value("not measured")
        if known:
            reasons = words.and_more(known.outside, _MOST_REASONS, "; ")
            within = Value("outside", 1, reasons, "worse") if known.outside else Value("within", 0)
        shown = (*texts(names.get(config_id, config_id)), within, *speed_and_room)
        rows.append(Row(cell, (*shown, *_figures(known, result.limits)), "configurations"))
    rows.append(Row(None, (Value("limit"), *nothing, *(_limit(key, result.limits) for key, *_ in _COLUMNS)), "limit"))
    at = f", {comparisons.load.short}" if comparisons.load else ""
    heads = [
        ("configuration", "configuration", ""),
        ("within", "limits", "within or outside, and why"),
        ("tokens_per_s", f"output tok/s{at}", "served; small: the change against the run's baseline"),
        ("capacity", "tokens held", "in the same memory; small: against the run's baseline"),
        *((key, title, hint) for key, title, hint, _ in _COLUMNS),
    ]
    return ReportTable(tuple(Column(*head) for head in heads), tuple(rows))


def _figures(known: ConfigurationFigures | None, limits: Mapping[str, float]) -> Iterator[Value]:
    """An entry a column, marked where it is beyond its limit."""
    for key, *_, value_of in _COLUMNS:
        value = value_of(known)
        beyond = key in limits and isinstance(value.sort, float) and is_beyond(key, value.sort, limits[key])
        outside = known.outside if known else ()
        beyond |= key == "full_pool" and any("full pool" in why for why in outside)
        yield replace(value, mark="worse") if beyond else value


def _limit(key: str, limits: Mapping[str, float]) -> Value:
    if key not in limits:
        return _NONE
    return Value(f"{'≥' if MARGINS.get(key, 0.0) < 0 else '≤'} {_LIMITS.get(key, kld_text)(limits[key])}")


def _speed_and_room(cell: MeasuredCell, comparisons: Comparisons) -> tuple[Value, Value]:
    """Output tokens/s with their change, and the tokens that the memory holds."""
    speed, room = _NONE, _NONE
    if rates := spread(cell.throughput()):
        more = comparisons.throughput_of(cell)
        note = f"{sized(more)} {more.clock}" if more else ""
        speed = Value(words.tokens_per_s(rates.median), rates.median, note)
    if held := cell.capacity.capacity_tokens:
        more = tokens_held(cell, comparisons.base) if comparisons.base else None
        note = f"{words.significant(more, 2)}x" if more and abs(more - 1) > 0.05 else ""
        room = Value(words.count(held), held, note)
    return speed, room


_BINS = (("by_depth", "depth of the fact"), ("by_length", "prompt length"), ("by_residue", "length mod page size"))


def passkey_table(result: QualityResult, names: Mapping[str, str]) -> ReportTable:
    """Right passkeys by where the fact stands and by how long the prompt is: a row a bin, a column a configuration.

    Of the control and the configurations with a wrong one; without any no rows, as there is nothing to look for.
    Lengths mod page size are many: those of which all are right share a row. ``names``: by configuration id.
    """
    columns = {CONTROL: result.control}
    for config_id, figures in result.configurations.items():
        share = figure(figures, "passkey.share")
        if share is not None and share < 1:
            columns[names.get(config_id, config_id)] = figures
    rows = []
    for key, title in _BINS if len(columns) > 1 else ():
        bins = [{part.of: (part.right, part.asked) for part in getattr(f.passkey, key)} for f in columns.values()]
        every = list(dict.fromkeys(name for counts in bins for name in counts))
        all_right = []
        if key == "by_residue":
            wrong = {name for counts in bins for name, (right, asked) in counts.items() if right < asked}
            all_right = [name for name in every if name not in wrong]
        named = {name: [counts.get(name) for counts in bins] for name in every if name not in all_right}
        if all_right:
            merged = ([counts[name] for name in all_right if name in counts] for counts in bins)
            named["all others"] = [tuple(map(sum, zip(*counts, strict=True))) for counts in merged]
        for name, counts in named.items():
            rows.append(Row(None, (*texts(title), Value(name), *map(_right, counts)), key))
    return listed_table(("by", "of", *columns), rows)


def _right(counts: tuple[int, ...] | None) -> Value:
    if not counts or not counts[1]:
        return _NONE
    right, asked = counts
    return Value(f"{right} of {asked}", right / asked, "", "worse" if right < asked else "")


# --- The figure: what answers cost beside what speed gains ---


def price_frame(comparisons: Comparisons, by_id: Mapping[str, Quality]) -> pd.DataFrame:
    """A row a configuration of the reported load that was measured.

    configuration, label: its name, and what distinguishes it where it is quantised or outside the limits, else ""
    outside: whether it breaks a limit
    kld, kld_low, kld_high: nats; the ends are NaN without an interval
    change, low, high: of output tokens/s against the baseline [%], 0 for the baseline; NaN where not known
    clock: of the change
    """
    rows = []
    for cell in comparisons.reported:
        known = by_id[cell.config_id]
        kld = [figure(known.figures, name) for name in ("mean", "mean_low", "mean_high")]
        more = comparisons.throughput_of(cell)
        if kld[0] is None or not (more or cell.is_baseline):
            continue
        ratios = (more.ratio, more.low, more.high) if more else (1.0, None, None)
        label = comparisons.names[cell.cell_id] if known.outside or is_quantised(cell) else ""
        changes = (None if ratio is None else 100 * (ratio - 1) for ratio in ratios)
        rows.append([cell.name, label, bool(known.outside), *kld, *changes, more.clock if more else "baseline"])
    numbers = ["kld", "kld_low", "kld_high", "change", "low", "high"]
    columns = ["configuration", "label", "outside", *numbers, "clock"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, float))


def price_figure(
    frame: pd.DataFrame, noise: float | None, limit: float | None, look: Mapping[str, LineStyle]
) -> go.Figure:
    """KLD over the change of throughput. ``noise``: up to where the control's KLD reaches; ``limit``: of the KLD."""
    made = go.Figure()
    for row in frame.itertuples():
        made.add_trace(_point(row, look[row.configuration]))
    ends = [*frame["kld"], *frame["kld_low"].dropna(), *frame["kld_high"].dropna(), *filter(None, (noise, limit))]
    low, high = (math.log10(max(each, _LEAST_KLD)) for each in (min(ends), max(ends)))
    low, high = low - 0.12 * (high - low) - 0.3, high + 0.08 * (high - low) + 0.3
    if noise is not None:
        top = max(noise, _LEAST_KLD)
        made.add_hrect(10**low, top, fillcolor="rgba(128,128,128,0.2)", line_width=0, layer="below")
        _note(made, low, "noise of the control")
    if limit is not None:
        made.add_hline(limit, line={"color": GREY, "width": 1.5, "dash": "dash"}, layer="below")
        _note(made, math.log10(limit), f"limit {kld_text(limit)}")
    made.add_vline(0, line_width=1, line_color=GREY, layer="below")
    decades = range(math.ceil(low), math.floor(high) + 1)
    ticks = [10.0**each for each in decades if each % max(1, math.ceil(len(decades) / _MOST_TICKS)) == 0]
    names = [f"{'≤ ' * (tick <= _LEAST_KLD)}{tick:g}".replace("e-0", "e-") for tick in ticks]
    made.update_yaxes(type="log", range=[low, high], tickvals=ticks, ticktext=names, title_text="KLD, nats a token")
    made.update_xaxes(title_text="change of output tokens/s, %", nticks=7)
    finish(made, 380)
    return made.update_layout(margin={"t": 64}, legend_font_size=12)


def _point(row: pd.Series, look: LineStyle) -> go.Scatter:
    """One configuration with both intervals."""
    kld = max(row.kld, _LEAST_KLD)

    def bars(value: float, low: float, high: float) -> dict[str, object]:
        more, less = (0.0 if pd.isna(end) else max(0.0, end) for end in (high - value, value - low))
        style = {"thickness": 1.2, "width": 3, "color": look.faint(0.7)}
        return {"type": "data", "symmetric": False, "array": [more], "arrayminus": [less], **style}

    return go.Scatter(
        x=[row.change], y=[kld], mode="markers+text", name=safe(row.configuration), text=[safe(row.label)],
        textposition="top center" if row.outside else "bottom center", textfont={"size": 11}, cliponaxis=False,
        marker={"color": look.colour, "size": 11, "symbol": "x" if row.outside else "circle"},
        error_x=bars(row.change, row.low, row.high),
        error_y=bars(kld, max(row.kld_low, _LEAST_KLD), row.kld_high),
        hovertext=[
            f"<b>{safe(row.configuration)}</b><br>KLD {kld_text(row.kld)}"
            f"{'' if pd.isna(row.kld_low) else f' ({kld_text(row.kld_low)} to {kld_text(row.kld_high)})'}<br>"
            f"output tokens/s {amount(1 + row.change / 100)}, {row.clock}{'<br>outside the limits' * row.outside}"
        ],
        hoverinfo="text",
    )  # fmt: skip


def _note(made: go.Figure, y: float, text: str) -> None:
    """A line of text at the left end, above ``y``: the logarithm, which annotations take on a log axis."""
    made.add_annotation(
        x=0, xref="paper", xanchor="left", y=y, yanchor="bottom", text=text, showarrow=False,
        font={"size": 11, "color": GREY},
    )  # fmt: skip


def price_drawing(
    result: QualityResult, comparisons: Comparisons, by_id: Mapping[str, Quality], look: Mapping[str, LineStyle]
) -> Drawing | None:
    """Draws speed against the quality of answers; None where no configuration has both figures."""
    frame = price_frame(comparisons, by_id)
    if frame.empty or comparisons.load is None:
        return None
    ends = [figure(result.control, name) for name in ("mean_high", "mean")]
    noise = next((end for end in ends if end is not None), None)
    caption = (
        f"At {comparisons.load.label}; KLD measured with {result.model}. Right is faster, low is closer to full "
        f"precision. {'Crosses: outside a limit, of this or another figure.' if frame['outside'].any() else ''}"
    )
    outside = list(frame[frame["outside"]]["label"])
    beyond = f"{words.and_more(outside)} outside the limits" if outside else "nothing beyond the limits"
    made = price_figure(frame, noise, result.limits.get("mean"), look)
    return Drawing("quality", f"What speed costs in answers: {beyond}", caption.strip(), made, 520)
