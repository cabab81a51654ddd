"""A small counter workload, and real replays of it that tests may change."""

from __future__ import annotations

from pathlib import Path

from kvbench.gate.counters.judge import GateCommands, accept, judge
from kvbench.gate.counters.lock import read_lock
from kvbench.gate.counters.replay import Replayed, replay_all
from kvbench.gate.counters.workload import CounterWorkload, read_counter_workload
from kvbench.gate.verdict.verdict import Verdict

SMALL = """
name: small
seed: 3
vocab_size: 64
num_eos: 2
engine: {model: llama-32m, max_model_len: 64, max_num_seqs: 6, max_num_batched_tokens: 24, kv_budget: 2064KiB}
swap_space: 512KiB
streams:
  grow:
    - {count: 6, every: 1, prompt: [4, 8], output: [20, 40]}
  forks:
    - {count: 2, every: 6, prompt: [9, 14], output: 12, n: 3}
scenarios:
  grow:
    stream: grow
    matrix:
      - {layout: [paged], page_size: [4], preemption_mode: [recompute, swap]}
      - {layout: [contiguous], reservation: [oracle]}
  forks:
    stream: forks
    matrix: [{layout: [paged], page_size: [4], enable_prefix_caching: [false, true]}]
"""
NAMES = (
    "grow/paged-p4-recompute", "grow/paged-p4-swap", "grow/contiguous-oracle", "forks/paged-p4-noprefix",
    "forks/paged-p4-prefix",
)  # fmt: skip


class Gate:
    """The small workload in a folder, with the engine as it is now accepted."""

    def __init__(self, folder: Path):
        self.workload_path, self.lock_path = folder / "small.yaml", folder / "lock.json"
        self.workload_path.write_text(SMALL)
        self.workload = self.read()
        self.runs = replay_all(self.workload.scenarios)
        accept(self.workload, self.runs, self.lock_path, "as it was")

    def read(self) -> CounterWorkload:
        return read_counter_workload(self.workload_path)

    def judge(self, first: dict[str, Replayed] | None = None, second: dict[str, Replayed] | None = None) -> Verdict:
        """Of the file and the lock as they are now; the runs are made now unless given."""
        workload = self.read()
        first = first or replay_all(workload.scenarios)
        commands = GateCommands(self.workload_path, self.lock_path)
        return judge(workload, read_lock(self.lock_path), first, second or first, commands, {"name": "now"})
