"""Writes the results into OUTDIR: at most 8 files of at most 16 MiB each, with a short summary.md."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci.gpu.part import number_text
from kvbench.common.packages import REPOSITORY

MAX_FILES, MAX_BYTES = 8, 16 * 2**20
LOG_BYTES_A_PART = 512 * 1024
FILES = (
    "manifest.json", "summary.md", "kernels.json", "engine.json", "report.html", "summary.csv", "tuned.json", "log.txt",
)  # fmt: skip
PASSED, FAILED, SKIPPED = "passed", "FAILED", "SKIPPED"


@dataclass
class PartEnd:
    """The end of a part. ``data``: its JSON, as far as it got."""

    name: str
    what: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    result: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    device: dict[str, float] = field(default_factory=dict)  # device_state: power, throttling, clocks

    @property
    def throttled_s(self) -> float | None:
        """The seconds in which power or heat held the clocks down; None where the driver does not tell."""
        seconds = [value for name, value in self.device.items() if name.startswith("throttled")]
        return sum(seconds) if seconds else None

    @property
    def line(self) -> str:
        """Writes the line for the terminal and the log."""
        return f"{self.status} {self.name}: {self.reason or self.data.get('headline') or self.what}"


def write_results(
    outdir: Path, scratch: Path, manifest: dict[str, Any], outcomes: list[PartEnd], beside: Sequence[str] = ()
) -> None:
    """Writes everything into ``outdir``; files that are too large are left out, and the summary says so.

    ``beside``: lines about an earlier run.
    """
    assert len(FILES) <= MAX_FILES
    left_out: list[str] = []
    written = {"log.txt": _log(scratch, outcomes), "manifest.json": _json(manifest)}
    for name in ("kernels.json", "engine.json"):
        parts = {outcome.name: outcome.data for outcome in outcomes if outcome.result == name and outcome.data}
        if parts:
            written[name] = _json(parts)
    for name, content in written.items():
        if len(content) > MAX_BYTES:
            left_out.append(f"{name} ({len(content) / 2**20:.0f} MiB)")
        else:
            (outdir / name).write_bytes(_without_paths(content.decode(errors="replace"), scratch).encode())
    for name in ("report.html", "summary.csv", "tuned.json"):
        source = scratch / name
        if source.is_file() and source.stat().st_size > MAX_BYTES:
            left_out.append(f"{name} ({source.stat().st_size / 2**20:.0f} MiB)")
        elif source.is_file():
            shutil.copyfile(source, outdir / name)
    text = render(manifest, outcomes, left_out, beside)
    (outdir / "summary.md").write_text(_without_paths(text, scratch), encoding="utf-8")


def _without_paths(text: str, scratch: Path) -> str:
    """Removes the paths of the repository and of the run's temporary files: results are shown to others."""
    return text.replace(f"{scratch}/", "").replace(f"{REPOSITORY}/", "")


def left_over(outdir: Path) -> list[Path]:
    """Lists the files of an earlier run."""
    return [outdir / name for name in FILES if (outdir / name).is_file()]


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


def _log(scratch: Path, outcomes: list[PartEnd]) -> bytes:
    """Collects the end of each part's output."""
    pieces = []
    for outcome in outcomes:
        path = scratch / f"{outcome.name}.log"
        text = path.read_bytes() if path.is_file() else b""
        cut = b"[...]\n" if len(text) > LOG_BYTES_A_PART else b""
        pieces.append(f"=== {outcome.line}\n".encode() + cut + text[-LOG_BYTES_A_PART:] + b"\n")
    return b"".join(pieces)


def render(manifest: dict[str, Any], outcomes: list[PartEnd], left_out: list[str], beside: Sequence[str] = ()) -> str:
    """Writes the summary as Markdown."""
    device, versions = manifest.get("device") or {}, manifest.get("versions") or {}
    name = device.get("name") or "no GPU"
    reached = manifest.get("ceilings") or {}
    ceilings = [f"{ceiling.replace('_', ' ')} {value:,.4g}" for ceiling, value in reached.items()]
    lines = [f"# {name}: kvbench GPU run", ""]
    if manifest["arguments"]["device"] == "cpu":
        lines += ["**Run on the CPU: it shows that the runner works. No figure here is of a GPU.**", ""]
    elif manifest["arguments"]["quick"]:
        lines += ["Quick run: fewer cases, sequences and repeats than a full one; each table says which.", ""]
    lines += [
        f"{manifest['started']}, driver {manifest.get('nvidia_smi', {}).get('driver_version', '–')}, "
        f"torch {versions.get('torch')}, triton {versions.get('triton')}, transformers {versions.get('transformers')}, "
        f"Python {versions.get('python')}, code {_code(manifest)}, host {device.get('host', '–')} "
        f"({device.get('cpu', '–')})",
        "",
        f"Ceilings here: {', '.join(ceilings) or 'not measured'}.",
        "",
        *_table(
            ["part", "result", "seconds", "W", "throttled s", "what"],
            [
                [
                    o.name,
                    o.status,
                    f"{o.seconds:.0f}",
                    number_text(o.device.get("power_w"), ".3g"),
                    number_text(o.throttled_s, ".3g"),
                    o.reason or o.data.get("headline") or o.what,
                ]
                for o in outcomes
            ],
        ),
    ]
    failed = _troubles("Failed", outcomes, "failures")
    if any("traceback" in trouble for outcome in outcomes for trouble in outcome.data.get("failures", [])):
        failed += ["Tracebacks: log.txt, and `failures` of the part in kernels.json, engine.json.", ""]
    lines += failed
    for (title, columns), rows in _tables(outcomes).items():
        lines += [f"## {title}", "", *_table(list(columns), rows)]
    lines += beside
    lines += _troubles("Skipped inside the parts", outcomes, "skipped")
    notes = [*manifest.get("notes", []), *(f"left out, over {MAX_BYTES >> 20} MiB: {name}" for name in left_out)]
    if notes:
        lines += ["## Notes", "", *(f"- {_cell(note)}" for note in notes), ""]
    return "\n".join(lines).rstrip() + "\n"


def _code(manifest: dict[str, Any]) -> str:
    git = manifest.get("git") or {}
    sha = git.get("sha") or manifest["arguments"].get("commit")
    state = " (with changes)" if git.get("dirty") else ""
    return f"{sha[:12] if sha else 'of no known commit'}{state}, sources {manifest.get('sources', '–')}"


def _tables(outcomes: list[PartEnd]) -> dict[tuple[str, tuple[str, ...]], list[list[str]]]:
    """Collects rows by title and columns: parts with the same columns share a table."""
    tables: dict[tuple[str, tuple[str, ...]], list[list[str]]] = {}
    for outcome in outcomes:
        for table in outcome.data.get("tables", []):
            tables.setdefault((table["title"], tuple(table["columns"])), []).extend(table["rows"])
    return tables


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return ["(nothing)", ""]
    cells = [[_cell(cell) for cell in row] for row in (columns, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + " --- |" * len(columns), *lines[1:], ""]


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _troubles(title: str, outcomes: list[PartEnd], key: str) -> list[str]:
    """Lists equal reasons once, with what they concern."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for trouble in outcome.data.get(key, []):
            grouped.setdefault((outcome.name, trouble["reason"]), []).append(trouble["what"])
    if not grouped:
        return []
    lines = [f"## {title}", ""]
    for (part, reason), concerned in grouped.items():
        shown = "; ".join(concerned[:3]) + (f" and {len(concerned) - 3} more" if len(concerned) > 3 else "")
        lines.append(f"- {part}: {_cell(shown)}: {_cell(reason)}")
    return [*lines, ""]
