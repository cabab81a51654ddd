"""Request fields that the engine does not have: refused where they would change the answer, else ignored.

Gathered in November 2026 from the request schemas of OpenAI (Python client 3.57), vLLM 0.32, SGLang 0.5.23, llama.cpp
(server-schema.cpp), TGI 3 and transformers 5.23. A field in neither table is refused too, with the nearest name that
the server has.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from kvbench_engine.server.errors import APIError, shown, unsupported

_TEMPLATE = "chat_template_kwargs"  # which completions do not have
_WITH_PARSER = "leave it out, or send it to /v1/chat/completions of a server with {}"
_CALLS, _THOUGHTS = _WITH_PARSER.format("--tool-call-parser"), _WITH_PARSER.format("--reasoning-parser")
_CALLED_OTHERWISE = {"prompt": "messages", "messages": "prompt", "enable_thinking": _TEMPLATE}
LONGEST_NAME = 64  # characters of an unknown name that are read and shown


class Refused(NamedTuple):
    """A field that is refused unless its value is null or neutral.

    name      of the field
    engines   that have it
    neutral   values that change nothing
    effect    of any other value, after "it"
    instead   what to do
    """

    name: str
    engines: str
    neutral: tuple[Any, ...]
    effect: str
    instead: str = "leave it out"


_FIELDS = (
    # which token comes next
    Refused("adaptive_target", "llama.cpp", (-1,), "changes how tokens are drawn"),
    Refused("allowed_token_ids", "vLLM", ([],), "limits the answer to some tokens"),
    Refused("backend_sampling", "llama.cpp", (False,), "changes how tokens are drawn"),
    Refused("bad_words", "vLLM", ([],), "forbids words"),
    Refused("custom_logit_processor", "SGLang", ([],), "changes the logits"),
    Refused("custom_params", "SGLang", ({},), "goes to a logit processor"),
    Refused("do_sample", "TGI, transformers", (True,), "turns sampling off", "set temperature to 0"),
    Refused("dry_multiplier", "llama.cpp", (0,), "penalises repetition"),
    Refused("dynatemp_range", "llama.cpp", (0,), "varies the temperature"),
    Refused("frequency_penalty", "OpenAI", (0,), "penalises repetition"),
    Refused("logit_bias", "OpenAI", ({}, []), "changes the logits"),
    Refused("logits_processors", "vLLM", ([],), "changes the logits"),
    Refused("min_keep", "llama.cpp", (0,), "changes how tokens are drawn"),
    Refused("min_p", "vLLM, SGLang, llama.cpp", (0,), "leaves improbable tokens out"),
    Refused("mirostat", "llama.cpp", (0,), "changes how tokens are drawn"),
    Refused("no_repeat_ngram_size", "transformers", (0,), "forbids repetition"),
    Refused("presence_penalty", "OpenAI", (0,), "penalises repetition"),
    Refused("repeat_penalty", "llama.cpp", (1,), "penalises repetition"),
    Refused("repetition_penalty", "vLLM, SGLang, TGI", (1,), "penalises repetition"),
    Refused("samplers", "llama.cpp", ([], ""), "changes how tokens are drawn"),
    Refused("tfs_z", "llama.cpp", (1,), "leaves improbable tokens out"),
    Refused("top_n_sigma", "llama.cpp", (-1,), "leaves improbable tokens out"),
    Refused("typical_p", "llama.cpp, TGI", (1,), "leaves untypical tokens out"),
    Refused("vllm_xargs", "vLLM", ({},), "goes to an extension of vLLM"),
    Refused("watermark", "SGLang, TGI", (False, {}), "marks the text by its choice of tokens"),
    Refused("watermarking", "vLLM", (False,), "marks the text by its choice of tokens"),
    Refused("xtc_probability", "llama.cpp", (0,), "leaves probable tokens out"),
    # how long the answer is, and where it stops
    Refused("eos_token_id", "transformers", (), "ends the answer", "use stop_token_ids"),
    Refused("include_stop_str_in_output", "vLLM", (False,), "keeps the stop string in the text"),
    Refused("max_length", "transformers", (), "limits the answer", "use max_tokens"),
    Refused("max_new_tokens", "TGI, transformers", (), "limits the answer", "use max_tokens"),
    Refused("min_new_tokens", "transformers", (0,), "sets a least length"),
    Refused("n_cmpl", "llama.cpp", (1,), "sets the number of answers", "use n"),
    Refused("n_indent", "llama.cpp", (0,), "ends the answer by its indentation"),
    Refused("n_predict", "llama.cpp", (), "limits the answer", "use max_tokens"),
    Refused("no_stop_trim", "SGLang", (False,), "keeps the stop string in the text"),
    Refused("num_beams", "transformers", (1,), "searches beams", "use use_beam_search and best_of"),
    Refused("num_return_sequences", "transformers", (1,), "sets the number of answers", "use n"),
    Refused("repetition_detection", "vLLM", ({},), "ends the answer where it repeats itself"),
    Refused("stop_regex", "SGLang", ([], ""), "ends the answer at a pattern", "use stop"),
    Refused("stop_sequences", "TGI", ([],), "ends the answer at a text", "use stop"),
    Refused("stop_strings", "transformers", ([], ""), "ends the answer at a text", "use stop"),
    Refused("t_max_predict_ms", "llama.cpp", (-1, 0), "ends the answer after a time"),
    Refused("t_max_prompt_ms", "llama.cpp", (-1, 0), "ends the answer after a time"),
    # the form of the answer
    Refused("ebnf", "SGLang", ("",), "gives the answer a form"),
    Refused("grammar", "llama.cpp, TGI", ("",), "gives the answer a form"),
    Refused("guided_choice", "vLLM", ([],), "gives the answer a form"),
    Refused("guided_grammar", "vLLM", ("",), "gives the answer a form"),
    Refused("guided_json", "vLLM", (), "gives the answer a form"),
    Refused("guided_regex", "vLLM", ("",), "gives the answer a form"),
    Refused("json_schema", "SGLang, llama.cpp", (), "gives the answer a form"),
    Refused("regex", "SGLang", ("",), "gives the answer a form"),
    Refused("response_format", "OpenAI", ({"type": "text"},), "gives the answer a form"),
    Refused("structural_tag", "vLLM", ("",), "gives the answer a form"),
    Refused("structured_outputs", "vLLM", (), "gives the answer a form"),
    Refused("function_call", "OpenAI", ("none", "auto"), "asks for a call of a function"),
    Refused("functions", "OpenAI", ([],), "adds functions to the prompt"),
    Refused("tool_choice", "OpenAI", ("none", "auto"), "asks for a call of a tool", _CALLS),
    Refused("tools", "OpenAI", ([],), "adds tools to the prompt", _CALLS),
    # thoughts of models that reason
    Refused("include_reasoning", "vLLM", (True,), "leaves thoughts out of the answer", _THOUGHTS),
    Refused("reasoning_budget_tokens", "llama.cpp", (-1,), "limits thoughts"),
    Refused("reasoning_control", "llama.cpp", (False,), "lets thoughts be ended from outside"),
    Refused("reasoning_effort", "OpenAI", (), "changes how long a model reasons", "use chat_template_kwargs"),
    Refused("reasoning_format", "llama.cpp", ("none", "auto"), "splits thoughts from the answer"),
    Refused("thinking", "SGLang", (), "turns thoughts on or off", "use chat_template_kwargs"),
    Refused("thinking_budget_tokens", "llama.cpp", (-1,), "limits thoughts"),
    Refused("thinking_token_budget", "vLLM", (-1,), "limits thoughts"),
    Refused("verbosity", "OpenAI", ("medium",), "makes the answer shorter or longer"),
    # what the model reads
    Refused("add_special_tokens", "vLLM", (False,), "adds tokens to a chat", "use /v1/completions"),
    Refused("audio", "OpenAI", (), "asks for speech"),
    Refused("chat_template", "vLLM", (), "changes the prompt", "send the whole text to /v1/completions"),
    Refused("continue_final_message", "vLLM, SGLang", (False,), "leaves the last message open", "use /v1/completions"),
    Refused("documents", "vLLM", ([],), "adds documents to the prompt"),
    Refused("echo", "vLLM", (False,), "repeats a message of the chat"),
    Refused("generation_prompt", "llama.cpp", ("",), "changes the prompt"),
    Refused("guideline", "TGI", ("",), "changes the prompt"),
    Refused("input_ids", "SGLang", (), "replaces the prompt", "send token ids to /v1/completions"),
    Refused("modalities", "OpenAI", (["text"],), "asks for more than text"),
    Refused("moderation", "OpenAI", (), "has prompt and answer judged"),
    Refused("prediction", "OpenAI", (), "speeds up an answer that is mostly known"),
    Refused("prompt_embeds", "vLLM", (), "replaces the prompt"),
    Refused("suffix", "OpenAI", ("",), "asks for what comes before a text"),
    Refused("task", "SGLang", (), "changes the prompt"),
    Refused("truncate", "TGI", (), "cuts the prompt", "send a shorter one"),
    Refused("truncate_prompt_tokens", "vLLM", (), "cuts the prompt", "send a shorter one"),
    Refused("web_search_options", "OpenAI", (), "adds a search to the prompt"),
    # what comes back
    Refused("chat_format", "llama.cpp", (0,), "takes the answer apart"),
    Refused("chat_parser", "llama.cpp", ("",), "takes the answer apart"),
    Refused("decoder_input_details", "TGI", (False,), "asks for log probabilities"),
    Refused("details", "TGI", (False,), "asks for log probabilities"),
    Refused("detokenize", "vLLM", (True,), "leaves the text out"),
    Refused("logprob_token_ids", "vLLM", ([],), "asks for log probabilities"),
    Refused("logprobs", "OpenAI", (False,), "asks for log probabilities"),
    Refused("n_probs", "llama.cpp", (0,), "asks for log probabilities"),
    Refused("post_sampling_probs", "llama.cpp", (False,), "asks for probabilities"),
    Refused("prompt_logprobs", "vLLM", (), "asks for log probabilities"),
    Refused("response_fields", "llama.cpp", ([],), "changes what comes back"),
    Refused("return_cached_tokens_details", "SGLang", (False,), "asks for details of the prefix cache"),
    Refused("return_flat_raw_output_top_logprobs", "SGLang", (False,), "asks for log probabilities"),
    Refused("return_full_text", "TGI", (False,), "puts the prompt first", "use echo"),
    Refused("return_hidden_states", "SGLang", (False,), "asks for hidden states"),
    Refused("return_input_ids_in_sglext", "SGLang", (False,), "asks for token ids", "use return_token_ids"),
    Refused("return_meta_info", "SGLang", (False,), "asks for details of the engine"),
    Refused("return_output_ids_in_sglext", "SGLang", (False,), "asks for token ids", "use return_token_ids"),
    Refused("return_progress", "llama.cpp", (False,), "adds events to the stream"),
    Refused("return_prompt_text", "vLLM", (False,), "asks for the prompt"),
    Refused("return_prompt_token_ids", "SGLang", (False,), "asks for token ids", "use return_token_ids"),
    Refused("return_routed_experts", "SGLang", (False,), "asks for the experts used"),
    Refused("return_sampling_mask", "SGLang", (False,), "asks for details of sampling"),
    Refused("return_spec_tokens_details", "SGLang", (False,), "asks for details of speculation"),
    Refused("return_tokens", "llama.cpp", (False,), "asks for token ids", "use return_token_ids"),
    Refused("return_tokens_as_token_ids", "vLLM", (False,), "replaces texts by ids", "use return_token_ids"),
    Refused("sampling_logprobs_mode", "SGLang", (), "asks for log probabilities"),
    Refused("spaces_between_special_tokens", "vLLM", (True,), "joins special tokens in the text"),
    Refused("stream_interval", "vLLM", (1,), "puts several tokens into a chunk"),
    Refused("timings_per_token", "llama.cpp", (False,), "adds times to the answer"),
    Refused("top_logprobs", "OpenAI", (0,), "asks for log probabilities"),
    Refused("top_n_tokens", "TGI", (0,), "asks for log probabilities"),
    Refused("verbose", "llama.cpp", (False,), "adds details to the answer"),
    # where and with which weights it is computed, and what of the cache is used
    Refused("adapter_id", "TGI", (), "uses an adapter"),
    Refused("bootstrap_host", "SGLang", (), "takes KV from another server"),
    Refused("bootstrap_port", "SGLang", (), "takes KV from another server"),
    Refused("bootstrap_room", "SGLang", (), "takes KV from another server"),
    Refused("cache_prompt", "llama.cpp", (True,), "leaves cached KV unused", "send a cache_salt that is used once"),
    Refused("data_parallel_rank", "SGLang", (0,), "chooses one of several engines"),
    Refused("disagg_prefill_dp_rank", "SGLang", (0,), "chooses one of several engines"),
    Refused("ec_transfer_params", "vLLM", ({},), "takes encodings from another server"),
    Refused("extra_key", "SGLang", ("",), "separates cached prefixes", "use cache_salt"),
    Refused("id_slot", "llama.cpp", (-1,), "chooses a cache"),
    Refused("kv_transfer_params", "vLLM", ({},), "takes KV from another server"),
    Refused("lora", "llama.cpp", ([],), "uses an adapter"),
    Refused("lora_path", "SGLang", ("",), "uses an adapter"),
    Refused("n_cache_reuse", "llama.cpp", (0,), "moves cached KV to other positions"),
    Refused("prompt_cache_options", "OpenAI", ({}, {"mode": "implicit"}), "says what is cached"),
    Refused("prompt_cache_retention", "OpenAI", ("in_memory", "in-memory"), "says how long it is cached"),
    Refused("routed_dp_rank", "SGLang", (0,), "chooses one of several engines"),
    Refused("session_params", "SGLang", ({},), "continues another request"),
)
REFUSED = {row.name: row for row in _FIELDS}

# Why each of these changes neither the answer nor what is measured, whatever its value.
IGNORED = {
    "names a request, its user or what it is for": (
        "custom_labels", "metadata", "request_id", "rid", "safety_identifier", "session_id", "store", "user",
    ),
    "chooses among several servers or prices, and here is one": ("prompt_cache_key", "service_tier"),
    "concerns tools, images, sound or reasoning, which are refused or not there": (
        "images_config", "max_dynamic_patch", "media_io_kwargs", "min_dynamic_patch", "mm_payload",
        "mm_processor_kwargs", "parallel_tool_calls", "parse_tool_calls", "return_mm_kwargs", "separate_reasoning",
        "stream_reasoning", "tool_prompt", "use_audio_in_video", "video_config",
    ),
    "says how a refused field is to work": (
        "adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
        "dynatemp_exponent", "grammar_lazy", "grammar_triggers", "guided_decoding_backend",
        "guided_whitespace_pattern", "mirostat_eta", "mirostat_tau", "preserved_tokens", "reasoning_budget_end_tag",
        "reasoning_budget_end_tags", "reasoning_budget_message", "reasoning_budget_start_tag", "repeat_last_n",
        "return_flat_raw_top_logprobs_b64", "routed_experts_prompt_start", "routed_experts_start_len",
        "truncation_side", "xtc_threshold",
    ),
    "matters where a prompt may be too long, which is refused": ("n_discard", "n_keep"),
    "matters to padding or to other endpoints": (
        "_from_model_config", "bos_token_id", "pad_token_id", "return_token_offsets", "sse_ping_interval",
        "transformers_version",
    ),
}  # fmt: skip
_IGNORED = frozenset(name for names in IGNORED.values() for name in names)
# The ignored fields of objects within a body.
NESTED_IGNORED = {
    "stream_options": ("include_obfuscation",),  # OpenAI's padding of chunks against eavesdroppers
    "content": ("cache_control",),  # what to cache; here all full pages are
}


def check_fields(sent: Mapping[str, Any], own: Collection[str]) -> None:
    """Check fields ``sent`` to an endpoint whose own fields are ``own``.

    Raises:
        APIError: 400 for a field of another engine with a value that is not neutral, 422 for an unknown one.
    """
    for name, value in sent.items():
        if name in own or name in _IGNORED:
            continue
        row = REFUSED.get(name)
        if row is None:
            raise unknown_field(name, own)
        if value is not None and not any(_same(value, neutral) for neutral in row.neutral):
            sentence = f"{name} cannot be {shown(value)}: it {row.effect}, which this server does not do"
            instead = row.instead if _TEMPLATE not in row.instead or _TEMPLATE in own else "leave it out"
            raise unsupported(f"{sentence}; {instead}", name)


def unknown_field(name: str, allowed: Collection[str], within: str | None = None) -> APIError:
    """Make a 422 for a field that is not ``allowed``, with the nearest name. ``within``: the object that holds it."""
    name = name[:LONGEST_NAME]
    other = _CALLED_OTHERWISE.get(name)
    near = [other] if other in allowed else difflib.get_close_matches(name.lower(), allowed, 1, 0.7)
    advice = f"did you mean {near[0]!r}?" if near else "leave it out"
    if not near and (refused := difflib.get_close_matches(name.lower(), REFUSED, 1, 0.8)):
        advice = f"{refused[0]!r} is not supported either, leave it out"
    where = f" of {within}" if within else ""
    param = f"{within}.{name}" if within else name
    return APIError(422, f"there is no field {shown(name)}{where}: {advice}", param, "unknown_field")


def _same(value: Any, other: Any) -> bool:
    """Tests equality in which 0 is not False."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
