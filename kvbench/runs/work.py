"""Work in a run folder: one process at a time, and an orderly end when a signal or the disk stops it early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvbench.common.errors import Interrupted, Interruption, MeasurementError, say, storage_sentence
from kvbench.runs.folder import RunFolder


@dataclass
class FolderWork:
    """Work in a folder; the worker may change ``next_step`` and ``close`` as it goes on.

    ``check``: raises Interrupted if a signal has come. ``next_step``: tells the user how to go on. ``close``: writes
    what is known into a folder that stays incomplete; called once when the work ends early.
    """

    check: Callable[[], None]
    next_step: str
    close: Callable[[], None] = lambda: None


@contextmanager
def work_in(path: Path, next_step: str, tell: Callable[[str], None]) -> Iterator[FolderWork]:
    """``orderly_end`` with the folder locked. Raises UsageError while another process works there."""
    with RunFolder(path).locked(), orderly_end(path, next_step, tell) as work:
        yield work


@contextmanager
def orderly_end(path: Path, next_step: str, tell: Callable[[str], None]) -> Iterator[FolderWork]:
    """Ends early work with ``FolderWork.close`` and a line that says how to go on.

    An interruption (SIGINT, SIGTERM or SIGHUP) ends the ``with`` block: what follows it returns EXIT_INTERRUPTED. If
    nobody reads stdout any more, the SystemExit goes on to the caller. A full or lost disk becomes a MeasurementError.
    """
    with Interruption() as interruption:
        work = FolderWork(interruption.check, next_step)
        try:
            yield work
        except (Interrupted, KeyboardInterrupt, SystemExit) as end:
            with suppress(OSError):
                work.close()
            unread = isinstance(end, SystemExit)  # rich raises it when nobody reads stdout any more
            name = "SIGPIPE (nobody reads the output)" if unread else getattr(end, "signal_name", "SIGINT")
            with suppress(OSError):  # the terminal may be gone
                (say if unread else tell)(f"stopped by {name}; {work.next_step}")
            if unread:
                raise
        except OSError as error:
            with suppress(OSError):  # there may be no room for it; the folder is marked incomplete since its start
                work.close()
            if (sentence := storage_sentence(error, path)) is None:
                raise
            say(work.next_step)
            raise MeasurementError(sentence) from error
        except MeasurementError:
            work.close()
            say(work.next_step)
            raise
        except BaseException:
            work.close()
            raise


def kept(command: str) -> str:
    """Tells the next step after an interruption: ``command`` goes on."""
    return f"what was measured is kept. Go on with:\n  {command}"
