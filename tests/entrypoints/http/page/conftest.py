"""A browser, the page over an engine that can be held, and how one asks it."""

import asyncio
import contextlib
import threading

import pytest

from tests.entrypoints.http.browser import browser
from tests.entrypoints.http.live_server import live_server


class Gate:
    """Stands in the engine's way: lets so many steps pass. For any thread."""

    def __init__(self):
        self.steps = threading.Semaphore(0)
        self.is_open = True

    async def wait(self):
        while not self.is_open and not self.steps.acquire(blocking=False):
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def window():
    with browser() as window:
        yield window


@pytest.fixture(scope="module")
def served():
    options = {"enable_prompt_tokens_details": True, "grpc_port": 50051}
    with live_server(options=options, max_model_len=128) as (url, service):
        service.engine.executor.longest_run = 1
        service.engine.go_on = Gate()
        yield url, service.engine


@pytest.fixture
def page(window, served):
    """The page, newly opened, and the engine behind it."""
    url, engine = served
    window.resize(1280, 900)
    window.open(url)
    window.wait_for("document.getElementById('model').textContent === 'fake'")
    yield window, engine
    engine.go_on.is_open = True
    assert window.complaints() == []


@contextlib.contextmanager
def own_server(window, **settings):
    """A server for one test, which the page leaves before it ends: the page would go on to ask it."""
    with live_server(**settings) as served:
        yield served
        window.open("about:blank")


@contextlib.contextmanager
def held(engine, steps):
    """The engine stops after so many steps."""
    engine.go_on.steps = threading.Semaphore(steps)
    engine.go_on.is_open = False
    yield
    engine.go_on.is_open = True


def ask(window, text="hello"):
    window.run("document.getElementById('prompt').focus()")
    window.press(text, "Enter")


def answered(window):
    return window.wait_for("document.querySelector('.answer:not(.busy) .said')?.textContent")
