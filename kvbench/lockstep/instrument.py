"""One load in engine time: its requests as the engine takes them, and its results as any other load's.

The files are those of a load over HTTP (requests.parquet, load.json, counters.json, done.json), and so are the metrics'
definitions. Their times are the engine's own: TTFT, TPOT, ITL and throughput are what the engine itself needs, without
HTTP and load client. ``clock: engine`` says so in load.json and done.json.

A load may be computed several times. Its steps are the same each time (``is_repeatable``), so each step takes its
median over the repetitions, all of them stretched to add up to the mean duration. An interruption from outside then
lowers throughput, but does not become a p95 of its own: with few requests it easily would. What the engine itself does
at the same step each time stays.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvbench.common.files import utc_now, write_atomically, write_json
from kvbench.common.records import write_record
from kvbench.load.completion import Completion
from kvbench.load.samples import SCHEMA, Sample
from kvbench.lockstep.process import EngineFailedError
from kvbench.lockstep.turns import STEP_COLUMNS, TurnTaker, take_turns
from kvbench.measure.instrument import Instrument, Job
from kvbench.metrics.definitions import ENGINE
from kvbench.metrics.latency import summarise
from kvbench.metrics.model import ClientFigures, LoadOutcome
from kvbench.requests.build import LoadDraw, build_requests
from kvbench.requests.request import RequestList, RequestSpec, distinct_prefixes, store_requests
from kvbench.runs.results import LoadResult
from kvbench.targets.prometheus import counter_changes, parse_metrics
from kvbench.workload.design import Cell, LoadPoint
from kvbench.workload.load_section import LoadConfig

_WARM_UP_USERS = 8  # of a load by arrivals


def is_repeatable(load: LoadConfig, point: LoadPoint) -> bool:
    """Tests whether an engine that gets these requests again computes the same steps again, however fast it is."""
    return point.mode == "closed" and load.ignore_eos and load.cache_state != "steady"


def users_of(point: LoadPoint) -> int:
    """The number of requests that a warm-up for this load holds at once."""
    return point.concurrency or _WARM_UP_USERS


def requests_of(
    load: LoadConfig, point: LoadPoint, *, vocab_size: int, max_model_len: int, seed: int, repeat: int, times: int = 1
) -> RequestList:
    """The requests of ``repeat`` (from 1): ``times`` draws, which no other repeat shares. Raises ValueError."""
    draws = []
    for part in range(1, times + 1):
        draw = LoadDraw(
            load, vocab_size=vocab_size, max_model_len=max_model_len, seed=seed, repeat=(repeat - 1) * times + part,
            concurrency=point.concurrency, rate=point.request_rate,
        )  # fmt: skip
        draws.append(build_requests(draw))
    drawn = (dataclasses.replace(request, index=i) for i, request in enumerate(itertools.chain(*draws)))
    return RequestList(drawn, draws[-1].notes)


def begin(engine: TurnTaker, load: LoadConfig, point: LoadPoint, requests: Sequence[RequestSpec], until: float) -> str:
    """Gives an engine the requests, its cache in the declared state; returns its metrics before, as Prometheus text."""
    sampling = {"temperature": load.temperature, "ignore_eos": load.ignore_eos}
    rows = [
        [r.prompt_token_ids, r.max_tokens, r.arrival_s, r.priority, *([r.answers] if r.answers else [])]
        for r in requests
    ]
    keep = load.cache_state == "steady"
    if load.cache_state == "primed" and (prefixes := distinct_prefixes(requests)):
        engine.load(requests=[[p, 1, None, 0] for p in prefixes], concurrency=1, keep_cache=False, **sampling)
        take_turns([engine], random.Random(0), 1, until)
        keep = True
    return engine.load(requests=rows, concurrency=point.concurrency, keep_cache=keep, **sampling)


@dataclass(frozen=True)
class Repetition:
    """A load as an engine computed it once.

    steps: float64 [steps, 4], see ``STEP_COLUMNS``; turns: how many of them each turn had; clock: engine time [s]
    rows: of each request, as the engine's ``result`` has them; metrics: after the load, as Prometheus text
    """

    steps: np.ndarray
    turns: Sequence[int]
    clock: float
    rows: Sequence[Sequence[Any]]
    metrics: str

    @classmethod
    def of(cls, engine: TurnTaker) -> Repetition:
        result = engine.process.ask(do="result", name=engine.name)
        try:
            rows, metrics = result["requests"], str(result["metrics"])
            tokens = sum(sum(row[3]) for row in rows)
        except (LookupError, TypeError) as error:
            text = f"its result is not as the protocol has it ({type(error).__name__}: {error})"
            raise EngineFailedError(text, engine.process) from None
        why = engine.why_hidden()
        if tokens != engine.output_tokens:
            why = f"its requests have {tokens} tokens, and its steps made {engine.output_tokens}"
        if why:
            raise EngineFailedError(why, engine.process)
        return cls(engine.table(), engine.turns, engine.clock, rows, metrics)


def typical(repetitions: Sequence[Repetition]) -> Sequence[Sequence[Any]]:
    """The rows of the requests, each step at its typical time; those of the median where the steps differ."""
    if any(not np.array_equal(repetition.steps[:, 1:4], repetitions[0].steps[:, 1:4]) for repetition in repetitions):
        return sorted(repetitions, key=lambda repetition: repetition.clock)[len(repetitions) // 2].rows
    seconds = np.array([repetition.steps[:, 0] for repetition in repetitions])
    median = np.median(seconds, axis=0)
    # a request is sent, and a token made, where a step ends
    was = np.append(0.0, np.cumsum(seconds[0]))
    now = np.append(0.0, np.cumsum(median)) * (seconds.sum(axis=1).mean() / median.sum())
    return [
        (*np.interp(row[:2], was, now).tolist(), np.interp(row[2], was, now).tolist(), *row[3:])
        for row in repetitions[0].rows
    ]


def store(
    out: Path,
    repetitions: Sequence[Repetition],
    load: LoadConfig,
    point: LoadPoint,
    requests: RequestList,
    metrics_before: str,
) -> LoadResult:
    """Writes the load's files into ``out`` and returns its result."""
    kept = repetitions[0].rows if len(repetitions) == 1 else typical(repetitions)
    rows = [result_row(spec, *row) for spec, row in zip(requests, kept, strict=True)]
    with write_atomically(out / "requests.parquet") as scratch:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), scratch)
    steps = []
    for number, repetition in enumerate(repetitions):
        turn = np.repeat(np.arange(len(repetition.turns)), repetition.turns)
        steps.append(pd.DataFrame(repetition.steps, columns=STEP_COLUMNS).assign(turn=turn, repetition=number))
    with write_atomically(out / "steps.parquet") as scratch:
        pd.concat(steps).to_parquet(scratch, index=False)
    clock = sum(repetition.clock for repetition in repetitions)
    outcome = LoadOutcome(
        clock=ENGINE,
        duration_s=clock / len(repetitions),
        repetitions=len(repetitions),
        mode=point.mode,
        concurrency=point.concurrency,
        request_rate=point.request_rate,
        num_requests=len(requests),
        notes=requests.notes,
        client=ClientFigures(),
    )
    write_record(out / "load.json", outcome)
    before, after = parse_metrics(metrics_before, 0.0), parse_metrics(repetitions[-1].metrics, clock)
    owned = after.owned_pages
    write_json(out / "counters.json", {**counter_changes(before, after), "pages_owned_after": owned})
    table = pd.DataFrame(rows)
    faults = [f"{owned:g} KV pages were still owned after the last request"] if owned else []
    faults += [f"{bad} of {len(rows)} requests did not end"] if (bad := int((~table["ok"]).sum())) else []
    return LoadResult(
        valid=not faults,
        invalid_reasons=tuple(faults),
        server_faults=tuple(faults),
        clock=ENGINE,
        metrics=summarise(table, outcome, load.slo.model_dump() if load.slo else None),
    )


class SteppedInstrument(Instrument):
    """An engine that takes turns with others, step by step, each under a load of its own (``compute``).

    ``draw``: the requests of a load, by its point and repeat; ``keeps_requests``: beside the results, as a sweep's.
    ``facts``: what done.json says beside the result.
    """

    clock = ENGINE
    disturbed_by_machine = False

    def __init__(
        self, job: Job, engine: TurnTaker, draw: Callable[[LoadPoint, int], RequestList], keeps_requests: bool = False
    ) -> None:
        super().__init__(job)
        self.engine, self.draw, self.keeps_requests = engine, draw, keeps_requests
        self.facts: dict[str, Any] = {}
        self.requests = RequestList(())
        self.repetitions: list[Repetition] = []
        self.metrics_before = self.started_at = ""
        self.began = 0.0

    @classmethod
    def why_not(cls, load: LoadConfig, requests: Sequence[RequestSpec]) -> str | None:
        """Returns why this load cannot be measured in engine time, None if it can."""
        if any(request.turn for request in requests):
            return "later turns of its conversations wait for the answers before them"
        if any(request.prompt_token_ids is None for request in requests):
            return "its prompts are texts, which the server turns into tokens"
        return "max_concurrency makes requests wait in the load client" if load.max_concurrency is not None else None

    def begin(self, point: LoadPoint, repeat: int) -> None:
        """Draws the requests of the load that is computed next."""
        self.requests, self.repetitions = self.draw(point, repeat), []
        self.started_at, self.began = utc_now(), time.monotonic()

    def run(self, cell: Cell, repeat: int, out: Path) -> LoadResult:
        """Stores what the engine has computed."""
        folder, stored = self.job.folder.path, dict[str, Any](self.facts)
        if self.keeps_requests:
            path, digest = store_requests(self.requests, folder / "requests", f"{cell.load.load_id}-{repeat}")
            stored |= {"requests_file": str(path.relative_to(folder)), "requests_sha256": digest}
        stored |= {"started_at": self.started_at, "ended_at": utc_now(), "wall_s": time.monotonic() - self.began}
        load = self.job.workload.load
        result = store(out, self.repetitions, load, cell.load, self.requests, self.metrics_before)
        return result.model_copy(update=stored)


def compute(
    instruments: Sequence[SteppedInstrument],
    point: LoadPoint,
    rng: random.Random,
    steps: int,
    until: float,
    on_begun: Callable[[], None] = lambda: None,
) -> None:
    """Lets every engine compute the load that it has begun, in turns of up to ``steps`` steps.

    ``until``: the end of its time [s, time.monotonic]; ``on_begun``: called once all engines have their requests.
    """
    for instrument in instruments:
        load, requests = instrument.job.workload.load, instrument.requests
        metrics = begin(instrument.engine, load, point, requests, until)
        if not instrument.repetitions:
            instrument.metrics_before = metrics
    on_begun()
    take_turns([instrument.engine for instrument in instruments], rng, steps, until)
    for instrument in instruments:
        instrument.repetitions.append(Repetition.of(instrument.engine))


def result_row(
    spec: RequestSpec,
    t0: float,
    ts: float,
    times: Sequence[float],
    tokens: Sequence[int],
    cached: int,
    finish_reason: str | None,
    token_ids: Sequence[int],
    sequences: Sequence[int] | None = None,
) -> Mapping[str, Any]:
    """A row of requests.parquet; the arguments as the engine's ``result`` has them (engine/lockstep.py). Times in s."""
    done = Completion(
        chunk_times=list(times),
        chunk_tokens=list(tokens),
        chunk_choices=list(sequences) if sequences is not None and spec.n > 1 else None,
        token_ids=list(token_ids),
        first=times[0] if times else None,
        first_output=times[0] if times else None,
        finish_reason=finish_reason,
        output_tokens=sum(tokens),
        cached_tokens=cached,
    )
    if finish_reason not in ("length", "stop"):
        done.fail("engine", f"finish_reason {finish_reason}")
    return Sample(spec, 0, t0, ts, times[-1] if times else ts, done).to_row(0.0)
