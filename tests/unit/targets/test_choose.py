"""From the options of the command line to a target, or to a refusal that names the option or value."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest
import yaml

import kvbench_engine.tokenizer
from kvbench.cli.main import main
from kvbench.common.errors import UsageError
from kvbench.common.files import write_json
from kvbench.common.machine import environment
from kvbench.common.options import parameters
from kvbench.runs.folder import RunFolder
from kvbench.runs.manifest import reopen
from kvbench.runs.results import Manifest
from kvbench.targets.builtin import BuiltinTarget
from kvbench.targets.choose import BUILTIN, KINDS_OF, PRESET, RUNNING, TEMPLATE, choose
from kvbench.targets.launched import LaunchedTarget
from kvbench.targets.options import TargetOptions
from kvbench.targets.preset import LOOP
from kvbench.targets.presets import PRESETS
from kvbench.targets.running import OpenAITarget
from kvbench.workload.file import load_workload
from tests.support.loads import ROOT
from tests.support.sweep_parts import TINY

ENGINE = {"device": "cpu", "page_size": 32, "kv_budget": "65MiB", "max_model_len": 256, "max_num_seqs": 8}
PAGE_16 = ENGINE | {"page_size": 16}  # which vLLM's CPU build cannot have
URL = {"target": "http://127.0.0.1:9"}
VLLM_HERE = {"target": "vllm", "target_python": sys.executable}


@pytest.fixture(autouse=True)
def _engines_here(tmp_path_factory, monkeypatch):
    """This Python has vLLM and SGLang, for anybody who only asks whether it has."""
    folder = tmp_path_factory.mktemp("modules")
    for name in ("vllm", "sglang"):
        (folder / f"{name}.py").write_text("raise ImportError('not to be imported')")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.fixture
def workload(tmp_path):
    def make(sweep=None, engine=None, load=None):
        path = tmp_path / "w.yaml"
        parts = {"engine": engine or ENGINE, "sweep": sweep or {}, "load": TINY["load"] | (load or {})}
        path.write_text(yaml.safe_dump(TINY | parts))
        return load_workload(path, profile="cpu")

    return make


def test_answers_that_a_server_cannot_give_are_refused_before_its_launch(workload):
    one = TINY["load"]["prompts"]["classes"][0]

    def load(**answers):
        return workload(load={"temperature": 1.0, "prompts": {"kind": "synthetic", "classes": [one | answers]}})

    assert chosen(load(n=2, best_of=4)).workload  # the built-in engine has all of them
    assert chosen(load(n=2), **VLLM_HERE).workload
    assert chosen(load(n=2, beam_width=2), **URL, preset="vllm").workload
    for unnamed in (URL, served_by("")):  # it may ignore what it does not know
        assert chosen(load(n=2), **unnamed).workload
        with pytest.raises(UsageError, match="--preset"):
            chosen(load(n=2, beam_width=2), **unnamed)
    with pytest.raises(UsageError, match="best_of"):
        chosen(load(n=2, best_of=4), **VLLM_HERE)


@pytest.mark.parametrize(
    ("options", "endpoint", "lacks"),
    [
        (VLLM_HERE, "messages", None),
        ({"target": "transformers", "target_python": sys.executable}, "messages", "/v1/messages"),
        (URL | {"preset": "tgi"}, "responses", "/v1/responses"),
        (URL, "responses", None),  # which it is asked for
        ({}, "responses", "/v1/responses"),
        ({"serve_cmd": f"{sys.executable} -m it"}, "responses", None),
    ],
)
def test_an_endpoint_that_a_kind_of_server_lacks_is_refused_before_its_launch(workload, options, endpoint, lacks):
    refuses = pytest.raises(UsageError, match=f"{lacks}.* completions") if lacks else contextlib.nullcontext()
    with refuses:
        assert chosen(workload(load={"endpoint": endpoint}), **options).workload


def chosen(workload, stored=None, **options):
    return choose(workload, TargetOptions(**options), Manifest(**stored) if stored else None)


def served_by(words):
    """A command with sweep variables, which is never run."""
    return {"serve_cmd": f"{sys.executable} {{port}} {words}"}


def plan(choice, *only):
    return choice.plan(only)


def config_ids(choice):
    return {c.config_id for c in plan(choice)[0].configurations}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"serve_cmd": f"{sys.executable} {{prt}}"}, "{prt}"),
        ({"serve_cmd": "/no/such -m server"}, "/no/such"),
        ({"target": "vllm", "target_python": "/no/python"}, "/no/python"),
        (URL | {"preset": "vlm"}, "'vlm'"),
        (URL | {"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"target": "vllm", "serve_cmd": "x"}, "--target and --serve-cmd"),
        ({"target": "vlm"}, "'vlm'"),
        *(({"target": url}, f"'{url}'") for url in ("http://[::1", "ftp://x", "http://", "http://h:99999", "nowhere")),
        ({"target": "tgi"}, "text-generation-launcher"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(workload, options, named):
    with pytest.raises(UsageError, match=re.escape(named)):
        chosen(workload(sweep={"layout": ["contiguous"]}), **options)


SCRIPT = "#!/bin/sh\n"


@pytest.mark.parametrize(
    ("target", "script", "why"),
    [
        ("vllm", SCRIPT + "exit 3", r"no module 'vllm'.*--target-python"),
        ("vllm", SCRIPT + "exit 1", r"exit code 1"),
        ("vllm", SCRIPT + "sleep 60", r"0.5 s"),
        ("vllm", "neither", r"Exec format error"),
        ("tgi", SCRIPT + "exit 2", r"--help ended with exit code 2"),
        ("llamacpp", SCRIPT + "echo usage: python", r"knows no --model.*--target-python"),
        ("tgi", None, r"program' that launches TGI"),
    ],
)
def test_a_program_that_cannot_launch_its_preset_is_refused_before_a_launch(
    workload, tmp_path, monkeypatch, target, script, why
):
    monkeypatch.setattr("kvbench.targets.launch_plan._PROGRAM_TIMEOUT_S", 0.5 if "sleep" in str(script) else 60.0)
    program = tmp_path / "program"
    if script is not None:
        program.write_text(script)
        program.chmod(0o755)
    with pytest.raises(UsageError, match=why):
        chosen(workload(), target=target, target_python=str(program))


def test_a_port_that_is_taken_is_refused_before_anything_is_launched(workload):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options in ({}, VLLM_HERE):
            with pytest.raises(UsageError, match=f"port {port} "):
                chosen(workload(), port=port, **options)


def test_each_kind_of_target(workload):
    builtin = chosen(workload())
    assert isinstance(builtin.new_target(), BuiltinTarget) and builtin.new_target().start_timeout_s == 180
    assert builtin.start_guess_s < 20 and chosen(workload(), start_timeout=5.0).new_target().start_timeout_s == 5
    plain = chosen(workload(sweep={"page_size": [8]}), serve_cmd=f"{sys.executable} -m other.server")
    assert isinstance(plain.new_target(), BuiltinTarget) and plain.manifest.backend == "custom"
    running = chosen(workload(), target="http://10.0.0.7:8000/v1", preset="sglang")
    assert isinstance(running.new_target(), OpenAITarget) and running.runs_already
    assert running.new_target().preset.name == "sglang" and running.manifest.backend == "sglang"
    assert running.workload.engine == {"target": "http://10.0.0.7:8000/v1"} and not running.manifest.shared_machine
    for url in ("http://[::1]:8000", "https://localhost", "http://0.0.0.0:80"):
        assert chosen(workload(), target=url).manifest.shared_machine
    launched = chosen(workload(), **VLLM_HERE, target_args="--enforce-eager -x 'a b'")
    assert isinstance(launched.new_target(), LaunchedTarget)
    assert launched.new_target().launcher.extra == ("--enforce-eager", "-x", "a b")
    assert launched.new_target().start_timeout_s == 900 and launched.start_guess_s >= 90
    kept = {"target": "vllm", "serve_cmd": None, "target_python": sys.executable, "backend": "vllm"}
    assert kept.items() <= dict(launched.manifest).items()
    templated = chosen(workload(), **served_by(""), preset="transformers")
    assert templated.new_target().dialect.done_marker is False and templated.manifest.backend == "transformers"


def test_a_run_that_goes_on_has_the_target_it_was_started_with(workload):
    stored = VLLM_HERE | {"exact": True, "target_args": "-q"}
    with pytest.raises(UsageError, match="the baseline cannot be run"):  # --exact again
        chosen(workload(engine=PAGE_16), stored=stored)
    choice = chosen(workload(), stored=stored)
    assert choice.manifest.exact and choice.manifest.preset is None  # what was not given is put down too
    assert choice.new_target().launcher.extra == ("-q",)


def test_a_run_on_a_running_server_goes_on_with_the_same_facts_and_no_others(workload, tmp_path, monkeypatch):
    """Otherwise ``sweep --resume RUN --model OTHER`` would mix two models under one name."""
    monkeypatch.setenv("A_KEY", "secret")
    (tmp_path / "tokenizer.json").write_text(
        Path(kvbench_engine.tokenizer.__file__).with_name("bpe8k").joinpath("tokenizer.json").read_text()
    )
    facts = {"vocab_size": 512, "max_model_len": 256, "model": "m", "api_key_env": "A_KEY", "tokenizer": tmp_path}
    first = chosen(workload(), target="https://127.0.0.1:9", preset="transformers", **facts).manifest.to_json()
    stored = json.loads(json.dumps(first))
    assert "secret" not in json.dumps(stored)
    again = chosen(workload(), stored=stored).new_target()
    assert again._given == ("m", 512, 256) and again.http.access.api_key_env == "A_KEY"
    assert again.preset.name == "transformers" and again._text_of_ids([5, 6])
    write_json(tmp_path / "manifest.json", {"format": 1, "workload": {}, "plan": [], **environment(), **first})
    begun = RunFolder(tmp_path).manifest()

    def go_on(**options):
        served = chosen(workload(), stored=stored, **options).manifest
        return reopen(tmp_path, begun, served, force=False)

    go_on()
    go_on(no_tls_verify=True)  # how it is reached may change
    for other, words in (({"model": "n"}, "model (m then, n now)"), ({"vocab_size": 9}, "(512 then, 9 now)")):
        with pytest.raises(UsageError, match=re.escape(words)):
            go_on(**other)


def test_the_kv_budget_reaches_servers_in_their_own_units(workload):
    def given(target, flag):
        launcher = chosen(workload(), target=target, target_python=sys.executable).new_target().launcher
        line = launcher.command(workload().engine, model="/m", port=1, scratch="/s")
        return int(line[line.index(flag) + 1])

    tokens = given("sglang", "--max-total-tokens")
    # llama-32m: 8 layers x 4 KV heads x (64 + 64) x 4 bytes = 16,384 bytes a token, and a page table
    assert 0.98 * (65 << 20) / 16384 <= tokens <= (65 << 20) / 16384
    assert given("vllm", "--kv-cache-memory-bytes") == tokens * 16384


def test_an_adapter_gets_the_words_of_the_server_and_some_targets_have_none(workload):
    choice = chosen(workload(), **VLLM_HERE, target_args="--enforce-eager")
    with contextlib.closing(choice):
        launch = choice.stepped({**workload().engine, "page_size": 64})
    command, environment = launch.command, launch.env
    assert launch.start_limit_s == 900 and launch.scratch and not launch.shared
    assert command[:3] == (sys.executable, str(LOOP), str(PRESETS["vllm"].adapter))
    words = dict(itertools.pairwise(command[3:]))
    assert words["--block-size"] == "64" and Path(words["--model"]).name and "--enforce-eager" in command
    assert "vllm.entrypoints.openai.api_server" not in command and environment["HF_HUB_OFFLINE"] == "1"
    for other in ({"serve_cmd": "python server.py"}, {"serve_cmd": "python server.py --port {port}"}):
        assert chosen(workload(), **other).stepped is None
    assert chosen(workload()).stepped({}).shared  # the built-in engine's process


LLAMA_HERE = {"target": "llamacpp"}


@pytest.fixture
def llama_server(tmp_path, monkeypatch):
    """A program on PATH that knows the options of llama-server, and of TGI's launcher."""
    for name in ("llamacpp", "tgi"):
        (program := tmp_path / PRESETS[name].program).write_text(f"{SCRIPT}echo '{PRESETS[name].command}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(("budget", "told"), [("65MiB", None), ("33MiB", "2,048"), ("17MiB", "1,024")])
@pytest.mark.usefixtures("llama_server")
def test_what_a_multiple_of_256_tokens_loses_of_a_budget_is_said_before_the_launch(workload, budget, told):
    pytest.importorskip("gguf")
    choice = chosen(workload(engine=ENGINE | {"kv_budget": budget}), **LLAMA_HERE)
    launcher, engine = choice.new_target().launcher, choice.workload.engine
    line = launcher.command(engine, model="/m", port=1, scratch="/s")
    # What the server is told is what its own figure is held against, not what the built-in engine would hold.
    assert choice.check(engine).capacity_tokens == int(line[line.index("--ctx-size") + 1])
    (said,) = [note for note in choice.notes if "tokens of KV" in note] or [None]
    assert (said is None) if told is None else told in said
    if told is not None:
        engine = {k: v for k, v in ENGINE.items() if k != "page_size"}  # which it has none of
        exactly = workload(engine=engine | {"kv_budget": budget})
        with pytest.raises(UsageError, match=told):
            chosen(exactly, **LLAMA_HERE, exact=True)
    assert choice.check({"model": "llama-32m"}).capacity_tokens is None  # nothing is told


@pytest.mark.usefixtures("llama_server")
def test_a_model_that_the_target_cannot_be_given_is_refused_before_a_launch(workload, tmp_path):
    (tmp_path / "mpt.json").write_text('{"model_type": "mpt", "d_model": 64}')
    made = workload()
    odd = dataclasses.replace(made, engine={"device": "cpu", "model": str(tmp_path / "mpt.json")})
    for options in (LLAMA_HERE, served_by("{model}") | {"preset": "llamacpp"}):
        with pytest.raises(UsageError, match="mpt"):
            chosen(odd, **options)
    assert chosen(odd, **served_by("") | {"preset": "llamacpp"}).workload  # it has a model of its own


def test_what_is_swept_and_run_must_be_in_the_command(workload):
    made = workload(sweep={"layout": ["contiguous"], "page_size": [8, 16]})
    with pytest.raises(UsageError, match=r"layout, page_size.*--only"):
        chosen(made, **served_by(""))
    for only, setting in (("launched-p8-*", "page_size"), ("contiguous-*", "layout"), ("*", "layout, page_size")):
        with pytest.raises(UsageError, match=f"the sweep varies {setting}, and --serve-cmd"):
            plan(chosen(made, **served_by(""), only=(only,)), only)
    left, _ = plan(chosen(made, **served_by(""), only=("launched-c*",)), "launched-c*")
    assert [c.is_baseline for c in left.configurations] == [True]
    assert plan(chosen(workload(), **served_by("")))[0].cells == left.cells


def test_a_command_gives_its_server_the_names_of_what_it_passes_on_only(workload):
    """A mock server that was given no setting must not be called paged."""

    def labels(command, preset=None, **more):
        found = chosen(workload(**more), **served_by(command), preset=preset)
        return [c.label for c in plan(found)[0].configurations], found.workload.engine

    shown, settings = labels("--itl-ms 5")
    assert shown == ["launched server"]
    assert not {"layout", "page_size", "kv_budget", "max_num_seqs"} & settings.keys()
    assert settings["max_model_len"] == 256  # the prompts keep to it
    pages = ["launched server, page 32", "launched server, page 64"]
    assert labels("{page_size}", sweep={"page_size": [64]})[0] == pages
    assert labels("{layout} {page_size}")[0] == ["paged, page 32"]
    caching = labels("{enable_prefix_caching:on|off}", sweep={"enable_prefix_caching": [True]})[0]
    assert caching == ["launched server", "launched server, prefix caching"]
    assert labels("{page_size}", "vllm")[0] == ["paged, page 32"]  # it always is


def test_what_the_target_cannot_do_is_skipped_and_the_rest_runs(workload):
    sweep = {"page_size": [8, 64], "layout": ["contiguous"], "enable_prefix_caching": [True]}
    design, blocks = plan(chosen(workload(sweep=sweep), **VLLM_HERE))
    assert {c.config_id for c in design.configurations} == {"paged-p32", "paged-p64", "paged-p32-prefix"}
    *skipped, combined = design.notes
    assert len(skipped) == 2 and all("skipped" in note and "vLLM cannot have" in note for note in skipped)
    assert combined.startswith("skipped 1 of 4 combinations: 3 are measured")  # of what vLLM can have
    assert {b.configuration.config_id for b in blocks} == {c.config_id for c in design.configurations}


@pytest.mark.usefixtures("llama_server")
def test_a_baseline_that_the_target_cannot_have_is_the_nearest_one_with_a_note_or_refused(workload):
    base = workload(engine=PAGE_16)
    near = chosen(base, **VLLM_HERE)
    assert near.workload.engine == base.engine | {"page_size": 32}
    (note,) = near.notes
    assert "page_size is 32 instead of 16" in note and "vLLM cannot have page_size 16" in note
    with pytest.raises(UsageError, match=r"vLLM cannot have page_size 16.*--exact out"):
        chosen(base, **VLLM_HERE, exact=True)
    with pytest.raises(UsageError, match=r"nor anything near it: .*TGI cannot have device cpu"):
        chosen(base, target="tgi")


def test_a_command_of_a_known_kind_is_held_to_what_that_kind_can_do(workload):
    line = served_by("{page_size} --kv {kv_budget} --dtype {dtype} {device} {model}")
    near = chosen(workload(engine=PAGE_16, sweep={"page_size": [8, 64]}), **line, preset="vllm")
    assert near.workload.engine["page_size"] == 32 and config_ids(near) == {"paged-p32", "paged-p64"}
    with pytest.raises(UsageError, match="takes multiples of 32"):
        chosen(workload(engine=PAGE_16), **line, preset="vllm", exact=True)
    with pytest.raises(UsageError, match=r"--serve-cmd has {page_size}, and: TGI cannot have page_size 32.*Take"):
        chosen(workload(), **served_by("{page_size}"), preset="tgi")
    unnamed = chosen(workload(engine=PAGE_16), **line)  # nobody knows what it can
    assert unnamed.workload.engine["page_size"] == 16


def test_settings_that_the_launch_does_not_pass_on_are_not_put_down(workload):
    """A budget, dtype or device that no word of the command gives is the server's own."""

    def checked(choice):
        return choice.check(choice.workload.engine)

    known = checked(chosen(workload(), **VLLM_HERE))
    assert known.kv_budget_bytes == 65 << 20 and known.bytes_per_token == 16384
    assert known.capacity_tokens <= (65 << 20) // 16384  # what its flags say
    left = chosen(workload(engine={k: v for k, v in ENGINE.items() if k != "kv_budget"}), **VLLM_HERE)
    assert checked(left).model_fields_set == {"max_model_len", "vocab_size"} and "kv_budget" in left.notes[0]
    silent = chosen(workload(), **served_by("{page_size} {model}"))
    assert checked(silent).model_fields_set == {"max_model_len", "vocab_size"}
    assert "device, kv_budget, max_model_len, max_num_seqs" in silent.notes[0]
    launcher = silent.new_target().launcher
    assert launcher.passed_on(silent.workload.engine) == {"page_size": 32, "model": silent.workload.engine["model"]}
    launcher = chosen(workload(), **served_by("{kv_budget} {dtype}")).new_target().launcher
    assert launcher.check(workload().engine).kv_budget_bytes == 65 << 20
    assert launcher.passed_on({**workload().engine, "dtype": "auto"})["dtype"] == "float32"  # the built-in engine's
    own = launcher.command({**ENGINE, "model": "llama-32m", "load_format": "dummy"}, model="", port=1, scratch="")
    assert own[-1] == "float32"


@pytest.mark.parametrize(
    ("preset", "state", "caching", "launches"),
    [
        ("transformers", "cold", True, 4),  # cannot empty its cache: a server for each load
        ("transformers", "primed", True, 4),
        ("transformers", "steady", True, 2),
        ("vllm", "cold", True, 2),  # empties it
        ("vllm", "cold", False, 2),
    ],
)
def test_a_cache_that_cannot_be_emptied_costs_a_server_for_each_load(workload, preset, state, caching, launches):
    load = {"concurrency": [1, 2], "cache_state": state, "repeats": 2}
    made = workload(engine=ENGINE | {"enable_prefix_caching": caching}, load=load)
    design, blocks = plan(chosen(made, target=preset, target_python=sys.executable))
    assert len(blocks) == launches and len({b.block_id for b in blocks}) == launches
    assert sorted(c.cell_id for b in blocks for c in b.cells) == sorted(2 * [c.cell_id for c in design.cells])


WORKLOAD = str(ROOT / "workloads" / "uniform.yaml")
VALUES = {
    "preset": "vllm", "exact": True, "target_python": sys.executable, "target_args": "-x", "model": "m",
    "vocab_size": 5, "max_model_len": 7, "tokenizer": ROOT, "api_key_env": "KEY_OF_TEST", "tls_ca_file": Path("ca.pem"),
    "no_tls_verify": True, "port": 34567, "start_timeout": 9.0, "vary": ("page_size=16,32",),
}  # fmt: skip
KINDS = {
    BUILTIN: {},
    "plain": {"serve_cmd": sys.executable},
    RUNNING: {"target": "https://127.0.0.1:9"},
    PRESET: {"target": "vllm"},
    TEMPLATE: served_by(""),
}


def test_every_option_of_a_target_says_what_it_goes_with() -> None:
    names = {parameter.name for parameter in parameters(TargetOptions)}
    assert names - {"target", "serve_cmd"} <= KINDS_OF.keys() == VALUES.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_an_option_is_taken_where_it_applies_and_refused_elsewhere(monkeypatch, kind) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "sk-secret")
    monkeypatch.setattr("kvbench.targets.choose.program_of", lambda preset, given: sys.executable)
    monkeypatch.setattr("kvbench.targets.base.tls_context", lambda verify, file: False)
    overrides = ("engine.device=cpu", "engine.page_size=32", "sweep={}")
    workload = load_workload(WORKLOAD, profile="cpu", overrides=overrides)
    for name, kinds in KINDS_OF.items():
        options = TargetOptions(**KINDS[kind] | {name: VALUES[name]})
        if (BUILTIN if kind == "plain" else kind) in kinds:
            choose(workload, options).close()
            continue
        with pytest.raises(UsageError, match=rf"^--{name.replace('_', '-')} goes with ") as refused:
            choose(workload, options)
        assert all(place in str(refused.value) for place in kinds)


PLAIN_URL = "--target http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"{PLAIN_URL} --no-tls-verify", ["--no-tls-verify", "https://", "http://127.0.0.1:9"]),
        (f"{PLAIN_URL} --tls-ca-file {__file__}", ["--tls-ca-file", "https://"]),
        (f"{PLAIN_URL} --tls-ca-file {__file__} --no-tls-verify", ["--tls-ca-file and --no-tls-verify"]),
        ("--model other", ["--model", "-o model.config=VALUE"]),
        ("-o engine.layout=[paged]", ["engine.layout", "['paged']"]),
        (f"--target transformers --target-python {sys.executable} -o engine.layout=[paged]", ["layout", "['paged']"]),
    ],
)
def test_a_dry_run_refuses_before_anything_is_planned(capsys, words, named) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", WORKLOAD, "--dry-run", *words.split()])
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert all(word in err for word in named), err
