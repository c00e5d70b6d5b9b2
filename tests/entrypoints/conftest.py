"""What tests of HTTP and of gRPC look at alike."""

import pytest

from jaxpaged.entrypoints.http.transport import auth


@pytest.fixture
def compared_keys(monkeypatch):
    """The lengths of what is compared in constant time, (given, known), in order."""
    compared = []

    def compare(given, known):
        compared.append((len(given), len(known)))
        return given == known

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    return compared
