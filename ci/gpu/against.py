"""Shows an earlier run beside this one if both are of one host: hosts differ by more than most changes of the code do.

Standard library only.
"""

from __future__ import annotations

import collections
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.gpu.summary import PartEnd

FIGURES = ("us", "output_tokens_per_s", "median_step_ms")  # the figures of a row that are compared
NAMES = ("case", "run", "variant", "kernel", "side")  # the fields that tell rows of a part apart


@dataclass(frozen=True)
class EarlierRun:
    """A run by the ``name`` of its OUTDIR, with its host (None: unknown) and figures."""

    name: str
    host: str | None
    figures: dict[str, float]


def read_run(folder: Path) -> EarlierRun:
    """Reads an OUTDIR. Raises ValueError where the folder is none."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        parts: dict[str, dict[str, Any]] = {}
        for path in (folder / "kernels.json", folder / "engine.json"):
            parts |= json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return EarlierRun(folder.name, host_of(manifest), figures(parts))
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder} is no result of ci/gpu.sh: {error}") from error


def figures(parts: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Collects the figures by part and row; rows of the same names, such as turns, give their median."""
    values = collections.defaultdict(list)
    for part, data in parts.items():
        for row in data.get("rows", []):
            names = [part, *dict.fromkeys(str(row[name]) for name in NAMES if row.get(name) is not None)]
            for figure in FIGURES:
                if figure in row:
                    values[f"{', '.join(names)} [{figure}]"].append(row[figure])
    return {name: statistics.median(rows) for name, rows in values.items()}


def host_of(manifest: dict[str, Any]) -> str | None:
    """Returns the host that a run was on; None where its manifest does not tell."""
    return (manifest.get("device") or {}).get("host")


def lines(earlier: EarlierRun, manifest: dict[str, Any], outcomes: list[PartEnd]) -> list[str]:
    """Shows the figures of both runs as Markdown, or why they are not compared."""
    before, host = earlier.figures, host_of(manifest)
    now = figures({outcome.name: outcome.data for outcome in outcomes})
    title = [f"## Beside {earlier.name}", ""]
    if host is None or host != earlier.host:
        hosts = f"that run was on host {earlier.host or 'unknown'}, this one is on {host or 'unknown'}"
        return [*title, f"Not compared: {hosts}.", ""]
    rows = [f"| {name} | {before[name]:,.5g} | {now[name]:,.5g} | {now[name] / before[name]:.3f} |"
            for name in now if before.get(name)]  # fmt: skip
    return [*title, "| figure | then | now | now over then |", "| --- | --- | --- | --- |", *rows, ""]
