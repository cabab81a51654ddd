"""A workload file: YAML -> profile -> ``-o`` overrides -> schema -> one frozen, resolved ``Workload``.

Everything a user can get wrong in the file is refused here, in one sentence, before anything is launched. What the
engine alone can judge (does the KV budget hold a sequence?) is asked of the target by the sweep, also before launch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from kvbench.common.errors import UsageError
from kvbench.common.packages import HOUSE
from kvbench.workload.design import LoadPoint
from kvbench.workload.layers import apply_override, apply_profile, read_yaml, section_of
from kvbench.workload.load_section import LoadConfig, StrictModel, explain

_PATH_KEYS = (("prompts", "file"), ("prompts", "path"), ("prompts", "tokenizer"))


class ModelSection(StrictModel):
    """``model:``: a config name or file with seeded random weights, or a folder with weights."""

    config: str | None = None
    path: str | None = None
    load_format: Literal["auto", "dummy"] | None = None
    seed: int = 0
    dtype: str | None = None
    tokenizer: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.config is None) == (self.path is None):
            given = "both config and path" if self.config else "neither config nor path"
            raise ValueError(f"the model has {given}; give exactly one, e.g. `config: llama-32m`.")
        return self


class WorkloadFile(StrictModel):
    """The whole file once the profile is merged in."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    model: ModelSection
    engine: dict[str, Any] = Field(default_factory=dict)
    design: Literal["one_at_a_time", "full"] = "one_at_a_time"
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    load: dict[str, Any]

    @field_validator("sweep", mode="before")
    @classmethod
    def _nothing_swept(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _lists(self) -> WorkloadFile:
        for key, value in self.engine.items():
            if isinstance(value, dict | list):
                raise ValueError(
                    f"engine.{key} is {value!r}; give one number, text, true or false (lists: sweep.{key})."
                )
        for key, values in self.sweep.items():
            if not values:
                raise ValueError(f"sweep.{key} is an empty list; give at least one value or remove the line.")
            if any(isinstance(v, dict | list) for v in values):
                raise ValueError(f"sweep.{key} holds {values!r}; each value is a number, a text, true or false.")
        return self


@dataclass(frozen=True)
class Workload:
    """A resolved workload.

    ``resolved`` is the plain YAML data that two runs must share to be one sweep. The manifest keeps it, and a run is
    resumed from it in any working folder: its paths are as ``portable`` writes them.
    """

    name: str
    description: str
    source: Path | None
    profile: str
    seed: int
    model: ModelSection
    engine: Mapping[str, Any]  # baseline engine settings, EngineConfig's names, model settings included
    design: str
    sweep: Mapping[str, Sequence[Any]]
    load: LoadConfig
    resolved: Mapping[str, Any]

    @property
    def load_points(self) -> tuple[LoadPoint, ...]:
        return tuple(self.load.points())


def load_workload(
    path: str | Path,
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    repeats: int | None = None,
) -> Workload:
    """Read, merge and check a workload file. Raises UsageError with one sentence.

    ``profile``: ``cpu`` or ``gpu`` (None: gpu when this machine has one, else cpu). ``overrides``: ``key=value`` with
    a dotted key and a YAML value, applied after the profile. ``seed`` and ``repeats`` win over the file.
    """
    source = Path(path)
    data = read_yaml(source)
    if "streams" in data:
        raise UsageError(
            f"{source} has streams and no load: it is made for `kvbench gate counters`; give a workload such as "
            "workloads/mixed.yaml"
        )
    chosen = profile or default_profile()
    data = apply_profile(data, chosen, source, asked=profile is not None)
    for override in overrides:
        apply_override(data, override)
    if seed is not None:
        data["seed"] = seed
    if repeats is not None:
        section_of(data, "load")["repeats"] = repeats
    return resolve(data, profile=chosen, source=source)


def resolve(data: Mapping[str, Any], *, profile: str, source: Path | None) -> Workload:
    """A Workload from plain data whose profile is merged already.

    ``source``: the file, next to which relative paths are looked for; None: the data of a run's manifest, whose
    relative paths start where kvbench lies.
    """
    where = str(source) if source else "the stored workload"
    try:
        file = WorkloadFile.model_validate(dict(data))
    except ValidationError as error:
        raise UsageError(f"{where}: {_sentences(error, '')}") from None
    folder = source.parent if source else HOUSE
    load_data = _with_paths(file.load, folder)
    try:
        load = LoadConfig.model_validate(load_data)
    except ValidationError as error:
        raise UsageError(f"{where}: {_sentences(error, 'load')}") from None
    engine = _engine_settings(file, folder, where)
    return Workload(
        name=file.name,
        description=file.description,
        source=source,
        profile=profile,
        seed=file.seed,
        model=file.model,
        engine=engine,
        design=file.design,
        sweep={key: tuple(values) for key, values in file.sweep.items()},
        load=load,
        resolved={
            **file.model_dump(mode="json", exclude={"load", "model"}),
            "model": _stored_model(file.model, engine),
            "load": _stored_load(load_data),
        },
    )


def _sentences(error: ValidationError, prefix: str) -> str:
    """All mistakes, so that a user mends the file once; the first line is enough to act on."""
    return " ".join(dict.fromkeys(explain(error, prefix)))


def default_profile() -> str:
    """``gpu`` when an NVIDIA driver answers, else ``cpu``; without importing torch."""
    return "gpu" if shutil.which("nvidia-smi") and Path("/dev/nvidiactl").exists() else "cpu"


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the keys at which two resolved workloads differ."""
    different = []
    for key in sorted(set(a) | set(b), key=str):
        left, right = a.get(key), b.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            different += differing_keys(left, right, f"{prefix}{key}.")
        elif left != right:
            different.append(f"{prefix}{key}")
    return different


def find_path(text: str, folder: Path) -> Path | None:
    """A path of the YAML: absolute, or relative to the YAML's folder, then to the working folder."""
    given = Path(text).expanduser()
    for candidate in (given,) if given.is_absolute() else (folder / given, Path.cwd() / given):
        if candidate.exists():
            return candidate.resolve()
    return None


def portable(path: Path) -> str:
    """How a manifest names ``path`` (absolute): from where kvbench lies if it is in there, else as it is."""
    return path.relative_to(HOUSE).as_posix() if path.is_relative_to(HOUSE) else str(path)


def _stored_load(load: Mapping[str, Any]) -> dict[str, Any]:
    """The load section with paths that a resumed run finds; ``load`` as ``_with_paths`` gives it."""
    stored = dict(load)
    for section, key in _PATH_KEYS:
        part = stored.get(section)
        if isinstance(part, dict) and isinstance(part.get(key), str):
            stored[section] = {**part, key: portable(Path(part[key]))}
    return stored


def _stored_model(model: ModelSection, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The model section with paths that a resumed run finds; ``settings`` holds what was found."""
    stored = model.model_dump(mode="json", exclude_none=True)
    found = {"path": settings["model"], "config": settings["model"], "tokenizer": settings.get("tokenizer")}
    return stored | {key: portable(Path(path)) for key, path in found.items() if key in stored}


def _with_paths(load: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of the load section whose files are absolute where they exist."""
    resolved = dict(load)
    for section, key in _PATH_KEYS:
        part = resolved.get(section)
        if isinstance(part, dict) and isinstance(part.get(key), str) and (found := find_path(part[key], folder)):
            resolved[section] = {**part, key: str(found)}
    return resolved


def _engine_settings(file: WorkloadFile, folder: Path, where: str) -> dict[str, Any]:
    """The model and engine sections as one mapping of EngineConfig names."""
    model = file.model
    settings: dict[str, Any] = {"layout": "paged", "seed": model.seed}
    if model.path is not None:
        found = find_path(model.path, folder)
        if found is None:
            raise UsageError(
                f"{where}: the model folder {model.path!r} does not exist: give the folder that holds config.json, "
                "or use `config:` with random weights"
            )
        settings |= {"model": str(found), "load_format": model.load_format or "auto"}
    else:
        named = find_path(model.config or "", folder) if (model.config or "").endswith(".json") else None
        settings |= {"model": str(named or model.config), "load_format": model.load_format or "dummy"}
    if model.dtype is not None:
        settings["dtype"] = model.dtype
    if model.tokenizer is not None:
        settings["tokenizer"] = str(find_path(model.tokenizer, folder) or model.tokenizer)
    clash = sorted({"model", "load_format", "seed", "dtype", "tokenizer"} & set(file.engine))
    if clash:
        raise UsageError(f"{where}: engine.{clash[0]} belongs under `model:`; move it there")
    return settings | {key: value for key, value in file.engine.items() if value is not None}
