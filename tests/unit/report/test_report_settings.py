"""Settings of the engine in the report's words: names, changes, and what each change is for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbench.report.breakdown import effect_rows
from kvbench.report.comparisons import differing, effects
from kvbench.report.conclusions import conclusions
from kvbench.runs.model import Run
from kvbench.runs.read import _config_name, _rank
from tests.support.report_cells import cell, run


def points(measured: Run, title: str) -> tuple[str, ...]:
    return next(c.points for c in conclusions(measured) if c.title == title)


@pytest.mark.parametrize(
    ("settings", "varied", "name"),
    [
        ({"layout": "paged", "page_size": 16}, {"kv_cache_dtype": "fp8_e4m3"}, "paged (page 16) + FP8 KV (e4m3)"),
        ({"layout": "paged", "page_size": 16}, {"kv_cache_dtype": "int8_per_token_head"}, "paged (page 16) + INT8 KV"),
        ({"layout": "paged", "page_size": 16}, {"preemption_mode": "swap"}, "paged (page 16) + swap"),
        (
            {"layout": "paged", "page_size": 8},
            {"page_size": 8, "preemption_mode": "swap", "swap_space": "64MiB"},
            "paged (page 8) + swap + swap space 64MiB",
        ),
        ({"layout": "contiguous"}, {"layout": "contiguous"}, "contiguous"),
        ({"layout": "contiguous", "reservation": "oracle"}, {"reservation": "oracle"}, "contiguous (oracle)"),
        ({"layout": "paged"}, {"enable_chunked_prefill": False}, "paged + no chunked prefill"),
        ({"layout": "paged"}, {"scheduling_policy": "priority"}, "paged + priority scheduling"),
        ({"layout": "paged"}, {"max_num_partial_prefills": 2}, "paged + partial prefills 2"),
    ],
)
def test_names_of_configurations(settings: dict, varied: dict, name: str) -> None:
    assert _config_name({"settings": settings, "varied": varied}) == name


def test_a_setting_that_only_another_one_needs_is_part_of_it() -> None:
    base = cell(preemption_mode="recompute", baseline=True)
    assert differing(base, cell(preemption_mode="swap", swap_space="64MiB")) == {"preemption_mode"}
    assert differing(cell(preemption_mode="swap", swap_space=1), cell(preemption_mode="swap", swap_space=2)) == {
        "swap_space"
    }
    assert differing(cell("contiguous", reservation="oracle"), cell()) == {"layout"}
    assert differing(cell("contiguous", reservation="oracle"), cell("contiguous")) == {"reservation"}
    assert differing(cell("contiguous", reservation="max"), cell("contiguous")) == set()
    assert differing(cell(enable_chunked_prefill=False), cell(max_num_partial_prefills=2)) == {"enable_chunked_prefill"}


def test_a_changed_kv_dtype_says_how_many_more_tokens_fit() -> None:
    small = cell(kv_cache_dtype="fp8_e4m3", throughput=(150.0, 151.0, 152.0), capacity={"capacity_tokens": 24_816})
    measured = run(cell(capacity={"capacity_tokens": 6192}), small)
    assert points(measured, "KV dtype, changed alone") == (
        "FP8 KV (e4m3) instead of KV in the model's dtype: output tokens/s 1.51x (1.50–1.52) at 24 at once; the same "
        "bytes hold 24,816 tokens instead of 6,192.",
    )


def test_a_changed_preemption_mode_says_what_was_moved_and_what_was_computed_again() -> None:
    counters = {"swapped_out_slots_total": 512.0, "recomputed_tokens_total": 0.0}
    swap = cell(preemption_mode="swap", server=counters, capacity={"bytes_per_token": 16_384})
    base = cell(preemptions=2)
    (text,) = points(run(base, swap), "Preemption, changed alone")
    assert text == (
        "Swap instead of recompute: output tokens/s level, 1.00x (1.00–1.00) at 24 at once; at 24 at once 24 MiB "
        "swapped out, and 0 tokens recomputed instead of 600."
    )


def test_what_hashing_and_moving_took_of_the_step_time() -> None:
    steps = {"step_time_seconds_total_execute": 9.0, "step_time_seconds_total_schedule": 1.0}
    caching = cell(
        enable_prefix_caching=True, server={**steps, "hash_seconds_total": 0.02, "prefix_cache_hits_total": 25.0,
        "prefix_cache_queries_total": 100.0},
    )  # fmt: skip
    (text,) = points(run(cell(enable_prefix_caching=False, baseline=True), caching), "Prefix caching, changed alone")
    assert text.endswith("measured hit rate 25 % of prompt tokens; hashing took 0.2 % of the step time.")
    server = {**steps, "swapped_out_slots_total": 1.0, "swap_seconds_total": 0.5}
    swap = cell(preemption_mode="swap", server=server, preemptions=1, capacity={"bytes_per_token": 1024})
    (text,) = points(run(cell(preemptions=1), swap), "Preemption, changed alone")
    assert text.endswith("; moving took 5.0 % of the step time.")


def test_an_older_server_without_swap_counters_says_nothing_of_them() -> None:
    cells = (cell(preemptions=1), cell(preemption_mode="swap", preemptions=1))
    (text,) = points(run(*cells), "Preemption, changed alone")
    assert text == "Swap instead of recompute: output tokens/s level, 1.00x (1.00–1.00) at 24 at once."


def test_swap_that_had_nothing_to_do_says_so() -> None:
    server = {"swapped_out_slots_total": 0.0}
    (text,) = points(run(cell(server=server), cell(preemption_mode="swap", server=server)), "Preemption, changed alone")
    assert text.endswith("1.00x (1.00–1.00) at 24 at once; nothing was preempted at 24 at once.")


def test_reservations_are_compared_with_the_contiguous_baseline() -> None:
    base = cell("contiguous", reservation="max", baseline=True, running=6.2)
    oracle = cell("contiguous", reservation="oracle", throughput=(150.0,) * 3, running=12.5)
    measured = run(base, oracle, cell())
    assert {(e.setting, e.change) for e in effects(measured)} == {
        ("reservation", "max → oracle"),
        ("layout", "contiguous → paged"),
    }
    (row,) = effect_rows(measured)  # the layouts have a section of their own
    assert (row.effect.title, row.effect.change) == ("reservation", "max → oracle")
    assert points(measured, "Reservation, changed alone") == (
        "Oracle instead of max: output tokens/s 1.50x (1.50–1.50) at 24 at once; at 24 at once 12.5 sequences running "
        "at once instead of 6.2.",
    )


def test_reservations_stand_in_the_order_of_what_they_know() -> None:
    cells = [cell("contiguous", reservation=kind, baseline=False) for kind in ("oracle", "pow2", "max")] + [cell()]
    assert [c.settings.get("reservation") for c in sorted(cells, key=_rank)] == ["max", "pow2", "oracle", None]


def test_changes_are_words_in_the_page_and_in_markdown(
    run_of: Callable[[str], Run], page_of: Callable[[str], str]
) -> None:
    changes = {row.effect.change for row in effect_rows(run_of("normal"))}
    assert changes >= {"recompute → swap", "KV in the model's dtype → INT8 KV", "off → on", "16 → 8"}
    assert "recompute → swap" in page_of("normal")
