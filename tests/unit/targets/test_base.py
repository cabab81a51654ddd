"""What a server says of itself against what its configuration is named and compared for."""

from __future__ import annotations

import re

import pytest

from kvbench.targets.base import contradiction
from kvbench.targets.builtin import check_configuration

EACH = 16384
SETTINGS = {"layout": "paged", "page_size": 32, "kv_budget": "97MiB"}
KNOWN = {"kv_budget_bytes": 97 << 20, "bytes_per_token": EACH, "capacity_tokens": 6192}


def told(page_size=32, tokens=6192):
    return {"engine": {"page_size": page_size}, "capacity": {"capacity_tokens": tokens}}


def test_a_server_as_it_was_asked_for():
    assert contradiction(SETTINGS, KNOWN, told()) is None
    assert contradiction(SETTINGS, KNOWN, told(tokens=6192 - 100)) is None  # 1.6 %
    assert contradiction(SETTINGS, KNOWN, None) is None and contradiction(SETTINGS, KNOWN, {}) is None
    assert contradiction({"target": "http://x"}, {}, told(128, 5)) is None  # nothing was asked
    assert contradiction({**SETTINGS, "page_size": None}, KNOWN, told(128)) is None
    assert contradiction({"layout": "contiguous"}, KNOWN, told(2048)) is None  # there it is a reservation's size


def test_a_capacity_may_be_off_by_two_percent_and_a_page():
    known = {"kv_budget_bytes": 1000 * EACH, "bytes_per_token": EACH, "capacity_tokens": 1000}
    for tokens, fits in ((1052, True), (1053, False), (948, True), (947, False)):
        assert (contradiction(SETTINGS, known, told(tokens=tokens)) is None) is fits


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (told(128), r"128 .*32.* -o engine.page_size=128"),
        (told(tokens=12384), r"12,384 .*101,711,872 bytes is 6,192"),
        (told(tokens=4000), r"4,000"),
        ({"capacity": {"page_size": 64}}, r"64"),
    ],
)
def test_other_pages_another_budget_another_dtype(info, words):
    assert re.search(words, contradiction(SETTINGS, KNOWN, info) or "")


def test_without_our_own_count_of_tokens_the_bytes_decide():
    known = {key: KNOWN[key] for key in ("kv_budget_bytes", "bytes_per_token")}
    assert contradiction(SETTINGS, known, told(tokens=6208)) is None
    assert "6,208" in (contradiction(SETTINGS, known, told(tokens=262144)) or "")
    assert contradiction(SETTINGS, {}, told(tokens=262144)) is None  # it was not given a budget


def test_a_kv_format_with_fewer_scales_holds_more():
    known = {**KNOWN, "bytes_per_token": 4352, "scale_bytes_per_token": 256, "capacity_tokens": 23000}
    assert contradiction(SETTINGS, known, told(tokens=23000)) is None
    assert contradiction(SETTINGS, known, told(tokens=24437)) is None
    assert contradiction(SETTINGS, known, told(tokens=25500)) is not None


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_the_built_in_engine_is_what_its_arithmetic_says(layout, page_size):
    settings = {
        "model": "llama-32m", "load_format": "dummy", "dtype": "float32", "device": "cpu", "layout": layout,
        "kv_budget": "65MiB", "max_model_len": 1024,
    } | ({"page_size": page_size} if layout == "paged" else {})  # fmt: skip
    known = check_configuration(settings)
    info = {"engine": settings, "capacity": {key: known[key] for key in ("page_size", "capacity_tokens")}}
    assert contradiction(settings, known, info) is None
