"""``kvbench audit`` against result files of five tools, made against a server with known times and planted faults.

tests/data/audit.tar.xz holds them as the tools wrote them, but shortened: numbers to five figures, texts left out, and
only the first requests in detail. Also the example of llm-d's Benchmark Report and what its converters made of two runs
(llmd-benchmark-report 0.2.1, Apache-2.0).

    clean, clean-rate   50 ms to the first token, 20 ms from token to token, nothing wrong
    chunks4             4 tokens every 20 ms
    warm                the same command twice against a prefix cache: 75 % cached the second time
    failing(-mid,-all)  a third answered by HTTP 500, a third cut in mid-stream, all failing
    starved             a client with a quarter of a core: TTFT 146 to 600 ms for a true 50
    few71               71 requests; short-ramp: 16 at once, once
    queued-client       40 requests/s asked for, at most 4 in flight
    queued-server       16 in flight, of which the server serves 4: no client can tell that from a slow server
"""

from __future__ import annotations

import json
import tarfile
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.audit.checks import BROKEN, OPEN, audit
from kvbench.audit.compare import comparable, shared_figures
from kvbench.audit.readers import read_results
from kvbench.cli import main as cli
from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, unpack

DATA = Path(__file__).parents[2] / "data" / "audit.tar.xz"
FILES = {
    "vllm": "result.json", "sglang": "result.jsonl", "guidellm": "benchmarks.json", "aiperf": "artifacts",
    "infperf": "reports",
}  # fmt: skip
CLEAN = ("clean", "clean-rate", "clean-summary", "queued-server", "warm/first")
PLANTED = {
    "chunks4": {"chunks"},
    "failing": {"failures"},
    "failing-mid": {"failures"},
    "failing-all": {"failures"},
    "starved": {"client"},
    "few71": {"samples"},
    "queued-client": {"queue", "load"},
    "short-ramp": {"ramp", "samples"},
}
ALSO = {  # what follows from the fault in that tool's file, or what its format hides
    ("vllm", "chunks4"): {"peak"},
    ("sglang", "chunks4"): {"peak"},
    ("guidellm", "chunks4"): {"names"},
    ("guidellm", "short-ramp"): {"names"},
    ("guidellm", "starved"): {"queue", "load", "names"},
    ("aiperf", "starved"): {"queue", "load"},
    ("infperf", "starved"): {"queue", "load"},
    ("infperf", "short-ramp"): {"load"},  # it spread the 16 over a second: 5 ran at once
    ("guidellm", "warm/first"): {"names"},
}
HIDDEN = {("sglang", "queued-client"): {"queue"}, ("aiperf", "queued-client"): {"queue"}}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    unpack(DATA.read_bytes(), folder)
    return folder / "audit"


def read(files, tool, scenario):
    folder = files / tool / scenario
    (result,) = read_results(folder / FILES[tool] if (folder / FILES[tool]).exists() else folder)
    return result


def broken(result):
    return {answer.check for answer in audit(result) if answer.outcome == BROKEN}


def cases():
    with tarfile.open(DATA) as archive:
        names = {Path(name).parts[1:] for name in archive.getnames()}
    runs = {(parts[0], "/".join(parts[1:3])) for parts in names if len(parts) > 2 and parts[1] == "warm"}
    others = {(parts[0], parts[1]) for parts in names if len(parts) > 2 and parts[1] != "warm"}
    return sorted((tool, name) for tool, name in runs | others if not name.endswith(".jsonl"))


@pytest.mark.parametrize(("tool", "scenario"), cases())
def test_each_planted_fault_is_found_and_nothing_else(files, tool, scenario):
    result = read(files, tool, scenario)
    expected = PLANTED.get(scenario, set()) | ALSO.get((tool, scenario), set())
    if scenario == "warm/second":
        expected = {"cache"} if tool != "vllm" else set()  # vLLM's files tell nothing of a cache
    assert broken(result) == expected - HIDDEN.get((tool, scenario), set())
    open_checks = {answer.check for answer in audit(result) if answer.outcome == OPEN}
    assert HIDDEN.get((tool, scenario), set()) <= open_checks
    assert all(answer.advice for answer in audit(result) if answer.outcome == OPEN)


def test_every_tool_and_fault_is_there(files):
    seen = cases()
    assert {tool for tool, _ in seen} == set(FILES)
    for tool in ("vllm", "guidellm", "aiperf", "infperf"):
        assert {s for t, s in seen if t == tool} >= {"clean", "clean-rate", *PLANTED, "warm/first", "warm/second"}


@pytest.mark.parametrize("tool", FILES)
def test_figures_are_by_one_definition_whatever_a_tool_calls_them(files, tool):
    clean, chunks = read(files, tool, "clean"), read(files, tool, "chunks4")
    assert clean.figure("ttft") == pytest.approx(52, abs=4)
    assert clean.figure("tpot") == pytest.approx(20, abs=0.3)
    assert chunks.figure("tpot") == pytest.approx(4.76, abs=0.1)
    assert chunks.tokens_a_chunk == pytest.approx(4.0, abs=0.05)
    assert chunks.output_tokens_per_s == pytest.approx(713, abs=10)
    assert clean.asked.concurrency == 8 and chunks.asked.concurrency == 4
    against = read(files, "vllm", "chunks4")
    figures = {figure.name: figure for figure in shared_figures(against, chunks)}
    assert figures["gap mean [ms]"].second == pytest.approx(20.0, abs=0.2)


def test_failures_name_their_reason_and_all_failing_is_no_measurement(files):
    for tool in ("vllm", "guidellm", "aiperf", "infperf"):
        (failing,) = [a for a in audit(read(files, tool, "failing")) if a.check == "failures"]
        assert "67 of 201" in failing.sentence and ("500" in failing.sentence or "Server Error" in failing.sentence)
        every = read(files, tool, "failing-all")
        assert (every.completed, every.failed) == (0, 50)


def test_a_limit_is_said_at_the_limit(files):
    result = replace(read(files, "vllm", "clean"), requests=(), requests_per_s=None)
    for changes, check in (
        ({"completed": 100}, None),
        ({"completed": 99}, "samples"),
        ({"failed": 2, "completed": 198}, None),
        ({"failed": 3, "completed": 197}, "failures"),
        ({"cached_share": 0.05}, None),
        ({"cached_share": 0.051}, "cache"),
        ({"token_counts": [("tokens", 100.0, 102.0)]}, None),
        ({"token_counts": [("tokens", 100.0, 97.9)]}, "token_counts"),
        ({"chunk_tokens": 1.1}, None),
        ({"chunk_tokens": 1.11}, "chunks"),
        ({"concurrency": 7.21}, None),
        ({"concurrency": 7.19}, "load"),
        ({"peak_tokens_per_s": 360.2}, None),
        ({"peak_tokens_per_s": 360.0}, "peak"),
        ({"misnamed": ("x", 22.9, "y", 20.0)}, None),
        ({"misnamed": ("x", 23.1, "y", 20.0)}, "names"),
    ):
        assert broken(replace(result, **changes)) == ({check} if check else set()), changes


def test_a_warm_second_run_is_seen_where_the_files_do_not_tell(files):
    first, second = read(files, "vllm", "warm/first"), read(files, "vllm", "warm/second")
    assert "warm cache" in comparable(first, second).sentence
    assert "warm cache" in comparable(second, first).sentence and comparable(first, first).outcome != BROKEN
    cold, warm = read_results(files / "sglang" / "warm" / "result.jsonl")
    assert "warm cache" in comparable(cold, warm).sentence


def test_results_at_other_loads_or_broken_ones_are_not_compared(files):
    clean, chunks = read(files, "vllm", "clean"), read(files, "vllm", "chunks4")
    answer = comparable(clean, chunks, (audit(clean), audit(chunks)))
    assert answer.outcome == BROKEN and "concurrency (8 and 4)" in answer.sentence and "chunk" in answer.sentence
    other = replace(clean, model="another")
    assert "model" in comparable(clean, other).sentence
    unknown = comparable(clean, read(files, "guidellm", "clean"))
    assert unknown.outcome == OPEN and "prompt tokens" in unknown.sentence
    told = comparable(read(files, "aiperf", "clean"), read(files, "guidellm", "clean"))
    assert told.outcome not in (BROKEN, OPEN)


def test_reports_without_requests_and_results_of_others_are_read(files, tmp_path):
    (example,) = read_results(files / "br_v0_2_example.yaml")
    assert example.tool == "llm-d" and example.completed == 500 and not broken(example)
    for name in ("llmd-guidellm_0.yaml", "llmd-infperf.yaml"):  # one in ms, the other in s
        (converted,) = read_results(files / name)
        assert converted.figure("ttft") == pytest.approx(52, abs=3) and not broken(converted)
    # A result of InferenceX (Kimi-K2.5 on MI355X with speculative decoding), with its figures in seconds.
    published = {
        "hw": "mi355x", "conc": 64, "image": "vllm/vllm-openai-rocm:v0.21.0", "model": "moonshotai/Kimi-K2.5",
        "framework": "vllm", "spec_decoding": "mtp", "isl": 8192, "osl": 1024, "tp": 8, "tput_per_gpu": 234.47,
        "mean_ttft": 3.53879, "median_ttft": 2.34747, "p99_ttft": 25.79388, "mean_tpot": 0.300136, "mean_itl": 0.844411,
        "median_itl": 0.926923, "mean_e2el": 279.75744, "mean_intvty": 3.3318, "std_intvty": 69.473,
    }  # fmt: skip
    (tmp_path / "agg.json").write_text(json.dumps(published))
    (result,) = read_results(tmp_path / "agg.json")
    assert result.figure("ttft", "p50") == pytest.approx(2347.47) and broken(result) == {"chunks"}


@pytest.fixture
def command(capfd):
    def run(*words):
        with pytest.raises(SystemExit) as left:
            cli.main(["audit", *map(str, words)])
        return left.value.code, "".join(capfd.readouterr())

    return run


def test_the_command_fails_for_what_is_broken_and_writes_it_for_ci(command, files, tmp_path):
    clean, chunks = (files / "vllm" / name / "result.json" for name in ("clean", "chunks4"))
    code, said = command(clean)
    assert code == 0 and "run again with" in said.replace("\n", " ")
    code, said = command(chunks, "--output-dir", tmp_path / "out")
    assert code == 1 and "4.77 ms" in said
    verdict = read_json(tmp_path / "out" / "verdict.json")
    assert verdict["kind"] == "audit" and verdict["outcome"] == "fail"
    failed = [finding["id"].partition("/")[0] for finding in verdict["findings"] if finding["outcome"] == "fail"]
    assert failed == ["chunks", "peak"]
    assert ET.parse(tmp_path / "out" / "junit.xml").getroot().get("failures") == "2"
    assert "4.0 tokens" in (tmp_path / "out" / "summary.md").read_text()
    assert command(chunks, "--allow", "chunks", "--allow", "peak")[0] == 0
    code, said = command(chunks, "--allow", "chunk")
    assert code == 2 and "chunks" in said
    code, said = command(clean, "--json")
    assert code == 0 and json.loads(said)["facts"] == {"results": 1}


def test_three_runs_of_one_command_are_more_than_one(command, files, tmp_path):
    clean = files / "vllm" / "clean" / "result.json"
    assert "one run tells nothing" in " ".join(command(clean, clean)[1].split())  # the same file twice is one run
    again = []
    for number in (1, 2):
        again.append(tmp_path / f"{number}.json")
        again[-1].write_text(json.dumps(read_json(clean) | {"duration": 10.6 + number / 100}))
    code, said = command(clean, *again)
    assert code == 0 and "3 runs" in said and "are comparable" in " ".join(said.split())


def test_a_file_with_one_load_after_another_is_not_compared_with_itself(command, files, tmp_path):
    clean = read_json(files / "vllm" / "clean" / "result.json")
    loads = []
    for users in (4, 8, 16):
        seconds = 85.3 / users
        rates = {"request_throughput": 240 / seconds, "output_throughput": 3840 / seconds}
        loads.append(clean | {"max_concurrency": users, "duration": seconds, "max_output_tokens_per_s": 800} | rates)
    (tmp_path / "sweep.jsonl").write_text("\n".join(map(json.dumps, loads)))
    code, said = command(tmp_path / "sweep.jsonl")
    assert code == 0 and "comparable" not in said
    code, said = command(tmp_path / "sweep.jsonl", files / "vllm" / "clean" / "result.json")
    assert code == 0 and said.count(" | ") == 1
    chunks = files / "vllm" / "chunks4" / "result.json"
    allowed = [word for check in ("chunks", "peak") for word in ("--allow", check)]
    assert command(chunks, chunks, *allowed)[0] == 0  # of the comparison, too


def test_ordinary_files_are_not_called_broken(files):
    """Traffic that is not as even as a mock's: prefills between decode steps, templates, limits of time, old files."""
    clean = read(files, "vllm", "clean-summary")
    gaps = {"mean": 50.0, "p50": 20.0, "p99": 400.0}  # decode steps of 20 ms, and stalls by others' prefills
    tokens = {"mean": 48.0}
    assert broken(replace(clean, latencies=clean.latencies | {"gap": gaps, "tpot": tokens}, requests=())) == set()
    inferred = clean.latencies | {"gap": {"mean": 24.0}, "tpot": {"mean": 20.0}}  # mixed lengths alone can do that
    chunks = next(a for a in audit(replace(clean, latencies=inferred, requests=())) if a.check == "chunks")
    assert chunks.outcome == OPEN
    slow = replace(read(files, "vllm", "clean-rate"), duration_s=45.0, requests_per_s=None, output_tokens_per_s=None)
    starts = [replace(r, start_s=i / 10, latency_s=15.0) for i, r in enumerate(slow.requests)]
    slow = replace(slow, asked=replace(slow.asked, rate=10.0), requests=starts)
    assert "load" not in broken(slow)
    assert "load" in broken(replace(slow, requests=[replace(r, start_s=2 * r.start_s) for r in starts]))
    quick = replace(read(files, "guidellm", "clean-rate"), queue_ms=15.0)
    assert broken(quick) == set() and {"queue", "client"} & broken(replace(quick, queue_ms=21.0))


def test_figures_that_the_files_own_requests_deny_are_broken(files, tmp_path):
    data = read_json(files / "vllm" / "clean" / "result.json")
    for name in ("mean_ttft_ms", "median_ttft_ms", "request_throughput", "output_throughput"):
        for factor, wrong in ((1.02, set()), (1.05, {"figures"}), (0.9, {"figures"})):
            (tmp_path / "result.json").write_text(json.dumps(data | {name: data[name] * factor}))
            (result,) = read_results(tmp_path / "result.json")
            assert broken(result) - {"peak"} == wrong, (name, factor)


def test_a_file_without_numbers_is_no_ok(command, files, tmp_path):
    data = read_json(files / "vllm" / "clean" / "result.json")
    for name, change, code in (
        ("zero", {"duration": 0.0}, 4),
        ("negative", {"duration": -3.0}, 4),
        ("short", {"ttfts": data["ttfts"][:100]}, 2),
        ("text", {"ttfts": "abc"}, 2),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(data | change))
        assert command(tmp_path / f"{name}.json")[0] == code, name
    (tmp_path / "deep.json").write_text("[" * 200_000)
    code, said = command(tmp_path / "deep.json", files / "vllm" / "clean" / "result.json")
    assert code == 2 and "deep.json" in said and "240 samples" in said  # the good one is audited all the same


def test_a_folder_of_folders_is_gone_through(files):
    assert len(read_results(files / "vllm" / "warm")) == 2 and len(read_results(files / "aiperf" / "clean")) == 1


def test_fields_that_need_a_second_look(files, tmp_path):
    data = read_json(files / "vllm" / "failing" / "result.json")
    del data["failed"]  # as older versions of vLLM
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert "failures" in broken(read_results(tmp_path / "old.json")[0])
    data = read_json(files / "guidellm" / "clean" / "benchmarks.json")
    (benchmark,) = data["benchmarks"]
    benchmark["config"]["constraints"] = {"max_duration": {"args": {"seconds": 30}}}
    benchmark["scheduler_metrics"]["requests_made"]["incomplete"] = 8
    (tmp_path / "cut.json").write_text(json.dumps(data))
    assert not broken(read_results(tmp_path / "cut.json")[0])
    summary = (files / "infperf" / "clean" / "reports" / "summary_lifecycle_metrics.json").read_text()
    (tmp_path / "summary_lifecycle_metrics.json").write_text(summary)
    assert not broken(read_results(tmp_path / "summary_lifecycle_metrics.json")[0])


def test_what_is_no_result_is_one_sentence(command, files, tmp_path):
    whole = (files / "vllm" / "clean" / "result.json").read_text()
    (tmp_path / "cut.json").write_text(whole[: len(whole) // 2])
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "strange.json").write_text(json.dumps(json.loads(whole) | {"ttfts": {"a": 1}, "latencies": 7}))
    (tmp_path / "empty").mkdir()
    for name in ("cut.json", "other.json", "strange.json", "empty", "nothing.json"):
        code, said = command(tmp_path / name)
        assert code == 2 and name in said and "Traceback" not in said, said
    with pytest.raises(UsageError):
        read_results(tmp_path / "other.json")
    empty = {"request_throughput": 0.0, "completed": 0, "mean_ttft_ms": 0.0}
    (tmp_path / "unmeasured.json").write_text(json.dumps(empty))
    assert command(tmp_path / "unmeasured.json")[0] == 4
