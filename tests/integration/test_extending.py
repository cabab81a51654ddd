"""The examples of docs/extending.md, in a package outside of the repository: each is used through the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoints, distributions
from pathlib import Path

import click
import pytest
import yaml

from kvbench.cli.groups import PluginCommands, SectionedGroup
from kvbench.common import plugins
from kvbench.common.errors import UsageError
from kvbench.metrics.definitions import Metric
from kvbench.runs.read import read_run
from tests.support.sweep_parts import ROOT, TINY
from tests.support.synthetic_run import PAIR, make_run
from tests.support.toy_engine import Scenario

pytestmark = pytest.mark.timeout(600)
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
GROUPS = ("commands", "targets", "trace_formats", "metrics", "figures", "claims", "instruments")


def write_package(folder: Path, entry_points: str, files: dict[str, str], name: str = "my-kv") -> None:
    """Writes an importable package ``my_kv`` with the metadata that pip would leave under ``name``."""
    (folder / "my_kv").mkdir(parents=True)
    for file, text in {"my_kv/__init__.py": "", **files}.items():
        (folder / file).write_text(text, encoding="utf-8")
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(entry_points, encoding="utf-8")


def as_ini(groups: dict[str, dict[str, str]]) -> str:
    """Writes entry points as pip stores them."""
    lines = []
    for group, names in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """The package of the page: its entry points from the indented TOML, its files from the Python blocks."""
    folder = tmp_path_factory.mktemp("package")
    toml = PAGE[PAGE.index("    [project") : PAGE.index("The name on the left")]
    table = tomllib.loads(re.sub(r"^ {4}", "", toml, flags=re.MULTILINE))["project"]["entry-points"]
    assert set(table) == {f"kvbench.{group}" for group in GROUPS}
    blocks = re.findall(r"```python\n# (my_kv/\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
    write_package(folder, as_ini(table), dict(blocks))
    return folder


def kvbench(package: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(package), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "kvbench", *map(str, words)],
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", **variables},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def workload(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("workload") / "tiny.yaml"
    load = {**TINY["load"], "repeats": 1}
    file.write_text(yaml.safe_dump({**TINY, "load": load, "sweep": {}, "name": "tiny"}))
    return file


@pytest.fixture(scope="module")
def run(package, workload, tmp_path_factory) -> Path:
    """A sweep of the engine that the package adds, which is launched."""
    results = tmp_path_factory.mktemp("results")
    swept = kvbench(
        package, "sweep", workload, "--target", "my-engine", "--target-python", sys.executable, "--no-calibration",
        "--lockstep-minutes", "0", "--no-quality", "--wait-idle", "0", "--output-dir", results,
    )  # fmt: skip
    folders = list((results / "tiny").glob("*"))
    assert folders, swept.stderr + swept.stdout
    return folders[0]


def test_a_command_is_listed_and_runs(package, tmp_path):
    shown = kvbench(package, "--help")
    assert "Added by other packages" in shown.stdout and "fastest" in shown.stdout and not shown.stderr
    stored = make_run(tmp_path / "stored", Scenario(configs=PAIR, repeats=2))
    named = kvbench(package, "fastest", stored)
    speeds = {cell.cell_id: max(cell.throughput().values()) for cell in read_run(stored).cells}
    assert len(speeds) > 1 and named.stdout.strip() == max(speeds, key=speeds.__getitem__)


@pytest.mark.full
def test_an_engine_is_launched_and_its_metric_and_figure_are_reported(run):
    assert json.loads((run / "manifest.json").read_text())["backend"] == "my-engine"
    done = next(json.loads(path.read_text()) for path in run.glob("cells/*/loads/*/done.json"))
    assert done["metrics"]["completed"] == 6 and done["metrics"]["first_gap_ms"]["p95"] > 0
    assert "first_gap_ms_p95" in (run / "summary.csv").read_text().splitlines()[0]
    page = (run / "report.html").read_text()
    assert "My chapter" in page and "All repeats of a cell together." in page


def test_a_trace_of_the_new_format_is_described(package, tmp_path):
    file = tmp_path / "any-name.csv"
    file.write_text("tokens_in,tokens_out\n100,10\n300,30\n")
    described = kvbench(package, "trace", "describe", file, "--json")
    assert described.returncode == 0, described.stderr
    shown = json.loads(described.stdout)
    assert shown["format"] == "my-csv" and shown["requests"] == 2


@pytest.mark.full
def test_a_claim_is_judged(package, tmp_path):
    judged = kvbench(package, "claims", "--only", "pages-waste-less", "--profile", "cpu", "--output-dir", tmp_path)
    assert judged.returncode == 0, judged.stdout + judged.stderr
    (stored,) = tmp_path.glob("claims/*/claims.json")
    (claim,) = json.loads(stored.read_text())["claims"]
    assert (claim["name"], claim["verdict"]) == ("pages-waste-less", "held")
    assert claim["rule"] == "Holds if pages waste fewer slots than reservations do."


@pytest.mark.full
def test_an_instrument_runs_the_loads_of_a_sweep(package, workload, run, tmp_path):
    words = ("sweep", workload, "--instrument", "replay", "--lockstep-minutes", "0", "--no-quality", "--no-calibration")
    replayed = kvbench(package, *words, "--output-dir", tmp_path, REPLAY=str(run))
    (folder,) = (tmp_path / "tiny").iterdir()
    assert json.loads((folder / "manifest.json").read_text())["instrument"] == "replay", replayed.stderr
    tables = [next(path.glob("cells/*/loads/1/requests.parquet")).read_bytes() for path in (run, folder)]
    assert tables[0] == tables[1]

    other = kvbench(package, "sweep", "--resume", folder, "--instrument", "http")
    assert other.returncode == 2 and "replay" in other.stderr


BROKEN = {
    "broken = my_kv.missing:command": "cannot be imported (ModuleNotFoundError",
    "broken = kvbench.cli.load:__name__": "is a str",
    "broken = kvbench.cli.load:load": "calls itself 'load'",
}
PROBLEM = "'broken' of package my-kv cannot be used"


@pytest.fixture
def installed(monkeypatch) -> Iterator[Callable[..., None]]:
    """Takes the packages in some folders for those that are installed."""

    def install(*folders: Path) -> None:
        found = distributions(path=list(map(str, folders)))
        entries = EntryPoints(entry for package in found for entry in package.entry_points)
        monkeypatch.setattr(plugins, "_installed", lambda: entries)
        plugins.plugins.cache_clear()

    yield install
    plugins.plugins.cache_clear()


@pytest.mark.parametrize("entry", BROKEN)
def test_a_broken_command_is_refused_and_named_in_the_help_and_stops_no_other(installed, tmp_path, capsys, entry):
    write_package(tmp_path, f"[kvbench.commands]\n{entry}\n", {})
    installed(tmp_path)
    group = SectionedGroup("kvbench", sections={}, commands=PluginCommands(plugins.plugins("commands")))
    with click.Context(group) as ctx:
        assert "sweep" in group.get_help(ctx)
        assert capsys.readouterr().err.startswith(f"note: kvbench.commands {PROBLEM}: ")
        with pytest.raises(UsageError, match="fix or uninstall my-kv") as refused:
            group.get_command(ctx, "broken")
    assert BROKEN[entry] in str(refused.value)


def test_a_broken_metric_is_named_and_left_out_and_a_broken_instrument_is_refused(installed, tmp_path, capsys):
    groups = {f"kvbench.{group}": {"broken": "my_kv_gone.missing:it"} for group in ("metrics", "instruments")}
    write_package(tmp_path, as_ini(groups), {})
    installed(tmp_path)
    plugins.add_plugins(metrics := {}, "metrics", Metric)
    assert f"note: kvbench.metrics {PROBLEM}" in capsys.readouterr().err and not metrics
    with pytest.raises(UsageError, match=rf"kvbench\.instruments {PROBLEM}"):
        plugins.find_plugin("instruments", "broken", "--instrument")
    with pytest.raises(UsageError, match="simulated"):
        plugins.find_plugin("instruments", "simulatd", "--instrument")


def test_a_name_belongs_to_kvbench_or_to_the_first_package(installed, tmp_path, capsys):
    write_package(tmp_path / "one", "[kvbench.commands]\nsweep = kvbench.cli.load:load\nmine = my_kv.one:mine\n", {})
    write_package(tmp_path / "two", "[kvbench.commands]\nmine = my_kv.two:mine\n", {}, "other-kv")
    installed(tmp_path / "one", tmp_path / "two")
    found = plugins.plugins("commands")
    assert found["sweep"].value == "kvbench.cli.sweep:sweep" and found["mine"].value == "my_kv.one:mine"
    first, second = capsys.readouterr().err.splitlines()
    assert "'sweep' of package my-kv cannot be used: the name is taken by kvbench" in first
    assert "'mine' of package other-kv cannot be used: the name is taken by my-kv" in second
