"""`guided_json` and the others, as clients of older releases of vLLM send them."""

import json

import pytest

from jaxpaged.entrypoints.http.openai.fields import SHAPES
from tests.entrypoints.http.saying_model import saying

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}
SAME = [
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json": json.dumps(SCHEMA)}),
    ({"guided_regex": "[ab]+"}, {"regex": "[ab]+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ({"guided_json_object": True}, {"json_object": True}),
    ({"structural_tag": json.dumps(TAG)}, {"structural_tag": json.dumps(TAG)}),
    ({"structural_tag": TAG}, {"structural_tag": TAG}),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": SCHEMA, "whitespace_pattern": " ?"}),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, {"json": SCHEMA}),
    (
        {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar:no-fallback,disable-any-whitespace"},
        {"json": SCHEMA, "disable_any_whitespace": True},
    ),
    ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, {"json": SCHEMA}),
]
BODIES = {
    "/v1/completions": {"prompt": "the cat", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
}


def test_every_shape_has_a_case():
    assert {name for old, _ in SAME for name in old} >= set(SHAPES)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("old", "new"), SAME)
def test_they_mean_what_structured_outputs_does(serving, path, old, new):
    """Before, they were refused with the advice to leave them out, which loses what they ask for."""

    async def scenario(server):
        for body in (old, {"structured_outputs": new}):
            answer = await server.client.post(path, {**BODIES[path], **body})
            assert answer.status == 200, answer.body
        (_, ours, _), (_, same, _) = server.engine.seen
        assert ours.structured_outputs == same.structured_outputs is not None

    serving(scenario, **saying("no"))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": []}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_grammar": "no grammar"}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "guided_decoding_backend": "mine"}, "guided_decoding_backend"),
        ({"guided_regex": "a", "guided_decoding_backend": "guidance:be-nice"}, "guided_decoding_backend"),
        ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "guided_regex"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_what_cannot_be_is_refused_by_the_name_that_the_client_gave(ask, path, body, field):
    answer = ask(path, {**BODIES[path], **body})
    assert (answer.status, answer.error["param"]) == (400, field), answer.body
    assert field.partition("[")[0] in answer.error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_what_asks_for_nothing_passes(ask, path):
    nothing = dict.fromkeys(SHAPES) | {"guided_json_object": False, "guided_decoding_backend": None}
    assert ask(path, {**BODIES[path], **nothing}).status == 200


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ],
)
def test_other_endpoints_refuse_them_and_say_what_to_use(ask, path, body, name):
    answer = ask(path, {**body, name: "a"})
    assert answer.status == 400 and name in answer.error["message"]
