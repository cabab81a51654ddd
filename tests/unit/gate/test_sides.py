"""BASE and CANDIDATE: what a text means, what opens, and every refusal."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from kvbench.common.errors import UsageError
from kvbench.common.packages import HOUSE
from kvbench.gate.compare import environments
from kvbench.gate.compare.builds import Builds
from kvbench.gate.compare.side_text import parse_settings, parse_side
from kvbench.gate.compare.sides import open_side, require_used, same_sides
from kvbench.targets.builtin import BuiltinTarget
from kvbench.targets.launched import LaunchedTarget
from kvbench.targets.running import OpenAITarget
from kvbench.workload.file import load_workload
from tests.support.git_repo import git, make_repo, make_tiny_kvbench
from tests.support.sweep_parts import TINY

PYTHON = shlex.quote(sys.executable)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    repo = make_tiny_kvbench(tmp_path_factory.mktemp("tiny") / "repo")
    git(repo, "branch", "feature/x")
    git(repo, "branch", "results")
    git(repo, "tag", "v1.2")
    return repo


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"sweep": {}}))
    return load_workload(path, profile="cpu")


@pytest.fixture
def builds(tmp_path):
    with Builds(tmp_path / "builds") as made:
        yield made


def make_run(folder: Path, of, **changes) -> Path:
    folder.mkdir(parents=True)
    manifest = {"format": 1, "status": "complete", "workload": dict(of.resolved), "plan": [], "profile": "cpu"}
    manifest |= {"git": {"sha": "1" * 40}, "versions": {"torch": "2"}, "command": ["kvbench", "sweep"]}
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    return folder


@pytest.mark.parametrize(
    ("text", "kind", "kept"),
    [
        ("main", "ref", "main"),
        ("feature/x", "ref", "feature/x"),
        ("v1.2", "ref", "v1.2"),
        ("HEAD~1", "ref", "HEAD~1"),
        (".", "ref", "."),
        ("ref:main", "ref", "main"),
        ("http://127.0.0.1:8000", "url", "http://127.0.0.1:8000"),
        ("https://host/v1", "url", "https://host/v1"),
        ("url:http://h", "url", "http://h"),
        ("page_size=16", "set", "page_size=16"),
        ("engine.page_size=16, enable_prefix_caching=true", "set", "engine.page_size=16, enable_prefix_caching=true"),
        (f"{PYTHON} -m engine.server", "cmd", f"{PYTHON} -m engine.server"),
        ("./serve.sh{port}", "cmd", "./serve.sh{port}"),
        (f"cmd:{PYTHON}", "cmd", PYTHON),
    ],
)
def test_what_a_text_means(tiny, monkeypatch, text, kind, kept):
    monkeypatch.setattr("shutil.which", lambda name: name if name in (sys.executable, "./serve.sh{port}") else None)
    side = parse_side(text, tiny)
    assert (side.kind, side.text) == (kind, kept)


def test_two_long_commands_that_end_differently_have_two_names():
    names = {parse_side(f"cmd:{PYTHON} {'-m some.long.module ' * 5} --itl-ms {ms}").name for ms in (20, 21)}
    assert len(names) == 2 and all(len(name) <= 60 for name in names)


def test_a_sha_is_a_ref(tiny):
    assert parse_side(git(tiny, "rev-parse", "--short", "HEAD"), tiny).kind == "ref"


def test_a_folder_of_results_and_a_branch_of_that_name(tiny, tmp_path, workload, monkeypatch):
    make_run(tmp_path / "results", workload)
    monkeypatch.chdir(tmp_path)
    assert parse_side("./results", tiny).kind == "run"
    with pytest.raises(
        UsageError, match="could be a git ref and a folder of results: write ref:results or run:results"
    ):
        parse_side("results", tiny)
    assert parse_side("run:results", tiny).kind == "run"
    assert parse_side("ref:results", tiny).kind == "ref"


def test_settings_are_yaml():
    assert parse_settings("page_size=16,enable_prefix_caching=true,engine.swap_space=64MiB, dtype=null") == {
        "page_size": 16,
        "enable_prefix_caching": True,
        "swap_space": "64MiB",
        "dtype": None,
    }
    assert parse_settings("model=a,b,page_size=8") == {"model": "a,b", "page_size": 8}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("set:", "nothing behind it"),
        ("mian", r"did you mean main\?"),
        ("a/b/c", "is no git ref"),
        ("no-such-program --port 1", "there is no program 'no-such-program'"),
        ("no-such-program {port}", "there is no program"),
        ("cmd:'unclosed {port}", "mend the quotes"),
        ("page_size=16,page_size=8", "twice"),
        ("page_size=[1, 2]", "one value a setting"),
        ("set:16", "no setting of the engine"),
        ("set:load.concurrency=4", "no setting of the engine"),
        ("page_size=[1", "not a YAML value"),
        ("ref:nonsense", "is no commit of"),
        ("run:/", "no folder of results"),
    ],
)
def test_what_means_nothing_is_refused(tiny, text, says):
    with pytest.raises(UsageError, match=says):
        parse_side(text, tiny)


def test_a_folder_that_is_no_run_and_a_place_without_git(tiny, tmp_path):
    with pytest.raises(UsageError, match=r"without manifest\.json"):
        parse_side(str(tmp_path), tiny)
    with pytest.raises(UsageError, match=r"no git repository .--repo PATH"):
        parse_side("main", tmp_path)


def test_settings_are_laid_on_the_workload(tiny, workload):
    base, candidate = (open_side(parse_side(text, tiny), workload, {}) for text in ("page_size=32", "page_size=8"))
    assert base.workload.engine == {**workload.engine, "page_size": 32}
    assert candidate.workload.resolved["engine"]["page_size"] == 8
    assert candidate.workload.load == workload.load and candidate.workload.source == workload.source
    assert isinstance(base.new_target(), BuiltinTarget) and base.facts["settings"] == {"page_size": 32}
    assert workload.engine["page_size"] == 16
    assert same_sides(base, candidate) is None
    same = open_side(parse_side("engine.page_size=8", tiny), workload, {})
    assert "A/A" in same_sides(candidate, same)


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("pagesize=16", {}, "did you mean 'page_size'"),
        ("kv_budget=lots", {}, "not a size"),
        ("page_size=8", {"target": "http://127.0.0.1:1"}, "cannot be given to a server that runs already"),
        ("preemption_mode=swap", {"target": "vllm", "target_python": sys.executable}, "preempts by recomputation only"),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny, workload, tmp_path, monkeypatch, text, options, says):
    (tmp_path / "vllm.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UsageError, match=says):
        open_side(parse_side(text, tiny), workload, options)


def test_a_setting_that_is_swept_is_refused(tiny, workload):
    swept = dataclasses.replace(workload, sweep={"page_size": (8, 16)})
    with pytest.raises(UsageError, match="the workload sweeps"):
        open_side(parse_side("page_size=8", tiny), swept, {})


def test_a_command_and_a_url_become_targets(tiny, workload):
    template = open_side(parse_side(f"{PYTHON} serve.py {{model}} --port {{port}}", tiny), workload, {"preset": "vllm"})
    assert isinstance(template.new_target(), LaunchedTarget) and template.facts["command"].endswith("--port {port}")
    plain = open_side(parse_side(f"{PYTHON} -m engine.server", tiny), workload, {"start_timeout": 7.0})
    assert isinstance(plain.new_target(), BuiltinTarget) and plain.new_target().start_timeout_s == 7.0
    url = open_side(parse_side("http://127.0.0.1:9", tiny), workload, {"vocab_size": 99})
    assert isinstance(url.new_target(), OpenAITarget) and url.workload.engine == {"target": "http://127.0.0.1:9"}
    assert not url.needs_first_launch and plain.needs_first_launch
    for opened in (template, plain, url):
        assert json.dumps(opened.facts, default=str)
        opened.close()


def test_a_ref_is_built_and_its_own_engine_is_launched(tiny, workload, builds, tmp_path):
    opened = open_side(parse_side("main", tiny), workload, {"repo": tiny}, builds)
    assert opened.facts["sha"] == git(tiny, "rev-parse", "main") and opened.name == f"main ({opened.facts['sha'][:7]})"
    target = opened.new_target()
    target.start(opened.workload.engine, tmp_path / "server.log")
    try:
        process = Path(f"/proc/{target.server().pid}")
        words = process.joinpath("cmdline").read_bytes().split(b"\0")
        assert Path(words[0].decode()) == opened.build.python
        variables = dict(v.split(b"=", 1) for v in process.joinpath("environ").read_bytes().split(b"\0") if b"=" in v)
        assert variables[b"PYTHONPATH"].decode() == str(opened.build.source)
        assert target.model.name == "fake"  # of the ref's server: the running kvbench has none like it
    finally:
        target.stop()
    opened.first_launch(opened.workload.engine, tmp_path / "first.log")
    assert (tmp_path / "first.log").exists()
    assert shlex.split(opened.facts["command"])[-3:] == [str(opened.build.python), "-m", "engine.server"]


def test_the_same_commit_twice_is_noted(tiny, workload, builds):
    base, candidate = (open_side(parse_side(t, tiny), workload, {"repo": tiny}, builds) for t in ("main", "v1.2"))
    assert "same commit" in same_sides(base, candidate)
    older = open_side(
        parse_side("main", tiny), dataclasses.replace(workload, engine={"page_size": 1}), {"repo": tiny}, builds
    )
    assert same_sides(base, older) is None


def test_another_project_is_launched_with_what_was_built(tiny, workload, builds):
    command = "{python} {worktree}/serve.py {model} --port {port}"
    opened = open_side(parse_side("main", tiny), workload, {"repo": tiny, "serve_cmd": command}, builds)
    assert isinstance(opened.new_target(), LaunchedTarget)
    words = shlex.split(opened.facts["command"])
    assert words[0] == "env" and f"PYTHONPATH={opened.build.source}" in words and words[-1] == "{port}"
    assert words[-5:-3] == [str(opened.build.python), f"{opened.build.source}/serve.py"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python3 serve.py --port {port}", r"neither \{python\} nor \{worktree\}"),
        ("{worktree}/no-such-program --port {port}", "the build has no program"),
        ("{python} {nonsense} {port}", "no setting"),
        ("{python} serve.py {model}", r"has no \{port\}"),
        ("{python} 'serve.py {port}", "mend the quotes"),
    ],
)
def test_a_launch_of_what_was_built_that_cannot_be_meant(tiny, workload, builds, command, says):
    with pytest.raises(UsageError, match=says):
        open_side(parse_side("main", tiny), workload, {"repo": tiny, "serve_cmd": command}, builds)


def test_another_project_needs_a_launch_command(tmp_path, workload, monkeypatch):
    make = environments._make_venv
    monkeypatch.setattr(environments, "_make_venv", lambda env, log, pip: make(env, log, pip=False))
    repo = make_repo(tmp_path / "other", {"setup.py": ""})
    says = "how it is launched has to be said: --serve-cmd"
    with Builds(tmp_path / "b", build_cmd="true") as builds, pytest.raises(UsageError, match=says):
        open_side(parse_side("main", repo), workload, {"repo": repo}, builds)


def test_a_stored_run(tiny, workload, tmp_path):
    run = make_run(tmp_path / "mixed" / "20260101T000000Z-1a2b3c4", workload)
    opened = open_side(parse_side(str(run), tiny), workload, {})
    assert opened.stored == run and opened.workload.engine == workload.engine and not opened.needs_first_launch
    assert opened.facts["versions"] == {"torch": "2"} and opened.name == "mixed/20260101T000000Z-1a2b3c4"
    with pytest.raises(UsageError, match="cannot be measured again"):
        opened.new_target()
    half = make_run(tmp_path / "half", workload, status="incomplete")
    with pytest.raises(UsageError, match="is not complete"):
        open_side(parse_side(str(half), tiny), workload, {})
    other = json.loads(json.dumps(workload.resolved)) | {"seed": 4}
    with pytest.raises(UsageError, match="another workload: it differs in seed"):
        open_side(parse_side(str(make_run(tmp_path / "o", workload, workload=other)), tiny), workload, {})


@pytest.mark.parametrize(
    ("texts", "options", "says"),
    [
        (("main", "http://h:1"), {"vocab_size": 9}, None),
        ((f"{sys.executable} -m serve", f"{sys.executable} --port {{port}}"), {}, r"has no \{port\}, which must be"),
        ((f"{sys.executable} -m engine.server", f"{sys.executable} --port {{port}}"), {}, None),
        (("main", "v1.2"), {"vocab_size": 9}, "--vocab-size goes with"),
        (("page_size=8", "page_size=16"), {"target": "vllm"}, None),
        (("main", "v1.2"), {"target": "vllm"}, "--target goes with a side that is settings"),
        (("http://h:1", "http://h:2"), {"serve_cmd": "x {port}"}, "--serve-cmd goes with a side that is a git ref"),
        (("http://h:1", "http://h:2"), {"rebuild": True}, "--rebuild goes with a side that is a git ref"),
        (("page_size=8", "page_size=16"), {"build_cmd": "make"}, "--build-cmd goes with"),
        (
            ("main", "v1.2"),
            {"repo": HOUSE, "build_cmd": "make", "serve_cmd": "{python} {port}", "preset": "vllm"},
            None,
        ),
    ],
)
def test_an_option_that_means_nothing_is_refused(tiny, texts, options, says):
    sides = [parse_side(text, tiny) for text in texts]
    if says is None:
        require_used(sides, options)
    else:
        with pytest.raises(UsageError, match=says):
            require_used(sides, options)


def test_a_stored_run_is_not_set_beside_a_server(tiny, workload, tmp_path):
    run = parse_side(str(make_run(tmp_path / "run", workload)), tiny)
    require_used([run, run], {})
    with pytest.raises(UsageError, match="only with another stored one"):
        require_used([run, parse_side("main", tiny)], {})
