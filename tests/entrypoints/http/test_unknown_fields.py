"""Fields of bodies that ask for something are honoured or refused by name: none is passed over with a 200."""

import json

import pytest

from jaxpaged.entrypoints.http.app import admin_endpoints, public_endpoints
from tests.entrypoints.http.live_server import make_service
from tests.entrypoints.http.test_hostile_bodies import ALIASES, BODIES, asked

__all__ = ["asked"]

PATHS = sorted({each.path for each in public_endpoints(make_service()) if each.body is not None})
ASKING = {
    "lora_request": {"lora_name": "a", "lora_int_id": 1, "lora_path": "/a"},
    "temprature": 0.5,
    "max_new_tokens": 5,
    "logits_processors": ["a.b"],
    "typical_p": 0.9,
    "json_schema": '{"type": "object"}',
    "anything": "else",
}


def body_of(path):
    return BODIES[ALIASES.get(path, path)]


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_field_that_asks_for_something_is_refused_by_its_name(asked, path):
    bodies = [json.dumps({**body_of(path), name: value}).encode() for name, value in ASKING.items()]
    for name, answer in zip(ASKING, asked(ALIASES.get(path, path), bodies)):
        assert answer.status == 400, (name, answer.body)
        assert name in answer.error["message"] and answer.error.get("param", name) == name


@pytest.mark.parametrize("path", [each for each in PATHS if each != "/v1/images/inspect"])  # this engine sees nothing
@pytest.mark.parametrize("nothing", [None, False, "", [], {}, 0])
def test_one_that_asks_for_nothing_passes(asked, path, nothing):
    """As clients send it that write all fields they know, with null for those that were not set."""
    whole = body_of(path)
    plain, with_nothing = asked(
        ALIASES.get(path, path), [json.dumps(whole).encode(), json.dumps({**whole, "lora_request": nothing}).encode()]
    )
    assert plain.status == with_nothing.status == 200, with_nothing.body


@pytest.mark.parametrize(
    ("path", "body", "path_of_field"),
    [
        ("/v1/completions", {"stream": True, "stream_options": {"include_usages": True}}, "stream_options"),
        ("/v1/completions", {"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ("/v1/responses", {"reasoning": {"budget": 5}}, "reasoning"),
        ("/v1/responses", {"text": {"formats": {}}}, "text"),
        ("/v1/messages", {"output_config": {"verbosity": "low"}}, "output_config"),
        ("/v1/messages", {"thinking": {"type": "disabled", "budget": 5}}, "thinking"),
    ],
)
def test_options_have_no_unknown_fields_either(asked, path, body, path_of_field):
    [answer] = asked(path, [json.dumps({**body_of(path), **body}).encode()])
    assert answer.status == 400 and path_of_field in answer.error["message"], answer.body


def test_a_slip_is_told_what_was_meant(ask):
    answer = ask("/v1/completions", {"prompt": "a", "temprature": 0.5})
    assert "Did you mean 'temperature'?" in answer.error["message"]
    assert "structured_outputs" in ask("/v1/completions", {"prompt": "a", "regex": "a+"}).error["message"]


@pytest.mark.parametrize(
    ("path", "field", "asking", "nothing"),
    [
        ("/v1/chat/completions", "functions", [{"name": "f"}], []),
        ("/v1/chat/completions", "function_call", {"name": "f"}, "auto"),
        ("/v1/chat/completions", "modalities", ["text", "audio"], ["text"]),
        ("/v1/chat/completions", "audio", {"voice": "a"}, None),
        ("/v1/chat/completions", "verbosity", "low", "medium"),
        ("/v1/chat/completions", "web_search_options", {"search_context_size": "low"}, {}),
        ("/v1/chat/completions", "store", True, False),
        ("/v1/completions", "store", True, None),
        ("/v1/completions", "service_tier", "best", "flex"),
        ("/v1/messages", "speed", "fast", "standard"),
        ("/v1/messages", "inference_geo", "us", None),
        ("/v1/messages", "service_tier", "best", "standard_only"),
        (
            "/v1/messages",
            "context_management",
            {"edits": [{"type": "clear_tool_uses_20250919"}]},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
    ],
)
def test_fields_of_the_apis_that_are_not_served_are_refused_unless_they_ask_for_nothing(
    asked, path, field, asking, nothing
):
    whole = body_of(path)
    refused, passed = asked(path, [json.dumps({**whole, field: value}).encode() for value in (asking, nothing)])
    assert refused.status == 400 and field in refused.error["message"]
    assert passed.status == 200, passed.body


def test_what_clients_say_of_themselves_passes(asked):
    said = {
        "user": "someone",
        "metadata": {"a": "1"},
        "safety_identifier": "a",
        "session_id": "a",
        "prompt_cache_key": "a",
        "prompt_cache_retention": "24h",
        "service_tier": "auto",
    }
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        [answer] = asked(path, [json.dumps({**body_of(path), **said}).encode()])
        assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("/v1/completions", {"max_tokens": 2}, "prompt"),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}}, "prompt"),
        ("/v1/responses", {"conversation": "conv_1"}, "conversation"),
        ("/v1/responses", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/v1/responses", {}, "input"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/v1/embeddings", {}, "input"),
        ("/classify", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/classify", {}, "input"),
    ],
)
def test_what_is_given_in_place_of_a_prompt_is_what_the_refusal_is_about(asked, path, body, field):
    """Before, `prompt_embeds` alone was told that the prompt is missing."""
    [answer] = asked(path, [json.dumps(body).encode()])
    assert answer.status == 400 and answer.error["param"] == field
    assert answer.error["message"].startswith(field)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**64 - 1, 2**70])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_seed_has_64_bits_with_a_sign(asked, path, seed):
    [answer] = asked(path, [json.dumps({**body_of(path), "seed": seed}).encode()])
    assert answer.status == 400 and answer.error["param"] == "seed"


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), -1, 0])
def test_the_largest_seeds_are_served(ask, seed):
    assert ask("/v1/completions", {"prompt": "a", "max_tokens": 2, "n": 2, "seed": seed}).status == 200


@pytest.mark.parametrize("role", ["king", "User", "", "ai"])
def test_a_role_that_nobody_knows_is_refused(ask, role):
    messages = [{"role": "user", "content": "a"}, {"role": role, "content": "a"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = ask(path, {"messages": messages})
        assert answer.status == 400 and answer.error["param"] == "messages[1].role", answer.body


# ---- headers and queries


def test_a_priority_in_the_header_goes_before_that_of_the_body(serving):
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
    bodies = {path: {**BODIES[path], "priority": 1} for path in paths}

    async def scenario(server):
        seen = []
        process = server.engine.input_processor.process

        def noted(*args, **options):
            seen.append(options["priority"])
            return process(*args, **options)

        server.engine.input_processor.process = noted
        for path, body in bodies.items():
            answer = await server.client.post(path, body, x_vllm_priority="-7")
            assert answer.status == 200, answer.body
        return seen

    assert set(serving(scenario, scheduling_policy="priority")) == {-7}


@pytest.mark.parametrize("value", ["5", "-1"])
def test_a_priority_in_the_header_is_refused_where_nobody_goes_by_it(ask, value):
    answer = ask("/v1/completions", {"prompt": "a"}, headers={"x_vllm_priority": value})
    assert answer.status == 400 and answer.error["param"] == "priority"


@pytest.mark.parametrize("value", ["high", "1.5", "", "99999999999999999999"])
def test_a_header_that_is_no_number_is_refused_by_its_name(ask, value):
    answer = ask("/v1/completions", {"prompt": "a"}, headers={"x_vllm_priority": value})
    assert answer.status == 400 and answer.error["param"] == "X-Vllm-Priority"


def test_admin_endpoints_refuse_unknown_query_parameters_and_bodies(serving):
    async def scenario(server):
        admin = [each for each in admin_endpoints(server.service) if "Admin" in each.handler.__qualname__]
        assert len(admin) == 7
        for endpoint in admin:
            ask = server.admin.post if endpoint.method == "POST" else server.admin.get
            answer = await ask(f"{endpoint.path}?leval=1")
            assert answer.status == 400 and answer.error["param"] == "leval", endpoint.path
        answer = await server.admin.post("/sleep?leval=1")
        assert "Did you mean 'level'?" in answer.error["message"]
        answer = await server.admin.post("/sleep", {"mode": "keep"})  # which would end all requests
        assert answer.status == 400 and "in the URL: level, mode" in answer.error["message"]
        assert (await server.admin.post("/wake_up", {})).status == 200

    serving(scenario)
