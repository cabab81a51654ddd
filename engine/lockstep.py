"""Engines that compute steps on a controller's command: ``python -m kvbench_engine.lockstep``.

Commands come on stdin and answers go to stdout, one JSON object a line; the process ends with its stdin. Its first line
is ``{"protocol": 2, "options": [...], "tells": [...]}``: the options that a request may have, and what results tell
besides. Protocol 3, for other engines, is the same with one engine a process (docs/engines.md). A command that cannot
be done is answered with ``{"error": sentence}``.

    {"do": "open", "name", "settings"}
        Builds an engine. Engines of this process that need the same weights share them.
        -> describe_engine()
    {"do": "load", "name", "requests": [[prompt ids, max_tokens, arrival_s or null, priority, options], ...],
     "concurrency": users or null, "temperature", "ignore_eos", "keep_cache"}
        Gives an idle engine its next requests, and sets its clock to 0. ``options``: a mapping such as
        {"n": 4}, left out where a request has none. -> {"metrics": Prometheus text}
    {"do": "turn", "name", "steps": most steps}
        -> {"steps": [[seconds, prefill tokens, decode tokens, output tokens], ...], "clock": seconds,
            "ended": whether all is done}
    {"do": "result", "name"}
        -> {"requests": [[t0, ts, token times, tokens at each, cached tokens, finish reason, token ids, sequences],
            ...], "metrics": Prometheus text}
        ``sequences``: of a request with options, which sequence each of the token times belongs to. The token ids are
        those of sequence 0, then of sequence 1 and so on.

All times are the engine's own [s]: its clock is the sum of its steps' durations, and of its waits for the next arrival.
With ``concurrency`` N, N users send one request at a time, each the next of the list when all sequences of its last one
have ended; without, a request is sent at its ``arrival_s``. A step's duration includes adding the requests that are
due. On CUDA a turn ends when the device is done, and with asynchronous scheduling a step's tokens are those of the
step before it.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from kvbench_engine.config import EngineConfig
from kvbench_engine.startup import no_garbage_collection, only_what_serving_needs, set_spin_count

if TYPE_CHECKING:
    from kvbench_engine.counters import StepRecord
    from kvbench_engine.engine import Engine
    from kvbench_engine.model.loader import LoadedModel
    from kvbench_engine.sequence import TokenOutput

PROTOCOL = 2
OPTIONS = ("n", "best_of", "beam_width")
"""Of a request: those of ``SamplingParams`` that say how many sequences it draws and returns."""
_OF_THE_WEIGHTS = ("model", "load_format", "seed", "dtype", "device", "latent_kv", "kernel_backend", "torch_compile")


@dataclass
class _Sent:
    """A request that was sent: when it was due and when it was sent [s], and what has come back.

    ``outputs``: engine time [s] of each, with its tokens. ``ends``: the last output of each sequence that has ended.
    """

    due: float
    at: float
    n: int = 1
    outputs: list[tuple[float, TokenOutput]] = field(default_factory=list)
    ends: dict[int, TokenOutput] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return len(self.ends) == self.n

    def times(self, sequence: int) -> list[float]:
        """Times of the tokens of one sequence [s]."""
        return [at for at, output in self.outputs if output.index == sequence]

    def row(self) -> list[Any]:
        """The request's row of a result, without ``sequences``."""
        reasons = [str(end.finish_reason) for end in self.ends.values()]  # in order: abort, error, length, stop
        by_sequence = sorted(self.outputs, key=lambda entry: entry[1].index)
        return [
            self.due,
            self.at,
            [at for at, _ in self.outputs],
            [len(output.token_ids) for _, output in self.outputs],
            max((end.num_cached_tokens for end in self.ends.values()), default=0),
            min(reasons) if self.ended else None,
            [token for _, output in by_sequence for token in output.token_ids],
        ]


class SteppedEngine:
    """One engine with its clock [s] and the requests of its present load."""

    def __init__(self, engine: Engine):
        from kvbench_engine.server.metrics import ServerMetrics

        self.engine = engine
        self.metrics = ServerMetrics(engine.config, engine.capacity, engine.stats(), (os.getpid(),))
        self.clock = 0.0
        self._requests: Sequence[Sequence[Any]] = ()
        self._record: StepRecord | None = None
        engine.on_step = self._note_step

    def _note_step(self, record: StepRecord) -> None:
        self._record = record

    def load(
        self,
        requests: Sequence[Sequence[Any]],
        concurrency: int | None,
        temperature: float,
        ignore_eos: bool,
        keep_cache: bool,
    ) -> dict[str, Any]:
        """Starts a load. Raises ValueError if the last one has not ended."""
        if self.engine.has_work():
            raise ValueError("the engine still computes its last load: let it end first")
        for *_, options in (request for request in requests if len(request) > 4):
            if unknown := set(options) - set(OPTIONS):
                raise ValueError(f"a request has unknown options {sorted(unknown)}: use {', '.join(OPTIONS)}")
        if not keep_cache:
            self.engine.reset_prefix_cache()
        self.clock = 0.0
        self._requests, self._sampling = requests, {"temperature": temperature, "ignore_eos": ignore_eos}
        self._next = 0
        self._free_users = concurrency
        self._sent: list[_Sent] = []
        return {"metrics": self._exposition()}

    @property
    def ended(self) -> bool:
        return self._next == len(self._requests) and not self.engine.has_work()

    def turn(self, most: int) -> dict[str, Any]:
        """Computes up to ``most`` steps."""
        steps: list[tuple[float, int, int, int]] = []
        while len(steps) < most and not self.ended:
            if not self.engine.has_work() and self._free_users is None:  # idle until the next arrival
                self.clock = max(self.clock, self._requests[self._next][2])
            started = time.perf_counter()
            self._add_due()
            self._record = None
            outputs = self.engine.step()
            if len(steps) == most - 1 or self.ended:
                self._wait_for_device()
            seconds = time.perf_counter() - started
            self.clock += seconds
            record = self._record
            work = (record.prefill_tokens, record.decode_tokens) if record is not None else (0, 0)
            steps.append((seconds, *work, self._take(outputs)))
        return {"steps": steps, "clock": self.clock, "ended": self.ended}

    def _add_due(self) -> None:
        from kvbench_engine.sequence import Request, SamplingParams

        while self._next < len(self._requests):
            prompt, max_tokens, arrival, priority, *options = self._requests[self._next]
            if self._free_users is None:
                if arrival > self.clock:
                    return
            elif not self._free_users:
                return
            else:
                self._free_users -= 1
            params = SamplingParams(max_tokens=max_tokens, **self._sampling, **(options[0] if options else {}))
            self.engine.add_request(Request(str(self._next), tuple(prompt), params, self.clock, priority))
            due = self.clock if self._free_users is not None else arrival
            self._sent.append(_Sent(due, self.clock, params.n))
            self._next += 1

    def _take(self, outputs: Sequence[TokenOutput]) -> int:
        """Notes new tokens as of now; returns how many there are."""
        for output in outputs:
            request = self._sent[int(output.request_id)]
            request.outputs.append((self.clock, output))
            if output.finish_reason is not None:
                request.ends[output.index] = output
                self._observe(request, output.index)
                if self._free_users is not None:
                    self._free_users += request.ended
        return sum(len(output.token_ids) for output in outputs)

    def _observe(self, request: _Sent, sequence: int) -> None:
        """Counts a finished sequence in the metrics, as the server does."""
        times = request.times(sequence)
        self.metrics.ttft.observe(times[0] - request.due)
        self.metrics.e2e.observe(times[-1] - request.due)
        for before, after in itertools.pairwise(times):
            self.metrics.itl.observe(after - before)

    def _wait_for_device(self) -> None:
        device = getattr(self.engine.executor, "device", None)
        if device is not None and device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)

    def _exposition(self) -> str:
        return self.metrics.exposition(self.engine.stats()).decode()

    def result(self) -> dict[str, Any]:
        """Every request that was sent, in the order of the load."""
        rows = [request.row() for request in self._sent]
        for row, request, (*_, last) in zip(rows, self._sent, self._requests, strict=False):
            if isinstance(last, Mapping):
                row.append([output.index for _, output in request.outputs])
        return {"requests": rows, "metrics": self._exposition()}


class Commands:
    """Does what the lines of stdin say."""

    def __init__(self) -> None:
        self.engines: dict[str, SteppedEngine] = {}
        self._weights: dict[tuple[Any, ...], LoadedModel] = {}
        self._num_threads: int | None = None

    def do(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one command. Raises ValueError for one that cannot be done."""
        what, rest = command["do"], {key: value for key, value in command.items() if key not in ("do", "name")}
        if what == "open":
            return self._open(command["name"], **rest)
        if command["name"] not in self.engines:
            raise ValueError(f"no engine is called {command['name']!r}: open it first")
        engine = self.engines[command["name"]]
        if what == "load":
            return engine.load(**rest)
        if what == "turn":
            return engine.turn(rest["steps"])
        if what == "result":
            return engine.result()
        raise ValueError(f"there is no command {what!r}: protocol {PROTOCOL} has open, load, turn and result")

    def _open(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        config = EngineConfig.from_mapping(settings)
        set_spin_count()
        with no_garbage_collection(), only_what_serving_needs(compiles=True):  # another engine's model may
            import torch

            from kvbench_engine.build import assemble_engine, cpu_threads
            from kvbench_engine.describe import describe_engine

            if config.device != "cuda":
                threads = cpu_threads(config)
                if self._num_threads not in (None, threads):
                    raise ValueError(
                        f"num_threads {threads} differs from the {self._num_threads} of the engines before it: engines "
                        "of one process share their threads, so give it a process of its own"
                    )
                self._num_threads = threads
                torch.set_num_threads(threads)
            try:
                self.engines[name] = SteppedEngine(assemble_engine(config, self._loaded(config)))
            except torch.OutOfMemoryError as error:
                raise MemoryError(f"the device has no room for it: {error}") from None
        return describe_engine(self.engines[name].engine)

    def _loaded(self, config: EngineConfig) -> LoadedModel:
        from kvbench_engine.model.loader import load_model, serve_another

        key = (*(getattr(config, setting) for setting in _OF_THE_WEIGHTS), config.fused_layers is not False)
        if key in self._weights and (shared := serve_another(self._weights[key], config)):
            return shared
        loaded = load_model(config)
        self._weights.setdefault(key, loaded)
        return loaded


def serve(commands: TextIO, answers: TextIO) -> None:
    """Answers commands until there are no more."""

    def write(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    write({"protocol": PROTOCOL, "options": OPTIONS, "tells": ("cached_tokens", "metrics")})
    done = Commands()
    for line in commands:
        try:
            write(done.do(json.loads(line)))
        except (ValueError, MemoryError) as error:
            write({"error": str(error) or type(error).__name__})


def _shift_memory() -> tuple[mmap.mmap, bytearray]:
    """Moves what is allocated next by a random number of pages, as the kernel does for new programs.

    Forks of one process would otherwise share its layout, and each launch must have one of its own.
    """
    rng = random.SystemRandom()
    return mmap.mmap(-1, mmap.PAGESIZE * rng.randint(1, 4096)), bytearray(mmap.PAGESIZE * rng.randint(1, 30))


def main() -> None:
    _kept = _shift_memory()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
