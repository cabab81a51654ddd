"""What the server's start does in which order: nothing slow before the cheap refusals, torch after its environment."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.config import EngineConfig
from engine.server.__main__ import in_two_processes, load
from engine.server.arguments import build_parser, options_of
from engine.startup import no_garbage_collection


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_the_server_s_modules_import_no_torch() -> None:
    """Nor do the settings, which `kvbench plan` reads. torch takes seconds and reads variables that are set later."""
    code = "import sys, engine.server.__main__; sys.exit(bool({'torch', 'transformers', 'numba'} & {*sys.modules}))"
    assert run(code).returncode == 0


@pytest.mark.parametrize(("device", "flag", "two"), [
    ("cpu", [], False), ("cuda", [], True),
    ("cpu", ["--frontend-multiprocessing"], True), ("cuda", ["--no-frontend-multiprocessing"], False),
])  # fmt: skip
def test_the_engine_gets_a_process_of_its_own_on_a_gpu_or_when_told(device: str, flag: list[str], two: bool) -> None:
    assert in_two_processes(*options_of(build_parser().parse_args(["--device", device, *flag]))) == two


@pytest.mark.parametrize("flags", [["--max-model-len", "4096"], ["--swap-space", "9", "--preemption-mode", "swap"]])
def test_a_budget_that_cannot_work_is_refused_before_torch_is_imported(flags: list[str]) -> None:
    arguments = ["--kv-budget", "48MiB", "--device", "cpu", "--port", "0", *flags]
    done = run(f"""
import sys
from engine.server.__main__ import main
code = main({arguments})
print("torch" in sys.modules)
sys.exit(code)
""")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "False\n", 1)
    assert flags[0].strip("-").replace("-", "_") in done.stderr and flags[1] in done.stderr


def test_the_spin_count_is_there_when_torch_is_imported() -> None:
    """GNU OpenMP reads it once, when the library is loaded; set later it does nothing, without a word."""
    code = """
import os, sys, importlib.abc
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit()
sys.meta_path.insert(0, Watch())
os.environ.pop("GOMP_SPINCOUNT", None)
from engine.config import EngineConfig
from engine.server.__main__ import load
load(EngineConfig(device="cpu"))
"""
    assert run(code).stdout == "20000\n"


@pytest.mark.parametrize(("window", "says"), [
    ({"sliding_window": 63}, "2 of 2 layers look back 63 tokens"), ({"sliding_window": 64}, ""), ({}, ""),
    ({"sliding_window": 8, "use_sliding_window": False}, ""), ({"sliding_window": "8"}, ""),
    ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, "1 of 2 layers look back 8 tokens"),
    ({"sliding_window": 8, "num_hidden_layers": [2]}, ""),
])  # fmt: skip
def test_the_load_says_that_layers_with_a_window_keep_all_tokens(window, says, tmp_path, monkeypatch, capsys) -> None:
    """Of 64 at most, which is more than the window."""
    monkeypatch.setattr("engine.build.build_engine", lambda config, tell: SimpleNamespace(config=config))
    monkeypatch.setattr("engine.server.__main__.planned_length", lambda config: 64)
    shape = {"model_type": "mistral", "num_hidden_layers": 2, "max_position_embeddings": 64}
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


def test_transformers_knows_the_rest_of_its_names_when_they_are_asked_for() -> None:
    """At the start it stands for its submodules and the few names that serving needs, without reading all models."""
    done = run("""
import sys
from engine.startup import only_what_serving_needs
with only_what_serving_needs(compiles=False):
    import torch, transformers
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.llama import LlamaForCausalLM
    import transformers.modeling_utils
    short = sys.modules["transformers"] is transformers and "transformers.models.bert" not in sys.modules
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64)
    same = type(AutoModelForCausalLM.from_config(config)) is LlamaForCausalLM
from transformers import BertConfig, PreTrainedModel
from transformers.processing_utils import ProcessorMixin
whole = sys.modules["transformers"] is not transformers and transformers.GPT2Config.model_type == "gpt2"
own = PreTrainedModel is transformers.modeling_utils.PreTrainedModel and issubclass(LlamaForCausalLM, PreTrainedModel)
print(short, same, whole, own)
""")
    assert done.stdout == "True True True True\n", done.stdout + done.stderr


def test_a_package_that_needs_what_is_left_out_is_left_out_too(tmp_path: Path) -> None:
    """scikit-learn imports scipy. transformers 5.17 imports it where it is found: the server did not start there."""
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("import scipy.sparse\n")
    done = run(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from engine.startup import only_what_serving_needs
from importlib.util import find_spec
print(find_spec("sklearn") is None)
with only_what_serving_needs(compiles=False):
    from transformers import AutoModelForCausalLM
    print(find_spec("sklearn") is None)
print(find_spec("sklearn") is None)
""")
    assert done.stdout == "False\nTrue\nFalse\n", done.stderr
