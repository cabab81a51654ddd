"""Pairs are measured again when a load was no measurement, and given up in the end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvbench.block import Failure
from kvbench.design import load_point, make_design
from kvbench.gate.folder import CompareFolder
from kvbench.gate.pair_runner import ATTEMPTS, PairRunner, PairVoid
from kvbench.gate.plan import SIDES, match_designs, turns
from tests.support.compare_folders import write_load

POINTS = (load_point("closed", concurrency=4, rate=None, num_requests=8),)


class Sides:
    """Stands for the servers of both sides: each launch takes the next of what a side is told to do.

    ``good``, a reason why the load is invalid, ``!reason`` for a fault of the server's own, ``dead`` for none at all.
    """

    def __init__(self, folder, **told):
        self.folder, self.told, self.launched = folder, {side: list(told.get(side, ())) for side in SIDES}, []
        self.runners = {(side, "w"): self._runner(side) for side in SIDES}

    def _runner(self, side):
        failures = []

        def run_block(block):
            self.launched.append((side, block.repeat))
            word = self.told[side].pop(0) if self.told[side] else "good"
            for cell in block.cells:
                if word == "dead":
                    failures.append(Failure(cell.cell_id, block.repeat, "the server died"))
                    continue
                reasons = [] if word == "good" else [word.removeprefix("!")]
                faults = reasons if word.startswith("!") else []
                path = self.folder.run(side, "w").load(cell.cell_id, block.repeat)
                more = {"valid": not reasons, "invalid_reasons": reasons, "server_faults": faults}
                write_load(path, cell.cell_id, (1.0, 1.0, 1.0), **more)

        return SimpleNamespace(run_block=run_block, failures=failures)


@pytest.fixture
def matches():
    design = make_design({"layout": "paged"}, {"layout": ["contiguous"]}, POINTS, "one_at_a_time")
    return match_designs("w", design, design)


def run(tmp_path, matches, **told):
    folder = CompareFolder(tmp_path)
    sides = Sides(folder, **told)
    said = []
    runner = PairRunner(folder, sides.runners, said.append)
    try:
        runner.run(turns(matches, 1, 5), 1)
    finally:
        sides.said, sides.voids, sides.runner = said, runner.voids, runner
    return sides


def test_a_good_pair_is_measured_once_and_not_again(tmp_path, matches):
    sides = run(tmp_path, matches)
    assert sorted(sides.launched) == [("base", 1)] * 2 + [("candidate", 1)] * 2
    sides.runner.run(turns(matches, 1, 5), 1)
    assert len(sides.launched) == 4
    assert not (tmp_path / "set-aside").exists()


def test_both_halves_of_a_disturbed_pair_are_measured_again_side_by_side(tmp_path, matches):
    sides = run(tmp_path, matches[:1], base=["others used the machine"])
    assert [side for side, _ in sides.launched] == [turns(matches[:1], 1, 5)[0].first] * 1 + [
        turns(matches[:1], 1, 5)[0].sides[1],
        *turns(matches[:1], 1, 5)[0].sides,
    ]
    cell = matches[0].base_cells[0].cell_id
    for side in SIDES:
        assert (tmp_path / "set-aside" / side / "w" / cell / "1-1" / "done.json").is_file()  # kept for reading
    assert "others used the machine" in sides.said[0]
    assert [void.attempt for void in sides.voids] == [1]


def test_a_half_that_an_interruption_left_is_measured_anew_with_its_other_half(tmp_path, matches):
    cell = matches[0].base_cells[0].cell_id
    write_load(CompareFolder(tmp_path).run("base", "w").load(cell, 1), cell, (1.0, 1.0, 1.0))
    sides = run(tmp_path, matches[:1])
    assert sorted(sides.launched) == [("base", 1), ("candidate", 1)]


@pytest.mark.parametrize(
    ("base", "candidate", "guilty"),
    [
        ([], ["dead"] * ATTEMPTS, "candidate"),
        ([], ["!requests failed"] * ATTEMPTS, "candidate"),
        (["dead"] * ATTEMPTS, [], "base"),
        (["others"] * ATTEMPTS, [], None),
        (["dead"] * ATTEMPTS, ["dead"] * ATTEMPTS, None),
        ([], ["others", "dead", "dead"], None),
    ],
)
def test_a_pair_that_is_never_measured_is_given_up_and_says_whose_fault_it_is(
    tmp_path, matches, base, candidate, guilty
):
    with pytest.raises(PairVoid) as void:
        run(tmp_path, matches[:1], base=base, candidate=candidate)
    assert void.value.guilty == guilty
    assert len(void.value.voids) == ATTEMPTS
