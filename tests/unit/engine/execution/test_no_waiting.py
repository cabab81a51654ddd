"""Nothing between the step's inputs and its tokens reads a tensor back: on a GPU that would wait for it.

Shown on the CPU by what torch dispatches: a tensor that becomes a Python number, a shape that depends on values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.execution import sampler
from engine.model.attention import ShapeRecorder, install
from engine.sequence import Request, SamplingParams, Sequence
from tests.support.hf_parts import FAMILIES, VOCAB, loaded, model_folder, one_thread

WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2", "repeat_interleave")


class Watch(TorchDispatchMode):
    """Notes every operation whose result the host must know before it can go on."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.split("::")[1]
        self.seen += 1
        by_mask = name.startswith("index") and any(
            isinstance(at, torch.Tensor) and at.dtype == torch.bool
            for part in args
            if isinstance(part, list)
            for at in part
        )
        if name in WAITING or by_mask:
            self.waited.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(
    "act",
    [lambda t: t.max().item(), lambda t: t[t > 0], lambda t: bool((t > 0).all()), lambda t: torch.equal(t, t)],
    ids=["item", "mask", "bool", "equal"],
)
def test_the_watch_sees_what_would_wait(act: Any) -> None:
    with Watch() as watch:
        act(torch.arange(3))
    assert watch.waited


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_s_own_code_does_not_wait(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Packed steps of one token and of several, as graphs capture them. Attention is the kernels' business."""
    model = loaded(model_folder(str(tmp_path_factory.mktemp("models")), family)).model
    install(model, ShapeRecorder())
    for count in (1, 5):
        ids, positions = torch.arange(count) + 7, torch.arange(count) * 3
        for keep in (0, torch.arange(count)):
            with torch.inference_mode(), Watch() as watch:
                model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
            assert watch.seen > 20 and not watch.waited, watch.waited


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
    with Watch() as watch:
        sampled = sampler.sample(logits, sequences, 0)
        assert sampled.tokens.shape == (len(sequences),)
    assert watch.seen and not watch.waited, watch.waited
    assert [drawn.token_ids[0] for drawn in sampled.read()] == sampled.tokens.tolist()
