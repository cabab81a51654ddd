"""The command line says the same as EngineConfig, both ways."""

from __future__ import annotations

import dataclasses

import pytest

from kvbench_engine.config import EngineConfig
from kvbench_engine.server.arguments import HELP, build_parser, command_line, options_of


def test_every_setting_has_a_flag_and_a_help_text() -> None:
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(HELP) == names
    text = build_parser().format_help()
    for name in names:
        assert f"--{name.replace('_', '-')}" in text


def test_flags_and_settings_translate_both_ways() -> None:
    settings = {
        "model": "llama-32m", "page_size": 64, "kv_budget": "48MiB", "enable_prefix_caching": True,
        "enable_chunked_prefill": False, "max_model_len": 256, "preemption_mode": "swap", "swap_space": "1.5MiB",
        "scheduling_policy": "priority", "kv_cache_dtype": "int8_per_token_head", "num_threads": None,
    }  # fmt: skip
    config, _ = options_of(build_parser().parse_args(command_line(settings)))
    assert config == EngineConfig.from_mapping(settings)
    config, options = options_of(build_parser().parse_args([]))
    assert config == EngineConfig()
    assert (options.host, options.port, options.step_log) == ("127.0.0.1", 8000, None)
    switched, _ = options_of(build_parser().parse_args(["--fused-layers", "--no-enable-chunked-prefill"]))
    assert (switched.fused_layers, switched.enable_chunked_prefill) == (True, False)
    config, _ = options_of(build_parser().parse_args(["--kv-cache-dtype", "fp8"]))
    assert config.kv_cache_dtype == EngineConfig.from_mapping({"kv_cache_dtype": "fp8"}).kv_cache_dtype == "fp8_e4m3"


@pytest.mark.parametrize(
    "flags", [["--page-size", "0"], ["--port", "70000"], ["--kv-budget", "much"], ["--swap-space", "much"]]
)
def test_impossible_values_are_refused_with_a_sentence(flags: list[str]) -> None:
    with pytest.raises(ValueError, match=flags[1]):
        options_of(build_parser().parse_args(flags))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--fused-layers", "true"], ["--fused-layers", "--no-fused-layers", "'true'"]),
        (["--no-fused-layers=false", "--port", "0"], ["--fused-layers", "--no-fused-layers", "'false'"]),
        (["--layout", "pagde"], ["--layout", "'pagde'", "paged"]),
        (["--port"], ["--port"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["stray"], ["stray"]),
    ],
)
def test_an_option_that_cannot_be_is_one_sentence(flags: list[str], says: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser("kvbench serve").parse_args(flags)
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert all(word in said for word in says), said
