"""The GGUF file of a model, read back by the format's own rules (github.com/ggml-org/ggml, docs/gguf.md)."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from kvbench_engine.model.gguf import refusal, write_gguf
from kvbench_engine.model.spec import MODEL_DIR
from kvbench_engine.tokenizer.words import CHAT_TEMPLATE

pytest.importorskip("gguf")

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "max_position_embeddings": 64,
}  # fmt: skip
DTYPES = {0: np.float32, 1: np.float16, 30: np.int16}  # bfloat16: its bits
PLAIN = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}


class Reader:
    """Metadata and tensors of a GGUF file of version 3."""

    def __init__(self, path: Path) -> None:
        self.data, self.at = path.read_bytes(), 4
        assert self.data[:4] == b"GGUF" and self.take("<I") == 3
        tensors, metadata = self.take("<Q"), self.take("<Q")
        self.metadata = {self.string(): self.value(self.take("<I")) for _ in range(metadata)}
        heads = [self.head() for _ in range(tensors)]
        begin = -(-self.at // 32) * 32
        self.tensors = {}
        for name, shape, kind, offset in heads:
            assert offset % 32 == 0
            found = np.frombuffer(self.data, DTYPES[kind], int(np.prod(shape)), begin + offset)
            self.tensors[name] = found.reshape(shape[::-1])

    def take(self, form: str):
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        size = self.take("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int):
        if kind == 8:
            return self.string()
        if kind == 9:
            of, count = self.take("<I"), self.take("<Q")
            return [self.value(of) for _ in range(count)]
        return self.take(PLAIN[kind])

    def head(self):
        name, dimensions = self.string(), self.take("<I")
        return name, [self.take("<Q") for _ in range(dimensions)], self.take("<I"), self.take("<Q")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_weight_is_in_the_file_under_the_name_that_llama_cpp_looks_for(tmp_path, dtype):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-3)).to(dtype)
    write_gguf(model, tmp_path / "m.gguf")
    file, weights = Reader(tmp_path / "m.gguf"), model.state_dict()
    assert len(file.tensors) == len(weights) == 3 + 2 * 9

    def same(name: str, original: str) -> bool:
        weight = weights[original]  # of bfloat16 the bits
        return np.array_equal(file.tensors[name], weight.view(torch.int16) if dtype is torch.bfloat16 else weight)

    assert same("token_embd.weight", "model.embed_tokens.weight") and same("output.weight", "lm_head.weight")
    assert same("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight")
    assert same("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight")
    assert file.tensors["blk.0.attn_norm.weight"].dtype == np.float32  # llama.cpp wants vectors so
    facts = file.metadata
    assert facts["llama.attention.head_count_kv"] == 2 and facts["llama.block_count"] == 2
    assert facts["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-3)
    assert facts["tokenizer.ggml.tokens"][17] == "\u258117" and len(facts["tokenizer.ggml.tokens"]) == 40
    assert facts["tokenizer.chat_template"] == CHAT_TEMPLATE
    write_gguf(LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)), tmp_path / "tied.gguf")
    assert "output.weight" not in Reader(tmp_path / "tied.gguf").tensors


def test_queries_and_keys_are_ordered_for_a_rope_of_neighbouring_pairs(tmp_path):
    """llama.cpp turns rows 2i and 2i + 1 of a head together, Hugging Face rows i and i + head_dim / 2."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    write_gguf(model, tmp_path / "m.gguf")
    file = Reader(tmp_path / "m.gguf")
    for name, original in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        rows = model.state_dict()[f"model.layers.0.self_attn.{original}.weight"].numpy()
        for head in range(len(rows) // 8):
            mine = file.tensors[f"blk.0.{name}.weight"][head * 8 : head * 8 + 8]
            theirs = rows[head * 8 : head * 8 + 8]
            assert np.array_equal(mine[0::2], theirs[:4]) and np.array_equal(mine[1::2], theirs[4:])


def test_qwen3_keeps_the_order_of_its_rows_and_has_norms_of_queries_and_keys(tmp_path):
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    write_gguf(model, tmp_path / "m.gguf")
    file, layer = Reader(tmp_path / "m.gguf"), model.model.layers[1].self_attn
    assert file.metadata["general.architecture"] == "qwen3" and file.metadata["qwen3.context_length"] == 64
    assert np.array_equal(file.tensors["blk.1.attn_q.weight"], layer.q_proj.weight.detach().numpy())
    assert file.tensors["blk.1.attn_k_norm.weight"].shape == (8,)
    assert len(file.tensors) == len(model.state_dict())


def test_llama3s_rope_divides_each_frequency_as_transformers_does(tmp_path):
    config = LlamaConfig(**SIZES | {"head_dim": 16}, rope_parameters=LLAMA3)
    write_gguf(model := LlamaForCausalLM(config), tmp_path / "m.gguf")
    factors = Reader(tmp_path / "m.gguf").tensors["rope_freqs.weight"]
    plain = 1e4 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(plain / factors, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)
    assert factors[0] == 1 and factors[-1] == 8 and len(set(factors.tolist())) > 2


def test_a_tokenizer_is_in_the_file_with_its_merges_and_how_it_splits(tmp_path):
    tiny = MODEL_DIR / "kvbench-tiny"
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 2050}))
    write_gguf(model, tmp_path / "m.gguf", tiny)
    facts, own = Reader(tmp_path / "m.gguf").metadata, json.loads((tiny / "tokenizer.json").read_text())
    tokens = facts["tokenizer.ggml.tokens"]
    assert len(tokens) == 2050 and all(tokens[i] == text for text, i in own["model"]["vocab"].items())
    assert facts["tokenizer.ggml.merges"] == [" ".join(pair) for pair in own["model"]["merges"]]
    assert (facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    assert facts["tokenizer.ggml.eos_token_id"] == 0 and facts["tokenizer.ggml.add_bos_token"] is False
    assert "<|assistant|>" in facts["tokenizer.chat_template"]
    kinds = facts["tokenizer.ggml.token_type"]
    assert [kinds[i] for i in (0, 1, 2000, 2048)] == [3, 3, 1, 5]  # control, control, normal, unused
    with pytest.raises(ValueError, match="the model 40 tokens"):
        write_gguf(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path / "small.gguf", tiny)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def test_what_the_file_cannot_say_is_refused_with_the_way_out(tmp_path):
    llama = [{"rope_parameters": LINEAR}, {"attention_bias": True}, {"hidden_act": "gelu"}]
    models = [Qwen2ForCausalLM(Qwen2Config(**SIZES)), *(LlamaForCausalLM(LlamaConfig(**SIZES, **own)) for own in llama)]
    for model, why in zip(models, ("qwen2", "linear", "attention_bias", "gelu"), strict=True):
        with pytest.raises(ValueError, match=rf"{why}.*convert_hf_to_gguf\.py"):
            write_gguf(model, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


QWEN2 = json.loads((MODEL_DIR / "kvbench-tiny" / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"][0]
BYTES, SPLIT = {"type": "ByteLevel", "use_regex": False}, {"type": "Split", "pattern": {"Regex": r"\p{N}"}}


@pytest.mark.parametrize(
    ("kind", "steps", "known"),
    [
        ("BPE", [{"type": "ByteLevel", "use_regex": True}], True),
        ("BPE", [BYTES], False),  # splits nothing
        ("BPE", [SPLIT, BYTES], False),
        ("BPE", [QWEN2, BYTES], True),
        ("BPE", [QWEN2], False),  # of characters, not bytes
        ("BPE", [QWEN2, {"type": "ByteLevel", "use_regex": True}], False),  # splits twice
        ("WordLevel", [{"type": "ByteLevel", "use_regex": True}], False),
    ],
)
def test_only_tokenizers_whose_splits_llama_cpp_knows_are_written(tmp_path, kind, steps, known):
    found = {"model": {"type": kind}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    assert (refusal({"model_type": "llama"}, tmp_path) is None) == known
