"""Which families no CUDA graph can hold, and what tells: a census over all that are accepted, without their weights.

The models are on the device "meta", so that it counts where a tensor is: what the host reads of its own is no wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvbench_engine.build import may_capture
from kvbench_engine.config import EngineConfig
from kvbench_engine.model.host_waits import HostWaits
from kvbench_engine.model.loader import skip_padding_check
from kvbench_engine.model.spec import find_model
from kvbench_engine.model.support_check import find_host_waits
from tests.support.families import ACCEPTED, write_config

META = torch.device("meta")
# Family -> the first of its operations that waits: experts that are gone through by which ones were chosen, how many
# tokens each has, or numbers that are made on the host in every step.
NOT_CAPTURED = {
    "dbrx": "nonzero",
    "gemma3n_text": "tensor",
    "gemma3n_text shared-kv": "tensor",
    "jetmoe": "tolist",
    "longcat_flash": "nonzero",
    "phimoe": "_to_copy",
}


@pytest.mark.parametrize(
    "act",
    [
        lambda t: t.max().item(),
        lambda t: t[t > 0],
        lambda t: bool((t > 0).all()),
        lambda t: torch.equal(t, t),
        lambda t: t.tolist(),
        lambda t: torch.unique(t),
        lambda t: t.repeat_interleave(t),
        lambda t: t.index_put_((t > 0,), t[:2] + 0),
        lambda t: torch.tensor(0.5, device=t.device),
        lambda t: t.new_tensor([1, 2]),
        lambda t: torch.nn.functional.one_hot(t),
    ],
    ids=["item", "mask", "bool", "equal", "tolist", "unique", "repeat", "put", "tensor", "new_tensor", "one_hot"],
)
def test_what_waits_is_seen(act: Callable[[torch.Tensor], Any]) -> None:
    with torch.no_grad(), HostWaits(torch.device("cpu")) as waits:
        act(torch.arange(3))
    assert waits.found


@pytest.mark.parametrize(
    "act",
    [
        lambda t: t.masked_fill(t > 0, 1),
        lambda t: t.index_put_((t > 0,), t[0]),
        lambda t: t.repeat_interleave(2),
        lambda t: t.repeat_interleave(t, output_size=3),
        lambda t: t[t],
        lambda t: torch.where(t > 0, t, 0),
        lambda t: torch.tensor(0.5),
        lambda t: torch.full((2,), 0.5, device=t.device),
        lambda t: t.float().topk(2),
    ],
    ids=["fill", "put", "repeat", "repeat-size", "index", "where", "host", "full", "topk"],
)
def test_what_does_not_wait_is_not(act: Callable[[torch.Tensor], Any]) -> None:
    with torch.no_grad(), HostWaits(torch.device("cpu")) as waits:
        act(torch.arange(3))
    assert waits.seen and not waits.found


def test_only_the_device_s_own_tensors_count() -> None:
    with torch.no_grad(), HostWaits(META) as waits:
        torch.arange(3).max().item()
        torch.arange(3, device=META).to(torch.int32)
        assert not waits.found
        torch.arange(3).to(META)
    assert waits.found == ["_to_copy"]


def on_meta(folder: Path, family: str) -> PreTrainedModel:
    spec = find_model(write_config(folder, family, ACCEPTED[family]))
    with META:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**spec.config), dtype=torch.bfloat16, attn_implementation="eager"
        )
    skip_padding_check(model)
    return model.eval()


MAIN = {*NOT_CAPTURED, "llama linear-rope", "gpt2", "gemma2", "deepseek_v3", "qwen3_moe"}


@pytest.mark.parametrize(
    "family", [name if name in MAIN else pytest.param(name, marks=pytest.mark.full) for name in ACCEPTED]
)
def test_the_families_that_cannot_be_captured(family: str, tmp_path: Path) -> None:
    found = find_host_waits(on_meta(tmp_path, family))
    assert found[:1] == ([NOT_CAPTURED[family]] if family in NOT_CAPTURED else []), found


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.startswith("kvbench_engine")]


def test_it_is_said_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = on_meta(tmp_path, "dbrx")
    assert not may_capture(EngineConfig(), model)
    (record,) = ours(caplog)
    assert "'dbrx'" in record.message and "nonzero" in record.message
    with pytest.raises(ValueError, match=r"cuda_graphs cannot be true: .*'dbrx'.*nonzero.*leave cuda_graphs out"):
        may_capture(EngineConfig(cuda_graphs=True), model)
    caplog.clear()
    assert may_capture(EngineConfig(), on_meta(tmp_path, "llama linear-rope")) and not ours(caplog)
