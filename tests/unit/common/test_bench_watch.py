"""Whether others used the machine: all busy time less that of this process and its children."""

import os
import time

import psutil

from kvbench.common import bench_watch
from kvbench.common.bench_watch import ForeignWatch

TICKS = os.sysconf("SC_CLK_TCK")  # in a second


def write_stat(path, busy_ticks):
    """/proc/stat with ``busy_ticks`` of user time on the first core that we may use."""
    core = min(psutil.Process().cpu_affinity())
    path.write_text(f"cpu  1 2 3\ncpu{core} {busy_ticks} 0 0 5 0 0 0 0 0 0\nintr 1\n")


def test_busy_time_that_is_not_ours_is_foreign(tmp_path):
    stat = tmp_path / "stat"
    write_stat(stat, 1000)
    watch = ForeignWatch(stat)
    time.sleep(0.05)
    write_stat(stat, 1000)
    assert watch.report() == {"foreign_cpu_cores": 0.0, "disturbed": False}
    write_stat(stat, 1000 + 100_000)
    told = watch.report()
    assert told["disturbed"] and told["foreign_cpu_cores"] > 10


def test_our_own_work_is_not_foreign(tmp_path, monkeypatch):
    stat, own = tmp_path / "stat", iter([5.0, 7.0, 7.0])  # CPU seconds of this process and its children
    monkeypatch.setattr(bench_watch, "tree_cpu_s", lambda pid: next(own))
    write_stat(stat, 0)
    watch = ForeignWatch(stat)
    write_stat(stat, 2 * TICKS)
    assert watch.report() == {"foreign_cpu_cores": 0.0, "disturbed": False}
    write_stat(stat, 100 * TICKS)
    assert watch.report()["disturbed"]


def test_a_system_that_does_not_tell(tmp_path):
    assert ForeignWatch(tmp_path / "missing").report() == {}
    (tmp_path / "empty").write_text("intr 1\n")
    assert ForeignWatch(tmp_path / "empty").report() == {}
