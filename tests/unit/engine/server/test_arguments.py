"""The command line says the same as EngineConfig, both ways."""

from __future__ import annotations

import dataclasses

import pytest

from engine.config import EngineConfig
from engine.server.arguments import HELP, build_parser, command_line, options_of


def test_every_setting_has_a_flag_and_a_help_text() -> None:
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(HELP) == names
    text = build_parser().format_help()
    for name in names:
        assert f"--{name.replace('_', '-')}" in text


def test_no_flags_give_the_defaults() -> None:
    config, options = options_of(build_parser().parse_args([]))
    assert config == EngineConfig()
    assert (options.host, options.port, options.step_log) == ("127.0.0.1", 8000, None)


def test_flags_and_settings_translate_both_ways() -> None:
    settings = {
        "model": "llama-32m",
        "layout": "paged",
        "page_size": 64,
        "kv_budget": "48MiB",
        "enable_prefix_caching": True,
        "enable_chunked_prefill": False,
        "max_model_len": 256,
        "preemption_mode": "swap",
        "swap_space": "1.5MiB",
        "scheduling_policy": "priority",
        "max_num_partial_prefills": 1,
        "max_num_waiting": 12,
        "kv_cache_dtype": "int8_per_token_head",
        "reservation": "max",
        "num_threads": None,
    }
    config, _ = options_of(build_parser().parse_args(command_line(settings)))
    assert config == EngineConfig.from_mapping(settings)


@pytest.mark.parametrize(
    "flags", [["--page-size", "0"], ["--port", "70000"], ["--kv-budget", "much"], ["--swap-space", "much"]]
)
def test_impossible_values_are_refused_with_a_sentence(flags: list[str]) -> None:
    with pytest.raises(ValueError, match=flags[1]):
        options_of(build_parser().parse_args(flags))
