"""`kvbench quality`: what each configuration of a workload changes in the model's answers, by the built-in engine.

Configurations that differ in nothing that could change an answer share a measurement. Imports torch, so call
``engine.startup.set_spin_count`` before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from engine.build import assemble_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.executor import available_cpus
from engine.model.kv_outliers import balance_keys
from engine.model.loader import LoadedModel, load_model, serve_another
from engine.model.spec import find_model, uses_random_weights
from engine.server.tokenizer import ServerTokenizer, load_tokenizer
from engine.teacher_forcing import TeacherForced, with_room
from kvbench.common.errors import UsageError
from kvbench.common.git import git_state
from kvbench.common.machine import versions
from kvbench.quality import answering
from kvbench.quality.figures import Positions, figures, full_pool_figures, outside_of
from kvbench.quality.full_pool import FullPool, engine_with_small_pool, tokens_of
from kvbench.quality.prompts import FILLER, FOLDER, SETS, Answers, Prompt, in_tokens, make_passkeys, read_set
from kvbench.requests.build import LoadDraw, build_requests
from kvbench.requests.canaries import SHIPPED, Canary, as_request, canaries_of, read_canaries
from kvbench.requests.request import RequestSpec
from kvbench.runs.quality import (
    CanariesRight,
    ConfigurationFigures,
    FullPoolFigures,
    QualityFacts,
    QualityResult,
    limits_of,
)
from kvbench.runs.server_info import OutlierFacts
from kvbench.workload.design import Configuration
from kvbench.workload.file import Workload

BESIDE = "kvbench-tiny"  # measures for models of random weights, whose answers mean nothing
Say = Callable[[str], None]
# Settings that decide which weights are loaded, and how.
_WEIGHTS = ("model", "load_format", "seed", "dtype", "device", "torch_compile")
# Settings that change no answer: how much fits, how many at once and in which order. The measurement sets its own.
_WITHOUT_EFFECT = (
    "kv_budget", "swap_space", "max_model_len", "max_num_seqs", "max_num_waiting", "scheduling_policy", "num_threads",
    "tokenizer",
)  # fmt: skip
_WITHOUT_EFFECT_WITH_ROOM = (*_WITHOUT_EFFECT, "preemption_mode")  # nothing is preempted
_WITHOUT_EFFECT_FORCED = (  # teacher forcing uses no scheduler
    *_WITHOUT_EFFECT, "enable_prefix_caching", "preemption_mode", "async_scheduling", "max_num_partial_prefills",
    "enable_chunked_prefill", "reservation",
)  # fmt: skip
_CONTROL = ("control",)  # beside the keys of configurations
_ROWS = 16  # sequences side by side, free running
_ROWS_OF_CONTROL = 5
_CHUNK_OF_CONTROL = 3 / 7  # of the baseline's
_FORKED_EVERY = 3  # at a full pool, one of so many requests is asked for two answers
_LONGEST_AT_FULL_POOL = 768  # tokens: the pool holds the longest, and should be small
_WORKLOAD_PROMPTS, _WORKLOAD_TOKENS = 16, 64  # of the workload's own prompts, and the most tokens after each
RANDOM_NOTE = (
    "The weights are random: such a model's predictions are nearly even and hardly moved by its KV, and it finds no "
    "passkey. These figures show that KV is read and written right, and are much better than a trained model's."
)


@dataclass(frozen=True)
class Material:
    """The prompts that one model is asked. ``left_out``: those that do not fit its context."""

    forced: tuple[Prompt, ...]
    passkeys: tuple[Prompt, ...]
    canaries: tuple[Canary, ...]
    left_out: int

    @property
    def asked(self) -> tuple[Prompt, ...]:
        return self.forced + self.passkeys

    @property
    def everything(self) -> tuple[Prompt, ...]:
        return self.asked + tuple(map(_as_prompt, self.canaries))

    @property
    def longest(self) -> int:
        return max(prompt.longest for prompt in self.everything)

    def wrong_canaries(self, answers: Answers) -> set[str]:
        return {c.canary_id for c in self.canaries if answers[c.canary_id][0] != tuple(c.answer_token_ids)}

    def judged(
        self, figures: ConfigurationFigures, answers: Answers, limits: Mapping[str, float], **more: Any
    ) -> ConfigurationFigures:
        """The figures with ``more`` of them, the right canaries among ``answers``, and what breaks the limits."""
        if asked := len(self.canaries):
            more["canaries"] = CanariesRight(asked=asked, right=asked - len(self.wrong_canaries(answers)))
        figures = figures.model_copy(update=more)
        return figures.model_copy(update={"outside": tuple(outside_of(figures, limits))})

    def facts(self, loaded: LoadedModel, **more: Any) -> QualityFacts:
        return QualityFacts(
            device=str(loaded.device),
            kernel_backend=loaded.backend.name,
            dtype=str(loaded.dtype).removeprefix("torch."),
            prompts=len(self.forced),
            passkeys=len(self.passkeys),
            tokens=sum(prompt.length for prompt in self.everything),
            **{"left_out": self.left_out, **more},
        )


def measure(
    workload: Workload,
    configurations: Sequence[Configuration],
    *,
    model: str | None = None,
    say: Say = lambda text: None,
) -> QualityResult:
    """Compares every configuration with contiguous full-precision KV, on the same prompts.

    ``model``: what answers; None: the workload's own where its weights are real, else ``BESIDE``. On a CPU with all its
    cores. Raises UsageError for what cannot be measured.
    """
    began = time.monotonic()
    torch.set_num_threads(available_cpus())
    groups: dict[tuple[Any, ...], dict[str, Subject]] = {}
    for configuration in configurations:
        with _named(configuration.config_id):
            subject = Subject.of(configuration.settings, model)
        key = tuple(getattr(subject.config, name) for name in _WEIGHTS)
        groups.setdefault(key, {})[configuration.config_id] = subject
    measured: dict[str, ConfigurationFigures] = {}
    controls, facts, infos = [], [], []
    for members in groups.values():
        group = _WeightsGroup(workload, members, say)
        figures_of_group, control = group.measure()
        measured |= figures_of_group
        controls.append(control)
        facts.append(group.material.facts(group.loaded, measurements=len(group.distinct)))
        infos.append(group.loaded.info)
    fingerprints = {info.weights_fingerprint for info in infos}
    dtypes = dict.fromkeys(group_facts.dtype for group_facts in facts)
    counted = sum(group_facts.measurements for group_facts in facts)
    whole = {"dtype": ", ".join(dtypes), "measurements": counted, "seconds": round(time.monotonic() - began, 3)}
    return result_of(
        [subject for members in groups.values() for subject in members.values()],
        workload=workload.name,
        model=", ".join(dict.fromkeys(info.name for info in infos)),
        configurations={c.config_id: measured[c.config_id] for c in configurations},
        control=controls[0],  # with several sets of weights that of the first; each has the limits of its own
        weights_fingerprint=fingerprints.pop() if len(fingerprints) == 1 else "",
        facts=facts[0].model_copy(update=whole),
    )


def result_of(subjects: Collection[Subject], *, control: ConfigurationFigures, **measured: Any) -> QualityResult:
    """The content of quality.json: what was ``measured``, by whose weights, with the limits of ``control``."""
    return QualityResult(
        beside=any(subject.beside for subject in subjects),
        weights="; ".join(dict.fromkeys(subject.weights for subject in subjects)),
        control=control,
        limits=limits_of(control),
        git=git_state(),
        versions=versions(),
        note=RANDOM_NOTE if any(subject.random for subject in subjects) else "",
        **measured,
    )


@contextlib.contextmanager
def _named(config_id: str) -> Iterator[None]:
    """Says which configuration a ValueError is about."""
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"configuration {config_id}: {error}") from None


@dataclass(frozen=True)
class Subject:
    """A configuration with the weights that answer for it. ``beside``: not its own; ``random``: nobody trained them."""

    config: EngineConfig
    beside: bool
    random: bool

    @classmethod
    def of(cls, settings: Mapping[str, Any], model: str | None) -> Subject:
        """Raises ValueError for impossible settings and a model that is not there."""
        own = EngineConfig.from_mapping(settings)
        random = uses_random_weights(find_model(own.model, own.load_format), own.load_format)
        other = model or (BESIDE if random else own.model)
        if other == own.model:
            return cls(own, False, random)
        config = dataclasses.replace(own, model=other, load_format="auto", tokenizer=None, max_model_len=None)
        return cls(config, True, uses_random_weights(find_model(other), "auto"))

    @property
    def weights(self) -> str:
        which = f"random (seed {self.config.seed}) in the shape of" if self.random else "those of"
        return f"{which} {self.config.model}"


class _WeightsGroup:
    """Configurations that share their weights, which are loaded once for each backend of kernels."""

    def __init__(self, workload: Workload, members: Mapping[str, Subject], say: Say):
        self.members, self.say = members, say
        self._models: list[LoadedModel] = []
        config_id, first = next(iter(members.items()))
        self.base = baseline_of(first.config)
        with _named(config_id):
            self.loaded = self._model(self.base)
            self.tokenizer = tokenizer_of(first.config, self.loaded)
            own_workload = None if first.beside else workload
            self.material = gather(_context(members, self.loaded), self.loaded, self.tokenizer, own_workload)
        self._answers: dict[tuple[Any, ...], Answers] = {}

    def measure(self) -> tuple[dict[str, ConfigurationFigures], ConfigurationFigures]:
        """The figures of each configuration, and of the control."""
        distinct = self.distinct
        self.say(f"baseline: {len(self.material.everything)} prompts")
        self._answers_of(self.base)
        with _named(", ".join(self.members)):
            forced = self._forced_positions(distinct.values())
        self.say("control: the baseline with other batch-mates, chunks and order")
        engine = engine_with_room(_control(self.base), self.loaded, self.material, _ROWS_OF_CONTROL)
        answers = answering.answer_all(engine, self.material.asked[::-1])
        control = self._figures_of(self.base, forced[_CONTROL], answers)
        limits, measured = limits_of(control), {}
        for key, config in distinct.items():
            names = [config_id for config_id, member in self.members.items() if _key(member.config) == key]
            self.say(f"{names[0]}: answers")
            with _named(names[0]):
                answers = self._answers_of(config)
                figures_of_config = self._figures_of(config, forced[_key(config, _WITHOUT_EFFECT_FORCED)], answers)
                pool = self._full_pool_of(config, self.material.wrong_canaries(answers))
            measured |= dict.fromkeys(names, self.material.judged(figures_of_config, answers, limits, full_pool=pool))
        return measured, control

    @cached_property
    def distinct(self) -> dict[tuple[Any, ...], EngineConfig]:
        """One configuration of those that answer alike, by their key."""
        return {_key(member.config): member.config for member in self.members.values()}

    def _model(self, config: EngineConfig) -> LoadedModel:
        """Raises ValueError where the kernels do not serve it."""
        for loaded in self._models:
            if shared := serve_another(loaded, config):
                return shared
        self._models.append(load_model(config))
        return self._models[-1]

    def _answers_of(self, config: EngineConfig) -> Answers:
        """All answers with room, computed once for configurations that answer alike."""
        if (key := _key(config, _WITHOUT_EFFECT_WITH_ROOM)) not in self._answers:
            engine = engine_with_room(config, self._model(config), self.material)
            self._answers[key] = answering.answer_all(engine, self.material.everything)
        return self._answers[key]

    def _forced_positions(self, configs: Iterable[EngineConfig]) -> dict[tuple[Any, ...], list[Positions]]:
        """Teacher forcing: every engine and the control on the baseline's own tokens."""
        prompts, expected = self.material.forced, self._answers_of(self.base)
        longest = max(prompt.longest for prompt in prompts)

        def arm(config: EngineConfig) -> answering.Arm:
            engine = TeacherForced(config, self._model(config), answering.ROWS, longest)
            return answering.Arm(engine, config.max_num_batched_tokens)

        baseline = arm(self.base)
        other = answering.Arm(baseline.engine, _control(self.base).max_num_batched_tokens, answering.otherwise)
        # The baseline itself comes last, in place of a configuration that is like it.
        distinct = {_key(config, _WITHOUT_EFFECT_FORCED): config for config in (*configs, self.base)}
        arms = {key: baseline if config is self.base else arm(config) for key, config in distinct.items()}
        conversations = [answering.Conversation.of(prompt, expected[prompt.prompt_id]) for prompt in prompts]
        names = f"{len(arms) + 1} engines"

        def tell(done: int) -> None:
            self.say(f"teacher forcing: {done} of {len(conversations)} prompts, {names}")

        vocab_size = self.loaded.info.vocab_size
        return answering.compare_arms(baseline, {_CONTROL: other, **arms}, conversations, vocab_size, tell)

    def _figures_of(
        self, config: EngineConfig, positions: Sequence[Positions], answers: Answers
    ) -> ConfigurationFigures:
        return figures(
            self.material.forced,
            self.material.passkeys,
            positions,
            answers,
            self._answers_of(self.base),
            self.tokenizer.decode,
            config.page_size,
            kv_cache_dtype=config.kv_cache_dtype,
            layout=config.layout,
            kv_outliers=OutlierFacts(**dataclasses.asdict(balance_keys(self._model(config)))),  # measured already
        )

    def _full_pool_of(self, config: EngineConfig, wrong_with_room: set[str]) -> FullPoolFigures:
        """Compares the answers while the pool is too small with the baseline's with room."""
        requests = _pressed_requests(self.material, self._answers_of(self.base))
        pressing = dataclasses.replace(config, max_num_seqs=min(config.max_num_seqs, _ROWS))
        engine = engine_with_small_pool(pressing, self._model(config), requests, _small_pool(config, requests))
        pool = FullPool(engine, requests)
        pool.run(seed=0)
        prompts = {question.prompt_id: question for question in self.material.asked}
        wrong, right, canaries = [], [], []
        for (index, _), token_ids in pool.answers.items():
            name, is_equal = str(requests[index].canary), tuple(token_ids) == requests[index].expected_token_ids
            if name not in prompts:
                canaries.append((name, is_equal))
                continue
            prompt = prompts[name]
            if not is_equal:
                wrong.append(prompt.prompt_id)
            if prompt.depth is not None:
                right.append(prompt.is_right(self.tokenizer.decode(token_ids)))
        asked = len(pool.answers) - len(canaries)
        return full_pool_figures(asked, wrong, right, pool.counters, pool.problems, canaries, wrong_with_room)


# --- The engines ---


def baseline_of(config: EngineConfig) -> EngineConfig:
    """The same engine with contiguous KV in the model's own dtype, as everybody had before."""
    return dataclasses.replace(
        config,
        layout="contiguous",
        reservation="max",
        kv_cache_dtype="auto",
        enable_prefix_caching=False,
        preemption_mode="recompute",
        swap_space=None,
        max_num_partial_prefills=1,
    )


def _control(base: EngineConfig) -> EngineConfig:
    chunk = max(_ROWS_OF_CONTROL, int(base.max_num_batched_tokens * _CHUNK_OF_CONTROL))
    return dataclasses.replace(
        base,
        max_num_seqs=_ROWS_OF_CONTROL,
        max_num_batched_tokens=chunk,
        enable_chunked_prefill=True,
        max_num_partial_prefills=2,
    )


def engine_with_room(config: EngineConfig, loaded: LoadedModel, material: Material, rows: int = _ROWS) -> Engine:
    """An engine with room for all that runs at once."""
    free = dataclasses.replace(config, swap_space=None, max_num_waiting=None)
    return assemble_engine(with_room(free, loaded, min(rows, config.max_num_seqs), material.longest), loaded)


def _key(config: EngineConfig, without: Sequence[str] = _WITHOUT_EFFECT) -> tuple[Any, ...]:
    """A key that is equal for configurations that differ only in settings ``without`` effect."""
    settings = dataclasses.asdict(config)
    if config.layout == "contiguous":
        settings["page_size"] = None
    return tuple(value for name, value in settings.items() if name not in without)


# --- The prompts ---


def tokenizer_of(config: EngineConfig, loaded: LoadedModel) -> ServerTokenizer:
    tokenizer = load_tokenizer(dataclasses.replace(config, max_model_len=None), loaded.info)
    if tokenizer.text_refusal is not None:
        raise UsageError(f"{tokenizer.text_refusal}; or measure with another model (--model)")
    return tokenizer


def _context(members: Mapping[str, Subject], loaded: LoadedModel) -> int:
    """Tokens that every configuration serves, and computes in one step where it may not cut prompts."""
    configs = [member.config for member in members.values()]
    limits = [loaded.info.max_model_len, *(config.max_model_len for config in configs)]
    limits += [config.max_num_batched_tokens for config in configs if not config.enable_chunked_prefill]
    if not (stated := [limit for limit in limits if limit is not None]):
        raise UsageError(f"model {loaded.info.name!r} states no maximum length: set engine.max_model_len")
    return min(stated)


def gather(context: int, loaded: LoadedModel, tokenizer: ServerTokenizer, workload: Workload | None = None) -> Material:
    """The prompt sets, passkeys and canaries that fit; with ``workload`` its first prompts as well."""
    begin = tuple(tokenizer.encode(""))  # what every prompt of this model starts with

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prompts = [prompt for name in SETS for prompt in in_tokens(read_set(FOLDER / f"{name}.jsonl"), name, encode, begin)]
    if workload is not None:
        prompts += _workload_prompts(workload, loaded, context)
    fitting = tuple(prompt for prompt in prompts if prompt.longest <= context)
    if not fitting:
        raise UsageError(f"no prompt fits {context} tokens of prompt and answer: raise max_model_len")
    passkeys = make_passkeys(encode, encode(FILLER.read_text(encoding="utf-8")), context, begin)
    if not passkeys:
        raise UsageError(f"no passkey fits {context} tokens of prompt and answer: raise max_model_len")
    return Material(fitting, tuple(passkeys), _canaries(loaded, context, workload), len(prompts) - len(fitting))


def _workload_prompts(workload: Workload, loaded: LoadedModel, context: int) -> list[Prompt]:
    """The first prompts of the workload's first load that have token ids."""
    point = workload.load_points[0]
    requests = build_requests(
        LoadDraw(
            workload.load,
            concurrency=point.concurrency,
            rate=point.request_rate,
            vocab_size=loaded.info.vocab_size,
            max_model_len=context,
            seed=workload.seed,
            repeat=1,
        )
    )
    with_ids = [r for r in requests if r.prompt_token_ids and r.canary is None][:_WORKLOAD_PROMPTS]
    return [
        Prompt(f"workload/{r.index}", "workload", (tuple(r.prompt_token_ids),), min(r.max_tokens, _WORKLOAD_TOKENS))
        for r in with_ids
    ]


def _canaries(loaded: LoadedModel, context: int, workload: Workload | None) -> tuple[Canary, ...]:
    """The canaries of exactly these weights that fit: of the workload's load, else those that ship with kvbench."""
    path = SHIPPED / f"{loaded.info.name}.jsonl"
    made = canaries_of(workload.load, loaded.info.name) if workload is not None else None
    if made is None and path.is_file():
        made = read_canaries(path)
    if made is None or loaded.info.weights_fingerprint not in made.weights_fingerprints:
        return ()
    return made.that_fit(context)


def _as_prompt(canary: Canary) -> Prompt:
    ids = tuple(canary.prompt_token_ids)
    return Prompt(canary.canary_id, "canary", (ids,), len(canary.answer_token_ids), canary.answer, canary.depth)


# --- The full pool ---


def _pressed_requests(material: Material, expected: Answers) -> list[RequestSpec]:
    """The last turn of each prompt that is not too long, after the baseline's answers to those before it; canaries."""
    requests: list[RequestSpec] = []
    for asked in (*material.asked, *material.canaries):
        prompt = _as_prompt(asked) if isinstance(asked, Canary) else asked
        if prompt.longest > _LONGEST_AT_FULL_POOL:
            continue
        index, n = len(requests), 2 if len(requests) % _FORKED_EVERY == 0 else 1
        if isinstance(asked, Canary):
            requests.append(as_request(asked, index, answers=n))
            continue
        answers = expected[prompt.prompt_id]
        request = RequestSpec(
            index, prompt.set_name, prompt.last_prompt(answers), None, prompt.max_tokens, n=n, canary=prompt.prompt_id,
            expected_token_ids=answers[-1],
        )  # fmt: skip
        requests.append(request)
    return requests


def _small_pool(config: EngineConfig, requests: Sequence[RequestSpec]) -> int:
    """Slots in whole pages: of the longest request and four mean ones, in a contiguous slab of three longest ones."""
    lengths = tokens_of(requests)
    if config.layout == "contiguous":
        return 3 * max(lengths)
    pages = [-(-length // config.page_size) for length in lengths]
    return (max(pages) + 4 * sum(pages) // len(pages)) * config.page_size
