"""One block: a fresh server of one configuration, warmed up, and its loads one after another.

Around every load: wait until the server is idle, put the cache into the declared state, check that no page is owned,
measure, check that no page stayed owned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from kvbench import loadrun
from kvbench.design import Block, Cell, LoadPoint
from kvbench.errors import MeasurementError
from kvbench.load.requests import distinct_prefixes
from kvbench.metrics import summarise
from kvbench.results import DONE, RunFolder, read_json, utc_now, write_json
from kvbench.server_metrics import MetricsPoller, MetricsSample, counter_changes, gauge_summary
from kvbench.targets.base import Target
from kvbench.workload import Workload

_IDLE_BOUND_S = 30.0  # aborted requests of an earlier load leave at the next steps
_RELEASE_BOUND_S = 5.0  # pages must be back that soon after the last request ended
_WARM_UP_REQUESTS = 4
_WARM_UP_TOKENS = 16
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
            target.start(block.configuration.settings, log)
            start_s = time.monotonic() - started
            self.on_server(block, target.server_info(), target)
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
                    self._run_load(target, cell, block.repeat, log, first=position == 0, start_s=start_s)
                except MeasurementError as error:
                    self._fail(cell, block.repeat, str(error))
        finally:
            target.stop()
        return True

    def _fail(self, cell: Cell, repeat: int, reason: str) -> None:
        self.failures.append(Failure(cell.cell_id, repeat, reason))
        self.listener.load_failed(cell, repeat, reason)

    def _requests(self, target: Target, point: LoadPoint, repeat: int, seed: int) -> list[Any]:
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
            self._requests(target, point, 0, self.workload.seed ^ _WARM_UP_SEED), key=lambda r: len(_prompt(r))
        )
        step = max(1, (len(requests) - 1) // (_WARM_UP_REQUESTS - 1))
        chosen = requests[::step][:_WARM_UP_REQUESTS]
        timeout = self.workload.load.timeout_s
        with ThreadPoolExecutor(_WARM_UP_REQUESTS) as pool:
            sent = [
                pool.submit(target.complete, _prompt(r), min(_WARM_UP_TOKENS, r.max_tokens), timeout) for r in chosen
            ]
            for future in sent:
                future.result(timeout=timeout + 30)

    def _prepare_cache(self, target: Target, requests: list[Any], *, first: bool) -> None:
        """Idle, then the declared cache state. Raises MeasurementError when it cannot be had."""
        state = self.workload.load.cache_state
        _wait_idle(target)
        if state != "steady" or first:
            _reset(target)
        if state == "primed" or (state == "steady" and first):
            for prefix in distinct_prefixes(requests):
                target.complete(list(prefix), 1, self.workload.load.timeout_s)
            _wait_idle(target)

    def _run_load(
        self, target: Target, cell: Cell, repeat: int, server_log: Path, *, first: bool, start_s: float
    ) -> None:
        load, run = self.workload.load, self.run

        def check() -> None:
            self.check_interrupt()
            target.check_alive()

        check()
        requests = self._requests(target, cell.load, repeat, self.workload.seed)
        path, digest = loadrun.store_requests(requests, run.path / "requests", f"{cell.load.load_id}-{repeat}")
        self.listener.load_started(cell, repeat, len(requests))
        self._prepare_cache(target, requests, first=first)
        log_from = server_log.stat().st_size if server_log.is_file() else 0
        with run.scratch_load(cell.cell_id, repeat) as out:
            spec = loadrun.load_spec(
                load, cell.load, base_url=target.base_url, model=target.model.name, requests_file=path, out_dir=out
            )
            started_at, began = utc_now(), time.monotonic()
            before = _read(target)
            with MetricsPoller(lambda: target.metrics()) as poller:
                loadrun.drive(
                    spec,
                    total=len(requests),
                    limit_s=loadrun.bound_s(load, cell.load, requests),
                    on_progress=self.listener.load_progress,
                    check=check,
                )
            after, owned = _wait_release(target)
            _copy_tail(server_log, log_from, out / "server.log")
            done = {"cell_id": cell.cell_id} | self._finish(out, poller, before, after, owned)
            done |= {
                "repeat": repeat,
                "started_at": started_at,
                "ended_at": utc_now(),
                "wall_s": time.monotonic() - began,
                "server_start_s": start_s,
                "requests_file": str(path.relative_to(run.path)),
                "requests_sha256": digest,
            }
            write_json(out / DONE, done)
        self.listener.load_finished(cell, repeat, done)

    def _finish(
        self,
        out: Path,
        poller: MetricsPoller,
        before: MetricsSample | None,
        after: MetricsSample | None,
        owned: float | None,
    ) -> dict[str, Any]:
        """Metrics, counters and validity of a load that ended; writes counters.json and server.parquet."""
        load = read_json(out / "load.json")
        requests = pd.read_parquet(out / "requests.parquet")
        slo = self.workload.load.slo
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
            "pages_owned_after": owned,
            "polls": len(poller.samples),
            "polls_failed": poller.failures,
        }
        write_json(out / "counters.json", counters)
        reasons = list(load.get("invalid_reasons") or []) + _validity(metrics, load, owned)
        return {"valid": not reasons, "invalid_reasons": reasons, "metrics": metrics}


def _validity(metrics: Mapping[str, Any], load: Mapping[str, Any], owned: float | None) -> list[str]:
    reasons = []
    if owned:
        reasons.append(f"{owned:g} KV pages were still owned {_RELEASE_BOUND_S:g} s after the last request ended")
    if load.get("incomplete"):
        reasons.append("the load client was stopped before its last request")
    failed, completed = int(metrics.get("failed") or 0), int(metrics.get("completed") or 0)
    if failed > _MAX_FAILED_SHARE * (failed + completed):
        kinds = ", ".join(f"{kind} {n}" for kind, n in (metrics.get("failure_kinds") or {}).items())
        reasons.append(f"{failed} of {failed + completed} requests failed ({kinds or 'no kind recorded'})")
    return reasons


def _read(target: Target) -> MetricsSample | None:
    """A reading that matters: a failure is a MeasurementError, not a counted miss."""
    try:
        return target.metrics()
    except MeasurementError:
        raise
    except Exception as error:
        target.check_alive()
        raise MeasurementError(f"the server's /metrics cannot be read: {error!r}") from None


def _wait_idle(target: Target) -> None:
    deadline = time.monotonic() + _IDLE_BOUND_S
    while True:
        sample = _read(target)
        if sample is None or (sample.active_requests == 0 and not sample.owned_pages):
            return
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"the server is not idle after {_IDLE_BOUND_S:g} s: {sample.active_requests:g} requests, "
                f"{sample.owned_pages or 0:g} pages owned"
            )
        target.check_alive()
        time.sleep(0.1)


def _reset(target: Target) -> None:
    deadline = time.monotonic() + _RELEASE_BOUND_S
    while target.reset_prefix_cache() is False:
        if time.monotonic() > deadline:
            raise MeasurementError(f"the server refused to reset its prefix cache for {_RELEASE_BOUND_S:g} s")
        time.sleep(0.1)
    sample = _read(target)
    cached = sample.gauges.get("kv_pages_cached", 0.0) if sample else 0.0
    if cached:
        raise MeasurementError(f"{cached:g} pages are still cached after the prefix cache was reset")


def _wait_release(target: Target) -> tuple[MetricsSample | None, float | None]:
    """The first reading with no owned page, or the last one within the bound; and its owned pages."""
    deadline = time.monotonic() + _RELEASE_BOUND_S
    while True:
        sample = _read(target)
        if sample is None or sample.owned_pages is None:
            return sample, None
        if sample.owned_pages == 0 or time.monotonic() > deadline:
            return sample, sample.owned_pages
        time.sleep(0.05)


def _copy_tail(source: Path, start: int, to: Path) -> None:
    if source.is_file():
        with source.open("rb") as file:
            file.seek(start)
            to.write_bytes(file.read())


def _prompt(request: Any) -> Any:
    return list(request.prompt_token_ids) if request.prompt_token_ids is not None else request.prompt
