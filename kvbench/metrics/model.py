"""The figures of one load: what `summarise` returns, and what is stored of a load under ``metrics``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, PlainSerializer

from kvbench.common.records import Record
from kvbench.common.text import shorten
from kvbench.metrics.definitions import ENGINE, METRICS

_MESSAGE_CHARACTERS = 120  # of a server's message
MIN_STEADY_REQUESTS = 8  # the fewest samples whose extremes enclose the median with 99 % confidence: 2 / 2^n <= 1 %
MIN_STEADY_SHARE = 0.6  # of the requests: in closed loop 2.5 a user, so that a third of those in the window end in it
MAX_FAILED_SHARE = 0.01  # of the requests sent: a server that answers fewer does less work


class Distribution(Record):
    """A latency over many samples [ms]. ``std``: of the population; ``uncertain``: percentiles of too few samples."""

    mean: float | None = None
    std: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    min: float | None = None
    max: float | None = None
    n: int = 0
    uncertain: tuple[str, ...] = ()


_QUANTILES = ("p50", "p90", "p95", "p99")
_UNKNOWN = dict.fromkeys(("mean", "std", *_QUANTILES, "min", "max"))
EMPTY = Distribution(n=0, uncertain=_QUANTILES, **_UNKNOWN)  # its fields are set, so that they are stored


def _added(value: Any) -> Any:
    """A figure that has no field: a distribution where it counts samples, else what is stored."""
    return Distribution.model_validate(value) if isinstance(value, dict) and "n" in value else value


_Added = Annotated[Any, BeforeValidator(_added)]


class Figures(Record):
    """Figures under the names of their paths in METRICS; a metric that was added has its figure here too."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _Added]

    def at(self, path: str) -> Any:
        """Returns what is stored at a dotted path such as ``steady_latency.ttft_ms.p95``; None where nothing is."""
        node: Any = self
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
        return node

    def value(self, path: str) -> float | None:
        """The finite number at a dotted path; None where there is none."""
        value = self.at(path)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return float(value)

    def distribution(self, path: str) -> Distribution:
        """The distribution at a dotted path; ``EMPTY`` where there is none."""
        value = self.at(path)
        return value if isinstance(value, Distribution) else EMPTY


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a nested mapping under dotted names; everything else is left out."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            flat[f"{prefix}{key}"] = float(value)
    return flat


class Latencies(Figures):
    """The distribution of each latency [ms]; one that no request has is left out, but for the usual five."""

    ttft_ms: Distribution = EMPTY
    ttft_send_ms: Distribution = EMPTY
    ttfo_ms: Distribution = EMPTY
    reasoning_ms: Distribution = EMPTY
    tpot_ms: Distribution = EMPTY
    itl_ms: Distribution = EMPTY
    e2el_ms: Distribution = EMPTY
    client_queue_ms: Distribution = EMPTY
    sequence_ttft_ms: Distribution = EMPTY


class GroupLatencies(Latencies):
    """The latencies of ``n`` requests of a class or kind of turn. ``priority``: of all of them, if it is one."""

    n: int = 0
    priority: int | None = None


class PooledLatencies(Latencies):
    """Latencies over all requests, by class, and by turn (first, later) where there are conversations."""

    per_class: Mapping[str, GroupLatencies] = {}
    per_turn: Mapping[str, GroupLatencies] = {}
    steady_latency: PooledLatencies | None = None


class Rates(Figures):
    """Rates per second over the steady window; None without one, goodput also without an SLO."""

    steady_start_s: float | None = None
    steady_end_s: float | None = None
    steady_request_throughput: float | None = None
    steady_output_throughput: float | None = None
    steady_non_reasoning_output_throughput: float | None = None
    steady_total_token_throughput: float | None = None
    steady_goodput: float | None = None


class Plateau(GroupLatencies, Rates):
    """The figures of one plateau of a changing rate, in its steady part. Times [s] since the load's start."""

    start_s: float | None = None
    end_s: float | None = None
    request_rate: float | None = None


class FailureMessage(Record):
    """The message that most requests with one kind of failure got, and their number."""

    message: str
    requests: int


class CanaryCounts(Record):
    """The canaries of one load or several.

    answered: one that failed is neither right nor wrong; wrong: requests with a wrong answer; distinct: different
    canaries that were answered; first_wrong: the wrong one that was due first, and how it differs, in words
    """

    sent: int = 0
    answered: int = 0
    wrong: int = 0
    distinct: int = 0
    first_wrong: str | None = None


class ProcessClock(Record):
    """The accuracy with which the clock of a load process is known on the master's."""

    same_clock: bool | None = None
    offset_ms: float | None = None
    round_trip_ms: float | None = None
    drift_ms: float | None = None
    error_ms: float | None = None
    readings: int | None = None


class _ClientFigures(Record):
    """The figures of a load process or the whole client by itself; None where not known. Times [ms], shares 0 to 1.

    cpu_fraction: of a core, of the busiest process; lag: how late its timestamps were, as lag_source shows
    loop_lag: how late its loop was
    """

    priority: str | None = None
    cpu_fraction: float | None = None
    cpu_us_per_chunk: float | None = None
    lag_source: str | None = None
    lag_p50_ms: float | None = None
    lag_p99_ms: float | None = None
    loop_lag_p99_ms: float | None = None
    schedule_slip_p99_ms: float | None = None
    turnaround_p50_ms: float | None = None
    turnaround_p99_ms: float | None = None
    turnaround_share: float | None = None
    coalesced_share: float | None = None


class ProcessFigures(_ClientFigures):
    """The figures of one of several load processes."""

    name: str
    host: str | None = None
    pid: int | None = None
    requests: int | None = None
    completed: int | None = None
    chunks: int | None = None
    clock: ProcessClock = ProcessClock()


class ClientFigures(_ClientFigures):
    """The figures of the load client, all its processes together.

    lag_judged: whether this load's lag was held to the limit; loop_lag_stopped_share: of the time that it stood still
    """

    model_config = ConfigDict(extra="allow")

    cpu_fraction_total: float | None = None
    cpu_s: float | None = None
    parse_cpu_s: float | None = None
    cpu_s_per_1000_output_tokens: float | None = None
    lag_samples: int = 0
    lag_judged: bool | None = None
    loop_lag_p50_ms: float | None = None
    loop_lag_max_ms: float | None = None
    loop_lag_stopped_share: float | None = None
    schedule_slip_beyond_bursts_p99_ms: float | None = None
    turnarounds: int = 0
    chunks: int = 0
    chunks_of_busiest_second: int | None = None
    coalesced_chunks: int = 0
    itl_p50_ms: float | None = None
    prompt_token_mismatches: int | None = None
    read_delay_p99_ms: float | None = None
    reopened_connections: int = 0
    unstamped_share: float | None = None
    short_outputs: int = 0
    asked_output_tokens: int | None = None
    workers_here: bool = False
    processes: tuple[ProcessFigures, ...] = ()


class LocustTotals(Record):
    """Requests and failures as Locust counted them, for comparison."""

    num_requests: int = 0
    num_failures: int = 0


def _read_clock(word: Any) -> Any:
    return ENGINE if word == "engine" else word


def _stored_clock(clock: str | None) -> str | None:
    return "engine" if clock == ENGINE else clock


Clock = Annotated[str, BeforeValidator(_read_clock), PlainSerializer(_stored_clock)]
"""SERVED, ENGINE or SIMULATED; files call ENGINE "engine"."""


def _finite(rate: Any) -> Any:
    return None if rate == math.inf else rate


class LoadOutcome(Record):
    """The facts of a load besides its rows: load.json. None where it is not known, or never was.

    clock: of all times, where it is not the machine's; zero_perf_counter: time 0 of the rows on that clock [s]
    request_rate: None for all at once; incomplete: not every request was finished
    prompt_tokens_added: least, median and most tokens that the server counts beyond the drawn ones of a text
    invalid_reasons: why the load may not be believed, one sentence each; target_start_s, target_end_s: steady window
    """

    clock: Clock | None = None
    started_at: str | None = None
    start_unix: float | None = None
    duration_s: float | None = None
    zero_perf_counter: float | None = None
    wall_clock_step_s: float | None = None
    repetitions: int | None = None
    mode: str | None = None
    concurrency: int | None = None
    max_concurrency: int | None = None
    request_rate: Annotated[float | None, BeforeValidator(_finite)] = None
    num_requests: int | None = None
    completed: int | None = None
    failed: int | None = None
    incomplete: bool = False
    max_in_flight: int | None = None
    client: ClientFigures = ClientFigures()
    prompt_tokens_added: tuple[int, float, int] | None = None
    invalid_reasons: tuple[str, ...] = ()
    notes: Mapping[str, Any] = {}
    locust: LocustTotals | None = None
    target_start_s: float | None = None
    target_end_s: float | None = None


class LoadMetrics(PooledLatencies, Rates):
    """All figures of one load; see docs/measuring.md for their definitions. Times [ms], rates per second.

    failed: requests that were sent and failed; not_sent: turns of a conversation after a failed one
    refused_by_server: failures that the server answered with an error of its own; rejected_by_server: with one that
        blames the request; failure_messages: the most frequent message of each kind of failure
    without_output: successful requests that reasoned to their end
    slo_misses: successful requests over each limit of the SLO, by its name
    """

    completed: int = 0
    failed: int = 0
    not_sent: int = 0
    failure_kinds: Mapping[str, int] = {}
    failure_messages: Mapping[str, FailureMessage] = {}
    refused_by_server: int = 0
    rejected_by_server: int = 0
    first_failure: str | None = None
    incomplete: bool = False
    first_request_s: float = 0.0
    duration_s: float = 0.0
    steady_note: str | None = None
    request_throughput: float | None = None
    output_throughput: float | None = None
    non_reasoning_output_throughput: float | None = None
    total_token_throughput: float | None = None
    goodput: float | None = None
    slo_misses: Mapping[str, int] = {}
    plateaus: tuple[Plateau, ...] = ()
    total_input_tokens: int = 0
    total_cached_tokens: int | None = None
    total_output_tokens: int = 0
    total_reasoning_tokens: int | None = None
    without_output: int = 0
    multi_token_chunks: int | None = None
    unstreamed_tokens: int = 0
    tokens_per_chunk: float | None = None
    open_after_last_p50_ms: float | None = None
    open_after_last_share: float | None = None
    client: ClientFigures = ClientFigures()
    canaries: CanaryCounts | None = None

    @property
    def sent(self) -> int:
        return self.completed + self.failed

    @property
    def steady_requests(self) -> int:
        """Successful requests that came in the steady window."""
        return self.steady_latency.ttft_ms.n if self.steady_latency else 0

    @property
    def has_steady_latency(self) -> bool:
        """Tests whether enough requests came in the steady window, so that its latencies lead.

        A user's last request runs on while fewer and fewer others do: of 48 requests of 32 users, 16 come in the window
        and all end after it, with a third of the others' time per token.
        """
        came = self.steady_requests
        return came >= MIN_STEADY_REQUESTS and came >= MIN_STEADY_SHARE * self.completed

    @property
    def leading_latencies(self) -> PooledLatencies:
        """The latencies that tables and decisions take: of the steady window, else of the whole run."""
        return self.steady_latency if self.steady_latency and self.has_steady_latency else self

    @property
    def too_many_failed(self) -> bool:
        """Tests whether more than ``MAX_FAILED_SHARE`` of the requests sent failed."""
        return self.failed > MAX_FAILED_SHARE * self.sent

    @property
    def is_refusal(self) -> bool:
        """Tests whether the server answered a part of the load and refused too much by its own errors.

        If it answered nothing, or too many requests failed in another way, something else is wrong.
        """
        others = self.failed - self.refused_by_server
        otherwise = others > MAX_FAILED_SHARE * (self.completed + others)
        return self.completed > 0 and self.too_many_failed and not otherwise

    @property
    def goodput_share(self) -> float | None:
        """The share of the requests sent, failed ones included, that met every SLO; None without an SLO."""
        return METRICS["goodput_share"].computed(self.value)


def failure_words(messages: Mapping[str, FailureMessage], sent: int, kinds: bool = False) -> str:
    """Tells how many of the requests ``sent`` failed with which sentence: ``32 of 52: "Context size exceeded."``

    ``messages``: the most frequent of each kind of failure, as ``most_frequent_failures`` returns them; with ``kinds``
    in front of each.
    """
    return ", ".join(
        f"{message.requests} of {sent}: {_quoted(kind, message, kinds)}" for kind, message in messages.items()
    )


def failed_words(messages: Mapping[str, FailureMessage], failed: int, sent: int, kinds: bool = False) -> str:
    """Tells how many failed and why: ``32 of 52 requests failed: "Context size exceeded."``, kinds with counts."""
    text = f"{failed} of {sent} requests failed"
    if len(messages) == 1 and next(iter(messages.values())).requests == failed:
        return f"{text}: {_quoted(*next(iter(messages.items())), kinds)}"
    return f"{text}; {failure_words(messages, sent, kinds)}" if messages else text


def _quoted(kind: str, failure: FailureMessage, kinds: bool) -> str:
    return f'{f"{kind}: " if kinds else ""}"{shorten(failure.message, _MESSAGE_CHARACTERS)}"'
