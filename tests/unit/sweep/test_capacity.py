"""What ``kvbench plan`` says a budget holds: against the arithmetic of the formats, and uncut."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from kvbench.cli.main import cli
from kvbench.runs.results import Capacity
from kvbench.sweep.plan import Lengths, at_once
from kvbench.targets.builtin import check_configuration
from kvbench_engine.model.spec import find_model

ENGINE = {
    "model": "llama-32m", "load_format": "dummy", "device": "cpu", "dtype": "float32", "kv_budget": "65MiB",
    "max_model_len": 256, "max_num_seqs": 8,
}  # fmt: skip
# llama-32m: 8 layers x 4 KV heads x (64 + 64) codes a token; the page table: 8 sequences x 16 pages x 8 bytes.
CODES = 8 * 4 * (64 + 64)
BUDGET, TABLE = 65 * 2**20, 8 * 16 * 8


def test_swap_space_in_whole_pages_and_the_budget_where_none_is_given():
    swap = {**ENGINE, "preemption_mode": "swap"}
    known = check_configuration({**swap, "swap_space": "10MB"})
    assert known.swap_space_bytes == 10**7
    assert known.swap_tokens == 10**7 // (16 * CODES * 4) * 16
    assert check_configuration(swap).swap_space_bytes == BUDGET
    with pytest.raises(ValueError, match=r"swap_space 1024 .* does not hold one page"):
        check_configuration({**swap, "swap_space": 1024})


WORKLOAD = {
    "name": "tiny",
    "model": {"config": "llama-32m", "dtype": "float32"},
    "engine": {
        "device": "cpu", "layout": "contiguous", "reservation": "max", "page_size": 16, "kv_budget": "65MiB",
        "max_model_len": 256, "max_num_seqs": 8,
    },
    "sweep": {
        "layout": ["paged"], "reservation": ["pow2"], "kv_cache_dtype": ["int8_per_token_head"],
        "preemption_mode": ["swap"], "swap_space": ["1MiB"],
    },
    "load": {
        "concurrency": 1, "num_requests": 1,
        "prompts": {
            "kind": "synthetic", "classes": [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 8}],
        },
    },
}  # fmt: skip


def test_plan_is_not_cut_in_a_pipe_and_names_what_a_narrow_terminal_has_no_room_for(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(WORKLOAD))
    assert cli.main(["plan", str(tmp_path / "w.yaml"), "--profile", "cpu"], standalone_mode=False) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if line.lstrip().startswith(("contiguous-", "paged-"))]
    rows = {config_id: entries for config_id, *entries in lines}
    slab = 65 * 2**20 - 64
    assert rows == {
        "contiguous-max": ["65.0", "16,384", "0", "256", "16", "4,159", "0.1", "16", "0.0", "0"],
        "paged-p16": ["65.0", "16,384", "0", "16", "259", "4,144", "1.0", "16", "0.0", "0"],
        "contiguous-pow2": ["65.0", "16,384", "0", "pow2", "–", "4,159", "0.1", "16", "0.0", "0"],
        "contiguous-max-int8_per_token_head": [
            "65.0", "4,352", "256", "256", str(slab // 4352 // 256), f"{slab // 4352:,}", "0.1", "61", "0.0", "0",
        ],
        "contiguous-max-swap": ["65.0", "16,384", "0", "256", "16", "4,159", "0.1", "16", "65.0", "4,160"],
    }  # fmt: skip
    assert "…" not in out and "swap_space changes nothing" in " ".join(out.split()) and "not shown" not in out
    monkeypatch.setenv("COLUMNS", "60")
    narrow = plan(capsys, str(tmp_path / "w.yaml"))
    assert "page table KiB, swap MiB, swap tokens" in narrow.split("not shown")[1]


FITS = ("--input-len", "600", "--output-len", "150", "--concurrency", "20")


def plan(capsys, *words):
    assert cli.main(["plan", *words, "--profile", "cpu"], standalone_mode=False) == 0
    return " ".join(capsys.readouterr().out.split())


# 256 MiB less 64 sequences x 128 pages x 8 bytes hold 1,023 pages of 16 tokens, or 21 requests of 47 pages.
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*FITS, "--vary", "kv_cache_dtype=auto,fp8"),
         ["20 x 750 = 15,000 tokens; paged-p16 holds 16,368: memory is not what limits", "KV dtype cannot help"]),
        ((*FITS[:-1], "22"), ["memory limits paged-p16 (about 21 at once)"]),
        ((*FITS[:-1], "40", "--vary", "layout=paged,contiguous", "--vary", "kv_cache_dtype=auto,fp8"),
         ["paged-p16 (about 21 at once), contiguous (about 15 at once)", "paged-p16-fp8_e4m3: room for all"]),
        (("--input-len", "100:1000", "--output-len", "100", "--concurrency", "24"),
         ["only the longest requests together outgrow paged-p16"]),
        ((*FITS[:-2], "--request-rate", "3"),
         ["memory limits once more are in flight than fit: paged-p16 (about 21 at once)"]),
        ((*FITS[:-2], "--request-rate", "inf", "--num-prompts", "40"), ["40 x 750", "limits paged-p16 (about 21"]),
        ((*FITS[:-1], "40", "--vary", "max_num_seqs=8,64"),
         ["max_num_seqs admits fewer than 40 to paged-p16 (8)", "paged-p16: room for all",
          "memory limits paged-p16-seqs64 (about 21 at once)"]),
        # 16,368 tokens hold 6 requests of 2,600 tokens; of the 600 beyond the shared 2,000 they hold 23
        (("--input-len", "500", "--output-len", "100", "--prefix-len", "2000", "--concurrency", "20", "--vary",
          "enable_prefix_caching=false,true"), ["limits paged-p16 (about 6 at once); paged-p16-prefix: room for all"]),
    ],
    ids=["fits", "one too many", "some fit", "the longest", "open loop", "at once", "batch limit", "prefix caching"],
)  # fmt: skip
def test_plan_says_what_limits_a_load(capsys, words, says):
    said = plan(capsys, *words)
    assert all(each in said for each in says), said


def test_the_limit_is_where_the_pages_end(capsys):
    assert "memory limits" not in plan(capsys, *FITS[:-1], "21")


@pytest.mark.parametrize(
    ("settings", "prefix", "held"),
    [
        ({"layout": "paged"}, 0, 1000 / (47 + 3 * 10)),  # 37 of 47 pages are full of the prompt and shared by all four
        ({"layout": "paged", "enable_prefix_caching": True}, 320, (16_000 - 320) // 16 / (27 + 3 * 10)),
        ({"layout": "contiguous"}, 0, 40 / 4),
        ({"layout": "contiguous", "reservation": "oracle"}, 0, 16_000 / (4 * 750)),
        ({"layout": "contiguous", "reservation": "pow2"}, 0, 16_000 / (4 * (600 + 256))),
    ],
)
def test_sequences_of_a_request_share_its_prompt_in_pages_only(settings, prefix, held):
    known = Capacity(capacity_tokens=16_000, page_size=16, num_pages=40, max_model_len=1024)
    sizes = Lengths(np.array([600]), np.array([150]), np.array([prefix]), prefix, widths=np.array([4]))
    assert at_once(SimpleNamespace(settings=settings), known, sizes)[0] == pytest.approx(held)


def test_a_sweep_says_once_where_layers_with_a_window_keep_all_tokens(tmp_path, capsys):
    """Where the other layers have KV of another size, and sequences are longer than the window."""
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(WORKLOAD))
    config = {**find_model("llama-20m", "dummy").config, "num_hidden_layers": 62, "sliding_window": 1024,
              "sliding_window_pattern": 6, "global_head_dim": 128, "max_position_embeddings": 4096}  # fmt: skip
    (tmp_path / "m.json").write_text(json.dumps(config))
    simulated = ["--simulate", "--device", "H200", "--model", str(tmp_path / "m.json"), "-o"]
    simulated.append("sweep={page_size: [16, 32]}")
    for length, times in ((1024, 0), (1025, 1)):
        arguments = ["sweep", "--dry-run", str(tmp_path / "w.yaml"), *simulated, "-o", "engine={}", "-o"]
        assert cli.main([*arguments, f"engine.max_model_len={length}"], standalone_mode=False) == 0
        assert capsys.readouterr().out.count("52 of 62 layers look back 1024 tokens") == times


@pytest.mark.parametrize(
    ("config", "length", "without_effect"),
    [
        ("llama-20m", 128, {"latent_kv", "free_outside_window"}),
        ("deepseek-17m", 128, {"free_outside_window"}),
        ("gemma3-22m", 128, {"latent_kv"}),  # its window is 64 tokens
        ("gemma3-22m", 64, {"latent_kv", "free_outside_window"}),
    ],
)
def test_a_sweep_names_settings_that_change_no_kv_of_the_model(config, length, without_effect, tmp_path, capsys):
    model, engine = {"config": config, "dtype": "float32"}, {"device": "cpu", "max_model_len": length, "page_size": 4}
    workload = {**WORKLOAD, "model": model, "engine": engine | {"kv_budget": "32MiB"}}
    named = set()
    for setting in ("latent_kv", "free_outside_window"):
        (tmp_path / "w.yaml").write_text(yaml.safe_dump({**workload, "sweep": {setting: [False]}}))
        assert cli.main(["sweep", "--dry-run", str(tmp_path / "w.yaml")], standalone_mode=False) == 0
        if f"{setting} changes nothing" in " ".join(capsys.readouterr().out.split()):
            named.add(setting)
    assert named == without_effect
