"""The facts about one kind of server: its launch command, its API, its metrics and what it cannot do.

A ``Preset`` is data, with a function only where a value depends on others. If a server cannot have a setting or a value
of it, the preset says why, and the configuration is skipped with this reason.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.text import listing
from kvbench.load.endpoints import OPENAI, PATHS, Dialect
from kvbench.runs.results import Capacity
from kvbench.targets.prometheus import OURS, MetricNames
from kvbench.workload.file import runs_on_cpu
from kvbench.workload.settings import Settings

ADAPTERS = Path(__file__).with_name("adapters")
LOOP = ADAPTERS / "loop.py"  # runs an adapter
CAPACITY_TOLERANCE = 0.02  # between the KV of two servers with one budget


@dataclass(frozen=True)
class Context:
    """The things that the words of a setting may depend on.

    ``capacity``: our own arithmetic for ``settings``. ``max_in_flight``: the most requests that the workload has in
    flight, None without a limit. ``program``: the Python or the program that is launched.
    """

    settings: Settings
    capacity: Capacity = field(default_factory=Capacity)
    max_in_flight: int | None = None
    program: str = "python"

    def only(self, names: Collection[str]) -> Context:
        """Returns the same with these settings only."""
        return dataclasses.replace(self, settings={k: v for k, v in self.settings.items() if k in names})

    @property
    def given(self) -> Settings:
        """The settings that are not left to the server."""
        return {name: value for name, value in self.settings.items() if value is not None}

    @property
    def on_cpu(self) -> bool:
        """Tests whether the server is to run on the CPU: given, or left open on a machine without a GPU."""
        return runs_on_cpu(self.settings.get("device") or "auto")


@dataclass(frozen=True)
class Setting:
    """The way in which a server takes one setting of ours.

    ``words``: of the command line, ``{}`` is the value. ``values``: the only values it can have, with their words;
    others are refused with ``why``. ``variable``: an environment variable that gets the value. ``refuse``: a reason
    against a value, None when there is none. ``nearest``: what comes closest to a refused value; None: leave it out.
    ``tokens``: of a KV budget that is passed on in tokens: how many.
    """

    words: str | Callable[[Any, Context], str] = ""
    values: Mapping[Any, str] | None = None
    why: str = ""
    variable: str | None = None
    refuse: Callable[[Any, Context], str | None] = lambda value, context: None
    nearest: Callable[[Any, Context], Any] | None = None
    tokens: Callable[[Context], int] | None = None

    def refusal(self, value: Any, context: Context) -> str | None:
        """Says why the server cannot have ``value``; None when it can."""
        if self.values is not None and value not in list(self.values):  # a list compares, and cannot be looked up
            return self.why
        return self.refuse(value, context)

    def command_words(self, value: Any, context: Context) -> list[str]:
        """Returns what the command line gets for an accepted value."""
        words = self.words if self.values is None else self.values[value]
        text = words(value, context) if callable(words) else words
        return [word.replace("{}", str(value)) for word in shlex.split(text)]


def flag(words: str, *values: Any, why: str = "", **more: Any) -> Setting:
    """A setting that becomes ``words`` of the command line; ``values``: the only ones, refused with ``why``."""
    return Setting(words=words, values=dict.fromkeys(values, words) if values else None, why=why, **more)


def choice(why: str, **words: str) -> Setting:
    """A setting with these values only, each with its words of the command line; ``why`` refuses others."""
    return Setting(values=words, why=why)


def switch(on: str, off: str, **more: Any) -> Setting:
    """A setting that is true or false."""
    return Setting(values={True: on, False: off}, why="it is true or false", **more)


def always(value: Any, why: str) -> Setting:
    """A setting that has one value there and needs no words; ``why`` refuses any other."""
    return Setting(values={value: ""}, why=why)


def absent(why: str) -> Setting:
    """A setting that the server does not have, whatever its value."""
    return Setting(refuse=lambda value, context: why)


def budget_in(
    unit: str, words: str, why: str = "cannot be worked out for this model and KV dtype", multiple_of: int = 1
) -> Setting:
    """A KV budget that the server takes as a number of tokens or pages: as many as fit it by our arithmetic.

    ``multiple_of``: the server rounds other numbers up, beyond the budget.
    """

    def number(context: Context) -> int:
        return (getattr(context.capacity, unit) or 0) // multiple_of * multiple_of

    def refuse(value: Any, context: Context) -> str | None:
        if number(context):
            return None
        if held := getattr(context.capacity, unit):
            return f"it takes {unit} in multiples of {multiple_of}, and the budget holds {held}"
        return f"it takes {unit}, and how many fit the budget {why}"

    tokens = number if unit == "capacity_tokens" else None
    return Setting(lambda value, context: words.replace("{}", str(number(context))), refuse=refuse, tokens=tokens)


NO_WORDS = Setting()  # any value, and no words: the model's folder has it, or the prompts keep to it

# Every launched server gets these with the exported model folder.
MODEL_SETTINGS: Mapping[str, Setting] = dict.fromkeys(("model", "load_format", "tokenizer"), NO_WORDS)

# What most servers have in common; a preset overrides it.
COMMON: Mapping[str, Setting] = {
    "layout": always("paged", "its KV cache is always paged"),
    "free_outside_window": always(True, "what it keeps of layers with a window is its own"),
    "latent_kv": always(True, "how it keeps latent attention is its own"),
    "enable_chunked_prefill": always(True, "prompts are always cut to its batch"),
    "max_num_partial_prefills": absent("it has no such setting"),
    "watermark": absent("how much it leaves free at an admission is its own"),
    "scheduling_policy": always("fcfs", "it serves in order of arrival"),
    "preemption_mode": always("recompute", "it never preempts"),
    "swap_space": absent("it has none"),
    "dtype": flag("--dtype {}"),
    "kernel_backend": always("auto", "its kernels are its own"),
}
_UNKNOWN = absent("it has no such setting")
_KEPT_IN_BASELINE = ("kv_budget", "dtype", "device")


@dataclass(frozen=True)
class Preset:
    """One kind of server.

    ``command``: its launch command, with ``{program}``, ``{model}``, ``{port}`` and ``{scratch}`` (a folder) in it.
    ``module``: what a Python must have installed to be the program; ``program``: else the name of a program.
    ``settings``: what it takes; a setting that is missing there is refused.
    ``environment``: of the launch; None takes a variable away.
    ``models_path``: None where the server does not list its models; requests then name the model as the command did.
    ``reset_path``: a POST that empties the prefix cache; ``{slot}`` in it: one for each slot of its /slots.
    ``reset_busy``: its status code while requests run. ``reset_way``: what lets a server answer it that does not.
    ``version_path``: answers JSON with the version at ``version_key``; None: the version of ``module`` is the server's.
    ``adapter``: the file that steps the engine (docs/engines.md); its arguments are those of the launch command.
    ``grace_s``: between TERM and KILL.
    ``start_guess_s``: a launch of a small model on a small machine, until one is measured.
    ``greedy_forks``: it returns several answers to a prompt at temperature 0 too, which are the same.
    ``device_pattern``: finds the device in its /server_info.
    ``kv_log_pattern``: finds in its log, for each KV cache, its ``MiB``, ``tokens`` and the types of ``K`` and ``V``.
    ``ends_answers_at``: the endpoints that pass over ``ignore_eos``.
    ``quirks``: what a reader of the numbers should know. ``endpoints``: the APIs that it has, each with what a reader
    of numbers over it should know besides.
    """

    name: str
    title: str
    command: str = ""
    module: str | None = None
    program: str | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    environment: Callable[[Context], Mapping[str, str | None]] = lambda context: {}
    health: str = "/health"
    models_path: str | None = "/v1/models"
    metrics: MetricNames = OURS
    reset_path: str | None = None
    reset_busy: int = 409
    reset_way: str = ""
    version_path: str | None = None
    version_key: str = "version"
    adapter: Path | None = None
    dialect: Dialect = OPENAI
    model_format: str = "safetensors"
    grace_s: float = 10.0
    start_guess_s: float = 60.0
    greedy_forks: bool = False
    ends_answers_at: tuple[str, ...] = ()
    device_pattern: str | None = None
    kv_log_pattern: str | None = None
    quirks: tuple[str, ...] = ()
    endpoints: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict.fromkeys(PATHS, ()))

    def setting(self, name: str) -> Setting:
        """Returns how the server takes the setting; one that it does not have is refused."""
        return self.settings.get(name) or MODEL_SETTINGS.get(name, _UNKNOWN)

    @property
    def passed_on(self) -> frozenset[str]:
        """The settings that the launch gives a server."""
        return frozenset(name for name, row in self.settings.items() if row.words or row.values or row.variable)

    def tokens_given(self, context: Context) -> int | None:
        """The tokens of KV that a launched server is told to hold; None where it is told bytes or nothing."""
        tokens = self.setting("kv_budget").tokens
        return tokens(context) if tokens and "kv_budget" in context.given else None

    def has_only(self, name: str, value: Any) -> bool:
        """Tests whether the server has this value of the setting and no other."""
        return tuple(self.setting(name).values or ()) == (value,)

    def quirks_at(self, endpoint: str) -> tuple[str, ...]:
        """The facts that a reader of the numbers should know of a load that is sent to this endpoint."""
        return (*self.quirks, *self.endpoints.get(endpoint, ()))

    def require_endpoint(self, name: str | None) -> None:
        """Raises UsageError where servers of this kind do not have the endpoint; None: any will do."""
        if name is not None and name not in self.endpoints:
            raise UsageError(f"{self.title} has no {PATHS[name]}, only the endpoints {listing([*self.endpoints])}")

    def refuses_answers(
        self, cls: str | None, answers: Mapping[str, int | None], endpoint: str | None = None
    ) -> str | None:
        """Says why requests of class ``cls`` cannot have ``answers`` (n, best_of, beam_width); None if they can."""
        if (why := self.dialect.at(endpoint or "completions").refusal(answers)) is None:
            return None
        way_out = "" if self.command else ", as far as is known: name its kind with --preset, or ask for n only"
        return f"{self.title} cannot serve class {cls!r}: {why}{way_out}"

    def _reasons(self, context: Context) -> dict[str, str]:
        """Says why the server cannot have a setting of the configuration, by the setting's name."""
        reasons = {name: self.setting(name).refusal(value, context) for name, value in context.given.items()}
        return {name: why for name, why in reasons.items() if why is not None}

    def refusals(self, context: Context) -> list[str]:
        """Says why this server cannot run a configuration: one clause for each setting that it cannot have."""
        return [
            f"{self.title} cannot have {name} {_plain(context.settings[name])}: {why}"
            for name, why in self._reasons(context).items()
        ]

    def nearest(self, context: Context) -> tuple[Settings, list[str]]:
        """Finds the settings that come closest to a refused configuration, and says what was changed.

        KV budget, dtype and device stay even if they are refused: servers are compared under the same ones.
        """
        settings, changes = dict(context.settings), []
        for name in self._reasons(context):
            if name in _KEPT_IN_BASELINE:
                continue
            value, setting = context.settings[name], self.setting(name)
            other = setting.nearest(value, context) if setting.nearest else next(iter(setting.values or ()), None)
            if other is None:
                del settings[name]
                changes.append(f"{name} {_plain(value)} is left to {self.title}")
            else:
                settings[name] = other
                changes.append(f"{name} is {_plain(other)} instead of {_plain(value)}")
        return settings, changes

    def launch_command(self, context: Context, *, model: str, port: int | str, scratch: str = "") -> tuple[str, ...]:
        """The words of the launch command. The configuration must not be refused."""
        names = {"program": context.program, "model": model, "port": str(port), "scratch": scratch}
        words = [word.format(**names) for word in self.command.split()]
        for name, value in context.given.items():
            if name in self.settings:
                words += self.settings[name].command_words(value, context)
        return tuple(words)

    def launch_environment(self, context: Context) -> dict[str, str | None]:
        """Returns variables for the launch; None takes one away."""
        variables = dict(self.environment(context))
        for name, value in context.given.items():
            if variable := self.setting(name).variable:
                variables[variable] = str(value)
        return variables


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
