"""API keys: who is let in, and how the others are told."""

import random

import pytest

from jaxpaged.entrypoints.http.app import admin_endpoints, public_endpoints
from jaxpaged.entrypoints.http.health import OPEN_PATHS
from tests.entrypoints.http.live_server import make_service

KEYS = ("first-key", "schlüssel")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer first-key"},
        {"authorization": "BEARER  first-key "},
        {"x_api_key": "first-key"},
    ],
)
def test_a_request_with_a_known_key_is_served(ask, headers):
    assert ask("/v1/models", keys=KEYS, headers=headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer first-ke"},
        {"authorization": "Bearer first-key2"},
        {"authorization": "Basic first-key"},
        {"authorization": "Bearer "},
        {"authorization": "first-key"},
        {"x_api_key": ""},
        {"authorization": "Bearer wrong", "x_api_key": "first-key"},
    ],
)
def test_a_request_without_a_known_key_gets_401_and_the_error_object(ask, headers):
    answer = ask("/v1/models", keys=KEYS, headers=headers)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.error["type"] == "AuthenticationError" and answer.error["code"] == 401


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/load", "/openapi.json", "/tokenize", "/nope"])
def test_every_path_but_the_probes_is_guarded(ask, path):
    assert ask(path, keys=KEYS).status == 401


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer first-ke"}, {"x_api_key": "\xff"}])
@pytest.mark.parametrize("listener", ["client", "admin"])
def test_every_route_refuses_who_has_no_key_before_it_looks_at_the_body(serving, listener, headers):
    """Every method of every route that there is, with every name for a path that leads there."""
    endpoints = (public_endpoints if listener == "client" else admin_endpoints)(make_service())
    routes = {(each.method, each.path.replace("{id:path}", "a").replace("{id}", "a")) for each in endpoints}
    guarded = {(method, path) for method, path in routes if path not in OPEN_PATHS} | {("GET", "/openapi.json")}
    assert {path for _, path in routes - guarded} == set(OPEN_PATHS)
    draw = random.Random(1)

    async def scenario(server):
        client, statuses = getattr(server, listener), {}
        for method, path in sorted(guarded):
            for spelling in (path, f"{path}/", f"/{path}", f"{path}?key=first-key", path.upper(), f"/health/..{path}"):
                for verb in (method, "HEAD", "OPTIONS", "PUT", "PATCH"):
                    answer = await client.ask(verb, spelling, draw.randbytes(50), headers)
                    statuses[verb, spelling] = answer.status
        return {asked: status for asked, status in statuses.items() if status != 401}

    assert serving(scenario, keys=KEYS) == {}


def test_keys_are_compared_in_constant_time_with_all_that_there_are(serving, compared_keys):
    async def scenario(server):
        for client in (server.client, server.admin):
            for key in ("first-key", "schlüssel", "f", "", "first-key2", "a" * 5000):
                compared_keys.clear()
                await client.get("/metrics", x_api_key=key)
                assert compared_keys == [(32, 32)] * len(KEYS), "digests, of one length whatever was given"

    serving(scenario, keys=KEYS)


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_probes_need_no_key(ask, path):
    assert ask(path, keys=KEYS).status == 200


def test_the_admin_listener_is_guarded_too(serving):
    async def scenario(server):
        refused = await server.admin.post("/reset_prefix_cache")
        served = await server.admin.post("/reset_prefix_cache", authorization="Bearer first-key")
        return refused.status, served.status

    assert serving(scenario, keys=KEYS) == (401, 200)


def test_pages_of_other_sites_may_ask_only_where_the_operator_allows_it(serving):
    async def scenario(server):
        asked = {"origin": "https://page.example", "access_control_request_method": "POST"}
        may = await server.client.ask("OPTIONS", "/v1/completions", b"", asked)
        answer = await server.client.get("/health", origin="https://page.example")
        return may.status, answer.headers.get("access-control-allow-origin")

    allowed = {"allowed_origins": ("https://page.example",)}
    assert serving(scenario, keys=KEYS, options=allowed) == (200, "https://page.example")
    assert serving(scenario, keys=KEYS) == (401, None)
