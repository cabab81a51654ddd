"""What the Triton backend refuses at load, on chips that are not there: one sentence that names both sides."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_formats import KV_FORMATS
from kernels.triton_backend import TritonBackend
from kernels.triton_launch import Chip

FITS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda:0"}


def on(arch: int) -> TritonBackend:
    return TritonBackend(lambda device: Chip(arch, 100))


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("kind", ["auto", *KV_FORMATS])
def test_every_kv_format_from_sm_80_on(arch, kind):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        on(arch).check_support(**FITS | {"dtype": dtype}, kv_cache_dtype=kind)
    on(arch).check_support(**FITS | {"head_dim": 256, "num_heads": 512}, v_head_dim=16, kv_cache_dtype=kind)


@pytest.mark.parametrize(
    ("arch", "other", "sentence"),
    [
        (90, {"head_dim": 320}, r"^head dim 320 is outside 1\.\.256, what this kernel backend serves: use the torch"),
        (90, {"v_head_dim": 512}, r"^value head dim 512 is outside 1\.\.256"),
        (90, {"num_heads": 71, "num_kv_heads": 1}, r"^71 query heads on 1 KV heads are more than the 64 per KV head"),
        (90, {"num_heads": 30}, r"^30 query heads cannot share 8 KV heads evenly"),
        (75, {}, r"needs compute capability 8\.0 or newer for bfloat16, and cannot serve cuda:0, .* 7\.5: use"),
        (70, {"dtype": torch.float16}, r"needs .* 8\.0 or newer for float16, and cannot serve cuda:0, .* 7\.0: use"),
        (90, {"dtype": torch.float64}, r"cannot compute with a torch\.float64 KV cache: use float16, bfloat16"),
        (90, {"kv_cache_dtype": "int2"}, "^unknown kv_cache_dtype 'int2'"),
        (90, {"device": "cpu"}, r"needs a CUDA device, not cpu: use kernel_backend auto"),
    ],
)  # fmt: skip
def test_refusals_name_the_value_and_the_limit(arch, other, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        on(arch).check_support(**FITS | other)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 250
