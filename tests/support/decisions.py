"""What kvbench decides from the data stored in results/reference, read off its commands and the files that they write.

`python -m tests.support.decisions > tests/data/decisions.json` stores the decisions of the code that is there.
tests/integration/test_decisions_held.py compares them with those of commit 11496389. Stored are verdict words, chosen
configurations, calls, ratios with their intervals, and digests of the report's sections; no sentences.
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
import shutil
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from kvbench.cli.main import main
from kvbench.common.packages import REPOSITORY

REFERENCE = REPOSITORY / "results" / "reference"
STORED = REPOSITORY / "tests" / "data" / "decisions.json"
MEASURED_RUN = REPOSITORY / "tests" / "data" / "measured_run.tar.xz"

CALLS = {
    "ahead": "better", "behind": "worse", "open": "undecided", "higher": "better", "lower": "worse",
    "unclear": "undecided",
}  # fmt: skip  # words of earlier versions for a call; of ratios of throughput, which is better when it is higher
_RUN = "MEASURED-RUN"
_POLICY = """
limits:
  - {metric: output_tokens_per_s, min: 200, cells: "*-c32"}
  - {metric: p95_ttft_ms, max: 300}
  - {metric: steady_p95_ttft_ms, max: 300, cells: "*-c3"}
  - {metric: p99_itl_ms, max: 150, every: true, cells: "*-c3"}
  - {metric: mean_tpot_ms, max: 30, cells: "*-c12"}
  - {metric: goodput, min: 2, cells: "*-c3"}
  - {metric: peak_rss_bytes, max: 600MiB, cells: "*-c32"}
  - {metric: num_preemptions, max: 5, cells: "*-c32"}
  - {metric: prefix_cache_hit_rate, min: 20%, cells: "*-c3"}
  - {metric: per_class.short chat.ttft_ms.p95, max: 1500, cells: "*-c32"}
  - {metric: capacity.capacity_tokens, min: 6200, cells: "*-c32"}
  - {slo: 95%}
  - {ratio: output_tokens_per_s, min: 0.95}
  - {ratio: p95_itl_ms, max: 1.1, of: "paged-p8", to: "paged-p16"}
  - {kld: mean, max: 0.002}
  - {kld: same_argmax, min: 99%}
  - {quality: passkey, min: 98%}
  - {quality: within}
"""


_SIMULATED = """
name: small
seed: 1
model: {config: llama-32m, load_format: dummy, dtype: float32}
engine: {layout: paged, page_size: 16, max_num_seqs: 8}
sweep: {enable_prefix_caching: [true], layout: [contiguous]}
load:
  concurrency: [8]
  num_requests: 24
  repeats: 3
  slo: {ttft_ms: 500}
  prompts:
    kind: synthetic
    classes:
      - {name: short chat, share: 0.7, prompt_tokens: [16, 200], output_tokens: [8, 40]}
      - {name: long, share: 0.3, prompt_tokens: 600, output_tokens: 8}
    shared_prefix: [{tokens: 64, share: 0.5, families: 2}]
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
    """The value with its numbers in 6 digits and calls in today's words."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return value


def plain(text: str) -> str:
    """The text's words and numbers, with calls in today's words."""
    text = text.replace(str(REFERENCE), _RUN).replace("results/reference", _RUN)
    words = re.findall(r"[\w.%+−-]+", re.sub(r"\S*/small\b", _RUN, text))
    return " ".join(CALLS.get(word.lower(), word) for word in words)


def digest(text: str) -> str:
    return hashlib.sha256(plain(text).encode()).hexdigest()[:10]


def sections(markdown: str) -> dict[str, str]:
    """The sections of a Markdown text by heading, a number behind it where several have the same."""
    parts, title = defaultdict[str, list[str]](list), "top"
    for line in markdown.splitlines():
        if match := re.match(r"#+ (.*)", line):
            title = match[1]
            while title in parts:
                title += "'"
        parts[title].append(line)
    return {name: "\n".join(lines) for name, lines in parts.items()}


def table_rows(section: str) -> list[list[str]]:
    """The rows of the Markdown tables of a section, without heads."""
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines() if "|" in line]
    heads = {i - 1 for i, row in enumerate(rows) if set("".join(row)) <= set("-: ")}
    return [row for i, row in enumerate(rows) if i not in heads and i - 1 not in heads]


def reference_runs() -> Iterator[tuple[str, Path]]:
    """Name and folder of each sweep's run that came with the repository."""
    for manifest in sorted(REFERENCE.rglob("manifest.json")):
        if (manifest.parent / "summary.csv").is_file() and "h200" not in manifest.parts:
            yield str(manifest.parent.relative_to(REFERENCE)), manifest.parent


def report_decisions(run: Path, work: Path) -> dict[str, Any]:
    """First sentence, answers, limits, effects in engine time, and the cells of summary.csv."""
    ended = kvbench("report", run, "--output-dir", work)
    parts = sections((work / "report.md").read_text())
    verdict = re.search(r"^\*\*(.*)\*\*$", next(iter(parts.values())), re.MULTILINE)
    verdicts, numbers = _halves(table_rows(parts.get("Answers", "")))
    answers = {
        subject: [plain(text.split(": ")[0]), _numbers(evidence)]
        for (subject, text), (_, evidence) in zip(verdicts, numbers, strict=True)
        if subject != "What it means"
    }
    effects = {
        f"{row[0]} {column}": [float(ratio), float(low), float(high), CALLS.get(call, call)]
        for row in table_rows(parts.get("Engine time", ""))
        for column, cell in enumerate(row)
        for ratio, low, high, call in re.findall(r"([+-][\d.]+) % \(([+-][\d.]+) to ([+-][\d.]+), (\w+)", cell)
    }
    said = parts.keys() - {"Manifest"}
    return {
        "code": ended.code,
        "verdict": plain(verdict[1]) if verdict else None,
        "answers": answers,
        "limits": [plain(" ".join(row)) for row in _limits(parts.get("What limited it", ""))],
        "effects": effects,
        "cells": _summary_cells(work / "summary.csv"),
        "sections": {name: digest(parts[name]) for name in sorted(said)},
        "printed": digest(re.sub(r"\S*/report\.\S+|\S*summary\.csv|─+", "", ended.out)),
    }


def _halves(rows: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of the answers, and those of their numbers, which are folded below them."""
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def _limits(section: str) -> list[list[str]]:
    """Load, limit and configurations; what was seen is folded below them."""
    return table_rows(section.split("<details>")[0])


def _numbers(text: str) -> list[str]:
    return re.findall(r"[+−-]?\d[\d.,]*", text)


def _summary_cells(path: Path) -> dict[str, Any]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["cell_id"]: _summary_cell(row) for row in rows}


def _summary_cell(row: Mapping[str, str]) -> list[Any]:
    numbers = [
        rounded(float(text)) if (text := row.get(name, "")) else None
        for name in ("output_tokens_per_s", "ttft_ms_p95", "itl_ms_p95", "ratio", "ratio_ci95_low", "ratio_ci95_high")
    ]
    call = row.get("ratio_verdict", "")
    return [row["valid"], row["repeats"], *numbers, CALLS.get(call, call)]


def recommend_decisions(run: Path) -> dict[str, Any]:
    """What is recommended, held back, rejected, and what paging does at each load."""
    ended = kvbench("recommend", run, "--json")
    chosen = json.loads(ended.out)
    lists = ("effects", "evidence", "held_back", "alone", "rejected", "fallback", "paging")
    return {
        "code": ended.code,
        **{name: rounded(chosen[name]) for name in ("configuration", "changed", "flags", "baseline", "pair")},
        "quality": plain(json.dumps(chosen["quality"], sort_keys=True)),
        "together": plain(json.dumps(chosen["together"])),
        "in_doubt": plain(chosen["in_doubt"]),
        **{name: [_subject(line) for line in chosen[name]] for name in lists},
        "missing": len(chosen["unmeasured"]),
    }


def _subject(line: Any) -> Any:
    """What a line is of, and its digest; an object as it is."""
    if isinstance(line, str):
        return [line.split(":")[0][:40], digest(line)]
    return rounded({key: CALLS.get(value, value) if key == "call" else value for key, value in line.items()})


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
    with tarfile.open(MEASURED_RUN) as archive:
        archive.extractall(folder, filter="data")
    return folder / "small"


def whole_run_decisions(work: Path) -> dict[str, Any]:
    """What each command decides from a run that is kept whole."""
    run = unpack_run(work)
    (work / "report").mkdir()
    return {
        "report": report_decisions(run, work / "report"),
        "recommend": recommend_decisions(run),
        "limits": limit_decisions(run, REPOSITORY / "ci" / "gates.yaml", work),
        "history": history_decisions(run),
    }


def simulated_decisions(work: Path) -> dict[str, Any]:
    """The metrics of each load of a simulated sweep, and what its report decides."""
    (work / "small.yaml").write_text(_SIMULATED)
    options = ("--simulate", "--device", "L4", "--model", "llama-3.1-8b", "--output-dir", work / "results")
    ended = kvbench("sweep", work / "small.yaml", *options)
    (run,) = (work / "results" / "small").iterdir()
    loads = {}
    for path in sorted(run.glob("cells/*/loads/*/done.json")):
        done = json.loads(path.read_text())
        loads["/".join(path.parts[-4:-1])] = [done["valid"], _digest_of_numbers(done["metrics"])]
    said = report_decisions(run, work)
    names = ("verdict", "answers", "limits", "cells")
    return {"code": ended.code, "loads": loads, **{name: said[name] for name in names}}


def _digest_of_numbers(metrics: Mapping[str, Any]) -> str:
    """A digest of all numbers in an object but zeros, with their places, in 6 digits."""
    numbers = []

    def collect(value: Any, place: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                collect(inner, f"{place}.{key}")
        elif isinstance(value, int | float) and not isinstance(value, bool) and value:
            numbers.append(f"{place} {value:.6g}")

    collect(metrics, "")
    return digest(" ".join(sorted(numbers)))


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
            row += [
                drift["release"],
                CALLS.get(drift["outcome"], drift["outcome"]),
                drift["change"],
                drift["margin"],
                *interval,
            ]
        name = " ".join((re.sub(r" \[\w+\]", "", each["cell"]), each["metric"], each["workload"], place))
        while name in series:  # another definition of the cell
            name += "'"
        series[name] = rounded(row)
    return {"code": ended.code, "runs": shown["runs"], "drift": plain(shown["drift"]), "series": series}


def write_changed_run(source: Path, folder: Path, factor: float, day: int) -> Path:
    """A copy of a run on another day: throughputs times ``factor`` and latencies divided by it, within 1 %."""
    shutil.copytree(source, folder)
    stored = json.loads((folder / "manifest.json").read_text())
    started = f"2026-12-{day:02d}T10:00:00+00:00"
    commit = {"sha": f"{day:x}" * 40, "short_sha": f"{day:x}" * 7, "dirty": False}
    (folder / "manifest.json").write_text(json.dumps(stored | {"started": started, "git": commit}))
    for path in folder.glob("cells/*/summary.json"):
        summary = json.loads(path.read_text())
        for repeat in summary["repeats"]:
            _scale(repeat["metrics"], factor * (1 + 0.01 * math.sin(7 * repeat["repeat"] + day)))
        path.write_text(json.dumps(summary))
    return folder


def repeat_more(run: Path, repeats: int) -> None:
    """Gives each cell of a run so many repeats: those that it has, again and again."""
    for path in run.glob("cells/*/summary.json"):
        summary = json.loads(path.read_text())
        there = summary["repeats"]
        summary["repeats"] = [there[i % len(there)] | {"repeat": i + 1} for i in range(repeats)]
        path.write_text(json.dumps(summary))


def _scale(metrics: dict[str, Any], factor: float) -> None:
    for name, value in metrics.items():
        if isinstance(value, dict):
            _scale(value, factor)
        elif isinstance(value, int | float) and name.endswith("throughput"):
            metrics[name] = value * factor
        elif isinstance(value, int | float) and name in ("mean", "p50", "p90", "p95", "p99", "min", "max"):
            metrics[name] = value / factor


def drift_decisions(source: Path, work: Path) -> dict[str, Any]:
    """By factor: the drift of one run since a release, with the exit code of --fail-on-drift."""
    decided = {}
    for factor in (0.7, 0.97, 1.0, 1.3):
        folder = work / str(factor)
        released = write_changed_run(source, folder / "mixed" / "released", 1.0, 1)
        (released / "release.json").write_text('{"release": "v1"}')
        write_changed_run(source, folder / "mixed" / "now", factor, 2)
        found = history_decisions(folder, "--release", "v1", "--fail-on-drift")
        rows = {name.rsplit(" ", 1)[0]: row[6:] for name, row in found["series"].items() if len(row) > 5}
        if factor != 0.97:
            rows = {name: row[0] for name, row in rows.items()}
        decided[str(factor)] = [found["code"], found["drift"], rows]
    return decided


def write_loads(run: Path) -> Path:
    """Gives a run that came without its loads a done.json for each, from the repeats in its summaries."""
    for path in run.glob("cells/*/summary.json"):
        for repeat in json.loads(path.read_text())["repeats"]:
            load = path.parent / "loads" / str(repeat["repeat"])
            load.mkdir(parents=True)
            validity = {"valid": True, "invalid_reasons": [], "server_faults": []}
            (load / "done.json").write_text(json.dumps({"cell_id": path.parent.name, **validity, **repeat}))
            (load / "counters.json").write_text(json.dumps(repeat["server"]))
    return run


def compare_decisions(source: Path, work: Path) -> dict[str, Any]:
    """By factor: the verdict of `kvbench compare` on a stored run and one that is changed by the factor."""
    longer = shutil.copytree(source, work / "longer")
    repeat_more(longer, 9)
    base = write_loads(write_changed_run(longer, work / "base", 1.0, 1))
    decided = {}
    for factor in (0.7, 0.985, 1.0):
        changed = write_loads(write_changed_run(longer, work / f"changed-{factor}", factor, 2))
        ended = kvbench("compare", base, changed, "--force", "--output-dir", work / f"results-{factor}")
        (verdict,) = (work / f"results-{factor}").glob("compare/*/verdict.json")
        found = verdict_of(verdict.parent, ended.code)
        cells = Counter(f"{name.rsplit('/', 1)[1]} {row[0]}" for name, row in found["findings"].items())
        overall = {name: row for name, row in found["findings"].items() if name.startswith("overall/")}
        decided[str(factor)] = {**found, "findings": overall, "counts": dict(sorted(cells.items()))}
    return decided


def side_by_side_decisions(work: Path, *runs: Path) -> dict[str, Any]:
    ended = kvbench("report", *runs, "--output-dir", work)
    if not (work / "compare.md").exists():
        return {"code": ended.code}
    parts = list(sections((work / "compare.md").read_text()).items())
    headline = plain(parts[0][0])
    return {"code": ended.code, "headline": headline, "sections": {name: digest(text) for name, text in parts[1:]}}


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
        "recommend": runs,
        "limits": [f"{name} {policy}" for name in runs for policy in ("gates", "more")],
        "pairs": sorted({name.split(".csv")[0].split("/verdict")[0] for name in stored_pairs()}),
        "history": ["reference"],
        "drift": ["mixed-cpu", "four-engines/kvbench"],
        "compare": ["mixed-cpu", "four-engines/kvbench"],
        "side by side": list(SIDE_BY_SIDE),
        "whole run": ["small"],
        "simulated": ["small"],
    }
    return [f"{kind}: {name}" for kind, names in kinds.items() for name in names]


def decide(part: str, work: Path) -> Any:
    """The decisions of one part; files are written in ``work``."""
    kind, name = part.split(": ", 1)
    run = REFERENCE / name.split(" ")[0]
    if kind == "report":
        if run.is_dir():
            return report_decisions(run, work)
        decided = report_decisions(_with_effects(run, work / "run"), work)
        return {name: decided[name] for name in ("code", "verdict", "answers", "effects")}
    if kind == "recommend":
        return recommend_decisions(run)
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
    makers = {"drift": drift_decisions, "compare": compare_decisions}
    if kind in makers:
        return makers[kind](run, work)
    if kind == "side by side":
        return side_by_side_decisions(work, *(REFERENCE / each for each in SIDE_BY_SIDE[name]))
    return {
        "history": lambda: history_decisions(REFERENCE),
        "whole run": lambda: whole_run_decisions(work),
        "simulated": lambda: simulated_decisions(work),
    }[kind]()


def _with_effects(effects: Path, folder: Path) -> Path:
    """The run beside these effects in engine time, with them in the place of its own."""
    shutil.copytree(effects.parent.parent, folder)
    shutil.copyfile(effects, folder / "lockstep" / "effects.json")
    return folder


def decisions() -> dict[str, Any]:
    """All parts."""
    parts = {}
    for part in part_names():
        with tempfile.TemporaryDirectory() as work:
            parts[part] = decide(part, Path(work))
    return parts


if __name__ == "__main__":
    lines = (f"{json.dumps(part)}: {json.dumps(made, ensure_ascii=False)}" for part, made in decisions().items())
    print("{", ",\n".join(lines), "}", sep="\n")
