"""The request of ``kvbench compare`` and ``kvbench dev calibrate``: their options, and the two sides as given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ConfigDict, Field

from kvbench.common.packages import IS_CHECKOUT, REPOSITORY
from kvbench.common.records import Record

TYPED = {"compare": "compare", "calibrate": "dev calibrate"}  # subcommand -> as it is typed
OF_AN_EXECUTION = ("resume", "max_minutes", "output_dir", "force")  # options that may differ when it is resumed


class CompareRequest(Record):
    """The options by their names; ``noise`` is of ``compare``, ``pairs`` and ``store`` are of ``calibrate``.

    Raises ValueError for a name that is none of them.
    """

    model_config = ConfigDict(extra="forbid")

    base: str | None = None
    candidate: str | None = None
    workloads: tuple[str, ...] = ()
    profile: str | None = None
    overrides: tuple[str, ...] = ()
    seed: int | None = None
    only: tuple[str, ...] = ()
    policy: Path | None = None
    repo: Path | None = None
    build_cmd: str | None = None
    rebuild: bool = False
    target: str | None = None
    exact: bool = False
    target_python: str | None = None
    candidate_python: str | None = None
    target_args: str | None = None
    serve_cmd: str | None = None
    preset: str | None = None
    model: str | None = None
    vocab_size: int | None = None
    max_model_len: int | None = None
    tokenizer: Path | None = None
    api_key_env: str | None = None
    tls_ca_file: Path | None = None
    no_tls_verify: bool = False
    start_timeout: float | None = None
    max_minutes: float | None = None
    method: str = "auto"
    no_calibration: bool = False
    force: bool = False
    order_seed: int | None = None
    output_dir: Path = Path("results")
    runner_class: str | None = None
    resume: Path | None = Field(default=None, exclude=True)
    noise: Path | None = None
    pairs: int | None = None
    store: Path | None = None

    @property
    def repository(self) -> Path:
        return self.repo or (REPOSITORY if IS_CHECKOUT else Path.cwd())

    def for_any_folder(self, base: str, candidate: str) -> StoredRequest:
        """The request with these sides and absolute paths: it may be resumed from another folder."""
        paths = {name: path.resolve() for name in _PATHS if (path := getattr(self, name))}
        pythons = {name: getattr(self, name) for name in ("target_python", "candidate_python")}
        paths |= {name: os.path.abspath(path) for name, path in pythons.items() if path and os.sep in path}
        workloads = tuple(str(Path(workload).resolve()) for workload in self.workloads)
        return StoredRequest(**self.fields() | paths | {"workloads": workloads, "base": base, "candidate": candidate})

    def words(self, subcommand: str, sides: Sequence[str]) -> list[str]:
        words = ["kvbench", *TYPED[subcommand].split(), *sides]
        for name in (name for name in CompareRequest.model_fields if name not in _NOT_REPEATED):
            value, flag = getattr(self, name), _FLAGS.get(name, f"--{name.replace('_', '-')}")
            if value is True:
                words.append(flag)
            elif value is not None and value is not False:
                for entry in value if isinstance(value, tuple) else (value,):
                    words += [flag, str(entry)]
        return words


class StoredRequest(CompareRequest):
    """The request as a manifest keeps it; options that only older versions had stay in it."""

    model_config = ConfigDict(extra="allow")

    def resumed_by(self, request: CompareRequest) -> StoredRequest:
        """The request of a comparison that has begun, with what ``request`` says of its execution."""
        changed = {name: getattr(request, name) for name in OF_AN_EXECUTION}
        return self.model_copy(update=changed | {"force": self.force or request.force})


_PATHS = ("policy", "repo", "noise", "store", "tokenizer", "tls_ca_file")
_FLAGS = {"overrides": "-o", "workloads": "--workload"}
_NOT_REPEATED = {  # by the command that repeats a comparison
    "base", "candidate", "rebuild", "order_seed", "output_dir", "runner_class", "resume", "noise", "pairs", "store",
}  # fmt: skip
