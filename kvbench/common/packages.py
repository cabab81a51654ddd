"""The packages that belong together, and the errors of the command line.

PyPI has another package that is imported as ``kernels`` (Hugging Face's). Where that one comes first, nothing here
would work, and the errors would not say why.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from kvbench.common.errors import MeasurementError, UsageError, storage_sentence

EXIT_UNREAD = 128 + signal.SIGPIPE  # what any program is ended with whose reader has gone
HOUSE = Path(__file__).resolve().parents[2]


def foreign_package(name: str) -> str | None:
    """Where another package of that name would be imported from; None when it is ours. Imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return "nowhere (it is not installed)"
    places = [Path(p).resolve() for p in spec.submodule_search_locations or ()]
    places += [Path(spec.origin).resolve().parent] if spec.origin else []
    return None if HOUSE / name in places else str(places[0] if places else spec.origin)


def check_house() -> None:
    """Raises UsageError when ``kernels`` or ``engine`` is another package than ours."""
    for name in ("kernels", "engine"):
        if found := foreign_package(name):
            raise UsageError(
                f"the package {name!r} would be imported from {found}, not from {HOUSE / name}, where kvbench's own "
                "is: another distribution uses that import name (Hugging Face's is called `kernels`); install "
                "kvbench in a virtual environment of its own"
            )


def say(text: str) -> None:
    """One line on stderr, if there is still somebody to read it."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def guarded(run: Callable[[], int]) -> int:
    """``run()``, with every error as one sentence on stderr and its exit code; never a traceback."""
    import click

    try:
        return run()
    except click.ClickException as error:
        say(f"error: {error.format_message()}")
        context = getattr(error, "ctx", None)
        if context is not None:
            say(f"see: {context.command_path} --help")
        return 2
    except UsageError as error:
        say(f"error: {error}")
        return UsageError.exit_code
    except MeasurementError as error:
        say(f"error: {error}")
        return MeasurementError.exit_code
    except (KeyboardInterrupt, click.Abort):
        say("stopped")
        return 130
    except BrokenPipeError:  # `kvbench ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # that is how rich leaves then
            return EXIT_UNREAD
        raise
    except OSError as error:
        if (sentence := storage_sentence(error)) is None:
            return _unexpected(error)
        say(f"error: {sentence}")
        return MeasurementError.exit_code
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    say(f"error: something unexpected went wrong ({type(error).__name__}: {error}); {log_traceback(error)}")
    return MeasurementError.exit_code


def log_traceback(error: BaseException) -> str:
    """Write the traceback into a file of its own; words that say where it is."""
    path = Path(tempfile.gettempdir()) / f"kvbench-error-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
    try:
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return "the traceback could not be written to a file"
    return f"the full traceback is in {path}"
