"""Runs of kvbench-tiny's canaries at a full pool, for tests and for the benchmark of what they catch."""

from __future__ import annotations

import functools
from typing import Any

import torch

from engine.config import EngineConfig
from engine.model.loader import LoadedModel, load_model
from kvbench.metrics.canaries import ALPHA, chance_of_so_many
from kvbench.quality.pressure import CanaryRun, pressed_requests, run_alone, run_canaries
from kvbench.requests.canaries import Canary, read_canaries
from tests.support.loads import ROOT

NAME = "kvbench-tiny"
_SIZES = {"model": NAME, "device": "cpu", "num_threads": 1, "max_num_seqs": 16, "max_num_batched_tokens": 128}


@functools.cache
def canaries(longest: int) -> tuple[Canary, ...]:
    """Those of at most ``longest`` prompt tokens."""
    made = read_canaries(ROOT / "workloads" / "canaries" / f"{NAME}.jsonl")
    return tuple(each for each in made.canaries if len(each.prompt_token_ids) <= longest)


@functools.cache
def loaded(kv_cache_dtype: str) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(configured(kv_cache_dtype=kv_cache_dtype))


def configured(**settings: Any) -> EngineConfig:
    return EngineConfig.from_mapping({**_SIZES, **settings})


def pressed(seed: int, count: int = 40, longest: int = 700, **settings: Any) -> CanaryRun:
    """``count`` canaries at a full pool."""
    config = configured(**settings)
    requests = pressed_requests(canaries(longest), count, seed)
    return run_canaries(config, loaded(config.kv_cache_dtype), requests, seed=seed)


@functools.cache
def offline(kv_cache_dtype: str, count: int = 40, longest: int = 700) -> tuple[int, int]:
    """How many canaries this KV dtype answers wrongly on an idle engine, of how many."""
    config = configured(kv_cache_dtype=kv_cache_dtype)
    requests = [r for r in pressed_requests(canaries(longest), count, 0) if r.canary is not None]
    run = run_alone(config, loaded(kv_cache_dtype), list({r.canary: r for r in requests}.values()))
    return run.wrong, run.asked


def alarms(run: CanaryRun, kv_cache_dtype: str, count: int = 40, longest: int = 700) -> bool:
    """Whether a gate would fail: any finding in full precision; else more wrong answers than the dtype explains."""
    if kv_cache_dtype == "auto":
        return bool(run.findings)
    distinct = len({each.request for each in run.answers})
    return chance_of_so_many(run.wrong, run.asked, distinct, *offline(kv_cache_dtype, count, longest)) < ALPHA
