"""Fixtures of the tests of executors."""

import pytest

from tests.executor.members import Members


@pytest.fixture
def members():
    made = Members()
    yield made
    made.close()
