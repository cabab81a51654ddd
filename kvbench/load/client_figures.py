"""The load client's own figures: how late it was, what it cost, and what it counted. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from kvbench.load.samples import Sample
from kvbench.metrics.model import ClientFigures
from kvbench.metrics.rows import gaps_within

MIN_PLAUSIBLE_ERROR_S, MAX_PLAUSIBLE_ERROR_S = -1.0, 60.0  # beyond them the stamps are of another clock
SEND_S = 50e-6  # what sending one request may cost: of several due at one moment, each waits for those before it
PROBE_PERIOD_S = 0.010  # of the loop's lag probe: a tick that is later missed the next one as well
MIN_LAG_SAMPLES = 100  # with fewer, the p99 is the worst sample
MAX_UNSTAMPED_SHARE = 0.01
_ONE_MOMENT_DIGITS = 6  # of seconds: times that came over another clock differ in the last bits


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
    """The delay [s] of each request, less ``SEND_S`` for each earlier one that was due at the same moment.

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
    """The most chunks in any second, counted from the first chunk."""
    times = [s.completion.chunk_times for s in samples if s.completion.chunk_times]
    if not times:
        return 0
    at = np.concatenate(times)
    return int(np.bincount((at - at.min()).astype(np.int64)).max())


def read_delays(samples: Sequence[Sample]) -> list[float]:
    """The seconds from the end of each later turn's thinking to its intended start; 0 where thinking took longer."""
    ends = {(s.request.session, s.request.turn): s.end for s in samples if s.request.session is not None}
    later = [s for s in samples if s.request.session is not None and s.request.turn and s.sent]
    due = [ends.get((s.request.session, s.request.turn - 1), s.t0) + s.request.think_s for s in later]
    return [max(0.0, s.t0 - when) for s, when in zip(later, due, strict=True)]


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
