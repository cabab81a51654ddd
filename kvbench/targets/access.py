"""How a server is reached: with which key, and whom to trust."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.secrets import api_key
from kvbench.load.tls import tls_context


@dataclass(frozen=True)
class Access:
    """How a server is reached: LoadSpec's fields of the same names. The key itself is never kept."""

    api_key_env: str | None = None
    tls_verify: bool = True
    tls_ca_file: str | None = None

    def headers(self) -> dict[str, str]:
        """UsageError when the variable holds no key, or one that cannot be sent."""
        if self.api_key_env is None:
            return {}
        try:
            return {"Authorization": f"Bearer {api_key(self.api_key_env)}"}
        except ValueError as error:
            raise UsageError(str(error)) from None

    def trust(self, base_url: str) -> ssl.SSLContext | bool:
        """Whom a client of httpx trusts; False where nothing is encrypted. UsageError for no file of certificates."""
        if self.tls_ca_file is None and not base_url.startswith("https:"):
            return False  # reading the system's certificates takes 20 ms
        try:
            return tls_context(self.tls_verify, self.tls_ca_file)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def fields(self) -> dict[str, Any]:
        """What LoadSpec is told, apart from defaults."""
        told = {"api_key_env": self.api_key_env, "tls_verify": self.tls_verify, "tls_ca_file": self.tls_ca_file}
        return {name: value for name, value in told.items() if value != getattr(_PLAIN, name)}


_PLAIN = Access()
