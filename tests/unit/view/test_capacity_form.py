"""The capacity form: the same numbers as the plan, and a sentence for what it cannot take."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from kvbench.targets.builtin import check_configuration
from kvbench.view.capacity import form
from kvbench.view.server import make_app
from kvbench.view.workspace import Workspace

LLAMA_8B_TOKEN = 32 * 8 * (128 + 128) * 2  # layers x KV heads x (key + value) x bytes of bfloat16


def rows(**entered: str) -> dict[str, tuple[str, ...]]:
    answer = form(entered)
    assert answer.rows, answer.error
    return {title: tuple(values) for title, *values in answer.rows}


def test_the_numbers_are_those_of_the_model_on_paper() -> None:
    budget, table = 8 << 30, 32 * (8192 // 16) * 8
    pages = (budget - table) // (16 * LLAMA_8B_TOKEN)
    found = rows()
    assert found["bytes a token"] == (f"{LLAMA_8B_TOKEN:,}",) * 2
    assert found["tokens held"][0] == f"{pages * 16:,}"
    reserved = (budget - 32 * 8) // (8192 * LLAMA_8B_TOKEN)
    assert found["sequences of 8,192 tokens at once"] == (str(pages // 512), str(reserved))
    assert found["requests of 750 tokens at once"] == (str(pages // 47), "7")  # 47 pages of 16 hold 750 tokens


def test_a_smaller_kv_dtype_holds_more_and_the_numbers_are_those_of_the_plan() -> None:
    entered = {"kv_cache_dtype": "fp8_e4m3", "model": "llama-32m", "kv_budget": "97MiB", "max_model_len": "2048"}
    settings = {**entered, "max_model_len": 2048, "load_format": "dummy", "device": "cuda", "max_num_seqs": 32}
    known = check_configuration({**settings, "layout": "paged", "page_size": 64})
    found = rows(**entered, page_size="64")
    assert found["tokens held"][0] == f"{known.capacity_tokens:,}"
    wide = rows(**{**entered, "kv_cache_dtype": "auto"}, page_size="64")
    assert int(found["tokens held"][0].replace(",", "")) > 1.9 * int(wide["tokens held"][0].replace(",", ""))


def test_the_sentence_says_whether_memory_limits_the_load() -> None:
    assert rows(input_len="7000", output_len="1192")["tokens held"]  # together the longest that there is
    assert "memory limits contiguous" in form({}).sentence
    assert "memory is not what limits" in form({"concurrency": "2"}).sentence


@pytest.mark.parametrize(
    ("entered", "named"),
    [
        ({"kv_budget": "lots"}, "'lots' is not a size"),
        ({"kv_budget": "1KiB"}, "smaller than one sequence"),
        ({"page_size": "0"}, "page size '0'"),
        ({"concurrency": "-3"}, "concurrency '-3'"),
        ({"concurrency": "9" * 40}, "concurrency '999"),
        ({"concurrency": "200000"}, "100,000"),
        ({"output_len": "9000"}, "more than max_model_len 8192"),
        ({"model": "/etc/passwd"}, "model '/etc/passwd' is not one of deepseek-17m"),
        ({"dtype": "int2"}, "'int2'"),
        ({"kv_cache_dtype": "<b>"}, "'<b>'"),
    ],
)
def test_bad_input_is_one_sentence_beside_the_form_with_what_was_entered(
    entered: dict[str, str], named: str, tmp_path: Path
) -> None:
    with TestClient(make_app(Workspace([tmp_path])), base_url="http://127.0.0.1") as served:
        page = served.get("/capacity", params=entered)
    text = html.unescape(page.text)
    assert page.status_code == 400 and 'role="alert"' in text and named in text
    assert "<b>" not in page.text.split("<main>")[1] and "tokens held" not in text
    (name,) = entered
    assert name in ("model", "dtype", "kv_cache_dtype") or f'name="{name}" value="{entered[name]}"' in text
