"""The chapter on answers: a row a configuration beside its speed and room, the control, the limits, and the price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.report.answers import report_answers
from kvbench.report.decision import Decision
from kvbench.report.quality import CONTROL
from kvbench.report.recommend import recommend
from kvbench.runs.model import Run
from kvbench.runs.quality import QUALITY
from kvbench.runs.read import read_run
from tests.support.quality_results import KLD_OUTSIDE, figures, measured_run, outside, with_quality
from tests.support.report_cells import cell
from tests.support.report_cells import run as run_without_quality
from tests.support.report_parts import (
    answer_quality_table,
    answer_sentences,
    passkey_table,
    plain_document,
    price_drawing,
    price_frame,
    prices,
)
from tests.support.synthetic_run import write_run

INT4: dict[str, Any] = {"kv_cache_dtype": "int4_per_token_head"}


def priced(**how: Any) -> Run:
    """A baseline within the limits and a faster INT4 outside, which holds 3.8 times the tokens."""
    base = cell(capacity={"capacity_tokens": 1000})
    int4 = cell(throughput=(150.0, 151.0, 152.0), capacity={"capacity_tokens": 3800}, **INT4)
    return with_quality(measured_run(base, int4), {int4.config_id: outside()}, **how)


def rows(run: Run) -> dict[str, dict[str, Any]]:
    table = answer_quality_table(run)
    keys = [column.key for column in table.columns]
    return {row.values[0].text: dict(zip(keys, row.values, strict=True)) for row in table.rows}


def test_each_configuration_stands_beside_the_control_its_limits_its_speed_and_its_room() -> None:
    control, base, int4, limit = rows(priced()).values()
    assert [each["within"].text for each in (control, base, int4, limit)] == ["–", "within", "outside", "–"]
    assert int4["within"].note == KLD_OUTSIDE and int4["within"].mark == "worse"
    assert (int4["mean"].text, int4["mean"].note) == ("0.03", "0.024 to 0.037")
    assert int4["perplexity_change"].text == "+4.00 %" and int4["perplexity_change"].note == "+3.90 % to +4.10 %"
    assert int4["passkey.share"].text == "91 %" and "58 of 64" in int4["passkey.share"].note
    assert int4["greedy.share"].text == "65 %" and "token 23" in int4["greedy.share"].note
    assert int4["full_pool"].text == "0 of 64" and "37 preemptions" in int4["full_pool"].note
    assert int4["tokens_per_s"].text == "151" and "+51 %" in int4["tokens_per_s"].note
    assert (int4["capacity"].text, int4["capacity"].note) == ("3,800", "3.8x")
    assert limit["mean"].text == "≤ 0.002" and limit["passkey.share"].text == "≥ 95 %"
    broken = ("mean", "p99", "rms_dp", "perplexity_change", "greedy.share", "passkey.share")
    assert all(int4[key].mark == "worse" and not base[key].mark for key in broken)


def test_a_configuration_that_was_not_measured_says_so() -> None:
    assert "1 of the run not measured" in next(answer_sentences(measured_run(cell(), cell(**INT4))))
    found = rows(measured_run(cell(), cell(**INT4)))
    (int4,) = (each for name, each in found.items() if "int4" in name)
    assert int4["within"].text == "not measured" and int4["mean"].text == "–"
    lost = replace(priced(), cells=priced().cells[:1])  # measured, and not served
    assert [each["tokens_per_s"].text for each in rows(lost).values()] == ["–", "100", "–", "–"]


def test_the_price_of_a_quantised_kv_is_one_sentence() -> None:
    text = " ".join(answer_sentences(priced()))
    price = "KLD 0.03, perplexity +4.0 %, passkeys 91 %, for 3.8x the tokens in the same memory at +51 % tokens/s"
    assert f"INT4 KV: {price}" in text and "1 of 2 configurations outside" in text
    (price,) = prices(priced())
    assert price.endswith("served: outside the limits.")
    (price,) = prices(priced(note="Of random weights."))
    assert price.endswith("quality not measured.")
    assert "each within the limits" in " ".join(answer_sentences(measured_run(cell(), cell(page_size=8))))


@pytest.mark.parametrize(
    ("dtype", "facts", "words"),
    [
        ("int4_per_token_head", {"v": 10}, "V of layer 5 has a channel 10x the typical one: INT4 KV has 0.7 of 7"),
        ("int8_per_token_head", {"k": 1110, "k_stored": 1.72}, "1,110x the typical one, balanced to 1.7x"),
        ("fp8_e4m3", {"k": 100, "k_stored": 100}, "K of layer 2 has a channel 100x the typical one"),
        ("fp8_e4m3", {"k": 9.9, "k_stored": 9.9}, ""),
    ],
)
def test_an_outlier_is_named_with_the_steps_that_it_leaves_by_the_answer_and_by_the_price(dtype, facts, words) -> None:
    base, quantised = cell(), cell(throughput=(150.0, 151.0, 152.0), kv_cache_dtype=dtype)
    told = {"kv_outliers": {"k_layer": 2, "v_layer": 5, **facts}}
    run = measured_run(base, quantised, servers={quantised.config_id: told})
    (answer,) = report_answers(Decision.of(run))
    (price,) = prices(with_quality(run, {quantised.config_id: figures() | told}))
    assert all(words in text and ("typical" in text) == bool(words) for text in (answer.numbers, price))
    assert "steps" not in answer.numbers or dtype.startswith("int")


def test_values_that_fp8_cuts_off_are_named_by_the_answer() -> None:
    def evidence(saturated: float) -> str:
        counted = {"kv_sampled_values_total": 4000.0, "kv_saturated_values_total": saturated}
        (answer,) = report_answers(Decision.of(measured_run(cell(), cell(kv_cache_dtype="fp8_e4m3", server=counted))))
        return answer.numbers

    assert "0.05 % of the sampled K and V have fp8's largest code" in evidence(2.0)
    assert "largest code" not in evidence(0.0)


def test_another_model_than_the_runs_is_named_with_what_that_means() -> None:
    random = {"model": {"config": "llama-32m", "load_format": "dummy"}}
    measured = with_quality(run_without_quality(cell(), workload=random), beside=True, model="kvbench-tiny")
    text = " ".join(answer_sentences(measured))
    assert "kvbench-tiny, not with llama-32m" in text and "random" in text
    assert "not with" not in " ".join(answer_sentences(with_quality(run_without_quality(cell()))))
    assert "Of random weights." in list(answer_sentences(with_quality(measured, note="Of random weights.")))
    other = with_quality(run_without_quality(cell(), git={"sha": "a" * 40}), git={"sha": "b" * 40})
    assert "does not count" in " ".join(answer_sentences(other))


def test_the_figure_has_every_measured_configuration_the_noise_and_the_limit() -> None:
    measured = priced()
    frame = price_frame(measured).set_index("configuration")
    assert list(frame["kld"]) == [2e-12, 0.03] and list(frame["change"].round()) == [0, 51]
    assert list(frame["outside"]) == [False, True] and list(frame["label"]) == ["", "INT4 KV"]
    made = price_drawing(measured)
    assert made is not None and "INT4 KV" in made.title
    noise, limit = (shape for shape in made.figure.layout.shapes if shape.yref == "y")
    assert noise.y1 == 1e-6 and limit.y0 == 0.002  # the control's 4e-12 is drawn at the end of the axis
    low, high = (10**end for end in made.figure.layout.yaxis.range)
    assert made.figure.layout.yaxis.type == "log" and low < 1e-6 and high > 0.03
    assert price_drawing(run_without_quality(cell(), cell(page_size=8))) is None
    exact = price_drawing(with_quality(run_without_quality(cell()), {cell().config_id: figures(0.0)}))
    assert exact is not None and exact.figure.data[0].y[0] > 0 and "KLD 0 (" in exact.figure.data[0].hovertext[0]


def test_passkeys_are_listed_by_part_where_some_are_wrong_and_only_of_those_configurations() -> None:
    table = passkey_table(priced())
    assert [column.key for column in table.columns[2:]] == [CONTROL, cell(**INT4).name]
    assert [row.values[1].text for row in table.rows if row.group == "by_residue"] == ["0", "all others"]
    assert len([row for row in table.rows if row.group == "by_depth"]) == 5
    assert [value.text for value in table.rows[0].values[2:]] == ["12 of 12", "6 of 12"]
    none = with_quality(priced(), {cell(**INT4).config_id: figures(passkeys=0)})
    assert [value.text for value in passkey_table(none).rows[0].values[3:]] == ["0 of 12"]
    assert not passkey_table(measured_run(cell(), cell(page_size=8))).rows
    assert "Quality of the answers" in [chapter.title for chapter in plain_document(priced()).chapters]
    assert not passkey_table(run_without_quality(cell())).rows


def test_a_file_of_another_format_asks_for_a_new_measurement(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 1, {"paged-p16-c3": [100.0] * 3}, samples=False)
    (folder / QUALITY).write_text('{"format": "kvbench-quality/1"}')
    again, run = f"kvbench quality {folder}", read_run(folder)
    assert any(again in reason for reason in plain_document(run).details) and again in recommend(run).doubts[0].why
