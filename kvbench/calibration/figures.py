"""What a calibration finds when it lays the client's samples beside the mock server's own notes. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvbench.load.completion import SENT_TOGETHER_S
from kvbench.load.validity import percentile_ms


@dataclass(frozen=True)
class Figures:
    """Times in ms. None: too little came back to tell.

    ``lag``: receipt minus the server's send, its p99 that of its size, since a stamp that is too early is as wrong;
    ``itl_error``: |gap seen - gap sent|; ``turnaround``: from a stream's end to the same user's next send.
    ``coalesced_share``: chunks that share their receipt with the one before, though they were sent more than 0.5 ms
    apart. ``faults``: streams that the server cut off, refused or dropped on purpose, and
    ``faults_counted``: those of them that the client counts as successes; ``whole_failed``: the reverse.
    ``requests_repeated``: sent again by the client, which must leave a failed request alone. ``unstamped_share``: of
    the reads, those whose moment is not the kernel's stamp of the arrival.
    """

    events: int
    events_lost: int
    requests: int
    requests_lost: int
    requests_repeated: int
    faults: int
    faults_counted: int
    whole_failed: int
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    itl_error_p99_ms: float | None
    coalesced_share: float | None
    turnaround_p50_ms: float | None
    cpu_us_per_event: float | None
    cpu_fraction: float | None
    loop_lag_p99_ms: float | None
    server_late_p99_ms: float | None
    priority: str
    unstamped_share: float | None = None


def figures_of(
    samples: pd.DataFrame, stamps: Sequence[Mapping[str, Any]], client: Mapping[str, Any], zero: float, planned: int
) -> Figures:
    """``samples``: requests.parquet, times since ``zero`` [s, perf_counter]; ``stamps``: the mock's /stamps, whose
    prompts' last ids are the requests' indices; ``client``: of load.json; ``planned``: requests of the load."""
    rows = {int(row["index"]): row for row in samples.to_dict("records")}
    sent = {int(stamp["prompt"][-1]): stamp for stamp in stamps}
    lags, errors, shared, lost = [np.empty(0)], [np.empty(0)], 0, 0
    for index, stamp in sent.items():
        sends = np.asarray(stamp["sends"], dtype=np.float64) - zero
        row = rows.get(index)
        seen = np.asarray(row["chunk_times"] if row is not None else (), dtype=np.float64)
        lost += abs(len(sends) - len(seen))
        if len(seen) == len(sends):
            lags.append(seen - sends)
            errors.append(np.abs(np.diff(seen) - np.diff(sends)))
            shared += int(((np.diff(seen) == 0) & (np.diff(sends) > SENT_TOGETHER_S)).sum())
    lag, error = np.concatenate(lags), np.concatenate(errors)
    faulty = {i for i, stamp in sent.items() if stamp["fault"]}
    ok = {i for i, row in rows.items() if row["ok"]}
    late = [s - d for stamp in stamps for s, d in zip(stamp["sends"], stamp["due"], strict=True)]
    return Figures(
        events=sum(len(stamp["sends"]) for stamp in stamps),
        events_lost=lost,
        requests=len(sent),
        requests_lost=planned - len(rows.keys() & sent.keys()),
        requests_repeated=len(stamps) - len(sent),
        faults=len(faulty),
        faults_counted=len(faulty & ok),
        whole_failed=len((sent.keys() & rows.keys()) - faulty - ok),
        lag_p50_ms=percentile_ms(lag, 50),
        lag_p99_ms=percentile_ms(np.abs(lag), 99),
        itl_error_p99_ms=percentile_ms(error, 99),
        coalesced_share=shared / len(lag) if len(lag) else None,
        turnaround_p50_ms=client.get("turnaround_p50_ms"),
        cpu_us_per_event=client.get("cpu_us_per_chunk"),
        cpu_fraction=client.get("cpu_fraction"),
        loop_lag_p99_ms=client.get("loop_lag_p99_ms"),
        server_late_p99_ms=percentile_ms(late, 99),
        priority=str(client.get("priority")),
        unstamped_share=client.get("unstamped_share"),
    )
