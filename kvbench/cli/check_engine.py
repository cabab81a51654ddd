"""``kvbench check-engine``."""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvbench.common.errors import UsageError
from kvbench.common.options import Options, argument, option, takes


@dataclass(frozen=True, kw_only=True)
class CheckEngineRequest(Options):
    """The request of ``kvbench check-engine``."""

    command: str = argument("CMD")
    settings: str | None = option(
        "The engine's settings, as KEY=VALUE,KEY=VALUE: what `open` gets.", "--settings", metavar="SETTINGS"
    )
    log: Path | None = option("Keep what the engine's process writes to stderr in this file.", metavar="PATH")


@takes(CheckEngineRequest)
def check_engine(request: CheckEngineRequest) -> int:
    """Check that an engine computes steps on command.

    Engine time needs that. CMD starts the engine's process, which speaks protocol 3 on stdin and stdout
    (docs/engines.md). A Python file with a class Engine is run by this Python; for an engine of another Python write
    the whole command.

    \b
    Examples:
      kvbench check-engine my_engine.py
      kvbench check-engine '/opt/vllm/bin/python .../loop.py .../vllm_engine.py --model ...' --log engine.log
    \b
    No files are written but --log's.
    Exit codes: 0 every point that the engine offers passed, 1 a point failed, 2 bad input, 130 interrupted.
    """
    from rich.console import Console

    from kvbench.common.console import make_table, print_plain, print_table, status_line
    from kvbench.common.errors import Interruption
    from kvbench.gate.compare.sides import parse_settings
    from kvbench.lockstep.conformance import CHECKS, FAILED, check_engine

    command, settings = words_of(request.command), parse_settings(request.settings) if request.settings else {}
    console = Console()
    with Interruption() as interruption, tempfile.TemporaryDirectory() as scratch:
        log = request.log or Path(scratch) / "engine.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.open("ab").close()
        except OSError as error:
            raise UsageError(f"--log {log} cannot be written ({error.strerror}): name another file") from None
        with status_line(console, "starting the engine") as show:
            results = []
            for result in check_engine(command, settings, log, check=interruption.check, show=show):
                results.append(result)
    rows = [(result.title, result.outcome, result.detail) for result in results]
    print_table(console, make_table(("point", "outcome", "seen"), rows, numbers_from=3))
    failed = sum(result.outcome == FAILED for result in results)
    left = f", {1 + len(CHECKS) - len(results)} were not reached" if len(results) <= len(CHECKS) else ""
    print_plain(console, f"{failed} failed{left}" if failed else "it can be measured in engine time")
    return 1 if failed else 0


def words_of(text: str) -> tuple[str, ...]:
    """Returns the command of an engine's process. Raises UsageError where it cannot be run."""
    from kvbench.targets.launch_plan import split_command
    from kvbench.targets.preset import LOOP

    try:
        words = [text] if Path(text).is_file() else shlex.split(text)  # its path may have blanks
    except ValueError:
        words = []  # split_command says what is wrong
    if words and words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise UsageError(f"there is no file {words[0]}: give the path of the adapter")
        text = shlex.join([sys.executable, str(LOOP), *words])
    return split_command(text, "CMD")
