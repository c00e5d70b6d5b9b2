"""A model that answers chats with given texts, and what clients read of streams."""

import json

import numpy as np

from tests.engine.fake_engine import FakeExecutor, counting_model
from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
TURN = TOKENIZER.encode("<turn>", add_special_tokens=False)[0]
HEADER = len(TOKENIZER.encode("<turn>assistant\n", add_special_tokens=False))

HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


def answering(text):
    """A model whose answer to every conversation in the template of the tests is `text`."""
    answer = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]

    def model(token_ids):
        begin = len(token_ids) - token_ids[::-1].index(TURN) - 1 + HEADER
        logits = np.full(TOKENIZER.vocab_size, -10.0)
        logits[answer[min(len(token_ids) - begin, len(answer) - 1)]] = 0.0
        return logits - np.log(np.exp(logits).sum())

    return model


def with_room(text=None):
    """Settings of a server that has room for long conversations, and answers `text`, or counts."""
    model = counting_model(TOKENIZER.vocab_size) if text is None else answering(text)
    return {"executor": FakeExecutor(model, TOKENIZER.vocab_size, num_blocks=256), "max_model_len": 512}


def record_shapes(server):
    """The structured outputs of requests, which the engine of the tests cannot constrain: it does not get them."""
    shapes, add_request = [], server.engine.engine.add_request

    def add(request_id, prompt, params, **options):
        params = params.clone()
        shapes.append(params.structured_outputs)
        params.structured_outputs = None
        add_request(request_id, prompt, params, **options)

    server.engine.engine.add_request = add
    return shapes


def events_of(answer):
    """Events of a stream, whose names and numbers are right."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.body
    frames = [frame for frame in answer.body.decode().split("\n\n") if frame and not frame.startswith(":")]
    events = []
    for frame in frames:
        name, _, data = frame.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    numbers = [event["sequence_number"] for event in events]
    assert not numbers or numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return events


def put_together(events):
    """The output items that the deltas of a stream add up to, by index."""
    items = {}
    for event in events:
        place = event.get("output_index")
        match event["type"]:
            case "response.output_item.added":
                assert event["item"]["status"] == "in_progress"
                items[place] = {"type": event["item"]["type"], "text": ""}
            case kind if kind.endswith(".delta"):
                items[place]["text"] += event["delta"]
            case "response.output_text.done" | "response.reasoning_text.done":
                assert items[place]["text"] == event["text"]
            case "response.function_call_arguments.done":
                assert items[place]["text"] == event["arguments"]
    return list(items.values())
