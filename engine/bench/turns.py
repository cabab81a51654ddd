"""A turn in a process of its own, so that no side meets another's threads, caches or memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

TURN_LIMIT_S = 600.0
EXIT_LIMIT_S = 5.0
_LAST_LINES = 3  # last lines of a failed process's output that are shown


def run_apart(function: Callable[..., Any], *args: Any, limit_s: float = TURN_LIMIT_S) -> Any:
    """Call ``function(*args)`` in a fresh Python process with this one's number of torch threads.

    Raises:
        ValueError: the process raised, died, or was not done after ``limit_s`` seconds.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_worker, args=(function, args, torch.get_num_threads(), sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(limit_s):
            result = receiver.recv()
            process.join(EXIT_LIMIT_S)  # its own way, if it can: a thread of the other side may keep it
        else:
            result = TimeoutError(f"not done in {limit_s:g} s")
    except EOFError:
        result = RuntimeError("its process died")
    finally:
        process.kill()
        process.join()
    if isinstance(result, Exception):
        raise ValueError(str(result) or type(result).__name__) from result
    return result


def _worker(function: Callable[..., Any], args: Sequence[Any], threads: int, connection: Connection) -> None:
    torch.set_num_threads(threads)
    try:
        connection.send(function(*args))
    except Exception as error:
        connection.send(error)
    connection.close()


def run_command(command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> None:
    """Run ``command`` in a process group of its own, all of which ends with it. Its output goes to ``log``.

    Raises:
        ValueError: the command could not be started, failed, or was not done after ``limit_s`` seconds.
    """
    with log.open("w", encoding="utf-8") as file:
        try:
            process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ValueError(f"{command[0]} cannot be started: {error.strerror}") from None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ValueError(f"not done in {limit_s:g} s") from None
        finally:
            _end_group(process)
    if code:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        raise ValueError(f"exit code {code}: " + " | ".join([line for line in lines if line][-_LAST_LINES:]))


def _end_group(process: subprocess.Popen) -> None:
    """Kill the process group, whose leader may have ended before the others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
