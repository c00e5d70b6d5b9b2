"""Long conversations: the oldest messages go first, and only if they are asked to."""

import pytest

from jaxpaged.engine.input.tokenizer import PromptTooLongError
from jaxpaged.entrypoints.http.responses.conversation import newest_that_fit
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serving.generate import EngineRequest, PreparedRequest
from jaxpaged.serving.prompts import TokenPrompt

MESSAGES = [{"role": role, "content": str(i)} for i, role in enumerate(["system", *["user", "assistant", "tool"] * 4])]


def kept(room, messages=MESSAGES, most=100):
    """Messages that are kept when each takes ten tokens; more than `most` of them have too many characters."""
    tries = []

    def make(part):
        tries.append(part)
        if len(part) > most:
            raise PromptTooLongError("too many tokens", "prompt")
        return PreparedRequest(EngineRequest("r", [TokenPrompt([1] * 10 * len(part))], SamplingParams()))

    prepared = newest_that_fit(messages, make, room)
    return next(part for part in tries if len(part) * 10 == len(prepared.generation.prompts[0].token_ids)), len(tries)


@pytest.mark.parametrize("room", [0, 39, 40, 69, 70, 99, 100, 129, 130, 1000])
def test_as_many_turns_are_kept_as_fit(room):
    turns = max(1, min(4, (room // 10 - 1) // 3))
    assert kept(room)[0] == MESSAGES[:1] + MESSAGES[-3 * turns :]


def test_what_fits_is_made_once():
    assert kept(130)[1] == 1


def test_what_was_not_even_tokenised_is_left_out_too():
    assert kept(1000, most=7)[0] == MESSAGES[:1] + MESSAGES[-6:]


def test_a_response_is_made_of_the_newest_turns(serving):
    turns = [{"role": role, "content": f"{role[0]}{i}"} for i in range(9) for role in ("user", "assistant")]
    body = {"input": [*turns, {"role": "user", "content": "last"}], "max_output_tokens": 4, "instructions": "be"}

    async def scenario(server):
        refused = await server.client.post("/v1/responses", body)
        made = await server.client.post("/v1/responses", {**body, "truncation": "auto"})
        return refused, made, server.engine.seen[-1][0]["prompt"]

    refused, made, prompt = serving(scenario)
    assert (refused.status, refused.error["param"]) == (400, "input")
    assert made.status == 200 and made.json["truncation"] == "auto" and made.json["usage"]["input_tokens"] <= 60
    assert prompt.startswith("<bos><turn>system\nbe<end>\n<turn>user\n") and "last" in prompt and "u0" not in prompt
