"""FlashInfer's wrapper."""

import torch

from tests.support.paged_attention import attend


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout, use_tensor_cores):
        assert kv_layout == "NHD"

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type,
        kv_data_type, o_data_type, sm_scale,
    ):  # fmt: skip
        pages = indptr.diff()
        self.lens, self.scale = (pages - 1) * page_size + last_page_len, sm_scale
        self.table = torch.nn.utils.rnn.pad_sequence(indices.split(pages.tolist()), batch_first=True)

    def run(self, q, paged_kv_cache, out, k_scale=1.0, v_scale=1.0):
        return attend(q, *paged_kv_cache, self.table, self.lens, self.scale, out, (1.0, k_scale, v_scale))
