"""However large a field is, the event loop is never held up: what it does between two looks at its sockets is counted.

What is counted are the lines that run and the functions that are called in the loop's own thread: no clock, so a busy
machine changes nothing. 30,000 of them take about two milliseconds.
"""

import asyncio
import contextlib
import json
import sys

import pytest

from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.serving.options import ServerOptions
from jaxpaged.serving.service import ServedModel, Service
from tests.engine.fake_core import llm_in_thread
from tests.entrypoints.http.asgi_client import Client

MOST_EVENTS = 30_000
WORDS = "the cat sat on the mat and "
USER = {"role": "user", "content": "a"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT, COMPLETION = {"messages": [USER], "max_tokens": 1}, {"prompt": "a", "max_tokens": 1}
RESPONSE = {"input": "a", "max_output_tokens": 1, "store": False}
IDS = [7] * 200_000


def tools(count):
    return [{"type": "function", "function": {**FUNCTION, "name": f"f{i}"}} for i in range(count)]


ATTACKS = {
    "/v1/completions": [
        {"prompt": WORDS * 50_000},
        {"prompt": WORDS * 50_000, "truncate_prompt_tokens": 9},
        {"prompt": WORDS * 50_000, "truncate_prompt_tokens": -1, "truncation_side": "right"},
        {"prompt": IDS, "truncate_prompt_tokens": 5},
        {"prompt": IDS},
        {"prompt": [[7]] * 100_000},
        {"prompt": ["a"] * 1024},
        {"prompt": [WORDS * 100] * 128},
        {"n": 2048},
        {"n": 2048, "stream": True},
        {"prompt": ["a"] * 1024, "stream": True},
        {"stop": [WORDS * 20_000] * 4},
        {"stop_token_ids": IDS},
        {"allowed_token_ids": IDS},
        {"logit_bias": {str(i): 1 for i in range(1024)}},
        {"logit_bias": {str(i): 1 for i in range(100_000)}},
        {"bad_words": ["x y z " * 170] * 64},
        {"vllm_xargs": {f"k{i}": i for i in range(100_000)}},
        {"vllm_xargs": {"k": [[i] for i in range(4000)]}},
        {"logprob_token_ids": IDS},
        {"something": [{"a": i} for i in range(50_000)]},
        {"structured_outputs": {"choice": [f"{i}" for i in range(4096)]}},
        {"structured_outputs": {"json": {"properties": {f"k{i}": {"type": "string"} for i in range(1000)}}}},
        {"structured_outputs": {"regex": "a" * 200_000}},
    ],
    "/v1/chat/completions": [
        {"messages": [USER] * 40_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 50_000}]},
        {"messages": [USER] * 20_000, "truncate_prompt_tokens": 9},
        {"tools": tools(5000), "tool_choice": "none"},
        {"tools": tools(500), "tool_choice": "required"},
        {"documents": [{"text": "a"}] * 50_000},
        {"chat_template_kwargs": {"k": [[i] for i in range(50_000)]}},
        {"n": 2048},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [*range(20_000)]}}}},
    ],
    "/v1/messages": [
        {"messages": [USER] * 40_000, "max_tokens": 1},
        {"messages": [USER], "max_tokens": 1, "system": [{"type": "text", "text": "a"}] * 50_000},
        {"messages": [USER], "max_tokens": 1, "stop_sequences": ["a"] * 50_000},
        {
            "messages": [USER],
            "max_tokens": 1,
            "tools": [{"name": f"f{i}", "input_schema": {"type": "object"}} for i in range(5000)],
        },
        {"messages": [USER], "max_tokens": 4000, "ignore_eos": True},
    ],
    "/v1/messages/count_tokens": [{"messages": [USER] * 40_000}],
    "/v1/responses": [
        {"input": [USER] * 40_000},
        {"input": [USER] * 3000, "truncation": "auto"},
        {"tools": [{"type": "function", **FUNCTION, "name": f"f{i}"} for i in range(5000)], "tool_choice": "none"},
        {"metadata": {f"k{i}": "a" for i in range(50_000)}},
        {"max_output_tokens": 4000, "ignore_eos": True, "store": True},
    ],
    "/tokenize": [
        {"prompt": WORDS * 5000},
        {"prompt": WORDS * 2000, "return_token_strs": True},
        {"messages": [USER] * 40_000},
    ],
    "/detokenize": [{"tokens": IDS}],
}
VALID = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}
QUICK = [*(("/v1/completions", number) for number in (1, 3, 14, 18)), ("/detokenize", 0)]
CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=() if case in QUICK else pytest.mark.slow)
    for case in [(path, number) for path, changes in ATTACKS.items() for number in range(len(changes))]
]


class Watchdog:
    """The most events between two looks of a loop at its sockets, and where most of these came from."""

    def __init__(self):
        self.most, self.now, self.where = 0, {}, {}

    @contextlib.contextmanager
    def watching(self):
        run_once = asyncio.BaseEventLoop._run_once

        def counted_once(loop):
            self.now = {}
            run_once(loop)
            count = sum(self.now.values())
            if count > self.most:
                self.most, self.where = count, self.now

        def note(frame, event, argument):
            if event != "return":
                self.now[frame.f_code] = self.now.get(frame.f_code, 0) + 1
            return note

        asyncio.BaseEventLoop._run_once = counted_once
        before = sys.gettrace()
        sys.settrace(note)  # of this thread only
        try:
            yield self
        finally:
            sys.settrace(before)
            asyncio.BaseEventLoop._run_once = run_once

    def report(self):
        worst = sorted(self.where.items(), key=lambda item: -item[1])[:5]
        return ", ".join(f"{code.co_qualname} ({code.co_filename.split('/')[-1]}): {count}" for code, count in worst)


@pytest.fixture(scope="module")
def llm():
    with llm_in_thread(max_num_seqs=64, max_model_len=4096) as llm:
        yield llm


def test_the_watchdog_sees_a_long_loop_and_not_the_work_of_other_threads():
    def work():
        return sum([i % 3 for i in range(100_000)])

    async def here():
        work()

    async def there():
        await asyncio.to_thread(work)

    with Watchdog().watching() as seen:
        asyncio.run(there())
    assert seen.most < MOST_EVENTS
    with Watchdog().watching() as seen:
        asyncio.run(here())
    assert seen.most > MOST_EVENTS and "work" in seen.report()


@pytest.mark.parametrize(("path", "number"), CASES)
def test_no_field_however_large_holds_up_the_loop(llm, path, number):
    change = ATTACKS[path][number]
    body = json.dumps({**VALID.get(path, {}), **change}).encode()
    service = Service(llm, ServedModel(("fake",), 4096, 64), ServerOptions())
    client = Client(create_app(service))

    async def ask():
        # Who is served at the same time would share the count: first everything that is made once.
        await client.post("/v1/completions", COMPLETION)
        with Watchdog().watching() as seen:
            answer = await client.post(path, body)
        return answer, seen

    answer, seen = asyncio.run(ask())
    assert answer.status in (200, 400, 413), answer.body[:500]
    assert seen.most <= MOST_EVENTS, f"{list(change)}: {seen.most} events at a time, of {seen.report()}"
