"""A measured serving run as the simulator repeats it: from request times of vLLM, or of `kvbench load`.

A folder has requests.jsonl, one request a line (input_toks, output_toks, queued_ts, first_token_ts, last_token_ts [s];
scheduled_ts and arrival_time [s] may be missing), and may have meta.json (model, engine_kwargs, kv_cache), config.json
(the hardware) and timeseries.csv (t [s], running, kv_cache_pct). Or it has the requests.parquet of `kvbench load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.kv.budget import PAGE_TABLE_ENTRY_BYTES
from engine.sequence import Sequence as EngineSequence
from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
from kvbench.common.schema import explain
from kvbench.requests.request import RequestSpec
from kvbench.simulation.drive import Drive, Ended
from kvbench.simulation.machine import Machine
from kvbench.simulation.replica import Replica

_TAKEN = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_dtype")  # of vLLM's arguments
_TOKEN_IDS = 1 << 13  # of made-up prompts; fewer than any vocabulary has
_SERIES = ("t", "running", "kv_cache_pct")


@dataclass(frozen=True)
class MeasuredRun:
    """``requests``: lengths and arrivals [s]. Of each in their order, in seconds:

    ttft: from when the engine saw it, or with ``from_arrival`` from its arrival, to its first token
    tpot: mean time between its tokens
    prefill: from when it was scheduled first to its first token; None: not known
    slots: tokens of KV that the engine had; None: what the device leaves
    series: columns t, running, kv_cache_pct; empty where it is not known
    device, model, gpus: as the run states them, None where it does not
    """

    name: str
    engine: str
    settings: Mapping[str, Any]
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
    """Of each request in their order as in ``MeasuredRun``; ``series``: after each step, columns as there.

    seconds: GPU and host time by class; notes: what a reader must know
    """

    ttft: np.ndarray
    tpot: np.ndarray
    prefill: np.ndarray
    series: pd.DataFrame
    preemptions: int
    seconds: Mapping[str, float]
    notes: Sequence[str]


class _Row(BaseModel):
    """One line of requests.jsonl."""

    model_config = ConfigDict(allow_inf_nan=False)
    input_toks: int = Field(gt=0)
    output_toks: int = Field(gt=0)
    queued_ts: float
    first_token_ts: float
    last_token_ts: float
    scheduled_ts: float | None = None
    arrival_time: float | None = None


def read_measured_run(folder: Path) -> MeasuredRun:
    """Raises UsageError for a folder that holds no such run."""
    if (folder / "requests.jsonl").is_file():
        return _read_vllm(folder)
    if (folder / "requests.parquet").is_file():
        return _read_own(folder)
    raise UsageError(f"{folder} has neither requests.jsonl nor requests.parquet: give the folder of a measured run")


def _read_vllm(folder: Path) -> MeasuredRun:
    rows = list(_lines(folder / "requests.jsonl"))
    meta = _json(folder / "meta.json")
    kwargs, cache = meta.get("engine_kwargs") or {}, meta.get("kv_cache") or {}
    settings = {name: kwargs[name] for name in _TAKEN if kwargs.get(name) is not None}
    settings["enable_prefix_caching"] = bool(cache.get("enable_prefix_caching", True))  # vLLM's default
    if cache.get("block_size"):
        settings["page_size"] = cache["block_size"]
    scheduled = [row.scheduled_ts for row in rows]
    version = meta.get("vllm_version")
    return MeasuredRun(
        name="/".join(folder.resolve().parts[-2:]),
        engine=f"vLLM {version}" if version else "vLLM",
        settings=settings,
        requests=_specs(rows, _arrivals(rows)),
        ttft=np.array([row.first_token_ts - row.queued_ts for row in rows]),
        tpot=_tpot([(row.first_token_ts, row.last_token_ts, row.output_toks) for row in rows]),
        prefill=None if None in scheduled else np.array([r.first_token_ts - r.scheduled_ts for r in rows]),
        slots=cache.get("num_kv_tokens"),
        series=_series(folder / "timeseries.csv"),
        device=_hardware(folder / "config.json"),
        model=meta.get("model"),
        gpus=kwargs.get("tensor_parallel_size"),
    )


def _lines(path: Path) -> Iterable[_Row]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield _Row.model_validate_json(line)
        except ValidationError as error:
            raise UsageError(f"{path}, line {number}: {explain(error, '')[0]}") from None


def _arrivals(rows: Sequence[_Row]) -> list[float]:
    """When the requests reached the engine; its own stamp is only made between two of its steps."""
    if all(row.arrival_time is not None for row in rows):
        return [float(row.arrival_time or 0.0) for row in rows]
    return [row.queued_ts for row in rows]


def _specs(rows: Sequence[_Row], arrivals: Sequence[float]) -> list[RequestSpec]:
    """With prompts that share nothing: their texts are not known."""
    began, specs = min(arrivals, default=0.0), []
    for index, (row, at) in enumerate(zip(rows, arrivals, strict=True)):
        ids = tuple(np.random.default_rng(index).integers(0, _TOKEN_IDS, row.input_toks).tolist())
        specs.append(RequestSpec(index, "measured", ids, None, row.output_toks, arrival_s=at - began))
    return specs


def _tpot(times: Iterable[tuple[float, float, int]]) -> np.ndarray:
    return np.array([(last - first) / (tokens - 1) if tokens > 1 else np.nan for first, last, tokens in times])


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _hardware(path: Path) -> str | None:
    """Of the first engine in a cluster's config.json."""
    for node in _json(path).get("nodes") or ():
        for instance in node.get("instances") or ():
            return instance.get("hardware")
    return None


def _series(path: Path) -> pd.DataFrame:
    if not path.is_file():
        return pd.DataFrame(columns=list(_SERIES))
    try:
        frame = pd.read_csv(path)
    except ValueError as error:
        raise UsageError(f"{path} is no table: {error}") from None
    return frame[[name for name in _SERIES if name in frame]]


def _read_own(folder: Path) -> MeasuredRun:
    frame = pd.read_parquet(folder / "requests.parquet")
    needed = ("t0", "prompt_tokens", "output_tokens", "chunk_times")
    if missing := [name for name in needed if name not in frame]:
        raise UsageError(f"{folder / 'requests.parquet'} has no column {', '.join(missing)}")
    frame = frame[(frame["chunk_times"].map(len) > 0) & (frame["output_tokens"] > 0)].sort_values("t0")
    if frame.empty:
        raise UsageError(f"{folder / 'requests.parquet'} has no request with tokens")
    rows = [
        _Row(
            input_toks=int(row.prompt_tokens), output_toks=int(row.output_tokens), queued_ts=float(row.t0),
            first_token_ts=float(row.chunk_times[0]), last_token_ts=float(row.chunk_times[-1]),
        )
        for row in frame.itertuples()
    ]  # fmt: skip
    return MeasuredRun(
        name="/".join(folder.resolve().parts[-2:]),
        engine="a server that `kvbench load` measured",
        settings={},
        requests=_specs(rows, [row.queued_ts for row in rows]),
        ttft=np.array([row.first_token_ts - row.queued_ts for row in rows]),
        tpot=_tpot([(row.first_token_ts, row.last_token_ts, row.output_toks) for row in rows]),
        from_arrival=True,
    )


class _Observed(Replica):
    """Keeps when the engine saw each request, and its sequence."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: dict[int, tuple[float, EngineSequence]] = {}

    def add(self, request_id: str, spec: RequestSpec, at: float) -> EngineSequence:
        sequence = super().add(request_id, spec, at)
        self.seen[spec.index] = (max(at, self.clock.now), sequence)
        return sequence


def predict(run: MeasuredRun, machine: Machine) -> RunPrediction:
    """The run again, simulated on ``machine``. Raises UsageError where it cannot be, or the model does not fit."""
    settings = dict(run.settings)
    if run.slots is not None:
        settings["kv_budget"] = _budget(run, machine)
    config, capacity = machine.settle(settings)
    cost = machine.step_timer(config)
    replica = _Observed(config, capacity, machine.vocab_size, cost)
    ended: dict[int, Ended] = {}
    series: list[tuple[float, int, float]] = []

    def after(replica: Replica, _: Any) -> None:
        kv = replica.engine.kv.stats()
        share = 100 * kv.slots_reserved / kv.slots_total
        series.append((replica.clock.now, len(replica.engine.scheduler.running), share))

    load = sorted(run.requests, key=lambda spec: spec.arrival_s or 0.0)
    Drive([replica], [[spec] for spec in load], lambda end: ended.__setitem__(end.spec.index, end), on_step=after).run()
    if refused := [end.error for end in ended.values() if end.error]:
        raise UsageError(f"{run.name} cannot be repeated on this machine: {refused[0]}")
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


def _budget(run: MeasuredRun, machine: Machine) -> int:
    """Bytes that hold as many tokens as the measured engine did."""
    config, _ = machine.settle(run.settings)
    assert config.max_model_len is not None and run.slots is not None
    table = config.max_num_seqs * -(-config.max_model_len // config.page_size) * PAGE_TABLE_ENTRY_BYTES
    return run.slots * machine.kv_shape().slot_bytes(config.kv_cache_dtype) + table


def series_errors(run: MeasuredRun, predicted: RunPrediction) -> dict[str, float]:
    """Mean absolute distance of predicted and measured ``running`` and ``kv_cache_pct``, each over the measured times.

    A column that was not measured, or is 0 throughout, is left out.
    """
    found = {}
    for name in _SERIES[1:]:
        if name in run.series and run.series[name].any():
            at = predicted_at(predicted, run.series["t"].to_numpy(), name)
            found[name] = float(np.abs(at - run.series[name].to_numpy()).mean())
    return found


def predicted_at(predicted: RunPrediction, times: np.ndarray, column: str) -> np.ndarray:
    """The predicted ``running`` or ``kv_cache_pct`` at each of ``times`` [s since the first arrival]."""
    known = predicted.series
    index = np.searchsorted(known["t"].to_numpy(), times, side="right") - 1
    values = known[column].to_numpy(dtype=float)
    return np.where(index < 0, 0.0, values[np.maximum(index, 0)])


def machine_for(run: MeasuredRun, device: str | None, model: str | None, gpus: int | None) -> tuple[str, str, int]:
    """Device, model and GPUs of a run: as given, else as it states. Raises UsageError where neither says."""
    for name, value in (("device", device or run.device), ("model", model or run.model)):
        if not value:
            raise UsageError(f"{run.name} does not say on which {name} it ran: give --{name}")
    for name, given, stated in (("device", device, run.device), ("model", model, run.model)):
        if given and stated and not _same_name(given, stated):
            raise UsageError(f"{run.name} ran on the {name} {stated}, and --{name} is {given}: leave it out")
    return str(device or run.device), str(model or run.model), gpus or run.gpus or 1


def _same_name(given: str, stated: str) -> bool:
    plain = [name.rsplit("/", 1)[-1].lower().replace("-", "").replace(" ", "") for name in (given, stated)]
    return plain[0] in plain[1] or plain[1] in plain[0]
