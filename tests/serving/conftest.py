"""The server without a socket, as for the tests of HTTP."""

from tests.entrypoints.http.conftest import MISSING, ask, serving

__all__ = ["ask", "serving"]
collect_ignore_glob = ["test_*.py"] if MISSING else []
