"""The limit of each cell, by listed rules, and the load at which each configuration breaks.

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
from kvbench.report.tables import NONE, UNCERTAIN, Part, Row, Section, Value, listed_table, texts
from kvbench.report.wording import say
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
GROWN = 1.0  # requests that more wait in the last third of the arrivals of an open load than in their first
FULL_BATCH = 0.95  # of max_num_seqs
HEADROOM = 1.2  # times the tokens/s, by another configuration
MORE_RAN = 1.2  # times the running sequences of the load below: less says nothing of how tokens/s grow
WAITS = 0.5  # requests, mean
DOUBLES = 2.0
_MOST_EVIDENCE = 2  # pieces on a line of the first screen
_KV_LAYOUT = {"layout", "page_size", "reservation"}  # settings of where the KV lies, not of what is computed


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
        """The growth of tokens/s with the sequences: 1 in step, 0 not at all; None without clearly more sequences."""
        if not self.rate_growth or not self.running_growth or self.running_growth <= MORE_RAN:
            return None
        return math.log(self.rate_growth) / math.log(self.running_growth)

    @property
    def waits(self) -> bool:
        return self.reaches("waiting", WAITS)

    @property
    def has_headroom(self) -> bool:
        """Concurrency failed before compute was full: another configuration did more on the same machine."""
        return self.reaches("kv_wait", OFTEN) and self.reaches("headroom", HEADROOM)

    @property
    def computes_all_it_can(self) -> bool:
        if self.has_headroom or (self.busy is not None and self.busy < BUSY):
            return False
        if self.scaling is not None:
            return self.scaling < SUBLINEAR
        # Where nobody waits, or for KV only, more requests at once may well raise the throughput.
        return self.busy is not None and self.waits and not self.reaches("kv_wait", OFTEN)

    def reaches(self, name: str, least: float) -> bool:
        """Tests whether a figure is known and at least so large."""
        value = getattr(self, name)
        return value is not None and value >= least


@dataclass(frozen=True)
class Rule:
    """A rule that may name the limit of a load. Its sentences are under its name in the file of sentences.

    limit: what it names; empty for a rule that only adds evidence
    """

    name: str
    limit: str
    holds: Callable[[LoadFacts], bool]

    def evidence(self, facts: LoadFacts) -> str:
        """Says what it saw in ``facts``, for which it holds."""
        ran = say("limits.ran", facts.running is not None, facts=facts)
        busy = say("limits.busy", facts.busy is not None, facts=facts)
        scaled = say("limits.scaled", facts.scaling is not None, facts=facts)
        compute = ", ".join(filter(None, (busy, scaled)))
        return say("limits.rule", self.name, facts=facts, ran=ran, compute=compute)


def _batch_is_full(facts: LoadFacts) -> bool:
    return facts.waits and bool(facts.seats) and facts.reaches("running", FULL_BATCH * facts.seats)


def _waits_often(facts: LoadFacts) -> bool:
    return facts.reaches("kv_wait", OFTEN) and not facts.reaches("kv_wait", MOSTLY)


RULES = (
    Rule("requests mostly waited for KV", KV, lambda facts: facts.reaches("kv_wait", MOSTLY)),
    Rule("preemption storm", KV, lambda facts: facts.reaches("preemptions", STORM)),
    Rule("concurrency failed before compute was full", "", lambda facts: facts.has_headroom),
    Rule("the batch was full", SEATS, _batch_is_full),
    Rule("the engine was full", COMPUTE, lambda facts: facts.computes_all_it_can),
    Rule("requests often waited for KV", KV, _waits_often),
    Rule("the queue grew", QUEUE, lambda facts: facts.reaches("grown", GROWN)),
    Rule("the client was busy", CLIENT, lambda facts: facts.reaches("client_cpu", CLIENT_BUSY)),
    Rule("admission dominates TTFT", "", lambda facts: facts.reaches("queued", QUEUED)),
    Rule("long prompts slow everyone", "", lambda facts: facts.reaches("stall", STALLED)),
    Rule("nothing was full", NOTHING, lambda facts: None not in (facts.kv_wait, facts.waiting) and not facts.waits),
)


@dataclass(frozen=True)
class CellLimit:
    """The limit of a cell, with what each rule that holds saw, the naming rule's first."""

    cell: MeasuredCell
    facts: LoadFacts
    limit: str
    evidence: tuple[str, ...]


def judge(facts: LoadFacts) -> tuple[str, tuple[str, ...]]:
    """The limit, and the evidence of every rule that holds; "nothing was full" speaks only where no limit is named."""
    seen = [(rule.limit, rule.evidence(facts)) for rule in RULES if rule.holds(facts)]
    named = [limit for limit, _ in seen if limit not in ("", NOTHING)]
    if named:
        return named[0], tuple(text for limit, text in seen if limit != NOTHING)
    seen.sort(key=lambda pair: pair[0] != NOTHING)
    return next((limit for limit, _ in seen if limit), UNKNOWN), tuple(text for _, text in seen)


def limits(comparisons: Comparisons) -> list[CellLimit]:
    """Returns the limit of every valid cell, the highest load first."""
    valid = [cell for cell in comparisons.by_load if cell.valid]
    facts = [facts_of(cell, comparisons) for cell in valid]
    return [CellLimit(cell, seen, *judge(seen)) for cell, seen in zip(valid, facts, strict=True)]


def facts_of(cell: MeasuredCell, comparisons: Comparisons) -> LoadFacts:
    """Reads the stored gauges, counters and latencies of a cell and of its neighbours in the run."""
    requests, preempted = cell.count("completed"), cell.counter("num_preemptions_total")
    itl, p95 = (cell.percentile("itl_ms", which)[0] for which in ("p50", "p95"))
    queue, ttft = cell.counter("request_queue_time_seconds_sum"), cell.counter("time_to_first_token_seconds_sum")
    knows_defaults = cell.layout is not None  # those of the built-in engine
    seats = effective(cell.settings, "max_num_seqs") if knows_defaults else cell.settings.get("max_num_seqs")
    busy = _over(step_seconds(cell), sum(cell.per_repeat("duration_s").values()))
    facts = LoadFacts(
        asked=cell.load.value if cell.load.mode == "closed" else None,
        running=cell.observed_mean("running_mean"),
        waiting=cell.observed_mean("waiting_mean"),
        seats=seats,
        kv_wait=cell.observed_mean("kv_full"),
        kv_peak=median(cell.observed("usage_max")),
        preemptions=_over(preempted, requests),
        grown=_queue_growth(cell),
        busy=None if busy is None else min(1.0, busy),
        stall=_over(p95 or None, itl),
        queued=_over(queue, ttft),
        client_cpu=max(map(float, cell.client("cpu_fraction")), default=None),
    )
    return _with_headroom(_with_growth(facts, cell, comparisons), cell, comparisons)


def _over(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _with_growth(facts: LoadFacts, cell: MeasuredCell, comparisons: Comparisons) -> LoadFacts:
    """Adds tokens/s and running sequences over those at the load below, where there is such a load."""
    below = [load for load in comparisons.loads if load.mode == cell.load.mode and load.value < cell.load.value]
    other = comparisons.cell(cell.name, below[-1]) if below else None
    if other is None or not other.valid or cell.has_steady != other.has_steady:
        return facts
    rate = _over(median(cell.throughput()) or None, median(other.throughput()))
    ran = _over(facts.running or None, other.observed_mean("running_mean"))
    if rate is None or ran is None:
        return facts
    return replace(facts, rate_growth=rate, running_growth=ran, below=other.load.short)


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
    """Counts waiting requests, last third of an open load's arrivals minus first third, mean over the repeats.

    None for a load of which every repeat settled: its queue swings, and does not grow.
    """
    repeats = [repeat.repeat for repeat in cell.repeats if repeat.metrics.steady_end_s is None]
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


def limit_lines(every: Sequence[CellLimit], names: Mapping[str, str]) -> list[LimitLine]:
    """Groups the limits by load, the highest first, configurations with the same limit together.

    A line has the evidence of the baseline, else of the configuration that waited longest for KV, or of which the rules
    saw most. ``names``: cell id -> its short name.
    """
    groups: dict[tuple[str, str], list[CellLimit]] = {}
    for limit in every:
        groups.setdefault((limit.cell.load.short, limit.limit), []).append(limit)
    lines = []
    for (load, limit), members in groups.items():
        speaker = max(members, key=lambda one: (one.cell.is_baseline, one.facts.kv_wait or 0.0, len(one.evidence)))
        evidence = "; ".join(speaker.evidence[:_MOST_EVIDENCE])
        if len(members) > 1 and evidence:
            evidence = f"{names[speaker.cell.cell_id]}: {evidence}"
        listed = words.listing([names[member.cell.cell_id] for member in members])
        if len(members) > 2 and sum(key[0] == load for key in groups) == 1:
            listed = f"all {len(members)}"
        lines.append(LimitLine(load, limit, listed, evidence))
    return lines


def limit_section(every: Sequence[CellLimit]) -> Section:
    """The limit of each valid cell with everything that the rules saw; without cells of which nothing is known."""
    rows = []
    for limit in every:
        if limit.limit != UNKNOWN or limit.evidence:
            shown = texts(limit.cell.name, limit.cell.load.short, limit.limit, "; ".join(limit.evidence))
            rows.append(Row(limit.cell, shown, limit.cell.load))
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
        """The break as `at 3/s (KV memory)`, `at 5/s` where no limit was seen, or `not up to 5/s`."""
        if self.at is None:
            return say("limits.not_up_to", load=self.cells[-1].load.short)
        return say("limits.where", self.limit not in (NOTHING, UNKNOWN), where=self.at.load.where, limit=self.limit)


def breaks(comparisons: Comparisons, every: Sequence[CellLimit]) -> list[Break]:
    """Finds the break of each configuration with valid cells at two or more loads of one kind, in display order."""
    limit_of = {limit.cell.cell_id: limit.limit for limit in every}
    listed = []
    for name in dict.fromkeys(cell.name for cell in comparisons.cells):
        cells = [cell for load in sized_loads(comparisons) if (cell := comparisons.cell(name, load)) and cell.valid]
        steady = all_steady_latency(cells)
        measured = [(cell, ttft) for cell in cells if (ttft := cell.percentile("ttft_ms", "p95", steady)[0])]
        if len(measured) > 1:
            at = next((cell for cell, ttft in measured if ttft > DOUBLES * measured[0][1]), None)
            limit = limit_of[at.cell_id] if at else UNKNOWN
            listed.append(Break(tuple(cell for cell, _ in measured), at, limit, steady))
    return listed


def sized_loads(comparisons: Comparisons) -> list[MeasuredLoad]:
    """Returns the loads of the most frequent kind (closed, or open at a rate), ascending."""
    # In a closed loop more users always wait longer; measured, that says nothing of a break.
    closed_too = comparisons.clock == SIMULATED
    sized = [load for load in comparisons.loads if load.value and (closed_too or load.mode == "open")]
    modes = [load.mode for load in sized]
    return [load for load in sized if load.mode == max(modes, key=modes.count, default="")]


def growth_parts(every: Sequence[Break], loads: Sequence[MeasuredLoad]) -> Iterator[Part]:
    """The chapter on growing loads: which configurations break first, and p95 TTFT at each of ``loads``."""
    if any(one.at for one in every):
        listed = words.listing([f"{one.name} {one.words}" for one in every])
        yield say("limits.broken", lightest=every[0].cells[0].load.where, breaks=listed)
    rows = []
    for one in every:
        at = {cell.load: cell for cell in one.cells}
        entries = [_p95(at.get(load), one.steady) for load in loads]
        entries.append(Value(one.words, one.at.load.value if one.at else None, "", "worse" * bool(one.at)))
        rows.append(Row(one.cells[-1], (*texts(one.name), *entries)))
    table = listed_table(("configuration", *(load.short for load in loads), "breaks"), rows, numbers_from=1)
    yield Section("growth", "p95 TTFT by load", table, say("limits.growth_note"), folded=False)


def growth_brief(every: Sequence[Break]) -> str:
    """Writes the first to break and the baseline, or nothing: `contiguous breaks at 3/s, paged (page 16) at 4/s`."""
    broken = sorted(((one, one.at.load) for one in every if one.at), key=lambda pair: pair[1])
    if not broken:
        return ""
    (first, load), *others = broken
    base = [f"{one.name} {at.where}" for one, at in others if one.cells[0].is_baseline]
    return ", ".join([say("limits.first_broken", name=first.name, where=load.where), *base])


def _p95(cell: MeasuredCell | None, steady: bool) -> Value:
    if cell is None:
        return NONE
    value, few = cell.percentile("ttft_ms", "p95", steady)
    return Value(words.ms(value) + UNCERTAIN * few, value)
