"""``--serve-cmd`` with sweep variables."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from engine.config import EngineConfig
from kvbench.common.errors import UsageError
from kvbench.targets.launch_plan import CommandTemplate, is_template

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
    ("text", "sentence"),
    [
        (
            "serve {pagesize} {port}",
            r"placeholder {pagesize}, which is no setting: the known ones are model, port, .*page",
        ),
        ("serve {} {port}", r"placeholder {}, which is no setting"),
        (f"{ME} {{page_size}}", r"has no {port}"),
        ("/no/such/program {port}", r"there is no program '/no/such/program'"),
        (f"{ME} {{port", r"is not a command line"),
        (f"{ME} '{{port}}", r"is not a command line"),
        (f"{ME} {{port}} {{page_size:{{max_num_seqs}}}}", r"values cannot be formatted"),
        (f"{ME} {{port}} {{page_size:{{max_num_seqs}}|}}", r"values cannot be formatted"),
        (f"{ME} {{port}} {{page_size:04d}}", r"has {page_size:04d}: write {page_size} for the value, or {page_size:ON"),
        (f"{ME} {{port}} {{page_size!r}}", r"has {page_size!r}: write {page_size} for the value"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_way_out(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        parse(text)


def test_what_is_swept_must_be_in_the_command():
    template = parse(f"{ME} {{port}} {{page_size}}")
    template.require(["page_size"])
    with pytest.raises(UsageError, match=r"varies kv_cache_dtype, layout, and .* no {kv_cache_dtype} and no {layout}"):
        template.require(["page_size", "kv_cache_dtype", "layout"])


def test_what_the_command_does_not_say_is_the_servers_own():
    settings = {"page_size": 16, "layout": "paged", "seed": 1, "device": "cpu", "dtype": "float32", "model": "m"}
    assert parse(f"{ME} {{port}} {{page_size}}").not_passed_on(settings) == ["device", "dtype", "model"]
    assert parse(f"{ME} {{port}} {{page_size}} {{model}} {{dtype}} {{device}}").not_passed_on(settings) == []


def test_a_placeholder_that_nobody_sets_is_refused():
    with pytest.raises(UsageError, match=r"{max_model_len}, which the workload does not set"):
        command(f"{ME} {{port}} {{max_model_len}}")


def test_a_command_without_placeholders_takes_the_built_in_servers_flags():
    assert not is_template(f"{ME} -m engine.server")
    assert not is_template("it's broken")
    assert is_template("serve {model}") and is_template("serve {no_such_thing}")
