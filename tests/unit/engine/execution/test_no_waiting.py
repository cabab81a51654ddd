"""No sampling reads a tensor back before its tokens are read: on a GPU that would wait for it.

Shown on the CPU by engine/model/host_waits.py. The models: tests/unit/engine/model/test_host_waits.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvbench_engine.execution import sampler
from kvbench_engine.model.host_waits import HostWaits
from kvbench_engine.sequence import Request, SamplingParams, Sequence
from tests.support.hf_parts import VOCAB, one_thread
from tests.support.sampling import prepared


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with one_thread():
        yield


KINDS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "both": {"top_k": 9, "top_p": 0.8},
    "forks": {"n": 3},
    "best_of": {"best_of": 3},
    "beams": {"beam_width": 2},
}


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), list(KINDS)], ids="+".join)
def test_sampling_waits_only_when_it_is_read(kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the draws themselves, which are kernels on a GPU (tests/unit/kernels/triton_sample_checks.py)."""
    monkeypatch.setattr(sampler, "draw_into", lambda out, at, *rest: out.index_fill_(0, at, 3))
    sequences = [Sequence.of(Request(kind, (1, 2, 3), SamplingParams(**KINDS[kind]))) for kind in kinds for _ in "ab"]
    for seq in sequences:
        seq.num_candidates = 2 * (seq.request.params.beam_width or 0)
    logits = torch.randn(len(sequences), VOCAB)
    ready, columns = prepared(sequences, 0, logits.device)
    with torch.no_grad(), HostWaits(logits.device) as waits:
        sampled = ready.draw(logits, columns)
        assert sampled.tokens.shape == (len(sequences),)
    assert waits.seen and not waits.found, waits.found
    draws = [drawn if isinstance(drawn, int) else drawn.token_ids[0] for drawn in sampled.read()]
    assert draws == sampled.tokens.tolist()
