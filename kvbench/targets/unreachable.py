"""Why a server that was named does not serve, and what to do about it: half a sentence after its URL."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import TypeVar

import httpx

from kvbench.targets.bounded import BoundedTransport

_Kind = TypeVar("_Kind", bound=BaseException)

_ASK_S = 2.0
_OTHER_NAME = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
BAD_REQUEST = 400  # what a server says to HTTP without TLS where it speaks TLS
_KEY_REFUSED = (401, 403)


def key_trouble(status: int, api_key_env: str | None) -> str | None:
    """Of an answer's status; None where it is not about the key. ``api_key_env``: where that was read."""
    if status not in _KEY_REFUSED:
        return None
    if api_key_env is None:
        return f"wants an API key (it answered {status}): name the variable that holds it with --api-key-env NAME"
    return f"refused the key in {api_key_env} (it answered {status}): is it the key of this server?"


def connection_trouble(error: httpx.HTTPError, base_url: str) -> str:
    """Of a call that got no answer. Where the scheme may be the mistake the other one is tried, without a key."""
    causes = list(_causes(error))
    if (untrusted := _first(causes, ssl.SSLCertVerificationError)) is not None:
        if untrusted.verify_code in _OTHER_NAME:
            return (
                f"does not serve: its certificate is another name's ({untrusted.verify_message.rstrip('.')}); write "
                "that name in the URL, or give --no-tls-verify"
            )
        return (
            f"does not serve: its certificate is not trusted ({untrusted.verify_message}); name the file of its "
            "authority, or its own, with --tls-ca-file FILE, or give --no-tls-verify"
        )
    if _first(causes, ConnectionRefusedError) is not None:
        return "does not serve: the connection was refused; is the server running, on this port?"
    if (unknown := _first(causes, socket.gaierror)) is not None:
        return f"does not serve: its host is not known ({unknown.strerror}); check the name"
    return scheme_trouble(base_url) or f"does not serve: {str(error) or type(error).__name__}"


def scheme_trouble(base_url: str) -> str | None:
    """That the URL has the wrong one of http and https; None where that is not so, or cannot be known."""
    scheme, _, rest = base_url.rstrip("/").partition("://")
    other = f"{'http' if scheme == 'https' else 'https'}://{rest}"
    try:
        with (
            httpx.Client(transport=BoundedTransport(trust_env=False, verify=False), timeout=_ASK_S) as client,
            client.stream("GET", other) as response,  # whatever follows the status is not waited for
        ):
            status = response.status_code
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    if scheme == "http":
        return f"speaks TLS: write {other}"
    return None if status == BAD_REQUEST else f"speaks no TLS: write {other}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first(causes: Sequence[BaseException], kind: type[_Kind]) -> _Kind | None:
    return next((cause for cause in causes if isinstance(cause, kind)), None)
