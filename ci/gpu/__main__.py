"""Runs the parts on this machine's GPU and writes OUTDIR: ``ci/gpu.sh``. Standard library only."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ci.gpu import against, record, summary
from ci.gpu.children import OnlyChild
from ci.gpu.device_state import change, read_state
from ci.gpu.environment import PartEnvironment, prepare
from ci.gpu.parts import ENTRIES, GRACE_S, LEAST_S, PARTS, Part, plan_seconds, select_parts
from ci.gpu.summary import FAILED, PASSED, SKIPPED, PartEnd
from kvbench.common.packages import REPOSITORY

QUICK_LIMIT_S, FULL_LIMIT_S = 570.0, 4 * 3600.0
SUMMARY_S = 5.0  # kept for the summary
LOG_SUFFIXES = (".log", ".out", ".err", ".txt")
INSTALL_SHARE = 0.2  # of the time limit, at most: installing wheels
GPU_PROBE_SECONDS = 180.0  # a first import of torch from a cold disk

_GPU_PROBE = """
import json, torch
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}))
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of ``ci/gpu.sh``."""
    arguments = argparse.ArgumentParser(
        prog="ci/gpu.sh",
        description="Check kernels and engine on an NVIDIA GPU against references, time them against the ceilings "
        "measured in the same sitting, and write a summary of at most 8 files. No network is used and no setting of "
        "the GPU is changed.",
        epilog="Parts: " + "; ".join(f"{part.name} ({part.what})" for part in PARTS) + ". Exit codes: 0 all that could "
        "run passed, 1 a check or part failed or none ran, 2 bad arguments or no GPU.",
    )
    arguments.add_argument("outdir", type=Path, metavar="OUTDIR", help="where the results go; made if it is not there")
    arguments.add_argument(
        "--quick", action="store_true", help="all of it in less than 10 minutes: fewer cases and repeats"
    )
    arguments.add_argument("--wheels", type=Path, metavar="DIR", help="a folder of wheels (ci/gpu_wheels.sh fills one)")
    arguments.add_argument(
        "--part", dest="parts", nargs="+", action="extend", default=[], metavar="NAME",
        help="only these parts, and facts; `engine` for all models",
    )  # fmt: skip
    arguments.add_argument(
        "--entry", choices=ENTRIES, help="the parts of an entry of docs/gpu.md's queue, with their times"
    )
    arguments.add_argument("--time-limit", type=float, metavar="SECONDS", help="for everything together (--quick: 570)")
    arguments.add_argument(
        "--against", type=Path, metavar="DIR", help="an earlier OUTDIR: its figures beside, on one host"
    )
    arguments.add_argument(
        "--commit", metavar="SHA", help="what to put down as the commit where this is no git checkout"
    )
    arguments.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --tiny, to test the runner"
    )
    arguments.add_argument("--tiny", action="store_true", help="with --device cpu: shapes of seconds")
    return arguments


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[Part]]:
    """Parses arguments and parts; ends with code 2 for combinations that cannot be meant."""
    arguments = parser()
    args = arguments.parse_args(argv)
    if (args.device == "cpu") != args.tiny:
        arguments.error("--device cpu and --tiny go together: full shapes on a CPU would take hours")
    if args.wheels is not None and not args.wheels.is_dir():
        arguments.error(f"--wheels {args.wheels} is no folder: fill one with ci/gpu_wheels.sh")
    if args.time_limit is not None and not args.time_limit >= LEAST_S:
        arguments.error(f"--time-limit {args.time_limit:g} is too short: give {LEAST_S:g} seconds or more")
    if args.outdir.exists() and not args.outdir.is_dir():
        arguments.error(f"{args.outdir} is a file: OUTDIR is a folder")
    if args.outdir.is_dir() and (others := _foreign_files(args.outdir)):
        arguments.error(
            f"{args.outdir} holds other files ({', '.join(others[:3])}): name an empty folder, or a new one"
        )
    try:
        args.against = against.read_run(args.against) if args.against else None
        parts = ENTRIES[args.entry].parts(args.parts) if args.entry else select_parts(args.parts, args.quick)
    except ValueError as error:
        arguments.error(str(error))
    return args, parts


def _foreign_files(folder: Path) -> list[str]:
    """Lists what neither a run nor a redirection of its output leaves in its OUTDIR."""
    return sorted(
        path.name for path in folder.iterdir() if path.name not in summary.FILES and path.suffix not in LOG_SUFFIXES
    )


def no_gpu() -> str | None:
    """Says why there is no GPU to run on; None when there is one."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _GPU_PROBE], capture_output=True, text=True, timeout=GPU_PROBE_SECONDS
        )
        device = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"torch did not answer within {GPU_PROBE_SECONDS:.0f} s whether there is a GPU: look at nvidia-smi"
    except (ValueError, IndexError):
        reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return f"{sys.executable} cannot import torch ({reason}): install a CUDA build of torch, or set PYTHON"
    if not device["available"]:
        built = f"for CUDA {device['cuda']}" if device["cuda"] else "for the CPU"
        return (
            f"no NVIDIA GPU here: torch {device['torch']}, built {built}, sees no CUDA device; run this on a machine "
            "with a GPU and a CUDA build of torch"
        )
    return None


class Runner:
    """Runs the parts one after the other and keeps what came of them."""

    def __init__(self, args: argparse.Namespace, scratch: Path, environment: PartEnvironment, deadline: float):
        self.args, self.scratch, self.environment, self.deadline = args, scratch, environment, deadline
        self.child = OnlyChild()
        self.outcomes: list[PartEnd] = []
        self.save: Callable[[list[PartEnd]], None] = lambda outcomes: None

    @property
    def time_left(self) -> float:
        """Seconds for parts, those of the summary kept back."""
        return self.deadline - time.monotonic() - SUMMARY_S

    def run(self, parts: list[Part]) -> None:
        """Runs all of ``parts``; an interruption ends the one that runs and skips the rest."""
        try:
            for sentence in self.left_out(parts):
                print(sentence, flush=True)
            for number, part in enumerate(parts):
                print(f"{part.name}: {part.what} ...", flush=True)
                self._keep(self._run_part(part, plan_seconds(parts[number:], self.args.quick, self.time_left)))
        except KeyboardInterrupt:
            done = len(self.outcomes)
            for number, part in enumerate(parts[done:]):
                status, reason = (FAILED, "stopped from outside") if number == 0 else (SKIPPED, "stopped before")
                data = self._result(part) if number == 0 else {}
                self._keep(PartEnd(part.name, part.what, status, reason, result=part.result, data=data))

    def left_out(self, parts: list[Part]) -> list[str]:
        """Writes one sentence for each of ``parts`` that will be skipped for want of packages."""
        missing = {part.name: self._missing(part) for part in parts}
        return [f"will be skipped: {name}, {reason}" for name, reason in missing.items() if reason]

    def _missing(self, part: Part) -> str:
        if names := self.environment.missing(list(part.needed(self.args.device))):
            return f"not installed: {', '.join(names)} (see ci/gpu_wheels.sh and --wheels)"
        return ""

    def _keep(self, outcome: PartEnd) -> None:
        self.outcomes.append(outcome)
        print(outcome.line, flush=True)
        self.save(self.outcomes)

    def _run_part(self, part: Part, seconds: float) -> PartEnd:
        def skipped(reason: str) -> PartEnd:
            return PartEnd(part.name, part.what, SKIPPED, reason, result=part.result)

        if seconds < LEAST_S and part.name != "facts":
            return skipped(f"no time left ({max(0.0, seconds):.0f} s)")
        if reason := self._missing(part):
            return skipped(reason)
        command = part.command(self.environment.python)
        command += ["--out", str(self._out(part)), "--device", self.args.device, "--seconds", f"{seconds:.1f}"]
        command += ["--facts", str(self.scratch / "facts.json"), "--scratch", str(self.scratch)]
        command += [flag for flag, on in (("--quick", self.args.quick), ("--tiny", self.args.tiny)) if on]

        def save_so_far() -> None:
            so_far = PartEnd(part.name, part.what, FAILED, "had not ended", result=part.result, data=self._result(part))
            self.save([*self.outcomes, so_far])

        log, before = self.scratch / f"{part.name}.log", read_state()
        limit_s = max(LEAST_S, seconds + GRACE_S)
        ended = self.child.run(command, log, limit_s, REPOSITORY, _child_environment(), save_so_far)
        data = self._result(part)
        status, reason = PASSED, ""
        if ended.timed_out:
            status, reason = FAILED, f"stopped after {ended.seconds:.0f} s; what it had measured is kept"
        elif data.get("failures"):
            first = data["failures"][0]
            others = f" and {len(data['failures']) - 1} more" if len(data["failures"]) > 1 else ""
            status, reason = FAILED, f"{first['what']}: {first['reason']}{others}"
        elif ended.code != 0:
            status, reason = FAILED, f"ended with code {ended.code}: {_last_lines(log)}"
        elif data.get("not_run"):
            status, reason = SKIPPED, data["not_run"]
        return PartEnd(
            part.name, part.what, status, reason, ended.seconds, part.result, data, change(before, read_state())
        )

    def _out(self, part: Part) -> Path:
        return self.scratch / f"{part.name}.json"

    def _result(self, part: Part) -> dict[str, Any]:
        """Reads what the part has written so far."""
        try:
            return json.loads(self._out(part).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}


def _child_environment() -> dict[str, str]:
    """Returns the child's environment: the repository's packages, no network, kernels compiled for the device.

    ``KVBENCH_PEERS``: folders with packages of other engines, which come after the repository.
    """
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("KVBENCH_PEERS"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return environment


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " / ".join(line[:200] for line in lines[-3:]) or "it printed nothing"


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Makes the whole run; returns the exit code."""
    started = time.monotonic()
    args, parts = parse(sys.argv[1:] if argv is None else argv)
    if args.device == "cuda" and (sentence := no_gpu()):
        print(f"ci/gpu.sh: {sentence}", file=sys.stderr)
        return 2
    try:
        args.outdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"ci/gpu.sh: {args.outdir} cannot be made: {error.strerror}; name another folder", file=sys.stderr)
        return 2
    for path in summary.left_over(args.outdir):
        path.unlink()
    own_limit = ENTRIES[args.entry].limit_s if args.entry else QUICK_LIMIT_S if args.quick else FULL_LIMIT_S
    limit = args.time_limit or own_limit
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    with tempfile.TemporaryDirectory(prefix="kvbench-gpu-") as name:
        scratch = Path(name)
        manifest = record.begin(vars(args))
        environment = prepare(scratch, args.wheels, started + INSTALL_SHARE * limit)
        if peers := os.environ.get("KVBENCH_PEERS"):
            folders = ", ".join(Path(folder).name for folder in peers.split(os.pathsep))
            environment.notes.append(f"packages of other engines come from {folders}")
        runner = Runner(args, scratch, environment, started + limit)

        def save(outcomes: list[PartEnd]) -> None:  # what is written comes back even if we are killed
            record.finish(manifest, environment, outcomes, time.monotonic() - started)
            beside = against.lines(args.against, manifest, outcomes) if args.against else ()
            summary.write_results(args.outdir, scratch, manifest, outcomes, beside)

        runner.save = save
        runner.run(parts)
    print((args.outdir / "summary.md").read_text(encoding="utf-8"), flush=True)
    ended = {outcome.status for outcome in runner.outcomes if outcome.name != "facts"}
    return 1 if FAILED in ended or PASSED not in ended else 0


if __name__ == "__main__":
    sys.exit(main())
