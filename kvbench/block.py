"""One block: a fresh server of one configuration, warmed up, and its loads one after another.

Around every load: wait until the server is idle, put the cache into the declared state, check that no page is owned,
measure, check that no page stayed owned.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from kvbench import loadrun, server_state
from kvbench.contention import MachineWatch, contention_reasons
from kvbench.design import Block, Cell, LoadPoint
from kvbench.errors import MeasurementError, UsageError
from kvbench.metrics import summarise
from kvbench.results import DONE, RunFolder, read_json, utc_now, write_json
from kvbench.server_metrics import MetricsPoller, MetricsSample, counter_changes, gauge_summary
from kvbench.targets.base import Target
from kvbench.targets.builtin import ServerRefusedError
from kvbench.workload import Workload

_WARM_UP_REQUESTS = 4
_WARM_UP_TOKENS = 16
_WARM_UP_MARGIN_S = 30.0
_WARM_UP_SEED = 0x5EED  # other token contents than any measured request
_MAX_FAILED_SHARE = 0.01


class Listener(Protocol):
    """What a progress display is told."""

    def load_started(self, cell: Cell, repeat: int, total: int) -> None: ...

    def load_progress(self, done: int, total: int, failed: int, elapsed_s: float) -> None: ...

    def load_finished(self, cell: Cell, repeat: int, done: Mapping[str, Any]) -> None: ...

    def load_failed(self, cell: Cell, repeat: int, reason: str) -> None: ...

    def status(self, text: str) -> None: ...


@dataclass(frozen=True)
class Failure:
    """A load that gave no result; it is run again by --resume."""

    cell_id: str
    repeat: int
    reason: str


@dataclass(frozen=True)
class BlockRunner:
    """Runs blocks of one workload into one run folder."""

    workload: Workload
    run: RunFolder
    new_target: Callable[[], Target]
    listener: Listener
    on_server: Callable[[Block, Mapping[str, Any] | None, Target], None]
    check_interrupt: Callable[[], None]
    failures: list[Failure] = field(default_factory=list)
    served: list[str] = field(default_factory=list)  # blocks whose server was up

    def run_block(self, block: Block) -> bool:
        """Every load of ``block`` that is not done yet. A load that fails is recorded, and the next one tried.

        False when the server could not be started. Raises ServerRefusedError when it does not take its settings.
        """
        todo = [cell for cell in block.cells if not self.run.is_done(cell.cell_id, block.repeat)]
        target = self.new_target()
        log = self.run.server_log(block.block_id)
        self.listener.status(f"starting the server of {block.configuration.label} (repeat {block.repeat})")
        started = time.monotonic()
        try:
            self._start(target, block, log)
            start_s = time.monotonic() - started
            info = target.server_info()
            self.on_server(block, info, target)
            self.check_interrupt()
            self.listener.status(f"warming up {block.configuration.label}")
            self._warm_up(target)
        except MeasurementError as error:
            target.stop()
            for cell in todo:
                self._fail(cell, block.repeat, str(error))
            return False
        except BaseException:
            target.stop()
            raise
        try:
            for position, cell in enumerate(todo):
                try:
                    load = Load(self, target, cell, block.repeat, log, info, start_s)
                    load.run(first=position == 0)
                except MeasurementError as error:
                    self._fail(cell, block.repeat, str(error))
        finally:
            target.stop()
        return True

    def _start(self, target: Target, block: Block, log: Path) -> None:
        """A server that cannot be reached or bound is bad input at first; later it costs its block, not the sweep."""
        try:
            target.start(block.configuration.settings, log)
        except ServerRefusedError:
            raise
        except UsageError as error:
            if not self.served:
                raise
            raise MeasurementError(str(error)) from None
        self.served.append(block.block_id)

    def _fail(self, cell: Cell, repeat: int, reason: str) -> None:
        self.failures.append(Failure(cell.cell_id, repeat, reason))
        self.listener.load_failed(cell, repeat, reason)

    def requests(self, target: Target, point: LoadPoint, repeat: int, seed: int) -> list[Any]:
        try:
            return loadrun.make_requests(
                self.workload.load,
                point,
                vocab_size=target.model.vocab_size,
                max_model_len=target.model.max_model_len,
                seed=seed,
                repeat=repeat,
            )
        except ValueError as error:
            raise MeasurementError(f"no requests can be made for this server: {error}") from None

    def _warm_up(self, target: Target) -> None:
        """A few requests of the workload's shape but other contents: kernels compile, buffers are touched."""
        point = self.workload.load_points[0]
        requests = sorted(
            self.requests(target, point, 0, self.workload.seed ^ _WARM_UP_SEED),
            key=lambda r: len(r.prompt_token_ids or r.prompt or ()),
        )
        step = max(1, (len(requests) - 1) // (_WARM_UP_REQUESTS - 1))
        chosen = requests[::step][:_WARM_UP_REQUESTS]
        timeout = self.workload.load.timeout_s
        with ThreadPoolExecutor(_WARM_UP_REQUESTS) as pool:
            sent = [
                pool.submit(target.complete, _prompt(r), min(_WARM_UP_TOKENS, r.max_tokens), timeout) for r in chosen
            ]
            for future in sent:
                try:
                    future.result(timeout=timeout + _WARM_UP_MARGIN_S)
                except TimeoutError:
                    raise MeasurementError(
                        f"a warm-up request was not answered within {timeout + _WARM_UP_MARGIN_S:g} s"
                    ) from None


@dataclass(frozen=True)
class Load:
    """One load on a server that is up. ``info``: its /server_info; ``start_s``: how long it took to start."""

    runner: BlockRunner
    target: Target
    cell: Cell
    repeat: int
    server_log: Path
    info: Mapping[str, Any] | None
    start_s: float

    def run(self, *, first: bool) -> None:
        """From the idle server to done.json. Raises MeasurementError when it could not be driven to its end."""
        runner, target, cell, load = self.runner, self.target, self.cell, self.runner.workload.load
        self._check()
        requests = runner.requests(target, cell.load, self.repeat, runner.workload.seed)
        folder = runner.run.path / "requests"
        path, digest = loadrun.store_requests(requests, folder, f"{cell.load.load_id}-{self.repeat}")
        runner.listener.load_started(cell, self.repeat, len(requests))
        reasons = server_state.prepare_cache(target, load, requests, first=first)
        log_from = self.server_log.stat().st_size if self.server_log.is_file() else 0
        with runner.run.scratch_load(cell.cell_id, self.repeat) as out:
            spec = loadrun.load_spec(
                load, cell.load, base_url=target.base_url, model=target.model.name, requests_file=path, out_dir=out,
                send_priority=loadrun.takes_priority(cell.configuration.settings, self.info),
            )  # fmt: skip
            started_at, began = utc_now(), time.monotonic()
            machine = MachineWatch(target.server())
            before = server_state.read_metrics(target)
            with MetricsPoller(lambda: target.metrics()) as poller:
                loadrun.drive(
                    spec,
                    total=len(requests),
                    limit_s=loadrun.bound_s(load, cell.load, requests),
                    on_progress=runner.listener.load_progress,
                    check=self._check,
                    on_phase=machine.on_phase,
                )
            after = server_state.wait_release(target)
            _copy_tail(self.server_log, log_from, out / "server.log")
            told = read_json(out / "load.json")
            metrics = self._metrics(out, told, poller, before, after)
            report = machine.report()
            reasons += list(told.get("invalid_reasons") or [])
            reasons += server_state.leak_reasons(after) + _validity(metrics, told)
            reasons += contention_reasons(report)
            bounds = server_state.hit_bounds(load, requests, self.info, before, after)
            complete = int(metrics.get("completed") or 0) == len(requests)
            reasons += server_state.cache_reasons(load, bounds, before, after, complete=complete)
            done = {
                "cell_id": cell.cell_id,
                "valid": not reasons,
                "invalid_reasons": reasons,
                "metrics": metrics,
                "machine": report,
                "prefix_cache_bounds": dataclasses.asdict(bounds) if bounds else None,
                "repeat": self.repeat,
                "started_at": started_at,
                "ended_at": utc_now(),
                "wall_s": time.monotonic() - began,
                "server_start_s": self.start_s,
                "requests_file": str(path.relative_to(runner.run.path)),
                "requests_sha256": digest,
            }
            write_json(out / DONE, done)
        runner.listener.load_finished(cell, self.repeat, done)

    def _check(self) -> None:
        self.runner.check_interrupt()
        self.target.check_alive()

    def _metrics(
        self,
        out: Path,
        load: Mapping[str, Any],
        poller: MetricsPoller,
        before: MetricsSample | None,
        after: MetricsSample | None,
    ) -> dict[str, Any]:
        """Metrics of a load that ended; writes counters.json and server.parquet."""
        requests = pd.read_parquet(out / "requests.parquet")
        slo = self.runner.workload.load.slo
        metrics = summarise(requests, load, slo.model_dump() if slo else None)
        start = float(load.get("start_unix") or 0.0)
        duration = float(metrics.get("duration_s") or load.get("duration_s") or 0.0)
        if poller.samples:
            pd.DataFrame([{"t": s.wall - start, **s.gauges, **s.counters} for s in poller.samples]).to_parquet(
                out / "server.parquet", index=False
            )
        during = [s for s in poller.samples if 0.0 <= s.wall - start <= duration] or poller.samples
        gauges = gauge_summary(during)
        counters = {
            **counter_changes(before, after),
            **{f"{name}_{part}": value for name, parts in gauges.items() for part, value in parts.items()},
            "pages_owned_after": after.owned_pages if after else None,
            "swap_slots_used_after": after.swapped_slots if after else None,
            "polls": len(poller.samples),
            "polls_failed": poller.failures,
        }
        write_json(out / "counters.json", counters)
        return metrics


def _validity(metrics: Mapping[str, Any], load: Mapping[str, Any]) -> list[str]:
    reasons = []
    if load.get("incomplete"):
        reasons.append("the load client was stopped before its last request")
    failed, completed = int(metrics.get("failed") or 0), int(metrics.get("completed") or 0)
    if failed > _MAX_FAILED_SHARE * (failed + completed):
        kinds = ", ".join(f"{kind} {n}" for kind, n in (metrics.get("failure_kinds") or {}).items())
        reasons.append(f"{failed} of {failed + completed} requests failed ({kinds or 'no kind recorded'})")
    return reasons


def _copy_tail(source: Path, start: int, to: Path) -> None:
    if source.is_file():
        with source.open("rb") as file:
            file.seek(start)
            to.write_bytes(file.read())


def _prompt(request: Any) -> Any:
    return list(request.prompt_token_ids) if request.prompt is None else request.prompt
