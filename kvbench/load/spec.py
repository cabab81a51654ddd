"""SPEC.json: the load that the load process is to send."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError, model_validator

from kvbench.common.files import write_json
from kvbench.common.ports import LOCUST_PORT
from kvbench.common.schema import StrictModel, explain
from kvbench.common.secrets import api_key, with_key
from kvbench.load.endpoints import Dialect
from kvbench.load.http import Address, call_bytes
from kvbench.requests.request import RequestList, RequestSpec, read_requests

if TYPE_CHECKING:  # the load process starts without the workload file's models
    from kvbench.workload.load_section import LoadConfig, LoadPoint

ARRIVE_S = 300.0  # how long a master waits for workers on other machines


class LoadSpec(StrictModel):
    """One load. Times in seconds; unset time-outs equal ``timeout_s``. ``send_priority``: requests tell theirs.

    ``max_concurrency``: most requests in flight in open loop; the others wait in the client, and that is part of ttft.
    ``api_key_env``: the name of the environment variable that holds the key; the key itself is in no file.
    ``spare_dir``: for the results if ``out_dir`` has no room for them.
    ``dialect``: what the server's API does differently from OpenAI's. ``processes``: load processes that share it.
    """

    base_url: str
    model: str
    mode: Literal["closed", "open"]
    concurrency: int | None = Field(default=None, ge=1)
    request_rate: float | None = Field(default=None, gt=0)
    requests_file: str
    out_dir: str
    spare_dir: str | None = None
    timeout_s: float = Field(gt=0)
    connect_timeout_s: float = Field(default=5.0, gt=0)
    first_byte_timeout_s: float | None = Field(default=None, gt=0)
    idle_timeout_s: float | None = Field(default=None, gt=0)
    ignore_eos: bool = True
    temperature: float = Field(default=0.0, ge=0)
    send_priority: bool = False
    max_concurrency: int | None = Field(default=None, ge=1)
    api_key_env: str | None = Field(default=None, min_length=1)
    tls_verify: bool = True
    tls_ca_file: str | None = Field(default=None, min_length=1)
    dialect: Dialect = Dialect()
    processes: int = Field(default=1, ge=1)

    @classmethod
    def of(cls, load: LoadConfig, point: LoadPoint, **fields: Any) -> LoadSpec:
        """The spec that sends ``load`` at ``point``; ``fields``: those that neither of them has."""
        shared = load.model_dump(include=set(cls.model_fields)) | vars(point)
        return cls.model_validate({name: shared[name] for name in cls.model_fields if name in shared} | fields)

    def write(self, path: Path) -> None:
        """Writes SPEC.json for ``read_spec``."""
        write_json(path, self.model_dump(exclude_unset=True))

    @model_validator(mode="after")
    def _closed_needs_users(self) -> LoadSpec:
        if self.mode == "closed" and self.concurrency is None:
            raise ValueError("mode closed needs concurrency, the number of users; give at least 1.")
        if self.mode == "closed" and self.max_concurrency is not None:
            why = "has no meaning in mode closed, where concurrency is the cap; remove it or set mode: open."
            raise ValueError(f"max_concurrency {self.max_concurrency} {why}")
        return self


def read_spec(path: str | Path) -> LoadSpec:
    """Reads SPEC.json. ValueError with one sentence per mistake."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the load's spec {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"the load's spec {path} is not JSON: {error}.") from error
    try:
        spec = LoadSpec.model_validate(data)
        return spec.model_copy(update={"model": with_key(spec.model, spec.api_key_env)}) if spec.api_key_env else spec
    except ValidationError as error:
        raise ValueError(" ".join(explain(error, "spec"))) from error


def http_request(spec: LoadSpec, address: Address, request: RequestSpec) -> bytes:
    """The whole request, head and body, in the dialect of the load's server.

    ValueError for a prompt that the server cannot be sent, or a key that is not where the spec says.
    """
    dialect, is_canary = spec.dialect, request.canary is not None  # what a greedy answer of that length is
    if request.prompt is None and not dialect.token_id_prompts:
        raise ValueError(
            f"request {request.index} is a prompt of token ids, which this server does not take; give it text: prompts "
            "of kind text with send_text: true."
        )
    temperature = 0.0 if is_canary else spec.temperature
    body = dialect.streamed_body(spec.model, request, temperature, spec.ignore_eos or is_canary)
    if spec.send_priority and request.priority:  # 0 is what a server takes where nothing is said
        body["priority"] = request.priority
    payload = json.dumps(body, separators=(",", ":")).encode()
    key = api_key(spec.api_key_env) if spec.api_key_env else None
    head = [
        "Accept: text/event-stream",
        "x-kvbench-stamp: 1",  # the built-in server then says when it sent each chunk; others ignore it
        *(["x-kvbench-kv-facts: 1"] if is_canary else []),  # and where the answer's KV was
        *([] if dialect.keep_alive else ["Connection: close"]),
        *([f"Authorization: Bearer {key}"] if key else []),
        *dialect.api.header_lines(key),
    ]
    return call_bytes(address, "POST", dialect.api.path, head, payload)


def requests_of(spec: LoadSpec) -> RequestList:
    """The requests that the spec names. ValueError with a sentence for what is wrong in them."""
    try:
        requests = read_requests(spec.requests_file)
    except OSError as error:
        raise ValueError(f"requests_file {spec.requests_file} cannot be read: {error.strerror}.") from error
    if spec.mode == "open" and any(r.arrival_s is None and not r.turn for r in requests):
        raise ValueError("mode open needs arrival_s in every row of requests_file; build the requests anew.")
    return requests


def parse(argv: list[str]) -> argparse.Namespace:
    """See kvbench/load/run.py. Ends the process with code 2 for what cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.load", description=__doc__)
    parser.add_argument("spec", nargs="?")
    parser.add_argument("--master", action="store_true")
    parser.add_argument("--expect-workers", type=int, default=1)
    parser.add_argument("--bind-host", default="127.0.0.1")
    parser.add_argument("--bind-port", type=int, default=LOCUST_PORT)
    parser.add_argument("--arrive-timeout", type=float, default=ARRIVE_S)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--master-host", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=LOCUST_PORT)
    options = parser.parse_args(argv)
    if options.worker == (options.spec is not None):
        parser.error("give SPEC.json, or --worker without one")
    return options
