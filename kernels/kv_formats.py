"""Formats of a quantised KV cache and what they cost in bytes. Imports no torch, so that a budget can count with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVFormat:
    """The storage of the ``dim`` values of a token's KV head in one side (K or V) of the cache.

    ``code_bits``: bits a value. ``scale_bytes``: bytes of scale per token and KV head: 4 (one float32) for the
    per-token-head formats, 0 for fp8, whose scale is one number per layer and side.
    """

    name: str
    code_bits: int
    scale_bytes: int

    def code_bytes(self, dim: int) -> int:
        """Bytes of the codes of one token's KV head; a last odd int4 code takes a byte of its own."""
        return (self.code_bits * dim + 7) // 8

    def row_bytes(self, dim: int) -> int:
        """Bytes of one token's KV head in the cache, codes and scale."""
        return self.code_bytes(dim) + self.scale_bytes


FP8_E4M3 = KVFormat("fp8_e4m3", 8, 0)
FP8_E5M2 = KVFormat("fp8_e5m2", 8, 0)
INT8 = KVFormat("int8_per_token_head", 8, 4)
INT4 = KVFormat("int4_per_token_head", 4, 4)

KV_FORMATS: dict[str, KVFormat] = {f.name: f for f in (FP8_E4M3, FP8_E5M2, INT8, INT4)}


def find_format(kv_cache_dtype: str) -> KVFormat | None:
    """The format called ``kv_cache_dtype``; None for "auto", a cache in the model's own dtype.

    Raises:
        ValueError: there is no such format.
    """
    if kv_cache_dtype == "auto":
        return None
    if kv_cache_dtype not in KV_FORMATS:
        raise ValueError(f"unknown kv_cache_dtype {kv_cache_dtype!r}: use one of auto, {', '.join(KV_FORMATS)}")
    return KV_FORMATS[kv_cache_dtype]
