"""What every cost model shares: the classes that a step's time is counted by, moves of KV, all-reduce and host time.

tables or roofline ──► kernels of a step ┐
calibration ──► host time, corrections   ├──► StepTime, and seconds by class for "where the time goes"
links ──► all-reduce, swap, copies       ┘
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.execution.simulated_executor import StepTime, StepWork
from kvbench.simulation.experts import EVENNESS

CLASSES = ("gemm", "experts", "attention", "elementwise", "all_reduce", "head", "launches", "move", "host")
"""gemm: projections of attention and MLP. experts: routed experts. attention: with the write of KV.
elementwise: norms, rotary embedding, activation, token embedding. head: logits and sampler. launches: what steps with
prompts take beyond their kernels. move: swap and copies of KV. host: the CPU's part of a step, which may overlap."""


class Kernels(NamedTuple):
    """Seconds of a step on each GPU, by class."""

    gemm: float
    experts: float
    attention: float
    elementwise: float
    head: float


LONGEST_SHARE = 0.87
"""Of the time that a decode attention in which all sequences were as long as the longest one would keep a GPU's
processors busy once: what the longest sequence takes among shorter ones. From seconds of pure decode in the runs that
docs/simulation.md names: 0.82 on an RTX 4090, 0.88 on an RTX PRO 6000."""


@dataclass(frozen=True)
class Calibration:
    """What data sheets and operator tables do not have. The defaults add and correct nothing.

    host_s, host_per_sequence_s: CPU time of a step and of each of its sequences [s]; with asynchronous scheduling it
        passes while the GPU computes, and costs time only where it is longer
    prompt_layer_s: what a step with a part of a prompt takes longer than its kernels, a layer [s]: such a step is not
        one CUDA graph, its attention is launched layer by layer
    kernels: time of kernels in an engine, over what tables or roofline say
    all_reduce_s: an all-reduce of no bytes [s]
    evenness: how evenly tokens spread over experts, see ``experts.active_experts``
    provenance: what it was fitted to, and how well it holds there and elsewhere
    """

    host_s: float = 0.0
    host_per_sequence_s: float = 0.0
    prompt_layer_s: float = 0.0
    kernels: float = 1.0
    all_reduce_s: float = 10e-6  # two GPUs over PCIe: 6 to 11 us up to 16 KiB (pastebin.com/ne4ipn6K, nccl-tests)
    evenness: float = EVENNESS
    provenance: dict[str, Any] = field(default_factory=dict)


TYPICAL = Calibration(prompt_layer_s=110e-6)
"""Where nothing is measured: what the runs that docs/simulation.md names have in common."""


SHORT_STEP_S = 3e-3
"""Below it the host of an engine may take longer than the GPU: scheduling, inputs and outputs of a step take one to
several milliseconds in Python."""


@dataclass(frozen=True)
class Moves:
    """How KV moves. ``slot_bytes``: one token's KV on one GPU; speeds in bytes/s."""

    slot_bytes: int
    host_link: float
    memory: float

    def seconds(self, work: StepWork) -> float:
        """Swaps over the host link, copies within a GPU, which read and write."""
        swapped = (work.swapped_out + work.swapped_in) * self.slot_bytes / self.host_link
        return swapped + 2 * work.copied * self.slot_bytes / self.memory


@dataclass(frozen=True)
class AllReduce:
    """Sums over the GPUs of a model. ``count``: a step; ``token_s``: of one of them, a token [s]."""

    count: int
    token_s: float
    latency_s: float

    def seconds(self, tokens: int) -> float:
        return self.count * (self.latency_s + tokens * self.token_s)


@dataclass(frozen=True)
class GpuShare:
    """Of one GPU among those that share a model, what both sources of kernel times need.

    layers: of the model; heads, kv_heads: on this GPU; processors: streaming multiprocessors
    experts: of a layer, and those of one token; None: the model has none
    all_reduce: None for one GPU
    """

    layers: int
    heads: int
    kv_heads: int
    processors: int
    experts: tuple[int, int] | None
    moves: Moves
    all_reduce: AllReduce | None


class CostModel:
    """A step's time from its work. ``seconds``: of all steps so far, by class of CLASSES."""

    def __init__(self, calibration: Calibration, around: GpuShare) -> None:
        self.calibration, self.moves, self.all_reduce = calibration, around.moves, around.all_reduce
        self.seconds = dict.fromkeys(CLASSES, 0.0)
        self._prompt_s = calibration.prompt_layer_s * around.layers
        self._steps = 0

    def kernels(self, work: StepWork) -> Kernels:
        """Of a step that computes at least one token."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """What a reader of the results must know of how they came about, such as values beyond a table."""
        mean = sum(self.seconds.values()) / self._steps if self._steps else SHORT_STEP_S
        if mean >= SHORT_STEP_S or self.calibration.host_s:
            return []
        return [
            f"steps take {1e3 * mean:.2g} ms on average, in which an engine's host may not be ready: host_s of a "
            "calibration says how long it takes, and is 0 here"
        ]

    def __call__(self, work: StepWork) -> StepTime:
        known, seconds = self.calibration, self.seconds
        self._steps += 1
        host = known.host_s + known.host_per_sequence_s * (work.decodes + len(work.prefills))
        move = execute = head = 0.0
        if work.copied or work.swapped_out or work.swapped_in:
            move = self.moves.seconds(work)
            seconds["move"] += move
        if tokens := work.tokens:
            gemm, experts, attention, elementwise, head = self.kernels(work)
            if (scale := known.kernels) != 1.0:
                gemm, experts, attention = gemm * scale, experts * scale, attention * scale
                elementwise, head = elementwise * scale, head * scale
            seconds["gemm"] += gemm
            seconds["experts"] += experts
            seconds["attention"] += attention
            seconds["elementwise"] += elementwise
            seconds["head"] += head
            execute = gemm + experts + attention + elementwise
            if work.prefills:
                execute += self._prompt_s
                seconds["launches"] += self._prompt_s
            if self.all_reduce is not None:
                reduced = self.all_reduce.seconds(tokens)
                seconds["all_reduce"] += reduced
                execute += reduced
        seconds["host"] += host
        return StepTime(host + move + execute + head, schedule=host, execute=execute, sample=head, move=move)
