"""The KV manager of each layout."""

from __future__ import annotations

from kvbench_engine.config import EngineConfig
from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.contiguous import ContiguousKVManager
from kvbench_engine.kv.manager import KVManager
from kvbench_engine.kv.paged import PagedKVManager


def make_kv_manager(config: EngineConfig, capacity: KVCapacity) -> KVManager:
    """The manager of ``config.layout``."""
    if config.layout == "contiguous":
        return ContiguousKVManager(config.max_num_seqs, capacity, config.reservation)
    return PagedKVManager(config.max_num_seqs, capacity, config.enable_prefix_caching, config.watermark)
