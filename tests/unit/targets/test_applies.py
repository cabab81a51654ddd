"""An option that would do nothing for the target at hand is refused, whatever the target."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvbench.cli.main import main
from kvbench.cli.target_options import _OPTIONS
from kvbench.common.errors import UsageError
from kvbench.targets.applies import APPLIES, BUILTIN, PRESET, RUNNING, TEMPLATE
from kvbench.targets.choose import choose
from kvbench.workload.file import load_workload
from tests.support.loads import ROOT

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
    assert {parameter.name for parameter in made.params} - {"target", "serve_cmd"} <= APPLIES.keys() == VALUES.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", APPLIES)
def test_an_option_is_taken_where_it_applies_and_refused_elsewhere(monkeypatch, tmp_path, kind, name) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "sk-secret")
    monkeypatch.setattr("kvbench.targets.choose.program_of", lambda preset, given: sys.executable)
    monkeypatch.setattr("kvbench.targets.access.tls_context", lambda verify, file: False)
    options = dict.fromkeys(APPLIES) | {"target": None, "serve_cmd": None, "port": 0} | KINDS[kind]
    options[name] = VALUES[name]
    workload = load_workload(
        WORKLOAD, profile="cpu", overrides=("engine.device=cpu", "engine.page_size=32", "sweep={}")
    )
    if (BUILTIN if kind == "plain" else kind) in APPLIES[name]:
        choose(workload, options, {}).close()
        return
    with pytest.raises(UsageError, match=rf"^--{name.replace('_', '-')} goes with .*: leave it out") as refused:
        choose(workload, options, {})
    assert all(place in str(refused.value) for place in APPLIES[name])


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
