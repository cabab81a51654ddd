"""``--serve-cmd`` with sweep variables, and the command that a manifest shows."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.config import EngineConfig
from kvbench.common.errors import UsageError
from kvbench.targets.launch_plan import CommandTemplate, Launcher, is_template
from kvbench.targets.launched import LaunchedTarget, _shown
from kvbench.targets.presets import GENERIC, PRESETS

KNOWN = [f.name for f in dataclasses.fields(EngineConfig)]
ME = sys.executable


def parse(text):
    return CommandTemplate.parse(text, KNOWN)


def command(text, budget=None, **settings):
    return list(parse(text).command(settings, model="/a model", port=81, kv_budget_bytes=budget))


def test_placeholders_become_values_and_a_value_stays_one_word():
    line = command(f"{ME} serve {{model}} --block-size {{page_size}} --url=http://{{host}}:{{port}}/x", page_size=32)
    assert line == [ME, "serve", "/a model", "--block-size", "32", "--url=http://127.0.0.1:81/x"]


def test_settings_that_are_left_out_have_their_default_and_bytes_are_bytes():
    assert command(f"{ME} {{port}} {{page_size}} {{kv_cache_dtype}}")[2:] == ["16", "auto"]
    assert command(f"{ME} {{port}} {{kv_budget}}", budget=101711872, kv_budget="97MiB")[2:] == ["101711872"]


def test_true_and_false_can_be_words_of_their_own():
    text = f"{ME} {{port}} {{enable_prefix_caching:--caching|--no-caching}} {{cuda_graphs:|-e}}"
    assert command(text, enable_prefix_caching=True, cuda_graphs=True)[2:] == ["--caching"]
    assert command(text, enable_prefix_caching=False, cuda_graphs=False)[2:] == ["--no-caching", "-e"]
    assert command(f"{ME} {{port}} --caching {{enable_prefix_caching}}", enable_prefix_caching=True)[3:] == ["true"]


def test_braces_can_be_meant():
    assert command(f"{ME} {{port}} --json '{{{{\"a\": 1}}}}'")[3:] == ['{"a": 1}']


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("serve {pagesize} {port}", "{pagesize}"),
        ("serve {} {port}", "{}"),
        (f"{ME} {{page_size}}", "{port}"),
        ("/no/such/program {port}", "/no/such/program"),
        (f"{ME} {{port", "not a command line"),
        (f"{ME} '{{port}}", "not a command line"),
        (f"{ME} {{port}} {{page_size:{{max_num_seqs}}|}}", "{page_size}"),
        (f"{ME} {{port}} {{page_size:04d}}", "04d"),
        (f"{ME} {{port}} {{page_size!r}}", "{page_size}"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(text, named):
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert named in str(refused.value)


def test_what_is_swept_must_be_in_the_command():
    template = parse(f"{ME} {{port}} {{page_size}}")
    template.require(["page_size"])
    with pytest.raises(UsageError, match=r"kv_cache_dtype, layout.*{kv_cache_dtype} {layout}"):
        template.require(["page_size", "kv_cache_dtype", "layout"])


def test_what_the_command_does_not_say_is_the_servers_own():
    settings = {"page_size": 16, "layout": "paged", "seed": 1, "device": "cpu", "dtype": "float32", "model": "m"}
    assert parse(f"{ME} {{port}} {{page_size}}").not_passed_on(settings) == ["device", "dtype", "model"]
    assert parse(f"{ME} {{port}} {{page_size}} {{model}} {{dtype}} {{device}}").not_passed_on(settings) == []


def test_a_placeholder_that_nobody_sets_is_refused():
    with pytest.raises(UsageError, match=r"{max_model_len}"):
        command(f"{ME} {{port}} {{max_model_len}}")


def test_a_command_without_placeholders_takes_the_built_in_servers_flags():
    assert not is_template(f"{ME} -m engine.server")
    assert not is_template("it's broken")
    assert is_template("serve {model}") and is_template("serve {no_such_thing}")


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("/home/u/models/x", "x"),
        ("--model=/home/u/x/", "--model=x"),
        ("--lora-modules=a=/home/u/a,b=/home/u/b", "--lora-modules=a=a,b=b"),
        ("/opt/lib/a.so:/opt/lib/b.so", "a.so:b.so"),
        ('{"path": "/home/u/x", "n": 1}', '{"path": "x", "n": 1}'),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("--otlp=https://h.example/v1/traces", "--otlp=https://h.example/v1/traces"),
        ("org/model", "org/model"),
        ("./here/x", "./here/x"),
        ("/", "/"),
        ("3/4", "3/4"),
    ],
)
def test_absolute_paths_lose_their_folders_and_urls_stay(word: str, shown: str) -> None:
    assert _shown(word) == shown


def shown_command(launcher: Launcher, settings: dict[str, object]) -> list[str]:
    target = LaunchedTarget(launcher, SimpleNamespace(scratch=Path("/tmp/kvbench-model-x")), port=8000)
    target._settings = settings
    return target._shown_command()


def test_a_command_has_names_for_port_model_and_scratch_and_its_own_numbers() -> None:
    text = f"{sys.executable} serve --model={{model}} --port={{port}} --max-len {{max_model_len}} --to http://h:8000/x"
    template = CommandTemplate.parse(text, ["max_model_len"])
    launcher = Launcher(GENERIC, "", lambda settings: {}, ("--proxy", "http://127.0.0.1:8000"), template)
    assert shown_command(launcher, {"max_model_len": 8000}) == [
        Path(sys.executable).name, "serve", "--model=MODEL", "--port=PORT", "--max-len", "8000", "--to",
        "http://h:8000/x", "--proxy", "http://127.0.0.1:8000",
    ]  # fmt: skip
    llama = shown_command(Launcher(PRESETS["llamacpp"], "/opt/llama-server", lambda settings: {}), {})
    assert llama[:3] == ["llama-server", "--model", "MODEL"] and llama[llama.index("--port") + 1] == "PORT"
    assert llama[llama.index("--slot-save-path") + 1] == "SCRATCH"
