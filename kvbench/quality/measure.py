"""`kvbench quality`: what each configuration of a workload changes in the model's answers, by the built-in engine.

All prompts are asked where answers can change: each KV dtype and layout once. A configuration that answers like one of
these (pages of another size, prefix caching, swapping in full precision) is only asked those at a full pool.
Imports torch, so call ``kvbench_engine.startup.set_spin_count`` before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvbench.common.errors import UsageError
from kvbench.common.git import git_state
from kvbench.common.machine import versions
from kvbench.metrics.canaries import FEWEST_CANARIES
from kvbench.quality import answering
from kvbench.quality.figures import Positions, figures, full_pool_figures, outside_of
from kvbench.quality.full_pool import FullPool, engine_with_small_pool, tokens_of
from kvbench.quality.prompts import (
    BESIDE,
    FILLER,
    FOLDER,
    RESIDUES,
    SETS,
    Answers,
    Prompt,
    Say,
    in_tokens,
    make_passkeys,
    read_set,
)
from kvbench.requests.build import LoadDraw, build_requests
from kvbench.requests.canaries import PASSKEY, SHIPPED, Canary, as_request, canaries_of, read_canaries
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
from kvbench_engine.build import assemble_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.model.kv_outliers import balance_keys
from kvbench_engine.model.loader import LoadedModel, load_model, serve_another
from kvbench_engine.model.spec import ModelSpec, find_model, uses_random_weights
from kvbench_engine.server.tokenizer import ServerTokenizer, load_tokenizer
from kvbench_engine.teacher_forcing import TeacherForced, with_room

# Settings that decide which weights are loaded, and how.
_WEIGHTS = ("model", "load_format", "seed", "dtype", "device", "torch_compile")
# Settings that change no answer: how much fits, how many at once and in which order. The measurement sets its own.
_WITHOUT_EFFECT = (
    "kv_budget", "swap_space", "max_model_len", "max_num_seqs", "max_num_waiting", "watermark", "scheduling_policy",
    "num_threads", "tokenizer",
)  # fmt: skip
_WITHOUT_EFFECT_WITH_ROOM = (*_WITHOUT_EFFECT, "preemption_mode")  # nothing is preempted
# Settings that change no answer as long as they work: where each token's KV lies, and who is computed beside whom. That
# they work is what the answers at a full pool show.
_LIKE_QUANTISED = (*_WITHOUT_EFFECT_WITH_ROOM, "page_size", "free_outside_window")
_LIKE_EXACT = (
    *_LIKE_QUANTISED, "enable_prefix_caching", "async_scheduling", "max_num_partial_prefills", "reservation",
)  # fmt: skip
_WITHOUT_EFFECT_FORCED = (  # teacher forcing uses no scheduler
    *_WITHOUT_EFFECT, "enable_prefix_caching", "preemption_mode", "async_scheduling", "max_num_partial_prefills",
    "enable_chunked_prefill", "reservation", "free_outside_window",
)  # fmt: skip
_CONTROL = ("control",)  # beside the keys of configurations
_ROWS = 16  # sequences side by side, free running
_ROWS_OF_CONTROL = 5
_CHUNK_OF_CONTROL = 3 / 7  # of the baseline's
_FORKED_EVERY = 3  # at a full pool, one of so many requests is asked for two answers
_LONGEST_AT_FULL_POOL = 300  # tokens: the pool holds the longest, and should be small
_EVERY_AT_FULL_POOL = 3  # of the prompts of the sets, one of so many is asked there
_LONGEST_CANARY = 768  # tokens, of a model beside the workload; of its own all that fit, as loads ask them too
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
    def answerable(self) -> tuple[Prompt, ...]:
        """The prompts whose answer is known: passkeys, and canaries that are none of them."""
        names = {prompt.prompt_id for prompt in self.passkeys}
        return self.passkeys + tuple(_as_prompt(c) for c in self.canaries if c.canary_id not in names)

    @property
    def everything(self) -> tuple[Prompt, ...]:
        return self.forced + self.answerable

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
    threads: int,
    model: str | None = None,
    every: bool = False,
    say: Say = lambda text: None,
) -> QualityResult:
    """Compares every configuration with contiguous full-precision KV, on the same prompts.

    ``model``: what answers; None: the workload's own where its weights are real, else ``BESIDE``. ``every``: asks all
    prompts of configurations that answer like another one, too. ``threads``: on a CPU. Raises UsageError for what
    cannot be measured.
    """
    began = time.monotonic()
    torch.set_num_threads(threads)
    groups: dict[tuple[Any, ...], dict[str, Subject]] = {}
    for configuration in configurations:
        with _named(configuration.config_id):
            subject = Subject.of(configuration.settings, model)
        key = tuple(getattr(subject.config, name) for name in _WEIGHTS)
        groups.setdefault(key, {})[configuration.config_id] = subject
    measured: dict[str, ConfigurationFigures] = {}
    controls, facts, infos = [], [], []
    for members in groups.values():
        group = WeightsGroup(workload, members, every, say)
        figures_of_group, control = group.measure()
        measured |= figures_of_group
        controls.append(control)
        facts.append(group.material.facts(group.loaded, measurements=len(group.leaders)))
        infos.append(group.loaded.info)
    fingerprints = {info.weights_fingerprint for info in infos}
    dtypes = dict.fromkeys(group_facts.dtype for group_facts in facts)
    counted = sum(group_facts.measurements for group_facts in facts)
    subjects = [subject for members in groups.values() for subject in members.values()]
    whole = {
        "dtype": ", ".join(dtypes),
        "measurements": counted,
        "seconds": round(time.monotonic() - began, 3),
        "not_measured": tuple(dict.fromkeys(kind for subject in subjects for kind in subject.missing)),
    }
    return result_of(
        subjects,
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


def _kinds_of_kv(model: ModelSpec) -> set[str]:
    """The kinds of KV that a model keeps beside K and V of all tokens, as its config tells."""
    try:
        layers = model.kv_shape("float32").layers
    except ValueError:
        return set()
    windows = {"KV of layers with a window"} if any(layer.window for layer in layers) else set()
    return windows | ({"latent KV rows"} if any(layer.latent for layer in layers) else set())


@dataclass(frozen=True)
class Subject:
    """A configuration with the weights that answer for it.

    ``beside``: not its own; ``random``: nobody trained them; ``missing``: what its own model keeps in the KV cache and
    they do not.
    """

    config: EngineConfig
    beside: bool
    random: bool
    missing: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Any], model: str | None) -> Subject:
        """Raises ValueError for impossible settings and a model that is not there."""
        own = EngineConfig.from_mapping(settings)
        own_model = find_model(own.model, own.load_format)
        random = uses_random_weights(own_model, own.load_format)
        other = model or (BESIDE if random else own.model)
        if other == own.model:
            return cls(own, False, random)
        config = dataclasses.replace(own, model=other, load_format="auto", tokenizer=None, max_model_len=None)
        other_model = find_model(other)
        kinds = sorted(_kinds_of_kv(own_model) - _kinds_of_kv(other_model))
        missing = tuple(f"{kind}: {other_model.name} has none (--model names another)" for kind in kinds)
        return cls(config, True, uses_random_weights(other_model, "auto"), missing)

    @property
    def weights(self) -> str:
        which = f"random (seed {self.config.seed}) in the shape of" if self.random else "those of"
        return f"{which} {self.config.model}"


class WeightsGroup:
    """Configurations that share their weights, which are loaded once for each backend of kernels."""

    def __init__(self, workload: Workload, members: Mapping[str, Subject], every: bool, say: Say):
        self.members, self.say = members, say
        self._models: list[LoadedModel] = []
        config_id, first = next(iter(members.items()))
        self.base = baseline_of(first.config)
        with _named(config_id):
            self.loaded = self._model(self.base)
            self.tokenizer = tokenizer_of(first.config, self.loaded)
            own_workload = None if first.beside else workload
            self.material = gather(_context(members, self.loaded), self.loaded, self.tokenizer, own_workload)
        few = sum(_is_short(canary) for canary in self.material.canaries) < FEWEST_CANARIES
        self._shares_figures = not (every or few)

    def measure(self) -> tuple[dict[str, ConfigurationFigures], ConfigurationFigures]:
        """The figures of each configuration, and of the control."""
        self.say(f"baseline: {len(self.material.everything)} prompts")
        with _named(", ".join(self.members)):
            forced = self._forced_positions(self.leaders.values())
        self.say("control: the baseline with other batch-mates, chunks and order")
        control = self._figures_of(self.base, forced[_CONTROL], self._answers_of_control(forced[_CONTROL]))
        limits, measured = limits_of(control), {}
        leaders: dict[str, tuple[list[Positions], Answers]] = {}
        for names in self.distinct:
            config = self.members[names[0]].config
            leader = self._leader_of[self._likeness(config)]
            with _named(names[0]):
                if leader in names:
                    self.say(f"{leader}: answers")
                    positions = forced[_key(config, _WITHOUT_EFFECT_FORCED)]
                    leaders[leader] = positions, self._answers_of(config, positions)
                positions, answers = leaders[leader]
                self.say(f"{names[0]}: answers at a full pool")
                pool = self.full_pool_of(config, self.material.wrong_canaries(answers))
                figures_of_config = self._figures_of(config, positions, answers)
            how = {"full_pool": pool, "measured": "all" if leader in names else "full_pool"}
            judged = self.material.judged(figures_of_config, answers, limits, **how)
            for name in names:
                measured[name] = judged.model_copy(update={"like": None if name == leader else leader})
        return measured, control

    @property
    def distinct(self) -> list[list[str]]:
        """The ids of configurations, those together that differ in nothing that could change an answer."""
        by_key: dict[tuple[Any, ...], list[str]] = {}
        for config_id, member in self.members.items():
            by_key.setdefault(_key(member.config), []).append(config_id)
        return list(by_key.values())

    @cached_property
    def _leader_of(self) -> dict[tuple[Any, ...], str]:
        """The first of the configurations that answer alike, which is asked all prompts."""
        first: dict[tuple[Any, ...], str] = {}
        for config_id, member in self.members.items():
            first.setdefault(self._likeness(member.config), config_id)
        return first

    @property
    def leaders(self) -> dict[str, EngineConfig]:
        """The configurations that are asked all prompts, by their id."""
        return {config_id: self.members[config_id].config for config_id in self._leader_of.values()}

    def _likeness(self, config: EngineConfig) -> tuple[Any, ...]:
        """A key that is equal for configurations whose answers are the same with room."""
        if not self._shares_figures:
            return _key(config)
        return _key(config, _LIKE_EXACT if config.kv_cache_dtype == "auto" else _LIKE_QUANTISED)

    def _model(self, config: EngineConfig) -> LoadedModel:
        """Raises ValueError where the kernels do not serve it."""
        for loaded in self._models:
            if shared := serve_another(loaded, config):
                return shared
        self._models.append(load_model(config))
        return self._models[-1]

    @cached_property
    def expected(self) -> Answers:
        """The baseline's answers to all prompts."""
        return answering.answer_all(engine_with_room(self.base, self.loaded, self.material), self.material.everything)

    def _answers_of(self, config: EngineConfig, positions: Sequence[Positions]) -> Answers:
        """All answers with room. ``positions``: its predictions of the baseline's answers, which tell its own."""
        if _key(config, _WITHOUT_EFFECT_WITH_ROOM) == _key(self.base, _WITHOUT_EFFECT_WITH_ROOM):
            return self.expected
        predicted, again = self._predicted(positions)
        engine = engine_with_room(config, self._model(config), self.material)
        return predicted | answering.answer_all(engine, [*self.material.answerable, *again])

    def _answers_of_control(self, positions: Sequence[Positions]) -> Answers:
        predicted, again = self._predicted(positions)
        engine = engine_with_room(_control(self.base), self.loaded, self.material, _ROWS_OF_CONTROL)
        return predicted | answering.answer_all(engine, [*self.material.passkeys, *again][::-1])

    def _predicted(self, positions: Sequence[Positions]) -> tuple[dict[str, Any], list[Prompt]]:
        """The answers to the prompts of the sets, and those with a passkey that are not known to the end."""
        answers, unknown = {}, []
        for prompt, predictions in zip(self.material.forced, positions, strict=True):
            expected = self.expected[prompt.prompt_id]
            answers[prompt.prompt_id] = answering.predicted_answers(expected, predictions)
            if prompt.depth is not None and answers[prompt.prompt_id] != expected:
                unknown.append(prompt)
        return answers, unknown

    def _forced_positions(self, configs: Iterable[EngineConfig]) -> dict[tuple[Any, ...], list[Positions]]:
        """Teacher forcing: every engine and the control on the baseline's own tokens."""
        prompts, expected = self.material.forced, self.expected
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
            self.expected,
            self.tokenizer.decode,
            config.page_size,
            kv_cache_dtype=config.kv_cache_dtype,
            layout=config.layout,
            kv_outliers=OutlierFacts(**dataclasses.asdict(balance_keys(self._model(config)))),  # measured already
        )

    def full_pool_of(self, config: EngineConfig, wrong_with_room: set[str]) -> FullPoolFigures:
        """Compares the answers while the pool is too small with the baseline's with room."""
        requests = _pressed_requests(self.material, self.expected)
        pressing = dataclasses.replace(config, max_num_seqs=min(config.max_num_seqs, _ROWS))
        engine = engine_with_small_pool(pressing, self._model(config), requests, _small_pool(config, requests))
        pool = FullPool(engine, requests)
        pool.run(seed=0)
        prompts = {prompt.prompt_id: prompt for prompt in self.material.everything}
        canary_ids = {canary.canary_id for canary in self.material.canaries}
        wrong, right, canaries = [], [], []
        for (index, _), token_ids in pool.answers.items():
            prompt = prompts[str(requests[index].canary)]
            is_equal = tuple(token_ids) == requests[index].expected_token_ids
            if not is_equal:
                wrong.append(prompt.prompt_id)
            if prompt.prompt_id in canary_ids:
                canaries.append((prompt.prompt_id, is_equal))
            if prompt.depth is not None:
                right.append(prompt.is_right(self.tokenizer.decode(token_ids)))
        return full_pool_figures(
            len(pool.answers), wrong, right, pool.counters, pool.problems, canaries, wrong_with_room
        )


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
    canaries = _canaries(loaded, context, workload)
    passkeys = [_as_prompt(canary) for canary in canaries if canary.kind == PASSKEY]
    if len(passkeys) < RESIDUES // 2:
        passkeys = make_passkeys(encode, encode(FILLER.read_text(encoding="utf-8")), context, begin)
    if not passkeys:
        raise UsageError(f"no passkey fits {context} tokens of prompt and answer: raise max_model_len")
    return Material(fitting, tuple(passkeys), canaries, len(prompts) - len(fitting))


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
    return made.that_fit(context if workload is not None else min(context, _LONGEST_CANARY))


def _as_prompt(canary: Canary) -> Prompt:
    """The canary as a prompt; a copy has no ``depth``, as it is no passkey."""
    ids, depth = tuple(canary.prompt_token_ids), canary.depth if canary.kind == PASSKEY else None
    return Prompt(canary.canary_id, "canary", (ids,), len(canary.answer_token_ids), canary.answer, depth)


def _is_short(asked: Prompt | Canary) -> bool:
    """Tests whether it is short enough to be asked at a full pool."""
    prompt = _as_prompt(asked) if isinstance(asked, Canary) else asked
    return prompt.longest <= _LONGEST_AT_FULL_POOL


# --- The full pool ---


def _pressed_requests(material: Material, expected: Answers) -> list[RequestSpec]:
    """Lists what is asked at a full pool, all of it short: some prompts of the sets, all passkeys and canaries.

    Of a conversation the last turn, after the baseline's answers to those before it.
    """
    canaries = {canary.canary_id: canary for canary in material.canaries}
    sets = [prompt for prompt in material.forced if _is_short(prompt)][::_EVERY_AT_FULL_POOL]
    requests: list[RequestSpec] = []
    for prompt in (*sets, *filter(_is_short, material.answerable)):
        index, n = len(requests), 2 if len(requests) % _FORKED_EVERY == 0 else 1
        if canary := canaries.get(prompt.prompt_id):
            requests.append(as_request(canary, index, answers=n))
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
