"""Folds multi-head latent attention (MLA) into attention with one KV head: the rows that the KV cache keeps.

DeepSeek V2 and its kin make K and V of every head from one latent row a token: K is ``[W_K c | k_rope]`` and V is
``W_V c``, with c of ``kv_lora_rank`` numbers. The products with W_K and W_V are moved to the queries and to the result:
q_nope W_K meets c itself, and W_V multiplies what attention returns. The cache then has ``[c | k_rope]``, once for all
heads, and V is the first numbers of the same row (arXiv 2405.04434, section 2.1).

Everything before stays the model's own code: projections, norms and rotation. transformers' modules turn c and k_rope
into K and V in a method of its own, ``expand_kv``, which is replaced while our attention serves the model.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from kvbench_engine.model.attention import FOLDED, NAME, AttentionHost, ShapeRecorder
from kvbench_kernels.api import AttentionOptions
from kvbench_kernels.reference import load_rows

MOST_UNFOLDED = 16_384  # tokens of a step's prompts whose K and V of every head may be in memory at a time
_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


class FoldedAttention:
    """Folds one attention module.

    ``kv_b_proj.weight`` is read as W_K ``[H, nope, rank]`` and W_V ``[H, v, rank]``, which are views of it.
    """

    def __init__(self, module: nn.Module):
        self._config, self._expand = module.config, module.expand_kv
        self._nope, self._rank, self._rope = module.qk_nope_head_dim, module.kv_lora_rank, module.qk_rope_head_dim
        self._v = module.v_head_dim
        weight = module.kv_b_proj.weight.view(-1, self._nope + module.v_head_dim, self._rank)
        self._keys, self._values = weight.split([self._nope, module.v_head_dim], dim=1)
        module.expand_kv = self.expand_kv

    def expand_kv(self, latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Joins ``latent [1, 1, T, rank]`` and ``k_rope [1, 1, T, rope]`` to K ``[1, 1, T, rank + rope]``.

        V is the first ``rank`` numbers of K, in the same memory.
        """
        if self._config._attn_implementation != NAME:
            return self._expand(latent, k_rope)
        row = torch.cat((latent, k_rope), dim=-1)
        return row, row[..., : self._rank]

    def attend(
        self,
        host: AttentionHost | ShapeRecorder,
        layer: int,
        q: torch.Tensor,
        row: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Computes attention of ``q [T, H, nope + rope]``, ``row [T, 1, rank + rope]`` stored first -> ``[T, H, v]``.

        On a CPU, prompts get K and V of every head for the time of the call where that is less arithmetic.
        """
        runs = host.prompt_runs(self.should_unfold) if isinstance(host, AttentionHost) else None
        if runs is None:
            return self._unfold(host(layer, self._absorb(q), row, v, options))
        host.backend.write_kv(row, v, *host.destination(layer))
        split, out = runs.num_decodes, q.new_empty(*q.shape[:2], self._v)
        if split:
            out[:split] = self._unfold(host.decode(layer, self._absorb(q[:split]), options))
        rows = load_rows(host.k_caches[layer], runs.slots).to(q.dtype)
        k, v = self._expand(*rows[None].transpose(1, 2).split([self._rank, self._rope], dim=-1))
        cache = k[0].transpose(0, 1), v[0].transpose(0, 1)
        host.backend.prefill_attention(q[split:], *cache, runs.batch, options, out=out[split:], plan=runs.plan)
        return out

    def should_unfold(self, queries: list[int], keys: list[int]) -> bool:
        """Tests whether prompts take less arithmetic with K and V of every head than with the rows.

        ``queries``, ``keys``: tokens to compute and tokens in all, by sequence. W_K and W_V are then multiplied with
        each key, else with each query; but a pair of a query and a key costs about three times as much with the rows.
        """
        product, saved = self._rank * (self._nope + self._v), 2 * self._rank - self._nope - self._v
        pairs = sum(new * (count - new / 2) for new, count in zip(queries, keys, strict=True))
        return sum(keys) <= MOST_UNFOLDED and product * (sum(keys) - sum(queries)) < saved * pairs

    def _absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Multiplies the queries ``[T, H, nope + rope]`` by W_K: ``[T, H, rank + rope]``."""
        absorbed = torch.bmm(q[..., : self._nope].transpose(0, 1), self._keys)
        return torch.cat((absorbed.transpose(0, 1), q[..., self._nope :]), dim=-1)

    def _unfold(self, mixed: torch.Tensor) -> torch.Tensor:
        """Multiplies attention's result ``[T, H, rank]`` by W_V: ``[T, H, v]``."""
        return torch.bmm(mixed[..., : self._rank].transpose(0, 1), self._values.transpose(1, 2)).transpose(0, 1)


def fold_latent(model: PreTrainedModel) -> None:
    """Folds every attention module that can be."""
    for module in filter(_can_fold, model.modules()):
        setattr(module, FOLDED, FoldedAttention(module))


def unfold_latent(model: PreTrainedModel) -> None:
    """Gives every module its own ``expand_kv`` again."""
    for module in folded_modules(model):
        delattr(module, FOLDED)
        del module.expand_kv


def can_fold(model: PreTrainedModel) -> bool:
    """Tests whether any attention module of ``model`` can be folded, which needs weights that are not packed."""
    return any(map(_can_fold, model.modules()))


def folded_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention modules that are folded."""
    return [module for module in model.modules() if hasattr(module, FOLDED)]


def _can_fold(module: nn.Module) -> bool:
    linear = getattr(module, "kv_b_proj", None)
    if not hasattr(module, "expand_kv") or type(linear) is not nn.Linear or linear.bias is not None:
        return False
    return all(isinstance(getattr(module, name, None), int) for name in _SIZES)
