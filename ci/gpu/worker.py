"""The child process of ``ci.gpu.isolated``: runs the cases that its parent names, and tells their results.

Requests are lines of JSON on the standard input. Answers are lines on the standard output that begin with ``MARK``;
whatever else the process prints goes to its standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

from ci.gpu.part import PartCases, Report, part_parser, plain, sentence
from engine.parent import die_with

MARK = "\x1e"
LOST = ("CUDA error", "device-side assert", "Triton Error [CUDA]")  # in an error: the process may have lost its device


class CaseReport(Report):
    """Tells its parent at once of everything that is added."""

    def __init__(self, seconds: float, send: Callable[[dict[str, Any]], None]):
        super().__init__(seconds)
        self._send = send

    def add(self, kind: str, value: dict[str, Any]) -> None:
        super().add(kind, value)
        self._send({"add": kind, "value": value})


def run_case(cases: PartCases, name: str, report: Report, device: str) -> str | None:
    """Run a case; None, or why this process cannot use the device any more."""
    lost = None
    try:
        cases.run(name, report)
    except Exception as error:  # whatever one case raises, the next ones are still worth running
        report.error(name, error)
        lost = sentence(error) if any(sign in str(error) for sign in LOST) else None
    return lost or (_device_error(name, report) if device == "cuda" else None)


def _device_error(name: str, report: Report) -> str | None:
    """Asks the device after a case: an error of a kernel may show only at the next call."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None  # the case did not use it in this process
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        if not report.data["failures"]:
            report.error(name, error)
        return sentence(error)
    return None


def _take_pipes() -> tuple[TextIO, Callable[[dict[str, Any]], None]]:
    """Keep the standard input and output for ourselves: requests, and a function that sends an answer."""
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        answers.write(f"{MARK}{json.dumps(plain(message))}\n")
        answers.flush()

    return requests, send


def main() -> None:
    """Answer requests until there are no more."""
    die_with(os.getppid())  # the parent may be a wrapper that is killed
    requests, send = _take_pipes()
    parser = part_parser(__doc__)
    parser.add_argument("module")
    args, own = parser.parse_known_args()
    args.own = own
    cases = importlib.import_module(args.module).CASES(args)
    for line in requests:
        request = json.loads(line)
        send({"begin": request.get("case")})
        if "case" not in request:
            send({"plan": [asdict(case) for case in cases.plan()], "workers": cases.workers})
            continue
        report = CaseReport(request["ends"] - time.monotonic(), send)
        send({"done": request["case"], "lost": run_case(cases, request["case"], report, args.device)})


if __name__ == "__main__":
    main()
