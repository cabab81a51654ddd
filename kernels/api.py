"""The interface of every backend. Shapes: T packed tokens, B sequences, H query heads, Hkv KV heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvbench_kernels.quantized import QuantizedKV

KVCache = torch.Tensor | QuantizedKV  # one side of one layer
MAX_ROPE_DIM = 128  # values of a latent row beside those that are V
KVPair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionOptions:
    """The settings of one layer's attention, apart from its tensors.

    ``scale``: of q . k. ``sliding_window`` w: token i attends to i-w < j <= i. ``softcap`` c: c * tanh(s / c) after
    the scale. ``sinks [H]``, any float dtype: one more logit per query head that joins the softmax denominator and
    has no value.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class PrefillBatch:
    """The chunks of prompts that one step computes, the same for all layers.

    ``page_starts [B, max_pages]`` int32 or int64: the first slot of each page. ``query_starts [B + 1]``: sequence b's
    queries are its LAST ``query_starts[b+1] - query_starts[b]`` tokens. ``seq_lens [B]`` counts cached and new tokens.
    """

    page_starts: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int


class AttentionBackend(Protocol):
    """A backend of attention. One object serves all layers; one thread at a time calls it.

    Unused slots (beyond ``seq_lens``, or in pages nobody owns) may hold anything, NaN included.
    A sequence of length 0 gets zeros.

    Both caches of a layer are plain tensors, or both ``QuantizedKV`` of one format. **Attention always
    sees K and V through the cache's format**, the new tokens of a prefill chunk too: what a token attends
    to must not depend on how its prompt was chunked, cached or preempted.

    V's cache may be a view of the first values of K's (``quantized.shares_rows``), as latent rows (MLA) are kept. Then
    there is one KV head, K alone is written, and K and V of new tokens share memory too.
    """

    name: str

    def check_support(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_cache_dtype: str = "auto",
        latent: bool = False,
    ) -> None:
        """Raise ValueError (one sentence with value, limit, next step) for a shape or dtype that it cannot serve.

        ``dtype``: what the model computes in; ``kv_cache_dtype``: "auto" (a cache in ``dtype``) or a name of
        ``kvbench_kernels.kv_formats.KV_FORMATS``. ``latent``: V is the first ``v_head_dim`` values of K.
        """
        ...

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        slots: torch.Tensor,
    ) -> None:
        """Store ``k [T, Hkv, D]``, ``v [T, Hkv, Dv]`` at ``slots [T] int64``; slot < 0 is skipped."""
        ...

    def decode_attention(
        self,
        q: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        page_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        page_size: int,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
        plan: Any | None = None,
    ) -> torch.Tensor:
        """Attention of one query per sequence, its last token: ``q [B, H, D]`` -> ``[B, H, Dv]``.

        ``page_starts [B, max_pages]``, ``seq_lens [B]`` int32 or int64 (the new token counted).
        ``out`` is written and returned when given. ``plan`` comes from this backend's ``plan_decode``.
        """
        ...

    def prefill_attention(
        self,
        q: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        batch: PrefillBatch,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
        new_kv: KVPair | None = None,
        plan: Any | None = None,
    ) -> torch.Tensor:
        """Causal attention of packed queries ``q [T, H, D]`` -> ``[T, H, Dv]``.

        The KV of the new tokens is already written. ``new_kv``: their packed K and V, so that a sequence without
        earlier context needs no gather (not used with a quantised cache). ``plan`` comes from this backend's
        ``plan_prefill``.
        """
        ...

    def plan_decode(self, page_starts: torch.Tensor, seq_lens: torch.Tensor, page_size: int, *, max_tokens: int) -> Any:
        """Plan the step's decode before the first layer, for all of them (pass it as ``plan=``).

        ``max_tokens``: no ``seq_lens`` is larger. A bound known on the host: planning never waits for the device.
        """
        ...

    def plan_prefill(self, batch: PrefillBatch, *, max_queries: int, max_tokens: int) -> Any:
        """Plan the step's prefill before the first layer, for all of them (pass it as ``plan=``).

        ``max_queries``: no sequence has more new tokens; ``max_tokens``: none of ``batch.seq_lens`` is larger.
        """
        ...


def check_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int, max_head_dim: int, latent: bool = False
) -> None:
    """Check what all backends need; ValueError names the value, the limit and what to do.

    The values of a latent row that are not V have a limit of their own, for they are multiplied apart.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly: "
            "the number of query heads must be a multiple of the number of KV heads"
        )
    rest = ("latent row's other values", head_dim - v_head_dim, MAX_ROPE_DIM)
    of_k = rest if latent else ("head dim", head_dim, max_head_dim)
    for label, dim, limit in (of_k, ("value head dim", v_head_dim, max_head_dim)):
        if not 1 <= dim <= limit:
            otherwise = ", or latent_kv false" if latent else ""
            raise ValueError(
                f"{label} {dim} is outside 1..{limit}, what this kernel backend serves: use the torch backend for this "
                f"model{otherwise}"
            )


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x itself if its last dimension is contiguous (other strides may be anything), else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
