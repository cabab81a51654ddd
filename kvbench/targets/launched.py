"""Servers that kvbench launches: in a session of their own, with a log, a bound on the wait, and always stopped.

A server is stopped with all its child processes; when kvbench itself is killed, the watchdog stops it.
"""

from __future__ import annotations

import functools
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvbench.common import processes
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.foreign_cpu import ServerProcess
from kvbench.common.ports import free_port
from kvbench.common.text import plural
from kvbench.runs.server_info import EngineSettings, KVRoom, ModelAnswer, ModelRow, Resolved, ServerFacts, ServerInfo
from kvbench.targets.base import ModelFacts, Target
from kvbench.targets.cores import bound_cores, core_words
from kvbench.targets.launch_plan import HOST, Launcher
from kvbench.targets.model_export import ModelFolders, ServedModel, shipped_tokenizer
from kvbench.targets.prompt_texts import texts_of
from kvbench.workload.request_form import DEFAULT_FORM, RequestForm
from kvbench.workload.settings import Settings

_VERSION_TIMEOUT_S = 60.0
_CAPACITY = ("num_pages", "capacity_tokens", "page_size")
# Begins a word, or stands behind = : , " ' and the like; a slash behind a name or a slash is not the root's.
_ABSOLUTE_PATH = re.compile(r"(?<![\w/.~%+-])/(?:[^\s/\"'=:,]+/+)*([^\s/\"'=:,]+)/*")
_EOS_TAKEN_OUT = "the model folder has no end-of-sequence token where the load ignores it, since requests cannot say so"
_EOS_IN_FILE = "an answer may end before its length, since requests cannot say that the end of a sequence is ignored"
_Sign = TypeVar("_Sign")


class ProcessTarget(Target):
    """A server whose process is ours. Subclasses write ``start`` with ``_launched`` and ``_wait_ready``."""

    starts_cold = True
    grace_s = 6.0  # between TERM and KILL
    poll_s = 0.05  # between two checks whether it is ready

    def __init__(self, *, port: int, start_timeout_s: float, form: RequestForm = DEFAULT_FORM) -> None:
        self.port, self.start_timeout_s, self.form = port, start_timeout_s, form
        self._process: processes.Child | None = None
        self._log = Path()
        self._logged_at_start = 0  # bytes of its log when it was ready

    @contextmanager
    def _launched(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str | None] | None = None,
        scratch: Path | None = None,
        preloaded: processes.Starter | None = None,
    ) -> Iterator[None]:
        """Launches the server; an exception inside stops it. ``scratch``: a folder to remove if kvbench is killed.

        ``preloaded``: forks the server instead, if it can.
        """
        self._log, self._logged_at_start = log, 0
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = processes.launch(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                background=True,
                env={"PYTHONUNBUFFERED": "1", **(env or {})},
                preloaded=preloaded,
            )
        self._process.watch(scratch)
        try:
            yield
            self._process.remember()
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self, ready: Callable[[], _Sign | None]) -> _Sign:
        """Returns what ``ready`` finds. MeasurementError with the last lines of a server that ends or is too slow."""
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            self.check()
            if (code := self._process.poll()) is not None:
                raise self._ended_at_start(code)  # another process may answer at its port now
            size = self._log.stat().st_size  # before the call: the server may end after it
            if sign := ready():
                self._logged_at_start = size
                return sign
            time.sleep(self.poll_s)
        raise MeasurementError(
            f"{self.preset.title} was not ready after {self.start_timeout_s:g} s and was stopped; allow more with "
            f"--start-timeout, or read its last lines:\n{self._last_lines()}"
        )

    def _ended_at_start(self, code: int) -> Exception:
        return MeasurementError(
            f"{self.preset.title} {processes.how_it_ended(code)} before it was ready; its last lines:\n"
            f"{self._last_lines()}"
        )

    def _last_lines(self) -> str:
        return processes.last_lines(self._log, after=self._logged_at_start) or "(no output)"

    def server(self) -> ServerProcess:
        process = self._process
        return ServerProcess(None) if process is None else ServerProcess(process.pid, forked=process.forked)

    def bound_cores(self) -> list[int]:
        """The cores that the server's threads are bound to; empty if they are free."""
        return [] if self._process is None else bound_cores(self._process.pid)

    def check_alive(self) -> None:
        if self._process is None:
            raise MeasurementError("the server was not started")
        code = self._process.poll()
        if code is not None:
            how = processes.how_it_ended(code)
            raise MeasurementError(
                f"{self.preset.title} {how}; its last lines since it was ready:\n{self._last_lines()}"
            )

    def stop(self) -> None:
        if self._process is not None:
            processes.stop(self._process, self.grace_s)
            self._process = None


class LaunchedTarget(ProcessTarget):
    """One server of a ``Launcher``: of a preset, or of the user's command."""

    poll_s = 0.2

    def __init__(
        self,
        launcher: Launcher,
        folders: ModelFolders,
        *,
        port: int = 0,
        start_timeout_s: float = 180.0,
        form: RequestForm = DEFAULT_FORM,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__(port=port, start_timeout_s=start_timeout_s, form=form)
        self.launcher, self.folders, self.env = launcher, folders, dict(env or {})
        self.preset, self.grace_s = launcher.preset, launcher.preset.grace_s
        self._settings: Settings = {}
        self._served: ServedModel | None = None
        self._environment: Mapping[str, str | None] = {}

    def start(self, settings: Settings, log: Path) -> None:
        """Launch and wait until it serves. Raises UsageError or MeasurementError."""
        self._settings, self._served = settings, self._model_of(settings)
        port, scratch = free_port(self.port), self.folders.scratch
        command = self.launcher.command(settings, model=str(self._served.path), port=port, scratch=str(scratch))
        self._environment = self.preset.launch_environment(self.launcher.context(settings)) | self.env
        with self._launched(command, log, env=self._environment, scratch=scratch):
            self.exact_texts = self.launcher.passes_model
            folder = self._served.tokenizer if self.exact_texts else shipped_tokenizer()
            has_words = folder is None or (folder / "tokenizer.json").is_file()
            text_of_ids = texts_of(folder) if has_words else None
            Target.__init__(self, f"http://{HOST}:{port}", preset=self.preset, text_of_ids=text_of_ids)
            self._wait_ready(self._serves)
            self._learn_model(self._served, settings)
            self.learn_template()
            self._check_device(settings)

    def _serves(self) -> bool:
        path = self.preset.models_path
        return self.healthy() and (path is None or bool(self.get_json(path)))

    def _model_of(self, settings: Settings) -> ServedModel:
        """The model's folder; for a command without {model}, what is known of the workload's model."""
        if self.launcher.passes_model:
            no_eos = not self.dialect.ignore_eos
            return self.folders.get(settings, drop_eos=no_eos, model_format=self.preset.model_format)
        capacity = self.launcher.arithmetic(settings)
        return ServedModel(Path(str(settings.get("model", ""))), None, capacity.vocab_size, capacity.max_model_len)

    def _learn_model(self, served: ServedModel, settings: Settings) -> None:
        """The model's name from the server; its sizes from its config, or else from the server."""
        row = self.models()[0] if self.preset.models_path else ModelRow(id=str(served.path))
        own_vocab, own_length = self.told_sizes(row)
        lengths = (settings.get("max_model_len"), served.max_positions, own_length)
        length = min((int(length) for length in lengths if length), default=None)
        vocab = served.vocab_size or own_vocab
        if length is None or not vocab:
            raise MeasurementError(f"neither the model's config nor {self.preset.title} tells vocabulary and length")
        self.model = ModelFacts(row.id, int(vocab), length)

    def _check_device(self, settings: Settings) -> None:
        """Raises MeasurementError if the server does not run on the device that the workload asks for."""
        wanted, pattern = settings.get("device"), self.preset.device_pattern
        if pattern is None or wanted not in ("cpu", "cuda"):
            return
        device = re.search(pattern, str(super().server_info().to_json()))
        if device and device[1] != wanted:
            raise MeasurementError(
                f"{self.preset.title} runs on {device[1]}, and the workload asks for {wanted}: take a build for it "
                "(--target-python), or set -o engine.device=auto"
            )

    def version(self) -> str | None:
        """The version that the server's API gives, else that of its package."""
        program, module = self.launcher.program, self.preset.module
        return super().version() or (package_version(program, module) if program and module else None)

    def server_info(self) -> ServerInfo:
        """Returns what the launch gave the server and what it says of itself, in the shape of our own /server_info."""
        preset, version, cores, capacity = self.preset, self.version(), self.bound_cores(), self._capacity()
        pages = {} if capacity.page_size is None else {"page_size": capacity.page_size}
        try:
            engine = EngineSettings.read(self.launcher.passed_on(self._settings) | pages)
        except ValueError as error:
            raise UsageError(f"the workload's engine.{error}") from None
        threads = self._threads(engine)
        model = ModelAnswer(name=self._model_name(), vocab_size=self.model.vocab_size)
        end_quirk = _EOS_IN_FILE if preset.model_format == "gguf" else _EOS_TAKEN_OUT
        return ServerInfo(
            engine=engine,
            model=model.model_copy(update=self._served.facts.fields() if self._served else {}),
            resolved=Resolved(
                device=engine.device if engine.device != "auto" else None,
                dtype=engine.dtype,
                num_threads=min(filter(None, (threads, len(cores))), default=None),
                bound_cores=tuple(cores) or None,
            ),
            capacity=capacity,
            versions={preset.name: version} if version else {},
            server=ServerFacts(
                kind=preset.name,
                title=preset.title,
                command=self._shown_command(),
                environment={name: _shown(value) for name, value in self._environment.items() if value is not None},
                quirks=preset.quirks_at(self.dialect.endpoint) + (() if self.dialect.ignore_eos else (end_quirk,)),
                notes=_binding_notes(preset.title, cores, threads),
            ),
        )

    def _capacity(self) -> KVRoom:
        """The room of the KV cache, by /metrics and by the log of a server that tells it there only."""
        try:
            sample = self.metrics()
        except MeasurementError:
            sample = None
        facts = sample.facts.items() if sample else ()
        sizes = {name: int(value) for name, value in facts if name in _CAPACITY}
        if (pattern := self.preset.kv_log_pattern) is None:
            return KVRoom(**sizes)
        log = self._log.read_bytes()[: self._logged_at_start].decode("utf-8", "replace")
        if not (caches := list(re.finditer(pattern, log))):
            return KVRoom(**sizes)
        types = dict.fromkeys(kind for cache in caches for kind in (cache["K"], cache["V"]))
        logged = KVRoom(
            capacity_tokens=max(int(cache["tokens"]) for cache in caches),  # layers with a window have fewer
            kv_bytes=round(sum(float(cache["MiB"]) for cache in caches) * 2**20),
            kv_type=" and ".join(types),
        )
        return logged.model_copy(update=sizes)

    def _model_name(self) -> str:
        """The model's name in the workload, not that of its exported folder; else the server's name."""
        given = str(self._settings.get("model", "")) if self.launcher.passes_model else ""
        return Path(given).name.removesuffix(".json") or self.model.name

    def _threads(self, engine: EngineSettings) -> int | None:
        """The compute threads that the launch asks for; None where it says nothing of them."""
        variable = self._environment.get("OMP_NUM_THREADS") or ""
        return engine.num_threads or (int(variable) if variable.isdigit() else None)

    def _shown_command(self) -> list[str]:
        """Returns the launch command with names in place of this run's model folder, scratch folder and port."""
        words = self.launcher.command(self._settings, model="MODEL", port="PORT", scratch="SCRATCH")
        return [_shown(word) for word in words]

    def reset_prefix_cache(self) -> bool | None:
        """Empties the cache as ``Target`` does; one that the launch switched off is empty.

        Slots (llama.cpp) are emptied even so: the KV that each holds of its last request makes later ones slower.
        """
        off = self.launcher.cache_is_off(self._settings)
        if off and "{slot}" not in (self.preset.reset_path or ""):
            return True
        emptied = super().reset_prefix_cache()
        return True if off and emptied is None else emptied


def _binding_notes(title: str, cores: Sequence[int], threads: int | None) -> list[str]:
    """A note if the server is bound to fewer cores than the launch asks for threads."""
    if not cores or threads is None or len(cores) >= threads:
        return []
    return [f"{title} has bound its threads to {core_words(cores)}, and was asked for {plural(threads, 'thread')}"]


@functools.cache
def package_version(python: str, package: str) -> str | None:
    """The version of a package of another Python."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _shown(word: str) -> str:
    """A word of a record that others may read: absolute paths lose their folders, URLs stay."""
    return _ABSOLUTE_PATH.sub(r"\1", word)
