"""The server over an engine that pools."""

import pytest


@pytest.fixture
def ask_pooling(ask):
    """`ask` of a server whose model pools; `pooler` says how."""
    from tests.engine.fake_pooling import EMBEDS, FakePoolingExecutor

    def ask_once(path, body=None, *, pooler=EMBEDS, **settings):
        return ask(path, body, executor=FakePoolingExecutor(pooler.width), pooler=pooler, runner="pooling", **settings)

    return ask_once
