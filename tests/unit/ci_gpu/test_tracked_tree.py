"""The tracked files travel to the GPU machine together with packs, so they must stay small."""

import pytest

from kvbench.common.files import read_json
from kvbench.common.git import try_git
from kvbench.common.packages import REPOSITORY
from tests.support.compact_summaries import compact

LIMIT = 20 << 20


def test_the_tracked_files_take_at_most_20_mib() -> None:
    names = try_git(REPOSITORY, "ls-files", "-z")
    if names is None:
        pytest.skip("no git checkout")
    sizes = {name: path.stat().st_size for name in names.split("\0") if (path := REPOSITORY / name).is_file()}
    largest = [f"{sizes[name]:,} {name}" for name in sorted(sizes, key=sizes.__getitem__, reverse=True)[:10]]
    assert sum(sizes.values()) <= LIMIT, "\n".join(["the largest files:", *largest])


def test_stored_cells_are_compact() -> None:
    paths = list((REPOSITORY / "results" / "reference").rglob("cells/*/summary.json"))
    assert paths
    for path in paths:
        assert path.read_text() == compact(read_json(path)), "run: python -m tests.support.compact_summaries"
