"""Turns bytes into KV capacity, the same for both layouts and only here. Imports no torch.

The budget pays for K and V of every layer, for the scales of a quantised KV, and for the page table. Bytes a token of
Llama-3.1-70B (80 layers, 8 KV heads, head dim 128, fp16): 80 x 8 x (128 + 128) x 2 = 327,680; as int8 with one
float32 scale per token and head: 80 x 8 x (128 + 128 + 2 x 4) = 168,960. (fp8's scales, two floats a layer whatever
the capacity, are not counted.)

Layers with a sliding window and layers that see everything are groups (``kv.groups``): a page, and a slot, is then
one group's, and a token takes one in each group that still keeps it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from kvbench_engine.config import EngineConfig
from kvbench_engine.kv.groups import KVGroup, group_layers, largest, most_pages, ring_slots
from kvbench_engine.sizes import format_bytes
from kvbench_kernels.kv_formats import find_format

PAGE_TABLE_ENTRY_BYTES = 8  # one int64 slot number; on a GPU two of int32: by row, and in the order of the step
SHORTEST_SEQUENCE = 2  # tokens: one of a prompt and one of its answer
GPU_SHARE = 0.8  # of the memory that is free beside the weights, at most


@dataclass(frozen=True)
class LayerKV:
    """K and V of one layer: ``[slots, kv_heads, head_dim]`` and ``[slots, kv_heads, value_dim]``.

    ``window``: tokens that a token sees, itself among them; None: all. ``latent``: V is the first ``value_dim`` numbers
    of K, in the same memory, as in the rows of multi-head latent attention (MLA).
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    latent: bool = False

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Numbers of each row that is stored for a token and KV head: of K and of V."""
        return (self.head_dim,) if self.latent else (self.head_dim, self.value_dim)


@dataclass(frozen=True)
class KVShape:
    """The layers of one token's KV. ``dtype_bytes``: of the model's own dtype."""

    layers: tuple[LayerKV, ...]
    dtype_bytes: int

    def groups(self, max_model_len: int | None, free_outside_window: bool = True) -> tuple[KVGroup, ...]:
        """The groups of the layers. Windows of ``max_model_len`` or more hide nothing, and count as none.

        Without ``free_outside_window`` no window counts. Layers of different kinds whose KV is of different sizes have
        no pages in common: all keep every token then.
        """
        windows = [
            layer.window if layer.window and (max_model_len is None or layer.window < max_model_len) else None
            for layer in (self.layers if free_outside_window else ())
        ] or [None] * len(self.layers)
        unequal = len({replace(layer, window=None) for layer in self.layers}) > 1
        return group_layers([None] * len(windows) if unequal and len(set(windows)) > 1 else windows)

    def of_group(self, group: KVGroup) -> KVShape:
        """The shape of the layers of ``group``."""
        return KVShape(tuple(self.layers[layer] for layer in group.layers), self.dtype_bytes)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's K and V in all layers, in the model's own dtype."""
        return sum(layer.kv_heads * sum(layer.stored_dims) for layer in self.layers) * self.dtype_bytes

    def slot_bytes(self, kv_cache_dtype: str) -> int:
        """Bytes of one token's KV as stored in ``kv_cache_dtype``, with its scales."""
        kv_format = find_format(kv_cache_dtype)
        if kv_format is None:
            return self.bytes_per_slot
        row = kv_format.row_bytes
        return sum(layer.kv_heads * row(dim) for layer in self.layers for dim in layer.stored_dims)

    def slot_scale_bytes(self, kv_cache_dtype: str) -> int:
        """Bytes of the scales among them: one for each stored row of a KV head."""
        kv_format = find_format(kv_cache_dtype)
        rows = sum(layer.kv_heads * len(layer.stored_dims) for layer in self.layers)
        return rows * kv_format.scale_bytes if kv_format else 0


@dataclass(frozen=True)
class KVCapacity:
    """Capacity of a budget. In the contiguous layout a "page" is a reservation of ``max_model_len`` tokens.

    A page and a slot are of one group of layers; ``windows`` has the window of each group. ``group_page_sizes``: slots
    of a page as kernels take it, contiguous: of a group's part of a reservation; empty: ``page_size`` for all.
    ``step_tokens``: the most tokens that a sequence computes in a step.
    """

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
    windows: tuple[int | None, ...] = (None,)
    group_page_sizes: tuple[int, ...] = ()
    step_tokens: int = 1

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Slots of a page of each group."""
        return self.group_page_sizes or (self.page_size,) * len(self.windows)

    @property
    def columns(self) -> tuple[int, ...]:
        """Page-table entries of each group that a step is given, as many in every step; empty: as many as it reads.

        A kernel compiles once for a table of one page, and once for others: the pages of a contiguous reservation.
        """
        return tuple(-(-self.page_size // size) for size in self.group_page_sizes)

    def pages_of(self, tokens: int, step_tokens: int = 1) -> int:
        """The most pages at once of a sequence of ``tokens`` that computes up to ``step_tokens`` of them a step."""
        if self.group_page_sizes:
            return -(-tokens // self.page_size)
        return sum(most_pages(window, tokens, step_tokens, self.page_size) for window in self.windows)

    def max_concurrency(self, tokens: int) -> int:
        """Sequences of ``tokens`` tokens that decode at once (contiguous: reserved at max_model_len)."""
        return self.num_pages // self.pages_of(tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of sequences of max_model_len that fit at once."""
        return int(self.num_slots / self.slots_per_token)

    @property
    def slots_per_token(self) -> float:
        """Slots that a token of a sequence of max_model_len takes on average."""
        if self.windows == (None,):
            return 1.0
        if self.group_page_sizes:
            return sum(self.group_page_sizes) / self.page_size
        return self.pages_of(self.max_pages_per_seq * self.page_size) / self.max_pages_per_seq


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
    sizes = _Sizes(config, shape, length)
    num_pages = max(0, budget_bytes - sizes.table_bytes) // sizes.page_bytes
    if num_pages < sizes.least_pages:
        raise ValueError(
            f"kv_budget {budget_bytes} ({format_bytes(budget_bytes)}) is smaller than one sequence of max_model_len "
            f"{length} tokens, which takes {sizes.least_bytes} ({format_bytes(sizes.least_bytes)}) with layout "
            f"{config.layout!r}: " + _advice(config, shape, budget_bytes)
        )
    contiguous = config.layout == "contiguous"
    slot_bytes = sizes.slot_bytes
    swap_bytes, host_slots = _swap_capacity(config, budget_bytes, 1 if contiguous else sizes.page_size, slot_bytes)
    left = budget_bytes - sizes.table_bytes
    return KVCapacity(
        budget_bytes=budget_bytes,
        bytes_per_slot=slot_bytes,
        scale_bytes_per_slot=sizes.group.slot_scale_bytes(config.kv_cache_dtype),
        page_size=sizes.page_size,
        num_pages=num_pages,
        num_slots=left // slot_bytes if contiguous else num_pages * sizes.page_size,
        max_pages_per_seq=sizes.columns,
        page_table_bytes=sizes.table_bytes,
        host_slots=host_slots,
        swap_space_bytes=swap_bytes,
        windows=sizes.windows,
        group_page_sizes=sizes.rings if contiguous else (),
        step_tokens=config.max_num_batched_tokens,
    )


class _Sizes:
    """The sizes of one sequence of ``length`` tokens, and of the page table, with the settings of ``config``."""

    def __init__(self, config: EngineConfig, shape: KVShape, length: int):
        groups, step = shape.groups(length, config.free_outside_window), config.max_num_batched_tokens
        self.windows = tuple(group.window for group in groups)
        self.group = shape.of_group(largest(groups))
        self.slot_bytes = self.group.slot_bytes(config.kv_cache_dtype)
        contiguous = config.layout == "contiguous"
        self.page_size = length if contiguous else config.page_size
        self.rings = tuple(ring_slots(window, length, step) for window in self.windows)
        if contiguous:
            self.columns = -(-length // min(self.rings))
            self.page_bytes, self.least_pages = sum(self.rings) * self.slot_bytes, 1
        else:
            self.columns = -(-length // self.page_size)
            self.page_bytes = self.page_size * self.slot_bytes
            self.least_pages = sum(most_pages(window, length, step, self.page_size) for window in self.windows)
        self.table_bytes = config.max_num_seqs * len(groups) * self.columns * PAGE_TABLE_ENTRY_BYTES
        self.least_bytes = self.least_pages * self.page_bytes + self.table_bytes


def page_table_bytes(config: EngineConfig, shape: KVShape) -> int:
    """Bytes of the page tables of ``config``, whose max_model_len is settled."""
    return _Sizes(config, shape, config.max_model_len or SHORTEST_SEQUENCE).table_bytes


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
    return _Sizes(config, shape, SHORTEST_SEQUENCE).least_bytes


def _advice(config: EngineConfig, shape: KVShape, budget_bytes: int) -> str:
    """Advice for a budget that does not hold one sequence of ``config.max_model_len``."""
    least = least_budget(config, shape)
    if budget_bytes < least:
        return f"raise kv_budget; below {least} ({format_bytes(least)}) it holds no sequence at all"
    longest = _longest_sequence(config, shape, budget_bytes)
    return f"raise kv_budget or lower max_model_len to {longest} or less"


def _longest_sequence(config: EngineConfig, shape: KVShape, budget_bytes: int) -> int:
    """Tokens of the longest sequence that the budget holds, whole pages of it in the paged layout."""
    unit = 1 if config.layout == "contiguous" else config.page_size
    most = budget_bytes // (unit * PAGE_TABLE_ENTRY_BYTES)  # units; each has an entry in the page table
    lengths = range(unit, unit * (most + 1), unit)
    return unit * bisect_right(lengths, budget_bytes, key=lambda length: _Sizes(config, shape, length).least_bytes)


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
