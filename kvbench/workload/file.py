"""A workload file: YAML -> profile -> ``-o`` overrides -> schema -> one frozen, resolved ``Workload``.

Every mistake that the file alone shows is refused here, in one sentence, before anything is launched. What needs the
engine's knowledge (does the KV budget hold a sequence?) is checked by the sweep, also before a launch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from kvbench.common import parsing
from kvbench.common.errors import UsageError
from kvbench.common.packages import ENGINE, WORKLOADS, find_file, shipped_name, shipped_path
from kvbench.common.schema import StrictModel, explain
from kvbench.common.text import nearest, shorten
from kvbench.workload.load_section import LoadConfig, LoadPoint
from kvbench.workload.settings import Settings, canonical, named_twice

PROFILES = ("cpu", "gpu")
MODEL_SECTION = frozenset({"model", "load_format", "seed", "dtype", "tokenizer"})  # engine settings below ``model:``
Data = dict[str, Any]
"""Plain data of a workload file: what YAML holds."""
_PATHS = ("file", "path", "tokenizer")
_SHIPPED_MODELS = ENGINE / "models"


def read_yaml(path: Path) -> Data:
    """The mapping in a workload file. Raises UsageError."""
    try:
        data = parsing.read_yaml(path)
    except FileNotFoundError:
        raise UsageError(f"there is no workload file {str(path)!r}: {_other_workloads(path)}") from None
    except IsADirectoryError:
        raise UsageError(f"{str(path)!r} is a folder, not a workload file: {_other_workloads(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the workload file {str(path)!r} cannot be read: {error}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(
            f"{path}: a workload has the keys name, model, engine, load ...; this file is {parsing.kind_of(data)}"
        )
    return data


def parse_yaml(text: str, path: Path) -> Any:
    """Reads ``text`` of the file ``path`` as plain data. Raises UsageError, also for a key that stands twice."""
    try:
        return parsing.parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"{path}: not valid YAML: {error}") from None


def _other_workloads(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    others = {p.stem: p.stem for p in sorted(WORKLOADS.glob("*.yaml"))}
    others |= {p.stem: str(p) for p in sorted(folder.glob("*.yaml"))}
    if near := nearest(path.stem, others):
        return f"did you mean {others[near[0]]}?"
    return f"there are {', '.join(others.values())}" if others else "give the path of a YAML file"


def _apply_profile(data: Data, profile: str, source: Path, *, by_user: bool) -> Data:
    profiles = data.pop("profiles", None) or {}
    if not isinstance(profiles, dict) or not all(isinstance(p, dict | None) for p in profiles.values()):
        raise UsageError(f"{source}: profiles must be a mapping of profile name to settings, such as `cpu: {{...}}`")
    if profile not in profiles and by_user and profile not in PROFILES:
        there = f"it has {', '.join(profiles)}" if profiles else "it has none, so leave --profile out"
        raise UsageError(f"there is no profile {profile!r} in {source}: {there}")
    return _merge(data, profiles.get(profile) or {})


def _merge(base: Data, over: Data) -> Data:
    """Puts the values of ``over`` into ``base``: mappings merge, everything else replaces.

    A mapping with another ``kind``, or with ``config`` in place of ``path`` or the reverse, replaces too.
    """
    merged = dict(base)
    for key, new in over.items():
        old = merged.get(key)
        same = isinstance(old, dict) and isinstance(new, dict)
        if same and "kind" in old and "kind" in new:
            same = old["kind"] == new["kind"]
        elif same:
            same = not ("config" in new and "path" in old) and not ("path" in new and "config" in old)
        merged[key] = _merge(old, new) if same else new
    return merged


def apply_override(data: Data, override: str) -> None:
    """Sets what ``key=value`` says (a dotted key, a YAML value) in ``data``. Raises UsageError."""
    key, sign, text = override.partition("=")
    key = key.strip()
    if not sign or not key:
        raise UsageError(f"-o {override!r} is not key=value: write for example -o engine.kv_budget=64MiB")
    try:
        value = parsing.parse_yaml(text)
    except ValueError:
        given = shorten(text, 60)
        raise UsageError(f"-o {key}: {given!r} is not a YAML value: quote it or mend the brackets") from None
    *parents, last = key.split(".")
    node: Any = data
    for depth, part in enumerate(parents):
        part = _index(node, part, override)
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict | list):
            so_far = f"{'.'.join(parents[: depth + 1])} is {node!r}"
            raise UsageError(f"-o {override!r}: {so_far}, which has no settings below it; set it as a whole")
    node[_index(node, last, override)] = value
    if key == "model.path" and value is not None:  # replaces the file's model and its random weights
        for name in ("config", "load_format"):
            node.pop(name, None)
    elif key == "model.config" and value is not None:
        node.pop("path", None)


def _index(node: Any, part: str, override: str) -> Any:
    if not isinstance(node, list):
        return part
    if not part.isdigit() or int(part) >= len(node):
        raise UsageError(f"-o {override!r}: {part!r} is not an item of that list: use 0 to {len(node) - 1}")
    return int(part)


class ModelSection(StrictModel):
    """A config with seeded random weights, or a folder with weights."""

    config: str | None = None
    """the name of a config that ships (llama-32m, llama-3.1-8b, ...), or a config JSON; weights are random"""
    path: str | None = None
    """instead of `config`: a folder with config.json and safetensors, or kvbench-tiny, which ships"""
    load_format: Literal["auto", "dummy"] | None = None
    """auto: the weights of the folder; dummy: random weights"""
    seed: int = 0
    """seed of random weights"""
    dtype: str | None = None
    """type of weights and activations: float32, bfloat16, float16 or auto"""
    tokenizer: str | None = None
    """folder of the tokenizer. Left out: the model's own, else the one that ships"""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.config is None) == (self.path is None):
            given = "both config and path" if self.config else "neither config nor path"
            raise ValueError(f"the model has {given}; give exactly one, e.g. `config: llama-32m`.")
        return self


class SimulateSection(StrictModel):
    """The machine of `kvbench sweep --simulate`. Options of the same names win over it."""

    device: str
    """one kind of GPU: A100-80GB, H200, ... (docs/simulation.md lists those that can be simulated)"""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """the number of these GPUs that share the model"""
    model: str | None = None
    """a model that `kvbench plan` knows, or its config.json, in place of the workload's"""
    ops: str | None = None
    """a folder of measured operator times. Left out: times come from the device's data sheet"""
    calibration: str | None = None
    """a file that `kvbench dev calibrate-model` wrote"""


def _canonical(settings: Data) -> Data:
    """The settings, or lists of settings to compare, under the names that kvbench writes."""
    return {
        key: [canonical(key, item) for item in value] if isinstance(value, list) else canonical(key, value)
        for key, value in settings.items()
    }


class WorkloadFile(StrictModel):
    """The whole file once the profile is merged in."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """the name of the folder in results/"""
    description: str = ""
    """a sentence for readers"""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """seed of prompts, arrivals and order; the same seed sends the same bytes"""
    model: ModelSection
    """what the engine serves"""
    engine: Annotated[Data, AfterValidator(_canonical)] = Field(default_factory=dict)
    """the baseline: one value for each engine setting that is not at its default"""
    sweep: Annotated[
        dict[str, list[Any]], BeforeValidator(lambda given: {} if given is None else given), AfterValidator(_canonical)
    ] = Field(default_factory=dict)
    """engine settings to compare with the baseline, each with a list of values"""
    design: Literal["one_at_a_time", "full"] = "one_at_a_time"
    """one_at_a_time: measure the baseline and each other value alone; full: measure every combination. With two
    settings of two values these are 3 and 4 configurations. A combination that --only names is measured in any case"""
    max_minutes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """stop a sweep after about so many minutes. Every cell is measured once in any case; further repeats go where they
    decide most. Left out: all repeats"""
    simulate: SimulateSection | None = None
    """the machine of `kvbench sweep --simulate`, such as {device: A100-80GB, tensor_parallel: 4}; ignored without that
    option"""
    load: Data
    """what is sent"""

    @model_validator(mode="after")
    def _single_values(self) -> WorkloadFile:
        swept = [(f"sweep.{key}", value) for key, values in self.sweep.items() for value in values]
        for key, value in [*((f"engine.{key}", value) for key, value in self.engine.items()), *swept]:
            if isinstance(value, dict | list):
                shown = parsing.as_yaml(value)
                raise ValueError(f"{key} is {shown}; give one number, text, true or false (lists: sweep).")
        for key, values in self.sweep.items():
            if not values:
                raise ValueError(f"sweep.{key} is an empty list; give at least one value or remove the line.")
        return self


@dataclass(frozen=True)
class Workload:
    """A resolved workload.

    ``resolved``: plain YAML data, equal for two parts of one sweep. The manifest keeps it, and a run is resumed from it
    in any working folder, since its paths are as ``portable`` writes them.
    """

    name: str
    description: str
    source: Path | None
    profile: str
    seed: int
    model: ModelSection
    engine: Settings  # baseline engine settings, EngineConfig's names, model settings included
    design: str
    sweep: Mapping[str, Sequence[Any]]
    load: LoadConfig
    resolved: Data
    max_minutes: float | None = None  # of a sweep, beyond every cell's first repeat
    simulate: SimulateSection | None = None

    @property
    def load_points(self) -> tuple[LoadPoint, ...]:
        return tuple(self.load.points())


def load_workload(
    path: str | Path,
    *,
    text: str | None = None,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    repeats: int | None = None,
) -> Workload:
    """Reads, merges and checks a workload file. Raises UsageError with one sentence.

    ``text``: what the file would hold; then ``path`` is only its name in messages.
    ``profile``: ``cpu`` or ``gpu`` (None: gpu when this machine has one, else cpu). ``overrides``: ``key=value`` with
    a dotted key and a YAML value, applied after the profile. ``seed`` and ``repeats`` win over the file.
    """
    source = Path(path) if text is not None else find_file(Path(path))
    data = read_yaml(source) if text is None else parse_yaml(text, source)
    if "streams" in data:
        raise UsageError(
            f"{source} has streams and no load: it is made for `kvbench gate counters`; give a workload such as "
            "workloads/mixed.yaml"
        )
    chosen = profile or default_profile()
    data = _apply_profile(data, chosen, source, by_user=profile is not None)
    for override in overrides:
        apply_override(data, override)
    if seed is not None:
        data["seed"] = seed
    if repeats is not None:
        apply_override(data, f"load.repeats={repeats}")
    workload = resolve(data, profile=chosen, source=source if text is None else None, where=str(source))
    for key, values in workload.sweep.items():
        if twice := named_twice(key, values, workload.engine):
            raise UsageError(f"{source}: sweep.{key} {twice}")
    return workload


def resolve(data: Data, *, profile: str, source: Path | None, where: str = "the stored workload") -> Workload:
    """A Workload from plain data whose profile is merged already; ``where``: its name in messages.

    ``source``: the file; relative paths start in its folder. None: the data of a run's manifest, whose relative paths
    are those of files that kvbench ships, or start in the working folder.
    """
    folder = source.parent if source else None
    prefix = ""
    try:
        file = WorkloadFile.model_validate(dict(data))
        prefix = "load"
        load_data = _change_paths(file.load, lambda text: str(_find_path(text, folder) or text))
        load = LoadConfig.model_validate(load_data)
    except ValidationError as error:  # all mistakes, so that a user mends the file once
        raise UsageError(f"{where}: {' '.join(dict.fromkeys(explain(error, prefix)))}") from None
    engine = _engine_settings(file, folder, where)
    stored = file.model.model_dump(mode="json", exclude_none=True)
    paths = {"path": engine["model"], "config": engine["model"], "tokenizer": engine.get("tokenizer")}
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
        max_minutes=file.max_minutes,
        simulate=file.simulate,
        resolved={
            **file.model_dump(mode="json", exclude={"load", "model", "simulate"}),
            **({"simulate": file.simulate.model_dump(exclude_unset=True)} if file.simulate else {}),
            "model": stored | {key: portable(Path(path)) for key, path in paths.items() if key in stored},
            "load": _change_paths(load_data, lambda text: portable(Path(text))),
        },
    )


def default_profile() -> str:
    """Returns ``gpu`` when an NVIDIA driver answers, else ``cpu``; without importing torch."""
    return "gpu" if shutil.which("nvidia-smi") and Path("/dev/nvidiactl").exists() else "cpu"


def runs_on_cpu(device: str) -> bool:
    """Tests whether an engine with the setting ``device`` (cpu, cuda or auto) runs on the CPU."""
    return device == "cpu" or (device == "auto" and default_profile() == "cpu")


def differing_keys(a: Data, b: Data, prefix: str = "") -> list[str]:
    """Lists the dotted keys at which two resolved workloads differ."""
    different = []
    for key in sorted(set(a) | set(b), key=str):
        left, right = parsing.json_at(a, key), parsing.json_at(b, key)
        if isinstance(left, dict) and isinstance(right, dict):
            different += differing_keys(left, right, f"{prefix}{key}.")
        elif left != right:
            different.append(f"{prefix}{key}")
    return different


def _find_path(text: str, folder: Path | None) -> Path | None:
    """A path of the YAML: absolute, or relative to the YAML's folder, the working folder, or to what kvbench ships.

    A stored workload has no ``folder``: what kvbench ships comes first.
    """
    given, shipped = Path(text).expanduser(), (shipped_path(text), WORKLOADS / text)
    relative = (*shipped, Path.cwd() / given) if folder is None else (folder / given, Path.cwd() / given, *shipped)
    for candidate in (given,) if given.is_absolute() else relative:
        if candidate.exists():
            return candidate.resolve()
    return None


def portable(path: Path) -> str:
    """An absolute path as a manifest has it: as in kvbench's repository if kvbench ships it, else as it is."""
    return shipped_name(path) or str(path)


def _change_paths(load: Data, change: Callable[[str], str]) -> Data:
    """A copy of the load section with each file of its prompts and canaries changed."""
    changed = dict(load)
    for name in ("prompts", "canaries"):
        if isinstance(part := parsing.json_at(load, name), dict):
            changed[name] = {k: change(v) if k in _PATHS and isinstance(v, str) else v for k, v in part.items()}
    return changed


def _engine_settings(file: WorkloadFile, folder: Path, where: str) -> Data:
    """The model and engine sections as one mapping of EngineConfig names."""
    model = file.model
    settings: Data = {"layout": "paged", "seed": model.seed}
    if model.path is not None:
        path = _find_path(model.path, folder) or _find_path(model.path, _SHIPPED_MODELS)
        if path is None:
            shipped = ", ".join(sorted(path.name for path in _SHIPPED_MODELS.iterdir()))
            raise UsageError(
                f"{where}: the model folder {model.path!r} does not exist: give the folder that holds config.json or "
                f"the name of a model that ships ({shipped}), or use `config:` with random weights"
            )
        settings |= {"model": str(path), "load_format": model.load_format or "auto"}
    else:
        named = _find_path(model.config or "", folder) if (model.config or "").endswith(".json") else None
        settings |= {"model": str(named or model.config), "load_format": model.load_format or "dummy"}
    if model.dtype is not None:
        settings["dtype"] = model.dtype
    if model.tokenizer is not None:
        settings["tokenizer"] = str(_find_path(model.tokenizer, folder) or model.tokenizer)
    clash = sorted(MODEL_SECTION & set(file.engine))
    if clash:
        raise UsageError(f"{where}: engine.{clash[0]} belongs under `model:`; move it there")
    return settings | {key: value for key, value in file.engine.items() if value is not None}
