"""The built-in engine as a target: launches ``python -m kvbench_engine.server`` and watches it.

``engine`` is imported inside functions, so that ``kvbench --help`` stays quick.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.common import processes
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.packages import ENGINE_MODULE
from kvbench.common.ports import free_port
from kvbench.common.preloaded import Preloaded
from kvbench.runs.results import Capacity
from kvbench.targets.base import ModelFacts, SteppedLaunch, Target, reason_of
from kvbench.targets.launch_plan import HOST
from kvbench.targets.launched import ProcessTarget
from kvbench.targets.prompt_texts import TextOfIds, texts_of
from kvbench.workload.file import MODEL_SECTION, runs_on_cpu
from kvbench.workload.request_form import DEFAULT_FORM, RequestForm
from kvbench.workload.settings import Settings

if TYPE_CHECKING:
    from kvbench_engine.kv.budget import KVCapacity

BUILTIN_COMMAND = (sys.executable, "-m", f"{ENGINE_MODULE}.server")
LOCKSTEP_COMMAND = (sys.executable, "-m", f"{ENGINE_MODULE}.lockstep")
ENGINES = Preloaded((BUILTIN_COMMAND[-1], LOCKSTEP_COMMAND[-1]), f"{ENGINE_MODULE}.server.preload")
_READY = re.compile(rb"^ready (http://\S+)\s*$", re.MULTILINE)


class ServerRefusedError(UsageError):
    """The server refused its settings at start (exit code 2)."""


class BuiltinTarget(ProcessTarget):
    """One server process. ``command`` may be another server that takes the same flags and prints ``ready URL``.

    ``env``: added to our environment, as ``processes.launch`` does. ``forked``: whether servers may be forked from a
    process that has imported them, and so have one memory layout; those that are compared must not.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = BUILTIN_COMMAND,
        port: int = 0,
        start_timeout_s: float = 180.0,
        env: Mapping[str, str | None] | None = None,
        form: RequestForm = DEFAULT_FORM,
        forked: bool = False,
    ) -> None:
        super().__init__(port=port, start_timeout_s=start_timeout_s, form=form)
        self.command, self.env, self.forked = tuple(command), dict(env or {}), forked

    def start(self, settings: Settings, log: Path) -> None:
        """Launch and wait until it serves. Raises ServerRefusedError (bad settings) or MeasurementError."""
        from kvbench_engine.server.arguments import command_line

        if self.port:
            free_port(self.port)
        command = [*self.command, *command_line(settings), "--host", HOST, "--port", str(self.port)]
        preloaded = ENGINES if self.forked and imports_as_usual(settings) else None
        with self._launched(command, log, env=self.env, preloaded=preloaded):
            ready = self._wait_ready(lambda: _READY.search(log.read_bytes()))
            self._logged_at_start = ready.end()
            Target.__init__(self, ready[1].decode(), text_of_ids=self._text_of_ids_for(settings))
            try:
                info, row = self.server_info(), self.models()[0]
                length, vocab = row.max_model_len or info.engine.max_model_len, info.model.vocab_size
                if not length or not vocab:
                    raise MeasurementError("/server_info of the server lacks vocab_size or max_model_len")
                self.model = ModelFacts(row.id, vocab, length)
                self.learn_template()
            except MeasurementError as error:
                raise MeasurementError(reason_of(self, error)) from None

    def _text_of_ids_for(self, settings: Settings) -> TextOfIds | None:
        """Makes texts with the server's own tokenizer; None where it is sent ids."""
        if self.dialect.token_id_prompts:
            return None
        from kvbench_engine.config import EngineConfig
        from kvbench_engine.server.tokenizer import tokenizer_folder

        return texts_of(tokenizer_folder(EngineConfig.from_mapping(settings)))

    def _ended_at_start(self, code: int) -> Exception:
        if code != 2:
            return super()._ended_at_start(code)
        last = re.sub(r"^(?:[\w.]+: )?(?:error|Error): ", "", processes.last_lines(self._log, count=1))
        return ServerRefusedError(last or "the server refused its settings and did not say why")


def stepped_builtin(settings: Settings) -> SteppedLaunch:
    """Returns the launch of a process for engines of any settings."""
    return SteppedLaunch(LOCKSTEP_COMMAND)


def imports_as_usual(settings: Settings) -> bool:
    """Tests whether an engine imports what engine/server/preload.py does: in one process, on a CPU, not compiled."""
    return runs_on_cpu(str(settings.get("device", "auto"))) and not settings.get("torch_compile")


def engine_settings_schema() -> dict[str, dict[str, Any]]:
    """A JSON schema of each setting of the built-in engine that a workload's ``engine`` may have, by name."""
    from kvbench_engine.config import BYTE_SETTINGS, CHOICES, KV_CACHE_DTYPE_ALIASES, EngineConfig
    from kvbench_engine.server.arguments import HELP

    kinds = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}
    schema = {}
    for field in dataclasses.fields(EngineConfig):
        if field.name in MODEL_SECTION:
            continue
        kind = {"type": kinds[str(field.type).removesuffix(" | None")]}
        if field.name in CHOICES:
            aliases = KV_CACHE_DTYPE_ALIASES if field.name == "kv_cache_dtype" else ()
            kind = {"enum": [*CHOICES[field.name], *aliases]}
        elif field.name in BYTE_SETTINGS:
            kind = {"type": ["integer", "string"]}
        if field.default is None:
            kind = {"anyOf": [kind, {"type": "null"}]}
        text = HELP[field.name].replace("%%", "%").rstrip(".")
        schema[field.name] = {**kind, "description": text, "default": field.default}
    return schema


def shipped_models() -> list[str]:
    """Names of the models and configs that ship with the built-in engine, each a value of the setting ``model``."""
    from kvbench_engine.model.spec import shipped_models

    return shipped_models()


def kv_dtypes() -> tuple[str, ...]:
    """Values of the built-in engine's setting ``kv_cache_dtype``."""
    from kvbench_engine.config import KV_CACHE_DTYPES

    return KV_CACHE_DTYPES


def check_configuration(settings: Settings) -> Capacity:
    """The KV that the built-in engine would have with ``settings``, without torch and without launching anything.

    Sizes are left out where only the machine can tell them (a GPU's free memory). Raises ValueError with the engine's
    sentence.
    """
    from kvbench_engine.config import EngineConfig
    from kvbench_engine.planning import plan_engine, window_note

    config = EngineConfig.from_mapping(settings)
    plan = plan_engine(config, on_cpu=runs_on_cpu(config.device))
    length, vocab_size = plan.config.max_model_len, plan.spec.text_config.get("vocab_size")
    return known_capacity(plan.capacity, length, vocab_size, plan.dtype, window_note(plan.spec, length))


def known_capacity(
    capacity: KVCapacity | None, max_model_len: int | None, vocab_size: int | None, dtype: str, window_note: str | None
) -> Capacity:
    """The record of a planned engine; without sizes where ``capacity`` is None."""
    facts = Capacity(max_model_len=max_model_len, vocab_size=vocab_size, dtype=dtype, window_note=window_note)
    if capacity is None or max_model_len is None:
        return facts
    sizes = {
        "kv_budget_bytes": capacity.budget_bytes,
        "bytes_per_token": round(capacity.bytes_per_slot * capacity.slots_per_token),
        "scale_bytes_per_token": round(capacity.scale_bytes_per_slot * capacity.slots_per_token),
        "bytes_per_slot": capacity.bytes_per_slot,
        "scale_bytes_per_slot": capacity.scale_bytes_per_slot,
        "windows": capacity.windows,
        "group_slots": capacity.page_sizes,
        "num_slots": capacity.num_slots,
        "page_size": capacity.page_size,
        "num_pages": capacity.num_pages,
        "capacity_tokens": capacity.num_tokens,
        "page_table_bytes": capacity.page_table_bytes,
        "swap_space_bytes": capacity.swap_space_bytes,
        "swap_tokens": int(capacity.host_slots / capacity.slots_per_token),
        "max_concurrency_at_max_len": capacity.max_concurrency(max_model_len),
    }
    return facts.model_copy(update=sizes)
