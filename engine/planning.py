"""Plans an engine before anything is loaded: length, dtype and KV capacity. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench_engine.config import DEFAULT_CPU_BUDGET, EngineConfig
from kvbench_engine.kv.budget import KVCapacity, capacity_of, settle_length
from kvbench_engine.model.spec import ModelSpec, find_model


@dataclass(frozen=True)
class Plan:
    """A planned engine: ``config`` with max_model_len settled, and its capacity.

    ``capacity``: None where only a GPU's free memory tells the budget.
    """

    config: EngineConfig
    spec: ModelSpec
    dtype: str
    capacity: KVCapacity | None


def window_note(spec: ModelSpec, max_model_len: int | None) -> str | None:
    """A sentence where layers have a sliding window and all their tokens are kept all the same; else None."""
    try:
        shape = spec.kv_shape("float32")
    except ValueError:  # other keys, or a list, one entry a layer
        return None
    shorter = [kv.window for kv in shape.layers if kv.window and (max_model_len is None or kv.window < max_model_len)]
    if not shorter or any(group.window for group in shape.groups(max_model_len)):
        return None
    return (
        f"{len(shorter)} of {len(shape.layers)} layers look back {max(shorter)} tokens, and the built-in engine keeps "
        "KV of all tokens there, because KV of the other layers has another size: other engines, and `kvbench plan "
        "MODEL`, hold more sequences at once"
    )


def plan_engine(config: EngineConfig, *, on_cpu: bool, may_lower: bool = False) -> Plan:
    """Plan the engine of ``config``. ``may_lower``: see ``settle_length``.

    A server that a user starts may lower a max_model_len that is not given. A configuration of a sweep or a comparison
    may not: each layout, page size and KV dtype would get another length, and they would no longer differ in what is
    compared alone.

    Raises:
        ValueError: there is no such model, or the settings cannot be, with the numbers.
    """
    config.check_against_device("cpu" if on_cpu else config.device)
    spec = find_model(config.model, config.load_format)
    dtype = config.dtype if config.dtype != "auto" else "float32" if on_cpu else spec.default_dtype
    budget = config.kv_budget or (DEFAULT_CPU_BUDGET if on_cpu else None)
    if budget is None:
        return Plan(config.check_against_model(spec.max_positions), spec, dtype, None)
    shape = spec.kv_shape(dtype, config.latent_kv)
    config = settle_length(config, spec.max_positions, shape, budget, may_lower=may_lower)
    return Plan(config, spec, dtype, capacity_of(config, shape, budget))
