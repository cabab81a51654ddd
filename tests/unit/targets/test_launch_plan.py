"""``--serve-cmd`` with sweep variables, and the command that a manifest shows."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.common.errors import UsageError
from kvbench.runs.results import Capacity
from kvbench.targets.launch_plan import CommandTemplate, Launcher, is_template
from kvbench.targets.launched import LaunchedTarget, _shown
from kvbench.targets.presets import GENERIC, PRESETS

ME = sys.executable


def parse(words):
    return CommandTemplate.parse(f"{ME} {words}")


@pytest.mark.parametrize(
    ("words", "settings", "expected"),
    [
        ("serve {model} --block-size {page_size} --url=http://{host}:{port}/x", {"page_size": 32},
         ["serve", "/a model", "--block-size", "32", "--url=http://127.0.0.1:81/x"]),  # a value stays one word
        ("{port} {page_size} {kv_cache_dtype}", {}, ["81", "16", "auto"]),  # the defaults
        ("{port} {kv_budget}", {"kv_budget": "97MiB"}, ["81", "101711872"]),
        ("{port} {cuda_graphs:|-e} {async_scheduling:-a|-b}", {"cuda_graphs": True, "async_scheduling": True}, "81 -a"),
        ("{port} {cuda_graphs:|-e} {async_scheduling:-a|-b}", {"cuda_graphs": 0, "async_scheduling": 0}, "81 -e -b"),
        ("{port} --caching {enable_prefix_caching}", {"enable_prefix_caching": True}, "81 --caching true"),
        ("{port} --json '{{\"a\": 1}}'", {}, ["81", "--json", '{"a": 1}']),
    ],
)  # fmt: skip
def test_placeholders_become_values(words, settings, expected):
    line = parse(words).command(settings, model="/a model", port=81, kv_budget_bytes=101711872)
    assert list(line) == [ME, *(expected.split() if isinstance(expected, str) else expected)]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("{pagesize} {port}", "{pagesize}"),
        ("{} {port}", "{}"),
        ("{page_size}", "{port}"),
        ("{port", "not a command line"),
        ("'{port}", "not a command line"),
        ("{port} {page_size:{max_num_seqs}|}", "{page_size}"),
        ("{port} {page_size:04d}", "04d"),
        ("{port} {page_size!r}", "{page_size}"),
        ("{port} {max_model_len}", "{max_model_len}"),  # nobody sets it
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(words, named):
    with pytest.raises(UsageError) as refused:
        parse(words).command({}, model="m", port=1, kv_budget_bytes=None)
    assert named in str(refused.value)


def test_what_the_command_must_have_and_what_it_leaves_to_the_server():
    template = parse("{port} {page_size}")
    template.require(["page_size"])
    with pytest.raises(UsageError, match=r"kv_cache_dtype, layout.*{kv_cache_dtype} {layout}"):
        template.require(["page_size", "kv_cache_dtype", "layout"])
    settings = {"page_size": 16, "layout": "paged", "seed": 1, "device": "cpu", "dtype": "float32", "model": "m"}
    assert template.not_passed_on(settings) == ["device", "dtype", "model"]
    assert parse("{port} {page_size} {model} {dtype} {device}").not_passed_on(settings) == []


def test_a_command_without_placeholders_takes_the_built_in_servers_flags():
    assert not is_template(f"{ME} -m kvbench_engine.server")
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
        *((word, word) for word in ("http://127.0.0.1:8000", "--otlp=https://h.example/v1/traces", "org/model")),
        *((word, word) for word in ("./here/x", "/", "3/4")),
    ],
)
def test_absolute_paths_lose_their_folders_and_urls_stay(word: str, shown: str) -> None:
    assert _shown(word) == shown


def shown_command(launcher: Launcher, settings: dict[str, object]) -> list[str]:
    target = LaunchedTarget(launcher, SimpleNamespace(scratch=Path("/tmp/kvbench-model-x")), port=8000)
    target._settings = settings
    return target._shown_command()


def test_a_command_has_names_for_port_model_and_scratch_and_its_own_numbers() -> None:
    template = parse("serve --model={model} --port={port} --max-len {max_model_len} --to http://h:8000/x")
    launcher = Launcher(GENERIC, "", lambda settings: Capacity(), ("--proxy", "http://127.0.0.1:8000"), template)
    assert shown_command(launcher, {"max_model_len": 8000}) == [
        Path(ME).name, "serve", "--model=MODEL", "--port=PORT", "--max-len", "8000", "--to", "http://h:8000/x",
        "--proxy", "http://127.0.0.1:8000",
    ]  # fmt: skip
    llama = shown_command(Launcher(PRESETS["llamacpp"], "/opt/llama-server", lambda settings: Capacity()), {})
    assert llama[:3] == ["llama-server", "--model", "MODEL"] and llama[llama.index("--port") + 1] == "PORT"
    assert llama[llama.index("--slot-save-path") + 1] == "SCRATCH"
