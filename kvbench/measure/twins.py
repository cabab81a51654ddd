"""Two servers under the same load at the same time, of which only one runs at any moment: the other is frozen.

A machine that changes its speed changes it for both: they take turns of a tenth of a second, in an order drawn anew for
each round. What the load clients clocked is then mapped to each server's own running time (metrics/running_time.py),
and judged as any other load.

Both are frozen until both clients have begun, so that both loads begin with the first turn. When one load has ended,
its server keeps its turns, idle: the other one's conditions stay what they were, it runs as often and comes back as
cold.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import read_json, write_atomically, write_json
from kvbench.common.freezer import Freezer
from kvbench.load.completion import Completion
from kvbench.load.samples import Sample
from kvbench.load.validity import client_report, invalid_reasons
from kvbench.measure.load import Driven, LoadSetup, PreparedLoad, prepare
from kvbench.metrics.running_time import TIMES, in_running_time, running_time
from kvbench.metrics.steady_window import steady_state
from kvbench.workload.design import LoadPoint
from kvbench.workload.load_section import LoadConfig
from kvbench.workload.prompts_section import Think

CLOCK = "running"
SLICE_S = 0.1  # turns of 50 ms were less precise in a trial
_SLACK_S = 60.0  # until both clients have begun, on a slow machine
_LOOK_S = 0.01
_CONNECT_S = 5.0  # then servers get turns though not all users are connected: a short listen queue may be full
_THINKS = "its users think by the wall clock, which goes on while a server is frozen"
_TIME_OUTS = ("timeout_s", "connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s")


@dataclass(frozen=True)
class TurnLength:
    """``slice_s``: how long a server runs in its turn; ``guard_s``: after the freeze, until the next turn begins.

    The guard is for what a device still computes of the work that was launched before, so it is part of the turn.
    """

    slice_s: float = SLICE_S
    guard_s: float = 0.0


@dataclass(frozen=True)
class Twin:
    """One server and its load, as ``measure_load`` takes them."""

    setup: LoadSetup
    freezer: Freezer
    point: LoadPoint
    requests: list[Any]
    requests_file: Path
    out: Path
    first: bool


class TwinsError(MeasurementError):
    """``errors``: why loads failed, by the twin's number. What the others were doing was given up for it."""

    def __init__(self, errors: Mapping[int, MeasurementError]) -> None:
        super().__init__("; ".join(map(str, errors.values())))
        self.errors = errors


class _AbandonedError(MeasurementError):
    """The other twin's load failed."""


def why_not_in_turns(load: LoadConfig) -> str | None:
    """Why this load cannot be measured in turns, None if it can."""
    if load.mode == "open":
        return "its requests arrive by the wall clock, which goes on while a server is frozen"
    if load.sessions is not None and load.sessions.think_s != Think.model_validate(0.0):
        return _THINKS
    return None


def measure_twins(twins: Sequence[Twin], rng: random.Random, length: TurnLength) -> list[dict[str, Any]]:
    """What ``measure_load`` returns for each twin, in its running time. ``rng``: draws the order of each round.

    Beside the usual files each ``out`` gets requests-wall.parquet and load-wall.json, as the client clocked them, and
    freezes.json. Raises TwinsError.
    """
    if any(request.think_s for twin in twins for request in twin.requests):  # as a trace may have it
        raise UsageError(f"servers cannot take turns under this load: {_THINKS}; measure it with --method launched")
    abandoned = threading.Event()
    prepared = [_tried(number, lambda t=twin: _prepare(t, len(twins), abandoned)) for number, twin in enumerate(twins)]
    turns = _Turns([twin.freezer for twin in twins], length)
    driven = _drive(prepared, turns, rng, abandoned)
    results = []
    for number, (twin, load, seen) in enumerate(zip(twins, prepared, driven, strict=True)):
        facts = to_running_time(twin.out, twin.requests, seen, turns.frozen[number])
        facts |= {**dataclasses.asdict(length), "freezer": twin.freezer.kind}
        judged = _tried(number, lambda load=load, seen=seen: load.judge(seen))
        results.append({"clock": CLOCK, "turns": facts, **judged})
    return results


def _tried(number: int, do: Callable[[], Any]) -> Any:
    try:
        return do()
    except MeasurementError as error:
        raise TwinsError({number: error}) from None


def _prepare(twin: Twin, twins: int, abandoned: threading.Event) -> PreparedLoad:
    check, load = twin.setup.check, twin.setup.load
    longer = {name: limit * twins + _SLACK_S for name in _TIME_OUTS if (limit := getattr(load, name)) is not None}

    def check_both() -> None:
        if abandoned.is_set():
            raise _AbandonedError("the other server's load failed")
        check()

    setup = dataclasses.replace(twin.setup, load=load.model_copy(update=longer), check=check_both)
    return prepare(setup, twin.point, twin.requests, twin.requests_file, twin.out, first=twin.first)


def _drive(
    prepared: Sequence[PreparedLoad], turns: _Turns, rng: random.Random, abandoned: threading.Event
) -> list[Driven]:
    """Drives all loads to their ends, in turns. Raises TwinsError; an interruption ends all of them."""
    begun: set[int] = set()
    asked = time.monotonic()

    def drive(number: int) -> Driven:
        return prepared[number].drive(lambda *_: None, lambda phase, pid: begun.add(number), all_ours=True)

    with ThreadPoolExecutor(len(prepared), "twin") as pool, turns:
        try:
            running: list[Future[Driven]] = [pool.submit(drive, number) for number in range(len(prepared))]
            while not all(each.done() for each in running):
                if any(each.done() and each.exception() for each in running):
                    break
                if len(begun) == len(prepared) or time.monotonic() > asked + _CONNECT_S:
                    turns.round(rng)
                else:
                    time.sleep(_LOOK_S)
        finally:
            abandoned.set()
    found = {number: error for number, each in enumerate(running) if (error := each.exception()) is not None}
    errors = {number: error for number, error in found.items() if isinstance(error, MeasurementError)}
    if others := [error for number, error in found.items() if number not in errors]:
        raise others[0]
    if own := {number: error for number, error in errors.items() if not isinstance(error, _AbandonedError)}:
        raise TwinsError(own)
    return [each.result() for each in running]


class _Turns:
    """Freezes all while the block lasts, but for turns. ``frozen``: by server, [freeze, thaw] [s, perf_counter]."""

    def __init__(self, freezers: Sequence[Freezer], length: TurnLength) -> None:
        self.freezers, self.length = freezers, length
        self.frozen: list[list[list[float]]] = [[] for _ in freezers]

    def __enter__(self) -> None:
        for number, freezer in enumerate(self.freezers):
            self.frozen[number].append([_tried(number, freezer.freeze), np.inf])

    def round(self, rng: random.Random) -> None:
        """One turn of each, in random order. A thaw is noted before it took place."""
        for number in rng.sample(range(len(self.freezers)), len(self.freezers)):
            freezer, frozen = self.freezers[number], self.frozen[number]
            frozen[-1][1] = time.perf_counter()
            freezer.thaw()
            time.sleep(self.length.slice_s)
            stopped = _tried(number, freezer.freeze)
            if self.length.guard_s:
                time.sleep(self.length.guard_s)
                stopped = time.perf_counter()
            frozen.append([stopped, np.inf])

    def __exit__(self, *exc: object) -> None:
        for freezer, frozen in zip(self.freezers, self.frozen, strict=True):
            now = time.perf_counter()
            freezer.thaw()
            if frozen:
                frozen[-1][1] = min(frozen[-1][1], now)


def to_running_time(
    out: Path, requests: Sequence[Any], driven: Driven, frozen: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Rewrites a load's files in its server's running time, and keeps them as they were beside it.

    ``frozen``: [freeze, thaw] [s, perf_counter]. Returns ``wall_s``, ``running_s`` and the number of ``slices``.
    """
    load = read_json(out / "load.json")
    zero = float(load["zero_perf_counter"])
    apart = np.array([each for each in frozen if each[1] > each[0]], dtype=float).reshape(-1, 2) - zero
    (out / "load.json").rename(out / "load-wall.json")
    (out / "requests.parquet").rename(out / "requests-wall.parquet")
    table = pq.read_table(out / "requests-wall.parquet")
    rows = in_running_time(table.to_pandas(), apart)
    for name in TIMES:
        place, field = table.schema.get_field_index(name), table.schema.field(name)
        table = table.set_column(place, field, pa.array(rows[name], field.type, from_pandas=True))
    with write_atomically(out / "requests.parquet") as scratch:
        pq.write_table(table, scratch)
    wall_s = float(load["duration_s"])
    running_s = float(running_time(np.array([wall_s]), apart)[0])
    write_json(out / "load.json", _load_in_running_time(load, rows, requests, running_s))
    driven.poller.samples[:] = [
        dataclasses.replace(each, at=zero + float(running_time(np.array([each.at - zero]), apart)[0]))
        for each in driven.poller.samples
    ]
    slices = int(((apart[:, 1] > 0) & (apart[:, 1] < wall_s)).sum())
    facts = {"wall_s": wall_s, "running_s": running_s, "slices": slices}
    write_json(out / "freezes.json", {**facts, "zero_perf_counter": zero, "frozen": apart.tolist()})
    return facts


def _load_in_running_time(
    load: Mapping[str, Any], rows: pd.DataFrame, requests: Sequence[Any], running_s: float
) -> dict[str, Any]:
    """load.json in running time; the client, too, is held to what it did while its server ran."""
    samples = [_sample(row, requests) for row in rows.itertuples(index=False)]
    raw = dict(load["client"])
    stamped = raw["lag_source"] == "kernel stamps"
    client = client_report(samples, (), float(raw["cpu_s"]), running_s, load["mode"], stamped)
    own = {"cpu_us_per_chunk", *(name for name in client if name.startswith("loop_lag"))}  # have no part in the mapping
    own |= {name for name in client if name.startswith("lag")} if raw["lag_source"] == "loop probe" else set()
    client = raw | {name: value for name, value in client.items() if name not in own}
    if raw.get("processes") and raw["cpu_fraction"] is not None:  # that of the busiest one
        client["cpu_fraction"] = raw["cpu_fraction"] * float(load["duration_s"]) / running_s
    others = [each for each in load["invalid_reasons"] if each not in invalid_reasons(raw, 0)]
    moments = (rows[name].to_numpy(dtype=float) for name in ("t0", "ts", "end"))
    window = steady_state(*moments, load, [each.session for each in requests]).window or (None, None)
    return {
        **load,
        "clock": CLOCK,
        "duration_s": running_s,
        "client": client,
        "invalid_reasons": invalid_reasons(client, 0) + others,
        "target_start_s": window[0],
        "target_end_s": window[1],
    }


def _sample(row: Any, requests: Sequence[Any]) -> Sample:
    """A row of requests.parquet, as far as ``client_report`` looks at it."""
    completion = Completion(
        chunk_times=list(row.chunk_times),
        chunk_choices=None if row.chunk_choices is None else list(row.chunk_choices),
        sent_times=[] if row.sent_times is None else list(row.sent_times),
        coalesced=int(row.coalesced),
        prompt_tokens=None if row.prompt_tokens is None else int(row.prompt_tokens),
        error_kind=None if row.ok else row.error_kind,
    )
    return Sample(requests[row.index], row.user, row.t0, row.ts, row.end, completion)
