"""TLS for those who listen: the files that options name, checked before anything is loaded.

This module knows no socket.
"""

import ssl
from pathlib import Path
from typing import Any

from jaxpaged.errors import UsageError
from jaxpaged.serving.options import ServerOptions


def tls_settings(options: ServerOptions) -> dict[str, Any]:
    """What uvicorn takes, or nothing without a certificate. Raises UsageError for files that do not serve."""
    certificate, key, authorities = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs
    if certificate is None:
        given = [name for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs") if getattr(options, name)]
        if given:
            flag = given[0].replace("_", "-")
            raise UsageError(f"--{flag} is given without a certificate. Add --ssl-certfile, or leave it out.")
        return {}
    if options.ssl_cert_reqs and authorities is None:
        raise UsageError(f"--ssl-cert-reqs {options.ssl_cert_reqs} asks clients for certificates. Add --ssl-ca-certs.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, file in (("ssl-certfile", certificate), ("ssl-keyfile", key), ("ssl-ca-certs", authorities)):
        if file is not None:
            check_readable(name, file)
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # nobody is there to be asked
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"{certificate} and {key or 'no key file'} are no certificate and its key: {error}.") from None
    try:
        if authorities is not None:
            context.load_verify_locations(authorities)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"{authorities} holds no certificates: {error}. Check --ssl-ca-certs.") from None
    return {
        "ssl_certfile": certificate,
        "ssl_keyfile": key,
        "ssl_ca_certs": authorities,
        "ssl_cert_reqs": ssl.VerifyMode(options.ssl_cert_reqs),
    }


def check_readable(option: str, file: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}. Check --{option}.") from None
