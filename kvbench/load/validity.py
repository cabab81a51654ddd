"""The limits on a load client's own figures and on a server's outputs: what makes a load invalid. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbench.load.client_figures import MIN_LAG_SAMPLES, SEND_S, prompt_differences, tokens_added
from kvbench.load.endpoints import Dialect
from kvbench.load.samples import Sample
from kvbench.metrics.model import ClientFigures, LoadOutcome

MAX_SLIP_MS = 5.0
MAX_CPU_FRACTION = 0.70
MIN_LAG_LIMIT_MS = 1.0
LAG_SHARE_OF_ITL = 0.02
MAX_COALESCED_SHARE = 0.01
MAX_SHORT_SHARE = 0.01
MAX_OTHER_PROMPTS, MOST_SPECIAL_TOKENS = 0.01, 4  # a server may put its own tokens around a prompt
MAX_TURNAROUND_SHARE = 0.02
MIN_TURNAROUNDS = 10  # with fewer, one stall of the machine decides
MAX_STOPPED_SHARE = MAX_TURNAROUND_SHARE  # of the probe's ticks: while its loop stands still, the client sends nothing
MIN_STOP_MS = 100.0  # a shorter stop is a hiccup of the machine, which in a short load may be a large share
UNKNOWN_STREAMS = 64  # of an open loop without a cap: what the client is calibrated for before the load
RATE_MARGIN = 1.25  # a calibration covers loads of so many times its own chunks a second


def lag_limit_ms(itl_ms: float | None) -> float:
    """The largest p99 error that timestamps may have [ms]: 1 ms, or 2 % of the median ITL (None: there is none)."""
    return max(MIN_LAG_LIMIT_MS, LAG_SHARE_OF_ITL * (itl_ms or 0.0))


def other_prompts(samples: Sequence[Sample], dialect: Dialect, *, exact_texts: bool = False) -> list[str]:
    """Says why the server served another load than was sent: it counts other numbers of prompt tokens.

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
            f"and {limit:.2f} ms (1 ms or 2 % of the median ITL); give the client a core of its own, and let the "
            "server set TCP_NODELAY: without it the kernel joins small chunks."
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
