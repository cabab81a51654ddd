"""`kvbench quality --url` on the built-in server, on one of other weights, and on scripted ones."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.cli.run_guarded import guarded
from kvbench.quality import measure, prompts
from kvbench.quality.cli import quality
from kvbench.quality.prompts import SETS, PromptText
from kvbench.requests.canaries import SHIPPED, read_canaries, write_canaries
from kvbench.runs.quality import FORMAT
from kvbench_engine.config import EngineConfig
from kvbench_engine.model.loader import LoadedModel, load_model
from kvbench_engine.server.tokenizer import ServerTokenizer, load_tokenizer
from tests.support.hf_parts import loaded, make_engine, one_thread, oracle
from tests.support.http_server import running_server
from tests.support.loads import free_port
from tests.support.scripted_http import scripted_server

MODEL = "kvbench-tiny"
FOLDER = Path(__file__).resolve().parents[2] / "engine" / "models" / MODEL
EOS = 0
PASSKEY = "The pass key is 52719. Remember it. What is the pass key? The pass key is"
PROMPTS = {
    "easy": [PromptText("a", (PASSKEY,), 6, "52719", 0.1)],
    "average": [PromptText("b", ("Shall I compare thee to a",), 12), PromptText("c", ("It was",), 9)],
    "long-context": [],
    "malformed": [PromptText("d", ("\n\n\x00 \ufffd",), 6), PromptText("e", ("one<|endoftext|>",), 6)],
    "production-like": [PromptText("f", ("<|user|>Hello there", " and what is", " then"), 5)],
}


@pytest.fixture(scope="module", autouse=True)
def _few_prompts(tmp_path_factory) -> Iterator[None]:
    """What is measured in seconds: a few prompts, passkeys of four lengths, five canaries."""
    folder = tmp_path_factory.mktemp("prompts")
    for name in SETS:
        (folder / f"{name}.jsonl").write_text("".join(each.row for each in PROMPTS[name]))
    shipped = read_canaries(SHIPPED / f"{MODEL}.jsonl")
    short = tuple(sorted(shipped.canaries, key=lambda each: len(each.prompt_token_ids))[:5])
    write_canaries(folder / f"{MODEL}.jsonl", dataclasses.replace(shipped, canaries=short))
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setattr(measure, "FOLDER", folder)
        patch.setattr(measure, "SHIPPED", folder)
        patch.setattr("kvbench.quality.served.available_cpus", lambda: 1)
        patch.setattr(prompts, "RESIDUES", 4)
        patch.setattr(prompts, "LONGEST", 256)
        yield


@pytest.fixture(scope="module")
def tokenizer() -> ServerTokenizer:
    return load_tokenizer(EngineConfig(model=MODEL), loaded(MODEL).info)


def command(*words: object) -> int:
    return guarded(lambda: quality.main([str(word) for word in words], standalone_mode=False))


def measured(url: str, tmp_path: Path, *words: object) -> dict[str, Any]:
    path = tmp_path / "quality.json"
    assert command("--url", url, "--output", path, *words) == 0
    return json.loads(path.read_text())


def builtin(tokenizer: ServerTokenizer, model: LoadedModel):
    sizes = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    return running_server(make_engine(model, MODEL, slots=2048, **sizes), tokenizer)


def test_the_built_in_server_agrees_with_itself(tokenizer, tmp_path, capsys):
    with builtin(tokenizer, loaded(MODEL)) as server:
        result = measured(server.base_url, tmp_path, "--page-size", 8)
    (figures,) = result["configurations"].values()
    assert result["format"] == FORMAT and result["model"] == MODEL and figures["outside"] == []
    for each in (figures, result["control"]):
        assert each["greedy"]["agree"] == each["greedy"]["answers"] == 6
        assert each["greedy"]["first_divergence"] is None and each["passkey"]["asked"] == 5
        assert sum(row["asked"] for row in each["passkey"]["by_residue"]) == 5
        assert max(int(row["of"]) for row in each["passkey"]["by_residue"]) < 8
        assert "perplexity" not in each and "mean" not in each  # it does not answer logprobs
    assert figures["passkey"]["right"] == result["control"]["passkey"]["right"] >= 4
    assert figures["canaries"] == {"asked": 5, "right": 5}
    assert set(result["limits"]) == {"greedy.share", "passkey.share"} and len(result["facts"]["not_measured"]) == 2
    shown = capsys.readouterr().out
    assert "within" in shown and "5 of 5" in shown and "KLD p99" not in shown


def test_a_server_of_other_weights_is_outside(tokenizer, tmp_path):
    other = load_model(EngineConfig(model=MODEL, device="cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in other.model.parameters():
            weights.add_(weights.std() * torch.randn(weights.shape, generator=generator))
    with builtin(tokenizer, other) as server:
        result = measured(server.base_url, tmp_path)
    (figures,) = result["configurations"].values()
    assert len(figures["outside"]) == 3  # equal answers, passkeys and canaries
    assert figures["greedy"]["agree"] <= 1 and figures["greedy"]["first_divergence"] < 4
    assert figures["canaries"]["right"] == 0 and result["control"]["greedy"]["agree"] == 6


def test_a_server_that_tells_another_set_of_weights_is_refused_before_it_is_asked(tokenizer, tmp_path, capsys):
    model = loaded(MODEL)
    other = dataclasses.replace(model, info=dataclasses.replace(model.info, weights_fingerprint="0123456789abcdef"))
    with builtin(tokenizer, other) as server:
        assert command("--url", server.base_url, "--output", tmp_path / "quality.json") == 2
    assert "0123456789ab" in capsys.readouterr().err and not (tmp_path / "quality.json").exists()


class Scripted:
    """Completions by transformers. ``texts``: it takes texts alone, no other fields, and stops at an end of text.

    ``worse``: nats that it takes from the log probability of every token; ``fails_after``: answers before it fails.
    """

    def __init__(self, tokenizer: ServerTokenizer, *, texts=False, worse: float = 0.0, fails_after=10**6):
        self.tokenizer, self.texts, self.worse, self.left = tokenizer, texts, worse, fails_after
        self.extra_token = False

    def complete(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """None: refused."""
        known = {"prompt", "max_tokens", "temperature", "model"}
        prompt = body["prompt"]
        if self.texts and (not isinstance(prompt, str) or set(body) - known):
            return None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        with torch.inference_mode():
            output = oracle(str(FOLDER)).generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=body["max_tokens"],
                eos_token_id=10**6 if body.get("ignore_eos") else EOS, pad_token_id=EOS,
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            )  # fmt: skip
            logits = oracle(str(FOLDER))(output).logits[0, :-1] if body.get("echo") else None
        new = output[0, len(ids) :].tolist()
        choice: dict[str, Any] = {"text": self.tokenizer.decode(new), "index": 0}
        choice["finish_reason"] = "length" if len(new) == body["max_tokens"] and new[-1] != EOS else "stop"
        if body.get("return_token_ids"):
            choice |= {"token_ids": new, "finish_reason": "length"}
        if logits is not None:
            following = logits.double().log_softmax(-1).gather(-1, output[0, 1:, None])[:, 0] - self.worse
            choice["logprobs"] = {"token_logprobs": [None, *following.tolist()]}
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids) + self.extra_token}}

    def __call__(self, path: str, body: Any) -> tuple[int, Any]:
        if body is None:
            return 200, {"data": [{"id": "it", "max_model_len": 300}]}
        self.left -= 1
        found = self.complete(body) if self.left >= 0 else None
        return (200, found) if found else (400, {"detail": "no such field"})


@pytest.mark.parametrize("worse", [0.0, 0.1])
def test_log_probabilities_tell_the_perplexity(tokenizer, tmp_path, worse):
    with scripted_server(Scripted(tokenizer, worse=worse)) as server:
        result = measured(server.url, tmp_path)
    (figures,) = result["configurations"].values()
    assert figures["greedy"]["agree"] == 6
    assert figures["perplexity_change"] == pytest.approx(math.expm1(worse), abs=1e-4)
    assert (figures["rms_dp"] < 1e-4) == (not worse) and len(figures["outside"]) == (2 if worse else 0)
    assert 1 < figures["perplexity"] < 2000 and abs(result["control"]["perplexity_change"]) < 1e-6
    assert set(figures["sets"]["average"]) == {"prompts", "positions", "perplexity_change", "greedy"}
    assert "mean" not in figures and len(result["facts"]["not_measured"]) == 1


def test_a_server_that_takes_texts_and_stops_at_an_end_of_text(tokenizer, tmp_path):
    with scripted_server(Scripted(tokenizer, texts=True)) as server:
        result = measured(server.url, tmp_path)
    (figures,) = result["configurations"].values()
    assert result["facts"]["asked_with"] == "texts" and "perplexity" not in figures
    assert figures["greedy"]["agree"] == figures["greedy"]["answers"] >= 5 and figures["outside"] == []
    assert figures["passkey"]["asked"] == 5


def test_servers_that_cannot_be_measured(tokenizer, tmp_path, capsys):
    nobody = f"http://127.0.0.1:{free_port()}"
    assert command("--url", nobody) == 2
    assert command("--url", nobody, tmp_path) == 2 and command() == 2
    assert command("--page-size", 8, tmp_path) == 2 and command("--url", nobody, "-o", "seed=1") == 2
    scripted = Scripted(tokenizer)
    with scripted_server(scripted) as server:
        url = server.url
        assert command("--url", url, "--model", "no-such-model") == 2
        scripted.extra_token = True
        assert command("--url", url) == 2  # it counts other tokens: another model's
        scripted.extra_token, scripted.left = False, 6
        assert command("--url", url) == 4  # it fails on the way
        assert command("--url", url) == 2  # it answers nothing
    lines = capsys.readouterr().err.strip().splitlines()
    assert all(line.startswith("error: ") for line in lines) and len(lines) == 9
