"""Searches 64 commits made for it: `python -m tests.benchmarks.bisect_search counters|timing SEED...`.

The commits lie on top of HEAD, at places that SEED draws: one makes decode steps 2 % slower, one makes a step 0.2 ms
slower and is reverted by another, three cannot be imported, one moves counters, and the rest change nothing. A row says
whether `kvbench bisect` named the right one. Results: bisect_search.md.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from kvbench.common.packages import REPOSITORY
from tests.support.git_repo import commit_all, git, write

COMMITS = 64
EXECUTOR, SCHEDULER, BROKEN = "engine/execution/executor.py", "engine/scheduling/scheduler.py", "engine/__init__.py"
SLOWER = {
    "slow": (
        "        if self._counts_saturated:\n",
        "        while time.perf_counter() < times[-1] + 0.022 * (times[-1] - times[-2]):\n            pass\n",
    ),
    "reverted": (
        "        sampling = [i for i, item in zip(order",
        "        until = time.perf_counter() + 0.0002\n        while time.perf_counter() < until:\n            pass\n",
    ),
}
SHARE = "self._share = config.max_num_batched_tokens //"
WORKLOAD = {
    "name": "tiny_decode",
    "model": {"config": "kvbench-tiny", "dtype": "float32"},
    "engine": {
        "layout": "paged", "page_size": 16, "device": "cpu", "num_threads": 1, "kv_budget": "16MiB",
        "max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256,
    },
    "load": {
        "concurrency": [3], "num_requests": 24, "repeats": 3, "ignore_eos": True,
        "prompts": {"kind": "synthetic", "classes": [
            {"name": "chat", "share": 1.0, "prompt_tokens": [32, 96], "output_tokens": 96},
        ]},
    },
}  # fmt: skip


def make_history(repo: Path, seed: int) -> dict[str, str]:
    """Makes the repository; the shas of its ends, and of the commits that are to be found."""
    subprocess.run(["git", "clone", "-q", "--shared", str(REPOSITORY), str(repo)], check=True)
    slow, moving, *others = random.Random(seed).sample(range(2, COMMITS), 7)
    broken, (reverted, revert) = others[:3], sorted(others[3:])
    shas, whole = {"good": git(repo, "rev-parse", "HEAD")}, (repo / BROKEN).read_text()
    for number in range(1, COMMITS + 1):
        subject, name = f"Note {number}", None
        write(repo, {BROKEN: whole})
        if number in (slow, reverted):
            name = "slow" if number == slow else "reverted"
            before, added = SLOWER[name]
            _replace(repo / EXECUTOR, before, added + before)
        elif number == moving:
            name = "moving"
            _replace(repo / SCHEDULER, SHARE, "self._share = (config.max_num_batched_tokens - 1) //")
        elif number in broken:
            write(repo, {BROKEN: whole + "\ndef broken(:\n"})
        elif number == revert:
            git(repo, "revert", "--no-commit", shas["reverted"])
            subject = f"Revert\n\nThis reverts commit {shas['reverted']}."
        else:
            write(repo, {"notes.txt": f"{number}\n"})
        sha = commit_all(repo, subject)
        if name:
            shas[name] = sha
    return shas | {"bad": git(repo, "rev-parse", "HEAD")}


def _replace(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1, f"{path} has changed: {before!r} is there {text.count(before)} times"
    path.write_text(text.replace(before, after))


def search(by: str, seed: int) -> str:
    """Makes a history and searches it; a row of the table."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shas = make_history(folder / "repo", seed)
        (folder / "tiny.yaml").write_text(yaml.safe_dump(WORKLOAD))
        words = [shas["good"], shas["bad"], "--repo", str(folder / "repo"), "--by", by]
        if by == "timing":
            words += ["--workload", str(folder / "tiny.yaml"), "--metric", "mean_tpot_ms"]
        command = [sys.executable, "-m", "kvbench", "bisect", *words, "--output-dir", str(folder / "out")]
        began = time.monotonic()
        code = subprocess.run(command, cwd=REPOSITORY, stdout=sys.stderr).returncode
        took = time.monotonic() - began
        (path,) = folder.glob("out/bisect/*/verdict.json")
        verdict = json.loads(path.read_text())
        named = [finding["id"].partition("/")[2] for finding in verdict["findings"] if finding["outcome"] == "fail"]
        wanted = shas["slow" if by == "timing" else "moving"]
        found = "right" if named == [wanted] else "not named" if not named else "WRONG"
        facts = verdict["facts"]
        return f"| {by} | {seed} | {found} | {code} | {facts['tested']} | {facts['skipped']} | {took:.0f} s |"


if __name__ == "__main__":
    print("| by | seed | answer | exit code | tested | skipped | time |\n|---|---|---|---|---|---|---|")
    for argument in sys.argv[2:]:
        print(search(sys.argv[1], int(argument)), flush=True)
