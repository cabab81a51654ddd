"""Every sentence about results: templates filled in with numbers, chosen by the verdict of a comparison."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.common import text as words
from kvbench.report.comparisons import (
    Effect,
    PairedComparison,
    baseline,
    best,
    compare,
    differing,
    effects,
    median,
    paging,
    ratio_to_reference,
    scatters,
)
from kvbench.report.provenance import code_paths, validity
from kvbench.runs.kv_ledger import ledger, share_of_steps, swapped_bytes
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run
from kvbench.runs.ratios import FEWEST, HIGHER, LOWER, SAME, UNCLEAR, Ratio, contradicts
from kvbench.workload.settings import effective, setting_title, value_words

Render = Callable[[float | None], str]
NOT_TOLD = "not told apart"
_MOST_CLAUSES = 3  # of the first sentence, besides its main one
RATIO_MARKS = f"≈ means level, ? {NOT_TOLD} from 1"
_DOUBT = {
    "": "",
    "invalid": " Invalid measurement, not to be relied on.",
    "refused": " The server refused requests, so it did less work: not to be compared.",
}
_AHEAD = {HIGHER: "ahead", LOWER: "behind", SAME: "level", UNCLEAR: NOT_TOLD}  # of throughputs
_SLOWER = {HIGHER: "worse", LOWER: "better", SAME: "level", UNCLEAR: NOT_TOLD}  # of latencies
_THROUGHPUT = {
    HIGHER: "At {load}{budget}, {a} delivered {ratio} the output tokens/s{window} of {b}{also}",
    LOWER: "At {load}{budget}, {a} was slower than {b}{also}: {ratio} its output tokens/s{window}",
    SAME: "At {load}{budget}, {a} was level with {b}{also} in output tokens/s{window}: {ratio}",
    UNCLEAR: f"At {{load}}{{budget}}, {{a}} is {NOT_TOLD} from {{b}}{{also}} in output tokens/s{{window}}: {{ratio}}",
}
_TPOT = {
    HIGHER: "median TPOT {a} instead of {b}",
    LOWER: "median TPOT {a} instead of {b}",
    SAME: "median TPOT {ratio}",
    UNCLEAR: "median TPOT {a} instead of {b}, {ratio}",
}
_KERNEL = {
    HIGHER: "walking page tables cost time",
    LOWER: "paged was not slower per token",
    SAME: "walking page tables cost nothing that shows",
    UNCLEAR: "too few or too scattered repeats to tell what walking page tables costs",
}
_NO_PAIR = {  # (has a paged cell, has a contiguous cell)
    (True, True): "Paged and contiguous share no load in this run, so it cannot say what paging bought. ",
    (True, False): "Without a contiguous cell this run cannot say what paging bought. ",
    (False, True): "Without a paged cell this run cannot say what paging bought. ",
    (False, False): "",
}
_BEST = {  # by what there is to compare with
    "one": "At {load} {cell} delivered {amount}",
    "one served": "Only {cell} served its load at {load}, so there is nothing to compare: {amount}",
    "one valid": "Only {cell} was validly measured at {load}, so there is nothing to compare: {amount}",
    "unclear": "No verdict on which is best at {load}: {cell} has the highest median, {amount}",
    "clear": "At {load} {cell} delivered the most: {amount}",
}


def say(template: str, **values: str) -> str:
    """The template filled in; empty where one of the values is unknown, which ``common.text`` writes as a dash."""
    return "" if "–" in values.values() else template.format(**values)


def sentence(*clauses: str) -> str:
    """The clauses that are not empty, as one sentence; empty without any."""
    text = "; ".join(filter(None, clauses))
    return f"{words.upper_first(text)}." if text else ""


def ratio_words(r: Ratio, repeats: bool = True) -> str:
    """1.90x (1.85–1.96 over 3 repeats), and what keeps it from a verdict, if anything."""
    text = f"{words.ratio(r.median)} ({words.spread(r.low, r.high, r.n, repeats)}"
    if 1 < r.n < FEWEST:
        text += ", too few for a verdict"
    elif r.ci is not None and r.verdict == UNCLEAR:
        text += f"; 95 % t interval {words.ratio(r.ci[0])[:-1]}–{words.ratio(r.ci[1])[:-1]} includes 1"
    return text + ")"


def verdict_words(r: Ratio | None) -> str:
    """2.09x (2.09–2.52); level, 1.04x (1.00–1.04); not told apart, 1.50x (...); not comparable."""
    if r is None:
        return "not comparable"
    return (f"{_AHEAD[r.verdict]}, " if r.verdict in (SAME, UNCLEAR) else "") + ratio_words(r, repeats=False)


def _bounds(r: Ratio) -> str:
    """The lowest and the highest repeat alone, for a clause."""
    return words.spread(r.low, r.high, r.n, repeats=False)


def marked_ratio(r: Ratio) -> str:
    """1.65x; ≈1.02x when level; 1.65x? when not told apart from 1."""
    return f"{'≈' if r.verdict == SAME else ''}{words.ratio(r.median)}{'?' if r.verdict == UNCLEAR else ''}"


def smallest_effects(ratios: Mapping[str, Sequence[Ratio | None]]) -> str:
    """What these repeats could have shown at least, from the least scattered row to the most; ``ratios``: by metric.

    Empty where there is no ratio.
    """
    if not any(r for each in ratios.values() for r in each):
        return ""
    found = []
    for metric, each in ratios.items():
        if sizes := sorted(r.detectable for r in each if r and r.detectable is not None):
            low, high = (words.percent(size) for size in (sizes[0], sizes[-1]))
            found.append(f"{low if low == high else f'{low} to {high}'} in {metric}")
    if not found:
        return f"These repeats could show no effect, however large: a verdict needs {FEWEST} repeats."
    return f"Smallest effect that these repeats could show (80 % power at 95 %), by row: {', '.join(found)}."


def window_words(steady: bool) -> str:
    """Behind a throughput: nothing of the steady window, which is the rule, else what it is of."""
    return "" if steady else " (whole run)"


def sensitivity(run: Run) -> str:
    """``smallest_effects`` of the ratios to the reference in the table of all cells."""
    return smallest_effects({"output tok/s": [ratio_to_reference(run, cell) for cell in run.cells if cell.valid]})


def latency(cell: MeasuredCell, metric: str, which: str) -> str:
    """1,454 ms; with * when it is of too few samples."""
    value, uncertain = cell.percentile(metric, which)
    return words.ms(value) + "*" * uncertain


def running(cell: MeasuredCell) -> float | None:
    """Mean sequences running at once in the steady window, median over repeats."""
    return median(cell.observed("running_mean"))


def headline(run: Run) -> str:
    """One sentence with numbers and their spread; prefixed when the run is incomplete."""
    if not run.cells:
        beside = f" What {run.engine_time.label} found is below." if run.engine_time else ""
        return f"Nothing was measured over HTTP: this run holds no finished cell.{beside}"
    prefix = "Incomplete run: " if validity(run).status == "incomplete" else ""
    if run.missing:
        prefix = f"Incomplete run ({len(run.cells)} of {len(run.cells) + len(run.missing)} cells measured): "
    pairs = paging(run)
    pair = pairs[-1] if pairs else None
    decided = "" if _is_decided_over_http(run, pair) else _decided_in_engine_time(run, pair)
    most = 1 if decided else _MOST_CLAUSES
    served = _pair_sentence(run, pairs, most) if pairs else _no_pair(run) + best_sentence(run, run.loads[-1])
    if decided and not pairs:  # the figures of what decides nothing are among the conclusions
        served = f"{served.partition(': ')[0].rstrip('.')}."
    return prefix + (f"{decided} Over HTTP: {words.lower_first(served)}" if decided else served)


def _is_decided_over_http(run: Run, pair: PairedComparison | None) -> bool:
    if pair:
        return pair.valid and pair.throughput is not None and pair.throughput.verdict != UNCLEAR
    top = best(run, run.loads[-1])
    return top is not None and not top.unclear_with


def _decided_in_engine_time(run: Run, pair: PairedComparison | None) -> str:
    """What engine time says of paging, without such a pair what is furthest ahead; empty where it decides nothing.

    Other programs make served loads invalid, but slow down engines that take turns alike.
    """
    base = baseline(run, pair.load if pair else run.loads[-1])
    if base is None or run.engine_time is None or (pair and base not in (pair.a, pair.b)):
        return ""
    cells = [cell for cell in ((pair.a, pair.b) if pair else run.at(base.load)) if cell is not base]
    found = [(effect, cell) for cell in cells if (effect := run.engine_time.of(cell.cell_id, "output_throughput"))]
    calls = ("ahead", "behind", "level") if pair else ("ahead",)
    found = [(effect, cell) for effect, cell in found if effect.call in calls]
    if not found:
        return ""
    effect, cell = max(found, key=lambda each: each[0].ratio)
    names = f"{cell.name} against {base.name} at {base.load.label}"
    return f"In {run.engine_time.label}, {names}: output tokens/s {effect}."


def served_words(cell: MeasuredCell) -> str:
    """served 20 of 48 requests and refused the others ('Context size has been exceeded.' x 28)"""
    served, failed = cell.count("completed"), cell.count("failed")
    why = words.failure_words(cell.failure_messages, failed=failed)
    return f"served {served} of {served + failed} requests and refused the others ({why})"


def refusal_sentence(cells: Sequence[MeasuredCell]) -> str:
    """How much the servers of refused cells served at one load, and their message; empty without such a cell."""
    refused = [cell for cell in cells if cell.doubt == "refused"]
    found = words.listing([f"{cell.name} {served_words(cell)}" for cell in refused])
    return f"At {refused[0].load.label} {found}." if found else ""


def _pair_sentence(run: Run, pairs: list[PairedComparison], most: int) -> str:
    """``pairs``: paged against contiguous, loads ascending, at least one; ``most``: clauses beside the main one."""
    low, c = pairs[0], pairs[-1]
    if c.doubt == "refused":
        return f"No verdict: {words.lower_first(refusal_sentence((c.a, c.b)))}"
    if not c.valid:
        again = f"`kvbench sweep --resume {run.folder}` measures it again"
        return f"No verdict: the measurement at {c.load.label} is invalid ({_why_invalid(c)}); {again}."
    if c.throughput is None:
        return f"No verdict: {c.a.name} and {c.b.name} share no repeat with a measured throughput at {c.load.label}."
    also = sorted(differing(c.a, c.b) - {"layout"})
    bought = _THROUGHPUT[c.throughput.verdict].format(
        load=c.load.label,
        budget=_budget(c),
        a=c.a.name,
        b=c.b.name,
        also=f" (they differ in {words.listing(also)} too)" if also else "",
        ratio=ratio_words(c.throughput),
        window=window_words(c.steady),
    )
    main = bought + _both(", with {a} sequences running at once against {b}", c, running, words.decimal)
    text = sentence(main, *[clause for clause in _further_clauses(low, c) if clause][:most])
    return f"No verdict: {text[:1].lower()}{text[1:]}" if c.throughput.verdict == UNCLEAR else text


def _further_clauses(low: PairedComparison, c: PairedComparison) -> list[str]:
    """What else the first sentence may say, the most important first; the conclusions below it have the rest."""
    return [
        *(f"{failed_words(cell)} failed and are in no number here" for cell in (c.a, c.b) if cell.count("failed")),
        _against("p95 TTFT {a} instead of {b}", c, "ttft_ms", "p95", c.ttft) if c.load.mode == "open" else "",
        _at_low_load(low) if low is not c else "",
        _against(_TPOT[c.tpot.verdict], c, "tpot_ms", "p50", c.tpot) if c.tpot else "",
        *(
            f"the repeats of {cell.name} scatter ({words.tokens_per_s(s.low)}–{words.tokens_per_s(s.high)} tokens/s)"
            for cell in (c.a, c.b)
            if (s := scatters(cell))
        ),
        _preempted(c.a),
    ]


def _why_invalid(c: PairedComparison) -> str:
    """The first reason of the first invalid cell without its advice; the others are in the report."""
    broken = [cell for cell in (c.a, c.b) if not cell.valid]
    reasons = [reason for cell in broken for reason in cell.invalid_reasons] or ["no reason recorded"]
    first = re.sub(r"^repeat \d+: ", "", reasons[0]).split(";")[0].rstrip(".")
    more = f", and {words.plural(len(reasons) - 1, 'more reason')}" if len(reasons) > 1 else ""
    return f"{broken[0].name}: {first}{more}"


def _no_pair(run: Run) -> str:
    """Why nothing can be said about paging; empty for a workload that does not vary the layout."""
    swept = run.spec.get("sweep")
    if swept is not None and "layout" not in swept:
        return ""
    return _NO_PAIR[any(c.is_paged for c in run.cells), any(c.is_contiguous for c in run.cells)]


def _budget(c: PairedComparison) -> str:
    a, b = (cell.capacity.get("kv_budget_bytes") for cell in (c.a, c.b))
    if a == b:
        return say(" and the same {size} of KV", size=words.data_size(a))
    return say(" and unequal KV budgets ({a} against {b})", a=words.data_size(a), b=words.data_size(b))


def _at_low_load(c: PairedComparison) -> str:
    if not c.valid or c.throughput is None:
        why = {"": "not comparable", "invalid": "invalid measurement", "refused": "requests were refused"}[c.doubt]
        return f"at {c.load.tick} there is no verdict ({why})"
    r, window = c.throughput, window_words(c.steady)
    return f"at {c.load.tick} it was {_AHEAD[r.verdict]}, {words.ratio(r.median)}{window} ({_bounds(r)})"


def _both(template: str, c: PairedComparison, of: Callable[[MeasuredCell], float | None], render: Render) -> str:
    """A number of both configurations."""
    return say(template, a=render(of(c.a)), b=render(of(c.b)), a_name=c.a.name, b_name=c.b.name)


def _against(template: str, c: PairedComparison, metric: str, which: str, r: Ratio | None) -> str:
    """A percentile of both configurations and its ratio, with a word where that contradicts the two percentiles."""
    (a, _), (b, _), ratio = c.a.percentile(metric, which), c.b.percentile(metric, which), verdict_words(r)
    if r is not None and a and b and contradicts(r.median, a / b):
        ratio += f" paired by repeat, where these two give {words.ratio(a / b)}"
    return say(template, a=latency(c.a, metric, which), b=latency(c.b, metric, which), ratio=ratio)


def _preempted(cell: MeasuredCell) -> str:
    """12 preemptions in 3 repeats (1,200 tokens recomputed and 48 MiB swapped out); empty where nobody counted."""
    preemptions = cell.counter("num_preemptions_total")
    if not preemptions:
        return "" if preemptions is None else "no preemptions"
    recomputed, moved = cell.counter("recomputed_tokens_total"), swapped_bytes(cell)
    details = [f"{words.plural(recomputed, 'token')} recomputed"] if recomputed else []
    details += [f"{words.data_size(moved)} swapped out"] if moved else []
    text = f"{words.plural(preemptions, 'preemption')} in {words.plural(len(cell.repeats), 'repeat')}"
    return text + (f" ({words.listing(details)})" if details else "")


def failed_words(cell: MeasuredCell) -> str:
    """9 of 144 requests of paged (page 16)."""
    why = words.failure_words(cell.failure_messages)
    counted = f"{cell.count('failed')} of {cell.count('failed') + cell.count('completed')} requests of {cell.name}"
    return f"{counted} ({why})" if why else counted


def best_sentence(run: Run, load: MeasuredLoad) -> str:
    """The best configuration at a load, and what it is level with or not told apart from."""
    top = best(run, load)
    refused = refusal_sentence(run.at(load))
    if top is None:
        return f"No verdict: {words.lower_first(refused) or f'no cell at {load.label} is valid.'}"
    cell, s, base = top.cell, top.throughput, baseline(run, load)
    served = all(other.doubt == "refused" for other in run.at(load) if other is not cell)
    alone = "one served" if served else "one valid"
    kind = alone if top.by_default else "unclear" if top.unclear_with else "clear"
    against = []
    if base is not None and base is not cell and not top.by_default:
        r = compare(cell, base).throughput if base.valid else None
        against = [
            f"{ratio_words(r)} the baseline {base.name}" if r else f"not comparable with the baseline {base.name}"
        ]
    for what, names in (("level with", top.level_with), (f"{NOT_TOLD} from", top.unclear_with)):
        if names:
            against.append(f"{what} {words.listing(names) if len(names) <= 3 else f'{len(names)} others'}")
    rate = f"{words.tokens_per_s(s.median)} output tokens/s{window_words(top.steady)}"
    amount = f"{rate} ({_amounts(s.low, s.high, s.n)})"
    latencies = f"p95 TTFT {latency(cell, 'ttft_ms', 'p95')}, median TPOT {latency(cell, 'tpot_ms', 'p50')}"
    text = sentence(
        _BEST["one" if len(run.at(load)) == 1 else kind].format(
            cell=cell.name, load=load.label, amount=", ".join([amount, *against, latencies])
        ),
        "its repeats scatter" if scatters(cell) else "",
        f"{failed_words(cell)} failed" if cell.count("failed") else "",
    )
    return f"{text} {refused}".rstrip()


def _amounts(low: float, high: float, n: int) -> str:
    """297–324 over 3 repeats."""
    return "one repeat" if n < 2 else f"{words.tokens_per_s(low)}–{words.tokens_per_s(high)} over {n} repeats"


@dataclass(frozen=True)
class Conclusion:
    """A heading and its points, each a full sentence."""

    title: str
    points: tuple[str, ...]


def conclusions(run: Run) -> list[Conclusion]:
    """What paging bought and cost, which configuration is best, and what each setting does alone."""
    found, pairs = [], paging(run)
    if pairs:
        found.append(Conclusion("What paging bought", tuple(_bought(pair) for pair in reversed(pairs))))
        found.append(Conclusion("What paging cost", (*_cost(pairs), *code_paths(run))))
    if len(run.configs) > 1:
        points = tuple(best_sentence(run, load) for load in reversed(run.loads))
        found.append(Conclusion("Which configuration is best", points))
    settings: dict[str, dict[str, list[Effect]]] = {}
    for effect in effects(run):
        settings.setdefault(effect.setting, {}).setdefault(str(effect.value), []).append(effect)
    for setting, values in settings.items():
        title = f"{words.upper_first(setting_title(setting))}, changed alone"
        found.append(Conclusion(title, tuple(_effect_sentence(run, members) for members in values.values())))
    return found


def reservation(c: PairedComparison) -> str:
    """What contiguous reserves for a request, and what requests needed; empty where that is not known."""
    slots = c.b.settings.get("max_model_len") or c.b.capacity.get("max_model_len")
    requests = c.b.requests()
    if effective(c.b.settings, "reservation") != "max" or not slots or requests.empty:
        return ""
    tokens = requests["prompt_tokens"] + requests["output_tokens"]
    return (
        f"{words.upper_first(c.b.name)} reserves {words.count(slots)} slots per request; the longest request here had "
        f"{words.plural(int(tokens.max()), 'token')}, the mean {words.count(float(tokens.mean()))}."
    )


def _bought(c: PairedComparison) -> str:
    return (
        sentence(
            f"at {c.load.label}: output tokens/s{window_words(c.steady)} {verdict_words(c.throughput)}",
            _both("{a} sequences running at once against {b}", c, running, words.decimal),
            _against("p95 TTFT {a} against {b}, ratio {ratio}", c, "ttft_ms", "p95", c.ttft),
        )
        + _DOUBT[c.doubt]
    )


def _cost(pairs: list[PairedComparison]) -> list[str]:
    """Slower tokens under load, preemptions, the kernel, page tables, waste."""
    low, c = pairs[0], pairs[-1]
    per_token = sentence(
        _against("median TPOT {a} against {b}, ratio {ratio}", c, "tpot_ms", "p50", c.tpot),
        _against("p95 ITL {a} against {b}, ratio {ratio}", c, "itl_ms", "p95", c.itl),
        _both("{a} sequences shared each step against {b}", c, running, words.decimal),
    )
    preempted = _preempted(c.a)
    unused = "slots reserved but unused: {a} ({a_name}) against {b} ({b_name})"
    memory = sentence(
        say("page tables peaked at {size}", size=words.data_size(median(c.a.observed("page_table_bytes")))),
        _both(unused, c, lambda cell: median(cell.observed("waste_share")), words.percent),
    )
    points = (
        f"At {c.load.label}: {per_token[:1].lower()}{per_token[1:]}{_DOUBT[c.doubt]}" if per_token else "",
        f"{words.upper_first(preempted)} of {c.a.name} at {c.load.label}." if preempted else "",
        kernel_cost(low) if low is not c else "",
        memory,
    )
    return [point for point in points if point]


def kernel_cost(c: PairedComparison) -> str:
    """The page table's cost in the kernel: visible only where both layouts ran the same number of sequences."""
    a, b = running(c.a), running(c.b)
    if c.tpot is None or a is None or b is None or abs(a - b) > 0.1 * max(a, b):
        ran = say("the layouts ran {a} and {b} sequences at once", a=words.decimal(a), b=words.decimal(b))
        return (
            f"The kernel's cost is unknown. Median TPOT at {c.load.label}: {verdict_words(c.tpot)}; "
            f"{ran or 'how many sequences ran at once is not known'}."
        )
    return (
        f"With the same number running ({words.decimal(a)} and {words.decimal(b)} at {c.load.label}): median TPOT "
        f"{verdict_words(c.tpot)}: {_KERNEL[c.tpot.verdict]}."
    )


def _effect_sentence(run: Run, members: list[Effect]) -> str:
    """What one value of a setting does to output tokens/s at each load, and to what the setting is for."""
    new, old = (value_words(members[0].setting, value) for value in (members[0].value, members[0].baseline_value))
    at = [e.comparison for e in reversed(members)]
    ratios = [
        f"{verdict_words(c.throughput)}{window_words(c.steady or not c.valid)} at {c.load.short}"
        f"{'' if c.valid else f' ({c.doubt})'}"
        for c in at
    ]
    known = run.engine_time
    exact = [(known.of(c.a.cell_id, "output_throughput"), c.load.short) for c in at] if known else []
    engine = ", ".join(f"{effect} at {load}" for effect, load in exact if effect)
    served = "; ".join(ratios)
    change = f"in {known.label} {engine}; over HTTP {served}" if engine else served
    return sentence(f"{new} instead of {old}: output tokens/s {change}", *_purpose(members[0], at))


def _purpose(effect: Effect, at: list[PairedComparison]) -> list[str]:
    """What a setting changes besides throughput, for the settings whose purpose that is; ``at``: highest load first."""
    c, load = at[0], at[0].load.short
    changed = c.a if effect.value in (True, "swap") else c.b
    if effect.setting == "kv_cache_dtype":
        holds = "the same bytes hold {a} tokens instead of {b}"
        return [_both(holds, c, lambda cell: cell.capacity.get("capacity_tokens"), words.count)]
    if effect.setting == "reservation":
        return [_both(f"at {load} {{a}} sequences running at once instead of {{b}}", c, running, words.decimal)]
    if effect.setting == "enable_prefix_caching":
        hits = [words.percent(one.a.hit_rate) for one in at if one.a.hit_rate is not None]
        hashing = words.percent(share_of_steps(changed, "hash_seconds"))
        return [
            f"measured hit rate {words.listing(hits)} of prompt tokens" if hits else "",
            say("hashing took {share} of the step time", share=hashing),
        ]
    moved = swapped_bytes(changed)
    if effect.setting != "preemption_mode" or moved is None:
        return []
    if {cell.counter("num_preemptions_total") for cell in (c.a, c.b)} == {0}:
        return [f"nothing was preempted at {load}"]
    again = "{a} tokens recomputed instead of {b}"
    return [
        f"at {load} {words.data_size(moved)} swapped out",
        _both(again, c, lambda cell: cell.counter("recomputed_tokens_total"), words.count),
        say("moving took {share} of the step time", share=words.percent(share_of_steps(changed, "swap_seconds"))),
    ]


@dataclass(frozen=True)
class Tile:
    """A key number: what it is, the number, what it is compared with."""

    label: str
    value: str
    note: str


def tiles(run: Run) -> list[Tile]:
    """Three or four numbers for the top of the page."""
    pairs = paging(run)
    latencies = (("p95 TTFT", "ttft_ms", "p95"), ("median TPOT", "tpot_ms", "p50"), ("p95 ITL", "itl_ms", "p95"))
    if pairs and (r := pairs[-1].throughput) is not None:
        a, b, load = pairs[-1].a, pairs[-1].b, pairs[-1].load
        note = f"{a.name} / {b.name}; {words.spread(r.low, r.high, r.n)}"
        what = f"throughput{window_words(pairs[-1].steady)} at {load.short}"
        found = [
            Tile(what, words.ratio(r.median), note + f"; {NOT_TOLD}" * (r.verdict == UNCLEAR)),
            Tile("sequences running at once", words.decimal(running(a)), f"{b.name}: {words.decimal(running(b))}"),
            *(Tile(label, latency(a, *of), f"{b.name}: {latency(b, *of)}") for label, *of in latencies[:2]),
        ]
        return [tile for tile in found if tile.value != "–"]
    top = best(run, run.loads[-1]) if run.cells else None
    if top is None:
        return []
    cell, s, at = top.cell, top.throughput, top.load.short
    what = f"output tokens/s{window_words(top.steady)} at {at}"
    amount = Tile(what, words.tokens_per_s(s.median), f"{cell.name}; {_amounts(s.low, s.high, s.n)}")
    return [amount, *(Tile(f"{label} at {at}", latency(cell, *of), cell.name) for label, *of in latencies)]


def figure_title(run: Run, what: str, of: Callable[[PairedComparison], Ratio | None], is_latency: bool = True) -> str:
    """The finding that a figure shows: its metric's ratio of paged to contiguous, the highest load first."""
    pairs, verdicts = paging(run)[::-1], _SLOWER if is_latency else _AHEAD
    found = [
        f"{verdicts[r.verdict]}, {words.ratio(r.median)}{window_words(is_latency or c.steady)} at {c.load.short}"
        for c in pairs
        if (r := of(c))
    ]
    if not found:
        return f"{what} by configuration and load"
    return f"{what} of {pairs[0].a.name} against {pairs[0].b.name}: {'; '.join(found)}"


def occupancy_title(run: Run, load: MeasuredLoad) -> str:
    """How much of the KV budget both layouts reserve and fill at a load."""
    pair = next((p for p in paging(run) if p.load == load), None)
    shares = [
        say(
            "{name} reserves {reserved} of the KV budget and fills {used}",
            name=cell.name,
            reserved=words.percent(median(cell.observed("usage_mean"))),
            used=words.percent(median(cell.observed("used_share"))),
        )
        for cell in ((pair.b, pair.a) if pair else ())
    ]
    shares = [text for text in shares if text]
    return f"At {load.label}: {'; '.join(shares)}" if shares else f"KV occupancy over time at {load.label}"


def ledger_sentence(run: Run) -> str:
    """Where the bytes of the headline's pair went, else those of the baseline or the best; "" without data."""
    pairs = [p for p in paging(run) if ledger(p.a) and ledger(p.b)]
    if pairs:
        c = pairs[-1]
        text = f"At {c.load.label} {_filled(c.b, ' of the KV budget')}; {_filled(c.a)}."
        return text + _DOUBT[c.doubt]
    for load in reversed(run.loads):
        top = best(run, load)
        cell = baseline(run, load) or (top.cell if top else None)
        if cell is not None and ledger(cell):
            return f"At {load.label} {_filled(cell, ' of the KV budget')}."
    return ""


def _filled(cell: MeasuredCell, whole: str = "") -> str:
    found = ledger(cell)
    assert found is not None
    tokens, waste = (words.percent(found.share(use)) for use in ("tokens", "waste"))
    more = [
        f"{words.percent(found.share(use))} {what}"
        for use, what in (("fragmented", "free but scattered"), ("cached", "cached"), ("free", "free"))
        if found.share(use) >= 0.01
    ]
    text = f"{cell.name} held tokens in {tokens}{whole} and wasted {waste} on slots reserved and empty"
    return f"{text} ({', '.join(more)})" if more else text
