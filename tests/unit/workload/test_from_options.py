"""A workload from a few answers: what it sends, what it varies, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest

from kvbench.common.errors import UsageError
from kvbench.requests.build import LoadDraw, build_requests
from kvbench.targets.builtin import check_configuration
from kvbench.workload.design import plan_sweep
from kvbench.workload.file import load_workload
from kvbench.workload.from_options import changes_of_file, parse_vary, workload_text
from kvbench.workload.options import Answers

QUESTION = Answers(
    input_len="600", output_len="150", concurrency=(20,), vary=("page_size=16,32", "kv_cache_dtype=auto,fp8")
)
TURNS = (("human", "one two"), ("gpt", "three"), ("human", "four"), ("gpt", "five six"))
CHATS = [{"id": "1", "conversations": [{"from": who, "value": text} for who, text in TURNS]}]


def workload(answers, profile="cpu", **how):
    return load_workload("here", text=workload_text(answers, profile=profile), profile=profile, **how)


def requests(loaded):
    (point,) = loaded.load_points
    limit = loaded.engine["max_model_len"]
    at = {"concurrency": point.concurrency, "rate": point.request_rate}
    return build_requests(LoadDraw(loaded.load, vocab_size=8192, max_model_len=limit, seed=loaded.seed, repeat=1, **at))


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_question_becomes_cells_whose_requests_have_the_lengths_and_share_nothing(profile):
    loaded = workload(QUESTION, profile)
    design, _ = plan_sweep(loaded, (), check_configuration)
    names = ["paged-p16", "paged-p32", "paged-p16-fp8_e4m3"]
    assert [c.config_id for c in design.configurations] == names and design.configurations[0].is_baseline
    assert [cell.cell_id for cell in design.cells] == [f"{name}-c20" for name in names]
    sent = requests(loaded)
    assert len(sent) == 60 and {(len(r.prompt_token_ids), r.max_tokens) for r in sent} == {(600, 150)}
    assert len({r.prompt_token_ids[:16] for r in sent}) == 60


def test_ranges_prefix_rates_and_counts_are_taken():
    loaded = workload(
        Answers(input_len="400:800", output_len="10-30", prefix_len=64, request_rate=(4.0, math.inf), num_prompts=50)
    )
    assert [point.load_id for point in loaded.load_points] == ["r4", "rinf"]
    assert {point.num_requests for point in loaded.load_points} == {50}
    one = workload(Answers(input_len="400:800", output_len="10-30", prefix_len=64, request_rate=(4.0,)))
    sent = requests(one)
    assert len({r.prompt_token_ids[:64] for r in sent}) == 1 and len({r.prompt_token_ids[64:80] for r in sent}) > 100
    assert all(464 <= len(r.prompt_token_ids) <= 864 and 10 <= r.max_tokens <= 30 for r in sent)


def test_what_the_answers_need_of_the_engine_is_given():
    loaded = workload(Answers(input_len="3000", output_len="1000", concurrency=(8, 600)))
    assert loaded.engine["max_model_len"] == 4096
    assert loaded.engine["max_num_seqs"] == loaded.engine["max_num_batched_tokens"] == 600


def test_one_value_of_each_setting_is_the_baselines():
    loaded = workload(
        Answers(input_len="8", output_len="8", concurrency=(1,), vary=("layout=contiguous,paged", "max-num-seqs=4,8"))
    )
    assert (loaded.engine["layout"], loaded.engine["max_num_seqs"]) == ("contiguous", 4)


def test_a_sharegpt_file_gives_the_first_turn_of_each_conversation(tmp_path):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(2 * CHATS))
    loaded = workload(Answers(dataset_path=str(path), dataset_name="sharegpt", concurrency=(1,), num_prompts=2))
    first, second = requests(loaded)
    assert first.prompt_token_ids == second.prompt_token_ids and loaded.name == "chats"


def test_a_trace_is_replayed_at_its_own_times_or_by_users(tmp_path):
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:17:{s:02d}.000,{100 + s},10" for s in range(20)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    recorded = requests(workload(Answers(dataset_path=str(path))))
    assert [r.arrival_s for r in recorded] == list(range(20))
    assert [len(r.prompt_token_ids) for r in recorded] == [100 + s for s in range(20)]
    closed = requests(workload(Answers(dataset_path=str(path), concurrency=(2,))))
    assert len(closed) == 16 and {r.arrival_s for r in closed} == {None}


def test_a_file_keeps_its_load_and_takes_what_is_varied():
    assert changes_of_file(Answers(vary=("page_size=8,16",), design="full")) == [
        'sweep={"page_size": [8, 16]}', "design=full",
    ]  # fmt: skip
    assert changes_of_file(Answers()) == []
    with pytest.raises(UsageError, match="--input-len"):
        changes_of_file(Answers(input_len="5"))


def test_values_are_read_as_yaml_and_fp8_is_e4m3():
    assert parse_vary(["page_size=[16, 32]"]) == {"page_size": [16, 32]}
    assert parse_vary(["enable_prefix_caching=false,true", "kv_budget=64MiB,1GiB", "kv-cache-dtype=fp8"]) == {
        "enable_prefix_caching": [False, True], "kv_budget": ["64MiB", "1GiB"], "kv_cache_dtype": ["fp8_e4m3"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        (Answers(output_len="5", concurrency=(1,)), "--input-len is missing"),
        (Answers(input_len="9:3", output_len="5", concurrency=(1,)), "'9:3'"),
        (Answers(input_len="5", output_len="5"), "neither"),
        (Answers(input_len="5", output_len="5", concurrency=(1,), request_rate=(1.0,)), "both"),
        (Answers(input_len="5", output_len="5", dataset_name="sharegpt", concurrency=(1,)), "--dataset-path"),
        (Answers(input_len="5", output_len="5", dataset_path="x.json", concurrency=(1,)), "contradicts --dataset-path"),
        (Answers(input_len="5", output_len="5", concurrency=(1,), vary=("page_size",)), "names no values"),
        (Answers(input_len="5", output_len="5", concurrency=(1,), vary=("page_size=16",)), "one value"),
        (Answers(input_len="5", output_len="5", concurrency=(1,), design="full"), "--design"),
        (Answers(prefix_len=5, dataset_path="x.json", concurrency=(1,)), "--prefix-len 5 contradicts"),
        (Answers(input_len="5", output_len="5", concurrency=(1,), vary=("page_size=1", "page_size=2")), "twice"),
        (Answers(input_len="5", output_len="5", concurrency=(1,), vary=("concurrency=1,2",)), "--concurrency 8,32"),
    ],
)
def test_answers_that_make_no_workload_are_refused(answers, named):
    with pytest.raises(UsageError, match=named):
        workload_text(answers, profile="cpu")
