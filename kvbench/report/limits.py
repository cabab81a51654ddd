"""What limited each cell, by listed rules, and at which load each configuration breaks.

The rules are tried in the order of ``RULES``; the first that holds names the limit, and every rule that holds says what
it saw. What a server does not tell is None in ``LoadFacts``, and a rule that needs it does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from kvbench.common import text as words
from kvbench.effects.comparison import Call
from kvbench.metrics.definitions import SIMULATED
from kvbench.report.comparisons import THROUGHPUT, Comparisons, differing, median
from kvbench.report.tables import UNCERTAIN, Part, Row, Section, Value, listed_table, texts
from kvbench.runs.kv_ledger import step_seconds
from kvbench.runs.model import SERVED, MeasuredCell, MeasuredLoad, all_steady_latency
from kvbench.workload.settings import effective

CLIENT, KV, SEATS, QUEUE, COMPUTE, NOTHING, UNKNOWN = (
    "load client", "KV memory", "batch limit", "queue", "compute", "no limit seen", "not known",
)  # fmt: skip
OFTEN = 0.05  # of the steady window: waits for room that count
MOSTLY = 0.5  # of the steady window: from here on they name the limit even where compute is full
STORM = 0.1  # preemptions a request
BUSY = 0.9  # of the time in steps: the engine never waits for work
SUBLINEAR = 0.5  # log growth of tokens/s over that of running sequences: 4x the sequences, not 2x the tokens/s
CLIENT_BUSY = 0.5  # of a core: from here on its own time shows in the figures; from 0.7 on a load is invalid
QUEUED = 0.5  # of the mean TTFT spent before admission
STALLED = 4.0  # p95 ITL over median ITL: prompts stop the others' tokens
DOUBLES = 2.0
GROWTH_NOTE = (
    "p95 TTFT of the raw samples: of the steady window where all loads of a configuration have one, else of the whole "
    "run. It breaks at the lowest load with more than twice the p95 TTFT of the lightest load; "
    "beside it what limited the configuration there."
)
_MOST_EVIDENCE = 2  # pieces on a line of the first screen
_KV_LAYOUT = {"layout", "page_size", "reservation"}  # settings of where the KV lies, not of what is computed
GROWN = 1.0  # requests that more wait in the last third of the arrivals of an open load than in their first


@dataclass(frozen=True)
class LoadFacts:
    """The figures of a cell that the rules read; shares are 0 to 1, None where nobody tells."""

    asked: float | None = None  # requests or users at once (closed loop)
    running: float | None = None  # sequences, mean
    waiting: float | None = None
    seats: float | None = None  # max_num_seqs
    kv_wait: float | None = None  # share of the time in which requests waited for room
    kv_peak: float | None = None  # of the budget
    preemptions: float | None = None  # a request
    grown: float | None = None  # requests that more wait in the last third of an open load than in its first
    busy: float | None = None  # of the time in steps
    rate_growth: float | None = None  # tokens/s over those at the load ``below``
    running_growth: float | None = None  # running sequences over those there
    below: str = "the load below"
    headroom: float | None = None  # tokens/s over this one's of a better one that only lays its KV out otherwise
    headroom_in: str = SERVED  # the clock of that
    stall: float | None = None  # p95 ITL over median ITL
    queued: float | None = None  # share of the mean TTFT before admission
    client_cpu: float | None = None  # of a core, worst repeat

    @property
    def scaling(self) -> float | None:
        """1: tokens/s grow as the sequences do; 0: not at all. None where not clearly more sequences ran."""
        if not self.rate_growth or not self.running_growth or self.running_growth <= 1.2:
            return None
        return math.log(self.rate_growth) / math.log(self.running_growth)


@dataclass(frozen=True)
class Rule:
    """``limit``: what it names, empty for a rule that only adds evidence; ``holds``, and then the ``evidence``."""

    name: str
    limit: str
    holds: Callable[[LoadFacts], bool]
    evidence: Callable[[LoadFacts], str]


@dataclass(frozen=True)
class CellLimit:
    """The limit of a cell, with what each rule that holds saw, the naming rule's first."""

    cell: MeasuredCell
    facts: LoadFacts
    limit: str
    evidence: tuple[str, ...]


def _at_least(value: float | None, least: float) -> bool:
    return value is not None and value >= least


def _kv_wait(f: LoadFacts) -> str:
    asked = f" of {f.asked:g}" if f.asked else ""
    ran = "" if f.running is None else f", {words.decimal(f.running)}{asked} ran"
    return f"requests waited for room {words.percent(f.kv_wait)} of the time{ran}"


def _waits(f: LoadFacts) -> bool:
    return _at_least(f.waiting, 0.5)


def _has_headroom(f: LoadFacts) -> bool:
    """Concurrency failed before compute was full: another configuration did more on the same machine."""
    return _at_least(f.kv_wait, OFTEN) and _at_least(f.headroom, 1.2)


def _compute_is_full(f: LoadFacts) -> bool:
    if _has_headroom(f) or (f.busy is not None and f.busy < BUSY):
        return False
    if f.scaling is not None:
        return f.scaling < SUBLINEAR
    # Where nobody waits, or for KV only, more requests at once may well raise the throughput.
    return f.busy is not None and _waits(f) and not _at_least(f.kv_wait, OFTEN)


def _compute(f: LoadFacts) -> str:
    seen = [] if f.busy is None else [f"steps fill {words.percent(f.busy)} of the time"]
    if f.scaling is not None:
        more = words.ratio(f.running_growth)
        seen.append(f"{more} the running sequences of {f.below} made {words.ratio(f.rate_growth)} the tokens/s")
    return ", ".join(seen)


def _nothing(f: LoadFacts) -> str:
    peak = "" if f.kv_peak is None else f", KV at its peak {words.percent(f.kv_peak)} used"
    return f"nothing waited long for memory or a seat{peak}"


RULES = (
    Rule("requests mostly waited for KV", KV, lambda f: _at_least(f.kv_wait, MOSTLY), _kv_wait),
    Rule(
        "preemption storm",
        KV,
        lambda f: _at_least(f.preemptions, STORM),
        lambda f: f"preemption storm: {words.significant(f.preemptions, 2)} preemptions a request",
    ),
    Rule(
        "concurrency failed before compute was full",
        "",
        _has_headroom,
        lambda f: (
            f"compute was not full: another configuration made {words.ratio(f.headroom)} the tokens/s ({f.headroom_in})"
        ),
    ),
    Rule(
        "the batch was full",
        SEATS,
        lambda f: f.running is not None and f.seats is not None and f.running >= 0.95 * f.seats and _waits(f),
        lambda f: f"{words.decimal(f.running)} of {f.seats:g} seats of the batch taken while requests waited",
    ),
    Rule("the engine was full", COMPUTE, _compute_is_full, _compute),
    Rule(
        "requests often waited for KV",
        KV,
        lambda f: _at_least(f.kv_wait, OFTEN) and not _at_least(f.kv_wait, MOSTLY),
        _kv_wait,
    ),
    Rule(
        "the queue grew",
        QUEUE,
        lambda f: _at_least(f.grown, GROWN),
        lambda f: f"the queue grew by {words.decimal(f.grown)} requests between the load's first and last third",
    ),
    Rule(
        "the client was busy",
        CLIENT,
        lambda f: _at_least(f.client_cpu, CLIENT_BUSY),
        lambda f: f"client at {words.percent(f.client_cpu)} of a core",
    ),
    Rule(
        "admission dominates TTFT",
        "",
        lambda f: _at_least(f.queued, QUEUED),
        lambda f: f"{words.percent(f.queued)} of TTFT passes before admission",
    ),
    Rule(
        "long prompts slow everyone",
        "",
        lambda f: _at_least(f.stall, STALLED),
        lambda f: f"p95 ITL is {words.significant(f.stall, 2)} times the median: prompts may hold up running sequences",
    ),
    Rule(
        "nothing was full",
        NOTHING,
        lambda f: f.kv_wait is not None and f.waiting is not None and not _waits(f),
        _nothing,
    ),
)


def judge(facts: LoadFacts) -> tuple[str, tuple[str, ...]]:
    """The limit, and the evidence of every rule that holds; "nothing was full" speaks only where no limit is named."""
    seen = [(rule.limit, rule.evidence(facts)) for rule in RULES if rule.holds(facts)]
    named = next((limit for limit, _ in seen if limit not in ("", NOTHING)), None)
    if named:
        return named, tuple(text for limit, text in seen if limit != NOTHING)
    nothing = [text for limit, text in seen if limit == NOTHING]
    return (NOTHING if nothing else UNKNOWN), tuple(nothing + [text for limit, text in seen if not limit])


def limits(comparisons: Comparisons) -> list[CellLimit]:
    """The limit of every valid cell, the highest load first."""
    valid = [cell for cell in comparisons.by_load if cell.valid]
    facts = [facts_of(cell, comparisons) for cell in valid]
    return [CellLimit(cell, each, *judge(each)) for cell, each in zip(valid, facts, strict=True)]


def facts_of(cell: MeasuredCell, comparisons: Comparisons) -> LoadFacts:
    """The stored gauges, counters and latencies of a cell and of its neighbours in the run, as the rules read them."""
    requests, preempted = cell.count("completed"), cell.counter("num_preemptions_total")
    itl, p95 = (cell.percentile("itl_ms", which)[0] for which in ("p50", "p95"))
    queue, ttft = cell.counter("request_queue_time_seconds_sum"), cell.counter("time_to_first_token_seconds_sum")
    knows_defaults = cell.layout is not None  # those of the built-in engine
    seats = effective(cell.settings, "max_num_seqs") if knows_defaults else cell.settings.get("max_num_seqs")
    spent, lasted = step_seconds(cell), sum(cell.per_repeat("duration_s").values())
    facts = LoadFacts(
        asked=cell.load.value if cell.load.mode == "closed" else None,
        running=cell.observed_mean("running_mean"),
        waiting=cell.observed_mean("waiting_mean"),
        seats=seats,
        kv_wait=cell.observed_mean("kv_full"),
        kv_peak=median(cell.observed("usage_max")),
        preemptions=preempted / requests if preempted is not None and requests else None,
        grown=_queue_growth(cell),
        busy=min(1.0, spent / lasted) if spent is not None and lasted else None,
        stall=p95 / itl if p95 and itl else None,
        queued=queue / ttft if queue is not None and ttft else None,
        client_cpu=max(map(float, cell.client("cpu_fraction")), default=None),
    )
    return _with_headroom(_with_growth(facts, cell, comparisons), cell, comparisons)


def _with_growth(facts: LoadFacts, cell: MeasuredCell, comparisons: Comparisons) -> LoadFacts:
    """Adds tokens/s and running sequences over those at the load below, where there is such a load."""
    below = [load for load in comparisons.loads if load.mode == cell.load.mode and load.value < cell.load.value]
    other = comparisons.cell(cell.name, below[-1]) if below else None
    if other is None or not other.valid or cell.has_steady != other.has_steady:
        return facts
    rate, rate_below = (median(each.throughput()) for each in (cell, other))
    ran_below = other.observed_mean("running_mean")
    if not rate or not rate_below or not facts.running or not ran_below:
        return facts
    growth = facts.running / ran_below
    return replace(facts, rate_growth=rate / rate_below, running_growth=growth, below=other.load.short)


def _with_headroom(facts: LoadFacts, cell: MeasuredCell, comparisons: Comparisons) -> LoadFacts:
    """Adds the most tokens/s over this one's of a better configuration that computes the same."""
    alike = [
        other
        for other in comparisons.at(cell.load)
        if other is not cell and other.valid and differing(cell, other) <= _KV_LAYOUT
    ]
    ratios = [comparisons.between(other, cell, THROUGHPUT) for other in alike]
    better = [ratio for ratio in ratios if ratio and ratio.call == Call.BETTER]
    best = max(better, key=lambda ratio: ratio.ratio, default=None)
    return replace(facts, headroom=best.ratio, headroom_in=best.clock) if best else facts


def _queue_growth(cell: MeasuredCell) -> float | None:
    """Waiting requests, last third of an open load's arrivals minus first third, mean over the repeats.

    None for a load of which every repeat settled: its queue swings, and does not grow.
    """
    repeats = [each.repeat for each in cell.repeats if each.metrics.steady_end_s is None]
    if cell.load.mode != "open" or not repeats:
        return None
    gauges, requests = cell.gauges(), cell.requests()
    if gauges.empty or requests.empty:
        return None
    growths = []
    for repeat in repeats:
        polls: pd.DataFrame = gauges[gauges["repeat"] == repeat]
        last = requests.loc[requests["repeat"] == repeat, "t0"].max()  # what follows is the drain
        first, final = (
            polls.loc[polls["t"].between(last * k / 3, last * (k + 1) / 3), "num_requests_waiting"].mean()
            for k in (0, 2)
        )
        growths.append(final - first)
    growth = pd.Series(growths, dtype=float).dropna()
    return float(growth.mean()) if len(growth) else None


@dataclass(frozen=True)
class LimitLine:
    """The configurations that had the same limit at one load, and the evidence of one of them."""

    load: str
    limit: str
    names: str
    evidence: str


def limit_lines(known: Sequence[CellLimit], names: Mapping[str, str]) -> list[LimitLine]:
    """The limits by load, the highest first, configurations with the same limit together.

    A line has the evidence of the baseline, else of the configuration that waited longest for KV, or of which the rules
    saw most. ``names``: cell id -> its short name.
    """
    groups: dict[tuple[str, str], list[CellLimit]] = {}
    for each in known:
        groups.setdefault((each.cell.load.short, each.limit), []).append(each)
    lines = []
    for (load, limit), members in groups.items():
        speaker = max(members, key=lambda each: (each.cell.is_baseline, each.facts.kv_wait or 0.0, len(each.evidence)))
        evidence = "; ".join(speaker.evidence[:_MOST_EVIDENCE])
        if len(members) > 1 and evidence:
            evidence = f"{names[speaker.cell.cell_id]}: {evidence}"
        everywhere = len(members) > 2 and sum(key[0] == load for key in groups) == 1
        listed = words.listing([names[each.cell.cell_id] for each in members])
        lines.append(LimitLine(load, limit, f"all {len(members)}" if everywhere else listed, evidence))
    return lines


def limit_section(known: Sequence[CellLimit]) -> Section:
    """The limit of each valid cell with everything that the rules saw."""
    rows = []
    for each in known:
        seen = "; ".join(each.evidence) or "–"
        rows.append(Row(each.cell, texts(each.cell.name, each.cell.load.short, each.limit, seen), each.cell.load))
    table = listed_table(("configuration", "load", "limit", "seen"), rows, numbers_from=4)
    return Section("limits", "What limited each cell", table)


# --- As the load grows ---


@dataclass(frozen=True)
class Break:
    """The load at which one configuration breaks.

    ``cells``: by load, ascending; ``at``: the first cell whose p95 TTFT is over twice the first one's, None: none is;
    ``limit``: what limited that; ``steady``: whether all these are of the steady window.
    """

    cells: tuple[MeasuredCell, ...]
    at: MeasuredCell | None
    limit: str
    steady: bool

    @property
    def name(self) -> str:
        return self.cells[0].name

    @property
    def words(self) -> str:
        """at 3/s (KV memory); at 5/s where no limit was seen; not up to 5/s"""
        if self.at is None:
            return f"not up to {self.cells[-1].load.short}"
        return self.at.load.where + (f" ({self.limit})" if self.limit not in (NOTHING, UNKNOWN) else "")


def breaks(comparisons: Comparisons, known: Sequence[CellLimit]) -> list[Break]:
    """The break of each configuration with valid cells at two or more loads of one kind, in display order."""
    limit_of = {each.cell.cell_id: each.limit for each in known}
    found = []
    for name in dict.fromkeys(cell.name for cell in comparisons.cells):
        cells = [cell for load in sized_loads(comparisons) if (cell := comparisons.cell(name, load)) and cell.valid]
        steady = all_steady_latency(cells)
        measured = [(cell, ttft) for cell in cells if (ttft := cell.percentile("ttft_ms", "p95", steady)[0])]
        if len(measured) > 1:
            at = next((cell for cell, ttft in measured if ttft > DOUBLES * measured[0][1]), None)
            limit = limit_of[at.cell_id] if at else UNKNOWN
            found.append(Break(tuple(cell for cell, _ in measured), at, limit, steady))
    return found


def sized_loads(comparisons: Comparisons) -> list[MeasuredLoad]:
    """The loads of the most frequent kind (closed, or open at a rate), ascending."""
    # In a closed loop more users always wait longer; measured, that says nothing of a break.
    closed_too = comparisons.clock == SIMULATED
    sized = [load for load in comparisons.loads if load.value and (closed_too or load.mode == "open")]
    modes = [load.mode for load in sized]
    return [load for load in sized if load.mode == max(modes, key=modes.count, default="")]


def growth_parts(known: Sequence[Break], loads: Sequence[MeasuredLoad]) -> Iterator[Part]:
    """The chapter on growing loads: which configurations break first, and p95 TTFT at each of ``loads``."""
    if any(each.at for each in known):
        told = words.listing([f"{each.name} {each.words}" for each in known])
        yield f"p95 TTFT is over twice its own {known[0].cells[0].load.where}: {told}."
    rows = []
    for each in known:
        at = {cell.load: cell for cell in each.cells}
        entries = [_p95(at[load], each.steady) if load in at else Value("–") for load in loads]
        entries.append(Value(each.words, each.at.load.value if each.at else None, "", "worse" * bool(each.at)))
        rows.append(Row(each.cells[-1], (*texts(each.name), *entries)))
    table = listed_table(("configuration", *(load.short for load in loads), "breaks"), rows, numbers_from=1)
    yield Section("growth", "p95 TTFT by load", table, GROWTH_NOTE, folded=False)


def growth_brief(known: Sequence[Break]) -> str:
    """contiguous breaks at 3/s, paged (page 16) at 4/s: the first to break, and the baseline; empty where none does."""
    broken = sorted(((each, each.at.load) for each in known if each.at), key=lambda pair: pair[1])
    if not broken:
        return ""
    (first, load), *others = broken
    base = [f"{each.name} {at.where}" for each, at in others if each.cells[0].is_baseline]
    return ", ".join([f"{first.name} breaks {load.where}", *base])


def _p95(cell: MeasuredCell, steady: bool) -> Value:
    value, few = cell.percentile("ttft_ms", "p95", steady)
    return Value(words.ms(value) + UNCERTAIN * few, value)
