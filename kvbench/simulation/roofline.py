"""Step times from a device's data sheet: an operator takes about as long as its arithmetic or its bytes, the longer."""

from __future__ import annotations

from engine.execution.simulated_executor import StepWork
from kvbench.capacity.gpus import GPU
from kvbench.capacity.model import PlannedModel
from kvbench.capacity.weights import weights_of
from kvbench.simulation.cost_model import LONGEST_SHARE, Calibration, CostModel, GpuShare, Kernels
from kvbench.simulation.experts import active_experts

# The least that a small operator takes, from the tables of two GPUs at one token: 1.9 to 2.7 us each of four
# elementwise ones a layer, about 8 us an attention.
_ELEMENTWISE_S = 4 * 2.4e-6
_ATTENTION_S = 8e-6
# How matrix products overlap reading and computing: 1 would add the two, infinity take the longer. Met by those tables
# from 1 to 2048 tokens.
_OVERLAP = 1.8
_SAMPLER_S = 20e-6  # 10 to 25 us for one sequence in those tables
_LOGIT_BYTES = 8  # float32 logits, read twice: 150 to 330 us for 256 sequences of 128,256 in those tables


class Roofline(CostModel):
    """Of a model on ``gpus`` of one kind."""

    def __init__(
        self,
        model: PlannedModel,
        gpu: GPU,
        gpus: int,
        kv_cache_dtype: str,
        calibration: Calibration,
        around: GpuShare,
    ) -> None:
        super().__init__(calibration, around)
        performance, config = gpu.performance, model.config
        assert performance is not None
        weights, dtype = weights_of(model), model.dtype_bytes
        counted = weights.parameters
        of_weight = weights.total_bytes / counted.total
        flops = performance.fp8_flops if 0.9 < of_weight < 1.5 else performance.bf16_flops
        self._bytes_per_s = performance.memory * gpu.bytes_per_s
        self._flops = performance.gemm * flops
        self._linear, self._of_weight = counted.linear / gpus, of_weight
        self._experts = around.experts
        sparse = around.experts is not None and counted.experts
        self._expert = counted.experts / gpus / around.experts[0] if sparse else 0.0  # one of each layer
        rows = around.heads + 2 * around.kv_heads
        moved = 3 * config.inner / gpus + 2 * rows * model.layers[0].kv.head_dim  # norms are served by the cache
        self._element_token_s = around.layers * moved * dtype / self._bytes_per_s
        self._layers = around.layers
        head = config.vocab_size * config.hidden_size / gpus
        self._head_s, self._head_token_s = head * dtype / self._bytes_per_s, 2 * head / self._flops
        self._draw_s = config.vocab_size * _LOGIT_BYTES / self._bytes_per_s
        self._set_attention(model, gpu, gpus, kv_cache_dtype, around)

    def _set_attention(self, model: PlannedModel, gpu: GPU, gpus: int, kv_cache_dtype: str, around: GpuShare) -> None:
        performance, config = gpu.performance, model.config
        assert performance is not None
        kv_bytes_per_s = performance.decode * gpu.bytes_per_s
        self._write_token_s = model.token_bytes(kv_cache_dtype, gpus=gpus) / self._bytes_per_s
        self._mixed = performance.mixed_decode
        self._wave = max(1.0, LONGEST_SHARE * around.processors / around.kv_heads)
        self._groups = []  # window, seconds to read a token's KV, seconds of a query token with one token that it sees
        for group in model.layers:
            key, value = group.kv.head_dim, group.kv.value_dim
            if group.latent:
                key, value = (config.qk_nope_head_dim or 0) + (config.qk_rope_head_dim or 0), config.v_head_dim or 0
            work = 2 * around.heads * (key + value) * group.count / (performance.prefill * performance.bf16_flops)
            read = model.group_bytes(group, kv_cache_dtype, gpus=gpus) / kv_bytes_per_s
            self._groups.append((group.window or float("inf"), read, work))

    def kernels(self, work: StepWork) -> Kernels:
        tokens = work.tokens
        experts = 0.0
        if self._expert and self._experts is not None:
            active = active_experts(tokens, *self._experts, self.calibration.evenness)
            experts = self._product(self._expert * active, self._expert * self._experts[1] * tokens)
        head = 0.0
        if drawn := work.drawn:
            head = max(self._head_s, self._head_token_s * drawn) + _SAMPLER_S + self._draw_s * drawn
        return Kernels(
            gemm=self._product(self._linear, self._linear * tokens),
            experts=experts,
            attention=self._attention(work) + self._write_token_s * tokens,
            elementwise=self._layers * _ELEMENTWISE_S + self._element_token_s * tokens,
            head=head,
        )

    def _product(self, read: float, used: float) -> float:
        """Seconds of matrix products that read ``read`` weights and use each for some token, ``used`` in all."""
        memory, compute = read * self._of_weight / self._bytes_per_s, 2 * used / self._flops
        return (memory**_OVERLAP + compute**_OVERLAP) ** (1 / _OVERLAP)

    def _attention(self, work: StepWork) -> float:
        seconds, decodes, longest = self._layers * _ATTENTION_S, work.decodes, work.longest_decode
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
