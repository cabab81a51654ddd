"""The documented runs of the gate on its own engine: their pairs, judged again, give the verdicts that stand there."""

import csv
from collections import Counter, defaultdict

import numpy as np

from kvbench.common.packages import REPOSITORY
from kvbench.gate.compare.conclude import look_at
from kvbench.gate.timing.pairs import PairTable
from kvbench.gate.timing.rules import DEFAULT_RULES
from kvbench.gate.verdict.verdict import FAIL, PASS

FOLDER = REPOSITORY / "results" / "reference" / "gate"
METRICS = [metric.name for metric in DEFAULT_RULES.metrics]


def rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))


def tables() -> dict[tuple[str, str], PairTable]:
    """One table per run, of a single cell."""
    measured: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows("pairs.csv"):
        measured[row["kind"], row["run"]].append(row)
    return {key: table(of) for key, of in measured.items()}


def table(of: list[dict[str, str]]) -> PairTable:
    (cell,) = {row["cell"] for row in of}
    assert [row["metric"] for row in of] == METRICS * (len(of) // len(METRICS))
    base, candidate = (
        np.array([float(row[side]) for row in of]).reshape(-1, 1, len(METRICS)) for side in ("base", "candidate")
    )
    return PairTable.from_values(base, candidate, [cell], [DEFAULT_RULES.class_of(cell)], DEFAULT_RULES.metrics)


def test_the_pairs_give_the_verdicts_that_are_documented():
    found = {key: look_at(table, DEFAULT_RULES) for key, table in tables().items()}
    assert {key: (each.outcome, each.pairs) for key, each in found.items()} == {
        (row["kind"], row["run"]): (row["outcome"], int(row["pairs"])) for row in rows("runs.csv")
    }


def test_an_unchanged_engine_passes_and_slower_decode_steps_are_caught():
    counts = Counter((row["kind"], row["outcome"]) for row in rows("runs.csv"))
    assert counts == {("A/A", PASS): 20, ("5% slower", FAIL): 20, ("2% slower", FAIL): 20}
