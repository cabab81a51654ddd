"""The built-in engine as a target: launches ``python -m engine.server`` and watches it.

What it takes from ``engine`` it imports when called, so that ``kvbench --help`` stays quick.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench import processes
from kvbench.contention import Server
from kvbench.errors import MeasurementError, UsageError
from kvbench.targets.base import HttpTarget, ModelFacts, reason_of
from kvbench.watchdog import Watchdog
from kvbench.workload import default_profile

BUILTIN_COMMAND = (sys.executable, "-m", "engine.server")
_READY = re.compile(rb"^ready (http://\S+)\s*$", re.MULTILINE)


class ServerRefusedError(UsageError):
    """The server itself said at start that its settings cannot work (exit code 2)."""


class BuiltinTarget(HttpTarget):
    """One server process. ``command`` may be another server that takes the same flags and prints ``ready URL``."""

    starts_cold = True

    def __init__(
        self,
        *,
        command: Sequence[str] = BUILTIN_COMMAND,
        port: int = 0,
        start_timeout_s: float = 180.0,
    ) -> None:
        self.command = tuple(command)
        self.port = port
        self.start_timeout_s = start_timeout_s
        self._process: processes.Child | None = None
        self._watchdog: Watchdog | None = None
        self._log: Path | None = None

    def start(self, settings: Mapping[str, Any], log: Path) -> None:
        """Launch and wait until it serves. Raises ServerRefusedError (bad settings) or MeasurementError."""
        from engine.server.arguments import command_line

        if self.port:
            require_free_port("127.0.0.1", self.port)
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = processes.launch(
                [*self.command, *command_line(settings), "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=file,
                stderr=subprocess.STDOUT,
                background=True,
                env={"PYTHONUNBUFFERED": "1"},
            )
        self._watchdog = Watchdog(self._process.pid, self._process.mark)
        try:
            url = self._wait_ready(log)
            super().__init__(url)
            try:
                self._learn_model()
            except MeasurementError as error:
                raise MeasurementError(reason_of(self, error)) from None
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self, log: Path) -> str:
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            code = self._process.poll()
            if found := _READY.search(log.read_bytes()):
                return found[1].decode()
            if code == 2:
                raise ServerRefusedError(_last_sentence(log) or "the server refused its settings and did not say why")
            if code is not None:
                raise MeasurementError(
                    f"the server ended with exit code {code} before it was ready; its last lines:\n"
                    f"{processes.last_lines(log) or '(no output)'}"
                )
            time.sleep(0.05)
        raise MeasurementError(
            f"the server was not ready after {self.start_timeout_s:g} s and was stopped; allow more with "
            f"--start-timeout, or read its last lines:\n{processes.last_lines(log) or '(no output)'}"
        )

    def _learn_model(self) -> None:
        info = self.server_info() or {}
        self.model = model_facts(info, self.models()[0])

    def server(self) -> Server:
        return Server(None if self._process is None else self._process.pid)

    def check_alive(self) -> None:
        if self._process is None:
            raise MeasurementError("the server was not started")
        code = self._process.poll()
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            assert self._log is not None
            raise MeasurementError(
                f"the server {how}; its last lines:\n{processes.last_lines(self._log) or '(no output)'}"
            )

    def stop(self) -> None:
        if self._process is not None:
            processes.stop(self._process)
            self._process = None
        if self._watchdog is not None:
            self._watchdog.release()
            self._watchdog = None
        if hasattr(self, "_http"):
            self.close()


def model_facts(info: Mapping[str, Any], row: Mapping[str, Any]) -> ModelFacts:
    """From /server_info, else from the row of /v1/models. Raises MeasurementError when a size is not told."""
    model = info.get("model") or {}
    length = row.get("max_model_len") or (info.get("engine") or {}).get("max_model_len")
    vocab = model.get("vocab_size")
    if not length or not vocab:
        raise MeasurementError("the server tells neither vocab_size nor max_model_len in /server_info")
    return ModelFacts(str(row["id"]), int(vocab), int(length))


def require_free_port(host: str, port: int) -> None:
    """Raises UsageError when something listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"port {port} on {host} cannot be used ({error.strerror}): stop what listens there, or leave --port "
                "out to get a free one"
            ) from None


def _last_sentence(log: Path) -> str:
    lines = processes.last_lines(log, count=1)
    return re.sub(r"^(?:[\w.]+: )?(?:error|Error): ", "", lines)


def check_configuration(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the built-in engine would make of ``settings``, without torch and without launching anything.

    Returns kv_budget_bytes, bytes_per_token (scale_bytes_per_token of it scales), page_size (contiguous: slots of a
    reservation of max_model_len), num_pages, capacity_tokens, page_table_bytes, max_model_len,
    max_concurrency_at_max_len, swap_space_bytes, swap_tokens and vocab_size; sizes are left out where only the machine
    can tell them (a GPU's free memory). Raises ValueError with the engine's sentence.
    """
    from engine.config import DEFAULT_CPU_BUDGET, EngineConfig
    from engine.kv_budget import capacity_of
    from engine.model_spec import find_model

    known_names = [f.name for f in dataclasses.fields(EngineConfig)]
    for name in settings:
        if name not in known_names and (near := difflib.get_close_matches(name, known_names, n=1)):
            raise ValueError(f"{name!r} is not an engine setting: did you mean {near[0]!r}?")
    config = EngineConfig.from_mapping(settings)
    spec = find_model(config.model, config.load_format)
    config = config.check_against_model(spec.max_positions)
    known: dict[str, Any] = {"max_model_len": config.max_model_len, "vocab_size": spec.text_config.get("vocab_size")}
    on_cpu = config.device == "cpu" or (config.device == "auto" and default_profile() == "cpu")
    budget = config.kv_budget or (DEFAULT_CPU_BUDGET if on_cpu else None)
    if budget is None:
        return known
    dtype = config.dtype if config.dtype != "auto" else "float32" if on_cpu else spec.default_dtype
    capacity = capacity_of(config, spec.kv_shape(dtype), budget)
    assert config.max_model_len is not None
    return known | {
        "kv_budget_bytes": capacity.budget_bytes,
        "bytes_per_token": capacity.bytes_per_slot,
        "scale_bytes_per_token": capacity.scale_bytes_per_slot,
        "page_size": capacity.page_size,
        "num_pages": capacity.num_pages,
        "capacity_tokens": capacity.num_slots,
        "page_table_bytes": capacity.page_table_bytes,
        "swap_space_bytes": capacity.swap_space_bytes,
        "swap_tokens": capacity.host_slots,
        "max_concurrency_at_max_len": capacity.max_concurrency(config.max_model_len),
    }
