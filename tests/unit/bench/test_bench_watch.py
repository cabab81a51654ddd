"""Whether others used the machine: all busy time less that of this process and its children."""

import time

import psutil

from kvbench.bench_watch import ForeignWatch


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


def test_our_own_work_is_not_foreign(tmp_path):
    stat = tmp_path / "stat"
    write_stat(stat, 0)
    watch = ForeignWatch(stat)
    began = time.process_time()
    while time.process_time() - began < 0.2:
        pass
    write_stat(stat, 20)  # what we used
    assert watch.report()["foreign_cpu_cores"] < 0.5


def test_a_system_that_does_not_tell(tmp_path):
    assert ForeignWatch(tmp_path / "missing").report() == {}
    (tmp_path / "empty").write_text("intr 1\n")
    assert ForeignWatch(tmp_path / "empty").report() == {}
