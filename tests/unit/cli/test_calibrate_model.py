"""`kvbench dev calibrate-model`: exit codes, and what is written."""

from __future__ import annotations

import json

import pytest

from kvbench.cli.main import main

SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "max_model_len": 2048}


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["dev", "calibrate-model", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return command


@pytest.fixture
def measured(tmp_path):
    """Six requests of 100 tokens, one after another: 20 ms to the first token, then 10 ms each."""
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [
        {"input_toks": 100, "output_toks": 11, "arrival_time": 2.0 * i, "queued_ts": 2.0 * i, "scheduled_ts": 2.0 * i,
         "first_token_ts": 2.0 * i + 0.02, "last_token_ts": 2.0 * i + 0.12}
        for i in range(6)
    ]  # fmt: skip
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "meta.json").write_text(json.dumps({"model": "llama-3.1-8b", "engine_kwargs": SETTINGS}))
    (folder / "timeseries.csv").write_text("t,running,kv_cache_pct\n1,1,0.1\n2,0,0\n")
    return folder


def test_a_run_is_fitted_written_checked_and_drawn(run, measured, tmp_path):
    """An H100 takes 6 ms and more for a step of 8B; what is left of the 20 ms is the launches of 32 layers."""
    code, out, _ = run(measured, "--device", "H100", "--output", "c.json", "--figure", "f.html", "--check", measured)
    assert code == 0 and "not fitted to it" in out
    written = json.loads((tmp_path / "c.json").read_text())
    assert 300e-6 < written["prompt_layer_s"] < 450e-6
    assert written["provenance"]["device"] == "H100-80GB" and written["provenance"]["checked"]
    assert "plotly" in (tmp_path / "f.html").read_text()[:100_000].lower()
    code, out, _ = run("--calibration", "c.json", "--check", measured, "--device", "H100", "--json")
    errors = json.loads(out)["runs"][1]["errors"]
    assert code == 0 and abs(errors["ttft_mean"]) < 0.1
    assert json.loads(out)["runs"][0]["errors"]["ttft_mean"] < -0.3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "RUN|run"),
        (("run",), "--device"),
        (("run", "--device", "H1000"), "H100"),
        (("run", "--device", "L4", "--model", "llama-3.1-70b"), "llama-3.1-70b"),  # the run states another
        (("run", "--device", "H100", "--ops", "empty"), "empty"),
        (("run", "--device", "H100", "--engine", "max_num_seqs=many"), "max_num_seqs"),
        (("empty", "--device", "H100"), "requests.jsonl"),
        (("--calibration", "meta.json", "--check", "run", "--device", "H100"), "meta.json"),
        (("steps.csv", "--device", "H100", "--model", "llama-3.1-8b"), "steps.csv"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, measured, tmp_path, arguments, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "meta.json").write_text("{}")
    (tmp_path / "steps.csv").write_text("time_s,step\n1,1\n")
    code, _, error = run(*arguments)
    assert code == 2 and any(each in error for each in says.split("|")) and "Traceback" not in error
