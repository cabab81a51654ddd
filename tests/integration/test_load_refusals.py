"""What cannot be served is refused at load, before any weight is there, in one sentence that names both sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvbench_engine.build import build_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.model import loader as model_loader
from kvbench_engine.model.loader import load_model
from kvbench_kernels import get_backend

ROOT = Path(__file__).parents[2]
SHAPE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "max_position_embeddings": 64, "dtype": "bfloat16",
}  # fmt: skip


def config_file(folder: Path, **changes) -> str:
    path = folder / "odd.json"
    path.write_text(json.dumps({**SHAPE, **changes}))
    return str(path)


def refusal(*flags: str, **env: str) -> str:
    """The one sentence of a server process that does not start."""
    process = subprocess.run(
        [sys.executable, "-m", "kvbench_engine.server", "--port", "0", *flags],
        cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode == 2, process.stderr
    assert process.stdout == ""
    said = [line for line in process.stderr.splitlines() if not line.startswith("loading ")]  # the phases
    assert len(said) == 1 and said[0].startswith("error: "), process.stderr
    return said[0]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("a model was made that is refused anyway")

    monkeypatch.setattr(model_loader, "_make_model", never)


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that there is a GPU of compute capability 7.5."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (15 << 30, 16 << 30))


@pytest.mark.full
def test_torch_compile_without_a_compiler_from_the_command_line(tmp_path: Path) -> None:
    flags = ("--model", config_file(tmp_path), "--device", "cpu", "--torch-compile")
    said = refusal(*flags, CXX=str(tmp_path / "no-compiler"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert "torch_compile cannot be true on device 'cpu'" in said and "no-compiler" in said


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"head_dim": 1024}, ("cannot be served", "head dim 1024", "512")),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, ("cannot be served", "3 query heads", "2 KV heads")),
        (
            {
                "model_type": "deepseek_v3", "kv_lora_rank": 600, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            },
            ("cannot be served", "value head dim 600", "512", "latent_kv false"),
        ),
        ({"vocab_size": 0}, ("vocab_size of", "is 0, and must be from 1")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers of", "is 0, and must be from 1")),
    ],
)
def test_a_shape_that_no_kernel_has(tmp_path: Path, no_weights: None, changes: dict, names: tuple[str, ...]) -> None:
    config = EngineConfig(model=config_file(tmp_path, **changes), device="cpu", kernel_backend="numba")
    with pytest.raises(ValueError, match=r"odd") as refused:
        load_model(config)
    assert all(name in str(refused.value) for name in names), refused.value


def test_weights_beyond_the_memory(no_weights: None) -> None:
    """The kernel would end the process, and perhaps others, when they are half filled in."""
    said = r"weights of model 'llama-3.1-70b' take 26\d.* in float32 and this machine has"
    with pytest.raises(ValueError, match=said):
        load_model(EngineConfig(model="llama-3.1-70b", load_format="dummy", device="cpu", dtype="float32"))


def test_bfloat16_on_a_gpu_that_has_none(tmp_path: Path, no_weights: None, old_gpu: None) -> None:
    """The config's own dtype or one that was asked for; float16 is the next step, and gets further than this."""
    model = config_file(tmp_path)
    for dtype in ("auto", "bfloat16"):
        with pytest.raises(
            ValueError, match=r"bfloat16 of model 'odd' needs .* 8\.0, .*Tesla T4.* 7\.5: use .*float16"
        ):
            load_model(EngineConfig(model=model, dtype=dtype, kernel_backend="torch"))
    with pytest.raises(AssertionError, match="a model was made"):
        load_model(EngineConfig(model=model, dtype="float16", kernel_backend="torch"))


def test_what_the_backend_says_of_dtypes_and_devices_is_asked_for_first(
    tmp_path: Path, no_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def check_support(**what: object) -> None:
        asked.update(what)
        raise ValueError("no such cache on this GPU")

    monkeypatch.setattr(get_backend("torch"), "check_support", check_support)
    config = EngineConfig(model=config_file(tmp_path), device="cpu", kernel_backend="torch", kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match="model 'odd' cannot be served: no such cache on this GPU"):
        load_model(config)
    assert asked == {
        "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "v_head_dim": 32,
        "dtype": torch.float32, "device": torch.device("cpu"), "kv_cache_dtype": "fp8_e4m3",
        "latent": False,
    }  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_that_is_not_there(tmp_path: Path, no_weights: None) -> None:
    with pytest.raises(ValueError, match="device 'cuda' was asked for and torch sees no CUDA device"):
        load_model(EngineConfig(model=config_file(tmp_path), device="cuda"))
    with pytest.raises(ValueError, match="cuda_graphs cannot be true with device 'cpu'"):
        load_model(EngineConfig(model=config_file(tmp_path), cuda_graphs=True))  # auto finds a CPU
    with pytest.raises(ValueError, match="cuda_graphs cannot be true with device 'cpu'"):
        EngineConfig(device="cpu", cuda_graphs=True)
    with pytest.raises(ValueError, match="cuda_graphs cannot be 'yes'"):
        EngineConfig(cuda_graphs="yes")  # type: ignore[arg-type]


def test_a_model_that_does_not_compile_is_refused_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is there and the trial passes, but this model's code is too much for it."""

    def too_much(model: torch.nn.Module):
        def call(**inputs: object) -> None:
            raise RuntimeError("CppCompileError: C++ compile error\nsome output")

        return call

    monkeypatch.setattr(model_loader, "check_compiler", lambda device: None)
    monkeypatch.setattr("kvbench_engine.execution.executor.compile_model", too_much)
    config = EngineConfig(
        model=config_file(tmp_path), device="cpu", dtype="float32", torch_compile=True, kv_budget=2**20,
        max_num_seqs=4, max_num_batched_tokens=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"torch_compile cannot be true .*\(CppCompileError: C\+\+ compile error\)"):
        build_engine(config)
