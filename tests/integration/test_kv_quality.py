"""The KLD of a quantised KV in the engine: the logits against transformers' own, the divergence against scipy's."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr

from engine import teacher_forcing
from engine.config import EngineConfig
from engine.teacher_forcing import TeacherForced, divergence, measure_divergence
from tests.support.hf_parts import VOCAB, greedy_outputs, loaded, model_folder, one_thread, oracle

QUANTISED = ("int8_per_token_head", "fp8_e4m3", "fp8_e5m2", "int4_per_token_head")  # the more exact first
_RNG = random.Random(5)
PROMPTS = [[_RNG.randrange(2, VOCAB) for _ in range(length)] for length in (21, 5, 34)]
CONTINUED = [6, 9, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[str]:
    with one_thread():
        yield model_folder(str(tmp_path_factory.mktemp("models")))


def config(folder: str, kv_cache_dtype: str = "auto", **settings: object) -> EngineConfig:
    sized = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_threads": 1, "page_size": 7}
    return EngineConfig(model=folder, device="cpu", kv_cache_dtype=kv_cache_dtype, **{**sized, **settings})


@pytest.mark.parametrize("layout", [{}, {"layout": "contiguous"}])
def test_the_logits_are_those_of_transformers(folder, layout):
    """Two sequences side by side: chunks, then tokens one by one, out of step with each other."""
    rows = [PROMPTS[0] + PROMPTS[1], PROMPTS[2]]
    engine = TeacherForced(config(folder, **layout), loaded(folder), len(rows), 40)
    got: list[list[torch.Tensor]] = [[], []]
    for step in ({1: rows[1][:9], 0: rows[0][:20]}, {0: rows[0][20:21], 1: rows[1][9:33]}, {1: rows[1][33:]}):
        logits = engine.feed(step)
        order = sorted(step, key=lambda row: len(step[row]) > 1)
        for row, part in zip(order, logits.split([len(step[row]) for row in order]), strict=True):
            got[row].append(part.clone())
    for ids in rows[0][21:]:
        got[0].append(engine.feed({0: [ids]}).clone())
    for ids, parts in zip(rows, got, strict=True):
        expected = oracle(folder)(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-3, atol=1e-3)


def test_the_divergence_is_scipys():
    generator = torch.Generator().manual_seed(0)
    expected, got = (torch.randn(150, 97, generator=generator) * scale for scale in (3, 5))
    expected[3, 7], got[4, 8] = 900.0, -900.0  # a certain token; one that is nearly ruled out
    found = divergence(expected, got, decoded=True)
    log_p, log_q = (log_softmax(x.double().numpy(), axis=-1) for x in (expected, got))
    with np.errstate(divide="ignore"):
        oracle_kld = rel_entr(np.exp(log_p), np.exp(log_q)).sum(-1)
    finite = np.isfinite(oracle_kld)
    assert finite.sum() >= 148
    np.testing.assert_allclose(found.kld[finite], oracle_kld[finite], rtol=1e-9)
    theirs = torch.nn.functional.kl_div(
        got.double().log_softmax(-1), expected.double().log_softmax(-1), log_target=True, reduction="none"
    )
    np.testing.assert_allclose(found.kld, theirs.sum(-1).numpy(), rtol=1e-9)
    assert (found.same == (expected.argmax(-1) == got.argmax(-1)).numpy()).all() and 0 < found.same.sum() < 150
    assert found.decoded.all() and not divergence(expected, got, decoded=False).decoded.any()


def measured(folder: str, dtype: str, **settings: object) -> teacher_forcing.Divergence:
    return measure_divergence(config(folder, dtype, **settings), loaded(folder), PROMPTS, CONTINUED)


def test_fewer_bits_diverge_more_and_none_at_all_where_nothing_is_quantised(folder):
    assert not measured(folder, "auto").kld.any()
    found = [measured(folder, dtype) for dtype in QUANTISED]
    means = [each.kld.mean() for each in found]
    assert means[0] > 0 and means == sorted(means) and means[-1] > 10 * means[0]
    for each in found:
        assert len(each.kld) == sum(map(len, PROMPTS)) + sum(CONTINUED)
        assert each.decoded.sum() == sum(CONTINUED) and (each.kld[each.decoded] > 0).all()


def test_neither_chunks_nor_layout_nor_batch_change_the_divergence(folder):
    """Rounding of another batch may move a value over the border of two codes, and so a KLD a little."""
    whole = measured(folder, "int4_per_token_head", max_num_batched_tokens=64).kld
    for settings in ({"max_num_batched_tokens": 4}, {"layout": "contiguous"}, {"page_size": 16}):
        np.testing.assert_allclose(measured(folder, "int4_per_token_head", **settings).kld, whole, rtol=0.05, atol=1e-6)


def test_the_continuation_is_the_references_own_greedy_one(folder, monkeypatch):
    fed: list[dict[int, list[int]]] = []
    real = TeacherForced.feed

    def feed(self, tokens):
        fed.append({row: list(ids) for row, ids in tokens.items()})
        return real(self, tokens)

    monkeypatch.setattr(TeacherForced, "feed", feed)
    measured(folder, "int4_per_token_head")
    assert fed[::2] == fed[1::2]  # both sides get the same tokens
    rows: dict[int, list[int]] = {}
    for step in fed[::2]:
        for row, ids in step.items():
            rows[row] = rows.get(row, []) + ids
    for row, (prompt, count) in enumerate(zip(PROMPTS, CONTINUED, strict=True)):
        assert rows[row] == prompt + greedy_outputs(folder, {"it": prompt}, count)["it"]
