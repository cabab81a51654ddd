"""The documented runs of the gate on its own engine: their pairs, judged again, give the verdicts that stand there."""

import csv
from collections import Counter, defaultdict

import numpy as np

from kvbench.gate.conclude import look_at
from kvbench.gate.pairs import PairTable
from kvbench.gate.rules import DEFAULT_RULES
from kvbench.gate.verdict import FAIL
from kvbench.house import HOUSE

FOLDER = HOUSE / "results" / "reference" / "gate"
METRICS = [metric.name for metric in DEFAULT_RULES.metrics]


def rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))


def tables() -> dict[tuple[str, str], PairTable]:
    """[pairs, 1, metrics] per run, from the measured values of both sides."""
    values: dict[tuple[str, str], dict[tuple[int, str], float]] = defaultdict(dict)
    cells = set()
    for row in rows("pairs.csv"):
        ratio = float(row["candidate"]) / float(row["base"])
        values[row["kind"], row["run"]][int(row["pair"]), row["metric"]] = float(np.log(ratio))
        cells.add(row["cell"])
    (cell,) = cells
    return {
        key: PairTable(
            np.array([[[of[pair, metric] for metric in METRICS]] for pair in range(1, len(of) // len(METRICS) + 1)]),
            (cell,),
            (cell.split("/")[0],),
            DEFAULT_RULES.metrics,
        )
        for key, of in values.items()
    }


def test_the_pairs_give_the_verdicts_that_are_documented():
    found = {key: look_at(table, DEFAULT_RULES) for key, table in tables().items()}
    assert {key: (each.outcome, each.pairs) for key, each in found.items()} == {
        (row["kind"], row["run"]): (row["outcome"], int(row["pairs"])) for row in rows("runs.csv")
    }


def test_no_alarm_without_a_change_and_every_slowdown_caught():
    counts = Counter((row["kind"], row["outcome"] == FAIL) for row in rows("runs.csv"))
    assert counts == {("A/A", False): 20, ("slowed", True): 20}
