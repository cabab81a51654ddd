"""From the command line to a target: the built-in server, a URL, a preset by its name, or a command of the user's."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvbench.common.errors import UsageError
from kvbench.common.foreign_cpu import server_at
from kvbench.targets.access import Access
from kvbench.targets.applies import BUILTIN, PRESET, RUNNING, TEMPLATE, check_options, check_tls
from kvbench.targets.base import START_GUESS_S, Target
from kvbench.targets.builtin import BUILTIN_COMMAND, BuiltinTarget, check_configuration
from kvbench.targets.launch_plan import CommandTemplate, is_template
from kvbench.targets.launched import LaunchedTarget, Launcher
from kvbench.targets.model_export import ModelFolders, text_tokenizer
from kvbench.targets.owned import require_free_port
from kvbench.targets.presets import GENERIC, PRESETS
from kvbench.targets.presets.preset import Preset
from kvbench.targets.program import program_of
from kvbench.targets.running import OpenAITarget
from kvbench.workload.design import Design
from kvbench.workload.file import Workload

STORED = ("target", "serve_cmd", "preset", "target_args", "target_python", "exact")
_OF_A_RUNNING_ONE = ("model", "vocab_size", "max_model_len", "tokenizer", "api_key_env", "tls_ca_file", "no_tls_verify")
_START_S = 180.0
_FOREIGN_START_S = 900.0  # vLLM compiles a model at its first start: minutes on a small machine
_Check = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Choice:
    """What a sweep needs to know of its target.

    ``workload``: as it runs there. ``refuses``: why a configuration cannot be had, None for a target that has all of
    them or is asked by ``check``. ``require``: raises UsageError for a design whose configurations the target cannot
    tell apart. ``fresh``: whether a configuration needs a new server before every load that is to find an empty cache.
    ``start_guess_s``: for a launch, until one is measured. ``notes``: for the user. ``manifest``: what the run's
    manifest says.
    """

    workload: Workload
    new_target: Callable[[], Target]
    check: _Check
    manifest: Mapping[str, Any]
    refuses: Callable[[Mapping[str, Any]], str | None] | None = None
    fresh: Callable[[Mapping[str, Any]], bool] = lambda settings: False
    notes: tuple[str, ...] = ()
    probes: bool = False  # a running server: asked before a folder is made
    close: Callable[[], None] = lambda: None
    require: Callable[[Design], None] = lambda design: None
    start_guess_s: float = START_GUESS_S


def choose(workload: Workload, options: Mapping[str, Any], stored: Mapping[str, Any]) -> Choice:
    """``options``: the command line's; ``stored``: the manifest of a run to go on with. Raises UsageError."""
    asked = {key: options.get(key) or stored.get(key) for key in (*STORED, "only")}
    before = stored.get("target_options") or {}
    options = {**options, **{key: value for key, value in before.items() if not options.get(key)}}
    target, serve_cmd = asked["target"], asked["serve_cmd"]
    if target and serve_cmd:
        raise UsageError(
            "--target and --serve-cmd exclude each other: measure a running server or launch one (--preset NAME says "
            "what kind of server your command launches)"
        )
    kind = preset_named(asked["preset"])
    given = {**options, **asked}
    if target in PRESETS:
        check_options(PRESET, given)
        return _launched(workload, options, asked, PRESETS[target], None)
    if serve_cmd and is_template(serve_cmd):
        check_options(TEMPLATE, given)
        from engine.config import EngineConfig

        template = CommandTemplate.parse(serve_cmd, [f.name for f in dataclasses.fields(EngineConfig)])
        return _launched(workload, options, asked, kind, template)
    check_options(RUNNING if target else BUILTIN, given)
    if target:
        return _running(workload, options, asked, kind)
    return _builtin(workload, options, asked)


def require_url(flag: str, url: str) -> None:
    """Raises UsageError when ``url`` names no server that could be asked."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # a bracket that stays open
        good = False
    if not good:
        known = f", or the name of a preset: {', '.join(PRESETS)}" if flag == "--target" else ""
        raise UsageError(f"{flag} {url!r} is not a URL of a server: write for example http://127.0.0.1:8000{known}")
    if parts.username is not None or parts.password is not None:  # it is not said: it may be secret
        raise UsageError(f"{flag} holds a user name or a password: leave it out; a key goes with --api-key-env NAME")
    try:
        good = parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"{flag} {url!r} is not a URL of a server: its port is not a number from 1 to 65535")


def preset_named(name: str | None) -> Preset:
    """What --preset says; None: any server with OpenAI's API. Raises UsageError."""
    if name is None:
        return GENERIC
    if name not in PRESETS:
        raise UsageError(f"--preset {name!r} is not known: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _builtin(workload: Workload, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Choice:
    serve_cmd = asked["serve_cmd"]
    command = _plain_command(serve_cmd) if serve_cmd else BUILTIN_COMMAND
    if options["port"]:
        require_free_port("127.0.0.1", options["port"])

    def make() -> Target:
        limit = options["start_timeout"] or _START_S
        return BuiltinTarget(command=command, port=options["port"], start_timeout_s=limit)

    manifest = _manifest(asked, backend="custom" if serve_cmd else "kvbench", shared=True)
    return Choice(workload, make, check_configuration, manifest)


def _running(workload: Workload, options: Mapping[str, Any], asked: Mapping[str, Any], kind: Preset) -> Choice:
    """A running server cannot be given settings: one configuration, without the workload's engine section."""
    url = asked["target"]
    given = {key: options[key] for key in _OF_A_RUNNING_ONE if options.get(key)}
    kept = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    new_target = running_server("--target", url, options, kind)
    manifest = _manifest(asked, backend=kind.name, shared=server_at(url).local)
    return Choice(
        dataclasses.replace(workload, engine={"target": url}, sweep={}),
        new_target,
        lambda settings: {},
        manifest | ({"target_options": kept} if kept else {}),
        probes=True,
    )


def running_server(flag: str, url: str, options: Mapping[str, Any], kind: Preset) -> Callable[[], OpenAITarget]:
    """Makes the target of a server that runs already; ``flag``: of the URL. Raises UsageError."""
    require_url(flag, url)
    check_tls(flag, url, options)
    access = Access(options.get("api_key_env"), not options.get("no_tls_verify"), _text(options.get("tls_ca_file")))
    access.headers()  # a key that is missing, or a file that holds no certificates, is said now
    access.trust(url)
    told = {key: options[key] for key in ("model", "vocab_size", "max_model_len")}
    tokenizer = Path(options["tokenizer"]) if options.get("tokenizer") else None
    return lambda: OpenAITarget(url, **told, preset=kind, access=access, tokenizer=tokenizer)


def _launched(
    workload: Workload,
    options: Mapping[str, Any],
    asked: Mapping[str, Any],
    preset: Preset,
    template: CommandTemplate | None,
) -> Choice:
    if options["port"]:
        require_free_port("127.0.0.1", options["port"])
    load, notes = workload.load, []
    if template is not None:
        if not asked["only"]:  # else the cells that are left are asked, by ``Choice.require``
            template.require(workload.sweep)
        if lost := template.not_passed_on(workload.engine):
            notes.append(f"--serve-cmd does not pass on {', '.join(lost)}: there the server's own values hold")
    elif workload.engine.get("kv_budget") is None:
        notes.append(f"the workload has no kv_budget: how much KV there is, is left to {preset.title}")
    users = max(load.concurrency or (), default=None) if load.mode == "closed" else load.max_concurrency
    launcher = Launcher(
        preset,
        program="" if template is not None else program_of(preset, asked["target_python"]),
        arithmetic=_arithmetic,
        extra=tuple(shlex.split(asked["target_args"] or "")),
        template=template,
        max_in_flight=users,
    )
    workload, changes = _baseline(workload, launcher, exact=bool(asked["exact"]))
    workload = dataclasses.replace(workload, engine=launcher.described(workload.engine))
    folders = ModelFolders(ignore_eos=load.ignore_eos, text_tokenizer=text_tokenizer(load.prompts))

    def make() -> Target:
        limit = options["start_timeout"] or _FOREIGN_START_S
        return LaunchedTarget(launcher, folders, port=options["port"], start_timeout_s=limit)

    return Choice(
        workload,
        make,
        launcher.check,
        _manifest(asked, backend="custom" if preset is GENERIC else preset.name, shared=True),
        refuses=launcher.refusal,
        fresh=launcher.needs_fresh_server,
        notes=(*notes, *changes),
        close=folders.close,
        require=launcher.require,
        start_guess_s=preset.start_guess_s,
    )


def _baseline(workload: Workload, launcher: Launcher, *, exact: bool) -> tuple[Workload, list[str]]:
    """The workload with a baseline that the target can have, and a note of what was changed. UsageError when there is
    none, or it would have to be another and ``exact`` forbids that."""
    reason = launcher.refusal(workload.engine)
    if reason is None:
        return workload, []
    way = "Change the workload with -o engine.NAME=VALUE (null takes a setting away)"
    if exact:
        raise UsageError(
            f"the baseline cannot be run: {reason}. {way}, or leave --exact out to take what comes closest"
        )
    settings, changes = launcher.nearest(workload.engine)
    if left := launcher.refusal(settings):
        raise UsageError(f"the baseline cannot be run, nor anything near it: {left}. {way}")
    words = f"THE BASELINE IS NOT THE WORKLOAD'S: {', '.join(changes)} ({reason}); --exact refuses instead"
    return dataclasses.replace(workload, engine=settings), [words]


_known: dict[str, Mapping[str, Any]] = {}


def _arithmetic(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the built-in engine would make of the settings; less, or nothing, where it would not take them."""
    from engine.config import EngineConfig, parse_bytes
    from engine.model.spec import find_model

    names = {f.name for f in dataclasses.fields(EngineConfig)}
    ours = {k: v for k, v in settings.items() if k in names and v is not None}
    key = json.dumps(ours, sort_keys=True, default=str)
    if key not in _known:
        try:
            _known[key] = check_configuration(ours)
        except ValueError:
            budget = {"kv_budget_bytes": parse_bytes(ours["kv_budget"])} if "kv_budget" in ours else {}
            try:
                spec = find_model(str(ours.get("model")), str(ours.get("load_format", "auto")))
                known = {"vocab_size": spec.text_config.get("vocab_size"), "max_model_len": spec.max_positions}
            except ValueError:
                known = {}
            _known[key] = known | budget
    return _known[key]


def _plain_command(text: str) -> tuple[str, ...]:
    """The words of a --serve-cmd without placeholders. Raises UsageError when they cannot be launched."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--serve-cmd {text!r} is not a command line ({error}): mend the quotes") from None
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"--serve-cmd {text!r}: there is no program {(words or ('',))[0]!r}; give its path")
    return words


def _manifest(asked: Mapping[str, Any], *, backend: str, shared: bool) -> dict[str, Any]:
    kept = {key: asked[key] or None for key in STORED}
    return {**kept, "backend": backend, "shared_machine": shared}


def _text(path: Any) -> str | None:
    return None if path is None else str(path)
