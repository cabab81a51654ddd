"""BASE and CANDIDATE: what a text means, what is launched for it, and every refusal."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.packages import REPOSITORY
from kvbench.gate.compare import builds as builds_module
from kvbench.gate.compare.builds import Builds
from kvbench.gate.compare.clock import Clock
from kvbench.gate.compare.manifest import pinned, reproduce_command
from kvbench.gate.compare.request import CompareRequest
from kvbench.gate.compare.sides import (
    PairedWorkload,
    PairSide,
    left_to_servers,
    measured_design,
    open_side,
    open_workloads,
    parse_settings,
    parse_side,
    require_used,
    same_sides,
)
from kvbench.gate.timing.plan import SIDES, match_designs
from kvbench.runs.folder import RunFolder
from kvbench.targets import model_export
from kvbench.targets.builtin import BuiltinTarget, ServerRefusedError
from kvbench.targets.launched import LaunchedTarget
from kvbench.targets.running import OpenAITarget
from kvbench.workload.design import make_design
from kvbench.workload.file import load_workload
from tests.support.compare_folders import stored_run
from tests.support.git_repo import git, make_repo, make_tiny_kvbench
from tests.support.sweep_parts import TINY

PYTHON = shlex.quote(sys.executable)
NOTHING = CompareRequest()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    repo = make_tiny_kvbench(tmp_path_factory.mktemp("tiny") / "repo")
    for what in ("branch feature/x", "branch results", "tag v1.2"):
        git(repo, *what.split())
    return repo


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    with Builds(tmp_path_factory.mktemp("builds")) as made:
        yield made


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"sweep": {}}))
    return load_workload(path, profile="cpu")


@pytest.mark.parametrize(
    ("text", "kind", "kept"),
    [
        ("main", "ref", "main"),
        ("feature/x", "ref", "feature/x"),
        (".", "ref", "."),
        ("ref:main", "ref", "main"),
        ("http://127.0.0.1:8000", "url", "http://127.0.0.1:8000"),
        ("url:http://h", "url", "http://h"),
        ("engine.page_size=16, enable_prefix_caching=true", "set", "engine.page_size=16, enable_prefix_caching=true"),
        (f"{PYTHON} -m kvbench_engine.server", "cmd", f"{PYTHON} -m kvbench_engine.server"),
        ("./serve.sh{port}", "cmd", "./serve.sh{port}"),
        (f"cmd:{PYTHON}", "cmd", PYTHON),
    ],
)
def test_what_a_text_means(tiny, monkeypatch, text, kind, kept):
    monkeypatch.setattr("shutil.which", lambda name: name if name in (sys.executable, "./serve.sh{port}") else None)
    side = parse_side(text, tiny)
    assert (side.kind, side.text) == (kind, kept)


def test_settings_are_yaml_and_long_commands_that_end_differently_have_two_names():
    assert parse_settings("page_size=16,enable_prefix_caching=true,engine.swap_space=64MiB, dtype=null,model=a,b") == {
        "page_size": 16, "enable_prefix_caching": True, "swap_space": "64MiB", "dtype": None, "model": "a,b",
    }  # fmt: skip
    assert parse_settings("block_size=16") == {"page_size": 16}  # as vLLM calls it
    assert parse_side("set:").settings == {}
    names = {parse_side(f"cmd:{PYTHON} {'-m some.long.module ' * 5} --itl-ms {ms}").name for ms in (20, 21)}
    assert len(names) == 2 and all(len(name) <= 60 for name in names)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("main", "--repo PATH"),  # in a folder without git
        ("mian", r"did you mean main\?"),
        ("no-such-program --port 1", "no program 'no-such-program'"),
        ("page_size=16,page_size=8", "page_size twice"),
        ("page_size=[1, 2]", "one value a setting"),
        ("set:16", "'16' is no setting"),
        ("set:load.concurrency=4", "load.concurrency"),
        ("page_size=[1", "not a YAML value"),
        (str(REPOSITORY), r"without manifest\.json"),
    ],
)
def test_what_means_nothing_is_refused(tiny, text, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        parse_side(text, tmp_path if text == "main" else tiny)


def test_settings_are_laid_on_the_workload(tiny, workload):
    base, candidate = (open_side(parse_side(text, tiny), workload, NOTHING) for text in ("page_size=32", "page_size=8"))
    assert base.choice.workload.engine == {**workload.engine, "page_size": 32}
    changed = candidate.choice.workload
    assert changed.resolved["engine"]["page_size"] == 8
    assert (changed.load, changed.source) == (workload.load, workload.source)
    target = base.choice.new_target()
    assert isinstance(target, BuiltinTarget) and base.facts.settings == {"page_size": 32}
    assert not target.forked  # each launch has a memory layout of its own
    assert workload.engine["page_size"] == 16 and same_sides(base, candidate) is None
    assert "A/A" in same_sides(candidate, open_side(parse_side("engine.page_size=8", tiny), workload, NOTHING))


@pytest.mark.parametrize(
    ("text", "options", "sweep", "says"),
    [
        ("pagesize=16", {}, {}, "did you mean 'page_size'"),
        ("kv_budget=lots", {}, {}, "not a size"),
        ("page_size=8", {"target": "http://127.0.0.1:1"}, {}, "http://127.0.0.1:1"),
        ("preemption_mode=swap", {"target": "vllm", "target_python": sys.executable}, {}, "recomputation only"),
        ("page_size=8", {}, {"page_size": (8, 16)}, "sweeps"),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny, workload, tmp_path, monkeypatch, text, options, sweep, says):
    (tmp_path / "vllm.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UsageError, match=says):
        open_side(parse_side(text, tiny), dataclasses.replace(workload, sweep=sweep), CompareRequest(**options))


def test_two_pythons_are_two_sides_with_the_same_settings(tiny, workload, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (newer := tmp_path / "newer").symlink_to(sys.executable)
    asked, sides = {"target": "vllm", "target_python": sys.executable}, dict.fromkeys(SIDES, parse_side("set:", tiny))
    request = CompareRequest(**asked, candidate_python=str(newer))
    with ExitStack() as held:
        (paired,) = open_workloads(sides, [workload], request, Builds(), held)
        base, candidate = (paired.sides[side] for side in SIDES)
        assert [side.choice.manifest.target_python for side in (base, candidate)] == [sys.executable, str(newer)]
        assert base.name != candidate.name and "/newer" in candidate.name and same_sides(base, candidate) is None
        (paired,) = open_workloads(sides, [workload], CompareRequest(**asked), Builds(), held)
        assert "A/A" in same_sides(*(paired.sides[side] for side in SIDES))


def test_a_command_and_a_url_become_targets(tiny, workload):
    for text, options, kind, command in (
        (f"{PYTHON} serve.py {{model}} --port {{port}}", {"preset": "vllm"}, LaunchedTarget, "--port {port}"),
        (f"{PYTHON} -m kvbench_engine.server", {"start_timeout": 7.0}, BuiltinTarget, "kvbench_engine.server"),
        ("http://127.0.0.1:9", {"vocab_size": 99}, OpenAITarget, "http://127.0.0.1:9"),
    ):
        opened = open_side(parse_side(text, tiny), workload, CompareRequest(**options))
        target = opened.choice.new_target()
        assert isinstance(target, kind) and opened.facts.command.endswith(command)
        assert kind is not BuiltinTarget or (target.start_timeout_s == 7.0 and not target.forked)
        assert json.dumps(opened.facts.to_json(), default=str)
        opened.choice.close()
    assert opened.choice.workload.engine == {"target": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("texts", "left", "told"),
    [
        ((f"{PYTHON} a.py {{port}}", "http://127.0.0.1:9"), "watermark", None),
        ((f"{PYTHON} a.py {{port}} {{max_num_seqs}}",) * 2, "watermark", "max_num_seqs"),
        ((f"{PYTHON} a.py {{port}}", f"{PYTHON} b.py {{port}} {{max_num_seqs}}"), "max_num_seqs", None),
        ((f"{PYTHON} -m kvbench_engine.server",) * 2, None, None),
        (("page_size=8", "page_size=16"), None, None),
    ],
)
def test_what_the_servers_of_two_commands_decide_on_their_own_is_said(tiny, workload, texts, left, told):
    """Not what both commands are given, and not of our own server, which takes every setting."""
    sides = dict(zip(SIDES, texts, strict=True))
    opened = {side: open_side(parse_side(text, tiny), workload, NOTHING) for side, text in sides.items()}
    note = left_to_servers(opened)
    assert (note is None) == (left is None)
    assert left is None or (left in note and (told is None or told not in note))


def test_a_ref_is_built_and_its_own_engine_is_launched(tiny, workload, builds, tmp_path):
    opened = open_side(parse_side("main", tiny), workload, CompareRequest(repo=tiny), builds)
    sha = git(tiny, "rev-parse", "main")
    assert (opened.facts.sha, opened.name) == (sha, f"main ({sha[:7]})")
    assert "A/A" in same_sides(opened, open_side(parse_side("v1.2", tiny), workload, CompareRequest(repo=tiny), builds))
    other = dataclasses.replace(workload, engine={"page_size": 1})
    assert same_sides(opened, open_side(parse_side("main", tiny), other, CompareRequest(repo=tiny), builds)) is None
    target = opened.choice.new_target()
    target.start(opened.choice.workload.engine, tmp_path / "server.log")
    try:
        process = Path(f"/proc/{target.server().pid}")
        words = process.joinpath("cmdline").read_bytes().split(b"\0")
        assert Path(words[0].decode()) == opened.build.python
        variables = dict(v.split(b"=", 1) for v in process.joinpath("environ").read_bytes().split(b"\0") if b"=" in v)
        assert variables[b"PYTHONPATH"].decode() == str(opened.build.source)
        assert target.model.name == "fake"  # of the ref's server: the running kvbench has none like it
    finally:
        target.stop()
    assert shlex.split(opened.facts.command)[-3:] == [str(opened.build.python), "-m", "engine.server"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("{python} {worktree}/serve.py {model} --port {port}", None),
        ("python3 serve.py --port {port}", r"neither \{python\} nor \{worktree\}"),
        ("{worktree}/no-such-program --port {port}", "no-such-program"),
        ("{python} {nonsense} {port}", "nonsense"),
        ("{python} serve.py {model}", r"has no \{port\}"),
        ("{python} 'serve.py {port}", "quotes"),
    ],
)
def test_a_launch_of_what_was_built_that_cannot_be_meant(tiny, workload, builds, command, says):
    if says is None:  # another project is launched with what was built
        opened = open_side(parse_side("main", tiny), workload, CompareRequest(repo=tiny, serve_cmd=command), builds)
        assert isinstance(opened.choice.new_target(), LaunchedTarget)
        words = shlex.split(opened.facts.command)
        assert words[0] == "env" and f"PYTHONPATH={opened.build.source}" in words and words[-1] == "{port}"
        assert words[-5:-3] == [str(opened.build.python), f"{opened.build.source}/serve.py"]
        return
    with pytest.raises(UsageError, match=says):
        open_side(parse_side("main", tiny), workload, CompareRequest(repo=tiny, serve_cmd=command), builds)


def test_a_side_is_kept_in_a_way_that_means_one_thing_and_repeated_as_it_was_given(workload, tmp_path, monkeypatch):
    for text, kept in (("page_size=16", "set:page_size=16"), ("http://127.0.0.1:9", "url:http://127.0.0.1:9")):
        side = open_side(parse_side(text), workload, NOTHING)
        assert pinned(side) == kept and parse_side(kept).text == side.side.text
        request = CompareRequest(workloads=("w.yaml",), seed=0, force=True)
        words = reproduce_command(request, {"base": side, "candidate": side}, "compare").split()
        options = ["--workload", "w.yaml", "--seed", "0", "--method", "auto", "--force"]
        assert words == ["kvbench", "compare", text, text, *options]
    make = builds_module._make_venv
    monkeypatch.setattr(builds_module, "_make_venv", lambda env, log, pip: make(env, log, pip=False))
    repo = make_repo(tmp_path / "other", {"setup.py": "", "serve.py": ""})  # another project is kept as its commit
    with Builds(tmp_path / "b", build_cmd="true") as builds:
        with pytest.raises(UsageError, match="--serve-cmd"):
            open_side(parse_side("main", repo), workload, CompareRequest(repo=repo), builds)
        options = {"repo": repo, "serve_cmd": "{python} serve.py {port}"}
        clean = open_side(parse_side("main", repo), workload, CompareRequest(**options), builds)
        assert pinned(clean) == clean.build.commit.sha[:12]
        (repo / "serve.py").write_text("changed")
        assert pinned(open_side(parse_side(".", repo), workload, CompareRequest(**options), builds)) == "ref:."


def test_a_ref_of_another_engine_is_launched_by_its_build_and_imports_nothing_else(workload, tmp_path, monkeypatch):
    make = builds_module._make_venv
    monkeypatch.setattr(builds_module, "_make_venv", lambda env, log, pip: make(env, log, pip=False))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    repo = make_repo(tmp_path / "engine", {"vllm.py": "", "setup.py": ""})
    install = "{python} -c \"import shutil, site; shutil.copy('vllm.py', site.getsitepackages()[0])\""
    with Builds(tmp_path / "b", build_cmd=install) as builds:
        opened = open_side(parse_side("main", repo), workload, CompareRequest(repo=repo, target="vllm"), builds)
        assert opened.choice.manifest.target_python == str(opened.build.python) and opened.facts.command == "vllm"
        monkeypatch.setattr(model_export.ModelFolders, "get", lambda *args, **how: SimpleNamespace(path=tmp_path))
        launch, target = opened.choice.stepped(opened.choice.workload.engine), opened.choice.new_target()
        opened.choice.close()
        for env in (launch.env, target.env):
            assert env["PYTHONPATH"] is None and env["PYTHONSAFEPATH"] == "1"


def test_a_stored_run(tiny, workload, tmp_path, monkeypatch):
    stored_run(tmp_path / "results", workload, [])
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(UsageError, match="write ref:results or run:results"):  # a branch of that name
            parse_side("results", tiny)
        kinds = [parse_side(text, tiny).kind for text in ("./results", "run:results", "ref:results")]
        assert kinds == ["run", "run", "ref"]
    run = stored_run(tmp_path / "mixed" / "20260101T000000Z-1a2b3c4", workload, [])
    opened = open_side(parse_side(str(run), tiny), workload, NOTHING)
    assert opened.stored == run and opened.choice.workload.engine == workload.engine
    assert opened.facts.versions == {"torch": "2"} and opened.name == "mixed/20260101T000000Z-1a2b3c4"
    with pytest.raises(UsageError, match="cannot be measured again"):
        opened.choice.new_target()
    (run / "cells" / "paged-p16-c2").mkdir(parents=True)
    (run / "cells" / "paged-p16-c2" / "summary.json").write_text(json.dumps({"settings": {"page_size": None}}))
    assert measured_design(RunFolder(run), workload).configurations[0].settings["page_size"] is None  # as measured
    other = json.loads(json.dumps(workload.resolved)) | {"seed": 4}
    for change, says in (({"status": "incomplete"}, "is not complete"), ({"workload": other}, "differs in seed")):
        changed = parse_side(str(stored_run(tmp_path / says, workload, [], **change)), tiny)
        with pytest.raises(UsageError, match=says):
            open_side(changed, workload, NOTHING)


@pytest.mark.parametrize(
    ("texts", "options", "says"),
    [
        (("main", "http://h:1"), {"vocab_size": 9}, None),
        (("run:a", "main"), {}, "only with another stored one"),
        ((f"{sys.executable} -m serve", f"{sys.executable} --port {{port}}"), {}, r"has no \{port\}"),
        ((f"{sys.executable} -m kvbench_engine.server", f"{sys.executable} --port {{port}}"), {}, None),
        (("main", "v1.2"), {"vocab_size": 9}, "--vocab-size"),
        (("page_size=8", "page_size=16"), {"target": "vllm"}, None),
        (("main", "v1.2"), {"target": "vllm"}, None),  # built, and launched as that
        (("main", "v1.2"), {"target": "http://h:1"}, "name of an engine"),
        (("main", "v1.2"), {"target": "vllm", "target_python": "/p"}, "--target-python"),
        (("main", "page_size=8"), {"target": "vllm", "target_python": "/p"}, None),
        (("page_size=8", "page_size=8"), {"target": "vllm", "candidate_python": "/p"}, None),
        (("page_size=8", "page_size=8"), {"candidate_python": "/p"}, "--candidate-python"),
        (("page_size=8", "main"), {"target": "vllm", "candidate_python": "/p"}, "--candidate-python"),
        (("page_size=8", "page_size=16"), {"build_cmd": "make"}, "--build-cmd"),
        (("main", "."), {"repo": REPOSITORY, "build_cmd": "x", "serve_cmd": "{python} {port}", "preset": "vllm"}, None),
    ],
)
def test_an_option_that_means_nothing_is_refused(tiny, texts, options, says):
    sides = [PairSide("run", "a", "a") if text == "run:a" else parse_side(text, tiny) for text in texts]
    if says is None:
        require_used(sides, CompareRequest(**options))
    else:
        with pytest.raises(UsageError, match=says):
            require_used(sides, CompareRequest(**options))


@pytest.mark.parametrize("error", [None, MeasurementError("it ended with code 1"), ServerRefusedError("page_size 7")])
def test_each_configuration_is_launched_once_before_the_pairs_and_a_failure_is_left_to_them(tmp_path, workload, error):
    design = make_design(workload.engine, {"layout": ["contiguous"]}, workload.load_points, "one_at_a_time")
    build = SimpleNamespace(fresh=True, commit=SimpleNamespace(sha="1" * 40, changes=None))
    target, opened, said = Mock(**{"start.side_effect": error}), {}, []
    choice = SimpleNamespace(runs_already=False, new_target=lambda: target)
    for name in SIDES:
        opened[name] = SimpleNamespace(side=PairSide("cmd", "serve", "serve"), name=name, choice=choice, build=build)
    paired = PairedWorkload("tiny", opened, match_designs("tiny", design, design), {})
    quiet = (lambda text: None, lambda: None, Clock())  # shows nothing, checks nothing, limits nothing
    if isinstance(error, ServerRefusedError):
        with pytest.raises(UsageError, match=r"page_size 7.*\{port\}"):
            paired.compile(tmp_path, said.append, *quiet)
        return
    for build.fresh in (True, False):  # the second time it is compiled already
        paired.compile(tmp_path, said.append, *quiet)
    assert target.start.call_count == target.stop.call_count == 4  # two configurations of two sides
    assert sum("ended with code 1" in line for line in said) == (4 if error else 0)
