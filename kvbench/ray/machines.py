"""Runs the blocks of a sweep on the machines of a Ray cluster: one block a device at a time, on a CPU one a machine.

The sweep decides what is measured, here; a machine gets one block, and its loads come back one by one. The block of a
machine or process that was lost runs again elsewhere. Blocks of one repeat run on one machine where that keeps no other
waiting: the configurations are compared within a repeat, and so on the same machine.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kvbench.calibration import calibrate
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import read_json, unpack, write_json
from kvbench.common.git import git_state
from kvbench.common.machine import environment
from kvbench.common.text import and_more, plural
from kvbench.ray.cluster import (
    MAX_LOST,
    Cluster,
    ClusterNode,
    Lost,
    MachineFacts,
    Raised,
    TaskEnded,
    TaskSlots,
    cluster_at,
    usable_nodes,
)
from kvbench.ray.sentences import sentence
from kvbench.runs.manifest import StoredManifest, environment_differences
from kvbench.runs.results import ClusterExecution, ClusterMachine, Environment, GitState, LostBlock, Manifest
from kvbench.sweep.block import BlockRunner, Finished, ThisMachine, why_unanswered
from kvbench.sweep.block_task import (
    BlockEnded,
    BlockTask,
    Event,
    LoadDone,
    LoadFailed,
    ServerUp,
    StatusText,
    run_block_task,
)
from kvbench.sweep.requests import SweepRequest
from kvbench.targets.base import Target
from kvbench.targets.choose import ChosenTarget
from kvbench.workload.design import Block, Design
from kvbench.workload.file import Workload

_PARALLEL = re.compile(r"(?:--(?:tensor|pipeline)-parallel-size|--tp(?:-size)?|--pp(?:-size)?|-tp|-pp)[ =](\d+)")


@dataclass(frozen=True)
class CellNeeds:
    """The GPUs that one cell asks of a machine (0: the CPU, and the machine for itself), and a Ray resource."""

    gpus: int
    resource: str | None = None

    def needs(self, node: ClusterNode) -> dict[str, float] | None:
        """The resources of one cell on ``node``, None where it does not have them."""
        have, needs = node.resources, {}
        if self.resource:  # Ray gives every machine one accelerator_type:NAME, however many of them it has
            needs[self.resource] = 0.001 if self.resource.startswith("accelerator_type:") else 1.0
        if self.gpus and (not self.resource or have.get("GPU")):
            needs["GPU"] = float(self.gpus)
        if any(have.get(name, 0.0) < value for name, value in needs.items()):
            return None
        cores = int(have.get("CPU", 0.0))
        if not needs and cores < 1:  # a head that runs nothing: ray start --num-cpus 0
            return None
        return needs | {"CPU": float(cores // self._cells(have, needs))}

    def cells(self, node: ClusterNode) -> int:
        """Counts the cells that may run on ``node`` at once."""
        needs = self.needs(node)
        return 0 if needs is None else self._cells(node.resources, needs)

    def _cells(self, have: Mapping[str, float], needs: Mapping[str, float]) -> int:
        if not self.gpus:
            return 1  # two on one machine disturb each other
        return min(int(have[name] / value) for name, value in needs.items() if name != "CPU" and value >= 1)

    def __str__(self) -> str:
        parts = [*([self.resource] if self.resource else []), *([plural(self.gpus, "GPU")] if self.gpus else [])]
        return " and ".join(parts) or "a CPU"


def needs_of(workload: Workload, design: Design, request: SweepRequest) -> CellNeeds:
    """The needs of the cells of ``design``, by the workload's profile or ``device`` and the flags of the server."""
    devices = {configuration.settings.get("device", "auto") for configuration in design.configurations}
    on_gpu = "cuda" in devices or (workload.profile == "gpu" and devices != {"cpu"})
    gpus = 1
    for count in _PARALLEL.findall(" ".join(filter(None, (request.serve_cmd, request.target_args)))):
        gpus *= int(count)
    return CellNeeds(gpus if on_gpu else 0, request.device_resource)


@dataclass
class _Run:
    """A block that runs. ``doing``: for the display; ``done``: cells that have an outcome; ``end``: comes last."""

    block: Block
    node: ClusterNode
    began: float
    doing: str = "waiting for the machine"
    done: set[str] = field(default_factory=set)
    end: BlockEnded | None = None


@dataclass
class RayMachines(ThisMachine):
    """The machines of a cluster that run the cells, which all are and run the same.

    ``workload``, ``options``, ``stored``: as in BlockTask; ``facts``: of each machine, by node id; ``wait_s``: until a
    machine has what a cell needs free.
    """

    cluster: Cluster
    cell_needs: CellNeeds
    workload: Workload
    options: SweepRequest
    stored: Manifest
    nodes: Sequence[ClusterNode]
    facts: Mapping[str, MachineFacts]
    wait_s: float
    notes: list[str] = field(default_factory=list)
    is_here = False

    def __post_init__(self) -> None:
        self.environment = Environment(**{**next(iter(self.facts.values())).environment, "git": git_state()})
        differences, _ = environment_differences(self.environment, Environment(**environment()))
        self.is_like_here = not differences
        machines, cells = plural(len(self.nodes), "machine"), plural(self.at_once, "cell")
        self.notes.insert(0, sentence("sweep.at_once", machines=machines, cells=cells))
        if differences:
            self.notes.append(sentence("sweep.not_like_here", differences=and_more(differences, 2)))

    @property
    def at_once(self) -> int:
        return sum(self.cell_needs.cells(node) for node in self.nodes)

    @property
    def resume_options(self) -> list[str]:
        given = [("--ray-address", self.options.ray_address), ("--device-resource", self.options.device_resource)]
        return ["--executor", "ray", *(word for pair in given if pair[1] for word in pair)]

    def begin(self, runner: BlockRunner, manifest: StoredManifest) -> None:
        self.runner, self.manifest, self.job = runner, manifest, runner.instrument.job
        before = manifest.manifest.executor or ClusterExecution()
        machines = {**before.machines, **{node.name: self._machine(node) for node in self.nodes}}
        needs = str(self.cell_needs)
        self._record(kind="ray", cells_need=needs, machines=machines, loads=before.loads, lost=before.lost)
        free = [node for node in self.nodes for _ in range(self.cell_needs.cells(node))]
        self._slots = TaskSlots(self.cluster, free, self.cell_needs.needs, self.wait_s)
        self._again: list[_Run] = []  # blocks that were lost
        self._lost: Counter[str] = Counter()
        self._home: dict[int, ClusterNode] = {}  # by repeat
        self._calibrations: dict[str, list[Any]] = {}  # by machine

    def _record(self, **changes: Any) -> None:
        """Notes in the manifest which machine does what."""
        executor = self.manifest.manifest.executor or ClusterExecution()
        self.manifest.replace(executor=executor.model_copy(update=changes))

    def _machine(self, node: ClusterNode) -> ClusterMachine:
        facts = self.facts[node.node_id]
        there = Environment(**facts.environment)
        return ClusterMachine(
            node_id=node.node_id,
            device=[gpu.name for gpu in there.gpus] if self.cell_needs.gpus else there.cpu.model,
            git=there.git,
            code_sha256=facts.code,
            versions={**there.versions, "ray": facts.ray},
        )

    def next_block(self, left: Sequence[Block]) -> Block | None:
        """Chooses a block whose repeat has run on a free machine, else one whose repeat has run nowhere, else any."""
        if self._slots.left and (self._again or not self._slots.free):
            return None
        begun = [*self._slots.running.values(), *self._again]
        taken = {(cell.cell_id, run.block.repeat) for run in begun for cell in run.block.cells}
        waiting = [b for b in left if not any((cell.cell_id, b.repeat) in taken for cell in b.cells)]
        if waiting and not self._slots.left:
            raise MeasurementError(sentence("sweep.none_left"))
        at_home = (block for block in waiting if self._home.get(block.repeat) in self._slots.free)
        new = (block for block in waiting if self._home.get(block.repeat) not in self._slots.nodes)
        return next(at_home, None) or next(new, None) or next(iter(waiting), None)

    def submit(self, block: Block, done: Collection[str] = ()) -> None:
        """Begins a block; ``done``: ids of cells that have an outcome from a machine that was lost."""
        home = self._home.get(block.repeat)
        node = home if home in self._slots.free else self._slots.free[0]
        self._home[block.repeat] = home if home in self._slots.nodes else node
        calibrations = None if self.options.no_calibration else self._calibrations.get(node.name, [])
        left = dataclasses.replace(block, cells=tuple(c for c in block.cells if c.cell_id not in done))
        task = BlockTask(
            left, self.workload, self.options, self.stored, self.job.capacity, bool(self.runner.served),
            tuple(self.runner.keeps_cache), calibrations,
        )  # fmt: skip
        self._slots.submit(_Run(block, node, time.monotonic(), done={*done}), node, run_block_task, task)
        self._show()

    def next_finished(self) -> Finished | None:
        while self._slots.running or self._again:
            self.job.check()
            while self._again and self._slots.free:
                lost = self._again.pop(0)
                self.submit(lost.block, lost.done)
            if not self._slots.left:
                raise MeasurementError(sentence("sweep.none_left"))
            if (came := self._slots.next()) is None:
                continue
            run, event = came
            if isinstance(event, Raised):
                raise event.error
            if not isinstance(event, TaskEnded | Lost):
                self._take(run, event)
            elif finished := self._end(run, run.end) if run.end else self._again_elsewhere(run, event):
                self._show()
                return finished
        return None

    def close(self) -> None:
        self._slots.close()

    def _again_elsewhere(self, run: _Run, end: TaskEnded | Lost) -> Finished | None:
        """Runs what is left of a block again whose task ended before it, unless that was tried too often."""
        left = [cell for cell in run.block.cells if cell.cell_id not in run.done]
        reason = end.reason if isinstance(end, Lost) else "it ended"
        lost = LostBlock(block_id=run.block.block_id, machine=run.node.name, reason=reason, loads_kept=len(run.done))
        self._record(lost=(*self.manifest.manifest.executor.lost, lost))
        self._lost[run.block.block_id] += not isinstance(end, Lost) or end.began
        if left and self._lost[run.block.block_id] < MAX_LOST:
            self._again.append(run)
            return None
        for cell in left:
            words = sentence("sweep.lost_often", times=MAX_LOST, machine=run.node.name, reason=reason)
            self.runner.fail(cell, run.block.repeat, words, of_server=False)
        return Finished(run.block, True, time.monotonic() - run.began)

    def _take(self, run: _Run, event: Event) -> None:
        match event:
            case StatusText(text):
                run.doing = text
                self._show()
            case ServerUp(info, model):
                self.runner.served.append(run.block.block_id)
                self.job.on_server(run.block, info, cast(Target, SimpleNamespace(model=model)))
            case LoadDone():
                self._store(run, event)
            case LoadFailed(cell, failure):
                run.done.add(cell.cell_id)
                reason = sentence("sweep.failed", reason=failure.reason, machine=run.node.name)
                how = {"of_server": failure.of_server, "unanswered": failure.unanswered}
                self.runner.fail(cell, failure.repeat, reason, **how)
            case BlockEnded():
                run.end = event

    def _store(self, run: _Run, load: LoadDone) -> None:
        """Puts the load's files to where a sweep of one machine has them."""
        folder, cell_id, repeat = self.job.folder, load.cell.cell_id, run.block.repeat
        with tempfile.TemporaryDirectory(prefix=".incoming-", dir=folder.path) as scratch:
            unpack(load.files, Path(scratch))
            _move(Path(scratch) / "requests", folder.path / "requests")
            with folder.scratch_load(cell_id, repeat) as out:
                _move(Path(scratch) / folder.load(cell_id, repeat).relative_to(folder.path), out)
        run.done.add(cell_id)
        loads = self.manifest.manifest.executor.loads
        self._record(loads={**loads, cell_id: {**loads.get(cell_id, {}), str(repeat): run.node.name}})
        self.job.listener.load_finished(load.cell, repeat, load.done)
        self.runner.on_sent(load.cell, why_unanswered(load.done.metrics))

    def _end(self, run: _Run, end: BlockEnded) -> Finished:
        unpack(end.files, self.job.folder.path)
        self._calibrations[run.node.name] = list(end.calibrations)  # for further blocks on the machine
        path = self.job.folder.path / calibrate.FILE
        stored = read_json(path) if path.is_file() else []
        if new := [row for row in end.calibrations if row not in stored]:
            write_json(path, stored + new)
        self.runner.keeps_cache.extend(name for name in end.keeps_cache if name not in self.runner.keeps_cache)
        if end.refused is not None:
            raise UsageError(end.refused)
        if end.problem is not None:
            raise MeasurementError(sentence("sweep.problem", machine=run.node.name, problem=end.problem))
        return Finished(run.block, end.started, time.monotonic() - run.began)

    def _show(self) -> None:
        runs = self._slots.running.values()
        doing = [sentence("sweep.status", machine=run.node.name, doing=run.doing) for run in runs]
        self.job.listener.status("; ".join(doing) or "between loads")


@contextmanager
def ray_machines(
    choice: ChosenTarget,
    parts: tuple[Workload, SweepRequest, Manifest],
    only: Sequence[str],
    say: Callable[[str], None],
) -> Iterator[RayMachines]:
    """The machines of a cluster for the cells of a sweep. ``parts``: what ``choice`` was made of, as in BlockTask.

    Raises UsageError where there is no cluster, or none of its machines can be used.
    """
    if choice.runs_already:
        raise UsageError(sentence("sweep.runs_already"))
    options = parts[1]
    cell_needs = needs_of(choice.workload, choice.plan(only)[0], options)
    with cluster_at(options.ray_address) as cluster:
        yield machines_for(cluster, cell_needs, parts, options.ray_wait, say)


def machines_for(
    cluster: Cluster,
    cell_needs: CellNeeds,
    parts: tuple[Workload, SweepRequest, Manifest],
    wait_s: float,
    say: Callable[[str], None],
) -> RayMachines:
    """The machines that have what a cell needs and run this code. ``parts``: workload, options, stored of BlockTask.

    Raises UsageError where there is none, or they are not alike.
    """
    usable = usable_nodes(cluster, cell_needs.needs, sentence("sweep.needs", needed=cell_needs), wait_s, say)
    _require_alike([(node, Environment(**usable.facts[node.node_id].environment)) for node in usable.nodes])
    return RayMachines(cluster, cell_needs, *parts, usable.nodes, usable.facts, wait_s, list(usable.left_out))


def _require_alike(machines: Sequence[tuple[ClusterNode, Environment]]) -> None:
    """Refuses machines that differ: a table of loads of both would compare the machines."""
    first, before = machines[0]
    for node, now in machines[1:]:
        differences, _ = environment_differences(before.model_copy(update={"git": GitState()}), now)
        if differences:
            here, there = sentence("sweep.then", machine=first.name), sentence("sweep.now", machine=node.name)
            named = [text.replace(" then, ", here).replace(" now)", there) for text in differences]
            raise UsageError(sentence("sweep.not_alike", differences=and_more(named, 3)))


def _move(source: Path, folder: Path) -> None:
    """Moves what ``source`` holds into ``folder``, unless it is there."""
    if not source.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if not (folder / path.name).exists():
            path.rename(folder / path.name)
