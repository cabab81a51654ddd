"""This repository's own commit, built in a folder of its own: its engine starts there and answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from kvbench.common.errors import UsageError
from kvbench.common.packages import REPOSITORY
from kvbench.gate.compare.builds import Builds, find_commit, is_kvbench, remove_source
from kvbench.gate.compare.request import CompareRequest
from kvbench.gate.compare.sides import open_side, parse_side
from kvbench.workload.file import load_workload
from tests.support.sweep_parts import TINY


@pytest.mark.full  # it compiles every kernel anew
def test_head_is_built_and_its_engine_serves(tmp_path):
    try:
        commit = find_commit(REPOSITORY, "HEAD")
    except UsageError as error:
        pytest.skip(f"the source is not a git checkout: {error}")
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"sweep": {}}))
    with Builds(tmp_path / "builds") as builds:
        opened = open_side(parse_side("HEAD"), load_workload(path, profile="cpu"), CompareRequest(), builds)
        build = opened.build
        assert build is not None and build.commit == commit and is_kvbench(build.source)
        assert build.how == "layered", "HEAD has the dependencies of the kvbench that runs"
        target = opened.choice.new_target()
        try:
            target.start(opened.choice.workload.engine, tmp_path / "server.log")
            maps = Path(f"/proc/{target.server().pid}/maps")
            target.complete([1, 2, 3, 4], max_tokens=3, timeout_s=60.0)
            assert target.server_info().model.vocab_size == target.model.vocab_size
            mapped = [Path(line.split(maxsplit=5)[5]) for line in maps.read_text().splitlines() if line.count("/")]
            ours = [path for path in mapped if path.is_relative_to(REPOSITORY) and not path.is_relative_to(sys.prefix)]
            assert not ours, "what is mapped comes from the build and the environment alone"
        finally:
            target.stop()
        compiled = list((build.folder / "numba").rglob("*.nbc"))
        assert compiled, "machine code lies with the build, not beside the source"
        assert not list(build.source.rglob("*.nbc"))
    with Builds(tmp_path / "builds") as builds:
        assert not builds.build(commit).fresh
    remove_source(build.source)  # the repository forgets it, too
