"""Quality in two processes: who measures what, and that the result is that of one."""

from __future__ import annotations

import pytest

from kvbench.common.errors import UsageError
from kvbench.quality import parts
from kvbench.quality.parts import QualityPart, measure_parts, split
from kvbench.workload.design import Configuration, plan_sweep
from kvbench.workload.file import Workload, resolve

DATA = {
    "name": "tiny",
    "model": {"config": "llama-20m", "load_format": "dummy"},
    "engine": {"device": "cpu", "kv_budget": "8MiB", "max_model_len": 512, "max_num_seqs": 4},
    "sweep": {"kv_cache_dtype": ["int8_per_token_head", "int4_per_token_head"], "page_size": [8, 32]},
    "load": {
        "mode": "closed",
        "concurrency": [2],
        "num_requests": [4],
        "prompts": {
            "kind": "synthetic",
            "classes": [{"name": "chat", "share": 1.0, "prompt_tokens": [8, 40], "output_tokens": [16, 24]}],
        },
    },
}


def part(**changes: object) -> QualityPart:
    workload: Workload = resolve({**DATA, **changes}, profile="cpu", source=None)
    return QualityPart(workload, plan_sweep(workload)[0].configurations)


def ids(configurations: list[Configuration]) -> list[str]:
    return [configuration.config_id for configuration in configurations]


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "usable_cores", lambda: 2)


@pytest.mark.usefixtures("two_cores")
def test_configurations_of_one_kv_dtype_stay_together_and_each_process_has_half_of_the_cores():
    first, second = split(whole := part())
    assert ids(first.configurations) == ["paged", "paged-p8", "paged-p32"]
    assert ids(second.configurations) == ["paged-int8_per_token_head", "paged-int4_per_token_head"]
    assert first.threads == second.threads == 1 and first.workload is whole.workload


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("changes", [
    {"sweep": {"page_size": [8]}},  # one KV dtype
    {"engine": {**DATA["engine"], "device": "cuda"}},
    {"model": {"path": "kvbench-tiny"}},  # weights of its own, of which two copies may have no room
])  # fmt: skip
def test_one_process_measures_what_two_would_not_measure_faster(changes):
    whole = part(**changes)
    assert split(whole) == (whole._replace(threads=2), None)


@pytest.mark.usefixtures("two_cores")
def test_one_core_is_not_shared(monkeypatch):
    monkeypatch.setattr(parts, "usable_cores", lambda: 1)
    assert split(part())[1] is None


@pytest.mark.usefixtures("two_cores")
def test_what_the_other_process_refuses_is_said(monkeypatch):
    monkeypatch.setattr(QualityPart, "measure", lambda self, say: None)  # of this process
    refused = part()._replace(model="nowhere")
    monkeypatch.setattr(parts, "_is_small", lambda whole: True)
    with pytest.raises(UsageError, match="nowhere"):
        measure_parts(refused, print)


@pytest.mark.full
@pytest.mark.usefixtures("two_cores")
def test_the_result_is_that_of_one_process():
    whole = part(sweep={"kv_cache_dtype": ["int8_per_token_head"]})
    said: list[str] = []
    two, one = measure_parts(whole, said.append), whole._replace(threads=1).measure()
    assert list(two.configurations) == ids(whole.configurations) and two.configurations == one.configurations
    assert (two.control, two.limits, two.facts.measurements) == (one.control, one.limits, 2)
