"""The step times that every cost model shares, and those that a device's data sheet gives.

tables or roofline ──► kernels of a step ┐
calibration ──► host time, corrections   ├──► StepTime, and seconds by class for "where the time goes"
links ──► all-reduce, swap, copies       ┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvbench.capacity.gpus import GPU
from kvbench.capacity.model import PlannedModel
from kvbench.capacity.weights import weights_of
from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, write_json
from kvbench.common.schema import explain
from kvbench.simulation.wording import sentence
from kvbench_engine.execution.simulated_executor import StepTime, StepWork

StepTimer = Callable[[StepWork], StepTime]
"""A cost model: it computes the time of a step from its work."""
_FORMAT = 1  # of a calibration's file
CLASSES = ("gemm", "experts", "attention", "elementwise", "all_reduce", "head", "launches", "move", "host")
"""gemm: projections of attention and MLP. experts: routed experts. attention: with the write of KV.
elementwise: norms, rotary embedding, activation, token embedding. head: logits and sampler. launches: what steps with
prompts take beyond their kernels. move: swap and copies of KV. host: the CPU's part of a step, which may overlap."""

EVENNESS = 2.0
"""How evenly tokens spread over experts. From LLMServingSim (docs/docs/simulator/moe-expert-routing.md), which counted
110,640 calls of Qwen3-30B-A3B's router: 0.87 of the experts that even routing reaches in the middle of the range, 0.94
of them in a full decode batch. 2.0 gives 0.87 at 16 tokens and 0.96 at 128."""
LONGEST_SHARE = 0.87
"""What the longest sequence of a decode takes among shorter ones, as a share of the time that an attention in which all
were as long would keep a GPU's processors busy once. From seconds of pure decode in the runs that
docs/simulation.md names: 0.82 on an RTX 4090, 0.88 on an RTX PRO 6000."""
SHORT_STEP_S = 3e-3
"""Below it the host of an engine may take longer than the GPU: scheduling, inputs and outputs of a step take one to
several milliseconds in Python."""

# The least that a small operator takes, from the tables of two GPUs at one token: 1.9 to 2.7 us each of four
# elementwise ones a layer, about 8 us an attention.
_ELEMENTWISE_S = 4 * 2.4e-6
_ATTENTION_S = 8e-6
# How matrix products overlap reading and computing: 1 would add the two, infinity take the longer. Met by those tables
# from 1 to 2048 tokens.
_OVERLAP = 1.8
_SAMPLER_S = 20e-6  # 10 to 25 us for one sequence in those tables
_LOGIT_BYTES = 8  # float32 logits, read twice: 150 to 330 us for 256 sequences of 128,256 in those tables


class Kernels(NamedTuple):
    """The seconds of a step on each GPU, by class."""

    gemm: float
    experts: float
    attention: float
    elementwise: float
    head: float


class Checked(BaseModel):
    """The relative errors by latency, with which a calibration predicted a run that it was not fitted to."""

    run: str
    errors: dict[str, float]


class Provenance(BaseModel):
    """The run or log that a calibration was fitted to; more may be noted in a file."""

    model_config = ConfigDict(extra="allow", frozen=True)
    fitted: list[str] | None = None
    run: str | None = None
    requests: int | None = None
    engine: str | None = None
    step_log: str | None = None
    held_out_last_third: dict[str, float] | None = None
    device: str | None = None
    gpus: int | None = None
    model: str | None = None
    cost_model: str | None = None
    checked: list[Checked] | None = None


class CostCalibration(BaseModel):
    """The costs that data sheets and operator tables do not have. The defaults add and correct nothing.

    host_s, host_per_sequence_s: CPU time of a step and of each of its sequences [s]; with asynchronous scheduling it
        passes while the GPU computes, and costs time only where it is longer
    prompt_layer_s: what a step with a part of a prompt takes longer than its kernels, a layer [s]: such a step is not
        one CUDA graph, its attention is launched layer by layer
    kernels: time of kernels in an engine, over what tables or roofline say
    all_reduce_s: an all-reduce of no bytes [s]
    evenness: how evenly tokens spread over experts, see ``active_experts``
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    host_s: float = Field(default=0.0, ge=0, le=1)
    host_per_sequence_s: float = Field(default=0.0, ge=0, le=0.1)
    prompt_layer_s: float = Field(default=0.0, ge=0, le=0.1)
    kernels: float = Field(default=1.0, gt=0, le=100)
    all_reduce_s: float = Field(default=10e-6, ge=0, le=0.1)
    """two GPUs over PCIe: 6 to 11 us up to 16 KiB (pastebin.com/ne4ipn6K, nccl-tests)"""
    evenness: float = Field(default=EVENNESS, gt=0)
    provenance: Provenance = Provenance()


class _CalibrationFile(CostCalibration):
    """A calibration as JSON."""

    format: int = Field(ge=_FORMAT, le=_FORMAT)


def read_calibration(path: Path) -> CostCalibration:
    """Reads a calibration. Raises UsageError for a file that is none."""
    stored = read_json(path)
    if isinstance(stored, dict) and "format" in stored and isinstance(stored["format"], str):
        raise UsageError(sentence("cost_model.unit_costs", path=path))
    try:
        return CostCalibration.model_validate(_CalibrationFile.model_validate(stored).model_dump(exclude={"format"}))
    except ValidationError as error:
        raise UsageError(sentence("cost_model.damaged", path=path, why=explain(error, "")[0])) from None


def write_calibration(path: Path, calibration: CostCalibration) -> None:
    write_json(path, {"format": _FORMAT, **calibration.model_dump(exclude_none=True)})


TYPICAL = CostCalibration(prompt_layer_s=110e-6)
"""Where nothing is measured: what the runs that docs/simulation.md names have in common."""


@dataclass(frozen=True)
class GpuShare:
    """A GPU among those that share a model, as both sources of kernel times need it.

    layers: of the model; heads, kv_heads: on this GPU; processors: streaming multiprocessors
    experts: of a layer, and those of one token; None: the model has none
    slot_bytes: one token's KV on this GPU, which moves at these speeds [bytes/s]
    reduces: sums over the GPUs, a step; reduce_token_s: of one of them, a token [s]
    """

    layers: int
    heads: int
    kv_heads: int
    processors: int
    experts: tuple[int, int] | None
    slot_bytes: int
    host_link_bytes_per_s: float
    memory_bytes_per_s: float
    reduces: int = 0
    reduce_token_s: float = 0.0

    def move_seconds(self, work: StepWork) -> float:
        """Computes the time of swaps over the host link, and of copies within a GPU, which read and write."""
        swapped = (work.swapped_out + work.swapped_in) * self.slot_bytes / self.host_link_bytes_per_s
        return swapped + 2 * work.copied * self.slot_bytes / self.memory_bytes_per_s


class CostModel:
    """A step's time from its work. ``seconds``: of all steps so far, by class of CLASSES."""

    def __init__(self, calibration: CostCalibration, share: GpuShare) -> None:
        self.calibration, self.share = calibration, share
        self.seconds = dict.fromkeys(CLASSES, 0.0)
        self._prompt_s = calibration.prompt_layer_s * share.layers
        self._steps = 0

    def kernels(self, work: StepWork) -> Kernels:
        """Computes the kernels of a step with at least one token."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Returns what a reader must know of how the results came about, such as values beyond a table."""
        mean = sum(self.seconds.values()) / self._steps if self._steps else SHORT_STEP_S
        if mean >= SHORT_STEP_S or self.calibration.host_s:
            return []
        return [sentence("cost_model.short_steps", milliseconds=1e3 * mean)]

    def __call__(self, work: StepWork) -> StepTime:
        calibration, share, seconds = self.calibration, self.share, self.seconds
        self._steps += 1
        host = calibration.host_s + calibration.host_per_sequence_s * (work.decodes + len(work.prefills))
        move = execute = head = 0.0
        if work.copied or work.swapped_out or work.swapped_in:
            move = share.move_seconds(work)
            seconds["move"] += move
        if tokens := work.tokens:
            *layers, head = (part * calibration.kernels for part in self.kernels(work))
            for name, part in zip(Kernels._fields, (*layers, head), strict=True):
                seconds[name] += part
            execute = sum(layers)
            if work.prefills:
                execute += self._prompt_s
                seconds["launches"] += self._prompt_s
            if share.reduces:
                reduced = share.reduces * (calibration.all_reduce_s + tokens * share.reduce_token_s)
                seconds["all_reduce"] += reduced
                execute += reduced
        seconds["host"] += host
        return StepTime(host + move + execute + head, schedule=host, execute=execute, sample=head, move=move)

    def active_experts(self, tokens: int) -> float:
        """Computes the experts of a layer that the tokens of a step go through, of a model that has any."""
        assert self.share.experts is not None
        return active_experts(tokens, *self.share.experts, self.calibration.evenness)


def active_experts(tokens: int, experts: int, per_token: int, evenness: float = EVENNESS) -> float:
    """Computes the expected experts with one of ``tokens`` tokens, each of which goes to ``per_token`` of ``experts``.

    An expert's popularity is taken as gamma-distributed with the shape ``evenness``: infinite where all experts are
    alike, the smaller the more tokens go to few of them.
    """
    if tokens <= 1:
        return float(per_token)
    reached = experts * (1 - (1 + tokens * per_token / experts / evenness) ** -evenness)
    return min(float(experts), max(float(per_token), reached))


class Roofline(CostModel):
    """A data sheet's step times: an operator takes about as long as its arithmetic or its bytes, the longer."""

    def __init__(
        self,
        model: PlannedModel,
        gpu: GPU,
        gpus: int,
        kv_cache_dtype: str,
        calibration: CostCalibration,
        share: GpuShare,
    ) -> None:
        super().__init__(calibration, share)
        performance, config, weights = gpu.performance, model.config, weights_of(model)
        assert performance is not None
        parameters = weights.parameters
        self._weight_bytes = weights.total_bytes / parameters.total
        flops = performance.fp8_flops if 0.9 < self._weight_bytes < 1.5 else performance.bf16_flops
        self._bytes_per_s, self._flops = performance.memory * gpu.bytes_per_s, performance.gemm * flops
        self._linear = parameters.linear / gpus
        sparse = share.experts is not None and parameters.experts
        self._expert = parameters.experts / gpus / share.experts[0] if sparse else 0.0  # one of each layer
        rows = share.heads + 2 * share.kv_heads
        moved = 3 * config.inner / gpus + 2 * rows * model.layers[0].kv.head_dim  # norms are served by the cache
        self._element_token_s = share.layers * moved * model.dtype_bytes / self._bytes_per_s
        head = config.vocab_size * config.hidden_size / gpus
        self._head_s, self._head_token_s = head * model.dtype_bytes / self._bytes_per_s, 2 * head / self._flops
        self._draw_s = config.vocab_size * _LOGIT_BYTES / self._bytes_per_s
        self._write_token_s = model.token_bytes(kv_cache_dtype, gpus=gpus) / self._bytes_per_s
        self._mixed = performance.mixed_decode
        self._wave = max(1.0, LONGEST_SHARE * share.processors / share.kv_heads)
        self._groups = []  # window, seconds to read a token's KV, seconds of a query token with one token that it sees
        for group in model.layers:
            key, value = group.kv.head_dim, group.kv.value_dim
            if group.kv.latent:
                key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
            work = 2 * share.heads * (key + value) * group.count / (performance.prefill * performance.bf16_flops)
            read = model.group_bytes(group, kv_cache_dtype, gpus=gpus) / (performance.decode * gpu.bytes_per_s)
            self._groups.append((group.window or float("inf"), read, work))

    def kernels(self, work: StepWork) -> Kernels:
        tokens, layers = work.tokens, self.share.layers
        experts = head = 0.0
        if self._expert and self.share.experts is not None:
            active = self.active_experts(tokens)
            experts = self._product(self._expert * active, self._expert * self.share.experts[1] * tokens)
        if drawn := work.drawn:
            head = max(self._head_s, self._head_token_s * drawn) + _SAMPLER_S + self._draw_s * drawn
        return Kernels(
            gemm=self._product(self._linear, self._linear * tokens),
            experts=experts,
            attention=self._attention(work) + self._write_token_s * tokens,
            elementwise=layers * _ELEMENTWISE_S + self._element_token_s * tokens,
            head=head,
        )

    def _product(self, read: float, used: float) -> float:
        """Computes the seconds of matrix products that read ``read`` weights and use ``used`` in all, each a token."""
        memory, compute = read * self._weight_bytes / self._bytes_per_s, 2 * used / self._flops
        return (memory**_OVERLAP + compute**_OVERLAP) ** (1 / _OVERLAP)

    def _attention(self, work: StepWork) -> float:
        seconds, decodes, longest = self.share.layers * _ATTENTION_S, work.decodes, work.longest_decode
        slower = self._mixed if work.prefills else 1.0
        for window, read_s, work_s in self._groups:
            if decodes:
                tokens = decodes * min(work.decode_context / decodes, window)
                alone = min(decodes, self._wave) * min(longest, window)  # no other can take over its work
                seconds += max(tokens, alone) * read_s * slower
            for count, before in work.prefills:
                seen = min(before + count / 2, window)
                seconds += max(count * seen * work_s, min(before + count, window + count) * read_s)
        return seconds
