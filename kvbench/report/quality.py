"""The changes of each configuration to the model's answers: from quality.json, else canaries under load. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from kvbench.common import text as words
from kvbench.metrics.canaries import FEWEST_CANARIES
from kvbench.report.comparisons import Comparisons, amount, interval, sized, spread, tokens_held
from kvbench.report.provenance import model_name, random_weights
from kvbench.report.tables import NO_TABLE, NONE, Part, ReportTable, Row, Section, Value, entry, listed_table, texts
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.quality import MARGINS, ConfigurationFigures, QualityResult, figure, is_beyond
from kvbench.runs.server_info import OutlierFacts
from kvbench.workload.settings import effective, value_words

CONTROL = "control: the same twice (A/A)"
_MOST_REASONS = 2
_OUTLIER = 10.0  # times the median channel
_STEPS = {"int8_per_token_head": 127, "int4_per_token_head": 7}  # from zero to the largest value of a token's KV head
_VISIBLE = 1.1  # times the tokens in the same memory: less is not said
_BINS = {"by_depth": "depth of the fact", "by_length": "prompt length", "by_residue": "length mod page size"}


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
        broken = self.figures.outside if self.figures and not self.doubt else ()
        return (*broken, *self.wrong)

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
        """The words after the verdict on its speed; empty where it is safe."""
        states = {"safe": self.safe, "outside": self.outside, "open": True}
        return say("quality.verdict", next(state for state, holds in states.items() if holds))

    @property
    def brief(self) -> str:
        """The quality in few words: `KLD 0.0009`, `quality not measured`, `all 24 canaries right`, `wrong answers`."""
        if self.wrong:
            return say("quality.wrong")
        if self.figures is None:
            return say("quality.canaries", n=self.canaries)
        kld = kld_text(figure(self.figures, "mean"))
        return say("quality.kld", bool(self.doubt), kld=kld, doubt=self.doubt)

    def __str__(self) -> str:
        """KLD 0.0009, perplexity +0.2 %, passkeys 98 %; as paged-p16, and at a full pool its own"""
        text = ", ".join(filter(None, [self.brief, *_costs(self.figures)]))
        return text + (like_words(self.figures) if self.figures and not self.wrong else "")


def _costs(figures: ConfigurationFigures | None) -> Iterator[str]:
    """Yields what was measured of both: `perplexity +4.0 %`, `passkeys 91 %`."""
    more, passkeys = (figure(figures, name) for name in ("perplexity_change", "passkey.share"))
    if more is not None:
        yield f"perplexity {amount(1 + more)}"
    if passkeys is not None:
        yield f"passkeys {words.percent(passkeys)}"


def like_words(figures: ConfigurationFigures) -> str:
    """Writes whose figures these are: `; as paged-p16, and at a full pool its own`; empty where they are its own."""
    return say("quality.like", figures.measured, like=figures.like) if figures.like else ""


def is_quantised(cell: MeasuredCell) -> bool:
    """Tests whether its KV is not in the model's own dtype."""
    return effective(cell.settings, "kv_cache_dtype") != "auto"


def outlier_words(cell: MeasuredCell, facts: OutlierFacts) -> str:
    """K of layer 2 has a channel 100x the typical one: INT8 has 1.3 of 127 steps left for the others

    ``facts``: ``kv_outliers`` of /server_info or of quality.json. Empty without an outlier.
    """
    dtype = effective(cell.settings, "kv_cache_dtype")
    name, steps, parts = value_words("kv_cache_dtype", dtype), _STEPS.get(dtype), []
    for side, ratio, layer, stored in (
        ("K", facts.k, facts.k_layer, facts.k_stored or facts.k),
        ("V", facts.v, facts.v_layer, facts.v),
    ):
        if ratio is None or stored is None or ratio < _OUTLIER:
            continue
        text = say("quality.outlier", side=side, layer=layer, ratio=times(ratio))
        if stored < ratio:
            text += say("quality.balanced", stored=times(stored))
        elif steps:
            text += say("quality.steps_left", dtype=name, left=words.significant(steps / ratio, 2), steps=steps)
        parts.append(text)
    return "; ".join(parts)


def times(ratio: float) -> str:
    """Writes a factor in two or three digits: `1.7x`, `1,110x`."""
    return words.significant(ratio, 3 if ratio >= 100 else 2) + "x"


def saturation_words(cell: MeasuredCell) -> str:
    """Writes `0.2 % of the sampled K and V have fp8's largest code`; empty where none has."""
    cut, sampled = (cell.counter(f"kv_{which}_values_total") for which in ("saturated", "sampled"))
    if not (cut and sampled):
        return ""
    return say("quality.saturated", share=fine_percent(cut / sampled))


def qualities(run: Run) -> dict[str, Quality]:
    """Returns the quality of each configuration's answers, by its id."""
    result, by_id, doubt = run.quality, {}, ""
    if result and result.random_weights:
        doubt = "random weights"
    elif result and result.differs_from(run.manifest):
        doubt = "other code or weights"
    for config_id in dict.fromkeys(cell.config_id for cell in run.cells):
        cells = [cell for cell in run.cells if cell.config_id == config_id]
        wrong = tuple(why for cell in cells for why in cell.wrong_answers)
        if result and config_id in result.configurations:
            model = result.model if result.beside else ""
            by_id[config_id] = Quality(result.configurations[config_id], model, doubt, wrong=wrong)
            continue
        counts = [cell.canaries for cell in cells if not is_quantised(cell)]
        right = max((count.distinct for count in counts), default=0)
        enough = right >= FEWEST_CANARIES and not any(count.wrong for count in counts)
        by_id[config_id] = Quality(canaries=right * enough, wrong=wrong)
    return by_id


# --- The chapter ---


def quality_parts(run: Run, comparisons: Comparisons, by_id: Mapping[str, Quality]) -> Iterator[Part]:
    """The chapter on the answers: sentences and tables; nothing without a measurement."""
    result = run.quality
    if result is None:
        return
    yield from answer_sentences(run, result, comparisons.names)
    yield from prices(comparisons, by_id)
    table = answer_quality_table(result, comparisons)
    yield Section("answer-quality", "By configuration", table, say("quality.note"), folded=False)
    names = {cell.config_id: cell.name for cell in comparisons.cells}
    yield Section("passkeys", "Where passkeys go wrong", passkey_table(result, names))


def answer_sentences(run: Run, result: QualityResult, short_names: Mapping[str, str]) -> Iterator[str]:
    """Says how many are within the limits, with which model; ``short_names``: by cell id."""
    names = {cell.config_id: short_names[cell.cell_id] for cell in run.cells}
    every = result.configurations
    outside = [names.get(config_id, config_id) for config_id, figures in every.items() if figures.outside]
    values = {"whole": words.plural(len(every), "configuration"), "names": words.and_more(outside)}
    within = say("quality.within", bool(outside), outside=len(outside), **values)
    yield within + say("quality.missing", n=len(names.keys() - every.keys())) + "."
    for leader, followers in result.followers.items():
        asked = words.and_more([names.get(config_id, config_id) for config_id in followers])
        yield say("quality.followers", names=asked, leader=names.get(leader, leader))
    if result.note:
        yield result.note
    elif result.beside:
        own = model_name(run) or "the run's own model"
        why = say("quality.random", random_weights(run))
        yield say("quality.other_model", model=result.model, own=own, why=why)
    yield from (say("quality.not_measured", missing=missing) for missing in result.facts.not_measured)
    if different := result.differs_from(run.manifest):
        yield say("quality.other_code", different="; ".join(different))


def prices(comparisons: Comparisons, by_id: Mapping[str, Quality]) -> Iterator[str]:
    """INT4 KV: KLD 0.03, perplexity +4.0 %, passkeys 91 %, for 3.8x the tokens in the same memory at +59 % tokens/s
    (55 to 62) served: outside the limits.

    One for each quantised KV that was measured; tokens/s where their change is decided.
    """
    for cell in comparisons.reported:
        quality = by_id[cell.config_id]
        if not (is_quantised(cell) and quality.figures):
            continue
        text = f"{comparisons.names[cell.cell_id]}: {quality}"
        held = comparisons.base and tokens_held(cell, comparisons.base)
        if held and held >= _VISIBLE:
            text += say("quality.held", ratio=words.significant(held, 2))
        speed = comparisons.throughput_of(cell)
        if speed and speed.decided:
            clock = say("quality.in_clock", speed.clock, clock=speed.clock)
            text += " ".join(filter(None, [" at", amount(speed.ratio), "tokens/s", interval(speed), clock]))
        verdict = say("quality.price", quality.verdict or "safe")
        outliers = outlier_words(cell, quality.figures.kv_outliers)
        yield f"{text}: {verdict}." + say("quality.outliers", bool(outliers), outliers=outliers)


# --- The tables ---


def kld_text(value: float | None) -> str:
    """Writes a KLD in two digits: `0.0009`, `3e-11`."""
    return "–" if value is None else f"{value:.2g}"


def fine_percent(value: float) -> str:
    """Writes a share in two digits: 0.0123 is `1.2 %`, 1e-6 is `0.0001 %`."""
    return f"{100 * value:.2g} %"


def _signed_percent(value: float) -> str:
    """Writes a change with its sign: `+4.00 %`, `−0.02 %`."""
    return f"{100 * value:+.2f} %".replace("-", "−")


def _interval(low: float | None, high: float | None, render: Callable[[float], str]) -> str:
    if low is None or high is None:
        return ""
    return f"{render(low)} to {render(high)}"


def _number(figures: ConfigurationFigures | None, name: str, render: Callable[[float], str]) -> Value:
    """A figure with its interval, whose ends are named as the figure is with ``_low`` and ``_high``."""
    number, low, high = (figure(figures, name + end) for end in ("", "_low", "_high"))
    if number is None:
        return NONE
    return entry(number, render(number), _interval(low, high, render))


def _share(figures: ConfigurationFigures | None, name: str, agreeing: str, whole: str) -> Value:
    """A share with its interval and its counts: ``agreeing`` of ``whole``; for greedy answers where they part."""
    parts = ("share", "low", "high", agreeing, whole, "first_divergence")
    share, low, high, some, every, first = (figure(figures, f"{name}.{part}") for part in parts)
    notes = [_interval(low, high, words.percent).replace(" % to", " to")]
    if some is not None and every is not None:
        notes.append(say("quality.of", some=some, every=every))
    if first is not None:
        notes.append(say("quality.parts_at", token=first))
    return entry(share, words.percent(share), *notes)


def _full_pool(figures: ConfigurationFigures | None) -> Value:
    """Wrong passkeys of all, other answers that are not equal, and what the pool went through."""
    pool = getattr(figures, "full_pool", None)
    if pool is None:
        return NONE
    notes, canaries, wrong = [], pool.canaries, pool.passkey_asked - pool.passkey_right
    if pool.answers:
        notes.append(say("quality.equal", some=pool.agree, every=pool.answers))
    if canaries and canaries.answered:
        notes.append(say("quality.canaries_wrong", some=canaries.wrong, every=canaries.answered))
    if pool.preemptions:
        notes.append(words.plural(pool.preemptions, "preemption"))
    moved = {"swapped": pool.swapped_pages, "evicted": pool.evicted_pages}
    if any(moved.values()):
        notes.append("pages: " + ", ".join(f"{count:,} {what}" for what, count in moved.items() if count))
    return entry(float(wrong), say("quality.of", some=wrong, every=pool.passkey_asked), *notes)


@dataclass(frozen=True)
class _QualityColumn:
    """A column of figures: how an entry is made, and how its limit is written."""

    title: str
    of: Callable[[ConfigurationFigures | None], Value]
    limit: Callable[[float], str] = kld_text


_COLUMNS = {  # key -> column; what each is: ``quality.hint`` in the file of sentences
    "mean": _QualityColumn("KLD", lambda f: _number(f, "mean", kld_text)),
    "perplexity_change": _QualityColumn(
        "perplexity", lambda f: _number(f, "perplexity_change", _signed_percent), _signed_percent
    ),
    "passkey.share": _QualityColumn("passkeys", lambda f: _share(f, "passkey", "right", "asked"), words.percent),
    "full_pool": _QualityColumn("wrong, full pool", _full_pool),
    "p99": _QualityColumn("KLD p99", lambda f: _number(f, "p99", kld_text)),
    "rms_dp": _QualityColumn("RMS Δp", lambda f: _number(f, "rms_dp", fine_percent), fine_percent),
    "greedy.share": _QualityColumn("equal answers", lambda f: _share(f, "greedy", "agree", "answers"), words.percent),
}


def answer_quality_table(result: QualityResult, comparisons: Comparisons) -> ReportTable:
    """The control, a row a configuration in the order of the run, and the limits."""
    reported = {cell.config_id: cell for cell in comparisons.reported}
    names = {cell.config_id: cell.name for cell in comparisons.cells}
    rows = [Row(None, (Value(CONTROL), *(NONE,) * 3, *_figures(result.control, {})), "control")]
    for config_id in dict.fromkeys([*names, *result.configurations]):
        figures, cell = result.configurations.get(config_id), reported.get(config_id)
        within = Value("not measured")
        if figures and figures.outside:
            within = Value("outside", 1, words.and_more(figures.outside, _MOST_REASONS, "; "), "worse")
        elif figures:
            within = Value("within", 0, like_words(figures).removeprefix("; "))
        shown = (*texts(names.get(config_id, config_id)), within, *_speed_and_room(cell, comparisons))
        rows.append(Row(cell, (*shown, *_figures(figures, result.limits)), "configurations"))
    limits = (_limit(key, shown, result.limits) for key, shown in _COLUMNS.items())
    rows.append(Row(None, (Value("limit"), *(NONE,) * 3, *limits), "limit"))
    rate = ", ".join(filter(None, ("output tok/s", comparisons.load and comparisons.load.short)))
    titles = {"configuration": "configuration", "within": "limits", "tokens_per_s": rate}
    titles |= {"capacity": "tokens held"} | {key: shown.title for key, shown in _COLUMNS.items()}
    return listed_table([(key, title, say("quality.hint", key)) for key, title in titles.items()], rows)


def _figures(figures: ConfigurationFigures | None, limits: Mapping[str, float]) -> Iterator[Value]:
    """An entry a column, marked where it is beyond its limit."""
    full_pool = figures is not None and any("full pool" in why for why in figures.outside)
    for key, shown in _COLUMNS.items():
        value = shown.of(figures)
        beyond = key in limits and isinstance(value.sort, float) and is_beyond(key, value.sort, limits[key])
        if beyond or (key == "full_pool" and full_pool):
            value = replace(value, mark="worse")
        yield value


def _limit(key: str, shown: _QualityColumn, limits: Mapping[str, float]) -> Value:
    if key not in limits:
        return NONE
    return Value(say("quality.limit", MARGINS.get(key, 0.0) < 0, limit=shown.limit(limits[key])))


def _speed_and_room(cell: MeasuredCell | None, comparisons: Comparisons) -> tuple[Value, Value]:
    """Output tokens/s with their change, and the tokens that the memory holds."""
    if cell is None:
        return NONE, NONE
    rates, change = spread(cell.throughput()), comparisons.throughput_of(cell)
    speed, room, held = NONE, NONE, cell.capacity.capacity_tokens
    if rates:
        note = " ".join((sized(change), change.clock) if change else ())
        speed = entry(rates.median, words.tokens_per_s(rates.median), note)
    if held:
        more = (comparisons.base and tokens_held(cell, comparisons.base)) or 1.0
        room = entry(held, words.count(held), times(more) * (abs(more - 1) > 0.05))
    return speed, room


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
    if len(columns) < 2:
        return NO_TABLE
    for key, title in _BINS.items():
        bins = [{part.of: (part.right, part.asked) for part in getattr(f.passkey, key)} for f in columns.values()]
        every = list(dict.fromkeys(name for counts in bins for name in counts))
        wrong = {name for counts in bins for name, (right, asked) in counts.items() if right < asked}
        all_right = [name for name in every if name not in wrong and key == "by_residue"]
        named = {name: [counts.get(name) for counts in bins] for name in every if name not in all_right}
        if all_right:
            merged = ([counts[name] for name in all_right if name in counts] for counts in bins)
            named["all others"] = [tuple(map(sum, zip(*counts, strict=True))) for counts in merged]
        rows += [Row(None, (*texts(title), Value(name), *map(_right, counts)), key) for name, counts in named.items()]
    return listed_table(("by", "of", *columns), rows)


def _right(counts: tuple[int, ...] | None) -> Value:
    if not counts or not counts[1]:
        return NONE
    right, asked = counts
    return Value(say("quality.of", some=right, every=asked), right / asked, "", "worse" * (right < asked))
