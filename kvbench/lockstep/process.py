"""A process of engines that compute when they are told to (``python -m kvbench_engine.lockstep``), over a pipe.

kvbench speaks protocol 2 (engine/lockstep.py) and protocol 3 (docs/engines.md). A git ref whose engine speaks another
one, or none, cannot be measured in lockstep.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from kvbench.common import processes
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.text import listing
from kvbench.requests.request import RequestSpec
from kvbench.runs.results import Capacity
from kvbench.runs.server_info import ServerInfo
from kvbench.targets.base import SteppedLaunch, contradiction
from kvbench.workload.load_section import LoadConfig
from kvbench.workload.settings import Settings

OWN_PROTOCOL = 2  # of the built-in engine
PROTOCOLS = (OWN_PROTOCOL, 3)  # 3: of adapters
OPEN_LIMIT_S = 180.0  # imports, weights, warm-up
TURN_LIMIT_S = 300.0  # a few steps; on a CPU one with a long prompt may take many seconds
_SAYS_PROTOCOL_S = 60.0
_SEND_LIMIT_S = 60.0
_CHECK_S = 0.5


class EngineFailedError(MeasurementError):
    """An engine's ``process`` died, did not answer in time, or could not do what it was told."""

    def __init__(self, text: str, process: EngineProcess):
        super().__init__(text)
        self.process = process


class EngineRefusedError(EngineFailedError):
    """An engine answered that it cannot do what it was told."""


class EngineProcess:
    """One process, as a context manager whose end stops it. ``env``, ``preloaded``: as for ``processes.launch``.

    ``scratch``: a folder to remove if kvbench is killed. ``check``: called at each answer and twice a second between
    them; may raise to end the measurement.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str | None] | None = None,
        check: Callable[[], None] = lambda: None,
        preloaded: processes.Starter | None = None,
        scratch: Path | None = None,
    ) -> None:
        self._log, self.check, self._buffer, self._stopped = log, check, b"", False
        self.options: frozenset[str] = frozenset()  # that its engines let a request have, once it has greeted
        self.tells: frozenset[str] = frozenset()  # what results tell besides: cached_tokens, metrics
        self.protocol, self.greedy_only = 0, False  # whether it decodes greedily, and to the length
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._process = processes.launch(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=env,
                preloaded=preloaded,
            )
        self._process.watch(scratch)

    @classmethod
    def of(cls, launch: SteppedLaunch, log: Path, **how: Any) -> Self:
        return cls(launch.command, log, env=launch.env, scratch=launch.scratch, **how)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._stopped:
            return
        self._stopped = True
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        processes.stop(self._process, grace_s=0.0)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def forked(self) -> bool:
        return self._process.forked

    def memory(self) -> int:
        """Returns the bytes that its processes share with no other."""
        total = 0
        for pid in (self._process.pid, *(member.pid for member in self._process.remember())):
            with contextlib.suppress(psutil.Error):  # one that has ended meanwhile
                memory = psutil.Process(pid).memory_info()
                total += memory.rss - getattr(memory, "shared", 0)  # of Linux
        return total

    def fileno(self) -> int:
        """Returns the pipe of its answers, which ``select`` waits for."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def greet(self) -> None:
        """Waits for its first line. Raises EngineFailedError if it speaks another protocol."""
        greeting = self.receive(_SAYS_PROTOCOL_S)
        if (protocol := greeting.get("protocol")) not in PROTOCOLS:
            spoken = listing(list(map(str, PROTOCOLS)))
            raise EngineFailedError(f"it speaks lockstep protocol {protocol!r}, and this kvbench {spoken}", self)
        self.options, self.tells = (frozenset(greeting.get(name, ())) for name in ("options", "tells"))
        self.protocol, self.greedy_only = protocol, bool(greeting.get("greedy_only"))

    def stay_on(self, cores: Collection[int]) -> None:
        """Keeps all its threads on ``cores``."""
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
                os.sched_setaffinity(int(thread.name), cores)

    def send(self, **command: Any) -> None:
        """Writes a command; ``receive`` waits for its answer, so that several processes work at the same time."""
        assert self._process.stdin is not None
        pipe, left = self._process.stdin.fileno(), memoryview(json.dumps(command).encode() + b"\n")
        deadline = time.monotonic() + _SEND_LIMIT_S
        while left:
            if time.monotonic() > deadline:
                raise EngineFailedError(f"the engine took no command within {_SEND_LIMIT_S:g} s", self)
            if not select.select([], [pipe], [], _CHECK_S)[1]:
                self.check()
                continue
            try:
                left = left[os.write(pipe, left[: select.PIPE_BUF]) :]  # so much never blocks where select says so
            except BrokenPipeError:
                raise self._has_ended() from None

    def receive(self, limit_s: float) -> dict[str, Any]:
        """The next answer. Raises EngineFailedError."""
        self.check()
        deadline, pipe = time.monotonic() + limit_s, self.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineFailedError(f"the engine did not answer within {limit_s:g} s", self)
            if not select.select([pipe], [], [], min(left, _CHECK_S))[0]:
                self.check()
                continue
            got = os.read(pipe, 1 << 20)
            if not got:
                raise self._has_ended()
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
            error = answer.get("error")
        except (ValueError, AttributeError):
            raise EngineFailedError(f"the engine's process wrote {line[:80]!r} instead of an answer", self) from None
        if error is not None:
            raise EngineRefusedError(error, self)
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        self.send(**command)
        return self.receive(TURN_LIMIT_S)

    def _has_ended(self) -> EngineFailedError:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return EngineFailedError("the engine's process closed its output", self)
        how, lines = processes.how_it_ended(code), processes.last_lines(self._log)
        return EngineFailedError(f"the engine's process {how}; its last lines:\n{lines}", self)


def wait_for_answers(processes: Sequence[EngineProcess], limit_s: float) -> Sequence[EngineProcess]:
    """Waits until at least one of the processes has answered, or ended; returns those. Raises EngineFailedError."""
    if len(processes) == 1:
        return processes  # its ``receive`` waits
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        processes[0].check()
        if readable := select.select(processes, [], [], _CHECK_S)[0]:
            return readable
    raise EngineFailedError(f"the engine did not answer within {limit_s:g} s", processes[0])


def open_all(
    engines: Sequence[tuple[EngineProcess, str, Settings]], limit_s: float = OPEN_LIMIT_S
) -> list[dict[str, Any]]:
    """Builds each (process, name, settings), all processes at once; returns each engine's description of itself.

    Raises UsageError for settings that an engine refuses, EngineFailedError where one fails.
    """
    answers = []
    for answer in open_each(engines, limit_s):
        if isinstance(answer, Exception):
            raise answer
        answers.append(answer)
    return answers


Opened = dict[str, Any] | UsageError | EngineFailedError  # what an engine says of itself, or why it is not open


def open_each(engines: Sequence[tuple[EngineProcess, str, Settings]], limit_s: float) -> list[Opened]:
    """Builds each (process, name, settings), all processes at once; returns what each says of itself, or why not."""
    for process, name, settings in engines:
        process.send(do="open", name=name, settings=dict(settings))
    answers: list[Opened] = []
    for process, name, _ in engines:  # every answer is read: the next one of its process is that of another command
        try:
            answers.append(process.receive(limit_s))
        except EngineRefusedError as error:
            answers.append(UsageError(f"the engine of {name} refused its settings: {error}"))
            answers[-1].__cause__ = error
        except EngineFailedError as error:
            answers.append(error)
    return answers


def read_info(
    process: EngineProcess, settings: Settings, capacity: Capacity, answer: Mapping[str, Any]
) -> ServerInfo:
    """Reads an engine's description of itself. Raises EngineFailedError where it cannot be that of ``settings``."""
    try:
        info = ServerInfo.read(answer)
    except ValueError as error:
        raise EngineFailedError(f"its description of itself is wrong ({error})", process) from None
    if why := contradiction(settings, capacity, info):
        raise EngineFailedError(why, process)
    return info


def stay_on_same_cores(
    engines: Mapping[EngineProcess, Settings], infos: Iterable[ServerInfo], rng: random.Random
) -> None:
    """Keeps all engines on as many cores as one has threads, drawn by ``rng``.

    They stay where they are if they use all cores, or a GPU, or the system binds no process (macOS).
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    threads = max(settings.get("num_threads") or sys.maxsize for settings in engines.values())
    cores = sorted(os.sched_getaffinity(0))
    if threads >= len(cores) or any(info.resolved.device != "cpu" for info in infos):
        return
    drawn = rng.sample(cores, threads)
    for process in engines:
        process.stay_on(drawn)


def options_of(requests: Iterable[RequestSpec]) -> set[str]:
    """Returns the names of the options that requests have."""
    options = set[str]()
    for request in requests:
        options.update(request.answers, ["priority"] if request.priority else ())
    return options


def why_not_stepped(process: EngineProcess, load: LoadConfig, options: Collection[str] = ()) -> str | None:
    """Greets an engine; returns why it cannot be stepped with these ``options`` of requests, None if it can."""
    try:
        process.greet()
    except MeasurementError as error:
        return str(error)
    own = {"priority"} if process.protocol == OWN_PROTOCOL else set()  # which the built-in engine takes without a word
    if unknown := sorted(set(options) - process.options - own):
        return f"its requests cannot have {listing(unknown)}: another engine, or an older kvbench"
    if process.greedy_only and (load.temperature or not load.ignore_eos):
        return "it decodes greedily and to the length: set load.temperature=0 and load.ignore_eos=true"
    return None
