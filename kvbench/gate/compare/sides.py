"""A side of a comparison made ready: built where it is a ref, with its settings, its target and its facts."""

from __future__ import annotations

import copy
import dataclasses
import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.git import git_state
from kvbench.common.machine import versions
from kvbench.common.packages import HOUSE
from kvbench.gate.compare import environments, worktrees
from kvbench.gate.compare.builds import Build, Builds
from kvbench.gate.compare.side_text import CMD, REF, RUN, SET, URL, Side
from kvbench.runs.folder import RunFolder
from kvbench.targets.base import Target
from kvbench.targets.builtin import BUILTIN_COMMAND, BuiltinTarget, check_configuration
from kvbench.targets.choose import (
    BUILTIN,
    KINDS_OF,
    RUNNING,
    STORED,
    TEMPLATE,
    Choice,
    check_target_options,
    choose,
    kind_of,
)
from kvbench.targets.launch_plan import is_template
from kvbench.targets.launched import free_port
from kvbench.targets.presets import PRESETS
from kvbench.workload.file import Workload, differing_keys, resolve

_START_S = 180.0
_SERVER = ("-m", "engine.server")
_STORED_RUN = "a folder of results"
_NO_PORT = "A command without {port} gets the built-in server's flags: any other needs it in it (such as --port {port})"
_FREE = ("engine", "sweep", "description")  # of the workload: what two stored runs may differ in


@dataclass(frozen=True)
class OpenSide:
    """``choice``: as a sweep's target is chosen (its workload, ``new_target``, ``check`` ...).

    ``facts``: for the manifest. ``build``: of a ref. ``stored``: the folder of a run that was measured before.
    """

    side: Side
    choice: Choice
    facts: Mapping[str, Any]
    build: Build | None = None
    stored: Path | None = None

    @property
    def name(self) -> str:
        """What it is, in a table; a ref with its commit."""
        return self.side.name if self.build is None else f"{self.side.name} ({_short(self.build)})"

    @property
    def workload(self) -> Workload:
        return self.choice.workload

    @property
    def new_target(self) -> Callable[[], Target]:
        return self.choice.new_target

    @property
    def notes(self) -> tuple[str, ...]:
        return self.choice.notes

    @property
    def needs_first_launch(self) -> bool:
        """Whether a launch compiles what later ones find compiled, so that the first must not be measured."""
        return self.stored is None and not self.choice.probes

    @property
    def refusal_hint(self) -> str:
        """To a command's own sentence when it refuses how it was launched."""
        return f". {_NO_PORT}" if self.side.kind == CMD and not is_template(self.side.text) else ""

    def first_launch(self, settings: Mapping[str, Any], log: Path) -> None:
        """Starts the server once and stops it. Errors as of ``Target.start``.

        After that the kernels of ``settings`` are compiled and the files of both sides have been read once.
        """
        target = self.new_target()
        try:
            target.start(settings, log)
        finally:
            target.stop()

    def close(self) -> None:
        self.choice.close()


def open_side(side: Side, workload: Workload, options: Mapping[str, Any], builds: Builds | None = None) -> OpenSide:
    """``options``: the command line's (those of a sweep's target; ``repo``, ``serve_cmd``); ``builds``: of refs.

    Options that mean nothing for this side are left out: ``require_used`` says which mean nothing at all. Raises
    UsageError, and MeasurementError where a build fails.
    """
    kept = _options_of(side, options)
    if side.kind == RUN:
        return _open_run(side, workload)
    if side.kind == REF:
        return _open_ref(side, workload, kept, builds or Builds())
    if side.kind == URL:
        choice = choose(workload, kept | {"target": side.text}, {})
    elif side.kind == CMD:
        choice = choose(workload, kept | {"serve_cmd": side.text}, {})
    else:
        choice = _with_settings(side, workload, kept)
    facts = {**side.to_json(), "command": _command(choice), "target": dict(choice.manifest)}
    if choice.manifest.get("backend") == "kvbench":
        facts |= {"git": git_state(HOUSE), "versions": versions()}
    return OpenSide(side, choice, facts)


def require_used(sides: Sequence[Side], options: Mapping[str, Any]) -> None:
    """UsageError for an option that means nothing for either side, and for sides that cannot be measured in pairs."""
    if len({side.kind == RUN for side in sides}) > 1:
        raise UsageError(
            f"{' and '.join(side.text for side in sides)}: a stored run is compared only with another stored one, "
            "since pairs are measured side by side; give the ref or the command that it was made with"
        )
    bare = [s for s in sides if s.kind == CMD and not is_template(s.text) and _SERVER[-1] not in s.text.split()]
    if bare and any(side.kind == CMD and is_template(side.text) for side in sides):
        raise UsageError(f"{bare[0].text!r} has no {{port}}, which must be in it. {_NO_PORT}")
    check_target_options([_place(side, options) for side in sides], {name: options.get(name) for name in KINDS_OF})
    ref, own = any(side.kind == REF for side in sides), any(side.kind in (SET, REF) for side in sides)
    for name, used, what in (
        ("target", any(side.kind == SET for side in sides), "settings (page_size=16)"),
        ("serve_cmd", own, "a git ref or settings"),
        ("repo", ref, "a git ref"),
        ("build_cmd", ref, "a git ref"),
        ("rebuild", ref, "a git ref"),
    ):
        if options.get(name) and not used:
            raise UsageError(f"--{name.replace('_', '-')} goes with a side that is {what}: leave it out")


def same_sides(base: OpenSide, candidate: OpenSide) -> str | None:
    """A note where both are the same thing: what is found then is noise. None: they differ."""
    if dict(base.workload.engine) != dict(candidate.workload.engine):
        return None
    if base.build and candidate.build:
        same = base.build.commit.name == candidate.build.commit.name and base.build.digest == candidate.build.digest
        what = f"{base.name} and {candidate.name} are the same commit in the same environment"
    else:
        same = (base.side.kind, base.side.text) == (candidate.side.kind, candidate.side.text) or (
            base.side.kind == candidate.side.kind == SET
        )
        what = f"both sides are {base.name}"
    return f"{what}: this is an A/A comparison, and any difference is noise" if same else None


def _options_of(side: Side, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options that choose() asks for, those that mean nothing for this side as if they were not given."""
    place = _place(side, options)
    kept = {name: options.get(name) if place in where else None for name, where in KINDS_OF.items()}
    of_side = {"target": side.kind == SET, "serve_cmd": side.kind in (SET, REF)}
    return (
        kept
        | {name: options.get(name) if used else None for name, used in of_side.items()}
        | {"repo": options.get("repo")}
    )


def _place(side: Side, options: Mapping[str, Any]) -> str:
    target, command = options.get("target"), options.get("serve_cmd")
    if side.kind == RUN:
        return _STORED_RUN
    if side.kind == URL:
        return RUNNING
    if side.kind == CMD:
        return TEMPLATE if is_template(side.text) else BUILTIN
    command = environments.filled(command, Path("python"), Path("source")) if command else command
    return kind_of(target if side.kind == SET else None, command)


def _with_settings(side: Side, workload: Workload, options: Mapping[str, Any]) -> Choice:
    """The workload with the side's settings. UsageError for one that is swept, unknown, or that the target lacks."""
    if swept := [name for name in side.settings if name in workload.sweep]:
        raise UsageError(
            f"{side.text!r} sets {swept[0]}, which the workload sweeps: leave it out, or add -o 'sweep={{}}'"
        )
    if options.get("target") and options["target"] not in PRESETS:
        raise UsageError(
            f"{side.text!r} cannot be given to a server that runs already ({options['target']}): launch it with "
            "--target NAME or --serve-cmd"
        )
    choice = choose(_laid_on(workload, side.settings), options, {})
    for name, value in side.settings.items():
        if value is not None and choice.workload.engine.get(name) != value:
            raise UsageError(f"{side.text!r} cannot be measured: {'; '.join(choice.notes)}")
    try:
        choice.check(choice.workload.engine)
    except ValueError as error:
        raise UsageError(f"{side.text!r}: {error}") from None
    return choice


def _laid_on(workload: Workload, settings: Mapping[str, Any]) -> Workload:
    """As if each setting had been given with ``-o engine.NAME=VALUE``."""
    data = copy.deepcopy(dict(workload.resolved))
    data["engine"] = {**(data.get("engine") or {}), **settings}
    return dataclasses.replace(resolve(data, profile=workload.profile, source=None), source=workload.source)


def _open_ref(side: Side, workload: Workload, options: Mapping[str, Any], builds: Builds) -> OpenSide:
    repo = Path(options.get("repo") or HOUSE)
    build = builds.build(worktrees.find_commit(repo, side.text))
    if options["serve_cmd"]:
        choice = choose(workload, {**options, "serve_cmd": built_command(options["serve_cmd"], build)}, {})
    elif environments.is_kvbench(build.source):
        choice = _builtin(workload, options, build)
    else:
        raise UsageError(
            f"{build.commit.repo} is not kvbench's own engine, so how it is launched has to be said: --serve-cmd with "
            "{python} or {worktree} for what was built, and {port}"
        )
    facts = {**side.to_json(), **build.facts(), "command": _command(choice, build), "target": dict(choice.manifest)}
    return OpenSide(side, choice, facts, build)


def _builtin(workload: Workload, options: Mapping[str, Any], build: Build) -> Choice:
    port = options["port"] or 0
    if port:
        free_port(port)

    def make() -> Target:
        limit = options["start_timeout"] or _START_S
        return BuiltinTarget(command=(str(build.python), *_SERVER), port=port, start_timeout_s=limit, env=build.env)

    manifest = {**dict.fromkeys(STORED), "backend": "kvbench", "shared_machine": True}
    return Choice(workload, make, check_configuration, manifest)


def built_command(text: str, build: Build) -> str:
    """``text`` with what was built in the place of {python} and {worktree}, in the build's environment. UsageError."""
    if "{python}" not in text and "{worktree}" not in text:
        raise UsageError(
            f"--serve-cmd {text!r} has neither {{python}} nor {{worktree}}, so it would launch the same program "
            "whatever was built: put one of them where the build's Python or folder belongs"
        )
    escaped = str.maketrans({"{": "{{", "}": "}}"})
    paths = [Path(str(path).translate(escaped)) for path in (build.python, build.source)]
    filled = environments.filled(text, *paths, quote=shlex.quote)
    try:
        program = shlex.split(filled)[0]
    except (ValueError, IndexError):
        raise UsageError(f"--serve-cmd {text!r} is not a command line: mend the quotes") from None
    if shutil.which(program) is None:
        raise UsageError(f"--serve-cmd {text!r}: the build has no program {program}; its log is {build.log}")
    return f"{_env_words(build)} {filled}"


def _env_words(build: Build) -> str:
    """The build's variables in front of a command, for a shell or for ``env``."""
    gone = [word for name, value in build.env.items() if value is None for word in ("-u", name)]
    return shlex.join(["env", *gone, *(f"{name}={value}" for name, value in build.env.items() if value is not None)])


def _command(choice: Choice, build: Build | None = None) -> str | None:
    """What launches it, to be read and repeated; the engine's flags come on top."""
    if command := choice.manifest.get("serve_cmd"):
        return str(command)
    if build is not None:
        return f"{_env_words(build)} {shlex.join([str(build.python), *_SERVER])}"
    if choice.manifest.get("backend") == "kvbench":
        return shlex.join(BUILTIN_COMMAND)
    return choice.manifest.get("target")


def _open_run(side: Side, workload: Workload) -> OpenSide:
    """A run as it was stored. UsageError where it is not complete, or of another workload."""
    run = RunFolder(Path(side.text).expanduser())
    manifest = run.manifest()
    if manifest.get("status") != "complete":
        raise UsageError(f"{side.text} is not complete: go on with it first (kvbench sweep --resume {side.text})")
    now = json.loads(json.dumps(workload.resolved, default=str))
    if keys := [key for key in differing_keys(manifest["workload"], now) if key.split(".")[0] not in _FREE]:
        raise UsageError(f"{side.text} was measured with another workload: it differs in {', '.join(keys[:5])}")
    stored = resolve(manifest["workload"], profile=manifest["profile"], source=None)

    def no_target() -> Target:
        raise UsageError(f"{side.text} is a stored run, which cannot be measured again: give its ref or its command")

    facts = {**side.to_json(), "folder": str(run.path)}
    facts |= {key: manifest.get(key) for key in ("git", "versions", "command", "started", "ended", "target")}
    choice = Choice(stored, no_target, lambda settings: {}, {key: manifest.get(key) for key in STORED})
    return OpenSide(side, choice, facts, stored=run.path)


def _short(build: Build) -> str:
    return build.commit.sha[:7] + (" with changes" if build.commit.changes else "")
