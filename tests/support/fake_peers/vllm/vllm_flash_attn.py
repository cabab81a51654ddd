"""FlashAttention 3's two functions."""

import torch

from tests.support.paged_attention import attend


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype, cu_seqlens_q,
    page_size, causal, num_splits,
):  # fmt: skip
    return torch.tensor([batch_size, num_splits])


def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, softmax_scale, causal, block_table, out,
    scheduler_metadata, num_splits, fa_version, q_descale=None, k_descale=None, v_descale=None,
):  # fmt: skip
    assert scheduler_metadata.tolist() == [len(q), num_splits] and fa_version == 3 and q.dtype == k.dtype
    scales = tuple(1.0 if s is None else float(s[0, 0]) for s in (q_descale, k_descale, v_descale))
    return attend(q, k, v, block_table, seqused_k, softmax_scale, out, scales)
