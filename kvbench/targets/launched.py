"""Servers that are launched by a command: of a preset, or a template of the user's.

``Launcher`` knows the command for a configuration, ``LaunchedTarget`` is one server of it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.targets.base import ModelFacts
from kvbench.targets.launch_plan import CommandTemplate
from kvbench.targets.model_export import ModelFolders, ServedModel
from kvbench.targets.owned import OwnServer, require_free_port
from kvbench.targets.presets.preset import OF_THE_MODEL, Context, Preset
from kvbench.targets.prometheus import MetricsSample
from kvbench.targets.texts import Texts, TokenizerTexts, WordTexts
from kvbench.targets.versions import version_of
from kvbench.workload.design import Design

_OF_THE_MODEL = ("max_model_len", "vocab_size")  # of our arithmetic, what holds for any server
_OF_THE_FOLDER = {"seed", "dtype", "device", "max_model_len"}  # beside ``OF_THE_MODEL``
_OF_THE_BUDGET = ("kv_budget_bytes", "bytes_per_token", "scale_bytes_per_token")  # for one that was given it
# Begins a word, or stands behind = : , " ' and the like; a slash behind a name or a slash is not the root's.
_ABSOLUTE_PATH = re.compile(r"(?<![\w/.~%+-])/(?:[^\s/\"'=:,]+/+)*([^\s/\"'=:,]+)/*")


@dataclass(frozen=True)
class Launcher:
    """What is launched, for any configuration. ``arithmetic``: what our own engine would make of one (may be empty).

    ``extra``: further words of the command. ``template``: the user's command in place of the preset's.
    ``max_in_flight``: the most requests that any load has in flight, None where that is open.
    """

    preset: Preset
    program: str
    arithmetic: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    extra: tuple[str, ...] = ()
    template: CommandTemplate | None = None
    max_in_flight: int | None = None

    def context(self, settings: Mapping[str, Any]) -> Context:
        """What the preset's words may depend on.

        A dtype that is left open becomes the built-in engine's: another server would choose by other rules (vLLM runs
        float32 weights in bfloat16), and so compute something else with the same budget.
        """
        known = self.arithmetic(settings)
        if settings.get("dtype") in (None, "auto") and known.get("dtype"):
            settings = {**settings, "dtype": known["dtype"]}
        return Context(settings, known, self.max_in_flight, self.program)

    def passed_on(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that the server is told, or is known to have."""
        context = self.context(settings)
        names = self.template.names if self.template else self.preset.told
        return {k: v for k, v in context.settings.items() if k in names and v is not None}

    def described(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that a configuration is named by: all, but of a template only those it passes on.

        For the others the server's own values hold, which nobody knows. What the model's folder carries stays, as do
        the limits of the prompts, and what a known kind of server has whatever its command says.
        """
        if self.template is None:
            return dict(settings)
        known = {name for name, value in settings.items() if self.preset.has_only(name, value)}
        kept = self.template.names | known | OF_THE_MODEL.keys() | _OF_THE_FOLDER
        return {name: value for name, value in settings.items() if name in kept}

    def require(self, design: Design) -> None:
        """Raises UsageError when configurations differ in a setting that a template does not pass on."""
        if self.template is not None:
            self.template.require(dict.fromkeys(name for c in design.configurations for name in c.varied))

    def refusal(self, settings: Mapping[str, Any]) -> str | None:
        """Why this configuration cannot be launched; None when it can."""
        return "; ".join(self.preset.refusals(self._asked(settings))) or None

    def nearest(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The settings that come closest to a refused configuration, and what was changed."""
        asked = self._asked(settings)
        found, changes = self.preset.nearest(asked)
        if self.template and (left_out := [f"{{{name}}}" for name in asked.settings if name not in found]):
            raise UsageError(
                f"--serve-cmd has {', '.join(left_out)}, and: {'; '.join(self.preset.refusals(asked))}. Take it out"
            )
        kept = {name: value for name, value in settings.items() if name in found or name not in asked.settings}
        return {name: found.get(name, value) for name, value in kept.items()}, changes

    def _asked(self, settings: Mapping[str, Any]) -> Context:
        """What the preset is asked about: of a template, what the command passes on and the preset knows."""
        context = self.context(settings)
        if self.template is None:
            return context
        names = self.template.names & self.preset.settings.keys()
        return context.only(names)

    def check(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What is known of a configuration before its launch. Raises ValueError with the reasons against it.

        A KV budget only where the server is given it: else its own default holds, whatever our arithmetic says.
        """
        if reason := self.refusal(settings):
            raise ValueError(reason)
        names = list(_OF_THE_MODEL)
        if self.gives_budget(settings):
            names += _OF_THE_BUDGET if self.template else (*_OF_THE_BUDGET, "capacity_tokens")
        known = self.arithmetic(settings)
        return {key: known[key] for key in names if known.get(key)}

    def gives_budget(self, settings: Mapping[str, Any]) -> bool:
        """Whether the command says how much KV there may be."""
        return "kv_budget" in self.template.names if self.template else settings.get("kv_budget") is not None

    def command(self, settings: Mapping[str, Any], *, model: str, port: int | str, scratch: str) -> tuple[str, ...]:
        """The launch command; ``port``: or a name for it. Raises UsageError for a placeholder without a value."""
        context = self.context(settings)
        if self.template is not None:
            budget = context.capacity.get("kv_budget_bytes")
            words = self.template.command(context.settings, model=model, port=port, kv_budget_bytes=budget)
        else:
            words = self.preset.launch_command(context, model=model, port=port, scratch=scratch)
        return (*words, *self.extra)

    def cache_is_off(self, settings: Mapping[str, Any]) -> bool:
        """Whether the server was told to keep no prefixes: then there is nothing to empty."""
        told = "enable_prefix_caching" in (self.template.names if self.template else self.preset.settings)
        return told and settings.get("enable_prefix_caching") is False

    def needs_fresh_server(self, settings: Mapping[str, Any]) -> bool:
        """Whether only a new server has an empty prefix cache."""
        return self.preset.reset is None and not self.cache_is_off(settings)


class LaunchedTarget(OwnServer):
    """One server of a ``Launcher``."""

    poll_s = 0.2

    def __init__(
        self, launcher: Launcher, folders: ModelFolders, *, port: int = 0, start_timeout_s: float = 180.0
    ) -> None:
        super().__init__(port=port, start_timeout_s=start_timeout_s)
        self.launcher, self.folders = launcher, folders
        self.preset, self.grace_s = launcher.preset, launcher.preset.grace_s
        self.command: tuple[str, ...] = ()
        self._settings: Mapping[str, Any] = {}
        self._facts: Mapping[str, Any] = {}
        self._environment: Mapping[str, str | None] = {}

    def start(self, settings: Mapping[str, Any], log: Path) -> None:
        """Launch and wait until it serves. Raises UsageError or MeasurementError."""
        served = self._served(settings)
        self._facts = served.facts
        if self.port:
            require_free_port("127.0.0.1", self.port)
        port = self.port or _free_port()
        self._settings = settings
        self.command = self.launcher.command(
            settings, model=str(served.path), port=port, scratch=str(self.folders.scratch)
        )
        self._environment = self.preset.launch_environment(self.launcher.context(settings))
        with self._launched(self.command, log, env=self._environment, scratch=self.folders.scratch):
            self._connect(f"http://127.0.0.1:{port}", preset=self.preset, texts=_texts(served))
            self._wait_ready(self._serves)
            self._learn_model(served, settings)
            self._check_device(settings)

    @property
    def _is_told_model(self) -> bool:
        return self.launcher.template is None or "model" in self.launcher.template.names

    def _serves(self) -> bool:
        path = self.preset.models_path
        return self.healthy() and (path is None or bool(self.json_at(path)))

    def _served(self, settings: Mapping[str, Any]) -> ServedModel:
        """The model's folder; for a command that does not ask for one, what is known of the workload's model."""
        if not self._is_told_model:
            known = self.launcher.arithmetic(settings)
            name = Path(str(settings.get("model", "")))
            return ServedModel(name, None, known.get("vocab_size"), known.get("max_model_len"))
        return self.folders.get(
            settings, drop_eos=not self.preset.dialect.ignore_eos, model_format=self.preset.model_format
        )

    def _learn_model(self, served: ServedModel, settings: Mapping[str, Any]) -> None:
        """Sizes from the model's config, the name from the server; what only the server knows from there."""
        row = self.models()[0] if self.preset.models_path else {"id": str(served.path)}
        meta = row.get("meta") or {}  # llama.cpp
        lengths = (
            settings.get("max_model_len"),
            row.get("max_model_len"),
            served.max_positions,
            meta.get("n_ctx_train"),
        )
        length = min((int(n) for n in lengths if n), default=None)
        vocab = served.vocab_size or meta.get("n_vocab")
        if length is None or not vocab:
            raise MeasurementError(f"neither the model's config nor {self.preset.title} tells vocabulary and length")
        self.model = ModelFacts(str(row["id"]), int(vocab), length)

    def _check_device(self, settings: Mapping[str, Any]) -> None:
        """A build for GPUs that was to run on the CPU, or the reverse, would measure something else."""
        asked, pattern = settings.get("device"), self.preset.device_pattern
        if pattern is None or asked not in ("cpu", "cuda"):
            return
        told = re.search(pattern, str(super().server_info() or ""))
        if told and told[1] != asked:
            raise MeasurementError(
                f"{self.preset.title} runs on {told[1]}, and the workload asks for {asked}: take a build for it "
                "(--target-python), or set -o engine.device=auto"
            )

    def server_info(self) -> dict[str, Any]:
        """What kvbench told the server and what the server says of itself, in the shape of our own /server_info."""
        settings = self.launcher.passed_on(self._settings)
        sample = self._quiet_metrics()
        facts = dict(sample.facts) if sample else {}
        version = version_of(self, self.launcher.program)
        device = settings.get("device")
        return {
            "engine": {**settings, **({"page_size": int(facts["page_size"])} if "page_size" in facts else {})},
            "model": {"name": self._model_name_shown(), "vocab_size": self.model.vocab_size, **self._facts},
            "resolved": {
                "device": device if device != "auto" else None,
                "dtype": settings.get("dtype"),
                "num_threads": _number(self._environment.get("OMP_NUM_THREADS")),
            },
            "capacity": {k: int(v) for k, v in facts.items() if k in ("num_pages", "capacity_tokens", "page_size")},
            "versions": {self.preset.name: version} if version else {},
            "server": {
                "kind": self.preset.name,
                "title": self.preset.title,
                "command": self._shown_command(),
                "environment": {k: _shown(v) for k, v in self._environment.items() if v is not None},
                "quirks": list(self.preset.quirks),
            },
        }

    def _model_name_shown(self) -> str:
        """The workload's name of the model: the folder it was written to says nothing. Not told a model: its own."""
        if not self._is_told_model:
            return self.model.name
        return Path(str(self._settings.get("model", self.model.name))).name.removesuffix(".json") or self.model.name

    def _shown_command(self) -> list[str]:
        """The command as anybody could repeat it: with names for this run's model folder, scratch folder and port."""
        words = self.launcher.command(self._settings, model="MODEL", port="PORT", scratch="SCRATCH")
        return [_shown(word) for word in words]

    def _quiet_metrics(self) -> MetricsSample | None:
        try:
            return self.metrics()
        except MeasurementError:
            return None

    def reset_prefix_cache(self) -> bool | None:
        """As ``Target``; a cache that the server was told not to have is empty."""
        return True if self.launcher.cache_is_off(self._settings) else super().reset_prefix_cache()


def _texts(served: ServedModel) -> Texts | None:
    if served.tokenizer is None:
        return WordTexts()
    return TokenizerTexts(served.tokenizer) if (served.tokenizer / "tokenizer.json").is_file() else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _shown(word: str) -> str:
    """A word for a record that may be shown around: absolute paths in it by their names, URLs as they are."""
    return _ABSOLUTE_PATH.sub(r"\1", word)
