"""The files of a run folder as records: done.json, summary.json and manifest.json.

Older versions left fields out; those have the value that means "not known" here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field

from kvbench.common.foreign_cpu import MachineReport
from kvbench.common.records import Number, Record
from kvbench.metrics.definitions import SERVED, SIMULATED
from kvbench.metrics.model import CanaryCounts, Clock, LoadMetrics, PooledLatencies
from kvbench.runs.server_info import ServerInfo
from kvbench.workload.load_section import LoadPoint
from kvbench.workload.settings import Settings

COMPLETE, INCOMPLETE = "complete", "incomplete"
COST_NOTES = "cost_model"
"""Of a cell's notes: sentences on the step times of a simulation."""


class CacheCounts(Record):
    """The hits of the prefix cache in a load [tokens]; None where not known. ``state``: declared or the default.

    counted: hits by /metrics; told: cached tokens by the usage of the answers; hits: the larger of both, of queries
    unverified: why the state is not verified; disagree: that both counts should be equal and are not
    from_before: hits of a steady cache that only prompts from before the load explain
    """

    state: str | None = None
    counted: Number | None = None
    told: Number | None = None
    hits: Number | None = None
    queries: Number | None = None
    unverified: str | None = None
    disagree: str | bool | None = None
    from_before: Number | None = None


def prefix_hits(cache: CacheCounts, server: Mapping[str, Number | None]) -> tuple[float, float] | None:
    """The prompt tokens found in the prefix cache, and those looked up; None where nobody tells.

    A run that does not hold the counts that are judged has the counters of ``server`` only.
    """
    counters = (server.get("prefix_cache_hits_total"), server.get("prefix_cache_queries_total"))
    for hits, queries in ((cache.hits, cache.queries), counters):
        if hits is not None and queries is not None:
            return hits, queries
    return None


class CacheBounds(Record):
    """The fewest and the most tokens that could hit, by the prompts and the declared state of the cache."""

    low: Number
    high: Number


class WarmUpResult(Record):
    """The requests sent and answered before a load, failed attempts, why the last failed, and the most in flight."""

    requests: int = 0
    answered: int = 0
    failures: int = 0
    last: str | None = None
    in_flight: int = 0


class LoadResult(Record):
    """One load that was measured: done.json.

    valid: neither invalid_reasons, refused nor wrong_answers; refused: how much of it the server served; wrong_answers:
        how many canaries were answered wrongly, where that fails the load
    server_forked: the engine's process was forked, and so has the memory layout of the others of its sweep; in engine
        time shifted by a random number of pages
    server_faults: the reasons that are the server's doing; disturbances: those that the machine or the client's
        lateness made, and that may be gone when the load is measured again
    lockstep: of a pair in engine time: steps of a turn, and how often the load was computed
    template_tokens: that the server's chat template adds; prompt_tokens_added: least, median and most tokens that the
        server counts beyond the drawn ones of a text
    """

    FORMAT: ClassVar[int] = 1
    MAY_LACK_FORMAT: ClassVar[bool] = True

    cell_id: str = ""
    repeat: int = 0
    requests_file: str | None = None
    requests_sha256: str | None = None
    server_start_s: float | None = None
    server_forked: bool = False
    warm_up: WarmUpResult | None = None
    valid: bool = True
    invalid_reasons: tuple[str, ...] = ()
    refused: str | None = None
    wrong_answers: str | None = None
    server_faults: tuple[str, ...] = ()
    disturbances: tuple[str, ...] = ()
    calibration: Mapping[str, Any] | None = None
    clock: Clock = SERVED
    lockstep: Mapping[str, Any] | None = None
    metrics: LoadMetrics
    endpoint: str | None = None
    template_tokens: int | None = None
    prompt_tokens_added: tuple[Number, Number, Number] | None = None
    machine: MachineReport = MachineReport()
    prefix_cache: CacheCounts = CacheCounts()
    prefix_cache_bounds: CacheBounds | None = None
    started_at: str = ""
    ended_at: str = ""
    wall_s: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Tests whether nothing but the machine or the client's lateness made the load invalid.

        Neither makes answers wrong, so a load with wrong ones counts, however disturbed.
        """
        reasons = self.invalid_reasons
        return bool(reasons) and not self.wrong_answers and set(reasons) <= set(self.disturbances)

    @property
    def not_comparable(self) -> list[str]:
        """The reasons why its figures may not be compared: invalid, refused too much, or canaries answered wrongly."""
        return [*self.invalid_reasons, *(why for why in (self.refused, self.wrong_answers) if why)]


class ServerCounters(Record):
    """The counters of the server over one load, by name: counters.json."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Number | None]


class CellLoad(Record):
    """The load of a cell: ``concurrency`` requests at once, or ``request_rate`` a second ("inf": all at once)."""

    load_id: str = ""
    mode: Literal["closed", "open"] = "closed"
    concurrency: int | None = None
    request_rate: float | Literal["inf"] | None = None
    num_requests: int | None = None
    arrivals: str | None = None

    @classmethod
    def of(cls, point: LoadPoint, **more: Any) -> Self:
        names = ("load_id", "mode", "concurrency", "request_rate", "num_requests")
        facts = {name: getattr(point, name) for name in names}
        return cls(**facts | {"request_rate": "inf"} if point.request_rate == math.inf else facts, **more)

    @property
    def value(self) -> float:
        """Concurrent requests or requests/s; 0 where the arrivals have no single rate."""
        value = self.request_rate if self.mode == "open" else self.concurrency
        return math.inf if value == "inf" else float(value or 0.0)


class Capacity(Record):
    """The KV of a configuration; None where not known. ``scale_bytes_per_token``: a part of ``bytes_per_token``.

    ``page_size``: of a contiguous layout the slots of a reservation of max_model_len. ``windows``: of each group of
    layers, None: all tokens are kept; ``group_slots``: slots of a page of it, contiguous: the most of a reservation.
    """

    model_config = ConfigDict(extra="allow")

    capacity_tokens: Number | None = None
    page_size: int | None = None
    num_pages: int | None = None
    num_slots: int | None = None
    windows: tuple[int | None, ...] | None = None
    group_slots: tuple[int, ...] | None = None
    page_table_bytes: Number | None = None
    max_model_len: int | None = None
    kv_budget_bytes: Number | None = None
    kv_bytes: Number | None = None
    kv_type: str | None = None
    bytes_per_token: Number | None = None
    bytes_per_slot: Number | None = None
    scale_bytes_per_token: Number | None = None
    scale_bytes_per_slot: Number | None = None
    max_concurrency_at_max_len: Number | None = None
    swap_space_bytes: int | None = None
    swap_tokens: int | None = None
    vocab_size: int | None = None
    dtype: str | None = None
    window_note: str | None = None

    @property
    def has_windows(self) -> bool:
        """Tests whether groups of layers keep a window of the tokens only."""
        return any(window is not None for window in self.windows or ())


class RepeatSummary(Record):
    """One repeat of a cell."""

    repeat: int
    started_at: str | None = None
    requests_sha256: str | None = None
    metrics: LoadMetrics = LoadMetrics()
    server: Mapping[str, Number | None] = {}
    machine: MachineReport = MachineReport()
    prefix_cache: CacheCounts = CacheCounts()
    prefix_cache_bounds: CacheBounds | None = None
    endpoint: str | None = None
    template_tokens: int | None = None
    prompt_tokens_added: tuple[Number, Number, Number] | None = None


class Spread(Record):
    """Median, mean, extremes and sample standard deviation (None for one value) over repeats."""

    median: float
    mean: float
    min: float
    max: float
    sd: float | None
    n: int
    values: tuple[float, ...]


class CellSummary(Record):
    """All repeats of a cell together: summary.json, which also has the fields of a ``vllm bench serve`` result.

    invalid_repeats: reasons of repeats that are left out, by repeat; notes: how the requests were made
    """

    FORMAT: ClassVar[int] = 1
    MAY_LACK_FORMAT: ClassVar[bool] = True
    model_config = ConfigDict(extra="allow")

    simulated: Mapping[str, Any] | bool | None = None
    cell_id: str = ""
    config_id: str = ""
    label: str = ""
    is_baseline: bool = False
    varied: Settings = Field(default_factory=dict)
    settings: Settings = Field(default_factory=dict)
    load: CellLoad = CellLoad()
    notes: Mapping[str, Any] = {}
    capacity: Capacity = Capacity()
    repeats: tuple[RepeatSummary, ...] = ()
    aggregate: Mapping[str, Spread] = {}
    pooled: PooledLatencies = PooledLatencies()
    valid: bool = True
    invalid_reasons: tuple[str, ...] = ()
    invalid_repeats: Mapping[str, tuple[str, ...]] = {}
    refused: tuple[str, ...] = ()
    wrong_answers: tuple[str, ...] = ()
    canaries: CanaryCounts = CanaryCounts()

    @property
    def is_valid(self) -> bool:
        """Tests whether its figures may be compared; a summary that names a reason may not say so."""
        return self.valid and not (self.invalid_reasons or self.refused or self.wrong_answers)


class GitState(Record):
    """The commit that was measured; None outside a repository."""

    sha: str | None = None
    short_sha: str | None = None
    dirty: bool | None = None


class Processor(Record):
    """The processor of the machine; ``cores``: those that may be used."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    architecture: str | None = None
    cores: int | None = None
    cores_total: int | None = None


class Gpu(Record):
    """A GPU, as ``kvbench.common.machine.gpus`` tells it."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    driver_version: str | None = None


class Environment(Record):
    """Code, versions and machine, as ``kvbench.common.machine.environment`` tells them."""

    git: GitState = GitState()
    versions: Mapping[str, str | None] = {}
    cpu: Processor = Processor()
    gpus: tuple[Gpu, ...] = ()
    memory_bytes: int | None = None
    os: str | None = None


class Resumed(Environment):
    """A time that measuring went on, the environment then, and what differed from before.

    servers: those that differed from what was measured before, by configuration
    """

    model_config = ConfigDict(extra="allow")

    at: str = ""
    forced: bool = False
    differences: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    servers: Mapping[str, ServerInfo] = {}


class PlannedBlock(Record):
    """One fresh server: its configuration, its repeat and the cells it is measured with."""

    block_id: str = ""
    repeat: int = 1
    configuration: str = ""
    cells: tuple[str, ...]


class FailedLoad(Record):
    """A load without a result. ``of_server``: its server did not start, or died.

    unanswered: it was sent to a server that lives, in vain
    """

    cell_id: str | None = None
    repeat: int | None = None
    reason: str | None = None
    of_server: bool = False
    unanswered: bool = False


class SetAside(Record):
    """A disturbed load that was measured again, and where it is kept."""

    cell_id: str
    repeat: int
    reasons: tuple[str, ...] = ()
    folder: str | None = None


class ClusterMachine(Record):
    """A machine of a Ray cluster that runs cells. ``device``: the processor, or the GPUs."""

    node_id: str = ""
    device: str | tuple[str | None, ...] | None = None
    git: GitState = GitState()
    code_sha256: str = ""
    versions: Mapping[str, str | None] = {}


class LostBlock(Record):
    """A block whose machine was lost. ``loads_kept``: how many of its loads had an outcome by then."""

    block_id: str
    machine: str
    reason: str
    loads_kept: int


class ClusterExecution(Record):
    """The machines that ran the cells. ``loads``: by cell and repeat, the machine."""

    kind: Literal["ray"] = "ray"
    cells_need: str = ""
    machines: Mapping[str, ClusterMachine] = {}
    loads: Mapping[str, Mapping[str, str]] = {}
    lost: tuple[LostBlock, ...] = ()


class RunningServer(Record):
    """The options of the command line on a server that runs already."""

    model: str | None = None
    vocab_size: int | None = None
    max_model_len: int | None = None
    tokenizer: str | None = None
    api_key_env: str | None = None
    tls_ca_file: str | None = None
    no_tls_verify: bool | None = None


class SimulatedMachine(Record):
    """The machine that a run was simulated on, and the source of its step times."""

    model_config = ConfigDict(extra="allow")

    device: str | None = None
    tensor_parallel: int | None = None
    model: str | None = None
    cost_model: str | None = None
    ops: str | None = None
    calibration: str | None = None


class MeasuredTarget(Record):
    """The target under the names of the command line.

    simulated: the machine of a simulation
    instrument: the name of the instrument that measures, where another package added it
    """

    target: str | Mapping[str, Any] | None = None
    serve_cmd: str | None = None
    preset: str | None = None
    target_args: str | None = None
    target_python: str | None = None
    exact: bool | None = None
    target_options: RunningServer = RunningServer()
    backend: str | None = None
    shared_machine: bool = False
    simulated: SimulatedMachine | None = None
    instrument: str | None = None

    @property
    def is_built_in(self) -> bool:
        """Tests whether it is the built-in engine, launched by its own command."""
        return self.backend == "kvbench" and not self.serve_cmd


class Manifest(Environment, MeasuredTarget):
    """The manifest.json of a run: target, workload, plan and machine. Fields that only some targets have are kept."""

    FORMAT: ClassVar[int] = 1
    model_config = ConfigDict(extra="allow")

    kind: str | None = None
    status: str = INCOMPLETE
    workload: Mapping[str, Any] = {}
    workload_name: str = ""
    workload_file: str | None = None
    profile: str | None = None
    command: tuple[str, ...] = ()
    device: str | Mapping[str, Any] | None = None
    dtype: str | None = None
    kernel_backend: str | None = None
    num_threads: int | str | None = None
    seeds: Mapping[str, int | None] = {}
    started: str | None = None
    ended: str | None = None
    model: Mapping[str, Any] | None = None
    capacity: Mapping[str, Capacity] = {}
    only: tuple[str, ...] | None = None
    calibration: Mapping[str, Any] | None = None
    plan: tuple[PlannedBlock, ...] = ()
    failures: tuple[FailedLoad, ...] = ()
    left_out: tuple[tuple[str, int], ...] = ()
    set_aside: tuple[SetAside, ...] = ()
    notes: tuple[str, ...] = ()
    servers: Mapping[str, ServerInfo] = {}
    resumed: tuple[Resumed, ...] = ()
    executor: ClusterExecution | None = None
    max_minutes: float | None = None
    measured_s: float | None = None
    lockstep_minutes: float | None = None

    @property
    def complete(self) -> bool:
        return self.status == COMPLETE

    @property
    def clock(self) -> str:
        """The clock of the times of its loads."""
        return SIMULATED if self.simulated else SERVED

    def server_of(self, config_id: str) -> ServerInfo:
        """Returns what a configuration's server reported of itself; empty where it is not known."""
        return self.servers.get(config_id, ServerInfo())

    @property
    def load_section(self) -> Mapping[str, Any]:
        """The workload's section ``load``."""
        section = self.workload.get("load")
        return section if isinstance(section, Mapping) else {}

    @property
    def planned_repeats(self) -> Counter[str]:
        """The number of planned repeats of each cell."""
        return Counter(cell_id for block in self.plan for cell_id in block.cells)

    @property
    def left_out_repeats(self) -> Counter[str]:
        """The number of repeats of each cell that --max-minutes left no time for."""
        return Counter(cell_id for cell_id, _ in self.left_out)
