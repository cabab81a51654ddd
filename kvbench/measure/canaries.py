"""The canaries of a load: of the model that is served, and as its server takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.requests.canaries import CanarySet, canaries_of, fitting
from kvbench.requests.request import RequestList, RequestSpec
from kvbench.runs.server_info import ServerInfo
from kvbench.targets.base import Target
from kvbench.workload.load_section import LoadConfig
from kvbench.workload.settings import effective


def canaries_for(load: LoadConfig, target: Target) -> CanarySet | None:
    """The set that ``load`` mixes in; None where it mixes in none. A target that tells no fingerprint is believed.

    Raises UsageError where there is no set, none of it fits, or the target serves other weights.
    """
    if load.canaries is None:
        return None
    if target.dialect.endpoint != "completions":
        raise UsageError(
            f"canaries are prompts of completions, and requests go to {target.dialect.api.path}, where a chat template "
            "changes what is asked: leave load.canaries out"
        )
    told = target.server_info().model
    try:
        made = canaries_of(load, told.name or target.model.name)
        fitting(made, target.model.vocab_size, target.model.most_tokens)
    except ValueError as error:
        raise UsageError(str(error)) from None
    served = told.weights_fingerprint
    if served and served not in made.weights_fingerprints:
        raise UsageError(
            f"the canaries are of {made.model} with the weights {' or '.join(made.weights_fingerprints)}, and the "
            f"server has the weights {served}, whose right answers they do not know: "
            "name the canaries of those in load.canaries.file, or leave load.canaries out"
        )
    return made


def as_taken(requests: RequestList, made: CanarySet, target: Target) -> RequestList:
    """``requests`` with the canaries as ``target`` takes them.

    Where it takes no token ids they are sent as their own texts, and not as words that stand for the ids. Where it
    refuses several greedy answers, or has no room for them side by side, each is asked for one.
    """
    texts = {each.canary_id: each.prompt for each in made.canaries} if not target.dialect.token_id_prompts else {}
    forks = target.preset.greedy_forks and target.server_info().engine.max_num_seqs != 1

    def taken(request: RequestSpec) -> RequestSpec:
        if request.canary is None:
            return request
        return dataclasses.replace(request, prompt=texts.get(request.canary), n=request.n if forks else 1)

    return RequestList(map(taken, requests), requests.notes)


def fails_by_one(settings: Mapping[str, Any], info: ServerInfo) -> bool:
    """Whether one wrong canary fails a load: its server's KV is in the model's own precision, or does not tell.

    A quantised KV answers some wrongly also on an idle engine, and the gate compares with how many that are.
    ``settings``: the configuration under test; ``info``: /server_info.
    """
    return (info.engine.kv_cache_dtype or effective(settings, "kv_cache_dtype")) == "auto"
