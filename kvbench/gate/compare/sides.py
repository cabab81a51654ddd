"""BASE and CANDIDATE of ``kvbench compare``: what each names, and what is launched for it.

    main, v1.2, 3fe141a, HEAD, .        a git ref: built in a folder and an environment of its own (. = as it is now)
    'vllm serve {model} --port {port}'  a command that launches a server; without {port}: with the built-in one's flags
    http://127.0.0.1:8000               a server that runs already
    page_size=16,kv_cache_dtype=auto    engine settings that replace the workload's
    results/mixed/20260101T120000Z-1a2  the folder of a stored run

What could be two of these is refused; ``ref:``, ``cmd:``, ``url:``, ``set:`` and ``run:`` in front say which is meant.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import as_stored
from kvbench.common.git import git, git_state
from kvbench.common.machine import versions
from kvbench.common.packages import REPOSITORY, require_engine
from kvbench.common.records import read_record
from kvbench.common.text import listing, nearest
from kvbench.gate.compare.builds import WORKING_TREE, Build, Builds, fill, find_commit, find_sha, is_kvbench, top_folder
from kvbench.gate.compare.clock import LAUNCH, Clock
from kvbench.gate.compare.folder import SideFacts
from kvbench.gate.compare.request import CompareRequest
from kvbench.gate.sentences import say
from kvbench.gate.timing.plan import BASE, CANDIDATE, SIDES, Match, match_designs
from kvbench.gate.verdict.wording import shortened
from kvbench.runs.folder import MANIFEST, RunFolder
from kvbench.runs.manifest import stored_workload
from kvbench.runs.results import Capacity, CellSummary, MeasuredTarget
from kvbench.sweep.plan import preflight
from kvbench.targets.base import SteppedLaunch, Target
from kvbench.targets.builtin import (
    BUILTIN_COMMAND,
    BuiltinTarget,
    ServerRefusedError,
    check_configuration,
)
from kvbench.targets.choose import (
    BUILTIN,
    KINDS_OF,
    PRESET,
    RUNNING,
    STORED,
    TEMPLATE,
    ChosenTarget,
    check_target_options,
    choose_target,
    kind_of,
    measured_target,
)
from kvbench.targets.launch_plan import is_template
from kvbench.targets.options import TargetOptions
from kvbench.targets.presets import PRESETS
from kvbench.workload.design import Cell, Configuration, Design, make_design, select
from kvbench.workload.file import Workload, apply_override, differing_keys, resolve
from kvbench.workload.settings import ENGINE_POLICY, Settings

REF, CMD, URL, SET, RUN = "ref", "cmd", "url", "set", "run"
# option -> the kinds of side that it means something for
_KINDS_OF = {"target": (SET, REF), "serve_cmd": (REF, SET), "repo": (REF,), "build_cmd": (REF,), "rebuild": (REF,)}
_KINDS = (REF, CMD, URL, SET, RUN)
_SETTING = r"(?:engine\.)?[A-Za-z_]\w*\s*="
_NEXT_SETTING = re.compile(rf",\s*(?={_SETTING})")  # a comma inside a value is part of it
_NAMES = {"block_size": "page_size"}  # of other engines' settings: ours
_LONGEST_NAME = 60
_START_S = 180.0
_SERVER = ("-m", "engine.server")  # the names in a checkout, of any commit: kernels/checkout_names.py
_LOCKSTEP = ("-m", "engine.lockstep")
_FACTS_OF_A_RUN = ("git", "versions", "command", "started", "ended", "target", "simulated")
_FREE = ("engine", "sweep", "description")  # of the workload: what two stored runs may differ in


@dataclass(frozen=True)
class PairSide:
    """BASE or CANDIDATE as it was given: ``kind``, ``text`` without its prefix, ``given`` with it."""

    kind: str
    text: str
    given: str

    @property
    def name(self) -> str:
        """A short name for a table."""
        if self.kind == REF and self.text == WORKING_TREE:
            return "working tree"
        if self.kind == RUN:
            return "/".join(Path(self.text).parts[-2:])
        if not self.text:
            return say("side.workload")
        return shortened(self.text, _LONGEST_NAME)  # with both ends: two commands may differ in their last word

    @property
    def settings(self) -> Settings:
        return parse_settings(self.text) if self.kind == SET else {}

    def facts(self, **more: Any) -> SideFacts:
        return SideFacts(kind=self.kind, text=self.text, name=self.name, settings=self.settings, **more)


def parse_side(text: str, repo: Path = REPOSITORY) -> PairSide:
    """The side that ``text`` names; refs are looked for in ``repo``. Raises UsageError if it names none, or two."""
    if not text.strip():
        raise UsageError(say("side.empty", choices=_choices()))
    prefix, _, rest = text.partition(":")
    if prefix in _KINDS:
        return _checked(PairSide(prefix, rest.strip(), text), repo)
    program = _program(text) if re.search(r"\s", text.strip()) else None
    possible = {
        REF: _is_ref(text, repo),
        RUN: text != WORKING_TREE and _is_run(text),
        SET: re.match(_SETTING, text.strip()),
        CMD: "{port}" in text or (program and shutil.which(program)),
    }
    is_url = re.match(r"https?://\S+$", text, re.IGNORECASE)
    kinds = [URL] if is_url else [kind for kind, fits in possible.items() if fits]
    if not kinds:
        raise UsageError(say("side.none", text=text, why=_why_no_side(text, repo), choices=_choices()))
    if len(kinds) > 1:
        titles, prefixed = " and ".join(map(_title, kinds)), " or ".join(f"{kind}:{text}" for kind in kinds)
        raise UsageError(say("side.several", text=text, titles=titles, prefixed=prefixed))
    return _checked(PairSide(kinds[0], text, text), repo)


def _title(kind: str) -> str:
    return say(f"side.{kind}")


def _choices() -> str:
    return say("side.choices", kinds=", ".join(f"{kind}:" for kind in _KINDS))


def _checked(side: PairSide, repo: Path) -> PairSide:
    """The side, checked to be what its kind says. Raises UsageError."""
    text = side.text
    if not text and side.kind != SET:
        raise UsageError(say("side.nothing_behind", kind=side.kind, title=_title(side.kind)))
    if side.kind == REF and not _is_ref(text, repo):
        find_commit(repo, text)  # says why
    if side.kind == RUN and not _is_run(text):
        raise UsageError(say("side.no_results", text=text, file=MANIFEST))
    if side.kind == SET:
        parse_settings(text)
    if side.kind == CMD:
        if (program := _program(text)) is None:
            raise UsageError(say("side.no_command_line", text=text))
        if "{" not in program and shutil.which(program) is None:
            raise UsageError(say("side.no_program", text=text, program=program))
    return side


def _is_ref(text: str, repo: Path) -> bool:
    top = top_folder(repo)
    return top is not None and (text == WORKING_TREE or find_sha(top, text) is not None)


def _is_run(text: str) -> bool:
    return (Path(text).expanduser() / MANIFEST).is_file()


def _program(text: str) -> str | None:
    """The first word of a command line; None where its quotes are wrong."""
    try:
        return (shlex.split(text) or [""])[0]
    except ValueError:
        return None


def _why_no_side(text: str, repo: Path) -> str:
    """Says why ``text`` is of no kind, with what was probably meant."""
    if Path(text).expanduser().exists():
        return say("side.why_folder", file=MANIFEST)
    if re.search(r"\s", text):
        return say("side.why_command", program=_program(text) or text)
    if (top := top_folder(repo)) is None:
        return say("side.why_no_repository", repo=repo)
    refs = git(top, "for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/remotes", "refs/tags").split()
    near = nearest(text, refs)[:1]
    return say("side.why_no_ref", top=top, near=say("side.near", bool(near), near="".join(near)))


def parse_settings(text: str) -> Settings:
    """Reads ``page_size=16,engine.swap_space=1GiB`` with values as in YAML, as ``-o`` does. Raises UsageError."""
    settings: dict[str, object] = {}
    for part in filter(None, _NEXT_SETTING.split(text.strip())):
        key, sign, value = part.partition("=")
        name = key.strip().removeprefix("engine.")
        name = _NAMES.get(name, name)
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UsageError(say("side.no_setting", part=part))
        if name in settings:
            raise UsageError(say("side.twice", text=text, name=name))
        data: dict[str, dict[str, object]] = {"engine": {}}
        apply_override(data, f"engine.{name}={value}")
        settings |= data["engine"]
        if isinstance(settings[name], dict | list):
            raise UsageError(say("side.several_values", part=part))
    return settings


@dataclass(frozen=True)
class OpenSide:
    """A side with what is launched for it.

    ``build``: of a ref; ``stored``: the folder of a stored run; ``python``: of the engine, where the sides' differ
    """

    side: PairSide
    choice: ChosenTarget
    facts: SideFacts
    build: Build | None = None
    stored: Path | None = None
    python: str | None = None

    @property
    def is_commit(self) -> bool:
        return self.build is not None and self.build.commit.changes is None

    @property
    def name(self) -> str:
        """A short name for a table; of a ref with its commit."""
        if self.build is None:
            return f"{self.side.name} ({shortened(self.python, _LONGEST_NAME)})" if self.python else self.side.name
        commit = self.build.commit
        return f"{self.side.name} ({commit.sha[:7]}{' with changes' if commit.changes else ''})"


def open_side(side: PairSide, workload: Workload, request: CompareRequest, builds: Builds | None = None) -> OpenSide:
    """Chooses or builds what is launched. Raises UsageError, and MeasurementError where a build fails.

    Options that do not apply to this side are ignored; ``require_used`` refuses those that apply to neither.
    """
    if side.kind == RUN:
        return _open_run(side, workload)
    kind = _target_kind(side, request)
    names = [name for name, kinds in KINDS_OF.items() if kind in kinds and name in CompareRequest.model_fields]
    names += [name for name in ("target", "serve_cmd") if side.kind in _KINDS_OF[name]]
    options, build = TargetOptions(**{name: getattr(request, name) for name in names}), None
    if side.kind == REF:
        build = (builds or Builds()).build(find_commit(request.repository, side.text))
        choice = _of_build(build, workload, options)
    elif side.kind == SET:
        choice = _with_settings(side, workload, options)
    else:
        named = {"target" if side.kind == URL else "serve_cmd": side.text}
        choice = choose_target(workload, dataclasses.replace(options, **named))
    more = {"command": _command(choice, build), "target": choice.manifest.to_json()}
    if build is not None:
        more |= build.facts()
    elif _is_builtin(choice):
        require_engine(side.name)
        more |= {"git": git_state(), "versions": versions()}
    python = request.target_python if request.candidate_python else None
    return OpenSide(side, choice, side.facts(**more), build, python=python)


def require_used(sides: Sequence[PairSide], request: CompareRequest) -> None:
    """Raises UsageError for an option that applies to neither side, and for sides that cannot be measured in pairs."""
    kinds = {side.kind for side in sides}
    if RUN in kinds and len(kinds) > 1:
        raise UsageError(say("side.stored_and_live", sides=" and ".join(side.text for side in sides)))
    commands = [side.text for side in sides if side.kind == CMD]
    ours = {_SERVER[-1], "kvbench_engine.server"}
    bare = [text for text in commands if not is_template(text) and not ours.intersection(text.split())]
    if bare and any(map(is_template, commands)):
        raise UsageError(say("side.port_missing", text=bare[0], no_port=say("side.no_port")))
    targets = [_target_kind(side, request) for side in sides]
    if request.candidate_python and (set(targets) != {PRESET} or kinds != {SET}):
        raise UsageError(say("side.candidate_python"))
    if request.target and request.target_python and kinds == {REF}:
        raise UsageError(say("side.python_of_build"))
    if request.target and REF in kinds and PRESET not in targets:
        raise UsageError(say("side.running_ref", target=request.target))
    check_target_options(targets, [name for name in KINDS_OF if getattr(request, name, None)])
    for name, used_by in _KINDS_OF.items():
        if getattr(request, name) and not kinds.intersection(used_by):
            option, titles = name.replace("_", "-"), " or ".join(map(_title, used_by))
            raise UsageError(say("side.unused_option", option=option, kinds=titles))


def left_to_servers(sides: Mapping[str, OpenSide]) -> str | None:
    """Writes which decisions a command or a running server leaves to defaults, as far as its text says."""
    given = [one.side for one in sides.values()]
    texts = [side.text for side in given if side.kind == URL or (side.kind == CMD and is_template(side.text))]
    unset = [name for name in ENGINE_POLICY if any(f"{{{name}}}" not in text for text in texts)]
    return say("side.left_to_servers", names=listing(unset)) if unset else None


def _target_kind(side: PairSide, request: CompareRequest) -> str:
    if side.kind == RUN:
        return _title(RUN)
    if side.kind == URL:
        return RUNNING
    if side.kind == CMD:
        return TEMPLATE if is_template(side.text) else BUILTIN
    command = fill(request.serve_cmd, Path("python"), Path("source")) if request.serve_cmd else None
    return kind_of(request.target, command)


def _with_settings(side: PairSide, workload: Workload, options: TargetOptions) -> ChosenTarget:
    """The target for the workload with the side's settings.

    Raises UsageError for a setting that is swept, unknown, or that the target does not have.
    """
    if swept := [name for name in side.settings if name in workload.sweep]:
        raise UsageError(say("side.swept", text=side.text, name=swept[0]))
    if options.target and options.target not in PRESETS:
        raise UsageError(say("side.running_settings", text=side.text, target=options.target))
    data = copy.deepcopy(dict(workload.resolved))
    data["engine"] = {**(data.get("engine") or {}), **side.settings}
    changed = dataclasses.replace(resolve(data, profile=workload.profile, source=None), source=workload.source)
    choice = choose_target(changed, options)
    for name, value in side.settings.items():
        if value is not None and choice.workload.engine.get(name) != value:
            raise UsageError(say("side.not_measured", text=side.text, notes="; ".join(choice.notes)))
    try:
        choice.check(choice.workload.engine)
    except ValueError as error:
        raise UsageError(say("side.not_taken", text=side.text, error=error)) from None
    return choice


def _of_build(build: Build, workload: Workload, options: TargetOptions) -> ChosenTarget:
    if options.serve_cmd:
        command = built_command(options.serve_cmd, build)
        return choose_target(workload, dataclasses.replace(options, serve_cmd=command))
    if options.target:
        return choose_target(workload, dataclasses.replace(options, target_python=str(build.python)), env=build.env)
    if not is_kvbench(build.source):
        raise UsageError(say("side.not_ours", repo=build.commit.repo))
    launched, limit_s = (str(build.python), *_SERVER), options.start_timeout or _START_S

    def make() -> Target:
        return BuiltinTarget(command=launched, start_timeout_s=limit_s, env=build.env, form=workload.load.form)

    def stepped(settings: Settings) -> SteppedLaunch:
        return SteppedLaunch((str(build.python), *_LOCKSTEP), build.env)

    manifest = measured_target(TargetOptions(), "kvbench", shared=True)
    return ChosenTarget(workload, make, check_configuration, manifest, stepped=stepped)


def _is_builtin(choice: ChosenTarget) -> bool:
    return choice.manifest.backend == "kvbench"


def built_command(text: str, build: Build) -> str:
    """Makes the command that runs in the build's environment, {python} and {worktree} replaced. Raises UsageError."""
    if "{python}" not in text and "{worktree}" not in text:
        raise UsageError(say("side.serve_same", text=text))
    braces = str.maketrans({"{": "{{", "}": "}}"})
    filled = fill(text, *(Path(str(path).translate(braces)) for path in (build.python, build.source)))
    if not (program := _program(filled)):
        raise UsageError(say("side.serve_quotes", text=text))
    if shutil.which(program) is None:
        raise UsageError(say("side.serve_program", text=text, program=program, log=build.log))
    return f"{_env_words(build)} {filled}"


def _env_words(build: Build) -> str:
    gone = [word for name, value in build.env.items() if value is None for word in ("-u", name)]
    return shlex.join(["env", *gone, *(f"{name}={value}" for name, value in build.env.items() if value is not None)])


def _command(choice: ChosenTarget, build: Build | None) -> str | None:
    """The launch command without the engine's flags, for the manifest."""
    if command := choice.manifest.serve_cmd:
        return str(command)
    if build is not None and _is_builtin(choice):
        return f"{_env_words(build)} {shlex.join([str(build.python), *_SERVER])}"
    if _is_builtin(choice):
        return shlex.join(BUILTIN_COMMAND)
    return choice.manifest.target


def _open_run(side: PairSide, workload: Workload) -> OpenSide:
    """A stored run. Raises UsageError if it is incomplete or of another workload."""
    run = RunFolder(Path(side.text).expanduser())
    if not (manifest := run.manifest()).complete:
        raise UsageError(say("side.incomplete", text=side.text))
    now = as_stored(workload.resolved)
    if keys := [key for key in differing_keys(manifest.workload, now) if key.split(".")[0] not in _FREE]:
        raise UsageError(say("side.other_workload", text=side.text, keys=", ".join(keys[:5])))

    def no_target() -> Target:
        raise UsageError(say("side.not_again"))

    kept = {key: value for key, value in manifest.to_json().items() if key in _FACTS_OF_A_RUN and value is not None}
    target = MeasuredTarget(**{key: getattr(manifest, key) for key in STORED})
    choice = ChosenTarget(stored_workload(manifest), no_target, lambda settings: Capacity(), target)
    return OpenSide(side, choice, side.facts(folder=str(run.path), **kept), stored=run.path)


@dataclass(frozen=True)
class PairedWorkload:
    """A workload on both sides, cell by cell. ``capacity``: by side and configuration id."""

    name: str
    sides: Mapping[str, OpenSide]
    matches: tuple[Match, ...]
    capacity: Mapping[str, Mapping[str, Capacity]]

    @property
    def notes(self) -> list[str]:
        sides = [self.sides[side] for side in SIDES]
        notes = [
            say("side.note", workload=self.name, side=name, note=note)
            for name in SIDES
            for note in self.sides[name].choice.notes
        ]
        if all(side.facts.simulated for side in sides):
            notes.append(say("side.simulated", workload=self.name))
        return [*notes, *filter(None, [same_sides(*sides)])]

    def compile(
        self,
        folder: Path,
        tell: Callable[..., None],
        show: Callable[..., None],
        check: Callable[[], None],
        clock: Clock,
    ) -> None:
        """Launches each configuration of a side that may compile at its first launch, so that no pair includes that.

        A launch that fails is only reported: the pairs show whether the server ever starts. ``show``: gets what is
        being done; ``check``: may raise to end it. Raises UsageError for a command that does not take the settings, and
        DeadlineError.
        """
        for side, opened in self.sides.items():
            if opened.choice.runs_already or (opened.build is not None and not opened.build.fresh):
                continue
            for configuration in (match.of(side) for match in self.matches):
                what = say("side.first_launch", side=side, name=opened.name, label=configuration.label)
                log = folder / side / self.name / "logs" / f"first-launch-{configuration.config_id}.log"
                target = opened.choice.new_target()
                target.check = check
                try:
                    with clock.spend(LAUNCH):
                        tell(say("side.compiles", what=what))
                        show(what)
                        target.start(configuration.settings, log)
                except ServerRefusedError as error:
                    bare = opened.side.kind == CMD and not is_template(opened.side.text)
                    hint = say("side.hint", bare, no_port=say("side.no_port"))
                    raise UsageError(say("side.refused", side=side, name=opened.name, error=error, hint=hint)) from None
                except MeasurementError as error:
                    tell(say("side.not_started", side=side, error=error))
                finally:
                    target.stop()


def same_sides(base: OpenSide, candidate: OpenSide) -> str | None:
    """A note that base and candidate are the same, None where they differ."""
    if dict(base.choice.workload.engine) != dict(candidate.choice.workload.engine):
        return None
    if base.build and candidate.build:
        same = base.build.commit.name == candidate.build.commit.name and base.build.digest == candidate.build.digest
        what = say("side.same_commit", base=base.name, candidate=candidate.name)
    else:
        kinds, texts = {base.side.kind, candidate.side.kind}, {base.side.text, candidate.side.text}
        same = (kinds == {SET} or len(kinds) == len(texts) == 1) and base.python == candidate.python
        what = say("side.same", name=base.name)
    return say("side.a_a", what=what) if same else None


def open_workloads(
    sides: Mapping[str, PairSide], given: Sequence[Workload], request: CompareRequest, builds: Builds, held: ExitStack
) -> tuple[PairedWorkload, ...]:
    """Opens both sides of every workload and pairs their cells; ``held`` closes them.

    Raises UsageError, and MeasurementError where a build fails.
    """
    require_used(list(sides.values()), request)
    names = [workload.name for workload in given]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(say("side.two_workloads", name=doubled[0]))
    paired = []
    for workload in given:
        opened, designs, capacity = {}, {}, {}
        for name in SIDES:
            # Its own copy: what one side's target settles must not reach the other's.
            own = dataclasses.replace(workload, resolved=copy.deepcopy(dict(workload.resolved)))
            asked = request
            if name == CANDIDATE and request.candidate_python:
                asked = request.model_copy(update={"target_python": request.candidate_python})
            opened[name] = open_side(sides[name], own, asked, builds)
            held.callback(opened[name].choice.close)
        simulated = [side.name for side in opened.values() if side.facts.simulated]
        if len(simulated) == 1:  # a prediction is no baseline
            raise UsageError(say("side.one_simulated", name=simulated[0]))
        for name, side in opened.items():
            choice = side.choice
            if side.stored is not None:
                measured = measured_design(RunFolder(side.stored), choice.workload)
                designs[name], capacity[name] = select(measured, request.only), {}
            else:
                designs[name], _ = choice.plan(request.only)
                capacity[name] = preflight(choice.workload, designs[name], choice.check).capacity
        matches = match_designs(workload.name, designs[BASE], designs[CANDIDATE])
        paired.append(PairedWorkload(workload.name, opened, matches, capacity))
    if not any(workload.matches for workload in paired):
        raise UsageError(say("side.no_cell", workloads=" and ".join(names)))
    return tuple(paired)


def measured_design(run: RunFolder, workload: Workload) -> Design:
    """The cells that a run measured: the workload's configurations first, in its order, then others.

    They may be fewer than the workload's (--only), or others (a URL has one configuration, whatever is swept).
    """
    declared = make_design(workload.engine, workload.sweep, workload.load_points, workload.design)
    ids = [configuration.config_id for configuration in declared.configurations]
    planned: dict[str, set[str]] = {}
    for block in run.manifest().plan:
        planned.setdefault(block.configuration, set()).update(block.cells)
    cells: list[Cell] = []
    for config_id in sorted(planned, key=lambda name: ids.index(name) if name in ids else len(ids)):
        path = run.cell(min(planned[config_id])) / "summary.json"
        stored = read_record(CellSummary, path, "measure the run again") if path.is_file() else CellSummary()
        label = stored.label or config_id
        configuration = Configuration(config_id, label, stored.settings, stored.varied, stored.is_baseline)
        made = [Cell.of(configuration, load) for load in workload.load_points]
        cells += [cell for cell in made if cell.cell_id in planned[config_id]]
    return Design(tuple({cell.configuration.config_id: cell.configuration for cell in cells}.values()), tuple(cells))
