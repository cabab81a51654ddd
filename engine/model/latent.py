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

FOLDED = "_kvbench_folded"  # on an attention module: its FoldedAttention
_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


class FoldedAttention:
    """Folds one attention module.

    ``kv_b_proj.weight`` is read as W_K ``[H, nope, rank]`` and W_V ``[H, v, rank]``, which are views of it.
    """

    def __init__(self, module: nn.Module, own_name: str):
        self._own_name, self._config, self._expand = own_name, module.config, module.expand_kv
        self._nope, self._rank = module.qk_nope_head_dim, module.kv_lora_rank
        weight = module.kv_b_proj.weight.view(-1, self._nope + module.v_head_dim, self._rank)
        self._keys, self._values = weight.split([self._nope, module.v_head_dim], dim=1)
        module.expand_kv = self.expand_kv

    @property
    def active(self) -> bool:
        """Tests whether our attention serves the model, rather than one of transformers' own."""
        return self._config._attn_implementation == self._own_name

    def expand_kv(self, latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Joins ``latent [1, 1, T, rank]`` and ``k_rope [1, 1, T, rope]`` to K ``[1, 1, T, rank + rope]``.

        V is the first ``rank`` numbers of K, in the same memory.
        """
        if not self.active:
            return self._expand(latent, k_rope)
        row = torch.cat((latent, k_rope), dim=-1)
        return row, row[..., : self._rank]

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Multiplies the queries ``[T, H, nope + rope]`` by W_K: ``[T, H, rank + rope]``."""
        absorbed = torch.bmm(q[..., : self._nope].transpose(0, 1), self._keys)
        return torch.cat((absorbed.transpose(0, 1), q[..., self._nope :]), dim=-1)

    def unfold(self, mixed: torch.Tensor) -> torch.Tensor:
        """Multiplies attention's result ``[T, H, rank]`` by W_V: ``[T, H, v]``."""
        return torch.bmm(mixed[..., : self._rank].transpose(0, 1), self._values.transpose(1, 2)).transpose(0, 1)


def fold_latent(model: PreTrainedModel, own_name: str) -> None:
    """Folds every attention module that can be. ``own_name``: the name of our attention."""
    for module in filter(_can_fold, model.modules()):
        setattr(module, FOLDED, FoldedAttention(module, own_name))


def unfold_latent(model: PreTrainedModel) -> None:
    """Gives every module its own ``expand_kv`` again."""
    for module in folded_modules(model):
        delattr(module, FOLDED)
        del module.expand_kv


def can_fold(model: PreTrainedModel) -> bool:
    """Tests whether ``model`` has attention modules that can be folded, or are. Packed weights cannot."""
    return any(map(_can_fold, model.modules()))


def folded_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention modules that are folded."""
    return [module for module in model.modules() if hasattr(module, FOLDED)]


def _can_fold(module: nn.Module) -> bool:
    linear = getattr(module, "kv_b_proj", None)
    if not hasattr(module, "expand_kv") or type(linear) is not nn.Linear or linear.bias is not None:
        return False
    return all(isinstance(getattr(module, name, None), int) for name in _SIZES)
