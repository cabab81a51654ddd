"""What must be equal in base and candidate, from launch to launch, and in their requests."""

from __future__ import annotations

import pytest

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, write_json
from kvbench.gate.compare.folder import CompareState, SideFacts
from kvbench.gate.compare.manifest import server_differences, with_compared_requests, with_server
from kvbench.gate.compare.request import StoredRequest
from kvbench.gate.timing.plan import match_designs
from kvbench.runs.server_info import ServerInfo
from kvbench.workload.design import make_design
from kvbench.workload.load_section import load_point
from tests.support.compare_folders import noisy_pairs, stored_comparison

POINTS = (load_point("closed", concurrency=4, rate=None, num_requests=8),)
OURS = {
    "served_model": {"name": "tiny", "vocab_size": 512, "max_model_len": 256},
    "model": {"name": "tiny", "weights_fingerprint": "aa", "num_parameters": 5},
    "resolved": {"device": "cpu", "dtype": "float32", "num_threads": 2},
    "versions": {"torch": "2"},
}


def matched(base=None, candidate=None):
    designs = [make_design({"layout": "paged", **(s or {})}, {}, POINTS, "one_at_a_time") for s in (base, candidate)]
    return match_designs("w", *designs)[0]


def other(section, **facts):
    return OURS | {section: OURS[section] | facts}


class Recorder:
    """The state of a comparison, replaced with each server that is recorded."""

    def __init__(self):
        sides = {"base": SideFacts(name="a"), "candidate": SideFacts(name="b")}
        servers = {"base": {}, "candidate": {}}
        common = {"subcommand": "compare", "reproduce": "", "cells": (), "order_seed": 1}
        self.state = CompareState(**common, **sides, servers=servers)

    def __call__(self, side, info=OURS, *, match=None, alone=False, force=False):
        info = ServerInfo.parse(info)
        self.state = with_server(self.state, match or matched(), side, info, alone=alone, force=force)


@pytest.fixture
def record():
    return Recorder()


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        (OURS, OURS, []),
        (OURS, other("model", weights_fingerprint="bb"), ["weights_fingerprint (aa and bb)"]),
        (OURS, other("resolved", num_threads=4), ["num_threads (2 and 4)"]),
        (OURS, other("versions", torch="3", triton="1"), ["version of torch (2 and 3)"]),
        # Where a server does not tell its weights, the name of its model stands for them, wherever the files lie.
        ({"served_model": {"name": "Qwen3-8B"}}, {"served_model": {"name": "Qwen3-8B-AWQ"}}, ["model"]),
        ({"served_model": {"name": "/models/Qwen3-8B"}}, {"served_model": {"name": "Qwen/Qwen3-8B"}}, []),
        (OURS, {"served_model": {"name": "tiny"}}, []),
        (OURS, {"served_model": {"name": "/tmp/x"}, "model": {"name": "tiny"}}, []),
        (OURS, {"served_model": {"name": "other"}}, ["model (tiny and other)"]),
        ({}, OURS, []),
        (OURS, other("model", name="copy of tiny"), []),  # both tell their weights
    ],
)
def test_what_two_servers_differ_in(left, right, found):
    for expected, said in zip(found, server_differences(*map(ServerInfo.parse, (left, right))), strict=True):
        assert said.startswith(expected)


def test_versions_that_are_compared_are_noted_and_refuse_nothing(record):
    newer, changed = other("versions", torch="3"), {"options": StoredRequest(candidate_python="/new/bin/python")}
    record("base")
    with pytest.raises(UsageError, match="version of torch"):
        record("candidate", newer)
    for compared in (changed, {"options": StoredRequest(target="vllm"), "base": SideFacts(kind="ref")}):
        servers = {"base": record.state.servers["base"], "candidate": {}}
        record.state = record.state.but(notes=(), servers=servers, **compared)
        record("candidate", newer)
        assert any("torch 2 → 3" in note for note in record.state.notes) and not record.state.differences
        with pytest.raises(UsageError, match="dtype"):  # all else must be equal
            record("candidate", newer | other("resolved", dtype="bfloat16"))


def test_the_other_side_is_held_to_the_first_and_its_own_settings_may_differ(record):
    record("base")
    with pytest.raises(UsageError, match=r"dtype \(float32 and bfloat16\).*--force"):
        record("candidate", other("resolved", dtype="bfloat16"))
    varied = matched(candidate={"dtype": "bfloat16"})
    fresh = Recorder()
    fresh("base", match=varied)
    fresh("candidate", other("resolved", dtype="bfloat16"), match=varied)
    assert not fresh.state.differences


def test_every_later_launch_is_held_to_the_first_of_its_side(record):
    for side in ("base", "candidate", "candidate", "base"):
        record(side)
    changed = other("versions", torch="2.1")
    with pytest.raises(UsageError, match=r"the server of candidate is not the one .* version of torch \(2 and 2.1\)"):
        record("candidate", changed)
    record("candidate", changed, force=True)
    assert ["torch" in each for each in record.state.differences] == [True]
    assert list(record.state.servers["candidate"].values()) == [ServerInfo.parse(OURS)]
    for side in ("base", "base", "candidate"):
        record(side, alone=True)
    assert record.state.apart == {"w/paged": ("base", "candidate")}


def test_both_halves_of_a_pair_need_the_same_requests(tmp_path):
    folder = stored_comparison(tmp_path, *noisy_pairs(2, 2, 1), ("w/a-c4", "w/b-c4"))
    state = folder.state()
    for side, digests in (("base", ("1", "2")), ("candidate", ("1", "3"))):
        for cell, digest in zip(("a-c4", "b-c4"), digests, strict=True):
            path = folder.run(side, "w").load(cell, 2) / "done.json"
            write_json(path, read_json(path) | {"requests_sha256": digest})
    with_compared_requests(folder, state, 1, force=False)  # a load that tells none is not compared
    with pytest.raises(UsageError, match=r"requests of w/b-c4\."):
        with_compared_requests(folder, state, 2, force=False)
    assert with_compared_requests(folder, state, 2, force=True).differences == ("requests of w/b-c4",)
