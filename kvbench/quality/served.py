"""`kvbench quality --url`: the answers of a server, beside those of the built-in engine with the same model's folder.

The server is asked over OpenAI's completions for greedy answers and, where it answers ``echo`` with ``logprobs``, for
the probability of every token of a prompt. The whole distribution over the vocabulary is not to be had: no KLD.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError

from kvbench.common.errors import MeasurementError, UsageError, as_usage_error
from kvbench.quality import answering, measure
from kvbench.quality.answering import Conversation
from kvbench.quality.figures import Positions, figures
from kvbench.quality.measure import Material, Say
from kvbench.quality.prompts import Answers, Prompt
from kvbench.runs.quality import ConfigurationFigures, QualityResult, limits_of
from kvbench.runs.server_info import ModelList, ServerInfo
from kvbench.targets.base import PLAIN_ACCESS, Access, HttpAnswer, HttpCalls
from kvbench_engine.execution.executor import available_cpus
from kvbench_engine.model.loader import load_model
from kvbench_engine.teacher_forcing import TeacherForced

CONFIG_ID = "server"
_AT_ONCE, _AT_ONCE_OF_CONTROL = 8, 3
_TIMEOUT_S = 300.0  # of one request
_NO_TOKEN = -1  # where an answer has no token, or one that is not the expected answer's
_FIELDS = {"ignore_eos": True, "return_token_ids": True}  # of vLLM and of the built-in server
_ECHO = {"echo": True, "logprobs": 1}
_NO_KLD = "KL divergence: a server tells the probability of the tokens that follow, not of the whole vocabulary"
_NO_LOGPROBS = "perplexity and change in probability: the server does not answer echo with logprobs for token ids"
_PROBE = "The pass key is 48213. Remember it: 48213 is the"
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class _Logprobs(BaseModel):
    token_logprobs: list[float | None] | None = None


class _Choice(BaseModel):
    text: str
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None

    def losses(self, length: int) -> np.ndarray | None:
        """Minus the log probability of all ``length`` tokens of a prompt but the first; None where they are missing."""
        stated = self.logprobs.token_logprobs if self.logprobs else None
        values = (stated or [])[1:length]
        return -np.array(values, dtype=np.float64) if len(values) == length - 1 and None not in values else None


class _Usage(BaseModel):
    prompt_tokens: int | None = None


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


_Shape = TypeVar("_Shape", bound=BaseModel)


def _parsed(shape: type[_Shape], answer: HttpAnswer) -> _Shape | None:
    """The content of a good answer; None for one of another status or shape."""
    with suppress(ValidationError):
        return shape.model_validate(answer.json()) if answer.status == 200 else None
    return None


@dataclass(frozen=True)
class Manner:
    """The way a server can be asked, as it answered when it was asked once.

    ``token_ids``: it takes prompts as token ids, else as texts; ``fields``: more fields that it takes; ``logprobs``: it
    tells the log probability of each token of a prompt.
    """

    token_ids: bool
    fields: dict[str, Any]
    logprobs: bool


@dataclass(frozen=True)
class Served:
    """A server and what it serves. ``name``: of the model; None: it lists none. ``max_model_len``: None if not told."""

    http: HttpCalls
    name: str | None
    max_model_len: int | None

    @classmethod
    def at(cls, url: str, name: str | None, access: Access) -> Served:
        """Raises UsageError where nothing answers."""
        http = HttpCalls(url.rstrip("/").removesuffix("/v1"), access, timeout_s=_TIMEOUT_S)
        try:
            answer = http.check_access(http.call("GET", "/v1/models"))
        except MeasurementError as error:
            raise UsageError(str(error)) from None
        listed = _parsed(ModelList, answer)
        row = next((row for row in listed.data if name in (None, row.id)), None) if listed else None
        return cls(http, row.id, row.max_model_len) if row else cls(http, name, None)

    def ask(self, prompt: str | Sequence[int], max_tokens: int, **fields: Any) -> HttpAnswer:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, **fields}
        body |= {} if self.name is None else {"model": self.name}
        return self.http.check_access(self.http.call("POST", "/v1/completions", body=body))

    def choice(self, answer: HttpAnswer, what: str) -> _Choice:
        """The one answer. Raises MeasurementError, which says ``what`` was asked."""
        completion = _parsed(_Completion, answer)
        if completion is None:
            raise self.http.error(
                f"/v1/completions answered {answer.status} to {what}: {answer.text[:200]} (--max-model-len N leaves "
                "out what is longer)"
            )
        return completion.choices[0]


def manner_of(served: Served, ids: Sequence[int], text: str) -> Manner:
    """Finds out by asking what the server takes. UsageError where it does not answer, or counts other tokens."""
    for prompt, fields in ((list(ids), _FIELDS), (list(ids), {}), (text, _FIELDS), (text, {})):
        answer = served.ask(prompt, 2, **fields)
        if (completion := _parsed(_Completion, answer)) is None:
            continue
        counted = completion.usage.prompt_tokens if completion.usage else None
        if counted not in (None, len(ids)):
            raise UsageError(
                f"{served.http.base_url} counts {counted} tokens in a prompt that has "
                f"{len(ids)} in the tokenizer of --model: it serves another model, or adds tokens of its own"
            )
        by_id = not isinstance(prompt, str)
        echoed = _parsed(_Completion, served.ask(ids, 1, **_ECHO)) if by_id else None
        return Manner(by_id, fields, echoed is not None and echoed.choices[0].losses(len(ids)) is not None)
    raise UsageError(
        f"{served.http.base_url}/v1/completions answered a prompt of {len(ids)} tokens with status "
        f"{answer.status}: "
        f"{answer.text[:200]}"
    )


def _agreed(served: Served, reference: _Reference) -> Manner:
    """Returns how to ask a server of the reference's model. Raises UsageError for another model, or no answer."""
    _check_weights(served, reference)
    try:
        return manner_of(served, reference.tokenizer.encode(_PROBE), _PROBE)
    except MeasurementError as error:
        raise UsageError(str(error)) from None


def _check_weights(served: Served, reference: _Reference) -> None:
    """Raises UsageError where the server tells another set of weights; only the built-in one tells any."""
    info = _parsed(ServerInfo, served.http.call("GET", "/server_info"))
    fingerprint = info.model.weights_fingerprint if info else None
    if fingerprint and fingerprint not in reference.loaded.fingerprints():
        raise UsageError(
            f"{served.http.base_url} serves {info.model.name} with the weights {fingerprint[:12]}, but --model "
            f"{reference.loaded.info.name} has other weights: name the served model"
        )


class _Reference:
    """The built-in engine: contiguous full-precision KV, as `kvbench quality` has for its baseline."""

    def __init__(self, model: str, served: Served, max_model_len: int | None):
        with as_usage_error():
            self.subject = measure.Subject.of({"model": model}, model)
            self.config = measure.baseline_of(self.subject.config)
            self.loaded = load_model(self.config)
        self.tokenizer = measure.tokenizer_of(self.config, self.loaded)
        self.begin = tuple(self.tokenizer.encode(""))
        limits = [self.loaded.info.max_model_len, served.max_model_len, max_model_len]
        if not (stated := [limit for limit in limits if limit is not None]):
            raise UsageError(f"model {model!r} states no maximum length: give --max-model-len N")
        self.context = min(stated) - 1  # a request for log probabilities asks for one token more

    def decode(self, ids: Sequence[int]) -> str:
        """The text as servers write answers: without special tokens."""
        return self.tokenizer.decode([token for token in ids if token != _NO_TOKEN])

    def text_of(self, ids: Sequence[int]) -> str:
        """The text as a prompt, to which a server adds what all prompts of this model start with."""
        own = ids[len(self.begin) :] if tuple(ids[: len(self.begin)]) == self.begin else ids
        return self.tokenizer.decode(own, skip_special_tokens=False)

    def reads(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that a server makes of the text of ``ids``."""
        begin = self.begin if tuple(ids[: len(self.begin)]) == self.begin else ()
        return (*begin, *self.tokenizer.encode(self.text_of(ids), add_special_tokens=False))

    def as_texts(self, material: Material) -> Material:
        """The prompts in the tokens that a server makes of their texts, and the canaries whose tokens stay the same."""

        def as_read(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
            texts = (dataclasses.replace(prompt, turns=tuple(map(self.reads, prompt.turns))) for prompt in prompts)
            return tuple(prompt for prompt in texts if prompt.longest <= self.context)

        canaries = tuple(c for c in material.canaries if self.reads(c.prompt_token_ids) == tuple(c.prompt_token_ids))
        return Material(as_read(material.forced), as_read(material.passkeys), canaries, material.left_out)

    def read_alike(self, prompts: Sequence[Prompt], answers: Answers) -> tuple[Prompt, ...]:
        """The conversations whose whole text has the tokens of its turns, as a server reads it."""
        whole = ((prompt, prompt.last_prompt(answers[prompt.prompt_id])) for prompt in prompts)
        return tuple(prompt for prompt, ids in whole if self.reads(ids) == ids)

    def answers(self, material: Material) -> Answers:
        return answering.answer_all(measure.engine_with_room(self.config, self.loaded, material), material.everything)

    def losses(self, talks: Sequence[Conversation]) -> list[np.ndarray]:
        """Minus the log probability of each token that follows another."""
        longest = max(len(conversation.tokens) for conversation in talks)
        engine = TeacherForced(self.config, self.loaded, answering.ROWS, longest)
        predicted = answering.predictions(
            engine, talks, self.loaded.info.vocab_size, self.config.max_num_batched_tokens
        )
        losses = []
        for talk, logits in zip(talks, predicted, strict=True):
            following = torch.from_numpy(talk.tokens[1:]).to(logits.device)[:, None]
            losses.append(-logits.double().log_softmax(-1).gather(1, following)[:, 0].cpu().numpy())
        return losses


class _ServerAnswers:
    """The server's answers to the prompts, several requests at once."""

    def __init__(self, served: Served, manner: Manner, reference: _Reference, expected: Answers, say: Say):
        self.served, self.manner, self.reference = served, manner, reference
        self.expected, self.say = expected, say
        self.ends = set(reference.loaded.info.eos_token_ids)

    def answers(self, prompts: Sequence[Prompt], at_once: int, what: str) -> Answers:
        given = self.all(self._converse, prompts, at_once, what)
        return {prompt.prompt_id: answers for prompt, answers in zip(prompts, given, strict=True)}

    def all(self, ask: Callable[[_Item], _Result], items: Sequence[_Item], at_once: int, what: str) -> list[_Result]:
        """Asks for all ``items``, ``at_once`` of them at a time, and returns their answers."""
        results = []
        with ThreadPoolExecutor(at_once) as threads:
            try:
                for result in threads.map(ask, items):
                    results.append(result)
                    self.say(f"{what}: {len(results)} of {len(items)}")
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return results

    def _converse(self, prompt: Prompt) -> tuple[tuple[int, ...], ...]:
        """Asks turn by turn; a later one follows the server's own earlier answer."""
        dialogue: list[int] = []
        given = []
        for turn, right in zip(prompt.turns, self.expected[prompt.prompt_id], strict=True):
            dialogue += turn
            given.append(self._answer(prompt, dialogue, right))
            dialogue += [token for token in given[-1] if token != _NO_TOKEN]
        return tuple(given)

    def _answer(self, prompt: Prompt, dialogue: Sequence[int], expected: tuple[int, ...]) -> tuple[int, ...]:
        sent = list(dialogue) if self.manner.token_ids else self.reference.text_of(dialogue)
        answer = self.served.ask(sent, len(expected), **self.manner.fields)
        choice = self.served.choice(answer, f"the prompt {prompt.prompt_id}")
        end = next((at for at, token in enumerate(expected) if token in self.ends), len(expected))
        stopped = choice.finish_reason == "stop"
        right = expected[:end] if stopped else expected  # a server that knows no ignore_eos stops there
        got = choice.token_ids
        if got is None:
            same = choice.text == self.reference.decode(right)
            got = right if same else self.reference.tokenizer.encode(choice.text, add_special_tokens=False)
        elif stopped and got and got[-1] in self.ends:
            got = got[:-1]
        if stopped and end < len(expected) and tuple(got) == right:
            return expected
        return (*got, *[_NO_TOKEN] * len(expected))[: len(expected)]

    def losses(self, talk: Conversation) -> np.ndarray:
        ids = talk.tokens.tolist()
        what = f"a prompt of {len(ids)} tokens with echo and logprobs"
        losses = self.served.choice(self.served.ask(ids, 1, **_ECHO), what).losses(len(ids))
        if losses is None:
            raise self.served.http.error(f"/v1/completions did not tell all log probabilities of {what}")
        return losses


def measure_served(
    url: str,
    *,
    model: str = measure.BESIDE,
    served_model: str | None = None,
    max_model_len: int | None = None,
    page_size: int = 16,
    access: Access = PLAIN_ACCESS,
    say: Say = lambda text: None,
) -> QualityResult:
    """Compares the server at ``url`` with the built-in engine, and with itself as the control.

    ``model``: the folder that it serves, or the name of one that ships; ``served_model``: its name there, None: the
    first that it lists; ``page_size``: by which the passkeys are counted. Raises UsageError for a server that does not
    speak the model, MeasurementError for one that fails on the way.
    """
    served = Served.at(url, served_model, access)
    began = time.monotonic()
    torch.set_num_threads(available_cpus())
    reference = _Reference(model, served, max_model_len)
    manner = _agreed(served, reference)
    gathered = measure.gather(reference.context, reference.loaded, reference.tokenizer)
    material = gathered if manner.token_ids else reference.as_texts(gathered)
    say(f"baseline: {len(material.everything)} prompts")
    expected = reference.answers(material)
    if not manner.token_ids:
        material = dataclasses.replace(material, forced=reference.read_alike(material.forced, expected))
    asked = _ServerAnswers(served, manner, reference, expected, say)
    answers = asked.answers(material.everything, _AT_ONCE, "the server's answers")
    again = asked.answers(material.asked[::-1], _AT_ONCE_OF_CONTROL, "control: the server's answers in other order")
    positions, control_positions = _probabilities(asked, reference, material, expected) if manner.logprobs else ([], [])

    def figures_of(positions: Sequence[Positions], given: Answers, beside: Answers) -> ConfigurationFigures:
        return figures(material.forced, material.passkeys, positions, given, beside, reference.decode, page_size)

    not_told = [_NO_KLD, *([] if manner.logprobs else [_NO_LOGPROBS])]
    if unread := len(gathered.everything) - len(material.everything):
        not_told.append(f"{unread} prompts whose texts have other tokens than they have")
    # A server that finds no passkey must not set its own limit: those of the control are the built-in engine's.
    passkey = figures_of([], expected, expected).passkey
    control = figures_of(control_positions, again, answers).model_copy(update={"passkey": passkey})
    measured = material.judged(figures_of(positions, answers, expected), answers, limits_of(control))
    return measure.result_of(
        [reference.subject],
        workload=served.http.base_url,
        model=reference.loaded.info.name,
        configurations={CONFIG_ID: measured},
        control=control,
        weights_fingerprint=reference.loaded.info.weights_fingerprint,
        facts=material.facts(
            reference.loaded,
            seconds=round(time.monotonic() - began, 3),
            left_out=gathered.left_out,
            asked_with="token ids" if manner.token_ids else "texts",
            at_once=[_AT_ONCE, _AT_ONCE_OF_CONTROL],
            not_measured=tuple(not_told),
        ),
    )


def _probabilities(
    asked: _ServerAnswers, reference: _Reference, material: Material, expected: Answers
) -> tuple[list[Positions], list[Positions]]:
    """Compares the server on prompts and expected answers with the built-in engine, and with itself."""
    talks = [Conversation.of(prompt, expected[prompt.prompt_id]) for prompt in material.forced]
    own = reference.losses(talks)
    first = asked.all(asked.losses, talks, _AT_ONCE, "probabilities")
    again = asked.all(asked.losses, talks[::-1], _AT_ONCE_OF_CONTROL, "control: probabilities in other order")[::-1]
    return _positions(talks, own, first), _positions(talks, first, again)


def _positions(
    talks: Sequence[Conversation], expected: Sequence[np.ndarray], got: Sequence[np.ndarray]
) -> list[Positions]:
    nothing = np.empty(0)
    return [
        Positions(nothing, np.exp(-new) - np.exp(-old), old, new, nothing, talk.answered[:-1], ~talk.answered[1:])
        for talk, old, new in zip(talks, expected, got, strict=True)
    ]
