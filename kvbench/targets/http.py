"""HTTP calls to a server under test: with its key and certificates, bounded in time and bytes.

httpx bounds each phase of a call; here the whole answer is bounded as well. Only a server that sends the head of its
answer byte by byte can take longer.
"""

from __future__ import annotations

import json
import ssl
import time
from dataclasses import dataclass
from typing import Any

import httpx

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.secrets import api_key, without_key
from kvbench.load.http import tls_context

MOST_BYTES = 64 << 20  # /metrics of a busy server is under 1 MiB, a page of completions under 10 MiB
_TIMEOUT_S = 10.0  # a busy engine may hold the interpreter for one long step
_KEY_REFUSED = (401, 403)


@dataclass(frozen=True)
class Access:
    """How a server is reached: LoadSpec's fields of the same names. The key itself is never kept."""

    api_key_env: str | None = None
    tls_verify: bool = True
    tls_ca_file: str | None = None

    def headers(self) -> dict[str, str]:
        """Raises UsageError when the variable holds no key, or one that cannot be sent."""
        if self.api_key_env is None:
            return {}
        try:
            return {"Authorization": f"Bearer {api_key(self.api_key_env)}"}
        except ValueError as error:
            raise UsageError(str(error)) from None

    def trust(self, base_url: str) -> ssl.SSLContext | bool:
        """``verify`` of httpx; False where nothing is encrypted. Raises UsageError for a file without certificates."""
        if self.tls_ca_file is None and not base_url.startswith("https:"):
            return False  # reading the system's certificates takes 20 ms
        try:
            return tls_context(self.tls_verify, self.tls_ca_file)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def fields(self) -> dict[str, Any]:
        """Fields of LoadSpec that differ from its defaults."""
        return {name: value for name, value in vars(self).items() if value != getattr(PLAIN_ACCESS, name)}


PLAIN_ACCESS = Access()


@dataclass(frozen=True)
class HttpAnswer:
    """``location``: where a redirect points to."""

    status: int
    body: bytes
    location: str | None = None

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """None when the body is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


class HttpCalls:
    """One client, kept open; usable from several threads."""

    def __init__(self, base_url: str, access: Access = PLAIN_ACCESS, *, timeout_s: float = _TIMEOUT_S) -> None:
        self.base_url, self.access, self.timeout_s = base_url, access, timeout_s
        self._client = httpx.Client(
            base_url=base_url,
            trust_env=False,  # a proxy variable must not carry a local benchmark's traffic elsewhere
            headers=access.headers(),
            verify=access.trust(base_url),
        )

    def call(self, method: str, path: str, *, body: Any = None, timeout_s: float | None = None) -> HttpAnswer:
        """Raises MeasurementError when no whole answer comes."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline, received = time.monotonic() + limit, bytearray()
        try:
            with self._client.stream(method, path, json=body, timeout=limit) as response:
                for piece in response.iter_bytes():
                    received += piece
                    if len(received) > MOST_BYTES:
                        raise httpx.ReadError(f"the answer is longer than {MOST_BYTES >> 20} MiB")
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout(f"the whole answer did not come within {limit:g} s")
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
            raise self.error(f"{path} did not answer ({cause}): {_way_out(cause)}") from None
        return HttpAnswer(response.status_code, bytes(received), response.headers.get("location"))

    def error(self, text: str, kind: type[MeasurementError] = MeasurementError) -> MeasurementError:
        """``text`` follows the server's URL; a key that the server repeated is taken out."""
        return kind(without_key(f"{self.base_url}{text}", self.access.api_key_env))

    def check_access(self, answer: HttpAnswer) -> HttpAnswer:
        """The answer. Raises MeasurementError where it refuses access, or sends the client elsewhere."""
        variable = self.access.api_key_env
        if answer.location is not None and 300 <= answer.status < 400:
            raise self.error(f" redirects to {answer.location}: give the URL that it serves at")
        if answer.status not in _KEY_REFUSED:
            return answer
        if variable is None:
            raise self.error(f" answered {answer.status}: name the variable that holds its API key: --api-key-env NAME")
        raise self.error(f" answered {answer.status}, so it refused the key in {variable}: is it this server's key?")

    def close(self) -> None:
        self._client.close()


def _way_out(cause: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        return "name a file of trusted certificates with --tls-ca-file FILE, or give --no-tls-verify"
    return "is the server running, and is this its URL (http or https, host, port)?"
