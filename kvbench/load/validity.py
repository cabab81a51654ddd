"""A client's own figures (lag, CPU, schedule slip), and what makes a load invalid. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from kvbench.load.endpoints import Dialect
from kvbench.load.samples import Sample
from kvbench.metrics.model import ClientFigures, LoadOutcome
from kvbench.metrics.rows import gaps_within

MAX_SLIP_MS = 5.0
MAX_CPU_FRACTION = 0.70
MIN_LAG_LIMIT_MS = 1.0
LAG_SHARE_OF_ITL = 0.02
MAX_COALESCED_SHARE = 0.01
MAX_SHORT_SHARE = 0.01
MAX_OTHER_PROMPTS, MOST_SPECIAL_TOKENS = 0.01, 4  # a server may put its own tokens around a prompt
MAX_TURNAROUND_SHARE = 0.02
MIN_TURNAROUNDS = 10  # with fewer, one stall of the machine decides
MIN_PLAUSIBLE_ERROR_S, MAX_PLAUSIBLE_ERROR_S = -1.0, 60.0  # beyond them the stamps are of another clock
SEND_S = 50e-6  # what sending one request may cost: of several due at one moment, each waits for those before it
PROBE_PERIOD_S = 0.010  # of the loop's lag probe: a tick that is later missed the next one as well
MAX_STOPPED_SHARE = MAX_TURNAROUND_SHARE  # of the probe's ticks: while its loop stands still, the client sends nothing
MIN_STOP_MS = 100.0  # a shorter stop is a hiccup of the machine, which in a short load may be a large share
MIN_LAG_SAMPLES = 100  # with fewer, the p99 is the worst sample
UNKNOWN_STREAMS = 64  # of an open loop without a cap: what the client is calibrated for before the load
RATE_MARGIN = 1.25  # a calibration covers loads of so many times its own chunks a second
MAX_UNSTAMPED_SHARE = 0.01
_ONE_MOMENT_DIGITS = 6  # of seconds: times that came over another clock differ in the last bits


def lag_limit_ms(itl_ms: float | None) -> float:
    """The largest p99 error that timestamps may have [ms]: 1 ms, or 2 % of the median ITL (None: there is none)."""
    return max(MIN_LAG_LIMIT_MS, LAG_SHARE_OF_ITL * (itl_ms or 0.0))


def percentile_ms(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile (0..100) of seconds, in ms; None without samples."""
    return float(np.percentile(values, q) * 1000) if len(values) else None


def stamp_errors(samples: Sequence[Sample]) -> Sequence[float] | None:
    """The error of each chunk's timestamp [s]: receipt minus the server's own send stamp; None without stamps.

    Stamps are kept only where client and server share a machine and so a clock; a container may shift it all the same
    (time_namespaces(7)), which the median shows. Streams of which some chunks have no stamp are left out.
    """
    whole = [
        s.completion for s in samples if s.completion.sent_times
        and len(s.completion.sent_times) == len(s.completion.chunk_times)
    ]  # fmt: skip
    if not whole:
        return None
    errors = np.concatenate([np.subtract(c.chunk_times, c.sent_times) for c in whole])
    return errors if MIN_PLAUSIBLE_ERROR_S < np.median(errors) < MAX_PLAUSIBLE_ERROR_S else None


def slip_beyond_bursts(samples: Sequence[Sample]) -> list[float]:
    """The delay [s] of each request behind its time, less ``SEND_S`` for each one before it of the same moment.

    Requests that are due at one moment cannot leave at one moment; with ``request_rate: inf`` all of them are.
    """
    slips, before = [], Counter()
    for sample in sorted(samples, key=lambda s: s.ts):
        moment = round(sample.t0, _ONE_MOMENT_DIGITS)
        slips.append(max(0.0, sample.slip_s - before[moment] * SEND_S))
        before[moment] += 1
    return slips


def turnarounds(samples: Sequence[Sample]) -> tuple[list[float], float | None]:
    """The seconds from each stream's end to the same user's next send, and their share of the users' time.

    Of a closed loop, without think times; [requests - users]. A user's time is from its first send to its last stream's
    end. A loop of N users has a throughput of N / (response time + think time + turnaround) (Denning and Buzen, ACM
    Computing Surveys 10(3), 1978): the share (None: no turnaround) is the part of the throughput that the client itself
    took away.
    """
    gaps, spent = [], 0.0
    of_user = sorted((s for s in samples if s.sent), key=lambda s: (s.user, s.ts))
    for _, group in groupby(of_user, key=lambda s: s.user):
        mine = list(group)
        spent += mine[-1].end - mine[0].ts
        gaps += [b.ts - a.end - (b.request.think_s if b.request.turn else 0.0) for a, b in pairwise(mine)]
    return gaps, sum(gaps) / spent if gaps and spent > 0 else None


def busiest_second(samples: Sequence[Sample]) -> int:
    """The most chunks of any second, seconds being counted from the first chunk."""
    times = [s.completion.chunk_times for s in samples if s.completion.chunk_times]
    if not times:
        return 0
    at = np.concatenate(times)
    return int(np.bincount((at - at.min()).astype(np.int64)).max())


@dataclass
class Clocked:
    """Times and counts of one load process. ``cpu_s`` and ``wall_s``: from the start to the end of the last stream.

    ``wall_step_s``: how far the wall clock jumped meanwhile; ``parse_cpu_s``: CPU time of parsing after the last
    stream; ``unstamped_reads``: ``reads`` whose arrival the kernel did not stamp; ``reopened``: kept connections that
    the server had closed.
    """

    started_unix: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    wall_step_s: float = 0.0
    priority: str = "normal"
    reads: int = 0
    unstamped_reads: int = 0
    reopened: int = 0
    parse_cpu_s: float = 0.0

    @property
    def kernel_stamps(self) -> bool:
        """Tests whether times are of the bytes' arrival: whether at least 99 % of the reads had a stamp."""
        return self.reads > 0 and self.unstamped_reads <= MAX_UNSTAMPED_SHARE * self.reads


def read_delays(samples: Sequence[Sample]) -> list[float]:
    """The seconds from the end of each later turn's thinking to its intended start; 0 where thinking took longer."""
    ends = {(s.request.session, s.request.turn): s.end for s in samples if s.request.session is not None}
    later = [s for s in samples if s.request.session is not None and s.request.turn and s.sent]
    due = [ends.get((s.request.session, s.request.turn - 1), s.t0) + s.request.think_s for s in later]
    return [max(0.0, s.t0 - when) for s, when in zip(later, due, strict=True)]


def client_figures(
    samples: Sequence[Sample], lags: Sequence[float], clocked: Sequence[Clocked], mode: str, wall_s: float
) -> ClientFigures:
    """Returns the client's own figures. ``clocked``: what its work took in its processes, over ``wall_s``.

    ``lags`` [s]: how late the client's loop was, and so its timestamps, unless they are the kernel's, whose error the
    calibration tells. The p99 of the lag is that of its size: a timestamp that is too early is as wrong.
    ``lag_judged``: whether this load's own timestamps were held to the limit. ``read_delay_p99_ms``: by how much later
    turns were due than their users had thought, because the answer before had first to be parsed; None without such.
    """
    cpu_s, parse_cpu_s, reads = (sum(getattr(c, name) for c in clocked) for name in ("cpu_s", "parse_cpu_s", "reads"))
    chunks = sum(len(s.completion.chunk_times) for s in samples)
    coalesced = sum(s.completion.coalesced for s in samples)
    sent = [s for s in samples if s.sent] if mode == "open" else []
    gaps = [gaps_within(s.completion.chunk_times, s.completion.chunk_choices) for s in samples if s.completion.ok]
    itl = np.concatenate(gaps) if gaps else np.empty(0)
    is_judged = mode == "closed" and any(s.completion.ok for s in samples)  # failures at once have no time to share
    waits, wait_share = turnarounds(samples) if is_judged else ([], None)
    errors = stamp_errors(samples)
    source = "server stamps" if errors is not None else "loop probe"
    if errors is None and all(c.kernel_stamps for c in clocked):
        source = "kernel stamps"
    lags_used = {"server stamps": errors, "kernel stamps": (), "loop probe": lags}[source]
    return ClientFigures(
        cpu_fraction=cpu_s / wall_s if wall_s > 0 else None,
        cpu_us_per_chunk=(cpu_s + parse_cpu_s) / chunks * 1e6 if chunks else None,
        lag_source=source,
        lag_p50_ms=percentile_ms(lags_used, 50),
        lag_p99_ms=percentile_ms(np.abs(lags_used), 99),
        lag_samples=len(lags_used),
        lag_judged=len(lags_used) >= MIN_LAG_SAMPLES,
        loop_lag_p50_ms=percentile_ms(lags, 50),
        loop_lag_p99_ms=percentile_ms(lags, 99),
        loop_lag_max_ms=percentile_ms(lags, 100),
        loop_lag_stopped_share=float((np.asarray(lags) > PROBE_PERIOD_S).mean()) if len(lags) else None,
        schedule_slip_p99_ms=percentile_ms([s.slip_s for s in sent], 99),
        schedule_slip_beyond_bursts_p99_ms=percentile_ms(slip_beyond_bursts(sent), 99),
        turnaround_p50_ms=percentile_ms(waits, 50),
        turnaround_p99_ms=percentile_ms(waits, 99),
        turnaround_share=wait_share,
        turnarounds=len(waits),
        chunks=chunks,
        chunks_of_busiest_second=busiest_second(samples),
        coalesced_chunks=coalesced,
        coalesced_share=coalesced / chunks if chunks else None,
        itl_p50_ms=percentile_ms(itl, 50),
        prompt_token_mismatches=sum(map(bool, prompt_differences(samples))),
        cpu_s=cpu_s,
        parse_cpu_s=parse_cpu_s,
        read_delay_p99_ms=percentile_ms(read_delays(samples), 99),
        priority=", ".join(sorted({c.priority for c in clocked})),
        reopened_connections=sum(c.reopened for c in clocked),
        unstamped_share=sum(c.unstamped_reads for c in clocked) / reads if reads else None,
    )


def _beyond_drawn(sample: Sample) -> int | None:
    """The tokens that the server counts in a prompt beyond those drawn; None where either is not known."""
    counted, drawn = sample.completion.prompt_tokens, sample.request.prompt_token_ids
    return None if counted is None or drawn is None else counted - len(drawn)


def prompt_differences(samples: Sequence[Sample]) -> list[int]:
    """The tokens by which the server's count of each prompt of token ids differs from what was sent."""
    as_ids = [s for s in samples if s.request.prompt is None and not s.request.new_tokens]
    return [tokens for tokens in map(_beyond_drawn, as_ids) if tokens is not None]


def tokens_added(samples: Sequence[Sample]) -> list[int]:
    """The tokens that the server counts beyond the drawn ones in each prompt that was sent as a text."""
    texts = [s for s in samples if s.completion.ok and s.request.prompt is not None and not s.request.history]
    return [tokens for tokens in map(_beyond_drawn, texts) if tokens is not None]


def other_prompts(samples: Sequence[Sample], dialect: Dialect, *, exact_texts: bool = False) -> list[str]:
    """Says why the server served another load than was sent: its counts of the prompts' tokens are others.

    ``exact_texts``: texts have as many tokens as were drawn; a chat template adds the same number to each.
    """
    differences = prompt_differences([s for s in samples if s.completion.ok]) if dialect.usage else []
    if exact_texts and dialect.usage and (added := tokens_added(samples)):
        by_template = int(np.median(added))
        differences += [tokens - by_template for tokens in added]
    others = [abs(tokens) for tokens in differences if abs(tokens) > MOST_SPECIAL_TOKENS]
    if len(others) <= MAX_OTHER_PROMPTS * len(differences):
        return []
    return [
        f"the server counted {len(others)} of {len(differences)} prompts otherwise than they were sent, by up to "
        f"{max(others)} tokens, the limit is {MAX_OTHER_PROMPTS:.0%} (beyond {MOST_SPECIAL_TOKENS} special tokens of "
        "its own); it cuts or changes prompts: give it a longer context, or shorter prompts."
    ]


def nothing_streamed(samples: Sequence[Sample]) -> list[str]:
    """Returns a reason where a load shows no times: every answer was reasoning that was not streamed."""
    done = [s for s in samples if s.completion.ok]
    if not done or any(s.completion.chunk_times for s in done):
        return []
    return [
        f"none of {len(done)} answers streamed a token: all were reasoning that only the usage tells; ask for longer "
        "answers, or for less reasoning."
    ]


def short_outputs(samples: Sequence[Sample], ignore_eos: bool) -> tuple[int, list[str]]:
    """Outputs that ended before the length that ``ignore_eos`` asked for, and the reason when they are too many."""
    done = [s for s in samples if s.completion.ok] if ignore_eos else []
    short = sum((s.completion.output_tokens or 0) < s.request.n * s.request.max_tokens for s in done)
    if short <= MAX_SHORT_SHARE * len(done):
        return short, []
    return short, [
        f"{short} of {len(done)} outputs were shorter than max_tokens although ignore_eos was set, the limit is "
        f"{MAX_SHORT_SHARE:.0%}; the server does not obey it: serve a model without an end token, or set "
        "ignore_eos: false."
    ]


def invalid_reasons(client: ClientFigures, missing: int) -> list[str]:
    """Says why the load may not be believed, one sentence each; empty when it may.

    ``missing``: requests that were never finished. Of chunks that share a read, the server's send stamps tell which it
    had sent apart. Without them, a client whose loop keeps the limit of the lag has joined no chunks further apart.
    """
    reasons = []
    limit = lag_limit_ms(client.itl_p50_ms)
    if client.lag_judged and client.lag_p99_ms > limit:
        reasons.append(
            f"the client's timestamps {'lagged' if client.lag_p50_ms >= 0 else 'were early'}: "
            f"p99 {client.lag_p99_ms:.2f} ms, the limit is {limit:.2f} ms "
            "(1 ms or 2 % of the median ITL); give the client a core of its own."
        )
    stopped, longest = client.loop_lag_stopped_share or 0.0, client.loop_lag_max_ms or 0.0
    if stopped > MAX_STOPPED_SHARE and longest > MIN_STOP_MS:
        reasons.append(
            f"the client stood still for {stopped:.1%} of the load and up to {longest:.0f} ms at once; the limits are "
            f"{MAX_STOPPED_SHARE:.0%} and {MIN_STOP_MS:g} ms; do not suspend it, and give it a core of its own."
        )
    judged = client.chunks >= MIN_LAG_SAMPLES
    coalesced, late = client.coalesced_share or 0.0 if judged else 0.0, client.loop_lag_p99_ms or 0.0
    if client.lag_source == "server stamps" and coalesced > MAX_COALESCED_SHARE:
        reasons.append(
            f"{coalesced:.1%} of the chunks were read together with the one before although they were sent apart, the "
            f"limit is {MAX_COALESCED_SHARE:.0%}; give the client a core of its own."
        )
    if client.lag_source == "kernel stamps" and coalesced > MAX_COALESCED_SHARE and late > limit:
        reasons.append(
            f"{coalesced:.1%} of the chunks were read together with the one before, and the client was late enough to "
            f"have joined them itself: its loop's lag p99 is {late:.2f} ms; the limits are {MAX_COALESCED_SHARE:.0%} "
            f"and {limit:.2f} ms (1 ms or 2 % of the median ITL); give the client a core of its own."
        )
    slip = client.schedule_slip_beyond_bursts_p99_ms
    if slip is not None and slip > MAX_SLIP_MS:
        reasons.append(
            f"arrivals slipped: p99 {slip:.2f} ms beyond {SEND_S * 1e6:g} us for each one due at the same moment, the "
            f"limit is {MAX_SLIP_MS:g} ms; lower the rate, use a free core or more load processes."
        )
    share = client.turnaround_share
    if share is not None and share > MAX_TURNAROUND_SHARE and client.turnarounds >= MIN_TURNAROUNDS:
        reasons.append(
            f"the client's users spent {share:.1%} of their time between a stream's end and the next send (median "
            f"{client.turnaround_p50_ms:.2f} ms, p99 {client.turnaround_p99_ms:.2f} ms), and the throughput is "
            f"too low by up to that; the limit is {MAX_TURNAROUND_SHARE:.0%}; give the client a core of its own, use "
            "more load processes, or ask for longer answers."
        )
    cpu = client.cpu_fraction
    if cpu is not None and cpu > MAX_CPU_FRACTION:
        reasons.append(
            f"the client used {cpu:.0%} of a core, the limit is {MAX_CPU_FRACTION:.0%}; use fewer streams a process."
        )
    if missing:
        reasons.append(f"{missing} requests were never finished; the load was stopped early.")
    return reasons


def client_reasons(outcome: LoadOutcome) -> list[str]:
    """The reasons in a load.json that its client's own lateness made, of one process or of several."""
    own = invalid_reasons(outcome.client, 0)
    names = tuple(f"{process.name}: " for process in outcome.client.processes)
    return [reason for reason in outcome.invalid_reasons if reason in own or reason.startswith(names)]
