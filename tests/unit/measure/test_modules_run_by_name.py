"""A process that runs a module by its name is an arrow between rooms that import-linter does not see."""

from __future__ import annotations

import re
import tomllib

from tests.support.loads import ROOT

UPWARDS = {("load/locustfile.py", "kvbench.measure.locust_job")}
"""What Locust's own command line sends is drawn for a server, which the rooms above the load client alone know."""


def test_a_module_that_is_run_by_name_lies_in_a_room_below():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["kvbench"])
    height = {room: -level for level, line in enumerate(layers) for room in line.split(" | ")}
    arrows = set()
    for path in (ROOT / "kvbench").glob("*/**/*.py"):
        file = path.relative_to(ROOT / "kvbench").as_posix()
        arrows |= {(file, name) for name in re.findall(r'"-m", "(kvbench\.[\w.]+)"', path.read_text())}
    assert ("load/launch.py", "kvbench.load") in arrows
    upwards = {(file, name) for file, name in arrows if height[name.split(".")[1]] > height[file.split("/")[0]]}
    assert upwards == UPWARDS
