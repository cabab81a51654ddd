"""``python -m engine.server``: load, listen, say ``ready``, stop on a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from engine.async_engine import AsyncEngine, EngineThread
from engine.config import EngineConfig, runs_on_cpu
from engine.engine import Engine
from engine.model.spec import find_model
from engine.planning import plan_engine
from engine.server.app import create_app
from engine.server.arguments import ServeOptions, build_parser, options_of
from engine.server.step_log import StepLog
from engine.server.tokenizer import ServerTokenizer, check_tokenizer_folder, load_tokenizer
from engine.startup import no_garbage_collection, set_spin_count

GRACE_SECONDS = 2  # for handlers to send their last events after the requests have been aborted
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
    """uvicorn's server; calls ``on_ready`` when it listens, and aborts the requests on a signal."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, on_ready: Callable[[], None]):
        super().__init__(config)
        self._engine = engine
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: uvicorn would raise the signal again after a clean stop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        for number in EXIT_SIGNALS:
            with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller stops us
                loop.add_signal_handler(number, self.stop)
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    def stop(self) -> None:
        """Accept no more requests and abort the running ones."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.create_task(self._engine.shutdown(GRACE_SECONDS))
        await super().shutdown(sockets=sockets)
        await stopping


def reserve_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that nobody connects before the model is there.

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


def make_server(
    engine: Engine,
    tokenizer: ServerTokenizer,
    options: ServeOptions,
    on_ready: Callable[[], None],
    thread: EngineThread | None = None,
) -> Server:
    """The server for a loaded engine, ready to ``serve(sockets=[...])``."""
    app = create_app(engine, tokenizer, options.served_model_name, thread)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        loop="auto",  # uvloop where it is installed
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return Server(config, app.state.server.engine, on_ready)


def serve(
    engine: Engine, tokenizer: ServerTokenizer, options: ServeOptions, sock: socket.socket, thread: EngineThread
) -> int:
    """Serve until a signal comes.

    Raises:
        ValueError: the port has been taken meanwhile.
    """
    port = sock.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.host, options.host)
    server = make_server(engine, tokenizer, options, lambda: print(f"ready http://{shown}:{port}", flush=True), thread)
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
    """Checks ``config`` as far as that needs no torch, whose import takes seconds; the max_model_len it comes to.

    None: that is known after the load. Raises ValueError if something is missing or does not fit.
    """
    check_tokenizer_folder(config)
    spec = find_model(config.model, config.load_format)
    if spec.attention_shape() is None:  # a config with other keys: only the loaded model tells its KV
        config.check_against_model(spec.max_positions)
        return None
    return plan_engine(config, on_cpu=runs_on_cpu(config.device), may_lower=True).config.max_model_len


def load(config: EngineConfig) -> tuple[Engine, ServerTokenizer]:
    """Engine and tokenizer, each phase said on stderr. Raises ValueError if something is missing or does not fit."""
    expected = planned_length(config)
    _say_lowered(config, expected)

    def tell(phase: str) -> None:
        print(f"loading {config.model}: {phase}", file=sys.stderr, flush=True)

    tell("importing torch")
    set_spin_count()
    with no_garbage_collection():
        from engine.build import build_engine

        engine = build_engine(config, tell)
        tokenizer = load_tokenizer(engine.config, engine.model_info)
    if engine.config.max_model_len != expected:
        _say_lowered(config, engine.config.max_model_len)
    return engine, tokenizer


def _say_lowered(config: EngineConfig, length: int | None) -> None:
    """Says that ``length`` is less than the model's own, where the user has given none."""
    limit = find_model(config.model, config.load_format).max_positions
    if config.max_model_len is None and length is not None and limit is not None and length < limit:
        print(
            f"max_model_len is {length} tokens, all that the KV budget holds of one sequence, and not the model's "
            f"{limit}: raise --kv-budget for longer ones",
            file=sys.stderr,
            flush=True,
        )


def run(args: argparse.Namespace, load: Callable[[EngineConfig], tuple[Engine, ServerTokenizer]] = load) -> int:
    """The command with its arguments parsed (by ``add_arguments``); the exit code."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        config, options = options_of(args)
        with reserve_socket(options.host, options.port) as sock, step_log(options) as log:
            thread = EngineThread()
            engine, tokenizer = thread.submit(load, config).result()
            engine.on_step = None if log is None else log.write
            code = serve(engine, tokenizer, options, sock, thread)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted while loading", file=sys.stderr)
        return 130
    return code


def main(argv: Sequence[str] | None = None) -> int:
    return run(build_parser().parse_args(argv))


def exit_now(code: int) -> None:
    """End the process without waiting for a step that is still running in the engine's thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main())
