"""``kvbench plan MODEL``: told apart from a workload, answered in one command."""

import json

import pytest

from kvbench.cli.main import main


@pytest.fixture
def plan(capsys, tmp_path, monkeypatch):
    """(exit code, stdout, stderr) of ``kvbench plan arguments`` in an empty folder."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def command(line):
        with pytest.raises(SystemExit) as ended:
            main(["plan", *line.split()])
        return ended.value.code, *capsys.readouterr()

    return command


QUESTION = "Qwen3-32B --context 8k --concurrency 40 --kv-cache-dtype fp8 --pick"


def test_one_command_answers_which_gpu(plan):
    code, out, _ = plan(QUESTION)
    assert code == 0 and out.startswith("Take 1 x H200") and "40 GiB" in out
    code, out, _ = plan(f"{QUESTION} --json")
    told = json.loads(out)
    assert code == 0 and told["memory"]["gpu"] == "H200" and told["memory"]["picked"] and told["memory"]["fits"]
    assert (told["bytes_per_token"], told["sequence_bytes"], told["kv_bytes"]) == (131_072, 2**30, 40 * 2**30)


def test_prices_decide_what_is_picked(plan):
    told = json.loads(plan(f"{QUESTION} --json --price H200=5,A100=1.5,L4=0.7")[1])
    assert (told["memory"]["gpu"], told["memory"]["count"]) == ("A100-80GB", 2)
    assert [row["gpu"] for row in told["gpus"]][:3] == ["A100-80GB", "H200", "L4"]
    priced = plan(f"{QUESTION} --price H200=5,A100=1.5")[1]
    assert "2 x A100-80GB*" in priced and "1 x H200" in priced and "L4" not in priced
    code, out, _ = plan(f"{QUESTION} --price T4=0.1")
    assert code == 0 and out.startswith("None") and "1 x H200" in out


def test_a_vendor_narrows_the_pick_and_the_list(plan):
    for vendor, picked in (("amd", "MI300X"), ("NVIDIA", "H200")):
        told = json.loads(plan(f"{QUESTION} --json --vendor {vendor}")[1])
        assert told["memory"]["gpu"] == picked
        assert {row["gpu"].startswith("MI") for row in told["gpus"]} == {vendor == "amd"}
    assert "any AMD GPU" in plan("Llama-3.1-405B --concurrency 100000 --pick --vendor amd")[1]


def test_named_gpus_say_no_with_the_numbers(plan):
    code, out, _ = plan("llama-3.1-70b --gpu 4xA100-80GB --concurrency 256")
    assert code == 0 and out.startswith("No") and "320 GiB" in out and "131,072" in out
    assert "8 x A100-80GB" in out  # what does hold it
    assert plan("llama-3.1-70b --gpu L4")[1].startswith("No")
    assert plan("Llama-3.1-405B --concurrency 100000")[1].startswith("No")
    code, out, _ = plan("llama-3.1-8b --gpu H100")
    assert code == 0 and out.startswith("Yes") and "H200" not in out  # nobody asked for others


def test_gpus_without_fp8_in_hardware_are_marked_where_the_kv_is_in_it(plan):
    line = "Qwen3-32B --concurrency 40"
    marked = plan(f"{line} --kv-cache-dtype fp8")[1]
    assert "A100-80GB*" in marked and "H100-80GB*" not in marked and "\n* has no FP8" in marked
    assert "*" not in plan(line)[1]
    rows = json.loads(plan(f"{line} --kv-cache-dtype fp8 --json")[1])["gpus"]
    assert {row["gpu"] for row in rows if row["converts_fp8"]} >= {"A100-80GB", "RTX-3090"}
    assert not any(row["converts_fp8"] for row in rows if row["gpu"] in ("L4", "H200", "MI300X"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "Qwen3-32B"),
        ("qwen3-33b", "Qwen3-32B"),
        ("Qwen3-8B-Base --context 40k", "32768"),
        ("qwen3-8b --gpu A101", "A100-80GB"),
        ("qwen3-8b --gpu L4 --pick", "--pick"),
        ("qwen3-8b --gpu L4 --vendor amd", "--vendor"),
        ("qwen3-8b --pick --vendor intel", "'amd'"),
        ("qwen3-8b --kv-cache-dtype fp7", "fp7"),
        ("qwen3-8b --price L4", "L4"),
        ("qwen3-8b --price A100=1,A100-80GB=2", "A100-80GB"),
        ("qwen3-8b --gpu A100x4", "4xA100-80GB"),
        ("qwen3-8b --max-model-len 16k --context 32k", "--max-model-len 16384"),
        ("qwen3-8b --concurrency 1,2", "--concurrency"),
        ("qwen3-8b --context 100k", "40960"),
        ("qwen3-8b --input-len 600", "--input-len"),
        ("qwen3-8b -o engine.page_size=8", "-o is for"),
        ("tiny.yaml --gpu L4", "--gpu"),
        ("--input-len 8 --output-len 8 --concurrency 1 --json", "--json"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(plan, line, words):
    code, out, err = plan(line)
    assert code == 2 and not out and words in err


def test_a_config_is_a_model_and_a_yaml_a_workload(plan, tmp_path):
    config = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
              "num_attention_heads": 8, "vocab_size": 1000, "max_position_embeddings": 2048}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert json.loads(plan("config.json --json")[1])["bytes_per_token"] == 4 * 8 * 256 * 4
    assert json.loads(plan(". --json")[1])["max_model_len"] == 2048
    code, _, err = plan("mine.yaml")
    assert code == 2 and "mine.yaml" in err
