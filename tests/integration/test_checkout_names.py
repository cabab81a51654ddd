"""The names `engine` and `kernels` in a checkout: each module once, and always those of the folder that was named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvbench.common.packages import REPOSITORY

PACKAGES = sysconfig.get_path("purelib")  # on the path without its .pth files: kvbench is not installed then


def python(*words: str, path: tuple[Path, ...], installed: bool = True) -> str:
    """Runs Python with these folders on its path; returns the last line that it prints, or of its error."""
    paths: tuple[Path | str, ...] = path if installed else (*path, PACKAGES)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, *([] if installed else ["-S"]), *words]
    done = subprocess.run(
        command, env=env, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    return (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Another checkout, whose packages say so."""
    for folder, file in (("engine", "sizes.py"), ("kernels", "api.py"), ("kvbench", "common/secrets.py")):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("models", "__pycache__"))
        with (tmp_path / folder / file).open("a") as text:
            text.write("\nWHOSE = 'other'\n")
    return tmp_path


def test_a_checkout_works_without_being_installed():
    code = "import kvbench, kvbench_engine.config as ours, engine.config as same; "
    code += "print(kvbench.IS_INSTALLED, ours is same)"
    assert python("-c", code, path=(REPOSITORY,), installed=False) == "False True"
    code = "from kernels import get_backend; import kvbench_kernels; print(get_backend is kvbench_kernels.get_backend)"
    assert python("-c", code, path=(REPOSITORY,), installed=False) == "True"
    for first in ("kvbench", "engine.sizes"):
        code = f"import {first}; from kvbench.targets.builtin import BUILTIN_COMMAND; print(BUILTIN_COMMAND[-1])"
        assert python("-c", code, path=(REPOSITORY,), installed=False) == "engine.server"
    assert "unrecognized arguments" in python("-m", "engine.server", "--nothing", path=(REPOSITORY,))


@pytest.mark.parametrize("installed", [True, False])
def test_the_checkout_that_is_named_wins_over_the_installed_one(checkout, installed):
    code = "import engine.sizes, kernels.api, kvbench_engine.sizes as ours; print(ours.WHOSE, kernels.api.WHOSE)"
    assert python("-c", code, path=(checkout, REPOSITORY), installed=installed) == "other other"
    code = "import kvbench.common.secrets as core, kvbench_engine.sizes as engine; print(core.WHOSE, engine.WHOSE)"
    assert python("-c", code, path=(checkout,), installed=installed) == "other other"
    assert '"protocol": 2' in python("-m", "engine.lockstep", path=(checkout,), installed=installed)


def test_the_engine_leaves_the_name_kernels_to_others(checkout):
    """transformers uses PyPI's package of that name, and hides it from itself only while it is not imported."""
    code = "import sys, engine.sizes; print('kernels' in sys.modules)"
    assert python("-c", code, path=(checkout,)) == "False"


def test_two_checkouts_in_one_process_are_refused(checkout):
    code = "import kvbench_engine.sizes, engine.sizes; print(engine.sizes.WHOSE)"
    assert "import engine before" in python("-c", code, path=(checkout,))


def test_an_engine_of_an_earlier_commit_stays_that_commits(checkout):
    (checkout / "engine" / "__init__.py").write_text("")
    shutil.rmtree(checkout / "kvbench")
    code = "import engine.sizes, kvbench.common.text, kvbench_engine.sizes as ours; "
    code += "print(engine.sizes.WHOSE, hasattr(ours, 'WHOSE'))"
    for installed in (True, False):
        assert python("-c", code, path=(checkout, REPOSITORY), installed=installed) == "other False"
