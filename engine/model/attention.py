"""Our attention behind a Hugging Face model's own code.

transformers looks attention up by name and calls ``forward(module, query, key, value, mask, ...)`` after RoPE. The
name ``kvbench`` is registered here without a mask function of that name: the mask is then None and the packed batch
``[1, T]`` goes through the model as one row. The step's data is not passed through the model (some drop unknown
kwargs): each attention module has a reference to its model's ``AttentionHost``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from kvbench_engine.kv.budget import KVShape, LayerKV
from kvbench_engine.kv.groups import KVGroup, largest
from kvbench_kernels.api import AttentionBackend, AttentionOptions, KVCache, KVPair, PrefillBatch
from kvbench_kernels.cpu_memory import cache_zeros
from kvbench_kernels.kv_formats import find_format
from kvbench_kernels.quantized import QuantizedKV, count_saturated, first_values, raw_tensors, shares_rows
from kvbench_kernels.reference import token_slots

NAME = "kvbench"
HOST = "_kvbench_host"
FUSION = "_kvbench_fusion"  # on a model whose modules have forwards of fewer kernels, see model.fused_layers
FOLDED = "_kvbench_folded"  # on an attention module whose latent rows are kept, see model.latent
PACKED = "_kvbench_packed"  # on a model whose linear layers are packed, see kvbench_engine.model.cpu_layers


@dataclass(frozen=True)
class StepTensors:
    """One step's batch, packed as [decodes, one token each | prefill chunks]. All on the model's device.

    ``slots [G, T]`` int64 where the new KV goes in each of G groups of layers (``kv.groups``); ``page_starts [G, B,
    pages]`` int32 or int64 first slot of each page; ``seq_lens [B]`` int64 tokens once this step is done;
    ``query_starts [prefills + 1]`` int64, first token of each prefill, counted from token ``prefills_from`` of the
    batch: ``num_decodes``, or less in a captured step, where the two parts overlap because only the device knows where
    one ends. There every token belongs to a sequence of both, and in the part that does not compute it that sequence
    has length 0. The ``max_`` numbers bound the tensors' values, so that the tensors need not be read: no decode or
    prefill is longer, none has more new tokens. 0 where there is none; a larger bound only starts more programs.
    """

    num_decodes: int
    slots: torch.Tensor
    decode_page_starts: torch.Tensor
    decode_seq_lens: torch.Tensor
    prefill_page_starts: torch.Tensor
    prefill_seq_lens: torch.Tensor
    query_starts: torch.Tensor
    max_decode_tokens: int
    max_prefill_tokens: int
    max_queries: int
    prefills_from: int | None = None  # None: num_decodes

    @classmethod
    def of_prompt(cls, slots: torch.Tensor, page_starts: torch.Tensor) -> StepTensors:
        """A step that computes one whole prompt: ``slots [T]`` of its tokens, ``page_starts [1, pages]``; one group."""
        count, none = len(slots), slots[:0]
        ends = slots.new_tensor([0, count])
        return cls(0, slots[None], page_starts[None, :0], none, page_starts[None], ends[1:], ends, 0, count, count)


@dataclass(frozen=True)
class PromptRuns:
    """A step's prompts laid one after another, so that attention needs no page table.

    ``num_decodes``: tokens of the step before them. ``slots [S]``: of their tokens in the cache.
    """

    num_decodes: int
    slots: torch.Tensor
    batch: PrefillBatch
    plan: Any


class AttentionHost:
    """Holds the KV cache of all layers and computes the attention of the model's modules.

    ``k_caches[l]`` is ``[slots, kv_heads, head_dim]``, ``v_caches[l]`` is ``[slots, kv_heads, value_dim]``: plain
    tensors for ``kv_cache_dtype`` "auto", else ``QuantizedKV`` of that format; a latent layer's V is a view of its K.
    ``kv_scales`` (K, V per layer, see model.kv_scales): for fp8 and only for fp8, which raises ValueError without them;
    K's serves a latent row. ``fused_layers``: whether modules that can do so write their KV themselves. ``groups``: the
    layers that have a page table together; the i-th layers of all groups share memory. None: all layers are one group.
    ``page_sizes``: of each group; ``columns``: see ``KVCapacity``.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        shape: KVShape,
        num_slots: int,
        page_sizes: Sequence[int],
        like: torch.Tensor,
        kv_cache_dtype: str = "auto",
        kv_scales: list[tuple[float, float]] | None = None,
        fused_layers: bool = False,
        groups: tuple[KVGroup, ...] | None = None,
        columns: Sequence[int] = (),
    ):
        self.backend = backend
        self.page_sizes = page_sizes
        self._columns = columns or [None] * len(page_sizes)
        self.fused_layers = fused_layers
        layers = range(len(shape.layers))
        kv_format = find_format(kv_cache_dtype)

        def new_cache(heads: int, dim: int, scale: float | None) -> KVCache:
            if kv_format is None:
                return cache_zeros((num_slots, heads, dim), like.dtype, like.device)
            return QuantizedKV.zeros(kv_format, num_slots, heads, dim, like.device, scale)

        scales = kv_scales or [(None, None)] * len(layers)
        scales = [(k, k if kv.latent else v) for (k, v), kv in zip(scales, shape.layers, strict=True)]
        groups = groups or (KVGroup(None, tuple(layers)),)
        self._keeps_all = all(group.window is None for group in groups)
        self._group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._owners = largest(groups).layers  # whose memory the layers at the same place of other groups share
        owner_of = {layer: self._owners[place] for group in groups for place, layer in enumerate(group.layers)}
        sides = {}
        for layer in self._owners:
            kv, (k_scale, v_scale) = shape.layers[layer], scales[layer]
            k = new_cache(kv.kv_heads, kv.head_dim, k_scale)
            v = first_values(k, kv.value_dim) if kv.latent else new_cache(kv.kv_heads, kv.value_dim, v_scale)
            sides[layer] = k, v
        self.k_caches = [_scaled(sides[owner_of[layer]][0], scales[layer][0]) for layer in layers]
        self.v_caches = [_scaled(sides[owner_of[layer]][1], scales[layer][1]) for layer in layers]
        self._step: StepTensors | None = None
        self._slots: Sequence[torch.Tensor] = ()  # of each group
        self._decode_tables: list[torch.Tensor] = []
        self._decode_plan: Any = None
        self._prefills: list[PrefillBatch] = []
        self._prefill_plans: list[Any] = []
        self._runs: PromptRuns | bool | None = None  # of this step; False: not wanted, None: not asked yet

    def raw_tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor of the cache, ``[slots, ...]``, codes and scales: what copies and swaps move."""
        return tuple(t for _, cache in self._stored(self._owners) for t in raw_tensors(cache))

    def _stored(self, layers: Iterable[int]) -> list[tuple[int, KVCache]]:
        """The layer and the cache of every side of ``layers`` that has memory of its own."""
        k, v = self.k_caches, self.v_caches
        own = [layer for layer in layers if not shares_rows(k[layer], v[layer])]
        return [(layer, k[layer]) for layer in layers] + [(layer, v[layer]) for layer in own]

    def count_saturated(self, slots: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Count the values of an fp8 cache at ``slots [G, n]`` that have its largest code, and all of them."""
        caches = self._stored(range(len(self.k_caches)))
        counts = torch.stack([count_saturated(cache, slots[self._group_of[layer]]) for layer, cache in caches])
        values = slots.shape[1] * sum(cache.codes[0].numel() for _, cache in caches)
        return counts.sum().to("cpu", non_blocking=True), values

    def begin(self, step: StepTensors) -> None:
        """Prepare what all layers share."""
        self._step, self._runs = step, None
        self._slots = step.slots.unbind(0)
        self._decode_tables = self._tables(step.decode_page_starts)
        if step.num_decodes:  # what is planned does not depend on where pages lie
            self._decode_plan = self.backend.plan_decode(
                self._decode_tables[0], step.decode_seq_lens, self.page_sizes[0], max_tokens=step.max_decode_tokens
            )
        if step.prefill_seq_lens.numel():
            self._prefills = [
                PrefillBatch(table, step.query_starts, step.prefill_seq_lens, size)
                for table, size in zip(self._tables(step.prefill_page_starts), self.page_sizes, strict=True)
            ]
            bounds = {"max_queries": step.max_queries, "max_tokens": step.max_prefill_tokens}
            self._prefill_plans = [self.backend.plan_prefill(batch, **bounds) for batch in self._prefills]

    def _tables(self, page_starts: torch.Tensor) -> list[torch.Tensor]:
        """The page table ``[B, pages]`` of each group."""
        return [table[:, :columns] for table, columns in zip(page_starts.unbind(0), self._columns, strict=True)]

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Computes attention of ``q [T, H, D]`` -> ``[T, H, Dv]``; ``k``, ``v [T, Hkv, D | Dv]`` are stored first."""
        self.backend.write_kv(k, v, *self.destination(layer))
        return self.attend(layer, q, options, new_kv=(k, v))

    def destination(self, layer: int) -> tuple[KVCache, KVCache, torch.Tensor]:
        """The places of the step's K and V of a layer: its caches, and the slot of each token."""
        assert self._step is not None, "begin() comes before the model's forward"
        return self.k_caches[layer], self.v_caches[layer], self._slots[self._group_of[layer]]

    def attend(
        self, layer: int, q: torch.Tensor, options: AttentionOptions, new_kv: KVPair | None = None
    ) -> torch.Tensor:
        """Computes attention of ``q [T, H, D]`` once the step's KV is in the cache -> ``[T, H, Dv]``."""
        step = self._step
        assert step is not None, "begin() comes before the model's forward"
        k_cache, v_cache, group = self.k_caches[layer], self.v_caches[layer], self._group_of[layer]
        out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])
        split = step.num_decodes
        first = split if step.prefills_from is None else step.prefills_from
        if first < q.shape[0]:
            self.backend.prefill_attention(
                q[first:],
                k_cache,
                v_cache,
                self._prefills[group],
                options,
                out=out[first:],
                new_kv=None if new_kv is None else (new_kv[0][first:], new_kv[1][first:]),
                plan=self._prefill_plans[group],
            )
        if split:
            overlap = first < split
            decoded = self.decode(layer, q[:split], options, None if overlap else out[:split])
            if overlap:  # each part is 0 where the other one computes
                out[first:split].add_(decoded[first:])
        return out

    def decode(
        self, layer: int, q: torch.Tensor, options: AttentionOptions, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes attention of the step's single tokens alone, ``q [num_decodes, H, D]``."""
        step, group = self._step, self._group_of[layer]
        assert step is not None
        k_cache, v_cache, table = self.k_caches[layer], self.v_caches[layer], self._decode_tables[group]
        where = table, step.decode_seq_lens, self.page_sizes[group]
        return self.backend.decode_attention(q, k_cache, v_cache, *where, options, out=out, plan=self._decode_plan)

    def prompt_runs(self, wanted: Callable[[list[int], list[int]], bool]) -> PromptRuns | None:
        """Returns where the step's prompts lie in the cache, made for the first layer that asks.

        ``wanted``: decides it by the tokens to compute and the tokens in all of each sequence. None if not, without
        prompts, where only the device knows the lengths, and where pages outside a window are freed.
        """
        step = self._step
        assert step is not None
        if self._runs is None:
            lens = step.prefill_seq_lens
            on_host = lens.device.type == "cpu" and step.prefills_from is None
            may = on_host and self._keeps_all and lens.numel() > 0
            should = may and wanted(step.query_starts.diff().tolist(), lens.tolist())
            self._runs = self._find_runs(step, self._prefills[0]) if should else False
        return self._runs or None

    def _find_runs(self, step: StepTensors, prefills: PrefillBatch) -> PromptRuns:
        lens = step.prefill_seq_lens
        places = zip(prefills.page_starts, lens.tolist(), strict=True)
        slots = torch.cat([token_slots(table, 0, count, prefills.page_size) for table, count in places])
        batch = replace(prefills, page_starts=(lens.cumsum(0) - lens)[:, None], page_size=int(lens.max()))
        plan = self.backend.plan_prefill(batch, max_queries=step.max_queries, max_tokens=step.max_prefill_tokens)
        return PromptRuns(step.num_decodes, slots, batch, plan)


def _scaled(cache: KVCache, scale: float | None) -> KVCache:
    """The same memory with the fp8 scale of a layer, if it has one."""
    return cache if scale is None or not isinstance(cache, QuantizedKV) else cache.with_scale(scale)


@dataclass
class ShapeRecorder:
    """A stand-in for the host that records the shapes that each layer sends, and how often it calls."""

    layers: dict[int, LayerKV] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)
    query_heads: dict[int, int] = field(default_factory=dict)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.calls[layer] += 1
        self.layers[layer] = LayerKV(k.shape[1], k.shape[2], v.shape[2], options.sliding_window, shares_rows(k, v))
        self.query_heads[layer] = q.shape[1]
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])


def install(model: PreTrainedModel, host: AttentionHost | ShapeRecorder) -> None:
    """Route every attention module of ``model`` to ``host``; quick if that is done already."""
    if getattr(model, HOST, None) is not host:
        for module in model.modules():
            if module is model or hasattr(module, "layer_idx"):
                setattr(module, HOST, host)
        fusion = getattr(model, FUSION, None)
        if fusion is not None:
            fusion.on = getattr(host, "fused_layers", False)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)


class ForeignMaskError(ValueError):
    """A layer sends an attention mask of its own."""


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls, after RoPE.

    ``query [1, H, T, D]``, ``key`` and ``value [1, Hkv, T, D | Dv]``; of folded MLA they are as ``model.latent`` says.

    Raises:
        ForeignMaskError: the model made its own mask; without it the output would be wrong.
    """
    if attention_mask is not None:
        raise ForeignMaskError(f"{type(module).__name__} of layer {module.layer_idx} sends a mask of its own making")
    host, folded = getattr(module, HOST), getattr(module, FOLDED, None)
    options = AttentionOptions(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if folded is None:
        out = host(module.layer_idx, q, k, v, options)
    else:
        out = folded.attend(host, module.layer_idx, q, k, v, options)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, forward)
