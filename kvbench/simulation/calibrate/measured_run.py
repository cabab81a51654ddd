"""A measured serving run that the simulator repeats: from request times of vLLM, or of `kvbench load`.

A folder has requests.jsonl, one request a line (input_toks, output_toks, queued_ts, first_token_ts, last_token_ts [s];
scheduled_ts and arrival_time [s] may be missing), and may have meta.json (model, engine_kwargs, kv_cache), config.json
(the hardware) and timeseries.csv (t [s], running, kv_cache_pct). Or it has the requests.parquet of `kvbench load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
from kvbench.common.schema import explain
from kvbench.metrics.rows import sequence_tpots
from kvbench.requests.request import RequestSpec
from kvbench.simulation.cost.machine import Machine, SettingsByName
from kvbench.simulation.cost.tables import plain_name
from kvbench.simulation.fleet.drive import Drive, EndedRequest, Replica
from kvbench.simulation.wording import sentence
from kvbench_engine.sequence import Sequence as EngineSequence

_TOKEN_IDS = 1 << 13  # of made-up prompts; fewer than any vocabulary has
_SERIES = ("t", "running", "kv_cache_pct")


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run; ``requests``: lengths and arrivals [s]. Of each in their order, in seconds:

    ttft: from when the engine saw it, or with ``from_arrival`` from its arrival, to its first token
    tpot: mean time between its tokens
    prefill: from when it was scheduled first to its first token; None: not known
    slots: tokens of KV that the engine had; None: what the device leaves
    series: columns t, running, kv_cache_pct; empty where it is not known
    device, model, gpus: as the run states them, None where it does not
    """

    name: str
    engine: str
    settings: SettingsByName
    requests: Sequence[RequestSpec]
    ttft: np.ndarray
    tpot: np.ndarray
    from_arrival: bool = False
    prefill: np.ndarray | None = None
    slots: int | None = None
    series: pd.DataFrame = field(default_factory=pd.DataFrame)
    device: str | None = None
    model: str | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class RunPrediction:
    """The figures of each request as in ``MeasuredRun``; series: after each step; seconds: by class of operator."""

    ttft: np.ndarray
    tpot: np.ndarray
    prefill: np.ndarray
    series: pd.DataFrame
    preemptions: int
    seconds: Mapping[str, float]
    notes: list[str]


class _RequestTimes(BaseModel):
    """A line of requests.jsonl."""

    model_config = ConfigDict(allow_inf_nan=False)
    input_toks: int = Field(gt=0)
    output_toks: int = Field(gt=0)
    queued_ts: float
    first_token_ts: float
    last_token_ts: float
    scheduled_ts: float | None = None
    arrival_time: float | None = None


def _at(*path: str | int) -> Any:
    """A field that may be missing, at this path of a JSON file."""
    return Field(default=None, validation_alias=AliasPath(*path))


class _Arguments(BaseModel):
    """Arguments of vLLM that the built-in engine has too, from meta.json."""

    max_num_seqs: Any = _at("engine_kwargs", "max_num_seqs")
    max_num_batched_tokens: Any = _at("engine_kwargs", "max_num_batched_tokens")
    max_model_len: Any = _at("engine_kwargs", "max_model_len")
    kv_cache_dtype: Any = _at("engine_kwargs", "kv_cache_dtype")
    enable_prefix_caching: bool | None = Field(True, validation_alias=AliasPath("kv_cache", "enable_prefix_caching"))
    page_size: int | None = _at("kv_cache", "block_size")


class _Meta(BaseModel):
    """The rest of meta.json, and config.json of the hardware (of the first engine in a cluster)."""

    model: str | None = None
    version: str | None = _at("vllm_version")
    slots: int | None = _at("kv_cache", "num_kv_tokens")
    gpus: int | None = _at("engine_kwargs", "tensor_parallel_size")
    device: str | None = _at("nodes", 0, "instances", 0, "hardware")


File = TypeVar("File", bound=BaseModel)


def read_measured_run(folder: Path) -> MeasuredRun:
    """Reads a run. Raises UsageError for a folder that holds none."""
    if (folder / "requests.jsonl").is_file():
        return _read_vllm(folder)
    if (folder / "requests.parquet").is_file():
        return _read_own(folder)
    raise UsageError(sentence("measured_run.none", folder=folder))


def _read_vllm(folder: Path) -> MeasuredRun:
    rows, path = [], folder / "requests.jsonl"
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append(_RequestTimes.model_validate_json(line))
            except ValidationError as error:
                why = explain(error, "")[0]
                raise UsageError(sentence("measured_run.line", path=path, number=number, why=why)) from None
    series = pd.DataFrame(columns=list(_SERIES))
    if (path := folder / "timeseries.csv").is_file():
        try:
            series = pd.read_csv(path)
        except ValueError as error:
            raise UsageError(sentence("measured_run.no_table", path=path, error=error)) from None
    arguments, meta = (_read_file(folder / "meta.json", model) for model in (_Arguments, _Meta))
    scheduled = [row.first_token_ts - row.scheduled_ts for row in rows if row.scheduled_ts is not None]
    arrivals = [row.arrival_time for row in rows if row.arrival_time is not None]
    if len(arrivals) < len(rows):
        arrivals = [row.queued_ts for row in rows]  # the engine's own stamp, which is only made between two steps
    return _measured(
        folder,
        rows,
        arrivals,
        engine=f"vLLM {meta.version}" if meta.version else "vLLM",
        settings=arguments.model_dump(exclude_none=True),
        prefill=np.array(scheduled) if len(scheduled) == len(rows) else None,
        slots=meta.slots,
        series=series[[name for name in _SERIES if name in series]],
        device=_read_file(folder / "config.json", _Meta).device,
        model=meta.model,
        gpus=meta.gpus,
    )


def _measured(folder: Path, rows: Sequence[_RequestTimes], arrivals: Sequence[float], **more: Any) -> MeasuredRun:
    """Makes a run of these requests. Their prompts share nothing, since their texts are not known."""
    began, specs = min(arrivals, default=0.0), []
    for index, (row, at) in enumerate(zip(rows, arrivals, strict=True)):
        ids = tuple(np.random.default_rng(index).integers(0, _TOKEN_IDS, row.input_toks).tolist())
        specs.append(RequestSpec(index, "measured", ids, None, row.output_toks, arrival_s=at - began))
    return MeasuredRun(
        name="/".join(folder.resolve().parts[-2:]),
        requests=specs,
        ttft=np.array([row.first_token_ts - row.queued_ts for row in rows]),
        tpot=_tpot((row.first_token_ts, row.last_token_ts, row.output_toks) for row in rows),
        **more,
    )


def _tpot(times: Iterable[tuple[float, float, int]]) -> np.ndarray:
    """Computes the time per output token [s] of requests from their first and last token and their tokens."""
    return np.array([sequence_tpots((first, last), None, None, tokens)[0] for first, last, tokens in times])


def _read_file(path: Path, model: type[File]) -> File:
    """Reads a file that may be missing. Raises UsageError."""
    try:
        return model.model_validate(read_json(path) if path.is_file() else {})
    except ValidationError as error:
        raise UsageError(sentence("measured_run.damaged", path=path, why=explain(error, "")[0])) from None


def _read_own(folder: Path) -> MeasuredRun:
    frame = pd.read_parquet(path := folder / "requests.parquet")
    needed = ("t0", "prompt_tokens", "output_tokens", "chunk_times")
    if missing := [name for name in needed if name not in frame]:
        raise UsageError(sentence("measured_run.no_columns", path=path, columns=", ".join(missing)))
    frame = frame[(frame["chunk_times"].map(len) > 0) & (frame["output_tokens"] > 0)].sort_values("t0")
    if frame.empty:
        raise UsageError(sentence("measured_run.empty", path=path))
    columns = (frame[name].tolist() for name in needed)
    rows = [
        _RequestTimes(
            input_toks=prompt, output_toks=output, queued_ts=t0, first_token_ts=times[0], last_token_ts=times[-1]
        )
        for t0, prompt, output, times in zip(*columns, strict=True)
    ]
    arrivals = [row.queued_ts for row in rows]
    engine = "a server that `kvbench load` measured"
    return _measured(folder, rows, arrivals, engine=engine, settings={}, from_arrival=True)


class _Observed(Replica):
    """Keeps when the engine saw each request, and its sequence."""

    seen: dict[int, tuple[float, EngineSequence]]

    def add(self, request_id: str, spec: RequestSpec, at: float) -> EngineSequence:
        sequence = super().add(request_id, spec, at)
        self.seen[spec.index] = (max(at, self.clock.now), sequence)
        return sequence


def predict(run: MeasuredRun, machine: Machine) -> RunPrediction:
    """Simulates the run again on ``machine``. Raises UsageError where it cannot be, or the model does not fit."""
    config, capacity = machine.settle(run.settings)
    if run.slots is not None:  # the bytes that hold as many tokens as the measured engine did
        slots = int(run.slots * capacity.slots_per_token)
        budget = slots * capacity.bytes_per_slot + capacity.page_table_bytes
        config, capacity = machine.settle({**run.settings, "kv_budget": budget})
    cost = machine.step_timer(config)
    replica = _Observed(config, capacity, machine.vocab_size, cost)
    replica.seen = {}
    ended: dict[int, EndedRequest] = {}
    series: list[tuple[float, int, float]] = []

    def after(replica: Replica, _: Any) -> None:
        kv = replica.engine.kv.stats()
        share = 100 * kv.slots_reserved / kv.slots_total
        series.append((replica.clock.now, len(replica.engine.scheduler.running), share))

    load = sorted(run.requests, key=lambda spec: spec.arrival_s or 0.0)
    Drive([replica], [[spec] for spec in load], lambda end: ended.__setitem__(end.spec.index, end), on_step=after).run()
    if refused := [end.error for end in ended.values() if end.error]:
        raise UsageError(sentence("measured_run.not_repeated", run=run.name, why=refused[0]))
    order = [spec.index for spec in run.requests]
    first = np.array([ended[i].times[0] for i in order])
    began = [ended[i].due if run.from_arrival else replica.seen[i][0] for i in order]
    return RunPrediction(
        ttft=first - np.array(began),
        tpot=_tpot((ended[i].times[0], ended[i].times[-1], len(ended[i].times)) for i in order),
        prefill=first - np.array([replica.seen[i][1].first_scheduled for i in order]),
        series=pd.DataFrame(series, columns=list(_SERIES)),
        preemptions=replica.engine.stats().num_preemptions,
        seconds=dict(cost.seconds),
        notes=cost.notes(),
    )


def series_errors(run: MeasuredRun, predicted: RunPrediction) -> dict[str, float]:
    """Computes the mean distance of predicted and measured ``running`` and ``kv_cache_pct`` over the measured times.

    A column that was not measured, or is 0 throughout, is left out.
    """
    distances = {}
    for name in _SERIES[1:]:
        if name in run.series and run.series[name].any():
            values = predicted_at(predicted, run.series["t"].to_numpy(), name)
            distances[name] = float(np.abs(values - run.series[name].to_numpy()).mean())
    return distances


def predicted_at(predicted: RunPrediction, times: np.ndarray, column: str) -> np.ndarray:
    """Returns the predicted ``running`` or ``kv_cache_pct`` at each of ``times`` [s since the first arrival]."""
    index = np.searchsorted(predicted.series["t"].to_numpy(), times, side="right") - 1
    values = predicted.series[column].to_numpy(dtype=float)
    return np.where(index < 0, 0.0, values[np.maximum(index, 0)])


def machine_for(run: MeasuredRun, device: str | None, model: str | None, gpus: int | None) -> tuple[str, str, int]:
    """Names device, model and GPUs of a run: as given, else as it states. Raises UsageError where neither says."""
    for name, given, stated in (("device", device, run.device), ("model", model, run.model)):
        if not given and not stated:
            raise UsageError(sentence("measured_run.unknown", run=run.name, name=name))
        plain = [plain_name(word) for word in (given, stated) if word]
        if len(plain) == 2 and plain[0] not in plain[1] and plain[1] not in plain[0]:
            words = {"name": name, "stated": stated, "given": given}
            raise UsageError(sentence("measured_run.contradicted", run=run.name, **words))
    return str(device or run.device), str(model or run.model), gpus or run.gpus or 1
