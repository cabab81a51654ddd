"""A running server, the load that it is measured under, and that load's requests as it takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import MeasurementError, UsageError, as_usage_error
from kvbench.requests.build import LoadDraw, build_requests
from kvbench.requests.canaries import CanarySet, canaries_of, fitting
from kvbench.requests.request import RequestList, RequestSpec
from kvbench.runs.server_info import ServerInfo
from kvbench.targets.base import Target
from kvbench.workload.design import LoadPoint
from kvbench.workload.load_section import LoadConfig
from kvbench.workload.settings import effective


@dataclass(frozen=True)
class MeasuredServer:
    """A server as its loads see it.

    ``load``: with the defaults that the server can have. ``settings``: the configuration under test; its URL
    alone where it ran before. ``info``: its /server_info. ``log``: where its output goes, None if it is not
    ours. ``check``: raises when the measurement must end.
    """

    load: LoadConfig
    seed: int
    target: Target
    settings: Mapping[str, Any]
    info: ServerInfo
    log: Path | None
    check: Callable[[], None]

    def requests(self, point: LoadPoint, repeat: int, seed: int | None = None) -> RequestList:
        """The requests of one load. Raises MeasurementError when none can be made for this server."""
        return requests_for(self.load, point, self.target, self.seed if seed is None else seed, repeat)

    def fails_by_one_canary(self) -> bool:
        """Tests whether one wrong canary fails a load: its KV is in the model's own precision, or nobody tells.

        A quantised KV answers some wrongly also on an idle engine, and the gate compares with how many that are.
        """
        return (self.info.engine.kv_cache_dtype or effective(self.settings, "kv_cache_dtype")) == "auto"


def requests_for(load: LoadConfig, point: LoadPoint, target: Target, seed: int, repeat: int) -> RequestList:
    """The requests of a load, as ``target`` takes them. MeasurementError; UsageError for another model's canaries."""
    facts, canaries = target.model, canaries_for(load, target)
    if facts.max_model_len is None and getattr(load.prompts, "length_scale", None) == "auto":
        raise MeasurementError(
            "the server does not tell its longest sequence, which length_scale: auto needs: give --max-model-len N"
        )
    longest = facts.most_tokens - (target.template_tokens or 0)
    draw = LoadDraw(
        load, vocab_size=facts.vocab_size, max_model_len=longest, seed=seed, repeat=repeat,
        concurrency=point.concurrency, rate=point.request_rate, canaries=canaries,
    )  # fmt: skip
    try:
        made = build_requests(draw)
    except ValueError as error:
        raise MeasurementError(f"no requests can be made: {error}") from None
    return target.as_sent(made if canaries is None else as_taken(made, canaries, target))


def canaries_for(load: LoadConfig, target: Target) -> CanarySet | None:
    """The set that ``load`` mixes in; None where it mixes in none. A target that tells no fingerprint is believed.

    Raises UsageError where there is no set, none of it fits, or the target serves other weights.
    """
    if load.canaries is None:
        return None
    if target.dialect.endpoint != "completions":
        raise UsageError(
            f"canaries need the completions API, and requests go to {target.dialect.api.path}, whose chat template "
            "changes the prompts: leave load.canaries out"
        )
    model = target.server_info().model
    with as_usage_error():
        canaries = canaries_of(load, model.name or target.model.name)
        fitting(canaries, target.model.vocab_size, target.model.most_tokens)
    served = model.weights_fingerprint
    if served and served not in canaries.weights_fingerprints:
        raise UsageError(
            f"the canaries were made for {canaries.model} with the weights "
            f"{' or '.join(canaries.weights_fingerprints)}, but the server has the weights {served}: "
            "name canaries made for those in load.canaries.file, or leave load.canaries out"
        )
    return canaries


def as_taken(requests: RequestList, canaries: CanarySet, target: Target) -> RequestList:
    """Returns ``requests`` with the canaries as ``target`` takes them.

    Where it takes no token ids they are sent as their own texts, and not as words that stand for the ids. Where it
    refuses several greedy answers, or has no room for them side by side, each is asked for one.
    """
    by_ids = target.dialect.token_id_prompts
    texts = {} if by_ids else {canary.canary_id: canary.prompt for canary in canaries.canaries}
    forks = target.preset.greedy_forks and target.server_info().engine.max_num_seqs != 1

    def taken(request: RequestSpec) -> RequestSpec:
        if request.canary is None:
            return request
        return dataclasses.replace(request, prompt=texts.get(request.canary), n=request.n if forks else 1)

    return RequestList(map(taken, requests), requests.notes)
