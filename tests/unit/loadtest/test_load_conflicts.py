"""Words on the command line of ``kvbench load`` that do not go together are refused, whatever the server is."""

from __future__ import annotations

import pytest
import yaml

from kvbench.cli.main import cli
from kvbench.common.errors import UsageError
from kvbench.workload.load_section import LoadConfig

CLASSES = [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 4}]
SAME = {"num_requests": 20, "prompts": {"kind": "synthetic", "classes": CLASSES}}
CLOSED, OPEN = {"concurrency": [2, 8]}, {"mode": "open", "request_rate": [4, 9]}
SLO = ("--find-max-rate", "p95_ttft<=1s")
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def load(tmp_path):
    """Runs the command; nothing listens at its URL, so what is not refused for its words ends with another sentence."""

    def run(*words, url=NOBODY, file=CLOSED):
        path = tmp_path / "w.yaml"
        path.write_text(yaml.safe_dump({"name": "w", "model": {"config": "llama-32m"}, "load": {**SAME, **file}}))
        (tmp_path / "ca.pem").write_text("")
        words = [str(tmp_path / w) if w == "ca.pem" else w for w in words]
        return cli.main(["load", str(path), "--url", url, *words], standalone_mode=False)

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--min-rate", "1"), "--min-rate goes with --find-max-rate only"),
        (("--max-rate", "1"), "--max-rate goes with"),
        (("--max-runs", "24"), "--max-runs goes with"),  # although it is the default
        (("--max-minutes", "9"), "--max-minutes goes with"),
        (("--run-seconds", "9"), "--run-seconds goes with"),
        (("--tolerance", "0.1"), "--tolerance goes with"),
        (("--resume",), "--resume goes with --output-dir"),
        (("--bind-port", "5000"), "--bind-port goes with --master"),
        (("--expect-workers", "1"), "--expect-workers goes with --master"),
        (("--master-port", "5000"), "--master-port goes with --worker"),
        (("--processes", "2", "--master"), "--processes and --master exclude"),
        (("--master", *SLO), "--find-max-rate and --master exclude"),
        (("--worker", "--master"), "--worker and --master exclude"),
        (("--worker",), "--worker takes nothing but"),
        (("--tls-ca-file", "ca.pem", "--no-tls-verify"), "--tls-ca-file and --no-tls-verify exclude"),
        (("--no-tls-verify",), "--no-tls-verify goes with https://, and --url is http"),
        (("--tokenizer", "ca.pem"), "--tokenizer is for a server that takes texts only"),
        (("--at", "c8", "--request-rate", "4"), "--at c8 is a closed loop of 8 users, and --request-rate 4 an open"),
        (("--at", "c8", "--max-concurrency", "4"), "and --max-concurrency says 4"),
        (("--at", "c8", *SLO), "--find-max-rate searches in open loop"),
        (("-o", "engine.page_size=0"), "-o engine.page_size=0 says how `kvbench sweep` launches servers, and this one"),
        (("-o", "load.timeout_s=9", "-o", "sweep={}"), "-o sweep={} says how"),
        (("--request-rate", "inf", "--burstiness", "2"), "--burstiness 2 shapes gaps, and --request-rate inf has none"),
    ],
)
def test_words_that_contradict_each_other_are_refused(load, words, said):
    with pytest.raises(UsageError, match=said):
        load(*words)


def test_another_rate_than_that_of_the_named_load_is_refused(load):
    with pytest.raises(UsageError, match="--at r9 is 9 requests/s, and --request-rate says 4"):
        load("--at", "r9", "--request-rate", "4", file=OPEN)


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (("--at", "c8", "--max-concurrency", "8"), CLOSED),
        (("--request-rate", "4", "--max-concurrency", "4", "--burstiness", "2"), CLOSED),
        (("--at", "r9", "--request-rate", "9", "--max-concurrency", "4"), OPEN),
        (("--at", "r9", *SLO, "--max-runs", "3", "--min-rate", "1"), OPEN),
        (("--request-rate", "inf", "--max-concurrency", "3"), CLOSED),
    ],
)
def test_words_that_agree_get_as_far_as_the_server(load, words, file):
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:9"):
        load(*words, file=file)


def test_gaps_of_a_load_that_has_none_are_refused_in_the_file_too():
    at_once = SAME | {"mode": "open", "arrivals": "gamma", "burstiness": 2.0, "request_rate": "inf"}
    with pytest.raises(ValueError, match="burstiness 2 has no meaning with request_rate inf"):
        LoadConfig.model_validate(at_once)
    LoadConfig.model_validate(at_once | {"request_rate": ["inf", 4.0]})
