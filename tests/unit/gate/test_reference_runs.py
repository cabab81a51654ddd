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


def test_the_pairs_give_the_verdicts_that_are_documented():
    measured: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows("pairs.csv"):
        measured[row["kind"], row["run"]].append(row)
    found = {}
    for run, of in measured.items():
        (cell,) = {row["cell"] for row in of}
        assert [row["metric"] for row in of] == METRICS * (len(of) // len(METRICS))
        sides = (np.array([float(row[side]) for row in of]).reshape(-1, 1, 3) for side in ("base", "candidate"))
        table = PairTable.from_values(*sides, [cell], [DEFAULT_RULES.class_of(cell)], DEFAULT_RULES.metrics)
        judgement = look_at(table, DEFAULT_RULES)
        found[run] = judgement.outcome, judgement.pairs
    assert found == {(row["kind"], row["run"]): (row["outcome"], int(row["pairs"])) for row in rows("runs.csv")}
    counts = Counter((row["kind"], row["outcome"]) for row in rows("runs.csv"))
    assert counts == {("A/A", PASS): 20, ("5% slower", FAIL): 20, ("2% slower", FAIL): 20}
