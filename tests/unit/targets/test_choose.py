"""From the options to a target, or to a sentence."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import engine.tokenizer
from kvbench.cli.main import main
from kvbench.cli.target_options import _OPTIONS
from kvbench.common.errors import UsageError
from kvbench.common.machine import environment
from kvbench.runs.resume import reopen
from kvbench.sweep.plan import SweepOptions
from kvbench.targets.builtin import BuiltinTarget
from kvbench.targets.choose import BUILTIN, KINDS_OF, PRESET, RUNNING, TEMPLATE, choose, require_url
from kvbench.targets.launched import LaunchedTarget
from kvbench.targets.running import OpenAITarget
from kvbench.workload.file import load_workload
from tests.support.loads import ROOT
from tests.support.sweep_parts import TINY

NOTHING = dict.fromkeys(
    ("target", "serve_cmd", "preset", "target_args", "target_python", "exact", "model", "vocab_size", "max_model_len",
     "tokenizer", "api_key_env", "tls_ca_file", "no_tls_verify")
) | {"port": 0, "start_timeout": None}  # fmt: skip
ENGINE = {"device": "cpu", "page_size": 32, "kv_budget": "65MiB", "max_model_len": 256, "max_num_seqs": 8}


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


def chosen(workload, stored=None, **options):
    return choose(workload, NOTHING | options, stored or {})


URL = {"target": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"serve_cmd": f"{sys.executable} {{prt}}"}, "{prt}"),
        ({"serve_cmd": "/no/such -m server"}, "/no/such"),
        ({"target": "vllm", "target_python": "/no/python"}, "/no/python"),
        (URL | {"exact": True}, "--exact"),
        (URL | {"target_args": "-x"}, "--target-args"),
        (URL | {"preset": "vlm"}, "'vlm'"),
        (URL | {"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"target": "vllm", "serve_cmd": "x"}, "--target and --serve-cmd"),
        ({"target": "vllm", "preset": "tgi"}, "--preset"),
        ({"preset": "tgi"}, "--preset"),
        ({"target": "vlm"}, "'vlm'"),
        ({"target": "http://[::1"}, "'http://[::1'"),
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
        ("tgi", SCRIPT + "exit 2", r"--version ended with exit code 2"),
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


def test_this_python_is_asked_for_the_module_itself(workload, monkeypatch):
    chosen(workload(), target="vllm", target_python=sys.executable)
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(UsageError, match="no module 'sglang'"):
        chosen(workload(), target="sglang", target_python=sys.executable)


def test_a_port_that_is_taken_is_refused_before_anything_is_launched(workload):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options in ({}, {"target": "vllm", "target_python": sys.executable}):
            with pytest.raises(UsageError, match=f"port {port} "):
                chosen(workload(), port=port, **options)


def test_each_kind_of_target(workload):
    assert isinstance(chosen(workload()).new_target(), BuiltinTarget)
    plain = chosen(workload(sweep={"page_size": [8]}), serve_cmd=f"{sys.executable} -m other.server")
    assert isinstance(plain.new_target(), BuiltinTarget) and plain.manifest["backend"] == "custom"
    running = chosen(workload(), target="http://10.0.0.7:8000/v1", preset="sglang")
    assert isinstance(running.new_target(), OpenAITarget) and running.probes
    assert running.new_target().preset.name == "sglang" and running.manifest["backend"] == "sglang"
    assert running.workload.engine == {"target": "http://10.0.0.7:8000/v1"} and not running.manifest["shared_machine"]
    launched = chosen(workload(), target="vllm", target_python=sys.executable, target_args="--enforce-eager -x 'a b'")
    assert isinstance(launched.new_target(), LaunchedTarget)
    assert launched.new_target().launcher.extra == ("--enforce-eager", "-x", "a b")
    assert launched.new_target().start_timeout_s == 900 and chosen(workload()).new_target().start_timeout_s == 180
    assert chosen(workload(), start_timeout=5.0).new_target().start_timeout_s == 5
    kept = {"target": "vllm", "serve_cmd": None, "target_python": sys.executable, "backend": "vllm"}
    assert kept.items() <= dict(launched.manifest).items()
    templated = chosen(workload(), serve_cmd=f"{sys.executable} {{port}}", preset="transformers")
    assert templated.new_target().dialect.done_marker is False and templated.manifest["backend"] == "transformers"


def test_a_run_that_goes_on_has_the_target_it_was_started_with(workload):
    stored = {"target": "vllm", "target_python": sys.executable, "exact": True, "target_args": "-q"}
    with pytest.raises(UsageError, match="the baseline cannot be run"):  # --exact again
        chosen(workload(engine=ENGINE | {"page_size": 16}), stored=stored)
    choice = chosen(workload(), stored=stored)
    assert choice.manifest["exact"] and choice.manifest["preset"] is None  # what was not given is put down too
    assert choice.new_target().launcher.extra == ("-q",)


def test_a_run_on_a_running_server_goes_on_with_what_was_told_of_it(workload, tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    (tmp_path / "tokenizer.json").write_text(Path(engine.tokenizer.__file__).with_name("bpe8k").joinpath(
        "tokenizer.json").read_text())  # fmt: skip
    told = {"vocab_size": 512, "max_model_len": 256, "model": "m", "api_key_env": "A_KEY", "tokenizer": tmp_path}
    first = chosen(workload(), target="http://127.0.0.1:9", preset="transformers", **told)
    stored = json.loads(json.dumps(first.manifest))
    assert "secret" not in json.dumps(stored)
    again = chosen(workload(), stored=stored).new_target()
    assert again._given == ("m", 512, 256) and again.http.access.api_key_env == "A_KEY"
    assert again.preset.name == "transformers" and again._text_of_ids([5, 6])


def test_the_kv_budget_reaches_servers_in_their_own_units(workload):
    base = workload()
    vllm = chosen(base, target="vllm", target_python=sys.executable).new_target().launcher
    line = vllm.command(base.engine, model="/m", port=1, scratch="/s")
    bytes_given = int(line[line.index("--kv-cache-memory-bytes") + 1])
    sglang = chosen(base, target="sglang", target_python=sys.executable).new_target().launcher
    line = sglang.command(base.engine, model="/m", port=1, scratch="/s")
    tokens = int(line[line.index("--max-total-tokens") + 1])
    # llama-32m: 8 layers x 4 KV heads x (64 + 64) x 4 bytes = 16,384 bytes a token, and a page table
    assert 0.98 * (65 << 20) / 16384 <= tokens <= (65 << 20) / 16384
    assert bytes_given == tokens * 16384


def plan(choice, *only):
    options = SweepOptions(
        only=only, check=choice.check, refuses=choice.refuses, require=choice.require, fresh=choice.fresh,
        notes=choice.notes,
    )  # fmt: skip
    return options.plan(choice.workload)


def test_what_is_swept_and_run_must_be_in_the_command(workload):
    made, line = workload(sweep={"layout": ["contiguous"], "page_size": [8, 16]}), f"{sys.executable} {{port}}"
    with pytest.raises(UsageError, match=r"layout, page_size.*--only"):
        chosen(made, serve_cmd=line)
    for only, setting in (("launched-p8-*", "page_size"), ("contiguous-*", "layout"), ("*", "layout, page_size")):
        with pytest.raises(UsageError, match=f"the sweep varies {setting}, and --serve-cmd"):
            plan(chosen(made, serve_cmd=line, only=(only,)), only)
    left, _ = plan(chosen(made, serve_cmd=line, only=("launched-c*",)), "launched-c*")
    assert [c.is_baseline for c in left.configurations] == [True]
    assert plan(chosen(workload(), serve_cmd=line))[0].cells == left.cells


def test_a_command_gives_its_server_the_names_of_what_it_passes_on_only(workload):
    """As a mock server that was told nothing must not be called paged."""

    def names(command, **more):
        found = chosen(workload(**more), serve_cmd=f"{sys.executable} {{port}} {command}")
        return [(c.config_id, c.label) for c in plan(found)[0].configurations], found.workload.engine

    shown, engine = names("--itl-ms 5")
    assert shown == [("launched", "launched server")]
    assert not {"layout", "page_size", "kv_budget", "max_num_seqs"} & engine.keys()
    assert engine["max_model_len"] == 256  # the prompts keep to it
    sizes = [("launched-p32", "launched server, page 32"), ("launched-p64", "launched server, page 64")]
    assert names("{page_size}", sweep={"page_size": [64]})[0] == sizes
    assert names("{layout} {page_size}")[0] == [("paged-p32", "paged, page 32")]
    caching = names("{enable_prefix_caching:on|off}", sweep={"enable_prefix_caching": [True]})[0]
    assert [label for _, label in caching] == ["launched server", "launched server, prefix caching"]
    vllm = chosen(workload(), serve_cmd=f"{sys.executable} {{port}} {{page_size}}", preset="vllm")
    assert plan(vllm)[0].configurations[0].label == "paged, page 32"  # it always is


def test_each_preset_has_its_guess_of_a_launch(workload):
    slow = chosen(workload(), **VLLM_HERE)
    assert (
        slow.start_guess_s >= 90 and chosen(workload()).start_guess_s is None
    )  # a launch of vLLM on a CPU took that long


def test_what_the_target_cannot_do_is_skipped_and_the_rest_runs(workload):
    sweep = {"page_size": [8, 64], "layout": ["contiguous"], "enable_prefix_caching": [True]}
    design, blocks = plan(chosen(workload(sweep=sweep), target="vllm", target_python=sys.executable))
    assert {c.config_id for c in design.configurations} == {"paged-p32", "paged-p64", "paged-p32-prefix"}
    assert len(design.notes) == 2 and all("skipped" in note and "vLLM cannot have" in note for note in design.notes)
    assert {b.configuration.config_id for b in blocks} == {c.config_id for c in design.configurations}


VLLM_HERE = {"target": "vllm", "target_python": sys.executable}


def test_a_baseline_that_the_target_cannot_have_is_the_nearest_one_said_aloud_or_refused(workload):
    base = workload(engine=ENGINE | {"page_size": 16})
    near = chosen(base, **VLLM_HERE)
    assert near.workload.engine == base.engine | {"page_size": 32}
    (note,) = near.notes
    assert "THE BASELINE IS NOT THE WORKLOAD'S: page_size is 32 instead of 16 (vLLM cannot have page_size 16" in note
    with pytest.raises(UsageError, match=r"the baseline cannot be run: vLLM cannot have page_size 16.*--exact out"):
        chosen(base, **VLLM_HERE, exact=True)
    with pytest.raises(UsageError, match=r"nor anything near it: .*TGI cannot have device cpu"):
        chosen(base, target="tgi", target_python=sys.executable)


def test_a_command_of_a_known_kind_is_asked_what_it_cannot_do(workload):
    command = f"{sys.executable} {{port}} {{page_size}} --kv {{kv_budget}} --dtype {{dtype}} {{device}} {{model}}"
    asked = {"serve_cmd": command, "preset": "vllm"}
    near = chosen(workload(engine=ENGINE | {"page_size": 16}, sweep={"page_size": [8, 64]}), **asked)
    assert near.workload.engine["page_size"] == 32
    design, _ = plan(near)
    assert {c.config_id for c in design.configurations} == {"paged-p32", "paged-p64"}
    assert any("skipped paged-p8: vLLM cannot have page_size 8" in note for note in design.notes)
    with pytest.raises(UsageError, match="takes multiples of 32"):
        chosen(workload(engine=ENGINE | {"page_size": 16}), **asked, exact=True)
    with pytest.raises(UsageError, match=r"--serve-cmd has {page_size}, and: TGI cannot have page_size 32.*Take"):
        chosen(workload(), serve_cmd=f"{sys.executable} {{port}} {{page_size}}", preset="tgi")
    unnamed = chosen(workload(engine=ENGINE | {"page_size": 16}), serve_cmd=command)  # nobody knows what it can
    assert unnamed.workload.engine["page_size"] == 16


def test_what_the_server_was_not_told_is_not_put_down(workload):
    """A budget, dtype or device that no word of the command gives is the server's own."""
    given = chosen(workload(), **VLLM_HERE)
    known = given.check(given.workload.engine)
    assert known["kv_budget_bytes"] == 65 << 20 and known["bytes_per_token"] == 16384
    assert known["capacity_tokens"] <= (65 << 20) // 16384  # what its flags say
    left = chosen(workload(engine={k: v for k, v in ENGINE.items() if k != "kv_budget"}), **VLLM_HERE)
    assert set(left.check(left.workload.engine)) == {"max_model_len", "vocab_size"}
    assert "no kv_budget: how much KV there is, is left to vLLM" in left.notes[0]
    silent = chosen(workload(), serve_cmd=f"{sys.executable} {{port}} {{page_size}} {{model}}")
    assert set(silent.check(silent.workload.engine)) == {"max_model_len", "vocab_size"}
    assert "does not pass on device, kv_budget, max_model_len, max_num_seqs" in silent.notes[0]
    launcher = silent.new_target().launcher
    assert launcher.passed_on(silent.workload.engine) == {"page_size": 32, "model": silent.workload.engine["model"]}
    told = chosen(workload(), serve_cmd=f"{sys.executable} {{port}} {{kv_budget}} {{dtype}}").new_target().launcher
    assert told.check(workload().engine)["kv_budget_bytes"] == 65 << 20
    assert told.passed_on({**workload().engine, "dtype": "auto"})["dtype"] == "float32"  # as the built-in engine's
    assert told.command({**ENGINE, "model": "llama-32m", "load_format": "dummy"}, model="", port=1, scratch="")[-1] == (
        "float32"
    )


@pytest.mark.parametrize(
    ("url", "shared"),
    [
        ("http://[::1]:8000", True),
        ("https://localhost", True),
        ("http://0.0.0.0:80", True),
        ("http://10.255.255.1:80", False),
    ],
)
def test_whether_the_server_shares_this_machine(workload, url, shared):
    assert chosen(workload(), target=url).manifest["shared_machine"] is shared


def test_other_facts_about_a_running_server_are_another_server(workload, tmp_path):
    """As ``sweep --resume RUN --model OTHER`` would mix two models under one name."""
    told = {"target": "https://127.0.0.1:9", "model": "m", "vocab_size": 512, "max_model_len": 256}
    first = chosen(workload(), **told).manifest
    begun = SimpleNamespace(path=tmp_path, manifest=lambda: {"workload": {}, **environment(), **first})
    same = SimpleNamespace(resolved={})

    def go_on(**options):
        served = chosen(workload(), stored=json.loads(json.dumps(first)), **options).manifest
        return reopen(begun, same, served, force=False, something_left=True)

    go_on()
    go_on(no_tls_verify=True)  # how it is reached may change
    for other, words in (
        ({"model": "n"}, "model (m then, n now)"),
        ({"vocab_size": 9}, "vocab_size (512 then, 9 now)"),
    ):
        with pytest.raises(UsageError, match=re.escape(words)):
            go_on(**other)


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


def test_a_cache_that_the_server_was_told_not_to_have_is_empty(workload):
    launcher = chosen(workload(), target="transformers", target_python=sys.executable).new_target().launcher
    tgi = dataclasses.replace(launcher, preset=SimpleNamespace(reset=None, settings={"enable_prefix_caching": 1}))
    assert not tgi.needs_fresh_server({"enable_prefix_caching": False})
    assert tgi.needs_fresh_server({"enable_prefix_caching": True}) and tgi.needs_fresh_server({})
    unheard = dataclasses.replace(launcher, preset=SimpleNamespace(reset=None, settings={}))
    assert unheard.needs_fresh_server({"enable_prefix_caching": False})  # nobody told it


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://[::1", "http://h:99999", "nowhere"])
def test_urls_that_name_no_server(url):
    with pytest.raises(UsageError, match="is not a URL of a server"):
        require_url("--url", url)


WORKLOAD = str(ROOT / "workloads" / "uniform.yaml")
VALUES = {
    "preset": "vllm", "exact": True, "target_python": sys.executable, "target_args": "-x", "model": "m",
    "vocab_size": 5, "max_model_len": 7, "tokenizer": ROOT, "api_key_env": "KEY_OF_TEST", "tls_ca_file": Path("ca.pem"),
    "no_tls_verify": True, "port": 34567, "start_timeout": 9.0,
}  # fmt: skip
KINDS = {
    BUILTIN: {},
    "plain": {"serve_cmd": sys.executable},
    RUNNING: {"target": "https://127.0.0.1:9"},
    PRESET: {"target": "vllm"},
    TEMPLATE: {"serve_cmd": f"{sys.executable} {{port}}"},
}


def refused(capsys, *words: str) -> str:
    """What a dry run says that ends with exit code 2 and prints no plan."""
    with pytest.raises(SystemExit) as ended:
        main(["sweep", WORKLOAD, "--dry-run", *words])
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    return " ".join(err.split())


def test_every_option_of_a_target_has_its_places() -> None:
    import click

    made = click.Command("sweep", callback=lambda: None)
    for option in _OPTIONS:
        option(made)
    assert {parameter.name for parameter in made.params} - {"target", "serve_cmd"} <= KINDS_OF.keys() == VALUES.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KINDS_OF)
def test_an_option_is_taken_where_it_applies_and_refused_elsewhere(monkeypatch, tmp_path, kind, name) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "sk-secret")
    monkeypatch.setattr("kvbench.targets.choose.program_of", lambda preset, given: sys.executable)
    monkeypatch.setattr("kvbench.targets.http.tls_context", lambda verify, file: False)
    options = dict.fromkeys(KINDS_OF) | {"target": None, "serve_cmd": None, "port": 0} | KINDS[kind]
    options[name] = VALUES[name]
    workload = load_workload(
        WORKLOAD, profile="cpu", overrides=("engine.device=cpu", "engine.page_size=32", "sweep={}")
    )
    if (BUILTIN if kind == "plain" else kind) in KINDS_OF[name]:
        choose(workload, options, {}).close()
        return
    with pytest.raises(UsageError, match=rf"^--{name.replace('_', '-')} goes with .*: leave it out") as refused:
        choose(workload, options, {})
    assert all(place in str(refused.value) for place in KINDS_OF[name])


def test_options_of_tls_go_with_https_and_one_at_a_time(tmp_path, capsys) -> None:
    pem = tmp_path / "ca.pem"
    pem.write_text("")
    for words, said in (
        (["--no-tls-verify"], "--no-tls-verify goes with https://, and --target is http://127.0.0.1:9"),
        (["--tls-ca-file", str(pem)], "--tls-ca-file goes with https://"),
        (["--tls-ca-file", str(pem), "--no-tls-verify"], "--tls-ca-file and --no-tls-verify exclude each other"),
    ):
        assert said in refused(capsys, "--target", "http://127.0.0.1:9", *words)


def test_a_user_is_told_before_anything_is_planned(capsys) -> None:
    err = refused(capsys, "--model", "other")
    assert "--model goes with a server that runs already" in err and "-o model.config=VALUE" in err


@pytest.mark.parametrize("target", [[], ["--target", "transformers", "--target-python", sys.executable]])
def test_an_engine_setting_is_one_value(capsys, target) -> None:
    said = refused(capsys, *target, "-o", "engine.layout=[paged]")
    assert "engine.layout is ['paged']; give one number, text, true or false" in said
