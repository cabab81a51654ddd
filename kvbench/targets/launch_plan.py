"""The launch command of a configuration: from a preset, or from the user's ``--serve-cmd`` with placeholders.

In a ``--serve-cmd``, ``{name}`` becomes the value of that setting. ``{name:ON|OFF}`` becomes the text ON where the
setting is true and OFF where it is false; a word that becomes empty is left out. ``{{`` and ``}}`` are braces. What a
sweep varies must appear in the command: otherwise its configurations would all be the same server.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.text import data_size
from kvbench.runs.results import Capacity
from kvbench.targets.preset import CAPACITY_TOLERANCE, MODEL_SETTINGS, Context, Preset
from kvbench.workload.design import Design
from kvbench.workload.settings import Settings, effective

HOST = "127.0.0.1"
_LAUNCH_VALUES = ("model", "port", "host")  # placeholders that are no settings, but for the model
_FOLDER_SETTINGS = ("load_format", "seed", "tokenizer")  # a server gets them with the model's folder
_ALWAYS_KNOWN = {*MODEL_SETTINGS, "seed", "dtype", "device", "max_model_len"}  # whatever a template passes on
_ANY_SERVER_FACTS = ("max_model_len", "vocab_size")  # our arithmetic holds for these on any server
_BUDGET_FACTS = ("kv_budget_bytes", "bytes_per_token", "scale_bytes_per_token")  # if the server is given the budget
_PROGRAM_TIMEOUT_S = 60.0  # a Python on a cold disk; a launcher that looks for GPUs first
_NO_MODULE = 3
_HAS_MODULE = f"import importlib.util, sys; sys.exit(0 if importlib.util.find_spec(sys.argv[1]) else {_NO_MODULE})"


def split_command(text: str, option: str = "--serve-cmd") -> tuple[str, ...]:
    """The words of the command that ``option`` gives. Raises UsageError when they cannot be launched."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is not a command line ({error}): mend the quotes") from None
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"{option} {text!r}: there is no program {(words or ('',))[0]!r}; give its path")
    return words


def placeholders(text: str) -> frozenset[str]:
    """The names in braces. Raises ValueError where quotes or braces do not match."""
    parts = (part for word in shlex.split(text) for part in string.Formatter().parse(word))
    return frozenset(name for _, name, _, _ in parts if name is not None)


def is_template(text: str) -> bool:
    """Tests whether a command has any ``{placeholder}``; without one it takes the built-in server's flags."""
    try:
        return bool(placeholders(text))
    except ValueError:
        return False


@dataclass(frozen=True)
class CommandTemplate:
    """A --serve-cmd. ``words``: with their placeholders; ``names``: of the placeholders."""

    words: tuple[str, ...]
    names: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> CommandTemplate:
        """Raises UsageError for an invalid command."""
        from kvbench_engine.config import EngineConfig

        try:
            names = placeholders(text)
        except ValueError as error:
            raise UsageError(f"--serve-cmd {text!r} is not a command line ({error}): mend quotes and braces") from None
        allowed = dict.fromkeys((*_LAUNCH_VALUES, *(field.name for field in dataclasses.fields(EngineConfig))))
        if unknown := sorted(names.difference(allowed)):
            raise UsageError(
                f"--serve-cmd has the placeholder {{{unknown[0]}}}, which is no setting: the known ones are "
                f"{', '.join(allowed)}; write {{{{ and }}}} for braces"
            )
        words = split_command(text)
        for _, name, spec, conversion in (part for word in words for part in string.Formatter().parse(word)):
            if conversion or (spec and ("|" not in spec or "{" in spec)):
                raise UsageError(
                    f"--serve-cmd formats the value of {{{name}}} ({conversion or spec!r}), which is not possible: "
                    f"write {{{name}}} for the value, or {{{name}:ON|OFF}} for two texts, the first where it is true"
                )
        if "port" not in names:
            raise UsageError("--serve-cmd has no {port}: the server must listen where kvbench looks for it; add it")
        return cls(words, names)

    def require(self, swept: Iterable[str]) -> None:
        """Raises UsageError when a setting that is swept is not in the command."""
        if missing := [name for name in swept if name not in self.names]:
            raise UsageError(
                f"the sweep varies {', '.join(missing)}, and --serve-cmd does not pass it on: its configurations would "
                f"all be the same server. Add {' '.join(f'{{{name}}}' for name in missing)}, sweep nothing "
                "(-o 'sweep={}'), or leave those cells out with --only"
            )

    def not_passed_on(self, settings: Settings) -> list[str]:
        """Settings of the workload that the command does not have: there the server keeps its own values."""
        elsewhere = (*_FOLDER_SETTINGS, *(["layout"] if settings.get("layout") == "paged" else []))
        return [name for name in settings if name not in self.names and name not in elsewhere]

    def command(
        self, settings: Settings, *, model: str, port: int | str, kv_budget_bytes: int | None
    ) -> tuple[str, ...]:
        """The words with the values of one configuration. Raises UsageError for a value that nobody has set."""
        values = {name: effective(settings, name) for name in self.names}
        values |= {"model": model, "port": port, "host": HOST}
        if "kv_budget" in values and kv_budget_bytes is not None:
            values["kv_budget"] = kv_budget_bytes
        for name, value in values.items():
            if value is None:
                raise UsageError(
                    f"--serve-cmd has {{{name}}}, which the workload does not set: add -o engine.{name}=VALUE"
                )
        formatted = (_Values().vformat(word, (), values) for word in self.words)
        return tuple(word for word in formatted if word)


class _Values(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec:
            on, _, off = format_spec.partition("|")
            return on if value else off
        return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Launcher:
    """The launch command of any configuration, and what is known of its server before it is launched.

    ``arithmetic``: what our own engine would make of a configuration.
    ``extra``: further words of the command.
    ``template``: the user's command in place of the preset's.
    ``max_in_flight``: the most requests that any load has in flight, None where that is open.
    """

    preset: Preset
    program: str
    arithmetic: Callable[[Settings], Capacity]
    extra: tuple[str, ...] = ()
    template: CommandTemplate | None = None
    max_in_flight: int | None = None

    def context(self, settings: Settings) -> Context:
        """Returns what the preset's words may depend on.

        An open dtype becomes the one that the built-in engine would choose. Other servers have other rules (vLLM runs
        float32 weights in bfloat16), and would compute something else with the same budget.
        """
        capacity = self.arithmetic(settings)
        if effective(settings, "dtype") in (None, "auto") and capacity.dtype is not None:
            settings = {**settings, "dtype": capacity.dtype}
        return Context(settings, capacity, self.max_in_flight, self.program)

    @property
    def passes_model(self) -> bool:
        """Tests whether the command says which model is served."""
        return self.template is None or "model" in self.template.names

    def passed_on(self, settings: Settings) -> dict[str, Any]:
        """The settings that the launch gives the server."""
        names = self.template.names if self.template else self.preset.passed_on
        return {k: v for k, v in self.context(settings).given.items() if k in names}

    def described(self, settings: Settings) -> Settings:
        """The settings that name a configuration: all of them; with a template, only those whose values are known.

        These are the settings that the template passes on, that come with the model's folder, that limit the prompts,
        or that this kind of server always has. For the others the server keeps its own values, which nobody knows.
        """
        if self.template is None:
            return settings
        kept = self.template.names | _ALWAYS_KNOWN
        return {k: v for k, v in settings.items() if k in kept or self.preset.has_only(k, v)}

    def require(self, design: Design) -> None:
        """Raises UsageError when configurations differ in a setting that a template does not pass on."""
        if self.template is not None:
            self.template.require(dict.fromkeys(name for c in design.configurations for name in c.varied))

    def refusal(self, settings: Settings) -> str | None:
        """Says why this configuration cannot be launched; None when it can."""
        return "; ".join(self.preset.refusals(self._preset_context(settings))) or None

    def nearest(self, settings: Settings) -> tuple[Settings, list[str]]:
        """The settings that come closest to a refused configuration, and what was changed."""
        context = self._preset_context(settings)
        near, changes = self.preset.nearest(context)
        left_out = [name for name in context.settings if name not in near]
        if self.template and left_out:
            raise UsageError(
                f"--serve-cmd has {', '.join(f'{{{name}}}' for name in left_out)}, and: "
                f"{'; '.join(self.preset.refusals(context))}. Take it out"
            )
        return {name: near.get(name, value) for name, value in settings.items() if name not in left_out}, changes

    def _preset_context(self, settings: Settings) -> Context:
        """The context for the preset; with a template, only the settings that it passes on and the preset knows."""
        context = self.context(settings)
        return context if self.template is None else context.only(self.template.names & self.preset.settings.keys())

    def check(self, settings: Settings) -> Capacity:
        """Returns what is known of a configuration before its launch. Raises ValueError with the reasons against it.

        The KV budget is known only if the server is given it; otherwise the server's own default holds.
        """
        if reason := self.refusal(settings):
            raise ValueError(reason)
        names = list(_ANY_SERVER_FACTS)
        if self.template is None and effective(settings, "kv_budget") is not None:
            names += [*_BUDGET_FACTS, "capacity_tokens"]
        elif self.template is not None and "kv_budget" in self.template.names:
            names += _BUDGET_FACTS
        capacity = self.arithmetic(settings)
        facts = {name: value for name in names if (value := getattr(capacity, name))}
        if "capacity_tokens" in facts and (given := self.preset.tokens_given(self.context(settings))):
            facts["capacity_tokens"] = given
        return Capacity(**facts)

    def lost_capacity(self, settings: Settings) -> str | None:
        """Says how much less than its budget the server is told to hold, where servers may not differ by that."""
        context = self.context(settings)
        whole, given = context.capacity.capacity_tokens, self.preset.tokens_given(context)
        if self.template is not None or not whole or not given or given >= whole * (1 - CAPACITY_TOLERANCE):
            return None
        token = context.capacity.bytes_per_token
        return (
            f"{self.preset.title} gets {given:,} tokens of KV ({data_size(given * token)}) and not the {whole:,} "
            f"({data_size(whole * token)}) that the budget holds, {1 - given / whole:.1%} less: it takes multiples only"
        )

    def command(self, settings: Settings, *, model: str, port: int | str, scratch: str) -> tuple[str, ...]:
        """The launch command. ``port``: its number, or a name to show. UsageError for a placeholder without a value."""
        context = self.context(settings)
        if self.template is not None:
            budget = context.capacity.kv_budget_bytes
            words = self.template.command(context.settings, model=model, port=port, kv_budget_bytes=budget)
        else:
            words = self.preset.launch_command(context, model=model, port=port, scratch=scratch)
        return (*words, *self.extra)

    def cache_is_off(self, settings: Settings) -> bool:
        """Tests whether the launch tells the server to keep no prefixes: then there is nothing to empty."""
        names = self.template.names if self.template else self.preset.settings
        return "enable_prefix_caching" in names and settings.get("enable_prefix_caching") is False

    def needs_fresh_server(self, settings: Settings) -> bool:
        """Tests whether only a new server has an empty prefix cache."""
        return self.preset.reset_path is None and not self.cache_is_off(settings)


def program_of(preset: Preset, given: str | None) -> str:
    """The Python that has the preset's module, or the preset's program; ``given``: by the user.

    It is run once before any launch. Raises UsageError when there is none, or it does not end within a minute.
    """
    variable = f"{preset.name.upper()}_PYTHON"
    if preset.module is None:
        chosen, arguments = given or preset.program or "", ("--help",)
        way = "name it with --target-python PATH"
    else:
        chosen = given or os.environ.get(variable) or _python_with(preset.module) or ""
        arguments = ("-c", _HAS_MODULE, preset.module)
        way = f"name a Python that has it with --target-python PATH, or in {variable}"
    program = shutil.which(chosen)
    if program is None:
        raise UsageError(f"no program {chosen or 'python'!r} that launches {preset.title} was found: {way}")
    needs = [word for word in preset.command.split() if word.startswith("--")] if preset.module is None else []
    if (problem := _failure_of(program, *arguments, needs=needs)) is not None:
        raise UsageError(f"{chosen} cannot launch {preset.title} ({problem}): {way}")
    return program if preset.module is None else chosen


def _failure_of(*command: str, needs: Sequence[str] = ()) -> str | None:
    """Says why a command failed, or which of the words that it ``needs`` it did not print; None: it succeeded."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROGRAM_TIMEOUT_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it did not end within {_PROGRAM_TIMEOUT_S:g} s"
    except OSError as error:
        return f"it cannot be run: {error.strerror}"
    if _HAS_MODULE in command and done.returncode == _NO_MODULE:
        return f"it has no module {command[-1]!r}"
    if done.returncode:
        return f"{command[1]} ended with exit code {done.returncode}"
    printed = (done.stdout + done.stderr).decode(errors="replace")
    return next((f"its {command[1]} knows no {word}" for word in needs if word not in printed), None)


def _python_with(module: str) -> str | None:
    """Returns this Python where it has the module, else the one beside the server's own script."""
    if importlib.util.find_spec(module) is not None:
        return sys.executable
    script = shutil.which(module)
    python = Path(script).resolve().parent / "python" if script else None
    return str(python) if python and python.exists() else None
