"""Which backend serves what, on chips that are not there too; what none serves is refused with value and limit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvbench_kernels import default_backend, get_backend
from kvbench_kernels.api import AttentionBackend
from kvbench_kernels.kv_formats import KV_FORMATS, find_format
from kvbench_kernels.triton_backend import TritonBackend
from kvbench_kernels.triton_launch import Chip

KINDS = ["auto", *KV_FORMATS]
FITS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
CPU = FITS | {"dtype": torch.float32, "device": "cpu"}
CUDA = FITS | {"dtype": torch.bfloat16, "device": "cuda:0"}


LATENT = {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "latent": True}


def backend_called(name: str | int) -> AttentionBackend:
    """A CPU's by name, Triton's by compute capability."""
    return get_backend(name) if isinstance(name, str) else TritonBackend(lambda device: Chip(name, 100))


def test_backends_by_device_and_dtype():
    assert default_backend("cpu", torch.float16) == "torch" and get_backend("numba") is get_backend("numba")
    for kind in KINDS:
        assert default_backend("cpu", torch.float32, kind) == default_backend("cpu", torch.bfloat16, kind) == "numba"
        assert default_backend("cuda:0", torch.bfloat16, kind) == "triton"
    with pytest.raises(ValueError, match=r"'cuda'.*numba, torch, triton"):
        get_backend("cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["torch", "numba", 80, 86, 89, 90, 100, 120])
def test_every_kv_format_is_served(backend, kind):
    backend, cpu = backend_called(backend), isinstance(backend, str)
    for dtype in (torch.bfloat16, torch.float32) if cpu else (torch.bfloat16, torch.float16, torch.float32):
        backend.check_support(**(CPU if cpu else CUDA) | {"dtype": dtype}, kv_cache_dtype=kind)
    if not cpu:
        backend.check_support(**CUDA | {"head_dim": 256, "num_heads": 512}, v_head_dim=16, kv_cache_dtype=kind)
    if cpu or kind != "int4_per_token_head":
        backend.check_support(**(CPU if cpu else CUDA) | LATENT, kv_cache_dtype=kind)


@pytest.mark.parametrize(
    ("backend", "change", "words"),
    [
        ("numba", {"dtype": torch.float16}, "float32 and bfloat16 models on cpu, not torch.float16"),
        ("numba", {"head_dim": 513}, r"head dim 513 is outside 1\.\.512"),
        ("numba", {"num_heads": 7}, "7 query heads cannot share 8 KV heads"),
        ("torch", {"dtype": torch.int8}, "torch.int8"),
        ("torch", {"kv_cache_dtype": "int2"}, "unknown kv_cache_dtype 'int2'"),
        ("numba", {"kv_cache_dtype": "int2"}, "unknown kv_cache_dtype 'int2'"),
        ("triton", {"head_dim": 320, "device": "cuda"}, r"head dim 320 is outside 1\.\.256"),
        (90, {"head_dim": 320}, r"^head dim 320 is outside 1\.\.256, what this kernel backend serves: use the torch"),
        (90, {"v_head_dim": 512}, r"^value head dim 512 is outside 1\.\.256"),
        (90, LATENT | {"v_head_dim": 513, "head_dim": 577}, r"^value head dim 513 is outside 1\.\.512"),
        ("numba", LATENT | {"v_head_dim": 513, "head_dim": 577}, r"^value head dim 513 is outside 1\.\.512"),
        (90, LATENT | {"head_dim": 512}, r"^latent row's other values 0 is outside 1\.\.128"),
        (90, LATENT | {"head_dim": 641}, r"^latent row's other values 129 is outside 1\.\.128"),
        (90, LATENT | {"head_dim": 575, "kv_cache_dtype": "fp8_e4m3"}, "latent rows of 512 and 63 values in fp8_e4m3"),
        (90, LATENT | {"kv_cache_dtype": "int4_per_token_head"}, "512 and 64 values in int4.* latent_kv false"),
        (90, {"num_heads": 71, "num_kv_heads": 1}, r"^71 query heads on 1 KV heads are more than the 64 per KV head"),
        (90, {"num_heads": 30}, r"^30 query heads cannot share 8 KV heads evenly"),
        (75, {}, r"needs compute capability 8\.0 or newer for bfloat16, and cannot serve cuda:0, .* 7\.5: use"),
        (70, {"dtype": torch.float16}, r"needs .* 8\.0 or newer for float16, and cannot serve cuda:0, .* 7\.0: use"),
        (90, {"dtype": torch.float64}, r"cannot compute with a torch\.float64 KV cache: use float16, bfloat16"),
        (90, {"kv_cache_dtype": "int2"}, "^unknown kv_cache_dtype 'int2'"),
        (90, {"device": "cpu"}, r"needs a CUDA device, not cpu: use kernel_backend auto"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_with_value_and_limit(backend, change, words):
    fits = CPU if isinstance(backend, str) else CUDA
    with pytest.raises(ValueError, match=words) as refused:
        backend_called(backend).check_support(**fits | change)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 250


def test_an_unknown_format_is_refused_with_those_that_there_are():
    for refuse in (find_format, lambda name: default_backend("cuda", torch.bfloat16, name)):
        with pytest.raises(ValueError, match="unknown kv_cache_dtype 'fp8': use one of auto, fp8_e4m3"):
            refuse("fp8")


def test_importing_the_package_and_its_formats_imports_no_framework():
    code = "import sys, kvbench_kernels.kv_formats; print(sorted({'torch', 'numba', 'triton'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
