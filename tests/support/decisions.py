"""What kvbench decides from the data stored in results/reference.

`python -m tests.support.decisions > tests/data/decisions.json` stores the decisions of the code that is there, and
tests/integration/test_decisions_held.py compares them. Stored are verdict words, chosen configurations, calls, ratios
with their intervals, and digests of the report's tables; no sentences.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from kvbench.cli.main import main
from kvbench.common.errors import UsageError
from kvbench.common.files import unpack
from kvbench.common.packages import REPOSITORY
from kvbench.report.recommend import recommend
from kvbench.report.side_by_side import groups_of, obstacles, pairs_of, ratios
from kvbench.runs.engine_time import EngineTime
from kvbench.runs.model import Run
from kvbench.runs.read import read_run
from tests.support.report_parts import plain_document

REFERENCE = REPOSITORY / "results" / "reference"
STORED = REPOSITORY / "tests" / "data" / "decisions.json"
MEASURED_RUN = REPOSITORY / "tests" / "data" / "measured_run.tar.xz"

_RUN = "MEASURED-RUN"
_POLICY = """
limits:
  - {metric: output_tokens_per_s, min: 200, cells: "*-c32"}
  - {metric: p95_ttft_ms, max: 300}
  - {metric: steady_p95_ttft_ms, max: 300, cells: "*-c3"}
  - {metric: p99_itl_ms, max: 150, every: true, cells: "*-c3"}
  - {metric: goodput, min: 2, cells: "*-c3"}
  - {metric: peak_rss_bytes, max: 600MiB, cells: "*-c32"}
  - {metric: prefix_cache_hit_rate, min: 20%, cells: "*-c3"}
  - {metric: per_class.short chat.ttft_ms.p95, max: 1500, cells: "*-c32"}
  - {metric: capacity.capacity_tokens, min: 6200, cells: "*-c32"}
  - {slo: 95%}
  - {ratio: output_tokens_per_s, min: 0.95}
  - {ratio: p95_itl_ms, max: 1.1, of: "paged-p8", to: "paged-p16"}
  - {kld: mean, max: 0.002}
  - {quality: passkey, min: 98%}
  - {quality: within}
"""


_OF_CI = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY")


@dataclass(frozen=True)
class Ended:
    """A command's exit code and what it printed."""

    code: int
    out: str
    err: str


def kvbench(*arguments: object) -> Ended:
    """Runs a command in this process, with a wide terminal and outside of CI."""
    out, err = io.StringIO(), io.StringIO()
    outside = {name: value for name, value in os.environ.items() if name not in _OF_CI}
    with (
        mock.patch.dict(os.environ, outside | {"COLUMNS": "240"}, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main(list(map(str, arguments)))
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def rounded(value: Any) -> Any:
    """The value with its numbers in 6 digits."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return value


def reference_runs() -> Iterator[tuple[str, Path]]:
    """Name and folder of each sweep's run that came with the repository."""
    for manifest in sorted(REFERENCE.rglob("manifest.json")):
        if (manifest.parent / "summary.csv").is_file() and "h200" not in manifest.parts:
            yield str(manifest.parent.relative_to(REFERENCE)), manifest.parent


def digest(text: str) -> str:
    """A digest of the text's words and numbers."""
    words = re.findall(r"[\w.%+−-]+", text.replace(str(REFERENCE), _RUN).replace("results/reference", _RUN))
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:10]


def run_decisions(run: Run) -> dict[str, Any]:
    """What the report concludes, answers, compares and shows, and what is recommended."""
    report, chosen = plain_document(run), asdict(recommend(run))
    conclusion, decisive = report.decision.conclusion, report.decision.comparisons.decisive
    tables = {part.key: part.table.rows for chapter in report.chapters for part in chapter.sections}
    shown = {key: [(v.text, v.note, v.mark) for row in rows for v in row.values] for key, rows in tables.items()}
    lists = ("evidence", "held_back", "alone", "rejected", "fallback", "paging", "unmeasured", "doubts")
    return {
        "status": report.status,
        "advice": [conclusion.advice, conclusion.candidate and conclusion.candidate.name],
        "answers": {one.subject: [one.verdict, *re.findall(r"[+−-]?\d[\d.,]*", one.numbers)] for one in report.answers},
        "limits": [[line.load, line.limit, line.names] for line in report.limits],
        "changes": {
            cell: {metric: rounded([one.ratio, one.low, one.high, one.call, one.clock]) for metric, one in by.items()}
            for cell, by in decisive.items()
        },
        "tables": {key: digest(str(entries)) for key, entries in shown.items()},
        "recommended": {name: rounded(chosen[name]) for name in ("configuration", "changed", "flags", "quality")},
        "lists": {name: len(chosen[name]) for name in lists},
    }


def verdict_of(folder: Path, code: int) -> dict[str, Any]:
    """The outcome in a verdict.json, and each finding's outcome, change, interval and p."""
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["exit_code"] == code
    findings = {
        finding["id"]: [
            finding["outcome"],
            *rounded([finding["base"], finding["candidate"], finding["change"], *(finding["interval"] or ())]),
            rounded(finding["p"]),
        ]
        for finding in verdict["findings"]
    }
    return {"code": code, "outcome": verdict["outcome"], "findings": findings}


def limit_decisions(run: Path, policy: Path, work: Path) -> dict[str, Any]:
    ended = kvbench("gate", run, "--policy", policy, "--output-dir", work, "--force")
    if not (work / "verdict.json").exists():
        return {"code": ended.code}
    decided = verdict_of(work, ended.code)
    rows = {name.removeprefix("limit/"): [row[0], row[2]] for name, row in decided["findings"].items()}
    return {**decided, "findings": rows}


def unpack_run(folder: Path) -> Path:
    """Unpacks the run that is kept whole, with its loads and samples: two page sizes, 12 requests, 3 repeats."""
    unpack(MEASURED_RUN.read_bytes(), folder)
    return folder / "small"


def whole_run_decisions(work: Path) -> dict[str, Any]:
    """What is decided from a run that is kept whole."""
    run = unpack_run(work)
    limits = limit_decisions(run, REPOSITORY / "ci" / "gates.yaml", work)
    return {"report": run_decisions(read_run(run)), "limits": limits, "history": history_decisions(run)}


Pair = dict[str, tuple[float, float]]
"""By metric: what base and candidate measured."""


def stored_pairs() -> dict[str, tuple[str, list[Pair]]]:
    """Every comparison whose pairs are stored in the repository: its name -> its cell and its pairs."""
    comparisons: dict[str, tuple[str, dict[int, Pair]]] = {}
    for path in sorted(REFERENCE.rglob("*pairs.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                part = "/".join(row[key] for key in ("kind", "method", "run", "round") if key in row)
                name = "/".join(filter(None, (str(path.relative_to(REFERENCE)), part)))
                cell, pairs = comparisons.setdefault(name, (row["cell"], {}))
                assert cell == row["cell"]
                pair = pairs.setdefault(int(row["pair"]), {})
                pair[row["metric"]] = float(row["base"]), float(row["candidate"])
    for path in sorted(REFERENCE.glob("gate/*/verdict.json")):
        findings = [f for f in json.loads(path.read_text())["findings"] if f["suite"] != "served"]
        cell = "/".join(findings[0]["id"].split("/")[1:-1])
        changes = {finding["metric"]: finding["series"] for finding in findings}
        count = len(next(iter(changes.values())))
        made = {i: {name: (100.0, 100.0 * (1 + of[i])) for name, of in changes.items()} for i in range(count)}
        comparisons[str(path.relative_to(REFERENCE))] = cell, made
    return {name: (cell, list(pairs.values())) for name, (cell, pairs) in comparisons.items()}


def write_comparison(folder: Path, cell: str, pairs: Sequence[Pair]) -> None:
    """Writes the folder of a finished comparison of one cell, with these pairs."""
    workload, cell_id = cell.split("/")
    manifest = json.loads((REFERENCE / "gate" / "unchanged" / "manifest.json").read_text())
    row = {"name": cell, "workload": workload, "turn": cell, "base": cell_id, "candidate": cell_id}
    changed = {"cells": [row], "order": {}, "notes": [], "pairs": len(pairs), "seconds": [10.0] * len(pairs)}
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest | changed))
    for number, pair in enumerate(pairs, 1):
        for index, side in enumerate(("base", "candidate")):
            load = folder / side / workload / "cells" / cell_id / "loads" / str(number)
            load.mkdir(parents=True)
            metrics = {"output_throughput": pair["output_throughput"][index]}
            for name in ("ttft", "itl"):
                metrics[f"{name}_ms"] = {"p95": pair[f"p95_{name}_ms"][index]}
            done = {"cell_id": cell_id, "valid": True, "invalid_reasons": [], "server_faults": [], "metrics": metrics}
            (load / "done.json").write_text(json.dumps(done))
            (load / "counters.json").write_text("{}")


def pair_decisions(folder: Path, cell: str, pairs: Sequence[Pair]) -> list[Any]:
    """Exit code, outcome, pairs looked at, then by metric: outcome, change, interval and p."""
    write_comparison(folder, cell, pairs)
    ended = kvbench("gate", folder)
    decided = verdict_of(folder, ended.code)
    looked = json.loads((folder / "verdict.json").read_text())["facts"]["pairs"]
    by_metric = {name.rsplit("/", 1)[1]: [row[0], *row[3:]] for name, row in decided["findings"].items()}
    return [ended.code, decided["outcome"], looked, by_metric]


def history_decisions(*arguments: object) -> dict[str, Any]:
    """By series: the last value, the change, and the drift since the release."""
    ended = kvbench("history", *arguments, "--json")
    shown = json.loads(ended.out)
    series = {}
    for each in shown["series"]:
        drift = each["drift"]
        place = " ".join(str(each["place"].get(key)) for key in ("backend", "model") if each["place"].get(key))
        row = [each["n"], each["better"], each["last"], each["change"], [p["state"] for p in each["points"]]]
        if drift:
            interval = drift["interval"] or ()
            row += [*(drift[key] for key in ("release", "outcome", "change", "margin")), *interval]
        name = " ".join((re.sub(r" \[\w+\]", "", each["cell"]), each["metric"], each["workload"], place))
        while name in series:  # another definition of the cell
            name += "'"
        series[name] = rounded(row)
    return {"code": ended.code, "runs": shown["runs"], "drift": digest(str(shown["drift"])), "series": series}


def side_by_side_decisions(*folders: Path) -> Any:
    """Each ratio against the first run, by cell and letter; why there is none."""
    try:
        groups = groups_of(*map(read_run, folders))
    except UsageError as refused:
        return digest(str(refused))
    return {
        f"{group[0].cell.cell_id} {side.letter}": [
            [one.metric, *rounded([one.ratio, one.low, one.high]), one.call] for one in ratios(group[0], side)
        ] or digest(" ".join(obstacles(group[0], side)))
        for group, side in pairs_of(groups)
    }


SIDE_BY_SIDE = {
    "four engines": [f"four-engines/{name}" for name in ("kvbench", "llamacpp", "transformers", "vllm")],
    "three engines": [f"llamacpp-cpu/{name}" for name in ("kvbench", "llamacpp", "vllm")],
    "without cells": ["mixed-cpu", "mixed-cpu-quality"],
    "two engines": ["vllm-cpu/sweep", "llamacpp-cpu/vllm"],
}
EFFECTS = sorted(path.relative_to(REFERENCE) for path in REFERENCE.glob("*/lockstep/effects-*.json"))


def part_names() -> list[str]:
    """The names of the parts that can be decided each for itself."""
    runs = [name for name, _ in reference_runs()]
    kinds = {
        "report": [*runs, *map(str, EFFECTS)],
        "limits": [f"{name} {policy}" for name in runs for policy in ("gates", "more")],
        "pairs": sorted({name.split(".csv")[0].split("/verdict")[0] for name in stored_pairs()}),
        "history": ["reference"],
        "side by side": list(SIDE_BY_SIDE),
        "whole run": ["small"],
    }
    return [f"{kind}: {name}" for kind, names in kinds.items() for name in names]


def decide(part: str, work: Path) -> Any:
    """The decisions of one part; files are written in ``work``."""
    kind, name = part.split(": ", 1)
    run = REFERENCE / name.split(" ")[0]
    if kind == "report":
        if run.is_dir():
            return run_decisions(read_run(run))
        effects = EngineTime.model_validate_json(run.read_text())
        decided = run_decisions(replace(read_run(run.parent.parent), engine_time=effects))
        return {name: decided[name] for name in ("advice", "answers", "changes")}
    if kind == "limits":
        policy = REPOSITORY / "ci" / "gates.yaml"
        if name.endswith("more"):
            policy = work / "more.yaml"
            policy.write_text(_POLICY)
        return limit_decisions(run, policy, work)
    if kind == "pairs":
        comparisons = {key: value for key, value in stored_pairs().items() if key.startswith(name)}
        return {
            key: pair_decisions(work / f"comparison-{i}", cell, pairs)
            for i, (key, (cell, pairs)) in enumerate(comparisons.items())
        }
    if kind == "side by side":
        return side_by_side_decisions(*(REFERENCE / each for each in SIDE_BY_SIDE[name]))
    return {
        "history": lambda: history_decisions(REFERENCE),
        "whole run": lambda: whole_run_decisions(work),
    }[kind]()


def decisions() -> dict[str, Any]:
    """All parts."""
    parts = {}
    for part in part_names():
        with tempfile.TemporaryDirectory() as work:
            parts[part] = decide(part, Path(work))
    return parts


if __name__ == "__main__":
    compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # the tracked tree has a limit
    lines = (f"{json.dumps(part)}:{compact(made)}" for part, made in decisions().items())
    print("{", ",\n".join(lines), "}", sep="\n")
