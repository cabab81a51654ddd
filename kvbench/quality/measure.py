"""`kvbench quality`: what each configuration of a workload changes in the model's answers, by the built-in engine.

Configurations that differ in nothing that could change an answer share a measurement. Imports the engine, and torch
with it, only when it measures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.common.errors import UsageError
from kvbench.common.git import git_state
from kvbench.common.machine import versions
from kvbench.quality.figures import Measured, figures, full_pool_figures
from kvbench.quality.passkeys import FILLER, make_passkeys
from kvbench.quality.prompts import FOLDER, SETS, Prompt, in_tokens, read_set
from kvbench.requests.build import build_requests
from kvbench.requests.canaries import SHIPPED, Canary, as_request, canaries_of, read_canaries
from kvbench.requests.request import RequestSpec
from kvbench.runs.quality import QualityResult, limits_of, outside_of
from kvbench.workload.design import Configuration
from kvbench.workload.file import Workload

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.model.loader import LoadedModel
    from engine.server.tokenizer import ServerTokenizer
    from kvbench.quality.free import Answers
    from kvbench.quality.statistics import Positions

BESIDE = "kvbench-tiny"  # measures for models of random weights, whose answers mean nothing
Say = Callable[[str], None]
# Settings that decide which weights are loaded, and how.
_WEIGHTS = ("model", "load_format", "seed", "dtype", "device", "torch_compile")
# Settings that change no answer: how much fits, how many at once and in which order. The measurement sets its own.
_WITHOUT_EFFECT = (
    "kv_budget", "swap_space", "max_model_len", "max_num_seqs", "max_num_waiting", "scheduling_policy", "num_threads",
    "tokenizer",
)  # fmt: skip
# Settings of the scheduler, which teacher forcing does not use.
_SCHEDULING = (
    "enable_prefix_caching", "preemption_mode", "async_scheduling", "max_num_partial_prefills",
    "enable_chunked_prefill", "reservation",
)  # fmt: skip
_ROWS = 16  # sequences side by side, free running
_ROWS_OF_CONTROL = 5
_CHUNK_OF_CONTROL = 3 / 7  # of the baseline's
_FORKED_EVERY = 3  # at a full pool, one of so many requests is asked for two answers
_LONGEST_AT_FULL_POOL = 768  # tokens: the pool holds the longest, and should be small
# A minute or two of all cores, often on a machine that does other work too. One configuration with kvbench-tiny beside
# programs that kept more than one of 2 cores busy: 48 s with 0, 62 s with 2000, over 180 s with the server's 20000.
_SPIN_COUNT = "2000"
_WORKLOAD_PROMPTS, _WORKLOAD_TOKENS = 16, 64  # of the workload's own prompts, and the most tokens after each
RANDOM_NOTE = (
    "The weights are random: such a model's predictions are nearly even and hardly moved by its KV, and it finds no "
    "passkey. These figures show that KV is read and written right, and are much better than a trained model's."
)


@dataclass(frozen=True)
class Material:
    """What one model is asked. ``left_out``: prompts that do not fit its context."""

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
        return max(each.longest for each in self.everything)

    def wrong_canaries(self, answers: Answers) -> set[str]:
        return {each.canary_id for each in self.canaries if answers[each.canary_id][0] != tuple(each.answer_token_ids)}

    def right_canaries(self, answers: Answers) -> dict[str, Any]:
        """The figure ``canaries``; none without a canary."""
        asked = len(self.canaries)
        right = asked - len(self.wrong_canaries(answers))
        return {"canaries": {"asked": asked, "right": right}} if asked else {}

    def facts(self, loaded: LoadedModel) -> dict[str, Any]:
        """What was asked of which model, for quality.json."""
        return {
            "device": str(loaded.device),
            "kernel_backend": loaded.backend.name,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "prompts": len(self.forced),
            "passkeys": len(self.passkeys),
            "left_out": self.left_out,
            "tokens": sum(each.length for each in self.everything),
        }


def measure(
    workload: Workload,
    configurations: Sequence[Configuration],
    *,
    model: str | None = None,
    say: Say = lambda text: None,
) -> QualityResult:
    """Every configuration against contiguous full-precision KV, on the same prompts.

    ``model``: what answers; None: the workload's own where its weights are real, else ``BESIDE``. On a CPU with all its
    cores. Raises UsageError for what cannot be measured.
    """
    from engine.startup import set_spin_count

    set_spin_count(_SPIN_COUNT)
    import torch

    began = time.monotonic()
    torch.set_num_threads(cpus())
    groups: dict[tuple[Any, ...], dict[str, Chosen]] = {}
    for each in configurations:
        with _named(each.config_id):
            chosen = Chosen.of(each.settings, model)
        key = tuple(getattr(chosen.config, name) for name in _WEIGHTS)
        groups.setdefault(key, {})[each.config_id] = chosen
    found: dict[str, dict[str, Any]] = {}
    control: dict[str, Any] | None = None
    infos, facts = [], []
    for members in groups.values():
        group = _Group(workload, members, say)
        measured, of_group = group.measure()
        found |= measured
        control = control or of_group  # with several sets of weights that of the first; each has the limits of its own
        infos.append(group.loaded.info)
        facts.append(group.facts)
    assert control is not None
    fingerprints, names = ({getattr(each, of): None for each in infos} for of in ("weights_fingerprint", "name"))
    chosen_ones = [each for members in groups.values() for each in members.values()]
    return QualityResult(
        workload=workload.name,
        model=", ".join(names),
        beside=any(each.beside for each in chosen_ones),
        weights="; ".join(dict.fromkeys(each.weights for each in chosen_ones)),
        configurations={each.config_id: found[each.config_id] for each in configurations},
        control=control,
        limits=limits_of(control),
        weights_fingerprint="".join(fingerprints) if len(fingerprints) == 1 else "",
        git=git_state(),
        versions=versions(),
        note=RANDOM_NOTE if any(each.random for each in chosen_ones) else "",
        facts={
            **facts[0],
            "dtype": ", ".join(dict.fromkeys(each["dtype"] for each in facts)),
            "measurements": sum(each["measurements"] for each in facts),
            "seconds": round(time.monotonic() - began, 3),
        },
    )


def cpus() -> int:
    """Cores of this process: also for a workload that has only some of them compute."""
    from engine.execution.executor import available_cpus

    return available_cpus()


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
class Chosen:
    """What measures a configuration: its settings with the weights that answer.

    ``beside``: those are not its own; ``random``: nobody trained them.
    """

    config: EngineConfig
    beside: bool
    random: bool

    @classmethod
    def of(cls, settings: Mapping[str, Any], model: str | None) -> Chosen:
        """Raises ValueError for impossible settings and a model that is not there."""
        from engine.config import EngineConfig
        from engine.model.spec import find_model, uses_random_weights

        own = EngineConfig.from_mapping(settings)
        random = uses_random_weights(find_model(own.model, own.load_format), own.load_format)
        other = model or (BESIDE if random else own.model)
        if other == own.model:
            return cls(own, False, random)
        other_one = {"model": other, "load_format": "auto", "tokenizer": None, "max_model_len": None}
        config = dataclasses.replace(own, **other_one)
        return cls(config, True, uses_random_weights(find_model(other), "auto"))

    @property
    def weights(self) -> str:
        which = f"random (seed {self.config.seed}) in the shape of" if self.random else "those of"
        return f"{which} {self.config.model}"


class _Models:
    """One model's weights, loaded once for each backend of kernels."""

    def __init__(self) -> None:
        self._loaded: list[LoadedModel] = []

    def get(self, config: EngineConfig) -> LoadedModel:
        """Raises ValueError where the kernels do not serve it."""
        from engine.model.loader import load_model, serve_another

        for each in self._loaded:
            if shared := serve_another(each, config):
                return shared
        self._loaded.append(load_model(config))
        return self._loaded[-1]


class _Group:
    """Configurations that share their weights."""

    def __init__(self, workload: Workload, members: Mapping[str, Chosen], say: Say):
        self.members, self.say = members, say
        self.models = _Models()
        config_id, first = next(iter(members.items()))
        self.base = baseline_of(first.config)
        with _named(config_id):
            self.loaded = self.models.get(self.base)
            self.tokenizer = tokenizer_of(first.config, self.loaded)
            self.material = gather(
                _context(members, self.loaded), self.loaded, self.tokenizer, None if first.beside else workload
            )
        self._answers: dict[tuple[Any, ...], Answers] = {}

    def measure(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """The figures of each configuration, and of the control."""
        distinct = {_key(each.config): each.config for each in self.members.values()}
        self.say(f"baseline: {len(self.material.everything)} prompts")
        expected = self.answers_of(self.base)
        with _named(", ".join(self.members)):
            forced = _compare_forced(self.base, distinct.values(), self.models, self.material, expected, self.say)
        self.say("control: the baseline with other batch-mates, chunks and order")
        control = self.figures_of(self.base, forced[_CONTROL], self.control_answers())
        limits, measured = limits_of(control), {}
        for key, config in distinct.items():
            names = [config_id for config_id, each in self.members.items() if _key(each.config) == key]
            self.say(f"{names[0]}: answers")
            with _named(names[0]):
                answers = self.answers_of(config)
                known = self.figures_of(config, forced[_forced_key(config)], answers)
                known |= self.full_pool_of(config, self.material.wrong_canaries(answers))
            known |= self.material.right_canaries(answers)
            known["outside"] = outside_of(known, limits)
            measured |= dict.fromkeys(names, known)
        return measured, control

    def answers_of(self, config: EngineConfig) -> Answers:
        """All answers of a configuration with room, computed once for those that answer alike."""
        from kvbench.quality.free import answer_all

        if (key := _free_key(config)) not in self._answers:
            engine = engine_with_room(config, self.models.get(config), self.material)
            self._answers[key] = answer_all(engine, self.material.everything)
        return self._answers[key]

    def control_answers(self) -> Answers:
        from kvbench.quality.free import answer_all

        engine = engine_with_room(_control(self.base), self.loaded, self.material, _ROWS_OF_CONTROL)
        return answer_all(engine, self.material.asked[::-1])

    def figures_of(self, config: EngineConfig, positions: Sequence[Positions], answers: Answers) -> dict[str, Any]:
        from engine.model.kv_outliers import balance_keys

        known = {"kv_cache_dtype": config.kv_cache_dtype, "layout": config.layout, "page_size": config.page_size}
        known["kv_outliers"] = dataclasses.asdict(balance_keys(self.models.get(config)))  # measured already
        measured, baseline = Measured(positions, answers), self.answers_of(self.base)
        keys, decode = self.material.passkeys, self.tokenizer.decode
        return known | figures(self.material.forced, keys, measured, baseline, decode, config.page_size)

    def full_pool_of(self, config: EngineConfig, wrong_with_room: set[str]) -> dict[str, Any]:
        """The answers while the pool is too small, beside the baseline's with room."""
        from kvbench.quality.pressure import ACCOUNTS, run_canaries

        requests = _pressed_requests(self.material, self.answers_of(self.base))
        slots, at_once = _small_pool(config, requests), min(config.max_num_seqs, _ROWS)
        pressing = dataclasses.replace(config, max_num_seqs=at_once)
        run = run_canaries(pressing, self.models.get(config), requests, seed=0, slots=slots)
        by_name = {each.prompt_id: each for each in self.material.asked}
        wrong, right, canaries = [], [], []
        for answer in run.answers:
            request = requests[answer.request]
            equal = tuple(answer.token_ids) == request.expected_token_ids
            prompt = by_name.get(str(request.canary))
            if prompt is None:
                canaries.append((str(request.canary), equal))
                continue
            if not equal:
                wrong.append(prompt.prompt_id)
            if prompt.depth is not None:
                right.append(prompt.is_right(self.tokenizer.decode(answer.token_ids)))
        problems = [f"{each.got}, expected {each.expected}" for each in run.findings if each.check in ACCOUNTS]
        asked = len(run.answers) - len(canaries)
        found = full_pool_figures(asked, wrong, right, run.counters, problems, canaries, wrong_with_room)
        return {"full_pool": found}

    @property
    def facts(self) -> dict[str, Any]:
        measurements = len({_key(each.config) for each in self.members.values()})
        return self.material.facts(self.loaded) | {"measurements": measurements}


# --- The engines ---


def baseline_of(config: EngineConfig) -> EngineConfig:
    """What everybody had before: contiguous KV in the model's own dtype."""
    plain: dict[str, Any] = {
        "layout": "contiguous",
        "reservation": "max",
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": False,
    }
    return dataclasses.replace(
        config, **plain, preemption_mode="recompute", swap_space=None, max_num_partial_prefills=1
    )


def _control(base: EngineConfig) -> EngineConfig:
    chunk = max(_ROWS_OF_CONTROL, int(base.max_num_batched_tokens * _CHUNK_OF_CONTROL))
    chunked = {"max_num_batched_tokens": chunk, "enable_chunked_prefill": True, "max_num_partial_prefills": 2}
    return dataclasses.replace(base, max_num_seqs=_ROWS_OF_CONTROL, **chunked)


def engine_with_room(config: EngineConfig, loaded: LoadedModel, material: Material, rows: int = _ROWS) -> Engine:
    """An engine with room for all that runs at once."""
    from engine.build import assemble_engine
    from engine.teacher_forcing import with_room

    free = dataclasses.replace(config, swap_space=None, max_num_waiting=None)
    return assemble_engine(with_room(free, loaded, min(rows, config.max_num_seqs), material.longest), loaded)


def _key(config: EngineConfig, without: Sequence[str] = _WITHOUT_EFFECT) -> tuple[Any, ...]:
    """Equal for configurations that answer alike."""
    known = dataclasses.asdict(config)
    if config.layout == "contiguous":
        known["page_size"] = None
    return tuple(value for name, value in known.items() if name not in without)


def _free_key(config: EngineConfig) -> tuple[Any, ...]:
    """Equal for configurations that answer alike with room, where nothing is preempted."""
    return _key(config, (*_WITHOUT_EFFECT, "preemption_mode"))


def _forced_key(config: EngineConfig) -> tuple[Any, ...]:
    """Equal for configurations that predict alike."""
    return _key(config, (*_WITHOUT_EFFECT, *_SCHEDULING))


_CONTROL = ("control",)  # beside the keys of configurations


def _compare_forced(
    base: EngineConfig,
    configs: Iterable[EngineConfig],
    models: _Models,
    material: Material,
    expected: Answers,
    say: Say,
) -> dict[tuple[Any, ...], list[Positions]]:
    """What the baseline's own tokens tell of each engine and of the control."""
    from engine.teacher_forcing import TeacherForced
    from kvbench.quality import forced

    longest = max(each.longest for each in material.forced)

    def arm(config: EngineConfig) -> forced.Arm:
        engine = TeacherForced(config, models.get(config), forced.ROWS, longest)
        return forced.Arm(engine, config.max_num_batched_tokens)

    baseline = arm(base)
    other = forced.Arm(baseline.engine, _control(base).max_num_batched_tokens, forced.otherwise)
    distinct = {_forced_key(each): each for each in (*configs, base)}  # the baseline itself where one is like it
    arms = {key: baseline if config is base else arm(config) for key, config in distinct.items()}
    conversations = [forced.Conversation.of(each, expected[each.prompt_id]) for each in material.forced]
    names = f"{len(arms) + 1} engines"
    vocab = models.get(base).info.vocab_size

    def tell(done: int) -> None:
        say(f"teacher forcing: {done} of {len(conversations)} prompts, {names}")

    return forced.compare_arms(baseline, {_CONTROL: other, **arms}, conversations, vocab, tell)


# --- The prompts ---


def tokenizer_of(config: EngineConfig, loaded: LoadedModel) -> ServerTokenizer:
    from engine.server.tokenizer import load_tokenizer

    found = load_tokenizer(dataclasses.replace(config, max_model_len=None), loaded.info)
    if found.text_refusal is not None:
        raise UsageError(f"{found.text_refusal}; or measure with another model (--model)")
    return found


def _context(members: Mapping[str, Chosen], loaded: LoadedModel) -> int:
    """Tokens that every configuration serves, and computes in one step where it may not cut prompts."""
    limits = [loaded.info.max_model_len]
    for each in members.values():
        limits.append(each.config.max_model_len)
        limits.append(None if each.config.enable_chunked_prefill else each.config.max_num_batched_tokens)
    if not (known := [limit for limit in limits if limit is not None]):
        raise UsageError(f"model {loaded.info.name!r} states no maximum length: set engine.max_model_len")
    return min(known)


def gather(context: int, loaded: LoadedModel, tokenizer: ServerTokenizer, workload: Workload | None = None) -> Material:
    """The prompt sets, passkeys and canaries that fit; with ``workload`` its first prompts as well."""
    begin = tuple(tokenizer.encode(""))  # what every prompt of this model starts with

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prompts = [each for name in SETS for each in in_tokens(read_set(FOLDER / f"{name}.jsonl"), name, encode, begin)]
    if workload is not None:
        prompts += _workload_prompts(workload, loaded, context)
    fitting = tuple(each for each in prompts if each.longest <= context)
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
        workload.load,
        concurrency=point.concurrency,
        rate=point.request_rate,
        vocab_size=loaded.info.vocab_size,
        max_model_len=context,
        seed=workload.seed,
        repeat=1,
    )
    found = []
    for each in requests:
        if each.prompt_token_ids and each.canary is None and len(found) < _WORKLOAD_PROMPTS:
            ids, tokens = tuple(each.prompt_token_ids), min(each.max_tokens, _WORKLOAD_TOKENS)
            found.append(Prompt(f"workload/{each.index}", "workload", (ids,), tokens))
    return found


def _canaries(loaded: LoadedModel, context: int, workload: Workload | None) -> tuple[Canary, ...]:
    """Those of exactly these weights that fit: of the workload's load, else those that ship with kvbench."""
    path = SHIPPED / f"{loaded.info.name}.jsonl"
    found = canaries_of(workload.load, loaded.info.name) if workload is not None else None
    if found is None and path.is_file():
        found = read_canaries(path)
    known = found is not None and loaded.info.weights_fingerprint in found.weights_fingerprints
    return found.that_fit(context) if found and known else ()


def _as_prompt(canary: Canary) -> Prompt:
    ids = tuple(canary.prompt_token_ids)
    return Prompt(canary.canary_id, "canary", (ids,), len(canary.answer_token_ids), canary.answer, canary.depth)


def _pressed_requests(material: Material, expected: Answers) -> list[RequestSpec]:
    """The last turn of each prompt that is not too long, after the baseline's answers to those before it; canaries."""
    found: list[RequestSpec] = []
    for each in material.asked:
        if each.longest > _LONGEST_AT_FULL_POOL:
            continue
        answers = expected[each.prompt_id]
        request = RequestSpec(
            index=len(found),
            cls=each.set_name,
            prompt_token_ids=each.last_prompt(answers),
            prompt=None,
            max_tokens=each.max_tokens,
            n=2 if len(found) % _FORKED_EVERY == 0 else 1,
            canary=each.prompt_id,
            expected_token_ids=answers[-1],
        )
        found.append(request)
    for canary in material.canaries:
        if _as_prompt(canary).longest <= _LONGEST_AT_FULL_POOL:
            forked = len(found) % _FORKED_EVERY == 0
            found.append(as_request(canary, len(found), answers=2 if forked else 1))
    return found


def _small_pool(config: EngineConfig, requests: Sequence[RequestSpec]) -> int:
    """Slots of a pool that some of the requests fill, in whole pages: the longest one and four mean ones.

    A contiguous slab reserves the longest for each: three of those.
    """
    lengths = [len(each.prompt_token_ids or ()) + each.max_tokens for each in requests]
    if config.layout == "contiguous":
        return 3 * max(lengths)
    pages = [-(-length // config.page_size) for length in lengths]
    return (max(pages) + 4 * sum(pages) // len(pages)) * config.page_size
