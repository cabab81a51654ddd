"""Faster modules for a float32 or bfloat16 model on a CPU, with the arithmetic of transformers' own; in bfloat16 with
fewer roundings between its steps.

Linear layers, attention with separate Q, K and V projections, MLPs of the form ``down(act(gate(x)) * up(x))`` and
RMSNorms are replaced by those of kernels.layers_cpu, in any model. Each module is tried out first, on small and large
numbers, attention at the first and the last positions, and is replaced only if both give the same. So a norm that adds
1 to its weights, an MLP that clamps, or attention that scales queries by their position stays as it is.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.cpu_attention import join_attention
from engine.model.try_out import PROBE_SIZES, PROBE_TOKENS, named, same_numbers
from kernels.cpu_memory import HugeArena
from kernels.layers_cpu import GatedMLP, PackedLinear, RMSNorm, can_norm, can_pack

_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")


@torch.inference_mode()
def use_cpu_layers(model: PreTrainedModel) -> None:
    """Replace all modules that can be replaced, and free their weights. A head tied to the embedding stays as it is,
    because the embedding would be kept beside its packed weights."""
    arena = HugeArena()
    for name, norm in named(model, _is_rms_norm):
        _replace(model, name, norm, RMSNorm(norm.weight, norm.variance_epsilon), len(norm.weight))
    join_attention(model, arena)
    embedding = model.get_input_embeddings().weight
    for name, linear in named(model, lambda module: can_pack(module) and module.weight is not embedding):
        _replace(model, name, linear, PackedLinear([linear], arena), linear.in_features)
    for name, mlp in named(model, _is_gated_mlp):
        ours = GatedMLP(*(getattr(mlp, part) for part in _MLP_PARTS))
        _replace(model, name, mlp, ours, mlp.gate_proj.in_features)


def _is_gated_mlp(module: nn.Module) -> bool:
    parts = {name for name, _ in module.named_children()} - {"act_fn"}
    return (
        parts == set(_MLP_PARTS)
        and all(type(getattr(module, part)) is PackedLinear for part in _MLP_PARTS)
        and not list(module.named_parameters(recurse=False))
        and len(inspect.signature(module.forward).parameters) == 1
    )


def _is_rms_norm(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_parameters()]
    return names == ["weight"] and hasattr(module, "variance_epsilon") and can_norm(module.weight)


def _replace(model: nn.Module, name: str, own: nn.Module, ours: nn.Module, width: int) -> None:
    x = torch.randn(1, PROBE_TOKENS, width, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    if all(same_numbers(own(x * size), ours(x * size)) for size in PROBE_SIZES[model.dtype]):
        model.set_submodule(name, ours)
