"""The results folder: where each file lies, how it is written, how an unfinished run is found.

    results/<workload>/<UTC time>-<git short sha>/
      manifest.json  summary.csv  report.html  report.md
      logs/<configuration>-<repeat>.log           the server of one block
      cells/<cell id>/                            all repeats together, see kvbench/runs/aggregate.py
      cells/<cell id>/loads/<repeat>/             one finished load; appears whole or not at all
      set-aside/<cell id>/<repeat>-<n>/           the load that was there before it, and set-aside/logs

A load is written into a scratch folder and renamed into place, with done.json inside: what has a done.json is
finished and is never run again, unless one of its files is damaged. requests.parquet has a row a request,
server.parquet a row a reading.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.common.errors import UsageError, say, storage_sentence
from kvbench.common.files import flush, read_json
from kvbench.common.parsing import parse_json
from kvbench.common.records import read_record, record_of
from kvbench.runs.results import COMPLETE, LoadResult, Manifest

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MANIFEST = "manifest.json"
DONE = "done.json"
REQUESTS, GAUGES = "requests.parquet", "server.parquet"
_NEEDED = ("ok", "t0")  # of requests
_TEXTS = ("class", "error_kind", "error", "finish_reason", "canary", "canary_wrong", "text")
_LISTS = ("chunk_times", "chunk_tokens", "chunk_choices", "sent_times", "output_token_ids")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def manifest_path(self) -> Path:
        return self.path / MANIFEST

    def manifest(self) -> Manifest:
        """Reads the manifest. Raises UsageError when there is none, it cannot be read, or it has another format."""
        stored = read_json(self.manifest_path, "take it from a copy of the folder, or measure again")
        if isinstance(stored, dict) and stored.get("kind") == "load" and not stored.get("plan"):
            raise UsageError(
                f"{self.path} is the folder of a rate search, or of a `kvbench load` of an older version, and not of a "
                "sweep: read its search.json or metrics.json; it goes on with `kvbench load ... --resume`"
            )
        if not isinstance(stored, dict) or not {"workload", "plan"} <= stored.keys():
            raise UsageError(f"{self.manifest_path} is not the manifest of a sweep: give the folder of a run")
        if (written := stored.get("format")) != Manifest.FORMAT:
            sections = (stored.get(name) for name in ("versions", "git"))
            version, git = (section if isinstance(section, dict) else {} for section in sections)
            raise UsageError(
                f"{self.path} has the format {written!r}, and this kvbench reads {Manifest.FORMAT}: use the kvbench "
                f"that measured it (version {version.get('kvbench', 'unknown')}, commit "
                f"{git.get('short_sha', 'unknown')}), or measure again"
            )
        return record_of(Manifest, stored, self.manifest_path, "use the kvbench that measured it, or measure again")

    def cell(self, cell_id: str) -> Path:
        return self.path / "cells" / cell_id

    def load(self, cell_id: str, repeat: int) -> Path:
        return self.cell(cell_id) / "loads" / str(repeat)

    def server_log(self, block_id: str) -> Path:
        return self.path / "logs" / f"{block_id}.log"

    def is_done(self, cell_id: str, repeat: int) -> bool:
        return is_whole(self.load(cell_id, repeat))

    def result(self, cell_id: str, repeat: int) -> LoadResult:
        """Reads the result of a finished load. Raises UsageError when it cannot be read."""
        return read_record(LoadResult, self.load(cell_id, repeat) / DONE, "measure it again with --resume")

    def done_repeats(self, cell_id: str) -> list[int]:
        """The repeats with a finished load, in order."""
        finished = self.cell(cell_id).glob(f"loads/[0-9]*/{DONE}")
        return sorted(int(path.parent.name) for path in finished if is_whole(path.parent))

    def damaged_loads(self) -> list[Path]:
        """The loads that were finished, and of which a file is cut short: to be run again."""
        return sorted(p.parent for p in self.path.glob(f"cells/*/loads/[0-9]*/{DONE}") if not is_whole(p.parent))

    def set_aside(self, cell_id: str, repeat: int) -> Path:
        """Moves a finished load, which is measured again, to set-aside/; returns where it is."""
        return move_numbered(self.load(cell_id, repeat), self.path / "set-aside" / cell_id)

    def set_log_aside(self, block_id: str) -> None:
        """Moves a server's log to set-aside/, before another server of the block is launched."""
        if (log := self.server_log(block_id)).exists():
            move_numbered(log, self.path / "set-aside" / "logs")

    def remove_unmeasured(self) -> bool:
        """Removes a folder that has no finished load; returns whether it did."""
        if any(self.path.rglob(DONE)):
            return False
        shutil.rmtree(self.path)
        return True

    @contextmanager
    def scratch_load(self, cell_id: str, repeat: int) -> Iterator[Path]:
        """Gives a folder that becomes ``load(cell_id, repeat)`` when the block ends without an exception.

        Otherwise it is kept as ``failed-<repeat>`` for reading, and the load counts as not run.
        """
        final = self.load(cell_id, repeat)
        scratch = final.with_name(f"running-{repeat}")
        failed = final.with_name(f"failed-{repeat}")
        for stale in (scratch, failed):
            shutil.rmtree(stale, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
            for file in scratch.rglob("*"):
                if file.is_file():
                    flush(file)
        except BaseException as error:
            if isinstance(error, OSError) and storage_sentence(error):  # the space is needed to mark the run
                shutil.rmtree(scratch, ignore_errors=True)
            else:
                scratch.rename(failed)
            raise
        if final.exists():  # damaged, or without a done.json
            shutil.rmtree(final)
        scratch.rename(final)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one process at a time work in the folder. Raises UsageError while another process holds it."""
        path = self.path / ".lock"
        try:
            file = path.open("a+")
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}; make it writable first") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samefile(path, file.fileno()):  # its holder removed it just now
                    raise BlockingIOError
            except OSError:
                file.seek(0)
                raise UsageError(
                    f"{self.path} is being written by another kvbench (process {file.read().strip() or 'unknown'}): "
                    "wait for it, or stop it first"
                ) from None
            with suppress(OSError):  # a disk may be full; the lock holds all the same
                file.truncate(0)
                os.write(file.fileno(), str(os.getpid()).encode())
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink()

    def is_locked(self) -> bool:
        """Tests whether another process works in the folder; writes nothing."""
        try:
            with (self.path / ".lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False


def move_numbered(path: Path, folder: Path) -> Path:
    """Moves a file or folder into ``folder`` with a number behind its name; returns where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    places = (folder / f"{path.stem}-{number}{path.suffix}" for number in itertools.count(1))
    return path.rename(next(place for place in places if not place.exists()))


def damaged_file(folder: Path) -> Path | None:
    """Finds a JSON or Parquet file that a crash or a lost disk cut short, or that holds other data."""
    for path in sorted((*folder.glob("*.json"), *folder.glob("*.parquet"))):
        try:
            if path.suffix == ".json":
                parse_json(path.read_bytes())
            else:
                check_table(path)
        except (OSError, ValueError):
            return path
    return None


def is_whole(folder: Path) -> bool:
    """Tests whether a load is finished: it has a done.json, and none of its files is damaged."""
    return (folder / DONE).is_file() and damaged_file(folder) is None


def create_run(output_dir: Path, workload_name: str, short_sha: str) -> RunFolder:
    """Makes a new folder, named after the time. Raises UsageError when it cannot be made."""
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{short_sha}"
    for attempt in itertools.count(1):
        path = output_dir / workload_name / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                f"results cannot be written to {path}: {error.strerror}; give another --output-dir"
            ) from None
    return RunFolder(path)


def latest_incomplete(output_dir: Path, workload_name: str) -> RunFolder:
    """Finds the newest run of this workload that is not complete and not being written. Raises UsageError.

    A folder whose manifest cannot be read (a full disk, a broken copy) is skipped, with a warning.
    """
    base = output_dir / workload_name
    for manifest in sorted(base.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime, reverse=True):
        run = RunFolder(manifest.parent)
        try:
            if run.manifest().status != COMPLETE and not run.is_locked():
                return run
        except UsageError as error:
            say(f"warning: {run.path} is skipped: {error}")
    raise UsageError(
        f"there is no incomplete run of {workload_name!r} in {base}: leave --resume out to start a new one, or name "
        "the folder of a run"
    )


def open_run(path: Path) -> RunFolder:
    """Opens the folder of a run that exists. Raises UsageError when it is none."""
    if not path.is_dir():
        raise UsageError(f"there is no run folder {str(path)!r}: give one such as results/mixed/<time>")
    run = RunFolder(path)
    run.manifest()
    return run


def load_resume_command(command: Sequence[str]) -> str:
    """Writes the command that goes on with a load that was begun by ``command``, perhaps with --resume itself."""
    return shlex.join([*(word for word in command if word != "--resume"), "--resume"])


def read_table(path: Path) -> pd.DataFrame:
    """Reads the rows of a file; empty without it. Raises UsageError for a damaged one."""
    import pandas as pd

    if not path.is_file():
        return pd.DataFrame()
    check_table(path)
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise UsageError(_damaged(path, str(error))) from None


def check_table(path: Path) -> None:
    """Raises UsageError for a file that is no Parquet, or one of ours with other columns than ours."""
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (OSError, ValueError) as error:
        raise UsageError(_damaged(path, str(error))) from None
    if path.name == REQUESTS and (lacking := [name for name in _NEEDED if name not in schema.names]):
        raise UsageError(_damaged(path, f"it has no column {lacking[0]!r}"))
    for column in schema if path.name in (REQUESTS, GAUGES) else ():
        if not _fits(path.name, column):
            raise UsageError(_damaged(path, f"its column {column.name!r} is of {column.type}"))


def _fits(file: str, column: pa.Field) -> bool:
    """Tests whether a column has its kind of values: numbers, but for texts and lists of requests."""
    from pyarrow import types

    if types.is_null(column.type):
        return True
    if file == REQUESTS and column.name in _TEXTS:
        return types.is_string(column.type) or types.is_large_string(column.type) or types.is_dictionary(column.type)
    if file == REQUESTS and column.name in _LISTS:
        return types.is_list(column.type) or types.is_large_list(column.type)
    return types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)


def _damaged(path: Path, why: str) -> str:
    return f"{path} is damaged: {why.splitlines()[0] if why else 'it cannot be read'}"
