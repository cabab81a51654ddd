"""Teacher forcing in the engine: logits as transformers has them, and whether a planted error is told from rounding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from kvbench.quality import answering
from kvbench.quality.answering import answer_all
from kvbench.quality.prompts import Prompt
from kvbench.requests.canaries import SHIPPED, read_canaries
from kvbench_engine.build import assemble_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.model import kv_outliers
from kvbench_engine.model.kv_outliers import KVOutliers
from kvbench_engine.model.loader import load_model
from kvbench_engine.teacher_forcing import TeacherForced, with_room
from kvbench_engine.tiny_model.outliers import scale_key_channels
from tests.support.hf_parts import VOCAB, greedy_outputs, loaded, model_folder, one_thread, oracle

QUANTISED = ("int8_per_token_head", "fp8_e4m3", "fp8_e5m2", "int4_per_token_head")  # the more exact first
_RNG = random.Random(5)


def ids_of(length: int) -> tuple[int, ...]:
    return tuple(_RNG.randrange(2, VOCAB) for _ in range(length))


PROMPTS = [
    Prompt("one", "average", (ids_of(21),), 6),
    Prompt("two", "easy", (ids_of(5),), 9),
    Prompt("turns", "average", (ids_of(17), ids_of(8)), 4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[str]:
    with one_thread():
        yield model_folder(str(tmp_path_factory.mktemp("models")))


def config(folder: str, kv_cache_dtype: str = "auto", **settings: object) -> EngineConfig:
    sized = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_threads": 1, "page_size": 7}
    return EngineConfig(model=folder, device="cpu", kv_cache_dtype=kv_cache_dtype, **{**sized, **settings})


def engine_of(folder: str, dtype: str = "auto", **settings: object) -> TeacherForced:
    return TeacherForced(config(folder, dtype, **settings), loaded(folder), 3, 48)


@pytest.mark.parametrize("layout", [{}, {"layout": "contiguous"}])
def test_the_logits_are_those_of_transformers(folder, layout):
    """Two sequences side by side: chunks, then tokens one by one, out of step with each other; after a reset again."""
    rows = [list(ids_of(26)), list(ids_of(34))]
    engine = TeacherForced(config(folder, **layout), loaded(folder), len(rows), 40)
    for _ in range(2):
        engine.reset()
        got: list[list[torch.Tensor]] = [[], []]
        for step in ({1: rows[1][:9], 0: rows[0][:20]}, {0: rows[0][20:21], 1: rows[1][9:33]}, {1: rows[1][33:]}):
            for row, part in engine.feed(step).items():
                got[row].append(part.clone())
        for token in rows[0][21:]:
            got[0].append(engine.feed({0: [token]})[0].clone())
        for ids, parts in zip(rows, got, strict=True):
            expected = oracle(folder)(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def answers(folder):
    base = config(folder, layout="contiguous")
    return answer_all(assemble_engine(with_room(base, loaded(folder), 2, 48), loaded(folder)), PROMPTS)


def test_answers_are_the_models_own_greedy_ones_turn_by_turn(folder, answers):
    first, second = answers["turns"]
    history = (*PROMPTS[2].turns[0], *first, *PROMPTS[2].turns[1])
    wanted = {"one": PROMPTS[0].turns[0], "two": PROMPTS[1].turns[0], "turns": PROMPTS[2].turns[0]}
    assert answers["one"] == (tuple(greedy_outputs(folder, wanted, 6)["one"]),)
    assert answers["two"] == (tuple(greedy_outputs(folder, wanted, 9)["two"]),)
    assert first == tuple(greedy_outputs(folder, wanted, 4)["turns"])
    assert second == tuple(greedy_outputs(folder, {"later": history}, 4)["later"])


@pytest.fixture(scope="module")
def talks(answers):
    return [answering.Conversation.of(each, answers[each.prompt_id]) for each in PROMPTS]


def test_both_orders_feed_every_token_once_and_in_its_place(talks):
    assert [talk.fed for talk in talks] == [26, 13, 32]
    for order in (answering.in_order, answering.otherwise):
        fed = [0, 0, 0]
        for step in order(talks, 8):
            assert step and all(step.values())
            for row, count in step.items():
                alone = bool(talks[row].answered[fed[row]])
                assert count == 1 if alone else not talks[row].answered[fed[row] : fed[row] + count].any()
                fed[row] += count
            assert sum(step.values()) <= 8
        assert fed == [26, 13, 32]


def compared(folder: str, talks, **arms: answering.Arm):
    baseline = answering.Arm(engine_of(folder, layout="contiguous"), 16)
    control = answering.Arm(baseline.engine, 7, answering.otherwise)
    return answering.compare_arms(baseline, {"control": control, **arms}, talks, VOCAB)


def pooled(positions, name: str = "kld") -> np.ndarray:
    return np.concatenate([getattr(each, name) for each in positions])


def test_fewer_bits_diverge_more_and_pages_and_chunks_no_more_than_the_control(folder, talks):
    plain = {"paged": engine_of(folder), "pages of 16": engine_of(folder, page_size=16)}
    arms = {name: answering.Arm(engine, 5) for name, engine in plain.items()}
    arms |= {dtype: answering.Arm(engine_of(folder, dtype), 16) for dtype in QUANTISED}
    found = compared(folder, talks, **arms)
    means = {name: pooled(each).mean() for name, each in found.items()}
    assert max(means["control"], means["paged"], means["pages of 16"]) < 1e-9
    bits = [means[dtype] for dtype in QUANTISED]
    assert bits[0] > 1e-7 and bits == sorted(bits) and bits[-1] > 10 * bits[0]
    for each in found.values():
        assert len(pooled(each)) == 26 + 13 + 32 and pooled(each, "decoded").sum() == 5 + 8 + 4 + 3
        assert pooled(each, "own").sum() == 20 + 4 + 16 + 8


class PageOfAnother(TeacherForced):
    """Once answers begin, the first page of row 0 is row 2's, as a wrong page table would have it, and the reverse."""

    def feed(self, tokens):
        if all(len(ids) == 1 for ids in tokens.values()):
            self._swap(reverse=False)
        return super().feed(tokens)

    def _swap(self, reverse: bool) -> None:
        (table,) = self._inputs.tables.host
        table[[0, 2], 0] = sorted(table[[0, 2], 0].tolist(), reverse=reverse)


def test_a_page_of_another_sequence_is_seen_where_it_is_read_and_nowhere_else(folder, talks):
    broken = PageOfAnother(config(folder), loaded(folder), 3, 48)
    broken._swap(reverse=True)
    found = compared(folder, talks, broken=answering.Arm(broken, 16))
    one, two, turns = (each.kld for each in found["broken"])
    first_answer = len(PROMPTS[2].turns[0])
    assert one[:21].max() < 1e-9 < one[21:].min() and two.max() < 1e-9
    assert turns[:first_answer].max() < 1e-9 < turns[first_answer:].min()
    assert pooled(found["control"]).max() < 1e-9


def right_canaries(factor: float, kv_cache_dtype: str, *, balanced: bool = True) -> int:
    """How many of 10 canaries kvbench-tiny answers rightly, with a pair of channels of K ``factor`` times larger."""
    settings = EngineConfig(model="kvbench-tiny", device="cpu", kv_cache_dtype=kv_cache_dtype, num_threads=1)
    model = load_model(settings)
    canaries = read_canaries(SHIPPED / "kvbench-tiny.jsonl").canaries
    asked = sorted(canaries, key=lambda canary: len(canary.prompt_token_ids))[:10]
    scale_key_channels(model.model, factor)
    if not balanced:
        setattr(model.model, kv_outliers.MEASURED, KVOutliers(1.0, 0, 1.0, 1.0, 0, "not tried"))
    prompts = [Prompt(c.canary_id, "easy", (tuple(c.prompt_token_ids),), len(c.answer_token_ids)) for c in asked]
    answers = answer_all(assemble_engine(with_room(settings, model, 10, 512), model), prompts)
    return sum(answers[c.canary_id][0] == tuple(c.answer_token_ids) for c in asked)


full = partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("dtype", "right", "factor"),
    [("int8_per_token_head", 10, 1e2), ("int4_per_token_head", 7, 1e6), full("fp8_e4m3", 10, 1e6),
     full("int8_per_token_head", 10, 1e6), full("int4_per_token_head", 7, 1e2)],
)  # fmt: skip
def test_an_outlier_of_k_costs_no_answer_in_any_format(dtype, right, factor):
    """INT4 answers 8 of the plain model's 10, and 0 of these if K is not balanced."""
    assert right_canaries(factor, dtype) >= right


def test_without_the_balance_no_order_of_formats_holds():
    """INT8 is the more exact one of a plain model, and loses every answer to an outlier that FP8 does not notice."""
    assert right_canaries(100.0, "int8_per_token_head", balanced=False) == 0
    assert right_canaries(100.0, "fp8_e4m3", balanced=False) == 10
