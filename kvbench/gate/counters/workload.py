"""The counter gate's workload file: which engines are replayed, and which requests reach them at which step.

    streams      waves of requests by step number; lengths are drawn once, from the file's seed
    scenarios    a stream, and the engines that get it: the full cross of each row of ``matrix``

All lengths, tokens and arrivals follow from the file, so its digest shows whether two replays may be compared.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from kvbench.common.errors import UsageError
from kvbench.common.packages import find_file
from kvbench.common.schema import StrictModel, explain
from kvbench.workload.file import read_yaml
from kvbench.workload.settings import config_id_of
from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.null_executor import mixed, name_number
from kvbench_engine.kv.budget import KVCapacity, capacity_of
from kvbench_engine.model.spec import find_model
from kvbench_engine.sequence import Request, SamplingParams

_PROMPT, _OUTPUT, _OWN, _SHARED = range(4)  # what a number is drawn for


class SharedStart(StrictModel):
    """The first ``tokens`` of a prompt, the same for every request of the file that draws the same member."""

    family: str = Field(min_length=1)
    tokens: int = Field(ge=1, le=100_000)
    members: int = Field(default=1, ge=1, le=10_000)  # request i has member i modulo this


class Wave(StrictModel):
    """A wave of ``count`` requests: the first at step ``start``, then one ``every`` so many steps (0: all at once).

    ``prompt`` and ``output``: tokens, one number or [low, high]; ``prefix`` is added to ``prompt``. ``abort_after``:
    steps from arrival to abort; ``abort_index``: abort only this one of the ``n`` sequences.
    """

    count: int = Field(default=1, ge=1, le=10_000)
    start: int = Field(default=1, ge=1, le=1_000_000)
    every: int = Field(default=1, ge=0, le=100_000)
    prompt: tuple[int, int]
    output: tuple[int, int]
    prefix: SharedStart | None = None
    n: int = Field(default=1, ge=1)
    best_of: int | None = None
    beam_width: int | None = None
    priority: int = Field(default=0, ge=0)
    cache_salt: str | None = None
    ignore_eos: bool = True
    abort_after: int | None = Field(default=None, ge=1)
    abort_index: int | None = Field(default=None, ge=0)

    @field_validator("prompt", "output", mode="before")
    @classmethod
    def _span(cls, value: Any) -> tuple[int, int]:
        span = list(value) if isinstance(value, list | tuple) else [value, value]
        if len(span) != 2 or not all(isinstance(length, int) and not isinstance(length, bool) for length in span):
            raise ValueError(f"{value!r} is not a length; write a whole number of tokens or [low, high].")
        if not 1 <= span[0] <= span[1]:
            raise ValueError(f"{span} is not a range of lengths; write [low, high] with 1 <= low <= high.")
        return span[0], span[1]

    @model_validator(mode="after")
    def _of_something(self) -> Wave:
        if self.abort_index is not None and self.abort_after is None:
            raise ValueError(f"abort_index {self.abort_index} needs abort_after; say how many steps after its arrival.")
        return self


class ScenarioGroup(StrictModel):
    """A stream on many engines. ``engine``: settings of all; ``matrix``: rows whose lists are crossed."""

    stream: str
    engine: dict[str, Any] = Field(default_factory=dict)
    matrix: list[dict[str, list[Any]]] = Field(min_length=1)

    @field_validator("matrix")
    @classmethod
    def _filled(cls, rows: list[dict[str, list[Any]]]) -> list[dict[str, list[Any]]]:
        if empty := [key for row in rows for key, values in row.items() if not values]:
            raise ValueError(f"{empty[0]} is an empty list; give at least one value or remove the line.")
        return rows


class CounterFile(StrictModel):
    """The whole file. ``swap_space`` applies to the engines that swap: the others refuse it."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    vocab_size: int = Field(default=1024, ge=2, le=2**31)
    num_eos: int = Field(default=1, ge=0)
    engine: dict[str, Any] = Field(default_factory=dict)
    swap_space: str | int | None = None
    streams: dict[str, list[Wave]] = Field(min_length=1)
    scenarios: dict[str, ScenarioGroup] = Field(min_length=1)

    @model_validator(mode="after")
    def _known_streams(self) -> CounterFile:
        for name, group in self.scenarios.items():
            if group.stream not in self.streams:
                raise ValueError(
                    f"scenarios.{name}.stream {group.stream!r} is none of the streams {', '.join(self.streams)}."
                )
        return self


@dataclass(frozen=True)
class Arrival:
    """A request that is added before step ``step`` and, if ``abort_step`` is set, aborted before that one."""

    step: int
    request: Request
    abort_step: int | None
    abort_index: int | None


@dataclass(frozen=True)
class Scenario:
    """An engine and its requests. ``digest``: of everything that the counters depend on but the code."""

    name: str
    config: EngineConfig
    capacity: KVCapacity
    arrivals: tuple[Arrival, ...]
    seed: int
    vocab_size: int
    num_eos: int
    digest: str


@dataclass(frozen=True)
class CounterWorkload:
    """A counter workload. ``digest``: of the file's contents without comments. ``names``: of all its scenarios."""

    path: Path
    name: str
    digest: str
    scenarios: tuple[Scenario, ...]
    names: tuple[str, ...]


def read_counter_workload(path: Path) -> CounterWorkload:
    """Reads a counter workload. Raises UsageError with one sentence for each mistake in the file."""
    path = find_file(path)
    data = read_yaml(path)
    if "load" in data:
        raise UsageError(
            f"{path} has a load and no streams: it is made for `kvbench sweep`; give a workload such as "
            "workloads/ci_counters.yaml"
        )
    try:
        file = CounterFile.model_validate(data)
    except ValidationError as error:
        raise UsageError("\n".join(f"{path}: {sentence}" for sentence in explain(error, ""))) from None
    scenarios = tuple(_scenarios(path, file))
    names = tuple(scenario.name for scenario in scenarios)
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{path}: two rows of a matrix give the same scenario {double!r}: remove one of them")
    digest = _digest(file.model_dump(mode="json", exclude={"description"}))
    return CounterWorkload(path, file.name, digest, scenarios, names)


def _scenarios(path: Path, file: CounterFile) -> Iterator[Scenario]:
    streams = {name: _arrivals(file, waves) for name, waves in file.streams.items()}
    for group_name, group in file.scenarios.items():
        for keys, values in ((row, values) for row in group.matrix for values in itertools.product(*row.values())):
            varied = dict(zip(keys, values, strict=True))
            settings = {"device": "cpu", "async_scheduling": False, **file.engine, **group.engine, **varied}
            if settings.get("preemption_mode") == "swap" and file.swap_space is not None:
                settings.setdefault("swap_space", file.swap_space)
            name = f"{group_name}/{config_id_of(settings, varied)}"
            waves = [wave.model_dump(mode="json") for wave in file.streams[group.stream]]
            try:
                config, capacity = _engine(settings)
            except ValueError as error:
                raise UsageError(f"{path}: scenario {name}: {error}") from None
            drawn = (file.seed, file.vocab_size, file.num_eos)
            digest = _digest([settings, waves, *drawn])[:16]
            yield Scenario(name, config, capacity, streams[group.stream], *drawn, digest)


def _engine(settings: Mapping[str, Any]) -> tuple[EngineConfig, KVCapacity]:
    """The engine's checked settings and its capacity. Raises ValueError."""
    config = EngineConfig.from_mapping(settings)
    spec = find_model(config.model, "dummy")
    config = config.check_against_model(spec.max_positions)
    if config.kv_budget is None:
        raise ValueError("kv_budget is missing: without a tight one nothing is ever preempted")
    return config, capacity_of(config, spec.kv_shape(spec.default_dtype, config.latent_kv), config.kv_budget)


def _arrivals(file: CounterFile, waves: list[Wave]) -> tuple[Arrival, ...]:
    """Sorts the arrivals by step; those of one step stay in the order of the file."""
    arrivals = [_arrival(file, wave, number, i) for number, wave in enumerate(waves) for i in range(wave.count)]
    return tuple(sorted(arrivals, key=lambda arrival: arrival.step))


def _arrival(file: CounterFile, wave: Wave, number: int, index: int) -> Arrival:
    """Request ``index`` of wave ``number``. Its lengths and tokens are hashes of the seed and these two numbers."""

    def length(span: tuple[int, int], what: int) -> int:
        return span[0] + mixed(file.seed, number, index, what) % (span[1] - span[0] + 1)

    prompt: tuple[int, ...] = ()
    if shared := wave.prefix:
        member = (name_number(shared.family), index % shared.members)
        prompt = tuple(mixed(file.seed, _SHARED, *member, at) % file.vocab_size for at in range(shared.tokens))
    own = range(length(wave.prompt, _PROMPT))
    prompt += tuple(mixed(file.seed, number, index, _OWN, at) % file.vocab_size for at in own)
    answers = {"n": wave.n, "best_of": wave.best_of, "beam_width": wave.beam_width, "ignore_eos": wave.ignore_eos}
    params = SamplingParams(max_tokens=length(wave.output, _OUTPUT), temperature=0.0, **answers)
    request = Request(f"w{number}-{index}", prompt, params, priority=wave.priority, cache_salt=wave.cache_salt)
    step = wave.start + index * wave.every
    return Arrival(step, request, wave.abort_after and step + wave.abort_after, wave.abort_index)


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
