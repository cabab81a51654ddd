"""What a manifest says a server was launched with: the command, without this machine's folders and this run's port."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.targets.launch_plan import CommandTemplate
from kvbench.targets.launched import LaunchedTarget, Launcher, _shown
from kvbench.targets.presets import GENERIC, PRESETS


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
