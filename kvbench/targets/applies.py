"""Where each option of ``kvbench sweep`` applies that says something of the target; elsewhere it would do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.option_rules import check_exclusive, check_goes_with, flag

BUILTIN = "the built-in server, or a command in its place"
RUNNING = "a server that runs already (--target URL)"
PRESET = "a preset that is launched (--target vllm)"
TEMPLATE = "a --serve-cmd that has {placeholders}"

APPLIES: Mapping[str, tuple[str, ...]] = {
    "preset": (RUNNING, TEMPLATE),
    "exact": (PRESET, TEMPLATE),
    "target_python": (PRESET,),
    "target_args": (PRESET, TEMPLATE),
    "model": (RUNNING,),
    "vocab_size": (RUNNING,),
    "max_model_len": (RUNNING,),
    "tokenizer": (RUNNING,),
    "api_key_env": (RUNNING,),
    "tls_ca_file": (RUNNING,),
    "no_tls_verify": (RUNNING,),
    "port": (BUILTIN, PRESET, TEMPLATE),
    "start_timeout": (BUILTIN, PRESET, TEMPLATE),
}
_OF_THE_WORKLOAD = {"model": "model.config", "max_model_len": "engine.max_model_len", "tokenizer": "model.tokenizer"}
_TLS = ("tls_ca_file", "no_tls_verify")
_ONE_OF_TLS = {_TLS: "one trusts the certificates in a file, the other any"}


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """``kind``: of the target; ``options``: as given. Raises UsageError for one that does nothing there."""
    instead = {name: f"change the workload's with -o {key}=VALUE" for name, key in _OF_THE_WORKLOAD.items()}
    check_goes_with([name for name in APPLIES if options.get(name)], APPLIES, (kind,), instead)


def check_tls(url_flag: str, url: str, options: Mapping[str, Any]) -> None:
    """``url_flag``: of the URL. Raises UsageError for options that contradict it, or each other."""
    given = [name for name in _TLS if options.get(name)]
    check_exclusive(given, _ONE_OF_TLS)
    if given and url.lower().startswith("http://"):
        raise UsageError(f"{flag(given[0])} goes with https://, and {url_flag} is {url}: change one of them")
