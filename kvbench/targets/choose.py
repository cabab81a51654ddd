"""The target that a command line names: the built-in server, a URL, a preset, or a command of the user's."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvbench.common.errors import UsageError
from kvbench.common.foreign_cpu import server_at
from kvbench.common.option_rules import check_exclusive, check_goes_with, check_tls
from kvbench.common.ports import free_port
from kvbench.common.text import parse_bytes
from kvbench.runs.results import Capacity, Manifest, MeasuredTarget, RunningServer
from kvbench.targets.base import Access, SteppedLaunch, Target
from kvbench.targets.builtin import BUILTIN_COMMAND, BuiltinTarget, check_configuration, stepped_builtin
from kvbench.targets.launch_plan import CommandTemplate, Launcher, is_template, program_of, split_command
from kvbench.targets.launched import LaunchedTarget
from kvbench.targets.model_export import ModelFolders, text_tokenizer
from kvbench.targets.options import RunningServerOptions, TargetOptions
from kvbench.targets.preset import LOOP, Preset
from kvbench.targets.presets import BUILT_IN, GENERIC, PRESETS
from kvbench.targets.running import OpenAITarget
from kvbench.workload.design import Block, Design, plan_sweep
from kvbench.workload.file import Workload
from kvbench.workload.prompts_section import SyntheticPrompts
from kvbench.workload.request_form import RequestForm
from kvbench.workload.settings import Settings

BUILTIN = "the built-in server, or a command in its place"
RUNNING = "a server that runs already (--target URL)"
PRESET = "a preset that is launched (--target vllm)"
TEMPLATE = "a --serve-cmd that has {placeholders}"
KINDS_OF: Mapping[str, tuple[str, ...]] = {  # option -> the kinds of target that it means something for
    "preset": (RUNNING, TEMPLATE),
    "exact": (PRESET, TEMPLATE),
    "target_python": (PRESET,),
    "target_args": (PRESET, TEMPLATE),
    **dict.fromkeys(("model", "vocab_size", "max_model_len", "tokenizer"), (RUNNING,)),
    **dict.fromkeys(("api_key_env", "tls_ca_file", "no_tls_verify"), (RUNNING,)),
    **dict.fromkeys(("vary", "port", "start_timeout"), (BUILTIN, PRESET, TEMPLATE)),
}
_INSTEAD = {
    "vary": "start the server with other settings between two sweeps",
    "model": "change the workload's with -o model.config=VALUE",
    "max_model_len": "change the workload's with -o engine.max_model_len=VALUE",
    "tokenizer": "change the workload's with -o model.tokenizer=VALUE",
}
_EXCLUDES = {("target", "serve_cmd"): "measure a running server or launch one (--preset NAME says of what kind)"}
NOT_THE_BASELINE = "THE BASELINE IS NOT THE WORKLOAD'S"
STORED = ("target", "serve_cmd", "preset", "target_args", "target_python", "exact")
_START_S = 180.0
START_GUESS_S = 8.0  # a launch of the built-in server, until one is measured
_FOREIGN_START_S = 900.0  # vLLM compiles a model at its first start: minutes on a small machine


def measured_target(options: TargetOptions, backend: str, *, shared: bool, **more: Any) -> MeasuredTarget:
    """Makes the entries of a run's manifest."""
    stored = {name: getattr(options, name) or None for name in STORED}
    return MeasuredTarget(**stored, backend=backend, shared_machine=shared, **more)


@dataclass(frozen=True)
class ChosenTarget:
    """The target of a sweep, and what a sweep needs to know of it.

    ``workload``: as it runs on this target.
    ``check``: what is known of a configuration before its launch; ValueError for an impossible one.
    ``manifest``: entries for the run's manifest.
    ``refuses``: why the target cannot have a configuration; None if it can have all, or ``check`` refuses them.
    ``fresh``: whether a configuration needs a new server before every load with an empty cache.
    ``notes``: for the user.
    ``runs_already``: not launched by us, so it must answer before a run folder is made.
    ``require``: raises UsageError for a design whose configurations would be the same server.
    ``start_guess_s``: how long a launch takes, until one is measured.
    ``stepped``: the launch of a process whose engine computes steps on command; None: it has no adapter.
    """

    workload: Workload
    new_target: Callable[[], Target]
    check: Callable[[Settings], Capacity]
    manifest: MeasuredTarget
    refuses: Callable[[Settings], str | None] | None = None
    fresh: Callable[[Settings], bool] = lambda settings: False
    notes: tuple[str, ...] = ()
    runs_already: bool = False
    close: Callable[[], None] = lambda: None
    require: Callable[[Design], None] = lambda design: None
    start_guess_s: float = START_GUESS_S
    stepped: Callable[[Settings], SteppedLaunch] | None = None

    def plan(self, only: Sequence[str] = ()) -> tuple[Design, tuple[Block, ...]]:
        """Cells and blocks in the order in which they run; the design's notes begin with the target's. UsageError."""
        design, blocks = plan_sweep(self.workload, only, self.check, refuses=self.refuses, fresh=self.fresh)
        self.require(design)
        return replace(design, notes=(*self.notes, *design.notes)), blocks


def choose(workload: Workload, options: TargetOptions, stored: Manifest | None = None) -> ChosenTarget:
    """Chooses the target of a sweep that ``options`` name. Raises UsageError.

    ``stored``: the manifest of a run that goes on; it says what the options leave out.
    """
    if stored is not None:
        before = stored.target_options.fields() | {name: getattr(stored, name) for name in (*STORED, "only")}
        options = replace(options, **{name: value for name, value in before.items() if not getattr(options, name)})
    return choose_target(workload, options, forked=True)


def choose_target(
    workload: Workload,
    asked: TargetOptions,
    *,
    forked: bool = False,
    env: Mapping[str, str | None] | None = None,
) -> ChosenTarget:
    """Chooses the target that the options name. Raises UsageError. ``forked``: as BuiltinTarget takes it.

    env: more variables of a launch of another engine
    """
    kind = kind_of(asked.target, asked.serve_cmd)
    preset = PRESETS[asked.target or ""] if kind == PRESET else preset_named(asked.preset)
    check_target_options([kind], asked.stated)
    load, server = workload.load, BUILT_IN if kind == BUILTIN else preset
    for cls in load.prompts.classes if isinstance(load.prompts, SyntheticPrompts) else ():
        if why := server.refuses_answers(cls.name, cls.answers, load.endpoint):
            raise UsageError(why)
    if kind == RUNNING:
        return _running(workload, asked, preset)
    if asked.port:
        free_port(asked.port)
    if kind == BUILTIN:
        return _builtin(workload, asked, forked)
    template = CommandTemplate.parse(asked.serve_cmd or "") if kind == TEMPLATE else None
    return _launched(workload, asked, preset, template, env)


def kind_of(target: str | None, serve_cmd: str | None) -> str:
    """Tells ``BUILTIN``, ``RUNNING``, ``PRESET`` or ``TEMPLATE`` by these two options."""
    if target:
        return PRESET if target in PRESETS else RUNNING
    return TEMPLATE if serve_cmd and is_template(serve_cmd) else BUILTIN


def check_target_options(kinds: Sequence[str], given: Sequence[str]) -> None:
    """Raises UsageError for an option that means nothing for any of these kinds of target, or contradicts another."""
    check_exclusive(given, _EXCLUDES)
    check_goes_with(given, KINDS_OF, kinds, _INSTEAD)


def require_url(flag: str, url: str) -> None:
    """Raises UsageError when ``url`` names no server."""
    try:
        parts = urlsplit(url)
        has_user = parts.username is not None or parts.password is not None
        good = has_user or (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0)
    except ValueError:  # a bracket that stays open, a port beyond 65535
        has_user = good = False
    if has_user:  # the message leaves it out: it may be secret
        raise UsageError(f"{flag} holds a user name or password: leave it out; a key goes with --api-key-env NAME")
    if not good:
        or_preset = f", or the name of a preset: {', '.join(PRESETS)}" if flag == "--target" else ""
        raise UsageError(
            f"{flag} {url!r} is not a URL of a server: write for example http://127.0.0.1:8000 (http or https, a host, "
            f"a port from 1 to 65535){or_preset}"
        )


def preset_named(name: str | None) -> Preset:
    """The preset of that name; None: any server with OpenAI's API. Raises UsageError."""
    if name is None:
        return GENERIC
    if name not in PRESETS:
        raise UsageError(f"--preset {name!r} is not known: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def engine_with_adapter(name: str, python: str | None) -> None:
    """Raises UsageError unless ``name`` is an engine that can be stepped, and ``python`` a program that runs it."""
    if name not in PRESETS or PRESETS[name].adapter is None:
        able = ", ".join(preset.name for preset in PRESETS.values() if preset.adapter)
        raise UsageError(f"--target {name} has no engine time: {able} have an adapter (docs/engines.md)")
    program_of(PRESETS[name], python)


def _builtin(workload: Workload, options: TargetOptions, forked: bool) -> ChosenTarget:
    command = split_command(options.serve_cmd) if options.serve_cmd else BUILTIN_COMMAND
    if not options.serve_cmd:
        BUILT_IN.require_endpoint(workload.load.endpoint)

    def make() -> Target:
        limit = options.start_timeout or _START_S
        port, form = options.port or 0, workload.load.form
        return BuiltinTarget(command=command, port=port, start_timeout_s=limit, form=form, forked=forked)

    manifest = measured_target(options, "custom" if options.serve_cmd else "kvbench", shared=True)
    stepped = None if options.serve_cmd else stepped_builtin
    return ChosenTarget(workload, make, check_configuration, manifest, stepped=stepped)


def _running(workload: Workload, options: TargetOptions, preset: Preset) -> ChosenTarget:
    """A running server cannot be given settings: one configuration, without the workload's engine section."""
    url = options.target or ""
    new_target = running_server("--target", url, options, preset, workload.load.form)
    only_here = {name: getattr(options, name) for name in options.stated if KINDS_OF.get(name) == (RUNNING,)}
    kept = {name: str(value) if isinstance(value, Path) else value for name, value in only_here.items()}
    more = {"target_options": RunningServer(**kept)} if kept else {}
    manifest = measured_target(options, preset.name, shared=server_at(url).local, **more)
    alone = replace(workload, engine={"target": url}, sweep={})
    return ChosenTarget(alone, new_target, lambda settings: Capacity(), manifest, runs_already=True)


def running_server(
    flag: str, url: str, asked: RunningServerOptions, preset: Preset, form: RequestForm
) -> Callable[[], OpenAITarget]:
    """Makes the target of a server that runs already; ``flag``: of the URL. Raises UsageError."""
    require_url(flag, url)
    preset.require_endpoint(form.endpoint)
    check_tls(asked.stated, flag, url)
    ca_file = str(asked.tls_ca_file) if asked.tls_ca_file else None
    access = Access(asked.api_key_env, not asked.no_tls_verify, ca_file)
    access.headers()  # a key that is missing, or a file that holds no certificates, is said now
    access.trust(url)
    sizes = {"model": asked.model, "vocab_size": asked.vocab_size, "max_model_len": asked.max_model_len}
    tokenizer = Path(asked.tokenizer) if asked.tokenizer else None
    return lambda: OpenAITarget(url, **sizes, preset=preset, access=access, tokenizer=tokenizer, form=form)


def _launched(
    workload: Workload,
    options: TargetOptions,
    preset: Preset,
    template: CommandTemplate | None,
    env: Mapping[str, str | None] | None,
) -> ChosenTarget:
    load, notes = workload.load, []
    preset.require_endpoint(load.endpoint)
    if template is not None:
        if not options.only:  # else ``ChosenTarget.require`` looks at the cells that are left
            template.require(workload.sweep)
        if lost := template.not_passed_on(workload.engine):
            notes.append(f"--serve-cmd does not pass on {', '.join(lost)}: there the server's own values hold")
    elif "kv_budget" not in workload.engine:
        notes.append(f"the workload has no kv_budget: how much KV there is, is left to {preset.title}")
    launcher = Launcher(
        preset,
        program="" if template is not None else program_of(preset, options.target_python),
        arithmetic=arithmetic,
        extra=tuple(shlex.split(options.target_args or "")),
        template=template,
        max_in_flight=max(load.concurrency or (), default=load.max_concurrency),
    )
    workload, changes = _baseline(workload, launcher, exact=bool(options.exact))
    if (lost := launcher.lost_capacity(workload.engine)) is not None:
        if options.exact:
            raise UsageError(lost)
        changes.append(lost)
    workload = replace(workload, engine=launcher.described(workload.engine))
    folders = ModelFolders(ignore_eos=load.ignore_eos, text_tokenizer=text_tokenizer(load.prompts))
    if launcher.passes_model:
        folders.source(workload.engine, preset.model_format)  # says now what is wrong with it

    def make() -> Target:
        limit = options.start_timeout or _FOREIGN_START_S
        return LaunchedTarget(launcher, folders, port=options.port or 0, start_timeout_s=limit, form=load.form, env=env)

    def stepped(settings: Settings) -> SteppedLaunch:
        no_eos = not preset.dialect.ignore_eos  # the server's own folder
        model = folders.get(settings, drop_eos=no_eos, model_format=preset.model_format)
        words = launcher.command(settings, model=str(model.path), port=0, scratch=str(folders.scratch))
        program, _, _, *arguments = words  # PYTHON -m MODULE of the server
        command = (program, str(LOOP), str(preset.adapter), *arguments)
        environment = preset.launch_environment(launcher.context(settings)) | dict(env or {})
        limit_s = options.start_timeout or _FOREIGN_START_S
        return SteppedLaunch(command, environment, folders.scratch, limit_s, shared=False)

    return ChosenTarget(
        workload,
        make,
        launcher.check,
        measured_target(options, "custom" if preset is GENERIC else preset.name, shared=True),
        refuses=launcher.refusal,
        fresh=launcher.needs_fresh_server,
        notes=(*notes, *changes),
        close=folders.close,
        require=launcher.require,
        start_guess_s=preset.start_guess_s,
        stepped=stepped if preset.adapter and template is None else None,
    )


def _baseline(workload: Workload, launcher: Launcher, *, exact: bool) -> tuple[Workload, list[str]]:
    """The workload with a baseline that the target can have, and a note of what was changed.

    UsageError when there is none, or when ``exact`` forbids a change.
    """
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
    note = f"{NOT_THE_BASELINE}: {', '.join(changes)} ({reason})"
    return replace(workload, engine=settings), [note]


def arithmetic(settings: Settings) -> Capacity:
    """The KV that the built-in engine would have with the settings; less is known where it would refuse them."""
    from kvbench_engine.config import EngineConfig
    from kvbench_engine.model.spec import find_model

    names = {f.name for f in fields(EngineConfig)}
    ours = {name: value for name, value in settings.items() if name in names and value is not None}
    try:
        return check_configuration(ours)
    except ValueError:
        budget = Capacity(kv_budget_bytes=parse_bytes(ours["kv_budget"])) if "kv_budget" in ours else Capacity()
    try:
        spec = find_model(str(ours.get("model")), str(ours.get("load_format", "auto")))
    except ValueError:
        return budget
    sizes = {"vocab_size": spec.text_config.get("vocab_size"), "max_model_len": spec.max_positions}
    return budget.model_copy(update=sizes)
