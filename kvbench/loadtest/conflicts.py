"""Options of ``kvbench load`` that contradict each other, or do nothing without another: one sentence, nothing sent."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.loadtest.options import Asked, shaped
from kvbench.workload.design import LoadPoint

_NEEDS = {  # option -> what it does nothing without
    "min_rate": "find_max_rate",
    "max_rate": "find_max_rate",
    "tolerance": "find_max_rate",
    "max_runs": "find_max_rate",
    "max_minutes": "find_max_rate",
    "run_seconds": "find_max_rate",
    "expect_workers": "master",
    "bind_host": "master",
    "bind_port": "master",
    "master_host": "worker",
    "master_port": "worker",
    "resume": "output_dir",
}
_EXCLUDE = {  # each pair: the same said twice, in two ways
    ("worker", "master"): "start the master on one machine and the workers on others",
    ("tls_ca_file", "no_tls_verify"): "one trusts the certificates in a file, the other any",
    ("processes", "master"): "workers of this machine, or of others",
    ("find_max_rate", "master"): "a worker ends with its load, and a search has many; share each with --processes",
}
_TLS = ("tls_ca_file", "no_tls_verify")
_OF_A_LAUNCHED_SERVER = ("model", "engine", "sweep", "design")  # sections of a workload
_OF_A_WORKER = ("worker", "master_host", "master_port")


def flag(name: str) -> str:
    """``max_runs`` as it is typed."""
    return f"--{name.replace('_', '-')}"


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raises UsageError for a value of the workload that only servers take which kvbench launches."""
    for text in overrides:
        section = text.partition("=")[0].strip().partition(".")[0]
        if section in _OF_A_LAUNCHED_SERVER:
            raise UsageError(
                f"-o {text} says how `kvbench sweep` launches servers, and this one runs already: set it there, or "
                "leave it out"
            )


def check_words(given: Collection[str], options: Mapping[str, Any]) -> None:
    """``given``: the parameters that stood on the command line. Raises UsageError for words that do not go together."""
    for (one, other), why in _EXCLUDE.items():
        if one in given and other in given:
            raise UsageError(f"{flag(one)} and {flag(other)} exclude each other: {why}")
    if "worker" in given and (more := [name for name in given if name not in _OF_A_WORKER]):
        name = "the workload" if "workload" in more else flag(more[0])
        raise UsageError(f"--worker takes nothing but --master-host and --master-port: {name} is the master's to say")
    for name, needed in _NEEDS.items():
        if name in given and needed not in given:
            raise UsageError(f"{flag(name)} goes with {flag(needed)} only: give both, or neither")
    _check_overrides(options["overrides"])
    if (tls := [name for name in _TLS if name in given]) and str(options["url"]).lower().startswith("http://"):
        raise UsageError(f"{flag(tls[0])} goes with https://, and --url is {options['url']}: change one of them")


def check_named_load(path: str | Path, asked: Asked, how: Mapping[str, Any], *, searching: bool) -> None:
    """Raises UsageError when --at names a load and other options say another."""
    if asked.at is None:
        return
    _, point = shaped(path, Asked(at=asked.at), **how)
    if (other := _other_load(point, asked, searching)) is not None:
        raise UsageError(f"--at {asked.at} is {_words(point)}, and {other}: give one of them")


def _other_load(point: LoadPoint, asked: Asked, searching: bool) -> str | None:
    rate = asked.request_rate
    if point.mode == "closed":
        if rate is not None:
            return f"--request-rate {rate:g} an open loop (--num-prompts says how many requests)"
        if searching:
            return "--find-max-rate searches in open loop"
        if asked.max_concurrency not in (None, point.concurrency):
            return f"--max-concurrency says {asked.max_concurrency}"
    elif None not in (rate, point.request_rate) and rate != point.request_rate:
        return f"--request-rate says {rate:g}"
    return None


def _words(point: LoadPoint) -> str:
    if point.mode == "closed":
        return f"a closed loop of {point.concurrency} users"
    rate = point.request_rate
    return "an open loop" if rate is None else f"{'all at once' if math.isinf(rate) else f'{rate:g} requests/s'}"
