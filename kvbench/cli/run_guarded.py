"""Runs a command: every error becomes one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable

from kvbench.common.errors import MeasurementError, UsageError, log_traceback, say, storage_sentence
from kvbench.common.text import nearest, shorten

EXIT_UNREAD = 128 + signal.SIGPIPE  # what any program is ended with whose reader has gone


def guarded(run: Callable[[], int]) -> int:
    """Runs a command; every error is one sentence on stderr and its exit code, never a traceback."""
    import click

    try:
        return run()
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message())
        return 2
    except click.ClickException as error:
        if isinstance(error, click.exceptions.NoSuchOption):  # click counts the dashes as alike
            names = {name.strip("-"): name for name in error.possibilities or ()}
            error.possibilities = [names[name] for name in nearest(error.option_name.strip("-"), names, most=3)]
        say(f"error: {error.format_message()}")
        context = getattr(error, "ctx", None)
        if context is not None:
            say(f"see: {context.command_path} --help")
        return 2
    except (UsageError, MeasurementError) as error:
        say(f"error: {error}")
        return error.exit_code
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
        if error.errno == errno.ENAMETOOLONG:
            say(f"error: the path {shorten(str(error.filename), 60)!r} is too long: give a shorter one")
            return UsageError.exit_code
        if (sentence := storage_sentence(error, "standard output, or a file")) is None:
            return _unexpected(error)
        say(f"error: {sentence}")
        return MeasurementError.exit_code
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    say(f"error: something unexpected went wrong ({type(error).__name__}: {error}); {log_traceback(error)}")
    return MeasurementError.exit_code
