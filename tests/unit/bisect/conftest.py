"""Repositories whose commits say how slow they are, and measurements that read it."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.common.errors import MeasurementError
from kvbench.gate.compare.series import PairQuestion
from tests.support.git_repo import commit_all, git, make_repo, write


class SlowingHistory:
    """A repository with a commit for each entry. A commit costs what its files in cost/ say, added up.

    A number adds a file; "broken" is a commit that nobody can measure, "broken 0.02" one that also adds such a file;
    ("revert", i) reverts the commit of entry i.
    """

    def __init__(self, folder, entries):
        self.repo = make_repo(folder, {"cost/0": "0"})
        self.good = git(self.repo, "rev-parse", "HEAD")
        self.shas = []
        for i, entry in enumerate(entries):
            if isinstance(entry, tuple):
                git(self.repo, "revert", "--no-edit", self.shas[entry[1]])
                self.shas.append(git(self.repo, "rev-parse", "HEAD"))
                continue
            (self.repo / "broken").unlink(missing_ok=True)
            broken, _, cost = str(entry).partition(" ") if isinstance(entry, str) else ("", "", str(entry or ""))
            files = {"broken": str(i)} if broken else {}
            write(self.repo, files | ({f"cost/{i + 1}": cost} if cost else {}))
            self.shas.append(commit_all(self.repo, f"entry {i}"))

    def cost(self, repo, sha):
        if "broken" in git(repo, "ls-tree", "--name-only", sha).split():
            raise MeasurementError(f"{sha[:7]} does not start")
        files = git(repo, "ls-tree", "--name-only", f"{sha}:cost").split()
        return sum(float(git(repo, "show", f"{sha}:cost/{name}")) for name in files)


@pytest.fixture
def slowing(tmp_path, monkeypatch):
    """Makes such a history and replaces the engines by it. ``measured``: the pairs of each side and commit."""

    def make(entries, sd=0.002, folder="repo"):
        history = SlowingHistory(tmp_path / folder, entries)
        history.measured, rng = [], np.random.default_rng(11)

        def measure(question, request, points, is_decided, method=None):
            question.check()
            ends = [history.cost(request.repo, sha) for sha in (request.base, request.candidate)]
            harms = ends[1] - ends[0] + sd * rng.normal(size=points[-1])
            pairs = next((n for n in points if is_decided(list(harms[:n]))), points[-1])
            history.measured.append((request.base, request.candidate, pairs))
            return tuple(map(float, harms[:pairs])), "lockstep"

        monkeypatch.setattr(PairQuestion, "measure", measure)
        return history

    return make
