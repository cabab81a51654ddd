"""Starts a server: load, listen, say ``ready``, stop on a signal. ``python -m kvbench_engine.server``"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

from kvbench_engine.async_engine import AsyncEngine, EngineClient, EngineThread
from kvbench_engine.config import EngineConfig, runs_on_cpu
from kvbench_engine.engine import Engine
from kvbench_engine.engine_process import ProcessEngine, start_process
from kvbench_engine.model.spec import ModelInfo, find_model
from kvbench_engine.planning import plan_engine, window_note
from kvbench_engine.server.arguments import ServeOptions, build_parser, options_of
from kvbench_engine.server.step_log import StepLog
from kvbench_engine.server.tokenizer import ServerTokenizer, check_tokenizer_folder, load_tokenizer
from kvbench_engine.startup import (
    SWITCH_SECONDS,
    no_garbage_collection,
    only_what_serving_needs,
    set_spin_count,
    without_torch,
)


def reserve_socket(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet, so that nobody connects before the model is there.

    Raises:
        ValueError: the address cannot be bound; one sentence.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ValueError(_cannot_listen(host, port, error)) from None
    sock.set_inheritable(False)
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    return f"cannot listen on {host}:{port} ({reason}): choose another --port, 0 for any free one, or another --host"


def serve(engine: EngineClient, tokenizer: ServerTokenizer, options: ServeOptions, sock: socket.socket) -> int:
    """Serve until a signal comes.

    Raises:
        ValueError: the port has been taken meanwhile.
    """
    from kvbench_engine.server.http import make_server

    port = sock.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.host, options.host)
    server = make_server(engine, tokenizer, options, lambda: print(f"ready http://{shown}:{port}", flush=True))
    try:
        server.run(sockets=[sock])
    except OSError as error:
        raise ValueError(_cannot_listen(options.host, port, error)) from None
    return 0


@contextlib.contextmanager
def step_log(options: ServeOptions) -> Iterator[StepLog | None]:
    """The step log, opened before the model is loaded; None without --step-log. Raises ValueError."""
    if options.step_log is None:
        yield None
        return
    log = StepLog(options.step_log)
    try:
        yield log
    finally:
        log.close()


def planned_length(config: EngineConfig) -> int | None:
    """Checks ``config`` without torch, whose import takes seconds; returns the planned max_model_len.

    None: that is known after the load. Raises ValueError if something is missing or does not fit.
    """
    check_tokenizer_folder(config)
    spec = find_model(config.model, config.load_format)
    if spec.attention_shape() is None:  # a config with other keys: only the loaded model tells its KV
        config.check_against_model(spec.max_positions)
        return None
    return plan_engine(config, on_cpu=runs_on_cpu(config.device), may_lower=True).config.max_model_len


def load(config: EngineConfig) -> Engine:
    """Build the engine and print each phase of its load to stderr. Raises ValueError as ``build_engine`` does."""
    expected = planned_length(config)
    _say_lowered(config, expected)

    def tell(phase: str) -> None:
        print(f"loading {config.model}: {phase}", file=sys.stderr, flush=True)

    tell("importing torch")
    set_spin_count()
    with no_garbage_collection(), only_what_serving_needs(config.torch_compile):
        from kvbench_engine.build import build_engine

        engine = build_engine(config, tell)
    if engine.config.max_model_len != expected:
        _say_lowered(config, engine.config.max_model_len)
    if note := window_note(find_model(config.model, config.load_format), engine.config.max_model_len):
        print(note, file=sys.stderr, flush=True)
    return engine


def _say_lowered(config: EngineConfig, length: int | None) -> None:
    """Prints that ``length`` is less than the model's own limit, where the user has given none."""
    limit = find_model(config.model, config.load_format).max_positions
    if config.max_model_len is None and length is not None and limit is not None and length < limit:
        print(
            f"max_model_len is {length} tokens, the longest that the KV budget holds; the model's own limit is "
            f"{limit}: raise --kv-budget for longer ones",
            file=sys.stderr,
            flush=True,
        )


LoadEngine = Callable[[EngineConfig], Engine]
LoadTokenizer = Callable[[EngineConfig, ModelInfo], ServerTokenizer]


def run(args: argparse.Namespace, load: LoadEngine = load, load_tokenizer: LoadTokenizer = load_tokenizer) -> int:
    """Run the command with its parsed arguments; the exit code."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        config, options = options_of(args)
        serve_it = run_in_two_processes if in_two_processes(config, options) else run_in_one_process
        with reserve_socket(options.host, options.port) as sock:
            return serve_it(config, options, sock, load, load_tokenizer)
    except (ValueError, ChildProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 4
    except KeyboardInterrupt:
        print("interrupted while loading", file=sys.stderr)
        return 130


def in_two_processes(config: EngineConfig, options: ServeOptions) -> bool:
    """Tests whether the engine gets a process of its own: by default on a GPU, where host time is scarce."""
    wanted = options.frontend_multiprocessing
    return not runs_on_cpu(config.device) if wanted is None else wanted


def run_in_one_process(
    config: EngineConfig, options: ServeOptions, sock: socket.socket, load: LoadEngine, load_tokenizer: LoadTokenizer
) -> int:
    """Serve with the engine on a thread of this process. Raises ValueError."""
    thread = EngineThread()

    def load_both() -> tuple[Engine, ServerTokenizer]:
        engine = load(config)
        return engine, load_tokenizer(engine.config, engine.model_info)

    with step_log(options) as log:
        engine, tokenizer = thread.submit(load_both).result()
        engine.on_step = None if log is None else log.write
        sys.setswitchinterval(SWITCH_SECONDS)
        client = AsyncEngine(engine, thread, watchdog_timeout_s=options.watchdog_timeout)
        return serve(client, tokenizer, options, sock)


def run_in_two_processes(
    config: EngineConfig, options: ServeOptions, sock: socket.socket, load: LoadEngine, load_tokenizer: LoadTokenizer
) -> int:
    """Serve with the engine in a process of its own. Raises ValueError, and ChildProcessError if that dies early."""

    @contextlib.contextmanager
    def loaded() -> Iterator[Engine]:
        sock.close()  # the other process listens, and the port is to be free when that has ended
        with step_log(options) as log:
            engine = load(config)
            engine.on_step = None if log is None else log.write
            yield engine

    child = start_process(loaded)
    try:
        with no_garbage_collection(), without_torch():
            from transformers import PreTrainedTokenizerFast  # noqa: F401  while the other process loads the model

            from kvbench_engine.server import http  # noqa: F401

            engine_info = child.wait_loaded()
            tokenizer = load_tokenizer(engine_info.config, engine_info.model_info)
        client = ProcessEngine(child, engine_info, watchdog_timeout_s=options.watchdog_timeout)
        return serve(client, tokenizer, options, sock)
    finally:
        child.stop()


def main(argv: Sequence[str] | None = None) -> int:
    return run(build_parser().parse_args(argv))


def exit_now(code: int) -> None:
    """End the process without waiting for a step that is still running in the engine's thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main())
