"""From bytes to capacity: the only place where that happens, the same for both layouts. Imports no torch.

The budget pays for K and V of every layer and for the page table. Bytes a token of Llama-3.1-70B (80 layers, 8 KV
heads, head dim 128, fp16): 80 x 8 x (128 + 128) x 2 = 327,680.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig, format_bytes

PAGE_TABLE_ENTRY_BYTES = 8  # one int64 slot number


@dataclass(frozen=True)
class LayerKV:
    """K and V of one layer: ``[slots, kv_heads, head_dim]`` and ``[slots, kv_heads, value_dim]``."""

    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class KVShape:
    """What one token's KV is made of."""

    layers: tuple[LayerKV, ...]
    dtype_bytes: int

    @property
    def bytes_per_slot(self) -> int:
        return sum(layer.kv_heads * (layer.head_dim + layer.value_dim) for layer in self.layers) * self.dtype_bytes


@dataclass(frozen=True)
class KVCapacity:
    """What a budget buys. For the contiguous layout a "page" is one reservation of ``max_model_len`` slots."""

    budget_bytes: int
    bytes_per_slot: int
    page_size: int  # slots a page; contiguous: max_model_len
    num_pages: int
    max_pages_per_seq: int
    page_table_bytes: int

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def max_concurrency(self, tokens: int) -> int:
        """Sequences of ``tokens`` tokens that fit at once."""
        return self.num_pages // -(-tokens // self.page_size)


def capacity_of(config: EngineConfig, shape: KVShape, budget_bytes: int) -> KVCapacity:
    """Pages that ``budget_bytes`` buy. ``config.max_model_len`` must be settled.

    Raises:
        ValueError: the budget does not hold one sequence of ``max_model_len`` tokens, with the numbers.
    """
    length = config.max_model_len
    assert length is not None, "settle max_model_len first (EngineConfig.check_against_model)"
    page_size = length if config.layout == "contiguous" else config.page_size
    per_seq = -(-length // page_size)
    table_bytes = config.max_num_seqs * per_seq * PAGE_TABLE_ENTRY_BYTES
    page_bytes = page_size * shape.bytes_per_slot
    num_pages = max(0, budget_bytes - table_bytes) // page_bytes
    if num_pages < per_seq:
        needed = per_seq * page_bytes + table_bytes
        raise ValueError(
            f"kv_budget {budget_bytes} ({format_bytes(budget_bytes)}) is smaller than one sequence of max_model_len "
            f"{length} tokens, which takes {needed} ({format_bytes(needed)}) with layout {config.layout!r}: raise "
            "kv_budget or lower max_model_len"
        )
    return KVCapacity(budget_bytes, shape.bytes_per_slot, page_size, num_pages, per_seq, table_bytes)
