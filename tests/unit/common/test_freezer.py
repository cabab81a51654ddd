"""A frozen family does nothing, goes on where it was, and can always be ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbench.common import freezer, processes
from tests.support.sweep_parts import alive, wait_until

# Two counters that never rest, one in a session of its own; prints their process ids.
COUNTERS = """
import os, subprocess, sys, time
COUNT = '''
import sys, time
n = 0
while True:
    n += 1
    open(sys.argv[1], "w").write(str(n))
    time.sleep(0.001)
'''
apart = subprocess.Popen([sys.executable, "-c", COUNT, sys.argv[1] + "/apart"], start_new_session=True)
grouped = subprocess.Popen([sys.executable, "-c", COUNT, sys.argv[1] + "/grouped"])
print(apart.pid, grouped.pid, flush=True)
time.sleep(60)
"""
NAMES = ("apart", "grouped")


def counts(folder: Path) -> list[int]:
    """What the counters have come to; 0 while a file is being written."""
    return [int((folder / name).read_text() or 0) if (folder / name).exists() else 0 for name in NAMES]


def go_on(folder: Path) -> bool:
    """Whether both counters count."""
    before = counts(folder)
    wait_until(lambda: all(b > a for a, b in zip(before, counts(folder), strict=True)), 20)
    return True


@pytest.fixture(params=["cgroup", "signals"])
def cgroups(request, tmp_path):
    """The folder that a freezer is given: one in which cgroups can be made, or none."""
    if request.param == "signals":
        return tmp_path / "no cgroups here"
    own = freezer.own_cgroup()
    if own is None or not os.access(own / "cgroup.procs", os.W_OK):
        pytest.skip("no cgroup (v2) that this user may write to")
    return own


@pytest.fixture
def child(tmp_path):
    process = processes.launch(
        [sys.executable, "-c", COUNTERS, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    process.pids = [process.pid, *map(int, process.stdout.readline().split())]
    assert go_on(tmp_path)
    yield process
    processes.stop(process, grace_s=0.3)
    process.stdout.close()
    wait_until(lambda: not any(map(alive, process.pids)), 20)


def test_a_frozen_family_stands_still_and_then_goes_on(child, cgroups, tmp_path):
    with freezer.freezer_of(child, cgroups) as found:
        for _ in range(3):
            found.freeze()
            before = counts(tmp_path)
            time.sleep(0.1)
            assert counts(tmp_path) == before
            found.thaw()
            assert go_on(tmp_path)
        found.freeze()
    assert go_on(tmp_path)  # whoever leaves the block leaves nothing frozen
    if found.kind == "cgroup":
        assert not list(cgroups.glob(f"kvbench-twin-{os.getpid()}-*"))
    assert found.kind == ("signals" if "no cgroups" in cgroups.name else "cgroup")


def test_a_frozen_child_is_asked_to_end_before_it_is_killed(tmp_path):
    polite = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\nprint(1, flush=True)\ntime.sleep(60)"
    with processes.launch([sys.executable, "-c", polite], stdout=subprocess.PIPE, stderr=None) as process:
        process.stdout.readline()
        freezer.SignalFreezer(process).freeze()
        assert processes.stop(process, grace_s=20.0) == 7


CONTROLLER = f"""
import subprocess, sys, time
from pathlib import Path
from kvbench.common import freezer, processes
p = processes.launch([sys.executable, "-c", {COUNTERS!r}, sys.argv[1]], stdout=subprocess.PIPE, stderr=None)
pids = p.stdout.readline().decode()
p.watch()
p.remember()
with freezer.freezer_of(p, Path(sys.argv[2])) as found:
    found.freeze()
    print(p.pid, pids, flush=True)
    time.sleep(60)
"""


def test_a_controller_that_is_killed_outright_leaves_nothing_frozen_or_running(tmp_path, cgroups):
    words = [sys.executable, "-c", CONTROLLER, str(tmp_path), str(cgroups)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as controller:
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert len(pids) == 3 and all(map(alive, pids))
        controller.kill()
    wait_until(lambda: not any(map(alive, pids)), 20)
    if "no cgroups" not in cgroups.name:  # an empty cgroup stays; the next freezer removes it
        with processes.launch([sys.executable, "-c", "import time; time.sleep(60)"], stdout=None, stderr=None) as other:
            with freezer.freezer_of(other, cgroups):
                assert not list(cgroups.glob(f"kvbench-twin-{controller.pid}-*"))
            processes.stop(other)
