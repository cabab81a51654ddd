"""kvbench trace describe: the tables, the JSON and the page, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvbench.cli.main import main
from kvbench.trace_analysis.describe import describe
from kvbench.trace_analysis.page import arrivals_figure, cache_figure, lengths_figure, waste_figure
from kvbench.traces.read import read_trace

ROOT = Path(__file__).resolve().parents[3]
TALK = {
    "conversations": [
        {"from": "human", "value": "<b>To be, or not to be</b>, that is the question:"},
        {"from": "gpt", "value": "Whether 'tis nobler in the mind to suffer"},
        {"from": "human", "value": "The slings and arrows of outrageous fortune"},
        {"from": "gpt", "value": "Or to take arms"},
    ]
}


IN_MS = ("--format", "mooncake")  # pages of 16 might be of another format, and its times in seconds


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["trace", "describe", *map(str, arguments)])
    return ended.value.code, *capsys.readouterr()


@pytest.fixture
def pages(tmp_path) -> Path:
    """16 requests, two a second, of the page 1 and one of two others; 20 tokens in, 4 out."""
    rows = [
        {"timestamp": 500 * i, "input_length": 20, "output_length": 4, "hash_ids": [1, 2 + i % 2]} for i in range(16)
    ]
    path = tmp_path / "[b]<i>t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_terminal_has_lengths_rate_burstiness_memory_and_prefixes(capsys, pages):
    code, out, _ = run(capsys, pages, *IN_MS, "--page-size", 16, "--pages", "2,3", "--kv-bytes-per-token", 1024)
    text = " ".join(out.split())
    assert code == 0
    for words in (
        "[b]<i>t.jsonl: 16 requests, format mooncake.",
        "total tokens 24 24 24 24 24 24 384",
        "2.133 requests/s over 7.5 s",
        "1 s 0.00, 10 s unknown",
        "25.00% of pages of 16",
        "90.62% of pages, 92.50% of tokens, 93.75% of full pages",
        "2 32 32 KiB 46.88% 75.00% 51.72% 15",
        "3 48 48 KiB 90.62% 92.50% 100.00% 0",
    ):
        assert words in text, words


def test_json_has_the_same_figures(capsys, pages):
    code, out, _ = run(capsys, pages, *IN_MS, "--page-size", 16, "--json")
    data = json.loads(out)
    assert code == 0 and (data["format"], data["requests"], data["page_size"]) == ("mooncake", 16, 16)
    assert data["totals"] == {"prompt_tokens": 320, "output_tokens": 64, "total_tokens": 384}
    assert data["lengths"]["total_tokens"]["p99"] == 24
    assert data["arrivals"]["rate"] == 16 / 7.5 and data["arrivals"]["fano"] == {"1s": 0.0, "10s": None, "60s": None}
    assert data["memory"]["waste"]["page_16"] == 0.25 and data["sessions"] is None
    cache = data["prefix_cache"]
    assert (cache["pages"], cache["unique_pages"]) == (32, 3)
    assert cache["infinite_cache"]["pages_hit_rate"] == 29 / 32
    assert cache["infinite_cache"]["tokens_hit_rate"] == (15 * 16 + 14 * 4) / 320


def test_the_page_holds_every_figure_and_needs_no_network(capsys, pages, tmp_path):
    target = tmp_path / "page.html"
    code, out, _ = run(capsys, pages, *IN_MS, "--page-size", 16, "--plot", target)
    text = target.read_text(encoding="utf-8")
    assert code == 0 and str(target) in out.replace("\n", "")
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.S)[1])
    assert [f["layout"].get("barmode") or f["data"][0]["type"] for f in figures] == ["scatter", "bar", "scatter", "bar"]
    assert [f["name"] for f in figures[0]["data"]] == ["prompt", "output", "prompt + output"]
    assert "&lt;i&gt;t.jsonl: 16 requests" in text and "<i>t.jsonl" not in text
    assert 'src="http' not in text


def test_the_figures_draw_what_was_counted(pages):
    found = describe((pages,), read_trace(pages, "mooncake", 16), [2, 3])
    prompt, output, both = lengths_figure(found).figure.data
    assert (min(prompt.y), max(prompt.y)) == (0, 100) and set(both.x) == {24}
    assert set(prompt.x) == {20} and set(output.x) == {4}
    requests, tokens = arrivals_figure(found.trace).figure.data
    assert sum(requests.y) * requests.width == pytest.approx(16) and sum(tokens.y) * tokens.width == pytest.approx(320)
    assert requests.x[0] == requests.width / 2 and requests.x[-1] < 7.5 + requests.width
    of_pages, of_tokens = cache_figure(found.cache).figure.data
    assert list(of_pages.x) == [32, 48] and list(of_pages.y) == pytest.approx([1500 / 32, 2900 / 32])
    assert list(of_tokens.y) == pytest.approx([75, 92.5])
    (bars,) = waste_figure(found).figure.data
    assert dict(zip(bars.y, bars.x, strict=True))["pages of 16"] == pytest.approx(75)


def test_texts_are_counted_in_characters_and_with_a_tokenizer_in_tokens(capsys, tmp_path):
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([TALK, TALK]))
    target = tmp_path / "page.html"
    code, out, _ = run(capsys, path, "--plot", target)
    text = " ".join(out.split())
    assert code == 0 and "prompt characters" in text and "--tokenizer" in text and "Sessions: 2, of 2 turns" in text
    assert "characters" in target.read_text(encoding="utf-8")
    code, out, _ = run(capsys, path, "--tokenizer", ROOT / "engine/tokenizer/bpe8k", "--page-size", 4, "--json")
    data = json.loads(out)
    assert code == 0 and data["page_size"] == 4 and data["lengths"]["prompt_tokens"]["min"] > 8
    # Of the first talk, the second turn hits the first; the second talk hits all of the first one.
    first, second = sorted({int(data["lengths"]["prompt_tokens"][k]) for k in ("min", "max")})
    hits = first // 4 + first // 4 + second // 4
    assert data["prefix_cache"]["infinite_cache"]["pages_hit_rate"] == hits / (2 * (first // 4 + second // 4))


def test_sessions_have_turns_and_the_times_between_them(capsys, tmp_path):
    def call(t: float, think: float) -> dict:
        return {"t": t, "in": 8, "out": 2, "hash_ids": [1], "think_time": think}

    inner = {"t": 2.0, "type": "subagent", "requests": [call(0, 0)]}
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({"block_size": 8, "requests": [call(0, 99), inner, call(9, 3), call(30, 5)]}))
    code, out, _ = run(capsys, path)
    text = " ".join(out.split())
    assert code == 0 and "(given by the trace's block_size)" in text
    assert "Sessions: 2, of 2 turns (median; at most 3), 4 s of thinking between them (median; p90 4.8 s)." in text


def test_a_trace_without_page_ids_says_what_is_not_known(capsys, tmp_path):
    path = tmp_path / "v.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n100,28\n50,14\n")
    code, out, _ = run(capsys, path)
    assert code == 0 and "75.0% of it would be used" in " ".join(out.split())
    data = json.loads(run(capsys, path, "--json")[1])
    assert data["prefix_cache"] is None and data["arrivals"] is None and "page ids" in data["prefix_cache_unknown"]
    for flag in ("--page-size", "--pages", "--kv-bytes-per-token"):
        code, out, err = run(capsys, path, flag, 16)
        assert (code, out) == (2, "") and flag in err and "no page ids" in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["T", "--format", "x"], ["'x'", "mooncake"]),
        (["T", "--page-size", "16"], ["16 tokens, Mooncake's 512", "--format mooncake"]),
        (["T", *IN_MS, "--page-size", "16", "--tokenizer", "x"], ["--tokenizer 'x'"]),
        (["T", "--page-size", "30"], ["line 1", "--page-size 30"]),
        (["T", *IN_MS, "--page-size", "16", "--plot", "no/such/x.html"], ["--plot", "cannot be written"]),
        ([], ["FILES"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, pages, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *[pages if a == "T" else a for a in arguments])
    assert code == 2 and "Traceback" not in out + err
    assert all(word in " ".join(err.split()) for word in words), err
