"""The server's tokenizer: its choice, the texts that it refuses, and texts and chats as ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvbench_engine.config import EngineConfig
from kvbench_engine.model.spec import NEEDS_CODE, ModelInfo, model_folder
from kvbench_engine.server.detokenizer import (
    ByteVocabulary,
    SilentDecoder,
    TextDecoder,
    WindowDecoder,
    decode_all,
    is_byte_level,
)
from kvbench_engine.server.errors import invalid, unprocessable

SHIPPED = Path(__file__).parent.parent / "tokenizer" / "bpe8k"
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class ServerTokenizer:
    """The tokenizer of a server, with its chat template.

    ``backend`` tokenises; ``chat``: the Hugging Face tokenizer with the chat template. ``text_refusal``: why texts
    cannot be prompts, or None. ``max_characters``: longer texts cannot fit into the model's context; None: not known
    without tokenising.
    """

    name: str
    backend: Tokenizer | None = None
    chat: Any = None
    text_refusal: str | None = None
    vocabulary: ByteVocabulary | None = None
    max_characters: int | None = None

    @property
    def chat_template(self) -> str:
        """The text of the chat template; empty where there is none."""
        return str(getattr(self.chat, "chat_template", None) or "")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self.text_refusal is not None or self.backend is None:
            raise unprocessable(self.text_refusal or "there is no tokenizer", "prompt", "no_tokenizer")
        if self.max_characters is not None and len(text) > self.max_characters:
            # tokenising megabytes takes seconds and delays all other streams
            raise invalid(
                f"the prompt has {len(text)} characters, and no text of more than {self.max_characters} fits the "
                "model's context: shorten it",
                "prompt",
                "context_length_exceeded",
            )
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; ids that the tokenizer does not know have none."""
        if self.backend is not None and self.vocabulary is None:
            return decode_all(self.backend, ids, skip_special_tokens)
        decoder = self.decoder(skip_special_tokens)
        return decoder.push(ids) + decoder.flush()

    def hides(self, texts: Sequence[str]) -> bool:
        """Tests whether one of ``texts`` is a special token, which decoders leave out."""
        ids = [self.backend.token_to_id(text) for text in texts] if self.backend is not None else []
        return any(i is not None and not self.backend.decode([i]) for i in ids)

    def decoder(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> TextDecoder:
        """A new incremental decoder of what follows ``prompt``, one for each sequence."""
        if self.vocabulary is not None:
            return self.vocabulary.decoder(skip_special_tokens, prompt)
        if self.backend is not None:
            return WindowDecoder(self.backend, skip_special_tokens, prompt)
        return SilentDecoder()

    def encode_chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, template_options: dict[str, Any]
    ) -> list[int]:
        """Ids of a conversation by the tokenizer's template, or line by line where it has none.

        Raises:
            APIError: 400 when the template refuses the conversation, 422 when there is no tokenizer.
        """
        if not self.chat_template:
            lines = [f"{message['role']}: {message['content']}" for message in messages]
            return self.encode("\n".join([*lines, "assistant:"] if add_generation_prompt else lines))
        try:
            text = self.chat.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **template_options
            )
        except Exception as error:  # a template may raise anything
            reason = str(error)[:200] or type(error).__name__
            raise invalid(f"the chat template refuses these messages: {reason}", "messages") from None
        return self.encode(text, add_special_tokens=False)


def check_tokenizer_folder(config: EngineConfig) -> None:
    """Raises ValueError when ``config.tokenizer`` names no folder."""
    if config.tokenizer is not None and not Path(config.tokenizer).expanduser().is_dir():
        raise ValueError(f"tokenizer folder {config.tokenizer!r} does not exist: give a folder with a tokenizer.json")


def load_tokenizer(config: EngineConfig, model: ModelInfo) -> ServerTokenizer:
    """The folder of ``config.tokenizer``, else the model's own, else the one that ships.

    Raises:
        ValueError: ``config.tokenizer`` is named and cannot be loaded.
    """
    check_tokenizer_folder(config)
    return _load(tokenizer_folder(config), model, config.max_model_len)


def tokenizer_folder(config: EngineConfig) -> Path:
    """The folder of the tokenizer that a server of this configuration has."""
    if config.tokenizer is not None:
        return Path(config.tokenizer).expanduser()
    folder = model_folder(config.model)
    own = folder is not None and any((folder / name).is_file() for name in _FILES)
    return folder if folder is not None and own else SHIPPED


def _max_characters(backend: Tokenizer, max_model_len: int | None) -> int | None:
    """Characters of ``max_model_len`` of the longest tokens; None unless the tokenizer keeps every character."""
    if max_model_len is None or backend.normalizer is not None or not is_byte_level(backend):
        return None
    return max_model_len * max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)


def _load(folder: Path, model: ModelInfo, max_model_len: int | None) -> ServerTokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (folder / "tokenizer_config.json").is_file():
            chat = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        else:
            chat = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        backend = chat.backend_tokenizer
    except Exception as error:  # the loaders of the library raise anything
        reason = NEEDS_CODE if "trust_remote_code" in str(error) else " ".join(str(error).split())[:200]
        raise ValueError(f"the tokenizer in {str(folder)!r} cannot be loaded ({reason}): check the folder") from None
    backend.no_truncation()
    backend.no_padding()
    size = backend.get_vocab_size(with_added_tokens=True)
    refusal = None
    if size > model.vocab_size:
        refusal = (
            f"text prompts are refused: tokenizer {folder.name!r} has {size} ids and model {model.name!r} only "
            f"{model.vocab_size}, so it is not the model's; send token ids, or start the server with --tokenizer FOLDER"
        )
    vocabulary = ByteVocabulary(backend) if is_byte_level(backend) else None
    longest = _max_characters(backend, max_model_len)
    return ServerTokenizer(folder.name, backend, chat, refusal, vocabulary, longest)
