"""Part ``peer-kernels``: decode kernels of other projects beside ours, on the very same tensors.

One layer's decode, Llama-8B's heads, pages of 16 in random order. All sequences' outputs are compared with float64
arithmetic before the timing and after each of its rounds; a wrong one is a failure and no row. A case times all kernels
in turns. What a project plans once a step, and not once a layer, is planned beforehand.

FP8: vLLM's two kernels get FP8 queries, as vLLM gives them on a Hopper GPU, and are less exact for it; to make these is
not timed. Ours and FlashInfer's take the queries as they are. FlashInfer's second kernel, for the scale of V, is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ci.gpu import kernel_cases as cases
from ci.gpu.kernel_cases import AttentionHeads, Decode, DecodeTensors
from ci.gpu.kernel_problems import TOLERANCE
from ci.gpu.part import Planned, Report, read_ceilings, sentence
from ci.gpu.tables import OURS
from ci.gpu.timing import Timing, measure
from ci.gpu.worker import LOST
from kernels import get_backend
from kernels.api import AttentionOptions
from kernels.quantized import FP8_DTYPE, FP8_MAX, QuantizedKV
from kernels.tune.problems import distance

PAGE, ROUNDS = 16, 3
SHAPES = ((64, 4096), (64, 8192), (1, 32768))
TRIAL = (2, 256)  # comes first: a kernel that ends its process does so where little is lost
FP8_QUERY_LIMIT = 0.15  # of a row's norm; queries and weights of 3 mantissa bits leave the worst row 0.05 to 0.08 away
SPLITS = 32  # vLLM's flash_attn_max_num_splits_for_cuda_graph
SEGMENTS, LEAST_GRID = 16, 128  # vLLM's TritonAttentionMetadataBuilder


@dataclass(frozen=True)
class Inputs:
    """A decode step ``t`` as peers take it. Every kernel writes ``out``, which holds NaN before."""

    t: DecodeTensors
    q: torch.Tensor  # in the dtype of the KV
    k: torch.Tensor  # [pages, page, heads, dim]
    v: torch.Tensor
    scales: tuple[float, float, float]  # of q, k, v
    table: torch.Tensor  # int32, [sequences, pages]
    lens: torch.Tensor  # int32
    longest: int
    scale: float  # of the scores
    expected: torch.Tensor  # float64
    out: torch.Tensor

    @property
    def fp8(self) -> bool:
        """Tests whether the KV has FP8 codes."""
        return self.k.dtype.itemsize == 1

    def for_vllm(self) -> dict[str, Any]:
        """The arguments that vLLM's kernels share."""
        starts = torch.arange(len(self.lens) + 1, dtype=torch.int32, device=self.q.device)
        return {
            "q": self.q, "k": self.k, "v": self.v, "out": self.out, "cu_seqlens_q": starts, "max_seqlen_q": 1,
            "seqused_k": self.lens, "max_seqlen_k": self.longest, "softmax_scale": self.scale, "causal": True,
            "block_table": self.table,
        }  # fmt: skip

    def error(self) -> float:
        """The distance of ``out`` from float64; ``out`` is poisoned again."""
        error = distance(self.out, self.expected)
        self.out.fill_(float("nan"))
        return error


def draw(case: Decode, heads: AttentionHeads, dtype: torch.dtype, device: str) -> Inputs:
    """Draws the tensors of ``case`` and computes the answer."""
    t, options = cases.make_decode(case, heads, dtype, device), AttentionOptions(heads.dim**-0.5)
    q, scales, sides = t.q, (1.0, 1.0, 1.0), (t.k, t.v)
    if isinstance(t.k, QuantizedKV):
        scales = (float(q.abs().max()) / FP8_MAX[t.k.format], t.k.scale, t.v.scale)
        q = (q.float() / scales[0]).to(FP8_DTYPE[t.k.format])
        sides = tuple(side.codes.view(q.dtype) for side in sides)
    k, v = (side.view(-1, PAGE, heads.kv, heads.dim) for side in sides)
    expected = get_backend("torch").decode_attention(t.q.double(), t.k, t.v, t.page_starts, t.seq_lens, PAGE, options)
    table, out = (t.page_starts // PAGE).int(), torch.full_like(t.q, float("nan"))
    return Inputs(t, q, k, v, scales, table, t.seq_lens.int(), max(case.lengths), options.scale, expected, out)


def ours(x: Inputs, backend: str) -> Callable[[], object]:
    """Our kernel, as the engine launches it."""
    kernels, pages = get_backend(backend), (x.t.page_starts, x.t.seq_lens, PAGE)
    plan = kernels.plan_decode(*pages, max_tokens=x.longest)
    options = AttentionOptions(x.scale)
    return partial(kernels.decode_attention, x.t.q, x.t.k, x.t.v, *pages, options, out=x.out, plan=plan)


def flash_attention_3(x: Inputs) -> Callable[[], object]:
    """FlashAttention 3, as vLLM's FlashAttentionImpl calls it under a full CUDA graph."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    (sequences, heads, dim), kv_heads, shared = x.q.shape, x.k.shape[2], x.for_vllm()
    plan = get_scheduler_metadata(
        batch_size=sequences, max_seqlen_q=1, max_seqlen_k=x.longest, num_heads_q=heads, num_heads_kv=kv_heads,
        headdim=dim, cache_seqlens=x.lens, qkv_dtype=x.q.dtype, cu_seqlens_q=shared["cu_seqlens_q"], page_size=PAGE,
        causal=True, num_splits=SPLITS,
    )  # fmt: skip
    if x.fp8:
        for side, value in zip("qkv", x.scales, strict=True):
            shared[f"{side}_descale"] = torch.full((sequences, kv_heads), value, device=x.q.device)
    return partial(flash_attn_varlen_func, **shared, scheduler_metadata=plan, num_splits=SPLITS, fa_version=3)


def vllm_triton(x: Inputs) -> Callable[[], object]:
    """vLLM's Triton kernel, as its TritonAttentionImpl calls it."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    most = LEAST_GRID // x.k.shape[2]  # up to so many sequences are cut into segments
    rows = (most, x.q.shape[1], SEGMENTS)
    parts = [torch.empty(shape, device=x.q.device) for shape in ((*rows, x.q.shape[2]), rows, rows)]
    q_descale, k_descale, v_descale = (torch.full((1,), value, device=x.q.device) for value in x.scales)
    return partial(
        unified_attention, **x.for_vllm(), window_size=(-1, -1), softcap=0, q_descale=q_descale if x.fp8 else None,
        k_descale=k_descale, v_descale=v_descale, seq_threshold_3D=most, num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=parts[0], softmax_segm_max=parts[1], softmax_segm_expsum=parts[2],
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if x.fp8 else KVQuantMode.NONE,
    )  # fmt: skip


def flashinfer(x: Inputs, tensor_cores: bool) -> Callable[[], object]:
    """FlashInfer's batch decode over a paged cache; on tensor cores its FlashAttention 2, as it chooses itself."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    q, pages, workspace = x.t.q, (x.lens + PAGE - 1) // PAGE, torch.zeros(256 << 20, dtype=torch.uint8)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace.to(q.device), "NHD", use_tensor_cores=tensor_cores)
    used = torch.arange(x.table.shape[1], device=q.device) < pages[:, None]
    wrapper.plan(
        torch.cat([pages.new_zeros(1), pages.cumsum(0)]).int(), x.table[used], x.lens - (pages - 1) * PAGE,
        q.shape[1], x.k.shape[2], q.shape[2], PAGE, q_data_type=q.dtype, kv_data_type=x.k.dtype, o_data_type=q.dtype,
        sm_scale=x.scale,
    )  # fmt: skip
    scales = {"k_scale": x.scales[1], "v_scale": x.scales[2]} if x.fp8 else {}
    return partial(wrapper.run, q, (x.k, x.v), out=x.out, **scales)


FP8_QUERIES = (flash_attention_3, vllm_triton)
PEERS: dict[str, Callable[[Inputs], Callable[[], object]]] = {
    "vLLM's Triton": vllm_triton,
    "FlashAttention 3 of vLLM": flash_attention_3,
    "FlashInfer, tensor cores": partial(flashinfer, tensor_cores=True),  # last: it may have to be compiled
    "FlashInfer, CUDA cores": partial(flashinfer, tensor_cores=False),
}


class PeerKernels:
    """The cases: each decode shape with each kind of KV."""

    workers = 1  # nothing else may run on the device

    def __init__(self, args: Any):
        self.device, self.scratch, tiny = args.device, args.scratch, args.tiny
        self.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.heads = AttentionHeads(4, 2, 32) if tiny else AttentionHeads(32, 8, 128)
        self.seconds = 0.01 if tiny else 0.15
        self.kernels = {OURS: partial(ours, backend="triton" if args.device == "cuda" else "numba"), **PEERS}
        self.ceiling = read_ceilings(args.facts).get("read_gb_per_s")
        shapes = [[(2, 64)]] if tiny else [[TRIAL], SHAPES]
        drawn = [Decode(*shape, PAGE, kv) for part in shapes for kv in ("auto", "fp8_e4m3") for shape in part]
        self.cases = {case.name: case for case in drawn}

    def plan(self) -> list[Planned]:
        """Lists the trials first, in which imports and compilers take their time."""
        return [Planned(name, seconds=180.0) for name in self.cases]

    def run(self, name: str, report: Report) -> None:
        """Checks all kernels, then times in turns those that run."""
        x = draw(self.cases[name], self.heads, self.dtype, self.device)
        steps, errors = {}, {}
        for kernel in self.kernels:
            if step := self._started(kernel, x, name, report):
                steps[kernel], errors[kernel] = step, x.error()
        rounds: dict[str, list[Timing]] = {kernel: [] for kernel in steps}
        for _ in range(ROUNDS):
            for kernel, step in steps.items():
                rounds[kernel].append(measure(step, self.device, self.seconds))
                errors[kernel] = max(errors[kernel], x.error())
        for kernel, timings in rounds.items():
            limit = FP8_QUERY_LIMIT if x.fp8 and self.kernels[kernel] in FP8_QUERIES else TOLERANCE[self.dtype]
            if errors[kernel] > limit:
                report.fail(f"{name}: {kernel}", f"{errors[kernel]:.2g} from float64, limit {limit:g}")
                continue
            seconds = statistics.median(timing.median for timing in timings)
            speed = x.t.kv_bytes / seconds / 1e9
            report.row(
                case=name, kernel=kernel, us=round(seconds * 1e6, 2), us_rounds=[t.as_dict()["us"] for t in timings],
                gb_per_s=speed, ratio=speed / self.ceiling if self.ceiling else None, error=errors[kernel],
                graph=all(timing.captured for timing in timings),
            )  # fmt: skip

    def _started(self, kernel: str, x: Inputs, case: str, report: Report) -> Callable[[], object] | None:
        """Runs the kernel once and returns its step; None where it cannot run, or once ended its process."""
        begun = self.scratch / f"{kernel}, {x.k.dtype}"
        if begun.exists():
            report.skip(f"{case}: {kernel}", "an earlier case's process did not survive it")
            return None
        begun.touch()
        try:
            step = self.kernels[kernel](x)
            step()
            if self.device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            if any(sign in str(error) for sign in LOST):
                raise
            (report.fail if kernel == OURS else report.skip)(f"{case}: {kernel}", sentence(error))
            step = None
        begun.unlink()
        return step


CASES = PeerKernels
