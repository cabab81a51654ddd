"""Measures quality in two processes, each on half of the cores: a step of kvbench-tiny gains little from a second core.

    python -m kvbench.quality.parts RESULT    (started here; a pickled QualityPart comes on stdin)

Configurations of one KV dtype stay together, since those that answer alike share their figures. Both parts compute the
baseline and the control.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvbench.common import processes
from kvbench.common.errors import EXIT_USAGE, MeasurementError, UsageError
from kvbench.common.machine import usable_cores
from kvbench.common.records import read_record, write_record
from kvbench.quality.prompts import BESIDE, Say
from kvbench.runs.quality import QualityResult
from kvbench.workload.design import Configuration
from kvbench.workload.file import Workload, runs_on_cpu
from kvbench_engine.model.spec import find_model, uses_random_weights
from kvbench_engine.startup import import_engine, set_spin_count

# Often on a machine that does other work too. One configuration with kvbench-tiny beside programs that kept more than
# one of 2 cores busy: 48 s with 0, 62 s with 2000, over 180 s with the server's 20000.
_SPIN_COUNT = "2000"
_END_S = 600.0  # for the other part, which has at most as many configurations


class QualityPart(NamedTuple):
    """The configurations that one process measures, with so many threads.

    ``model``: what answers, None: as ``measure`` chooses; ``every``: asks all prompts of each configuration.
    """

    workload: Workload
    configurations: Sequence[Configuration]
    threads: int = 1
    model: str | None = None
    every: bool = False

    def measure(self, say: Say = lambda text: None) -> QualityResult:
        """Imports the engine and measures. Raises UsageError."""
        set_spin_count(_SPIN_COUNT)  # before torch is imported
        import_engine(compiles=any(c.settings.get("torch_compile") for c in self.configurations))
        from kvbench.quality.measure import measure

        return measure(
            self.workload, self.configurations, threads=self.threads, model=self.model, every=self.every, say=say
        )


def measure_parts(whole: QualityPart, say: Say) -> QualityResult:
    """Measures the configurations of ``whole``, in two processes if that is faster.

    Raises UsageError, MeasurementError.
    """
    first, second = split(whole)
    if second is None:
        return first.measure(say)
    with tempfile.TemporaryDirectory(prefix="kvbench-quality-") as scratch, contextlib.ExitStack() as opened:
        stored, log = Path(scratch) / "quality.json", Path(scratch) / "log.txt"
        child = processes.launch(
            [sys.executable, "-m", "kvbench.quality.parts", str(stored)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=opened.enter_context(log.open("wb")),
        )
        opened.callback(processes.stop, child)
        child.watch(Path(scratch))
        with child.stdin:
            child.stdin.write(pickle.dumps(second))
        mine = first.measure(say)
        say("the other half of the configurations")
        code = child.wait(_END_S)
        if code == EXIT_USAGE:
            raise UsageError(processes.last_lines(log, count=1))
        if code:
            how = processes.how_it_ended(code)
            raise MeasurementError(f"half of the measurement {how}; its last lines:\n{processes.last_lines(log)}")
        return joined(mine, read_record(QualityResult, stored, "measure it again"), whole.configurations)


def split(whole: QualityPart) -> tuple[QualityPart, QualityPart | None]:
    """The part of this process, and that of another one: None where one is as fast or two have no room."""
    groups: dict[str, list[Configuration]] = {}
    for configuration in whole.configurations:
        groups.setdefault(str(configuration.settings.get("kv_cache_dtype", "auto")), []).append(configuration)
    on_cpu = all(runs_on_cpu(str(c.settings.get("device", "auto"))) for c in whole.configurations)
    cores = usable_cores()
    if not on_cpu or cores < 2 or len(groups) < 2 or not _is_small(whole):
        return whole._replace(threads=cores), None
    parts: tuple[list[Configuration], list[Configuration]] = [], []
    for group in sorted(groups.values(), key=len, reverse=True):
        min(parts, key=len).extend(group)
    first, second = (whole._replace(configurations=part, threads=cores // 2) for part in parts)
    return first, second


def _is_small(whole: QualityPart) -> bool:
    """Tests whether kvbench-tiny answers: two copies of another model's weights may have no room."""
    own = {(str(c.settings.get("model", "")), str(c.settings.get("load_format", "auto"))) for c in whole.configurations}
    with contextlib.suppress(ValueError):  # of a model that is not there: said when it is loaded
        return whole.model == BESIDE or (
            whole.model is None and all(uses_random_weights(find_model(name, how), how) for name, how in own)
        )
    return False


def joined(one: QualityResult, other: QualityResult, order: Sequence[Configuration]) -> QualityResult:
    """The result of both parts, with the configurations in the workload's order."""
    by_id = {**one.configurations, **other.configurations}
    facts = one.facts.model_copy(
        update={
            "measurements": one.facts.measurements + other.facts.measurements,
            "seconds": max(one.facts.seconds, other.facts.seconds),
            "not_measured": tuple(dict.fromkeys((*one.facts.not_measured, *other.facts.not_measured))),
        }
    )
    return one.model_copy(update={"configurations": {c.config_id: by_id[c.config_id] for c in order}, "facts": facts})


def _main(result: str) -> int:
    part = pickle.load(sys.stdin.buffer)  # from the process that started this one
    try:
        write_record(Path(result), part.measure())
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
