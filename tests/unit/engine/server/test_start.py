"""What the server's start does in which order: nothing slow before the cheap refusals, torch after its environment."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench_engine.config import EngineConfig
from kvbench_engine.server.__main__ import in_two_processes, load
from kvbench_engine.server.arguments import build_parser, options_of
from kvbench_engine.startup import no_garbage_collection


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("device", "flag", "two"), [
    ("cpu", [], False), ("cuda", [], True),
    ("cpu", ["--frontend-multiprocessing"], True), ("cuda", ["--no-frontend-multiprocessing"], False),
])  # fmt: skip
def test_the_engine_gets_a_process_of_its_own_on_a_gpu_or_when_told(device: str, flag: list[str], two: bool) -> None:
    assert in_two_processes(*options_of(build_parser().parse_args(["--device", device, *flag]))) == two


MIXED = {"layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize(("window", "says"), [
    ({"sliding_window": 63, **MIXED, "global_head_dim": 16}, "1 of 2 layers look back 63 tokens"),
    ({"sliding_window": 64, **MIXED, "global_head_dim": 16}, ""), ({}, ""), ({"sliding_window": "8"}, ""),
    ({"sliding_window": 8, "use_sliding_window": False}, ""), ({"sliding_window": 8}, ""),
    ({"sliding_window": 8, **MIXED}, ""), ({"sliding_window": 8, **MIXED, "global_head_dim": 8}, ""),
    ({"sliding_window": 8, "num_hidden_layers": [2]}, ""),
])  # fmt: skip
def test_the_load_says_where_layers_with_a_window_keep_all_tokens(window, says, tmp_path, monkeypatch, capsys) -> None:
    """Of 64 at most, which is more than the window."""
    monkeypatch.setattr("kvbench_engine.build.build_engine", lambda config, tell: SimpleNamespace(config=config))
    monkeypatch.setattr("kvbench_engine.server.__main__.planned_length", lambda config: 64)
    shape = {"model_type": "mistral", "num_hidden_layers": 2, "max_position_embeddings": 64}
    shape |= {"num_attention_heads": 4, "head_dim": 8, "hidden_size": 32}
    (tmp_path / "m.json").write_text(json.dumps({**shape, **window}))
    load(EngineConfig(model=str(tmp_path / "m.json"), device="cpu", max_model_len=64))
    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("loading")]
    assert len(told) == bool(says) and all(line.startswith(says) for line in told)


def test_garbage_is_collected_again_after_the_load_and_what_was_loaded_left_out() -> None:
    def fail_to_load() -> None:
        with no_garbage_collection():
            assert not gc.isenabled()
            raise ValueError("no such model")

    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ValueError, match="no such model"):
            fail_to_load()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_settings_are_refused_and_the_spin_count_is_set_before_torch_is_imported() -> None:
    """torch takes seconds, and GNU OpenMP reads the count once, when it is loaded; set later it does nothing."""
    done = run("""
import os, sys, importlib.abc
import kvbench_engine.server.__main__ as server
flags = ["--kv-budget", "48MiB", "--device", "cpu", "--port", "0"]
for more in (["--max-model-len", "4096"], ["--swap-space", "9", "--preemption-mode", "swap"]):
    assert server.main([*flags, *more]) == 2
assert not {'torch', 'transformers', 'numba'} & {*sys.modules}
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit()
sys.meta_path.insert(0, Watch())
os.environ.pop("GOMP_SPINCOUNT", None)
server.load(server.EngineConfig(device="cpu"))
""")
    length, swap, *_ = done.stderr.splitlines()
    assert done.stdout == "20000\n", done.stderr
    assert "max_model_len" in length and "4096" in length and "swap_space 9" in swap


@pytest.mark.full
def test_transformers_is_read_in_part_and_knows_the_rest_of_its_names_when_they_are_asked_for(tmp_path: Path) -> None:
    """At the start it stands for its submodules and the few names that serving needs, without reading all models.

    A package that needs what is left out is left out too: scikit-learn imports scipy, and transformers 5.17 imports it
    where it is found: the server did not start there.
    """
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("import scipy.sparse\n")
    done = run(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from importlib.util import find_spec
from kvbench_engine.startup import only_what_serving_needs
assert find_spec("sklearn") is not None
with only_what_serving_needs(compiles=False):
    import torch, transformers
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.llama import LlamaForCausalLM
    import transformers.modeling_utils
    assert find_spec("sklearn") is None
    assert sys.modules["transformers"] is transformers and "transformers.models.bert" not in sys.modules
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64)
    assert type(AutoModelForCausalLM.from_config(config)) is LlamaForCausalLM
assert find_spec("sklearn") is not None
del sys.path[0]
from transformers import BertConfig, PreTrainedModel
from transformers.processing_utils import ProcessorMixin
assert sys.modules["transformers"] is not transformers and transformers.GPT2Config.model_type == "gpt2"
assert PreTrainedModel is transformers.modeling_utils.PreTrainedModel
assert issubclass(LlamaForCausalLM, PreTrainedModel)
""")
    assert done.returncode == 0, done.stderr
