"""Whom the client trusts. Apart from the connection itself, so that who asks a server beforehand trusts the same."""

from __future__ import annotations

import ssl


def tls_context(verify: bool = True, ca_file: str | None = None) -> ssl.SSLContext:
    """For all connections to one server: the system's certificates, or those of ``ca_file``.

    ValueError when ``ca_file`` holds no certificates.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror if type(error) is not ssl.SSLError and error.strerror else "it holds no certificate"
        raise ValueError(f"--tls-ca-file {ca_file} cannot be used ({why}); give a PEM file of certificates") from None
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
