"""Pairs are measured again when a load was no measurement, and given up in the end."""

from __future__ import annotations

import shutil
from functools import partial
from types import SimpleNamespace

import pytest

from kvbench.gate.compare.clock import Clock
from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.compare.pair_runner import ATTEMPTS, ATTEMPTS_TO_BLAME, PairRunner, measure_launched
from kvbench.gate.timing.plan import SIDES, match_designs, turns
from kvbench.gate.timing.rules import DEFAULT_RULES
from kvbench.runs.results import FailedLoad
from kvbench.workload.design import make_design
from kvbench.workload.load_section import load_point
from tests.support.compare_folders import write_load

POINTS = (load_point("closed", concurrency=4, rate=None, num_requests=8),)


class Sides:
    """Stands for the servers of both sides: each launch takes the next of what a side is told to do.

    ``good``, a reason why the load is invalid, ``!reason`` for a fault of the server's own, ``?reason`` for what it
    refused, ``dead`` for none at all, ``client`` where the load client failed, ``silent`` for a load without ITL.
    """

    def __init__(self, folder, **told):
        self.folder, self.launched = folder, []
        self.told = told | {side: list(told.get(side, ())) for side in SIDES}
        self.runners = {(side, "w"): self._runner(side) for side in SIDES}

    def _runner(self, side):
        failures = []

        def run_block(block):
            self.launched.append((side, block.repeat))
            word = self.told[side].pop(0) if self.told[side] else "good"
            if second := self.told.get("second"):
                word = second if len(self.launched) % 2 == 0 else "good"
            log = self.folder.run(side, "w").server_log(block.block_id)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(word)
            for cell in block.cells:
                if word in ("dead", "client"):
                    failures.append(
                        FailedLoad(cell_id=cell.cell_id, repeat=block.repeat, reason=word, of_server=word == "dead")
                    )
                    continue
                reasons = [] if word in ("good", "silent") else [word.lstrip("!?")]
                faults = reasons if word[0] in "!?" else []
                path = self.folder.run(side, "w").load(cell.cell_id, block.repeat)
                more = {"valid": not reasons, "invalid_reasons": reasons, "server_faults": faults}
                more |= {"invalid_reasons": [], "refused": reasons[0]} if word[0] == "?" else {}
                write_load(path, cell.cell_id, (1.0, 1.0, None if word == "silent" else 1.0), **more)

        return SimpleNamespace(run_block=run_block, failures=failures)


@pytest.fixture
def matches():
    design = make_design({"layout": "paged"}, {"layout": ["contiguous"]}, POINTS, "one_at_a_time")
    return match_designs("w", design, design)


def run(tmp_path, matches, **told):
    folder = CompareFolder(tmp_path)
    sides = Sides(folder, **told)
    sides.kept, sides.failed, sides.most = [], [], []
    sides.runner = PairRunner(
        folder,
        partial(measure_launched, sides.runners, Clock()),
        DEFAULT_RULES.metrics,
        lambda turn, first: sides.kept.append((turn.match.key, first)),
        lambda attempt, most: (sides.failed.append(attempt), sides.most.append(most)),
        resume=2,
    )
    sides.gave_up = sides.runner.run(turns(matches, 1, 5), 1)
    return sides


def test_a_good_pair_is_measured_once_and_not_again(tmp_path, matches):
    sides = run(tmp_path, matches)
    assert sides.gave_up is None and sorted(sides.launched) == [("base", 1)] * 2 + [("candidate", 1)] * 2
    sides.runner.run(turns(matches, 1, 5), 1)
    assert len(sides.launched) == 4
    assert not (tmp_path / "set-aside").exists()
    cell = matches[0].base_cells[0].cell_id
    shutil.rmtree(CompareFolder(tmp_path).run("base", "w").load(cell, 1))  # as an interruption leaves a half
    sides.runner.run(turns(matches, 1, 5), 1)
    assert sorted(sides.launched[4:]) == [("base", 1), ("candidate", 1)]  # measured anew with its other half


def test_both_halves_of_a_disturbed_pair_are_measured_again_the_other_side_first(tmp_path, matches):
    sides = run(tmp_path, matches[:1], base=["others used the machine"])
    (turn,) = turns(matches[:1], 1, 5)
    assert [side for side, _ in sides.launched] == [*turn.sides, *turn.sides[::-1]]
    assert sides.kept == [(turn.match.key, turn.sides[1])]
    cell = matches[0].base_cells[0].cell_id
    for side in SIDES:  # kept for reading, the server's words too
        kept = tmp_path / "set-aside" / side / "w"
        assert (kept / cell / "1-1" / "done.json").is_file()
        assert len(list((kept / "logs").iterdir())) == 1
    assert [(each.attempt, each.blamed) for each in sides.failed] == [(1, None)]


MANY = ATTEMPTS_TO_BLAME


@pytest.mark.parametrize(
    ("told", "blamed"),
    [
        ({"candidate": ["dead"] * MANY}, ["candidate"] * MANY),
        ({"candidate": ["?served 20 of 52 requests"] * MANY}, ["candidate"] * MANY),
        ({"candidate": ["silent"] * MANY}, ["candidate"] * MANY),
        ({"base": ["dead"] * MANY}, ["base"] * ATTEMPTS),
        ({"base": ["others"] * MANY}, [None] * ATTEMPTS),
        ({"candidate": ["client"] * MANY}, [None] * ATTEMPTS),
        ({"base": ["dead"] * MANY, "candidate": ["dead"] * MANY}, [None] * ATTEMPTS),
        ({"base": ["others"] * MANY, "candidate": ["dead"] * MANY}, [None] * ATTEMPTS),
        ({"candidate": ["others", "dead", "dead"]}, [None, "candidate", "candidate"]),
        ({"second": "dead"}, ["candidate", "base", "candidate"]),  # what comes second is nobody's fault
    ],
)
def test_a_pair_that_is_never_measured_is_given_up_and_says_whose_fault_it_is(tmp_path, matches, told, blamed):
    sides = run(tmp_path, matches[:1], **told)
    assert [each.blamed for each in sides.failed] == blamed
    assert [(each.attempt, each.resume) for each in sides.failed] == [(n, 2) for n in range(1, len(blamed) + 1)]
    alone = [set(blamed[:n]) == {"candidate"} for n in range(1, len(blamed) + 1)]
    assert sides.most == [MANY if each else ATTEMPTS for each in alone]
    assert (sides.gave_up.pair, sides.gave_up.turn) == (1, matches[0].key)
    assert not sides.kept
