"""Runs of kvbench-tiny's canaries at a full pool, for tests and for the benchmark of what they catch."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch

from engine.config import EngineConfig
from engine.model.loader import LoadedModel, load_model
from kvbench.metrics.canaries import ALPHA, chance_of_so_many
from kvbench.quality.pressure import ACCOUNTS, CanaryRun, pressed_requests, run_alone, run_canaries
from kvbench.requests.canaries import Canary, as_request, read_canaries
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


_wrong_alone: dict[tuple[str, str], bool] = {}  # KV dtype, canary -> whether its answer is wrong on an idle engine


def offline(kv_cache_dtype: str, names: Collection[str]) -> tuple[int, int]:
    """How many of the canaries ``names`` this KV dtype answers wrongly on an idle engine, of how many."""
    asked = [each for each in canaries(2048) if each.canary_id in names]
    if missing := [each for each in asked if (kv_cache_dtype, each.canary_id) not in _wrong_alone]:
        requests = [as_request(each, index) for index, each in enumerate(missing)]
        run = run_alone(configured(kv_cache_dtype=kv_cache_dtype), loaded(kv_cache_dtype), requests)
        wrong = {each.canary for each in run.findings}
        _wrong_alone.update({(kv_cache_dtype, each.canary_id): each.canary_id in wrong for each in missing})
    return sum(_wrong_alone[kv_cache_dtype, each.canary_id] for each in asked), len(asked)


def alarms(run: CanaryRun, kv_cache_dtype: str) -> bool:
    """Whether a gate would fail: any finding in full precision; else more wrong answers than the dtype explains.

    Its own canaries are asked alone as well, so that both sides had the same questions.
    """
    if kv_cache_dtype == "auto" or set(ACCOUNTS) & set(run.caught_by):
        return bool(run.findings)
    wrong, asked = offline(kv_cache_dtype, run.canaries)
    return chance_of_so_many(run.wrong, run.asked, len(run.canaries), wrong, asked) < ALPHA
