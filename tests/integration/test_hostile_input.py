"""Input that nobody meant, by fixed seeds: it is understood, or refused in one sentence, soon."""

from __future__ import annotations

import copy
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvbench.cli.main import main
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.measure.server_state import hit_bounds
from kvbench.measure.warm_up import captured_sizes, warm_up_concurrency
from kvbench.requests.request import RequestSpec
from kvbench.targets.presets import GENERIC, PRESETS
from kvbench.targets.running import OpenAITarget
from kvbench.workload.design import LoadPoint
from tests.support.scripted_http import scripted_server

WORKLOAD = yaml.safe_load("""
name: tiny
seed: 1
model: {config: llama-32m, dtype: float32}
engine: {layout: paged, page_size: 16, kv_budget: 65MiB, max_model_len: 256, max_num_seqs: 8}
sweep: {layout: [contiguous], page_size: [8, 16]}
profiles: {cpu: {max_minutes: 3}}
load:
  {concurrency: [1, 2], num_requests: 4, repeats: 1, slo: {ttft_ms: 100}, prompts: {
    kind: synthetic, classes: [{name: a, share: 1.0, prompt_tokens: [8, 16], output_tokens: 8}],
    shared_prefix: [{tokens: 8, share: 0.5, families: 2}]}}
""")
VALUES: list[Any] = [
    None, True, False, 0, -1, 3, 0.5, 1e308, float("inf"), float("nan"), "", "x", "3", "x" * 10_000, "\u202e",
    [], [[]], [5], {}, {"a": {}}, [{}] * 50, [1, "x"],
]  # fmt: skip
IN_YAML: list[Any] = [
    *VALUES, 2**31, 2**62, "../..", "~", "inf", "64MiB", "9" * 17 + "TiB", "-1MiB", "1e999", "%s{}", {1: 2}, {None: 1},
    {"kind": "trace", "path": "/dev/null"}, {"kind": "text"}, {"mean": 1e300, "max": -1},
]  # fmt: skip
YAML_TEXTS = [
    "[" * 50_000, "- " * 50_000, '"\\0"', '"\\ud800"', "9" * 5000, f"[1{'0' * 400}]", "0x" + "f" * 9000,
    "2020-99-99", "!!int x", "!!set {a}", "!!binary aGVq", "{[1]: 2}", "&a [*a]", "&a {<<: *a}", "*nowhere",
    "!!python/object:os.system x", "1:" * 3000 + "1", "{a: 1, a: 2}", "\t", "\x00", "? x", "|\n  text", "'",
]  # fmt: skip
ANSWERS: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "m", "max_model_len": 4096, "meta": {"n_vocab": 8192, "n_ctx": 2048}}]},
    "/server_info": {
        "model": {"name": "m", "vocab_size": 8192},
        "engine": {"max_model_len": 4096, "page_size": 16, "max_num_seqs": 8, "enable_prefix_caching": True},
        "capacity": {},
    },
    "/props": {"default_generation_settings": {"n_ctx": 512}},
    "/slots": [{"id": 0}],
    "/metrics": "vllm:num_requests_running 1\n",
}
IN_JSON: list[Any] = [
    *VALUES, 2**31, 10**400, "\ud800", "\0", "\x1b[2J", "a\nb", {"id": 5}, {"id": None}, [{"id": "m"}, 5],
    {"engine": 5},
]  # fmt: skip
UNEXPECTED = "something unexpected went wrong"  # what kvbench says of its own faults
BODIES = ["", "not json", "[" * 100_000, '{"data":' * 100_000, "9" * 5000, "null", "\0", "<script" * 9999]


def places(data: object, path: tuple = ()) -> list[tuple]:
    """Every key and index, with those above it."""
    below = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in below for place in ((*path, key), *places(value, (*path, key)))]


def at(data: Any, path: list) -> Any:
    for key in path:
        data = data[key]
    return data


def bomb(merge: bool) -> str:
    """Under 1 kB, and 9^9 values."""
    rows = ["a: &a {x: 1, y: 2}" if merge else "a: &a [x, x, x]"]
    for before, name in zip("abcdefghi", "bcdefghij", strict=True):
        aliases = ", ".join([f"*{before}"] * 9)
        rows.append(f"{name}: &{name} " + (f"{{<<: [{aliases}]}}" if merge else f"[{aliases}]"))
    return "\n".join(rows) + "\n"


def hostile_workload(seed: int) -> str:
    rng, data, marks = random.Random(seed), copy.deepcopy(WORKLOAD), []
    for number in range(rng.randint(1, 3)):
        *above, last = rng.choice(places(data))
        match rng.randrange(4):
            case 0:
                del at(data, above)[last]
            case 1:
                at(data, above)[last] = f"MARK{number}"
                marks.append(f"MARK{number}")
            case _:
                at(data, above)[last] = copy.deepcopy(rng.choice(IN_YAML))
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    for mark in marks:
        text = text.replace(mark, rng.choice(YAML_TEXTS))
    cut = rng.randrange(len(text))
    return [bomb(seed % 2 == 0) + text, text[:cut] + rng.choice("[]{}:,&*!|>'\"%@`#\t\0é") + text[cut:], text[:cut],
            *[text] * 5][rng.randrange(8)]  # fmt: skip


def few_and_many(few, many):
    """Few seeds, and in the full ring many others."""
    return pytest.mark.parametrize("seeds", [range(few), pytest.param(range(few, many), marks=pytest.mark.full)])


@few_and_many(40, 300)
def test_a_workload_file_is_planned_or_refused(tmp_path, capsys, monkeypatch, seeds):
    monkeypatch.chdir(tmp_path)
    codes = set()
    for seed in seeds:
        (tmp_path / "w.yaml").write_text(hostile_workload(seed), encoding="utf-8")
        began = time.thread_time()
        with pytest.raises(SystemExit) as ended:
            main(["plan", "w.yaml"] if seed % 2 else ["sweep", "w.yaml", "--dry-run"])
        err = capsys.readouterr().err
        codes.add(ended.value.code)
        refused = err.startswith("error: ") and err.count("\n") == 1 and len(err) < 20_000
        assert (ended.value.code, refused) in ((0, False), (2, True)) and UNEXPECTED not in err, (seed, err[:2000])
        assert seed == seeds[0] or time.thread_time() - began < 4, (seed, err[:2000])  # the first one imports
    assert codes == {0, 2} and [path.name for path in tmp_path.iterdir()] == ["w.yaml"]


@few_and_many(20, 100)
def test_what_a_server_says_of_itself_is_understood_or_refused(seeds):
    outcomes, requests = set(), [RequestSpec(number, "a", (1, 2, 3), None, max_tokens=4) for number in range(9)]
    for seed in seeds:
        rng, answers = random.Random(seed), copy.deepcopy(ANSWERS)
        for _ in range(rng.randint(1, 2)):
            *above, last = rng.choice(places(answers))
            at(answers, above)[last] = copy.deepcopy(rng.choice(IN_JSON if above or rng.random() < 0.4 else BODIES))
        preset = (GENERIC, GENERIC, PRESETS["llamacpp"], PRESETS["sglang"])[seed % 4]
        with scripted_server({path: (rng.choice([200] * 9 + [500]), body) for path, body in answers.items()}) as server:
            target, began, why = OpenAITarget(server.url, preset=preset), time.thread_time(), None
            try:
                target.start({}, Path())
                sizes = (target.model.vocab_size, target.model.max_model_len)
                assert target.model.name.isprintable() and all(0 < size < 2**31 for size in sizes), seed
                info = target.server_info()
                json.dumps([target.version(), info.to_json()], ensure_ascii=False).encode()
                load = SimpleNamespace(max_concurrency=None, cache_state="steady")
                setup = SimpleNamespace(info=info, settings={}, load=load)
                point = LoadPoint("c9", "closed", 9, None, 9)
                assert captured_sizes(warm_up_concurrency(setup, point, requests))[0] == 1
                hit_bounds(load, requests, info, None, None)
                target.metrics()
                target.reset_prefix_cache()
            except (UsageError, MeasurementError) as error:
                why = str(error)
            finally:
                target.stop()
        assert why is None or (why.isprintable() and len(why) < 2000), (seed, why)
        assert time.thread_time() - began < 2, seed
        outcomes.add(why is None)
    assert outcomes == {True, False}
