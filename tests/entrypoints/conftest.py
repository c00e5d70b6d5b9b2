"""What tests of HTTP and of gRPC look at alike."""

import subprocess

import pytest

from jaxpaged.serving import api_keys


@pytest.fixture
def compared_keys(monkeypatch):
    """The lengths of what is compared in constant time, (given, known), in order."""
    compared = []

    def compare(given, known):
        compared.append((len(given), len(known)))
        return given == known

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    return compared


@pytest.fixture(scope="session")
def pem(tmp_path_factory):
    """(certificate, key) of a server and of a client, each signed by itself. Needs openssl."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client"):
        subprocess.run(
            [
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-days",
                "2",
                "-subj",
                f"/CN={name}",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
                "-keyout",
                folder / f"{name}.key",
                "-out",
                folder / f"{name}.crt",
            ],
            check=True,
            capture_output=True,
        )
    return lambda name: (str(folder / f"{name}.crt"), str(folder / f"{name}.key"))
