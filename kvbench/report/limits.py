"""What limited each cell: KV memory, compute, the queue, the client, or none seen, by listed rules. Pure rules.

The rules are tried in the order of ``RULES``; the first that holds names the limit, and every rule that holds says what
it saw. What a server does not tell is None in ``Facts``, and a rule that needs it does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvbench.common import text as words
from kvbench.report.changes import AHEAD, THROUGHPUT, Change, change_between, short_name
from kvbench.report.comparisons import baseline, differing, median
from kvbench.runs.kv_ledger import step_seconds
from kvbench.runs.model import SERVED, MeasuredCell, Run, number
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
_MOST_EVIDENCE = 2  # pieces on a line of the first screen
_KV_LAYOUT = {"layout", "page_size", "reservation"}  # settings of where the KV lies, not of what is computed
GROWN = 1.0  # requests that more wait in the last third of the arrivals of an open load than in their first


@dataclass(frozen=True)
class Facts:
    """What the rules read of a cell; shares are 0 to 1, None where nobody tells.

    ``asked``: requests or users at once (closed loop)
    ``running``, ``waiting``: sequences, mean; ``seats``: max_num_seqs
    ``kv_wait``: share of the time in which requests waited for room; ``kv_peak``: of the budget
    ``preemptions``: a request
    ``grown``: requests that more wait in the last third of the arrivals of an open load than in their first
    ``busy``: of the time in steps
    ``rate_growth``, ``running_growth``: tokens/s and running sequences over those at the load ``below``
    ``headroom``: tokens/s of a configuration that only lays its KV out otherwise and is decided to be ahead, over this
    one's, in the clock ``headroom_in``
    ``stall``: p95 ITL over median ITL; ``queued``: share of the mean TTFT before admission
    ``client_cpu``: of a core, worst repeat
    """

    asked: float | None = None
    running: float | None = None
    waiting: float | None = None
    seats: float | None = None
    kv_wait: float | None = None
    kv_peak: float | None = None
    preemptions: float | None = None
    grown: float | None = None
    busy: float | None = None
    rate_growth: float | None = None
    running_growth: float | None = None
    below: str = "the load below"
    headroom: float | None = None
    headroom_in: str = SERVED
    stall: float | None = None
    queued: float | None = None
    client_cpu: float | None = None

    @property
    def scaling(self) -> float | None:
        """1: tokens/s grow as the sequences do; 0: not at all. None where not clearly more sequences ran."""
        if not self.rate_growth or not self.running_growth or self.running_growth <= 1.2:
            return None
        return math.log(self.rate_growth) / math.log(self.running_growth)


@dataclass(frozen=True)
class Rule:
    """``limit``: what it names, empty for a rule that only adds evidence; ``sees``: the evidence, empty: not seen."""

    name: str
    limit: str
    sees: Callable[[Facts], str]


@dataclass(frozen=True)
class Limit:
    """What limited a cell, with what each rule that holds saw, the naming rule's first."""

    cell: MeasuredCell
    facts: Facts
    limit: str
    evidence: tuple[str, ...]


def _at_least(value: float | None, least: float) -> bool:
    return value is not None and value >= least


def _client(f: Facts) -> str:
    return f"client at {words.percent(f.client_cpu)} of a core" if _at_least(f.client_cpu, CLIENT_BUSY) else ""


def _kv_often(f: Facts) -> str:
    return "" if _kv_mostly(f) else _kv_wait(f)


def _kv_mostly(f: Facts) -> str:
    return _kv_wait(f) if _at_least(f.kv_wait, MOSTLY) else ""


def _kv_wait(f: Facts) -> str:
    if not _at_least(f.kv_wait, OFTEN):
        return ""
    of = f" of {f.asked:g}" if f.asked else ""
    ran = "" if f.running is None else f", {words.decimal(f.running)}{of} ran"
    return f"requests waited for room {words.percent(f.kv_wait)} of the time{ran}"


def _storm(f: Facts) -> str:
    if not _at_least(f.preemptions, STORM):
        return ""
    return f"preemption storm: {words.significant(f.preemptions, 2)} preemptions a request"


def _seats(f: Facts) -> str:
    full = f.running is not None and f.seats is not None and f.running >= 0.95 * f.seats
    if not (full and _waits(f)):
        return ""
    return f"{words.decimal(f.running)} of {f.seats:g} seats of the batch taken while requests waited"


def _waits(f: Facts) -> bool:
    return _at_least(f.waiting, 0.5)


def _growth(f: Facts) -> str:
    if not _at_least(f.grown, GROWN):
        return ""
    return f"the queue grew by {words.decimal(f.grown)} requests between the load's first and last third"


def _compute(f: Facts) -> str:
    full = f.busy is None or f.busy >= BUSY
    if _headroom(f):
        return ""
    if not full or (f.busy is None and f.scaling is None) or (f.scaling is not None and f.scaling >= SUBLINEAR):
        return ""
    if f.scaling is None and (not _waits(f) or _kv_wait(f)):
        return ""  # nobody waits, or for KV only: more requests at once may well raise the throughput
    seen = [] if f.busy is None else [f"steps fill {words.percent(f.busy)} of the time"]
    if f.scaling is not None:
        more = words.ratio(f.running_growth)
        seen.append(f"{more} the running sequences of {f.below} made {words.ratio(f.rate_growth)} the tokens/s")
    return ", ".join(seen)


def _headroom(f: Facts) -> str:
    """Concurrency failed before compute was full: another configuration did more on the same machine."""
    if not (_at_least(f.kv_wait, OFTEN) and _at_least(f.headroom, 1.2)):
        return ""
    return f"compute was not full: another configuration made {words.ratio(f.headroom)} the tokens/s ({f.headroom_in})"


def _stall(f: Facts) -> str:
    if not _at_least(f.stall, STALLED):
        return ""
    return f"p95 ITL is {words.significant(f.stall, 2)} times the median: prompts may hold up running sequences"


def _admission(f: Facts) -> str:
    return f"{words.percent(f.queued)} of TTFT passes before admission" if _at_least(f.queued, QUEUED) else ""


def _load(f: Facts) -> str:
    if f.kv_wait is None or f.waiting is None or _waits(f):
        return ""
    peak = "" if f.kv_peak is None else f", KV at its peak {words.percent(f.kv_peak)} used"
    return f"nothing waited long for memory or a seat{peak}"


RULES = (
    Rule("requests mostly waited for KV", KV, _kv_mostly),
    Rule("preemption storm", KV, _storm),
    Rule("concurrency failed before compute was full", "", _headroom),
    Rule("the batch was full", SEATS, _seats),
    Rule("the engine was full", COMPUTE, _compute),
    Rule("requests often waited for KV", KV, _kv_often),
    Rule("the queue grew", QUEUE, _growth),
    Rule("the client was busy", CLIENT, _client),
    Rule("admission dominates TTFT", "", _admission),
    Rule("long prompts slow everyone", "", _stall),
    Rule("nothing was full", NOTHING, _load),
)


def judge(facts: Facts) -> tuple[str, tuple[str, ...]]:
    """The limit, and the evidence of every rule that holds; "nothing was full" speaks only where no limit is named."""
    seen = [(rule, text) for rule in RULES if (text := rule.sees(facts))]
    naming = [rule.limit for rule, _ in seen if rule.limit and rule.limit != NOTHING]
    if not naming:
        nothing = [text for rule, text in seen if rule.limit == NOTHING]
        return (NOTHING if nothing else UNKNOWN), tuple(nothing + [text for rule, text in seen if not rule.limit])
    return naming[0], tuple(text for rule, text in seen if rule.limit != NOTHING)


def limit_of(run: Run, cell: MeasuredCell) -> Limit:
    """What limited one cell."""
    facts = facts_of(run, cell)
    return Limit(cell, facts, *judge(facts))


def limits(run: Run) -> list[Limit]:
    """Of every valid cell, the highest load first."""
    return [limit_of(run, cell) for cell in run.by_load if cell.valid]


def facts_of(run: Run, cell: MeasuredCell) -> Facts:
    """Read from the stored gauges, counters and latencies of a cell and of its neighbours in the run."""
    requests, preempted = cell.count("completed"), cell.counter("num_preemptions_total")
    itl, p95 = (cell.percentile("itl_ms", which)[0] for which in ("p50", "p95"))
    queue, ttft = cell.counter("request_queue_time_seconds_sum"), cell.counter("time_to_first_token_seconds_sum")
    cpu = [float(share) for share in cell.client("cpu_fraction")]
    seats = cell.settings.get("max_num_seqs")
    if seats is None and cell.settings.get("layout") is not None:
        seats = effective(cell.settings, "max_num_seqs")
    return Facts(
        asked=cell.load.value if cell.load.mode == "closed" else None,
        running=cell.observed_mean("running_mean"),
        waiting=cell.observed_mean("waiting_mean"),
        seats=seats,
        kv_wait=cell.observed_mean("kv_full"),
        kv_peak=median(cell.observed("usage_max")),
        preemptions=preempted / requests if preempted is not None and requests else None,
        grown=_queue_growth(cell),
        busy=_busy(cell),
        **_growth_from_below(run, cell),
        **_headroom_of(run, cell),
        stall=p95 / itl if p95 and itl else None,
        queued=queue / ttft if queue is not None and ttft else None,
        client_cpu=max(cpu, default=None),
    )


def _busy(cell: MeasuredCell) -> float | None:
    """The share of the load's time that the engine spent in steps."""
    spent, lasted = step_seconds(cell), sum(cell.per_repeat("duration_s").values())
    return min(1.0, spent / lasted) if spent is not None and lasted else None


def _growth_from_below(run: Run, cell: MeasuredCell) -> dict[str, Any]:
    """Tokens/s and running sequences over those at the load below; empty without such a load."""
    below = [load for load in run.loads if load.mode == cell.load.mode and load.value < cell.load.value]
    other = run.cell(cell.name, below[-1]) if below else None
    if other is None or not other.valid or cell.has_steady != other.has_steady:
        return {}
    rate, rate_below = (median(each.throughput()) for each in (cell, other))
    ran, ran_below = (each.observed_mean("running_mean") for each in (cell, other))
    if not rate or not rate_below or not ran or not ran_below:
        return {}
    return {"rate_growth": rate / rate_below, "running_growth": ran / ran_below, "below": other.load.short}


def _headroom_of(run: Run, cell: MeasuredCell) -> dict[str, Any]:
    """The most tokens/s of a configuration that computes the same and is decided to be ahead, over this one's."""
    found: list[Change] = []
    for other in run.at(cell.load):
        if other is cell or not other.valid or not differing(cell, other) <= _KV_LAYOUT:
            continue
        known = change_between(run, other, cell, THROUGHPUT)
        if known and known.call == AHEAD:
            found.append(known)
    best = max(found, key=lambda each: each.ratio, default=None)
    return {"headroom": best.ratio, "headroom_in": best.clock} if best else {}


def _queue_growth(cell: MeasuredCell) -> float | None:
    """Waiting requests, last third of an open load's arrivals minus first third, mean over the repeats.

    None for a load of which every repeat settled: its queue swings, and does not grow.
    """
    repeats = [each for each in cell.repeats if number(each.metrics.get("steady_end_s")) is None]
    if cell.load.mode != "open" or not repeats:
        return None
    gauges, requests = cell.gauges(), cell.requests()
    if gauges.empty or requests.empty:
        return None
    found = []
    for repeat in repeats:
        polls: pd.DataFrame = gauges[gauges["repeat"] == repeat.repeat]
        last = requests.loc[requests["repeat"] == repeat.repeat, "t0"].max()  # what follows is the drain
        thirds = [
            polls[polls["t"].between(last * k / 3, last * (k + 1) / 3)]["num_requests_waiting"].mean() for k in (0, 2)
        ]
        found.append(thirds[1] - thirds[0])
    growth = pd.Series(found, dtype=float).dropna()
    return float(growth.mean()) if len(growth) else None


@dataclass(frozen=True)
class LimitLine:
    """The configurations that had the same limit at one load, and the evidence of one of them."""

    load: str
    limit: str
    configurations: tuple[str, ...]
    evidence: str
    everywhere: bool  # all configurations of the load are on this line

    @property
    def names(self) -> str:
        """The configurations, or that it is all of them."""
        few = len(self.configurations) < 3
        return f"all {len(self.configurations)}" if self.everywhere and not few else words.listing(self.configurations)


def limit_lines(run: Run) -> list[LimitLine]:
    """The limits by load, the highest first, configurations with the same limit together.

    A line has the evidence of the baseline, else of the configuration that waited longest for KV, or of which the rules
    saw most.
    """
    groups: dict[tuple[str, str], list[Limit]] = {}
    for each in limits(run):
        groups.setdefault((each.cell.load.short, each.limit), []).append(each)
    lines = []
    for (load, limit), members in groups.items():
        speaker = max(members, key=lambda each: (each.cell.is_baseline, each.facts.kv_wait or 0.0, len(each.evidence)))
        evidence = "; ".join(speaker.evidence[:_MOST_EVIDENCE])
        base = baseline(run, speaker.cell.load)
        names = tuple(short_name(each.cell, base) for each in members)
        told = f"{short_name(speaker.cell, base)}: {evidence}" if len(members) > 1 and evidence else evidence
        lines.append(LimitLine(load, limit, names, told, sum(key[0] == load for key in groups) == 1))
    return lines
