"""What ``kvbench plan`` says a budget holds: against the arithmetic of the formats, and uncut."""

from __future__ import annotations

import pytest
import yaml

from kvbench.cli.main import cli
from kvbench.targets.builtin import check_configuration

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
    assert known["swap_space_bytes"] == 10**7
    assert known["swap_tokens"] == 10**7 // (16 * CODES * 4) * 16
    assert check_configuration(swap)["swap_space_bytes"] == BUDGET
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
    assert cli.main(["plan", str(tmp_path / "w.yaml"), "--profile", "cpu"], standalone_mode=False) == 0
    narrow = capsys.readouterr().out
    row = next(line.split() for line in narrow.splitlines() if line.lstrip().startswith("paged-p16 "))
    assert row[-2:] == ["4,144", "16"] and "page table KiB, swap MiB, swap tokens" in narrow.split("not shown")[1]
