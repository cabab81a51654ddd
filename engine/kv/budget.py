"""Turns bytes into KV capacity, the same for both layouts and only here. Imports no torch.

The budget pays for K and V of every layer, for the scales of a quantised KV, and for the page table. Bytes a token of
Llama-3.1-70B (80 layers, 8 KV heads, head dim 128, fp16): 80 x 8 x (128 + 128) x 2 = 327,680; as int8 with one
float32 scale per token and head: 80 x 8 x (128 + 128 + 2 x 4) = 168,960. (fp8's scales, two floats a layer whatever
the capacity, are not counted.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvbench_engine.config import EngineConfig
from kvbench_engine.sizes import format_bytes
from kvbench_kernels.kv_formats import find_format

PAGE_TABLE_ENTRY_BYTES = 8  # one int64 slot number; on a GPU two of int32: by row, and in the order of the step
SHORTEST_SEQUENCE = 2  # tokens: one of a prompt and one of its answer
GPU_SHARE = 0.8  # of the memory that is free beside the weights, at most


@dataclass(frozen=True)
class LayerKV:
    """K and V of one layer: ``[slots, kv_heads, head_dim]`` and ``[slots, kv_heads, value_dim]``.

    ``value_dim`` 0: no V of its own, as where an engine caches the latent row of MLA.
    """

    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class KVShape:
    """The layers of one token's KV. ``dtype_bytes``: of the model's own dtype."""

    layers: tuple[LayerKV, ...]
    dtype_bytes: int

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's K and V in all layers, in the model's own dtype."""
        return sum(layer.kv_heads * (layer.head_dim + layer.value_dim) for layer in self.layers) * self.dtype_bytes

    def slot_bytes(self, kv_cache_dtype: str) -> int:
        """Bytes of one token's KV as stored in ``kv_cache_dtype``, with its scales."""
        kv_format = find_format(kv_cache_dtype)
        if kv_format is None:
            return self.bytes_per_slot
        row = kv_format.row_bytes
        rows = ((layer.kv_heads, dim) for layer in self.layers for dim in (layer.head_dim, layer.value_dim) if dim)
        return sum(heads * row(dim) for heads, dim in rows)

    def slot_scale_bytes(self, kv_cache_dtype: str) -> int:
        """Bytes of the scales among them: one for K and one for V per KV head."""
        kv_format = find_format(kv_cache_dtype)
        return sum(2 * layer.kv_heads for layer in self.layers) * kv_format.scale_bytes if kv_format else 0


@dataclass(frozen=True)
class KVCapacity:
    """Capacity of a budget. In the contiguous layout a "page" is a reservation of ``max_model_len`` slots."""

    budget_bytes: int
    bytes_per_slot: int
    scale_bytes_per_slot: int
    page_size: int  # slots a page; contiguous: max_model_len
    num_pages: int
    num_slots: int  # contiguous: of the whole slab
    max_pages_per_seq: int
    page_table_bytes: int
    host_slots: int = 0  # slots of the swap space; paged: whole pages
    swap_space_bytes: int = 0

    def max_concurrency(self, tokens: int) -> int:
        """Sequences of ``tokens`` tokens that fit at once (contiguous: reserved at max_model_len)."""
        return self.num_pages // -(-tokens // self.page_size)


def gpu_budget(free_bytes: int, activation_bytes: int) -> int:
    """Bytes of KV on a GPU with ``free_bytes`` beside the weights.

    The largest step's ``activation_bytes`` stay free twice: for steps that run kernel by kernel, and for the pool of
    the CUDA graphs.

    Raises:
        ValueError: nothing is left.
    """
    budget = min(int(free_bytes * GPU_SHARE), free_bytes - 2 * activation_bytes)
    if budget < 1:
        raise ValueError(
            f"this GPU has {format_bytes(free_bytes)} free beside the weights, and the largest step needs about "
            f"{format_bytes(activation_bytes)} of it twice: lower max_num_batched_tokens, or set kv_budget"
        )
    return budget


def capacity_of(config: EngineConfig, shape: KVShape, budget_bytes: int) -> KVCapacity:
    """Pages that ``budget_bytes`` buy, and what the swap space holds. ``config.max_model_len`` must be settled.

    Raises:
        ValueError: the budget does not hold one sequence of ``max_model_len`` tokens, or the swap space not one page,
            with the numbers.
    """
    length = config.max_model_len
    assert length is not None, "settle max_model_len first (EngineConfig.check_against_model)"
    contiguous = config.layout == "contiguous"
    page_size = length if contiguous else config.page_size
    per_seq = -(-length // page_size)
    table_bytes = config.max_num_seqs * per_seq * PAGE_TABLE_ENTRY_BYTES
    slot_bytes = shape.slot_bytes(config.kv_cache_dtype)
    page_bytes = page_size * slot_bytes
    left = max(0, budget_bytes - table_bytes)
    num_pages = left // page_bytes
    if num_pages < per_seq:
        needed = per_seq * page_bytes + table_bytes
        raise ValueError(
            f"kv_budget {budget_bytes} ({format_bytes(budget_bytes)}) is smaller than one sequence of max_model_len "
            f"{length} tokens, which takes {needed} ({format_bytes(needed)}) with layout {config.layout!r}: "
            + _advice(config, shape, budget_bytes)
        )
    swap_bytes, host_slots = _swap_capacity(config, budget_bytes, 1 if contiguous else page_size, slot_bytes)
    return KVCapacity(
        budget_bytes=budget_bytes,
        bytes_per_slot=slot_bytes,
        scale_bytes_per_slot=shape.slot_scale_bytes(config.kv_cache_dtype),
        page_size=page_size,
        num_pages=num_pages,
        num_slots=left // slot_bytes if contiguous else num_pages * page_size,
        max_pages_per_seq=per_seq,
        page_table_bytes=table_bytes,
        host_slots=host_slots,
        swap_space_bytes=swap_bytes,
    )


def settle_length(
    config: EngineConfig, model_max_len: int | None, shape: KVShape, budget_bytes: int, *, may_lower: bool
) -> EngineConfig:
    """Settle max_model_len of ``config``: as given, else the model's own limit.

    ``may_lower``: lower one that is not given to what the budget holds of one sequence. Raises ValueError as
    ``EngineConfig.check_against_model``; a budget that is too small for any sequence is refused by ``capacity_of``.
    """
    if may_lower and config.max_model_len is None and model_max_len is not None:
        longest = _longest_sequence(config, shape, budget_bytes)
        if SHORTEST_SEQUENCE <= longest < model_max_len:
            config = replace(config, max_model_len=longest)
    return config.check_against_model(model_max_len)


def least_budget(config: EngineConfig, shape: KVShape) -> int:
    """Bytes of the smallest budget that holds any sequence, whatever ``config.max_model_len`` is."""
    slot_bytes, row_bytes = shape.slot_bytes(config.kv_cache_dtype), config.max_num_seqs * PAGE_TABLE_ENTRY_BYTES
    if config.layout == "contiguous":
        return SHORTEST_SEQUENCE * slot_bytes + row_bytes
    return -(-SHORTEST_SEQUENCE // config.page_size) * (config.page_size * slot_bytes + row_bytes)


def _advice(config: EngineConfig, shape: KVShape, budget_bytes: int) -> str:
    """Advice for a budget that does not hold one sequence of ``config.max_model_len``."""
    least = least_budget(config, shape)
    if budget_bytes < least:
        return f"raise kv_budget; below {least} ({format_bytes(least)}) it holds no sequence at all"
    longest = _longest_sequence(config, shape, budget_bytes)
    return f"raise kv_budget or lower max_model_len to {longest} or less"


def _longest_sequence(config: EngineConfig, shape: KVShape, budget_bytes: int) -> int:
    """Tokens of the longest sequence that the budget holds, whole pages of it in the paged layout."""
    slot_bytes, row_bytes = shape.slot_bytes(config.kv_cache_dtype), config.max_num_seqs * PAGE_TABLE_ENTRY_BYTES
    if config.layout == "contiguous":
        return max(0, budget_bytes - row_bytes) // slot_bytes
    return budget_bytes // (config.page_size * slot_bytes + row_bytes) * config.page_size


def _swap_capacity(config: EngineConfig, budget_bytes: int, unit: int, slot_bytes: int) -> tuple[int, int]:
    """Bytes and slots of the swap space, moved in units of ``unit`` slots; (0, 0) when preemption recomputes."""
    if config.preemption_mode != "swap":
        return 0, 0
    swap_bytes = budget_bytes if config.swap_space is None else config.swap_space
    host_slots = swap_bytes // (unit * slot_bytes) * unit
    if not host_slots:
        raise ValueError(
            f"swap_space {swap_bytes} ({format_bytes(swap_bytes)}) does not hold one page of {unit * slot_bytes} bytes "
            f"({unit} tokens): raise swap_space or use preemption_mode recompute"
        )
    return swap_bytes, host_slots
