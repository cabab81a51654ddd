"""Tests of what a change touches, in a small tree that launches and loads its files as this repository does."""

import subprocess

import pytest

from ci import touched

FILES = {
    "pyproject.toml": """
        [project.entry-points."kvbench.commands"]
        sweep = "kvbench.cli.sweep:sweep"
        "dev tune" = "kvbench.cli.tune:tune"
        [project.entry-points."kvbench.executors"]
        ray = "kvbench.ray.machines:machines"
    """,
    "docs/measuring.md": "",
    "workloads/mixed.yaml": "",
    "kvbench/__main__.py": "import kvbench.cli.main",
    "kvbench/cli/main.py": "",
    "kvbench/cli/sweep.py": "def sweep(): from kvbench.load import launch",
    "kvbench/cli/tune.py": "",
    "kvbench/ray/machines.py": "",
    "kvbench/load/__init__.py": "",
    "kvbench/load/__main__.py": "from kvbench.load.client import run",
    "kvbench/load/client.py": "",
    "kvbench/load/launch.py": 'COMMAND = ["-m", "kvbench.load"]',
    "kvbench/report/page.py": "'''A page; kvbench.load.client is no part of it.'''",
    "kvbench/report/templates/page.css": "",
    "kernels/__init__.py": 'import importlib; BACKENDS = {"numba": "kvbench_kernels.numba_backend"}',
    "kernels/numba_backend.py": "",
    "kernels/resources.py": 'import importlib; load = lambda name: importlib.import_module(f"kernels.{name}")',
    "tests/conftest.py": "def browser(): ...",
    "tests/unit/conftest.py": "import tests.support.fake\ndef loads(): ...",
    "tests/support/fake.py": 'from pathlib import Path; FAKE = Path(__file__).with_name("fake_server.py")',
    "tests/support/fake_server.py": "",
    "tests/unit/test_sweep.py": 'main(["sweep", "mixed.yaml", "-o", "kernels.size=8"])',
    "tests/unit/test_ray.py": 'main(["sweep", "--executor", "ray"])',
    "tests/unit/test_tune.py": 'COMMAND = ["-m", "kvbench", "dev", "tune"]',
    "tests/unit/test_report.py": "from kvbench.report import page\ndef test_it(loads): ...",
    "tests/unit/test_patch.py": 'def test_it(patch): patch("kvbench.ray.machines.wait")',
    "tests/unit/test_main_ring.py": "from kvbench.report import page",
    "tests/kernels/test_backend.py": "from kernels import get_backend",
    "tests/kernels/test_resources.py": "import kvbench_kernels.resources",
    "tests/kernels/test_triton.py": 'from cases import full\nCHECKS = "triton_*checks.py"',
    "tests/kernels/triton_checks.py": "",
    "tests/kernels/cases.py": "",
}
ALL = {"sweep", "ray", "tune", "report", "patch", "backend", "resources", "triton"}


def write(root):
    for file, text in FILES.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        full = f"# {touched.FULL}\n" * ("test_" in file and "main_ring" not in file)
        (root / file).write_text(full + text, encoding="utf-8")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    write(root)
    return touched.Tree(root, [*FILES, "kvbench/load/gone.py"])


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ("docs/measuring.md", set()),
        ("kvbench/ray/machines.py", {"ray", "patch"}),  # an entry point, and a string with a name in the module
        ("kvbench/cli/sweep.py", {"sweep", "ray"}),
        ("kvbench/load/client.py", {"sweep", "ray"}),  # by a command, then by -m
        ("kvbench/load/gone.py", set()),
        ("kvbench/cli/tune.py", {"tune"}),
        ("kvbench/cli/main.py", {"tune"}),  # -m kvbench
        ("kvbench/report/templates/page.css", {"report"}),
        ("workloads/mixed.yaml", {"sweep"}),
        ("tests/support/fake_server.py", {"report"}),  # by a fixture
        ("tests/unit/conftest.py", {"sweep", "ray", "tune", "report", "patch"}),
        ("tests/conftest.py", ALL),
        ("constraints.txt", ALL),
        ("pyproject.toml", ALL),
        ("kernels/__init__.py", {"backend", "resources"}),  # a setting's name that begins like a package is no module
        ("kernels/numba_backend.py", {"backend", "resources"}),
        ("tests/kernels/cases.py", {"triton"}),
        ("tests/kernels/triton_checks.py", {"triton"}),
        ("tests/unit/test_tune.py", {"tune"}),
    ],
)
def test_a_change_touches_the_full_tests_that_use_the_file(tree, changed, names):
    tests = touched.touched_tests(tree, [changed])
    assert {test.split("/test_")[1].removesuffix(".py") for test in tests} == names


def test_files_that_git_does_not_know_and_both_names_of_a_moved_one_have_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    (tmp_path / "old.py").write_text("x = 1\n" * 9)
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"], ["mv", "old.py", "new.py"]):
        subprocess.run(["git", *words], check=True)
    (tmp_path / "untracked.py").touch()
    assert sorted(touched.changed_since("HEAD")) == ["new.py", "old.py", "untracked.py"]
    assert sorted(touched.changed_since(None)) == ["new.py", "untracked.py"]  # no commit is older than a day
